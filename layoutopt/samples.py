"""Where the samples of a batch lie in every tensor of a step, and what one part of them looks like.

Every op kind says along which of its axes what it writes hangs on the same place of what it reads (``_RULES``). From
the inputs that hold samples, :func:`spread` follows these axes through views and ops:

- Along a tensor's axis the samples are one *digit*: the axis counts ``outer`` x samples x ``inner`` (a batch of 8
  windows of 49 tokens each, seen as 392 rows, has 8 samples of 49 rows). That is a :class:`Place`.
- An op that adds up over the samples gives a *sum* (:data:`SUM`): a part of the samples gives a part of it. So do
  gradients of weights, and what follows from a sum by multiplying with what no sample changes.
- Whatever else would need several samples at once (a normalisation over the batch, a comparison of samples) is refused,
  by name.

So a part of the samples can be run alone: its tensors are the whole ones' parts, its sums add up to the whole ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

from layoutopt.errors import GraphError
from layoutopt.graph import Expr, Op, Operand, TrainingGraph
from layoutopt.view import Step, View

__all__ = ["SUM", "Place", "Spread", "is_linear", "operand_of_part", "spread", "trimmed"]

SUM: Final = "sum"


@dataclass(frozen=True)
class Place:
    """Which digit of a shape counts the samples: of its axis, ``outer`` before it and ``inner`` within each sample."""

    axis: int
    outer: int = 1
    inner: int = 1


Where = Place | Literal["sum"]


# ---- through views --------------------------------------------------------------------------------------------------


def _reshaped(place: Place, shape: Sequence[int], to: Sequence[int], samples: int) -> Place | None:
    """The same digit after a reshape; None where several axes share it."""
    stride = prod(shape[place.axis + 1 :]) * place.inner
    for axis, extent in enumerate(to):
        unit = prod(to[axis + 1 :])
        if stride % unit == 0 and (unit * extent) % (stride * samples) == 0 and extent > 1:
            return Place(axis, unit * extent // (stride * samples), stride // unit)
    return None


def _forward(step: Step, shape: tuple[int, ...], place: Place, samples: int) -> Place | None:
    """Where the samples are after a step of a view; None where they are no longer one digit, or not all there."""
    if step.kind == "reshape":
        return _reshaped(place, shape, step.args, samples)
    if step.kind == "permute":
        return Place(step.args.index(place.axis), place.outer, place.inner)
    if step.kind == "expand":
        return Place(place.axis + len(step.args) - len(shape), place.outer, place.inner)
    axis, start, stop, stride = step.args
    whole = (start, stop, stride) == (0, shape[axis], 1)
    return place if axis != place.axis or whole else None


def _backward(step: Step, shape: tuple[int, ...], place: Place, samples: int) -> Place | Literal["made"] | None:
    """Where the samples were before a step; "made" where the step repeats one value for all of them."""
    after = View((step,)).shape(shape)
    if step.kind == "reshape":
        return _reshaped(place, after, shape, samples)
    if step.kind == "permute":
        return Place(step.args[place.axis], place.outer, place.inner)
    if step.kind == "expand":
        axis = place.axis - (len(after) - len(shape))
        return "made" if axis < 0 or shape[axis] == 1 else Place(axis, place.outer, place.inner)
    return None if step.args[0] == place.axis else place


def _traced(view: View, shape: tuple[int, ...], place: Place, samples: int) -> Place | None:
    """Where the samples of a stored tensor are in a view of it; None where they are not one digit there."""
    at: Place | None = place
    for step in view.steps:
        if at is None:
            return None
        at = _forward(step, shape, at, samples)
        shape = View((step,)).shape(shape)
    return at


def _pulled_back(view: View, shape: tuple[int, ...], place: Place, samples: int) -> tuple[int, Place | None] | None:
    """From a place in a view back to the stored tensor.

    Returns:
        The number of steps that come before the samples, and their place in front of the next step: 0 and their place
        in the stored tensor, or the step that repeats one value for all samples and None. None where a step hides them.
    """
    shapes = [shape]
    for step in view.steps:
        shapes.append(View((step,)).shape(shapes[-1]))
    at = place
    for i in range(len(view.steps) - 1, -1, -1):
        before = _backward(view.steps[i], shapes[i], at, samples)
        if before is None:
            return None
        if before == "made":
            return i, None
        assert isinstance(before, Place)
        at = before
    return 0, at


def trimmed(
    view: View, shape: tuple[int, ...], begin: int, place: Place | None, samples: int, part: int, end: Place
) -> View:
    """A view's steps as a part of the samples has them.

    Args:
        view: of the whole.
        shape: of the stored tensor, whole.
        begin: steps before the samples, as :func:`_pulled_back` says.
        place: of the samples in front of the next step; None where that step repeats a value for them.
        samples: in the whole.
        part: samples in the part.
        end: place of the samples behind the last step.
    """
    out = list(view.steps[:begin])
    shape = View(tuple(out)).shape(shape)
    at: Place | None = place
    for i, step in enumerate(view.steps[begin:], begin):
        after = View((step,)).shape(shape)
        if at is None:  # the step that makes the samples: where it puts them is found from behind
            back = _pulled_back(View(view.steps[i + 1 :]), after, end, samples)
            assert back is not None
            assert back[1] is not None
            at = back[1]
        else:
            at = _forward(step, shape, at, samples)
            assert at is not None
        args = list(step.args)
        if step.kind in ("reshape", "expand"):
            args[at.axis] = args[at.axis] // samples * part
        elif step.kind == "slice" and step.args[0] == at.axis:
            args[2] = args[2] // samples * part
        out.append(Step(step.kind, tuple(args)))
        shape = after
    return View(tuple(out))


def _cut(shape: Sequence[int], place: Place, samples: int, part: int, i: int) -> tuple[Step, ...]:
    """View steps from a whole shape to part ``i`` of its samples."""
    inner, axis = place.inner, place.axis
    if place.outer == 1:
        return (Step("slice", (axis, i * part * inner, (i + 1) * part * inner, 1)),)
    split = (*shape[:axis], place.outer, samples * inner, *shape[axis + 1 :])
    joined = (*shape[:axis], place.outer * part * inner, *shape[axis + 1 :])
    return (
        Step("reshape", tuple(split)),
        Step("slice", (axis + 1, i * part * inner, (i + 1) * part * inner, 1)),
        Step("reshape", tuple(joined)),
    )


# ---- through ops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """Axes of an op kind by letter.

    Attributes:
        inputs, outputs: a word of letters for each operand.
        alike: axes of which every place is worked on alone.
        added: axes over which what is written adds up.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    alike: str = ""
    added: str = ""


