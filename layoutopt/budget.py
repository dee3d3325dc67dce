"""Plans for little memory: layouts without padding or copies, and results made anew, until a step fits.

``planner.plan`` comes here where no plan fits into ``--memory`` (or the device) as it is. Two levers, both priced:

- *recomputation*: the frontier of choices of what is calculated twice (``layoutopt/recompute_search.py``), from the
  costs of the plans that were too large, for each rewritten graph;
- *layouts*: a *lean* plan chooses among layouts without padding only, and makes no copies in a second layout.

Choices are tried in the order of what they are expected to take, with layouts and an arena each, until the next one
cannot be faster than the best that fits. While trying, the exact solver is spared: what is made anew lies as its
original does in the plan that was too large. The choice that is kept is then solved exactly; where the proven optimum
does not fit, the plan's gap is to that. Where nothing fits, the least memory that any plan needs is found by the same
means, and the error says it: a budget of that much is met.

Part of the face: it joins the planner's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from layoutopt.errors import DeviceError, InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.memory import Buffer, fullest_steps
from layoutopt.plan import Plan, gap_of, with_report
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.recompute_search import Recomputation, frontier, thinned
from layoutopt.rewrite_anew import SUFFIX
from layoutopt.rewrites import before_family, origin_of, rewritten
from layoutopt.strategies import prefer, rowmajor

__all__ = ["Makers", "Option", "Planned", "Tried", "alike", "fit", "fullest", "further", "lean", "options"]

_CLOSE = 0.001
"""A plan this close to the bound is not improved by the exact solver."""
_MOST_CHOICES = 16
"""Choices of recomputation that are planned for a graph at most."""

Tried = tuple[Tables, Assignment]
"""A graph with its prices, and an assignment of it."""


@dataclass(frozen=True)
class Makers:
    """The planner's parts, as they are needed here.

    Attributes:
        tabulate: prices a graph.
        assign: the strategy's assignment, with the tables that it is of.
        place: makes and checks a plan of an assignment, whatever memory it needs.
        exact: ``assign`` takes long and proves what it finds.
    """

    tabulate: Callable[[TrainingGraph], Tables]
    assign: Callable[[Tables], Tried]
    place: Callable[[Tables, Assignment], Plan]
    exact: bool


@dataclass(frozen=True)
class Option:
    """A graph that may be planned.

    Attributes:
        names: of its rewrites.
        recomputation: what it makes anew, and what that takes.
        expected_ns: of its plan.
        base: the graph without that, with its cheapest assignment.
    """

    names: tuple[str, ...]
    recomputation: Recomputation
    expected_ns: int
    base: Tried = field(repr=False)


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
            own = (*names, choice.name) if choice.name else names
            out.append(Option(own, choice, assignment.cost_ns + choice.extra_ns, (tables, assignment)))
    return sorted(out, key=lambda o: (o.expected_ns, o.recomputation.peak_bytes, o.names))


def lean(tables: Tables) -> Tables:
    """The same graph with layouts that take no more than row-major, and no copies in a second layout."""
    problem = tables.problem
    ops = tuple(replace(op, choices=_unpadded(problem, op)) for op in problem.ops)
    return replace(tables, problem=replace(problem, ops=ops, relayout_ns={}))


def _unpadded(problem: Problem, op: OpNode) -> tuple[Choice, ...]:
    """An op's choices without padding; all of them where there is none such."""
    sizes = [problem.storages[s].sizes_bytes for s in op.operands]
    small = [
        choice
        for choice in op.choices
        if all(own[layout] <= own[0] for own, layout in zip(sizes, choice.layouts, strict=True))
    ]
    return tuple(small) or op.choices


def alike(tables: Tables, base: Tried, slim: bool) -> Assignment:
    """An assignment like that of a graph without recomputation: what is made anew lies as its original does.

    Args:
        tables: of the graph with recomputation.
        base: of the graph without, and its assignment.
        slim: the tables are lean.

    Raises:
        InfeasibleError: there is none.
    """
    known, assignment = base
    wanted = []
    for node in tables.problem.storages:
        s = known.index.get(node.name, known.index.get(node.name.removesuffix(SUFFIX)))
        layout = known.problem.storages[s].candidates[assignment.primary[s]] if s is not None else None
        wanted.append(node.candidates.index(layout) if layout in node.candidates else 0)
    try:
        return prefer(tables.problem, wanted, "alike", stay=slim)
    except InfeasibleError:
        return rowmajor(tables.problem)


def further(graphs: Iterable[TrainingGraph], tried: Sequence[Tried], makers: Makers) -> Iterator[Tried]:
    """More graphs like those that were tried, with assignments that cost no search."""
    for graph in graphs:
        names = set(origin_of(graph)[1])
        near = min(tried, key=lambda one: len(names ^ set(origin_of(one[0].graph)[1])))
        tables = makers.tabulate(graph)
        try:
            yield (tables, alike(tables, near, False)) if makers.exact else makers.assign(tables)
        except InfeasibleError:
            continue


