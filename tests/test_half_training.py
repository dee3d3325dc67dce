"""Training with float16 storage: what becomes a half, overflow, small updates, state that comes and goes, parity."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from kernels.execute import Executor
from kernels.reference import run
from kernels.runtime import Runtime, devices
from layoutopt import digits, rewrite_half
from layoutopt import plan as plans
from layoutopt.checkpoint import initial_values
from layoutopt.cli import main
from layoutopt.codes import Code, decode, encode
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.expr import evaluate_expr, round16
from layoutopt.facade import check_request, solve_plan
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.models import find_graph, uncalibrated
from layoutopt.optimizers import step_values
from layoutopt.plan import Plan
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import REWRITES, alternatives, calibration_name, planned_graph, rewritten
from tests.plans import any_of, mixed, naive_plan

SCALE = rewrite_half.SCALE


@lru_cache(maxsize=1)
def graph() -> TrainingGraph:
    return find_graph("vit-digits")


@lru_cache(maxsize=4)
def runtime(device_index: int) -> Runtime:
    return Runtime(devices()[device_index])


@lru_cache(maxsize=8)
def plan(device_index: int, storage: str) -> Plan:
    return solve_plan(graph(), uncalibrated(runtime(device_index)), strategy="greedy", storage=storage)


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    data = [batch for batch, _ in digits.load().batches(64)]
    return [{**data[i], **step_values(graph(), i + 1, 5e-4)} for i in range(steps)]


# ---- what becomes a half ---------------------------------------------------------------------------------------------


def test_what_stays_float32() -> None:
    """Of what is large: inputs, constants, masks, tables' gradients, what is only summed. Statistics in any case."""
    for name in ("vit-digits", "minilm", "gpt2"):
        half = alternatives(find_graph(name), storage="fp16")[0]
        large = {t.name for t in half.tensors.values() if t.size_elems >= 1024 and sum(n > 1 for n in t.shape) > 1}
        wide = {t for t in large if half.tensors[t].dtype == "float32"}
        tables = {op.outputs[0].tensor for op in half.ops if op.kind == "scatter_add"}
        summed = {t for t in wide if {op.kind for op in half.consumers[t]} == {"reduce"}}
        given = {t.name for t in half.by_role("input", "constant")}
        assert wide <= tables | summed | given | rewrite_half._huge(half)[0], name
        assert len(wide) < len(large) / 20
        assert half.tensors["loss"].dtype == "float32"
        statistics = {o.tensor for op in half.ops if op.kind == "layer_norm" for o in op.outputs[1:]}
        assert {half.tensors[t].dtype for t in statistics} == {"float32"}


def test_memory_is_nearly_halved() -> None:
    """Bytes alive at the fullest op, before layouts; the arena's are as good (benchmarks)."""
    for name in ("minilm", "bert-base", "gpt2"):
        wide, half = (alternatives(find_graph(name), storage=s)[0] for s in ("fp32", "fp16"))
        assert peak_bytes(half) < 0.55 * peak_bytes(wide), name


def masked_step() -> TrainingGraph:
    """Scores [40, 40] with a huge mask added in an op of its own, softmax, and what squares are summed of it."""
    tensors = [
        Tensor("s", (40, 40), role="parameter", init="normal:1"),
        Tensor("seen", (40, 40), "bool", "input"),
        Tensor("mask", (40, 40)),
        Tensor("t", (40, 40)),
        Tensor("p", (40, 40)),
        Tensor("square", (40, 40)),
        Tensor("total", (40,)),
    ]
    huge = Expr((("where", ("x", 0), ("c", 0.0), ("c", -3.4028234663852886e38)),), (("t", 0),))
    add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
    square = Expr((("mul", ("x", 0), ("x", 0)),), (("t", 0),))

    def point(name: str, expr: Expr, *inputs: str) -> Op:
        return Op(name, "pointwise", tuple(map(Operand, inputs)), (Operand(name),), {"expr": expr})

    ops = (
        point("mask", huge, "seen"),
        point("t", add, "s", "mask"),
        Op("p", "softmax", (Operand("t"),), (Operand("p"),)),
        point("square", square, "s"),
        Op("total", "reduce", (Operand("square"),), (Operand("total"),), {"fn": "sum"}),
    )
    return TrainingGraph("masked", {t.name: t for t in tensors}, ops, ("p", "total"))


def test_masks_and_squares_do_not_overflow() -> None:
    """A mask stays float32, masked scores end at the largest half, squares that are summed stay float32."""
    half = rewritten(masked_step(), ["half"])
    kinds = {name: t.dtype for name, t in half.tensors.items()}
    assert kinds == {
        **dict.fromkeys(("s", "t", "p"), "float16"),
        **dict.fromkeys(("mask", "square", "total"), "float32"),
        "seen": "bool",
    }
    rng = np.random.default_rng(0)
    seen = rng.random((40, 40)) > 0.5
    seen[3] = False  # a row that is masked wholly: all alike, as in float32
    scores = rng.standard_normal((40, 40)).astype(np.float16).astype(np.float32)
    scores[0, 0] = 500
    values = {"s": scores, "seen": seen}
    got, expected = run(half, values), run(masked_step(), values)
    assert got["t"].min() == -65504
    np.testing.assert_allclose(got["p"], expected["p"], atol=2e-3)
    np.testing.assert_allclose(got["p"][3], 1 / 40, atol=1e-4)
    assert got["total"].max() > 65504


