"""Exact elimination of storages between neighbours: two ops and the storage that only they touch become one op.

Most storages of a training step have one writer and one reader (a contraction's output before its bias, a weight's
gradient before its update), or one op alone (optimizer state). Whatever the rest of an assignment is, the best primary
of such a storage depends only on the layouts that these ops use for their *other* operands. So the ops are joined into
a table over those operands, each entry holding the best price and how it is reached. This is variable elimination,
stopped where a table would grow beyond ``_LARGEST``.

It needs that no relayout of the storage is shared: at most one of the ops may read it anything but the primary.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.reduce import Domain, dearest, undominated

__all__ = ["Merged", "merge_chains", "unmerged"]

_LARGEST = 600
"""Entries of a joined table at most (or as many as the larger of the two had)."""

Trace = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """An operand that is left: its storage, whether it must be the primary, and where it came from."""

    storage: int
    tied: bool
    op: int
    position: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """The best way to a tuple of layouts: price, choices (op, choice), settled primaries (storage, candidate)."""

    cost: int
    choices: Trace
    primaries: Trace


@dataclass
class _Table:
    slots: tuple[_Slot, ...]
    entries: dict[tuple[int, ...], _Entry]

    def loose_on(self, s: int) -> bool:
        return any(slot.storage == s and not slot.tied for slot in self.slots)


@dataclass(frozen=True)
class Merged:
    """A smaller problem with the same optimum, and the way back.

    Attributes:
        problem: over the same storages; ops are joined tables.
        domain: what is left of it; eliminated storages are left with one primary, which no op looks at.
    """

    original: Problem
    problem: Problem
    domain: Domain
    tables: tuple[_Table, ...]
    keys: tuple[tuple[tuple[int, ...], ...], ...]

    def expand(self, primary: tuple[int, ...], choice: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Primaries and choices of the original problem from those of the smaller."""
        primaries, choices = list(primary), [0] * len(self.original.ops)
        for table, keys, picked in zip(self.tables, self.keys, choice, strict=True):
            entry = table.entries[keys[picked]]
            for s, candidate in entry.primaries:
                primaries[s] = candidate
            for o, c in entry.choices:
                choices[o] = c
        return tuple(primaries), tuple(choices)

    def project(self, start: Assignment) -> list[int | None]:
        """Per op of the smaller problem the choice that an assignment of the original amounts to, where it is left."""
        out: list[int | None] = []
        for table, keys in zip(self.tables, self.keys, strict=True):
            ops = self.original.ops
            key = tuple(ops[x.op].choices[start.choice[x.op]].layouts[x.position] for x in table.slots)
            out.append(keys.index(key) if key in table.entries else None)
        return out


def merge_chains(problem: Problem, domain: Domain) -> Merged | None:
    """Eliminate every storage that allows it; None where a table comes out empty (no assignment exists)."""
    tables: dict[int, _Table] = {o: _table(problem, domain, o) for o in range(len(problem.ops))}
    if any(not table.entries for table in tables.values()):
        return None
    touching: dict[int, set[int]] = {s: set() for s in range(len(problem.storages))}
    for o, table in tables.items():
        for slot in table.slots:
            touching[slot.storage].add(o)
    most = dearest(problem, domain)
    eliminated: set[int] = set()
    pending = sorted(touching)
    while pending:
        again: set[int] = set()
        for s in pending:
            around = sorted(touching[s])
            if s in eliminated or not 0 < len(around) < 3 or sum(tables[o].loose_on(s) for o in around) > 1:
                continue
            largest = max(_LARGEST, *(len(tables[o].entries) for o in around))
            joined = _eliminate(problem, domain, [tables[o] for o in around], s, largest)
            if joined is None:
                continue
            if not joined.entries:
                return None
            _thin(joined, most)
            kept, *gone = around
            tables[kept] = joined
            for o in gone:
                del tables[o]
            eliminated.add(s)
            touching[s] = set()
            for slot in joined.slots:
                touching[slot.storage] = (touching[slot.storage] - set(gone)) | {kept}
                again.add(slot.storage)
        pending = sorted(again)
    return _merged(problem, domain, tables, eliminated)


def unmerged(problem: Problem, domain: Domain) -> Merged | None:
    """The problem as it is, in the same form; None where an op's choices all contradict themselves."""
    tables = {o: _table(problem, domain, o) for o in range(len(problem.ops))}
    if any(not table.entries for table in tables.values()):
        return None
    return _merged(problem, domain, tables, set())


