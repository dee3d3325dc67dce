"""Any cache: sectors, every replacement and write policy, levels that include or exclude what nearer ones hold.

An access asks the first level on its way for one *unit*, a sector of that level.

* A **load** asks further levels in turn until one has the unit; then the levels in between take it in, the outermost
  first. A level that has the line but not the sector has a miss too.
* A **store** to a level that writes back marks the sector dirty and ends there; a level that writes through passes it
  on. Where it misses, a level that allocates takes the unit in, fetched as by a load unless it does not fetch what it
  is about to overwrite; one that does not allocate passes the store on.
* A line that **has to go** is written back by its dirty sectors to the next level for buffers, which takes it in
  without fetching what is around them; a level that does not allocate, or writes through, passes them on. This is no
  access of that level: neither hit nor miss.
* From an **inclusive** level no line goes without going from the nearer levels too.
* An **exclusive** level holds nothing but what had to go from the level before it, dirty or not; what is asked of such
  a line moves back there.
"""

from __future__ import annotations

from simulator.lanes import compiled, load, store
from simulator.sets import (
    ALLOCATE,
    APART,
    BUFFERS,
    CORES,
    EMPTY,
    EXCLUSIVE,
    FETCH,
    GRANULE,
    INCLUSION,
    INCLUSIVE,
    LEVELS,
    LINE,
    LRU,
    PLRU,
    POLICY,
    RECENT,
    SECTORS,
    SERVES,
    STORES,
    UNIT,
    WAYS,
    WRITE_BACK,
    add,
    find,
    first_of,
    insert,
    memory,
    missed,
    of,
    push,
    remove,
    seek,
    set_of,
    use,
    written_back,
)

UNKNOWN = -1
"""In place of a set: whether the line is in it has to be looked up."""


@compiled
def _next(table: int, level: int, way: int) -> int:
    """The next level on a way, or the number of levels for memory."""
    level += 1
    while level < of(table, 0, LEVELS) and not of(table, level, SERVES) & way:
        level += 1
    return level


@compiled
def _sector(table: int, level: int, address: int) -> int:
    """The bit of the sector that an address lies in."""
    return 1 << ((address >> of(table, level, UNIT)) & (of(table, level, SECTORS) - 1))


@compiled
def _covering(table: int, level: int, line: int, bits: int, outer: int) -> int:
    """Sectors of ``level``'s line as sectors of the further level ``outer``, where its line is no shorter."""
    out = 0
    for sector in range(of(table, level, SECTORS)):
        if bits >> sector & 1:
            out |= _sector(table, outer, (line << of(table, level, LINE)) + (sector << of(table, level, UNIT)))
    return out


@compiled
def _recall(cells: int, table: int, level: int, core: int, gone: int) -> int:
    """Take the line of an entry out of all nearer levels; returns the entry with what was dirty there."""
    sectors = of(table, level, SECTORS)
    line = gone >> 2 * sectors
    for nearer in range(level):
        private = of(table, nearer, APART) and not of(table, level, APART)
        part = of(table, level, LINE) - of(table, nearer, LINE)
        own = of(table, nearer, SECTORS)
        for one in range(of(table, 0, CORES)):
            if not private and one != core:
                continue
            for inner in range(line << part, (line + 1) << part):
                first, position = seek(cells, table, nearer, one, inner)
                if position < of(table, nearer, WAYS):
                    dirty = (load(cells, first + position) >> own) & ((1 << own) - 1)
                    gone |= _covering(table, nearer, inner, dirty, level) * ((1 << sectors) + 1)
                    remove(cells, table, nearer, first, position)
    return gone


@compiled
def _take(cells: int, table: int, level: int, core: int, line: int, bits: int) -> int:
    """Add sector bits to a line that is used, taken in if it is not there; returns the entry that has to go."""
    first, position = seek(cells, table, level, core, line)
    if position < of(table, level, WAYS):
        store(cells, first + position, load(cells, first + position) | bits)
        use(cells, table, level, core, first, position)
        return EMPTY
    return insert(cells, table, level, core, first, line << 2 * of(table, level, SECTORS) | bits)


