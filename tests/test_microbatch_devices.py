"""Micro-batches on every device: losses and weights of the whole batch, as torch's, in the memory that plans say."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kernels.execute import Executor
from kernels.reference import run
from kernels.runtime import Runtime, devices
from layoutopt import planner
from layoutopt.checkpoint import initial_values
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import in_micro_batches
from layoutopt.models import shipped
from layoutopt.optimizers import step_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import REWRITES, rewritten
from tests.fake_costs import FakeCosts
from tests.plans import any_of, mixed, naive_plan

TOLERANCE = 2e-4
"""Of ‖got − expected‖ / ‖expected‖, parameter by parameter."""
STEPS = 2
WITHOUT_HALF = [name for name in REWRITES if name != "half"]


@lru_cache(maxsize=4)
def shared_runtime(index: int) -> Runtime:
    return Runtime(devices()[index])


@lru_cache(maxsize=3)
def case(name: str) -> tuple[TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray], Any]:
    """A step of six samples, where it starts from, the samples, and what torch makes of them."""
    from layoutopt.capture import capture
    from layoutopt.optimizers import Sgd
    from tests.zoo_cases import example, random_batch, values_of, wide_steps

    module, batch, loss = example(name)
    six = random_batch({key: t.repeat(2, *(1 for _ in t.shape[1:])) for key, t in batch.items()}, module)
    if "attention_mask" in six:
        six["attention_mask"][:, 0] = 1
    graph = run_passes(capture(module, six, loss=loss, optimizer=Sgd(lr=0.1, momentum=0.9)))[0]
    start = values_of(graph, module, six)
    inputs = {t.name: start.pop(t.name) for t in graph.by_role("input") if t.name in start}
    start = {n: v for n, v in start.items() if n in graph.tensors}
    return graph, start, inputs, wide_steps(module, six, loss, STEPS, 0.1, 0.9)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["mixed", "rewritten", "planned"])
@pytest.mark.parametrize("name", ["bert-tiny", "vit-odd", "gpt2-odd"])
def test_beside_torch(name: str, kind: str, device_index: int) -> None:
    """Each model by one kind of plan on one device, by another on the other."""
    models, kinds = ["bert-tiny", "vit-odd", "gpt2-odd"], ["mixed", "rewritten", "planned"]
    if (models.index(name) + device_index) % len(kinds) != kinds.index(kind):
        pytest.skip("by another plan on this device")
    graph, start, inputs, (losses, _, end) = case(name)
    runtime = shared_runtime(device_index)
    if kind == "planned":
        made = planner.plan(graph, FakeCosts(limits=runtime.limits), "greedy", micro_batches=3)
    else:
        cut = in_micro_batches(graph, 3)
        graph = rewritten(cut, WITHOUT_HALF) if kind == "rewritten" else cut
        layouts, kernels = mixed(3, kinds=1), any_of(3)
        made = naive_plan(graph, runtime.limits, layouts, kernels, relayouts_share=0.2, reuse=True)
    executor = Executor(runtime, graph, made, start, poison=True)
    for step in range(STEPS):
        executor.step({**inputs, **step_values(graph, step + 1, 0.1)})
        assert executor.loss() == pytest.approx(losses[step], rel=TOLERANCE)
    trained = executor.values()
    moved = {n: (trained[n] - start[n], end[n] - start[n]) for n in end}
    floor = 1e-3 * max(float(np.linalg.norm(expected)) for _, expected in moved.values())
    for parameter, (got, expected) in moved.items():
        off = np.linalg.norm(got - expected) / max(float(np.linalg.norm(expected)), floor)
        assert off <= 10 * TOLERANCE, parameter  # the change of two steps, rounded where the weight is stored
    executor.close()


def test_evaluation_reads_all_samples(device_index: int) -> None:
    """A forward pass alone runs every micro-batch's, and no backward pass."""
    whole = shipped("vit-digits")
    graph = in_micro_batches(whole, 4)
    runtime = shared_runtime(device_index)
    plan = naive_plan(rewritten(graph, WITHOUT_HALF), runtime.limits, reuse=True)
    values, inputs = initial_values(graph, 1), example_inputs(graph)
    executor = Executor(runtime, graph, plan, values, poison=True)
    executor.forward(inputs)
    expected = run(whole, values | inputs)
    np.testing.assert_allclose(executor.read("logits"), expected["logits"], rtol=1e-3, atol=1e-4)
    assert len(expected["logits"]) == 64
    np.testing.assert_array_equal(executor.values()["vit.layernorm.weight"], values["vit.layernorm.weight"])
    executor.close()


def ran(index: int, plan: Plan) -> tuple[list[float], int]:
    """Losses of a few steps of the shipped model, and the bytes of the device buffers."""
    graph, runtime = shipped("vit-digits"), shared_runtime(index)
    executor = Executor(runtime, graph, plan, initial_values(graph, 1), poison=True)
    inputs = {name: value for name, value in example_inputs(graph).items() if graph.tensors[name].shape}
    losses = []
    for step in range(3):
        executor.step({**inputs, **step_values(graph, step + 1, 1e-3)})
        losses.append(executor.loss())
    executor.close()
    return losses, executor.memory_bytes


@pytest.mark.parametrize("storage", ["fp32", "fp16"])
def test_a_plan_in_micro_batches_trains_as_the_whole_batch_does(storage: str, device_index: int) -> None:
    """The plan is for the graph as captured; the runtime's own count of bytes is hardly more than the plan's."""
    if device_index % 2 != ["fp32", "fp16"].index(storage):
        pytest.skip("the other storage on this device")
    graph = shipped("vit-digits")
    costs = FakeCosts(limits=shared_runtime(device_index).limits)
    whole, cut = (planner.plan(graph, costs, "greedy", storage=storage, micro_batches=n) for n in (1, 4))
    assert cut.rewrites[0] == "micro:4"
    assert cut.arena_bytes < 0.5 * whole.arena_bytes
    losses, _ = ran(device_index, whole)
    again, made = ran(device_index, cut)
    np.testing.assert_allclose(again, losses, rtol=1e-4 if storage == "fp32" else 2e-2)
    assert losses[-1] < losses[0]
    sent = sum(t.size_elems * t.item_bytes for t in graph.by_role("input"))
    assert cut.arena_bytes <= made <= 1.02 * cut.arena_bytes + sent
