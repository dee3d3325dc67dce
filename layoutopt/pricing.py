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

import gc
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from layoutopt.candidates import fixed_storages, leading, seen_through
from layoutopt.errors import GraphError, InfeasibleError
from layoutopt.graph import Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.problem import Choice, OpNode, Problem, StorageNode
from layoutopt.rewrite_neighbours import alike_counts

if TYPE_CHECKING:
    from costmodel.cost import Cost, Costs
    from kernels.spec import Kernel, KernelVariant, OpSpec

__all__ = ["Pricer", "Progress", "Tables", "build_problem", "price_ns"]

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of the whole planning that is behind it."""

_LIMIT = 96
_LIMITS = {"contraction": 216}


def price_ns(cost: Cost) -> int:
    """A prediction as the tables hold it: whole nanoseconds, at least one, so that nothing is free."""
    return max(round(cost.total_ns), 1)


class Pricer:
    """The cheapest kernel for a spec over layouts, remembered.

    Args:
        costs: prices kernels on a device.
        count: equal kernels that run at once: prices are one's part.

    Attributes:
        choices: of ops, by what they are and which layouts their storages have: repeated blocks, and graphs that are
            mostly alike, share them.
    """

    def __init__(self, costs: Costs, count: int = 1) -> None:
        self.costs = costs
        self.count = count
        self.choices: dict[Hashable, tuple[Choice, ...]] = {}
        self._best: dict[OpSpec, dict[tuple[Layout, ...], tuple[Kernel, Cost] | None]] = {}
        self._variants: dict[OpSpec, list[KernelVariant]] = {}
        self._favoured: dict[OpSpec, list[KernelVariant]] = {}
        self._priced = 0
        self._together: dict[int, Pricer] = {}

    def together(self, count: int) -> Pricer:
        """The pricer of kernels of which so many equal ones run at once; remembered, too."""
        if count == self.count:
            return self
        if count not in self._together:
            self._together[count] = Pricer(self.costs, count)
        return self._together[count]

    @property
    def kernels(self) -> int:
        """How many kernels were priced, those that run together included."""
        return self._priced + sum(own.kernels for own in self._together.values())

    def best(self, spec: OpSpec, layouts: tuple[Layout, ...]) -> tuple[Kernel, Cost] | None:
        """The cheapest kernel and its cost (the first label among equals), or None where none accepts the layouts."""
        known = self._best.setdefault(spec, {})
        if layouts not in known:
            priced = self._price(spec, layouts, self._favoured.get(spec, ()))
            known[layouts] = _least(priced or self._price(spec, layouts, self._all(spec)))
        return known[layouts]

    def narrow(self, spec: OpSpec, pivots: Iterable[tuple[Layout, ...]]) -> None:
        """From now on try only variants that are the best of their name for one of these layout tuples."""
        if spec in self._favoured:
            return
        favoured: dict[KernelVariant, None] = {}
        for layouts in pivots:
            priced = self._price(spec, layouts, self._all(spec))
            self._best.setdefault(spec, {})[layouts] = _least(priced)
            for name in dict.fromkeys(kernel.variant.name for kernel, _ in priced):
                least = _least([p for p in priced if p[0].variant.name == name])
                if least:
                    favoured[least[0].variant] = None
        self._favoured[spec] = list(favoured)

    def _all(self, spec: OpSpec) -> list[KernelVariant]:
        from kernels.variants import family_of

        if spec not in self._variants:
            self._variants[spec] = family_of(spec.kind).variants(spec, self.costs.limits)
        return self._variants[spec]

    def _price(
        self, spec: OpSpec, layouts: tuple[Layout, ...], variants: Iterable[KernelVariant]
    ) -> list[tuple[Kernel, Cost]]:
        built = _built(spec, layouts, variants)
        kernels = [kernel for kernel in built if kernel is not None]
        self._priced += len(kernels)
        return [(kernel, self.costs.predict(kernel, self.count)) for kernel in kernels]

    def relayout(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
    ) -> tuple[Kernel, Cost] | None:
        """The cheapest conversion between two layouts of one shape."""
        from kernels.bind import relayout_spec

        return self.best(relayout_spec(shape, dtype), (source, target))


_KEPT: OrderedDict[tuple[OpSpec, tuple[Layout, ...]], dict[KernelVariant, Kernel | None]] = OrderedDict()
_MOST_KEPT = 40_000
"""Kernels are values that no cost model changes, and making one costs as much as pricing it: they are kept, with their
counts (``Kernel.memo``), for the next time a graph is priced. Of so many tuples of layouts, the latest used."""


def _built(spec: OpSpec, layouts: tuple[Layout, ...], variants: Iterable[KernelVariant]) -> list[Kernel | None]:
    from kernels.variants import family_of

    key = (spec, layouts)
    known = _KEPT.pop(key, None)
    _KEPT[key] = known = {} if known is None else known  # the latest used is last
    if len(_KEPT) > _MOST_KEPT:
        _KEPT.popitem(last=False)
    build = family_of(spec.kind).build
    out = []
    for variant in variants:
        if variant not in known:
            known[variant] = build(variant, spec, layouts)
        out.append(known[variant])
    return out


def _least(priced: list[tuple[Kernel, Cost]]) -> tuple[Kernel, Cost] | None:
    return min(priced, key=lambda p: (price_ns(p[1]), p[0].variant.label), default=None)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pricing makes millions of values that stay, and no cycles: collecting would walk them again and again."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # both together: what is alive now counts as old, without a look at it
            gc.enable()


@dataclass(frozen=True)
class Tables:
    """A problem and what turns its answers into plans.

    Attributes:
        graph: what the problem is about.
        problem: storages in the order of ``names``, ops in the graph's order.
        names: storage names.
        index: the position of each.
        pricer: knows the kernel behind every choice.
    """

    graph: TrainingGraph
    problem: Problem
    names: tuple[str, ...]
    index: Mapping[str, int]
    pricer: Pricer = field(repr=False)

    @property
    def kernels(self) -> int:
        """How many kernels were priced."""
        return self.pricer.kernels


@_collector_paused()
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
    from kernels.spec import op_spec

    pricer = pricer or Pricer(costs)
    used = {graph.storage_of[o.tensor] for op in graph.ops for o in op.operands}
    used |= {graph.storage_of[out] for out in graph.outputs}
    names = tuple(name for name in graph.storages if name in used)
    index = {name: i for i, name in enumerate(names)}
    fixed = fixed_storages(graph)
    storages = tuple(_storage_node(graph, name, candidates[name], name in fixed) for name in names)
    pinned = _pinned(graph)
    nodes = []
    together = alike_counts(graph)
    for done, op in enumerate(graph.ops):
        operands = tuple(index[graph.storage_of[o.tensor]] for o in op.operands)
        slots = _Slots.of(graph, op, operands, storages)
        spec = op_spec(graph, op)
        key = (spec, slots.seen, slots.members, limit)
        own = pricer.together(together[done])
        choices = own.choices.get(key)
        if choices is None:
            lead = tuple(i for i, group in enumerate(slots.members) if set(group) & set(leading(op)))
            choices = _choices(own, spec, slots, lead, limit or _LIMITS.get(op.kind, _LIMIT))
            own.choices[key] = choices
        if not choices:
            raise _unserved(graph, op, spec)
        nodes.append(OpNode(op.name, operands, len(op.inputs), choices, pinned[op.name]))
        if progress:
            progress("pricing kernels", 0.7 * (done + 1) / len(graph.ops))
    relayouts: dict[tuple[int, int, int], int] = {}
    for s, node in enumerate(storages):
        storage = graph.storages[node.name]
        for a, b in itertools.permutations(range(len(node.candidates)), 2):
            if node.primary not in (-1, a):
                continue
            found = pricer.relayout(storage.shape, storage.dtype, node.candidates[a], node.candidates[b])
            if found:
                relayouts[s, a, b] = price_ns(found[1])
        if progress:
            progress("pricing relayouts", 0.7 + 0.2 * (s + 1) / len(storages))
    return Tables(graph, Problem(storages, tuple(nodes), relayouts), names, index, pricer)


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


def _choices(pricer: Pricer, spec: OpSpec, slots: _Slots, lead: tuple[int, ...], limit: int) -> tuple[Choice, ...]:
    """The priced tuples; the slots in ``lead`` vary freely, the others follow (see the module's text)."""
    found = {}
    if all(slots.seen):
        for picks in _tuples(pricer, spec, slots, lead, limit):
            best = pricer.best(spec, slots.layouts(picks))
            if best:
                indices = slots.indices(picks)
                found[indices] = Choice(indices, price_ns(best[1]), best[0].variant.label)
    return tuple(found.values())


def _tuples(
    pricer: Pricer, spec: OpSpec, slots: _Slots, lead: tuple[int, ...], limit: int
) -> Iterator[tuple[int, ...]]:
    counts = [len(options) for options in slots.seen]
    plain = (0,) * len(counts)
    single = [_replaced(plain, slot, option) for slot, n in enumerate(counts) for option in range(1, n)]
    led = [picks for picks in single if any(picks[slot] for slot in lead)]
    if min(prod(counts), limit) > 2 * (1 + len(led)):
        pricer.narrow(spec, (slots.layouts(picks) for picks in [plain, *led]))
    if prod(counts) <= limit:
        return itertools.product(*map(range, counts))
    uniform = list(_uniform(slots))
    further: Iterable[tuple[int, ...]]
    if spec.kind == "contraction":
        product = list(_best_product(pricer, spec, slots, lead, led, limit))
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
    pricer: Pricer,
    spec: OpSpec,
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
            best = pricer.best(spec, slots.layouts(picks))
            if best:
                priced.append((price_ns(best[1]), picks[slot]))
        kept[slot] = [option for _, option in sorted(priced)[:keep]] or [0]
    return itertools.product(*kept)
