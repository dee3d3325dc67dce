"""What tests of side-tuning share: a small task, a backbone in numpy, a server in a thread, processes to be killed."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layoutopt.quantize import quantise
from layoutopt.side import wire
from layoutopt.side.client import Remote, Report, Settings, train
from layoutopt.side.keys import DeviceKeys, ServerKeys
from layoutopt.side.sampling import Arrays, Sampling
from layoutopt.side.service import Limits, Service
from layoutopt.side.task import Batch, Task
from layoutopt.side.weights import unpack
from layoutopt.side.workers import Workers

__all__ = [
    "QUICK",
    "SECRET",
    "SMALL",
    "Caller",
    "FakeBackbone",
    "Server",
    "alone",
    "device",
    "same_weights",
    "server",
    "small_task",
    "waited",
]

SECRET = b"a secret of the tests"

SMALL = Task(
    model="fake",
    graph="0123456789abcdef",
    width=32,
    taps=("one", "two", "three"),
    format="int8:8",
    tokens="pivot",
    seq=8,
    batch=4,
    classes=3,
    mode="labels",
    rank=4,
    lr=1e-2,
    steps=24,
    seed=5,
)


def small_task(**changes: Any) -> Task:
    """``SMALL`` with some fields changed."""
    return replace(SMALL, **changes)


@dataclass
class FakeBackbone:
    """Random activations, a function of the sample; its tokens never leave it.

    Attributes:
        task: whose batches it makes.
        samples: how many there are.
        seed: of them.
        wait_s: of a run.
        ran: indices of every run.
    """

    task: Task
    samples: int = 32
    seed: int = 0
    wait_s: float = 0.0
    ran: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, samples: np.ndarray) -> Arrays:
        self.ran.append(tuple(int(s) for s in samples))
        time.sleep(self.wait_s)
        made = [self._sample(int(s)) for s in samples]
        rows = [np.concatenate([one[0][i] for one in made]) for i in range(len(self.task.taps))]
        taps = tuple(quantise(x, self.task.fmt) for x in rows)
        mask = np.stack([one[1] for one in made]) if self.task.tokens == "all" else None
        return Arrays(taps, mask, np.stack([one[2] for one in made]))

    def _sample(self, index: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        task = self.task
        rng = np.random.default_rng([self.seed, index])
        taps = [rng.standard_normal((task.rows_per_sample, task.width), np.float32) for _ in task.taps]
        mask = (np.arange(task.seq) <= rng.integers(task.seq)).astype(np.uint8)
        label = np.int32(rng.integers(task.classes))
        if task.mode == "labels":
            return taps, mask, label
        return taps, mask, (np.eye(task.classes, dtype=np.float32)[label] - np.float32(1 / task.classes))

    def batch(self, step: int, samples: tuple[int, ...]) -> Batch:
        """A step of these samples, numbered by their indices."""
        arrays = self.run(np.array(samples))
        return Batch(step, samples, arrays.taps, arrays.mask, arrays.targets)


class Server:
    """A service in a thread with its own event loop.

    Args:
        workers: who trains; closed with the server.
        keys: see :class:`Service`.
        limits: of devices.
        tls: see :class:`Service`.
        address: to listen on.
    """

    def __init__(
        self,
        workers: Workers,
        keys: ServerKeys | None = None,
        limits: Limits | None = None,
        *,
        tls: bool = True,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.service = Service(workers, keys, limits, tls=tls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self.do(self.service.start(address))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def do(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self, grace_s: float = 0.2) -> None:
        self.do(self.service.stop(grace_s))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def server(directory: Path, devices: Limits | None = None, **options: Any) -> Iterator[Server]:
    """A server with workers in this process's threads.

    Args:
        directory: of the trainings.
        devices: what they may take.
        options: of the workers.
    """
    workers = Workers(directory, engine="here", **options)
    with Server(workers, None, devices) as running:
        yield running


QUICK = Settings(stall_s=20.0, keepalive_s=2.0, retry_s=0.05, retry_most_s=0.5, give_up_s=30.0)


def device(
    address: str,
    task: Task = SMALL,
    backbone: FakeBackbone | None = None,
    *,
    name: str = "phone",
    settings: Settings = QUICK,
    keys: DeviceKeys | None = None,
    **options: Any,
) -> Report:
    """Train as a device does."""
    source = backbone or FakeBackbone(task)
    return train(task, source, Remote(address, name, keys), settings, secret=SECRET, **options)


def alone(directory: Path, task: Task = SMALL, backbone: FakeBackbone | None = None) -> bytes:
    """The side network of the same training without a wire."""
    from layoutopt.side.trainer import Trainer

    source = backbone or FakeBackbone(task)
    sampling = Sampling(source.samples, task.batch, task.seed, SECRET)
    trainer = Trainer.open(directory, task)
    for step in range(task.steps):
        arrays = source.run(sampling.indices(step))
        trainer.accept(Batch(step, sampling.numbers(step), arrays.taps, arrays.mask, arrays.targets))
        trainer.apply()
    weights = trainer.export()
    trainer.close()
    return weights


def same_weights(a: bytes, b: bytes) -> None:
    """Two side networks are equal, bit by bit."""
    first, second = unpack(a), unpack(b)
    assert first.task == second.task
    assert first.steps == second.steps
    assert first.values.keys() == second.values.keys()
    for name, value in first.values.items():
        assert value.tobytes() == second.values[name].tobytes(), name


def waited(condition: Callable[[], bool], most_s: float = 20.0) -> bool:
    """Whether something comes true in time."""
    until = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class Caller:
    """A device that says what a test wants it to say, message by message.

    Args:
        address: of the server.
        name: in the call's metadata.
        token: likewise, if any.
        credentials: of gRPC; None: plaintext.
        options: of the channel.
        compression: of messages.
    """

    def __init__(
        self,
        address: str,
        name: str = "phone",
        token: str = "",
        credentials: Any = None,
        options: tuple[tuple[str, Any], ...] = (),
        compression: Any = None,
    ) -> None:
        import grpc

        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = [(wire.DEVICE, name), *([(wire.TOKEN, token)] if token else [])]
        call = self._channel.stream_stream(wire.METHOD)
        self.call = call(iter(self._out.get, None), metadata=metadata, timeout=30, compression=compression)

    def send(self, data: bytes = b"", **kind: Any) -> None:
        """A message, or any bytes."""
        self._out.put(wire.messages().FromDevice(**kind).SerializeToString() if kind else data)

    def end(self) -> None:
        """There are no more messages."""
        self._out.put(None)

    def open(self, task: Task = SMALL, version: int = wire.VERSION) -> Any:
        """Open the training; returns what the server says."""
        self.send(open=wire.messages().Open(version=version, task=wire.encode_task(task)))
        return self.receive()

    def step(self, batch: Batch) -> None:
        self.send(step=wire.messages().Step(step=batch.step, rows=wire.encode_rows(batch)))

    def order(self, first: int, *samples: tuple[int, ...]) -> None:
        pb = wire.messages()
        self.send(cached=pb.TrainFromCache(first_step=first, orders=[pb.Order(samples=s) for s in samples]))

    def receive(self) -> Any:
        """The next message's content."""
        return wire.decode(next(self.call), "FromServer", 1 << 23)[1]

    def refused(self) -> Any:
        """The Refused that ends the call, after whatever comes before it."""
        import grpc

        found = []
        while not found or type(found[-1]).__name__ != "Refused":
            found.append(self.receive())
        with pytest.raises(grpc.RpcError) as ended:
            self.receive()
        assert ended.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
        return found[-1]

    def close(self) -> None:
        self.call.cancel()
        self._out.put(None)
        self._channel.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
