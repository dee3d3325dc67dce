"""The rewrite "pieces:COUNT": a cross-entropy over a large vocabulary, some of its rows at a time.

Logits over a vocabulary are the largest tensor of a language model's step: tokens times tens of thousands, alive
between the forward and the backward pass, where a step is fullest. Nothing but the loss and its gradient reads them,
and each row alone. So the rows are cut into pieces, and for each piece in turn the logits are made, the loss is taken,
their gradient is written over them, and what follows from it (the gradients of the weights, and of what the logits were
made from) is calculated at once. One piece's logits are alive at a time. (Chunked losses of training libraries, "cut
cross-entropy", do likewise.)

- The gradient of a mean divides by the number of targets that count. It is counted before the first piece.
- A gradient that sums over rows (the weights') begins with the first piece; later ones are added in place by ops of
  phase "update", as micro-batches' are, so that the contraction may add (``rewrite_apply.py``).
- What has a row for every row (the gradient of the features) is joined.
- Pointwise ops between product and loss (a soft cap) and behind its gradient are cut along.

No op runs twice. It costs smaller contractions, and reading and writing the sums once per piece. Logits are then no
output of the step, as after the rewrite "logits".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from layoutopt.errors import LayoutOptError
from layoutopt.expr import Builder, Ref, kind_of
from layoutopt.graph import Expr, Op, Operand, Phase, Tensor, TrainingGraph
from layoutopt.pass_views import COPY, compose, overwrites, same_view
from layoutopt.rewrite_logits import LEAST_BYTES
from layoutopt.view import Step, View

__all__ = ["LEAST_ROWS", "in_pieces", "pieces_name"]

LEAST_ROWS = 32
"""Pieces have no fewer rows, unless less is asked for: smaller contractions waste what they read of the weights."""

_ADD = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))


def pieces_name(count: int) -> str:
    """What the rewrite into so many pieces is called."""
    return f"pieces:{count}"


def in_pieces(
    graph: TrainingGraph, count: str, least_bytes: int = LEAST_BYTES, least_rows: int = LEAST_ROWS
) -> TrainingGraph:
    """The graph with its large cross-entropies in pieces; ``graph`` where there are none that can be cut.

    Args:
        graph: views folded.
        count: how many pieces, at least 2; fewer where there are too few rows.
        least_bytes: of logits that are cut.
        least_rows: of a piece.

    Raises:
        LayoutOptError: this is no number of pieces.
    """
    if not re.fullmatch(r"[1-9]\d{0,5}", count) or count == "1":
        raise LayoutOptError(f"rewrite 'pieces:{count}': expected a number of pieces from 2, such as pieces:8")
    for name in [op.name for op in graph.ops if op.kind == "cross_entropy"]:
        loss = next(op for op in graph.ops if op.name == name)
        logits = graph.tensors[loss.inputs[0].tensor]
        rows = graph.operand_shape(loss.inputs[0])[0]
        bounds = _bounds(rows, int(count), least_rows)
        if len(bounds) > 2 and logits.size_elems * logits.item_bytes >= least_bytes:
            part = _Part.around(graph, loss)
            graph = _Cutter(graph, part, bounds).graph() if part is not None else graph
    return graph


def _bounds(rows: int, count: int, least_rows: int) -> list[int]:
    """Where pieces begin, and where the last ends: equal ones, but for the last."""
    each = max(-(-rows // count), least_rows)
    each = min(-(-each // least_rows) * least_rows, rows)
    return [*range(0, rows, each), rows]


# ---- what is cut ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The ops around a loss that are cut.

    Attributes:
        loss: the cross-entropy.
        gradient: its gradient.
        makers: the contraction and pointwise ops that make the logits, in order.
        readers: pointwise ops and contractions that follow from the gradient, in order.
        rows: by tensor that has a row per target and a column per class, the view of it as such.
    """

    loss: Op
    gradient: Op
    makers: tuple[Op, ...]
    readers: tuple[Op, ...]
    rows: dict[str, View]

    @classmethod
    def around(cls, graph: TrainingGraph, loss: Op) -> _Part | None:
        """What can be cut around a loss, or None."""
        gradients = [op for op in graph.consumers[loss.outputs[1].tensor] if op.kind == "cross_entropy_grad"]
        if len(gradients) != 1 or gradients[0].inplace or loss.inplace:
            return None
        gradient = gradients[0]
        finder = _Finder(graph, graph.operand_shape(loss.inputs[0]))
        found = finder.find(loss, gradient)
        if found is None:
            return None
        part = cls(loss, gradient, *found, finder.rows)
        return part if _is_closed(graph, part) and _may_move(graph, part) else None

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them."""
        return (*self.makers, self.loss, self.gradient, *self.readers)


class _Finder:
    """Walks from a loss to what makes its logits and what follows from their gradient."""

    def __init__(self, graph: TrainingGraph, shape: tuple[int, ...]) -> None:
        self.graph, self.shape = graph, shape
        self.rows: dict[str, View] = {}

    def find(self, loss: Op, gradient: Op) -> tuple[tuple[Op, ...], tuple[Op, ...]] | None:
        """Makers and readers, in order; None where one of them cannot be cut."""
        position = {op.name: at for at, op in self.graph.walk()}
        makers: dict[str, Op] = {}
        pending = [loss.inputs[0].tensor]
        while pending:
            op = self.graph.producer.get(pending.pop())
            if op is None or op.inplace:
                return None
            if op.name in makers:
                continue
            makers[op.name] = op
            if op.kind == "pointwise":
                pending += [o.tensor for o in op.inputs if self._is_wide(o) and self._is_made(o, op)]
            elif op.kind != "contraction":
                return None
        in_order = sorted(makers.values(), key=lambda op: position[op.name])
        if not all(map(self._writes, in_order)) or not self._writes(gradient):
            return None
        own = {*makers, loss.name, gradient.name}
        readers: list[Op] = []
        for op in self.graph.ops:
            if op.name in own or not any(o.tensor in self.rows for o in op.inputs):
                continue
            if op.inplace or not (op.kind == "contraction" or (op.kind == "pointwise" and self._writes(op))):
                return None
            readers.append(op)
        fits = all(self._reads(op) for op in (*in_order, loss, gradient, *readers))
        return (tuple(in_order), tuple(readers)) if fits else None

    def _is_wide(self, operand: Operand) -> bool:
        return self.graph.tensors[operand.tensor].size_elems == self.shape[0] * self.shape[1]

    def _is_made(self, operand: Operand, reader: Op) -> bool:
        """Whether an operand is made for the logits alone, by an op that is to be cut along."""
        maker = self.graph.producer.get(operand.tensor)
        return maker is not None and maker.phase == reader.phase and operand.view.is_bijective

    def _writes(self, op: Op) -> bool:
        """Notes how an op's outputs show rows and columns; False where they do not."""
        if op.kind == "contraction" and (len(op.outputs) != 1 or "epilogue" in op.attrs):
            return False
        for o in op.outputs:
            seen_shape = self.graph.operand_shape(o)
            rowwise = op.kind != "contraction" or seen_shape == (1, *self.shape)
            if not (rowwise and self._is_wide(o) and o.view.is_bijective):
                return False
            self.rows[o.tensor] = o.view.then(("reshape", self.shape))
        return True

    def _reads(self, op: Op) -> bool:
        """Whether an op reads tensors of rows and columns row by row, or as one factor of a product."""
        if op.kind != "contraction":
            return all(self.shows_rows(o) for o in op.inputs if o.tensor in self.rows)
        wide = [o for o in op.inputs if o.tensor in self.rows]
        return not wide or (len(wide) == 1 and len(op.outputs) == 1 and _side(self, op) is not None)

    def shows_rows(self, operand: Operand, *undo: Step) -> bool:
        """Whether an operand, after some steps, shows rows and columns as its tensor's writer did."""
        shape = self.graph.tensors[operand.tensor].shape
        view = operand.view.then(*undo, Step("reshape", self.shape))
        return same_view(view, self.rows[operand.tensor], shape)


