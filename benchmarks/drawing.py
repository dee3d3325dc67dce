"""Random feasible assignments of a problem, from nearly the solver's to bad: what ``benchmarks/decisions.py`` runs.

    python benchmarks/drawing.py [--model M] [-n N] [--smoke]

A draw wants a layout for every storage; ``strategies.prefer`` makes it feasible and takes for every op the kernel that
is cheapest over the layouts it sees, with relayouts where they pay or (every other draw) only where nothing else works.
Wanted are: the solver's primaries with 1, 2, 4, … *classes* of storages changed; every class by lot; every storage by
lot; one kind of layout for all. Storages that are alike (the same shape, role and ops around them, as in repeated
blocks) are a class and are drawn together, from a few of their candidates: otherwise no two blocks would share a
kernel, and compiling would be all that there is time for. As a script, prints the predicted spread.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layoutopt.errors import InfeasibleError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, Problem
from layoutopt.strategies import prefer

__all__ = ["Draw", "classes", "draw", "solved"]

CHOSEN_FROM = 3
"""Layouts that a class is drawn from: row-major, the solver's, another by lot."""
TRIES = 20
"""Draws in vain (dead ends, or assignments known already) for each that is wanted, before fewer are given."""


@dataclass(frozen=True)
class Draw:
    """A random assignment and how it was drawn."""

    kind: str
    assignment: Assignment


def classes(graph: TrainingGraph, problem: Problem) -> list[list[int]]:
    """Storages, by position, that are alike: shape, role, candidates, and the kinds of ops around them."""
    around: dict[int, list[tuple[str, int]]] = {}
    for op, node in zip(graph.ops, problem.ops, strict=True):
        for position, s in enumerate(node.operands):
            around.setdefault(s, []).append((op.kind, position))
    found: dict[object, list[int]] = {}
    for s, node in enumerate(problem.storages):
        storage = graph.storages[node.name]
        like = storage.shape, storage.role, node.candidates, node.primary, tuple(sorted(around.get(s, [])))
        found.setdefault(like, []).append(s)
    return list(found.values())


def draw(graph: TrainingGraph, problem: Problem, best: Assignment, count: int, seed: int = 0) -> list[Draw]:
    """Different assignments, none of them ``best``; fewer than ``count`` where there seem to be no more.

    Args:
        graph: of the problem.
        problem: its tables.
        best: the solver's.
        count: how many are wanted.
        seed: of the lot.
    """
    found: list[Draw] = []
    known = {_choices(best)}
    wishes = _wishes(graph, problem, best, random.Random(seed))
    for number in range(count * TRIES):
        if len(found) == count:
            break
        kind, wanted = next(wishes)
        try:
            made = prefer(problem, wanted, kind, stay=number % 2 == 1)
        except InfeasibleError:
            continue
        if _choices(made) not in known:
            known.add(_choices(made))
            found.append(Draw(kind, made))
    return found


def _choices(assignment: Assignment) -> tuple[object, ...]:
    return assignment.primary, assignment.copies, assignment.choice


def _wishes(
    graph: TrainingGraph, problem: Problem, best: Assignment, lot: random.Random
) -> Iterator[tuple[str, list[int]]]:
    """Kinds and wanted primaries without end, all kinds in turn."""
    alike = [own for own in classes(graph, problem) if len(problem.storages[own[0]].candidates) > 1]
    free = [own for own in alike if problem.storages[own[0]].primary < 0] or alike
    among = {own[0]: _among(problem, own[0], best, lot) for own in free}
    most = max((len(node.candidates) for node in problem.storages), default=1)
    counts = [1 << k for k in range(max(len(free), 1).bit_length())]
    uniform = 0
    while True:
        for count in counts:
            yield f"{count} changed", _changed(list(best.primary), lot.sample(free, min(count, len(free))), among, lot)
        yield "by class", _changed(list(best.primary), free, among, lot)
        each = [[s] for own in free for s in own]
        among_each = {s: among[own[0]] for own in free for s in own}
        yield "by storage", _changed(list(best.primary), each, among_each, lot)
        yield f"uniform {uniform % most}", [min(uniform % most, len(n.candidates) - 1) for n in problem.storages]
        uniform += 1


def _among(problem: Problem, s: int, best: Assignment, lot: random.Random) -> list[int]:
    known = list(dict.fromkeys((0, best.primary[s])))
    others = [c for c in range(len(problem.storages[s].candidates)) if c not in known]
    return known + lot.sample(others, min(len(others), CHOSEN_FROM - len(known)))


def _changed(
    wanted: list[int], groups: Sequence[Sequence[int]], among: dict[int, list[int]], lot: random.Random
) -> list[int]:
    for own in groups:
        layout = lot.choice([c for c in among[own[0]] if c != wanted[own[0]]] or among[own[0]])
        for s in own:
            wanted[s] = layout
    return wanted


def solved(graph: TrainingGraph, costs: Any, limit_s: float = 30.0) -> tuple[Tables, Assignment]:
    """Tables and the solver's assignment of the rewritten graph that planning would keep."""
    from layoutopt.assembly import assemble
    from layoutopt.planner import assign, fastest, tabulate
    from layoutopt.pricing import Pricer
    from layoutopt.rewrites import alternatives

    pricer, found, made = Pricer(costs), [], {}
    for candidate in alternatives(graph):
        tables = tabulate(candidate, costs, pricer=pricer)
        assignment = assign(tables, "ilp", limit_s)
        found.append((tables, assemble(tables, costs, assignment, "ilp")))
        made[id(tables)] = assignment
    tables, _ = fastest(found)
    return tables, made[id(tables)]


def main() -> int:
    """Print how the objective is spread over the draws of each kind."""
    from benchmarks.reduced import reduced_graph
    from costmodel.device import load
    from costmodel.model import CostModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-digits")
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--device-model", default="generic-cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    args = parser.parse_args()
    try:
        graph = reduced_graph("bert-tiny/1@2x5" if args.smoke else args.model)
        tables, best = solved(graph, CostModel(load(args.device_model)))
    except LayoutOptError as error:
        print(f"drawing: {error}", file=sys.stderr)
        return 2
    draws = draw(tables.graph, tables.problem, best, args.n, args.seed)
    print(f"{graph.name}: {len(draws)} different assignments; objective over the solver's, least and most")
    for kind in dict.fromkeys(d.kind for d in draws):
        ratios = [d.assignment.cost_ns / best.cost_ns for d in draws if d.kind == kind]
        print(f"{kind:14}{len(ratios):5}{min(ratios):8.3f}{max(ratios):8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
