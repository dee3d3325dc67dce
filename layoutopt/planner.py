"""Planning, whole: candidates, prices, a strategy, the arena, and the judge's word before a Plan leaves.

Part of the face: it joins ``kernels`` and ``costmodel`` to the core, and imports them lazily.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from layoutopt import strategies
from layoutopt.alike import projected, tied, untied
from layoutopt.assembly import as_run_ns, assemble, item_cost
from layoutopt.budget import Makers, cuts, fit, optional_of
from layoutopt.candidates import CONVOLUTIONS, candidates, rules_for
from layoutopt.check import check
from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutOptError
from layoutopt.graph import DTYPES, PRODUCTS, TrainingGraph
from layoutopt.interrupts import requested
from layoutopt.layout import Layout
from layoutopt.pass_views import overwrites
from layoutopt.pbqp import chaindp
from layoutopt.peers import applied, with_not_run
from layoutopt.plan import ItemCost, Plan, gap_of, with_report
from layoutopt.plancheck import check_plan
from layoutopt.policies import POLICIES
from layoutopt.pricing import Pricer, Progress, Tables, build_problem
from layoutopt.pricing_rows import pricer_of
from layoutopt.problem import Assignment, Problem
from layoutopt.propagation import bfs, majority
from layoutopt.rewrite_neighbours import sharing
from layoutopt.rewrites import STORAGES, alternatives, origin_of, planned_graph, rewritten
from layoutopt.solve import solve

if TYPE_CHECKING:
    from costmodel.cost import Cost, Costs
    from kernels.bind import BoundStep
    from kernels.spec import DeviceLimits, Kernel

__all__ = ["EQUALLY_FAST", "STRATEGIES", "assign", "fastest", "plan", "plan_all", "posed", "tabulate", "validate"]

STRATEGIES = (
    *("ilp", "activation", "greedy", "ideal", "rowmajor", "rtile"),
    *("bfs", "majority", "chaindp"),
    *POLICIES,
)
"""What ``--strategy`` takes; ``random:SEED`` besides, for tests."""

EQUALLY_FAST = 0.01
"""Plans of rewritten graphs whose predicted times differ by less than this share are equally fast."""

AGAIN = 0.25
"""Of the solver's time limit, the part for each further solution of a graph of which no plan fits into memory."""

_BY_TABLES = {**strategies.STRATEGIES, "bfs": bfs, "majority": majority, "chaindp": chaindp}

_LOG = logging.getLogger(__name__)
_REDUCTIONS = frozenset((*PRODUCTS, "attention", "attention_grad", *CONVOLUTIONS))


def tabulate(
    graph: TrainingGraph,
    costs: Costs,
    layouts: Mapping[str, tuple[Layout, ...]] | None = None,
    progress: Progress | None = None,
    pricer: Pricer | None = None,
) -> Tables:
    """The priced problem of a graph, to be planned by several strategies.

    Args:
        graph: views folded.
        costs: of a device.
        layouts: candidates per storage; by the device's kind when left out.
        progress: told how far pricing is.
        pricer: with what it remembers of other graphs, for the same costs.

    Raises:
        GraphError, InfeasibleError: as ``pricing.build_problem``.
    """
    if layouts is None:
        layouts = candidates(graph, rules_for(costs.limits.kind, costs.limits.simd_width))
    return build_problem(graph, costs, layouts, progress, pricer=pricer)


def plan(
    graph: TrainingGraph,
    costs: Costs,
    strategy: str = "ilp",
    memory_bytes: int | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    *,
    tables: Tables | None = None,
    keep: Iterable[str] = (),
    rewrites: Sequence[str] | None = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
) -> Plan:
    """Choose every layout and kernel of a step, place it in memory, and validate the result.

    Args:
        graph: views folded.
        costs: of the device the plan is for.
        strategy: one of ``STRATEGIES``, or ``random:SEED``.
        memory_bytes: the most the arena may take; None for the device's own limit only.
        time_limit_s: for the exact solver.
        progress: told what is going on.
        tables: from ``tabulate``, to plan one graph by several strategies without pricing it again.
        keep: further tensors that must stay readable after a step.
        rewrites: of the graph (see ``layoutopt.rewrites``); None keeps those that are predicted to be fastest.
        storage: how numbers lie in memory, "fp32" or "fp16" (large ones as halves).
        micro_batches: into how many the samples are cut; None for one, or more where that is what memory asks for.

    Raises:
        GraphError: the samples cannot be cut into so many micro-batches.
        InfeasibleError: no assignment, or it does not fit ``memory_bytes``.
        DeviceError: the arena does not fit the device.
        LayoutOptError: the strategy is not known.
    """
    check_strategy(strategy)
    kept = tuple(keep)
    if tables is not None:
        return _plan(tables, costs, strategy, memory_bytes, time_limit_s, progress, kept)
    return _best(graph, costs, strategy, memory_bytes, time_limit_s, progress, kept, rewrites, storage, micro_batches)[
        1
    ]


