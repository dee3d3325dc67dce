"""What to calculate twice, so that less is kept from the forward to the backward pass: time against memory.

Each result of the forward pass that the backward pass reads is either kept or dropped. What is dropped is made anew
just before its first late reader, from what is kept, by the ops that led to it (``layoutopt/rewrite_anew.py``); the
price is the time of these ops, the gain is what the fullest op of the step no longer has to hold. A choice is judged
by walking through the step once: which ops run again and where, when each tensor is alive, the most bytes alive. So
what a choice keeps alive for making something anew counts, and so do results made anew while others still live.

Repeated blocks are decided alike: an op and its likes in the other blocks are one *class*. Choices are found from both
ends, greedily by bytes per nanosecond:

- *dropping*, from everything kept: the class whose dropping lowers the peak most for its time goes next;
- *keeping*, from whole blocks made anew: of each block one class alone is kept (the one that gives the lowest peak: a
  block's input, or its like), or of every second, third, fourth block; what saves most time for its bytes returns.

Each choice may also be made in the first blocks only, the rest taking the next cheaper one. What no other choice beats
in time and memory is the frontier: it says quickly what there is over the whole range of memory, and proves nothing.
For one budget, ``layoutopt/recompute_exact.py`` finds the least time, from the best of these. Bytes are those of
row-major tensors, updates run as early as they may: what a plan needs is known when it is made, and
``layoutopt/budget.py`` goes on from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from layoutopt.blocks import find_blocks
from layoutopt.graph import TrainingGraph
from layoutopt.recompute_exact import least_extra
from layoutopt.recompute_step import Step
from layoutopt.rewrite_anew import name_of

__all__ = ["MOST_PROVEN", "Choices", "Recomputation", "frontier", "thinned"]

_MOST_CLASSES = 24
"""Classes that are decided one by one; smaller ones are joined by their kind of op."""
_SKIPPED = (2, 3, 4)
_PARTS = (0.25, 0.5, 0.75)
MOST_PROVEN = 200
"""Of more results than these the greedy search alone chooses."""
_EXACT_S = 20.0
"""For the least time within a budget; a second is the rule, and nodes of the search end it before."""


@dataclass(frozen=True)
class Recomputation:
    """A choice of what is made anew.

    Attributes:
        name: of the rewrite that does it; empty where nothing is made anew.
        extra_ns: what the ops take that run again.
        peak_bytes: alive at the fullest op, tensors row-major.
    """

    name: str
    extra_ns: int
    peak_bytes: int


class Choices:
    """What a step may make anew: the greedy search's frontier, and the best choice within a budget.

    Args:
        graph: that the rewrite will be applied to.
        cost_ns: of ops, by name; an op without a price is never run again.
        sizes: bytes of tensors by name, where they are stored otherwise than the graph says.
    """

    def __init__(
        self, graph: TrainingGraph, cost_ns: Mapping[str, int], sizes: Mapping[str, int] | None = None
    ) -> None:
        self.step = Step(graph, cost_ns, sizes or {})
        self._found = _Found(self.step)
        self._searched = False

    def frontier(self) -> list[Recomputation]:
        """Choices that no other beats in both time and memory: from nothing made anew to the least memory found."""
        if not self._searched:
            self._search()
            self._searched = True
        return [choice for _, choice in self._found.best()]

    def within(self, budget_bytes: int) -> Recomputation | None:
        """The least time within a budget: proven nearly always, else the best that is known; None where nothing fits.

        It becomes part of the frontier. Of more than ``MOST_PROVEN`` results it is the greedy search's best.
        """
        self.frontier()
        fitting = [pair for pair in self._found.best() if pair[1].peak_bytes <= budget_bytes]
        known = fitting[0] if fitting else None
        if len(self.step.droppable) <= MOST_PROVEN:
            least = least_extra(self.step, budget_bytes, known[0] if known else None, time_limit_s=_EXACT_S)
            if least.dropped is not None:
                return self._found.judge(least.dropped)
        return known[1] if known else None

    def _search(self) -> None:
        found, classes = self._found, _classes(self.step)
        if not classes:
            return
        everything = frozenset(range(len(classes)))
        _drop(found, classes)
        anchors = _anchors(found, classes)
        for start in anchors:
            _keep(found, classes, everything - start)
        _skip_blocks(found, classes, anchors[0])
        _in_part(found)


def frontier(
    graph: TrainingGraph, cost_ns: Mapping[str, int], sizes: Mapping[str, int] | None = None
) -> list[Recomputation]:
    """The frontier of ``Choices`` of these."""
    return Choices(graph, cost_ns, sizes).frontier()


def thinned(choices: Sequence[Recomputation], most: int) -> list[Recomputation]:
    """At most so many of a frontier, both ends among them, spread over its range of memory.

    Args:
        choices: as ``frontier`` gives them.
        most: at least 2.
    """
    if len(choices) <= most:
        return list(choices)
    high, low = choices[0].peak_bytes, choices[-1].peak_bytes
    marks = [high - (high - low) * i / (most - 1) for i in range(most)]
    nearest = [min(choices, key=lambda c: (abs(c.peak_bytes - mark), c.extra_ns)) for mark in marks]
    return list(dict.fromkeys([choices[0], *nearest, choices[-1]]))


# ---- choices --------------------------------------------------------------------------------------------------------

_Class = tuple[tuple[int, int], ...]
"""Ops that are decided alike: (position, number of the block)."""


def _classes(step: Step) -> list[_Class]:
    """What may be dropped, the largest first."""
    place: dict[int, tuple[object, int]] = {}
    for block in find_blocks(step.graph):
        for at in range(block.start, block.stop):
            repetition, offset = divmod(at - block.start, block.length)
            place[at] = (block.start, offset), repetition
    groups: dict[object, list[tuple[int, int]]] = {}
    for at in step.droppable:
        like, repetition = place.get(at, (at, 0))
        groups.setdefault(like, []).append((at, repetition))
    ranked = sorted(groups.values(), key=lambda g: (-sum(step.kept_bytes[at] for at, _ in g), g))
    rest: dict[str, list[tuple[int, int]]] = {}
    for group in ranked[_MOST_CLASSES:]:
        rest.setdefault(step.graph.ops[group[0][0]].kind, []).extend(group)
    return [tuple(group) for group in (*ranked[:_MOST_CLASSES], *rest.values())]


class _Found:
    """Every choice that was judged, by the ops that it drops."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.all: dict[frozenset[int], Recomputation] = {}
        self.judge(frozenset())

    def judge(self, dropped: frozenset[int]) -> Recomputation:
        """What a choice takes and needs; remembered."""
        if dropped not in self.all:
            walk = self.step.walk(dropped)
            extra = sum(self.step.cost_ns[p] for p in walk.ran)
            self.all[dropped] = Recomputation(name_of(walk.ran) if walk.ran else "", extra, walk.peak_bytes)
        return self.all[dropped]

    def best(self) -> list[tuple[frozenset[int], Recomputation]]:
        """Non-dominated choices, the fastest first."""
        ranked = sorted(self.all.items(), key=lambda item: (item[1].extra_ns, item[1].peak_bytes, item[1].name))
        out: list[tuple[frozenset[int], Recomputation]] = []
        for dropped, choice in ranked:
            if not out or choice.peak_bytes < out[-1][1].peak_bytes:
                out.append((dropped, choice))
        return out


