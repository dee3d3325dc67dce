"""What latency curves say of caches: sizes, latencies, lines and ways, each found or said to be not separable.

A pointer chase over a working set takes the latency of the cache that holds it. Latency against size is therefore a
staircase: a plateau for every level, a rise where the working set outgrows it. Nothing here knows a device: curves come
in, findings go out, and what the curve does not show is not claimed.

1. The curve is made monotone (isotonic regression on the logarithm): a larger working set is never faster, so what says
   otherwise is noise.
2. Plateaus are runs of sizes over which latency grows less than ``FLAT``. What lies between two plateaus is a rise.
3. A level's size is the largest working set that still runs about at its plateau (``FITS``, ``AT_MOST``). The next
   measured size does not fit; the truth lies in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, log2

import numpy as np

__all__ = ["Curve", "Finding", "FoundLevel", "find_fetch", "find_levels", "find_line", "find_ways", "isotonic"]

FLAT = 0.12
"""A plateau grows less than this share from its first size to its last."""
PLATEAU_OCTAVES = 0.7
"""A plateau spans at least this many doublings of the working set; what is shorter is part of a rise."""
LEAST_RISE = 1.45
"""Plateaus closer than this factor are one: the next cache is slower than that, page tables and farther halves less."""
LEAST_STEP = 1.25
"""A miss in place of a hit makes a pair of loads slower by this factor, or nothing is told."""
FITS = 0.2
AT_MOST = 1.5
"""A working set fits as long as it takes no more than ``FITS`` of the rise to the next plateau, nor this many times its
own."""

FOUND, NOT_SEPARABLE = "found", "not separable"


@dataclass(frozen=True)
class Curve:
    """Latency against something.

    Attributes:
        sizes_bytes: [n], rising: working sets, strides or distances.
        latency_ns: [n], of one dependent load: the median of the rounds.
        spread_ns: [n], interquartile range of the rounds; 0 where it is not known.
    """

    sizes_bytes: tuple[int, ...]
    latency_ns: tuple[float, ...]
    spread_ns: tuple[float, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A number that a curve tells, or that it does not.

    Attributes:
        value: 0 where nothing is found.
        status: "found" or "not separable".
        why: what the curve shows, in words.
    """

    value: float
    status: str
    why: str

    @property
    def found(self) -> bool:
        """Whether there is a number."""
        return self.status == FOUND


@dataclass(frozen=True)
class FoundLevel:
    """A cache that a curve shows.

    Attributes:
        size_bytes: the largest working set that fits; 0 for memory, the last level.
        above_bytes: the smallest measured working set that does not fit; 0 for memory.
        latency_ns: of its plateau.
        confidence: "high", "medium" or "low": how clear both plateaus and the rise between them are.
    """

    size_bytes: int
    above_bytes: int
    latency_ns: float
    confidence: str


