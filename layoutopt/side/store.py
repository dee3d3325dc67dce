"""Activations that a device sent, kept by sample: later epochs need no device.

A store belongs to one training of one device. It is a file of slots of one size, since samples of a task are equally
large, and the samples that were used last are in memory too. Both are bounded; where there is no room, what was not
used for longest goes. A slot's checksum covers the device, the task and the sample's id, so that a slot that is torn,
damaged or of another device reads as missing, and the device sends that sample again. Losing the store loses no
training.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

from layoutopt.errors import LayoutOptError
from layoutopt.side.records import join_samples, sample_bytes
from layoutopt.side.task import Batch, Task

__all__ = ["MissingSamples", "Store"]

_HEAD = struct.Struct("<8sQQ16s")  # magic, sample, when it was put, digest
_MAGIC = b"SIDESMPL"
_LOG = logging.getLogger(__name__)


class MissingSamples(LayoutOptError):
    """Samples that the server was to take from its store and that are not there (any more): the device sends them.

    Attributes:
        samples: their ids.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        super().__init__(f"{len(samples)} samples are not in the server's store (the first is {samples[0]}): send them")
        self.samples = tuple(samples)

    def __reduce__(self) -> tuple[type[MissingSamples], tuple[tuple[int, ...]]]:
        return type(self), (self.samples,)