def _plan(
    tables: Tables,
    costs: Costs,
    strategy: str,
    memory_bytes: int | None,
    time_limit_s: float,
    progress: Progress | None,
    keep: tuple[str, ...],
) -> Plan:
    own, assignment = _assigned(tables, strategy, time_limit_s, progress)
    return _placed(own, costs, assignment, strategy, memory_bytes, progress, keep)


def _assigned(
    tables: Tables, strategy: str, time_limit_s: float, progress: Progress | None
) -> tuple[Tables, Assignment]:
    """The assignment and the tables it is of: a peer's policy has its own."""
    if progress:
        progress(f"solving ({strategy})", 0.9)
    return applied(tables, strategy) if strategy in POLICIES else (tables, assign(tables, strategy, time_limit_s))


def _placed(
    tables: Tables,
    costs: Costs,
    assignment: Assignment,
    strategy: str,
    memory_bytes: int | None,
    progress: Progress | None,
    keep: tuple[str, ...],
) -> Plan:
    if progress:
        progress("placing and validating", 0.95)
    out = with_not_run(assemble(tables, costs, assignment, strategy, memory_bytes, keep), tables)
    validate(out, tables.graph, costs)
    if progress:
        progress("planned", 1.0)
    return out


def _best(
    graph: TrainingGraph,
    costs: Costs,
    strategy: str,
    memory_bytes: int | None,
    time_limit_s: float,
    progress: Progress | None,
    keep: tuple[str, ...],
    rewrites: Sequence[str] | None,
    storage: str,
    micro_batches: int | None,
) -> tuple[Tables, Plan]:
    """The plan of the rewritten graph that is predicted to be fastest, and the tables it came from.

    Of plans that are equally fast (see ``EQUALLY_FAST``) it is the one with the smallest arena. Where none fits into
    memory, graphs that compute some results twice are tried too, layouts without padding, and micro-batches
    (``layoutopt/budget.py``).

    Raises:
        InfeasibleError, DeviceError: no rewritten graph has a plan that fits; the last one's reason.
    """
    found: list[tuple[Tables, Plan]] = []
    refused: list[InfeasibleError | DeviceError] = []
    tried: list[tuple[Tables, Assignment]] = []
    begin_s = time.perf_counter()
    graphs = _candidates(graph, rewrites, storage, keep, micro_batches or 1)
    pricer = pricer_of(costs, graphs, lambda one, own: tabulate(one, costs, progress=progress, pricer=own))
    # All are priced before any is solved: what is asked of the pricer meanwhile is of no consequence.
    priced = [tabulate(candidate, costs, progress=progress, pricer=pricer) for candidate in graphs]
    _LOG.info("%s: %d forms priced in %.1f s", graph.name, len(priced), time.perf_counter() - begin_s)
    for tables in priced:
        if found and requested():
            break
        begin_s = time.perf_counter()
        try:
            own, assignment = _assigned(tables, strategy, time_limit_s, progress)
            tried.append((own, assignment))
            found.append((tables, _placed(own, costs, assignment, strategy, memory_bytes, progress, keep)))
        except (InfeasibleError, DeviceError) as error:
            _LOG.info("%s: no plan: %s", _form(tables), error)
            refused.append(error)
            continue
        seconds, report = time.perf_counter() - begin_s, found[-1][1].solver
        _LOG.info("%s: %s, %.3f ms, in %.1f s", _form(tables), report.status, report.objective_ns * 1e-6, seconds)
    if found:
        return _beside(fastest(found), tried if refused else [])
    if not tried or rewrites is not None or origin_of(graph)[1]:
        raise refused[-1]
    makers = Makers(
        lambda candidate: tabulate(candidate, costs, pricer=pricer),
        lambda tables: _assigned(tables, strategy, time_limit_s * AGAIN, progress),
        lambda own, assignment: _placed(own, costs, assignment, strategy, None, progress, keep),
        exact=strategy == "ilp",
    )
    most = min(costs.limits.max_alloc_bytes, costs.limits.global_mem_bytes)
    limit_bytes = most if memory_bytes is None else min(most, memory_bytes)
    smaller = _candidates(graph, rewrites, storage, keep, micro_batches or 1, smaller=True)

    def parts() -> list[TrainingGraph]:
        if micro_batches is not None:
            return []
        names = optional_of(tried)
        return cuts(graph, limit_bytes, lambda n: _candidates(graph, rewrites, storage, keep, n, optional=names)[0])

    return fit(graph, tried, smaller, limit_bytes, makers, refused[-1], parts)


