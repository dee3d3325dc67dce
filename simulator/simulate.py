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
from layoutopt.graph import TrainingGraph
from layoutopt.plan import ArenaSlot, Plan
from layoutopt.rewrites import planned_graph
from simulator.counts import Counts, Estimate
from simulator.device_caches import Caches, hierarchy_of, schedule_of, texel_block_of
from simulator.sampling import Sampling, chosen_members, spread_class

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
        nothing = np.zeros(caches.columns.width)
        total.add("", nothing, variance)
        by_phase.add(key[0], nothing, variance)
    operands = []
    alike: dict[tuple[str, str], int] = {}
    walked = executed = 0.0
    for step, key, own in zip(steps, keys, found, strict=True):
        estimate = own or guesses[key]
        row = estimate.total
        nothing = np.zeros(caches.columns.width)
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
        total.counts()[""] if steps else Counts.of(np.zeros(caches.columns.width)),
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
