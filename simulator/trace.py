"""Address streams: a kernel's loop nest walked in dispatch order, straight into the cache hierarchy.

Nothing is stored: the compiled walker computes each access' coordinates from the nest's terms, its element offset from
per-axis tables of the operand's layout (a layout is separable: the offset is a sum over axes), and touches the lines.
Work groups go to cores in turn. Within a group, ``wave`` neighbouring work items execute together: the lines that one
instruction touches over the lanes of a wave are touched once each, as a coalescing memory unit does; on a CPU the wave
is one work item. Accesses outside the logical shape do not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numba import njit

from kernels.nest import Data, Index, Loop, Phase
from kernels.spec import Kernel, Launch
from layoutopt.graph import DTYPES
from layoutopt.layout import Layout
from simulator.cache import BUFFERS, IMAGES, State, line_access

__all__ = ["Walk", "compile_launch", "walk"]

_MAX_LINES = 2048  # distinct lines of one instruction over a wave: 128 lanes × 16 values


@dataclass(frozen=True)
class _PhaseArrays:
    """One phase: loop extents, and per access its shape in flat arrays."""

    extents: np.ndarray  # [loops]
    # [accesses, 9]: operand, width, axis, write, depth, first coordinate, coordinates, item bytes, way to the caches
    meta: np.ndarray
    coords: np.ndarray  # [coordinates, 6]: const, first term, terms, extent, first table entry, data operand or -1
    terms: np.ndarray  # [terms, 4]: variable, coef, div, mod


@dataclass(frozen=True)
class Walk:
    """A launch flattened for the compiled walker.

    Attributes:
        groups: work groups.
        group_extents: extents of the grid's group loops, outermost first.
        item_extents: extents of its item loops.
        phases: the phases' arrays.
        tables: element offset by coordinate, every axis of every operand end to end.
        bases: element offset of each operand's logical origin, by operand position.
        data: values of integer operands, end to end (gather coordinates).
        executions: load and store instructions in the whole launch, guards ignored.
    """

    groups: int
    group_extents: np.ndarray
    item_extents: np.ndarray
    phases: tuple[_PhaseArrays, ...]
    tables: np.ndarray
    bases: np.ndarray
    data: np.ndarray
    executions: int


def _table(layout: Layout, axis: int) -> np.ndarray:
    """Linear element offset contributed by each coordinate of an axis."""
    weight: tuple[int, ...] = (1,)
    if layout.is_image:
        _, columns, lanes = layout.size
        weight = (columns * lanes, lanes, 1)
    coordinate = np.arange(layout.shape[axis], dtype=np.int64)
    out = np.zeros_like(coordinate)
    inner = 1
    for mode in reversed(layout.axis_modes(axis)):
        out += (coordinate // inner) % mode.extent * (mode.stride * weight[mode.dim])
        inner *= mode.extent
    return out


def compile_launch(kernel: Kernel, launch: Launch, ids: Mapping[int, np.ndarray]) -> Walk:
    """Flatten a launch.

    Args:
        kernel: for its operands' layouts and dtypes.
        launch: which of its launches.
        ids: values of the integer operands that steer a gather, by operand position.
    """
    nest = launch.nest
    groups = [loop for loop in nest.grid if loop.kind == "group"] or [Loop("", 1, "group")]
    items = [loop for loop in nest.grid if loop.kind == "item"] or [Loop("", 1, "item")]
    # Variables are numbered group loops first, then item loops, then a phase's own.
    names: dict[str, int] = {loop.name: i for i, loop in enumerate(groups + items)}
    positions = sorted({a.operand for p in nest.phases for a in p.accesses} | set(ids))
    tables: list[np.ndarray] = []
    first_entry: dict[tuple[int, int], int] = {}
    bases = np.zeros(max(positions, default=0) + 1, dtype=np.int64)
    filled = 0
    for position in positions:
        layout = kernel.launch_layout(launch, position)
        base = layout.base
        bases[position] = base[0] if not layout.is_image else (base[0] * layout.size[1] + base[1]) * 4 + base[2]
        for axis in range(layout.rank):
            first_entry[position, axis] = filled
            tables.append(_table(layout, axis))
            filled += tables[-1].size
    data: list[np.ndarray] = []
    data_at: dict[int, int] = {}
    for position, values in ids.items():
        data_at[position] = sum(d.size for d in data)
        data.append(np.asarray(values, dtype=np.int64).reshape(-1))
    phases = tuple(_flatten(kernel, launch, p, names, first_entry, data_at) for p in nest.phases)
    return Walk(
        nest.groups,
        np.array([loop.extent for loop in groups], dtype=np.int64),
        np.array([loop.extent for loop in items], dtype=np.int64),
        phases,
        np.concatenate(tables) if tables else np.zeros(1, dtype=np.int64),
        bases,
        np.concatenate(data) if data else np.zeros(1, dtype=np.int64),
        sum(nest.executions(p, a) for p in nest.phases for a in p.accesses),
    )


def _flatten(
    kernel: Kernel,
    launch: Launch,
    phase: Phase,
    grid_names: Mapping[str, int],
    first_entry: Mapping[tuple[int, int], int],
    data_at: Mapping[int, int],
) -> _PhaseArrays:
    names = {**grid_names, **{loop.name: len(grid_names) + i for i, loop in enumerate(phase.loops)}}
    meta: list[tuple[int, ...]] = []
    coords: list[tuple[int, ...]] = []
    terms: list[tuple[int, ...]] = []

    def add_index(value: Index) -> tuple[int, int]:
        start = len(terms)
        terms.extend((names[t.loop], t.coef, t.div, t.mod) for t in value.terms)
        return start, len(value.terms)

    for access in phase.accesses:
        first = len(coords)
        shape = kernel.launch_layout(launch, access.operand).shape
        for axis, coordinate in enumerate(access.index):
            entry = first_entry[access.operand, axis]
            if isinstance(coordinate, Data):
                flat = _flat_index(coordinate, kernel.launch_layout(launch, coordinate.operand).shape)
                start, count = add_index(flat)
                coords.append((flat.const, start, count, shape[axis], entry, data_at[coordinate.operand]))
            else:
                start, count = add_index(coordinate)
                coords.append((coordinate.const, start, count, shape[axis], entry, -1))
        depth = len(phase.loops) if access.depth < 0 else access.depth
        item = DTYPES[kernel.operand_dtype(access.operand)]
        way = IMAGES if access.operand in launch.images else BUFFERS
        head = access.operand, access.width, access.axis, access.write, depth
        meta.append((*head, first, len(access.index), item, way))
    return _PhaseArrays(
        np.array([loop.extent for loop in phase.loops], dtype=np.int64),
        np.array(meta, dtype=np.int64).reshape(-1, 9),
        np.array(coords, dtype=np.int64).reshape(-1, 6),
        np.array(terms, dtype=np.int64).reshape(-1, 4),
    )


def _flat_index(data: Data, shape: tuple[int, ...]) -> Index:
    """The row-major position of the integer value that a Data coordinate reads."""
    out = Index()
    for axis, part in enumerate(data.index):
        weight = prod(shape[axis + 1 :])
        scaled = tuple(type(t)(t.loop, t.coef * weight, t.div, t.mod) for t in part.terms)
        out = out + Index(part.const * weight, scaled)
    return out


def walk(
    launch: Walk,
    state: State,
    addresses: np.ndarray,
    counts: np.ndarray,
    first: int,
    last: int,
    cores: int,
    wave: int,
) -> None:
    """Run work groups ``first`` to ``last`` (excluded) through the caches.

    Args:
        launch: the flattened launch.
        state: caches, updated.
        addresses: byte address of each operand's allocation, by operand position.
        counts: int64 [operands, 3 + 2 * levels + 2], increased: instructions, lines, bytes asked for, then the
            hierarchy's counters (see ``line_access``).
        first: first group.
        last: end of the groups.
        cores: cores that take groups in turn.
        wave: work items that execute together.
    """
    # A group runs its phases in turn; groups of a one-phase launch are walked in one compiled call.
    spans = [(first, last)] if len(launch.phases) == 1 else [(g, g + 1) for g in range(first, last)]
    for begin, end in spans:
        for phase in launch.phases:
            _walk_groups(
                begin,
                end,
                cores,
                wave,
                launch.group_extents,
                launch.item_extents,
                phase.extents,
                phase.meta,
                phase.coords,
                phase.terms,
                launch.tables,
                launch.bases,
                launch.data,
                addresses,
                state.lines,
                state.geometry,
                counts,
            )


@njit(cache=True)
def _walk_groups(
    first_group: int,
    last_group: int,
    cores: int,
    wave: int,
    group_extents: np.ndarray,
    item_extents: np.ndarray,
    extents: np.ndarray,
    meta: np.ndarray,
    coords: np.ndarray,
    terms: np.ndarray,
    tables: np.ndarray,
    bases: np.ndarray,
    data: np.ndarray,
    addresses: np.ndarray,
    cached: np.ndarray,
    geometry: np.ndarray,
    counts: np.ndarray,
) -> None:
    n_group, n_item, n_loop = group_extents.size, item_extents.size, extents.size
    grid = n_group + n_item
    variables = np.zeros(grid + n_loop, dtype=np.int64)
    lanes = np.zeros((wave, n_item), dtype=np.int64)
    lines = np.zeros(_MAX_LINES, dtype=np.int64)
    items = 1
    for i in range(n_item):
        items *= item_extents[i]
    for group in range(first_group, last_group):
        core = group % cores
        rest = group
        for i in range(n_group - 1, -1, -1):
            variables[i] = rest % group_extents[i]
            rest //= group_extents[i]
        for start in range(0, items, wave):
            width = min(wave, items - start)
            for lane in range(width):
                rest = start + lane
                for i in range(n_item - 1, -1, -1):
                    lanes[lane, i] = rest % item_extents[i]
                    rest //= item_extents[i]
            for i in range(n_loop):
                variables[grid + i] = 0
            entered = 0  # loads at this depth or deeper are due
            while True:
                # Which loop is next to advance, once this iteration is over.
                advance = n_loop - 1
                while advance >= 0 and variables[grid + advance] == extents[advance] - 1:
                    advance -= 1
                for part in range(3):
                    if part != 1 and entered == n_loop and advance == n_loop - 1:
                        continue  # an inner iteration: nothing begins or ends
                    for a in range(meta.shape[0]):
                        depth = meta[a, 4]
                        write = meta[a, 3] == 1
                        if part == 0:
                            due = depth < n_loop and not write and depth >= entered
                        elif part == 1:
                            due = depth == n_loop
                        else:
                            due = depth < n_loop and write and depth > advance
                        if not due:
                            continue
                        # One instruction over the lanes of a wave: the distinct lines are touched once each.
                        operand, vector, axis = meta[a, 0], meta[a, 1], meta[a, 2]
                        first, n_coords, item_bytes, way = meta[a, 5], meta[a, 6], meta[a, 7], meta[a, 8]
                        near = 0  # the first level on its way
                        while not geometry[near, 5] & way:
                            near += 1
                        near_shift = geometry[near, 4]
                        found = 0
                        asked = 0
                        for lane in range(width):
                            for i in range(n_item):
                                variables[n_group + i] = lanes[lane, i]
                            offset = bases[operand]
                            inside = True
                            along = 0
                            for c in range(n_coords):
                                value = coords[first + c, 0]
                                for t in range(coords[first + c, 1], coords[first + c, 1] + coords[first + c, 2]):
                                    x = variables[terms[t, 0]]
                                    if terms[t, 2] != 1:
                                        x //= terms[t, 2]
                                    if terms[t, 3] != 0:
                                        x %= terms[t, 3]
                                    value += x * terms[t, 1]
                                if coords[first + c, 5] >= 0:
                                    value = data[coords[first + c, 5] + value]
                                if value < 0 or value >= coords[first + c, 3]:
                                    inside = False
                                    break
                                if c == axis:
                                    along = value
                                else:
                                    offset += tables[coords[first + c, 4] + value]
                            if not inside:
                                continue
                            counts[operand, 0] += 1
                            if n_coords == 0:
                                reach, table = 1, -1
                            else:
                                table = coords[first + axis, 4] + along
                                reach = min(vector, coords[first + axis, 3] - along)
                            asked += reach * item_bytes
                            contiguous = reach > 1 and tables[table + reach - 1] - tables[table] == reach - 1
                            step = reach - 1 if contiguous else 1
                            v = 0
                            while v < reach:
                                where = offset
                                if table >= 0:
                                    where += tables[table + v]
                                line = (addresses[operand] + where * item_bytes) >> near_shift
                                low = line
                                if contiguous and v > 0 and found:
                                    low = min(line, lines[found - 1] + 1) if lines[found - 1] < line else line
                                for one in range(low, line + 1):
                                    seen = False
                                    for k in range(found - 1, -1, -1):
                                        if lines[k] == one:
                                            seen = True
                                            break
                                    if not seen and found < lines.size:
                                        lines[found] = one
                                        found += 1
                                v += step
                        counts[operand, 2] += asked
                        counts[operand, 1] += found
                        for k in range(found):
                            address = lines[k] << near_shift
                            line_access(cached, geometry, core, address, write, way, counts, operand, 3)
                if advance < 0:
                    break
                variables[grid + advance] += 1
                for i in range(advance + 1, n_loop):
                    variables[grid + i] = 0
                entered = advance + 1
