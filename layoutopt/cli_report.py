"""``layoutopt report``: a plan explained in one HTML file."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt import complete
from layoutopt.cli_device import model_for, open_runtime
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.show import Progress, emit, out, say

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime
    from layoutopt.graph import TrainingGraph
    from layoutopt.plan import Plan

__all__ = ["plan_model", "report"]


def report(
    target: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file to explain.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")] = Path("report.html"),
    strategies: Annotated[
        str, typer.Option("--strategies", help="To show beside it, comma-separated; 'none': only the plan.")
    ] = "greedy,rowmajor",
    device_model: Annotated[
        str | None,
        typer.Option("--device-model", help="A file or a built-in name.", autocompletion=complete.device_models),
    ] = None,
    graph: Annotated[str | None, typer.Option("--graph", help="The plan's graph, if not beside it.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every plan on the device, and profile this one.")
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="Index or part of its name.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What `layoutopt profile PLAN --json` printed.")
    ] = None,
    caches: Annotated[bool, typer.Option("--simulate/--no-simulate", help="Run the cache simulator.")] = True,
    memory: Annotated[str | None, typer.Option("--memory", help="Of the other strategies' plans: 512MiB, …")] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver.")] = 60.0,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Measured steps of each plan, interleaved.")] = 15,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of long tables.")] = 12,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Write one HTML file that explains a plan: strategies, time, cache misses, memory, layouts, the solver's proof."""
    import layoutopt.plan as plans
    from layoutopt import models
    from layoutopt.facade import check_request
    from layoutopt.report.agreement import pairs_of, read_profile
    from layoutopt.report.charts import check_charts
    from layoutopt.report.gather import as_json, gathered, others, sections, summary
    from layoutopt.report.page import check_page, page
    from layoutopt.report.steps import steps_of

    check_target(output)
    check_page()
    check_charts()
    if measure and profile is not None:
        raise LayoutOptError("--measure profiles the plan itself: leave --profile out, or --measure")
    names = [] if strategies == "none" else [name.strip() for name in strategies.split(",") if name.strip()]
    plan = plans.load(target)
    loaded = models.graph_of_plan(plan, target, graph)
    check_request(names, memory, loaded)
    measured = read_profile(profile) if profile is not None else None
    runtime = open_runtime(device) if measure else None
    model = plan_model(plan, loaded, device_model, device, runtime, json)
    models.check_serves(plan, str(target), loaded, model)
    if measured is not None:
        pairs_of(steps_of(plan, loaded, model), measured)  # refuses another plan's before the work
    with Progress("planning", quiet=json) as bar:
        beside = others(plan, loaded, model, names, memory, time_limit, bar.fraction)
    with Progress("reporting", quiet=json) as bar:
        facts = gathered(
            beside,
            loaded,
            model,
            runtime=runtime,
            measured=measured,
            simulate_caches=caches,
            rounds=rounds,
            progress=bar.stage,
        )
    command = _command(target, output, names, device_model, measure, device, profile)
    date = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    title = f"{plan.graph_name} on {model.name}: a plan by {plan.solver.strategy}"
    text = page(title, [summary(facts, command, date), *sections(facts, top)])
    write_atomic(output, text)
    if json:
        emit({"file": str(output), "bytes": len(text.encode()), **as_json(facts)})
        return
    out(f"wrote {output} ({len(text.encode()) / 2**20:.2f} MiB)")


def plan_model(
    plan: Plan, graph: TrainingGraph, given: str | None, device: str | None, runtime: Runtime | None, quiet: bool
) -> DeviceModel:
    """The model that is given, else one that ships and that the plan was made with, else that of the device."""
    from costmodel import device as devices
    from layoutopt.models import check_device
    from layoutopt.report.gather import storage_of_plan

    if given is None and runtime is None and device is None:
        for name in devices.list_builtin():
            model = devices.load(name)
            if model.name == plan.device_name and model.hash == plan.device_hash:
                say(f"layoutopt: device model {name}, with which the plan was made")
                return model
    model = model_for(given, device, graph, quiet, runtime, storage_of_plan(plan))
    if runtime is not None:
        check_device(model.name, f"device model {given}", runtime)
    return model


def _command(
    target: Path,
    output: Path,
    strategies: list[str],
    device_model: str | None,
    measure: bool,
    device: str | None,
    profile: Path | None,
) -> str:
    """The command that made a report, without the folders that its files lie in."""
    words = ["layoutopt", "report", target.name, "-o", output.name, "--strategies", ",".join(strategies) or "none"]
    words += ["--device-model", Path(device_model).name] if device_model else []
    words += ["--measure"] if measure else []
    words += ["--device", device] if device else []
    words += ["--profile", profile.name] if profile else []
    return shlex.join(words)
