"""Bucket elimination, compiled: the loops of ``treewidth``.

A table is a scope (int64 [variables]), rows (int64 [rows, variables]) and costs (int64 [rows]); tables are numbered and
kept in lists, those that were eliminated empty. Lists hold arrays of any length, which is what numba's typed lists are
for. ``advance`` works until it is done, until something is for the caller to do, or until it has looked at so many rows
that the caller may want to look at the clock.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numba import njit, types
from numba.typed import List
from numpy.typing import NDArray

__all__ = [
    "DONE",
    "EXACT",
    "LARGEST",
    "NOTHING",
    "OFFSET",
    "PAUSE",
    "SWEEP",
    "advance",
    "pack",
    "read_back",
    "steps",
    "unpack",
]

Ints = NDArray[np.int64]
Lists = Any
"""numba's typed list of arrays."""
_VECTOR, _MATRIX, _SMALL_VECTOR, _SMALL_MATRIX = (
    types.int64[::1],
    types.int64[:, ::1],
    types.int32[::1],
    types.int32[:, ::1],
)

DONE, PAUSE, SWEEP, NOTHING = 0, 1, 2, 3
"""What ``advance`` returns: no variable is left to eliminate; to be called again; costs should be swept first; no
assignment is within the budget."""

OFFSET, LARGEST, EXACT = 0, 1, 2
"""Entries of the counters: what is paid beside the tables, rows of the largest so far, 0 once rows were lost."""

