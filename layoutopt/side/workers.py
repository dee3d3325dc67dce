"""Where side networks are trained: processes of this machine, a Ray cluster, or this process.

Each training is in one worker at a time, the one that has most memory to spare when the training is opened. A worker
that dies is replaced, and its trainings go on from their files, one after the other; the one at which the new worker
dies again has failed, and is left out.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder
from layoutopt.side.hosts import Host, HostDiedError, Local, Process, RayActor
from layoutopt.side.store import MissingSamples
from layoutopt.side.task import Batch, Task
from layoutopt.side.trainings import Applied, Limits, Status, check_device_id
from layoutopt.sweep_engines import join_cluster

__all__ = ["BusyError", "Limits", "MissingSamples", "Status", "Workers"]

Engine = Literal["processes", "ray", "here"]


class BusyError(LayoutOptError):
    """What may go later: another training has to end first."""


_LOG = logging.getLogger(__name__)
_LOSSES_KEPT = 64
_ATTEMPTS = 3


class _Training:
    """What is known here of a training.

    Losses are those of the last steps; futures are of steps that are accepted and not applied. What is heard of another
    number is of a training that the device had before.
    """

    def __init__(self, number: int, device_id: str, task: Task, slot: _Slot, need_bytes: int) -> None:
        self.number, self.device_id, self.task, self.slot, self.need_bytes = number, device_id, task, slot, need_bytes
        self.is_open = False
        self.failure = ""
        self.status = Status(0, 0)
        self._lock = threading.Lock()
        self._losses: OrderedDict[int, float] = OrderedDict()
        self._futures: dict[int, Future[float]] = {}
        self._next_step = self._applied = 0

    @property
    def next_step(self) -> int:
        """The first step that is not known to be accepted."""
        return self._next_step

    def future(self, step: int) -> Future[float]:
        """Of the loss of an accepted step."""
        with self._lock:
            if step in self._losses or self.failure:
                return _ended(self._losses.get(step), self.failure)
            if not self._applied <= step < self._next_step:
                raise LayoutOptError(
                    f"step {step} of {self.device_id} does not wait to be applied: those before {self._applied} are, "
                    f"and {self._next_step} is the next to be accepted"
                )
            if step not in self._futures:
                self._futures[step] = Future()
                self._futures[step].set_running_or_notify_cancel()  # several may wait for it: none can cancel it
            return self._futures[step]

    def accepted(self, step: int) -> None:
        """A step was made durable."""
        with self._lock:
            self._next_step = max(self._next_step, step + 1)

    def applied(self, done: Applied) -> None:
        """A step was applied, or failed."""
        if done.number != self.number:
            return
        if done.loss is None:
            self.fail(done.failure)
        else:
            self._settle({done.step: done.loss})

    def learn(self, status: Status) -> None:
        """Take in how far it is."""
        with self._lock:
            self.status, self.failure = status, ""
            self._next_step = status.next_step
            self._applied = max(self._applied, status.applied)
        self._settle(status.losses)
        if status.failure:
            self.fail(status.failure)

    def fail(self, failure: str) -> None:
        """It cannot go on."""
        with self._lock:
            self.failure = failure
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            future.set_exception(LayoutOptError(failure))

    def _settle(self, losses: Mapping[int, float]) -> None:
        ended = []
        with self._lock:
            for step, loss in losses.items():
                self._applied = max(self._applied, step + 1)
                self._losses[step] = loss
                if step in self._futures:
                    ended.append((self._futures.pop(step), loss))
            while len(self._losses) > _LOSSES_KEPT:
                self._losses.popitem(last=False)
        for future, loss in ended:
            future.set_result(loss)


def _ended(loss: float | None, failure: str) -> Future[float]:
    future = Future[float]()
    if loss is None:
        future.set_exception(LayoutOptError(failure))
    else:
        future.set_result(loss)
    return future


@dataclass(eq=False)
class _Slot:
    """A place for a worker, which is started when a training comes to it."""

    number: int
    host: Host | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)  # held while the worker is replaced
    trainings: dict[str, _Training] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        return sum(t.need_bytes for t in list(self.trainings.values()))


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
        if engine not in ("processes", "ray", "here"):
            raise LayoutOptError(f"trainings run in processes, on ray or here, got the engine {engine!r}")
        if count < 1:
            raise LayoutOptError(f"at least one worker is needed, got {count}")
        check_folder(directory)
        self._directory = Path(directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._engine, self._limits, self._device = engine, limits or Limits(), "cuda" if cuda else "cpu"
        self._most_bytes = self._limits.memory_bytes // count
        self._lock = threading.Lock()
        self._trainings: dict[str, _Training] = {}
        self._opening: set[str] = set()
        self._numbers = itertools.count()
        self._closed = False
        self._ray = join_cluster(address, count) if engine == "ray" else None
        self._slots = [_Slot(number) for number in range(count)]

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
        check_device_id(device_id)
        with self._lock:
            if self._closed:
                raise LayoutOptError("the workers are closed")
            if device_id in self._opening:
                raise BusyError(f"the training of {device_id} is being opened already: wait")
            self._opening.add(device_id)
        try:
            present = self._trainings.get(device_id)
            if present is not None and (anew or not present.is_open):
                self.release(device_id)
                present = None
            if present is not None and present.task.differs(task):
                differing = present.task.differs(task)[0]
                raise LayoutOptError(f"{device_id} has a training with another {differing}: begin anew")
            return self._open(present or self._place(device_id, task), head, anew)
        finally:
            self._opening.discard(device_id)

    def accept(self, device_id: str, batch: Batch, sent: Batch | None = None) -> None:
        """Check a batch and write it to disk: when this returns it will be applied, exactly once, whatever happens.

        Args:
            device_id: of an open training.
            batch: of step ``next_step``; one without taps is taken from the store, any other is put there too.
            sent: of a batch without taps, samples that the store lacked, with theirs; they are put there too.

        Raises:
            MissingSamples: the store lacks some of a batch's samples. Nothing was accepted.
            LayoutOptError: the batch is not this task's, its step is not the next one, the training failed, or the disk
                is full. Nothing was accepted.
        """
        training = self._get(device_id)
        self._call(training, "accept", device_id, batch, sent, is_done=lambda: training.next_step > batch.step)
        training.accepted(batch.step)

    def submit(self, device_id: str, step: int) -> Future[float]:
        """The loss of an accepted step, once it is applied. Accepted steps are applied in order without being asked."""
        return self._get(device_id).future(step)

    def missing(self, device_id: str, samples: Sequence[int]) -> tuple[int, ...]:
        """Of these samples, those that the store lacks."""
        return self._call(self._get(device_id), "missing", device_id, samples)

    def weights(self, device_id: str) -> bytes:
        """The side network after the last applied step, as safetensors (see :mod:`layoutopt.side.weights`)."""
        return self._call(self._get(device_id), "weights", device_id)

    def status(self, device_id: str) -> Status:
        """How far a training is."""
        training = self._get(device_id)
        if not training.is_open:
            return replace(training.status, failure=training.failure)
        return self._call(training, "status", device_id)

    def release(self, device_id: str) -> None:
        """Write a checkpoint and free the training's memory, once its accepted steps are applied."""
        training = self._get(device_id)
        try:
            if training.is_open:
                status = self._call(training, "release", device_id)
                if status is not None:
                    training.learn(status)
        finally:
            self._drop(training, f"the training of {device_id} was released")

    def close(self) -> None:
        """Write every training's checkpoint and end the workers; accepted steps are applied when it is opened again."""
        with self._lock:
            self._closed = True
        for slot in self._slots:
            with slot.lock:
                if slot.host is not None:
                    slot.host.close()
                    slot.host = None
        for training in list(self._trainings.values()):
            self._drop(training, "the server ends: what it accepted is applied when it begins again")
        if self._ray is not None:
            self._ray.shutdown()

    def _get(self, device_id: str) -> _Training:
        training = self._trainings.get(device_id)
        if training is None or self._closed:
            raise LayoutOptError(f"{device_id} has no open training: open it first")
        return training

    def _place(self, device_id: str, task: Task) -> _Training:
        """In the slot that has most memory to spare."""
        need = task.training_bytes + self._limits.store_memory_bytes
        with self._lock:
            slot = min(self._slots, key=lambda s: s.used_bytes)
            if slot.used_bytes + need > self._most_bytes:
                if need > self._most_bytes:
                    raise LayoutOptError(
                        f"the training of {device_id} needs {need} bytes, and a worker has {self._most_bytes}: take a "
                        "smaller task, or give the server more memory"
                    )
                raise BusyError(
                    f"no worker has {need} bytes to spare for the training of {device_id} (the one with most has "
                    f"{max(self._most_bytes - slot.used_bytes, 0)}): try again later, or take a smaller task"
                )
            training = _Training(next(self._numbers), device_id, task, slot, need)
            slot.trainings[device_id] = self._trainings[device_id] = training
        return training

    def _drop(self, training: _Training, why: str) -> None:
        with self._lock:
            training.slot.trainings.pop(training.device_id, None)
            self._trainings.pop(training.device_id, None)
        training.is_open = False
        training.fail(training.failure or why)

    def _open(self, training: _Training, head: Mapping[str, np.ndarray] | None, anew: bool) -> Status:
        try:
            status = self._call(training, "open", training.device_id, training.task, head, anew, training.number)
        except LayoutOptError as error:
            if not training.is_open:
                self._drop(training, str(error))
            raise
        training.learn(status)
        training.is_open = True
        return status

    def _call(
        self, training: _Training, method: str, *arguments: Any, is_done: Callable[[], bool] = lambda: False
    ) -> Any:
        """Call a training's worker, and once more where it died; not where ``is_done`` says that it had done it."""
        for _ in range(_ATTEMPTS):
            host = self._host(training.slot)
            if training.failure and not training.is_open:
                raise LayoutOptError(training.failure)
            try:
                return host.call(method, *arguments)
            except HostDiedError:
                self._recover(training.slot, host)
                if is_done():
                    return None
        raise LayoutOptError(
            f"the worker of {training.device_id} died {_ATTEMPTS} times at {method}: give it more memory, or a smaller "
            "task"
        )

    def _host(self, slot: _Slot) -> Host:
        with slot.lock:
            if slot.host is None:
                slot.host = self._start(slot)
            return slot.host

    def _start(self, slot: _Slot) -> Host:
        if self._closed:
            raise LayoutOptError("the workers are closed")
        made = (self._directory, self._limits, self._device)

        def died(host: Host) -> None:
            self._recover(slot, host)

        if self._engine == "here":
            return Local(*made, self._applied)
        if self._ray is not None:
            return RayActor(self._ray, self._most_bytes, *made, self._applied, died)
        process = Process(*made, self._applied, died)
        try:
            process.call("ping")
        except HostDiedError as error:
            raise LayoutOptError("a worker process ended as it began: see what it wrote") from error
        return process

    def _recover(self, slot: _Slot, dead: Host) -> None:
        """Replace a worker that died, and open its trainings again."""
        with slot.lock:
            if self._closed or slot.host is not dead:
                return  # somebody did
            slot.host = None
            while slot.host is None:
                _LOG.warning("worker %d died: its %d trainings are opened again", slot.number, len(slot.trainings))
                try:
                    host = self._start(slot)
                except LayoutOptError as error:
                    for training in list(slot.trainings.values()):
                        training.is_open = False
                        training.fail(str(error))
                    return
                if self._reopen(slot, host):
                    slot.host = host

    def _reopen(self, slot: _Slot, host: Host) -> bool:
        """Whether the worker outlived it."""
        for training in [t for t in slot.trainings.values() if t.is_open]:
            try:
                training.learn(host.call("open", training.device_id, training.task, None, False, training.number))
            except LayoutOptError as error:
                training.is_open = False
                training.fail(str(error))
            except HostDiedError:
                training.is_open = False
                training.fail("the worker died when the training's steps were applied again: give it more memory")
                return False
        return True

    def _applied(self, done: Applied) -> None:
        training = self._trainings.get(done.device_id)
        if training is not None:
            training.applied(done)
