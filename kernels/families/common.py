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
    views = list(layouts)
    for candidate in (_cut_tiles(views), views):
        merged = _merge(_ordered(candidate, lead))
        if merged[0].rank <= MAX_RANK:
            return tuple(merged)
    return None


def _reshaped(views: Sequence[Layout], shape: tuple[int, ...]) -> list[Layout] | None:
    out = [view.reshape(shape) for view in views]
    return None if any(x is None for x in out) else [x for x in out if x is not None]


def _cut_tiles(views: list[Layout]) -> list[Layout]:
    shape: list[int] = []
    for axis, n in enumerate(views[0].shape):
        cuts = set()
        for view in views:
            inner = 1
            for mode in reversed(view.axis_modes(axis)[1:]):
                inner *= mode.extent
                cuts.add(inner)
        chain = [n]
        for cut in sorted(cuts, reverse=True):
            if chain[-1] % cut == 0:
                chain.append(cut)
        padded = any(view.padded(axis) != n for view in views)
        shape += [n] if padded else [a // b for a, b in zip(chain, [*chain[1:], 1], strict=True)]
    return _reshaped(views, tuple(shape)) or views


def _ordered(views: list[Layout], lead: int) -> list[Layout]:
    shape = views[0].shape
    kept = tuple(n for n in shape if n > 1) or (1,)
    slim = _reshaped(views, kept)
    if slim is None:
        slim = views
    rank = slim[0].rank

    def stride(axis: int) -> int:
        modes = slim[lead].axis_modes(axis)
        return modes[-1].stride if modes else 0

    order = tuple(sorted(range(rank), key=lambda axis: -stride(axis)))
    return [view.permute(order) for view in slim]


def _merge(views: list[Layout]) -> list[Layout]:
    axis = 0
    while axis + 1 < views[0].rank:
        shape = views[0].shape
        joined = _reshaped(views, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))
        if joined is not None and all(len(view.axis_modes(axis)) <= 1 for view in joined):
            views = joined
        else:
            axis += 1
    return views
