"""How far predictions are off: from predictions of kernels that were left out, family by family and level by level.

The samples are dealt into ``FOLDS`` parts by a hash of each, and each part is predicted by a fit to the others. What
these predictions miss by says two things, neither of which any kernel that is held out has touched:

- **whether to correct**: per family, the fit alone, the fit corrected by what similar kernels deviated from it
  (``costmodel/deviation.py``), or the family's own constants corrected so; what errs least is kept, and the fit alone
  unless another is clearly better.
- **how wide an interval is** (conformal prediction, cross-fitted): the error of each left-out kernel over the deviation
  expected of it; the quantile of these that nine of ten are below, per level with enough kernels, is what the expected
  deviation of a new kernel is multiplied by. Levels with fewer take the coarser level's.

A kernel that was measured has an interval too: where the median of its repetitions lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, comb
from zlib import crc32

import numpy as np

from costmodel.constants import Sample, family_of, fit_constants, levels
from costmodel.deviation import FAR, Predictor
from costmodel.device import FamilyFit

__all__ = ["COVERED", "median_interval", "with_uncertainty"]

COVERED = 0.9
FOLDS = 5
LEAST_SAMPLES = 20
"""Fewer kernels than this give a level no quantile, and a family no choice, of its own."""
WORTH = 0.97
"""A correction is kept where it leaves at most this share of the error..."""
LEAST_GAIN = 0.003
"""...and takes at least this much of it (logarithm) away."""
MOST_ERROR = 0.7
"""Larger errors (logarithm) count as this when choosing: a few wild ones do not decide."""


def with_uncertainty(
    constants: Mapping[str, FamilyFit], samples: Sequence[Sample], names: Sequence[str]
) -> dict[str, FamilyFit]:
    """The constants, each with the spread of its predictions, and corrected where that helps.

    Args:
        constants: fitted to the samples.
        samples: all of them.
        names: of features.
    """
    ordered = sorted(samples, key=lambda s: (s.label, s.kind, s.ns, s.features))
    if len(ordered) < LEAST_SAMPLES:
        return dict(constants)
    own = [levels(s.label, s.kind) for s in ordered]
    families = np.array([o[-1] for o in own])
    ways = _left_out(ordered, names)
    chosen: dict[str, int] = {}
    scores, missed = np.zeros(len(ordered)), np.zeros(len(ordered))
    for family in sorted(set(families.tolist())):
        rows = np.flatnonzero(families == family)
        way = chosen[family] = _best([errors[rows] for errors, _ in ways]) if len(rows) >= LEAST_SAMPLES else 0
        errors, scales = ways[way]
        missed[rows] = np.abs(errors[rows])
        scores[rows] = missed[rows] / scales[rows]
    kept = {key: one for key, one in constants.items() if key == family_of(key) or not _coarse(chosen, key)}
    spreads, off = _spreads(scores, own), _spreads(missed, own)
    corrected = {family for family, way in chosen.items() if _WAYS[way][0]}
    return {
        key: replace(
            one,
            spread_90=spreads.get(key, _coarser(spreads, key)),
            error_90=off.get(key, _coarser(off, key)),
            corrected=key in corrected,
        )
        for key, one in kept.items()
    }


_WAYS = ((False, False), (True, False), (True, True))
"""(corrected, with the family's constants alone)."""


def _coarse(chosen: Mapping[str, int], key: str) -> bool:
    return key != "all" and _WAYS[chosen.get(family_of(key), 0)][1]


def _best(errors: Sequence[np.ndarray]) -> int:
    """The way that errs least; the first unless another is worth it."""
    losses = [float(np.minimum(np.abs(e), MOST_ERROR).mean()) for e in errors]
    best = int(np.argmin(losses))
    return best if losses[best] < min(WORTH * losses[0], losses[0] - LEAST_GAIN) else 0


def _fold(sample: Sample) -> int:
    """By the kernel alone, whatever it was measured to take: like a held-out kernel's."""
    return crc32(repr((sample.label, sample.kind, sample.features)).encode()) % FOLDS


def _left_out(samples: Sequence[Sample], names: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per way, errors (log of measured over predicted) and deviations expected, from fits without a sample's part."""
    folds = np.array([_fold(s) for s in samples])
    own = [levels(s.label, s.kind) for s in samples]
    values = np.array([s.features for s in samples], dtype=np.float64)
    measured = np.log([s.ns for s in samples])
    ways = [(np.zeros(len(samples)), np.full(len(samples), FAR)) for _ in _WAYS]
    for fold in range(FOLDS):
        inside = [s for s, f in zip(samples, folds, strict=True) if f != fold]
        rows = np.flatnonzero(folds == fold)
        if not inside or not len(rows):
            continue
        fine = fit_constants(inside, names)
        coarse = {key: one for key, one in fine.items() if key == family_of(key)}
        predictors = [Predictor(constants, inside, names) for constants in (fine, coarse)]
        by_level: dict[tuple[str, ...], list[int]] = {}
        for i in rows.tolist():
            by_level.setdefault(own[i], []).append(i)
        for level, some in by_level.items():
            for (errors, scales), (corrected, coarsely) in zip(ways, _WAYS, strict=True):
                predictor = predictors[coarsely]
                fitted = [sum(predictor.items(level, samples[i].features).values()) for i in some]
                errors[some] = measured[some] - np.log(fitted)
                near = predictor.deviations(level)
                if near is not None:
                    scales[some] = near.scales(values[some])
                    errors[some] -= near.means(values[some]) if corrected else 0.0
    return ways


def _spreads(scores: np.ndarray, own: Sequence[Sequence[str]]) -> dict[str, float]:
    """The score that nine in ten are below, by level with enough of them; always of all."""
    by_level: dict[str, list[float]] = {}
    for score, level in zip(scores, own, strict=True):
        for key in (*level, "all"):
            by_level.setdefault(key, []).append(float(score))
    return {
        key: float(f"{_quantile(values):.6g}")
        for key, values in by_level.items()
        if len(values) >= LEAST_SAMPLES or key == "all"
    }


def _quantile(scores: Sequence[float]) -> float:
    """The least score that a further kernel is below with at least the wanted probability, were they exchangeable."""
    ordered = sorted(scores)
    return ordered[min(ceil((len(ordered) + 1) * COVERED), len(ordered)) - 1]


def _coarser(spreads: Mapping[str, float], key: str) -> float:
    name = key.partition("(")[0]
    for coarser in (name, name.partition(":")[0], family_of(key)):
        if coarser in spreads:
            return spreads[coarser]
    return spreads["all"]


def median_interval(rounds_ns: Sequence[int]) -> tuple[int, int]:
    """Bounds between which the median of what was repeated lies with 90% (order statistics; no distribution assumed).

    Fewer than five repetitions cannot say so much: their range.
    """
    ordered = sorted(rounds_ns)
    skip = _skipped(len(ordered))
    return ordered[skip], ordered[-1 - skip]


@lru_cache(maxsize=256)
def _skipped(count: int) -> int:
    """Repetitions that may be left out at either end: so few fall on one side of the median rarely enough."""
    below, skip = 0.0, 0
    for k in range(count // 2):
        below += comb(count, k) / 2**count
        if 2 * below > 1 - COVERED:
            break
        skip = k
    return skip
