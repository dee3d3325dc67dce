"""Regions of a plan's arena, made when they are first asked for.

NVIDIA's driver looks through all regions of a buffer at every launch that takes the buffer itself: 6 µs with none, 10
with 512 of them, 20 with 2,048 (H200, driver 580). A runtime whose launches all find their operands by places in the
arena (``Runtime.launches_by_place``) therefore makes none, and copies go by offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layoutopt.plan import ArenaSlot

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["Regions"]


class Regions:
    """A buffer's regions by slot name; slots at one place share one.

    Args:
        runtime: the device.
        arena: the buffer.
        slots: by name.
    """

    def __init__(self, runtime: Runtime, arena: Any, slots: Mapping[str, ArenaSlot]) -> None:
        self._runtime, self._arena, self._slots = runtime, arena, slots
        self._made: dict[tuple[int, int], Any] = {}

    def __getitem__(self, name: str) -> Any:
        slot = self._slots[name]
        where = slot.offset_bytes, slot.size_bytes
        if where not in self._made:
            self._made[where] = self._runtime.region(self._arena, *where)
        return self._made[where]

    def __len__(self) -> int:
        """Regions made so far."""
        return len(self._made)

    def close(self) -> None:
        """Let go of them, the last made first, and of the arena."""
        while self._made:
            self._made.popitem()
        self._arena = None
