"""The layout algebra against brute force over every coordinate."""

from __future__ import annotations

import doctest
from itertools import combinations, permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutopt.layout
from layoutopt.errors import LayoutError
from layoutopt.layout import Layout, Mode
from tests.layout_cases import (
    by_definition,
    chains,
    coordinates,
    exists,
    factorisations,
    lanes_of,
    layouts,
    shapes,
)

ORDERS = ("row", "col")


@st.composite
def seen(draw: st.DrawFn) -> Layout:
    """A constructor's layout, or what a chain of views makes of one."""
    layout = draw(layouts())
    if draw(st.booleans()):
        return layout
    return draw(chains(layout.shape, 3)).layout(layout) or layout


def test_doctests() -> None:
    result = doctest.testmod(layoutopt.layout)
    assert result.attempted >= 6
    assert result.failed == 0


# ---- the map ------------------------------------------------------------------------------------------------------


@given(seen())
def test_offsets_follow_the_definition(layout: Layout) -> None:
    got = coordinates(layout)
    for coordinate in np.ndindex(layout.shape):
        assert tuple(got[coordinate]) == by_definition(layout, coordinate)


@given(layouts())
def test_constructors_are_injective_even_in_their_padding(layout: Layout) -> None:
    flat = layout.linear_offsets(padded=True)
    assert np.unique(flat).size == flat.size
    assert layout.is_injective()


@given(seen())
def test_is_injective_is_what_brute_force_finds(layout: Layout) -> None:
    flat = layout.linear_offsets()
    assert layout.is_injective() == (np.unique(flat).size == flat.size)


@given(seen())
def test_map_is_total_and_stays_in_the_allocation(layout: Layout) -> None:
    got = coordinates(layout, padded=True)
    assert got.shape == (*layout.padded_shape, len(layout.size))
    assert all(p >= n for p, n in zip(layout.padded_shape, layout.shape, strict=True))
    assert (got >= 0).all()
    assert (got < np.asarray(layout.size)).all()
    assert (layout.linear_offsets(padded=True) < layout.size_elems).all()
    np.testing.assert_array_equal(coordinates(layout), got[tuple(slice(n) for n in layout.shape)])


@given(seen())
def test_is_compact_means_that_storage_is_filled_exactly(layout: Layout) -> None:
    flat = np.sort(layout.linear_offsets(padded=True), axis=None)
    fills = not layout.is_image and np.array_equal(flat, np.arange(layout.size_elems))
    assert layout.is_compact() == fills


