"""Canonical shapes: the stored shape of every computed tensor, and the domain of every pointwise op.

A layout is chosen over a tensor's stored shape, so that shape should be the one in which most of its readers see it.
A transformer's activations arrive as [batch, seq, features], [batch*seq, features] and [1, batch*seq, features] by
turns; here they all become [tokens, features], and the pointwise ops between them run over that same shape. Then one
layout serves all of them, even when ``seq`` is no multiple of a tile.

Two tensors are *kin* when a pointwise op sees both in the same element order: kin get one stored shape. Kin vote, by
the axes in which ops other than pointwise see them: products with a weight first, then tensors whose shape is the
user's (parameters, inputs), then batched products, then ops over rows, then the rest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from math import prod

from layoutopt.graph import KINDS, Op, Operand, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.pass_views import Notes, compose, normal, rebase, seen
from layoutopt.view import Step, View

__all__ = ["canonical_domains", "canonical_order", "canonical_shapes", "sees_stored_axes"]

Cuts = tuple[int, ...]
"""Strides at which a shape is cut: ``(60, 1)`` for [39, 60]; the element count is not listed."""

Axes = tuple[tuple[tuple[int, int], ...], ...]
"""The digits (extent, stride) of each axis of a view."""

_ROWS = KINDS - {"view", "contraction", "pointwise", "concat", "iota"}
_RANKS = 5


def canonical_shapes(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Store every computed tensor in the shape its kin voted for (see the module docstring)."""
    shapes = _voted_shapes(graph)
    moved, tensors = {}, dict(graph.tensors)
    for name, shape in shapes.items():
        old = graph.tensors[name]
        if shape != old.shape:
            moved[name] = (name, View((Step("reshape", old.shape),)))
            tensors[name] = replace(old, shape=shape)
    return graph.with_ops(rebase(graph.ops, moved, shapes), tensors=tensors) if moved else graph


def canonical_order(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Store what a product with a weight reads or writes in the order of its rows.

    Attention leaves its results by heads, [batch, heads, seq, size]; the next layer multiplies [batch*seq, heads*size].
    Stored so, they have the shape of every other activation, and it is the batched product that goes by heads.
    """
    kin = _kin(graph)
    votes: dict[str, dict[Axes, int]] = defaultdict(lambda: defaultdict(int))
    for op in graph.ops:
        for operand in op.operands if op.kind == "contraction" else ():
            axes = _axes_of(operand.view, graph.tensors[operand.tensor].shape)
            if axes is not None and graph.operand_shape(operand)[0] == 1:
                votes[kin[operand.tensor]][axes] += 1
    movable = _movable(graph)
    stuck = {kin[name] for name in graph.tensors if name not in movable}
    moved, tensors, shapes = {}, dict(graph.tensors), {}
    for name in sorted(movable):
        root = kin[name]
        if root not in votes or root in stuck:
            continue
        axes = max(votes[root], key=lambda a: (votes[root][a], a))
        if all(len(axis) <= 1 for axis in axes):
            continue
        old = graph.tensors[name]
        view = _shown(axes, old.shape)
        shapes[name] = view.shape(old.shape)
        tensors[name] = replace(old, shape=shapes[name])
        moved[name] = (name, view.inverse(old.shape))
    return graph.with_ops(rebase(graph.ops, moved, shapes), tensors=tensors) if moved else graph


@lru_cache(maxsize=1 << 16)
def _axes_of(view: View, shape: tuple[int, ...]) -> Axes | None:
    """The (extent, stride) digits of a view's axes longer than 1, the axis of the outermost digit first."""
    layout = seen(view, shape)
    if layout is None or cuts_of(view, shape) is None or any(not m.stride for m in layout.modes):
        return None
    axes = [tuple((m.extent, m.stride) for m in layout.axis_modes(axis)) for axis in range(layout.rank)]
    return tuple(sorted((a for a in axes if a), key=lambda a: -max(stride for _, stride in a)))


def _shown(axes: Axes, shape: tuple[int, ...]) -> View:
    """The view with those digits, of a tensor of ``shape``."""
    digits = [d for axis in axes for d in axis]
    stored = sorted(digits, key=lambda d: -d[1])
    steps = [
        Step("reshape", tuple(extent for extent, _ in stored)),
        Step("permute", tuple(stored.index(d) for d in digits)),
        Step("reshape", tuple(prod(extent for extent, _ in axis) for axis in axes)),
    ]
    return View().then(*steps).simplified(shape)


def _movable(graph: TrainingGraph) -> set[str]:
    """Tensors whose stored shape is ours to choose."""
    fixed = {o.tensor for op in graph.ops for out, i in op.inplace for o in (op.outputs[out], op.inputs[i])}
    fixed |= set(graph.outputs)
    return {t.name for t in graph.by_role("activation", "gradient")} - fixed


def _voted_shapes(graph: TrainingGraph) -> dict[str, tuple[int, ...]]:
    kin = _kin(graph)
    votes: dict[str, dict[Cuts, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0] * _RANKS))
    inner: dict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        if op.kind == "pointwise":
            for name, cuts in _needed_cuts(graph, op):
                inner[kin[name]] |= set(cuts)
            continue
        for operand in op.operands:
            shape = graph.tensors[operand.tensor].shape
            named = cuts_of(operand.view, shape)
            if named is not None:
                votes[kin[operand.tensor]][named][_rank(graph, op, operand)] += 1
    movable = _movable(graph)
    for name in graph.tensors.keys() - movable:
        votes[kin[name]][_own_cuts(graph.tensors[name].shape)][1] += 1
    out = {}
    for name in movable:
        root = kin[name]
        choice: Cuts = tuple(sorted(inner[root], reverse=True))
        if root in votes:
            choice = max(votes[root], key=lambda c: (votes[root][c], len(c), c))
        stored = _shape_of(choice, graph.tensors[name].size_elems)
        if stored is not None:
            out[name] = stored
    return out


