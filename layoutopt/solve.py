"""The exact solver: layout assignment as an integer program, closed by HiGHS through OR-tools.

Variables, for what ``reduce`` and ``merge_chains`` leave: ``p[s,l]`` storage s has primary l (one per storage);
``r[s,a,b]`` it is relaid out from a to b, at most ``p[s,a]``; ``x[o,c]`` op o takes choice c (one per op). For each
operand of an op and each candidate l of its storage: an input's choices that use l sum to at most
``p[s,l] + sum_a r[s,a,l]``, an output's (or a pinned input's) to exactly ``p[s,l]``. Summing per operand rather than
bounding choice by choice is what makes the linear relaxation strong. Relayouts need no integrality: once p and x are
integers the least r is.

HiGHS computes in floating point. Every op's cheapest choice is taken out of the objective as a constant, so that what
it sees are differences; its answer is rounded, repriced in integers by ``check``, and called optimal only when its dual
bound meets that price within one part in 10^7 or one nanosecond.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import timedelta

from ortools.math_opt.python import mathopt

from layoutopt.chains import Merged, merge_chains
from layoutopt.check import check
from layoutopt.conflict import explain
from layoutopt.errors import InfeasibleError, LayoutOptError
from layoutopt.problem import Assignment, Problem
from layoutopt.reduce import reduce
from layoutopt.strategies import STRATEGIES

__all__ = ["solve"]

TOLERANCE = 1e-7
"""Relative distance between price and dual bound within which floating point cannot tell them apart."""


def solve(problem: Problem, time_limit_s: float = 60.0, starts: Iterable[Assignment] | None = None) -> Assignment:
    """The cheapest assignment, proven so unless time runs out.

    Args:
        problem: the tables.
        time_limit_s: for HiGHS; when it is reached, the best assignment known is returned as "FEASIBLE" with the bound
            so far.
        starts: assignments to start from; the strategies' by default.

    Returns:
        An assignment that ``check`` has priced; ``bound_ns`` is a proven lower bound.

    Raises:
        InfeasibleError: there is none; ``conflict`` names ops and storages that together cannot be served.
    """
    started = time.perf_counter()
    merged = merge_chains(problem, reduce(problem))
    if merged is None:
        raise explain(problem)
    known = list(_heuristics(problem) if starts is None else starts)
    best = min(known, key=lambda a: a.cost_ns) if known else None
    model = _Model(merged)
    result = model.run(time_limit_s, best)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        raise explain(problem)
    if reason not in (
        mathopt.TerminationReason.OPTIMAL,
        mathopt.TerminationReason.FEASIBLE,
        mathopt.TerminationReason.NO_SOLUTION_FOUND,
    ):
        raise LayoutOptError(f"HiGHS stopped with {reason.name}: {result.termination.detail or 'no detail given'}")
    method = "highs"
    if result.has_primal_feasible_solution():
        found = model.read(result)
        if best is None or found.cost_ns <= best.cost_ns:
            best = found
        else:
            method = f"highs, which found nothing better than {best.method}"
    elif best is None:
        raise InfeasibleError(f"no assignment found within {time_limit_s:g} s, none proven impossible: allow more time")
    else:
        method = f"{best.method}; highs found nothing within {time_limit_s:g} s"
    dual = result.termination.objective_bounds.dual_bound
    tolerance = max(1.0, TOLERANCE * best.cost_ns)
    bound = max(model.trivial_bound, math.ceil(dual - tolerance)) if math.isfinite(dual) else model.trivial_bound
    proven = math.isfinite(dual) and best.cost_ns - dual <= tolerance
    if proven or bound >= best.cost_ns:
        status, bound = "OPTIMAL", best.cost_ns
    else:
        status = "FEASIBLE"
    seconds = time.perf_counter() - started
    out = Assignment(best.primary, best.copies, best.choice, best.cost_ns, status, bound, seconds, method)
    check(problem, out)
    return out


def _heuristics(problem: Problem) -> list[Assignment]:
    """Every strategy's answer; one that meets a dead end has none, and the exact search starts without it."""
    out = []
    for strategy in STRATEGIES.values():
        try:
            out.append(strategy(problem))
        except InfeasibleError:
            continue
    return out


