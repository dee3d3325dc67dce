"""Labels that a server may see: randomised response, the one protection of labels that holds whatever it does.

Prediction differences, secret codes and permutations of classes hide no label (docs/side-tuning.md). A label that is
kept only with some probability is differentially private: whatever is made of it, no other label would have been more
than e^epsilon times less likely to lead there (Warner 1965; Ghazi et al. 2021, label differential privacy). This is
about one label given its text; what the labels of many samples have in common is learnt, as it is meant to be.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from layoutopt.errors import LayoutOptError

__all__ = ["check_epsilon", "keep_probability", "randomised"]


def check_epsilon(epsilon: float) -> None:
    """See that it is an epsilon.

    Raises:
        LayoutOptError: it is not above 0, or not finite.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise LayoutOptError(
            f"the epsilon of labels is a number above 0 (1 is strict, 8 hardly protects): got {epsilon}"
        )


def keep_probability(epsilon: float, classes: int) -> float:
    """How often a label is kept; any other class is then equally likely, e^epsilon times less than the label itself."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def randomised(labels: np.ndarray, classes: int, epsilon: float, secret: bytes) -> np.ndarray:
    """Labels after randomised response.

    The same secret gives the same labels: they are drawn once in a training, for what is drawn anew in every epoch
    could be averaged.

    Args:
        labels: int [n], from 0 to ``classes`` - 1; others stay as they are.
        classes: how many there are.
        epsilon: above 0.
        secret: the device's.

    Returns:
        int32 [n].

    Raises:
        LayoutOptError: ``epsilon`` is none.
    """
    check_epsilon(epsilon)
    draw = np.random.default_rng(list(hashlib.sha256(b"layoutopt label noise " + secret).digest()))
    labels = np.asarray(labels)
    keep = draw.random(len(labels)) < keep_probability(epsilon, classes)
    others = (labels + draw.integers(1, classes, len(labels))) % classes
    known = (labels >= 0) & (labels < classes)
    return np.where(keep | ~known, labels, others).astype(np.int32)
