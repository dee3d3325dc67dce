"""A step as numbers, walked through once: what runs again where results are dropped, and what is alive when.

Results of the forward pass are kept, or dropped and made anew just before their first late reader, as
``layoutopt/rewrite_anew.py`` does it. Updates run as early as they may. Moments of the walk are those of all ops, those
that run again among them; at a moment what the op reads and what it writes are alive together. *Between* moments an op
may write over what it reads, and only what was made before and is read later counts: no arena can do with less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from layoutopt.graph import Op, TrainingGraph
from layoutopt.pass_views import overwrites
from layoutopt.rewrite_anew import LATE, may_run_again
from layoutopt.rewrite_updates import with_groups

__all__ = ["Moment", "Step", "Walk"]

_EAGER = 1 << 40
"""So many groups of updates: each runs as soon as it may."""

Moment = tuple[int, int]
"""An op by its turn, and the position of the op that runs again just before it; -1: of none, the op itself."""


@dataclass(frozen=True)
class Walk:
    """A walk where some results are dropped.

    Attributes:
        ran: positions of ops that ran again, in order.
        peak_bytes: the most that was alive.
        fullest: when.
        as_wanted: nothing had to be kept because what it is made from was gone.
    """

    ran: list[int]
    peak_bytes: int
    fullest: Moment
    as_wanted: bool


class Step:
    """The step as numbers: what each op reads and writes, how many bytes that is, what the op costs.

    Attributes:
        droppable: positions of ops that may run again and whose results the backward pass reads.
        through: positions of ops that may run again and whose results only the forward pass reads.
        kept_bytes: by droppable position, the bytes of its results that are read late.
        order: positions of all ops, as they run.
        late: by position, whether the op is of the backward pass or an update.
        reads: by position, of each tensor read the storage, the op that makes it (or -1) and the storage of what that
            makes anew (or -1); storages are numbers here.
        writes: likewise.
        gone: by position, the position of the op that first overwrites what the op reads.
        sizes: bytes by storage.
        from_start: storages that are there before the first op.
        to_end: storages that stay.
    """

    def __init__(self, graph: TrainingGraph, cost_ns: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self.graph = graph
        position = {op.name: at for at, op in graph.walk()}
        eager = with_groups(graph, _EAGER)
        self.order = [position[op.name] for op in eager.ops]
        self.late = [op.phase in LATE for op in graph.ops]
        self.cost_ns = [cost_ns.get(op.name, 0) for op in graph.ops]
        maker = {o.tensor: at for at, op in graph.walk() for o in op.outputs}
        storages = {name: i for i, name in enumerate(graph.storages)}
        again = {name: len(storages) + i for i, name in enumerate(maker)}
        self.sizes = np.zeros(len(storages) + len(again))
        for name, tensor in graph.tensors.items():
            size = sizes.get(name, tensor.size_elems * tensor.item_bytes)
            if name in storages:
                self.sizes[storages[name]] = size
            if name in again:
                self.sizes[again[name]] = size

        def key(name: str) -> tuple[int, int, int]:
            return storages[graph.storage_of[name]], maker.get(name, -1), again.get(name, -1)

        self.reads = [tuple(dict.fromkeys(key(o.tensor) for o in op.inputs)) for op in graph.ops]
        self.writes = [tuple(key(o.tensor) for o in op.outputs) for op in graph.ops]
        kept = {graph.storage_of[name] for name in graph.outputs}
        lasting = {n for n, s in graph.storages.items() if s.role in ("parameter", "state", "constant")}
        begun = {n for n, s in graph.storages.items() if s.role == "input"}
        touched = {graph.storage_of[o.tensor] for op in graph.ops for o in op.operands}
        self.from_start = [storages[n] for n in (lasting | begun) & touched]
        self.to_end = [storages[n] for n in (lasting | kept) & touched]
        gone = overwrites(graph)
        never = len(graph.ops)
        self.gone = [min((gone.get(o.tensor, never) for o in op.inputs), default=never) for op in graph.ops]
        free = [at for at in may_run_again(graph) if graph.ops[at].name in cost_ns]
        late_bytes = {at: self._late_bytes(graph.ops[at]) for at in free}
        self.droppable = [at for at in free if late_bytes[at]]
        self.through = frozenset(at for at in free if not late_bytes[at])
        self.kept_bytes = late_bytes

    def _late_bytes(self, op: Op) -> int:
        read = [o.tensor for o in op.outputs if any(r.phase in LATE for r in self.graph.consumers[o.tensor])]
        return sum(self.graph.tensors[t].size_elems * self.graph.tensors[t].item_bytes for t in read)

    def walk(self, dropped: Collection[int], between: bool = False) -> Walk:
        """What happens where the results of these ops are dropped.

        Args:
            dropped: positions.
            between: look at what is alive between moments, before each of them, rather than at them.
        """
        left = set(dropped) | self.through
        as_wanted = True
        while True:
            ran, first, last, stuck, moments = self._walk(left)
            if not stuck:
                break
            left -= stuck
            as_wanted = False
        used = first >= 0
        begins = first[used] + 1 if between else first[used]
        alive = np.bincount(begins, self.sizes[used], len(moments) + 2)
        alive -= np.bincount(last[used] + 1, self.sizes[used], len(alive))
        total = np.cumsum(alive)[: len(moments)]
        at = int(total.argmax()) if len(moments) else 0
        peak = int(total[at]) if len(moments) else 0
        return Walk(ran, peak, moments[at] if moments else (0, -1), as_wanted)

    def _walk(self, dropped: set[int]) -> tuple[list[int], np.ndarray, np.ndarray, set[int], list[Moment]]:
        first, last = [-1] * len(self.sizes), [0] * len(self.sizes)
        made = bytearray(len(self.order))
        ran: list[int] = []
        stuck: set[int] = set()
        moments: list[Moment] = []
        now = 0
        for turn, at in enumerate(self.order):
            late = self.late[at]
            if late:
                for p in self._wanted(at, dropped, made):
                    made[p] = 1
                    ran.append(p)
                    moments.append((turn, p))
                    if self.gone[p] < at:
                        stuck.add(p)
                    for key, maker, again in self.reads[p]:
                        last[again if maker >= 0 and made[maker] else key] = now
                    for _, _, again in self.writes[p]:
                        first[again] = last[again] = now
                    now += 1
            for key, maker, again in self.reads[at]:
                last[again if late and maker >= 0 and made[maker] else key] = now
            for key, _, _ in self.writes[at]:
                last[key] = now
                if first[key] < 0:
                    first[key] = now
            moments.append((turn, -1))
            now += 1
        for key in self.from_start:
            first[key] = 0
        for key in self.to_end:
            last[key] = now - 1
        return ran, np.array(first), np.array(last), stuck, moments

    def _wanted(self, at: int, dropped: set[int], made: bytearray) -> list[int]:
        """Ops that have to run again before an op of the backward pass, in order."""
        wanted: set[int] = set()
        pending = [at]
        while pending:
            for _, maker, _ in self.reads[pending.pop()]:
                if maker in dropped and not made[maker] and maker not in wanted:
                    wanted.add(maker)
                    pending.append(maker)
        return sorted(wanted)
