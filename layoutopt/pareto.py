"""Time against memory: the plans of one graph that no other beats in both.

From the fastest plan to the one that needs least, each with more made anew in the backward pass
(``layoutopt/options.py``), its layouts free or lean (``layoutopt/budget.py``). The exact solver plans the graphs in
which nothing is made anew; what is made anew takes least within its bytes, and lies as its original does there, so that
a point takes no search for layouts. ``layoutopt plan --memory`` with a point's bytes gives a plan at least as fast,
solved exactly. Each point says what no plan of these graphs can undercut within its bytes.

Part of the face: it joins the planner's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.errors import DeviceError, InfeasibleError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan

if TYPE_CHECKING:
    from costmodel.cost import Costs
    from layoutopt.budget import Makers, Tried
    from layoutopt.pricing import Tables
    from layoutopt.problem import Assignment

__all__ = ["HEAD", "SHARES", "Point", "cells", "draw", "pareto", "rows", "slowdown_within", "undominated"]

_WORTH = 0.005
"""Part of a plan's memory that a slower one must save."""
SHARES = (0.75, 0.5)
"""Of the fastest plan's memory: there the frontier is as good as is known."""


@dataclass(frozen=True)
class Point:
    """A plan of the frontier.

    Attributes:
        plan: to be run.
        objective_ns: of its kernels, one after the other, as planning adds them up.
        arena_bytes: all that a step needs.
        ops_again: ops that run twice.
        lean: layouts without padding and copies.
        bound_ns: no plan of the graphs that were tried takes less within ``arena_bytes``; 0 where that is not known.
    """

    plan: Plan
    objective_ns: int
    arena_bytes: int
    ops_again: int
    lean: bool
    bound_ns: int = 0


def pareto(
    graph: TrainingGraph,
    costs: Costs,
    strategy: str = "ilp",
    time_limit_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
    *,
    storage: str = "fp32",
    most: int = 12,
    shares: Sequence[float] = SHARES,
) -> tuple[Point, ...]:
    """Plans of less and less memory, the fastest first.

    Args:
        graph: as captured, views folded.
        costs: of the device the plans are for.
        strategy: as ``planner.plan``.
        time_limit_s: for the exact solver, a graph.
        progress: told what is going on.
        storage: how numbers lie in memory.
        most: choices of recomputation that are planned, a rewritten graph.
        shares: of the fastest plan's memory, within which the fastest plan is looked for besides.

    Raises:
        InfeasibleError, DeviceError: there is no plan at all.
    """
    from layoutopt.budget import Planned, fastest_within, further
    from layoutopt.options import bound_within, faster, options
    from layoutopt.rewrites import alternatives

    makers = _makers(costs, strategy, time_limit_s)
    tried: list[Tried] = []
    found: list[Point] = []
    for candidate in alternatives(graph, None, storage):
        if progress:
            progress("solving without recomputation", 0.1 + 0.1 * len(tried))
        tables, assignment = makers.assign(makers.tabulate(candidate))
        tried.append((tables, assignment))
        try:
            found.append(_point(tables, makers.place(tables, assignment)))
        except DeviceError:
            continue  # too large; what is smaller may not be
    planned = Planned(graph, makers)
    more = further(alternatives(graph, None, storage, smaller=True), tried, makers)
    ranked = options(graph, [*tried, *more], most)
    for done, option in enumerate(ranked):
        if progress:
            progress(f"planning {done + 1} of {len(ranked)}", 0.4 + 0.5 * (done + 1) / len(ranked))
        sooner = [p for p in found if p.objective_ns <= option.expected_ns]
        if all(p.arena_bytes > option.recomputation.peak_bytes for p in sooner):  # or it is beaten already
            found += [_point(*pair) for pair in planned.plans(faster(option))]
    if not found:
        raise InfeasibleError(f"graph {graph.name!r} has no plan that fits device {costs.name!r}: use a smaller batch")
    whole = min(found, key=lambda p: p.objective_ns).arena_bytes
    for share in shares:
        fastest = fastest_within(planned, ranked, int(whole * share), None)
        found += [_point(*fastest[0])] if fastest is not None else []
    kept = undominated(found)
    if not makers.exact:
        return kept
    if progress:
        progress("bounding", 0.9)
    bounds = [bound_within(graph, ranked, p.arena_bytes) or 0 for p in kept]
    return tuple(replace(p, bound_ns=min(b, p.objective_ns)) for p, b in zip(kept, bounds, strict=True))


