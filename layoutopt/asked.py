"""What is asked of a pricer: which kernels, over which tuples of layouts, an op is priced at.

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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from layoutopt.candidates import seen_through
from layoutopt.graph import PRODUCTS, Op, Storage, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.pricer import Book, Pricer
from layoutopt.problem import Choice, StorageNode

if TYPE_CHECKING:
    from kernels.spec import OpSpec

__all__ = ["LIMIT", "LIMITS", "Asked", "Moves", "Slots"]

LIMIT = 96
LIMITS = {"contraction": 216}
"""Layout tuples that are priced of an op at most, by kind."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What is to be priced of an op; one serves all ops that are alike and whose storages have the same candidates.

    Attributes:
        spec: of its kernels.
        count: equal kernels that run at once.
        slots: its decisions.
        lead: slots that vary freely; the others follow (see the module's text).
        limit: layout tuples at most.
    """

    spec: OpSpec
    count: int
    slots: Slots
    lead: tuple[int, ...]
    limit: int

    def answer(self, pricer: Pricer) -> tuple[tuple[Choice, ...], Book]:
        """The choices, and the book that they are from; remembered."""
        own = pricer.together(self.count)
        if self.key not in own.choices:
            book = own.book(self.spec)
            own.choices[self.key] = _choices(book, self.slots, self.lead, self.limit), book
        return own.choices[self.key]

    @property
    def key(self) -> Hashable:
        """What a pricer remembers the answer by."""
        return self.spec, self.slots.seen, self.slots.members, self.lead, self.limit


@dataclass(frozen=True)
class Moves:
    """What is to be priced of a storage: relayouts among candidates, from the primary alone where that is fixed."""

    shape: tuple[int, ...]
    dtype: str
    candidates: tuple[Layout, ...]
    primary: int

    @staticmethod
    def of(storage: Storage, node: StorageNode) -> Moves:
        """Of a storage with its candidates."""
        return Moves(storage.shape, storage.dtype, node.candidates, node.primary)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Positions of candidates: from, to."""
        every = itertools.permutations(range(len(self.candidates)), 2)
        return [(a, b) for a, b in every if self.primary in (-1, a)]

    def answer(self, pricer: Pricer) -> dict[tuple[int, int], int]:
        """Nanoseconds by pair, without those that no kernel converts; remembered."""
        if self not in pricer.relayouts:
            book = pricer.moves(self.shape, self.dtype)
            found = {(a, b): book.cheapest((self.candidates[a], self.candidates[b])) for a, b in self.pairs}
            pricer.relayouts[self] = {pair: best[1] for pair, best in found.items() if best}
        return pricer.relayouts[self]


@dataclass(frozen=True)
class Slots:
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
    def of(graph: TrainingGraph, op: Op, operands: Sequence[int], storages: Sequence[StorageNode]) -> Slots:
        """Of an op, from the storage of each operand and what is known of storages."""
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
        return Slots(members, tuple(seen), len(op.operands))

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


def _choices(book: Book, slots: Slots, lead: tuple[int, ...], limit: int) -> tuple[Choice, ...]:
    """The priced tuples; the slots in ``lead`` vary freely, the others follow (see the module's text)."""
    found = {}
    if all(slots.seen):
        for picks in _tuples(book, slots, lead, limit):
            best = book.cheapest(slots.layouts(picks))
            if best:
                indices, (label, cost_ns) = slots.indices(picks), best
                found[indices] = Choice(indices, cost_ns, label)
    return tuple(found.values())


def _tuples(book: Book, slots: Slots, lead: tuple[int, ...], limit: int) -> Iterator[tuple[int, ...]]:
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
    if spec.kind in PRODUCTS:
        product = list(_best_product(book, slots, lead, led, limit))
        further = itertools.chain((_followed(slots, spec.inputs, lead, picks) for picks in product), product)
        limit = limit if len(lead) == len(counts) else 2 * limit
    else:
        further = (
            _replaced(base, slot, option) for base in uniform for slot, n in enumerate(counts) for option in range(n)
        )
    ordered = itertools.chain([plain], uniform, single, further)
    return itertools.islice(dict.fromkeys(itertools.islice(ordered, 8 * limit)), limit)


def _followed(slots: Slots, output: int, lead: tuple[int, ...], picks: tuple[int, ...]) -> tuple[int, ...]:
    """The slots that do not lead put in the layout in which an output is seen, where they have it."""
    layout = slots.layouts(picks)[output]
    return tuple(
        pick if slot in lead else next((i for i, (_, seen) in enumerate(options) if seen[0] == layout), 0)
        for slot, (pick, options) in enumerate(zip(picks, slots.seen, strict=True))
    )


def _replaced(picks: tuple[int, ...], slot: int, option: int) -> tuple[int, ...]:
    return (*picks[:slot], option, *picks[slot + 1 :])


def _uniform(slots: Slots) -> Iterator[tuple[int, ...]]:
    every = dict.fromkeys(layouts[0] for options in slots.seen for _, layouts in options)
    for layout in every:
        yield tuple(
            next((i for i, (_, layouts) in enumerate(options) if layouts[0] == layout), 0) for options in slots.seen
        )


def _best_product(
    book: Book,
    slots: Slots,
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
            best = book.cheapest(slots.layouts(picks))
            if best:
                priced.append((best[1], picks[slot]))
        kept[slot] = [option for _, option in sorted(priced)[:keep]] or [0]
    return itertools.product(*kept)
