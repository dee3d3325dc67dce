"""`layoutopt profile`: what it counts is what can be worked out by hand, and its trace is one that Perfetto reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel import device as device_models
from costmodel.device import DeviceModel
from kernels.execute import Executor
from kernels.runtime import Runtime, devices, pick
from layoutopt import graphfile, profiling
from layoutopt.cli import main
from layoutopt.errors import DeviceError
from layoutopt.example import example_inputs
from layoutopt.passes import run_passes
from layoutopt.profiling import LaunchProfile, Profile, as_json, grouped, print_profile, profile
from layoutopt.stepcost import predict_step
from layoutopt.tracefile import trace_events, write_trace
from tests.face import refused
from tests.graphs import Sketch
from tests.plans import naive_plan, row_major
from tests.test_execute import batch, regression, start

GENERIC = device_models.load("generic-cpu")
LINE = 64


def launch(step: int, phase: str, start_s: float, end_s: float, **other: object) -> LaunchProfile:
    made = LaunchProfile(
        step, f"op{step}", "pointwise", phase, "pointwise.fat()", "pointwise add [4] -> [4]", ("row-major[4]",),
        start_s, end_s, end_s - start_s, 8.0, 32.0, 1e-6, "memory",
    )  # fmt: skip
    return replace(made, **other)


def made_up() -> Profile:
    """Three launches, of which the last two overlap; the second step has two."""
    launches = (
        launch(0, "forward", 0.0, 2e-6),
        launch(1, "backward", 3e-6, 7e-6, label="op1"),
        launch(1, "backward", 6e-6, 8e-6, label="op1"),
    )
    return Profile("toy", "a device", "ilp", 1e9, 1e10, launches, (9e-6, 12e-6, 10e-6), 1e-6, 4096, (100, 300), 8e-6)


# ---- the trace ------------------------------------------------------------------------------------------------------


def check_trace(document: dict) -> None:
    """The Trace Event Format, as far as we use it."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"]
    busy: dict[int, float] = {}
    for e in events:
        assert e["ph"] in ("M", "X", "C")
        assert isinstance(e["pid"], int)
        assert isinstance(e["name"], str)
        assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["tid"] in named
            assert e["dur"] >= 0
            assert e["cat"] in ("forward", "loss", "backward", "update")
            assert e["ts"] >= busy.get(e["tid"], 0.0) - 1e-6, "slices of a track may not overlap"
            busy[e["tid"]] = e["ts"] + e["dur"]
        if e["ph"] == "C":
            assert all(isinstance(v, int) for v in e["args"].values())
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)


def test_trace_of_a_profile_made_by_hand(tmp_path: Path) -> None:
    write_trace(made_up(), tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    check_trace(document)
    slices = [e for e in document["traceEvents"] if e["ph"] == "X" and "op" in e["args"]]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("op0", 0.0, pytest.approx(2.0)),
        ("op1", pytest.approx(3.0), pytest.approx(4.0)),
        ("op1", pytest.approx(6.0), pytest.approx(2.0)),
    ]
    assert slices[0]["tid"] == slices[1]["tid"] != slices[2]["tid"]
    assert slices[0]["args"]["percent_of_roofline"] == pytest.approx(50.0)
    assert slices[0]["args"]["layouts"] == ["row-major[4]"]
    phases = [e for e in document["traceEvents"] if e["ph"] == "X" and "op" not in e["args"]]
    assert [(e["name"], e["args"]["launches"]) for e in phases] == [("forward", 1), ("backward", 2)]
    assert phases[1]["dur"] == pytest.approx(5.0)
    counted = [(e["ts"], e["args"]["bytes"]) for e in document["traceEvents"] if e["ph"] == "C"]
    assert counted == [(0.0, 100), (pytest.approx(3.0), 300)]
    assert document["otherData"]["gap_s"] == pytest.approx(2e-6)