def _rule(text: str, alike: str = "", added: str = "") -> _Rule:
    read, _, written = text.partition(" -> ")
    words = [tuple(w.strip("[]") for w in side.split()) for side in (read, written)]
    return _Rule(words[0], words[1], alike, added)


_RULES: dict[str, _Rule] = {
    "contraction": _rule("bmk bkn -> bmn", "bmn", "k"),
    "reduce": _rule("mk -> m", "m", "k"),
    "softmax": _rule("mk -> mk", "m"),
    "softmax_grad": _rule("mk mk -> mk", "m"),
    "log_softmax": _rule("mk -> mk", "m"),
    "log_softmax_grad": _rule("mk mk -> mk", "m"),
    "layer_norm": _rule("mk k k -> mk m m", "m"),
    "layer_norm_grad": _rule("mk mk m m k -> mk", "m"),
    "layer_norm_affine": _rule("mk mk m m -> k k", "", "m"),
    "gather": _rule("vd n -> nd", "nd"),
    "scatter_add": _rule("nd n -> vd", "d", "n"),
    "quantize": _rule("mk -> mw mg", "m"),
    "dequantize": _rule("mw mg -> mk", "m"),
    "nll_loss": _rule("nc n -> [] []", "", "n"),
    "nll_loss_grad": _rule("[] n [] -> nc", "n"),
    "cross_entropy": _rule("nc n -> [] n []", "n", "n"),
    "cross_entropy_grad": _rule("[] nc n n [] -> nc", "n"),
    "conv": _rule("nchw oxyz -> nopq", "n"),
    "conv_grad_input": _rule("nopq oxyz -> nchw", "n"),
    "conv_grad_weight": _rule("nopq nchw -> oxyz", "", "n"),
}
_LOSSES = ("nll_loss", "cross_entropy")
_LINEAR: dict[str, tuple[int, ...]] = {"contraction": (0, 1), "reduce": (0,), "gather": (0,), "scatter_add": (0,)}
"""Inputs in which an op is linear, one at a time."""

