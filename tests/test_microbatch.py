"""Micro-batches: the same loss, gradients and updates as the whole batch, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kernels.reference import run
from layoutopt import graphfile
from layoutopt.blocks import find_blocks
from layoutopt.capture_random import NO_DROPOUT, SEED
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import batch_axes, in_micro_batches, leading_axes, micro_batches
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.rewrite_neighbours import bring_together
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import REWRITES, rewritten
from tests.graphs import Sketch, attention_step, linear_step, random_values, result_values

EXACT = 1e-9
"""Of the largest element: the sums are added up in another order, in float64."""


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """All results, element by element."""
    assert got.keys() >= expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max(initial=1e-30)
        np.testing.assert_allclose(got[name], value, rtol=0, atol=EXACT * scale + 1e-15, err_msg=name)


@lru_cache
def whole(batch: int) -> TrainingGraph:
    return run_passes(linear_step(batch=batch))[0]


def results(graph: TrainingGraph, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return result_values(graph, run(graph, values))


@pytest.mark.parametrize(("batch", "count"), [(6, 3), (6, 2), (6, 6), (7, 7), (20, 10)])
@pytest.mark.parametrize("ignored", ["none", "some", "a whole micro-batch"])
def test_a_step_in_micro_batches_is_the_step_of_the_batch(batch: int, count: int, ignored: str) -> None:
    """Targets that are ignored count for nothing, wherever they are; the logits are those of all samples."""
    graph = in_micro_batches(whole(batch), count)
    values = random_values(whole(batch), 1)
    if ignored == "some":
        values["labels"][0, 1:] = -100
    elif ignored != "none":
        values["labels"][: batch // count] = -100
    assert_same(results(graph, values), results(whole(batch), values))


@pytest.mark.parametrize("name", [name for name in REWRITES if name != "half"])
def test_rewrites_leave_the_step_the_same(name: str) -> None:
    graph = in_micro_batches(whole(6), 3)
    values = random_values(whole(6), 1)
    assert_same(results(rewritten(graph, [name]), values), results(graph, values))


def test_all_rewrites_together() -> None:
    graph = in_micro_batches(whole(6), 3)
    values = random_values(whole(6), 1)
    after = rewritten(graph, [name for name in REWRITES if name != "half"])
    assert_same(results(after, values), results(graph, values))
    added = [op for op in after.ops if op.kind == "contraction" and op.inplace]
    assert len(added) == 4, "two weights' gradients are added where they are made, twice each"


def test_a_mean_of_squares() -> None:
    """Not a cross-entropy: each micro-batch divides by the whole batch."""
    full = run_passes(attention_step(batch=6))[0]
    values = random_values(full, 2)
    assert_same(results(in_micro_batches(full, 3), values), results(full, values))


def test_one_micro_batch_is_the_graph_itself() -> None:
    assert in_micro_batches(whole(2), 1) is whole(2)


def test_what_the_file_keeps(tmp_path: Any) -> None:
    graph = in_micro_batches(whole(6), 3)
    graphfile.save(graph, tmp_path / "g.graph")
    again = graphfile.load(tmp_path / "g.graph")
    assert (again.hash, micro_batches(again), batch_axes(again)) == (graph.hash, 3, {"x": 0, "labels": 0})


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["as cut", "neighbours", "every rewrite"])
def test_one_micro_batch_of_activations_is_alive_at_a_time(after: str) -> None:
    """What stays is what a step always holds, its inputs and outputs, and a gradient and its sum."""
    names = {"as cut": [], "neighbours": ["neighbours"]}.get(after, [n for n in REWRITES if n != "half"])
    graph = shipped("vit-digits")
    peaks = {count: peak_bytes(rewritten(in_micro_batches(graph, count), names)) for count in (1, 2, 4, 8)}
    weights = sum(t.size_elems * 4 for t in graph.by_role("parameter"))
    held = weights + sum(t.size_elems * 4 for t in graph.by_role("input", "state")) + graph.tensors["logits"].size_elems
    for count in (2, 4, 8):
        assert peaks[count] <= held + 2 * weights + (peaks[1] - held) / count + 8192
        assert peaks[count] < peaks[count // 2]


def test_micro_batches_are_not_interleaved() -> None:
    """Equal ops are brought together within a micro-batch, and none leaves it."""
    graph = in_micro_batches(shipped("vit-digits"), 4)
    together = bring_together(graph)
    assert [op.name for op in together.ops] != [op.name for op in graph.ops]
    parts = [int(op.name.rpartition("@")[2]) for op in together.ops if "@" in op.name and op.phase != "update"]
    assert parts == sorted(parts)
    assert set(parts) == {0, 1, 2, 3}


def test_further_micro_batches_are_one_block() -> None:
    """Planning sees that they are the same ops over again."""
    graph = in_micro_batches(shipped("vit-digits"), 8)
    covered = sum(b.stop - b.start for b in find_blocks(graph))
    assert covered > 0.9 * len(graph.ops)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_which_inputs_hold_samples() -> None:
    assert leading_axes({"a": (3, 5), "b": (3,), "table": (5, 5), "c": (3, 3)}) == {"a": 0, "b": 0, "c": 0}
    assert leading_axes({"a": (4, 5), "b": (7,)}) == {"a": 0}
    assert leading_axes({}) == {}


def test_an_input_that_all_samples_share() -> None:
    """It keeps its shape, and what hangs on it alone is calculated once."""
    full = shared_input(6)
    three = in_micro_batches(full, 3)
    assert three.tensors["table"].shape == (5, 3)
    assert three.tensors["x"].shape == (6, 5)
    assert [op.name for op in three.ops if op.outputs[0].tensor == "twice"] == ["op0.pointwise"]
    values = random_values(full, 3)
    assert_same(results(three, values), results(full, values))


def shared_input(batch: int) -> TrainingGraph:
    s = Sketch()
    s.tensor("x", (batch, 5), "input")
    s.tensor("labels", (batch,), "input", "int32")
    s.tensor("table", (5, 3), "input")
    s.tensor("w", (5, 3), "parameter")
    s.tensor("one", (), "constant", value=1.0)
    s.pointwise("twice", [("exp", ("x", 0)), ("add", ("t", 0), ("c", 2.0))], "table")
    s.op("reduce", ["twice"], {"rows": (5,)}, fn="max")
    s.pointwise("xs", [("mul", ("x", 0), ("x", 1))], "x", ("rows", ("expand", (batch, 5))))
    s.op("contraction", [("xs", ("reshape", (1, batch, 5))), ("w", ("reshape", (1, 5, 3)))], {"y": (1, batch, 3)})
    logits = ("y", ("reshape", (batch, 3)))
    s.phase = "loss"
    s.op("cross_entropy", [logits, "labels"], {"loss": (), "lse": (batch,), "weight": ()}, ignore_index=-100)
    s.phase = "backward"
    s.op("cross_entropy_grad", ["one", logits, "labels", "lse", "weight"], {"dy": (batch, 3)}, ignore_index=-100)
    transposed = ("xs", ("permute", (1, 0)), ("reshape", (1, 5, batch)))
    s.op("contraction", [transposed, ("dy", ("reshape", (1, batch, 3)))], {"dw": (1, 5, 3)})
    s.sgd("w", ("dw", ("reshape", (5, 3))))
    graph = s.graph("shared", "loss")
    return graph.with_ops(graph.ops, meta={"batch_axes": {"x": 0, "labels": 0}})


def test_outputs_beyond_a_mebibyte_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from layoutopt import microbatch

    graph = whole(6)
    whole_bytes = graph.tensors["logits"].size_elems * 4
    monkeypatch.setattr(microbatch, "LEAST_BYTES", whole_bytes + 1)
    assert in_micro_batches(graph, 3).outputs == ("loss", "logits")
    monkeypatch.setattr(microbatch, "LEAST_BYTES", whole_bytes)
    less = in_micro_batches(graph, 3)
    assert less.outputs == ("loss",)
    assert less.meta["outputs_left_out"] == ["logits"]


# ---- refused ---------------------------------------------------------------------------------------------------------


def changed(graph: TrainingGraph, **changes: Any) -> TrainingGraph:
    return graph.with_ops(graph.ops, **changes)


def test_a_sum_of_losses() -> None:
    """Its parts are added up; what is added to it besides would be added once per micro-batch."""
    full = with_loss("sum")
    values = random_values(full, 2)
    assert_same(results(in_micro_batches(full, 3), values), results(full, values))


def with_loss(fn: str) -> TrainingGraph:
    """A step over six samples whose loss is another reduction."""
    graph = run_passes(attention_step(batch=6))[0]
    made = graph.producer[graph.outputs[0]]
    return graph.with_ops([replace(op, attrs={"fn": fn}) if op is made else op for op in graph.ops])


@pytest.mark.parametrize(
    ("graph", "count", "says"),
    [
        (lambda: whole(6), 0, "6 samples .* cannot be cut into 0 equal micro-batches: choose one of 1, 2, 3, 6"),
        (lambda: whole(6), 4, "cannot be cut into 4 equal micro-batches: choose one of 1, 2, 3, 6"),
        (lambda: whole(6), 12, "cannot be cut into 12 equal"),
        (lambda: whole(1), 2, "takes one sample"),
        (lambda: rewritten(whole(2), ["epilogue"]), 2, "is not as captured"),
        (lambda: in_micro_batches(whole(4), 2), 2, "runs 2 micro-batches of 2 samples already"),
        (lambda: with_loss("max"), 2, "the loss of graph 'attention step' is made by reduce max: micro-batches need"),
        (lambda: changed(whole(2), meta={"batch_axes": {}}), 2, "takes one sample"),
        (lambda: changed(whole(2), meta={"batch_axes": {"labels": 5}}), 2, "batch axis 5 of input 'labels'"),
        (
            lambda: whole(2).with_ops([op for op in whole(2).ops if op.phase in ("forward", "loss")]),
            2,
            "has no gradients to add up",
        ),
    ],
    ids=[
        "none",
        "not equal",
        "too many",
        "one sample",
        "rewritten",
        "twice",
        "max",
        "no samples",
        "no axis",
        "no gradients",
    ],
)
def test_refused(graph: Callable[[], TrainingGraph], count: int, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        in_micro_batches(graph(), count)


# ---- beside torch ----------------------------------------------------------------------------------------------------


@lru_cache
def case(name: str, optimizer: str) -> tuple[Any, dict[str, Any], Any, TrainingGraph, TrainingGraph]:
    """A model with weights and six samples, and its steps: over all at once, and in three micro-batches."""
    from layoutopt.capture import capture
    from layoutopt.optimizers import AdamW, Sgd
    from tests.zoo_cases import example, random_batch

    chosen = {"sgd": Sgd(lr=0.1, momentum=0.9), "adamw": AdamW(lr=1e-2)}[optimizer]
    module, batch, loss = example(name)
    more = random_batch({key: t.repeat(2, *(1 for _ in t.shape[1:])) for key, t in batch.items()}, module)
    if "attention_mask" in more:
        more["attention_mask"][:] = more["attention_mask"].clamp(min=0)
        more["attention_mask"][:, 0] = 1
    full = run_passes(capture(module, more, loss=loss, optimizer=chosen, keep_grads=True))[0]
    return module, more, loss, full, in_micro_batches(full, 3)


@pytest.mark.peer
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["bert-tiny", "vit-odd", "gpt2-odd", "unet-odd"])
def test_beside_the_whole_batch_and_torch(name: str, optimizer: str) -> None:
    """Labels of the language model are ignored in places; the UNet's loss is a mean of squares."""
    from layoutopt.optimizers import step_values
    from tests.zoo_cases import gradient_errors, values_of, wide_step

    module, batch, loss, full, three = case(name, optimizer)
    values = values_of(full, module, batch) | step_values(full, 1)
    known = {n: v for n, v in values.items() if n in full.tensors}
    got = run(three, known)
    assert_same(result_values(three, got), results(full, known))
    value, gradients = wide_step(module, batch, loss)
    assert float(got["loss"]) == pytest.approx(value, rel=1e-6)
    names = {t.of: t.name for t in three.by_role("gradient") if t.of and t.name in three.outputs}
    errors = gradient_errors({f"grad:{of}": got[n] for of, n in names.items()}, gradients)
    assert max(errors.values()) <= 1e-5, max(errors, key=lambda n: errors[n])


