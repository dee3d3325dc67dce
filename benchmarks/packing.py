"""Packing buffers into memory: hard instances into their capacity, and the steps of models over their live bytes.

    python benchmarks/packing.py [FOLDER] [--time-limit S] [--model NAME]... [--no-models] [--device-model NAME]
                                 [--json FILE] [--smoke]

*Instances* are files ``NAME.CAPACITY.csv`` of ``id,lower,upper,size`` with half-open lifetimes, as MiniMalloc's
``benchmarks/challenging`` holds them; FOLDER is where they lie, and none are packed without it. An instance is packed
if every buffer has its place below the capacity before the time limit; offsets are checked apart from what found them.

*Models* are steps of graphs that ship, row-major and with the rewrites that planning always applies: the lifetimes and
sizes of all buffers, and the arena over the bytes that are alive at the fullest step, as planning packs them. *Placing*
is the time that this takes. ``--smoke`` packs one made-up instance and the smallest model.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording import Record
from benchmarks.zoo_plans import PAPER, markdown
from layoutopt.errors import LayoutOptError
from layoutopt.memory import Buffer, find_overlap, pack


def read_instance(path: Path) -> tuple[list[Buffer], int]:
    """Buffers and capacity.

    Raises:
        LayoutOptError: the file is no instance.
    """
    try:
        capacity = int(path.name.split(".")[-2])
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        buffers = [Buffer(r["id"], int(r["size"]), int(r["lower"]), int(r["upper"]) - 1) for r in rows]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise LayoutOptError(
            f"{path} is no packing instance ({error!r}): its name is NAME.CAPACITY.csv, its columns id,lower,upper,size"
        ) from error
    return buffers, capacity


def pack_instance(name: str, buffers: Sequence[Buffer], capacity: int, limit_s: float) -> dict[str, Any]:
    """Pack into a capacity and look at the result again."""
    began = time.perf_counter()
    arena = pack(buffers, 1, enough_bytes=capacity, time_limit_s=limit_s)
    seconds = time.perf_counter() - began
    check(name, buffers, arena.placed, arena.size_bytes)
    return {
        "instance": name,
        "buffers": len(buffers),
        "capacity": capacity,
        "live": arena.bound_bytes,
        "size": arena.size_bytes,
        "packed": arena.size_bytes <= capacity,
        "seconds": seconds,
    }


def check(name: str, buffers: Sequence[Buffer], placed: Sequence[Any], size: int) -> None:
    """Nothing missing, nothing outside, nothing shared.

    Raises:
        LayoutOptError: it is wrong.
    """
    outside = [p for p in placed if p.offset_bytes < 0 or p.end_bytes > size]
    missing = set(buffers) - {p.buffer for p in placed}
    if outside or missing or find_overlap(placed):
        raise LayoutOptError(f"WRONG: {name} is packed with buffers outside, missing or overlapping")


def made_up(seed: int = 7, count: int = 40, steps: int = 24, capacity: int = 1000) -> list[Buffer]:
    """Buffers that fill a capacity: a square, cut again and again."""
    draw = random.Random(seed)
    pieces = [(0, steps, 0, capacity)]
    while len(pieces) < count:
        first, last, low, high = pieces.pop(draw.randrange(len(pieces)))
        if draw.random() < 0.5 and last - first > 1:
            at = draw.randrange(first + 1, last)
            pieces += [(first, at, low, high), (at, last, low, high)]
        elif high - low > 20:
            at = draw.randrange(low + 10, high - 9)
            pieces += [(first, last, low, at), (first, last, at, high)]
        else:
            pieces.append((first, last, low, high))
    return [Buffer(f"b{i}", high - low, first, last - 1) for i, (first, last, low, high) in enumerate(pieces)]


def pack_model(name: str, device: str) -> list[dict[str, Any]]:
    """A model's step, placed: one row per graph that planning would consider."""
    from costmodel.device import load
    from costmodel.model import CostModel
    from layoutopt.assembly import assemble
    from layoutopt.layout import Layout
    from layoutopt.models import find_graph
    from layoutopt.planner import assign, tabulate
    from layoutopt.rewrites import alternatives, origin_of

    captured, costs = find_graph(name), CostModel(load(device))
    align = costs.limits.base_align_bytes
    rows = []
    for graph in alternatives(captured):
        layouts = {s: (Layout.row_major(node.shape),) for s, node in graph.storages.items()}
        tables = tabulate(graph, costs, layouts)
        plan = assemble(tables, costs, assign(tables, "rowmajor"), "rowmajor")
        buffers = [Buffer(slot.name, slot.size_bytes, slot.first, slot.last) for slot in plan.arena]
        began = time.perf_counter()
        arena = pack(buffers, align)
        seconds = time.perf_counter() - began
        check(name, buffers, arena.placed, arena.size_bytes)
        rows.append(
            {
                "model": name,
                "device_model": costs.name,
                "rewrites": list(origin_of(graph)[1]),
                "buffers": len(buffers),
                "steps": len(plan.steps),
                "live_bytes": arena.bound_bytes,
                "arena_bytes": arena.size_bytes,
                "over_live": arena.size_bytes / arena.bound_bytes,
                "proven": arena.proven,
                "placing_s": seconds,
            }
        )
    return rows


