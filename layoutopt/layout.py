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
>>> tiled.modes
(Mode(axis=0, extent=3, stride=16, dim=0), Mode(axis=0, extent=2, stride=4, dim=0), Mode(axis=1, extent=2, stride=8, dim=0), Mode(axis=1, extent=4, stride=1, dim=0))
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
pairs, restricted so that every view is decidable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

import numpy as np

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
        merged: list[Mode] = []
        for mode in (m for m in modes if m.axis == axis and m.extent > 1):
            last = merged[-1] if merged else None
            if last and last.dim == mode.dim and last.stride == mode.extent * mode.stride:
                merged[-1] = replace(mode, extent=last.extent * mode.extent)
            else:
                merged.append(mode)
        out += merged
    return tuple(out)


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
        canonical = _canonical(tuple(shape), list(modes))
        reach = tuple(
            origin[d] + sum((m.extent - 1) * m.stride for m in canonical if m.dim == d) + 1 for d in range(dims)
        )
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
        fixed = [1] * len(shape)
        for axis, extent in (digit for dim in dims for digit in dim):
            fixed[axis] *= extent or 1
        modes, sizes = [], []
        for d, digits in enumerate(dims):
            stride, placed = 1, []
            for axis, extent in reversed(digits):
                n = extent if extent is not None else -(-shape[axis] // fixed[axis])
                placed.append(Mode(axis, n, stride, d))
                stride *= n
            modes += reversed(placed)
            sizes.append(stride)
        return Layout.build(shape, modes, tuple(sizes))

    @staticmethod
    def row_major(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Layout:
        """Dense layout with axes nested in ``order``, outermost first (the axes' own order by default)."""
        return Layout.of(shape, [(axis, None) for axis in (order or range(len(shape)))])

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
        """R-Tile on an image: a tile row of four is a texel, a tile's ``tr`` rows are neighbouring columns of texels."""
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
        return tuple(m for m in self.modes if m.axis == axis)

    def padded(self, axis: int) -> int:
        """The extent of an axis with its padding."""
        return max(prod(m.extent for m in self.axis_modes(axis)), 1)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Extents with padding."""
        return tuple(self.padded(axis) for axis in range(self.rank))

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
            index = np.arange(n, dtype=np.int64)
            along = np.zeros((n, len(self.size)), dtype=np.int64)
            inner = 1
            for mode in reversed(self.axis_modes(axis)):
                along[:, mode.dim] += (index // inner) % mode.extent * mode.stride
                inner *= mode.extent
            out += along.reshape((1,) * axis + (n,) + (1,) * (len(extents) - axis - 1) + (len(self.size),))
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
        offsets = self.linear_offsets()
        return np.unique(offsets).size == offsets.size

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
        """Largest power of two (at most 16) that divides the storage offset of every run start along ``axis``."""
        value = self.base[-1] if self.base[-1] else 16
        modes = list(self.modes)
        own = self.axis_modes(axis)
        if own and own[-1].stride == 1:
            modes.remove(own[-1])
        for mode in modes:
            value = gcd(value, mode.stride) if mode.stride else value
        value = gcd(value, 16)
        return max(value, 1)

    # ---- views: the same storage under new logical axes -----------------------------------------------------------

    def permute(self, order: tuple[int, ...]) -> Layout:
        """The layout of ``x.transpose(order)``; always exists."""
        if sorted(order) != list(range(self.rank)):
            raise LayoutError(f"permute {order} is not a permutation of the {self.rank} axes of {self.shape}")
        position = {axis: i for i, axis in enumerate(order)}
        modes = [replace(m, axis=position[m.axis]) for m in self.modes]
        return Layout.build(tuple(self.shape[a] for a in order), modes, self.size, self.base)

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
        count = -(-(stop - start) // step)
        kept = _cut([(m.extent, m.stride, m.dim) for m in self.axis_modes(axis)], start, count, step)
        if kept is None:
            return None
        digits, shift = kept
        base = tuple(b + shift.get(d, 0) for d, b in enumerate(self.base))
        modes = [m for m in self.modes if m.axis != axis] + [Mode(axis, e, s, d) for e, s, d in digits]
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
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


def _digit(name: str, inner: int, extent: int | None, scale: int) -> str:
    """``name / inner % extent * scale`` in C, shifts and masks where the numbers are powers of two."""
    text = name
    if inner > 1:
        text = f"({text}>>{inner.bit_length() - 1})" if inner & (inner - 1) == 0 else f"({text}/{inner})"
    if extent is not None:
        text = f"({text}&{extent - 1})" if extent & (extent - 1) == 0 else f"({text}%{extent})"
    return text if scale == 1 else f"{text}*{scale}"


_Digit = tuple[int, int, int]


def _cut(digits: list[_Digit], start: int, count: int, step: int) -> tuple[list[_Digit], dict[int, int]] | None:
    """Digits (extent, stride, dim) of ``start + step*x`` for x < count, and the shift per storage dimension."""
    inner = prod(e for e, _, _ in digits)
    shift: dict[int, int] = {}
    position, last = start, start + step * (count - 1)
    rest = list(digits)
    # Outer digits that never change are a constant.
    while rest:
        extent, stride, dim = rest[0]
        inner //= extent
        if position // inner != last // inner:
            inner *= extent
            break
        shift[dim] = shift.get(dim, 0) + position // inner * stride
        position, last = position % inner, last % inner
        rest.pop(0)
    if not rest or count == 1:
        return [], shift
    split = _split(rest, step)
    if split is None:
        return None
    outer, low = split
    # The digits under the step must stay constant, the outermost digit alone may start above zero.
    remainder, whole = position % step, position // step
    weight = step
    for extent, stride, dim in low:
        weight //= extent
        shift[dim] = shift.get(dim, 0) + remainder // weight * stride
        remainder %= weight
    under = prod(e for e, _, _ in outer[1:])
    if whole % under:
        return None
    extent, stride, dim = outer[0]
    first = whole // under
    shift[dim] = shift.get(dim, 0) + first * stride
    return [(min(extent - first, -(-count // under)), stride, dim), *outer[1:]], shift


def _split(digits: list[_Digit], inner: int) -> tuple[list[_Digit], list[_Digit]] | None:
    """Cut digits in two so that the inner part counts exactly ``inner`` values; None if a digit would be torn."""
    low: list[_Digit] = []
    rest, need = list(digits), inner
    while need > 1:
        if not rest:
            return None
        extent, stride, dim = rest.pop()
        if need % extent == 0:
            low.insert(0, (extent, stride, dim))
            need //= extent
        elif extent % need == 0:
            low.insert(0, (need, stride, dim))
            rest.append((extent // need, stride * need, dim))
            need = 1
        else:
            return None
    return rest, low


@lru_cache(maxsize=65536)
def _reshape(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    if shape == layout.shape:
        return layout
    # Each pending axis: logical extent, digits. Matched from the innermost axis outwards.
    pending: list[tuple[int, list[_Digit]]] = [
        (n, [(m.extent, m.stride, m.dim) for m in layout.axis_modes(a)]) for a, n in enumerate(layout.shape)
    ]
    out: list[list[_Digit]] = []
    for target in reversed(shape):
        digits: list[_Digit] = []
        need = target
        while need > 1:
            while pending and pending[-1][0] == 1:
                pending.pop()
            extent, own = pending.pop()
            if extent <= need:
                if need % extent:
                    return None
                need //= extent
                if need > 1 and prod(e for e, _, _ in own) != extent:
                    return None  # padding would fall inside the merged axis
                digits = own + digits
            else:
                if extent % need:
                    return None
                cut = _split(own, need)
                if cut is None:
                    return None
                digits = cut[1] + digits
                pending.append((extent // need, cut[0]))
                need = 1
        out.append(digits)
    modes = [Mode(axis, e, s, d) for axis, digits in enumerate(reversed(out)) for e, s, d in digits]
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
