"""Views inside a graph: their normal form, and the pass that folds view ops into the operands that read them.

What a view does to a tensor is decided by where it sends each coordinate, and that is a
:class:`~layoutopt.layout.Layout`: the view of the tensor's row-major layout. Two views are the same exactly when those
layouts are equal, and a view that has none (a reshape across a permute that cuts an axis unevenly) can be read by no
kernel: only then is a copy made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.view import Step, View

__all__ = ["COPY", "Notes", "compose", "fold_views", "is_copy", "normal", "overwrites", "rebase", "same_view", "seen"]

COPY = Expr((), (("x", 0),))
"""The program of a pointwise op that only copies."""


@dataclass
class Notes:
    """What passes report beside the graph: views folded, and views kept as copies with the reason, by op name."""

    folded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1 << 17)
def seen(view: View, shape: tuple[int, ...]) -> Layout | None:
    """Where the view of a row-major tensor of ``shape`` finds its elements, or None where no layout says it."""
    return view.layout(Layout.row_major(shape))


def same_view(a: View, b: View, shape: tuple[int, ...]) -> bool:
    """Whether two views of a tensor of ``shape`` show the same elements at the same coordinates."""
    if a == b:
        return True
    one = seen(a, shape)
    return one is not None and one == seen(b, shape)


@lru_cache(maxsize=1 << 17)
def normal(view: View, shape: tuple[int, ...]) -> View:
    """The shortest chain known for the same view: at most reshape, permute, reshape, expand, reshape.

    What leads up to a slice keeps its own steps, only cleaned.
    """
    short = _clean(view, shape)
    cut = max((i + 1 for i, step in enumerate(short.steps) if step.kind == "slice"), default=0)
    if cut:
        head = View(short.steps[:cut])
        return head.then(*normal(View(short.steps[cut:]), head.shape(shape)).steps)
    layout = seen(short, shape)
    if layout is None:
        return short
    real = [m for m in layout.modes if m.stride]
    digits = sorted(real, key=lambda m: -m.stride)
    reach = prod(shape)
    for mode in digits:
        if mode.stride * mode.extent != reach:
            return short
        reach = mode.stride
    if reach != 1:
        return short
    long = View().then(
        Step("reshape", tuple(m.extent for m in digits)),
        Step("permute", tuple(digits.index(m) for m in real)),
    )
    if len(real) < len(layout.modes):
        units = [m.extent if m.stride else 1 for m in layout.modes]
        while units and units[0] == 1:
            units.pop(0)  # expand adds leading axes by itself
        long = long.then(Step("reshape", tuple(units)), Step("expand", tuple(m.extent for m in layout.modes)))
    long = long.then(Step("reshape", layout.shape))
    long = _clean(long, shape)
    return long if len(long.steps) <= len(short.steps) else short


def _clean(view: View, shape: tuple[int, ...]) -> View:
    """Without steps that change nothing (dropping one may let its neighbours merge into another)."""
    while (shorter := view.simplified(shape)) != view:
        view = shorter
    return view


def compose(shape: tuple[int, ...], view: View, *after: View) -> View | None:
    """``view`` of a tensor of ``shape`` followed by other views, in normal form; None where no layout says it."""
    for more in after:
        view = view.then(*more.steps)
    view = normal(view, shape)
    return None if seen(view, shape) is None else view


def is_copy(graph: TrainingGraph, op: Op) -> bool:
    """Whether an op only shows its input again: a view, or a pointwise copy into a tensor of the same dtype."""
    if op.inplace or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    if op.kind == "pointwise" and op.attrs["expr"] != COPY:
        return False
    same = graph.tensors[op.inputs[0].tensor].dtype == graph.tensors[op.outputs[0].tensor].dtype
    return same and op.kind in ("view", "pointwise")


def overwrites(graph: TrainingGraph) -> dict[str, int]:
    """The position of the op that overwrites a tensor's storage in place: from there on it must not be read."""
    return {op.inputs[i].tensor: at for at, op in graph.walk() for _, i in op.inplace}


def rebase(ops: Sequence[Op], moved: dict[str, tuple[str, View]], shapes: dict[str, tuple[int, ...]]) -> list[Op]:
    """Ops with tensors replaced: an operand on ``t`` reads ``moved[t][0]`` through ``moved[t][1]`` first.

    Args:
        ops: in order.
        moved: by tensor name, its replacement and the view that shows the old tensor in it.
        shapes: stored shapes of the replacements.
    """

    def put(operand: Operand) -> Operand:
        if operand.tensor not in moved:
            return operand
        name, view = moved[operand.tensor]
        return Operand(name, normal(view.then(*operand.view.steps), shapes[name]))

    return [
        replace(op, inputs=tuple(map(put, op.inputs)), outputs=tuple(map(put, op.outputs)))
        if any(o.tensor in moved for o in op.operands)
        else op
        for op in ops
    ]


# ---- the pass -----------------------------------------------------------------------------------------------------


