"""The cheapest kernels, remembered: by how many run at once, by what an op is, by the layouts of its operands.

Graphs that are mostly alike, such as the rewritten forms of one, are priced one after the other by one pricer. Part of
the face: it imports ``kernels`` and (for types) ``costmodel``, lazily.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.layout import Layout
from layoutopt.problem import Choice

if TYPE_CHECKING:
    from costmodel.cost import Cost, Costs
    from kernels.spec import Kernel, KernelVariant, OpSpec

__all__ = ["Book", "Noted", "Pricer", "price_ns"]


def price_ns(cost: Cost) -> int:
    """A prediction as the tables hold it: whole nanoseconds, at least one, so that nothing is free."""
    return max(round(cost.total_ns), 1)


class Pricer:
    """Prices kernels of a device and remembers the cheapest.

    Args:
        costs: prices kernels on a device.
        count: equal kernels that run at once: prices are one's part.

    Attributes:
        choices: of ops, with their books, by what they are and which layouts their storages have.
        relayouts: nanoseconds by pair of candidates, by the storage's shape, dtype and candidates.
    """

    def __init__(self, costs: Costs, count: int = 1) -> None:
        self.costs = costs
        self.count = count
        self.choices: dict[Hashable, tuple[tuple[Choice, ...], Book]] = {}
        self.relayouts: dict[Hashable, dict[tuple[int, int], int]] = {}
        self.priced = 0
        self._books: dict[OpSpec, Book] = {}
        self._variants: dict[OpSpec, list[KernelVariant]] = {}
        self._together: dict[int, Pricer] = {}

    def together(self, count: int) -> Pricer:
        """The pricer of kernels of which so many equal ones run at once; remembered, too."""
        if count == self.count:
            return self
        if count not in self._together:
            self._together[count] = Pricer(self.costs, count)
        return self._together[count]

    def branch(self) -> Pricer:
        """Another one that remembers all that this one does, and leaves this one as it is."""
        out = Pricer(self.costs, self.count)
        out._books = {spec: book.copied(out) for spec, book in self._books.items()}
        out.choices = {key: (choices, out._books[book.spec]) for key, (choices, book) in self.choices.items()}
        out.relayouts, out._variants = dict(self.relayouts), dict(self._variants)
        out._together = {count: own.branch() for count, own in self._together.items()}
        return out

    @property
    def kernels(self) -> int:
        """How many kernels were priced, those that run together included."""
        return self.priced + sum(own.kernels for own in self._together.values())

    def book(self, spec: OpSpec) -> Book:
        """The cheapest kernels of a spec."""
        if spec not in self._books:
            self._books[spec] = Book(self, spec)
        return self._books[spec]

    def knows(self, spec: OpSpec) -> bool:
        """Whether there is a book of the spec."""
        return spec in self._books

    def best(self, spec: OpSpec, layouts: tuple[Layout, ...]) -> tuple[Kernel, Cost] | None:
        """What the spec's book says."""
        return self.book(spec).best(layouts)

    def relayout(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
    ) -> tuple[Kernel, Cost] | None:
        """The cheapest conversion between two layouts of one shape."""
        from kernels.bind import relayout_spec

        return self.best(relayout_spec(shape, dtype), (source, target))

    def variants(self, spec: OpSpec) -> list[KernelVariant]:
        """All that the spec's family has for the device."""
        from kernels.variants import family_of

        if spec not in self._variants:
            self._variants[spec] = family_of(spec.kind).variants(spec, self.costs.limits)
        return self._variants[spec]

    def price(
        self, spec: OpSpec, layouts: tuple[Layout, ...], variants: Iterable[KernelVariant]
    ) -> list[tuple[Kernel, Cost]]:
        """Those of the variants that accept the layouts, with what they cost."""
        kernels = [kernel for kernel in _built(spec, layouts, variants) if kernel is not None]
        self.priced += len(kernels)
        return [(kernel, self.costs.predict(kernel, self.count)) for kernel in kernels]


@dataclass(frozen=True)
class Noted:
    """What a book needs to answer as another one does, by value.

    Attributes:
        favoured: see ``Book.narrow``; None where it was not narrowed.
        early: layouts that were asked for before: of these every variant was tried.
    """

    favoured: tuple[KernelVariant, ...] | None
    early: frozenset[tuple[Layout, ...]]


class Book:
    """The cheapest kernel of one spec by layouts, each worked out when first asked for.

    Args:
        pricer: of the device.
        spec: of all its kernels.
    """

    def __init__(self, pricer: Pricer, spec: OpSpec) -> None:
        self.pricer, self.spec = pricer, spec
        self._known: dict[tuple[Layout, ...], tuple[Kernel, Cost] | None] = {}
        self._favoured: tuple[KernelVariant, ...] | None = None
        self._early: frozenset[tuple[Layout, ...]] = frozenset()

    def best(self, layouts: tuple[Layout, ...]) -> tuple[Kernel, Cost] | None:
        """The cheapest kernel and its cost (the first label among equals), or None where none accepts the layouts."""
        if layouts not in self._known:
            price, spec = self.pricer.price, self.spec
            tried = () if layouts in self._early else self._favoured or ()
            priced = price(spec, layouts, tried)
            self._known[layouts] = _least(priced or price(spec, layouts, self.pricer.variants(spec)))
        return self._known[layouts]

    def named(self, layouts: tuple[Layout, ...], label: str) -> tuple[Kernel, Cost]:
        """A kernel that was the cheapest, with its cost, by its label: without pricing the others again."""
        known = self._known.get(layouts)
        if known is None or known[0].variant.label != label:
            own = [variant for variant in self.pricer.variants(self.spec) if variant.label == label]
            known = self.pricer.price(self.spec, layouts, own)[0]
            self._known.setdefault(layouts, known)
        return known

    def narrow(self, pivots: Iterable[tuple[Layout, ...]]) -> None:
        """From now on try only variants that are the best of their name for one of these layout tuples."""
        if self._favoured is not None:
            return
        self._early = frozenset(self._known)
        favoured: dict[KernelVariant, None] = {}
        for layouts in pivots:
            priced = self.pricer.price(self.spec, layouts, self.pricer.variants(self.spec))
            self._known[layouts] = _least(priced)
            for name in dict.fromkeys(kernel.variant.name for kernel, _ in priced):
                least = _least([p for p in priced if p[0].variant.name == name])
                if least:
                    favoured[least[0].variant] = None
        self._favoured = tuple(favoured)

    def copied(self, pricer: Pricer) -> Book:
        """The same in another pricer."""
        out = Book(pricer, self.spec)
        out._known, out._favoured, out._early = dict(self._known), self._favoured, self._early
        return out

    def noted(self) -> Noted:
        """For a book elsewhere."""
        return Noted(self._favoured, self._early)

    def enter(self, noted: Noted) -> None:
        """Make an empty book answer as the other one does."""
        self._favoured, self._early = noted.favoured, noted.early


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
