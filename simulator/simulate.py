"""Simulate a plan: every step's addresses through the device model's caches, summed per op, tensor and phase.

Long launches are sampled by work groups: a head of consecutive groups warms the caches and is counted as it is, the
next stretch is counted for all the rest. The report says what share of the accesses was really walked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.device import DeviceModel
from kernels.bind import BoundStep, bind
from kernels.nest import Data
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph
from simulator.cache import Hierarchy, Level
from simulator.trace import Walk, compile_launch, walk

__all__ = ["CacheReport", "Counts", "hierarchy_of", "simulate"]

_PAGE = 4096


@dataclass(frozen=True)
class Counts:
    """Counters of a set of accesses.

    Attributes:
        accesses: load and store instructions of work items.
        lines: line accesses that reach the first level (coalesced over a wave).
        bytes_asked: bytes that the instructions move.
        hits: per level, nearest first.
        misses: per level.
        memory_read_bytes: lines fetched from memory.
        memory_written_bytes: lines written back to memory.
    """

    accesses: float
    lines: float
    bytes_asked: float
    hits: tuple[float, ...]
    misses: tuple[float, ...]
    memory_read_bytes: float
    memory_written_bytes: float

    @staticmethod
    def of(row: np.ndarray) -> Counts:
        """From the walker's counters [3 + 2 * levels + 2]."""
        levels = row[3:-2]
        return Counts(
            float(row[0]),
            float(row[1]),
            float(row[2]),
            tuple(float(x) for x in levels[0::2]),
            tuple(float(x) for x in levels[1::2]),
            float(row[-2]),
            float(row[-1]),
        )

    @property
    def hit_rates(self) -> tuple[float, ...]:
        """Hits over accesses of each level (1 for a level nothing reached)."""
        return tuple(h / (h + m) if h + m else 1.0 for h, m in zip(self.hits, self.misses, strict=True))


@dataclass(frozen=True)
class CacheReport:
    """What a simulated step did to the caches.

    Attributes:
        levels: names, nearest first.
        total: of the step.
        by_step: per plan step (op or relayout), in order.
        by_tensor: per storage.
        by_phase: forward, loss, backward, update.
        walked: share of the accesses that were walked rather than extrapolated.
        device: name of the device model.
        modelled: the caches come from public facts rather than from this device.
    """

    levels: tuple[str, ...]
    total: Counts
    by_step: Mapping[str, Counts]
    by_tensor: Mapping[str, Counts]
    by_phase: Mapping[str, Counts]
    walked: float
    device: str
    modelled: bool


