"""``layoutopt side evaluate``: a folder as ``side device`` leaves it, held-out text, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from costmodel import device as device_models  # noqa: E402
from kernels.runtime import Runtime, devices  # noqa: E402
from layoutopt.cli import main  # noqa: E402
from layoutopt.facade import capture_model  # noqa: E402
from layoutopt.models import uncalibrated  # noqa: E402
from layoutopt.quantize import Format  # noqa: E402
from layoutopt.side.backbone import Backbone, Wanted, capture_wanted  # noqa: E402
from layoutopt.side.device import HEAD_FILE, NETWORK_FILE  # noqa: E402
from layoutopt.side.device_head import fit_head  # noqa: E402
from layoutopt.side.evaluate import save_device_head  # noqa: E402
from layoutopt.side.graphs import facts_of  # noqa: E402
from layoutopt.side.samples import read_samples  # noqa: E402
from layoutopt.side.task import Task  # noqa: E402
from layoutopt.side.weights import SideWeights, initial_weights, pack  # noqa: E402
from layoutopt.train import Dataset  # noqa: E402
from tests.face import own_folder, refused, text_checkpoint, write_text  # noqa: E402
from tests.tap_cases import planning  # noqa: E402

pytestmark = pytest.mark.peer

SEQ, BATCH, HELD_OUT = 9, 4, 0.3


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


def wanted(source: Path) -> Wanted:
    return Wanted("bert-tiny", source, BATCH, SEQ, Format("int8", 16))


def task_of(graph_hash: str, taps: tuple[str, ...], mode: str) -> Task:
    return Task(
        model="bert-tiny",
        graph=graph_hash,
        width=60,
        taps=taps,
        format="int8:16",
        tokens="pivot",
        seq=SEQ,
        batch=BATCH,
        classes=2,
        mode=mode,  # type: ignore[arg-type]
        rank=4,
        seed=3,
    )


def written(folder: Path, source: Path, mode: str = "labels") -> Task:
    """A folder as ``side device`` leaves it, before the first step."""
    graph = capture_wanted(wanted(source))
    task = task_of(graph.hash, tuple(facts_of(graph)["taps"]), mode)
    folder.mkdir(exist_ok=True)
    (folder / NETWORK_FILE).write_bytes(pack(SideWeights(task, 0, initial_weights(task))))
    return task


def held_out(backbone: Backbone, data: Path) -> Dataset:
    left_out = read_samples(backbone, str(data)).split(HELD_OUT, 3)[1]
    assert left_out is not None
    return left_out


def test_accuracy_on_held_out_text(work: Path, capsys: pytest.CaptureFixture[str], device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    device_models.save(uncalibrated(runtime), work / "device.toml")
    source = text_checkpoint(work / "model", capture_model("bert-tiny", seq=SEQ, labels=2)[0])
    data = write_text(work / "texts.tsv", 23)
    task = written(work / "run", source)
    options = ["--data", data, "--checkpoint", source, "--held-out", HELD_OUT, "--device", device_index]
    options += ["--device-model", work / "device.toml", "--strategy", "rowmajor"]
    command = [str(a) for a in ("side", "evaluate", work / "run", *options)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    # The same by the backbone's taps and numpy.
    backbone = Backbone.open(wanted(source), runtime, planning(runtime))
    left_out = held_out(backbone, data)
    labels = left_out.inputs["labels"]
    weights = initial_weights(task)
    logits = []
    for rows in np.array_split(np.arange(len(labels)), 2):
        inputs = {name: x[rows] for name, x in left_out.inputs.items() if name != "labels"}
        features = backbone.features(backbone.run(inputs), inputs)
        logits.append(features @ weights["classifier.weight"].T + weights["classifier.bias"])
    right = np.concatenate(logits).argmax(1) == labels
    assert found["samples"] == len(labels) == 7
    assert found["accuracy"] == pytest.approx(right.mean())
    assert (found["model"], found["steps"], found["held_out"]) == ("bert-tiny", 0, True)
    assert found["memory_bytes"] > backbone.footprint().weights_bytes

    # What the device's own head knows is the answer of a private task that nobody trained.
    written(work / "run", source, "private")
    assert "no device head" in refused(capsys, *command)
    training = read_samples(backbone, str(data)).split(HELD_OUT, 3)[0]
    inputs = {name: x[:BATCH] for name, x in training.inputs.items() if name != "labels"}
    head = fit_head(backbone.features(backbone.run(inputs), inputs), training.inputs["labels"][:BATCH], 2)
    save_device_head(work / "run" / HEAD_FILE, head)
    capsys.readouterr()
    assert main(command) == 0
    assert "held-out samples after 0 steps" in capsys.readouterr().out
    backbone.close()


@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_the_devices_graph_is_planned_and_simulated(
    work: Path, capsys: pytest.CaptureFixture[str], storage: str
) -> None:
    capture = ["side", "capture", "bert-tiny", "--seq", "9"]
    assert main([*capture, "--batch", "4", "--tap-format", "int8:16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["taps"] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    model = ["--device-model", "generic-cpu"]
    assert main(["plan", found["file"], *model, "--storage", storage, "-o", "plan.json"]) == 0
    assert main(["simulate", "plan.json", *model]) == 0
    assert main(["compare", found["file"], *model, "--storage", storage, "--strategies", "ilp", "--no-measure"]) == 0
    capsys.readouterr()
    assert "no tap 'nothing'" in refused(capsys, *capture, "--taps", "nothing")
    assert "no blocks" in refused(capsys, "side", "capture", "swin-odd")
    assert "unknown number format" in refused(capsys, *capture, "--tap-format", "int3")


def test_bad_input_is_refused_in_one_sentence(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not devices():
        pytest.skip("no OpenCL device")
    runtime = Runtime(devices()[0])
    device_models.save(uncalibrated(runtime), work / "device.toml")
    source = text_checkpoint(work / "model", capture_model("bert-tiny", seq=SEQ, labels=2)[0])
    data = write_text(work / "texts.tsv")
    task = written(work / "run", source)
    usual = ["--data", data, "--checkpoint", source, "--device-model", work / "device.toml", "--strategy", "rowmajor"]

    def no(*change: object, folder: str = "run") -> str:
        return refused(capsys, "side", "evaluate", work / folder, *usual, *change)

    assert "no side network at" in no(folder="none")
    (work / "damaged").mkdir()
    (work / "damaged" / NETWORK_FILE).write_bytes(b"nothing")
    assert "damaged" in no(folder="damaged")
    assert "no weights at" in no("--checkpoint", work / "none")
    assert "no data file at" in no("--data", work / "none.tsv")
    assert "unknown strategy" in no("--strategy", "fastest")
    assert "unknown storage" in no("--storage", "int3")
    three = write_text(work / "three.tsv", 22, ("a", "b", "c"))
    assert "never seen in training: the model knows ham, spam" in no("--data", three)
    (source / "config.json").unlink()  # then the file says what classes there are
    assert "has 3 classes, the side network 2: give the data of its task" in no("--data", three)
    (work / "other").mkdir()
    other = replace(task, graph="f" * 64)
    (work / "other" / NETWORK_FILE).write_bytes(pack(SideWeights(other, 0, initial_weights(other))))
    assert "trained beside backbone ffffffffffff" in no(folder="other")
