"""A step over several micro-batches: gradients are added up, and the weights are updated once.

A captured step over b samples becomes a step over ``count * b``: forward, loss and backward run once per micro-batch,
one after the other, so that only one micro-batch's activations are alive at a time. What memory the step needs besides
is what it always needs: parameters, optimizer state and one gradient a parameter.

- Inputs hold the whole batch. Each micro-batch sees its samples through a slice: nothing is copied.
- The first micro-batch's gradient begins the sum. Later ones are added to it in place by ops of phase "update", which
  rewrites treat as any update: the contraction that makes a gradient adds it (``rewrite_apply.py``).
- The gradient of a mean cross-entropy divides by the number of targets that count. Here that number is the whole
  batch's, counted before the first micro-batch, so that the sum of the gradients is the whole batch's whatever is
  ignored where. Any other mean is divided by ``count`` in the updates.
- Each micro-batch draws random numbers of its own, from a seed made of the step's.
- What no sample changes (masks of counts, adapted weights) is calculated once.

Samples must not depend on one another in the forward pass, or the result is another one: that is so of a contrastive
loss, which is refused, and of batch normalisation over the samples, which capture does not show as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from layoutopt.capture_random import NO_DROPOUT, SEED
from layoutopt.errors import GraphError
from layoutopt.expr import Builder, kind_of
from layoutopt.graph import Expr, Op, Operand, Phase, Tensor, TrainingGraph
from layoutopt.optimizers import has_dropout
from layoutopt.passes import run_passes
from layoutopt.rewrite_logits import LEAST_BYTES
from layoutopt.view import View
from layoutopt.workload import facts

__all__ = ["AXES", "COUNT", "LEFT_OUT", "accumulated", "batch_axes", "leading_axes", "micro_batches"]

COUNT, AXES, LEFT_OUT = "micro_batches", "batch_axes", "outputs_left_out"
"""Entries of ``TrainingGraph.meta``: how many micro-batches a step has; the axis that holds the samples, by input; the
outputs of the captured step that the accumulated one has not."""

_SEED_STREAM = 1 << 20
"""The random numbers that further micro-batches' seeds are made of; a step has fewer random tensors than that."""
_MOST_SUMMED = 8
_LOSSES = {"cross_entropy": 2, "nll_loss": 1}
"""Mean losses over targets that count, and which output is the number of these."""
_LOSS_GRADIENTS = {"cross_entropy_grad": 4, "nll_loss_grad": 2}
"""Their gradients, and which input is that number."""


def accumulated(graph: TrainingGraph, count: int) -> TrainingGraph:
    """One step over ``count`` micro-batches of the size that the graph was captured with.

    Args:
        graph: captured with a backward pass, after the passes and before any rewrite.
        count: micro-batches; 1 gives the graph itself.

    Returns:
        A graph of the same parameters and state whose inputs hold ``count`` times the samples. Its loss is that of the
        whole batch. Outputs that begin with the samples' axis do so for the whole batch, unless they take a mebibyte or
        more; these, and others than that, are left out (``meta["outputs_left_out"]``).

    Raises:
        GraphError: there is nothing to accumulate, or the loss is no mean over samples.
    """
    if count < 1:
        raise GraphError(f"{count} micro-batches: expected at least 1")
    if count == 1:
        return graph
    if "rewritten" in graph.meta or micro_batches(graph) > 1:
        raise GraphError(f"graph {graph.name!r} is not as captured: accumulate micro-batches before anything else")
    out = run_passes(_Accumulation(graph, count).graph())[0]
    return out.with_ops(out.ops, meta={**out.meta, "facts": facts(out)}) if "facts" in out.meta else out


def micro_batches(graph: TrainingGraph) -> int:
    """How many micro-batches a step of the graph runs, one after the other."""
    return int(graph.meta.get(COUNT, 1))


def batch_axes(graph: TrainingGraph) -> dict[str, int]:
    """The axis along which an input holds the samples, by input; inputs that hold none are missing.

    It is what was said at capture (``meta["batch_axes"]``); else the first axis of all inputs whose first extent is the
    most common one.
    """
    inputs = {t.name: t.shape for t in graph.by_role("input") if t.shape}
    known = graph.meta.get(AXES)
    if known is not None:
        return {name: int(axis) for name, axis in known.items() if name in inputs}
    return leading_axes(inputs)


