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
        out._books = {spec: Book(out, spec, book.noted()) for spec, book in self._books.items()}
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

    def enter(self, spec: OpSpec, noted: Noted) -> Book:
        """A book of a spec of which nothing was known, with what another one knows."""
        self._books[spec] = Book(self, spec, noted)
        return self._books[spec]

    def knows(self, spec: OpSpec) -> bool:
        """Whether there is a book of the spec."""
        return spec in self._books

    def relayout(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
    ) -> tuple[Kernel, Cost] | None:
        """The cheapest conversion between two layouts of one shape."""
        return self.moves(shape, dtype).best((source, target))

    def moves(self, shape: tuple[int, ...], dtype: str) -> Book:
        """The cheapest conversions between layouts of one shape."""
        from kernels.bind import relayout_spec

        return self.book(relayout_spec(shape, dtype))

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
    """All that a book knows, by value.

    Attributes:
        known: see ``Book.cheapest``.
        favoured: see ``Book.narrow``; None where it was not narrowed.
    """

    known: dict[tuple[Layout, ...], tuple[str, int] | None]
    favoured: tuple[KernelVariant, ...] | None = None


class Book:
    """The cheapest kernel of one spec by layouts, each worked out when first asked for.

    Args:
        pricer: of the device.
        spec: of all its kernels.
        noted: what another book of the spec knows.
    """

    def __init__(self, pricer: Pricer, spec: OpSpec, noted: Noted | None = None) -> None:
        self.pricer, self.spec = pricer, spec
        self._known = dict(noted.known) if noted else {}
        self._favoured = noted.favoured if noted else None
        self._kernels: dict[tuple[tuple[Layout, ...], str], tuple[Kernel, Cost]] = {}

    def cheapest(self, layouts: tuple[Layout, ...]) -> tuple[str, int] | None:
        """The label and the nanoseconds of the cheapest kernel (the first label among equals).

        None where no kernel accepts the layouts.
        """
        if layouts not in self._known:
            price, spec = self.pricer.price, self.spec
            priced = price(spec, layouts, self._favoured or ())
            self._known[layouts] = _least(priced or price(spec, layouts, self.pricer.variants(spec)))
        return self._known[layouts]

    def best(self, layouts: tuple[Layout, ...]) -> tuple[Kernel, Cost] | None:
        """The cheapest kernel itself and its cost."""
        found = self.cheapest(layouts)
        return self.named(layouts, found[0]) if found else None

    def named(self, layouts: tuple[Layout, ...], label: str) -> tuple[Kernel, Cost]:
        """The kernel of a variant that accepts the layouts, and its cost, by its label."""
        key = layouts, label
        if key not in self._kernels:
            own = [variant for variant in self.pricer.variants(self.spec) if variant.label == label]
            self._kernels[key] = self.pricer.price(self.spec, layouts, own)[0]
        return self._kernels[key]

    def narrow(self, pivots: Iterable[tuple[Layout, ...]]) -> None:
        """From now on try only variants that are the best of their name for one of these layout tuples."""
        if self._favoured is not None:
            return
        favoured: dict[KernelVariant, None] = {}
        for layouts in pivots:
            priced = self.pricer.price(self.spec, layouts, self.pricer.variants(self.spec))
            self._known[layouts] = _least(priced)
            by_name: dict[str, list[tuple[Kernel, Cost]]] = {}
            for one in priced:
                by_name.setdefault(one[0].variant.name, []).append(one)
            favoured |= dict.fromkeys(min(own, key=_rank)[0].variant for own in by_name.values())
        self._favoured = tuple(favoured)

    def noted(self) -> Noted:
        """All that it knows, for another book of the spec."""
        return Noted(dict(self._known), self._favoured)


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


def _least(priced: list[tuple[Kernel, Cost]]) -> tuple[str, int] | None:
    ranks = [_rank(one) for one in priced]
    if not ranks:
        return None
    ns, label = min(ranks)
    return label, ns


def _rank(priced: tuple[Kernel, Cost]) -> tuple[int, str]:
    return price_ns(priced[1]), priced[0].variant.label
