"""Why a problem has no assignment: a small set of ops that together cannot be served."""

from __future__ import annotations

from ortools.sat.python import cp_model

from layoutopt.errors import InfeasibleError
from layoutopt.problem import Problem

__all__ = ["explain"]


def explain(problem: Problem) -> InfeasibleError:
    """The error for a problem without assignments: its ops are thinned out until each that is left is needed.

    Args:
        problem: a problem known to be infeasible.

    Returns:
        An error whose ``conflict`` lists the ops, then the storages they dispute.
    """
    core = _shrink(problem, list(range(len(problem.ops))))
    names = [problem.ops[o].name for o in core]
    shared = [s for s in range(len(problem.storages)) if any(s in problem.ops[o].operands for o in core)]
    disputed = [s for s in shared if sum(s in problem.ops[o].operands for o in core) > 1 or len(core) == 1]
    storages = [problem.storages[s].name for s in disputed or shared]
    return InfeasibleError(
        f"no layouts serve {', '.join(names[:4])}{' …' if len(names) > 4 else ''} together: they dispute "
        f"{', '.join(storages[:4])}{' …' if len(storages) > 4 else ''}; give these more candidates or kernels",
        (*names, *storages),
    )


def _shrink(problem: Problem, ops: list[int]) -> list[int]:
    """An irreducible infeasible subset by deletion, in halving steps first."""
    step = max(len(ops) // 2, 1)
    while True:
        start = 0
        while start < len(ops):
            rest = ops[:start] + ops[start + step :]
            if rest and not _feasible(problem, rest):
                ops = rest
            else:
                start += step
        if step == 1:
            return ops
        step //= 2


def _feasible(problem: Problem, ops: list[int]) -> bool:
    model = cp_model.CpModel()
    primary: dict[int, dict[int, cp_model.IntVar]] = {}
    for s in dict.fromkeys(s for o in ops for s in problem.ops[o].operands):
        node = problem.storages[s]
        free = range(len(node.candidates)) if node.primary < 0 else [node.primary]
        primary[s] = {a: model.new_bool_var("") for a in free}
        model.add_exactly_one(primary[s].values())
    for o in ops:
        op = problem.ops[o]
        picks = [model.new_bool_var("") for _ in op.choices]
        model.add_exactly_one(picks)
        tied = set(op.primary_operands)
        for pick, choice in zip(picks, op.choices, strict=True):
            for k, (s, layout) in enumerate(zip(op.operands, choice.layouts, strict=True)):
                sources = [layout] if k in tied else range(len(problem.storages[s].candidates))
                able = [a for a in sources if a in primary[s] and problem.conversion_ns(s, a, layout) is not None]
                model.add_bool_or([primary[s][a] for a in able] + [pick.negated()])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
