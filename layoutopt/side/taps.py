"""A zoo model's forward pass up to its taps, captured: which modules can be tapped, and which tokens are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from layoutopt import zoo
from layoutopt.capture import capture_forward
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.side.graphs import tap_tensor
from layoutopt.zoo_models import ZOO

__all__ = ["LATE", "TOKENS", "Tappable", "capture_taps", "chosen", "tappable"]

TOKENS = ("pivot", "all", "first", "last")
"""Which tokens of a tap are kept: only the one that the model's own loss uses, every one, the first, or the last that
is not padding."""

LATE = "late"
"""Instead of names: the later half of the blocks, whose activations tell a server fewer of the words."""


class Tappable(NamedTuple):
    """What can be tapped of a module.

    Attributes:
        names: modules whose results are the activations after each block, in order. The last is the backbone's final
            result: of models that normalise behind the last block, the norm.
        pivot: which token a classifier reads, "first" or "last" (that is not padding).
        prefix: of the names of the backbone's parameters.
        blocks: path under which the blocks lie.
    """

    names: tuple[str, ...]
    pivot: str
    prefix: str
    blocks: str


_FAMILIES: tuple[tuple[str, str, str, str], ...] = (
    # backbone, its blocks, its last norm, pivot
    ("bert", "encoder.layer", "", "first"),
    ("distilbert", "transformer.layer", "", "first"),
    ("vit", "layers", "layernorm", "first"),
    ("transformer", "h", "ln_f", "last"),
    ("model.decoder", "layers", "final_layer_norm", "last"),
    ("model", "layers", "norm", "last"),
)


def tappable(module: nn.Module, name: str) -> Tappable:
    """What can be tapped of a module of a known family.

    Args:
        module: of transformers.
        name: for the message.

    Raises:
        GraphError: of no known family.
    """
    paths = dict(module.named_modules())
    for backbone, layers, norm, pivot in _FAMILIES:
        blocks = f"{backbone}.{layers}"
        if not isinstance(paths.get(blocks), nn.ModuleList):
            continue
        names = [path for path in paths if path.rpartition(".")[0] == blocks]
        if f"{backbone}.{norm}" in paths and norm:
            names[-1] = f"{backbone}.{norm}"
        # OPT's decoder lies in a model of its own, whose name a checkpoint's parameters have too.
        return Tappable(tuple(names), pivot, f"{backbone.partition('.')[0]}.", blocks)
    raise GraphError(
        f"{name} has no blocks that layoutopt can tap: side-tuning takes BERT, DistilBERT, ViT, GPT-2, OPT, and models "
        "built as Llama is"
    )


def capture_taps(
    model: str, *, batch: int, seq: int = 0, taps: Sequence[str] = (), tokens: str = "pivot"
) -> TrainingGraph:
    """The forward pass of a zoo model up to its taps.

    Args:
        model: of the zoo.
        batch: samples.
        seq: tokens a sample; 0 for the model's usual number. Images have none to be set.
        taps: names of modules, in order, the last being the final result, or ``late``; all blocks by default.
        tokens: one of :data:`TOKENS`.

    Returns:
        A forward-only graph, passes not yet run, with an output ``tap:NAME`` float32 [rows, width] per tap, where rows
        are samples ("pivot") or samples * tokens. Its ``meta["side"]`` says what the taps are.

    Raises:
        GraphError: unknown model, tap or tokens, taps out of order or without the final result, or taps of several
            widths.
    """
    if tokens not in TOKENS:
        raise GraphError(f"unknown tokens {tokens!r}: choose one of {', '.join(TOKENS)}")
    with zoo.without_weights():
        module, example, _ = zoo.build(model, batch=batch, seq=seq if _is_text(model) and seq else None)
    inputs = {key: t for key, t in dict(example).items() if key != "labels"}  # type: ignore[arg-type]
    known = tappable(module, model)
    names = chosen(known.names, taps, model)
    graph = _captured(module, inputs, known, names, tokens, model)
    shapes = {graph.tensors[tap_tensor(n)].shape for n in names}
    widths = sorted({shape[1] for shape in shapes})
    if len(widths) > 1:
        raise GraphError(f"the taps of {model} are {', '.join(map(str, widths))} wide: side-tuning needs one width")
    side = {
        "model": model,
        "taps": list(names),
        "tokens": tokens,
        "pivot": known.pivot,
        "prefix": known.prefix,
        "blocks": known.blocks,
        "width": widths[0],
        "rows": next(iter(shapes))[0],
    }
    return graph.with_ops(graph.ops, meta={**graph.meta, "side": side})


def _is_text(model: str) -> bool:
    return model not in ZOO or bool(ZOO[model].usual.seq)


def chosen(known: Sequence[str], taps: Sequence[str], model: str) -> tuple[str, ...]:
    """The taps that are meant by ``taps``: none means all, ``late`` alone the later half.

    Raises:
        GraphError: one is unknown or named twice, they are out of order, or the final result is missing.
    """
    if not taps:
        return tuple(known)
    if tuple(taps) == (LATE,):
        return tuple(known[len(known) // 2 :])
    for name in taps:
        if name not in known:
            raise GraphError(f"{model} has no tap {name!r}: its taps are {', '.join(known)}")
    places = [known.index(name) for name in taps]
    if any(a >= b for a, b in pairwise(places)):
        raise GraphError(f"the taps {', '.join(taps)} are not in the order of {model}: name each once, in order")
    if taps[-1] != known[-1]:
        raise GraphError(f"the last tap of {model} has to be its final result, {known[-1]}: got {taps[-1]}")
    return tuple(taps)


def _captured(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    known: Tappable,
    names: Sequence[str],
    tokens: str,
    model: str,
) -> TrainingGraph:
    keep = {"all": _every_row, "first": _first_rows, "last": _last_rows}[known.pivot if tokens == "pivot" else tokens]
    backbone = module.get_submodule(known.prefix.rstrip("."))
    with _listening(module, names, keep) as heard:

        def outputs(_: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            heard.batch = batch
            backbone(**batch)
            return {tap_tensor(name): heard.taps[name] for name in names}

        return capture_forward(
            module,
            dict(inputs),
            outputs=outputs,
            name=f"{model}-taps",
            meta={"what": f"{model} forward to its {len(names)} taps, {tokens} tokens"},
        )


class _Heard:
    """What tapped modules gave, and the batch that they gave it for."""

    def __init__(self) -> None:
        self.batch: Mapping[str, torch.Tensor] = {}
        self.taps: dict[str, torch.Tensor] = {}


@contextmanager
def _listening(
    module: nn.Module,
    names: Sequence[str],
    keep: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
) -> Iterator[_Heard]:
    """What modules give, by name, whenever they are called meanwhile; what is kept of it is traced at once."""
    heard = _Heard()

    def hear(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            heard.taps[name] = keep(result[0] if isinstance(result, tuple) else result, heard.batch)

        return hook

    handles = [module.get_submodule(name).register_forward_hook(hear(name)) for name in names]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _every_row(x: torch.Tensor, _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _first_rows(x: torch.Tensor, _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return x[:, 0]


def _last_rows(x: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The last token of each sample that the mask does not hide; of a sample that is hidden whole, the first."""
    samples, tokens, width = x.shape
    places = torch.arange(tokens)
    last = torch.where(batch["attention_mask"] != 0, places, 0).amax(-1)
    return x.reshape(samples * tokens, width)[torch.arange(samples) * tokens + last]
