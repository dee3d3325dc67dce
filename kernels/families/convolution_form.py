"""Convolutions in one form: correlations over affine coordinates, and the views that turn them into matrix products.

Along one spatial axis a correlation reads, for output ``i`` and tap ``t``, the image at ``i*step + t*tap + at`` and the
weights at ``first + t*skip``, and writes output coordinate ``begin + i*every``. A convolution is one correlation; its
gradient for the image is one per residue of the coordinate modulo the stride, each with the taps that meet it. Taps are
counted so that the image is read forwards; the weights may then be read backwards (``skip < 0``).

The window of a correlation is itself a layout: image axes (n, c, h, w) become (n, c, i, t, j, u) with the strides
multiplied, elements shared between windows. Seen as [pixels, taps·channels] it is an operand of a matrix product, and
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import Any

from layoutopt.layout import Layout, Mode

__all__ = ["Axis", "Window", "correlations", "grouped", "matrix", "reach", "window_layout"]


@dataclass(frozen=True)
class Window:
    """A convolution's attributes: pairs are (h, w)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> Window:
        """From an op's attributes; what is missing is the default."""
        pairs = [tuple(int(v) for v in attrs.get(k, d)) for k, d in (("stride", (1, 1)), ("padding", (0, 0)))]
        dilation = tuple(int(v) for v in attrs.get("dilation", (1, 1)))
        return Window(pairs[0], pairs[1], dilation, int(attrs.get("groups", 1)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a correlation; see the module docstring.

    Attributes:
        out: outputs of this correlation.
        taps: weights that each of them meets; 0 where none does, and the output is zero.
        step: image coordinates per output.
        tap: image coordinates per tap, at least 0.
        at: image coordinate of output 0 and tap 0.
        first: weight coordinate of tap 0.
        skip: weight coordinates per tap.
        begin: output coordinate of output 0.
        every: output coordinates per output.
    """

    out: int
    taps: int
    step: int
    tap: int
    at: int
    first: int = 0
    skip: int = 1
    begin: int = 0
    every: int = 1

    @property
    def span(self) -> tuple[int, int]:
        """First image coordinate that is read, and one past the last."""
        return self.at, self.at + (self.out - 1) * self.step + max(self.taps - 1, 0) * self.tap + 1


@lru_cache(maxsize=1 << 10)
def correlations(
    kind: str, window: Window, image: tuple[int, int], kernel: tuple[int, int]
) -> tuple[tuple[Axis, Axis], ...]:
    """The correlations (h, w) that an op consists of.

    Args:
        kind: conv, conv_grad_weight (the same windows) or conv_grad_input.
        window: its attributes.
        image: extents of what the op writes along h and w; for conv_grad_weight, of dy.
        kernel: extents of the weights.
    """
    per_axis = []
    for out, taps, stride, pad, dilation in zip(
        image, kernel, window.stride, window.padding, window.dilation, strict=True
    ):
        if kind != "conv_grad_input":
            per_axis.append([Axis(out, taps, stride, dilation, -pad)])
        else:
            per_axis.append([_residue(a, out, taps, stride, pad, dilation) for a in range(min(stride, out))])
    return tuple(product(*per_axis))  # type: ignore[arg-type]


def _residue(a: int, out: int, taps: int, stride: int, pad: int, dilation: int) -> Axis:
    """Coordinates ``a + stride*i`` of the image's gradient: the taps whose distance to them the stride divides."""
    count = -(-(out - a) // stride)
    meets = [r for r in range(taps) if (a + pad - r * dilation) % stride == 0]
    if not meets:
        return Axis(count, 0, 1, 0, 0, begin=a, every=stride)
    every = stride // gcd(stride, dilation)
    last = meets[-1]  # read last tap first: dy then runs forwards
    return Axis(
        count, len(meets), 1, dilation * every // stride, (a + pad - last * dilation) // stride, last, -every, a, stride
    )


def reach(axes: list[Axis], extent: int) -> tuple[int, int]:
    """The coordinates that an image must have so that no tap of the axes leaves it: at least those it has."""
    spans = [axis.span for axis in axes if axis.taps]
    return min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=extent)


def grouped(layout: Layout, axis: int, groups: int) -> Layout | None:
    """Channels of ``axis`` split in two, groups in front of everything; None where that tears a tile."""
    shape = layout.shape
    split = layout.reshape((*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :]))
    return split and split.permute((axis, *(i for i in range(len(shape) + 1) if i != axis)))


@lru_cache(maxsize=1 << 13)
def window_layout(layout: Layout, axes: tuple[Axis, Axis], weights: bool = False) -> Layout | None:
    """An image [g, n, c, h, w] seen as [g, n, c, i, t, j, u], or weights [g, o, c, r, s] as [g, o, c, t, u].

    None where a spatial axis has no constant stride, or where a coordinate lies outside.
    """
    modes = [m for m in layout.modes if m.axis < 3]
    shape, base = list(layout.shape[:3]), layout.base[0]
    for position, axis in enumerate(axes):
        own = layout.axis_modes(3 + position)
        if len(own) > 1 or (own and own[0].dim):
            return None
        stride = own[0].stride if own else 0
        extent = layout.shape[3 + position]
        if weights:
            if axis.taps > 1 and axis.skip < 0:
                return None
            counts = [(axis.taps, max(axis.skip, 0))]
            start = axis.first
        else:
            counts, start = [(axis.out, axis.step), (axis.taps, axis.tap)], axis.at
        if start < 0 or start + sum((n - 1) * s for n, s in counts) >= extent:
            return None
        for n, s in counts:
            modes.append(Mode(len(shape), n, stride * s))
            shape.append(n)
        base += start * stride
    return Layout.build(tuple(shape), modes, layout.size, (base,))


def matrix(layout: Layout | None, *axes: tuple[int, ...]) -> Layout | None:
    """The layout with the given groups of axes merged, in the given order: [g, rows, columns]."""
    if layout is None:
        return None
    permuted = layout.permute(tuple(axis for group in axes for axis in group))
    return permuted.reshape(tuple(prod(layout.shape[axis] for axis in group) for group in axes))
