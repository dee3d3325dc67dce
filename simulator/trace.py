"""Address streams: a kernel's loop nest walked in dispatch order, straight into the cache hierarchy.

Nothing is stored: the compiled walker (``simulator/walker.py``) works out each access' coordinates from the flattened
nest (``simulator/flatten.py``), its element offset from the operand's layout, and touches the lines. What the walker
does is what the kernels do: tests compare it, access by access, with instrumented runs of the same OpenCL code
(``kernels/instrument.py``).

Work groups go to cores in turn. Within a group, ``wave`` neighbouring work items execute together: the lines that one
instruction touches over the lanes of a wave are touched once each, as a coalescing memory unit does; on a CPU the wave
is one work item. A vector is moved in the pieces that are contiguous in its layout, as the kernels' macros do, each of
them an instruction. What overlaps in time is a :class:`Schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layoutopt.errors import LayoutOptError
from simulator.cache import State
from simulator.flatten import TexelBlock, Walk, compile_launch
from simulator.walker import lane_parts, walk_groups

__all__ = ["Schedule", "Stream", "TexelBlock", "Walk", "compile_launch", "stream", "walk"]


@dataclass(frozen=True)
class Schedule:
    """What runs at once on a core, and how it takes turns. The default is one work group after the other.

    Attributes:
        resident: work groups that a core runs at once; 0: the groups of all cores run one after the other, as on a CPU
            whose groups are long. Otherwise ``cores * resident`` groups are under way, and the next one begins where
            one ends.
        turn: instructions that a wave issues before the next wave goes on, rounded up to the end of an iteration of its
            innermost loop; 0: all of a phase. Waves of a group wait for each other at the ends of phases.
    """

    resident: int = 0
    turn: int = 0

    def __post_init__(self) -> None:
        if self.resident < 0 or self.turn < 0:
            raise LayoutOptError(f"a schedule of {self.resident} resident groups and turns of {self.turn}: at least 0")


@dataclass(frozen=True)
class Stream:
    """What a launch reads and writes, one entry per piece that a work item moves, in the order of the walk.

    Attributes:
        group: work group, in dispatch order.
        item: work item within it, the fastest dimension first.
        operand: position in the kernel.
        offset_elems: first element in the operand's storage.
        width: elements.
        write: store rather than load.
        request: equal for what the lanes of a wave move at once.
    """

    group: np.ndarray
    item: np.ndarray
    operand: np.ndarray
    offset_elems: np.ndarray
    width: np.ndarray
    write: np.ndarray
    request: np.ndarray


def walk(
    launch: Walk,
    state: State,
    addresses: np.ndarray,
    counts: np.ndarray,
    first: int,
    last: int,
    cores: int,
    wave: int,
    schedule: Schedule = Schedule(),
    requests: np.ndarray | None = None,
    request_bytes: tuple[int, int] = (128, 32),
) -> None:
    """Run work groups ``first`` to ``last`` (excluded) through the caches.

    Args:
        launch: the flattened launch.
        state: caches, updated.
        addresses: byte address of each operand's allocation, by operand position.
        counts: int64 [operands, 3 + 2 * levels + 2 or more], increased: instructions, lines, bytes asked for, then the
            hierarchy's counters (see ``line_access``). A vector counts as an instruction per contiguous piece.
        first: first group.
        last: end of the groups.
        cores: cores that take groups in turn.
        wave: work items that execute together.
        schedule: what runs at once.
        requests: int64 [operands, 3], increased: requests of waves, lines that each of them touches (tag look-ups), and
            sectors.
        request_bytes: of those lines and sectors, powers of two.
    """
    assert counts.shape[0] >= launch.bases.size, "a row of counters for each operand"
    assert counts.shape[1] >= 5 + 2 * state.geometry.shape[0], "counters for each level"
    shifts = [size.bit_length() - 1 if requests is not None else 0 for size in request_bytes]
    span = np.array([first, last, cores, schedule.resident, schedule.turn, launch.shared, 0, *shifts], dtype=np.int64)
    counted = np.zeros((1, 3), dtype=np.int64) if requests is None else requests
    _run(launch, span, wave, addresses, state.lines, state.geometry, counts, counted, _NOTHING)


def stream(
    launch: Walk,
    first: int = 0,
    last: int | None = None,
    wave: int = 1,
    cores: int = 1,
    schedule: Schedule = Schedule(),
) -> Stream:
    """The accesses of work groups ``first`` to ``last`` (excluded) as the walker makes them, for small launches."""
    last = launch.groups if last is None else last
    span = np.array([first, last, cores, schedule.resident, schedule.turn, launch.shared, 1, 0, 0], dtype=np.int64)
    empty = np.zeros((1, 6), dtype=np.int64)
    addresses = np.zeros(launch.bases.size, dtype=np.int64)
    records = _NOTHING
    for _ in range(2):  # first how many there are
        needed = _run(launch, span, wave, addresses, empty[0], empty, empty, empty, records)
        if records.shape[0] < needed:
            records = np.zeros((needed, 6), dtype=np.int64)
    group, item, operand, offset, width, word = records.T
    return Stream(group, item, operand, offset, width, word % 2 == 1, word // 2)


_NOTHING = np.zeros((0, 6), dtype=np.int64)


def _run(
    launch: Walk,
    span: np.ndarray,
    wave: int,
    addresses: np.ndarray,
    lines: np.ndarray,
    geometry: np.ndarray,
    counts: np.ndarray,
    requests: np.ndarray,
    records: np.ndarray,
) -> int:
    if wave not in launch.memo:
        launch.memo[wave] = lane_parts(
            launch.item_extents, wave, launch.coords, launch.terms, launch.meta, launch.lists
        )
    parts, agree, at_once = launch.memo[wave]
    return int(
        walk_groups(
            span,
            launch.group_extents,
            launch.items,
            wave,
            launch.phases,
            launch.extents,
            launch.meta,
            launch.lists,
            launch.coords,
            launch.terms,
            launch.tables,
            launch.bases,
            launch.blocks,
            launch.data,
            parts,
            agree,
            at_once,
            addresses,
            lines,
            geometry,
            counts,
            requests,
            records,
        )
    )