def _positions(classes: Sequence[_Class], chosen: Iterable[int]) -> frozenset[int]:
    return frozenset(at for i in chosen for at, _ in classes[i])


def _drop(found: _Found, classes: Sequence[_Class]) -> None:
    """From everything kept: one class after the other, by what it saves for its time, until the peak stays."""
    dropped: frozenset[int] = frozenset()
    now = found.judge(frozenset())
    while True:
        tried = []
        for i in range(len(classes)):
            if i not in dropped:
                then = found.judge(_positions(classes, dropped | {i}))
                saved = now.peak_bytes - then.peak_bytes
                if saved > 0:
                    tried.append((saved / max(then.extra_ns - now.extra_ns, 1), -i, then))
        if not tried:
            return
        _, i, now = max(tried, key=lambda t: t[:2])
        dropped |= {-i}


def _anchors(found: _Found, classes: Sequence[_Class]) -> list[frozenset[int]]:
    """Classes that alone are kept: the one, and the two, with which a step needs least."""
    everything = frozenset(range(len(classes)))

    def least(kept: Iterable[frozenset[int]]) -> frozenset[int]:
        return min(
            kept,
            key=lambda k: (
                (c := found.judge(_positions(classes, everything - k))).peak_bytes,
                c.extra_ns,
                sorted(k),
            ),
        )

    one = least(frozenset((i,)) for i in everything)
    two = least(one | {i} for i in everything)
    return [one, two] if one != two else [one]


def _keep(found: _Found, classes: Sequence[_Class], dropped: frozenset[int]) -> None:
    """From most things made anew: one class after the other is kept again, by the time that it saves for its bytes."""
    now = found.judge(_positions(classes, dropped))
    while dropped:
        tried = []
        for i in sorted(dropped):
            then = found.judge(_positions(classes, dropped - {i}))
            saved, more = now.extra_ns - then.extra_ns, then.peak_bytes - now.peak_bytes
            tried.append((more <= 0 and saved >= 0, saved / max(more, 1), -i, then))
        _, _, i, now = max(tried, key=lambda t: t[:3])
        dropped -= {-i}


def _skip_blocks(found: _Found, classes: Sequence[_Class], one: frozenset[int]) -> None:
    """With anchors in every second, third, … block only: longer stretches are made anew, from less that is kept."""
    rest = _positions(classes, frozenset(range(len(classes))) - one)
    for every in _SKIPPED:
        skipped = {at for i in one for at, repetition in classes[i] if repetition % every}
        found.judge(rest | skipped)
    found.judge(rest | _positions(classes, one))


def _in_part(found: _Found) -> None:
    """Each choice of the frontier in the first part of the ops that it drops, the next cheaper one in the rest."""
    best = found.best()
    for (lighter, _), (heavier, _) in pairwise(best):
        places = sorted(heavier | lighter)
        for part in _PARTS:
            border = places[int(len(places) * part)]
            found.judge(frozenset(p for p in heavier if p < border) | frozenset(p for p in lighter if p >= border))
    for dropped, _ in best:
        places = sorted(dropped)
        for part in _PARTS:
            found.judge(frozenset(places[: int(len(places) * part)]))
