"""The layout algebra: where in memory each element of a tensor lies.

A :class:`Layout` maps a logical coordinate ``(x_0, …, x_{r-1})`` to a storage coordinate. A buffer has one storage
dimension, an image has three (row, column, lane; a texel holds four lanes). Each logical axis is written in mixed
radix over its *modes*, outermost first; each digit is multiplied by the mode's stride and added to the storage
dimension the mode belongs to:

    storage[d] = base[d] + sum over modes m with m.dim == d of digit_m(x[m.axis]) * m.stride

Axes are positions, not names: ``c_expr`` takes the C names, so that two layouts are equal exactly when they are the
same map. The product of an axis' mode extents is its *padded* extent; what it exceeds the logical extent by is the
padding. Padding exists in memory, its content is undefined, and no kernel lets it influence a result.

Worked example. A 6×8 matrix in R-Tile(2, 4) keeps 2×4 blocks contiguous:

>>> tiled = Layout.r_tile((6, 8), 2, 4)
>>> [(m.axis, m.extent, m.stride) for m in tiled.modes]
[(0, 3, 16), (0, 2, 4), (1, 2, 8), (1, 4, 1)]
>>> tiled.c_expr("i", "j")
'((i>>1)*16+(i&1)*4+(j>>2)*8+(j&3))'

Splitting the columns into heads is a view wherever the tile divides the head, and None where it does not:

>>> tiled.reshape((6, 2, 4)) is not None
True
>>> tiled.reshape((6, 4, 2)) is None
False
>>> Layout.r_tile((6, 9), 2, 4).reshape((6, 3, 3)) is None
True

Equality is canonical: a one-row tile is row-major.

>>> Layout.r_tile((6, 8), 1, 8) == Layout.row_major((6, 8))
True

Source: FBLayout's R-Tile and tile-based index transformation; the algebra of strided modes follows CuTe's shape:stride
pairs, restricted so that every view is decidable (docs/layouts.md explains the maths).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod

import numpy as np

from layoutopt import radix
from layoutopt.errors import LayoutError

__all__ = ["LANES", "Layout", "Mode"]

LANES = 4
"""Values in one image texel (CL_RGBA, CL_FLOAT)."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One digit of one axis: ``extent`` values, each a step of ``stride`` elements in storage dimension ``dim``."""

    axis: int
    extent: int
    stride: int
    dim: int = 0


def _canonical(shape: tuple[int, ...], modes: list[Mode]) -> tuple[Mode, ...]:
    """Sort by axis, drop digits that are always zero, merge neighbours that count as one digit."""
    out: list[Mode] = []
    for axis in range(len(shape)):
        digits = radix.merge([(m.extent, m.stride, m.dim) for m in modes if m.axis == axis])
        out += [Mode(axis, *digit) for digit in digits]
    return tuple(out)


def _reach(modes: list[Mode] | tuple[Mode, ...], base: tuple[int, ...]) -> tuple[int, ...]:
    """One past the last storage coordinate of the padded map, per storage dimension."""
    return tuple(b + sum((m.extent - 1) * m.stride for m in modes if m.dim == d) + 1 for d, b in enumerate(base))


