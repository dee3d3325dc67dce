"""Ends a training at every moment that matters, and sees what is left: ``python -m tests.side_crashes FOLDER``.

Each training runs in a fork of this process, which has imported torch and calculated nothing. "points": killed
before, in and after every operation on files; "moments": killed at random times, while one thread accepts and another
applies; "full": the disk takes only so many bytes for a while. Prints what was tried and what went wrong, as JSON.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.side import journal
from layoutopt.side.trainer import Trainer
from tests.side_cases import batch_of, task_of

TASK = task_of(taps=("a", "b"), steps=7)
LOST, FAILED = 3, 4


class Fuse:
    """Kills this process at its n-th operation on files; counts them where n is 0."""

    def __init__(self, at: int) -> None:
        self.at, self.passed = at, 0

    def burns(self) -> bool:
        self.passed += 1
        return self.passed == self.at

    def here(self) -> None:
        if self.burns():
            _die()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.here()
            result = function(*args, **kwargs)
            self.here()
            return result

        return wrapped

    def file(self, opened: Any) -> Torn:
        return Torn(opened, self)

    def install(self) -> None:
        """In this process, for good."""
        for name in ("fsync", "replace", "truncate", "ftruncate"):
            setattr(os, name, self.around(getattr(os, name)))
        Path.unlink = self.around(Path.unlink)  # type: ignore[method-assign]
        fdopen = os.fdopen
        os.fdopen = lambda *a, **k: self.file(fdopen(*a, **k))  # type: ignore[assignment]
        journal.open = lambda *a, **k: self.file(builtins.open(*a, **k))  # type: ignore[attr-defined]  # noqa: SIM115


class Torn:
    """A file of which half a write may be the last."""

    def __init__(self, opened: Any, fuse: Fuse) -> None:
        self._file, self._fuse = opened, fuse

    def write(self, data: Any) -> int:
        if self._fuse.burns():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            _die()
        return self._file.write(data)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _open(folder: Path, acked: int) -> Trainer:
    trainer = Trainer.open(folder, TASK, checkpoint_steps=3)
    if trainer.next_step < acked:
        os._exit(LOST)
    return trainer


def _train(folder: Path, acked: int, pipe: int) -> None:
    trainer = _open(folder, acked)
    while trainer.next_step < TASK.steps:
        trainer.accept(batch_of(TASK, trainer.next_step))
        os.write(pipe, b"x")
        while trainer.waiting > 1:
            trainer.apply()
    _end(trainer, folder)


def _train_in_threads(folder: Path, acked: int, pipe: int) -> None:
    trainer = _open(folder, acked)

    def accept() -> None:
        while trainer.next_step < TASK.steps:
            if trainer.waiting < 4:
                trainer.accept(batch_of(TASK, trainer.next_step))
                os.write(pipe, b"x")

    thread = threading.Thread(target=accept)
    thread.start()
    while thread.is_alive() or trainer.waiting:
        if trainer.waiting:
            trainer.apply()
    thread.join()
    _end(trainer, folder)


def _train_on_a_full_disk(folder: Path, pipe: int, most_bytes: int) -> None:
    """Until it is killed; steps that were accepted, and whether the disk was full, go into the pipe."""
    trainer = _open(folder, 0)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(TASK.steps - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, unlimited[1]))
        try:
            trainer.accept(batch_of(TASK, step))
        except LayoutOptError as error:
            if "was not accepted" not in str(error):
                os._exit(FAILED)
            os.write(pipe, b"f")
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            trainer.accept(batch_of(TASK, step))
        os.write(pipe, b"x")
        if step % 2:
            trainer.apply()
    _die()


def _end(trainer: Trainer, folder: Path) -> None:
    while trainer.waiting:
        trainer.apply()
    weights = trainer.weights()
    trainer.close()
    (folder / "result").write_bytes(b"".join(weights[n].tobytes() for n in sorted(weights)))


def _fork(body: Callable[[int], None], kill_after_s: float | None = None) -> tuple[int, int]:
    """How a child ended (exit code, or minus its signal), and how many bytes it wrote into its pipe."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            body(theirs)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it is told, and a fork of this process must not go on with it
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(theirs)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    count = 0
    while data := os.read(ours, 4096):
        count += len(data)
    os.close(ours)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _reference(folder: Path) -> bytes:
    code, count = _fork(lambda pipe: _train(_fresh(folder), 0, pipe))
    assert (code, count) == (0, TASK.steps)
    return (folder / "result").read_bytes()


def _finish(folder: Path, acked: int, reference: bytes) -> str:
    """What is wrong with the weights of a training that goes on from here."""
    code, more = _fork(lambda pipe: _train(folder, acked, pipe))
    if code:
        return f"ended with {code} after {acked} acknowledged steps"
    if acked + more < TASK.steps - 2:  # a step may be written down and not acknowledged, once per kill
        return f"{acked} and {more} steps were acknowledged"
    return "" if (folder / "result").read_bytes() == reference else "other weights"


def points(folder: Path) -> dict[str, Any]:
    reference = _reference(folder / "reference")
    rng = random.Random(0)

    def burn(at: int, acked: int) -> tuple[int, int]:
        def body(pipe: int) -> None:
            Fuse(at).install()
            _train(folder / "killed", acked, pipe)

        return _fork(body)

    wrong, at = [], 0
    while True:
        at += 1
        _fresh(folder / "killed")
        code, acked = burn(at, 0)
        if code == 0:
            break
        # And once more, while it gets up.
        again, more = burn(rng.randrange(1, 30), acked)
        said = _finish(folder / "killed", acked + more, reference)
        if said or code != -signal.SIGKILL or again not in (0, -signal.SIGKILL):
            wrong.append(f"point {at} ({code}, {again}): {said}")
    return {"tried": at - 1, "wrong": wrong}


def moments(folder: Path, trials: int = 12) -> dict[str, Any]:
    reference = _reference(folder / "reference")
    started = time.monotonic()
    _fork(lambda pipe: _train_in_threads(_fresh(folder / "killed"), 0, pipe))
    whole_s = time.monotonic() - started
    rng = random.Random(1)
    wrong, killed = [], 0
    for trial in range(trials):
        _fresh(folder / "killed")
        acked = 0
        for _ in range(2):
            begun = acked
            code, more = _fork(
                lambda pipe, n=begun: _train_in_threads(folder / "killed", n, pipe), rng.uniform(0, whole_s)
            )
            acked += more
            killed += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL):
                wrong.append(f"trial {trial} ended with {code}")
        said = _finish(folder / "killed", acked, reference)
        if said:
            wrong.append(f"trial {trial}: {said}")
    return {"tried": killed, "wrong": wrong}


def full(folder: Path) -> dict[str, Any]:
    reference = _reference(folder / "reference")
    wrong, refused = [], 0
    for most_bytes in range(10, 1500, 150):
        code, count = _fork(lambda pipe, n=most_bytes: _train_on_a_full_disk(_fresh(folder / "full"), pipe, n))
        refused += count - (TASK.steps - 1)
        said = _finish(folder / "full", TASK.steps - 1, reference)
        if said or code != -signal.SIGKILL:
            wrong.append(f"{most_bytes} bytes ({code}): {said}")
    return {"tried": refused, "wrong": wrong}


if __name__ == "__main__":
    os.fsync = lambda _: None  # type: ignore[assignment]  # the system outlives these ends, and keeps what was written
    logging.disable()  # what is announced is not what is looked at
    print(json.dumps({f.__name__: f(Path(sys.argv[1])) for f in (points, moments, full)}))
