"""Cache reports for people and machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from layoutopt.show import out, table
from simulator.simulate import CacheReport, Counts

__all__ = ["as_json", "print_report"]


def as_json(report: CacheReport) -> dict[str, Any]:
    """Everything in the report as plain containers."""
    return asdict(report)


def print_report(report: CacheReport, top: int) -> None:
    """Tables per phase, per tensor and per step, those with most misses in the last level first."""
    note = " (modelled from public facts, not measured)" if report.modelled else ""
    out(f"caches of {report.device}{note}: {', '.join(report.levels)}; {report.walked:.1%} of the accesses walked")
    head = ["", "accesses", "lines", "bytes asked"]
    head += [f"{name} {what}" for name in report.levels for what in ("hit %", "misses")]
    head += ["memory read MiB", "written MiB"]
    phases = [["step", *_cells(report.total)]] + [[name, *_cells(c)] for name, c in report.by_phase.items()]
    table(head, phases)
    for title, group in (("tensor", report.by_tensor), ("op", report.by_step)):
        ranked = sorted(group.items(), key=lambda item: -item[1].misses[-1])[:top]
        table([f"{title} (most {report.levels[-1]} misses)", *head[1:]], [[name, *_cells(c)] for name, c in ranked])


def _cells(c: Counts) -> list[str]:
    cells = [f"{c.accesses:.4g}", f"{c.lines:.4g}", f"{c.bytes_asked:.4g}"]
    for rate, misses in zip(c.hit_rates, c.misses, strict=True):
        cells += [f"{100 * rate:.2f}", f"{misses:.4g}"]
    return [*cells, f"{c.memory_read_bytes / 2**20:.2f}", f"{c.memory_written_bytes / 2**20:.2f}"]
