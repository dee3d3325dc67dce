"""Counts of what a kernel does: the numbers that a prediction is made of.

For every access of a nest this file works out, for each suffix of the loops around it (one execution, the innermost
loop, the two innermost, … the whole launch), how many distinct cache lines it touches. Traffic between two levels then
follows the *layer condition*: going outwards, as long as what one iteration of a loop touches fits in a cache, all
reuse between its iterations hits, and the misses are the distinct lines; where it does not fit, each iteration misses
anew. (Hammer, Eitzinger, Hager, Wellein: Kerncraft, 2017; counted operations by stride class: loopy.)

The counts are approximations in closed form, exact for affine accesses over dense or blocked layouts whose tiles divide
their shapes, and cheap: a planner asks for tens of thousands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from costmodel.device import CacheLevel
from kernels.nest import Access, Data, Index, Loop
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.layout import LANES, Layout

__all__ = ["COMPUTE", "FEATURES", "LAUNCH", "MEMORY", "Machine", "features", "transcendentals"]

LAUNCH = ("launches", "groups", "items")
COMPUTE = (
    "trips",
    "flops",
    "flop_slots",
    "transcendentals",
    "vector_loads",
    "scalar_loads",
    "vector_stores",
    "scalar_stores",
)
MEMORY = (
    "request_lines",
    "strided",
    "conflicts",
    "near_bytes",
    "middle_bytes",
    "memory_bytes",
    "strided_middle_bytes",
    "unique_bytes",
)
FEATURES = LAUNCH + COMPUTE + MEMORY
"""In order. All but ``launches`` are per compute unit: divided by the parallelism that the work groups allow.

- groups, items: work groups, work items; trips: iterations of innermost loops.
- flop_slots: flops over the phase's widest vector.
- vector_*, scalar_*: instructions; an access that is not contiguous along its vector is one scalar access a lane.
- request_lines: distinct lines per request (a wave's on a GPU, a work item's on a CPU), summed.
- strided: executions that no sequential stream serves: the nearest two loops that move them stride over lines.
- conflicts: executions under a loop longer than the nearest cache's ways whose stride is a multiple of its way.
- near_bytes, middle_bytes, memory_bytes: line traffic that the first, second and last cache miss; a store counts twice
  (fetched, written back). strided_middle_bytes: the part of middle_bytes under a strided innermost loop.
- unique_bytes: lines of all operands.
"""

_TRANSCENDENTAL = frozenset(("exp", "log", "sqrt", "rsqrt", "recip", "tanh", "erf", "div", "pow"))
_EXP_KINDS = frozenset(("softmax", "log_softmax", "log_softmax_grad", "cross_entropy", "cross_entropy_grad"))


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


def features(kernel: Kernel, machine: Machine) -> tuple[float, ...]:
    """The counts of all launches of a kernel, in the order of ``FEATURES``."""
    total = [0.0] * len(FEATURES)
    share = 1.0
    for launch in kernel.launches:
        counts, share = _launch_counts(kernel, launch, machine)
        for i, value in enumerate(counts):
            total[i] += value
    total[FEATURES.index("transcendentals")] += transcendentals(kernel) / share
    return tuple(total)


def transcendentals(kernel: Kernel) -> int:
    """Evaluations of functions that are not one instruction, from the op's kind and its expression."""
    spec = kernel.spec
    elems = prod(spec.shapes[spec.inputs])
    if spec.kind == "pointwise":
        return elems * sum(1 for op, *_ in spec.expr.code if op in _TRANSCENDENTAL)
    if spec.kind in _EXP_KINDS:
        return max(prod(shape) for shape in spec.shapes)
    return 0


# ---- one access -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spread:
    """Distinct lines per suffix of the enclosing loops (position k: loops k and inwards); stride in bytes per loop."""

    lines: tuple[float, ...]
    strides: tuple[int, ...]