def _form(tables: Tables) -> str:
    """A rewritten graph in words."""
    return f"{tables.graph.name} with {', '.join(origin_of(tables.graph)[1]) or 'no rewrites'}"


def _beside(best: tuple[Tables, Plan], tried: Sequence[tuple[Tables, Assignment]]) -> tuple[Tables, Plan]:
    """A plan that fits where a faster graph's does not: what is proven of its own layouts proves no optimum."""
    tables, plan = best
    bound = min((assignment.bound_ns for _, assignment in tried), default=plan.solver.bound_ns)
    if plan.solver.status != "OPTIMAL" or bound >= plan.solver.objective_ns:
        return best
    return tables, with_report(plan, status="FEASIBLE", bound_ns=bound, gap=gap_of(plan.solver.objective_ns, bound))


def fastest(found: Sequence[tuple[Tables, Plan]]) -> tuple[Tables, Plan]:
    """Of plans of rewritten graphs the one predicted to be fastest; of equally fast ones that with the smallest arena.

    Args:
        found: at least one, each with the tables it came from.
    """
    enough_ns = min(plan.solver.objective_ns for _, plan in found) * (1 + EQUALLY_FAST)
    fast = [pair for pair in found if pair[1].solver.objective_ns <= enough_ns]
    return min(fast, key=lambda pair: (pair[1].arena_bytes, pair[1].solver.objective_ns))


def _candidates(
    graph: TrainingGraph,
    rewrites: Sequence[str] | None,
    storage: str,
    keep: Sequence[str],
    count: int,
    *,
    smaller: bool = False,
    optional: Sequence[str] | None = None,
) -> list[TrainingGraph]:
    """The rewritten graphs to plan: with gradients, or as captured, where what must stay readable were gone else.

    Raises:
        GraphError: what must stay readable is gone in every graph of so many micro-batches.
    """
    for gradients in (False, True):
        out = alternatives(
            graph,
            rewrites,
            storage,
            smaller=smaller,
            gradients=gradients,
            micro_batches=count,
            optional=optional,
        )
        readable = [candidate for candidate in out if not _lost(candidate, keep)]
        if readable or smaller:
            return readable
    if count == 1:
        return [rewritten(graph, STORAGES[storage])]
    plain = rewritten(graph, [f"micro:{count}", *STORAGES[storage]])
    if _lost(plain, keep):
        raise GraphError(
            f"a step of graph {graph.name!r} in micro-batches leaves not all of {', '.join(keep)} to read: keep less, "
            "or plan the whole batch"
        )
    return [plain]


def _lost(graph: TrainingGraph, keep: Sequence[str]) -> bool:
    """Whether a step of the graph leaves nothing to read of some tensors: merged into ops, or overwritten."""
    gone = overwrites(graph)
    updated = {name for name in gone if graph.tensors[name].role in ("parameter", "state")}
    return any(name not in graph.tensors or name in gone.keys() - updated for name in keep)


