"""The classifier that stays on the device: how it is fitted, what it sends, and that torch finds the same optimum."""

from __future__ import annotations

import numpy as np
import pytest

from layoutopt.errors import LayoutOptError
from layoutopt.side.device_head import DeviceHead, fit_head

RNG = np.random.default_rng(5)


def clusters(n: int = 90, width: int = 40, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Classes that overlap a little, and a feature that never changes."""
    labels = np.arange(n) % classes
    x = RNG.normal(size=(n, width)) * RNG.uniform(0.1, 5, width) + RNG.normal(size=width)
    x += np.eye(classes, width)[labels] * 8
    x[:, -1] = 2.5
    return x.astype(np.float32), labels


def test_a_fitted_head_tells_classes_apart_and_is_always_the_same() -> None:
    x, y = clusters()
    head = fit_head(x, y, 3)
    p = head.probabilities(x)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert (p.argmax(1) == y).mean() > 0.95
    again = fit_head(x, y, 3)
    np.testing.assert_array_equal(head.weight, again.weight)
    assert np.isfinite(head.weight).all()


def test_it_is_the_optimum_of_the_regression() -> None:
    """At the optimum the gradient is zero: features in their own units, the decay in standard ones."""
    x, y = clusters()
    x = x[:, :6]  # fewer features converge within the rounds
    head = fit_head(x, y, 3)
    spread = x.std(0)
    z = (x - x.mean(0)) / spread
    error = (head.probabilities(x) - np.eye(3)[y]) / len(x)
    weight = head.weight * spread
    np.testing.assert_allclose(error.T @ z + 1e-2 * weight, 0, atol=2e-4)
    np.testing.assert_allclose(error.sum(0), 0, atol=2e-4)


def test_differences_are_what_is_missing_to_the_right_answer() -> None:
    x, y = clusters()
    head = fit_head(x, y, 3)
    d = head.differences(x, y)
    assert d.dtype == np.float32
    assert np.abs(d).max() <= 1
    np.testing.assert_allclose(d + head.probabilities(x), np.eye(3)[y], atol=1e-6)


def test_a_class_without_samples_and_a_single_sample_are_no_trouble() -> None:
    x, y = clusters(n=4)
    head = fit_head(x[:1], y[:1], 5)
    assert head.classes == 5
    assert head.probabilities(x).argmax(1).tolist() == [0] * 4


def test_a_checkpoints_head_with_its_pooler_is_taken_as_it_is() -> None:
    torch = pytest.importorskip("torch")

    parts = {
        "pooler.weight": RNG.normal(size=(6, 6)).astype(np.float32),
        "pooler.bias": RNG.normal(size=6).astype(np.float32),
        "classifier.weight": RNG.normal(size=(3, 6)).astype(np.float32),
        "classifier.bias": RNG.normal(size=3).astype(np.float32),
    }
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    t = {name: torch.from_numpy(value) for name, value in parts.items()}
    linear = torch.nn.functional.linear
    pooled = torch.tanh(linear(torch.from_numpy(x), t["pooler.weight"], t["pooler.bias"]))
    expected = linear(pooled, t["classifier.weight"], t["classifier.bias"]).softmax(-1).numpy()
    head = DeviceHead.of(parts)
    np.testing.assert_allclose(head.probabilities(x), expected, rtol=1e-5)
    assert head.parts().keys() == parts.keys()


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((0, 4)), np.zeros(0, int), "fitted to features"),
        (np.zeros((3, 4)), np.zeros(2, int), "fitted to features"),
        (np.full((3, 4), np.nan), np.zeros(3, int), "NaN or infinity"),
        (np.zeros((3, 4)), np.array([0, 1, 3]), "labels reach from 0 to 3, expected 0 to 2"),
        (np.zeros((3, 4)), np.array([0, 1, -100]), "labels reach from -100"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x: np.ndarray, y: np.ndarray, words: str) -> None:
    with pytest.raises(LayoutOptError, match=words):
        fit_head(x, y, 3)


def test_labels_of_other_classes_are_refused() -> None:
    x, y = clusters()
    with pytest.raises(LayoutOptError, match="expected 0 to 2"):
        fit_head(x, y, 3).differences(x, y + 1)
    with pytest.raises(LayoutOptError, match="has no classifier"):
        DeviceHead.of({"pooler.weight": x})
