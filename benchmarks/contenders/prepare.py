"""Before the steps: the starting weights as a file, the graph, the plan for the device here.

    python -m benchmarks.contenders.prepare SPEC

SPEC is JSON; see ``benchmarks/step.py``. Prints one line of JSON about the plan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.works import LR, WORKS, Work, build, capture
from layoutopt import graphfile
from layoutopt import plan as plans
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph


def captured(work: Work, file: Path) -> TrainingGraph:
    """The graph in ``file`` where it is one of this work, else a capture made now and kept there."""
    if file.is_file():
        try:
            graph = graphfile.load(file)
        except GraphError as error:
            print(f"{file}: {error}: captured anew", file=sys.stderr)
        else:
            optimizer = graph.meta.get("optimizer") or {}
            if graph.meta.get("command") == work.command and optimizer.get("momentum") == 0.0:
                return graph
            print(f"{file} is of {graph.meta.get('command')!r}, not {work.command!r}: captured anew", file=sys.stderr)
    graph = capture(work)
    graphfile.save(graph, file)
    return graph


def weights(work: Work, file: Path) -> None:
    """The module's parameters by name."""
    np.savez(file, **{name: p.detach().numpy() for name, p in build(work).named_parameters()})


def planned(work: Work, graph: TrainingGraph, spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """A plan in ``file``: the one that is there, or one made now from a calibration."""
    from layoutopt import planner
    from layoutopt.facade import solve_plan

    runtime, limits = _device(spec)
    calibrated_s = planned_s = 0.0
    plan = None
    if spec["reuse_plan"] and file.is_file():
        plan = plans.load(file)
        try:
            planner.validate(plan, graph, None, limits)
        except LayoutOptError as error:
            print(f"{file} is out of date ({error}): planned anew", file=sys.stderr)
            plan = None
    if plan is None:
        begin = time.perf_counter()
        model = _model(graph, spec, runtime)
        calibrated_s = time.perf_counter() - begin
        plan = solve_plan(graph, model, strategy=spec["strategy"], time_limit_s=spec["time_limit_s"])
        planned_s = time.perf_counter() - begin - calibrated_s
        plans.save(plan, file)
    solver = plan.solver
    return {
        "strategy": solver.strategy,
        "status": solver.status,
        "gap": solver.gap,
        "predicted_s": solver.objective_ns * 1e-9,
        "measured_ops": sum(op.cost.measured for op in plan.ops),
        "ops": len(plan.ops),
        "relayouts": len(plan.relayouts),
        "rewrites": list(plan.rewrites),
        "arena_bytes": plan.arena_bytes,
        "calibrated_s": calibrated_s,
        "planned_s": planned_s,
    }


def _device(spec: dict[str, Any]) -> tuple[Any, Any]:
    """The runtime (none where only a plan is wanted) and the limits that plans keep."""
    from costmodel import device as devices
    from kernels.runtime import Runtime, pick

    if spec["plan_only"]:
        return None, devices.load(spec["device_model"]).limits
    runtime = Runtime(pick(spec["device"]))
    return runtime, runtime.limits


def _model(graph: TrainingGraph, spec: dict[str, Any], runtime: Any) -> Any:
    """The device model: a file that is added to, or this user's calibration."""
    from costmodel import device as devices
    from layoutopt.models import device_model, uncalibrated
    from layoutopt.tuning import calibrate_for

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if spec["calibration_s"] == 0 and spec["device_model"] is None:
        return uncalibrated(runtime)
    if spec["device_model"] is None:
        return device_model(None, runtime, [graph], budget_s=spec["calibration_s"], announce=say)
    file = Path(spec["device_model"])
    base = devices.load(file) if file.is_file() or not spec["calibration_s"] else None
    if base is not None and (graph.hash in base.graphs or not spec["calibration_s"]):
        return base
    say(f"calibrating for {graph.name} for up to {spec['calibration_s']:.0f} s")
    model = calibrate_for(runtime, [graph], budget_s=spec["calibration_s"], base=base)
    devices.save(model, file)
    return model


def main() -> None:
    """Prepare one work."""
    spec = json.loads(sys.argv[1])
    work = WORKS[spec["work"]]
    graph = captured(work, Path(spec["graph"]))
    if not spec["plan_only"]:
        weights(work, Path(spec["weights"]))
    try:
        about = planned(work, graph, spec, Path(spec["plan"]))
    except LayoutOptError as error:
        raise SystemExit(f"{work.name}: {error}") from error
    print(json.dumps({"plan": about, "graph_hash": graph.hash, "lr": LR, **_torch()}))


def _torch() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    return {"torch": torch.__version__, "cuda": torch.cuda.get_device_name() if there else None}


if __name__ == "__main__":
    main()
