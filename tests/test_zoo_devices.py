"""The zoo's training steps on every OpenCL device: loss, gradients and updates beside torch, and dropout's masks.

By default each model runs by one plan per device, and by another one on the next device: nearly all of the time goes
into compiling. ``LAYOUTOPT_PARITY=full`` runs every model by every plan on every device, as ``benchmarks/parity.py``
does, which also writes a record.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kernels.execute import Executor  # noqa: E402
from kernels.reference import run  # noqa: E402
from kernels.runtime import DeviceInfo, Runtime, devices  # noqa: E402
from kernels.spec import DeviceLimits  # noqa: E402
from layoutopt.capture import capture  # noqa: E402
from layoutopt.graph import TrainingGraph  # noqa: E402
from layoutopt.optimizers import step_values  # noqa: E402
from layoutopt.passes import run_passes  # noqa: E402
from tests.zoo_cases import example, gradient_errors, values_of  # noqa: E402
from tests.zoo_parity import (  # noqa: E402
    CASES,
    MORE,
    PLANS,
    QUERY_OF,
    TOLERANCE,
    Case,
    case,
    measure,
    plan_of,
    rounding,
    torch_float32_error,
    zero_in_theory,
)

pytestmark = pytest.mark.peer

FULL = os.environ.get("LAYOUTOPT_PARITY") == "full"
USUAL = ("row-major", "r-tile", "mixed")
TURN = {"llama": 0, "qwen": 0, "gemma": 0, "bert": 1, "vit": 2, "unet": 1, "whisper": 0, "gpt2": 2, "opt": 2, "swin": 1}
"""Models that share kernels go by the same plan on a device."""


def usual_plan(label: str, device_index: int) -> str:
    """The plan by which a model runs on a device where not every plan is tried."""
    return USUAL[(TURN[label.partition("-")[0]] + device_index) % len(USUAL)]


def product() -> list[tuple[str, str, DeviceInfo]]:
    """Model, plan and device of each run."""
    if FULL:
        return [(label, which, device) for label in (*CASES, *MORE) for which in PLANS for device in devices()]
    return [(label, usual_plan(label, device.index), device) for label in CASES for device in devices()]


@lru_cache(maxsize=8)
def shared_runtime(index: int) -> Runtime:
    return Runtime(devices()[index])


def needs(label: str) -> None:
    """Skip where the library of a model is not installed."""
    if label.startswith("unet"):
        pytest.importorskip("diffusers")
    if label.endswith(":lora"):
        pytest.importorskip("peft")


@pytest.mark.parametrize(
    ("label", "which", "device"), product(), ids=[f"{label}-{which}-{d.index}" for label, which, d in product()]
)
def test_steps_agree_with_torch(label: str, which: str, device: DeviceInfo) -> None:
    needs(label)
    check_expected(case(label))
    measured = measure(shared_runtime(device.index), label, which)
    error, where = measured.worst()
    assert error <= TOLERANCE, where
    assert max(measured.gradients.values()) <= 10 * torch_float32_error(label), "float32 can do better: torch does"
    assert which == "solver" or bool(measured.relayouts) == (which != "row-major")


def check_expected(expected: Case) -> None:
    """What is compared with must not be next to nothing."""
    largest = max(float(np.linalg.norm(g)) for g in expected.gradients.values())
    zero = dict(zero_in_theory(expected))
    biased = {n for n in expected.gradients if n.endswith(tuple(f"{key}.bias" for key in QUERY_OF))}
    assert set(zero) == (set() if expected.label == "qwen-odd" else biased), "only rotated keys feel their bias"
    for name, gradient in expected.gradients.items():
        assert name in zero or np.linalg.norm(gradient) > 1e-6 * largest, f"{name}: a gradient of zero tests nothing"
    graph = expected.graph
    own = {t.of for t in graph.by_role("gradient") if t.name in graph.outputs}
    assert own == set(expected.gradients), "every parameter that torch gives a gradient has one here"
    for name, start in ((n, expected.start[n]) for n in expected.gradients if n not in zero):
        change = np.linalg.norm(expected.end[name] - start)
        assert change > 2 * rounding(expected, name), f"{name}: an update that rounding hides tests nothing"


def test_plans_differ() -> None:
    shares = []
    for which in USUAL:
        plan = plan_of("bert-tiny", DeviceLimits(), which)
        matrices = [docs[0] for docs in plan.layouts.values() if sum(n > 1 for n in docs[0].shape) > 1]
        shares.append(sum(len({m[0] for m in doc.modes}) < len(doc.modes) for doc in matrices) / len(matrices))
    assert shares[0] == 0
    assert shares[1] > 0.7
    assert 0.1 < shares[2] < shares[1]


# ---- dropout --------------------------------------------------------------------------------------------------------


class Dropping(NamedTuple):
    """A graph with dropout, what it starts from, and its inputs."""

    graph: TrainingGraph
    start: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]


class Mask(NamedTuple):
    """An op that multiplies one tensor by a mask: the number of its random stream, its phase, its tensors."""

    stream: int
    phase: str
    input: str
    output: str


@lru_cache(maxsize=2)
def dropping(name: str) -> Dropping:
    module, batch, loss = example(name, dropout=True)
    graph, _ = run_passes(capture(module, batch, loss=loss, dropout=True, keep_grads=True))
    values = values_of(graph, module, batch)
    inputs = {t.name: values.pop(t.name) for t in graph.by_role("input") if t.name in values}
    return Dropping(graph, values, inputs)


def visible_masks(graph: TrainingGraph) -> list[Mask]:
    """The ops that do nothing but multiply their first input by a mask."""
    found = []
    for op in graph.ops:
        expr = op.attrs.get("expr") if op.kind == "pointwise" else None
        streams = [i[2][1] for i in expr.code if i[0] == "rand"] if expr else []
        if len(streams) == 1 and len(op.outputs) == 1 and expr.code[-1][:2] == ("mul", ("x", 0)):
            uses = sum(argument == ("x", 0) for instruction in expr.code for argument in instruction[1:])
            if uses == 1:
                found.append(Mask(streams[0], op.phase, op.inputs[0].tensor, op.outputs[0].tensor))
    return found


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-odd"])
def test_dropout_steps_agree_with_the_interpreter(name: str, device_index: int) -> None:
    """The interpreter's backward pass is proven against finite differences under the same seed (test_dropout.py)."""
    graph, start, inputs = dropping(name)
    runtime = shared_runtime(device_index)
    plan = PLANS[usual_plan(name, device_index)](graph, runtime.limits, ())
    step = Executor(runtime, graph, plan, start, poison=True)
    gradients = {t.name: t.of for t in graph.by_role("gradient") if t.name in graph.outputs}
    seen = []
    for number in (1, 2):
        values = step_values(graph, number, seed=5)
        expected = run(graph, {**start, **inputs, **values})
        of = {p: expected[g] for g, p in gradients.items()}
        step.step({**inputs, **values})
        assert step.loss() == pytest.approx(float(expected["loss"]), rel=TOLERANCE)
        errors = gradient_errors({g: step.read(g) for g in gradients}, of)
        assert max(errors.values()) <= TOLERANCE, max(errors, key=errors.__getitem__)
        seen.append(of)
    step.close()
    other = gradient_errors({g: seen[0][p] for g, p in gradients.items()}, seen[1])
    assert max(other.values()) > 100 * TOLERANCE, "another mask would have been noticed"


