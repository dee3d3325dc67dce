"""What the repetitions of many kernels say about each of them when something else was using the device at times.

Kernels are timed in rounds, each over many kernels. A round in which most kernels were slow says that the device was
busy, not that they are slow: such rounds are left out of a kernel's time, where it has others. Every repetition is kept
in the model whatever becomes of it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

__all__ = ["BUSY", "settled_ns", "slowness"]

BUSY = 1.2
"""A round this much slower than the quietest is one in which the device was busy."""

LONG_NS = 20_000
"""Shorter kernels say little about the round: their times jump by themselves."""


def slowness(rounds: Sequence[Mapping[str, int]]) -> list[float]:
    """How slow the device was in each round: the median over kernels of time over the kernel's least time."""
    least: dict[str, int] = {}
    for times in rounds:
        for key, ns in times.items():
            least[key] = min(ns, least.get(key, ns))
    out = []
    for times in rounds:
        known = [ns / max(least[key], 1) for key, ns in times.items() if least[key] >= LONG_NS]
        known = known or [ns / max(least[key], 1) for key, ns in times.items()]
        out.append(median(known) if known else 1.0)
    return out


def settled_ns(rounds: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """A time per kernel: the median over its quiet rounds, or over its quietest ones where it has no quiet one."""
    slow = slowness(rounds)
    seen: dict[str, list[tuple[float, int]]] = {}
    for factor, times in zip(slow, rounds, strict=True):
        for key, ns in times.items():
            seen.setdefault(key, []).append((factor, ns))
    quietest = min(slow, default=1.0)
    out = {}
    for key, values in seen.items():
        limit = BUSY * max(quietest, min(factor for factor, _ in values))
        out[key] = round(median(ns for factor, ns in values if factor <= limit))
    return out
