"""The exact solver: reductions, a search on tables, and HiGHS for what that leaves.

In order, each a switch of ``Reductions`` and none of them changing the optimum:

1. *dominance* (``reduce``): choices that another one replaces at no loss are dropped;
   *copies* (``copies``): relayouts that cost more than all readers together could save by them are dropped;
2. *sweeps* (``sweeps``): costs are moved between tables until their least costs make a bound; what lies above the best
   assignment known is dropped;
3. *dives* (``exact``, ``grouping``): between sweeps, a beam search along the blocks of the network looks for a better
   assignment, since the closer one is known the more is dropped;
4. *condensing* (``treewidth``): variables whose tables stay small are eliminated for good, and what is left is swept
   again: larger tables see more at once, so the bound rises;
5. *elimination* (``treewidth``, driven by ``exact``): dynamic programming over a tree decomposition of what is left;
6. *chains* (``chains``): storages between two ops are merged away before HiGHS sees the rest.

The integer program, for what is left when tables get too wide or when the search is switched off: ``p[s,l]`` storage s
has primary l (one per storage); ``r[s,a,b]`` it is relaid out from a to b, at most ``p[s,a]``; ``x[o,c]`` op o takes
choice c (one per op). For each operand of an op and each candidate l of its storage: an input's choices that use l sum
to at most ``p[s,l] + sum_a r[s,a,l]``, an output's (or a pinned input's) to exactly ``p[s,l]``. Summing per operand
rather than bounding choice by choice is what makes the linear relaxation strong. Relayouts need no integrality: once p
and x are integers the least r is.

HiGHS computes in floating point. Every op's cheapest choice is taken out of the objective as a constant, so that what
it sees are differences; its answer is rounded, repriced in integers by ``check``, and called optimal only when its dual
bound meets that price within one part in 10^7 or one nanosecond. The search on tables is in integers throughout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial

from ortools.math_opt.python import mathopt

from layoutopt.chains import Merged, merge_chains, unmerged
from layoutopt.check import check
from layoutopt.conflict import explain
from layoutopt.copies import without_idle_copies
from layoutopt.errors import InfeasibleError, LayoutOptError
from layoutopt.exact import Tactics, remaining, search
from layoutopt.interrupts import StoppedError, interruptible, overdue, requested, searching
from layoutopt.problem import Assignment, Choice, Problem
from layoutopt.reduce import Domain, consistent, reduce
from layoutopt.states import TooManyStatesError, network
from layoutopt.strategies import STRATEGIES, prefer, priced
from layoutopt.treewidth import Limits

__all__ = ["Reductions", "heuristics", "solve"]

TOLERANCE = 1e-7
"""Relative distance between price and dual bound within which floating point cannot tell them apart."""


@dataclass(frozen=True)
class Reductions:
    """Switches of what is done before HiGHS; all off is the plain integer program. The module says what each does."""

    dominance: bool = True
    copies: bool = True
    sweeps: bool = True
    dives: bool = True
    condensing: bool = True
    elimination: bool = True
    chains: bool = True

    @staticmethod
    def none() -> Reductions:
        """The plain integer program."""
        return Reductions(**dict.fromkeys((f.name for f in fields(Reductions)), False))


_MOST_FOR_HIGHS = 60_000
"""Choices: of a larger program that tables could not close, HiGHS makes nothing in a minute."""
_TOO_DEAR_NS = 1 << 46
"""Nineteen hours: scaled, sums of such costs would leave 64 bits, and HiGHS takes the problem alone."""


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    starts: Iterable[Assignment] | None = None,
    reductions: Reductions | None = None,
    most_rows: int = 1 << 20,
) -> Assignment:
    """The cheapest assignment, proven so unless time runs out.

    Args:
        problem: the tables.
        time_limit_s: for the search; when it is reached, the best assignment known is returned as "FEASIBLE" with the
            bound so far. So does Ctrl-C inside ``interrupts.graceful``.
        starts: assignments to start from; the strategies' by default.
        reductions: all by default.
        most_rows: of a table in elimination; beyond that HiGHS takes over.

    Returns:
        An assignment that ``check`` has priced; ``bound_ns`` is a proven lower bound.

    Raises:
        InfeasibleError: there is none; ``conflict`` names ops and storages that together cannot be served.
    """
    with searching():
        return _solve(problem, time_limit_s, starts, reductions or Reductions(), most_rows)


def _solve(
    problem: Problem,
    time_limit_s: float,
    starts: Iterable[Assignment] | None,
    switches: Reductions,
    most_rows: int,
) -> Assignment:
    started = time.perf_counter()
    whole, domain = problem, reduce(problem) if switches.dominance else consistent(problem)
    if switches.copies:
        try:
            problem, domain = without_idle_copies(problem, domain)
        except InfeasibleError as error:
            raise explain(problem) from error
    known = list(heuristics(whole) if starts is None else starts)
    best = min(known, key=lambda a: a.cost_ns) if known else None
    bound = sum(min(op.choices[c].cost_ns for c in left) for op, left in zip(problem.ops, domain.choices, strict=True))
    closed, method = False, best.method if best else "none"
    left: Domain | None = domain
    if switches.sweeps or switches.elimination:
        limits = Limits(most_rows, started + time_limit_s)
        outcome, left = _on_tables(problem, domain, best, bound, switches, limits)
        if outcome.cost_ns is not None:
            best, method = outcome.found, "tables"
            assert best is not None
            # An assignment found in passing may make a copy that nothing reads; prices leave it out.
            most, least = outcome.cost_ns, outcome.cost_ns if outcome.closed else 0
            assert least <= best.cost_ns <= most, f"tables say {outcome.cost_ns} ns, prices {best.cost_ns} ns"
        bound, closed = max(bound, outcome.bound_ns), outcome.closed
        method = f"{method}, proven on tables" if closed and method != "tables" else method
    if not closed and requested():
        method = f"{method}; interrupted"
    elif (
        not closed
        and left is not None
        and best is not None
        and switches.sweeps
        and _too_much(left, started + time_limit_s)
    ):
        method = f"{method}; too wide for tables, too large for highs"
    elif not closed and left is not None:
        # At least a moment: HiGHS also says whether anything is possible at all.
        seconds = max(time_limit_s - (time.perf_counter() - started), 1e-3)
        best, bound, closed, method = _by_highs(problem, left, best, bound, seconds, switches, method)
    elif not closed:
        closed = True
    if closed and best is None:
        raise explain(whole)
    if best is None:
        if requested():
            raise KeyboardInterrupt  # there is nothing to return
        raise InfeasibleError(f"no assignment found within {time_limit_s:g} s, none proven impossible: allow more time")
    status = "OPTIMAL" if closed or bound >= best.cost_ns else "FEASIBLE"
    bound = best.cost_ns if status == "OPTIMAL" else bound
    seconds = time.perf_counter() - started
    out = Assignment(best.primary, best.copies, best.choice, best.cost_ns, status, bound, seconds, method)
    check(whole, out)
    return out


def _too_much(left: Domain, deadline: float) -> bool:
    """Whether HiGHS would not get anywhere: making its program takes long, and nothing so large was ever closed."""
    return overdue(deadline) or sum(map(len, left.choices)) > _MOST_FOR_HIGHS


@dataclass(frozen=True)
class _Tabled:
    cost_ns: int | None
    bound_ns: int
    closed: bool
    found: Assignment | None


def _on_tables(
    problem: Problem, domain: Domain, best: Assignment | None, base_ns: int, switches: Reductions, limits: Limits
) -> tuple[_Tabled, Domain | None]:
    """The search on tables, and what it leaves for HiGHS: None where that is nothing better than what is known."""
    ceiling = best.cost_ns if best else _beyond(problem)
    if ceiling >= _TOO_DEAR_NS:
        return _Tabled(None, base_ns, False, None), domain
    try:
        net = network(problem, domain, ceiling - base_ns)
    except TooManyStatesError:
        return _Tabled(None, base_ns, False, None), domain
    tactics = Tactics(switches.sweeps, switches.dives, switches.condensing, switches.elimination)
    start = _inside(problem, domain, best) if best and switches.dives else None
    outcome = search(net, ceiling, limits, tactics, None if start is None else net.values(start))
    found = None
    if outcome.cost_ns is not None:
        found = priced(problem, net.primaries(outcome.values), net.choices(outcome.values), "tables", "FEASIBLE")
    closed = outcome.closed
    tabled = _Tabled(outcome.cost_ns, outcome.bound_ns, closed, found)
    if closed or not switches.sweeps or overdue(limits.deadline):
        return tabled, domain
    return tabled, remaining(net, outcome.cost_ns if outcome.cost_ns is not None else ceiling)


def _inside(problem: Problem, domain: Domain, known: Assignment) -> Assignment | None:
    """An assignment of what is left near a known one: with its primaries where they are; None at a dead end."""
    shared: dict[tuple[int, tuple[int, ...]], tuple[Choice, ...]] = {}
    ops = []
    for op, left in zip(problem.ops, domain.choices, strict=True):
        key = id(op.choices), left
        if key not in shared:
            shared[key] = tuple(op.choices[c] for c in left)
        ops.append(replace(op, choices=shared[key]))
    try:
        found = prefer(replace(problem, ops=tuple(ops)), known.primary, known.method, stay=False)
    except InfeasibleError:
        return None
    return replace(found, choice=tuple(left[c] for left, c in zip(domain.choices, found.choice, strict=True)))


def _beyond(problem: Problem) -> int:
    """More than any assignment costs."""
    dearest = sum(max(choice.cost_ns for choice in op.choices) for op in problem.ops)
    return 1 + dearest + sum(problem.relayout_ns.values())


def _by_highs(
    problem: Problem,
    domain: Domain,
    best: Assignment | None,
    bound: int,
    seconds: float,
    switches: Reductions,
    method: str,
) -> tuple[Assignment | None, int, bool, str]:
    """The integer program of ``domain``: the best assignment, the bound, whether they meet, and what found it.

    ``domain`` may lack what is no part of an assignment better than ``best``: where nothing is left, that is optimal.
    """
    merged = merge_chains(problem, domain) if switches.chains else unmerged(problem, domain)
    model = None if merged is None else _Model(merged)
    try:
        result = None if model is None else interruptible(partial(model.run, seconds, best))
    except StoppedError:
        return best, bound, False, f"{method}; highs was interrupted"
    reason = None if result is None else result.termination.reason
    if reason in (None, mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return best, bound if best is None else best.cost_ns, True, f"{method}, proven by highs"
    assert model is not None
    assert result is not None
    if reason not in (
        mathopt.TerminationReason.OPTIMAL,
        mathopt.TerminationReason.FEASIBLE,
        mathopt.TerminationReason.NO_SOLUTION_FOUND,
    ):
        detail = result.termination.detail or "no detail given"
        raise LayoutOptError(f"HiGHS stopped with {result.termination.reason.name}: {detail}")
    if result.has_primal_feasible_solution():
        found = model.read(result)
        if best is None or found.cost_ns <= best.cost_ns:
            best, method = found, "highs"
        else:
            method = f"highs, which found nothing better than {best.method}"
    elif best is not None:
        method = f"{best.method}; highs found nothing in time"
    if best is None:
        return None, bound, False, method
    dual = result.termination.objective_bounds.dual_bound
    tolerance = max(1.0, TOLERANCE * best.cost_ns)
    proven = math.isfinite(dual) and best.cost_ns - dual <= tolerance
    if math.isfinite(dual):
        bound = max(bound, min(math.ceil(dual - tolerance), best.cost_ns))
    return best, bound, proven, method


def heuristics(problem: Problem) -> list[Assignment]:
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
        return priced(self.merged.original, primary, choice, "highs", "FEASIBLE")
