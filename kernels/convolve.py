"""Convolution in numpy: one matrix product per position of the window, for the interpreter.

Images are [n, channels, h, w]; see ``layoutopt/graph.py`` for what the kinds mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutopt.errors import GraphError

__all__ = ["Window", "conv", "grad_input", "grad_weight"]

Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """How a convolution reads: pairs are (h, w), in elements."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> Window:
        """From an op's attributes; what is missing is the default.

        Raises:
            GraphError: a stride, dilation or number of groups below 1, or a padding below 0.
        """
        pairs = {k: (int(v[0]), int(v[1])) for k, v in attrs.items() if k in ("stride", "padding", "dilation")}
        window = Window(**pairs, groups=int(attrs.get("groups", 1)))
        if min(*window.stride, *window.dilation, window.groups) < 1 or min(window.padding) < 0:
            raise GraphError(
                f"a convolution with {window}: stride, dilation and groups are 1 or more, padding 0 or more"
            )
        return window

    def extents(self, image: Pair, kernel: Pair) -> Pair:
        """Output extents (oh, ow).

        Raises:
            GraphError: the kernel does not fit the padded image.
        """
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        room = [n + 2 * p - r for n, p, r in zip(image, self.padding, reach, strict=True)]
        if min(room) < 0:
            raise GraphError(f"a kernel of {kernel} dilated by {self.dilation} does not fit an image of {image}")
        return room[0] // self.stride[0] + 1, room[1] // self.stride[1] + 1

    def reads(self, out: Shape, kernel: Pair) -> Iterator[tuple[int, int, tuple[slice, slice]]]:
        """Per window position (a, b): the part of the padded image that meets it, one element per output."""
        for a in range(kernel[0]):
            for b in range(kernel[1]):
                first = a * self.dilation[0], b * self.dilation[1]
                rows, cols = (slice(f, f + s * (n - 1) + 1, s) for f, s, n in zip(first, self.stride, out, strict=True))
                yield a, b, (rows, cols)

    def padded(self, x: np.ndarray) -> np.ndarray:
        """The image with its border of zeros."""
        (ph, pw) = self.padding
        return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))

    def grouped(self, x: np.ndarray, axis: int) -> np.ndarray:
        """Channels of ``axis`` split into [groups, channels of a group].

        Raises:
            GraphError: they do not divide.
        """
        if x.shape[axis] % self.groups:
            raise GraphError(f"{x.shape[axis]} channels do not divide into {self.groups} groups")
        shape = (*x.shape[:axis], self.groups, x.shape[axis] // self.groups, *x.shape[axis + 1 :])
        return x.reshape(shape)


def _check(x: Shape, w: Shape, window: Window) -> None:
    if x[1] != w[1] * window.groups:
        raise GraphError(f"an image of {x[1]} channels meets weights of {w[1]} channels in {window.groups} groups")


def conv(x: np.ndarray, w: np.ndarray, window: Window) -> np.ndarray:
    """``x[n,c,h,w], w[o,c/groups,kh,kw] -> y[n,o,oh,ow]``."""
    _check(x.shape, w.shape, window)
    kernel = (w.shape[2], w.shape[3])
    out = window.extents((x.shape[2], x.shape[3]), kernel)
    image, filters = window.grouped(window.padded(x), 1), window.grouped(w, 0)
    y = np.zeros((x.shape[0], *filters.shape[:2], *out), np.result_type(x, w))
    for a, b, part in window.reads(out, kernel):
        y += np.einsum("ngchw,goc->ngohw", image[(..., *part)], filters[..., a, b], optimize=True)
    return y.reshape(x.shape[0], w.shape[0], *out)


def grad_input(dy: np.ndarray, w: np.ndarray, shape: Shape, window: Window) -> np.ndarray:
    """``dy[n,o,oh,ow], w[o,c/groups,kh,kw] -> dx`` of ``shape`` [n,c,h,w]."""
    _check(shape, w.shape, window)
    _fits(dy.shape, shape, w.shape, window)
    (ph, pw), (h, width) = window.padding, shape[2:]
    filters, g = window.grouped(w, 0), window.grouped(dy, 1)
    groups = (window.groups, shape[1] // window.groups)
    dx = np.zeros((shape[0], *groups, h + 2 * ph, width + 2 * pw), np.result_type(dy, w))
    for a, b, part in window.reads(dy.shape[2:], (w.shape[2], w.shape[3])):
        dx[(..., *part)] += np.einsum("ngohw,goc->ngchw", g, filters[..., a, b], optimize=True)
    return dx.reshape(shape[0], shape[1], h + 2 * ph, width + 2 * pw)[:, :, ph : ph + h, pw : pw + width]


def grad_weight(dy: np.ndarray, x: np.ndarray, shape: Shape, window: Window) -> np.ndarray:
    """``dy[n,o,oh,ow], x[n,c,h,w] -> dw`` of ``shape`` [o,c/groups,kh,kw]."""
    _check(x.shape, shape, window)
    _fits(dy.shape, x.shape, shape, window)
    image, g = window.grouped(window.padded(x), 1), window.grouped(dy, 1)
    dw = np.zeros((window.groups, shape[0] // window.groups, *shape[1:]), np.result_type(dy, x))
    for a, b, part in window.reads(dy.shape[2:], (shape[2], shape[3])):
        dw[..., a, b] = np.einsum("ngohw,ngchw->goc", g, image[(..., *part)], optimize=True)
    return dw.reshape(shape)


def _fits(dy: Shape, x: Shape, w: Shape, window: Window) -> None:
    expected = (x[0], w[0], *window.extents((x[2], x[3]), (w[2], w[3])))
    if tuple(dy) != expected:
        raise GraphError(f"dy has shape {tuple(dy)}, expected {expected} for x {tuple(x)} and w {tuple(w)}")
