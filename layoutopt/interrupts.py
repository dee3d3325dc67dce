"""Ctrl-C during the exact search: the first asks for the best plan so far, the second ends the program.

The search looks at ``requested`` where it looks at the clock. Only what ``graceful`` surrounds is treated so, and only
while a solver is at work: before there is anything to return, and everywhere else, Ctrl-C is what it always is.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

__all__ = ["StoppedError", "abandoned", "graceful", "interruptible", "overdue", "requested", "searching"]

T = TypeVar("T")

_POLL_S = 0.05


class StoppedError(Exception):
    """What was at work did not end before it was to stop. Caught by the solver."""


class _State:
    graceful = False
    requested = False
    searching = 0
    abandoned = False


def requested() -> bool:
    """Whether the search is to return what it has."""
    return _State.requested


def overdue(deadline: float) -> bool:
    """Whether the search is to end: by ``time.perf_counter``, or because it was asked to."""
    return _State.requested or time.perf_counter() > deadline


def abandoned() -> bool:
    """Whether a foreign solver is still at work in a thread that nobody waits for: the process must end by force."""
    return _State.abandoned


def interruptible(work: Callable[[], T]) -> T:
    """Do ``work``, foreign code that knows no interruption: inside ``graceful`` it is left alone when asked to stop.

    Raises:
        StoppedError: it was.
    """
    if not _State.graceful:
        return work()
    if _State.requested:
        raise StoppedError
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            done.put((None, error))

    _State.abandoned = True
    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            found, error = done.get(timeout=_POLL_S)
        except queue.Empty:
            if _State.requested:
                raise StoppedError from None
            continue
        _State.abandoned = False
        if error is not None:
            raise error
        return found  # type: ignore[return-value]


@contextmanager
def searching() -> Iterator[None]:
    """A solver is at work inside: it can be asked to stop."""
    _State.searching += 1
    try:
        yield
    finally:
        _State.searching -= 1


@contextmanager
def graceful(announce: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C during a search asks it to stop; any other raises KeyboardInterrupt.

    Args:
        announce: told in one sentence what happens.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if _State.requested or not _State.searching:
            raise KeyboardInterrupt
        _State.requested = True
        announce("interrupted: taking the best plan so far (Ctrl-C again to end without one)")

    before = signal.signal(signal.SIGINT, stop)
    _State.graceful = True
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _State.graceful = _State.requested = False
