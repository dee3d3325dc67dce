"""The benchmarks of side-tuning: rows are kept and not made again; ratios and targets are worked out of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import side_systems
from benchmarks.recording import Record, Rows
from benchmarks.side_device import Clock, Taps
from layoutopt.errors import LayoutOptError
from layoutopt.train import Dataset


def rows_of(path: Path | None, **settings: Any) -> Rows:
    return Rows(path, Record(path, "a test"), settings)


def test_rows_are_found_again(tmp_path: Path):
    path = tmp_path / "rows.json"
    first = rows_of(path, lr=1.0)
    first.add({"way": "full", "seed": 0, "accuracy": 0.5})
    again = rows_of(path, lr=1.0)
    assert again.find(way="full", seed=0) == {"way": "full", "seed": 0, "accuracy": 0.5}
    assert again.find(way="full", seed=1) is None
    again.add({"way": "full", "seed": 1, "accuracy": 0.75})
    assert [row["seed"] for row in rows_of(path, lr=1.0).rows] == [0, 1]


def test_rows_of_other_settings_are_refused(tmp_path: Path):
    path = tmp_path / "rows.json"
    rows_of(path, lr=1.0).add({"way": "full"})
    with pytest.raises(LayoutOptError, match="give another name"):
        rows_of(path, lr=2.0)
    path.write_text("[]")
    with pytest.raises(LayoutOptError, match="no record with rows"):
        rows_of(path, lr=1.0)


def test_rows_without_a_file():
    rows = rows_of(None)
    assert rows.add({"way": "head"}) == {"way": "head"}
    assert rows.find(way="head") is not None


def test_the_target_is_the_first_look_that_is_good_enough():
    looks = [[10, 1.0, 0.5], [20, 2.0, 0.9], [30, 3.0, 0.8]]
    assert side_systems.reached({"looks": looks}, 0.85) | {"looks": None} == {
        "looks": None,
        "target_s": 2.0,
        "target_steps": 20,
    }
    assert side_systems.reached({"looks": looks}, 0.95)["target_s"] is None


def test_ratios_beside_the_papers(capsys: pytest.CaptureFixture[str]):
    rows = rows_of(None)
    side = {"way": "side", "weights": "fp32", "link": "20Mbps", "steps": 20}
    rows.add({"part": "accuracy", "way": "full", "target_s": 30.0, "looks": [[5, 15.0, 0.94], [10, 30.0, 0.985]]})
    pivot = {
        **side,
        "taps": "int4:64",
        "tokens": "pivot",
        "looks": [[9, 10.0, 0.97]],
        "link_bytes": 100,
        "computed": 160,
    }
    rows.add({"part": "accuracy", **pivot})
    rows.add({"part": "accuracy", **pivot, "taps": "int8:64", "tokens": "all", "looks": [], "link_bytes": 1000})
    rows.add({"part": "window", **pivot, "window": 4, "utilisation": 0.5})
    side_systems.summary(rows)
    shown = capsys.readouterr().out
    assert "97% after 10.0 s, full 3.00 times as long" in shown
    assert "int4:64 pivot, 20Mbps: 98% is reached by full alone" in shown
    assert "int8:64 all, 20Mbps: 95% is reached by full alone" in shown
    assert "99%" not in shown
    assert "95.00% less than all tokens in each of 2 epochs" in shown
    assert "window 4: the device computes 50% of the time" in shown


class Backbone:
    """Two taps, two tokens a sample: what comes in, and ten times that."""

    inputs: ClassVar = {"x": (2,)}
    taps = ("a", "b")
    rows_per_sample = 2

    class wanted:
        tokens = "all"

    def run(self, inputs: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        rows = inputs["x"].reshape(-1, 1)
        return [(rows, np.zeros((len(rows), 0), np.float32)), (10 * rows, np.zeros((len(rows), 0), np.float32))]

    def mask(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.ones(inputs["x"].shape, np.uint8)


def test_taps_keep_the_rows_that_a_head_reads():
    data = Dataset({"x": np.arange(6, dtype=np.int32).reshape(3, 2), "labels": np.array([0, 1, 0])})
    taps = Taps(Backbone(), data)
    found = taps.run(np.array([2, 0]))
    taps.run(np.array([1]))
    assert found.taps[1][0].ravel().tolist() == [40, 50, 0, 10]
    assert found.targets.tolist() == [0, 0]
    assert found.mask.shape == (2, 2)
    kept = taps.kept()
    assert kept["words:0"].ravel().tolist() == [0, 2, 4]
    assert kept["words:1"].ravel().tolist() == [0, 20, 40]


def test_the_clock_adds_up_what_is_within():
    clock = Clock()
    for _ in range(2):
        with clock:
            sum(range(1000))
        clock.steps += 1
    assert clock.facts()["steps"] == 2
    assert clock.facts()["step_s"] == clock.wall_s / 2 > 0
