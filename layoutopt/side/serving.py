"""``layoutopt side serve``: workers and a service, until a signal ends them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from layoutopt.side.address import check_reach
from layoutopt.side.keys import ServerKeys
from layoutopt.side.service import Limits, Service
from layoutopt.side.workers import Engine, Workers
from layoutopt.side.workers import Limits as WorkerLimits

__all__ = ["Setup", "serve"]


@dataclass(frozen=True)
class Setup:
    """A server as it is asked for.

    Attributes:
        state: folder of all trainings.
        address: to listen on.
        keys: folder with the server's keys; None: plaintext.
        insecure: whether plaintext may leave this machine.
        engine: of the workers.
        workers: how many.
        cuda: whether to train on a GPU.
        ray_address: of a cluster.
        limits: of devices.
        worker_limits: of trainings.
        grace_s: for devices to read their last messages when the server stops.
    """

    state: Path
    address: str
    keys: Path | None = None
    insecure: bool = False
    engine: Engine = "processes"
    workers: int = 2
    cuda: bool = False
    ray_address: str | None = None
    limits: Limits = field(default_factory=Limits)
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    grace_s: float = 5.0


def serve(setup: Setup, ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends the process at once, and loses nothing either.

    Args:
        setup: what to serve.
        ready: told the port.

    Raises:
        LayoutOptError: the address, the keys or the folder cannot be used.
    """
    keys = ServerKeys.load(setup.keys) if setup.keys is not None else None
    encrypted = keys is not None and not setup.insecure
    check_reach(setup.address, encrypted=encrypted, insecure=setup.insecure, keys="DIR/server")
    workers = Workers(
        setup.state,
        engine=setup.engine,
        count=setup.workers,
        limits=setup.worker_limits,
        cuda=setup.cuda,
        address=setup.ray_address,
    )
    asyncio.run(_serve(setup, workers, keys, ready))


async def _serve(setup: Setup, workers: Workers, keys: ServerKeys | None, ready: Callable[[int], None]) -> None:
    service = Service(workers, keys, setup.limits, tls=keys is not None and not setup.insecure)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        logging.getLogger("layoutopt.side").info("%s: the server stops (again: at once)", number.name)
        stop.set()

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask, number)
        ready(await service.start(setup.address, insecure=setup.insecure))
        await stop.wait()
    finally:
        await service.stop(setup.grace_s)