def _side(finder: _Finder, product: Op) -> str | None:
    """What a product does with the rows of its wide factor: "kept" as its own rows, or "summed" over; None: neither."""
    if "epilogue" in product.attrs or len(product.inputs) != 2:
        return None
    rows, cols = finder.shape
    for position, operand in enumerate(product.inputs):
        if operand.tensor not in finder.rows:
            continue
        shape = finder.graph.operand_shape(operand)
        if shape == (1, rows, cols) and finder.shows_rows(operand):
            return "kept" if position == 0 else "summed"
        turned = Step("permute", (0, 2, 1))
        if position == 0 and shape == (1, cols, rows) and finder.shows_rows(operand, turned):
            return "summed"
    return None


def _is_closed(graph: TrainingGraph, part: _Part) -> bool:
    """Whether nobody else reads what will be in pieces, and the gradient may take the logits' place."""
    own = {op.name for op in part.ops}
    logits, (lse, weight) = part.loss.inputs[0].tensor, (o.tensor for o in part.loss.outputs[1:])
    read_inside = all(op.name in own for name in (*part.rows, lse) for op in graph.consumers[name])
    kept = set(graph.outputs) & {*part.rows, lse, weight} - {logits}
    last = graph.consumers[logits][-1] is part.gradient and graph.outputs[0] != logits
    alike = graph.tensors[logits].dtype == graph.tensors[part.gradient.outputs[0].tensor].dtype
    return read_inside and not kept and last and alike


