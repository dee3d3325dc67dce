"""A graph, or a plan of one, as GraphML: for networkx, Gephi, yEd, Cytoscape.

Nodes are operations, tensors and relayouts; edges run from what is read to who reads it and from who writes to what is
written. Every attribute is a number, a text or a truth value, so that any reader of GraphML takes the file.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

from layoutopt.graph import Op, TrainingGraph
from layoutopt.plan import Plan
from layoutopt.report.shapes import cleaned
from layoutopt.report.steps import blocks_of_ops
from layoutopt.rewrites import planned_graph

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["graphml", "network"]


def network(graph: TrainingGraph, plan: Plan | None = None) -> nx.DiGraph:
    """Operations, tensors and relayouts with plain attributes.

    Args:
        graph: as captured.
        plan: of the graph, whose layouts, kernels and costs become attributes and whose relayouts become nodes; None
            for the graph alone.

    Raises:
        GraphError: the plan is of another graph.
    """
    import networkx as nx

    graph = graph if plan is None else planned_graph(plan, graph)
    blocks = blocks_of_ops(graph)
    net = nx.DiGraph(name=cleaned(graph.name), graph_hash=graph.hash)
    if plan is not None:
        net.graph |= {"device": cleaned(plan.device_name), "strategy": plan.solver.strategy}
        net.graph |= {"status": plan.solver.status, "arena_bytes": plan.arena_bytes}
    for name, facts in _tensors(graph, plan):
        net.add_node(name, **facts)
    ops = {op.name: op for op in graph.ops}
    copies: dict[tuple[str, int], str] = {}  # the node that made a copy last
    written = {t: t for storage in graph.storages.values() for t in storage.tensors[:1]}  # storage: tensor in it now
    for at, (kind, number) in enumerate(_steps(graph, plan)):
        if kind == "relayout":
            assert plan is not None
            move = plan.relayouts[number]
            node = f"relayout:{cleaned(move.storage)}#{move.target}@{at}"
            facts = {"type": "relayout", "kind": "relayout", "phase": ops[move.before].phase, "step": at}
            facts |= {"block": blocks[move.before], "variant": move.variant, "bytes_moved": move.bytes_moved}
            facts |= {"layout": _layout(plan, move.storage, move.target)}
            net.add_node(node, **facts, cost_ns=move.cost.total_ns, cost_measured=move.cost.measured)
            net.add_edge(f"tensor:{cleaned(written[move.storage])}", node)
            copies[move.storage, move.target] = node
            continue
        op = ops[plan.ops[number].op] if plan is not None else graph.ops[number]
        node = f"op:{cleaned(op.name)}"
        facts = {"type": "op", "kind": op.kind, "phase": op.phase, "step": at, "block": blocks[op.name]}
        facts |= {"source": cleaned(op.source)}
        if plan is not None:
            planned = plan.ops[number]
            facts |= {"variant": planned.variant, "cost_ns": planned.cost.total_ns}
            facts |= {"cost_measured": planned.cost.measured}
        net.add_node(node, **facts)
        _join(net, node, op, graph, plan.ops[number].layouts if plan is not None else None, copies)
        written |= {graph.storage_of[o.tensor]: o.tensor for o in op.outputs}
    return net


def _steps(graph: TrainingGraph, plan: Plan | None) -> list[tuple[str, int]]:
    return [("op", i) for i in range(len(graph.ops))] if plan is None else list(plan.steps)


def _join(
    net: nx.DiGraph,
    node: str,
    op: Op,
    graph: TrainingGraph,
    layouts: tuple[int, ...] | None,
    copies: dict[tuple[str, int], str],
) -> None:
    """The edges of an op; several operands that are one tensor are one edge."""
    for position, operand in enumerate(op.operands):
        other = f"tensor:{cleaned(operand.tensor)}"
        storage = graph.storage_of[operand.tensor]
        if layouts is not None and layouts[position]:
            other = copies[storage, layouts[position]]
        ends = (other, node) if position < len(op.inputs) else (node, other)
        before = net.edges[ends]["operands"] + "," if net.has_edge(*ends) else ""
        net.add_edge(*ends, operands=f"{before}{position}")


def _tensors(graph: TrainingGraph, plan: Plan | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for tensor in graph.tensors.values():
        storage = graph.storage_of[tensor.name]
        facts = {
            "type": "tensor",
            "role": tensor.role,
            "dtype": tensor.dtype,
            "shape": "x".join(map(str, tensor.shape)) or "scalar",
            "bytes": tensor.size_elems * tensor.item_bytes,
            "storage": cleaned(storage),
        }
        if plan is not None:
            facts["layout"] = _layout(plan, storage, 0)
        yield f"tensor:{cleaned(tensor.name)}", facts


def _layout(plan: Plan, storage: str, position: int) -> str:
    return plan.layouts[storage][position].layout().describe() if storage in plan.layouts else "none"


def graphml(graph: TrainingGraph, plan: Plan | None = None) -> bytes:
    """The file's bytes; arguments and errors as :func:`network`."""
    import networkx as nx

    data = BytesIO()
    nx.write_graphml_xml(network(graph, plan), data, prettyprint=True)
    return data.getvalue()