def instance_table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    head = ["instance", "buffers", "capacity", "live", "packed into", "in capacity", "s"]
    keys = ("buffers", "capacity", "live", "size")
    body = [
        [r["instance"], *(f"{r[k]:,}" for k in keys), "yes" if r["packed"] else "no", f"{r['seconds']:.2f}"]
        for r in rows
    ]
    return markdown([head, *body])


def model_table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    head = ["model", "attention fused", "buffers", "live MiB", "arena MiB", "arena / live", "no smaller", "placing s"]
    body = [
        [
            r["model"],
            "yes" if "attention" in r["rewrites"] else "no",
            f"{r['buffers']:,}",
            *(f"{r[k] / 2**20:,.1f}" for k in ("live_bytes", "arena_bytes")),
            f"{r['over_live']:.4f}",
            "proven" if r["proven"] else "",
            f"{r['placing_s']:.2f}",
        ]
        for r in rows
    ]
    return markdown([head, *body])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of instances")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds an instance")
    parser.add_argument("--model", action="append", help=f"by default {', '.join(PAPER)}")
    parser.add_argument("--no-models", action="store_true", help="instances only")
    parser.add_argument("--device-model", default="generic-cpu", help="whose kernels and alignment the steps have")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="one made-up instance and the smallest model, untimed")
    args = parser.parse_args()
    try:
        if args.smoke:
            rows = [pack_instance("made up", made_up(), 1000, args.time_limit)]
            print(f"{instance_table(rows)}\n\n{model_table(pack_model('vit-digits', args.device_model))}")
            return 0 if rows[0]["packed"] else 1
        record = Record(args.json, "packing", time_limit_s=args.time_limit)
        found: dict[str, Any] = {"instances": [], "models": []}
        pack(made_up(), 1)  # compiled before the clock starts, as an installed package is after its first plan
        for path in _instances(args.folder):
            found["instances"].append(pack_instance(path.name.split(".")[0], *read_instance(path), args.time_limit))
            row = found["instances"][-1]
            print(f"{row['instance']}: {row['size']} in {row['seconds']:.2f} s", file=sys.stderr, flush=True)
            record.write(found)
        if found["instances"]:
            print(instance_table(found["instances"]), end="\n\n")
        for name in () if args.no_models else args.model or PAPER:
            found["models"] += pack_model(name, args.device_model)
            print(f"{name}: {found['models'][-1]['over_live']:.4f}", file=sys.stderr, flush=True)
            record.write(found)
        if found["models"]:
            print(model_table(found["models"]))
    except (LayoutOptError, OSError) as error:
        print(f"packing: {error}", file=sys.stderr)
        return 2
    return 0


def _instances(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    found = sorted(folder.glob("*.csv"))
    if not found:
        raise LayoutOptError(f"no instances in {folder}: give the folder that holds NAME.CAPACITY.csv files")
    return found


if __name__ == "__main__":
    sys.exit(main())
