"""Contraction kernels against float64 numpy, over every kind of layout, and their nests by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.families.contraction import CONTRACTION, inner_tile, separable
from kernels.nest import Index
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from kernels.variants import kernels_for
from layoutopt.layout import Layout, Mode

Shape = tuple[int, int, int, int]  # batch, m, k, n
NAMES = ("outer.n", "outer.m", "dot", "tile.n", "tile.m", "any")


def spec_of(shape: Shape, alpha: float = 1.0) -> OpSpec:
    b, m, k, n = shape
    attrs = (("alpha", alpha),) if alpha != 1.0 else ()
    return OpSpec("contraction", ((b, m, k), (b, k, n), (b, m, n)), ("float32",) * 3, 2, attrs)


def variant(name: str, **params: int) -> KernelVariant:
    """A variant with small tiles: quick to compile, and with borders everywhere."""
    full = {"mr": 3, "nv": 2, "v": 4, "t": 2, "s": 2, "x": 1, "gr": 1, "gc": 1}
    if name == "dot" or name.startswith("tile"):
        full = {"mr": 3, "nr": 4, "v": 4, "t": 2, "s": 2, "gr": 1, "gc": 1}
    if name.startswith("tile"):
        full |= {"mr": 3, "nr": 4, "v": 16}
    if name == "any":
        full = {"mr": 4, "nr": 4, "gr": 1, "gc": 1}
    return KernelVariant("contraction", name, tuple({**full, **params}.items()))


def build(name: str, shape: Shape, layouts: tuple[Layout, ...], alpha: float = 1.0, **params: int) -> Kernel | None:
    return CONTRACTION.build(variant(name, **params), spec_of(shape, alpha), layouts)


def arrays(shape: Shape, layouts: tuple[Layout, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random operands; constant along an axis that the layout broadcasts."""
    rng = np.random.default_rng(seed)
    out = []
    for layout in layouts[:2]:
        x = rng.standard_normal(layout.shape).astype(np.float32)
        for axis in range(3):
            modes = layout.axis_modes(axis)
            if modes and all(mode.stride == 0 for mode in modes):
                x[:] = x.take([0], axis)
        out.append(x)
    return out[0], out[1]


def check(device_index: int, kernel: Kernel | None, shape: Shape) -> None:
    check_together(device_index, [kernel], shape)


def check_together(device_index: int, kernels: Sequence[Kernel | None], shape: Shape) -> None:
    """Kernels whose layouts broadcast the same operands, built as one program."""
    from kernels.testing import check_kernels, opencl_devices

    made = [kernel for kernel in kernels if kernel is not None]
    assert len(made) == len(kernels) > 0, "a variant declined its layouts"
    a, b = arrays(shape, made[0].layouts)
    alpha = made[0].spec.attr("alpha", 1.0)
    expected = alpha * (a.astype(np.float64) @ b.astype(np.float64))
    check_kernels(opencl_devices()[device_index], made, [a, b], [expected], rtol=2e-6 * max(4, shape[2] ** 0.5))


def limits(device_index: int) -> DeviceLimits:
    from kernels.testing import limits_of, opencl_devices

    # What reads through images has tests of its own: it does not take every size (test_kernels_image.py).
    return replace(limits_of(opencl_devices()[device_index]), image_max_buffer_texels=0)


def uniform(shape: Shape, make) -> tuple[Layout, ...]:
    b, m, k, n = shape
    return make((b, m, k)), make((b, k, n)), make((b, m, n))


def heads(stored: Layout, heads_: int, batch: int, seq: int, transposed: bool = False) -> Layout:
    """[batch*seq, heads*dim] seen as [batch*heads, seq, dim] (or [batch*heads, dim, seq])."""
    dim = stored.shape[1] // heads_
    four = stored.reshape((batch, seq, heads_, dim))
    assert four is not None
    out = four.permute((0, 2, 3, 1) if transposed else (0, 2, 1, 3))
    merged = out.reshape((batch * heads_, *out.shape[2:]))
    assert merged is not None
    return merged


# ---- what is accepted --------------------------------------------------------------------------------------------


