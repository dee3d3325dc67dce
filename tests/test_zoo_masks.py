"""Attention masks by value: which key each query of each layer sees, not only that the rows add up."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from layoutopt.capture import capture  # noqa: E402
from layoutopt.passes import run_passes  # noqa: E402
from tests.zoo_cases import example, values_of  # noqa: E402

pytestmark = pytest.mark.peer

SEQ = 13
QUERY, KEY = np.arange(SEQ)[:, None], np.arange(SEQ)
CAUSAL, NEAR, ALL = KEY <= QUERY, (KEY <= QUERY) & (QUERY - KEY < 5), np.ones((SEQ, SEQ), bool)
EXPECTED = {
    "llama-odd": [CAUSAL, CAUSAL],
    "qwen-odd": [CAUSAL, CAUSAL],
    "gemma-odd": [NEAR, CAUSAL],
    "gpt2-odd": [CAUSAL, CAUSAL],
    "opt-odd": [CAUSAL, CAUSAL],
    "bert-tiny": [ALL, ALL],
    "distilbert-odd": [ALL, ALL],
}


@pytest.mark.parametrize("passes", [False, True], ids=["captured", "after passes"])
@pytest.mark.parametrize("name", EXPECTED)
def test_which_keys_are_seen(name: str, passes: bool) -> None:
    module, batch, loss = example(name)
    graph = capture(module, batch, loss=loss)
    if passes:
        graph, _ = run_passes(graph)
    got = run(graph, values_of(graph, module, batch))
    layers = [op for op in graph.ops if op.kind == "softmax" and op.phase != "backward"]
    assert len(layers) == len(EXPECTED[name])
    padded = batch["attention_mask"].numpy().astype(bool)
    for op, allowed in zip(layers, EXPECTED[name], strict=True):
        (out,) = op.outputs
        seen = out.view.array(got[out.tensor]).reshape(len(padded), -1, SEQ, SEQ)
        expected = np.broadcast_to(allowed & padded[:, None, None, :], seen.shape)
        some = expected.any(-1)  # a query that sees nothing (padding in a window) attends evenly, as in torch
        np.testing.assert_array_equal((seen > 1e-30)[some], expected[some], err_msg=op.name)
        np.testing.assert_allclose(seen.sum(-1), 1, rtol=1e-12)


@pytest.mark.parametrize("passes", [False, True], ids=["captured", "after passes"])
def test_whisper_hears_all_and_reads_what_came_before(passes: bool) -> None:
    module, batch, loss = example("whisper-odd")
    graph = capture(module, batch, loss=loss)
    if passes:
        graph, _ = run_passes(graph)
    got = run(graph, values_of(graph, module, batch))
    softmaxes = [op for op in graph.ops if op.kind == "softmax" and op.phase != "backward"]
    assert len(softmaxes) == 2 + 2 * 2
    for op in softmaxes:
        rows = op.outputs[0].view.array(got[op.outputs[0].tensor])
        k = rows.shape[1]
        allowed = CAUSAL if k == SEQ else np.ones((1, k), bool)
        seen = rows.reshape(-1, *((SEQ, SEQ) if k == SEQ else (1, k)))
        np.testing.assert_array_equal(seen > 1e-30, np.broadcast_to(allowed, seen.shape), err_msg=op.name)


def test_large_masks_are_calculated_not_stored() -> None:
    long, _ = run_passes(_long_llama(384))
    assert max(np.asarray(v).size for v in long.constants.values()) <= 4096
    # The causal comparison is there, over the two counts.
    compares = [
        op for op in long.ops if op.kind == "pointwise" and any(i[0] in ("le", "ge") for i in op.attrs["expr"].code)
    ]
    assert any(long.operand_shape(op.outputs[0])[-2:] == (384, 384) for op in compares)


def _long_llama(seq: int):
    import transformers as hf

    from layoutopt import zoo

    with zoo.without_weights():
        config = hf.LlamaConfig(
            hidden_size=60, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=97,
            vocab_size=103, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        module = hf.LlamaForCausalLM(config)
    ids = torch.zeros(1, seq, dtype=torch.int64)
    return capture(module, {"input_ids": ids, "attention_mask": ids + 1, "labels": ids})
