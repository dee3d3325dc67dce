"""Small problems of every kind of op, with odd sizes and mixed layouts, for a device to show that it computes right.

They are what a driver that miscompiles has been seen to stumble over: extents that no vector divides, transposed and
tiled operands, padding, indices, masks, codes of few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.reference import evaluate
from kernels.spec import OpSpec, frozen_attrs
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from layoutopt.quantize import Format, quantise

__all__ = ["CASES", "Case", "cases"]

_DTYPES = {"f": "float32", "i": "int32", "b": "bool"}
_IGNORED = -100


@dataclass(frozen=True)
class Case:
    """An op to be checked.

    Attributes:
        spec: the op.
        layouts: one per operand.
        inputs: logical arrays in operand order.
        rtol: what float outputs may be off by, of the larger of the element and the output's largest.
    """

    spec: OpSpec
    layouts: tuple[Layout, ...]
    inputs: tuple[np.ndarray, ...] = field(repr=False)
    rtol: float = 1e-5

    def expected(self) -> list[np.ndarray]:
        """The outputs in float64."""
        exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in self.inputs]
        return evaluate(self.spec.kind, dict(self.spec.attrs), exact, self.spec.shapes[self.spec.inputs :])


Lay = Callable[[tuple[int, ...]], Layout]
Shapes = Sequence[tuple[int, ...]]


def _rows(shape: tuple[int, ...]) -> Layout:
    return Layout.row_major(shape)


def _turned(shape: tuple[int, ...]) -> Layout:
    axes = list(range(len(shape)))
    return Layout.row_major(shape, (*axes[:-2], *axes[-2:][::-1]))


def _tiled(shape: tuple[int, ...]) -> Layout:
    return Layout.r_tile(shape, 4, 4) if len(shape) >= 2 else Layout.row_major(shape)


def _case(
    kind: str,
    inputs: Sequence[np.ndarray],
    outputs: Shapes,
    attrs: Mapping[str, Any] | None = None,
    lay: Sequence[Lay] | Lay = _rows,
    dtypes: Sequence[str] = (),
    inplace: tuple[tuple[int, int], ...] = (),
    rtol: float = 1e-5,
) -> Case:
    """A case; ``lay`` is one maker of layouts for all operands, or one each."""
    spec = OpSpec(
        kind,
        (*(x.shape for x in inputs), *outputs),
        (*(_DTYPES[x.dtype.kind] for x in inputs), *(dtypes or ["float32"] * len(outputs))),
        len(inputs),
        frozen_attrs(attrs or {}),
        inplace,
    )
    makers = [lay] * len(spec.shapes) if callable(lay) else lay
    layouts = tuple(make(shape) for make, shape in zip(makers, spec.shapes, strict=True))
    return Case(spec, layouts, tuple(inputs), rtol)


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- products -------------------------------------------------------------------------------------------------------


def _contractions() -> Iterator[Case]:
    for (b, m, k, n), lay in (
        ((2, 13, 37, 19), (_rows, _rows, _rows)),
        ((1, 65, 30, 47), (_turned, _rows, _tiled)),
        ((1, 48, 64, 40), (_tiled, _turned, _rows)),
    ):
        inputs = [_normal(b, m, k), _normal(b, k, n, seed=1)]
        yield _case("contraction", inputs, [(b, m, n)], {"alpha": 0.5}, lay, rtol=2e-5)


def _quantized_contractions() -> Iterator[Case]:
    for (m, k, n), fmt in (((21, 53, 35), "int8"), ((16, 144, 40), "nf4:64")):
        words, scales = quantise(_normal(n, k, seed=1), Format.parse(fmt))
        inputs = [_normal(m, k), words, scales]
        yield _case("quantized_contraction", inputs, [(m, n)], {"format": fmt, "alpha": 0.5}, rtol=2e-5)


def _convolutions() -> Iterator[Case]:
    n, c, o = 1, 6, 8
    attrs = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, w, y = (n, c, 9, 7), (o, c, 3, 3), (n, o, 5, 7)

    def channels_last(shape: tuple[int, ...]) -> Layout:
        return Layout.row_major(shape, (0, 2, 3, 1))

    for kind, (first, second), result in (
        ("conv", (x, w), y),
        ("conv_grad_input", (y, w), x),
        ("conv_grad_weight", (y, x), w),
    ):
        for lay in (_rows, channels_last) if kind == "conv" else (channels_last,):
            inputs = [_normal(*first), _normal(*second, seed=1)]
            yield _case(kind, inputs, [result], attrs, lay, rtol=2e-5)


def _attention() -> Iterator[Case]:
    b, m, n, d, e = 2, 19, 23, 16, 8
    q, k, v = _normal(b, m, d), _normal(b, n, d, seed=1), _normal(b, n, e, seed=2)
    attrs: dict[str, Any] = {"alpha": d**-0.5, "score": Expr((), (("x", 0),))}
    outputs = [(b, m, e), (b, m), (b, m)]
    forward = _case("attention", [q, k, v], outputs, attrs)
    yield forward
    saved = [x.astype(np.float32) for x in forward.expected()]
    inputs = [q, k, v, *saved, _normal(b, m, e, seed=3)]
    yield _case("attention_grad", inputs, [q.shape, k.shape, v.shape], attrs | {"beta": 0.5}, rtol=2e-5)


# ---- elements and rows ----------------------------------------------------------------------------------------------

_GELU_OF_SUM = Expr(
    (
        ("add", ("x", 0), ("x", 1)),
        ("mul", ("t", 0), ("c", 0.7071067811865476)),
        ("erf", ("t", 1)),
        ("add", ("t", 2), ("c", 1)),
        ("mul", ("t", 0), ("c", 0.5)),
        ("mul", ("t", 4), ("t", 3)),
    ),
    (("t", 5),),
)
_MOMENTUM = Expr(
    (
        ("mul", ("x", 2), ("c", 0.9)),
        ("add", ("t", 0), ("x", 1)),
        ("mul", ("t", 1), ("c", 0.01)),
        ("sub", ("x", 0), ("t", 2)),
    ),
    (("t", 3), ("t", 1)),
)


def _pointwise() -> Iterator[Case]:
    shape = (13, 37)
    x, y, z = (_normal(*shape, seed=s) for s in range(3))
    same = Expr((), (("x", 0),))
    yield _case("pointwise", [x], [shape], {"expr": same}, (_rows, _turned))
    yield _case("pointwise", [x], [shape], {"expr": same}, (_turned, _tiled))
    yield _case("pointwise", [x, y], [shape], {"expr": _GELU_OF_SUM}, _tiled)
    yield _case("pointwise", [x, y, z], [shape] * 2, {"expr": _MOMENTUM}, inplace=((0, 0), (1, 2)))
    yield _case("pointwise", [np.arange(481, dtype=np.int32).reshape(shape)], [shape], {"expr": same}, dtypes=["int32"])


def _row_ops() -> Iterator[Case]:
    m, k = 13, 67
    x, dy = 3 * _normal(m, k) + 1, _normal(m, k, seed=1)
    gamma, beta = _normal(k, seed=2), _normal(k, seed=3)
    y = np.exp(x - x.max(1, keepdims=True))
    y /= y.sum(1, keepdims=True)
    mean, rstd = x.mean(1), (1 / np.sqrt(x.var(1) + np.float32(0.1))).astype(np.float32)
    for lay in (_rows, _turned):
        yield _case("softmax", [x], [(m, k)], lay=lay)
    yield _case("softmax_grad", [dy, y], [(m, k)])
    yield _case("log_softmax", [x], [(m, k)], lay=_tiled)
    yield _case("log_softmax_grad", [dy, np.log(y)], [(m, k)])
    yield _case("layer_norm", [x, gamma, beta], [(m, k), (m,), (m,)], {"eps": 1e-5})
    yield _case("layer_norm_grad", [dy, x, mean, rstd, gamma], [(m, k)], rtol=2e-5)


def _reductions() -> Iterator[Case]:
    x = _normal(19, 133) - 3
    for fn, lay in (("sum", _rows), ("mean", _turned), ("max", _tiled)):
        yield _case("reduce", [x], [(19,)], {"fn": fn}, (lay, _rows))
    inputs = [_normal(64, 21), _normal(64, 21, seed=1) + 2, _normal(64, seed=2), np.abs(_normal(64, seed=3))]
    yield _case("layer_norm_affine", inputs, [(21,)] * 2, rtol=2e-5)


# ---- indices, losses, codes -----------------------------------------------------------------------------------------


def _tables() -> Iterator[Case]:
    rows, n, d = 23, 50, 37
    ids = np.random.default_rng(d).integers(0, rows, n).astype(np.int32)
    ids[:5] = 4  # a row that is hit often
    yield _case("gather", [_normal(rows, d), ids], [(n, d)])
    yield _case("scatter_add", [_normal(n, d, seed=1), ids], [(rows, d)], {"padding_idx": 4})


def _losses() -> Iterator[Case]:
    n, c = 33, 20
    target = np.random.default_rng(1).integers(0, c, n).astype(np.int32)
    target[::4] = _IGNORED
    logits = 2 * _normal(n, c)
    lse = np.log(np.exp(logits).sum(1)).astype(np.float32)
    weight, dloss = np.asarray((target != _IGNORED).sum(), np.float32), np.asarray(1.75, np.float32)
    attrs = {"ignore_index": _IGNORED}
    logp = (logits - lse[:, None]).astype(np.float32)
    yield _case("cross_entropy", [logits, target], [(), (n,), ()], attrs)
    yield _case("cross_entropy_grad", [dloss, logits, target, lse, weight], [(n, c)], attrs)
    yield _case("nll_loss", [logp, target], [(), ()], attrs)
    yield _case("nll_loss_grad", [dloss, target, weight], [(n, c)], attrs)


def _concatenations() -> Iterator[Case]:
    parts = [_normal(3, 5, 20), _normal(3, 7, 20, seed=1)]
    yield _case("concat", parts, [(3, 17, 20)], {"starts": (1, 8)})
    yield _case("concat", parts, [(3, 17, 20)], {"starts": (1, 8)}, _turned)


def _iotas() -> Iterator[Case]:
    yield _case("iota", [], [(37,)], {"start": 3, "step": 2}, dtypes=["int32"])


def _codes() -> Iterator[Case]:
    for fmt, shape in (("int8:16", (13, 200)), ("nf4:64", (5, 67))):
        x = _normal(*shape)
        words, scales = quantise(x, Format.parse(fmt))
        attrs = {"format": fmt}
        yield _case("quantize", [x], [words.shape, scales.shape], attrs, dtypes=["int32", "float32"], rtol=1e-6)
        yield _case("dequantize", [words, scales], [shape], attrs, rtol=1e-6)
        ids = np.array([3, 0, 3, 1, 4], np.int32)
        yield _case("quantized_gather", [words, scales, ids], [(5, shape[1])], attrs, rtol=1e-6)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "contraction": _contractions,
    "convolution": _convolutions,
    "pointwise": _pointwise,
    "rows": _row_ops,
    "reduce": _reductions,
    "indexing": _tables,
    "losses": _losses,
    "attention": _attention,
    "concat": _concatenations,
    "iota": _iotas,
    "quantize": _codes,
    "quantized_contraction": _quantized_contractions,
}
"""By family. Every kind of op is in one."""


def cases(family: str) -> list[Case]:
    """The cases of a family."""
    return list(CASES[family]())
