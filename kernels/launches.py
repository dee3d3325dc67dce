"""From the steps of a plan to what is enqueued: kernels built, and bound to the arena once.

Steps share launches where they may. Equal kernels side by side are stacked into one grid (``kernels/group.py``); equal
pointwise programs, over whatever shapes, become rows of one table (``kernels/batch.py``). Every other step has launches
of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kernels.batch import linear, merge_steps, moved_bytes, schedule
from kernels.bind import BoundStep
from kernels.group import alike_steps, stacked_size, stacked_source
from kernels.regions import Regions
from kernels.runtime import Runtime
from kernels.source import program_source
from kernels.spec import DeviceLimits
from layoutopt.errors import GraphError
from layoutopt.plan import ArenaSlot

__all__ = ["Call", "Launches", "Part", "launch_order"]

Call = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""A kernel with its arguments set, global and local size."""

Members = tuple[int, ...]
"""Positions of steps that are launched together."""


@dataclass(frozen=True, eq=False)
class Part:
    """Steps that are launched together.

    Attributes:
        members: their positions in the plan.
        calls: launches, in order.
        shares: by member, its part of each call's time.
    """

    members: Members
    calls: tuple[Call, ...]
    shares: tuple[float, ...]

    def intervals(self, times_ns: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """By member, (start, end) of each launch; one that is shared is cut up in the order of the members.

        Args:
            times_ns: (start, end) of the calls.
        """
        ends = np.cumsum([0.0, *self.shares])
        cuts = [list(pairwise(begin + round(float(at) * (end - begin)) for at in ends)) for begin, end in times_ns]
        return [[cut[k] for cut in cuts] for k in range(len(self.members))]


def launch_order(steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot], limits: DeviceLimits) -> list[Members]:
    """Which steps of a plan are launched together, in the order in which they are launched.

    Args:
        steps: of the plan.
        slots: of its arena, by name.
        limits: of the device.
    """
    return _scheduled(_runs(steps, slots), steps, slots, limits)


def _runs(steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot]) -> list[Members]:
    return [tuple(run) for run in alike_steps(steps, slots)]


def _scheduled(
    runs: Sequence[Members], steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot], limits: DeviceLimits
) -> list[Members]:
    # On a CPU what the step before has just written is warm, which is worth more than a launch.
    return schedule(runs, steps, slots, delay=limits.kind == "gpu")


