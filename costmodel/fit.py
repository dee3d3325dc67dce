"""A calibration's fit (constants, corrections, uncertainty), and the judge of it on kernels that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from scipy.stats import kendalltau

from costmodel.constants import Sample, fit_constants, kind_of, levels, predicted_ns, samples_of
from costmodel.deviation import Predictor
from costmodel.device import FamilyFit, HeldOut, Measurement
from costmodel.uncertainty import with_uncertainty

__all__ = ["Sample", "fit", "judge", "judge_on", "kind_of", "levels", "predicted_ns", "samples_of"]


def fit(
    samples: Sequence[Sample], names: Sequence[str], finest: Literal["label", "name"] = "label"
) -> dict[str, FamilyFit]:
    """Constants of "all", each family, each variant name and each label with enough samples.

    Args:
        samples: what was measured.
        names: feature names, in the samples' order.
        finest: where to stop; "name" is quicker by far, and leaves corrections and uncertainty out.

    Returns:
        By level; empty where there are no samples.
    """
    constants = fit_constants(samples, names, finest)
    return constants if finest == "name" else with_uncertainty(constants, samples, names)


def judge(measurements: Mapping[str, Measurement], names: Sequence[str]) -> HeldOut | None:
    """Fit on the measurements that are not held out and compare with those that are; None where either is empty."""
    train = [m for m in measurements.values() if not m.held_out]
    test = [m for m in measurements.values() if m.held_out]
    return judge_on(train, test, names) if train and test else None


def judge_on(train: Sequence[Measurement], test: Sequence[Measurement], names: Sequence[str]) -> HeldOut:
    """Fit on some measurements and compare with others.

    Args:
        train: at least one.
        test: at least one.
        names: of features.
    """
    guess, factor = predictions(train, test, names)
    truth = np.array([max(m.time_ns, 1.0) for m in test])
    return report(guess, factor, truth, [m.spec for m in test], len(train))


def predictions(
    train: Sequence[Measurement], test: Sequence[Measurement], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted nanoseconds by a fit on ``train``, and the logarithm of half the width of their 90% intervals."""
    samples = samples_of(train)
    predictor = Predictor(fit(samples, names), samples, names)
    own = [levels(m.variant, kind_of(m.spec)) for m in test]
    guess = [sum(predictor.items(o, m.features).values()) for o, m in zip(own, test, strict=True)]
    return np.array(guess), np.array([predictor.log_error_90(o, m.features) for o, m in zip(own, test, strict=True)])


def report(
    guess: np.ndarray, log_error_90: np.ndarray, truth: np.ndarray, specs: Sequence[str], fitted_on: int
) -> HeldOut:
    """The errors of predictions.

    Args:
        guess: nanoseconds predicted, [kernels].
        log_error_90: logarithm of half the width of their intervals, [kernels]; zeros where there are none.
        truth: nanoseconds measured, [kernels].
        specs: what the kernels compute.
        fitted_on: number of kernels that the predictions were learnt from.
    """
    error = np.abs(guess - truth) / truth
    tau = float(kendalltau(guess, truth).statistic) if len(truth) > 1 else 0.0
    known = log_error_90 > 0
    covered = float((np.abs(np.log(guess / truth)) <= log_error_90)[known].mean()) if known.any() else 0.0
    return HeldOut(
        kernels=len(truth),
        median_error=round(float(np.median(error)), 4),
        p90_error=round(float(np.quantile(error, 0.9)), 4),
        within_10=round(float((error <= 0.1).mean()), 4),
        within_20=round(float((error <= 0.2).mean()), 4),
        tau=round(tau if np.isfinite(tau) else 0.0, 4),
        tau_within_spec=round(_tau_within(specs, guess, truth), 4),
        fitted_on=fitted_on,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        covered_90=round(covered, 4),
        half_width_90=round(float(np.median(np.expm1(log_error_90[known]))), 4) if known.any() else 0.0,
    )


def _tau_within(specs: Sequence[str], guess: np.ndarray, truth: np.ndarray) -> float:
    """Concordant minus discordant over all pairs that compute the same thing."""
    same = np.array([[a == b for b in specs] for a in specs])
    pairs = np.triu(same, 1)
    if not pairs.any():
        return 0.0
    signs = np.sign(guess[:, None] - guess) * np.sign(truth[:, None] - truth)
    return float(signs[pairs].mean())
