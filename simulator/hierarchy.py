"""What a cache hierarchy is: its levels, how they go together, and the arrays that stand for one in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from layoutopt.errors import LayoutOptError
from simulator.sets import ALLOCATE, BUFFERS, COLUMNS, EMPTY, FETCH, IMAGES, WRITE_BACK

__all__ = ["INCLUSIONS", "PLAIN_LOADS", "REPLACEMENTS", "Hierarchy", "Level", "State"]

REPLACEMENTS = ("lru", "fifo", "plru", "random")
INCLUSIONS = ("none", "inclusive", "exclusive")
_SERVES = {"buffer": BUFFERS, "image": IMAGES, "all": BUFFERS | IMAGES}
_MOST_SECTORS = 8
PLAIN_LOADS = 4
"""In the table: ``simulator/plain.py`` can do loads; bits BUFFERS and IMAGES say so of stores on their way."""


@dataclass(frozen=True)
class Level:
    """One cache level.

    Attributes:
        name: "L1", "L2", …
        size_bytes: capacity, a multiple of ways × line.
        line_bytes: power of two.
        ways: associativity.
        shared: one for all cores rather than one per core.
        serves: "all", "buffer" or "image".
        sector_bytes: what a miss fetches, an eighth of a line at least; 0: the line.
        replacement: which line of a full set goes. "lru": the one used longest ago. "fifo": the one that came first.
            "plru": the one that a binary tree points to, each of whose nodes points away from its side used last (a
            power of two of ways, 64 at most). "random": any, by a generator of fixed seed.
        write_back: a store stays here until its line has to go; otherwise it is passed on at once.
        write_allocate: a store that misses takes the line in.
        fetch_on_write: it does so with what further levels have, as a cache must that keeps no byte masks.
        inclusion: "none". "inclusive": a line that goes from here goes from the nearer levels too. "exclusive": it
            holds only what had to go from the level before it, and gives back what is asked for (a victim cache).
        hashed: a set is picked by all bits of the line number, its pieces as wide as a set number XORed (and taken
            modulo the sets where they are no power of two), as GPUs do, rather than by the lowest.
        fetch_bytes: what the last level gets from memory for a sector that it misses: the aligned piece of the line
            around it, as far as it is not there; 0: the sector. Whoever asks for several sectors of a piece at once
            misses them all: an access that follows the fetch directly is no hit.
    """

    name: str
    size_bytes: int
    line_bytes: int
    ways: int
    shared: bool = False
    serves: str = "all"
    sector_bytes: int = 0
    replacement: str = "lru"
    write_back: bool = True
    write_allocate: bool = True
    fetch_on_write: bool = True
    inclusion: str = "none"
    hashed: bool = False
    fetch_bytes: int = 0

    @property
    def sets(self) -> int:
        """Number of sets."""
        return self.size_bytes // (self.line_bytes * self.ways)

    @property
    def unit_bytes(self) -> int:
        """What one access asks for: a sector, or the line."""
        return self.sector_bytes or self.line_bytes

    @property
    def usual(self) -> bool:
        """Stores stay here, and their lines are fetched."""
        return self.write_back and self.write_allocate and self.fetch_on_write


class State(NamedTuple):
    """A hierarchy in use.

    Attributes:
        lines: int64, the cells of all levels end to end, laid out as ``simulator/sets.py`` says.
        geometry: int64 [levels, columns], likewise; the log2 of a level's unit and the ways that pass it (bits BUFFERS
            and IMAGES) are its columns 4 and 5.
    """

    lines: np.ndarray
    geometry: np.ndarray


@dataclass(frozen=True)
class Hierarchy:
    """Levels from the core outwards.

    Attributes:
        levels: nearest first.
        cores: how many, each with private levels of its own.
        row_bytes: of memory, what one bank keeps open; consecutive rows lie in consecutive banks. 0: not looked at.
        banks: of memory, over all channels.
        seed: of random replacement.

    Raises:
        LayoutOptError: a level's size, line, sector, ways or policies cannot be, or do not go with other levels'.
    """

    levels: tuple[Level, ...]
    cores: int = 1
    row_bytes: int = 0
    banks: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.levels or self.cores < 1:
            raise LayoutOptError("a cache hierarchy needs at least one level and one core")
        for level in self.levels:
            _check_level(level)
        for i, level in enumerate(self.levels):
            _check_among(level, self.levels[:i])
            if level.fetch_bytes and (level is not self.levels[-1] or not i or level.inclusion == "exclusive"):
                raise LayoutOptError(
                    f"cache level {level}: fetch_bytes are of the last of several levels, none exclusive"
                )
        longest = max(level.line_bytes for level in self.levels)
        if bool(self.row_bytes) != bool(self.banks) or self.banks < 0 or 0 < self.row_bytes < longest:
            raise LayoutOptError(
                f"memory of {self.banks} banks with rows of {self.row_bytes} bytes: give both or neither, "
                f"rows of at least a line ({longest} bytes)"
            )

    @property
    def counters(self) -> int:
        """Columns of all counters that ``line_access`` knows; the first ``2 * levels + 2`` are always counted."""
        return 5 * len(self.levels) + 4

    def state(self) -> State:
        """Empty caches, closed rows."""
        geometry = np.zeros((len(self.levels), COLUMNS), dtype=np.int64)
        start = 0
        for row, level in zip(geometry, self.levels, strict=True):
            entries, sets = level.sets * level.ways, level.sets
            instances = 1 if level.shared else self.cores
            straight = sets & (sets - 1) == 0 and not level.hashed
            stores = WRITE_BACK * level.write_back | ALLOCATE * level.write_allocate | FETCH * level.fetch_on_write
            row[:13] = (
                start,
                0 if level.shared else entries,
                sets,
                level.ways,
                level.unit_bytes.bit_length() - 1,
                _SERVES[level.serves],
                sets - 1 if straight else -1,
                level.line_bytes.bit_length() - 1,
                level.line_bytes // level.unit_bytes,
                REPLACEMENTS.index(level.replacement),
                max((sets - 1).bit_length(), 1) if level.hashed else 0,
                stores,
                INCLUSIONS.index(level.inclusion),
            )
            start += entries * instances
        filled = [np.full(start, EMPTY, dtype=np.int64)]
        for number, (row, level) in enumerate(zip(geometry, self.levels, strict=True)):
            aide = self._aide(level, number)
            row[13:15] = start, 0 if level.shared else level.sets
            start += aide.size
            filled.append(aide)
        geometry[:, 15:21] = self._plain(), self.row_bytes, self.banks, start, self.cores, len(self.levels)
        geometry[:, 21] = start + self.banks
        geometry[:, 22] = [level.fetch_bytes for level in self.levels]
        recent = 1 if self.levels[-1].fetch_bytes else 0
        filled.append(np.full(self.banks + recent + _SPARE, EMPTY, dtype=np.int64))
        return State(np.concatenate(filled), geometry)

    def _aide(self, level: Level, number: int) -> np.ndarray:
        """What a policy remembers beside the lines: a tree per set, or the state of a generator."""
        if level.replacement == "plru":
            return np.zeros(level.sets * (1 if level.shared else self.cores), dtype=np.int64)
        if level.replacement == "random":
            start = 0x9E3779B97F4A7C15 * (self.seed + number + 1) % (1 << 64) | 1  # any odd number is as good
            return np.array([start], dtype=np.uint64).view(np.int64)
        return np.zeros(0, dtype=np.int64)

    def _plain(self) -> int:
        """Which accesses ``simulator/plain.py`` can do: loads, and stores by bit of their way."""
        if any(x.unit_bytes != x.line_bytes or x.replacement != "lru" or x.inclusion != "none" for x in self.levels):
            return 0
        if self.levels[-1].fetch_bytes:
            return 0
        buffers = [x for x in self.levels if x.serves != "image"]
        if not all(x.usual for x in buffers):
            return 0
        return PLAIN_LOADS | BUFFERS | (IMAGES if all(x.usual for x in self.levels) else 0)


_SPARE = 8
"""Cells behind the last set, so that a vector that begins in it stays inside."""


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _check_level(level: Level) -> None:
    name, line = f"cache level {level}", level.line_bytes
    if not _power_of_two(line) or level.ways < 1 or level.sets < 1:
        raise LayoutOptError(f"{name}: line must be a power of two and size at least one set")
    if level.sets * level.ways * line != level.size_bytes:
        raise LayoutOptError(f"{name}: size is not a multiple of ways x line")
    if not _power_of_two(level.unit_bytes) or not 1 <= line // level.unit_bytes <= _MOST_SECTORS:
        raise LayoutOptError(f"{name}: sector must be a power of two, at most a line and at least an eighth of one")
    for value, known in (
        (level.serves, tuple(_SERVES)),
        (level.replacement, REPLACEMENTS),
        (level.inclusion, INCLUSIONS),
    ):
        if value not in known:
            raise LayoutOptError(f"{name}: {value!r} is none of {', '.join(known)}")
    if level.fetch_bytes and not (_power_of_two(level.fetch_bytes) and level.unit_bytes <= level.fetch_bytes <= line):
        raise LayoutOptError(f"{name}: fetch_bytes must be a power of two, at least a sector and at most a line")
    if level.replacement == "plru" and (not _power_of_two(level.ways) or level.ways > 64):
        raise LayoutOptError(f"{name}: a tree needs 1, 2, 4, 8, 16, 32 or 64 ways; take lru")


def _check_among(level: Level, nearer: tuple[Level, ...]) -> None:
    """Whether a level goes with those between it and the core."""
    name = f"cache level {level}"
    for inner in nearer:
        if _SERVES[inner.serves] & _SERVES[level.serves] == 0:
            continue
        if inner.line_bytes > level.line_bytes or inner.unit_bytes > level.unit_bytes:
            raise LayoutOptError(
                f"{name} is asked for {inner.unit_bytes} bytes by {inner.name}, whose lines have {inner.line_bytes}: "
                "lines and sectors must not get shorter from the core outwards; make them longer here, or give "
                f"{inner.name} shorter ones"
            )
        if level.inclusion == "inclusive" and inner.write_allocate and not inner.fetch_on_write:
            raise LayoutOptError(f"{name} is inclusive: {inner.name} must fetch what it stores to (fetch_on_write)")
    if level.inclusion == "inclusive" and not level.write_allocate:
        raise LayoutOptError(f"{name} is inclusive: it must allocate on stores (write_allocate)")
    if level.inclusion == "exclusive":
        before = nearer[-1] if nearer else None
        alike = before is not None and before.usual and level.write_back and before.serves == level.serves == "all"
        if (
            before is None
            or not alike
            or (before.line_bytes, before.unit_bytes) != (level.line_bytes, level.unit_bytes)
        ):
            raise LayoutOptError(
                f"{name} is exclusive: the level before it must have the same lines and sectors, both serve all and "
                "write back, and that one allocate and fetch on stores"
            )
