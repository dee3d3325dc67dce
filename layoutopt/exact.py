"""The search for the optimum on tables: sweeps for the bound, elimination for what they leave, one budget at a time.

Let the *bound* be what sweeps have proven, and guess that the optimum is at most a little above it: that is the first
budget. Sweeps within so small a budget leave few values, and elimination on these is exact: it finds the optimum, or
proves that there is nothing within the budget, which is a better bound. Then the budget doubles, up to the best
assignment known less one nanosecond. Ties and near ties can make tables too wide even so. Then elimination keeps the
cheapest rows: what it finds is an assignment, often the best, and everything below it can still be refuted.

Two things come before that. A *dive* looks for a better assignment near the best one known: among its rows and those
that cost little each, few at first and then more, by elimination from block to block; where tables get too wide that is
a beam search. And tables are *condensed*: what can be eliminated without making them large is, so that the budgets that
follow begin with fewer of them, and with a better bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from layoutopt.factors import Factor
from layoutopt.grouping import ranks
from layoutopt.interrupts import overdue
from layoutopt.reduce import Domain
from layoutopt.states import SCALE, Network
from layoutopt.sweeps import Prepared, sweep
from layoutopt.treewidth import Answer, Condensed, Limits, OutOfTimeError, condense, eliminate

__all__ = ["Outcome", "Tactics", "remaining", "search"]

_STAGES = ((20, True), (50, False))
"""Rounds of sweeps at first, and whether a dive follows: before costs are where they belong none helps."""
_ROUNDS = 50
"""Of sweeps later on."""
_FIRST_ROWS, _LAST_ROWS, _MOST_ROWS = 1 << 8, 1 << 18, 1 << 18
"""Rows of a table when condensing begins and ends, and in elimination, if the caller allows as many."""
_SMALL = 1 << 6
"""Rows with which condensing within a guess begins."""
_ROWS_GROWTH = 4
_PARTS = 8
"""The first guess above a bound is this part of what lies between it and what is to be reached."""
_LEAP = 6
"""A step after an elimination is so many times the last; twice once that was too much."""
_FAILURES = 3
"""Eliminations that may lead nowhere before the rest is left to HiGHS."""
_SHALLOW, _DEEPER, _DEPTHS = 18, 4, 9
"""A dive begins with rows that cost up to 2 ** -_SHALLOW of the gap, then so many times more, so many times."""
_DIVE_ROUNDS, _DIVE_ROWS, _GROUP = 3, 1 << 13, 200
"""Sweeps before a dive's beam search, its width in rows, and the tables in a group along its path."""


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


@dataclass(frozen=True)
class Tactics:
    """What the search may use; switches, for the ablation. Dives and condensing need sweeps."""

    sweeps: bool = True
    dives: bool = True
    condensing: bool = True
    elimination: bool = True


_ALL = Tactics()


def search(
    network: Network,
    best_ns: int,
    limits: Limits,
    tactics: Tactics = _ALL,
    start: Sequence[int] | None = None,
) -> Outcome:
    """Close the gap below ``best_ns``, as far as time and width allow.

    Args:
        network: the tables.
        best_ns: only cheaper assignments are looked for; of a known one, or beyond any.
        limits: rows of a table, and when to stop.
        tactics: all by default.
        start: values per variable near which better ones are looked for; they may cost more than ``best_ns``.
    """
    work = _Search(network, best_ns, limits, start)
    with suppress(OutOfTimeError):
        work.run(tactics)
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
    """Tables that are left, what is paid beside them, and the way back; good for budgets up to ``top``."""

    factors: list[Factor]
    paid: int
    top: int
    trail: tuple[Condensed, ...] = ()
    _prepared: list[Prepared] = field(default_factory=list, compare=False, repr=False)

    def prepared(self, sizes: tuple[int, ...]) -> Prepared:
        """The tables as ``sweep`` likes them, kept."""
        if not self._prepared:
            self._prepared.append(Prepared(self.factors, sizes))
        return self._prepared[0]

    def after(self, made: Condensed, top: int) -> _Base:
        """What is left after one more step."""
        return _Base(made.factors, self.paid + made.constant, top, (*self.trail, made))

    def complete(self, values: Sequence[int]) -> tuple[int, ...]:
        """All values, from those of the variables that are left."""
        out = tuple(values)
        for made in reversed(self.trail):
            out = made.complete(out)
        return out


