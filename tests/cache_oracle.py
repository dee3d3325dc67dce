"""A cache hierarchy in plain Python, written from the definitions in simulator/policies.py; slow on purpose.

It shares no code and no representation with the compiled one: a set is a list of lines in the order in which they came
or were used, a level asks the next one by a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.cache import Hierarchy, Level, line_access
from simulator.lanes import compiled


@compiled
def drive(lines, geometry, trace, counts):
    """All accesses of a trace [accesses, 5]: core, address, store, way, row of the counters."""
    for i in range(trace.shape[0]):
        store = trace[i, 2] == 1
        line_access(lines, geometry, trace[i, 0], trace[i, 1], store, trace[i, 3], counts, trace[i, 4], 0)


@dataclass
class Line:
    number: int
    there: set[int] = field(default_factory=set)  # sectors
    dirty: set[int] = field(default_factory=set)


class Set:
    """The lines of one set, by way; ``order`` has the ways in use, the next to go first."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.ways: list[Line | None] = [None] * level.ways
        self.order: list[int] = []
        self.tree = {}  # node (path of halves from the root) -> the half to go next

    def find(self, number: int) -> Line | None:
        return next((line for line in self.ways if line and line.number == number), None)

    def used(self, line: Line) -> None:
        way = self.ways.index(line)
        if self.level.replacement == "lru":
            self.order.remove(way)
            self.order.append(way)
        self.away_from(way)

    def away_from(self, way: int) -> None:
        low, high, path = 0, self.level.ways, ""
        while high - low > 1:
            middle = (low + high) // 2
            right = way >= middle
            self.tree[path] = "left" if right else "right"
            path += "R" if right else "L"
            low, high = (middle, high) if right else (low, middle)

    def pointed_at(self) -> int:
        low, high, path = 0, self.level.ways, ""
        while high - low > 1:
            middle = (low + high) // 2
            right = self.tree.get(path, "left") == "right"
            path += "R" if right else "L"
            low, high = (middle, high) if right else (low, middle)
        return low

    def insert(self, line: Line, draw) -> Line | None:
        gone = None
        if None in self.ways:
            way = self.ways.index(None)
        else:
            way = {
                "lru": lambda: self.order[0],
                "fifo": lambda: self.order[0],
                "plru": self.pointed_at,
                "random": lambda: draw(self.level.ways),
            }[self.level.replacement]()
            gone = self.ways[way]
            self.order.remove(way)
        self.ways[way] = line
        self.order.append(way)
        self.away_from(way)
        return gone

    def remove(self, line: Line) -> None:
        way = self.ways.index(line)
        self.ways[way] = None
        self.order.remove(way)


class Random64:
    """Marsaglia's xorshift."""

    def __init__(self, seed: int) -> None:
        self.state = 0x9E3779B97F4A7C15 * (seed + 1) % 2**64 | 1

    def __call__(self, ways: int) -> int:
        x = self.state
        x ^= x << 13 & (2**64 - 1)
        x ^= x >> 7
        x ^= x << 17 & (2**64 - 1)
        self.state = x
        return (x >> 32) % ways


