"""ATen's element-wise ops as pointwise programs."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

from layoutopt.capture_build import Prog

__all__ = ["COMPARE", "LOGIC", "POINTWISE"]

Ref = tuple[str, Any]


def _c(value: float | int | bool) -> Ref:
    return ("c", value)


def _simple(op: str) -> Callable[..., Ref]:
    return lambda p, *args: p(op, *args)


def _sigmoid(p: Prog, x: Ref) -> Ref:
    return p("recip", p("add", _c(1.0), p("exp", p("neg", x))))


def _sign(p: Prog, x: Ref) -> Ref:
    return p("sub", p("float", p("gt", x, _c(0.0))), p("float", p("lt", x, _c(0.0))))


def _cdf(p: Prog, x: Ref) -> Ref:
    """Φ(x), the normal distribution function."""
    return p("mul", _c(0.5), p("add", _c(1.0), p("erf", p("mul", x, _c(sqrt(0.5))))))


def _gelu_inner(p: Prog, x: Ref) -> Ref:
    """The tanh of GELU's cubic, the approximation of Hendrycks and Gimpel."""
    cube = p("mul", p("mul", x, x), x)
    return p("tanh", p("mul", _c(sqrt(2 / pi)), p("add", x, p("mul", _c(0.044715), cube))))


def _gelu(p: Prog, x: Ref, approximate: str = "none") -> Ref:
    if approximate == "tanh":
        return p("mul", p("mul", _c(0.5), x), p("add", _c(1.0), _gelu_inner(p, x)))
    return p("mul", x, _cdf(p, x))


def _gelu_backward(p: Prog, dy: Ref, x: Ref, approximate: str = "none") -> Ref:
    if approximate == "tanh":
        t = _gelu_inner(p, x)
        slope = p("mul", _c(sqrt(2 / pi)), p("add", _c(1.0), p("mul", _c(3 * 0.044715), p("mul", x, x))))
        left = p("mul", _c(0.5), p("add", _c(1.0), t))
        right = p("mul", p("mul", p("mul", _c(0.5), x), p("sub", _c(1.0), p("mul", t, t))), slope)
        return p("mul", dy, p("add", left, right))
    density = p("mul", _c(1 / sqrt(2 * pi)), p("exp", p("mul", _c(-0.5), p("mul", x, x))))
    return p("mul", dy, p("add", _cdf(p, x), p("mul", x, density)))


def _sigmoid_backward(p: Prog, dy: Ref, y: Ref) -> Ref:
    return p("mul", dy, p("mul", y, p("sub", _c(1.0), y)))


def _tanh_backward(p: Prog, dy: Ref, y: Ref) -> Ref:
    return p("mul", dy, p("sub", _c(1.0), p("mul", y, y)))


def _silu_backward(p: Prog, dy: Ref, x: Ref) -> Ref:
    s = _sigmoid(p, x)
    return p("mul", dy, p("mul", s, p("add", _c(1.0), p("mul", x, p("sub", _c(1.0), s)))))


def _threshold_backward(p: Prog, dy: Ref, x: Ref, threshold: Ref) -> Ref:
    return p("where", p("le", x, threshold), _c(0.0), dy)


def _clamp(p: Prog, x: Ref, low: Ref | None = None, high: Ref | None = None) -> Ref:
    if low is not None:
        x = p("max", x, low)
    return x if high is None else p("min", x, high)


def _pow(p: Prog, x: Ref, y: Ref) -> Ref:
    if y[0] == "c" and y[1] in (2, 3):
        square = p("mul", x, x)
        return square if y[1] == 2 else p("mul", square, x)
    if y[0] == "c" and y[1] == 1:
        return x
    if y == ("c", 0.5):
        return p("sqrt", x)
    if y == ("c", -0.5):
        return p("rsqrt", x)
    if y == ("c", -1.0):
        return p("recip", x)
    return p("pow", x, y)