@pytest.mark.parametrize("inner", ORDERS)
@pytest.mark.parametrize("outer", ORDERS)
def test_r_tile_address_formula(inner: str, outer: str) -> None:
    for rows, cols, tr, tc in product((1, 4, 7), (1, 6, 8), (1, 2, 4), (1, 3, 4)):
        down, across = -(-rows // tr), -(-cols // tc)
        layout = Layout.r_tile((2, rows, cols), tr, tc, inner, outer)
        for b, i, j in np.ndindex(2, rows, cols):
            tile = (i // tr) * across + j // tc if outer == "row" else (j // tc) * down + i // tr
            within = i % tr * tc + j % tc if inner == "row" else j % tc * tr + i % tr
            assert layout.offsets()[b, i, j] == (b * down * across + tile) * tr * tc + within


def test_r_tile_on_an_image_address_formula() -> None:
    for rows, cols, tr in product((1, 4, 7), (1, 6, 8), (1, 2, 4)):
        layout = Layout.r_tile_image((2, rows, cols), tr)
        for b, i, j in np.ndindex(2, rows, cols):
            expected = (b * -(-rows // tr) + i // tr, j // 4 * tr + i % tr, j % 4)
            assert tuple(layout.offsets()[b, i, j]) == expected


@given(shapes(), st.data())
def test_row_major_is_numpy_s_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    nested = np.arange(prod(shape)).reshape([shape[a] for a in order])
    np.testing.assert_array_equal(Layout.row_major(shape, order).offsets(), nested.transpose(np.argsort(order)))


@given(shapes(), st.data())
def test_pad_rounds_extents_up(shape: tuple[int, ...], data: st.DataObject) -> None:
    pad = {a: data.draw(st.integers(1, 8)) for a in range(len(shape))}
    layout = Layout.row_major(shape, pad=pad)
    rounded = tuple(-(-n // pad[a]) * pad[a] for a, n in enumerate(shape))
    assert layout.size_elems == prod(rounded)
    np.testing.assert_array_equal(layout.offsets(padded=True), np.arange(prod(rounded)).reshape(rounded))


# ---- equality -----------------------------------------------------------------------------------------------------


def _identity(layout: Layout) -> tuple[object, ...]:
    """What a layout is, without its modes."""
    return layout.shape, layout.size, layout.padded_shape, coordinates(layout, padded=True).tobytes()


def _family(shape: tuple[int, ...]) -> list[Layout]:
    axes = range(len(shape))
    out = [Layout.row_major(shape, order) for order in permutations(axes)]
    for chosen in (c for n in range(1, len(shape) + 1) for c in combinations(axes, n)):
        for sizes in product((1, 2, 3, 4), repeat=len(chosen)):
            tiles = dict(zip(chosen, sizes, strict=True))
            for outer, inner in product(permutations(axes), permutations(chosen)):
                out.append(Layout.tiled(shape, tiles, outer, inner))
    for lane, cut in product(axes, range(len(shape) + 1)):
        out.append(Layout.image(shape, [(a, None) for a in axes[:cut]], [(a, None) for a in axes[cut:]], lane))
    return out


@pytest.mark.parametrize("shape", [(1,), (4,), (7,), (4, 4), (3, 6), (1, 8), (2, 1, 4)])
def test_equal_exactly_when_map_and_allocation_are_equal(shape: tuple[int, ...]) -> None:
    family = _family(shape)
    by_map: dict[object, Layout] = {}
    for layout in family:
        assert by_map.setdefault(_identity(layout), layout) == layout
    different = list(by_map.values())
    assert len(set(different)) == len(different)


@given(layouts(), st.data())
def test_equality_does_not_depend_on_how_modes_are_written(layout: Layout, data: st.DataObject) -> None:
    modes: list[Mode] = []
    for mode in layout.modes:
        cut = data.draw(st.sampled_from([d for d in range(1, mode.extent + 1) if mode.extent % d == 0]))
        modes += [
            Mode(mode.axis, mode.extent // cut, mode.stride * cut, mode.dim),
            Mode(mode.axis, cut, mode.stride, mode.dim),
        ]
    by_axis = [[m for m in modes if m.axis == axis] for axis in data.draw(st.permutations(range(layout.rank)))]
    again = Layout.build(layout.shape, [m for own in by_axis for m in own], layout.size, layout.base)
    assert again == layout
    assert hash(again) == hash(layout)


def test_broadcast_digits_have_one_form() -> None:
    one = Layout.build((3, 4), [Mode(0, 3, 0, 1), Mode(1, 4, 1, 2)], (1, 1, 4))
    assert one == Layout.build((3, 4), [Mode(0, 3, 0, 0), Mode(1, 4, 1, 2)], (1, 1, 4))


# ---- code ---------------------------------------------------------------------------------------------------------


def _evaluate(expression: str, names: dict[str, np.ndarray]) -> np.ndarray:
    """A C index expression over non-negative ints, in numpy: C's / is // there."""
    return eval(expression.replace("/", "//"), {"__builtins__": {}}, names)


@given(seen())
def test_c_exprs_equal_offsets(layout: Layout) -> None:
    names = [f"i{axis}" for axis in range(layout.rank)]
    grid = dict(zip(names, np.indices(layout.shape), strict=True))
    expressions = layout.c_exprs(*names)
    want = coordinates(layout)
    for dim, expression in enumerate(expressions):
        got = np.broadcast_to(_evaluate(expression, grid), layout.shape)
        np.testing.assert_array_equal(got, want[..., dim])
    if not layout.is_image:
        assert layout.c_expr(*names) == expressions[0]


@given(layouts())
def test_coords_c_expr_inverts_compact_layouts(layout: Layout) -> None:
    if not layout.is_compact():
        with pytest.raises(LayoutError, match="not compact"):
            layout.coords_c_expr("n")
        return
    index = np.arange(layout.size_elems)
    coords = [np.broadcast_to(_evaluate(e, {"n": index}), index.shape) for e in layout.coords_c_expr("n")]
    np.testing.assert_array_equal(layout.offsets(padded=True)[tuple(coords)], index)


# ---- what kernels rely on -----------------------------------------------------------------------------------------


@given(seen())
def test_runs_are_contiguous_and_as_long_as_claimed(layout: Layout) -> None:
    flat = layout.linear_offsets(padded=True)
    for axis in range(layout.rank):
        run = layout.run(axis)
        assert layout.padded(axis) % run == 0
        starts = np.arange(layout.padded(axis)) // run * run
        expected = flat.take(starts, axis=axis) + _along(np.arange(layout.padded(axis)) - starts, axis, layout.rank)
        np.testing.assert_array_equal(flat, expected)
        if run < layout.padded(axis):  # a longer run would be wrong somewhere
            rest = flat.take([run], axis=axis) - flat.take([run - 1], axis=axis)
            assert run == 1 or layout.is_image or (rest != 1).any()


def _along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return values.reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))


@given(seen())
def test_vectors_are_contiguous_and_aligned_as_claimed(layout: Layout) -> None:
    flat = layout.linear_offsets()
    for axis, width in product(range(layout.rank), (2, 4, 8, 16)):
        starts = np.arange(0, layout.shape[axis] - width + 1, width)
        lanes = [flat.take(starts + lane, axis=axis) for lane in range(width)]
        contiguous = all(np.array_equal(lanes[0] + lane, values) for lane, values in enumerate(lanes))
        if layout.vectorizes(axis, width):
            assert width <= lanes_of(layout)
            assert contiguous
            if layout.alignment(axis) % width == 0:
                assert (lanes[0] % width == 0).all()


@given(seen())
def test_every_run_start_is_aligned(layout: Layout) -> None:
    flat = layout.linear_offsets(padded=True)
    for axis in range(layout.rank):
        alignment = layout.alignment(axis)
        assert alignment in (1, 2, 4, 8, 16)
        starts = flat.take(np.arange(0, layout.padded(axis), layout.run(axis)), axis=axis)
        assert (starts % alignment == 0).all()
        if not layout.is_image and alignment < 16:  # and no larger power of two would do
            assert (starts % (2 * alignment) != 0).any()


@pytest.mark.parametrize("tile", [2, 4, 8])
def test_vector_widths_of_a_tile(tile: int) -> None:
    layout = Layout.tiled((6, 16), {1: tile}, (1, 0))
    assert [layout.vectorizes(1, w) for w in (1, 2, 4, 8, 16)] == [w <= tile for w in (1, 2, 4, 8, 16)]
    assert layout.alignment(1) == tile
    assert not layout.vectorizes(0, 2)


# ---- views --------------------------------------------------------------------------------------------------------


@given(shapes(), st.data())
def test_every_reshape_of_a_dense_row_major_layout_exists(shape: tuple[int, ...], data: st.DataObject) -> None:
    target = data.draw(factorisations(prod(shape)))
    assert Layout.row_major(shape).reshape(target) == Layout.row_major(target)


@given(layouts(max_elems=96), st.data())
def test_reshape_is_none_only_where_no_layout_exists(layout: Layout, data: st.DataObject) -> None:
    target = data.draw(factorisations(prod(layout.shape)))
    wanted = coordinates(layout).reshape(*target, len(layout.size))
    got = layout.reshape(target)
    if got is None:
        assert not exists(wanted, layout.size)
    else:
        np.testing.assert_array_equal(coordinates(got), wanted)
        assert got.size == layout.size


@given(layouts(max_elems=96), st.data())
def test_slice_is_none_only_where_no_layout_exists(layout: Layout, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, layout.rank - 1))
    start = data.draw(st.integers(0, layout.shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, layout.shape[axis]))
    step = data.draw(st.integers(1, 5))
    wanted = coordinates(layout)[(slice(None),) * axis + (slice(start, stop, step),)]
    got = layout.slice(axis, start, stop, step)
    if got is None:
        assert not exists(wanted, layout.size)
    else:
        np.testing.assert_array_equal(coordinates(got), wanted)


@given(shapes(), st.data())
def test_every_slice_of_a_row_major_layout_exists(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, shape[axis]))
    assert Layout.row_major(shape, order).slice(axis, start, stop, data.draw(st.integers(1, 5))) is not None


@pytest.mark.parametrize(
    ("layout", "shape", "possible"),
    [
        (Layout.r_tile((6, 8), 2, 4), (6, 2, 4), True),  # the head is a tile
        (Layout.r_tile((6, 8), 2, 4), (6, 4, 2), True),  # the head halves a tile
        (Layout.r_tile((6, 8), 2, 4), (48,), True),
        (Layout.r_tile((6, 12), 2, 4), (6, 2, 6), False),  # the head tears a tile
        (Layout.r_tile((6, 9), 2, 4), (54,), False),  # padding would fall inside the merged axis
        (Layout.row_major((6, 60), pad={1: 64}), (6, 4, 15), True),  # whole steps of padding are cut off
        (Layout.row_major((6, 60), pad={1: 64}), (360,), True),
        (Layout.row_major((39, 60), pad={0: 8}), (3, 13, 60), True),
    ],
)
def test_reshapes_that_kernels_meet(layout: Layout, shape: tuple[int, ...], possible: bool) -> None:
    got = layout.reshape(shape)
    assert (got is not None) == possible
    if got is not None:
        np.testing.assert_array_equal(got.offsets(), layout.offsets().reshape(shape))


def test_a_sliced_tile_starts_later() -> None:
    layout = Layout.r_tile((6, 8), 2, 4)
    lower = layout.slice(0, 2, 6)
    assert lower is not None
    assert lower.base == (16,)
    assert layout.slice(0, 1, 6) is None  # starts inside a tile and crosses its end


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.build((0,), []), "at least 1"),
        (lambda: Layout.build((3,), []), "cover only 1"),
        (lambda: Layout.build((3,), [Mode(1, 3, 1)]), "names axis 1"),
        (lambda: Layout.build((3,), [Mode(0, 3, -1)]), "stride >= 0"),
        (lambda: Layout.build((3,), [Mode(0, 3, 1, 1)], (3,)), "dim within"),
        (lambda: Layout.build((3,), [Mode(0, 3, 1)], (2,)), "only \\(2,\\) is allocated"),
        (lambda: Layout.build((3,), [Mode(0, 3, 1)], (4,), (2,)), "reaches"),
        (lambda: Layout.build((3,), [Mode(0, 3, 1)], (4,), (-1,)), "base"),
        (lambda: Layout.build((3,), [Mode(0, 3, 1)], (4,), (0, 0)), "base"),
        (lambda: Layout.of((3,), [(1, None)]), "expected an axis"),
        (lambda: Layout.of((3,), [(0, 0)]), "expected an axis"),
        (lambda: Layout.of((3,), [(0, None), (0, None)]), "at most one None"),
        (lambda: Layout.r_tile((3,), 2, 2), "expected an axis"),
        (lambda: Layout.r_tile((3, 3), 2, 2, inner="diagonal"), "'row' or 'col'"),
        (lambda: Layout.r_tile((3, 3), 2, 2, axes=(1, 1)), "two different axes"),
        (lambda: Layout.row_major((3, 4)).permute((0, 0)), "not a permutation"),
        (lambda: Layout.row_major((3, 4)).reshape((5, 2)), "cannot reshape"),
        (lambda: Layout.row_major((3, 4)).expand((4,)), "cannot expand"),
        (lambda: Layout.row_major((3, 4)).expand((5, 4)), "cannot expand"),
        (lambda: Layout.row_major((3, 4)).slice(0, 2, 4), "does not fit"),
        (lambda: Layout.row_major((3, 4)).slice(2, 0, 1), "does not fit"),
        (lambda: Layout.row_major((3, 4)).c_expr("i"), "got 1 names"),
        (lambda: Layout.image((3, 4), [(0, None)], [(1, None)], 1).c_expr("i", "j"), "use c_exprs"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
