"""The backbone on a device: taps beside torch's hidden states, which tokens are kept, formats, memory, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from kernels.reference import run  # noqa: E402
from kernels.runtime import Runtime, devices  # noqa: E402
from layoutopt.checkpoint import save_safetensors  # noqa: E402
from layoutopt.errors import GraphError, LayoutOptError  # noqa: E402
from layoutopt.facade import capture_model, solve_plan  # noqa: E402
from layoutopt.models import uncalibrated  # noqa: E402
from layoutopt.quantize import Format, dequantise, quantise  # noqa: E402
from layoutopt.side.backbone import Backbone, Wanted, capture_wanted, sending  # noqa: E402
from layoutopt.side.graphs import facts_of, tap_tensor  # noqa: E402
from layoutopt.side.taps import chosen as pick_taps  # noqa: E402
from tests.tap_cases import (  # noqa: E402
    BATCH,
    MODELS,
    checkpoint,
    drawn,
    hidden_rows,
    inputs_of,
    module_of,
    planning,
    rows,
)

pytestmark = pytest.mark.peer

FLOATS = Format("float32")
TAPS = {
    "bert-tiny": ("bert.encoder.layer.0", "bert.encoder.layer.1"),
    "distilbert-odd": ("distilbert.transformer.layer.0", "distilbert.transformer.layer.1"),
    "gpt2-odd": ("transformer.h.0", "transformer.ln_f"),
    "llama-odd": ("model.layers.0", "model.norm"),
    "qwen-odd": ("model.layers.0", "model.norm"),
    "vit-odd": ("vit.layers.0", "vit.layernorm"),
}


def wanted(model: str, **more: object) -> Wanted:
    return replace(Wanted(model, batch=BATCH, seq=0, format=FLOATS), **more)  # type: ignore[arg-type]


# ---- what is captured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", TAPS)
@pytest.mark.parametrize("tokens", ["all", "pivot"])
def test_taps_are_torchs_hidden_states(model: str, tokens: str) -> None:
    graph = capture_wanted(wanted(model, tokens=tokens))
    facts = facts_of(graph)
    assert tuple(facts["taps"]) == TAPS[model]
    module, inputs = module_of(model), inputs_of(model)
    values = {name: p.detach().numpy() for name, p in module.named_parameters()}
    got = run(graph, values | inputs)
    expected = hidden_rows(module, inputs, tokens)
    real = np.ones(len(expected[0]), bool)
    if tokens == "all":
        expected = rows(expected)
        mask = inputs.get("attention_mask")
        real = np.ones(len(expected[0]), bool) if mask is None else mask.reshape(-1).astype(bool)
    for name, states in zip(TAPS[model], expected, strict=True):
        assert got[tap_tensor(name)].shape == (facts["rows"], facts["width"])
        np.testing.assert_allclose(got[tap_tensor(name)][real], states[real], rtol=3e-4, atol=3e-4)


def test_opts_final_result_is_that_before_its_projection() -> None:
    graph = capture_wanted(wanted("opt-odd"))
    assert tuple(facts_of(graph)["taps"]) == ("model.decoder.layers.0", "model.decoder.layers.1")
    assert facts_of(graph)["width"] == 60


@pytest.mark.parametrize("model", ["gpt2", "opt-125m", "minilm", "vit-tiny"])
def test_full_models_are_captured_with_a_tap_per_block(model: str) -> None:
    graph = capture_wanted(wanted(model, batch=1, seq=8))
    facts = facts_of(graph)
    assert len(facts["taps"]) == {"minilm": 6}.get(model, 12)
    assert facts["width"] == {"minilm": 384, "vit-tiny": 192}.get(model, 768)
    assert {op.phase for op in graph.ops} == {"forward"}
    heads = ("classifier", "lm_head", "bert.pooler", "labels")
    assert not [t for t in graph.tensors if t.startswith(heads)]


def test_taps_may_be_chosen() -> None:
    chosen = capture_wanted(wanted("bert-tiny", taps=("bert.encoder.layer.1",)))
    assert chosen.outputs == ("tap:bert.encoder.layer.1",)
    assert capture_wanted(wanted("bert-tiny", taps=("late",))).outputs == chosen.outputs
    assert pick_taps(tuple("abcde"), ("late",), "five") == ("c", "d", "e")
    assert pick_taps(tuple("abcde"), (), "five") == tuple("abcde")


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("bert-tiny", {"taps": ("bert.encoder.layer.7",)}, r"no tap 'bert.encoder.layer.7': its taps are bert"),
        ("bert-tiny", {"taps": ("bert.encoder.layer.1", "bert.encoder.layer.0")}, "not in the order of bert-tiny"),
        ("bert-tiny", {"taps": ("bert.encoder.layer.1",) * 2}, "not in the order of bert-tiny"),
        ("bert-tiny", {"taps": ("bert.encoder.layer.0",)}, "has to be its final result, bert.encoder.layer.1"),
        ("gpt2-odd", {"taps": ("transformer.h.0", "transformer.h.1")}, "no tap 'transformer.h.1'"),
        ("bert-tiny", {"tokens": "some"}, "unknown tokens 'some'"),
        ("bert-tiny", {"seq": 41}, "beyond the model's 40 positions"),
        ("swin-odd", {}, "no blocks that layoutopt can tap"),
        ("no-model", {}, "unknown model 'no-model'"),
    ],
)
def test_bad_taps_are_refused_in_one_sentence(model: str, change: dict[str, object], words: str) -> None:
    with pytest.raises(GraphError, match=words) as caught:
        capture_wanted(wanted(model, **change))
    assert "\n" not in str(caught.value)


# ---- what runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_taps_on_a_device_equal_torch(model: str, device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])
    module, inputs = module_of(model), inputs_of(model)
    file = checkpoint(module, tmp_path / "w.safetensors")
    every = Backbone.open(wanted(model, tokens="all", checkpoint=file), runtime, planning(runtime))
    pivots = Backbone.open(wanted(model, checkpoint=file), runtime, planning(runtime))
    states, kept = hidden_rows(module, inputs), hidden_rows(module, inputs, "pivot")
    all_taps, pivot_taps = every.run(inputs), pivots.run(inputs)
    assert every.taps == pivots.taps == TAPS[model]
    mask = every.mask(inputs).reshape(-1).astype(bool)
    for tap, expected in zip(all_taps, rows(states), strict=True):
        np.testing.assert_allclose(every.numbers(tap)[mask], expected[mask], rtol=3e-4, atol=3e-4)
    for tap, whole, expected in zip(pivot_taps, all_taps, kept, strict=True):
        got = pivots.numbers(tap)
        np.testing.assert_allclose(got, expected, rtol=3e-4, atol=3e-4)
        np.testing.assert_allclose(got, every.features((whole,), inputs), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pivots.features(pivot_taps, inputs), kept[-1], rtol=3e-4, atol=3e-4)
    mean = every.features(all_taps, inputs, "mean")
    real = mask.reshape(BATCH, -1)[:, :, None]
    np.testing.assert_allclose(mean, (states[-1] * real).sum(1) / real.sum(1), rtol=3e-4, atol=3e-4)
    for one in (every, pivots):
        one.close()


@pytest.mark.parametrize("text", ["int8", "int8:16", "int4:16", "fp4:16"])
def test_taps_are_stored_as_numpy_would(text: str, device_index: int) -> None:
    runtime, fmt = Runtime(devices()[device_index]), Format.parse(text)
    inputs = inputs_of("bert-tiny")
    floats = Backbone.open(wanted("bert-tiny"), runtime, planning(runtime))
    stored = Backbone.open(wanted("bert-tiny", format=fmt), runtime, planning(runtime))
    for whole, tap in zip(floats.run(inputs), stored.run(inputs), strict=True):
        x = floats.numbers(whole)
        words, scales = quantise(x, fmt)
        assert tap[0].shape == words.shape
        np.testing.assert_allclose(tap[1], scales, rtol=1e-5)
        # Where a number lies between two codes, a last bit decides.
        step = np.repeat(scales, fmt.group or x.shape[1], axis=1)[:, : x.shape[1]] * (2 if fmt.kind == "fp4" else 1)
        off = np.abs(stored.numbers(tap) - dequantise(words, scales, x.shape[1], fmt))
        assert (off <= step * 1.001).all()
        assert (off <= step * 1e-2).mean() > 0.9  # the same code; a GPU's quotients may be a last bit off
    floats.close()
    stored.close()


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_weights_may_lie_in_few_bits(storage: str, device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])
    inputs = inputs_of("gpt2-odd")
    file = checkpoint(module_of("gpt2-odd"), tmp_path / "w.safetensors")
    whole = Backbone.open(wanted("gpt2-odd", checkpoint=file), runtime, planning(runtime))
    small = Backbone.open(wanted("gpt2-odd", checkpoint=file, storage=storage), runtime, planning(runtime))
    assert whole.graph.hash == small.graph.hash
    assert small.footprint().weights_bytes < 0.5 * whole.footprint().weights_bytes
    slack = {"int8": 0.05, "nf4": 0.4}[storage]
    for a, b in zip(whole.run(inputs), small.run(inputs), strict=True):
        x, y = whole.numbers(a), small.numbers(b)
        assert 0 < np.linalg.norm(x - y) < slack * np.linalg.norm(x)
    whole.close()
    small.close()


def test_fewer_samples_than_a_batch_are_run_as_they_are(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    inputs = inputs_of("vit-odd")
    backbone = Backbone.open(wanted("vit-odd", tokens="all"), runtime, planning(runtime))
    whole = backbone.run(inputs)
    some = backbone.run({name: x[:2] for name, x in inputs.items()})
    for a, b in zip(whole, some, strict=True):
        assert len(b[0]) == 2 * backbone.rows_per_sample
        np.testing.assert_array_equal(a[0][: len(b[0])], b[0])
    backbone.close()


def test_weights_are_drawn_where_there_is_no_checkpoint(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    inputs, module = inputs_of("gpt2-odd"), module_of("gpt2-odd")
    backbone = Backbone.open(wanted("gpt2-odd", seed=5), runtime, planning(runtime))
    drawn(backbone.graph, module, 5)
    for tap, expected in zip(backbone.run(inputs), hidden_rows(module, inputs, "pivot"), strict=True):
        np.testing.assert_allclose(backbone.numbers(tap), expected, rtol=3e-4, atol=3e-4)
    backbone.close()


def test_the_last_real_token_of_any_mask_is_kept() -> None:
    graph = capture_wanted(wanted("gpt2-odd"))
    every = capture_wanted(wanted("gpt2-odd", tokens="all"))
    module, inputs = module_of("gpt2-odd"), inputs_of("gpt2-odd")
    mask = np.zeros_like(inputs["attention_mask"])
    mask[0, 2:9] = 1  # padded on both sides
    mask[1, 0] = 1
    values = {name: p.detach().numpy() for name, p in module.named_parameters()} | inputs | {"attention_mask": mask}
    kept, whole = run(graph, values), run(every, values)
    for name in TAPS["gpt2-odd"]:
        tokens = whole[tap_tensor(name)].reshape(BATCH, -1, 60)
        # A sample that is hidden whole has its first token: no index leaves the table.
        expected = np.stack([tokens[0, 8], tokens[1, 0], tokens[2, 0]])
        np.testing.assert_allclose(kept[tap_tensor(name)], expected, rtol=1e-5, atol=1e-6)


def test_a_backbone_needs_less_memory_than_a_training_step(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    backbone = Backbone.open(wanted("bert-tiny", format=Format("int8", 16)), runtime, planning(runtime))
    step, _ = capture_model("bert-tiny", batch=BATCH, optimizer="adamw")
    training = solve_plan(step, uncalibrated(runtime), strategy="rowmajor")
    used = backbone.footprint()
    assert used.weights_bytes < used.arena_bytes <= used.peak_bytes
    # AdamW alone has two numbers a weight beside it.
    assert used.arena_bytes * 3 < training.arena_bytes
    step_weights = sum(t.size_elems * t.item_bytes for t in step.by_role("parameter", "state"))
    assert used.activations_bytes * 3 < training.arena_bytes - step_weights
    backbone.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", ["pivot", "all"])
def test_activations_die_early_however_many_taps_there_are(model: str, tokens: str) -> None:
    from layoutopt.rewrite_updates import peak_bytes

    def alive(one: Wanted) -> int:
        """Bytes at the fullest op, without parameters and what is given away."""
        graph = sending(capture_wanted(one), one.format)
        held = [t for t in graph.tensors.values() if t.role == "parameter" or t.name in graph.outputs]
        return peak_bytes(graph) - sum(t.size_elems * t.item_bytes for t in held)

    every = Wanted(model, batch=4, seq=16, format=Format("int8"), tokens=tokens)
    last = replace(every, taps=facts_of(capture_wanted(every))["taps"][-1:])
    assert alive(every) <= alive(last)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_weights_are_refused_in_one_sentence(device_index: int, tmp_path: Path) -> None:
    runtime = Runtime(devices()[device_index])

    def refused(words: str, **more: object) -> None:
        with pytest.raises(LayoutOptError, match=words) as caught:
            Backbone.open(wanted("bert-tiny", **more), runtime, planning(runtime))
        assert "\n" not in str(caught.value)

    refused("no weights at", checkpoint=tmp_path / "none.safetensors")
    refused("no weights at", checkpoint=tmp_path)
    (tmp_path / "text.safetensors").write_text("no tensors")
    refused("not a safetensors file", checkpoint=tmp_path / "text.safetensors")
    values = {name: p.detach().numpy() for name, p in module_of("bert-tiny").named_parameters()}

    def saved(name: str, **changes: np.ndarray | None) -> Path:
        changed = {k: v for k, v in (values | changes).items() if v is not None}
        save_safetensors(tmp_path / name, changed)
        return tmp_path / name

    key = "bert.encoder.layer.0.output.dense.weight"
    bad = values[key].copy()
    bad[3, 4] = np.nan
    refused(rf"{key} holds 1 NaN", checkpoint=saved("nan", **{key: bad}))
    refused(rf"{key} has shape \(3, 3\)", checkpoint=saved("shape", **{key: np.zeros((3, 3), np.float32)}))
    refused(rf"lacks {key}", checkpoint=saved("less", **{key: None}))
    more = {"bert.encoder.layer.2.output.dense.weight": values[key]}
    refused("holds bert.encoder.layer.2.output.dense.weight .* another model", checkpoint=saved("more", **more))
    refused("lacks bert", checkpoint=checkpoint(module_of("gpt2-odd"), tmp_path / "gpt2"))


def test_bad_samples_are_refused_in_one_sentence(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    backbone = Backbone.open(wanted("bert-tiny"), runtime, planning(runtime))
    good = inputs_of("bert-tiny")
    cases = [
        ({**good, "input_ids": good["input_ids"] + 1000}, "rows of"),
        ({k: v for k, v in good.items() if k != "input_ids"}, "'input_ids'"),
        ({**good, "input_ids": good["input_ids"][:2]}, "one number of samples"),
        ({k: np.concatenate([v, v]) for k, v in good.items()}, "planned for 3 samples was given 6"),
        ({k: v[:0] for k, v in good.items()}, "was given 0"),
        ({**good, "more": good["input_ids"]}, "no input 'more'"),
        ({k: v[:, :-1] for k, v in good.items()}, "shape"),
        ({}, "got nothing"),
    ]
    for inputs, words in cases:
        with pytest.raises(GraphError, match=words) as caught:
            backbone.run(inputs)
        assert "\n" not in str(caught.value)
    with pytest.raises(LayoutOptError, match=r"come without tokenizer\.json"):
        backbone.encode(["text"])
    backbone.close()


@pytest.mark.parametrize("text", ["float32", "int8"])
def test_numbers_that_are_not_finite_are_seen(text: str, device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    backbone = Backbone.open(wanted("vit-odd", format=Format.parse(text)), runtime, planning(runtime))
    inputs = inputs_of("vit-odd")
    inputs["pixel_values"][1, 0, 3, 3] = np.inf
    with pytest.raises(GraphError, match=r"tap vit\.layers\.0 of vit-odd holds NaN or infinity"):
        backbone.run(inputs)
    backbone.close()


# ---- the head that came with the weights ----------------------------------------------------------------------------


def test_a_checkpoints_head_is_found_under_either_name(tmp_path: Path) -> None:
    from layoutopt.side.pretrained import load_pretrained

    graph = capture_wanted(wanted("bert-tiny"))
    module = module_of("bert-tiny")
    whole = {name: p.detach().numpy() for name, p in module.named_parameters()}
    bare = {n.removeprefix("bert."): x for n, x in whole.items() if n.startswith("bert.")}
    found = {}
    for name, values in (("whole", whole), ("bare", bare)):
        save_safetensors(tmp_path / name, values)
        found[name] = load_pretrained(graph, facts_of(graph), tmp_path / name, 0)
    assert set(found["whole"].head) == {"pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"}
    assert set(found["bare"].head) == {"pooler.weight", "pooler.bias"}
    for name, x in found["bare"].values.items():
        np.testing.assert_array_equal(x, found["whole"].values[name])
    np.testing.assert_array_equal(found["whole"].head["pooler.weight"], whole["bert.pooler.dense.weight"])
