"""Weights stored in few bits: which are, what the graph computes then, and how plans of it run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from kernels.execute import Executor
from kernels.reference import run
from layoutopt import planner
from layoutopt.cli import main
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.facade import check_request, costs_of, solve_plan
from layoutopt.graph import TrainingGraph
from layoutopt.graphfile import save
from layoutopt.plan import Plan
from layoutopt.plan import load as load_plan
from layoutopt.quantize import WEIGHTS, dequantise, quantise
from layoutopt.rewrite_quantize import weights_of
from layoutopt.rewrites import STORAGES, calibration_name, planned_graph, rewritten
from simulator.simulate import simulate
from tests.graphs import GELU, Sketch, expand, linear_step, permute, random_values, reshape
from tests.test_half_training import runtime, uncalibrated

BATCH, SEQ, WIDTH, HIDDEN, WORDS = 2, 7, 72, 80, 53
ROWS = BATCH * SEQ
STORED = {"table": False, "joint": False, "conv": True, "up": False, "down": False, "batched": False}
"""Which weights of ``model`` are quantised, and whether transposed."""


@lru_cache(maxsize=1)
def model() -> TrainingGraph:
    """A forward pass that reads weights in every way: tied, by parts, stored either way round, on either side."""
    s = Sketch()
    s.tensor("ids", (BATCH, SEQ), "input", "int32")
    for name, shape in {
        "table": (WORDS, WIDTH),
        "joint": (2 * WIDTH, WIDTH),
        "conv": (WIDTH, HIDDEN),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
        "batched": (WIDTH, WIDTH),
        "small": (5, WIDTH),
        "both": (WIDTH, WIDTH),
        "gamma": (WIDTH,),
        "bias": (HIDDEN,),
    }.items():
        s.tensor(name, shape, "parameter", init="normal:0.1")
    s.op("gather", ["table", ("ids", reshape(ROWS))], {"x": (ROWS, WIDTH)})
    s.op("layer_norm", ["x", "gamma", "gamma"], {"ln": (ROWS, WIDTH), "mean": (ROWS,), "rstd": (ROWS,)}, eps=1e-5)
    ln = ("ln", reshape(1, ROWS, WIDTH))
    part = ("joint", ("slice", (0, WIDTH, 2 * WIDTH, 1)), permute(1, 0), reshape(1, WIDTH, WIDTH))
    s.op("contraction", [ln, part], {"q": (1, ROWS, WIDTH)}, alpha=0.5)
    s.op("contraction", [ln, ("conv", reshape(1, WIDTH, HIDDEN))], {"c": (1, ROWS, HIDDEN)})
    s.op("contraction", [("q", reshape(1, ROWS, WIDTH)), ("up", permute(1, 0), reshape(1, WIDTH, HIDDEN))],
         {"u": (1, ROWS, HIDDEN)})  # fmt: skip
    s.add("b", "u", ("bias", expand(1, ROWS, HIDDEN)))
    s.pointwise("g", GELU, "b")
    s.add("h", "g", "c")
    turned = ("h", permute(0, 2, 1))
    s.op("contraction", [("down", reshape(1, WIDTH, HIDDEN)), turned], {"d": (1, WIDTH, ROWS)})
    tokens = ("d", permute(0, 2, 1), reshape(BATCH, SEQ, WIDTH))
    wide = ("batched", permute(1, 0), expand(BATCH, WIDTH, WIDTH))
    s.op("contraction", [tokens, wide], {"e": (BATCH, SEQ, WIDTH)})
    flat = ("e", reshape(1, ROWS, WIDTH))
    s.op("contraction", [flat, ("both", reshape(1, WIDTH, WIDTH))], {"f": (1, ROWS, WIDTH)})
    s.op("contraction", [("f", reshape(1, ROWS, WIDTH)), ("both", permute(1, 0), reshape(1, WIDTH, WIDTH))],
         {"z": (1, ROWS, WIDTH)})  # fmt: skip
    s.op("contraction", ["z", ("small", permute(1, 0), reshape(1, WIDTH, 5))], {"few": (1, ROWS, 5)})
    s.op("contraction", ["z", ("table", permute(1, 0), reshape(1, WIDTH, WORDS))], {"logits": (1, ROWS, WORDS)})
    return s.graph("reads weights", "logits", "few")


def values() -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float32 if x.dtype.kind == "f" else x.dtype) for name, x in _values().items()}


@lru_cache(maxsize=1)
def _values() -> dict[str, np.ndarray]:
    return {name: x * 0.2 if x.dtype.kind == "f" else x for name, x in random_values(model(), 3).items()}


def rounded(storage: str) -> dict[str, np.ndarray]:
    """The values with the weights as they come out of few bits."""
    out, fmt = values(), WEIGHTS[storage]
    for name, transposed in STORED.items():
        rows = out[name].T if transposed else out[name]
        words, scales = quantise(np.ascontiguousarray(rows), fmt)
        back = dequantise(words, scales.astype(np.float64), rows.shape[1], fmt)
        out[name] = back.T if transposed else back
    return out


def packed(graph: TrainingGraph) -> dict[str, np.ndarray]:
    """Values of the rewritten graph's own parameters and inputs."""
    given, out = values(), {}
    for name, weight in weights_of(graph).items():
        out |= dict(zip(weight.names, weight.pack(given.pop(name)), strict=True))
    return given | out


