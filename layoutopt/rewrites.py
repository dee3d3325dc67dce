"""Rewrites: other graphs that compute the same step, among which planning chooses.

A captured graph says what is computed, op by op. A rewrite gives a graph with the same inputs, parameters, state and
outputs whose ops are larger (a contraction with its bias and activation, attention as one op) or fewer. Files and
hashes are always those of the graph as captured; a plan names the rewrites that it was made for, and whoever runs,
checks or explains it applies them again (:func:`planned_graph`). Rewrites are deterministic.

``ALWAYS`` are applied whenever they change something; of ``OPTIONAL``, planning tries with and without, and keeps what
is predicted to be faster, or smaller where that is equal. A rewrite of a *family* has a parameter, written behind a
colon (``anew:3-9``, ``micro:4``): planning chooses it, and whoever applies it reads it from the name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import in_micro_batches
from layoutopt.plan import Plan
from layoutopt.rewrite_anew import made_anew
from layoutopt.rewrite_apply import apply_gradients
from layoutopt.rewrite_attention import fuse_attention
from layoutopt.rewrite_epilogue import with_epilogues
from layoutopt.rewrite_half import half_storage
from layoutopt.rewrite_logits import overwrite_logits
from layoutopt.rewrite_neighbours import bring_together
from layoutopt.rewrite_pieces import in_pieces, pieces_name
from layoutopt.rewrite_quantize import quantised_weights
from layoutopt.rewrite_recompute import recomputed
from layoutopt.rewrite_reuse import write_over
from layoutopt.rewrite_updates import early_updates

__all__ = [
    "ALWAYS",
    "FAMILIES",
    "OPTIONAL",
    "REWRITES",
    "SMALLER",
    "STORAGES",
    "Rewrite",
    "alternatives",
    "before_family",
    "calibration_name",
    "check_storage",
    "in_order",
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


def _micro(graph: TrainingGraph, count: str) -> TrainingGraph:
    if not count.isdecimal():
        raise GraphError(f"rewrite 'micro:{count}' names no number of micro-batches: expected one such as micro:4")
    return in_micro_batches(graph, int(count))


FAMILIES: dict[str, tuple[str, Callable[[TrainingGraph, str], TrainingGraph]]] = {
    "micro": ("recompute", _micro),
    "pieces": ("recompute", in_pieces),
    "anew": ("updates", made_anew),
    "weights": ("", quantised_weights),
}
"""Rewrites with a parameter, ``NAME:PARAMETER``: by name, the rewrite before which they come ("": after all), and what
they do."""

STORAGES: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("half",),
    "int8": ("weights:int8",),
    "nf4": ("weights:nf4",),
}
"""How numbers may lie in memory (``--storage``), and the rewrites that make it so."""

ALWAYS: tuple[str, ...] = ("epilogue", "logits", "neighbours", "apply", "updates", "reuse")
OPTIONAL: tuple[str, ...] = ("attention",)
SMALLER: tuple[str, ...] = ("recompute",)
"""Applied besides where no plan fits into memory without: they save memory and may take time."""
PIECES: tuple[int, ...] = (4, 16)
"""Into how many pieces a loss over a large vocabulary is cut then, beside ``SMALLER``."""

_META = "rewritten"
_KEPT = 32
_cache: OrderedDict[tuple[str, tuple[str, ...]], TrainingGraph] = OrderedDict()


def rewritten(graph: TrainingGraph, names: Iterable[str]) -> TrainingGraph:
    """The graph after some rewrites, in their own order; itself where there are none.

    Args:
        graph: as captured, views folded.
        names: of :data:`REWRITES`, or of :data:`FAMILIES` with a parameter.

    Raises:
        LayoutOptError: there is no such rewrite.
    """
    ordered = in_order(names)
    if not ordered:
        return graph
    key = graph.hash, ordered
    if key not in _cache:
        family, _, parameter = ordered[-1].partition(":")
        out = rewritten(graph, ordered[:-1])
        out = FAMILIES[family][1](out, parameter) if parameter else REWRITES[family](out)
        _cache[key] = out.with_ops(out.ops, meta={**out.meta, _META: [graph.hash, list(ordered)]})
        if len(_cache) > _KEPT:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Rewrites as they are applied, each once.

    Raises:
        LayoutOptError: there is no such rewrite.
    """
    order = {name: float(i) for i, name in enumerate(REWRITES)}
    ranks: dict[str, tuple[float, str]] = {}
    for name in names:
        family, colon, parameter = name.partition(":")
        if name in order:
            ranks[name] = order[name], ""
        elif colon and parameter and family in FAMILIES:
            ranks[name] = order.get(FAMILIES[family][0], len(order)) - 0.5, name
        else:
            known = ", ".join([*REWRITES, *(f"{family}:…" for family in FAMILIES)])
            raise LayoutOptError(f"unknown rewrite {name!r}: this layoutopt has {known}; plan the graph anew")
    return tuple(sorted(ranks, key=ranks.__getitem__))


