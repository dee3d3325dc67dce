"""Strategies beside the exact solver, scored by the same tables: what the solver's answer is compared with.

- ``rowmajor``: everything row-major; a conversion only where an op has no kernel for row-major;
- ``ideal``: each op takes its own cheapest layouts, relayouts wherever they differ;
- ``greedy``: in execution order, each op takes what is cheapest given what is decided, relayouts counted;
- ``activation``: the paper's activation-guided choice: primaries of the most reduced activations first, each for the
  ops around it, then what touches them (weights, gradients), then the rest;
- ``prefer``: primaries a caller asks for where they are possible (uniform R-Tile), else the first possible;
- ``random``: possible primaries by lot, for tests of correctness under mixed layouts.

``layoutopt/propagation.py`` and ``layoutopt/pbqp.py`` hold those of other compilers, ``layoutopt/peers.py`` what mobile
runtimes do to a graph whatever it costs.

All decide primaries one at a time inside what ``reduce.consistent`` leaves, which rules out most dead ends; one that is
met is an InfeasibleError, never a silent change of strategy.
"""

from __future__ import annotations

import random as _random
import time
from collections.abc import Callable, Sequence

from layoutopt.check import check
from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, OpNode, Problem
from layoutopt.reduce import consistent

__all__ = [
    "STRATEGIES",
    "Decisions",
    "activation",
    "decide",
    "greedy",
    "ideal",
    "prefer",
    "priced",
    "random",
    "rowmajor",
]

Key = Callable[[int, int, int], tuple[int, ...]]
"""Ranks a choice of op o by its own cost and its cost with the relayouts it adds; the same for ops that are alike."""


Situation = tuple[int, tuple[tuple[int | None, ...], ...]]
"""An op up to what it is called: which of several alike, and what is decided about its storages."""


_BARRED_NS = 1 << 60
"""Dearer than anything."""