@pytest.mark.parametrize("storage", WEIGHTS)
def test_it_is_the_same_graph_with_rounded_weights(storage: str) -> None:
    graph = rewritten(model(), STORAGES[storage])
    weights = weights_of(graph)
    assert {name: weight.transposed for name, weight in weights.items()} == STORED
    assert {t.name for t in graph.by_role("parameter")} == {
        *("small", "both", "gamma", "bias"),
        *(part for name in STORED for part in (f"{name}.words", f"{name}.scales")),
    }
    kinds = [op.kind for op in graph.ops]
    assert (kinds.count("quantized_gather"), kinds.count("quantized_contraction")) == (1, 6)
    expected, got = run(model(), rounded(storage)), run(graph, packed(graph))
    for name in model().outputs:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-12)


def test_epilogues_and_attention_come_before() -> None:
    graph = rewritten(model(), ["epilogue", *STORAGES["int8"]])
    assert any(op.kind == "quantized_contraction" and "epilogue" in op.attrs for op in graph.ops)
    expected, got = run(model(), rounded("int8")), run(graph, packed(graph))
    for name in model().outputs:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_weight_comes_back_in_its_own_shape() -> None:
    for storage in WEIGHTS:
        for name, weight in weights_of(rewritten(model(), STORAGES[storage])).items():
            np.testing.assert_allclose(weight.unpack(*weight.pack(values()[name])), rounded(storage)[name], rtol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(GraphError, match="trains its parameters, and weights stored as int8 are only read"):
        rewritten(linear_step(), STORAGES["int8"])
    with pytest.raises(GraphError, match="unknown storage of weights 'int3'"):
        rewritten(model(), ["weights:int3"])
    with pytest.raises(LayoutOptError, match="choose one of fp32, fp16, int8, nf4"):
        check_request(["greedy"], None, storage="int4")
    bad = values()["up"].copy()
    bad[3, 4] = np.inf
    with pytest.raises(GraphError, match="parameter 'up': row 3, column 4 is inf"):
        weights_of(rewritten(model(), STORAGES["int8"]))["up"].pack(bad)


def test_a_device_model_keeps_storages_apart() -> None:
    names = {calibration_name(model(), storage) for storage in STORAGES}
    assert names == {model().hash, *(f"{model().hash}:{storage}" for storage in ("fp16", "int8", "nf4"))}
    assert calibration_name(rewritten(model(), STORAGES["nf4"])) == f"{model().hash}:nf4"


# ---- on devices -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def plan(device_index: int, storage: str) -> Plan:
    return solve_plan(model(), uncalibrated(runtime(device_index)), strategy="greedy", storage=storage)


@pytest.mark.parametrize("storage", WEIGHTS)
def test_a_plan_runs(device_index: int, storage: str) -> None:
    made = plan(device_index, storage)
    given = values()
    ids = {"ids": given.pop("ids")}
    step = Executor(runtime(device_index), model(), made, given, poison=True)
    step.step(ids)
    expected = run(model(), rounded(storage))
    for name in model().outputs:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(step.read(name), expected[name], rtol=1e-4, atol=1e-5 * scale)
    for name in STORED:
        np.testing.assert_allclose(step.read(name), rounded(storage)[name], rtol=1e-6)
    again = Executor(runtime(device_index), model(), made, step.values(), poison=True)
    again.step(ids)
    np.testing.assert_array_equal(again.read("logits"), step.read("logits"))
    half = {name: x for name, x in step.values().items() if name != "up.scales"}
    with pytest.raises(GraphError, match=r"of parameter 'up' only 'up.words' is given"):
        Executor(runtime(device_index), model(), made, half)


@pytest.mark.parametrize("storage", WEIGHTS)
def test_a_plan_is_checked_and_simulated(device_index: int, storage: str) -> None:
    made, device = plan(device_index, storage), uncalibrated(runtime(device_index))
    planner.validate(made, model(), costs_of(device))
    assert weights_of(planned_graph(made, model())).keys() == STORED.keys()
    assert made.rewrites[-1] == STORAGES[storage][0]
    assert made.graph_hash == model().hash
    report = simulate(model(), made, device)
    assert sum(report.total.misses) > 0


def test_weights_take_a_fraction(device_index: int) -> None:
    sizes = {s: sum(x.size_bytes for x in plan(device_index, s).arena) for s in ("fp32", "int8", "nf4")}
    assert sizes["nf4"] < sizes["int8"] < sizes["fp32"]


def test_the_command_line_plans_simulates_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, made = tmp_path / "model.graph", tmp_path / "plan.json"
    save(model(), file)
    common = ["--storage", "nf4", "--device-model", "generic-cpu", "--json"]
    assert main(["plan", str(file), *common, "--strategy", "greedy", "-o", str(made)]) == 0
    assert load_plan(made).rewrites[-1] == "weights:nf4"
    assert main(["simulate", str(made), "--device-model", "generic-cpu", "--graph", str(file), "--json"]) == 0
    assert main(["compare", str(file), *common, "--strategies", "greedy,rowmajor", "--no-measure"]) == 0
    capsys.readouterr()
    assert main(["plan", "minilm", *common]) == 2
    assert "weights stored as nf4 are only read" in capsys.readouterr().err