def test_trace_of_nothing_has_names_only() -> None:
    events = trace_events(replace(made_up(), launches=(), alive_bytes=()))
    assert {e["ph"] for e in events} == {"M"}


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_groups_add_up_and_come_longest_first(capsys) -> None:
    found = made_up()
    groups = grouped(found.launches, lambda x: x.phase)
    assert [(g.name, g.launches) for g in groups] == [("backward", 2), ("forward", 1)]
    assert groups[0].time_s == pytest.approx(6e-6)
    assert groups[0].share_of_roofline == pytest.approx(2 / 6)
    assert (found.step_s, found.kernels_s, found.gap_s) == (
        pytest.approx(10e-6),
        pytest.approx(8e-6),
        pytest.approx(2e-6),
    )
    data = json.loads(json.dumps(as_json(found)))
    for name in ("phase", "kind", "kernel", "op"):
        assert sum(row["time_s"] for row in data[f"by_{name}"]) == pytest.approx(found.kernels_s)
    assert data["peak_alive_bytes"] == 300
    print_profile(found, top=1)
    printed = capsys.readouterr().out
    assert "whole step 0.010 ms" in printed
    assert "gap 0.002 ms" in printed
    assert "predicted 0.008 ms" in printed
    assert "op (the 1 longest of 2)" in printed


# ---- on a device ----------------------------------------------------------------------------------------------------


