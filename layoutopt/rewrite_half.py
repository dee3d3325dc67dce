"""Float16 storage: large activations, gradients and weights lie in memory as halves; all arithmetic stays float32.

Kernels load halves as floats and round to the nearest half where they store. What this rewrite has to see to is what
halves cannot hold:

- *Range.* A tensor stays float32 where a number beyond 65504 may be in it: masks made of huge constants, as far as they
  are passed on, and what only a sum reads (squares). Scores with such a mask applied end at -65504, which softmax makes
  the same of. Statistics, losses, sums by row and everything small stay float32 as well, and so do the operands of
  convolutions, whose kernels know float32 only.
- *Small gradients.* The loss' gradient is multiplied by ``half.scale``, and with it every gradient of the step; updates
  divide by it again. An element of a gradient that is no number, because a half overflowed on its way, leaves its
  parameter and state as they are. Overflow in the chain of activations' gradients reaches its end: the deepest gradient
  is summed up (``half.check``), and where the sum is no number, the scale is halved; after ``_GROWTH_STEPS`` good steps
  it doubles again, up to where it began. All of it happens on the device.
- *Small updates.* A weight that moves by less than half of its spacing would never move, nor would a mean of squares
  that forgets a thousandth a step. Updates are calculated in float32, and of the result one of the two halves beside it
  is stored, at random, with the result for a mean (``round16``; ``half.seed`` is another in every step). A float32 copy
  of each weight would do as well, and take three times the bytes. State is stored in a form that suits halves
  (``layoutopt/codes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from layoutopt.codes import META, Code
from layoutopt.errors import GraphError
from layoutopt.expr import Builder, Ref, kind_of
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.microbatch import micro_batches
from layoutopt.view import IDENTITY, View

__all__ = ["CHECK", "CLEAN", "SCALE", "SEED", "half_storage"]

SCALE, CLEAN, SEED, CHECK = "half.scale", "half.clean", "half.seed", "half.check"

_FIRST_SCALE = 2.0**14
_GROWTH_STEPS = 500
_LEAST_ELEMS = 1024
"""Smaller tensors stay float32: what they would save is nothing beside what they may hold (logits, statistics)."""

_LARGEST = 65504.0
_FLOATS = 3e38
_ROLES = ("parameter", "state", "activation", "gradient", "output")
_SQUARES = ".exp_avg_sq"
"""What Adam's mean of squared gradients is called, which is not negative."""

_STATE_FACTOR = 1024.0
"""Gradients from 6e-11 to 64 in halves; Adam adds 1e-8 to the root of their squares."""

_CONVOLUTIONS = ("conv", "conv_grad_input", "conv_grad_weight")
_PASSING = frozenset(("pointwise", "contraction", "concat", "gather", "reduce", "log_softmax"))
"""Kinds whose results may be as large as their operands."""

_LOSS_GRADIENTS = ("cross_entropy_grad", "nll_loss_grad")
_FLOAT32: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "iota": ((), (0,)),
    "scatter_add": ((), (0,)),
    "layer_norm": ((), (1, 2)),
    "layer_norm_grad": ((2, 3), ()),
    "layer_norm_affine": ((2, 3), ()),
    "nll_loss": ((), (0, 1)),
    "nll_loss_grad": ((0, 2), ()),
    "cross_entropy": ((), (0, 1, 2)),
    "cross_entropy_grad": ((0, 3, 4), ()),
    "attention": ((), (1, 2)),
    "attention_grad": ((4, 5), ()),
    "quantize": ((), (1,)),
    "dequantize": ((1,), ()),
}
"""Inputs and outputs that stay float32 whatever their size."""


def half_storage(graph: TrainingGraph) -> TrainingGraph:
    """The graph with its large numbers stored as float16.

    Args:
        graph: views folded; with a backward pass or without.

    Returns:
        A graph of the same ops on other types; one that trains has more scalar state, and updates that use it.

    Raises:
        GraphError: it is not clear where the backward pass begins, or gradients are applied where they are made (the
            rewrite "apply"), so that they cannot be scaled.
    """
    if any(op.kind == "contraction" and op.inplace for op in graph.ops):
        raise GraphError(
            f"graph {graph.name!r} applies gradients where they are made: store it as float16 without that"
        )
    huge, masked = _huge(graph)
    halves = _halves(graph, huge)
    if not halves:
        return graph
    tensors = {name: replace(t, dtype="float16") if name in halves else t for name, t in graph.tensors.items()}
    ops = [_bounded(op, masked & halves, tensors) for op in graph.ops]
    out = TrainingGraph(graph.name, tensors, ops, graph.outputs, graph.constants, graph.meta)
    return _Scaling(out).graph() if any(op.phase == "update" for op in graph.ops) else out


