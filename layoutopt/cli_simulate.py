"""``layoutopt simulate``: what plans do to the caches of a device model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt import complete
from layoutopt.cli_device import model_for
from layoutopt.errors import LayoutOptError
from layoutopt.show import Progress, emit, out

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from layoutopt.graph import TrainingGraph
    from layoutopt.plan import Plan
    from simulator.reuse_step import StepReuse
    from simulator.simulate import CacheReport

__all__ = ["simulate"]


def simulate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN…|GRAPH", help="Plan files, or a graph to plan now.", autocompletion=complete.graphs
        ),
    ],
    device_model: Annotated[
        str | None,
        typer.Option("--device-model", help="A file or a built-in name.", autocompletion=complete.device_models),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Index or part of its name.")] = None,
    graph: Annotated[str | None, typer.Option("--graph", help="The plans' graph, if not beside them.")] = None,
    strategies: Annotated[str, typer.Option("--strategies", help="Of a graph's plans, comma-separated.")] = "ilp",
    storage: Annotated[
        str,
        typer.Option(
            "--storage", help="Of a graph's plans: fp32, fp16, int8 or nf4.", autocompletion=complete.storages
        ),
    ] = "fp32",
    memory: Annotated[str | None, typer.Option("--memory", help="Of a graph's plans: 512MiB, …")] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver.")] = 60.0,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 12,
    max_accesses: Annotated[
        int, typer.Option("--max-accesses", min=1000, help="A launch, before sampling.")
    ] = 2_000_000,
    repeats: Annotated[int, typer.Option("--repeats", help="Of equal steps so many are simulated; 0: all.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Walk every access; nothing is sampled.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sample.")] = 0,
    reuse: Annotated[bool, typer.Option("--reuse", help="Reuse distances, too; one plan only.")] = False,
    pictures: Annotated[Path | None, typer.Option("--pictures", help="Folder to draw into; one plan only.")] = None,
    picture_kind: Annotated[str, typer.Option("--picture-kind", help="png or svg.")] = "png",
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Run plans' addresses through the caches: hits, misses and bytes per op, operand, tensor, phase and strategy."""
    from layoutopt.stepcost import predict_step
    from simulator.report import as_json, print_report, print_reuse, print_strategies, strategies_json
    from simulator.reuse_step import reuse_distances
    from simulator.simulate import simulate as run_simulation

    if pictures is not None:
        from simulator.pictures import check_pictures

        check_pictures(pictures, picture_kind)
    loaded, model, plans = _plans(targets, graph, device_model, device, strategies, storage, memory, time_limit, json)
    if (pictures is not None or reuse) and len(plans) > 1:
        raise LayoutOptError(f"--pictures and --reuse are of one plan, not {len(plans)}: simulate them one by one")
    reports = {}
    limit, members = (float("inf"), 0) if full else (float(max_accesses), repeats)
    for name, plan in plans.items():
        with Progress(f"simulating {name}", quiet=json) as bar:
            reports[name] = run_simulation(
                loaded, plan, model, max_accesses=limit, repeats=members, seed=seed, progress=bar.count
            )
    predicted_s = {name: predict_step(plan, loaded, model).step_s for name, plan in plans.items()}
    if len(reports) > 1:
        if json:
            emit({"graph": loaded.name, "device": model.name, "plans": strategies_json(reports, predicted_s)})
        else:
            print_strategies(reports, predicted_s)
        return
    ((name, report),) = reports.items()
    distances = None
    if reuse:
        with Progress("reuse distances", quiet=json) as bar:
            distances = reuse_distances(loaded, plans[name], model, max_accesses=limit, seed=seed, progress=bar.count)
    drawn = [] if pictures is None else _draw(pictures, picture_kind, report, model, distances)
    if json:
        emit({**as_json(report), "reuse": distances, "pictures": drawn})
        return
    print_report(report, top)
    if distances is not None:
        print_reuse(distances, model, top)
    for path in drawn:
        out(f"wrote {path}")


def _draw(folder: Path, kind: str, report: CacheReport, model: DeviceModel, distances: StepReuse | None) -> list[str]:
    from simulator.pictures import write_pictures
    from simulator.report import cache_lines

    written = write_pictures(
        folder,
        report,
        kind=kind,
        histograms={"step": distances.total} if distances else None,
        cache_lines=cache_lines(model),
        line_bytes=model.caches[0].line_bytes,
        wave=model.limits.simd_width,
    )
    return [str(path) for path in written]


def _plans(
    targets: list[str],
    graph: str | None,
    device_model: str | None,
    device: str | None,
    strategies: str,
    storage: str,
    memory: str | None,
    time_limit_s: float,
    quiet: bool,
) -> tuple[TrainingGraph, DeviceModel, dict[str, Plan]]:
    """The graph, the device model, and plans by strategy or file."""
    import layoutopt.plan as plans
    from layoutopt.facade import check_request, solve_all
    from layoutopt.models import check_serves, find_graph, graph_of_plan

    if any(target.endswith(".json") for target in targets):
        found = {target: plans.load(Path(target)) for target in targets}
        loaded = graph_of_plan(found[targets[0]], Path(targets[0]), graph)
        model = model_for(device_model, device, loaded, quiet)
        for target, plan in found.items():
            check_serves(plan, target, loaded, model)
        return loaded, model, found
    if len(targets) > 1 or graph is not None:
        raise LayoutOptError(
            f"simulate takes plan files (….json), with --graph if need be, or one graph: got {' '.join(targets)}"
        )
    loaded = find_graph(targets[0])
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    check_request(names, memory, loaded, storage)
    model = model_for(device_model, device, loaded, quiet, storage=storage)
    with Progress("planning", quiet=quiet) as bar:
        solved = solve_all(
            loaded, model, names, memory=memory, time_limit_s=time_limit_s, progress=bar.fraction, storage=storage
        )
    return loaded, model, solved
