"""Memory: when each buffer of a step is alive, and where it lies in the one arena.

Positions are steps of the plan (relayouts and ops, in order). A buffer is alive from the step that makes it to the
last step that touches it, both included, so that what an op reads and what it writes never share bytes. Parameters,
optimizer state and constants live for the whole step; inputs are there before it starts; graph outputs stay to its end.
A copy lives from its relayout to its last reader. The bytes alive at the fullest step bound every arena from below, so
that the result says how far it can be from the best; ``packing`` says how offsets are found.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from layoutopt.errors import InfeasibleError

__all__ = [
    "Arena",
    "Buffer",
    "Placed",
    "enforce_budget",
    "find_overlap",
    "fullest_bytes",
    "fullest_steps",
    "live_bytes",
    "pack",
]


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
    """Placed buffers, the arena's size, and the bytes alive at the fullest step, without which no arena could do.

    ``proven`` says that no smaller arena exists.
    """

    placed: tuple[Placed, ...]
    size_bytes: int
    bound_bytes: int
    proven: bool


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


def fullest_bytes(buffers: Sequence[Buffer], align: int = 1) -> int:
    """Bytes alive at the fullest step, each buffer rounded up to ``align``."""
    return max(live_bytes(buffers, max((b.last for b in buffers), default=-1) + 1, align), default=0)


def fullest_steps(buffers: Sequence[Buffer], most: int = 3) -> tuple[list[int], list[Buffer]]:
    """The steps at which most is alive, the fullest first, and the largest buffers alive at the fullest.

    Args:
        buffers: at least one.
        most: of either.
    """
    live = live_bytes(buffers, max(b.last for b in buffers) + 1)
    peaks = sorted(range(len(live)), key=lambda i: (-live[i], i))[:most]
    held = (b for b in buffers if b.first <= peaks[0] <= b.last)
    return peaks, sorted(held, key=lambda b: (-b.size_bytes, b.name))[:most]


def pack(
    buffers: Sequence[Buffer], align: int, *, enough_bytes: int | None = None, time_limit_s: float | None = None
) -> Arena:
    """Offsets for all buffers, in the smallest arena that is found.

    Args:
        buffers: names unique; sizes of at least a byte.
        align: every offset is a multiple of it (bytes).
        enough_bytes: no arena smaller than this is looked for.
        time_limit_s: for what placing in simple orders leaves to be searched; by default the search ends after a fixed
            effort, about a second, so that equal buffers get equal offsets on every machine.
    """
    from layoutopt.packing import pack_spans

    ordered = sorted(buffers, key=lambda b: (b.first, b.last, -b.size_bytes, b.name))
    found = pack_spans(
        [_round_up(b.size_bytes, align) for b in ordered],
        [(b.first, b.last + 1) for b in ordered],
        enough=enough_bytes,
        time_limit_s=time_limit_s,
    )
    placed = sorted(
        (Placed(b, at) for b, at in zip(ordered, found.offsets, strict=True)),
        key=lambda p: (p.offset_bytes, p.buffer.first, p.buffer.name),
    )
    return Arena(tuple(placed), found.size, fullest_bytes(buffers, align), found.size == found.bound)


def find_overlap(placed: Sequence[Placed]) -> tuple[Placed, Placed] | None:
    """Two buffers alive together that share a byte, or None.

    Step by step, what is alive is kept by offset: as long as none of it overlaps, what begins to be alive overlaps one
    of its neighbours if it overlaps anything.
    """
    alive: list[tuple[int, int]] = []  # offset and position in ``placed``
    ends: list[tuple[int, int]] = []  # last step and position
    for new in sorted(range(len(placed)), key=lambda i: placed[i].buffer.first):
        this = placed[new]
        while ends and ends[0][0] < this.buffer.first:
            gone = heappop(ends)[1]
            del alive[bisect_left(alive, (placed[gone].offset_bytes, gone))]
        at = bisect_left(alive, (this.offset_bytes, new))
        for _, other in alive[max(at - 1, 0) : at + 1]:
            that = placed[other]
            if that.offset_bytes < this.end_bytes and this.offset_bytes < that.end_bytes:
                return that, this
        insort(alive, (this.offset_bytes, new))
        heappush(ends, (this.buffer.last, new))
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
    peaks, largest = fullest_steps(buffers)
    at = ", ".join(step_names.get(i, f"step {i}") for i in peaks)
    held = ", ".join(f"{b.name} ({b.size_bytes} bytes)" for b in largest)
    raise InfeasibleError(
        f"the plan needs {arena.size_bytes} bytes of device memory ({arena.bound_bytes} alive at once), the budget is "
        f"{budget_bytes}; it peaks at {at}, where the largest buffers are {held}: allow more or use a smaller batch",
        (*(step_names.get(i, f"step {i}") for i in peaks), *(b.name for b in largest)),
    )