def _may_move(graph: TrainingGraph, part: _Part) -> bool:
    """Whether everything can run where the loss does: what it reads is there by then, and not gone yet."""
    position = {op.name: at for at, op in graph.walk()}
    writer = {o.tensor: at for at, op in graph.walk() for o in op.outputs}
    made = {o.tensor for op in part.ops for o in op.outputs}
    gone = overwrites(graph)
    at = position[part.loss.name]
    outside = {o.tensor for op in part.ops for o in op.inputs} - made
    return all(writer.get(name, -1) < at < gone.get(name, len(position)) for name in outside)


# ---- cutting --------------------------------------------------------------------------------------------------------


class _Cutter:
    """Writes the graph with one loss in pieces."""

    def __init__(self, graph: TrainingGraph, part: _Part, bounds: Sequence[int]) -> None:
        self.before, self.part = graph, part
        self.pieces = [(i, low, high) for i, (low, high) in enumerate(pairwise(bounds))]
        self.shape = graph.operand_shape(part.loss.inputs[0])
        self.finder = _Finder(graph, self.shape)
        self.finder.rows = part.rows
        self.tensors = dict(graph.tensors)
        self.ops: list[Op] = []

    def graph(self) -> TrainingGraph:
        """The result; the graph as it was where no layout shows a piece of what is read."""
        before, part = self.before, self.part
        if not self._can_be_seen():
            return before
        targets = self._targets()
        self._count(targets)
        for i, low, high in self.pieces:
            for op in part.makers:
                self._rowwise(op, i, low, high, "loss")
            self._loss(targets, i, low, high)
            for op in part.readers:
                if op.kind == "pointwise":
                    self._rowwise(op, i, low, high, op.phase)
                elif _side(self.finder, op) == "kept":
                    self._rows_of(op, i, low, high)
                else:
                    self._summed(op, i, low, high)
        for op in part.readers:
            if op.kind == "contraction" and _side(self.finder, op) == "kept":
                self._joined(op)
        own = {op.name for op in part.ops}
        ops: list[Op] = []
        for op in before.ops:
            if op.name == part.loss.name:
                ops += self.ops
            elif op.name not in own:
                ops.append(op)
        outputs = tuple(name for name in before.outputs if name not in part.rows)
        return before.with_ops(ops, tensors=self.tensors, outputs=outputs)

    # ---- operands ---------------------------------------------------------------------------------------------------

    def _sliced(self, operand: Operand, axis: int, low: int, high: int, *first: Step) -> Operand:
        """Rows of an operand from outside, which an op sees through some more steps."""
        shape = self.before.tensors[operand.tensor].shape
        view = compose(shape, operand.view.then(*first), View().then(("slice", (axis, low, high, 1))))
        assert view is not None, "looked at before anything was written"
        return Operand(operand.tensor, view)

    def _can_be_seen(self) -> bool:
        """Whether a layout shows every piece of what is read from outside."""
        for op in (*self.part.makers, *self.part.readers):
            for operand, axis, first in self._cut_operands(op):
                shape = self.before.tensors[operand.tensor].shape
                for _, low, high in self.pieces:
                    cut = View().then(("slice", (axis, low, high, 1)))
                    if compose(shape, operand.view.then(*first), cut) is None:
                        return False
        return True

    def _cut_operands(self, op: Op) -> Iterable[tuple[Operand, int, tuple[Step, ...]]]:
        """Operands from outside that are cut: the axis, after some more steps."""
        outside = [o for o in op.inputs if o.tensor not in self.part.rows]
        if op.kind == "pointwise":
            return [(o, 0, (Step("reshape", self.shape),)) for o in outside]
        if op in self.part.makers:
            return [(op.inputs[0], 1, ())]
        if _side(self.finder, op) == "kept":
            return []
        wide = next(p for p, o in enumerate(op.inputs) if o.tensor in self.part.rows)
        return [(op.inputs[1 - wide], 1 if wide == 0 else 2, ())]

    def _own(self, name: str, i: int) -> str:
        return f"{name}.piece{i}"

    def _wide(self, name: str, i: int, low: int, high: int) -> Operand:
        """A piece of a tensor of rows and columns; it is there from now on."""
        own, t = self._own(name, i), self.before.tensors[name]
        role = "activation" if t.role == "output" else t.role
        self.tensors[own] = replace(t, name=own, shape=(high - low, self.shape[1]), role=role)
        return Operand(own)

    # ---- ops --------------------------------------------------------------------------------------------------------

    def _rowwise(self, op: Op, i: int, low: int, high: int, phase: Phase) -> None:
        """A piece of an op that makes rows and columns."""
        inputs = []
        cut = {o: (axis, first) for o, axis, first in self._cut_operands(op)}
        for o in op.inputs:
            if o.tensor in self.part.rows:
                inputs.append(Operand(self._own(o.tensor, i)))
            elif o in cut:
                axis, first = cut[o]
                inputs.append(self._sliced(o, axis, low, high, *first))
            else:
                inputs.append(o)
        outputs = [self._wide(o.tensor, i, low, high) for o in op.outputs]
        if op.kind == "contraction":
            outputs = [replace(outputs[0], view=self._batched(high - low))]
        self._add(op, i, inputs, outputs, phase)

    def _batched(self, rows: int) -> View:
        return View().then(("reshape", (1, rows, self.shape[1])))

    def _add(self, op: Op, i: int, inputs: Iterable[Operand], outputs: Iterable[Operand], phase: Phase) -> None:
        name = self._own(op.name, i)
        self.ops.append(replace(op, name=name, inputs=tuple(inputs), outputs=tuple(outputs), phase=phase))

    def _loss(self, targets: Operand, i: int, low: int, high: int) -> None:
        """The loss of a piece, the loss so far, and the gradient over the piece's logits."""
        loss, gradient = self.part.loss, self.part.gradient
        logits = Operand(self._own(loss.inputs[0].tensor, i))
        own_targets = self._sliced_targets(targets, low, high)
        value, lse, weight = (self._own(o.tensor, i) for o in loss.outputs)
        for name, shape in ((value, ()), (lse, (high - low,)), (weight, ())):
            self.tensors[name] = Tensor(name, shape)
        self._add(loss, i, [logits, own_targets], map(Operand, (value, lse, weight)), loss.phase)
        self._add_loss(i)
        given, counted = gradient.inputs[0], gradient.inputs[4]
        written = self._wide(gradient.outputs[0].tensor, i, low, high)
        inputs = (given, logits, own_targets, Operand(lse), counted)
        self._add(gradient, i, inputs, [written], gradient.phase)
        self.ops[-1] = replace(self.ops[-1], inplace=((0, 1),))

    def _targets(self) -> Operand:
        """The targets as a row that can be cut: as they are, or a copy."""
        operand = self.part.loss.inputs[1]
        t = self.before.tensors[operand.tensor]
        cuts = (View().then(("slice", (0, low, high, 1))) for _, low, high in self.pieces)
        if all(compose(t.shape, operand.view, cut) is not None for cut in cuts):
            return operand
        name = f"{self.part.loss.name}.targets"
        self.tensors[name] = Tensor(name, (self.shape[0],), t.dtype)
        self._pointwise(name, COPY, [operand], name)
        return Operand(name)

    def _sliced_targets(self, targets: Operand, low: int, high: int) -> Operand:
        view = compose(self.tensors[targets.tensor].shape, targets.view, View().then(("slice", (0, low, high, 1))))
        assert view is not None, "else the targets were copied"
        return Operand(targets.tensor, view)

    def _count(self, targets: Operand) -> None:
        """The number of targets that count, before the first gradient divides by it."""
        loss = self.part.loss
        weight, n = loss.outputs[2].tensor, self.shape[0]
        b = Builder([kind_of(self.tensors[targets.tensor].dtype)])
        counts = b.emit("float", b.emit("ne", ("x", 0), ("c", int(loss.attrs.get("ignore_index", -100)))))
        ones = f"{weight}.each"
        self.tensors[ones] = Tensor(ones, (n,))
        self._pointwise(ones, b.finish([counts]), [targets], ones)
        row, one = View().then(("reshape", (1, n))), View().then(("reshape", (1,)))
        sum_of = Op(f"{weight}.all", "reduce", (Operand(ones, row),), (Operand(weight, one),), {"fn": "sum"}, "loss")
        self.ops.append(sum_of)

    def _add_loss(self, i: int) -> None:
        """The losses so far as one number; the mean over all after the last piece."""
        loss, _, weight = (o.tensor for o in self.part.loss.outputs)
        b, operands = Builder(), list[Operand]()

        def read(name: str) -> Ref:
            operands.append(Operand(name))
            b.kinds.append("float")
            return "x", len(operands) - 1

        value, own = read(self._own(loss, i)), read(self._own(weight, i))
        # A piece of which no target counts has the loss 0/0.
        total = b.emit("where", b.emit("gt", own, ("c", 0.0)), b.emit("mul", value, own), ("c", 0.0))
        if i:
            total = b.emit("add", read(f"{loss}.sum{i - 1}"), total)
        last = i == len(self.pieces) - 1
        name = loss if last else f"{loss}.sum{i}"
        if last:
            total = b.emit("div", total, read(weight))
        else:
            self.tensors[name] = Tensor(name, ())
        self._pointwise(f"{loss}.add{i}", b.finish([total]), operands, name)

    def _pointwise(self, name: str, expr: Expr, inputs: Sequence[Operand], written: str) -> None:
        self.ops.append(Op(name, "pointwise", tuple(inputs), (Operand(written),), {"expr": expr}, "loss"))

    def _rows_of(self, op: Op, i: int, low: int, high: int) -> None:
        """A piece of a product that has the same rows."""
        written = op.outputs[0]
        cols = self.before.operand_shape(written)[2]
        own = self._own(written.tensor, i)
        self.tensors[own] = replace(self.before.tensors[written.tensor], name=own, shape=(high - low, cols))
        factor = Operand(self._own(op.inputs[0].tensor, i), self._batched(high - low))
        view = View().then(("reshape", (1, high - low, cols)))
        self._add(op, i, (factor, op.inputs[1]), [Operand(own, view)], op.phase)

    def _joined(self, op: Op) -> None:
        """All rows of such a product."""
        cols = self.before.operand_shape(op.outputs[0])[2]
        parts = tuple(
            Operand(self._own(op.outputs[0].tensor, i), View().then(("reshape", (1, high - low, cols))))
            for i, low, high in self.pieces
        )
        starts = {"starts": tuple(low for _, low, _ in self.pieces)}
        self.ops.append(Op(op.name, "concat", parts, op.outputs, starts, op.phase, op.source))

    def _summed(self, op: Op, i: int, low: int, high: int) -> None:
        """A piece of a product that sums over rows, added to those before it."""
        name, last = op.outputs[0].tensor, i == len(self.pieces) - 1
        wide = next(p for p, o in enumerate(op.inputs) if o.tensor in self.part.rows)
        piece = Operand(self._own(op.inputs[wide].tensor, i), self._batched(high - low))
        if wide == 0:
            piece = replace(piece, view=piece.view.then(("permute", (0, 2, 1))))
        other = self._sliced(op.inputs[1 - wide], 1 if wide == 0 else 2, low, high)
        own = self._own(name, i)
        self.tensors[own] = replace(self.before.tensors[name], name=own)
        written = replace(op.outputs[0], tensor=own)
        self._add(op, i, (piece, other) if wide == 0 else (other, piece), [written], op.phase)
        if i == 0:
            return
        before = f"{name}.sum{i - 1}" if i > 1 else self._own(name, 0)
        total = name if last else f"{name}.sum{i}"
        self.tensors.setdefault(total, replace(self.before.tensors[name], name=total))
        inputs = (Operand(own), Operand(before))
        self.ops.append(
            Op(f"{name}.add{i}", "pointwise", inputs, (Operand(total),), {"expr": _ADD}, "update", op.source, ((0, 1),))
        )