class _Model:
    """The integer program of a merged problem and its way back to assignments of the original."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        problem, domain = merged.problem, merged.domain
        self.problem = problem
        self.model = mathopt.Model(name="layout assignment")
        self.p = [{a: self.model.add_binary_variable() for a in primaries} for primaries in domain.primaries]
        self.x = [{c: self.model.add_binary_variable() for c in left} for left in domain.choices]
        self.r: dict[tuple[int, int, int], mathopt.Variable] = {}
        self.base = [
            min(op.choices[c].cost_ns for c in left) for op, left in zip(problem.ops, domain.choices, strict=True)
        ]
        self.trivial_bound = sum(self.base)
        self._constrain()
        objective = self.model.objective
        objective.is_maximize = False
        objective.offset = float(self.trivial_bound)
        for (s, a, b), variable in self.r.items():
            objective.set_linear_coefficient(variable, float(problem.relayout_ns[s, a, b]))
        for op, row, least in zip(problem.ops, self.x, self.base, strict=True):
            for c, variable in row.items():
                objective.set_linear_coefficient(variable, float(op.choices[c].cost_ns - least))

    def _row(self, terms: dict[mathopt.Variable, float], low: float, high: float) -> None:
        constraint = self.model.add_linear_constraint(lb=low, ub=high)
        for variable, coefficient in terms.items():
            constraint.set_coefficient(variable, coefficient)

    def _constrain(self) -> None:
        for row in self.p + self.x:
            self._row(dict.fromkeys(row.values(), 1.0), 1.0, 1.0)
        sources = self._sources()
        for op, row in zip(self.problem.ops, self.x, strict=True):
            tied = set(op.primary_operands)
            for k, s in enumerate(op.operands):
                users: dict[int, list[mathopt.Variable]] = {}
                for c, variable in row.items():
                    users.setdefault(op.choices[c].layouts[k], []).append(variable)
                if k in tied:
                    for layout, primary in self.p[s].items():
                        terms = dict.fromkeys(users.get(layout, ()), 1.0)
                        self._row({**terms, primary: -1.0}, 0.0, 0.0)
                    continue
                for layout, used in users.items():
                    terms = dict.fromkeys(used, 1.0)
                    if layout in self.p[s]:
                        terms[self.p[s][layout]] = -1.0
                    for a in sources.get((s, layout), ()):
                        terms[self._relayout(s, a, layout)] = -1.0
                    self._row(terms, -math.inf, 0.0)

    def _sources(self) -> dict[tuple[int, int], list[int]]:
        out: dict[tuple[int, int], list[int]] = {}
        for s, a, b in self.problem.relayout_ns:
            if a in self.p[s] and a != b:
                out.setdefault((s, b), []).append(a)
        return out

    def _relayout(self, s: int, a: int, b: int) -> mathopt.Variable:
        """The variable of a relayout, made when first needed, with its bound by the primary it starts from."""
        if (s, a, b) not in self.r:
            variable = self.r[s, a, b] = self.model.add_variable(lb=0.0, ub=1.0)
            self._row({variable: 1.0, self.p[s][a]: -1.0}, -math.inf, 0.0)
        return self.r[s, a, b]

    def run(self, time_limit_s: float, start: Assignment | None) -> mathopt.SolveResult:
        """Solve with a fixed seed, so that equal problems get equal answers."""
        params = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit_s),
            random_seed=1,
            relative_gap_tolerance=0.0,
            absolute_gap_tolerance=0.5,
        )
        hints = [self._hint(start)] if start is not None else []
        return mathopt.solve(
            self.model,
            mathopt.SolverType.HIGHS,
            params=params,
            model_params=mathopt.ModelSolveParameters(solution_hints=hints),
        )

    def _hint(self, start: Assignment) -> mathopt.SolutionHint:
        values: dict[mathopt.Variable, float] = {}
        for row, primary in zip(self.p, start.primary, strict=True):
            if primary in row:
                values |= {variable: float(a == primary) for a, variable in row.items()}
        for row, choice in zip(self.x, self.merged.project(start), strict=True):
            # What dominance replaced is left for the solver to complete.
            if choice is not None:
                values |= {variable: float(c == choice) for c, variable in row.items()}
        return mathopt.SolutionHint(variable_values=values)

    def read(self, result: mathopt.SolveResult) -> Assignment:
        """The solver's answer, rounded and priced in integers; copies are what the choices need."""
        values = result.variable_values()
        primary = tuple(max(row, key=lambda a: values[row[a]]) for row in self.p)
        choice = tuple(max(row, key=lambda c: values[row[c]]) for row in self.x)
        primary, choice = self.merged.expand(primary, choice)
        problem = self.merged.original
        copies: list[set[int]] = [set() for _ in problem.storages]
        cost = 0
        for op, c in zip(problem.ops, choice, strict=True):
            cost += op.choices[c].cost_ns
            for s, layout in zip(op.operands, op.choices[c].layouts, strict=True):
                if layout != primary[s]:
                    copies[s].add(layout)
        cost += sum(problem.relayout_ns[s, primary[s], b] for s, made in enumerate(copies) for b in made)
        ordered = tuple(tuple(sorted(made)) for made in copies)
        out = Assignment(primary, ordered, choice, cost, "FEASIBLE", 0, 0.0, "highs")
        check(problem, out)
        return out
