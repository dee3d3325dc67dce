"""Mixed-radix digits of one axis: the arithmetic beneath the layout algebra's views.

A digit is ``(extent, stride, dim)``; a list of digits, outermost first, maps ``x`` to
``sum(x // inner_k % extent_k * stride_k)`` in the storage dimensions ``dim_k``, where ``inner_k`` is the product of the
extents after k.
"""

from __future__ import annotations

from math import prod

import numpy as np

__all__ = ["Digit", "along", "merge", "recover", "shrink", "split"]

Digit = tuple[int, int, int]


def along(digits: list[Digit], count: int, dims: int) -> np.ndarray:
    """Storage coordinates of ``0 … count-1``, int64 of shape (count, dims)."""
    index = np.arange(count, dtype=np.int64)
    out = np.zeros((count, dims), dtype=np.int64)
    inner = 1
    for extent, stride, dim in reversed(digits):
        out[:, dim] += index // inner % extent * stride
        inner *= extent
    return out


def merge(digits: list[Digit]) -> list[Digit]:
    """The canonical form: no digit of one value, no neighbours that count as one, broadcasts in dimension 0."""
    out: list[Digit] = []
    for extent, stride, dim in digits:
        if extent == 1:
            continue
        last = out[-1] if out else None
        if last and last[1] == extent * stride and (last[2] == dim or not stride):
            out[-1] = (last[0] * extent, stride, last[2])
        else:
            out.append((extent, stride, dim if stride else 0))
    return out


def split(digits: list[Digit], inner: int) -> tuple[list[Digit], list[Digit]] | None:
    """Cut digits in two so that the inner part counts exactly ``inner`` values; None if a digit would be torn."""
    low: list[Digit] = []
    rest, need = list(digits), inner
    while need > 1:
        if not rest:
            return None
        extent, stride, dim = rest.pop()
        if need % extent == 0:
            low.insert(0, (extent, stride, dim))
            need //= extent
        elif extent % need == 0:
            low.insert(0, (need, stride, dim))
            rest.append((extent // need, stride * need, dim))
            need = 1
        else:
            return None
    return rest, low


def shrink(digits: list[Digit], count: int) -> list[Digit] | None:
    """The digits that count exactly ``count`` values, padding cut off.

    None where the padding is not whole steps of a digit: the last tile is partly filled.
    """
    rest = list(digits)
    while rest and count <= (inner := prod(e for e, _, _ in rest[1:])):
        rest.pop(0)
    if not rest:
        return []
    if count % inner:
        return None
    return [(count // inner, *rest[0][1:]), *rest[1:]]


def recover(values: np.ndarray) -> list[Digit] | None:
    """The digits that produce a sequence of storage coordinates, or None where none do.

    They are unique: a digit ends exactly where the sequence stops being an arithmetic progression.

    Args:
        values: int64 of shape (count, dims); the first row is taken as the origin.
    """
    digits: list[Digit] = []
    rest = values - values[:1]
    while len(rest) > 1:
        moved = np.flatnonzero(rest[1])
        if moved.size > 1 or rest[1].min() < 0:
            return None  # one digit moves one storage dimension, forwards
        broken = np.flatnonzero((rest != np.arange(len(rest))[:, None] * rest[1]).any(axis=1))
        extent = int(broken[0]) if broken.size else len(rest)
        dim = int(moved[0]) if moved.size else 0
        digits.insert(0, (extent, int(rest[1, dim]), dim))
        outer = rest[::extent]
        whole = (outer[:, None] + rest[None, :extent]).reshape(-1, rest.shape[1])
        if not np.array_equal(whole[: len(rest)], rest):
            return None
        rest = outer
    return digits
