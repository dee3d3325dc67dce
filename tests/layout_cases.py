"""Random shapes, layouts and view steps, and the exhaustive oracle that decides whether a layout exists at all."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import strategies as st

from layoutopt.layout import LANES, Layout
from layoutopt.view import Step, View

EXTENTS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12])


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 1, max_rank: int = 4, max_elems: int = 400) -> tuple[int, ...]:
    shape: list[int] = []
    for _ in range(draw(st.integers(min_rank, max_rank))):
        fits = max_elems // prod(shape)
        shape.append(min(draw(EXTENTS), fits))
    return tuple(shape)


@st.composite
def buffers(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    axes = tuple(range(len(shape)))
    order = tuple(draw(st.permutations(axes)))
    kinds = ["row_major", "padded", "tiled", "r_tile"] if len(shape) > 1 else ["row_major", "padded", "tiled"]
    match draw(st.sampled_from(kinds)):
        case "row_major":
            return Layout.row_major(shape, order)
        case "padded":
            return Layout.row_major(shape, order, {a: draw(st.integers(1, 5)) for a in axes})
        case "tiled":
            chosen = draw(st.lists(st.sampled_from(axes), unique=True))
            tiles = {a: draw(st.integers(1, 5)) for a in chosen}
            return Layout.tiled(shape, tiles, order, tuple(draw(st.permutations(chosen))))
    return Layout.r_tile(
        shape,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["row", "col"])),
        draw(st.sampled_from(["row", "col"])),
        order[:2],
    )


@st.composite
def images(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    order = draw(st.permutations(range(len(shape))))
    if len(shape) > 1 and draw(st.booleans()):
        return Layout.r_tile_image(shape, draw(st.integers(1, 5)), tuple(order[:2]))
    cut = draw(st.integers(0, len(shape)))
    return Layout.image(shape, [(a, None) for a in order[:cut]], [(a, None) for a in order[cut:]], order[-1])


@st.composite
def layouts(draw: st.DrawFn, **limits: int) -> Layout:
    """Any constructor's layout, a buffer three times in four."""
    shape = draw(shapes(**limits))
    return draw(images(shape) if draw(st.integers(0, 3)) == 0 else buffers(shape))


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...]) -> Step:
    """A view step that fits ``shape``; often one that a tile can survive, often one that tears it."""
    kinds = ["reshape", "reshape", "expand"] + (["permute", "slice"] if shape else [])
    match draw(st.sampled_from(kinds)):
        case "permute":
            return Step("permute", tuple(draw(st.permutations(range(len(shape))))))
        case "slice":
            axis = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, shape[axis] - 1))
            stop = draw(st.integers(start + 1, shape[axis]))
            return Step("slice", (axis, start, stop, draw(st.sampled_from([1, 1, 1, 2, 3, 4]))))
        case "expand":
            grown = tuple(draw(st.integers(1, 3)) if n == 1 else n for n in shape)
            lead = (draw(st.integers(1, 3)),) if len(shape) < 5 and draw(st.booleans()) else ()
            return Step("expand", lead + grown)
    return Step("reshape", draw(factorisations(prod(shape))))


@st.composite
def factorisations(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    out: list[int] = []
    while size > 1 and len(out) < 4:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        out.append(draw(st.sampled_from(divisors)))
        size //= out[-1]
    return (*out, size) if size > 1 or draw(st.booleans()) else tuple(out)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], max_steps: int = 4, max_elems: int = 2000) -> View:
    view = View()
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(steps(view.shape(shape)))
        longer = view.then(step)
        if prod(longer.shape(shape)) <= max_elems:
            view = longer
    return view


def coordinates(layout: Layout, padded: bool = False) -> np.ndarray:
    """``layout.offsets`` with a trailing axis of storage coordinates for buffers too."""
    offsets = layout.offsets(padded)
    return offsets if layout.is_image else offsets[..., None]


def view_coordinates(view: View, values: np.ndarray) -> np.ndarray:
    """A view applied to an array whose last axis holds storage coordinates and stays whole."""
    dims = values.shape[-1]
    for kind, args in view.steps:
        if kind in ("reshape", "expand"):
            args = (*args, dims)
        elif kind == "permute":
            args = (*args, len(args))
        values = View((Step(kind, args),)).array(values)
    return values


def by_definition(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The module docstring's formula, one coordinate at a time."""
    storage = list(layout.base)
    for axis, x in enumerate(coordinate):
        for mode in reversed([m for m in layout.modes if m.axis == axis]):
            storage[mode.dim] += x % mode.extent * mode.stride
            x //= mode.extent
    return tuple(storage)


def exists(values: np.ndarray, size: tuple[int, ...]) -> bool:
    """Whether any mixed-radix layout within ``size`` has these storage coordinates, by trying every one.

    Args:
        values: storage coordinates, shape (extent of each axis…, storage dimensions).
        size: the allocation.
    """
    rank = values.ndim - 1
    origin = values[(0,) * rank]
    lines = [values[tuple(slice(None) if a == axis else 0 for a in range(rank))] - origin for axis in range(rank)]
    total = np.zeros_like(values) + origin
    for axis, line in enumerate(lines):
        total += line.reshape((1,) * axis + (len(line),) + (1,) * (rank - axis - 1) + (len(size),))
    if not np.array_equal(total, values):
        return False
    reaches = [_reaches(line) for line in lines]
    return any((origin + sum(choice, np.zeros_like(origin)) < np.asarray(size)).all() for choice in product(*reaches))


def _reaches(line: np.ndarray) -> list[np.ndarray]:
    """The farthest padded storage coordinate of every list of digits that gives this sequence."""
    out = []
    index = np.arange(len(line))
    for extents in _radices(len(line)):  # innermost first
        inner, got, reach = 1, np.zeros_like(line), np.zeros(line.shape[1], dtype=np.int64)
        fits = True
        for extent in extents:
            stride = line[inner]
            fits &= np.count_nonzero(stride) <= 1 and bool((stride >= 0).all())
            got = got + (index // inner % extent)[:, None] * stride
            reach = reach + (extent - 1) * stride
            inner *= extent
        if fits and np.array_equal(got, line):
            out.append(reach)
    return out


def _radices(count: int) -> list[tuple[int, ...]]:
    """Every list of extents (innermost first, each at least 2) that counts ``count`` values and no whole step more."""
    if count == 1:
        return [()]
    out: list[tuple[int, ...]] = [(count,)]
    for first in range(2, count):
        out += [(first, *rest) for rest in _radices(-(-count // first))]
    return out


def lanes_of(layout: Layout) -> int:
    """The widest vector that the storage allows."""
    return LANES if layout.is_image else 16