def leading_axes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Axis 0 of every shape whose first extent is the most common one among them (the earliest of several)."""
    extents = Counter(shape[0] for shape in shapes.values() if shape)
    if not extents:
        return {}
    batch = max(extents, key=lambda n: extents[n])
    return {name: 0 for name, shape in shapes.items() if shape and shape[0] == batch}


@dataclass(frozen=True)
class _Loss:
    """How the losses of micro-batches make that of the batch.

    Attributes:
        op: what calculates the mean.
        weight: the tensor that counts the targets of a cross-entropy; empty for a plain mean.
    """

    op: Op
    weight: str = ""


def _loss(graph: TrainingGraph) -> _Loss:
    """The mean that the loss is, seen through multiplications and additions of constants.

    Raises:
        GraphError: it is none.
    """
    op = graph.producer.get(graph.outputs[0])
    while op is not None and op.kind in ("view", "pointwise") and len(op.inputs) == 1 and _is_affine(op):
        op = graph.producer.get(op.inputs[0].tensor)
    if op is not None and op.kind in _LOSSES:
        return _Loss(op, op.outputs[_LOSSES[op.kind]].tensor)
    if op is not None and op.kind == "reduce" and op.attrs["fn"] == "mean":
        return _Loss(op)
    found = f"{op.kind} {op.attrs.get('fn', '')}".strip() if op is not None else "no op"
    raise GraphError(
        f"the loss of graph {graph.name!r} is made by {found}: micro-batches need one mean over samples "
        "(a cross-entropy or reduce mean), whose gradients add up; plan the whole batch"
    )


def _is_affine(op: Op) -> bool:
    """Whether a program of one input only adds and multiplies constants."""
    if op.kind == "view":
        return True
    expr: Expr = op.attrs["expr"]
    return all(
        name == "neg"
        or (name in ("add", "sub", "mul") and any(r[0] == "c" for r in refs))
        or (name == "div" and refs[1][0] == "c")
        for name, *refs in expr.code
    )


class _Accumulation:
    """Writes the graph of several micro-batches."""

    def __init__(self, graph: TrainingGraph, count: int) -> None:
        self.before, self.count = graph, count
        self.loss = _loss(graph)
        self.axes = batch_axes(graph)
        self.dropout = has_dropout(graph)
        self.changing = self._changing()
        if not any(o.tensor in self.changing for o in self.loss.op.inputs):
            raise GraphError(
                f"the loss of graph {graph.name!r} depends on none of the inputs that hold samples "
                f"({', '.join(self.axes) or 'there are none'}): say which do with capture(batch_axes=...)"
            )
        self.summed = self._summed()
        self.left_out = [name for name in graph.outputs[1:] if name not in self.summed and not self._joinable(name)]
        self.tensors = self._shared_tensors()
        self.constants = dict(graph.constants)
        self.ops: list[Op] = []
        self.written: set[str] = set()

    # ---- what changes from micro-batch to micro-batch ----------------------------------------------------------------

    def _changing(self) -> set[str]:
        """Tensors of which every micro-batch has its own: samples, random numbers, and what depends on them."""
        found = set(self.axes) | ({SEED} if self.dropout else set())
        for op in self.before.ops:
            if op.phase != "update" and any(o.tensor in found for o in op.inputs):
                for _, i in op.inplace:
                    if op.inputs[i].tensor not in found:
                        raise GraphError(
                            f"op {op.name} changes {op.inputs[i].tensor} within the step, once per micro-batch: "
                            "plan the whole batch"
                        )
                found |= {o.tensor for o in op.outputs}
        return found

    def _changes(self, op: Op) -> bool:
        return op.phase != "update" and any(o.tensor in self.changing for o in op.outputs)

    def _summed(self) -> list[str]:
        """Gradients: what updates read, and outputs that are one."""
        graph = self.before
        read = [o.tensor for op in graph.ops if op.phase == "update" for o in op.inputs]
        kept = [name for name in graph.outputs[1:] if graph.tensors[name].role == "gradient"]
        out = [name for name in dict.fromkeys((*read, *kept)) if name in self.changing]
        unfit = [name for name in out if name in self.axes or name == SEED]
        if unfit or not out:
            what = f"updates read {unfit[0]}, which is no gradient" if unfit else "it has no gradients"
            raise GraphError(f"graph {graph.name!r} cannot be accumulated: {what}; capture a training step")
        return out

    def _joinable(self, name: str) -> bool:
        """Whether an output can be given for the whole batch: it begins with the samples and is not too large."""
        t = self.before.tensors[name]
        if name not in self.changing:
            return True
        size = min(self.before.tensors[n].shape[axis] for n, axis in self.axes.items())
        whole = t.size_elems * t.item_bytes * self.count
        return name in self.before.producer and bool(t.shape) and t.shape[0] % size == 0 and whole < LEAST_BYTES

    def _shared_tensors(self) -> dict[str, Tensor]:
        """What there is once: with inputs of the whole batch."""
        out = {}
        for name, t in self.before.tensors.items():
            if name in self.axes:
                axis = self.axes[name]
                out[name] = replace(t, shape=(*t.shape[:axis], t.shape[axis] * self.count, *t.shape[axis + 1 :]))
            elif name not in self.changing or name == SEED:
                out[name] = t
        return out

    # ---- names -------------------------------------------------------------------------------------------------------

    def _own(self, name: str, i: int) -> str:
        """What a tensor or op that changes is called in a micro-batch."""
        return f"{name}@{i}"

    def _operand(self, operand: Operand, i: int) -> Operand:
        """An operand as a micro-batch sees it."""
        name = operand.tensor
        if name in self.axes:
            axis, size = self.axes[name], self.before.tensors[name].shape[self.axes[name]]
            cut = View().then(("slice", (axis, i * size, (i + 1) * size, 1)))
            return Operand(name, cut.then(*operand.view.steps))
        if name == SEED and self.dropout:
            return Operand(SEED if i == 0 else self._own(SEED, i), operand.view)
        return replace(operand, tensor=self._own(name, i)) if name in self.changing else operand

    # ---- writing -----------------------------------------------------------------------------------------------------

    def graph(self) -> TrainingGraph:
        """The result, before the passes."""
        before = self.before
        if self.dropout:
            self._seeds()
        if self.loss.weight:
            self._count_targets()
        for i in range(self.count):
            for op in before.ops:
                if op.phase != "update":
                    self._step(op, i)
            if i:
                self._add_gradients(i)
        scaled = self._scaled()
        for op in before.ops:
            if op.phase == "update":
                self.ops.append(self._update(op, scaled))
        outputs = tuple(name for name in before.outputs if name not in self.left_out)
        return TrainingGraph(before.name, self.tensors, self.ops, outputs, self.constants, self._meta())

    def _step(self, op: Op, i: int) -> None:
        """An op of the forward or backward pass in one micro-batch, and what follows from its results."""
        name = self._own(op.name, i) if self._changes(op) else op.name
        if name in self.written:
            return
        self.written.add(name)
        if not self._changes(op):
            self.ops.append(op)
            return
        for o in op.outputs:
            t = self.before.tensors[o.tensor]
            role = "activation" if t.role == "output" else t.role
            self.tensors[self._own(t.name, i)] = replace(t, name=self._own(t.name, i), role=role)
        inputs = [self._operand(o, i) for o in op.inputs]
        outputs = tuple(replace(o, tensor=self._own(o.tensor, i)) for o in op.outputs)
        place = _LOSS_GRADIENTS.get(op.kind)
        if self.loss.weight and place is not None:
            if op.inputs[place].tensor != self.loss.weight:
                raise GraphError(f"graph {self.before.name!r} has several losses ({op.name}): plan the whole batch")
            inputs[place] = Operand(self._all_targets, op.inputs[place].view)
        self.ops.append(replace(op, name=name, inputs=tuple(inputs), outputs=outputs))
        made = {o.tensor for o in op.outputs}
        if self.before.outputs[0] in made:
            self._add_loss(i)
        if i == self.count - 1:
            for out in self.before.outputs[1:]:
                if out in made and out not in self.summed and out not in self.left_out:
                    self._join(out)

    def _pointwise(
        self, name: str, expr: Expr, inputs: Sequence[Operand], out: Tensor, phase: Phase, inplace: int | None = None
    ) -> str:
        """A pointwise op over the whole of its result."""
        self.tensors[out.name] = out
        pairs = () if inplace is None else ((0, inplace),)
        self.ops.append(
            Op(name, "pointwise", tuple(inputs), (Operand(out.name),), {"expr": expr}, phase, "", pairs),
        )
        return out.name

    def _seeds(self) -> None:
        """Seeds of the further micro-batches; under the one that drops nothing, theirs drop nothing either."""
        for i in range(1, self.count):
            b = Builder(["int"])
            drawn = b.emit("rand", ("x", 0), ("c", _SEED_STREAM), ("c", i))
            whole = b.emit("int", b.emit("mul", drawn, ("c", 2.0**24)))
            kept = b.emit("where", b.emit("eq", ("x", 0), ("c", NO_DROPOUT)), ("c", NO_DROPOUT), whole)
            name = self._own(SEED, i)
            self._pointwise(name, b.finish([kept]), [Operand(SEED)], Tensor(name, (), "int32"), "forward")

    @property
    def _all_targets(self) -> str:
        return f"{self.loss.weight}.all"

    def _count_targets(self) -> None:
        """How many targets of the whole batch count, before the first micro-batch's gradient needs it."""
        target = self.loss.op.inputs[1]
        whole = self._whole(target)
        if whole is not None:
            parts = [(self._all_targets, whole)]
        else:
            chain = self._targets_made_by(target.tensor)
            for i in range(self.count):
                for op in chain:
                    self._step(op, i)
            parts = [(f"{self.loss.weight}.of@{i}", self._operand(target, i)) for i in range(self.count)]
        for name, operand in parts:
            self._count(name, operand)
        if whole is None:
            self._sum([name for name, _ in parts], self._all_targets)

    def _whole(self, target: Operand) -> Operand | None:
        """All micro-batches' targets at once, where they are an input that is only seen as a row."""
        axis = self.axes.get(target.tensor)
        if axis != 0 or any(step.kind != "reshape" for step in target.view.steps):
            return None
        shape = self.tensors[target.tensor].shape
        return Operand(target.tensor, View().then(("reshape", (prod(shape),))).simplified(shape))

    def _targets_made_by(self, target: str) -> list[Op]:
        """The ops that make targets from inputs (shifted by a token, say), in order."""
        graph, needed, chain = self.before, {target}, list[Op]()
        for op in reversed(graph.ops):
            if op.phase != "update" and any(o.tensor in needed for o in op.outputs):
                needed |= {o.tensor for o in op.inputs}
                chain.append(op)
        learnt = sorted(name for name in needed if graph.tensors[name].role in ("parameter", "state"))
        if learnt:
            raise GraphError(
                f"the targets of graph {graph.name!r} depend on {learnt[0]}, so that they cannot be counted before the "
                "first micro-batch: plan the whole batch"
            )
        return chain[::-1]

    def _count(self, name: str, target: Operand) -> None:
        """The number of targets of one operand that are not ignored, as a scalar."""
        n = prod(target.view.shape(self.tensors[target.tensor].shape))
        ignored = int(self.loss.op.attrs.get("ignore_index", -100))
        b = Builder([kind_of(self.tensors[target.tensor].dtype)])
        counts = b.emit("float", b.emit("ne", ("x", 0), ("c", ignored)))
        ones = self._pointwise(f"{name}.ones", b.finish([counts]), [target], Tensor(f"{name}.ones", (n,)), "loss")
        self.tensors[name] = Tensor(name, ())
        row, one = View().then(("reshape", (1, n))), View().then(("reshape", (1,)))
        self.ops.append(Op(name, "reduce", (Operand(ones, row),), (Operand(name, one),), {"fn": "sum"}, "loss"))

    def _sum(self, names: Sequence[str], result: str) -> None:
        """The sum of scalars, a few at a time."""
        left = list(names)
        while left:
            few, left = left[:_MOST_SUMMED], left[_MOST_SUMMED:]
            b = Builder(["float"] * len(few))
            total: Any = ("x", 0)
            for position in range(1, len(few)):
                total = b.emit("add", total, ("x", position))
            name = f"{result}.{len(left)}" if left else result
            self._pointwise(name, b.finish([total]), list(map(Operand, few)), Tensor(name, ()), "loss")
            left = [name, *left] if left else []

    def _add_loss(self, i: int) -> None:
        """The losses so far as one number; that of the whole batch after the last."""
        loss, last = self.before.outputs[0], i == self.count - 1
        operands = [Operand(self._own(loss, i))]
        if self.loss.weight:
            operands.append(Operand(self._own(self.loss.weight, i)))
        b = Builder()

        def read(operand: Operand) -> Any:
            if operand not in operands:
                operands.append(operand)
            b.kinds[:] = ["float"] * len(operands)
            return "x", operands.index(operand)

        value = read(operands[0])
        if self.loss.weight:
            weight = read(operands[1])
            # A micro-batch of which no target counts has the loss 0/0.
            value = b.emit("where", b.emit("gt", weight, ("c", 0.0)), b.emit("mul", value, weight), ("c", 0.0))
        if i:
            value = b.emit("add", read(Operand(f"{loss}.sum@{i - 1}")), value)
        if last:
            total = read(Operand(self._all_targets)) if self.loss.weight else ("c", float(self.count))
            value = b.emit("div", value, total)
        name = loss if last else f"{loss}.sum@{i}"
        out = self.before.tensors[loss] if last else Tensor(name, ())
        self._pointwise(f"{loss}.add@{i}", b.finish([value]), operands, out, "loss")

    def _join(self, name: str) -> None:
        """An output of the whole batch, of the micro-batches' own."""
        t = self.before.tensors[name]
        rows, rest = t.shape[0], prod(t.shape[1:])
        part, whole = (View().then(("reshape", (1, n, rest))) for n in (rows, rows * self.count))
        self.tensors[name] = replace(t, shape=(rows * self.count, *t.shape[1:]))
        inputs = tuple(Operand(self._own(name, i), part) for i in range(self.count))
        starts = {"starts": tuple(i * rows for i in range(self.count))}
        self.ops.append(Op(f"{name}.join", "concat", inputs, (Operand(name, whole),), starts, "forward"))

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _add_gradients(self, i: int) -> None:
        """Add a micro-batch's gradients to those before it; equal shapes side by side, so that they share launches."""
        add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
        for name in sorted(self.summed, key=lambda n: self.before.tensors[n].shape):
            t = self.before.tensors[name]
            so_far = self._own(name, 0) if i == 1 else f"{name}.sum@{i - 1}"
            total = replace(t, name=name if i == self.count - 1 else f"{name}.sum@{i}")
            inputs = [Operand(self._own(name, i)), Operand(so_far)]
            self._pointwise(f"accumulate:{name}@{i}", add, inputs, total, "update", 1)

    def _scaled(self) -> set[str]:
        """Gradients of a plain mean that updates have to divide; those that are outputs are divided here."""
        if self.loss.weight:
            return set()
        for name in self.summed:
            if name in self.before.outputs:
                t = self.before.tensors[name]
                position = next(p for p, op in enumerate(self.ops) if op.outputs[0].tensor == name)
                total = f"{name}.sum@{self.count - 1}"
                self.tensors[total] = replace(t, name=total)
                self.ops[position] = replace(self.ops[position], outputs=(Operand(total),))
                share = Expr((("mul", ("x", 0), ("c", 1 / self.count)),), (("t", 0),))
                self._pointwise(f"share:{name}", share, [Operand(total)], t, "update", 0)
        return {name for name in self.summed if name not in self.before.outputs}

    def _update(self, op: Op, scaled: Iterable[str]) -> Op:
        """An update, with sums of gradients divided where they are not yet."""
        places = {i for i, o in enumerate(op.inputs) if o.tensor in scaled}
        if not places:
            return op
        b = Builder([kind_of(self.tensors[o.tensor].dtype) for o in op.inputs])
        refs = [
            b.emit("mul", ("x", i), ("c", 1 / self.count)) if i in places else ("x", i) for i in range(len(b.kinds))
        ]
        return replace(op, attrs={**op.attrs, "expr": b.finish(b.inline(op.attrs["expr"], refs))})

    def _meta(self) -> dict[str, Any]:
        """The captured graph's, with what is no longer so."""
        meta = {**self.before.meta, COUNT: self.count, AXES: dict(self.axes)}
        if self.left_out:
            meta[LEFT_OUT] = list(self.left_out)
        if "batch" in meta:
            meta["batch"] = {
                name: {**entry, "shape": list(self.tensors[name].shape)} if name in self.axes else entry
                for name, entry in meta["batch"].items()
            }
        return meta
