"""The independent judge of an assignment: is it feasible, and what does it cost?

Deliberately plain and apart from the solver and the strategies, with which it shares only the problem's types.
"""

from __future__ import annotations

from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, Problem

__all__ = ["check"]


def check(problem: Problem, assignment: Assignment) -> int:
    """Verify feasibility and recompute the objective in integers.

    Returns:
        Nanoseconds: the chosen kernels plus one relayout per copy.

    Raises:
        InfeasibleError: a constraint is broken (``conflict`` names the op and storage), or ``cost_ns`` is not the cost.
    """
    counts = (len(assignment.primary), len(assignment.copies), len(assignment.choice))
    expected = (len(problem.storages), len(problem.storages), len(problem.ops))
    if counts != expected:
        raise InfeasibleError(f"assignment covers {counts} primaries, copies and ops; the problem has {expected}")
    cost = 0
    for s, node in enumerate(problem.storages):
        primary, copies = assignment.primary[s], assignment.copies[s]
        for candidate in (primary, *copies):
            if not 0 <= candidate < len(node.candidates):
                raise InfeasibleError(
                    f"storage {node.name} has no candidate {candidate}: it has {len(node.candidates)}", (node.name,)
                )
        if node.primary >= 0 and primary != node.primary:
            raise InfeasibleError(
                f"storage {node.name} has primary {primary}; it is fixed to {node.primary}", (node.name,)
            )
        if len({primary, *copies}) != 1 + len(copies):
            raise InfeasibleError(f"storage {node.name} is materialised twice in one layout", (node.name,))
        for copy in copies:
            price = problem.relayout_ns.get((s, primary, copy))
            if price is None:
                raise InfeasibleError(
                    f"storage {node.name} cannot be relaid out from candidate {primary} to {copy}", (node.name,)
                )
            cost += price
    for op, picked in zip(problem.ops, assignment.choice, strict=True):
        if not 0 <= picked < len(op.choices):
            raise InfeasibleError(f"op {op.name} has no choice {picked}: it has {len(op.choices)}", (op.name,))
        choice = op.choices[picked]
        for position, (s, candidate) in enumerate(zip(op.operands, choice.layouts, strict=True)):
            name = problem.storages[s].name
            primary = assignment.primary[s]
            if position >= op.inputs and candidate != primary:
                raise InfeasibleError(
                    f"op {op.name} writes {name} in candidate {candidate}, its primary is {primary}", (op.name, name)
                )
            if position in op.pinned and candidate != primary:
                raise InfeasibleError(
                    f"op {op.name} reads a stale copy {candidate} of {name}, updated in its primary {primary}",
                    (op.name, name),
                )
            if candidate != primary and candidate not in assignment.copies[s]:
                raise InfeasibleError(
                    f"op {op.name} reads {name} in candidate {candidate}, which is not materialised", (op.name, name)
                )
        cost += choice.cost_ns
    if cost != assignment.cost_ns:
        raise InfeasibleError(f"assignment claims {assignment.cost_ns} ns; its choices and relayouts sum to {cost} ns")
    return cost
