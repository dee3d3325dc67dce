"""Index expressions as a real compiler understands them: layouts and views on every OpenCL device."""

from __future__ import annotations

from math import prod

import numpy as np

from kernels.runtime import Runtime, devices
from layoutopt import baselines
from layoutopt.layout import Layout
from layoutopt.view import View
from tests.layout_cases import coordinates

WILD = -123456789


def _cases() -> list[Layout]:
    heads = View().then(("reshape", (3, 13, 4, 15)), ("permute", (0, 2, 1, 3)), ("reshape", (12, 13, 15)))
    found = [
        Layout.row_major(()),
        Layout.row_major((7,)),
        Layout.row_major((5, 13, 3), (2, 0, 1), {1: 8}),
        *(
            Layout.r_tile((13, 60), tr, 4, inner, outer)
            for tr in (3, 4)
            for inner in ("row", "col")
            for outer in ("row", "col")
        ),
        Layout.tiled((2, 7, 9), {0: 2, 2: 5}, (2, 1, 0), (2, 0)),
        Layout.r_tile_image((2, 7, 9), 3),
        baselines.mnn_image((2, 7, 3, 5)),
        baselines.tflite_texture((2, 7, 3, 5)),
        baselines.tflite_weights((7, 13)),
        heads.layout(Layout.row_major((39, 60))),
        heads.layout(Layout.r_tile((39, 60), 13, 5)),
        Layout.r_tile((13, 60), 4, 4).slice(0, 4, 13),
        Layout.r_tile_image((7, 16), 2).slice(1, 4, 12),
        Layout.row_major((13, 20)).slice(1, 3, 19, 3),
        Layout.row_major((13, 1)).expand((2, 13, 5)),
    ]
    assert all(layout is not None for layout in found)
    return [layout for layout in found if layout is not None]


def _loops(shape: tuple[int, ...], body: str) -> str:
    heads = "".join(f"for (int i{a} = 0; i{a} < {n}; i{a}++) " for a, n in enumerate(shape))
    return f"{heads}{{ {body} }}"


def _compute(runtime: Runtime, body: str, count: int) -> np.ndarray:
    source = f"__kernel void fill(__global int *restrict out) {{ int at = 0;\n{body}\n}}"
    kernel = runtime.kernel(source, "fill", "test.layouts()")
    out = np.full(count + 1, WILD, dtype=np.int32)
    buffer = runtime.allocate(out.nbytes)
    runtime.upload(buffer, out)
    kernel.set_args(buffer)
    runtime.enqueue([(kernel, (1,), (1,))])
    got = runtime.download(buffer, out)
    assert got[count] == WILD
    return got[:count]


def test_c_exprs_compiled_equal_offsets(device_index: int) -> None:
    cases = _cases()
    bodies, want = [], []
    for layout in cases:
        stores = "".join(f"out[at++] = {e};" for e in layout.c_exprs(*(f"i{a}" for a in range(layout.rank))))
        bodies.append(_loops(layout.shape, stores))
        want.append(coordinates(layout).ravel())
    expected = np.concatenate(want)
    got = _compute(Runtime(devices()[device_index]), "\n".join(bodies), expected.size)
    np.testing.assert_array_equal(got, expected)


def test_coords_c_exprs_compiled_invert_offsets(device_index: int) -> None:
    cases = [layout for layout in _cases() if layout.is_compact() and layout.rank]
    assert len(cases) >= 8
    bodies, want = [], []
    for layout in cases:
        stores = "".join(f"out[at++] = {e};" for e in layout.coords_c_expr("n"))
        bodies.append(f"for (int n = 0; n < {layout.size_elems}; n++) {{ {stores} }}")
        where = np.empty((prod(layout.size), layout.rank), dtype=np.int64)
        where[layout.offsets(padded=True)] = np.moveaxis(np.indices(layout.padded_shape), 0, -1)
        want.append(where.ravel())
    expected = np.concatenate(want)
    got = _compute(Runtime(devices()[device_index]), "\n".join(bodies), expected.size)
    np.testing.assert_array_equal(got, expected)
