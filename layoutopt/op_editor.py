"""Ops that are put in one another's place: the bookkeeping of passes and rewrites that merge ops."""

from __future__ import annotations

from layoutopt.graph import Op, TrainingGraph
from layoutopt.pass_views import overwrites

__all__ = ["OpEditor"]


class OpEditor:
    """The ops of a graph by position, with who writes and reads what, kept up to date while ops are replaced.

    Args:
        graph: where the ops come from; it stays as it is.

    Attributes:
        ops: by position; None where one was taken away.
        overwritten: the position of the op that overwrites a tensor's storage in place.
        writer: the position of the op that writes a tensor.
        readers: the positions of the ops that read a tensor.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.ops: list[Op | None] = list(graph.ops)
        self.overwritten = overwrites(graph)
        self.writer: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {name: set() for name in graph.tensors}
        for at in range(len(self.ops)):
            self._enter(at)

    def op(self, at: int) -> Op:
        """The op at a position, where there is one."""
        op = self.ops[at]
        assert op is not None, f"the op at {at} was merged into another"
        return op

    def put(self, at: int, op: Op | None) -> None:
        """Replace what is at a position, or take it away."""
        old = self.ops[at]
        for o in old.outputs if old else ():
            self.writer.pop(o.tensor, None)
        for o in old.inputs if old else ():
            self.readers[o.tensor].discard(at)
        self.ops[at] = op
        if op is not None:
            self._enter(at)

    def _enter(self, at: int) -> None:
        op = self.op(at)
        for o in op.outputs:
            self.writer[o.tensor] = at
        for o in op.inputs:
            self.readers[o.tensor].add(at)

    def size_bytes(self, tensor: str) -> int:
        """Bytes of a tensor's elements."""
        t = self.graph.tensors[tensor]
        return t.size_elems * t.item_bytes

    def readable(self, op: Op, at: int) -> bool:
        """Whether an op's inputs still hold their values at a position."""
        return all(self.overwritten.get(o.tensor, at + 1) > at for o in op.inputs)

    def left(self) -> list[Op]:
        """The ops that are left, in order."""
        return [op for op in self.ops if op is not None]
