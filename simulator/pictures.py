"""Pictures of a cache report: what serves each op's accesses, which tensor misses when, how far reuse reaches, and how
a layout lies in cache lines.

Each function returns a matplotlib figure, for notebooks; ``write_pictures`` writes them all. matplotlib is imported
only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder, write_atomic
from layoutopt.layout import Layout
from simulator.reuse import Histogram, bounds
from simulator.simulate import CacheReport

__all__ = [
    "FORMATS",
    "check_pictures",
    "layout_drawing",
    "lines_of",
    "lines_touched",
    "op_bars",
    "reuse_bars",
    "rtile_beside_rowmajor",
    "tensor_map",
    "write_pictures",
]

FORMATS = ("png", "svg")
_LEVEL_COLOURS = ("#9ecae1", "#4292c6", "#08519c")
_MEMORY_COLOUR = "#d94801"


def check_pictures(folder: str | Path, kind: str) -> None:
    """See that pictures can be drawn and written, before the work that they show.

    Raises:
        LayoutOptError: matplotlib is not installed, the kind is unknown, or the folder cannot be made.
    """
    if kind not in FORMATS:
        raise LayoutOptError(f"unknown kind of picture {kind!r}: choose {' or '.join(FORMATS)}")
    check_folder(folder)
    _figure(1, 1)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutOptError("pictures need matplotlib: pip install 'layoutopt[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def op_bars(report: CacheReport, top: int = 20) -> Any:
    """Line accesses of the ops with most traffic to memory, by what serves them: each level, or memory.

    Steps that run the same kernel, as repeated blocks do, are one bar.

    Args:
        report: of a step.
        top: bars.
    """
    groups: dict[tuple[int, str], dict[str, list[Any]]] = {}
    for one in report.operands:
        groups.setdefault((one.alike, one.phase), {}).setdefault(one.step, []).append(one.counts)
    bars = []
    for (_, phase), steps in groups.items():
        counts = [c for own in steps.values() for c in own]
        parts = [sum(c.hits[level] for c in counts) for level in range(len(report.levels))]
        name = next(iter(steps)) if len(steps) == 1 else f"{len(steps)} × {next(iter(steps))}"
        bars.append((sum(c.misses[-1] for c in counts), f"{name} ({phase})", parts))
    bars = sorted(bars, key=lambda bar: -bar[0])[:top]
    figure = _figure(9, 1.2 + 0.3 * max(len(bars), 1))
    axes = figure.subplots()
    left = np.zeros(len(bars))
    names = [name for _, name, _ in bars]
    parts = [([bar[2][level] for bar in bars], f"{name} hits") for level, name in enumerate(report.levels)]
    colours = [*_LEVEL_COLOURS[-len(report.levels) :], _MEMORY_COLOUR]
    for (values, label), colour in zip([*parts, ([bar[0] for bar in bars], "memory")], colours, strict=True):
        axes.barh(names, values, left=left, label=label, color=colour)
        left = left + np.array(values)
    axes.invert_yaxis()
    axes.set_xlabel("line accesses in a step")
    axes.set_title(f"What serves each op's accesses, {report.device}, {report.strategy}")
    axes.legend()
    return figure


def tensor_map(report: CacheReport, top: int = 30) -> Any:
    """Misses in the last level by tensor and phase: the tensors with most of them.

    Args:
        report: of a step.
        top: tensors.
    """
    phases = list(report.by_phase)
    misses: dict[str, np.ndarray] = {}
    for one in report.operands:
        row = misses.setdefault(one.tensor, np.zeros(len(phases)))
        row[phases.index(one.phase)] += one.counts.misses[-1]
    names = sorted(misses, key=lambda name: -misses[name].sum())[:top]
    values = np.array([misses[name] for name in names]).reshape(len(names), len(phases))
    figure = _figure(7, 1.5 + 0.27 * max(len(names), 1))
    axes = figure.subplots()
    some = values[values > 0]
    low, high = (np.log10(some.min()), np.log10(some.max())) if some.size else (0.0, 1.0)
    with np.errstate(divide="ignore"):
        logs = np.ma.masked_invalid(np.log10(values))
    shown = axes.imshow(logs, aspect="auto", cmap="YlOrRd", vmin=low, vmax=max(high, low + 1))
    axes.set_xticks(range(len(phases)), phases)
    axes.set_yticks(range(len(names)), names)
    for (row, column), value in np.ndenumerate(values):
        if value:
            colour = "white" if np.log10(value) > low + 0.6 * max(high - low, 1) else "black"
            axes.text(column, row, f"{value:,.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_title(f"{report.levels[-1]} misses by tensor and phase, {report.device}, {report.strategy}")
    figure.colorbar(shown, label="log10 of the misses")
    return figure


def reuse_bars(histograms: Mapping[str, Histogram], cache_lines: Mapping[str, int] | None = None) -> Any:
    """Reuse distances: share of accesses by distance, first touches apart.

    Args:
        histograms: by name, one curve each.
        cache_lines: capacities to mark, by name of the level.
    """
    figure = _figure(9, 5)
    axes = figure.subplots()
    most = max((len(h.counts) for h in histograms.values()), default=0)
    width = 0.8 / max(len(histograms), 1)
    for number, (name, own) in enumerate(histograms.items()):
        counts = [*own.counts, *[0.0] * (most - len(own.counts)), own.first_touches]
        at = np.arange(most + 1) + (number - (len(histograms) - 1) / 2) * width
        axes.bar(at, [100 * c / max(own.accesses, 1) for c in counts], width, label=name)
    labels = [
        str(low) if high - low == 1 else f"{_short(low)}–{_short(high - 1)}" for low, high in map(bounds, range(most))
    ]
    axes.set_xticks(range(most + 1), [*labels, "first"], rotation=60, ha="right")
    for name, lines in (cache_lines or {}).items():
        place = np.log2(max(lines, 1)) + 0.5
        axes.axvline(place, color="tab:grey", linestyle="--", linewidth=1)
        axes.annotate(f" {name}", (place, 1), xycoords=("data", "axes fraction"), va="top", color="tab:grey")
    axes.set_xlabel("distinct lines touched since the last touch")
    axes.set_ylabel("% of line accesses")
    axes.set_title("Reuse distances")
    if histograms:
        axes.legend()
    return figure


def _short(number: int) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if number + 1 >= size:
            return f"{number // size}{unit}" if number % size == 0 else f"{(number + 1) // size}{unit}"
    return str(number)


def lines_of(layout: Layout, line_bytes: int = 64, item_bytes: int = 4) -> np.ndarray:
    """The cache line that each element lies in, by logical position.

    Args:
        layout: of any shape; an image's texels lie row by row.
        line_bytes: of a line.
        item_bytes: of an element.

    Returns:
        Numbers of lines from the start of the allocation [*shape].
    """
    where = layout.offsets()
    if layout.is_image:
        _, columns, lanes = layout.size
        where = where @ np.array((columns * lanes, lanes, 1))
    return where * item_bytes // line_bytes


def layout_drawing(layouts: Mapping[str, Layout], *, wave: int = 16, line_bytes: int = 64, item_bytes: int = 4) -> Any:
    """Matrices in their logical positions, coloured by cache line; framed is what one load of a wave touches.

    Left, the wave's lanes read neighbours in a row, as the forward pass does of a weight; right, in a column, as the
    backward pass does. The lines that they touch are full in colour, the others pale.

    Args:
        layouts: of matrices, by name: a row of pictures each.
        wave: lanes.
        line_bytes: of a cache line.
        item_bytes: of an element.

    Raises:
        LayoutOptError: a layout is of no matrix.
    """
    for name, layout in layouts.items():
        if layout.rank != 2:
            raise LayoutOptError(f"{name} is a layout of {layout.shape}: only matrices can be drawn")
    figure = _figure(9, 0.8 + 4.2 * max(len(layouts), 1))
    panels = figure.subplots(max(len(layouts), 1), 2, squeeze=False)
    for row, (name, layout) in enumerate(layouts.items()):
        lines = lines_of(layout, line_bytes, item_bytes)
        for panel, axis, what in ((panels[row, 0], 1, "forward"), (panels[row, 1], 0, "backward")):
            _draw_lines(panel, lines, axis, wave)
            touched = lines_touched(lines, axis, wave)
            panel.set_title(f"{name}, {what}: a wave touches {touched} {'line' if touched == 1 else 'lines'}")
    return figure


def lines_touched(lines: np.ndarray, axis: int, wave: int) -> int:
    """Distinct lines that a wave touches whose lanes read neighbours along an axis, from the middle of the other."""
    return int(np.unique(_of_wave(lines, axis, wave)).size)


def _of_wave(lines: np.ndarray, axis: int, wave: int) -> np.ndarray:
    middle = lines.shape[1 - axis] // 2
    return (lines[middle, :wave] if axis == 1 else lines[:wave, middle]).ravel()


def _draw_lines(axes: Any, lines: np.ndarray, axis: int, wave: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    palette = colormaps["tab20"]
    numbers = {line: n for n, line in enumerate(np.unique(lines))}
    touched = set(_of_wave(lines, axis, wave).tolist())
    colours = np.ones((*lines.shape, 4))
    for (i, j), line in np.ndenumerate(lines):
        # Neighbouring lines in well-told colours.
        colours[i, j] = palette((numbers[line] * 7 % 20) / 20 + 0.01)
        if line not in touched:
            colours[i, j, :3] = 1 - (1 - colours[i, j, :3]) * 0.25
    axes.imshow(colours)
    rows, columns = lines.shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    middle = lines.shape[1 - axis] // 2
    corner, size = ((-0.5, middle - 0.5), (min(wave, columns), 1))
    if axis == 0:
        corner, size = (middle - 0.5, -0.5), (1, min(wave, rows))
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=2.2, zorder=3))


def rtile_beside_rowmajor(line_bytes: int, wave: int, item_bytes: int = 4) -> dict[str, Layout]:
    """A small matrix in row-major and in R-Tile whose tiles are a line each, square where that can be."""
    elems = max(line_bytes // item_bytes, 1)
    rows = 1 << ((elems.bit_length() - 1) // 2)
    side = max(min(wave, 32), elems)
    shape = (side, side)
    return {
        "row-major": Layout.row_major(shape),
        f"R-Tile({rows}, {elems // rows})": Layout.r_tile(shape, rows, elems // rows),
    }


def write_pictures(
    folder: str | Path,
    report: CacheReport,
    *,
    kind: str = "png",
    histograms: Mapping[str, Histogram] | None = None,
    cache_lines: Mapping[str, int] | None = None,
    line_bytes: int = 64,
    wave: int = 16,
) -> Sequence[Path]:
    """Draw all pictures of a report into a folder, each file whole or not at all.

    Args:
        folder: made where it is not there.
        report: of a step.
        kind: "png" or "svg".
        histograms: reuse distances by tensor or of the step; None draws none.
        cache_lines: capacities to mark in them.
        line_bytes: of the device's nearest cache, for the drawing of layouts.
        wave: its lanes.

    Returns:
        The files.

    Raises:
        LayoutOptError: as ``check_pictures``.
    """
    check_pictures(folder, kind)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    figures = {
        "ops": op_bars(report),
        "tensors": tensor_map(report),
        "layouts": layout_drawing(rtile_beside_rowmajor(line_bytes, wave), wave=min(wave, 32), line_bytes=line_bytes),
    }
    if histograms is not None:
        figures["reuse"] = reuse_bars(histograms, cache_lines)
    written = []
    for name, figure in figures.items():
        data = BytesIO()
        figure.savefig(data, format=kind, dpi=120)
        written.append(target / f"{name}.{kind}")
        write_atomic(written[-1], data.getvalue())
    return written
