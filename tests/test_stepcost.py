"""A step's prediction: its kernels as they are launched, and the host beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel import device as device_models
from costmodel.device import Fact, FamilyFit, Probe
from costmodel.model import CostModel
from costmodel.shared import merged_ns, stacked_ns
from kernels.bind import bind
from kernels.execute import Executor
from kernels.launches import launch_order
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits, Kernel
from layoutopt import planner
from layoutopt.models import shipped
from layoutopt.plan import Plan
from layoutopt.rewrite_neighbours import sharing
from layoutopt.rewrites import planned_graph
from layoutopt.stepcost import planned_s, predict_step

LAUNCH_NS, HOST_NS, TRIP_NS = 1000.0, 3000.0, 50_000.0


def model_of(limits: DeviceLimits, host_ns: float = HOST_NS) -> device_models.DeviceModel:
    generic = device_models.load("generic-cpu")
    facts = {"launch_s": LAUNCH_NS * 1e-9, "host_launch_s": host_ns * 1e-9}
    probes = {"round_trip": Probe("waits", 1.0, "steps", (int(TRIP_NS),))}
    added = {key: Fact(value, "made up", "assumed") for key, value in facts.items()}
    return replace(generic, limits=limits, facts={**generic.facts, **added}, probes=probes)


def plan_for(model: device_models.DeviceModel) -> Plan:
    return planner.plan(shipped("vit-digits"), CostModel(model), "rowmajor", rewrites=())


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan_for(model_of(DeviceLimits()))


def test_a_step_is_its_launches(planned: Plan) -> None:
    graph, model = shipped("vit-digits"), model_of(DeviceLimits())
    cost = predict_step(planned, graph, model)
    steps = bind(graph, planned, model.limits)
    order = launch_order(steps, {slot.name: slot for slot in planned.arena}, model.limits)
    assert sorted(i for members in order for i in members) == list(range(len(steps)))
    assert cost.launches == 1 + sum(len(steps[m[0]].kernel.launches) for m in order)
    assert cost.sharing == sum(len(m) for m in order if len(m) > 1) > 0
    assert cost.gaps_s == pytest.approx(cost.launches * LAUNCH_NS * 1e-9)
    assert cost.host_s == pytest.approx(cost.launches * HOST_NS * 1e-9)
    assert cost.wait_s == pytest.approx(TRIP_NS * 1e-9)
    costs = CostModel(model)
    alone = sum(costs.predict(s.kernel).total_ns - len(s.kernel.launches) * LAUNCH_NS for s in steps) * 1e-9
    assert 0 < cost.kernels_s <= alone * (1 + 1e-9), "sharing a launch makes no kernel slower"


def test_the_host_takes_a_core_of_a_cpu_and_runs_beside_a_gpu() -> None:
    graph = shipped("vit-digits")
    cpu, gpu = model_of(DeviceLimits(compute_units=4)), model_of(DeviceLimits(kind="gpu"))
    own = predict_step(plan_for(cpu), graph, cpu)
    assert own.step_s == pytest.approx(own.device_s + own.host_s / 4 + own.wait_s)
    plan = plan_for(gpu)
    beside = predict_step(plan, graph, gpu)
    assert beside.step_s == pytest.approx(beside.device_s + beside.wait_s), "the host is done earlier"
    slow = predict_step(plan, graph, model_of(DeviceLimits(kind="gpu"), 1e9))
    assert slow.step_s == pytest.approx(slow.launches * 1.0 + slow.wait_s), "a slow host is what a step waits for"


def test_a_model_that_knows_nothing_of_the_host_leaves_it_out(planned: Plan) -> None:
    model = model_of(DeviceLimits())
    facts = {k: v for k, v in model.facts.items() if k != "host_launch_s"}
    cost = predict_step(planned, shipped("vit-digits"), replace(model, facts=facts, probes={}))
    assert (cost.host_s, cost.wait_s) == (0.0, 0.0)
    assert cost.step_s == pytest.approx(cost.device_s)


def test_launches_are_those_of_the_executor(planned: Plan, device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    graph, model = shipped("vit-digits"), model_of(runtime.limits)
    plan = plan_for(model)
    executor = Executor(runtime, graph, plan)
    cost = predict_step(plan, graph, model)
    assert (cost.launches, cost.sharing) == (executor.launches, len(executor.shared))
    executor.close()


# ---- what sharing a launch is worth ---------------------------------------------------------------------------------


def kernel_with(costs: CostModel, groups: tuple[int, int]) -> Kernel:
    """One of the plan's kernels with a single launch of so many groups (at least, at most)."""
    kernels = (step.kernel for step in bind(shipped("vit-digits"), plan_for(costs.model), costs.limits))
    return next(k for k in kernels if len(k.launches) == 1 and groups[0] <= k.launches[0].nest.groups <= groups[1])