def _scaled(op: str) -> Callable[..., Ref]:
    """Addition and subtraction with torch's ``alpha``, leaving out what changes nothing."""

    def rule(p: Prog, a: Ref, b: Ref, alpha: float = 1) -> Ref:
        if alpha != 1:
            b = p("mul", b, _c(alpha))
        if b[0] == "c" and b[1] == 0:
            return a
        if op == "add" and a[0] == "c" and a[1] == 0:
            return b
        return p(op, a, b)

    return rule


def _mul(p: Prog, a: Ref, b: Ref) -> Ref:
    if b == ("c", 1):
        return a
    return b if a == ("c", 1) else p("mul", a, b)


def _div(p: Prog, a: Ref, b: Ref) -> Ref:
    return a if b == ("c", 1) else p("div", a, b)


def _and(p: Prog, a: Ref, b: Ref) -> Ref:
    if a == ("c", True):
        return b
    return a if b == ("c", True) else p("and", a, b)


def _or(p: Prog, a: Ref, b: Ref) -> Ref:
    if a == ("c", False):
        return b
    return a if b == ("c", False) else p("or", a, b)


COMPARE: dict[str, Callable[..., Ref]] = {
    f"aten.{op}.{kind}": _simple(op) for op in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
}
"""Two values of any one type to bool."""

LOGIC: dict[str, Callable[..., Ref]] = {
    "aten.logical_not.default": _simple("not"),
    "aten.bitwise_not.default": _simple("not"),
    **{f"aten.{n}.{k}": _and for n in ("bitwise_and", "__and__") for k in ("Tensor", "Scalar")},
    **{f"aten.{n}.{k}": _or for n in ("bitwise_or", "__or__") for k in ("Tensor", "Scalar")},
    "aten.logical_and.default": _and,
    # Written over a temporary by the gradient of clamp; tracing hands later readers the new value.
    "aten.logical_and_.default": _and,
    "aten.logical_or.default": _or,
}
"""Bools to bool."""

POINTWISE: dict[str, Callable[..., Ref]] = {
    **{f"aten.{op}.{kind}": _scaled(op) for op in ("add", "sub") for kind in ("Tensor", "Scalar")},
    **{f"aten.mul.{kind}": _mul for kind in ("Tensor", "Scalar")},
    **{f"aten.div.{kind}": _div for kind in ("Tensor", "Scalar")},
    "aten.rsub.Scalar": lambda p, a, b, alpha=1: p("sub", b, a if alpha == 1 else p("mul", a, _c(alpha))),
    **{f"aten.pow.Tensor_{kind}": _pow for kind in ("Scalar", "Tensor")},
    "aten.pow.Scalar": _pow,
    **{
        f"aten.{op}.default": _simple(op)
        for op in ("neg", "exp", "log", "sqrt", "rsqrt", "tanh", "erf", "abs", "sin", "cos")
    },
    "aten.reciprocal.default": _simple("recip"),
    "aten.log1p.default": lambda p, x: p("log", p("add", _c(1.0), x)),
    "aten.square.default": lambda p, x: p("mul", x, x),
    "aten.sign.default": _sign,
    "aten.sgn.default": _sign,
    "aten.sigmoid.default": _sigmoid,
    "aten.silu.default": lambda p, x: p("mul", x, _sigmoid(p, x)),
    "aten.relu.default": lambda p, x: p("max", x, _c(0.0)),
    "aten.maximum.default": _simple("max"),
    "aten.minimum.default": _simple("min"),
    "aten.clamp.default": _clamp,
    "aten.clamp.Tensor": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.gelu.default": _gelu,
    "aten.gelu_backward.default": _gelu_backward,
    "aten.tanh_backward.default": _tanh_backward,
    "aten.sigmoid_backward.default": _sigmoid_backward,
    "aten.silu_backward.default": _silu_backward,
    "aten.threshold_backward.default": _threshold_backward,
}
"""Values of the output's type to the output's type."""