def test_masks_are_the_same_forward_backward_and_on_every_device(device_index: int) -> None:
    """Read where a tensor and its masked copy can both be read: a zero where there was none was dropped."""
    graph, start, inputs = dropping("bert-tiny")
    masks = visible_masks(graph)
    keep = sorted({tensor for mask in masks for tensor in (mask.input, mask.output)})
    runtime = shared_runtime(device_index)
    plan = PLANS[usual_plan("bert-tiny", device_index)](graph, runtime.limits, keep)
    step = Executor(runtime, graph, plan, start, keep=keep, poison=True)
    rate = 0.1
    dropped, counted = dict.fromkeys(masks, 0), dict.fromkeys(masks, 0)
    for number in range(1, 13):
        values = step_values(graph, number)
        step.step({**inputs, **values})
        expected = run(graph, {**start, **inputs, **values})
        by_stream: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for mask in masks:
            before, after = step.read(mask.input).astype(np.float64), step.read(mask.output)
            there = before != 0
            kept = after != 0
            np.testing.assert_array_equal(kept[there], (expected[mask.output] != 0)[there], err_msg=str(mask))
            np.testing.assert_allclose(after[kept], before[kept] / (1 - rate), rtol=1e-6)
            dropped[mask] += int((there & ~kept).sum())
            counted[mask] += int(there.sum())
            by_stream.setdefault(mask.stream, []).append((there, kept))
        both = [pair for pair in by_stream.values() if len(pair) == 2]
        assert len(both) == 2, "the attention of both layers is seen in both passes"
        for (there, forward), (also, backward) in both:
            common = there & also
            assert common.sum() > 50
            np.testing.assert_array_equal(forward[common], backward[common])
    step.close()
    assert {m.phase for m in masks} == {"forward", "backward"}
    for mask in masks:
        bound = 5 * np.sqrt(rate * (1 - rate) / counted[mask])
        assert abs(dropped[mask] / counted[mask] - rate) < bound, mask


def test_the_expectation_under_dropout_is_the_value_without(device_index: int) -> None:
    """A linear function of dropout(x), over 64 seeds: unbiased, with the variance that the rate gives.

    ``y = sum of w_i * m_i * x_i / (1 - p)`` has the mean ``w·x`` and the variance ``p / (1-p) * sum of (w_i * x_i)²``.
    The standard scores of 400 rows are independent: none beyond 5 (probability 2e-4), their mean square within 5
    deviations of 1.
    """
    rate, rows, columns, seeds = 0.3, 400, 41, 64
    torch.manual_seed(3)
    linear = torch.nn.Linear(columns, 1, bias=False)
    module = torch.nn.Sequential(torch.nn.Dropout(rate), linear)
    x = torch.randn(rows, columns)
    graph, _ = run_passes(
        capture(module, (x,), loss=lambda m, b: ((y := m(*b)).square().mean(), y), dropout=True, keep_grads=True)
    )
    weight = linear.weight.detach().numpy()
    runtime = shared_runtime(device_index)
    plan = PLANS["mixed"](graph, runtime.limits, ())
    step = Executor(runtime, graph, plan, {"1.weight": weight}, poison=True)
    total = np.zeros(rows)
    for number in range(1, seeds + 1):
        step.step({"input_0": x.numpy(), **step_values(graph, number, seed=1)})
        total += step.read("output")[:, 0]
    step.close()
    terms = x.double().numpy() * weight.astype(np.float64)
    deviation = np.sqrt(rate / (1 - rate) * (terms**2).sum(1) / seeds)
    scores = (total / seeds - terms.sum(1)) / deviation
    assert np.abs(scores).max() < 5
    assert abs((scores**2).mean() - 1) < 5 * np.sqrt(2 / rows)
    assert abs(scores.mean()) < 5 / np.sqrt(rows)