@dataclass(frozen=True)
class Layout:
    """A total map from logical coordinates to storage; build one through the constructors, which canonicalise.

    Attributes:
        shape: logical extents, one per axis.
        modes: canonical modes, grouped by axis, outermost first within an axis.
        size: allocated elements per storage dimension: ``(elems,)`` for a buffer, ``(rows, columns, 4)`` for an image.
        base: storage coordinate of the logical origin (a slice starts later than its parent).
    """

    shape: tuple[int, ...]
    modes: tuple[Mode, ...]
    size: tuple[int, ...]
    base: tuple[int, ...]

    # Planning looks layouts up by the million: what it asks again and again is worked out once for each.

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.modes, self.size, self.base))

    @cached_property
    def _by_axis(self) -> tuple[tuple[Mode, ...], ...]:
        return tuple(tuple(m for m in self.modes if m.axis == axis) for axis in range(len(self.shape)))

    # ---- constructors -------------------------------------------------------------------------------------------

    @staticmethod
    def build(
        shape: tuple[int, ...],
        modes: list[Mode] | tuple[Mode, ...],
        size: tuple[int, ...] | None = None,
        base: tuple[int, ...] | None = None,
    ) -> Layout:
        """Canonicalise and check.

        Args:
            shape: logical extents, each at least 1.
            modes: outermost first within each axis, in any order between axes.
            size: allocation per storage dimension; the least that holds the padded map by default.
            base: storage coordinate of the origin; zeros by default.

        Raises:
            LayoutError: a mode names no axis, an axis is not covered, or the map leaves the allocation.
        """
        dims = len(size) if size is not None else 1 + max((m.dim for m in modes), default=0)
        origin = tuple(base) if base is not None else (0,) * dims
        if any(n < 1 for n in shape):
            raise LayoutError(f"layout over shape {shape}: every extent must be at least 1")
        for mode in modes:
            if not 0 <= mode.axis < len(shape):
                raise LayoutError(f"mode {mode} names axis {mode.axis}; shape {shape} has axes 0..{len(shape) - 1}")
            if mode.extent < 1 or mode.stride < 0 or not 0 <= mode.dim < dims:
                raise LayoutError(f"mode {mode}: extent must be >= 1, stride >= 0 and dim within 0..{dims - 1}")
        for axis, n in enumerate(shape):
            padded = prod(m.extent for m in modes if m.axis == axis)
            if padded < n:
                raise LayoutError(f"axis {axis} of {shape} has extent {n} but its modes cover only {padded}")
        if len(origin) != dims or any(b < 0 for b in origin):
            raise LayoutError(
                f"base {origin} of a layout with {dims} storage dimension(s): expected {dims} values >= 0"
            )
        canonical = _canonical(tuple(shape), list(modes))
        reach = _reach(canonical, origin)
        allocated = tuple(size) if size is not None else reach
        if any(r > a for r, a in zip(reach, allocated, strict=True)):
            raise LayoutError(f"layout of {shape} reaches {reach} but only {allocated} is allocated")
        return Layout(tuple(shape), canonical, allocated, origin)

    @staticmethod
    def of(shape: tuple[int, ...], *dims: list[tuple[int, int | None]]) -> Layout:
        """Compact layout from digits: one list per storage dimension of ``(axis, extent)``, outermost first.

        An extent of None is "the rest": the logical extent over the product of the axis' other extents, rounded up.

        >>> Layout.of((6, 8), [(0, None), (1, None)]) == Layout.row_major((6, 8))
        True
        """
        return _compact(tuple(shape), tuple(tuple(digits) for digits in dims))

    @staticmethod
    def row_major(
        shape: tuple[int, ...], order: tuple[int, ...] | None = None, pad: dict[int, int] | None = None
    ) -> Layout:
        """Dense layout with axes nested in ``order``, outermost first (the axes' own order by default).

        Args:
            shape: logical extents.
            order: nesting of the axes.
            pad: by axis, the multiple that its extent is rounded up to.

        >>> Layout.row_major((6, 13), pad={1: 8}).padded_shape
        (6, 16)
        """
        multiples = pad or {}
        digits: list[tuple[int, int | None]] = []
        for axis in order or range(len(shape)):
            digits += [(axis, None), (axis, multiples[axis])] if axis in multiples else [(axis, None)]
        return Layout.of(shape, digits)

    @staticmethod
    def tiled(
        shape: tuple[int, ...],
        tiles: dict[int, int],
        outer: tuple[int, ...] | None = None,
        inner: tuple[int, ...] | None = None,
    ) -> Layout:
        """Blocked layout: axis ``a`` is cut into blocks of ``tiles[a]``, each block contiguous.

        Args:
            shape: logical extents.
            tiles: block extent by axis.
            outer: nesting of the blocks, outermost first; the axes' order by default.
            inner: nesting within a block; the tiles' axes ascending by default.
        """
        blocks: list[tuple[int, int | None]] = [(axis, None) for axis in (outer or range(len(shape)))]
        block: list[tuple[int, int | None]] = [(axis, tiles[axis]) for axis in (inner or sorted(tiles))]
        return Layout.of(shape, blocks + block)

    @staticmethod
    def r_tile(
        shape: tuple[int, ...],
        tr: int,
        tc: int,
        inner: str = "row",
        outer: str = "row",
        axes: tuple[int, int] | None = None,
    ) -> Layout:
        """R-Tile: ``tr``×``tc`` blocks of the two reduced axes are contiguous; other axes stay outside.

        Args:
            shape: logical extents, at least two axes.
            tr: rows in a tile.
            tc: columns in a tile.
            inner: "row" keeps a tile's rows contiguous, "col" its columns.
            outer: "row" walks tiles along a row of tiles first, "col" down a column first.
            axes: the (row, column) axes; the last two by default.
        """
        r, c = axes or (len(shape) - 2, len(shape) - 1)
        if r == c or not {inner, outer} <= {"row", "col"}:
            got = f"axes {(r, c)}, inner={inner!r}, outer={outer!r}"
            raise LayoutError(f"r_tile of {shape}: expected two different axes and 'row' or 'col', got {got}")
        rest = [axis for axis in range(len(shape)) if axis not in (r, c)]
        outer_axes = (*rest, r, c) if outer == "row" else (*rest, c, r)
        return Layout.tiled(shape, {r: tr, c: tc}, outer_axes, (r, c) if inner == "row" else (c, r))

    @staticmethod
    def image(
        shape: tuple[int, ...],
        rows: list[tuple[int, int | None]],
        columns: list[tuple[int, int | None]],
        lane: int,
    ) -> Layout:
        """Image layout: digits along image rows and columns; four consecutive values of axis ``lane`` form a texel."""
        return Layout.of(shape, rows, columns, [(lane, LANES)])

    @staticmethod
    def r_tile_image(shape: tuple[int, ...], tr: int, axes: tuple[int, int] | None = None) -> Layout:
        """R-Tile on an image: a tile row of four is a texel, its ``tr`` rows are neighbouring columns of texels."""
        r, c = axes or (len(shape) - 2, len(shape) - 1)
        rest: list[tuple[int, int | None]] = [(axis, None) for axis in range(len(shape)) if axis not in (r, c)]
        return Layout.image(shape, [*rest, (r, None)], [(c, None), (r, tr)], c)

    # ---- what the map is ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def is_image(self) -> bool:
        """Whether storage is a 2-D image of four-lane texels."""
        return len(self.size) == 3

    @property
    def size_elems(self) -> int:
        """Allocated elements, padding included."""
        return prod(self.size)

    def axis_modes(self, axis: int) -> tuple[Mode, ...]:
        """The modes of one axis, outermost first (empty for an axis of one value)."""
        return self._by_axis[axis]

    def _digits(self, axis: int) -> list[radix.Digit]:
        return [(m.extent, m.stride, m.dim) for m in self.axis_modes(axis)]

    def padded(self, axis: int) -> int:
        """The extent of an axis with its padding."""
        return self.padded_shape[axis]

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Extents with padding."""
        return tuple(max(prod(m.extent for m in modes), 1) for modes in self._by_axis)

    def offsets(self, padded: bool = False) -> np.ndarray:
        """Storage coordinates of every element, by numpy.

        Args:
            padded: cover the padded extents rather than the logical ones.

        Returns:
            int64; shape = logical (or padded) extents for a buffer, with a last axis (row, column, lane) for an image.
        """
        extents = self.padded_shape if padded else self.shape
        out = np.zeros((*extents, len(self.size)), dtype=np.int64) + np.asarray(self.base, dtype=np.int64)
        for axis, n in enumerate(extents):
            values = radix.along(self._digits(axis), n, len(self.size))
            out += values.reshape((1,) * axis + (n,) + (1,) * (len(extents) - axis - 1) + (len(self.size),))
        return out if self.is_image else out[..., 0]

    def linear_offsets(self, padded: bool = False) -> np.ndarray:
        """Element offsets in the allocation: an image counts row-major over (row, column, lane)."""
        offsets = self.offsets(padded)
        if not self.is_image:
            return offsets
        _, columns, lanes = self.size
        return (offsets[..., 0] * columns + offsets[..., 1]) * lanes + offsets[..., 2]

    def is_injective(self) -> bool:
        """Whether no two logical coordinates share a storage element (false for a broadcast view)."""
        nested = True
        for d in range(len(self.size)):
            reach = 0
            for mode in sorted((m for m in self.modes if m.dim == d), key=lambda m: (m.stride, m.extent)):
                nested &= mode.stride > reach
                reach += (mode.extent - 1) * mode.stride
        if nested:
            return True
        if any(m.stride == 0 and self._weight(m) < self.shape[m.axis] for m in self.modes):
            return False
        offsets = self.linear_offsets()
        return np.unique(offsets).size == offsets.size

    def _weight(self, mode: Mode) -> int:
        """The coordinate at which a mode first counts: the product of the extents inside it."""
        own = self.axis_modes(mode.axis)
        return prod(m.extent for m in own[own.index(mode) + 1 :])

    def is_compact(self) -> bool:
        """Whether the padded domain fills a buffer exactly, so that walking storage visits each element once."""
        if self.is_image or self.base != (0,):
            return False
        expected = 1
        for mode in sorted(self.modes, key=lambda m: m.stride):
            if mode.stride != expected:
                return False
            expected *= mode.extent
        return expected == self.size[0]

    def run(self, axis: int) -> int:
        """Length of the contiguous runs along an axis: coordinates ``[k*run, (k+1)*run)`` have unit stride.

        1 where neighbours along the axis are not neighbours in memory. In an image a run lies within one texel.
        """
        modes = self.axis_modes(axis)
        last_dim = len(self.size) - 1
        if not modes or modes[-1].stride != 1 or modes[-1].dim != last_dim:
            return 1
        return modes[-1].extent

    def vectorizes(self, axis: int, width: int) -> bool:
        """Whether ``width`` values along ``axis`` from a multiple of ``width`` are contiguous in storage.

        True for every width on an axis that is one unit-stride mode (a vector may then end in the next row: the kernel
        guards its tail against the logical extent), else the tile must be a multiple of the width.
        """
        if width == 1:
            return True
        modes = self.axis_modes(axis)
        run = self.run(axis)
        if run == 1:
            return False
        return run % width == 0 if (len(modes) > 1 or self.is_image) else True

    def alignment(self, axis: int) -> int:
        """Largest power of two (at most 16) that divides the storage offset of every run start along ``axis``.

        Offsets are those of ``linear_offsets``. With ``vectorizes(axis, w)`` and w dividing the alignment, every vector
        of w from a multiple of w is aligned. In an image only the lane counts: whole texels are always aligned.
        """
        return _alignment(self, axis)

    # ---- views: the same storage under new logical axes -----------------------------------------------------------

    def permute(self, order: tuple[int, ...]) -> Layout:
        """The layout of ``x.transpose(order)``; always exists."""
        return _permute(self, tuple(order))

    def expand(self, shape: tuple[int, ...]) -> Layout:
        """The layout of ``broadcast_to(x, shape)``: new and unit axes get stride 0 (numpy's alignment to the right)."""
        lead = len(shape) - self.rank
        if lead < 0 or any(n not in (1, m) for n, m in zip(self.shape, shape[lead:], strict=True)):
            raise LayoutError(f"cannot expand {self.shape} to {shape}: extents must match or be 1")
        modes = [Mode(axis, shape[axis], 0, 0) for axis in range(lead)]
        for axis, (n, m) in enumerate(zip(self.shape, shape[lead:], strict=True)):
            if n == m:
                modes += [replace(mode, axis=lead + axis) for mode in self.axis_modes(axis)]
            else:
                modes.append(Mode(lead + axis, m, 0, 0))
        return Layout.build(tuple(shape), modes, self.size, self.base)

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Layout | None:
        """The layout of ``x[..., start:stop:step, ...]``, or None where the cut falls inside a tile."""
        if not 0 <= axis < self.rank or step < 1 or not 0 <= start < stop <= self.shape[axis]:
            raise LayoutError(f"slice {start}:{stop}:{step} of axis {axis} does not fit shape {self.shape}")
        if start == 0 and stop == self.shape[axis] and step == 1:
            return self
        values = radix.along(self._digits(axis), stop, len(self.size))[start:stop:step]
        digits = radix.recover(values)
        if digits is None:
            return None
        base = tuple(b + int(shift) for b, shift in zip(self.base, values[0], strict=True))
        modes = [m for m in self.modes if m.axis != axis] + [Mode(axis, e, s, d) for e, s, d in digits]
        shape = (*self.shape[:axis], len(values), *self.shape[axis + 1 :])
        if any(reach > size for reach, size in zip(_reach(modes, base), self.size, strict=True)):
            return None  # the digits exist, but counting them to their end would leave the storage
        return Layout.build(shape, modes, self.size, base)

    def reshape(self, shape: tuple[int, ...]) -> Layout | None:
        """The layout of ``x.reshape(shape)``, or None where a new axis would cut a tile or cross padding."""
        if prod(shape) != prod(self.shape):
            raise LayoutError(f"cannot reshape {self.shape} to {shape}: {prod(self.shape)} elements != {prod(shape)}")
        return _reshape(self, tuple(shape))

    # ---- code -------------------------------------------------------------------------------------------------

    def c_exprs(self, *names: str) -> tuple[str, ...]:
        """OpenCL C index expressions, one per storage dimension, over non-negative int coordinates ``names``."""
        if len(names) != self.rank:
            raise LayoutError(f"c_expr of a rank-{self.rank} layout got {len(names)} names")
        terms: list[list[str]] = [[str(b)] if b else [] for b in self.base]
        for axis, name in enumerate(names):
            modes = self.axis_modes(axis)
            inner = 1
            parts = []
            for position, mode in reversed(list(enumerate(modes))):
                if mode.stride:
                    parts.append((mode.dim, _digit(name, inner, mode.extent if position else None, mode.stride)))
                inner *= mode.extent
            for dim, text in reversed(parts):
                terms[dim].append(text)
        return tuple("(" + ("+".join(t) or "0") + ")" for t in terms)

    def c_expr(self, *names: str) -> str:
        """The element index expression of a buffer (``c_exprs`` serves images)."""
        if self.is_image:
            raise LayoutError("an image has a row, a column and a lane expression: use c_exprs")
        return self.c_exprs(*names)[0]

    def coords_c_expr(self, index: str) -> tuple[str, ...]:
        """The inverse of a compact layout: C expressions of the coordinates stored at element ``index``."""
        if not self.is_compact():
            raise LayoutError(f"layout {self} is not compact: storage positions have no unique coordinate")
        out = []
        for axis in range(self.rank):
            inner, parts = 1, []
            for mode in reversed(self.axis_modes(axis)):
                whole = mode.stride * mode.extent == self.size[0]
                parts.append(_digit(index, mode.stride, None if whole else mode.extent, inner))
                inner *= mode.extent
            out.append("(" + ("+".join(reversed(parts)) or "0") + ")")
        return tuple(out)

    def describe(self) -> str:
        """A short name for people: row-major(6,8), tile 4x4, or the modes."""
        return _describe(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        # No HTML: notebooks would prefer it, and GitHub takes pictures out of it.
        from layoutopt.display_layout import layout_svg

        return {"image/svg+xml": layout_svg(self)}


def _digit(name: str, inner: int, extent: int | None, scale: int) -> str:
    """``name / inner % extent * scale`` in C, shifts and masks where the numbers are powers of two."""
    text = name
    if inner > 1:
        text = f"({text}>>{inner.bit_length() - 1})" if inner & (inner - 1) == 0 else f"({text}/{inner})"
    if extent is not None:
        text = f"({text}&{extent - 1})" if extent & (extent - 1) == 0 else f"({text}%{extent})"
    return text if scale == 1 else f"{text}*{scale}"


@lru_cache(maxsize=65536)
def _compact(shape: tuple[int, ...], dims: tuple[tuple[tuple[int, int | None], ...], ...]) -> Layout:
    fixed = [1] * len(shape)
    rests = [axis for dim in dims for axis, extent in dim if extent is None]
    for axis, extent in (digit for dim in dims for digit in dim):
        if not 0 <= axis < len(shape) or (extent is not None and extent < 1) or rests.count(axis) > 1:
            allowed = f"an axis in 0..{len(shape) - 1}, an extent >= 1 and at most one None an axis"
            raise LayoutError(f"digit {(axis, extent)} over shape {shape}: expected {allowed}")
        fixed[axis] *= extent or 1
    modes: list[Mode] = []
    sizes = []
    for d, digits in enumerate(dims):
        stride, placed = 1, []
        for axis, extent in reversed(digits):
            n = extent if extent is not None else -(-shape[axis] // fixed[axis])
            placed.append(Mode(axis, n, stride, d))
            stride *= n
        modes += reversed(placed)
        sizes.append(stride)
    return Layout.build(shape, modes, tuple(sizes))


@lru_cache(maxsize=65536)
def _permute(layout: Layout, order: tuple[int, ...]) -> Layout:
    if sorted(order) != list(range(layout.rank)):
        raise LayoutError(f"permute {order} is not a permutation of the {layout.rank} axes of {layout.shape}")
    # Digits of an axis stay as they were, so that the result is canonical as it is.
    modes = tuple(Mode(i, m.extent, m.stride, m.dim) for i, axis in enumerate(order) for m in layout.axis_modes(axis))
    return Layout(tuple(layout.shape[a] for a in order), modes, layout.size, layout.base)


@lru_cache(maxsize=65536)
def _alignment(layout: Layout, axis: int) -> int:
    value = gcd(16, layout.base[-1], LANES if layout.is_image else 0)
    own = layout.axis_modes(axis)
    last_dim = len(layout.size) - 1
    for mode in layout.modes:
        within_run = own and mode == own[-1] and mode.stride == 1
        if mode.dim == last_dim and not within_run:
            value = gcd(value, mode.stride)
    return value


@lru_cache(maxsize=65536)
def _reshape(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """Walk both shapes from the inside; merge, group by group, the old axes into one run of digits and cut it anew.

    A group ends where its old and its new axes count the same number of values.
    """
    if shape == layout.shape:
        return layout
    old = [axis for axis, n in enumerate(layout.shape) if n > 1]
    new = [axis for axis, n in enumerate(shape) if n > 1]
    modes: list[Mode] = []
    while new:
        digits: list[radix.Digit] = []
        group: list[int] = []
        had = wanted = 1
        while not group or had != wanted:
            if had <= wanted and old:
                exact = radix.shrink(digits, had)
                if exact is None:
                    return None  # padding would fall inside the merged axis
                axis = old.pop()
                digits = radix.merge(layout._digits(axis) + exact)
                had *= layout.shape[axis]
            else:
                group.append(new.pop())
                wanted *= shape[group[-1]]
        for axis in group[:-1]:
            cut = radix.split(digits, shape[axis]) or radix.split(radix.shrink(digits, had) or [], shape[axis])
            if cut is None:
                return None  # a tile would be torn
            had //= shape[axis]
            digits = cut[0]
            modes += [Mode(axis, *digit) for digit in cut[1]]
        modes += [Mode(group[-1], *digit) for digit in digits]
    return Layout.build(shape, modes, layout.size, layout.base)


def _describe(layout: Layout) -> str:
    dims = "image " if layout.is_image else ""
    per_axis = []
    for axis in range(layout.rank):
        modes = layout.axis_modes(axis)
        per_axis.append("·".join(f"{m.extent}:{m.stride}" + ("" if m.dim == 0 else "rcl"[m.dim]) for m in modes) or "1")
    if not layout.is_image and layout == Layout.row_major(layout.shape):
        return f"row-major{list(layout.shape)}"
    return f"{dims}[{', '.join(per_axis)}]"
