"""Plans for little memory: layouts without padding or copies, and results made anew, until a step fits.

``planner.plan`` comes here where no plan fits into ``--memory`` (or the device) as it is. Two levers, both priced:

- *recomputation*: the frontier of choices of what is calculated twice (``layoutopt/recompute_search.py``), from the
  costs of the plans that were too large, for each rewritten graph;
- *layouts*: a *lean* plan chooses among layouts without padding only, and makes no copies in a second layout.

Each choice is planned whole, layouts and arena, in the order of what it is expected to take; the fastest that fits is
kept. Where none fits, the least memory that any plan needs is found by the same means, and the error says it: a budget
of that much is met.

Part of the face: it joins the planner's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from layoutopt.errors import DeviceError, InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, OpNode, Problem
from layoutopt.recompute_search import Recomputation, frontier, thinned
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import before_family, origin_of, rewritten

__all__ = ["Option", "Tried", "fit", "lean", "options"]

_MOST_CHOICES = 16
"""Choices of recomputation that are planned for a graph at most."""

Tried = tuple[Tables, Assignment]
"""A graph with its prices, and the cheapest assignment whatever memory it needs."""


@dataclass(frozen=True)
class Option:
    """A graph that may be planned.

    Attributes:
        graph: rewritten.
        recomputation: what it makes anew, and what that takes.
        expected_ns: of its plan.
        least_bytes: no plan of it needs less memory.
    """

    graph: TrainingGraph = field(repr=False)
    recomputation: Recomputation
    expected_ns: int
    least_bytes: int


def options(graph: TrainingGraph, tried: Iterable[Tried], most: int = _MOST_CHOICES) -> list[Option]:
    """Graphs with more and more made anew, those that should be fastest first.

    Args:
        graph: as captured.
        tried: its rewritten graphs, with assignments whose prices say what is worth its time.
        most: choices for each of these.
    """
    out = []
    for tables, assignment in tried:
        names = origin_of(tables.graph)[1]
        nodes = zip(tables.problem.ops, assignment.choice, strict=True)
        cost_ns = {node.name: node.choices[c].cost_ns for node, c in nodes}
        sizes = {t.name: t.size_elems * t.item_bytes for t in tables.graph.tensors.values()}
        choices = frontier(rewritten(graph, before_family(names, "anew")), cost_ns, sizes)
        for choice in thinned(choices, most):
            made = rewritten(graph, [*names, choice.name]) if choice.name else tables.graph
            out.append(Option(made, choice, assignment.cost_ns + choice.extra_ns, peak_bytes(made)))
    return sorted(out, key=lambda o: (o.expected_ns, o.least_bytes, origin_of(o.graph)[1]))


def lean(tables: Tables) -> Tables:
    """The same graph with layouts that take no more than row-major, and no copies in a second layout."""
    problem = tables.problem
    ops = tuple(replace(op, choices=_unpadded(problem, op)) for op in problem.ops)
    return replace(tables, problem=replace(problem, ops=ops, relayout_ns={}))


def _unpadded(problem: Problem, op: OpNode) -> tuple:
    """An op's choices without padding; all of them where there is none such."""
    sizes = [problem.storages[s].sizes_bytes for s in op.operands]
    small = [
        choice
        for choice in op.choices
        if all(own[layout] <= own[0] for own, layout in zip(sizes, choice.layouts, strict=True))
    ]
    return tuple(small) or op.choices


class _Planned:
    """Plans of options, each made once, whatever memory they need.

    Args:
        tabulate: prices a graph.
        plan: makes and checks a plan of a priced graph.
    """

    def __init__(self, tabulate: Callable[[TrainingGraph], Tables], plan: Callable[[Tables], Plan]) -> None:
        self._tabulate, self._plan = tabulate, plan
        self.made: dict[tuple[tuple[str, ...], bool], tuple[Tables, Plan] | None] = {}

    def plans(self, option: Option) -> Iterator[tuple[Tables, Plan]]:
        """The plan with every layout, and the lean one; without those that do not exist."""
        tables: Tables | None = None
        for slim in (False, True):
            key = origin_of(option.graph)[1], slim
            if key not in self.made:
                tables = tables or self._tabulate(option.graph)
                self.made[key] = self._one(lean(tables) if slim else tables)
            found = self.made[key]
            if found is not None:
                yield found

    def _one(self, tables: Tables) -> tuple[Tables, Plan] | None:
        try:
            return tables, self._plan(tables)
        except (InfeasibleError, DeviceError):
            return None


