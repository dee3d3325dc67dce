"""Float16 storage: kernels of every family over halves, against the float64 interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import Kernel, OpSpec
from kernels.testing import check_kernels, limits_of
from kernels.variants import kernels_for
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from tests.kernel_cases import GPU_LIMITS, MATRIX_LAYOUTS, kernels_of, make_spec

RTOL = 2e-3
"""A row's values may be rounded to halves once on the way (softmax), besides where they are stored."""

RNG = np.random.default_rng(7)
ADD = Expr((("mul", ("x", 0), ("c", 0.5)), ("add", ("t", 0), ("x", 1))), (("t", 1), ("x", 0)))
BIASED = Expr((("add", ("x", 0), ("x", 1)), ("tanh", ("t", 0))), (("t", 0), ("t", 1)))
SCORE = Expr((("where", ("x", 1), ("x", 0), ("c", -3.4028234663852886e38)),), (("t", 0),))


def halves(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Numbers that are float16 numbers."""
    return (RNG.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)


def as_half(spec: OpSpec, positions: Sequence[int]) -> OpSpec:
    """The spec with some operands stored as float16."""
    assert all(spec.dtypes[p] == "float32" for p in positions)
    return replace(spec, dtypes=tuple("float16" if p in positions else d for p, d in enumerate(spec.dtypes)))


def check(
    device_index: int,
    spec: OpSpec,
    inputs: Sequence[np.ndarray],
    positions: Sequence[int],
    name: str = "row-major",
    batched: bool = False,
) -> set[str]:
    """Variants of every name, with matrices in a named layout."""
    make = MATRIX_LAYOUTS[name]
    layouts = []
    for shape in spec.shapes:
        if batched and len(shape) == 3:
            whole = make((shape[0] * shape[1], shape[2])).reshape(shape)
            layouts.append(whole if whole is not None else Layout.row_major(shape))
        else:
            layouts.append(make(shape) if len(shape) == 2 else Layout.row_major(shape))
    return check_some(device_index, as_half(spec, positions), layouts, inputs)


def check_some(device_index: int, spec: OpSpec, layouts: Sequence[Layout], inputs: Sequence[np.ndarray]) -> set[str]:
    """A variant of each name, the widest or the narrowest; the names."""
    device = devices()[device_index].handle
    kernels: dict[str, Kernel] = {}
    for limits in (limits_of(device), GPU_LIMITS):
        made = kernels_of(spec, layouts, limits)
        turn = -1 if len(spec.shapes) % 2 else 1
        kernels |= {k.key: k for k in {k.variant.name: k for k in made[::turn]}.values()}
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    check_kernels(device, list(kernels.values()), inputs, expected, RTOL)
    return {kernel.variant.name for kernel in kernels.values()}


@pytest.mark.parametrize("name", ["row-major", "r-tile 4x4", "pitch"])
def test_pointwise(device_index: int, name: str) -> None:
    """Mixed operands, all walks, a program with two results; relayouts are the identity."""
    x, y = halves(37, 23), halves(37, 23)
    spec = make_spec("pointwise", [x, y], [x.shape, x.shape], {"expr": ADD})
    check(device_index, spec, [x, y], (0, 2), name)
    copy = make_spec("pointwise", [x], [x.shape], {"expr": Expr((), (("x", 0),))})
    for half in ((0, 1), (1,)):
        check(device_index, copy, [x], half, name)


@pytest.mark.parametrize(
    ("positions", "name"), [((0, 1, 2), "row-major"), ((0, 1), "pitch"), ((1, 2), "r-tile 8x16 by columns")], ids=str
)
def test_contraction(device_index: int, positions: tuple[int, ...], name: str) -> None:
    """All orientations, halves on any side."""
    a, b = halves(1, 37, 50), halves(1, 50, 45)
    spec = make_spec("contraction", [a, b], [(1, 37, 45)], {"alpha": 0.25})
    names = check(device_index, spec, [a, b], positions, name, batched=True)
    assert {"any", "staged"} <= names


def test_contraction_orientations(device_index: int) -> None:
    """Outer, dot and tile are all among the variants that take halves."""
    a, b = halves(2, 32, 48), halves(2, 48, 64)
    spec = make_spec("contraction", [a, b], [(2, 32, 64)])
    seen = check(device_index, spec, [a, b], (0, 1, 2), batched=True)
    assert "outer.n" in seen
    turned = [Layout.row_major((2, 32, 48)), Layout.row_major((2, 48, 64), (0, 2, 1)), Layout.row_major((2, 32, 64))]
    seen = check_some(device_index, as_half(spec, (0, 1, 2)), turned, [a, b])
    assert "dot" in seen
    tiles = [Layout.row_major((1, 32, 48)), Layout.r_tile((48, 64), 4, 4, inner="col").reshape((1, 48, 64))]
    one = make_spec("contraction", [a[:1], b[:1]], [(1, 32, 64)])
    layouts = [*tiles, Layout.row_major((1, 32, 64))]
    seen = check_some(device_index, as_half(one, (0, 1, 2)), layouts, [a[:1], b[:1]])
    assert "tile.n" in seen


def test_epilogue(device_index: int) -> None:
    """Sums finished by a program over a half bias, a half pre-activation kept beside a float32 result."""
    a, b, bias = halves(1, 29, 40), halves(1, 40, 33), halves(1, 29, 33)
    spec = make_spec("contraction", [a, b, bias], [(1, 29, 33)] * 2, {"epilogue": BIASED})
    for positions in ((0, 1, 2, 3), (1, 4)):
        check(device_index, spec, [a, b, bias], positions, batched=True)


@pytest.mark.parametrize("kind", ["softmax", "log_softmax", "softmax_grad", "log_softmax_grad"])
def test_softmax(device_index: int, kind: str) -> None:
    """Rows of a prime length."""
    x = halves(13, 67)
    y = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    y = (np.log(y) if kind.startswith("log") else y).astype(np.float16).astype(np.float32)
    inputs = [x, y] if kind.endswith("grad") else [x]
    spec = make_spec(kind, inputs, [x.shape])
    check(device_index, spec, inputs, range(len(spec.shapes)), "transposed" if "log" in kind else "row-major")


def test_layer_norm(device_index: int) -> None:
    """Forward and gradients; statistics stay float32."""
    x, dy, gamma, beta = halves(19, 45), halves(19, 45), halves(45), halves(45)
    mean, rstd = x.mean(axis=1), 1 / np.sqrt(x.var(axis=1) + 1e-5)
    forward = make_spec("layer_norm", [x, gamma, beta], [x.shape, (19,), (19,)], {"eps": 1e-5})
    check(device_index, forward, [x, gamma, beta], (0, 1, 2, 3))
    gradient = make_spec("layer_norm_grad", [dy, x, mean, rstd, gamma], [x.shape])
    check(device_index, gradient, [dy, x, mean, rstd, gamma], (0, 1, 5), "r-tile 4x4")
    affine = make_spec("layer_norm_affine", [dy, x, mean, rstd], [(45,), (45,)])
    check(device_index, affine, [dy, x, mean, rstd], (0, 1, 4))


@pytest.mark.parametrize("fn", ["mean", "max"])
def test_reduce(device_index: int, fn: str) -> None:
    """Both axes, cut into parts whose sums are float32."""
    x = halves(301, 35)
    for data in (x, np.ascontiguousarray(x.T)):
        spec = make_spec("reduce", [data], [data.shape[:1]], {"fn": fn})
        check(device_index, spec, [data], (0, 1), "transposed" if fn == "max" else "row-major")


def test_losses(device_index: int) -> None:
    """Half logits and half gradients of them."""
    x, target = halves(21, 83, scale=3), RNG.integers(0, 83, 21).astype(np.int32)
    target[4] = -100
    lse = np.log(np.exp(x.astype(np.float64)).sum(axis=1)).astype(np.float32)
    scale, weight = np.float32(1024), np.float32(20)
    keys = {"ignore_index": -100}
    forward = make_spec("cross_entropy", [x, target], [(), (21,), ()], keys)
    check(device_index, forward, [x, target], (0,))
    inputs = [scale, x, target, lse, weight]
    check(device_index, make_spec("cross_entropy_grad", inputs, [x.shape], keys), inputs, (1, 5))
    check(device_index, make_spec("nll_loss", [x, target], [(), ()], keys), [x, target], (0,))
    inputs = [scale, target, weight]
    check(device_index, make_spec("nll_loss_grad", inputs, [x.shape], keys), inputs, (3,))


def test_indexing(device_index: int) -> None:
    """Tables and rows of halves; a table's gradient is summed in float32 or not at all."""
    table, ids = halves(31, 21), RNG.integers(0, 31, 53).astype(np.int32)
    for positions in ((0, 2), (2,)):
        check(device_index, make_spec("gather", [table, ids], [(53, 21)]), [table, ids], positions)
    dy = halves(53, 21)
    spec = make_spec("scatter_add", [dy, ids], [(31, 21)], {"padding_idx": 3})
    check(device_index, spec, [dy, ids], (0,))
    layouts = tuple(Layout.row_major(shape) for shape in spec.shapes)
    assert not kernels_for(as_half(spec, (0, 2)), layouts, GPU_LIMITS)


def test_concat(device_index: int) -> None:
    """Parts of halves and of floats."""
    parts = [halves(3, 4, 7), halves(3, 2, 7)]
    spec = make_spec("concat", parts, [(3, 9, 7)], {"starts": (0, 6)})
    for positions in ((0, 2), (1,)):
        check(device_index, spec, parts, positions)


def test_attention(device_index: int) -> None:
    """Halves in and out of online softmax, forward and backward; peak and mass stay float32."""
    b, m, n, d, e = 3, 33, 21, 20, 12
    q, k, v, do = halves(b, m, d), halves(b, n, d), halves(b, n, e), halves(b, m, e)
    seen = RNG.random((b, m, n)) > 0.3
    seen[..., 0] = True
    attrs = {"alpha": 0.3, "score": SCORE}
    spec = make_spec("attention", [q, k, v, seen], [(b, m, e), (b, m), (b, m)], attrs)
    check(device_index, spec, [q, k, v, seen], (0, 1, 2, 4))
    scores = np.where(seen, 0.3 * q.astype(np.float64) @ k.transpose(0, 2, 1), -np.inf)
    peak = scores.max(axis=2)
    p = np.exp(scores - peak[..., None])
    mass = p.sum(axis=2)
    o = (p / mass[..., None] @ v).astype(np.float16).astype(np.float32)
    inputs = [q, k, v, o, peak.astype(np.float32), mass.astype(np.float32), do, seen]
    spec = make_spec("attention_grad", inputs, [q.shape, k.shape, v.shape], attrs | {"grad": gated()})
    check(device_index, spec, inputs, (0, 1, 2, 3, 6, 8, 9, 10))


def gated() -> Expr:
    """The gradient of SCORE: nothing where a score is masked."""
    return Expr((("where", ("x", 1), ("x", 0), ("c", 0.0)),), (("t", 0),))


def test_convolutions_are_declined() -> None:
    """Their kernels pack float32 and say so by offering none."""
    x, w = halves(1, 3, 9, 9), halves(4, 3, 3, 3)
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    spec = as_half(make_spec("conv", [x, w], [(1, 4, 9, 9)], attrs), (0,))
    assert not kernels_for(spec, tuple(Layout.row_major(shape) for shape in spec.shapes), GPU_LIMITS)
