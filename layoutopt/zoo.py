"""Models by name, from their configuration alone: nothing is downloaded and no weight is allocated.

Dropout is off unless asked for. A user's own model is named ``package.module:factory``; the factory returns
``(module, batch)`` or ``(module, batch, loss)`` as :func:`layoutopt.capture.capture` takes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layoutopt.capture import Batch, LossFn, capture, capture_forward
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.modes import set_mode
from layoutopt.optimizers import Optimizer, optimizer_from, optimizer_meta
from layoutopt.zoo_models import ZOO, Made, Sizes

__all__ = ["MODELS", "build", "capture_named", "capture_zoo", "load_user", "without_weights"]


MODELS: dict[str, str] = {name: entry.text for name, entry in ZOO.items()}
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
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    num_labels: int | None = None,
    mode: str = "full",
    dropout: bool = False,
) -> Made:
    """A zoo model, an example batch and its loss (None: the module's own), with real weights unless called in
    :func:`without_weights`.

    Args:
        name: a key of :data:`MODELS`.
        batch: samples.
        seq: tokens a sample.
        num_labels: classes.
        mode: what is trained, see :mod:`layoutopt.modes`.
        dropout: leave dropout as the model has it; else it is off.

    Raises:
        GraphError: unknown name or mode, or a size that the model cannot take.
    """
    if name not in ZOO:
        raise GraphError(f"unknown model {name!r}: choose among {', '.join(ZOO)}, or give package.module:factory")
    entry = ZOO[name]
    if seq is not None and not entry.usual.seq:
        raise GraphError(f"{name} takes images: leave the sequence length (--seq) out")
    if num_labels is not None and not entry.usual.labels:
        raise GraphError(f"{name} is no classifier: leave the number of labels (--labels) out")
    for what, size in (("batch", batch), ("sequence length", seq), ("number of labels", num_labels)):
        if size is not None and size < 1:
            raise GraphError(f"{what} {size} for {name}: expected at least 1")
    module, example, loss = entry.make(_sizes(name, batch, seq, num_labels, dropout))
    fresh = bool(entry.usual.labels)
    return set_mode(module, mode, head=entry.head, adapted=entry.adapted, fresh_head=fresh), example, loss


def _sizes(name: str, batch: int | None, seq: int | None, num_labels: int | None, dropout: bool) -> Sizes:
    usual = ZOO[name].usual
    return Sizes(batch or usual.batch, seq or usual.seq, num_labels or usual.labels, dropout)


def capture_zoo(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | Optimizer | None = "adamw",
    num_labels: int | None = None,
    mode: str = "full",
    dropout: bool = False,
    keep_grads: bool = False,
) -> TrainingGraph:
    """The training step of a zoo model, or its forward pass; sizes that are not given are the model's usual ones.

    Raises:
        GraphError: as :func:`build`; or dropout in a forward pass.
    """
    if mode == "forward" and dropout:
        raise GraphError(f"the forward pass of {name} has no dropout: leave --dropout out, or capture a training step")
    with without_weights():
        module, example, loss = build(name, batch=batch, seq=seq, num_labels=num_labels, mode=mode, dropout=dropout)
    chosen = optimizer_from(optimizer)
    sizes = _sizes(name, batch, seq, num_labels, dropout)
    words = ["layoutopt capture", name, f"--batch {sizes.batch}"]
    words += [f"--seq {sizes.seq}"] if sizes.seq else []
    words += [f"--labels {num_labels}"] if num_labels else []
    words += [f"--optimizer {(optimizer_meta(chosen) or {'name': 'none'})['name']}"] if mode != "forward" else []
    words += [f"--mode {mode}"] if mode != "full" else []
    words += ["--dropout"] if dropout else []
    meta = {"command": " ".join(words), "what": ZOO[name].text, "mode": mode}
    if mode == "forward":
        outputs = None if loss is None else partial(_beside_loss, loss=loss)
        return capture_forward(module, example, outputs=outputs, name=f"{name}-forward", meta=meta)
    return capture(
        module,
        example,
        loss=loss,
        optimizer=chosen,
        name=name if mode == "full" else f"{name}-{mode}",
        dropout=dropout,
        keep_grads=keep_grads,
        meta=meta,
    )


def _beside_loss(module: nn.Module, batch: Any, loss: LossFn) -> Any:
    return loss(module, batch)[1]


def load_user(where: str) -> tuple[nn.Module, Batch, LossFn | None]:
    """Module, batch and loss from ``package.module:factory``; modules in the current folder are found too.

    Raises:
        GraphError: no such module or factory, or it returns something else.
    """
    path, _, attribute = where.partition(":")
    if not path or not attribute:
        raise GraphError(f"{where!r} is neither a zoo model ({', '.join(ZOO)}) nor package.module:factory")
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
    mode: str = "full",
    dropout: bool = False,
) -> TrainingGraph:
    """A zoo model by name, or a user's by ``package.module:factory`` (whose sizes are the factory's).

    Raises:
        GraphError: unknown name, or sizes or a mode given for a user's model.
    """
    if ":" not in name:
        return capture_zoo(
            name, batch=batch, seq=seq, optimizer=optimizer, num_labels=num_labels, mode=mode, dropout=dropout
        )
    if (batch, seq, num_labels, mode) != (None, None, None, "full"):
        raise GraphError(f"{name} brings its own batch: sizes and what is trained are set in the factory")
    module, example, loss = load_user(name)
    chosen = optimizer_from(optimizer)
    word = (optimizer_meta(chosen) or {"name": "none"})["name"]
    return capture(
        module,
        example,
        loss=loss,
        optimizer=chosen,
        name=name.rpartition(":")[2],
        dropout=dropout,
        meta={"command": f"layoutopt capture {name} --optimizer {word}{' --dropout' if dropout else ''}"},
    )
