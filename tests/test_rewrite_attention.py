"""Attention as one op: what is recognised, what is left alone, and that the step computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Sketch, attention_step, expand, permute, random_values, reshape, result_values

from kernels.reference import run
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrite_attention import fuse_attention
from layoutopt.rewrites import rewritten
from layoutopt.workload import facts

FULL_SIZE = {"minilm": 6, "gpt2": 12, "llama-3.2-1b": 16, "gemma-2-2b": 26, "clip": 24, "vit-tiny": 12, "swin-tiny": 0}
ODD = {
    "bert-tiny": 2,
    "gpt2-odd": 2,
    "llama-odd": 2,
    "gemma-odd": 2,
    "qwen-odd": 2,
    "opt-odd": 2,
    "vit-odd": 2,
    "whisper-odd": 6,
    "clip-odd": 4,
    "swin-odd": 0,
}


DROPPED = ("bert-tiny", "gpt2-odd")
"""Those whose configurations have dropout in attention."""


def kinds(graph: TrainingGraph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


def check_same(before: TrainingGraph, after: TrainingGraph, values: dict[str, np.ndarray]) -> None:
    """Every output, in float64."""
    expected = result_values(before, run(before, values))
    got = result_values(after, run(after, values))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(got[name] / scale, value / scale, rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_models(name: str) -> None:
    before = shipped(name)
    after = rewritten(before, ["attention"])
    found, count = kinds(after), FULL_SIZE[name]
    assert (found["attention"], found["attention_grad"]) == (count, count)
    if not count:
        assert after.ops == before.ops
        return
    assert found["softmax"] == found["softmax_grad"] == 0
    assert kinds(before)["contraction"] - found["contraction"] == 6 * count
    # The scores are calculated twice, and nothing of their size is left.
    assert 1 < facts(after)["flops"] / facts(before)["flops"] < 1.1
    probabilities = {op.outputs[0].tensor for op in before.ops if op.kind.startswith("softmax")}
    assert not probabilities & set(after.tensors)
    assert len(before.tensors) - len(after.tensors) >= 2 * count


def test_a_step_built_by_hand() -> None:
    graph, _ = run_passes(attention_step())
    after = fuse_attention(graph)
    assert (kinds(after)["attention"], kinds(after)["attention_grad"]) == (1, 1)
    assert fuse_attention(after).ops == after.ops
    check_same(graph, after, random_values(graph, 1))


@pytest.mark.peer
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", ODD)
def test_models_of_the_zoo(name: str, dropout: bool) -> None:
    from zoo_cases import example, values_of

    from layoutopt.capture import capture
    from layoutopt.optimizers import Sgd, step_values

    module, batch, loss = example(name, dropout=dropout)
    optimizer = Sgd(lr=0.05, momentum=0.9)
    graph, _ = run_passes(capture(module, batch, loss=loss, optimizer=optimizer, keep_grads=True, dropout=dropout))
    after = fuse_attention(graph)
    assert (kinds(after)["attention"], kinds(after)["attention_grad"]) == (ODD[name], ODD[name])
    dropped = [op for op in after.ops if "drop" in op.attrs]
    assert len(dropped) == (2 * ODD[name] if dropout and name in DROPPED else 0)
    check_same(graph, after, values_of(graph, module, batch) | step_values(graph, 1))


# ---- what is left alone ---------------------------------------------------------------------------------------------


def attention(change: Callable[[Sketch, dict[str, Any]], None] | None = None) -> TrainingGraph:
    """Forward and backward over [2,5,3] queries and [2,7,3] keys, with a mask; ``change`` may add readers."""
    s = Sketch()
    s.tensor("q", (2, 5, 3), "input")
    s.tensor("k", (2, 7, 3), "input")
    s.tensor("v", (2, 7, 4), "input")
    s.tensor("do", (2, 5, 4), "input")
    s.tensor("mask", (7,), "input")
    s.op("contraction", ["q", ("k", permute(0, 2, 1))], {"s": (2, 5, 7)}, alpha=0.5)
    s.add("t", "s", ("mask", expand(2, 5, 7)))
    s.op("softmax", [("t", reshape(10, 7))], {"p": (10, 7)})
    p = ("p", reshape(2, 5, 7))
    s.op("contraction", [p, "v"], {"o": (2, 5, 4)})
    s.phase = "backward"
    s.op("contraction", [(*p, permute(0, 2, 1)), "do"], {"dv": (2, 7, 4)})
    s.op("contraction", ["do", ("v", permute(0, 2, 1))], {"dp": (2, 5, 7)})
    s.op("softmax_grad", [("dp", reshape(10, 7)), "p"], {"ds": (10, 7)})
    ds = ("ds", reshape(2, 5, 7))
    s.op("contraction", [ds, "k"], {"dq": (2, 5, 3)}, alpha=0.5)
    s.op("contraction", [(*ds, permute(0, 2, 1)), "q"], {"dk": (2, 7, 3)}, alpha=0.5)
    outputs = ["o", "dq", "dk", "dv"]
    if change is not None:
        change(s, {"outputs": outputs})
    return s.graph("attention", *outputs)


def replaced(s: Sketch, name: str, **attrs: Any) -> None:
    from dataclasses import replace

    s.ops = [replace(op, attrs={**op.attrs, **attrs}) if op.outputs[0].tensor == name else op for op in s.ops]


LEFT_ALONE: dict[str, Callable[[Sketch, dict[str, Any]], Any]] = {
    "probabilities are an output": lambda s, more: more["outputs"].append("p"),
    "scores are read": lambda s, more: (s.add("twice", "s", "s"), more["outputs"].append("twice")),
    "a bias of the scores is trained": lambda s, more: (
        s.op("reduce", ["ds"], {"dbias": (10,)}, fn="sum"),
        more["outputs"].append("dbias"),
    ),
    "another scale backward": lambda s, more: replaced(s, "dq", alpha=0.25),
    "a scaled output": lambda s, more: replaced(s, "o", alpha=2.0),
}


def test_the_plain_case_is_fused() -> None:
    graph = attention()
    after = fuse_attention(graph)
    assert kinds(after) == {"attention": 1, "attention_grad": 1}
    assert after.tensors["o.peak"].shape == (2, 5)
    check_same(graph, after, random_values(graph, 2))


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    graph = attention(LEFT_ALONE[case])
    assert fuse_attention(graph).ops == graph.ops


def test_a_gradient_that_nobody_wants() -> None:
    """As in the first layer of a model whose queries alone are tuned."""

    def only_queries(s: Sketch, more: dict[str, Any]) -> None:
        s.ops = [op for op in s.ops if op.outputs[0].tensor not in ("dk", "dv")]
        for name in ("dk", "dv"):
            more["outputs"].remove(name)

    graph = attention(only_queries)
    after = fuse_attention(graph)
    assert kinds(after) == {"attention": 1, "attention_grad": 1}
    check_same(graph, after, random_values(graph, 3))


def test_forward_alone() -> None:
    def forward(s: Sketch, more: dict[str, Any]) -> None:
        s.ops = [op for op in s.ops if op.phase == "forward"]
        del more["outputs"][1:]

    graph = attention(forward)
    after = fuse_attention(graph)
    assert kinds(after) == {"attention": 1}
    check_same(graph, after, random_values(graph, 4))


def test_a_wholly_masked_row_is_uniform() -> None:
    graph = attention()
    values = random_values(graph, 5)
    values["mask"] = np.full(7, np.finfo(np.float32).min, np.float64)
    after = fuse_attention(graph)
    got = run(after, values, np.float32)
    np.testing.assert_allclose(got["o"], np.broadcast_to(values["v"].mean(1, keepdims=True), (2, 5, 4)), rtol=1e-5)
    check_same(graph, after, values)
