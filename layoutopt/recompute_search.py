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
in time and memory is the frontier. Bytes are those of row-major tensors, updates run as early as they may: what a plan
needs is known when it is made, and ``layoutopt/budget.py`` goes on from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from layoutopt.blocks import find_blocks
from layoutopt.graph import Op, TrainingGraph
from layoutopt.pass_views import overwrites
from layoutopt.rewrite_anew import LATE, may_run_again, name_of
from layoutopt.rewrite_updates import with_groups

__all__ = ["Recomputation", "frontier", "thinned"]

_MOST_CLASSES = 24
"""Classes that are decided one by one; smaller ones are joined by their kind of op."""
_SKIPPED = (2, 3, 4)
_PARTS = (0.25, 0.5, 0.75)
_EAGER = 1 << 40
"""So many groups of updates: each runs as soon as it may."""


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


def frontier(
    graph: TrainingGraph, cost_ns: Mapping[str, int], sizes: Mapping[str, int] | None = None
) -> list[Recomputation]:
    """Choices that no other beats in both time and memory: from nothing made anew to the least memory found.

    Args:
        graph: that the rewrite will be applied to.
        cost_ns: of ops, by name; an op without a price is never run again.
        sizes: bytes of tensors by name, where they are stored otherwise than the graph says.
    """
    step = _Step(graph, cost_ns, sizes or {})
    found = _Found(step)
    classes = _classes(step)
    if classes:
        everything = frozenset(range(len(classes)))
        _drop(found, classes)
        anchors = _anchors(found, classes)
        for start in anchors:
            _keep(found, classes, everything - start)
        _skip_blocks(found, classes, anchors[0])
        _in_part(found)
    return found.frontier()


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


# ---- walking through a step -----------------------------------------------------------------------------------------


