"""Fine-tuning modes: which of a module's parameters are trained, if any.

What is frozen has no gradient, no optimizer state, and nothing is kept for it from the forward to the backward pass:
capture writes only what the trained parameters need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from layoutopt.errors import GraphError

__all__ = ["MODES", "set_mode"]

MODES = {
    "full": "every parameter",
    "lora": "low-rank adapters of the attention's projections (Hu et al. 2021), and a classifier's head",
    "head": "the head alone",
    "bias": "every bias, and a classifier's head (BitFit, Ben Zaken et al. 2022)",
    "forward": "nothing: the forward pass alone, without loss, gradients and dropout",
}
"""What each mode trains."""


def set_mode(
    module: nn.Module, mode: str, *, head: Sequence[str], adapted: Sequence[str], fresh_head: bool, rank: int = 8
) -> nn.Module:
    """Freeze what the mode does not train.

    Args:
        module: changed in place; ``lora`` puts adapters into it.
        mode: a key of :data:`MODES`.
        head: prefixes of the head's parameters.
        adapted: names of the layers that LoRA adapts.
        fresh_head: the head is new (a classifier's), so that adapters and biases are trained along with it.
        rank: of the adapters; their ``alpha`` is twice that.

    Raises:
        GraphError: unknown mode, or the module has nothing that it would train.
    """
    if mode not in MODES:
        raise GraphError(f"unknown mode {mode!r}: expected one of {', '.join(MODES)}")
    if mode in ("full", "forward"):
        return module
    if mode == "lora":
        return _with_adapters(module, adapted, head if fresh_head else (), rank)
    of_head = _of_head(module, head)
    biases = (
        {id(p) for n, p in module.named_parameters() if n.rpartition(".")[2] == "bias"} if mode == "bias" else set()
    )
    if mode == "bias" and not biases:
        raise GraphError(f"{type(module).__name__} has no biases to train: use lora or head")
    trained = biases | (of_head if mode == "head" or fresh_head else set())
    if not trained:
        raise GraphError(f"{type(module).__name__} has no parameters under {', '.join(head)}: use another mode")
    for p in module.parameters():
        p.requires_grad_(id(p) in trained)
    return module


def _of_head(module: nn.Module, head: Sequence[str]) -> set[int]:
    every: Any = module.named_parameters(remove_duplicate=False)
    return {id(p) for n, p in every if any(n == h or n.startswith(f"{h}.") for h in head)}


def _with_adapters(module: nn.Module, adapted: Sequence[str], head: Sequence[str], rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise GraphError("mode lora needs peft: pip install 'layoutopt[torch]'") from error
    of_head = _of_head(module, head)
    conv1d = any(type(m).__name__ == "Conv1D" for m in module.modules())  # GPT-2's, which stores [in, out]
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(adapted), fan_in_fan_out=conv1d
    )
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        raise GraphError(f"{type(module).__name__} has no layers named {', '.join(adapted)} to adapt") from error
    for name, p in module.named_parameters():
        p.requires_grad_(".lora_" in name or id(p) in of_head)
    return module
