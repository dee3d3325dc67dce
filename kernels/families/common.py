"""What the families share: domains simplified by views, grids decoded in C, indices as C text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

from kernels.nest import Index, Loop
from layoutopt.layout import Layout

__all__ = [
    "MAX_RANK",
    "any_image",
    "decode_c",
    "index_c",
    "largest_divisor",
    "math_c",
    "ndrange",
    "simplify",
]

MAX_RANK = 6
"""Axes that ``kernels.source`` has names for."""


def any_image(layouts: Iterable[Layout]) -> bool:
    """Whether an operand lies in an image, which no kernel here reads."""
    return any(layout.is_image for layout in layouts)


def largest_divisor(n: int, limit: int, multiple: int = 1) -> int:
    """Largest divisor of ``n`` up to ``limit`` that is a multiple of ``multiple`` (which divides ``n``)."""
    units = n // multiple
    best = max((d for d in range(1, max(limit // multiple, 1) + 1) if units % d == 0), default=1)
    return best * multiple


def index_c(index: Index) -> str:
    """A nest index as C text over variables named like its loops."""
    parts = [str(index.const)] if index.const or not index.terms else []
    for term in index.terms:
        text = term.loop
        if term.div != 1:
            text = f"({text}/{term.div})"
        if term.mod:
            text = f"({text}%{term.mod})"
        parts.append(text if term.coef == 1 else f"{text}*{term.coef}")
    return parts[0] if len(parts) == 1 else "(" + "+".join(parts) + ")"


def ndrange(grid: Sequence[Loop]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One-dimensional global and local size of a grid."""
    groups = prod(x.extent for x in grid if x.kind == "group")
    items = prod(x.extent for x in grid if x.kind == "item")
    return (groups * items,), (items,)


def decode_c(grid: Sequence[Loop]) -> str:
    """C declarations of the grid's loop variables from the one-dimensional ids."""
    lines = []
    for kind, source in (("group", "get_group_id(0)"), ("item", "get_local_id(0)")):
        loops = [x for x in grid if x.kind == kind]
        inner = prod(x.extent for x in loops)
        for position, loop in enumerate(loops):
            inner //= loop.extent
            text = f"(int){source}" if inner == 1 else f"(int){source}/{inner}"
            if position:
                text = f"({text})%{loop.extent}"
            lines.append(f"const int {loop.name} = {text};")
    return " ".join(lines)


@lru_cache(maxsize=8)
def math_c(width: int) -> str:
    """C text of exp, erf and tanh over scalars (``exp_s``) and, for a width above 1, vectors (``exp_v``)."""
    text = (Path(__file__).parent.parent / "cl" / "math.cl").read_text(encoding="utf-8")
    return f"#define MATH_WIDTH {width}\n{text}"


def simplify(layouts: Sequence[Layout], lead: int) -> tuple[Layout, ...] | None:
    """The operands of a point-by-point operation over the fewest, simplest axes.

    All operands share one domain, whose axes may be cut, reordered and merged as long as it is done to all of them:
    axes are cut at tile borders where nobody has padding, ordered by the lead operand's strides (largest first), and
    neighbours are merged where every operand allows it. A domain on which all operands lie alike becomes one axis.

    Args:
        layouts: over equal shapes, broadcasts expanded.
        lead: operand whose storage order the axes follow.

    Returns:
        The layouts over the new domain (at least one axis), or None where it has more axes than macros can name.
    """
    return _simplified(tuple(layouts), lead)


@lru_cache(maxsize=1 << 14)
def _simplified(layouts: tuple[Layout, ...], lead: int) -> tuple[Layout, ...] | None:
    views = list(layouts)
    for candidate in (_cut_tiles(views), views):
        merged = _merge(_ordered(candidate, lead))
        if merged[0].rank <= MAX_RANK:
            return tuple(merged)
    return None


def _reshaped(views: Sequence[Layout], shape: tuple[int, ...]) -> list[Layout] | None:
    out = []
    for view in views:
        seen = view.reshape(shape)
        if seen is None:
            return None
        out.append(seen)
    return out


@lru_cache(maxsize=1 << 14)
def _tile_borders(view: Layout) -> tuple[tuple[int, ...], ...]:
    """Per axis, the extents of its tiles, smallest first."""
    out = []
    for axis in range(view.rank):
        inner, cuts = 1, []
        for mode in reversed(view.axis_modes(axis)[1:]):
            inner *= mode.extent
            cuts.append(inner)
        out.append(tuple(cuts))
    return tuple(out)


def _cut_tiles(views: list[Layout]) -> list[Layout]:
    shape: list[int] = []
    borders = [_tile_borders(view) for view in views]
    for axis, n in enumerate(views[0].shape):
        cuts = {cut for view in borders for cut in view[axis]}
        chain = [n]
        for cut in sorted(cuts, reverse=True):
            if chain[-1] % cut == 0:
                chain.append(cut)
        padded = len(chain) > 1 and any(view.padded(axis) != n for view in views)
        shape += [n] if padded else [a // b for a, b in zip(chain, [*chain[1:], 1], strict=True)]
    return _reshaped(views, tuple(shape)) or views


def _ordered(views: list[Layout], lead: int) -> list[Layout]:
    shape = views[0].shape
    kept = tuple(n for n in shape if n > 1) or (1,)
    slim = _reshaped(views, kept)
    if slim is None:
        slim = views
    order = _falling(slim[lead])
    return [view.permute(order) for view in slim]


@lru_cache(maxsize=1 << 14)
def _falling(layout: Layout) -> tuple[int, ...]:
    """Axes by their innermost strides, largest first."""
    strides = [modes[-1].stride if (modes := layout.axis_modes(axis)) else 0 for axis in range(layout.rank)]
    return tuple(sorted(range(layout.rank), key=lambda axis: -strides[axis]))


def _merge(views: list[Layout]) -> list[Layout]:
    axis = 0
    while axis + 1 < views[0].rank:
        joined = []
        for view in views:
            one = _joined(view, axis)
            if one is None:
                axis += 1
                break
            joined.append(one)
        else:
            views = joined
    return views


@lru_cache(maxsize=1 << 15)
def _joined(view: Layout, axis: int) -> Layout | None:
    """An axis merged with the next, where the two count as one digit."""
    shape = view.shape
    joined = view.reshape((*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))
    return joined if joined is not None and len(joined.axis_modes(axis)) <= 1 else None
