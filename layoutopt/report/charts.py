"""The report's charts, by matplotlib: narrow, so that they can be read on a telephone, and drawn as text and paths.

A chart is 5 inches wide, which is 360 units: on a screen of 390 pixels its letters are as large as they are here, on
a desk twice that. Names of operations are long: they stand above their bars rather than beside them.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layoutopt.errors import LayoutOptError
from layoutopt.report.shapes import cleaned
from layoutopt.report.svg import INK, PALETTE, RULE, embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from layoutopt.layout import Layout

__all__ = ["area", "bars", "check_charts", "scatter", "tiles"]

_WIDTH = 5.0
_LETTERS = 48
"""Of a name above a bar."""


def check_charts() -> None:
    """See that charts can be drawn, before the work that they show.

    Raises:
        LayoutOptError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError as error:
        raise LayoutOptError("a report needs matplotlib: pip install 'layoutopt[report]'") from error


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "axes.titlecolor"), INK
    )
    plain = {
        "text.parse_math": False,  # names are no formulas
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 11,
        "legend.frameon": False,
        "legend.fontsize": 10.5,
        "legend.handlelength": 1.2,
        "legend.columnspacing": 1.2,
        "grid.color": RULE,
    }
    with rc_context(ink | plain):
        yield


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def bars(
    key: str,
    title: str,
    description: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    unit: str,
    spread: Sequence[float] | None = None,
    stacked: bool = True,
) -> str:
    """Horizontal bars, each below its name, with the sum at its end.

    Args:
        key: unique in the page.
        title: of the chart.
        description: in words.
        names: of the bars, the first on top.
        series: parts of every bar, or bars side by side.
        unit: of the values.
        spread: half the width of the mark at the end of the last series' bars.
        stacked: the series add up.
    """
    from matplotlib.ticker import MaxNLocator

    several = max(len(series), 1)
    thick = 0.5 if stacked else 0.62 / several
    with _style():
        figure = _figure(0.85 + (0.37 if stacked else 0.24 + 0.17 * several) * max(len(names), 1))
        axes = figure.subplots()
        places = [float(i) for i in range(len(names))]
        left = [0.0] * len(names)
        for number, (name, values) in enumerate(series.items()):
            at = places if stacked else [p + thick * number for p in places]
            marks = spread if spread and number == several - 1 else None
            error = {"xerr": list(marks), "ecolor": INK} if marks else {}
            axes.barh(at, values, thick, left=left, label=cleaned(name), color=PALETTE[number % len(PALETTE)], **error)
            if stacked:
                left = [a + b for a, b in zip(left, values, strict=True)]
        last = list(series.values())[-1:] or [[]]
        ends = [v + s for v, s in zip(last[0], spread or [0.0] * len(names), strict=True)]
        most = max([*left, *ends, *(v for values in series.values() for v in values)], default=0.0) or 1.0
        for place, name in zip(places, names, strict=True):
            above = place - thick / 2 - 0.05
            axes.text(0, above, _short(cleaned(name)), va="bottom", ha="left", fontsize=10.5)
        if stacked:
            for place, end in zip(places, left, strict=True):
                axes.text(end + most * 0.01, place, f"{end:,.4g}", va="center", ha="left", fontsize=10)
        axes.set_xlim(0, most * 1.18)
        axes.set_ylim(len(names) - 0.55 + (0.0 if stacked else 0.2), -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(unit)
        axes.grid(axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        if several > 1:
            figure.legend(loc="outside upper left", ncols=3)
        return embedded(figure, key, title, description)


def area(
    key: str,
    title: str,
    description: str,
    places: Sequence[int],
    series: Mapping[str, Sequence[float]],
    mark: int,
    unit: str,
) -> str:
    """Series that add up, by position in the step; a line marks one position.

    Args:
        key: unique in the page.
        title: of the chart.
        description: in words.
        places: positions in the step, from 1, ascending.
        series: the lowest first, a value for every place.
        mark: position of the line.
        unit: of the values.
    """
    import numpy as np

    with _style():
        figure = _figure(3.4)
        axes = figure.subplots()
        below = np.zeros(len(places))
        for number, (name, values) in enumerate(series.items()):
            top = below + np.asarray(values, float)
            axes.fill_between(
                places,
                below,
                top,
                step="mid",
                label=cleaned(name),
                color=PALETTE[number % len(PALETTE)],
                linewidth=0,
            )
            below = top
        axes.axvline(mark, color=INK, linewidth=1, linestyle="--")
        late = mark > places[-1] / 2
        axes.annotate(
            " peak ", (mark, 1), xycoords=("data", "axes fraction"), va="bottom", ha="right" if late else "left"
        )
        axes.set_xlim(places[0], max(places[-1], places[0] + 1))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step of the plan")
        axes.set_ylabel(unit)
        axes.grid(linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=3)
        return embedded(figure, key, title, description)


def scatter(
    key: str, title: str, description: str, groups: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str
) -> str:
    """Points by group on logarithmic axes, with the line on which both are equal.

    Args:
        key: unique in the page.
        title: of the chart.
        description: in words.
        groups: (across, up) of every point, all above 0.
        across: name and unit.
        up: name and unit.
    """
    with _style():
        figure = _figure(4.2)
        axes = figure.subplots()
        everything = [v for points in groups.values() for point in points for v in point]
        low, high = min(everything, default=1.0) / 1.4, max(everything, default=1.0) * 1.4
        axes.plot([low, high], [low, high], color=INK, linewidth=1, linestyle="--", label="equal")
        for number, (name, points) in enumerate(groups.items()):
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                "osv^Dx"[number % 6],
                markersize=4.5,
                color=PALETTE[number % len(PALETTE)],
                label=cleaned(name),
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(linewidth=0.6)
        figure.legend(loc="outside upper left", ncols=3)
        return embedded(figure, key, title, description)


def tiles(key: str, title: str, description: str, layout: Layout, wave: int, line_bytes: int, item_bytes: int) -> str:
    """A small matrix by cache line, and what one load of a wave touches along a row and along a column.

    The drawing is the simulator's (``simulator/pictures.py``), made smaller.

    Args:
        key: unique in the page.
        title: of the drawing.
        description: in words.
        layout: of a small matrix.
        wave: lanes.
        line_bytes: of a cache line.
        item_bytes: of an element.
    """
    from simulator.pictures import layout_drawing, lines_of, lines_touched

    with _style():
        figure = layout_drawing({title: layout}, wave=wave, line_bytes=line_bytes, item_bytes=item_bytes)
        figure.set_size_inches(_WIDTH, 2.7)
        lines = lines_of(layout, line_bytes, item_bytes)
        for axes, axis, what in zip(figure.axes, (1, 0), ("along a row", "along a column"), strict=True):
            count = lines_touched(lines, axis, wave)
            axes.set_title(f"{what}: {count} {'line' if count == 1 else 'lines'}", fontsize=10.5)
            axes.set_xlabel("")
            axes.set_ylabel("")
            axes.set_xticks([])
            axes.set_yticks([])
        return embedded(figure, key, title, description)


def _short(name: str) -> str:
    """A name that fits above its bar; both ends tell most."""
    if len(name) <= _LETTERS:
        return name
    return f"{name[: _LETTERS // 2 - 1]}…{name[-(_LETTERS // 2) :]}"
