"""Every model of the zoo, planned at full size: prices, proofs, and the data movement that a plan avoids.

    python benchmarks/zoo_plans.py [MODEL...] [--device-model NAME_OR_FILE]... [--time-limit S]
                                   [--strategy NAME] [--captures FILE] [--plans FILE] [-o FILE] [--smoke]

A row is a graph that ships with the package on a device model, planned in a process of its own: nothing is priced yet,
and the peak of memory is its own. ``plan s`` is what a caller waits for: prices of every rewritten graph that planning
considers, solves, arena and validation. ``cpu_s`` of a record is what these took of cores, helpers of pricing included:
it says more where others use them. ``--strategy greedy`` shows what all but the search takes. What is avoided is said
in two ways:

- *strided views*: operands of the planned graph that are permuted, sliced or split so that their elements, in the order
  in which the op sees them, are not one dense run of a row-major tensor. Each (tensor, view) counts once. A framework
  without index transformation copies it or reads it with strides; here it is part of the index expression whatever the
  layout. Broadcasts and plain reshapes cost nothing anywhere and do not count; *beyond gemm* leaves out what any matrix
  product takes as it is (transposed matrices).
- *relayouts avoided*: conversions that the strategy ``ideal`` makes (every op in its own best layouts, a conversion
  wherever two disagree) less those in the solver's plan, from the same tables. MiB are read and written together.

``--captures`` takes a record of ``capture_zoo.py``, for ops and views as captured, and the time, memory and file of a
capture; ``--plans`` takes plans from an earlier record of this script and makes none. The plans of models that do not
fit a device's memory are made and counted all the same, and marked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from layoutopt.collector import collector_paused
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.pass_views import seen
from layoutopt.view import View

DEVICES = ("generic-cpu", "adreno-740")
PAPER = ("llama-3.2-1b", "qwen2.5-1.5b", "gemma-2-2b", "bert-large", "vit-large", "sd-1.5-unet", "whisper-large-v3")
MIB = 1 << 20


def strided_views(graph: TrainingGraph) -> dict[str, int]:
    """Counts of (tensor, view) pairs that are no dense run of a row-major tensor, and the bytes of copying each once.

    ``beyond_gemm`` leaves out what a library's (batched) matrix product takes by a leading dimension or a transposition
    flag: operands of contractions whose three axes have one stride each, one of the last two being 1.
    """
    taken: dict[tuple[str, View], bool] = {}
    for op in graph.ops:
        for operand in op.operands:
            pair = operand.tensor, operand.view
            taken[pair] = taken.get(pair, True) and op.kind == "contraction"
    out = dict.fromkeys(("strided_views", "strided_view_bytes", "beyond_gemm", "beyond_gemm_bytes"), 0)
    for (name, view), by_contractions in taken.items():
        tensor = graph.tensors[name]
        layout = seen(view, tensor.shape)
        if layout is None or _is_dense(layout):
            continue
        elems = prod(n for axis, n in enumerate(layout.shape) if not _is_broadcast(layout, axis))
        moved = 2 * elems * tensor.item_bytes
        out["strided_views"] += 1
        out["strided_view_bytes"] += moved
        if not (by_contractions and _is_matrix(layout)):
            out["beyond_gemm"] += 1
            out["beyond_gemm_bytes"] += moved
    return out


def _is_matrix(layout: Layout) -> bool:
    strides = [[m.stride for m in layout.axis_modes(axis)] for axis in range(layout.rank)]
    return all(len(own) <= 1 for own in strides) and any(own in ([], [1]) for own in strides[-2:])


def _is_broadcast(layout: Layout, axis: int) -> bool:
    modes = layout.axis_modes(axis)
    return bool(modes) and all(m.stride == 0 for m in modes)


def _is_dense(layout: Layout) -> bool:
    """Whether the elements follow each other in memory as they do in the view, broadcast axes left out."""
    stride = 1
    for mode in reversed([m for m in layout.modes if m.stride]):
        if mode.stride != stride:
            return False
        stride *= mode.extent
    return True


def _cpu_s() -> float:
    """Seconds of cores that this process and its helpers have taken."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


