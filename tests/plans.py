"""Plans without a solver: every storage in a layout that the test chooses, relayouts only where nothing else works.

For every op, in order, the least disturbed operands that some kernel accepts: all in their primary layouts (or, where
the test wants relayouts, a random part of its inputs relaid out to row-major), then one input relaid out, then more.
Where an op cannot write its outputs' primary layouts, those storages become row-major and the search starts again.
Costs are zero.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from kernels.bind import relayout_spec, slot_name
from kernels.spec import DeviceLimits, Kernel, OpSpec, op_spec
from kernels.variants import family_of
from layoutopt import memory
from layoutopt.errors import GraphError
from layoutopt.graph import DTYPES, Op, Storage, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.plan import PLAN_VERSION, ArenaSlot, ItemCost, LayoutDoc, Plan, PlannedOp, PlannedRelayout, SolverReport
from layoutopt.rewrites import origin_of

BYTES = DTYPES
NO_COST = ItemCost(0)


def row_major(storage: Storage) -> Layout:
    return Layout.row_major(storage.shape)


def r_tile(storage: Storage) -> Layout:
    """R-Tile(4, 4) of every matrix of floats."""
    return Layout.r_tile(storage.shape, 4, 4) if len(storage.shape) >= 2 else Layout.row_major(storage.shape)


def mixed(seed: int, kinds: int = 2) -> Callable[[Storage], Layout]:
    """Row-major, permuted, or tiled in several ways, at random.

    Storages of one shape and role get one of ``kinds`` layouts by their names, so that a model's blocks share most of
    their kernels: compiling them is what such a test waits for.
    """

    def choose(storage: Storage) -> Layout:
        shape = storage.shape
        rng = random.Random(f"{seed} {shape} {storage.role} {zlib.crc32(storage.name.encode()) % kinds}")
        if len(shape) < 2:
            return Layout.row_major(shape)
        order = tuple(rng.sample(range(len(shape)), len(shape)))
        return rng.choice(
            [
                Layout.row_major(shape),
                Layout.row_major(shape, order),
                Layout.r_tile(shape, 4, 4),
                Layout.r_tile(shape, 1, 8),
                Layout.r_tile(shape, 4, 8, inner="col"),
                Layout.r_tile(shape, 8, 4, outer="col"),
            ]
        )

    return choose


def first(kernels: Iterator[Kernel]) -> Kernel | None:
    return next(kernels, None)


def any_of(seed: int) -> Callable[[Iterator[Kernel]], Kernel | None]:
    """A random kernel among those that accept the layouts: the same one wherever op and layouts are the same."""

    def choose(kernels: Iterator[Kernel]) -> Kernel | None:
        found = list(kernels)
        return random.Random(f"{seed} {found[0].key}").choice(found) if found else None

    return choose


@dataclass
class _Builder:
    graph: TrainingGraph
    limits: DeviceLimits
    choose: Callable[[Iterator[Kernel]], Kernel | None]
    primary: dict[str, Layout]
    relayouts_share: float
    layouts: dict[str, list[Layout]] = field(default_factory=dict)
    ops: list[PlannedOp] = field(default_factory=list)
    relayouts: list[PlannedRelayout] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)
    fresh: set[tuple[str, int]] = field(default_factory=set)
    kernels: dict[tuple[OpSpec, tuple[Layout, ...]], Kernel | None] = field(default_factory=dict)
    scratch: list[memory.Buffer] = field(default_factory=list)

    def kernel(self, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        if (spec, layouts) not in self.kernels:
            family = family_of(spec.kind)
            built = (family.build(v, spec, layouts) for v in family.variants(spec, self.limits))
            self.kernels[spec, layouts] = self.choose(k for k in built if k is not None)
        return self.kernels[spec, layouts]

    def run(self) -> None:
        self.layouts = {name: [layout] for name, layout in self.primary.items()}
        self.ops, self.relayouts, self.steps, self.fresh, self.scratch = [], [], [], set(), []
        for op in self.graph.ops:
            self.place(op)

    def place(self, op: Op) -> None:
        storages = [self.graph.storage_of[o.tensor] for o in op.operands]
        spec = op_spec(self.graph, op)
        for relaid in self.attempts(op, spec, storages):
            stored = [
                Layout.row_major(self.graph.storages[s].shape) if i in relaid else self.primary[s]
                for i, s in enumerate(storages)
            ]
            viewed = [o.view.layout(x) for o, x in zip(op.operands, stored, strict=True)]
            if any(x is None for x in viewed):
                continue
            kernel = self.kernel(spec, tuple(viewed))  # type: ignore[arg-type]
            if kernel is not None:
                positions = tuple(self.relayout(s, op.name) if i in relaid else 0 for i, s in enumerate(storages))
                self.step("op", len(self.ops), op.name, kernel)
                self.ops.append(PlannedOp(op.name, kernel.variant.label, positions, NO_COST))
                updated = {storages[i] for _, i in op.inplace}
                self.fresh = {(s, p) for s, p in self.fresh if s not in updated}
                return
        written = {s for s in storages[len(op.inputs) :] if self.primary[s] != row_major(self.graph.storages[s])}
        if not written:
            shown = [self.primary[s].describe() for s in storages]
            raise GraphError(f"no kernel accepts op {op.name} ({op.kind} {spec.shapes} {spec.dtypes}) from {shown}")
        raise _MakeRowMajor(written)

    def attempts(self, op: Op, spec: OpSpec, storages: list[str]) -> Iterator[frozenset[int]]:
        """Which inputs to relay out: the wanted share of them (the same for equal ops), none, each, each pair, all."""
        possible = self.relayable(op, storages)
        rng = random.Random(f"{spec.kind} {spec.shapes}")
        wanted = frozenset(i for i in possible if rng.random() < self.relayouts_share)
        subsets = [frozenset(c) for size in (0, 1, 2, len(possible)) for c in combinations(possible, size)]
        return iter(dict.fromkeys([wanted, *subsets]))

    def relayable(self, op: Op, storages: list[str]) -> list[int]:
        """Inputs that may be read from a row-major copy: not those that the op updates in place."""
        updated = {i for _, i in op.inplace}
        return [
            i
            for i in range(len(op.inputs))
            if i not in updated and self.primary[storages[i]] != row_major(self.graph.storages[storages[i]])
        ]

    def relayout(self, storage: str, before: str) -> int:
        """The position of the row-major copy, made now unless it is there and up to date."""
        target = Layout.row_major(self.graph.storages[storage].shape)
        known = self.layouts[storage]
        if target not in known:
            known.append(target)
        position = known.index(target)
        if (storage, position) not in self.fresh:
            node = self.graph.storages[storage]
            kernel = self.kernel(relayout_spec(node.shape, node.dtype), (known[0], target))
            if kernel is None:
                raise GraphError(f"no kernel relays out {storage} from {known[0].describe()}")
            self.step("relayout", len(self.relayouts), f"relayout:{storage}#{position}", kernel)
            moved = 2 * target.size_elems * BYTES[node.dtype]
            self.relayouts.append(PlannedRelayout(storage, position, before, kernel.variant.label, NO_COST, moved))
            self.fresh.add((storage, position))
        return position

    def step(self, kind: str, index: int, label: str, kernel: Kernel) -> None:
        at = len(self.steps)
        for i, workspace in enumerate(kernel.scratch):
            size = workspace.layout.size_elems * BYTES[workspace.dtype]
            self.scratch.append(memory.Buffer(f"scratch:{label}:{i}", size, at, at))
        self.steps.append((kind, index))

    def buffers(self, reuse: bool, keep: set[str]) -> list[memory.Buffer]:
        end = len(self.steps) - 1
        used: dict[str, list[int]] = {}
        for at, (kind, index) in enumerate(self.steps):
            if kind == "relayout":
                move = self.relayouts[index]
                names = [slot_name(move.storage, p) for p in (0, move.target)]
            else:
                planned = self.ops[index]
                op = next(o for o in self.graph.ops if o.name == planned.op)
                storages = [self.graph.storage_of[o.tensor] for o in op.operands]
                names = [slot_name(s, p) for s, p in zip(storages, planned.layouts, strict=True)]
            for name in names:
                used.setdefault(name, []).append(at)
        out = []
        for storage, layouts in self.layouts.items():
            node = self.graph.storages[storage]
            kept = {self.graph.storage_of[t] for t in (*self.graph.outputs, *keep)}
            for position, layout in enumerate(layouts):
                name = slot_name(storage, position)
                begin, last = min(used.get(name, [0])), max(used.get(name, [0]))
                persistent = position == 0 and node.role in ("parameter", "state", "constant")
                if persistent or not reuse:
                    begin, last = 0, end
                elif position == 0:
                    begin = 0 if node.role == "input" else begin
                    last = end if storage in kept else last
                out.append(memory.Buffer(name, layout.size_elems * BYTES[node.dtype], begin, last))
        return out + self.scratch


def solver_plan(graph: TrainingGraph, limits: DeviceLimits, keep: Iterable[str] = ()) -> Plan:
    """The exact solver's plan by a cost model that was not measured: what a user runs before calibrating."""
    from costmodel.device import load
    from costmodel.model import CostModel
    from layoutopt import planner

    plan = planner.plan(graph, CostModel(replace(load("generic-cpu"), limits=limits)), keep=keep)
    assert plan.solver.status == "OPTIMAL"
    return plan


