"""Attention kernels on every device beside float64, and their nests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.families.attention_fat import fat_variants
from kernels.families.attention_tile import tile_variants
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from kernels.testing import PreparedKernel, check_kernel, limits_of
from kernels.variants import family_of
from layoutopt.expr import Builder
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from tests.kernel_cases import make_spec, touched

CPU = DeviceLimits(kind="cpu", simd_width=16)
GPU = DeviceLimits(kind="gpu", simd_width=32, local_mem_bytes=48 << 10)
MOST_NEGATIVE = float(np.finfo(np.float32).min)

SAME = Expr((), (("x", 0),))
ADD = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))


def capped() -> tuple[Expr, Expr]:
    """``3 tanh(s / 3) + mask``, and its gradient from (dt, mask, s)."""
    b = Builder(["float", "float", "float"])
    tanh = b.emit("tanh", b.emit("div", ("x", 0), ("c", 3.0)))
    score = b.finish([b.emit("add", b.emit("mul", tanh, ("c", 3.0)), ("x", 1))])
    b = Builder(["float", "float", "float"])
    tanh = b.emit("tanh", b.emit("div", ("x", 2), ("c", 3.0)))
    grad = b.finish([b.emit("mul", ("x", 0), b.emit("sub", ("c", 1.0), b.emit("mul", tanh, tanh)))])
    return score, grad


def dropping(place: int) -> Expr:
    """Input 0 times 0 or 1.25, by a number that depends on the element's place (an int operand)."""
    b = Builder(["float", *["int"] * place])
    uniform = b.emit("rand", ("c", 7), ("c", 3), ("x", place))
    return b.finish(
        [b.emit("mul", ("x", 0), b.emit("where", b.emit("ge", uniform, ("c", 0.2)), ("c", 1.25), ("c", 0.0)))]
    )


def chosen() -> Expr:
    """Scores where a bool mask is true, else the most negative float."""
    return Expr((("where", ("x", 1), ("x", 0), ("c", MOST_NEGATIVE)),), (("t", 0),))


Case = tuple[OpSpec, list[np.ndarray]]


def forward_case(
    sizes: tuple[int, int, int, int, int], extras: list[np.ndarray], attrs: dict[str, Any], scale: float = 1.0
) -> Case:
    b, m, n, d, e = sizes
    rng = np.random.default_rng(sum(sizes))
    q, k, v = (scale * rng.standard_normal(s).astype(np.float32) for s in ((b, m, d), (b, n, d), (b, n, e)))
    inputs = [q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), *extras]
    attrs = {"alpha": d**-0.5, "score": SAME, **attrs}
    return make_spec("attention", inputs, [(b, m, e), (b, m), (b, m)], attrs), inputs