def lines(elems: int) -> int:
    """Bytes of the lines that ``elems`` floats fill."""
    return -(-elems * 4 // LINE) * LINE


def test_a_step_by_launches(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    executor = Executor(runtime, regression(), naive_plan(regression(), runtime.limits, row_major), start())
    found = profile(executor, batch(), GENERIC, rounds=3)
    assert len(found.launches) == sum(len(step.kernel.launches) for step in executor.steps)
    assert [x.label for x in found.launches if x.kind != "relayout"] == [
        step.label for step in executor.steps for _ in step.kernel.launches if step.op is not None
    ]
    assert {x.phase for x in found.launches} == {"forward", "loss", "backward", "update"}
    assert all(x.time_s > 0 and x.end_s >= x.start_s >= 0 for x in found.launches)
    assert len(found.steps_s) == 3
    assert 0 < found.host_s <= max(found.steps_s)
    model = replace(GENERIC, limits=executor.limits)
    assert found.predicted_s == predict_step(executor.plan, executor.graph, model).step_s
    assert found.arena_bytes == executor.plan.arena_bytes >= max(found.alive_bytes) > 0
    check_trace({"displayTimeUnit": "ms", "traceEvents": trace_events(found)})


def test_arithmetic_and_bytes_are_those_of_the_op(device_index: int) -> None:
    """Padding up to a tile is no arithmetic; an update in place is read and written."""
    rows, inner, cols = 29, 37, 83
    s = Sketch()
    s.tensor("x", (rows, inner), "input")
    s.tensor("g", (inner, cols), "input")
    s.tensor("w", (inner, cols), "parameter", init="normal:0.1")
    s.op(
        "contraction",
        [("x", ("reshape", (1, rows, inner))), ("w", ("reshape", (1, inner, cols)))],
        {"y": (1, rows, cols)},
    )
    s.phase = "loss"
    s.op("reduce", [("y", ("reshape", (1, rows * cols)))], {"loss": (1,)}, fn="sum")
    s.sgd("w", "g")
    runtime = Runtime(devices()[device_index])
    graph = s.graph("count", "loss")
    executor = Executor(runtime, graph, naive_plan(graph, runtime.limits, row_major))
    found = profile(executor, example_inputs(graph), GENERIC, rounds=1)
    by_op = {g.name: g for g in grouped(found.launches, lambda x: x.phase)}
    assert by_op["forward"].flops == 2 * rows * inner * cols
    assert by_op["forward"].bytes == sum(map(lines, (rows * inner, inner * cols, rows * cols)))
    assert by_op["update"].bytes == pytest.approx(3 * lines(inner * cols), abs=2 * LINE)  # w twice, g once


def test_a_model_without_rates_is_refused() -> None:
    bare = DeviceModel("bare", "", "", GENERIC.limits)
    with pytest.raises(DeviceError, match="states no number 'flops_per_s'"):
        profile(None, {}, bare)  # type: ignore[arg-type]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a graph, a model of the device here and a plan for it; no calibration of the user's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    info = pick()
    device_models.save(replace(GENERIC, name=info.name, driver=info.driver, limits=info.limits), "here.toml")
    graphfile.save(run_passes(regression())[0], "step.graph")
    assert main(["plan", "step.graph", "--device-model", "here.toml", "--strategy", "greedy", "-o", "plan.json"]) == 0
    return folder


@pytest.mark.device
def test_profile_of_a_plan(capsys, files: Path) -> None:
    capsys.readouterr()
    options = ["--device-model", "here.toml", "--rounds", "2", "--trace", "trace.json", "--json"]
    assert main(["profile", "plan.json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"] == "trace.json"
    assert found["graph"] == "regression"
    assert found["kernels_s"] + found["gap_s"] == pytest.approx(found["step_s"])
    assert {row["name"] for row in found["by_phase"]} == {"forward", "loss", "backward", "update"}
    for row in found["launches"]:
        assert row["roofline_s"] == pytest.approx(
            max(row["flops"] / found["flops_per_s"], row["bytes"] / found["memory_bytes_per_s"])
        )
        assert row["share_of_roofline"] == pytest.approx(row["roofline_s"] / row["time_s"])
    document = json.loads((files / "trace.json").read_text())
    check_trace(document)
    slices = [e for e in document["traceEvents"] if e["ph"] == "X" and "op" in e["args"]]
    assert [e["name"] for e in slices] == [row["label"] for row in found["launches"]]


@pytest.mark.device
def test_profile_of_a_graph_for_people(capsys, files: Path) -> None:
    capsys.readouterr()
    options = ["--device-model", "here.toml", "--rounds", "1", "--top", "2", "--strategy", "rowmajor"]
    assert main(["profile", "step.graph", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("regression (rowmajor) on ")
    assert "% of roofline" in printed
    assert "kernel (the 2 longest of" in printed


@pytest.mark.device
def test_without_a_model_of_the_device_its_rates_are_measured(
    capsys, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def facts(runtime: Runtime) -> DeviceModel:
        measured.append(runtime.info.name)
        return replace(GENERIC, name=runtime.info.name)

    monkeypatch.setattr("costmodel.facts.measured_facts", facts)
    capsys.readouterr()
    assert main(["profile", "plan.json", "--rounds", "1", "--json"]) == 0
    assert measured == [pick().name]
    assert json.loads(capsys.readouterr().out)["flops_per_s"] == 1e11


@pytest.mark.device
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.json"], "no plan at absent.json"),
        (["absent.graph"], "no training graph at absent.graph"),
        (["damaged.json"], "damaged.json is no plan or is damaged"),
        (["plan.json", "--trace", "absent/t.json"], "cannot write absent/t.json"),
        (["plan.json", "--trace", "."], "it is a directory"),
        (["plan.json", "--device-model", "absent.toml"], "no device model 'absent.toml'"),
        (["plan.json", "--device-model", "mali-g78"], "device model mali-g78 is for"),
        (["step.graph", "--device-model", "mali-g78"], "device model mali-g78 is for"),
        (["plan.json", "--graph", "vit-digits"], "plan"),
        (["step.graph", "--graph", "vit-digits"], "--graph names the graph of a plan"),
        (["step.graph", "--strategy", "best"], "best"),
        (["step.graph", "--memory", "much"], "memory 'much' is not a size"),
        (["plan.json", "--device", "nonesuch"], "nonesuch"),
        (["stranger.json"], "does not serve"),
    ],
)
def test_bad_input(capsys, files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    def too_late(*_: object, **__: object) -> None:
        pytest.fail("measured before the input was found to be bad")

    monkeypatch.setattr("costmodel.calibrate.calibrate", too_late)
    monkeypatch.setattr("costmodel.facts.measured_facts", too_late)
    monkeypatch.setattr(profiling, "profile", too_late)
    (files / "damaged.json").write_bytes((files / "plan.json").read_bytes()[:-40])
    made = json.loads((files / "plan.json").read_text())
    made["ops"][0]["variant"] = "rows.other()"
    (files / "stranger.json").write_text(json.dumps({**made, "device_name": "another device"}))
    before = sorted(p.name for p in files.iterdir())
    assert says in refused(capsys, "profile", *arguments)
    assert sorted(p.name for p in files.iterdir()) == before
