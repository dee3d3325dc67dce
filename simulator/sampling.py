"""Sampling: a launch by stretches of its work groups, equal steps by a few of them, each with the error that it leaves.

**Within a launch.** Its first groups are walked and count as they are: they find the caches as the step left them. The
rest is cut into equal strata; of each, one stretch at a random place is walked and counts for all of it, after a run-up
that is walked and not counted. Groups that are skipped leave their lines in the caches by ``simulator/warming.py``. One
stretch a stratum gives no variance of its own, so that of the strata's totals is estimated from differences of
neighbours (von Neumann 1941; Wolter, Introduction to Variance Estimation, ch. 8): a trend along the launch, which the
strata follow, hardly counts as noise.

**Equal steps.** Steps that run the same kernel after the same kernel, as the layers of a transformer do, are a class. A
few members, spread over it, are simulated, the others take their mean: two-stage sampling (Cochran, Sampling
Techniques, ch. 10), of which both stages' variances are added. The members of all classes are of the same few blocks,
so the first variance is one between blocks. Few blocks tell little of it, which Student's t allows for.

**Bytes written** to memory were stored long before, by other groups and steps. So what is extrapolated is what a sample
dirtied (``simulator/dirty.py``); that, less what is left in the caches, is what was written.

The error says how far another sample could be off, not what all samples have in common: what the run-up and the warming
get wrong (benchmarks/cache_sampling.py measures both).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from layoutopt.errors import LayoutOptError
from simulator.counts import Estimate, Variance

__all__ = [
    "EXACT",
    "Sampling",
    "Stretch",
    "chosen_members",
    "extrapolated",
    "guessed_member",
    "planned_stretches",
    "spread_classes",
]

STRETCHES = 5
"""Stretches of a launch: fewer tell little of the variance, more are each too short to leave their run-up behind."""
RUN_UP = 0.5
"""Length of the run-up over that of the stretch."""


@dataclass(frozen=True)
class Sampling:
    """How much is walked.

    Attributes:
        max_accesses: of a launch, beyond which its work groups are sampled.
        repeats: members that are simulated of a class of equal steps; 0 for all.
        seed: of the places of stretches, and of made-up integer inputs.
    """

    max_accesses: float = 2_000_000
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_accesses < 1 or self.repeats < 0 or self.repeats == 1:
            raise LayoutOptError(
                f"sampling of {self.max_accesses} accesses a launch and {self.repeats} equal steps: expected at least "
                "1 access, and 0 (all) or at least 2 steps, whose differences tell the error"
            )


EXACT = Sampling(float("inf"), 0)
"""Everything is walked."""


@dataclass(frozen=True)
class Stretch:
    """Work groups ``first`` to ``last`` (excluded), walked after a run-up from ``run_up``, counted ``scale`` times."""

    run_up: int
    first: int
    last: int
    scale: float


def planned_stretches(groups: int, budget: float, unit: int, lot: np.random.Generator) -> list[Stretch]:
    """The head, then a stretch per stratum; one stretch of all groups where that is hardly more than the budget.

    Args:
        groups: of the launch.
        budget: groups that may be walked.
        unit: groups that belong together (one a core); stretches are multiples where the budget allows it.
        lot: places the stretches.
    """
    per_stretch = 1 + RUN_UP
    length = int(budget / (1 + STRETCHES * per_stretch))
    length = length // unit * unit if length >= unit else max(length, 1)
    run_up = max(int(length * RUN_UP), 1)
    count = STRETCHES if groups > 4 * STRETCHES else 3
    if length + count * (length + run_up) >= 0.8 * groups or groups - length < 2 * count:
        return [Stretch(0, 0, groups, 1.0)]
    out = [Stretch(0, 0, length, 1.0)]
    edges = np.linspace(length, groups, count + 1).round().astype(int)
    for begin, end in pairwise(edges):
        own = min(length, end - begin)
        first = int(begin + lot.integers(0, end - begin - own + 1))
        out.append(Stretch(max(first - run_up, out[-1].last), first, first + own, (end - begin) / own))
    return out


def extrapolated(head: np.ndarray, stretches: Sequence[np.ndarray], scales: Sequence[float], walked: float) -> Estimate:
    """The launch's counters from those of its head and of its stretches.

    Args:
        head: [operands, columns], counted as it is.
        stretches: [operands, columns] each.
        scales: how often each stretch fits into its stratum.
        walked: share of the launch.
    """
    totals = np.array([scale * counts for scale, counts in zip(scales, stretches, strict=True)])  # [strata, …]
    left = float(1.0 - 1.0 / np.mean(scales))  # of a stratum that was walked whole nothing is uncertain
    return Estimate(head + totals.sum(0), _successive(totals, left), _successive(totals.sum(1), left), walked)


def _successive(totals: np.ndarray, left: float) -> Variance:
    """Variance of the sum of strata, from differences of neighbours; two thirds of the freedom of as many samples."""
    differences = totals.shape[0] - 1
    value = totals.shape[0] * (np.diff(totals, axis=0) ** 2).sum(0) / (2 * differences)
    return Variance.of(value * left, 2 * differences / 3)


def chosen_members(keys: Sequence[Hashable], repeats: int, seed: int) -> list[bool]:
    """Which steps are simulated: of each class of equal keys at most ``repeats``, one of each equal part of it.

    The place in the part is drawn once for all classes, so that of a repeated block whole copies are simulated, one
    step after the other.
    """
    if not repeats:
        return [True] * len(keys)
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    place = np.random.default_rng([seed, 0xC1A55]).random(repeats)
    out = [False] * len(keys)
    for own in members.values():
        if len(own) <= repeats:
            picked = range(len(own))
        else:
            picked = (int((i + u) * len(own) / repeats) for i, u in enumerate(place))  # type: ignore[assignment]
        for number in picked:
            out[own[number]] = True
    return out


def guessed_member(simulated: Sequence[Estimate]) -> Estimate:
    """What a member of a class that was not simulated is taken for: the mean of those that were, two or more."""
    count = len(simulated)
    counts = np.array([e.counts for e in simulated])
    between, apart = (Variance.of(own.var(0, ddof=1), count - 1) for own in (counts, counts.sum(1)))
    within = _sum([e.variance for e in simulated]), _sum([e.total_variance for e in simulated])
    own, total = (b.scaled(1 + 1 / count) + w.scaled(1 / count) for b, w in zip((between, apart), within, strict=True))
    return Estimate(counts.mean(0), own, total, 0.0)


def spread_classes(classes: Iterable[tuple[Sequence[Estimate], int]], columns: int) -> Variance:
    """The variance of the total of several classes [columns].

    The n-th simulated members of all classes are neighbours: copies of one block, which may be alike or unlike as
    wholes. Compared as wholes they are few, though. So the variance between copies is taken, or that of classes as if
    they were drawn apart, whichever gives the wider interval.

    Args:
        classes: of each the simulated members, in order, and how many it has.
        columns: of a row.
    """
    within = between = Variance.none((columns,))
    copies: dict[int, np.ndarray] = {}
    for simulated, members in classes:
        count = len(simulated)
        within += _sum([e.total_variance for e in simulated]).scaled(members / count)
        if count < members:
            weight = members * (1 - count / members) ** 0.5
            totals = weight * np.array([e.total for e in simulated])
            between += _of_mean(totals)
            copies[count] = copies[count] + totals if count in copies else totals
    whole = sum((_of_mean(totals) for totals in copies.values()), Variance.none((columns,)))
    return within + whole.or_wider(between)


def _of_mean(totals: np.ndarray) -> Variance:
    """Of the mean of samples [samples, columns]."""
    count = totals.shape[0]
    return Variance.of(totals.var(0, ddof=1) / count, count - 1)


def _sum(variances: Sequence[Variance]) -> Variance:
    """Of a sum of independent parts."""
    return Variance(np.sum([v.value for v in variances], axis=0), np.sum([v.doubt for v in variances], axis=0))
