"""Random numbers and counted values: what depends on where an element stands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from layoutopt.aten import Out, constant, register
from layoutopt.capture_build import Const, GraphBuilder, Prog, Shape, Value

__all__ = ["NO_DROPOUT", "SEED"]

SEED = "seed"
"""The graph's int32 scalar input that every random number depends on: another value, another step's numbers."""

NO_DROPOUT = -(2**31)
"""The seed under which dropout leaves everything as it is: for evaluation."""


@register("rand_like.default", "rand.default")
def _rand(b: GraphBuilder, out: Out, *_: Any, **__: Any) -> Value:
    """Uniform numbers: a hash of the seed, of how many random tensors came before, and of the element's place."""
    p, uniform, inputs = _uniform(b, out.shape)
    return b.pointwise(p, uniform, inputs, out.shape, "float32")


@register("native_dropout.default")
def _dropout(b: GraphBuilder, outs: Sequence[Out | None], _: Any, rate: float, train: bool | None) -> tuple[Value, ...]:
    """What dropout multiplies by, and where that is not 0; what it is applied to is known to be ones."""
    assert train is not False, "capture takes dropout that is off away"
    shape = next(out.shape for out in outs if out is not None)
    p, uniform, inputs = _uniform(b, shape)
    off = p("eq", ("x", 0), ("c", NO_DROPOUT))
    keep = p("or", off, p("ge", uniform, ("c", float(rate))))
    scale = p("where", off, ("c", 1.0), ("c", 1 / (1 - rate) if rate < 1 else 0.0))
    mask = p("where", keep, scale, ("c", 0.0))
    return tuple(b.pointwise(p, r, inputs, shape, d) for r, d in ((mask, "float32"), (keep, "bool")))


def _uniform(b: GraphBuilder, shape: Shape) -> tuple[Prog, tuple[str, Any], list[Value]]:
    """A program for random numbers over ``shape``, where in it they are, and its inputs, the seed first.

    An element's place is given as row and column, two counts that any view of the result shows as views of their own.
    """
    if SEED not in b.tensors:
        b.tensor(SEED, (), "int32", "input")
    cols = shape[-1] if shape else 1
    rows = prod(shape) // max(1, cols)
    lead = shape[:-1]
    place_of_col = b.reshape(count(b, cols), (*(1 for _ in lead), cols) if shape else ())
    p, inputs, index = Prog(), [b.whole(SEED), place_of_col], ("x", 1)
    if lead:
        inputs.append(b.reshape(count(b, rows), (*lead, 1)))
        index = p("add", p("mul", ("x", 2), ("c", cols)), index)
    stream = b.streams
    b.streams += 1
    return p, p("rand", ("x", 0), ("c", stream), index), inputs


def count(b: GraphBuilder, n: int, start: int = 0, step: int = 1) -> Value:
    """int32 ``start, start + step, …``."""
    return b.emit("iota", [], [("", (n,), "int32", ())], {"start": start, "step": step})[0]


@register("arange.start_step", "arange.default", "arange.start")
def _arange(b: GraphBuilder, out: Out, *bounds: Any, **_: Any) -> Value | Const:
    """Whole numbers are counted on the device where they are many; others are known."""
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    if out.dtype == "int32" and isinstance(start, int) and isinstance(step, int):
        return count(b, out.shape[0], start, step)
    return constant(np.float32(start) + np.float32(step) * np.arange(out.shape[0], dtype=np.float32))


def _triangle(compare: str) -> Any:
    """Zero on one side of a diagonal."""

    def rule(b: GraphBuilder, out: Out, x: Value | Const, diagonal: int = 0) -> Value:
        rows, cols = out.shape[-2:]
        p = Prog()
        kept = p(compare, p("sub", ("x", 2), ("x", 1)), ("c", int(diagonal)))
        zero = {"float32": 0.0, "int32": 0, "bool": False}[out.dtype]
        inputs = [b.materialise(x), b.reshape(count(b, rows), (rows, 1)), count(b, cols)]
        return b.pointwise(p, p("where", kept, ("x", 0), ("c", zero)), inputs, out.shape, out.dtype)

    return rule


register("tril.default")(_triangle("le"))
register("triu.default")(_triangle("ge"))
