"""How many distinct cache lines a kernel's accesses touch, from one execution out to the whole launch.

Accesses that differ in constant offsets alone (the pieces of a register tile, an unrolled loop) are one *bundle*: its
offsets spread like one more, innermost, loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from kernels.nest import Access, Data, Index, Term
from layoutopt.layout import LANES, Layout

__all__ = ["Bundle", "Spread", "bundles", "index_digits", "lane_stride", "spread"]

Coord = tuple[int, tuple[Term, ...]]
"""(gather operand or -1, terms): a coordinate without its constant."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Accesses alike but for constants.

    Attributes:
        access: one of them.
        count: how many they are.
        coords: per axis of the operand, the coordinate without its constant.
        offsets: (axis, step, count) of the constants where they differ.
    """

    access: Access
    count: int
    coords: tuple[Coord, ...]
    offsets: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Distinct lines per suffix of the enclosing loops (position k: loops k and inwards); stride in bytes per loop."""

    lines: tuple[float, ...]
    strides: tuple[int, ...]


def bundles(accesses: Iterable[Access]) -> list[Bundle]:
    """The accesses of a phase, bundled; in order of first appearance."""
    groups: list[tuple[Access, tuple[Coord, ...], list[tuple[int, ...]]]] = []
    alike: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for access in accesses:
        # The accesses of a register tile share their coordinates' terms: most are known without a closer look.
        key = access.operand, access.width, access.depth, access.write, access.axis, _terms(access.index)
        if key in alike:
            alike[key].append(_consts(access.index))
            continue
        coords, consts = _split(access.index)
        for first, known, seen in groups:
            if (
                first.operand == access.operand
                and first.width == access.width
                and first.depth == access.depth
                and first.write == access.write
                and first.axis == access.axis
                and known == coords
            ):
                seen.append(consts)
                alike[key] = seen
                break
        else:
            groups.append((access, coords, [consts]))
            alike[key] = groups[-1][2]
    return [Bundle(first, len(seen), coords, _offsets(seen)) for first, coords, seen in groups]


def _terms(index: tuple[Index | Data, ...]) -> tuple[int, ...]:
    """Which objects the coordinates' terms are (of those read from an operand, the coordinates themselves)."""
    return tuple([id(coord.terms) if isinstance(coord, Index) else id(coord) for coord in index])


def _consts(index: tuple[Index | Data, ...]) -> tuple[int, ...]:
    return tuple([coord.const if isinstance(coord, Index) else _split((coord,))[1][0] for coord in index])


def _split(index: tuple[Index | Data, ...]) -> tuple[tuple[Coord, ...], tuple[int, ...]]:
    coords: list[Coord] = []
    consts = []
    for coord in index:
        if isinstance(coord, Data):
            coords.append((coord.operand, tuple(t for part in coord.index for t in part.terms)))
            consts.append(coord.index[0].const if coord.index else 0)
        else:
            coords.append((-1, coord.terms))
            consts.append(coord.const)
    return tuple(coords), tuple(consts)


