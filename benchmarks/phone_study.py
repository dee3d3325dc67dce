"""What layouts do to the memory of phones: the paper's models under mobile runtimes' layouts and under ours, simulated.

    python benchmarks/phone_study.py [--model MODEL]… [--device-model NAME]… [--strategies a,b,…] [--time-limit S]
                                     [--max-accesses N] [--json FILE] [--smoke]

MODEL as ``benchmarks/reduced.py`` takes them; by default models at full width with one or two of their blocks, which
stand for the rest. Every strategy's plan is of one rewritten graph, the solver's, and is simulated whole: line
accesses, misses of each level, bytes to and from memory, the energy of moving data. All are ratios over the solver's
plan; the paper reports 3.5 times fewer global-memory accesses and 4.2 times fewer cache misses than mobile runtimes.
What no kernel here does (``not_run``: slices that a peer copies) is in no figure, to the peers' advantage.

*Energy* is Horowitz' (Computing's energy problem, ISSCC 2014; 45 nm, for 64 bits): 10 pJ from a cache of 8 KiB, 100 pJ
from one of 1 MiB, 1.3 nJ from DRAM. Phones are made otherwise, so only the ratio means anything.

Models may need more memory than the phone has: its limits are lifted for planning. Nothing here ran on a phone: all
numbers are models of public facts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.recording import Record
from benchmarks.studies import ended, study_all, study_parser
from costmodel.device import DeviceModel, load
from layoutopt.facade import solve_all
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from simulator.simulate import simulate

MODELS = (
    *("llama-3.2-1b/1@1x128", "qwen2.5-1.5b/1@1x128", "gemma-2-2b/2@1x128", "bert-large/2@4x128", "vit-large/2@4"),
    *("unet-odd", "whisper-large-v3/1@1x16"),
)
DEVICES = ("adreno-740", "immortalis-g925")
STRATEGIES = ("ilp", "activation", "mnn-image", "mnn-buffer", "tflite", "tvm-flat")
NEAR_J, SHARED_J, MEMORY_J = 10e-12, 100e-12, 1.3e-9
"""For eight bytes, from a private cache, a shared one, and DRAM."""
ROOMY_BYTES = 1 << 40


def roomy(model: DeviceModel) -> DeviceModel:
    """The device with memory for any step."""
    return replace(model, limits=replace(model.limits, global_mem_bytes=ROOMY_BYTES, max_alloc_bytes=ROOMY_BYTES))


def described(graph: TrainingGraph, plan: Plan, model: DeviceModel, max_accesses: float) -> dict[str, Any]:
    """What a plan's step does to the caches."""
    report = simulate(graph, plan, model, max_accesses=max_accesses)
    total = report.total
    caches = {cache.name: cache for cache in model.caches}
    energy_j = MEMORY_J * total.memory_bytes / 8
    for level, hits, misses in zip(report.levels, total.hits, total.misses, strict=True):
        cache = caches[level]
        energy_j += (hits + misses) * cache.line_bytes / 8 * (SHARED_J if cache.shared else NEAR_J)
    return {
        "strategy": plan.solver.strategy,
        "status": plan.solver.status,
        "predicted_ns": plan.solver.objective_ns,
        "relayouts": len(plan.relayouts),
        "accesses": total.accesses,
        "lines": total.lines,
        "misses": dict(zip(report.levels, total.misses, strict=True)),
        "misses_95": dict(zip(report.levels, total.misses_95, strict=True)),
        "memory_bytes": total.memory_bytes,
        "energy_j": energy_j,
        "walked": report.walked,
    }


def study(
    graph: TrainingGraph, device: str, strategies: Sequence[str], limit_s: float, max_accesses: float
) -> dict[str, Any]:
    """Every strategy's plan of a model on a device."""
    model = roomy(load(device))
    plans = solve_all(graph, model, strategies, time_limit_s=limit_s)
    rows = [described(graph, plans[strategy], model, max_accesses) for strategy in strategies]
    return {"ops": len(graph.ops), "plans": rows}


def figures(row: dict[str, Any]) -> dict[str, float]:
    """What is compared, by name."""
    misses = {f"{level} misses": count for level, count in row["misses"].items()}
    return {"line accesses": row["lines"], **misses, "memory bytes": row["memory_bytes"], "energy": row["energy_j"]}


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per strategy its figures over the first plan's, but those of levels that the first plan does not pass."""
    first, *_ = found["plans"]
    reference = figures(first)
    return {
        row["strategy"]: {
            name: value / reference[name] for name, value in figures(row).items() if reference.get(name, 0) > 0
        }
        for row in found["plans"]
    }


def show(found: dict[str, Any]) -> None:
    """A table per model and device."""
    rows = ratios(found)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"{found['model']} on {found['device']}, {found['ops']} ops, over {next(iter(rows))}")
    print("".join([f"{'':12}", *(f"{name:>20}" for name in names)]))
    for strategy, row in rows.items():
        print("".join([f"{strategy:12}", *(f"{row[n]:20.2f}" if n in row else f"{'-':>20}" for n in names)]))


def summary(rows: list[dict[str, Any]]) -> None:
    """Geometric means over models, per device."""
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [ratios(row) for row in rows if row["device"] == device]
        print(f"{device}, geometric means of {len(own)} models")
        for strategy in own[0]:
            shared = [name for name in own[0][strategy] if all(name in one[strategy] for one in own)]
            means = (math.exp(sum(math.log(one[strategy][n] or 1.0) for one in own) / len(own)) for n in shared)
            print("  ".join([f"{strategy:12}", *(f"{n} {m:.2f}" for n, m in zip(shared, means, strict=True))]))


def main() -> int:
    """Study every model on every device."""
    parser = study_parser(__doc__, "a small step, two strategies", 30.0)
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="the first is what the others are set against"
    )
    parser.add_argument("--max-accesses", type=float, default=500_000)
    args = parser.parse_args()
    models, devices, strategies = args.model or MODELS, args.device_model or DEVICES, args.strategies.split(",")
    if args.smoke:
        models, devices, strategies = ("bert-tiny/1@2x5",), ("immortalis-g925",), ["greedy", "tflite"]

    def study_of(graph: TrainingGraph, device: str) -> dict[str, Any]:
        return study(graph, device, strategies, args.time_limit, args.max_accesses)

    record = Record(args.json, "phone_study", strategies=strategies, max_accesses=args.max_accesses)
    summary(study_all(models, devices, study_of, show, record))
    return 0


if __name__ == "__main__":
    sys.exit(ended("phone_study", main))
