"""The search for the optimum on tables: sweeps for the bound, elimination for what they leave, one budget at a time.

Let the *bound* be what sweeps have proven, and guess that the optimum is at most a little above it: that is the first
budget. Sweeps within so small a budget leave few values, and elimination on these is exact: it finds the optimum, or
proves that there is nothing within the budget, which is a better bound. Then the budget doubles, up to the best
assignment known less one nanosecond. Ties and near ties can make tables too wide even so. Then elimination keeps the
cheapest rows: what it finds is an assignment, often the best, and everything below it can still be refuted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from layoutopt.factors import Factor
from layoutopt.interrupts import overdue
from layoutopt.reduce import Domain
from layoutopt.states import SCALE, Network
from layoutopt.sweeps import Prepared, sweep
from layoutopt.treewidth import Answer, Limits, OutOfTimeError, eliminate

__all__ = ["Outcome", "remaining", "search"]

_FIRST_ROUNDS = 200
_ROUNDS = 50
_FIRST_ROWS = 1 << 14
_ROWS_GROWTH = 8
"""Rows of a table at first, and how the number grows where these led nowhere."""
_LEAP = 6
"""A step after an elimination is so many times the last; twice once that was too much."""
_FAILURES = 8
"""Eliminations with as many rows as allowed that may lead nowhere before the rest is left to HiGHS."""
_FINE = 64
"""The first step above a bound is this part of what lies between it and what is to be reached."""


@dataclass(frozen=True)
class Outcome:
    """What the search knows.

    Attributes:
        bound_ns: no assignment is cheaper.
        cost_ns: of ``values``; None where nothing better than the start was found.
        values: per variable of the network.
        closed: the cheaper of ``cost_ns`` and the start's cost is the optimum (or nothing is possible at all).
    """

    bound_ns: int
    cost_ns: int | None
    values: tuple[int, ...]
    closed: bool


def search(network: Network, best_ns: int, limits: Limits, sweeps: bool = True, elimination: bool = True) -> Outcome:
    """Close the gap below ``best_ns``, as far as time and width allow.

    Args:
        network: the tables.
        best_ns: only cheaper assignments are looked for; of a known one, or beyond any.
        limits: rows of a table, and when to stop.
        sweeps: a switch, for the ablation.
        elimination: likewise.
    """
    work = _Search(network, best_ns, limits)
    with suppress(OutOfTimeError):
        work.run(sweeps, elimination)
    return Outcome(work.bound_ns, work.cost_ns, work.values, work.closed)


def remaining(network: Network, best_ns: int) -> Domain | None:
    """Primaries and choices that an assignment cheaper than ``best_ns`` may have; None where there is none."""
    budget = best_ns * SCALE - network.base - SCALE
    swept = sweep(network.factors, network.sizes, budget, _ROUNDS) if budget >= 0 else None
    if swept is None:
        return None
    old, primaries, choices = network.domain, list(network.domain.primaries), []
    for s, variable in network.storages.items():
        left = swept.alive[variable]
        own = {primary for (primary, _, _), lives in zip(network.states[s], left, strict=True) if lives}
        primaries[s] = tuple(p for p in old.primaries[s] if p in own)
    for op, left_of_op, slots in zip(network.problem.ops, old.choices, network.slots, strict=True):
        masks = [swept.alive[v] for v in slots]
        kept = [c for c in left_of_op if all(mask[x] for mask, x in zip(masks, op.choices[c].layouts, strict=True))]
        choices.append(tuple(kept))
    if not all(primaries) or not all(choices):
        return None
    return Domain(tuple(primaries), tuple(choices))


@dataclass(frozen=True)
class _Base:
    """Tables after sweeps: what they leave out is paid already, and settled; good for budgets up to ``top``."""

    factors: list[Factor]
    paid: int
    settled: dict[int, int]
    top: int
    _prepared: list[Prepared] = field(default_factory=list, compare=False, repr=False)

    def prepared(self, sizes: tuple[int, ...]) -> Prepared:
        """The tables as ``sweep`` likes them, kept."""
        if not self._prepared:
            self._prepared.append(Prepared(self.factors, sizes))
        return self._prepared[0]


class _Search:
    """Costs here are scaled and less the network's base; ``low`` and below is refuted, ``high`` is to be beaten."""

    def __init__(self, network: Network, best_ns: int, limits: Limits) -> None:
        self.network, self.limits = network, limits
        self.high = best_ns * SCALE - network.base
        self.low = -1
        self.cost_ns: int | None = None
        self.values: tuple[int, ...] = ()

    @property
    def bound_ns(self) -> int:
        """The least whole cost that is not refuted."""
        return min(-(-(self.network.base + self.low + 1) // SCALE), (self.network.base + self.high) // SCALE)

    @property
    def closed(self) -> bool:
        """Whether nothing cheaper than ``high`` is left."""
        return self.low >= self.high - SCALE

    def run(self, sweeps: bool, elimination: bool) -> None:
        """Until closed, or too wide."""
        self._in_time()
        whole = _Base(list(self.network.factors), 0, {}, self.high)
        if sweeps:
            swept = self._sweep(whole, self.high - SCALE, _FIRST_ROUNDS)
            if swept is None:
                return
            whole = swept
        if not elimination:
            return
        base, fresh = whole, False
        step = max(SCALE, (self.high - self.low) // _FINE) if sweeps else self.high - self.low
        rows, failed, leap = min(_FIRST_ROWS, self.limits.rows), 0, _LEAP
        while not self.closed:
            self._in_time()
            top = min(self.low + step, self.high - SCALE)
            if top > base.top:
                base, fresh = whole, False
            within = base
            if sweeps:
                swept = self._sweep(base, top, _ROUNDS)
                if swept is None:
                    step *= 2
                    continue
                if not fresh:
                    # Here it gets hard: from now on start from costs that were swept for budgets of this size.
                    wider = self._sweep(base, min(self.low + 4 * (top - self.low), self.high - SCALE), _FIRST_ROUNDS)
                    if wider is not None:
                        base, fresh = wider, True
                        step = max(SCALE, (top - self.low) // _FINE)
                    continue
                within = swept
            limits = Limits(rows, self.limits.deadline)
            answer = eliminate(within.factors, self.network.sizes, top - within.paid, limits, _ROUNDS if sweeps else 0)
            self._take(answer, within)
            if answer.exact:
                self.low = top if answer.cost is None else self.high - SCALE
                step = leap * (top - within.paid) + SCALE
            elif answer.cost is None or not sweeps:
                # Too much at once: a smaller step, and more rows.
                failed, leap = failed + (rows >= self.limits.rows), 2
                if failed > _FAILURES:
                    return
                step = max((top - self.low) // 3, 1)
                rows = min(rows * _ROWS_GROWTH, self.limits.rows)

    def _in_time(self) -> None:
        if overdue(self.limits.deadline):
            raise OutOfTimeError

    def _sweep(self, base: _Base, top: int, rounds: int) -> _Base | None:
        """Sweep within ``top``; None where that refutes it. Either way ``low`` says what is refuted."""
        swept = sweep(
            base.prepared(self.network.sizes), self.network.sizes, top - base.paid, rounds, self.limits.deadline
        )
        if swept is None:
            self.low = max(self.low, top)
            return None
        paid = base.paid + swept.constant
        self.low = max(self.low, paid - 1)
        return _Base(swept.factors, paid, base.settled | swept.settled, top)

    def _take(self, answer: Answer, base: _Base) -> None:
        if answer.cost is None:
            return
        self.high = base.paid + answer.cost
        self.cost_ns = (self.network.base + self.high) // SCALE
        values = list(answer.values)
        for v, value in base.settled.items():
            values[v] = value
        self.values = tuple(values)
