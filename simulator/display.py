"""A cache report as tables for notebooks: what ``CacheReport._repr_html_`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.display import MOST
from layoutopt.display_parts import bytes_text, count_text, html, table
from simulator.counts import Counts

if TYPE_CHECKING:
    from simulator.simulate import CacheReport

__all__ = ["report_html"]


def report_html(report: CacheReport) -> str:
    """Hits and misses by level, of the step and its phases, and of the ops and tensors with most misses in the last."""
    note = ", modelled from public facts" if report.modelled else ""
    title = f"Caches of {report.device}{note}; plan: {report.strategy}; {report.walked:.0%} of the accesses walked"
    levels = [
        (name, count_text(hits), count_text(misses), f"{rate:.1%}")
        for name, hits, misses, rate in zip(
            report.levels, report.total.hits, report.total.misses, report.total.hit_rates, strict=True
        )
    ]
    head = ("line accesses", *(f"{name} misses" for name in report.levels), "memory")
    phases = {**report.by_phase, "step": report.total}
    ops = sorted(report.by_step.items(), key=lambda one: -one[1].misses[-1])[:MOST]
    tensors = sorted(report.by_tensor.items(), key=lambda one: -one[1].misses[-1])[:MOST]
    last = report.levels[-1]
    return html(
        table(title, ("level", "hits", "misses", "hit rate"), levels),
        table("By phase", ("phase", *head), [_row(name, counts) for name, counts in phases.items()]),
        table(f"Ops with most {last} misses", ("op", *head), [_row(name, counts) for name, counts in ops]),
        table(f"Tensors with most {last} misses", ("tensor", *head), [_row(name, counts) for name, counts in tensors]),
    )


def _row(name: str, counts: Counts) -> tuple[str, ...]:
    misses = (count_text(number) for number in counts.misses)
    return name, count_text(counts.lines), *misses, bytes_text(counts.memory_bytes)
