"""Counts of one launch: what its nest says by itself, and what each operand adds in the layout that it lies in.

A planner asks for the same nest over many combinations of layouts. Everything that depends on one operand alone (its
*part*) is therefore worked out once per layout and kept with the nest, and a launch is put together from parts: sums,
and the traffic that the caches miss, by the layer condition (see ``costmodel/features.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

from costmodel.device import CacheLevel
from costmodel.spread import Coord, bundles, index_digits, lane_stride, spread
from kernels.nest import Loop, Nest
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.graph import DTYPES
from layoutopt.layout import Layout

__all__ = ["PARTS", "Machine", "launch_counts"]

PARTS = (
    "index_shifts",
    "index_divisions",
    "vector_loads",
    "scalar_loads",
    "vector_stores",
    "scalar_stores",
    "strided",
    "conflicts",
)
"""The counts that operands add to, whole numbers all."""
_SHIFTS, _DIVISIONS, _VECTOR_LOADS, _SCALAR_LOADS, _VECTOR_STORES, _SCALAR_STORES, _STRIDED, _CONFLICTS = range(8)


@dataclass(frozen=True)
class Machine:
    """What the counts depend on: nearest cache first, and how many neighbouring items make one request."""

    sizes_bytes: tuple[int, int, int]
    line_bytes: int
    way_bytes: int
    ways: int
    compute_units: int
    wave_items: int

    @staticmethod
    def of(limits: DeviceLimits, caches: tuple[CacheLevel, ...], serves: str = "buffer") -> Machine:
        """From a device model's limits and the caches that serve buffers, or images; a missing level is like the one
        before.
        """
        levels = [c for c in caches if c.serves in ("all", serves)] or [CacheLevel("assumed", 1 << 18)]
        near, middle, last = levels[0], levels[min(1, len(levels) - 1)], levels[-1]
        return Machine(
            (near.size_bytes, middle.size_bytes, last.size_bytes),
            near.line_bytes,
            max(near.size_bytes // near.ways, near.line_bytes),
            near.ways,
            max(limits.compute_units, 1),
            limits.simd_width if limits.kind == "gpu" else 1,
        )


Counts = tuple[tuple[float, ...], float]
"""What one launch does, in the order of ``costmodel.features.FEATURES``, per compute unit that it keeps busy; and how
many these are. Transcendentals are 0: they are the kernel's."""


def launch_counts(kernel: Kernel, launch: Launch, machine: Machine) -> Counts:
    """The counts of one launch of a kernel."""
    nest = launch.nest
    known: _Counted | None = nest.memo.get(machine)
    if known is None:
        known = nest.memo[machine] = _Counted(nest, machine)
    spec = kernel.spec
    if not kernel.scratch and not launch.views:
        layouts, dtypes = kernel.views or kernel.layouts, spec.dtypes
        parts = [way.part(DTYPES[dtypes[operand]], layouts[operand]) for operand, way in known.operands]
        return known.together(parts, spec.inputs, spec.inplace)
    # Launches of several, or over workspaces, are often parts of many kernels.
    seen = tuple(kernel.launch_layout(launch, operand) for operand, _ in known.operands)
    items = tuple(DTYPES[kernel.operand_dtype(operand)] for operand, _ in known.operands)
    key = seen, items, spec.inputs, spec.inplace
    if key not in known.whole:
        parts = [way.part(item, x) for (_, way), item, x in zip(known.operands, items, seen, strict=True)]
        known.whole[key] = known.together(parts, spec.inputs, spec.inplace)
    return known.whole[key]


class _Placed(NamedTuple):
    """A bundle at its place in a nest.

    Attributes:
        phase: its number.
        extents: of the phase's loops.
        depth: how many of them are around it.
        loops: (name, extent) of all loops around it.
        each: executions of one of its accesses in the launch.
        copies: how many they are.
        coords: see ``costmodel.spread.Bundle``.
        offsets: see there.
        axis: of its vectors.
        width: of its vectors.
        write: whether it stores.
    """

    phase: int
    extents: tuple[int, ...]
    depth: int
    loops: tuple[tuple[str, int], ...]
    each: int
    copies: int
    coords: tuple[Coord, ...]
    offsets: tuple[tuple[int, int, int], ...]
    axis: int
    width: int
    write: bool


