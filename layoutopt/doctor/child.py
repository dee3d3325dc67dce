"""Asking a driver from a process of its own, which may crash or hang without harm."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["HOME", "Told", "ask", "ask_selftest", "ending"]

HOME = Path(__file__).resolve().parents[2]
"""Where our packages lie: a child finds these, whatever lies in the working folder."""

SILENCE_S = 120.0
"""A child that says nothing for so long hangs. Compiling a dozen kernels on a slow core takes a tenth of it."""

_START = "import sys; sys.path.insert(0, {home!r}); from kernels.selftest import main; sys.exit(main())"

Event = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What a child told.

    Attributes:
        events: its lines.
        ended: how it ended, in words ("was ended by SIGSEGV", "hung"), if not well; empty else.
        errors: the end of what it, or its driver, wrote to standard error.
    """

    events: tuple[Event, ...]
    ended: str = ""
    errors: str = ""

    def of(self, event: str) -> list[Event]:
        """The lines of one kind."""
        return [line for line in self.events if line["event"] == event]

    @property
    def doing(self) -> str:
        """What it said last that it would do."""
        begun = self.of("begin")
        return str(begun[-1]["what"]) if begun else "starting"


def ask_selftest(
    *words: str | int,
    silence_s: float = SILENCE_S,
    hear: Callable[[Event], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> Told:
    """Run ``kernels.selftest`` with some arguments; see :func:`ask`."""
    command = [sys.executable, "-c", _START.format(home=str(HOME)), *map(str, words)]
    return ask(command, silence_s=silence_s, hear=hear, environment=environment)


def ask(
    command: Sequence[str],
    *,
    silence_s: float = SILENCE_S,
    hear: Callable[[Event], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> Told:
    """Run a command that writes JSON objects with an ``event``, a line each.

    Args:
        command: program and arguments.
        silence_s: after so much silence it is killed.
        hear: told every line as it comes.
        environment: variables that differ from ours.
    """
    events: list[Event] = []
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # its helpers go with it
        )
        assert child.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        hung = False
        try:
            while line := lines.get(timeout=silence_s):
                event = _event(line)
                if event is not None:
                    events.append(event)
                    hear(event)
            code = child.wait(timeout=silence_s)
        except (queue.Empty, subprocess.TimeoutExpired):
            hung, code = True, 0
        finally:
            _kill(child)
            reader.join(timeout=1.0)
            child.stdout.close()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    ended = f"said nothing for {silence_s:.0f} s" if hung else ending(code)
    return Told(tuple(events), ended, said[-2000:])


def ending(code: int) -> str:
    """An exit status in words; empty for success."""
    if code == 0:
        return ""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed while its writer was being killed
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _event(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that has not ended, and what it started."""
    if child.poll() is not None:
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()
