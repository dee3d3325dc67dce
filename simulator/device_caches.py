"""The caches of a device model in use: kernels' launches run through them, whole or sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from costmodel.device import DeviceModel
from kernels.spec import Kernel, Launch
from layoutopt.errors import DeviceError
from simulator.cache import Hierarchy, Level, State
from simulator.counts import Columns, Estimate, summing_to
from simulator.dirty import dirty_bytes
from simulator.sampling import extrapolated, planned_stretches
from simulator.trace import Schedule, TexelBlock, Walk, compile_launch, walk
from simulator.warming import Box, latest, warm

__all__ = ["Caches", "hierarchy_of", "schedule_of", "texel_block_of"]

Skip = Callable[[int, int], None]
_MOST_WARMED = 32
"""Cores whose second cache is warmed one by one."""
_REACH = 3
"""How far back steps that are skipped are touched, in lines over those that the last level holds."""


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
        if not stretches:
            return Estimate.exact(self.walked(launch, addresses, 0, head.last))
        begun = self.dirty_bytes
        first = self._dirtied(launch, addresses, 0, head.last)
        at, found, groups = head.last, [], head.last
        for stretch in stretches:
            skip(at, stretch.run_up)
            self.walked(launch, addresses, stretch.run_up, stretch.first)
            found.append(self._dirtied(launch, addresses, stretch.first, stretch.last))
            at = stretch.last
            groups += stretch.last - stretch.run_up
        skip(at, launch.groups)
        dirtied = extrapolated(first, found, [s.scale for s in stretches], groups / launch.groups)
        written = dirtied.total[self.columns.written] + begun - self.dirty_bytes
        return dirtied.summing_to(self.columns.written, written)

    @property
    def dirty_bytes(self) -> int:
        """What was stored and memory does not have yet."""
        return dirty_bytes(self._state)

    def _dirtied(self, launch: Walk, addresses: np.ndarray, first: int, last: int) -> np.ndarray:
        """As ``walked``, with what the groups dirtied in place of what was written to memory meanwhile."""
        before = self.dirty_bytes
        counts = self.walked(launch, addresses, first, last)
        dirtied = counts[:, self.columns.written].sum() + self.dirty_bytes - before
        return summing_to(counts, self.columns.written, dirtied)

    def walked(self, launch: Walk, addresses: np.ndarray, first: int, last: int) -> np.ndarray:
        """Counters [operands, columns] of work groups ``first`` to ``last`` (excluded) of a launch."""
        counts = np.zeros((addresses.size, self.columns.width), dtype=np.int64)
        if last > first:
            schedule = schedule_of(self.model, launch.items)
            walk(launch, self._state, addresses, counts, first, last, self.hierarchy.cores, self.wave, schedule)
        return counts

    def skipper(self, kernel: Kernel, launch: Launch, addresses: np.ndarray) -> Skip:
        """What ``run`` takes to skip work groups of a launch."""

        def skip(first: int, last: int) -> None:
            self.skip([(kernel, launch, addresses, first, last)])

        return skip

    def skip(self, runs: Sequence[tuple[Kernel, Launch, np.ndarray, int, int]]) -> None:
        """Leave in the caches what work groups that are not walked would, of several launches one after the other.

        Args:
            runs: kernel, launch, byte address of each operand, first group and end of the groups.
        """
        outer = self.hierarchy.levels[-1]
        # What was stored before what fills the cache, and is read again since, is dirty there.
        capacity = outer.size_bytes // outer.line_bytes * (_REACH if len(runs) > 1 else 1)
        found: list[tuple[np.ndarray, list[Box]]] = []
        for kernel, launch, addresses, first, last in reversed(runs):
            if first >= last or capacity <= 0:
                continue  # nothing is skipped, or later launches fill the last cache
            boxes = latest(kernel, launch, first, last, capacity, outer.line_bytes)
            found.append((addresses, boxes))
            capacity -= sum(box.lines for box in boxes)
        for addresses, boxes in reversed(found):
            warm(self._state, self.hierarchy, addresses, boxes, self._scratch)
        own = self._large_private
        if own is None or not found or self.hierarchy.cores > _MOST_WARMED:
            return
        # Each core has run its share of the latest groups, which read mostly the same lines.
        kernel, launch, addresses, first, last = next(run for run in reversed(runs) if run[3] < run[4])
        capacity = own.size_bytes // outer.line_bytes
        boxes = latest(kernel, launch, first, last, capacity, outer.line_bytes)
        for core in range(self.hierarchy.cores):
            warm(self._state, self.hierarchy, addresses, boxes, self._scratch, core)

    @property
    def _large_private(self) -> Level | None:
        """The last cache of each core beside its first, as a CPU has."""
        return next((level for level in self.hierarchy.levels[:0:-1] if not level.shared), None)
