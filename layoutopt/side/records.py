"""Batches as bytes: in the journal, in the store and between the server's processes; not on the wire.

Shapes are the task's, so that bytes read back have them or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.task import Batch, Task

__all__ = ["decode_batch", "encode_batch", "join_samples", "sample_bytes"]


def encode_batch(batch: Batch) -> bytes:
    """A checked batch with taps as bytes."""
    arrays = [np.ascontiguousarray(a) for tap in batch.taps for a in tap]
    arrays += [np.ascontiguousarray(a) for a in (batch.mask, batch.targets) if a is not None]
    return msgspec.msgpack.encode((batch.step, batch.samples, b"".join(a.data.cast("B") for a in arrays if a.size)))


def decode_batch(task: Task, data: bytes | bytearray | memoryview) -> Batch:
    """A batch with taps from :func:`encode_batch`.

    Raises:
        LayoutOptError: the bytes are no batch of this task.
    """
    try:
        step, samples, payload = msgspec.msgpack.decode(data, type=tuple[int, tuple[int, ...], bytes])
    except msgspec.DecodeError as error:
        raise LayoutOptError(f"these bytes are no batch ({error})") from error
    return _from_payload(task, step, samples, payload)


def _from_payload(task: Task, step: int, samples: tuple[int, ...], payload: bytes) -> Batch:
    if len(payload) != len(samples) * task.sample_bytes:
        raise LayoutOptError(
            f"step {step}: {len(samples)} samples of this task have {len(samples) * task.sample_bytes} bytes, "
            f"got {len(payload)}"
        )
    at = 0

    def array(dtype: Any, *shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape, dtype=np.int64))
        value = np.frombuffer(payload, dtype, count, at).reshape(shape)
        at += value.nbytes
        return value

    n = len(samples)
    rows = n * task.rows_per_sample
    taps = tuple((array(np.int32, rows, task.words), array(np.float32, rows, task.groups)) for _ in task.taps)
    mask = array(np.uint8, n, task.seq) if task.tokens == "all" else None
    targets = array(np.int32, n) if task.mode == "labels" else array(np.float32, n, task.classes)
    return Batch(step, samples, taps, mask, targets)


def sample_bytes(task: Task, batch: Batch, position: int) -> bytes:
    """What the store keeps of a batch's sample: taps, mask and target, as :func:`encode_batch` orders them."""
    first = position * task.rows_per_sample
    rows = slice(first, first + task.rows_per_sample)
    parts = [part[rows].tobytes() for tap in batch.taps for part in tap]
    parts += [a[position : position + 1].tobytes() for a in (batch.mask, batch.targets) if a is not None]
    return b"".join(parts)


def join_samples(task: Task, step: int, samples: tuple[int, ...], parts: Sequence[bytes]) -> Batch:
    """A batch of samples that were kept with :func:`sample_bytes`."""
    single = [_from_payload(task, step, (sample,), part) for sample, part in zip(samples, parts, strict=True)]
    taps = tuple(
        (np.concatenate([b.taps[i][0] for b in single]), np.concatenate([b.taps[i][1] for b in single]))
        for i in range(len(task.taps))
    )
    masks = [b.mask for b in single if b.mask is not None]
    targets = [b.targets for b in single if b.targets is not None]
    return Batch(step, samples, taps, np.concatenate(masks) if masks else None, np.concatenate(targets))
