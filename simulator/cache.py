"""The cache hierarchy: set-associative, LRU, write-back and write-allocate, any number of levels, compiled by numba.

A :class:`Hierarchy` is the immutable description; ``state()`` makes the arrays that the compiled code updates. Level 0
is nearest to a core. A private level exists once per core, a shared level once. A dirty line that is evicted is written
to the next level (allocating there), from the last level to memory. Sets are indexed by line number modulo the number
of sets, in which the most recently used line stands first.

A level may serve only buffers, or only what is read through images; the other accesses pass it by.

A *hit* is a line access served by the level, a *miss* one passed on, as in pycachesim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from layoutopt.errors import LayoutOptError

__all__ = ["BUFFERS", "IMAGES", "Hierarchy", "Level", "State", "line_access", "run_lines"]

EMPTY = -1
BUFFERS, IMAGES = 1, 2
"""Ways through the hierarchy."""
_SERVES = {"buffer": BUFFERS, "image": IMAGES, "all": BUFFERS | IMAGES}


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
    """

    name: str
    size_bytes: int
    line_bytes: int
    ways: int
    shared: bool = False
    serves: str = "all"

    @property
    def sets(self) -> int:
        """Number of sets."""
        return self.size_bytes // (self.line_bytes * self.ways)


class State(NamedTuple):
    """A hierarchy in use.

    Attributes:
        lines: int64, all sets of all levels end to end: ``2 * line number + dirty``, or EMPTY; within a set the most
            recent first.
        geometry: int64 [levels, 6]: first entry, entries between cores (0 if shared), sets, ways, log2 of the line,
            the ways that pass it (bits BUFFERS and IMAGES).
    """

    lines: np.ndarray
    geometry: np.ndarray


@dataclass(frozen=True)
class Hierarchy:
    """Levels from the core outwards.

    Raises:
        LayoutOptError: a level's size, line or ways cannot be.
    """

    levels: tuple[Level, ...]
    cores: int = 1

    def __post_init__(self) -> None:
        if not self.levels or self.cores < 1:
            raise LayoutOptError("a cache hierarchy needs at least one level and one core")
        for level in self.levels:
            line = level.line_bytes
            if line < 1 or line & (line - 1) or level.ways < 1 or level.sets < 1:
                raise LayoutOptError(f"cache level {level}: line must be a power of two and size at least one set")
            if level.sets * level.ways * line != level.size_bytes:
                raise LayoutOptError(f"cache level {level}: size is not a multiple of ways x line")

    def state(self) -> State:
        """Empty caches."""
        geometry, start = [], 0
        for level in self.levels:
            entries = level.sets * level.ways
            apart = 0 if level.shared else entries
            shift = level.line_bytes.bit_length() - 1
            geometry.append((start, apart, level.sets, level.ways, shift, _SERVES[level.serves]))
            start += entries * (1 if level.shared else self.cores)
        return State(np.full(start, EMPTY, dtype=np.int64), np.array(geometry, dtype=np.int64))


@njit(cache=True)
def _touch(lines: np.ndarray, geometry: np.ndarray, level: int, core: int, line: int, write: bool) -> tuple[bool, int]:
    """Look a line up in one level and make it the most recent; returns (hit, dirty line evicted or EMPTY)."""
    ways = geometry[level, 3]
    first = geometry[level, 0] + core * geometry[level, 1] + (line % geometry[level, 2]) * ways
    position = 0
    while position < ways and lines[first + position] >> 1 != line:
        position += 1
    hit = position < ways
    victim = EMPTY
    entry = 2 * line
    if hit:
        entry = lines[first + position]
    else:
        position = ways - 1
        if lines[first + position] & 1 and lines[first + position] != EMPTY:
            victim = lines[first + position] >> 1
    for i in range(first + position, first, -1):
        lines[i] = lines[i - 1]
    lines[first] = entry | 1 if write else entry
    return hit, victim


@njit(cache=True)
def _write_back(
    lines: np.ndarray, geometry: np.ndarray, level: int, core: int, address: int, counts: np.ndarray, row: int, col: int
) -> None:
    """A dirty line leaves ``level - 1``: write it to ``level``, on to memory if that evicts in turn."""
    levels = geometry.shape[0]
    while level < levels:
        if not geometry[level, 5] & BUFFERS:
            level += 1
            continue
        _, victim = _touch(lines, geometry, level, core, address >> geometry[level, 4], True)
        if victim == EMPTY:
            return
        address = victim << geometry[level, 4]
        level += 1
    counts[row, col + 2 * levels + 1] += 1 << geometry[levels - 1, 4]


@njit(cache=True)
def line_access(
    lines: np.ndarray,
    geometry: np.ndarray,
    core: int,
    address: int,
    write: bool,
    way: int,
    counts: np.ndarray,
    row: int,
    col: int,
) -> None:
    """One access of a byte address, served by the nearest level that has its line.

    Args:
        lines: of the state, updated.
        geometry: of the state.
        core: which core asks.
        address: byte address.
        write: store rather than load.
        way: BUFFERS or IMAGES.
        counts: int64, increased in ``counts[row, col : col + 2 * levels + 2]``: hits and misses per level in turn, then
            bytes read from memory and bytes written to it.
        row: which row.
        col: first column.
    """
    levels = geometry.shape[0]
    dirty = write
    for level in range(levels):
        if not geometry[level, 5] & way:
            continue
        # A store makes the nearest level's copy dirty; further levels are only read to fill it.
        hit, victim = _touch(lines, geometry, level, core, address >> geometry[level, 4], dirty)
        dirty = False
        if victim != EMPTY:
            _write_back(lines, geometry, level + 1, core, victim << geometry[level, 4], counts, row, col)
        if hit:
            counts[row, col + 2 * level] += 1
            return
        counts[row, col + 2 * level + 1] += 1
    counts[row, col + 2 * levels] += 1 << geometry[levels - 1, 4]


@njit(cache=True)
def _run_lines(lines, geometry, core, addresses, writes, counts):  # noqa: ANN001 - compiled
    for i in range(addresses.size):
        line_access(lines, geometry, core, addresses[i], writes[i], BUFFERS, counts, 0, 0)


def run_lines(state: State, core: int, addresses: np.ndarray, writes: np.ndarray, counts: np.ndarray) -> None:
    """``line_access`` over arrays (int64 addresses, bool writes; counts [2 * levels + 2]): for plain traces."""
    _run_lines(state.lines, state.geometry, core, addresses, writes, counts.reshape(1, -1))