_KEY_LIMIT = 1 << 62
_HOPELESS = 2.0**60
"""Estimates beyond this are all the same."""
_ATTEMPTED = 64
"""Estimates are of the worst case: tables are joined up to so many times the rows allowed, to see."""
_WORK = 1 << 20
"""Rows looked at between two looks at the clock."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add(
    scopes: Lists, rows: Lists, costs: Lists, around: Lists, counters: Ints, scope: Ints, own: Ints, paid: Ints
) -> bool:
    """Take in a table, its least cost moved to the offset; False where it has no rows."""
    if not len(paid):
        return False
    least = paid.min()
    counters[OFFSET] += least
    counters[LARGEST] = max(counters[LARGEST], len(paid))
    if not len(scope):
        return True
    number = np.array([len(scopes)])
    scopes.append(scope)
    rows.append(own)
    costs.append(paid - least)
    for v in scope:
        around[v] = np.concatenate((around[v], number))
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def unpack(
    variables: int,
    counters: Ints,
    values: Ints,
    paid: Ints,
    row_first: Ints,
    value_first: Ints,
    scope: Ints,
    first: Ints,
) -> tuple[Lists, Lists, Lists, Lists, bool]:
    """Tables that lie end to end as lists: scopes, rows, costs, per variable the tables that know it.

    Last, whether every table has a row.
    """
    scopes, rows = List.empty_list(_VECTOR), List.empty_list(_MATRIX)
    costs, around = List.empty_list(_VECTOR), List.empty_list(_VECTOR)
    for _ in range(variables):
        around.append(np.empty(0, dtype=np.int64))
    fine = True
    for f in range(len(first) - 1):
        own = scope[first[f] : first[f + 1]]
        count = row_first[f + 1] - row_first[f]
        table = values[value_first[f] : value_first[f + 1]].copy().reshape((count, len(own)))
        fine &= _add(scopes, rows, costs, around, counters, own.copy(), table, paid[row_first[f] : row_first[f + 1]])
    return scopes, rows, costs, around, fine


@njit(cache=True)  # type: ignore[untyped-decorator]
def steps() -> tuple[Lists, Lists, Lists, Lists]:
    """No eliminations yet: variables, the scopes of their tables, rows, the best value of each row."""
    return (
        List.empty_list(types.int64),
        List.empty_list(_VECTOR),
        List.empty_list(_SMALL_MATRIX),
        List.empty_list(_SMALL_VECTOR),
    )


@njit(cache=True)  # type: ignore[untyped-decorator]
def pack(scopes: Lists, rows: Lists, costs: Lists) -> tuple[Ints, Ints, Ints, Ints]:
    """Tables that are left, end to end: scopes, arities, rows, costs."""
    arity = np.array([len(scope) for scope in scopes])
    count = np.array([len(own) for own in costs])
    scope = np.empty(arity.sum(), dtype=np.int64)
    values = np.empty((arity * count).sum(), dtype=np.int64)
    paid = np.empty(count.sum(), dtype=np.int64)
    s = v = c = 0
    for f in range(len(scopes)):
        scope[s : s + arity[f]] = scopes[f]
        values[v : v + arity[f] * count[f]] = rows[f].reshape(arity[f] * count[f])
        paid[c : c + count[f]] = costs[f]
        s, v, c = s + arity[f], v + arity[f] * count[f], c + count[f]
    return scope, arity, values, paid


@njit(cache=True)  # type: ignore[untyped-decorator]
def read_back(variables: Lists, scopes: Lists, rows: Lists, values: Lists, out: Ints) -> None:
    """Fill in what was eliminated, last first: the best value for the row that the values of the scope make."""
    for step in range(len(variables) - 1, -1, -1):
        scope, table = scopes[step], rows[step]
        for i in range(len(table)):
            same = True
            for k in range(len(scope)):
                same &= table[i, k] == out[scope[k]]
            if same:
                out[variables[step]] = values[step][i]
                break


@njit(cache=True)  # type: ignore[untyped-decorator]
def _keys(rows: Ints, columns: Ints, others: Ints, other_columns: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """A number per row of two tables, equal for rows that agree in the columns."""
    count = len(rows)
    key = np.zeros(count + len(others), dtype=np.int64)
    reach = 1
    for k in range(len(columns)):
        if reach * float(sizes[k]) >= _KEY_LIMIT:
            order = np.argsort(key, kind="mergesort")
            dense = np.zeros(len(key), dtype=np.int64)
            for at in range(1, len(order)):
                dense[order[at]] = dense[order[at - 1]] + (key[order[at]] != key[order[at - 1]])
            key = dense
            reach = len(key)
        reach *= sizes[k]
        for i in range(count):
            key[i] = key[i] * sizes[k] + rows[i, columns[k]]
        for i in range(len(others)):
            key[count + i] = key[count + i] * sizes[k] + others[i, other_columns[k]]
    return key[:count], key[count:]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _pairs(
    left: Ints, left_costs: Ints, right: Ints, right_costs: Ints, budget: int, most: int, truncate: bool
) -> tuple[Ints, Ints, bool]:
    """Indices of pairs with equal keys that cost no more than the budget together, and whether these are all.

    Where there are more than ``most`` pairs it is those of the cheapest on the left, or none without ``truncate``.
    """
    # Partners sorted by cost, so that the pairs within the budget are a run: nothing else is ever built.
    by_cost = np.argsort(right_costs, kind="mergesort")
    order = by_cost[np.argsort(right[by_cost], kind="mergesort")]
    keys, costs = right[order], right_costs[order]
    low = np.searchsorted(keys, left, side="left")
    high = np.searchsorted(keys, left, side="right")
    total = 0
    for i in range(len(left)):
        high[i] = low[i] + np.searchsorted(costs[low[i] : high[i]], budget - left_costs[i], side="right")
        total += high[i] - low[i]
    complete = total <= most
    if not complete:
        total = 0
        full = not truncate
        for i in np.argsort(left_costs, kind="mergesort"):
            # The first stays whatever it has.
            full |= total > 0 and total + high[i] - low[i] >= most
            if full:
                high[i] = low[i]
            total += high[i] - low[i]
    first, second = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    at = 0
    for i in range(len(left)):
        for j in range(low[i], high[i]):
            first[at], second[at] = i, order[j]
            at += 1
    return first, second, complete


@njit(cache=True)  # type: ignore[untyped-decorator]
def _join(
    scope: Ints,
    rows: Ints,
    costs: Ints,
    other: Ints,
    others: Ints,
    paid: Ints,
    sizes: Ints,
    budget: int,
    most: int,
    truncate: bool,
) -> tuple[Ints, Ints, Ints, bool]:
    """Two tables as one: pairs of rows that agree where the scopes meet, within the budget, and whether all of them."""
    ours, theirs, new = np.empty(len(other), dtype=np.int64), np.empty(len(other), dtype=np.int64), other.copy()
    shared = fresh = 0
    for k in range(len(other)):
        at = -1
        for j in range(len(scope)):
            if scope[j] == other[k]:
                at = j
        if at >= 0:
            ours[shared], theirs[shared] = at, k
            shared += 1
        else:
            new[fresh] = k
            fresh += 1
    ours, theirs, new = ours[:shared], theirs[:shared], new[:fresh]
    left, right = _keys(rows, ours, others, theirs, sizes[scope[ours]])
    first, second, complete = _pairs(left, costs, right, paid, budget, most, truncate)
    width = len(scope)
    joined = np.empty((len(first), width + fresh), dtype=np.int64)
    total = np.empty(len(first), dtype=np.int64)
    for i in range(len(first)):
        for k in range(width):
            joined[i, k] = rows[first[i], k]
        for k in range(fresh):
            joined[i, width + k] = others[second[i], new[k]]
        total[i] = costs[first[i]] + paid[second[i]]
    return np.concatenate((scope, other[new])), joined, total, complete


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best(keys: Ints, costs: Ints, values: Ints, budget: int) -> Ints:
    """Per key its cheapest row within the budget, in order of the keys; of equally cheap ones that of least value."""
    order = np.argsort(keys, kind="mergesort")
    out = np.empty(len(keys), dtype=np.int64)
    count = 0
    best = -1
    for at in range(len(order)):
        i = order[at]
        if best >= 0 and keys[order[at - 1]] != keys[i]:
            out[count] = best
            count += 1
            best = -1
        if costs[i] <= budget and (
            best < 0 or costs[i] < costs[best] or (costs[i] == costs[best] and values[i] < values[best])
        ):
            best = i
    if best >= 0:
        out[count] = best
        count += 1
    return out[:count]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _estimate(v: int, scopes: Lists, costs: Lists, around: Lists, counts: Ints, mark: Ints) -> float:
    """Rows of the table that eliminating ``v`` would make, at most, and never more than ``_HOPELESS``."""
    by_rows = by_values = 1.0
    mark[-1] += 1
    for f in around[v]:
        by_rows = min(by_rows * len(costs[f]), _HOPELESS)
        for u in scopes[f]:
            if mark[u] != mark[-1]:
                mark[u] = mark[-1]
                by_values = min(by_values * counts[u], _HOPELESS)
    return min(by_rows, by_values)


@njit(cache=True)  # type: ignore[untyped-decorator]
def advance(
    scopes: Lists,
    rows: Lists,
    costs: Lists,
    around: Lists,
    counters: Ints,
    sizes: Ints,
    counts: Ints,
    ranks: Ints,
    barred: Ints,
    budget: int,
    most: int,
    truncate: bool,
    sweep_at: int,
    step_variables: Lists,
    step_scopes: Lists,
    step_rows: Lists,
    step_values: Lists,
) -> int:
    """Eliminate variables: that of least rank first, of those the one that makes the smallest table.

    Args:
        scopes: with ``rows``, ``costs`` and ``around`` the tables; updated.
        rows: of every table.
        costs: of every table.
        around: per variable the tables that know it.
        counters: updated.
        sizes: values per variable.
        counts: of them, those that are left.
        ranks: per variable.
        barred: per variable the number of tables there were when its elimination last failed; updated.
        budget: offset included.
        most: rows of a table. With ``truncate`` the cheapest are kept; without, larger ones are not made.
        truncate: eliminate all.
        sweep_at: estimated rows from which costs should be swept first; 0 for never.
        step_variables: with the next three what was done; appended to.
        step_scopes: what else was in the table.
        step_rows: its rows without the variable.
        step_values: the variable's best value in each.
    """
    mark = np.zeros(len(sizes) + 1, dtype=np.int64)
    heap = [(0, 0.0, 0)]
    heap.clear()
    for v in range(len(sizes)):
        if len(around[v]):
            heap.append((ranks[v], _estimate(v, scopes, costs, around, counts, mark), v))
    heapq.heapify(heap)
    work = 0
    while len(heap):
        rank, estimate, v = heapq.heappop(heap)
        if not len(around[v]) or barred[v] == around[v].max():
            continue
        now = _estimate(v, scopes, costs, around, counts, mark)
        if now != estimate:
            heapq.heappush(heap, (rank, now, v))
            continue
        if 0 < sweep_at < now:
            return SWEEP
        if not truncate and now > _ATTEMPTED * most:
            return DONE
        if work > _WORK:
            return PAUSE
        ids = around[v]
        length = np.array([len(costs[f]) for f in ids])
        ids = ids[np.argsort(length, kind="mergesort")]
        old = 0
        for f in ids:
            old += len(costs[f]) * len(scopes[f])
        room = most if truncate else max(old, most)
        scope, table, paid, complete = scopes[ids[0]], rows[ids[0]], costs[ids[0]], True
        for f in ids[1:]:
            scope, table, paid, complete = _join(
                scope, table, paid, scopes[f], rows[f], costs[f], sizes, budget - counters[OFFSET], room, truncate
            )
            work += len(paid) + len(costs[f])
            if not complete:
                if not truncate:
                    break
                counters[EXACT] = 0
        if not complete and not truncate:
            barred[v] = around[v].max()
            continue
        rest = np.flatnonzero(scope != v)
        keys, _ = _keys(table, rest, table[:0], rest, sizes[scope[rest]])
        own = table[:, np.flatnonzero(scope == v)[0]]
        kept = _best(keys, paid, own, budget - counters[OFFSET])
        if not truncate and len(kept) > most and len(kept) * len(rest) > old:
            barred[v] = around[v].max()
            continue
        left = np.empty((len(kept), len(rest)), dtype=np.int64)
        for i in range(len(kept)):
            for k in range(len(rest)):
                left[i, k] = table[kept[i], rest[k]]
        for f in ids:
            for u in scopes[f]:
                around[u] = around[u][around[u] != f]
            scopes[f], rows[f], costs[f] = scopes[f][:0], rows[f][:0], costs[f][:0]
        step_variables.append(v)
        step_scopes.append(scope[rest])
        step_rows.append(left.astype(np.int32))
        step_values.append(own[kept].astype(np.int32))
        if not _add(scopes, rows, costs, around, counters, scope[rest], left, paid[kept]) or counters[OFFSET] > budget:
            return NOTHING
        for u in scope[rest]:
            if len(around[u]):
                heapq.heappush(heap, (ranks[u], _estimate(u, scopes, costs, around, counts, mark), u))
    return DONE
