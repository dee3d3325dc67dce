"""Accepted batches on disk: what was acknowledged is never lost, and is bounded by checkpoints.

Records are appended to a segment file and are on the disk before a batch is acknowledged. A checkpoint begins a new
segment and removes those whose records it contains. A record that is torn (the process died while it was written) was
not acknowledged; a reader stops there, and writing goes on from there. A record that the disk damaged later ends the
journal too, and is announced: the device sends these batches again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from layoutopt.errors import LayoutOptError
from layoutopt.files import sync_folder
from layoutopt.side.records import decode_batch, encode_batch
from layoutopt.side.task import Batch, Task

__all__ = ["Journal"]

_HEAD = struct.Struct("<8sQQ16s")  # magic, step, payload bytes, digest
_MAGIC = b"SIDESTEP"
_LOG = logging.getLogger(__name__)


@dataclass
class _Segment:
    path: Path
    last_step: int  # of its records; -1 without any
    nbytes: int


class Journal:
    """The journal of a training; one process at a time has it open.

    Args:
        directory: that holds its segments.
        task: whose batches they are.
        first: steps before it are in the checkpoint, and are not given again.

    Attributes:
        next_step: the step after the last one that is written down.

    Raises:
        LayoutOptError: the directory cannot be read or written.
    """

    def __init__(self, directory: Path, task: Task, first: int = 0) -> None:
        self._directory, self._task = directory, task
        self._digest = hashlib.blake2b(task.encode(), digest_size=16).digest()
        self.next_step = first
        self._segments: list[_Segment] = []
        self._file: BinaryIO | None = None
        self._broken = ""
        try:
            self._recover()
        except OSError as error:
            raise LayoutOptError(f"cannot open the journal in {directory}: {error.strerror}") from error

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(s.nbytes for s in self._segments)

    def _recover(self) -> None:
        found = (p for p in self._directory.glob("journal.*") if p.suffix[1:].isdecimal())
        paths = sorted(found, key=lambda p: int(p.suffix[1:]))
        for number, path in enumerate(paths):
            last, good = -1, 0
            for step, _, end in self._records(path):
                if step > self.next_step:
                    break  # what should come before it is gone
                self.next_step = max(self.next_step, step + 1)
                last, good = step, end
            self._segments.append(_Segment(path, last, good))
            if good == path.stat().st_size:
                continue
            os.truncate(path, good)
            for later in paths[number + 1 :]:
                _LOG.warning("%s was damaged: batches from step %d on are asked for again", later, self.next_step)
                later.unlink()
            break
        if self._segments:
            self._file = open(self._segments[-1].path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        else:
            self._begin()

    def _records(self, path: Path) -> Iterator[tuple[int, bytes, int]]:
        """Step, payload and end of each whole record."""
        size, end = path.stat().st_size, 0
        with open(path, "rb") as file:
            while end + _HEAD.size <= size:
                magic, step, length, digest = _HEAD.unpack(file.read(_HEAD.size))
                if magic != _MAGIC or length > size - end - _HEAD.size:
                    break
                payload = file.read(length)
                if self._sum(step, payload) != digest:
                    break
                end += _HEAD.size + length
                yield step, payload, end
        if size - end > _HEAD.size + self._most_bytes():
            _LOG.warning("%s was damaged: batches after its first %d bytes are asked for again", path, end)

    def _most_bytes(self) -> int:
        return self._task.batch_bytes + 9 * self._task.batch + 64

    def _sum(self, step: int, payload: bytes) -> bytes:
        digest = hashlib.blake2b(self._digest + struct.pack("<QQ", step, len(payload)), digest_size=16)
        digest.update(payload)
        return digest.digest()

    def _begin(self) -> None:
        path = self._directory / f"journal.{self.next_step}"
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            sync_folder(self._directory)
        except OSError:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        if not self._segments or self._segments[-1].path != path:
            self._segments.append(_Segment(path, -1, 0))

    def read(self, first: int) -> Iterator[Batch]:
        """The batches from a step on, in order, one in memory at a time."""
        for segment in list(self._segments):
            if segment.last_step >= first:
                for step, payload, _ in self._records(segment.path):
                    if step >= first:
                        first = step + 1
                        yield decode_batch(self._task, payload)

    def append(self, batch: Batch) -> None:
        """Write a batch down; when this returns it would survive a loss of power.

        Raises:
            LayoutOptError: it could not be written. The journal is as before.
        """
        if self._file is None or self._broken:
            raise LayoutOptError(f"the journal in {self._directory} is closed{self._broken}")
        payload = encode_batch(batch)
        record = memoryview(_HEAD.pack(_MAGIC, batch.step, len(payload), self._sum(batch.step, payload)) + payload)
        segment = self._segments[-1]
        try:
            written = 0
            while written < len(record):
                written += self._file.write(record[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            self._take_back(segment)
            raise LayoutOptError(
                f"step {batch.step} was not accepted, since the server cannot write {segment.path.name}: "
                f"{error.strerror} (send it again later)"
            ) from error
        segment.nbytes += len(record)
        segment.last_step = batch.step
        self.next_step = batch.step + 1

    def _take_back(self, segment: _Segment) -> None:
        """A record that was not acknowledged must not be found later, when its step may have been sent again."""
        assert self._file is not None
        try:
            os.ftruncate(self._file.fileno(), segment.nbytes)
            os.fsync(self._file.fileno())
        except OSError as error:
            self._broken = f", since its disk failed ({error.strerror})"

    def cut(self, step: int) -> None:
        """A checkpoint holds all steps before ``step``: begin a new segment and forget what is not needed.

        Raises:
            LayoutOptError: the disk is full or failed; nothing is lost.
        """
        try:
            if self._segments[-1].nbytes:
                self._begin()
            for segment in self._segments[:-1]:
                if segment.last_step < step:
                    segment.path.unlink(missing_ok=True)
                    self._segments.remove(segment)
        except OSError as error:
            raise LayoutOptError(f"cannot cut the journal in {self._directory}: {error.strerror}") from error

    def close(self) -> None:
        """Keep it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
