"""A layout assignment problem as tables for ``sweeps`` and ``treewidth``: states of storages, slots of ops.

A storage's *state* is its primary with the set of copies made of it; its cost is that of the relayouts. A *slot* is an
operand of an op; its value is the candidate that the op's choice uses there. Three sorts of tables say everything: the
cost of a storage's states; between a storage and each of its slots, which candidates a state offers (the primary alone
where the slot must be the primary); and per op its choices over its slots.

States are as many as subsets of copies, but a copy that no choice uses is never made, nor more copies than there are
slots to read them. Costs are in ``1 / SCALE`` nanoseconds, so that sweeps can split them finely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from layoutopt.factors import Factor
from layoutopt.problem import Assignment, Problem
from layoutopt.reduce import Domain

__all__ = ["SCALE", "Network", "TooManyStatesError", "network"]

SCALE = 1024
"""Parts of a nanosecond that costs are kept in."""

Ints = NDArray[np.int64]


class TooManyStatesError(Exception):
    """A storage has more states than allowed. Caught by the solver, which goes another way."""


State = tuple[int, tuple[int, ...], int]
"""Primary, copies, scaled cost of the relayouts."""


@dataclass(frozen=True)
class Network:
    """The tables of a problem and the way back.

    Attributes:
        factors: costs are scaled and less ``base``.
        sizes: values per variable; storages and slots in the order in which ops touch them.
        base: what the cheapest choices cost in all, scaled.
        storages: the variable of each storage that an op touches.
        slots: per op, the variables of its operands.
        states: per storage.
    """

    problem: Problem
    domain: Domain
    factors: tuple[Factor, ...]
    sizes: tuple[int, ...]
    base: int
    storages: dict[int, int]
    slots: tuple[tuple[int, ...], ...]
    states: dict[int, tuple[State, ...]]

    def primaries(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Per storage its primary under these values; one that no op touches takes its first."""
        states, variables = self.states, self.storages
        return tuple(
            states[s][values[variables[s]]][0] if s in variables else left[0]
            for s, left in enumerate(self.domain.primaries)
        )

    def values(self, found: Assignment) -> tuple[int, ...] | None:
        """The variables' values in an assignment, with the copies that its choices read; None where a state is gone."""
        read: dict[int, set[int]] = {}
        for op, c in zip(self.problem.ops, found.choice, strict=True):
            for s, layout in zip(op.operands, op.choices[c].layouts, strict=True):
                if layout != found.primary[s]:
                    read.setdefault(s, set()).add(layout)
        out = [0] * len(self.sizes)
        for s, variable in self.storages.items():
            wanted = found.primary[s], tuple(sorted(read.get(s, ())))
            at = next((i for i, (p, made, _) in enumerate(self.states[s]) if (p, made) == wanted), None)
            if at is None:
                return None
            out[variable] = at
        for op, c, slots in zip(self.problem.ops, found.choice, self.slots, strict=True):
            for v, layout in zip(slots, op.choices[c].layouts, strict=True):
                out[v] = layout
        return tuple(out)

    def choices(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Per op its cheapest choice that uses the candidates of its slots."""
        out = []
        for op, left, slots in zip(self.problem.ops, self.domain.choices, self.slots, strict=True):
            wanted = tuple(values[v] for v in slots)
            out.append(min((op.choices[c].cost_ns, c) for c in left if op.choices[c].layouts == wanted)[1])
        return tuple(out)


def network(problem: Problem, domain: Domain, budget_ns: int, most_states: int = 4096) -> Network:
    """The tables of what ``domain`` leaves of ``problem``.

    Args:
        problem: the whole.
        domain: what is left of it.
        budget_ns: states whose relayouts cost more are left out.
        most_states: of one storage.

    Raises:
        TooManyStatesError: a storage has more.
    """
    wanted: dict[int, set[int]] = {}
    readers: dict[int, int] = {}
    used: dict[tuple[int, tuple[int, ...]], list[set[int]]] = {}
    for op, left in zip(problem.ops, domain.choices, strict=True):
        # Repeated blocks share the choices tuple itself, so identity is a cheap and sufficient key.
        key = (id(op.choices), left)
        if key not in used:
            used[key] = [{op.choices[c].layouts[k] for c in left} for k in range(len(op.operands))]
        tied = set(op.primary_operands)
        for k, s in enumerate(op.operands):
            if k not in tied:
                wanted.setdefault(s, set()).update(used[key][k])
                readers[s] = readers.get(s, 0) + 1
    sizes: list[int] = []
    factors: list[Factor] = []
    variables: dict[int, int] = {}
    states: dict[int, tuple[State, ...]] = {}
    slots: list[tuple[int, ...]] = []
    links: dict[tuple[tuple[State, ...], bool], tuple[Ints, Ints]] = {}
    choices: dict[tuple[int, tuple[int, ...]], tuple[Ints, Ints, int]] = {}
    base = 0
    for op, left in zip(problem.ops, domain.choices, strict=True):
        for s in op.operands:
            if s not in variables:
                copies = sorted(wanted.get(s, ()))
                own = tuple(_states(problem, s, domain.primaries[s], copies, readers.get(s, 0), budget_ns, most_states))
                variables[s], states[s] = len(sizes), own
                sizes.append(len(own))
                rows = np.arange(len(own), dtype=np.int64)[:, None]
                factors.append(Factor((variables[s],), rows, np.array([c for _, _, c in own], dtype=np.int64)))
        slots.append(tuple(range(len(sizes), len(sizes) + len(op.operands))))
        tied = set(op.primary_operands)
        for k, (s, slot) in enumerate(zip(op.operands, slots[-1], strict=True)):
            sizes.append(len(problem.storages[s].candidates))
            link = (states[s], k in tied)
            if link not in links:
                links[link] = _link(*link)
            factors.append(Factor((variables[s], slot), *links[link]))
        key = (id(op.choices), left)
        if key not in choices:
            costs = np.array([op.choices[c].cost_ns for c in left], dtype=np.int64)
            rows = np.array([op.choices[c].layouts for c in left], dtype=np.int64)
            choices[key] = rows, (costs - costs.min()) * SCALE, int(costs.min()) * SCALE
        rows, costs, least = choices[key]
        factors.append(Factor(slots[-1], rows, costs))
        base += least
    return Network(problem, domain, tuple(factors), tuple(sizes), base, variables, tuple(slots), states)


def _states(
    problem: Problem, s: int, primaries: tuple[int, ...], wanted: list[int], readers: int, budget: int, most: int
) -> Iterator[State]:
    total = 0
    for p in primaries:
        prices = {b: problem.relayout_ns.get((s, p, b)) for b in wanted if b != p}
        able = {b: price for b, price in prices.items() if price is not None and price <= budget}
        total += sum(comb(len(able), n) for n in range(min(readers, len(able)) + 1))
        if total > most:
            raise TooManyStatesError(f"storage {problem.storages[s].name} has over {most} states")
        for n in range(min(readers, len(able)) + 1):
            for made in combinations(able, n):
                cost = sum(able[b] for b in made)
                if cost <= budget:
                    yield p, made, cost * SCALE


def _link(states: tuple[State, ...], tied: bool) -> tuple[Ints, Ints]:
    """Which candidates a slot may use in which states."""
    rows = [(i, x) for i, (p, made, _) in enumerate(states) for x in ((p,) if tied else (p, *made))]
    return np.array(rows, dtype=np.int64).reshape(-1, 2), np.zeros(len(rows), dtype=np.int64)