def test_orientation_follows_the_contiguous_axis() -> None:
    shape = (1, 48, 64, 48)
    rows = uniform(shape, Layout.row_major)
    columns = uniform(shape, lambda s: Layout.row_major(s, (0, 2, 1)))
    across = (rows[0], columns[1], rows[2])
    along = (columns[0], rows[1], rows[2])
    accepted = {
        name: [build(name, shape, layouts) is not None for layouts in (rows, columns, across, along)]
        for name in ("outer.n", "outer.m", "dot", "any")
    }
    assert accepted == {
        "outer.n": [True, False, False, True],
        "outer.m": [False, True, False, True],
        "dot": [False, False, True, False],
        "any": [True, True, True, True],
    }


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 5, 1), (1, 1024, 384, 2), (96, 128, 32, 128), (1, 7, 300, 900)])
def test_any_layouts_have_a_kernel(kind: str, shape: Shape) -> None:
    b, m, k, n = shape
    spec, device = spec_of(shape), DeviceLimits(kind=kind)
    orders = [(0, 1, 2), (0, 2, 1), (2, 1, 0)]
    for oa, ob, oc in product(orders, repeat=3):
        layouts = (
            Layout.row_major((b, m, k), oa),
            Layout.row_major((b, k, n), ob),
            Layout.row_major((b, m, n), oc),
        )
        kernels = kernels_for(spec, layouts, device)
        assert kernels
        labels = [kernel.variant.label for kernel in kernels]
        assert len(set(labels)) == len(labels)
        for kernel in kernels:
            (launch,) = kernel.launches
            assert all(g % i == 0 for g, i in zip(launch.global_size, launch.local_size, strict=True))
            assert np.prod(launch.local_size) <= device.max_work_group_size


def test_few_variants_are_enumerated() -> None:
    for kind in ("cpu", "gpu"):
        names = Counter(v.name for v in CONTRACTION.variants(spec_of((1, 512, 512, 512)), DeviceLimits(kind=kind)))
        assert set(names) >= {"outer.n", "outer.m", "dot", "any"} | ({"tile.n", "tile.m"} if kind == "cpu" else set())
        assert max(names.values()) <= 8


def test_images_are_declined() -> None:
    shape = (1, 8, 8, 8)
    image = Layout.r_tile_image((1, 8, 8), 4)
    rows = Layout.row_major((1, 8, 8))
    assert all(build(name, shape, (image, rows, rows)) is None for name in NAMES)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(1, 12),
)
def test_separable_is_what_it_says(modes: list[tuple[int, int]], step: int) -> None:
    extent = int(np.prod([e for e, _ in modes]))
    layout = Layout.build((extent,), [Mode(0, e, s) for e, s in modes])
    offsets = layout.linear_offsets()
    if separable(layout, 0, step):
        for i in range(extent):
            assert offsets[i] - offsets[0] == offsets[i // step * step] - offsets[0] + offsets[i % step] - offsets[0]


def test_inner_tile_of_two_tilings() -> None:
    x, y = Layout.r_tile((1, 8, 24), 4, 4), Layout.r_tile((1, 24, 8), 6, 4)
    assert inner_tile(x, y) == 2
    assert inner_tile(Layout.row_major((1, 8, 24)), Layout.row_major((1, 24, 8))) == 24


# ---- right on every device ------------------------------------------------------------------------------------------

ODD: Shape = (2, 13, 19, 23)
PRIME: Shape = (1, 37, 53, 41)
EVEN: Shape = (2, 12, 16, 16)


def test_every_enumerated_variant(device_index: int) -> None:
    """As enumerated for this device, on primes that leave borders everywhere."""
    rows = uniform(PRIME, Layout.row_major)
    columns = uniform(PRIME, lambda s: Layout.row_major(s, (0, 2, 1)))
    seen: dict[str, Kernel] = {}
    b, m, k, n = PRIME
    turned = Layout.r_tile((b, m, k), 4, 4), Layout.r_tile((b, n, k), 4, 4).permute((0, 2, 1)), rows[2]
    for layouts in (rows, columns, (rows[0], columns[1], rows[2]), turned):
        for kernel in kernels_for(spec_of(PRIME, 0.25), layouts, limits(device_index)):
            seen.setdefault(kernel.variant.label, kernel)
    check_together(device_index, list(seen.values()), PRIME)
    wanted = {v.label for v in CONTRACTION.variants(spec_of(PRIME), limits(device_index))}
    assert set(seen) == wanted


@pytest.mark.parametrize("shape", [ODD, EVEN], ids=str)
@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("outer.n", ((0, 1, 2), (0, 1, 2), (0, 1, 2))),
        ("outer.n", ((2, 1, 0), (1, 0, 2), (0, 2, 1))),
        ("outer.n", ((0, 2, 1), (1, 0, 2), (1, 0, 2))),
        ("outer.m", ((0, 2, 1), (0, 1, 2), (0, 2, 1))),
        ("outer.m", ((2, 0, 1), (2, 1, 0), (0, 1, 2))),
        ("dot", ((0, 1, 2), (0, 2, 1), (0, 1, 2))),
        ("dot", ((1, 0, 2), (2, 0, 1), (2, 0, 1))),
        ("dot", ((1, 0, 2), (2, 0, 1), (1, 2, 0))),
        ("any", ((2, 0, 1), (2, 0, 1), (2, 1, 0))),
    ],
)
def test_orders(device_index: int, name: str, orders: tuple[tuple[int, ...], ...], shape: Shape) -> None:
    layouts = tuple(Layout.row_major(s, o) for s, o in zip(spec_of(shape).shapes, orders, strict=True))
    check(device_index, build(name, shape, layouts, alpha=-0.5), shape)


