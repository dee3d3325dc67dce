"""Dynamic programming over a tree decomposition, on sparse tables and within a budget.

A problem is a set of *factors*: tables over a few variables each, a row for every tuple of values that is allowed, with
a cost of zero or more. Wanted is the assignment of least total cost. Variables are eliminated one at a time: the tables
that know a variable are joined, and for every tuple of their other variables the best value is kept. The order is
greedy (least estimated table first, the min-fill of sparse tables); the tables that arise are the bags of a tree
decomposition, and where its width is small they are too. (Bertele and Brioschi, Nonserial Dynamic Programming, 1972;
Dechter, Bucket elimination, 1999.)

No cost is negative, so a row dearer than the *budget* is part of no assignment within it and is dropped on sight. That
is what keeps the tables small: once ``sweeps`` has moved what everything costs to a constant, the optimum lies just
above zero. As tables are joined, further sweeps see more at once and raise the constant further. Within the budget the
answer is exact: the least assignment, or the proof that there is none. Where a table has too many rows the cheapest are
kept, and the answer says that it is no proof any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from layoutopt.factors import Factor
from layoutopt.interrupts import overdue
from layoutopt.sweeps import sweep

__all__ = ["Answer", "Condensed", "Limits", "OutOfTimeError", "condense", "eliminate"]

Ints = NDArray[np.int64]

_KEY_LIMIT = 1 << 62


class OutOfTimeError(Exception):
    """The deadline has passed. Caught by the solver."""


_SWEEP_AT = 256
"""Estimated rows of the next table from which costs are swept again; grows by ``_SWEEP_GROWTH`` each time."""
_SWEEP_GROWTH = 4
_ATTEMPTED = 64
"""Estimates are of the worst case: tables are joined up to so many times the rows allowed, to see."""
_STALLED = 0.97
"""Condensing goes on while sweeps leave a smaller part of the rows than this."""
_HOPELESS = 1 << 60
"""Estimates beyond this are all the same."""


@dataclass(frozen=True)
class Limits:
    """What may be spent: ``rows`` of one table, and time until ``deadline`` by ``time.perf_counter``."""

    rows: int = 1 << 20
    deadline: float = float("inf")


@dataclass(frozen=True)
class Answer:
    """What an elimination found.

    Attributes:
        exact: no rows were lost: ``cost`` is the least, or there is no assignment within the budget.
        cost: of the assignment; None where none was found.
        values: per variable; empty where none was found.
        largest: rows of the largest table on the way.
    """

    exact: bool
    cost: int | None
    values: tuple[int, ...]
    largest: int


@dataclass(frozen=True)
class _Step:
    """An elimination: the best ``value`` of ``variable`` for every row that is left of its table."""

    variable: int
    scope: tuple[int, ...]
    rows: NDArray[np.signedinteger]
    value: NDArray[np.signedinteger]


def eliminate(
    factors: Iterable[Factor],
    sizes: Sequence[int],
    budget: int,
    limits: Limits,
    rounds: int = 0,
    ranks: Sequence[int] | None = None,
) -> Answer:
    """The least assignment that costs at most ``budget``.

    Args:
        factors: tables without negative costs.
        sizes: values per variable.
        budget: what the assignment may cost.
        limits: of rows and time.
        rounds: of sweeps whenever tables have grown; 0 for plain elimination.
        ranks: per variable, lower ones first; of equal ones that which makes the smallest table.

    Raises:
        OutOfTimeError: the deadline has passed.
    """
    work = _Elimination(list(factors), sizes, budget, limits, rounds, ranks)
    found = work.run()
    return Answer(work.exact, work.offset if found else None, tuple(work.values) if found else (), work.largest)


@dataclass(frozen=True)
class Condensed:
    """What eliminations left of tables, none of them larger than allowed, and the way back.

    Attributes:
        factors: over the variables that are left; empty where everything was eliminated.
        constant: what every assignment pays beside them.
        settled: the value of variables that have but one left.
    """

    factors: list[Factor]
    constant: int
    settled: dict[int, int]
    _steps: tuple[_Step, ...]

    def complete(self, values: Sequence[int]) -> tuple[int, ...]:
        """All values, from those of the variables that are left."""
        out = list(values)
        for v, value in self.settled.items():
            out[v] = value
        _read_back(self._steps, out)
        return tuple(out)


def condense(
    factors: Iterable[Factor], sizes: Sequence[int], budget: int, limits: Limits, rounds: int
) -> Condensed | None:
    """Eliminate what makes no table of more than ``limits.rows`` rows, sweeping in between; nothing is lost.

    Args:
        factors: tables without negative costs.
        sizes: values per variable.
        budget: assignments that cost more may be lost.
        limits: of rows and time.
        rounds: of sweeps.

    Returns:
        Smaller tables with the same assignments within the budget; None where there is none.

    Raises:
        OutOfTimeError: the deadline has passed.
    """
    work = _Elimination(list(factors), sizes, budget, limits, rounds)
    if not work.condense():
        return None
    return Condensed(list(work.factors.values()), work.offset, work.settled, tuple(work.steps))


def _read_back(steps: Sequence[_Step], values: list[int]) -> None:
    """Fill in what was eliminated, last first."""
    for step in reversed(steps):
        picked = np.array([values[u] for u in step.scope], dtype=np.int64)
        at = int(np.flatnonzero((step.rows == picked).all(axis=1))[0])
        values[step.variable] = int(step.value[at])


class _Elimination:
    """The tables that are left, by number, and the eliminations so far."""

    def __init__(
        self,
        factors: list[Factor],
        sizes: Sequence[int],
        budget: int,
        limits: Limits,
        rounds: int,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranks = ranks or [0] * len(sizes)
        self.sizes, self.budget, self.limits, self.rounds = list(sizes), budget, limits, rounds
        self.counts = list(sizes)
        # What is kept of every elimination until the end, as small as it can be.
        self.kind = np.int16 if max(self.sizes, default=0) < 1 << 15 else np.int64
        self.offset = 0
        self.largest = 0
        self.exact = True
        self.values = [0] * len(sizes)
        self.initial = factors
        self.steps: list[_Step] = []
        self.settled: dict[int, int] = {}
        self.next = 0
        self.sweep_at = _SWEEP_AT
        self._forget()

    def _forget(self) -> None:
        self.factors: dict[int, Factor] = {}
        self.around: list[set[int]] = [set() for _ in self.sizes]

    def run(self) -> bool:
        """Eliminate everything, then read the values off in reverse; False where nothing is within the budget."""
        if not all(self._add(table) for table in self.initial):
            return False
        heap = self._heap()
        while heap:
            estimate, v = heapq.heappop(heap)
            if not self.around[v]:
                continue
            now = self._when(v)
            if now != estimate:
                heapq.heappush(heap, (now, v))
                continue
            if self.rounds and now[1] > self.sweep_at:
                self.sweep_at *= _SWEEP_GROWTH
                if not self._sweep():
                    return False
                heap = self._heap()
                continue
            touched = self._eliminate(v)
            if touched is None:
                return False
            for u in touched:
                if self.around[u]:
                    heapq.heappush(heap, (self._when(u), u))
        _read_back(self.steps, self.values)
        return True

    def condense(self) -> bool:
        """Eliminate what keeps tables small until no more does; False where nothing is within the budget."""
        if not all(self._add(table) for table in self.initial):
            return False
        while True:
            done, rows = len(self.steps), self._rows()
            if not self._eliminate_small() or not self._sweep():
                return False
            if len(self.steps) == done and self._rows() >= _STALLED * rows:
                return True

    def _rows(self) -> int:
        return sum(len(table.costs) for table in self.factors.values())

    def _eliminate_small(self) -> bool:
        heap = self._heap()
        barred: dict[int, set[int]] = {}
        while heap:
            estimate, v = heapq.heappop(heap)
            if not self.around[v] or barred.get(v) == self.around[v]:
                continue
            now = self._when(v)
            if now != estimate:
                heapq.heappush(heap, (now, v))
                continue
            if now[1] > _ATTEMPTED * self.limits.rows:
                break
            barred[v] = set(self.around[v])
            touched = self._eliminate(v, False)
            if touched is None:
                return False
            for u in touched:
                if self.around[u]:
                    heapq.heappush(heap, (self._when(u), u))
        return True

    def _count(self) -> None:
        """How many values each variable has left, by the tables that know it."""
        for table in self.factors.values():
            for k, v in enumerate(table.scope):
                self.counts[v] = min(self.counts[v], int(np.count_nonzero(np.bincount(table.rows[:, k]))))

    def _heap(self) -> list[tuple[tuple[int, int], int]]:
        self._count()
        heap = [(self._when(v), v) for v in range(len(self.sizes)) if self.around[v]]
        heapq.heapify(heap)
        return heap

    def _when(self, v: int) -> tuple[int, int]:
        return self.ranks[v], self._estimate(v)

    def _sweep(self) -> bool:
        """Move costs, settle variables; False where nothing is left within the budget."""
        swept = sweep(list(self.factors.values()), self.sizes, self.budget - self.offset, self.rounds)
        if swept is None:
            return False
        self.offset += swept.constant
        for v, value in swept.settled.items():
            self.values[v] = self.settled[v] = value
        self._forget()
        return all(self._add(table) for table in swept.factors)

    def _add(self, table: Factor) -> bool:
        """Take in a table, its least cost moved to the offset; False where nothing is left within the budget."""
        if not len(table.costs):
            return False
        least = int(table.costs.min())
        if least:
            self.offset += least
            table = Factor(table.scope, table.rows, table.costs - least)
        if self.offset > self.budget:
            return False
        self.largest = max(self.largest, len(table.costs))
        for v in table.scope:
            self.around[v].add(self.next)
        if table.scope:
            self.factors[self.next] = table
            self.next += 1
        return True

    def _estimate(self, v: int) -> int:
        """Rows of the table that eliminating ``v`` would make, at most, and never more than ``_HOPELESS``."""
        by_rows, by_values, seen = 1, 1, set[int]()
        for f in self.around[v]:
            by_rows = min(by_rows * len(self.factors[f].costs), _HOPELESS)
            if by_values < _HOPELESS:
                for u in self.factors[f].scope:
                    if u not in seen:
                        seen.add(u)
                        by_values *= self.counts[u]
            elif by_rows == _HOPELESS:
                break
        return min(by_rows, by_values, _HOPELESS)

    def _eliminate(self, v: int, truncate: bool = True) -> set[int] | None:
        """The variables around ``v``, empty where that is not eliminated; None where nothing is within the budget."""
        if overdue(self.limits.deadline):
            raise OutOfTimeError
        ids = sorted(self.around[v], key=lambda f: (len(self.factors[f].costs), f))
        made = self._project(v, [self.factors[f] for f in ids], truncate)
        if made is None:
            return set()
        for f in ids:
            for u in self.factors.pop(f).scope:
                self.around[u].discard(f)
        step, table = made
        self.steps.append(step)
        return set(step.scope) if self._add(table) else None

    def _project(self, v: int, tables: list[Factor], truncate: bool) -> tuple[_Step, Factor] | None:
        """The tables around ``v`` as one without it; None where that is too large."""
        old = sum(len(table.costs) * len(table.scope) for table in tables)
        joined = tables[0]
        for table in tables[1:]:
            wider = self._join(joined, table, truncate, max(old, self.limits.rows))
            if wider is None:
                return None
            joined = wider
        at = joined.scope.index(v)
        rest = joined.scope[:at] + joined.scope[at + 1 :]
        within = joined.costs <= self.budget - self.offset
        rows, costs = joined.rows[within], joined.costs[within]
        others = np.delete(rows, at, axis=1)
        key = _keys(others, [self.sizes[u] for u in rest])
        order = np.lexsort((rows[:, at], costs, key))
        first = np.ones(len(order), dtype=bool)
        first[1:] = key[order][1:] != key[order][:-1]
        kept = order[first]
        if not truncate and len(kept) > self.limits.rows and len(kept) * len(rest) > old:
            return None
        step = _Step(v, rest, others[kept].astype(self.kind), rows[kept, at].astype(self.kind))
        return step, Factor(rest, others[kept], costs[kept])

    def _join(self, a: Factor, b: Factor, truncate: bool, most: int) -> Factor | None:
        """The pairs of rows that agree where the scopes meet, within the budget; too many: the cheapest, or None."""
        shared = [v for v in a.scope if v in b.scope]
        sizes = [self.sizes[v] for v in shared]
        in_a, in_b = [a.scope.index(v) for v in shared], [b.scope.index(v) for v in shared]
        both = _keys(np.concatenate([a.rows[:, in_a], b.rows[:, in_b]]), sizes)
        group = np.unique(both, return_inverse=True)[1].reshape(-1)
        left, right = group[: len(a.costs)], group[len(a.costs) :]
        # Partners sorted by cost, so that the pairs within the budget are a run: nothing else is ever built.
        levels, cost = np.unique(b.costs, return_inverse=True)
        span = len(levels) + 1
        ranks = right * span + cost.reshape(-1)
        order = np.argsort(ranks, kind="stable")
        ranked = ranks[order]
        within = np.searchsorted(levels, self.budget - self.offset - a.costs, "right")
        low = np.searchsorted(ranked, left * span, "left")
        high = np.searchsorted(ranked, left * span + within, "left")
        counts = high - low
        rows = np.arange(len(left))
        if not truncate and int(counts.sum()) > most:
            return None
        if truncate and int(counts.sum()) > self.limits.rows:
            self.exact = False
            cheapest = np.argsort(a.costs, kind="stable")
            fitting = max(int(np.searchsorted(np.cumsum(counts[cheapest]), self.limits.rows)), 1)
            rows = np.sort(cheapest[:fitting])
            low, counts = low[rows], counts[rows]
        i = np.repeat(rows, counts)
        starts = np.cumsum(counts) - counts
        j = order[np.arange(len(i)) - np.repeat(starts - low, counts)]
        new = [k for k, v in enumerate(b.scope) if v not in shared]
        rows = np.concatenate([a.rows[i], b.rows[j][:, new]], axis=1)
        return Factor(a.scope + tuple(b.scope[k] for k in new), rows, a.costs[i] + b.costs[j])


def _keys(rows: Ints, sizes: Sequence[int]) -> Ints:
    """One number per row, equal for equal rows."""
    if prod(sizes) >= _KEY_LIMIT:
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    key = np.zeros(len(rows), dtype=np.int64)
    for k, n in enumerate(sizes):
        key = key * n + rows[:, k]
    return key
