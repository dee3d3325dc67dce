"""Tables that know each other brought together in groups, and the order in which elimination should meet these.

Blocks of a training step hang together by few storages each, and so do their tables: what two tables share of the
variables that they know tells whether they belong together. Elimination that goes from group to group, like one along a
path decomposition, keeps one table between what is done and what is to come; where rows are dropped because there are
too many, that is a beam search from one end of the network to the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from layoutopt.factors import Factor

__all__ = ["grouped", "ranks"]


def ranks(factors: Sequence[Factor], variables: int, most: int) -> list[int]:
    """Per variable, when it is due: with the last group that knows it, in the order of a path through the groups.

    Args:
        factors: the tables.
        variables: their number; those that no table knows are due at once.
        most: tables in a group.
    """
    scopes = [set(table.scope) for table in factors]
    known = [set().union(*(scopes[f] for f in group)) for group in grouped(scopes, most)]
    where: dict[int, list[int]] = {}
    for i, scope in enumerate(known):
        for v in sorted(scope):
            where.setdefault(v, []).append(i)
    position = {i: at for at, i in enumerate(_path(known, where))}
    out = [0] * variables
    for v, groups in where.items():
        out[v] = max(position[i] for i in groups)
    return out


def _path(known: Sequence[set[int]], where: dict[int, list[int]]) -> list[int]:
    """Groups in an order in which each is next to what was before it, from one that has few neighbours."""
    shared = [{v for v in scope if len(where[v]) > 1} for scope in known]
    near = [{j for v in scope for j in where[v]} - {i} for i, scope in enumerate(shared)]
    left, met, out = set(range(len(known))), dict[int, set[int]](), list[int]()
    while left:
        open_ = sorted(met.keys() & left) or sorted(left)
        best = min(open_, key=lambda i: (-len(met.get(i, ())) / max(len(shared[i]), 1), len(near[i]), i))
        out.append(best)
        left.discard(best)
        for j in near[best] & left:
            met.setdefault(j, set()).update(known[best] & known[j])
    return out


def grouped(known: Sequence[set[int]], most: int) -> list[list[int]]:
    """Neighbours brought together, those that share most of what they know first, up to ``most`` in a group."""
    scopes = [set(scope) for scope in known]
    members: list[list[int]] = [[i] for i in range(len(scopes))]
    around: dict[int, set[int]] = {}
    for i, scope in enumerate(scopes):
        for v in scope:
            around.setdefault(v, set()).add(i)
    heap: list[tuple[float, int, int, int, int]] = []
    version = [0] * len(scopes)

    def offer(i: int) -> None:
        near = {j for v in scopes[i] for j in around[v] if j != i}
        for j in sorted(near):
            if len(members[i]) + len(members[j]) <= most:
                share = len(scopes[i] & scopes[j]) / len(scopes[i] | scopes[j])
                a, b = (i, j) if i < j else (j, i)
                heapq.heappush(heap, (-share, a, b, version[a], version[b]))

    for i in range(len(scopes)):
        offer(i)
    while heap:
        _, i, j, vi, vj = heapq.heappop(heap)
        if version[i] != vi or version[j] != vj:
            continue
        for v in scopes[j]:
            around[v].discard(j)
            around[v].add(i)
        scopes[i] |= scopes[j]
        members[i] += members[j]
        members[j] = []
        version[i] += 1
        version[j] = -1
        offer(i)
    return [sorted(group) for group in members if group]
