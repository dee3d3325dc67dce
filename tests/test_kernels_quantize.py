"""Numbers in few bits on every device: quantising and back, look-ups, and products with quantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kernels.families.quantized_contraction import QUANTIZED_CONTRACTION
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, OpSpec
from kernels.testing import PreparedKernel, check_kernels, limits_of
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from layoutopt.quantize import Format, groups_per_row, quantise, words_per_row
from tests.kernel_cases import GPU_LIMITS, MATRIX_LAYOUTS, check_all, kernels_of, make_spec
from tests.test_kernels_epilogue import BIAS, GELU, RESIDUAL

CASES = (
    ("int8", (13, 67), "row-major"),
    ("int8:16", (37, 200), "transposed"),
    ("int4:64", (5, 64), "r-tile 4x4"),
    ("int4", (1, 5), "row-major"),
    ("fp4:24", (13, 67), "pitch"),
    ("nf4:64", (37, 200), "row-major"),
    ("nf4", (3, 31), "r-tile 4x4"),
)
"""Formats over sizes that divide by nothing, and a layout of the numbers."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_of(shape: tuple[int, int], fmt: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Quantised rows, one of them of zeros."""
    x = normal(*shape, seed=seed)
    x[shape[0] // 2] = 0
    return quantise(x, Format.parse(fmt))


def laid_out(spec: OpSpec, name: str, positions: tuple[int, ...]) -> list[Layout]:
    """Row-major but for some operands."""
    return [MATRIX_LAYOUTS[name](s) if i in positions else Layout.row_major(s) for i, s in enumerate(spec.shapes)]


# ---- rows -----------------------------------------------------------------------------------------------------------


def quantize_spec(x: np.ndarray, fmt: str) -> OpSpec:
    words, scales = quantise(x, Format.parse(fmt))
    return make_spec("quantize", [x], [words.shape, scales.shape], {"format": fmt}, ["int32", "float32"])


@pytest.mark.parametrize(("fmt", "shape", "name"), CASES)
def test_quantize(device_index: int, fmt: str, shape: tuple[int, int], name: str) -> None:
    x = normal(*shape) * np.float32(3)
    x[shape[0] // 2] = 0
    spec = quantize_spec(x, fmt)
    check_all(device_index, spec, laid_out(spec, name, (0,)), [x], rtol=1e-6)


@pytest.mark.parametrize(("fmt", "shape", "name"), CASES)
def test_dequantize_and_gather(device_index: int, fmt: str, shape: tuple[int, int], name: str) -> None:
    words, scales = rows_of(shape, fmt)
    ids = np.random.default_rng(1).integers(0, shape[0], 29).astype(np.int32)
    plain = make_spec("dequantize", [words, scales], [shape], {"format": fmt})
    rows = make_spec("quantized_gather", [words, scales, ids], [(29, shape[1])], {"format": fmt})
    check_all(device_index, plain, laid_out(plain, name, (2,)), [words, scales], rtol=1e-6)
    check_all(device_index, rows, laid_out(rows, name, (3,)), [words, scales, ids], rtol=1e-6)


@pytest.mark.parametrize("fmt", ["int8:8", "nf4:64", "int4"])
def test_a_number_that_is_none_shows_in_its_group_alone(device_index: int, fmt: str) -> None:
    shape = 3, 96
    group = Format.parse(fmt).group or shape[1]
    for bad in (np.nan, np.inf, -np.inf):
        x = normal(*shape)
        x[1, 70] = bad
        spec = quantize_spec(np.zeros(shape, np.float32), fmt)
        for limits in (DeviceLimits(kind="cpu", simd_width=8), GPU_LIMITS):
            for kernel in kernels_of(spec, laid_out(spec, "row-major", ()), limits):
                prepared = PreparedKernel(devices()[device_index].handle, kernel, [x])
                prepared.run()
                _, scales = prepared.outputs()
                expected = np.ones(scales.shape, bool)
                expected[1, 70 // group] = False
                np.testing.assert_array_equal(np.isfinite(scales), expected)


# ---- products -------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[Expr | None, int, int]] = {
    "plain": (None, 0, 1),
    "bias": (BIAS, 1, 1),
    "gelu": (GELU, 1, 2),
    "residual": (RESIDUAL, 2, 1),
}
"""Epilogue, further operands (the first a row), outputs."""


def product(
    shape: tuple[int, int, int], fmt: str, program: str = "plain", alpha: float = 0.5
) -> tuple[OpSpec, list[np.ndarray]]:
    """A product of activations and quantised weights; (m, k, n)."""
    m, k, n = shape
    expr, extras, outputs = PROGRAMS[program]
    inputs = [normal(m, k), *rows_of((n, k), fmt, seed=1)]
    inputs += [np.broadcast_to(normal(1, n, seed=2), (m, n)), normal(m, n, seed=3)][:extras]
    attrs = {"format": fmt, "alpha": alpha} | ({"epilogue": expr} if expr else {})
    return make_spec("quantized_contraction", inputs, [(m, n)] * outputs, attrs), inputs


def layouts_of(spec: OpSpec, name: str) -> list[Layout]:
    """Activations laid out so; weights by rows, a bias as a row that is broadcast."""
    return [
        Layout.row_major(s)
        if i in (1, 2)
        else Layout.row_major((1, s[1])).expand(s)
        if i == 3 < spec.inputs
        else MATRIX_LAYOUTS[name](s)
        for i, s in enumerate(spec.shapes)
    ]


def check_product(
    device_index: int, spec: OpSpec, layouts: list[Layout], inputs: list[np.ndarray], every: bool = False
) -> set[str]:
    """Check every variant, or the first and the last of each name; the names."""
    device = devices()[device_index].handle
    chosen = {}
    for limits in (limits_of(device), GPU_LIMITS):
        made = kernels_of(spec, layouts, limits)
        ends = [*{k.variant.name: k for k in made}.values(), *{k.variant.name: k for k in made[::-1]}.values()]
        chosen |= {k.key: k for k in (made if every else ends)}
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    check_kernels(device, list(chosen.values()), inputs, expected, 2e-5)
    return {kernel.variant.name for kernel in chosen.values()}


@pytest.mark.parametrize(
    ("shape", "fmt"),
    [
        ((37, 53, 41), "int8"),
        ((16, 64, 32), "nf4:64"),
        ((3, 300, 70), "int4:24"),
        ((1, 130, 5), "fp4:8"),
        ((65, 8, 2), "int8:256"),
        ((21, 150, 130), "nf4:64"),
    ],
)
def test_products_of_odd_sizes(device_index: int, shape: tuple[int, int, int], fmt: str) -> None:
    spec, inputs = product(shape, fmt)
    check_product(device_index, spec, layouts_of(spec, "row-major"), inputs, every=True)


@pytest.mark.parametrize(
    ("name", "fmt"),
    [("transposed", "int8"), ("r-tile 8x16 by columns", "nf4:64"), ("row panels", "nf4:64"), ("head", "int8")],
)
def test_any_layout_of_the_activations(device_index: int, name: str, fmt: str) -> None:
    spec, inputs = product((20, 144, 50), fmt)
    check_product(device_index, spec, layouts_of(spec, name), inputs)


@pytest.mark.parametrize(("program", "name"), [("bias", "r-tile 4x4"), ("gelu", "row-major"), ("residual", "pitch")])
def test_epilogues(device_index: int, program: str, name: str) -> None:
    spec, inputs = product((37, 72, 41), "nf4:64" if program == "bias" else "int8", program)
    check_product(device_index, spec, layouts_of(spec, name), inputs)


@pytest.mark.parametrize("fmt", ["int8", "nf4:64"])
def test_weights_in_another_layout(device_index: int, fmt: str) -> None:
    """Words by columns, as vectors would like them; nothing proposes it, and it is right."""
    spec, inputs = product((21, 144, 40), fmt)
    layouts = layouts_of(spec, "row-major")
    layouts[1], layouts[2] = (Layout.row_major(spec.shapes[i], (1, 0)) for i in (1, 2))
    check_product(device_index, spec, layouts, inputs)


@pytest.mark.parametrize(("fmt", "k"), [("nf4:64", 520), ("int8:512", 512), ("int4:40", 137), ("int8:136", 520)])
def test_blocks_of_k(device_index: int, fmt: str, k: int) -> None:
    """Several blocks, groups of a block and blocks of a group, with and without a rest."""
    spec, inputs = product((19, k, 24), fmt)
    check_product(device_index, spec, layouts_of(spec, "row-major"), inputs)


def variants(shape: tuple[int, int, int], fmt: str) -> Iterator[tuple[DeviceLimits, dict[str, int]]]:
    m, k, n = shape
    words, groups = words_per_row(Format.parse(fmt), k), groups_per_row(Format.parse(fmt), k)
    dtypes = ("float32", "int32", "float32", "float32")
    shapes = ((m, k), (n, words), (n, groups), (m, n))
    spec = OpSpec("quantized_contraction", shapes, dtypes, 3, (("format", fmt),))
    for limits in (DeviceLimits(kind="cpu", simd_width=16), DeviceLimits(kind="cpu", simd_width=4), GPU_LIMITS):
        for variant in QUANTIZED_CONTRACTION.variants(spec, limits):
            yield limits, dict(variant.params)


@pytest.mark.parametrize("shape", [(1, 64, 2), (1, 64, 9), (512, 384, 1536), (16, 5, 40), (200, 4096, 11008)])
def test_what_variants_take(shape: tuple[int, int, int]) -> None:
    for fmt in ("int8", "nf4:64", "int8:136", "int4:512"):
        kinds = set()
        for limits, p in variants(shape, fmt):
            kinds.add(limits.kind)
            if "bm" in p:
                continue  # staged: the float32 product's own
            group = Format.parse(fmt).group or p["kb"]
            assert p["kb"] % 8 == 0
            assert p["kb"] % group == 0 or group % p["kb"] == 0 or p["kb"] >= shape[1]
            assert p["gr"] * p["gc"] <= limits.max_work_group_size
            assert p["gr"] * p["gc"] == 1 or p["kb"] * p["gc"] * p["nv"] * 16 <= limits.local_mem_bytes
            assert p["mr"] * p["t"] < 2 * max(shape[0], 256)
        assert kinds == {"cpu", "gpu"}


def test_the_reference_multiplies_by_what_the_codes_stand_for() -> None:
    spec, (a, words, scales, bias) = product((4, 70, 6), "nf4:64", "bias", alpha=2.0)
    (weights,) = evaluate("dequantize", {"format": "nf4:64"}, [words, scales], [(6, 70)])
    (got,) = evaluate(spec.kind, dict(spec.attrs), [a, words, scales, bias], [(4, 6)])
    np.testing.assert_allclose(got, 2.0 * a.astype(np.float64) @ weights.T + bias, rtol=1e-12)
