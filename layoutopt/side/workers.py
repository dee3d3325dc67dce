"""Where side networks are trained: processes of this machine, a Ray cluster, or this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.task import Batch, Task

__all__ = ["Limits", "MissingSamples", "Status", "Workers"]

Engine = Literal["processes", "ray", "here"]


class MissingSamples(LayoutOptError):
    """Samples that the server was to take from its store and that are not there (any more): the device sends them.

    Attributes:
        samples: their ids.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        super().__init__(f"{len(samples)} samples are not in the server's store (the first is {samples[0]}): send them")
        self.samples = tuple(samples)


@dataclass(frozen=True)
class Limits:
    """What trainings may take.

    Attributes:
        memory_bytes: of all trainings together, as estimated, stores in memory included.
        store_memory_bytes: of a training's store in memory.
        store_disk_bytes: of a training's store on disk.
        checkpoint_steps: between checkpoints.
        journal_bytes: of accepted batches on disk; a checkpoint is written earlier where it would be exceeded.
    """

    memory_bytes: int = 4 << 30
    store_memory_bytes: int = 16 << 20
    store_disk_bytes: int = 1 << 30
    checkpoint_steps: int = 50
    journal_bytes: int = 64 << 20


@dataclass(frozen=True)
class Status:
    """How far a training is.

    Attributes:
        next_step: the first step that was not accepted.
        applied: steps that the weights contain; those from here to ``next_step`` are accepted, and will be applied
            whatever happens.
        loss: of the last applied step; None before the first.
        failure: why it cannot go on; "" if it can.
        stored: samples in the store.
    """

    next_step: int
    applied: int
    loss: float | None = None
    failure: str = ""
    stored: int = 0


class Workers:
    """Trainings of many devices. Methods may be called by any thread.

    Args:
        directory: of all trainings, each in a directory of its device's name. Trainings go on from what is there.
        engine: where they run; "here": in threads of this process.
        count: of workers.
        limits: of memory and disk.
        cuda: whether to train on a GPU.
        address: of the Ray cluster.

    Raises:
        LayoutOptError: a package is missing, or the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: Engine = "processes",
        count: int = 2,
        limits: Limits | None = None,
        cuda: bool = False,
        address: str | None = None,
    ) -> None:
        raise NotImplementedError

    def open(
        self, device_id: str, task: Task, head: Mapping[str, np.ndarray] | None = None, *, anew: bool = False
    ) -> Status:
        """Begin a device's training, or go on with it.

        Args:
            device_id: 1 to 64 letters, digits, ``.``, ``_`` and ``-``, the first a letter or digit.
            task: what to train; where the device has a training already, the same.
            head: initial weights of the head, float32 by name: all or some of "pooler.weight" [width, width],
                "pooler.bias" [width], "classifier.weight" [classes, width], "classifier.bias" [classes]. Used when a
                training begins.
            anew: forget the training that is there.

        Returns:
            How far it is: the device goes on at ``next_step``.

        Raises:
            LayoutOptError: another task, a head that does not fit, or no worker with enough memory.
        """
        raise NotImplementedError

    def accept(self, device_id: str, batch: Batch) -> None:
        """Check a batch and write it to disk: when this returns it will be applied, exactly once, whatever happens.

        Args:
            device_id: of an open training.
            batch: of step ``next_step``; one without taps is taken from the store, any other is put there too.

        Raises:
            MissingSamples: the store lacks some of a batch's samples. Nothing was accepted.
            LayoutOptError: the batch is not this task's, its step is not the next one, the training failed, or the disk
                is full. Nothing was accepted.
        """
        raise NotImplementedError

    def submit(self, device_id: str, step: int) -> Future[float]:
        """The loss of an accepted step, once it is applied. Accepted steps are applied in order without being asked."""
        raise NotImplementedError

    def missing(self, device_id: str, samples: Sequence[int]) -> tuple[int, ...]:
        """Of these samples, those that the store lacks."""
        raise NotImplementedError

    def weights(self, device_id: str) -> bytes:
        """The side network after the last applied step, as safetensors (see :mod:`layoutopt.side.weights`)."""
        raise NotImplementedError

    def status(self, device_id: str) -> Status:
        """How far a training is."""
        raise NotImplementedError

    def release(self, device_id: str) -> None:
        """Write a checkpoint and free the training's memory, once its accepted steps are applied."""
        raise NotImplementedError

    def close(self) -> None:
        """Release every training and end the workers."""
        raise NotImplementedError