# ---- what may be halves ---------------------------------------------------------------------------------------------


def _halves(graph: TrainingGraph, huge: set[str]) -> set[str]:
    """Tensors to store as float16: whole storages."""
    refused = _fixed(graph) | huge | _summed_only(graph)
    out: set[str] = set()
    for storage in graph.storages.values():
        members = [graph.tensors[name] for name in storage.tensors]
        if all(_is_large(t) and t.name not in refused for t in members) and storage.role in _ROLES:
            out |= set(storage.tensors)
    return out


def _is_large(tensor: Tensor) -> bool:
    axes = sum(n > 1 for n in tensor.shape)
    return tensor.dtype == "float32" and axes > 1 and tensor.size_elems >= _LEAST_ELEMS


def _fixed(graph: TrainingGraph) -> set[str]:
    """Operands that kernels want as float32, or that are better so."""
    out: set[str] = set()
    for op in graph.ops:
        if op.kind in _CONVOLUTIONS:
            out |= {o.tensor for o in op.operands}
        inputs, outputs = _FLOAT32.get(op.kind, ((), ()))
        out |= {op.inputs[i].tensor for i in inputs} | {op.outputs[i].tensor for i in outputs}
    return out


def _huge(graph: TrainingGraph) -> tuple[set[str], set[str]]:
    """Tensors that may hold numbers beyond the largest half, by the constants that they are made of.

    Returns:
        Those that stay float32; and those that are masked (scores with a mask applied), which serve their purpose as
        well if they end at the largest half.
    """
    huge = {name for name, value in graph.constants.items() if _largest(value) > _LARGEST}
    masked: set[str] = set()
    made_back = {o.tensor for op in graph.ops if op.phase == "backward" for o in op.outputs}
    for op in graph.ops:
        if op.kind not in _PASSING or any(o.tensor in made_back for o in op.inputs):
            continue  # what a gradient is multiplied by is not huge, and its overflow is seen to
        programs = [x for x in op.attrs.values() if isinstance(x, Expr)]
        made = any(_largest(r[1]) > _LARGEST for e in programs for r in _references(e) if r[0] == "c")
        if made or any(o.tensor in huge | masked for o in op.inputs):
            scores = op.kind == "contraction" or any(_is_score(graph, o, op, huge) for o in op.inputs)
            apart = op.phase == "forward" and programs and scores
            (masked if apart else huge).update(o.tensor for o in op.outputs)
    return huge, masked


def _is_score(graph: TrainingGraph, operand: Operand, op: Op, huge: set[str]) -> bool:
    """Whether an operand is what a mask is applied to: numbers for every point, none of them huge."""
    tensor = graph.tensors[operand.tensor]
    whole = tensor.size_elems >= graph.tensors[op.outputs[0].tensor].size_elems
    return whole and tensor.dtype.startswith("float") and tensor.name not in huge


def _bounded(op: Op, masked: set[str], tensors: dict[str, Tensor]) -> Op:
    """The op with its results that are masked ending at the largest half."""
    places = [i for i, o in enumerate(op.outputs) if o.tensor in masked]
    if not places:
        return op
    key = "expr" if op.kind == "pointwise" else "epilogue"
    sources = op.inputs if key == "expr" else op.inputs[1:]  # input 0 of an epilogue is the sum, a float as well
    builder = Builder([kind_of(tensors[o.tensor].dtype) for o in sources])
    results = builder.inline(op.attrs[key], [("x", i) for i in range(len(sources))])
    for i in places:
        results[i] = builder.emit("max", builder.emit("min", results[i], ("c", _LARGEST)), ("c", -_LARGEST))
    return replace(op, attrs={**op.attrs, key: builder.finish(results)})


def _references(expr: Expr) -> Iterable[Ref]:
    return (ref for refs in (*(i[1:] for i in expr.code), expr.results) for ref in refs)


def _largest(value: Any) -> float:
    if isinstance(value, (list, tuple)):
        return max(map(_largest, value), default=0.0)
    return abs(float(value))


def _summed_only(graph: TrainingGraph) -> set[str]:
    """Tensors that are read to be summed and for nothing else, such as squares."""
    return {name for name, ops in graph.consumers.items() if ops and all(op.kind == "reduce" for op in ops)}


