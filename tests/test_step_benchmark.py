"""What `benchmarks/step.py` concludes: wrong losses are called wrong, a contender that fails is left out and named."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contenders.wire import Child, ContenderError, run_once
from benchmarks.step import Contest, outcome, table
from benchmarks.works import WORKS, batches


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    args = argparse.Namespace(
        graphs=None, plans=None, device=None, device_model=None, calibration=0.0, strategy="ilp", time_limit=1.0,
        plan_only=False, burst=1,
    )  # fmt: skip
    made = Contest(WORKS["tiny"], args, tmp_path)
    made.about = {"work": "tiny", "text": "a model", "size": "3×13"}
    return made


def judge(contest: Contest, losses: list[float]) -> dict:
    contest.rows = {
        "ours": {"losses": losses, "seconds": [1.0, 2.0, 3.0]},
        "eager": {"losses": [0.7, 0.6, 0.5], "seconds": [4.0, 4.0, 4.0]},
    }
    contest._compare()
    return contest.rows["ours"]


@pytest.mark.parametrize(
    ("losses", "right"),
    [
        ([0.7, 0.6, 0.5], True),
        ([0.7, 0.6, 0.50004], True),
        ([0.7, 0.6, 0.5001], False),
        ([0.7001, 0.6, 0.5], False),
        ([0.7, math.nan, 0.5], False),
        ([0.7, math.inf, 0.5], False),
    ],
)
def test_losses_are_judged(contest: Contest, losses: list[float], right: bool) -> None:
    assert judge(contest, losses)["correct"] is right
    found = {**contest.about, "load_average": [0.0, 0.0], "contenders": contest.rows}
    assert ("WRONG" in table(found)) is not right


def test_ratios_are_ours_over_the_peer(contest: Contest) -> None:
    judge(contest, [0.7, 0.6, 0.5])
    peer = contest.rows["eager"]
    assert peer["ours_over_it"] == 0.5
    assert peer["paired_quartiles"] == [0.375, 0.625]
    assert contest.rows["ours"]["quartiles_s"] == [1.5, 2.5]


def test_a_contender_that_does_not_start_is_named(tmp_path: Path, contest: Contest) -> None:
    child = Child("benchmarks.contenders.nonesuch", {}, tmp_path / "log")
    with pytest.raises(ContenderError, match=r"No module named benchmarks\.contenders\.nonesuch"):
        child.answer(60.0)
    contest.rows = {"nonesuch": {}}

    def fail() -> None:
        raise ContenderError("ended with code 1")

    contest._guarded("nonesuch", fail)
    assert contest.rows["nonesuch"] == {"error": "ended with code 1"}
    contest._guarded("nonesuch", lambda: pytest.fail("asked again"))
    found = {**contest.about, "load_average": [0.0, 0.0], "contenders": contest.rows}
    assert "ended with code 1" in table(found)


def test_a_contender_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import sys\nprint('waiting', file=sys.stderr, flush=True)\nsys.stdin.read()\n")
    child = Child("idle", {}, tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ContenderError, match="no answer in 2 s"):
        child.answer(2.0)
    assert child._process.returncode is not None


def test_a_preparation_that_fails_is_an_error() -> None:
    with pytest.raises(ContenderError, match="ended with code"):
        run_once("benchmarks.contenders.nonesuch", ["{}"], 60.0)


def test_a_work_that_failed_is_told(contest: Contest) -> None:
    contest.about = {"work": "tiny", "error": "no plan"}
    assert outcome(contest) == contest.about
    assert table(contest.about) == "tiny  no plan"


@pytest.mark.parametrize("name", WORKS)
def test_batches_repeat_and_fit_the_work(name: str) -> None:
    work = WORKS[name]
    first, again = batches(work), batches(work)
    assert len(first) == 2
    for a, b in zip(first, again, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not all(np.array_equal(first[0][k], first[1][k]) for k in first[0])
    labels = first[0]["labels"]
    assert labels.shape == ((work.batch,) if work.labels else (work.batch, work.seq))
    if work.seq:
        assert first[0]["input_ids"].max() < work.vocabulary
