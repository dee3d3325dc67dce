"""One call of a device: from Open to the side network, or until the connection is lost."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.task import Batch
from layoutopt.side.wire import RefusedError

if TYPE_CHECKING:
    from layoutopt.side.client import Device

__all__ = ["Call", "LostError"]

_LAST_WORD_S = 2.0
"""For the server's last words, after something could not be sent any more."""


class LostError(Exception):
    """The connection is lost, or the server asks to come later."""


class Call:
    """One call.

    Args:
        device: whose; it knows what was done over earlier calls.
        call: of gRPC.
    """

    def __init__(self, device: Device, call: Any) -> None:
        self.device, self.call = device, call
        self.task, self.order = device.task, device.order
        self.opened: Any = None
        self.sent = deque[tuple[int, int]]()  # steps and their bytes, without an acknowledgement
        self.needs: deque[Any] = deque()
        self.parts: list[bytes] = []
        self.fetched = False
        self.fetching = self.answering = False
        self.changed = asyncio.Event()
        self.heard = time.monotonic()

    async def run(self) -> None:
        """Train from where the server is to the end, and fetch the side network.

        Raises:
            LostError: it has to be done again.
            LayoutOptError: it is no use.
        """
        pb = wire.messages()
        device = self.device
        head = wire.encode_tensors(device.head)
        opening = pb.Open(version=wire.VERSION, task=wire.encode_task(self.task), head=head, anew=device.anew)
        async with asyncio.timeout(device.settings.stall_s):
            first = asyncio.create_task(self._receive())
            await self._or_why(self._send(_encode(open=opening)), first)
            kind, self.opened = await first
        if kind != "opened":
            raise LayoutOptError(f"the server at {device.remote.address} begins with {kind!r}: it is no such server")
        device.opened(self.opened.next_step)
        listening: asyncio.Task[Any] = asyncio.create_task(self._listen())
        others = {
            asyncio.create_task(self._or_why(self._produce(self.opened.next_step), listening)),
            asyncio.create_task(self._watch()),
        }
        try:
            while not listening.done():
                done, _ = await asyncio.wait({listening, *others}, return_when=asyncio.FIRST_COMPLETED)
                others -= done
                for task in done:
                    task.result()
        finally:
            await _cancelled({listening, *others})

    async def _or_why(self, sending: Coroutine[Any, Any, None], listening: asyncio.Task[Any]) -> None:
        """Send; where that fails, what the server said last tells more than how."""
        import grpc

        try:
            await sending
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            await asyncio.wait({listening}, timeout=_LAST_WORD_S)
            if listening.done():
                listening.result()
            raise LostError("the connection failed while something was sent") from error

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _produce(self, step: int) -> None:
        while step < self.task.steps:
            if self.device.settings.cache and self.order.epoch(step) > 0:
                step = await self._order_steps(step)
            else:
                await self._send_step(step)
                step += 1
        while self.sent:
            await self._answer_or_wait()
        self.fetching = True
        await self._send(_encode(fetch=wire.messages().Fetch()))

    async def _send_step(self, step: int) -> None:
        """Compute and send a step, when the window has a place for it."""
        places = min(self.device.settings.window, self.opened.window_steps)
        while len(self.sent) >= places:
            await self._answer_or_wait()
        arrays = await self.device.run(self.order.indices(step))
        batch = Batch(step, self.order.numbers(step), arrays.taps, arrays.mask, arrays.targets)
        data = _encode(step=wire.messages().Step(step=step, rows=wire.encode_rows(batch)))
        size = len(data)
        if size > self.opened.window_bytes:
            raise LayoutOptError(
                f"a step has {size} bytes, the server takes {self.opened.window_bytes}: send fewer samples"
            )
        while sum(bytes for _, bytes in self.sent) + size > self.opened.window_bytes:
            await self._answer_or_wait()
        self.sent.append((step, size))
        await self._send(data)

    async def _order_steps(self, step: int) -> int:
        """Order steps that the server has; returns the step after them."""
        room = self.opened.window_orders - len(self.sent)
        while room < min(self.opened.window_orders // 2, self.task.steps - step) or room < 1:
            await self._answer_or_wait()
            room = self.opened.window_orders - len(self.sent)
        pb = wire.messages()
        most = max(wire.SMALL_BYTES // (8 * self.task.batch + 64), 1)
        count = min(room, most, self.task.steps - step)
        orders = [pb.Order(samples=self.order.numbers(s)) for s in range(step, step + count)]
        self.sent.extend((s, 0) for s in range(step, step + count))
        await self._send(_encode(cached=pb.TrainFromCache(first_step=step, orders=orders)))
        return step + count

    async def _answer_or_wait(self) -> None:
        """Compute what the server asks for, or wait until something has changed."""
        if not self.needs:
            self.changed.clear()
            await self.changed.wait()
            return
        self.answering = True
        wanted = self.needs.popleft()
        numbers = tuple(wanted.samples)
        arrays = await self.device.run(self.order.of_numbers(numbers))
        batch = Batch(wanted.step, numbers, arrays.taps, arrays.mask, arrays.targets)
        self.device.report.supplied += len(numbers)
        self.answering = False
        await self._send(_encode(supply=wire.messages().Supply(step=wanted.step, rows=wire.encode_rows(batch))))

    async def _send(self, data: bytes) -> None:
        await self.call.write(data)
        self.device.report.sent_bytes += len(data)

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while not self.fetched:
            kind, message = await self._receive()
            if kind == "ack":
                self._acknowledged(message)
            elif kind == "need":
                self.needs.append(message)
            elif kind == "weights":
                self._take_part(message)
            else:
                raise LayoutOptError(f"the server sends {kind!r} where acknowledgements are expected")
            self.changed.set()

    def _acknowledged(self, ack: Any) -> None:
        if not self.sent or self.sent[0][0] != ack.step:
            raise LayoutOptError(f"the server acknowledges step {ack.step}, which was not sent before all others")
        self.sent.popleft()
        self.device.report.losses[ack.step] = ack.loss
        self.device.step_done(ack.step + 1)

    def _take_part(self, part: Any) -> None:
        if part.offset != sum(map(len, self.parts)):
            raise LostError("the side network came in a wrong order")
        self.parts.append(part.data)
        if part.offset + len(part.data) >= part.total:
            self.device.report.weights = b"".join(self.parts)
            self.fetched = True

    async def _receive(self) -> tuple[str, Any]:
        import grpc

        data = await self.call.read()
        if data is grpc.aio.EOF:
            code, details = await self.call.code(), await self.call.details()
            raise LostError(f"the server ended the call ({code.name.lower()}: {details or 'no reason given'})")
        self.heard = time.monotonic()
        self.device.report.received_bytes += len(data)
        kind, message = wire.decode(data, "FromServer", 1 << 23)
        if kind == "refused":
            raise self._refused(message)
        return kind, message

    def _refused(self, message: Any) -> Exception:
        if message.code == wire.messages().Refused.LATER:
            return LostError(f"the server says: {message.reason}")
        return RefusedError(f"the server refuses: {message.reason}")

    async def _watch(self) -> None:
        """End the call where the server owes us a word and says none."""
        stall_s = self.device.settings.stall_s
        owed_since = time.monotonic()
        while True:
            await asyncio.sleep(min(stall_s / 4, 1.0))
            now = time.monotonic()
            if self.needs or self.answering or not (self.sent or self.fetching):
                owed_since = now
            if now - max(owed_since, self.heard) > stall_s:
                raise TimeoutError


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _encode(**kind: Any) -> bytes:
    return wire.messages().FromDevice(**kind).SerializeToString()
