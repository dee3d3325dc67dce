"""Fitted constants: non-negative nanoseconds per unit of each feature: of all kernels, a family, a variant, a label.

Each finer fit is drawn towards the coarser one, so that a handful of samples corrects it and no more. The error that is
minimised is that of the logarithm (a factor of two too much weighs as much as a factor of two too little), robustly:
iteratively reweighted non-negative least squares. No randomness anywhere: equal samples give equal constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from typing import Literal

import numpy as np

from costmodel.device import FamilyFit, Measurement

__all__ = ["Sample", "family_of", "finest", "fit_constants", "kind_of", "levels", "predicted_ns", "samples_of"]

ITERATIONS = 12
HUBER = 0.15
"""Relative error from which a sample's pull stops growing."""

PULL = 0.3
"""Weight of the coarser fit, in samples per feature."""

SLACK = 0.1
"""Share of the time up to which a coefficient may grow from nothing as easily as another may double."""

MIN_SAMPLES = 4
"""Fewer samples than this make no fit of their own."""

LEAST_LAUNCH_NS = 1000.0
"""A launch costs no less, unless a kernel was measured that takes less; more only where that explains the samples."""


@dataclass(frozen=True)
class Sample:
    """A measured kernel.

    Attributes:
        label: the variant's.
        kind: of op.
        features: its counts.
        ns: its time.
        noise: standard deviation of the logarithm of ``ns``, as far as its repetitions tell.
    """

    label: str
    kind: str
    features: tuple[float, ...]
    ns: float
    noise: float = 0.0


def kind_of(spec: str) -> str:
    """The op kind in a measurement's spec text."""
    return spec.partition(" ")[0]


def samples_of(measurements: Iterable[Measurement], held_out: bool | None = None) -> list[Sample]:
    """Samples of the measurements that are (or are not) held out; all by default."""
    return [
        Sample(m.variant, kind_of(m.spec), m.features, max(m.time_ns, 1.0), _noise(m.rounds_ns))
        for m in measurements
        if held_out is None or m.held_out == held_out
    ]


def _noise(rounds_ns: Sequence[int]) -> float:
    """Of the repetitions' median, from their quartiles, as if normal: 1.2533 sigma / sqrt n, 1.349 sigma apart."""
    ordered = sorted(rounds_ns)
    last = len(ordered) - 1
    low, high = ordered[round(last / 4)], ordered[round(3 * last / 4)]
    return 1.2533 / 1.349 * log(max(high, 1) / max(low, 1)) / sqrt(len(ordered))


SHAPED = frozenset(("t", "s", "chunk", "groups", "rows"))
"""Parameters that follow from an op's shape: variants that differ only in them are one for the fit."""


@lru_cache(maxsize=1 << 14)
def levels(label: str, kind: str = "") -> tuple[str, ...]:
    """From fine to coarse: ``rows.item:softmax(v=16)``, ``rows.item:softmax``, ``rows.item``, ``rows``.

    Args:
        label: the variant's.
        kind: of the op; left out where the family serves but one.
    """
    name, _, rest = label.partition("(")
    family = name.partition(".")[0]
    kept = ",".join(p for p in rest.rstrip(")").split(",") if p.partition("=")[0] not in SHAPED)
    if kind in ("", family):
        return f"{name}({kept})", name, family
    return f"{name}:{kind}({kept})", f"{name}:{kind}", name, family


def family_of(label: str) -> str:
    """The coarsest level of a variant's label, or of a level's name."""
    return label.partition("(")[0].partition(":")[0].partition(".")[0]


