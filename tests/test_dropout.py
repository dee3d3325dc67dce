"""Dropout by a hash of seed and place: statistics, and one mask for the forward and the backward pass."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import run
from layoutopt.capture_random import NO_DROPOUT
from layoutopt.errors import GraphError
from layoutopt.expr import random_uniform
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import Sgd, evaluation_values, step_values
from layoutopt.passes import run_passes

N = 1 << 18
PLACE = np.arange(N, dtype=np.int64)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**31 - 1])
def test_numbers_are_uniform_and_have_no_pattern(seed: int) -> None:
    u = random_uniform(np.array(seed), np.array(3), PLACE)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert (u * 2**24 == np.floor(u * 2**24)).all()
    counts = np.histogram(u, 64, (0, 1))[0]
    chi = float(((counts - N / 64) ** 2 / (N / 64)).sum())
    assert 25 < chi < 120, "chi squared of 63 degrees of freedom: mean 63, deviation 11"
    centred = (u - 0.5) * np.sqrt(12)
    for lag in (1, 2, 3, 7, 64, 128, 257, 768, 4096):
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) < 5 / np.sqrt(N), lag


@pytest.mark.parametrize(("one", "other"), [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((7, 2), (8, 1)), ((5, 9), (9, 5))])
def test_seeds_and_streams_are_independent(one: tuple[int, int], other: tuple[int, int]) -> None:
    a, b = (random_uniform(np.array(s), np.array(t), PLACE) - 0.5 for s, t in (one, other))
    assert abs(float((a * b).mean()) * 12) < 5 / np.sqrt(N)
    assert not np.array_equal(np.sort(a), np.sort(b))


def dropping(p: float) -> tuple[TrainingGraph, np.ndarray]:
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional as F

    from layoutopt.capture import capture

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.linspace(0.5, 2.0, 40))
            self.drop = nn.Dropout(p)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.dropout(torch.exp(self.drop(x * self.a) * 0.1), p, self.training))

    x = torch.ones(30, 7, 40)
    graph = capture(Two(), (x,), loss=lambda m, b: ((y := m(*b)).square().mean(), y), dropout=True, keep_grads=True)
    return graph, x.numpy()


pytestmark = pytest.mark.peer


def test_the_share_that_is_dropped() -> None:
    graph, x = dropping(0.3)
    values = {"a": np.full(40, 2.0), "input_0": x}
    seen = [run(graph, {**values, "seed": np.array(s)})["output"] for s in range(6)]
    kept = [(y != 0).mean() for y in seen]
    assert abs(np.mean(kept) - 0.7) < 5 * np.sqrt(0.21 / (6 * x.size))
    assert len({y.tobytes() for y in seen}) == 6
    again = run(graph, {**values, "seed": np.array(2)})["output"]
    np.testing.assert_array_equal(again, seen[2])
    # What is kept is scaled: exp(0.1 * 2/0.7) / 0.7 or 1 / 0.7 under the tanh.
    np.testing.assert_allclose(
        np.unique(np.round(seen[0], 9)), np.unique(np.round(np.tanh([0, 1 / 0.7, np.exp(0.2 / 0.7) / 0.7]), 9))
    )


@pytest.mark.parametrize("passes", [False, True], ids=["captured", "after passes"])
def test_backward_uses_the_forward_mask(passes: bool) -> None:
    """The gradient against finite differences of the loss under the same seed; another mask would be far off."""
    graph, x = dropping(0.4)
    if passes:
        graph, _ = run_passes(graph)
        assert not any(t.dtype == "bool" and t.size_elems == x.size for t in graph.tensors.values()), "a mask is kept"
        programs = [op.attrs["expr"].code for op in graph.ops if op.kind == "pointwise"]
        assert sum(any(i[0] == "rand" for i in code) for code in programs) == 2, "one forward, one backward"
    a = np.linspace(0.5, 2.0, 40)
    values = {"input_0": x, "seed": np.array(11)}
    grad = run(graph, {**values, "a": a})["grad:a"]
    for i in (0, 7, 39):
        step = np.zeros(40)
        step[i] = 1e-5
        high, low = (float(run(graph, {**values, "a": a + s})["loss"]) for s in (step, -step))
        assert grad[i] == pytest.approx((high - low) / 2e-5, rel=1e-6)


def test_dropout_is_off_unless_asked_for() -> None:
    torch = pytest.importorskip("torch")
    from layoutopt.capture import capture

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))
    off = capture(module, (torch.zeros(2, 3),), loss=lambda m, b: (m(*b).mean(), m(*b)))
    assert "seed" not in off.tensors
    assert off.meta["dropout_set_to_zero"] == ["1"]


def test_a_transformer_with_its_own_dropout() -> None:
    pytest.importorskip("transformers")
    from layoutopt.capture import capture
    from tests.zoo_cases import example, values_of

    module, batch, loss = example("bert-tiny", dropout=True)
    graph = capture(module, batch, loss=loss, dropout=True, keep_grads=True)
    passed, _ = run_passes(graph)
    values = {**values_of(graph, module, batch), "seed": np.array(3)}
    got, again = run(graph, values), run(passed, values)
    for output in graph.outputs:
        np.testing.assert_allclose(again[output], got[output], rtol=1e-9, atol=1e-12, err_msg=output)
    assert got["loss"] != run(graph, {**values, "seed": np.array(4)})["loss"]
    name = "bert.encoder.layer.0.intermediate.dense.bias"
    step = np.zeros_like(values[name])
    step[5] = 1e-5
    high, low = (float(run(passed, {**values, name: values[name] + s})["loss"]) for s in (step, -step))
    assert again[f"grad:{name}"][5] == pytest.approx((high - low) / 2e-5, rel=1e-5)


def test_each_step_has_a_seed_of_its_own() -> None:
    graph, _ = dropping(0.3)
    seeds = [int(step_values(graph, step, seed=seed)["seed"]) for seed in (0, 1, -7, 2**40) for step in (1, 2, 3, 5000)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**31) <= s < 2**31 for s in seeds)


def classifier(dropout: bool) -> TrainingGraph:
    """Two linear layers with dropout between, whose masked activations are an output too; momentum-free SGD."""
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional as F

    from layoutopt.capture import capture

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(6, 37), nn.Dropout(0.4), nn.Linear(37, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.drop(torch.exp(self.a(x)))
            return self.b(hidden), hidden

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits, hidden = module(batch["x"])
        return F.cross_entropy(logits, batch["labels"]), {"logits": logits, "hidden": hidden}

    torch.manual_seed(0)
    batch = {"x": torch.zeros(5, 6), "labels": torch.zeros(5, dtype=torch.int64)}
    return run_passes(capture(Net(), batch, loss=loss, optimizer=Sgd(momentum=0.0), dropout=dropout))[0]


def test_a_device_drops_anew_each_step_and_not_at_all_in_evaluation(device_index: int) -> None:
    """A few steps at a learning rate of 0 on one batch: all that changes is what is dropped."""
    from kernels.execute import Executor
    from kernels.runtime import Runtime, devices
    from layoutopt.train import Dataset, Schedule, evaluate, fit
    from tests.plans import naive_plan, row_major

    runtime = Runtime(devices()[device_index])
    x = np.random.default_rng(2).standard_normal((5, 6), np.float32)
    data = Dataset({"x": x, "labels": np.arange(5, dtype=np.int32) % 3})

    def executor(dropout: bool) -> Executor:
        graph = classifier(dropout)
        return Executor(runtime, graph, naive_plan(graph, runtime.limits, row_major), poison=True)

    def steps(run: Executor, seed: int) -> list[tuple[float, bytes]]:
        """Loss and mask of each of four steps."""
        seen: list[tuple[float, bytes]] = []

        def see(_: int, loss: float) -> None:
            seen.append((loss, (run.read("hidden") != 0).tobytes()))

        fit(run, data, epochs=4, schedule=Schedule(0.0, 4), seed=seed, on_step=see)
        return seen

    dropping, plain = executor(True), executor(False)
    first = steps(dropping, 1)
    assert len({loss for loss, _ in first}) == len({mask for _, mask in first}) == 4
    assert steps(dropping, 1) == first, "one seed, one run"
    assert not {mask for _, mask in steps(dropping, 2)} & {mask for _, mask in first}
    kept = np.mean([np.frombuffer(mask, bool).mean() for _, mask in first])
    assert abs(kept - 0.6) < 5 * np.sqrt(0.24 / (4 * 5 * 37))
    np.testing.assert_allclose(evaluate(dropping, data)[1], evaluate(plain, data)[1], rtol=1e-5)
    assert np.all(dropping.read("hidden") != 0)


def test_the_seed_of_evaluation_drops_nothing() -> None:
    graph, plain = classifier(True), classifier(False)
    assert evaluation_values(graph)["seed"] == NO_DROPOUT
    assert "seed" not in evaluation_values(plain)
    values = {t.name: np.ones(t.shape) for t in plain.by_role("input", "parameter", "state")}
    values["labels"] = np.zeros(5, np.int32)
    got = run(graph, values | {"seed": np.array(NO_DROPOUT)})
    expected = run(plain, values)
    for output in plain.outputs:
        np.testing.assert_allclose(got[output], expected[output], rtol=1e-12)
    assert (run(graph, values | {"seed": np.array(0)})["hidden"] == 0).any()


def test_everything_may_be_dropped() -> None:
    graph, x = dropping(1.0)
    values = {"a": np.ones(40), "input_0": x, "seed": np.array(3)}
    assert not run(graph, values)["output"].any()


def of_feature_maps(kind: str, p: float) -> TrainingGraph:
    """[6, 16, 5, 4] times a, dropped by ``torch.nn.functional.KIND``."""
    torch = pytest.importorskip("torch")

    from layoutopt.capture import capture

    class Maps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(torch.nn.functional, kind)(x * self.a, p, True)

    return capture(Maps(), (torch.ones(6, 16, 5, 4),), loss=lambda m, b: ((y := m(*b)).sum(), y), dropout=True)


def test_feature_maps_are_dropped_whole() -> None:
    graph = of_feature_maps("dropout2d", 0.25)
    y = run(graph, {"a": np.ones(4), "input_0": np.ones((6, 16, 5, 4)), "seed": np.array(5)})["output"]
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :, :1, :1], y.shape))
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3])
    assert abs((y[:, :, 0, 0] == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 96)


def test_alpha_dropout_is_refused_by_name_unless_off() -> None:
    with pytest.raises(GraphError, match=r"^aten\.alpha_dropout\.default in Maps: alpha dropout is not supported"):
        of_feature_maps("alpha_dropout", 0.25)
    assert "seed" not in of_feature_maps("alpha_dropout", 0.0).tensors
