"""What the solver proved, and what exact reductions left of the problem.

Part of the face.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.errors import InfeasibleError
from layoutopt.plan import Plan
from layoutopt.report.shapes import Section, Table, ms

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from layoutopt.graph import TrainingGraph
    from layoutopt.problem import Problem
    from layoutopt.reduce import Domain

__all__ = ["Left", "proof_section", "reductions", "tried"]

_STATUS = {
    "OPTIMAL": "no assignment of these layouts and kernels has a smaller sum of predicted costs",
    "FEASIBLE": "the search ended before the gap was closed: the bound says how far from the best it may be",
    "HEURISTIC": "a strategy that proves nothing",
}


@dataclass(frozen=True)
class Left:
    """What is left of the problem after a reduction: choices of operations, layouts of storages, relayouts."""

    after: str
    choices: int
    layouts: int
    relayouts: int


def reductions(planned: TrainingGraph, model: DeviceModel) -> list[Left]:
    """The reductions that keep the optimum, done again on the problem as it is priced now.

    Args:
        planned: the graph with a plan's rewrites.
        model: that the plan was made with.

    Raises:
        GraphError, InfeasibleError: as planning.
    """
    from costmodel.model import CostModel
    from layoutopt.copies import without_idle_copies
    from layoutopt.planner import tabulate
    from layoutopt.reduce import Domain, consistent, reduce

    problem = tabulate(planned, CostModel(model)).problem
    whole = Domain(
        tuple(tuple(range(len(s.candidates))) for s in problem.storages),
        tuple(tuple(range(len(o.choices))) for o in problem.ops),
    )
    reduced = reduce(problem)
    lean, left = without_idle_copies(problem, reduced)
    return [
        _left("as posed", whole, problem),
        _left("choices that need a layout nobody can make", consistent(problem), problem),
        _left("choices that another replaces at no loss", reduced, problem),
        _left("copies that cost more than all readers save", left, lean),
    ]


def _left(after: str, domain: Domain, problem: Problem) -> Left:
    counts = sum(map(len, domain.choices)), sum(map(len, domain.primaries))
    return Left(after, *counts, len(problem.relayout_ns))


def proof_section(plan: Plan, left: list[Left] | None, why_not: str = "") -> Section:
    """The section.

    Args:
        plan: whose solver's report is shown.
        left: of the reductions; None where they were not done again.
        why_not: they were not.
    """
    report = plan.solver
    facts = [
        ("status", report.status),
        ("strategy", report.strategy),
        ("found by", report.method),
        ("objective", f"{ms(report.objective_ns * 1e-9)} ms"),
        ("lower bound", f"{ms(report.bound_ns * 1e-9)} ms" if report.bound_ns else "none"),
        ("gap", f"{report.gap:.3%}" if report.bound_ns else "not known"),
        ("time to solve", f"{report.seconds:.2f} s"),
        ("storages", f"{report.storages:,}"),
        ("candidate layouts", f"{report.candidates:,}"),
        ("choices of kernels and layouts", f"{report.choices:,}"),
    ]
    if plan.rewrites:
        facts.append(("rewrites of the graph", ", ".join(plan.rewrites)))
    said = f"{report.status}: {_STATUS.get(report.status, 'as the solver reported')}."
    about = "The proof is about predicted costs: it says nothing of how far these are from the device."
    tables = [Table("The solver's report", ("", "value"), tuple(facts))]
    if left:
        rows = tuple((one.after, f"{one.choices:,}", f"{one.layouts:,}", f"{one.relayouts:,}") for one in left)
        head = ("without", "choices", "layouts", "possible relayouts")
        tables.append(Table("Exact reductions before the search: what is left", head, rows))
    elif why_not:
        about += f" The reductions were not done again: {why_not}."
    return Section("proof", "The solver's proof", (said, about), (), tuple(tables))


def tried(planned: TrainingGraph, plan: Plan, model: DeviceModel) -> tuple[list[Left] | None, str]:
    """The reductions of a plan's problem, or why there are none."""
    if plan.solver.strategy != "ilp":
        return None, f"{plan.solver.strategy} needs none"
    if plan.device_hash != model.hash:
        return None, "the plan was made with another device model"
    try:
        return reductions(planned, model), ""
    except InfeasibleError as error:
        return None, str(error)
