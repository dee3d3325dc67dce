"""The cache hierarchy: set-associative, LRU, write-back and write-allocate, any number of levels, compiled by numba.

A :class:`Hierarchy` is the immutable description; ``state()`` makes the arrays that the compiled code updates. Level 0 is
nearest to a core. A private level exists once per core, a shared level once. A dirty line that is evicted is written to
the next level (allocating there), from the last level to memory. Sets are indexed by line number modulo the number of
sets, in which the most recently used line stands first.

Terms follow pycachesim: a *hit* is a line access served by the level, a *miss* one passed on; ``evict`` counts write-backs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from layoutopt.errors import LayoutOptError

__all__ = ["Hierarchy", "Level", "State", "line_access", "run_lines"]

EMPTY = -1


@dataclass(frozen=True)
class Level:
    """One cache level.

    Attributes:
        name: "L1", "L2", …
        size_bytes: capacity, a multiple of ways × line.
        line_bytes: power of two.
        ways: associativity.
        shared: one for all cores rather than one per core.
    """

    name: str
    size_bytes: int
    line_bytes: int
    ways: int
    shared: bool = False

    @property
    def sets(self) -> int:
        """Number of sets."""
        return self.size_bytes // (self.line_bytes * self.ways)


class State(NamedTuple):
    """Arrays of a hierarchy in use: tags and dirty bits of all levels laid end to end, and each level's geometry."""

    tags: np.ndarray  # int64 [total lines]: line number or EMPTY, most recent first within a set
    dirty: np.ndarray  # uint8 [total lines]
    start: np.ndarray  # int64 [levels]: first line of the level
    per_core: np.ndarray  # int64 [levels]: lines between cores (0 for a shared level)
    sets: np.ndarray  # int64 [levels]
    ways: np.ndarray  # int64 [levels]
    shift: np.ndarray  # int64 [levels]: log2 of the line size


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
        lines = [level.sets * level.ways for level in self.levels]
        spans = [n * (1 if level.shared else self.cores) for n, level in zip(lines, self.levels, strict=True)]
        start = np.concatenate([[0], np.cumsum(spans)[:-1]]).astype(np.int64)
        per_core = [0 if level.shared else n for n, level in zip(lines, self.levels, strict=True)]
        return State(
            np.full(sum(spans), EMPTY, dtype=np.int64),
            np.zeros(sum(spans), dtype=np.uint8),
            start,
            np.array(per_core, dtype=np.int64),
            np.array([level.sets for level in self.levels], dtype=np.int64),
            np.array([level.ways for level in self.levels], dtype=np.int64),
            np.array([level.line_bytes.bit_length() - 1 for level in self.levels], dtype=np.int64),
        )


@njit(cache=True, inline="never")
def _touch(state: State, level: int, core: int, line: int, write: bool) -> tuple[bool, int]:
    """Look a line up in one level and make it the most recent; returns (hit, dirty line evicted or EMPTY)."""
    ways = state.ways[level]
    first = state.start[level] + core * state.per_core[level] + (line % state.sets[level]) * ways
    tags, dirty = state.tags, state.dirty
    if tags[first] == line:  # the common case: touched just before
        if write:
            dirty[first] = 1
        return True, EMPTY
    position = 1
    while position < ways and tags[first + position] != line:
        position += 1
    hit = position < ways
    victim = EMPTY
    flag = dirty[first + position] if hit else np.uint8(0)
    if not hit:
        position = ways - 1
        if tags[first + position] != EMPTY and dirty[first + position]:
            victim = tags[first + position]
    for i in range(first + position, first, -1):
        tags[i] = tags[i - 1]
        dirty[i] = dirty[i - 1]
    tags[first] = line
    dirty[first] = np.uint8(1) if write else flag
    return hit, victim


@njit(cache=True)
def _write_back(state: State, level: int, core: int, address: int, counts: np.ndarray) -> None:
    """A dirty line leaves ``level - 1``: write it to ``level``, on to memory if that evicts in turn."""
    levels = state.sets.size
    while level < levels:
        _, victim = _touch(state, level, core, address >> state.shift[level], True)
        if victim == EMPTY:
            return
        address = victim << state.shift[level]
        level += 1
    counts[2 * levels + 1] += 1 << state.shift[levels - 1]


@njit(cache=True)
def line_access(state: State, core: int, address: int, write: bool, counts: np.ndarray) -> None:
    """One access of a byte address, served by the nearest level that has its line.

    Args:
        state: the caches.
        core: which core asks.
        address: byte address.
        write: store rather than load.
        counts: int64 [2 * levels + 2], increased: hits and misses per level in turn, then bytes read from memory and
            bytes written to it.
    """
    levels = state.sets.size
    for level in range(levels):
        # A store makes the nearest level's copy dirty; further levels are only read to fill it.
        hit, victim = _touch(state, level, core, address >> state.shift[level], write and level == 0)
        if victim != EMPTY:
            _write_back(state, level + 1, core, victim << state.shift[level], counts)
        if hit:
            counts[2 * level] += 1
            return
        counts[2 * level + 1] += 1
    counts[2 * levels] += 1 << state.shift[levels - 1]


@njit(cache=True)
def run_lines(state: State, core: int, addresses: np.ndarray, writes: np.ndarray, counts: np.ndarray) -> None:
    """``line_access`` over arrays (int64 addresses, bool writes): what tests and studies of plain traces use."""
    for i in range(addresses.size):
        line_access(state, core, addresses[i], writes[i], counts)
