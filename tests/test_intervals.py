"""How sure a plan's costs are, on a device whose times have a known law and noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel import device as device_models
from costmodel.device import DeviceModel, Measurement
from costmodel.features import FEATURES, features
from costmodel.fit import fit, samples_of
from costmodel.model import CostModel, spec_text
from kernels.bind import bind
from kernels.spec import Kernel
from layoutopt import planner
from layoutopt.intervals import plan_intervals
from layoutopt.models import shipped
from layoutopt.plan import Plan

GRAPH = "vit-digits"
NOISE = 0.1


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """What two plans run."""
    graph, facts = shipped(GRAPH), device_models.load("generic-cpu")
    costs = CostModel(facts)
    plans = [planner.plan(graph, costs, strategy, rewrites=()) for strategy in ("rowmajor", "greedy")]
    return list({s.kernel.key: s.kernel for plan in plans for s in bind(graph, plan, facts.limits)}.values())


@pytest.fixture(scope="module")
def model(kernels: list[Kernel]) -> DeviceModel:
    """Two in three of these kernels are measured."""
    facts = device_models.load("generic-cpu")
    costs, rng = CostModel(facts), np.random.default_rng(0)
    found = {}
    for kernel in kernels[: 2 * len(kernels) // 3]:
        ns = costs.predict(kernel).total_ns * np.exp(NOISE * rng.standard_normal(9))
        counts = features(kernel, costs.machine)
        found[kernel.key] = Measurement(kernel.variant.label, spec_text(kernel.spec), tuple(map(int, ns)), counts)
    constants = fit(samples_of(found.values()), FEATURES)
    return replace(facts, features=FEATURES, measurements=found, constants=constants)


def plan_under(model: DeviceModel) -> Plan:
    return planner.plan(shipped(GRAPH), CostModel(model), "rowmajor", rewrites=())


def test_every_step_lies_in_its_interval(model: DeviceModel):
    plan = plan_under(model)
    found = plan_intervals(plan, shipped(GRAPH), model)
    assert [s.total_ns for s in found] == [
        (plan.ops[i] if kind == "op" else plan.relayouts[i]).cost.total_ns for kind, i in plan.steps
    ]
    assert all(s.known and s.low_ns - 1 <= s.total_ns <= s.high_ns + 1 for s in found)
    measured = [s.high_ns / s.low_ns for s in found if s.measured]
    predicted = [s.high_ns / s.low_ns for s in found if not s.measured]
    assert measured
    assert predicted
    assert max(measured) < np.exp(6 * NOISE)
    assert min(predicted) > 1


def test_of_a_roofline_nothing_is_known():
    facts = device_models.load("generic-cpu")
    found = plan_intervals(plan_under(facts), shipped(GRAPH), facts)
    assert not any(s.known or s.measured for s in found)
    assert all(s.low_ns == s.high_ns == s.total_ns for s in found)