TILES = [(4, 4), (8, 4), (4, 8), (16, 4)]


@pytest.mark.parametrize("inner", ["row", "col"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_r_tiles(device_index: int, tile: tuple[int, int], inner: str) -> None:
    """All three operands in the same R-Tile; the forward, and the backward that reduces over the other axis."""
    plain = uniform(ODD, lambda s: Layout.r_tile(s, *tile, inner=inner, outer=inner))
    b, _, k, n = ODD
    turned = (plain[0], Layout.r_tile((b, n, k), *tile, inner=inner).permute((0, 2, 1)), plain[2])
    made = [build(name, ODD, layouts) for layouts in (plain, turned) for name in NAMES[:-1]]
    kernels = [kernel for kernel in made if kernel is not None]
    assert len(kernels) >= 2
    check_together(device_index, kernels, ODD)


def test_vectors_made_of_pieces(device_index: int) -> None:
    """Vectors wider than the tiles, and tiles that cut the register tile unevenly."""
    b, m, k, n = shape = (1, 26, 44, 52)
    rows, kernels = Layout.row_major((b, m, k)), []
    for tile in (4, 8, 12):
        y = Layout.r_tile((b, k, n), 4, tile)
        z = Layout.r_tile((b, m, n), 4, tile, outer="col")
        kernels.append(build("outer.n", shape, (rows, y, z), mr=5, nv=1, v=16))
    x, y = Layout.r_tile((b, m, k), 4, 4), Layout.r_tile((b, k, n), 8, 4, inner="col")
    kernels.append(build("dot", shape, (x, y, Layout.row_major((b, m, n))), mr=3, nr=2, v=16))
    check_together(device_index, kernels, shape)


@pytest.mark.parametrize(("v", "tile"), [(8, (4, 4)), (16, (2, 8)), (16, (12, 4))], ids=str)
def test_vectors_made_of_whole_tiles(device_index: int, v: int, tile: tuple[int, int]) -> None:
    """A vector holds several columns of a tile; X has the same tiles, or runs that are longer or shorter."""
    b, m, k, n = shape = (2, 11, 30, 21)
    y = Layout.r_tile((b, n, k), *tile).permute((0, 2, 1))
    z = Layout.row_major((b, m, n))
    rows = (Layout.r_tile((b, m, k), *tile), Layout.row_major((b, m, k)), Layout.r_tile((b, m, k), 3, 4))
    kernels = [build("tile.n", shape, (x, y, z), v=v, nr=4) for x in rows]
    x, y = Layout.r_tile((b, m, k), *tile), Layout.row_major((b, k, n), (0, 2, 1))
    kernels.append(build("tile.m", shape, (x, y, z), v=v, nr=8, mr=2))
    check_together(device_index, kernels, shape)


def test_whole_tiles_are_declined_where_a_vector_is_not_one() -> None:
    b, m, k, n = shape = (1, 12, 24, 12)
    x, z = Layout.row_major((b, m, k)), Layout.row_major((b, m, n))
    for tile, inner in (((4, 4), "col"), ((4, 16), "row"), ((6, 4), "row"), ((2, 4), "row")):
        y = Layout.r_tile((b, n, k), *tile, inner=inner).permute((0, 2, 1))
        assert build("tile.n", shape, (x, y, z)) is None


def test_tiles_of_odd_extent(device_index: int) -> None:
    """Mixed radices that are no powers of two: 6 and 4 along k, 3 along m, 12 along n."""
    b, m, k, n = shape = (2, 11, 25, 29)
    x, y = Layout.r_tile((b, m, k), 3, 6), Layout.r_tile((b, k, n), 4, 12)
    z = Layout.r_tile((b, m, n), 5, 4)
    check(device_index, build("outer.n", shape, (x, y, z)), shape)
    check(device_index, build("any", shape, (x, y, z)), shape)


def test_panels_and_padding(device_index: int) -> None:
    """Panels packed along m and n, rows padded to 32, and a base that is not aligned."""
    b, m, k, n = ODD
    x = Layout.tiled((b, m, k), {1: 6}, outer=(0, 1, 2))
    y = Layout.tiled((b, k, n), {2: 8}, outer=(0, 2, 1))
    padded = Layout.build((b, m, n), [Mode(0, b, m * 32), Mode(1, m, 32), Mode(2, 32, 1)], (b * m * 32,))
    shifted = Layout.row_major((b, k, n + 9)).slice(2, 3, 3 + n)
    assert shifted is not None
    check(device_index, build("outer.n", ODD, (x, y, padded)), ODD)
    check(device_index, build("outer.n", ODD, (Layout.row_major((b, m, k)), shifted, padded)), ODD)
    check(device_index, build("outer.m", ODD, (x, y, padded), mr=4, nv=1, v=2), ODD)


def test_head_split_views(device_index: int) -> None:
    """Attention: heads are a digit of the batch axis, whichever way the projections are stored."""
    batch, seq, n_heads, dim = 2, 11, 3, 8
    shape, stored = (batch * n_heads, seq, dim, seq), (batch * seq, n_heads * dim)
    scores = Layout.row_major((batch * n_heads, seq, seq))
    row_q = heads(Layout.row_major(stored), n_heads, batch, seq)
    row_k = heads(Layout.row_major(stored), n_heads, batch, seq, transposed=True)
    assert len(row_q.axis_modes(0)) == 2
    check(device_index, build("dot", shape, (row_q, row_k, scores), alpha=0.3), shape)
    values = (batch * n_heads, seq, seq, dim)
    row_v = heads(Layout.row_major(stored), n_heads, batch, seq)
    check(device_index, build("outer.n", values, (scores, row_v, row_v)), values)
    check(device_index, build("any", shape, (row_q, row_k, scores)), shape)


def test_head_split_of_tiles(device_index: int) -> None:
    batch, seq, n_heads, dim = 2, 12, 3, 8
    stored = Layout.r_tile((batch * seq, n_heads * dim), 4, 4)
    q = heads(stored, n_heads, batch, seq)
    k = heads(stored, n_heads, batch, seq, transposed=True)
    scores = Layout.r_tile((batch * n_heads, seq, seq), 4, 4)
    shape, values = (batch * n_heads, seq, dim, seq), (batch * n_heads, seq, seq, dim)
    check(device_index, build("dot", shape, (q, k, scores)), shape)
    check(device_index, build("outer.n", values, (scores, q, q)), values)


def test_broadcast_batch(device_index: int) -> None:
    b, _, k, n = ODD
    shared = Layout.row_major((k, n)).expand((b, k, n))
    rows = uniform(ODD, Layout.row_major)
    check(device_index, build("outer.n", ODD, (rows[0], shared, rows[2])), ODD)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 70, 3), (3, 2, 5, 1), (1, 33, 6, 3), (2, 3, 64, 10)], ids=str)
