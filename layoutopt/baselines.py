"""The layouts of other mobile runtimes, as address maps: what their layout strategies choose from.

Each constructor gives one peer's layout over our logical axes. Activations are ``(n, c, *spatial)``, whatever order the
peer writes the axes in; a matrix is ``(rows, columns)``, its columns taking the place of the channels. Linear weights
are ``(o, i)``: output features, input features. Images with a depth (texture arrays, 3-D textures) are written as 2-D
images, the slices one below the other: the same texels in the same rows.

Source: address maps gathered from the peers' public code in November 2026. Two details are our reading: ExecuTorch's
4×4 weight blocks follow each other along a row, and ncnn's per-channel alignment is left out (a packed channel is
already a multiple of 16 bytes).
"""

from __future__ import annotations

from typing import Literal

from layoutopt.errors import LayoutError
from layoutopt.layout import LANES, Layout

__all__ = [
    "executorch",
    "executorch_weights",
    "mnn_buffer",
    "mnn_image",
    "mnn_matmul_weights",
    "mnn_weights_image",
    "ncnn",
    "tflite_phwc4",
    "tflite_texture",
    "tflite_weights",
    "tvm_flat",
    "tvm_nchw4c",
    "tvm_nchw4c_texture",
    "tvm_oihw4o",
]

Digits = list[tuple[int, int | None]]


def _whole(axes: range | tuple[int, ...]) -> Digits:
    return [(axis, None) for axis in axes]


def _activation(shape: tuple[int, ...]) -> tuple[Digits, Digits]:
    """Digits of the spatial axes: all but the last, and the last."""
    if len(shape) < 2:
        raise LayoutError(f"an activation of shape {shape}: expected at least 2 axes, (n, c, *spatial)")
    spatial = tuple(range(2, len(shape)))
    return _whole(spatial[:-1]), _whole(spatial[-1:])


# ---- MNN -----------------------------------------------------------------------------------------------------------


def mnn_image(shape: tuple[int, ...]) -> Layout:
    """Image of (n, c, h, w): column ``c/4·W + w``, row ``n·H + h``, lane ``c%4``.

    Of a matrix: column ``col/4``, row ``row``, lane ``col%4``.
    """
    outer, last = _activation(shape)
    return Layout.image(shape, [(0, None), *outer], [(1, None), *last], 1)


def mnn_buffer(shape: tuple[int, ...]) -> Layout:
    """NC4HW4 buffer of (n, c, h, w): ``(((c/4·N + n)·H + h)·W + w)·4 + c%4``."""
    outer, last = _activation(shape)
    return Layout.of(shape, [(1, None), (0, None), *outer, *last, (1, LANES)])


def mnn_weights_image(shape: tuple[int, int]) -> Layout:
    """1×1 convolution weights (o, i) on an image: column ``i/4``, row ``o``, lane ``i%4``."""
    return mnn_image(shape)


def mnn_matmul_weights(shape: tuple[int, int], k_multiple: int = 8, n_multiple: int = 8) -> Layout:
    """Matrix multiplication weights (o, i) in a buffer: row-major [K, N], K = i and N = o padded to 8…128."""
    return Layout.row_major(shape, (1, 0), {1: k_multiple, 0: n_multiple})


# ---- TFLite (LiteRT) GPU delegate ----------------------------------------------------------------------------------


def tflite_phwc4(shape: tuple[int, ...]) -> Layout:
    """PHWC4 buffer of (n, c, h, w): vec4 ``((c/4·H + h)·W + w)·N + n``, lane ``c%4``; the batch is innermost."""
    outer, last = _activation(shape)
    return Layout.of(shape, [(1, None), *outer, *last, (0, None), (1, LANES)])


def tflite_texture(shape: tuple[int, ...]) -> Layout:
    """HDWC4 2-D texture of (n, c, h, w): column ``w·N + n``, row ``h·C4 + c/4``, lane ``c%4``."""
    outer, last = _activation(shape)
    return Layout.image(shape, [*outer, (1, None)], [*last, (0, None)], 1)


def tflite_weights(shape: tuple[int, int]) -> Layout:
    """Linear weights (o, i), I4O4 blocks: ``i/4·4·Opad + o/4·16 + i%4·4 + o%4``."""
    return Layout.tiled(shape, {0: LANES, 1: LANES}, (1, 0), (1, 0))


# ---- TVM -----------------------------------------------------------------------------------------------------------


def tvm_flat(shape: tuple[int, ...]) -> Layout:
    """A flat row-major buffer: what a transformer gets, since TVM lays out convolutions only."""
    return Layout.row_major(shape)


def tvm_nchw4c(shape: tuple[int, ...]) -> Layout:
    """Rank-5 NCHW4c buffer of (n, c, h, w): ``(((n·C4 + c/4)·H + h)·W + w)·4 + c%4``."""
    outer, last = _activation(shape)
    return Layout.of(shape, [(0, None), (1, None), *outer, *last, (1, LANES)])


def tvm_nchw4c_texture(shape: tuple[int, ...]) -> Layout:
    """Adreno texture array of (n, c, h, w): depth ``n·C4 + c/4``, row ``h``, column ``w``, lane ``c%4``."""
    outer, last = _activation(shape)
    return Layout.image(shape, [(0, None), (1, None), *outer], last, 1)


def tvm_oihw4o(shape: tuple[int, ...]) -> Layout:
    """Convolution weights (o, i, h, w) as OIHW4o: ``(((o/4·I + i)·H + h)·W + w)·4 + o%4``."""
    return Layout.tiled(shape, {0: LANES})


# ---- ExecuTorch Vulkan ---------------------------------------------------------------------------------------------


def executorch(
    shape: tuple[int, ...],
    packed: Literal["width", "height", "channels"] = "width",
    storage: Literal["buffer", "texture"] = "texture",
) -> Layout:
    """A tensor whose last axes are (…, channels, height, width), packed along one of them.

    Args:
        shape: 2 to 4 axes; fewer than that axis needs is an error.
        packed: the axis whose neighbours are neighbours in memory.
        storage: "buffer": dense, the packed axis innermost, no padding. "texture": the 3-D texture with x along the
            width, y along the height and z along batch and channels; four neighbours along the packed axis are a texel.
    """
    axis = len(shape) - {"width": 1, "height": 2, "channels": 3}[packed]
    if not 2 <= len(shape) <= 4 or axis < 0:
        raise LayoutError(
            f"shape {shape} cannot be {packed}-packed: expected 2 to 4 axes, (batch, channels, height, width)"
        )
    rank = len(shape)
    if storage == "buffer":
        return Layout.row_major(shape, (*(a for a in range(rank) if a != axis), axis))
    return Layout.image(shape, _whole(range(rank - 1)), _whole((rank - 1,)), axis)


def executorch_weights(shape: tuple[int, int]) -> Layout:
    """Linear weights in 4×4 blocks, block by block along a row."""
    return Layout.r_tile(shape, LANES, LANES)


# ---- ncnn ----------------------------------------------------------------------------------------------------------


def ncnn(shape: tuple[int, ...]) -> Layout:
    """Blob packed by four along its first axis: (w,), (h, w) or (c, h, w); unpacked where four do not divide it."""
    if shape[0] % LANES:
        return Layout.row_major(shape)
    return Layout.tiled(shape, {0: LANES})
