"""The trainings of one process: each with its store, all with one thread that applies accepted steps in turn.

A training that fails, with whatever error, is unloaded; the others go on. What it had on disk is as it was.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.store import Store
from layoutopt.side.task import Batch, Task

if TYPE_CHECKING:
    from layoutopt.side.trainer import Trainer

__all__ = ["Applied", "Limits", "Status", "Trainings", "check_device_id"]

_LOG = logging.getLogger(__name__)
_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PATIENCE_S = 15.0  # for workers of a server that was killed, which are about to end


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
        losses: of the last applied steps, by step.
        failure: why it cannot go on; "" if it can.
        stored: samples in the store.
    """

    next_step: int
    applied: int
    losses: Mapping[int, float] = field(default_factory=dict)
    failure: str = ""
    stored: int = 0

    @property
    def loss(self) -> float | None:
        """Of the last applied step, if any."""
        return self.losses.get(self.applied - 1)


@dataclass(frozen=True)
class Applied:
    """A step was applied, or failed.

    Attributes:
        device_id: whose.
        step: which.
        loss: before the step changed the weights; None if it failed.
        failure: why it failed.
        number: of the training, as it was opened.
    """

    device_id: str
    step: int
    loss: float | None
    failure: str = ""
    number: int = 0


def check_device_id(device_id: str) -> None:
    """See that a device's id can be the name of a directory.

    Raises:
        LayoutOptError: it cannot.
    """
    if not _DEVICE_ID.fullmatch(device_id):
        raise LayoutOptError(
            "a device's id is 1 to 64 letters, digits, dots, underscores and dashes, the first a letter or digit, "
            f"got {device_id[:70]!r}"
        )


@dataclass(eq=False)
class _Training:
    trainer: Trainer
    store: Store
    number: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # of accepting, and of the store
    queued: bool = False  # waits for, or is at, the thread that applies