def test_small_extents(device_index: int, shape: Shape) -> None:
    rows = uniform(shape, Layout.row_major)
    across = (rows[0], Layout.row_major(rows[1].shape, (0, 2, 1)), rows[2])
    narrow = [
        kernel
        for layouts in (rows, across)
        for kernel in kernels_for(spec_of(shape), layouts, limits(device_index))
        if dict(kernel.variant.params).get("v", 4) <= 4
    ]
    assert narrow
    check_together(device_index, narrow, shape)


@pytest.mark.parametrize("x", [1, 4])
@pytest.mark.parametrize("name", ["outer.n", "outer.m", "dot", "any"])
def test_work_groups_of_many_items(device_index: int, name: str, x: int) -> None:
    """What a GPU gets: 2-D groups of thin items that overhang the output, and vector loads of X along k."""
    b, m, k, n = shape = (2, 21, 22, 27)
    a = Layout.row_major((b, m, k), (0, 2, 1) if name == "outer.m" else (0, 1, 2))
    y = Layout.row_major((b, k, n), (0, 1, 2) if name == "outer.n" else (0, 2, 1))
    params = {"t": 1, "s": 1, "gr": 2, "gc": 4}
    if name.startswith("outer"):
        params |= {"mr": 4, "nv": 1, "x": x}
    elif x > 1:
        params |= {"mr": 2}
    if name == "any":
        params = {"gr": 2, "gc": 4}
    z = Layout.row_major((b, m, n), (0, 2, 1) if name == "outer.m" else (0, 1, 2))
    check(device_index, build(name, shape, (a, y, z), **params), shape)


