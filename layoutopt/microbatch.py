"""A step in micro-batches: the samples a few at a time, gradients added up, the weights updated once.

Forward, loss and backward run once per micro-batch, one after the other, so that only one micro-batch's activations are
alive at a time. What memory the step needs besides is what it always needs: parameters, optimizer state and one
gradient a parameter. The graph is a rewrite of the captured step (``micro:4`` in ``layoutopt/rewrites.py``): inputs,
parameters, state and the loss are the same, so that whoever feeds and reads a step need not know.

- Inputs hold the whole batch. Each micro-batch sees its samples through a slice: nothing is copied.
- Where the samples are in every other tensor, ``layoutopt/samples.py`` says: a micro-batch's tensors are the parts of
  the whole step's, its sums over samples add up to the whole step's. What would need several samples at once, as batch
  normalisation does, is refused.
- The first micro-batch's gradient begins the sum. Later ones are added to it in place by ops of phase "update", which
  rewrites treat as any update: the contraction that makes a gradient adds it (``rewrite_apply.py``).
- The gradient of a mean divides by the whole batch in each micro-batch. For a cross-entropy that is the number of
  targets that count, wherever some are ignored: it is counted before the first micro-batch.
- Random numbers hang on an element's place in the whole batch, and are those of the whole step.
- What no sample changes (places of tokens, adapted weights) is calculated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from layoutopt.errors import GraphError
from layoutopt.expr import Builder, kind_of
from layoutopt.graph import Expr, Op, Operand, Phase, Tensor, TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.rewrite_logits import LEAST_BYTES
from layoutopt.samples import SUM, Place, is_linear, operand_of_part, spread, trimmed
from layoutopt.view import View
from layoutopt.workload import facts

__all__ = [
    "AXES",
    "COUNT",
    "LEFT_OUT",
    "batch_axes",
    "counts",
    "in_micro_batches",
    "in_words",
    "leading_axes",
    "micro_batches",
    "samples",
]

COUNT, AXES, LEFT_OUT = "micro_batches", "batch_axes", "outputs_left_out"
"""Entries of ``TrainingGraph.meta``: how many micro-batches a step has; the axis that holds the samples, by input; the
outputs of the captured step that the one in micro-batches has not."""

_LOSSES = {"cross_entropy": 2, "nll_loss": 1}
"""Mean losses over targets that count, and which output is the number of these."""
_LOSS_GRADIENTS = {"cross_entropy_grad": 4, "nll_loss_grad": 2}
"""Their gradients, and which input is that number."""


def in_micro_batches(graph: TrainingGraph, count: int) -> TrainingGraph:
    """The same step, ``count`` equal parts of its samples one after the other.

    Args:
        graph: captured with a backward pass, after the passes and before any rewrite.
        count: micro-batches; 1 gives the graph itself.

    Returns:
        A graph of the same inputs, parameters and state, whose loss and updates are the same. Outputs that hold
        something of every sample do so too, unless they take a mebibyte or more; these are left out
        (``meta["outputs_left_out"]``).

    Raises:
        GraphError: the samples cannot be cut into so many, samples depend on one another, or there is no loss that is
            one mean or sum over them.
    """
    if count == 1:
        return graph
    if micro_batches(graph) > 1:
        raise GraphError(f"a step of graph {graph.name!r} runs {in_words(graph)} already: cut the whole batch instead")
    if "rewritten" in graph.meta:
        raise GraphError(f"graph {graph.name!r} is not as captured: cut it into micro-batches before other rewrites")
    batch = samples(graph)
    if batch == 1:
        raise GraphError(f"a step of graph {graph.name!r} takes one sample: micro-batches need a larger batch")
    if count < 1 or batch % count:
        fitting = ", ".join(map(str, counts(graph)))
        raise GraphError(
            f"the {batch} samples of graph {graph.name!r} cannot be cut into {count} equal micro-batches: "
            f"choose one of {fitting}"
        )
    out = run_passes(_Writer(graph, count).graph())[0]
    return out.with_ops(out.ops, meta={**out.meta, "facts": facts(out)}) if "facts" in out.meta else out


def micro_batches(graph: TrainingGraph) -> int:
    """How many micro-batches a step of the graph runs, one after the other."""
    return int(graph.meta.get(COUNT, 1))


def samples(graph: TrainingGraph) -> int:
    """How many samples a step takes; 1 where no input is known to hold several."""
    return max((graph.tensors[name].shape[axis] for name, axis in batch_axes(graph).items()), default=1)


def counts(graph: TrainingGraph) -> list[int]:
    """Into how many equal micro-batches a step's samples may be cut, ascending."""
    batch = samples(graph)
    return [n for n in range(1, batch + 1) if batch % n == 0]


