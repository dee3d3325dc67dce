"""Counters of simulated accesses and how far sampled ones may be off.

The walker counts in rows (instructions, lines, bytes, then the hierarchy's counters); an :class:`Estimate` is such rows
with the variance that sampling leaves in them, and :class:`Counts` is one row for people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["NORMAL_95", "Columns", "Counts", "Estimate"]

NORMAL_95 = 1.96
"""Standard errors within which nineteen in twenty lie: sums over many launches are near normal."""


@dataclass(frozen=True)
class Columns:
    """Where the walker's counters are in a row: instructions, lines and bytes asked for, then all that a hierarchy
    counts (``simulator.cache.line_access``).

    Attributes:
        levels: of the hierarchy.
    """

    levels: int

    @property
    def width(self) -> int:
        """Of a row."""
        return 3 + 5 * self.levels + 4

    @property
    def hits(self) -> slice:
        """Per level."""
        return slice(3, self.read, 2)

    @property
    def misses(self) -> slice:
        """Per level."""
        return slice(4, self.read, 2)

    @property
    def read(self) -> int:
        """Bytes read from memory."""
        return 3 + 2 * self.levels

    @property
    def written(self) -> int:
        """Bytes written to it."""
        return self.read + 1

    @property
    def rows(self) -> slice:
        """Memory accesses that find their row open, and those that do not."""
        return slice(self.read + 2, self.read + 4)

    @property
    def line_misses(self) -> slice:
        """Per level, for want of the line rather than of a sector."""
        return slice(self.read + 4, None, 3)

    @property
    def write_backs(self) -> slice:
        """Per level, sectors written back to it."""
        return slice(self.read + 5, None, 3)


@dataclass(frozen=True)
class Counts:
    """Counters of a set of accesses.

    Attributes:
        accesses: load and store instructions of work items.
        lines: line accesses that reach the first level (coalesced over a wave).
        bytes_asked: bytes that the instructions move.
        hits: per level, nearest first.
        misses: per level.
        memory_read_bytes: lines fetched from memory.
        memory_written_bytes: lines written back to memory.
        misses_95: per level, half the width of the 95% interval that sampling leaves around the misses; 0 where
            nothing was sampled.
        memory_read_95: half width of that of ``memory_read_bytes``.
        memory_written_95: half width of that of ``memory_written_bytes``.
        line_misses: per level, of the misses those for want of the line rather than of a sector of it.
        write_backs: per level, sectors (lines where there are none) that nearer levels write back to it.
        row_hits: memory accesses that find their row open in its bank, where the device model states rows.
        row_misses: those that do not.
    """

    accesses: float
    lines: float
    bytes_asked: float
    hits: tuple[float, ...]
    misses: tuple[float, ...]
    memory_read_bytes: float
    memory_written_bytes: float
    misses_95: tuple[float, ...] = ()
    memory_read_95: float = 0.0
    memory_written_95: float = 0.0
    line_misses: tuple[float, ...] = ()
    write_backs: tuple[float, ...] = ()
    row_hits: float = 0.0
    row_misses: float = 0.0

    @staticmethod
    def of(row: np.ndarray, variance: np.ndarray | None = None) -> Counts:
        """From the walker's counters [``Columns.width``] and their variances."""
        at = Columns((row.size - 7) // 5)
        half = np.zeros(row.shape) if variance is None else NORMAL_95 * np.sqrt(variance)
        return Counts(
            *(float(x) for x in row[:3]),
            _floats(row[at.hits]),
            _floats(row[at.misses]),
            float(row[at.read]),
            float(row[at.written]),
            _floats(half[at.misses]),
            float(half[at.read]),
            float(half[at.written]),
            _floats(row[at.line_misses]),
            _floats(row[at.write_backs]),
            *(float(x) for x in row[at.rows]),
        )

    @property
    def hit_rates(self) -> tuple[float, ...]:
        """Hits over accesses of each level (1 for a level nothing reached)."""
        return tuple(h / (h + m) if h + m else 1.0 for h, m in zip(self.hits, self.misses, strict=True))

    @property
    def memory_bytes(self) -> float:
        """Traffic to and from memory."""
        return self.memory_read_bytes + self.memory_written_bytes


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(x) for x in values)


@dataclass(frozen=True)
class Estimate:
    """Counters of a step's operands.

    Attributes:
        counts: [operands, columns].
        variance: [operands, columns], of ``counts``.
        total_variance: [columns], of the sum over operands, which are sampled together.
        walked: share of the accesses that were walked.
    """

    counts: np.ndarray
    variance: np.ndarray
    total_variance: np.ndarray
    walked: float

    @staticmethod
    def exact(counts: np.ndarray) -> Estimate:
        """Of what was walked whole."""
        counts = counts.astype(float)
        return Estimate(counts, np.zeros(counts.shape), np.zeros(counts.shape[1]), 1.0)

    @property
    def total(self) -> np.ndarray:
        """The sum over operands."""
        return self.counts.sum(0)
