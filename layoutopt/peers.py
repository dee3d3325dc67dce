"""The policies of ``layoutopt/policies.py`` as plans: kernels and relayouts for what they ask for, by the same prices.

Part of the face: it asks ``kernels`` (lazily) what accepts the layouts. A policy brings tables of its own: a storage's
candidates are row-major and the layouts that the policy produces it and reads it in, an op's choices the tuple that is
asked for (or, where no kernel accepts it, the nearest that one does). Prices come from the tables' pricer, hence from
the cost model that the solver's do.

Where no kernel accepts what is asked for, an input is read from its primary or from row-major; where none can write
it, the output is produced row-major.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layoutopt.errors import InfeasibleError
from layoutopt.graph import DTYPES, Op
from layoutopt.layout import Layout
from layoutopt.plan import Plan, with_report
from layoutopt.policies import POLICIES, Extra, Policy, Wishes, wish
from layoutopt.pricing import Tables, price_ns
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.strategies import priced

__all__ = ["NotRun", "PeerTables", "applied", "with_not_run"]


@dataclass(frozen=True)
class NotRun:
    """Copies that the peer makes and no kernel here does: their number, price and bytes read and written."""

    copies: int = 0
    cost_ns: int = 0
    bytes_moved: int = 0


@dataclass(frozen=True)
class PeerTables(Tables):
    """Tables of a policy's own layouts, each op with the one choice that the policy leads to.

    Attributes:
        not_run: in no choice and no relayout.
    """

    not_run: NotRun = NotRun()


def with_not_run(plan: Plan, tables: Tables) -> Plan:
    """The plan whose solver report says what is not run, where it was made from a policy's tables."""
    if not isinstance(tables, PeerTables):
        return plan
    own = tables.not_run
    return with_report(plan, not_run_copies=own.copies, not_run_ns=own.cost_ns, not_run_bytes=own.bytes_moved)


class _Unserved(Exception):
    """No kernel writes the storages of these names in the layouts asked for."""

    def __init__(self, names: frozenset[str], op: Op) -> None:
        super().__init__(op.name)
        self.names, self.op = names, op


def applied(tables: Tables, name: str) -> tuple[PeerTables, Assignment]:
    """A peer's policy on the graph of some tables: its own tables, and the assignment of them with its relayouts.

    Args:
        tables: of any candidates; their graph, pricer and constraints are used.
        name: of a policy.

    Raises:
        InfeasibleError: an op has no kernel that writes row-major.
    """
    started = time.perf_counter()
    plain: frozenset[str] = frozenset()
    while True:
        try:
            return _Builder(tables, POLICIES[name], plain).build(started)
        except _Unserved as unserved:
            if not unserved.names - plain:
                raise InfeasibleError(
                    f"op {unserved.op.name} has no kernel for the layouts of {name}, nor for row-major: use the exact "
                    "strategy (ilp)",
                    (unserved.op.name,),
                ) from unserved
            plain |= unserved.names


