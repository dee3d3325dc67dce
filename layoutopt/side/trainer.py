"""One training of a side network: every accepted batch is applied exactly once, whatever happens in between.

A directory holds a checkpoint (weights, optimizer and step in one safetensors file, replaced as a whole), the journal
of accepted batches, and a lock. A batch is in the journal before it is acknowledged. Who opens the directory later
loads the checkpoint and applies the batches of the journal that it does not contain: on a CPU the weights are those of
a training that was never interrupted, bit by bit, since a step is a function of weights and batch, calculated by a
fixed number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch

from layoutopt.errors import LayoutOptError
from layoutopt.files import lock, sync_folder, write_atomic
from layoutopt.side.journal import Journal
from layoutopt.side.network import SideNetwork, inputs_of, loss_of
from layoutopt.side.optimizer import Optimizer
from layoutopt.side.task import WINDOW_STEPS, Batch, Task
from layoutopt.side.weights import SideWeights, initial_weights, pack, read_safetensors, weight_shapes

__all__ = ["Trainer", "learning_rate"]

_LOG = logging.getLogger(__name__)
_FORMAT = "side training 1"
_CHECKPOINT = "checkpoint.safetensors"
_LOSSES_KEPT = 64


def learning_rate(task: Task, step: int) -> float:
    """The learning rate of a step: rises through the warm-up, then follows the schedule."""
    if step < task.warmup:
        return task.lr * (step + 1) / task.warmup
    gone = (step - task.warmup) / max(task.steps - task.warmup, 1)
    if task.schedule == "linear":
        return task.lr * (1 - gone)
    return task.lr * (0.5 * (1 + math.cos(math.pi * gone)) if task.schedule == "cosine" else 1)


class Trainer:
    """An open training; made by :meth:`open`. One thread may accept batches while another applies them.

    Attributes:
        task: what is trained.
        applied: steps that the weights contain.
        failure: why no further step can be applied; "" if one can.
        closed: whether it was closed.
    """

    def __init__(self, directory: Path, task: Task, device: torch.device, threads: int, lock_file: IO[bytes]) -> None:
        self.task, self.applied, self.failure, self.closed = task, 0, "", False
        self._directory, self._device, self._threads, self._lock_file = directory, device, threads, lock_file
        self._losses: OrderedDict[int, float] = OrderedDict()
        self._pending: deque[Batch] = deque()
        self._accepting, self._training = threading.Lock(), threading.Lock()
        self._checkpointed = 0
        self._checkpoint_steps, self._journal_bytes = 1, 0
        self._journal: Journal
        self._network: SideNetwork
        self._optimizer: Optimizer

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        task: Task,
        *,
        head: Mapping[str, np.ndarray] | None = None,
        device: str = "cpu",
        threads: int = 1,
        checkpoint_steps: int = 50,
        journal_bytes: int = 64 << 20,
        patience_s: float = 0.0,
    ) -> Trainer:
        """Begin a training, or go on with the one that is there: its accepted batches are applied first.

        Args:
            directory: of this training alone; made if it does not exist.
            task: what to train.
            head: initial weights of the head where a training begins (see
                :func:`layoutopt.side.weights.initial_weights`).
            device: "cpu" or "cuda".
            threads: of a step's calculation on the CPU; with another number the weights differ in their last bits.
            checkpoint_steps: steps between checkpoints.
            journal_bytes: a checkpoint is written earlier where accepted batches take more on disk.
            patience_s: to wait for another process that has it open, and is about to end.

        Raises:
            LayoutOptError: the directory has another task, is in use, damaged or cannot be written; the head does not
                fit; there is no such device.
        """
        where = _device(device)
        root = Path(directory)
        try:
            root.mkdir(0o700, parents=True, exist_ok=True)  # activations and labels are nobody else's
            lock_file = open(root / "lock", "ab")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise LayoutOptError(f"cannot write the training in {root}: {error.strerror}") from error
        try:
            _lock(lock_file, root, patience_s)
            trainer = cls(root, task, where, threads, lock_file)
            trainer._checkpoint_steps, trainer._journal_bytes = checkpoint_steps, journal_bytes
            trainer._load(head)
            trainer._replay()
        except BaseException:
            lock_file.close()
            raise
        return trainer

    @property
    def next_step(self) -> int:
        """The first step that was not accepted."""
        return self._journal.next_step

    @property
    def waiting(self) -> int:
        """Accepted steps that were not applied."""
        return len(self._pending)

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal on disk."""
        return self._journal.nbytes

    @property
    def loss(self) -> float | None:
        """Of the last applied step; None before the first."""
        return next(reversed(self._losses.values()), None)

    @property
    def losses(self) -> dict[int, float]:
        """Of the last 64 applied steps, by step."""
        return dict(self._losses)

    def accept(self, batch: Batch) -> None:
        """Check a batch and write it to disk: when this returns it will be applied, exactly once, whatever happens.

        Args:
            batch: of step ``next_step``, with taps.

        Raises:
            LayoutOptError: it is not this task's or not the next, too many wait, the training failed, or the disk is
                full. Nothing was accepted.
        """
        batch.check(self.task)
        if batch.is_stored:
            raise LayoutOptError(f"step {batch.step} has no taps: they are taken from the store before it is accepted")
        with self._accepting:
            self._check_may_go_on()
            if batch.step != self.next_step:
                raise LayoutOptError(f"step {batch.step} is not the next one: send step {self.next_step}")
            if len(self._pending) >= WINDOW_STEPS:
                raise LayoutOptError(
                    f"step {batch.step} comes while {WINDOW_STEPS} steps wait to be applied: wait for one of them"
                )
            if self._journal.nbytes > 2 * self._journal_bytes + 4 * WINDOW_STEPS * self.task.batch_bytes:
                raise LayoutOptError(f"step {batch.step} was not accepted, since no checkpoint can be written: wait")
            self._journal.append(batch)
            self._pending.append(batch)

    def apply(self) -> float:
        """Apply the next accepted step.

        Returns:
            Its loss, before the weights changed.

        Raises:
            LayoutOptError: none waits, or the loss or a gradient is not finite; weights are as they were, and the
                training has failed for good.
        """
        with self._training:
            self._check_may_go_on()
            if not self._pending:
                raise LayoutOptError("no accepted step waits to be applied: accept one first")
            loss = self._step(self._pending[0])
            with self._accepting:
                self._pending.popleft()
            if (
                self.applied - self._checkpointed >= self._checkpoint_steps
                or self._journal.nbytes > self._journal_bytes
            ):
                self._checkpoint_or_say_why()
        return loss

    def checkpoint(self) -> None:
        """Write weights, optimizer and step to disk, and forget the batches that they contain.

        Raises:
            LayoutOptError: the disk is full or failed; nothing is lost.
        """
        with self._training:
            if self.closed:
                self._check_may_go_on()
            self._checkpoint()

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the weights after the last applied step, by the names of the file."""
        with self._training:
            return self._network.weights()

    def export(self) -> bytes:
        """The side network after the last applied step, as a safetensors file."""
        with self._training:
            return pack(SideWeights(self.task, self.applied, self._network.weights()))

    def close(self, *, keep: bool = True) -> None:
        """End. Accepted steps that wait are applied when it is opened again.

        Args:
            keep: whether to write a checkpoint of what is in memory; without, the disk stays as it is.
        """
        with self._training:
            if keep and not self.closed and self.applied > self._checkpointed:
                self._checkpoint_or_say_why()
            with self._accepting:
                self.closed = True
                self._journal.close()
                self._lock_file.close()

    def _check_may_go_on(self) -> None:
        if self.failure or self.closed:
            raise LayoutOptError(self.failure or f"the training in {self._directory} was closed: open it again")

    def _step(self, batch: Batch) -> float:
        assert batch.step == self.applied, f"step {batch.step} after {self.applied} steps"
        assert batch.targets is not None, "a checked batch with taps has targets"
        taps, mask = inputs_of(self.task, batch, self._device)
        with _threads(self._threads):
            self._network.zero_grad(set_to_none=True)
            result = loss_of(self.task, self._network(taps, mask), batch.targets)
            loss = result.item()
            result.backward()
            self._check_finite(batch.step, loss)
            self._optimizer.step(batch.step, learning_rate(self.task, batch.step))
        self.applied += 1
        self._losses[batch.step] = loss
        while len(self._losses) > _LOSSES_KEPT:
            self._losses.popitem(last=False)
        return loss

    def _check_finite(self, step: int, loss: float) -> None:
        gradients = [v.grad for v in self._network.values if v.grad is not None]
        if math.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in gradients):
            return
        self._network.zero_grad(set_to_none=True)
        self.failure = f"the loss or its gradient is not finite at step {step}: begin anew with a lower lr"
        raise LayoutOptError(self.failure)

    def _checkpoint_or_say_why(self) -> None:
        # The step is in the journal: that it is not in a checkpoint yet loses nothing.
        try:
            self._checkpoint()
        except LayoutOptError as error:
            _LOG.warning("%s: no checkpoint at step %d: %s", self._directory, self.applied, error)

    def _checkpoint(self) -> None:
        values = {name: value.detach().cpu().numpy() for name, value in self._network.named().items()}
        values |= self._optimizer.state()
        _write_checkpoint(self._directory, self.task, self.applied, values, self._losses)
        self._checkpointed = self.applied
        with self._accepting:
            self._journal.cut(self.applied)

    def _load(self, head: Mapping[str, np.ndarray] | None) -> None:
        for left in self._directory.glob(f".{_CHECKPOINT}.*"):
            left.unlink(missing_ok=True)  # half a checkpoint, of a process that was killed
        path = self._directory / _CHECKPOINT
        if not path.exists():
            if any(self._directory.glob("journal.*")):
                raise LayoutOptError(f"{self._directory} has a journal but no {_CHECKPOINT}: begin this training anew")
            _write_checkpoint(self._directory, self.task, 0, initial_weights(self.task, head), {})
            sync_folder(self._directory.parent)
        self.applied, values, losses = _read_checkpoint(path, self.task)
        self._checkpointed = self.applied
        self._losses.update(losses)
        self._network = SideNetwork(self.task, {n: values[n] for n in weight_shapes(self.task)}).to(self._device)
        self._optimizer = Optimizer(self.task, self._network.named(), values if self.applied else None)

    def _replay(self) -> None:
        self._journal = Journal(self._directory, self.task, self.applied)
        try:
            for batch in self._journal.read(self.applied):
                self._step(batch)
        except LayoutOptError as error:
            if not self.failure:
                self._journal.close()
                raise
            _LOG.warning("%s: %s", self._directory, error)
        if self.applied > self._checkpointed:
            self._checkpoint_or_say_why()


def _lock(file: IO[bytes], directory: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while not lock(file.fileno()):
        if time.monotonic() >= until:
            raise LayoutOptError(f"the training in {directory} is open in another process: wait until it ends")
        time.sleep(0.05)


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise LayoutOptError(f"a side network is trained on cpu or cuda, got {name!r}")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise LayoutOptError("torch finds no CUDA GPU: train on the CPU, or install torch with CUDA")
        # The same order of sums in every run, where CUDA's libraries can.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(name)


def _write_checkpoint(
    directory: Path, task: Task, step: int, values: Mapping[str, np.ndarray], losses: Mapping[int, float]
) -> None:
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(value) for name, value in values.items()}
    metadata = {
        "layoutopt": _FORMAT,
        "task": task.encode().decode(),
        "step": str(step),
        "losses": json.dumps(list(losses.items())),
        "digest": _digest(arrays),
    }
    path = directory / _CHECKPOINT
    try:
        write_atomic(path, save(arrays, metadata), sync=True)
    except OSError as error:
        raise LayoutOptError(f"cannot write {path}: {error.strerror}") from error


def _read_checkpoint(path: Path, task: Task) -> tuple[int, dict[str, np.ndarray], dict[int, float]]:
    """Step, weights and optimizer, and the losses of the last steps."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LayoutOptError(f"cannot read {path}: {error.strerror}") from error
    metadata, values = read_safetensors(data, str(path))
    if metadata.get("layoutopt") != _FORMAT or not {"task", "step", "losses", "digest"} <= metadata.keys():
        raise LayoutOptError(f"{path} is no checkpoint of a side network: expected {_FORMAT!r} in its metadata")
    differing = Task.decode(metadata["task"]).differs(task)
    if differing:
        raise LayoutOptError(
            f"a training with another {differing[0]} is in {path.parent}: begin anew, or give what it had"
        )
    if metadata["digest"] != _digest(values):
        raise LayoutOptError(f"{path} is damaged: begin this training anew, or restore it with its journal")
    return int(metadata["step"]), values, {int(step): float(loss) for step, loss in json.loads(metadata["losses"])}


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


class _Threads:
    """How many trainings calculate at the moment, in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside, self.before = 0, 1


_SHARED = _Threads()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Calculate with a number of threads, and set back the process's own number when nobody does any more."""
    with _SHARED.lock:
        if not _SHARED.inside:
            _SHARED.before = torch.get_num_threads()
        _SHARED.inside += 1
        torch.set_num_threads(count)  # in each thread that calculates: OpenMP keeps it by thread
    try:
        yield
    finally:
        with _SHARED.lock:
            _SHARED.inside -= 1
            if not _SHARED.inside:
                torch.set_num_threads(_SHARED.before)
