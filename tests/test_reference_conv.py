"""Convolution in the interpreter: against the definition written out, and gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import evaluate
from layoutopt.errors import GraphError
from tests.numeric import numeric_gradient

RNG = np.random.default_rng(11)

CASES = {
    "plain": ((2, 3, 5, 4), (4, 3, 2, 3), {}),
    "stride and padding": ((1, 2, 5, 7), (3, 2, 3, 3), {"stride": (2, 2), "padding": (1, 1)}),
    "uneven": ((2, 2, 4, 6), (2, 2, 3, 2), {"stride": (1, 3), "padding": (2, 0), "dilation": (2, 1)}),
    "groups": ((1, 4, 4, 3), (6, 2, 3, 2), {"padding": (1, 1), "groups": 2}),
    "depthwise, one axis": ((2, 3, 1, 7), (3, 1, 1, 3), {"stride": (1, 2), "padding": (0, 1), "groups": 3}),
    "rows that no window meets": ((1, 1, 6, 6), (2, 1, 2, 2), {"stride": (3, 3)}),
}


def definition(x: np.ndarray, w: np.ndarray, attrs: dict) -> np.ndarray:
    """The sum in the graph's docstring, an element at a time."""
    (sh, sw), (ph, pw), (dh, dw) = (
        attrs.get(k, d) for k, d in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))
    )
    groups = attrs.get("groups", 1)
    oh = (x.shape[2] + 2 * ph - dh * (w.shape[2] - 1) - 1) // sh + 1
    ow = (x.shape[3] + 2 * pw - dw * (w.shape[3] - 1) - 1) // sw + 1
    y = np.zeros((x.shape[0], w.shape[0], oh, ow))
    for n, o, i, j in np.ndindex(y.shape):
        first = o // (w.shape[0] // groups) * w.shape[1]
        for c, a, b in np.ndindex(w.shape[1:]):
            at = i * sh + a * dh - ph, j * sw + b * dw - pw
            if 0 <= at[0] < x.shape[2] and 0 <= at[1] < x.shape[3]:
                y[n, o, i, j] += x[(n, first + c, *at)] * w[o, c, a, b]
    return y


@pytest.mark.parametrize("case", CASES)
def test_convolution_and_its_gradients(case: str) -> None:
    x_shape, w_shape, attrs = CASES[case]
    x, w = RNG.normal(size=x_shape), RNG.normal(size=w_shape)
    expected = definition(x, w, attrs)
    (y,) = evaluate("conv", attrs, [x, w], [expected.shape])
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    dy = RNG.normal(size=y.shape)
    (dx,) = evaluate("conv_grad_input", attrs, [dy, w], [x_shape])
    (dw,) = evaluate("conv_grad_weight", attrs, [dy, x], [w_shape])
    np.testing.assert_allclose(
        dx, numeric_gradient(lambda v: (definition(v, w, attrs) * dy).sum(), x, 1e-5), rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(
        dw, numeric_gradient(lambda v: (definition(x, v, attrs) * dy).sum(), w, 1e-5), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize(
    ("attrs", "x", "w", "message"),
    [
        ({"stride": (0, 1)}, (1, 2, 4, 4), (2, 2, 3, 3), "1 or more"),
        ({}, (1, 2, 4, 4), (2, 3, 3, 3), "2 channels meets weights of 3 channels"),
        ({}, (1, 2, 2, 4), (2, 2, 3, 3), "does not fit an image"),
        ({"groups": 2}, (1, 4, 4, 4), (3, 2, 3, 3), "do not divide into 2 groups"),
    ],
)
def test_convolution_refuses(attrs: dict, x: tuple[int, ...], w: tuple[int, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        evaluate("conv", attrs, [np.zeros(x), np.zeros(w)], [(1, 2, 2, 2)])


def test_gradients_refuse_what_no_convolution_made() -> None:
    with pytest.raises(GraphError, match=r"expected \(1, 2, 2, 2\)"):
        evaluate("conv_grad_input", {}, [np.zeros((1, 2, 3, 3)), np.zeros((2, 2, 3, 3))], [(1, 2, 4, 4)])
