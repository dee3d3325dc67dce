"""What each ATen op of a traced step means in the graph's kinds (torch-free: ops are known by their names).

:func:`translate` takes an op's name and arguments, with tensors given as :class:`~layoutopt.capture_build.Value` or
``Const``, and writes the ops that calculate it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from layoutopt.capture_build import Const, GraphBuilder, Prog, Shape, Value
from layoutopt.capture_pointwise import COMPARE, LOGIC, POINTWISE
from layoutopt.errors import GraphError

__all__ = ["Out", "constant", "describe_args", "register", "translate"]

Arg = Value | Const


class Out(NamedTuple):
    """Shape and graph dtype of one result."""

    shape: Shape
    dtype: str


_RULES: dict[str, Callable[..., Any]] = {}
_DRAWN = ("bernoulli", "uniform", "normal", "rand", "multinomial", "exponential", "poisson", "noise")
_ATEN_TYPES = {"float32": np.float32, "int32": np.int32, "bool": np.bool_}


def register(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the rule ``(builder, out, *args, **kwargs) -> value(s)`` of ATen ops (``aten.`` is put before)."""

    def put(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update({f"aten.{name}": rule for name in names})
        return rule

    return put


def translate(b: GraphBuilder, target: str, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value (or tuple of values) of one ATen call.

    Args:
        b: where ops are written; ``b.context`` says where in the model this is.
        target: the op, for example ``aten.mm.default``.
        out: :class:`Out`, or a list of them.
        args: positional arguments, tensors as Value or Const.
        kwargs: keyword arguments.

    Raises:
        GraphError: the op, or this use of it, is not known.
    """
    try:
        for table, cast in ((POINTWISE, "out"), (LOGIC, "bool"), (COMPARE, "common")):
            if target in table:
                return _pointwise(b, table[target], out, args, kwargs, cast)
        rule = _RULES.get(target)
        if rule is None:
            raise GraphError(_unknown(target))
        return rule(b, out, *args, **kwargs)
    except TypeError as error:
        raise GraphError(f"used with arguments that layoutopt does not know ({error})") from error


def _unknown(target: str) -> str:
    if any(word in target for word in _DRAWN):
        return "random numbers are drawn by dropout, rand and rand_like alone; switch it off, or write it with these"
    return "this operation is not known to layoutopt; write the model without it or report it"


def describe_args(args: Sequence[Any]) -> str:
    """Shapes and types of the tensors among ``args``, for messages."""
    flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return ", ".join(f"{a.dtype}{list(a.shape)}" for a in flat if isinstance(a, (Value, Const))) or "no tensors"


def constant(array: Any, shape: Shape | None = None) -> Const:
    """A constant in the graph's types.

    Raises:
        GraphError: an integer that does not fit 32 bits.
    """
    array = np.asarray(array)
    kind = {"f": "float32", "i": "int32", "u": "int32", "b": "bool"}[array.dtype.kind]
    if kind == "int32" and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise GraphError(f"a constant of shape {array.shape} holds integers beyond 32 bits, which no kernel reads")
    wanted = np.dtype(_ATEN_TYPES[kind])
    if array.dtype != wanted:
        # Converting a broadcast array would write out every element: convert what is really there.
        core = array[tuple(slice(None) if s else slice(0, 1) for s in array.strides)].astype(wanted)
        array = np.broadcast_to(core, array.shape)
    return Const(array if shape is None else np.broadcast_to(array, shape))


# ---- element-wise ---------------------------------------------------------------------------------------------------


def _pointwise(
    b: GraphBuilder, rule: Callable[..., Any], out: Out, args: Sequence[Any], kwargs: Any, cast: str
) -> Value:
    prog, inputs = Prog(), []
    dtype = out.dtype if cast == "out" else "bool"
    if cast == "common":
        floats = any(isinstance(a, float) or (isinstance(a, (Value, Const)) and a.dtype == "float32") for a in args)
        dtype = "float32" if floats else "int32"
    refs: list[Any] = []
    for arg in args:
        if isinstance(arg, Const) and arg.scalar is not None:
            arg = arg.scalar
        if isinstance(arg, (Value, Const)):
            value = b.materialise(arg)
            if value not in inputs:
                inputs.append(value)
            refs.append(_cast(prog, ("x", inputs.index(value)), value.dtype, dtype))
        elif isinstance(arg, (bool, int, float)):
            refs.append(("c", {"float32": float, "int32": int, "bool": bool}[dtype](arg)))
        else:
            refs.append(arg)
    return b.pointwise(prog, rule(prog, *refs, **kwargs), inputs, out.shape, out.dtype)


def _cast(prog: Prog, ref: tuple[str, Any], old: str, new: str) -> tuple[str, Any]:
    return ref if old == new else prog({"float32": "float", "int32": "int", "bool": "bool"}[new], ref)


def cast(b: GraphBuilder, x: Arg, dtype: str) -> Arg:
    """The value in another type."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Const):
        make = None if x.make is None else lambda: b.materialise(cast(b, b.materialise(x), dtype))
        return Const(constant(x.array.astype(_ATEN_TYPES[dtype])).array, make)
    prog = Prog()
    return b.pointwise(prog, _cast(prog, ("x", 0), x.dtype, dtype), [x], x.shape, dtype)


@register("_to_copy.default", "to.dtype")
def _to_copy(b: GraphBuilder, out: Out, x: Arg, *_: Any, **__: Any) -> Arg:
    return cast(b, x, out.dtype)


_RULES["prims.convert_element_type.default"] = _to_copy


@register("where.self")
def _where(b: GraphBuilder, out: Out, condition: Arg, yes: Any, no: Any) -> Value:
    if isinstance(condition, Const) and condition.scalar is not None:
        return b.expand(b.materialise(cast(b, yes if condition.scalar else no, out.dtype)), out.shape)
    prog, refs, inputs = Prog(), [], []
    for arg, dtype in ((condition, "bool"), (yes, out.dtype), (no, out.dtype)):
        scalar = arg.scalar if isinstance(arg, Const) else None
        if scalar is not None:
            refs.append(("c", {"float32": float, "int32": int, "bool": bool}[dtype](scalar)))
        else:
            inputs.append(b.materialise(arg))
            refs.append(_cast(prog, ("x", len(inputs) - 1), arg.dtype, dtype))
    return b.pointwise(prog, prog("where", *refs), inputs, out.shape, out.dtype)


# ---- views ----------------------------------------------------------------------------------------------------------


@register("alias.default", "detach.default", "clone.default", "contiguous.default", "lift_fresh_copy.default")
def _identity(b: GraphBuilder, out: Out, x: Arg, **_: Any) -> Arg:
    return x


@register("copy.default")
def _copy(b: GraphBuilder, out: Out, x: Arg, source: Arg, *_: Any) -> Value:
    return b.expand(b.materialise(cast(b, source, out.dtype)), out.shape)


@register("view.default", "_unsafe_view.default", "reshape.default", "squeeze.dim", "squeeze.dims", "squeeze.default")
@register("unsqueeze.default", "view_copy.default")
def _reshape(b: GraphBuilder, out: Out, x: Arg, *_: Any) -> Value:
    return b.reshape(b.materialise(x), out.shape)


@register("permute.default")
def _permute(b: GraphBuilder, out: Out, x: Arg, order: Sequence[int]) -> Value:
    return b.permute(b.materialise(x), [a % len(x.shape) for a in order])


@register("transpose.int")
def _transpose(b: GraphBuilder, out: Out, x: Arg, i: int, j: int) -> Value:
    order = list(range(len(x.shape)))
    order[i], order[j] = order[j], order[i]
    return b.permute(b.materialise(x), order)


@register("t.default")
def _t(b: GraphBuilder, out: Out, x: Arg) -> Value:
    return b.permute(b.materialise(x), list(range(len(x.shape)))[::-1])


@register("expand.default")
def _expand(b: GraphBuilder, out: Out, x: Arg, *_: Any, **__: Any) -> Value:
    return b.expand(b.materialise(x), out.shape)


@register("repeat.default")
def _repeat(b: GraphBuilder, out: Out, x: Arg, times: Sequence[int]) -> Value:
    shape = (1,) * (len(times) - len(x.shape)) + x.shape
    apart = b.reshape(b.materialise(x), [n for extent in shape for n in (1, extent)])
    spread = b.expand(apart, [n for pair in zip(times, shape, strict=True) for n in pair])
    return b.reshape(spread, out.shape)


def bounds(extent: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Python's rule for slice limits, with torch's "as far as it goes" integers."""
    first, last, _ = slice(start, stop).indices(extent)
    return first, max(first, last)


@register("slice.Tensor")
def _slice(
    b: GraphBuilder, out: Out, x: Arg, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    return b.slice(b.materialise(x), axis % len(x.shape), *bounds(x.shape[axis], start, stop), step)


@register("select.int")
def _select(b: GraphBuilder, out: Out, x: Arg, axis: int, index: int) -> Value:
    axis, index = axis % len(x.shape), index % x.shape[axis]
    return b.reshape(b.slice(b.materialise(x), axis, index, index + 1), out.shape)


@register("split_with_sizes.default")
def _split(b: GraphBuilder, out: Any, x: Arg, sizes: Sequence[int], axis: int = 0) -> tuple[Value, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(
        b.slice(b.materialise(x), axis % len(x.shape), end - n, end) for n, end in zip(sizes, ends, strict=True)
    )


# ---- placing parts --------------------------------------------------------------------------------------------------


@register("cat.default")
def _cat(b: GraphBuilder, out: Out, parts: Sequence[Arg], axis: int = 0) -> Value:
    axis %= len(out.shape)
    parts = [p for p in parts if len(p.shape) == len(out.shape)]
    starts = np.cumsum([0, *(p.shape[axis] for p in parts[:-1])]).tolist()
    return b.concat([cast(b, p, out.dtype) for p in parts], starts, axis, out.shape)


@register("select_backward.default")
def _select_backward(b: GraphBuilder, out: Out, dy: Arg, sizes: Any, axis: int, index: int) -> Value:
    axis %= len(out.shape)
    part = b.reshape(b.materialise(dy), (*out.shape[:axis], 1, *out.shape[axis + 1 :]))
    return b.concat([part], [index % out.shape[axis]], axis, out.shape)


@register("slice_backward.default")
def _slice_backward(
    b: GraphBuilder, out: Out, dy: Arg, sizes: Any, axis: int, start: int, stop: int, step: int
) -> Value:
    axis %= len(out.shape)
    if dy.shape == out.shape:
        return b.materialise(dy)
    first = bounds(out.shape[axis], start, stop)[0]
    if step != 1:
        # Each element takes the first of ``step`` places; then the whole is put where it began.
        before, n, after = out.shape[:axis], dy.shape[axis], out.shape[axis + 1 :]
        part = b.reshape(b.materialise(dy), (*before, n, 1, *after))
        spread = b.reshape(b.concat([part], [0], axis + 1, (*before, n, step, *after)), (*before, n * step, *after))
        dy = b.slice(spread, axis, 0, min(n * step, out.shape[axis] - first))
        if dy.shape == out.shape:
            return dy
    return b.concat([dy], [first], axis, out.shape)


def _scatter(b: GraphBuilder, out: Out, x: Arg, part: Arg, axis: int, start: int) -> Value:
    """``x`` with ``part`` written over it from ``start`` on."""
    axis, n = axis % len(out.shape), part.shape[axis % len(out.shape)]
    if isinstance(x, Const) and x.scalar == 0:
        return b.concat([part], [start], axis, out.shape)
    whole = b.materialise(x)
    pieces = [(0, b.slice(whole, axis, 0, start))] if start else []
    pieces.append((start, b.materialise(part)))
    if start + n < out.shape[axis]:
        pieces.append((start + n, b.slice(whole, axis, start + n, out.shape[axis])))
    return b.concat([p for _, p in pieces], [s for s, _ in pieces], axis, out.shape)


@register("slice_scatter.default")
def _slice_scatter(
    b: GraphBuilder, out: Out, x: Arg, part: Arg, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    if step != 1:
        raise GraphError(f"writing to a slice with step {step} is not supported: use step 1")
    return _scatter(b, out, x, part, axis, bounds(out.shape[axis], start, stop)[0])


@register("select_scatter.default")
def _select_scatter(b: GraphBuilder, out: Out, x: Arg, part: Arg, axis: int, index: int) -> Value:
    axis %= len(out.shape)
    row = b.reshape(b.materialise(part), (*out.shape[:axis], 1, *out.shape[axis + 1 :]))
    return _scatter(b, out, x, row, axis, index % out.shape[axis])


@register("constant_pad_nd.default")
def _pad(b: GraphBuilder, out: Out, x: Arg, pads: Sequence[int], value: float = 0.0) -> Value:
    result = b.materialise(x)
    for i in range(len(pads) // 2):
        axis, before, after = len(x.shape) - 1 - i, pads[2 * i], pads[2 * i + 1]
        n = result.shape[axis]
        result = b.slice(result, axis, max(0, -before), n - max(0, -after))
        if before > 0 or after > 0:
            inner, first = result.shape[axis], max(0, before)
            n = inner + first + max(0, after)
            parts: list[tuple[int, Arg]] = [(first, result)]
            for start, stop in ((0, first), (first + inner, n)) if value != 0 else ():
                if stop > start:
                    shape = (*result.shape[:axis], stop - start, *result.shape[axis + 1 :])
                    fill: np.ndarray = np.asarray(value).astype(_ATEN_TYPES[out.dtype])
                    parts.append((start, Const(np.broadcast_to(fill, shape))))
            parts.sort(key=lambda part: part[0])
            whole = (*result.shape[:axis], n, *result.shape[axis + 1 :])
            result = b.concat([p for _, p in parts], [s for s, _ in parts], axis, whole)
    return result


# ---- contractions ---------------------------------------------------------------------------------------------------


@register("mm.default")
def _mm(b: GraphBuilder, out: Out, x: Arg, y: Arg, alpha: float = 1.0) -> Value:
    (m, k), n = x.shape, y.shape[1]
    if k == 1 and alpha == 1:
        return _pointwise(b, POINTWISE["aten.mul.Tensor"], out, [x, y], {}, "out")
    return b.contract(
        b.operand(x, ("reshape", (1, m, k))), b.operand(y, ("reshape", (1, k, n))), out.shape, (1, m, n), alpha
    )


@register("bmm.default")
def _bmm(b: GraphBuilder, out: Out, x: Arg, y: Arg, alpha: float = 1.0) -> Value:
    if x.shape[2] == 1 and alpha == 1:
        return _pointwise(b, POINTWISE["aten.mul.Tensor"], out, [x, y], {}, "out")
    return b.contract(b.operand(x), b.operand(y), out.shape, out.shape, alpha)


@register("addmm.default", "baddbmm.default")
def _addmm(b: GraphBuilder, out: Out, c: Arg, x: Arg, y: Arg, *, beta: float = 1, alpha: float = 1) -> Value:
    product = (_mm if len(x.shape) == 2 else _bmm)(b, out, x, y, alpha)
    scaled = (
        c if beta == 1 else _pointwise(b, POINTWISE["aten.mul.Tensor"], Out(c.shape, c.dtype), [c, beta], {}, "out")
    )
    return _pointwise(b, POINTWISE["aten.add.Tensor"], out, [product, scaled], {}, "out")


# ---- reductions -----------------------------------------------------------------------------------------------------


def _reduction(fn: str) -> Callable[..., Value]:
    def rule(b: GraphBuilder, out: Out, x: Arg, axes: Any = None, keepdim: bool = False, dtype: Any = None) -> Arg:
        every = tuple(range(len(x.shape)))
        chosen = every if axes is None or axes == [] or axes == () else axes
        chosen = (chosen,) if isinstance(chosen, int) else tuple(chosen)
        if fn == "max" and x.dtype == "bool":
            found = b.reduce("max", b.materialise(cast(b, x, "float32")), chosen, keepdim)
            return _pointwise(b, COMPARE["aten.ne.Scalar"], out, [found, 0.0], {}, "common")
        if out.dtype != x.dtype or out.dtype != "float32":
            return cast(b, b.reduce(fn, b.materialise(cast(b, x, "float32")), chosen, keepdim), out.dtype)
        return b.reduce(fn, x, chosen, keepdim)

    return rule  # type: ignore[return-value]


register("sum.dim_IntList", "sum.default")(_reduction("sum"))
register("mean.dim", "mean.default")(_reduction("mean"))
register("amax.default", "any.dim", "any.dims", "any.default", "max.default")(_reduction("max"))
