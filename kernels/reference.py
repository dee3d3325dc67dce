"""The interpreter: what every op kind means, in numpy.

This is the oracle that OpenCL kernels and graph passes are tested against, and the living definition of the kinds
listed in ``layoutopt/graph.py``. It is written to be read, and calculates in float64 unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kernels import convolve
from layoutopt.errors import GraphError
from layoutopt.expr import evaluate_expr
from layoutopt.graph import KINDS, Op, Tensor, TrainingGraph
from layoutopt.quantize import Format, dequantise, quantise

__all__ = ["evaluate", "run"]

Arrays = list[np.ndarray]
Shapes = Sequence[tuple[int, ...]]


def run(graph: TrainingGraph, values: Mapping[str, np.ndarray], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Execute a whole step.

    In-place ops do not overwrite: the new tensor is a new array, so that the old value can still be looked at.

    Args:
        graph: any graph, before or after passes.
        values: an array for every tensor of role input, parameter and state, in the tensor's shape.
        dtype: the float type to calculate in.

    Returns:
        Every tensor's value by name: floats in ``dtype``, "int32" as int32, "bool" as bool.

    Raises:
        GraphError: a value is missing or has another shape, or an op's operands do not fit together.
    """
    known: dict[str, np.ndarray] = {}
    for tensor in graph.by_role("input", "parameter", "state", "constant"):
        if tensor.name in values:
            value = np.asarray(values[tensor.name])
        elif tensor.name in graph.constants:
            value = np.broadcast_to(np.asarray(graph.constants[tensor.name]), tensor.shape)
        else:
            raise GraphError(
                f"no value for {tensor.role} {tensor.name!r} of shape {tensor.shape}: pass one in `values`"
            )
        if value.shape != tensor.shape:
            raise GraphError(f"value of {tensor.name!r} has shape {value.shape}, expected {tensor.shape}")
        known[tensor.name] = _as(tensor, value, dtype)
    for op in graph.ops:
        try:
            for tensor, value in _execute(graph, op, known, dtype):
                known[tensor.name] = _as(tensor, value, dtype)
        except GraphError as error:
            raise GraphError(f"op {op.name} ({op.kind}): {error}") from error
    return known


def _execute(graph: TrainingGraph, op: Op, known: dict[str, np.ndarray], dtype: Any) -> list[tuple[Tensor, np.ndarray]]:
    inputs = [operand.view.array(known[operand.tensor]) for operand in op.inputs]
    shapes = [graph.operand_shape(operand) for operand in op.outputs]
    done = []
    for operand, value in zip(op.outputs, evaluate(op.kind, op.attrs, inputs, shapes, dtype), strict=True):
        tensor = graph.tensors[operand.tensor]
        # An output's view says how the op sees the stored tensor: storing is the view undone.
        done.append((tensor, operand.view.inverse(tensor.shape).array(value)))
    return done


def _as(tensor: Tensor, value: np.ndarray, dtype: Any) -> np.ndarray:
    if tensor.dtype == "float16":  # calculated with in ``dtype``, rounded where it is stored
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(np.float16).astype(dtype)
    return np.asarray(value, {"float32": dtype, "int32": np.int32, "bool": np.bool_}[tensor.dtype])


def evaluate(
    kind: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[np.ndarray],
    output_shapes: Shapes,
    dtype: Any = np.float64,
) -> Arrays:
    """Calculate one op.

    Args:
        kind: the op's kind.
        attrs: its attributes.
        inputs: operand values as the op sees them (views applied).
        output_shapes: the shapes the op writes, views applied.
        dtype: the float type to calculate in; integers and bools stay what they are.

    Returns:
        One array per output, in the shapes asked for.

    Raises:
        GraphError: unknown kind, wrong number of operands, shapes that do not fit, an index out of range.
    """
    rule = _RULES.get(kind)
    if rule is None:
        raise GraphError(f"unknown kind {kind!r}; known kinds: {', '.join(sorted(KINDS))}")
    arrays = [np.asarray(x) for x in inputs]
    typed = [x.astype(dtype, copy=False) if x.dtype.kind == "f" else x for x in arrays]
    shapes = [tuple(s) for s in output_shapes]
    if rule.ranks is not None and tuple(x.ndim for x in typed) != rule.ranks:
        raise GraphError(f"inputs have shapes {[x.shape for x in typed]}, expected {rule.text}")
    results = rule.function(dict(attrs), typed, shapes, dtype)
    if len(results) != len(shapes):
        raise GraphError(f"{len(shapes)} outputs are asked for, {kind} has {len(results)}")
    for position, (value, shape) in enumerate(zip(results, shapes, strict=True)):
        if value.shape != shape:
            raise GraphError(f"output {position} would have shape {value.shape}, expected {shape} ({rule.text})")
    return results


