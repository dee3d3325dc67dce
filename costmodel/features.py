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
from math import gcd, prod

from costmodel.device import CacheLevel
from costmodel.spread import Spread, bundles, index_digits, lane_stride, spread
from kernels.nest import Access, Loop
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.layout import Layout

__all__ = ["COMPUTE", "FEATURES", "LAUNCH", "MEMORY", "Machine", "features", "transcendentals"]

LAUNCH = ("launches", "groups", "items")
COMPUTE = (
    "trips",
    "flops",
    "flop_slots",
    "transcendentals",
    "transcendental_slots",
    "index_shifts",
    "index_divisions",
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
- transcendentals: evaluations of functions that take many instructions, in units of one exp.
- flop_slots, transcendental_slots: the same over the widest vector.
- index_shifts, index_divisions: digits of tiled or merged axes that an access' index takes apart, by powers of two and
  by other numbers (before a compiler or a kernel moves them out of a loop).
- vector_*, scalar_*: instructions; an access that is not contiguous along its vector is one scalar access a lane.
- request_lines: distinct lines per request (a wave's on a GPU, a work item's on a CPU), summed.
- strided: executions that no sequential stream serves: the nearest two loops that move them stride over lines.
- conflicts: executions under lanes or loops whose lines fall into fewer sets of the near cache than hold them.
- near_bytes, middle_bytes, memory_bytes: line traffic that the first, second and last cache miss; a store counts twice
  (fetched, written back). strided_middle_bytes: the part of middle_bytes under a strided innermost loop.
- unique_bytes: lines of all operands.
"""

_EXPS = {
    "exp": 1.0,
    "log": 1.0,
    "erf": 2.5,
    "tanh": 2.0,
    "pow": 3.0,
    "div": 0.3,
    "recip": 0.3,
    "sqrt": 0.3,
    "rsqrt": 0.3,
}
"""What a function takes, in units of exp: lengths of the usual vector implementations."""
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
    exps = transcendentals(kernel) / share
    if exps:
        widest = max(a.width for launch in kernel.launches for phase in launch.nest.phases for a in phase.accesses)
        total[FEATURES.index("transcendentals")] += exps
        total[FEATURES.index("transcendental_slots")] += exps / widest
    return tuple(total)


def transcendentals(kernel: Kernel) -> float:
    """Evaluations of functions that are not one instruction, in exps, from the op's kind and its expression."""
    spec = kernel.spec
    elems = prod(spec.shapes[spec.inputs])
    if spec.kind == "pointwise":
        return elems * sum(_EXPS.get(op, 0.0) for op, *_ in spec.expr.code)
    if spec.kind in _EXP_KINDS:
        return float(max(prod(shape) for shape in spec.shapes))
    return 0.0


# ---- one launch -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """A bundle of accesses with its counts."""

    operand: int
    write: bool
    depth: int
    places: Spread
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
        for bundle in bundles(phase.accesses):
            access = bundle.access
            layout = kernel.launch_layout(launch, access.operand)
            item = 1 if kernel.operand_dtype(access.operand) == "bool" else 4
            depth = len(extents) if access.depth < 0 else access.depth
            loops = grid + tuple((loop.name, loop.extent) for loop in phase.loops[:depth])
            vector = (access.axis, access.width)
            places = spread(layout, bundle.coords, bundle.offsets, vector, item, line, loops)
            runs = groups * items * prod(extents[:depth]) * bundle.count
            moving = [(s, n) for s, (_, n) in zip(places.strides, loops, strict=True) if s and n > 1][-2:]
            strided = min((s for s, _ in moving), default=0) > max(line, places.lines[-1] * line)
            seen.append(_Seen(alias.get(access.operand, access.operand), access.write, depth, places, strided))
            scattered = _instructions(c, access, layout, runs)
            lanes = [(lane_stride(layout, access.axis, item), access.width)] if scattered else []
            c["strided"] += runs if strided else 0
            c["conflicts"] += runs if _conflicting([*lanes, *reversed(moving)], machine) else 0
            shifts, divisions = index_digits(layout, bundle.coords)
            each = runs // bundle.count * (access.width if scattered else 1)
            c["index_shifts"] += shifts * each
            c["index_divisions"] += divisions * each
            once = spread(layout, bundle.coords, (), vector, item, line, wave_loops)
            c["request_lines"] += runs / wave * once.lines[0]
        phases.append((extents, seen))
    footprint = _Footprint([extent for _, extent in grid], phases)
    for name, size in zip(("near_bytes", "middle_bytes", "memory_bytes"), machine.sizes_bytes, strict=True):
        total, jumping = footprint.misses(size / line)
        c[name] = total * line
        if name == "middle_bytes":
            c["strided_middle_bytes"] = jumping * line
    c["unique_bytes"] = line * footprint.outer_lines[0]
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


def _instructions(c: dict[str, float], access: Access, layout: Layout, runs: int) -> bool:
    """Count an access; whether it is a vector whose lanes are scattered."""
    way = "stores" if access.write else "loads"
    if access.width > 1 and layout.vectorizes(access.axis, access.width):
        c[f"vector_{way}"] += runs
    elif access.width == 1 or (not access.write and all(m.stride == 0 for m in layout.axis_modes(access.axis))):
        c[f"scalar_{way}"] += runs  # perhaps one value splat over the lanes
    else:
        c[f"scalar_{way}"] += runs * access.width
        return True
    return False


def _conflicting(nested: list[tuple[int, int]], machine: Machine) -> bool:
    """Whether the lines of (stride, count) loops, innermost first, compete for a few sets of the near cache."""
    for stride, count in nested:
        if stride <= machine.line_bytes:
            return False  # a stream: its lines are used up before it moves on
        if count > machine.ways * (machine.way_bytes // gcd(stride, machine.way_bytes)):
            return True
    return False


Union = dict[int, float]
"""Lines per operand; accesses of one operand are taken to overlap, so that the largest of them stands for all."""


def _union(seen: Iterable[_Seen], k: int) -> Union:
    out: Union = {}
    for one in seen:
        lines = one.places.lines
        n = lines[k] if k < len(lines) else lines[-1]
        if n > out.get(one.operand, 0.0):
            out[one.operand] = n
    return out


class _Footprint:
    """What the iterations of each loop of a launch touch: computed once, asked by every cache.

    Args:
        grid: extents of the grid's loops.
        phases: (extents of the phase's loops, its accesses).
    """

    def __init__(self, grid: list[int], phases: list[tuple[list[int], list[_Seen]]]) -> None:
        self.grid, self.phases = grid, phases
        g = len(grid)
        everything = [s for _, accesses in phases for s in accesses]
        self.outer = [_union(everything, k) for k in range(g + 1)]
        self.outer_lines = [sum(u.values()) for u in self.outer]
        self.inner_lines = [
            [sum(_union(accesses, g + k + 1).values()) for k in range(len(extents))] for extents, accesses in phases
        ]
        self.written = {s.operand for s in everything if s.write}
        self.jumping = {s.operand for s in everything if s.strided}

    def misses(self, capacity: float) -> tuple[float, float]:
        """Lines that a cache of ``capacity`` lines misses, stores twice: (all, under strided inner loops)."""
        best = self._missed(capacity)
        twice = {operand: n * (2 if operand in self.written else 1) for operand, n in best.items()}
        return sum(twice.values()), sum(n for operand, n in twice.items() if operand in self.jumping)

    def _missed(self, capacity: float) -> Union:
        if self.outer_lines[0] <= capacity:
            return self.outer[0]
        g = len(self.grid)
        k = next((k for k in range(g) if self.outer_lines[k + 1] <= capacity), g)
        best = self.outer[k] if k < g else self._item(capacity)
        repeats = prod(self.grid[:k])  # of these loops, one iteration overflows the cache: each misses anew
        return {operand: n * repeats for operand, n in best.items()}

    def _item(self, capacity: float) -> Union:
        """Misses of one work item whose data overflow the cache: phases and long loops miss anew."""
        g = len(self.grid)
        out: Union = {}
        for (extents, accesses), inner in zip(self.phases, self.inner_lines, strict=True):
            k = next((k for k in range(len(extents)) if inner[k] <= capacity), len(extents))
            mine: Union = {}
            for s in accesses:
                lines = s.places.lines[g + min(k, s.depth)] * prod(extents[: min(k, s.depth)])
                mine[s.operand] = max(mine.get(s.operand, 0.0), lines)
            for operand, n in mine.items():
                out[operand] = out.get(operand, 0.0) + n
        return out
