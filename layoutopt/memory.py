"""Memory: when each buffer of a step is alive, and where it lies in the one arena.

Positions are steps of the plan (relayouts and ops, in order). A buffer is alive from the step that makes it to the
last step that touches it, both included, so that what an op reads and what it writes never share bytes. Parameters,
optimizer state and constants live for the whole step; inputs are there before it starts; graph outputs stay to its end.
A copy lives from its relayout to its last reader. Placing is greedy by size, a well-known heuristic for this (dynamic
storage allocation is NP-hard): the largest first, each in the tightest gap among those alive with it. The bytes alive
at the fullest step bound every arena from below, so that the result says how far it can be from the best.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from layoutopt.errors import InfeasibleError

__all__ = ["Arena", "Buffer", "Placed", "enforce_budget", "find_overlap", "live_bytes", "pack"]


@dataclass(frozen=True)
class Buffer:
    """What needs a place: bytes, and the first and last step (both included) at which it is alive."""

    name: str
    size_bytes: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Whether both are alive at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Placed:
    """A buffer and its offset in the arena."""

    buffer: Buffer
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after it."""
        return self.offset_bytes + self.buffer.size_bytes


@dataclass(frozen=True)
class Arena:
    """Placed buffers, the arena's size, and the least any arena could need (the fullest step)."""

    placed: tuple[Placed, ...]
    size_bytes: int
    bound_bytes: int


def _round_up(n: int, align: int) -> int:
    return -(-n // align) * align


def live_bytes(buffers: Sequence[Buffer], steps: int, align: int = 1) -> list[int]:
    """Bytes alive at every step, each buffer rounded up to ``align``."""
    change = [0] * (steps + 1)
    for buffer in buffers:
        size = _round_up(buffer.size_bytes, align)
        change[buffer.first] += size
        change[buffer.last + 1] -= size
    out, total = [], 0
    for delta in change[:steps]:
        total += delta
        out.append(total)
    return out


def pack(buffers: Sequence[Buffer], align: int) -> Arena:
    """Offsets for all buffers, in the smallest arena that three orders of placing find.

    Args:
        buffers: names unique; sizes of at least a byte.
        align: every offset is a multiple of it (bytes).
    """
    orders: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
        lambda b: (-b.size_bytes, b.first),
        lambda b: (b.first - b.last, -b.size_bytes),
        lambda b: (-b.size_bytes * (b.last - b.first + 1), b.first),
    )
    steps = max((b.last for b in buffers), default=-1) + 1
    bound = max(live_bytes(buffers, steps, align), default=0)
    best: Arena | None = None
    for order in orders:
        placed = _place(sorted(buffers, key=lambda b: (order(b), b.name)), align)
        size = max((_round_up(p.end_bytes, align) for p in placed), default=0)
        if best is None or size < best.size_bytes:
            best = Arena(tuple(sorted(placed, key=lambda p: (p.offset_bytes, p.buffer.first))), size, bound)
        if best.size_bytes == bound:
            break
    assert best is not None
    return best


def _place(buffers: Iterable[Buffer], align: int) -> list[Placed]:
    placed: list[Placed] = []
    taken: list[tuple[int, int, int, int]] = []  # offset, end, first and last step of what is placed, ascending
    for buffer in buffers:
        size = _round_up(buffer.size_bytes, align)
        best: tuple[int, int] | None = None
        free = 0
        for start, end, first, last in taken:
            if first > buffer.last or buffer.first > last:
                continue
            gap = start - free
            if gap >= size and (best is None or gap < best[0]):
                best = (gap, free)
            free = max(free, end)
        offset = best[1] if best else free
        placed.append(Placed(buffer, offset))
        insort(taken, (offset, offset + size, buffer.first, buffer.last))
    return placed


def find_overlap(placed: Sequence[Placed]) -> tuple[Placed, Placed] | None:
    """Two buffers alive together that share a byte, or None: every pair that shares bytes is looked at."""
    ordered = sorted(placed, key=lambda p: p.offset_bytes)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.offset_bytes >= a.end_bytes:
                break
            if a.buffer.meets(b.buffer):
                return a, b
    return None


def enforce_budget(arena: Arena, budget_bytes: int | None, step_names: Mapping[int, str]) -> None:
    """Refuse an arena beyond a budget.

    Args:
        arena: placed buffers.
        budget_bytes: the most allowed; None for no limit.
        step_names: op or relayout by step, to name where memory peaks.

    Raises:
        InfeasibleError: too large; ``conflict`` names the fullest steps and the largest buffers alive at the fullest.
    """
    if budget_bytes is None or arena.size_bytes <= budget_bytes:
        return
    buffers = [p.buffer for p in arena.placed]
    live = live_bytes(buffers, max(b.last for b in buffers) + 1)
    peaks = sorted(range(len(live)), key=lambda i: (-live[i], i))[:3]
    largest = sorted((b for b in buffers if b.first <= peaks[0] <= b.last), key=lambda b: (-b.size_bytes, b.name))[:3]
    at = ", ".join(step_names.get(i, f"step {i}") for i in peaks)
    held = ", ".join(f"{b.name} ({b.size_bytes} bytes)" for b in largest)
    raise InfeasibleError(
        f"the plan needs {arena.size_bytes} bytes of device memory ({arena.bound_bytes} alive at once), the budget is "
        f"{budget_bytes}; it peaks at {at}, where the largest buffers are {held}: allow more or use a smaller batch",
        (*(step_names.get(i, f"step {i}") for i in peaks), *(b.name for b in largest)),
    )