def _axis_digits(layout: Layout, axis: int, pieces: list[tuple[int, int]], item: int) -> list[tuple[int, int]]:
    """(count, byte stride) of the storage digits that coordinates ``sum of step * [0, count)`` visit on an axis."""
    extent = layout.shape[axis]
    merged: list[tuple[int, int]] = []
    for step, count in sorted(pieces):
        if count <= 1 or step == 0:
            continue
        if merged and step <= merged[-1][0] * merged[-1][1] and step % merged[-1][0] == 0:
            first, n = merged[-1]
            merged[-1] = (first, (step * (count - 1)) // first + n)
        else:
            merged.append((step, count))
    modes = layout.axis_modes(axis)
    out = []
    for step, count in merged:
        count = min(count, -(-extent // step))
        span, weight, left = step * (count - 1) + 1, 1, count
        for position in range(len(modes) - 1, -1, -1):
            mode = modes[position]
            if left <= 1 or span <= weight:
                break
            hop = max(step // weight, 1)
            if position and hop >= mode.extent:
                n = 1 if hop % mode.extent == 0 else min(mode.extent // gcd(hop, mode.extent), left)
                hop = gcd(hop, mode.extent)
            else:
                n = min(-(-min(mode.extent, -(-span // weight)) // hop), left)
            if n > 1:
                out.append((n, hop * mode.stride * _dim_elems(layout, mode.dim) * item))
                left = -(-left // n)
            weight *= mode.extent
    return out


def _dim_elems(layout: Layout, dim: int) -> int:
    if not layout.is_image:
        return 1
    return (layout.size[1] * LANES, LANES, 1)[dim]


def _lines(digits: list[tuple[int, int]], item: int, line: int) -> float:
    """Distinct lines under the digits: neighbours closer than a line merge into runs, the rest are separate runs."""
    run, blocks, grain = item, 1, line
    for count, stride in sorted(digits, key=lambda d: d[1]):
        if stride == 0:
            continue
        if stride <= max(run, line):
            run += stride * (count - 1)
        else:
            blocks *= count
            grain = gcd(grain, stride)
    if grain == line or run <= grain:
        return blocks * -(-run // line)
    return blocks * (run + line - grain) / line  # runs that begin anywhere: the expected number of lines


@lru_cache(maxsize=1 << 16)
def _spread(
    layout: Layout,
    index: tuple[Index | Data, ...],
    width: int,
    axis: int,
    item: int,
    line: int,
    loops: tuple[tuple[str, int], ...],
) -> _Spread:
    per_loop: list[list[tuple[int, int, int]]] = []  # (axis, step, count) of each loop
    random: list[list[tuple[int, int]]] = []  # (count, byte stride) of each loop under a Data index
    for name, extent in loops:
        own, jumps = [], []
        for a, coord in enumerate(index):
            if isinstance(coord, Data):
                if any(t.loop == name and t.coef for part in coord.index for t in part.terms):
                    modes = layout.axis_modes(a)
                    step = max((m.stride * _dim_elems(layout, m.dim) for m in modes), default=0) * item
                    jumps.append((min(extent, layout.shape[a]), max(step, line + 1)))
                continue
            for t in coord.terms:
                if t.loop == name:
                    count = -(-extent // t.div)
                    own.append((a, abs(t.coef), min(count, t.mod) if t.mod else count))
        per_loop.append(own)
        random.append(jumps)
    lines: list[float] = []
    pieces: dict[int, list[tuple[int, int]]] = {axis: [(1, width)]} if width > 1 else {}
    jumped: list[tuple[int, int]] = []
    for k in range(len(loops), -1, -1):
        if k < len(loops):
            for a, step, count in per_loop[k]:
                pieces.setdefault(a, []).append((step, count))
            jumped += random[k]
        if k < len(loops) and not per_loop[k] and not random[k]:
            lines.append(lines[-1])
            continue
        digits = [d for a, own in pieces.items() for d in _axis_digits(layout, a, own, item)]
        lines.append(_lines(digits + jumped, item, line))
    strides = []
    for own, jumps in zip(per_loop, random, strict=True):
        moves = [stride for _, stride in jumps]
        for a, step, count in own:
            moves += [d[1] for d in _axis_digits(layout, a, [(step, count)], item)[:1]]
        strides.append(max(moves, default=0))
    return _Spread(tuple(reversed(lines)), tuple(strides))


# ---- one launch -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """An access with its counts."""

    operand: int
    write: bool
    depth: int
    spread: _Spread
    strided: bool


def _launch_counts(kernel: Kernel, launch: Launch, machine: Machine) -> tuple[list[float], float]:
    nest, line = launch.nest, machine.line_bytes
    grid = tuple((loop.name, loop.extent) for loop in nest.grid)
    groups, items = nest.groups, nest.items
    share = groups / -(-groups // machine.compute_units)  # compute units that the groups keep busy
    wave, wave_loops = _wave(nest.grid, machine.wave_items)
    alias = {kernel.spec.inputs + out: inp for out, inp in kernel.spec.inplace}
    c = dict.fromkeys(FEATURES, 0.0)
    phases: list[tuple[list[int], list[_Seen]]] = []
    for phase in nest.phases:
        extents = [loop.extent for loop in phase.loops]
        inner = groups * items * prod(extents)
        widest = max((a.width for a in phase.accesses), default=1)
        c["trips"] += inner
        c["flops"] += phase.flops * inner
        c["flop_slots"] += phase.flops * inner / widest
        seen = []
        for access in phase.accesses:
            layout = kernel.operand_layout(access.operand)
            item = 1 if kernel.operand_dtype(access.operand) == "bool" else 4
            depth = len(extents) if access.depth < 0 else access.depth
            loops = grid + tuple((loop.name, loop.extent) for loop in phase.loops[:depth])
            spread = _spread(layout, access.index, access.width, access.axis, item, line, loops)
            runs = groups * items * prod(extents[:depth])
            moving = [(s, n) for s, (_, n) in zip(spread.strides, loops, strict=True) if s and n > 1][-2:]
            strided = min((s for s, _ in moving), default=0) > max(line, access.width * item)
            seen.append(_Seen(alias.get(access.operand, access.operand), access.write, depth, spread, strided))
            _instructions(c, access, layout, runs)
            c["strided"] += runs if strided else 0
            c["conflicts"] += runs if any(s % machine.way_bytes == 0 and n > machine.ways for s, n in moving) else 0
            if wave > 1:
                together = _spread(layout, access.index, access.width, access.axis, item, line, wave_loops)
                c["request_lines"] += runs / wave * together.lines[0]
            else:
                c["request_lines"] += runs * spread.lines[-1]
        phases.append((extents, seen))
    for name, size in zip(("near_bytes", "middle_bytes", "memory_bytes"), machine.sizes_bytes, strict=True):
        total, jumping = _misses([extent for _, extent in grid], phases, size / line)
        c[name] = total * line
        if name == "middle_bytes":
            c["strided_middle_bytes"] = jumping * line
    c["unique_bytes"] = line * sum(_union((s, 0) for _, accesses in phases for s in accesses).values())
    c["groups"], c["items"] = groups, groups * items
    out = [value / share for value in c.values()]
    out[0] = 1.0
    return out, share


def _wave(grid: tuple[Loop, ...], wave_items: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The loops over the items of one wave (the fastest items), innermost last, and how many items that is."""
    left, loops = wave_items, []
    for loop in reversed([x for x in grid if x.kind == "item"]):
        if left <= 1:
            break
        loops.append((loop.name, min(loop.extent, left)))
        left //= loops[-1][1]
    return prod(n for _, n in loops), tuple(reversed(loops))


def _instructions(c: dict[str, float], access: Access, layout: Layout, runs: int) -> None:
    way = "stores" if access.write else "loads"
    if access.width == 1:
        c[f"scalar_{way}"] += runs
    elif layout.vectorizes(access.axis, access.width):
        c[f"vector_{way}"] += runs
    elif not access.write and all(m.stride == 0 for m in layout.axis_modes(access.axis)):
        c[f"scalar_{way}"] += runs  # one value splat over the lanes
    else:
        c[f"scalar_{way}"] += runs * access.width


def _union(seen: Iterable[tuple[_Seen, int]]) -> dict[int, float]:
    """Lines per operand over (access, position) pairs: accesses of one operand are taken to overlap."""
    out: dict[int, float] = {}
    for one, k in seen:
        lines = one.spread.lines[min(k, len(one.spread.lines) - 1)]
        if lines > out.get(one.operand, 0.0):
            out[one.operand] = lines
    return out


def _misses(grid: list[int], phases: list[tuple[list[int], list[_Seen]]], capacity: float) -> tuple[float, float]:
    """Lines that a cache of ``capacity`` lines misses in a launch, stores twice: (all, under strided inner loops)."""
    g = len(grid)
    per_item: list[tuple[_Seen, float]] = []
    for extents, accesses in phases:
        missed = [s.spread.lines[-1] for s in accesses]
        for k in range(len(extents) - 1, -1, -1):
            fits = sum(_union((s, g + k + 1) for s in accesses).values()) <= capacity
            for i, s in enumerate(accesses):
                if s.depth > k:
                    missed[i] = s.spread.lines[g + k] if fits else missed[i] * extents[k]
        per_item += zip(accesses, missed, strict=True)
    # From one work item outwards: an operand's accesses in several phases share lines if the item's data fits.
    everything = [s for s, _ in per_item]
    best: dict[int, float] = {}
    fits_item = sum(_union((s, g) for s in everything).values()) <= capacity
    for s, missed_lines in per_item:
        before = best.get(s.operand, 0.0)
        best[s.operand] = max(before, missed_lines) if fits_item else before + missed_lines
    for k in range(g - 1, -1, -1):
        if sum(_union((s, k + 1) for s in everything).values()) <= capacity:
            best = _union((s, k) for s in everything)
        else:
            best = {operand: n * grid[k] for operand, n in best.items()}
    written = {s.operand for s in everything if s.write}
    jumping = {s.operand for s in everything if s.strided}
    total = sum(n * (2 if operand in written else 1) for operand, n in best.items())
    return total, sum(n * (2 if operand in written else 1) for operand, n in best.items() if operand in jumping)
