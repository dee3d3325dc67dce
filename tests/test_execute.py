"""The executor on every device: a small regression by hand, under several plans, against the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import pytest

from kernels import reference
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits
from layoutopt.errors import DeviceError, GraphError
from layoutopt.graph import Expr, Op, Operand, Storage, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.plan import Plan
from layoutopt.view import View
from tests.plans import any_of, first, mixed, naive_plan, r_tile, row_major

N, K, M = 7, 5, 3
LEARNING_RATE = 0.01

PLANS: dict[str, Callable[[Storage], Layout]] = {
    "row-major": row_major,
    "r-tile": r_tile,
    "mixed 1": mixed(1),
    "mixed 2": mixed(2),
}


def view(*steps: tuple[str, tuple[int, ...]]) -> View:
    return View().then(*steps)


def regression() -> TrainingGraph:
    """Least squares y = x·w + shift·1 with momentum, in contractions and pointwise ops only."""
    tensors = [
        Tensor("x", (N, K), role="input"),
        Tensor("t", (N, M), role="input"),
        Tensor("lr", (), role="input"),
        Tensor("w", (K, M), role="parameter", init="normal:1"),
        Tensor("w.momentum", (K, M), role="state", init="zeros", of="w"),
        Tensor("shift", (), role="constant"),
        Tensor("y", (N, M)),
        Tensor("d", (N, M)),
        Tensor("loss", (), role="output"),
        Tensor("w.grad", (K, M), role="gradient", of="w"),
        Tensor("w.momentum.new", (K, M)),
        Tensor("w.new", (K, M)),
    ]
    subtract = Expr((("add", ("x", 0), ("x", 2)), ("sub", ("t", 0), ("x", 1))), (("t", 1),))
    momentum = Expr((("mul", ("c", 0.9), ("x", 0)), ("add", ("t", 0), ("x", 1))), (("t", 1),))
    descend = Expr((("mul", ("x", 1), ("x", 2)), ("sub", ("x", 0), ("t", 0))), (("t", 1),))
    whole = view(("expand", (N, M)))
    ops = [
        Op(
            "predict",
            "contraction",
            (Operand("x", view(("reshape", (1, N, K)))), Operand("w", view(("reshape", (1, K, M))))),
            (Operand("y", view(("reshape", (1, N, M)))),),
        ),
        Op(
            "subtract",
            "pointwise",
            (Operand("y"), Operand("t"), Operand("shift", whole)),
            (Operand("d"),),
            {"expr": subtract},
        ),
        Op(
            "square",
            "contraction",
            (Operand("d", view(("reshape", (1, 1, N * M)))), Operand("d", view(("reshape", (1, N * M, 1))))),
            (Operand("loss", view(("reshape", (1, 1, 1)))),),
            phase="loss",
        ),
        Op(
            "gradient",
            "contraction",
            (
                Operand("x", view(("permute", (1, 0)), ("reshape", (1, K, N)))),
                Operand("d", view(("reshape", (1, N, M)))),
            ),
            (Operand("w.grad", view(("reshape", (1, K, M)))),),
            {"alpha": 2.0},
            "backward",
        ),
        Op(
            "momentum",
            "pointwise",
            (Operand("w.momentum"), Operand("w.grad")),
            (Operand("w.momentum.new"),),
            {"expr": momentum},
            "update",
            inplace=((0, 0),),
        ),
        Op(
            "descend",
            "pointwise",
            (Operand("w"), Operand("w.momentum.new"), Operand("lr", view(("expand", (K, M))))),
            (Operand("w.new"),),
            {"expr": descend},
            "update",
            inplace=((0, 0),),
        ),
    ]
    return TrainingGraph("regression", {t.name: t for t in tensors}, ops, ("loss",), {"shift": 0.25})


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, t = rng.normal(size=(N, K)), rng.normal(size=(N, M))
    return {"x": x.astype(np.float32), "t": t.astype(np.float32), "lr": np.float32(LEARNING_RATE)}


def start() -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(9).normal(size=(K, M)).astype(np.float32)}


@lru_cache(maxsize=4)
def shared_runtime(device_index: int) -> Runtime:
    """One per device, so that tests share its built programs."""
    return Runtime(devices()[device_index])


@pytest.fixture
def runtime(device_index: int) -> Runtime:
    return shared_runtime(device_index)


def executor(runtime: Runtime, plan: Plan | None = None, **options: object) -> Executor:
    graph = regression()
    made = plan or naive_plan(graph, runtime.limits)
    return Executor(runtime, graph, made, start(), poison=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reuse", "share", "pick_kernel"),
    [(False, 0.0, first), (True, 0.5, any_of(3)), (True, 1.0, any_of(4))],
    ids=["plain", "half relaid out", "all relaid out"],
)
@pytest.mark.parametrize("pick_layout", PLANS.values(), ids=PLANS.keys())
def test_steps_agree_with_the_interpreter(
    runtime: Runtime, pick_layout: Callable, reuse: bool, share: float, pick_kernel: Callable
) -> None:
    graph = regression()
    options = {"relayouts_share": share, "reuse": reuse, "keep": ["w.grad"]}
    plan = naive_plan(graph, runtime.limits, pick_layout, pick_kernel, **options)
    run = Executor(runtime, graph, plan, start(), keep=["w.grad"], poison=True)
    known = start() | {"w.momentum": np.zeros((K, M))}
    for step in range(3):
        run.step(batch(step))
        expected = reference.run(graph, known | batch(step))
        assert run.loss() == pytest.approx(float(expected["loss"]), rel=1e-5)
        for name, new in {"w.grad": "w.grad", "w": "w.new", "w.momentum": "w.momentum.new"}.items():
            np.testing.assert_allclose(run.read(name), expected[new], rtol=1e-4, atol=1e-5)
        known = {"w": expected["w.new"], "w.momentum": expected["w.momentum.new"]}


def test_steps_are_enqueued_without_waiting_and_inputs_may_change(runtime: Runtime) -> None:
    run = executor(runtime)
    known = start() | {"w.momentum": np.zeros((K, M))}
    for step in range(6):
        data = batch(step)
        run.step(data)
        expected = reference.run(run.graph, known | batch(step))
        known = {"w": expected["w.new"], "w.momentum": expected["w.momentum.new"]}
        data["x"][:] = np.nan
    np.testing.assert_allclose(run.read("w"), known["w"], rtol=1e-4, atol=1e-5)


def test_all_kernels_are_built_as_one_program(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    run = executor(runtime, naive_plan(regression(), runtime.limits, r_tile, relayouts_share=1.0))
    built = list(runtime._programs.values())
    assert len({suffix for _, suffix in built}) == len(built) > 5
    assert len({id(program) for program, _ in built}) == 1
    assert run.launches >= len(built)


def test_forward_updates_nothing(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits, mixed(5))
    run = executor(runtime, plan)
    inputs = {name: value for name, value in batch().items() if name != "lr"}
    run.forward(inputs)
    expected = reference.run(run.graph, start() | {"w.momentum": np.zeros((K, M))} | batch())
    assert run.loss() == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert np.array_equal(run.read("w"), start()["w"])
    assert not run.read("w.momentum").any()
    run.step(batch())
    np.testing.assert_allclose(run.read("w"), expected["w.new"], rtol=1e-4, atol=1e-5)


def test_forward_makes_the_copies_it_reads(runtime: Runtime) -> None:
    """The relayouts that forward ops need run with them; the arena is poisoned, so a missing one would show."""
    plan = naive_plan(regression(), runtime.limits, r_tile, relayouts_share=1.0, reuse=True)
    assert {r.before for r in plan.relayouts} >= {"predict", "subtract", "square"}
    run = executor(runtime, plan)
    for seed in range(2):
        run.forward(batch(seed))
        expected = reference.run(run.graph, start() | {"w.momentum": np.zeros((K, M))} | batch(seed))
        assert run.loss() == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_values_and_write(runtime: Runtime) -> None:
    run = executor(runtime, naive_plan(regression(), runtime.limits, r_tile))
    assert set(run.values()) == {"w", "w.momentum"}
    run.step(batch())
    moved = run.values()
    assert not np.array_equal(moved["w"], start()["w"])
    run.write("w", start()["w"])
    assert np.array_equal(run.read("w"), start()["w"])
    assert np.array_equal(run.read("w.momentum"), moved["w.momentum"])


def test_profile_times_every_step_of_the_plan(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits, r_tile)
    run = executor(runtime, plan)
    times = run.profile(batch())
    assert len(times) == len(plan.steps)
    assert [name for name, _ in times if not name.startswith("relayout:")] == [op.name for op in run.graph.ops]
    assert all(ns > 0 for _, ns in times)
    expected = reference.run(run.graph, start() | {"w.momentum": np.zeros((K, M))} | batch())
    np.testing.assert_allclose(run.read("w"), expected["w.new"], rtol=1e-4, atol=1e-5)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_plan_of_another_graph_is_refused(runtime: Runtime) -> None:
    plan = msgspec.structs.replace(naive_plan(regression(), runtime.limits), graph_hash="0" * 64)
    with pytest.raises(GraphError, match=r"plan is for graph 'regression' \(000000000000\), not for 'regression'"):
        executor(runtime, plan)


def test_too_small_a_device_is_refused_with_numbers(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits)
    small = replace(runtime.limits, max_alloc_bytes=1000)
    with pytest.raises(DeviceError, match=rf"needs an arena of {plan.arena_bytes} bytes; .* allows 1000 bytes"):
        executor(runtime, plan, limits=small)
    with pytest.raises(DeviceError, match="has 900 in all"):
        executor(runtime, plan, limits=replace(runtime.limits, global_mem_bytes=900))


def test_other_alignment_is_refused(runtime: Runtime) -> None:
    align = 2 * max(slot.offset_bytes for slot in naive_plan(regression(), runtime.limits).arena)
    with pytest.raises(DeviceError, match=f"needs multiples of {align}: plan for this device"):
        executor(runtime, limits=replace(runtime.limits, base_align_bytes=align))


def test_kernel_that_is_not_there_is_refused(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits)
    other = msgspec.structs.replace(plan.ops[0], variant="contraction.imaginary(mr=99)")
    with pytest.raises(GraphError, match="no kernel here matches step predict of the plan"):
        executor(runtime, msgspec.structs.replace(plan, ops=(other, *plan.ops[1:])))


def test_plan_without_an_op_is_refused(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits)
    with pytest.raises(GraphError, match="does not run its 6 ops in order"):
        executor(runtime, msgspec.structs.replace(plan, steps=plan.steps[:-1]))


def test_plan_without_a_slot_is_refused(runtime: Runtime) -> None:
    plan = naive_plan(regression(), runtime.limits)
    arena = tuple(slot for slot in plan.arena if slot.name != "y#0")
    with pytest.raises(GraphError, match="arena has no room for y#0"):
        executor(runtime, msgspec.structs.replace(plan, arena=arena))


def test_reading_reused_memory_is_refused(runtime: Runtime) -> None:
    graph = regression()
    plan = naive_plan(graph, replace(runtime.limits, base_align_bytes=4), reuse=True)
    run = Executor(runtime, graph, _aligned(plan, runtime.limits), start())
    overwritten = [name for name in ("x", "t", "lr", "y", "d", "w.grad") if _reused(plan, f"{name}#0")]
    assert overwritten, "this plan is meant to reuse memory"
    with pytest.raises(GraphError, match=r"does not live to the end of the step: .* plan with this tensor in `keep`"):
        run.read(overwritten[0])
    with pytest.raises(GraphError, match="does not live to the end"):
        Executor(runtime, graph, _aligned(plan, runtime.limits), start(), keep=overwritten)
    with pytest.raises(GraphError, match="has no tensor 'nobody'"):
        run.read("nobody")


def _aligned(plan: Plan, limits: DeviceLimits) -> Plan:
    factor = limits.base_align_bytes
    slots = tuple(msgspec.structs.replace(s, offset_bytes=s.offset_bytes * factor) for s in plan.arena)
    return msgspec.structs.replace(plan, arena=slots, arena_bytes=plan.arena_bytes * factor)


def _reused(plan: Plan, name: str) -> bool:
    slot = next(s for s in plan.arena if s.name == name)
    begin, end = slot.offset_bytes, slot.offset_bytes + slot.size_bytes
    return any(
        o.first > slot.last and o.offset_bytes < end and begin < o.offset_bytes + o.size_bytes for o in plan.arena
    )


def test_values_are_checked(runtime: Runtime) -> None:
    graph = regression()
    plan = naive_plan(graph, runtime.limits)
    with pytest.raises(GraphError, match="no parameter or state 'v'"):
        Executor(runtime, graph, plan, {"v": np.zeros((K, M))})
    with pytest.raises(GraphError, match=r"parameter 'w' has shape \(3, 5\); the graph expects \(5, 3\)"):
        Executor(runtime, graph, plan, {"w": np.zeros((M, K))})
    run = Executor(runtime, graph, plan)
    assert np.array_equal(run.read("w"), Executor(runtime, graph, plan).read("w"))
    with pytest.raises(GraphError, match="no parameter or state 'x'"):
        run.write("x", np.zeros((N, K)))
    with pytest.raises(GraphError, match=r"input 'lr' .* is missing"):
        run.step({"x": batch()["x"], "t": batch()["t"]})
