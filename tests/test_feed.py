"""Inputs of a step: converted where that is safe, refused in one sentence where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.feed import Feed, cast
from layoutopt.errors import GraphError
from layoutopt.graph import Op, Operand, Tensor, TrainingGraph
from layoutopt.view import Step, View


def text_graph() -> TrainingGraph:
    """Ids look up a table of 11 rows; the rows are logits over 4 classes for targets that may be -100."""
    tensors = [
        Tensor("ids", (2, 3), "int32", "input"),
        Tensor("labels", (6,), "int32", "input"),
        Tensor("mask", (2, 3), "bool", "input"),
        Tensor("scale", (), "float32", "input"),
        Tensor("table", (11, 4), role="parameter", init="normal:0.5"),
        Tensor("rows", (6, 4)),
        Tensor("loss", (), role="output"),
        Tensor("lse", (6,)),
        Tensor("weight", ()),
    ]
    flat = View((Step("reshape", (6,)),))
    ops = [
        Op("look_up", "gather", (Operand("table"), Operand("ids", flat)), (Operand("rows"),)),
        Op(
            "loss",
            "cross_entropy",
            (Operand("rows"), Operand("labels")),
            (Operand("loss"), Operand("lse"), Operand("weight")),
            {"ignore_index": -100},
            "loss",
        ),
    ]
    return TrainingGraph("text", {t.name: t for t in tensors}, ops, ("loss",))


def good() -> dict[str, np.ndarray]:
    return {
        "ids": np.array([[0, 10, 3], [4, 5, 6]]),
        "labels": np.array([0, 3, -100, 1, 2, 3]),
        "mask": np.ones((2, 3), np.bool_),
        "scale": np.float32(0.5),
    }


def test_good_inputs_come_back_in_the_graphs_dtypes() -> None:
    out = Feed(text_graph()).check(good() | {"mask": np.ones((2, 3), np.int64), "scale": 2})
    assert {name: array.dtype.name for name, array in out.items()} == {
        "ids": "int32",
        "labels": "int32",
        "mask": "bool",
        "scale": "float32",
    }
    assert np.array_equal(out["ids"], good()["ids"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([[0, 11, 3], [4, 5, 6]])}, r"'ids' holds 11 at \[1\]: the rows of 'table' are 0\.\.10$"),
        ({"ids": np.array([[0, 1, 3], [4, -1, 6]])}, r"'ids' holds -1 at \[4\]"),
        ({"labels": np.array([0, 4, 0, 0, 0, 0])}, r"holds 4 at \[1\]: .* 0\.\.3 \(or -100, which is ignored\)"),
        ({"labels": np.array([0, -1, 0, 0, 0, 0])}, r"holds -1 at \[1\]"),
        ({"ids": np.zeros((3, 2), np.int64)}, r"'ids' has shape \(3, 2\); the graph expects \(2, 3\)"),
        ({"ids": np.zeros((2, 3), np.float32)}, "'ids' has dtype float32; the graph expects int32"),
        ({"ids": np.full((2, 3), 2**40)}, "beyond 32 bits"),
        ({"mask": np.full((2, 3), 2)}, "'mask' has dtype int64; the graph expects bool"),
        ({"scale": np.bool_(True)}, "'scale' has dtype bool; the graph expects float32"),
        ({"extra": np.zeros(1)}, "the graph has no input 'extra'; its inputs are ids, labels, mask, scale"),
    ],
)
def test_bad_inputs_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Feed(text_graph()).check(good() | change)


def test_missing_input_is_refused_where_it_is_required() -> None:
    feed = Feed(text_graph())
    some = {name: value for name, value in good().items() if name != "labels"}
    with pytest.raises(GraphError, match=r"input 'labels' \[6\] is missing"):
        feed.check(some)
    assert set(feed.check(some, frozenset({"ids"}))) == set(some)


def test_integer_arrays_are_no_floats() -> None:
    with pytest.raises(GraphError, match="has dtype int64; the graph expects float32"):
        cast(Tensor("x", (2,), role="input"), np.zeros(2, np.int64))
    assert cast(Tensor("x", (2,), role="input"), np.zeros(2)).dtype == np.float32