class Oracle:
    """Counters by name: ``hits``, ``misses``, ``line_misses``, ``returned``, ``returned_absent`` per level."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy, self.levels = hierarchy, hierarchy.levels
        many = len(self.levels)
        self.hits, self.misses, self.line_misses = [0] * many, [0] * many, [0] * many
        self.returned, self.returned_absent = [0] * many, [0] * many
        self.read = self.written = self.open_rows = self.closed_rows = 0
        self.sets: dict[tuple[int, int, int], Set] = {}
        self.rows: dict[int, int] = {}
        self.piece = -1  # of memory, that the last access fetched whole
        self.draws = [Random64(hierarchy.seed + i) for i in range(many)]

    def counters(self) -> list[int]:
        """In the order of ``line_access``."""
        out = [x for pair in zip(self.hits, self.misses, strict=True) for x in pair]
        out += [self.read, self.written, self.open_rows, self.closed_rows]
        for i in range(len(self.levels)):
            out += [self.line_misses[i], self.returned[i], self.returned_absent[i]]
        return out

    # ---- where things are

    def set_number(self, i: int, number: int) -> int:
        level = self.levels[i]
        if not level.hashed:
            return number % level.sets
        bits = max((level.sets - 1).bit_length(), 1)
        folded = 0
        for shift in range(0, 64, bits):
            folded ^= number >> shift
        return folded % level.sets

    def set_of(self, i: int, core: int, number: int) -> Set:
        key = i, 0 if self.levels[i].shared else core, self.set_number(i, number)
        return self.sets.setdefault(key, Set(self.levels[i]))

    def at(self, i: int, core: int, address: int) -> tuple[Set, int, int, Line | None]:
        level = self.levels[i]
        number, sector = address // level.line_bytes, address % level.line_bytes // level.unit_bytes
        own = self.set_of(i, core, number)
        return own, number, sector, own.find(number)

    def after(self, i: int, way: str) -> int:
        return next((k for k in range(i + 1, len(self.levels)) if self.levels[k].serves in ("all", way)), -1)

    # ---- accesses

    def access(self, core: int, address: int, write: bool, way: str = "buffer") -> None:
        first = self.after(-1, way)
        unit = self.levels[first].unit_bytes
        address = address // unit * unit
        if write:
            self.store(first, core, address, way, unit)
        elif first < 0:
            self.memory(address, unit, False)
        else:
            self.load(first, core, address, way)

    def load(self, i: int, core: int, address: int, way: str, asked: bool = False) -> None:
        """``asked``: by a nearer level rather than by the core."""
        if self.look_up(i, core, address):
            if asked and self.levels[i].fetch_bytes:
                self.served(i, address)
            own, _, _, line = self.at(i, core, address)
            if self.levels[i].inclusion != "exclusive":
                own.used(line)
        else:
            self.fetch(i, core, address, way)

    def served(self, i: int, address: int) -> None:
        """A hit in a level that fetches whole pieces: none, if it belongs to the request that fetched the piece."""
        if address // self.levels[i].fetch_bytes == self.piece:
            self.hits[i] -= 1
            self.misses[i] += 1
        else:
            self.piece = -1

    def look_up(self, i: int, core: int, address: int) -> bool:
        _, _, sector, line = self.at(i, core, address)
        hit = line is not None and sector in line.there
        self.hits[i] += hit
        self.misses[i] += not hit
        self.line_misses[i] += line is None
        return hit

    def fetch(self, i: int, core: int, address: int, way: str, dirty: bool = False) -> None:
        """Bring a unit that level ``i`` has missed there."""
        k = self.after(i, way)
        extra = None
        if k < 0:
            extra = self.from_memory(i, core, address)
        else:
            self.load(k, core, address, way, asked=True)
        if self.levels[i].inclusion != "exclusive":
            self.fill(i, core, address, dirty, extra or self.given_back(i, core, address))

    def from_memory(self, i: int, core: int, address: int) -> Line | None:
        """A unit from memory, or the whole piece around it but for what is there."""
        level = self.levels[i]
        unit, start = level.unit_bytes, address // level.unit_bytes * level.unit_bytes
        if not level.fetch_bytes:
            self.memory(start, unit, False)
            return None
        self.piece = address // level.fetch_bytes
        first = self.piece * level.fetch_bytes
        wanted = [a for a in range(first, first + level.fetch_bytes, unit) if not self.has(i, core, a)]
        self.memory(start, unit * len(wanted), False)
        return Line(-1, {a % level.line_bytes // unit for a in wanted})

    def given_back(self, i: int, core: int, address: int) -> Line:
        """What the exclusive levels right after ``i`` have of a line, up to where the sector is; they lose it."""
        out = Line(-1)
        for k in range(i + 1, len(self.levels)):
            if self.levels[k].inclusion != "exclusive":
                break
            own, _, sector, line = self.at(k, core, address)
            if line:
                out.there |= line.there
                out.dirty |= line.dirty
                own.remove(line)
                if sector in line.there:
                    break
        return out

    def fill(self, i: int, core: int, address: int, dirty: bool, extra: Line | None = None) -> None:
        _, number, sector, _ = self.at(i, core, address)
        new = Line(number, {sector}, {sector} if dirty else set())
        if extra:
            new.there |= extra.there
            new.dirty |= extra.dirty
        self.take(i, core, new)

    def take(self, i: int, core: int, new: Line) -> None:
        own = self.set_of(i, core, new.number)
        line = own.find(new.number)
        if line:
            line.there |= new.there
            line.dirty |= new.dirty
            own.used(line)
            return
        gone = own.insert(new, self.draws[i])
        if gone:
            self.release(i, core, gone)

    def store(self, i: int, core: int, address: int, way: str, size: int) -> None:
        if i < 0:
            self.memory(address, size, True)
            return
        level = self.levels[i]
        if self.look_up(i, core, address):
            own, _, sector, line = self.at(i, core, address)
            if level.write_back:
                line.dirty.add(sector)
            own.used(line)
        elif level.write_allocate:
            if level.fetch_on_write:
                self.fetch(i, core, address, way, level.write_back)
            else:
                self.fill(i, core, address, level.write_back)
        if not level.write_back or (not level.write_allocate and not self.has(i, core, address)):
            self.store(self.after(i, way), core, address, way, size)

    def has(self, i: int, core: int, address: int) -> bool:
        _, _, sector, line = self.at(i, core, address)
        return line is not None and sector in line.there

    # ---- what has to go

    def release(self, i: int, core: int, gone: Line) -> None:
        level = self.levels[i]
        if level.inclusion == "inclusive":
            self.recall(i, core, gone)
        k = self.after(i, "buffer")
        if k > 0 and self.levels[k].inclusion == "exclusive":
            self.take(k, core, gone)
            return
        start = gone.number * level.line_bytes
        dirty = [start + s * level.unit_bytes for s in sorted(gone.dirty)]
        if dirty:
            self.write_back(k, core, dirty, level.unit_bytes)

    def recall(self, i: int, core: int, gone: Line) -> None:
        outer = self.levels[i]
        start = gone.number * outer.line_bytes
        for k in range(i):
            inner = self.levels[k]
            every = outer.shared and not inner.shared
            for one in range(self.hierarchy.cores) if every else [core]:
                for address in range(start, start + outer.line_bytes, inner.line_bytes):
                    own, _, _, line = self.at(k, one, address)
                    if line:
                        own.remove(line)
                        places = {(s * inner.unit_bytes + address - start) // outer.unit_bytes for s in line.dirty}
                        gone.dirty |= places
                        gone.there |= places

    def write_back(self, k: int, core: int, addresses: list[int], size: int) -> None:
        """Dirty sectors of one line arrive at level ``k``."""
        if k < 0:
            for address in addresses:
                self.memory(address, size, True)
            return
        level = self.levels[k]
        own, number, _, line = self.at(k, core, addresses[0])
        self.returned[k] += len(addresses)
        self.returned_absent[k] += 0 if line else len(addresses)
        if level.write_back and (line or level.write_allocate):
            sectors = {a % level.line_bytes // level.unit_bytes for a in addresses}
            self.take(k, core, Line(number, set(sectors), set(sectors)))
            return
        if line:
            own.used(line)
        self.write_back(self.after(k, "buffer"), core, addresses, size)

    def memory(self, address: int, size: int, write: bool) -> None:
        self.written += size if write else 0
        self.read += 0 if write else size
        if self.hierarchy.banks:
            row = address // self.hierarchy.row_bytes
            bank = row % self.hierarchy.banks
            self.open_rows += self.rows.get(bank) == row
            self.closed_rows += self.rows.get(bank) != row
            self.rows[bank] = row
