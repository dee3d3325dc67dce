"""Gradients applied where they are made: which updates merge, where they run, and that the step computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from kernels.execute import Executor
from kernels.reference import run
from layoutopt import planner
from layoutopt.capture import capture
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.optimizers import AdamW, Sgd, step_values
from layoutopt.passes import run_passes
from layoutopt.rewrite_apply import apply_gradients
from layoutopt.rewrite_half import half_storage
from layoutopt.rewrites import REWRITES, alternatives, origin_of, rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import Sketch, attention_step, linear_step, random_values, reshape
from tests.plans import any_of, mixed, naive_plan
from tests.test_execute import shared_runtime
from tests.test_rewrite_epilogue import check_same
from tests.test_rewrite_updates import overwriting

ADAM = AdamW(lr=3e-3, weight_decay=0.1)
SGD = Sgd(lr=0.05, momentum=0.9)
BEFORE = ("epilogue", "logits", "neighbours")
ODD = ("bert-tiny", "gpt2-odd", "llama-odd", "vit-odd", "swin-odd", "whisper-odd")


def applied(graph: TrainingGraph) -> list[str]:
    """Storages that contractions update."""
    found = [op.inputs[i].tensor for op in graph.ops if op.kind == "contraction" for _, i in op.inplace]
    return sorted(graph.storage_of[name] for name in found)


@pytest.mark.parametrize("step", [linear_step, attention_step])
def test_steps_built_by_hand(step: Any) -> None:
    graph, _ = run_passes(step())
    after = apply_gradients(graph)
    assert applied(after)
    check_same(graph, after, random_values(graph, 1))


def test_every_weight_of_a_transformer_but_the_embeddings() -> None:
    graph = rewritten(shipped("minilm"), BEFORE)
    after = rewritten(shipped("minilm"), (*BEFORE, "apply"))
    assert len(applied(after)) == (6 * 6 + 2) * 3  # each with two moments
    assert len(graph.ops) - len(after.ops) == 38
    gone = graph.tensors.keys() - after.tensors.keys()
    assert len(gone) == 38
    assert {graph.tensors[name].role for name in gone} == {"gradient"}
    assert apply_gradients(after).ops == after.ops


@pytest.mark.parametrize("name", ["minilm", "gpt2", "llama-3.2-1b"])
def test_nothing_reads_a_parameter_after_it_is_updated(name: str) -> None:
    after = rewritten(shipped(name), (*BEFORE, "apply", "updates", "reuse"))
    updated: set[str] = set()
    made = {t.name for t in after.tensors.values() if t.role in ("parameter", "state", "input", "constant")}
    for op in after.ops:
        assert not {o.tensor for o in op.inputs} & updated
        assert {o.tensor for o in op.inputs} <= made
        updated |= {op.inputs[i].tensor for _, i in op.inplace}
        made |= {o.tensor for o in op.outputs}
    assert len(updated) >= len(applied(after))


# ---- case by case ---------------------------------------------------------------------------------------------------


def small_step(late_reader: int = 0, twice: bool = False, own: bool = False) -> TrainingGraph:
    """y = x·w and its gradient.

    Args:
        late_reader: so many ops further on the parameter is read once more.
        twice: the gradient is read by another op too.
        own: the gradient is made of the parameter itself.
    """
    s = Sketch()
    s.tensor("x", (4, 4), "input")
    s.tensor("w", (4, 5), "parameter")
    s.op("contraction", [("x", reshape(1, 4, 4)), ("w", reshape(1, 4, 5))], {"y": (1, 4, 5)})
    s.phase = "loss"
    s.op("reduce", [("y", reshape(1, 20))], {"total": (1,)}, fn="mean")
    s.pointwise("loss", [("mul", ("x", 0), ("c", 1.0))], ("total", reshape()))
    s.phase = "backward"
    second = ("w", reshape(1, 4, 5)) if own else "y"
    s.op("contraction", [("x", ("permute", (1, 0)), reshape(1, 4, 4)), second], {"dw": (1, 4, 5)})
    last = ("y", reshape(4, 5))
    for i in range(late_reader):
        last = s.pointwise(f"t{i}", [("mul", ("x", 0), ("c", 0.5))], last)
    if late_reader:
        s.op("contraction", [(last, reshape(1, 4, 5)), ("w", ("permute", (1, 0)), reshape(1, 5, 4))], {"dx": (1, 4, 4)})
    if twice:
        s.op("reduce", [("dw", reshape(1, 20))], {"norm": (1,)}, fn="sum")
    s.sgd("w", ("dw", reshape(4, 5)))
    outputs = ["loss", *(["dx"] if late_reader else []), *(["norm"] if twice else [])]
    return s.graph("small", *outputs)


def test_a_later_reader_of_the_parameter_goes_first() -> None:
    graph = small_step(late_reader=3)
    after = apply_gradients(graph)
    assert [op.outputs[0].tensor for op in after.ops[-2:]] == ["dx", "w.new"]
    assert after.ops[-1].inplace == ((0, 2),)
    values = random_values(graph)
    before, got = overwriting(graph, values), overwriting(after, values)
    for name in ("loss", "dx", "w.new"):
        np.testing.assert_allclose(got[name], before[name], rtol=1e-12)


def test_a_reader_that_is_far_away_keeps_the_gradient() -> None:
    graph = small_step(late_reader=40)
    assert apply_gradients(graph).ops == graph.ops


def test_a_gradient_that_others_read_is_kept() -> None:
    graph = small_step(twice=True)
    assert apply_gradients(graph).ops == graph.ops


def test_a_gradient_that_is_an_output_is_kept() -> None:
    graph = small_step()
    shown = graph.with_ops(graph.ops, outputs=(*graph.outputs, "dw"))
    assert apply_gradients(shown).ops == shown.ops
    assert len(apply_gradients(graph).ops) == len(graph.ops) - 1


def test_a_product_with_the_parameter_itself_is_left_alone() -> None:
    graph = small_step(own=True)
    assert apply_gradients(graph).ops == graph.ops


# ---- planning -------------------------------------------------------------------------------------------------------


def test_who_keeps_gradients_plans_with_them() -> None:
    graph = shipped("minilm")
    gradient = next(t.name for t in graph.by_role("gradient") if t.of)
    assert "apply" in planner.plan(graph, FakeCosts(), "rowmajor").rewrites
    kept = planner.plan(graph, FakeCosts(), "rowmajor", keep=[gradient]).rewrites
    assert "apply" not in kept
    assert "epilogue" in kept


def test_float16_keeps_gradients_to_scale_them() -> None:
    graph = shipped("minilm")
    assert all("apply" not in origin_of(g)[1] for g in alternatives(graph, storage="fp16"))
    with pytest.raises(GraphError, match="applies gradients where they are made"):
        half_storage(rewritten(graph, ["apply"]))


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", ODD)
def test_models_of_the_zoo(name: str, optimizer: Sgd | AdamW) -> None:
    """Loss and everything updated, beside the graph as captured, in float64."""
    from tests.zoo_cases import example, values_of

    module, batch, loss = example(name)
    graph, _ = run_passes(capture(module, batch, loss=loss, optimizer=optimizer))
    after = rewritten(graph, [n for n in REWRITES if n != "half"])
    assert len(applied(after)) > 4
    values = values_of(graph, module, batch) | step_values(graph, 1)
    if optimizer is SGD:
        return check_same(graph, after, values)
    expected, got = run(graph, values), run(after, values)
    for op in after.ops:  # Adam makes large numbers of gradients that are zero but for rounding: biases of keys
        for out, _ in op.inplace if op.kind == "contraction" else ():
            name = op.outputs[out].tensor
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.peer
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
def test_two_steps_on_a_device(device_index: int, optimizer: Sgd | AdamW) -> None:
    """Layouts and kernels at random, NaN in every padding: losses and parameters as without rewrites, by float64."""
    from tests.zoo_cases import example, values_of

    module, batch, loss = example("bert-tiny")
    graph, _ = run_passes(capture(module, batch, loss=loss, optimizer=optimizer))
    after = rewritten(graph, [n for n in REWRITES if n != "half"])
    values = values_of(graph, module, batch)
    runtime = shared_runtime(device_index)
    plan = naive_plan(after, runtime.limits, mixed(5, kinds=1), any_of(5), relayouts_share=0.2, reuse=True)
    inputs = {t.name: values[t.name] for t in graph.by_role("input") if t.name in values}
    start = {n: v for n, v in values.items() if n not in inputs}
    device = Executor(runtime, graph, plan, start, poison=True)
    for step in (1, 2):
        scalars = step_values(graph, step)
        values = run(graph, {**values, **scalars})
        device.step({**inputs, **scalars})
        assert device.loss() == pytest.approx(float(values[graph.outputs[0]]), rel=1e-4)
        for op in graph.ops:
            for out, i in op.inplace:
                values[op.inputs[i].tensor] = values[op.outputs[out].tensor]
    for name in applied(after):
        moved, rounded = np.linalg.norm(values[name] - start[name]), 2.0**-23 * np.linalg.norm(start[name])
        assert np.linalg.norm(device.read(name) - values[name]) < 1e-3 * moved + rounded, name
