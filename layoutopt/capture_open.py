"""Torch functions opened up while a step is traced: attention, group norm, dropout, up-sampling and rolling become
smaller operations that the graph's kinds express, and autograd differentiates those.

Each takes the arguments of the ATen op whose place it takes in the exported graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from layoutopt.errors import GraphError

__all__ = ["OPENED", "opened"]

OPENED: dict[str, Callable[..., Any]] = {}
"""What takes the place of each ATen op."""


def opened(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare what takes the place of ATen ops (``aten.`` is put before their names)."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        OPENED.update({f"aten.{name}": function for name in names})
        return function

    return put


@opened("scaled_dot_product_attention.default")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention as matrix products and a softmax (a wholly masked row attends evenly)."""
    if enable_gqa:
        k, v = (_repeated(x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    if is_causal:
        rows, cols = (torch.arange(n) for n in (q.shape[-2], k.shape[-2]))
        attn_mask = rows[:, None] >= cols
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.finfo(torch.float32).min)
        scores = scores + attn_mask
    return _dropout(scores.softmax(-1), dropout_p, True) @ v


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Each head ``times`` times in a row: a broadcast, which no kernel writes out."""
    if times == 1:
        return x
    *batch, heads, rows, cols = x.shape
    return x.unsqueeze(-3).expand(*batch, heads, times, rows, cols).reshape(*batch, heads * times, rows, cols)


@opened("dropout.default", "dropout_.default")
def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Zero with probability ``p``, else scaled so that the mean stays; the random numbers are the graph's own."""
    return _native_dropout(x, p, train)[0]


@opened("feature_dropout.default")
def _feature_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Whole channels are dropped."""
    return x * _dropout(torch.ones(*x.shape[:2], *(1 for _ in x.shape[2:])), p, train)


@opened("alpha_dropout.default", "feature_alpha_dropout.default")
def _alpha_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and p:
        raise GraphError("alpha dropout is not supported: capture without dropout, or use the plain kind")
    return x


@opened("native_dropout.default")
def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout makes of ones is a mask without a gradient, which is kept whole for a rule of the graph's own."""
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask, keep = torch.ops.aten.native_dropout.default(torch.ones_like(x, requires_grad=False), p, True)
    return x * mask, keep


def _normalised_groups(x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    rows = x.reshape(x.shape[0], groups, -1)
    return F.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape)


@opened("group_norm.default")
def _group_norm(
    x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> torch.Tensor:
    """Layer norm over the channels of each group, then each channel's own scale and shift."""
    shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    y = _normalised_groups(x, groups, eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


@opened("native_group_norm.default")
def _native_group_norm(
    x: torch.Tensor, weight: Any, bias: Any, n: int, channels: int, inner: int, groups: int, eps: float
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        unused = x.new_zeros(n, groups)
    return _group_norm(x, groups, weight, bias, eps), unused, unused


def _nearest(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Nearest up-sampling; by whole numbers it is a broadcast."""
    d = len(size)
    lead, extents = x.shape[:-d], x.shape[-d:]
    if all(n % m == 0 for n, m in zip(size, extents, strict=True)):
        times = [n // m for n, m in zip(size, extents, strict=True)]
        apart = x.reshape(*lead, *(n for m in extents for n in (m, 1)))
        spread = apart.expand(*lead, *(n for pair in zip(extents, times, strict=True) for n in pair))
        return spread.reshape(*lead, *size)
    for i, (n, m) in enumerate(zip(size, extents, strict=True)):
        # A place at a time, as torch finds it: floor(index * (m / n)).
        x = torch.cat([x.narrow(i - d, min(int(j * (m / n)), m - 1), 1) for j in range(n)], i - d)
    return x


@opened("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _upsample_vec(x: torch.Tensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> torch.Tensor:
    if size is None:
        assert scales is not None, "torch gives one of the two"
        size = [int(n * s) for n, s in zip(x.shape[2:], scales, strict=True)]
    return _nearest(x, size)


@opened("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default")
def _upsample(x: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
    return _nearest(x, size)


@opened("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default")
def _pool(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The mean of each of ``size`` equal parts of the last axes."""
    extents = x.shape[-len(size) :]
    if any(n % m for n, m in zip(extents, size, strict=True)):
        raise GraphError(f"adaptive pooling of {tuple(extents)} to {tuple(size)}: only equal parts are supported")
    lead = x.shape[: -len(size)]
    parts = x.reshape(*lead, *(n for m, e in zip(size, extents, strict=True) for n in (m, e // m)))
    return parts.mean([len(lead) + 1 + 2 * i for i in range(len(size))])


@opened("avg_pool1d.default", "avg_pool2d.default")
def _avg_pool(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *more: Any) -> torch.Tensor:
    """The mean of windows that do not overlap."""
    steps = tuple(stride) or tuple(kernel)
    extents = x.shape[-len(kernel) :]
    padded = any(more[0]) if more else False
    if steps != tuple(kernel) or padded or any(n % k for n, k in zip(extents, kernel, strict=True)):
        raise GraphError(f"average pooling of {tuple(extents)} by {tuple(kernel)}: only windows that tile are known")
    return _pool(x, [n // k for n, k in zip(extents, kernel, strict=True)])


@opened("roll.default")
def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """A cyclic shift: two slices in the other order, an axis at a time."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return _roll(x.reshape(-1), shifts, (0,)).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        at = -shift % x.shape[dim] if x.shape[dim] else 0
        if at:
            x = torch.cat([x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)], dim)
    return x


@opened("slice.Tensor")
def _slice(
    x: torch.Tensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> torch.Tensor:
    """Every ``step``-th element of an axis that divides so is one place of a split axis."""
    n = x.shape[dim]
    first, last, _ = slice(start, stop).indices(n)
    if step == 1 or n % step or first >= step or last != n:
        return torch.ops.aten.slice.Tensor(x, dim, start, stop, step)
    dim %= x.dim()
    return x.reshape(*x.shape[:dim], n // step, step, *x.shape[dim + 1 :]).select(dim + 1, first)


@opened("pixel_shuffle.default")
def _pixel_shuffle(x: torch.Tensor, r: int) -> torch.Tensor:
    *lead, c, h, w = x.shape
    return x.reshape(*lead, c // r**2, r, r, h, w).movedim((-4, -3), (-3, -1)).reshape(*lead, c // r**2, h * r, w * r)


@opened("cumsum.default")
def _cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A product with a triangle of ones (whole numbers stay exact up to 2²⁴)."""
    moved = x.movedim(dim, -1)
    places = torch.arange(moved.shape[-1])
    total = moved.to(torch.float32) @ (places[:, None] <= places).to(torch.float32)
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    return total.movedim(-1, dim).to(kind)


@opened("cross_entropy_loss.default")
def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The plain mean is a kind of its own; class weights, smoothing, sums and none are written out."""
    axis = 0 if x.dim() == 1 else 1
    rows = x.movedim(axis, -1)
    if target.is_floating_point():
        each = -(target.movedim(axis, -1) * rows.log_softmax(-1) * (1 if weight is None else weight)).sum(-1)
        if label_smoothing:
            raise GraphError("label smoothing of targets that are probabilities is not supported: smooth them yourself")
        return each.mean() if reduction == 1 else each.sum() if reduction == 2 else each
    logp = rows.reshape(-1, rows.shape[-1]).log_softmax(-1)
    if label_smoothing:
        return _negative_likelihood(logp, target, weight, reduction, ignore_index, label_smoothing)
    return _nll(logp, target, weight, reduction, ignore_index)


@opened("nll_loss.default", "nll_loss_nd.default", "nll_loss2d.default")
def _nll_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    rows = x.movedim(0 if x.dim() == 1 else 1, -1)
    return _nll(rows.reshape(-1, rows.shape[-1]), target, weight, reduction, ignore_index)


def _nll(logp: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore: int) -> torch.Tensor:
    if weight is None and reduction == 1:
        return F.nll_loss(logp, target.reshape(-1), ignore_index=ignore)
    return _negative_likelihood(logp, target, weight, reduction, ignore, 0.0)


def _negative_likelihood(
    logp: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore: int, smoothing: float
) -> torch.Tensor:
    flat = target.reshape(-1)
    counts = flat != ignore
    chosen = flat[:, None] == torch.arange(logp.shape[-1])
    kept = counts.to(logp.dtype)
    share = kept if weight is None else kept * torch.where(chosen, weight, 0.0).sum(-1)
    each = -torch.where(chosen, logp, 0.0).sum(-1) * share
    if smoothing:
        smooth = -(logp if weight is None else logp * weight).sum(-1) * kept
        each = (1 - smoothing) * each + smoothing / logp.shape[-1] * smooth
    if reduction == 0:
        return each.reshape(target.shape)
    return each.sum() / share.sum() if reduction == 1 else each.sum()


@opened("argmax.default")
def _argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The first place of the largest value: the largest count from the end among the places that hold it."""
    if dim is None:
        flat = _argmax(x.reshape(-1), 0)
        return flat.reshape((1,) * x.dim()) if keepdim else flat
    rows = x.movedim(dim, -1)
    last = rows.shape[-1] - 1
    from_end = last - torch.arange(last + 1)
    found = last - torch.where(rows == rows.amax(-1, keepdim=True), from_end, 0).amax(-1)
    return found.unsqueeze(dim) if keepdim else found


@opened("rms_norm.default")
def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> torch.Tensor:
    """Over the last axes; eps as torch chooses it where none is given."""
    rows = x.reshape(*x.shape[: x.dim() - len(shape)], prod(shape))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).reshape(x.shape)
    return y if weight is None else y * weight
