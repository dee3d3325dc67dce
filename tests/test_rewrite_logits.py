"""The gradient of a cross-entropy over its logits: same updates, no second copy, and no logits to read afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import planner, rewrites
from layoutopt.errors import GraphError
from layoutopt.graph import Op, TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.rewrite_logits import overwrite_logits
from layoutopt.rewrite_updates import peak_bytes
from tests.fake_costs import FakeCosts
from tests.graphs import linear_step, random_values


def step() -> TrainingGraph:
    return run_passes(linear_step())[0]


def gradient_of(graph: TrainingGraph) -> Op:
    return next(op for op in graph.ops if op.kind == "cross_entropy_grad")


def test_the_gradient_takes_the_logits_place() -> None:
    graph = step()
    changed = overwrite_logits(graph, 1)
    op = gradient_of(changed)
    assert op.inplace == ((0, 1),)
    assert changed.storage_of[op.outputs[0].tensor] == changed.storage_of[op.inputs[1].tensor]
    assert graph.outputs == ("loss", "logits")
    assert changed.outputs == ("loss",)
    values = random_values(graph)
    before, after = reference.run(graph, values), reference.run(changed, values)
    for name in [t.name for t in graph.tensors.values() if t.of] + ["loss"]:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_memory_of_many_classes() -> None:
    """Where the logits are what a step is full of, it needs one of them less."""
    graph = run_passes(linear_step(batch=8, seq=16, width=2, hidden=2, classes=5000))[0]
    saved = peak_bytes(graph) - peak_bytes(overwrite_logits(graph))
    assert saved == 8 * 16 * 5000 * 4


def test_small_logits_and_those_read_later_stay() -> None:
    graph = step()
    assert overwrite_logits(graph) is graph
    later = linear_step()
    op = gradient_of(graph)
    read_again = graph.with_ops(graph.ops, outputs=(*graph.outputs, op.outputs[0].tensor))
    assert overwrite_logits(read_again, 1) is read_again
    assert later.outputs == graph.outputs


def test_a_step_on_the_device(device_index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same parameters; the logits are refused rather than read as their gradient; `keep` keeps them."""
    monkeypatch.setitem(rewrites.REWRITES, "logits", lambda graph: overwrite_logits(graph, 1))
    monkeypatch.setattr(rewrites, "ALWAYS", ("logits",))
    monkeypatch.setattr(rewrites, "OPTIONAL", ())
    runtime = Runtime(devices()[device_index])
    graph = step()
    values = random_values(graph)
    inputs = {t.name: values[t.name] for t in graph.by_role("input")}
    starts = {t.name: values[t.name] for t in graph.by_role("parameter", "state")}
    expected = reference.run(graph, values)
    costs = FakeCosts(runtime.limits)
    plan = planner.plan(graph, costs)
    assert plan.rewrites == ("logits",)
    run = Executor(runtime, graph, plan, starts, poison=True)
    run.step(inputs)
    assert run.loss() == pytest.approx(float(expected["loss"]), rel=1e-5)
    for tensor in graph.tensors.values():
        if tensor.of:
            np.testing.assert_allclose(run.read(tensor.of), expected[tensor.name], rtol=1e-4, atol=1e-5)
    with pytest.raises(GraphError, match="overwritten within the step"):
        run.read("logits")
    kept = planner.plan(graph, costs, keep=["logits"])
    assert kept.rewrites == ()
    run = Executor(runtime, graph, kept, starts, keep=["logits"])
    run.step(inputs)
    np.testing.assert_allclose(run.read("logits"), expected["logits"], rtol=1e-4, atol=1e-5)
