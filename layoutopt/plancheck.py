"""The independent judge of a plan's structure: replays its steps against the graph, slot by slot.

Written apart from what assembles plans. It follows which tensor's value each materialised layout holds, so that a
missing relayout, a stale copy, a wrong order or a reused buffer is found whatever caused it. Kernels and costs are
judged by ``planner.validate``, which calls this first.
"""

from __future__ import annotations

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.memory import Buffer, Placed, find_overlap
from layoutopt.plan import ArenaSlot, Plan
from layoutopt.rewrites import planned_graph

__all__ = ["check_plan"]


def check_plan(plan: Plan, graph: TrainingGraph) -> None:
    """Everything about a plan that needs neither kernels nor costs.

    Raises:
        GraphError: the plan is for another graph, or its layouts, steps or operands do not serve this one.
        LayoutOptError: the arena or the reported objective is wrong.
    """
    graph = planned_graph(plan, graph)
    layouts = _check_layouts(plan, graph)
    ops = {op.name: op for op in graph.ops}
    if [p.op for p in plan.ops] != list(ops):
        raise _wrong(plan, f"it lists {len(plan.ops)} ops that are not the graph's {len(ops)} in order")
    slots = {slot.name: slot for slot in plan.arena}
    if len(slots) != len(plan.arena):
        raise _wrong(plan, "two arena slots have the same name")
    _check_slots(plan, graph, layouts, slots)
    _Replay(plan, graph, ops, layouts, slots).run()
    total = sum(p.cost.total_ns for p in plan.ops) + sum(r.cost.total_ns for r in plan.relayouts)
    if total != plan.solver.objective_ns:
        raise LayoutOptError(
            f"the plan of {plan.graph_name!r} reports an objective of {plan.solver.objective_ns} ns but its steps sum "
            f"to {total} ns: plan the graph anew"
        )


def _wrong(plan: Plan, what: str) -> GraphError:
    return GraphError(f"the plan of {plan.graph_name!r} does not serve the graph: {what}; plan the graph anew")


def _check_layouts(plan: Plan, graph: TrainingGraph) -> dict[str, tuple[Layout, ...]]:
    used = {graph.storage_of[o.tensor] for op in graph.ops for o in op.operands}
    used |= {graph.storage_of[out] for out in graph.outputs}
    missing = sorted(used - set(plan.layouts))
    if missing:
        raise _wrong(plan, f"it has no layout for {', '.join(missing[:3])}")
    out = {}
    for name, docs in plan.layouts.items():
        storage = graph.storages.get(name)
        if storage is None:
            raise _wrong(plan, f"it lays out {name!r}, which the graph does not have")
        layouts = tuple(doc.layout() for doc in docs)
        if not layouts or len(set(layouts)) < len(layouts):
            raise _wrong(plan, f"{name} has no layout or the same one twice")
        for layout in layouts:
            if layout.shape != storage.shape:
                raise _wrong(plan, f"{name} {list(storage.shape)} is laid out as {list(layout.shape)}")
            if not layout.is_injective():
                raise _wrong(plan, f"layout {layout.describe()} of {name} puts two elements in one place")
        out[name] = layouts
    return out


def _check_slots(
    plan: Plan, graph: TrainingGraph, layouts: dict[str, tuple[Layout, ...]], slots: dict[str, ArenaSlot]
) -> None:
    end = len(plan.steps) - 1
    for name, own in layouts.items():
        storage = graph.storages[name]
        for position, layout in enumerate(own):
            slot = slots.get(f"{name}#{position}")
            need = layout.size_elems * graph.tensors[name].item_bytes
            if slot is None or slot.size_bytes < need:
                raise _wrong(plan, f"the arena has no {need} bytes for {name}#{position}")
        slot = slots[f"{name}#0"]
        whole = storage.role in ("parameter", "state", "constant")
        kept = any(tensor in graph.outputs for tensor in storage.tensors)
        if (whole or storage.role == "input") and slot.first > 0:
            raise _wrong(plan, f"{name}#0 holds a value before the step but its slot begins at {slot.first}")
        if (whole or kept) and slot.last < end:
            raise _wrong(plan, f"{name}#0 is kept after the step but its slot ends at {slot.last} of {end}")
    for slot in plan.arena:
        if slot.offset_bytes < 0 or slot.offset_bytes + slot.size_bytes > plan.arena_bytes:
            raise _wrong(plan, f"slot {slot.name} leaves the arena of {plan.arena_bytes} bytes")
    placed = [Placed(Buffer(s.name, s.size_bytes, s.first, s.last), s.offset_bytes) for s in plan.arena]
    clash = find_overlap(placed)
    if clash:
        raise _wrong(plan, f"slots {clash[0].buffer.name} and {clash[1].buffer.name} share bytes while both are alive")


