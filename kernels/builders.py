"""Compiling kernels in several processes at once, for drivers that compile one program at a time.

NVIDIA's compiler takes 0.1 to 0.3 seconds for a kernel and holds a lock meanwhile: one core works, whatever the number
of threads. Worker processes with a context each compile beside each other and hand back the driver's binary, which the
parent loads in a fraction of a millisecond. What a worker cannot build is left to the parent, whose compiler then says
what is wrong. Workers compile and do nothing else, and end by themselves after some idle seconds or with their parent.

Run as a program (``python -m kernels.builders DEVICE``) this is such a worker: it reads lines of JSON
``{"source": …}`` and answers each with ``{"binary": base64}`` or ``{"error": text}``.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO

from kernels.spec import DeviceLimits

__all__ = ["LEAST_SOURCES", "Builders", "worker_count"]

MOST_WORKERS = 12
LEAST_SOURCES = 6
"""Fewer new programs than this are built by the parent: a worker's context takes a second to make."""
IDLE_S = 15.0
CONTEXT_BYTES = 512 << 20
"""What a worker's context may take of the device's memory while it lives; all of them get an eighth of it."""

WORKERS_ENV = "LAYOUTOPT_BUILDERS"


def worker_count(limits: DeviceLimits) -> int:
    """Processes to compile in: the environment's LAYOUTOPT_BUILDERS, else by cores (one is left) and device memory."""
    asked = os.environ.get(WORKERS_ENV, "")
    if asked.isdigit():
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores - 1, limits.global_mem_bytes // 8 // CONTEXT_BYTES, MOST_WORKERS)


class Builders:
    """Worker processes that compile for one device, started when they are first needed.

    Args:
        device: index of the device, as ``kernels.runtime.devices`` lists them.
        workers: at most this many.
    """

    def __init__(self, device: int, workers: int) -> None:
        self._command = [sys.executable, "-m", "kernels.builders", str(device)]
        self._most = workers
        self._workers: list[subprocess.Popen[str]] = []

    def build(self, sources: Sequence[str]) -> list[bytes | None]:
        """The driver's binary of each; None where a worker did not make it, for whatever reason."""
        out: list[bytes | None] = [None] * len(sources)
        todo: SimpleQueue[int] = SimpleQueue()
        for i in range(len(sources)):
            todo.put(i)

        def serve(worker: subprocess.Popen[str]) -> None:
            while True:
                try:
                    i = todo.get_nowait()
                    out[i] = _binary(worker, sources[i])
                except Empty:
                    return
                except (OSError, ValueError):  # it died or said something else: the others, or the parent, do its work
                    worker.kill()
                    return

        serving = self._ready(min(self._most, len(sources)))
        if serving:
            with ThreadPoolExecutor(len(serving)) as threads:
                list(threads.map(serve, serving))
        return out

    def close(self) -> None:
        """End the workers."""
        while self._workers:
            _end(self._workers.pop())

    def __del__(self) -> None:
        self.close()

    def _ready(self, count: int) -> list[subprocess.Popen[str]]:
        """So many workers that live, as far as the system allows."""
        for worker in [w for w in self._workers if w.poll() is not None]:
            self._workers.remove(worker)
            _end(worker)
        try:
            while len(self._workers) < count:
                self._workers.append(self._started())
        except OSError:  # no more processes: those there are must do
            pass
        return self._workers[:count]

    def _started(self) -> subprocess.Popen[str]:
        here = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(dict.fromkeys([here, *(p for p in sys.path if p)]))
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is the parent's to handle; a worker ends when its input does
        )


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):  # a line that it will never read
                pipe.close()
    worker.wait()


def _binary(worker: subprocess.Popen[str], source: str) -> bytes | None:
    """Ask a worker.

    Raises:
        OSError: it is gone.
        ValueError: it answered with something else, or with nothing.
    """
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({"source": source}) + "\n")
    worker.stdin.flush()
    answer = json.loads(worker.stdout.readline())
    return base64.b64decode(answer["binary"]) if "binary" in answer else None


def serve(device: int, requests: TextIO, answers: TextIO) -> None:
    """Be a worker until the requests end or none comes for a while."""
    from kernels.runtime import Runtime, devices
    from layoutopt.errors import DeviceError

    runtime = Runtime(devices()[device])
    while select.select([requests], [], [], IDLE_S)[0] and (line := requests.readline()):
        try:
            answer = {"binary": base64.b64encode(runtime.binary(json.loads(line)["source"])).decode()}
        except DeviceError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a driver prints is no answer
    serve(int(sys.argv[1]), sys.stdin, private)
