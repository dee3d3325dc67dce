"""The caches of a device model in use: kernels' launches run through them, whole or sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from costmodel.device import DeviceModel
from kernels.spec import Kernel, Launch
from layoutopt.errors import DeviceError
from simulator.cache import Hierarchy, Level, State
from simulator.counts import Columns, Estimate
from simulator.sampling import extrapolated, planned_stretches
from simulator.trace import Schedule, TexelBlock, Walk, compile_launch, walk
from simulator.warming import ENOUGH, Box, latest, warm

__all__ = ["Caches", "hierarchy_of", "schedule_of", "texel_block_of"]

Skip = Callable[[int, int], float]
_MOST_WARMED = 32
"""Cores whose second cache is warmed one by one."""


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
        self.columns = Columns(len(self.hierarchy.levels))
        self.model = model
        self._state: State = self.hierarchy.state()
        self._scratch = np.zeros(self.columns.width - 3, dtype=np.int64)

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
                first[:, self.columns.written] += (pushed_out * first[:, 1] / max(first[:, 1].sum(), 1)).astype(
                    np.int64
                )
            self.walked(launch, addresses, stretch.run_up, stretch.first)
            found.append(self.walked(launch, addresses, stretch.first, stretch.last))
            at = stretch.last
            groups += stretch.last - stretch.run_up
        skip(at, launch.groups)
        return extrapolated(first, found, [s.scale for s in stretches], groups / launch.groups)

    def walked(self, launch: Walk, addresses: np.ndarray, first: int, last: int) -> np.ndarray:
        """Counters [operands, columns] of work groups ``first`` to ``last`` (excluded) of a launch."""
        counts = np.zeros((addresses.size, self.columns.width), dtype=np.int64)
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
        before = self._written_uncounted
        for addresses, boxes in reversed(found):
            warm(self._state, self.hierarchy, addresses, boxes, self._scratch)
        # Beyond what the cache holds, the lines that go are those that came just now.
        boxes = [box for _, own_boxes in found for box in own_boxes]
        lines = sum(box.lines for box in boxes)
        stored = sum(box.lines for box in boxes if box.write) / max(lines, 1)
        holds = outer.size_bytes // outer.line_bytes
        again = max(min(lines, int(ENOUGH * holds)) - holds, 0) * stored * outer.line_bytes
        # Where less than the cache is touched, what was there goes bit by bit, and the stretches see it go.
        pushed_out = max(float(self._written_uncounted - before) - again, 0.0) if lines >= holds else 0.0
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
    def _written_uncounted(self) -> int:
        """Bytes written to memory for groups that were not walked."""
        return int(self._scratch[self.columns.written - 3])

    @property
    def _large_private(self) -> Level | None:
        """The last cache of each core beside its first, as a CPU has."""
        return next((level for level in self.hierarchy.levels[:0:-1] if not level.shared), None)
