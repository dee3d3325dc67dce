"""The least time that recomputation takes within a memory budget: proven, or bounded from below.

The greedy search (``layoutopt/recompute_search.py``) proves nothing. Here the same question is an integer program: a
boolean for each result says whether it is dropped; whether something has been *made anew by* a turn follows from that,
as the walk (``layoutopt/recompute_step.py``) does it:

    made(i, t) = dropped(i) and (a late op up to t reads i, or some made(j, t) where j is made from i)

At a moment, what is alive is linear in these: an original that late ops still read, unless it is dropped; what is kept
and something is yet to be made from; what was made anew and is still read. Retention intervals, as Moccasin has them
(Bartan et al., 2023), with the places where things are made fixed, so that few variables are left.

Bytes are bounded at few moments at first: where the step is fullest with everything kept. The cheapest choice there is
walked through; where it needs too much at another moment, that one is added, and so on. Each round's bound is a bound
on the whole: once its choice fits, it is the best there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

from layoutopt.errors import LayoutOptError
from layoutopt.recompute_step import Moment, Step

__all__ = ["Least", "least_extra"]

_ROUNDS = 24
_NODES = 2000
"""Of a round's search tree."""
_TOLERANCE = 1e-6
"""A bound that HiGHS gives this much below a cost, relative, is that cost: it computes in floating point."""


@dataclass(frozen=True)
class Least:
    """What is known of the least time within a budget.

    Attributes:
        bound_ns: no choice that fits takes less; None where none fits.
        dropped: positions of the best choice known that fits; None where none is known.
        extra_ns: what it takes.
    """

    bound_ns: int | None
    dropped: frozenset[int] | None = None
    extra_ns: int | None = None

    @property
    def proven(self) -> bool:
        """Whether nothing takes less than the choice, or nothing fits at all."""
        return self.bound_ns is None or (self.extra_ns is not None and self.extra_ns <= self.bound_ns)


def least_extra(
    step: Step,
    budget_bytes: int,
    start: Collection[int] | None = None,
    *,
    between: bool = False,
    rounds: int = _ROUNDS,
    nodes: int = _NODES,
    time_limit_s: float = 60.0,
) -> Least:
    """The least time of ops that run again so that a step needs no more than a budget.

    Args:
        step: with prices and sizes.
        budget_bytes: the most that may be alive.
        start: what is dropped in a choice that is known, to be beaten.
        between: bound what is alive between moments only (see ``Step.walk``): a bound for any arena.
        rounds: moments that are added at most.
        nodes: of the search tree of each round.
        time_limit_s: of all rounds; reached only where nodes take very long.

    Raises:
        LayoutOptError: the solver failed.
    """
    best: tuple[int, frozenset[int]] | None = None
    for known in (start,) if start is not None else ():
        walk = step.walk(known, between)
        if walk.peak_bytes <= budget_bytes:
            best = _cost(step, walk.ran), frozenset(known)
    free = step.walk((), between)
    if free.peak_bytes <= budget_bytes:
        return Least(0, frozenset(), 0)
    program = _Program(step, budget_bytes, between)
    program.bound_at(free.fullest)
    bound = 0.0
    for _ in range(rounds):
        found = program.solve(nodes, time_limit_s / rounds)
        if found is None:
            return Least(None)
        bound = max(bound, found.bound_ns)
        if found.dropped is None or (best is not None and _reached(best[0], bound)):
            break
        walk = step.walk(found.dropped, between)
        cost = _cost(step, walk.ran)
        if walk.peak_bytes <= budget_bytes and (best is None or cost < best[0]):
            best = cost, found.dropped
        if walk.peak_bytes <= budget_bytes or not program.bound_at(walk.fullest):
            break
    if best is None:
        return Least(math.ceil(bound))
    return Least(best[0] if _reached(best[0], bound) else math.ceil(bound), best[1], best[0])


def _reached(cost: int, bound: float) -> bool:
    return cost - bound <= max(2 * _TOLERANCE * cost, 0.5)


def _cost(step: Step, ran: Collection[int]) -> int:
    return sum(step.cost_ns[p] for p in ran)


@dataclass(frozen=True)
class _Found:
    bound_ns: float
    dropped: frozenset[int] | None


