"""Time against memory of training steps: recomputation, lean layouts, and what half of the memory costs.

    python benchmarks/pareto.py [MODEL …] [--device-model NAME_OR_FILE] [--strategy S] [--time-limit S]
                                [--execute] [--device D] [--pictures DIR] [-o FILE] [--smoke]

Models are graphs that ship, graph files, or names such as ``gpt2/2@8x128`` (``reduced.py``). For each the frontier of
``layoutopt plan --pareto`` is printed: memory, predicted time of the kernels, ops that run twice. *At half* is the
fastest plan within half of the fastest plan's memory. Parameters and optimizer state are part of the memory and cannot
be made anew: *activations at half* says how much of what is left, half of the memory is.

``--execute`` runs two plans of the first model, the fastest and the one at half: losses of three steps, the bytes of
the device buffers that the executor made (the runtime's count) beside the plan's, and the time of a step of each,
interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recording import Record
from benchmarks.reduced import reduced_graph
from costmodel.device import load
from costmodel.model import CostModel
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.pareto import HEAD, Point, cells, draw, pareto, rows, slowdown_within
from layoutopt.plan import Plan
from layoutopt.show import table

MODELS = ("vit-tiny", "minilm@64x128", "gpt2/4@16x128")
SHARES = (0.8, 0.68, 0.5)
MIB = 1 << 20
STEPS, ROUNDS = 3, 7


def resident_bytes(graph: TrainingGraph) -> int:
    """Parameters and optimizer state, which stay whatever is made anew."""
    return sum(t.size_elems * t.item_bytes for t in graph.by_role("parameter", "state"))


def at_half(graph: TrainingGraph, points: tuple[Point, ...]) -> dict[str, Any]:
    """What half of the memory costs, and half of the memory beyond parameters and state."""
    whole, held = points[0].arena_bytes, resident_bytes(graph)
    fitting = [p for p in points if p.arena_bytes <= whole / 2]
    beyond = held + (whole - held) / 2
    return {
        "whole_bytes": whole,
        "resident_bytes": held,
        "least_bytes": points[-1].arena_bytes,
        "slowdown_within": {share: slowdown_within(points, whole * share) for share in SHARES},
        "slowdown_at_half": slowdown_within(points, whole / 2),
        "least_slowdown_at_half": fitting[0].bound_ns / points[0].objective_ns if fitting else None,
        "slowdown_at_half_of_activations": slowdown_within(points, beyond),
        "slowdown_at_least": points[-1].objective_ns / points[0].objective_ns,
    }


def show(name: str, found: dict[str, Any], shown: list[dict[str, Any]], seconds: float) -> None:
    print(f"\n{name}: planned in {seconds:.0f} s")
    table(HEAD, [cells(row) for row in shown])
    half = found["slowdown_at_half"]
    print(f"parameters and state are {found['resident_bytes'] / found['whole_bytes']:.0%} of the memory")
    least = f", {found['least_slowdown_at_half']:.3f} at least" if found["least_slowdown_at_half"] else ""
    print(f"at half of the memory: {f'slowdown {half:.3f}{least}' if half else 'no plan'}", end="; ")
    part = found["slowdown_at_half_of_activations"]
    print(f"at half of what is beyond these: {f'slowdown {part:.3f}' if part else 'no plan'}", flush=True)


def nearest(graph: TrainingGraph, points: tuple[Point, ...]) -> Point:
    """The fastest plan within half of the memory, or the smallest there is."""
    fitting = [p for p in points if p.arena_bytes <= points[0].arena_bytes / 2]
    return fitting[0] if fitting else points[-1]


def execute(graph: TrainingGraph, plans: dict[str, Plan], runtime: Any) -> dict[str, Any]:
    """Run plans in turns: losses, the runtime's bytes, seconds a step."""
    from kernels.execute import Executor
    from layoutopt.example import example_inputs

    inputs = example_inputs(graph)
    out: dict[str, Any] = {}
    runs = {}
    for name, plan in plans.items():
        run = runs[name] = Executor(runtime, graph, plan, seed=0)
        before, losses = runtime.allocated_bytes, []
        for _ in range(STEPS):
            run.step(inputs)
            losses.append(run.loss())
        if runtime.allocated_bytes != before:
            raise LayoutOptError(f"steps of plan {name} made buffers beyond its arena")
        out[name] = {"arena_bytes": plan.arena_bytes, "runtime_bytes": run.memory_bytes, "losses": losses, "step_s": []}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run.finish()
            began = time.perf_counter()
            run.step(inputs)
            run.finish()
            out[name]["step_s"].append(time.perf_counter() - began)
    for run in runs.values():
        run.close()
    return out


def show_runs(runs: dict[str, Any]) -> None:
    first = next(iter(runs.values()))
    for name, run in runs.items():
        over = run["runtime_bytes"] / run["arena_bytes"] - 1
        apart = max(abs(a / b - 1) for a, b in zip(run["losses"], first["losses"], strict=True))
        median = statistics.median(run["step_s"])
        print(
            f"{name}: plan {run['arena_bytes'] / MIB:.2f} MiB, runtime {run['runtime_bytes'] / MIB:.2f} MiB "
            f"({over:+.2%}); losses {np.round(run['losses'], 5).tolist()} (at most {apart:.1e} apart); "
            f"step {median * 1e3:.1f} ms, {median / statistics.median(first['step_s']):.3f} of the fastest"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device-model", default="generic-cpu")
    parser.add_argument("--strategy", default="ilp")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve")
    parser.add_argument("--most", type=int, default=12, help="choices of recomputation a rewritten graph")
    parser.add_argument("--execute", action="store_true", help="run the first model's fastest plan and that at half")
    parser.add_argument("--device", help="index or part of the device's label, for --execute")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw each frontier")
    parser.add_argument("-o", "--output", type=Path, help="write a record")
    parser.add_argument("--smoke", action="store_true", help="the smallest model, without a search, executed")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.strategy, args.most, args.execute = ["vit-digits"], "rowmajor", 4, True
    try:
        record = Record(args.output, "pareto", device_model=args.device_model, strategy=args.strategy)
        runtime, model = None, load(args.device_model)
        if args.execute:
            from kernels.runtime import Runtime, pick

            runtime = Runtime(pick(args.device))
            model = replace(model, limits=runtime.limits)  # whatever it was made for, plans are to run here
        costs = CostModel(model)
        models: list[dict[str, Any]] = []
        kept: dict[str, Any] = {"models": models}
        for number, name in enumerate(args.models):
            graph = reduced_graph(name)
            began = time.perf_counter()
            points = pareto(graph, costs, args.strategy, args.time_limit, most=args.most, shares=SHARES)
            seconds = time.perf_counter() - began
            found, shown = at_half(graph, points), rows(points)
            show(name, found, shown, seconds)
            models.append({"model": name, "graph_hash": graph.hash, "plan_s": seconds, **found, "points": shown})
            if args.pictures:
                args.pictures.mkdir(parents=True, exist_ok=True)
                draw(points, f"{name} on {costs.name}", args.pictures / f"{graph.name.replace('/', '-')}.svg")
            if args.execute and not number:
                plans = {"fastest": points[0].plan, "at half": nearest(graph, points).plan}
                kept["executed"] = execute(graph, plans, runtime)
                show_runs(kept["executed"])
            record.write(kept, runtime)
    except LayoutOptError as error:
        print(f"pareto: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