class _Part(NamedTuple):
    """What one operand adds in one layout.

    Attributes:
        adds: in the order of ``PARTS``.
        requests: per bundle, lines of its requests.
        outer: lines under the k-th grid loop and inwards; the last without the grid.
        inner: by phase, lines within one iteration of its k-th sequential loop.
        item: by phase, lines of one work item whose k outer loops miss anew.
        jumping: whether a strided inner loop moves it.
    """

    adds: tuple[int, ...]
    requests: tuple[float, ...]
    outer: tuple[float, ...]
    inner: dict[int, tuple[float, ...]]
    item: dict[int, tuple[float, ...]]
    jumping: bool


class _Way:
    """How an operand is accessed in a nest, whichever operand it is and whatever else the nest does.

    Args:
        machine: for its caches.
        grid: number of the grid's loops.
        wave: the loops of one request, and their work items.
        placed: its bundles.
    """

    def __init__(
        self, machine: Machine, grid: int, wave: tuple[int, tuple[tuple[str, int], ...]], placed: tuple[_Placed, ...]
    ) -> None:
        self.machine, self.grid, self.wave, self.placed = machine, grid, wave, placed
        self._parts: dict[tuple[int, Layout], _Part] = {}

    def part(self, item: int, layout: Layout) -> _Part:
        """What it adds, of elements of ``item`` bytes, in a layout."""
        key = item, layout
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._part(item, layout)
        return found

    def _part(self, item: int, layout: Layout) -> _Part:
        line, (wave, wave_loops) = self.machine.line_bytes, self.wave
        adds = [0] * len(PARTS)
        requests = []
        jumping = False
        seen: list[tuple[float, ...]] = []
        for placed in self.placed:
            vector = (placed.axis, placed.width)
            places = spread(layout, placed.coords, placed.offsets, vector, item, line, placed.loops)
            seen.append(places.lines)
            runs = placed.each * placed.copies
            moving = [(s, n) for s, (_, n) in zip(places.strides, placed.loops, strict=True) if s and n > 1][-2:]
            strided = min((s for s, _ in moving), default=0) > max(line, places.lines[-1] * line)
            jumping |= strided
            scattered = _instructions(adds, placed, layout, runs)
            lanes = [(lane_stride(layout, placed.axis, item), placed.width)] if scattered else []
            adds[_STRIDED] += runs if strided else 0
            adds[_CONFLICTS] += runs if _conflicting([*lanes, *reversed(moving)], self.machine) else 0
            shifts, divisions = index_digits(layout, placed.coords)
            lanewise = placed.each * (placed.width if scattered else 1)
            adds[_SHIFTS] += shifts * lanewise
            adds[_DIVISIONS] += divisions * lanewise
            if placed.offsets or wave_loops:
                once = spread(layout, placed.coords, (), vector, item, line, wave_loops).lines[0]
            else:
                once = places.lines[-1]
            requests.append(runs / wave * once)
        # Accesses of one operand are taken to overlap: the largest of them stands for all.
        outer = _largest([lines[: self.grid + 1] for lines in seen])
        inner, own = {}, {}
        for phase, extents in dict.fromkeys((placed.phase, placed.extents) for placed in self.placed):
            here = [(p.depth, x[self.grid :]) for p, x in zip(self.placed, seen, strict=True) if p.phase == phase]
            inner[phase] = _largest([[x[min(k, d)] for k in range(1, len(extents) + 1)] for d, x in here])
            own[phase] = _largest(
                [[x[min(k, d)] * prod(extents[: min(k, d)]) for k in range(len(extents) + 1)] for d, x in here]
            )
        return _Part(tuple(adds), tuple(requests), outer, inner, own, jumping)


_way = lru_cache(maxsize=1 << 15)(_Way)
"""Operands of one kernel, and of kernels that walk alike, are often accessed in the same way."""