def in_words(graph: TrainingGraph) -> str:
    """How a step goes through its samples, for people: ``2 micro-batches of 8 samples``."""
    count, batch = micro_batches(graph), samples(graph)
    whole = f"{batch} samples at once" if batch > 1 else "1 sample"
    return whole if count == 1 else f"{count} micro-batches of {batch // count} sample{'s' * (batch > count)}"


def batch_axes(graph: TrainingGraph) -> dict[str, int]:
    """The axis along which an input holds the samples, by input; inputs that hold none are missing.

    It is what was said at capture (``meta["batch_axes"]``); else the first axis of all inputs whose first extent is the
    most common one.

    Raises:
        GraphError: an input has not the axis that was said.
    """
    inputs = {t.name: t.shape for t in graph.by_role("input") if t.shape}
    known = graph.meta.get(AXES)
    if known is not None:
        axes = {name: int(axis) for name, axis in known.items() if name in inputs}
        for name, axis in axes.items():
            if not 0 <= axis < len(inputs[name]):
                raise GraphError(
                    f"batch axis {axis} of input {name!r}, which has the shape {inputs[name]}: expected one of its axes"
                )
        return axes
    return leading_axes(inputs)


def leading_axes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Axis 0 of every shape whose first extent is the most common one among them (the earliest of several)."""
    extents = Counter(shape[0] for shape in shapes.values() if shape)
    if not extents:
        return {}
    batch = max(extents, key=lambda n: extents[n])
    return {name: 0 for name, shape in shapes.items() if shape and shape[0] == batch}


# ---- the loss -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """How the losses of micro-batches make that of the batch.

    Attributes:
        op: what takes the mean, or adds up.
        weight: the tensor that counts the targets of a cross-entropy; empty for others.
        chain: names of the ops from there to the loss.
        linear: nothing is added on the way, so that parts of a sum stay parts.
    """

    op: Op
    weight: str
    chain: frozenset[str]
    linear: bool

    @property
    def is_mean(self) -> bool:
        """Whether the parts' losses are averaged rather than added up."""
        return bool(self.weight) or self.op.attrs.get("fn") == "mean"


def _loss(graph: TrainingGraph) -> _Loss:
    """The mean or sum that the loss is, seen through multiplications and additions of constants.

    Raises:
        GraphError: it is none.
    """
    chain, linear = set[str](), True
    op = graph.producer.get(graph.outputs[0])
    while op is not None and op.kind == "pointwise" and len(op.inputs) == 1 and _is_affine(op.attrs["expr"]):
        chain.add(op.name)
        linear = linear and is_linear(op.attrs["expr"], [0])
        op = graph.producer.get(op.inputs[0].tensor)
    if op is not None and op.kind in _LOSSES:
        return _Loss(op, op.outputs[_LOSSES[op.kind]].tensor, frozenset({*chain, op.name}), linear)
    if op is not None and op.kind == "reduce" and (op.attrs["fn"] == "mean" or (op.attrs["fn"] == "sum" and linear)):
        return _Loss(op, "", frozenset({*chain, op.name}), linear)
    found = f"{op.kind} {op.attrs.get('fn', '')}".strip() if op is not None else "no op"
    raise GraphError(
        f"the loss of graph {graph.name!r} is made by {found}: micro-batches need one mean or sum over samples "
        "(a cross-entropy, reduce mean or reduce sum), whose parts add up; plan the whole batch"
    )


def _is_affine(expr: Expr) -> bool:
    """Whether a program of one input only adds and multiplies constants."""
    return all(
        name == "neg"
        or (name in ("add", "sub", "mul") and any(r[0] == "c" for r in refs))
        or (name == "div" and refs[1][0] == "c")
        for name, *refs in expr.code
    )


