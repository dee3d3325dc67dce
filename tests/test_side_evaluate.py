"""Backbone and side network as one graph on a device, beside the torch side network and the pretrained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from kernels.runtime import Runtime, devices  # noqa: E402
from layoutopt.errors import LayoutOptError  # noqa: E402
from layoutopt.side.backbone import Backbone, Wanted, capture_wanted  # noqa: E402
from layoutopt.side.device_head import fit_head  # noqa: E402
from layoutopt.side.evaluate import (  # noqa: E402
    Tuned,
    load_device_head,
    load_network,
    save_device_head,
)
from layoutopt.side.graphs import facts_of  # noqa: E402
from layoutopt.side.network import SideNetwork  # noqa: E402
from layoutopt.side.network import inputs_of as network_inputs  # noqa: E402
from layoutopt.side.task import Batch, Task  # noqa: E402
from layoutopt.side.weights import SideWeights, initial_weights, pack, weight_shapes  # noqa: E402
from layoutopt.train import Dataset  # noqa: E402
from tests.tap_cases import BATCH, checkpoint, inputs_of, module_of, planning  # noqa: E402

pytestmark = pytest.mark.peer

RNG = np.random.default_rng(11)


def task_of(model: str, **more: Any) -> Task:
    tokens = more.get("tokens", "pivot")
    graph = capture_wanted(Wanted(model, batch=BATCH, seq=0, tokens=tokens))
    facts = facts_of(graph)
    rows = facts["rows"] // BATCH
    usual: dict[str, Any] = {
        "model": model,
        "graph": graph.hash,
        "width": facts["width"],
        "taps": tuple(facts["taps"]),
        "format": "int8:16",
        "tokens": tokens,
        "seq": 0 if tokens == "pivot" else rows,
        "batch": BATCH,
        "classes": 3,
        "mode": "labels",
        "pooling": facts["pivot"],
        "rank": 4,
    }
    return Task(**usual | more)


def trained(task: Task) -> SideWeights:
    """A network whose every weight does something."""
    values = {name: (RNG.normal(size=shape) * 0.2).astype(np.float32) for name, shape in weight_shapes(task).items()}
    return SideWeights(task, 7, values | {"mix": np.array([0.7], np.float32)})


def by_torch(network: SideWeights, backbone: Backbone, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The torch side network over the taps that a device gives."""
    mask = backbone.mask(inputs) if network.task.tokens == "all" else None
    batch = Batch(0, tuple(range(BATCH)), backbone.run(inputs), mask, np.zeros(BATCH, np.int32))
    with torch.no_grad():
        taps, real = network_inputs(network.task, batch, torch.device("cpu"))
        return SideNetwork(network.task, network.values)(taps, real).numpy()


def opened(task: Task, runtime: Runtime, file: Path) -> Backbone:
    wanted = Wanted(task.model, file, batch=BATCH, seq=0, format=task.fmt, tokens=task.tokens, taps=task.taps)
    return Backbone.open(wanted, runtime, planning(runtime))


