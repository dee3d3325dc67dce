"""What skipped work groups would leave in the caches: the lines that the latest of them touch.

A sampled launch walks a few stretches of its work groups. The groups in between bring lines of their operands into the
shared caches and push others out; a stretch that began where the last one ended would hit or miss what it should not.
So what the latest skipped groups touch, as many as fill the last level, is worked out from the nest: of each operand
boxes of coordinates, whose lines are touched once, uncounted. Operands that are read where data say (gathers) are left
out: their groups touch few lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kernels.nest import Index, Loop
from kernels.spec import Kernel, Launch
from layoutopt.graph import DTYPES
from layoutopt.layout import Layout
from simulator.cache import BUFFERS, IMAGES, Hierarchy, State, run_ranges

__all__ = ["ENOUGH", "Box", "box_lines", "latest", "touched", "warm"]

ENOUGH = 1.5
"""Lines that are touched over those that the last level holds: its sets do not fill evenly."""

_SLICES = 64

Ranges = dict[str, tuple[int, int]]
"""First and last value of each loop variable."""


@dataclass(frozen=True)
class Box:
    """What some work groups touch of an operand.

    Attributes:
        operand: position.
        offsets: per axis, bytes from the logical origin that its coordinates in the box add, one for each line.
        origin: bytes from the start of the allocation.
        write: whether it is stored to.
        image: whether it is read through images.
        piece: boxes of greater numbers are touched later.
    """

    operand: int
    offsets: tuple[np.ndarray, ...]
    origin: int
    write: bool
    image: bool
    piece: int = 0

    @property
    def lines(self) -> int:
        """An upper bound of its lines."""
        return prod(own.size for own in self.offsets)


def touched(kernel: Kernel, launch: Launch, first: int, last: int, line_bytes: int) -> list[Box]:
    """Boxes that work groups ``first`` to ``last`` (excluded) of a launch touch: per operand one for each piece of the
    grid that the groups are, in dispatch order.
    """
    grid = launch.nest.grid
    items = {loop.name: (0, loop.extent - 1) for loop in grid if loop.kind == "item"}
    groups = [loop for loop in grid if loop.kind == "group"]
    return [
        _box(kernel, launch, operand, *what, piece, line_bytes)
        for piece, ranges in enumerate(_pieces(groups, first, last))
        for operand, what in _sides(kernel, launch, ranges | items).items()
    ]


def _sides(kernel: Kernel, launch: Launch, ranges: Ranges) -> dict[int, tuple[list[tuple[int, int]], bool]]:
    """By operand the first and last coordinate on each axis, and whether it is stored to."""
    found: dict[int, tuple[list[tuple[int, int]], bool]] = {}
    for phase in launch.nest.phases:
        inner = ranges | {loop.name: (0, loop.extent - 1) for loop in phase.loops}
        for access in phase.accesses:
            shape = kernel.launch_layout(launch, access.operand).shape
            indices = [i for i in access.index if isinstance(i, Index)]
            if len(indices) < len(access.index):
                continue
            sides = []
            for axis, (coordinate, extent) in enumerate(zip(indices, shape, strict=True)):
                low, high = _range(coordinate, inner)
                wide = access.width - 1 if axis == access.axis else 0
                sides.append((max(low, 0), min(high + wide, extent - 1)))
            if any(low > high for low, high in sides):
                continue
            known, written = found.get(access.operand, (sides, False))
            joined = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, sides, strict=True)]
            found[access.operand] = joined, written or access.write
    return found


def _pieces(loops: Sequence[Loop], first: int, last: int) -> list[Ranges]:
    """Groups ``first`` to ``last`` (excluded) as boxes of the grid, in dispatch order: a part of a row of groups, whole
    rows, a part of a row.
    """
    if first >= last:
        return []
    if not loops:
        return [{}]
    outer, *inner = loops
    size = prod(loop.extent for loop in inner)
    begin, end = first // size, (last - 1) // size
    if begin == end:
        return [{outer.name: (begin, begin)} | own for own in _pieces(inner, first % size, (last - 1) % size + 1)]
    out = []
    if first % size:
        out += [{outer.name: (begin, begin)} | own for own in _pieces(inner, first % size, size)]
        begin += 1
    whole = end if last % size else end + 1
    if begin < whole:
        out.append({outer.name: (begin, whole - 1)} | {loop.name: (0, loop.extent - 1) for loop in inner})
    if last % size:
        out += [{outer.name: (end, end)} | own for own in _pieces(inner, 0, last % size)]
    return out


def _wrapped(low: int, high: int, extent: int) -> tuple[int, int]:
    """Hull of the remainders by ``extent`` of the numbers from ``low`` to ``high``."""
    if high - low >= extent or low % extent > high % extent:
        return 0, extent - 1
    return low % extent, high % extent


def _range(value: Index, ranges: Ranges) -> tuple[int, int]:
    low = high = value.const
    for term in value.terms:
        first, last = (end // term.div for end in ranges[term.loop])
        if term.mod:
            first, last = _wrapped(first, last, term.mod)
        ends = sorted((first * term.coef, last * term.coef))
        low, high = low + ends[0], high + ends[1]
    return low, high


def _box(
    kernel: Kernel,
    launch: Launch,
    operand: int,
    sides: list[tuple[int, int]],
    write: bool,
    piece: int,
    line_bytes: int,
) -> Box:
    layout = kernel.launch_layout(launch, operand)
    item = DTYPES[kernel.operand_dtype(operand)]
    weight = _weights(layout)
    offsets = []
    for axis, (low, high) in enumerate(sides):
        own = _offsets(layout, axis, low, high, weight) * item
        # Neighbours in one line need no touch each.
        offsets.append(own[np.unique(own // line_bytes, return_index=True)[1]])
    origin = sum(b * w for b, w in zip(layout.base, weight, strict=True)) * item
    return Box(operand, tuple(offsets), origin, write, operand in launch.images, piece)


def _weights(layout: Layout) -> tuple[int, ...]:
    """Elements that a step along each storage dimension is."""
    if not layout.is_image:
        return (1,)
    _, columns, lanes = layout.size
    return (columns * lanes, lanes, 1)


def _offsets(layout: Layout, axis: int, low: int, high: int, weight: tuple[int, ...]) -> np.ndarray:
    """Linear element offset of the coordinates from ``low`` to ``high`` of an axis."""
    coordinate = np.arange(low, high + 1, dtype=np.int64)
    out = np.zeros_like(coordinate)
    inner = 1
    for mode in reversed(layout.axis_modes(axis)):
        out += coordinate // inner % mode.extent * (mode.stride * weight[mode.dim])
        inner *= mode.extent
    return out


def latest(kernel: Kernel, launch: Launch, first: int, last: int, cache_lines: int, line_bytes: int) -> list[Box]:
    """What the latest of work groups ``first`` to ``last`` (excluded) touch, so many of them that it fills a cache.

    These are the lines that a cache which forgets the longest unused holds after them.
    """
    groups = 1
    while True:
        out = touched(kernel, launch, max(last - groups, first), last, line_bytes)
        lines = sum(box.lines for box in out)
        if groups >= last - first or lines >= cache_lines:
            return out
        # As many as it should take, in steps that cannot overshoot by much.
        groups = min(max(2 * groups, int(groups * cache_lines / max(lines, 1))), 16 * groups)


def box_lines(box: Box, most: int) -> np.ndarray:
    """Byte addresses in a box's lines, from the start of the allocation, in order of storage; about ``most``."""
    sides = [np.sort(own) for own in box.offsets]
    while prod(own.size for own in sides) > most:
        longest = max(range(len(sides)), key=lambda axis: sides[axis].size)
        keep = max(sides[longest].size * most // prod(own.size for own in sides), 1)
        if keep == sides[longest].size:
            break
        sides[longest] = sides[longest][-keep:]
    out = np.full(1, box.origin, dtype=np.int64)
    for own in sides:
        out = (out[:, None] + own).reshape(-1)
    return np.sort(out)


def warm(
    state: State,
    hierarchy: Hierarchy,
    addresses: np.ndarray,
    boxes: list[Box],
    scratch: np.ndarray,
    core: int | None = None,
) -> None:
    """Touch the lines of boxes, of all operands in turn as work groups would, uncounted.

    Args:
        state: caches, updated.
        hierarchy: of the state.
        addresses: byte address of each operand's allocation.
        boxes: see ``latest``.
        scratch: counters of the hierarchy, to be thrown away [columns].
        core: that runs all the groups, and has only read: what several cores store to is dirty in one of them; None
            for all in turn.
    """
    last = hierarchy.levels[-1]
    all_lines = max(sum(box.lines for box in boxes), 1)
    part = min(1.0, ENOUGH * last.size_bytes / last.line_bytes / all_lines)
    where, turn, written, image = [], [], [], []
    for box in boxes:
        own = addresses[box.operand] + box_lines(box, max(int(box.lines * part), 1))
        where.append(own)
        turn.append(box.piece + np.arange(own.size) / own.size)
        written.append(np.full(own.size, box.write and core is None))
        image.append(np.full(own.size, box.image))
    if not boxes:
        return
    order = np.argsort(np.concatenate(turn), kind="stable")
    lines, writes, images = (np.concatenate(x)[order] for x in (where, written, image))
    lines -= lines % last.line_bytes
    # A slice is one core's, as a work group is.
    slices = min(_SLICES, lines.size)
    for number in range(slices):
        part_of = slice(number * lines.size // slices, (number + 1) * lines.size // slices)
        for way, own in ((BUFFERS, ~images[part_of]), (IMAGES, images[part_of])):
            if own.any():
                whose = number % hierarchy.cores if core is None else core
                run_ranges(state, whose, lines[part_of][own], last.line_bytes, writes[part_of][own], scratch, way)
