"""Repeated blocks: a transformer's layers are the same ops over and over, and a step shows it.

Two ops are alike when their kind, phase, attributes and the shapes, types and views of their operands are equal; names
do not count. A block is a run of ops that is followed by its like.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from layoutopt.graph import Op, TrainingGraph

__all__ = ["Block", "describe_blocks", "find_blocks", "spec_ids"]

SHORTEST_OPS = 4
"""Repetitions of fewer ops in all are not worth a name."""


@dataclass(frozen=True)
class Block:
    """``repeats`` times the same ``length`` ops, from position ``start`` on."""

    start: int
    length: int
    repeats: int

    @property
    def stop(self) -> int:
        """The position after the last repetition."""
        return self.start + self.length * self.repeats


_IDS: WeakKeyDictionary[TrainingGraph, np.ndarray] = WeakKeyDictionary()


def spec_ids(graph: TrainingGraph) -> np.ndarray:
    """A number per op, equal for ops that are alike; not to be written to."""
    if graph not in _IDS:
        known: dict[object, int] = {}
        _IDS[graph] = np.array([known.setdefault(_spec(graph, op), len(known)) for op in graph.ops], np.int64)
        _IDS[graph].flags.writeable = False
    return _IDS[graph]


def _spec(graph: TrainingGraph, op: Op) -> object:
    operands = tuple((graph.tensors[o.tensor].shape, graph.tensors[o.tensor].dtype, o.view) for o in op.operands)
    attrs = tuple(sorted((k, repr(v)) for k, v in op.attrs.items()))
    return op.kind, op.phase, attrs, len(op.inputs), operands, op.inplace


def find_blocks(graph: TrainingGraph) -> tuple[Block, ...]:
    """Blocks in order; they do not overlap. At each place the repetition that covers most ops is taken, the shortest of
    those.
    """
    ids = spec_ids(graph)
    covered, period = _longest_repetitions(ids)
    blocks, at = [], 0
    while at < len(ids):
        if covered[at] >= SHORTEST_OPS:
            blocks.append(Block(at, int(period[at]), int(covered[at] // period[at])))
            at = blocks[-1].stop
        else:
            at += 1
    return tuple(blocks)


def _longest_repetitions(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per position: how many ops the widest repetition that starts there covers (0: none), and its period."""
    n = len(ids)
    covered, period = np.zeros(n, np.int64), np.ones(n, np.int64)
    places = np.arange(n)
    for p in range(1, n // 2 + 1):
        same = ids[:-p] == ids[p:]
        # How far the match runs on: to the next place where it breaks.
        breaks = np.where(same, n, places[: n - p])
        run = np.minimum(np.minimum.accumulate(breaks[::-1])[::-1], n - p) - places[: n - p]
        whole = np.where(run >= p, (run // p + 1) * p, 0)
        better = whole > covered[: n - p]
        covered[: n - p][better], period[: n - p][better] = whole[better], p
    return covered, period


def describe_blocks(graph: TrainingGraph, most: int = 6) -> str:
    """For people, the ``most`` largest: ``forward 24 x 31 ops, backward 24 x 60 ops, 57 others``."""
    sizable = [b for b in find_blocks(graph) if b.length > 1]
    shown = sorted(sorted(sizable, key=lambda b: b.start - b.stop)[:most], key=lambda b: b.start)
    words = [f"{graph.ops[b.start].phase} {b.repeats} x {b.length} ops" for b in shown]
    return ", ".join([*words, f"{len(graph.ops) - sum(b.stop - b.start for b in shown)} others"])