class _Builder:
    """A problem with the choices that a policy makes."""

    def __init__(self, tables: Tables, policy: Policy, plain: frozenset[str]) -> None:
        self.tables, self.policy = tables, policy
        self.wishes: Wishes = wish(tables.graph, policy, plain)
        self.candidates = [[node.candidates[0]] for node in tables.problem.storages]
        self.primary = tuple(self._index(s, self.wishes.primary.get(n)) for s, n in enumerate(tables.names))
        self.relayouts: dict[tuple[int, int, int], int] = {}

    def _index(self, s: int, layout: Layout | None) -> int:
        own = self.candidates[s]
        if layout is None:
            return 0
        if layout not in own:
            own.append(layout)
        return own.index(layout)

    def build(self, started: float) -> tuple[PeerTables, Assignment]:
        """The tables and the assignment."""
        tables = self.tables
        choices = [self._choice(o) for o in range(len(tables.graph.ops))]
        ops = tuple(replace(node, choices=(own,)) for node, own in zip(tables.problem.ops, choices, strict=True))
        storages = tuple(self._storage(s, node) for s, node in enumerate(tables.problem.storages))
        problem = Problem(storages, ops, self.relayouts)
        seconds = time.perf_counter() - started
        found = priced(problem, self.primary, (0,) * len(ops), self.policy.name, "HEURISTIC", seconds)
        own = PeerTables(
            tables.graph, problem, tables.names, tables.index, tables.pricer, tables.books, self._not_run()
        )
        return own, found

    def _storage(self, s: int, node: StorageNode) -> StorageNode:
        storage = self.tables.graph.storages[node.name]
        sizes = tuple(layout.size_elems * DTYPES[storage.dtype] for layout in self.candidates[s])
        return replace(node, candidates=tuple(self.candidates[s]), sizes_bytes=sizes)

    def _choice(self, o: int) -> Choice:
        """The first tuple of layouts that a kernel accepts.

        Raises:
            _Unserved: none.
        """
        tables = self.tables
        op, node, book = tables.graph.ops[o], tables.problem.ops[o], tables.books[o]
        for picks in _tuples(self._options(o, node)):
            stored = [self.candidates[s][x] for s, x in zip(node.operands, picks, strict=True)]
            viewed = [operand.view.layout(layout) for operand, layout in zip(op.operands, stored, strict=True)]
            known = tuple(layout for layout in viewed if layout is not None)
            best = book.cheapest(known) if len(known) == len(viewed) else None
            if best and all(self._converts(s, x) for s, x in zip(node.operands, picks, strict=True)):
                return Choice(picks, best[1], best[0])
        tied = {node.operands[k] for k in node.primary_operands}
        raise _Unserved(frozenset(tables.names[s] for s in tied if self.primary[s]), op)

    def _options(self, o: int, node: OpNode) -> list[tuple[int, ...]]:
        """Per operand the candidates to try: what is asked for, the primary, row-major; or the primary where tied."""
        wanted = self.wishes.reads[o]
        tied = set(node.primary_operands)
        out = []
        for k, s in enumerate(node.operands):
            first = self.primary[s] if k in tied else self._index(s, wanted[k])
            out.append((first,) if k in tied else tuple(dict.fromkeys((first, self.primary[s], 0))))
        return out

    def _converts(self, s: int, candidate: int) -> bool:
        """Whether a relayout makes a candidate from the primary; it is priced."""
        primary = self.primary[s]
        if candidate != primary and (s, primary, candidate) not in self.relayouts:
            own = self.candidates[s]
            storage = self.tables.graph.storages[self.tables.names[s]]
            found = self.tables.pricer.relayout(storage.shape, storage.dtype, own[primary], own[candidate])
            if found is None:
                return False
            self.relayouts[s, primary, candidate] = price_ns(found[1])
        return True

    def _not_run(self) -> NotRun:
        tensors = self.tables.graph.tensors
        costs = [self._price(extra, tensors[extra.tensor].dtype) for extra in self.wishes.extras]
        moved = sum(2 * Layout.row_major(e.shape).size_elems * tensors[e.tensor].item_bytes for e in self.wishes.extras)
        return NotRun(len(costs), sum(costs), moved)

    def _price(self, extra: Extra, dtype: str) -> int:
        """Of the copy, or of one between row-major tensors of the size where no kernel makes it."""
        plain = Layout.row_major(extra.shape)
        for source, target in ((extra.source, extra.target), (plain, plain)):
            found = self.tables.pricer.relayout(extra.shape, dtype, source, target)
            if found:
                return price_ns(found[1])
        raise InfeasibleError(f"no kernel copies {extra.tensor!r} of shape {extra.shape}", (extra.op,))


def _tuples(options: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """All first options; with one operand at a further one; all at their second; all at their last."""
    first = tuple(own[0] for own in options)
    yield first
    for k, own in enumerate(options):
        for other in own[1:]:
            yield (*first[:k], other, *first[k + 1 :])
    yield tuple(own[min(1, len(own) - 1)] for own in options)
    yield tuple(own[-1] for own in options)
