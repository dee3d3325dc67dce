"""The common case, fast: LRU sets of whole lines, stores kept until their line has to go.

What is here does what ``simulator/policies.py`` does for any cache; tests hold the two against each other.
"""

from __future__ import annotations

import numpy as np

from simulator.lanes import compiled, load, store
from simulator.sets import (
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
) -> None:
    """``access`` over address ranges, what the nearest level needs kept at hand.

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
    """
    shift, ways = of(table, near, LINE), of(table, near, WAYS)
    start, mask = first_of(table, near, core, 0), of(table, near, MASK)
    hits, length, write = 0, lengths[0], writes[0]
    each_length, each_write = lengths.size > 1, writes.size > 1
    for i in range(addresses.size):
        if each_length:
            length = lengths[i]
        if each_write:
            write = writes[i]
        line = addresses[i] >> shift
        last = (addresses[i] + length - 1) >> shift
        while line <= last:
            number = line & mask if mask >= 0 else set_of(table, near, line)
            first = start + number * ways
            key = line << 2 | 3
            if load(cells, first) | DIRTY == key:
                hits += 1
                if write:
                    store(cells, first, key)
            else:
                position = find(cells, first, ways, key, DIRTY)
                if position < ways:
                    push(cells, first, ways, position, load(cells, first + position))
                    hits += 1
                    if write:
                        store(cells, first, key)
                else:
                    beyond(cells, table, near, core, line << shift, write, way, tally, wide)
            line += 1
    add(tally, 2 * near, hits)
