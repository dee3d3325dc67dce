"""Simulate a plan: every step's addresses through the device model's caches, summed per op, tensor, operand and phase.

Long launches and repeated steps are sampled (``simulator/sampling.py``); the report says what share of the accesses was
really walked and how far the totals may be off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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
from simulator.counts import Counts, Estimate, Variance
from simulator.device_caches import Caches, hierarchy_of, schedule_of, texel_block_of
from simulator.sampling import Sampling, chosen_members, guessed_member, spread_classes

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

    def _repr_html_(self) -> str:
        from simulator.display import report_html

        return report_html(self)


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
    walked = _Walked()
    skipped: list[int] = []
    held = 0
    for number, step in enumerate(steps):
        if not chosen[number]:
            skipped.append(number)
        else:
            held = walked.cross(skipped, held, steps, plan, caches)
            skipped = []
            estimate = _simulated(graph, step, caches, arena_addresses(plan, step), sampling, number)
            grown, held = caches.dirty_bytes - held, caches.dirty_bytes
            walked.add(number, estimate, caches.columns.written, grown)
        if progress:
            progress(number + 1, len(steps))
    walked.cross(skipped, held, steps, plan, caches)
    return _report(steps, keys, walked, caches, model, plan.solver.strategy)


class _Walked:
    """Steps that were simulated, by position, and those in between.

    Attributes:
        found: their counters.
        dirtied: the same with what they dirtied in place of what was written to memory meanwhile.
        gaps: steps that were skipped one after the other, and by how many bytes more was dirty after them than before.
    """

    def __init__(self) -> None:
        self.found: dict[int, Estimate] = {}
        self.dirtied: dict[int, Estimate] = {}
        self.gaps: list[tuple[list[int], int]] = []

    def add(self, number: int, estimate: Estimate, column: int, grown: int) -> None:
        """A step that was simulated; ``grown``: by how many bytes more is dirty since."""
        self.found[number] = estimate
        self.dirtied[number] = estimate.summing_to(column, estimate.total[column] + grown)

    def cross(self, skipped: list[int], held: int, steps: Sequence[BoundStep], plan: Plan, caches: Caches) -> int:
        """Leave in the caches what skipped steps would; returns the bytes that are dirty then."""
        if not skipped:
            return held
        runs: list[tuple[Kernel, Launch, np.ndarray, int, int]] = []
        for number in skipped:
            step = steps[number]
            addresses = arena_addresses(plan, step)
            runs += [(step.kernel, x, addresses, 0, x.nest.groups) for x in step.kernel.launches]
        caches.skip(runs)
        self.gaps.append((skipped, caches.dirty_bytes - held))
        return caches.dirty_bytes

    def estimates(self, keys: Sequence[Hashable], column: int) -> list[Estimate]:
        """Of all steps in order: those that were skipped are taken for the mean of their class."""
        classes: dict[Hashable, list[Estimate]] = {}
        for number, own in self.dirtied.items():
            classes.setdefault(keys[number], []).append(own)
        out = dict(self.found)
        for skipped, grown in self.gaps:
            guesses = {number: guessed_member(classes[keys[number]]) for number in skipped}
            dirtied = sum(guess.total[column] for guess in guesses.values())
            share = max(1.0 - grown / dirtied, 0.0) if dirtied else 0.0
            for number, guess in guesses.items():
                out[number] = guess.summing_to(column, guess.total[column] * share)
        return [out[number] for number in range(len(keys))]


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
        sum((p.variance for p in parts), Variance.none(parts[0].counts.shape)),
        sum((p.total_variance for p in parts), Variance.none(parts[0].total.shape)),
        walked,
    )


class _Sums:
    """Rows, their variances and what of them was extrapolated, by name."""

    def __init__(self, width: int) -> None:
        self._nothing = np.zeros(width), Variance.none((width,)), np.zeros(width)
        self._rows: dict[str, tuple[np.ndarray, Variance, np.ndarray]] = {}

    def add(self, key: str, row: np.ndarray, variance: Variance, extrapolated: np.ndarray) -> None:
        known, before, rest = self._rows.get(key, self._nothing)
        self._rows[key] = known + row, before + variance, rest + extrapolated

    def counts(self) -> dict[str, Counts]:
        return {key: Counts.of(*own) for key, own in self._rows.items()}


def _report(
    steps: Sequence[BoundStep],
    keys: Sequence[tuple[str, str, str]],
    found: _Walked,
    caches: Caches,
    model: DeviceModel,
    strategy: str,
) -> CacheReport:
    width = caches.columns.width
    nothing, certain = np.zeros(width), Variance.none((width,))
    classes: dict[tuple[str, str, str], list[int]] = {}
    for number, key in enumerate(keys):
        classes.setdefault(key, []).append(number)
    sampled = {k: ([found.dirtied[n] for n in own if n in found.dirtied], len(own)) for k, own in classes.items()}
    by_step, by_tensor, by_phase, total = (_Sums(width) for _ in range(4))
    total.add("", nothing, spread_classes(sampled.values(), width), nothing)
    for phase in dict.fromkeys(key[0] for key in keys):
        spread = spread_classes((own for k, own in sampled.items() if k[0] == phase), width)
        by_phase.add(phase, nothing, spread, nothing)
    operands = []
    alike: dict[tuple[str, str], int] = {}
    walked = executed = 0.0
    estimates = found.estimates(keys, caches.columns.written)
    for step, key, estimate in zip(steps, keys, estimates, strict=True):
        row, rest = estimate.total, estimate.extrapolated
        total.add("", row, certain, rest.sum(0))
        by_phase.add(step.phase, row, certain, rest.sum(0))
        by_step.add(step.label, row, estimate.total_variance, rest.sum(0))
        walked += row[0] * estimate.walked
        executed += row[0]
        group = alike.setdefault(key[:2], len(alike))
        for position, storage in enumerate(step.storages):
            own = estimate.counts[position], estimate.variance[position], rest[position]
            by_tensor.add(storage or "(workspace)", *own)
            operands.append(_operand(step, position, group, Counts.of(*own)))
    return CacheReport(
        tuple(level.name for level in caches.hierarchy.levels),
        total.counts()[""],
        by_step.counts(),
        by_tensor.counts(),
        _in_order(by_phase.counts(), [step.phase for step in steps]),
        tuple(operands),
        walked / executed if executed else 1.0,
        len(found.found),
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
