"""Views: on a shape, an array and a layout they mean the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.errors import GraphError
from layoutopt.layout import Layout
from layoutopt.view import IDENTITY, Step, View
from tests.layout_cases import chains, coordinates, exists, factorisations, layouts, shapes, steps, view_coordinates


@given(layouts(), st.data())
def test_view_of_a_layout_is_the_layout_of_the_view(layout: Layout, data: st.DataObject) -> None:
    view = data.draw(chains(layout.shape))
    got = view.layout(layout)
    if got is None:
        return
    assert got.shape == view.shape(layout.shape)
    assert got.size == layout.size
    np.testing.assert_array_equal(coordinates(got), view_coordinates(view, coordinates(layout)))


@given(layouts(max_elems=64), st.data())
def test_a_single_step_is_refused_only_where_no_layout_exists(layout: Layout, data: st.DataObject) -> None:
    view = View((data.draw(steps(layout.shape)),))
    got = view.layout(layout)
    wanted = view_coordinates(view, coordinates(layout))
    assert (got is not None) == exists(wanted, layout.size)


@given(shapes(max_elems=64), st.data())
def test_whatever_a_dense_tensor_can_be_seen_as_is_found(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Chains of which numpy makes every stage without a copy exist as layouts."""
    view, seen = View(), shape
    values = np.arange(int(np.prod(shape))).reshape(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(steps(seen))
        strided = View((step,)).array(values)
        if np.shares_memory(strided, values) and strided.size <= 600:
            view, values, seen = view.then(step), strided, strided.shape
    got = view.layout(Layout.row_major(shape))
    assert got is not None
    np.testing.assert_array_equal(got.offsets(), values)


@given(shapes(), st.data())
def test_shape_is_the_array_s(shape: tuple[int, ...], data: st.DataObject) -> None:
    view = data.draw(chains(shape))
    assert view.array(np.zeros(shape)).shape == view.shape(shape)


@given(shapes(), st.data())
def test_then_and_simplified_change_no_meaning(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    plain: list[Step] = []
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(steps(View(tuple(plain)).shape(shape)))
        if np.prod(View((*plain, step)).shape(shape)) <= 2000:
            plain.append(step)
    want = View(tuple(plain)).array(values)
    merged = View().then(*plain)
    np.testing.assert_array_equal(merged.array(values), want)
    simplified = merged.simplified(shape)
    np.testing.assert_array_equal(simplified.array(values), want)
    assert len(simplified.steps) <= len(merged.steps) <= len(plain)
    for first, second in zip(merged.steps, merged.steps[1:], strict=False):
        assert first.kind != second.kind or first.kind in ("expand", "slice")


@given(shapes(), st.data())
def test_inverse_undoes(shape: tuple[int, ...], data: st.DataObject) -> None:
    view, seen = View(), shape
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            view = view.then(("permute", tuple(data.draw(st.permutations(range(len(seen)))))))
        else:
            view = view.then(("reshape", data.draw(factorisations(int(np.prod(shape))))))
        seen = view.shape(shape)
    values = np.arange(int(np.prod(shape))).reshape(shape)
    inverse = view.inverse(shape)
    assert view.is_bijective
    assert inverse.shape(seen) == shape
    np.testing.assert_array_equal(inverse.array(view.array(values)), values)
    np.testing.assert_array_equal(view.array(inverse.array(view.array(values))), view.array(values))


@given(layouts(max_elems=64), st.data())
def test_inverse_brings_a_layout_back(layout: Layout, data: st.DataObject) -> None:
    shape = layout.shape
    view = View().then(
        ("permute", tuple(data.draw(st.permutations(range(len(shape)))))),
        ("reshape", data.draw(factorisations(int(np.prod(shape))))),
    )
    there = view.layout(layout)
    if there is not None:
        back = view.inverse(shape).layout(there)
        assert back is not None
        np.testing.assert_array_equal(coordinates(back), coordinates(layout))


def test_heads_are_split_merged_and_split_again_without_moving() -> None:
    heads = View().then(("reshape", (3, 13, 4, 15)), ("permute", (0, 2, 1, 3)), ("reshape", (12, 13, 15)))
    stored = Layout.row_major((39, 60))
    seen = heads.layout(stored)
    assert seen is not None  # batch and head have the tokens between them: one axis of two digits
    assert seen.c_expr("b", "s", "d") == "((b>>2)*780+(b&3)*15+s*60+d)"
    assert heads.inverse((39, 60)).layout(seen) == stored
    assert heads.layout(Layout.r_tile((39, 60), 4, 4)) is None  # heads of 15 tear tiles of 4
    assert heads.layout(Layout.r_tile((39, 60), 13, 5)) is not None


def test_words_for_people_and_truth() -> None:
    view = View().then(("reshape", (6, 2)), ("permute", (1, 0)))
    assert view.describe() == "reshape[6,2] permute[1,0]"
    assert view
    assert not IDENTITY
    assert IDENTITY.describe() == "whole"
    assert not View().then(("permute", (1, 0)), ("permute", (1, 0)))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("reshape", (5, 2)), "element counts differ"),
        (("permute", (0, 0)), "does not match"),
        (("expand", (4,)), "must match or be 1"),
        (("expand", (3, 5)), "must match or be 1"),
        (("slice", (1, 2, 5, 1)), "does not fit"),
        (("slice", (2, 0, 1, 1)), "does not fit"),
        (("slice", (0, 0, 3, 0)), "does not fit"),
    ],
)
def test_steps_that_do_not_fit_are_refused(step: tuple[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        View().then(step).shape((3, 4))


def test_unknown_steps_and_lossy_inverses_are_refused() -> None:
    with pytest.raises(GraphError, match="unknown view step 'roll'"):
        View().then(("roll", (1,)))
    with pytest.raises(GraphError, match="slices or expands"):
        View().then(("slice", (0, 0, 1, 1))).inverse((3, 4))