def _rank(graph: TrainingGraph, op: Op, operand: Operand) -> int:
    """Place in the order of precedence: 0 is heard first."""
    if op.kind == "contraction":
        return 0 if graph.operand_shape(operand)[0] == 1 else 2
    return 3 if op.kind in _ROWS else 4


def _kin(graph: TrainingGraph) -> dict[str, str]:
    """A representative by tensor."""
    parent = {name: name for name in graph.tensors}

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for op in graph.ops:
        if op.kind == "pointwise":
            same = [find(o.tensor) for o in op.operands if _in_order(o.view, graph.tensors[o.tensor].shape)]
            for name in same[1:]:
                parent[find(name)] = find(same[0])
    return {name: find(name) for name in graph.tensors}


@lru_cache(maxsize=1 << 16)
def _in_order(view: View, shape: tuple[int, ...]) -> bool:
    """Whether a view only regroups axes."""
    layout = seen(view, shape)
    return layout is not None and layout == Layout.row_major(layout.shape) and layout.size == (prod(shape),)


@lru_cache(maxsize=1 << 16)
def cuts_of(view: View, shape: tuple[int, ...]) -> Cuts | None:
    """The cuts of the stored shape under which a view neither splits nor merges an axis; None where it names no shape.

    A view that slices or repeats elements shows only a part and names none.
    """
    layout = seen(view, shape)
    if layout is None or layout.base != (0,):
        return None
    digits = sorted((m for m in layout.modes if m.stride), key=lambda m: -m.stride)
    reach = prod(shape)
    for mode in digits:
        if mode.stride * mode.extent != reach:
            return None
        reach = mode.stride
    return tuple(m.stride for m in digits) if reach == 1 else None


def sees_stored_axes(view: View, shape: tuple[int, ...]) -> bool:
    """Whether every axis of a view is one axis of the stored shape, or part of one, or repeats elements."""
    layout, stored = seen(view, shape), seen(View(), shape)
    if layout is None or stored is None:
        return False
    extents = {m.stride: m.extent for m in stored.modes}
    single = all(len(layout.axis_modes(axis)) <= 1 for axis in range(layout.rank))
    return single and all(m.stride == 0 or m.extent <= extents.get(m.stride, 0) for m in layout.modes)


