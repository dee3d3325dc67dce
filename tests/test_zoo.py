"""The models of the zoo at odd sizes: loss and every gradient against torch in float64, before and after the passes."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import run
from layoutopt.passes import run_passes

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from layoutopt import zoo  # noqa: E402
from layoutopt.capture import capture  # noqa: E402
from tests.zoo_cases import example, gradient_errors, values_of, wide_step  # noqa: E402

pytestmark = pytest.mark.peer

ODD = sorted(n for n in zoo.MODELS if n.endswith("-odd") or n == "bert-tiny")
MODES = [
    *(("llama-odd", m) for m in ("lora", "head")),
    *(("bert-tiny", m) for m in ("lora", "head", "bias")),
    *((n, "lora") for n in ("gpt2-odd", "unet-odd", "swin-odd", "whisper-odd")),
    *((n, "bias") for n in ("opt-odd", "vit-odd")),
]


def check(name: str, mode: str) -> None:
    if name.startswith("unet"):
        pytest.importorskip("diffusers")
    if mode == "lora":
        pytest.importorskip("peft")
    module, batch, loss = example(name, mode=mode)
    graph = capture(module, batch, loss=loss, keep_grads=True)
    values = values_of(graph, module, batch)
    got = run(graph, values)
    expected_loss, expected = wide_step(module, batch, loss)
    assert got["loss"] == pytest.approx(expected_loss, rel=1e-7)
    assert {t.of for t in graph.by_role("gradient") if t.name in graph.outputs} == set(expected)
    assert max(gradient_errors(got, expected).values()) < 1e-6
    passed, _ = run_passes(graph)
    again = run(passed, values)
    scale = max(float(np.abs(got[o]).max()) for o in graph.outputs)
    for output in graph.outputs:
        np.testing.assert_allclose(again[output], got[output], rtol=1e-12, atol=1e-15 * scale, err_msg=output)
    assert not any(op.kind == "view" for op in passed.ops)
    assert max((np.asarray(v).size for v in passed.constants.values()), default=0) <= 4096


@pytest.mark.parametrize("name", ODD)
def test_model_equals_torch(name: str) -> None:
    check(name, "full")


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_what_is_trained_equals_torch(name: str, mode: str) -> None:
    check(name, mode)
