"""What may be planned where memory is short: rewritten graphs with more and more made anew, and what none can undercut.

For each rewritten graph the greedy search's choices of recomputation over the whole range of memory
(``layoutopt/recompute_search.py``), and for one budget the least time, proven (``layoutopt/recompute_exact.py``). What
a plan needs beyond the bytes that a walk through the step counts (padding, workspaces) is known once it is made: then
the least time is asked for again, within that much less.

Part of the face: tables of prices are the planner's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from layoutopt.graph import TrainingGraph
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.recompute_exact import least_extra
from layoutopt.recompute_search import MOST_PROVEN, Choices, Recomputation, thinned
from layoutopt.recompute_step import Step
from layoutopt.rewrite_anew import LATE, may_run_again
from layoutopt.rewrites import before_family, origin_of, rewritten
from layoutopt.solve import solve

__all__ = ["Option", "Tried", "bound_within", "faster", "options", "rank", "tighter", "within"]

_MOST_CHOICES = 16
"""Choices of recomputation that are planned for a graph at most."""
_LEAST = 0.9
"""Choices are not asked for within less than this part of the memory there is."""
_BOUND_EFFORT = 12, 500
"""Rounds and nodes for the bound of a graph."""
_BOUND_S = 10.0
"""For each part of the bound of a graph; a few are the rule."""

Tried = tuple[Tables, Assignment]
"""A graph with its prices, and an assignment of it."""


@dataclass(frozen=True)
class Option:
    """A graph that may be planned.

    Attributes:
        names: of its rewrites.
        recomputation: what it makes anew, and what that takes.
        expected_ns: of its plan.
        base: the graph without that, with its cheapest assignment.
        choices: what else may be made anew; None where that is not searched.
        aim_bytes: what the choice is the least time within; 0 for a choice of the greedy search.
    """

    names: tuple[str, ...]
    recomputation: Recomputation
    expected_ns: int
    base: Tried = field(repr=False)
    choices: Choices | None = field(default=None, repr=False)
    aim_bytes: int = 0

    def instead(self, recomputation: Recomputation, aim_bytes: int = 0) -> Option:
        """The same graph with another choice."""
        names = origin_of(self.base[0].graph)[1]
        own = (*names, recomputation.name) if recomputation.name else names
        expected_ns = self.base[1].cost_ns + recomputation.extra_ns
        return Option(own, recomputation, expected_ns, self.base, self.choices, aim_bytes)


def rank(option: Option) -> tuple[int, int, tuple[str, ...]]:
    """In which order options are planned: those that should be fastest first."""
    return option.expected_ns, option.recomputation.peak_bytes, option.names


def options(graph: TrainingGraph, tried: Iterable[Tried], most: int = _MOST_CHOICES) -> list[Option]:
    """Graphs with more and more made anew, those that should be fastest first.

    Args:
        graph: as captured.
        tried: its rewritten graphs, with assignments whose prices say what is worth its time.
        most: choices for each of these.
    """
    out = []
    for tables, assignment in tried:
        nodes = zip(tables.problem.ops, assignment.choice, strict=True)
        cost_ns = {node.name: node.choices[c].cost_ns for node, c in nodes}
        choices = Choices(_before(graph, tables), cost_ns, _sizes(tables.graph))
        base = Option((), Recomputation("", 0, 0), 0, (tables, assignment), choices)
        out += [base.instead(choice) for choice in thinned(choices.frontier(), most)]
    return sorted(out, key=rank)


def _before(graph: TrainingGraph, tables: Tables) -> TrainingGraph:
    """The graph that positions of ops to make anew are of."""
    return rewritten(graph, before_family(origin_of(tables.graph)[1], "anew"))


def _sizes(graph: TrainingGraph) -> dict[str, int]:
    return {t.name: t.size_elems * t.item_bytes for t in graph.tensors.values()}


# ---- the least time within a budget ---------------------------------------------------------------------------------


def within(ranked: Sequence[Option], limit_bytes: int) -> list[Option]:
    """For each graph the least time within a budget, as far as it may be the fastest of all.

    Args:
        ranked: options, by ``rank``.
        limit_bytes: the budget.
    """
    bases = {id(option.base): option for option in ranked if option.choices is not None}
    fitting = [o.expected_ns for o in ranked if o.recomputation.peak_bytes <= limit_bytes]
    best_ns = min(fitting) if fitting else None
    out = []
    for option in sorted(bases.values(), key=lambda o: (o.base[1].cost_ns, o.names)):
        if best_ns is not None and option.base[1].cost_ns >= best_ns:
            break
        assert option.choices is not None
        found = option.choices.within(limit_bytes)
        if found is not None and found.peak_bytes <= limit_bytes:
            out.append(option.instead(found, limit_bytes))
            best_ns = min(best_ns or out[-1].expected_ns, out[-1].expected_ns)
    return out


def tighter(option: Option, over_bytes: int, limit_bytes: int) -> Option | None:
    """An option whose plan was too large, within that much less; None where that leads nowhere."""
    aim = min(option.aim_bytes, option.recomputation.peak_bytes) - max(over_bytes, 1)
    if option.choices is None or not option.aim_bytes or aim < _LEAST * limit_bytes:
        return None
    found = option.choices.within(aim)
    return None if found is None else option.instead(found, aim)


def faster(option: Option) -> Option:
    """An option within the same bytes that takes least: itself where it is that, or nothing is searched."""
    if option.choices is None or not option.recomputation.name:
        return option
    found = option.choices.within(option.recomputation.peak_bytes)
    return option if found is None else option.instead(found)


def bound_within(
    graph: TrainingGraph, ranked: Sequence[Option], limit_bytes: int, time_limit_s: float = _BOUND_S
) -> int | None:
    """What no plan of some graphs takes less than, within a budget, whatever is made anew and however things lie.

    The ops of a graph take no less than where each op of the backward pass reads what may be made anew in whatever
    layout it likes (a result that is made anew may lie otherwise than the original), which is solved. What runs again
    takes the least time within the budget, each op at its least price over all layouts, each tensor at its bare size,
    bytes counted between ops only. Where nothing is searched to be made anew, the bound hangs on no memory.

    Args:
        graph: as captured.
        ranked: options of the graphs.
        limit_bytes: the budget.
        time_limit_s: of each solution.

    Returns:
        Nanoseconds; None where nothing can fit.
    """
    bases = {id(option.base): option for option in ranked}
    bounds: list[tuple[int, tuple[str, ...], Option, bool]] = []
    for option in bases.values():
        floor = _floor(option.base[0].problem)
        extra = _least_extra(graph, option, floor, limit_bytes) if option.choices is not None else 0
        if extra is not None:
            bounds.append((sum(floor.values()) + extra, option.names, option, False))
    while bounds:
        least, names, option, solved = min(bounds, key=lambda one: one[:2])
        if solved:
            return least
        bounds.remove((least, names, option, solved))
        floor = _floor(option.base[0].problem)
        relaxed = solve(_loosened(option), time_limit_s).bound_ns
        bounds.append((least + max(relaxed - sum(floor.values()), 0), names, option, True))
    return None


def _floor(problem: Problem) -> dict[str, int]:
    """The least price of each op."""
    return {node.name: min(choice.cost_ns for choice in node.choices) for node in problem.ops}


def _least_extra(graph: TrainingGraph, option: Option, floor: dict[str, int], limit_bytes: int) -> int | None:
    tables = option.base[0]
    step = Step(_before(graph, tables), floor, _least_sizes(tables.graph))
    rounds, nodes = _BOUND_EFFORT if len(step.droppable) <= MOST_PROVEN else (1, 1)
    found = least_extra(step, limit_bytes, between=True, rounds=rounds, nodes=nodes, time_limit_s=_BOUND_S)
    return found.bound_ns


def _loosened(option: Option) -> Problem:
    """The problem in which late ops read what may be made anew in whatever layout they like."""
    tables = option.base[0]
    graph = tables.graph
    free = set(may_run_again(graph)) if option.choices is not None else set()
    anew = {tables.index[graph.storage_of[o.tensor]] for at in free for o in graph.ops[at].outputs}
    late = {op.name for op in graph.ops if op.phase in LATE}
    ops = [_without(node, anew) if node.name in late else node for node in tables.problem.ops]
    return replace(tables.problem, ops=tuple(ops))


def _without(node: OpNode, storages: Collection[int]) -> OpNode:
    """An op that reads some storages in whatever layout it likes."""
    kept = [p for p, s in enumerate(node.operands) if p >= node.inputs or s not in storages]
    if len(kept) == len(node.operands):
        return node
    cheapest: dict[tuple[int, ...], Choice] = {}
    for choice in node.choices:
        layouts = tuple(choice.layouts[p] for p in kept)
        if layouts not in cheapest or choice.cost_ns < cheapest[layouts].cost_ns:
            cheapest[layouts] = replace(choice, layouts=layouts)
    return replace(
        node,
        operands=tuple(node.operands[p] for p in kept),
        inputs=sum(p < node.inputs for p in kept),
        choices=tuple(cheapest.values()),
        pinned=tuple(kept.index(p) for p in node.pinned if p in kept),
    )


def _least_sizes(graph: TrainingGraph) -> Mapping[str, int]:
    """Bytes of tensors; none of what updates read or write and no step keeps: it hangs on when they run."""
    moved = {o.tensor for op in graph.ops if op.phase == "update" for o in op.operands}
    lasting = {t.name for t in graph.by_role("parameter", "state", "constant", "input")}
    roots = {graph.storage_of[name] for name in lasting if name in graph.storage_of}
    loose = {name for name in moved if graph.storage_of[name] not in roots}
    return {name: 0 if name in loose else size for name, size in _sizes(graph).items()}