def fitted(units: int, kind: str = "cpu", **ns_per: float) -> CostModel:
    constants = {"all": FamilyFit(ns_per, 9, 0.0)}
    return CostModel(replace(model_of(DeviceLimits(kind=kind, compute_units=units)), constants=constants))


def test_small_kernels_are_as_fast_together_as_one_of_them() -> None:
    costs = fitted(1000, launches=400.0, trips=1.0)
    kernel = kernel_with(costs, (1, 100))
    groups = kernel.launches[0].nest.groups
    assert stacked_ns(costs, kernel, 5000.0, 1000 // groups) == pytest.approx(5000.0)
    assert merged_ns(costs, [kernel] * 3, [5000.0] * 3, 3 * groups) == pytest.approx(5000.0)


def test_kernels_that_fill_the_device_take_their_work_and_start_once() -> None:
    costs = fitted(1, launches=400.0, groups=3.0, trips=1.0)
    kernel = kernel_with(costs, (1, 1 << 30))
    start = 400.0 / (costs.predict(kernel).total_ns - LAUNCH_NS)
    assert 0.001 < start < 0.9
    assert stacked_ns(costs, kernel, 5000.0, 3) == pytest.approx(5000.0 * (start + 3 * (1 - start)))
    together = merged_ns(costs, [kernel, kernel], [5000.0, 3000.0], 7)
    assert together == pytest.approx(5000.0 + 3000.0 * (1 - start))


def test_one_part_of_kernels_that_run_at_once() -> None:
    costs = fitted(1000, launches=400.0, trips=1.0)
    small = kernel_with(costs, (1, 100))
    alone, third = costs.predict(small), costs.predict(small, 3)
    assert third.total_ns == pytest.approx(alone.total_ns / 3), "what leaves most of the device idle costs no more"
    assert third.compute_ns + third.memory_ns + third.launch_ns == pytest.approx(third.total_ns)
    busy = fitted(1, launches=400.0, trips=1.0)
    both = 2 * busy.predict(kernel_with(busy, (1, 1 << 30)), 2).total_ns
    one = busy.predict(kernel_with(busy, (1, 1 << 30))).total_ns
    assert one < both < 2 * one - LAUNCH_NS + 1, "one start and one gap are saved, no work"


def test_a_plan_prices_neighbours_by_their_part() -> None:
    costs = fitted(1000, kind="gpu", launches=4000.0, trips=1.0)
    plan = planner.plan(shipped("vit-digits"), costs, "rowmajor")
    graph = planned_graph(plan, shipped("vit-digits"))
    runs = [group for group in sharing(graph, 1000) if len(group) > 1]
    assert runs
    steps = [s for s, (kind, _) in zip(bind(graph, plan, costs.limits), plan.steps, strict=True) if kind == "op"]
    for run in runs:
        for i in run:
            assert plan.ops[i].cost.total_ns == round(costs.predict(steps[i].kernel, len(run)).total_ns)
            assert plan.ops[i].cost.total_ns < costs.predict(steps[i].kernel).total_ns
    planner.validate(plan, shipped("vit-digits"), costs)


def test_without_a_fit_all_is_work() -> None:
    costs = CostModel(model_of(DeviceLimits(compute_units=1)))
    kernel = kernel_with(costs, (1, 1 << 30))
    assert stacked_ns(costs, kernel, 5000.0, 3) == pytest.approx(15_000.0)


def test_launches_alone_cost_no_more_together() -> None:
    costs = fitted(1, launches=400.0)
    kernel = kernel_with(costs, (1, 1 << 30))
    assert stacked_ns(costs, kernel, 5000.0, 3) == pytest.approx(5000.0)
    assert merged_ns(costs, [kernel, kernel], [5000.0, 3000.0], 7) == pytest.approx(5000.0)


def test_a_step_is_what_is_most_likely_whatever_caution_its_plan_was_made_with() -> None:
    sure, unsure = (
        replace(
            model_of(DeviceLimits()),
            constants={"all": FamilyFit({"launches": 400.0, "trips": 1.0}, 9, 0.0, error_90=error)},
        )
        for error in (0.0, 0.3)
    )
    plans = [planner.plan(shipped("vit-digits"), CostModel(m), "rowmajor", rewrites=()) for m in (sure, unsure)]
    costs = [predict_step(p, shipped("vit-digits"), m) for p, m in zip(plans, (sure, unsure), strict=True)]
    assert planned_s(plans[1]) > planned_s(plans[0]) * 1.05, "the plan's own costs are cautious"
    assert costs[1] == costs[0]
