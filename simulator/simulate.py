"""Simulate a plan: every step's addresses through the device model's caches, summed per op, tensor, operand and phase.

Long launches and repeated steps are sampled (``simulator/sampling.py``); the report says what share of the accesses was
really walked and how far the totals may be off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from costmodel.device import DeviceModel
from kernels.bind import BoundStep, bind
from kernels.nest import Data
from kernels.spec import Kernel, Launch
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import ArenaSlot, Plan
from layoutopt.rewrites import planned_graph
from simulator.cache import Hierarchy, Level, State
from simulator.counts import Counts, Estimate, row_width
from simulator.sampling import Sampling, chosen_members, extrapolated, planned_stretches, spread_class
from simulator.trace import Schedule, TexelBlock, Walk, compile_launch, walk
from simulator.warming import ENOUGH, Box, latest, warm

__all__ = [
    "CacheReport",
    "Caches",
    "Counts",
    "OperandCounts",
    "arena_addresses",
    "hierarchy_of",
    "made_up_ids",
    "schedule_of",
    "simulate",
    "steered",
    "texel_block_of",
]

_PAGE = 4096


@dataclass(frozen=True)
class OperandCounts:
    """Counters of one operand of one step.

    Attributes:
        step: the op's name, or that of a relayout.
        kind: of the op, "relayout" for a relayout.
        phase: forward, loss, backward or update.
        position: in the op's operands, inputs first, then its workspaces.
        tensor: the storage, "(workspace)" for a workspace.
        layout: as the op sees it.
        write: whether it is an output.
        alike: equal for steps that run the same kernel: the same op in every layer.
        counts: its counters.
    """

    step: str
    kind: str
    phase: str
    position: int
    tensor: str
    layout: str
    write: bool
    alike: int
    counts: Counts


@dataclass(frozen=True)
class CacheReport:
    """What a simulated step did to the caches.

    Attributes:
        levels: names, nearest first.
        total: of the step.
        by_step: per plan step (op or relayout), in order.
        by_tensor: per storage.
        by_phase: forward, loss, backward, update.
        operands: per step and operand, in order.
        walked: share of the accesses that were walked rather than extrapolated.
        steps_walked: steps that were simulated, the others being taken for their equals.
        device: name of the device model.
        modelled: the caches come from public facts rather than from this device.
        strategy: that the plan was made by.
    """

    levels: tuple[str, ...]
    total: Counts
    by_step: Mapping[str, Counts]
    by_tensor: Mapping[str, Counts]
    by_phase: Mapping[str, Counts]
    operands: tuple[OperandCounts, ...]
    walked: float
    steps_walked: int
    device: str
    modelled: bool
    strategy: str


def hierarchy_of(model: DeviceModel, images: bool = False) -> Hierarchy:
    """The caches of a device model.

    Args:
        model: states them.
        images: with those that serve only what is read through images.

    Raises:
        DeviceError: the model says nothing of its caches, or of none that both ways pass.
    """
    levels = tuple(
        Level(
            c.name,
            max((c.whole_bytes or c.size_bytes) // (c.line_bytes * c.ways), 1) * c.ways * c.line_bytes,
            c.line_bytes,
            c.ways,
            c.shared,
            c.serves,
            sector_bytes=c.sector_bytes,
            write_back=c.write_back,
            write_allocate=c.write_allocate,
            fetch_on_write=c.fetch_on_write,
            replacement=c.replacement,
            inclusion=c.inclusion,
            hashed=c.hashed,
            fetch_bytes=c.fetch_bytes,
        )
        for c in model.caches
        if (images or c.serves != "image") and c.size_bytes
    )
    if not levels:
        raise DeviceError(f"device model {model.name} lists no caches: add [[caches]] to it or calibrate the device")
    if images and levels[-1].serves != "all":
        raise DeviceError(
            f"device model {model.name} has {levels[-1].name} last, which serves only {levels[-1].serves} accesses: "
            "the last cache must serve all"
        )
    rows = {"row_bytes": "memory_row_bytes", "banks": "memory_banks"}
    stated = {name: int(model.number(key)) for name, key in rows.items() if key in model.facts}
    return Hierarchy(levels, max(model.limits.compute_units, 1), **stated)


def schedule_of(model: DeviceModel, items: int) -> Schedule:
    """What runs at once on a core of a device.

    Args:
        model: states in ``resident_items`` for how many work items a compute unit has registers as a rule; where it
            does not, one work group runs after the other.
        items: of a work group.
    """
    if "resident_items" not in model.facts:
        return Schedule()
    return Schedule(min(max(int(model.number("resident_items")) // max(items, 1), 1), _MOST_RESIDENT), 1)


def texel_block_of(model: DeviceModel) -> TexelBlock:
    """How a device stores 2-D images: in blocks where the model states ``texel_block_columns`` and ``…_rows``."""
    if "texel_block_columns" not in model.facts:
        return TexelBlock()
    return TexelBlock(int(model.number("texel_block_columns")), int(model.number("texel_block_rows")))


_MOST_RESIDENT = 32
"""Work groups that a compute unit runs at once, however small: what NVIDIA's do since 2014 (Maxwell)."""


