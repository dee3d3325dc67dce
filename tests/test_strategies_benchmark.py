"""What the strategies benchmark says of plans: gaps, dead ends, losses that differ, and its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import strategies as benchmark
from layoutopt import graphfile
from layoutopt.errors import InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.planner import STRATEGIES
from tests.fake_costs import FakeCosts
from tests.graphs import attention_step

COSTS = FakeCosts()


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return run_passes(attention_step(2, 16, 4, 8))[0]


def test_a_row_per_strategy_from_one_graph_none_below_the_optimum(graph: TrainingGraph) -> None:
    found = benchmark.assignments(graph, COSTS, STRATEGIES, 30.0)
    plans = benchmark.assembled(found, COSTS)
    rows = benchmark.predicted(found, plans)
    assert set(rows) == set(STRATEGIES)
    least = rows["ilp"]
    assert (least["gap"], least["status"], least["bound_ns"]) == (0.0, "OPTIMAL", least["objective_ns"])
    for name, row in rows.items():
        assert row["objective_ns"] >= least["objective_ns"]
        assert row["gap"] == pytest.approx((row["objective_ns"] + row["not_run_ns"]) / least["objective_ns"] - 1)
        one = found[name]
        assert not isinstance(one, str)
        plan = plans[name]
        assert row["relayouts"] == len(plan.relayouts)
        assert row["relayout_bytes"] == sum(r.bytes_moved for r in plan.relayouts)
    assert rows["tvm-flat"]["relayouts"] > 0
    assert rows["tflite"]["not_run_copies"] > 0


def test_a_dead_end_is_a_row_that_says_so(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def stuck(tables: object, name: str, *rest: object):
        if name == "greedy":
            raise InfeasibleError("op x has no choice", ("x",))
        return assign(tables, name, *rest)

    assign = benchmark.assign
    monkeypatch.setattr(benchmark, "assign", stuck)
    found = benchmark.assignments(graph, COSTS, ["greedy", "rowmajor"], 30.0)
    rows = benchmark.predicted(found, benchmark.assembled(found, COSTS))
    assert rows["greedy"] == {"strategy": "greedy", "dead_end": "op x has no choice"}
    assert rows["rowmajor"]["gap"] >= 0
    benchmark.show({"model": "m", "device_model": "d", "ops": 1, "rows": list(rows.values())})
    assert "greedy      no plan: op x has no choice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "differ"), [([], False), ([2.0, 2.0001], False), ([2.0, 2.001], True), ([2.0, float("nan")], True)]
)
def test_losses_are_compared(losses: list[float], differ: bool) -> None:
    assert benchmark.losses_differ({"rows": [{"dead_end": "x"}, *({"loss": x} for x in losses)]}) == differ


def test_predicting_needs_a_graph_and_a_device_model_alone(
    graph: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    graphfile.save(graph, tmp_path / "A.graph")
    words = ["--works", "A", "--graphs", str(tmp_path), "--strategies", "ilp,bfs,tflite", "--predict-only"]
    words += ["--device-model", "adreno-740", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["strategies.py", *words])
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert benchmark.main() == 0
    assert "A on adreno-740" in capsys.readouterr().out
    record = json.loads((tmp_path / "out.json").read_text())
    (model,) = record["models"]
    assert (record["benchmark"], record["predict_only"], model["model"]) == ("strategies", True, "A")
    assert [row["strategy"] for row in model["rows"]] == ["ilp", "bfs", "tflite"]
    monkeypatch.setattr(sys, "argv", ["strategies.py", "--strategies", "best", "--predict-only", "--device-model", "x"])
    assert benchmark.main() == 2
    assert "unknown strategy 'best'" in capsys.readouterr().err
