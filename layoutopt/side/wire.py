"""Messages as values and back. What arrives is measured before it is decoded, and checked before it is used.

Every refusal is a :class:`RefusedError` with one sentence; ``code`` says whether trying again may help. Arrays are not
copied on arrival: they lie in the bytes of their message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.needs import need
from layoutopt.side.task import Batch, Task

__all__ = [
    "DEVICE",
    "METHOD",
    "OPEN_BYTES",
    "TOKEN",
    "VERSION",
    "Code",
    "RefusedError",
    "batch_limit",
    "decode",
    "encode_rows",
    "encode_task",
    "encode_tensors",
    "messages",
    "read_head",
    "read_orders",
    "read_rows",
    "read_task",
]

VERSION = 1
METHOD = "/layoutopt.side.v1.SideTuning/Train"
DEVICE, TOKEN = "layoutopt-device", "layoutopt-token"
"""Keys of a call's metadata."""
OPEN_BYTES = 1 << 26
"""The largest first message: a task and a pretrained pooler of 4096 numbers squared."""
SMALL_BYTES = 1 << 20
"""The largest message that holds no activations."""

Code = Literal["unknown", "bad", "later", "superseded"]
_HEAD_TENSORS = 16
_PER_FIELD = 32
"""Bytes that a field's tag and length, or a nested message's, take at most (rounded up generously)."""


class RefusedError(LayoutOptError):
    """A message or a call that is refused.

    Attributes:
        code: "bad": it will be refused again; "later": it may not be; "superseded": another connection has taken over.
    """

    def __init__(self, message: str, code: Code = "bad") -> None:
        super().__init__(message)
        self.code: Code = code


def messages() -> Any:
    """The generated module.

    Raises:
        LayoutOptError: protobuf is not installed, or too old.
    """
    need("google.protobuf", "side-tuning")
    try:
        from layoutopt.side import side_pb2
    except Exception as error:  # protobuf raises its VersionError, which only newer ones have
        raise LayoutOptError(f"side-tuning needs another protobuf ({error}): pip install 'layoutopt[side]'") from error
    return side_pb2


def decode(data: bytes, kind: str, most_bytes: int) -> tuple[str, Any]:
    """A message.

    Args:
        data: as received.
        kind: "FromDevice" or "FromServer".
        most_bytes: that it may have.

    Returns:
        The name of the one field that is set, and its value.

    Raises:
        RefusedError: it is too large, no message, or an empty one.
    """
    if len(data) > most_bytes:
        raise RefusedError(f"a message of {len(data)} bytes, where at most {most_bytes} are expected")
    from google.protobuf.message import DecodeError

    try:
        message = getattr(messages(), kind).FromString(data)
    except DecodeError as error:
        raise RefusedError(f"{len(data)} bytes that are no message of this protocol") from error
    which = message.WhichOneof("kind")
    if which is None:
        raise RefusedError("a message that says nothing this version knows")
    return which, getattr(message, which)


# ---- tasks and heads ------------------------------------------------------------------------------------------------


def encode_task(task: Task) -> Any:
    """The message of a task."""
    message = messages().Task()
    for field in fields(Task):
        value = getattr(task, field.name)
        if isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


def read_task(message: Any) -> Task:
    """The task in a message.

    Raises:
        RefusedError: it says what no task may say.
    """
    values = {f.name: getattr(message, f.name) for f in fields(Task)}
    values["taps"] = tuple(values["taps"])
    try:
        return Task(**values)
    except LayoutOptError as error:
        raise RefusedError(str(error)) from error


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> list[Any]:
    """Messages of float32 arrays."""
    kind = messages().Tensor
    return [kind(name=n, shape=x.shape, data=_bytes(x, "<f4")) for n, x in tensors.items()]


def read_head(tensors: Sequence[Any]) -> dict[str, np.ndarray]:
    """Arrays by name.

    Raises:
        RefusedError: there are too many, two of one name, or one whose bytes do not fit its shape or are not finite.
    """
    if len(tensors) > _HEAD_TENSORS:
        raise RefusedError(f"a head of {len(tensors)} tensors, where at most {_HEAD_TENSORS} are expected")
    found: dict[str, np.ndarray] = {}
    for tensor in tensors:
        shape = tuple(tensor.shape)
        name = tensor.name[:80]
        size = 1
        for extent in shape:
            size *= extent
        if len(shape) > 2 or size * 4 != len(tensor.data):
            raise RefusedError(f"head tensor {name!r}: {len(tensor.data)} bytes are no float32{list(shape)[:8]}")
        if tensor.name in found or len(tensor.name) > 80:
            raise RefusedError(f"head tensor {name!r} comes twice, or its name is longer than 80 characters")
        array = np.frombuffer(tensor.data, "<f4").reshape(shape)
        if not np.isfinite(array).all():
            raise RefusedError(f"head tensor {name!r} has numbers that are not finite")
        found[tensor.name] = array
    return found