# ---- scaled gradients and careful updates ---------------------------------------------------------------------------


class _Scaling:
    """Writes a training graph whose gradients are scaled."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.before, self.tensors = graph, dict(graph.tensors)
        self.codes = {
            t.name: Code("root" if t.name.endswith(_SQUARES) else "scaled", _STATE_FACTOR)
            for t in graph.by_role("state")
            if t.dtype == "float16"
        }
        self.constants = dict(graph.constants)
        self.depth = self._depths()

    def graph(self) -> TrainingGraph:
        """The result."""
        before = self.before
        self._scalar(SCALE, "float32", f"constant:{_FIRST_SCALE}")
        self._scalar(CLEAN, "int32", "zeros")
        self._scalar(SEED, "int32", "zeros")
        ops: list[Op] = []
        for op in before.ops:
            if self._updates(op):
                ops.append(self._update(op))
            elif op.phase == "backward" and self.depth.get(op.outputs[0].tensor) == 1:
                ops += self._root(op)
            else:
                ops.append(op)
        ops += self._adapted()
        meta = {**before.meta, META: {name: list(code) for name, code in self.codes.items()}}
        return TrainingGraph(before.name, self.tensors, ops, before.outputs, self.constants, meta)

    def _updates(self, op: Op) -> bool:
        """Whether an op is an update of parameters; one that adds up micro-batches' gradients leaves them scaled."""
        graph = self.before
        storages = (graph.storages[graph.storage_of[op.inputs[i].tensor]] for _, i in op.inplace)
        return op.phase == "update" and any(s.role in ("parameter", "state") for s in storages)

    def _scalar(self, name: str, dtype: str, init: str) -> None:
        self.tensors[name] = Tensor(name, (), dtype, "state", init)
        self.tensors[f"new:{name}"] = Tensor(f"new:{name}", (), dtype)

    def _depths(self) -> dict[str, int]:
        """Of the gradients, how many ops after the loss' gradient each is made; 1: by a root.

        Raises:
            GraphError: there is no root, or what looks like one need not be.
        """
        graph = self.before
        backward = [op for op in graph.ops if op.phase == "backward"]
        made = {o.tensor for op in backward for o in op.outputs}
        roots = [op for op in backward if not any(o.tensor in made for o in op.inputs)]
        losses = [op for op in roots if op.kind in _LOSS_GRADIENTS]
        if not losses and [op.kind for op in roots] != ["pointwise"] * micro_batches(graph):
            kinds = ", ".join(sorted({op.kind for op in roots})) or "nothing"
            raise GraphError(
                f"float16 storage scales the loss' gradient, and graph {graph.name!r} does not show where it begins "
                f"(found {kinds}, expected a cross-entropy, an nll loss or one pointwise op): plan with --storage fp32"
            )
        found: dict[str, int] = {o.tensor: 1 for op in losses or roots for o in op.outputs}
        for op in graph.ops:
            above = max((found.get(o.tensor, 0) for o in op.inputs), default=0)
            if above and not self._updates(op):
                found |= {o.tensor: above + 1 for o in op.outputs}
        return found

    def _root(self, op: Op) -> list[Op]:
        """The op that begins the backward pass, its result scaled."""
        if op.kind not in _LOSS_GRADIENTS:
            shape = self.before.operand_shape(op.outputs[0])
            builder, refs = self._builder([*op.inputs, Operand(SCALE)])
            results = builder.inline(op.attrs["expr"], refs[:-1])
            scaled = [builder.emit("mul", result, refs[-1]) for result in results]
            inputs = (*op.inputs, _spread(SCALE, shape))
            return [replace(op, inputs=inputs, attrs={**op.attrs, "expr": builder.finish(scaled)})]
        given = op.inputs[0]
        if self.constants.get(given.tensor) == 1.0 and not given.view:
            return [replace(op, inputs=(Operand(SCALE), *op.inputs[1:]))]
        builder, refs = self._builder([given, Operand(SCALE)])
        name = f"half.loss:{op.name}"
        self.tensors[name] = Tensor(name, ())
        expr = builder.finish([builder.emit("mul", *refs)])
        first = Op(name, "pointwise", (given, Operand(SCALE)), (Operand(name),), {"expr": expr}, "backward", op.source)
        return [first, replace(op, inputs=(Operand(name), *op.inputs[1:]))]

    def _builder(self, operands: Sequence[Operand]) -> tuple[Builder, list[Ref]]:
        kinds = [kind_of(self.tensors[o.tensor].dtype) for o in operands]
        return Builder(kinds), [("x", i) for i in range(len(operands))]

    def _update(self, op: Op) -> Op:
        """The update with its gradients unscaled, left out where they are no numbers, its halves rounded at random."""
        shape = self.before.operand_shape(op.outputs[0])
        gradients = [i for i, o in enumerate(op.inputs) if o.tensor in self.depth]
        halves = [i for i, o in enumerate(op.outputs) if self.tensors[o.tensor].dtype == "float16"]
        more = [SCALE] * bool(gradients) + [SEED] * bool(halves)
        inputs = (*op.inputs, *(_spread(name, shape) for name in more))
        builder, refs = self._builder(inputs)
        given, keep = list(refs[: len(op.inputs)]), _Joined(builder)
        for i in gradients:
            keep.add(builder.emit("lt", builder.emit("abs", refs[i]), ("c", _FLOATS)))
            given[i] = builder.emit("div", refs[i], refs[len(op.inputs)])
        codes = [
            (out, inp, self.codes[o.tensor]) for out, inp in op.inplace if (o := op.inputs[inp]).tensor in self.codes
        ]
        for _, inp, code in codes:
            value = builder.emit("mul", refs[inp], ("c", 1 / code.factor))
            given[inp] = builder.emit("mul", value, value) if code.form == "root" else value
        results = builder.inline(op.attrs["expr"], given)
        for out, _, code in codes:
            value = builder.emit("sqrt", results[out]) if code.form == "root" else results[out]
            results[out] = builder.emit("mul", value, ("c", code.factor))
        for i in halves:
            results[i] = builder.emit("round16", results[i], refs[-1])
        for out, inp in op.inplace:
            results[out] = keep.choose(results[out], refs[inp])
        return replace(op, inputs=inputs, attrs={**op.attrs, "expr": builder.finish(results)})

    def _adapted(self) -> list[Op]:
        """The sum that tells of overflow, and scale, count and seed of the next step."""
        name = max(
            (o.tensor for op in self.before.ops if self._updates(op) for o in op.inputs if o.tensor in self.depth),
            key=lambda x: (self.depth[x], -self.tensors[x].size_elems),
        )
        row = View().then(("reshape", (1, self.tensors[name].size_elems))).simplified(self.tensors[name].shape)
        self.tensors[CHECK] = Tensor(CHECK, (1,))
        check = Op(CHECK, "reduce", (Operand(name, row),), (Operand(CHECK),), {"fn": "sum"}, "backward")
        scalar = View().then(("reshape", ())).simplified((1,))
        inputs = (Operand(SCALE), Operand(CLEAN), Operand(SEED), Operand(CHECK, scalar))
        outputs = tuple(Operand(f"new:{o.tensor}") for o in inputs[:3])
        builder, (scale, clean, seed, total) = self._builder(inputs)
        good = builder.emit("lt", builder.emit("abs", total), ("c", _FLOATS))
        count = builder.emit("add", clean, ("c", 1))
        due = builder.emit("ge", count, ("c", _GROWTH_STEPS))
        larger = builder.emit("min", builder.emit("mul", scale, ("c", 2.0)), ("c", _FIRST_SCALE))
        smaller = builder.emit("max", builder.emit("mul", scale, ("c", 0.5)), ("c", 1.0))
        results = [
            builder.emit("where", good, builder.emit("where", due, larger, scale), smaller),
            builder.emit("where", good, builder.emit("where", due, ("c", 0), count), ("c", 0)),
            builder.emit("add", seed, ("c", 1)),
        ]
        aliases = tuple((i, i) for i in range(3))
        adapt = Op("half.adapt", "pointwise", inputs, outputs, {"expr": builder.finish(results)}, "update", "", aliases)
        return [check, adapt]


class _Joined:
    """Conditions that must all hold."""

    def __init__(self, builder: Builder) -> None:
        self._emit: Callable[..., Ref] = builder.emit
        self._all: Ref | None = None

    def add(self, condition: Ref) -> None:
        """One more."""
        self._all = condition if self._all is None else self._emit("and", self._all, condition)

    def choose(self, then: Ref, otherwise: Ref) -> Ref:
        """A value that hangs on them."""
        return then if self._all is None else self._emit("where", self._all, then, otherwise)


def _spread(name: str, shape: tuple[int, ...]) -> Operand:
    """A scalar seen at every point."""
    if not shape:
        return Operand(name, IDENTITY)
    return Operand(name, View().then(("reshape", (1,) * len(shape)), ("expand", shape)).simplified(()))
