"""What holds :class:`layoutopt.side.trainings.Trainings`: this process, another one of this machine, or a Ray actor."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from layoutopt.errors import LayoutOptError
from layoutopt.side.trainings import Applied, Limits, Trainings

__all__ = ["Host", "HostDiedError", "Local", "Process", "RayActor"]

Report = Callable[[Applied], None]

_CALLS_AT_ONCE = 16
_END_S = 60.0  # in which a worker writes its checkpoints


class HostDiedError(Exception):
    """The process that held the trainings is gone; their files are as they were."""


class Host(Protocol):
    """Holds trainings; methods may be called by any thread."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the trainings and wait for what it returns.

        Raises:
            LayoutOptError: the method's.
            HostDiedError: the host is gone, before or after the method ran.
        """

    def close(self) -> None:
        """Unload all trainings and end."""


def _answer(trainings: Trainings, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether a method returned, and what; or its error."""
    try:
        return True, getattr(trainings, method)(*arguments)
    except LayoutOptError as error:
        return False, error
    except Exception as error:  # noqa: BLE001 - the caller gets it, and other trainings go on
        return False, LayoutOptError(f"a worker failed at {method} ({type(error).__name__}: {str(error)[:200]})")


def _result(answer: tuple[bool, Any]) -> Any:
    returned, value = answer
    if not returned:
        raise value
    return value


class Local:
    """Trainings in this process."""

    def __init__(self, directory: Path, limits: Limits, device: str, report: Report) -> None:
        self._trainings = Trainings(directory, limits, device, report)

    def call(self, method: str, *arguments: Any) -> Any:
        """See :class:`Host`."""
        return _result(_answer(self._trainings, method, arguments))

    def close(self) -> None:
        """See :class:`Host`."""
        self._trainings.close()


class Process:
    """Trainings in a process of this machine, which ends itself when this one does.

    Args:
        directory: of all trainings.
        limits: of memory and disk.
        device: "cpu" or "cuda".
        report: told of every applied step.
        died: told, by a thread of its own, when the process is gone without having been asked to end.
    """

    def __init__(
        self, directory: Path, limits: Limits, device: str, report: Report, died: Callable[[Host], None]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, directory, limits, device), daemon=True)
        self._process.start()
        theirs.close()
        self._report, self._died = report, died
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[bool, Any]]] = {}
        self._sending, self._state = threading.Lock(), threading.Lock()
        self._gone = self._ending = False
        self._reader = threading.Thread(target=self._read, name="side worker", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """See :class:`Host`."""
        return _result(self._ask(method, arguments).result())

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Future[tuple[bool, Any]]:
        number, future = next(self._numbers), Future[tuple[bool, Any]]()
        with self._state:
            if self._gone:
                raise HostDiedError
            self._waiting[number] = future
        # Where the pipe is broken the reader comes to its end, and tells all who wait.
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send((number, method, arguments))
        return future

    def close(self) -> None:
        """See :class:`Host`."""
        self._ending = True
        with contextlib.suppress(HostDiedError, TimeoutError):
            self._ask("close", ()).result(_END_S)
            with self._sending, contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(_END_S)
        self._process.kill()  # where it did neither
        self._reader.join()

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                break
            if number is None:
                self._report(answer)
            else:
                self._waiting.pop(number).set_result(answer)
        with self._state:
            self._gone = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        self._process.kill()  # no other may open its trainings while it lives
        self._process.join()
        with self._sending:
            self._pipe.close()
        for future in waiting:
            future.set_exception(HostDiedError())
        if not self._ending:
            self._died(self)


def _serve(pipe: Connection, directory: Path, limits: Limits, device: str) -> None:
    """The process: answers calls until it is told to end, or whoever calls is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sending = threading.Lock()

    def send(number: int | None, answer: Any) -> None:
        try:
            with sending:
                pipe.send((number, answer))
        except OSError:
            os._exit(1)

    trainings = Trainings(directory, limits, device, lambda applied: send(None, applied))
    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # not in the middle of a checkpoint's file, but as good as: all is on disk
            if message is None:
                return
            number, method, arguments = message
            pool.submit(lambda n, m, a: send(n, _answer(trainings, m, a)), number, method, arguments)


class _Actor:
    """What runs on the cluster."""

    def __init__(self, directory: Path, limits: Limits, device: str) -> None:
        self._applied: queue.SimpleQueue[Applied] = queue.SimpleQueue()
        self._trainings = Trainings(directory, limits, device, self._applied.put)

    def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether a method returned, and what; or its error."""
        return _answer(self._trainings, method, arguments)

    def applied(self, patience_s: float) -> list[Applied]:
        """Steps that were applied since the last call, at least one unless it takes too long."""
        with contextlib.suppress(queue.Empty):
            found = [self._applied.get(timeout=patience_s)]
            while not self._applied.empty():
                found.append(self._applied.get())
            return found
        return []


class RayActor:
    """Trainings in an actor of a Ray cluster, whose nodes share the directory.

    Args:
        ray: the module, connected.
        memory_bytes: that the actor's node must have to spare.
        directory: of all trainings.
        limits: of memory and disk.
        device: "cpu" or "cuda".
        report: told of every applied step.
        died: told, by a thread of its own, when the actor is gone without having been asked to end.
    """

    _START_S = 120.0

    def __init__(
        self,
        ray: Any,
        memory_bytes: int,
        directory: Path,
        limits: Limits,
        device: str,
        report: Report,
        died: Callable[[Host], None],
    ) -> None:
        self._ray, self._report, self._died = ray, report, died
        self._ending = False
        remote = ray.remote(_Actor).options(
            num_cpus=1,
            num_gpus=1 if device == "cuda" else 0,
            memory=memory_bytes,
            max_restarts=0,
            max_concurrency=_CALLS_AT_ONCE + 1,
        )
        self._actor = remote.remote(directory, limits, device)
        try:
            ray.get(self._actor.call.remote("ping", ()), timeout=self._START_S)
        except ray.exceptions.GetTimeoutError as error:
            self._end()
            raise LayoutOptError(
                f"the Ray cluster has no room for a worker of {memory_bytes} bytes: give it nodes, or fewer workers"
            ) from error
        except ray.exceptions.RayError as error:
            raise LayoutOptError(f"a worker ended as it began on the Ray cluster ({type(error).__name__})") from error
        self._reader = threading.Thread(target=self._read, name="side worker", daemon=True)
        self._reader.start()

    def call(self, method: str, *arguments: Any) -> Any:
        """See :class:`Host`."""
        try:
            answer = self._ray.get(self._actor.call.remote(method, arguments))
        except self._ray.exceptions.RayError as error:
            self._end()  # no other may open its trainings while it lives
            raise HostDiedError from error
        return _result(answer)

    def close(self) -> None:
        """See :class:`Host`."""
        self._ending = True
        with contextlib.suppress(HostDiedError):
            self.call("close")
        self._end()
        self._reader.join()

    def _end(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor, no_restart=True)

    def _read(self) -> None:
        while not self._ending:
            try:
                applied = self._ray.get(self._actor.applied.remote(0.5))
            except self._ray.exceptions.RayError:
                break
            for one in applied:
                self._report(one)
        if not self._ending:
            self._died(self)