def _table(problem: Problem, domain: Domain, o: int) -> _Table:
    op = problem.ops[o]
    own = set(op.primary_operands)
    slots = tuple(_Slot(s, k in own, o, k) for k, s in enumerate(op.operands))
    entries: dict[tuple[int, ...], _Entry] = {}
    for c in domain.choices[o]:
        choice = op.choices[c]
        _offer(entries, choice.layouts, _Entry(choice.cost_ns, ((o, c),), ()))
    return _collapsed(_Table(slots, entries))


def _offer(entries: dict[tuple[int, ...], _Entry], key: tuple[int, ...], entry: _Entry) -> None:
    known = entries.get(key)
    if known is None or entry.cost < known.cost:
        entries[key] = entry


def _collapsed(table: _Table) -> _Table:
    """One slot per storage that must be primary: entries that disagree with themselves go."""
    first: dict[int, int] = {}
    keep, same = [], []
    for i, slot in enumerate(table.slots):
        if slot.tied and slot.storage in first:
            same.append((first[slot.storage], i))
            continue
        if slot.tied:
            first[slot.storage] = i
        keep.append(i)
    if not same:
        return table
    entries: dict[tuple[int, ...], _Entry] = {}
    for key, entry in table.entries.items():
        if all(key[a] == key[b] for a, b in same):
            _offer(entries, tuple(key[i] for i in keep), entry)
    return _Table(tuple(table.slots[i] for i in keep), entries)


def _eliminate(problem: Problem, domain: Domain, around: list[_Table], s: int, largest: int) -> _Table | None:
    """The join of the tables without ``s``; None where it has more than ``largest`` entries."""
    slots = tuple(slot for table in around for slot in table.slots if slot.storage != s)
    entries: dict[tuple[int, ...], _Entry] = {}
    for p in domain.primaries[s]:
        sides = [_given(problem, table, s, p) for table in around]
        rows = sides[0]
        if len(sides) == 2:
            if len(sides[0]) * len(sides[1]) > 4 * largest:
                return None
            rows = {
                a + b: _Entry(x.cost + y.cost, x.choices + y.choices, x.primaries + y.primaries)
                for a, x in sides[0].items()
                for b, y in sides[1].items()
            }
        for key, row in rows.items():
            _offer(entries, key, _Entry(row.cost, row.choices, (*row.primaries, (s, p))))
    out = _collapsed(_Table(slots, entries))
    return out if len(out.entries) <= largest else None


def _given(problem: Problem, table: _Table, s: int, p: int) -> dict[tuple[int, ...], _Entry]:
    """The table's best entries over its other slots when ``s`` has primary ``p``, its relayouts paid."""
    out: dict[tuple[int, ...], _Entry] = {}
    for key, entry in table.entries.items():
        cost = entry.cost
        copies = set()
        for slot, layout in zip(table.slots, key, strict=True):
            if slot.storage == s and layout != p:
                if slot.tied:
                    break
                copies.add(layout)
        else:
            prices = [problem.relayout_ns.get((s, p, layout)) for layout in copies]
            if None in prices:
                continue
            cost += sum(price for price in prices if price is not None)
            rest = tuple(x for slot, x in zip(table.slots, key, strict=True) if slot.storage != s)
            _offer(out, rest, _Entry(cost, entry.choices, entry.primaries))
    return out


def _thin(table: _Table, most: list[tuple[int | None, ...]]) -> None:
    keys = list(table.entries)
    choices = tuple(Choice(key, table.entries[key].cost, "") for key in keys)
    prices = tuple(None if slot.tied else most[slot.storage] for slot in table.slots)
    kept = undominated(choices, tuple(range(len(choices))), prices)
    table.entries = {keys[i]: table.entries[keys[i]] for i in kept}


def _merged(problem: Problem, domain: Domain, tables: dict[int, _Table], eliminated: set[int]) -> Merged:
    ops, ordered, keys = [], [], []
    for o in sorted(tables):
        table = tables[o]
        order = sorted(range(len(table.slots)), key=lambda i: table.slots[i].tied)
        slots = tuple(table.slots[i] for i in order)
        entries = {tuple(key[i] for i in order): entry for key, entry in table.entries.items()}
        ordered.append(_Table(slots, entries))
        keys.append(tuple(entries))
        choices = tuple(Choice(key, entry.cost, "") for key, entry in entries.items())
        inputs = sum(not slot.tied for slot in slots)
        ops.append(OpNode(problem.ops[o].name, tuple(slot.storage for slot in slots), inputs, choices))
    primaries = tuple(p[:1] if s in eliminated else p for s, p in enumerate(domain.primaries))
    left = Domain(primaries, tuple(tuple(range(len(op.choices))) for op in ops))
    smaller = Problem(problem.storages, tuple(ops), problem.relayout_ns)
    return Merged(problem, smaller, left, tuple(ordered), tuple(keys))