def hierarchy_of(model: DeviceModel, images: bool = False) -> Hierarchy:
    """The caches of a device model.

    Args:
        model: states them.
        images: with those that serve only what is read through images.

    Raises:
        DeviceError: the model says nothing of its caches, or of none that both ways pass.
    """
    levels = tuple(
        Level(c.name, c.sets * c.ways * c.line_bytes, c.line_bytes, c.ways, c.shared, c.serves)
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
    return Hierarchy(levels, max(model.limits.compute_units, 1))


def simulate(
    graph: TrainingGraph,
    plan: Plan,
    model: DeviceModel,
    *,
    max_accesses: int = 400_000,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CacheReport:
    """Walk one step of ``plan``.

    Args:
        graph: the plan's graph.
        plan: what runs.
        model: whose caches and wave width.
        max_accesses: per launch, beyond which its work groups are sampled.
        seed: of the made-up values of integer inputs that steer gathers (token ids).
        progress: called with (steps done, steps).

    Returns:
        The report.
    """
    graph = planned_graph(plan, graph)
    steps = bind(graph, plan, model.limits)
    hierarchy = hierarchy_of(model, any(launch.images for step in steps for launch in step.kernel.launches))
    state = hierarchy.state()
    wave = model.limits.simd_width if model.limits.kind == "gpu" else 1
    address = {slot.name: _PAGE + slot.offset_bytes for slot in plan.arena}
    width = 3 + 2 * len(hierarchy.levels) + 2
    per_step: dict[str, np.ndarray] = {}
    per_tensor: dict[str, np.ndarray] = {}
    per_phase: dict[str, np.ndarray] = {}
    executed, walked = 0.0, 0.0
    for number, step in enumerate(steps):
        counts = np.zeros((len(step.slots), width))
        addresses = np.array([address[slot] for slot in step.slots], dtype=np.int64)
        steer = _made_up_ids(graph, step, seed)
        for launch in step.kernel.launches:
            compiled = compile_launch(step.kernel, launch, steer)
            got, share = _sampled(compiled, state, addresses, counts.shape, hierarchy.cores, wave, max_accesses)
            counts += got
            executed += compiled.executions
            walked += compiled.executions * share
        _add(per_step, step.label, counts.sum(0))
        _add(per_phase, step.phase, counts.sum(0))
        for storage, row in zip(step.storages, counts, strict=True):
            _add(per_tensor, storage or "(workspace)", row)
        if progress:
            progress(number + 1, len(steps))
    total = sum(per_step.values(), np.zeros(width))
    return CacheReport(
        tuple(level.name for level in hierarchy.levels),
        Counts.of(total),
        _counts(per_step),
        _counts(per_tensor),
        _counts(per_phase),
        walked / executed if executed else 1.0,
        model.name,
        model.origin == "modelled",
    )


def _sampled(
    launch: Walk,
    state: object,
    addresses: np.ndarray,
    shape: tuple[int, ...],
    cores: int,
    wave: int,
    max_accesses: int,
) -> tuple[np.ndarray, float]:
    """Counters of a launch, extrapolated beyond ``max_accesses``, and the share of its groups that was walked."""
    head = np.zeros(shape, dtype=np.int64)
    if launch.executions <= max_accesses or launch.groups < 4 * cores:
        walk(launch, state, addresses, head, 0, launch.groups, cores, wave)  # type: ignore[arg-type]
        return head.astype(float), 1.0
    per_group = launch.executions / launch.groups
    half = max(int(max_accesses / per_group / 2) // cores, 1) * cores
    if 2 * half >= launch.groups:
        walk(launch, state, addresses, head, 0, launch.groups, cores, wave)  # type: ignore[arg-type]
        return head.astype(float), 1.0
    walk(launch, state, addresses, head, 0, half, cores, wave)  # type: ignore[arg-type]
    tail = np.zeros(shape, dtype=np.int64)
    walk(launch, state, addresses, tail, half, 2 * half, cores, wave)  # type: ignore[arg-type]
    return head + tail * ((launch.groups - half) / half), 2 * half / launch.groups


def _made_up_ids(graph: TrainingGraph, step: BoundStep, seed: int) -> dict[int, np.ndarray]:
    """Values of a step's integer operands that steer accesses, by position: constants as they are, else uniform."""
    limits: dict[int, int] = {}
    launches = step.kernel.launches
    for launch, access in ((x, a) for x in launches for phase in x.nest.phases for a in phase.accesses):
        shape = step.kernel.launch_layout(launch, access.operand).shape
        for axis, coordinate in enumerate(access.index):
            if isinstance(coordinate, Data):
                limits[coordinate.operand] = min(limits.get(coordinate.operand, shape[axis]), shape[axis])
    out = {}
    for position, limit in limits.items():
        known = graph.constants.get(step.storages[position])
        shape = step.kernel.operand_layout(position).shape
        # The same storage must steer forward and backward alike, whatever the step.
        rng = np.random.default_rng([seed, *step.storages[position].encode()])
        out[position] = rng.integers(0, limit, shape) if known is None else np.broadcast_to(np.asarray(known), shape)
    return out


def _add(into: dict[str, np.ndarray], key: str, row: np.ndarray) -> None:
    into[key] = into[key] + row if key in into else row.copy()


def _counts(rows: Mapping[str, np.ndarray]) -> dict[str, Counts]:
    return {key: Counts.of(row) for key, row in rows.items()}
