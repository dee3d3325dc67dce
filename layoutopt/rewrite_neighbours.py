"""Equal ops side by side, so that one launch can do several of them (see ``kernels/group.py``).

Small operations cost a launch each and leave most of a large device idle: the projections of queries, keys and values,
or the weight gradients of a layer, are equal ops on different tensors. Two moves bring them together:

- what only the update reads (weight and bias gradients) waits, until enough bytes of it have gathered, and is then run
  kind by kind: the backward chain does not need it;
- an op that is ready is drawn forward to an equal one a little before it.

Order changes, nothing else; no op moves across what writes its operands in place, nor from one micro-batch into another
(``layoutopt/microbatch.py``): what one leaves alive would meet the next one's activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layoutopt.blocks import spec_ids
from layoutopt.candidates import fixed_storages
from layoutopt.graph import Op, TrainingGraph
from layoutopt.microbatch import micro_batches

__all__ = ["alike_counts", "alike_runs", "bring_together", "sharing"]

_SHARE, _MOST_BYTES = 12, 64 << 20
"""Waiting gradients are run at this part of them all, or at this size: they keep activations alive meanwhile."""

FILLS_ELEMS = 1 << 16
"""Elements of its largest operand, for each compute unit, by which an op keeps them all busy: sixteen tiles of 64 x 64,
of which at most one in seventeen waits for the others."""

_AHEAD = 24
"""Ops that an op is drawn forward over at most."""


def bring_together(graph: TrainingGraph) -> TrainingGraph:
    """The graph with equal ops next to each other where order allows it."""
    ids = dict(zip((op.name for op in graph.ops), map(int, spec_ids(graph)), strict=True))
    ops = _drawn_forward(graph, _gathered(graph, ids), ids)
    return graph if ops == list(graph.ops) else graph.with_ops(ops)


def _gathered(graph: TrainingGraph, ids: dict[str, int]) -> list[Op]:
    """Leaves of the backward pass in groups, each ordered by what they are."""
    leaves = _leaves(graph)
    sizes = {
        name: sum(graph.tensors[o.tensor].size_elems * graph.tensors[o.tensor].item_bytes for o in op.outputs)
        for name, op in leaves.items()
    }
    turns = _turns(graph, graph.ops)
    limit = min(sum(sizes.values()) // (_SHARE * micro_batches(graph)), _MOST_BYTES)
    out: list[Op] = []
    waiting: list[Op] = []

    def flush() -> None:
        first = {ids[op.name]: i for i, op in reversed(list(enumerate(waiting)))}
        out.extend(sorted(waiting, key=lambda op: first[ids[op.name]]))
        waiting.clear()

    for op in graph.ops:
        if waiting and turns[op.name] != turns[waiting[0].name]:
            flush()
        if op.name in leaves:
            waiting.append(op)
            if sum(sizes[w.name] for w in waiting) >= limit:
                flush()
            continue
        if op.phase == "update" and waiting:
            flush()
        out.append(op)
    flush()
    return out


def _turns(graph: TrainingGraph, ops: Sequence[Op]) -> dict[str, int]:
    """By op, how many micro-batches were done before: each begins with a forward pass behind a backward pass."""
    if micro_batches(graph) == 1:
        return dict.fromkeys((op.name for op in ops), 0)
    out: dict[str, int] = {}
    turn, back = 0, False
    for op in ops:
        if op.phase in ("backward", "update"):
            back = True
        elif back:
            turn, back = turn + 1, False
        out[op.name] = turn
    return out


def _leaves(graph: TrainingGraph) -> dict[str, Op]:
    """Backward ops whose results only updates read (graph outputs may be among them)."""
    read_before_updates = {operand.tensor for op in graph.ops if op.phase != "update" for operand in op.inputs}
    written_in_place = {
        graph.storage_of[op.inputs[i].tensor] for op in graph.ops if op.phase != "update" for _, i in op.inplace
    }
    return {
        op.name: op
        for op in graph.ops
        if op.phase == "backward"
        and not op.inplace
        and not any(o.tensor in read_before_updates for o in op.outputs)
        and not any(graph.storage_of[o.tensor] in written_in_place for o in op.inputs)
    }


def _drawn_forward(graph: TrainingGraph, ops: Sequence[Op], ids: dict[str, int]) -> list[Op]:
    made_by = {o.tensor: op.name for op in ops for o in op.outputs}
    turns = _turns(graph, ops)
    out: list[Op] = []
    done: set[str] = set()
    for position, op in enumerate(ops):
        if op.name in done:
            continue
        before = set(done)
        done.add(op.name)
        out.append(op)
        if op.phase == "update" or op.inplace:
            continue
        for other in ops[position + 1 : position + 1 + _AHEAD]:
            if other.inplace or other.phase == "update" or turns[other.name] != turns[op.name]:
                break
            ready = all(made_by.get(o.tensor) in before or o.tensor not in made_by for o in other.inputs)
            if other.name not in done and ids[other.name] == ids[op.name] and ready:
                done.add(other.name)
                out.append(other)
    return out


def alike_runs(graph: TrainingGraph) -> Iterator[range]:
    """Ops by position in runs: neighbours that are equal and touch nothing that another of the run writes.

    A run's ops may run in any order or at once. An op without equals is a run of its own.
    """
    ids = [int(i) for i in spec_ids(graph)]
    start = 0
    reads: set[str] = set()
    writes: set[str] = set()
    for position, op in enumerate(graph.ops):
        read = {graph.storage_of[o.tensor] for o in op.inputs}
        written = {graph.storage_of[o.tensor] for o in op.outputs}
        apart = not (written & (reads | writes) or read & writes)
        if position > start and not (ids[position] == ids[start] and apart):
            yield range(start, position)
            start, reads, writes = position, set(), set()
        reads |= read
        writes |= written
    if graph.ops:
        yield range(start, len(graph.ops))


def sharing(graph: TrainingGraph, units: int) -> Iterator[tuple[int, ...]]:
    """Ops by position that are to share a launch, in the order of the first of each; most are by themselves.

    They are of one run of ``alike_runs``, and the host fixes the layouts of the same operands, so that they can run one
    kernel. An op that fills the device by itself (see ``FILLS_ELEMS``) gives up no layout for a shared launch.

    Args:
        graph: in the order that is planned.
        units: compute units that a small kernel leaves idle; 0 where none are (``DeviceLimits.idle_units``).
    """
    fixed = fixed_storages(graph)
    for run in alike_runs(graph):
        largest = max(graph.tensors[x.tensor].size_elems for x in graph.ops[run.start].operands)
        groups: dict[object, list[int]] = {}
        for o in run:
            held = tuple(graph.storage_of[x.tensor] in fixed for x in graph.ops[o].operands)
            groups.setdefault(held if largest <= FILLS_ELEMS * units else o, []).append(o)
        yield from map(tuple, groups.values())


def alike_counts(graph: TrainingGraph, units: int) -> list[int]:
    """Per op, how many ops are to share its launch (see ``sharing``)."""
    out = [1] * len(graph.ops)
    for group in sharing(graph, units):
        for o in group:
            out[o] = len(group)
    return out
