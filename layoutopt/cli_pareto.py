"""``layoutopt plan --pareto``: time against memory as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layoutopt.files import check_target
from layoutopt.pareto import draw, pareto
from layoutopt.show import Progress, emit, out, table

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from layoutopt.graph import TrainingGraph

__all__ = ["show_pareto"]


def show_pareto(
    graph: TrainingGraph,
    model: DeviceModel,
    strategy: str,
    storage: str,
    time_limit_s: float,
    picture: Path | None,
    json: bool,
) -> None:
    """Print the frontier of a graph on a device model; draw it where a picture is asked for."""
    from costmodel.model import CostModel
    from layoutopt.stepcost import predict_step

    if picture is not None:
        check_target(picture)
    with Progress("planning", quiet=json) as bar:
        points = pareto(graph, CostModel(model), strategy, time_limit_s, bar.fraction, storage=storage)
    steps = [predict_step(p.plan, graph, model).step_s for p in points]
    first = points[0]
    if picture is not None:
        draw(points, f"{graph.name} on {model.name}", picture)
    if json:
        rows = [
            {
                "arena_bytes": p.arena_bytes,
                "memory_share": p.arena_bytes / first.arena_bytes,
                "predicted_step_s": step_s,
                "kernels_s": p.objective_ns * 1e-9,
                "slowdown": p.objective_ns / first.objective_ns,
                "ops_again": p.ops_again,
                "lean": p.lean,
                "rewrites": list(p.plan.rewrites),
            }
            for p, step_s in zip(points, steps, strict=True)
        ]
        emit({"graph": graph.name, "device": model.name, "picture": str(picture) if picture else None, "points": rows})
        return
    head = ["memory MiB", "of the fastest", "step ms", "slowdown", "ops run again", "layouts"]
    body = [
        [
            f"{p.arena_bytes / 2**20:.1f}",
            f"{p.arena_bytes / first.arena_bytes:.0%}",
            f"{step_s * 1e3:.2f}",
            f"{p.objective_ns / first.objective_ns:.3f}",
            str(p.ops_again),
            "lean" if p.lean else "all",
        ]
        for p, step_s in zip(points, steps, strict=True)
    ]
    table(head, body)
    if picture is not None:
        out(f"wrote {picture}")
