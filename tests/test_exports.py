"""`layoutopt export`: files that the tools of others read back, with every number that the plan holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import networkx as nx
import pytest

from costmodel import device as device_models
from layoutopt import graphfile
from layoutopt import plan as plans
from layoutopt.cli import main
from layoutopt.export_explorer import explorer_graph, explorer_node_data
from layoutopt.export_graphml import graphml, network
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from tests.face import refused
from tests.plans import naive_plan, r_tile
from tests.reports import hostile_step, planned_files

GENERIC = device_models.load("generic-cpu")


@pytest.fixture(scope="module")
def made() -> tuple[TrainingGraph, Plan]:
    """A step in R-Tiles that is relaid out wherever it can be."""
    graph = hostile_step()
    plan = naive_plan(graph, GENERIC.limits, r_tile, relayouts_share=1.0)
    assert plan.relayouts
    costs = [msgspec.structs.replace(op, cost=plans.ItemCost(1000 + i)) for i, op in enumerate(plan.ops)]
    return graph, msgspec.structs.replace(plan, ops=tuple(costs))


# ---- GraphML --------------------------------------------------------------------------------------------------------


def test_graphml_loads_back_as_it_was(made: tuple[TrainingGraph, Plan], tmp_path: Path) -> None:
    for plan in (None, made[1]):
        file = tmp_path / "g.graphml"
        file.write_bytes(graphml(made[0], plan))
        back, own = nx.read_graphml(file), network(made[0], plan)
        assert dict(back.nodes(data=True)) == dict(own.nodes(data=True))
        assert {(a, b): d for a, b, d in back.edges(data=True)} == {(a, b): d for a, b, d in own.edges(data=True)}
        values = [
            v for _, d in (*own.nodes(data=True), *((0, d) for *_, d in own.edges(data=True))) for v in d.values()
        ]
        assert {type(v) for v in values} <= {str, int, float, bool}


def test_a_network_is_the_plan(made: tuple[TrainingGraph, Plan]) -> None:
    graph, plan = made
    net = network(graph, plan)
    assert nx.is_directed_acyclic_graph(net)
    kinds = [d["type"] for _, d in net.nodes(data=True)]
    assert kinds.count("op") == len(plan.ops)
    assert kinds.count("relayout") == len(plan.relayouts)
    assert kinds.count("tensor") == len(graph.tensors)
    assert sum(d.get("cost_ns", 0) for _, d in net.nodes(data=True)) == sum(o.cost.total_ns for o in plan.ops)
    steps = sorted(d["step"] for _, d in net.nodes(data=True) if "step" in d)
    assert steps == list(range(len(plan.steps)))
    for a, b, facts in net.edges(data=True):
        if net.nodes[a]["type"] == "relayout":
            assert net.nodes[a]["step"] < net.nodes[b]["step"]
            assert facts["operands"]
    copied = sum(bool(i) for op in plan.ops for i in op.layouts)
    read = [d["operands"] for a, _, d in net.edges(data=True) if net.nodes[a]["type"] == "relayout"]
    assert sum(len(operands.split(",")) for operands in read) == copied


# ---- Model Explorer -------------------------------------------------------------------------------------------------


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """The classes of Model Explorer's ``graph_builder``, as far as we fill them; anything else is refused."""

    key: str
    value: str


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    attrs: list[Pair]


class Edge(msgspec.Struct, forbid_unknown_fields=True):
    sourceNodeId: str
    sourceNodeOutputId: str
    targetNodeInputId: str


class Style(msgspec.Struct, forbid_unknown_fields=True):
    backgroundColor: str
    borderColor: str


