"""The rewrite "logits": the gradient of a cross-entropy takes the place of its logits.

Over a vocabulary of tens of thousands the logits are the largest tensor of a step, and their gradient is as large
again. Where nobody reads them after it, the gradient is written over them, element by element. They are then no longer
an output of the step: a step that reports its logits keeps them (``keep=`` of ``planner.plan``), small ones anyway.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.graph import Op, Operand, TrainingGraph
from layoutopt.pass_views import compose, rebase
from layoutopt.view import View

__all__ = ["LEAST_BYTES", "overwrite_logits"]

LEAST_BYTES = 1 << 20
"""Smaller logits are left alone: they may be wanted."""


def overwrite_logits(graph: TrainingGraph, least_bytes: int = LEAST_BYTES) -> TrainingGraph:
    """The graph with each gradient of large logits in their place; ``graph`` where there are none.

    Args:
        graph: views folded.
        least_bytes: of logits that are overwritten.
    """
    for op in graph.ops:
        if op.kind == "cross_entropy_grad" and not op.inplace:
            logits = graph.tensors[op.inputs[1].tensor]
            if logits.size_elems * logits.item_bytes >= least_bytes and _replaceable(graph, op):
                graph = _in_place(graph, op)
    return graph


def _replaceable(graph: TrainingGraph, op: Op) -> bool:
    """Whether the op is the last to read its logits, an activation that it sees whole, and writes all it stores."""
    source, written = op.inputs[1].tensor, op.outputs[0].tensor
    shape = graph.tensors[source].shape
    alone = graph.storages[graph.storage_of[source]].tensors == (source,)
    whole = all(o.view.is_bijective for o in (op.inputs[1], op.outputs[0]))
    last = graph.consumers[source][-1] is op and sum(o.tensor == source for o in op.inputs) == 1
    fits = graph.tensors[written].size_elems == graph.tensors[source].size_elems
    if not (alone and whole and last and fits) or graph.tensors[source].role not in ("activation", "output"):
        return False
    if source == graph.outputs[0] or written in graph.outputs:
        return False
    change = _change(graph, op)
    return all(
        compose(shape, change, operand.view) is not None
        for reader in graph.consumers[written]
        for operand in reader.inputs
        if operand.tensor == written
    )


def _change(graph: TrainingGraph, op: Op) -> View:
    """From the logits as they are stored to the gradient as it was."""
    written = op.outputs[0]
    return op.inputs[1].view.then(*written.view.inverse(graph.tensors[written.tensor].shape).steps)


def _in_place(graph: TrainingGraph, op: Op) -> TrainingGraph:
    source, written = op.inputs[1], op.outputs[0].tensor
    shape = graph.tensors[source.tensor].shape
    change = _change(graph, op)
    shapes = {name: tensor.shape for name, tensor in graph.tensors.items()} | {written: shape}
    ops = rebase(graph.ops, {written: (written, change)}, shapes)
    done = replace(op, outputs=(Operand(written, source.view),), inplace=((0, 1),))
    tensors = {
        **graph.tensors,
        source.tensor: replace(graph.tensors[source.tensor], role="activation"),
        written: replace(graph.tensors[written], shape=shape),
    }
    outputs = tuple(name for name in graph.outputs if name != source.tensor)
    return graph.with_ops([done if x.name == op.name else x for x in ops], tensors=tensors, outputs=outputs)
