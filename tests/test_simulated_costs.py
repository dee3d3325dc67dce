"""Simulated costs: a roofline corrected by what the simulator sees, alike in every process; what is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from costmodel import device as device_models
from costmodel.device import DeviceModel
from costmodel.model import CostModel
from kernels.spec import Kernel, OpSpec
from kernels.variants import family_of
from layoutopt import planner
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.facade import costs_of, solve_plan
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from simulator.costs import SimulatedCosts
from simulator.simulate import simulate
from tests.graphs import linear_step

SIDE = 1024


@pytest.fixture(scope="module")
def phone() -> DeviceModel:
    return device_models.load("immortalis-g925")


def copies(model: DeviceModel, source: Layout, target: Layout) -> list[Kernel]:
    """All kernels that convert a matrix from one layout to another."""
    from kernels.bind import relayout_spec

    spec: OpSpec = relayout_spec((SIDE, SIDE), "float32")
    family = family_of(spec.kind)
    built = (family.build(variant, spec, (source, target)) for variant in family.variants(spec, model.limits))
    return [kernel for kernel in built if kernel is not None]


ROWS = Layout.row_major((SIDE, SIDE))
COLUMNS = Layout.of((SIDE, SIDE), [(1, None), (0, None)])


def test_a_copy_moves_its_bytes_once(phone: DeviceModel) -> None:
    costs = SimulatedCosts(phone)
    for kernel in copies(phone, ROWS, ROWS):
        _, moved = costs.traffic(kernel)
        busy = kernel.launches[0].nest.groups / -(-kernel.launches[0].nest.groups // phone.limits.compute_units)
        # Read once, fetched to be stored to, written back.
        assert 2 * 4 * SIDE**2 <= moved * busy <= 3.3 * 4 * SIDE**2


def test_kernels_over_one_pair_of_layouts_share_a_factor(phone: DeviceModel) -> None:
    costs, roofline = SimulatedCosts(phone), CostModel(phone)
    kernels = copies(phone, ROWS, COLUMNS)
    assert len(kernels) > 1
    factors = [costs.predict(k).memory_ns / roofline.predict(k).memory_ns for k in kernels]
    np.testing.assert_allclose(factors, factors[0])
    assert costs.simulated == 1


def test_prices_do_not_depend_on_what_was_asked_before(phone: DeviceModel) -> None:
    kernels = copies(phone, ROWS, COLUMNS)
    one, other = SimulatedCosts(phone), pickle.loads(pickle.dumps(SimulatedCosts(phone)))
    assert [one.predict(k) for k in kernels] == [other.predict(k) for k in reversed(kernels)][::-1]


def test_small_ops_keep_their_roofline(phone: DeviceModel) -> None:
    slow = replace(phone.facts["launch_s"], value=1.0)
    model = replace(phone, facts={**phone.facts, "launch_s": slow})
    costs = SimulatedCosts(model)
    for kernel in copies(model, ROWS, COLUMNS):
        assert costs.predict(kernel) == CostModel(model).predict(kernel)
    assert costs.simulated == 0


def test_a_plan_by_simulated_costs_is_valid_and_its_own(phone: DeviceModel) -> None:
    graph = run_passes(linear_step())[0]
    plan = solve_plan(graph, phone, strategy="greedy", costs="simulated")
    planner.validate(plan, graph, SimulatedCosts(phone))
    with pytest.raises(DeviceError, match="plan again with this device model"):
        planner.validate(plan, graph, CostModel(phone))
    assert simulate(graph, plan, phone).total.lines > 0


def test_what_cannot_be_simulated_is_refused(phone: DeviceModel) -> None:
    with pytest.raises(DeviceError, match="is calibrated"):
        SimulatedCosts(device_models.load("nvidia-h200"))
    with pytest.raises(DeviceError, match="lists no caches"):
        SimulatedCosts(replace(phone, caches=()))
    with pytest.raises(LayoutOptError, match="choose model or simulated"):
        costs_of(phone, "measured")
