"""From a graph, kernels and prices to the integer tables of a :class:`~layoutopt.problem.Problem`.

Part of the face: it imports ``kernels`` and (for types) ``costmodel``, lazily. For every distinct operation and tuple
of operand layouts, the kernels that accept them are priced and the cheapest kept, which loses nothing. Repeated blocks
share their prices. Neighbours that are equal and may run at once will share their launches: each is priced at its part
of them, by what a launch takes that does the work of all (``costmodel/shared.py``). Which
kernels, and which tuples: see ``layoutopt/asked.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layoutopt.asked import LIMIT, LIMITS, Asked, Moves, Slots
from layoutopt.blocks import spec_ids
from layoutopt.candidates import fixed_storages, leading, seen_through
from layoutopt.collector import collector_paused
from layoutopt.errors import GraphError, InfeasibleError
from layoutopt.graph import Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.pricer import Book, Pricer, price_ns
from layoutopt.pricing_apart import share_out
from layoutopt.problem import OpNode, Problem, StorageNode
from layoutopt.rewrite_neighbours import alike_counts

if TYPE_CHECKING:
    from costmodel.cost import Costs
    from kernels.spec import OpSpec

__all__ = ["Pricer", "Progress", "Tables", "build_problem", "price_ns"]

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of the whole planning that is behind it."""


@dataclass(frozen=True)
class Tables:
    """A problem and what turns its answers into plans.

    Attributes:
        graph: what the problem is about.
        problem: storages in the order of ``names``, ops in the graph's order.
        names: storage names.
        index: the position of each.
        pricer: knows the kernel behind every relayout.
        books: know the kernel behind every choice of an op, by position.
    """

    graph: TrainingGraph
    problem: Problem
    names: tuple[str, ...]
    index: Mapping[str, int]
    pricer: Pricer = field(repr=False)
    books: tuple[Book, ...] = field(repr=False)

    @property
    def kernels(self) -> int:
        """How many kernels were priced."""
        return self.pricer.kernels


@collector_paused()
def build_problem(
    graph: TrainingGraph,
    costs: Costs,
    candidates: Mapping[str, tuple[Layout, ...]],
    progress: Progress | None = None,
    limit: int | None = None,
    pricer: Pricer | None = None,
) -> Tables:
    """Price a graph's layout assignment problem.

    Args:
        graph: views folded.
        costs: of a device.
        candidates: layouts per storage, row-major first.
        progress: told after each op.
        limit: layout tuples priced per op at most (see the module's text); 216 for contractions, 96 for others when
            left out.
        pricer: with what it remembers of other graphs, for the same costs.

    Raises:
        GraphError: an op reads a value that was already overwritten in place, or its kind has no kernels.
        InfeasibleError: no kernel serves an op in any of its layouts; ``conflict`` names it.
    """
    pricer = pricer or Pricer(costs)
    used = {graph.storage_of[o.tensor] for op in graph.ops for o in op.operands}
    used |= {graph.storage_of[out] for out in graph.outputs}
    names = tuple(name for name in graph.storages if name in used)
    index = {name: i for i, name in enumerate(names)}
    fixed = fixed_storages(graph)
    storages = tuple(_storage_node(graph, name, candidates[name], name in fixed) for name in names)
    pinned = _pinned(graph)
    everything = list(_asked(graph, index, storages, limit, costs.limits.idle_units))
    moves = [Moves.of(graph.storages[node.name], node) for node in storages]
    share_out(pricer, everything, moves, progress)
    nodes, books = [], []
    for done, (op, asked) in enumerate(zip(graph.ops, everything, strict=True)):
        choices, book = asked.answer(pricer)
        if not choices:
            raise _unserved(graph, op, asked.spec)
        operands = tuple(index[graph.storage_of[o.tensor]] for o in op.operands)
        nodes.append(OpNode(op.name, operands, len(op.inputs), choices, pinned[op.name]))
        books.append(book)
        if progress:
            progress("pricing kernels", 0.7 * (done + 1) / len(graph.ops))
    relayouts: dict[tuple[int, int, int], int] = {}
    for s, own in enumerate(moves):
        relayouts |= {(s, a, b): ns for (a, b), ns in own.answer(pricer).items()}
        if progress:
            progress("pricing relayouts", 0.7 + 0.2 * (s + 1) / len(storages))
    return Tables(graph, Problem(storages, tuple(nodes), relayouts), names, index, pricer, tuple(books))


