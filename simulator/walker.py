"""The compiled loop of the address streams: a flattened launch (``simulator/trace.py``) walked wave by wave.

An access' address is a sum of parts, one per coordinate: an offset from the table of the operand's axis. A coordinate's
value is itself a sum: of what the work group, the wave's lanes and the sequential loops contribute. The lanes' part is
the same in every group and worked out once; a coordinate is worked out anew only when a loop that it depends on has
moved, and once for all lanes where they agree. Equal coordinates of different accesses are one. What no loop moves of
an access is added up when a wave begins a phase, so that an iteration adds what has moved.

Arrays are handed on as addresses, as in ``simulator/lanes.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from simulator.cache import unit_access
from simulator.lanes import compiled, load, store
from simulator.sets import COLUMNS, SERVES, UNIT

__all__ = ["COORD", "META", "PHASE", "lane_parts", "walk_groups"]

_OUT = -(1 << 62)  # an offset of what does not happen
_MOST_UNITS = 4096  # distinct lines or sectors of one request: 128 lanes × 64 bytes, and more

OPERAND, WIDTH, AXIS, WRITE, DEPTH, FIRST, FIXED, MOVING, APART, ITEM, WAY, PART, PAST, SPLAT = range(14)
META = 14
"""Columns of an access: operand; width; the coordinate along which the vector lies (-1: none); write; depth; its first
entry in the list of coordinates, how many of these no loop of the phase moves, how many some loop does, how many after
them say whether it is a vector; bytes of an element; way to the caches; width of the pieces that a vector is moved in;
whether it is moved whole also past the shape; whether one value stands for all."""

CONST, TERM, GROUPS, ITEMS, LOOPS, BELOW, TABLE, DATA, LENGTH, MOST, PLUS, DEEPEST = range(12)
COORD = 12
"""Columns of a coordinate: constant; first term, and how many terms over groups, items and loops follow each other; the
end of its axis; first entry of its table (-1: it only has to hold; -2 - n: each is n elements further); first entry of
the integers that it reads (-1: none) and how many there are; clamp and what is added to it; the innermost loop that it
depends on (-1: none). Those of a phase follow each other, by that loop, innermost first."""

LOOP, LOOP_COUNT, ACCESS, EARLY, INNER, LATE, COORDINATE, COORDINATES, OFTEN = range(9)
PHASE = 9
"""Columns of a phase: first loop, loops; first access, how many of them are loads before inner loops, in the innermost
loop, and stores after inner loops; first coordinate, coordinates, how many of these the innermost loop's accesses need
or some loop moves."""

_TERM = 4


_inlined = njit(inline="always", error_model="numpy")  # a call with many addresses takes longer than what it does


@compiled
def _sum(terms: int, first: int, count: int, variables: int) -> int:
    total = 0
    for t in range(first * _TERM, (first + count) * _TERM, _TERM):
        x = load(variables, load(terms, t))
        div, mod = load(terms, t + 2), load(terms, t + 3)
        if div != 1:
            x //= div
        if mod != 0:
            x %= mod
        total += x * load(terms, t + 1)
    return total


@compiled
def _value(x: int, coord: int, data: int) -> int:
    """A coordinate from its sum; -1 where it does not exist. ``coord``: where its columns are."""
    source = load(coord, DATA)
    if source >= 0:
        if x < 0 or x >= load(coord, LENGTH):
            return -1
        x = load(data, source + x)
    return min(x, load(coord, MOST)) + load(coord, PLUS)


@compiled
def _part(value: int, coord: int, tables: int) -> int:
    """What a coordinate adds to the element offset, or _OUT."""
    table = load(coord, TABLE)
    if table == -1:
        return 0 if value < load(coord, BELOW) and (value >= 0 or load(coord, DATA) < 0) else _OUT
    if value < 0 or value >= load(coord, BELOW):
        return _OUT
    return load(tables, table + value) if table >= 0 else value * (-2 - table)


@compiled
def _step(first: int, last: int, table: int, tables: int) -> int:
    """Elements from one coordinate of an axis to another."""
    if table < 0:
        return (last - first) * (-2 - table)
    return load(tables, table + last) - load(tables, table + first)


@compiled
def _put_in_order(units: int, count: int) -> None:
    """Sort units by address; as a rule they are."""
    for k in range(1, count):
        unit = load(units, k)
        i = k - 1
        while i >= 0 and load(units, i) > unit:
            store(units, i + 1, load(units, i))
            i -= 1
        store(units, i + 1, unit)


@compiled
def lane_parts(
    item_extents: np.ndarray, wave: int, coords: np.ndarray, terms: np.ndarray, meta: np.ndarray, lists: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the lanes contribute to each coordinate [waves, coordinates, lanes], and where all of a wave agree: in a
    coordinate [waves, coordinates], and in all that an access depends on [waves, accesses].
    """
    n_item, items = item_extents.size, 1
    for i in range(n_item):
        items *= item_extents[i]
    waves = (items + wave - 1) // wave
    parts = np.zeros((waves, coords.shape[0], wave), dtype=np.int64)
    agree = np.ones((waves, coords.shape[0]), dtype=np.int64)
    at_once = np.ones((waves, meta.shape[0]), dtype=np.int64)
    variables = np.zeros(n_item, dtype=np.int64)
    for item in range(items):
        rest = item
        for i in range(n_item - 1, -1, -1):
            variables[i] = rest % item_extents[i]
            rest //= item_extents[i]
        w, lane = item // wave, item % wave
        for c in range(coords.shape[0]):
            first = coords[c, TERM] + coords[c, GROUPS]
            x = _sum(terms.ctypes.data, first, coords[c, ITEMS], variables.ctypes.data)
            parts[w, c, lane] = x
            if x != parts[w, c, 0]:
                agree[w, c] = 0
    for w in range(waves):
        for a in range(meta.shape[0]):
            first = meta[a, FIRST]
            for n in range(first, first + meta[a, FIXED] + meta[a, MOVING] + meta[a, APART]):
                at_once[w, a] &= agree[w, lists[n]]
    return parts, agree, at_once


