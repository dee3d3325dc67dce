"""Pointwise kernels and relayouts on every device, and the simplification of their domains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.expr_c import expr_flops, used_inputs
from kernels.families.common import MAX_RANK, largest_divisor, simplify
from kernels.families.domain import fat_walk, thin_walk
from kernels.nest import Nest, Phase
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, Kernel, KernelVariant
from kernels.testing import check_kernel, check_kernels
from kernels.variants import kernels_for
from layoutopt.expr import ARITY, random_uniform
from layoutopt.graph import Expr
from layoutopt.layout import Layout, Mode
from tests.kernel_cases import GPU_LIMITS, MATRIX_LAYOUTS, check_all, kernels_of, make_spec, touched

IDENTITY = Expr((), (("x", 0),))
GELU_BIAS = Expr(
    (
        ("add", ("x", 0), ("x", 1)),
        ("mul", ("t", 0), ("c", 0.7071067811865476)),
        ("erf", ("t", 1)),
        ("add", ("t", 2), ("c", 1)),
        ("mul", ("t", 0), ("c", 0.5)),
        ("mul", ("t", 4), ("t", 3)),
    ),
    (("t", 5),),
)
ADAM = Expr(
    (
        ("mul", ("x", 2), ("c", 0.9)),
        ("mul", ("x", 1), ("c", 0.1)),
        ("add", ("t", 0), ("t", 1)),
        ("mul", ("x", 1), ("t", 1)),
        ("mul", ("x", 3), ("c", 0.99)),
        ("add", ("t", 3), ("t", 4)),
        ("sqrt", ("t", 5)),
        ("add", ("t", 6), ("c", 1e-3)),
        ("div", ("t", 2), ("t", 7)),
        ("mul", ("t", 8), ("x", 4)),
        ("sub", ("x", 0), ("t", 9)),
    ),
    (("t", 10), ("t", 2), ("t", 5)),
)
CPU = DeviceLimits(kind="cpu", simd_width=16)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- relayouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "shape", "tile"),
    [
        ("row-major", "transposed", (37, 41), True),
        ("transposed", "row-major", (33, 64), True),
        ("row-major", "r-tile 4x4", (13, 37), False),
        ("r-tile 4x4", "head", (32, 48), False),
        ("transposed", "r-tile 4x4", (13, 37), True),
        ("r-tile 8x16 by columns", "row-major", (19, 50), True),
        ("row panels", "column panels", (37, 41), True),
        ("pitch", "row panels", (40, 35), True),
        ("head", "r-tile 8x16 by columns", (3, 5), False),
    ],
)
def test_relayout(device_index: int, source: str, target: str, shape: tuple[int, int], tile: bool) -> None:
    x = normal(*shape)
    spec = make_spec("pointwise", [x], [shape], {"expr": IDENTITY})
    ran = check_all(device_index, spec, [MATRIX_LAYOUTS[source](shape), MATRIX_LAYOUTS[target](shape)], [x])
    if devices()[device_index].limits.kind == "cpu":  # a GPU has no use for fat items
        assert ("tile_fat" in ran) == tile


def test_relayout_of_integers_and_bools(device_index: int) -> None:
    shape = (17, 20)
    layouts = [Layout.row_major(shape), Layout.row_major(shape, (1, 0))]
    for x in (np.arange(340, dtype=np.int32).reshape(shape), normal(*shape) > 0):
        dtype = "int32" if x.dtype.kind == "i" else "bool"
        check_all(device_index, make_spec("pointwise", [x], [shape], {"expr": IDENTITY}, [dtype]), layouts, [x])


# ---- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["row-major", "r-tile 4x4", "row panels", "head"])
def test_bias_and_gelu(device_index: int, name: str) -> None:
    shape = (13, 37)
    x, bias = normal(*shape), np.broadcast_to(normal(37, seed=1), shape)
    layouts = [MATRIX_LAYOUTS[name](shape), Layout.row_major((37,)).expand(shape), MATRIX_LAYOUTS["row-major"](shape)]
    check_all(device_index, make_spec("pointwise", [x, bias], [shape], {"expr": GELU_BIAS}), layouts, [x, bias])


@pytest.mark.parametrize("name", ["row-major", "r-tile 4x4", "transposed"])
def test_update_in_place(device_index: int, name: str) -> None:
    """Three outputs over three of the inputs; R-Tile of this shape has padding and is walked linearly."""
    shape = (13, 37)
    layout, scalar = MATRIX_LAYOUTS[name](shape), Layout.row_major(()).expand(shape)
    p, g, m, v = (normal(*shape, seed=s) for s in range(4))
    inputs = [p, g, m, np.abs(v), np.full(shape, 1e-2, np.float32)]
    spec = make_spec("pointwise", inputs, [shape] * 3, {"expr": ADAM}, inplace=((0, 0), (1, 2), (2, 3)))
    ran = check_all(device_index, spec, [*[layout] * 4, scalar, *[layout] * 3], inputs)
    if devices()[device_index].limits.kind == "cpu":
        assert ("linear_fat" in ran) == (name == "r-tile 4x4")


def test_heads_of_a_stored_matrix(device_index: int) -> None:
    """[batch, head, sequence, dim] in [batch * sequence, head * dim], masked by booleans and integers."""
    b, s, h, d = 3, 13, 4, 15
    stored = Layout.row_major((b * s, h * d)).reshape((b, s, h, d))
    assert stored is not None
    shape = (b, h, s, d)
    keep = np.random.default_rng(1).random((b, 1, 1, d)) > 0.3
    ids = np.arange(s, dtype=np.int32).reshape(s, 1)
    expr = Expr(
        (("le", ("x", 2), ("c", 6)), ("and", ("t", 0), ("x", 1)), ("where", ("t", 1), ("x", 0), ("c", -3.4e38))),
        (("t", 2), ("t", 1)),
    )
    inputs = [normal(*shape), np.broadcast_to(keep, shape), np.broadcast_to(ids, shape)]
    layouts = [
        stored.permute((0, 2, 1, 3)),
        Layout.row_major(keep.shape).expand(shape),
        Layout.row_major(ids.shape).expand(shape),
        Layout.row_major(shape),
        Layout.row_major(shape, (3, 1, 0, 2)),
    ]
    check_all(
        device_index, make_spec("pointwise", inputs, [shape] * 2, {"expr": expr}, ["float32", "bool"]), layouts, inputs
    )


@pytest.mark.parametrize("dense", ["first", "second"])
def test_an_outer_digit_that_lies_densest(device_index: int, dense: str) -> None:
    """[12, 6 * 9] whose sixes are contiguous, beside rows that are padded, so that the axis cannot be cut for both."""
    shape = (12, 54)
    scattered = Layout.build(shape, [Mode(0, 3, 216), Mode(0, 4, 6), Mode(1, 6, 1), Mode(1, 9, 24)], (648,))
    padded = Layout.tiled(shape, {1: 8})
    layouts = [scattered, padded, padded] if dense == "first" else [padded, padded, scattered]
    x, y = normal(*shape), normal(*shape, seed=1)
    add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
    check_all(device_index, make_spec("pointwise", [x, y], [shape], {"expr": add}), layouts, [x, y])


def test_scalars_and_no_inputs(device_index: int) -> None:
    scalar = np.asarray(np.float32(2.5))
    expr = Expr((("rsqrt", ("x", 0)), ("add", ("t", 0), ("c", 1))), (("t", 1),))
    spec = make_spec("pointwise", [scalar], [()], {"expr": expr})
    check_all(device_index, spec, [Layout.row_major(())] * 2, [scalar])
    fill = Expr((), (("c", 1.5),))
    check_all(device_index, make_spec("pointwise", [], [(5, 7)], {"expr": fill}), [Layout.r_tile((5, 7), 2, 4)], [])


@pytest.mark.parametrize("op", ["exp", "tanh", "erf"])
def test_own_functions_over_their_range(device_index: int, op: str) -> None:
    """Relative error of each value, not only of the largest; infinities, zeros and NaN as they should be."""
    top = 88.0 if op == "exp" else 12.0
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-7, 5e-4], np.float32)
    x = np.concatenate([np.linspace(-top, top, 4000, dtype=np.float32), special])
    expr = Expr(((op, ("x", 0)),), (("t", 0),))
    spec = make_spec("pointwise", [x], [x.shape], {"expr": expr})
    expected = evaluate("pointwise", {"expr": expr}, [x.astype(np.float64)], [x.shape])[0]
    device = devices()[device_index].handle
    check_kernels(device, kernels_of(spec, [Layout.row_major(x.shape)] * 2, CPU), [x], [expected], rtol=1e-6)
    # Each value by itself: scaled so that all are 1.
    ones = Expr(((op, ("x", 0)), ("div", ("t", 0), ("x", 1))), (("t", 1),))
    finite = np.isfinite(expected) & (np.abs(expected) > 1e-37)
    scaled = [x[finite], expected[finite].astype(np.float32)]
    inner = make_spec("pointwise", scaled, [scaled[0].shape], {"expr": ones})
    kernels = kernels_of(inner, [Layout.row_major(scaled[0].shape)] * 3, CPU)
    check_kernels(device, kernels, scaled, [np.ones(scaled[0].shape)], rtol=1e-6)


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_sine_and_cosine(device_index: int, op: str) -> None:
    x = np.linspace(-600, 600, 3001, dtype=np.float32)
    expr = Expr(((op, ("x", 0)),), (("t", 0),))
    check_all(
        device_index, make_spec("pointwise", [x], [x.shape], {"expr": expr}), [Layout.row_major(x.shape)] * 2, [x]
    )


def test_random_numbers_have_the_same_bits_everywhere(device_index: int) -> None:
    """A hash has no tolerance: scaled to whole numbers, device and interpreter give equal ones."""
    shape = (37, 64)
    rows, cols = np.arange(shape[0], dtype=np.int32)[:, None], np.arange(shape[1], dtype=np.int32)
    index = (rows * 64 + cols - 1000).astype(np.int32)
    seed = np.full(shape, -77, np.int32)
    code = (("rand", ("x", 0), ("c", 3), ("x", 1)), ("mul", ("t", 0), ("c", float(2**24))), ("int", ("t", 1)))
    spec = make_spec("pointwise", [seed, index], [shape], {"expr": Expr(code, (("t", 2),))}, out_dtypes=["int32"])
    expected = (random_uniform(seed, np.array(3), index) * 2**24).astype(np.int32)
    device = devices()[device_index].handle
    kernels = kernels_of(spec, [Layout.row_major(shape)] * 3, CPU)
    check_kernels(device, kernels, [seed, index], [expected], rtol=0)


_UNARY = sorted(
    o for o, n in ARITY.items() if n == 1 and o not in ("exp", "log", "sqrt", "rsqrt", "recip", "int", "sin", "cos")
)
_BINARY = sorted(o for o, n in ARITY.items() if n == 2 and o not in ("pow", "div"))


@st.composite
def programs(draw: st.DrawFn) -> Expr:
    """Straight-line programs over a float, an int and a bool input; nothing that amplifies rounding without bound."""
    code: list[tuple] = []

    def ref() -> tuple:
        kinds = ["x", "c"] + (["t"] * 3 if code else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "x":
            return ("x", draw(st.integers(0, 2)))
        if kind == "t":
            return ("t", draw(st.integers(0, len(code) - 1)))
        return ("c", draw(st.sampled_from([0, 1, 2, -3, 0.5, -1.25, 2.0, True, False])))

    for _ in range(draw(st.integers(1, 6))):
        choice = draw(st.integers(0, 9))
        if choice < 3:
            code.append((draw(st.sampled_from(_UNARY)), ref()))
        elif choice < 7:
            code.append((draw(st.sampled_from(_BINARY)), ref(), ref()))
        elif choice < 8:
            code.append(("pow", ref(), ("c", draw(st.sampled_from([1, 2, 3, 2.0])))))
        else:
            code.append(("where", ref(), ref(), ref()))
    return Expr(tuple(code), (("t", len(code) - 1), ref()))


@settings(max_examples=12)
@given(expr=programs(), data=st.data())
def test_random_programs(device_index: int, expr: Expr, data: st.DataObject) -> None:
    n = 37
    rng = np.random.default_rng(5)
    inputs = [
        rng.choice(np.array([-2.5, -1, 0, 0.25, 1, 3], np.float32), n),
        rng.integers(-3, 4, n, dtype=np.int32),
        rng.random(n) > 0.5,
    ]
    kinds = [v.dtype.kind for v in evaluate("pointwise", {"expr": expr}, inputs, [(n,)] * 2)]
    types = [{"f": "float32", "i": "int32", "b": "bool"}[k] for k in kinds]
    expected = evaluate("pointwise", {"expr": expr}, inputs, [(n,)] * 2)
    spec = make_spec("pointwise", inputs, [(n,)] * 2, {"expr": expr}, types)
    kernels = kernels_for(spec, (Layout.row_major((n,)),) * 5, CPU)
    kernel = data.draw(st.sampled_from(kernels))
    check_kernel(devices()[device_index].handle, kernel, inputs, expected)


# ---- host: domains, walks, nests -----------------------------------------------------------------------------------


def digits_at_random(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Every axis cut in two where that goes, and the pieces stored in any order: an outer piece may lie densest."""
    pieces = [(n // 2, 2) if n % 2 == 0 and n > 2 else (n,) for n in shape]
    cut = tuple(n for piece in pieces for n in piece)
    layout = Layout.row_major(cut, tuple(draw(st.permutations(range(len(cut)))))).reshape(shape)
    assert layout is not None
    return layout


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[Layout], int]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)))
    out = []
    for _ in range(draw(st.integers(1, 3))):
        order = tuple(draw(st.permutations(range(len(shape)))))
        tiles = {a: draw(st.sampled_from([1, 2, 4])) for a in range(len(shape)) if draw(st.booleans())}
        out.append(digits_at_random(draw, shape) if draw(st.booleans()) else Layout.tiled(shape, tiles, order))
        if draw(st.booleans()):
            small = tuple(1 if draw(st.booleans()) else n for n in shape)
            out.append(Layout.row_major(small).expand(shape))
    return out, draw(st.integers(0, 0))


