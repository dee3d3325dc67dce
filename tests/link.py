"""A TCP proxy that is a bad network: slow, far, stalled, cut, or dead without anyone being told.

It runs in a thread of its own. Benchmarks shape their link with it, tests break theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Link"]

CHUNK_BYTES = 1 << 14
BUFFER_BYTES = 1 << 16
"""In sockets and in the air, each way and connection: what is sent into a stalled link soon blocks its sender."""


class _Way:
    """One direction of the link, shared by all connections."""

    def __init__(self, rate_bit_per_s: float | None, latency_s: float) -> None:
        self.rate_bit_per_s, self.latency_s = rate_bit_per_s, latency_s
        self.free_at = 0.0
        self.bytes = 0

    def arrival(self, size_bytes: int, now: float) -> float:
        """When bytes that are put in now are out at the other end."""
        self.bytes += size_bytes
        seconds = size_bytes * 8 / self.rate_bit_per_s if self.rate_bit_per_s else 0.0
        self.free_at = max(self.free_at, now) + seconds
        return self.free_at + self.latency_s


class Link:
    """A proxy from a port of this machine to a server.

    Args:
        port: the server's, on this machine.
        rate_bit_per_s: each way, of all connections together; None: as fast as it goes.
        latency_s: one way.
        record: whether to keep all bytes, in ``up`` and ``down``.
    """

    def __init__(
        self, port: int, *, rate_bit_per_s: float | None = None, latency_s: float = 0.0, record: bool = False
    ) -> None:
        self.target = port
        self.up, self.down = bytearray(), bytearray()
        self._record = record
        self._ways = (_Way(rate_bit_per_s, latency_s), _Way(rate_bit_per_s, latency_s))
        self._passes = asyncio.Event()
        self._refusing = False
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def address(self) -> str:
        """Where to connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def up_bytes(self) -> int:
        """Bytes to the server, so far."""
        return self._ways[0].bytes

    @property
    def down_bytes(self) -> int:
        """Bytes from the server, so far."""
        return self._ways[1].bytes

    def stall(self) -> None:
        """Take and give nothing more; whoever sends is blocked soon."""
        self._do(self._passes.clear)

    def resume(self) -> None:
        """End a stall; connections that were left half-open stay so."""
        self._do(self._passes.set)

    def cut(self) -> None:
        """Reset every connection."""
        self._do(self._cut)

    def half_open(self) -> None:
        """What is under way and what comes on present connections is lost, and neither end is told."""
        self._do(self._kill)

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections."""
        self._do(lambda: setattr(self, "_refusing", refusing))

    def close(self) -> None:
        """End it."""
        self._do(lambda: [_reset(end) for end in self._ends])
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._passes.set()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES))
        started.set()
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _do(self, what: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target, limit=CHUNK_BYTES)
        except OSError:
            _reset(writer)
            return
        ends = (writer, far_writer)
        for end in ends:
            raw = end.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            end.transport.set_write_buffer_limits(BUFFER_BYTES)
        self._open.add(ends)
        self._ends.update(ends)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, self._ways[0], self.up, ends)),
            asyncio.create_task(self._pump(far_reader, writer, self._ways[1], self.down, ends)),
        ]
        with contextlib.suppress(asyncio.CancelledError):  # at the end; asyncio's own callback minds it
            await asyncio.wait(pumps)
        if ends in self._open:
            self._open.discard(ends)
            self._ends.difference_update(ends)
            for end in ends:
                end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: _Way,
        kept: bytearray,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        air: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(max(BUFFER_BYTES // CHUNK_BYTES, 1))
        landing = asyncio.create_task(self._land(air, writer, ends))
        with contextlib.suppress(OSError):
            while True:
                await self._passes.wait()
                data = await reader.read(CHUNK_BYTES)
                if self._record:
                    kept.extend(data)
                await air.put((way.arrival(len(data), time.monotonic()), data))
                if not data:
                    break
        if reader.at_eof():
            await landing
        landing.cancel()

    async def _land(
        self,
        air: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                at, data = await air.get()
                await asyncio.sleep(max(at - time.monotonic(), 0))
                await self._passes.wait()
                if ends not in self._open:  # dead: nothing arrives, not even the end
                    if not data:
                        return
                    continue
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

    def _cut(self) -> None:
        for ends in self._open:
            for end in ends:
                _reset(end)
        self._open.clear()

    def _kill(self) -> None:
        self._open.clear()


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
