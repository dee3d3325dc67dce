"""Results made again in the backward pass: the same numbers, fewer tensors kept, and a planner that asks for it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from kernels import reference
from layoutopt import planner, rewrites
from layoutopt.checkpoint import initial_values
from layoutopt.errors import InfeasibleError
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrite_recompute import recomputed, with_recomputation
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import attention_step, linear_step, random_values
from tests.test_rewrite_updates import overwriting


@lru_cache(maxsize=4)
def graphs(name: str) -> TrainingGraph:
    if name == "linear":
        return run_passes(linear_step())[0]
    if name == "attention":
        return run_passes(attention_step())[0]
    return shipped(name)


def values_of(graph: TrainingGraph) -> dict[str, np.ndarray]:
    if graph.name == "vit-digits":
        return initial_values(graph, 0) | example_inputs(graph)
    return random_values(graph)


def made_again(graph: TrainingGraph) -> list[str]:
    return [name for name in graph.tensors if name.endswith(".again")]


@pytest.mark.parametrize("name", ["linear", "vit-digits"])
def test_same_results_and_less_kept(name: str) -> None:
    graph = graphs(name)
    changed = with_recomputation(graph)
    assert made_again(changed)
    values = values_of(graph)
    before, after = reference.run(graph, values), reference.run(changed, values)
    for tensor in graph.outputs:
        np.testing.assert_allclose(before[tensor], after[tensor], rtol=1e-6)
    for tensor in graph.tensors.values():
        if tensor.of:
            np.testing.assert_allclose(before[tensor.name], after[tensor.name], rtol=2e-6, atol=1e-7)
    for tensor in made_again(changed):
        kept = tensor.removesuffix(".again")
        assert all(op.phase != "backward" for op in changed.consumers[kept])
        assert all(op.phase == "backward" for op in changed.consumers[tensor])


def test_only_where_it_saves_memory() -> None:
    """Of one layer nothing is kept for long: with its result made again a step needs more; of six it needs less."""
    one, six = graphs("linear"), graphs("vit-digits")
    assert peak_bytes(with_recomputation(one)) > peak_bytes(one)
    assert recomputed(one) is one
    assert peak_bytes(recomputed(six)) < peak_bytes(six)


def test_all_rewrites_after_it() -> None:
    """Ops stay in an order that can be executed in place, whatever comes after."""
    graph = graphs("vit-digits")
    names = [name for name in rewrites.REWRITES if name != "half"]
    changed = rewritten(graph, names)
    assert made_again(changed)
    values = values_of(graph)
    before, after = overwriting(graph, values), overwriting(changed, values)
    # The gradient of a key's bias is zero: what AdamW makes of its rounding is not to be compared.
    updated = [op.outputs[0].tensor for op in graph.ops if op.phase == "update" and "k_proj.bias" not in op.name]
    assert len(updated) > 10
    for name in updated:
        np.testing.assert_allclose(before[name], after[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_nothing_to_do() -> None:
    """No activation function whose result is kept: the graph itself."""
    graph = graphs("attention")
    assert with_recomputation(graph) is graph


def test_planning_asks_for_it_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "ALWAYS", ())
    monkeypatch.setattr(rewrites, "OPTIONAL", ())
    graph = graphs("vit-digits")
    costs = FakeCosts()
    roomy = planner.plan(graph, costs)
    assert roomy.rewrites == ()
    small = planner.plan(graph, costs, rewrites=["recompute"])
    assert small.arena_bytes < roomy.arena_bytes
    tight = planner.plan(graph, costs, memory_bytes=small.arena_bytes)
    assert tight.rewrites == ("recompute",)
    assert tight.arena_bytes <= small.arena_bytes
    with pytest.raises(InfeasibleError):
        planner.plan(graph, costs, memory_bytes=small.arena_bytes // 4, micro_batches=1)
