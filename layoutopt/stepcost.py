"""What a whole step is predicted to take, as the runtime runs it.

The solver's objective adds up kernels, each with the gap that a launch leaves on the device. A step differs from that
sum: steps share launches where they may (``kernels/launches.py``); the host enqueues every launch, beside a GPU, which
waits for it where it is faster, but on the very cores of a CPU device; and inputs are sent before the first launch and
the end is noticed after the last.

Part of the face: it joins ``kernels`` and ``costmodel`` to plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.graph import TrainingGraph
from layoutopt.plan import ArenaSlot, Plan
from layoutopt.rewrites import planned_graph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from costmodel.model import CostModel
    from kernels.bind import BoundStep

__all__ = ["StepCost", "measured_share", "planned_s", "predict_step"]

INPUT_LAUNCHES = 1
"""The launch that spreads a step's inputs (``kernels/stage.py``)."""


@dataclass(frozen=True)
class StepCost:
    """A step's predicted time, itemised.

    Attributes:
        kernels_s: the kernels on the device, those that share a launch priced together.
        gaps_s: between launches on the device.
        host_s: the host, to enqueue all launches.
        wait_s: to send inputs and to notice the end.
        launches: of a step.
        sharing: plan steps that share a launch with another.
        stolen_s: what enqueuing takes from the device's own cores, spread over all of them; 0 on a GPU.
    """

    kernels_s: float
    gaps_s: float
    host_s: float
    wait_s: float
    launches: int
    sharing: int
    stolen_s: float

    @property
    def device_s(self) -> float:
        """Kernels and the gaps between them, where the device waits for nothing."""
        return self.kernels_s + self.gaps_s

    @property
    def step_s(self) -> float:
        """From the call to the end of the last kernel."""
        return max(self.device_s + self.stolen_s, self.host_s) + self.wait_s


def planned_s(plan: Plan) -> float:
    """The solver's objective: seconds of every op and relayout, one after the other."""
    return (sum(o.cost.total_ns for o in plan.ops) + sum(r.cost.total_ns for r in plan.relayouts)) * 1e-9


def measured_share(plan: Plan) -> float:
    """The part of the objective that was looked up among measured kernels."""
    costs = [*(o.cost for o in plan.ops), *(r.cost for r in plan.relayouts)]
    return sum(c.total_ns for c in costs if c.measured) * 1e-9 / planned_s(plan)


def predict_step(plan: Plan, graph: TrainingGraph, model: DeviceModel) -> StepCost:
    """What a step of a plan most likely takes.

    Kernels are priced anew, by what was measured of them or what is most likely: a plan's own costs hold what caution
    added to those that were not measured (``costmodel.model.CAUTION``).

    Args:
        plan: for the model's device.
        graph: as captured.
        model: calibrated, or of facts. Where it knows neither ``host_launch_s`` nor the round trip, the host is taken
            to be never in the way.

    Raises:
        GraphError: the plan is not of this graph.
        DeviceError: the model lacks a number that predicting needs.
    """
    from costmodel.model import CostModel
    from kernels.bind import bind
    from kernels.launches import launch_order

    costs = CostModel(model, caution=0.0)
    steps = bind(planned_graph(plan, graph), plan, model.limits)
    slots = {slot.name: slot for slot in plan.arena}
    gap_ns = model.number("launch_s") * 1e9
    # bind() gives repeated blocks one kernel object: price it once.
    kernels = {id(step.kernel): step.kernel for step in steps}
    total_ns = {key: costs.predict(kernel).total_ns for key, kernel in kernels.items()}
    alone_ns = [max(total_ns[id(step.kernel)] - gap_ns * len(step.kernel.launches), 0.0) for step in steps]
    order = launch_order(steps, slots, model.limits)
    kernels_ns = sum(_together_ns(members, steps, alone_ns, slots, costs) for members in order)
    launches = INPUT_LAUNCHES + sum(len(steps[members[0]].kernel.launches) for members in order)
    host_s = launches * (model.number("host_launch_s") if "host_launch_s" in model.facts else 0.0)
    return StepCost(
        kernels_ns * 1e-9,
        launches * gap_ns * 1e-9,
        host_s,
        1 / model.probes["round_trip"].per_s if "round_trip" in model.probes else 0.0,
        launches,
        sum(len(members) for members in order if len(members) > 1),
        0.0 if model.limits.kind == "gpu" else host_s / max(model.limits.compute_units, 1),
    )


def _together_ns(
    members: Sequence[int],
    steps: Sequence[BoundStep],
    alone_ns: Sequence[float],
    slots: dict[str, ArenaSlot],
    costs: CostModel,
) -> float:
    """Nanoseconds of steps that are launched together."""
    from costmodel.shared import merged_ns, stacked_ns
    from kernels.batch import linear, merge_steps

    kernel = steps[members[0]].kernel
    if len(members) == 1:
        return alone_ns[members[0]]
    if linear(kernel) is None:
        return stacked_ns(costs, kernel, alone_ns[members[0]], len(members))
    groups = len(merge_steps(members, steps, slots, costs.limits).groups)
    return merged_ns(costs, [steps[i].kernel for i in members], [alone_ns[i] for i in members], groups)
