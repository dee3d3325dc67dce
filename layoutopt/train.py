"""The training loop: batches in, loss out, over a plan that runs on the device.

The step itself is the plan's; this file feeds it. A last batch that is not full is filled with repeated samples whose
label is ``IGNORE``, which the mean loss leaves out, so that every sample counts once and exactly as in a smaller batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import evaluation_values, step_values

__all__ = ["IGNORE", "Dataset", "History", "Schedule", "Steppable", "evaluate", "fit"]

IGNORE = -100
"""The target that cross-entropy leaves out (PyTorch's ignore_index)."""


class Steppable(Protocol):
    """What the loop needs of an executor."""

    graph: TrainingGraph

    def step(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Enqueue one training step."""
        ...

    def forward(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Enqueue forward and loss only."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read a tensor back."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Samples by graph input name, each array [n, …]; ``target`` names the input that holds the classes."""

    inputs: dict[str, np.ndarray]
    target: str = "labels"

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.inputs.items()}
        if len(set(sizes.values())) != 1 or self.target not in sizes:
            raise LayoutOptError(f"dataset arrays must have one length and include {self.target!r}; got {sizes}")
        if not len(self):
            raise LayoutOptError("the dataset holds no samples")

    def __len__(self) -> int:
        return len(self.inputs[self.target])

    def take(self, rows: np.ndarray) -> Dataset:
        """The samples at ``rows`` (int [k])."""
        return Dataset({name: values[rows] for name, values in self.inputs.items()}, self.target)

    def split(self, held_out: float, seed: int) -> tuple[Dataset, Dataset]:
        """A random (training, held-out) split with a fixed seed."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = len(self) - round(len(self) * held_out)
        if not 0 < cut < len(self):
            raise LayoutOptError(f"cannot hold out {held_out:.0%} of {len(self)} samples: one side would be empty")
        return self.take(np.sort(order[:cut])), self.take(np.sort(order[cut:]))

    def batches(self, size: int, order: np.ndarray | None = None) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """Full batches and the number of real samples in each."""
        rows = np.arange(len(self)) if order is None else order
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            real = len(chosen)
            chosen = np.resize(chosen, size)
            batch = {name: values[chosen] for name, values in self.inputs.items()}
            if real < size:
                # Whatever width the targets come in (bytes, say), IGNORE must fit.
                batch[self.target] = batch[self.target].astype(np.int64)
                batch[self.target][real:] = IGNORE
            yield batch, real


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warm-up, then constant or cosine to zero."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    cosine: bool = False

    def __call__(self, step: int) -> float:
        """The rate of step ``step`` (counted from 1)."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if not self.cosine:
            return self.peak
        done = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        return self.peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass
class History:
    """What a run recorded: the loss of every step and host seconds per epoch."""

    losses: list[float] = field(default_factory=list)
    epoch_seconds: list[float] = field(default_factory=list)


def batch_size(graph: TrainingGraph, target: str = "labels") -> int:
    """Samples in a step of ``graph``.

    Raises:
        GraphError: the graph has no such input.
    """
    tensor = graph.tensors.get(target)
    if tensor is None or tensor.role != "input" or not tensor.shape:
        names = ", ".join(t.name for t in graph.by_role("input"))
        raise GraphError(f"the graph has no batch of targets named {target!r}; its inputs are {names}")
    return tensor.shape[0]


def fit(
    executor: Steppable,
    data: Dataset,
    *,
    epochs: int,
    schedule: Schedule,
    seed: int = 0,
    first_step: int = 0,
    last_step: int | None = None,
    history: History | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> History:
    """Train for ``epochs`` passes; the order of samples depends on ``seed`` and the epoch alone, what is dropped on
    ``seed`` and the step.

    Args:
        executor: runs the plan's step.
        data: training samples.
        epochs: passes in all, counted from the start of training even when resuming.
        schedule: learning rate by step.
        seed: of the order, and of dropout.
        first_step: steps already taken (resuming): they are skipped, not repeated.
        last_step: stop after this step even within an epoch.
        history: to append to.
        on_step: called with (step, loss) after each.

    Returns:
        The history.

    Raises:
        LayoutOptError: the loss is no longer finite.
    """
    size = batch_size(executor.graph, data.target)
    record = history or History()
    loss_name = executor.graph.outputs[0]
    step = 0
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(data))
        started = time.perf_counter()
        for batch, _ in data.batches(size, order):
            step += 1
            if step <= first_step:
                continue
            if last_step is not None and step > last_step:
                return record
            executor.step({**batch, **step_values(executor.graph, step, schedule(step), seed)})
            loss = float(executor.read(loss_name))
            if not math.isfinite(loss):
                raise LayoutOptError(f"the loss of step {step} is {loss}: lower --lr or check the data and checkpoint")
            record.losses.append(loss)
            if on_step:
                on_step(step, loss)
        record.epoch_seconds.append(time.perf_counter() - started)
    return record


def evaluate(executor: Steppable, data: Dataset, logits: str | None = None) -> tuple[float, np.ndarray]:
    """Accuracy and logits [n, classes] over ``data``, without updating or dropping anything.

    Args:
        executor: runs the forward pass.
        data: samples; the arg max of a row of logits is compared with the target.
        logits: output to read; the graph's second by default.

    Raises:
        GraphError: the graph has no output beside the loss.
    """
    graph = executor.graph
    if logits is None and len(graph.outputs) < 2:
        raise GraphError(f"graph {graph.name!r} has no output beside its loss to evaluate: hold nothing out")
    name = logits or graph.outputs[1]
    rows: list[np.ndarray] = []
    scalars = evaluation_values(graph)
    for batch, real in data.batches(batch_size(graph, data.target)):
        executor.forward({**batch, **scalars})
        rows.append(np.array(executor.read(name))[:real])
    scores = np.concatenate(rows)
    correct: Any = scores.argmax(1) == data.inputs[data.target]
    return float(correct.mean()), scores