@compiled
def _release(cells: int, table: int, level: int, core: int, gone: int, tally: int, wide: bool) -> None:
    """An entry had to go from ``level``: see to what it holds, and to what has to go elsewhere because of that."""
    levels = of(table, 0, LEVELS)
    while gone != EMPTY:
        if of(table, level, INCLUSION) == INCLUSIVE:
            gone = _recall(cells, table, level, core, gone)
        sectors = of(table, level, SECTORS)
        line, bits = gone >> 2 * sectors, gone & ((1 << 2 * sectors) - 1)
        outer = _next(table, level, BUFFERS)
        if outer < levels and of(table, outer, INCLUSION) == EXCLUSIVE:
            gone = _take(cells, table, outer, core, line, bits)
            level = outer
            continue
        gone = EMPTY
        dirty = bits >> sectors
        if dirty:
            level, gone = _hand_on(cells, table, level, outer, core, line, dirty, tally, wide)


@compiled
def _hand_on(
    cells: int,
    table: int,
    level: int,
    outer: int,
    core: int,
    line: int,
    dirty: int,
    tally: int,
    wide: bool,
) -> tuple[int, int]:
    """Write dirty sectors of ``level``'s line back to ``outer`` or beyond; returns what has to go there and where."""
    levels = of(table, 0, LEVELS)
    address = line << of(table, level, LINE)
    while outer < levels:
        own = address >> of(table, outer, LINE)
        first, position = seek(cells, table, outer, core, own)
        there = position < of(table, outer, WAYS)
        if wide:
            sectors = 0
            for sector in range(of(table, level, SECTORS)):
                sectors += dirty >> sector & 1
            written_back(table, outer, not there, sectors, tally, wide)
        stores = of(table, outer, STORES)
        if stores & WRITE_BACK and (there or stores & ALLOCATE):
            bits = _covering(table, level, line, dirty, outer)
            bits |= bits << of(table, outer, SECTORS)
            return outer, _take(cells, table, outer, core, own, bits)
        if there:
            use(cells, table, outer, core, first, position)
        outer = _next(table, outer, BUFFERS)
    for sector in range(of(table, level, SECTORS)):
        if dirty >> sector & 1:
            place = address + (sector << of(table, level, UNIT))
            memory(cells, table, place, 1 << of(table, level, UNIT), True, tally, wide)
    return level, EMPTY


@compiled
def _just_fetched(cells: int, table: int, level: int, address: int) -> bool:
    """Whether the access before fetched the piece around an address: both belong to one request."""
    recent = of(table, level, RECENT)
    if load(cells, recent) == address // of(table, level, GRANULE):
        return True
    store(cells, recent, EMPTY)
    return False


