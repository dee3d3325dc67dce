"""Steps whose attention is one op, on every device: beside torch, with dropout, with the kernels for GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from costmodel.device import load as load_model
from costmodel.model import CostModel
from kernels.execute import Executor
from kernels.reference import run
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits
from layoutopt import planner
from layoutopt.capture import capture
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.optimizers import hyper_values, step_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import rewritten
from tests.plans import naive_plan, row_major
from tests.test_parity import MODELS, OPTIMIZER, TOLERANCE, case, error, is_zero_in_theory
from tests.zoo_cases import example, gradient_errors, values_of
from tests.zoo_parity import TOLERANCE as ZOO_TOLERANCE
from tests.zoo_parity import measure

pytestmark = pytest.mark.peer

ATTENTION = ["attention"]
GPU = DeviceLimits(kind="gpu", simd_width=32)
ZOO = ("gemma-odd", "llama-odd", "whisper-odd", "gpt2-odd")
"""Soft-capping and windows; grouped heads; attention across; queries, keys and values in one tensor."""


@lru_cache(maxsize=4)
def shared_runtime(index: int) -> Runtime:
    return Runtime(devices()[index])


def costs(limits: DeviceLimits) -> CostModel:
    return CostModel(replace(load_model("generic-cpu"), limits=limits))


def check_beside_torch(model: str, plan: Plan, runtime: Runtime, limits: DeviceLimits) -> None:
    """Loss, every gradient, and the loss after an update."""
    expected = case(model)
    of = {t.of: t.name for t in expected.graph.by_role("gradient", "output") if t.of in expected.gradients}
    executor = Executor(runtime, expected.graph, plan, expected.start, limits=limits, poison=True)
    executor.step(expected.batches[0] | hyper_values(OPTIMIZER, 1))
    assert executor.loss() == pytest.approx(expected.losses[0], rel=TOLERANCE)
    for name, gradient in expected.gradients.items():
        if not is_zero_in_theory(name):
            assert error(executor.read(of[name]), gradient) <= TOLERANCE, name
    executor.step(expected.batches[1] | hyper_values(OPTIMIZER, 2))
    assert executor.loss() == pytest.approx(expected.losses[1], rel=TOLERANCE)
    executor.close()


@pytest.mark.parametrize("model", MODELS)
def test_solved_plans_agree_with_torch(model: str, device_index: int) -> None:
    runtime = shared_runtime(device_index)
    plan = planner.plan(case(model).graph, costs(runtime.limits), rewrites=ATTENTION)
    assert plan.rewrites == ("attention",)
    assert sum("attention" in op.variant for op in plan.ops) == 4
    check_beside_torch(model, plan, runtime, runtime.limits)


def test_the_kernels_for_gpus_agree_with_torch(device_index: int) -> None:
    runtime, model = shared_runtime(device_index), "bert"
    fused = rewritten(case(model).graph, ATTENTION)
    plan = naive_plan(fused, GPU, row_major, reuse=True)
    assert sum(op.variant.startswith("attention.tile") for op in plan.ops) == 4
    check_beside_torch(model, plan, runtime, GPU)


@pytest.mark.parametrize("label", ZOO)
def test_zoo(label: str, device_index: int) -> None:
    """By a plan of mixed layouts and random kernels, after every rewrite; each model on one device."""
    if ZOO.index(label) % len(devices()) != device_index:
        pytest.skip("on another device")
    worst, where = measure(shared_runtime(device_index), label, "rewritten").worst()
    assert worst <= ZOO_TOLERANCE, where


def test_dropout_is_the_same_forward_and_backward(device_index: int) -> None:
    module, batch, loss = example("bert-tiny", dropout=True)
    graph, _ = run_passes(capture(module, batch, loss=loss, dropout=True, keep_grads=True))
    fused = rewritten(graph, ATTENTION)
    assert sum("drop" in op.attrs for op in fused.ops) == 4
    runtime = shared_runtime(device_index)
    plan = naive_plan(fused, runtime.limits, row_major, reuse=True)
    values = values_of(graph, module, batch)
    inputs = {t.name: values.pop(t.name) for t in graph.by_role("input") if t.name in values}
    executor = Executor(runtime, graph, plan, values, poison=True)
    losses = set()
    for seed in (3, 4):
        given = {**inputs, **step_values(graph, 1), "seed": np.array(seed, np.int32)}
        executor.step(given)
        expected = run(graph, values | given)
        assert executor.loss() == pytest.approx(float(expected[graph.outputs[0]]), rel=TOLERANCE)
        losses.add(round(executor.loss(), 6))
        names = {t.of: t.name for t in graph.by_role("gradient") if t.of and t.name in graph.outputs}
        got = {f"grad:{of}": executor.read(name) for of, name in names.items()}
        errors = gradient_errors(got, {of: expected[name] for of, name in names.items() if not is_zero_in_theory(of)})
        assert max(errors.values()) <= TOLERANCE, max(errors, key=lambda of: errors[of])
    assert len(losses) == 2, "another seed drops others"
    executor.close()


def arena_bytes(graph: TrainingGraph, rewrites: list[str]) -> int:
    return planner.plan(graph, costs(DeviceLimits()), "rowmajor", rewrites=rewrites).arena_bytes


def test_memory_falls() -> None:
    """The probabilities of all layers are not kept: [192, 64, 64] floats six times in this graph."""
    graph = shipped("minilm")
    saved = arena_bytes(graph, []) - arena_bytes(graph, ATTENTION)
    assert saved > 0.9 * 6 * 192 * 64 * 64 * 4
