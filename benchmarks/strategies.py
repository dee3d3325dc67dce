"""The solver's plan beside every other strategy on the same kernels: how far from the optimum, and how fast.

    python benchmarks/strategies.py [MODEL...] [--works A,B,… --graphs DIR] [--strategies ilp,bfs,…]
                                    [--device SEL] [--device-model D] [--calibration S] [--refine N] [--rounds N]
                                    [--burst N] [--predict-only] [--json OUT] [--smoke]

MODEL is a graph file or a shipped name; ``--works A`` is DIR/A.graph, or is captured (with torch). One graph, the
rewritten one that planning keeps, is planned by every strategy from one cost model. *Over ilp* is what a
strategy's kernels and relayouts are predicted to take over the solver's; of the peers' policies it includes copies that
they make and no kernel here does, which are listed (*not run*) and neither in the plan nor in what is measured: no peer
trains on such devices, this is their layout strategy on our kernels.

Whole steps are measured in turn, another plan first in each round: medians, quartiles, and the ratio to the solver's
plan. A turn is ``--burst`` steps (1 on a CPU, 10 on a GPU) waited for once. Plans whose arenas do not fit into
``--memory`` together are measured in groups, each with the solver's. Without ``--device-model`` the device is
calibrated for ``--calibration`` seconds a model, for the kernels of all strategies' plans; *known* is the share of a
plan's predicted time that was measured kernel by kernel. ``--refine N`` then runs every strategy's plan, files what its
kernels take within the step, and plans again, N times. ``--predict-only`` plans by a device model, needs no device,
and measures nothing; its models are the zoo's seven by default. ``--smoke`` plans vit-digits by two strategies (and the
solver, stopped after two seconds) and runs three untimed rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import solved
from benchmarks.recording import Record
from benchmarks.step_prediction import groups_of
from benchmarks.zoo_plans import PAPER
from layoutopt import graphfile
from layoutopt.assembly import assemble
from layoutopt.checkpoint import initial_values
from layoutopt.compare import measure_interleaved
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.models import find_graph, uncalibrated
from layoutopt.peers import NotRun, PeerTables, applied, with_not_run
from layoutopt.plan import Plan
from layoutopt.planner import STRATEGIES, assign, check_strategy, validate
from layoutopt.policies import POLICIES
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment
from layoutopt.rewrites import alternatives
from layoutopt.stepcost import measured_share, predict_step

TOLERANCE = 1e-4
MIB = 1 << 20


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def graphs(args: argparse.Namespace) -> Iterator[tuple[str, TrainingGraph]]:
    """What is to be planned, by name."""
    for name in args.models:
        yield name, find_graph(name)
    for work in args.works:
        file = args.graphs / f"{work}.graph" if args.graphs else None
        if file is not None and file.is_file():
            yield work, graphfile.load(file)
        else:
            from benchmarks.works import WORKS, capture

            yield work, capture(WORKS[work])


def assignments(
    graph: TrainingGraph, costs: Any, names: Sequence[str], limit_s: float
) -> dict[str, tuple[Tables, Assignment, float] | str]:
    """Per strategy its tables, its assignment and the seconds that it took; or why it has none."""
    tables, best = solved(graph, costs, limit_s)
    out: dict[str, tuple[Tables, Assignment, float] | str] = {"ilp": (tables, best, best.seconds)}
    for name in names:
        if name == "ilp":
            continue
        began = time.perf_counter()
        try:
            own, found = applied(tables, name) if name in POLICIES else (tables, assign(tables, name))
            out[name] = own, found, time.perf_counter() - began
        except LayoutOptError as error:
            out[name] = str(error)
    return out


def moved_bytes(tables: Tables, assignment: Assignment) -> int:
    """What the relayouts read and write."""
    tensors = (tables.graph.tensors[name] for name in tables.names)
    return sum(
        2 * len(copies) * t.size_elems * t.item_bytes for t, copies in zip(tensors, assignment.copies, strict=True)
    )


def assembled(found: Mapping[str, tuple[Tables, Assignment, float] | str], costs: Any) -> dict[str, Plan]:
    """The plans of the strategies that have one."""
    made = {name: one for name, one in found.items() if not isinstance(one, str)}
    return {name: with_not_run(assemble(own, costs, choice, name), own) for name, (own, choice, _) in made.items()}


def predicted(
    found: Mapping[str, tuple[Tables, Assignment, float] | str], plans: Mapping[str, Plan]
) -> dict[str, dict[str, Any]]:
    """A row per strategy: what its plan says."""
    best_ns = plans["ilp"].solver.objective_ns
    rows: dict[str, dict[str, Any]] = {}
    for name, one in found.items():
        if isinstance(one, str):
            rows[name] = {"strategy": name, "dead_end": one}
            continue
        tables, assignment, seconds = one
        extra = tables.not_run if isinstance(tables, PeerTables) else NotRun()
        report = plans[name].solver
        rows[name] = {
            "strategy": name,
            "status": report.status,
            "method": report.method,
            "seconds": seconds,
            "objective_ns": report.objective_ns,
            "bound_ns": report.bound_ns,
            "gap": (report.objective_ns + extra.cost_ns) / best_ns - 1,
            "relayouts": sum(map(len, assignment.copies)),
            "relayout_bytes": moved_bytes(tables, assignment),
            "not_run_copies": extra.copies,
            "not_run_ns": extra.cost_ns,
            "not_run_bytes": extra.bytes_moved,
        }
    return rows


def measure(
    graph: TrainingGraph, plans: Mapping[str, Plan], runtime: Any, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Steps of every plan beside the solver's: times, loss and the ratio to the solver's plan of the same group."""
    values = initial_values(graph, 0)
    room = int(args.memory * 2**30) - plans["ilp"].arena_bytes
    groups = list(groups_of({name: p.arena_bytes for name, p in plans.items() if name != "ilp"}, room)) or [[]]
    out: dict[str, dict[str, Any]] = {}
    for own in groups:
        together = {name: plans[name] for name in ("ilp", *own)}
        share_s = args.budget * len(together) / (len(plans) + len(groups) - 1)
        found = measure_interleaved(
            graph, together, runtime, values, rounds=args.rounds, budget_s=share_s, burst=args.burst
        )
        reference = statistics.median(found["ilp"][0])
        for name, (times, loss) in found.items():
            low, median, high = statistics.quantiles(times, n=4)
            row = {"median_s": median, "quartiles_s": [low, high], "least_s": min(times), "rounds": len(times)}
            out.setdefault(name, {**row, "over_ilp": median / reference, "loss": loss})
    return out