class _Program:
    """The integer program: grows by moments."""

    def __init__(self, step: Step, budget_bytes: int, between: bool) -> None:
        self.step, self.budget, self.between = step, budget_bytes, between
        self.model = mathopt.Model(name="recomputation")
        self.free = sorted({*step.droppable, *step.through})
        self.drop = {i: self.model.add_binary_variable(name=f"drop{i}") for i in step.droppable}
        self._made: dict[int, dict[int, mathopt.LinearTypes]] = {}
        self._moments: set[Moment] = set()
        self._index()
        self.end = len(step.order) - 1
        last = self._made_by(self.end)
        self.scale = max((step.cost_ns[i] for i in self.free), default=1) or 1
        self.model.minimize(mathopt.fast_sum(step.cost_ns[i] / self.scale * last[i] for i in self.free))
        for i, turn in self._until.items():
            self.model.add_linear_constraint(last[i] - self._made_by(turn)[i] <= 0)

    # ---- the step, by storage ---------------------------------------------------------------------------------------

    def _index(self) -> None:
        """Who reads, touches and makes each storage, and when; what is made from what."""
        step, free = self.step, set(self.free)
        self._first: dict[int, int] = dict.fromkeys(step.from_start, -1)
        self._touched: dict[int, int] = {}
        """Last turns of ops that read or write the original whatever is dropped."""
        self._late: dict[int, int] = {}
        """Last turns of late ops that read the original, or what is made anew."""
        self._first_late: dict[int, int] = {}
        self._maker: dict[int, int] = {}
        self._of: dict[int, set[int]] = {}
        """Ops that are made from a storage when they run again."""
        self._from: dict[int, set[int]] = {i: set() for i in free}
        """Ops that are made from an op's results when they run again."""
        for turn, at in enumerate(step.order):
            for key, maker, _ in step.reads[at]:
                if step.late[at] and maker in free:
                    self._late[key] = turn
                    self._first_late.setdefault(maker, turn)
                else:
                    self._touched[key] = turn
                if at in free:
                    self._of.setdefault(key, set()).add(at)
                    if maker in free:
                        self._from[maker].add(at)
            for key, _, again in step.writes[at]:
                self._touched[key] = turn
                self._first.setdefault(key, turn)
                if at in free and again >= 0:
                    self._maker[key] = at
        self._touched |= dict.fromkeys(step.to_end, len(step.order) - 1)
        self._soonest: dict[int, int] = {}
        for i in reversed(self.free):
            turns = [self._first_late.get(i, len(step.order)), *(self._soonest[j] for j in self._from[i])]
            self._soonest[i] = min(turns)
        self._until = self._last_chances(free)

    def _last_chances(self, free: set[int]) -> dict[int, int]:
        """Of ops whose inputs are overwritten while others may want their results: the last turn that comes in time."""
        step, out = self.step, dict[int, int]()
        never = len(step.order)
        short = {i for i in free if step.gone[i] < never}
        for turn, at in enumerate(step.order):
            pending = [m for _, m, _ in step.reads[at] if m in free] if step.late[at] else []
            wanted: set[int] = set()
            while pending:
                i = pending.pop()
                if i not in wanted:
                    wanted.add(i)
                    pending += [m for _, m, _ in step.reads[i] if m in free]
            for i in wanted & short:
                out[i] = max(out.get(i, -1), turn if at <= step.gone[i] else -1)
        return out

    # ---- variables --------------------------------------------------------------------------------------------------

    def _dropped(self, i: int) -> mathopt.LinearTypes:
        return self.drop.get(i, 1.0)

    def _made_by(self, turn: int) -> dict[int, mathopt.LinearTypes]:
        """By op, whether it has run again before or at a turn."""
        if turn in self._made:
            return self._made[turn]
        made: dict[int, mathopt.LinearTypes] = {}
        add = self.model.add_linear_constraint
        for i in reversed(self.free):
            if self._soonest[i] > turn:
                made[i] = 0.0
                continue
            read = self._first_late.get(i, turn + 1) <= turn
            if read:
                made[i] = self._dropped(i)  # and it is wanted
                continue
            x = self.model.add_variable(lb=0.0, ub=1.0)
            makers = [made[j] for j in sorted(self._from[i]) if self._soonest[j] <= turn]
            for y in makers:
                add(x >= y + self._dropped(i) - 1)
            add(x <= mathopt.fast_sum(makers))
            if i in self.drop:
                add(x <= self.drop[i])
            made[i] = x
        self._made[turn] = made
        return made

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def bound_at(self, moment: Moment) -> bool:
        """Bound what is alive at a moment (or just before it); False where that is done already."""
        if moment in self._moments:
            return False
        self._moments.add(moment)
        turn, again = moment
        now, before = self._made_by(turn), self._made_by(turn - 1)
        fixed, terms = 0.0, []
        for key, first in self._first.items():
            size = float(self.step.sizes[key])
            if not size or first > turn or (first == turn and (again >= 0 or self.between)):
                continue
            for part in self._alive(key, turn, again, now, before):
                if isinstance(part, float):
                    fixed += size * part
                else:
                    terms.append(size / self.budget * part)
        self.model.add_linear_constraint(mathopt.fast_sum(terms) <= 1 - fixed / self.budget)
        return True

    def _alive(
        self,
        key: int,
        turn: int,
        again: int,
        now: dict[int, mathopt.LinearTypes],
        before: dict[int, mathopt.LinearTypes],
    ) -> list[mathopt.LinearTypes]:
        """Whether a storage is alive, and what is made anew of it."""
        i = self._maker.get(key, -1)
        end = self._made_by(self.end)
        # What is yet to be made from it, at the moment or later.
        coming = []
        for j in sorted(self._of.get(key, ())):
            done = now[j] if again < 0 or j < again else before[j]
            if not isinstance(end[j], float) and end[j] is not done:
                coming.append(end[j] - done)
        kept = self._any(1 - self._dropped(i) if i >= 0 else 1.0, coming, self._late.get(key, -1) >= turn)
        parts: list[mathopt.LinearTypes] = [1.0] if self._touched.get(key, -1) >= turn else [kept]
        if i < 0:
            return parts
        by = now[i] if again < 0 or i < again or (i == again and not self.between) else before[i]
        if isinstance(by, float) and by == 0:
            return parts
        anew = self._any(by, coming, self._late.get(key, -1) >= turn)
        if i == again and not self.between:
            anew = self._at_least([now[i] - before[i], anew])
        return [*parts, anew]

    def _any(self, there: mathopt.LinearTypes, coming: list[mathopt.LinearTypes], read: bool) -> mathopt.LinearTypes:
        """``there`` where it is read anyway, or something is yet to be made from it."""
        if read:
            return there
        return self._at_least([there + x - 1 for x in coming])

    def _at_least(self, least: list[mathopt.LinearTypes]) -> mathopt.LinearTypes:
        """A variable that is no less than any of these, nor than 0."""
        open_ = [x for x in least if not isinstance(x, (int, float))]
        floor = max((float(x) for x in least if isinstance(x, (int, float))), default=0.0)
        if not open_:
            return max(floor, 0.0)
        x = self.model.add_variable(lb=max(floor, 0.0), ub=max(floor, 1.0))
        for y in open_:
            self.model.add_linear_constraint(x >= y)
        return x

    # ---- solving ----------------------------------------------------------------------------------------------------

    def solve(self, nodes: int, seconds: float) -> _Found | None:
        """The cheapest choice within the bounds so far; None where there is none."""
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=seconds), node_limit=nodes, relative_gap_tolerance=1e-9
        )
        result = mathopt.solve(self.model, mathopt.SolverType.HIGHS, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return None
        if reason not in (
            mathopt.TerminationReason.OPTIMAL,
            mathopt.TerminationReason.FEASIBLE,
            mathopt.TerminationReason.NO_SOLUTION_FOUND,
        ):
            raise LayoutOptError(f"HiGHS stopped with {reason.name} on a choice of recomputation")
        dual = result.termination.objective_bounds.dual_bound * self.scale
        bound = max(dual - _TOLERANCE * abs(dual), 0.0) if math.isfinite(dual) else 0.0
        if not result.has_primal_feasible_solution():
            return _Found(bound, None)
        values = result.variable_values()
        return _Found(bound, frozenset(i for i, x in self.drop.items() if values[x] > 0.5))
