"""Packing against the layout's own offsets, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.pack import pack, poison_padding, unpack
from layoutopt.errors import LayoutError
from layoutopt.layout import Layout, Mode

LAYOUTS = {
    "scalar": Layout.row_major(()),
    "row-major": Layout.row_major((3, 5, 7)),
    "column-major": Layout.row_major((5, 7), (1, 0)),
    "r-tile": Layout.r_tile((13, 10), 4, 4),
    "r-tile, columns first": Layout.r_tile((2, 13, 9), 2, 8, inner="col", outer="col"),
    "tiles larger than the axis": Layout.r_tile((3, 5), 8, 8),
    "image": Layout.r_tile_image((2, 7, 9), 4),
    "slice with a base": Layout.row_major((6, 8)).slice(1, 3, 8),
    "slack behind": Layout.build((3, 4), [Mode(0, 3, 6), Mode(1, 4, 1)], (40,), (5,)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_pack_agrees_with_offsets(layout: Layout) -> None:
    array = np.arange(1, 1 + int(np.prod(layout.shape)), dtype=np.float32).reshape(layout.shape)
    storage = pack(layout, array, "float32")
    assert storage.shape == (layout.size_elems,)
    assert np.array_equal(storage[layout.linear_offsets()], array)
    assert np.array_equal(unpack(layout, storage, "float32"), array)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_unpack_ignores_padding(layout: Layout) -> None:
    array = np.random.default_rng(0).normal(size=layout.shape).astype(np.float32)
    storage = np.full(layout.size_elems, np.nan, np.float32)
    storage[layout.linear_offsets()] = array
    assert np.array_equal(unpack(layout, storage, "float32"), array)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_poison_falls_on_padding_only(layout: Layout) -> None:
    storage = pack(layout, np.zeros(layout.shape, np.float32), "float32")
    poison_padding(layout, storage)
    assert not np.isnan(storage[layout.linear_offsets()]).any()
    assert np.isnan(storage).sum() == layout.size_elems - int(np.prod(layout.shape))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_other_dtypes(dtype: str) -> None:
    layout = Layout.r_tile((5, 6), 4, 4)
    array = np.random.default_rng(1).integers(0, 2, size=layout.shape)
    array = array.astype(np.bool_) if dtype == "bool" else array.astype(np.int32)
    storage = pack(layout, array, dtype)
    assert storage.dtype.itemsize == (1 if dtype == "bool" else 4)
    back = unpack(layout, storage, dtype)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_results_own_their_memory() -> None:
    layout = Layout.row_major((4,))
    array = np.ones(4, np.float32)
    storage = pack(layout, array, "float32")
    array[:] = 2
    assert storage.tolist() == [1, 1, 1, 1]
    back = unpack(layout, storage, "float32")
    storage[:] = 3
    assert back.tolist() == [1, 1, 1, 1]


def test_wrong_shapes_are_errors() -> None:
    with pytest.raises(LayoutError, match=r"shape \(3,\) into a layout of shape \(4,\)"):
        pack(Layout.row_major((4,)), np.ones(3, np.float32), "float32")
    with pytest.raises(LayoutError, match="the layout has 4 elements"):
        unpack(Layout.row_major((4,)), np.ones(3, np.float32), "float32")
