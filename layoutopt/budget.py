"""Plans for little memory: layouts without padding or copies, results made anew, micro-batches, until a step fits.

``planner.plan`` comes here where no plan fits into ``--memory`` (or the device) as it is. Three levers, all priced:

- *recomputation*: the frontier of choices of what is calculated twice (``layoutopt/recompute_search.py``), from the
  costs of the plans that were too large, for each rewritten graph;
- *layouts*: a *lean* plan chooses among layouts without padding only, and makes no copies in a second layout;
- *micro-batches* (``layoutopt/microbatch.py``): where what fits so far takes noticeably longer than the whole step, or
  nothing does, the samples are cut into the fewest parts that fit by themselves, and into one number of parts fewer
  with something made anew besides.

Choices are tried in the order of what they are expected to take, with layouts and an arena each, until the next one
cannot be faster than the best that fits. While trying, the exact solver is spared: what is made anew lies as its
original does in the plan that was too large. The choice that is kept is then solved exactly; where the proven optimum
does not fit, the plan's gap is to that. Where nothing fits, the least memory that any plan needs is found by the same
means, and the error says it: a budget of that much is met.

Part of the face: it joins the planner's parts.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from layoutopt.errors import DeviceError, GraphError, InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.memory import Buffer, fullest_steps
from layoutopt.microbatch import counts
from layoutopt.options import Option, Tried, bound_within, options, rank, tighter, within
from layoutopt.plan import Plan, gap_of, step_names, with_report
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.recompute_search import Recomputation
from layoutopt.rewrite_anew import SUFFIX
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import OPTIONAL, origin_of, rewritten
from layoutopt.strategies import prefer, rowmajor

__all__ = [
    "Makers",
    "Option",
    "Planned",
    "Tried",
    "alike",
    "cuts",
    "fastest_within",
    "fit",
    "fullest",
    "further",
    "lean",
    "optional_of",
    "options",
]

_CLOSE = 0.001
"""A plan this close to the bound is not improved by the exact solver."""

_WORTH = 0.01
"""Plans that take less longer than the fastest that does not fit are not compared with micro-batches."""
_MOST_OPS = 8000
"""No graph of more ops is made by cutting."""
_SEARCHED_OPS = 2000
"""In larger graphs nothing is made anew besides micro-batches: the search would take longest where it saves least."""
_FAST = 0.05
"""Of graphs whose plans differ by less than this share, the one with the least memory is cut."""
_ENOUGH = 0.9
"""Of the memory: where what is alive takes no more, a plan should fit."""
_GAIN = 0.97
"""More micro-batches have to lower what is alive to this part, or still more are of no use."""
_STEP = 0.99
"""The least memory that is found is lowered to this part, as long as something fits."""
_PART = re.compile(r"(\.sum)?@\d+$")
"""What tells a micro-batch's tensor from the whole batch's by name."""


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
    """An assignment like that of another graph: what is made anew, or of a micro-batch, lies as its original does.

    Args:
        tables: of the graph with recomputation or micro-batches.
        base: of the graph without, and its assignment.
        slim: the tables are lean.

    Raises:
        InfeasibleError: there is none.
    """
    known, assignment = base
    wanted = []
    for node in tables.problem.storages:
        own, whole = node.name.removesuffix(SUFFIX), _PART.sub("", node.name.removesuffix(SUFFIX))
        s = next((known.index[name] for name in (node.name, own, whole) if name in known.index), None)
        layout = known.problem.storages[s].candidates[assignment.primary[s]] if s is not None else None
        wanted.append(_like(node.candidates, layout) if layout is not None else 0)
    try:
        return prefer(tables.problem, wanted, "alike", stay=slim)
    except InfeasibleError:
        return rowmajor(tables.problem)


def _like(candidates: Sequence[Layout], layout: Layout) -> int:
    """The candidate that is a layout, or the same over fewer samples; row-major where there is none."""
    if layout in candidates:
        return candidates.index(layout)
    return next((i for i, own in enumerate(candidates) if _form(own) == _form(layout)), 0)


def _form(layout: Layout) -> list[tuple[int, ...]]:
    """The digits of a layout from the outermost to the innermost, whatever the extents of the axes."""
    ordered = sorted(layout.modes, key=lambda m: -m.stride)
    first = {axis: layout.axis_modes(axis)[0] for axis in {m.axis for m in ordered}}
    return [(m.axis, m.dim, 0 if m == first[m.axis] else m.extent) for m in ordered]


def optional_of(tried: Sequence[Tried]) -> list[str]:
    """The optional rewrites of the graph to cut into micro-batches: of the fast ones that with the least memory."""
    fast_ns = min(a.cost_ns for _, a in tried) * (1 + _FAST)
    fast = [tables.graph for tables, a in tried if a.cost_ns <= fast_ns]
    names = origin_of(min(fast, key=peak_bytes))[1]
    return [name for name in names if name in OPTIONAL]


def cuts(graph: TrainingGraph, limit_bytes: int, make: Callable[[int], TrainingGraph]) -> list[TrainingGraph]:
    """Graphs in micro-batches: the fewest that should fit by themselves, and one number fewer.

    Args:
        graph: as captured.
        limit_bytes: of the arena.
        make: the rewritten graph of so many micro-batches.

    Raises:
        GraphError: the step cannot be cut.
    """
    out: list[TrainingGraph] = []
    before = math.inf
    for count in counts(graph)[1:]:
        if count * len(graph.ops) > _MOST_OPS:
            break
        out.append(make(count))
        alive = peak_bytes(out[-1])
        if alive <= _ENOUGH * limit_bytes or alive > _GAIN * before:
            break
        before = alive
    return out[-2:]


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
                    break
        return min(candidates, key=lambda pair: pair[1].solver.objective_ns)


def fit(
    graph: TrainingGraph,
    tried: Sequence[Tried],
    smaller: Sequence[TrainingGraph],
    limit_bytes: int,
    makers: Makers,
    error: InfeasibleError | DeviceError,
    parts: Callable[[], Iterable[TrainingGraph]] = tuple,
) -> tuple[Tables, Plan]:
    """The fastest plan that fits into memory, with what it was made from.

    Args:
        graph: as captured.
        tried: rewritten graphs whose best plans do not fit, with their cheapest assignments.
        smaller: further rewritten graphs, which have not been planned.
        limit_bytes: of the arena.
        makers: of plans.
        error: what to raise where nothing fits, with the least that is needed instead of what the first plan needed.
        parts: makes graphs in micro-batches, when they are needed.

    Raises:
        InfeasibleError, DeviceError: none fits; says what the least budget is for which a plan was found.
    """
    planned = Planned(graph, makers)
    ranked = options(graph, [*tried, *further(smaller, tried, makers)])
    found = fastest_within(planned, ranked, limit_bytes, None)
    refused = ""
    if found is None or found[0][1].solver.objective_ns > min(a.cost_ns for _, a in tried) * (1 + _WORTH):
        try:
            cut = _cut_options(graph, list(further(parts(), tried, makers)))
        except GraphError as reason:
            cut, refused = [], f"; {reason}"
        found = fastest_within(planned, cut, limit_bytes, found)
        ranked = [*ranked, *cut]
    if found is None:
        found = _least(planned, ranked)
        if found is None:
            raise error
        if found[0][1].arena_bytes > limit_bytes:
            raise _too_little(found[0][1], limit_bytes, error, refused)
    best, chosen = found
    if not makers.exact:
        return best
    tables, plan = planned.proven(chosen, best, limit_bytes)
    bound = bound_within(graph, ranked, limit_bytes) or 0
    objective = plan.solver.objective_ns
    status = "OPTIMAL" if objective <= bound else "FEASIBLE"
    return tables, with_report(plan, status=status, bound_ns=min(bound, objective), gap=gap_of(objective, bound))


_Found = tuple[tuple[Tables, Plan], Option]


def fastest_within(planned: Planned, ranked: Sequence[Option], limit_bytes: int, found: _Found | None) -> _Found | None:
    """The fastest plan that fits, and its option: of some options and what else takes least within as much.

    Args:
        planned: remembers plans.
        ranked: options, by ``rank``.
        limit_bytes: of the arena.
        found: a plan to be beaten.
    """
    pending = sorted([*ranked, *within(ranked, limit_bytes)], key=rank)
    while pending:
        option = pending.pop(0)
        if found is not None and option.expected_ns >= found[0][1].solver.objective_ns:
            break
        if option.recomputation.peak_bytes > limit_bytes:
            continue
        over = []
        for pair in planned.plans(option):
            over.append(pair[1].arena_bytes - limit_bytes)
            if over[-1] <= 0:
                if found is None or pair[1].solver.objective_ns < found[0][1].solver.objective_ns:
                    found = pair, option
                break
        # A lean plan may fit and take much longer: layouts with padding get another chance within less.
        again = tighter(option, over[0], limit_bytes) if over and over[0] > 0 else None
        if again is not None:
            insort(pending, again, key=rank)
    return found


def _cut_options(graph: TrainingGraph, tried: Sequence[Tried]) -> list[Option]:
    """Graphs in micro-batches as they are, and small ones with something made anew."""
    searched = [one for one in tried if len(one[0].graph.ops) <= _SEARCHED_OPS]
    plain = [
        Option(
            origin_of(tables.graph)[1],
            Recomputation("", 0, peak_bytes(tables.graph)),
            assignment.cost_ns,
            (tables, assignment),
        )
        for tables, assignment in tried
        if len(tables.graph.ops) > _SEARCHED_OPS
    ]
    return sorted([*options(graph, searched), *plain], key=rank)


def _least(planned: Planned, ranked: Sequence[Option]) -> _Found | None:
    """The plan that needs the least memory; it may need less than was expected of it. None: the device refuses all."""
    least: _Found | None = None
    for option in sorted(ranked, key=lambda o: (o.recomputation.peak_bytes, o.expected_ns)):
        if least is not None and option.recomputation.peak_bytes >= least[0][1].arena_bytes:
            break
        for pair in planned.plans(option):
            if least is None or pair[1].arena_bytes < least[0][1].arena_bytes:
                least = pair, option
        if least is None:
            return None
    while least is not None:
        less = fastest_within(planned, ranked, int(least[0][1].arena_bytes * _STEP), None)
        if less is None:
            break
        least = less
    return least


def _too_little(
    least: Plan, limit_bytes: int, error: InfeasibleError | DeviceError, refused: str
) -> InfeasibleError | DeviceError:
    """What to say where no plan fits: the least that is needed, and where that plan is fullest."""
    peaks, largest = fullest(least)
    message = (
        f"no plan of {least.graph_name!r} fits into {limit_bytes} bytes of device memory: the least feasible budget "
        f"found is {least.arena_bytes} bytes; that plan peaks at {', '.join(peaks)}, where the largest buffers are "
        f"{', '.join(largest)}: allow more or use a smaller batch{refused}"
    )
    return DeviceError(message) if isinstance(error, DeviceError) else InfeasibleError(message, (*peaks, *largest))


def fullest(plan: Plan) -> tuple[list[str], list[str]]:
    """The ops or relayouts at which a plan holds most, and the largest buffers at the fullest of them."""
    buffers = [Buffer(s.name, s.size_bytes, s.first, s.last) for s in plan.arena]
    peaks, held = fullest_steps(buffers)
    names = step_names(plan.steps, plan.ops, plan.relayouts)
    return [names[i] for i in peaks], [f"{b.name} ({b.size_bytes} bytes)" for b in held]
