"""The device's speed over a calibration, by anchors: the same few kernels, timed in every round.

A clock that falls as the device warms up makes what is measured late look slow. Over the rounds of a session the
anchors' times are smoothed by a running median, which a burst of other work shorter than half its window does not move;
what remains is drift. It is taken out of a round's times where it stands out of the anchors' own scatter nearby, and
where the kernels timed there followed: most of those that were also timed at the common speed moved by about as much.
Other work on the device slows some kernels and others not, and a correction would mend the ones and spoil the others:
rounds in which kernels did not follow are left to be weighed down as busy ones (``costmodel/rounds.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.variants import kernels_for
from layoutopt.graph import Expr
from layoutopt.layout import Layout

if TYPE_CHECKING:
    from costmodel.rounds import Round

__all__ = ["Drift", "anchor_kernels", "drift_of"]

WINDOW = 9
"""Rounds that the running median spans."""

LEAST_DRIFT = 0.02
"""A smaller departure from the common speed is not corrected."""

STANDS_OUT = 3.0
"""Nor one of fewer standard errors of the running median than this."""

FOLLOW = 0.8
"""The share of kernels that must have moved as the anchors did, to within half of that."""
LEAST_WITNESSES = 10
"""Repetitions of kernels, timed at the common speed too, that have to be there to say so."""

_SIDES = {"cpu": (160, 320), "gpu": (256, 768)}
"""Rows, columns and reduced extent of the arithmetic anchors."""

_ELEMS = {"cpu": (1 << 18, 1 << 20), "gpu": (1 << 21, 1 << 24)}
"""Numbers that the anchors of memory add; smaller where the arenas are."""


@dataclass(frozen=True)
class Drift:
    """How the device's speed moved.

    Attributes:
        levels: per round, how many times slower than commonly the device was; 1 where nothing stands out.
        fastest: the least smoothed level that stands out, 1 where none does.
        slowest: the greatest.
        by_anchor: how far each anchor's own smoothed time moved, greatest over least.
    """

    levels: tuple[float, ...]
    fastest: float = 1.0
    slowest: float = 1.0
    by_anchor: Mapping[str, float] = field(default_factory=dict)

    @property
    def corrected(self) -> float:
        """The share of rounds that are corrected."""
        return sum(level != 1.0 for level in self.levels) / max(len(self.levels), 1)

    @property
    def span(self) -> float:
        """The slowest level over the fastest, less one."""
        return self.slowest / self.fastest - 1

    def describe(self) -> str:
        """A sentence for people, with the numbers."""
        moved = ", ".join(f"{name} {ratio - 1:.1%}" for name, ratio in sorted(self.by_anchor.items()))
        if not self.corrected:
            return f"none that stands out of the noise (anchors moved, smoothed: {moved or 'none timed'})"
        return (
            f"{self.fastest - 1:+.1%} to {self.slowest - 1:+.1%} of the common time, taken out of {self.corrected:.0%} "
            f"of the rounds (anchors moved, smoothed: {moved})"
        )


def drift_of(rounds: Sequence[Round]) -> Drift:
    """The drift that the rounds' anchors tell of, in the order the rounds ran."""
    names = sorted({name for r in rounds for name in r.anchors_ns})
    common = {n: median(log(max(r.anchors_ns[n], 1)) for r in rounds if n in r.anchors_ns) for n in names}
    moved = [{n: log(max(ns, 1)) - common[n] for n, ns in r.anchors_ns.items()} for r in rounds]
    timed = [i for i, own in enumerate(moved) if own]
    if not timed:
        return Drift((1.0,) * len(rounds))
    sessions = [rounds[i].session for i in timed]
    smooth, error = _smoothed([median(moved[i].values()) for i in timed], sessions)
    smooth -= np.median(smooth)  # the common speed is that of most rounds
    stands = (np.abs(smooth) >= LEAST_DRIFT) & (np.abs(smooth) > STANDS_OUT * error)
    stands &= _followed([rounds[i] for i in timed], np.where(stands, smooth, 0.0))
    kept = np.where(stands, smooth, 0.0)
    levels = [1.0] * len(rounds)
    for i, level in zip(timed, kept, strict=True):
        levels[i] = exp(level)
    own = {}
    for n in names:
        places = [i for i in timed if n in moved[i]]
        path, _ = _smoothed([moved[i][n] for i in places], [rounds[i].session for i in places])
        own[n] = exp(float(path.max() - path.min()))
    return Drift(tuple(levels), exp(float(kept.min())), exp(float(kept.max())), own)