class _Order(NamedTuple):
    """Which parts stand for one storage: operands of an in-place pair do together.

    Attributes:
        groups: per storage, in order of first appearance, positions in ``_Counted.operands``.
        twice: per storage, 2 where some access stores to it, else 1.
        phases: per phase, its storages in order of first appearance.
        shared: whether some storage has two operands.
    """

    groups: tuple[tuple[int, ...], ...]
    twice: tuple[int, ...]
    phases: tuple[tuple[int, ...], ...]
    shared: bool


class _Counted:
    """A nest on a machine: what holds for all layouts."""

    def __init__(self, nest: Nest, machine: Machine) -> None:
        self.machine = machine
        grid = tuple((loop.name, loop.extent) for loop in nest.grid)
        self.grid = len(grid)
        self.repeats = [prod(extent for _, extent in grid[:k]) for k in range(self.grid + 1)]
        self.capacities = [size / machine.line_bytes for size in machine.sizes_bytes]
        groups, items = nest.groups, nest.groups * nest.items
        self.share = groups / -(-groups // machine.compute_units)
        trips = flops = flop_slots = 0.0
        self.extents: list[tuple[int, ...]] = []
        # (operand, whether it stores, phase) of each bundle, and the bundles by operand with their positions.
        self.accessed: list[tuple[int, bool, int]] = []
        placed: dict[int, list[_Placed]] = {}
        positions: dict[int, list[int]] = {}
        for number, phase in enumerate(nest.phases):
            loops = tuple((loop.name, loop.extent) for loop in phase.loops)
            extents = tuple(extent for _, extent in loops)
            self.extents.append(extents)
            inner = items * prod(extents)
            widest = max((a.width for a in phase.accesses), default=1)
            trips += inner
            flops += phase.flops * inner
            flop_slots += phase.flops * inner / widest
            around: dict[int, tuple[tuple[tuple[str, int], ...], int]] = {}
            for bundle in bundles(phase.accesses):
                access = bundle.access
                depth = len(extents) if access.depth < 0 else access.depth
                if depth not in around:
                    around[depth] = grid + loops[:depth], items * prod(extents[:depth])
                positions.setdefault(access.operand, []).append(len(self.accessed))
                self.accessed.append((access.operand, access.write, number))
                own = _Placed(
                    *(number, extents, depth, *around[depth], bundle.count, bundle.coords, bundle.offsets),
                    *(access.axis, access.width, access.write),
                )
                placed.setdefault(access.operand, []).append(own)
        self.fixed = (groups, items, trips, flops, flop_slots, 0.0, 0.0)
        self.whole: dict[Any, Counts] = {}
        wave = _wave(nest.grid, machine.wave_items)
        self.operands = tuple((operand, _way(machine, self.grid, wave, tuple(own))) for operand, own in placed.items())
        by_operand = [position for own in positions.values() for position in own]
        self.in_order = sorted(range(len(by_operand)), key=by_operand.__getitem__)
        self._orders: dict[tuple[int, tuple[tuple[int, int], ...]], _Order] = {}

    # ---- all of them ------------------------------------------------------------------------------------------------

    def together(self, parts: Sequence[_Part], inputs: int, inplace: tuple[tuple[int, int], ...]) -> Counts:
        """The launch, from the parts of ``operands``."""
        line, share = self.machine.line_bytes, self.share
        requests = [lines for part in parts for lines in part.requests]
        request_lines = 0.0
        for position in self.in_order:
            request_lines += requests[position]
        *instructions, strided, conflicts = map(sum, zip(*[part.adds for part in parts], strict=True))
        order = self._orders.get((inputs, inplace)) or self._order(inputs, inplace)
        stored = [_merged([parts[i] for i in group]) for group in order.groups] if order.shared else parts
        outer_lines = list(map(sum, zip(*[p.outer for p in stored], strict=True)))
        missed: list[tuple[float, float]] = []
        last = -1
        for capacity in self.capacities:
            # Of the k outer loops an iteration overflows the cache: each misses anew.
            k = 0
            if outer_lines[0] > capacity:
                while k < self.grid and outer_lines[k + 1] > capacity:
                    k += 1
            if k != last or k == self.grid:
                per_item = [p.outer[k] for p in stored] if k < self.grid else self._item(stored, order, capacity)
                twice = [n * self.repeats[k] * w for n, w in zip(per_item, order.twice, strict=True)]
                jumping = sum([n for n, p in zip(twice, stored, strict=True) if p.jumping])
                missed.append((sum(twice) * line, jumping * line))
                last = k
            else:
                missed.append(missed[-1])
        counts = (
            *self.fixed,
            *instructions,
            *(request_lines, strided, conflicts),
            *(lines for lines, _ in missed),
            *(missed[1][1], line * outer_lines[0]),
        )
        return (1.0, *[value / share for value in counts]), share

    def _item(self, stored: Sequence[_Part], order: _Order, capacity: float) -> list[float]:
        """Misses of one work item whose data overflow the cache: phases and long loops miss anew."""
        out = [0.0] * len(stored)
        for number, (extents, storages) in enumerate(zip(self.extents, order.phases, strict=True)):
            inner = [stored[s].inner[number] for s in storages]
            k = next((k for k in range(len(extents)) if sum([lines[k] for lines in inner]) <= capacity), len(extents))
            for s in storages:
                out[s] += stored[s].item[number][k]
        return out

    def _order(self, inputs: int, inplace: tuple[tuple[int, int], ...]) -> _Order:
        alias = {inputs + out: inp for out, inp in inplace}
        stored = [(alias.get(operand, operand), write, number) for operand, write, number in self.accessed]
        storages = list(dict.fromkeys(s for s, _, _ in stored))
        written = {s for s, write, _ in stored if write}
        names = [alias.get(operand, operand) for operand, _ in self.operands]
        groups = tuple(tuple(i for i, name in enumerate(names) if name == s) for s in storages)
        phases = (dict.fromkeys(s for s, _, number in stored if number == n) for n in range(len(self.extents)))
        self._orders[inputs, inplace] = order = _Order(
            groups,
            tuple(2 if s in written else 1 for s in storages),
            tuple(tuple(storages.index(s) for s in own) for own in phases),
            any(len(group) > 1 for group in groups),
        )
        return order


def _largest(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(rows[0]) if len(rows) == 1 else tuple(map(max, *rows))


def _merged(parts: Sequence[_Part]) -> _Part:
    """Operands that share a storage: the larger of their lines."""
    first, *others = parts
    for other in others:
        first = first._replace(
            outer=_largest([first.outer, other.outer]),
            inner=_by_phase(first.inner, other.inner),
            item=_by_phase(first.item, other.item),
            jumping=first.jumping or other.jumping,
        )
    return first


def _by_phase(a: dict[int, tuple[float, ...]], b: dict[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
    return {phase: _largest([x[phase] for x in (a, b) if phase in x]) for phase in (*a, *b)}


def _wave(grid: tuple[Loop, ...], wave_items: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The loops over the items of one wave (the fastest items), innermost last, and how many items that is."""
    left, loops = wave_items, []
    for loop in reversed([x for x in grid if x.kind == "item"]):
        if left <= 1:
            break
        loops.append((loop.name, min(loop.extent, left)))
        left //= loops[-1][1]
    return prod(n for _, n in loops), tuple(reversed(loops))


def _instructions(adds: list[int], access: _Placed, layout: Layout, runs: int) -> bool:
    """Count ``runs`` executions; whether it is a vector whose lanes are scattered."""
    vector, scalar = (_VECTOR_STORES, _SCALAR_STORES) if access.write else (_VECTOR_LOADS, _SCALAR_LOADS)
    if access.width > 1 and layout.vectorizes(access.axis, access.width):
        adds[vector] += runs
    elif access.width == 1 or (not access.write and all(m.stride == 0 for m in layout.axis_modes(access.axis))):
        adds[scalar] += runs  # perhaps one value splat over the lanes
    else:
        adds[scalar] += runs * access.width
        return True
    return False


def _conflicting(nested: Iterable[tuple[int, int]], machine: Machine) -> bool:
    """Whether the lines of (stride, count) loops, innermost first, compete for a few sets of the near cache."""
    for stride, count in nested:
        if stride <= machine.line_bytes:
            return False  # a stream: its lines are used up before it moves on
        if count > machine.ways * (machine.way_bytes // gcd(stride, machine.way_bytes)):
            return True
    return False
