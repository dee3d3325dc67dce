"""Rewrites: other graphs that compute the same step, among which planning chooses.

A captured graph says what is computed, op by op. A rewrite gives a graph with the same inputs, parameters, state and
outputs whose ops are larger (a contraction with its bias and activation, attention as one op) or fewer. Files and
hashes are always those of the graph as captured; a plan names the rewrites that it was made for, and whoever runs,
checks or explains it applies them again (:func:`planned_graph`). Rewrites are deterministic.

``ALWAYS`` are applied whenever they change something; of ``OPTIONAL``, planning tries with and without, and keeps what
is predicted to be faster, or smaller where that is equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrite_apply import apply_gradients
from layoutopt.rewrite_attention import fuse_attention
from layoutopt.rewrite_epilogue import with_epilogues
from layoutopt.rewrite_half import half_storage
from layoutopt.rewrite_logits import overwrite_logits
from layoutopt.rewrite_neighbours import bring_together
from layoutopt.rewrite_recompute import recomputed
from layoutopt.rewrite_reuse import write_over
from layoutopt.rewrite_updates import early_updates

__all__ = [
    "ALWAYS",
    "OPTIONAL",
    "REWRITES",
    "SMALLER",
    "STORAGES",
    "Rewrite",
    "alternatives",
    "calibration_name",
    "check_storage",
    "origin_of",
    "planned_graph",
    "rewritten",
]

Rewrite = Callable[[TrainingGraph], TrainingGraph]

REWRITES: dict[str, Rewrite] = {
    "recompute": recomputed,
    "attention": fuse_attention,
    "epilogue": with_epilogues,
    "logits": overwrite_logits,
    "neighbours": bring_together,
    "apply": apply_gradients,
    "updates": early_updates,
    "reuse": write_over,
    "half": half_storage,
}
"""By name, in the order in which they are applied."""

STORAGES: dict[str, tuple[str, ...]] = {"fp32": (), "fp16": ("half",)}
"""How numbers may lie in memory (``--storage``), and the rewrites that make it so."""

ALWAYS: tuple[str, ...] = ("epilogue", "logits", "neighbours", "apply", "updates", "reuse")
OPTIONAL: tuple[str, ...] = ("attention",)
SMALLER: tuple[str, ...] = ("recompute",)
"""Applied besides where no plan fits into memory without: they save memory and may take time."""

_META = "rewritten"
_KEPT = 32
_cache: OrderedDict[tuple[str, tuple[str, ...]], TrainingGraph] = OrderedDict()


def rewritten(graph: TrainingGraph, names: Iterable[str]) -> TrainingGraph:
    """The graph after some rewrites, in their own order; itself where there are none.

    Args:
        graph: as captured, views folded.
        names: of :data:`REWRITES`.

    Raises:
        LayoutOptError: there is no such rewrite.
    """
    wanted = set(names)
    unknown = sorted(wanted - set(REWRITES))
    if unknown:
        raise LayoutOptError(
            f"unknown rewrite {unknown[0]!r}: this layoutopt has {', '.join(REWRITES) or 'none'}; plan the graph anew"
        )
    ordered = tuple(name for name in REWRITES if name in wanted)
    if not ordered:
        return graph
    key = graph.hash, ordered
    if key not in _cache:
        out = REWRITES[ordered[-1]](rewritten(graph, ordered[:-1]))
        _cache[key] = out.with_ops(out.ops, meta={**out.meta, _META: [graph.hash, list(ordered)]})
        if len(_cache) > _KEPT:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def origin_of(graph: TrainingGraph) -> tuple[str, tuple[str, ...]]:
    """Hash of the graph as captured, and the rewrites that made this one of it."""
    origin, names = graph.meta.get(_META, (graph.hash, ()))
    return str(origin), tuple(names)


def calibration_name(graph: TrainingGraph, storage: str | None = None) -> str:
    """What a device model calls a graph whose kernels were measured.

    Args:
        graph: as captured, or rewritten.
        storage: that its numbers are to lie in; as they do by default.
    """
    origin, names = origin_of(graph)
    half = "half" in (names if storage is None else STORAGES[storage])
    return f"{origin}:fp16" if half else origin


def planned_graph(plan: Plan, graph: TrainingGraph) -> TrainingGraph:
    """The graph whose ops a plan runs.

    Args:
        plan: made for ``graph``.
        graph: as captured, or already rewritten as the plan says.

    Raises:
        GraphError: the plan is for another graph.
    """
    origin, names = origin_of(graph)
    if plan.graph_hash != origin or (names and names != plan.rewrites):
        raise GraphError(
            f"the plan is for graph {plan.graph_name!r} ({plan.graph_hash[:12]}), not for {graph.name!r} "
            f"({origin[:12]}): plan this graph with `layoutopt plan`"
        )
    return graph if names == plan.rewrites else rewritten(graph, plan.rewrites)


def alternatives(
    graph: TrainingGraph,
    names: Sequence[str] | None = None,
    storage: str = "fp32",
    *,
    smaller: bool = False,
    gradients: bool = False,
) -> list[TrainingGraph]:
    """The graphs to plan, of which the best is kept; a rewrite that changes nothing is left out.

    Args:
        graph: as captured, or rewritten (then it is the only one).
        names: exactly these rewrites, besides those of ``storage``; None lets planning choose.
        storage: one of :data:`STORAGES`.
        smaller: with :data:`SMALLER`; none where these change nothing, or where the rewrites are given.
        gradients: keep every gradient to be read after the step.

    Raises:
        LayoutOptError: there is no such storage or rewrite.
    """
    check_storage(storage)
    stored = STORAGES[storage]
    if smaller and (origin_of(graph)[1] or names is not None or rewritten(graph, SMALLER).ops == graph.ops):
        return []
    if origin_of(graph)[1]:
        return [graph]
    if names is not None:
        return [rewritten(graph, [*names, *stored])]
    chosen: list[list[str]] = [list(SMALLER) if smaller else []]
    for name in OPTIONAL:
        if rewritten(graph, [name]).ops != graph.ops:
            chosen += [[*names, name] for names in chosen]
    # In float16, gradients are scaled, and looked at, between the contraction and the update.
    always = [name for name in ALWAYS if name != "apply" or not (gradients or stored)]
    return [rewritten(graph, _effective(graph, [*always, *names, *stored])) for names in chosen]


def check_storage(storage: str) -> None:
    """Whether numbers may lie in memory so.

    Raises:
        LayoutOptError: there is no such storage; the message lists them.
    """
    if storage not in STORAGES:
        raise LayoutOptError(f"unknown storage {storage!r}: choose one of {', '.join(STORAGES)}")


def _effective(graph: TrainingGraph, names: Iterable[str]) -> list[str]:
    """Of some rewrites, those that change something after those before them."""
    wanted, out = set(names), list[str]()
    for name in REWRITES:
        if name in wanted and rewritten(graph, [*out, name]).ops != rewritten(graph, out).ops:
            out.append(name)
    return out
