"""The server's end of the wire: one call per training, many at once, each harmed by nobody but its own device.

What this file sees to, in the order in which a call meets it: sizes of messages and numbers of calls (gRPC's own
limits, and tighter ones before anything is decoded), who calls (token and certificate), the protocol's version, the
task, and from then on each message by the training's :class:`~layoutopt.side.session.Session`. Everything refused ends
its call with a reason, is logged, and leaves the training as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.address import check_reach, split_address
from layoutopt.side.keys import ServerKeys, certificate_names, check_name
from layoutopt.side.link import Link, Refusals, printable
from layoutopt.side.needs import need
from layoutopt.side.session import Session, Window
from layoutopt.side.task import WINDOW_STEPS, Task
from layoutopt.side.wire import RefusedError
from layoutopt.side.workers import BusyError, Status, Workers

__all__ = ["Limits", "Service"]

LOGGER = logging.getLogger("layoutopt.side")

_METHOD_NAME = wire.METHOD.rpartition("/")[2]
_SERVICE_NAME = wire.METHOD.strip("/").partition("/")[0]
_THREADS = 16
"""In which workers are called; a call takes a write to the disk."""
_UNREAD = 64
"""Messages beside acknowledgements that a device may leave unread."""
_CALLS_PER_CONNECTION = 4
_METADATA_BYTES = 8192


@dataclass(frozen=True)
class Limits:
    """What devices may take and how long they may be silent.

    Attributes:
        devices: connected at once.
        window_steps: steps that a device may have under way.
        window_bytes: bytes of these.
        window_orders: steps to be trained on from the store that a device may have under way.
        held_bytes: bytes that all devices together may have under way; a device beyond that is asked to come later.
        open_s: from the start of a call to its first message.
        stall_s: for a device to take a message.
        keepalive_s: between two questions whether a silent device is still there, and for the answer.
        idle_s: after which a training of a device that is gone is released from memory.
    """

    devices: int = 256
    window_steps: int = 4
    window_bytes: int = 1 << 26
    window_orders: int = 1024
    held_bytes: int = 1 << 30
    open_s: float = 10.0
    stall_s: float = 60.0
    keepalive_s: float = 20.0
    idle_s: float = 300.0

    @property
    def message_bytes(self) -> int:
        """Bytes of any message at most."""
        return max(wire.OPEN_BYTES, self.window_bytes)


@dataclass(frozen=True)
class _Opening:
    """What a device's first message says."""

    task: Task
    head: dict[str, Any]
    anew: bool


