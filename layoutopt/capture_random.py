"""Random numbers and counted values: what depends on where an element stands."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from layoutopt.aten import Out, constant, register
from layoutopt.capture_build import Const, GraphBuilder, Prog, Value

__all__ = ["SEED"]

SEED = "seed"
"""The graph's int32 scalar input that every random number depends on: another value, another step's numbers."""


@register("rand_like.default", "rand.default")
def _rand(b: GraphBuilder, out: Out, *_: Any, **__: Any) -> Value:
    """Uniform numbers: a hash of the seed, of how many random tensors came before, and of the element's place.

    The place is given as row and column, two counts that any view of the result shows as views of their own.
    """
    if SEED not in b.tensors:
        b.tensor(SEED, (), "int32", "input")
    cols = out.shape[-1] if out.shape else 1
    rows = prod(out.shape) // max(1, cols)
    lead = out.shape[:-1]
    place_of_row = b.reshape(count(b, rows), (*lead, 1))
    place_of_col = b.reshape(count(b, cols), (*(1 for _ in lead), cols))
    p, stream = Prog(), b.streams
    b.streams += 1
    index = p("add", p("mul", ("x", 1), ("c", cols)), ("x", 2))
    inputs = [b.whole(SEED), place_of_row, place_of_col]
    if not lead:
        inputs, index = [b.whole(SEED), place_of_col], ("x", 1)
        if not out.shape:
            inputs = [b.whole(SEED), b.reshape(place_of_col, ())]
        p = Prog()
    return b.pointwise(p, p("rand", ("x", 0), ("c", stream), index), inputs, out.shape, "float32")


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