@compiled
def _add_unit(units: int, found: int, unit: int) -> int:
    for k in range(found - 1, -1, -1):
        if load(units, k) == unit:
            return found
    if found < _MOST_UNITS:
        store(units, found, unit)
        found += 1
    return found


@compiled
def _coarser(units: int, count: int, shift: int, out: int) -> int:
    """The distinct larger units that some units lie in; how many."""
    found = 0
    for k in range(count):
        found = _add_unit(out, found, load(units, k) >> shift)
    return found


@compiled
def _swizzled(offset: int, columns: int, across: int, down: int) -> int:
    """The element at which a texel of an image lies whose texels are stored by blocks (see ``TexelBlock``)."""
    texel, lane = offset // 4, offset % 4
    row, column = texel // columns, texel % columns
    per_row = (columns + across - 1) // across
    place = ((row // down) * per_row + column // across) * (across * down) + row % down * across + column % across
    return place * 4 + lane


@compiled
def _unit_shift(geometry: int, way: int) -> int:
    """Log2 of the unit of the nearest cache on a way."""
    near = 0
    while not load(geometry, near * COLUMNS + SERVES) & way:
        near += 1
    return load(geometry, near * COLUMNS + UNIT)


class _Places(NamedTuple):
    """Addresses of what the loops read and write.

    The first ones are a ``Walk``'s. ``agree``, ``at_once`` and ``parts`` are those of the wave; ``loops``: of its
    sequential variables. Worked out: ``base`` [coordinates], constant and group; ``same`` and ``value`` [coordinates],
    offset and coordinate where all lanes agree; ``own`` and ``own_value`` [coordinates, lanes], where they do not;
    ``still`` [accesses] and ``own_still`` [accesses, lanes], what no loop moves. ``offsets``, ``along`` and ``single``
    [lanes]: of an access, where it is, its coordinate along the vector, whether that is done value by value.
    """

    meta: int
    lists: int
    coords: int
    terms: int
    tables: int
    bases: int
    data: int
    agree: int
    at_once: int
    parts: int
    loops: int
    base: int
    same: int
    value: int
    own: int
    own_value: int
    still: int
    own_still: int
    offsets: int
    along: int
    single: int


@compiled
def _work_out(at: _Places, first: int, last: int, changed: int, wave: int, lanes: int) -> None:
    """Coordinates ``first`` to ``last`` (excluded), as far as they depend on loop ``changed`` or one within."""
    for c in range(first, last):
        coord = at.coords + 8 * COORD * c
        if load(coord, DEEPEST) < changed:
            break
        first_term = load(coord, TERM) + load(coord, GROUPS) + load(coord, ITEMS)
        x = load(at.base, c) + _sum(at.terms, first_term, load(coord, LOOPS), at.loops)
        if load(at.agree, c):
            value = _value(x + load(at.parts, c * wave), coord, at.data)
            store(at.value, c, value)
            store(at.same, c, _part(value, coord, at.tables))
        else:
            for place in range(c * wave, c * wave + lanes):
                value = _value(x + load(at.parts, place), coord, at.data)
                store(at.own_value, place, value)
                store(at.own, place, _part(value, coord, at.tables))


@compiled
def _add_up(at: _Places, first: int, last: int, wave: int, lanes: int) -> None:
    """What no loop moves of accesses ``first`` to ``last`` (excluded)."""
    for a in range(first, last):
        access = at.meta + 8 * META * a
        begin = load(access, FIRST)
        end = begin + load(access, FIXED)
        for lane in range(1 if load(at.at_once, a) else lanes):
            offset = load(at.bases, load(access, OPERAND))
            for n in range(begin, end):
                c = load(at.lists, n)
                step = load(at.same, c) if load(at.agree, c) else load(at.own, c * wave + lane)
                if step == _OUT:
                    offset = _OUT
                    break
                offset += step
            if load(at.at_once, a):
                store(at.still, a, offset)
            else:
                store(at.own_still, a * wave + lane, offset)


@_inlined
def _moved(at: _Places, begin: int, end: int, start: int) -> int:
    """``start`` and what loops move of the coordinates in which all lanes agree; _OUT where one does not exist."""
    if start == _OUT:
        return _OUT
    for n in range(begin, end):
        c = load(at.lists, n)
        if load(at.agree, c):
            step = load(at.same, c)
            if step == _OUT:
                return _OUT
            start += step
    return start


@_inlined
def _spread(at: _Places, a: int, begin: int, end: int, moved: int, wave: int, lanes: int) -> None:
    """The offsets of an access in which lanes differ."""
    for lane in range(lanes):
        offset = load(at.own_still, a * wave + lane)
        store(at.offsets, lane, _OUT if offset == _OUT else offset + moved)
    for n in range(begin, end):
        c = load(at.lists, n)
        if not load(at.agree, c):
            for lane in range(lanes):
                offset, step = load(at.offsets, lane), load(at.own, c * wave + lane)
                out = offset == _OUT or step == _OUT
                store(at.offsets, lane, _OUT if out else offset + step)


@_inlined
def _sort_out(at: _Places, access: int, shown: int, wave: int) -> tuple[int, int]:
    """How many lanes access anything, and how many of these value by value; which and from where, in ``at``."""
    active = singles = 0
    width, axis = load(access, WIDTH), load(access, AXIS)
    if width == 1:
        for lane in range(shown):
            if load(at.offsets, lane) != _OUT:
                active += 1
        return active, 0
    begin = load(access, FIRST) + load(access, FIXED) + load(access, MOVING)
    end = begin + load(access, APART)
    for lane in range(shown):
        if load(at.offsets, lane) == _OUT:
            continue
        active += 1
        alone = False
        for n in range(begin, end):
            c = load(at.lists, n)
            if (load(at.same, c) if load(at.agree, c) else load(at.own, c * wave + lane)) == _OUT:
                alone = True
        along = load(at.value, axis) if load(at.agree, axis) else load(at.own_value, axis * wave + lane)
        store(at.along, lane, along)
        if not load(access, PAST) and along + width > load(at.coords, COORD * axis + BELOW):
            alone = True
        store(at.single, lane, 1 if alone else 0)
        if alone:
            singles += 1
    return active, singles


@compiled
def _ahead(at: _Places, access: int, lane: int, ahead: int, one_by_one: bool) -> int:
    """The offset of a value further along a lane's vector; _OUT where there is none."""
    coord = at.coords + 8 * COORD * load(access, AXIS)
    first = load(at.along, lane)
    last = first + ahead
    if one_by_one:
        last = min(last, load(coord, MOST) + load(coord, PLUS))
    if last >= load(coord, BELOW) and not load(access, PAST):
        return _OUT
    return load(at.offsets, lane) + _step(first, last, load(coord, TABLE), at.tables)


@compiled
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
    at_once: np.ndarray,
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
    n_group, n_wave, n_phase, n_coord, n_access = (
        group_extents.size,
        parts.shape[0],
        phases.shape[0],
        coords.shape[0],
        meta.shape[0],
    )
    columns = counts.shape[1]
    wide = columns >= 3 + 5 * geometry.shape[0] + 4
    # Addresses of what the loops below read and write.
    meta_, lists_, coords_, terms_, tables_ = (
        meta.ctypes.data,
        lists.ctypes.data,
        coords.ctypes.data,
        terms.ctypes.data,
        tables.ctypes.data,
    )
    bases_, blocks_, data_, extents_ = bases.ctypes.data, blocks.ctypes.data, data.ctypes.data, extents.ctypes.data
    addresses_, cells, table_ = addresses.ctypes.data, cached.ctypes.data, geometry.ctypes.data
    counts_, requests_, records_ = counts.ctypes.data, requests.ctypes.data, records.ctypes.data
    room = records.shape[0]
    slots = max(min(cores * resident, last - first), 1) if resident > 0 else 1
    n_loop = 0
    for p in range(n_phase):
        n_loop = max(n_loop, phases[p, LOOP_COUNT])
    group_of = np.full(slots, -1, dtype=np.int64)
    phase_of = np.zeros(slots, dtype=np.int64)
    state = np.zeros((slots, n_wave, n_loop), dtype=np.int64)
    done = np.zeros((slots, n_wave), dtype=np.bool_)
    outer = np.zeros((slots, max(shared, 1)), dtype=np.int64)  # the shared loops
    variables_array = np.zeros(n_group, dtype=np.int64)
    loops_array = np.zeros(max(n_loop, 1), dtype=np.int64)
    scratch = np.zeros(3 * n_coord + 2 * n_coord * wave + n_access + n_access * wave + 3 * wave, dtype=np.int64)
    units_array = np.zeros(2 * _MOST_UNITS, dtype=np.int64)
    variables, loops = variables_array.ctypes.data, loops_array.ctypes.data
    base = scratch.ctypes.data  # [coordinates] constant and group
    same = base + 8 * n_coord  # offset where all lanes agree
    where = same + 8 * n_coord  # and the coordinate's value
    own = where + 8 * n_coord  # [coordinates, lanes] where they do not
    own_where = own + 8 * n_coord * wave
    still = own_where + 8 * n_coord * wave  # [accesses] what no loop moves, where all lanes agree
    own_still = still + 8 * n_access  # [accesses, lanes]
    offsets = own_still + 8 * n_access * wave
    along = offsets + 8 * wave
    single = along + 8 * wave
    units = units_array.ctypes.data
    coarse = units + 8 * _MOST_UNITS
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
                variables_array[i] = rest % group_extents[i]
                rest //= group_extents[i]
            first_loop, loop_count = phases[phase, LOOP], phases[phase, LOOP_COUNT]
            first_access = phases[phase, ACCESS]
            first_inner = first_access + phases[phase, EARLY]
            first_late = first_inner + phases[phase, INNER]
            last_access = first_late + phases[phase, LATE]
            first_coord = phases[phase, COORDINATE]
            last_coord = first_coord + phases[phase, COORDINATES]
            often_coord = first_coord + phases[phase, OFTEN]
            for c in range(first_coord, last_coord):
                x = coords[c, CONST] + _sum(terms_, coords[c, TERM], coords[c, GROUPS], variables)
                store(base, c, x)
            remaining = False
            for w in range(n_wave):
                if done[s, w]:
                    continue
                lanes = min(wave, items - w * wave)
                entered = 0  # loads at this depth or deeper are due
                for i in range(loop_count):
                    loops_array[i] = outer[s, i] if i < shared else state[s, w, i]
                    if i >= shared and loops_array[i] > 0:
                        entered = i + 1
                agree_ = agree.ctypes.data + 8 * w * n_coord
                at_once_ = at_once.ctypes.data + 8 * w * n_access
                parts_ = parts.ctypes.data + 8 * w * n_coord * wave
                at = _Places(
                    meta_,
                    lists_,
                    coords_,
                    terms_,
                    tables_,
                    bases_,
                    data_,
                    agree_,
                    at_once_,
                    parts_,
                    loops,
                    base,
                    same,
                    where,
                    own,
                    own_where,
                    still,
                    own_still,
                    offsets,
                    along,
                    single,
                )
                changed = -1  # coordinates that depend on this loop, or one within, are worked out anew
                issued = 0
                over = False
                ready = False  # whether what is rarely needed has been worked out
                while True:
                    advance = loop_count - 1
                    while advance >= shared and load(loops, advance) == load(extents_, first_loop + advance) - 1:
                        advance -= 1
                    begin_access = first_access if entered < loop_count else first_inner
                    end_access = last_access if advance < loop_count - 1 else first_late
                    # ---- coordinates --------------------------------------------------------------------------------
                    # What only accesses outside the innermost loop need is not worked out before they are due.
                    rarely = not ready and (begin_access < first_inner or end_access > first_late)
                    _work_out(at, first_coord, often_coord, changed, wave, lanes)
                    if rarely:
                        _work_out(at, often_coord, last_coord, -1, wave, lanes)
                        _add_up(at, first_access, first_inner, wave, lanes)
                        _add_up(at, first_late, last_access, wave, lanes)
                        ready = True
                    if changed < 0:
                        _add_up(at, first_inner, first_late, wave, lanes)
                    # ---- accesses -----------------------------------------------------------------------------------
                    for a in range(begin_access, end_access):
                        access = meta_ + 8 * META * a
                        if a < first_inner:
                            if load(access, DEPTH) < entered:
                                continue
                        elif a >= first_late and load(access, DEPTH) <= advance:
                            continue
                        operand, width, item = load(access, OPERAND), load(access, WIDTH), load(access, ITEM)
                        way, write = load(access, WAY), load(access, WRITE) != 0
                        part = load(access, PART)
                        begin = load(access, FIRST) + load(access, FIXED)
                        end = begin + load(access, MOVING)
                        tally = counts_ + 8 * columns * operand
                        shown, each = lanes, 1
                        if load(at_once_, a):  # where the lanes agree in all, one stands for them
                            shown, each = 1, lanes
                            offset = _moved(at, begin, end, load(still, a))
                            if offset == _OUT:
                                continue
                            whole = width == 1
                            if width == part and load(access, APART) == 0:
                                c = load(access, AXIS)
                                whole = load(access, PAST) != 0
                                whole = whole or load(where, c) + width <= load(coords_, COORD * c + BELOW)
                            if whole and not recording and sector_shift == 0 and load(blocks_, 3 * operand) == 0:
                                # The usual case: one piece.
                                issued += 1
                                shift = _unit_shift(table_, way)
                                size = width * item
                                byte = load(addresses_, operand) + offset * item
                                unit, end_unit = byte >> shift, (byte + size - 1) >> shift
                                store(tally, 0, load(tally, 0) + each)
                                store(tally, 1, load(tally, 1) + end_unit - unit + 1)
                                store(tally, 2, load(tally, 2) + each * size)
                                while unit <= end_unit:
                                    unit_access(cells, table_, core, unit << shift, write, way, tally + 24, wide)
                                    unit += 1
                                continue
                            store(offsets, 0, offset)
                        else:
                            moved = _moved(at, begin, end, 0)
                            if moved == _OUT:
                                continue
                            _spread(at, a, begin, end, moved, wave, lanes)
                        active, singles = _sort_out(at, access, shown, wave)
                        if active == 0:
                            continue
                        issued += 1
                        splat = load(access, SPLAT) != 0
                        count = width // part if width > 1 and not splat else 1
                        whole_pieces = count if singles < active else 0
                        total = whole_pieces + (width if singles else 0)
                        shift = 0
                        unit_shift = 0
                        if not recording:
                            unit_shift = _unit_shift(table_, way)
                            shift = min(unit_shift, sector_shift) if sector_shift > 0 else unit_shift
                        for piece in range(total):
                            # First the pieces of whole vectors, then those of the others one by one.
                            one_by_one = piece >= whole_pieces and singles > 0
                            size = 1 if one_by_one or splat else part
                            ahead = piece - whole_pieces if one_by_one else piece * part
                            found = 0
                            took = 0
                            recent = -1
                            begun = written
                            for lane in range(shown):
                                offset = load(offsets, lane)
                                if offset == _OUT or (singles > 0 and (load(single, lane) != 0) != one_by_one):
                                    continue
                                if ahead > 0:
                                    offset = _ahead(at, access, lane, ahead, one_by_one)
                                    if offset == _OUT:
                                        continue
                                took += each
                                if recording:
                                    for twin in range(each):
                                        if written < room:
                                            record = records_ + 48 * written
                                            store(record, 0, group)
                                            store(record, 1, w * wave + (lane if each == 1 else twin))
                                            store(record, 2, operand)
                                            store(record, 3, offset)
                                            store(record, 4, size)
                                            store(record, 5, 2 * begun + (1 if write else 0))
                                        written += 1
                                    continue
                                if load(blocks_, 3 * operand) > 0:
                                    block = blocks_ + 24 * operand
                                    offset = _swizzled(offset, load(block, 0), load(block, 1), load(block, 2))
                                byte = load(addresses_, operand) + offset * item
                                unit, end_unit = byte >> shift, (byte + size * item - 1) >> shift
                                while unit <= end_unit:
                                    if unit != recent:
                                        found = _add_unit(units, found, unit)
                                        recent = unit
                                    unit += 1
                            if recording or took == 0:
                                continue
                            if sector_shift > 0:
                                request = requests_ + 24 * operand
                                store(request, 0, load(request, 0) + 1)
                                store(request, 1, load(request, 1) + _coarser(units, found, line_shift - shift, coarse))
                                sectors = _coarser(units, found, sector_shift - shift, coarse)
                                store(request, 2, load(request, 2) + sectors)
                                found = _coarser(units, found, unit_shift - shift, coarse)
                                units, coarse = coarse, units
                            store(tally, 0, load(tally, 0) + took)
                            store(tally, 1, load(tally, 1) + found)
                            store(tally, 2, load(tally, 2) + took * size * item)
                            _put_in_order(units, found)  # sectors of a line one after the other
                            for k in range(found):
                                address = load(units, k) << unit_shift
                                unit_access(cells, table_, core, address, write, way, tally + 24, wide)
                    # ---- on ---------------------------------------------------------------------------------------
                    if advance < shared:
                        over = True
                        break
                    store(loops, advance, load(loops, advance) + 1)
                    for i in range(advance + 1, loop_count):
                        store(loops, i, 0)
                    entered = advance + 1
                    changed = advance
                    if turn > 0 and issued >= turn:
                        break
                if over:
                    done[s, w] = True
                else:
                    remaining = True
                    for i in range(loop_count):
                        state[s, w, i] = loops_array[i]
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
    # The arrays must live until here: the loops know only their addresses.
    return written + 0 * (scratch.size + units_array.size + variables_array.size + loops_array.size)