@collector_paused()
def plan_one(name: str, device: str, limit_s: float, strategy: str = "ilp") -> dict[str, Any]:
    """One model on one device model, in this process."""
    from costmodel.device import load
    from costmodel.model import CostModel
    from layoutopt.assembly import assemble
    from layoutopt.models import find_graph
    from layoutopt.planner import assign, fastest, tabulate, validate
    from layoutopt.pricing import Pricer
    from layoutopt.rewrites import alternatives, origin_of

    graph, costs = find_graph(name), CostModel(load(device))
    seconds, cpu_s = (dict.fromkeys(("rewrite", "price", "solve", "place"), 0.0) for _ in range(2))
    began, busy = time.perf_counter(), _cpu_s()

    def lap(what: str) -> None:
        nonlocal began, busy
        now, used = time.perf_counter(), _cpu_s()
        seconds[what] += now - began
        cpu_s[what] += used - busy
        began, busy = now, used

    candidates = alternatives(graph)
    lap("rewrite")
    pricer = Pricer(costs)
    priced = [tabulate(candidate, costs, pricer=pricer) for candidate in candidates]
    kernels_priced = pricer.kernels
    lap("price")
    found = []
    for tables in priced:
        assignment = assign(tables, strategy, limit_s)
        lap("solve")
        found.append((tables, assemble(tables, costs, assignment, strategy)))
        lap("place")
    tables, best = fastest(found)
    fits = True
    try:
        validate(best, graph, costs)
    except DeviceError:
        fits = False  # too large for the device's memory, found out before its kernels are looked at
    lap("place")
    ideal = assemble(tables, costs, assign(tables, "ideal"), "ideal")
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "model": graph.name,
        "device_model": costs.name,
        "strategy": strategy,
        "parameters": sum(t.size_elems for t in graph.by_role("parameter")),
        "captured": graph.meta.get("command", ""),
        "graph_hash": graph.hash,
        "ops": len(tables.graph.ops),
        "rewrites": list(origin_of(tables.graph)[1]),
        "alternatives": len(candidates),
        "kernels_priced": kernels_priced,
        "storages": len(tables.problem.storages),
        "choices": best.solver.choices,
        **strided_views(tables.graph),
        "ideal_relayouts": len(ideal.relayouts),
        "ideal_relayout_bytes": sum(r.bytes_moved for r in ideal.relayouts),
        "ideal_ns": ideal.solver.objective_ns,
        "relayouts": len(best.relayouts),
        "relayout_bytes": sum(r.bytes_moved for r in best.relayouts),
        "objective_ns": best.solver.objective_ns,
        "bound_ns": best.solver.bound_ns,
        "status": best.solver.status,
        "method": best.solver.method,
        "arena_bytes": best.arena_bytes,
        "fits_device": fits,
        **{f"{what}_s": round(value, 3) for what, value in seconds.items()},
        "plan_s": round(sum(seconds.values()), 3),
        "cpu_s": {what: round(value, 3) for what, value in cpu_s.items()},
        "peak_bytes": size,
        "load": os.getloadavg()[0],
    }