@given(case=operands())
def test_simplified_domains_have_the_same_points(case: tuple[list[Layout], int]) -> None:
    """Each point is a tuple of element offsets, one per operand: the set of points must not change."""
    layouts, lead = case
    views = simplify(layouts, lead)
    assert views is not None
    assert len({v.shape for v in views}) == 1
    assert views[0].rank <= MAX_RANK

    def points(operands: list[Layout]) -> set[tuple[int, ...]]:
        return set(zip(*(x.offsets().ravel().tolist() for x in operands), strict=True))

    assert points(list(views)) == points(layouts)


def test_equal_layouts_become_one_axis() -> None:
    tiled = Layout.r_tile((8, 16), 4, 4)
    views = simplify([tiled, tiled, Layout.row_major(()).expand((8, 16))], 0)
    assert views is not None
    assert views[0].shape == (128,)
    assert views[0] == Layout.row_major((128,))


@given(case=operands(), width=st.sampled_from([1, 2, 4]), chunk=st.integers(1, 64))
def test_walks_touch_every_point_once(case: tuple[list[Layout], int], width: int, chunk: int) -> None:
    layouts, lead = case
    spec = make_spec("pointwise", [np.zeros(layouts[0].shape, np.float32)], [layouts[0].shape], {"expr": IDENTITY})
    for walk in (fat_walk(layouts[lead], width, chunk), thin_walk(layouts[lead], width)):
        if walk is None:
            continue
        nest = Nest(tuple(walk.grid), (Phase(walk.loops, tuple(walk.accesses(0, False))),))
        kernel = Kernel(spec, KernelVariant("pointwise", "test"), (layouts[lead],) * 2, ())
        assert sorted(touched(kernel, nest, 0, False, {})) == sorted(layouts[lead].offsets().ravel().tolist())


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("source", ["row-major", "r-tile 4x4", "transposed"])
@pytest.mark.parametrize("target", ["row-major", "row panels", "r-tile 8x16 by columns"])
def test_nests_of_relayouts_touch_every_element_once(source: str, target: str, limits: DeviceLimits) -> None:
    shape = (19, 37)
    layouts = [MATRIX_LAYOUTS[source](shape), MATRIX_LAYOUTS[target](shape)]
    spec = make_spec("pointwise", [normal(*shape)], [shape], {"expr": IDENTITY})
    for kernel in kernels_of(spec, layouts, limits):
        (launch,) = kernel.launches
        for position, write in ((0, False), (1, True)):
            got = sorted(touched(kernel, launch.nest, position, write, {}))
            wanted = sorted(layouts[position].offsets().ravel().tolist())
            if kernel.variant.name.startswith("linear"):
                assert set(wanted) <= set(got)  # walks the padding as well
                assert len(set(got)) == len(got)
            else:
                assert got == wanted, kernel.variant.label


def test_programs_say_what_they_read_and_cost() -> None:
    assert used_inputs(Expr((("add", ("x", 2), ("c", 1)),), (("t", 0), ("x", 0)))) == (0, 2)
    assert expr_flops(Expr((("add", ("x", 0), ("x", 0)), ("exp", ("t", 0))), (("t", 1),))) == 11


@pytest.mark.parametrize(("n", "limit", "multiple", "expected"), [(12, 5, 1, 4), (64, 40, 16, 32), (13, 5, 1, 1)])
def test_largest_divisor(n: int, limit: int, multiple: int, expected: int) -> None:
    assert largest_divisor(n, limit, multiple) == expected