class Trainings:
    """Trainings of one process. Methods may be called by any thread.

    Args:
        directory: of all trainings.
        limits: of memory and disk.
        device: "cpu" or "cuda".
        report: told of every step that was applied or failed, by the thread that applies.
    """

    def __init__(
        self, directory: Path, limits: Limits, device: str = "cpu", report: Callable[[Applied], None] = lambda _: None
    ) -> None:
        self._directory, self._limits, self._device, self._report = directory, limits, device, report
        self._open: dict[str, _Training] = {}
        self._failed: dict[str, str] = {}
        self._queue: deque[str] = deque()
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._apply_all, name="side trainings", daemon=True)
        self._thread.start()

    def open(
        self,
        device_id: str,
        task: Task,
        head: Mapping[str, np.ndarray] | None = None,
        anew: bool = False,
        number: int = 0,
    ) -> Status:
        """Begin a device's training, or go on with it; see :meth:`layoutopt.side.workers.Workers.open`.

        Args:
            device_id: whose.
            task: what to train.
            head: initial weights of the head.
            anew: forget the training that is there.
            number: that is told with its applied steps.
        """
        from layoutopt.side.trainer import Trainer

        check_device_id(device_id)
        with self._opening:
            if anew:
                self._forget(device_id)
            present = self._open.get(device_id)
            if present is not None:
                differing = present.trainer.task.differs(task)
                if differing:
                    raise LayoutOptError(f"{device_id} has a training with another {differing[0]}: begin anew")
                present.number = number
                return self._status(present)
            root = self._directory / device_id
            trainer = Trainer.open(
                root,
                task,
                head=head,
                device=self._device,
                checkpoint_steps=self._limits.checkpoint_steps,
                journal_bytes=self._limits.journal_bytes,
                patience_s=_PATIENCE_S,
            )
            try:
                store = Store(
                    root / "activations",
                    device_id,
                    task,
                    memory_bytes=self._limits.store_memory_bytes,
                    disk_bytes=self._limits.store_disk_bytes,
                )
            except LayoutOptError:
                trainer.close(keep=False)
                raise
            training = self._open[device_id] = _Training(trainer, store, number)
            self._failed.pop(device_id, None)
            return self._status(training)

    def _forget(self, device_id: str) -> None:
        self._unload(device_id, keep=False)
        self._failed.pop(device_id, None)
        root = self._directory / device_id
        try:
            if root.exists():
                shutil.rmtree(root)
        except OSError as error:
            raise LayoutOptError(f"cannot remove the training of {device_id}: {error.strerror}") from error

    def accept(self, device_id: str, batch: Batch, sent: Batch | None = None) -> None:
        """Make a batch durable; see :meth:`layoutopt.side.workers.Workers.accept`."""
        training = self._get(device_id)
        with training.lock:
            batch.check(training.trainer.task)
            if sent is not None:
                sent.check(training.trainer.task)
            training.trainer.accept(training.store.fill(batch, sent) if batch.is_stored else batch)
            new = sent if batch.is_stored else batch
            if new is not None:
                training.store.put(new)
        with self._changed:
            if not training.queued:
                training.queued = True
                self._queue.append(device_id)
                self._changed.notify_all()

    def missing(self, device_id: str, samples: Sequence[int]) -> tuple[int, ...]:
        """Of these samples, those that the store lacks."""
        training = self._get(device_id)
        with training.lock:
            return training.store.missing(samples)

    def weights(self, device_id: str) -> bytes:
        """The side network as safetensors."""
        return self._get(device_id).trainer.export()

    def status(self, device_id: str) -> Status:
        """How far a training is."""
        return self._status(self._get(device_id))

    def release(self, device_id: str) -> Status | None:
        """Unload a training when its accepted steps are applied; how far it was, if it was open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy(device_id))
        with self._opening:
            training = self._open.get(device_id)
            status = None if training is None else self._status(training)
            self._unload(device_id, keep=True)
            self._failed.pop(device_id, None)
            return status

    def ping(self) -> int:
        """How many trainings are open."""
        return len(self._open)

    def close(self) -> None:
        """Unload all trainings; accepted steps that wait are applied when they are opened again."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        with self._opening:
            for device_id in list(self._open):
                self._unload(device_id, keep=True)

    def _is_busy(self, device_id: str) -> bool:
        training = self._open.get(device_id)
        return training is not None and training.queued and not self._ended

    def _get(self, device_id: str) -> _Training:
        training = self._open.get(device_id)
        if training is None:
            raise LayoutOptError(self._failed.get(device_id) or f"{device_id} has no open training: open it first")
        return training

    def _status(self, training: _Training) -> Status:
        trainer = training.trainer
        losses = trainer.losses
        return Status(trainer.next_step, trainer.applied, losses, trainer.failure, len(training.store))

    def _unload(self, device_id: str, *, keep: bool) -> None:
        training = self._open.pop(device_id, None)
        if training is not None:
            with training.lock:
                training.store.close()
                training.trainer.close(keep=keep)

    def _apply_all(self) -> None:
        """A step of each training in turn."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                device_id = self._queue.popleft()
                training = self._open.get(device_id)
            if training is None:
                continue
            if _has_more(training):
                self._apply(device_id, training)
            with self._changed:
                training.queued = _has_more(training)
                if training.queued:
                    self._queue.append(device_id)
                self._changed.notify_all()

    def _apply(self, device_id: str, training: _Training) -> None:
        trainer = training.trainer
        step = trainer.applied
        try:
            loss = trainer.apply()
        except LayoutOptError as error:
            if not trainer.closed:
                # Stays open: its weights are those before the step that failed, and can be fetched.
                self._report(Applied(device_id, step, None, str(error), training.number))
        except Exception as error:  # noqa: BLE001 - whatever it is, other trainings go on
            # What is in memory may be half a step; the disk has the step before, and the batch.
            _LOG.warning("the training of %s failed at step %d", device_id, step, exc_info=error)
            why = f"the training failed at step {step} ({type(error).__name__}: {str(error)[:200]}): open it again"
            with self._opening:
                if self._open.get(device_id) is training:
                    self._unload(device_id, keep=False)
                    self._failed[device_id] = why
            self._report(Applied(device_id, step, None, why, training.number))
        else:
            self._report(Applied(device_id, step, loss, number=training.number))


def _has_more(training: _Training) -> bool:
    trainer = training.trainer
    return trainer.waiting > 0 and not trainer.failure and not trainer.closed
