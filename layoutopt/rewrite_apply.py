"""The rewrite "apply": a weight's gradient is applied where the contraction makes it, and never stored.

The update of a parameter reads its gradient element by element, and most gradients are a contraction's result that
nothing else reads. The update's program then becomes the contraction's epilogue (``layoutopt/rewrite_epilogue.py``),
which writes parameter and optimizer state in place. The gradient is neither written nor read, and takes no memory.

The merged op runs where the contraction did, or behind the parameter's last reader where that comes a little later. A
step computes the same numbers; gradients cannot be read afterwards, so that whoever keeps them plans without.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.graph import Op, TrainingGraph
from layoutopt.op_editor import OpEditor
from layoutopt.pass_fuse import NEAR_OPS
from layoutopt.rewrite_epilogue import merged

__all__ = ["apply_gradients"]


def apply_gradients(graph: TrainingGraph) -> TrainingGraph:
    """The graph with updates merged into the contractions that make their gradients, as the module docstring says."""
    editor = _Applier(graph)
    for at, op in graph.walk():
        if op.phase == "update" and op.kind == "pointwise" and op.inplace:
            editor.merge(at)
    return graph.with_ops(editor.left())


class _Applier(OpEditor):
    """Merges updates; what has to run behind an op of the graph waits in ``behind``."""

    def __init__(self, graph: TrainingGraph) -> None:
        super().__init__(graph)
        self.behind: dict[int, list[Op]] = {}

    def merge(self, at: int) -> None:
        """Merge the update at a position into the contraction before it, where there is one for it."""
        update = self.op(at)
        for operand in update.inputs:
            source = self.writer.get(operand.tensor)
            if source is None or not self._only_updated(operand.tensor, source, at):
                continue
            place = self._place(source, at)
            new = merged(self.graph, self.op(source), update) if place is not None else None
            new = _in_place(new, update) if new is not None else None
            if new is not None and place is not None:
                self._move(source, at, place, new)
                return

    def _only_updated(self, gradient: str, source: int, at: int) -> bool:
        """Whether a contraction's only result is a gradient that only the update at a position reads."""
        product = self.op(source)
        alone = product.kind == "contraction" and not product.inplace and len(product.outputs) == 1
        return alone and self.readers[gradient] == {at} and gradient not in self.graph.outputs

    def _place(self, source: int, at: int) -> int | None:
        """The op behind which the merged op runs, ``source`` for its own place; None where none is near enough."""
        product, update = self.op(source), self.op(at)
        updated = {self.graph.storage_of[update.inputs[i].tensor] for _, i in update.inplace}
        if any(self.graph.storage_of[o.tensor] in updated for o in product.inputs):
            return None
        readers = {
            r
            for name in updated
            for tensor in self.graph.storages[name].tensors
            for r in (*self.readers[tensor], self.writer.get(tensor, source))
            if r < at  # behind it stand those of its result, which a gradient's sum over micro-batches has
        }
        others = [self.writer.get(o.tensor, source) for o in update.inputs]
        place = max([source, *others, *readers])
        if place - source > NEAR_OPS or place > at or not self.readable(product, place):
            return None
        return place

    def _move(self, source: int, at: int, place: int, new: Op) -> None:
        self.put(source, None)
        self.put(at, None)
        if place == source:
            self.put(place, new)
        else:
            self.behind.setdefault(place, []).append(new)
            for o in new.inputs:
                self.readers[o.tensor].add(place)
            for o in new.outputs:
                self.writer[o.tensor] = place
        for _, i in new.inplace:
            self.overwritten[new.inputs[i].tensor] = place

    def left(self) -> list[Op]:
        """The ops that are left, in order."""
        return [op for at, own in enumerate(self.ops) for op in (own, *self.behind.get(at, [])) if op is not None]


def _in_place(product: Op, update: Op) -> Op | None:
    """The merged op with what the update writes in place; None where it lost an operand on the way."""
    inputs = {o.tensor: i for i, o in enumerate(product.inputs) if i > 1}
    outputs = {o.tensor: i for i, o in enumerate(product.outputs)}
    pairs = []
    for out, inp in update.inplace:
        written, read = update.outputs[out].tensor, update.inputs[inp].tensor
        if read not in inputs:
            return None
        pair = outputs[written], inputs[read]
        if product.outputs[pair[0]].view != product.inputs[pair[1]].view:
            return None
        pairs.append(pair)
    return replace(product, inplace=tuple(pairs))
