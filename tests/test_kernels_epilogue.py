"""Contractions with epilogues against the float64 interpreter: programs, layouts of extra operands, borders, nests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from costmodel.features import FEATURES, Machine, features
from kernels.families.contraction import CONTRACTION
from kernels.families.contraction_epilogue import epilogue_width
from kernels.reference import evaluate
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from kernels.variants import kernels_for
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from tests.kernel_cases import GPU_LIMITS, touched
from tests.test_kernels_contraction import limits, variant

Shape = tuple[int, int, int, int]  # batch, m, k, n
X = tuple(("x", i) for i in range(8))
T = tuple(("t", i) for i in range(16))

ODD: Shape = (2, 13, 19, 23)
PRIME: Shape = (1, 37, 53, 41)
EVEN: Shape = (2, 12, 16, 16)

BIAS = Expr((("add", X[0], X[1]),), (T[0],))
RESIDUAL = Expr((("add", X[0], X[1]), ("add", T[0], X[2])), (T[1],))
GELU = Expr(
    (
        ("add", X[0], X[1]),
        ("mul", T[0], ("c", 0.7071067811865476)),
        ("erf", T[1]),
        ("add", T[2], ("c", 1.0)),
        ("mul", T[0], ("c", 0.5)),
        ("mul", T[4], T[3]),
    ),
    (T[5], X[0]),
)
"""The activation, and the sum itself, which the backward pass needs."""
SILU_GRAD = Expr(
    (
        ("neg", X[1]),
        ("exp", T[0]),
        ("add", T[1], ("c", 1.0)),
        ("recip", T[2]),
        ("sub", ("c", 1.0), T[3]),
        ("mul", X[1], T[4]),
        ("add", T[5], ("c", 1.0)),
        ("mul", T[3], T[6]),
        ("mul", X[0], T[7]),
    ),
    (T[8],),
)
DROPOUT = Expr(
    (
        ("mul", X[2], ("c", 23)),
        ("add", T[0], X[3]),
        ("rand", X[1], ("c", 3), T[1]),
        ("ge", T[2], ("c", 0.4)),
        ("div", X[0], ("c", 0.6)),
        ("where", T[3], T[4], ("c", 0.0)),
        ("where", X[4], T[5], ("c", -7.0)),
    ),
    (T[6], T[3]),
)
"""A seed, row and column numbers, a mask of bools; two outputs, the second of bools."""
MOMENTUM = Expr(
    (("mul", X[2], ("c", 0.9)), ("add", T[0], X[0]), ("mul", T[1], X[3]), ("sub", X[1], T[2])),
    (T[3], T[1]),
)
"""A parameter and its momentum, both updated in place, and a learning rate."""


def spread(axes: tuple[int, ...]) -> Callable[[tuple[int, int, int]], Layout]:
    """Stored over some axes only, broadcast over the others."""

    def make(shape: tuple[int, int, int]) -> Layout:
        kept = tuple(n if a in axes else 1 for a, n in enumerate(shape))
        return Layout.row_major(kept).expand(shape)

    return make


def ordered(*order: int) -> Callable[[tuple[int, int, int]], Layout]:
    return lambda shape: Layout.row_major(shape, order)


def tiled(*tile: int, **more: str) -> Callable[[tuple[int, int, int]], Layout]:
    return lambda shape: Layout.r_tile(shape, *tile, **more)


def padded(shape: tuple[int, int, int]) -> Layout:
    return Layout.row_major(shape, pad={2: 32})


ROWS = ordered(0, 1, 2)
COLUMNS = ordered(0, 2, 1)
BY_N, BY_M, BY_B, SCALAR = spread((2,)), spread((1,)), spread((0,)), spread(())

F, I, B = "float32", "int32", "bool"  # noqa: E741
PROGRAMS: dict[str, tuple[Expr, list[tuple[str, Callable]], list[tuple[str, Callable]]]] = {
    "bias": (BIAS, [(F, BY_N)], [(F, ROWS)]),
    "residual": (RESIDUAL, [(F, BY_N), (F, ROWS)], [(F, ROWS)]),
    "gelu": (GELU, [(F, BY_N)], [(F, ROWS), (F, ROWS)]),
    "silu gradient": (SILU_GRAD, [(F, ROWS)], [(F, ROWS)]),
    "dropout": (DROPOUT, [(I, SCALAR), (I, BY_M), (I, BY_N), (B, BY_B)], [(F, ROWS), (B, ROWS)]),
    "update": (MOMENTUM, [(F, ROWS), (F, ROWS), (F, SCALAR)], [(F, ROWS), (F, ROWS)]),
}
IN_PLACE = {"update": ((0, 2), (1, 3))}
"""By program: pairs (output, input) that share storage."""


def spec_of(shape: Shape, program: Expr, extras: list[str], outputs: list[str], alpha: float = 0.5) -> OpSpec:
    b, m, k, n = shape
    wide = [(b, m, n)] * (len(extras) + len(outputs))
    dtypes = (F, F, *extras, *outputs)
    attrs = (("alpha", alpha), ("epilogue", program))
    return OpSpec("contraction", ((b, m, k), (b, k, n), *wide), dtypes, 2 + len(extras), attrs)


def case(
    name: str, shape: Shape, a: Callable = ROWS, b: Callable = ROWS, **changed: dict[int, Callable]
) -> tuple[OpSpec, tuple[Layout, ...]]:
    """A program over a shape; ``extras`` and ``outputs`` change layouts by position."""
    program, extras, outputs = PROGRAMS[name]
    extra = [changed.get("extras", {}).get(i, make) for i, (_, make) in enumerate(extras)]
    output = [changed.get("outputs", {}).get(i, make) for i, (_, make) in enumerate(outputs)]
    spec = spec_of(shape, program, [d for d, _ in extras], [d for d, _ in outputs])
    spec = replace(spec, inplace=IN_PLACE.get(name, ()))
    layouts = tuple(make(s) for make, s in zip([a, b, *extra, *output], spec.shapes, strict=True))
    return spec, layouts


def arrays(spec: OpSpec, layouts: tuple[Layout, ...]) -> list[np.ndarray]:
    """Random inputs, constant along axes that their layouts broadcast; row and column numbers count."""
    rng = np.random.default_rng(0)
    out = []
    for dtype, layout in zip(spec.dtypes[: spec.inputs], layouts, strict=False):
        x = rng.standard_normal(layout.shape).astype(np.float32)
        if dtype == I:
            x = rng.integers(0, 1000, layout.shape).astype(np.int32)
        if dtype == B:
            x = rng.random(layout.shape) < 0.7
        for axis in range(3):
            modes = layout.axis_modes(axis)
            if modes and all(mode.stride == 0 for mode in modes):
                x[:] = x.take([0], axis)
        out.append(x)
    return out


def check(device_index: int, kernels: Iterable[Kernel | None]) -> None:
    """Kernels of one spec whose operands are broadcast alike, built together."""
    from kernels.testing import check_kernels, opencl_devices

    made = [kernel for kernel in kernels if kernel is not None]
    assert made, "no variant accepts these layouts"
    spec = made[0].spec
    inputs = arrays(spec, made[0].layouts)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    rtol = 2e-6 * max(4, spec.shapes[0][2] ** 0.5)
    check_kernels(opencl_devices()[device_index], made, inputs, expected, rtol)


def staged(**params: int) -> KernelVariant:
    full = {"bm": 32, "bn": 64, "bk": 16, "tm": 4, "tn": 4, "slices": 1, "q": 1} | params
    return KernelVariant("contraction", "staged", tuple(full.items()))


def whole_tiles(shape: tuple[int, int, int]) -> Layout:
    """b[b,k,n] in R-Tiles with k inside, as tile.n reads it."""
    return Layout.r_tile((shape[0], shape[2], shape[1]), 4, 4).permute((0, 2, 1))


OWN: dict[str, tuple[KernelVariant, Callable, Callable]] = {
    "outer.n": (variant("outer.n"), ROWS, ROWS),
    "outer.n wide": (variant("outer.n", v=16, nv=1, mr=2), ROWS, ROWS),
    "outer.m": (variant("outer.m"), COLUMNS, ROWS),
    "dot": (variant("dot"), ROWS, COLUMNS),
    "dot of pairs": (variant("dot", nr=2), ROWS, COLUMNS),
    "dot of four rows a vector": (variant("dot", mr=4, nr=4, v=16), ROWS, COLUMNS),
    "tile.n": (variant("tile.n"), ROWS, whole_tiles),
    "any": (variant("any"), ROWS, ROWS),
    "many items": (variant("outer.n", nv=1, t=1, s=1, gr=2, gc=4), ROWS, ROWS),
    "staged": (staged(), ROWS, ROWS),
    "staged split": (staged(q=2, bk=8, bm=32, bn=32), ROWS, ROWS),
}
"""Every body, with tiles that leave borders: variant, layout of a, layout of b."""


def own_kernels(name: str, shape: Shape, **changed: dict[int, Callable]) -> list[Kernel]:
    """The program by every body; all must take the layouts."""
    out = []
    for which, (own, a, b) in OWN.items():
        kernel = CONTRACTION.build(own, *case(name, shape, a, b, **changed))
        assert kernel is not None, f"{which} declined these layouts"
        out.append(kernel)
    return out


# ---- right on every device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropout", "update"])
def test_every_enumerated_variant(device_index: int, name: str) -> None:
    """As enumerated for this device and for a GPU, on primes that leave borders everywhere."""
    for device in (limits(device_index), GPU_LIMITS):
        ran: dict[str, Kernel] = {}
        for a, b in ((ROWS, ROWS), (COLUMNS, COLUMNS), (ROWS, COLUMNS), (tiled(4, 4), whole_tiles)):
            spec, layouts = case(name, PRIME, a, b)
            ran = {kernel.variant.label: kernel for kernel in kernels_for(spec, layouts, device)} | ran
        assert set(ran) == {v.label for v in CONTRACTION.variants(spec, device)}
        check(device_index, ran.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(device_index: int, name: str) -> None:
    check(device_index, own_kernels(name, ODD))


def test_without_borders(device_index: int) -> None:
    check(device_index, own_kernels("gelu", EVEN))


WAYS: dict[str, Callable] = {
    "columns": COLUMNS,
    "batch innermost": ordered(1, 2, 0),
    "tiles": tiled(4, 4),
    "wide tiles": tiled(2, 8),
    "tiles by columns": tiled(8, 4, inner="col", outer="col"),
    "odd tiles": tiled(3, 5),
    "rows padded": padded,
}


@pytest.mark.parametrize("way", [*WAYS, "down", "one number"])
def test_extra_operands_in_any_layout(device_index: int, way: str) -> None:
    make = {**WAYS, "down": BY_M, "one number": SCALAR}[way]
    check(device_index, own_kernels("residual", ODD, extras={1: make}))


@pytest.mark.parametrize("way", ["columns", "batch innermost", "tiles by columns", "odd tiles", "rows padded"])
def test_what_is_updated_in_any_layout(device_index: int, way: str) -> None:
    """A parameter in one layout, its momentum in another."""
    check(device_index, own_kernels("update", ODD, extras={0: WAYS[way]}, outputs={0: WAYS[way]}))


@pytest.mark.parametrize("way", ["columns", "tiles", "tiles by columns", "rows padded"])
def test_outputs_in_any_layouts(device_index: int, way: str) -> None:
    """The first in one layout and the second in another, both ways."""
    both = [own_kernels("gelu", EVEN, outputs={which: WAYS[way]}) for which in (0, 1)]
    check(device_index, [kernel for kernels in both for kernel in kernels])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 70, 3), (3, 2, 5, 1), (2, 3, 64, 10)], ids=str)
def test_small_extents(device_index: int, shape: Shape) -> None:
    spec, layouts = case("gelu", shape)
    own = (variant("outer.n", v=2), variant("any"), staged(bm=32, bn=32))
    check(device_index, [CONTRACTION.build(v, spec, layouts) for v in own])


def test_heads_of_a_residual(device_index: int) -> None:
    """An attention output whose extra operand is stored [tokens, features] and seen by heads."""
    batch, heads, seq, dim = 2, 3, 7, 8
    stored = Layout.row_major((batch * seq, heads * dim)).reshape((batch, seq, heads, dim))
    assert stored is not None
    view = stored.permute((0, 2, 1, 3)).reshape((batch * heads, seq, dim))
    assert view is not None
    shape = (batch * heads, seq, 19, dim)
    check(device_index, own_kernels("residual", shape, extras={1: lambda _: view}, outputs={0: lambda _: view}))


# ---- nests: what is declared is what is touched ---------------------------------------------------------------------


@pytest.mark.parametrize("which", OWN)
def test_nest_touches_each_element_once(which: str) -> None:
    shape: Shape = (2, 7, 24, 9)
    own, a, b = OWN[which]
    spec, layouts = case("gelu", shape, a, b, outputs={1: tiled(4, 4)})
    kernel = CONTRACTION.build(own, spec, layouts)
    assert kernel is not None
    for output in (3, 4):
        counts: Counter[int] = Counter()
        for launch in kernel.launches:
            counts.update(touched(kernel, launch.nest, output, True, {}))
            assert not touched(kernel, launch.nest, output, False, {})
        assert set(counts) == set(layouts[output].linear_offsets().ravel().tolist())
        assert set(counts.values()) == {1}
    loads = [o for launch in kernel.launches for o in touched(kernel, launch.nest, 2, False, {})]
    assert set(loads) == set(range(shape[3]))


def test_nest_counts_the_arithmetic_of_the_epilogue() -> None:
    """Without borders: the product's own, and the program's per element."""
    b, m, k, n = shape = (2, 12, 16, 16)
    spec, layouts = case("residual", shape)
    kernel = CONTRACTION.build(variant("outer.n"), spec, layouts)
    assert kernel is not None
    assert kernel.launches[0].nest.flops == 2 * b * m * k * n + 2 * b * m * n


def test_features_count_functions_of_the_epilogue() -> None:
    """One erf per element, in vectors as wide as the kernel finishes its sums in."""
    machine = Machine.of(DeviceLimits(), ())
    b, m, _, n = shape = (1, 96, 64, 128)
    spec, layouts = case("gelu", shape)
    plain = OpSpec("contraction", spec.shapes[:2] + spec.shapes[-1:], (F,) * 3, 2)
    for own, width in ((variant("outer.n", mr=4, v=8), 8), (variant("any"), 1)):
        kernel = CONTRACTION.build(own, spec, layouts)
        bare = CONTRACTION.build(own, plain, (*layouts[:2], layouts[-1]))
        assert kernel is not None
        assert bare is not None
        more = dict(zip(FEATURES, features(kernel, machine), strict=True))
        less = dict(zip(FEATURES, features(bare, machine), strict=True))
        assert less["transcendentals"] == 0
        assert more["transcendentals"] == pytest.approx(2.5 * prod((b, m, n)) / 2)
        assert more["transcendental_slots"] == pytest.approx(more["transcendentals"] / width)
        assert more["unique_bytes"] > less["unique_bytes"]
        assert more["flops"] > less["flops"]


def test_same_variants_as_without() -> None:
    """Register tiles follow the product: a plan's choice does not grow with the epilogue."""
    spec, _ = case("gelu", (1, 512, 256, 384))
    plain = OpSpec("contraction", (*spec.shapes[:2], spec.shapes[-1]), (F,) * 3, 2)
    for kind in ("cpu", "gpu"):
        device = DeviceLimits(kind=kind)
        assert CONTRACTION.variants(spec, device) == CONTRACTION.variants(plain, device)