class Node(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    label: str
    namespace: str
    attrs: list[Pair]
    incomingEdges: list[Edge]
    outputsMetadata: list[Metadata]
    style: Style | None = None


class Graph(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    nodes: list[Node]
    groupNodeAttributes: dict[str, dict[str, str]]


class Collection(msgspec.Struct, forbid_unknown_fields=True):
    label: str
    graphs: list[Graph]


class Value(msgspec.Struct, forbid_unknown_fields=True):
    value: float


class NodeData(msgspec.Struct, forbid_unknown_fields=True):
    results: dict[str, Value]
    gradient: list[dict[str, Any]]


def explored(graph: TrainingGraph, plan: Plan | None) -> Graph:
    (found,) = msgspec.json.decode(explorer_graph(graph, plan), type=Collection).graphs
    return found


def test_every_edge_leads_from_an_output_that_is_there(made: tuple[TrainingGraph, Plan]) -> None:
    for plan in (None, made[1]):
        graph = explored(made[0], plan)
        outputs: dict[str, set[str]] = {}
        for node in graph.nodes:
            assert node.id not in outputs, "identifiers repeat"
            for edge in node.incomingEdges:
                assert edge.sourceNodeOutputId in outputs[edge.sourceNodeId], "an edge from what comes later"
            outputs[node.id] = {m.id for m in node.outputsMetadata} or {"0"}
        ops = {op.name: op for op in made[0].ops}
        read = {n.id: [int(e.targetNodeInputId) for e in n.incomingEdges] for n in graph.nodes if n.id in ops}
        assert read == {name: list(range(len(op.inputs))) for name, op in ops.items()}


def test_an_op_reads_the_copy_that_the_plan_says(made: tuple[TrainingGraph, Plan]) -> None:
    graph, plan = made
    nodes = {node.id: node for node in explored(graph, plan).nodes}
    relaid = 0
    for planned in plan.ops:
        for edge, position in zip(nodes[planned.op].incomingEdges, planned.layouts, strict=False):
            assert (nodes[edge.sourceNodeId].label == "relayout") == bool(position)
            relaid += bool(position)
    assert relaid


def test_node_data_are_of_the_graphs_nodes(made: tuple[TrainingGraph, Plan]) -> None:
    graph, plan = made
    found = msgspec.json.decode(explorer_node_data(graph, plan), type=dict[str, NodeData])
    shown = explored(graph, plan)
    (data,) = found.values()
    assert list(found) == [shown.id]
    assert set(data.results) <= {node.id for node in shown.nodes}
    assert len(data.results) == len(plan.steps)
    whole = sum(o.cost.total_ns for o in plan.ops) * 1e-3
    assert sum(v.value for v in data.results.values()) == pytest.approx(whole)
    assert [stop["stop"] for stop in data.gradient] == [0, 1]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_each_format(tmp_path: Path, capsys) -> None:
    file, graph, plan = planned_files(tmp_path)
    for name in ("graphml", "model-explorer", "node-data"):
        assert main(["export", str(file), "--to", name, "-o", str(tmp_path / name)]) == 0
    assert len(nx.read_graphml(tmp_path / "graphml")) > len(graph.ops)
    assert (tmp_path / "model-explorer").read_text(encoding="utf-8") == explorer_graph(graph, plan)
    words = ["export", str(file), "--to", "node-data", "--values", "misses", "--device-model", "generic-cpu"]
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "misses"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "misses").stat().st_size
    (data,) = msgspec.json.decode((tmp_path / "misses").read_bytes(), type=dict[str, NodeData]).values()
    assert sum(v.value for v in data.results.values()) > 0
    profile = {"device": "d", "step_s": 1, "kernels_s": 1, "gap_s": 0, "predicted_s": 1, "steps_s": [1]}
    labels = [plan.ops[n].op if kind == "op" else plan.relayouts[n].label for kind, n in plan.steps]
    profile |= {"launches": [{"label": label, "time_s": 2e-6} for label in labels]}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    words = ["export", str(file), "--to", "node-data", "--profile", str(tmp_path / "profile.json")]
    assert main([*words, "-o", str(tmp_path / "times")]) == 0
    (data,) = msgspec.json.decode((tmp_path / "times").read_bytes(), type=dict[str, NodeData]).values()
    assert {round(v.value, 6) for v in data.results.values()} == {2.0}


def test_bad_input_is_refused(tmp_path: Path, capsys) -> None:
    graphfile.save(hostile_step(), tmp_path / "step.graph")
    file = tmp_path / "step.graph"
    wanted = ("-o", tmp_path / "x")
    assert "unknown format" in refused(capsys, "export", file, "--to", "dot", *wanted)
    assert "is no plan" in refused(capsys, "export", file, "--to", "node-data", *wanted)
    assert "node data" in refused(capsys, "export", file, "--to", "graphml", "--values", "misses", *wanted)
    assert "unknown values" in refused(capsys, "export", file, "--to", "node-data", "--values", "x", *wanted)
    assert "cannot write" in refused(capsys, "export", file, "--to", "graphml", "-o", tmp_path / "no" / "x")
    assert not (tmp_path / "x").exists()
