"""Lookups and indexing: ATen ops whose index arithmetic mostly vanishes at capture.

Models index with ranges that are known when they are traced (positions, masks of positions). Such an index is a slice
and a broadcast in disguise, and becomes a view; its gradient becomes sums and a placement. Only indices that change
from batch to batch stay gathers and scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from layoutopt.aten import Out, constant, register
from layoutopt.capture_build import Const, GraphBuilder, Prog, Shape, Value
from layoutopt.errors import GraphError

__all__ = ["Progression", "progression"]

Arg = Value | Const


class Progression(NamedTuple):
    """An index array that counts ``start, start + step, …`` over ``axes`` (row-major) and repeats over the others."""

    start: int
    step: int
    length: int
    axes: tuple[int, ...]


def progression(index: np.ndarray) -> Progression | None:
    """The index as a progression, or None where it is none."""
    axes = tuple(a for a in range(index.ndim) if index.shape[a] > 1 and bool((np.diff(index, axis=a) != 0).any()))
    core = index[tuple(slice(None) if a in axes else slice(0, 1) for a in range(index.ndim))].reshape(-1)
    start = int(core[0])
    step = int(core[1]) - start if core.size > 1 else 1
    if step < 1 or not bool((core == start + step * np.arange(core.size)).all()):
        return None
    return Progression(start, step, core.size, axes)


def _inside(index: np.ndarray, extent: int) -> np.ndarray:
    """The index counted from the front.

    Raises:
        GraphError: it leaves the axis.
    """
    index = np.where(index < 0, index + extent, index)
    if index.size and (index.min() < 0 or index.max() >= extent):
        raise GraphError(f"indices reach from {index.min()} to {index.max()}, expected within 0..{extent - 1}")
    return index


def _along(b: GraphBuilder, value: Value, axis: int, p: Progression) -> Value:
    return b.slice(value, axis, p.start, p.start + p.step * (p.length - 1) + 1, p.step)


def _spread(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(n if a in axes else 1 for a, n in enumerate(shape))


# ---- embedding ------------------------------------------------------------------------------------------------------


@register("embedding.default")
def _embedding(b: GraphBuilder, out: Out, table: Arg, ids: Arg, *_: Any) -> Value:
    rows, width = table.shape
    if isinstance(ids, Const):
        index = _inside(ids.array, rows)
        found = progression(index)
        if found is not None:
            part = _along(b, b.materialise(table), 0, found)
            return b.expand(b.reshape(part, (*_spread(index.shape, found.axes), width)), out.shape)
        ids = constant(index)
    return _gather(b, b.operand(table), ids, out.shape, width)


def _gather(b: GraphBuilder, table: Any, ids: Arg, shape: Shape, width: int) -> Value:
    n = prod(ids.shape)
    operands = [table, b.operand(ids, ("reshape", (n,)))]
    return b.emit("gather", operands, [("", shape, "float32", [("reshape", (n, width))])])[0]


@register("embedding_dense_backward.default")
def _embedding_backward(
    b: GraphBuilder, out: Out, dy: Arg, ids: Arg, rows: int, padding_idx: int, by_frequency: bool
) -> Value:
    if by_frequency:
        raise GraphError("scale_grad_by_freq is not supported: build the embedding without it")
    return _accumulate(b, out.shape, dy, ids, padding_idx)


def _accumulate(b: GraphBuilder, shape: Shape, dy: Arg, ids: Arg, padding_idx: int = -1) -> Value:
    """Rows of ``dy`` added up at ``ids`` in zeros of ``shape`` (rows first)."""
    rows, width = shape[0], prod(shape[1:])
    if isinstance(ids, Const):
        index = _inside(ids.array, rows)
        found = progression(index)
        if found and found.step == 1 and not found.start <= padding_idx < found.start + found.length:
            repeated = [a for a in range(index.ndim) if a not in found.axes and index.shape[a] > 1]
            total = b.reduce("sum", dy, repeated) if repeated else b.materialise(dy)
            part = b.reshape(total, (found.length, *shape[1:]))
            return part if found.length == rows else b.concat([part], [found.start], 0, shape)
        ids = constant(index)
    n = prod(ids.shape)
    operands = [b.operand(dy, ("reshape", (n, width))), b.operand(ids, ("reshape", (n,)))]
    steps = [("reshape", (rows, width))]
    return b.emit("scatter_add", operands, [("", shape, "float32", steps)], {"padding_idx": int(padding_idx)})[0]


# ---- indexing -------------------------------------------------------------------------------------------------------


@register("index.Tensor", "_unsafe_index.Tensor")
def _index(b: GraphBuilder, out: Out, x: Arg, indices: Sequence[Arg | None]) -> Value:
    at = [i for i, index in enumerate(indices) if index is not None]
    if all(isinstance(indices[i], Const) for i in at):
        seen = _index_view(b, b.materialise(x), {i: indices[i].array for i in at}, out.shape)  # type: ignore[union-attr]
        if seen is not None:
            return seen
    if x.dtype != "float32":
        raise GraphError(f"a lookup in a table of {x.dtype} is not supported: only float32 tables are gathered")
    # Indexed axes come first; their result goes where numpy puts it.
    order = [*at, *(a for a in range(len(x.shape)) if a not in at)]
    front = b.permute(b.materialise(x), order)
    ids, extent = _linear(b, front.shape, [indices[i] for i in at])
    rest = front.shape[len(at) :]
    table = b.operand(front, ("reshape", (extent, prod(rest))))
    rows = _gather(b, table, ids, (*ids.shape, *rest), prod(rest))
    return b.permute(rows, _numpys_order(at, len(ids.shape), len(rest)))


def _numpys_order(at: Sequence[int], common: int, rest: int) -> list[int]:
    """Where the axes of ``[common…, rest…]`` go: indexed axes that are adjacent keep their place."""
    before = at[0] if list(at) == list(range(at[0], at[-1] + 1)) else 0
    return [*range(common, common + before), *range(common), *range(common + before, common + rest)]


def _linear(b: GraphBuilder, shape: Shape, given: Sequence[Any]) -> tuple[Arg, int]:
    """One index into the merged leading axes, and their merged extent."""
    if any(i.dtype != "int32" for i in given):
        raise GraphError("indexing with a mask gives a shape that depends on data: use integers or where()")
    extent = prod(shape[: len(given)])
    if len(given) == 1 and isinstance(given[0], Value):
        return given[0], extent
    if all(isinstance(i, Const) for i in given):
        arrays = [_inside(i.array, n) for i, n in zip(given, shape, strict=False) if isinstance(i, Const)]
        return constant(np.ravel_multi_index(np.broadcast_arrays(*arrays), shape[: len(given)])), extent
    common = np.broadcast_shapes(*(i.shape for i in given))
    p = Prog()
    total: tuple[str, Any] = ("c", 0)
    for at, n in enumerate(shape[: len(given)]):
        index = p("where", p("lt", ("x", at), ("c", 0)), p("add", ("x", at), ("c", n)), ("x", at))
        total = index if at == 0 else p("add", p("mul", total, ("c", n)), index)
    return b.pointwise(p, total, [b.materialise(i) for i in given], common, "int32"), extent


def _index_view(b: GraphBuilder, x: Value, indices: dict[int, np.ndarray], shape: Shape) -> Value | None:
    """Indexing as slices, a permutation and a broadcast, or None where it is something else."""
    if any(i.dtype.kind != "i" for i in indices.values()):
        return None
    common = np.broadcast_shapes(*(i.shape for i in indices.values()))
    found: dict[int, Progression] = {}
    for axis, index in indices.items():
        p = progression(np.broadcast_to(_inside(index, x.shape[axis]), common))
        if p is None or any(set(p.axes) & set(q.axes) for q in found.values()):
            return None
        found[axis] = p
        x = _along(b, x, axis, p)
    # Split each indexed axis into the result axes it counts over; then bring those together, in numpy's order.
    split: list[int] = []
    label: list[Any] = []
    for axis, extent in enumerate(x.shape):
        axes = found[axis].axes if axis in found else None
        split += [extent] if axes is None else [common[a] for a in axes]
        label += [("kept", axis)] if axes is None else [("index", a) for a in axes]
    x = b.reshape(x, split)
    at = sorted(indices)
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = [("kept", a) for a in range(at[0])] if adjacent else []
    indexed = [("index", a) for a in range(len(common)) if ("index", a) in label]
    after = [entry for entry in label if entry[0] == "kept" and entry not in before]
    x = b.permute(x, [label.index(entry) for entry in before + indexed + after])
    middle = _spread(common, [a for _, a in indexed])
    return b.expand(b.reshape(x, (*x.shape[: len(before)], *middle, *x.shape[len(before) + len(indexed) :])), shape)


@register("index_select.default")
def _index_select(b: GraphBuilder, out: Out, x: Arg, axis: int, index: Arg) -> Value:
    return _index(b, out, x, [*[None] * (axis % len(x.shape)), index])


@register("index_put.default", "_unsafe_index_put.default")
def _index_put(
    b: GraphBuilder, out: Out, x: Arg, indices: Sequence[Arg | None], values: Arg, accumulate: bool = False
) -> Value:
    if not (accumulate and isinstance(x, Const) and x.scalar == 0):
        raise GraphError("index assignment is only supported where it adds into zeros, as gradients do")
    at = [i for i, index in enumerate(indices) if index is not None]
    order = [*at, *(a for a in range(len(out.shape)) if a not in at)]
    front = [out.shape[a] for a in order]
    ids, extent = _linear(b, tuple(front), [indices[i] for i in at])
    rest = tuple(front[len(at) :])
    to = _numpys_order(at, len(ids.shape), len(rest))
    spread = b.expand(b.materialise(values), [(*ids.shape, *rest)[a] for a in to])
    rows = b.permute(spread, [to.index(a) for a in range(len(to))])
    total = b.reshape(_accumulate(b, (extent, *rest), rows, ids), front)
    return b.permute(total, [order.index(a) for a in range(len(order))])
