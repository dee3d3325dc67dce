"""Finding things by name for the face: graphs (files, shipped captures, zoo names), device models, plans' graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.errors import DeviceError, GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.graphfile import decode, decode_meta, load
from layoutopt.plan import Plan
from layoutopt.rewrites import calibration_name, planned_graph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import DeviceInfo, Runtime

__all__ = [
    "calibrated_path",
    "check_device",
    "check_serves",
    "device_model",
    "find_graph",
    "graph_of_plan",
    "shipped",
    "shipped_names",
    "uncalibrated",
]


def shipped_names() -> list[str]:
    """Graphs that are part of the package."""
    data = files("layoutopt") / "data"
    return sorted(f.name.removesuffix(".graph") for f in data.iterdir() if f.name.endswith(".graph"))


def shipped(name: str) -> TrainingGraph:
    """A graph that is part of the package, by name."""
    file = files("layoutopt") / "data" / f"{name}.graph"
    if not file.is_file():
        raise GraphError(f"no graph named {name!r} ships with layoutopt: there are {', '.join(shipped_names())}")
    return decode(file.read_bytes(), f"shipped graph {name}")


def shipped_facts() -> dict[str, dict[str, Any]]:
    """What is known of each graph that is part of the package (see :func:`layoutopt.workload.facts`), by name."""
    found = {}
    for name in shipped_names():
        file = files("layoutopt") / "data" / f"{name}.graph"
        meta = decode_meta(file.read_bytes(), f"shipped graph {name}")
        found[name] = {"what": meta.get("what", ""), "command": meta.get("command", ""), **meta.get("facts", {})}
    return found


def find_graph(name: str) -> TrainingGraph:
    """A graph by file name, or by the name of one that ships with the package."""
    if not Path(name).is_file() and name in shipped_names():
        return shipped(name)
    return load(name)


def graph_of_plan(plan: Plan, plan_file: Path, given: str | None) -> TrainingGraph:
    """The graph a plan was made for: as given, else beside the plan, else shipped; matched by hash.

    Raises:
        GraphError: none matches.
    """
    if given is not None:
        return find_graph(given)
    for graph in _graphs_near(plan_file):
        if graph.hash == plan.graph_hash:
            return graph
    raise GraphError(
        f"the graph of {plan_file} ({plan.graph_name}, {plan.graph_hash[:12]}) is not beside it: give it with --graph"
    )


def _graphs_near(plan_file: Path) -> Iterator[TrainingGraph]:
    """Graphs beside a plan that can be read, then those that ship."""
    for file in sorted(plan_file.resolve().parent.glob("*.graph")):
        try:
            yield load(file)
        except GraphError:  # a neighbour that is damaged or of another version is not the one that is looked for
            continue
    yield from map(shipped, shipped_names())


def calibrated_path(info: DeviceInfo) -> Path:
    """Where this user's calibration of a device is kept."""
    from platformdirs import user_data_path

    words = f"{info.platform_version} {info.name} {info.driver}".lower()
    slug = re.sub(r"[^a-z0-9.]+", "-", words).strip("-")[:120]
    return user_data_path("layoutopt") / "devices" / f"{slug}.toml"


def check_device(name: str, what: str, runtime: Runtime) -> None:
    """Refuse what was made for another device than the one that is to run it.

    Raises:
        DeviceError: ``name`` is not the runtime's device.
    """
    if name != runtime.info.name:
        raise DeviceError(
            f"{what} is for {name!r}, but the device here is {runtime.info.name!r}: calibrate and plan for this one"
        )


def check_serves(plan: Plan, what: str, graph: TrainingGraph, model: DeviceModel) -> None:
    """Refuse a plan that is not for ``graph`` or cannot run on the device of ``model``.

    Raises:
        GraphError: it is for another graph.
        DeviceError: it is for another device, and this one has not its kernels or has too little memory.
    """
    from layoutopt import planner

    graph = planned_graph(plan, graph)
    try:
        planner.validate(plan, graph, None, model.limits)
    except LayoutOptError as error:
        if plan.device_name == model.name:
            raise
        raise DeviceError(f"{what} is for {plan.device_name!r} and does not serve {model.name!r} ({error})") from error


def uncalibrated(runtime: Runtime) -> DeviceModel:
    """A model of the device with its limits and generic constants: for trying things out, not for choosing layouts."""
    from dataclasses import replace

    from costmodel import device as devices

    return replace(devices.load("generic-cpu"), name=runtime.info.name, limits=runtime.limits)


def device_model(
    given: str | None,
    runtime: Runtime | None,
    graphs: Sequence[TrainingGraph] = (),
    *,
    budget_s: float = 60.0,
    announce: Callable[[str], None] = lambda _: None,
    progress: Callable[[str, float], None] | None = None,
    storage: str = "fp32",
) -> DeviceModel:
    """The device model to plan with.

    Args:
        given: a file or the name of a built-in model; None means the runtime's device.
        runtime: the device; its stored calibration is used. What it lacks for ``graphs`` is measured now (and said so).
        graphs: what to calibrate for.
        budget_s: seconds for a calibration made now.
        announce: told in one sentence what is used.
        progress: of a calibration.
        storage: how the graphs' numbers lie in memory.

    Raises:
        DeviceError: no model is given and there is no device.
    """
    from costmodel import device as devices

    if given is not None:
        return devices.load(given)
    if runtime is None:
        raise DeviceError("no device model: give --device-model FILE, or a name that `layoutopt devices` lists")
    path = calibrated_path(runtime.info)
    base = devices.load(str(path)) if path.is_file() else None
    if base is not None and all(calibration_name(graph, storage) in base.graphs for graph in graphs):
        announce(f"device model {path}")
        return base
    from layoutopt.tuning import calibrate_to

    lack = f"has no calibration for {', '.join(g.name for g in graphs) or 'planning'} here"
    announce(f"{runtime.info.name} {lack}: measuring for up to {budget_s:.0f} s")
    model = calibrate_to(
        path, runtime, graphs, budget_s=budget_s, progress=progress, base=base, storage=storage, announce=announce
    )
    announce(f"calibration kept in {path}")
    return model
