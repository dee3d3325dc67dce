"""Building a TrainingGraph op by op: the part of capture that knows the graph's rules and nothing of torch.

During capture every result is a :class:`Value`: a stored tensor seen through a view, broadcast to a shape. Views cost
nothing until an op needs the viewed tensor; then one ``view`` op is written, from the tensor that stores the data, with
what cancels already cancelled. Broadcasts stay on the operand that reads them, and a pointwise op is calculated only
over the axes along which its inputs really differ. Equal ops on equal inputs are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import Expr, Op, Operand, Phase, Role, Tensor, rename_operand
from layoutopt.layout import Layout
from layoutopt.view import IDENTITY, View

__all__ = ["Const", "Context", "GraphBuilder", "Prog", "Shape", "Value"]

Shape = tuple[int, ...]

LARGEST_STORED_ELEMS = 4096
"""Known values of more elements than this are calculated by the graph rather than kept in its file, where they can be:
a causal mask is a comparison of two counts."""


@dataclass(frozen=True)
class Value:
    """``tensor`` seen through ``view`` (giving ``base``), broadcast to ``shape`` of the same rank."""

    tensor: str
    view: View
    base: Shape
    shape: Shape
    dtype: str


@dataclass(frozen=True, eq=False)
class Const:
    """A value known at capture: float32, int32 or bool (a broadcast array where all elements are equal).

    Attributes:
        array: the value.
        make: writes the ops that calculate it, for a value too large to keep; None where there is no way.
    """

    array: np.ndarray
    make: Callable[[], Value] | None = None

    @property
    def shape(self) -> Shape:
        """Logical extents."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        """The graph's name of its type."""
        return {"f": "float32", "i": "int32", "b": "bool"}[self.array.dtype.kind]

    @property
    def scalar(self) -> float | int | bool | None:
        """The element where all are equal, else None."""
        if not self.array.size:
            return None
        first = self.array[(0,) * self.array.ndim]
        if self.array.size > 1 and any(self.array.strides):
            squeezed = self.array[tuple(slice(None) if s else slice(0, 1) for s in self.array.strides)]
            if not bool((squeezed == first).all()):
                return None
        return first.item()  # type: ignore[no-any-return]


@dataclass
class Context:
    """Where the op being translated came from."""

    name: str = ""
    phase: Phase = "forward"
    source: str = ""


class Prog:
    """A pointwise program under construction: ``p("add", a, b)`` adds an instruction and returns its reference."""

    def __init__(self) -> None:
        self.code: list[tuple[Any, ...]] = []

    def __call__(self, op: str, *args: tuple[str, Any]) -> tuple[str, Any]:
        """Add an instruction, or find the equal one."""
        instruction = (op, *args)
        if instruction not in self.code:
            self.code.append(instruction)
        return ("t", self.code.index(instruction))


