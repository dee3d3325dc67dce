"""Reductions, gather and scatter-add, concatenation and iota on every device, and their nests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.families.indexing import INDEXING
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, OpSpec
from kernels.testing import PreparedKernel, check_kernel
from layoutopt.layout import Layout
from tests.kernel_cases import GPU_LIMITS, MATRIX_LAYOUTS, check_all, kernels_of, make_spec, touched

CPU = DeviceLimits(kind="cpu", simd_width=16)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def laid_out(spec: OpSpec, name: str) -> list[Layout]:
    return [MATRIX_LAYOUTS[name](s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes]


# ---- reductions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "name", "fn"),
    [
        ((70, 200), "transposed", "sum"),
        ((19, 37), "row-major", "mean"),
        ((19, 37), "r-tile 4x4", "max"),
        ((1, 513), "row-major", "sum"),
        ((100, 1), "row panels", "max"),
        ((37, 130), "row panels", "mean"),
        ((20, 33), "head", "max"),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else x,
)
def test_reduce(device_index: int, shape: tuple[int, int], name: str, fn: str) -> None:
    x = normal(*shape) - 3
    spec = make_spec("reduce", [x], [shape[:1]], {"fn": fn})
    check_all(device_index, spec, laid_out(spec, name), [x])


def test_reduce_of_integers_and_nan(device_index: int) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (20, 37), dtype=np.int32)
    for fn in ("sum", "max"):
        spec = make_spec("reduce", [x], [(20,)], {"fn": fn}, ["int32"])
        for name in ("row-major", "transposed"):
            check_all(device_index, spec, laid_out(spec, name), [x])
    y = normal(20, 37)
    y[3, 30] = np.nan
    spec = make_spec("reduce", [y], [(20,)], {"fn": "max"})
    check_all(device_index, spec, laid_out(spec, "row-major"), [y])


@pytest.mark.parametrize("name", ["row-major", "transposed"])
@pytest.mark.parametrize(
    ("shape", "fn"), [((150, 1003), "sum"), ((1, 4099), "max"), ((385, 516), "mean"), ((3, 2), "sum")]
)
def test_reductions_cut_for_a_large_gpu(device_index: int, shape: tuple[int, int], name: str, fn: str) -> None:
    x = normal(*shape)
    limits = replace(GPU_LIMITS, compute_units=132)
    axes = {"sum": x.sum, "max": x.max, "mean": x.mean}
    expected = axes[fn](1, dtype=np.float64) if fn != "max" else x.max(1)
    spec = make_spec("reduce", [x], [shape[:1]], {"fn": fn})
    kernels = kernels_of(spec, laid_out(spec, name), limits)
    for kernel in kernels:
        prepared = PreparedKernel(devices()[device_index].handle, kernel, [x])
        prepared.run()
        (got,) = prepared.outputs()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(x).sum(1).max() / 100)
        prepared.run()
        np.testing.assert_array_equal(prepared.outputs()[0], got)
    if shape[1] > 1000 and name == "transposed" and shape[0] > 1:
        assert {len(k.launches) for k in kernels if k.variant.name == "block"} == {1, 2}


@pytest.mark.parametrize(
    ("shape", "name"), [((130, 70), "row-major"), ((19, 37), "r-tile 4x4"), ((64, 20), "transposed")]
)
def test_layer_norm_affine(device_index: int, shape: tuple[int, int], name: str) -> None:
    inputs = [normal(*shape), normal(*shape, seed=1) + 2, normal(shape[0], seed=2), np.abs(normal(shape[0], seed=3))]
    spec = make_spec("layer_norm_affine", inputs, [shape[1:]] * 2)
    check_all(device_index, spec, laid_out(spec, name), inputs)
    for kernel in kernels_of(spec, laid_out(spec, name), replace(GPU_LIMITS, compute_units=132)):
        expected = evaluate("layer_norm_affine", {}, [x.astype(np.float64) for x in inputs], spec.shapes[4:])
        check_kernel(devices()[device_index].handle, kernel, inputs, expected)


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "name"), [(37, "row-major"), (64, "column panels"), (20, "transposed"), (13, "r-tile 4x4")]
)
def test_gather_and_scatter_add(device_index: int, d: int, name: str) -> None:
    rows, n = 23, 50
    ids = np.random.default_rng(d).integers(0, rows, n).astype(np.int32)
    ids[:5] = 4  # a row that is hit often, at once
    table, dy = normal(rows, d), normal(n, d, seed=1)
    gather = make_spec("gather", [table, ids], [(n, d)])
    check_all(device_index, gather, laid_out(gather, name), [table, ids])
    scatter = make_spec("scatter_add", [dy, ids], [(rows, d)], {"padding_idx": 4 if d == 37 else -1})
    ran = check_all(device_index, scatter, laid_out(scatter, name), [dy, ids])
    assert ran == {"block", "columns", "rows"}


@pytest.mark.parametrize(
    ("targets", "n", "d", "name"),
    [(2, 517, 37, "row-major"), (1, 64, 8, "row-major"), (64, 300, 130, "pitch"), (13, 211, 20, "transposed")],
)
def test_scatter_add_to_few_rows(device_index: int, targets: int, n: int, d: int, name: str) -> None:
    ids = np.random.default_rng(d).integers(0, targets, n).astype(np.int32)
    dy = normal(n, d, seed=1)
    for padding in (-1, targets - 1):
        spec = make_spec("scatter_add", [dy, ids], [(targets, d)], {"padding_idx": padding})
        ran = check_all(device_index, spec, laid_out(spec, name), [dy, ids])
        assert ran == {"block", "columns", "rows", "parts"}
    splits = [v.param("split") for v in INDEXING.variants(spec, GPU_LIMITS) if v.name == "parts"]
    assert min(splits) == 1
    assert n < 200 or max(splits) > 1


@pytest.mark.parametrize(("targets", "n"), [(2500, 2048), (300, 3000), (5, 2049)])
def test_scatter_add_over_more_ids_than_are_looked_through_at_once(device_index: int, targets: int, n: int) -> None:
    rng = np.random.default_rng(n)
    ids = rng.integers(0, targets, n).astype(np.int32)
    ids[rng.random(n) < 0.2] = targets // 2  # everywhere, and many in a row
    dy = rng.standard_normal((n, 9)).astype(np.float32)
    spec = make_spec("scatter_add", [dy, ids], [(targets, 9)])
    limits = replace(GPU_LIMITS, compute_units=3)
    expected = [np.zeros((targets, 9))]
    np.add.at(expected[0], ids, dy.astype(np.float64))
    for kernel in kernels_of(spec, laid_out(spec, "row-major"), limits):
        check_kernel(devices()[device_index].handle, kernel, [dy, ids], expected)


def test_scatter_add_is_deterministic(device_index: int) -> None:
    """Values of very different size, so that another order of addition would show in the last bits."""
    rows, n, d = 7, 300, 40
    rng = np.random.default_rng(2)
    ids = rng.integers(0, rows, n).astype(np.int32)
    dy = (rng.standard_normal((n, d)) * 10.0 ** rng.integers(-4, 4, (n, d))).astype(np.float32)
    spec = make_spec("scatter_add", [dy, ids], [(rows, d)])
    expected = np.zeros((rows, d), np.float32)
    for i in range(n):
        expected[ids[i]] += dy[i]
    device = devices()[device_index].handle
    for limits in (CPU, GPU_LIMITS):
        for kernel in kernels_of(spec, laid_out(spec, "row-major"), limits):
            prepared = PreparedKernel(device, kernel, [dy, ids])
            prepared.run()
            first = prepared.outputs()[0]
            assert kernel.variant.name == "parts" or np.array_equal(first, expected), kernel.variant.label
            for _ in range(3):
                prepared.run()
                assert np.array_equal(prepared.outputs()[0], first), kernel.variant.label


# ---- concatenation --------------------------------------------------------------------------------------------------


def cubes(name: str, shape: tuple[int, ...]) -> Layout:
    if name == "row-major":
        return Layout.row_major(shape)
    if name == "reversed":
        return Layout.row_major(shape, (2, 1, 0))
    return Layout.r_tile(shape, 4, 4) if name == "r-tile" else Layout.tiled(shape, {1: 16}, (0, 2, 1))


@pytest.mark.parametrize("name", ["row-major", "reversed", "r-tile", "row panels"])
@pytest.mark.parametrize(("starts", "total"), [((1, 8), 17), ((32, 0), 40)])
def test_concat(device_index: int, name: str, starts: tuple[int, ...], total: int) -> None:
    parts = [normal(3, 5, 20), normal(3, 7, 20, seed=1)]
    spec = make_spec("concat", parts, [(3, total, 20)], {"starts": starts})
    check_all(device_index, spec, [cubes(name, s) for s in spec.shapes], parts)


def test_concat_of_integers_and_bools(device_index: int) -> None:
    for dtype in ("int32", "bool"):
        part = (np.arange(30).reshape(2, 3, 5) % 2).astype(np.int32 if dtype == "int32" else bool)
        spec = make_spec("concat", [part], [(2, 6, 5)], {"starts": (2,)}, [dtype])
        check_all(device_index, spec, [cubes("row-major", s) for s in spec.shapes], [part])


@pytest.mark.parametrize(("dtype", "start", "step"), [("int32", 3, 2), ("int32", -5, -1), ("float32", 0, 0.5)])
def test_iota(device_index: int, dtype: str, start: float, step: float) -> None:
    spec = make_spec("iota", [], [(37,)], {"start": start, "step": step}, [dtype])
    check_all(device_index, spec, [Layout.row_major((37,))], [])


# ---- host: nests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["row-major", "transposed", "row panels"])
def test_nests_read_and_write_every_element_once(name: str, limits: DeviceLimits) -> None:
    x, vector = normal(37, 70), normal(37)
    specs = [
        make_spec("reduce", [x], [(37,)], {"fn": "sum"}),
        make_spec("layer_norm_affine", [x, x, vector, vector], [(70,), (70,)]),
        make_spec("gather", [x, np.arange(37, dtype=np.int32)], [(37, 70)]),
        make_spec("scatter_add", [x, np.arange(37, dtype=np.int32)], [(37, 70)]),
        make_spec("scatter_add", [x, np.arange(37, dtype=np.int32) % 5], [(5, 70)]),
    ]
    for spec in specs:
        layouts = laid_out(spec, name)
        data = {1: np.arange(37) % spec.shapes[-1][0]}
        for kernel in kernels_of(spec, layouts, limits):
            for position, layout in enumerate(layouts):
                write = position >= spec.inputs
                if not write and layout.rank < 2:
                    continue
                got = [o for launch in kernel.launches for o in touched(kernel, launch.nest, position, write, data)]
                wanted = sorted(layout.offsets().ravel().tolist())
                # Zeroed, then added to; read four at a time, of which the first may stand for others.
                if kernel.variant.name in (("block", "columns") if write else ("rows",)):
                    assert sorted(set(got)) == wanted, kernel.variant.label
                else:
                    assert sorted(got) == wanted, (spec.kind, position, kernel.variant.label)


def test_nests_of_concat_write_every_element_once() -> None:
    parts = [normal(3, 5, 20), normal(3, 7, 20)]
    spec = make_spec("concat", parts, [(3, 17, 20)], {"starts": (1, 8)})
    for name in ("row-major", "r-tile", "row panels"):
        layouts = [cubes(name, s) for s in spec.shapes]
        for limits in (CPU, GPU_LIMITS):
            for kernel in kernels_of(spec, layouts, limits):
                got = [o for launch in kernel.launches for o in touched(kernel, launch.nest, 2, True, {})]
                assert sorted(got) == sorted(layouts[2].offsets().ravel().tolist()), kernel.variant.label