class Caches:
    """The caches of a device in use: launches run through them one after the other.

    Args:
        model: of the device.
        images: with the caches that serve only images.
    """

    def __init__(self, model: DeviceModel, images: bool) -> None:
        self.hierarchy = hierarchy_of(model, images)
        self.wave = model.limits.simd_width if model.limits.kind == "gpu" else 1
        self.width = row_width(len(self.hierarchy.levels))
        self.model = model
        self._state: State = self.hierarchy.state()
        self._scratch = np.zeros(self.width - 3, dtype=np.int64)

    def clear(self) -> None:
        """Forget what was in them."""
        self._state = self.hierarchy.state()

    def launch(
        self,
        kernel: Kernel,
        launch: Launch,
        addresses: np.ndarray,
        ids: Mapping[int, np.ndarray],
        budget: float,
        lot: np.random.Generator,
    ) -> tuple[Estimate, int]:
        """One launch of a kernel, sampled where it has more than ``budget`` accesses; and how many it has.

        Args:
            kernel: of the launch.
            launch: one of its.
            addresses: byte address of each operand, workspaces after them.
            ids: values of integer operands that steer a gather, by position.
            budget: accesses.
            lot: places stretches.
        """
        compiled = compile_launch(kernel, launch, ids, texel_block_of(self.model))
        skip = self.skipper(kernel, launch, addresses)
        return self.run(compiled, addresses, budget, lot, skip), compiled.executions

    def run(self, launch: Walk, addresses: np.ndarray, budget: float, lot: np.random.Generator, skip: Skip) -> Estimate:
        """One launch, sampled where it has more than ``budget`` accesses.

        Args:
            launch: compiled.
            addresses: byte address of each operand.
            budget: accesses.
            lot: places stretches.
            skip: warms the caches for work groups that are not walked.
        """
        if launch.executions <= budget:
            return Estimate.exact(self.walked(launch, addresses, 0, launch.groups))
        per_group = launch.executions / max(launch.groups, 1)
        head, *stretches = planned_stretches(launch.groups, budget / per_group, self.hierarchy.cores, lot)
        first = self.walked(launch, addresses, 0, head.last)
        if not stretches:
            return Estimate.exact(first)
        at, found, groups = head.last, [], head.last
        for stretch in stretches:
            pushed_out = skip(at, stretch.run_up)
            if at == head.last:  # what the launches before had stored and not yet written back
                first[:, -1] += (pushed_out * first[:, 1] / max(first[:, 1].sum(), 1)).astype(np.int64)
            self.walked(launch, addresses, stretch.run_up, stretch.first)
            found.append(self.walked(launch, addresses, stretch.first, stretch.last))
            at = stretch.last
            groups += stretch.last - stretch.run_up
        skip(at, launch.groups)
        return extrapolated(first, found, [s.scale for s in stretches], groups / launch.groups)

    def walked(self, launch: Walk, addresses: np.ndarray, first: int, last: int) -> np.ndarray:
        """Counters [operands, columns] of work groups ``first`` to ``last`` (excluded) of a launch."""
        counts = np.zeros((addresses.size, self.width), dtype=np.int64)
        if last > first:
            schedule = schedule_of(self.model, launch.items)
            walk(launch, self._state, addresses, counts, first, last, self.hierarchy.cores, self.wave, schedule)
        return counts

    def skipper(self, kernel: Kernel, launch: Launch, addresses: np.ndarray) -> Skip:
        """What ``run`` takes to skip work groups of a launch."""

        def skip(first: int, last: int) -> float:
            return self.skip([(kernel, launch, addresses, first, last)])

        return skip

    def skip(self, runs: Sequence[tuple[Kernel, Launch, np.ndarray, int, int]]) -> float:
        """Leave in the caches what work groups that are not walked would, of several launches one after the other.

        Args:
            runs: kernel, launch, byte address of each operand, first group and end of the groups.

        Returns:
            Bytes that were in the caches before, had been stored to, and are written to memory for it.
        """
        outer = self.hierarchy.levels[-1]
        capacity = outer.size_bytes // outer.line_bytes
        found: list[tuple[np.ndarray, list[Box]]] = []
        for kernel, launch, addresses, first, last in reversed(runs):
            if first >= last or capacity <= 0:
                continue  # nothing is skipped, or later launches fill the last cache
            boxes = latest(kernel, launch, first, last, capacity, outer.line_bytes)
            found.append((addresses, boxes))
            capacity -= sum(box.lines for box in boxes)
        before = self._scratch[-1]
        for addresses, boxes in reversed(found):
            warm(self._state, self.hierarchy, addresses, boxes, self._scratch)
        # Beyond what the cache holds, the lines that go are those that came just now.
        boxes = [box for _, own_boxes in found for box in own_boxes]
        lines = sum(box.lines for box in boxes)
        stored = sum(box.lines for box in boxes if box.write) / max(lines, 1)
        holds = outer.size_bytes // outer.line_bytes
        again = max(min(lines, int(ENOUGH * holds)) - holds, 0) * stored * outer.line_bytes
        pushed_out = max(float(self._scratch[-1] - before) - again, 0.0)
        own = self._large_private
        if own is None or not found or self.hierarchy.cores > _MOST_WARMED:
            return pushed_out
        # Each core has run its share of the latest groups, which read mostly the same lines.
        kernel, launch, addresses, first, last = next(run for run in reversed(runs) if run[3] < run[4])
        capacity = own.size_bytes // outer.line_bytes
        boxes = latest(kernel, launch, first, last, capacity, outer.line_bytes)
        for core in range(self.hierarchy.cores):
            warm(self._state, self.hierarchy, addresses, boxes, self._scratch, core)
        return pushed_out

    @property
    def _large_private(self) -> Level | None:
        """The last cache of each core beside its first, as a CPU has."""
        return next((level for level in self.hierarchy.levels[:0:-1] if not level.shared), None)


