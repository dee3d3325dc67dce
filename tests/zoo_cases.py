"""Zoo models with weights and batches that leave nothing at rest: padding, ignored labels, biases that are not 0."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layoutopt import zoo
from layoutopt.graph import TrainingGraph

VOCABULARY = 101
"""Below that of every odd model; a token of the end stands above it."""


def example(name: str, *, mode: str = "full", dropout: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """A zoo model with random weights, and a random batch.

    Samples end at different places: what follows is padding, with attention 0 and label -100.
    """
    torch.manual_seed(sum(map(ord, name)))
    module, batch, loss = zoo.build(name, mode=mode, dropout=dropout)
    with torch.no_grad():
        for p in module.parameters():
            p += torch.randn(p.shape) * (0.1 if p.dim() < 2 else 0.05)
    return module, random_batch(batch, module), loss


def random_batch(like: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Values in the shapes of ``like``."""
    batch = {}
    classes = getattr(getattr(module, "config", None), "num_labels", 2)
    for key, t in like.items():
        if t.is_floating_point():
            batch[key] = torch.randn(t.shape)
        elif key == "attention_mask":
            lengths = torch.tensor([t.shape[1] - 3 * i for i in range(t.shape[0])])
            batch[key] = (torch.arange(t.shape[1]) < lengths[:, None]).long()
        else:
            high = 2 if key == "token_type_ids" else classes if key == "labels" and t.dim() == 1 else VOCABULARY
            batch[key] = torch.randint(1 if key == "input_ids" else 0, high, t.shape)
    if "input_ids" in batch and "pixel_values" in batch:  # CLIP reads the text at its end
        batch["input_ids"][torch.arange(len(batch["input_ids"])), batch["attention_mask"].sum(1) - 1] = 102
    if "labels" in batch and batch["labels"].dim() == 2:
        mask = batch.get("attention_mask")
        if mask is not None:
            batch["labels"][mask == 0] = -100
        batch["labels"][0, 4] = -100
    return batch


class Wide(TorchFunctionMode):
    """Models that convert to float32 on the way (norms, rotary embeddings, losses) stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs)


def wide_step(module: nn.Module, batch: dict[str, torch.Tensor], loss: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by torch in float64; parameters that have none are left out."""
    losses, gradients, _ = wide_steps(module, batch, loss, 1)
    return losses[0], gradients


def wide_steps(
    module: nn.Module, batch: dict[str, torch.Tensor], loss: Any, steps: int, lr: float = 0.0, momentum: float = 0.0
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Steps of SGD on one batch by torch in float64: losses, the first step's gradients, and the parameters at the end.

    Parameters that have no gradient are left out.
    """
    peer = copy.deepcopy(module).double().train()
    wide = {k: t.double() if t.is_floating_point() else t for k, t in batch.items()}
    optimizer = torch.optim.SGD(peer.parameters(), lr=lr, momentum=momentum)
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        with Wide():
            value = loss(peer, wide)[0] if loss else peer(**wide).loss
            value.backward()
        losses.append(value.item())
        trained = {n: p for n, p in peer.named_parameters() if p.grad is not None}
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in trained.items()}
        optimizer.step()
    return losses, gradients, {n: p.detach().numpy() for n, p in trained.items()}


def values_of(graph: TrainingGraph, module: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """What the graph starts from: parameters, state and inputs."""
    values = {n: p.detach().double().numpy() for n, p in module.named_parameters()}
    values |= {t.name: np.zeros(t.shape) for t in graph.by_role("state")}
    return values | {k: t.numpy() for k, t in batch.items()}


def gradient_errors(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """By parameter, ‖got − expected‖ over ‖expected‖ (over a thousandth of the largest where that is more)."""
    floor = 1e-3 * max(float(np.linalg.norm(g)) for g in expected.values())
    return {
        n: float(np.linalg.norm(got[f"grad:{n}"] - g)) / max(float(np.linalg.norm(g)), floor)
        for n, g in expected.items()
    }
