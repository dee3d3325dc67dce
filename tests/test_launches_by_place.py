"""Launches that find their operands by places in the arena: the same bits as with a region per operand."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.execute import Executor
from kernels.runtime import Runtime
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrites import rewritten
from tests.graphs import attention_step, linear_step, random_values
from tests.plans import any_of, mixed, naive_plan
from tests.test_execute import shared_runtime


def after_two_steps(runtime: Runtime, graph: TrainingGraph, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Parameters, state and outputs; regions that were made."""
    plan = naive_plan(graph, runtime.limits, mixed(seed), any_of(seed), relayouts_share=0.3, reuse=True)
    roles = ("parameter", "state")
    values = {n: v for n, v in random_values(graph, 3).items() if n in graph.tensors and graph.tensors[n].role in roles}
    executor = Executor(runtime, graph, plan, values, poison=True)
    for step in range(2):
        executor.step(example_inputs(graph, step))
    found = executor.values() | {name: executor.read(name) for name in graph.outputs}
    regions = len(executor._regions)
    executor.close()
    return found, regions


@pytest.mark.parametrize("name", ["linear", "attention", "vit-digits"])
def test_the_same_bits(device_index: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"linear": linear_step, "attention": attention_step}
    graph, _ = run_passes(steps[name]()) if name in steps else (shipped(name), None)
    runtime = shared_runtime(device_index)
    changed = rewritten(graph, ("epilogue", "neighbours", "apply"))
    for seed in (1,) if name == "vit-digits" else (1, 2):
        expected, some = after_two_steps(runtime, changed, seed)
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "launches_by_place", True)
            got, none = after_two_steps(runtime, changed, seed)
        assert (some > 0, none) == (True, 0)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)
