"""The picture of a layout: elements where they are in the tensor, with where they are in memory written into them.

An SVG of attributes alone, on a ground of its own: it looks the same in a light notebook, in a dark one and on GitHub,
which takes styles and scripts out. No library draws it: matplotlib is heavy for what every cell of a notebook may show.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np

from layoutopt import radix
from layoutopt.display_parts import element, text_of
from layoutopt.layout import LANES, Layout

__all__ = ["LINE_ELEMS", "blocks", "kind_of", "layout_svg"]

LINE_ELEMS = 16
"""Elements in a cache line of 64 bytes, of four bytes each."""
MOST_ROWS, MOST_COLUMNS = 12, 16
"""Of a picture; of more, the first are drawn, and the last one after an ellipsis."""
LINE_COLOURS = ("#fdbf6f", "#a6cee3", "#b2df8a", "#cab2d6")
"""Of the first cache lines of the storage."""

_INK, _PALE, _EDGE, _GROUND, _PADDING = "#1f2328", "#6e7781", "#d0d7de", "#ffffff", "#eaeef2"
_ROW, _LETTER, _MARGIN = 20, 6.1, 8
_FONT: dict[str, Any] = {"font_family": "ui-monospace, Menlo, Consolas, monospace", "font_size": 10}


def blocks(layout: Layout) -> tuple[int, ...]:
    """The extents of a layout's tile, by axis: of what is left when each axis' outermost digit is taken away.

    1 on an axis that is not cut.
    """
    return tuple(prod(m.extent for m in layout.axis_modes(axis)[1:]) for axis in range(layout.rank))


def kind_of(layout: Layout) -> str:
    """What a layout is, in words that layouts of different shapes share: ``row-major``, ``tile 4×16``, ``other order``.

    A point stands for an axis that is not cut: ``tile ·×4`` is panels of four columns. Leading axes are left out of it.
    """
    if layout.is_image:
        return "image"
    if layout == Layout.row_major(layout.shape):
        return "row-major"
    cut = ["·" if n == 1 else str(n) for n in blocks(layout)]
    while len(cut) > 2 and cut[0] == "·":
        cut.pop(0)
    if any(n != "·" for n in cut):
        return "tile " + "×".join(cut)
    return "padded" if layout.padded_shape != layout.shape and _in_order(layout) else "other order"


def _in_order(layout: Layout) -> bool:
    strides = [m.stride for m in layout.modes]
    return strides == sorted(strides, reverse=True)


@dataclass(frozen=True)
class _Grid:
    """What is drawn: the last two axes at the origin of the others.

    Attributes:
        rows: logical indices, None for an ellipsis.
        columns: likewise.
        height: logical extent of the rows, padding left out.
        width: of the columns.
        offsets: of every row and column in the storage, in elements, to be added up.
        block: rows and columns of a tile; 0 where there is none.
    """

    rows: list[int | None]
    columns: list[int | None]
    height: int
    width: int
    offsets: tuple[np.ndarray, np.ndarray]
    block: tuple[int, int]


def _shown(extent: int, most: int) -> list[int | None]:
    return [*range(extent)] if extent <= most else [*range(most - 2), None, extent - 1]


def _grid(layout: Layout) -> _Grid:
    axes = [axis if axis >= 0 else None for axis in (layout.rank - 2, layout.rank - 1)]
    weights = np.array((layout.size[1] * LANES, LANES, 1) if layout.is_image else (1,), dtype=np.int64)
    places, extents, logical, block = [], [], [], []
    for axis in axes:
        padded = layout.padded_shape[axis] if axis is not None else 1
        digits = [(m.extent, m.stride, m.dim) for m in layout.axis_modes(axis)] if axis is not None else []
        places.append(radix.along(digits, padded, len(layout.size)) @ weights)
        extents.append(padded)
        logical.append(layout.shape[axis] if axis is not None else 1)
        block.append(blocks(layout)[axis] if axis is not None and len(digits) > 1 else 0)
    base = int(np.array(layout.base, dtype=np.int64) @ weights)
    return _Grid(
        _shown(extents[0], MOST_ROWS),
        _shown(extents[1], MOST_COLUMNS),
        logical[0],
        logical[1],
        (places[0] + base, places[1]),
        (block[0], block[1]),
    )


def layout_svg(layout: Layout, line_elems: int = LINE_ELEMS) -> str:
    """The picture: cells with storage offsets, tiles outlined, the storage's first cache lines in colour, padding grey.

    Of more than two axes the last two are drawn, at the origin of the others; of an image, offsets are those of texels
    row by row, four elements each.

    Args:
        layout: any.
        line_elems: elements in a cache line.

    Returns:
        SVG without styles and scripts.
    """
    grid = _grid(layout)
    largest = int(grid.offsets[0].max() + grid.offsets[1].max())
    side = max(26.0, _LETTER * len(str(largest)) + 8)
    notes = _notes(layout, line_elems)
    left, top = 34, 18 * len(notes) + 24
    width = max(left + side * len(grid.columns) + _MARGIN, max(map(len, notes)) * _LETTER + 2 * _MARGIN)
    height = top + _ROW * len(grid.rows) + _MARGIN
    title = f"Layout of shape {layout.shape}: {layout.describe()}"
    root = element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        children=[element("title", title), element("rect", width="100%", height="100%", rx=6, fill=_GROUND)],
    )
    for number, note in enumerate(notes):
        root.append(element("text", note, x=_MARGIN, y=18 * (number + 1), fill=_PALE if number else _INK, **_FONT))
    root.extend(_axis_labels(grid, left, top, side))
    for i, row in enumerate(grid.rows):
        for j, column in enumerate(grid.columns):
            root.extend(_cell(grid, row, column, left + j * side, top + i * _ROW, side, line_elems))
    root.extend(_outlines(grid, left, top, side))
    return ET.tostring(root, encoding="unicode")


def _notes(layout: Layout, line_elems: int) -> list[str]:
    if layout.is_image:
        size = f"image of {layout.size[0]}×{layout.size[1]} texels"
    else:
        names = ("i", "j", "k", "l", "m", "n")[: layout.rank]
        named = names if len(names) == layout.rank else tuple(f"x{axis}" for axis in range(layout.rank))
        size = f"{layout.c_expr(*named)} of ({', '.join(named)})" if named else "one element"
    spare = layout.size_elems - prod(layout.shape)
    memory = f"{layout.size_elems:,} elements allocated" + (f", {spare:,} more than the tensor has" * (spare > 0))
    if spare < 0:
        memory += ": some are seen more than once"
    leading = f"; drawn: {list(layout.shape[-2:])} at the origin of the rest" if layout.rank > 2 else ""
    colours = min(len(LINE_COLOURS), -(-layout.size_elems // line_elems))
    lines = f"in colour: the first {colours} cache lines" if colours > 1 else "in colour: the first cache line"
    return [
        text_of(f"{list(layout.shape)} as {layout.describe()}"),
        size,
        f"{memory}{leading}",
        f"{lines} of {line_elems} elements",
    ]


def _axis_labels(grid: _Grid, left: float, top: float, side: float) -> list[ET.Element]:
    out = []
    for j, column in enumerate(grid.columns):
        label = "…" if column is None else column
        out.append(
            element(
                "text", label, x=f"{left + (j + 0.5) * side:g}", y=top - 6, text_anchor="middle", fill=_PALE, **_FONT
            )
        )
    for i, row in enumerate(grid.rows):
        label = "…" if row is None else row
        y = f"{top + i * _ROW + 14:g}"
        out.append(element("text", label, x=left - 6, y=y, text_anchor="end", fill=_PALE, **_FONT))
    return out


def _cell(
    grid: _Grid, row: int | None, column: int | None, x: float, y: float, side: float, line_elems: int
) -> list[ET.Element]:
    where: dict[str, Any] = {"x": f"{x + side / 2:g}", "y": f"{y + 14:g}", "text_anchor": "middle"}
    if row is None or column is None:
        return [element("text", "…", fill=_PALE, **where, **_FONT)]
    offset = int(grid.offsets[0][row] + grid.offsets[1][column])
    line = offset // line_elems
    padding = row >= grid.height or column >= grid.width
    fill = _PADDING if padding else LINE_COLOURS[line] if line < len(LINE_COLOURS) else _GROUND
    return [
        element("rect", x=f"{x:g}", y=f"{y:g}", width=f"{side:g}", height=_ROW, fill=fill, stroke=_EDGE),
        element("text", offset, fill=_PALE if padding else _INK, **where, **_FONT),
    ]


def _outlines(grid: _Grid, left: float, top: float, side: float) -> list[ET.Element]:
    """Frames of the tiles: of those parts of them that are drawn."""
    if not any(grid.block):
        return []
    out = []
    for i, count_rows in _runs(grid.rows, grid.block[0]):
        for j, count_columns in _runs(grid.columns, grid.block[1]):
            out.append(
                element(
                    "rect",
                    x=f"{left + j * side:g}",
                    y=f"{top + i * _ROW:g}",
                    width=f"{count_columns * side:g}",
                    height=f"{count_rows * _ROW:g}",
                    fill="none",
                    stroke=_INK,
                    stroke_width=1.6,
                )
            )
    return out


def _runs(shown: list[int | None], block: int) -> list[tuple[int, int]]:
    """Where the shown indices of each tile begin, and how many they are; an axis that is not cut is one tile."""
    found: list[tuple[int, int]] = []
    last: int | None = None
    for position, index in enumerate(shown):
        if index is None:
            last = None
            continue
        own = index // block if block else 0
        if last == own and found:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((position, 1))
        last = own
    return found
