"""Layouts by propagation and by vote: how two runtimes for phones choose, on the tables that the solver sees.

Both know no prices but what each op likes: an op *accepts* the choices that are at most a tenth dearer than its
cheapest, as a registry lists the layouts that a kernel takes. Primaries follow from that alone. In the end both let
every op take an accepted choice, where one is possible, with a conversion only where none agrees with the primaries,
whatever the conversion costs: that is what these runtimes do.

- ``bfs`` (ExecuTorch's Vulkan backend): from each value that has no layout yet, a breadth-first search over at most 64
  ops carries a layout on for as long as ops accept it, and counts the ops that do not: the *transitions*. The layout
  with fewest is taken, by everything that the search reached.
- ``majority`` (MNN): every op votes for the layouts of its cheapest choice, unless it accepts any; the layout with most
  votes is a value's. Where votes tie or nobody votes, a value follows the majority of its neighbours.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.strategies import Decisions, decide

__all__ = ["ACCEPTED", "SEARCH_OPS", "bfs", "majority"]

ACCEPTED = 1.1
"""An op accepts choices that cost at most so many times its cheapest."""
SEARCH_OPS = 64
"""Ops that a search visits at most, as in ExecuTorch."""


class _Likings:
    """What every op accepts, cheapest first."""

    def __init__(self, state: Decisions) -> None:
        self.state = state
        self.most_ns = []
        self.accepted: list[tuple[Choice, ...]] = []
        for op, allowed in zip(state.problem.ops, state.allowed, strict=True):
            most = ACCEPTED * op.choices[allowed[0]].cost_ns
            self.most_ns.append(most)
            self.accepted.append(tuple(op.choices[c] for c in allowed if op.choices[c].cost_ns <= most))

    def take_all(self) -> None:
        """Every op an accepted choice where it can, without conversions where it can, then the cheapest."""
        self.state.settle(lambda o, own, total: (own > self.most_ns[o], total > own, own, total))


def bfs(problem: Problem) -> Assignment:
    """Bounded breadth-first propagation that minimises layout transitions, as in ExecuTorch.

    Of layouts with equally few transitions the first candidate is taken.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    started = time.perf_counter()
    state = Decisions(problem)
    likings = _Likings(state)
    for s in _as_touched(problem):
        if state.primary[s] is not None:
            continue
        found = {candidate: _spread(state, likings, s, candidate) for candidate in state.open[s]}
        ranked = sorted(found, key=lambda candidate: (found[candidate][0], candidate))
        decide(state, s, ranked)
        settled = state.primary[s]
        assert settled is not None, "decide settles or raises"
        for other, layout in found[settled][1].items():
            if state.primary[other] is None:
                state.primary[other] = layout
                if not state.serves(other):
                    state.primary[other] = None
    likings.take_all()
    return state.assignment("bfs", started)


def _spread(state: Decisions, likings: _Likings, start: int, layout: int) -> tuple[int, dict[int, int]]:
    """Transitions, and what the search reaches in which layout, when ``start`` has ``layout``."""
    known = {start: layout}
    seen: set[int] = set()
    transitions = 0
    queue = deque([start])
    while queue:
        for o in state.around[queue.popleft()]:
            if o in seen:
                continue
            if len(seen) == SEARCH_OPS:
                return transitions, known
            seen.add(o)
            operands = state.problem.ops[o].operands
            agreed = _agreed(state, operands, likings.accepted[o], known)
            if agreed is None:
                transitions += 1
                continue
            reached = {s: x for s, x in zip(operands, agreed.layouts, strict=True) if state.primary[s] is None}
            queue.extend(s for s in reached if s not in known)
            known.update(reached)
    return transitions, known


def _agreed(
    state: Decisions, operands: tuple[int, ...], accepted: tuple[Choice, ...], known: Mapping[int, int]
) -> Choice | None:
    """The cheapest accepted choice without a transition: over layouts that are decided, reached, or still possible."""
    decided = [known.get(s) if state.primary[s] is None else state.primary[s] for s in operands]
    for choice in accepted:
        own = dict[int, int]()
        for s, layout, has in zip(operands, choice.layouts, decided, strict=True):
            if layout != (own.setdefault(s, layout) if has is None else has) or layout not in state.open[s]:
                break
        else:
            return choice
    return None


def majority(problem: Problem) -> Assignment:
    """A vote on every value, as in MNN.

    Raises:
        InfeasibleError: no assignment, or a dead end.
    """
    started = time.perf_counter()
    state = Decisions(problem)
    likings = _Likings(state)
    votes = _votes(state, likings)
    for s in _as_touched(problem):
        if state.primary[s] is None:
            like = _like_neighbours(state, s)
            ranked = sorted(state.open[s], key=lambda x: (-votes[s][x], -like[x], x))
            decide(state, s, ranked)
    likings.take_all()
    return state.assignment("majority", started)


def _votes(state: Decisions, likings: _Likings) -> list[Counter[int]]:
    """Per storage, how many ops want each layout; those that accept any do not vote."""
    out: list[Counter[int]] = [Counter() for _ in state.problem.storages]
    for op, accepted in zip(state.problem.ops, likings.accepted, strict=True):
        for s in dict.fromkeys(op.operands):
            positions = [k for k, operand in enumerate(op.operands) if operand == s]
            taken = {choice.layouts[k] for choice in accepted for k in positions}
            if not taken >= set(state.open[s]):
                out[s].update({accepted[0].layouts[k] for k in positions})
    return out


def _like_neighbours(state: Decisions, s: int) -> Counter[int]:
    """Per layout of a storage, how many decided storages that share an op with it have the same."""
    index = {layout: x for x, layout in enumerate(state.problem.storages[s].candidates)}
    out: Counter[int] = Counter()
    for o in state.around[s]:
        for other in dict.fromkeys(state.problem.ops[o].operands):
            settled = state.primary[other]
            if other != s and settled is not None:
                same = index.get(state.problem.storages[other].candidates[settled])
                out.update([] if same is None else [same])
    return out


def _as_touched(problem: Problem) -> Iterator[int]:
    """Storages in the order in which ops touch them, what an op writes before what it reads."""
    seen = dict.fromkeys(s for op in problem.ops for s in _writes_first(op))
    seen.update(dict.fromkeys(range(len(problem.storages))))
    return iter(seen)


def _writes_first(op: OpNode) -> tuple[int, ...]:
    return (*op.operands[op.inputs :], *op.operands[: op.inputs])