_WAY_OUT = "plan the whole batch, with more memory or fewer samples"


def _rule_of(graph: TrainingGraph, op: Op) -> _Rule | None:
    if op.kind == "pointwise":
        word = "abcdefghijklmnop"[: len(graph.operand_shape(op.outputs[0]))]
        return _Rule((word,) * len(op.inputs), (word,) * len(op.outputs), word)
    if op.kind == "concat":
        return _Rule(("onj",) * len(op.inputs), ("onj",), "oj")
    return _RULES.get(op.kind)


@dataclass(frozen=True)
class Spread:
    """Where the samples of a step are.

    Attributes:
        samples: how many.
        where: by tensor, a place or ``SUM``; tensors that no sample changes are missing.
        seen: by op that reads samples, their place in each operand as the op sees it, inputs first; None for operands
            that have none there.
    """

    samples: int
    where: Mapping[str, Where]
    seen: Mapping[str, tuple[Place | None, ...]]


def spread(graph: TrainingGraph, axes: Mapping[str, int], of_loss: Collection[str]) -> Spread:
    """Follow the samples through forward and backward pass.

    Args:
        graph: as captured, views folded.
        axes: the axis that holds the samples, by input.
        of_loss: ops that make the loss of what adds up over the samples: these may be means.

    Raises:
        GraphError: an op needs several samples at once; names it.
    """
    extents = {graph.tensors[name].shape[axis] for name, axis in axes.items()}
    if len(extents) != 1 or extents == {1}:
        held = ", ".join(f"{name} {graph.tensors[name].shape[axis]}" for name, axis in axes.items()) or "none"
        raise GraphError(
            f"graph {graph.name!r} has no batch of several samples to cut (samples by input: {held}): capture it with "
            "a larger batch, or say which axes hold samples with capture(batch_axes=...)"
        )
    follow = _Follow(graph, extents.pop(), {name: Place(axis) for name, axis in axes.items()}, of_loss)
    for op in graph.ops:
        follow.op(op)
    return Spread(follow.samples, follow.where, follow.seen)


class _Follow:
    """The state of :func:`spread`: what is known so far."""

    def __init__(
        self, graph: TrainingGraph, samples: int, begin: Mapping[str, Where], of_loss: Collection[str]
    ) -> None:
        self.graph, self.samples, self.of_loss = graph, samples, of_loss
        self.where: dict[str, Where] = dict(begin)
        self.seen: dict[str, tuple[Place | None, ...]] = {}

    def _refused(self, op: Op, why: str) -> GraphError:
        where = f" of {op.source}" if op.source else ""
        return GraphError(
            f"graph {self.graph.name!r} cannot run in micro-batches: op {op.name} ({op.kind}{where}) {why}; {_WAY_OUT}"
        )

    def op(self, op: Op) -> None:
        """Say where the samples are in what an op writes."""
        held = [self.where.get(o.tensor) for o in op.inputs]
        if op.phase == "update":
            if any(isinstance(w, Place) for w in held):
                raise self._refused(op, "updates a weight by something of every sample instead of a sum over them")
            return
        if not any(held):
            return
        for _, i in op.inplace:
            raise self._refused(op, f"changes {op.inputs[i].tensor} within the step")
        rule = _rule_of(self.graph, op)
        if rule is None:
            raise self._refused(op, "is of a kind that is not followed: cut the graph as captured")
        if not any(isinstance(w, Place) for w in held):
            if op.name not in self.of_loss and not self._is_linear(op, held):
                raise self._refused(op, "needs the whole of a sum over the samples before it can go on")
            self.where.update({o.tensor: SUM for o in op.outputs})
            self.seen[op.name] = (None,) * len(op.operands)
            return
        self._along(op, rule, held)

    def _is_linear(self, op: Op, held: Sequence[Where | None]) -> bool:
        sums = [i for i, w in enumerate(held) if w]
        if op.kind == "pointwise":
            return is_linear(op.attrs["expr"], sums)
        if op.kind == "concat":
            return len(sums) == len(held)
        if op.kind == "reduce" and op.attrs["fn"] == "max":
            return False
        return len(sums) == 1 and sums[0] in _LINEAR.get(op.kind, ())

    def _along(self, op: Op, rule: _Rule, held: Sequence[Where | None]) -> None:
        """An op that reads something of every sample."""
        letters: set[tuple[str, int, int]] = set()
        counts = op.kind in ("nll_loss_grad", "cross_entropy_grad")
        for i, (operand, w) in enumerate(zip(op.inputs, held, strict=True)):
            if w == SUM and not (counts and i == len(op.inputs) - 1):
                raise self._refused(op, f"joins single samples with {operand.tensor}, which is made of all of them")
            if isinstance(w, Place):
                at = _traced(operand.view, self.graph.tensors[operand.tensor].shape, w, self.samples)
                if at is None:
                    raise self._refused(op, f"takes the samples in {operand.tensor} apart")
                letters.add((rule.inputs[i][at.axis], at.outer, at.inner))
        if len(letters) != 1:
            raise self._refused(op, "compares samples with one another")
        letter, outer, inner = letters.pop()
        if letter not in rule.alike + rule.added:
            raise self._refused(op, "works across the samples")
        adds = letter in rule.added
        if adds and op.name not in self.of_loss:
            if op.kind in _LOSSES or (op.kind == "reduce" and op.attrs["fn"] == "mean"):
                raise self._refused(op, "takes a mean over the samples that is not the loss")
            if op.kind == "reduce" and op.attrs["fn"] == "max":
                raise self._refused(op, "takes the largest of several samples")
        words = (*rule.inputs, *rule.outputs)
        self.seen[op.name] = tuple(
            Place(word.index(letter), outer, inner) if letter in word else None for word in words
        )
        for operand, word in zip(op.outputs, rule.outputs, strict=True):
            if letter not in word:
                self.where[operand.tensor] = SUM
                continue
            shape = self.graph.tensors[operand.tensor].shape
            back = _pulled_back(operand.view, shape, Place(word.index(letter), outer, inner), self.samples)
            if back is None or back[1] is None:
                raise self._refused(op, f"takes the samples in {operand.tensor} apart")
            self.where[operand.tensor] = back[1]


