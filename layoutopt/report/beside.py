"""Strategies side by side: the plan of a report and those of other strategies for the same graph and device.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.compare import Row
from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, mib, millions, ms

__all__ = ["strategies_section"]


def strategies_section(rows: Sequence[Row], own: str, device: str) -> Section:
    """The section.

    Args:
        rows: a strategy each.
        own: the strategy of the report's plan.
        device: that was measured on; "" where nothing was.
    """
    measured = [row for row in rows if row.measured_s is not None]
    best = min(rows, key=lambda row: row.predicted_s)
    said = f"Predicted to be fastest: {best.strategy}, {ms(best.predicted_s)} ms a step."
    if measured:
        fastest = min(measured, key=lambda row: row.measured_s or 0.0)
        said += (
            f" Measured on {device}: {fastest.strategy} is fastest, {ms(fastest.measured_s or 0.0)} ms, medians of "
            f"{fastest.rounds} whole steps, one of each plan in turn; ± is half the distance between the quartiles."
        )
    else:
        said += " Nothing was measured for this table."
    if any(row.gap for row in rows):
        said += (
            " “Over ilp” compares what the solver adds up: kernels one after the other, with caution for those that "
            "were not measured. Predicted is the whole step, as it most likely runs."
        )
    if len(rows) == 1:
        said += " Other strategies are shown where they are asked for (--strategies)."
    names = [f"{row.strategy}{' (this plan)' if row.strategy == own else ''}" for row in rows]
    series = {"predicted": [row.predicted_s * 1e3 for row in rows]}
    spread = None
    if len(measured) == len(rows):
        series["measured"] = [(row.measured_s or 0.0) * 1e3 for row in rows]
        spread = [(row.spread_s or 0.0) * 1e3 for row in rows]
    title = "A step by strategy"
    seen = f"Bars of {' and '.join(series)} milliseconds, a strategy each."
    drawing = charts.bars("strategies", title, seen, names, series, "ms a step", spread, stacked=len(series) == 1)
    table = _table(rows, names)
    return Section(
        "strategies", "Strategies side by side", (said, *_not_run(rows)), (Chart(title, seen, drawing),), (table,)
    )


def _not_run(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(
        f"{row.strategy}: {row.not_run} more copies, predicted {ms(row.not_run_s)} ms, are in “over ilp” but not in "
        "the plan: no kernel here makes them."
        for row in rows
        if row.not_run
    )


def _table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    levels = list(next((row.misses for row in rows if row.misses), {}))
    timed = any(row.measured_s is not None for row in rows)
    head = ["strategy", "status", "over ilp", "predicted ms"]
    head += ["measured ms", "±"] * timed
    head += ["relayouts", "moved MiB", "arena MiB"]
    head += [f"{level} misses M" for level in levels] + ["memory MiB"] * bool(levels)
    body = []
    for row, name in zip(rows, names, strict=True):
        cells = [name, row.status, f"{row.gap:+.1%}" if row.gap is not None else "-", ms(row.predicted_s)]
        if timed:
            cells += [ms(s) if s is not None else "-" for s in (row.measured_s, row.spread_s)]
        cells += [str(row.relayouts), mib(row.relayout_bytes), mib(row.arena_bytes)]
        if levels:
            cells += [millions(row.misses[level]) if row.misses else "-" for level in levels]
            cells += [mib(row.memory_bytes) if row.memory_bytes is not None else "-"]
        body.append(tuple(cells))
    return Table("Strategies; times in ms a step", tuple(head), tuple(body))
