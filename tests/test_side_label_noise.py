"""Randomised response: its promise, that it is drawn once, and that it comes before all else."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from layoutopt.errors import LayoutOptError
from layoutopt.side.backbone import Wanted
from layoutopt.side.device import Job, _with_noise
from layoutopt.side.label_noise import keep_probability, randomised
from layoutopt.side.task import IGNORED
from layoutopt.train import Dataset


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_no_label_is_likelier_than_epsilon_allows(classes, epsilon):
    keep = keep_probability(epsilon, classes)
    other = (1 - keep) / (classes - 1)
    assert keep / other == pytest.approx(math.exp(epsilon))
    y = np.repeat(np.arange(classes), 20000)
    noisy = randomised(y, classes, epsilon, b"secret")
    table = np.array([[(noisy[y == i] == j).mean() for j in range(classes)] for i in range(classes)])
    assert table == pytest.approx(np.where(np.eye(classes) > 0, keep, other), abs=0.015)


def test_a_secret_gives_the_same_labels_again_and_another_gives_others():
    y = np.arange(1000) % 3
    first = randomised(y, 3, 1.0, b"one")
    np.testing.assert_array_equal(first, randomised(y, 3, 1.0, b"one"))
    assert (first != randomised(y, 3, 1.0, b"two")).mean() > 0.2
    assert first.dtype == np.int32


def test_a_large_epsilon_keeps_all_labels_and_a_small_one_tells_nothing():
    y = np.arange(20000) % 2
    np.testing.assert_array_equal(randomised(y, 2, 60.0, b"s"), y)
    assert (randomised(y, 2, 1e-9, b"s") == y).mean() == pytest.approx(0.5, abs=0.02)


def test_what_is_no_class_stays():
    y = np.array([IGNORED, 0, 1] * 50)
    noisy = randomised(y, 2, 0.1, b"s")
    np.testing.assert_array_equal(noisy == IGNORED, y == IGNORED)
    assert set(noisy) == {IGNORED, 0, 1}


def test_only_labels_of_a_data_set_change():
    data = Dataset({"x": np.arange(400.0), "labels": np.arange(400) % 2})
    noisy = _with_noise(data, 2, 0.5, b"s")
    np.testing.assert_array_equal(noisy.inputs["x"], data.inputs["x"])
    np.testing.assert_array_equal(noisy.inputs["labels"], randomised(data.inputs["labels"], 2, 0.5, b"s"))
    assert (noisy.inputs["labels"] != data.inputs["labels"]).any()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_epsilon_is_refused_in_one_sentence(epsilon, tmp_path: Path):
    with pytest.raises(LayoutOptError, match="above 0"):
        randomised(np.zeros(3, int), 2, epsilon, b"s")
    with pytest.raises(LayoutOptError, match="above 0"):
        Job(Wanted("minilm"), "data.tsv", tmp_path, label_epsilon=epsilon)
