"""From an assignment to a plan: steps in order, relayouts just before their first reader, every buffer in the arena.

Part of the face: specialised kernels tell their workspaces, so it imports ``kernels`` (lazily).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from layoutopt.candidates import seen_through
from layoutopt.graph import DTYPES
from layoutopt.layout import Layout
from layoutopt.memory import Arena, Buffer, enforce_budget, pack
from layoutopt.plan import (
    PLAN_VERSION,
    ArenaSlot,
    ItemCost,
    LayoutDoc,
    Plan,
    PlannedOp,
    PlannedRelayout,
    SolverReport,
    gap_of,
    step_names,
)
from layoutopt.pricing import Tables, price_ns
from layoutopt.problem import Assignment
from layoutopt.rewrite_neighbours import alike_runs, sharing
from layoutopt.rewrites import origin_of

if TYPE_CHECKING:
    from costmodel.cost import Cost, Costs
    from kernels.spec import Kernel

__all__ = ["as_run_ns", "assemble", "item_cost"]


def assemble(
    tables: Tables,
    costs: Costs,
    assignment: Assignment,
    strategy: str,
    memory_bytes: int | None = None,
    keep: Iterable[str] = (),
) -> Plan:
    """A plan from an assignment: relayouts just before their first reader, and every buffer in the arena.

    Raises:
        InfeasibleError: the arena does not fit ``memory_bytes``.
    """
    graph, problem = tables.graph, tables.problem
    layouts = {
        name: tuple(
            LayoutDoc.of(problem.storages[s].candidates[c]) for c in (assignment.primary[s], *assignment.copies[s])
        )
        for s, name in enumerate(tables.names)
    }
    builder = _Builder(tables, assignment, costs.limits.idle_units)
    for run in alike_runs(graph):
        builder.add(run)
    arena = pack(builder.buffers(keep), costs.limits.base_align_bytes)
    enforce_budget(arena, memory_bytes, step_names(builder.steps, builder.ops, builder.relayouts))
    origin, rewrites = origin_of(graph)
    objective = sum(op.cost.total_ns for op in builder.ops) + sum(move.cost.total_ns for move in builder.relayouts)
    bound = assignment.bound_ns
    status = "FEASIBLE" if assignment.status == "OPTIMAL" and objective > bound else assignment.status
    return Plan(
        PLAN_VERSION,
        graph.name,
        origin,
        costs.name,
        costs.hash,
        layouts,
        tuple(builder.ops),
        tuple(builder.relayouts),
        tuple(builder.steps),
        arena.size_bytes,
        _slots(arena),
        SolverReport(
            strategy,
            assignment.method,
            status,
            objective,
            bound,
            gap_of(objective, bound),
            assignment.seconds,
            len(problem.storages),
            sum(len(node.candidates) for node in problem.storages),
            sum(len(op.choices) for op in problem.ops),
        ),
        rewrites,
    )


def as_run_ns(tables: Tables, assignment: Assignment, units: int) -> int:
    """Nanoseconds of an assignment's ops and relayouts, each op at its part of the launch that it really shares.

    Args:
        tables: that the assignment is of; they take for granted that ops share launches where they may.
        assignment: any.
        units: as of ``rewrite_neighbours.sharing``.
    """
    return assignment.cost_ns + _Builder(tables, assignment, units).own_launches_ns()


def _slots(arena: Arena) -> tuple[ArenaSlot, ...]:
    return tuple(
        ArenaSlot(p.buffer.name, p.offset_bytes, p.buffer.size_bytes, p.buffer.first, p.buffer.last)
        for p in arena.placed
    )


def item_cost(cost: Cost) -> ItemCost:
    """A prediction as plans hold it: whole nanoseconds."""
    parts = (round(cost.compute_ns), round(cost.memory_ns), round(cost.launch_ns))
    return ItemCost(price_ns(cost), *parts, cost.measured)


class _Builder:
    """Steps, and when each buffer is alive, as ops are added in order."""

    def __init__(self, tables: Tables, assignment: Assignment, units: int) -> None:
        self.tables, self.assignment = tables, assignment
        self._sharing = {o: group for group in sharing(tables.graph, units) for o in group}
        self.ops: list[PlannedOp] = []
        self.relayouts: list[PlannedRelayout] = []
        self.steps: list[tuple[str, int]] = []
        self.alive: dict[str, list[int]] = {}
        self.sizes: dict[str, int] = {}
        self._made: set[tuple[int, int]] = set()
        self._known_seen: dict[int, tuple[Layout, ...]] = {}
        self._touched: set[str] = set()

    def add(self, run: range) -> None:
        """Ops that may run at once, after the relayouts that they are the first to need.

        All their buffers are alive throughout the run, so that nothing keeps them from really running at once.
        """
        graph = self.tables.graph
        placed = [self._placed(o, graph.ops[run.start].name) for o in run]
        first = len(self.steps)
        self._touched.clear()
        for o, positions in zip(run, placed, strict=True):
            self._op(o, positions)
        if len(run) == 1:
            return
        for span in map(self.alive.__getitem__, self._touched):
            span[1] = len(self.steps) - 1
            span[0] = min(span[0], first)

    def _placed(self, o: int, before: str) -> list[int]:
        """Per operand the position of its layout; relayouts that are missing run before op ``before``."""
        node = self.tables.problem.ops[o]
        choice = node.choices[self.assignment.choice[o]]
        positions = []
        for s, candidate in zip(node.operands, choice.layouts, strict=True):
            placed = (self.assignment.primary[s], *self.assignment.copies[s])
            positions.append(placed.index(candidate))
            if positions[-1] and (s, candidate) not in self._made:
                self._relayout(s, candidate, positions[-1], before)
        return positions

    def _op(self, o: int, positions: list[int]) -> None:
        op, node = self.tables.graph.ops[o], self.tables.problem.ops[o]
        kernel, cost = self._kernel(o)
        self.steps.append(("op", len(self.ops)))
        self.ops.append(PlannedOp(op.name, kernel.variant.label, tuple(positions), item_cost(cost)))
        for s, position in zip(node.operands, positions, strict=True):
            self._touch(s, position)
        self._scratch(op.name, kernel)

    def _kernel(self, o: int) -> tuple[Kernel, Cost]:
        """What an op runs, and its part of a launch that it shares with those of its group in the same layouts."""
        seen, group, book = self._seen(o), self._sharing[o], self.tables.books[o]
        alike = sum(self._seen(other) == seen for other in group)
        if alike == len(group):
            return book.named(seen, self.tables.problem.ops[o].choices[self.assignment.choice[o]].variant)
        found = self.tables.pricer.together(alike).book(book.spec).best(seen)
        assert found is not None, "a choice comes from a kernel"
        return found

    def _seen(self, o: int) -> tuple[Layout, ...]:
        """The layouts that an op's operands are seen in; every op of a group asks for those of all the others."""
        if o not in self._known_seen:
            self._known_seen[o] = self._looked_at(o)
        return self._known_seen[o]

    def _looked_at(self, o: int) -> tuple[Layout, ...]:
        problem, node = self.tables.problem, self.tables.problem.ops[o]
        chosen = node.choices[self.assignment.choice[o]].layouts
        stored = [problem.storages[s].candidates[c] for s, c in zip(node.operands, chosen, strict=True)]
        views = (operand.view for operand in self.tables.graph.ops[o].operands)
        seen = (seen_through(view, layout) for view, layout in zip(views, stored, strict=True))
        return tuple(layout for layout in seen if layout is not None)

    def own_launches_ns(self) -> int:
        """What ops take beyond their choices' prices, because they are not like those beside them."""
        extra = 0
        for group in dict.fromkeys(self._sharing.values()):
            if len({self._seen(o) for o in group}) > 1:
                for o in group:
                    choice = self.tables.problem.ops[o].choices[self.assignment.choice[o]]
                    extra += price_ns(self._kernel(o)[1]) - choice.cost_ns
        return extra

    def _relayout(self, s: int, candidate: int, position: int, before: str) -> None:
        tables = self.tables
        node = tables.problem.storages[s]
        storage = tables.graph.storages[node.name]
        pair = (node.candidates[self.assignment.primary[s]], node.candidates[candidate])
        found = tables.pricer.relayout(storage.shape, storage.dtype, *pair)
        assert found is not None, "a copy comes from a kernel"
        kernel, cost = found
        elems = tables.graph.tensors[node.name].size_elems * tables.graph.tensors[node.name].item_bytes
        self._made.add((s, candidate))
        self.steps.append(("relayout", len(self.relayouts)))
        move = PlannedRelayout(node.name, position, before, kernel.variant.label, item_cost(cost), 2 * elems)
        self.relayouts.append(move)
        self._touch(s, 0)
        self._touch(s, position)
        self._scratch(move.label, kernel)

    def _touch(self, s: int, position: int) -> None:
        node = self.tables.problem.storages[s]
        candidate = (self.assignment.primary[s], *self.assignment.copies[s])[position]
        self._alive(f"{node.name}#{position}", node.sizes_bytes[candidate])

    def _scratch(self, label: str, kernel: Kernel) -> None:
        for i, workspace in enumerate(kernel.scratch):
            self._alive(f"scratch:{label}:{i}", workspace.layout.size_elems * DTYPES[workspace.dtype])

    def _alive(self, name: str, size_bytes: int) -> None:
        step = len(self.steps) - 1
        self._touched.add(name)
        self.sizes[name] = max(size_bytes, self.sizes.get(name, 0))
        self.alive.setdefault(name, [step, step])[1] = step

    def buffers(self, keep: Iterable[str] = ()) -> list[Buffer]:
        """All buffers with their lifetimes; what lives across steps, comes from the host or is kept is stretched."""
        graph, problem = self.tables.graph, self.tables.problem
        last = max(len(self.steps) - 1, 0)
        kept = {graph.storage_of[name] for name in (*graph.outputs, *keep)}
        for s, node in enumerate(problem.storages):
            name = f"{node.name}#0"
            span = self.alive.setdefault(name, [0, 0])
            self.sizes[name] = node.sizes_bytes[self.assignment.primary[s]]
            if node.persistent or graph.storages[node.name].role == "input":
                span[0] = 0
            if node.persistent or node.name in kept:
                span[1] = last
        return [Buffer(name, self.sizes[name], *span) for name, span in self.alive.items()]
