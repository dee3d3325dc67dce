"""A launch flattened for the compiled walker: its nest's loops, accesses and coordinates as arrays.

A layout is separable: an element's offset is a sum over axes, each from a table (or a stride). Coordinates that several
accesses of a phase have in common are there once; terms are sorted by who moves them: work groups, lanes, loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from kernels.nest import Access, Bound, Data, Index, Loop, Phase
from kernels.source import piece_of
from kernels.spec import Kernel, Launch
from layoutopt.errors import LayoutOptError
from layoutopt.graph import DTYPES
from layoutopt.layout import LANES, Layout
from simulator.cache import BUFFERS, IMAGES
from simulator.walker import AXIS, COORD, DEEPEST, META, PHASE

__all__ = ["TexelBlock", "Walk", "compile_launch"]

_FREE = 1 << 60  # no clamp


@dataclass(frozen=True)
class TexelBlock:
    """How a texture unit stores a 2-D image: blocks of ``columns`` by ``rows`` texels that lie together, row by row.

    Of operands in image layouts only. Images over buffers (``Launch.images``) have one dimension and lie as the buffer.
    """

    columns: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        if self.columns < 1 or self.rows < 1:
            raise LayoutOptError(f"a texel block of {self.columns} x {self.rows}: at least one texel")


@dataclass(frozen=True)
class Walk:
    """A launch flattened for the compiled walker.

    Attributes:
        groups: work groups.
        group_extents: extents of the grid's group loops, outermost first.
        item_extents: extents of its item loops.
        phases: [phases, columns of ``walker.PHASE``].
        extents: of the phases' loops, end to end.
        meta: [accesses, columns of ``walker.META``]: those of a phase in the order in which they can be due.
        lists: coordinates of each access, end to end.
        coords: [coordinates, columns of ``walker.COORD``].
        terms: [terms, 4]: variable, coef, div, mod; a variable is numbered among its kind.
        tables: element offset by coordinate, every axis of more than one stride of every operand end to end.
        bases: element offset of each operand's logical origin, by operand position.
        blocks: [operands, 3]: texels of an image's row, and its texel block; 0 where there is none.
        data: values of integer operands, end to end (gather coordinates).
        executions: load and store instructions in the whole launch, guards ignored.
        shared: outermost loops within which the phases run in turn.
        memo: what the lanes of waves contribute, by wave width.
    """

    groups: int
    group_extents: np.ndarray
    item_extents: np.ndarray
    phases: np.ndarray
    extents: np.ndarray
    meta: np.ndarray
    lists: np.ndarray
    coords: np.ndarray
    terms: np.ndarray
    tables: np.ndarray
    bases: np.ndarray
    blocks: np.ndarray
    data: np.ndarray
    executions: int
    shared: int = 0
    memo: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def items(self) -> int:
        """Work items of a group."""
        return int(np.prod(self.item_extents))


def _weights(layout: Layout) -> tuple[int, ...]:
    """Elements that a step along each storage dimension is."""
    if not layout.is_image:
        return (1,)
    _, columns, lanes = layout.size
    return (columns * lanes, lanes, 1)


def _table(layout: Layout, axis: int) -> np.ndarray:
    """Linear element offset contributed by each coordinate of an axis, those of its padding included."""
    weight = _weights(layout)
    coordinate = np.arange(max(layout.shape[axis], layout.padded_shape[axis]), dtype=np.int64)
    out = np.zeros_like(coordinate)
    inner = 1
    for mode in reversed(layout.axis_modes(axis)):
        out += (coordinate // inner) % mode.extent * (mode.stride * weight[mode.dim])
        inner *= mode.extent
    return out


def compile_launch(
    kernel: Kernel, launch: Launch, ids: Mapping[int, np.ndarray], block: TexelBlock | None = None
) -> Walk:
    """Flatten a launch.

    Args:
        kernel: for its operands' layouts and dtypes.
        launch: which of its launches.
        ids: values of the integer operands that steer a gather, by operand position; of one that only decides whether
            something happens they may be missing: it then does.
        block: how 2-D images are stored; None: row by row.
    """
    return _Compiler(kernel, launch, ids, block or TexelBlock()).walk()


class _Compiler:
    """Collects the arrays of one launch."""

    def __init__(self, kernel: Kernel, launch: Launch, ids: Mapping[int, np.ndarray], block: TexelBlock) -> None:
        self.kernel, self.launch = kernel, launch
        nest = launch.nest
        self.groups = [loop for loop in nest.grid if loop.kind == "group"] or [Loop("", 1, "group")]
        self.items = [loop for loop in nest.grid if loop.kind == "item"] or [Loop("", 1, "item")]
        self.positions = sorted({a.operand for p in nest.phases for a in (*p.accesses, *p.border)} | set(ids))
        self.layouts = {p: kernel.launch_layout(launch, p) for p in self.positions}
        self.tables: list[np.ndarray] = []
        self.first_entry: dict[tuple[int, int], int] = {}
        size = max(self.positions, default=0) + 1
        self.bases, self.blocks = np.zeros(size, dtype=np.int64), np.zeros((size, 3), dtype=np.int64)
        self._lay_out(block)
        self.ids = {position: self._seen(position, values) for position, values in ids.items()}
        self.data: list[np.ndarray] = []
        self.data_at: dict[tuple[object, ...], tuple[int, tuple[int, ...]]] = {}
        self.terms: list[tuple[int, ...]] = []
        self.coords: list[tuple[int, ...]] = []
        self.lists: list[int] = []
        self.meta: list[tuple[int, ...]] = []

    def _lay_out(self, block: TexelBlock) -> None:
        filled = 0
        for position, layout in self.layouts.items():
            base = layout.base
            self.bases[position] = base[0]
            if layout.is_image:
                columns = layout.size[1]
                self.bases[position] = (base[0] * columns + base[1]) * LANES + base[2]
                if block != TexelBlock():
                    self.blocks[position] = columns, block.columns, block.rows
            for axis in range(layout.rank):
                modes = layout.axis_modes(axis)
                if len(modes) < 2:  # of one stride, and perhaps as long as a whole model: no table
                    stride = modes[0].stride * _weights(layout)[modes[0].dim] if modes else 0
                    self.first_entry[position, axis] = -2 - stride
                    continue
                self.first_entry[position, axis] = filled
                self.tables.append(_table(layout, axis))
                filled += self.tables[-1].size

    def _seen(self, position: int, values: np.ndarray) -> np.ndarray:
        """The integers of an operand, by the axes under which the launch indexes it."""
        own, view = self.kernel.buffer_layout(position), self.layouts[position]
        integers = np.asarray(values, dtype=np.int64).reshape(own.shape)
        if view != own:
            storage = np.zeros(own.size_elems, dtype=np.int64)
            storage[own.linear_offsets()] = integers
            integers = storage[view.linear_offsets()]
        return integers.reshape(-1)

    def _integers(self, data: Data) -> tuple[int, tuple[int, ...]]:
        """Where the integers lie among ``data``, nowhere being negative, and their shape."""
        key = data.operand, data.nowhere, data.via
        if key not in self.data_at:
            if data.operand not in self.ids:
                raise LayoutOptError(f"{self.launch.entry}: operand {data.operand} steers it and has no values")
            values = np.where(self.ids[data.operand] == data.nowhere, -1, self.ids[data.operand])
            shape = self.layouts[data.operand].shape
            if data.via is not None:
                values = data.via.table(values)
                shape = values.shape
            self.data_at[key] = sum(d.size for d in self.data), shape
            self.data.append(values.reshape(-1))
        return self.data_at[key]

    def _stretch(self, phase: Phase, extents: list[int]) -> None:
        """Loops that go along a table made of integers are as long as it is."""
        loops = [loop.name for loop in phase.loops]
        for access in (*phase.accesses, *phase.border):
            for data in (*access.index, *(bound.value for bound in access.when)):
                if isinstance(data, Data) and data.via is not None:
                    _, shape = self._integers(data)
                    for place, n in zip(data.index, shape, strict=True):
                        for name in (t.loop for t in place.terms if len(place.terms) == 1 and t.coef == 1):
                            if name in loops:
                                extents[loops.index(name) - len(loops)] = n

    def walk(self) -> Walk:
        """The arrays of all phases, end to end."""
        nest = self.launch.nest
        phases: list[tuple[int, ...]] = []
        extents: list[int] = []
        for phase in nest.phases:
            loop, access, coord = len(extents), len(self.meta), len(self.coords)
            extents += [x.extent for x in phase.loops]
            self._stretch(phase, extents)
            *stages, often = self._phase(phase)
            phases.append((loop, len(phase.loops), access, *stages, coord, len(self.coords) - coord, often))
        return Walk(
            nest.groups,
            np.array([loop.extent for loop in self.groups], dtype=np.int64),
            np.array([loop.extent for loop in self.items], dtype=np.int64),
            _rows(phases, PHASE),
            np.array(extents, dtype=np.int64),
            _rows(self.meta, META),
            np.array(self.lists, dtype=np.int64),
            _rows(self.coords, COORD),
            _rows(self.terms, 4),
            np.concatenate(self.tables) if self.tables else np.zeros(1, dtype=np.int64),
            self.bases,
            self.blocks,
            np.concatenate(self.data) if self.data else np.zeros(1, dtype=np.int64),
            sum(nest.executions(p, a) for p in nest.phases for a in p.accesses),
            nest.shared,
        )

    def _phase(self, phase: Phase) -> tuple[int, int, int, int]:
        """One phase's accesses and, shared by them, their coordinates, innermost loops first.

        Returns:
            How many accesses are loads before inner loops, in the innermost loop, and stores after inner loops; how
            many coordinates are needed in the innermost loop or moved by some loop.
        """
        known: dict[tuple[object, ...], int] = {}
        first, listed = len(self.coords), len(self.lists)
        stages: tuple[list[Access], list[Access], list[Access]] = ([], [], [])
        for access in (*phase.accesses, *phase.border):
            inner = access.depth < 0 or access.depth == len(phase.loops)
            stages[1 if inner else 2 if access.write else 0].append(access)
        begin = len(self.meta)
        spans = []
        for stage in stages:
            start = len(self.lists)
            for access in stage:
                self._access(access, phase, known)
            spans.append((start, len(self.lists)))
        fresh = self.coords[first:]
        inside = {c - first for c in self.lists[slice(*spans[1])]}
        often = {c for c in range(len(fresh)) if c in inside or fresh[c][DEEPEST] >= 0}
        order = sorted(range(len(fresh)), key=lambda c: (-fresh[c][DEEPEST], c not in often))
        self.coords[first:] = [fresh[c] for c in order]
        place = {first + old: first + new for new, old in enumerate(order)}
        place[-1] = -1
        self.lists[listed:] = [place[c] for c in self.lists[listed:]]
        self.meta[begin:] = [(*m[:AXIS], place[m[AXIS]], *m[AXIS + 1 :]) for m in self.meta[begin:]]
        return len(stages[0]), len(stages[1]), len(stages[2]), len(often)

    def _access(self, access: Access, phase: Phase, known: dict[tuple[object, ...], int]) -> None:
        layout = self.layouts[access.operand]
        clamps = {c.axis: (c.most, c.plus) for c in access.clamps}
        vector = access.width > 1 and layout.rank > 0
        used = []
        for axis, place in enumerate(access.index):
            below = layout.padded_shape[axis] if access.past else layout.shape[axis]
            key = place, below, self.first_entry[access.operand, axis], *clamps.get(axis, (_FREE, 0))
            used.append(self._coordinate(key, phase, known))
        along = used[access.axis] if vector else -1
        for bound in access.when:
            if isinstance(bound.value, Index) or bound.value.operand in self.ids:
                used.append(self._bound(bound, phase, known))
        fixed = [c for c in used if self.coords[c][DEEPEST] < 0]
        moving = [c for c in used if self.coords[c][DEEPEST] >= 0]
        apart = [self._bound(bound, phase, known) for bound in access.vector_when] if vector else []
        part, splat = piece_of(layout, access.axis, access.width, access.write) if vector else (1, False)
        self.meta.append(
            (
                access.operand,
                access.width if vector else 1,
                along,
                int(access.write),
                len(phase.loops) if access.depth < 0 else access.depth,
                len(self.lists),
                len(fixed),
                len(moving),
                len(apart),
                DTYPES[self.kernel.operand_dtype(access.operand)],
                IMAGES if access.operand in self.launch.images else BUFFERS,
                part,
                int(access.past),
                int(splat),
            )
        )
        self.lists += [*fixed, *moving, *apart]

    def _bound(self, bound: Bound, phase: Phase, known: dict[tuple[object, ...], int]) -> int:
        return self._coordinate((bound.value, bound.below, -1, _FREE, 0), phase, known)

    def _coordinate(self, key: tuple[object, ...], phase: Phase, known: dict[tuple[object, ...], int]) -> int:
        if key in known:
            return known[key]
        place, below, table, most, plus = key
        source, length = -1, 0
        if isinstance(place, Data):
            source, shape = self._integers(place)
            length = prod(shape)
            place = _flat_index(place, shape)
        assert isinstance(place, Index)
        first = len(self.terms)
        counts = []
        deepest = -1
        for loops in (self.groups, self.items, phase.loops):
            numbers = {loop.name: number for number, loop in enumerate(loops)}
            own = [t for t in place.terms if t.loop in numbers]
            self.terms += [(numbers[t.loop], t.coef, t.div, t.mod) for t in own]
            counts.append(len(own))
            if loops is phase.loops:
                deepest = max((numbers[t.loop] for t in own), default=-1)
        if sum(counts) != len(place.terms):
            raise LayoutOptError(f"{self.launch.entry}: its nest has an index over loops that are not there: {place}")
        known[key] = len(self.coords)
        self.coords.append((place.const, first, *counts, below, table, source, length, most, plus, deepest))  # type: ignore[arg-type]
        return known[key]


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


def _flat_index(data: Data, shape: tuple[int, ...]) -> Index:
    """The row-major position of the integer value that a Data coordinate reads."""
    out = Index()
    for axis, part in enumerate(data.index):
        weight = prod(shape[axis + 1 :])
        scaled = tuple(type(t)(t.loop, t.coef * weight, t.div, t.mod) for t in part.terms)
        out = out + Index(part.const * weight, scaled)
    return out
