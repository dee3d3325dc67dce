"""Counters of simulated accesses and how far sampled ones may be off.

The walker counts in rows (instructions, lines, bytes, then the hierarchy's counters); an :class:`Estimate` is such rows
with the variance that sampling leaves in them, and :class:`Counts` is one row for people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["NORMAL_95", "Counts", "Estimate", "row_width"]

NORMAL_95 = 1.96
"""Standard errors within which nineteen in twenty lie: sums over many launches are near normal."""


def row_width(levels: int) -> int:
    """Columns of the walker's counters: instructions, lines, bytes, hits and misses per level, memory read, written."""
    return 3 + 2 * levels + 2


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

    @staticmethod
    def of(row: np.ndarray, variance: np.ndarray | None = None) -> Counts:
        """From the walker's counters [3 + 2 * levels + 2] and their variances."""
        half = np.zeros(row.shape) if variance is None else NORMAL_95 * np.sqrt(variance)
        return Counts(
            float(row[0]),
            float(row[1]),
            float(row[2]),
            _floats(row[3:-2:2]),
            _floats(row[4:-2:2]),
            float(row[-2]),
            float(row[-1]),
            _floats(half[4:-2:2]),
            float(half[-2]),
            float(half[-1]),
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
