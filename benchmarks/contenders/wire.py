"""How ``benchmarks/step.py`` and its contenders talk: JSON lines over a child process' standard input and output.

A contender is a process, so that one framework's threads, allocators and caches are not another's, and so that its
memory is its own. It builds its step, says that it is ready, and then does what it is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]


class Contender(Protocol):
    """A training step in some framework."""

    def losses(self, count: int) -> list[float]:
        """Losses of the next ``count`` steps."""
        ...

    def burst(self, count: int) -> float:
        """Seconds of ``count`` steps, waited for once at the end."""
        ...

    def steady(self) -> None:
        """Called when everything is compiled and allocated: peaks of memory count from here."""
        ...

    def report(self) -> dict[str, Any]:
        """Memory and whatever else is known of it."""
        ...


class ContenderError(Exception):
    """A contender that stopped or took too long; the message ends with what it said last."""


# ---- in the contender's process -------------------------------------------------------------------------------------


def serve(make: Callable[[dict[str, Any]], Contender]) -> None:
    """Build the contender from the JSON of the first argument and answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints is no answer

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    begin = time.perf_counter()
    contender = make(json.loads(sys.argv[1]))
    answer(ready=True, built_s=time.perf_counter() - begin)
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked["do"]
        if verb == "losses":
            answer(losses=contender.losses(asked["count"]))
        elif verb == "burst":
            answer(seconds=contender.burst(asked["count"]))
        elif verb == "steady":
            contender.steady()
            answer(done=True)
        elif verb == "report":
            answer(report=contender.report())
        else:
            return


def resident_bytes(peak: bool = False) -> int:
    """Of this process: now, or the most so far."""
    key = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(key))
    return int(line.split()[1]) * 1024


def forget_peak() -> bool:
    """Let the peak of memory start anew; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ---- in the benchmark -----------------------------------------------------------------------------------------------


class Child:
    """A contender's process, seen from the benchmark.

    Args:
        module: to run with ``-m``.
        spec: what ``serve`` gives to the contender.
        python: its interpreter.
        log: file for what it prints.
        environment: further variables.
    """

    def __init__(
        self,
        module: str,
        spec: dict[str, Any],
        log: Path,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name, self._log = module.rpartition(".")[2], log
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        with open(log, "w") as printed:
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )

    def send(self, verb: str, **arguments: Any) -> None:
        """One request, to be answered.

        Raises:
            ContenderError: it ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        except (BrokenPipeError, ValueError) as error:
            raise self._ended() from error

    def ask(self, verb: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            ContenderError: it ended, or did not answer in time.
        """
        self.send(verb, **arguments)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; the first is that it is ready."""
        assert self._process.stdout is not None
        with DefaultSelector() as waiting:
            waiting.register(self._process.stdout, EVENT_READ)
            if not waiting.select(timeout_s):
                self.close()
                raise ContenderError(f"no answer in {timeout_s:.0f} s; {self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ended(self) -> ContenderError:
        self.close()
        return ContenderError(f"ended with code {self._process.returncode}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"it said last: {lines[-1][:500]}" if lines else "it said nothing"


def run_once(module: str, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a module that prints one line of JSON last, its errors shown.

    Raises:
        ContenderError: it failed or took too long.
    """
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise ContenderError(f"{module} took more than {timeout_s:.0f} s") from error
    if done.returncode or not done.stdout.strip():
        raise ContenderError(f"{module} ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
