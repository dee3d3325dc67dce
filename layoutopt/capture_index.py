"""Lookups, indexing and convolution over patches: ATen ops whose index arithmetic mostly vanishes at capture.

Models index with ranges that are known when they are traced (positions, masks of positions). Such an index is a slice
and a broadcast in disguise, and becomes a view; its gradient becomes sums and a placement. Only indices that change
from batch to batch stay gathers and scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from layoutopt.aten import Out, constant, register, translate
from layoutopt.capture_build import Const, GraphBuilder, Shape, Value
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
    ids, extent = _linear(x.shape, indices)
    table = b.operand(x, ("reshape", (extent, prod(x.shape[len(at) :]))))
    if x.dtype != "float32":
        raise GraphError(f"a lookup in a table of {x.dtype} is not supported: only float32 tables are gathered")
    return _gather(b, table, ids, out.shape, prod(x.shape[len(at) :]))


def _linear(shape: Shape, indices: Sequence[Arg | None]) -> tuple[Arg, int]:
    """One index into the merged leading axes, and their merged extent."""
    given = [i for i in indices if i is not None]
    if any(i is None for i in indices[: len(given)]):
        raise GraphError("indexing behind an axis that is kept whole is not supported: index the leading axes")
    if any(i.dtype != "int32" for i in given):
        raise GraphError("indexing with a mask gives a shape that depends on data: use integers or where()")
    extent = prod(shape[: len(given)])
    if len(given) == 1 and isinstance(given[0], Value):
        return given[0], extent
    arrays = [_inside(i.array, n) for i, n in zip(given, shape, strict=False) if isinstance(i, Const)]
    if len(arrays) != len(given):
        raise GraphError("several indices of which one changes with the batch are not supported: index one axis")
    return constant(np.ravel_multi_index(np.broadcast_arrays(*arrays), shape[: len(given)])), extent


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


@register("index_put.default", "_unsafe_index_put.default")
def _index_put(
    b: GraphBuilder, out: Out, x: Arg, indices: Sequence[Arg | None], values: Arg, accumulate: bool = False
) -> Value:
    if not (accumulate and isinstance(x, Const) and x.scalar == 0):
        raise GraphError("index assignment is only supported where it adds into zeros, as gradients do")
    ids, extent = _linear(x.shape, indices)
    rest = out.shape[sum(i is not None for i in indices) :]
    values = b.expand(b.materialise(values), (*ids.shape, *rest))
    total = _accumulate(b, (extent, *rest), values, ids)
    return b.reshape(total, out.shape)


# ---- convolution over patches ---------------------------------------------------------------------------------------


class _Patches(NamedTuple):
    """A convolution whose kernel is as wide as its stride: each input element is in one patch."""

    batch: int
    channels: int
    filters: int
    grid: Shape
    size: Shape

    @property
    def rows(self) -> int:
        return self.batch * prod(self.grid)

    @property
    def cols(self) -> int:
        return self.channels * prod(self.size)


def _patches(x: Shape, w: Shape, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> _Patches:
    size = w[2:]
    plain = not transposed and groups == 1 and not any(padding) and all(d == 1 for d in dilation)
    if not plain or tuple(stride) != tuple(size) or any(n % s for n, s in zip(x[2:], size, strict=True)):
        raise GraphError(
            f"a convolution with kernel {list(size)}, stride {list(stride)}, padding {list(padding)}, groups {groups}: "
            "only patch embeddings are supported (stride equal to the kernel, no padding, no groups, and patches that "
            "tile the image)"
        )
    return _Patches(x[0], x[1], w[0], tuple(n // s for n, s in zip(x[2:], size, strict=True)), tuple(size))


def _columns(b: GraphBuilder, x: Value, p: _Patches) -> Value:
    """The image as [patches, elements of a patch]."""
    d = len(p.size)
    x = b.reshape(x, (p.batch, p.channels, *(n for pair in zip(p.grid, p.size, strict=True) for n in pair)))
    order = [0, *(2 + 2 * i for i in range(d)), 1, *(3 + 2 * i for i in range(d))]
    return b.reshape(b.permute(x, order), (p.rows, p.cols))


@register("convolution.default")
def _convolution(
    b: GraphBuilder,
    out: Out,
    x: Arg,
    w: Arg,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    p = _patches(x.shape, w.shape, stride, padding, dilation, transposed, groups)
    columns = _columns(b, b.materialise(x), p)
    filters = b.permute(b.reshape(b.materialise(w), (p.filters, p.cols)), (1, 0))
    flat = Out((p.rows, p.filters), "float32")
    args = [columns, filters] if bias is None else [bias, columns, filters]
    y: Value = translate(b, f"aten.{'mm' if bias is None else 'addmm'}.default", flat, args, {})
    d = len(p.grid)
    return b.permute(b.reshape(y, (p.batch, *p.grid, p.filters)), (0, d + 1, *range(1, d + 1)))


@register("convolution_backward.default")
def _convolution_backward(
    b: GraphBuilder,
    out: Any,
    dy: Arg,
    x: Arg,
    w: Arg,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    p = _patches(x.shape, w.shape, stride, padding, dilation, transposed, groups)
    d = len(p.grid)
    rows = b.reshape(b.permute(b.materialise(dy), (0, *range(2, 2 + d), 1)), (p.rows, p.filters))
    dx = dw = dbias = None
    if mask[0]:
        filters = b.reshape(b.materialise(w), (p.filters, p.cols))
        columns = translate(b, "aten.mm.default", Out((p.rows, p.cols), "float32"), [rows, filters], {})
        split = b.reshape(columns, (p.batch, *p.grid, p.channels, *p.size))
        order = [0, d + 1, *(a for i in range(d) for a in (1 + i, d + 2 + i))]
        dx = b.reshape(b.permute(split, order), x.shape)
    if mask[1]:
        args = [b.permute(rows, (1, 0)), _columns(b, b.materialise(x), p)]
        dw = b.reshape(translate(b, "aten.mm.default", Out((p.filters, p.cols), "float32"), args, {}), w.shape)
    if mask[2]:
        dbias = b.reduce("sum", rows, (0,))
    return dx, dw, dbias
