"""Fusion: pointwise ops into one another, a constant factor into a product, and the two-step loss into one.

Pointwise fusion moves the producer's program into the consumer. What the consumer saw through a view, it then sees of
the producer's inputs through the composed views, so the two need not run over the same domain. Three forms:

- *absorb*: nobody else reads the producer's results; it disappears.
- *dissolve*: a few cheap instructions on one large input (adding a bias) are done again in each of several consumers,
  in any phase: its result need not be stored, and what is kept alive for the backward pass in its stead is the input.
  A dropout mask, which is calculated from a seed and counts, is so made again wherever it is needed.
- *join*: someone else reads the result; producer and consumer become one op with several outputs, which spares
  reading it once. Only within a phase and between near neighbours, so that nothing lives longer than it has to.

Ops that update in place neither absorb other phases nor are absorbed.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from layoutopt.expr import Builder, Ref, is_cheap, kind_of, renumber_inputs, used_inputs
from layoutopt.graph import Expr, Op, Operand, TrainingGraph
from layoutopt.op_editor import OpEditor
from layoutopt.pass_views import Notes, compose, seen
from layoutopt.view import View

__all__ = ["fuse_pointwise", "fused"]

MOST_OPERANDS = 12
MOST_INSTRUCTIONS = 64
MOST_COPIES = 4
"""Consumers into which a producer is dissolved."""
NEAR_OPS = 16
"""Ops in between that count as near."""


def fused(graph: TrainingGraph, producer: Op, consumer: Op, keep: bool) -> Op | None:
    """The consumer with the producer's program in it, or None where views or sizes forbid it.

    Args:
        graph: for dtypes and shapes.
        producer: a pointwise op that writes what ``consumer`` reads.
        consumer: a pointwise op.
        keep: also write the producer's results.
    """
    wrote = {o.tensor: i for i, o in enumerate(producer.outputs)}
    refs_of: dict[Any, int] = {}
    inputs: list[Operand] = []
    builder = Builder()

    def add(operand: Operand) -> Ref:
        shape = graph.tensors[operand.tensor].shape
        key = (operand.tensor, seen(operand.view, shape))
        if key not in refs_of:
            refs_of[key] = len(inputs)
            inputs.append(operand)
            builder.kinds.append(kind_of(graph.tensors[operand.tensor].dtype))
        return ("x", refs_of[key])

    pinned = {i for _, i in consumer.inplace}
    place: dict[int, Ref] = {i: add(consumer.inputs[i]) for i in sorted(pinned)}
    inlined: dict[View, list[Ref]] = {}
    for i, operand in enumerate(consumer.inputs):
        if i in pinned:
            continue
        if operand.tensor not in wrote:
            place[i] = add(operand)
            continue
        j = wrote[operand.tensor]
        change = _change(graph, producer, j, operand.view)
        if change not in inlined:
            refs = []
            for source in producer.inputs:
                view = compose(graph.tensors[source.tensor].shape, source.view, change)
                if view is None or any(source.tensor == consumer.inputs[k].tensor for k in pinned):
                    return None
                refs.append(add(Operand(source.tensor, view)))
            inlined[change] = builder.inline(producer.attrs["expr"], refs)
        place[i] = builder.cast(inlined[change][j], kind_of(graph.tensors[operand.tensor].dtype))
    results = builder.inline(consumer.attrs["expr"], [place[i] for i in range(len(consumer.inputs))])
    outputs = list(consumer.outputs)
    if keep:
        if len(inlined) != 1:
            return None
        ((change, made),) = inlined.items()
        for operand, ref in zip(producer.outputs, made, strict=True):
            tensor = graph.tensors[operand.tensor]
            view = compose(tensor.shape, operand.view, change)
            if view is None or not view.is_bijective:
                return None
            outputs.append(Operand(tensor.name, view))
            results.append(builder.cast(ref, kind_of(tensor.dtype)))
    return _assembled(consumer, inputs, outputs, builder.finish(results), place)


def _assembled(
    consumer: Op, inputs: list[Operand], outputs: list[Operand], expr: Expr, place: dict[int, Ref]
) -> Op | None:
    pinned = {i: place[i][1] for _, i in consumer.inplace}
    kept = sorted({*used_inputs(expr), *pinned.values()})
    number = {old: new for new, old in enumerate(kept)}
    if len(kept) + len(outputs) > MOST_OPERANDS or len(expr.code) > MOST_INSTRUCTIONS:
        return None
    return replace(
        consumer,
        inputs=tuple(inputs[i] for i in kept),
        outputs=tuple(outputs),
        attrs={**consumer.attrs, "expr": renumber_inputs(expr, number)},
        inplace=tuple((out, number[pinned[i]]) for out, i in consumer.inplace),
    )


def _change(graph: TrainingGraph, producer: Op, output: int, read: View) -> View:
    """From the producer's domain to the consumer's, for a result that is read through ``read``."""
    written = producer.outputs[output]
    shape = graph.tensors[written.tensor].shape
    return written.view.inverse(shape).then(*read.steps).simplified(written.view.shape(shape))


# ---- the pass -----------------------------------------------------------------------------------------------------


def fuse_pointwise(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Fuse pointwise ops as the module docstring says."""
    fuser = _Fuser(graph)
    for at in range(len(graph.ops)):
        while fuser.absorb(at, only_free=True):
            pass
    for at in range(len(graph.ops)):
        fuser.dissolve(at)
    for at in range(len(graph.ops)):
        while fuser.absorb(at):
            pass
    for at in range(len(graph.ops)):
        while fuser.join(at):
            pass
    return graph.with_ops(fuser.left())