def test_vector_loads_of_x_along_rows(device_index: int) -> None:
    """X in panels: four rows are one load."""
    shape = (2, 21, 22, 27)
    x = Layout.tiled(shape[:3], {1: 4})
    rows = uniform(shape, Layout.row_major)
    for layouts in ((x, rows[1], rows[2]), (Layout.row_major(shape[:3], (0, 2, 1)), rows[1], rows[2])):
        params = {"mr": 4, "nv": 1, "x": 4, "t": 1, "s": 1, "gr": 2, "gc": 4}
        kernel = build("outer.n", shape, layouts, **params)
        assert kernel is not None
        assert any(a.operand == 0 and a.width == 4 and a.axis == 1 for a in kernel.launches[0].nest.phases[0].accesses)
        check(device_index, kernel, shape)


def _layout(draw: st.DrawFn, shape: tuple[int, int, int]) -> Layout:
    kind = draw(st.sampled_from(["order", "tile", "panel"]))
    if kind == "order":
        return Layout.row_major(shape, tuple(draw(st.permutations(range(3)))))
    if kind == "tile":
        tr, tc = draw(st.sampled_from([(4, 4), (2, 4), (4, 8), (3, 5), (8, 2)]))
        inner, outer = draw(st.sampled_from(["row", "col"])), draw(st.sampled_from(["row", "col"]))
        return Layout.r_tile(shape, tr, tc, inner, outer)
    axis = draw(st.sampled_from([1, 2]))
    return Layout.tiled(shape, {axis: draw(st.sampled_from([4, 6, 8]))}, tuple(draw(st.permutations(range(3)))))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, tuple[Layout, ...], str, dict[str, int]]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 20)))
    layouts = tuple(_layout(draw, s) for s in spec_of(shape).shapes)
    name = draw(st.sampled_from(["outer.n", "outer.m", "dot"]))
    params = {"mr": draw(st.integers(1, 4)), "v": 4 if name == "dot" else draw(st.sampled_from([2, 4, 8]))}
    params["nr" if name == "dot" else "nv"] = draw(st.integers(1, 3))
    return shape, layouts, name, params


@given(problem=problems())
@settings(max_examples=14)
def test_random_problems(device_index: int, problem: tuple[Shape, tuple[Layout, ...], str, dict[str, int]]) -> None:
    shape, layouts, name, params = problem
    kernel = build(name, shape, layouts, **params) or build("any", shape, layouts)
    check(device_index, kernel, shape)


# ---- nests: what is declared is what the product needs ---------------------------------------------------------------


def value(index: Index, loops: dict[str, int]) -> int:
    total = index.const
    for term in index.terms:
        digit = loops[term.loop] // term.div
        total += term.coef * (digit % term.mod if term.mod else digit)
    return total