def _makers(costs: Costs, strategy: str, time_limit_s: float) -> Makers:
    from layoutopt.assembly import assemble
    from layoutopt.budget import Makers
    from layoutopt.planner import assign, check_strategy, tabulate, validate
    from layoutopt.policies import POLICIES
    from layoutopt.pricing import Pricer

    check_strategy(strategy)
    if strategy in POLICIES:
        raise LayoutOptError(f"strategy {strategy!r} is a peer's policy, which has one plan: leave --pareto out")
    pricer = Pricer(costs)

    def place(tables: Tables, assignment: Assignment) -> Plan:
        plan = assemble(tables, costs, assignment, strategy)
        validate(plan, tables.graph, costs)
        return plan

    return Makers(
        lambda graph: tabulate(graph, costs, pricer=pricer),
        lambda tables: (tables, assign(tables, strategy, time_limit_s)),
        place,
        exact=strategy == "ilp",
    )


def _point(tables: Tables, plan: Plan) -> Point:
    from layoutopt.rewrite_anew import SUFFIX

    again = sum(op.op.endswith(SUFFIX) for op in plan.ops)
    return Point(plan, plan.solver.objective_ns, plan.arena_bytes, again, not tables.problem.relayout_ns)


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in time and memory, the fastest first; a few bytes less are not worth time."""
    out: list[Point] = []
    for point in sorted(points, key=lambda p: (p.objective_ns, p.arena_bytes)):
        if not out or point.arena_bytes < out[-1].arena_bytes * (1 - _WORTH):
            out.append(point)
    return tuple(out)


def slowdown_within(points: Sequence[Point], budget_bytes: float) -> float | None:
    """The fastest point's time within a budget over the fastest of all; None where none fits."""
    fitting = [p.objective_ns for p in points if p.arena_bytes <= budget_bytes]
    return min(fitting) / points[0].objective_ns if fitting else None


def rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The points as JSON has them, in bytes, seconds and shares of the fastest plan's."""
    first = points[0]
    return [
        {
            "arena_bytes": p.arena_bytes,
            "memory_share": p.arena_bytes / first.arena_bytes,
            "kernels_s": p.objective_ns * 1e-9,
            "slowdown": p.objective_ns / first.objective_ns,
            "least_slowdown": p.bound_ns / first.objective_ns,
            "ops_again": p.ops_again,
            "lean": p.lean,
            "rewrites": list(p.plan.rewrites),
        }
        for p in points
    ]


HEAD = ("memory MiB", "of the fastest", "kernels ms", "slowdown", "at least", "ops run again", "layouts")
"""What ``cells`` are."""


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as people read it."""
    return [
        f"{row['arena_bytes'] / 2**20:.1f}",
        f"{row['memory_share']:.0%}",
        f"{row['kernels_s'] * 1e3:.2f}",
        f"{row['slowdown']:.3f}",
        f"{row['least_slowdown']:.3f}" if row["least_slowdown"] else "-",
        str(row["ops_again"]),
        "lean" if row["lean"] else "all",
    ]


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write a picture of the frontier, of the kind that the file's name ends in (.svg, .png, .pdf).

    Raises:
        LayoutOptError: matplotlib is not installed, or does not know such files.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutOptError("a picture needs matplotlib: pip install 'layoutopt[demo]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    memory = [p.arena_bytes / 2**20 for p in points]
    times = [p.objective_ns * 1e-6 for p in points]
    axes.step(memory, times, where="post", color="tab:grey", linewidth=1)
    for slim, marker in ((False, "o"), (True, "s")):
        own = [(x, y) for x, y, p in zip(memory, times, points, strict=True) if p.lean == slim]
        if own:
            label = "no padding, no copies" if slim else "all layouts"
            axes.plot(*zip(*own, strict=True), marker, label=label)
    axes.set_xlim(left=0)
    axes.set_xlabel("memory of a step, MiB")
    axes.set_ylabel("predicted kernels of a step, ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise LayoutOptError(f"cannot draw to {path}: give a name that ends in .svg, .png or .pdf") from error
