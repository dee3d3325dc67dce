"""The device's end of the wire: what is computed when, what is sent, and how a training survives every disconnection.

The order of samples is a function of seed, epoch and a secret, and the server says at which step it goes on: a device
that was restarted knows what is next without having kept anything but that secret. In the first epoch activations are
computed and sent, while the server trains on those before them; later epochs are orders to train on what the server has
stored, and the device computes what the server asks for. The backbone is frozen: activations that are computed early,
or again, are the same.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.address import check_reach
from layoutopt.side.keys import DeviceKeys, check_name
from layoutopt.side.needs import need
from layoutopt.side.sampling import Activations, Arrays, Sampling
from layoutopt.side.task import Batch, Task
from layoutopt.side.wire import RefusedError

__all__ = ["Remote", "Report", "Settings", "train"]


_LAST_WORD_S = 2.0
"""For the server's last words, after something could not be sent any more."""


@dataclass(frozen=True)
class Remote:
    """The server, and who we are to it.

    Attributes:
        address: HOST:PORT.
        device: our name; the certificate's where there are keys.
        keys: of this device; None: plaintext, which stays on this machine unless ``insecure``.
        insecure: whether plaintext may leave this machine.
        tls: False leaves out TLS and sends the token in plaintext.
    """

    address: str
    device: str
    keys: DeviceKeys | None = None
    insecure: bool = False
    tls: bool = True

    def __post_init__(self) -> None:
        check_name(self.device)
        if self.keys is not None and self.keys.name != self.device:
            raise LayoutOptError(f"these keys are of device {self.keys.name}, not of {self.device}: leave the name out")
        encrypted = self.keys is not None and self.tls
        check_reach(self.address, encrypted=encrypted, insecure=self.insecure, keys="DIR/devices/NAME")


@dataclass(frozen=True)
class Settings:
    """How a device behaves.

    Attributes:
        window: steps under way at most; with 1 the device waits for the server after every batch.
        stall_s: without a word from a server that owes one, after which the connection is given up.
        keepalive_s: between two questions whether a silent server is still there.
        retry_s: before the first new attempt; then twice as long each time, shortened at random.
        retry_most_s: that this grows to.
        give_up_s: without progress, after which the training is given up; it can be taken up again.
        cache: whether later epochs are trained on from the server's store.
    """

    window: int = 4
    stall_s: float = 300.0
    keepalive_s: float = 20.0
    retry_s: float = 0.2
    retry_most_s: float = 15.0
    give_up_s: float = 600.0
    cache: bool = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise LayoutOptError(f"a window has at least 1 step, got {self.window}")


@dataclass
class Report:
    """What a training took on the device's side, in this process.

    Attributes:
        steps: of the whole training.
        first_step: where this process went on.
        losses: by step, those that were acknowledged to this process.
        computed: samples that the backbone ran on.
        supplied: of these, samples that the server asked for again.
        sent_bytes: of messages, all connections together.
        received_bytes: likewise.
        compute_s: seconds in the backbone.
        wall_s: seconds from the first attempt to connect to the last acknowledgement.
        connections: how many it took.
        weights: the side network, as safetensors.
    """

    steps: int
    first_step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    computed: int = 0
    supplied: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    compute_s: float = 0.0
    wall_s: float = 0.0
    connections: int = 0
    weights: bytes = field(default=b"", repr=False)

    @property
    def utilisation(self) -> float:
        """Share of the time in which the backbone ran."""
        return self.compute_s / self.wall_s if self.wall_s else 0.0


def train(
    task: Task,
    source: Activations,
    remote: Remote,
    settings: Settings | None = None,
    *,
    secret: bytes,
    head: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    announce: Callable[[str], None] = lambda sentence: None,
) -> Report:
    """Train a side network: from wherever the server is to the task's last step.

    Args:
        task: what to train.
        source: of activations.
        remote: the server.
        settings: how.
        secret: of the order and numbers of samples; the same for the whole training.
        head: initial weights of the network's head.
        progress: told how many steps are done.
        announce: told in one sentence when a connection is lost.

    Raises:
        LayoutOptError: the server refuses for good, or nothing got on for ``settings.give_up_s``.
    """
    return asyncio.run(_Device(task, source, remote, settings or Settings(), secret, head, progress, announce).train())


class _Lost(Exception):
    """The connection is lost, or the server asks to come later."""


