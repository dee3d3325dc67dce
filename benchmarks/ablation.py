"""What each part of the product buys: one work's step, with one part more from row to row, in turn in one process.

    python benchmarks/ablation.py [--work A] [--graph FILE] [--device SEL] [--device-model FILE] [--calibration S]
                                  [--rounds N] [--burst N] [--profile N] [--json OUT] [--smoke]

The first row is one scalar kernel an op over row-major tensors. Then come, each on top of those above:

- *register tiles*: contractions by vectors and register tiles, still row-major;
- *local memory*: staged contractions too (GPUs only);
- *layouts*: the solver chooses them;
- *epilogues*: pointwise work at a contraction's store;
- *attention*: one op forward, one backward, no probabilities kept;
- *order*: equal steps beside each other, updates as soon as they can run;
- *updates at gradients*: a weight is updated where its gradient is made;
- *shared launches*: equal steps in one launch;
- *float16 storage*: large tensors lie in memory as halves.

All rows are planned from one device model: ``--device-model FILE``, added to when ``--calibration`` is given, or one
made now. A row whose part changes nothing is left out. A row is not always faster than the one above: it is what was
measured. Printed are medians of a step (quartiles in the record), the ratio to the row above, launches and arena; the
losses of all rows must agree to 1e-4 (to 1e-2 with halves). ``--profile N`` prints the N kernels of the last row that
take longest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.works import WORKS, capture
from costmodel import device as devices
from costmodel.cost import Cost
from costmodel.device import DeviceModel
from costmodel.model import CostModel
from kernels.execute import Executor
from kernels.runtime import Runtime, pick
from kernels.spec import Kernel
from layoutopt import graphfile, planner, profiling
from layoutopt.checkpoint import initial_values
from layoutopt.example import example_inputs
from layoutopt.files import check_target, write_atomic
from layoutopt.graph import TrainingGraph
from layoutopt.models import uncalibrated
from layoutopt.plan import Plan
from layoutopt.rewrites import rewritten
from layoutopt.tuning import calibrate_for

TOLERANCE = 1e-4
WARM = 3
TILED = tuple(f"{family}.{name}(" for family in ("contraction", "convolution") for name in ("outer", "dot", "tile"))
STAGED = ("contraction.staged(",)


@dataclass(frozen=True)
class Rung:
    """A row: what it may use.

    Attributes:
        name: of the part that it adds.
        without: beginnings of the labels of kernels that it may not use.
        strategy: of the layouts.
        rewrites: of the graph.
        share: whether steps may share launches.
        tolerance: of the loss.
    """

    name: str
    without: tuple[str, ...]
    strategy: str
    rewrites: tuple[str, ...] = ()
    share: bool = False
    tolerance: float = TOLERANCE


LADDER = (
    Rung("scalar kernels", (*TILED, *STAGED), "rowmajor"),
    Rung("register tiles", STAGED, "rowmajor"),
    Rung("local memory", (), "rowmajor"),
    Rung("layouts", (), "ilp"),
    Rung("epilogues", (), "ilp", ("epilogue",)),
    Rung("attention", (), "ilp", ("attention", "epilogue")),
    Rung("order", (), "ilp", ("attention", "epilogue", "neighbours", "updates")),
    Rung("updates at gradients", (), "ilp", ("attention", "epilogue", "neighbours", "apply", "updates")),
    Rung("shared launches", (), "ilp", ("attention", "epilogue", "neighbours", "apply", "updates"), share=True),
    Rung("float16 storage", (), "ilp", ("attention", "epilogue", "neighbours", "updates", "half"), True, 1e-2),
)


class Limited(CostModel):
    """A cost model for which some kernels are far too slow.

    Args:
        model: of the device.
        without: beginnings of their labels.
    """

    def __init__(self, model: DeviceModel, without: tuple[str, ...]) -> None:
        super().__init__(model)
        self._without = without

    def predict(self, kernel: Kernel, together: int = 1) -> Cost:
        """As the model says, a thousand times as long where the kernel is not to be used."""
        cost = super().predict(kernel, together)
        if not kernel.variant.label.startswith(self._without):
            return cost
        return replace(cost, total_ns=1e3 * cost.total_ns, compute_ns=1e3 * cost.compute_ns)


def rungs(graph: TrainingGraph, kind: str) -> Iterator[Rung]:
    """Those that change something on a device of this kind."""
    last: tuple[Any, ...] | None = None
    for rung in LADDER:
        if rung.name == "local memory" and kind == "cpu":
            continue
        ops = rewritten(graph, rung.rewrites).ops
        now = (rung.without, rung.strategy, ops, "half" in rung.rewrites, rung.share)
        if now != last:
            yield rung
        last = now


def plans(graph: TrainingGraph, model: DeviceModel, wanted: Sequence[Rung]) -> dict[str, Plan]:
    """By name of the row; rows that differ in launches alone have one plan."""
    found: dict[str, Plan] = {}
    made: dict[tuple[Any, ...], Plan] = {}
    for rung in wanted:
        key = rung.without, rung.strategy, rung.rewrites
        if key not in made:
            costs = Limited(model, rung.without)
            made[key] = planner.plan(graph, costs, rung.strategy, time_limit_s=60.0, rewrites=rung.rewrites)
            say(f"  {rung.name}: predicted {made[key].solver.objective_ns * 1e-6:.2f} ms, {made[key].solver.status}")
        found[rung.name] = made[key]
    return found


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def device_model(args: argparse.Namespace, graph: TrainingGraph, runtime: Runtime, wanted: Sequence[Rung]) -> Any:
    """Of ``--device-model``, added to or made where there is time for it."""
    if args.smoke:
        return uncalibrated(runtime)
    file = args.device_model
    base = devices.load(file) if file is not None and file.is_file() else None
    if base is not None and not args.calibration:
        return base
    graphs = [rewritten(graph, names) for names in {rung.rewrites: None for rung in reversed(wanted)}]
    say(f"calibrating over {len(graphs)} graphs for up to {args.calibration or 90:.0f} s")
    model = calibrate_for(runtime, graphs, budget_s=args.calibration or 90.0, base=base)
    if file is not None:
        devices.save(model, file)
    return model


def measure(
    executors: dict[str, Executor], inputs: dict[str, np.ndarray], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a step, by row: turns of ``--burst`` steps, another row first in each round."""
    burst = args.burst
    times: dict[str, list[float]] = {name: [] for name in executors}
    names = list(executors)
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            executor = executors[name]
            if burst > 1:
                executor.step(inputs)
                executor.finish()
            begin = time.perf_counter()
            for _ in range(burst):
                executor.step(inputs)
            executor.finish()
            times[name].append((time.perf_counter() - begin) / burst)
    return times


