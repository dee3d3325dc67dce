"""Half of the memory, run for real on every device: torch's losses and gradients, and hardly a byte beyond the plan."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

import torch

from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import planner
from layoutopt.capture import capture
from layoutopt.checkpoint import initial_values
from layoutopt.graph import Tensor, TrainingGraph
from layoutopt.optimizers import Sgd, step_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from tests.fake_costs import FakeCosts
from tests.small_models import bert

BATCH, SEQ, STEPS, LR = 24, 40, 2, 0.1
pytestmark = pytest.mark.peer


@lru_cache(maxsize=1)
def model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Four layers over many tokens: activations are most of what a step holds."""
    torch.manual_seed(0)
    module = bert(num_hidden_layers=4).train()
    ids = torch.randint(1, 101, (BATCH, SEQ))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    return module, {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(BATCH) % 3}


@lru_cache(maxsize=1)
def graph() -> TrainingGraph:
    module, batch = model()
    captured = capture(module, batch, optimizer=Sgd(lr=LR, momentum=0.0), keep_grads=True, name="bert")
    return run_passes(captured)[0]


@lru_cache(maxsize=4)
def planned(share: float, index: int) -> Plan:
    costs = FakeCosts(limits=devices()[index].limits)
    if share == 1:
        return planner.plan(graph(), costs, "greedy")
    return planner.plan(graph(), costs, "greedy", int(planned(1, index).arena_bytes * share))


def kept_gradients() -> list[Tensor]:
    return [t for t in graph().by_role("gradient") if t.name in graph().outputs]


def ran(index: int, plan: Plan) -> tuple[list[float], dict[str, np.ndarray], int, int]:
    """Losses, first gradients, bytes of the executor's buffers before and after its steps."""
    module, batch = model()
    runtime = Runtime(devices()[index])
    names = {t.name for t in graph().by_role("parameter")}
    start = {k: v.detach().numpy() for k, v in module.named_parameters() if k in names}
    run = Executor(runtime, graph(), plan, initial_values(graph(), 0) | start, poison=True)
    made = run.memory_bytes
    inputs = {t.name: batch[t.name].numpy().astype(t.dtype) for t in graph().by_role("input") if t.name in batch}
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        run.step({**inputs, **step_values(graph(), step + 1)})
        losses.append(run.loss())
        gradients = gradients or {
            t.of: run.read(t.name) for t in graph().by_role("gradient") if t.name in graph().outputs
        }
    after = runtime.allocated_bytes
    run.close()
    return losses, gradients, made, after


def test_half_the_memory_gives_torchs_gradients(device_index: int) -> None:
    whole, half = planned(1, device_index), planned(0.5, device_index)
    assert half.arena_bytes <= whole.arena_bytes / 2
    assert any(name.startswith("anew:") for name in half.rewrites)
    losses, gradients, made, after = ran(device_index, half)
    # The runtime's own count, and steps add nothing to it.
    assert after == made
    assert half.arena_bytes <= made <= 1.02 * half.arena_bytes
    unconstrained = ran(device_index, whole)
    np.testing.assert_allclose(losses, unconstrained[0], rtol=1e-5)
    module, batch = model()
    module.zero_grad()
    reference = deepcopy(module).double()
    loss = reference(**batch).loss
    loss.backward()
    assert losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    compared = 0
    for name, parameter in reference.named_parameters():
        if name not in gradients or parameter.grad is None or name.endswith("key.bias"):
            continue
        expected = parameter.grad.numpy()
        tolerance = 1e-6 + 1e-4 * float(abs(expected).max())
        np.testing.assert_allclose(gradients[name], unconstrained[1][name], rtol=1e-3, atol=tolerance)
        error = np.linalg.norm(gradients[name] - expected) / np.linalg.norm(expected)
        assert error < 2e-4, name
        compared += 1
    assert compared > 30
