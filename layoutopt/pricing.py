"""From a graph, kernels and prices to the integer tables of a :class:`~layoutopt.problem.Problem`.

Part of the face: it imports ``kernels`` and (for types) ``costmodel``, lazily. For every distinct operation and tuple
of operand layouts, the kernels that accept them are priced and the cheapest kept, which loses nothing. Repeated blocks
share their prices. Neighbours that are equal and may run at once will share their launches: each is priced at its part
of them, by what a launch takes that does the work of all (``costmodel/shared.py``).

**Which kernels.** All of them for row-major operands and for one operand in another layout (the *pivots*). Elsewhere,
where an op has many tuples, only variants that were the best of their orientation at some pivot; all again where none
of these accepts the layouts. Register tiles follow the shape far more than the layouts, and this divides the work by
about five.

**Which tuples.** Operands that must agree (in-place pairs, one storage read twice through one view) are one *slot*.
Where the product of the slots' candidates is within ``limit``, every tuple is priced. Beyond it, these are, in this
order, until the limit is reached:

1. all slots row-major;
2. *uniform* tuples: for each layout that some slot sees, every slot that can be seen in it is, the others row-major;
3. tuples that differ from row-major in one slot;
4. for a contraction, the product of each slot's best layouts, ranked by the prices of 3; for other operations, tuples
   that differ from a uniform one in one slot.

Of a contraction with an epilogue, that product is over what it multiplies and its first output. The others *follow* it:
each tuple comes with its extra operands and further outputs seen in the first output's layout wherever they can be, and
once more with them in row-major; the limit is twice as high. It is pivoted on the three alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from layoutopt.blocks import spec_ids
from layoutopt.candidates import fixed_storages, leading, seen_through
from layoutopt.collector import collector_paused
from layoutopt.errors import GraphError, InfeasibleError
from layoutopt.graph import Op, Storage, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.pricer import Book, Pricer, price_ns
from layoutopt.problem import Choice, OpNode, Problem, StorageNode
from layoutopt.rewrite_neighbours import alike_counts

if TYPE_CHECKING:
    from costmodel.cost import Costs
    from kernels.spec import OpSpec

__all__ = ["Pricer", "Progress", "Tables", "build_problem", "price_ns"]

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of the whole planning that is behind it."""

