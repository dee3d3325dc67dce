"""Copies that no assignment needs: relayouts that cost more than all who could read what they make would save.

A copy ``b`` of a storage whose primary is ``p`` saves something only to the ops that read it. What it saves one of them
is at most what the op's choices pay for reading ``p`` instead: for each choice that reads ``b`` the cheapest that reads
``p`` in its place, writes the same layouts, and pays the dearest relayout for every other input that it wants
otherwise. Where the savings of all readers together are less than the relayout, every assignment that makes the copy
has a cheaper one that does not, so the relayout is dropped. (Strictly cheaper: then dropping many of them, and
dominated choices with them, cannot go round in circles.)

Storages have as many states as subsets of copies, so what is dropped here shrinks the tables of the search more than
anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from layoutopt.problem import OpNode, Problem
from layoutopt.reduce import NEVER, Domain, consistent, dearest, tables

__all__ = ["without_idle_copies"]

Ints = NDArray[np.int64]
Gains = Mapping[tuple[int, int, int], int]
"""By an op's distinct storage (in the order of its operands), primary and copy: what reading the copy saves at most."""


def without_idle_copies(problem: Problem, domain: Domain) -> tuple[Problem, Domain]:
    """The problem without relayouts that never pay, and what is left of ``domain`` in it.

    Args:
        problem: the whole.
        domain: what is left of it; only its choices are looked at.

    Raises:
        InfeasibleError: nothing is left of a storage or an op; ``reduce.consistent`` says the same of the problem.
    """
    most = dearest(problem, domain)
    saved = dict.fromkeys(problem.relayout_ns, 0)
    memo: dict[tuple[object, ...], Gains] = {}
    for op, left in zip(problem.ops, domain.choices, strict=True):
        tied = set(op.primary_operands)
        prices = tuple(None if k in tied else most[s] for k, s in enumerate(op.operands))
        distinct = list(dict.fromkeys(op.operands))
        slots = tuple(distinct.index(s) for s in op.operands)
        # Repeated blocks share the choices tuple itself, so identity is a cheap and sufficient key.
        key = (id(op.choices), left, prices, slots)
        if key not in memo:
            memo[key] = _gains(op, left, prices, slots)
        for (place, p, b), gain in memo[key].items():
            relayout = distinct[place], p, b
            if relayout in saved:
                saved[relayout] = min(saved[relayout] + gain, NEVER)
    kept = {relayout: cost for relayout, cost in problem.relayout_ns.items() if cost <= saved[relayout]}
    lean = replace(problem, relayout_ns=kept)
    usable = consistent(lean)
    choices = (
        tuple(c for c in left if c in able) for left, able in zip(domain.choices, map(set, usable.choices), strict=True)
    )
    return lean, Domain(usable.primaries, tuple(choices))


def _gains(
    op: OpNode, left: tuple[int, ...], prices: tuple[tuple[int | None, ...] | None, ...], slots: tuple[int, ...]
) -> Gains:
    costs, layouts, extra = tables(op.choices, left, prices)
    loose = np.array([price is not None for price in prices], dtype=np.bool_)
    place = np.array(slots, dtype=np.int64)
    out: dict[tuple[int, int, int], int] = {}
    for g in range(max(slots, default=-1) + 1):
        gains = _saved(costs, layouts, extra, loose, place == g)
        out |= {(g, p, b): int(gains[p, b]) for p, b in zip(*np.nonzero(gains), strict=True)}
    return out


@njit(cache=True)  # type: ignore[untyped-decorator]
def _saved(costs: Ints, layouts: Ints, extra: Ints, loose: NDArray[np.bool_], mine: NDArray[np.bool_]) -> Ints:
    """[primary, copy]: what an op saves at most by reading the copy of one storage, whose operands are ``mine``."""
    count, operands = layouts.shape
    candidates = extra.shape[1]
    out = np.zeros((candidates, candidates), dtype=np.int64)
    least = np.empty(candidates, dtype=np.int64)
    for c in range(count):
        home = -1
        for k in range(operands):
            if mine[k] and not loose[k]:
                home = layouts[c, k]
        for b in range(candidates):
            reads = False
            for k in range(operands):
                reads |= mine[k] and loose[k] and layouts[c, k] == b
            if not reads or b == home:
                continue
            least[:] = NEVER
            for d in range(count):
                p = -1
                cost = costs[d]
                for k in range(operands):
                    old, new = layouts[c, k], layouts[d, k]
                    if mine[k] and loose[k] and old == b:
                        if new == b or (p >= 0 and new != p):
                            cost = NEVER
                        p = new
                    elif old != new:
                        cost = NEVER if mine[k] or not loose[k] else min(cost + extra[k, new], NEVER)
                    if cost >= NEVER:
                        break
                if cost < NEVER:
                    least[p] = min(least[p], cost)
            for p in range(candidates):
                if p != b and home in (-1, p):
                    out[p, b] = max(out[p, b], NEVER if least[p] == NEVER else least[p] - costs[c])
    return out
