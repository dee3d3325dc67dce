"""Which kernels planning asks a calibration for: those of plans, then their rivals, within a time; no device needed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_costmodel_calibrate import small_graph

from costmodel import device
from costmodel.device import DeviceModel, Fact, FamilyFit, Measurement
from costmodel.features import FEATURES
from costmodel.journal import Entry, Journal
from costmodel.model import CostModel, spec_text
from costmodel.rounds import Round
from kernels.bind import bind
from kernels.spec import Kernel
from layoutopt import planner, tuning
from layoutopt.errors import InfeasibleError, LayoutOptError
from layoutopt.tuning import CLOSE, MOST_NAMED, MOST_RIVALS, Planner

FIT = FamilyFit({"launches": 3000.0, "flops": 0.05, "near_bytes": 0.1, "memory_bytes": 0.3}, 50, 0.1)
GENERIC = device.load("generic-cpu")
QUICK = {"launch_s": Fact(1e-7, "made up: kernels should differ", "assumed")}
MODEL = replace(GENERIC, features=FEATURES, constants={"all": FIT}, facts={**GENERIC.facts, **QUICK})


class Ticking:
    """A clock by which every look takes as long."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def measured(model: DeviceModel, kernels: list[Kernel]) -> DeviceModel:
    """The model with kernels measured to take a third of what it predicts."""
    costs = CostModel(model)
    found = {
        k.key: Measurement(
            k.variant.label, spec_text(k.spec), (round(costs.predict(k).total_ns / 3),) * 5, (0.0,) * len(FEATURES)
        )
        for k in kernels
    }
    return replace(model, measurements={**model.measurements, **found})


def plans_kernels(model: DeviceModel) -> set[str]:
    graph, costs = small_graph(), CostModel(model)
    tables = planner.tabulate(graph, costs)
    found = set()
    for strategy in ("greedy", "ideal", "rowmajor", "ilp"):
        made = planner.plan(graph, costs, strategy, None, 10.0, tables=tables)
        found |= {step.kernel.key for step in bind(graph, made, model.limits)}
    return found


def test_what_plans_run_comes_first_then_close_rivals():
    named = Planner([small_graph()])(MODEL, 1e9)
    assert len({k.key for k in named}) == len(named) <= MOST_NAMED
    wanted = plans_kernels(MODEL)
    assert {k.key for k in named[: len(wanted)]} == wanted
    rivals = named[len(wanted) :]
    assert rivals
    costs = CostModel(MODEL)
    chosen = {k.key: k for k in named[: len(wanted)]}
    rivals_of: dict[str, int] = {}
    for rival in rivals:
        same = [k for k in chosen.values() if (k.spec, k.layouts) == (rival.spec, rival.layouts)]
        assert same, "a rival does what a chosen kernel does, over the same layouts"
        assert any(costs.predict(rival).total_ns <= CLOSE * costs.predict(k).total_ns for k in same)
        for own in same:
            rivals_of[own.key] = rivals_of.get(own.key, 0) + 1
    assert max(rivals_of.values()) <= 2 * MOST_RIVALS


def test_what_takes_most_of_a_step_comes_first():
    named = Planner([small_graph()])(MODEL, 1e9)
    costs = CostModel(MODEL)
    chosen = [k for k in named if k.key in plans_kernels(MODEL)]
    assert costs.predict(chosen[0]).total_ns > costs.predict(chosen[-1]).total_ns


def test_nothing_that_was_measured_is_named():
    asked = Planner([small_graph()])
    model = MODEL
    for _ in range(12):
        named = asked(model, 1e9)
        if not named:
            break
        assert not {k.key for k in named} & set(model.measurements)
        model = measured(model, named)
    assert named == [], "plans run what was measured to be fast, and no rival comes near"
    assert plans_kernels(model) <= set(model.measurements)


def test_a_graph_whose_plans_are_measured_waits_for_the_others(monkeypatch: pytest.MonkeyPatch):
    done, other = small_graph(), small_graph(1)
    seen: list[str] = []
    before = planner.tabulate
    monkeypatch.setattr(planner, "tabulate", lambda graph, *a, **kw: seen.append(graph.hash) or before(graph, *a, **kw))
    asked = Planner([done, other])
    model = MODEL
    # Of the first graph everything is measured; the second is never all measured, as nothing of it is filed.
    monkeypatch.setattr(
        tuning, "_stakes", lambda steps, costs: {} if len(steps) > 12 else {"x": (1.0, steps[0].kernel)}
    )
    assert asked(model, 1e9)
    assert seen == [done.hash, other.hash]
    asked(model, 1e9)
    assert seen[2:] == [other.hash], "the first has nothing new to say while the second has"


