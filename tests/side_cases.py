"""Tasks and batches of side-tuning that tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from layoutopt.quantize import quantise
from layoutopt.side.task import Batch, Task

TASK = Task(
    model="tiny",
    graph="0" * 64,
    width=20,
    taps=("block.0", "block.1", "block.2"),
    format="int8:8",
    tokens="pivot",
    seq=5,
    batch=4,
    classes=3,
    mode="labels",
    rank=4,
    lr=0.01,
    warmup=2,
    steps=12,
)


def task_of(**changed: Any) -> Task:
    """The small task, with fields changed."""
    return replace(TASK, **changed)


def batch_of(task: Task, step: int, samples: tuple[int, ...] | None = None, seed: int = 0) -> Batch:
    """A batch whose content depends on its samples' ids (and the seed) alone."""
    if samples is None:
        samples = tuple(range(step * task.batch, (step + 1) * task.batch))
    single = [_sample(task, sample, seed) for sample in samples]
    taps = tuple(
        (np.concatenate([s[0][i][0] for s in single]), np.concatenate([s[0][i][1] for s in single]))
        for i in range(len(task.taps))
    )
    mask = np.stack([s[1] for s in single]) if task.tokens == "all" else None
    return Batch(step, samples, taps, mask, np.stack([s[2] for s in single]))


def _sample(task: Task, sample: int, seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, sample])
    label = int(rng.integers(task.classes))
    taps = []
    for _ in task.taps:
        x = rng.standard_normal((task.rows_per_sample, task.width), np.float32)
        x[:, label] += 1
        taps.append(quantise(x, task.fmt))
    mask = (np.arange(task.seq) < rng.integers(1, task.seq + 1)).astype(np.uint8)
    if task.mode == "labels":
        return taps, mask, np.int32(label)
    probabilities = rng.dirichlet(np.ones(task.classes)).astype(np.float32)
    return taps, mask, np.eye(task.classes, dtype=np.float32)[label] - probabilities


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether two sets of weights are equal in every bit."""
    return left.keys() == right.keys() and all(left[n].tobytes() == right[n].tobytes() for n in left)
