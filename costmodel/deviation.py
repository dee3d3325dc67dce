"""What kernels like it deviated from the fit: a Gaussian process per family, over the log of measured over fitted.

The features count what a kernel does. Two kernels with nearly the same counts are off by nearly the same factor, and no
constant per unit can say so (how many groups a compute unit keeps at a time, what the compiler made of a loop).
The process works in the logarithms of the features, each over its standard deviation within the family, with a rational
quadratic kernel, 1 / (1 + d² / 2 reach²), which takes no function that is dear: a planner asks for a hundred thousand
kernels. Near a measured kernel the prediction follows it, far from all it is the fit's own. It gives each prediction an
expected deviation too, which is small near what was measured and ``SIZE`` far from it.

Everything follows from the measurements in a device model and is worked out when first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt

import numpy as np

from costmodel.constants import Sample, finest, levels, predicted_ns
from costmodel.device import FamilyFit

__all__ = ["FAR", "Deviations", "Predictor"]

SIZE = 0.3
"""Expected deviation (logarithm) far from all that was measured."""
NUGGET = 0.06
"""What no feature explains, even of a kernel that was measured beside it."""
REACH = 2.0
"""Distance over which deviations are alike, in standard deviations of the logarithms of the features."""
FLOOR = 0.05
"""Least standard deviation of a feature's logarithm: what hardly varied in the sample says far when it does."""
OUTLIER = 2.0
"""Standard deviations from its neighbours' word beyond which a sample counts as noisier than it said."""
PASSES = 3
LEAST = 8
"""Fewer samples of a family than this tell nothing of each other."""
MOST = 400
"""Most samples that one process holds, as its work grows with their cube: it is of a family, of families with more each
variant name's or label's own; of what is larger still, so many evenly spread over all."""
FACTOR_DIGITS = 5
FAR = sqrt(SIZE**2 + NUGGET**2)


class Deviations:
    """Of one family, or of a part of it.

    Args:
        values: features, [samples, features].
        ratios: logarithm of measured over fitted, [samples].
        noise: standard deviations of the measured logarithms, [samples].
    """

    def __init__(self, values: np.ndarray, ratios: np.ndarray, noise: np.ndarray) -> None:
        logs = np.log1p(values)
        self._scale = 1.0 / (sqrt(2.0) * REACH * (logs.std(axis=0) + FLOOR))
        self._shift = logs.mean(axis=0) * self._scale
        at = logs * self._scale - self._shift
        # One over the kernel is, for a place x, 1 + |x - at|² = (1 + |at|²) - 2 at·x + |x|².
        self._own, self._across = 1.0 + np.einsum("ij,ij->i", at, at), -2.0 * at
        self._factors: dict[tuple[float, ...], float] = {}
        alike = self._alike(values)
        stated = NUGGET**2 + noise**2
        variance = stated.copy()
        for left in reversed(range(PASSES)):
            self._inverse = np.linalg.inv(alike + np.diag(variance))
            self._weights = self._inverse @ ratios
            if left:  # by how much each sample is off from what the others say of it, in standard deviations
                own = np.diag(self._inverse)
                others = np.maximum(1.0 / own - variance, 0.0)
                off = np.abs(self._weights / own) / np.sqrt(others + stated)
                variance = stated * np.maximum(1.0, off / OUTLIER) ** 2

    def _alike(self, values: np.ndarray) -> np.ndarray:
        """Covariances with the samples, [kernels, samples]."""
        at = np.log1p(values) * self._scale - self._shift
        squares = np.einsum("ij,ij->i", at, at)
        return SIZE**2 / np.maximum(squares[:, None] + self._own + at @ self._across.T, 1.0)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Logarithm of the factor by which these kernels are expected to deviate, [kernels]."""
        return self._alike(values) @ self._weights

    def factor(self, values: tuple[float, ...]) -> float:
        """What a kernel's prediction is to be multiplied by.

        Rounded: linear algebra differs in its last digits between machines, and plans are checked to the nanosecond.
        Remembered: of the kernels that a planner asks for, a third are alike.
        """
        known = self._factors.get(values)
        if known is None:
            at = np.log1p(values) * self._scale - self._shift
            one_over = np.maximum(self._across @ at + (self._own + at @ at), 1.0)
            known = round(exp(SIZE**2 * float((self._weights / one_over).sum())), FACTOR_DIGITS)
            self._factors[values] = known
        return known

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Standard deviation expected of the logarithm of measured over predicted, [kernels]."""
        alike = self._alike(values)
        known = np.einsum("ij,jk,ik->i", alike, self._inverse, alike, optimize=True)
        return np.sqrt(np.maximum(SIZE**2 - known, 0.0) + NUGGET**2)


class Predictor:
    """The fit, with what measured kernels deviated from it.

    Args:
        constants: fitted, by level.
        samples: that they were fitted to.
        names: of features, in the samples' order.
    """

    def __init__(self, constants: Mapping[str, FamilyFit], samples: Sequence[Sample], names: Sequence[str]) -> None:
        self.constants, self._names = constants, tuple(names)
        self._samples: dict[str, list[Sample]] = {}
        for sample in samples:
            for level in levels(sample.label, sample.kind):
                self._samples.setdefault(level, []).append(sample)
        self._found: dict[str, Deviations | None] = {}
        self._level: dict[str, str] = {}
        self._corrected = {name for name, one in constants.items() if one.corrected}

    def items(self, own: Sequence[str], values: tuple[float, ...]) -> dict[str, float]:
        """Nanoseconds by feature; they add up to the prediction.

        Args:
            own: the kernel's levels.
            values: its features.
        """
        parts = predicted_ns(self.constants, own, values, self._names)
        if own[-1] in self._corrected:
            near = self.deviations(own)
            if near is not None:
                factor = near.factor(values)
                return {name: ns * factor for name, ns in parts.items()}
        return parts

    def log_error_90(self, own: Sequence[str], values: Sequence[float]) -> float:
        """The time is within ``exp`` of this of the prediction, either way, nine times out of ten; 0: not known."""
        key = finest(self.constants, own)
        spread = self.constants[key].spread_90 if key else 0.0
        near = self.deviations(own) if spread else None
        return spread * (float(near.scales(np.array([values]))[0]) if near is not None else FAR)

    def deviations(self, own: Sequence[str]) -> Deviations | None:
        """What samples like a kernel of these levels deviated from the fit; None where there are too few."""
        level = self._level.get(own[0])
        if level is None:
            level = self._level[own[0]] = self._level_of(own)
        if level not in self._found:
            self._found[level] = self._deviations(self._samples.get(level, ()))
        return self._found[level]

    def _level_of(self, own: Sequence[str]) -> str:
        """The coarsest level that is not too large, or the finest of those that are."""
        last = own[-1]
        for level in reversed(own):
            count = len(self._samples.get(level, ()))
            if count < LEAST:
                break
            last = level
            if count <= MOST:
                break
        return last

    def _deviations(self, samples: Sequence[Sample]) -> Deviations | None:
        if len(samples) < LEAST or "all" not in self.constants:
            return None
        ordered = sorted(samples, key=lambda s: (s.label, s.kind, s.ns, s.features))
        if len(ordered) > MOST:
            ordered = [ordered[i * len(ordered) // MOST] for i in range(MOST)]
        fitted = [
            sum(predicted_ns(self.constants, levels(s.label, s.kind), s.features, self._names).values())
            for s in ordered
        ]
        return Deviations(
            np.array([s.features for s in ordered], dtype=np.float64),
            np.log(np.array([s.ns for s in ordered]) / np.array(fitted)),
            np.array([s.noise for s in ordered]),
        )
