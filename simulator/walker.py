"""The compiled loop of the address streams: a flattened launch (``simulator/trace.py``) walked wave by wave.

An access' address is a sum of parts, one per coordinate: an offset from the table of the operand's axis. A coordinate's
value is itself a sum: of what the work group, the wave's lanes and the sequential loops contribute. The lanes' part is
the same in every group and worked out once; a coordinate is worked out anew only when a loop that it depends on has
moved, and once for all lanes where they agree. Equal coordinates of different accesses are one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simulator.cache import line_access
from simulator.sets import SERVES, UNIT

__all__ = ["COORD", "META", "lane_parts", "walk_groups"]

_OUT = -(1 << 62)  # an offset of what does not happen
_MOST_UNITS = 4096  # distinct lines or sectors of one request: 128 lanes × 64 bytes, and more

META = (
    "operand",
    "width",
    "axis",
    "write",
    "depth",
    "first",
    "coords",
    "apart",
    "item",
    "way",
    "part",
    "past",
    "splat",
)
"""Columns of an access: operand; width; which of its coordinates is the vector's (-1: none); write; depth; its first
entry in the list of coordinates, how many of them make the address or forbid it, how many after these say whether it
is a vector; bytes of an element; way to the caches; width of the pieces that a vector is moved in; whether it is moved
whole also past the shape; whether one value stands for all."""

COORD = ("const", "first", "groups", "items", "loops", "below", "table", "data", "length", "most", "plus", "deepest")
"""Columns of a coordinate: constant; first term, and how many terms over groups, items and loops follow each other; the
end of its axis; first entry of its table (-1: it only has to hold; -2 - n: each is n elements further); first entry of
the integers that it reads (-1: none) and how many there are; clamp and what is added to it; the innermost loop that it
depends on (-1: none). Those of a phase follow each other, by that loop, innermost first."""


@njit(cache=True)
def _sum(terms: np.ndarray, first: int, count: int, variables: np.ndarray) -> int:
    total = 0
    for t in range(first, first + count):
        x = variables[terms[t, 0]]
        if terms[t, 2] != 1:
            x //= terms[t, 2]
        if terms[t, 3] != 0:
            x %= terms[t, 3]
        total += x * terms[t, 1]
    return total


@njit(cache=True)
def _value(x: int, coords: np.ndarray, c: int, data: np.ndarray) -> int:
    """A coordinate from its sum; -1 where it does not exist."""
    if coords[c, 7] >= 0:
        if x < 0 or x >= coords[c, 8]:
            return -1
        x = data[coords[c, 7] + x]
    return min(x, coords[c, 9]) + coords[c, 10]


@njit(cache=True)
def _part(value: int, coords: np.ndarray, c: int, tables: np.ndarray) -> int:
    """What a coordinate adds to the element offset, or _OUT."""
    table = coords[c, 6]
    if table == -1:
        return 0 if value < coords[c, 5] and (value >= 0 or coords[c, 7] < 0) else _OUT
    if value < 0 or value >= coords[c, 5]:
        return _OUT
    return tables[table + value] if table >= 0 else value * (-2 - table)


@njit(cache=True)
def lane_parts(
    item_extents: np.ndarray, wave: int, coords: np.ndarray, terms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the lanes contribute to each coordinate [waves, coordinates, lanes], and where all of a wave agree."""
    n_item, items = item_extents.size, 1
    for i in range(n_item):
        items *= item_extents[i]
    waves = (items + wave - 1) // wave
    parts = np.zeros((waves, coords.shape[0], wave), dtype=np.int64)
    agree = np.ones((waves, coords.shape[0]), dtype=np.bool_)
    variables = np.zeros(n_item, dtype=np.int64)
    for item in range(items):
        rest = item
        for i in range(n_item - 1, -1, -1):
            variables[i] = rest % item_extents[i]
            rest //= item_extents[i]
        w, lane = item // wave, item % wave
        for c in range(coords.shape[0]):
            x = _sum(terms, coords[c, 1] + coords[c, 2], coords[c, 3], variables)
            parts[w, c, lane] = x
            if x != parts[w, c, 0]:
                agree[w, c] = False
    return parts, agree


