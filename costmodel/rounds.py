"""What the repetitions of many kernels say about each of them when something else was using the device at times.

Kernels are timed in rounds, each over some dozens of kernels and a few *anchors*, the same in every round. A round in
which most of them were slow says that the device was busy, not that these kernels are slow: the slower the round, the
less it weighs. A time is the weighted median of a kernel's repetitions, after the drift of the device's speed is taken
out (``costmodel/drift.py``), with the confidence interval that order statistics give: no shape of noise is assumed, and
one outlier moves neither. Every repetition is kept in the model as it was measured, whatever becomes of it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb, inf, isfinite
from statistics import median

import numpy as np

from costmodel.drift import drift_of

__all__ = ["BUSY", "LEAST_ROUNDS", "Round", "Settled", "settle", "slowness"]

BUSY = 1.2
"""A round this much slower than the quietest is one in which the device was busy."""

STEEP = 16
"""A busy round weighs ``(BUSY / slowness) ** STEEP``: a quarter at 1.3, a hundredth at 1.6."""

LONG_NS = 20_000
"""Shorter kernels say little about the round: their times jump by themselves."""

CONFIDENCE = 0.9
LEAST_ROUNDS = 5
"""The fewest repetitions that give an interval of that confidence for the median: from the least to the greatest."""

RESOLUTION_NS = 150
"""What a launch's time jumps by on its own: no interval needs to be narrower."""

QUIET_SHARE = 0.1
"""A kernel's quiet time, which slowness is measured by, is this quantile of its times: the least of ten or fewer."""
QUIETEST_SHARE = 0.25
"""The quiet rounds begin at this quantile of them. Where fewer are quieter, some kernels have such a repetition and
others none: by these alone, times would be of different devices. (Of 285 kernels timed beside other work, the error on
those held out was 25% so, and 9% with plain medians.)"""


@dataclass(frozen=True)
class Round:
    """Kernels timed one after the other, with the anchors among them.

    Attributes:
        at_s: when, in seconds since the calibration began.
        times_ns: by kernel key.
        anchors_ns: by the anchor's name; empty where there are none.
        session: counts interruptions: between two sessions anything may have happened to the device.
    """

    at_s: float
    times_ns: Mapping[str, int]
    anchors_ns: Mapping[str, int] = field(default_factory=dict)
    session: int = 0


@dataclass(frozen=True)
class Settled:
    """What a kernel's repetitions come to.

    Attributes:
        ns: the weighted median, at the device's common speed.
        low_ns: the interval's lower end; 0 where the repetitions are too few for one.
        high_ns: its upper end; infinite where they are too few.
        repetitions: how many there are, busy ones included.
    """

    ns: int
    low_ns: float
    high_ns: float
    repetitions: int

    @property
    def half_width(self) -> float:
        """How far the interval reaches from the median, as a share of it."""
        return max(self.high_ns - self.ns, self.ns - self.low_ns) / max(self.ns, 1)

    def tight(self, tolerance: float) -> bool:
        """Whether the median is known to within a share of itself, or to what a launch jumps by anyway."""
        return self.half_width <= max(tolerance, RESOLUTION_NS / max(self.ns, 1)) and isfinite(self.high_ns)


def slowness(rounds: Sequence[Round], levels: Sequence[float] = ()) -> list[float]:
    """How slow the device was in each round: the median over kernels of time over the kernel's quiet time.

    Of kernels and anchors the slower verdict counts: kernels that ran in busy rounds alone know of no quiet time.

    Args:
        rounds: in any order.
        levels: the drift of each round, which is not held against it.
    """
    levels = levels or [1.0] * len(rounds)
    kernels = _ratios([r.times_ns for r in rounds], levels, LONG_NS)
    anchors = _ratios([r.anchors_ns for r in rounds], levels, 0)
    return [max(own, anchor) for own, anchor in zip(kernels, anchors, strict=True)]


def _ratios(times: Sequence[Mapping[str, int]], levels: Sequence[float], long_ns: int) -> list[float]:
    seen: dict[str, list[float]] = {}
    for own, level in zip(times, levels, strict=True):
        for key, ns in own.items():
            seen.setdefault(key, []).append(ns / level)
    quiet = {key: max(_quantile(values, QUIET_SHARE), 1.0) for key, values in seen.items()}
    out = []
    for own, level in zip(times, levels, strict=True):
        known = [ns / level / quiet[key] for key, ns in own.items() if quiet[key] >= long_ns]
        known = known or [ns / level / quiet[key] for key, ns in own.items()]
        out.append(median(known) if known else 1.0)
    return out


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def settle(rounds: Sequence[Round], levels: Sequence[float] | None = None) -> dict[str, Settled]:
    """A time with its interval per kernel.

    Args:
        rounds: in the order they ran.
        levels: the drift to take out; estimated from the anchors when left out.
    """
    if levels is None:
        levels = drift_of(rounds).levels
    slow = slowness(rounds, levels)
    quietest = _quantile(slow, QUIETEST_SHARE) if slow else 1.0
    seen: dict[str, tuple[list[float], list[float]]] = {}
    for own, level, factor in zip(rounds, levels, slow, strict=True):
        weight = min(BUSY * quietest / factor, 1.0) ** STEEP
        for key, ns in own.times_ns.items():
            values, weights = seen.setdefault(key, ([], []))
            values.append(ns / level)
            weights.append(weight)
    return {key: _settled(values, weights) for key, (values, weights) in seen.items()}


def _settled(values: Sequence[float], weights: Sequence[float]) -> Settled:
    order = np.argsort(values, kind="stable")
    x, w = np.asarray(values)[order], np.asarray(weights)[order]
    w = w / w.max()
    middle = round(_weighted(x, w, 0.5))
    count = float(w.sum() ** 2 / (w**2).sum())  # repetitions that weigh little count little
    rank = _rank(int(count + 1e-9))
    if not rank:
        return Settled(middle, 0.0, inf, len(values))
    share = (rank - 0.5) / count
    return Settled(middle, _weighted(x, w, share), _weighted(x, w, 1 - share), len(values))


def _weighted(x: np.ndarray, w: np.ndarray, share: float) -> float:
    """The quantile of sorted values: where ``share`` of the weight lies before."""
    total = np.cumsum(w)
    aim = share * total[-1]
    slack = 1e-9 * total[-1]
    first = min(int(np.searchsorted(total, aim - slack)), len(x) - 1)
    after = min(int(np.searchsorted(total, aim + slack, side="right")), len(x) - 1)
    return float((x[first] + x[after]) / 2)


@lru_cache(maxsize=1 << 10)
def _rank(count: int) -> int:
    """Of ``count`` sorted repetitions, that many-th from either end bounds the median; 0: they are too few."""
    below, rank = 0.0, 0
    while rank < count // 2:
        below += comb(count, rank) / 2.0**count
        if 2 * below > 1 - CONFIDENCE:
            break
        rank += 1
    return rank
