"""Exact reductions of a layout assignment problem: what can be ruled out before a solver sees it.

Two, both keeping at least one optimal assignment:

- *consistency*: a primary that some op cannot write, or a choice that needs a layout nobody can make, is dropped, until
  nothing changes;
- *dominance*: a choice is dropped when another one that writes the same layouts is cheaper even after paying, for every
  input that it wants in a different layout, the dearest relayout that layout could need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from layoutopt.errors import InfeasibleError
from layoutopt.problem import Choice, OpNode, Problem

__all__ = ["NEVER", "Domain", "consistent", "dearest", "reduce", "tables", "undominated"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Domain:
    """What is left: primaries per storage and choice indices per op, ascending."""

    primaries: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[int, ...], ...]


def consistent(problem: Problem) -> Domain:
    """The consistency reduction alone.

    Raises:
        InfeasibleError: an op or a storage is left with nothing; ``conflict`` names it and its neighbours.
    """
    primaries = [{node.primary} if node.primary >= 0 else set(range(len(node.candidates))) for node in problem.storages]
    choices = [list(range(len(op.choices))) for op in problem.ops]
    known: dict[tuple[object, ...], list[int]] = {}
    changed = True
    while changed:
        changed = False
        reachable = _reachable(problem, primaries)
        for o, op in enumerate(problem.ops):
            own = set(op.primary_operands)
            usable = tuple(frozenset((primaries if k in own else reachable)[s]) for k, s in enumerate(op.operands))
            # Repeated blocks share the choices tuple itself, so identity is a cheap and sufficient key. Only what can
            # be used now matters: that never grows, so what was dropped before is dropped again.
            key = (id(op.choices), usable)
            if key not in known:
                known[key] = [
                    c
                    for c, choice in enumerate(op.choices)
                    if all(layout in able for layout, able in zip(choice.layouts, usable, strict=True))
                ]
            kept = known[key]
            if not kept:
                raise _nothing_left(problem, op, primaries)
            changed |= len(kept) < len(choices[o])
            choices[o] = kept
            for k in own:
                s = op.operands[k]
                written = {op.choices[c].layouts[k] for c in kept}
                if not primaries[s] <= written:
                    primaries[s] &= written
                    changed = True
                    if not primaries[s]:
                        raise _nothing_left(problem, op, primaries)
    return Domain(tuple(tuple(sorted(p)) for p in primaries), tuple(tuple(c) for c in choices))


def _reachable(problem: Problem, primaries: list[set[int]]) -> list[set[int]]:
    out = [set(p) for p in primaries]
    for s, a, b in problem.relayout_ns:
        if a in primaries[s]:
            out[s].add(b)
    return out


def _nothing_left(problem: Problem, op: OpNode, primaries: list[set[int]]) -> InfeasibleError:
    names = tuple(dict.fromkeys(problem.storages[s].name for s in op.operands))
    left = ", ".join(
        f"{problem.storages[s].name}: {sorted(primaries[s])} of {len(problem.storages[s].candidates)}"
        for s in dict.fromkeys(op.operands)
    )
    return InfeasibleError(
        f"op {op.name} has no usable choice among {len(op.choices)} (primaries still possible: {left}); "
        "give its storages more candidates or the op a kernel for row-major",
        (op.name, *names),
    )


def reduce(problem: Problem) -> Domain:
    """Consistency, then dominance.

    Raises:
        InfeasibleError: as ``consistent``.
    """
    domain = consistent(problem)
    most = dearest(problem, domain)
    memo: dict[tuple[object, ...], tuple[int, ...]] = {}
    kept = []
    for op, left in zip(problem.ops, domain.choices, strict=True):
        tied = set(op.primary_operands)
        prices = tuple(None if k in tied else most[s] for k, s in enumerate(op.operands))
        # Repeated blocks share the choices tuple itself, so identity is a cheap and sufficient key.
        key = (id(op.choices), left, prices)
        if key not in memo:
            memo[key] = undominated(op.choices, left, prices)
        kept.append(memo[key])
    return Domain(domain.primaries, tuple(kept))


def dearest(problem: Problem, domain: Domain) -> list[tuple[int | None, ...]]:
    """Per storage and candidate: the most that having it can cost, or None where some primary cannot give it."""
    out = []
    for s, node in enumerate(problem.storages):
        row: list[int | None] = []
        for b in range(len(node.candidates)):
            prices = [problem.conversion_ns(s, a, b) for a in domain.primaries[s]]
            known = [p for p in prices if p is not None]
            row.append(max(known) if len(known) == len(prices) else None)
        out.append(tuple(row))
    return out


def undominated(
    choices: tuple[Choice, ...], left: tuple[int, ...], prices: tuple[tuple[int | None, ...] | None, ...]
) -> tuple[int, ...]:
    """The choices in ``left`` that no other dominates; ``prices`` per operand as ``dearest``, None where tied."""
    order = tuple(sorted(left, key=lambda c: (choices[c].cost_ns, c)))
    kept = _undominated(*tables(choices, order, prices))
    return tuple(sorted(order[i] for i in np.flatnonzero(kept).tolist()))


NEVER = 1 << 60
"""More than any choice costs."""


def tables(
    choices: tuple[Choice, ...], left: tuple[int, ...], prices: tuple[tuple[int | None, ...] | None, ...]
) -> tuple[Ints, Ints, Ints]:
    """Choices for compiled loops: costs, layouts [choices, operands], prices [operands, candidates].

    Prices are ``NEVER`` where they are None; as many candidates as any storage of the operands has, or a choice uses.
    """
    costs = np.array([choices[c].cost_ns for c in left], dtype=np.int64)
    layouts = np.array([choices[c].layouts for c in left], dtype=np.int64).reshape(len(left), len(prices))
    width = max([int(layouts.max(initial=-1)) + 1, *(len(price or ()) for price in prices)])
    extra = np.full((len(prices), width), NEVER, dtype=np.int64)
    for k, price in enumerate(prices):
        for layout, cost_ns in enumerate(price or ()):
            extra[k, layout] = NEVER if cost_ns is None else cost_ns
    return costs, layouts, extra


@njit(cache=True)  # type: ignore[untyped-decorator]
def _undominated(costs: Ints, layouts: Ints, extra: Ints) -> NDArray[np.bool_]:
    """Choices in order of cost: which of them no earlier one replaces at no loss, paying ``extra`` per operand."""
    kept = np.ones(len(costs), dtype=np.bool_)
    for worse in range(len(costs)):
        for better in range(worse):
            if not kept[better]:
                continue
            cost = costs[better]
            for k in range(layouts.shape[1]):
                if layouts[better, k] != layouts[worse, k]:
                    cost += extra[k, layouts[better, k]]
                    if cost > costs[worse]:
                        break
            if cost <= costs[worse]:
                kept[worse] = False
                break
    return kept
