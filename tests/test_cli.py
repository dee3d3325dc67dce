"""The command line, command by command and in process, on small things: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import layoutopt
from kernels.runtime import devices
from layoutopt import finetune, graphfile, plan
from layoutopt.cli import main
from layoutopt.display_parts import bytes_text
from layoutopt.graph import TrainingGraph
from tests.face import USER_MODULE, own_folder, refused, text_checkpoint, write_samples, write_text

GENERIC = ("--device-model", "generic-cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph file of a user's own module, captured by the command line."""
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    folder = tmp_path_factory.mktemp("net")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "usernet.py").write_text(USER_MODULE)
        assert main(["capture", "usernet:net", "-o", "net.graph"]) == 0
    return folder / "net.graph"


@pytest.fixture(scope="module")
def bert() -> TrainingGraph:
    """A BERT of two small layers, four texts of twelve tokens a step, two classes."""
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from layoutopt.facade import capture_model

    return capture_model("bert-tiny", batch=4, seq=12, optimizer="adamw", labels=2)[0]


@pytest.fixture
def small_text(bert: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`train minilm` with the small BERT in MiniLM's place; the folder holds a checkpoint `start` and `data.txt`."""
    asked: list[tuple[object, ...]] = []

    def capture(
        name: str, *, batch: int, seq: int, optimizer: str, labels: int, dropout: bool
    ) -> tuple[TrainingGraph, None]:
        asked.append((name, batch, seq, labels, dropout))
        return bert, None

    monkeypatch.setattr(finetune, "capture_model", capture)
    text_checkpoint(tmp_path / "start", bert)
    write_text(tmp_path / "data.txt")
    yield tmp_path
    assert set(asked) <= {("minilm", 4, 12, 2, False)}


def run(capsys, *arguments: object) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def as_json(capsys, *arguments: object):
    return json.loads(run(capsys, *arguments, "--json"))


def generic_model(device_index: int):
    """The generic CPU's model under a device's name."""
    from costmodel import device as device_models

    info = devices()[device_index]
    return replace(device_models.load("generic-cpu"), name=info.name, limits=info.limits)


def plan_on(graph: Path, device_index: int, tmp_path: Path) -> tuple[Path, Path]:
    """A plan file for a device, and the device model that it was made with: the generic CPU under this one's name."""
    from costmodel import device as device_models

    device_models.save(generic_model(device_index), tmp_path / "device.toml")
    made = tmp_path / "device-plan.json"
    options = ["--device-model", str(tmp_path / "device.toml"), "--strategy", "rowmajor", "-o", str(made)]
    assert main(["plan", str(graph), *options]) == 0
    return made, tmp_path / "device.toml"


# ---- the program -----------------------------------------------------------------------------------------------------


def test_version_and_help(capsys) -> None:
    assert run(capsys, "--version") == f"layoutopt {layoutopt.__version__}\n"
    text = run(capsys, "--help")
    for command in ("devices", "capture", "calibrate", "plan", "simulate", "compare", "train", "demo"):
        assert f"  {command} " in text
        assert run(capsys, command, "--help").startswith("Usage: ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["plan"], ["plan", "x", "--nonsense"], ["train", "x", "--data"]])
def test_usage_errors_exit_with_2(capsys, arguments: list[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", "plan", "absent.graph"],
        cwd=Path(layoutopt.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("layoutopt: error: no training graph at absent.graph")
    assert done.stderr.count("\n") == 1


def test_interruption_is_no_traceback(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("layoutopt.clash.check", interrupted)
    assert main(["devices"]) == 130
    assert capsys.readouterr().err == "layoutopt: interrupted\n"


def test_the_systems_refusals_are_sentences(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "plan.json")

    monkeypatch.setattr(plan, "save", full)
    assert main(["plan", "vit-digits", *GENERIC, "--strategy", "nonsense"]) == 2
    capsys.readouterr()
    monkeypatch.setattr("layoutopt.models.find_graph", full)
    assert main(["plan", "vit-digits", *GENERIC]) == 2
    assert capsys.readouterr().err == "layoutopt: error: plan.json: No space left on device\n"


# ---- devices, capture ------------------------------------------------------------------------------------------------


def test_devices(capsys, device_index: int) -> None:
    info = devices()[device_index]
    row = as_json(capsys, "devices")["devices"][device_index]
    assert (row["index"], row["label"], row["calibration"]) == (device_index, info.label, None)
    assert row["global_mem_bytes"] == info.limits.global_mem_bytes
    text = run(capsys, "devices")
    assert f"{device_index}: {info.label}\n" in text
    assert "generic-cpu" in text


def test_devices_where_there_is_none(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.runtime.devices", list)
    monkeypatch.setattr("kernels.runtime.no_device_reason", lambda: "the loader found no driver")
    assert run(capsys, "devices").startswith("no OpenCL device: the loader found no driver\n")
    assert as_json(capsys, "devices")["devices"] == []


@pytest.mark.peer
def test_capture_writes_a_graph_file(capsys, net: Path, elsewhere: Path) -> None:
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    got = as_json(capsys, "capture", "usernet:net", "--optimizer", "sgd")
    assert got["file"] == "usernet-net.graph"
    graph = graphfile.load(elsewhere / "usernet-net.graph")
    assert (graph.hash, len(graph.ops)) == (got["hash"], got["ops"])
    assert got["parameters"] == 6 * 10 + 10 + 10 * 3 + 3
    assert graph.meta["optimizer"]["name"] == "sgd"
    assert graph.meta["command"] == "layoutopt capture usernet:net --optimizer sgd"
    text = run(capsys, "capture", "usernet:net", "-o", "again.graph", "--verbose")
    assert "103 parameters" in text
    assert sorted(p.name for p in elsewhere.iterdir() if p.suffix == ".graph") == ["again.graph", "usernet-net.graph"]


@pytest.mark.peer
def test_capture_lists_models(capsys) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    assert {"minilm", "vit-digits", "llama-3.2-1b"} <= set(as_json(capsys, "capture", "--list"))
    assert "vit-digits" in run(capsys, "capture", "--list")


# ---- plan, simulate, compare -----------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("strategy", ["ilp", "rowmajor", "rtile", "random:3"])
def test_plan_then_simulate(capsys, net: Path, tmp_path: Path, strategy: str) -> None:
    made = tmp_path / "net-plan.json"
    facts = as_json(capsys, "plan", net, *GENERIC, "--strategy", strategy, "-o", made)
    loaded = plan.load(made)
    assert (facts["strategy"], facts["device"]) == (strategy, "generic-cpu")
    assert loaded.graph_hash == graphfile.load(net).hash
    assert facts["arena_bytes"] == loaded.arena_bytes
    assert 1.0 <= facts["arena_over_live"] < 1.5
    if strategy == "ilp":
        assert (facts["status"], facts["gap"]) == ("OPTIMAL", 0.0)
    report = as_json(capsys, "simulate", made, *GENERIC, "--graph", net)
    assert report["levels"][0] == "L1"
    assert report["walked"] == 1.0
    for group in ("by_step", "by_tensor", "by_phase"):
        parts = sum(c["accesses"] for c in report[group].values())
        assert parts == pytest.approx(report["total"]["accesses"])
    assert set(report["by_phase"]) == {"forward", "loss", "backward", "update"}


@pytest.mark.peer
def test_a_better_plan_is_not_dearer_and_tables_are_printed(capsys, net: Path, tmp_path: Path) -> None:
    costs = {
        name: as_json(capsys, "plan", net, *GENERIC, "--strategy", name, "-o", tmp_path / "p.json")["predicted_step_s"]
        for name in ("ilp", "greedy", "rowmajor")
    }
    assert costs["ilp"] <= min(costs.values()) * (1 + 1e-9)
    text = run(capsys, "plan", net, *GENERIC, "--memory", "1MiB", "-o", tmp_path / "p.json")
    assert "OPTIMAL" in text
    assert f"wrote {tmp_path / 'p.json'}" in text


@pytest.mark.peer
def test_simulate_finds_the_graph_beside_the_plan(capsys, net: Path, tmp_path: Path) -> None:
    run(capsys, "plan", net, *GENERIC, "--strategy", "rowmajor", "-o", tmp_path / "p.json")
    (tmp_path / "a.graph").write_bytes(b"a neighbour that is no graph")
    (tmp_path / "b.graph").write_bytes(net.read_bytes())
    text = run(capsys, "simulate", tmp_path / "p.json", *GENERIC, "--top", "3")
    assert "caches of generic-cpu (modelled from public facts, not measured)" in text
    assert "tensor (most" in text
    names = [line.split()[0] for line in text.split("tensor (most")[1].splitlines()[1:4]]
    assert len(set(names)) == 3


@pytest.mark.peer
def test_simulate_strategies_side_by_side(capsys, net: Path, tmp_path: Path) -> None:
    options = ("--strategies", "rowmajor,rtile")
    report = as_json(capsys, "simulate", net, *GENERIC, *options)
    assert [row["plan"] for row in report["plans"]] == ["rowmajor", "rtile"]
    assert set(report["plans"][0]["over_first"].values()) <= {1.0, None}
    text = run(capsys, "simulate", net, *GENERIC, *options)
    assert "in brackets: over rowmajor" in text
    files = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    for name in files:
        run(capsys, "plan", net, *GENERIC, "--strategy", "rowmajor", "-o", name)
    report = as_json(capsys, "simulate", *files, *GENERIC, "--graph", net, "--full")
    assert [row["plan"] for row in report["plans"]] == files
    assert report["plans"][0]["total"] == report["plans"][1]["total"]
    sentence = refused(capsys, "simulate", net, net, *GENERIC)
    assert "plan files" in sentence


@pytest.mark.peer
def test_simulate_draws(capsys, net: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    text = run(capsys, "simulate", net, *GENERIC, "--strategies", "rowmajor", "--pictures", folder, "--reuse")
    assert f"wrote {folder / 'ops.png'}" in text
    assert "reuse distances in lines of 64 bytes; 100.0% of the accesses walked" in text
    assert {path.name for path in folder.iterdir()} == {"ops.png", "tensors.png", "layouts.png", "reuse.png"}
    report = as_json(capsys, "simulate", net, *GENERIC, "--strategies", "rowmajor", "--reuse", "--full")
    found = report["reuse"]["total"]
    assert found["first_touches"] + sum(found["counts"]) == report["total"]["lines"]
    both = ("--strategies", "rowmajor,rtile", "--pictures", folder)
    assert "are of one plan, not 2" in refused(capsys, "simulate", net, *GENERIC, *both)


@pytest.mark.peer
def test_compare_without_a_device(capsys, net: Path) -> None:
    got = as_json(capsys, "compare", net, *GENERIC, "--no-measure", "--strategies", "rowmajor, greedy")
    assert [row["strategy"] for row in got["rows"]] == ["rowmajor", "greedy"]
    assert all(row["measured_s"] is None and row["misses"]["L1"] > 0 for row in got["rows"])
    text = run(capsys, "compare", net, *GENERIC, "--no-measure", "--no-simulate", "--strategies", "rowmajor")
    assert "rowmajor" in text
    assert "misses" not in text
    options = ("--no-measure", "--no-simulate", "--strategies", "ilp,bfs,tflite")
    rows = {row["strategy"]: row for row in as_json(capsys, "compare", net, *GENERIC, *options)["rows"]}
    assert rows["ilp"]["gap"] == 0
    assert all(row["gap"] >= 0 for row in rows.values())
    text = run(capsys, "compare", net, *GENERIC, *options)
    assert "over ilp" in text
    assert (f"tflite: {rows['tflite']['not_run']} more copies" in text) == (rows["tflite"]["not_run"] > 0)


@pytest.mark.peer
def test_compare_on_a_device(capsys, net: Path, tmp_path: Path, device_index: int) -> None:
    _, model = plan_on(net, device_index, tmp_path)
    options = ("--device", device_index, "--device-model", model, "--strategies", "rowmajor,rtile", "--rounds", 3)
    rows = as_json(capsys, "compare", net, *options)["rows"]
    assert all(row["measured_s"] > 0 and row["rounds"] == 3 for row in rows)
    np.testing.assert_allclose(rows[0]["loss"], rows[1]["loss"], rtol=1e-5)


# ---- calibrate -------------------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_calibrate_then_plan_with_it(capsys, net: Path, tmp_path: Path, device_index: int) -> None:
    from costmodel import device as device_models

    file = tmp_path / "here.toml"
    got = as_json(capsys, "calibrate", "--device", device_index, "--graph", net, "--budget", "15", "-o", file)
    model = device_models.load(file)
    assert model.origin == "calibrated"
    assert got["measured"] == len(model.measurements) > 0
    facts = as_json(capsys, "plan", net, "--device-model", file, "-o", tmp_path / "p.json")
    assert facts["device"] == devices()[device_index].name
    assert facts["costs_measured"] > 0


# ---- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_train_learns_from_arrays(capsys, net: Path, tmp_path: Path, device_index: int) -> None:
    made, model = plan_on(net, device_index, tmp_path)
    samples = write_samples(tmp_path / "data.npz", 203)
    common = ("train", net, "--data", samples, "--device", device_index, "--lr", "0.05")
    out = tmp_path / "out"
    got = as_json(capsys, *common, "--plan", made, "--epochs", 3, "--out", out)
    assert got["steps"] == 3 * 33  # 162 training samples in batches of 5
    assert got["held_out_samples"] == 41
    assert got["strategy"] == "rowmajor"
    assert got["losses"][-1] < 0.5 * got["losses"][0]
    assert got["accuracy"] > 0.7
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    again = as_json(capsys, *common, "--plan", made, "--checkpoint", out, "--max-steps", 1, "--held-out", 0)
    assert again["accuracy"] is None
    assert again["losses"][0] < 0.6 * got["losses"][0]
    text = run(capsys, *common, "--device-model", model, "--strategy", "rtile", "--max-steps", 2)
    assert text.startswith("2 steps in ")
    assert "held-out accuracy" in text


@pytest.mark.peer
def test_train_with_dropout(capsys, net: Path, elsewhere: Path, tmp_path: Path, device_index: int) -> None:
    """What is dropped hangs on --seed alone; a graph without dropout has none to leave on."""
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    run(capsys, "capture", "usernet:dropping", "--dropout", "-o", "drop.graph")
    run(capsys, "capture", "usernet:dropping", "-o", "plain.graph")
    made, model = plan_on(elsewhere / "drop.graph", device_index, tmp_path)
    samples = write_samples(tmp_path / "data.npz", 203)
    options = ("--data", samples, "--device", device_index, "--lr", "0.05", "--epochs", 3)
    first, again, other = (
        as_json(capsys, "train", "drop.graph", *options, "--plan", made, "--dropout", "--seed", seed)
        for seed in (1, 1, 2)
    )
    assert first["losses"] == again["losses"] != other["losses"]
    assert first["accuracy"] == again["accuracy"] > 0.7
    options = (*options, "--device-model", model, "--dropout")
    sentence = refused(capsys, "train", "plain.graph", *options)
    assert "has no dropout to leave on" in sentence


@pytest.mark.peer
def test_train_text_saves_and_resumes(capsys, small_text: Path, bert: TrainingGraph, device_index: int) -> None:
    """Stopped after three steps and resumed, a run takes the steps and reaches the weights of one that was not."""
    from layoutopt.checkpoint import load_safetensors

    graphfile.save(bert, small_text / "bert.graph")
    made, _ = plan_on(small_text / "bert.graph", device_index, small_text)
    common = ("train", "minilm", "--data", small_text / "data.txt", "--plan", made, "--device", device_index)
    fresh = ("--checkpoint", small_text / "start", "--batch", 4, "--seq", 12, "--lr", "1e-3", "--epochs", 2)
    whole, half = small_text / "whole", small_text / "half"
    full = as_json(capsys, *common, *fresh, "--out", whole)
    assert full["steps"] == 10  # 18 training samples in batches of 4, twice
    first = as_json(capsys, *common, *fresh, "--out", half, "--max-steps", 3)
    rest = as_json(capsys, *common, "--resume", half, "--epochs", 2)
    assert first["losses"] + rest["losses"] == pytest.approx(full["losses"], rel=1e-5)
    assert rest["directory"] == str(half)
    for name, value in load_safetensors(bert, whole / "model.safetensors").items():
        np.testing.assert_allclose(load_safetensors(bert, half / "model.safetensors")[name], value, atol=1e-6)
    expected = ["config.json", "model.safetensors", "tokenizer.json", "training_state.safetensors"]
    assert sorted(p.name for p in half.iterdir()) == expected
    config = json.loads((half / "config.json").read_text())
    assert config["id2label"] == {"0": "ham", "1": "spam"}
    assert main([str(a) for a in (*common, "--resume", half, "--epochs", 2)]) == 2
    assert "nothing left to train: the run has taken 10 of 10 steps" in capsys.readouterr().err


@pytest.mark.peer
def test_train_in_micro_batches(capsys, small_text: Path, bert: TrainingGraph, device_index: int) -> None:
    """The same losses in any number of them, and after a stop in another; the last batch of an epoch is not full."""
    graphfile.save(bert, small_text / "bert.graph")
    made, model = plan_on(small_text / "bert.graph", device_index, small_text)
    data = ("train", "minilm", "--data", small_text / "data.txt", "--device", device_index)
    fresh = ("--checkpoint", small_text / "start", "--batch", 4, "--seq", 12, "--lr", "1e-3", "--epochs", 2)
    common = (*data, "--device-model", model, "--strategy", "rowmajor")
    full = as_json(capsys, *common, *fresh, "--micro-batches", 1)
    first = as_json(capsys, *common, *fresh, "--micro-batches", 2, "--out", small_text / "half", "--max-steps", 3)
    rest = as_json(capsys, *common, "--resume", small_text / "half", "--epochs", 2, "--micro-batches", 4)
    assert first["losses"] + rest["losses"] == pytest.approx(full["losses"], rel=1e-4)
    sentence = refused(capsys, *common, *fresh, "--micro-batches", 3)
    assert "the 4 samples of graph" in sentence
    assert "choose one of 1, 2, 4" in sentence
    assert "leave out --micro-batches" in refused(capsys, *data, *fresh, "--plan", made, "--micro-batches", 2)


@pytest.mark.peer
def test_plan_and_capture_in_micro_batches(capsys, net: Path, elsewhere: Path) -> None:
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    options = (*GENERIC, "--strategy", "rowmajor", "-o")
    got = as_json(capsys, "plan", net, "--micro-batches", 5, *options, "five.json")
    assert (got["micro_batches"], got["samples"]) == (5, "5 micro-batches of 1 sample")
    assert plan.load(Path("five.json")).rewrites[0] == "micro:5"
    whole = as_json(capsys, "plan", net, *options, "whole.json")
    assert (whole["micro_batches"], whole["samples"]) == (1, "5 samples at once")
    run(capsys, "simulate", "five.json", "--graph", net, *GENERIC)
    run(capsys, "capture", "usernet:net", "--micro-batches", 5, "-o", "cut.graph")
    again = as_json(capsys, "plan", "cut.graph", *options, "cut.json")
    assert (again["micro_batches"], again["arena_bytes"]) == (5, got["arena_bytes"])
    assert "runs 5 micro-batches of 1 sample already" in refused(
        capsys, "plan", "cut.graph", "--micro-batches", 5, *options, "x.json"
    )
    assert "choose one of 1, 5" in refused(capsys, "capture", "usernet:net", "--micro-batches", 2, "-o", "x.graph")
    assert not Path("x.graph").exists()
    assert "leave one of them out" in refused(capsys, "plan", net, "--pareto", "--micro-batches", 5, *GENERIC)


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_demo_in_small(capsys, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_index: int) -> None:
    """The whole demo with a small network in the transformer's place and samples in the digits'."""
    pytest.importorskip("matplotlib", reason="needs the extra 'demo'")
    from layoutopt import demo
    from layoutopt.train import Dataset

    graph = graphfile.load(net)
    with np.load(write_samples(tmp_path / "data.npz", 120)) as samples:
        data = Dataset(dict(samples))
    monkeypatch.setattr(demo, "PEAK_LR", 0.05)
    monkeypatch.setattr(demo, "shipped", lambda name: graph)
    # Calibrating has a test of its own.
    monkeypatch.setattr(demo, "calibrate_for", lambda runtime, graphs, **_: generic_model(device_index))
    monkeypatch.setattr(demo.digits, "load", lambda: data)
    out = tmp_path / "figures"
    options = ("-o", out, "--device", device_index, "--epochs", 4)
    summary = as_json(capsys, "demo", *options)
    assert sorted(p.name for p in out.iterdir()) == [
        "device.toml",
        "loss.png",
        "plan.json",
        "summary.json",
        "vit-digits.graph",
    ]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 4 * 20
    assert summary["accuracy"] > 0.7
    assert {"ilp", "rowmajor", "greedy", "ideal"} <= set(summary["strategies"])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plan.load(out / "plan.json").graph_hash == graph.hash


def test_sizes_are_written_for_people() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "3 MiB",
        "5 GiB",
    ]