@pytest.mark.peer
def test_a_contrastive_loss_is_refused() -> None:
    """Its samples meet in one matrix: micro-batches would compare each with fewer others."""
    from layoutopt.zoo import capture_zoo

    with pytest.raises(GraphError, match="is made by pointwise: micro-batches need one mean or sum over samples"):
        in_micro_batches(run_passes(capture_zoo("clip-odd", batch=4))[0], 2)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("mixed", "says"),
    [
        (
            lambda x: (x - x.mean(0)) / ((x - x.mean(0)).square().mean(0) + 1e-5).sqrt(),
            r"takes a mean over the samples that is not the loss",
        ),
        (lambda x: x - x.sum(0), r"joins single samples with .*, which is made of all of them"),
        (lambda x: x * x.amax(0), r"takes the largest of several samples"),
        (lambda x: x.softmax(0), r"works across the samples"),
        (lambda x: x @ x.t() @ x, r"compares samples with one another"),
        (lambda x: x[1:].sum() + x, r"takes the samples in .* apart"),
        (lambda x: x.reshape(2, 3, 5).sum(0).repeat(2, 1), r"takes the samples in .* apart"),
    ],
    ids=["batch normalisation", "a sum", "the largest", "softmax", "products", "some samples", "halves"],
)
def test_samples_that_need_one_another_are_refused(mixed: Callable[[Any], Any], says: str) -> None:
    import torch

    from layoutopt.capture import capture
    from layoutopt.optimizers import Sgd

    class Mixing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(5, 5)

    def loss(module: Any, batch: Any) -> Any:
        out = mixed(module.linear(batch["x"]))
        return (out * out).mean(), {"out": out}

    graph = run_passes(capture(Mixing(), {"x": torch.randn(6, 5)}, loss=loss, optimizer=Sgd()))[0]
    with pytest.raises(GraphError, match=r"cannot run in micro-batches: op .*" + says):
        in_micro_batches(graph, 2)


@pytest.mark.peer
def test_micro_batches_drop_what_the_whole_batch_drops() -> None:
    from layoutopt.zoo import capture_zoo

    full = run_passes(capture_zoo("bert-tiny", batch=4, dropout=True))[0]
    two = in_micro_batches(full, 2)
    values = random_values(full, 4)
    if "attention_mask" in values:
        values["attention_mask"] = np.ones_like(values["attention_mask"])
    for seed in (5, NO_DROPOUT):
        drawn = values | {SEED: np.array(seed, np.int32)}
        assert_same(results(two, drawn), results(full, drawn))
    kept = run(two, values | {SEED: np.array(NO_DROPOUT)})["logits"]
    assert np.abs(kept - run(two, values | {SEED: np.array(5)})["logits"]).max() > 1e-3
