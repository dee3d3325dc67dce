"""Logical arrays to storage and back, by strides: what the host does with a layout.

A layout's digits are strides over the storage, so packing is one strided assignment and unpacking one strided read.
Where an axis is padded, the array is first grown to the padded extent with zeros, which nobody relies on.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from layoutopt.errors import LayoutError
from layoutopt.layout import Layout

__all__ = ["STORAGE_DTYPES", "digits_view", "pack", "poison_padding", "unpack"]

STORAGE_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.uint8),
}
"""What a device stores for each dtype of a graph."""


def digits_view(layout: Layout, storage: np.ndarray) -> np.ndarray:
    """The storage under one axis per digit, digits in the order of the logical axes."""
    _, columns, lanes = layout.size if layout.is_image else (1, 1, 1)
    unit = (columns * lanes, lanes, 1)
    start = sum(b * u for b, u in zip(layout.base, unit, strict=True)) if layout.is_image else layout.base[0]
    strides = [m.stride * (unit[m.dim] if layout.is_image else 1) * storage.itemsize for m in layout.modes]
    return as_strided(storage[start:], [m.extent for m in layout.modes], strides)


def _extents(layout: Layout) -> tuple[int, ...]:
    return tuple(m.extent for m in layout.modes)


def pack(layout: Layout, array: np.ndarray, dtype: str, out: np.ndarray | None = None) -> np.ndarray:
    """The storage of ``array``.

    Args:
        layout: where each element goes; its shape is the array's.
        array: logical values.
        dtype: the graph's dtype.
        out: storage to write into, [size_elems]; new zeros by default. What the layout does not cover stays as it is.

    Returns:
        [size_elems] of the device's dtype, never sharing memory with ``array``.

    Raises:
        LayoutError: the array has another shape.
    """
    if array.shape != layout.shape:
        raise LayoutError(f"cannot pack an array of shape {array.shape} into a layout of shape {layout.shape}")
    stored: np.dtype = STORAGE_DTYPES[dtype]
    storage = out if out is not None else np.zeros(layout.size_elems, stored)
    padded = layout.padded_shape
    if padded != layout.shape:
        grown = np.zeros(padded, stored)
        grown[tuple(slice(n) for n in layout.shape)] = array
        array = grown
    digits_view(layout, storage)[...] = array.reshape(_extents(layout))
    return storage


def poison_padding(layout: Layout, storage: np.ndarray) -> None:
    """Fill what no logical element occupies with bytes of 0xFF (NaN, -1), in place: [size_elems] of any dtype."""
    holds_data = pack(layout, np.ones(layout.shape, np.bool_), "bool").astype(np.bool_)
    storage.view(np.uint8).reshape(storage.size, -1)[~holds_data] = 0xFF


def unpack(layout: Layout, storage: np.ndarray, dtype: str) -> np.ndarray:
    """The logical array in ``storage``, [size_elems]; a copy, bool where the graph says bool.

    Raises:
        LayoutError: the storage has another size.
    """
    if storage.shape != (layout.size_elems,):
        raise LayoutError(
            f"cannot unpack storage of shape {storage.shape}; the layout has {layout.size_elems} elements"
        )
    whole = digits_view(layout, storage).reshape(layout.padded_shape)
    array = np.array(whole[tuple(slice(n) for n in layout.shape)])
    return array.astype(np.bool_) if dtype == "bool" else array
