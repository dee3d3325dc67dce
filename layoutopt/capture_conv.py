"""Convolution: over patches that tile the image it is a matrix product through views, else the kinds of its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from layoutopt.aten import Out, register, translate
from layoutopt.capture_build import Const, GraphBuilder, Shape, Value
from layoutopt.errors import GraphError

__all__: list[str] = []

Arg = Value | Const
Steps = list[tuple[str, Sequence[int]]]


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


def _patches(x: Shape, w: Shape, stride: Any, padding: Any, dilation: Any, groups: int) -> _Patches | None:
    """The convolution as one over patches, or None where they overlap or do not tile the image."""
    size = tuple(w[2:])
    dense = groups == 1 and not any(padding) and all(d == 1 or n == 1 for d, n in zip(dilation, size, strict=True))
    if not dense or tuple(stride) != size or any(n % s for n, s in zip(x[2:], size, strict=True)):
        return None
    return _Patches(x[0], x[1], w[0], tuple(n // s for n, s in zip(x[2:], size, strict=True)), size)


def _columns(b: GraphBuilder, x: Value, p: _Patches) -> Value:
    """The image as [patches, elements of a patch]."""
    d = len(p.size)
    x = b.reshape(x, (p.batch, p.channels, *(n for pair in zip(p.grid, p.size, strict=True) for n in pair)))
    order = [0, *(2 + 2 * i for i in range(d)), 1, *(3 + 2 * i for i in range(d))]
    return b.reshape(b.permute(x, order), (p.rows, p.cols))


# ---- in general -----------------------------------------------------------------------------------------------------


def _two(values: Sequence[int], one: int) -> tuple[int, int]:
    """A pair (h, w); a single axis is w."""
    pair = [one, *map(int, values)][-2:]
    return pair[0], pair[1]


def _attrs(stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, Any]:
    return {
        "stride": _two(stride, 1),
        "padding": _two(padding, 0),
        "dilation": _two(dilation, 1),
        "groups": int(groups),
    }


def _image(shape: Shape) -> Steps:
    """[n, channels, l] as [n, channels, 1, l]."""
    return [("reshape", (*shape[:2], 1, shape[2]))] if len(shape) == 3 else []


def _emit(b: GraphBuilder, kind: str, x: Arg, y: Arg, shape: Shape, attrs: dict[str, Any]) -> Value:
    operands = [b.operand(v, *_image(v.shape)) for v in (x, y)]
    return b.emit(kind, operands, [("", shape, "float32", _image(shape))], attrs)[0]


def _check(x: Shape, transposed: bool) -> None:
    if transposed:
        raise GraphError("a transposed convolution is not supported: up-sample, then convolve")
    if len(x) not in (3, 4):
        raise GraphError(f"a convolution over {len(x) - 2} axes is not supported: only 1 or 2")


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
    _check(x.shape, transposed)
    p = _patches(x.shape, w.shape, stride, padding, dilation, groups)
    if p is None:
        y = _emit(b, "conv", x, w, out.shape, _attrs(stride, padding, dilation, groups))
        if bias is None:
            return y
        spread = b.reshape(b.materialise(bias), (1, out.shape[1], *(1 for _ in out.shape[2:])))
        added: Value = translate(b, "aten.add.Tensor", out, [y, spread], {})
        return added
    columns = _columns(b, b.materialise(x), p)
    filters = b.permute(b.reshape(b.materialise(w), (p.filters, p.cols)), (1, 0))
    flat = Out((p.rows, p.filters), "float32")
    args = [columns, filters] if bias is None else [bias, columns, filters]
    rows: Value = translate(b, f"aten.{'mm' if bias is None else 'addmm'}.default", flat, args, {})
    d = len(p.grid)
    return b.permute(b.reshape(rows, (p.batch, *p.grid, p.filters)), (0, d + 1, *range(1, d + 1)))


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
    _check(x.shape, transposed)
    p = _patches(x.shape, w.shape, stride, padding, dilation, groups)
    if p is None:
        attrs = _attrs(stride, padding, dilation, groups)
        return (
            _emit(b, "conv_grad_input", dy, w, x.shape, attrs) if mask[0] else None,
            _emit(b, "conv_grad_weight", dy, x, w.shape, attrs) if mask[1] else None,
            b.reduce("sum", dy, (0, *range(2, len(dy.shape)))) if mask[2] else None,
        )
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
