"""Inputs reach their slots by one copy and one launch, or straight where that is not possible."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest

from kernels import stage
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from kernels.stage import Input, staging_bytes
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.plan import ArenaSlot
from tests.plans import naive_plan, r_tile, row_major

SHAPES = {"a": (7, 13), "ids": (3, 5), "mask": (9, 5), "rate": (), "large": (300, 301)}
DTYPES = {"ids": "int32", "mask": "bool"}


def copies() -> TrainingGraph:
    """Every input, by way of a pointwise op that changes nothing, is an output."""
    tensors, ops = [], []
    for name, shape in SHAPES.items():
        dtype = DTYPES.get(name, "float32")
        tensors += [Tensor(name, shape, dtype, "input"), Tensor(f"{name}'", shape, dtype, "output")]
        same = Expr((), (("x", 0),))
        ops.append(Op(f"copy {name}", "pointwise", (Operand(name),), (Operand(f"{name}'"),), {"expr": same}))
    return TrainingGraph("copies", {t.name: t for t in tensors}, ops, tuple(f"{n}'" for n in ("rate", *SHAPES)))


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    values["ids"] = rng.integers(-(2**31), 2**31, SHAPES["ids"]).astype(np.int32)
    values["mask"] = rng.random(SHAPES["mask"]) < 0.5
    return values


@pytest.mark.parametrize("choose", [row_major, r_tile], ids=["rows", "tiles"])
@pytest.mark.parametrize("room", [True, False], ids=["staged", "straight"])
def test_inputs_arrive_whole(device_index: int, choose, room: bool) -> None:
    runtime, graph = Runtime(devices()[device_index]), copies()
    plan = naive_plan(graph, runtime.limits, choose)
    limits = runtime.limits if room else replace(runtime.limits, max_alloc_bytes=plan.arena_bytes)
    run = Executor(runtime, graph, plan, limits=limits, poison=True, share=False)
    assert run.launches == len(graph.ops) + room
    for seed in range(7):  # more than the host has memory for: it comes round
        data = batch(seed)
        run.step(data)
        for value in data.values():
            value[...] = 0  # free to change
        if seed % 3 == 0:
            for name, value in batch(seed).items():
                np.testing.assert_array_equal(run.read(f"{name}'"), value, err_msg=name)


def test_only_small_inputs_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Runtime(devices()[0]).limits
    slot = ArenaSlot("x#0", 0, 1 << 20, 0, 1)

    def bytes_of(*sizes: int) -> int:
        inputs = {f"x{i}": Input(Layout.row_major((n,)), "float32", slot) for i, n in enumerate(sizes)}
        return staging_bytes(inputs, limits)

    assert bytes_of() == 0
    assert bytes_of(1) == 128
    assert bytes_of(1, 33, 32) == 128 + 256 + 128
    monkeypatch.setattr(stage, "_SMALL_BYTES", 1000)
    assert bytes_of(1, 251, 32) == 256
    # Words would not do where slots may begin at any byte.
    assert staging_bytes({"x": Input(Layout.row_major((8,)), "bool", slot)}, replace(limits, base_align_bytes=1)) == 0


def test_close_lets_go_of_the_arena(device_index: int) -> None:
    runtime, graph = Runtime(devices()[device_index]), copies()
    run = Executor(runtime, graph, naive_plan(graph, runtime.limits))
    run.step(batch(0))
    arena = run._arena
    run.close()
    gc.collect()
    assert sys.getrefcount(arena) == 2, "our own name and the argument"