# ---- what is asked for ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "lines"),
    [(ROWS, 3), (COLUMNS, 48), (tiled(4, 4), 12), (BY_N, 0), (BY_M, 0)],
    ids=["rows", "columns", "tiles", "by n", "by m"],
)
def test_lines_asked_for_are_those_of_a_row(extra: Callable, lines: int) -> None:
    """48 floats begin 3 lines of 64 bytes, 48 where columns are far apart; what is broadcast is there anyway."""
    spec, layouts = case("residual", (1, 64, 64, 96), extras={1: extra})
    (launch,) = built("outer.n", spec, layouts, mr=8, nv=3, v=16).launches
    assert str(launch.preamble).count("ASK(E3+") == lines
    assert dict(launch.defines)["KT"] == (8 if lines else 64)


def test_bytes_are_asked_for_by_their_lines() -> None:
    """A mask of bools takes a quarter of the lines."""
    spec, layouts = case("dropout", (1, 64, 64, 192), extras={3: ROWS})
    (launch,) = built("outer.n", spec, layouts, mr=8, nv=2, v=16).launches
    assert str(launch.preamble).count("ASK(E5+") == 1


@pytest.mark.parametrize(("name", "params"), [("outer.n", {"gr": 2, "gc": 4, "nv": 1}), ("dot", {})])
def test_nothing_is_asked_for_elsewhere(name: str, params: dict[str, int]) -> None:
    """On GPUs other work items run meanwhile; a dot product's tiles are shorter than a line."""
    spec, layouts = case("residual", (1, 64, 64, 96), ROWS, COLUMNS if name == "dot" else ROWS)
    assert "ASK" not in str(built(name, spec, layouts, **params).launches[0].preamble)


# ---- several rows in a vector ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "width"),
    [({"mr": 4, "nr": 4}, 16), ({"mr": 6, "nr": 4}, 8), ({"mr": 8, "nr": 2}, 16), ({"mr": 3, "nr": 1}, 1)],
    ids=str,
)
def test_short_rows_share_a_vector(params: dict[str, int], width: int) -> None:
    spec, layouts = case("gelu", (1, 96, 64, 96), ROWS, COLUMNS)
    assert epilogue_width(built("dot", spec, layouts, v=16, **params)) == width


def built(name: str, spec: OpSpec, layouts: tuple[Layout, ...], **params: int) -> Kernel:
    kernel = CONTRACTION.build(variant(name, **params), spec, layouts)
    assert kernel is not None
    return kernel
