"""Attacks on a server: bytes of all kinds where it expects messages, and where it expects HTTP/2.

Tests try some hundred; ``benchmarks/side_fuzz.py`` goes on for minutes.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from layoutopt.side import wire
from layoutopt.side.task import Task
from tests.side import SMALL, Caller, FakeBackbone

__all__ = ["Attack", "attacks", "raw_attacks", "run_attack", "run_raw"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ENDS = ("CANCELLED", "FAILED_PRECONDITION", "NAME", "OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
_NUMBERS = st.one_of(st.integers(0, 40), st.sampled_from([1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1]))


@dataclass(frozen=True)
class Attack:
    """A call.

    Attributes:
        name: of the device that it says it is.
        messages: that it sends.
        ends: whether it says that there are no more, or just hangs up.
    """

    name: str
    messages: tuple[bytes, ...]
    ends: bool


def _field(kind: str, **fields: object) -> bytes:
    pb = wire.messages()
    return pb.FromDevice(**{kind: fields}).SerializeToString()


def _valid(task: Task, step: int) -> list[bytes]:
    """Messages of an honest device at some step."""
    pb = wire.messages()
    rows = wire.encode_rows(FakeBackbone(task).batch(step % task.steps, (step % 7, 7 + step % 5)))
    return [
        _field("open", version=1, task=wire.encode_task(task)),
        pb.FromDevice(step=pb.Step(step=step, rows=rows)).SerializeToString(),
        pb.FromDevice(supply=pb.Supply(step=step, rows=rows)).SerializeToString(),
        _field("cached", first_step=step, orders=[{"samples": [1, 2]}, {"samples": [step]}]),
        _field("fetch"),
    ]


@st.composite
def _mutated(draw: DrawFn, messages: list[bytes]) -> bytes:
    """An honest message with a few bytes changed, removed, doubled or added."""
    data = bytearray(draw(st.sampled_from(messages)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "remove", "double"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=9))
        elif how == "remove":
            del data[at : at + draw(st.integers(1, 9))]
        else:
            data[at:at] = data[at : at + 64]
    return bytes(data)


@st.composite
def _made_up(draw: DrawFn) -> bytes:
    """A message of this protocol whose fields hold whatever they can hold."""
    pb = wire.messages()
    samples = draw(st.lists(_NUMBERS, max_size=6))
    numbers = draw(st.binary(max_size=200))
    rows = pb.Rows(samples=samples, labels=numbers[:24], mask=numbers[:5])
    rows.taps.extend(pb.Tap(words=numbers[i:], scales=numbers[: 4 * i]) for i in range(draw(st.integers(0, 4))))
    step = draw(_NUMBERS)
    kind = draw(st.sampled_from(["open", "step", "supply", "cached", "fetch"]))
    if kind == "open":
        task = wire.encode_task(SMALL)
        name = draw(st.sampled_from([f.name for f in task.DESCRIPTOR.fields]))
        value = draw(st.one_of(_NUMBERS, st.floats(), st.text(max_size=30), st.booleans()))
        try:
            setattr(task, name, value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            task.ClearField(name)
        head = [pb.Tensor(name=draw(st.text(max_size=20)), shape=[s & 0xFFFFFFFF for s in samples], data=numbers)]
        opening = pb.Open(version=draw(st.integers(0, 3)), task=task, head=head[: draw(st.integers(0, 1))])
        return pb.FromDevice(open=opening).SerializeToString()
    if kind in ("step", "supply"):
        return _field(kind, step=step, rows=rows)
    if kind == "cached":
        return _field(kind, first_step=step, orders=[pb.Order(samples=samples)] * draw(st.integers(0, 3)))
    return _field(kind)


@st.composite
def attacks(draw: DrawFn) -> Attack:
    """Calls that begin honestly, or not, and go on with anything."""
    valid = _valid(SMALL, draw(st.integers(0, SMALL.steps + 1)))
    anything: SearchStrategy[bytes] = st.one_of(
        st.binary(max_size=300), _mutated(valid), _made_up(), st.sampled_from(valid)
    )
    messages = draw(st.lists(anything, min_size=1, max_size=6))
    if draw(st.booleans()):
        messages.insert(0, valid[0])
    name = draw(st.sampled_from(["fuzz-0", "fuzz-1", "fuzz-2", "", "../up", "fuzz\x7f"]))
    return Attack(name, tuple(messages), draw(st.booleans()))


def raw_attacks() -> SearchStrategy[bytes]:
    """What is sent to the port itself: noise, HTTP/2 of a kind, and frames of any type and length."""
    frame = st.builds(
        lambda length, kind, flags, stream, body: struct.pack(">I", length)[1:] + bytes([kind, flags]) + stream + body,
        st.integers(0, (1 << 24) - 1),
        st.integers(0, 12),
        st.integers(0, 255),
        st.binary(min_size=4, max_size=4),
        st.binary(max_size=80),
    )
    noise = st.one_of(st.binary(max_size=400), st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    return st.one_of(noise, st.lists(frame, max_size=5).map(lambda frames: _PREFACE + b"".join(frames)))


def run_attack(address: str, attack: Attack) -> str:
    """Make a call; returns the status with which it ended.

    Raises:
        AssertionError: it did not end, or in an unknown way.
    """
    import grpc

    with Caller(address, attack.name) as caller:
        for message in attack.messages:
            caller.send(message)
        if attack.ends:
            caller.end()
        try:
            caller.receive()
            if not attack.ends:
                return "CANCELLED"
            while True:
                caller.receive()
        except StopIteration:
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
            # gRPC itself refuses such a name, on this side.
            code = "NAME" if code == "INTERNAL" and "metadata" in (error.details() or "") else code
    assert code in _ENDS, f"{attack} ended with {code}"
    return code


def run_raw(port: int, data: bytes) -> None:
    """Send bytes to the port, and hang up."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(0.02)
            connection.recv(1000)
        except (TimeoutError, ConnectionError):
            return
