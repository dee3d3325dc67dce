"""Equal steps in one launch give what they give one by one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.model import CostModel
from kernels.bind import bind
from kernels.execute import Executor
from kernels.group import alike_steps, stacked_size, stacked_source
from kernels.runtime import Runtime, devices
from kernels.source import program_source
from kernels.spec import DeviceLimits
from layoutopt import planner
from layoutopt.checkpoint import initial_values
from layoutopt.compare import example_inputs
from layoutopt.models import shipped, uncalibrated
from tests.plans import naive_plan, row_major


@pytest.mark.parametrize("strategy", ["rowmajor", "rtile"])
def test_stacked_launches_change_no_bit(strategy: str, device_index: int) -> None:
    graph, runtime = shipped("vit-digits"), Runtime(devices()[device_index])
    plan = planner.plan(graph, CostModel(uncalibrated(runtime)), strategy, rewrites=["neighbours"])
    values, inputs = initial_values(graph, 0), example_inputs(graph)

    def trained(executor: Executor) -> dict[str, np.ndarray]:
        for _ in range(3):
            executor.step(inputs)
        return executor.values() | {name: executor.read(name) for name in executor.graph.outputs}

    stacked = Executor(runtime, graph, plan, values, poison=True)
    runs = list(alike_steps(stacked.steps, {slot.name: slot for slot in plan.arena}))
    several = [run for run in runs if len(run) > 1]
    assert len(several) > 10
    together = trained(stacked)
    # Pointwise runs share launches with yet others (test_batch.py); one more launch spreads the inputs.
    assert stacked.launches <= sum(len(stacked.steps[run.start].kernel.launches) for run in runs) + 1
    assert all(stacked.shared[stacked.steps[i].label] >= len(run) for run in several for i in run)
    labels = [label for label, _ in stacked.profile(inputs)]
    assert labels == [step.label for step in stacked.steps]
    stacked.close()

    single = Executor(runtime, graph, plan, values, poison=True, share=False)
    assert not single.shared
    assert single.launches > len(runs)
    apart = trained(single)
    for name, value in apart.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)


def test_steps_that_meet_in_memory_stay_apart() -> None:
    graph = shipped("vit-digits")
    plan = planner.plan(graph, CostModel(uncalibrated(Runtime(devices()[0]))), "rowmajor", rewrites=["neighbours"])
    executor = Executor(Runtime(devices()[0]), graph, plan)
    slots = {slot.name: slot for slot in plan.arena}
    run = next(run for run in alike_steps(executor.steps, slots) if len(run) > 1)
    first, second = (executor.steps[i] for i in (run.start, run.start + 1))
    written = first.slots[len(first.op.inputs)] if first.op else ""
    read = second.slots[0]
    moved = slots | {written: slots[read]}
    assert next(iter(alike_steps(executor.steps[run.start : run.start + 2], moved))) == range(1)


def test_instances_are_stacked_along_the_third_dimension() -> None:
    graph = shipped("vit-digits")
    plan = planner.plan(graph, CostModel(uncalibrated(Runtime(devices()[0]))), "rowmajor", rewrites=[])
    executor = Executor(Runtime(devices()[0]), graph, plan)
    for step in executor.steps:
        for launch in step.kernel.launches:
            size, local = stacked_size(launch, 5)
            assert np.prod(size) == 5 * np.prod(launch.global_size)
            assert np.prod(local) == np.prod(launch.local_size)


@pytest.mark.parametrize("limits", [DeviceLimits(), DeviceLimits(kind="gpu", simd_width=32)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["swin-tiny", "gpt2"])
def test_every_kernel_can_be_stacked(name: str, limits: DeviceLimits) -> None:
    graph = shipped(name)
    plan = naive_plan(graph, limits, row_major)
    kernels = {step.kernel.key: step.kernel for step in bind(graph, plan, limits)}
    for kernel in kernels.values():
        for launch in kernel.launches:
            source = stacked_source(program_source(kernel, launch), launch)
            assert source.count("__global const ulong *table_") == 1
            for position, (operand, _) in enumerate(launch.operands):
                assert f"{operand} = (__global void *)((__global uchar *){operand} + places_[{position}]);" in source
