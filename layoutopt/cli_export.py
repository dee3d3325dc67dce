"""``layoutopt export``: a plan or a graph for the tools of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli_report import plan_model
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.show import Progress, emit, out

if TYPE_CHECKING:
    from layoutopt.graph import TrainingGraph
    from layoutopt.plan import Plan

__all__ = ["FORMATS", "export"]

FORMATS = ("graphml", "model-explorer", "node-data")
VALUES = ("costs", "misses")


def export(
    target: Annotated[str, typer.Argument(metavar="PLAN|GRAPH", help="Plan file, graph file or graph that ships.")],
    to: Annotated[str, typer.Option("--to", help="graphml, model-explorer, or node-data (of a plan).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    graph: Annotated[str | None, typer.Option("--graph", help="The plan's graph, if not beside it.")] = None,
    values: Annotated[str, typer.Option("--values", help="Of node data: costs (µs), misses (simulated).")] = "costs",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Node data of what `layoutopt profile --json` printed (µs).")
    ] = None,
    device_model: Annotated[str | None, typer.Option("--device-model", help="Of misses: a file or a name.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Write a plan or a graph as GraphML or for Model Explorer (a trace: `layoutopt profile --trace`)."""
    import layoutopt.plan as plans
    from layoutopt import models
    from layoutopt.export_explorer import explorer_graph, explorer_node_data
    from layoutopt.export_graphml import graphml

    if to not in FORMATS:
        raise LayoutOptError(f"unknown format {to!r}: choose {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if values not in VALUES:
        raise LayoutOptError(f"unknown values {values!r}: choose {' or '.join(VALUES)}")
    if to != "node-data" and (profile is not None or values != "costs"):
        raise LayoutOptError("--values and --profile are of node data: give --to node-data, or leave them out")
    check_target(output)
    plan = plans.load(target) if target.endswith(".json") else None
    if plan is None and (graph is not None or to == "node-data"):
        raise LayoutOptError(f"{target} is no plan (….json): node data and --graph are of a plan")
    loaded = models.find_graph(target) if plan is None else models.graph_of_plan(plan, Path(target), graph)
    data: bytes | str
    if to == "graphml":
        data = graphml(loaded, plan)
    elif to == "model-explorer":
        data = explorer_graph(loaded, plan)
    else:
        assert plan is not None
        data = explorer_node_data(loaded, plan, _values(plan, loaded, values, profile, device_model, json))
    write_atomic(output, data)
    size = len(data.encode() if isinstance(data, str) else data)
    if json:
        emit({"file": str(output), "format": to, "bytes": size})
        return
    out(f"wrote {output} ({size / 2**20:.2f} MiB)")


def _values(
    plan: Plan, graph: TrainingGraph, values: str, profile: Path | None, device_model: str | None, quiet: bool
) -> dict[str, float] | None:
    """A number by step: measured microseconds, simulated misses; None for costs."""
    from layoutopt.report.agreement import measured_times, read_profile

    if profile is not None:
        if values != "costs":
            raise LayoutOptError("--profile gives measured times: leave --values out")
        labels = {o.op for o in plan.ops} | {r.label for r in plan.relayouts}
        return {label: s * 1e6 for label, s in measured_times(read_profile(profile), labels).items()}
    if values == "costs":
        return None
    from simulator.simulate import simulate

    model = plan_model(plan, graph, device_model, None, None, quiet)
    with Progress("simulating", quiet=quiet) as bar:
        report = simulate(graph, plan, model, progress=bar.count)
    return {label: counts.misses[-1] for label, counts in report.by_step.items()}
