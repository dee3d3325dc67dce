"""A phone's plan chosen with simulated costs beside the one chosen with the roofline alone: where they differ.

    python benchmarks/simulated_costs.py [--model NAME]... [--device-model NAME]... [--strategy S] [--time-limit S]
                                         [--json FILE] [--smoke]

Both plans are simulated whole, and priced by both kinds of costs: line accesses, misses, bytes to and from memory, the
kernels' predicted time. Storages whose layout differs are counted and listed (``--json``).
Nothing here ran on a phone: all numbers are models of public facts.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.recording import Record
from benchmarks.studies import ended, study_all, study_parser
from costmodel.device import DeviceModel, load
from kernels.bind import bind
from layoutopt.facade import costs_of, solve_plan
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from simulator.simulate import simulate

MODELS = ("vit-digits", "minilm")
DEVICES = ("adreno-740", "immortalis-g925")


def changed(one: Plan, other: Plan) -> list[dict[str, Any]]:
    """Storages that both plans have and that lie in different layouts, the largest first."""
    sizes: dict[str, int] = {}
    for slot in one.arena:
        sizes.setdefault(slot.name.rpartition("#")[0], slot.size_bytes)
    out = [
        {
            "storage": name,
            "bytes": sizes.get(name, 0),
            "roofline": docs[0].layout().describe(),
            "simulated": other.layouts[name][0].layout().describe(),
        }
        for name, docs in one.layouts.items()
        if name in other.layouts and docs[0] != other.layouts[name][0]
    ]
    return sorted(out, key=lambda row: -row["bytes"])


def described(graph: TrainingGraph, plan: Plan, model: DeviceModel, costs: dict[str, Any]) -> dict[str, Any]:
    """What a plan comes to: predicted by either costs, simulated."""
    report = simulate(graph, plan, model)
    total = report.total
    kernels = [step.kernel for step in bind(graph, plan, model.limits)]
    return {
        "predicted_s": {name: sum(own.predict(k).total_ns for k in kernels) * 1e-9 for name, own in costs.items()},
        "relayouts": len(plan.relayouts),
        "rewrites": list(plan.rewrites),
        "lines": total.lines,
        "misses": dict(zip(report.levels, total.misses, strict=True)),
        "misses_95": dict(zip(report.levels, total.misses_95, strict=True)),
        "memory_bytes": total.memory_bytes,
    }


def study(graph: TrainingGraph, device: str, strategy: str, limit_s: float) -> dict[str, Any]:
    """Both plans of a graph on a device."""
    model = load(device)
    costs = {kind: costs_of(model, kind) for kind in ("model", "simulated")}
    plans, seconds = {}, {}
    for kind in costs:
        began = time.process_time()
        plans[kind] = solve_plan(graph, model, strategy=strategy, time_limit_s=limit_s, costs=kind)
        seconds[kind] = time.process_time() - began
    differ = changed(plans["model"], plans["simulated"])
    shared = set(plans["model"].layouts) & set(plans["simulated"].layouts)
    return {
        "strategy": strategy,
        "plan_s": seconds,
        "storages": len(shared),
        "changed": differ,
        "plans": {kind: described(graph, plan, model, costs) for kind, plan in plans.items()},
    }


def print_study(row: dict[str, Any]) -> None:
    """Both plans' numbers, simulated over roofline."""
    one, other = row["plans"]["model"], row["plans"]["simulated"]

    def over(pick: Any) -> str:
        return f"{pick(one):.4g} -> {pick(other):.4g} ({pick(other) / pick(one):.3f})" if pick(one) else "0"

    print(
        f"{row['model']} on {row['device']}, {row['strategy']}: {len(row['changed'])} of {row['storages']} storages "
        f"lie differently; planned in {row['plan_s']['model']:.0f} and {row['plan_s']['simulated']:.0f} s of CPU"
    )
    print("  chosen by the roofline -> by simulated costs (ratio)")
    for name in row["plans"]["model"]["predicted_s"]:
        print(f"  kernels by {name} costs, s: {over(lambda p, name=name: p['predicted_s'][name])}")
    print(f"  line accesses: {over(lambda p: p['lines'])}")
    for level in one["misses"]:
        if level in other["misses"]:
            print(f"  {level} misses: {over(lambda p, level=level: p['misses'][level])}")
    print(f"  bytes to and from memory: {over(lambda p: p['memory_bytes'])}")
    for own in row["changed"][:5]:
        print(f"  {own['storage']} ({own['bytes']} bytes): {own['roofline']} -> {own['simulated']}")


def main() -> int:
    """Study every model on every device."""
    args = study_parser(__doc__, "a step of two layers, not solved exactly", 60.0, "ilp").parse_args()
    models, devices = args.model or MODELS, args.device_model or DEVICES
    if args.smoke:
        models, devices, args.strategy = ("bert-tiny/1@2x5",), ("immortalis-g925",), "greedy"

    def study_of(graph: TrainingGraph, device: str) -> dict[str, Any]:
        return study(graph, device, args.strategy, args.time_limit)

    study_all(models, devices, study_of, print_study, Record(args.json, "simulated_costs", strategy=args.strategy))
    return 0


if __name__ == "__main__":
    sys.exit(ended("simulated_costs", main))