def isotonic(values: Sequence[float]) -> list[float]:
    """The closest rising sequence (least squares): neighbours out of order are averaged."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return [value for value, count in blocks for _ in range(count)]


def find_levels(curve: Curve) -> tuple[FoundLevel, ...]:
    """The levels that a curve of latency against working set shows, nearest first; the last is what lies beyond.

    One level means that there is no knee in the curve: nothing is found of any cache.
    """
    smooth = _smooth(curve)
    sizes = curve.sizes_bytes
    flats = _plateaus(sizes, smooth)
    out = []
    for (first, last), (after, end) in pairwise(flats):
        low, high = _level(smooth, first, last), _level(smooth, after, end)
        limit = min(low + FITS * (high - low), low * AT_MOST)
        fits = max(i for i in range(first, after) if smooth[i] <= limit or i == first)
        sure = _confidence(curve, (first, last), (after, end), fits, low, high)
        out.append(FoundLevel(sizes[fits], sizes[fits + 1], low, sure))
    if flats:
        out.append(FoundLevel(0, 0, _level(smooth, *flats[-1]), "medium"))
    return tuple(out)


def find_line(curve: Curve, stride_bytes: int, size: FoundLevel, beyond_ns: float) -> Finding:
    """Bytes that one tag covers, from how far a cache reaches when visited at an odd multiple of 64 bytes.

    At a stride of three times 64 bytes all sets are visited alike. Lines of 64 bytes let the cache hold a third of the
    lines that lie there, so that it reaches three times its size; lines of 128 bytes 1.5 times; of 256 once.

    Args:
        curve: latency against the span of memory that is visited at that stride.
        stride_bytes: an odd multiple of 64.
        size: the level, from the curve at a dense stride.
        beyond_ns: latency of the next level.
    """
    reach = _reach(curve, size.latency_ns, beyond_ns)
    if reach is None:
        return Finding(0, NOT_SEPARABLE, f"no knee at a stride of {stride_bytes} bytes")
    low, high = reach
    for line in (32, 64, 128, 256):
        times = max(stride_bytes / line, 1.0)
        if low <= size.above_bytes * times and high >= size.size_bytes * times:
            why = f"at a stride of {stride_bytes} bytes the cache reaches {low / size.size_bytes:.3g} times its size"
            return Finding(line, FOUND, why)
    why = f"it reaches {low} to {high} bytes at a stride of {stride_bytes}, which no size of line explains"
    return Finding(0, NOT_SEPARABLE, why)


def find_fetch(curve: Curve) -> Finding:
    """Bytes that one miss brings: the smallest distance at which a second load next to a missed one misses too.

    Args:
        curve: time per load of such pairs against their distance, a power of two.
    """
    if not curve.sizes_bytes:
        return Finding(0, NOT_SEPARABLE, "the levels leave no room to look")
    times = isotonic(curve.latency_ns)
    low, high = times[0], times[-1]
    if high < low * LEAST_STEP:
        return Finding(0, NOT_SEPARABLE, f"pairs take {low:.3g} to {high:.3g} ns a load at any distance")
    noise = max(abs(t - raw) for t, raw in zip(times, curve.latency_ns, strict=True))
    if noise > (high - low) / 3:
        return Finding(0, NOT_SEPARABLE, f"from {low:.3g} to {high:.3g} ns a load, but {noise:.3g} ns of noise")
    if low < 0.4 * high:  # one of two loads misses in any case
        return Finding(0, NOT_SEPARABLE, f"{low:.3g} ns a load is too little beside {high:.3g}: noise")
    slow = [size for size, t in zip(curve.sizes_bytes, times, strict=True) if t > (low + high) / 2]
    if not 2 <= len(slow) <= len(times) - 2:
        return Finding(0, NOT_SEPARABLE, f"from {low:.3g} to {high:.3g} ns a load, at one distance alone")
    jump = max(b / a for a, b in pairwise(times))
    if jump < 1 + (high / low - 1) / 2:
        return Finding(0, NOT_SEPARABLE, f"from {low:.3g} to {high:.3g} ns a load without a clear step")
    return Finding(
        slow[0], FOUND, f"pairs up to {slow[0] // 2} bytes apart take {low:.3g} ns a load, others {high:.3g}"
    )


def find_ways(curves: Mapping[int, Curve], size: FoundLevel, beyond_ns: float) -> Finding:
    """Ways of a cache, from how many lines fit that all fall into one set.

    Lines at a stride that is a multiple of a way's size share a set. The number that fits no longer falls once the
    stride is that large; it is found if two strides agree on it and if so many ways of a power of two make up the size.

    Args:
        curves: by stride; each is latency against the *number* of lines.
        size: the level.
        beyond_ns: latency of the next level.
    """
    fits = {}
    for stride, curve in sorted(curves.items()):
        reach = _reach(curve, size.latency_ns, beyond_ns)
        if reach is None:
            return Finding(0, NOT_SEPARABLE, f"no number of lines at a stride of {stride} bytes overflows a set")
        fits[stride] = reach[0]
    told = ", ".join(f"{count} at {stride}" for stride, count in fits.items())
    for (_, a), (stride, b) in pairwise(fits.items()):
        way = 1 << round(log2(size.size_bytes / b)) if b else 0
        for candidate in (way // 2, way, way * 2):
            if a == b > 1 and candidate <= stride // 2 and size.size_bytes <= b * candidate < size.above_bytes:
                return Finding(b, FOUND, f"lines that fit by stride in bytes: {told}")
    return Finding(0, NOT_SEPARABLE, f"lines that fit by stride in bytes: {told}; no two agree on ways of the size")


def _smooth(curve: Curve) -> list[float]:
    """The curve made monotone, in nanoseconds; single outliers upwards are cut to their neighbours first."""
    values = np.asarray(curve.latency_ns, dtype=np.float64)
    if len(values) > 2:
        middle = np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)
        values = np.concatenate([[min(values[0], values[1])], middle, values[-1:]])
    return [float(np.exp(v)) for v in isotonic(np.log(np.maximum(values, 1e-6)).tolist())]


def _plateaus(sizes: Sequence[int], smooth: Sequence[float]) -> list[tuple[int, int]]:
    """Index ranges (first, last) of plateaus, nearest first: longest first, then what is left on either side."""

    def within(first: int, last: int) -> list[tuple[int, int]]:
        best = None
        for i in range(first, last + 1):
            j = i
            while j < last and smooth[j + 1] <= smooth[i] * (1 + FLAT):
                j += 1
            span = log2(sizes[j] / sizes[i])
            if span >= PLATEAU_OCTAVES and (best is None or span > best[0]):
                best = span, i, j
        if best is None:
            return []
        _, i, j = best
        return [*within(first, i - 1), (i, j), *within(j + 1, last)]

    merged: list[tuple[int, int]] = []
    for first, last in within(0, len(sizes) - 1):
        if merged and _level(smooth, first, last) < _level(smooth, *merged[-1]) * LEAST_RISE:
            merged[-1] = merged[-1][0], last
        else:
            merged.append((first, last))
    return merged


def _level(smooth: Sequence[float], first: int, last: int) -> float:
    return float(np.median(smooth[first : last + 1]))


def _confidence(
    curve: Curve, below: tuple[int, int], above: tuple[int, int], fits: int, low: float, high: float
) -> str:
    """High: the rise is sharp and far above the noise; low: it is long or near it."""
    sizes = curve.sizes_bytes
    spreads = [curve.spread_ns[first : last + 1] for first, last in (below, above)] if curve.spread_ns else []
    noise = max((float(np.median(s)) for s in spreads), default=0.0)
    rise_octaves = log2(sizes[above[0]] / sizes[fits])
    factor = log(high / low)
    if noise > (high - low) / 2 or rise_octaves > 2.5:
        return "low"
    return "high" if rise_octaves <= 1.0 and factor >= log(1.5) else "medium"


def _reach(curve: Curve, low: float, high: float) -> tuple[int, int] | None:
    """(largest that fits, smallest that does not) where latency leaves ``low`` for ``high``; None: it never does."""
    smooth = isotonic(curve.latency_ns)
    limit = low + 2 * FITS * (high - low)
    over = [i for i, value in enumerate(smooth) if value > limit]
    if not over or over[0] == 0:
        return None
    return curve.sizes_bytes[over[0] - 1], curve.sizes_bytes[over[0]]
