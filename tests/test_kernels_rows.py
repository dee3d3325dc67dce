"""Row kernels and losses on every device, and their nests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.families.rows import OPS
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.testing import PreparedKernel, _compare, check_kernels, limits_of
from layoutopt.layout import Layout
from tests.kernel_cases import GPU_LIMITS, MATRIX_LAYOUTS, check_all, kernels_of, make_spec, touched

CPU = DeviceLimits(kind="cpu", simd_width=16)
IGNORED = -100


def case(kind: str, m: int, k: int) -> tuple[OpSpec, list[np.ndarray]]:
    rng = np.random.default_rng(m * 1000 + k)
    x = (3 * rng.standard_normal((m, k)) + 1).astype(np.float32)
    dy = rng.standard_normal((m, k)).astype(np.float32)
    gamma, beta = rng.standard_normal((2, k)).astype(np.float32)
    y = np.exp(x - x.max(1, keepdims=True))
    y /= y.sum(1, keepdims=True)
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + np.float32(0.1))
    inputs = {
        "softmax": [x],
        "softmax_grad": [dy, y],
        "log_softmax": [x],
        "log_softmax_grad": [dy, np.log(y)],
        "layer_norm": [x, gamma, beta],
        "layer_norm_grad": [dy, x, mean, rstd, gamma],
    }[kind]
    outputs = [(m, k), (m,), (m,)] if kind == "layer_norm" else [(m, k)]
    return make_spec(kind, inputs, outputs, {"eps": 1e-5} if kind == "layer_norm" else {}), inputs


def sizes(kind: str, inputs: list[np.ndarray]) -> list[np.ndarray] | None:
    """What the terms of each output amount to, for operations that subtract: over rows of 1, all that they subtract is
    equal, and what is left is rounding.
    """
    x, *more = (np.abs(v.astype(np.float64)) for v in inputs)

    def mean(v: np.ndarray) -> np.ndarray:
        return v.mean(1, keepdims=True)

    if kind == "softmax_grad":
        (y,) = more
        return [y * (x + (x * y).sum(1, keepdims=True))]
    if kind == "log_softmax":
        lse = np.log(np.exp(inputs[0].astype(np.float64)).sum(1, keepdims=True))
        return [x + np.abs(lse)]
    if kind == "log_softmax_grad":
        return [x + np.exp(inputs[1].astype(np.float64)) * x.sum(1, keepdims=True)]
    if kind == "layer_norm":
        gamma, beta = more
        rstd = 1 / np.sqrt(inputs[0].astype(np.float64).var(1, keepdims=True) + 1e-5)
        return [(x + mean(x)) * rstd * gamma + beta, mean(x), rstd]
    if kind == "layer_norm_grad":
        values, centre, rstd, gamma = more
        g, n = x * gamma, (values + centre[:, None]) * rstd[:, None]
        return [rstd[:, None] * (g + mean(g) + n * mean(g * n))]
    return None


def laid_out(spec: OpSpec, *names: str) -> list[Layout]:
    """Matrices in the named layouts by turns, the rest row-major."""
    out, turn = [], 0
    for shape in spec.shapes:
        if len(shape) == 2:
            out.append(MATRIX_LAYOUTS[names[turn % len(names)]](shape))
            turn += 1
        else:
            out.append(Layout.row_major(shape))
    return out


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((19, 37), ("row-major",)),
        ((37, 19), ("row panels",)),
        ((13, 64), ("r-tile 4x4", "column panels")),
        ((20, 5), ("transposed", "head")),
        ((3, 1), ("pitch",)),
        ((3, 16500), ("row-major",)),  # too long to keep
    ],
    ids=lambda x: "x".join(map(str, x)),
)
def test_rows(device_index: int, kind: str, shape: tuple[int, int], names: tuple[str, ...]) -> None:
    spec, inputs = case(kind, *shape)
    # The scalar fallback adds up a row one by one: its rounding grows with the row.
    rtol = 1e-5 if shape[1] < 1000 else 1e-4
    ran = check_all(device_index, spec, laid_out(spec, *names), inputs, rtol, sizes(kind, inputs))
    # A CPU runs the GPU's variants too, for their results; a GPU has no use for the CPU's fat items.
    assert ran >= ({"group"} if devices()[device_index].limits.kind == "gpu" else {"item", "group"})
    assert ("cols" in ran) == (names[0] in ("row panels", "transposed"))


def test_large_values_and_masked_rows(device_index: int) -> None:
    """Attention masks hold the most negative float; a wholly masked row is uniform, not NaN."""
    x = np.full((5, 37), np.finfo(np.float32).min)
    x[0, 3], x[1], x[2, ::2] = 80.0, np.linspace(-200, 200, 37), 1e4
    for kind in ("softmax", "log_softmax"):
        spec = make_spec(kind, [x], [(5, 37)])
        check_all(device_index, spec, laid_out(spec, "row-major"), [x])


def test_nan_and_infinity_stay_in_their_row(device_index: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, 37)).astype(np.float32)
    x[1, 5], x[2] = np.nan, -np.inf
    spec = make_spec("softmax", [x], [(4, 37)])
    device = devices()[device_index].handle
    for limits in (CPU, GPU_LIMITS):
        for kernel in kernels_of(spec, laid_out(spec, "row-major"), limits):
            prepared = PreparedKernel(device, kernel, [x])
            prepared.run()
            (y,) = prepared.outputs()
            assert np.isnan(y[1:3]).all()
            assert np.allclose(y[[0, 3]].sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("k", [8, 33, 384, 1026, 2049, 4100])
def test_rows_in_registers_of_a_gpu(device_index: int, kind: str, k: int) -> None:
    """From rows that a few items keep to rows of 256 items and eight vectors each, with and without remainders."""
    spec, inputs = case(kind, 11, k)
    exact = [x.astype(np.float64) for x in inputs]
    expected = evaluate(kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    kernels = kernels_of(spec, laid_out(spec, "row-major"), GPU_LIMITS)
    check_kernels(devices()[device_index].handle, kernels, inputs, expected, 2e-5, sizes(kind, inputs))


@pytest.mark.parametrize("k", [9001, 12290])
def test_rows_too_long_for_registers(device_index: int, k: int) -> None:
    """Peak and sum in one pass: peaks that rise and fall along the row, masked stretches, infinities, NaN."""
    rng = np.random.default_rng(k)
    x = rng.standard_normal((7, k)).astype(np.float32)
    x[0] += np.linspace(-90, 90, k, dtype=np.float32)
    x[1] += np.linspace(90, -90, k, dtype=np.float32)
    x[2, : k - 3] = -np.inf
    x[3, 5:] = np.finfo(np.float32).min
    x[4, k // 2] = np.nan
    x[5] = -np.inf
    spec = make_spec("log_softmax", [x], [(7, k)])
    good = [0, 1, 2, 3, 6]
    with np.errstate(invalid="ignore"):
        shifted = x.astype(np.float64) - x.max(1, keepdims=True)
        expected = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    for kernel in kernels_of(spec, laid_out(spec, "row-major"), GPU_LIMITS):
        prepared = PreparedKernel(devices()[device_index].handle, kernel, [x])
        prepared.run()
        (y,) = prepared.outputs()
        np.testing.assert_allclose(y[good], expected[good], rtol=2e-5, atol=2e-5, err_msg=kernel.variant.label)
        assert np.isnan(y[[4, 5]]).all()


# ---- losses ---------------------------------------------------------------------------------------------------------


def loss_cases(n: int, c: int, target: np.ndarray) -> list[tuple[OpSpec, list[np.ndarray]]]:
    rng = np.random.default_rng(n + c)
    logits = (2 * rng.standard_normal((n, c))).astype(np.float32)
    lse = np.log(np.exp(logits).sum(1)).astype(np.float32)
    weight = np.asarray((target != IGNORED).sum(), np.float32)
    dloss = np.asarray(1.75, np.float32)
    attrs = {"ignore_index": IGNORED}
    logp = (logits - lse[:, None]).astype(np.float32)
    return [
        (make_spec("cross_entropy", [logits, target], [(), (n,), ()], attrs), [logits, target]),
        (
            make_spec("cross_entropy_grad", [dloss, logits, target, lse, weight], [(n, c)], attrs),
            [dloss, logits, target, lse, weight],
        ),
        (make_spec("nll_loss", [logp, target], [(), ()], attrs), [logp, target]),
        (make_spec("nll_loss_grad", [dloss, target, weight], [(n, c)], attrs), [dloss, target, weight]),
    ]


@pytest.mark.parametrize(
    ("n", "c", "name"), [(7, 2, "row-major"), (150, 5, "transposed"), (9, 1000, "row-major"), (33, 20, "r-tile 4x4")]
)
def test_losses(device_index: int, n: int, c: int, name: str) -> None:
    target = np.random.default_rng(1).integers(0, c, n).astype(np.int32)
    target[::4] = IGNORED
    for spec, inputs in loss_cases(n, c, target):
        check_all(device_index, spec, laid_out(spec, name), inputs)


@pytest.mark.parametrize(("n", "c"), [(1, 5003), (2, 2048), (3, 1500)])
def test_few_rows_of_many_classes_are_split(device_index: int, n: int, c: int) -> None:
    """Parts that fit and parts with a rest, targets in the first, the last and no part, a row with masked parts."""
    target = np.array([c - 1, 0, IGNORED][:n], np.int32)
    for spec, inputs in loss_cases(n, c, target)[:2]:
        inputs[1 if spec.kind.endswith("grad") else 0][0, : c // 2] = -np.inf
        if spec.kind.endswith("grad"):
            logits = inputs[1].astype(np.float64)
            inputs[3][:] = np.log(np.exp(logits).sum(1))
        limits = (limits_of(devices()[device_index].handle), GPU_LIMITS)
        kernels = [k for x in limits for k in kernels_of(spec, laid_out(spec, "row-major"), x)]
        assert {dict(k.variant.params).get("split", 1) > 1 for k in kernels} == {True, False}
        check_all(device_index, spec, laid_out(spec, "row-major"), inputs)


def test_a_nan_shows_in_the_parts_of_its_row(device_index: int) -> None:
    n, c = 2, 2048
    logits = np.zeros((n, c), np.float32)
    logits[0, 1500], logits[1, :1024] = np.nan, -np.inf
    target = np.array([3, 2000], np.int32)
    spec = make_spec("cross_entropy", [logits, target], [(), (n,), ()], {"ignore_index": IGNORED})
    device = devices()[device_index].handle
    kernels = [k for k in kernels_of(spec, laid_out(spec, "row-major"), CPU) if "split" in k.variant.label]
    assert kernels
    for kernel in kernels:
        prepared = PreparedKernel(device, kernel, [logits, target])
        prepared.run()
        loss, lse, _ = prepared.outputs()
        assert np.isnan(loss)
        assert np.isnan(lse[0])
        assert lse[1] == pytest.approx(np.log(1024), rel=1e-6)


@pytest.mark.parametrize(("n", "c"), [(7, 2), (33, 20), (9, 1000), (2, 2048), (3, 1500)])
def test_gradients_over_their_logits(device_index: int, n: int, c: int) -> None:
    target = np.random.default_rng(c).integers(0, c, n).astype(np.int32)
    target[1] = IGNORED
    spec, inputs = loss_cases(n, c, target)[1]
    spec = replace(spec, inplace=((0, 1),))
    for name in ("row-major", "r-tile 4x4"):
        layouts = laid_out(spec, name)
        check_all(device_index, spec, [*layouts[:-1], layouts[1]], inputs)


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
def test_nests_of_split_rows(limits: DeviceLimits) -> None:
    """Every logit is read once, for the loss once more as a target; gradients are written once, their targets twice."""
    n, c = 2, 1100
    target = np.array([5, 1099], np.int32)
    for spec, _ in loss_cases(n, c, target)[:2]:
        layouts = laid_out(spec, "row-major")
        kernels = [k for k in kernels_of(spec, layouts, limits) if "split" in k.variant.label]
        assert kernels
        position = 1 if spec.kind.endswith("grad") else 0
        data = {position + 1: target}
        once = layouts[position].offsets()
        all_of_it, targets = sorted(once.ravel().tolist()), sorted(once[np.arange(n), target].tolist())
        twice = sorted(all_of_it + targets)
        for kernel in kernels:
            read = sorted(_touched(kernel, position, False, data))
            assert read == (all_of_it if position else twice), kernel.variant.label
            if position:
                assert sorted(_touched(kernel, 5, True, data)) == twice, kernel.variant.label
                assert sorted(_touched(kernel, 5, False, data)) == targets, kernel.variant.label


def _touched(kernel: Kernel, position: int, write: bool, data: dict[int, np.ndarray]) -> list[int]:
    return [x for launch in kernel.launches for x in touched(kernel, launch.nest, position, write, data)]


def test_all_targets_ignored(device_index: int) -> None:
    """As in torch: the loss is 0/0, so NaN, and every gradient is zero."""
    for spec, inputs in loss_cases(6, 5, np.full(6, IGNORED, np.int32)):
        check_all(device_index, spec, laid_out(spec, "row-major"), inputs)


def test_mean_over_many_rows_keeps_its_precision(device_index: int) -> None:
    n = 20000
    logp = (-1 - 1e-3 * np.random.default_rng(0).random((n, 2))).astype(np.float32)
    target = np.zeros(n, np.int32)
    spec = make_spec("nll_loss", [logp, target], [(), ()], {"ignore_index": IGNORED})
    device = devices()[device_index].handle
    expected = [-logp[:, 0].mean(dtype=np.float64), np.float64(n)]
    layouts = laid_out(spec, "row-major")
    kernels = [k for limits in (limits_of(device), GPU_LIMITS) for k in kernels_of(spec, layouts, limits)]
    check_kernels(device, kernels, [logp, target], expected, rtol=1e-6)


# ---- host: nests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("names", [("row-major",), ("row panels",), ("transposed",)], ids=lambda x: x[0])
@pytest.mark.parametrize("kind", OPS)
def test_nests_write_every_element(kind: str, names: tuple[str, ...], limits: DeviceLimits) -> None:
    """CPU items and GPU groups keep short rows: everything once. Others read an input once a pass that needs it, and
    softmax writes its exponentials as well as its output."""
    spec, _ = case(kind, 19, 37)
    layouts = laid_out(spec, *names)
    reads = {"softmax": [2], "softmax_grad": [2, 2], "log_softmax": [3], "log_softmax_grad": [2, 1]}
    reads |= {"layer_norm": [3], "layer_norm_grad": [2, 2]}
    for kernel in kernels_of(spec, layouts, limits):
        for position, layout in enumerate(layouts):
            if len(layout.shape) < 2:
                continue
            write = position >= spec.inputs
            got = [x for launch in kernel.launches for x in touched(kernel, launch.nest, position, write, {})]
            unkept = 2 if kind == "softmax" else 1
            unkept = unkept if write else reads[kind][position]
            keeps = limits.kind == "cpu" or kernel.variant.name == "group"
            wanted = layout.offsets().ravel().tolist() * (1 if keeps else unkept)
            assert sorted(got) == sorted(wanted), kernel.variant.label


@pytest.mark.parametrize(("kind", "reads", "writes"), [("softmax", 2, 2), ("log_softmax", 2, 1), ("layer_norm", 3, 1)])
def test_nests_of_rows_too_long_to_keep(kind: str, reads: int, writes: int) -> None:
    """The logarithm's sum takes one pass, whose peak it finds on the way."""
    spec, _ = case(kind, 2, 8200)
    layouts = laid_out(spec, "row-major")
    found = [k for k in kernels_of(spec, layouts, GPU_LIMITS) if k.variant.name == "group"]
    vectors = [k for k in found if k.variant.param("v") == 4]
    assert vectors
    for kernel in vectors:
        for position, times in ((0, reads), (spec.inputs, writes)):
            got = touched(kernel, kernel.launches[0].nest, position, position > 0, {})
            assert sorted(got) == sorted(layouts[0].offsets().ravel().tolist() * times), kernel.variant.label


def test_rounding_is_judged_by_what_cancels() -> None:
    """A gradient over rows of 1 is exactly 0; what a device leaves is a share of the terms, or wrong."""
    zero, ones = np.zeros(3), np.ones(3)
    left = np.array([0, -5e-7, 9e-6], np.float32)
    _compare("dx", left, zero, 1e-5, ones)
    with pytest.raises(AssertionError, match="2 of 3 values differ"):
        _compare("dx", left, zero, 1e-5)
    with pytest.raises(AssertionError, match=r"1 of 3 values differ, first at \(2,\)"):
        _compare("dx", 2 * left, zero, 1e-5, ones)
    for x, dy in ((3.5, 0.25), (-1e-3, 8.0)):
        inputs = [np.full((2, 1), v, np.float32) for v in (dy, x)] + [np.full(2, v, np.float32) for v in (x, 2)]
        (size,) = sizes("layer_norm_grad", [*inputs, np.full(1, 3.0, np.float32)]) or []
        assert (size >= 2 * 3 * dy).all(), "rstd * gamma * dy, which its mean is taken from"
