"""Candidate layouts: the few layouts that each storage of a graph may be materialised in.

A storage's candidates come from the operations that touch it. Every contraction proposes, in the shape it sees, the
layouts that its kernels like: column and row panels, R-Tiles, the transposed order; attention does the same for its
queries, keys, values and their gradients; every convolution proposes images
with channels last or in blocks, and weights with input or output channels last. A proposal is pulled back through the
operand's view to the storage's own shape, and dropped where the view would tear a tile. Point-by-point operations
(pointwise, softmax, normalisation and their gradients) pass proposals on between their full-size operands, so that a
chain can keep one layout and the optimizer's state can follow its parameter; so does a contraction's epilogue between
its extra operands and its outputs. What is proposed most often is kept, up to
a cap; row-major is always first. Integers, small tensors and vectors stay row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from layoutopt.graph import PRODUCTS, Op, Operand, Storage, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.view import View

__all__ = [
    "CONVOLUTIONS",
    "Rules",
    "candidates",
    "filter_proposals",
    "fixed_storages",
    "image_proposals",
    "leading",
    "proposals",
    "rules_for",
]

_POINT_BY_POINT = frozenset(
    ("pointwise", "softmax", "softmax_grad", "log_softmax", "log_softmax_grad", "layer_norm", "layer_norm_grad")
)
CONVOLUTIONS = frozenset(("conv", "conv_grad_input", "conv_grad_weight"))
"""Kinds that sum over channels and taps, or over pixels."""
_PASSED_ON = 0.5
"""What a proposal is worth after one operation has passed it on, as a share of its worth before."""
_ROUNDS = 2


@dataclass(frozen=True)
class Rules:
    """Which layouts are worth proposing on a kind of device.

    Attributes:
        panels: widths of column and row panels: ``[c/w][r][w]`` and ``[r/w][c][w]``.
        tiles: R-Tiles as (rows, columns), best first.
        transposed: propose the last two axes swapped.
        cap: candidates of a storage at most, row-major included.
        max_growth: allocated over logical elements, beyond which padding is too much.
        small_elems: storages below this are row-major only; below sixteen times this any padding is allowed.
    """

    panels: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    transposed: bool = True
    cap: int = 6
    max_growth: float = 1.5
    small_elems: int = 256


Propose = Callable[[tuple[int, ...], Rules], tuple[Layout, ...]]


def rules_for(kind: str, simd_width: int) -> Rules:
    """Rules for a "cpu" (panels of a vector) or a "gpu" (short vectors, many items)."""
    if kind == "gpu":
        return Rules((4,), ((4, 4), (8, 4), (32, 4)))
    w = max(simd_width, 4)
    return Rules((w,), ((w, w), (4, w), (w, 4), (8, 8), (4, 4)))


def proposals(shape: tuple[int, ...], rules: Rules) -> tuple[Layout, ...]:
    """Layouts of a matrix or a batch of matrices (the last two axes), best first, without row-major."""
    if len(shape) < 2 or min(shape[-2:]) == 1:
        return ()
    r, c = len(shape) - 2, len(shape) - 1
    batch = tuple(range(r))
    out = []
    for w in rules.panels:
        out += [Layout.tiled(shape, {c: w}, (*batch, c, r)), Layout.tiled(shape, {r: w}, (*batch, r, c))]
    if rules.transposed:
        out.append(Layout.row_major(shape, (*batch, c, r)))
    out += [Layout.r_tile(shape, tr, tc) for tr, tc in rules.tiles]
    return tuple(x for x in dict.fromkeys(out) if x != Layout.row_major(shape))


def image_proposals(shape: tuple[int, ...], rules: Rules) -> tuple[Layout, ...]:
    """Layouts of images [n, c, h, w], without row-major, best first: channels last, or in blocks of a vector or 4."""
    out = [Layout.row_major(shape, (0, 2, 3, 1))]
    for w in dict.fromkeys((*rules.panels, 4)):
        out.append(Layout.of(shape, [(0, None), (1, None), (2, None), (3, None), (1, w)]))
    return tuple(x for x in dict.fromkeys(out) if x != Layout.row_major(shape))


def filter_proposals(shape: tuple[int, ...], rules: Rules) -> tuple[Layout, ...]:
    """Layouts of weights [o, c, kh, kw], without row-major, best first: output or input channels last, panels."""
    out = [Layout.row_major(shape, (2, 3, 1, 0)), Layout.row_major(shape, (0, 2, 3, 1))]
    for w in rules.panels:
        out.append(Layout.of(shape, [(0, None), (2, None), (3, None), (1, None), (0, w)]))
    return tuple(x for x in dict.fromkeys(out) if x != Layout.row_major(shape))


def fixed_storages(graph: TrainingGraph) -> frozenset[str]:
    """Storages that the host reads or writes: inputs, constants and graph outputs. Their primary is row-major."""
    names = {s.name for s in graph.storages.values() if s.role in ("input", "constant")}
    return frozenset(names | {graph.storage_of[out] for out in graph.outputs})


def leading(op: Op) -> tuple[int, ...]:
    """Operand positions whose layouts an op's kernels are chosen for.

    Of a contraction with an epilogue these are what it multiplies and its first output: its extra operands and further
    outputs are read and written where that one is, best in the same layout.
    """
    if op.kind == "quantized_contraction":  # its weights lie in rows
        return (0, len(op.inputs))
    return (0, 1, len(op.inputs)) if op.kind == "contraction" else tuple(range(len(op.operands)))


@lru_cache(maxsize=1 << 17)
def seen_through(view: View, layout: Layout) -> Layout | None:
    """``view.layout(layout)``, remembered: repeated blocks ask the same again and again."""
    return view.layout(layout)


def candidates(graph: TrainingGraph, rules: Rules) -> dict[str, tuple[Layout, ...]]:
    """Candidate layouts of every storage, over the storage's shape, row-major first."""
    storages = graph.storages
    votes: dict[str, dict[Layout, float]] = {name: {} for name in storages}
    flexible = {name for name, s in storages.items() if _is_flexible(s, rules)}
    for op in graph.ops:
        for position in _proposing(op):
            operand = op.operands[position]
            name = graph.storage_of[operand.tensor]
            if name in flexible:
                for layout, worth in _pulled_back(graph, operand, storages[name], rules, _proposes(op, position)):
                    votes[name][layout] = votes[name].get(layout, 0.0) + worth
    for _ in range(_ROUNDS):
        _pass_on(graph, votes, flexible, rules)
    out = {}
    for name, storage in storages.items():
        ranked = sorted(votes[name].items(), key=lambda item: -item[1])
        first = Layout.row_major(storage.shape)
        out[name] = (first, *(layout for layout, _ in ranked if layout != first))[: rules.cap]
    return out


