"""The cache hierarchy: any number of set-associative levels, compiled by numba, in memory that does not grow.

A :class:`Hierarchy` is the immutable description (``simulator/hierarchy.py``); ``state()`` makes the arrays that the
compiled code updates. Level 0 is nearest to a core. A private level exists once per core, a shared level once. What a
level may do beside the usual (LRU, write-back, write-allocate) is said in :class:`Level`, and what that means exactly
in ``simulator/policies.py``.

A level may serve only buffers, or only what is read through images; the other accesses pass it by.

A *hit* is an access of one unit, a sector of the nearest level (a line where it has none), that a level serves; a
*miss* is one that it does not have. A line that is written back to a level is no access of it.
"""

from __future__ import annotations

import numpy as np

from layoutopt.errors import LayoutOptError
from simulator import plain, policies
from simulator.hierarchy import PLAIN_LOADS, Hierarchy, Level, State
from simulator.lanes import compiled
from simulator.sets import BUFFERS, CORES, IMAGES, PLAIN, SERVES, UNIT, WAYS, of

__all__ = ["BUFFERS", "IMAGES", "Hierarchy", "Level", "State", "line_access", "run_lines", "run_ranges", "unit_access"]


@compiled
def line_access(
    lines: np.ndarray,
    geometry: np.ndarray,
    core: int,
    address: int,
    write: bool,
    way: int,
    counts: np.ndarray,
    row: int,
    col: int,
) -> None:
    """One access of a byte address, served by the nearest level that has its unit.

    Args:
        lines: of the state, updated.
        geometry: of the state.
        core: which core asks.
        address: byte address, not negative.
        write: store rather than load.
        way: BUFFERS or IMAGES.
        counts: int64 in one piece, increased in ``counts[row, col : col + 2 * levels + 2]``: hits and misses per level
            in turn, then bytes read from memory and bytes written to it. Where the array has columns for all
            ``Hierarchy.counters``, these follow: memory accesses that find their row open and those that do not, then
            per level misses for want of the line rather than of a sector, sectors written back to it, and those of
            them whose line it did not have.
        row: which row.
        col: first column.
    """
    levels = geometry.shape[0]
    wide = counts.shape[1] >= col + 5 * levels + 4
    tally = counts.ctypes.data + 8 * (row * counts.shape[1] + col)
    unit_access(lines.ctypes.data, geometry.ctypes.data, core, address, write, way, tally, wide)


@compiled
def unit_access(cells: int, table: int, core: int, address: int, write: bool, way: int, tally: int, wide: bool) -> None:
    """``line_access`` by addresses, as ``simulator/lanes.py`` says; ``tally`` is where the counters are."""
    if of(table, 0, PLAIN) & (way if write else PLAIN_LOADS):
        plain.access(cells, table, core, address, write, way, tally, wide)
    elif write or not policies.load_hits(cells, table, core, address, way, tally):
        policies.access(cells, table, core, address, write, way, tally, wide)


@compiled
def _run(
    lines: np.ndarray,
    geometry: np.ndarray,
    core: int,
    addresses: np.ndarray,
    lengths: np.ndarray,
    writes: np.ndarray,
    way: int,
    counts: np.ndarray,
    fixed: tuple,
    fixed_2: tuple,
) -> None:
    near, levels = 0, geometry.shape[0]
    while near + 1 < levels and not geometry[near, SERVES] & way:
        near += 1
    cells, table, tally = lines.ctypes.data, geometry.ctypes.data, counts.ctypes.data
    wide = counts.size >= 5 * levels + 4
    if geometry[0, PLAIN] & geometry[near, SERVES] & way:
        plain.run(cells, table, near, core, addresses, lengths, writes, way, tally, wide, fixed, fixed_2)
        return
    shift = geometry[near, UNIT]
    for i in range(addresses.size):
        write = writes[i if writes.size > 1 else 0]
        length = lengths[i if lengths.size > 1 else 0]
        for unit in range(addresses[i] >> shift, ((addresses[i] + length - 1) >> shift) + 1):
            unit_access(cells, table, core, unit << shift, write, way, tally, wide)


_COMMON_WAYS = ((8, 16), (12, 16), (4, 16))
"""Of the two nearest levels: compiled each for itself, with the numbers known."""

_ONE_BYTE = np.ones(1, dtype=np.int64)


def run_lines(
    state: State,
    core: int,
    addresses: np.ndarray,
    writes: np.ndarray | bool,
    counts: np.ndarray,
    way: int = BUFFERS,
) -> None:
    """``line_access`` for each of an array of byte addresses.

    Args:
        state: updated.
        core: which core asks.
        addresses: int64, not negative.
        writes: bool, stores rather than loads; one for each address, or one for all.
        counts: int64 [2 * levels + 2] or [``Hierarchy.counters``], increased.
        way: BUFFERS or IMAGES.
    """
    run_ranges(state, core, addresses, _ONE_BYTE, writes, counts, way)


def run_ranges(
    state: State,
    core: int,
    starts: np.ndarray,
    lengths: np.ndarray | int,
    writes: np.ndarray | bool,
    counts: np.ndarray,
    way: int = BUFFERS,
) -> None:
    """``line_access`` for each unit that each of an array of address ranges touches, in order.

    Args:
        state: updated.
        core: which core asks.
        starts: int64, first byte of each range, not negative.
        lengths: int64, bytes of each, at least one; or one number for all.
        writes: bool, stores rather than loads; one for each range, or one for all.
        counts: int64 [2 * levels + 2] or [``Hierarchy.counters``], increased.
        way: BUFFERS or IMAGES.

    Raises:
        LayoutOptError: an address is negative, a range empty, there are not as many of one as of the other, there is no
            such core, or the counters are too few.
    """
    starts = np.ascontiguousarray(starts, dtype=np.int64)
    long = np.ascontiguousarray(np.atleast_1d(lengths), dtype=np.int64)
    stores = np.ascontiguousarray(np.atleast_1d(writes), dtype=np.bool_)
    levels, cores = state.geometry.shape[0], int(state.geometry[0, CORES])
    if counts.dtype != np.int64 or not counts.flags.c_contiguous or counts.size < 2 * levels + 2 or counts.ndim != 1:
        raise LayoutOptError(
            f"counters {counts.dtype} {list(counts.shape)}: expected an int64 array in one piece, of {2 * levels + 2} "
            "or more"
        )
    if not 0 <= core < cores:
        raise LayoutOptError(f"core {core}: this hierarchy has cores 0 to {cores - 1}")
    if not starts.size:
        return
    if starts.min() < 0 or long.min() < 1 or {long.size, stores.size} - {1, starts.size}:
        raise LayoutOptError(
            f"{starts.size} address ranges from {starts.min()} on, {long.size} lengths from {long.min()} on and "
            f"{stores.size} stores: expected addresses of at least 0, lengths of at least 1, and as many or one of each"
        )
    ways = [int(row[WAYS]) for row in state.geometry if row[SERVES] & way]
    fixed = tuple((None,) * n for n in ways[:2]) if tuple(ways[:2]) in _COMMON_WAYS else ((), ())
    _run(state.lines, state.geometry, core, starts, long, stores, way, counts, *fixed)
