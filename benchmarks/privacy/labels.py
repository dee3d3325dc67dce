"""Labels from what a device sends as targets.

With a backbone's probabilities p, differences are d = onehot(y) − p. Since 0 < p < 1, the only positive entry of d is
y's: its sign tells y whatever p is.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

__all__ = [
    "agreement",
    "by_clusters",
    "by_groups",
    "by_magnitude",
    "by_robust_fit",
    "differences",
    "softmax",
]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def differences(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """onehot(y) − p, float32 [n, classes]."""
    return (np.eye(probabilities.shape[1])[labels] - probabilities).astype(np.float32)


def agreement(found: np.ndarray, labels: np.ndarray) -> float:
    """What is told of the partition: the mean share of a class that is found, under the best naming of the groups.

    One over the number of classes where nothing is told, however frequent a class is.
    """
    size = int(max(found.max(), labels.max())) + 1
    table = np.zeros((size, size))
    np.add.at(table, (labels, found), 1)
    there = table.sum(1) > 0
    table[there] /= table[there].sum(1, keepdims=True)
    return float(table[linear_sum_assignment(-table)].sum() / there.sum())


def by_clusters(values: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Groups of samples by k-means, int [n]."""
    return KMeans(classes, n_init=10, random_state=seed).fit_predict(values.reshape(len(values), -1))


def by_magnitude(targets: np.ndarray) -> np.ndarray:
    """What the device's own head says, int [n]: p = onehot(y) − d is known as soon as y is."""
    return (np.eye(targets.shape[1])[targets.argmax(1)] - targets).argmax(1)


def by_robust_fit(targets: np.ndarray, rows: np.ndarray, seed: int, rounds: int = 60) -> np.ndarray:
    """Takes off what is linear in the activations so that most samples have nothing left, int [n].

    If targets are a class' indicator plus a secret linear map of the activations, the least sum of absolute residuals
    (by reweighted least squares) finds the map exactly where one class is rare enough; what is left has two values.

    Args:
        targets: float [n, c].
        rows: float [n, width], the activations that the mask was made from.
        seed: of clustering.
        rounds: of reweighting.
    """
    x = np.c_[rows, np.ones(len(rows))].astype(np.float64)
    y = targets[:, -1].astype(np.float64)
    weight = np.ones(len(y))
    for step in range(rounds):
        scaled = x * weight[:, None]
        gram = scaled.T @ x
        gram[np.diag_indices_from(gram)] += 1e-9 * np.trace(gram) / len(gram)
        rest = y - x @ np.linalg.solve(gram, scaled.T @ y)
        floor = max(np.abs(rest).mean() * 0.8**step, 1e-5)
        weight = 1 / np.maximum(np.abs(rest), floor)
    return by_clusters(rest, 2, seed)


def by_groups(numbers: np.ndarray, rows: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Classes of samples whose class was cut into numbered shares at random: shares of a class look alike, int [n].

    Args:
        numbers: int [n], of the shares.
        rows: float [n, width], activations.
        classes: how many there are.
        seed: of clustering.
    """
    middle = np.stack([rows[numbers == share].mean(0) for share in range(numbers.max() + 1)])
    return by_clusters(middle, classes, seed)[numbers]
