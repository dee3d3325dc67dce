"""``layoutopt plan --pareto``: time against memory as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layoutopt.files import check_target
from layoutopt.pareto import HEAD, cells, draw, pareto, rows
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
    shown = rows(points)
    for row, point in zip(shown, points, strict=True):
        row["predicted_step_s"] = predict_step(point.plan, graph, model).step_s
    if picture is not None:
        draw(points, f"{graph.name} on {model.name}", picture)
    if json:
        emit({"graph": graph.name, "device": model.name, "picture": str(picture) if picture else None, "points": shown})
        return
    table([*HEAD, "step ms"], [[*cells(row), f"{row['predicted_step_s'] * 1e3:.2f}"] for row in shown])
    if picture is not None:
        out(f"wrote {picture}")