def fold_views(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Remove view ops and plain copies: who read their output reads their input through the composed view.

    A copy stays where its output is a graph output, where the composed view has no layout, or where the input's storage
    has been overwritten in place by then.
    """
    notes = notes if notes is not None else Notes()
    graph = _adopt_outputs(graph, notes)
    return _Folder(graph, notes).run()


def _adopt_outputs(graph: TrainingGraph, notes: Notes) -> TrainingGraph:
    """A graph output that is a reshape or permute of a computed tensor is computed in place of it."""
    aliased = {o.tensor for op in graph.ops for pair in op.inplace for o in (op.outputs[pair[0]], op.inputs[pair[1]])}
    for name in [op.name for op in graph.ops if is_copy(graph, op) and op.outputs[0].tensor in graph.outputs]:
        op = next(o for o in graph.ops if o.name == name)
        (inner,), (outer,) = op.inputs, op.outputs
        old, new = graph.tensors[inner.tensor], graph.tensors[outer.tensor]
        fixed = (
            old.name in graph.outputs or old.name in aliased or new.name in aliased or old.name not in graph.producer
        )
        if fixed or not inner.view.is_bijective:
            continue
        # outer.view shows `new` as the op does, inner.view shows `old` so: `old` seen in `new` is there and back.
        back = compose(new.shape, outer.view, inner.view.inverse(old.shape))
        if back is None:
            continue
        ops = rebase([o for o in graph.ops if o is not op], {old.name: (new.name, back)}, {new.name: new.shape})
        if all(seen(o.view, new.shape) is not None for x in ops for o in x.operands if o.tensor == new.name):
            notes.folded[op.name] = f"{op.name}: {old.name} is computed as the output {new.name}"
            graph = graph.with_ops(ops)
    return graph


class _Folder:
    """One sweep over the ops in order."""

    def __init__(self, graph: TrainingGraph, notes: Notes) -> None:
        self.graph, self.notes = graph, notes
        self.tensors = dict(graph.tensors)
        self.overwritten = overwrites(graph)
        # By folded tensor: the tensors it is a view of, furthest first, with the view of each.
        self.chains: dict[str, list[tuple[str, View]]] = {}
        self.slots: list[list[Op]] = [[] for _ in graph.ops]
        self.place: dict[str, int] = {}
        self.needed: set[str] = set()

    def run(self) -> TrainingGraph:
        for at, op in self.graph.walk():
            if is_copy(self.graph, op):
                self._fold(at, op)
            else:
                inputs = tuple(self._input(o, at, op, i) for i, o in enumerate(op.inputs))
                self.slots[at].append(op if inputs == op.inputs else replace(op, inputs=inputs))
        for op in self.graph.ops:
            if is_copy(self.graph, op) and op.outputs[0].tensor not in self.needed:
                root, view = self.chains[op.outputs[0].tensor][0]
                self.notes.folded.setdefault(op.name, f"{op.name}: {root} {view.describe()}")
                self.notes.kept.pop(op.name, None)
        return self.graph.with_ops([op for slot in self.slots for op in slot], tensors=self.tensors)

    def _input(self, operand: Operand, at: int, op: Op, position: int) -> Operand:
        if any(position == i for _, i in op.inplace):
            self._need(operand.tensor, f"{op.name} overwrites it in place")
            return operand
        return self._resolve(operand, at, op, position)

    def _fold(self, at: int, op: Op) -> None:
        (inner,), (outer,) = op.inputs, op.outputs
        if not outer.view.is_bijective:
            self.slots[at].append(replace(op, inputs=(self._resolve(inner, at, op, 0),)))
            self.needed.add(outer.tensor)
            return
        view = inner.view.then(*outer.view.inverse(self.tensors[outer.tensor].shape).steps)
        before = self.chains.get(inner.tensor, [])
        self.chains[outer.tensor] = [
            (name, normal(v.then(*view.steps), self.tensors[name].shape))
            for name, v in [*before, (inner.tensor, View())]
        ]
        self.place[outer.tensor] = at
        if outer.tensor in self.graph.outputs:
            self._need(outer.tensor, f"{outer.tensor} is an output of the graph")

    def _need(self, tensor: str, reason: str) -> None:
        """Write a folded tensor after all."""
        if tensor in self.needed or tensor not in self.chains:
            return
        self.needed.add(tensor)
        at = self.place[tensor]
        op = self.graph.ops[at]
        operand = self._resolve(op.inputs[0], at, op, 0)
        self.slots[at].append(replace(op, kind="pointwise", attrs={"expr": COPY}, inputs=(operand,)))
        self.notes.kept.setdefault(op.name, f"{op.name} ({operand.view.describe()} of {operand.tensor}): {reason}")
        self.notes.folded.pop(op.name, None)

    def _resolve(self, operand: Operand, at: int, op: Op, position: int) -> Operand:
        """The operand on the furthest tensor through which a kernel can read it."""
        reason = ""
        for name, view in self.chains.get(operand.tensor, []):
            shape = self.tensors[name].shape
            composed = compose(shape, view, operand.view)
            if composed is None:
                reason = reason or f"no layout shows {name} as {op.name} reads it"
            elif self.overwritten.get(name, at + 1) <= at:
                reason = reason or f"{name} is overwritten before {op.name} reads it"
            else:
                self._need(name, reason)
                return Operand(name, composed)
        self._need(operand.tensor, reason)
        return self._readable(operand, at, op, position)

    def _readable(self, operand: Operand, at: int, op: Op, position: int) -> Operand:
        """The operand itself, by way of copies where its own chain of steps has no layout."""
        tensor = self.tensors[operand.tensor]
        view = compose(tensor.shape, operand.view)
        if view is not None:
            return Operand(operand.tensor, view)
        steps, count = operand.view.steps, 1
        while seen(View(steps[: count + 1]), tensor.shape) is not None:
            count += 1
        head, rest = View(steps[:count]), View(steps[count:])
        name = f"{op.name}.in{position}"
        while name in self.tensors:
            name += "+"
        role = tensor.role if tensor.role == "gradient" else "activation"
        self.tensors[name] = Tensor(name, head.shape(tensor.shape), tensor.dtype, role)
        copy = Op(
            name, "pointwise", (Operand(tensor.name, head),), (Operand(name),), {"expr": COPY}, op.phase, op.source
        )
        self.slots[at].append(copy)
        self.notes.kept[name] = (
            f"{name} ({head.describe()} of {tensor.name}): no layout shows {operand.view.describe()}"
        )
        return self._readable(Operand(name, rest), at, op, position)