def fit_constants(
    samples: Sequence[Sample], names: Sequence[str], finest: Literal["label", "name"] = "label"
) -> dict[str, FamilyFit]:
    """Constants of "all", each family, each variant name and each label with enough samples.

    Args:
        samples: what was measured.
        names: feature names, in the samples' order.
        finest: where to stop; "name" is quicker.

    Returns:
        By level; empty where there are no samples.
    """
    if not samples:
        return {}
    ordered = sorted(samples, key=lambda s: (s.label, s.kind, s.ns, s.features))
    x = np.array([s.features for s in ordered], dtype=np.float64)
    y = np.array([s.ns for s in ordered], dtype=np.float64)
    # Something runs at each launch, whatever the counts say: no prediction is zero.
    floor = min(float(y.min()) / 2, LEAST_LAUNCH_NS)
    least = np.array([floor if name == "launches" else 0.0 for name in names])
    everything = _solve(x, y, None, least, np.zeros(len(names)))
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {"all": everything}
    out = {"all": _record(everything[0], x, y, names)}
    for depth in range(-1, -5 if finest == "label" else -4, -1):
        groups: dict[str, list[int]] = {}
        for i, sample in enumerate(ordered):
            own = levels(sample.label, sample.kind)
            if -depth <= len(own) - (finest == "name"):
                groups.setdefault(own[depth], []).append(i)
        for key, rows in sorted(groups.items()):
            if len(rows) < MIN_SAMPLES:
                continue
            own = levels(ordered[rows[0]].label, ordered[rows[0]].kind)
            coarser, unit = next((found[k] for k in own[own.index(key) + 1 :] if k in found), everything)
            found[key] = _solve(x[rows], y[rows], coarser, least, unit)
            out[key] = _record(found[key][0], x[rows], y[rows], names)
    return out


def _solve(
    x: np.ndarray, y: np.ndarray, prior: np.ndarray | None, least: np.ndarray, coarser_unit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients ``c >= least`` that make ``log(x @ c)`` close to ``log(y)``, near ``prior`` where there is one.

    Returns:
        The coefficients, and the unit of each: what the feature is, on average, per nanosecond of time.
    """
    from scipy.optimize import nnls  # takes as long to import as all else: who only predicts need not wait for it

    # A feature that these samples hardly have is held by what it is to the coarser group's: a trace of it must not get
    # a coefficient that makes nonsense of the next kernel, which has plenty.
    own = (x / y[:, None]).mean(axis=0)
    used = own > 0
    slower = 1.0 if prior is None else max(float(np.median(y / np.maximum(x @ prior, 1e-9))), 1.0)
    unit = np.maximum(own, coarser_unit / slower)
    if not used.any():
        return (least if prior is None else prior), unit
    base = x @ least
    scaled = x[:, used] / unit[used]
    anchor = (prior - least)[used] * unit[used] if prior is not None else np.zeros(int(used.sum()))
    # A coarser fit holds each coefficient by its ratio; without one, just enough to choose among equal answers.
    hold = np.diag(np.sqrt(PULL) / (anchor + SLACK)) if prior is not None else np.sqrt(1e-3) * np.eye(int(used.sum()))
    at = y.copy()
    weight = np.ones_like(y)
    for _ in range(ITERATIONS):
        scale = weight / np.sqrt(y * at)
        share, _ = nnls(np.vstack([scaled * scale[:, None], hold]), np.concatenate([(y - base) * scale, hold @ anchor]))
        at = np.clip(base + scaled @ share, y / 8, y * 8)
        off = np.abs(np.log(at / y))
        weight = np.sqrt(np.minimum(1.0, HUBER / np.maximum(off, 1e-9)))
    out = least.copy() if prior is None else prior.copy()  # what these samples do not have costs what it did before
    out[used] = least[used] + share / unit[used]
    return out, unit


def _record(c: np.ndarray, x: np.ndarray, y: np.ndarray, names: Sequence[str]) -> FamilyFit:
    error = np.abs(x @ c - y) / y
    kept = {name: float(f"{v:.8g}") for name, v in zip(names, c, strict=True) if v > 0}
    return FamilyFit(kept, len(y), round(float(np.median(error)), 4))


def finest(constants: Mapping[str, FamilyFit], own: Sequence[str]) -> str | None:
    """The key of the finest constants that cover a kernel of these ``levels``; None where none do."""
    return next((k for k in (*own, "all") if k in constants), None)


def predicted_ns(
    constants: Mapping[str, FamilyFit], own: Sequence[str], values: Sequence[float], names: Sequence[str]
) -> dict[str, float]:
    """Nanoseconds by feature under the finest constants that cover a kernel of these ``levels``, uncorrected."""
    key = finest(constants, own)
    if key is None:
        return {}
    chosen = constants[key]
    return {n: chosen.ns_per[n] * v for n, v in zip(names, values, strict=True) if n in chosen.ns_per}
