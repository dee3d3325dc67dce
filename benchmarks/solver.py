"""The exact solver's reductions, one by one, beside the plain integer program in HiGHS on the same instances.

    python benchmarks/solver.py [--graph NAME_OR_FILE]... [--device-model NAME_OR_FILE]... [--time-limit S]
                                [--rounds N] [--only TEXT] [--json FILE] [--smoke]
    python benchmarks/solver.py --table [--plain S] [--deep BLOCKS] [the same]

An instance is a graph's priced layout assignment problem on a device model. Every configuration solves every instance,
one configuration after another within a round, so that what disturbs the machine disturbs all of them; medians are
shown. *Booleans* are the variables of the integer program: primaries, choices and relayouts that are still possible
after the configuration's reductions and before HiGHS, or 0 where tables closed the problem. All configurations that say
OPTIMAL must agree on the optimum, or the benchmark fails. ``--smoke`` runs one made-up instance once.

``--table`` gives a row per model and device model instead: all reductions, beside the plain integer program with as
many seconds as ``--plain`` allows (HiGHS's own; making its program comes on top). Instances are of the graph as
planning rewrites it, every alternative, with what planning ties (``layoutopt/alike.py``) and from its starts. *CPU s*
is the processor time of a solve: on a machine that does much else besides, it says more than the time by the clock.
*plain / this* is their ratio, behind a ">" where the plain program did not finish. ``--deep`` adds a made-up graph of
so many equal blocks of seven ops, forward and backward, each reading the same mask.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.recording import Record
from layoutopt.copies import without_idle_copies
from layoutopt.errors import LayoutOptError
from layoutopt.exact import remaining
from layoutopt.layout import Layout
from layoutopt.plan import gap_of
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.reduce import Domain, consistent, reduce
from layoutopt.solve import Reductions, heuristics, solve
from layoutopt.states import network

NONE = Reductions.none()
CONFIGURATIONS = {
    "plain HiGHS": NONE,
    "dominance": replace(NONE, dominance=True),
    "dominance, copies": replace(NONE, dominance=True, copies=True),
    "dominance, chains": replace(NONE, dominance=True, chains=True),
    "dominance, sweeps": replace(NONE, dominance=True, sweeps=True),
    "dominance, elimination": replace(NONE, dominance=True, elimination=True),
    "sweeps, elimination": replace(NONE, sweeps=True, elimination=True),
    "all but dives": replace(Reductions(), dives=False),
    "all but copies": replace(Reductions(), copies=False),
    "all but condensing": replace(Reductions(), condensing=False),
    "all but chains": replace(Reductions(), chains=False),
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
    if switches.copies:
        problem, domain = without_idle_copies(problem, domain)
    if switches.elimination and "highs" not in found.method:
        return 0
    if switches.sweeps and known:
        best = min(a.cost_ns for a in known)
        least = sum(
            min(op.choices[c].cost_ns for c in left) for op, left in zip(problem.ops, domain.choices, strict=True)
        )
        domain = remaining(network(problem, domain, best - least), best)
    return booleans(problem, domain) if domain else 0


def measure(
    name: str, problem: Problem, known: list[Assignment], limit_s: float, rounds: int, only: str
) -> Iterator[dict[str, Any]]:
    """A row per configuration."""
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


def compare(
    name: str, device: str, problem: Problem, known: list[Assignment], limit_s: float, plain_s: float
) -> dict[str, Any]:
    """All reductions beside the plain program, once each, from the same starts."""
    timed: dict[str, tuple[Assignment, float, float]] = {}
    tried = [("all", Reductions(), limit_s)] + ([("plain", NONE, plain_s)] if plain_s else [])
    for label, switches, seconds in tried:
        began, busy = time.perf_counter(), time.process_time()
        found = solve(problem, seconds, known, switches)
        timed[label] = found, time.perf_counter() - began, time.process_time() - busy
    found = timed["all"][0]
    if len({one.cost_ns for one, _, _ in timed.values() if one.status == "OPTIMAL"}) > 1:
        raise LayoutOptError(f"{name} on {device}: the plain program's optimum is another than with reductions")
    return {
        **{"model": name, "device_model": device, "ops": len(problem.ops), "storages": len(problem.storages)},
        "candidates": sum(len(node.candidates) for node in problem.storages),
        "booleans": booleans(problem, consistent(problem)),
        "booleans_left": left_for_highs(problem, Reductions(), known, found),
        "method": found.method,
        **_figures("", *timed["all"]),
        **(_figures("plain_", *timed["plain"]) if plain_s else {}),
    }


def _figures(prefix: str, found: Assignment, wall_s: float, cpu_s: float) -> dict[str, Any]:
    figures = {
        **{"seconds": wall_s, "cpu_s": cpu_s, "status": found.status, "gap": gap_of(found.cost_ns, found.bound_ns)},
        **{"cost_ns": found.cost_ns, "bound_ns": found.bound_ns},
    }
    return {prefix + key: value for key, value in figures.items()}


def comparison(rows: list[dict[str, Any]]) -> Table:
    """For people: a row per instance."""
    out = Table()
    for column in ("model", "device model"):
        out.add_column(column, overflow="fold")
    for column in ("ops", "storages", "candidates", "booleans", "left", "CPU s", "s", "status", "gap", "plain / this"):
        out.add_column(column, justify="right")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("ops", "storages", "candidates", "booleans", "booleans_left")]
        ratio = "-"
        if "plain_status" in row:
            unfinished = "" if row["plain_status"] == "OPTIMAL" else "> "
            ratio = f"{unfinished}{row['plain_cpu_s'] / row['cpu_s']:.1f} (gap {100 * row['plain_gap']:.2g}%)"
        times = [f"{row['cpu_s']:.1f}", f"{row['seconds']:.1f}"]
        gap = f"{100 * row['gap']:.2g}%"
        out.add_row(row["model"], row["device_model"], *counts, *times, row["status"], gap, ratio)
    return out


def deep_problem(blocks: int) -> Problem:
    """Equal blocks, forward and backward: a product, an activation and a sum that skips them, then their gradients."""
    draw = random.Random(3)
    shape = (32, 48)
    layouts = (
        *(Layout.row_major(shape), Layout.row_major(shape, (1, 0)), Layout.r_tile(shape, 4, 4)),
        *(Layout.r_tile(shape, 8, 8), Layout.r_tile(shape, 16, 4)),
    )
    sizes = tuple(4 * layout.size_elems for layout in layouts)
    nodes: list[StorageNode] = []
    ops: list[OpNode] = []

    def storage(name: str, persistent: bool = False, primary: int = -1) -> int:
        nodes.append(StorageNode(name, layouts, sizes, persistent, primary))
        return len(nodes) - 1

    def choices(arity: int, tie: bool = False) -> tuple[Choice, ...]:
        rows = [t for t in itertools.product(range(len(layouts)), repeat=arity) if not tie or t[0] == t[2]]
        return tuple(Choice(t, draw.randint(5_000, 15_000), "v") for t in rows if not any(t) or draw.random() < 0.6)

    kinds = {"mul": choices(4), "act": choices(2), "add": choices(3), "grad": choices(3), "update": choices(3, True)}

    def op(kind: str, name: str, *operands: int) -> None:
        ops.append(OpNode(name, operands, len(operands) - 1, kinds[kind]))

    mask, x = storage("mask", primary=0), storage("x", primary=0)
    kept = []
    for b in range(blocks):
        w, h, a, y = storage(f"w{b}", True), storage(f"h{b}"), storage(f"a{b}"), storage(f"x{b}")
        op("mul", f"mul{b}", x, w, mask, h)
        op("act", f"act{b}", h, a)
        op("add", f"add{b}", a, x, y)
        kept.append((x, w, h))
        x = y
    g = storage("loss")
    op("act", "loss", x, g)
    for b, (x, w, h) in reversed(list(enumerate(kept))):
        dh, dw, dx = storage(f"dh{b}"), storage(f"dw{b}"), storage(f"dx{b}")
        op("grad", f"dact{b}", g, h, dh)
        op("grad", f"dw{b}", dh, x, dw)
        op("grad", f"dx{b}", dh, w, dx)
        op("update", f"update{b}", w, dw, w)
        g = dx
    prices = {pair: draw.randint(2_000, 8_000) for pair in itertools.permutations(range(len(layouts)), 2)}
    relayouts = {
        (s, *pair): price for s, n in enumerate(nodes) for pair, price in prices.items() if n.primary in (-1, pair[0])
    }
    return Problem(tuple(nodes), tuple(ops), relayouts)


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


def instances(args: argparse.Namespace) -> Iterator[tuple[str, str, Problem, list[Assignment]]]:
    """Names, device models and problems, priced as they are asked for, and assignments to start from."""
    if args.smoke:
        problem = smoke_problem()
        yield "smoke", "none", problem, heuristics(problem)
        return
    if args.deep:
        problem = deep_problem(args.deep)
        yield f"made up, {args.deep} blocks", "none", problem, heuristics(problem)
    from costmodel.device import load
    from costmodel.model import CostModel
    from layoutopt.models import find_graph
    from layoutopt.planner import posed, tabulate
    from layoutopt.pricing import Pricer
    from layoutopt.rewrites import alternatives

    for name in args.graph or ([] if args.deep else ["vit-digits", "bert-large"]):
        graph = find_graph(name)
        for device in args.device_model or ["generic-cpu"]:
            costs = CostModel(load(device))
            if not args.table:
                problem = tabulate(graph, costs).problem
                yield graph.name, costs.name, problem, heuristics(problem)
                continue
            pricer = Pricer(costs)
            for i, candidate in enumerate(alternatives(graph)):
                label = graph.name + (f" ({i + 1})" if i else "")
                ties, _, known = posed(tabulate(candidate, costs, pricer=pricer))
                yield label, costs.name, ties, known


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--graph", action="append", help="a graph file or the name of one that ships")
    parser.add_argument("--device-model", action="append", help="a device model file or the name of one that ships")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="only configurations whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="a row per instance: all reductions beside none")
    parser.add_argument(
        "--plain", type=float, default=60.0, help="seconds for the plain program, with --table; 0: none"
    )
    parser.add_argument("--deep", type=int, default=0, metavar="BLOCKS", help="a made-up graph of so many blocks")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    if args.rounds < 1 or args.time_limit <= 0 or not any(args.only in label for label in CONFIGURATIONS):
        print("solver: --rounds and --time-limit must be positive, --only part of a configuration", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    console = Console(width=None if sys.stdout.isatty() else 160)
    versions = {package: version(package) for package in ("numpy", "numba", "ortools")}
    try:
        record = Record(args.json, "solver", versions=versions, time_limit_s=args.time_limit, plain_s=args.plain)
        # Compiled before the clock starts, as an installed package is after its first plan.
        solve(smoke_problem())
        for name, device, problem, known in instances(args):
            if args.table or args.smoke:
                rows.append(compare(name, device, problem, known, args.time_limit, args.plain))
                print(f"{name} on {device}: {rows[-1]['status']}", file=sys.stderr, flush=True)
            if not args.table:
                measured = list(measure(f"{name} on {device}", problem, known, args.time_limit, args.rounds, args.only))
                rows += measured
                if not args.smoke:
                    console.print(table(measured))
            record.write({"rows": rows})
        if args.table:
            console.print(comparison(rows))
    except LayoutOptError as error:
        print(f"solver: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows)} solves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
