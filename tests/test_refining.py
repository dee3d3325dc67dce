"""Plans made again with what their kernels take within steps; times themselves are never judged here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.model import CostModel
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import planner, refining
from layoutopt.graph import TrainingGraph
from layoutopt.models import uncalibrated
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.refining import refine, with_measurements, within_step
from tests.graphs import linear_step, random_values


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return run_passes(linear_step(batch=4, seq=16, width=24, hidden=48))[0]


@pytest.fixture
def runtime(device_index: int) -> Runtime:
    return Runtime(devices()[device_index])


def values_of(graph: TrainingGraph) -> dict[str, np.ndarray]:
    values = random_values(graph)
    return {t.name: values[t.name] for t in graph.by_role("parameter", "state")}


def planned(graph: TrainingGraph, runtime: Runtime, strategy: str) -> Plan:
    return planner.plan(graph, CostModel(uncalibrated(runtime)), strategy, rewrites=[])


def test_kernels_within_a_step(graph: TrainingGraph, runtime: Runtime) -> None:
    model = uncalibrated(runtime)
    executor = Executor(runtime, graph, planned(graph, runtime, "rowmajor"), values_of(graph))
    found = within_step(executor, model, steps=3)
    alone = {step.kernel.key for step in executor.steps if step.label not in executor.shared}
    assert set(found) == alone
    assert all(len(m.rounds_ns) == 3 and m.ns > 0 for m in found.values())
    filed = with_measurements(model, found)
    costs = CostModel(filed)
    for step in executor.steps:
        cost = costs.predict(step.kernel)
        assert cost.measured == (step.kernel.key in alone)
        assert cost.total_ns > 0


def test_held_out_kernels_stay_held_out(graph: TrainingGraph, runtime: Runtime) -> None:
    model = uncalibrated(runtime)
    executor = Executor(runtime, graph, planned(graph, runtime, "rowmajor"), values_of(graph))
    found = within_step(executor, model, steps=1)
    key = next(iter(found))
    before = replace(model, measurements={key: replace(found[key], held_out=True)})
    after = with_measurements(before, found)
    assert after.measurements[key].held_out
    assert sum(m.held_out for m in after.measurements.values()) == 1


@pytest.mark.parametrize("faster", [True, False])
def test_only_a_faster_plan_is_kept(
    graph: TrainingGraph, runtime: Runtime, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = planned(graph, runtime, "rowmajor"), planned(graph, runtime, "random:1")
    assert refining._changed(first, other)
    times = {"before": [2.0, 2.0, 2.0], "new": [1.0, 1.0, 3.0] if faster else [1.0, 2.1, 2.2]}
    monkeypatch.setattr(refining, "measure_interleaved", lambda *_, **__: {k: (v, 0.0) for k, v in times.items()})
    told: list[str] = []
    solved = iter([other, other, other])
    start = values_of(graph)
    found = refine(
        runtime,
        graph,
        first,
        uncalibrated(runtime),
        lambda _: next(solved),
        values=start,
        rounds=3,
        announce=told.append,
    )
    assert (found.plan is other) == faster
    assert found.first_was_best != faster
    assert found.settled == faster  # solving again gives the plan that runs, or one that is known to be slower
    assert len(found.rounds) == 1
    assert len(told) == 2
    assert all(r.kept == faster and r.changed for r in found.rounds)
    assert ("kept" in told[0]) == faster
    assert found.model.measurements


def test_refining_for_real(graph: TrainingGraph, runtime: Runtime) -> None:
    """On the device, with its own solver: whatever comes out runs and gives the same loss."""
    start = values_of(graph)
    first = planned(graph, runtime, "greedy")
    found = refine(
        runtime,
        graph,
        first,
        uncalibrated(runtime),
        lambda model: planner.plan(graph, CostModel(model), rewrites=[]),
        values=start,
        rounds=1,
    )
    assert len(found.rounds) <= 1
    inputs = {t.name: random_values(graph)[t.name] for t in graph.by_role("input")}
    losses = []
    for plan in (first, found.plan):
        executor = Executor(runtime, graph, plan, start)
        executor.step(inputs)
        losses.append(executor.loss())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
