"""Cache reports for people and machines: a plan's, and several plans' side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from costmodel.device import DeviceModel
from layoutopt.show import out, table
from simulator.counts import Counts
from simulator.reuse import bounds
from simulator.reuse_step import StepReuse
from simulator.simulate import CacheReport, OperandCounts

__all__ = [
    "Source",
    "as_json",
    "cache_lines",
    "print_report",
    "print_reuse",
    "print_strategies",
    "ratios",
    "sources",
    "strategies_json",
]


@dataclass(frozen=True)
class Source:
    """Where misses come from: one operand of one op, summed over the steps that run the same kernel.

    Attributes:
        step: the first of the steps.
        times: how many they are.
        kind: of the op.
        phase: of the op.
        position: of the operand.
        tensor: that the first of the steps has there.
        layout: as the op sees it.
        write: whether it is an output.
        lines: line accesses.
        misses: per level.
        memory_bytes: traffic to and from memory.
        share: of the step's misses in the last level.
    """

    step: str
    times: int
    kind: str
    phase: str
    position: int
    tensor: str
    layout: str
    write: bool
    lines: float
    misses: tuple[float, ...]
    memory_bytes: float
    share: float


def sources(report: CacheReport) -> list[Source]:
    """Every operand that has misses in the last level, the one with most first; repeated blocks are one."""
    alike: dict[tuple[int, int, str, str], list[OperandCounts]] = {}
    for one in report.operands:
        alike.setdefault((one.alike, one.position, one.layout, one.phase), []).append(one)
    whole = report.total.misses[-1] or 1.0
    found = []
    for own in alike.values():
        first, counts = own[0], [one.counts for one in own]
        misses = tuple(sum(c.misses[i] for c in counts) for i in range(len(report.levels)))
        lines, memory = sum(c.lines for c in counts), sum(c.memory_bytes for c in counts)
        facts = first.kind, first.phase, first.position, first.tensor, first.layout, first.write
        found.append(Source(first.step, len(own), *facts, lines, misses, memory, misses[-1] / whole))
    return sorted((one for one in found if one.misses[-1]), key=lambda one: -one.misses[-1])


def as_json(report: CacheReport) -> dict[str, Any]:
    """Everything in the report as plain containers, and where its misses come from."""
    return {**asdict(report), "sources": [asdict(one) for one in sources(report)]}


def print_report(report: CacheReport, top: int) -> None:
    """Tables per phase, per tensor and per step, those with most misses in the last level first; their sources."""
    note = " (modelled from public facts, not measured)" if report.modelled else ""
    out(f"caches of {report.device}{note}: {', '.join(report.levels)}; {report.walked:.1%} of the accesses walked")
    head = ["accesses", "lines", "bytes asked"]
    head += [f"{name} {what}" for name in report.levels for what in ("hit %", "misses")]
    head += ["memory read MiB", "written MiB"]
    phases = [["step", *_cells(report.total)]] + [[name, *_cells(c)] for name, c in report.by_phase.items()]
    table(["", *head], phases)
    _print_error(report)
    _print_beyond(report, top)
    for title, group in (("tensor", report.by_tensor), ("op", report.by_step)):
        ranked = sorted(group.items(), key=lambda item: -item[1].misses[-1])[:top]
        table([f"{title} (most {report.levels[-1]} misses)", *head], [[name, *_cells(c)] for name, c in ranked])
    _print_sources(report, top)


def _print_beyond(report: CacheReport, top: int) -> None:
    """What is behind the misses, of the step, its phases and the ops with most traffic to memory: whether a level lacks
    the line or a sector of it, what is written back to it, how often memory finds a row open.
    """
    total = report.total
    sectored = [i for i, own in enumerate(total.line_misses) if own != total.misses[i]]
    returned = [i for i, own in enumerate(total.write_backs) if own]
    rows_known = bool(total.row_hits + total.row_misses)
    head = [f"{report.levels[i]} line misses" for i in sectored] + [f"{report.levels[i]} write-backs" for i in returned]
    head += ["memory accesses", "open row %"] * rows_known
    if not head:
        return
    ranked = sorted(report.by_step.items(), key=lambda item: -item[1].memory_bytes)[:top]
    rows = []
    for name, own in (("step", total), *report.by_phase.items(), *ranked):
        cells = [f"{own.line_misses[i]:.4g}" for i in sectored] + [f"{own.write_backs[i]:.4g}" for i in returned]
        asked = own.row_hits + own.row_misses
        cells += [f"{asked:.4g}", f"{100 * own.row_hits / asked:.1f}" if asked else "-"] * rows_known
        rows.append([name, *cells])
    table(["behind the misses (ops: most memory traffic)", *head], rows)


def _print_error(report: CacheReport) -> None:
    """The 95% intervals that sampling leaves, in a sentence; nothing where all was walked."""
    total = report.total
    if report.walked == 1.0 and not any(total.misses_95):
        return
    names = [f"{name} misses" for name in report.levels] + ["bytes read", "bytes written"]
    values = (*total.misses, total.memory_read_bytes, total.memory_written_bytes)
    halves = (*total.misses_95, total.memory_read_95, total.memory_written_95)
    parts = [
        f"{name} {value:.4g} ± {half / value:.2%}"
        for name, value, half in zip(names, values, halves, strict=True)
        if value
    ]
    out(
        f"sampled: {report.steps_walked} of {len(report.by_step)} steps simulated; 95% intervals of the step's totals: "
        + ", ".join(parts)
    )


def _print_sources(report: CacheReport, top: int) -> None:
    rows = []
    for one in sources(report)[:top]:
        times = f"{one.times} × " if one.times > 1 else ""
        role = "writes" if one.write else "reads"
        name = f"{times}{one.step} ({one.kind}, {one.phase}) {role} [{one.position}] {one.tensor}: {one.layout}"
        cells = [f"{n:.4g}" for n in one.misses]
        rows.append([name, f"{one.lines:.4g}", *cells, f"{one.memory_bytes / 2**20:.2f}", f"{100 * one.share:.1f}"])
    head = [f"op, operand, layout (most {report.levels[-1]} misses)", "lines"]
    head += [f"{name} misses" for name in report.levels]
    table([*head, "memory MiB", "% of misses"], rows)


def cache_lines(model: DeviceModel) -> dict[str, int]:
    """Capacity of each cache in lines of the nearest one."""
    line = model.caches[0].line_bytes
    return {cache.name: cache.size_bytes // line for cache in model.caches if cache.size_bytes}


def print_reuse(found: StepReuse, model: DeviceModel, top: int) -> None:
    """Reuse distances of the step, and of the tensors that would miss the largest cache most."""
    whole = max(found.total.accesses, 1)
    out(
        f"reuse distances in lines of {found.total.line_bytes} bytes; {found.walked:.1%} of the accesses walked; "
        f"{100 * found.total.first_touches / whole:.2f}% are first touches"
    )
    rows = []
    for bucket, count in enumerate(found.total.counts):
        low, high = bounds(bucket)
        rows.append(
            [f"{low}" if high == low + 1 else f"{low}-{high - 1}", f"{count:.4g}", f"{100 * count / whole:.2f}"]
        )
    table(["distance", "accesses", "%"], rows)
    capacities = cache_lines(model)
    worst = max(capacities.values(), default=1)
    named = sorted(found.by_tensor.items(), key=lambda item: -item[1].misses(worst))[:top]
    cells = [
        [
            name,
            f"{own.accesses:.4g}",
            f"{own.first_touches:.4g}",
            *(f"{own.misses(n):.4g}" for n in capacities.values()),
        ]
        for name, own in (("step", found.total), *named)
    ]
    table(["misses of fully associative caches", "lines", "first", *(f"like {name}" for name in capacities)], cells)


def _cells(c: Counts) -> list[str]:
    cells = [f"{c.accesses:.4g}", f"{c.lines:.4g}", f"{c.bytes_asked:.4g}"]
    for rate, misses in zip(c.hit_rates, c.misses, strict=True):
        cells += [f"{100 * rate:.2f}", f"{misses:.4g}"]
    return [*cells, f"{c.memory_read_bytes / 2**20:.2f}", f"{c.memory_written_bytes / 2**20:.2f}"]


def ratios(report: CacheReport, first: CacheReport) -> dict[str, float | None]:
    """A report's totals over another's; None where the other has none or lacks the level."""

    def over(value: float, base: float) -> float | None:
        return value / base if base else None

    own, base = report.total, first.total
    known = dict(zip(first.levels, base.misses, strict=True))
    found = {"accesses": over(own.accesses, base.accesses), "lines": over(own.lines, base.lines)}
    for name, misses in zip(report.levels, own.misses, strict=True):
        found[f"{name} misses"] = over(misses, known.get(name, 0.0))
    found["memory bytes"] = over(own.memory_bytes, base.memory_bytes)
    return found


def print_strategies(reports: Mapping[str, CacheReport], predicted_s: Mapping[str, float]) -> None:
    """A row per plan: totals, and their ratios over the first plan's.

    Args:
        reports: by strategy or file.
        predicted_s: step times, by the same names.
    """
    first = next(iter(reports.values()))
    levels = list(dict.fromkeys(name for report in reports.values() for name in report.levels))
    note = " (modelled from public facts, not measured)" if first.modelled else ""
    out(f"caches of {first.device}{note}; in brackets: over {next(iter(reports))}")
    head = ["plan", "predicted ms", "accesses", "lines", *(f"{name} misses" for name in levels), "memory MiB", "± %"]
    rows = []
    for name, report in reports.items():
        own, total = ratios(report, first), report.total
        misses = dict(zip(report.levels, total.misses, strict=True))
        cells = [
            _with_ratio(total.accesses, own["accesses"]),
            _with_ratio(total.lines, own["lines"]),
            *(_with_ratio(misses[x], own[f"{x} misses"]) if x in misses else "-" for x in levels),
            _with_ratio(total.memory_bytes / 2**20, own["memory bytes"]),
        ]
        half = (total.memory_read_95**2 + total.memory_written_95**2) ** 0.5
        sure = f"{100 * half / total.memory_bytes:.1f}" if total.memory_bytes else "-"
        rows.append([name, f"{predicted_s[name] * 1e3:.3f}", *cells, sure])
    table(head, rows)


def _with_ratio(value: float, ratio: float | None) -> str:
    return f"{value:.4g}" + (f" ({ratio:.3f})" if ratio is not None else "")


def strategies_json(reports: Mapping[str, CacheReport], predicted_s: Mapping[str, float]) -> Sequence[dict[str, Any]]:
    """Everything of several plans, with ratios over the first."""
    first = next(iter(reports.values()))
    return [
        {"plan": name, "predicted_s": predicted_s[name], "over_first": ratios(report, first), **as_json(report)}
        for name, report in reports.items()
    ]
