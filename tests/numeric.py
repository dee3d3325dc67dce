"""Derivatives by differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def numeric_gradient(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        high, low = x.copy(), x.copy()
        high[index] += step
        low[index] -= step
        out[index] = (f(high) - f(low)) / (2 * step)
    return out
