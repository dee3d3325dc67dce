"""Strategies side by side on a device: interleaved steps, one loss, cache counts; and made-up inputs."""

from __future__ import annotations

import statistics
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kernels.execute import Executor
from kernels.feed import Feed
from kernels.runtime import Runtime, devices
from layoutopt.compare import compare, measure_interleaved
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.stepcost import predict_step
from tests.graphs import Sketch, linear_step
from tests.plans import naive_plan, r_tile


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return run_passes(linear_step())[0]


def plans_for(graph: TrainingGraph, runtime: Runtime) -> dict[str, Plan]:
    return {
        "rowmajor": naive_plan(graph, runtime.limits),
        "rtile": naive_plan(graph, runtime.limits, r_tile),
        "relaid": naive_plan(graph, runtime.limits, r_tile, relayouts_share=1.0),
    }


def start(graph: TrainingGraph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in graph.by_role("parameter", "state")}


def test_rows_say_what_was_planned_measured_and_simulated(graph: TrainingGraph, device_index: int) -> None:
    from costmodel import device as device_models

    runtime = Runtime(devices()[device_index])
    plans = plans_for(graph, runtime)
    told: list[tuple[str, int, int]] = []
    model = replace(device_models.load("generic-cpu"), limits=runtime.limits)
    rows = compare(
        graph,
        plans,
        model,
        runtime=runtime,
        values=start(graph),
        rounds=4,
        progress=lambda *what: told.append(what),
    )
    assert [row.strategy for row in rows] == list(plans)
    for row, plan in zip(rows, plans.values(), strict=True):
        assert row.predicted_s == predict_step(plan, graph, model).step_s
        assert row.rounds == 4
        assert row.measured_s is not None
        assert row.measured_s > 0
        assert row.spread_s is not None
        assert row.spread_s >= 0
        assert row.relayouts == len(plan.relayouts)
        assert row.relayout_bytes == sum(r.bytes_moved for r in plan.relayouts)
        assert row.arena_bytes == plan.arena_bytes
        assert row.walked == 1.0
        assert next(iter(row.misses)) == "L1"
        assert all(m > 0 for m in row.misses.values())
    by_name = {row.strategy: row for row in rows}
    assert by_name["rowmajor"].relayouts == 0 < by_name["relaid"].relayouts
    losses = [row.loss for row in rows]
    assert all(loss is not None and np.isfinite(loss) for loss in losses)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)  # a layout changes no result
    assert told[0] == ("measuring", 1, 4)
    assert told[-1] == ("simulating", 3, 3)


def test_gaps_are_to_the_exact_plan_and_copies_that_are_not_run_count(graph: TrainingGraph) -> None:
    from costmodel import device as device_models

    model = device_models.load("generic-cpu")
    plain, relaid = naive_plan(graph, model.limits), naive_plan(graph, model.limits, r_tile, relayouts_share=1.0)
    exact = msgspec.structs.replace(plain, solver=msgspec.structs.replace(plain.solver, objective_ns=1000))
    peer = msgspec.structs.replace(relaid.solver, objective_ns=1300, not_run_copies=3, not_run_ns=200)
    plans = {"ilp": exact, "tflite": msgspec.structs.replace(relaid, solver=peer)}
    rows = compare(graph, plans, model, simulate_caches=False)
    assert [row.gap for row in rows] == [0.0, pytest.approx(0.5)]
    assert [(row.not_run, row.not_run_s) for row in rows] == [(0, 0.0), (3, pytest.approx(2e-7))]
    plans.pop("ilp")
    assert [row.gap for row in compare(graph, plans, model, simulate_caches=False)] == [None]


def test_turns_of_several_steps_give_the_time_of_one(graph: TrainingGraph, device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    plan = naive_plan(graph, runtime.limits)
    steps = []
    run = Executor.step

    def counted(self: Executor, inputs: dict[str, np.ndarray]) -> None:
        steps.append(1)
        run(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "step", counted)
        measured = measure_interleaved(graph, {"a": plan}, runtime, start(graph), rounds=4, budget_s=60.0, burst=5)
    assert len(steps) == 1 + 4 * 5
    assert len(measured["a"][0]) == 4


def test_no_device_measures_nothing(graph: TrainingGraph) -> None:
    from costmodel import device as device_models

    model = device_models.load("generic-cpu")
    rows = compare(graph, {"one": naive_plan(graph, model.limits)}, model, simulate_caches=False)
    (row,) = rows
    assert (row.measured_s, row.spread_s, row.loss, row.rounds) == (None, None, None, 0)
    assert (dict(row.misses), row.memory_bytes, row.walked) == ({}, None, None)


def test_rounds_stop_at_the_budget_but_not_before_three(graph: TrainingGraph, device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    plans = plans_for(graph, runtime)
    measured = measure_interleaved(graph, plans, runtime, start(graph), rounds=50, budget_s=0.0)
    assert {name: len(times) for name, (times, _) in measured.items()} == dict.fromkeys(plans, 3)
    assert all(statistics.median(times) > 0 for times, _ in measured.values())


def test_made_up_inputs_are_ones_that_the_graph_takes() -> None:
    s = Sketch()
    s.tensor("ids", (3, 5), "input", "int32")
    s.tensor("mask", (3, 5), "input", "int32")
    s.tensor("seen", (3,), "input", "bool")
    s.tensor("labels", (15,), "input", "int32")
    s.tensor("x", (15, 4), "input")
    s.tensor("lr", (), "input")
    s.tensor("table", (7, 4), "parameter")
    s.op("gather", ["table", ("ids", ("reshape", (15,)))], {"rows": (15, 4)})
    s.op("log_softmax", [s.add("sum", "rows", "x")], {"logp": (15, 4)})
    s.op("nll_loss", ["logp", "labels"], {"loss": (), "weight": ()}, ignore_index=-100)
    graph = s.graph("inputs", "loss")
    made = example_inputs(graph, seed=1)
    Feed(graph).check(made)  # shapes, types, ids within the table, labels within the classes
    assert len(np.unique(made["ids"])) > 3
    assert set(np.unique(made["labels"])) <= set(range(4))
    assert made["mask"].all()
    assert made["seen"].all()
    assert made["x"].dtype == np.float32
    assert 0 < made["lr"] < 1
    assert (example_inputs(graph, seed=1)["x"] == made["x"]).all()