class Planned:
    """Plans of options, each made once, whatever memory they need."""

    def __init__(self, graph: TrainingGraph, makers: Makers) -> None:
        self.graph, self.makers = graph, makers
        self._made: dict[tuple[tuple[str, ...], bool], tuple[Tables, Plan] | None] = {}
        self._tables: tuple[tuple[str, ...], Tables] | None = None

    def tables(self, option: Option) -> Tables:
        """Prices of its graph."""
        if self._tables is None or self._tables[0] != option.names:
            self._tables = option.names, self.makers.tabulate(rewritten(self.graph, option.names))
        return self._tables[1]

    def plans(self, option: Option) -> Iterator[tuple[Tables, Plan]]:
        """A plan with every layout, and a lean one; without those that do not exist."""
        for slim in (False, True):
            key = option.names, slim
            if key not in self._made:
                self._made[key] = self._one(option, slim)
            found = self._made[key]
            if found is not None:
                yield found

    def _one(self, option: Option, slim: bool) -> tuple[Tables, Plan] | None:
        tables = lean(self.tables(option)) if slim else self.tables(option)
        try:
            if self.makers.exact:
                return tables, self.makers.place(tables, alike(tables, option.base, slim))
            own, assignment = self.makers.assign(tables)
            return tables, self.makers.place(own, assignment)
        except (InfeasibleError, DeviceError):
            return None

    def proven(self, option: Option, best: tuple[Tables, Plan], limit_bytes: int) -> tuple[Tables, Plan]:
        """The fastest plan of an option that fits, by the exact solver where that finds one."""
        whole, assignment = self.makers.assign(self.tables(option))
        candidates = [best]
        close = best[1].solver.objective_ns <= assignment.bound_ns * (1 + _CLOSE)
        for slim in (False,) if close else (False, True):
            tables = lean(whole) if slim else whole
            try:
                found = self.makers.assign(tables)[1] if slim else assignment
                plan = self.makers.place(tables, found)
            except (InfeasibleError, DeviceError):
                continue
            if plan.arena_bytes <= limit_bytes:
                candidates.append((tables, plan))
                if not slim and assignment.status == "OPTIMAL":
                    return tables, plan
        tables, plan = min(candidates, key=lambda pair: pair[1].solver.objective_ns)
        bound = assignment.bound_ns
        gap = gap_of(plan.solver.objective_ns, bound)
        return tables, with_report(plan, status="FEASIBLE", bound_ns=bound, gap=gap)


def fit(
    graph: TrainingGraph,
    tried: Sequence[Tried],
    smaller: Sequence[TrainingGraph],
    limit_bytes: int,
    makers: Makers,
    error: InfeasibleError | DeviceError,
) -> tuple[Tables, Plan]:
    """The fastest plan that fits into memory, with what it was made from.

    Args:
        graph: as captured.
        tried: rewritten graphs whose best plans do not fit, with their cheapest assignments.
        smaller: further rewritten graphs, which have not been planned.
        limit_bytes: of the arena.
        makers: of plans.
        error: what to raise where nothing fits, with the least that is needed instead of what the first plan needed.

    Raises:
        InfeasibleError, DeviceError: none fits; says what the least budget is for which a plan was found.
    """
    best: tuple[Tables, Plan] | None = None
    chosen: Option | None = None
    planned = Planned(graph, makers)
    ranked = options(graph, [*tried, *further(smaller, tried, makers)])
    for option in ranked:
        if best is not None and option.expected_ns >= best[1].solver.objective_ns:
            break
        if option.recomputation.peak_bytes > limit_bytes:
            continue
        for pair in planned.plans(option):
            if pair[1].arena_bytes <= limit_bytes:
                if best is None or pair[1].solver.objective_ns < best[1].solver.objective_ns:
                    best, chosen = pair, option
                break
    if best is None:
        raise _too_little(planned, ranked, limit_bytes, error)
    if chosen is not None and makers.exact:
        best = planned.proven(chosen, best, limit_bytes)
    return best


def _too_little(
    planned: Planned, ranked: Sequence[Option], limit_bytes: int, error: InfeasibleError | DeviceError
) -> InfeasibleError | DeviceError:
    """What to say where no plan fits: the least that is needed, and where that plan is fullest."""
    least: Plan | None = None
    for option in sorted(ranked, key=lambda o: (o.recomputation.peak_bytes, o.expected_ns)):
        if least is not None and option.recomputation.peak_bytes >= least.arena_bytes:
            break
        for _, plan in planned.plans(option):
            if least is None or plan.arena_bytes < least.arena_bytes:
                least = plan
        if least is None:  # not even this one: the device refuses it
            return error
    if least is None:
        return error
    peaks, largest = fullest(least)
    message = (
        f"no plan of {least.graph_name!r} fits into {limit_bytes} bytes of device memory: the least feasible budget "
        f"found is {least.arena_bytes} bytes; that plan peaks at {', '.join(peaks)}, where the largest buffers are "
        f"{', '.join(largest)}: allow more or use a smaller batch"
    )
    return DeviceError(message) if isinstance(error, DeviceError) else InfeasibleError(message, (*peaks, *largest))


def fullest(plan: Plan) -> tuple[list[str], list[str]]:
    """The ops or relayouts at which a plan holds most, and the largest buffers at the fullest of them."""
    buffers = [Buffer(s.name, s.size_bytes, s.first, s.last) for s in plan.arena]
    peaks, held = fullest_steps(buffers)
    names = []
    for i in peaks:
        kind, index = plan.steps[i]
        move = plan.relayouts[index] if kind == "relayout" else None
        names.append(f"relayout:{move.storage}#{move.target}" if move else plan.ops[index].op)
    return names, [f"{b.name} ({b.size_bytes} bytes)" for b in held]