@dataclass
class GraphBuilder:
    """Collects tensors and ops; ``context`` names what is being translated."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    context: Context = field(default_factory=Context)
    streams: int = 0
    """Random tensors written so far."""
    _memo: dict[Any, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _renames: dict[str, Tensor] = field(default_factory=dict)

    # ---- tensors --------------------------------------------------------------------------------------------------

    def tensor(self, name: str, shape: Sequence[int], dtype: str, role: Role = "activation", **more: str) -> Value:
        """Add a tensor that no op writes (yet) and return it as a value.

        Raises:
            GraphError: the name is taken.
        """
        if name in self.tensors:
            raise GraphError(f"tensor name {name!r} appears twice: rename the batch entry or output")
        self.tensors[name] = Tensor(name, tuple(shape), dtype, role, **more)
        return self.whole(name)

    def whole(self, name: str) -> Value:
        """The tensor as it is stored."""
        t = self.tensors[name]
        return Value(name, IDENTITY, t.shape, t.shape, t.dtype)

    def materialise(self, value: Value | Const) -> Value:
        """The value; a constant becomes a tensor of role "constant" (without the axes along which it repeats), or is
        calculated where it is large and can be.
        """
        if isinstance(value, Value):
            return value
        scalar = value.scalar
        repeats = [s == 0 and n > 1 for s, n in zip(value.array.strides, value.shape, strict=True)]
        core = value.array[tuple(slice(0, 1) if r else slice(None) for r in repeats)]
        array = core if scalar is None else np.asarray(scalar, value.array.dtype)
        if array.size > LARGEST_STORED_ELEMS and value.make is not None:
            return value.make()
        key = ("const", array.dtype.str, array.shape, array.tobytes())
        if key not in self._memo:
            name = f"const_{len(self.constants)}"
            self.tensor(name, array.shape, value.dtype, "constant")
            self.constants[name] = array.tolist()
            self._memo[key] = name
        return self.expand(self.whole(self._memo[key]), value.shape)

    # ---- views ----------------------------------------------------------------------------------------------------

    def _seen(self, value: Value, *steps: tuple[str, Shape], shape: Shape | None = None) -> Value:
        """The value through more steps on its base; ``shape`` is the broadcast shape after them (default: the base)."""
        stored = self.tensors[value.tensor].shape
        view = _tidy(value.view.then(*steps), stored)
        base = view.shape(stored)
        return replace(value, view=view, base=base, shape=base if shape is None else shape)

    def flat(self, value: Value) -> Value:
        """The value with its broadcast made part of its view."""
        return value if value.base == value.shape else self._seen(value, ("expand", value.shape))

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """The value in another shape of equally many elements; a broadcast stays one where only 1s come or go."""
        new = tuple(shape)
        if new == value.shape:
            return value
        if value.base != value.shape and [n for n in new if n != 1] == [n for n in value.shape if n != 1]:
            kept = iter([b for b, n in zip(value.base, value.shape, strict=True) if n != 1])
            base = tuple(1 if n == 1 else next(kept) for n in new)
            return self._seen(value, ("reshape", base), shape=new)
        return self._seen(self.flat(value), ("reshape", new))

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Axes in another order."""
        return self._seen(value, ("permute", tuple(order)), shape=tuple(value.shape[a] for a in order))

    def slice(self, value: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Elements ``start:stop:step`` of one axis."""
        if (start, stop, step) == (0, value.shape[axis], 1):
            return value
        count = -(-(stop - start) // step)
        shape = (*value.shape[:axis], count, *value.shape[axis + 1 :])
        if value.base[axis] != value.shape[axis]:
            return replace(value, shape=shape)
        return self._seen(value, ("slice", (axis, start, stop, step)), shape=shape)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast by numpy's rule; -1 keeps an extent."""
        pad = len(shape) - len(value.shape)
        if pad:
            value = self._seen(value, ("reshape", (1,) * pad + value.base), shape=(1,) * pad + value.shape)
        return replace(value, shape=tuple(v if n == -1 else n for n, v in zip(shape, value.shape, strict=True)))

    def stored(self, value: Value | Const, broadcast: bool = True) -> str:
        """The name of a tensor that holds the value (or its base, before broadcasting); a view op writes it if none."""
        value = self.materialise(value)
        if broadcast:
            value = self.flat(value)
        if not value.view:
            return value.tensor
        key = ("view", value.tensor, value.view)
        if key not in self._memo:
            name = self._unique(f"{value.tensor}@view")
            self.tensor(name, value.base, value.dtype)
            self.ops.append(
                Op(
                    name,
                    "view",
                    (Operand(value.tensor, value.view),),
                    (Operand(name),),
                    {},
                    self.context.phase,
                    self.context.source,
                )
            )
            self._memo[key] = name
        return str(self._memo[key])

    def operand(self, value: Value | Const, *steps: tuple[str, Sequence[int]]) -> Operand:
        """The value as an operand, seen through ``steps`` (reshapes and permutes to a kind's canonical rank)."""
        value = self.flat(self.materialise(value))
        chain = _steps(steps)
        seen = self._seen(value, *chain)
        if [s.kind for s in seen.view.steps] in ([], ["reshape"]):
            return Operand(seen.tensor, seen.view)  # nothing but a reshape: no view op needed
        name = self.stored(value)
        return Operand(name, View().then(*chain).simplified(self.tensors[name].shape))

    # ---- ops ------------------------------------------------------------------------------------------------------

    def emit(
        self,
        kind: str,
        inputs: Sequence[Operand],
        outputs: Sequence[tuple[str, Shape, str, Sequence[tuple[str, Sequence[int]]]]],
        attrs: Mapping[str, Any] | None = None,
    ) -> list[Value]:
        """Write an op, or find the equal one written before.

        Args:
            kind: see ``layoutopt.graph``.
            inputs: operands in the kind's order.
            outputs: per output (name suffix, stored shape, dtype, view steps from there to the shape the op writes).
            attrs: the kind's constants.
        """
        specs = [
            (suffix, shape, dtype, View().then(*_steps(steps)).simplified(shape))
            for suffix, shape, dtype, steps in outputs
        ]
        key = (kind, tuple(inputs), tuple(s[1:] for s in specs), repr(sorted((attrs or {}).items())))
        if key not in self._memo:
            name = self._unique(self.context.name)
            written = []
            for suffix, shape, dtype, view in specs:
                self.tensor(f"{name}{suffix}", shape, dtype)
                written.append(Operand(f"{name}{suffix}", view))
            self.ops.append(
                Op(
                    name,
                    kind,
                    tuple(inputs),
                    tuple(written),
                    dict(attrs or {}),
                    self.context.phase,
                    self.context.source,
                )
            )
            self._memo[key] = tuple(o.tensor for o in written)
        return [self.whole(name) for name in self._memo[key]]

    def pointwise(
        self, prog: Prog, result: tuple[str, Any], inputs: Sequence[Value], shape: Shape, dtype: str
    ) -> Value:
        """A pointwise op of one output over ``shape``, calculated only where the inputs differ."""
        if result[0] == "x":
            return self.expand(inputs[result[1]], shape)
        used = sorted({ref[1] for step in prog.code for ref in step[1:] if ref[0] == "x"})
        padded = [self.expand(inputs[i], (1,) * (len(shape) - len(inputs[i].shape)) + inputs[i].shape) for i in used]
        domain = tuple(max((v.base[axis] for v in padded), default=1) for axis in range(len(shape)))
        operands: list[Operand] = []
        for value, i in zip(padded, used, strict=True):
            # A 1 that only lines the ranks up belongs on the operand, not in a view op of its own.
            source = inputs[i]
            name = self.stored(source, broadcast=False)
            steps = View().then(("reshape", value.base), ("expand", domain))
            operands.append(Operand(name, steps.simplified(self.tensors[name].shape)))
        distinct = list(dict.fromkeys(operands))
        new = {old: ("x", distinct.index(o)) for old, o in zip(used, operands, strict=True)}
        code = tuple((s[0], *(new[r[1]] if r[0] == "x" else r for r in s[1:])) for s in prog.code)
        expr = Expr(code, (result,))
        (value,) = self.emit("pointwise", distinct, [("", domain, dtype, ())], {"expr": expr})
        return self.expand(value, shape)

    def contract(self, a: Operand, b: Operand, shape: Shape, canonical: Sequence[int], alpha: float = 1.0) -> Value:
        """``c[b,m,n]`` of canonical rank-3 operands, stored in ``shape``."""
        attrs = {} if alpha == 1.0 else {"alpha": float(alpha)}
        return self.emit("contraction", [a, b], [("", shape, "float32", [("reshape", canonical)])], attrs)[0]

    def reduce(self, fn: str, value: Value | Const, axes: Sequence[int], keepdim: bool = False) -> Value:
        """``fn`` (sum, mean or max) over ``axes``."""
        rank = len(value.shape)
        gone = sorted({a % rank for a in axes}) if rank else []
        kept = [a for a in range(rank) if a not in gone]
        m, k = prod(value.shape[a] for a in kept), prod(value.shape[a] for a in gone)
        shape = tuple(value.shape[a] for a in kept)
        operand = self.operand(value, ("permute", [*kept, *gone]), ("reshape", (m, k)))
        (y,) = self.emit("reduce", [operand], [("", shape, value.dtype, [("reshape", (m,))])], {"fn": fn})
        return self.reshape(y, [n if a in kept else 1 for a, n in enumerate(value.shape)]) if keepdim else y

    def concat(self, parts: Sequence[Value | Const], starts: Sequence[int], axis: int, shape: Shape) -> Value:
        """Parts placed along ``axis`` of ``shape``; what none covers is 0."""
        outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
        operands = [self.operand(p, ("reshape", (outer, p.shape[axis], inner))) for p in parts]
        steps = [("reshape", (outer, shape[axis], inner))]
        attrs = {"starts": tuple(int(s) for s in starts)}
        return self.emit("concat", operands, [("", shape, parts[0].dtype, steps)], attrs)[0]

    def copy(self, value: Value | Const, name: str, role: Role, of: str = "") -> str:
        """A new tensor of the given name that holds the value, written by a view op."""
        source = self.materialise(value)
        self.tensor(name, source.shape, source.dtype, role, of=of)
        seen = self.flat(source)
        self.ops.append(
            Op(
                self._unique(f"{name}@view"),
                "view",
                (Operand(seen.tensor, seen.view),),
                (Operand(name),),
                {},
                self.context.phase,
                self.context.source,
            )
        )
        return name

    def name(self, value: Value | Const, name: str, role: Role, of: str = "") -> None:
        """Have the value in a tensor of this name once :meth:`finish` is called.

        The tensor that holds the value gets the name if it is free to; else a view op copies it.

        Raises:
            GraphError: the name is taken.
        """
        stored = self.stored(value)
        held = self.tensors[stored]
        if held.role != "activation" or held.shape != value.shape or stored in self._renames:
            self.copy(value, name, role, of)
        elif name in self.tensors:
            raise GraphError(f"tensor name {name!r} appears twice: rename the batch entry or output")
        else:
            self._renames[stored] = replace(held, name=name, role=role, of=of)

    def finish(self) -> None:
        """Give tensors the names asked for."""
        names = {old: tensor.name for old, tensor in self._renames.items()}
        renamed = [self._renames.get(n, t) for n, t in self.tensors.items()]
        self.tensors = {t.name: t for t in renamed}
        self.ops = [
            replace(
                op,
                inputs=tuple(rename_operand(o, names) for o in op.inputs),
                outputs=tuple(rename_operand(o, names) for o in op.outputs),
            )
            for op in self.ops
        ]
        self._renames, self._memo = {}, {}

    def prune(self, keep: Sequence[str]) -> None:
        """Drop ops that nothing in ``keep`` needs (updates stay), then tensors that no op touches."""
        needed = set(keep)
        alive = []
        for op in reversed(self.ops):
            if op.inplace or any(o.tensor in needed for o in op.outputs):
                alive.append(op)
                needed |= {o.tensor for o in op.inputs}
        self.ops = alive[::-1]
        touched = {o.tensor for op in self.ops for o in op.operands} | set(keep)
        self.tensors = {
            n: t for n, t in self.tensors.items() if n in touched or t.role in ("input", "parameter", "state")
        }
        self.constants = {n: v for n, v in self.constants.items() if n in self.tensors}

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names or candidate in self.tensors:
            count += 1
            candidate = f"{name}.{count}"
        self._names.add(candidate)
        return candidate


def _steps(steps: Sequence[tuple[str, Sequence[int]]]) -> tuple[tuple[str, Shape], ...]:
    return tuple((kind, tuple(args)) for kind, args in steps)


def _tidy(view: View, shape: Shape) -> View:
    """The view without steps that cancel: one that reads storage in order is a reshape, whatever it is written as."""
    view = view.simplified(shape)
    if len(view.steps) < 2 or not view.is_bijective:
        return view
    layout = view.layout(Layout.row_major(shape))
    after = view.shape(shape)
    if layout is not None and layout == Layout.row_major(after):
        return View().then(("reshape", after)).simplified(shape)
    return view