class Decisions:
    """Decisions so far: a primary per storage (None while open), the copies made, the choices taken.

    Ops of repeated blocks meet the same question again and again, so answers are kept by ``situation``.
    """

    def __init__(self, problem: Problem) -> None:
        domain = consistent(problem)
        self.problem = problem
        self.open = domain.primaries
        self.allowed = tuple(
            sorted(left, key=lambda c, op=op: (op.choices[c].cost_ns, c))  # type: ignore[misc]
            for op, left in zip(problem.ops, domain.choices, strict=True)
        )
        self.primary: list[int | None] = [p[0] if len(p) == 1 else None for p in domain.primaries]
        self.copies: list[list[int]] = [[] for _ in problem.storages]
        self.choice = [-1] * len(problem.ops)
        self.around: list[list[int]] = [[] for _ in problem.storages]
        for o, op in enumerate(problem.ops):
            for s in dict.fromkeys(op.operands):
                self.around[s].append(o)
        self._alike = _alike(problem, self.open, self.allowed)
        self._served: dict[Situation, bool] = {}
        self._least: dict[Situation, int] = {}

    def situation(self, o: int) -> Situation:
        """Ops in equal situations have equal prices."""
        primary, copies = self.primary, self.copies
        return self._alike[o], tuple((primary[s], *copies[s]) for s in self.problem.ops[o].operands)

    def price(self, op: OpNode, picked: int) -> int | None:
        """Nanoseconds of a choice with the relayouts it adds; None where it contradicts what is decided."""
        choice = op.choices[picked]
        total, decided, made = choice.cost_ns, dict[int, int](), set[tuple[int, int]]()
        pairs = list(enumerate(zip(op.operands, choice.layouts, strict=True)))
        own = set(op.primary_operands)
        # Operands that must be primary first: they may settle a storage that the op also reads.
        for k, (s, layout) in pairs:
            if k in own:
                if (self.primary[s] if self.primary[s] is not None else decided.setdefault(s, layout)) != layout:
                    return None
                if layout not in self.open[s]:
                    return None
        for k, (s, layout) in pairs:
            if k in own or (s, layout) in made or layout in self.copies[s]:
                continue
            primary = self.primary[s]
            if primary is None and s not in decided and layout in self.open[s]:
                decided[s] = layout
            primary = primary if primary is not None else decided.get(s)
            extra = self._unsettled(s, layout) if primary is None else self.problem.conversion_ns(s, primary, layout)
            if extra is None:
                return None
            total += extra
            made.add((s, layout))
        return total

    def _unsettled(self, s: int, layout: int) -> int | None:
        """An open storage wanted in a layout that cannot be primary: the cheapest primary that converts to it."""
        prices = [self.problem.conversion_ns(s, a, layout) for a in self.open[s]]
        return min((p for p in prices if p is not None), default=None)

    def serves(self, s: int) -> bool:
        """Whether every op that touches a storage still has a choice."""
        return all(self._has_choice(o) for o in self.around[s])

    def _has_choice(self, o: int) -> bool:
        key = self.situation(o)
        if key not in self._served:
            op = self.problem.ops[o]
            self._served[key] = any(self.price(op, c) is not None for c in self.allowed[o])
        return self._served[key]

    def least_ns(self, o: int) -> int:
        """What op ``o`` takes at least under what is decided, with the relayouts it adds; ``_BARRED_NS``: nothing."""
        key = self.situation(o)
        if key not in self._least:
            op, best = self.problem.ops[o], _BARRED_NS
            for c in self.allowed[o]:
                if op.choices[c].cost_ns >= best:
                    break
                total = self.price(op, c)
                best = best if total is None else min(best, total)
            self._least[key] = best
        return self._least[key]

    def take(self, o: int, picked: int) -> None:
        """Settle op ``o``."""
        op = self.problem.ops[o]
        choice = op.choices[picked]
        self.choice[o] = picked
        own = set(op.primary_operands)
        pairs = sorted(enumerate(zip(op.operands, choice.layouts, strict=True)), key=lambda item: item[0] not in own)
        for _, (s, layout) in pairs:
            if self.primary[s] is None:
                if layout in self.open[s]:
                    self.primary[s] = layout
                else:
                    priced = [(self.problem.conversion_ns(s, a, layout), a) for a in self.open[s]]
                    self.primary[s] = min((p, a) for p, a in priced if p is not None)[1]
            if layout != self.primary[s] and layout not in self.copies[s]:
                self.copies[s].append(layout)

    def settle(self, key: Key) -> None:
        """Every op in execution order takes its least choice by ``key(op, choice's own cost, cost with relayouts)``.

        Choices come in order of their own cost, and the search stops where even a choice without relayouts could not
        win: ``key(o, own, own)`` must not fall as ``own`` grows, nor ``key(o, own, total)`` be less than that.
        """
        known: dict[Situation, int | None] = {}
        for o, op in enumerate(self.problem.ops):
            situation = self.situation(o)
            if situation not in known:
                known[situation] = self._first(o, key)
            picked = known[situation]
            if picked is None:
                names = tuple(dict.fromkeys(self.problem.storages[s].name for s in op.operands))
                raise InfeasibleError(
                    f"op {op.name} has no choice that agrees with the layouts decided before it for "
                    f"{', '.join(names)}; use the exact strategy (ilp)",
                    (op.name, *names),
                )
            self.take(o, picked)

    def _first(self, o: int, key: Key) -> int | None:
        """The least choice of op ``o`` by ``key``; None where none agrees with what is decided."""
        op = self.problem.ops[o]
        best: tuple[tuple[int, ...], int] | None = None
        for c in self.allowed[o]:
            own = op.choices[c].cost_ns
            if best is not None and key(o, own, own) > best[0]:
                break
            total = self.price(op, c)
            if total is not None:
                ranked = (key(o, own, total), c)
                best = ranked if best is None else min(best, ranked)
        return None if best is None else best[1]

    def assignment(self, method: str, started: float) -> Assignment:
        """The checked result; a storage no op touches takes its first possible primary."""
        primary = tuple(self.open[s][0] if p is None else p for s, p in enumerate(self.primary))
        copies = tuple(tuple(sorted(c)) for c in self.copies)
        cost = sum(op.choices[c].cost_ns for op, c in zip(self.problem.ops, self.choice, strict=True))
        cost += sum(self.problem.relayout_ns[s, primary[s], c] for s, made in enumerate(copies) for c in made)
        seconds = time.perf_counter() - started
        out = Assignment(primary, copies, tuple(self.choice), cost, "HEURISTIC", 0, seconds, method)
        check(self.problem, out)
        return out


def _alike(problem: Problem, open_: Sequence[Sequence[int]], allowed: Sequence[Sequence[int]]) -> list[int]:
    """Per op a number; equal where choices, ties, open primaries and relayouts are equal, operand by operand."""
    relayouts: list[list[tuple[int, int, int]]] = [[] for _ in problem.storages]
    for (s, a, b), cost_ns in problem.relayout_ns.items():
        relayouts[s].append((a, b, cost_ns))
    numbers: dict[object, int] = {}
    storage = [
        numbers.setdefault((tuple(left), *sorted(own)), len(numbers))
        for left, own in zip(open_, relayouts, strict=True)
    ]
    out = []
    for op, left in zip(problem.ops, allowed, strict=True):
        first = tuple(op.operands.index(s) for s in op.operands)
        # Repeated blocks share the choices tuple itself, so identity is a cheap and sufficient key.
        key = id(op.choices), tuple(left), op.inputs, op.pinned, first, tuple(storage[s] for s in op.operands)
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def _by_total(_: int, __: int, total: int) -> tuple[int, ...]:
    return (total,)


def _by_own(_: int, own: int, total: int) -> tuple[int, ...]:
    return (own, total)