def calibrated(graph: TrainingGraph, runtime: Any, names: Sequence[str], seconds: float) -> Any:
    """A model of the device in which the kernels of all strategies' plans are measured, as far as time goes."""
    from costmodel.calibrate import calibrate
    from layoutopt.tuning import Planner

    planned = alternatives(graph)
    order = ["ilp", *(name for name in names if name != "ilp")]
    return calibrate(runtime, seconds, planned, chooser=Planner(planned, strategies=order))


def within_steps(model: Any, graph: TrainingGraph, args: argparse.Namespace, runtime: Any) -> Any:
    """The model with what every strategy's kernels take within the steps of its plan, as ``train --refine`` learns."""
    from costmodel.model import CostModel
    from kernels.execute import Executor
    from layoutopt.refining import with_measurements, within_step

    values = initial_values(graph, 0)
    for number in range(args.refine):
        say(f"{graph.name}: refining, round {number + 1}")
        costs = CostModel(model)
        found: dict[str, Any] = {}
        for plan in assembled(assignments(graph, costs, args.strategies, args.time_limit), costs).values():
            executor = Executor(runtime, graph, plan, dict(values))
            found = within_step(executor, model) | found
            executor.close()
        model = with_measurements(model, found)
    return model


def study(name: str, graph: TrainingGraph, args: argparse.Namespace, runtime: Any) -> dict[str, Any]:
    """One model: planned, and measured where there is a device."""
    from costmodel.device import load
    from costmodel.model import CostModel

    if args.device_model:
        model = load(args.device_model)
    elif args.smoke:
        model = uncalibrated(runtime)
    else:
        say(f"{name}: calibrating for {args.calibration:.0f} s")
        model = calibrated(graph, runtime, args.strategies, args.calibration)
    if runtime is not None:
        model = within_steps(model, graph, args, runtime)
    costs = CostModel(model)
    found = assignments(graph, costs, args.strategies, args.time_limit)
    plans = assembled(found, costs)
    rows = predicted(found, plans)
    if runtime is not None:
        for strategy, plan in plans.items():
            validate(plan, graph, costs)
            rows[strategy] |= {
                "predicted_s": predict_step(plan, graph, model).step_s,
                "known": measured_share(plan),
                "arena_bytes": plan.arena_bytes,
            }
        for strategy, times in measure(graph, plans, runtime, args).items():
            rows[strategy] |= times
    tables = found["ilp"][0]
    assert isinstance(tables, Tables)
    return {
        "model": name,
        "graph": graph.name,
        "command": graph.meta.get("command", ""),
        "device_model": model.name,
        "ops": len(tables.graph.ops),
        "rows": list(rows.values()),
    }


