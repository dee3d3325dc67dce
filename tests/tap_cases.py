"""What the tests of side-tuning's device half share: tiny models with weights, batches, and torch's word on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kernels.runtime import Runtime
from layoutopt import zoo
from layoutopt.checkpoint import initial_values, save_safetensors
from layoutopt.graph import TrainingGraph
from layoutopt.models import uncalibrated
from layoutopt.side.backbone import Planning
from tests.zoo_cases import random_batch

__all__ = ["BATCH", "MODELS", "checkpoint", "drawn", "hidden_rows", "inputs_of", "module_of", "planning", "rows"]

BATCH = 3
MODELS = ("bert-tiny", "gpt2-odd", "vit-odd")


def planning(runtime: Runtime, strategy: str = "rowmajor") -> Planning:
    """Plans made at once, by a model that nothing was measured for."""
    return Planning(uncalibrated(runtime), strategy)


def inputs_of(model: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A random batch of a model's usual size: samples end at different places."""
    torch.manual_seed(seed)
    module, batch, _ = zoo.build(model, batch=BATCH)
    found = random_batch(batch, module)  # type: ignore[arg-type]
    return {name: x.numpy() for name, x in found.items() if name != "labels"}


def module_of(model: str, seed: int = 0) -> nn.Module:
    """A module whose every weight is random, norms and biases among them."""
    torch.manual_seed(seed + 1)
    module, _, _ = zoo.build(model, batch=BATCH)
    with torch.no_grad():
        for p in module.parameters():
            p += torch.randn(p.shape) * (0.1 if p.dim() < 2 else 0.05)
    return module.eval()


def checkpoint(module: nn.Module, file: Path) -> Path:
    """The module's weights as a safetensors file."""
    save_safetensors(file, {name: p.detach().numpy() for name, p in module.named_parameters()}, {"format": "pt"})
    return file


def hidden_rows(module: Any, inputs: dict[str, np.ndarray], tokens: str = "all") -> list[np.ndarray]:
    """By torch in float32: what each block gives and, last, the backbone's final result, [samples, tokens, width].

    Of "pivot" tokens, the row that a classifier reads, [samples, width].
    """
    with torch.no_grad():
        batch = {name: torch.from_numpy(np.asarray(x)) for name, x in inputs.items()}
        found = module.base_model(**batch, output_hidden_states=True)
    states = [x.numpy() for x in (*found.hidden_states[1:-1], found.last_hidden_state)]
    if tokens == "all":
        return states
    samples = len(states[0])
    last = np.zeros(samples, int)
    if module.base_model_prefix in ("transformer", "model"):
        last = inputs["attention_mask"].sum(1) - 1
    return [x[np.arange(samples), last] for x in states]


def drawn(graph: TrainingGraph, module: nn.Module, seed: int) -> None:
    """Give a module the weights that a graph draws from a seed."""
    values = initial_values(graph, seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in values:
                p.copy_(torch.from_numpy(values[name]))


def rows(states: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All tokens, sample by sample."""
    return [x.reshape(-1, x.shape[-1]) for x in states]
