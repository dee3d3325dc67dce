"""Reuse distances: how many other lines are touched between two touches of one.

The *stack distance* of an access is the number of distinct lines touched since its line was touched last (Mattson and
others, 1970): a fully associative cache of that many lines or fewer that forgets the longest unused misses it, a larger
one hits. So one histogram tells the misses of caches of every size, and which tensor a larger cache would help. Exact,
streaming: a Fenwick tree over time marks the last touch of each line, and the distance is the number of marks since
(Bennett and Kruskal, 1975; Olken, 1981), O(log n) an access and memory for the distinct lines only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numba import njit

__all__ = ["Distances", "Histogram"]

BUCKETS = 48
"""Distance 0, then [1, 2), [2, 4), [4, 8), …"""
_LEAST_SLOTS = 1 << 12
_SCATTER = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing


@dataclass(frozen=True)
class Histogram:
    """Reuse distances of some accesses.

    Attributes:
        line_bytes: what a line is.
        first_touches: accesses to lines that were not touched before.
        counts: per bucket: distance 0, then those in [1, 2), [2, 4), [4, 8), … lines.
    """

    line_bytes: int
    first_touches: float
    counts: tuple[float, ...]

    @property
    def accesses(self) -> float:
        """All of them."""
        return self.first_touches + sum(self.counts)

    def misses(self, lines: int) -> float:
        """Misses of a fully associative cache of so many lines that forgets the longest unused.

        Exact for powers of two; between them, the accesses of a bucket are taken as spread evenly over it.
        """
        missed = self.first_touches
        for bucket, count in enumerate(self.counts):
            low, high = bounds(bucket)
            missed += count * min(max(high - max(lines, low), 0) / (high - low), 1.0)
        return missed


def bounds(bucket: int) -> tuple[int, int]:
    """The distances of a bucket: first, and end."""
    return (0, 1) if bucket == 0 else (1 << (bucket - 1), 1 << bucket)


class Distances:
    """Takes a stream of line accesses piece by piece and counts its reuse distances, by row (a tensor, say).

    Args:
        line_bytes: that line numbers are of, kept for the histograms.
    """

    def __init__(self, line_bytes: int) -> None:
        self.line_bytes = line_bytes
        self._counts = np.zeros((0, BUCKETS + 1))
        self._keys = np.full(_LEAST_SLOTS, -1, dtype=np.int64)
        self._times = np.zeros(_LEAST_SLOTS, dtype=np.int64)
        self._tree = np.zeros(_LEAST_SLOTS + 1, dtype=np.int64)
        self._now = self._live = 0

    def feed(self, lines: np.ndarray, rows: np.ndarray, weight: float = 1.0) -> None:
        """The next accesses.

        Args:
            lines: numbers of lines, not below 0.
            rows: what each access counts for, numbered from 0.
            weight: what each counts.
        """
        if not lines.size:
            return
        most = int(rows.max()) + 1
        if most > self._counts.shape[0]:
            grown = np.zeros((most, BUCKETS + 1))
            grown[: self._counts.shape[0]] = self._counts
            self._counts = grown
        # Pieces no longer than what is known, so that tables grow with the distinct lines and not with the stream.
        begin = 0
        while begin < lines.size:
            end = min(begin + max(self._live, _LEAST_SLOTS), lines.size)
            self._make_room(end - begin)
            self._now, self._live = _feed(
                lines[begin:end],
                rows[begin:end],
                weight,
                self._keys,
                self._times,
                self._tree,
                self._now,
                self._live,
                self._counts,
            )
            begin = end

    def _make_room(self, more: int) -> None:
        while 2 * (self._live + more) > self._keys.size:
            keys, times = np.full(2 * self._keys.size, -1, dtype=np.int64), np.zeros(2 * self._keys.size, np.int64)
            _rehash(self._keys, self._times, keys, times)
            self._keys, self._times = keys, times
        if self._now + more >= self._tree.size:
            # The marks close up: what counts is their order.
            known = np.flatnonzero(self._keys >= 0)
            order = known[np.argsort(self._times[known], kind="stable")]
            self._times[order] = np.arange(order.size)
            self._now = order.size
            size = 1 + max(4 * (self._live + more), _LEAST_SLOTS)
            position = np.arange(size, dtype=np.int64)
            lowest = position & -position
            self._tree = np.clip(self._now - (position - lowest), 0, lowest)  # a mark at each time below now

    def histogram(self, row: int | None = None) -> Histogram:
        """Of the accesses of a row, or of all."""
        if row is not None and row >= self._counts.shape[0]:
            counts = np.zeros(BUCKETS + 1)
        else:
            counts = self._counts.sum(0) if row is None else self._counts[row]
        used = np.flatnonzero(counts[1:])
        last = int(used[-1]) + 1 if used.size else 0
        return Histogram(self.line_bytes, float(counts[0]), tuple(float(x) for x in counts[1 : 1 + last]))

    def histograms(self, names: Mapping[str, int]) -> dict[str, Histogram]:
        """By name of the row."""
        return {name: self.histogram(row) for name, row in names.items()}


@njit(cache=True)
def _place(keys: np.ndarray, line: int) -> int:
    """Where a line is or belongs."""
    mask = keys.size - 1
    at = int((np.uint64(line) * _SCATTER) >> np.uint64(20)) & mask
    while keys[at] >= 0 and keys[at] != line:
        at = (at + 1) & mask
    return at


@njit(cache=True)
def _rehash(keys: np.ndarray, times: np.ndarray, new_keys: np.ndarray, new_times: np.ndarray) -> None:
    for i in range(keys.size):
        if keys[i] >= 0:
            at = _place(new_keys, keys[i])
            new_keys[at], new_times[at] = keys[i], times[i]


@njit(cache=True)
def _feed(
    lines: np.ndarray,
    rows: np.ndarray,
    weight: float,
    keys: np.ndarray,
    times: np.ndarray,
    tree: np.ndarray,
    now: int,
    live: int,
    counts: np.ndarray,
) -> tuple[int, int]:
    before = np.int64(-1)
    for i in range(lines.size):
        line, row = lines[i], rows[i]
        if line == before:
            counts[row, 1] += weight
            continue
        before = line
        at = _place(keys, line)
        if keys[at] < 0:
            keys[at] = line
            live += 1
            counts[row, 0] += weight
        else:
            last = times[at]
            marks, k = 0, last + 1  # at or before the last touch
            while k > 0:
                marks += tree[k]
                k -= k & -k
            distance = live - marks
            bucket = 0
            while distance >> bucket:
                bucket += 1
            counts[row, 1 + bucket] += weight
            k = last + 1
            while k < tree.size:
                tree[k] -= 1
                k += k & -k
        times[at] = now
        k = now + 1
        while k < tree.size:
            tree[k] += 1
            k += k & -k
        now += 1
    return now, live
