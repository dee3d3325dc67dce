"""Bringing equal ops together: the same ops, a legal order, and the same results to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from layoutopt.blocks import spec_ids
from layoutopt.checkpoint import initial_values
from layoutopt.compare import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.rewrite_neighbours import alike_runs, bring_together


@pytest.fixture(scope="module")
def digits() -> TrainingGraph:
    return shipped("vit-digits")


def longest_runs(graph: TrainingGraph, kind: str) -> list[int]:
    return sorted((len(run) for run in alike_runs(graph) if graph.ops[run.start].kind == kind), reverse=True)


@pytest.mark.parametrize("name", ["vit-digits", "minilm", "gpt2", "swin-tiny", "llama-3.2-1b"])
def test_only_order_changes(name: str) -> None:
    graph = shipped(name)
    together = bring_together(graph)
    assert sorted(op.name for op in together.ops) == sorted(op.name for op in graph.ops)
    assert {op.name: op for op in together.ops} == {op.name: op for op in graph.ops}
    made: set[str] = {t.name for t in graph.tensors.values() if t.name not in graph.producer}
    for op in together.ops:
        assert {o.tensor for o in op.inputs} <= made, f"{op.name} runs before its inputs"
        made |= {o.tensor for o in op.outputs}


def test_attention_projections_and_weight_gradients_meet() -> None:
    graph = shipped("minilm")
    together = bring_together(graph)
    assert longest_runs(together, "contraction")[0] >= 4
    assert sum(1 for _ in alike_runs(together)) < 0.8 * sum(1 for _ in alike_runs(graph))


def test_results_are_the_same(digits: TrainingGraph) -> None:
    values = initial_values(digits, 0) | example_inputs(digits)
    before = reference.run(digits, values, np.float64)
    after = reference.run(bring_together(digits), values, np.float64)
    for name in (*digits.outputs, *(t.name for t in digits.by_role("parameter", "state"))):
        np.testing.assert_array_equal(before[name], after[name])


def test_runs_are_equal_and_independent(digits: TrainingGraph) -> None:
    graph = bring_together(digits)
    ids = spec_ids(graph)
    positions = [i for run in alike_runs(graph) for i in run]
    assert positions == list(range(len(graph.ops)))
    for run in alike_runs(graph):
        assert len({int(ids[i]) for i in run}) == 1
        for i in run:
            written = {graph.storage_of[o.tensor] for o in graph.ops[i].outputs}
            for j in run:
                if i != j:
                    assert not written & {graph.storage_of[o.tensor] for o in graph.ops[j].operands}