@dataclass
class _Place:
    """What is known of a device while the server runs; ``in_memory``: whether workers may have its training open."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    link: Link | None = None
    held_bytes: int = 0
    in_memory: bool = False
    idle_since: float = 0.0


class Service:
    """A server of trainings.

    Args:
        workers: who trains.
        keys: TLS and tokens; None: neither (see ``start``).
        limits: of devices.
        tls: False leaves out TLS and certificates, and keeps tokens.
    """

    def __init__(
        self, workers: Workers, keys: ServerKeys | None = None, limits: Limits | None = None, *, tls: bool = True
    ) -> None:
        self.limits = limits or Limits()
        self.refusals = Refusals()
        self._workers, self._keys = workers, keys
        self._tls = tls and keys is not None
        self._executor = ThreadPoolExecutor(_THREADS, "side-worker-calls")
        self._places: dict[str, _Place] = {}
        self._server: Any = None
        self._cleaner: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def connected(self) -> list[str]:
        """Names of the devices that are connected."""
        return [name for name, place in self._places.items() if place.link is not None]

    async def start(self, address: str, *, insecure: bool = False) -> int:
        """Listen.

        Args:
            address: HOST:PORT; port 0 takes a free one.
            insecure: whether plaintext may leave this machine.

        Returns:
            The port.

        Raises:
            LayoutOptError: plaintext would leave this machine, or the address is bad or taken.
        """
        host, port = split_address(address)
        check_reach(address, encrypted=self._tls, insecure=insecure, keys="DIR/server")
        grpc = need("grpc", "side-tuning")
        aio = need("grpc.aio", "side-tuning")
        handler = grpc.stream_stream_rpc_method_handler(self._train)
        self._server = aio.server(
            options=self._options(),
            compression=grpc.Compression.NoCompression,
            maximum_concurrent_rpcs=2 * self.limits.devices,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE_NAME, {_METHOD_NAME: handler}),)
        )
        try:
            bound = self._bind(grpc, f"{host}:{port}" if ":" not in host else f"[{host}]:{port}")
        except RuntimeError as error:
            raise LayoutOptError(f"cannot listen on {address} ({error}): choose another address or port") from error
        await self._server.start()
        self._cleaner = asyncio.create_task(self._release_idle())
        return bound

    def _bind(self, grpc: Any, address: str) -> int:
        if not self._tls:
            return int(self._server.add_insecure_port(address))
        assert self._keys is not None
        credentials = grpc.ssl_server_credentials(
            [(self._keys.key, self._keys.certificate)], self._keys.authority, require_client_auth=True
        )
        return int(self._server.add_secure_port(address, credentials))

    def _options(self) -> list[tuple[str, int]]:
        ms = int(self.limits.keepalive_s * 1000)
        return [
            ("grpc.max_receive_message_length", self.limits.message_bytes),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
            ("grpc.server_handshake_timeout_ms", int(self.limits.open_s * 1000)),
            ("grpc.keepalive_time_ms", ms),
            ("grpc.keepalive_timeout_ms", ms),
            ("grpc.http2.ping_timeout_ms", ms),  # of the question itself: 60 s where this is not said
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),  # devices may ask more often than we do
            # A small compressed message may unfold into a large one: none are unfolded.
            ("grpc.per_message_decompression", 0),
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.so_reuseport", 0),
        ]

    async def stop(self, grace_s: float = 10.0) -> None:
        """Tell every device to come later, and release all trainings. What was acknowledged stays.

        Args:
            grace_s: for devices to read what is on its way to them.
        """
        self._stopping = True
        if self._cleaner is not None:
            self._cleaner.cancel()
        await asyncio.gather(*(self._stop(name, place) for name, place in list(self._places.items())))
        if self._server is not None:
            await self._server.stop(grace_s)
        await self._call(self._workers.close)
        self._executor.shutdown()

    async def _stop(self, name: str, place: _Place) -> None:
        async with place.lock:
            await self._end(name, place, "the server stops", "later")

    # ---- a call ---------------------------------------------------------------------------------------------------

    async def _train(self, _: Any, context: Any) -> None:
        grpc = need("grpc", "side-tuning")
        link = Link(self.limits.window_orders + self.limits.window_steps + _UNREAD)
        who = context.peer()
        reader = asyncio.create_task(self._read(context, link))
        try:
            await self._write(context, link)
        finally:
            link.end()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        refusal = link.refusal
        if refusal is None:
            return
        name = _text(context, wire.DEVICE)
        self.refusals.add(f"{name} at {who}", str(refusal), refusal.code)
        status = grpc.StatusCode.UNAVAILABLE if refusal.code == "later" else grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(status, printable(str(refusal)))

    async def _write(self, context: Any, link: Link) -> None:
        try:
            while (message := await link.next()) is not None:
                async with asyncio.timeout(self.limits.stall_s):
                    await context.write(message.SerializeToString())
            if link.refusal is not None:
                code = wire.messages().Refused.Code.Value(link.refusal.code.upper())
                refused = wire.messages().Refused(reason=str(link.refusal)[:1000], code=code)
                async with asyncio.timeout(self.limits.stall_s):
                    await context.write(wire.messages().FromServer(refused=refused).SerializeToString())
        except TimeoutError:
            name = _text(context, wire.DEVICE)
            self.refusals.add(f"{name} at {context.peer()}", f"it takes nothing for {self.limits.stall_s:g} s", "later")
            # Without a status, which would wait behind what is not taken.
            raise asyncio.CancelledError from None

    async def _read(self, context: Any, link: Link) -> None:
        """Take the call's messages; every way out ends the link, with a refusal or without."""
        name, place = "", None
        try:
            name = self._who(context)
            opening = await self._opening(context)
            task = opening.task
            place = self._places.setdefault(name, _Place())
            # A session that is being stopped or opened is not left half-way when the device goes.
            session = await asyncio.shield(self._open(name, place, opening, link))
            most = wire.batch_limit(task)
            while (data := await self._message(context)) is not None:
                kind, message = wire.decode(data, "FromDevice", max(most, wire.SMALL_BYTES))
                session.receive(kind, message, len(data))
            await session.finish()
            link.end()
        except RefusedError as refusal:
            link.end(refusal)
        except BusyError as error:
            link.end(RefusedError(str(error), "later"))
        except LayoutOptError as error:
            link.end(RefusedError(str(error)))
        except Exception:  # a fault of ours: it is this call's alone
            LOGGER.exception("a call of %s failed", printable(name))
            link.end(RefusedError("the server failed", "later"))
        finally:
            if place is not None and place.link is link:
                self._detach(place)

    def _who(self, context: Any) -> str:
        """The device that calls.

        Raises:
            RefusedError: it is not who it says.
        """
        name = check_name(_text(context, wire.DEVICE))
        if self._keys is None:
            return name
        if not self._keys.registry.knows(name, _text(context, wire.TOKEN)):
            raise RefusedError(f"no device {name} with this token is known here")
        names = certificate_names(context.auth_context())
        if self._tls and names != {name}:
            raise RefusedError(f"device {name} shows the certificate of {', '.join(sorted(names)) or 'nobody'}")
        return name

    async def _opening(self, context: Any) -> _Opening:
        try:
            async with asyncio.timeout(self.limits.open_s):
                data = await self._message(context)
        except TimeoutError:
            raise RefusedError(f"a call without a message for {self.limits.open_s:g} s", "later") from None
        kind, message = wire.decode(data or b"", "FromDevice", wire.OPEN_BYTES)
        if kind != "open":
            raise RefusedError(f"a call begins with {kind!r}: expected 'open'")
        if message.version != wire.VERSION:
            raise RefusedError(
                f"the device speaks version {message.version} of the protocol, this server version {wire.VERSION}: "
                "install the same layoutopt on both"
            )
        return _Opening(wire.read_task(message.task), wire.read_head(message.head), message.anew)

    async def _message(self, context: Any) -> bytes | None:
        import grpc

        data = await context.read()
        return None if data is grpc.aio.EOF else data

    async def _open(self, name: str, place: _Place, opening: _Opening, link: Link) -> Session:
        """Begin a session, after an older one of the same device has ended."""
        window = self._window(opening.task)
        async with place.lock:
            if self._stopping or not link.is_open:
                raise RefusedError("the server stops", "later")
            if self._places.setdefault(name, place) is not place:  # forgotten while we waited
                raise RefusedError(f"the training of {name} is just being released", "later")
            await self._end(name, place, f"device {name} has opened its training over another connection", "superseded")
            if len(self.connected) >= self.limits.devices:
                raise RefusedError(
                    f"{self.limits.devices} devices are connected, which is this server's limit", "later"
                )
            if sum(p.held_bytes for p in self._places.values()) + window.bytes > self.limits.held_bytes:
                raise RefusedError(
                    f"devices that are connected may send all {self.limits.held_bytes} bytes that this server holds",
                    "later",
                )
            place.link, place.held_bytes = link, window.bytes  # taken before anyone else can be asked
            try:
                return await self._begin_session(name, place, opening, window, link)
            finally:
                if place.session is None or not link.is_open:  # refused, or the device has gone meanwhile
                    self._detach(place)

    async def _begin_session(self, name: str, place: _Place, opening: _Opening, window: Window, link: Link) -> Session:
        place.in_memory = True
        status = await self._begin(name, opening)
        if status.failure:
            raise RefusedError(f"the training of {name} cannot go on: {status.failure}")
        step, task = status.next_step, opening.task
        session = Session(name, task, step, window, link, self._workers, self._executor, self._failed)
        place.session = session
        opened = wire.messages().Opened(
            next_step=step, window_steps=window.steps, window_bytes=window.bytes, window_orders=window.orders
        )
        link.put(opened=opened)
        LOGGER.info("%s goes on at step %d of %d", name, step, task.steps)
        return session

    async def _begin(self, name: str, opening: _Opening) -> Status:
        """Have a training opened; where memory is short, those of devices that are gone make room, the oldest first."""
        gone = sorted((p.idle_since, other) for other, p in self._places.items() if p.link is None and other != name)
        while True:
            try:
                return await self._call(self._open_training, name, opening)
            except BusyError:
                if not gone:
                    raise
                other = gone.pop(0)[1]
                if other in self._places:
                    await self._release(other, self._places[other], 0.0)

    def _open_training(self, name: str, opening: _Opening) -> Status:
        return self._workers.open(name, opening.task, opening.head or None, anew=opening.anew)

    def _window(self, task: Task) -> Window:
        batch = wire.batch_limit(task)
        if batch > self.limits.window_bytes:
            raise RefusedError(
                f"a batch of this task has up to {batch} bytes, this server takes {self.limits.window_bytes}"
            )
        steps = min(self.limits.window_steps, WINDOW_STEPS, self.limits.window_bytes // batch)
        return Window(steps, steps * batch, self.limits.window_orders)

    def _failed(self, session: Session, error: Exception) -> None:
        LOGGER.error("the training of %s failed: %s", session.name, printable(str(error)))
        if session.link is not None:
            session.link.end(RefusedError(f"the training failed: {error}", "later"))

    # ---- devices that are gone ------------------------------------------------------------------------------------

    def _detach(self, place: _Place) -> None:
        place.link, place.held_bytes = None, 0
        place.idle_since = asyncio.get_running_loop().time()
        if place.session is not None:
            place.session.detach()

    async def _end(self, name: str, place: _Place, reason: str, code: wire.Code) -> None:
        """End a device's session and the connection it has."""
        if place.link is not None:
            place.link.end(RefusedError(reason, code))
            self._detach(place)
        if place.session is not None:
            await place.session.stop()
            place.session = None

    async def _release_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self.limits.idle_s, 10.0))
            for name in list(self._places):
                if name in self._places:
                    await self._release(name, self._places[name], self.limits.idle_s)

    async def _release(self, name: str, place: _Place, after_s: float) -> None:
        """Forget a device that has been gone for a while, if there is nothing to do for it."""
        if place.lock.locked():  # it comes back just now, or is forgotten already; two may not wait for each other
            return
        async with place.lock:
            gone_s = asyncio.get_running_loop().time() - place.idle_since
            if place.link is not None or gone_s < after_s:
                return
            if place.session is not None and not place.session.is_idle:
                return
            await self._end(name, place, "", "later")
            if place.in_memory:
                try:
                    await self._call(self._workers.release, name)
                except Exception as error:  # noqa: BLE001 - it may not be open, or its worker may have died
                    LOGGER.warning("%s was not released: %s", name, printable(str(error)))
            self._places.pop(name, None)

    def _call(self, work: Any, *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


def _text(context: Any, key: str) -> str:
    """A value of a call's metadata; "" where there is none."""
    found = [value for name, value in context.invocation_metadata() or () if name == key]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""
