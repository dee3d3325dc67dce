"""The side network as a forward-only graph, captured from the very module that the server trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from layoutopt.capture import capture_forward
from layoutopt.graph import TrainingGraph, rename_operand
from layoutopt.side.device_head import DeviceHead
from layoutopt.side.network import SideNetwork, head_of, pooled
from layoutopt.side.task import Task

__all__ = ["LOGITS", "MASK", "capture_side", "tap_input"]

LOGITS = "logits"
MASK = "attention_mask"
"""Input int32[samples, seq] where the head sees the mean of a sample's tokens."""


def tap_input(place: int) -> str:
    """The input float32[rows, width] that a tap is, by its place."""
    return f"tap_{place}"


def capture_side(
    task: Task, weights: Mapping[str, np.ndarray], samples: int, head: DeviceHead | None = None
) -> tuple[TrainingGraph, dict[str, np.ndarray]]:
    """A graph of the side network, and its parameters.

    Args:
        task: that the network is of.
        weights: float32 by name.
        samples: of a run.
        head: of a private task: its probabilities are added to what the network says.

    Returns:
        A forward-only graph (passes not yet run) from :func:`tap_input` of every tap, and :data:`MASK` where the task
        pools by the mean, to :data:`LOGITS` float32[samples, classes]; and its parameters by name.
    """
    module = _Evaluated(task, weights, head)
    mean = task.pooling == "mean"
    rows = samples * task.seq if mean else samples
    batch: dict[str, torch.Tensor] = {tap_input(i): torch.zeros(rows, task.width) for i in range(len(task.taps))}
    if mean:
        batch[MASK] = torch.ones(samples, task.seq, dtype=torch.int64)
    graph = capture_forward(module, batch, outputs=_logits, name=f"{task.model}-side", batch_axes={})
    own = module.own_names()
    graph = _with_names(graph, own)
    values = {own[name]: p.detach().numpy().copy() for name, p in module.named_parameters()}
    return graph, {name: values[name] for name in (t.name for t in graph.by_role("parameter"))}


def _logits(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {LOGITS: module(**batch)}


class _Evaluated(nn.Module):
    """The network, and the device's own head beside it."""

    def __init__(self, task: Task, weights: Mapping[str, np.ndarray], head: DeviceHead | None) -> None:
        super().__init__()
        self.network = SideNetwork(task, weights)
        self._taps = len(task.taps)
        parts = head.parts() if head is not None else {}
        self._parts = tuple(parts)
        self.head = nn.ParameterList(nn.Parameter(torch.tensor(x)) for x in parts.values())

    def own_names(self) -> dict[str, str]:
        """A parameter's name here to its name in the graph."""
        network = {f"network.values.{i}": name for i, name in enumerate(self.network.names)}
        return network | {f"head.{i}": f"device_head.{name}" for i, name in enumerate(self._parts)}

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """What the head says, float32[samples, classes]."""
        taps = [batch[tap_input(i)] for i in range(self._taps)]
        mask = batch[MASK] != 0 if MASK in batch else None
        result: torch.Tensor = self.network(taps, mask)
        return result + self._probabilities(taps[-1], mask) if self._parts else result

    def _probabilities(self, final: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        part = dict(zip(self._parts, self.head, strict=True))
        return head_of(pooled(final, mask), part).softmax(-1)


def _with_names(graph: TrainingGraph, names: Mapping[str, str]) -> TrainingGraph:
    tensors = {names.get(n, n): replace(t, name=names.get(n, n)) for n, t in graph.tensors.items()}
    ops = [
        replace(
            op,
            inputs=tuple(rename_operand(o, names) for o in op.inputs),
            outputs=tuple(rename_operand(o, names) for o in op.outputs),
        )
        for op in graph.ops
    ]
    return TrainingGraph(graph.name, tensors, ops, graph.outputs, graph.constants, graph.meta)
