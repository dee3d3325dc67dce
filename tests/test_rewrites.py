"""The frame of rewrites: names and order, what a plan is bound to, among what planning chooses, and plan files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_costs import FakeCosts

from costmodel.cost import Cost
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import graphfile, planner, rewrites
from layoutopt import plan as plans
from layoutopt.checkpoint import initial_values
from layoutopt.cli import main
from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutOptError
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import alternatives, origin_of, planned_graph, rewritten
from tests.face import own_folder
from tests.graphs import attention_step, linear_step


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    graph = run_passes(linear_step())[0]
    tensors = {n: replace(t, init="normal:0.5") if t.role == "parameter" else t for n, t in graph.tensors.items()}
    return graph.with_ops(graph.ops, tensors=tensors)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three rewrites instead of the real ones: two that name the graph's first op anew, one that changes nothing."""
    applied: list[str] = []

    def mark(name: str) -> rewrites.Rewrite:
        def rewrite(graph: TrainingGraph) -> TrainingGraph:
            applied.append(name)
            first, *others = graph.ops
            return graph.with_ops([replace(first, name=f"{first.name}.{name}"), *others])

        return rewrite

    def nothing(graph: TrainingGraph) -> TrainingGraph:
        applied.append("nothing")
        return graph

    monkeypatch.setattr(rewrites, "REWRITES", {"a": mark("a"), "nothing": nothing, "b": mark("b")})
    monkeypatch.setattr(rewrites, "ALWAYS", ())
    monkeypatch.setattr(rewrites, "OPTIONAL", ())
    monkeypatch.setattr(rewrites, "_cache", type(rewrites._cache)())
    return applied


def names_of(graphs: list[TrainingGraph]) -> list[tuple[str, ...]]:
    return [origin_of(g)[1] for g in graphs]


# ---- applying --------------------------------------------------------------------------------------------------------


def test_rewrites_run_in_their_own_order_once(graph: TrainingGraph, three: list[str]) -> None:
    both = rewritten(graph, ["b", "a"])
    assert both.ops[0].name == f"{graph.ops[0].name}.a.b"
    assert origin_of(both) == (graph.hash, ("a", "b"))
    assert rewritten(graph, ("a", "b", "a")) is both
    assert three == ["a", "b"]
    assert origin_of(graph) == (graph.hash, ())


def test_what_a_rewrite_must_leave(graph: TrainingGraph) -> None:
    """Inputs, parameters, state, outputs and their shapes: what the host sees of a step."""
    for name in rewrites.REWRITES:
        after = rewritten(graph, [name])
        assert after.outputs == graph.outputs
        for role in ("input", "parameter", "state"):
            assert after.by_role(role) == graph.by_role(role)
        assert all(after.tensors[t] == graph.tensors[t] for t in after.tensors if t in graph.tensors)
        assert {k: v for k, v in after.meta.items() if k != "rewritten"} == graph.meta


def test_none_and_unknown(graph: TrainingGraph) -> None:
    assert rewritten(graph, []) is graph
    with pytest.raises(
        LayoutOptError, match=r"unknown rewrite 'imagined': this layoutopt has .*epilogue.*plan .* anew"
    ):
        rewritten(graph, ["epilogue", "imagined"])


def test_no_more_than_some_are_remembered(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "_KEPT", 2)
    graphs = [run_passes(linear_step(batch=batch))[0] for batch in (2, 3, 4)]
    kept = [rewritten(g, ["a"]) for g in graphs]
    assert len(rewrites._cache) == 2
    assert rewritten(graphs[2], ["a"]) is kept[2]
    assert rewritten(graphs[0], ["a"]) is not kept[0]
    assert rewritten(graphs[0], ["a"]).ops == kept[0].ops


# ---- what a plan is for ----------------------------------------------------------------------------------------------


def test_a_plan_names_the_captured_graph(graph: TrainingGraph) -> None:
    made = planner.plan(graph, FakeCosts(), "rowmajor", rewrites=["epilogue"])
    assert made.graph_hash == graph.hash
    assert made.rewrites == ("epilogue",)
    after = planned_graph(made, graph)
    assert [op.op for op in made.ops] == [op.name for op in after.ops]
    assert len(after.ops) < len(graph.ops)
    assert planned_graph(made, after) is after
    planner.validate(made, graph, FakeCosts())
    planner.validate(made, after, FakeCosts())


