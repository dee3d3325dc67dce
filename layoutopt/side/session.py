"""A device's training over one connection, and after it: what was sent and is not trained on yet.

A session takes messages in, in the order of the training's steps, and has the workers accept each step (durable) and
apply it; then it acknowledges. When its connection is lost, activations that were not accepted are dropped, since the
device sends them again; orders of cached batches go on until one needs the device. The device's next connection begins
a new session once this one has stopped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from layoutopt.side.link import Link
from layoutopt.side.task import Batch, Task
from layoutopt.side.wire import Order, RefusedError, messages, read_orders, read_rows
from layoutopt.side.workers import MissingSamples, Workers

__all__ = ["Session", "Window"]

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
"""Of the side network, a message."""


@dataclass(frozen=True)
class Window:
    """What may be under way without an acknowledgement.

    Attributes:
        steps: messages of activations.
        bytes: of these.
        orders: steps that are to be trained on from the store.
    """

    steps: int
    bytes: int
    orders: int


@dataclass(frozen=True)
class _Sent:
    """A step whose activations have come."""

    batch: Batch
    size_bytes: int


@dataclass(frozen=True)
class _Fetch:
    """The device asks for the side network as it is after the steps that it sent before."""

    steps: int


class Session:
    """A training.

    Args:
        name: of the device.
        task: what is trained.
        next_step: of the training.
        window: what may be under way.
        link: to the device.
        workers: who trains.
        executor: for calls to workers, which block.
        failed: told when the training cannot go on.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        next_step: int,
        window: Window,
        link: Link,
        workers: Workers,
        executor: Executor,
        failed: Callable[[Session, Exception], None],
    ) -> None:
        self.name, self.task, self.window = name, task, window
        self.next_step = next_step
        self.link: Link | None = link
        self._workers, self._executor, self._failed = workers, executor, failed
        self._todo: deque[_Sent | Order | _Fetch] = deque()
        self._changed = asyncio.Event()
        self._stopping = self._heard_all = self._working = self._has_failed = False
        self._need: tuple[int, tuple[int, ...]] | None = None
        self._supplied: Batch | None = None
        self._steps = self._bytes = self._orders = 0
        self._room = asyncio.Semaphore(window.steps)
        self._applying: asyncio.Queue[tuple[int, int, Future[float]] | None] = asyncio.Queue()
        self._accepting = asyncio.create_task(self._accept_all())
        self._acknowledging = asyncio.create_task(self._acknowledge_all())

    @property
    def is_idle(self) -> bool:
        """Whether nobody is connected and nothing is left to do."""
        return self.link is None and (
            self._stopping or not (self._todo or self._working or self._steps or self._orders)
        )

    def detach(self) -> None:
        """The device is gone."""
        self.link = None
        self._steps -= sum(isinstance(work, _Sent) for work in self._todo)
        # Orders go on; what comes after a step that has to be sent again has to be ordered again.
        kept = deque[_Sent | Order | _Fetch]()
        while self._todo and isinstance(self._todo[0], Order):
            kept.append(self._todo.popleft())
        self._todo = kept
        self._changed.set()

    async def finish(self) -> None:
        """The device says no more: wait until what it said is done, as far as that needs no more from it."""
        self._heard_all = True
        self._changed.set()
        await self._until(lambda: not (self._todo or self._working or self._steps or self._orders))

    async def stop(self) -> None:
        """End it, once what was begun is accepted; what was accepted is applied whatever happens."""
        self._stopping = True
        self._changed.set()
        await self._accepting
        self._acknowledging.cancel()

    # ---- what comes in --------------------------------------------------------------------------------------------

    def receive(self, kind: str, message: Any, size_bytes: int) -> None:
        """Take a message.

        Raises:
            RefusedError: it is wrong, or not to be sent now.
        """
        if kind == "step":
            self._receive_step(message, size_bytes)
        elif kind == "cached":
            self._receive_orders(message)
        elif kind == "supply":
            self._receive_supply(message)
        elif kind == "fetch":
            if any(isinstance(work, _Fetch) for work in self._todo):
                raise RefusedError("the side network is asked for twice at once")
            self._todo.append(_Fetch(self.next_step))
        else:
            raise RefusedError(f"a message {kind!r} where steps are expected")
        self._changed.set()

    def _expect(self, step: int) -> None:
        if step < self.next_step:
            raise RefusedError(f"step {step} comes again: the training goes on at step {self.next_step}")
        if step > self.next_step:
            raise RefusedError(f"step {step} comes too early: the training goes on at step {self.next_step}")

    def _receive_step(self, message: Any, size_bytes: int) -> None:
        self._expect(message.step)
        if self._steps >= self.window.steps or self._bytes + size_bytes > self.window.bytes:
            raise RefusedError(
                f"step {message.step} exceeds the window: {self._steps} steps and {self._bytes} bytes are under way, "
                f"{self.window.steps} and {self.window.bytes} may be"
            )
        batch = read_rows(self.task, message.step, message.rows)
        self._todo.append(_Sent(batch, size_bytes))
        self._steps += 1
        self._bytes += size_bytes
        self.next_step += 1

    def _receive_orders(self, message: Any) -> None:
        self._expect(message.first_step)
        orders = read_orders(self.task, message, self.window.orders - self._orders)
        self._todo.extend(orders)
        self._orders += len(orders)
        self.next_step += len(orders)

    def _receive_supply(self, message: Any) -> None:
        if self._need is None or self._need[0] != message.step or self._supplied is not None:
            raise RefusedError(f"samples of step {message.step} come, which nobody asked for")
        batch = read_rows(self.task, message.step, message.rows)
        if batch.samples != self._need[1]:
            raise RefusedError(f"step {message.step}: other samples come than were asked for")
        self._supplied = batch

    # ---- what is done with it -------------------------------------------------------------------------------------

    async def _accept_all(self) -> None:
        try:
            while await self._until(lambda: bool(self._todo)):
                work = self._todo.popleft()
                self._working = True
                if isinstance(work, _Fetch):
                    await self._send_weights(work.steps)
                elif not await self._accept(work):
                    break
                self._working = False
                self._changed.set()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this training's session and no other
            self._fail(error)
        finally:
            self._todo.clear()
            self._stopping = True
            self._changed.set()
            self._applying.put_nowait(None)

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for it; False where the session is to stop first."""
        while not self._stopping and not condition():
            self._changed.clear()
            await self._changed.wait()
        return not self._stopping

    async def _accept(self, work: _Sent | Order) -> bool:
        """Have a step written to disk; False where it cannot be had."""
        await self._room.acquire()
        batch = work.batch
        size_bytes = work.size_bytes if isinstance(work, _Sent) else 0
        sent: Batch | None = None
        while True:
            try:
                future = await self._call(self._accepted, batch, sent)
                break
            except MissingSamples as missing:
                # Asked for twice, others have gone from the store meanwhile: then the whole batch is.
                sent = await self._ask(batch.step, missing.samples if sent is None else batch.samples)
                if sent is None:
                    return False
        self._applying.put_nowait((batch.step, size_bytes, future))
        return True

    def _accepted(self, batch: Batch, sent: Batch | None) -> Future[float]:
        self._workers.accept(self.name, batch, sent)
        return self._workers.submit(self.name, batch.step)

    async def _ask(self, step: int, samples: tuple[int, ...]) -> Batch | None:
        """Activations of samples of a step from the device; None where it is gone."""
        if self.link is None or self._heard_all:
            return None
        self._need, self._supplied = (step, samples), None
        self.link.put(need=messages().Need(step=step, samples=samples))
        try:
            await self._until(lambda: self._supplied is not None or self.link is None or self._heard_all)
            return None if self._stopping else self._supplied
        finally:
            self._need = self._supplied = None

    async def _acknowledge_all(self) -> None:
        while (entry := await self._applying.get()) is not None:
            step, size_bytes, future = entry
            try:
                # Shielded: that nobody listens any more is no reason for the workers not to go on.
                loss = await asyncio.shield(asyncio.wrap_future(future))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)
                continue
            finally:
                self._room.release()
            if size_bytes:
                self._steps -= 1
                self._bytes -= size_bytes
            else:
                self._orders -= 1
            self._changed.set()
            if self.link is not None:
                self.link.put(ack=messages().Ack(step=step, loss=loss, credit_bytes=size_bytes))

    async def _send_weights(self, steps: int) -> None:
        link = self.link
        # Steps that an earlier connection sent count as well.
        if (await self._call(self._workers.status, self.name)).applied < steps:
            await asyncio.wrap_future(await self._call(self._workers.submit, self.name, steps - 1))
        if link is None:
            return
        data = await self._call(self._workers.weights, self.name)
        applied = (await self._call(self._workers.status, self.name)).applied
        for offset in range(0, max(len(data), 1), CHUNK_BYTES):
            if not await link.room():
                return
            part = data[offset : offset + CHUNK_BYTES]
            link.put(weights=messages().Weights(step=applied, offset=offset, total=len(data), data=part))

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = self._stopping = True
            self._changed.set()
            self._failed(self, error)
