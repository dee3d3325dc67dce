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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.address import check_reach
from layoutopt.side.call import Call, LostError
from layoutopt.side.keys import DeviceKeys, check_name
from layoutopt.side.needs import need
from layoutopt.side.sampling import Activations, Arrays, Sampling
from layoutopt.side.task import Task

__all__ = ["Remote", "Report", "Settings", "train"]


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
        anew: whether the server is to forget the training that it has of this device.
    """

    window: int = 4
    stall_s: float = 300.0
    keepalive_s: float = 20.0
    retry_s: float = 0.2
    retry_most_s: float = 15.0
    give_up_s: float = 600.0
    cache: bool = True
    anew: bool = False

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
    device = Device(task, source, remote, settings or Settings(), secret, head, progress, announce)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(device.train())
    with ThreadPoolExecutor(1) as apart:  # a notebook runs in an event loop of its own, which cannot run another
        return apart.submit(lambda: asyncio.run(device.train())).result()


class Device:
    """A device in training: what it has done, over all its calls."""

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
        self.anew = settings.anew

    async def train(self) -> Report:
        began = time.perf_counter()
        moved, attempt = time.monotonic(), 0
        try:
            while True:
                before = self.done
                try:
                    await self._connection()
                    break
                except LostError as lost:
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
                await Call(self, call).run()
            except grpc.RpcError as error:
                raise LostError(_sentence(error)) from error
            except TimeoutError:
                raise LostError(
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
        self.anew = False  # a new connection goes on
        self.step_done(step)

    def step_done(self, step: int) -> None:
        if step > self.done:
            self.done = step
            self.progress(step, self.task.steps)


def _sentence(error: Any) -> str:
    """What gRPC says of a call that failed, short."""
    details = " ".join(str(error.details() or "").split())[:200]
    return f"the connection failed ({error.code().name.lower()}: {details})"