def fit(
    graph: TrainingGraph,
    tried: Sequence[Tried],
    found: Sequence[tuple[Tables, Plan]],
    limit_bytes: int,
    tabulate: Callable[[TrainingGraph], Tables],
    plan: Callable[[Tables], Plan],
    error: InfeasibleError | DeviceError,
) -> tuple[Tables, Plan]:
    """The fastest plan that fits into memory, with what it was made from.

    Args:
        graph: as captured.
        tried: rewritten graphs whose best plans do not fit, with their cheapest assignments.
        found: plans that fit, if there are some.
        limit_bytes: of the arena.
        tabulate: prices a graph.
        plan: makes a plan of a priced graph, whatever memory it needs.
        error: what to raise where nothing fits, with the least that is needed instead of what the first plan needed.

    Raises:
        InfeasibleError, DeviceError: none fits; says what the least budget is for which a plan was found.
    """
    best = min(found, key=lambda pair: pair[1].solver.objective_ns, default=None)
    planned = _Planned(tabulate, plan)
    ranked = options(graph, tried)
    for option in ranked:
        if best is not None and option.expected_ns >= best[1].solver.objective_ns:
            break
        if option.least_bytes > limit_bytes:
            continue
        for pair in planned.plans(option):
            if pair[1].arena_bytes <= limit_bytes:
                if best is None or pair[1].solver.objective_ns < best[1].solver.objective_ns:
                    best = pair
                break
    if best is not None:
        return best
    least: Plan | None = None
    for option in sorted(ranked, key=lambda o: (o.least_bytes, o.expected_ns)):
        if least is not None and option.least_bytes >= least.arena_bytes:
            break
        for pair in planned.plans(option):
            if least is None or pair[1].arena_bytes < least.arena_bytes:
                least = pair[1]
    raise error if least is None else _too_little(least, limit_bytes, error)


def _too_little(least: Plan, limit_bytes: int, error: InfeasibleError | DeviceError) -> InfeasibleError | DeviceError:
    """What to say where even the smallest plan is too large."""
    peaks, largest = fullest(least)
    message = (
        f"no plan of {least.graph_name!r} fits into {limit_bytes} bytes of device memory: the least feasible budget "
        f"found is {least.arena_bytes} bytes; that plan peaks at {', '.join(peaks)}, where the largest buffers are "
        f"{', '.join(largest)}: allow more or use a smaller batch"
    )
    return DeviceError(message) if isinstance(error, DeviceError) else InfeasibleError(message, (*peaks, *largest))


def fullest(plan: Plan) -> tuple[list[str], list[str]]:
    """The ops or relayouts at which a plan holds most, and the largest buffers at the fullest of them."""
    from layoutopt.memory import Buffer, live_bytes

    buffers = [Buffer(s.name, s.size_bytes, s.first, s.last) for s in plan.arena]
    alive = live_bytes(buffers, len(plan.steps))
    peaks = sorted(range(len(alive)), key=lambda i: (-alive[i], i))[:3]
    held = sorted((b for b in buffers if b.first <= peaks[0] <= b.last), key=lambda b: (-b.size_bytes, b.name))[:3]
    names = []
    for i in peaks:
        kind, index = plan.steps[i]
        move = plan.relayouts[index] if kind == "relayout" else None
        names.append(f"relayout:{move.storage}#{move.target}" if move else plan.ops[index].op)
    return names, [f"{b.name} ({b.size_bytes} bytes)" for b in held]
