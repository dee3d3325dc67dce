"""Models by name, from their configuration alone: nothing is downloaded and no weight is allocated.

Dropout is 0 in every one of them. A user's own model is named ``package.module:factory``; the factory returns
``(module, batch)`` or ``(module, batch, loss)`` as :func:`layoutopt.capture.capture` takes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layoutopt.capture import Batch, LossFn, capture
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import Optimizer, optimizer_from, optimizer_meta

__all__ = ["MODELS", "build", "capture_named", "capture_zoo", "load_user", "without_weights"]


@dataclass(frozen=True)
class _Entry:
    text: str
    build: Callable[[int, int | None, int], tuple[nn.Module, dict[str, torch.Tensor]]]
    batch: int
    seq: int | None
    labels: int


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise GraphError("the models of the zoo need transformers: pip install 'layoutopt[torch]'") from error
    return transformers


def _bert(hidden: int, layers: int, heads: int, ffn: int, vocab: int = 30522, positions: int = 512) -> Any:
    def make(batch: int, seq: int | None, labels: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        hf = _transformers()
        config = hf.BertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=positions,
            num_labels=labels,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        # The kind of loss must not depend on the labels of the example batch.
        config.problem_type = "single_label_classification"
        length = int(seq or 1)
        if length > positions:
            raise GraphError(
                f"sequence length {length} is beyond the model's {positions} positions: choose a shorter one"
            )
        ids = torch.zeros(batch, length, dtype=torch.int64)
        batch_of = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids),
            "labels": torch.zeros(batch, dtype=torch.int64),
        }
        return hf.BertForSequenceClassification(config), batch_of

    return make


def _vit(hidden: int, layers: int, heads: int, ffn: int, image: int, patch: int, channels: int) -> Any:
    def make(batch: int, seq: int | None, labels: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        hf = _transformers()
        config = hf.ViTConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            image_size=image,
            patch_size=patch,
            num_channels=channels,
            num_labels=labels,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        config.problem_type = "single_label_classification"
        batch_of = {
            "pixel_values": torch.zeros(batch, channels, image, image),
            "labels": torch.zeros(batch, dtype=torch.int64),
        }
        return hf.ViTForImageClassification(config), batch_of

    return make


_ZOO = {
    "minilm": _Entry("BERT, 6 layers of 384 (MiniLM), 22 M parameters", _bert(384, 6, 12, 1536), 16, 64, 2),
    "bert-base": _Entry("BERT, 12 layers of 768, 110 M parameters", _bert(768, 12, 12, 3072), 8, 128, 2),
    "bert-tiny": _Entry("BERT, 2 layers of 60, odd sizes for tests", _bert(60, 2, 4, 96, 101, 40), 3, 13, 3),
    "vit-tiny": _Entry(
        "ViT, 12 layers of 192, images 224², 5.5 M parameters", _vit(192, 12, 3, 768, 224, 16, 3), 8, None, 1000
    ),
    "vit-digits": _Entry("ViT, 4 layers of 64, digits of 8², the demo", _vit(64, 4, 4, 128, 8, 2, 1), 64, None, 10),
    "vit-odd": _Entry("ViT, 2 layers of 60, odd sizes for tests", _vit(60, 2, 4, 96, 8, 2, 1), 3, None, 10),
}

MODELS: dict[str, str] = {name: entry.text for name, entry in _ZOO.items()}
"""What each name stands for."""


class _NoWeights(TorchFunctionMode):
    """Uninitialised and random tensors, which modules make their parameters of, go to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.rand, torch.randn):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules built inside have parameters of shape only (on the meta device); buffers with values stay real."""
    with _NoWeights():
        yield


def build(
    name: str, *, batch: int | None = None, seq: int | None = None, num_labels: int | None = None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A zoo model and an example batch, with real weights unless called in :func:`without_weights`.

    Raises:
        GraphError: unknown name, or a size that the model cannot take.
    """
    if name not in _ZOO:
        raise GraphError(f"unknown model {name!r}: choose among {', '.join(_ZOO)}, or give package.module:factory")
    entry = _ZOO[name]
    if seq is not None and entry.seq is None:
        raise GraphError(f"{name} takes images: it has no sequence length to set")
    for what, size in (("batch", batch), ("sequence length", seq), ("number of labels", num_labels)):
        if size is not None and size < 1:
            raise GraphError(f"{what} {size} for {name}: expected at least 1")
    return entry.build(batch or entry.batch, seq or entry.seq, num_labels or entry.labels)


def capture_zoo(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | Optimizer | None = "adamw",
    num_labels: int | None = None,
    keep_grads: bool = False,
) -> TrainingGraph:
    """The training step of a zoo model; sizes that are not given are the model's usual ones."""
    with without_weights():
        module, example = build(name, batch=batch, seq=seq, num_labels=num_labels)
    chosen = optimizer_from(optimizer)
    words = ["layoutopt capture", name, f"--batch {len(example['labels'])}"]
    words += [f"--seq {example['input_ids'].shape[1]}"] if "input_ids" in example else []
    words += [f"--labels {num_labels}"] if num_labels else []
    words += [f"--optimizer {(optimizer_meta(chosen) or {'name': 'none'})['name']}"]
    meta = {"command": " ".join(words)}
    return capture(module, example, optimizer=chosen, name=name, keep_grads=keep_grads, meta=meta)


def load_user(where: str) -> tuple[nn.Module, Batch, LossFn | None]:
    """Module, batch and loss from ``package.module:factory``; modules in the current folder are found too.

    Raises:
        GraphError: no such module or factory, or it returns something else.
    """
    path, _, attribute = where.partition(":")
    if not path or not attribute:
        raise GraphError(f"{where!r} is neither a zoo model ({', '.join(_ZOO)}) nor package.module:factory")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        factory = getattr(import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise GraphError(f"cannot load {where}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    made = factory() if callable(factory) else factory
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise GraphError(f"{where} returned {type(made).__name__}, expected (module, batch) or (module, batch, loss)")
    return made[0], made[1], made[2] if len(made) == 3 else None


def capture_named(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | Optimizer | None = "adamw",
    num_labels: int | None = None,
) -> TrainingGraph:
    """A zoo model by name, or a user's by ``package.module:factory`` (whose sizes are the factory's).

    Raises:
        GraphError: unknown name, or sizes given for a user's model.
    """
    if ":" not in name:
        return capture_zoo(name, batch=batch, seq=seq, optimizer=optimizer, num_labels=num_labels)
    if (batch, seq, num_labels) != (None, None, None):
        raise GraphError(f"{name} brings its own batch: batch, sequence and labels are set in the factory")
    module, example, loss = load_user(name)
    chosen = optimizer_from(optimizer)
    word = (optimizer_meta(chosen) or {"name": "none"})["name"]
    return capture(
        module,
        example,
        loss=loss,
        optimizer=chosen,
        name=name.rpartition(":")[2],
        meta={"command": f"layoutopt capture {name} --optimizer {word}"},
    )