def test_no_question_outlasts_its_time():
    # Every look at the clock takes a second; the question may take three fifths of the time left.
    clock = Ticking(1.0)
    assert Planner([small_graph()], clock)(MODEL, 4.0) == [], "there was no time to price the graph"
    assert clock.now_s <= 6
    clock = Ticking(1.0)
    few = Planner([small_graph()] * 6, clock)
    assert few(MODEL, 60.0)
    assert clock.now_s <= 46
    took = clock.now_s
    assert few(MODEL, 4.0) == [], "a graph that took longer before is not begun"
    assert clock.now_s - took <= 14


def test_a_strategy_at_a_dead_end_asks_for_nothing(monkeypatch: pytest.MonkeyPatch):
    def dead(*_: object, **__: object) -> None:
        raise InfeasibleError("no assignment", ())

    monkeypatch.setattr(planner, "plan", dead)
    assert Planner([small_graph()])(MODEL, 1e9) == []


# ---- to a file, resumable ------------------------------------------------------------------------------------------

RUNTIME = SimpleNamespace(
    info=SimpleNamespace(platform="P", platform_version="1", name=MODEL.name, driver="d", label="P | d"),
    limits=MODEL.limits,
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def journals(folder: Path) -> list[Path]:
    return list((folder / "cache").rglob("*.jsonl"))


def test_the_journal_goes_when_the_model_is_written(folders: Path, monkeypatch: pytest.MonkeyPatch):
    def measuring(*_: object, journal: Journal, **__: object) -> DeviceModel:
        assert [journal.path] == journals(folders)
        return MODEL

    monkeypatch.setattr(tuning, "calibrate_for", measuring)
    told: list[str] = []
    tuning.calibrate_to(folders / "new" / "m.toml", RUNTIME, [small_graph()], announce=told.append)
    assert device.load(folders / "new" / "m.toml").hash == MODEL.hash
    assert (journals(folders), told) == ([], [])


@pytest.mark.parametrize("measured_before", [False, True])
def test_sigterm_is_an_interruption_that_says_what_is_kept(
    measured_before: bool, folders: Path, monkeypatch: pytest.MonkeyPatch
):
    def measuring(*_: object, journal: Journal, **__: object) -> DeviceModel:
        if measured_before:
            journal.kernel("a", Entry("v", "s", (1.0,)))
            journal.round(Round(3.0, {"a": 5}))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # the signal ends it at once
        return MODEL

    monkeypatch.setattr(tuning, "calibrate_for", measuring)
    before, told = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(KeyboardInterrupt):
        tuning.calibrate_to(folders / "m.toml", RUNTIME, [], announce=told.append)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (folders / "m.toml").exists()
    (said,) = told
    assert said.startswith("interrupted; no device model was written, ")
    assert ("the 1 kernels measured so far are kept" in said) == measured_before
    monkeypatch.setattr(tuning, "calibrate_for", lambda *_, **__: MODEL)
    tuning.calibrate_to(folders / "m.toml", RUNTIME, [], announce=told.append)
    assert [line[:10] for line in told[1:]] == (["going on w"] if measured_before else [])
    assert journals(folders) == []


def test_a_model_that_cannot_be_written_leaves_the_journal(folders: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "calibrate_for", lambda *_, **__: MODEL)
    (folders / "there").mkdir()
    with pytest.raises((LayoutOptError, OSError)):
        tuning.calibrate_to(folders / "there", RUNTIME, [])
    assert len(journals(folders)) == 1


def test_two_at_once_both_calibrate_and_one_is_told_that_it_keeps_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("fcntl")
    told: list[str] = []

    def measuring(*_: object, journal: Journal | None, **__: object) -> DeviceModel:
        if journal is not None:
            tuning.calibrate_to(folders / "second.toml", RUNTIME, [], announce=told.append)
        return MODEL

    monkeypatch.setattr(tuning, "calibrate_for", measuring)
    tuning.calibrate_to(folders / "first.toml", RUNTIME, [], announce=told.append)
    assert (folders / "first.toml").exists()
    assert (folders / "second.toml").exists()
    (said,) = told
    assert said.startswith("another process is at the same calibration")
    assert said.endswith("without it, nothing is kept of this calibration if it is interrupted")
