"""Costs moved between tables so that their least costs become a bound: sequential reweighted message passing.

Visited in order, a variable collects from every table that knows it the least cost of each of its values, adds its own,
and gives the sum back in equal shares to the tables that reach variables still to come. What is least over all its
values is moved to a constant: every assignment pays it. Nothing is lost or made up on the way, costs stay integers of
zero or more, and the constant only grows. (Kolmogorov, A new look at reweighted message passing, 2015; in the words of
constraint programming, soft arc consistency.) Values and rows that cost more than is left of a budget are dropped, and
variables with one value left are settled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from layoutopt.factors import Factor
from layoutopt.interrupts import overdue

__all__ = ["Prepared", "Swept", "sweep"]

Ints = NDArray[np.int64]

DEAD = 1 << 60
"""Cost of what is dropped."""

_STALLED = 1e-3
"""Rounds end early where one raises the constant by less than this share of what is left of the budget."""


@dataclass(frozen=True)
class Swept:
    """The same problem after its costs were moved.

    Attributes:
        constant: what every assignment pays beside the tables.
        factors: tables over the variables that are not settled; none is without rows.
        settled: the value of variables that have but one left.
        alive: per variable that some table knew, which of its values are left.
    """

    constant: int
    factors: list[Factor]
    settled: dict[int, int]
    alive: dict[int, NDArray[np.bool_]]


def sweep(
    factors: Sequence[Factor] | Prepared,
    sizes: Sequence[int],
    budget: int,
    rounds: int,
    deadline: float = float("inf"),
    only: NDArray[np.bool_] | None = None,
) -> Swept | None:
    """Move costs about; drop what cannot be part of an assignment within the budget.

    Args:
        factors: tables without negative costs, or prepared; variables are visited in the order of their numbers.
        sizes: values per variable.
        budget: assignments that cost more may be lost.
        rounds: passes in each direction at most.
        deadline: by ``time.perf_counter``; no further round begins after it.
        only: the rows to look at, of all tables end to end; all by default.

    Returns:
        A constant and tables that together cost the same as before for every assignment within the budget, or None
        where there is none.
    """
    flat = factors if isinstance(factors, Prepared) else Prepared(factors, sizes)
    if not flat.order:
        constant = sum(int(table.costs.min(initial=DEAD)) for table in flat.factors)
        return Swept(constant, [], {}, {}) if constant <= budget else None
    work = _Work(flat)
    if only is not None:
        work.costs[~only] = DEAD
    constant = work.run(budget, rounds, deadline)
    return None if constant < 0 else work.result(constant, budget)


class Prepared:
    """Tables end to end in a few arrays, variables by rank: worth keeping where they are swept more than once.

    Args:
        factors: tables without negative costs.
        sizes: values per variable.
    """

    def __init__(self, factors: Sequence[Factor], sizes: Sequence[int] | Ints) -> None:
        self.factors = factors
        self.order = order = sorted({v for table in factors for v in table.scope})
        rank = {v: i for i, v in enumerate(order)}
        self.scope = np.array([rank[v] for table in factors for v in table.scope], dtype=np.int64)
        self.arity = np.array([len(table.scope) for table in factors], dtype=np.int64)
        rows = np.array([len(table.costs) for table in factors], dtype=np.int64)
        self.row_first = _starts(rows)
        self.value_first = _starts(rows * self.arity)
        self.scope_first = _starts(self.arity)
        nothing = np.empty(0, dtype=np.int64)
        self.values = np.concatenate([nothing, *(table.rows.ravel() for table in factors)])
        self.costs = np.concatenate([nothing, *(table.costs for table in factors)])
        self.size = np.array([sizes[v] for v in order], dtype=np.int64)
        self.unary_first = _starts(self.size)
        owner = np.repeat(np.arange(len(factors)), self.arity)
        column = np.arange(len(self.scope)) - np.repeat(self.scope_first[:-1], self.arity)
        by_variable = np.argsort(self.scope, kind="stable")
        self.around_first = np.searchsorted(self.scope[by_variable], np.arange(len(order) + 1))
        self.around = np.stack([owner[by_variable], column[by_variable]], axis=1)
        self.low = np.full(len(factors), len(order), dtype=np.int64)
        np.minimum.at(self.low, owner, self.scope)
        self.high = np.full(len(factors), -1, dtype=np.int64)
        np.maximum.at(self.high, owner, self.scope)

    def near(self, values: Sequence[int], share: int) -> NDArray[np.bool_]:
        """Which rows, of all tables end to end, cost at most ``share`` or are those that all variables' values pick."""
        own = np.array(values, dtype=np.int64)[np.array(self.order, dtype=np.int64)]
        return _near(
            self.values, self.costs, self.row_first, self.value_first, self.scope, self.scope_first, own, share
        )

    def left(self) -> Ints:
        """How many values each variable of ``order`` has at most, by the tables that know it."""
        if not self.order:
            return self.size
        return _left(self.values, self.row_first, self.value_first, self.arity, self.scope, self.scope_first, self.size)


