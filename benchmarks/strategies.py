"""The solver's plan beside every other strategy, on the same kernels, whole steps interleaved.

    python benchmarks/strategies.py GRAPH [--device SEL] [--device-model D] [--rounds N] [--json OUT] [--smoke]

GRAPH is a file or a shipped name. One step of each plan in turn, another one first in each round; medians, quartiles
and the ratio to the solver's plan. ``--smoke`` plans vit-digits by two strategies and runs three untimed rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from layoutopt.checkpoint import initial_values
from layoutopt.compare import measure_interleaved
from layoutopt.facade import solve_all
from layoutopt.models import device_model, find_graph, uncalibrated
from layoutopt.stepcost import predict_step


def main() -> None:
    """Plan, run, print."""
    from kernels.runtime import Runtime, pick

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", default="vit-digits")
    parser.add_argument("--device")
    parser.add_argument("--device-model")
    parser.add_argument("--strategies", default="")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of measuring")
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    graph = find_graph(args.graph)
    runtime = Runtime(pick(args.device))
    if args.smoke:
        model = uncalibrated(runtime)
    else:
        model = device_model(args.device_model, runtime, [graph], budget_s=110, announce=print)
    names = ["greedy", "rowmajor"] if args.smoke else [n for n in args.strategies.split(",") if n]
    plans = solve_all(graph, model, names)
    rounds = 3 if args.smoke else args.rounds
    values = initial_values(graph, 0)
    measured = measure_interleaved(graph, plans, runtime, values, rounds=rounds, budget_s=args.budget)
    medians = {name: statistics.median(times) for name, (times, _) in measured.items()}
    reference = medians.get("ilp", min(medians.values()))
    losses = [loss for _, loss in measured.values()]
    if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
        raise SystemExit(f"the plans do not compute the same loss: {losses}")
    rows = []
    for name, plan in plans.items():
        low, _, high = statistics.quantiles(measured[name][0], n=4)
        rows.append(
            {
                "strategy": name,
                "status": plan.solver.status,
                "predicted_s": predict_step(plan, graph, model).step_s,
                "median_s": medians[name],
                "quartiles_s": [low, high],
                "least_s": min(measured[name][0]),
                "over_ilp": medians[name] / reference,
                "relayouts": len(plan.relayouts),
                "relayout_bytes": sum(r.bytes_moved for r in plan.relayouts),
                "arena_bytes": plan.arena_bytes,
                "rounds": len(measured[name][0]),
            }
        )
    if args.smoke:
        print(f"{graph.name}: {len(rows)} strategies agree on the loss")
        return
    print(f"{graph.name} on {runtime.info.label}")
    print(
        f"{'strategy':12}{'predicted ms':>14}{'median ms':>11}{'quartiles':>19}{'least':>9}{'over ilp':>10}{'moves':>7}"
    )
    for r in rows:
        low, high = r["quartiles_s"]
        print(
            f"{r['strategy']:12}{r['predicted_s'] * 1e3:14.2f}{r['median_s'] * 1e3:11.2f}"
            f"{low * 1e3:10.2f} {high * 1e3:8.2f}{r['least_s'] * 1e3:9.2f}{r['over_ilp']:10.3f}{r['relayouts']:7}"
        )
    if args.json:
        held_out = model.held_out
        record = {
            "graph": graph.name,
            "meta": graph.meta,
            "device": runtime.info.label,
            "driver": runtime.info.driver,
            "calibration": {"kernels": len(model.measurements), "seconds": model.budget_s, "held_out": vars(held_out)}
            if held_out
            else None,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