def _offsets(seen: list[tuple[int, ...]]) -> tuple[tuple[int, int, int], ...]:
    if len(seen) == 1:
        return ()
    out = []
    for axis in range(len(seen[0])):
        values = sorted({consts[axis] for consts in seen})
        if len(values) > 1:
            step = gcd(*(v - values[0] for v in values[1:]))
            if (values[-1] - values[0]) // step + 1 != len(values):
                step = max((values[-1] - values[0]) // (len(values) - 1), 1)
            out.append((axis, step, len(values)))
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def _digits(layout: Layout, item: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per axis, (extent, byte stride) of its modes, innermost first; an image counts as row-major memory."""
    elems = (layout.size[1] * LANES, LANES, 1) if layout.is_image else (1,)
    out: list[list[tuple[int, int]]] = [[] for _ in layout.shape]
    for mode in layout.modes:
        out[mode.axis].insert(0, (mode.extent, mode.stride * elems[mode.dim] * item))
    return tuple(tuple(modes) for modes in out)


def lane_stride(layout: Layout, axis: int, item: int) -> int:
    """Bytes between neighbours along an axis."""
    modes = _digits(layout, item)[axis]
    return modes[0][1] if modes else 0


@lru_cache(maxsize=1 << 14)
def index_digits(layout: Layout, coords: tuple[Coord, ...]) -> tuple[int, int]:
    """(shifts and masks, divisions and remainders) in the index expression of a bundle's access."""
    found = [0, 0]
    for axis, modes in enumerate(_digits(layout, 1)):
        inner = 1
        for position, (extent, _) in enumerate(modes):
            if inner > 1:
                found[inner & (inner - 1) != 0] += 1
            if position + 1 < len(modes):
                found[extent & (extent - 1) != 0] += 1
            inner *= extent
        for term in coords[axis][1]:
            for number in (term.div, term.mod):
                if number > 1:
                    found[number & (number - 1) != 0] += 1
    return found[0], found[1]


def _visit(modes: tuple[tuple[int, int], ...], extent: int, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(count, byte stride) of the storage digits that coordinates ``sum of step * [0, count)`` visit on an axis."""
    merged: list[tuple[int, int]] = []
    for step, count in sorted(pieces):
        if count <= 1 or step == 0:
            continue
        if merged and step <= merged[-1][0] * merged[-1][1] and step % merged[-1][0] == 0:
            first, n = merged[-1]
            merged[-1] = (first, (step * (count - 1)) // first + n)
        else:
            merged.append((step, count))
    out = []
    for step, count in merged:
        left = min(count, -(-extent // step))
        span, weight = step * (left - 1) + 1, 1
        for position, (n_mode, stride) in enumerate(modes):
            if left <= 1 or span <= weight:
                break
            hop = max(step // weight, 1)
            if hop >= n_mode and position + 1 < len(modes):
                n = 1 if hop % n_mode == 0 else min(n_mode // gcd(hop, n_mode), left)
                hop = gcd(hop, n_mode)
            else:
                n = min(-(-min(n_mode, -(-span // weight)) // hop), left)
            if n > 1:
                out.append((n, hop * stride))
                left = -(-left // n)
            weight *= n_mode
    return out


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
def spread(
    layout: Layout,
    coords: tuple[Coord, ...],
    offsets: tuple[tuple[int, int, int], ...],
    vector: tuple[int, int],
    item: int,
    line: int,
    loops: tuple[tuple[str, int], ...],
) -> Spread:
    """Lines and strides of a bundle.

    Args:
        layout: of the operand, over the axes that the bundle indexes.
        coords: see :class:`Bundle`.
        offsets: see :class:`Bundle`.
        vector: (axis, width) of one access.
        item: bytes of an element.
        line: bytes of a line.
        loops: (name, extent) of the loops around it, outermost first.
    """
    modes = _digits(layout, item)
    extents = layout.shape
    pieces: list[list[tuple[int, int]]] = [[] for _ in extents]
    jumps: list[tuple[int, int]] = []
    if vector[1] > 1:
        pieces[vector[0]].append((1, vector[1]))
    for axis, step, count in offsets:
        if coords[axis][0] < 0:
            pieces[axis].append((step, count))
        else:
            jumps.append(_jump(modes[axis], extents[axis], count, line))
    visited = [_visit(modes[a], extents[a], p) if p else [] for a, p in enumerate(pieces)]
    lines = [_lines([d for v in visited for d in v] + jumps, item, line)]
    strides = []
    for name, extent in reversed(loops):
        stride, touched, jumped = 0, set(), False
        for axis, (operand, terms) in enumerate(coords):
            for term in terms:
                if term.loop != name or not term.coef:
                    continue
                if operand >= 0:
                    jumps.append(_jump(modes[axis], extents[axis], extent, line))
                    stride, jumped = max(stride, jumps[-1][1]), True
                    continue
                count = -(-extent // term.div)
                piece = (abs(term.coef), min(count, term.mod) if term.mod else count)
                pieces[axis].append(piece)
                touched.add(axis)
                alone = _visit(modes[axis], extents[axis], [piece])
                stride = max(stride, alone[0][1] if alone else 0)
        for axis in touched:
            visited[axis] = _visit(modes[axis], extents[axis], pieces[axis])
        strides.append(stride)
        changed = touched or jumped
        lines.append(_lines([d for v in visited for d in v] + jumps, item, line) if changed else lines[-1])
    return Spread(tuple(reversed(lines)), tuple(reversed(strides)))


def _jump(modes: tuple[tuple[int, int], ...], extent: int, count: int, line: int) -> tuple[int, int]:
    """A coordinate read from memory: as many places as it has values, each in lines of its own."""
    stride = max((s for _, s in modes), default=0)
    return min(count, extent), max(stride, line + 1 if stride else 0)