def before_family(names: Sequence[str], family: str) -> tuple[str, ...]:
    """Of some rewrites, those that are applied before one of a family would be."""
    order = [*REWRITES, ""]
    place = order.index(FAMILIES[family][0])
    firsts = {name: FAMILIES[name.partition(":")[0]][0] if ":" in name else name for name in names}
    return tuple(name for name in in_order(names) if order.index(firsts[name]) < place)


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
    stored = names if storage is None else STORAGES[storage]
    own = next((name for name, rewrites in STORAGES.items() if rewrites and set(rewrites) <= set(stored)), "")
    return f"{origin}:{own}" if own else origin


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
    micro_batches: int = 1,
    optional: Sequence[str] | None = None,
) -> list[TrainingGraph]:
    """The graphs to plan, of which the best is kept; a rewrite that changes nothing is left out.

    Args:
        graph: as captured, or rewritten (then it is the only one).
        names: exactly these rewrites, besides those of ``storage`` and of micro-batches; None lets planning choose.
        storage: one of :data:`STORAGES`.
        smaller: with :data:`SMALLER`; none where these change nothing, or where the rewrites are given.
        gradients: keep every gradient to be read after the step.
        micro_batches: that the samples are cut into.
        optional: exactly these of :data:`OPTIONAL`; None tries with and without.

    Raises:
        LayoutOptError: there is no such storage or rewrite.
        GraphError: the step cannot be cut into so many micro-batches.
    """
    check_storage(storage)
    stored = STORAGES[storage]
    if origin_of(graph)[1]:
        return [] if smaller else [graph]
    base = [f"micro:{micro_batches}"] if micro_batches != 1 else []
    as_cut = rewritten(graph, base)
    if names is not None:
        return [] if smaller else [rewritten(graph, [*base, *names, *stored])]
    chosen = _saving(graph, base) if smaller else [base]
    if optional is not None:
        chosen = [[*names, *optional] for names in chosen]
    for name in OPTIONAL if optional is None else ():
        if rewritten(graph, [*base, name]).ops != as_cut.ops:
            chosen += [[*names, name] for names in chosen]
    # In float16, gradients are scaled, and looked at, between the contraction and the update.
    always = [name for name in ALWAYS if name != "apply" or not (gradients or stored)]
    return [rewritten(graph, _effective(graph, [*always, *names, *stored])) for names in chosen]


def _saving(graph: TrainingGraph, base: list[str]) -> list[list[str]]:
    """Rewrites that save memory and change something, ``base`` before each of them."""
    cuts: list[list[str]] = []
    for names in ([*base, pieces_name(count)] for count in PIECES):
        # With too few rows, or no such loss, it is the same graph again.
        if all(rewritten(graph, names).ops != rewritten(graph, known).ops for known in (base, *cuts)):
            cuts.append(names)
    whole = [*base, *SMALLER]
    if _effective(graph, whole) == list(in_order(whole)):
        return [whole, *([*SMALLER, *names] for names in cuts)]
    return cuts


def check_storage(storage: str) -> None:
    """Whether numbers may lie in memory so.

    Raises:
        LayoutOptError: there is no such storage; the message lists them.
    """
    if storage not in STORAGES:
        raise LayoutOptError(f"unknown storage {storage!r}: choose one of {', '.join(STORAGES)}")


def _effective(graph: TrainingGraph, names: Iterable[str]) -> list[str]:
    """Of some rewrites, those that change something after those before them."""
    out: list[str] = []
    for name in in_order(names):
        if rewritten(graph, [*out, name]).ops != rewritten(graph, out).ops:
            out.append(name)
    return out
