"""The common case, fast: LRU sets of whole lines, stores kept until their line has to go.

What is here does what ``simulator/policies.py`` does for any cache; tests hold the two against each other.
"""

from __future__ import annotations

import numpy as np

from simulator.lanes import LANES, compiled, count_within, load, store
from simulator.sets import (
    BANKS,
    BUFFERS,
    EMPTY,
    LEVELS,
    LINE,
    MASK,
    SERVES,
    WAYS,
    add,
    find,
    first_of,
    memory,
    missed,
    of,
    push,
    set_of,
    written_back,
)

DIRTY = 2
"""In an entry of a whole line: ``line << 2 | dirty << 1 | 1``."""


@compiled
def _write_back(cells: int, table: int, level: int, core: int, entry: int, tally: int, wide: bool) -> None:
    """A dirty line leaves ``level``: to the next one, and so on while that has to give up a dirty one in turn."""
    levels = of(table, 0, LEVELS)
    while True:
        size = 1 << of(table, level, LINE)
        address = (entry >> 2) << of(table, level, LINE)
        level += 1
        while level < levels and not of(table, level, SERVES) & BUFFERS:
            level += 1
        if level == levels:
            memory(cells, table, address, size, True, tally, wide)
            return
        line, ways = address >> of(table, level, LINE), of(table, level, WAYS)
        first = first_of(table, level, core, set_of(table, level, line))
        entry = line << 2 | 3
        position = find(cells, first, ways, entry, DIRTY)
        written_back(table, level, position == ways, 1, tally, wide)
        entry = push(cells, first, ways, min(position, ways - 1), entry)
        if position < ways or entry == EMPTY or not entry & DIRTY:
            return


@compiled
def beyond(
    cells: int,
    table: int,
    near: int,
    core: int,
    address: int,
    write: bool,
    way: int,
    tally: int,
    wide: bool,
) -> None:
    """The line is not in ``near``: find it further out and fill the levels on the way, the outermost first."""
    levels = of(table, 0, LEVELS)
    missed(table, near, True, tally, wide)
    found, asked = near + 1, near
    while found < levels:
        if of(table, found, SERVES) & way:
            line, ways = address >> of(table, found, LINE), of(table, found, WAYS)
            first = first_of(table, found, core, set_of(table, found, line))
            position = find(cells, first, ways, line << 2 | 3, DIRTY)
            if position < ways:
                add(tally, 2 * found, 1)
                if position:
                    push(cells, first, ways, position, load(cells, first + position))
                break
            missed(table, found, True, tally, wide)
            asked = found
        found += 1
    else:
        size = 1 << of(table, asked, LINE)
        memory(cells, table, address & -size, size, False, tally, wide)
    for level in range(found - 1, near - 1, -1):
        if of(table, level, SERVES) & way:
            line, ways = address >> of(table, level, LINE), of(table, level, WAYS)
            first = first_of(table, level, core, set_of(table, level, line))
            entry = line << 2 | 1
            if write and level == near:
                entry |= DIRTY
            gone = push(cells, first, ways, ways - 1, entry)
            if gone != EMPTY and gone & DIRTY:
                _write_back(cells, table, level, core, gone, tally, wide)


@compiled
def access(
    cells: int,
    table: int,
    core: int,
    address: int,
    write: bool,
    way: int,
    tally: int,
    wide: bool,
) -> None:
    """One access of a byte address (see ``simulator.cache.line_access``)."""
    near = 0
    while not of(table, near, SERVES) & way:
        near += 1
        if near == of(table, 0, LEVELS):
            size = 1 << of(table, near - 1, LINE)
            memory(cells, table, address & -size, size, write, tally, wide)
            return
    line, ways = address >> of(table, near, LINE), of(table, near, WAYS)
    first = first_of(table, near, core, set_of(table, near, line))
    key = line << 2 | 3
    if load(cells, first) | DIRTY != key:
        position = find(cells, first, ways, key, DIRTY)
        if position == ways:
            beyond(cells, table, near, core, address, write, way, tally, wide)
            return
        push(cells, first, ways, position, load(cells, first + position))
    add(tally, 2 * near, 1)
    if write:
        store(cells, first, key)


@compiled
def _has(cells: int, first: int, ways: int, key: int, write: bool) -> bool:
    """Whether a set has a line; it is then the one used last, and dirty if it is stored to."""
    entry = load(cells, first)
    if entry | DIRTY != key:
        position = find(cells, first, ways, key, DIRTY)
        if position == ways:
            return False
        entry = load(cells, first + position)
        push(cells, first, ways, position, entry)
    if write and entry != key:
        store(cells, first, key)
    return True