CASES = {
    "bert, pivots": ("bert-tiny", {}),
    "bert, floats and a pooler": ("bert-tiny", {"format": "float32", "pooler": True}),
    "bert, all tokens": ("bert-tiny", {"tokens": "all"}),
    "bert, mean": ("bert-tiny", {"tokens": "all", "pooling": "mean", "format": "int4:16"}),
    "gpt2, pivots": ("gpt2-odd", {"format": "fp4:16"}),
    "gpt2, all tokens": ("gpt2-odd", {"tokens": "all"}),
    "vit, mean": ("vit-odd", {"tokens": "all", "pooling": "mean"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_joined_graph_equals_the_torch_side_network(case: str, device_index: int, tmp_path: Path) -> None:
    model, more = CASES[case]
    runtime = Runtime(devices()[device_index])
    file = checkpoint(module_of(model), tmp_path / "w.safetensors")
    network, inputs = trained(task_of(model, **more)), inputs_of(model)
    backbone = opened(network.task, runtime, file)
    expected = by_torch(network, backbone, inputs)
    backbone.close()
    tuned = Tuned.open(network, runtime, checkpoint=file, seq=0, planning=planning(runtime))
    got = tuned.logits(inputs)
    # Taps on the edge between two codes may fall to either side; the network's results move a little with them.
    slack = 2e-4 if network.task.fmt.kind == "float32" else 2e-2
    np.testing.assert_allclose(got, expected, rtol=slack, atol=slack)
    assert {op.phase for op in tuned.graph.ops} == {"forward"}
    assert tuned.graph.outputs == ("side:logits",)
    few = tuned.logits({name: x[:2] for name, x in inputs.items()})
    np.testing.assert_array_equal(few, got[:2])
    tuned.close()


@pytest.mark.parametrize("tokens", ["pivot", "all"])
def test_before_training_it_is_the_pretrained_model(tokens: str, device_index: int, tmp_path: Path) -> None:
    from layoutopt.side.pretrained import load_pretrained

    runtime = Runtime(devices()[device_index])
    module, inputs = module_of("bert-tiny"), inputs_of("bert-tiny")
    file = checkpoint(module, tmp_path / "w.safetensors")
    task = task_of("bert-tiny", tokens=tokens, format="float32", pooler=True)
    graph = capture_wanted(Wanted("bert-tiny", batch=BATCH, seq=0))
    head = load_pretrained(graph, facts_of(graph), file, 0).head
    network = SideWeights(task, 0, initial_weights(task, head))
    tuned = Tuned.open(network, runtime, checkpoint=file, seq=0, planning=planning(runtime))
    with torch.no_grad():
        expected = module(**{name: torch.from_numpy(x) for name, x in inputs.items()}).logits.numpy()
    np.testing.assert_allclose(tuned.logits(inputs), expected, rtol=3e-4, atol=3e-4)
    tuned.close()


def test_a_private_tasks_answer_is_the_devices_head_and_its_correction(device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])
    inputs = inputs_of("bert-tiny")
    file = checkpoint(module_of("bert-tiny"), tmp_path / "w.safetensors")
    network = trained(task_of("bert-tiny", mode="private"))
    backbone = opened(network.task, runtime, file)
    taps = backbone.run(inputs)
    head = fit_head(backbone.features(taps, inputs), np.array([0, 1, 2]), 3)
    expected = head.probabilities(backbone.features(taps, inputs)) + by_torch(network, backbone, inputs)
    backbone.close()
    save_device_head(tmp_path / "head", head)
    loaded = load_device_head(tmp_path / "head")
    tuned = Tuned.open(network, runtime, checkpoint=file, seq=0, head=loaded, planning=planning(runtime))
    np.testing.assert_allclose(tuned.logits(inputs), expected, rtol=2e-2, atol=2e-2)
    tuned.close()
    untouched = SideWeights(network.task, 0, initial_weights(network.task))
    before = Tuned.open(untouched, runtime, checkpoint=file, seq=0, head=loaded, planning=planning(runtime))
    np.testing.assert_allclose(before.logits(inputs).sum(1), 1.0, rtol=1e-5)
    before.close()


def test_accuracy_counts_every_sample_once(device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])
    file = checkpoint(module_of("vit-odd"), tmp_path / "w.safetensors")
    tuned = Tuned.open(trained(task_of("vit-odd")), runtime, checkpoint=file, planning=planning(runtime))
    pixels = np.concatenate([inputs_of("vit-odd", seed)["pixel_values"] for seed in range(3)])[:8]
    first = tuned.evaluate(Dataset({"pixel_values": pixels, "labels": np.zeros(8, np.int32)}))
    right = first.logits.argmax(1).astype(np.int32)
    assert (first.samples, first.logits.shape) == (8, (8, 3))
    assert first.accuracy == np.mean(right == 0)
    right[2] = (right[2] + 1) % 3
    assert tuned.evaluate(Dataset({"pixel_values": pixels, "labels": right})).accuracy == 7 / 8
    tuned.close()


def test_networks_of_other_backbones_are_refused(device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])
    file = checkpoint(module_of("bert-tiny"), tmp_path / "w.safetensors")
    task = task_of("bert-tiny")

    def refused(task: Task, words: str, **more: Any) -> None:
        with pytest.raises(LayoutOptError, match=words) as caught:
            Tuned.open(trained(task), runtime, **{"checkpoint": file, "seq": 0, **more}, planning=planning(runtime))
        assert "\n" not in str(caught.value)

    refused(replace(task, graph="0" * 64), "trained beside backbone 000000000000")
    refused(task, "give the same --seq", seq=5)
    refused(replace(task, width=64), "reads taps of 64 numbers, those of 'bert-tiny-taps' have 60")
    refused(replace(task, taps=("bert.encoder.layer.9",)), "no tap")
    refused(replace(task, mode="private"), "give that head too")
    refused(task, "another model", checkpoint=checkpoint(module_of("vit-odd"), tmp_path / "vit"))


def test_files_are_read_back_or_refused(tmp_path: Path) -> None:
    network = trained(task_of("bert-tiny"))
    (tmp_path / "side").write_bytes(pack(network))
    again = load_network(tmp_path / "side")
    assert (again.task, again.steps) == (network.task, 7)
    for name, value in network.values.items():
        np.testing.assert_array_equal(again.values[name], value)
    with pytest.raises(LayoutOptError, match="no side network at"):
        load_network(tmp_path / "none")
    (tmp_path / "cut").write_bytes(pack(network)[:100])
    with pytest.raises(LayoutOptError, match="damaged"):
        load_network(tmp_path / "cut")
    (tmp_path / "no head").write_bytes(pack(replace(network, values={})))
    with pytest.raises(LayoutOptError, match="has no classifier"):
        load_device_head(tmp_path / "no head")
