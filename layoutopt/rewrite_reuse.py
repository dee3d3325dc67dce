"""The rewrite "reuse": where a step is fullest, an op that works element by element writes over what it reads last.

A gradient that has two parts (tied embeddings: one from the output layer, one from the gathers) needs both of them and
their sum at once; the sum may take the place of a part. Storage that is shared has one layout, which is a choice less
for the solver, so that only those ops are changed at which a step needs most memory, one after the other, as long as
that makes the step smaller.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.graph import Op, TrainingGraph
from layoutopt.pass_views import overwrites
from layoutopt.rewrite_updates import fullest

__all__ = ["write_over"]

_MOST = 64
"""Ops that are changed: each is looked for anew."""
_OVER: dict[str, int | None] = {"pointwise": None, "softmax": 0, "softmax_grad": 0}
"""By kind, the input that an output may replace (None: any): it is read at an element before that is written."""
_ROLES = ("activation", "gradient")


def write_over(graph: TrainingGraph) -> TrainingGraph:
    """The graph with ops in place where that lowers the most memory it needs; ``graph`` where none does.

    Args:
        graph: views folded.
    """
    position, peak = fullest(graph)
    for _ in range(_MOST):
        changed = _over_one(graph, graph.ops[position])
        if changed is None:
            break
        position, smaller = fullest(changed)
        if smaller >= peak:
            break
        graph, peak = changed, smaller
    return graph


def _over_one(graph: TrainingGraph, op: Op) -> TrainingGraph | None:
    """The graph with one op in place, or None where it cannot be."""
    if op.kind not in _OVER or op.inplace or len(op.outputs) != 1:
        return None
    written = op.outputs[0]
    out = graph.tensors[written.tensor]
    if out.role not in _ROLES or out.name in graph.outputs:
        return None
    gone = overwrites(graph)
    for i, operand in enumerate(op.inputs):
        if _OVER[op.kind] not in (None, i):
            continue
        t = graph.tensors[operand.tensor]
        storage = graph.storages[graph.storage_of[t.name]]
        last = graph.consumers[t.name][-1] is op and t.name not in graph.outputs and t.name not in gone
        alone = storage.tensors == (t.name,) and sum(o.tensor == t.name for o in op.inputs) == 1
        alike = (t.shape, t.dtype, operand.view) == (out.shape, out.dtype, written.view)
        if last and alone and alike and t.role in _ROLES:
            done = replace(op, inplace=((0, i),))
            return graph.with_ops([done if x is op else x for x in graph.ops])
    return None