def test_a_plan_is_refused_for_another_graph(graph: TrainingGraph) -> None:
    made = planner.plan(graph, FakeCosts(), "rowmajor", rewrites=["epilogue"])
    other = run_passes(attention_step())[0]
    for wrong in (other, rewritten(other, ["epilogue"]), rewritten(graph, ["neighbours", "epilogue"])):
        with pytest.raises(GraphError, match=r"the plan is for graph 'linear step' \(.{12}\), not for"):
            planned_graph(made, wrong)


def test_a_plan_of_a_rewrite_that_is_no_more(graph: TrainingGraph) -> None:
    made = plans.decode(plans.encode(planner.plan(graph, FakeCosts(), "rowmajor", rewrites=["epilogue"])))
    import msgspec

    old = msgspec.structs.replace(made, rewrites=("epilogue", "forgotten"))
    with pytest.raises(LayoutOptError, match="unknown rewrite 'forgotten'"):
        planner.validate(old, graph, FakeCosts())


# ---- among what planning chooses -------------------------------------------------------------------------------------


def test_alternatives_without_choice(graph: TrainingGraph, three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert alternatives(graph) == [graph]
    assert names_of(alternatives(graph, ["b"])) == [("b",)]
    assert alternatives(graph, []) == [graph]
    after = rewritten(graph, ["a"])
    monkeypatch.setattr(rewrites, "ALWAYS", ("b", "nothing"))
    assert names_of(alternatives(graph)) == [("b",)]  # what changes nothing is not named
    assert alternatives(after) == [after]  # somebody has chosen already


def test_alternatives_with_choice(graph: TrainingGraph, three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "OPTIONAL", ("a", "nothing"))
    assert names_of(alternatives(graph)) == [(), ("a",)]
    monkeypatch.setattr(rewrites, "ALWAYS", ("b",))
    assert names_of(alternatives(graph)) == [("b",), ("a", "b")]


@pytest.mark.parametrize("dear", ["pointwise", "contraction"])
def test_planning_keeps_what_is_predicted_to_be_faster(
    graph: TrainingGraph, dear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer pointwise ops pay where these are dear; not where an epilogue makes a contraction dearer than both."""
    monkeypatch.setattr(rewrites, "ALWAYS", ())
    monkeypatch.setattr(rewrites, "OPTIONAL", ("epilogue",))

    class Costs(FakeCosts):
        def predict(self, kernel, together=1):  # type: ignore[no-untyped-def]
            cost = super().predict(kernel, together)
            burdened = dear == "pointwise" or kernel.spec.attr("epilogue") is not None
            times = 100.0 if kernel.spec.kind == dear and burdened else 1.0
            return replace(cost, compute_ns=cost.compute_ns * times, total_ns=cost.total_ns * times)

    made = planner.plan(graph, Costs(), "rowmajor")
    assert made.rewrites == (("epilogue",) if dear == "pointwise" else ())
    first = planner.plan_all(graph, Costs(), ("rowmajor", "greedy"))
    assert {p.rewrites for p in first.values()} == {made.rewrites}


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> TrainingGraph:
    """A step whose scores are larger than all else, which attention as one op does without; planning tries both."""
    monkeypatch.setattr(rewrites, "ALWAYS", ())
    monkeypatch.setattr(rewrites, "OPTIONAL", ("attention",))
    return run_passes(attention_step(seq=48))[0]


class Flat(FakeCosts):
    """Attention costs so many nanoseconds an op; all else together a millisecond, whatever it is."""

    def __init__(self, attention_ns: float) -> None:
        super().__init__()
        object.__setattr__(self, "attention_ns", attention_ns)

    def predict(self, kernel, together=1):  # type: ignore[no-untyped-def]
        each = {"attention": self.attention_ns, "attention_grad": self.attention_ns, "reduce": 1e6}  # type: ignore[attr-defined]
        total = each.get(kernel.spec.kind, 1.0)
        return Cost(total, total, 0.0, 0.0)


@pytest.mark.parametrize(("attention_ns", "names"), [(4e3, ("attention",)), (6e3, ())])
def test_of_equally_fast_plans_the_smaller_is_kept(
    attends: TrainingGraph, attention_ns: float, names: tuple[str, ...]
) -> None:
    """Two ops of 4 us more in a millisecond are within a hundredth, two of 6 us are not."""
    apart = [planner.plan(attends, Flat(attention_ns), "rowmajor", rewrites=r) for r in ([], ["attention"])]
    assert apart[1].arena_bytes < apart[0].arena_bytes
    assert apart[1].solver.objective_ns > apart[0].solver.objective_ns
    assert planner.plan(attends, Flat(attention_ns), "rowmajor").rewrites == names


@pytest.mark.parametrize("bound", ["device", "budget"])
def test_a_plan_that_does_not_fit_leaves_the_others(attends: TrainingGraph, bound: str) -> None:
    """The dearer of two plans is kept where the other one needs more memory than there is; with neither, it is said."""
    costs = Flat(1e6)
    small = planner.plan(attends, costs, "rowmajor", rewrites=["attention"]).arena_bytes

    def planned(most_bytes: int) -> Plan:
        if bound == "budget":
            return planner.plan(attends, costs, "rowmajor", most_bytes)
        narrow = Flat(1e6)
        object.__setattr__(narrow, "limits", replace(costs.limits, max_alloc_bytes=most_bytes))
        return planner.plan(attends, narrow, "rowmajor")

    assert planned(1 << 30).rewrites == ()
    assert planned(small).rewrites == ("attention",)
    with pytest.raises((DeviceError, InfeasibleError), match="bytes"):
        planned(small // 2)


def test_what_must_stay_readable_is_not_fused_away(graph: TrainingGraph) -> None:
    gone = next(iter(set(graph.tensors) - set(rewritten(graph, ["epilogue"]).tensors)))
    made = planner.plan(graph, FakeCosts(), "rowmajor", keep=[gone], rewrites=["epilogue"])
    assert made.rewrites == ()
    assert gone in made.layouts


# ---- plan files, from end to end -------------------------------------------------------------------------------------


def test_a_plan_file_of_a_rewritten_graph_runs(
    graph: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, device_index: int
) -> None:
    """Written, read, validated, simulated and compared by the command line, and executed: the loss is the same."""
    from costmodel import device as device_models

    own_folder(tmp_path, monkeypatch)
    info = devices()[device_index]
    device_models.save(
        replace(device_models.load("generic-cpu"), name=info.name, limits=info.limits), tmp_path / "device.toml"
    )
    graphfile.save(graph, tmp_path / "g.graph")
    device = ["--device-model", str(tmp_path / "device.toml")]
    made = tmp_path / "plan.json"
    assert main(["plan", str(tmp_path / "g.graph"), *device, "-o", str(made)]) == 0
    plan = plans.load(made)
    assert "epilogue" in plan.rewrites
    assert plans.decode(plans.encode(plan)) == plan
    planner.validate(plan, graph, limits=info.limits)
    capsys.readouterr()
    assert main(["simulate", str(made), *device, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert len(simulated["by_step"]) == len(plan.steps)
    here = ["--device", str(device_index), "--rounds", "3", "--json"]
    assert main(["compare", str(tmp_path / "g.graph"), *device, *here, "--strategies", "ilp,rowmajor"]) == 0
    first, second = json.loads(capsys.readouterr().out)["rows"]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    runtime = Runtime(info)
    values, inputs = initial_values(graph, 1), example_inputs(graph)
    losses = []
    for candidate in (plan, planner.plan(graph, FakeCosts(), "rowmajor", rewrites=[])):
        executor = Executor(runtime, graph, candidate, values, poison=True)
        executor.step(inputs)
        losses.append(executor.loss())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert np.isfinite(losses[0])


def test_a_plan_file_is_refused_beside_another_graph(
    graph: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    own_folder(tmp_path, monkeypatch)
    other = run_passes(attention_step())[0]
    graphfile.save(graph, tmp_path / "g.graph")
    graphfile.save(other, tmp_path / "other.graph")
    made, device = tmp_path / "plan.json", ["--device-model", "generic-cpu"]
    assert main(["plan", str(tmp_path / "g.graph"), *device, "-o", str(made)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(made), *device, "--graph", str(tmp_path / "other.graph")]) == 2
    assert "the plan is for graph 'linear step'" in capsys.readouterr().err