_MOST_WARMED = 32
"""Cores whose second cache is warmed one by one."""
Skip = Callable[[int, int], float]


def simulate(
    graph: TrainingGraph,
    plan: Plan,
    model: DeviceModel,
    *,
    max_accesses: float = 2_000_000,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CacheReport:
    """Walk one step of ``plan``.

    Args:
        graph: the plan's graph.
        plan: what runs.
        model: whose caches and wave width.
        max_accesses: per launch, beyond which its work groups are sampled.
        repeats: of steps that run the same kernel after the same kernel so many are simulated; 0 for all.
        seed: of the sample, and of the made-up values of integer inputs that steer gathers (token ids).
        progress: called with (steps done, steps).

    Returns:
        The report.

    Raises:
        DeviceError: the model has no caches.
        LayoutOptError: ``max_accesses`` or ``repeats`` make no sample.
    """
    sampling = Sampling(max_accesses, repeats, seed)
    graph = planned_graph(plan, graph)
    steps = bind(graph, plan, model.limits)
    caches = Caches(model, any(launch.images for step in steps for launch in step.kernel.launches))
    keys = _classes(steps)
    chosen = chosen_members(keys, sampling.repeats, seed)
    found: list[Estimate | None] = []
    skipped: list[tuple[Kernel, Launch, np.ndarray, int, int]] = []
    for number, step in enumerate(steps):
        addresses = arena_addresses(plan, step)
        if chosen[number]:
            caches.skip(skipped)
            skipped = []
            found.append(_simulated(graph, step, caches, addresses, sampling, number))
        else:
            skipped += [(step.kernel, x, addresses, 0, x.nest.groups) for x in step.kernel.launches]
            found.append(None)
        if progress:
            progress(number + 1, len(steps))
    return _report(steps, keys, found, caches, model, plan.solver.strategy)


def _classes(steps: Sequence[BoundStep]) -> list[tuple[str, str, str]]:
    """What makes steps equal: phase, kernel, and the kernel before, which left the caches as they are."""
    kernels = ["", *(step.kernel.key for step in steps)]
    return [(step.phase, own, before) for step, own, before in zip(steps, kernels[1:], kernels, strict=False)]


def _simulated(
    graph: TrainingGraph, step: BoundStep, caches: Caches, addresses: np.ndarray, sampling: Sampling, number: int
) -> Estimate:
    steer = made_up_ids(graph, step, sampling.seed)
    parts, weights = [], []
    for launch_number, launch in enumerate(step.kernel.launches):
        lot = np.random.default_rng([sampling.seed, number, launch_number])
        part, executions = caches.launch(step.kernel, launch, addresses, steer, sampling.max_accesses, lot)
        parts.append(part)
        weights.append(executions)
    walked = sum(w * p.walked for w, p in zip(weights, parts, strict=True)) / max(sum(weights), 1)
    return Estimate(
        np.sum([p.counts for p in parts], axis=0),
        np.sum([p.variance for p in parts], axis=0),
        np.sum([p.total_variance for p in parts], axis=0),
        walked,
    )


class _Sums:
    """Rows and variances by name."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}

    def add(self, key: str, row: np.ndarray, variance: np.ndarray) -> None:
        if key in self._rows:
            self._rows[key][0] += row
            self._rows[key][1] += variance
        else:
            self._rows[key] = [row.copy(), variance.copy()]

    def counts(self) -> dict[str, Counts]:
        return {key: Counts.of(row, variance) for key, (row, variance) in self._rows.items()}


def _report(
    steps: Sequence[BoundStep],
    keys: Sequence[tuple[str, str, str]],
    found: Sequence[Estimate | None],
    caches: Caches,
    model: DeviceModel,
    strategy: str,
) -> CacheReport:
    classes: dict[tuple[str, str, str], list[int]] = {}
    for number, key in enumerate(keys):
        classes.setdefault(key, []).append(number)
    guesses, by_step, by_tensor, by_phase, total = {}, _Sums(), _Sums(), _Sums(), _Sums()
    for key, members in classes.items():
        guesses[key], variance = spread_class([e for n in members if (e := found[n]) is not None], len(members))
        nothing = np.zeros(caches.width)
        total.add("", nothing, variance)
        by_phase.add(key[0], nothing, variance)
    operands = []
    alike: dict[tuple[str, str], int] = {}
    walked = executed = 0.0
    for step, key, own in zip(steps, keys, found, strict=True):
        estimate = own or guesses[key]
        row = estimate.total
        nothing = np.zeros(caches.width)
        total.add("", row, nothing)
        by_phase.add(step.phase, row, nothing)
        by_step.add(step.label, row, estimate.total_variance)
        walked += row[0] * estimate.walked
        executed += row[0]
        group = alike.setdefault(key[:2], len(alike))
        for position, storage in enumerate(step.storages):
            one, variance = estimate.counts[position], estimate.variance[position]
            by_tensor.add(storage or "(workspace)", one, variance)
            operands.append(_operand(step, position, group, Counts.of(one, variance)))
    return CacheReport(
        tuple(level.name for level in caches.hierarchy.levels),
        total.counts()[""] if steps else Counts.of(np.zeros(caches.width)),
        by_step.counts(),
        by_tensor.counts(),
        _in_order(by_phase.counts(), [step.phase for step in steps]),
        tuple(operands),
        walked / executed if executed else 1.0,
        sum(e is not None for e in found),
        model.name,
        model.origin == "modelled",
        strategy,
    )


def _in_order(counts: Mapping[str, Counts], names: Sequence[str]) -> dict[str, Counts]:
    return {name: counts[name] for name in dict.fromkeys(names)}


def _operand(step: BoundStep, position: int, alike: int, counts: Counts) -> OperandCounts:
    return OperandCounts(
        step.label,
        step.op.kind if step.op else "relayout",
        step.phase,
        position,
        step.storages[position] or "(workspace)",
        step.kernel.buffer_layout(position).describe(),
        position >= step.kernel.spec.inputs,
        alike,
        counts,
    )


@lru_cache(maxsize=4)
def _places(arena: tuple[ArenaSlot, ...]) -> dict[str, int]:
    return {slot.name: _PAGE + slot.offset_bytes for slot in arena}


def arena_addresses(plan: Plan, step: BoundStep) -> np.ndarray:
    """Byte address of each operand of a step, its workspaces after them, in an arena that begins at a page."""
    where = _places(plan.arena)
    return np.array([where[slot] for slot in step.slots], dtype=np.int64)


def steered(kernel: Kernel) -> dict[int, int]:
    """The integer operands of a kernel that steer its accesses, with what their values stay below."""
    limits: dict[int, int] = {}
    for launch, access in ((x, a) for x in kernel.launches for p in x.nest.phases for a in (*p.accesses, *p.border)):
        shape = kernel.launch_layout(launch, access.operand).shape
        for axis, coordinate in enumerate(access.index):
            if isinstance(coordinate, Data):
                limit = shape[axis] if coordinate.via is None else coordinate.via.places
                limits[coordinate.operand] = min(limits.get(coordinate.operand, limit), limit)
    return limits


def made_up_ids(graph: TrainingGraph, step: BoundStep, seed: int) -> dict[int, np.ndarray]:
    """Values of a step's integer operands that steer accesses, by position: constants as they are, else uniform."""
    limits = steered(step.kernel)
    out = {}
    for position, limit in limits.items():
        known = graph.constants.get(step.storages[position])
        shape = step.kernel.operand_layout(position).shape
        # The same storage must steer forward and backward alike, whatever the step.
        rng = np.random.default_rng([seed, *step.storages[position].encode()])
        out[position] = rng.integers(0, limit, shape) if known is None else np.broadcast_to(np.asarray(known), shape)
    return out
