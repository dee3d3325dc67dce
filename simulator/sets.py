"""The sets of a cache, compiled: where a line would lie, whether it does, which one has to go.

All the state of a hierarchy is one int64 array of *cells*, and one table says where each level's are; both, and the
counters, are handed on as addresses (see ``simulator/lanes.py``). A set is as many entries as the level has ways. An
entry is a line number with a bit for each sector that is there and one for each that is dirty,
``line << 2 * sectors | dirty << sectors | there``, or EMPTY. Under LRU and FIFO a set is kept in the order in which its
lines go, the last one first to go and empty entries behind it; under PLRU and random a line stays where it is.
"""

from __future__ import annotations

import numpy as np

from simulator.lanes import LANES, compiled, load, match_lanes, push_lanes, store

EMPTY = -1

# Columns of the table, one row per level. Those from PLAIN to RECENT are the hierarchy's, the same in every row.
FIRST, APART, SETS, WAYS, UNIT, SERVES, MASK, LINE, SECTORS, POLICY, FOLD, STORES, INCLUSION, AIDE, AIDE_APART = range(
    15
)
PLAIN, ROW_BYTES, BANKS, OPEN, CORES, LEVELS, RECENT = range(15, 22)
GRANULE = 22
COLUMNS = 23

LRU, FIFO, PLRU, RANDOM = range(4)
WRITE_BACK, ALLOCATE, FETCH = 1, 2, 4
NEITHER, INCLUSIVE, EXCLUSIVE = range(3)
BUFFERS, IMAGES = 1, 2


@compiled
def of(table: int, level: int, column: int) -> int:
    """An entry of the table."""
    return load(table, level * COLUMNS + column)


@compiled
def add(tally: int, column: int, number: int) -> None:
    """Increase a counter."""
    store(tally, column, load(tally, column) + number)


@compiled
def set_of(table: int, level: int, line: int) -> int:
    """The number of the set that a line belongs to."""
    if of(table, level, MASK) >= 0:
        return line & of(table, level, MASK)
    bits = of(table, level, FOLD)
    if bits:
        rest = line >> bits
        while rest:
            line ^= rest
            rest >>= bits
    return line % of(table, level, SETS)


@compiled
def first_of(table: int, level: int, core: int, number: int) -> int:
    """The cell at which a set begins."""
    return of(table, level, FIRST) + core * of(table, level, APART) + number * of(table, level, WAYS)


@compiled
def find(cells: int, first: int, ways: int, key: int, ignore: int) -> int:
    """Where in the set that begins at ``first`` the entry ``key`` is, or ``ways``; bits ``ignore`` set before."""
    position = 0
    while position + LANES <= ways:
        lane = match_lanes(cells, first + position, key, ignore)
        if lane < LANES:
            return position + lane
        position += LANES
    while position < ways and load(cells, first + position) | ignore != key:
        position += 1
    return position


@compiled
def push(cells: int, first: int, ways: int, last: int, head: int) -> int:
    """Put ``head`` first in a set and move those before ``last`` up by one; returns the entry that was at ``last``."""
    gone = load(cells, first + last)
    position = 0
    while position + LANES <= ways:
        if last - position < LANES:
            push_lanes(cells, first + position, last - position, head)
            return gone
        after = load(cells, first + position + LANES - 1)
        push_lanes(cells, first + position, LANES - 1, head)
        head = after
        position += LANES
    while position <= last:
        after = load(cells, first + position)
        store(cells, first + position, head)
        head = after
        position += 1
    return gone


@compiled
def seek(cells: int, table: int, level: int, core: int, line: int) -> tuple[int, int]:
    """The set's first cell and where in it the line is (``ways`` if it is not)."""
    first = first_of(table, level, core, set_of(table, level, line))
    shift = 2 * of(table, level, SECTORS)
    ignore = (1 << shift) - 1
    return first, find(cells, first, of(table, level, WAYS), line << shift | ignore, ignore)


@compiled
def use(cells: int, table: int, level: int, core: int, first: int, position: int) -> int:
    """A line is used: the policy takes notice. Returns where the line is then."""
    policy = of(table, level, POLICY)
    if policy == LRU:
        if position:
            push(cells, first, of(table, level, WAYS), position, load(cells, first + position))
        return 0
    if policy == PLRU:
        _point_away(cells, table, level, core, first, position)
    return position