def is_linear(expr: Expr, sums: Collection[int]) -> bool:
    """Whether every result of a program is a sum of its inputs ``sums``, each times what hangs on none of them."""
    degrees: list[int | None] = []

    def degree(ref: tuple[str, Any]) -> int | None:
        kind, key = ref
        if kind == "t":
            return degrees[key]
        return int(kind == "x" and key in sums)

    for name, *refs in expr.code:
        degrees.append(_degree(name, [degree(r) for r in refs], refs))
    return all(degree(r) == 1 for r in expr.results)


def _degree(name: str, of: Sequence[int | None], refs: Sequence[tuple[str, Any]]) -> int | None:
    """1 where an instruction's value grows with its arguments of degree 1, 0 where it has none, else None."""
    if None in of:
        return None
    if not any(of):
        return 0
    if name == "where":
        kept = all(d or (kind == "c" and value == 0) for d, (kind, value) in zip(of[1:], refs[1:], strict=True))
        return 1 if kept and not of[0] else None
    linear: dict[str, list[tuple[int, ...]]] = {
        "neg": [(1,)],
        "float": [(1,)],
        "add": [(1, 1)],
        "sub": [(1, 1)],
        "mul": [(0, 1), (1, 0)],
        "div": [(1, 0)],
    }
    return 1 if tuple(of) in linear.get(name, ()) else None


def operand_of_part(
    graph: TrainingGraph, operand: Operand, where: Place | None, seen: Place, samples: int, part: int, i: int
) -> View:
    """How part ``i`` of the samples sees an operand that is stored whole.

    Args:
        graph: the whole step.
        operand: as the whole step sees it.
        where: of the samples in the tensor; None where no sample changes it.
        seen: of the samples in the operand.
        samples: in the whole.
        part: samples in a part.
        i: which part.
    """
    shape = graph.tensors[operand.tensor].shape
    back = (0, where) if where is not None else _pulled_back(operand.view, shape, seen, samples)
    if back is None:
        return View((*operand.view.steps, *_cut(graph.operand_shape(operand), seen, samples, part, i)))
    begin, place = back
    rest = trimmed(operand.view, shape, begin, place, samples, part, seen)
    return View((*_cut(shape, place, samples, part, i), *rest.steps)) if place is not None else rest