class _Rule:
    """How a kind is calculated, and the ranks and shapes it wants (for the error message)."""

    def __init__(self, function: Callable[..., Arrays], ranks: tuple[int, ...] | None, text: str) -> None:
        self.function, self.ranks, self.text = function, ranks, text


_RULES: dict[str, _Rule] = {}


def _kind(name: str, text: str, ranks: tuple[int, ...] | None = None) -> Callable[[Any], Any]:
    def register(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
        _RULES[name] = _Rule(function, ranks, text)
        return function

    return register


def _same(what: str, *lengths: int) -> None:
    if len(set(lengths)) != 1:
        raise GraphError(f"{what} has lengths {lengths} in different operands: they must be equal")


# ---- data movement ------------------------------------------------------------------------------------------------


@_kind("view", "x -> x in the viewed shape")
def _view(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """The input operand's view has done the work."""
    if len(x) != 1:
        raise GraphError(f"a view has one input, got {len(x)}")
    return [x[0]]


@_kind("gather", "table[v,d], ids[n] -> y[n,d]", (2, 1))
def _gather(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``y[i] = table[ids[i]]``."""
    table, ids = x
    _check_ids("ids", ids, table.shape[0])
    return [table[ids.astype(np.int64)]]


@_kind("scatter_add", "dy[n,d], ids[n] -> table_grad[v,d]", (2, 1))
def _scatter_add(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``grad[v] = sum of dy[i] over ids[i] == v``; row ``padding_idx`` stays zero."""
    dy, ids = x
    _same("n", dy.shape[0], ids.shape[0])
    _check_ids("ids", ids, shapes[0][0])
    out = np.zeros((shapes[0][0], dy.shape[1]), dtype)
    kept = ids != int(attrs.get("padding_idx", -1))
    np.add.at(out, ids[kept].astype(np.int64), dy[kept])
    return [out]


def _check_ids(what: str, ids: np.ndarray, rows: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < rows):
        raise GraphError(f"{what} reach from {ids.min()} to {ids.max()}, expected within 0..{rows - 1}")


@_kind("concat", "x_i[o,n_i,i] -> y[o,n,i]")
def _concat(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """Part i fills ``y[:, starts[i]:starts[i]+n_i, :]``; what no part covers is 0."""
    starts = tuple(attrs["starts"])
    _same("the list of parts and the list of starts", len(x), len(starts))
    out = np.zeros(shapes[0], np.result_type(*x))
    for part, start in zip(x, starts, strict=True):
        if part.ndim != 3 or start < 0 or out[:, start : start + part.shape[1], :].shape != part.shape:
            raise GraphError(
                f"part of shape {part.shape} at {start} does not fit output {shapes[0]} along its middle axis"
            )
        out[:, start : start + part.shape[1], :] = part
    return [out]


@_kind("iota", "-> y[n]", ())
def _iota(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``y[i] = start + step * i``."""
    return [attrs.get("start", 0) + attrs.get("step", 1) * np.arange(shapes[0][0])]


# ---- arithmetic ---------------------------------------------------------------------------------------------------


@_kind("contraction", "a[b,m,k], b[b,k,n], e_i[b,m,n]... -> c_j[b,m,n]...")
def _contraction(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``alpha * sum over k of a[b,m,k] * b[b,k,n]``, or each result of ``epilogue`` over that and the e_i."""
    if len(x) < 2 or any(operand.ndim != 3 for operand in x):
        raise GraphError(f"inputs have shapes {[v.shape for v in x]}, expected a[b,m,k], b[b,k,n], e_i[b,m,n]...")
    a, b, *extra = x
    _same("b", a.shape[0], b.shape[0])
    _same("k", a.shape[2], b.shape[1])
    total = np.asarray(attrs.get("alpha", 1.0), dtype) * np.matmul(a, b)
    program = attrs.get("epilogue")
    if program is None and not extra:
        return [total]
    if program is None:
        raise GraphError(f"{len(x)} inputs: without an epilogue there is nothing to do with more than a and b")
    domains = {total.shape} | {e.shape for e in extra} | set(shapes)
    if len(domains) != 1:
        raise GraphError(f"sum, extra operands and outputs have shapes {sorted(domains)}: they must be equal")
    return [np.broadcast_to(v, total.shape) for v in evaluate_expr(program, [total, *extra], dtype)]


@_kind("pointwise", "x_i[d...] -> y_j[d...], all of one shape")
def _pointwise(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """Each result of ``expr`` at every point; operands see one domain (broadcasts are expand views)."""
    domains = {a.shape for a in x} | set(shapes)
    if len(domains) != 1:
        raise GraphError(
            f"operands of a pointwise op have shapes {sorted(domains)}: they must be equal, expand by a view"
        )
    return [np.broadcast_to(v, shapes[0]) for v in evaluate_expr(attrs["expr"], x, dtype)]


@_kind("reduce", "x[m,k] -> y[m]", (2,))
def _reduce(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``fn`` of each row: sum, mean or max."""
    functions: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max}
    if attrs["fn"] not in functions:
        raise GraphError(f"reduce fn {attrs['fn']!r} is not known: expected sum, mean or max")
    return [functions[attrs["fn"]](x[0], axis=1)]


# ---- convolution --------------------------------------------------------------------------------------------------


@_kind("conv", "x[n,c,h,w], w[o,c/groups,kh,kw] -> y[n,o,oh,ow]", (4, 4))
def _conv(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``y[n,o,i,j]``: sum over c, a, b of ``x[n,c,i*sh + a*dh - ph,j*sw + b*dw - pw] * w[o,c,a,b]``, 0 outside x."""
    return [convolve.conv(x[0], x[1], convolve.Window.of(attrs))]


@_kind("conv_grad_input", "dy[n,o,oh,ow], w[o,c/groups,kh,kw] -> dx[n,c,h,w]", (4, 4))
def _conv_grad_input(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """Each ``dy * w`` added where ``conv`` read; the extents of x are those asked for."""
    return [convolve.grad_input(x[0], x[1], shapes[0], convolve.Window.of(attrs))]


@_kind("conv_grad_weight", "dy[n,o,oh,ow], x[n,c,h,w] -> dw[o,c/groups,kh,kw]", (4, 4))
def _conv_grad_weight(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``dy`` against what ``conv`` read, summed over n, oh and ow."""
    return [convolve.grad_weight(x[0], x[1], shapes[0], convolve.Window.of(attrs))]


# ---- numbers in few bits ------------------------------------------------------------------------------------------


@_kind("quantize", "x[m,k] -> words[m,w], scales[m,g]", (2,))
def _quantize(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """As ``layoutopt/quantize.py`` has it, in float32 whatever the type calculated in."""
    words, scales = quantise(x[0].astype(np.float32), Format.parse(attrs["format"]))
    return [words, scales.astype(dtype)]


@_kind("dequantize", "words[m,w], scales[m,g] -> x[m,k]", (2, 2))
def _dequantize(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """What the codes stand for."""
    return [dequantise(x[0], x[1], shapes[0][1], Format.parse(attrs["format"]))]


@_kind("quantized_gather", "words[v,w], scales[v,g], ids[n] -> y[n,d]", (2, 2, 1))
def _quantized_gather(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """Rows of a table by id."""
    words, scales, ids = x
    _check_ids("ids", ids, words.shape[0])
    rows = ids.astype(np.int64)
    return [dequantise(words[rows], scales[rows], shapes[0][1], Format.parse(attrs["format"]))]


@_kind("quantized_contraction", "a[m,k], words[n,w], scales[n,g], e_i[m,n]... -> c_j[m,n]...")
def _quantized_contraction(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``contraction`` of a with the rows that the codes stand for, transposed."""
    if len(x) < 3 or any(operand.ndim != 2 for operand in x):
        raise GraphError(f"inputs have shapes {[v.shape for v in x]}, expected a[m,k], words[n,w], scales[n,g]...")
    a, words, scales, *extra = x
    weights = dequantise(words, scales, a.shape[1], Format.parse(attrs["format"]))
    operands = [a[None], weights.T[None], *(e[None] for e in extra)]
    return [y[0] for y in _contraction(attrs, operands, [(1, *s) for s in shapes], dtype)]


# ---- rows ---------------------------------------------------------------------------------------------------------


def _logsumexp(x: np.ndarray) -> np.ndarray:
    """Of each row, kept as a column; the row's maximum is taken out first so that nothing overflows."""
    peak = x.max(axis=1, keepdims=True)
    return peak + np.log(np.exp(x - peak).sum(axis=1, keepdims=True))


@_kind("softmax", "x[m,k] -> y[m,k]", (2,))
def _softmax(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``exp(x - max) / sum of exp(x - max)`` in each row."""
    e = np.exp(x[0] - x[0].max(axis=1, keepdims=True))
    return [e / e.sum(axis=1, keepdims=True)]


@_kind("softmax_grad", "dy[m,k], y[m,k] -> dx[m,k]", (2, 2))
def _softmax_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``dx = y * (dy - sum of dy*y)``."""
    dy, y = x
    return [y * (dy - (dy * y).sum(axis=1, keepdims=True))]


@_kind("log_softmax", "x[m,k] -> y[m,k]", (2,))
def _log_softmax(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``x - logsumexp(x)`` in each row."""
    return [x[0] - _logsumexp(x[0])]


@_kind("log_softmax_grad", "dy[m,k], y[m,k] -> dx[m,k]", (2, 2))
def _log_softmax_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``dx = dy - exp(y) * sum of dy``."""
    dy, y = x
    return [dy - np.exp(y) * dy.sum(axis=1, keepdims=True)]


@_kind("layer_norm", "x[m,k], gamma[k], beta[k] -> y[m,k], mean[m], rstd[m]", (2, 1, 1))
def _layer_norm(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``rstd = 1/sqrt(var + eps)`` with the biased variance; ``y = (x - mean) * rstd * gamma + beta``."""
    data, gamma, beta = x
    _same("k", data.shape[1], gamma.shape[0], beta.shape[0])
    mean = data.mean(axis=1)
    rstd = 1 / np.sqrt(data.var(axis=1) + np.asarray(attrs["eps"], dtype))
    return [(data - mean[:, None]) * rstd[:, None] * gamma + beta, mean, rstd]


@_kind("layer_norm_grad", "dy[m,k], x[m,k], mean[m], rstd[m], gamma[k] -> dx[m,k]", (2, 2, 1, 1, 1))
def _layer_norm_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """With ``n = (x - mean)*rstd`` and ``g = dy*gamma``: ``dx = rstd * (g - mean of g - n * mean of g*n)`` by rows."""
    dy, data, mean, rstd, gamma = x
    normal = (data - mean[:, None]) * rstd[:, None]
    g = dy * gamma
    return [rstd[:, None] * (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True))]


@_kind("layer_norm_affine", "dy[m,k], x[m,k], mean[m], rstd[m] -> dgamma[k], dbeta[k]", (2, 2, 1, 1))
def _layer_norm_affine(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``dgamma = sum over rows of dy * (x - mean)*rstd``, ``dbeta = sum over rows of dy``."""
    dy, data, mean, rstd = x
    return [(dy * (data - mean[:, None]) * rstd[:, None]).sum(axis=0), dy.sum(axis=0)]


# ---- attention ----------------------------------------------------------------------------------------------------


def _scores(attrs: dict[str, Any], q: np.ndarray, k: np.ndarray, more: Arrays, dtype: Any) -> Arrays:
    """Scores [b,m,n], and what ``score`` makes of them."""
    if q.ndim != 3 or k.ndim != 3:
        raise GraphError(f"queries and keys have shapes {q.shape} and {k.shape}, expected [b,m,d] and [b,n,d]")
    _same("b", q.shape[0], k.shape[0])
    _same("d", q.shape[2], k.shape[2])
    scores = np.asarray(attrs.get("alpha", 1.0), dtype) * np.matmul(q, k.transpose(0, 2, 1))
    if any(x.shape != scores.shape for x in more):
        raise GraphError(f"operands of the score have shapes {[x.shape for x in more]}, expected {scores.shape}")
    return [scores, np.broadcast_to(evaluate_expr(attrs["score"], [scores, *more], dtype)[0], scores.shape)]


def _dropped(attrs: dict[str, Any], x: np.ndarray, more: Arrays, dtype: Any) -> np.ndarray:
    return evaluate_expr(attrs["drop"], [x, *more], dtype)[0] if "drop" in attrs else x


@_kind("attention", "q[b,m,d], k[b,n,d], v[b,n,e], x_i[b,m,n]... -> o[b,m,e], peak[b,m], mass[b,m]")
def _attention(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``o = drop(softmax(score(alpha q kT))) v``; peak and mass are the rows' maxima and sums of exponentials."""
    q, k, v, *more = x
    seen = _scores(attrs, q, k, more, dtype)[1]
    peak = seen.max(axis=2)
    with np.errstate(invalid="ignore"):
        e = np.exp(seen - peak[..., None])
    mass = e.sum(axis=2)
    return [np.matmul(_dropped(attrs, e / mass[..., None], more, dtype), v), peak, mass]


@_kind("attention_grad", "q, k, v, o, peak[b,m], mass[b,m], do[b,m,e], x_i[b,m,n]... -> dq, dk, dv")
def _attention_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """The chain rule through ``attention``, with the probabilities made again from peak and mass."""
    q, k, v, o, peak, mass, do, *more = x
    scores, seen = _scores(attrs, q, k, more, dtype)
    p = np.exp(seen - peak[..., None]) / mass[..., None]
    do = np.asarray(attrs.get("beta", 1.0), dtype) * do
    dp = _dropped(attrs, np.matmul(do, v.transpose(0, 2, 1)), more, dtype)
    dt = p * (dp - (o * do).sum(axis=2)[..., None])
    ds = evaluate_expr(attrs["grad"], [dt, *more, scores], dtype)[0] if "grad" in attrs else dt
    alpha = np.asarray(attrs.get("alpha", 1.0), dtype)
    dv = np.matmul(_dropped(attrs, p, more, dtype).transpose(0, 2, 1), do)
    return [alpha * np.matmul(ds, k), alpha * np.matmul(ds.transpose(0, 2, 1), q), dv]


# ---- losses -------------------------------------------------------------------------------------------------------


def _targets(attrs: dict[str, Any], target: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Which targets count, and a class for every row (0 where ignored)."""
    counted = target != int(attrs.get("ignore_index", -100))
    _check_ids("targets", target[counted], classes)
    return counted, np.where(counted, target, 0).astype(np.int64)


def _mean_loss(each: np.ndarray, counted: np.ndarray, dtype: Any) -> Arrays:
    """Mean over what counts (nan where nothing does, as in torch), and how many count."""
    weight = counted.sum().astype(dtype)
    with np.errstate(invalid="ignore"):
        return [np.asarray(np.where(counted, each, 0).sum() / weight, dtype), np.asarray(weight)]


@_kind("nll_loss", "logp[n,c], target[n] -> loss[], weight[]", (2, 1))
def _nll_loss(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``loss = mean of -logp[i, target[i]]`` over the targets that are not ``ignore_index``; weight counts them."""
    logp, target = x
    _same("n", logp.shape[0], target.shape[0])
    counted, chosen = _targets(attrs, target, logp.shape[1])
    return _mean_loss(-logp[np.arange(len(chosen)), chosen], counted, dtype)


@_kind("nll_loss_grad", "dloss[], target[n], weight[] -> dlogp[n,c]", (0, 1, 0))
def _nll_loss_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``-dloss/weight`` at each counted target, 0 elsewhere."""
    dloss, target, weight = x
    counted, chosen = _targets(attrs, target, shapes[0][1])
    out = np.zeros((len(target), shapes[0][1]), dtype)
    out[np.flatnonzero(counted), chosen[counted]] = -dloss / weight if counted.any() else 0
    return [out]


@_kind("cross_entropy", "logits[n,c], target[n] -> loss[], lse[n], weight[]", (2, 1))
def _cross_entropy(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``lse = logsumexp(logits)`` by rows; ``loss = mean of lse[i] - logits[i, target[i]]`` over counted targets."""
    logits, target = x
    _same("n", logits.shape[0], target.shape[0])
    counted, chosen = _targets(attrs, target, logits.shape[1])
    lse = _logsumexp(logits)[:, 0]
    loss, weight = _mean_loss(lse - logits[np.arange(len(chosen)), chosen], counted, dtype)
    return [loss, lse, weight]


@_kind("cross_entropy_grad", "dloss[], logits[n,c], target[n], lse[n], weight[] -> dlogits[n,c]", (0, 2, 1, 1, 0))
def _cross_entropy_grad(attrs: dict[str, Any], x: Arrays, shapes: Shapes, dtype: Any) -> Arrays:
    """``dloss/weight * (exp(logits - lse) - onehot(target))`` in counted rows, 0 in ignored ones."""
    dloss, logits, target, lse, weight = x
    counted, chosen = _targets(attrs, target, logits.shape[1])
    out = np.zeros(logits.shape, dtype)
    if counted.any():
        soft = np.exp(logits - lse[:, None])
        soft[np.arange(len(chosen)), chosen] -= 1
        out[counted] = (dloss / weight * soft)[counted]
    return [out]