def test_no_place_for_the_scale_is_refused() -> None:
    """A backward pass that begins with several contractions."""
    ops = [replace(op, phase="loss") if op.kind == "cross_entropy_grad" else op for op in graph().ops]
    with pytest.raises(GraphError, match=r"does not show where it begins \(found .*contraction.* --storage fp32"):
        rewritten(graph().with_ops(ops), ["half"])


def test_storages_by_name() -> None:
    with pytest.raises(LayoutOptError, match="unknown storage 'fp8': choose one of fp32, fp16"):
        check_request(["ilp"], None, storage="fp8")
    check_request(["ilp"], "9MiB", graph(), "fp16")
    assert calibration_name(graph(), "fp16") == f"{graph().hash}:fp16"
    assert calibration_name(alternatives(graph(), storage="fp16")[0]) == f"{graph().hash}:fp16"
    assert calibration_name(alternatives(graph())[0]) == graph().hash


def test_the_command_line_plans_with_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan names the rewrite; its arena is about half of the other; what is no storage is refused in a sentence."""
    arenas = {}
    for storage in ("fp32", "fp16"):
        file = tmp_path / f"{storage}.json"
        words = ["plan", "vit-digits", "--device-model", "generic-cpu", "--strategy", "rowmajor", "--storage", storage]
        assert main([*words, "-o", str(file), "--json"]) == 0
        made = plans.load(file)
        assert ("half" in made.rewrites) == (storage == "fp16")
        arenas[storage] = made.arena_bytes
    assert 0.45 < arenas["fp16"] / arenas["fp32"] < 0.55
    capsys.readouterr()
    assert main(["plan", "vit-digits", "--storage", "half", "--device-model", "generic-cpu"]) == 2
    assert "unknown storage 'half': choose one of fp32, fp16" in capsys.readouterr().err


# ---- small updates ---------------------------------------------------------------------------------------------------


def test_rounding_at_random_is_right_on_average() -> None:
    """Halves stay, the result is a neighbour, and its mean over seeds is the number: normal, tiny, large, negative."""
    x = np.array([1.00017, -0.3333, 6e-5, 3.1e-8, -1e-8, 1234.4, 0.0, 60003.0], np.float32)
    draws = np.array([round16(x, np.asarray(seed)) for seed in range(4000)])
    assert np.array_equal(draws, draws.astype(np.float16).astype(np.float32))
    spacing = np.maximum(np.abs(np.spacing(x.astype(np.float16)).astype(np.float64)), 2.0**-24)
    assert (np.abs(draws - x) <= spacing).all()
    assert (np.abs(draws.mean(axis=0) - x) < 0.05 * spacing).all()
    fixed = np.array([0.5, -2.0, 2.0**-24, 65504], np.float32)
    assert np.array_equal(round16(fixed, np.asarray(7)), fixed)
    assert round16(np.float32(1e6), np.asarray(1)) == 65504
    assert np.isnan(round16(np.float32(np.nan), np.asarray(1)))


def test_state_comes_and_goes_decoded() -> None:
    """Means of gradients down to 1e-9 and of their squares down to 1e-18, to a thousandth."""
    gradient = np.array([1e-9, -3e-6, 0.02, 5.0, 0.0], np.float32)
    for code, values in ((Code("scaled", 1024.0), gradient), (Code("root", 1024.0), gradient**2)):
        np.testing.assert_allclose(decode(code, encode(code, values)), values, rtol=3e-2, atol=0)
        np.testing.assert_allclose(decode(code, encode(code, values))[1:], values[1:], rtol=2e-3)


def test_the_scale_grows_again() -> None:
    """Halved where the sum is no number, doubled after enough steps, never above where it began or below 1."""
    half = alternatives(graph(), storage="fp16")[0]
    program = half.ops[-1].attrs["expr"]
    first, due = rewrite_half._FIRST_SCALE, rewrite_half._GROWTH_STEPS - 1

    def after(scale: float, clean: int, total: float) -> tuple[float, ...]:
        given = [np.asarray(scale), np.asarray(clean), np.asarray(7), np.asarray(total)]
        return tuple(float(x) for x in evaluate_expr(program, given))

    assert after(first / 4, 3, 0.5) == (first / 4, 4, 8)
    assert after(first / 4, due, 0.5) == (first / 2, 0, 8)
    assert after(first, due, 0.5) == (first, 0, 8)
    assert after(first, 3, float("inf")) == (first / 2, 0, 8)
    assert after(first, 3, float("nan")) == (first / 2, 0, 8)
    assert after(1.0, 3, float("-inf")) == (1.0, 0, 8)


# ---- on devices ------------------------------------------------------------------------------------------------------


def test_training_keeps_to_float32(device_index: int) -> None:
    """The losses of twelve steps, step by step; the arena is little more than half of the other."""
    losses = {}
    for storage in ("fp32", "fp16"):
        run_ = Executor(runtime(device_index), graph(), plan(device_index, storage), poison=True)
        losses[storage] = []
        for batch in batches(12):
            run_.step(batch)
            losses[storage].append(run_.loss())
        if storage == "fp16":
            assert run_.read(SCALE) == rewrite_half._FIRST_SCALE
            assert (run_.read(rewrite_half.CLEAN), run_.read(rewrite_half.SEED)) == (12, 12)
        run_.close()
    np.testing.assert_allclose(losses["fp16"], losses["fp32"], rtol=1e-2)
    assert plan(device_index, "fp16").arena_bytes < 0.55 * plan(device_index, "fp32").arena_bytes


def test_overflow_leaves_everything_as_it_is(device_index: int) -> None:
    """A scale too large for halves: parameters and state stay, the scale falls until steps count again."""
    start = initial_values(graph(), 0)
    run_ = Executor(runtime(device_index), graph(), plan(device_index, "fp16"), start)
    before = run_.values()
    run_.write(SCALE, np.float32(2.0**40))
    batch = batches(1)[0]
    run_.step(batch)
    after = run_.values()
    assert after[SCALE] == 2.0**39
    assert all(np.isfinite(value).all() for value in after.values())
    name = max((t.name for t in graph().by_role("parameter")), key=lambda n: before[n].size)
    assert np.array_equal(before[name], after[name])
    for _ in range(45):
        run_.step(batch)
    assert 1.0 <= run_.read(SCALE) < 2.0**39
    assert not np.array_equal(before[name], run_.read(name))
    assert all(np.isfinite(value).all() for value in run_.values().values())
    run_.close()


def test_a_run_goes_on_in_another_storage(device_index: int) -> None:
    """Parameters and state of a float16 run, read and written back: the same step follows, in float32 too."""
    given = batches(4)
    first = Executor(runtime(device_index), graph(), plan(device_index, "fp16"))
    for batch in given[:3]:
        first.step(batch)
    values = first.values()
    assert all(v.dtype != np.float16 for v in values.values())
    first.step(given[3])
    loss = first.loss()
    first.close()
    again = Executor(runtime(device_index), graph(), plan(device_index, "fp16"), values)
    again.step(given[3])
    assert again.loss() == loss
    again.close()
    own = {t.name for t in graph().by_role("parameter", "state")}
    wide = Executor(
        runtime(device_index),
        graph(),
        plan(device_index, "fp32"),
        {name: value for name, value in values.items() if name in own},
    )
    wide.step(given[3])
    assert wide.loss() == pytest.approx(loss, rel=5e-3)
    wide.close()


def test_values_beyond_halves_are_refused(device_index: int) -> None:
    run_ = Executor(runtime(device_index), graph(), plan(device_index, "fp16"))
    half = planned_graph(plan(device_index, "fp16"), graph())
    name = next(t.name for t in half.by_role("parameter") if t.dtype == "float16")
    with pytest.raises(GraphError, match=r"holds 100000: float16 ends at 65504; plan with --storage fp32"):
        run_.write(name, np.full(half.tensors[name].shape, 1e5, np.float32))
    run_.close()


@pytest.mark.peer
def test_bert_beside_torch(device_index: int) -> None:
    """Two layers of BERT after every rewrite, layouts and kernels at random: losses and gradients within 2%."""
    pytest.importorskip("transformers")
    from tests.zoo_parity import case, zero_in_theory

    expected = case("bert-tiny")
    half = rewritten(expected.graph, REWRITES)
    assert sum(t.dtype == "float16" for t in half.tensors.values()) > 100
    limits = runtime(device_index).limits
    made = naive_plan(half, limits, mixed(3, kinds=1), any_of(3), relayouts_share=0.2, reuse=True)
    run_ = Executor(runtime(device_index), expected.graph, made, expected.start, poison=True)
    gradient_of = {t.of: t.name for t in expected.graph.by_role("gradient")}
    skipped = dict(zero_in_theory(expected))
    for number, loss in enumerate(expected.losses):
        scale = float(run_.read(SCALE))
        run_.step({**expected.inputs, **step_values(expected.graph, number + 1)})
        assert run_.loss() == pytest.approx(loss, rel=2e-2)
        if number == 0:
            errors = {
                name: np.linalg.norm(run_.read(gradient_of[name]) / scale - gradient) / np.linalg.norm(gradient)
                for name, gradient in expected.gradients.items()
                if name not in skipped
            }
            assert max(errors.values()) < 2e-2, max(errors, key=lambda name: errors[name])
    run_.close()
