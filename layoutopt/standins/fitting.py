"""Of scipy what fitting needs: non-negative least squares and Kendall's tau."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Tau", "kendalltau", "nnls"]


def nnls(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """The x >= 0 that makes ``|a @ x - b|`` least, and that norm (Lawson and Hanson, Solving Least Squares Problems).

    Args:
        a: [m, n].
        b: [m].
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    count = a.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    size = float(np.abs(a).sum(axis=0).max(initial=0.0)) * float(np.abs(b).max(initial=0.0))
    tolerance = 10 * max(a.shape) * np.finfo(np.float64).eps * max(size, 1e-300)
    for _ in range(3 * count):
        gain = a.T @ (b - a @ x)
        gain[free] = -np.inf
        if free.all() or gain.max() <= tolerance:
            break
        free[int(np.argmax(gain))] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            # As far towards it as all stay positive; what reaches zero is fixed there.
            step = float(np.min(x[below] / np.maximum(x[below] - wanted[below], 1e-300)))
            x = x + step * (wanted - x)
            free &= x > 1e-14 * max(float(x.max(initial=0.0)), 1e-300)
            x[~free] = 0.0
        x = wanted
    return x, float(np.linalg.norm(a @ x - b))


@dataclass(frozen=True)
class Tau:
    """What ``kendalltau`` returns."""

    statistic: float


def kendalltau(x: np.ndarray, y: np.ndarray) -> Tau:
    """Kendall's tau-b: concordant less discordant pairs, ties accounted for; nan where all of one side are tied."""
    rows, columns = np.triu_indices(len(x), 1)
    dx, dy = (np.sign(np.asarray(v)[rows] - np.asarray(v)[columns]) for v in (x, y))
    norm = np.sqrt(float((dx != 0).sum()) * float((dy != 0).sum()))
    return Tau(float((dx * dy).sum() / norm) if norm else float("nan"))