_LIMIT = 96
_LIMITS = {"contraction": 216}


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
    nodes, books = [], []
    for done, (op, asked) in enumerate(zip(graph.ops, _asked(graph, index, storages, limit), strict=True)):
        choices, book = asked.answer(pricer)
        if not choices:
            raise _unserved(graph, op, asked.spec)
        operands = tuple(index[graph.storage_of[o.tensor]] for o in op.operands)
        nodes.append(OpNode(op.name, operands, len(op.inputs), choices, pinned[op.name]))
        books.append(book)
        if progress:
            progress("pricing kernels", 0.7 * (done + 1) / len(graph.ops))
    relayouts: dict[tuple[int, int, int], int] = {}
    for s, node in enumerate(storages):
        own = _relayouts(pricer, graph.storages[node.name], node)
        relayouts |= {(s, a, b): ns for (a, b), ns in own.items()}
        if progress:
            progress("pricing relayouts", 0.7 + 0.2 * (s + 1) / len(storages))
    return Tables(graph, Problem(storages, tuple(nodes), relayouts), names, index, pricer, tuple(books))


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is to be priced of an op: one for all that are alike and whose storages have the same candidates.

    Attributes:
        spec: of its kernels.
        count: equal kernels that run at once.
        slots: its decisions.
        lead: slots that vary freely; the others follow (see the module's text).
        limit: layout tuples at most.
    """

    spec: OpSpec
    count: int
    slots: _Slots
    lead: tuple[int, ...]
    limit: int

    def answer(self, pricer: Pricer) -> tuple[tuple[Choice, ...], Book]:
        """The choices, and the book that they are from; remembered."""
        own = pricer.together(self.count)
        key = self.spec, self.slots.seen, self.slots.members, self.lead, self.limit
        if key not in own.choices:
            book = own.book(self.spec)
            own.choices[key] = _choices(book, self.slots, self.lead, self.limit), book
        return own.choices[key]


def _asked(
    graph: TrainingGraph, index: Mapping[str, int], storages: Sequence[StorageNode], limit: int | None
) -> Iterator[_Asked]:
    """What is to be priced, op by op."""
    from kernels.spec import op_spec

    ids: dict[tuple[Layout, ...], int] = {}
    options = [(ids.setdefault(node.candidates, len(ids)), node.primary) for node in storages]
    known: dict[Hashable, _Asked] = {}
    for op, alike, count in zip(graph.ops, map(int, spec_ids(graph)), alike_counts(graph), strict=True):
        operands = tuple(index[graph.storage_of[o.tensor]] for o in op.operands)
        tied = tuple(operands.index(s) for s in operands)
        key = alike, count, tied, tuple(options[s] for s in operands)
        if key not in known:
            slots = _Slots.of(graph, op, operands, storages)
            lead = tuple(i for i, group in enumerate(slots.members) if set(group) & set(leading(op)))
            known[key] = _Asked(op_spec(graph, op), count, slots, lead, limit or _LIMITS.get(op.kind, _LIMIT))
        yield known[key]


def _relayouts(pricer: Pricer, storage: Storage, node: StorageNode) -> dict[tuple[int, int], int]:
    """Nanoseconds by pair of candidates, from the primary alone where that is fixed; remembered."""
    key = storage.shape, storage.dtype, node.candidates, node.primary
    if key not in pricer.relayouts:
        out = pricer.relayouts[key] = {}
        for a, b in itertools.permutations(range(len(node.candidates)), 2):
            if node.primary not in (-1, a):
                continue
            found = pricer.relayout(storage.shape, storage.dtype, node.candidates[a], node.candidates[b])
            if found:
                out[a, b] = price_ns(found[1])
    return pricer.relayouts[key]


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


@dataclass(frozen=True)
class _Slots:
    """The free decisions of one op.

    Attributes:
        members: operand positions that move together, per slot.
        seen: per slot, its options: the candidate index and the layouts that its members see.
        width: number of operands.
    """

    members: tuple[tuple[int, ...], ...]
    seen: tuple[tuple[tuple[int, tuple[Layout, ...]], ...], ...]
    width: int

    @staticmethod
    def of(graph: TrainingGraph, op: Op, operands: Sequence[int], storages: Sequence[StorageNode]) -> _Slots:
        groups: dict[tuple[object, ...], list[int]] = {}
        updated = {len(op.inputs) + out: inp for out, inp in op.inplace}
        for k in range(len(op.operands)):
            # An updated input is its output's partner whatever the views; other operands are tied by storage and view.
            lead = updated.get(k, k)
            groups.setdefault((operands[lead], op.operands[lead].view), []).append(k)
        members = tuple(tuple(group) for group in groups.values())
        seen = []
        for group in members:
            node = storages[operands[group[0]]]
            writes = any(k >= len(op.inputs) for k in group)
            allowed = [node.primary] if writes and node.primary >= 0 else range(len(node.candidates))
            rows = ((c, [seen_through(op.operands[k].view, node.candidates[c]) for k in group]) for c in allowed)
            seen.append(tuple((c, tuple(x for x in row if x)) for c, row in rows if None not in row))
        return _Slots(members, tuple(seen), len(op.operands))

    def layouts(self, picks: Sequence[int]) -> tuple[Layout, ...]:
        """The layouts that operands see when slot i takes its option ``picks[i]``."""
        out: dict[int, Layout] = {}
        for group, options, pick in zip(self.members, self.seen, picks, strict=True):
            out.update(zip(group, options[pick][1], strict=True))
        return tuple(out[k] for k in range(self.width))

    def indices(self, picks: Sequence[int]) -> tuple[int, ...]:
        """The candidate index per operand."""
        out: dict[int, int] = {}
        for group, options, pick in zip(self.members, self.seen, picks, strict=True):
            out.update(dict.fromkeys(group, options[pick][0]))
        return tuple(out[k] for k in range(self.width))


def _choices(book: Book, slots: _Slots, lead: tuple[int, ...], limit: int) -> tuple[Choice, ...]:
    """The priced tuples; the slots in ``lead`` vary freely, the others follow (see the module's text)."""
    found = {}
    if all(slots.seen):
        for picks in _tuples(book, slots, lead, limit):
            best = book.best(slots.layouts(picks))
            if best:
                indices = slots.indices(picks)
                found[indices] = Choice(indices, price_ns(best[1]), best[0].variant.label)
    return tuple(found.values())


def _tuples(book: Book, slots: _Slots, lead: tuple[int, ...], limit: int) -> Iterator[tuple[int, ...]]:
    counts = [len(options) for options in slots.seen]
    plain = (0,) * len(counts)
    single = [_replaced(plain, slot, option) for slot, n in enumerate(counts) for option in range(1, n)]
    led = [picks for picks in single if any(picks[slot] for slot in lead)]
    if min(prod(counts), limit) > 2 * (1 + len(led)):
        book.narrow(slots.layouts(picks) for picks in [plain, *led])
    if prod(counts) <= limit:
        return itertools.product(*map(range, counts))
    uniform = list(_uniform(slots))
    further: Iterable[tuple[int, ...]]
    spec = book.spec
    if spec.kind == "contraction":
        product = list(_best_product(book, slots, lead, led, limit))
        further = itertools.chain((_followed(slots, spec.inputs, lead, picks) for picks in product), product)
        limit = limit if len(lead) == len(counts) else 2 * limit
    else:
        further = (
            _replaced(base, slot, option) for base in uniform for slot, n in enumerate(counts) for option in range(n)
        )
    ordered = itertools.chain([plain], uniform, single, further)
    return itertools.islice(dict.fromkeys(itertools.islice(ordered, 8 * limit)), limit)


def _followed(slots: _Slots, output: int, lead: tuple[int, ...], picks: tuple[int, ...]) -> tuple[int, ...]:
    """The slots that do not lead put in the layout in which an output is seen, where they have it."""
    layout = slots.layouts(picks)[output]
    return tuple(
        pick if slot in lead else next((i for i, (_, seen) in enumerate(options) if seen[0] == layout), 0)
        for slot, (pick, options) in enumerate(zip(picks, slots.seen, strict=True))
    )


def _replaced(picks: tuple[int, ...], slot: int, option: int) -> tuple[int, ...]:
    return (*picks[:slot], option, *picks[slot + 1 :])


def _uniform(slots: _Slots) -> Iterator[tuple[int, ...]]:
    every = dict.fromkeys(layouts[0] for options in slots.seen for _, layouts in options)
    for layout in every:
        yield tuple(
            next((i for i, (_, layouts) in enumerate(options) if layouts[0] == layout), 0) for options in slots.seen
        )


def _best_product(
    book: Book,
    slots: _Slots,
    lead: tuple[int, ...],
    single: list[tuple[int, ...]],
    limit: int,
) -> Iterator[tuple[int, ...]]:
    """The product of as many options per leading slot as the limit allows, ranked by its single deviations."""
    keep = max(int(round(limit ** (1 / len(lead)), 9)), 1)
    kept: list[list[int]] = [[0]] * len(slots.seen)
    for slot in lead:
        priced = []
        for picks in [(0,) * len(slots.seen), *(p for p in single if p[slot])]:
            best = book.best(slots.layouts(picks))
            if best:
                priced.append((price_ns(best[1]), picks[slot]))
        kept[slot] = [option for _, option in sorted(priced)[:keep]] or [0]
    return itertools.product(*kept)
