"""Contractions staged through local memory: every block on odd shapes and layouts, and their nests by brute force."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from kernels.families.contraction_staged import BLOCKS, build_staged, staged_variants
from kernels.nest import Index
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from kernels.testing import check_kernel, opencl_devices
from layoutopt.layout import Layout

MAKES = {
    "rows": Layout.row_major,
    "columns": lambda shape: Layout.row_major(shape, (0, 2, 1)),
    "tiles": lambda shape: Layout.r_tile(shape, 4, 4),
    "tall": lambda shape: Layout.r_tile(shape, 8, 4, inner="col"),
}
MIXES = (
    ("rows", "rows", "rows"),
    ("columns", "rows", "rows"),
    ("rows", "columns", "columns"),
    ("tiles", "tiles", "tiles"),
    ("tall", "tiles", "columns"),
)
SHAPES = ((1, 128, 64, 128), (2, 67, 53, 71), (1, 132, 36, 72), (3, 33, 130, 36))


def built(shape: tuple[int, ...], block: tuple[int, ...], mix: tuple[str, ...], q: int) -> Kernel | None:
    b, m, k, n = shape
    spec = OpSpec("contraction", ((b, m, k), (b, k, n), (b, m, n)), ("float32",) * 3, 2, (("alpha", 0.5),))
    params = dict(zip(("bm", "bn", "bk", "tm", "tn", "slices"), block, strict=True)) | {"q": q}
    layouts = tuple(MAKES[name](s) for name, s in zip(mix, spec.shapes, strict=True))
    return build_staged(KernelVariant("contraction", "staged", tuple(params.items())), spec, layouts)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: "x".join(map(str, b)))
def test_values(block: tuple[int, ...], device_index: int) -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for i, (shape, (j, mix)) in enumerate(product(SHAPES, enumerate(MIXES))):
        kernel = built(shape, block, mix, (1, 3, 2)[i % 3])
        if kernel is None or (i + 2 * j) % 5:
            continue
        a, b = (rng.standard_normal(s).astype(np.float32) for s in kernel.spec.shapes[:2])
        expected = 0.5 * (a.astype(np.float64) @ b.astype(np.float64))
        check_kernel(opencl_devices()[device_index], kernel, [a, b], [expected], rtol=1e-5)
        checked += 1
    assert checked >= 3


def value(index: Index, at: dict[str, int]) -> int:
    return index.const + sum(
        t.coef * (at[t.loop] // t.div % t.mod if t.mod else at[t.loop] // t.div) for t in index.terms
    )


@pytest.mark.parametrize("block", [(32, 32, 32, 4, 4, 1), (32, 64, 32, 4, 4, 2)], ids=["whole", "slices"])
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[2]], ids=["rows", "columns"])
def test_nest_touches_what_it_must(block: tuple[int, ...], q: int, mix: tuple[str, ...]) -> None:
    """Each block of work groups loads each of its elements once; every output (or partial sum) is stored once."""
    shape = (1, 40, 68, 36)
    kernel = built(shape, block, mix, q)
    assert kernel is not None
    touched: dict[int, Counter[tuple[int, ...]]] = {}
    launch = kernel.launches[0]
    assert launch.nest.items == np.prod(launch.local_size)
    assert launch.nest.groups == np.prod(launch.global_size) // launch.nest.items
    for phase in launch.nest.phases:
        for access in phase.accesses:
            depth = len(phase.loops) if access.depth < 0 else access.depth
            loops = (*launch.nest.grid, *phase.loops[:depth])
            limits = kernel.launch_layout(launch, access.operand).shape
            for values in product(*(range(loop.extent) for loop in loops)):
                at = dict(zip((loop.name for loop in loops), values, strict=True))
                place = [value(x, at) for x in access.index if isinstance(x, Index)]
                for lane in range(access.width):
                    element = tuple(c + lane * (axis == access.axis) for axis, c in enumerate(place))
                    if all(c < n for c, n in zip(element, limits, strict=True)):
                        touched.setdefault(access.operand, Counter())[element] += 1
    b, m, k, n = shape
    views = kernel.views or kernel.layouts
    rows, cols = views[2].shape[1:]
    repeats = {0: -(-cols // block[1]), 1: -(-rows // block[0])}
    x, y = (1, 0) if kernel.views else (0, 1)
    assert set(touched[x].values()) == {repeats[0]}
    assert set(touched[y].values()) == {repeats[1]}
    assert len(touched[0]) == b * m * k
    assert len(touched[1]) == b * k * n
    target = 3 if q > 1 else 2
    assert set(touched[target].values()) == {1}
    assert len(touched[target]) >= q * b * m * n


def test_k_is_split_where_the_output_is_small() -> None:
    gpu = DeviceLimits(kind="gpu", compute_units=132, local_mem_bytes=49152, simd_width=32)

    def splits(m: int, k: int, n: int) -> set[int]:
        spec = OpSpec("contraction", ((1, m, k), (1, k, n), (1, m, n)), ("float32",) * 3, 2)
        return {v.param("q") for v in staged_variants(spec, gpu)}

    assert splits(4096, 4096, 4096) == {1}
    assert max(splits(1024, 1536, 384)) >= 8
    assert splits(1024, 16, 384) == {1}
    small = DeviceLimits(kind="gpu", local_mem_bytes=16384)
    spec = OpSpec(
        "contraction",
        (
            (
                1,
                512,
                64,
            ),
            (1, 64, 512),
            (1, 512, 512),
        ),
        ("float32",) * 3,
        2,
    )
    for v in staged_variants(spec, small):
        assert 2 * v.param("bk") * (v.param("bm") + v.param("bn") + 8) * 4 <= 16384
