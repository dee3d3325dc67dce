"""A training step on the device against torch in float32: loss, every gradient, and five AdamW steps.

Sizes are multiples of no tile. Weights are spread well beyond their usual start, so that no gradient is small by
accident.

The gradient of an attention's key bias is zero in exact arithmetic (it adds the same number to every score of a query,
which softmax takes out again), so that any computed value is rounding. A relative error of these tensors means nothing:
their gradient must be small beside that of the query bias of the same layer, and AdamW, which divides a gradient by its
own size, may move each of their elements by up to the learning rate per step in either direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

import torch

from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits
from layoutopt.capture import capture
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import AdamW, hyper_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import rewritten
from tests import small_models
from tests.plans import any_of, first, mixed, naive_plan, r_tile, row_major, solver_plan

pytestmark = pytest.mark.peer

BATCH, SEQUENCE, STEPS = 3, 13, 5
OPTIMIZER = AdamW(lr=1e-3)
TOLERANCE = 1e-4
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model's captured step, its batches, and what torch made of them."""

    graph: TrainingGraph
    batches: list[dict[str, np.ndarray]]
    start: dict[str, np.ndarray]
    losses: list[float]
    gradients: dict[str, np.ndarray]
    end: dict[str, np.ndarray]


def text_batch(generator: torch.Generator) -> Batch:
    lengths = torch.tensor([SEQUENCE, 7, 10])
    return {
        "input_ids": torch.randint(0, 97, (BATCH, SEQUENCE), generator=generator),
        "attention_mask": (torch.arange(SEQUENCE) < lengths[:, None]).long(),
        "labels": torch.randint(0, 3, (BATCH,), generator=generator),
    }


def image_batch(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn((BATCH, 1, 12, 12), generator=generator),
        "labels": torch.randint(0, 5, (BATCH,), generator=generator),
    }


def bert() -> torch.nn.Module:
    return small_models.bert(vocab_size=97, max_position_embeddings=32)


def vit() -> torch.nn.Module:
    return small_models.vit(image_size=12, patch_size=3, num_labels=5)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.Generator], Batch]]] = {
    "bert": (bert, text_batch),
    "vit": (vit, image_batch),
}


@lru_cache(maxsize=2)
def case(name: str) -> Case:
    """Capture, and train with torch."""
    make_model, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = make_model().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    batches = [make_batch(generator) for _ in range(STEPS)]
    graph, _ = run_passes(capture(model, batches[0], optimizer=OPTIMIZER, keep_grads=True))
    start = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    o = OPTIMIZER
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )
    losses, gradients = [], {}
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    end = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return Case(graph, [{k: v.numpy() for k, v in b.items()} for b in batches], start, losses, gradients, end)


@lru_cache(maxsize=4)
def solved(model: str, limits: DeviceLimits) -> Plan:
    return solver_plan(case(model).graph, limits)


def plans(model: str, limits: DeviceLimits, which: str) -> Plan:
    """One of the plans to test; gradients and everything else share memory where lives do not meet."""
    graph = case(model).graph
    if which.endswith(", epilogues"):
        graph, which = rewritten(graph, ["epilogue"]), which.removesuffix(", epilogues")
    if which == "solver":
        return solved(model, limits)
    if which == "row-major":
        return naive_plan(graph, limits, row_major, reuse=True)
    if which == "r-tile":
        return naive_plan(graph, limits, r_tile, reuse=True)
    seed = int(which.removeprefix("mixed "))
    return naive_plan(graph, limits, mixed(seed), any_of(seed) if seed > 1 else first, relayouts_share=0.2, reuse=True)


def is_zero_in_theory(parameter: str) -> bool:
    return parameter.endswith("key.bias") or parameter.endswith("k_proj.bias")


def error(a: np.ndarray, b: np.ndarray) -> float:
    """‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(np.linalg.norm(b), 1e-30))


def tiled_share(plan: Plan) -> float:
    """Which part of the matrices has a primary layout in tiles."""
    matrices = [docs[0] for docs in plan.layouts.values() if sum(n > 1 for n in docs[0].shape) > 1]
    return sum(len({mode[0] for mode in doc.modes}) < len(doc.modes) for doc in matrices) / len(matrices)


def test_plans_are_what_they_are_called() -> None:
    for model in MODELS:
        assert tiled_share(plans(model, DeviceLimits(), "row-major")) == 0
        assert tiled_share(plans(model, DeviceLimits(), "r-tile")) > 0.8
        for which in ("mixed 1", "mixed 2"):
            assert 0.2 < tiled_share(plans(model, DeviceLimits(), which)) < 0.8
            assert plans(model, DeviceLimits(), which).relayouts


@lru_cache(maxsize=4)
def shared_runtime(device_index: int) -> Runtime:
    return Runtime(devices()[device_index])


@pytest.mark.parametrize("which", ["row-major", "r-tile", "mixed 1", "mixed 2", "solver", "mixed 3, epilogues"])
@pytest.mark.parametrize("model", MODELS)
def test_training_agrees_with_torch(model: str, which: str, device_index: int) -> None:
    expected = case(model)
    graph, runtime = expected.graph, shared_runtime(device_index)
    of = {t.of: t.name for t in graph.by_role("gradient", "output") if t.of in expected.gradients}
    assert set(of) == set(expected.gradients), "every parameter's gradient is among the graph's outputs"
    run = Executor(runtime, graph, plans(model, runtime.limits, which), expected.start, poison=True)

    run.step(expected.batches[0] | hyper_values(OPTIMIZER, 1))
    assert run.loss() == pytest.approx(expected.losses[0], rel=TOLERANCE)
    got = {name: run.read(tensor) for name, tensor in of.items()}
    for name, gradient in expected.gradients.items():
        if is_zero_in_theory(name):
            beside = np.linalg.norm(expected.gradients[name.replace("key", "query").replace("k_proj", "q_proj")])
            assert np.linalg.norm(got[name]) <= TOLERANCE * beside, name
        else:
            assert np.linalg.norm(gradient) > 1e-6, f"{name}: a gradient of zero tests nothing"
            assert error(got[name], gradient) <= TOLERANCE, name

    for step in range(1, STEPS):
        run.step(expected.batches[step] | hyper_values(OPTIMIZER, step + 1))
        assert run.loss() == pytest.approx(expected.losses[step], rel=TOLERANCE)
    for name, end in expected.end.items():
        now = run.read(name)
        if is_zero_in_theory(name):
            assert np.abs(now - end).max() <= 2.01 * STEPS * OPTIMIZER.lr, name
        else:
            assert error(now, end) <= TOLERANCE, name
