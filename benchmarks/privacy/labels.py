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
    "by_consistent_head",
    "by_groups",
    "by_magnitude",
    "by_sparse_errors",
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


def by_sparse_errors(targets: np.ndarray, rows: np.ndarray, guess: np.ndarray, rounds: int = 80) -> np.ndarray:
    """Two classes from an indicator less a secret linear map of the activations, int [n].

    A guess that is right of most samples is fitted along with the map, by the least sum of absolute residuals
    (reweighted least squares): of those it is right of nothing is left, of the others the whole effect of a class.

    Args:
        targets: float [n, c].
        rows: float [n, width], the activations that the mask was made from.
        guess: int [n], groups made without the targets, such as the activations' clusters.
        rounds: of reweighting.
    """
    x = np.c_[rows - rows.mean(0), np.ones(len(rows)), guess].astype(np.float64)
    y = targets[:, -1].astype(np.float64)
    weight = np.ones(len(y))
    for step in range(rounds):
        scaled = x * weight[:, None]
        gram = scaled.T @ x
        gram[np.diag_indices_from(gram)] += 1e-12 * np.trace(gram) / len(gram)
        found = np.linalg.solve(gram, scaled.T @ y)
        rest = np.abs(y - x @ found)
        weight = 1 / np.maximum(rest, max(rest.mean() * 0.8**step, 1e-6))
    return np.where(rest > abs(found[-1]) / 2, 1 - guess, guess)


def by_consistent_head(targets: np.ndarray, rows: np.ndarray, cuts: int = 400) -> np.ndarray:
    """Two classes from differences in an unknown code: the split with which a linear head explains them, int [n].

    Differences of two classes are y − q along one line, whatever code and offset they are written in. A wrong place of
    0, or a wrong scale, gives probabilities q whose log-odds are no linear map of the activations; the head's are.

    Args:
        targets: float [n, c].
        rows: float [n, width], the activations that the head reads.
        cuts: places of 0 that are tried.
    """
    basis, _ = np.linalg.qr((rows - rows.mean(0)).astype(np.float64))
    centred = targets - targets.mean(0)
    line = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    best, found = -1.0, np.zeros(len(line), int)
    for cut in np.quantile(line, np.linspace(0.005, 0.995, cuts)):
        signed = line - cut
        member = (signed > 0).astype(int)
        for room in (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0):
            q = np.clip(member - signed / (room * np.abs(signed).max()), 1e-6, 1 - 1e-6)
            odds = np.log(q / (1 - q))
            odds -= odds.mean()
            explained = float(((basis.T @ odds) ** 2).sum() / (odds @ odds))
            if explained > best:
                best, found = explained, member
    return found


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