@compiled
def run(
    cells: int,
    table: int,
    near: int,
    core: int,
    addresses: np.ndarray,
    lengths: np.ndarray,
    writes: np.ndarray,
    way: int,
    tally: int,
    wide: bool,
    fixed: tuple,
    fixed_2: tuple,
) -> None:
    """``access`` over address ranges, with what the two nearest levels need, and their counters, kept at hand.

    Args:
        cells: address of the state's.
        table: address of the state's.
        near: the first level on the way.
        core: which core asks.
        addresses: first byte of each range.
        lengths: bytes of each, or of all where there is one.
        writes: whether each, or whether all where there is one, is stored to.
        way: BUFFERS or IMAGES.
        tally: address of the counters.
        wide: whether there are columns for all counters.
        fixed: as long as the nearest level has ways, for code that knows their number; or empty.
        fixed_2: likewise of the next level.
    """
    levels = of(table, 0, LEVELS)
    second = near + 1
    while second < levels and not of(table, second, SERVES) & way:
        second += 1
    two = second < levels and of(table, second, SERVES) & BUFFERS != 0
    shift, ways, start = of(table, near, LINE), of(table, near, WAYS), first_of(table, near, core, 0)
    mask, mask_2, shift_2, ways_2, start_2 = of(table, near, MASK), 0, 0, 0, 0
    if two:
        mask_2, shift_2, ways_2 = of(table, second, MASK), of(table, second, LINE), of(table, second, WAYS)
        start_2 = first_of(table, second, core, 0)
    if len(fixed):
        ways = len(fixed)
    if len(fixed_2):
        ways_2 = len(fixed_2)
    last_level = two and second + 1 == levels and not of(table, 0, BANKS)
    size_2 = 1 << shift_2
    hits, misses, hits_2, misses_2, written, returned, absent = 0, 0, 0, 0, 0, 0, 0
    length, write = lengths[0], writes[0]
    each_length, each_write = lengths.size > 1, writes.size > 1
    place, recent, i = addresses.ctypes.data, -1, 0
    while i < addresses.size:
        if each_length:
            length = lengths[i]
        if each_write:
            write = writes[i]
        line = addresses[i] >> shift
        last = (addresses[i] + length - 1) >> shift
        i += 1
        if line == recent and last == line:
            # Often the neighbours in an array: those in the same line all hit.
            more = 0
            if not each_length and i + LANES <= addresses.size:
                more = count_within(place, i, length - 1, shift, line)
            if each_write:
                for k in range(i, i + more):
                    write |= writes[k]
            hits += 1 + more
            i += more
            if write:
                number = line & mask if mask >= 0 else set_of(table, near, line)
                store(cells, start + number * ways, line << 2 | 3)
            continue
        recent = last
        while line <= last:
            number = line & mask if mask >= 0 else set_of(table, near, line)
            first = start + number * ways
            key = line << 2 | 3
            if _has(cells, first, ways, key, write):
                hits += 1
            elif not two:
                beyond(cells, table, near, core, line << shift, write, way, tally, wide)
            else:
                misses += 1
                line_2 = line << shift >> shift_2
                number = line_2 & mask_2 if mask_2 >= 0 else set_of(table, second, line_2)
                first_2 = start_2 + number * ways_2
                if _has(cells, first_2, ways_2, line_2 << 2 | 3, False):
                    hits_2 += 1
                elif last_level:
                    misses_2 += 1
                    gone = push(cells, first_2, ways_2, ways_2 - 1, line_2 << 2 | 1)
                    if gone & DIRTY and gone != EMPTY:
                        written += size_2
                else:
                    beyond(cells, table, second, core, line << shift, False, way, tally, wide)
                gone = push(cells, first, ways, ways - 1, key if write else line << 2 | 1)
                if gone & DIRTY and gone != EMPTY:
                    returned += 1
                    line_2 = gone >> 2 << shift >> shift_2
                    number = line_2 & mask_2 if mask_2 >= 0 else set_of(table, second, line_2)
                    first_2 = start_2 + number * ways_2
                    if not _has(cells, first_2, ways_2, line_2 << 2 | 3, True):
                        absent += 1
                        gone = push(cells, first_2, ways_2, ways_2 - 1, line_2 << 2 | 3)
                        if gone & DIRTY and gone != EMPTY:
                            if last_level:
                                written += size_2
                            else:
                                _write_back(cells, table, second, core, gone, tally, wide)
            line += 1
    add(tally, 2 * near, hits)
    if two:
        add(tally, 2 * near + 1, misses)
        add(tally, 2 * second, hits_2)
        add(tally, 2 * second + 1, misses_2)
        add(tally, 2 * levels, misses_2 * size_2)
        add(tally, 2 * levels + 1, written)
        if wide:
            extra = 2 * levels + 4
            add(tally, extra + 3 * near, misses)
            add(tally, extra + 3 * second, misses_2)
            add(tally, extra + 3 * second + 1, returned)
            add(tally, extra + 3 * second + 2, absent)