class _Work:
    """The costs of prepared tables, on the move."""

    def __init__(self, flat: Prepared) -> None:
        self.flat = flat
        self.costs = flat.costs.copy()
        self.unary = np.zeros(int(flat.unary_first[-1]), dtype=np.int64)

    def run(self, budget: int, rounds: int, deadline: float) -> int:
        """The constant, or -1 where nothing is left within the budget."""
        constant = 0
        for _ in range(rounds):
            before = constant
            for forward in (True, False):
                if constant >= 0:
                    constant = self._pass(forward, constant, budget)
            if overdue(deadline) or constant < 0 or constant - before <= _STALLED * (budget - constant):
                break
        return constant

    def _pass(self, forward: bool, constant: int, budget: int) -> int:
        flat = self.flat
        return _pass(
            forward,
            constant,
            budget,
            self.unary,
            self.costs,
            flat.values,
            flat.row_first,
            flat.value_first,
            flat.arity,
            flat.size,
            flat.unary_first,
            flat.around_first,
            flat.around,
            flat.low,
            flat.high,
        )

    def result(self, constant: int, budget: int) -> Swept | None:
        """Tables again, without what is dead and without settled variables."""
        flat, left = self.flat, budget - constant
        alive = self.unary <= left
        counts = np.add.reduceat(alive.astype(np.int64), flat.unary_first[:-1])
        if (counts == 0).any():
            return None
        own = [slice(a, b) for a, b in itertools.pairwise(flat.unary_first.tolist())]
        masks = {v: alive[mine] for v, mine in zip(flat.order, own, strict=True)}
        settled = {flat.order[i]: int(masks[flat.order[i]].argmax()) for i in np.flatnonzero(counts == 1).tolist()}
        kept = _fold(
            self.unary,
            alive,
            self.costs,
            flat.values,
            flat.row_first,
            flat.value_first,
            flat.arity,
            flat.scope,
            flat.scope_first,
            flat.unary_first,
        )
        kept &= self.costs <= left
        out = []
        bounds = flat.row_first.tolist()
        for table, low, high in zip(flat.factors, bounds, bounds[1:], strict=False):
            mine = kept[low:high]
            costs = self.costs[low:high][mine]
            if not len(costs):
                return None
            columns = [k for k, v in enumerate(table.scope) if v not in settled]
            if columns:
                rows = table.rows[mine]
                whole = len(columns) == len(table.scope)
                scope = table.scope if whole else tuple(table.scope[k] for k in columns)
                out.append(Factor(scope, rows if whole else rows[:, columns], costs))
            else:
                constant += int(costs.min())
        return Swept(constant, out, settled, masks) if constant <= budget else None