@njit(cache=True)
def _add_unit(units: np.ndarray, found: int, unit: int) -> int:
    for k in range(found - 1, -1, -1):
        if units[k] == unit:
            return found
    if found < units.size:
        units[found] = unit
        found += 1
    return found


@njit(cache=True)
def _coarser(units: np.ndarray, count: int, shift: int, out: np.ndarray) -> int:
    """The distinct larger units that some units lie in; how many."""
    found = 0
    for k in range(count):
        found = _add_unit(out, found, units[k] >> shift)
    return found


@njit(cache=True)
def _swizzled(offset: int, block: np.ndarray) -> int:
    """The element at which a texel of an image lies whose texels are stored by blocks (see ``TexelBlock``)."""
    columns, across, down = block[0], block[1], block[2]
    texel, lane = offset // 4, offset % 4
    row, column = texel // columns, texel % columns
    per_row = (columns + across - 1) // across
    place = ((row // down) * per_row + column // across) * (across * down) + row % down * across + column % across
    return place * 4 + lane


@njit(cache=True)
def walk_groups(
    span: np.ndarray,
    group_extents: np.ndarray,
    items: int,
    wave: int,
    phases: np.ndarray,
    extents: np.ndarray,
    meta: np.ndarray,
    lists: np.ndarray,
    coords: np.ndarray,
    terms: np.ndarray,
    tables: np.ndarray,
    bases: np.ndarray,
    blocks: np.ndarray,
    data: np.ndarray,
    parts: np.ndarray,
    agree: np.ndarray,
    addresses: np.ndarray,
    cached: np.ndarray,
    geometry: np.ndarray,
    counts: np.ndarray,
    requests: np.ndarray,
    records: np.ndarray,
) -> int:
    """Walk work groups; the arrays are those of a ``trace.Walk``, counters as in ``trace.walk``.

    ``span``: first group, end of the groups, cores, groups that run at once on a core (0: one after the other, in
    turn), instructions of a turn (0: to the end of a phase), outermost loops that the phases share, whether accesses
    are written down in ``records`` instead of cached, log2 of the lines and of the sectors that are counted in
    ``requests`` (0: none are). Returns how many pieces were written down, or would have been had there been room.
    """
    first, last, cores, resident, turn = span[0], span[1], span[2], span[3], span[4]
    shared, recording, line_shift, sector_shift = span[5], span[6] != 0, span[7], span[8]
    n_group, n_wave, n_phase = group_extents.size, parts.shape[0], phases.shape[0]
    slots = max(min(cores * resident, last - first), 1) if resident > 0 else 1
    n_loop = 0
    for p in range(n_phase):
        n_loop = max(n_loop, phases[p, 1])
    group_of = np.full(slots, -1, dtype=np.int64)
    phase_of = np.zeros(slots, dtype=np.int64)
    state = np.zeros((slots, n_wave, n_loop), dtype=np.int64)
    done = np.zeros((slots, n_wave), dtype=np.bool_)
    outer = np.zeros((slots, max(shared, 1)), dtype=np.int64)  # the shared loops
    variables = np.zeros(n_group, dtype=np.int64)
    loops = np.zeros(max(n_loop, 1), dtype=np.int64)
    n_coord = coords.shape[0]
    base = np.zeros(n_coord, dtype=np.int64)
    same = np.zeros(n_coord, dtype=np.int64)  # offset where all lanes agree
    where = np.zeros(n_coord, dtype=np.int64)  # and the coordinate's value
    own = np.zeros((n_coord, wave), dtype=np.int64)
    own_where = np.zeros((n_coord, wave), dtype=np.int64)
    offsets = np.zeros(wave, dtype=np.int64)
    along = np.zeros(wave, dtype=np.int64)
    single = np.zeros(wave, dtype=np.bool_)
    units = np.zeros(_MOST_UNITS, dtype=np.int64)
    coarse = np.zeros(_MOST_UNITS, dtype=np.int64)
    written = 0
    upcoming, alive = first, 0
    for s in range(slots):
        if upcoming < last:
            group_of[s] = upcoming
            upcoming += 1
            alive += 1
    while alive > 0:
        for s in range(slots):
            if group_of[s] < 0:
                continue
            group, phase = group_of[s], phase_of[s]
            core = s % cores if resident > 0 else group % cores
            rest = group
            for i in range(n_group - 1, -1, -1):
                variables[i] = rest % group_extents[i]
                rest //= group_extents[i]
            first_loop, loop_count, first_access, last_access = phases[phase, 0], phases[phase, 1], phases[phase, 2], 0
            last_access = first_access + phases[phase, 3]
            first_coord, last_coord = phases[phase, 4], phases[phase, 4] + phases[phase, 5]
            for c in range(first_coord, last_coord):
                base[c] = coords[c, 0] + _sum(terms, coords[c, 1], coords[c, 2], variables)
            remaining = False
            for w in range(n_wave):
                if done[s, w]:
                    continue
                lanes = min(wave, items - w * wave)
                entered = 0  # loads at this depth or deeper are due
                for i in range(loop_count):
                    loops[i] = outer[s, i] if i < shared else state[s, w, i]
                    if i >= shared and loops[i] > 0:
                        entered = i + 1
                changed = -1  # coordinates that depend on this loop, or one within, are worked out anew
                issued = 0
                over = False
                while True:
                    # ---- coordinates --------------------------------------------------------------------------------
                    for c in range(first_coord, last_coord):
                        if coords[c, 11] < changed:
                            break
                        x = base[c] + _sum(terms, coords[c, 1] + coords[c, 2] + coords[c, 3], coords[c, 4], loops)
                        if agree[w, c]:
                            value = _value(x + parts[w, c, 0], coords, c, data)
                            where[c] = value
                            same[c] = _part(value, coords, c, tables)
                        else:
                            for lane in range(lanes):
                                value = _value(x + parts[w, c, lane], coords, c, data)
                                own_where[c, lane] = value
                                own[c, lane] = _part(value, coords, c, tables)
                    advance = loop_count - 1
                    while advance >= shared and loops[advance] == extents[first_loop + advance] - 1:
                        advance -= 1
                    # ---- accesses -----------------------------------------------------------------------------------
                    for stage in range(3):
                        if stage != 1 and entered == loop_count and advance == loop_count - 1:
                            continue  # an inner iteration: nothing begins or ends
                        for a in range(first_access, last_access):
                            depth, write = meta[a, 4], meta[a, 3] == 1
                            if stage == 0:
                                due = depth < loop_count and not write and depth >= entered
                            elif stage == 1:
                                due = depth == loop_count
                            else:
                                due = depth < loop_count and write and depth > advance
                            if not due:
                                continue
                            operand, width, axis, item = meta[a, 0], meta[a, 1], meta[a, 2], meta[a, 8]
                            begin, n_coords, n_apart = meta[a, 5], meta[a, 6], meta[a, 7]
                            part, past = meta[a, 10], meta[a, 11] == 1
                            # Where the lanes agree in all, one stands for them.
                            shown = 1
                            for n in range(begin, begin + n_coords + n_apart):
                                if not agree[w, lists[n]]:
                                    shown = lanes
                                    break
                            each = 1 if shown == lanes else lanes
                            active = 0
                            singles = 0
                            for lane in range(shown):
                                offset = bases[operand]
                                for n in range(begin, begin + n_coords):
                                    c = lists[n]
                                    step = same[c] if agree[w, c] else own[c, lane]
                                    if step == _OUT:
                                        offset = _OUT
                                        break
                                    offset += step
                                offsets[lane] = offset
                                if offset == _OUT:
                                    continue
                                active += 1
                                if width == 1:
                                    continue
                                alone = False
                                for n in range(begin + n_coords, begin + n_coords + n_apart):
                                    c = lists[n]
                                    if (same[c] if agree[w, c] else own[c, lane]) == _OUT:
                                        alone = True
                                c = lists[begin + axis]
                                at = where[c] if agree[w, c] else own_where[c, lane]
                                along[lane] = at
                                if not past and at + width > coords[c, 5]:
                                    alone = True
                                single[lane] = alone
                                if alone:
                                    singles += 1
                            if active == 0:
                                continue
                            issued += 1
                            count = width // part if width > 1 else 1
                            if meta[a, 12] == 1:
                                count = 1
                            total = count if singles < active else 0
                            if singles:
                                total += width
                            table = coords[lists[begin + axis], 6] if width > 1 else 0
                            for turn_piece in range(total):
                                # First the pieces of whole vectors, then those of the others one by one.
                                one_by_one = singles > 0 and (singles == active or turn_piece >= count)
                                size = 1 if one_by_one or meta[a, 12] == 1 else part
                                ahead = turn_piece * part
                                if one_by_one:
                                    ahead = turn_piece - (0 if singles == active else count)
                                found = 0
                                took = 0
                                shift = 0
                                near = 0
                                unit_shift = 0
                                if not recording:
                                    way = meta[a, 9]
                                    while not geometry[near, SERVES] & way:
                                        near += 1
                                    unit_shift = geometry[near, UNIT]
                                    shift = min(unit_shift, sector_shift) if sector_shift > 0 else unit_shift
                                for lane in range(shown):
                                    offset = offsets[lane]
                                    if offset == _OUT or (width > 1 and single[lane] != one_by_one):
                                        continue
                                    if ahead > 0:
                                        c = lists[begin + axis]
                                        at = along[lane] + ahead
                                        if one_by_one:
                                            at = min(at, coords[c, 9] + coords[c, 10])
                                        if at >= coords[c, 5] and not past:
                                            continue
                                        if table >= 0:
                                            offset += tables[table + at] - tables[table + along[lane]]
                                        else:
                                            offset += (at - along[lane]) * (-2 - table)
                                    took += each
                                    if recording:
                                        for twin in range(each):
                                            if written < records.shape[0]:
                                                records[written, 0] = group
                                                records[written, 1] = w * wave + (lane if each == 1 else twin)
                                                records[written, 2] = operand
                                                records[written, 3] = offset
                                                records[written, 4] = size
                                                records[written, 5] = write
                                            written += 1
                                        continue
                                    if blocks[operand, 0] > 0:
                                        offset = _swizzled(offset, blocks[operand])
                                    byte = addresses[operand] + offset * item
                                    begin_unit, end_unit = byte >> shift, (byte + size * item - 1) >> shift
                                    for unit in range(begin_unit, end_unit + 1):
                                        if found == 0 or units[found - 1] != unit:
                                            found = _add_unit(units, found, unit)
                                if recording or took == 0:
                                    continue
                                counts[operand, 0] += took
                                counts[operand, 2] += took * size * item
                                if sector_shift > 0:
                                    requests[operand, 0] += 1
                                    requests[operand, 1] += _coarser(units, found, line_shift - shift, coarse)
                                    requests[operand, 2] += _coarser(units, found, sector_shift - shift, coarse)
                                    found = _coarser(units, found, unit_shift - shift, coarse)
                                    units, coarse = coarse, units
                                    shift = unit_shift
                                counts[operand, 1] += found
                                for k in range(found):
                                    address = units[k] << shift
                                    line_access(cached, geometry, core, address, write, meta[a, 9], counts, operand, 3)
                    # ---- on ---------------------------------------------------------------------------------------
                    if advance < shared:
                        over = True
                        break
                    loops[advance] += 1
                    for i in range(advance + 1, loop_count):
                        loops[i] = 0
                    entered = advance + 1
                    changed = advance
                    if turn > 0 and issued >= turn:
                        break
                if over:
                    done[s, w] = True
                else:
                    remaining = True
                    for i in range(loop_count):
                        state[s, w, i] = loops[i]
            if remaining:
                continue
            # All waves of the group have come to the end of the phase, where they wait for each other.
            state[s] = 0
            done[s] = False
            phase_of[s] += 1
            if phase_of[s] < n_phase:
                continue
            phase_of[s] = 0
            i = shared - 1
            while i >= 0 and outer[s, i] == extents[first_loop + i] - 1:
                outer[s, i] = 0
                i -= 1
            if i >= 0:
                outer[s, i] += 1
            else:
                group_of[s] = -1
                alive -= 1
                if upcoming < last:
                    group_of[s] = upcoming
                    upcoming += 1
                    alive += 1
    return written