def gradient_case(case: Case, grad: Expr | None = None, beta: float = 0.5) -> Case:
    """The backward op of a forward case; what the forward pass saved is rounded to float32."""
    spec, inputs = case
    (b, m, d), (_, n, _), (_, _, e) = spec.shapes[:3]
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    o, peak, mass = evaluate("attention", dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    do = np.random.default_rng(1).standard_normal((b, m, e))
    saved = [x.astype(np.float32) for x in (o, peak, mass, do)]
    attrs = {**dict(spec.attrs), "beta": beta} | ({"grad": grad} if grad else {})
    inputs = [*inputs[:3], *saved, *inputs[3:]]
    return make_spec("attention_grad", inputs, [(b, m, d), (b, n, d), (b, n, e)], attrs), inputs


def padding(b: int, m: int, n: int) -> np.ndarray:
    """Keys from some place on are masked, for each head elsewhere; seen over all rows."""
    mask = np.zeros((b, 1, n), np.float32)
    for i in range(b):
        mask[i, :, n - 1 - (3 * i) % n :] = MOST_NEGATIVE
    return np.broadcast_to(mask, (b, m, n))


def causal(b: int, m: int, n: int) -> np.ndarray:
    mask = np.where(np.arange(n) <= np.arange(m)[:, None] + n - m, 0, MOST_NEGATIVE).astype(np.float32)
    return np.broadcast_to(mask, (b, m, n))


def laid_out(case: Case, head: Callable[[tuple[int, ...]], Layout]) -> tuple[Layout, ...]:
    """Matrices of features as ``head`` says, masks with stride 0 along an axis that does not matter."""
    spec, inputs = case
    first = 3 if spec.kind == "attention" else 7
    features = {0, 1, 2, spec.inputs} | ({3, 6, spec.inputs + 1, spec.inputs + 2} if first == 7 else set())
    out = [head(s) if p in features else Layout.row_major(s) for p, s in enumerate(spec.shapes)]
    for p in range(first, spec.inputs):
        for axis in (0, 1):
            if (inputs[p] == inputs[p].take([0], axis)).all():
                one = tuple(1 if a == axis else n for a, n in enumerate(spec.shapes[p]))
                out[p] = Layout.row_major(one).expand(spec.shapes[p])
                break
    return tuple(out)


def heads_apart(shape: tuple[int, ...]) -> Layout:
    """[b, rows, features] as a step has it: tokens by rows, the heads' features side by side."""
    b, rows, features = shape
    return Layout.row_major((rows, b, features)).permute((1, 0, 2))


def turned(shape: tuple[int, ...]) -> Layout:
    return Layout.row_major(shape, (0, 2, 1))


def tiled(shape: tuple[int, ...]) -> Layout:
    return Layout.r_tile(shape, 4, 4)


def padded_panels(shape: tuple[int, ...]) -> Layout:
    return Layout.tiled(shape, {1: 16}, (0, 1, 2))


LAYOUTS = {
    "row-major": Layout.row_major,
    "heads": heads_apart,
    "turned": turned,
    "r-tile": tiled,
    "panels": padded_panels,
}


def kernel(variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel:
    out = family_of(spec.kind).build(variant, spec, layouts)
    assert out is not None
    return out


def check(
    device_index: int, case: Case, layouts: tuple[Layout, ...], gpu: bool, most: int = 9, rtol: float = 1e-5
) -> None:
    """The variants of one kind of device, ``most`` of them at most, on this device."""
    spec, inputs = case
    device = devices()[device_index].handle
    limits = GPU if gpu else limits_of(device)
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    for variant in family_of(spec.kind).variants(spec, limits)[:most]:
        check_kernel(device, kernel(variant, spec, layouts), inputs, expected, rtol)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((3, 13, 17, 15, 15), "heads"),
        ((2, 37, 70, 20, 20), "turned"),
        ((1, 19, 33, 64, 64), "r-tile"),
        ((2, 67, 131, 32, 32), "panels"),
        ((2, 1, 5, 3, 7), "row-major"),
        ((1, 20, 40, 130, 130), "row-major"),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else x,
)
def test_forward_and_gradient(device_index: int, sizes: tuple[int, int, int, int, int], name: str, gpu: bool) -> None:
    case = forward_case(sizes, [causal(*sizes[:3])], {"score": ADD})
    most = 2 if gpu else 9
    check(device_index, case, laid_out(case, LAYOUTS[name]), gpu, most)
    back = gradient_case(case)
    check(device_index, back, laid_out(back, LAYOUTS[name]), gpu, most)


@pytest.mark.parametrize("kind", ["attention", "attention_grad"])
def test_every_gpu_block(device_index: int, kind: str) -> None:
    """Rows and keys that no block divides, features in several chunks."""
    case = forward_case((1, 37, 45, 36, 36), [padding(1, 37, 45)], {"score": ADD})
    if kind == "attention_grad":
        case = gradient_case(case)
    spec = case[0]
    variants = tile_variants(spec, GPU)
    assert {v.param("chunk") for v in variants} == {0, 32}
    check(device_index, case, laid_out(case, heads_apart), True)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_programs(device_index: int, gpu: bool) -> None:
    """Soft-capping with its gradient; dropout; a bool mask; each operand in a type and layout of its own."""
    b, m, n, d = 2, 21, 37, 16
    place = np.arange(b * m * n, dtype=np.int32).reshape(b, m, n)
    keep = np.random.default_rng(0).random((b, m, n)) < 0.6
    score, grad = capped()
    cases = [
        (forward_case((b, m, n, d, d), [padding(b, m, n)], {"score": score}, 3.0), grad),
        (forward_case((b, m, n, d, d), [causal(b, m, n), place], {"score": ADD, "drop": dropping(2)}), None),
        (forward_case((b, m, n, d, d), [keep], {"score": chosen()}), None),
    ]
    for case, derivative in cases:
        check(device_index, case, laid_out(case, Layout.row_major), gpu, 1)
        back = gradient_case(case, derivative)
        check(device_index, back, laid_out(back, Layout.row_major), gpu, 1)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_masked_rows_and_columns(device_index: int, gpu: bool) -> None:
    """A row that sees nothing is uniform over all keys; keys that nobody sees get no gradient; scores are large."""
    b, m, n, d = 1, 70, 150, 8
    mask = np.zeros((b, m, n), np.float32)
    mask[:, :, 60:] = MOST_NEGATIVE  # whole blocks of keys
    mask[:, 10] = MOST_NEGATIVE  # a row
    mask[:, 40:, :20] = MOST_NEGATIVE
    case = forward_case((b, m, n, d, d), [mask], {"score": ADD}, 4.0)
    expected = evaluate("attention", dict(case[0].attrs), case[1], case[0].shapes[4:])
    np.testing.assert_allclose(expected[0][0, 10], case[1][2][0].mean(0), atol=1e-6)
    for one in (case, gradient_case(case)):
        check(device_index, one, laid_out(one, Layout.row_major), gpu, 1)


@pytest.mark.parametrize("limits", [CPU, GPU], ids=["cpu", "gpu"])
def test_infinity_masks_and_nan_stays_in_its_row(device_index: int, limits: DeviceLimits) -> None:
    b, m, n, d = 1, 9, 70, 8
    mask = np.zeros((b, m, n), np.float32)
    mask[:, 2, :66] = -np.inf  # the first block of keys holds nothing for this row
    mask[:, 5, 3] = np.nan
    mask[:, 7] = -np.inf
    spec, inputs = forward_case((b, m, n, d, d), [mask], {"score": ADD})
    with np.errstate(invalid="ignore"):
        expected = evaluate("attention", dict(spec.attrs), inputs, spec.shapes[4:])[0]
    run = PreparedKernel(
        devices()[device_index].handle,
        kernel(family_of(spec.kind).variants(spec, limits)[0], spec, laid_out((spec, inputs), Layout.row_major)),
        inputs,
    )
    run.run()
    got = run.outputs()[0]
    assert np.isnan(got[0, [5, 7]]).all()
    rest = [i for i in range(m) if i not in (5, 7)]
    np.testing.assert_allclose(got[0, rest], expected[0, rest], rtol=1e-4, atol=1e-5)


def test_grouped_heads_are_views(device_index: int) -> None:
    """Keys and values of one head serve three: stride 0, nothing copied."""
    b, m, n, d = 6, 11, 21, 12
    spec, inputs = forward_case((b, m, n, d, d), [causal(b, m, n)], {"score": ADD})
    layouts = list(laid_out((spec, inputs), Layout.row_major))
    for p in (1, 2):
        inputs[p] = np.repeat(inputs[p][::3], 3, axis=0)
        shared = Layout.row_major((2, 1, n, d)).expand((2, 3, n, d)).reshape((b, n, d))
        assert shared is not None
        layouts[p] = shared
    check(device_index, (spec, inputs), tuple(layouts), False)
    check(device_index, (spec, inputs), tuple(layouts), True, 1)


# ---- host -----------------------------------------------------------------------------------------------------------


def times(offsets: list[int]) -> set[int]:
    """How often each element that is touched at all is touched."""
    return set(Counter(offsets).values())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("limits", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["attention", "attention_grad"])
def test_nests(kind: str, limits: DeviceLimits, name: str) -> None:
    """All elements of all operands are touched, outputs once each; blocks say how often queries are read."""
    case = forward_case((2, 37, 45, 12, 12), [causal(2, 37, 45)], {"score": ADD})
    if kind == "attention_grad":
        case = gradient_case(case)
    spec, layouts = case[0], laid_out(case, LAYOUTS[name])
    for variant in family_of(kind).variants(spec, limits):
        built = kernel(variant, spec, layouts)
        p = dict(variant.params)
        for position, layout in enumerate(layouts):
            write = position >= spec.inputs
            got = [x for launch in built.launches for x in touched(built, launch.nest, position, write, {})]
            assert set(got) == set(layout.offsets().ravel().tolist()), (variant.label, position)
            if write:
                assert times(got) == {1}, (variant.label, position)
        queries = [x for launch in built.launches for x in touched(built, launch.nest, 0, False, {})]
        if kind == "attention":
            expected = 1
        elif limits.kind == "cpu":
            expected = -(-45 // p["bn"])
        else:
            expected = 1 + -(-45 // p["bo"])
        if not p.get("chunk"):
            assert times(queries) == {expected}, variant.label


def test_variants_fit_what_the_device_has() -> None:
    spec = gradient_case(forward_case((1, 8, 8, 256, 256), [], {}))[0]
    for local_bytes in (16 << 10, 32 << 10, 48 << 10, 96 << 10):
        assert tile_variants(spec, DeviceLimits(kind="gpu", local_mem_bytes=local_bytes))
    small = forward_case((1, 8, 8, 16, 16), [], {})[0]
    assert {v.param("v") for v in fat_variants(small, CPU)} == {8}, "16 lanes would be half idle on 8 keys"


def test_the_scores_are_not_stored() -> None:
    """Workspace grows with the rows, not with their product with the keys."""
    spec, inputs = gradient_case(forward_case((1, 300, 400, 16, 16), [], {}))
    for limits in (CPU, GPU):
        for variant in family_of(spec.kind).variants(spec, limits):
            scratch = kernel(variant, spec, laid_out((spec, inputs), Layout.row_major)).scratch
            assert sum(s.layout.size_elems for s in scratch) <= 300 * 32 + 300
