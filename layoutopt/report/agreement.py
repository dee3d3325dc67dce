"""Prediction against measurement: the whole step, and its kernels one by one.

What was measured comes from ``layoutopt profile``, now or in a file. A kernel's time is that of its launches by device
events; what is predicted beside it is what is most likely, without the caution that a plan's costs hold and without the
gap of a launch. Steps that run the same kernel are one.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from layoutopt.errors import LayoutOptError
from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, ms, ranked
from layoutopt.report.steps import SOURCES, Step

if TYPE_CHECKING:
    from layoutopt.profiling import Profile

__all__ = [
    "Measured",
    "agreement_section",
    "measured_of",
    "measured_times",
    "pairs_of",
    "read_profile",
    "unmeasured_section",
]


class Timed(msgspec.Struct, frozen=True):
    """A launch that was timed."""

    label: str
    time_s: float


class Measured(msgspec.Struct, frozen=True):
    """What a report needs of a profile: the JSON of ``layoutopt profile`` holds it and more."""

    device: str
    step_s: float
    kernels_s: float
    gap_s: float
    predicted_s: float
    steps_s: tuple[float, ...]
    launches: tuple[Timed, ...]


@dataclass(frozen=True)
class Pair:
    """A kernel, predicted and measured.

    Attributes:
        name: of the first step that runs it.
        times: steps that do.
        source: of its cost.
        predicted_s: of one step.
        measured_s: median over the steps.
        spec: kind and shapes.
    """

    name: str
    times: int
    source: str
    predicted_s: float
    measured_s: float
    spec: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


def read_profile(path: Path) -> Measured:
    """What ``layoutopt profile --json`` printed.

    Raises:
        LayoutOptError: there is no such file, or it is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise LayoutOptError(
            f"no profile at {path} ({error.strerror}): write one with `layoutopt profile --json`"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutOptError(f"{path} is no profile ({error}): write one with `layoutopt profile --json`") from error


def measured_of(found: Profile) -> Measured:
    """The same of a profile that was made now."""
    launches = tuple(Timed(launch.label, launch.time_s) for launch in found.launches)
    steps = tuple(found.steps_s)
    return Measured(found.device, found.step_s, found.kernels_s, found.gap_s, found.predicted_s, steps, launches)


def measured_times(found: Measured, labels: Set[str]) -> dict[str, float]:
    """Seconds by step.

    Args:
        found: a profile.
        labels: of the plan's steps.

    Raises:
        LayoutOptError: the profile is of another plan.
    """
    times: dict[str, float] = {}
    for launch in found.launches:
        times[launch.label] = times.get(launch.label, 0.0) + launch.time_s
    if set(times) != labels:
        stray = min(set(times) ^ labels)
        raise LayoutOptError(
            f"the profile is not of this plan: step {stray!r} is in one of them only; profile this plan"
        )
    return times


def pairs_of(steps: Sequence[Step], found: Measured) -> list[Pair]:
    """Kernels that were both predicted and measured.

    Raises:
        LayoutOptError: the profile is of another plan.
    """
    times = measured_times(found, {step.label for step in steps})
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.kernel, []).append(step)
    return [
        Pair(
            own[0].label,
            len(own),
            own[0].source,
            own[0].likely_ns * 1e-9,
            median(times[step.label] for step in own),
            own[0].spec,
        )
        for own in groups.values()
    ]


def unmeasured_section() -> Section:
    """What stands there where nothing was measured."""
    said = (
        "Nothing was measured for this report. Run it with --measure on the plan's device, or give the output of "
        "layoutopt profile --json with --profile."
    )
    return Section("agreement", "Prediction against measurement", (said,))


def agreement_section(steps: Sequence[Step], found: Measured, top: int) -> Section:
    """The section.

    Args:
        steps: of the plan.
        found: its profile.
        top: rows of the table.
    """
    from scipy.stats import kendalltau

    pairs = [p for p in pairs_of(steps, found) if p.predicted_s > 0 and p.measured_s > 0]
    errors = [abs(p.predicted_s / p.measured_s - 1) for p in pairs]
    tau = float(kendalltau([p.predicted_s for p in pairs], [p.measured_s for p in pairs]).statistic) if pairs else 0.0
    said = (
        f"On {found.device} a whole step took {ms(found.step_s)} ms (median of {len(found.steps_s)}) and was predicted "
        f"to take {ms(found.predicted_s)} ms: {found.predicted_s / found.step_s - 1:+.1%}. Its kernels alone took "
        f"{ms(found.kernels_s)} ms; launches and the host account for {ms(found.gap_s)} ms."
    )
    if pairs:
        said += (
            f" Of {len(pairs)} different kernels the prediction is off by {median(errors):.0%} in the median; "
            f"Kendall's tau is {tau:.2f}."
        )
    groups = {
        name: [(p.predicted_s * 1e6, p.measured_s * 1e6) for p in pairs if p.source == name]
        for name in SOURCES
        if any(p.source == name for p in pairs)
    }
    title = "Kernels, predicted and measured"
    seen = f"{len(pairs)} points on logarithmic axes; above the dashed line a kernel takes longer than predicted."
    drawing = charts.scatter("agreement", title, seen, groups, "predicted µs", "measured µs")
    rows = tuple(
        (
            p.name,
            f"{p.predicted_s * 1e6:,.1f}",
            f"{p.measured_s * 1e6:,.1f}",
            f"{p.ratio:.2f}",
            str(p.times),
            p.source,
            p.spec,
        )
        for p in ranked(pairs, lambda p: abs(p.measured_s - p.predicted_s) * p.times, top)
    )
    head = ("first step", "predicted µs", "measured µs", "measured / predicted", "steps", "cost is", "shapes")
    caption = "Kernels whose prediction is off by most of the step's time"
    return Section(
        "agreement",
        "Prediction against measurement",
        (said,),
        (Chart(title, seen, drawing),) if pairs else (),
        (Table(caption, head, rows),),
    )