def _own_cuts(shape: tuple[int, ...]) -> Cuts:
    return cuts_of(View(), shape) or ()


def _needed_cuts(graph: TrainingGraph, op: Op) -> list[tuple[str, Cuts]]:
    """Of a pointwise op's in-order operands: the cuts left when its domain's axes are merged as far as all allow."""
    domain = graph.operand_shape(op.operands[0])
    layouts = [seen(o.view, graph.tensors[o.tensor].shape) for o in op.operands]
    cuts, stride = [1], 1
    for axis in range(len(domain) - 1, 0, -1):
        stride *= domain[axis]
        if not all(x is not None and _merges(x, axis) for x in layouts):
            cuts.append(stride)
    total = prod(domain)
    kept = tuple(sorted({c for c in cuts if c < total}, reverse=True))
    return [(o.tensor, kept) for o in op.operands if _in_order(o.view, graph.tensors[o.tensor].shape)]


def _merges(layout: Layout, axis: int) -> bool:
    """Whether an axis continues the one before it in storage."""
    if layout.shape[axis] == 1 or layout.shape[axis - 1] == 1:
        return True
    outer, inner = layout.axis_modes(axis - 1), layout.axis_modes(axis)
    return len(outer) == len(inner) == 1 and outer[0].stride == inner[0].stride * inner[0].extent


def _shape_of(cuts: Cuts, elems: int) -> tuple[int, ...] | None:
    """The shape with the given cuts, or None where they do not divide one another."""
    reach, shape = elems, []
    for cut in cuts:
        if reach % cut:
            return None
        shape.append(reach // cut)
        reach = cut
    return tuple(shape) if reach == 1 else None


# ---- domains ------------------------------------------------------------------------------------------------------


def canonical_domains(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Run every pointwise op over the shape in which most bytes of its operands are stored as they are seen."""
    ops = [_best_domain(graph, op) if op.kind == "pointwise" else _normalised(graph, op) for op in graph.ops]
    return graph if ops == list(graph.ops) else graph.with_ops(ops)


def _normalised(graph: TrainingGraph, op: Op) -> Op:
    def put(o: Operand) -> Operand:
        return Operand(o.tensor, normal(o.view, graph.tensors[o.tensor].shape))

    return replace(op, inputs=tuple(map(put, op.inputs)), outputs=tuple(map(put, op.outputs)))


def _best_domain(graph: TrainingGraph, op: Op) -> Op:
    shapes = [graph.tensors[o.tensor].shape for o in op.operands]
    weights = [graph.tensors[o.tensor].size_elems * graph.tensors[o.tensor].item_bytes for o in op.operands]
    best, best_score = [normal(o.view, s) for o, s in zip(op.operands, shapes, strict=True)], -1
    tried = set()
    for change in [View(), *_changes(op, shapes)]:
        views = [compose(s, o.view, change) for o, s in zip(op.operands, shapes, strict=True)]
        if any(v is None for v in views) or tuple(views) in tried:
            continue
        tried.add(tuple(views))
        score = sum(w for v, w in zip(views, weights, strict=True) if not v)
        if score > best_score:
            best, best_score = views, score  # type: ignore[assignment]
    operands = [Operand(o.tensor, v) for o, v in zip(op.operands, best, strict=True)]
    n = len(op.inputs)
    return replace(op, inputs=tuple(operands[:n]), outputs=tuple(operands[n:]))


def _changes(op: Op, shapes: list[tuple[int, ...]]) -> list[View]:
    """Changes of domain, each of which lets one operand be seen as it is stored."""
    views = dict.fromkeys(
        (o.view, s) for o, s in zip(op.operands, shapes, strict=True) if o.view and o.view.is_bijective
    )
    return [view.inverse(shape) for view, shape in views]