class _Replay:
    """Follows the steps: which tensor's value each slot holds."""

    def __init__(
        self,
        plan: Plan,
        graph: TrainingGraph,
        ops: dict[str, Op],
        layouts: dict[str, tuple[Layout, ...]],
        slots: dict[str, ArenaSlot],
    ) -> None:
        self.plan, self.graph, self.ops, self.layouts, self.slots = plan, graph, ops, layouts, slots
        self.holds: dict[tuple[str, int], str] = {
            (graph.storage_of[t.name], 0): t.name
            for t in graph.tensors.values()
            if t.role in ("input", "parameter", "state", "constant") and graph.storage_of[t.name] == t.name
        }

    def run(self) -> None:
        plan = self.plan
        for kind, count in (("op", len(plan.ops)), ("relayout", len(plan.relayouts))):
            numbers = [i for k, i in plan.steps if k == kind]
            if sorted(numbers) != list(range(count)) or (kind == "op" and numbers != sorted(numbers)):
                raise _wrong(plan, f"its steps do not run each of its {count} {kind}s once, in order")
        if len(plan.steps) != len(plan.ops) + len(plan.relayouts):
            raise _wrong(plan, "its steps hold something that is neither an op nor a relayout")
        for step, (kind, index) in enumerate(plan.steps):
            if kind == "relayout":
                self._relayout(step, index)
            else:
                self._op(step, index)

    def _touch(self, step: int, storage: str, position: int) -> None:
        slot = self.slots[f"{storage}#{position}"]
        if not slot.first <= step <= slot.last:
            raise _wrong(
                self.plan, f"step {step} uses {slot.name}, which is alive from {slot.first} to {slot.last} only"
            )

    def _relayout(self, step: int, index: int) -> None:
        move = self.plan.relayouts[index]
        held = self.holds.get((move.storage, 0))
        if held is None or not 0 < move.target < len(self.layouts.get(move.storage, ())):
            raise _wrong(self.plan, f"relayout {move.storage}#{move.target} comes before its value or has no layout")
        following = next((self.plan.ops[i].op for k, i in self.plan.steps[step:] if k == "op"), "")
        if following != move.before:
            where = f"{move.storage}#{move.target}"
            raise _wrong(self.plan, f"relayout {where} comes before {following}, not {move.before}")
        self._touch(step, move.storage, 0)
        self._touch(step, move.storage, move.target)
        self.holds[move.storage, move.target] = held

    def _op(self, step: int, index: int) -> None:
        planned = self.plan.ops[index]
        op = self.ops[planned.op]
        if len(planned.layouts) != len(op.operands):
            raise _wrong(self.plan, f"op {op.name} has {len(planned.layouts)} layouts for {len(op.operands)} operands")
        for k, (operand, position) in enumerate(zip(op.operands, planned.layouts, strict=True)):
            storage = self.graph.storage_of[operand.tensor]
            if not 0 <= position < len(self.layouts[storage]):
                raise _wrong(self.plan, f"op {op.name} wants {storage}#{position}, which is not laid out")
            self._touch(step, storage, position)
            if operand.view.layout(self.layouts[storage][position]) is None:
                raise _wrong(self.plan, f"op {op.name} cannot view {storage}#{position} as {operand.view.describe()}")
            if k < len(op.inputs):
                held = self.holds.get((storage, position))
                if held != operand.tensor:
                    raise _wrong(
                        self.plan, f"op {op.name} reads {operand.tensor} in {storage}#{position}, which holds {held}"
                    )
            elif position:
                raise _wrong(self.plan, f"op {op.name} writes copy {storage}#{position}, not the primary")
        for _, inp in op.inplace:
            if planned.layouts[inp]:
                raise _wrong(self.plan, f"op {op.name} updates input {inp} of its copy, not in place")
        for operand in op.outputs:
            self.holds[self.graph.storage_of[operand.tensor], 0] = operand.tensor