def plan_all(
    graph: TrainingGraph,
    costs: Costs,
    names: Sequence[str] = STRATEGIES,
    memory_bytes: int | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    *,
    keep: Iterable[str] = (),
    rewrites: Sequence[str] | None = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
) -> dict[str, Plan]:
    """A plan per strategy, from one set of tables: of the rewritten graph that serves the first strategy best.

    Raises:
        InfeasibleError, DeviceError, LayoutOptError: as ``plan``.
    """
    for name in names:
        check_strategy(name)
    kept = tuple(keep)
    tables, first = _best(
        graph, costs, names[0], memory_bytes, time_limit_s, progress, kept, rewrites, storage, micro_batches
    )
    rest = {name: _plan(tables, costs, name, memory_bytes, time_limit_s, progress, kept) for name in names[1:]}
    return {names[0]: first, **rest}


def check_strategy(strategy: str) -> None:
    """Whether there is such a strategy.

    Raises:
        LayoutOptError: there is none; the message lists them.
    """
    if strategy not in STRATEGIES and not _seed(strategy):
        raise LayoutOptError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)} (or random:SEED for tests)"
        )


def _seed(strategy: str) -> list[int]:
    kind, _, seed = strategy.partition(":")
    return [int(seed)] if kind == "random" and seed.isdecimal() else []


def assign(tables: Tables, strategy: str, time_limit_s: float = 60.0) -> Assignment:
    """The assignment that a strategy finds on these tables, checked; a peer's policy has tables of its own.

    Raises:
        InfeasibleError: none.
    """
    problem = tables.problem
    if strategy == "ilp":
        found = _exact(tables, time_limit_s)
    elif strategy == "activation":
        found = strategies.activation(problem, _reductions_fed(tables))
    elif strategy == "rtile":
        found = strategies.prefer(problem, _tiled(problem), "rtile")
    elif _seed(strategy):
        found = strategies.random(problem, _seed(strategy)[0])
    else:
        found = _BY_TABLES[strategy](problem)
    check(problem, found)
    return found


def _exact(tables: Tables, time_limit_s: float) -> Assignment:
    """The cheapest assignment that decides ops alike which are to share a launch (``layoutopt/alike.py``).

    Where time runs out, or deciding alike costs more than it saves, it may be one of those that the search starts from.
    """
    problem = tables.problem
    ties, starts, near = posed(tables)
    if ties is problem:
        return solve(problem, time_limit_s, starts)
    try:
        found = untied(problem, solve(ties, time_limit_s, near))
    except InfeasibleError:  # not alike, or not in time: then as they come
        return solve(problem, time_limit_s, starts)
    units = tables.pricer.costs.limits.idle_units
    best = min([found, *starts], key=lambda a: as_run_ns(tables, a, units))
    if best is found:
        return found
    # What was proven is proven of assignments that decide alike; of others, that no op takes less than its least.
    least = sum(min(choice.cost_ns for choice in op.choices) for op in problem.ops)
    return replace(best, status="FEASIBLE", bound_ns=least, seconds=found.seconds)


def posed(tables: Tables) -> tuple[Problem, list[Assignment], list[Assignment]]:
    """What the exact solver is asked: the problem with what is to be decided alike tied, and where it starts.

    Returns:
        The problem with ties, or the tables' own where there are none; starts of the tables' own, and of this one.
    """
    problem, starts = tables.problem, list(_starts(tables))
    ties = tied(problem, sharing(tables.graph, tables.pricer.costs.limits.idle_units))
    if ties is problem:
        return ties, starts, starts
    return ties, starts, [near for start in starts if (near := projected(ties, start)) is not None]


def _starts(tables: Tables) -> Iterable[Assignment]:
    """What the exact solver starts from; a strategy that meets a dead end gives nothing."""
    for name in ("activation", "chaindp", "greedy", "ideal", "rowmajor"):
        try:
            yield assign(tables, name)
        except InfeasibleError:
            continue


def _reductions_fed(tables: Tables) -> list[int]:
    """Per storage, how many contractions, convolutions and attentions read it, for activations; else 0."""
    graph = tables.graph
    out = [0] * len(tables.names)
    for op in graph.ops:
        if op.kind in _REDUCTIONS:
            for operand in op.inputs[: PRODUCTS.get(op.kind)]:
                storage = graph.storages[graph.storage_of[operand.tensor]]
                if storage.role == "activation":
                    out[tables.index[storage.name]] += 1
    return out


def _tiled(problem: Problem) -> list[int]:
    """Per storage, its first R-Tile: a candidate with two axes cut; row-major where there is none."""
    return [next((i for i, x in enumerate(node.candidates) if _is_tiled(x)), 0) for node in problem.storages]


