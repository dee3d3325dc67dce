"""A graph, or a plan of one, for Google's Model Explorer: its graph JSON, and node data to colour it by.

The graph file needs no model beside it. Its nodes are the operations and what the step begins with (inputs, parameters,
state, constants), nested by phase and module. Node data are numbers by node: a plan's costs, simulated misses, measured
times; Model Explorer colours and sums them over the same nesting. Formats: the package ``ai-edge-model-explorer``
(``graph_builder``, ``node_data_builder``), Apache 2.0; only the fields that we fill are written.

Part of the face.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from layoutopt.graph import Op, TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph

__all__ = ["explorer_graph", "explorer_node_data"]

_START, _END = "#fff7e6", "#c2410c"
"""Colours of the least and the largest value; text on them is dark and light."""


def explorer_graph(graph: TrainingGraph, plan: Plan | None = None) -> str:
    """The graph collection's JSON.

    Args:
        graph: as captured.
        plan: whose kernels, layouts and relayouts are shown; None for the graph alone.

    Raises:
        GraphError: the plan is of another graph.
    """
    planned = graph if plan is None else planned_graph(plan, graph)
    sources: dict[str, tuple[str, str]] = {}  # by tensor: the node and output that gives it
    nodes = [_begins(planned, name, plan) for name in _beginnings(planned)]
    sources |= {node["label"]: (node["id"], "0") for node in nodes}
    steps = [("op", i) for i in range(len(planned.ops))] if plan is None else plan.steps
    ops = {op.name: op for op in planned.ops}
    holds = {storage.name: storage.tensors[0] for storage in planned.storages.values()}
    copies: dict[tuple[str, int], str] = {}
    for at, (kind, number) in enumerate(steps):
        if kind == "relayout":
            assert plan is not None
            move = plan.relayouts[number]
            nodes.append(_relayout(plan, number, at, ops[move.before], sources[holds[move.storage]]))
            copies[move.storage, move.target] = nodes[-1]["id"]
            continue
        op = ops[plan.ops[number].op] if plan is not None else planned.ops[number]
        layouts = plan.ops[number].layouts if plan is not None else (0,) * len(op.operands)
        edges = []
        for position, operand in enumerate(op.inputs):
            copy = copies.get((planned.storage_of[operand.tensor], layouts[position])) if layouts[position] else None
            source = (copy, "0") if copy else sources[operand.tensor]
            edges.append(_edge(*source, position))
        nodes.append(_operation(planned, op, edges, plan, number, at))
        for output, operand in enumerate(op.outputs):
            sources[operand.tensor] = op.name, str(output)
            holds[planned.storage_of[operand.tensor]] = operand.tensor
    about = {"": _about(planned, plan)}
    body = {"id": planned.name, "nodes": nodes, "groupNodeAttributes": about}
    return _text({"label": "layoutopt", "graphs": [body]})


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def _beginnings(graph: TrainingGraph) -> list[str]:
    """Tensors that no operation writes."""
    return [name for name in graph.tensors if name not in graph.producer]


def _about(graph: TrainingGraph, plan: Plan | None) -> dict[str, str]:
    facts = {"operations": str(len(graph.ops)), "captured by": str(graph.meta.get("command", ""))}
    if plan is not None:
        facts |= {"device": plan.device_name, "strategy": plan.solver.strategy, "status": plan.solver.status}
        facts |= {"arena bytes": str(plan.arena_bytes), "relayouts": str(len(plan.relayouts))}
    return facts


def _pairs(facts: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"key": key, "value": str(value)} for key, value in facts.items() if value != ""]


def _edge(node: str, output: str, position: int) -> dict[str, str]:
    return {"sourceNodeId": node, "sourceNodeOutputId": output, "targetNodeInputId": str(position)}


def _namespace(phase: str, source: str) -> str:
    """Phase, then the module's path."""
    return "/".join([phase, *(part for part in source.replace("/", "|").split(".") if part)])