def _is_flexible(storage: Storage, rules: Rules) -> bool:
    return (
        storage.dtype in ("float32", "float16") and len(storage.shape) > 1 and prod(storage.shape) >= rules.small_elems
    )


def _proposing(op: Op) -> Iterable[int]:
    """Positions of the operands for which an op proposes layouts."""
    if op.kind == "attention":
        return (0, 1, 2, len(op.inputs))
    if op.kind == "attention_grad":
        return (0, 1, 2, 3, 6, *range(len(op.inputs), len(op.operands)))
    return leading(op) if op.kind in PRODUCTS or op.kind in CONVOLUTIONS else ()


def _proposes(op: Op, position: int) -> Propose:
    """What proposes layouts for an operand: the op's kind, and whether it is a convolution's weights."""
    if op.kind not in CONVOLUTIONS:
        return proposals
    return filter_proposals if position == (2 if op.kind == "conv_grad_weight" else 1) else image_proposals


def _pulled_back(
    graph: TrainingGraph, operand: Operand, storage: Storage, rules: Rules, propose: Propose
) -> Iterable[tuple[Layout, float]]:
    """What an op proposes for a storage, with its worth: the earlier in the rules, the more."""
    if not operand.view.is_bijective:
        return _ranked(View(), storage.shape, storage.shape, rules, proposals)
    return _ranked(operand.view, graph.operand_shape(operand), storage.shape, rules, propose)


