"""Where cache misses go, by the simulator: phases, tensors, operations.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, mib, millions, percent, ranked

if TYPE_CHECKING:
    from simulator.counts import Counts
    from simulator.simulate import CacheReport

__all__ = ["misses_section", "no_misses_section"]

_BARS = 12


def misses_section(report: CacheReport, top: int) -> Section:
    """The section.

    Args:
        report: of a step of the plan.
        top: rows of a table.
    """
    total, levels = report.total, report.levels
    last = levels[-1]
    known = "modelled from public facts" if report.modelled else "as calibrated"
    said = (
        f"Simulated, not counted by hardware: the caches of {report.device} are {known}. "
        f"{100 * report.walked:.1f}% of the accesses were walked, the rest is extrapolated. A step has "
        f"{millions(total.lines)} million line accesses, of which {millions(total.misses[-1])} million miss {last}; "
        f"{mib(total.memory_read_bytes)} MiB are read from memory and {mib(total.memory_written_bytes)} MiB written."
    )
    drawn = [
        _chart(report, report.by_tensor, "tensor", f"{last} misses by tensor", top),
        _chart(report, report.by_step, "operation", f"{last} misses by operation", top),
    ]
    phases = _table(report, report.by_phase, f"Accesses and misses by phase, {report.device}", "phase", len(levels) + 9)
    return Section("misses", "Where cache misses go", (said,), tuple(drawn), (phases, _sources(report, top)))


def no_misses_section(reason: str) -> Section:
    """What stands there where nothing was simulated."""
    return Section("misses", "Where cache misses go", (f"Nothing was simulated: {reason}.",))


def _chart(report: CacheReport, counts: Mapping[str, Counts], what: str, title: str, top: int) -> Chart:
    shown = ranked((name for name in counts if counts[name].misses[-1]), lambda n: counts[n].misses[-1], _BARS)
    whole = report.total.misses[-1]
    scale, word = (1e6, "million") if whole >= 1e7 else (1e3, "thousand")
    part = sum(counts[name].misses[-1] for name in shown)
    said = f"The {len(shown)} with most {report.levels[-1]} misses have {percent(part, whole)}% of all."
    drawing = charts.bars(
        f"misses-{what}",
        title,
        said,
        shown,
        {"misses": [counts[name].misses[-1] / scale for name in shown]},
        f"{word} {report.levels[-1]} misses",
    )
    return Chart(title, said, drawing, _table(report, counts, title, what, top))


def _table(report: CacheReport, counts: Mapping[str, Counts], caption: str, what: str, most: int) -> Table:
    head = [what, "lines M"]
    head += [f"{level} misses M" for level in report.levels]
    head += ["memory read MiB", "written MiB", "% of misses"]
    whole = report.total.misses[-1]
    names = list(counts) if what == "phase" else ranked(counts, lambda name: counts[name].misses[-1], most)
    rows = []
    for name in names:
        own = counts[name]
        cells = (millions(own.lines), *map(millions, own.misses))
        cells += (mib(own.memory_read_bytes), mib(own.memory_written_bytes), percent(own.misses[-1], whole))
        rows.append((name, *cells))
    return Table(caption, tuple(head), tuple(rows))


def _sources(report: CacheReport, top: int) -> Table:
    from simulator.report import sources

    rows = []
    for one in sources(report)[:top]:
        times = f"{one.times} × " if one.times > 1 else ""
        access = "writes" if one.write else "reads"
        counts = (millions(one.misses[-1]), f"{100 * one.share:.1f}", mib(one.memory_bytes))
        rows.append((f"{times}{one.step}", *counts, f"{access} {one.tensor}", one.layout, one.phase))
    head = ("operation", f"{report.levels[-1]} misses M", "% of misses", "memory MiB", "operand", "layout as seen")
    caption = "Where the misses come from: operands of operations, equal steps as one"
    return Table(caption, (*head, "phase"), tuple(rows))