@compiled
def _tree_of(table: int, level: int, core: int, first: int) -> int:
    """The cell with the tree of the set that begins at ``first``."""
    start = of(table, level, FIRST) + core * of(table, level, APART)
    return of(table, level, AIDE) + core * of(table, level, AIDE_APART) + (first - start) // of(table, level, WAYS)


@compiled
def _point_away(cells: int, table: int, level: int, core: int, first: int, position: int) -> None:
    """Turn each node of the tree above a way to the other side."""
    at = _tree_of(table, level, core, first)
    tree, node, half = load(cells, at), 1, of(table, level, WAYS) >> 1
    while half:
        side = 1 if position & half else 0
        tree = tree & ~(1 << node) if side else tree | (1 << node)
        node = 2 * node + side
        half >>= 1
    store(cells, at, tree)


@compiled
def _pointed_at(cells: int, table: int, level: int, core: int, first: int) -> int:
    """The way that the tree's nodes lead to."""
    tree, node, ways = load(cells, _tree_of(table, level, core, first)), 1, of(table, level, WAYS)
    while node < ways:
        node = 2 * node + ((tree >> node) & 1)
    return node - ways


@compiled
def _drawn(cells: int, table: int, level: int) -> int:
    """A way at random: Marsaglia's xorshift of 64 bits, its upper half taken modulo the ways."""
    state = np.uint64(load(cells, of(table, level, AIDE)))
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    store(cells, of(table, level, AIDE), np.int64(state))
    return int(np.int64(state >> np.uint64(32)) % of(table, level, WAYS))


@compiled
def insert(cells: int, table: int, level: int, core: int, first: int, entry: int) -> int:
    """Take a line into the set that begins at ``first``; returns the entry that has to go, or EMPTY."""
    policy, ways = of(table, level, POLICY), of(table, level, WAYS)
    if policy in (LRU, FIFO):
        return push(cells, first, ways, ways - 1, entry)
    position = find(cells, first, ways, EMPTY, 0)
    if position == ways:
        if policy == PLRU:
            position = _pointed_at(cells, table, level, core, first)
        else:
            position = _drawn(cells, table, level)
    gone = load(cells, first + position)
    store(cells, first + position, entry)
    if policy == PLRU:
        _point_away(cells, table, level, core, first, position)
    return gone


@compiled
def remove(cells: int, table: int, level: int, first: int, position: int) -> None:
    """Take a line out of a set."""
    policy, ways = of(table, level, POLICY), of(table, level, WAYS)
    if policy in (LRU, FIFO):
        while position + 1 < ways:
            store(cells, first + position, load(cells, first + position + 1))
            position += 1
    store(cells, first + position, EMPTY)


@compiled
def missed(table: int, level: int, absent: bool, tally: int, wide: bool) -> None:
    """Count a miss, of the line or only of its sector."""
    add(tally, 2 * level + 1, 1)
    if wide and absent:
        add(tally, 2 * of(table, 0, LEVELS) + 4 + 3 * level, 1)


@compiled
def written_back(table: int, level: int, absent: bool, sectors: int, tally: int, wide: bool) -> None:
    """Count sectors written back to a level, and whether it does not have their line."""
    if wide:
        at = 2 * of(table, 0, LEVELS) + 4 + 3 * level
        add(tally, at + 1, sectors)
        if absent:
            add(tally, at + 2, sectors)


@compiled
def memory(cells: int, table: int, address: int, size: int, write: bool, tally: int, wide: bool) -> None:
    """Bytes to or from memory: how many, and whether the row that they lie in was open in its bank."""
    at = 2 * of(table, 0, LEVELS)
    add(tally, at + 1 if write else at, size)
    banks = of(table, 0, BANKS)
    if banks:
        number = address // of(table, 0, ROW_BYTES)
        bank = of(table, 0, OPEN) + number % banks
        if wide:
            add(tally, at + 2 if load(cells, bank) == number else at + 3, 1)
        store(cells, bank, number)
