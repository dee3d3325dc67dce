"""A connection as the service sees it: messages that wait to be written, and why it ended. And a log of refusals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from typing import Any

from layoutopt.side.wire import RefusedError, messages

__all__ = ["Link", "Refusals"]

LOGGER = logging.getLogger("layoutopt.side")


class Link:
    """Where a session leaves what a device is to be told. The call's own coroutine writes it.

    Args:
        most: messages that may wait; a device that leaves more unread is cut off.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self.refusal: RefusedError | None = None

    @property
    def is_open(self) -> bool:
        """Whether what is put here may still be written."""
        return not self._ended

    def put(self, **kind: Any) -> None:
        """Leave a message; nothing once the connection has ended."""
        if self._ended:
            return
        if len(self._waiting) >= self._most:
            self.end(RefusedError(f"{self._most} messages wait to be read by the device", "later"))
            return
        self._waiting.append(messages().FromServer(**kind))
        self._changed.set()

    async def room(self, few: int = 4) -> bool:
        """Wait until fewer than ``few`` messages wait; False where the connection has ended."""
        while len(self._waiting) >= few and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return not self._ended

    def end(self, refusal: RefusedError | None = None) -> None:
        """No more messages; those that wait are written, and the refusal after them."""
        if not self._ended:
            self._ended, self.refusal = True, refusal
            self._changed.set()

    async def next(self) -> Any | None:
        """The message to write next; None at the end."""
        while not self._waiting:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._waiting.popleft()
        self._changed.set()
        return message


class Refusals:
    """What was refused, counted and logged; a flood of refusals makes no flood of lines.

    Args:
        per_s: lines a second at most, in the mean; ten times as many at once.
    """

    def __init__(self, per_s: float = 5.0) -> None:
        self.counts: Counter[str] = Counter()
        self._per_s = per_s
        self._tokens = self._most = 10 * per_s
        self._since = time.monotonic()
        self._dropped = 0

    def add(self, who: str, reason: str, code: str) -> None:
        """Something was refused.

        Args:
            who: device and address, as far as they are known.
            reason: one sentence.
            code: of the refusal.
        """
        self.counts[code] += 1
        now = time.monotonic()
        self._tokens = min(self._most, self._tokens + (now - self._since) * self._per_s)
        self._since = now
        if self._tokens < 1:
            self._dropped += 1
            return
        self._tokens -= 1
        more = f" ({self._dropped} refusals before it were not logged)" if self._dropped else ""
        self._dropped = 0
        LOGGER.warning("refused %s: %s%s", printable(who), printable(reason), more)


def printable(text: str) -> str:
    """Without what could forge lines of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:500])
