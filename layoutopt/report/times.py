"""Where a step's predicted time goes: by phase, kind, block and operation, and where the numbers come from.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, ms, percent, ranked
from layoutopt.report.steps import SOURCES, Step, summed

__all__ = ["times_section"]

_BARS = 16
_ROWS = 200


def times_section(steps: Sequence[Step], top: int) -> Section:
    """The section.

    Args:
        steps: of the plan.
        top: rows of the table of operations that stand open.
    """
    whole = sum(step.cost_ns for step in steps)
    by_source = {name: sum(s.cost_ns for s in steps if s.source == name) for name in SOURCES}
    shares = ", ".join(f"{percent(ns, whole)}% {name}" for name, ns in by_source.items() if ns)
    said = (
        f"Kernels and relayouts, one after the other, are predicted to take {ms(whole * 1e-9)} ms: the solver's "
        f"objective. Of that, {shares}. Measured means that this kernel was timed on the device when it was "
        "calibrated; fitted, that constants were fitted to kernels that were; modelled, a roofline of public facts."
    )
    drawn = [
        _chart(steps, whole, "phase", "Time by phase"),
        _chart(steps, whole, "kind", "Time by kind of operation"),
        _chart(steps, whole, "block", "Time by block"),
    ]
    return Section(
        "time",
        "Where time goes",
        (said,),
        tuple(drawn),
        (_table(steps, whole, top, f"The {top} operations that take longest"),),
        (_table(steps, whole, _ROWS, f"The {_ROWS} operations that take longest"),) if len(steps) > top else (),
    )


def _chart(steps: Sequence[Step], whole: int, key: str, title: str) -> Chart:
    groups = summed(steps, key)
    counts = {name: sum(getattr(s, key) == name for s in steps) for name in groups}
    largest = ranked(groups, lambda name: sum(groups[name].values()), len(groups))
    shown = largest[:_BARS]
    used = [name for name in SOURCES if any(groups[g][name] for g in groups)]
    series = {name: [groups[g][name] * 1e-6 for g in shown] for name in used}
    rows = [
        (
            name,
            str(counts[name]),
            ms(sum(groups[name].values()) * 1e-9),
            percent(sum(groups[name].values()), whole),
            *(ms(groups[name][source] * 1e-9) for source in used),
        )
        for name in largest
    ]
    first = largest[0] if largest else "nothing"
    said = (
        f"{len(groups)} bars of milliseconds. Most goes to {first}, "
        f"{percent(sum(groups[first].values()), whole) if largest else '0'}% of the step."
    )
    table = Table(title, (key, "steps", "ms", "% of step", *(f"{name} ms" for name in used)), tuple(rows))
    return Chart(title, said, charts.bars(f"time-{key}", title, said, shown, series, "predicted ms"), table)


def _table(steps: Sequence[Step], whole: int, most: int, caption: str) -> Table:
    rows = [
        (s.label, ms(s.cost_ns * 1e-9), percent(s.cost_ns, whole), s.source, s.phase, s.block, s.variant, s.spec)
        for s in ranked(steps, lambda s: s.cost_ns, most)
    ]
    head = ("operation", "ms", "% of step", "cost is", "phase", "block", "kernel", "shapes")
    return Table(caption, head, tuple(rows))