def main() -> None:
    """Plan, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="A", choices=WORKS)
    parser.add_argument("--graph", type=Path, help="its captured graph, where it cannot be captured")
    parser.add_argument("--device")
    parser.add_argument("--device-model", type=Path)
    parser.add_argument("--calibration", type=float, help="seconds; 90 where there is no device model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--burst", type=int, help="steps a turn: 1 on a CPU, 10 on a GPU")
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--note", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.json:
        check_target(args.json)
    runtime = Runtime(pick(args.device))
    args.burst = args.burst or (10 if runtime.limits.kind == "gpu" else 1)
    work = WORKS["tiny" if args.smoke else args.work]
    graph = graphfile.load(args.graph) if args.graph else capture(work)
    wanted = list(rungs(graph, runtime.limits.kind))
    if args.smoke:
        wanted = [wanted[0], wanted[-1]]
    model = device_model(args, graph, runtime, wanted)
    planned = plans(graph, model, wanted)
    values, inputs = initial_values(graph, 0), example_inputs(graph)
    executors, losses = {}, {}
    for rung in wanted:
        executors[rung.name] = Executor(runtime, graph, planned[rung.name], dict(values), share=rung.share)
        executors[rung.name].step(inputs)
        losses[rung.name] = executors[rung.name].loss()
        for _ in range(0 if args.smoke else WARM):
            executors[rung.name].step(inputs)
    reference = losses[wanted[0].name]
    if not all(abs(losses[rung.name] - reference) <= rung.tolerance * abs(reference) for rung in wanted):
        raise SystemExit(f"the rows do not compute the same loss: {losses}")
    if args.smoke:
        print(f"{graph.name}: {len(wanted)} rows agree on the loss")
        return
    times = measure(executors, inputs, args)
    rows = [row(rung, planned[rung.name], executors[rung.name], times[rung.name]) for rung in wanted]
    print(table(work.text, work.size, runtime.info.label, rows))
    if args.json:
        about = {"benchmark": "ablation", "device": runtime.info.model_hash_fields, "cpus": os.cpu_count()}
        about |= {"work": work.name, "text": work.text, "size": work.size, "note": args.note, "burst": args.burst}
        write_atomic(args.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if args.profile:
        last = executors[wanted[-1].name]
        profiling.print_profile(profiling.profile(last, inputs, model, rounds=5), top=args.profile)


def row(rung: Rung, plan: Plan, executor: Executor, times: list[float]) -> dict[str, Any]:
    """What was found of a row."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "name": rung.name,
        "rewrites": list(plan.rewrites),
        "predicted_s": plan.solver.objective_ns * 1e-9,
        "status": plan.solver.status,
        "measured_ops": sum(op.cost.measured for op in plan.ops),
        "ops": len(plan.ops),
        "relayouts": len(plan.relayouts),
        "median_s": statistics.median(times),
        "quartiles_s": [low, high],
        "rounds": len(times),
        "launches": executor.launches,
        "arena_bytes": plan.arena_bytes,
    }


def table(text: str, size: str, device: str, rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text."""
    lines = [f"{text}, {size}, on {device}"]
    lines.append(
        f"{'with':18}{'predicted ms':>13}{'ms':>10}{'of above':>9}{'launches':>9}{'relayouts':>10}{'arena MB':>9}"
    )
    before = None
    for found in rows:
        ratio = f"{found['median_s'] / before:9.3f}" if before else " " * 9
        before = found["median_s"]
        lines.append(
            f"{found['name']:18}{found['predicted_s'] * 1e3:13.2f}{found['median_s'] * 1e3:10.2f}{ratio}"
            f"{found['launches']:9}{found['relayouts']:10}{found['arena_bytes'] / 1e6:9.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
