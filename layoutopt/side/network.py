"""The side network in torch, as :mod:`layoutopt.side.weights` writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional

from layoutopt.quantize import LEVELS, Format
from layoutopt.side.task import IGNORED, Batch, Task

__all__ = ["Inputs", "SideNetwork", "dequantise", "head_of", "inputs_of", "loss_of", "pooled"]

Inputs = tuple[list[torch.Tensor], torch.Tensor | None]
"""Taps float32[rows, width], and bool[samples, seq] where the head sees the mean of a sample's tokens."""


def dequantise(words: torch.Tensor, scales: torch.Tensor, cols: int, fmt: Format) -> torch.Tensor:
    """What :func:`layoutopt.quantize.dequantise` gives, bit by bit, on the tensors' device.

    Args:
        words: int32[rows, words_per_row].
        scales: float32[rows, groups_per_row].
        cols: values in a row.
        fmt: how they are stored.

    Returns:
        float32[rows, cols].
    """
    if fmt.kind == "float32":
        return words.view(torch.float32).clone()
    bits = 32 // fmt.codes_per_word
    # The shift brings copies of the sign along, and the mask takes them away.
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    codes = codes.reshape(len(words), -1)[:, :cols]
    if fmt.kind in LEVELS:
        values = torch.tensor(LEVELS[fmt.kind], dtype=torch.float32, device=words.device)[codes]
    else:
        half = 1 << (bits - 1)
        values = ((codes ^ half) - half).to(torch.float32)
    return values * scales.repeat_interleave(fmt.group or cols, dim=1)[:, :cols]


def inputs_of(task: Task, batch: Batch, device: torch.device) -> Inputs:
    """A checked batch's taps and mask as tensors of their own.

    Adapters work token by token. Where the head sees one token of a sample, the others are left out here: the result is
    that of pivot tokens bit by bit.

    Args:
        task: it is of.
        batch: that has taps.
        device: where they are to be.
    """
    rows: slice | np.ndarray = slice(None)
    mask = None
    if batch.mask is not None and task.pooling == "mean":
        mask = _tensor(batch.mask, device).to(torch.bool)
    elif batch.mask is not None:
        rows = _pivots(batch.mask, task.pooling)
    parts = ((words[rows], scales[rows]) for words, scales in batch.taps)
    return [dequantise(_tensor(w, device), _tensor(s, device), task.width, task.fmt) for w, s in parts], mask


def _pivots(mask: np.ndarray, pooling: str) -> np.ndarray:
    """The row of each sample's first token, or last real one."""
    samples, seq = mask.shape
    last = seq - 1 - mask[:, ::-1].argmax(1)
    return np.arange(samples) * seq + (last if pooling == "last" else 0)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # In memory of torch's own, which is aligned always alike: the order of sums depends on that.
    return torch.tensor(np.array(array), device=device)


class SideNetwork(torch.nn.Module):
    """Gated, cascaded adapters beside a backbone, and a head.

    Args:
        task: what it is for.
        weights: float32 by name, all that :func:`layoutopt.side.weights.weight_shapes` names.
    """

    def __init__(self, task: Task, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.task = task
        # Names have dots, which torch's own registry does not allow; the order is that of the names.
        self.names = tuple(weights)
        self.values = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(weights[name])) for name in self.names)

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by the names of the file."""
        return dict(zip(self.names, self.values, strict=True))

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the parameters' values."""
        return {name: value.detach().to("cpu", copy=True).numpy() for name, value in self.named().items()}

    def forward(self, taps: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
        """What the head says.

        Args:
            taps: float32[rows, width] each, in order.
            mask: bool[samples, seq] where rows are samples times tokens, whose mean the head sees.

        Returns:
            float32[samples, classes]: logits, or corrections of probabilities (mode "private").
        """
        value = self.named()
        final, state = (pooled(rows, mask) for rows in self._states(taps, value))
        return head_of((1 - value["mix"]) * final + value["mix"] * state, value)

    def _states(
        self, taps: Sequence[torch.Tensor], value: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The backbone's final result, and the last adapter's."""
        state = mixed = taps[0]
        for i, tap in enumerate(taps):
            if i:
                gate = torch.sigmoid(value[f"adapters.{i}.gate"])
                mixed = (1 - gate) * tap + gate * state
            state = mixed + functional.gelu(mixed @ value[f"adapters.{i}.down"]) @ value[f"adapters.{i}.up"]
        return taps[-1], state


def head_of(x: torch.Tensor, value: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The classifier on pooled rows, behind the pooler where there is one.

    Args:
        x: float32[samples, width].
        value: "classifier.weight", "classifier.bias", and those of the pooler if any; others are not looked at.

    Returns:
        float32[samples, classes].
    """
    if "pooler.weight" in value:
        x = torch.tanh(functional.linear(x, value["pooler.weight"], value["pooler.bias"]))
    return functional.linear(x, value["classifier.weight"], value["classifier.bias"])


def pooled(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A row per sample: the mean of its real tokens; rows are that already where there is no mask."""
    if mask is None:
        return rows
    real = mask.to(torch.float32)
    return (rows.reshape(*mask.shape, -1) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def loss_of(task: Task, results: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
    """The mean loss of a batch.

    Args:
        task: it is of.
        results: of the network, float32[samples, classes].
        targets: as :class:`layoutopt.side.task.Batch` has them.

    Returns:
        Cross-entropy, or the squared error summed over classes (mode "private"); a number.
    """
    wanted = _tensor(targets, results.device)
    if task.mode == "private":
        return (results - wanted).square().sum(1).mean()
    return functional.cross_entropy(results, wanted.to(torch.int64), ignore_index=IGNORED)
