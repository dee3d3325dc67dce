"""How sure a plan's costs are: of every step, between which times the cost model has it nine times out of ten.

Part of the face: it joins ``kernels`` and ``costmodel`` to plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel

__all__ = ["StepInterval", "plan_intervals"]


@dataclass(frozen=True)
class StepInterval:
    """A step of a plan and its cost.

    Attributes:
        label: of the op or relayout, for people.
        total_ns: what the plan says.
        low_ns: the cost is above this and...
        high_ns: ...below this nine times out of ten; both ``total_ns`` where the model cannot say.
        measured: the cost was looked up, and the interval is of its repetitions; else it was predicted.
        known: whether the model can say.
    """

    label: str
    total_ns: int
    low_ns: float
    high_ns: float
    measured: bool
    known: bool


def plan_intervals(plan: Plan, graph: TrainingGraph, model: DeviceModel) -> list[StepInterval]:
    """The steps of a plan, in the order they run.

    Args:
        plan: made with this model.
        graph: as captured.
        model: calibrated; of a roofline nothing is known.

    Raises:
        LayoutOptError: the plan is not of this graph.
        DeviceError: the model lacks a number that predicting needs.
    """
    from costmodel.model import CostModel
    from kernels.bind import bind

    costs = CostModel(model)
    stated = [plan.ops[i].cost if kind == "op" else plan.relayouts[i].cost for kind, i in plan.steps]
    found: dict[int, tuple[tuple[float, float] | None, float]] = {}
    out = []
    for bound, cost in zip(bind(planned_graph(plan, graph), plan, model.limits), stated, strict=True):
        # bind() gives repeated blocks one kernel object: ask of it once.
        key = id(bound.kernel)
        if key not in found:
            found[key] = costs.interval(bound.kernel), costs.predict(bound.kernel).total_ns
        interval, alone_ns = found[key]
        part = cost.total_ns / alone_ns  # of launches that it shares
        low, high = (edge * part for edge in interval) if interval else (float(cost.total_ns),) * 2
        out.append(StepInterval(bound.label, cost.total_ns, low, high, cost.measured, interval is not None))
    return out