class _Writer:
    """Writes the graph of several micro-batches."""

    def __init__(self, graph: TrainingGraph, count: int) -> None:
        self.before, self.count = graph, count
        self.loss = _loss(graph)
        self.axes = batch_axes(graph)
        self.spread = spread(graph, self.axes, self.loss.chain)
        self.where, self.part = self.spread.where, self.spread.samples // count
        self.targets = self._target_ops()
        self.whole = set(self.axes) | {o.tensor for op in self.targets for o in op.outputs}
        self._check_loss()
        self.summed = self._summed()
        self.left_out = [name for name in graph.outputs[1:] if name not in self.summed and not self._joinable(name)]
        self.tensors = {name: t for name, t in graph.tensors.items() if not self._is_own(name)}
        self.constants = dict(graph.constants)
        self.ops: list[Op] = []
        self.written: set[str] = set()

    # ---- what changes from micro-batch to micro-batch ---------------------------------------------------------------

    def _is_own(self, name: str) -> bool:
        """Whether every micro-batch has a tensor of its own."""
        return name in self.where and name not in self.whole

    def _check_loss(self) -> None:
        loss, graph = self.loss, self.before
        held = [self.where.get(o.tensor) for o in loss.op.inputs]
        if not any(held):
            raise GraphError(
                f"the loss of graph {graph.name!r} depends on none of the inputs that hold samples "
                f"({', '.join(self.axes)}): say which do with capture(batch_axes=...)"
            )
        if not loss.linear and not any(isinstance(w, Place) for w in held):
            raise GraphError(
                f"the loss of graph {graph.name!r} adds to a sum over the samples: micro-batches need one mean or sum "
                "over samples, whose parts add up; plan the whole batch"
            )

    def _target_ops(self) -> list[Op]:
        """The ops that make a cross-entropy's targets from inputs (shifted by a token, say), in order."""
        if not self.loss.weight:
            return []
        graph, needed, found = self.before, {self.loss.op.inputs[1].tensor}, list[Op]()
        for op in reversed(graph.ops):
            if op.phase != "update" and any(o.tensor in needed for o in op.outputs):
                needed |= {o.tensor for o in op.inputs}
                found.append(op)
        learnt = sorted(name for name in needed if graph.tensors[name].role in ("parameter", "state"))
        if learnt:
            raise GraphError(
                f"the targets of graph {graph.name!r} depend on {learnt[0]}, so that they cannot be counted before the "
                "first micro-batch: plan the whole batch"
            )
        return found[::-1]

    def _summed(self) -> list[str]:
        """Gradients: what updates read, and outputs that are one."""
        graph = self.before
        read = [o.tensor for op in graph.ops if op.phase == "update" for o in op.inputs]
        kept = [name for name in graph.outputs[1:] if graph.tensors[name].role == "gradient"]
        out = [name for name in dict.fromkeys((*read, *kept)) if self.where.get(name) == SUM]
        if not out:
            raise GraphError(
                f"graph {graph.name!r} has no gradients to add up: micro-batches are parts of a training step"
            )
        return out

    def _joinable(self, name: str) -> bool:
        """Whether an output can be given for the whole batch: it holds something of every sample, and not too much."""
        t = self.before.tensors[name]
        where = self.where.get(name)
        return where is None or (where != SUM and t.size_elems * t.item_bytes < LEAST_BYTES)

    # ---- names ------------------------------------------------------------------------------------------------------

    def _own(self, name: str, i: int) -> str:
        """What a tensor or op that changes is called in a micro-batch."""
        return f"{name}@{i}"

    def _operand(self, operand: Operand, seen: Place | None, i: int) -> Operand:
        """An operand as a micro-batch sees it, the samples being at ``seen`` in it."""
        name, where = operand.tensor, self.where.get(operand.tensor)
        own = self._is_own(name)
        if seen is None:
            return replace(operand, tensor=self._own(name, i)) if own else operand
        place = where if isinstance(where, Place) else None
        if own:
            shape = self.before.tensors[name].shape
            view = trimmed(operand.view, shape, 0, place, self.spread.samples, self.part, seen)
            return Operand(self._own(name, i), view)
        view = operand_of_part(self.before, operand, place, seen, self.spread.samples, self.part, i)
        return Operand(name, view)

    def _own_tensor(self, name: str, i: int) -> Tensor:
        """A micro-batch's part of a tensor."""
        t, where = self.before.tensors[name], self.where[name]
        shape = list(t.shape)
        if isinstance(where, Place):
            shape[where.axis] = shape[where.axis] // self.spread.samples * self.part
        role = "activation" if t.role == "output" else t.role
        return replace(t, name=self._own(name, i), shape=tuple(shape), role=role)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def graph(self) -> TrainingGraph:
        """The result, before the passes."""
        before = self.before
        if self.loss.weight:
            self._count_targets()
        for i in range(self.count):
            for op in before.ops:
                if op.phase != "update":
                    self._step(op, i)
            if i:
                self._add_gradients(i)
        self.ops += [op for op in before.ops if op.phase == "update"]
        outputs = tuple(name for name in before.outputs if name not in self.left_out)
        return TrainingGraph(before.name, self.tensors, self.ops, outputs, self.constants, self._meta())

    def _step(self, op: Op, i: int) -> None:
        """An op of the forward or backward pass in one micro-batch, and what follows from its results."""
        own = any(self._is_own(o.tensor) for o in op.outputs)
        name = self._own(op.name, i) if own else op.name
        if name in self.written:
            return
        self.written.add(name)
        if not own:
            self.ops.append(op)
            return
        for o in op.outputs:
            self.tensors[self._own(o.tensor, i)] = self._own_tensor(o.tensor, i)
        seen = self.spread.seen[op.name]
        operands = [self._operand(o, at, i) for o, at in zip(op.operands, seen, strict=True)]
        inputs, outputs = operands[: len(op.inputs)], operands[len(op.inputs) :]
        place = _LOSS_GRADIENTS.get(op.kind)
        if self.loss.weight and place is not None:
            if op.inputs[place].tensor != self.loss.weight:
                raise GraphError(f"graph {self.before.name!r} has several losses ({op.name}): plan the whole batch")
            inputs[place] = Operand(self._all_targets, op.inputs[place].view)
        self.ops.append(replace(op, name=name, inputs=tuple(inputs), outputs=tuple(outputs)))
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

    # ---- losses and outputs -----------------------------------------------------------------------------------------

    @property
    def _all_targets(self) -> str:
        """Of the whole batch, how many targets count."""
        return f"{self.loss.weight}.all"

    def _count_targets(self) -> None:
        """How many targets of the whole batch count, before the first micro-batch's gradient needs it."""
        for op in self.targets:
            self._step(op, 0)
        target, name = self.loss.op.inputs[1], self._all_targets
        n = prod(self.before.operand_shape(target))
        ignored = int(self.loss.op.attrs.get("ignore_index", -100))
        b = Builder([kind_of(self.tensors[target.tensor].dtype)])
        counts = b.emit("float", b.emit("ne", ("x", 0), ("c", ignored)))
        ones = self._pointwise(f"{name}.ones", b.finish([counts]), [target], Tensor(f"{name}.ones", (n,)), "loss")
        self.tensors[name] = Tensor(name, ())
        row, one = View().then(("reshape", (1, n))), View().then(("reshape", (1,)))
        self.ops.append(Op(name, "reduce", (Operand(ones, row),), (Operand(name, one),), {"fn": "sum"}, "loss"))

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
        if last and self._averaged:
            total = read(Operand(self._all_targets)) if self.loss.weight else ("c", float(self.count))
            value = b.emit("div", value, total)
        name = loss if last else f"{loss}.sum@{i}"
        out = self.before.tensors[loss] if last else Tensor(name, ())
        self._pointwise(f"{loss}.add@{i}", b.finish([value]), operands, out, "loss")

    @property
    def _averaged(self) -> bool:
        """Whether the parts' losses are means over their samples; a mean of a sum over samples is a sum."""
        return self.loss.is_mean and any(isinstance(self.where.get(o.tensor), Place) for o in self.loss.op.inputs)

    def _join(self, name: str) -> None:
        """An output of the whole batch, of the micro-batches' own."""
        t, where = self.before.tensors[name], self.where[name]
        assert isinstance(where, Place)
        self.tensors[name] = t
        before, rest = prod(t.shape[: where.axis]) * where.outer, prod(t.shape[where.axis + 1 :])
        rows = self.part * where.inner
        part, whole = (View().then(("reshape", (before, n, rest))) for n in (rows, rows * self.count))
        inputs = tuple(Operand(self._own(name, i), part) for i in range(self.count))
        starts = {"starts": tuple(i * rows for i in range(self.count))}
        self.ops.append(Op(f"{name}.join", "concat", inputs, (Operand(name, whole),), starts, "forward"))

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _add_gradients(self, i: int) -> None:
        """Add a micro-batch's gradients to those before it; equal shapes side by side, so that they share launches."""
        add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
        for name in sorted(self.summed, key=lambda n: self.before.tensors[n].shape):
            t = self.before.tensors[name]
            so_far = self._own(name, 0) if i == 1 else f"{name}.sum@{i - 1}"
            total = replace(t, name=name if i == self.count - 1 else f"{name}.sum@{i}")
            inputs = [Operand(self._own(name, i)), Operand(so_far)]
            self._pointwise(f"accumulate:{name}@{i}", add, inputs, total, "update", 1)

    def _meta(self) -> dict[str, Any]:
        """The captured graph's, with what is no longer so."""
        meta = {**self.before.meta, COUNT: self.count, AXES: dict(self.axes)}
        if self.left_out:
            meta[LEFT_OUT] = list(self.left_out)
        return meta
