"""Optimizer updates as graph ops, checked by hand-written numpy; torch's own optimizers are in test_capture.py."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import run
from layoutopt.capture_build import GraphBuilder
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import AdamW, Optimizer, Sgd, append_updates, hyper_values, optimizer_from, optimizer_meta

RNG = np.random.default_rng(5)


def graph_of(optimizer: Optimizer) -> TrainingGraph:
    """Two parameters whose gradients are inputs."""
    b = GraphBuilder()
    for name, shape in (("w", (3, 5)), ("b", (5,))):
        b.tensor(name, shape, "float32", "parameter", init="zeros")
        b.tensor(f"grad:{name}", shape, "float32", "input")
    append_updates(b, optimizer, {"w": "grad:w", "b": "grad:b"})
    return TrainingGraph("update", b.tensors, b.ops, ())


def steps(optimizer: Optimizer, count: int = 4) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """The parameters after some steps, and the values each step began with."""
    graph = graph_of(optimizer)
    values = {"w": RNG.normal(size=(3, 5)), "b": RNG.normal(size=5)}
    values |= {t.name: np.zeros(t.shape) for t in graph.by_role("state")}
    began = []
    for step in range(1, count + 1):
        values |= {"grad:w": RNG.normal(size=(3, 5)), "grad:b": RNG.normal(size=5), **hyper_values(optimizer, step)}
        began.append(dict(values))
        got = run(graph, values)
        for op in graph.ops:
            for out, source in op.inplace:
                values[op.inputs[source].tensor] = got[op.outputs[out].tensor]
    return values, began


def test_adamw_by_hand() -> None:
    o = AdamW(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3, no_decay=lambda name: name == "b")
    after, began = steps(o)
    for name, decay in (("w", 0.3), ("b", 0.0)):
        p, m, v = began[0][name], 0.0, 0.0
        for t, values in enumerate(began, 1):
            g = values[f"grad:{name}"]
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            unbiased = np.sqrt(v / (1 - 0.95**t)) + 1e-3
            p = p - 0.02 * decay * p - 0.02 * m / (1 - 0.8**t) / unbiased
        np.testing.assert_allclose(after[name], p, rtol=2e-6)
        np.testing.assert_allclose(after[f"{name}.exp_avg"], m, rtol=1e-12)
        np.testing.assert_allclose(after[f"{name}.exp_avg_sq"], v, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_sgd_by_hand(momentum: float, decay: float) -> None:
    after, began = steps(Sgd(lr=0.1, momentum=momentum, weight_decay=decay))
    p, buffer = began[0]["w"], 0.0
    for values in began:
        buffer = momentum * buffer + values["grad:w"] + decay * p
        p = p - 0.1 * buffer
    np.testing.assert_allclose(after["w"], p, rtol=1e-6)


def test_updates_are_in_place_and_state_belongs_to_parameters() -> None:
    graph = graph_of(AdamW())
    assert {op.phase for op in graph.ops} == {"update"}
    assert {t.name: t.of for t in graph.by_role("state")} == {
        f"{p}.{s}": p for p in ("w", "b") for s in ("exp_avg", "exp_avg_sq")
    }
    assert graph.storages["w"].tensors == ("w", "new:w")
    assert graph.storages["w"].role == "parameter"
    assert graph.storages["b.exp_avg_sq"].tensors == ("b.exp_avg_sq", "new:b.exp_avg_sq")
    assert graph_of(Sgd(momentum=0.0)).by_role("state") == []


def test_hyper_values() -> None:
    values = hyper_values(AdamW(beta1=0.9, beta2=0.999), 2, 0.5)
    assert {k: v.dtype for k, v in values.items()} == dict.fromkeys(values, np.dtype(np.float32))
    assert float(values["lr"]) == 0.5
    assert float(values["bias_correction1"]) == pytest.approx(0.19)
    assert float(values["bias_correction2_sqrt"]) == pytest.approx(np.sqrt(1 - 0.999**2))
    assert list(hyper_values(Sgd(lr=0.25), 1)) == ["lr"]
    assert hyper_values(None, 1) == {}
    with pytest.raises(GraphError, match="steps count from 1"):
        hyper_values(Sgd(), 0)


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.5, momentum=0.0), AdamW(beta1=0.5)])
def test_meta_brings_the_optimizer_back(optimizer: Optimizer) -> None:
    assert optimizer_from(optimizer_meta(optimizer)) == optimizer


def test_optimizers_by_name() -> None:
    assert optimizer_from("adamw") == AdamW()
    assert optimizer_from("none") is None
    assert optimizer_from(None) is None
    with pytest.raises(GraphError, match="unknown optimizer 'lion': expected one of sgd, adamw"):
        optimizer_from("lion")
    with pytest.raises(GraphError, match="no setting nesterov"):
        optimizer_from({"name": "sgd", "nesterov": True})
