"""Inputs on their way to the device: packed into one stretch of pinned memory, copied once, spread by one kernel.

A step has a few small inputs (ids, labels, the learning rate), and copying one costs the host as much as several
launches. Behind the arena lies a staging region: the host packs every small input as it will be stored, one copy brings
them all there, and one launch moves each to its slot. Large inputs are copied straight to theirs.

The host may run some steps ahead of the device. Each of them has host memory of its own, which is used again when the
copy from it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from kernels.batch import Merged, Program, Row, merge
from kernels.bind import IDENTITY_EXPR
from kernels.pack import STORAGE_DTYPES, digits_view, pack, poison_padding
from kernels.runtime import Runtime
from kernels.spec import DeviceLimits
from layoutopt.layout import Layout
from layoutopt.plan import ArenaSlot

__all__ = ["Input", "Inputs", "staging_bytes"]

_STEPS_AHEAD = 2
"""Steps the host may run ahead of the device before it waits: bounds the input copies that are alive."""

_SMALL_BYTES = 1 << 18
_WORD_BYTES = 4
_ALIGN_BYTES = 128


@dataclass(frozen=True)
class Input:
    """Where and how an input is stored."""

    layout: Layout
    dtype: str
    slot: ArenaSlot

    @property
    def size_bytes(self) -> int:
        """Bytes of its storage."""
        return self.layout.size_elems * STORAGE_DTYPES[self.dtype].itemsize


def _places(inputs: Mapping[str, Input], limits: DeviceLimits) -> dict[str, int]:
    """Byte of the staging region at which each small input begins.

    They are moved in words: what is no multiple of one spills into the gap behind its slot, where slots are aligned.
    """
    out = {}
    at = 0
    for name, one in inputs.items():
        if one.size_bytes <= _SMALL_BYTES and limits.base_align_bytes % _WORD_BYTES == 0:
            out[name] = at
            at += -(-one.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return out


def staging_bytes(inputs: Mapping[str, Input], limits: DeviceLimits) -> int:
    """Bytes of the staging region that ``Inputs`` needs behind the arena."""
    last = list(_places(inputs, limits).items())[-1:]
    return sum(at + -(-inputs[name].size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for name, at in last)


@dataclass(frozen=True, eq=False)
class _Host:
    """Host memory of one step: all of it, and each staged input's storage and digits in it."""

    memory: np.ndarray
    storages: dict[str, np.ndarray]
    digits: dict[str, np.ndarray]


class Inputs:
    """Sends a step's inputs.

    Args:
        runtime: the device.
        inputs: all that a plan stores, by name.
        arena: the device's buffer.
        begin: byte of the arena at which the staging region begins; None where it has none.
        limits: of the device.
        poison: fill the padding of what is sent with NaN bytes.
    """

    def __init__(
        self,
        runtime: Runtime,
        inputs: Mapping[str, Input],
        arena: Any,
        begin: int | None,
        limits: DeviceLimits,
        poison: bool,
    ) -> None:
        self._runtime, self._inputs, self._arena = runtime, inputs, arena
        self._poison = poison
        self._begin = begin or 0
        self._places = {} if begin is None else _places(inputs, limits)
        size = 0 if begin is None else staging_bytes(inputs, limits)
        self._turns = cycle([self._host(size) for _ in range(_STEPS_AHEAD + 1)] if size else [])
        self._alive: list[list[Any]] = []
        self._spread: list[Any] = []
        self._merged: Merged | None = None
        self._tables: list[Any] = []
        if size:
            rows = [
                Row(-(-inputs[name].size_bytes // _WORD_BYTES), 1, (self._begin + at, inputs[name].slot.offset_bytes))
                for name, at in self._places.items()
            ]
            words = Program(IDENTITY_EXPR, ("int32",) * 2, 1, ("each",) * 2, 4)
            self._merged = merge(words, rows, limits, "inputs")

    @property
    def sources(self) -> list[tuple[str, str]]:
        """(Source, label) of what ``build`` builds, for ``Runtime.prepare``."""
        return [] if self._merged is None else [(self._merged.source, self._merged.label)]

    def build(self) -> None:
        """Build and bind the kernel that spreads inputs: before anything is sent.

        Raises:
            DeviceError: it does not build.
        """
        if self._merged is None:
            return
        kernel = self._runtime.kernel(self._merged.source, "batch", self._merged.label)
        self._tables += [self._runtime.constant(x) for x in (self._merged.rows, self._merged.groups)]
        kernel.set_args(self._arena, *self._tables)
        self._spread.append((kernel, self._merged.global_size, self._merged.local_size))

    @property
    def launches(self) -> int:
        """Kernel launches of one sending."""
        return int(self._merged is not None)

    def _host(self, size: int) -> _Host:
        memory = self._runtime.pinned(size)
        storages, digits = {}, {}
        for name, at in self._places.items():
            one = self._inputs[name]
            storages[name] = memory[at : at + one.size_bytes].view(STORAGE_DTYPES[one.dtype])
            if one.layout.padded_shape == one.layout.shape:
                digits[name] = digits_view(one.layout, storages[name])
        return _Host(memory, storages, digits)

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy inputs to their slots, behind everything enqueued; they may change when this returns.

        Args:
            arrays: by name, in the graph's shapes and dtypes. What is not given has no defined value in this step.
        """
        while len(self._alive) > _STEPS_AHEAD:
            for event in self._alive.pop(0):
                event.wait()
        events = []
        host = next(self._turns, None)
        for name, array in arrays.items():
            one = self._inputs[name]
            if host is None or name not in self._places:
                packed = pack(one.layout, array, one.dtype)
                self._poisoned(one, packed)
                at = one.slot.offset_bytes
                events.append(self._runtime.upload(self._arena, packed, wait=False, offset_bytes=at))
            elif name in host.digits:
                digits = host.digits[name]
                digits[...] = array.reshape(digits.shape)
                self._poisoned(one, host.storages[name])
            else:
                pack(one.layout, array, one.dtype, host.storages[name])
                self._poisoned(one, host.storages[name])
        if host is not None:
            events.append(self._runtime.upload(self._arena, host.memory, wait=False, offset_bytes=self._begin))
            self._runtime.enqueue(self._spread)
        self._alive.append(events)

    def _poisoned(self, one: Input, storage: np.ndarray) -> None:
        if self._poison:
            poison_padding(one.layout, storage)

    def finished(self) -> None:
        """Everything sent has arrived: the caller has waited for it."""
        self._alive.clear()

    def close(self) -> None:
        """Give kernel, tables and host memory back, and let go of the arena."""
        self._alive.clear()
        self._spread.clear()
        self._tables.clear()
        self._turns = cycle([])
        self._arena = None