# ---- batches --------------------------------------------------------------------------------------------------------


def batch_limit(task: Task) -> int:
    """Bytes that the message of a whole batch has at most."""
    return task.batch_bytes + 8 * task.batch + _PER_FIELD * (8 + 3 * len(task.taps))


def encode_rows(batch: Batch) -> Any:
    """The message of what crosses of a batch's samples."""
    pb = messages()
    rows = pb.Rows(samples=batch.samples)
    rows.taps.extend(pb.Tap(words=_bytes(w, "<i4"), scales=_bytes(s, "<f4")) for w, s in batch.taps)
    if batch.mask is not None:
        rows.mask = _bytes(batch.mask, "u1")
    if batch.targets is not None:
        if batch.targets.dtype.kind == "i":
            rows.labels = _bytes(batch.targets, "<i4")
        else:
            rows.differences = _bytes(batch.targets, "<f4")
    return rows


def read_rows(task: Task, step: int, rows: Any) -> Batch:
    """The batch in a message, checked in every number.

    Raises:
        RefusedError: it is no batch of this task.
    """
    count = len(rows.samples)
    if not 1 <= count <= task.batch:
        raise RefusedError(f"step {step}: expected 1 to {task.batch} samples, got {count}")
    if len(set(rows.samples)) < count:
        raise RefusedError(f"step {step}: a sample comes twice")
    if len(rows.taps) != len(task.taps):
        raise RefusedError(f"step {step}: expected {len(task.taps)} taps, got {len(rows.taps)}")
    high = count * task.rows_per_sample
    taps = tuple(
        (
            _array(step, tap.words, "<i4", (high, task.words), f"the words of tap {name}"),
            _array(step, tap.scales, "<f4", (high, task.groups), f"the scales of tap {name}"),
        )
        for name, tap in zip(task.taps, rows.taps, strict=True)
    )
    mask = _array(step, rows.mask, "u1", (count, task.seq), "the mask") if task.tokens == "all" else None
    if mask is None and rows.mask:
        raise RefusedError(f"step {step}: a batch of pivot tokens has no mask")
    field = "labels" if task.mode == "labels" else "differences"
    if rows.WhichOneof("targets") != field:
        raise RefusedError(f"step {step}: a batch of this task has {field}, got {rows.WhichOneof('targets')}")
    shape = (count,) if field == "labels" else (count, task.classes)
    targets = _array(step, getattr(rows, field), "<i4" if field == "labels" else "<f4", shape, field)
    batch = Batch(step, tuple(rows.samples), taps, mask, targets)
    try:
        batch.check(task)
    except LayoutOptError as error:
        raise RefusedError(str(error)) from error
    return batch


@dataclass(frozen=True)
class Order:
    """A step whose samples the server should have."""

    step: int
    samples: tuple[int, ...]

    @property
    def batch(self) -> Batch:
        """It as a batch to take from the store."""
        return Batch(self.step, self.samples)


def read_orders(task: Task, message: Any, most: int) -> list[Order]:
    """The orders in a message.

    Raises:
        RefusedError: none, too many, beyond the last step, or one that is no batch of this task.
    """
    count = len(message.orders)
    if not 1 <= count <= most:
        raise RefusedError(f"{count} orders of cached batches, where 1 to {most} are expected")
    found = [Order(message.first_step + i, tuple(order.samples)) for i, order in enumerate(message.orders)]
    for order in found:
        try:
            order.batch.check(task)
        except LayoutOptError as error:
            raise RefusedError(str(error)) from error
        if len(set(order.samples)) < len(order.samples):
            raise RefusedError(f"step {order.step}: a sample comes twice")
    return found


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return np.ascontiguousarray(array, np.dtype(dtype)).tobytes()


def _array(step: int, data: bytes, dtype: str, shape: tuple[int, ...], what: str) -> np.ndarray:
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(data) != size:
        raise RefusedError(f"step {step}: {what} has {len(data)} bytes, expected {size} for {kind}{list(shape)}")
    return np.frombuffer(data, kind).reshape(shape)