def _asked(
    graph: TrainingGraph, index: Mapping[str, int], storages: Sequence[StorageNode], limit: int | None, units: int
) -> Iterator[Asked]:
    """What is to be priced, op by op; ``units`` as of ``rewrite_neighbours.sharing``."""
    from kernels.spec import op_spec

    ids: dict[tuple[Layout, ...], int] = {}
    options = [(ids.setdefault(node.candidates, len(ids)), node.primary) for node in storages]
    known: dict[Hashable, Asked] = {}
    for op, alike, count in zip(graph.ops, map(int, spec_ids(graph)), alike_counts(graph, units), strict=True):
        operands = tuple(index[graph.storage_of[o.tensor]] for o in op.operands)
        tied = tuple(operands.index(s) for s in operands)
        key = alike, count, tied, tuple(options[s] for s in operands)
        if key not in known:
            slots = Slots.of(graph, op, operands, storages)
            lead = tuple(i for i, group in enumerate(slots.members) if set(group) & set(leading(op)))
            known[key] = Asked(op_spec(graph, op), count, slots, lead, limit or LIMITS.get(op.kind, LIMIT))
        yield known[key]


def _storage_node(graph: TrainingGraph, name: str, layouts: tuple[Layout, ...], fixed: bool) -> StorageNode:
    storage = graph.storages[name]
    if layouts[0] != Layout.row_major(storage.shape):
        raise GraphError(f"the first candidate of {name} is {layouts[0].describe()}: it must be row-major")
    sizes = tuple(layout.size_elems * graph.tensors[name].item_bytes for layout in layouts)
    persistent = storage.role in ("parameter", "state", "constant")
    return StorageNode(name, layouts, sizes, persistent, 0 if fixed else -1)


def _pinned(graph: TrainingGraph) -> dict[str, tuple[int, ...]]:
    """Per op, the inputs that read what an earlier op wrote in place: only the primary holds that."""
    current = {s.name: s.tensors[0] for s in graph.storages.values()}
    out = {}
    for op in graph.ops:
        for operand in op.inputs:
            storage = graph.storage_of[operand.tensor]
            if current[storage] != operand.tensor:
                raise GraphError(
                    f"op {op.name} reads {operand.tensor!r} after {current[storage]!r} has overwritten it in place: "
                    "capture the graph anew"
                )
        out[op.name] = tuple(
            k for k, o in enumerate(op.inputs) if o.tensor != graph.storages[graph.storage_of[o.tensor]].tensors[0]
        )
        for operand in op.outputs:
            current[graph.storage_of[operand.tensor]] = operand.tensor
    return out


def _unserved(graph: TrainingGraph, op: Op, spec: OpSpec) -> InfeasibleError:
    shapes = " ".join(str(list(shape)) for shape in spec.shapes)
    seen = [seen_through(o.view, Layout.row_major(graph.tensors[o.tensor].shape)) for o in op.operands]
    torn = [o for o, layout in zip(op.operands, seen, strict=True) if layout is None]
    reason = (
        f"no layout of {torn[0].tensor!r} can be seen as {torn[0].view.describe()}: run the passes on the graph"
        if torn
        else "no kernel accepts any combination of its layouts"
    )
    names = tuple(dict.fromkeys(graph.storage_of[o.tensor] for o in op.operands))
    return InfeasibleError(f"op {op.name} ({op.kind} {shapes}, from {op.source or '?'}): {reason}", (op.name, *names))