class _Search:
    """Costs here are scaled and less the network's base; ``low`` and below is refuted, ``high`` is to be beaten."""

    def __init__(self, network: Network, best_ns: int, limits: Limits, start: Sequence[int] | None = None) -> None:
        self.network, self.limits = network, limits
        self.known: Sequence[int] = start or [-1] * len(network.sizes)
        self.path: list[int] = []
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

    @property
    def most(self) -> int:
        """The largest cost that is still of interest."""
        return self.high - SCALE

    def run(self, tactics: Tactics) -> None:
        """Until closed, or too wide."""
        self._in_time()
        base: _Base | None = _Base(list(self.network.factors), 0, self.high)
        assert base is not None
        if not tactics.sweeps:
            if tactics.elimination:
                self._plain(base)
            return
        for rounds, dives in _STAGES:
            base = self._sweep(base, self.most, rounds)
            if base is None or not base.factors:
                self.low = max(self.low, self.most)  # what is left is the best, and found
                return
            if tactics.dives and dives:
                self._dive(base)
            if self.closed:
                return
        if tactics.condensing:
            base = self._narrow(base, tactics)
        if tactics.elimination and base is not None and not self.closed:
            self._guess(base)

    def _plain(self, base: _Base) -> None:
        """Elimination alone."""
        answer = eliminate(base.factors, self.network.sizes, self.most, self.limits)
        self._take(answer, base)
        if answer.exact:
            self.low = self.most

    def _narrow(self, base: _Base, tactics: Tactics) -> _Base | None:
        """Condense with larger and larger tables; at each size find or refute what lies close above the bound.

        The guess of how close begins small and doubles, since a small budget leaves small tables.
        """
        rows = min(_FIRST_ROWS, self.limits.rows)
        while not self.closed:
            whole = self._condense(base, self.most, rows)
            if whole is None or not whole.factors:
                self.low = max(self.low, self.most)
                return None
            base = whole
            step = max((self.most - self.low) // _PARTS, SCALE)
            while not self.closed:
                top = min(self.low + step, self.most)
                if self._is_wide(base, top, rows, tactics.dives):
                    break
                step *= 2
            if rows >= min(_LAST_ROWS, self.limits.rows):
                break
            rows = min(rows * _ROWS_GROWTH, self.limits.rows)
        return base

    def _is_wide(self, base: _Base, top: int, rows: int, dives: bool) -> bool:
        """Find the best assignment up to ``top``, or refute that there is one; whether tables get too wide for that."""
        left = self._sweep(base, top, _ROUNDS)
        size = min(_SMALL, rows)
        while left is not None and left.factors and size <= rows:
            left = self._condense(left, top, size)
            size *= _ROWS_GROWTH
        if left is None:
            return False
        if not left.factors:
            self.low = max(self.low, self.most)  # the best that there is was found
            return False
        if dives:
            self._dive(left)
        return not self.closed

    def _guess(self, base: _Base) -> None:
        """Elimination within growing budgets, which goes further than condensing: it keeps the cheapest rows."""
        rows, failed, leap = min(self.limits.rows, _MOST_ROWS), 0, _LEAP
        step = max(SCALE, (self.high - self.low) // _PARTS)
        while not self.closed:
            top = min(self.low + step, self.most)
            left = self._sweep(base, top, _ROUNDS)
            if left is None:
                step *= 2
                continue
            limits = Limits(rows, self.limits.deadline)
            answer = eliminate(left.factors, self.network.sizes, top - left.paid, limits, _ROUNDS)
            self._take(answer, left)
            if answer.exact:
                self.low = max(self.low, top if answer.cost is None else self.most)
                step = leap * max(top - left.paid, 1)
            elif answer.cost is None:
                # Too much at once.
                failed, leap = failed + 1, 2
                if failed > _FAILURES:
                    return
                step = max((top - self.low) // 3, 1)

    def _along(self, base: _Base) -> list[int]:
        """The order of a path through the network, made once."""
        if not self.path:
            self.path = ranks(base.factors, len(self.network.sizes), _GROUP)
        return self.path

    def _dive(self, base: _Base) -> None:
        """Look for better assignments among rows that cost little each and those of the best assignment known.

        With these, what cannot be had cheaply somewhere stays as it is there and is no dead end. Where there are too
        many rows it is a beam search along a path.
        """
        if not base.factors:
            return
        sizes = self.network.sizes
        flat = base.prepared(sizes)
        share = max((self.most - base.paid) >> _SHALLOW, 1)
        for _ in range(_DEPTHS):
            self._in_time()
            near = flat.near(self.known, share)
            share *= _DEEPER
            left = self._settled(base, self.most, _DIVE_ROUNDS, near)
            if left is None:
                continue
            limits = Limits(_DIVE_ROWS, self.limits.deadline)
            answer = eliminate(left.factors, sizes, self.most - left.paid, limits, 0, self._along(base))
            self._take(answer, left)
            if not answer.exact:
                return

    def _in_time(self) -> None:
        if overdue(self.limits.deadline):
            raise OutOfTimeError

    def _sweep(self, base: _Base, top: int, rounds: int) -> _Base | None:
        """Sweep within ``top``; None where that refutes it. Either way ``low`` says what is refuted."""
        self._in_time()
        return self._known(self._settled(base, top, rounds), top)

    def _known(self, left: _Base | None, top: int) -> _Base | None:
        """Take note of what is refuted, and of an assignment where nothing is open."""
        if left is None:
            self.low = max(self.low, top)
            return None
        self.low = max(self.low, left.paid - 1)
        if not left.factors:
            self._found(left.paid, left.complete([0] * len(self.network.sizes)))
        return left

    def _settled(self, base: _Base, top: int, rounds: int, only: NDArray[np.bool_] | None = None) -> _Base | None:
        sizes = self.network.sizes
        swept = sweep(base.prepared(sizes), sizes, top - base.paid, rounds, self.limits.deadline, only)
        return None if swept is None else base.after(Condensed(swept.factors, swept.constant, swept.settled, ()), top)

    def _condense(self, base: _Base, top: int, rows: int) -> _Base | None:
        """Eliminate what keeps tables small, within ``top``; None where that refutes it."""
        limits = Limits(rows, self.limits.deadline)
        try:
            made = condense(base.factors, self.network.sizes, top - base.paid, limits, _ROUNDS)
        except OutOfTimeError as error:
            self.low = max(self.low, min(base.paid + error.paid - 1, top))
            raise
        return self._known(None if made is None else base.after(made, top), top)

    def _take(self, answer: Answer, base: _Base) -> None:
        if answer.cost is not None:
            self._found(base.paid + answer.cost, base.complete(answer.values))

    def _found(self, cost: int, values: tuple[int, ...]) -> None:
        if cost < self.high:
            self.high, self.values, self.known = cost, values, values
            self.cost_ns = (self.network.base + cost) // SCALE
