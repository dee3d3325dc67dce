"""Pointwise expressions: evaluating an :class:`~layoutopt.graph.Expr` with numpy and building new ones from old.

Types follow the graph's rule and are settled here: comparisons and logic give bool; ``float`` and the functions of real
numbers (exp, log, sqrt, rsqrt, recip, tanh, erf) and ``div`` always give float; neg, abs, add, sub, mul, max, min and
pow give int when every argument is an int, else float; ``where`` gives the type of its two values (float beats int beats
bool). A constant is a bool, an int or a float as Python writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import Expr

__all__ = ["ARITY", "Ref", "evaluate_expr"]

Ref = tuple[str, Any]
"""``("x", i)``, ``("t", j)`` or ``("c", value)``."""

_UNARY_REAL = ["exp", "log", "sqrt", "rsqrt", "recip", "tanh", "erf"]
_UNARY = ["neg", "abs", "not", "float", "int", "bool"]
_ARITHMETIC = ["add", "sub", "mul", "max", "min", "pow"]
_COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]
ARITY: dict[str, int] = {
    **dict.fromkeys(_UNARY_REAL + _UNARY, 1),
    **dict.fromkeys(_ARITHMETIC + ["div", "and", "or"] + _COMPARE, 2),
    "where": 3,
}
"""Number of arguments per operation."""


def _erf(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return np.asarray(erf(x))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "recip": lambda x: 1 / x,
    "tanh": np.tanh,
    "erf": _erf,
    "abs": np.abs,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "where": np.where,
}


def evaluate_expr(expr: Expr, inputs: Sequence[np.ndarray], dtype: Any = np.float64) -> list[np.ndarray]:
    """The results of a pointwise program, one array per result (constants alone give 0-d arrays).

    Args:
        expr: the program.
        inputs: one array per input, of equal or broadcastable shapes: bool, int or float.
        dtype: the float type to calculate in.

    Raises:
        GraphError: an unknown operation, or a reference to an input or instruction that does not exist.
    """
    values: list[np.ndarray] = []
    given = [_typed(np.asarray(x), dtype) for x in inputs]

    def fetch(ref: Ref) -> np.ndarray:
        kind, key = ref
        if kind == "c":
            return _typed(np.asarray(key), dtype)
        source = given if kind == "x" else values
        if not 0 <= key < len(source):
            raise GraphError(
                f"expression reference {tuple(ref)} is out of range: {len(source)} such values exist there"
            )
        return source[key]

    with np.errstate(all="ignore"):
        for name, *refs in expr.code:
            if ARITY.get(name) != len(refs):
                known = ", ".join(sorted(ARITY))
                raise GraphError(
                    f"expression instruction {name!r} with {len(refs)} arguments; known operations: {known}"
                )
            values.append(_apply(name, [fetch(r) for r in refs], dtype))
    return [fetch(ref) for ref in expr.results]


def _typed(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in the working type, integers wide enough not to overflow."""
    if x.dtype.kind == "f":
        return x.astype(dtype, copy=False)
    return x if x.dtype.kind == "b" else x.astype(np.int64, copy=False)


def _apply(name: str, args: list[np.ndarray], dtype: Any) -> np.ndarray:
    if name == "float":
        return args[0].astype(dtype)
    if name == "int":
        return np.trunc(args[0]).astype(np.int64)
    if name == "bool":
        return args[0] != 0
    if name in _UNARY_REAL or name == "div":
        args = [a.astype(dtype, copy=False) for a in args]
    elif name in _ARITHMETIC or name in ("neg", "abs"):
        if any(a.dtype.kind != "i" for a in args):
            args = [a.astype(dtype, copy=False) for a in args]
        elif name == "pow" and np.any(args[1] < 0):
            raise GraphError("expression pow of an integer has a negative exponent: convert the base to float first")
    elif name == "where":
        args = [args[0] != 0, *args[1:]]
    return np.asarray(_FUNCTIONS[name](*args))