def _followed(rounds: Sequence[Round], moved: np.ndarray) -> np.ndarray:
    """Per round, whether kernels moved as the anchors did, by what was timed in it and in the rounds around it."""
    common: dict[str, list[float]] = {}
    for own, level in zip(rounds, moved, strict=True):
        for key, ns in own.times_ns.items():
            if not level:
                common.setdefault(key, []).append(log(max(ns, 1)))
    usual = {key: median(values) for key, values in common.items()}
    votes = np.zeros((len(rounds), 2))
    for i, (own, level) in enumerate(zip(rounds, moved, strict=True)):
        if level:
            off = [abs(log(max(ns, 1)) - usual[key] - level) for key, ns in own.times_ns.items() if key in usual]
            votes[i] = sum(o <= abs(level) / 2 for o in off), len(off)
    out = np.zeros(len(rounds), dtype=bool)
    for i, own in enumerate(rounds):
        near = [j for j in range(max(i - WINDOW, 0), i + WINDOW + 1) if j < len(rounds)]
        followed, heard = votes[[j for j in near if rounds[j].session == own.session]].sum(axis=0)
        out[i] = heard >= LEAST_WITNESSES and followed >= FOLLOW * heard
    return out


def _smoothed(values: Sequence[float], sessions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Running medians within each session, and their standard errors by the scatter in the window."""
    x, at = np.asarray(values, dtype=np.float64), np.asarray(sessions)
    smooth, error = np.empty_like(x), np.full_like(x, np.inf)
    for session in sorted(set(sessions)):
        own = np.flatnonzero(at == session)
        size = min(WINDOW, len(own))
        near = np.lib.stride_tricks.sliding_window_view(x[own], size)
        middle = np.median(near, axis=1)
        scatter = 1.4826 * np.median(np.abs(near - middle[:, None]), axis=1)
        # At the ends the window is whole too.
        place = np.clip(np.arange(len(own)) - WINDOW // 2, 0, len(near) - 1)
        smooth[own] = middle[place]
        if size > WINDOW // 2:
            error[own] = 1.2533 / np.sqrt(size) * scatter[place]
    return smooth, error


def anchor_kernels(limits: DeviceLimits, fits: Callable[[Kernel], bool]) -> dict[str, Kernel]:
    """Short kernels bound by arithmetic and by memory, by name; only what fits the arenas.

    Args:
        limits: of the device.
        fits: whether a kernel can be timed.
    """
    found: dict[str, Kernel] = {}
    for side in _SIDES[limits.kind]:
        shape = (1, side, side)
        spec = OpSpec("contraction", (shape,) * 3, ("float32",) * 3, 2, (("alpha", 1.0),))
        found |= _first(f"compute_{side}", spec, limits, fits)
    add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
    for most in _ELEMS[limits.kind]:
        for elems in (most >> shift for shift in range(0, 8, 2)):
            spec = OpSpec("pointwise", ((elems,),) * 3, ("float32",) * 3, 2, (("expr", add),))
            one = _first(f"memory_{most}", spec, limits, fits)
            if one:
                found |= one
                break
    return found


def _first(name: str, spec: OpSpec, limits: DeviceLimits, fits: Callable[[Kernel], bool]) -> dict[str, Kernel]:
    layouts = tuple(Layout.row_major(shape) for shape in spec.shapes)
    kernels = [k for k in kernels_for(spec, layouts, limits) if fits(k)]
    return {name: kernels[0]} if kernels else {}