@compiled
def _piece(cells: int, table: int, level: int, core: int, address: int) -> int:
    """The sectors of the piece around an address that are not there, which are now fetched."""
    granule = of(table, level, GRANULE)
    store(cells, of(table, level, RECENT), address // granule)
    first, position = seek(cells, table, level, core, address >> of(table, level, LINE))
    bits, start = 0, address & -granule
    while start < (address & -granule) + granule:
        bits |= _sector(table, level, start)
        start += 1 << of(table, level, UNIT)
    if position < of(table, level, WAYS):
        bits &= ~load(cells, first + position)
    return bits


@compiled
def _count(bits: int) -> int:
    """How many bits are set."""
    count = 0
    while bits:
        bits &= bits - 1
        count += 1
    return count


@compiled
def _fetch(
    cells: int,
    table: int,
    level: int,
    core: int,
    address: int,
    dirty: bool,
    absent: int,
    way: int,
    tally: int,
    wide: bool,
) -> None:
    """
    ``level`` has missed a unit: find it further out and fill all levels on the way, the outermost first. ``absent`` is
    the line's set, if it is not there.
    """
    levels = of(table, 0, LEVELS)
    absent_far = UNKNOWN  # likewise of the last level that is asked
    moved = 0  # sectors that exclusive levels give back, or that come along from memory
    found, asked = _next(table, level, way), level
    while found < levels:
        first, position = seek(cells, table, found, core, address >> of(table, found, LINE))
        there = position < of(table, found, WAYS)
        if there and load(cells, first + position) & _sector(table, found, address):
            if of(table, found, GRANULE) and _just_fetched(cells, table, found, address):
                missed(table, found, False, tally, wide)
            else:
                add(tally, 2 * found, 1)
            if of(table, found, INCLUSION) != EXCLUSIVE:
                use(cells, table, found, core, first, position)
                found -= 1  # it keeps what it has; what an exclusive level has moves
            break
        missed(table, found, not there, tally, wide)
        absent_far = UNKNOWN if there else first
        found, asked = _next(table, found, way), found
    else:
        size = 1 << of(table, asked, UNIT)
        start = address & -size
        if of(table, asked, GRANULE):
            moved = _piece(cells, table, asked, core, address)
            size *= _count(moved)
        memory(cells, table, start, size, False, tally, wide)
        found -= 1
    for inner in range(found, level - 1, -1):
        if not of(table, inner, SERVES) & way:
            continue
        line = address >> of(table, inner, LINE)
        if of(table, inner, INCLUSION) == EXCLUSIVE:
            first, position = seek(cells, table, inner, core, line)
            if position < of(table, inner, WAYS):
                moved |= load(cells, first + position) & ((1 << 2 * of(table, inner, SECTORS)) - 1)
                remove(cells, table, inner, first, position)
        else:
            known = absent if inner == level else absent_far if inner == asked else UNKNOWN
            _fill(cells, table, inner, core, address, moved, dirty and inner == level, known, tally, wide)
            moved = 0


@compiled
def _fill(
    cells: int,
    table: int,
    level: int,
    core: int,
    address: int,
    moved: int,
    dirty: bool,
    absent: int,
    tally: int,
    wide: bool,
) -> None:
    """Take a sector in, with those bits that come along; ``absent`` is the line's set, if it is not there."""
    line, sectors = address >> of(table, level, LINE), of(table, level, SECTORS)
    bits = _sector(table, level, address)
    if dirty:
        bits |= bits << sectors
    bits |= moved
    if absent == UNKNOWN:
        gone = _take(cells, table, level, core, line, bits)
    else:
        gone = insert(cells, table, level, core, absent, line << 2 * sectors | bits)
    if gone != EMPTY and (gone >> sectors & ((1 << sectors) - 1) or _minds_clean(table, level)):
        _release(cells, table, level, core, gone, tally, wide)


@compiled
def _minds_clean(table: int, level: int) -> bool:
    """Whether something is to be done for a line without dirty sectors that has to go from a level."""
    if of(table, level, INCLUSION) == INCLUSIVE:
        return True
    return level + 1 < of(table, 0, LEVELS) and of(table, level + 1, INCLUSION) == EXCLUSIVE


@compiled
def load_hits(cells: int, table: int, core: int, address: int, way: int, tally: int) -> bool:
    """Whether a load hits the nearest level, where that is no PLRU; it is done then. Most accesses are like that."""
    level = _next(table, -1, way)
    if level == of(table, 0, LEVELS) or of(table, level, POLICY) == PLRU:
        return False
    line, shift = address >> of(table, level, LINE), 2 * of(table, level, SECTORS)
    first, sector = first_of(table, level, core, set_of(table, level, line)), _sector(table, level, address)
    entry, position = load(cells, first), 0
    if entry >> shift != line:
        ignore, ways = (1 << shift) - 1, of(table, level, WAYS)
        position = find(cells, first, ways, line << shift | ignore, ignore)
        if position == ways:
            return False
        entry = load(cells, first + position)
    if not entry & sector:
        return False
    if position and of(table, level, POLICY) == LRU:
        push(cells, first, of(table, level, WAYS), position, entry)
    add(tally, 2 * level, 1)
    return True


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
    levels = of(table, 0, LEVELS)
    level = _next(table, -1, way)
    size = 1 << of(table, min(level, levels - 1), UNIT)
    while level < levels:
        first, position = seek(cells, table, level, core, address >> of(table, level, LINE))
        there = position < of(table, level, WAYS)
        keeps = write and of(table, level, STORES) & WRITE_BACK != 0
        sector = _sector(table, level, address)
        if there and load(cells, first + position) & sector:
            add(tally, 2 * level, 1)
            if keeps:
                store(cells, first + position, load(cells, first + position) | sector << of(table, level, SECTORS))
            use(cells, table, level, core, first, position)
            if keeps or not write:
                return
        else:
            missed(table, level, not there, tally, wide)
            stores = of(table, level, STORES)
            if not write or stores & ALLOCATE:
                absent = UNKNOWN if there else first
                if not write or stores & FETCH:
                    _fetch(cells, table, level, core, address, keeps, absent, way, tally, wide)
                else:
                    _fill(cells, table, level, core, address, 0, keeps, absent, tally, wide)
                if keeps or not write:
                    return
        level = _next(table, level, way)
    memory(cells, table, address & -size, size, write, tally, wide)
