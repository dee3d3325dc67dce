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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutopt import buckets
from layoutopt.factors import Factor
from layoutopt.interrupts import overdue
from layoutopt.sweeps import Prepared, sweep

__all__ = ["Answer", "Condensed", "Limits", "OutOfTimeError", "condense", "eliminate"]


class OutOfTimeError(Exception):
    """The deadline has passed; ``paid`` is what every assignment within the budget is known to pay."""

    def __init__(self, paid: int = 0) -> None:
        super().__init__(paid)
        self.paid = paid


_SWEEP_AT = 256
"""Estimated rows of the next table from which costs are swept again; grows by ``_SWEEP_GROWTH`` each time."""
_SWEEP_GROWTH = 4
_STALLED = 0.97
"""Condensing goes on while sweeps leave a smaller part of the rows than this."""


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
    return Answer(work.exact, work.offset if found else None, work.values, work.largest)


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
    _steps: tuple[Any, ...] = ()

    def complete(self, values: Sequence[int]) -> tuple[int, ...]:
        """All values, from those of the variables that are left."""
        return _completed(values, self.settled, self._steps)


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
    try:
        if not work.condense():
            return None
    except OutOfTimeError as error:
        raise OutOfTimeError(work.offset) from error
    return Condensed(work.factors(), work.offset, work.settled, work.steps)


def _completed(values: Sequence[int], settled: Mapping[int, int], steps: tuple[Any, ...]) -> tuple[int, ...]:
    out = np.array(values, dtype=np.int64)
    for v, value in settled.items():
        out[v] = value
    if steps:
        buckets.read_back(*steps, out)
    return tuple(out.tolist())


class _Elimination:
    """The tables that are left and the eliminations so far."""

    def __init__(
        self,
        factors: list[Factor],
        sizes: Sequence[int],
        budget: int,
        limits: Limits,
        rounds: int,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.ranks = np.array(ranks or [0] * len(sizes), dtype=np.int64)
        self.budget, self.limits, self.rounds = budget, limits, rounds
        self.counters = np.array([0, 0, 1], dtype=np.int64)
        self.values: tuple[int, ...] = ()
        self.settled: dict[int, int] = {}
        self.steps = buckets.steps()
        self.sweep_at = _SWEEP_AT if rounds else 0
        self.fine = self._take(factors)

    @property
    def offset(self) -> int:
        """What is paid beside the tables."""
        return int(self.counters[buckets.OFFSET])

    @property
    def largest(self) -> int:
        """Rows of the largest table so far."""
        return int(self.counters[buckets.LARGEST])

    @property
    def exact(self) -> bool:
        """Whether no rows were lost."""
        return bool(self.counters[buckets.EXACT])

    def _take(self, factors: Sequence[Factor]) -> bool:
        """These tables from now on; False where nothing is within the budget."""
        flat = Prepared(factors, self.sizes)
        own = np.array(flat.order, dtype=np.int64)
        *self.tables, fine = buckets.unpack(
            len(self.sizes),
            self.counters,
            flat.values,
            flat.costs,
            flat.row_first,
            flat.value_first,
            own[flat.scope],
            flat.scope_first,
        )
        self.counts = self.sizes.copy()
        self.counts[own] = flat.left()
        return bool(fine) and self.offset <= self.budget

    def factors(self) -> list[Factor]:
        """The tables that are left."""
        scope, arity, values, costs = buckets.pack(*self.tables[:3])
        out, s, v, c = [], 0, 0, 0
        for width, length in zip(arity.tolist(), map(len, self.tables[2]), strict=True):
            if width:
                rows = values[v : v + width * length].reshape(length, width)
                out.append(Factor(tuple(scope[s : s + width].tolist()), rows, costs[c : c + length]))
            s, v, c = s + width, v + width * length, c + length
        return out

    def run(self) -> bool:
        """Eliminate everything, then read the values off in reverse; False where nothing is within the budget."""
        while self.fine:
            said = self._advance(truncate=True)
            if said == buckets.NOTHING:
                return False
            if said == buckets.DONE:
                self.values = _completed([0] * len(self.sizes), self.settled, self.steps)
                return True
            self.sweep_at *= _SWEEP_GROWTH
            self.fine = self._sweep()
        return False

    def condense(self) -> bool:
        """Eliminate what keeps tables small until no more does; False where nothing is within the budget."""
        while self.fine:
            done, rows = len(self.steps[0]), self._rows()
            if self._advance(truncate=False) == buckets.NOTHING or not self._sweep():
                return False
            if len(self.steps[0]) == done and self._rows() >= _STALLED * rows:
                return True
        return False

    def _advance(self, *, truncate: bool) -> int:
        barred = np.full(len(self.sizes), -1, dtype=np.int64)
        while True:
            if overdue(self.limits.deadline):
                raise OutOfTimeError
            said = int(
                buckets.advance(
                    *self.tables,
                    self.counters,
                    self.sizes,
                    self.counts,
                    self.ranks,
                    barred,
                    self.budget,
                    self.limits.rows,
                    truncate,
                    self.sweep_at if truncate else 0,
                    *self.steps,
                )
            )
            if said != buckets.PAUSE:
                return said

    def _rows(self) -> int:
        return sum(map(len, self.tables[2]))

    def _sweep(self) -> bool:
        """Move costs, settle variables; False where nothing is left within the budget."""
        swept = sweep(self.factors(), self.sizes.tolist(), self.budget - self.offset, self.rounds)
        if swept is None:
            return False
        self.counters[buckets.OFFSET] += swept.constant
        self.settled |= swept.settled
        return self._take(swept.factors)
