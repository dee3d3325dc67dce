"""A classifier that stays on the device, for the mode "private": what is sent is differences, which still tell labels.

The device sends what is missing between its own probabilities and the right answer; the side network learns that
difference, and the device adds its own probabilities to it again. They come from the checkpoint's classifier where it
has one for these classes, else from a softmax regression that the device fits to the backbone's final features of the
first labelled samples. It is fitted once, before the first step, and frozen: differences of all steps have one meaning.

The classifier's weights are never sent, and without its probabilities the side network's results alone are no answers.
But only the right class' difference is above 0: whoever reads it knows the label, and then the probabilities too.
Protection of labels is :mod:`layoutopt.side.label_noise`, which is applied before the classifier is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layoutopt.errors import LayoutOptError

__all__ = ["DeviceHead", "fit_head"]

_ROUNDS = 300
_DECAY = 1e-2
"""Of the squared weights in the regression: with a few samples of hundreds of features any two classes can be told
apart, and what is told apart by chance should not look certain."""


@dataclass(frozen=True, eq=False)
class DeviceHead:
    """A pooler (or none) and a linear classifier.

    Attributes:
        weight: float32[classes, width].
        bias: float32[classes].
        pooler_weight: float32[width, width], or None.
        pooler_bias: float32[width], or None.
    """

    weight: np.ndarray
    bias: np.ndarray
    pooler_weight: np.ndarray | None = None
    pooler_bias: np.ndarray | None = None

    @classmethod
    def of(cls, head: Mapping[str, np.ndarray]) -> DeviceHead:
        """From the parts of a checkpoint's head (``Backbone.head``), or of :meth:`parts`.

        Raises:
            LayoutOptError: it has no classifier.
        """
        if "classifier.weight" not in head or "classifier.bias" not in head:
            raise LayoutOptError("this head has no classifier (classifier.weight and classifier.bias): fit one")
        pooler = head.get("pooler.weight"), head.get("pooler.bias")
        return cls(head["classifier.weight"], head["classifier.bias"], *pooler)

    def parts(self) -> dict[str, np.ndarray]:
        """Its arrays by name, for a file."""
        both = {"pooler.weight": self.pooler_weight, "pooler.bias": self.pooler_bias}
        pooler = {key: x for key, x in both.items() if x is not None}
        return {**pooler, "classifier.weight": self.weight, "classifier.bias": self.bias}

    @property
    def classes(self) -> int:
        """How many."""
        return len(self.bias)

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """float32 [n, classes] of features [n, width]: the final tap of the token that the loss uses."""
        x = np.asarray(features, np.float32)
        if self.pooler_weight is not None:
            x = np.tanh(x @ self.pooler_weight.T + self.pooler_bias)
        return _softmax(x @ self.weight.T + self.bias)

    def differences(self, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """What is missing to the right answer, float32 [n, classes] between -1 and 1.

        Args:
            features: [n, width].
            labels: int [n].

        Raises:
            LayoutOptError: a label that is no class.
        """
        labels = np.asarray(labels)
        if labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
            raise LayoutOptError(
                f"labels reach from {labels.min()} to {labels.max()}, expected 0 to {self.classes - 1}"
            )
        right = np.eye(self.classes, dtype=np.float32)[labels]
        return np.clip(right - self.probabilities(features), -1.0, 1.0).astype(np.float32)


def fit_head(features: np.ndarray, labels: np.ndarray, classes: int) -> DeviceHead:
    """A softmax regression; the same samples give the same head.

    Args:
        features: float32 [n, width].
        labels: int [n].
        classes: how many.

    Raises:
        LayoutOptError: no samples, features that are not finite, or a label that is no class.
    """
    x, y = np.asarray(features, np.float64), np.asarray(labels)
    if x.ndim != 2 or not len(x) or y.shape != (len(x),):
        raise LayoutOptError(f"a head is fitted to features [n, width] and n labels, got {x.shape} and {y.shape}")
    if not np.isfinite(x).all():
        raise LayoutOptError("the backbone's features hold NaN or infinity: use another checkpoint")
    if y.min() < 0 or y.max() >= classes:
        raise LayoutOptError(f"labels reach from {y.min()} to {y.max()}, expected 0 to {classes - 1}")
    mean, spread = x.mean(0), x.std(0)
    z = (x - mean) / np.maximum(spread, 1e-6)
    # The loss curves at most as its largest eigenvalue does: half that of the features' covariance, and the decay.
    rate = 1.0 / (0.5 * np.linalg.norm(np.hstack([z, np.ones((len(z), 1))]), 2) ** 2 / len(z) + _DECAY)
    right = np.eye(classes)[y]
    weight, bias = _descended(z, right, float(rate))
    scaled = weight / np.maximum(spread, 1e-6)
    return DeviceHead(scaled.astype(np.float32), (bias - scaled @ mean).astype(np.float32))


def _descended(z: np.ndarray, right: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias after Nesterov's accelerated descent from zero."""
    classes, width = right.shape[1], z.shape[1]
    weight, bias = np.zeros((classes, width)), np.zeros(classes)
    ahead, ahead_bias = weight, bias
    for n in range(_ROUNDS):
        error = (_softmax(z @ ahead.T + ahead_bias) - right) / len(z)
        new, new_bias = ahead - rate * (error.T @ z + _DECAY * ahead), ahead_bias - rate * error.sum(0)
        push = n / (n + 3)
        ahead, ahead_bias = new + push * (new - weight), new_bias + push * (new_bias - bias)
        weight, bias = new, new_bias
    return weight, bias


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))