def touched(kernel: Kernel) -> tuple[dict[int, Counter], int]:
    """Per operand how often each coordinate is touched (all of the grid), and how many accesses are loads of C."""
    (launch,) = kernel.launches
    counts: dict[int, Counter] = {0: Counter(), 1: Counter(), 2: Counter()}
    reads_of_c = 0
    grid = launch.nest.grid
    for phase in launch.nest.phases:
        for access in phase.accesses:
            depth = len(phase.loops) if access.depth < 0 else access.depth
            loops = [*grid, *phase.loops[:depth]]
            shape = kernel.operand_layout(access.operand).shape
            reads_of_c += access.operand == 2 and not access.write
            for values in product(*(range(loop.extent) for loop in loops)):
                env = dict(zip((loop.name for loop in loops), values, strict=True))
                at = [value(i, env) for i in access.index]  # type: ignore[arg-type]
                for lane in range(access.width):
                    coordinate = tuple(c + lane * (axis == access.axis) for axis, c in enumerate(at))
                    if all(c < n for c, n in zip(coordinate, shape, strict=True)):
                        counts[access.operand][coordinate] += 1
    return counts, reads_of_c


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("outer.n", {"mr": 3, "nv": 2, "v": 2, "t": 2, "s": 1}),
        ("outer.n", {"mr": 2, "nv": 1, "v": 4, "t": 1, "s": 2}),
        ("outer.m", {"mr": 2, "nv": 1, "v": 4, "t": 2, "s": 2}),
        ("outer.n", {"mr": 2, "nv": 1, "v": 4, "t": 1, "s": 1, "x": 4, "gr": 2, "gc": 2}),
        ("outer.n", {"mr": 4, "nv": 1, "v": 4, "t": 1, "s": 1, "x": 2, "gr": 2, "gc": 2}),
        ("dot", {"mr": 2, "nr": 3, "v": 4, "t": 2, "s": 1}),
        ("dot", {"mr": 2, "nr": 2, "v": 4, "t": 1, "s": 1, "gr": 2, "gc": 3}),
        ("tile.n", {"mr": 2, "nr": 4, "v": 16, "t": 1, "s": 2}),
        ("any", {"mr": 2, "nr": 2}),
    ],
    ids=str,
)
def test_nest_covers_the_product(name: str, params: dict[str, int]) -> None:
    b, m, k, n = shape = (2, 7, 6, 9)
    order_a = (0, 2, 1) if name == "outer.m" else (0, 1, 2)
    order_b = (0, 2, 1) if name == "dot" else (0, 1, 2)
    y = Layout.row_major((b, k, n), order_b)
    if name == "tile.n":
        y = Layout.r_tile((b, n, k), 4, 4).permute((0, 2, 1))
    layouts = (Layout.row_major((b, m, k), order_a), y, Layout.row_major((b, m, n)))
    kernel = build(name, shape, layouts, **params)
    assert kernel is not None
    counts, reads_of_c = touched(kernel)
    assert reads_of_c == 0
    views = [kernel.operand_layout(position).shape for position in range(3)]
    for operand in range(3):
        assert set(counts[operand]) == set(product(*(range(e) for e in views[operand])))
    assert set(counts[2].values()) == {1}
    # Every element of A (of B) is read once per register tile across (down) the grid, tiles that overhang included.
    p = {"t": 1, "s": 1, **dict(kernel.variant.params)}
    rows, cols = (n, m) if kernel.views else (m, n)
    width = p["nr"] if "nr" in p else p["nv"] * p["v"]
    x, y = (1, 0) if kernel.views else (0, 1)
    across, down = p["s"] * p["gc"], p["t"] * p["gr"]
    assert set(counts[x].values()) == {-(-cols // (width * across)) * across}
    assert set(counts[y].values()) == {-(-rows // (p["mr"] * down)) * down}


def test_nest_counts_the_arithmetic() -> None:
    """Without borders the declared arithmetic is the product's own."""
    b, m, k, n = shape = (2, 12, 16, 16)
    rows = uniform(shape, Layout.row_major)
    kernel = build("outer.n", shape, rows)
    assert kernel is not None
    assert kernel.launches[0].nest.flops == 2 * b * m * k * n
