"""Sampled simulations of a step against the full one: what is saved, how far off it is, and how far it says it is.

    python benchmarks/cache_sampling.py [--model NAME]... [--device-model NAME]... [--strategy S] [--seeds N]
                                        [--max-accesses N] [--time-limit S] [--json FILE] [--smoke]

A model is planned by one strategy for a device and simulated whole, every access of every step, and then from samples
with so many seeds. Per counter: the mean error over seeds (what all samples share: run-up and warming), the largest,
the 95% interval that a sample states, and how many of the intervals hold the full count. Times are CPU seconds in one
process, compiled code warm. Misses and bytes are the simulator's, not a device's.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.recording import Record
from benchmarks.studies import ended, study_all, study_parser
from costmodel.device import DeviceModel, load
from layoutopt.facade import solve_plan
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from simulator.simulate import CacheReport, simulate

MODELS = ("vit-digits", "minilm")
DEVICES = ("adreno-740", "immortalis-g925", "pocl-cpu-3.1")


def quantities(report: CacheReport) -> dict[str, tuple[float, float]]:
    """Totals with half of their 95% intervals."""
    total = report.total
    found = {
        f"{name} misses": (misses, half)
        for name, misses, half in zip(report.levels, total.misses, total.misses_95, strict=True)
    }
    found["bytes read"] = total.memory_read_bytes, total.memory_read_95
    found["bytes written"] = total.memory_written_bytes, total.memory_written_95
    return found


def timed(graph: TrainingGraph, plan: Plan, model: DeviceModel, **how: Any) -> tuple[CacheReport, float]:
    """A report and the CPU seconds that it took."""
    began = time.process_time()
    report = simulate(graph, plan, model, **how)
    return report, time.process_time() - began


def study(
    graph: TrainingGraph, device: str, strategy: str, seeds: int, max_accesses: float, limit_s: float
) -> dict[str, Any]:
    """Full against sampled simulation of one plan."""
    model = load(device)
    plan = solve_plan(graph, model, strategy=strategy, time_limit_s=limit_s)
    simulate(graph, plan, model, max_accesses=1000)  # compiles
    full, full_s = timed(graph, plan, model, max_accesses=float("inf"), repeats=0)
    sampled = [timed(graph, plan, model, max_accesses=max_accesses, seed=seed) for seed in range(seeds)]
    counters = {}
    for name, (true, _) in quantities(full).items():
        if not true:
            continue
        own = [quantities(report)[name] for report, _ in sampled]
        errors = [value / true - 1 for value, _ in own]
        counters[name] = {
            "full": true,
            "mean_error": statistics.mean(errors),
            "largest_error": max(errors, key=abs),
            "stated_95": statistics.median(half / value if value else 0.0 for value, half in own),
            "held": sum(abs(value - true) <= half for value, half in own),
        }
    sampled_s = statistics.median(seconds for _, seconds in sampled)
    return {
        "strategy": strategy,
        "steps": len(full.by_step),
        "steps_walked": sampled[0][0].steps_walked,
        "walked": sampled[0][0].walked,
        "full_s": full_s,
        "sampled_s": sampled_s,
        "faster": full_s / sampled_s,
        "seeds": seeds,
        "counters": counters,
    }


def print_study(row: dict[str, Any]) -> None:
    """One plan's lines."""
    print(
        f"{row['model']} on {row['device']}, {row['strategy']}: {row['walked']:.1%} of the accesses walked, "
        f"{row['steps_walked']} of {row['steps']} steps; {row['full_s']:.1f} s full, {row['sampled_s']:.1f} s sampled, "
        f"{row['faster']:.1f} times as fast"
    )
    for name, own in row["counters"].items():
        print(
            f"  {name:18} full {own['full']:.4g}; mean error {own['mean_error']:+.2%}, largest "
            f"{own['largest_error']:+.2%}; stated ±{own['stated_95']:.2%}, held {own['held']} of {row['seeds']}"
        )


def main() -> int:
    """Study every model on every device."""
    parser = study_parser(__doc__, "the smallest model on one device", 60.0, "greedy")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--max-accesses", type=float, default=2_000_000)
    args = parser.parse_args()
    models, devices = args.model or MODELS, args.device_model or DEVICES
    if args.smoke:
        models, devices, args.seeds, args.max_accesses = ("vit-digits",), ("adreno-740",), 2, 20_000

    def study_of(graph: TrainingGraph, device: str) -> dict[str, Any]:
        return study(graph, device, args.strategy, args.seeds, args.max_accesses, args.time_limit)

    study_all(
        models, devices, study_of, print_study, Record(args.json, "cache_sampling", max_accesses=args.max_accesses)
    )
    return 0


if __name__ == "__main__":
    sys.exit(ended("cache_sampling", main))