def plan_apart(name: str, device: str, limit_s: float, strategy: str) -> dict[str, Any]:
    """The same in a process of its own.

    Raises:
        LayoutOptError: it failed; its last words.
    """
    words = [sys.executable, __file__, name, "--device-model", device, "--time-limit", str(limit_s), "--one"]
    words += ["--strategy", strategy]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise LayoutOptError(f"planning {name} on {device} failed: {last}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is its head; the first column is text."""
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def capture_table(captures: list[dict[str, Any]], plans: list[dict[str, Any]]) -> str:
    """What capturing gives, model by model."""
    keys = ("strided_views", "strided_view_bytes", "beyond_gemm", "beyond_gemm_bytes")
    views = {row["model"]: [row[key] // (MIB if key.endswith("bytes") else 1) for key in keys] for row in plans}
    rows = [
        [
            *("model", "M parameters", "ops captured", "after passes", "views folded", "kept", "strided views"),
            *("MiB if copied", "beyond gemm", "MiB", "capture s", "peak GiB", "file KiB"),
        ]
    ]
    for r in captures:
        rows.append(
            [
                r["model"],
                f"{r['parameters'] / 1e6:,.1f}",
                *(f"{r[key]:,}" for key in ("captured_ops", "ops", "views_folded", "views_kept")),
                *([f"{n:,}" for n in views[r["model"]]] if r["model"] in views else "----"),
                *(f"{r['capture_s']:.1f}", f"{r['peak_bytes'] / 2**30:.2f}", f"{r['file_bytes'] / 1024:.0f}"),
            ]
        )
    return markdown(rows)


def plan_table(plans: list[dict[str, Any]]) -> str:
    """What planning gives, on one device model."""
    rows = [
        [
            *("model", "ops", "choices", "relayouts of ideal", "of the plan", "avoided", "MiB of ideal"),
            *("of the plan", "ideal / plan ns", "price s", "solve s", "plan s", "status", "arena GiB"),
        ]
    ]
    for r in plans:
        gap = 100 * (r["objective_ns"] - r["bound_ns"]) / r["objective_ns"]
        rows.append(
            [
                r["model"],
                *(f"{r[key]:,}" for key in ("ops", "choices", "ideal_relayouts", "relayouts")),
                f"{r['ideal_relayouts'] - r['relayouts']:,}",
                *(f"{r[key] / MIB:,.1f}" for key in ("ideal_relayout_bytes", "relayout_bytes")),
                f"{r['ideal_ns'] / r['objective_ns']:.2f}",
                *(f"{r[key]:.1f}" for key in ("price_s", "solve_s", "plan_s")),
                r["status"] + ("" if gap == 0 else f" {gap:.2g}%"),
                f"{r['arena_bytes'] / 2**30:.2f}" + ("" if r["fits_device"] else " *"),
            ]
        )
    return markdown(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", help="shipped graphs or graph files; all that ship by default")
    parser.add_argument("--device-model", action="append", help=f"by default {' and '.join(DEVICES)}")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve")
    parser.add_argument("--strategy", default="ilp", help="what plans are made by")
    parser.add_argument("--captures", type=Path, help="a record of capture_zoo.py")
    parser.add_argument("--plans", type=Path, help="an earlier record of this script: its plans, with other captures")
    parser.add_argument("-o", "--output", type=Path, help="write a record")
    parser.add_argument("--one", action="store_true", help="plan in this process and print one record")
    parser.add_argument("--smoke", action="store_true", help="the smallest model, in this process, no record")
    args = parser.parse_args()
    devices = args.device_model or list(DEVICES)
    try:
        if args.one:
            print(json.dumps(plan_one(args.models[0], devices[0], args.time_limit, args.strategy)))
            return 0
        if args.smoke:
            print(plan_table([plan_one("vit-digits", "generic-cpu", args.time_limit)]))
            return 0
        earlier = json.loads(args.plans.read_text(encoding="utf-8")) if args.plans else {"plans": {}, "captures": []}
        captures = json.loads(args.captures.read_text(encoding="utf-8"))["models"] if args.captures else []
        captures = captures or earlier["captures"]
        plans: dict[str, list[dict[str, Any]]] = earlier["plans"]
        for device in [] if args.plans else devices:
            plans[device] = []
            for name in args.models or _in_order():
                plans[device].append(plan_apart(name, device, args.time_limit, args.strategy))
                row = plans[device][-1]
                print(f"{device}: {name} {row['status']} in {row['plan_s']:.1f} s", file=sys.stderr, flush=True)
        if captures:
            print(capture_table(captures, next(iter(plans.values()), [])), end="\n\n")
        for device, rows in plans.items():
            print(f"{device}\n\n{plan_table(rows)}\n")
        if args.output:
            machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
            versions = {p: version(p) for p in ("numpy", "numba", "ortools")} | {"python": platform.python_version()}
            record = {"benchmark": "zoo_plans", "machine": machine, "versions": versions, "plans": plans}
            record |= {key: value for key, value in earlier.items() if key != "captures"}
            write_atomic(args.output, json.dumps({**record, "captures": captures}, indent=1) + "\n")
    except (LayoutOptError, OSError, json.JSONDecodeError) as error:
        print(f"zoo_plans: {error}", file=sys.stderr)
        return 2
    return 0


def _in_order() -> list[str]:
    """The paper's seven first, then the rest."""
    from layoutopt.models import shipped_names

    names = shipped_names()
    return [name for name in PAPER if name in names] + [name for name in names if name not in PAPER]


if __name__ == "__main__":
    sys.exit(main())
