"""ATen ops on whole rows: softmax, layer normalisation and the losses, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from layoutopt.aten import Out, constant, register
from layoutopt.capture_build import Const, GraphBuilder, Shape, Value
from layoutopt.errors import GraphError

__all__: list[str] = []

Arg = Value | Const


# ---- rows -----------------------------------------------------------------------------------------------------------


def _rows(kind: str) -> Callable[..., Value]:
    """An op on rows along one axis; the other axes are merged."""

    def emit(b: GraphBuilder, out: Out, axis: int, *tensors: Arg) -> Value:
        rank = max(1, len(out.shape))
        axis %= rank
        order = [a for a in range(rank) if a != axis] + [axis]
        k = out.shape[axis] if out.shape else 1
        steps = [("permute", order), ("reshape", (prod(out.shape) // k, k))]
        operands = [b.operand(t, *steps) for t in tensors]
        return b.emit(kind, operands, [("", out.shape, "float32", steps)])[0]

    return emit


@register("_softmax.default")
def _softmax(b: GraphBuilder, out: Out, x: Arg, axis: int, half: bool = False) -> Value:
    return _rows("softmax")(b, out, axis, x)


@register("_log_softmax.default")
def _log_softmax(b: GraphBuilder, out: Out, x: Arg, axis: int, half: bool = False) -> Value:
    return _rows("log_softmax")(b, out, axis, x)


@register("_softmax_backward_data.default")
def _softmax_grad(b: GraphBuilder, out: Out, dy: Arg, y: Arg, axis: int, dtype: Any = None) -> Value:
    return _rows("softmax_grad")(b, out, axis, dy, y)


@register("_log_softmax_backward_data.default")
def _log_softmax_grad(b: GraphBuilder, out: Out, dy: Arg, y: Arg, axis: int, dtype: Any = None) -> Value:
    return _rows("log_softmax_grad")(b, out, axis, dy, y)


def _norm_shape(x: Arg, normalized: Sequence[int]) -> tuple[int, int]:
    k = prod(normalized)
    return prod(x.shape) // k, k


@register("native_layer_norm.default")
def _layer_norm(
    b: GraphBuilder, out: Any, x: Arg, normalized: Any, gamma: Any, beta: Any, eps: float
) -> tuple[Value, ...]:
    m, k = _norm_shape(x, normalized)
    rows = [("reshape", (m, k))]
    ones, zeros = (constant(np.float32(v), tuple(normalized)) for v in (1, 0))
    inputs = [
        b.operand(x, *rows),
        b.operand(ones if gamma is None else gamma, ("reshape", (k,))),
        b.operand(zeros if beta is None else beta, ("reshape", (k,))),
    ]
    outputs = [("", out[0].shape, "float32", rows), (".mean", (m,), "float32", ()), (".rstd", (m,), "float32", ())]
    y, mean, rstd = b.emit("layer_norm", inputs, outputs, {"eps": float(eps)})
    return y, b.reshape(mean, out[1].shape), b.reshape(rstd, out[2].shape)


@register("native_layer_norm_backward.default")
def _layer_norm_backward(
    b: GraphBuilder, out: Any, dy: Arg, x: Arg, normalized: Any, mean: Arg, rstd: Arg, gamma: Any, beta: Any, mask: Any
) -> tuple[Any, ...]:
    m, k = _norm_shape(x, normalized)
    rows, vector = [("reshape", (m, k))], ("reshape", (k,))
    common = [b.operand(dy, *rows), b.operand(x, *rows), *(b.operand(v, ("reshape", (m,))) for v in (mean, rstd))]
    dx = dgamma = dbeta = None
    if mask[0]:
        weight = constant(np.float32(1), tuple(normalized)) if gamma is None else gamma
        outputs = [("", x.shape, "float32", rows)]
        (dx,) = b.emit("layer_norm_grad", [*common, b.operand(weight, vector)], outputs)
    if mask[1] or mask[2]:
        parts = [(s, tuple(normalized), "float32", [vector]) for s in (".gamma", ".beta")]
        dgamma, dbeta = b.emit("layer_norm_affine", common, parts)
    return dx, dgamma if mask[1] else None, dbeta if mask[2] else None


# ---- losses ---------------------------------------------------------------------------------------------------------


def _check_loss(weight: Any, reduction: int, logp_shape: Shape) -> None:
    if weight is not None:
        raise GraphError("class weights in the loss are not supported: leave weight=None")
    if reduction != 1:
        raise GraphError("only the mean of the loss is supported: use reduction='mean'")
    if len(logp_shape) != 2:
        raise GraphError(f"log-probabilities of shape {logp_shape}: expected [rows, classes], flatten the others")


@register("nll_loss_forward.default")
def _nll_loss(b: GraphBuilder, out: Any, logp: Arg, target: Arg, weight: Any, reduction: int, ignore: int) -> Any:
    _check_loss(weight, reduction, logp.shape)
    outputs = [("", (), "float32", ()), (".weight", (), "float32", ())]
    attrs = {"ignore_index": int(ignore)}
    return tuple(b.emit("nll_loss", [b.operand(logp), b.operand(target)], outputs, attrs))


@register("nll_loss_backward.default")
def _nll_loss_backward(
    b: GraphBuilder, out: Out, dy: Arg, logp: Arg, target: Arg, weight: Any, reduction: int, ignore: int, total: Arg
) -> Value:
    _check_loss(weight, reduction, logp.shape)
    operands = [b.operand(dy), b.operand(target), b.operand(total)]
    return b.emit("nll_loss_grad", operands, [("", out.shape, "float32", ())], {"ignore_index": int(ignore)})[0]