def _is_tiled(layout: Layout) -> bool:
    cut = [axis for axis in range(layout.rank) if len(layout.axis_modes(axis)) > 1]
    inner = {m.axis for m in sorted(layout.modes, key=lambda m: m.stride)[:2]}
    return len(cut) > 1 and len(inner) > 1


# ---- judging a plan -------------------------------------------------------------------------------------------------


def validate(
    plan: Plan,
    graph: TrainingGraph,
    costs: Costs | None = None,
    limits: DeviceLimits | None = None,
) -> None:
    """Whether a plan serves a graph on a device, recomputed from scratch.

    Args:
        plan: made here or loaded.
        graph: what it should be for.
        costs: of the device it should be for; its predictions are recomputed and compared.
        limits: of the device; those of ``costs`` when left out. With neither, kernels are not looked at.

    Raises:
        GraphError: the plan is for another graph or does not serve it.
        DeviceError: it is for another device or does not fit this one.
        LayoutOptError: its predicted costs are not what the device model predicts.
    """
    graph = planned_graph(plan, graph)
    if costs is not None and plan.device_hash != costs.hash:
        raise DeviceError(
            f"the plan is for device model {plan.device_name!r} ({plan.device_hash[:12]}), not for {costs.name!r} "
            f"({costs.hash[:12]}): plan again with this device model"
        )
    check_plan(plan, graph)
    limits = limits or (costs.limits if costs is not None else None)
    if limits is not None:
        _check_device(plan, graph, limits, costs.predict if costs is not None else None)


def _sharing_counts(plan: Plan, steps: Sequence[BoundStep], groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """By op, how many ops of its group run the kernel that it runs."""
    keys = {index: bound.kernel.key for (kind, index), bound in zip(plan.steps, steps, strict=True) if kind == "op"}
    out: dict[int, int] = {}
    for group in groups:
        alike = Counter(keys[o] for o in group)
        out |= {o: alike[keys[o]] for o in group}
    return out


def _check_device(
    plan: Plan, graph: TrainingGraph, limits: DeviceLimits, predict: Callable[[Kernel, int], Cost] | None
) -> None:
    from kernels.bind import bind

    allowed = min(limits.max_alloc_bytes, limits.global_mem_bytes)
    if plan.arena_bytes > allowed:
        raise DeviceError(
            f"the plan of {plan.graph_name!r} needs one buffer of {plan.arena_bytes} bytes; device "
            f"{plan.device_name!r} allows {allowed}: use a smaller batch"
        )
    misplaced = [s for s in plan.arena if s.offset_bytes % limits.base_align_bytes]
    if misplaced:
        raise DeviceError(
            f"the plan puts {misplaced[0].name} at byte {misplaced[0].offset_bytes}; the device needs multiples of "
            f"{limits.base_align_bytes}: plan again with this device model"
        )
    slots = {slot.name: slot for slot in plan.arena}
    costs = [plan.ops[i].cost if kind == "op" else plan.relayouts[i].cost for kind, i in plan.steps]
    known: dict[tuple[int, int], ItemCost] = {}
    steps = bind(graph, plan, limits)
    together = _sharing_counts(plan, steps, sharing(graph, limits.idle_units))
    for step, (bound, stated) in enumerate(zip(steps, costs, strict=True)):
        operands = len(bound.kernel.layouts)
        for name, workspace in zip(bound.slots[operands:], bound.kernel.scratch, strict=True):
            slot = slots.get(name)
            need = workspace.layout.size_elems * DTYPES[workspace.dtype]
            if slot is None or slot.size_bytes < need or not slot.first <= step <= slot.last:
                raise LayoutOptError(f"the plan has no workspace {name} of {need} bytes at step {step}: plan anew")
        if predict is None:
            continue
        # bind() gives repeated blocks one kernel object: predict it once.
        kind, index = plan.steps[step]
        count = together[index] if kind == "op" else 1
        key = id(bound.kernel), count
        if key not in known:
            known[key] = item_cost(predict(bound.kernel, count))
        if known[key] != stated:
            raise LayoutOptError(
                f"the plan predicts {stated.total_ns} ns for {bound.label}, the device model {known[key].total_ns} ns: "
                "plan again with this device model"
            )
