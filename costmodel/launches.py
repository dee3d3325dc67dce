"""Counts of one launch: what its nest says by itself, and what each operand adds in the layout that it lies in.

A planner asks for the same nest over many combinations of layouts. Everything that depends on one operand alone (its
*part*) is therefore worked out once per layout and kept with the nest, and a launch is put together from parts: sums,
and the traffic that the caches miss, by the layer condition (see ``costmodel/features.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from costmodel.device import CacheLevel
from costmodel.spread import Bundle, bundles, index_digits, lane_stride, spread
from kernels.nest import Access, Loop, Nest
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.layout import Layout

__all__ = ["PARTS", "LaunchCounts", "Machine", "launch_counts"]

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
    def of(limits: DeviceLimits, caches: tuple[CacheLevel, ...]) -> Machine:
        """From a device model's limits and the caches that serve buffers; a missing level is like the one before."""
        levels = [c for c in caches if c.serves in ("all", "buffer")] or [CacheLevel("assumed", 1 << 18)]
        near, middle, last = levels[0], levels[min(1, len(levels) - 1)], levels[-1]
        return Machine(
            (near.size_bytes, middle.size_bytes, last.size_bytes),
            near.line_bytes,
            max(near.size_bytes // near.ways, near.line_bytes),
            near.ways,
            max(limits.compute_units, 1),
            limits.simd_width if limits.kind == "gpu" else 1,
        )


class LaunchCounts(NamedTuple):
    """What one launch does, in all its work groups.

    Attributes:
        share: compute units that the groups keep busy.
        groups: work groups.
        items: work items.
        trips: iterations of innermost loops.
        flops: arithmetic.
        flop_slots: the same over the widest vector.
        parts: in the order of ``PARTS``.
        request_lines: distinct lines per request, summed.
        missed_bytes: line traffic that each cache of the machine misses; a store counts twice.
        strided_middle_bytes: the part of the second that is of operands under strided inner loops.
        unique_bytes: lines of all operands.
    """

    share: float
    groups: int
    items: int
    trips: float
    flops: float
    flop_slots: float
    parts: tuple[int, ...]
    request_lines: float
    missed_bytes: tuple[float, ...]
    strided_middle_bytes: float
    unique_bytes: float


def launch_counts(kernel: Kernel, launch: Launch, machine: Machine) -> LaunchCounts:
    """The counts of one launch of a kernel."""
    nest = launch.nest
    known: _Counted | None = nest.memo.get(machine)
    if known is None:
        known = nest.memo[machine] = _Counted(nest, machine)
    parts = [
        known.part(operand, 1 if kernel.operand_dtype(operand) == "bool" else 4, kernel.launch_layout(launch, operand))
        for operand in known.operands
    ]
    return known.together(parts, kernel.spec.inputs, kernel.spec.inplace)


class _Placed(NamedTuple):
    """A bundle at its place in the nest.

    Attributes:
        phase: its number.
        depth: sequential loops around it.
        bundle: accesses alike.
        loops: (name, extent) of all loops around it.
        each: executions of one of its accesses in the launch.
    """

    phase: int
    depth: int
    bundle: Bundle
    loops: tuple[tuple[str, int], ...]
    each: int

    def like(self, other: _Placed) -> bool:
        """Whether another operand is accessed in the same way."""
        mine, its = self.bundle, other.bundle
        return (
            (self.phase, self.depth, mine.count, mine.offsets) == (other.phase, other.depth, its.count, its.offsets)
            and mine.access.write == its.access.write
            and (mine.access.width, mine.access.axis) == (its.access.width, its.access.axis)
            and mine.coords == its.coords
        )


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
    """A nest on a machine: what holds for all layouts, and the parts known so far."""

    def __init__(self, nest: Nest, machine: Machine) -> None:
        self.machine = machine
        grid = tuple((loop.name, loop.extent) for loop in nest.grid)
        self.grid = len(grid)
        self.repeats = [prod(extent for _, extent in grid[:k]) for k in range(self.grid + 1)]
        self.groups, self.items = nest.groups, nest.groups * nest.items
        self.share = self.groups / -(-self.groups // machine.compute_units)
        self.wave, self.wave_loops = _wave(nest.grid, machine.wave_items)
        self.trips = self.flops = self.flop_slots = 0.0
        self.extents: list[list[int]] = []
        self.placed: list[_Placed] = []
        for number, phase in enumerate(nest.phases):
            extents = [loop.extent for loop in phase.loops]
            self.extents.append(extents)
            inner = self.items * prod(extents)
            widest = max((a.width for a in phase.accesses), default=1)
            self.trips += inner
            self.flops += phase.flops * inner
            self.flop_slots += phase.flops * inner / widest
            for bundle in bundles(phase.accesses):
                depth = len(extents) if bundle.access.depth < 0 else bundle.access.depth
                loops = grid + tuple((loop.name, loop.extent) for loop in phase.loops[:depth])
                self.placed.append(_Placed(number, depth, bundle, loops, self.items * prod(extents[:depth])))
        self.positions: dict[int, list[int]] = {}
        for position, placed in enumerate(self.placed):
            self.positions.setdefault(placed.bundle.access.operand, []).append(position)
        self.operands = tuple(self.positions)
        by_operand = [position for positions in self.positions.values() for position in positions]
        self.in_order = sorted(range(len(by_operand)), key=by_operand.__getitem__)
        self._kinds = self._accessed_alike()
        self._parts: dict[tuple[int, int, Layout], _Part] = {}
        self._orders: dict[tuple[int, tuple[tuple[int, int], ...]], _Order] = {}

    def _own(self, operand: int) -> list[_Placed]:
        return [self.placed[position] for position in self.positions[operand]]

    def _accessed_alike(self) -> dict[int, int]:
        """Per operand, the first that is accessed in the same way: in one layout both add the same."""
        firsts: list[tuple[int, list[_Placed]]] = []
        out = {}
        for operand in self.operands:
            own = self._own(operand)
            for first, known in firsts:
                if len(known) == len(own) and all(a.like(b) for a, b in zip(known, own, strict=True)):
                    out[operand] = first
                    break
            else:
                firsts.append((operand, own))
                out[operand] = operand
        return out

    # ---- one operand ------------------------------------------------------------------------------------------------

    def part(self, operand: int, item: int, layout: Layout) -> _Part:
        """What an operand adds, of elements of ``item`` bytes, in a layout."""
        key = self._kinds[operand], item, layout
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._part(*key)
        return found

    def _part(self, operand: int, item: int, layout: Layout) -> _Part:
        machine, line = self.machine, self.machine.line_bytes
        adds = [0] * len(PARTS)
        requests = []
        jumping = False
        seen: list[tuple[_Placed, tuple[float, ...]]] = []
        for placed in self._own(operand):
            _, _, bundle, loops, each = placed
            access = bundle.access
            vector = (access.axis, access.width)
            places = spread(layout, bundle.coords, bundle.offsets, vector, item, line, loops)
            seen.append((placed, places.lines))
            runs = each * bundle.count
            moving = [(s, n) for s, (_, n) in zip(places.strides, loops, strict=True) if s and n > 1][-2:]
            strided = min((s for s, _ in moving), default=0) > max(line, places.lines[-1] * line)
            jumping |= strided
            scattered = _instructions(adds, access, layout, runs)
            lanes = [(lane_stride(layout, access.axis, item), access.width)] if scattered else []
            adds[_STRIDED] += runs if strided else 0
            adds[_CONFLICTS] += runs if _conflicting([*lanes, *reversed(moving)], machine) else 0
            shifts, divisions = index_digits(layout, bundle.coords)
            lanewise = each * (access.width if scattered else 1)
            adds[_SHIFTS] += shifts * lanewise
            adds[_DIVISIONS] += divisions * lanewise
            once = spread(layout, bundle.coords, (), vector, item, line, self.wave_loops)
            requests.append(runs / self.wave * once.lines[0])
        # Accesses of one operand are taken to overlap: the largest of them stands for all.
        outer = _largest([lines[: self.grid + 1] for _, lines in seen])
        inner, own = {}, {}
        for phase in dict.fromkeys(placed.phase for placed, _ in seen):
            here = [(placed.depth, lines[self.grid :]) for placed, lines in seen if placed.phase == phase]
            extents = self.extents[phase]
            inner[phase] = _largest([[x[min(k, d)] for k in range(1, len(extents) + 1)] for d, x in here])
            own[phase] = _largest(
                [[x[min(k, d)] * prod(extents[: min(k, d)]) for k in range(len(extents) + 1)] for d, x in here]
            )
        return _Part(tuple(adds), tuple(requests), outer, inner, own, jumping)

    # ---- all of them ------------------------------------------------------------------------------------------------

    def together(self, parts: Sequence[_Part], inputs: int, inplace: tuple[tuple[int, int], ...]) -> LaunchCounts:
        """The launch, from the parts of ``operands``."""
        line = self.machine.line_bytes
        requests = [lines for part in parts for lines in part.requests]
        request_lines = 0.0
        for position in self.in_order:
            request_lines += requests[position]
        adds = tuple(map(sum, zip(*[part.adds for part in parts], strict=True)))
        order = self._orders.get((inputs, inplace)) or self._order(inputs, inplace)
        stored = [_merged([parts[i] for i in group]) for group in order.groups] if order.shared else parts
        outer_lines = [sum(lines) for lines in zip(*[p.outer for p in stored], strict=True)]
        known: dict[int, tuple[float, float]] = {}
        missed = []
        for size in self.machine.sizes_bytes:
            capacity = size / line
            # The loop k, one iteration of which fits: the iterations of those around it miss anew.
            k = next((k for k in range(self.grid) if outer_lines[k + 1] <= capacity), self.grid)
            k = 0 if outer_lines[0] <= capacity else k
            if k not in known:
                per_item = [p.outer[k] for p in stored] if k < self.grid else self._item(stored, order, capacity)
                twice = [n * self.repeats[k] * w for n, w in zip(per_item, order.twice, strict=True)]
                both = sum(twice), sum([n for n, p in zip(twice, stored, strict=True) if p.jumping])
                missed.append(both)
                if k < self.grid:
                    known[k] = both
            else:
                missed.append(known[k])
        return LaunchCounts(
            self.share,
            self.groups,
            self.items,
            self.trips,
            self.flops,
            self.flop_slots,
            adds,
            request_lines,
            tuple([lines * line for lines, _ in missed]),
            missed[1][1] * line,
            line * outer_lines[0],
        )

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
        placed = [
            (p.phase, alias.get(operand, operand), p) for p in self.placed for operand in [p.bundle.access.operand]
        ]
        storages = list(dict.fromkeys(storage for _, storage, _ in placed))
        written = {storage for _, storage, p in placed if p.bundle.access.write}
        groups = tuple(
            tuple(i for i, operand in enumerate(self.operands) if alias.get(operand, operand) == s) for s in storages
        )
        phases = (dict.fromkeys(s for number, s, _ in placed if number == n) for n in range(len(self.extents)))
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


def _instructions(adds: list[int], access: Access, layout: Layout, runs: int) -> bool:
    """Count an access; whether it is a vector whose lanes are scattered."""
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
