"""Epilogues: what is merged into a contraction, what is left alone, and that the step computes the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from graphs import (
    GELU,
    GELU_GRAD,
    Sketch,
    attention_step,
    expand,
    linear_step,
    permute,
    random_values,
    reshape,
    result_values,
)

from kernels.reference import run
from layoutopt.graph import Expr, Op, Operand, TrainingGraph
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrite_epilogue import MOST_FULL, with_epilogues
from layoutopt.rewrites import rewritten
from layoutopt.workload import facts, op_bytes

FULL_SIZE = {"minilm": 63, "gpt2": 72, "vit-tiny": 98, "llama-3.2-1b": 146, "bert-large": 243}
"""Pointwise ops that end in a contraction."""

ODD = ("bert-tiny", "gpt2-odd", "llama-odd", "vit-odd", "swin-odd", "whisper-odd", "clip-odd", "opt-odd")


def epilogues(graph: TrainingGraph) -> list[Op]:
    return [op for op in graph.ops if "epilogue" in op.attrs]


def check_same(before: TrainingGraph, after: TrainingGraph, values: dict[str, np.ndarray]) -> None:
    """Every output and every updated tensor, in float64."""
    expected = result_values(before, run(before, values))
    got = result_values(after, run(after, values))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(got[name] / scale, value / scale, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_models(name: str) -> None:
    before = shipped(name)
    after = with_epilogues(before)
    assert len(before.ops) - len(after.ops) == FULL_SIZE[name]
    moved = [sum(op_bytes(graph, op) for op in graph.ops) for graph in (before, after)]
    assert moved[1] < 0.97 * moved[0]
    assert facts(after)["flops"] == pytest.approx(facts(before)["flops"], rel=1e-3)
    assert Counter(op.phase for op in after.ops if op.kind != "pointwise") == Counter(
        op.phase for op in before.ops if op.kind != "pointwise"
    )
    for op in epilogues(after):
        domain = after.operand_shape(op.outputs[0])
        assert all(after.operand_shape(o) == domain for o in op.operands[2:])
    assert with_epilogues(after).ops == after.ops


def test_what_a_transformer_gains() -> None:
    """MiniLM: biases, residuals, the activation with its input kept, its derivative, gradients that accumulate."""
    graph = with_epilogues(shipped("minilm"))
    found = Counter(
        (op.phase, " ".join(i[0] for i in op.attrs["epilogue"].code), len(op.inputs) - 2, len(op.outputs))
        for op in epilogues(graph)
    )
    assert found["forward", "add", 1, 1] == 18 + 6 + 1  # queries, keys, values; the mask; the classifier
    assert found["forward", "add add", 2, 1] == 12
    assert found["forward", "add mul erf add mul mul", 1, 2] == 6
    assert found["backward", "add mul mul exp mul mul erf add mul mul add mul", 2, 1] == 6
    assert found["backward", "add", 1, 1] == 6
    assert found["backward", "add add add", 3, 1] == 6


@pytest.mark.parametrize("step", [linear_step, attention_step])
def test_steps_built_by_hand(step: Any) -> None:
    graph, _ = run_passes(step())
    after = with_epilogues(graph)
    assert epilogues(after)
    check_same(graph, after, random_values(graph, 1))


@pytest.mark.peer
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", ODD)
def test_models_of_the_zoo(name: str, dropout: bool) -> None:
    """Loss, every gradient, every updated parameter; with dropout, whose random numbers are made in epilogues too."""
    from zoo_cases import example, values_of

    from layoutopt.capture import capture
    from layoutopt.optimizers import Sgd, step_values

    module, batch, loss = example(name, dropout=dropout)
    optimizer = Sgd(lr=0.05, momentum=0.9)
    graph, _ = run_passes(capture(module, batch, loss=loss, optimizer=optimizer, keep_grads=True, dropout=dropout))
    after = with_epilogues(graph)
    assert len(epilogues(after)) > 4
    check_same(graph, after, values_of(graph, module, batch) | step_values(graph, 1))


def test_together_with_attention() -> None:
    graph = shipped("minilm")
    both = rewritten(graph, ["epilogue", "attention"])
    assert Counter(op.kind for op in both.ops)["attention"] == 6
    assert len(epilogues(both)) == 57  # the mask belongs to attention


# ---- case by case ---------------------------------------------------------------------------------------------------


def product(s: Sketch, name: str = "y", a: Any = "x", b: Any = "w", shape: tuple[int, ...] = (1, 6, 5)) -> None:
    s.op("contraction", [a, b], {name: shape}, alpha=0.5)


def sketch() -> Sketch:
    s = Sketch()
    s.tensor("x", (1, 6, 4), "input")
    s.tensor("w", (1, 4, 5), "parameter")
    s.tensor("bias", (5,), "parameter")
    s.tensor("r", (6, 5), "input")
    return s


BIAS = ("bias", expand(1, 6, 5))


def only(graph: TrainingGraph) -> Op:
    (op,) = with_epilogues(graph).ops
    return op


def test_bias_activation_residual_end_in_one_contraction() -> None:
    s = sketch()
    product(s)
    s.add("h", "y", BIAS)
    s.pointwise("act", GELU, "h")
    s.add("out", ("act", reshape(6, 5)), "r")
    graph = s.graph("step", "out")
    op = only(graph)
    assert [o.tensor for o in op.inputs] == ["x", "w", "bias", "r"]
    assert [o.tensor for o in op.outputs] == ["out"]
    assert op.attrs["alpha"] == 0.5
    check_same(graph, with_epilogues(graph), random_values(graph))


def test_results_that_others_read_stay_outputs() -> None:
    """The sum is read later, its activation is an output of the graph; both are written, the rest is not."""
    s = sketch()
    product(s)
    s.add("h", "y", BIAS)
    s.pointwise("act", GELU, "h")
    s.op("reduce", [("y", reshape(6, 5))], {"rows": (6,)}, fn="sum")
    graph = s.graph("step", "rows", "act")
    after = with_epilogues(graph)
    assert [op.kind for op in after.ops] == ["contraction", "reduce"]
    assert {o.tensor for o in after.ops[0].outputs} == {"act", "y"}
    check_same(graph, after, random_values(graph))


def test_another_view_of_the_result() -> None:
    """The pointwise op works on [tokens, features], the product on heads: its operands are seen through both."""
    s = Sketch()
    s.tensor("p", (6, 3, 3), "input")
    s.tensor("v", (6, 3, 4), "input")
    s.tensor("bias", (8,), "parameter")
    s.tensor("r", (9, 8), "input")
    s.op("contraction", ["p", "v"], {"o": (9, 8)})
    heads = (reshape(3, 3, 2, 4), permute(0, 2, 1, 3), reshape(6, 3, 4))
    s.ops[0] = Op("mm", "contraction", s.ops[0].inputs, (s.operand(("o", *heads)),))
    s.pointwise("out", [("mul", ("x", 0), ("x", 1)), ("add", ("t", 0), ("x", 2))], "o", ("bias", expand(9, 8)), "r")
    graph = s.graph("step", "out")
    op = only(graph)
    assert with_epilogues(graph).operand_shape(op.inputs[3]) == (6, 3, 4)
    check_same(graph, with_epilogues(graph), random_values(graph))


def test_gradients_accumulate_in_the_last_product() -> None:
    s = sketch()
    s.phase = "backward"
    for i in range(3):
        product(s, f"d{i}")
    terms = [("add", ("x", 0), ("x", 1)), ("add", ("t", 0), ("x", 2)), ("add", ("t", 1), ("x", 3))]
    s.pointwise("sum", terms, *((f"d{i}", reshape(6, 5)) for i in range(3)), "r")
    graph = s.graph("step", "sum")
    after = with_epilogues(graph)
    assert [len(op.inputs) for op in after.ops] == [2, 2, 5]
    check_same(graph, after, random_values(graph))


def test_an_op_runs_where_everything_is_known() -> None:
    """``r2`` is made after the product: it waits, since nobody reads the product before."""
    s = sketch()
    product(s)
    s.add("r2", "r", "r")
    s.add("out", ("y", reshape(6, 5)), "r2")
    graph = s.graph("step", "out")
    after = with_epilogues(graph)
    assert [op.name for op in after.ops] == [graph.ops[1].name, graph.ops[0].name]
    check_same(graph, after, random_values(graph))


def test_both_ways_at_once_are_none() -> None:
    """The pointwise op reads what another op makes of the product: no place serves both."""
    s = sketch()
    product(s)
    s.op("softmax", [("y", reshape(6, 5))], {"p": (6, 5)})
    s.add("out", ("y", reshape(6, 5)), "p")
    graph = s.graph("step", "out")
    assert with_epilogues(graph).ops == graph.ops


def test_operands_overwritten_meanwhile() -> None:
    """The product would have to wait until after its weight is updated: it must not."""
    s = sketch()
    s.phase = "update"
    product(s)
    s.sgd("w", "w")
    s.add("r2", ("w.new", reshape(20), ("slice", (0, 0, 5, 1)), expand(6, 5)), "r")
    s.add("out", ("y", reshape(6, 5)), "r2")
    graph = s.graph("step", "out")
    assert with_epilogues(graph).ops == graph.ops


def test_phases_and_updates_are_kept() -> None:
    s = sketch()
    product(s)
    s.phase = "backward"
    s.add("out", ("y", reshape(6, 5)), "r")
    graph = s.graph("step", "out")
    assert with_epilogues(graph).ops == graph.ops
    s = sketch()
    s.tensor("p", (6, 5), "parameter")
    s.phase = "update"
    product(s)
    s.sgd("p", ("y", reshape(6, 5)))
    graph = s.graph("step", "p.new")
    assert with_epilogues(graph).ops == graph.ops


def test_a_part_of_the_result_or_more_of_it() -> None:
    """Slices and broadcasts are not element by element."""
    for seen, other in (
        (("y", reshape(6, 5), ("slice", (1, 0, 3, 1))), ("r", ("slice", (1, 0, 3, 1)))),
        (("y", expand(2, 6, 5)), ("r", expand(2, 6, 5))),
    ):
        s = sketch()
        product(s)
        s.add("out", seen, other)
        graph = s.graph("step", "out")
        assert with_epilogues(graph).ops == graph.ops


def test_the_result_seen_in_two_ways() -> None:
    s = Sketch()
    s.tensor("x", (1, 5, 4), "input")
    s.tensor("w", (1, 4, 5), "parameter")
    s.op("contraction", ["x", "w"], {"y": (1, 5, 5)})
    s.add("out", "y", ("y", permute(0, 2, 1)))
    graph = s.graph("step", "out")
    assert with_epilogues(graph).ops == graph.ops


def test_too_many_operands_stay_outside() -> None:
    for count, merged in ((MOST_FULL - 1, True), (MOST_FULL, False)):
        s = sketch()
        for i in range(count):
            s.tensor(f"r{i}", (6, 5), "input")
        product(s)
        code = [("add", ("x", 0), ("x", 1)), *(("add", ("t", i), ("x", i + 2)) for i in range(count - 1))]
        s.pointwise("out", code, ("y", reshape(6, 5)), *(f"r{i}" for i in range(count)))
        graph = s.graph("step", "out")
        assert (len(with_epilogues(graph).ops) == 1) == merged


def test_nothing_lives_much_longer() -> None:
    """Far apart, a product stays where its operands die, unless its own result need not be kept for it."""

    def graph(known: bool, read: bool) -> TrainingGraph:
        s = sketch()
        if known:
            s.add("late", "r", "r")
        product(s)
        for i in range(20):
            s.add(f"n{i}", "r" if not i else f"n{i - 1}", "r")
        if not known:
            s.add("late", "n19", "r")
        s.add("out", ("y", reshape(6, 5)), "late")
        if read:
            s.op("reduce", [("y", reshape(6, 5))], {"rows": (6,)}, fn="sum")
        return s.graph("step", "out", "n19", *(["rows"] if read else []))

    for known, read in ((True, False), (True, True), (False, False)):
        before = graph(known, read)
        assert len(epilogues(with_epilogues(before))) == (known and not read)


def test_mixed_dtypes_are_cast_as_stored() -> None:
    """A mask of bools in between is a bool for whoever reads it, inside the epilogue too."""
    s = sketch()
    product(s)
    y = ("y", reshape(6, 5))
    s.pointwise("mask", [("gt", ("x", 0), ("c", 0.0))], y, dtype="bool")
    s.pointwise("out", [("float", ("x", 0)), ("mul", ("t", 0), ("x", 1))], "mask", y)
    graph = s.graph("step", "out", "mask")
    op = only(graph)
    assert {o.tensor for o in op.outputs} == {"out", "mask"}
    check_same(graph, with_epilogues(graph), random_values(graph))


def test_derivative_of_an_activation() -> None:
    s = sketch()
    s.tensor("h", (6, 5), "input")
    s.phase = "backward"
    product(s)
    s.pointwise("dh", GELU_GRAD, "h", ("y", reshape(6, 5)))
    graph = s.graph("step", "dh")
    op = only(graph)
    assert op.attrs["epilogue"].results[0][0] == "t"
    assert op.inputs[2] == Operand("h", op.inputs[2].view)
    assert isinstance(op.attrs["epilogue"], Expr)
    check_same(graph, with_epilogues(graph), random_values(graph))