class _Device:
    def __init__(
        self,
        task: Task,
        source: Activations,
        remote: Remote,
        settings: Settings,
        secret: bytes,
        head: Mapping[str, np.ndarray] | None,
        progress: Callable[[int, int], None],
        announce: Callable[[str], None],
    ) -> None:
        self.task, self.source, self.remote, self.settings = task, source, remote, settings
        self.head = dict(head or {})
        self.progress, self.announce = progress, announce
        self.order = Sampling(source.samples, task.batch, task.seed, secret)
        self.report = Report(task.steps)
        self.compute = ThreadPoolExecutor(1, "side-backbone")
        self.done = -1

    async def train(self) -> Report:
        began = time.perf_counter()
        moved, attempt = time.monotonic(), 0
        try:
            while True:
                before = self.done
                try:
                    await self._connection()
                    break
                except _Lost as lost:
                    if self.done > before:
                        moved, attempt = time.monotonic(), 0
                    if time.monotonic() - moved > self.settings.give_up_s:
                        raise LayoutOptError(
                            f"nothing got on for {self.settings.give_up_s:g} s ({lost}): the same command goes on at "
                            f"step {max(self.done, 0)} of {self.task.steps}"
                        ) from lost
                    wait = min(self.settings.retry_s * 2**attempt, self.settings.retry_most_s) * random.uniform(0.5, 1)
                    self.announce(f"{lost}; trying again in {wait:.1f} s")
                    attempt += 1
                    await asyncio.sleep(wait)
        finally:
            self.compute.shutdown(wait=False, cancel_futures=True)
        self.report.wall_s = time.perf_counter() - began
        return self.report

    async def _connection(self) -> None:
        grpc, aio = need("grpc", "side-tuning"), need("grpc.aio", "side-tuning")
        self.report.connections += 1
        async with self._channel(grpc, aio) as channel:
            metadata = [(wire.DEVICE, self.remote.device)]
            if self.remote.keys is not None:
                metadata.append((wire.TOKEN, self.remote.keys.token))
            call = channel.stream_stream(wire.METHOD)(metadata=metadata)
            try:
                await _Connection(self, call).run()
            except grpc.RpcError as error:
                raise _Lost(_sentence(error)) from error
            except TimeoutError:
                raise _Lost(
                    f"the server at {self.remote.address} says nothing for {self.settings.stall_s:g} s"
                ) from None
            finally:
                call.cancel()

    def _channel(self, grpc: Any, aio: Any) -> Any:
        ms = int(self.settings.keepalive_s * 1000)
        options = [
            ("grpc.max_receive_message_length", 1 << 23),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", ms),
            ("grpc.keepalive_timeout_ms", ms),
            ("grpc.http2.ping_timeout_ms", ms),  # of the question itself: 60 s where this is not said
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        keys, address = self.remote.keys, self.remote.address
        none = grpc.Compression.NoCompression
        if keys is None or not self.remote.tls:
            return aio.insecure_channel(address, options, none)
        credentials = grpc.ssl_channel_credentials(keys.authority, keys.key, keys.certificate)
        return aio.secure_channel(address, credentials, options, none)

    async def run(self, indices: np.ndarray) -> Arrays:
        """The backbone, in its own thread."""

        def timed() -> Arrays:
            began = time.perf_counter()
            found = self.source.run(indices)
            self.report.compute_s += time.perf_counter() - began
            return found

        found = await asyncio.get_running_loop().run_in_executor(self.compute, timed)
        self.report.computed += len(indices)
        return found

    def opened(self, step: int) -> None:
        if self.done < 0:
            self.report.first_step = step
        self.step_done(step)

    def step_done(self, step: int) -> None:
        if step > self.done:
            self.done = step
            self.progress(step, self.task.steps)


class _Connection:
    """One call, from Open to the side network or until it breaks."""

    def __init__(self, device: _Device, call: Any) -> None:
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
        pb = wire.messages()
        device = self.device
        opening = pb.Open(version=wire.VERSION, task=wire.encode_task(self.task), head=wire.encode_tensors(device.head))
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
            raise _Lost("the connection failed while something was sent") from error

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
            raise _Lost("the side network came in a wrong order")
        self.parts.append(part.data)
        if part.offset + len(part.data) >= part.total:
            self.device.report.weights = b"".join(self.parts)
            self.fetched = True

    async def _receive(self) -> tuple[str, Any]:
        import grpc

        data = await self.call.read()
        if data is grpc.aio.EOF:
            code, details = await self.call.code(), await self.call.details()
            raise _Lost(f"the server ended the call ({code.name.lower()}: {details or 'no reason given'})")
        self.heard = time.monotonic()
        self.device.report.received_bytes += len(data)
        kind, message = wire.decode(data, "FromServer", 1 << 23)
        if kind == "refused":
            raise self._refused(message)
        return kind, message

    def _refused(self, message: Any) -> Exception:
        if message.code == wire.messages().Refused.LATER:
            return _Lost(f"the server says: {message.reason}")
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


def _sentence(error: Any) -> str:
    """What gRPC says of a call that failed, short."""
    details = " ".join(str(error.details() or "").split())[:200]
    return f"the connection failed ({error.code().name.lower()}: {details})"