class _MakeRowMajor(Exception):
    """Control flow of the search: these storages cannot stay as they are."""

    def __init__(self, storages: set[str]) -> None:
        super().__init__(storages)
        self.storages = storages


def naive_plan(
    graph: TrainingGraph,
    limits: DeviceLimits,
    pick_layout: Callable[[Storage], Layout] = row_major,
    pick_kernel: Callable[[Iterator[Kernel]], Kernel | None] = first,
    *,
    relayouts_share: float = 0.0,
    reuse: bool = False,
    keep: Iterable[str] = (),
) -> Plan:
    """A feasible plan.

    Args:
        graph: any graph of folded views, as captured or rewritten.
        limits: of the device that it will run on.
        pick_layout: a storage's primary layout (of inputs and outputs too: the executor packs whatever it is told).
        pick_kernel: one of the kernels that accept the layouts.
        relayouts_share: part of the inputs to relay out although a kernel might read them as they are.
        reuse: let storages share memory when their lives do not meet; otherwise every storage has its own.
        keep: tensors to keep to the end of the step where memory is reused.

    Raises:
        GraphError: some op has no kernel even in row-major layouts.
    """
    primary = {name: pick_layout(node) for name, node in graph.storages.items()}
    builder = _Builder(graph, limits, pick_kernel, primary, relayouts_share)
    while True:
        try:
            builder.run()
            break
        except _MakeRowMajor as change:
            for name in change.storages:
                primary[name] = row_major(graph.storages[name])
    arena = memory.pack(builder.buffers(reuse, set(keep)), limits.base_align_bytes)
    slots = [
        ArenaSlot(p.buffer.name, p.offset_bytes, p.buffer.size_bytes, p.buffer.first, p.buffer.last)
        for p in arena.placed
    ]
    origin, rewrites = origin_of(graph)
    return Plan(
        version=PLAN_VERSION,
        graph_name=graph.name,
        graph_hash=origin,
        device_name="any",
        device_hash="",
        layouts={name: tuple(LayoutDoc.of(x) for x in layouts) for name, layouts in builder.layouts.items()},
        ops=tuple(builder.ops),
        relayouts=tuple(builder.relayouts),
        steps=tuple(builder.steps),
        arena_bytes=arena.size_bytes,
        arena=tuple(slots),
        solver=SolverReport("test", "naive", "HEURISTIC", 0, 0, 0.0, 0.0, len(primary), 0, 0),
        rewrites=rewrites,
    )