class _Step:
    """The step as numbers: what each op reads and writes, how many bytes that is, what the op costs.

    Attributes:
        droppable: positions of ops that may run again and whose results the backward pass reads.
        through: positions of ops that may run again and whose results only the forward pass reads.
        kept_bytes: by droppable position, the bytes of its results that are read late.
    """

    def __init__(self, graph: TrainingGraph, cost_ns: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self.graph = graph
        position = {op.name: at for at, op in graph.walk()}
        eager = with_groups(graph, _EAGER)
        self._order = [position[op.name] for op in eager.ops]
        self._late = [op.phase in LATE for op in graph.ops]
        self.cost_ns = [cost_ns.get(op.name, 0) for op in graph.ops]
        maker = {o.tensor: at for at, op in graph.walk() for o in op.outputs}
        storages = {name: i for i, name in enumerate(graph.storages)}
        again = {name: len(storages) + i for i, name in enumerate(maker)}
        self._bytes = np.zeros(len(storages) + len(again))
        for name, tensor in graph.tensors.items():
            size = sizes.get(name, tensor.size_elems * tensor.item_bytes)
            if name in storages:
                self._bytes[storages[name]] = size
            if name in again:
                self._bytes[again[name]] = size

        def key(name: str) -> tuple[int, int, int]:
            return storages[graph.storage_of[name]], maker.get(name, -1), again.get(name, -1)

        self._reads = [tuple(dict.fromkeys(key(o.tensor) for o in op.inputs)) for op in graph.ops]
        self._writes = [tuple(key(o.tensor) for o in op.outputs) for op in graph.ops]
        kept = {graph.storage_of[name] for name in graph.outputs}
        lasting = {n for n, s in graph.storages.items() if s.role in ("parameter", "state", "constant")}
        begun = {n for n, s in graph.storages.items() if s.role == "input"}
        touched = {graph.storage_of[o.tensor] for op in graph.ops for o in op.operands}
        self._from_start = [storages[n] for n in (lasting | begun) & touched]
        self._to_end = [storages[n] for n in (lasting | kept) & touched]
        gone = overwrites(graph)
        never = len(graph.ops)
        self._gone = [min((gone.get(o.tensor, never) for o in op.inputs), default=never) for op in graph.ops]
        free = [at for at in may_run_again(graph) if graph.ops[at].name in cost_ns]
        late_bytes = {at: self._late_bytes(graph.ops[at]) for at in free}
        self.droppable = [at for at in free if late_bytes[at]]
        self.through = frozenset(at for at in free if not late_bytes[at])
        self.kept_bytes = late_bytes

    def _late_bytes(self, op: Op) -> int:
        read = [o.tensor for o in op.outputs if any(r.phase in LATE for r in self.graph.consumers[o.tensor])]
        return sum(self.graph.tensors[t].size_elems * self.graph.tensors[t].item_bytes for t in read)

    def walk(self, dropped: Collection[int]) -> tuple[list[int], int]:
        """Which ops run again where these results are dropped, and the most bytes alive."""
        left = set(dropped) | self.through
        while True:
            ran, first, last, stuck = self._walk(left)
            if not stuck:
                break
            left -= stuck
        used = first >= 0
        alive = np.bincount(first[used], self._bytes[used], len(self._order) + len(ran) + 1)
        alive -= np.bincount(last[used] + 1, self._bytes[used], len(alive))
        return ran, int(np.cumsum(alive).max())

    def _walk(self, dropped: set[int]) -> tuple[list[int], np.ndarray, np.ndarray, set[int]]:
        first, last = [-1] * len(self._bytes), [0] * len(self._bytes)
        made = bytearray(len(self._order))
        ran: list[int] = []
        stuck: set[int] = set()
        now = 0
        for at in self._order:
            late = self._late[at]
            if late:
                for p in self._wanted(at, dropped, made):
                    made[p] = 1
                    ran.append(p)
                    if self._gone[p] < at:
                        stuck.add(p)
                    for key, maker, again in self._reads[p]:
                        last[again if maker >= 0 and made[maker] else key] = now
                    for _, _, again in self._writes[p]:
                        first[again] = last[again] = now
                    now += 1
            for key, maker, again in self._reads[at]:
                last[again if late and maker >= 0 and made[maker] else key] = now
            for key, _, _ in self._writes[at]:
                last[key] = now
                if first[key] < 0:
                    first[key] = now
            now += 1
        for key in self._from_start:
            first[key] = 0
        for key in self._to_end:
            last[key] = now - 1
        return ran, np.array(first), np.array(last), stuck

    def _wanted(self, at: int, dropped: set[int], made: bytearray) -> list[int]:
        """Ops that have to run again before an op of the backward pass, in order."""
        wanted: set[int] = set()
        pending = [at]
        while pending:
            for _, maker, _ in self._reads[pending.pop()]:
                if maker in dropped and not made[maker] and maker not in wanted:
                    wanted.add(maker)
                    pending.append(maker)
        return sorted(wanted)


# ---- choices --------------------------------------------------------------------------------------------------------

_Class = tuple[tuple[int, int], ...]
"""Ops that are decided alike: (position, number of the block)."""


def _classes(step: _Step) -> list[_Class]:
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

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.all: dict[frozenset[int], Recomputation] = {}
        self.judge(frozenset())

    def judge(self, dropped: frozenset[int]) -> Recomputation:
        """What a choice takes and needs; remembered."""
        if dropped not in self.all:
            ran, peak = self.step.walk(dropped)
            extra = sum(self.step.cost_ns[p] for p in ran)
            self.all[dropped] = Recomputation(name_of(ran) if ran else "", extra, peak)
        return self.all[dropped]

    def best(self) -> list[tuple[frozenset[int], Recomputation]]:
        """Non-dominated choices, the fastest first."""
        ranked = sorted(self.all.items(), key=lambda item: (item[1].extra_ns, item[1].peak_bytes, item[1].name))
        out: list[tuple[frozenset[int], Recomputation]] = []
        for dropped, choice in ranked:
            if not out or choice.peak_bytes < out[-1][1].peak_bytes:
                out.append((dropped, choice))
        return out

    def frontier(self) -> list[Recomputation]:
        return [choice for _, choice in self.best()]


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
