"""A loss over a large vocabulary in pieces: the same gradients, one piece's logits at a time, and plans that use it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from kernels import reference
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import planner, rewrites
from layoutopt.errors import LayoutOptError
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.microbatch import in_micro_batches
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrite_neighbours import bring_together
from layoutopt.rewrite_pieces import in_pieces
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import alternatives, before_family, in_order, origin_of, rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import linear_step, random_values
from tests.test_rewrite_updates import overwriting


@lru_cache(maxsize=1)
def small() -> TrainingGraph:
    return run_passes(linear_step(batch=4, seq=5, classes=9))[0]


@lru_cache(maxsize=1)
def large() -> TrainingGraph:
    """128 rows of 4096 classes."""
    return run_passes(linear_step(batch=8, seq=16, width=6, hidden=8, classes=4096))[0]


def capped(graph: TrainingGraph) -> TrainingGraph:
    """The step with ``3 * tanh(logits / 3)`` for its logits, and the derivative of that."""
    product = graph.producer["logits"]
    gradient = next(op for op in graph.ops if op.kind == "cross_entropy_grad")
    raw, inner, outer = "raw", "tanh", gradient.outputs[0].tensor
    t = graph.tensors["logits"]
    tensors = {
        **graph.tensors,
        raw: Tensor(raw, t.shape),
        inner: Tensor(inner, t.shape),
        "inner": Tensor("inner", graph.tensors[outer].shape, role="gradient"),
    }
    cap = Expr((("div", ("x", 0), ("c", 3.0)), ("tanh", ("t", 0)), ("mul", ("t", 1), ("c", 3.0))), (("t", 2), ("t", 1)))
    slope = Expr((("mul", ("x", 1), ("x", 1)), ("sub", ("c", 1.0), ("t", 0)), ("mul", ("x", 0), ("t", 1))), (("t", 2),))
    ops: list[Op] = []
    for op in graph.ops:
        if op is product:
            ops.append(Op(op.name, op.kind, op.inputs, (Operand(raw, op.outputs[0].view),), op.attrs, op.phase))
            ops.append(
                Op("cap", "pointwise", (Operand(raw),), (Operand("logits"), Operand(inner)), {"expr": cap}, "forward")
            )
        elif op is gradient:
            ops.append(Op(op.name, op.kind, op.inputs, (Operand("inner"),), op.attrs, op.phase))
            inputs = (Operand("inner"), Operand(inner))
            ops.append(Op("slope", "pointwise", inputs, (Operand(outer),), {"expr": slope}, "backward"))
        else:
            ops.append(op)
    return graph.with_ops(ops, tensors=tensors)


def updated(graph: TrainingGraph) -> list[str]:
    return [t.name for t in graph.tensors.values() if t.of]


def assert_same_step(before: TrainingGraph, after: TrainingGraph, values: dict[str, np.ndarray]) -> None:
    """Loss and updates, calculated in float64."""
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in values.items()}
    one, other = (reference.run(g, wide, np.float64) for g in (before, after))
    for name in ("loss", *updated(before)):
        np.testing.assert_allclose(other[name], one[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("count", [2, 3, 7, 20, 999])
@pytest.mark.parametrize("ignored", ["none", "some", "a whole piece"])
def test_the_same_gradients_in_float64(count: int, ignored: str) -> None:
    graph, values = small(), random_values(small(), count)
    if ignored == "some":
        values["labels"][1, 1:] = -100
    elif ignored != "none":
        values["labels"][:2] = -100
    changed = in_pieces(graph, str(count), 1, 1)
    pieces = [op for op in changed.ops if op.kind == "cross_entropy"]
    assert len(pieces) == min(count, 20)
    assert_same_step(graph, changed, values)


def test_a_soft_cap_is_cut_along() -> None:
    graph = capped(small())
    changed = in_pieces(graph, "3", 1, 1)
    assert sum(op.name.startswith("cap.") for op in changed.ops) == 3
    assert sum(op.name.startswith("slope.") for op in changed.ops) == 3
    assert_same_step(graph, changed, random_values(graph, 5))


def test_each_micro_batch_is_cut() -> None:
    """The gradient divides by the targets of the whole batch, which are counted before."""
    graph = in_micro_batches(small().with_ops(small().ops, outputs=("loss",)), 2)
    changed = in_pieces(graph, "2", 1, 1)
    assert sum(op.kind == "cross_entropy" for op in changed.ops) == 4
    values = random_values(small(), 3)
    values["labels"][2:] = -100
    assert_same_step(graph, changed, values)


def test_after_all_rewrites_nobody_reads_what_is_gone() -> None:
    graph = large()
    values = random_values(graph, 1)
    before = overwriting(graph, values)
    names = [name for name in rewrites.REWRITES if name != "half"]
    changed = rewritten(graph, ["pieces:4", *names])
    after = overwriting(changed, values)
    assert sum(op.kind == "cross_entropy" for op in changed.ops) == 4
    for name in updated(graph):
        np.testing.assert_allclose(after[name], before[name], rtol=2e-4, atol=1e-6, err_msg=name)
    # The contraction adds to what the pieces before it gave.
    assert any(op.kind == "contraction" and op.inplace for op in changed.ops)


def test_one_piece_of_logits_is_alive_at_a_time() -> None:
    """Also where equal ops are brought together."""
    graph = large()
    logits = 8 * 16 * 4096 * 4
    changed = in_pieces(graph, "4")
    assert peak_bytes(graph) > 2 * logits
    for order in (changed, bring_together(changed)):
        assert peak_bytes(order) < logits


@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "whisper-large-v3", "opt-350m"])
def test_language_models_that_ship_are_cut(name: str) -> None:
    graph = shipped(name)
    changed = in_pieces(graph, "2")
    assert sum(op.kind == "cross_entropy" for op in changed.ops) == 2
    assert set(changed.outputs) == {"loss"}
    assert peak_bytes(changed) < peak_bytes(graph)


def test_what_stays_as_it_is() -> None:
    graph = small()
    assert in_pieces(graph, "4") is graph  # small logits may be wanted
    assert in_pieces(large(), "4", least_rows=128) is large()  # too few rows
    gradient = next(op for op in graph.ops if op.kind == "cross_entropy_grad")
    kept = graph.with_ops(graph.ops, outputs=(*graph.outputs, gradient.outputs[0].tensor))
    assert in_pieces(kept, "2", 1, 1) is kept
    reader = Op("peek", "pointwise", (Operand("logits"),), (Operand("seen"),), {"expr": Expr((), (("x", 0),))}, "loss")
    peeked = graph.with_ops(
        [*graph.ops[:-5], reader, *graph.ops[-5:]],
        tensors={**graph.tensors, "seen": Tensor("seen", graph.tensors["logits"].shape)},
        outputs=("loss", "seen"),
    )
    assert in_pieces(peeked, "2", 1, 1) is peeked


@pytest.mark.parametrize("count", ["0", "1", "-2", "two", "2.5", ""])
def test_other_counts_are_refused(count: str) -> None:
    with pytest.raises(LayoutOptError, match="number of pieces from 2"):
        in_pieces(small(), count)


def test_its_place_among_the_others() -> None:
    assert in_order(["anew:3", "epilogue", "pieces:4", "recompute"]) == ("pieces:4", "recompute", "epilogue", "anew:3")
    assert before_family(["anew:3", "pieces:4", "reuse"], "anew") == ("pieces:4",)
    tried = [origin_of(g)[1] for g in alternatives(large(), smaller=True)]
    assert any("pieces:4" in names for names in tried)
    assert not any("pieces:4" in origin_of(g)[1] for g in alternatives(large()))


def test_a_budget_that_the_logits_exceed() -> None:
    graph, costs = large(), FakeCosts()
    roomy = planner.plan(graph, costs, "greedy")
    made = planner.plan(graph, costs, "greedy", roomy.arena_bytes // 2)
    assert made.arena_bytes <= roomy.arena_bytes // 2
    assert any(name.startswith("pieces:") for name in made.rewrites)
    planner.validate(made, graph, costs)


@pytest.mark.parametrize("storage", ["fp32", "fp16"])
def test_a_step_on_the_device(device_index: int, storage: str) -> None:
    runtime = Runtime(devices()[device_index])
    graph = large()
    values = random_values(graph, 7)
    values["labels"][3, 4:] = -100
    inputs = {t.name: values[t.name] for t in graph.by_role("input")}
    starts = {t.name: values[t.name] for t in graph.by_role("parameter", "state")}
    expected = reference.run(graph, values)
    stored = list(rewrites.STORAGES[storage])
    names = ["pieces:4", "epilogue", "neighbours", *(["apply"] if not stored else []), *stored]
    plan = planner.plan(graph, FakeCosts(runtime.limits), rewrites=names)
    assert "pieces:4" in plan.rewrites
    run = Executor(runtime, graph, plan, starts, poison=True)
    run.step(inputs)
    rough = 1.0 if not stored else 100.0
    assert run.loss() == pytest.approx(float(expected["loss"]), rel=1e-5 * rough)
    for tensor in graph.tensors.values():
        if tensor.of:
            np.testing.assert_allclose(
                run.read(tensor.of), expected[tensor.name], rtol=1e-4 * rough, atol=1e-5 * rough, err_msg=tensor.name
            )
