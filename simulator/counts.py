"""Counters of simulated accesses and how far sampled ones may be off.

The walker counts in rows (instructions, lines, bytes, then the hierarchy's counters); an :class:`Estimate` is such rows
with the variance that sampling leaves in them, and :class:`Counts` is one row for people.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

__all__ = ["ALLOWANCE", "Columns", "Counts", "Estimate", "Variance", "summing_to"]


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
    def of(row: np.ndarray, variance: Variance | None = None, extrapolated: np.ndarray | None = None) -> Counts:
        """From the walker's counters [``Columns.width``], their variances, and what of them was not walked."""
        at = Columns((row.size - 7) // 5)
        half = np.zeros(row.shape) if variance is None else variance.half_95
        if extrapolated is not None:
            half = half + ALLOWANCE * extrapolated
        return Counts(
            float(row[0]),
            float(row[1]),
            float(row[2]),
            _floats(row[at.hits]),
            _floats(row[at.misses]),
            float(row[at.read]),
            float(row[at.written]),
            _floats(half[at.misses]),
            float(half[at.read]),
            float(half[at.written]),
            _floats(row[at.line_misses]),
            _floats(row[at.write_backs]),
            float(row[at.rows][0]),
            float(row[at.rows][1]),
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
class Variance:
    """An estimated variance, with how uncertain it is itself: few samples tell little of it.

    Attributes:
        value: of any shape.
        doubt: of the same shape; its square over its degrees of freedom. Of a sum of independent parts both add up.
    """

    value: np.ndarray
    doubt: np.ndarray

    @staticmethod
    def none(shape: tuple[int, ...]) -> Variance:
        """Of what is known."""
        return Variance(np.zeros(shape), np.zeros(shape))

    @staticmethod
    def of(value: np.ndarray, freedom: float) -> Variance:
        """Estimated with so many degrees of freedom."""
        return Variance(value, value**2 / freedom)

    def __add__(self, other: Variance) -> Variance:
        return Variance(self.value + other.value, self.doubt + other.doubt)

    def __getitem__(self, at: int) -> Variance:
        return Variance(self.value[at], self.doubt[at])

    def scaled(self, factor: float) -> Variance:
        """Of what is ``factor`` to the power of one half as much."""
        return Variance(self.value * factor, self.doubt * factor**2)

    def or_wider(self, other: Variance) -> Variance:
        """Of the two the one with the wider interval, at each place."""
        wider = other.half_95 > self.half_95
        return Variance(np.where(wider, other.value, self.value), np.where(wider, other.doubt, self.doubt))

    @property
    def half_95(self) -> np.ndarray:
        """Half the width of 95% intervals: by Student's t with Satterthwaite's degrees of freedom."""
        known = self.doubt > 0
        inverse = np.divide(self.doubt, self.value**2, out=np.zeros_like(self.value), where=known)
        return np.interp(np.minimum(inverse, 1.0), _T_95_AT, _T_95) * np.sqrt(self.value)


ALLOWANCE = 0.01
"""Of what was extrapolated: what run-ups and warming get wrong in all samples alike, so that no difference between
samples tells of it (benchmarks/cache_sampling.py measures it)."""

_T_95 = (1.960, 1.980, 2.000, 2.042, 2.131, 2.228, 2.306, 2.447, 2.571, 2.776, 3.182, 4.303, 12.706)
_T_95_AT = (0.0, 1 / 120, 1 / 60, 1 / 30, 1 / 15, 1 / 10, 1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
"""Student's t for 95%, both sides, by one over the degrees of freedom."""


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
    variance: Variance
    total_variance: Variance
    walked: float

    @staticmethod
    def exact(counts: np.ndarray) -> Estimate:
        """Of what was walked whole."""
        counts = counts.astype(float)
        return Estimate(counts, Variance.none(counts.shape), Variance.none(counts.shape[1:]), 1.0)

    @property
    def total(self) -> np.ndarray:
        """The sum over operands."""
        return self.counts.sum(0)

    @property
    def extrapolated(self) -> np.ndarray:
        """What of ``counts`` was not walked."""
        return (1 - self.walked) * self.counts

    def summing_to(self, column: int, total: float) -> Estimate:
        """The same with another total in a column, over which operands have their shares as they were."""
        return replace(self, counts=summing_to(self.counts, column, total))


def summing_to(counts: np.ndarray, column: int, total: float) -> np.ndarray:
    """Rows of counters whose ``column`` adds up to ``total``, in shares as they were, or by lines where all are 0.

    Args:
        counts: [operands, columns].
        column: to be changed.
        total: what it adds up to then; at least 0.
    """
    out = counts.astype(float)
    shares = out[:, column] if out[:, column].any() else out[:, 1]
    if shares.any():
        out[:, column] = shares * (max(total, 0.0) / shares.sum())
    return out
