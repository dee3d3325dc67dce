"""The peers' layouts against the address formulas that their code states, element by element."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from layoutopt import baselines
from layoutopt.errors import LayoutError
from layoutopt.layout import Layout

SHAPES_4D = [(1, 4, 3, 5), (2, 7, 3, 5), (3, 1, 1, 1), (2, 8, 1, 13), (1, 13, 6, 1)]
SHAPES_2D = [(4, 4), (3, 7), (13, 60), (1, 1), (5, 8)]


def c4(n: int) -> int:
    return -(-n // 4)


def check(layout: Layout, formula: Callable[..., int | tuple[int, int, int]], size: tuple[int, ...]) -> None:
    assert layout.size == size
    assert layout.is_injective()
    for coordinate in np.ndindex(layout.shape):
        got = layout.offsets()[coordinate]
        assert (tuple(got) if layout.is_image else int(got)) == formula(*coordinate)


@pytest.mark.parametrize("shape", SHAPES_4D)
def test_activations(shape: tuple[int, int, int, int]) -> None:
    N, C, H, W = shape
    C4 = c4(C)
    padded = (N * C4 * H * W * 4,)
    check(
        baselines.mnn_image(shape),
        lambda n, c, h, w: (n * H + h, c // 4 * W + w, c % 4),
        (N * H, C4 * W, 4),
    )
    check(baselines.mnn_buffer(shape), lambda n, c, h, w: (((c // 4 * N + n) * H + h) * W + w) * 4 + c % 4, padded)
    check(baselines.tflite_phwc4(shape), lambda n, c, h, w: (((c // 4 * H + h) * W + w) * N + n) * 4 + c % 4, padded)
    check(
        baselines.tflite_texture(shape),
        lambda n, c, h, w: (h * C4 + c // 4, w * N + n, c % 4),
        (H * C4, W * N, 4),
    )
    check(baselines.tvm_nchw4c(shape), lambda n, c, h, w: (((n * C4 + c // 4) * H + h) * W + w) * 4 + c % 4, padded)
    check(
        baselines.tvm_nchw4c_texture(shape),
        lambda n, c, h, w: ((n * C4 + c // 4) * H + h, w, c % 4),
        (N * C4 * H, W, 4),
    )
    check(baselines.tvm_flat(shape), lambda n, c, h, w: ((n * C + c) * H + h) * W + w, (N * C * H * W,))


@pytest.mark.parametrize("shape", SHAPES_4D)
def test_convolution_weights(shape: tuple[int, int, int, int]) -> None:
    O, I, H, W = shape  # noqa: E741 - the field's names
    check(
        baselines.tvm_oihw4o(shape),
        lambda o, i, h, w: (((o // 4 * I + i) * H + h) * W + w) * 4 + o % 4,
        (c4(O) * I * H * W * 4,),
    )


@pytest.mark.parametrize("shape", SHAPES_4D)
def test_executorch(shape: tuple[int, int, int, int]) -> None:
    N, C, H, W = shape
    size = (N * C * H * W,)
    check(baselines.executorch(shape, "width", "buffer"), lambda n, c, h, w: ((n * C + c) * H + h) * W + w, size)
    check(baselines.executorch(shape, "height", "buffer"), lambda n, c, h, w: ((n * C + c) * W + w) * H + h, size)
    check(baselines.executorch(shape, "channels", "buffer"), lambda n, c, h, w: ((n * H + h) * W + w) * C + c, size)
    # Texture position (x, y, z): slices z lie one below the other.
    check(
        baselines.executorch(shape, "width"),
        lambda n, c, h, w: ((n * C + c) * H + h, w // 4, w % 4),
        (N * C * H, c4(W), 4),
    )
    check(
        baselines.executorch(shape, "height"),
        lambda n, c, h, w: ((n * C + c) * c4(H) + h // 4, w, h % 4),
        (N * C * c4(H), W, 4),
    )
    check(
        baselines.executorch(shape, "channels"),
        lambda n, c, h, w: ((n * c4(C) + c // 4) * H + h, w, c % 4),
        (N * c4(C) * H, W, 4),
    )


@pytest.mark.parametrize("shape", SHAPES_2D)
def test_matrices_and_linear_weights(shape: tuple[int, int]) -> None:
    rows, cols = shape
    check(baselines.mnn_image(shape), lambda r, c: (r, c // 4, c % 4), (rows, c4(cols), 4))
    check(baselines.mnn_weights_image(shape), lambda o, i: (o, i // 4, i % 4), (rows, c4(cols), 4))
    o_pad = c4(rows) * 4
    check(
        baselines.tflite_weights(shape),
        lambda o, i: i // 4 * (4 * o_pad) + o // 4 * 16 + i % 4 * 4 + o % 4,
        (o_pad * c4(cols) * 4,),
    )
    n_pad, k_pad = -(-rows // 32) * 32, -(-cols // 8) * 8
    check(baselines.mnn_matmul_weights(shape, 8, 32), lambda o, i: i * n_pad + o, (n_pad * k_pad,))
    check(
        baselines.executorch_weights(shape),
        lambda o, i: (o // 4 * c4(cols) + i // 4) * 16 + o % 4 * 4 + i % 4,
        (o_pad * c4(cols) * 4,),
    )
    check(baselines.executorch(shape, "width"), lambda h, w: (h, w // 4, w % 4), (rows, c4(cols), 4))
    check(baselines.executorch(shape, "height"), lambda h, w: (h // 4, w, h % 4), (c4(rows), cols, 4))


def test_ncnn_packs_the_first_axis_where_four_divide_it() -> None:
    check(baselines.ncnn((8,)), lambda w: w, (8,))
    check(baselines.ncnn((8, 5)), lambda h, w: (h // 4 * 5 + w) * 4 + h % 4, (40,))
    check(baselines.ncnn((8, 3, 5)), lambda c, h, w: ((c // 4 * 3 + h) * 5 + w) * 4 + c % 4, (120,))
    check(baselines.ncnn((7, 5)), lambda h, w: h * 5 + w, (35,))


def test_the_same_map_under_two_names_is_equal() -> None:
    assert (
        baselines.mnn_buffer((1, 8, 3, 5)) == baselines.tvm_nchw4c((1, 8, 3, 5)) == baselines.tflite_phwc4((1, 8, 3, 5))
    )
    assert baselines.executorch((13, 60), "width") == baselines.mnn_image((13, 60))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: baselines.mnn_image((4,)), "at least 2 axes"),
        (lambda: baselines.executorch((3, 4), "channels"), "cannot be channels-packed"),
        (lambda: baselines.executorch((1, 1, 1, 3, 4)), "expected 2 to 4 axes"),
    ],
)
def test_shapes_without_the_axes_are_refused(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
