"""The loop: every sample once an epoch, an order that only seed and epoch decide, resuming, schedules, bad losses."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest

from layoutopt.capture_random import NO_DROPOUT
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import Tensor, TrainingGraph
from layoutopt.train import IGNORE, Dataset, Schedule, batch_size, evaluate, fit
from tests.graphs import Sketch

CLASSES = 3


def graph(batch: int = 4) -> TrainingGraph:
    """x[batch, 3] → loss, logits; what the ops are does not matter here."""
    s = Sketch()
    s.tensor("x", (batch, CLASSES), "input")
    s.tensor("labels", (batch,), "input", "int32")
    s.tensor("lr", (), "input")
    (logits,) = s.op("log_softmax", ["x"], {"logits": (batch, CLASSES)})
    s.op("nll_loss", [logits, "labels"], {"loss": (), "weight": ()}, ignore_index=IGNORE)
    made = s.graph("fake", "loss", "logits")
    return made.with_ops(made.ops, meta={"optimizer": {"name": "sgd", "momentum": 0.0}})


class Fake:
    """Records what it is fed; the loss of step n is n unless said otherwise; logits are the inputs."""

    def __init__(self, batch: int = 4, losses: Mapping[int, float] | None = None) -> None:
        self.graph = graph(batch)
        self.fed: list[dict[str, np.ndarray]] = []
        self.forwarded: list[dict[str, np.ndarray]] = []
        self.losses = dict(losses or {})

    def step(self, inputs: Mapping[str, np.ndarray]) -> None:
        self.fed.append(dict(inputs))

    def forward(self, inputs: Mapping[str, np.ndarray]) -> None:
        self.forwarded.append(dict(inputs))

    def read(self, name: str) -> np.ndarray:
        if name == "loss":
            return np.asarray(self.losses.get(len(self.fed), float(len(self.fed))))
        return self.forwarded[-1]["x"]

    def samples(self) -> list[list[int]]:
        """First values of the real samples, batch by batch: they number the samples."""
        return [[int(x) for x, t in zip(f["x"][:, 0], f["labels"], strict=True) if t != IGNORE] for f in self.fed]


def data(count: int, dtype: type = np.int32) -> Dataset:
    x = np.zeros((count, CLASSES), np.float32)
    x[:, 0] = np.arange(count)
    return Dataset({"x": x, "labels": (np.arange(count) % CLASSES).astype(dtype)})


def run(executor: Fake, count: int = 10, epochs: int = 1, **more):
    seen: list[tuple[int, float]] = []
    settings = {"schedule": Schedule(0.5, 100), "on_step": lambda s, loss: seen.append((s, loss))} | more
    history = fit(executor, data(count), epochs=epochs, **settings)
    return history, seen, [round(float(fed["lr"]), 4) for fed in executor.fed]


@pytest.mark.parametrize("count", [1, 3, 4, 8, 10])
def test_every_sample_counts_once_an_epoch(count: int) -> None:
    executor = Fake()
    run(executor, count, epochs=2)
    per_epoch = -(-count // 4)
    assert len(executor.fed) == 2 * per_epoch
    for epoch in (0, 1):
        batches = executor.samples()[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for batch in batches for i in batch) == list(range(count))
    assert all(f["x"].shape == (4, CLASSES) for f in executor.fed)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int8])
def test_the_last_batch_is_filled_with_samples_that_are_ignored(dtype: type) -> None:
    samples = data(6, dtype)
    (first, real), (last, rest) = samples.batches(4)
    assert (real, rest) == (4, 2)
    assert first["labels"].tolist() == [0, 1, 2, 0]
    assert last["labels"].tolist() == [1, 2, IGNORE, IGNORE]
    assert last["x"][:, 0].tolist() == [4, 5, 4, 5]  # finite samples, so that 0 times their loss is 0
    assert samples.inputs["labels"].tolist() == [0, 1, 2, 0, 1, 2]


def test_the_order_hangs_on_seed_and_epoch_alone() -> None:
    runs = {}
    for name, epochs, seed in (("a", 3, 1), ("b", 1, 1), ("c", 3, 2)):
        executor = Fake()
        run(executor, 10, epochs=epochs, seed=seed)
        runs[name] = executor.samples()
    assert runs["a"][:3] == runs["b"]
    assert runs["a"][:3] != runs["a"][3:6]
    assert runs["a"][:3] != runs["c"][:3]


@pytest.mark.parametrize("taken", range(7))
def test_resuming_takes_exactly_the_steps_that_are_left(taken: int) -> None:
    whole, resumed = Fake(), Fake()
    _, seen, rates = run(whole, 10, epochs=2, seed=3)
    _, seen_after, rates_after = run(resumed, 10, epochs=2, seed=3, first_step=taken)
    assert resumed.samples() == whole.samples()[taken:]
    assert [s for s, _ in seen_after] == [s for s, _ in seen][taken:]
    assert rates_after == rates[taken:]


def test_stopping_within_an_epoch() -> None:
    executor = Fake()
    history, seen, _ = run(executor, 10, epochs=5, last_step=4)
    assert history.losses == [1, 2, 3, 4]
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert len(history.epoch_seconds) == 1


def test_the_optimizer_is_told_step_and_rate() -> None:
    executor = Fake()
    _, _, rates = run(executor, 8, epochs=2, schedule=lambda step: step / 10)
    assert rates == [0.1, 0.2, 0.3, 0.4]


def test_constant_rate() -> None:
    assert {Schedule(0.3, 10)(step) for step in range(1, 11)} == {0.3}


def test_warm_up_and_cosine() -> None:
    schedule = Schedule(2.0, 10, warmup_steps=4, cosine=True)
    rates = [schedule(step) for step in range(1, 12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[6] == pytest.approx(1.0)  # half way from step 4 to step 10
    assert rates[9] == pytest.approx(0.0, abs=1e-12)
    assert rates[10] == pytest.approx(0.0, abs=1e-12)  # beyond the end it stays
    assert all(a > b for a, b in pairwise(rates[3:10]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run(bad: float) -> None:
    executor = Fake(losses={3: bad})
    with pytest.raises(LayoutOptError, match=f"the loss of step 3 is {bad}: lower --lr"):
        run(executor, 10, epochs=2)
    assert len(executor.fed) == 3


def test_evaluation_counts_real_samples_and_updates_nothing() -> None:
    executor = Fake()
    x = np.eye(CLASSES, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
    held_out = Dataset({"x": x, "labels": np.array([0, 1, 2, 1, 1, 0], np.int32)})
    accuracy, logits = evaluate(executor, held_out)
    assert accuracy == pytest.approx(4 / 6)
    np.testing.assert_array_equal(logits, x)
    assert executor.fed == []
    assert set(executor.forwarded[0]) == {"x", "labels", "lr"}


def test_dropout_has_a_seed_for_every_step_and_is_off_in_evaluation() -> None:
    def seeds(seed: int) -> list[int]:
        executor = Fake()
        tensors = executor.graph.tensors | {"seed": Tensor("seed", (), "int32", "input")}
        executor.graph = executor.graph.with_ops(executor.graph.ops, tensors=tensors)
        run(executor, 8, epochs=2, seed=seed)
        assert [f["seed"].dtype for f in executor.fed] == [np.int32] * 4
        evaluate(executor, data(4))
        assert executor.forwarded[0]["seed"] == NO_DROPOUT
        return [int(f["seed"]) for f in executor.fed]

    assert len(set(seeds(3))) == 4
    assert seeds(3) == seeds(3) != seeds(4)
    assert NO_DROPOUT not in seeds(3)


def test_evaluation_needs_an_output_beside_the_loss() -> None:
    executor = Fake()
    executor.graph = executor.graph.with_ops(executor.graph.ops, outputs=("loss",))
    with pytest.raises(GraphError, match="no output beside its loss"):
        evaluate(executor, data(4))


def test_splits_are_disjoint_complete_and_fixed() -> None:
    whole = data(50)
    training, held_out = whole.split(0.2, seed=1)
    again, _ = whole.split(0.2, seed=1)
    other, _ = whole.split(0.2, seed=2)
    rows = [d.inputs["x"][:, 0].tolist() for d in (training, held_out, again, other)]
    assert (len(training), len(held_out)) == (40, 10)
    assert sorted(rows[0] + rows[1]) == list(range(50))
    assert rows[0] == rows[2] != rows[3]
    with pytest.raises(LayoutOptError, match="cannot hold out 20% of 2 samples"):
        data(2).split(0.2, seed=0)


def test_datasets_that_are_none() -> None:
    labels = np.zeros(3, np.int32)
    with pytest.raises(LayoutOptError, match="one length"):
        Dataset({"x": np.zeros((4, 1)), "labels": labels})
    with pytest.raises(LayoutOptError, match="include 'labels'"):
        Dataset({"x": np.zeros((3, 1))})
    with pytest.raises(LayoutOptError, match="no samples"):
        Dataset({"labels": labels[:0]})


def test_a_graph_without_targets_has_no_batch() -> None:
    assert batch_size(graph(6)) == 6
    for name in ("x.absent", "lr"):
        with pytest.raises(GraphError, match=f"no batch of targets named '{name}'; its inputs are x, labels, lr"):
            batch_size(graph(), name)
