"""The exact solver's reductions, one by one, beside the plain integer program in HiGHS on the same instances.

    python benchmarks/solver.py [--graph NAME_OR_FILE]... [--device-model NAME_OR_FILE]... [--time-limit S]
                                [--rounds N] [--only TEXT] [--json FILE] [--smoke]

An instance is a graph's priced layout assignment problem on a device model. Every configuration solves every instance,
one configuration after another within a round, so that what disturbs the machine disturbs all of them; medians are
shown. *Booleans* are the variables of the integer program: primaries, choices and relayouts that are still possible
after the configuration's reductions and before HiGHS, or 0 where tables closed the problem. All configurations that say
OPTIMAL must agree on the optimum, or the benchmark fails. ``--smoke`` runs one made-up instance once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from layoutopt.errors import LayoutOptError
from layoutopt.exact import remaining
from layoutopt.files import write_atomic
from layoutopt.layout import Layout
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.reduce import Domain, consistent, reduce
from layoutopt.solve import Reductions, heuristics, solve
from layoutopt.states import network

CONFIGURATIONS = {
    "plain HiGHS": Reductions.none(),
    "dominance": Reductions(True, False, False, False),
    "dominance, chains": Reductions(True, False, False, True),
    "dominance, sweeps": Reductions(True, True, False, False),
    "dominance, elimination": Reductions(True, False, True, False),
    "sweeps, elimination": Reductions(False, True, True, False),
    "all": Reductions(),
}


def booleans(problem: Problem, domain: Domain) -> int:
    """Variables of the integer program of ``domain``."""
    copied: dict[int, set[int]] = {}
    for op, left in zip(problem.ops, domain.choices, strict=True):
        tied = set(op.primary_operands)
        for k, s in enumerate(op.operands):
            if k not in tied:
                copied.setdefault(s, set()).update(op.choices[c].layouts[k] for c in left)
    relayouts = sum(a != b and a in domain.primaries[s] and b in copied.get(s, ()) for s, a, b in problem.relayout_ns)
    return sum(map(len, domain.primaries)) + sum(map(len, domain.choices)) + relayouts


def left_for_highs(problem: Problem, switches: Reductions, known: list[Assignment], found: Assignment) -> int:
    """Booleans that the switches leave, before chains are merged."""
    domain: Domain | None = reduce(problem) if switches.dominance else consistent(problem)
    assert domain is not None
    if switches.elimination and "highs" not in found.method:
        return 0
    if switches.sweeps and known:
        best = min(a.cost_ns for a in known)
        least = sum(
            min(op.choices[c].cost_ns for c in left) for op, left in zip(problem.ops, domain.choices, strict=True)
        )
        domain = remaining(network(problem, domain, best - least), best)
    return booleans(problem, domain) if domain else 0


def measure(name: str, problem: Problem, limit_s: float, rounds: int, only: str) -> Iterator[dict[str, Any]]:
    """A row per configuration."""
    known = heuristics(problem)
    chosen = {label: switches for label, switches in CONFIGURATIONS.items() if only in label}
    runs: dict[str, list[tuple[float, Assignment]]] = {label: [] for label in chosen}
    for _ in range(rounds):
        for label, switches in chosen.items():
            began = time.perf_counter()
            found = solve(problem, limit_s, known, switches)
            runs[label].append((time.perf_counter() - began, found))
    optima = {found.cost_ns for taken in runs.values() for _, found in taken if found.status == "OPTIMAL"}
    if len(optima) > 1:
        raise LayoutOptError(f"{name}: configurations disagree about the optimum: {sorted(optima)} ns")
    for label, taken in runs.items():
        found = taken[-1][1]
        yield {
            "instance": name,
            "configuration": label,
            "ops": len(problem.ops),
            "storages": len(problem.storages),
            "candidates": sum(len(node.candidates) for node in problem.storages),
            "booleans": booleans(problem, consistent(problem)),
            "booleans_left": left_for_highs(problem, chosen[label], known, found),
            "seconds": [seconds for seconds, _ in taken],
            "status": found.status,
            "cost_ns": found.cost_ns,
            "bound_ns": found.bound_ns,
            "gap": (found.cost_ns - found.bound_ns) / found.cost_ns,
            "method": found.method,
        }


def table(rows: list[dict[str, Any]]) -> Table:
    """For people: an instance's configurations."""
    first = rows[0]
    title = (
        f"{first['instance']}: {first['ops']} ops, {first['storages']} storages, {first['candidates']} candidates, "
        f"{first['booleans']} booleans"
    )
    out = Table(title=title, title_justify="left")
    for column in ("reductions", "booleans left", "seconds", "plain / this", "status", "gap"):
        out.add_column(column, justify="left" if column in ("reductions", "status") else "right")
    plain = next((median(row["seconds"]) for row in rows if row["configuration"] == "plain HiGHS"), None)
    for row in rows:
        middle = median(row["seconds"])
        ratio = f"{plain / middle:.1f}" if plain else "-"
        gap = f"{100 * row['gap']:.4f}%"
        out.add_row(row["configuration"], str(row["booleans_left"]), f"{middle:.2f}", ratio, row["status"], gap)
    return out


def smoke_problem() -> Problem:
    """A small chain with a shared input and random prices."""
    draw = random.Random(1)
    layouts = (Layout.row_major((32, 48)), Layout.row_major((32, 48), (1, 0)), Layout.r_tile((32, 48), 4, 4))
    nodes = [StorageNode(f"t{i}", layouts, (6144,) * 3, False, 0 if i == 0 else -1) for i in range(8)]
    ops = [
        OpNode(
            f"op{i}",
            (0, i, i + 1),
            2,
            tuple(Choice(t, draw.randint(1, 99), "v") for t in itertools.product(range(3), repeat=3)),
        )
        for i in range(1, 7)
    ]
    pairs = [(s, a, b) for s in range(8) for a, b in itertools.permutations(range(3), 2) if s or a == 0]
    return Problem(tuple(nodes), tuple(ops), {pair: draw.randint(1, 30) for pair in pairs})


def instances(args: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """Names and problems, priced as they are asked for."""
    if args.smoke:
        yield "smoke", smoke_problem()
        return
    from costmodel.device import load
    from costmodel.model import CostModel
    from layoutopt.models import find_graph
    from layoutopt.planner import tabulate

    for name in args.graph or ["vit-digits", "bert-large"]:
        graph = find_graph(name)
        for device in args.device_model or ["generic-cpu"]:
            costs = CostModel(load(device))
            yield f"{graph.name} on {costs.name}", tabulate(graph, costs).problem


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--graph", action="append", help="a graph file or the name of one that ships")
    parser.add_argument("--device-model", action="append", help="a device model file or the name of one that ships")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="only configurations whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    if args.rounds < 1 or args.time_limit <= 0 or not any(args.only in label for label in CONFIGURATIONS):
        print("solver: --rounds and --time-limit must be positive, --only part of a configuration", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        # Compiled before the clock starts, as an installed package is after its first plan.
        solve(smoke_problem())
        for name, problem in instances(args):
            measured = list(measure(name, problem, args.time_limit, args.rounds, args.only))
            rows += measured
            if not args.smoke:
                console.print(table(measured))
        if args.json:
            versions = {p: version(p) for p in ("numpy", "numba", "ortools")} | {"python": platform.python_version()}
            machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
            record = {"benchmark": "solver", "machine": machine, "versions": versions, "rows": rows}
            write_atomic(args.json, json.dumps(record, indent=1) + "\n")
    except LayoutOptError as error:
        print(f"solver: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows)} solves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
