"""The rewrite "epilogue": pointwise work on a contraction's result is done where the contraction stores it.

A pointwise op that reads what a contraction writes, element by element, becomes the contraction's ``epilogue`` (see
``layoutopt/graph.py``): adding a bias, an activation, a residual, another contraction's result; masking; the derivative
of an activation. What else it reads becomes the contraction's extra operands, seen over the contraction's own axes, and
what it writes an output. A result that others read too (the pre-activation that the backward pass needs) stays one.
Several pointwise ops may end in one contraction, one after the other.

The merged op runs where the contraction did if everything is known there, else where the pointwise op did if nobody
reads the contraction's result before. Ops that update in place, and ops of another phase, stay on their own.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.expr import Builder, Kind, Ref, kind_of, renumber_inputs, used_inputs
from layoutopt.graph import Expr, Op, Operand, TrainingGraph
from layoutopt.op_editor import OpEditor
from layoutopt.pass_fuse import NEAR_OPS
from layoutopt.pass_views import compose, same_view, seen
from layoutopt.view import View

__all__ = ["MOST_FULL", "MOST_INSTRUCTIONS", "MOST_OPERANDS", "merged", "with_epilogues"]

MOST_OPERANDS = 12
MOST_FULL = 6
"""Extra operands and outputs as large as the result: each is a choice of layout of its own."""
MOST_INSTRUCTIONS = 64

_SUM = Expr((), (("x", 0),))
"""The epilogue of a contraction that has none."""


def with_epilogues(graph: TrainingGraph) -> TrainingGraph:
    """The graph with pointwise ops merged into the contractions before them, as the module docstring says."""
    editor = _Merger(graph)
    for at in range(len(graph.ops)):
        while editor.merge(at):
            pass
    return graph.with_ops(editor.left())


def merged(graph: TrainingGraph, product: Op, consumer: Op, kept: frozenset[str] = frozenset()) -> Op | None:
    """The contraction with the consumer's program in its epilogue, or None where views or sizes forbid it.

    Args:
        graph: for dtypes and shapes.
        product: a contraction, with or without an epilogue.
        consumer: a pointwise op that reads what ``product`` writes.
        kept: results of ``product`` that must still be written.
    """
    change = _change(graph, product, consumer)
    if change is None:
        return None
    extras: list[Operand] = list(product.inputs[2:])
    builder = Builder(["float", *(kind_of(graph.tensors[o.tensor].dtype) for o in extras)])
    made = builder.inline(product.attrs.get("epilogue", _SUM), [("x", i) for i in range(len(extras) + 1)])
    known = {(o.tensor, seen(o.view, graph.tensors[o.tensor].shape)): i + 1 for i, o in enumerate(extras)}
    results = {o.tensor: builder.cast(r, _kind(graph, o)) for o, r in zip(product.outputs, made, strict=True)}
    args: list[Ref] = []
    for operand in consumer.inputs:
        if operand.tensor in results:
            args.append(results[operand.tensor])
            continue
        shape = graph.tensors[operand.tensor].shape
        view = compose(shape, operand.view, change)
        if view is None:
            return None
        key = operand.tensor, seen(view, shape)
        if key not in known:
            known[key] = len(extras) + 1
            extras.append(Operand(operand.tensor, view))
            builder.kinds.append(_kind(graph, operand))
        args.append(("x", known[key]))
    outputs: list[Operand] = []
    values: list[Ref] = []
    for operand, ref in zip(consumer.outputs, builder.inline(consumer.attrs["expr"], args), strict=True):
        view = compose(graph.tensors[operand.tensor].shape, operand.view, change)
        if view is None or not view.is_bijective:
            return None
        outputs.append(Operand(operand.tensor, view))
        values.append(builder.cast(ref, _kind(graph, operand)))
    still = [o for o in product.outputs if o.tensor in kept]
    return _assembled(
        graph, product, extras, outputs + still, builder.finish(values + [results[o.tensor] for o in still])
    )


def _assembled(
    graph: TrainingGraph, product: Op, extras: list[Operand], outputs: list[Operand], expr: Expr
) -> Op | None:
    used = used_inputs(expr)
    inputs = [*product.inputs[:2], *(extras[i - 1] for i in used if i)]
    domain = graph.tensors[product.outputs[0].tensor].size_elems
    full = [o for o in (*inputs[2:], *outputs) if 2 * graph.tensors[o.tensor].size_elems > domain]
    if 0 not in used or len(expr.code) > MOST_INSTRUCTIONS:
        return None
    if len(inputs) + len(outputs) > MOST_OPERANDS or len(full) > MOST_FULL:
        return None
    epilogue = renumber_inputs(expr, {old: new for new, old in enumerate(used)})
    attrs = {**product.attrs, "epilogue": epilogue}
    return replace(product, inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs)


def _kind(graph: TrainingGraph, operand: Operand) -> Kind:
    return kind_of(graph.tensors[operand.tensor].dtype)


def _change(graph: TrainingGraph, product: Op, consumer: Op) -> View | None:
    """From the consumer's domain to the contraction's, or None where it reads other than element by element."""
    wrote = {o.tensor: o for o in product.outputs}
    domain = graph.operand_shape(consumer.outputs[0])
    found: View | None = None
    for operand in consumer.inputs:
        if operand.tensor not in wrote:
            continue
        shape = graph.tensors[operand.tensor].shape
        if not operand.view.is_bijective:
            return None
        change = operand.view.inverse(shape).then(*wrote[operand.tensor].view.steps).simplified(domain)
        if found is not None and not same_view(change, found, domain):
            return None
        found = change
    return found


class _Merger(OpEditor):
    """Tries each pointwise op with the contractions that it reads, nearest first."""

    def merge(self, at: int) -> bool:
        """Merge the pointwise op at a position into a contraction; False where there is none for it."""
        consumer = self.ops[at]
        if consumer is None or consumer.kind != "pointwise" or consumer.inplace:
            return False
        sources = {self.writer[o.tensor] for o in consumer.inputs if o.tensor in self.writer}
        for source in sorted(sources, reverse=True):
            product = self.op(source)
            if product.kind != "contraction" or product.phase != consumer.phase:
                continue
            names = {o.tensor for o in product.outputs}
            kept = frozenset(n for n in names if n in self.graph.outputs or self.readers[n] != {at})
            target = self._place(source, at, kept)
            new = merged(self.graph, product, consumer, kept) if target is not None else None
            if new is not None and target is not None:
                self.put(source, None)
                self.put(at, None)
                self.put(target, new)
                return True
        return False

    def _place(self, source: int, at: int, kept: frozenset[str]) -> int | None:
        """Where the merged op may run without anything living much longer; None where it may not."""
        product, consumer = self.op(source), self.op(at)
        near = at - source <= NEAR_OPS
        if all(self.writer.get(o.tensor, -1) <= source for o in consumer.inputs):
            return source if near or not kept else None
        read = {r for o in product.outputs for r in self.readers[o.tensor]} - {at}
        if not self.readable(product, at) or any(r < at for r in read):
            return None
        return at if near else None
