"""Updates moved up: the same ops, never before the last reader of what they overwrite, the same results bit by bit."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from kernels import reference
from layoutopt.checkpoint import initial_values
from layoutopt.compare import example_inputs
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.models import shipped
from layoutopt.rewrite_neighbours import bring_together
from layoutopt.rewrite_updates import early_updates, peak_bytes, with_groups
from tests.graphs import attention_step, linear_step, random_values

GROUPS = [1, 2, 5, 1000]


@lru_cache(maxsize=4)
def graphs(name: str) -> TrainingGraph:
    if name == "linear":
        return linear_step()
    if name == "attention":
        return attention_step()
    return shipped(name)


def overwriting(graph: TrainingGraph, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The interpreter, but with one value per storage: what is updated in place is gone for whoever reads it later."""
    held: dict[str, tuple[str, np.ndarray]] = {}
    for tensor in graph.by_role("input", "parameter", "state", "constant"):
        value = values.get(tensor.name, graph.constants.get(tensor.name))
        held[graph.storage_of[tensor.name]] = tensor.name, np.broadcast_to(np.asarray(value), tensor.shape)
    for op in graph.ops:
        for operand in op.inputs:
            assert held[graph.storage_of[operand.tensor]][0] == operand.tensor, f"{op.name} reads what is gone"
        known = dict(held.values())
        for tensor, value in reference._execute(graph, op, known, np.float32):
            held[graph.storage_of[tensor.name]] = tensor.name, value
    return dict(held.values())


@pytest.mark.parametrize(
    ("name", "groups"),
    [("linear", 1), ("linear", 5), ("attention", 2), ("attention", 1000), ("vit-digits", 5)],
)
def test_results_are_the_same_to_the_last_bit(name: str, groups: int) -> None:
    graph = graphs(name)
    moved = with_groups(graph, groups)
    assert {op.name: op for op in moved.ops} == {op.name: op for op in graph.ops}
    values = random_values(graph) if name != "vit-digits" else initial_values(graph, 0) | example_inputs(graph)
    before, after = overwriting(graph, values), overwriting(moved, values)
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        np.testing.assert_array_equal(value, after[tensor], err_msg=tensor)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["minilm", "llama-3.2-1b", "swin-tiny"])
def test_no_op_reads_what_was_overwritten(name: str, groups: int) -> None:
    moved = with_groups(bring_together(graphs(name)), groups)
    holds = {moved.storage_of[t.name]: t.name for t in moved.by_role("input", "parameter", "state", "constant")}
    for op in moved.ops:
        for operand in op.inputs:
            assert holds.get(moved.storage_of[operand.tensor]) == operand.tensor, op.name
        holds |= {moved.storage_of[o.tensor]: o.tensor for o in op.outputs}


def test_more_groups_never_let_gradients_live_longer() -> None:
    graph = graphs("llama-3.2-1b")
    peaks = [peak_bytes(g) for g in (graph, *(with_groups(graph, n) for n in (1, 2, 4, 8)))]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.86 * peaks[0]


def test_what_moves_is_worth_it_and_repeating_it_changes_nothing() -> None:
    large = early_updates(graphs("llama-3.2-1b"))
    assert peak_bytes(large) < 0.86 * peak_bytes(graphs("llama-3.2-1b"))
    blocks = sum(a.phase == "update" != b.phase for a, b in zip(large.ops, large.ops[1:], strict=False))
    assert 2 <= blocks <= 10
    assert early_updates(large) is large
    # Fullest at the loss, before the first gradient: nothing to gain.
    assert early_updates(graphs("bert-large")) is graphs("bert-large")


def chained(read_afterwards: bool) -> TrainingGraph:
    """``g = x·p; m += g; p -= m`` twice over, where a later op may read the new parameter."""
    shape = (8,)
    tensors = [Tensor("x", shape, role="input"), Tensor("loss", shape, role="output")]
    add, mul = (Expr(((name, ("x", 0), ("x", 1)),), (("t", 0),)) for name in ("add", "mul"))
    ops = []
    for k in "ab":
        tensors += [Tensor(f"p{k}", shape, role="parameter"), Tensor(f"m{k}", shape, role="state")]
        tensors += [Tensor(f"g{k}", shape, role="gradient"), Tensor(f"new m{k}", shape), Tensor(f"new p{k}", shape)]
        ops += [
            Op(f"grad {k}", "pointwise", (Operand("x"), Operand(f"p{k}")), (Operand(f"g{k}"),), {"expr": mul}),
            Op(f"late {k}", "pointwise", (Operand("x"), Operand(f"p{k}")), (Operand(f"l{k}"),), {"expr": add}),
        ]
        tensors.append(Tensor(f"l{k}", shape))
    for k in "ab":
        state, new = (Operand(f"m{k}"), Operand(f"g{k}")), (Operand(f"new m{k}"),)
        ops.append(Op(f"move {k}", "pointwise", state, new, {"expr": add}, "update", inplace=((0, 0),)))
        both, out = (Operand(f"p{k}"), Operand(f"new m{k}")), (Operand(f"new p{k}"),)
        ops.append(Op(f"step {k}", "pointwise", both, out, {"expr": add}, "update", inplace=((0, 0),)))
    last = ("new pa", "new pb") if read_afterwards else ("la", "lb")
    ops.append(Op("end", "pointwise", tuple(map(Operand, last)), (Operand("loss"),), {"expr": mul}))
    return TrainingGraph("chained", {t.name: t for t in tensors}, ops, ("loss",))


@pytest.mark.parametrize("read_afterwards", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_updates_that_build_on_each_other_keep_their_order(groups: int, read_afterwards: bool) -> None:
    graph = chained(read_afterwards)
    moved = with_groups(graph, groups)
    order = [op.name for op in moved.ops]
    for k in "ab":
        assert max(order.index(f"late {k}"), order.index(f"move {k}")) < order.index(f"step {k}")
    if groups == 1000:
        assert order.index("move a") < order.index("grad b")
    values = random_values(graph)
    before, after = overwriting(graph, values), overwriting(moved, values)
    for tensor, value in before.items():
        np.testing.assert_array_equal(value, after[tensor], err_msg=tensor)


def test_gradients_that_are_outputs_free_nothing() -> None:
    """They live to the end whatever happens, so that waiting for them to gather would be pointless."""
    graph = chained(False)
    kept = TrainingGraph(graph.name, graph.tensors, graph.ops, ("loss", "ga", "gb"))
    values = random_values(graph)
    for groups in GROUPS:
        np.testing.assert_array_equal(
            overwriting(with_groups(kept, groups), values)["ga"], overwriting(kept, values)["ga"]
        )
    assert early_updates(kept) is kept