def show(result: Mapping[str, Any]) -> None:
    """A table per model."""
    rows = [row for row in result["rows"] if "dead_end" not in row]
    measured = any("median_s" in row for row in rows)
    print(f"{result['model']} on {result['device_model']}, {result['ops']} ops")
    head = (
        f"{'strategy':12}{'objective ms':>14}{'over ilp':>10}{'moves':>7}{'MiB':>9}{'not run':>9}{'ms':>8}{'plan s':>8}"
    )
    print(
        head + (f"{'predicted':>11}{'median ms':>11}{'quartiles':>19}{'over ilp':>10}{'known':>7}" if measured else "")
    )
    for row in rows:
        line = (
            f"{row['strategy']:12}{row['objective_ns'] * 1e-6:14.3f}{row['gap']:+10.2%}{row['relayouts']:7}"
            f"{row['relayout_bytes'] / MIB:9.1f}{row['not_run_copies']:9}{row['not_run_ns'] * 1e-6:8.2f}"
            f"{row['seconds']:8.2f}"
        )
        if "median_s" in row:
            low, high = row["quartiles_s"]
            line += (
                f"{row['predicted_s'] * 1e3:11.2f}{row['median_s'] * 1e3:11.2f}{low * 1e3:10.2f} {high * 1e3:8.2f}"
                f"{row['over_ilp']:10.3f}{row['known']:7.0%}"
            )
        print(line)
    for row in result["rows"]:
        if "dead_end" in row:
            print(f"{row['strategy']:12}no plan: {row['dead_end']}")
    print(flush=True)


def losses_differ(result: Mapping[str, Any]) -> bool:
    """Whether some plan computes another loss than the solver's."""
    losses = [row["loss"] for row in result["rows"] if "loss" in row]
    return any(not abs(loss - losses[0]) <= TOLERANCE * abs(losses[0]) for loss in losses)  # true of NaN


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--works", default="", help="letters of works.py, comma-separated")
    parser.add_argument("--graphs", type=Path, help="folder of LETTER.graph")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--device")
    parser.add_argument("--device-model", help="a file or the name of one that ships")
    parser.add_argument("--calibration", type=float, default=110.0, help="seconds a model, without --device-model")
    parser.add_argument(
        "--refine", type=int, default=0, help="rounds of measuring kernels within steps before planning"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the exact solver")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--burst", type=int, default=0, help="steps of a turn")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of measuring a model")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that arenas may take together")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.strategies, args.rounds, args.time_limit = ["vit-digits"], "greedy,mnn-buffer", 3, 2.0
        args.refine = 1
    args.works = [w for w in args.works.split(",") if w]
    args.strategies = [n for n in args.strategies.split(",") if n]
    if not args.models and not args.works:
        args.models = list(PAPER) if args.predict_only else ["vit-digits"]
    if args.predict_only and not args.device_model:
        parser.error("--predict-only needs --device-model")
    return args


def main() -> int:
    """Plan, run, print, record."""
    args = arguments()
    runtime = None
    wrong = False
    try:
        for name in args.strategies:
            check_strategy(name)
        if not args.predict_only:
            from kernels.runtime import Runtime, pick

            runtime = Runtime(pick(args.device))
            args.burst = args.burst or (10 if runtime.limits.kind == "gpu" else 1)
        record = Record(args.json, "strategies", rounds=args.rounds, burst=args.burst, predict_only=args.predict_only)
        done: list[dict[str, Any]] = []
        for name, graph in graphs(args):
            result = study(name, graph, args, runtime)
            done.append(result)
            if losses_differ(result):
                wrong = True
                print(f"{name}: WRONG, the plans do not compute the same loss")
            elif args.smoke:
                print(f"{graph.name}: {len(result['rows'])} strategies agree on the loss")
            if not args.smoke:
                show(result)
            record.write({"models": done}, runtime)
    except LayoutOptError as error:
        say(f"strategies: {error}")
        return 2
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
