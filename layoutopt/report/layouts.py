"""Layouts by block, what each distinct one looks like, and the relayouts that are left.

Layouts of different shapes are the same *pattern* when their digits are nested alike: ``rows, columns, 4 rows,
8 columns`` is R-Tile(4, 8) of every shape.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from layoutopt.graph import DTYPES, TrainingGraph
from layoutopt.layout import Layout, Mode
from layoutopt.plan import Plan
from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, mib, ms, ranked
from layoutopt.report.steps import blocks_of_ops, blocks_of_storages

__all__ = ["layouts_section", "pattern", "sample"]

_DRAWN = 12
_SIDE = 16
"""Rows and columns of a drawing, as far as whole tiles allow."""
_ROWS = 300


@dataclass(frozen=True)
class _Laid:
    """A layout of a storage in a plan; ``copy`` where it is not the primary."""

    storage: str
    layout: Layout
    dtype: str
    role: str
    block: str
    copy: bool

    @property
    def size_bytes(self) -> int:
        return self.layout.size_elems * DTYPES[self.dtype]


def pattern(layout: Layout) -> str:
    """What a layout has in common with those of other shapes: its digits, outermost first.

    >>> pattern(Layout.row_major((6, 8)))
    'row-major'
    >>> pattern(Layout.r_tile((6, 8), 2, 4))
    'rows, columns, 2 rows, 4 columns'
    >>> pattern(Layout.row_major((6, 8), (1, 0)))
    'columns, rows'
    """
    if not layout.is_image and layout == Layout.row_major(layout.shape):
        return "row-major"
    per_dim = []
    for dim in range(len(layout.size)):
        digits = [
            _axis(mode.axis, layout.rank)
            if _outermost(layout, mode)
            else f"{mode.extent} {_axis(mode.axis, layout.rank)}"
            for mode in _nested(layout, dim)
        ]
        per_dim.append(", ".join(digits) or "one")
    padded = ", padded" if layout.size_elems > prod(layout.shape) else ""
    if not layout.is_image:
        return per_dim[0] + padded
    return "image: rows of " + per_dim[0] + "; texels of " + per_dim[1] + "; lanes of " + per_dim[2] + padded


def _axis(axis: int, rank: int) -> str:
    """The last two axes are rows and columns; those before them go by number."""
    return "columns" if axis == rank - 1 else "rows" if axis == rank - 2 else f"axis {axis}"


def _outermost(layout: Layout, mode: Mode) -> bool:
    return layout.axis_modes(mode.axis)[0] == mode


def _nested(layout: Layout, dim: int) -> list[Mode]:
    """The digits of a storage dimension, outermost first."""
    return sorted((m for m in layout.modes if m.dim == dim), key=lambda m: -m.stride)


def sample(layout: Layout) -> tuple[Layout, int, int] | None:
    """A small matrix laid out alike, and the two axes of the layout that are its rows and columns.

    None for layouts of images and of vectors, of which there is nothing to see.
    """
    digits = _nested(layout, 0)
    axes = list(dict.fromkeys(m.axis for m in reversed(digits)))
    if layout.is_image or len(axes) < 2:
        return None
    row, column = sorted(axes[:2])
    kept = [m for m in digits if m.axis in (row, column)]
    parts = {a: prod(m.extent for m in kept if m.axis == a and not _outermost(layout, m)) for a in (row, column)}
    shape = tuple(max(parts[a], _SIDE // parts[a] * parts[a]) for a in (row, column))
    if max(shape) > 4 * _SIDE:
        return None
    place = {row: 0, column: 1}
    return (
        Layout.of(shape, [(place[m.axis], None if _outermost(layout, m) else m.extent) for m in kept]),
        row,
        column,
    )


def layouts_section(plan: Plan, planned: TrainingGraph, wave: int, line_bytes: int, top: int) -> Section:
    """The section.

    Args:
        plan: of the graph.
        planned: with the plan's rewrites.
        wave: lanes of the device.
        line_bytes: of its nearest cache.
        top: rows of tables that stand open.
    """
    laid = _laid(plan, planned)
    groups: dict[str, list[_Laid]] = {}
    for one in laid:
        groups.setdefault(pattern(one.layout), []).append(one)
    order = ranked(groups, lambda name: sum(x.size_bytes for x in groups[name]), len(groups))
    matrices = [name for name in order if any(x.layout.rank > 1 for x in groups[name])]
    said = (
        f"{len(plan.layouts)} storages lie in {len(order)} patterns; {sum(x.copy for x in laid)} copies of them lie in "
        f"another layout. {len(plan.relayouts)} relayouts are left in a step: they read and write "
        f"{mib(sum(r.bytes_moved for r in plan.relayouts))} MiB and are predicted to take "
        f"{ms(sum(r.cost.total_ns for r in plan.relayouts) * 1e-9)} ms. A pattern names digits from the slowest to the "
        'fastest: "rows, columns, 4 rows, 8 columns" keeps tiles of 4 × 8 contiguous, each row by row.'
    )
    seen = (
        "In the drawings a square is an element of a small matrix and a colour a cache line; framed is what one load "
        f"of {min(wave, _SIDE)} lanes reads, along a row and along a column; lines that it touches are full in colour."
    )
    return Section(
        "layouts",
        "Layouts by block, and the relayouts that are left",
        (said, seen),
        (),
        (_patterns(groups, order), _relayouts(plan, planned, top)),
        tuple([_by_block(laid)] + ([_relayouts(plan, planned, _ROWS)] if len(plan.relayouts) > top else [])),
        _drawings({name: groups[name] for name in matrices[:_DRAWN]}, min(wave, _SIDE), line_bytes),
    )


def _laid(plan: Plan, planned: TrainingGraph) -> list[_Laid]:
    blocks = blocks_of_storages(planned, blocks_of_ops(planned))
    out = []
    for name, docs in plan.layouts.items():
        storage = planned.storages[name]
        for position, doc in enumerate(docs):
            block = blocks.get(name, "no operation")
            out.append(_Laid(name, doc.layout(), storage.dtype, storage.role, block, position > 0))
    return out


def _patterns(groups: dict[str, list[_Laid]], order: Sequence[str]) -> Table:
    rows = []
    for name in order:
        own = groups[name]
        roles = ", ".join(dict.fromkeys(x.role for x in own))
        rows.append((name, str(len(own)), str(sum(x.copy for x in own)), mib(sum(x.size_bytes for x in own)), roles))
    head = ("pattern", "layouts", "of them copies", "MiB", "roles")
    return Table("Distinct layouts, those of most bytes first", head, tuple(rows))


def _by_block(laid: Sequence[_Laid]) -> Table:
    groups: dict[tuple[str, str, str], list[_Laid]] = {}
    for one in laid:
        groups.setdefault((one.block, one.role, pattern(one.layout)), []).append(one)
    rows = tuple((*key, str(len(own)), mib(sum(x.size_bytes for x in own))) for key, own in groups.items())
    return Table("Layouts by block", ("block", "role", "pattern", "layouts", "MiB"), rows)


def _relayouts(plan: Plan, planned: TrainingGraph, most: int) -> Table:
    blocks = blocks_of_ops(planned)
    layouts = {name: [doc.layout() for doc in docs] for name, docs in plan.layouts.items()}
    rows = []
    for move in ranked(plan.relayouts, lambda r: r.cost.total_ns, most):
        own = layouts[move.storage]
        cells = (move.storage, ms(move.cost.total_ns * 1e-9), mib(move.bytes_moved))
        source = "measured" if move.cost.measured else "predicted"
        facts = (planned.storages[move.storage].role, move.before, blocks[move.before], source)
        rows.append((*cells, pattern(own[0]), pattern(own[move.target]), *facts))
    head = ("tensor", "ms", "MiB moved", "from", "to", "role", "before", "block", "cost is")
    count = "All" if len(rows) == len(plan.relayouts) else f"The {len(rows)} dearest of {len(plan.relayouts)}"
    return Table(f"{count} relayouts that are left", head, tuple(rows))


def _drawings(groups: dict[str, list[_Laid]], wave: int, line_bytes: int) -> tuple[Chart, ...]:
    out = []
    for number, (name, own) in enumerate(groups.items()):
        largest = max((x for x in own if x.layout.rank > 1), key=lambda x: x.size_bytes)
        found = sample(largest.layout)
        if found is None:
            continue
        layout, row, column = found
        rank = largest.layout.rank
        title = f"{name} ({len(own)} layouts)"
        said = (
            f"A matrix of {layout.shape[0]} × {layout.shape[1]}: {_axis(row, rank)} down, {_axis(column, rank)} "
            f"across, laid out as {name}; by cache line of {line_bytes} bytes."
        )
        item = DTYPES[largest.dtype]
        out.append(Chart(title, said, charts.tiles(f"layout-{number}", title, said, layout, wave, line_bytes, item)))
    return tuple(out)