class Store:
    """The samples of a training; for one thread at a time.

    Args:
        path: the file of slots; what is in it is found again.
        device_id: whose samples they are.
        task: of the training.
        memory_bytes: bound of samples in memory.
        disk_bytes: bound of the file; 0: memory only.

    Raises:
        LayoutOptError: the file cannot be opened.
    """

    def __init__(self, path: Path, device_id: str, task: Task, *, memory_bytes: int, disk_bytes: int) -> None:
        self._path, self._task = path, task
        self._key = hashlib.blake2b(device_id.encode() + b"\0" + task.encode(), digest_size=32).digest()
        self._slot_bytes = _HEAD.size + task.sample_bytes
        self._most_in_memory = memory_bytes // task.sample_bytes
        self._most_on_disk = disk_bytes // self._slot_bytes
        self._memory: OrderedDict[int, bytes] = OrderedDict()
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = []
        self._used = 0  # slots that the file has
        self._clock = 0
        self._file: FileIO | None = None
        if self._most_on_disk:
            try:
                self._file = FileIO(path, "r+" if path.exists() else "w+")
                self._find()
            except OSError as error:
                self.close()
                raise LayoutOptError(f"cannot open the store {path}: {error.strerror}") from error
        else:
            path.unlink(missing_ok=True)

    def _find(self) -> None:
        """What an earlier process left, the last used (as far as it is known) last."""
        assert self._file is not None
        self._used = min(self._path.stat().st_size // self._slot_bytes, self._most_on_disk)
        self._file.truncate(self._used * self._slot_bytes)
        found: dict[int, tuple[int, int]] = {}
        for slot in range(self._used):
            magic, sample, clock, _ = _HEAD.unpack(self._pread(slot, _HEAD.size))
            self._clock = max(self._clock, clock + 1) if magic == _MAGIC else self._clock
            if magic == _MAGIC and found.get(sample, (-1, 0))[0] < clock:
                found[sample] = clock, slot
        for sample, (_, slot) in sorted(found.items(), key=lambda item: item[1]):
            self._slots[sample] = slot
        taken = set(self._slots.values())
        self._free = [slot for slot in range(self._used) if slot not in taken]

    def __len__(self) -> int:
        return len(self._memory.keys() | self._slots.keys())

    @property
    def memory_bytes(self) -> int:
        """Bytes of samples in memory."""
        return len(self._memory) * self._task.sample_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._used * self._slot_bytes

    def missing(self, samples: Iterable[int]) -> tuple[int, ...]:
        """Of these samples, those that are not here, each once."""
        return tuple(dict.fromkeys(s for s in samples if s not in self._memory and s not in self._slots))

    def put(self, batch: Batch) -> None:
        """Keep a batch's samples.

        Args:
            batch: checked, with taps.
        """
        for position, sample in enumerate(batch.samples):
            data = sample_bytes(self._task, batch, position)
            self._remember(sample, data)
            self._write(sample, data)

    def fill(self, batch: Batch, sent: Batch | None = None) -> Batch:
        """A batch that names its samples only, with its taps, mask and targets.

        Args:
            batch: without taps.
            sent: some of its samples, which are not taken from here.

        Raises:
            MissingSamples: some are not here, or were damaged.
        """
        here = dict.fromkeys(batch.samples)
        parts: dict[int, bytes | None] = {}
        for position, sample in enumerate(() if sent is None else sent.samples):
            assert sent is not None
            parts[sample] = sample_bytes(self._task, sent, position)
        parts |= {sample: self._get(sample) for sample in here if sample not in parts}
        missing = [sample for sample, part in parts.items() if part is None]
        if missing:
            raise MissingSamples(missing)
        return join_samples(self._task, batch.step, batch.samples, [parts[s] or b"" for s in batch.samples])

    def close(self) -> None:
        """Keep what is on disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._memory.clear()

    def _get(self, sample: int) -> bytes | None:
        if sample in self._slots:
            self._slots.move_to_end(sample)
        if sample in self._memory:
            self._memory.move_to_end(sample)
            return self._memory[sample]
        data = self._read(sample) if sample in self._slots else None
        if data is not None:
            self._remember(sample, data)
        return data

    def _remember(self, sample: int, data: bytes) -> None:
        if not self._most_in_memory:
            return
        self._memory[sample] = data
        self._memory.move_to_end(sample)
        if len(self._memory) > self._most_in_memory:
            self._memory.popitem(last=False)

    def _read(self, sample: int) -> bytes | None:
        slot = self._slots[sample]
        try:
            record = self._pread(slot, self._slot_bytes)
        except OSError as error:
            _LOG.warning("%s: cannot read slot %d: %s", self._path, slot, error.strerror)
            record = b""
        if len(record) == self._slot_bytes:
            magic, kept, clock, digest = _HEAD.unpack_from(record)
            data = record[_HEAD.size :]
            if magic == _MAGIC and kept == sample and digest == self._sum(sample, clock, data):
                return data
        _LOG.warning("%s: sample %d was damaged, and is asked for again", self._path, sample)
        self._free.append(self._slots.pop(sample))
        return None

    def _write(self, sample: int, data: bytes) -> None:
        if self._file is None:
            return
        slot = self._slot_for(sample)
        record = _HEAD.pack(_MAGIC, sample, self._clock, self._sum(sample, self._clock, data)) + data
        self._clock += 1
        try:
            whole = self._pwrite(slot, record)
        except OSError as error:
            _LOG.warning("%s: sample %d stays in memory only: %s", self._path, sample, error.strerror)
            whole = False
        if whole:
            self._slots[sample] = slot
            self._used = max(self._used, slot + 1)
        elif slot < self._used:
            self._free.append(slot)

    def _slot_for(self, sample: int) -> int:
        """Where a sample is to be written: where it is, where nothing is, or in place of the one longest not used."""
        if sample in self._slots:
            return self._slots.pop(sample)
        if self._free:
            return self._free.pop()
        if self._used < self._most_on_disk:
            return self._used
        return self._slots.popitem(last=False)[1]

    def _sum(self, sample: int, clock: int, data: bytes) -> bytes:
        digest = hashlib.blake2b(struct.pack("<QQ", sample, clock), digest_size=16, key=self._key)
        digest.update(data)
        return digest.digest()

    def _pread(self, slot: int, nbytes: int) -> bytes:
        assert self._file is not None
        self._file.seek(slot * self._slot_bytes)
        return self._file.read(nbytes)

    def _pwrite(self, slot: int, record: bytes) -> bool:
        assert self._file is not None
        self._file.seek(slot * self._slot_bytes)
        return self._file.write(record) == len(record)