class _Fuser(OpEditor):
    """The three forms."""

    def _domain(self, op: Op) -> int:
        return prod(self.graph.operand_shape(op.operands[0]))

    def _producers(self, at: int) -> list[int]:
        """Pointwise ops that write what the op at a position reads, nearest first."""
        op = self.ops[at]
        if op is None or op.kind != "pointwise":
            return []
        found = {self.writer[o.tensor] for o in op.inputs if o.tensor in self.writer}
        return sorted((p for p in found if self._is_plain(p)), reverse=True)

    def _is_plain(self, at: int) -> bool:
        op = self.ops[at]
        return op is not None and op.kind == "pointwise" and not op.inplace

    # ---- the three forms --------------------------------------------------------------------------------------------

    def _free(self, op: Op) -> bool:
        """Whether an op makes much of next to nothing: a mask of counts, random numbers of a seed."""
        return sum(self.size_bytes(o.tensor) for o in op.inputs) * 8 <= min(
            self.size_bytes(o.tensor) for o in op.outputs
        )

    def absorb(self, at: int, only_free: bool = False) -> bool:
        """Take in one producer that nobody else needs; False where there is none.

        Args:
            at: the consumer's position.
            only_free: consider only producers that calculate from next to nothing, for consumers that do so too.
        """
        for source in self._producers(at):
            consumer, producer = self.op(at), self.op(source)
            names = [o.tensor for o in producer.outputs]
            if only_free and not (self._free(producer) and len(consumer.inputs) == 1):
                continue
            if producer.phase != consumer.phase or any(n in self.graph.outputs for n in names):
                continue
            if any(self.readers[n] != {at} for n in names) or not self.readable(producer, at):
                continue
            grows = self._domain(consumer) > self._domain(producer)
            repeated = sum(o.tensor in names for o in consumer.inputs) > 1
            if (grows or repeated) and not self._may_repeat(producer, consumer, grows):
                continue
            if self._lengthens(source, at):
                continue
            new = fused(self.graph, producer, consumer, keep=False)
            if new is not None:
                self.put(source, None)
                self.put(at, new)
                return True
        return False

    def _may_repeat(self, producer: Op, consumer: Op, grows: bool) -> bool:
        """Whether doing the producer's work more than once costs next to nothing."""
        if is_cheap(producer.attrs["expr"], 4):
            return True
        outputs = list(enumerate(producer.outputs))
        reads = [(i, o.view) for i, w in outputs for o in consumer.inputs if o.tensor == w.tensor]
        return not grows and len({_change(self.graph, producer, i, view) for i, view in reads}) == 1

    def _lengthens(self, source: int, at: int) -> bool:
        """Whether reading the producer's inputs as late as ``at`` keeps more bytes alive than its results were."""
        if at - source <= NEAR_OPS:
            return False
        producer = self.op(source)
        inputs = {o.tensor for o in producer.inputs if o.tensor in self.writer}
        longer = sum(self.size_bytes(n) for n in inputs if max(self.readers[n] - {source}, default=-1) < at)
        return longer > sum(self.size_bytes(o.tensor) for o in producer.outputs)

    def dissolve(self, at: int) -> bool:
        """Do a cheap op again in each of its consumers; False where it must stay."""
        op = self.ops[at]
        if op is None or not self._is_plain(at) or len(op.outputs) != 1:
            return False
        name = op.outputs[0].tensor
        readers = sorted(self.readers[name])
        free = self._free(op)
        if not is_cheap(op.attrs["expr"], 12 if free else 2):
            return False
        if name in self.graph.outputs or not 2 <= len(readers) <= (len(self.ops) if free else MOST_COPIES):
            return False
        large = {o.tensor for o in op.inputs if 2 * self.size_bytes(o.tensor) > self.size_bytes(name)}
        computed = [n for n in large if n in self.writer]
        if len(large) > 1 or sum(self.size_bytes(n) for n in computed) > self.size_bytes(name):
            return False
        made = {}
        for reader in readers:
            consumer = self.op(reader)
            if consumer.kind != "pointwise" or self._domain(consumer) > self._domain(op):
                return False
            if not self.readable(op, reader):
                return False
            if (consumer.phase == "update") != (op.phase == "update"):
                return False
            new = fused(self.graph, op, consumer, keep=False)
            if new is None:
                return False
            made[reader] = new
        for reader, new in made.items():
            self.put(reader, new)
        self.put(at, None)
        return True

    def join(self, at: int) -> bool:
        """Make one op of this one and a near producer whose results others need too; False where none fits."""
        for source in self._producers(at):
            consumer, producer = self.op(at), self.op(source)
            if producer.phase != consumer.phase or consumer.phase == "update" or consumer.inplace:
                continue
            if at - source > NEAR_OPS or self._domain(consumer) != self._domain(producer):
                continue
            others = {r for o in producer.outputs for r in self.readers[o.tensor]} - {at}
            early = all(self.writer.get(o.tensor, -1) <= source for o in consumer.inputs)
            late = all(r > at for r in others) and self.readable(producer, at)
            if not early and not late:
                continue
            new = fused(self.graph, producer, consumer, keep=True)
            if new is not None:
                target, other = (source, at) if early else (at, source)
                self.put(other, None)
                self.put(target, new)
                return True
        return False
