"""Parameters are updated while the backward pass still runs, where that makes a step need less memory.

As captured, every update stands at the end of the step, and every gradient lives until then. Updates may move up: to
where their gradients exist, every reader of the parameter (and of whatever else they write) has run, and enough of them
have gathered to be worth their launches, which a device shares among equal updates (``kernels/batch.py``). Order
changes, nothing else: results are the same bit by bit.

What it brings depends on where a step is fullest. Where that is at the loss, with all activations alive and no gradient
yet (large batches), nothing is gained and the updates stay; where gradients pile up beyond that (large models, few
tokens), they need not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from layoutopt.graph import Op, TrainingGraph
from layoutopt.memory import Buffer, live_bytes

__all__ = ["early_updates", "fullest", "peak_bytes", "with_groups"]

_GROUPS = (1, 2, 4, 8, 16, 32, 64)
_WORTH = 0.01
"""Part of a step's bytes that more groups of updates, hence more launches, must save."""


def early_updates(graph: TrainingGraph) -> TrainingGraph:
    """The graph with its updates moved up, in the fewest groups that need hardly more memory than the best would.

    Args:
        graph: views folded.

    Returns:
        A graph of the same ops in another order, or ``graph`` where that saves no memory worth the launches.
    """
    moves = _Moves(graph)
    orders = [list(graph.ops), *(moves.order(groups) for groups in _GROUPS)]
    peaks = [max(_alive_bytes(graph, order), default=0) for order in orders]
    good = min(peaks) + _WORTH * peaks[0]
    order = next(order for order, peak in zip(orders, peaks, strict=True) if peak <= good)
    return graph if order == orders[0] else graph.with_ops(order)


def peak_bytes(graph: TrainingGraph) -> int:
    """Bytes alive at the fullest op, every storage row-major and alone: what the order of ops costs in memory."""
    return max(_alive_bytes(graph, graph.ops), default=0)


def fullest(graph: TrainingGraph) -> tuple[int, int]:
    """The position of the op at which most bytes are alive, and how many."""
    alive = _alive_bytes(graph, graph.ops)
    peak = max(alive)
    return alive.index(peak), peak


def _alive_bytes(graph: TrainingGraph, ops: Sequence[Op]) -> list[int]:
    """By op, where the graph's ops run in this order."""
    alive: dict[str, list[int]] = {}
    storage_of = graph.storage_of
    for position, op in enumerate(ops):
        for operand in op.operands:
            alive.setdefault(storage_of[operand.tensor], [position, position])[1] = position
    last = len(ops) - 1
    kept = {graph.storage_of[name] for name in graph.outputs}
    buffers = []
    for name, span in alive.items():
        tensor = graph.tensors[name]
        stays = tensor.role in ("parameter", "state", "constant")
        first = 0 if stays or tensor.role == "input" else span[0]
        final = last if stays or name in kept else span[1]
        buffers.append(Buffer(name, tensor.size_elems * tensor.item_bytes, first, final))
    return live_bytes(buffers, len(ops))


def with_groups(graph: TrainingGraph, groups: int) -> TrainingGraph:
    """The graph with its updates moved up in about ``groups`` groups.

    Args:
        graph: views folded.
        groups: a group runs as soon as this part of the bytes that only updates free has gathered.
    """
    ops = _Moves(graph).order(groups)
    return graph if ops == list(graph.ops) else graph.with_ops(ops)


class _Moves:
    """Where the updates of a graph may go, and what each of them frees."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        updates = [op for op in graph.ops if op.phase == "update"]
        self.freed = _freed_bytes(graph, updates)
        self.number = {op.name: i for i, op in enumerate(updates)}
        self.ready: dict[int, list[Op]] = defaultdict(list)
        for op, position in zip(updates, _earliest(graph), strict=True):
            self.ready[position].append(op)

    def order(self, groups: int) -> list[Op]:
        """The ops with updates moved up in about ``groups`` groups."""
        limit = sum(self.freed.values()) / groups
        ops: list[Op] = []
        waiting: dict[str, Op] = {}
        gathered = 0

        def flush() -> None:
            nonlocal gathered
            ops.extend(sorted(waiting.values(), key=lambda op: self.number[op.name]))
            waiting.clear()
            gathered = 0

        for position, op in enumerate(self.graph.ops):
            for update in self.ready.get(position, ()):
                waiting[update.name] = update
                gathered += self.freed[update.name]
            if waiting and gathered >= limit:
                flush()
            if op.phase != "update":
                ops.append(op)
            elif op.name in waiting:
                flush()  # not later than it stood: what follows may read its results
        return ops


def _freed_bytes(graph: TrainingGraph, updates: Sequence[Op]) -> dict[str, int]:
    """By update, the bytes that nobody reads after it: a gradient counts once."""
    last_reader = {
        o.tensor: op.name
        for op in graph.ops
        for o in op.inputs
        if graph.tensors[o.tensor].role in ("activation", "gradient") and o.tensor not in graph.outputs
    }
    out = {op.name: 0 for op in updates}
    for tensor, op in last_reader.items():
        if op in out:
            out[op] += graph.tensors[tensor].size_elems * graph.tensors[tensor].item_bytes
    return out


def _earliest(graph: TrainingGraph) -> list[int]:
    """By update, in order, the position in ``graph.ops`` before which it can run at the earliest.

    It stays behind what writes a storage that it touches, and behind what reads one that it writes. Another update
    counts where it may have moved to: the order between them stays, since both wait for the same places to pass.
    """
    storage_of = graph.storage_of
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    out: list[int] = []
    for position, op in enumerate(graph.ops):
        reads = {storage_of[o.tensor] for o in op.inputs}
        writes = {storage_of[o.tensor] for o in op.outputs}
        behind = position + 1
        if op.phase == "update":
            places = [written.get(s, 0) for s in reads | writes] + [read.get(s, 0) for s in writes]
            behind = max(places, default=0)
            out.append(behind)
        for s in writes:
            written[s] = max(written.get(s, 0), behind)
        for s in reads:
            read[s] = max(read.get(s, 0), behind)
    return out