@lru_cache(maxsize=1 << 14)
def _ranked(
    view: View, shape: tuple[int, ...], stored: tuple[int, ...], rules: Rules, propose: Propose
) -> tuple[tuple[Layout, float], ...]:
    """Proposals for a shape that a bijective view shows, pulled back to the storage, with their worth."""
    ranked, back = propose(shape, rules), view.inverse(stored)
    own = [(seen_through(back, proposal), 1.0 - rank / (len(ranked) + 1)) for rank, proposal in enumerate(ranked)]
    return tuple((layout, worth) for layout, worth in own if layout is not None and _affordable(layout, rules))


def _affordable(layout: Layout, rules: Rules) -> bool:
    elems = prod(layout.shape)
    return elems < 16 * rules.small_elems or layout.size_elems <= rules.max_growth * elems


def _pass_on(graph: TrainingGraph, votes: dict[str, dict[Layout, float]], flexible: set[str], rules: Rules) -> None:
    """One hop: each point-by-point operation offers what its full operands have to the others."""
    before = {name: tuple(own.items()) for name, own in votes.items()}
    numbers: dict[tuple[tuple[Layout, float], ...], int] = {}
    number = {name: numbers.setdefault(own, len(numbers)) for name, own in before.items()}
    known: dict[Hashable, list[list[tuple[Layout, float]]]] = {}
    for op in graph.ops:
        full = _full_operands(graph, op, flexible)
        names = [graph.storage_of[o.tensor] for o in full]
        if len(set(names)) < 2:
            continue
        seen = [(o.view, graph.storages[name].shape) for o, name in zip(full, names, strict=True)]
        # Repeated blocks ask the same: operands with the same votes, seen through the same views.
        key = tuple(seen), tuple(number[name] for name in names), tuple(names.index(name) for name in names)
        if key not in known:
            known[key] = _offers(seen, names, [before[name] for name in names], rules)
        for name, offered in zip(names, known[key], strict=True):
            for layout, worth in offered:
                votes[name][layout] = votes[name].get(layout, 0.0) + _PASSED_ON * worth


def _offers(
    seen: Sequence[tuple[View, tuple[int, ...]]],
    names: Sequence[str],
    votes: Sequence[Iterable[tuple[Layout, float]]],
    rules: Rules,
) -> list[list[tuple[Layout, float]]]:
    """Per operand, the layouts that the others of an operation offer to its storage, with their worth.

    Args:
        seen: per operand, its view and its storage's shape.
        names: of the storages.
        votes: what each storage has.
        rules: of the device.
    """
    offers: dict[Layout, tuple[float, str]] = {}
    for (view, _), name, own in zip(seen, names, votes, strict=True):
        for stored, worth in own:
            layout = seen_through(view, stored)
            if layout is not None and worth > offers.get(layout, (0.0, ""))[0]:
                offers[layout] = worth, name
    out = []
    for (view, shape), name in zip(seen, names, strict=True):
        back = view.inverse(shape)
        pulled = [(seen_through(back, x), worth) for x, (worth, source) in offers.items() if source != name]
        out.append([(x, worth) for x, worth in pulled if x is not None and _affordable(x, rules)])
    return out


def _full_operands(graph: TrainingGraph, op: Op, flexible: set[str]) -> list[Operand]:
    """The operands of an op, or of its epilogue, that it goes through point by point."""
    if op.kind not in _POINT_BY_POINT and "epilogue" not in op.attrs:
        return []
    domain = graph.operand_shape(op.outputs[0])
    return [
        o
        for o in op.operands[PRODUCTS.get(op.kind, 0) :]
        if o.view.is_bijective and graph.operand_shape(o) == domain and graph.storage_of[o.tensor] in flexible
    ]