class Launches:
    """The launches of a plan's steps.

    Args:
        runtime: the device.
        steps: bound to their kernels.
        slots: of the arena.
        arena: the device's buffer.
        regions: of the arena, by slot name.
        limits: of the device.
        share: let steps share launches where they may.
        subset: positions of the steps that must also run without the others.
        beside: (source, label) of what is to be built in one go with them.

    Attributes:
        all: parts in order.
        tables: buffers that kernels read.
        images: over regions that kernels read as images, and the other arguments of those kernels.
        some: the same of ``subset``; steps that share a stacked launch with one of it are in it.

    Raises:
        GraphError: a step's operand has no slot of its size.
        DeviceError: a kernel does not build.
    """

    def __init__(
        self,
        runtime: Runtime,
        steps: Sequence[BoundStep],
        slots: Mapping[str, ArenaSlot],
        arena: Any,
        regions: Regions,
        limits: DeviceLimits,
        share: bool,
        subset: Collection[int],
        beside: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.runtime, self.steps, self.slots, self.arena, self.regions = runtime, steps, slots, arena, regions
        self.limits = limits
        self.tables: list[Any] = []
        self.images: list[Any] = []
        self._beside = beside
        for step in steps:
            self._check_slots(step)
        runs = _runs(steps, slots) if share else [(i,) for i in range(len(steps))]
        order = self._order(runs, share)
        wanted = [
            tuple(i for i in run if i in subset or linear(steps[i].kernel) is None)
            for run in runs
            if any(i in subset for i in run)
        ]
        partly = self._order(wanted, share)
        parts = self._build(list(dict.fromkeys([*order, *partly])))
        self.all: tuple[Part, ...] = tuple(parts[members] for members in order)
        self.some: tuple[Part, ...] = tuple(parts[members] for members in partly)

    def _order(self, runs: Sequence[Members], share: bool) -> list[Members]:
        return _scheduled(runs, self.steps, self.slots, self.limits) if share else list(runs)

    def _build(self, order: Sequence[Members]) -> dict[Members, Part]:
        """Everything that is launched, its sources built in one go."""
        merged = {
            members: merge_steps(members, self.steps, self.slots, self.limits)
            for members in order
            if len(members) > 1 and linear(self.steps[members[0]].kernel) is not None
        }
        sources: dict[tuple[str, int, bool], tuple[str, str]] = {}
        for members in order:
            if members not in merged:
                sources |= self._sources(self.steps[members[0]], self._by_place(members), sources)
        self.runtime.prepare([*sources.values(), *((m.source, m.label) for m in merged.values()), *self._beside])
        parts = {}
        for members in order:
            if members in merged:
                batch = merged[members]
                call = self.runtime.kernel(batch.source, "batch", batch.label)
                call.set_args(self.arena, self._table(batch.rows), self._table(batch.groups))
                moved = np.array([moved_bytes(self.steps[i]) for i in members], np.float64)
                shares = tuple(float(x) for x in moved / moved.sum())
                parts[members] = Part(members, ((call, batch.global_size, batch.local_size),), shares)
                continue
            first = self.steps[members[0]]
            kernel, by_place = first.kernel, self._by_place(members)
            calls: list[Call] = []
            for i, launch in enumerate(kernel.launches):
                source, label = sources[kernel.key, i, by_place]
                call = self.runtime.kernel(source, launch.entry, label)
                if by_place:
                    slots = [self.slots[self.steps[m].slots[p]] for m in members for _, p in launch.operands]
                    places = self._table(np.array([s.offset_bytes for s in slots], np.uint64))
                    call.set_args(*[self.arena] * len(launch.operands), places)
                    calls.append((call, *stacked_size(launch, len(members))))
                else:
                    buffers = [self.regions[name] for name in first.slots]
                    arguments = self.runtime.arguments(kernel, launch, buffers)
                    call.set_args(*arguments)
                    self.images += arguments if launch.images else ()
                    calls.append((call, launch.global_size, launch.local_size))
            parts[members] = Part(members, tuple(calls), (1 / len(members),) * len(members))
        return parts

    def _by_place(self, members: Members) -> bool:
        """Whether a launch of these steps finds operands by a table of places in the arena; an image is no place."""
        launches = self.steps[members[0]].kernel.launches
        return len(members) > 1 or (self.runtime.launches_by_place and not any(x.images for x in launches))

    def _sources(
        self, step: BoundStep, by_place: bool, known: Collection[tuple[str, int, bool]]
    ) -> dict[tuple[str, int, bool], tuple[str, str]]:
        """(Source, label) of each launch of a step's kernel by (key, position, whether it takes places)."""
        kernel, out = step.kernel, {}
        for i, launch in enumerate(kernel.launches):
            if (kernel.key, i, by_place) not in known:
                source = program_source(kernel, launch)
                source = stacked_source(source, launch) if by_place else source
                out[kernel.key, i, by_place] = source, kernel.variant.label
        return out

    def _check_slots(self, step: BoundStep) -> None:
        for position, name in enumerate(step.slots):
            need = step.kernel.buffer_bytes(position)
            slot = self.slots.get(name)
            if slot is None or slot.size_bytes < need:
                raise GraphError(f"the plan's arena has no {name} of {need} bytes for {step.label}: solve it anew")

    def _table(self, values: np.ndarray) -> Any:
        self.tables.append(self.runtime.constant(values))
        return self.tables[-1]