def greedy(problem: Problem) -> Assignment:
    """In execution order, the choice that is cheapest with the relayouts it adds.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    return _in_order(problem, _by_total, "greedy")


def ideal(problem: Problem) -> Assignment:
    """Each op's own cheapest choice, whatever relayouts it takes.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    return _in_order(problem, _by_own, "ideal")


def _in_order(problem: Problem, key: Key, method: str) -> Assignment:
    started = time.perf_counter()
    state = Decisions(problem)
    state.settle(key)
    return state.assignment(method, started)


def rowmajor(problem: Problem) -> Assignment:
    """Uniform row-major: candidate 0 of every storage that can be primary in it.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    return prefer(problem, [0] * len(problem.storages), "rowmajor", stay=True)


def prefer(problem: Problem, wanted: Sequence[int], method: str = "prefer", stay: bool = True) -> Assignment:
    """The wanted primaries where they are possible, else the first possible.

    Args:
        problem: the tables.
        wanted: candidate index per storage.
        method: the name reported.
        stay: with True ops read primaries and relayouts are made only where no kernel reads them; with False ops may
            add relayouts that pay.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    started = time.perf_counter()
    state = Decisions(problem)
    for s, candidate in enumerate(wanted):
        if state.primary[s] is None:
            decide(state, s, (candidate, *state.open[s]))
    if stay:
        _settle_in_place(state)
    else:
        state.settle(_by_total)
    return state.assignment(method, started)


def _settle_in_place(state: Decisions) -> None:
    """As few relayouts as possible, then the cheapest."""
    state.settle(lambda _, own, total: (total - own > 0, total))


def decide(state: Decisions, s: int, order: Sequence[int]) -> None:
    """Fix a primary: the first in ``order`` with which every op around the storage still has a choice.

    Raises:
        InfeasibleError: none.
    """
    for candidate in order:
        if candidate not in state.open[s]:
            continue
        state.primary[s] = candidate
        if state.serves(s):
            return
    names = (state.problem.storages[s].name,)
    raise InfeasibleError(f"no primary of {names[0]} agrees with those decided before; use the exact strategy", names)


def priced(
    problem: Problem,
    primary: tuple[int, ...],
    choice: tuple[int, ...],
    method: str,
    status: str = "HEURISTIC",
    seconds: float = 0.0,
) -> Assignment:
    """The assignment of these primaries and choices, with the copies that the choices need, checked."""
    copies: list[set[int]] = [set() for _ in problem.storages]
    cost = 0
    for op, c in zip(problem.ops, choice, strict=True):
        cost += op.choices[c].cost_ns
        for s, layout in zip(op.operands, op.choices[c].layouts, strict=True):
            if layout != primary[s]:
                copies[s].add(layout)
    cost += sum(problem.relayout_ns[s, primary[s], b] for s, made in enumerate(copies) for b in made)
    ordered = tuple(tuple(sorted(made)) for made in copies)
    out = Assignment(primary, ordered, choice, cost, status, 0, seconds, method)
    check(problem, out)
    return out


def random(problem: Problem, seed: int) -> Assignment:
    """Possible primaries drawn by lot: a mixed plan, the same for the same seed.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    draw = _random.Random(seed)
    wanted = [draw.randrange(len(node.candidates)) for node in problem.storages]
    return prefer(problem, wanted, f"random:{seed}")


def activation(problem: Problem, guide: Sequence[int]) -> Assignment:
    """Activation-guided: primaries in order of ``guide``, then of distance from what it settled, each for its ops.

    Args:
        problem: the tables.
        guide: per storage the number of reductions (contractions) that an activation feeds; 0 for other storages.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    started = time.perf_counter()
    state = Decisions(problem)
    around = state.around
    seeds = sorted((s for s, weight in enumerate(guide) if weight), key=lambda s: (-guide[s], s))
    queue = seeds + [s for s in _outwards(problem, around, seeds) if not guide[s]]
    for s in queue:
        if state.primary[s] is not None:
            continue
        ranked = []
        for candidate in state.open[s]:
            state.primary[s] = candidate
            ranked.append((sum(state.least_ns(o) for o in around[s]), candidate))
        state.primary[s] = None
        decide(state, s, [c for _, c in sorted(ranked)])
    state.settle(_by_total)
    return state.assignment("activation", started)


def _outwards(problem: Problem, around: list[list[int]], seeds: list[int]) -> list[int]:
    """All storages breadth first from the seeds through shared ops, then any that none reaches."""
    seen = dict.fromkeys(seeds)
    frontier = list(seeds)
    while frontier:
        reached = [n for s in frontier for o in around[s] for n in problem.ops[o].operands]
        frontier = [n for n in dict.fromkeys(reached) if n not in seen]
        seen.update(dict.fromkeys(frontier))
    seen.update(dict.fromkeys(range(len(problem.storages))))
    return list(seen)


STRATEGIES: dict[str, Callable[[Problem], Assignment]] = {"rowmajor": rowmajor, "ideal": ideal, "greedy": greedy}
"""Strategies that need nothing but the tables."""