def _starts(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _near(
    values: Ints,
    costs: Ints,
    row_first: Ints,
    value_first: Ints,
    scope: Ints,
    scope_first: Ints,
    own: Ints,
    share: int,
) -> NDArray[np.bool_]:
    out = costs <= share
    for f in range(len(row_first) - 1):
        mine = scope[scope_first[f] : scope_first[f + 1]]
        at = value_first[f]
        for i in range(row_first[f], row_first[f + 1]):
            same = True
            for k in range(len(mine)):
                same &= values[at + k] == own[mine[k]]
            out[i] |= same
            at += len(mine)
    return out


@njit(cache=True)  # type: ignore[untyped-decorator]
def _left(
    values: Ints, row_first: Ints, value_first: Ints, arity: Ints, scope: Ints, scope_first: Ints, size: Ints
) -> Ints:
    out = size.copy()
    seen = np.full(size.max(), -1, dtype=np.int64)
    for f in range(len(arity)):
        for k in range(arity[f]):
            v = scope[scope_first[f] + k]
            count = 0
            for i in range(row_first[f], row_first[f + 1]):
                x = values[value_first[f] + (i - row_first[f]) * arity[f] + k]
                if seen[x] != scope_first[f] + k:
                    seen[x] = scope_first[f] + k
                    count += 1
            out[v] = min(out[v], count)
    return out


@njit(cache=True)  # type: ignore[untyped-decorator]
def _pass(
    forward: bool,
    constant: int,
    budget: int,
    unary: Ints,
    costs: Ints,
    values: Ints,
    row_first: Ints,
    value_first: Ints,
    arity: Ints,
    size: Ints,
    unary_first: Ints,
    around_first: Ints,
    around: Ints,
    low: Ints,
    high: Ints,
) -> int:
    """One pass over all variables, in place; the new constant, or -1 where nothing is left within the budget."""
    count = len(size)
    least = np.empty(size.max(), dtype=np.int64)
    for step in range(count):
        v = step if forward else count - 1 - step
        own = unary[unary_first[v] : unary_first[v + 1]]
        ahead = 0
        behind = 0
        for a in range(around_first[v], around_first[v + 1]):
            f = around[a, 0]
            later = high[f] > v
            sooner = low[f] < v
            ahead += later if forward else sooner
            behind += sooner if forward else later
            for x in range(size[v]):
                least[x] = DEAD
            at = value_first[f] + around[a, 1]
            for i in range(row_first[f], row_first[f + 1]):
                x = values[at]
                at += arity[f]
                if costs[i] < least[x]:
                    least[x] = costs[i]
            at = value_first[f] + around[a, 1]
            for i in range(row_first[f], row_first[f + 1]):
                if costs[i] < DEAD:
                    costs[i] -= least[values[at]]
                at += arity[f]
            for x in range(size[v]):
                if own[x] >= DEAD or least[x] >= DEAD:
                    own[x] = DEAD
                else:
                    own[x] += least[x]
        smallest = own.min()
        if smallest >= DEAD or constant + smallest > budget:
            return -1
        constant += smallest
        share = max(ahead, behind, 1)
        for x in range(size[v]):
            if own[x] < DEAD:
                own[x] -= smallest
            if own[x] > budget - constant:
                own[x] = DEAD
            least[x] = own[x] // share if own[x] < DEAD else DEAD
            if own[x] < DEAD:
                own[x] -= ahead * least[x]
        for a in range(around_first[v], around_first[v + 1]):
            f = around[a, 0]
            if not (high[f] > v if forward else low[f] < v):
                continue
            at = value_first[f] + around[a, 1]
            for i in range(row_first[f], row_first[f + 1]):
                x = values[at]
                at += arity[f]
                if least[x] >= DEAD:
                    costs[i] = DEAD
                elif costs[i] < DEAD:
                    costs[i] += least[x]
                    if costs[i] > budget - constant:
                        costs[i] = DEAD
    return constant


@njit(cache=True)  # type: ignore[untyped-decorator]
def _fold(
    unary: Ints,
    alive: NDArray[np.bool_],
    costs: Ints,
    values: Ints,
    row_first: Ints,
    value_first: Ints,
    arity: Ints,
    scope: Ints,
    scope_first: Ints,
    unary_first: Ints,
) -> NDArray[np.bool_]:
    """Which rows have living values only; every variable's own costs go to the first table that knows it."""
    kept = np.ones(len(costs), dtype=np.bool_)
    paid = np.zeros(len(unary_first) - 1, dtype=np.bool_)
    for f in range(len(arity)):
        for k in range(arity[f]):
            v = scope[scope_first[f] + k]
            at = value_first[f] + k
            for i in range(row_first[f], row_first[f + 1]):
                x = unary_first[v] + values[at]
                at += arity[f]
                if not alive[x]:
                    kept[i] = False
                elif not paid[v] and kept[i]:
                    costs[i] += unary[x]
            paid[v] = True
    return kept