def _begins(graph: TrainingGraph, name: str, plan: Plan | None) -> dict[str, Any]:
    tensor = graph.tensors[name]
    facts: dict[str, object] = {"role": tensor.role, "shape": list(tensor.shape), "type": tensor.dtype}
    if plan is not None:
        facts["layout"] = _layout(plan, graph.storage_of[name], 0)
    return {
        "id": f"tensor:{name}",
        "label": name,
        "namespace": f"{tensor.role}s",
        "attrs": _pairs(facts),
        "incomingEdges": [],
        "outputsMetadata": [_metadata(graph, name, 0, plan, 0)],
    }


def _metadata(graph: TrainingGraph, name: str, output: int, plan: Plan | None, position: int) -> dict[str, Any]:
    tensor = graph.tensors[name]
    facts: dict[str, object] = {"tensor_name": name, "tensor_shape": f"{tensor.dtype}{list(tensor.shape)}"}
    if plan is not None:
        facts["layout"] = _layout(plan, graph.storage_of[name], position)
    return {"id": str(output), "attrs": _pairs(facts)}


def _layout(plan: Plan, storage: str, position: int) -> str:
    return plan.layouts[storage][position].layout().describe() if storage in plan.layouts else ""


def _operation(
    graph: TrainingGraph, op: Op, edges: list[dict[str, str]], plan: Plan | None, number: int, at: int
) -> dict[str, Any]:
    facts: dict[str, object] = {"name": op.name, "step": at, "module": op.source}
    if plan is not None:
        planned = plan.ops[number]
        facts |= {"kernel": planned.variant, "cost ns": planned.cost.total_ns}
        facts["cost is"] = "measured" if planned.cost.measured else "predicted"
    return {
        "id": op.name,
        "label": op.kind,
        "namespace": _namespace(op.phase, op.source),
        "attrs": _pairs(facts),
        "incomingEdges": edges,
        "outputsMetadata": [_metadata(graph, o.tensor, i, plan, 0) for i, o in enumerate(op.outputs)],
    }


def _relayout(plan: Plan, number: int, at: int, before: Op, source: tuple[str, str]) -> dict[str, Any]:
    move = plan.relayouts[number]
    facts = {
        "storage": move.storage,
        "step": at,
        "from": _layout(plan, move.storage, 0),
        "to": _layout(plan, move.storage, move.target),
        "kernel": move.variant,
        "bytes moved": move.bytes_moved,
        "cost ns": move.cost.total_ns,
    }
    return {
        "id": f"{move.label}@{at}",
        "label": "relayout",
        "namespace": _namespace(before.phase, before.source),
        "attrs": _pairs(facts),
        "incomingEdges": [_edge(*source, 0)],
        "outputsMetadata": [],
        "style": {"backgroundColor": "#fde68a", "borderColor": "#92400e"},
    }


def explorer_node_data(graph: TrainingGraph, plan: Plan, values: Mapping[str, float] | None = None) -> str:
    """Node data's JSON: a number for every step of a plan.

    Args:
        graph: as captured.
        plan: of the graph.
        values: by the step's label (an op's name, ``relayout:STORAGE#POSITION``); None for the plan's costs, in
            microseconds. Steps of equal labels share the value.

    Raises:
        GraphError: the plan is of another graph.
    """
    planned = planned_graph(plan, graph)
    results: dict[str, dict[str, float]] = {}
    for at, (kind, number) in enumerate(plan.steps):
        label = plan.ops[number].op if kind == "op" else plan.relayouts[number].label
        cost = plan.ops[number].cost if kind == "op" else plan.relayouts[number].cost
        node = label if kind == "op" else f"{label}@{at}"
        if values is None:
            results[node] = {"value": cost.total_ns * 1e-3}
        elif label in values:
            results[node] = {"value": values[label]}
    gradient = [
        {"stop": 0, "bgColor": _START, "textColor": "#1f2937"},
        {"stop": 1, "bgColor": _END, "textColor": "#ffffff"},
    ]
    return _text({planned.name: {"results": results, "gradient": gradient}})
