"""An exhaustive search for offsets below a capacity, compiled: which buffer lies lowest, which lies next, and so on.

*Normal form*. Let every buffer of a packing fall until it rests on the floor or on a buffer that it meets. What is left
is a packing too, so it is enough to look for those at rest. They are built from below: of the buffers not yet placed
one is chosen to be the next in the order of offsets, and it lies on the highest of those placed that it meets. Ties
are placed in the order of their numbers. (MiniMalloc, Moffitt, ASPLOS 2024, builds its solutions in this order too.)

*What is cut off*, without losing a packing at rest:

- a buffer that could rest only below the last one placed waits until something that it meets has been placed under it;
- a buffer may not be chosen where another one would still fit whole below it: that one could fall;
- nothing may be chosen so high that what is still to come at some section would no longer fit above it;
- at every section (a set of buffers alive together) the lowest place at which anything can still begin, and the bytes
  still to come, must fit into the capacity;
- of buffers with equal sizes and lifetimes one is tried.

*Decomposition*. Where no buffer that is still to be placed crosses from one section to the next, the two sides are
problems of their own. A side that cannot be packed sends the search back to the choice that made it, past whatever was
chosen for other sides meanwhile.

Effort is counted in buffers and sections looked at, not in seconds, so that a limit ends every run at the same place.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["FAILED", "FOUND", "STOPPED", "search"]

Ints = NDArray[np.int64]
_Problem = tuple[Ints, Ints, Ints]
_Room = tuple[Ints, NDArray[np.int32], Ints, Ints, Ints, Ints]

FOUND, FAILED, STOPPED = 1, 0, -1
"""A packing; a proof that there is none; neither within the effort allowed."""

_POOL = 1 << 21
"""Buffers that the open choices may list together; a search that needs more stops."""

_FAR = 1 << 62


def search(size: Ints, lo: Ints, hi: Ints, capacity: int, effort: int) -> tuple[int, Ints, int]:
    """Offsets below a capacity.

    Args:
        size: units of memory by buffer, at least one each. Buffers are tried in the order of their numbers where
            several could rest equally low.
        lo: the first section at which a buffer is alive.
        hi: the section after its last.
        capacity: units of memory there are.
        effort: the search stops after about this many looks at buffers and sections.

    Returns:
        FOUND, FAILED or STOPPED; offsets by buffer, which mean something where FOUND; the effort spent.
    """
    n = len(size)
    offsets = np.zeros(n, np.int64)
    if n == 0:
        return FOUND, offsets, 0
    length = min(_POOL, n * (n + 3) // 2 + 1)
    items, rests = np.empty(length, np.int32), np.empty(length, np.int64)
    frames, nodes = np.empty((n + 2, 11), np.int64), np.empty((2 * n + 2, 6), np.int64)
    scratch, part = np.empty((8, int(hi.max()) + 2), np.int64), np.empty((2, n), np.int64)
    room = offsets, items, rests, nodes, scratch, part
    state, spent = _search((size, lo, hi), capacity, effort, frames, room)
    return int(state), offsets, int(spent)


# Columns of a frame: an open choice, over the buffers [START, START + COUNT) of the pool.
START, COUNT, CREATOR, REST, TOP, NODE_TOP, FLOOR, FLOOR_BY, AT, AT_BY, LIMIT = range(11)
# Columns of a node: a side that waits for its turn. REST, of either, is the node that follows.
N_START, N_COUNT, N_CREATOR, N_REST, N_LIMIT, N_SLACK = range(6)
# Instead of a node: everything is placed; something cannot be; the pool is too small.
_DONE, _BLOCKED, _FULL = -1, -2, -3


@njit(cache=True)  # type: ignore[untyped-decorator]
def _search(problem: _Problem, capacity: int, effort: int, frames: Ints, room: _Room) -> tuple[int, int]:
    size = problem[0]
    offsets, part = room[0], room[5]
    left, f, spent = size.size, -1, size.size
    for j in range(left):
        part[0, j], part[1, j] = j, 0
    rest, chosen, follows, top, node_top = -1, -1, _DONE, 0, 0
    while True:
        head, top, node_top, looks = _split(problem, capacity, left, rest, chosen, f, follows, top, node_top, room)
        spent += looks
        if head == _DONE:
            return FOUND, spent
        if head == _FULL:
            return STOPPED, spent
        if head != _BLOCKED:
            f += 1
            _open(frames, f, room[3], head, top, node_top)
        elif f < 0:
            return FAILED, spent
        # The next buffer of the innermost open choice that has one left.
        chosen = -1
        while chosen < 0:
            if f < 0:
                return FAILED, spent
            if spent > effort:
                return STOPPED, spent
            spent += frames[f, COUNT]
            chosen, rest = _next(problem, room, frames[f])
            if chosen < 0:
                f = frames[f, CREATOR]
        frames[f, AT], frames[f, AT_BY] = rest, chosen
        offsets[chosen] = rest
        left = _without(problem, room, frames[f], chosen, rest + size[chosen])
        follows, top, node_top = frames[f, REST], frames[f, TOP], frames[f, NODE_TOP]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _next(problem: _Problem, room: _Room, frame: Ints) -> tuple[int, int]:
    """The buffer that a choice tries next and where it rests: the lowest after the one tried last, or -1."""
    size, lo, hi = problem
    items, rests = room[1], room[2]
    floor, floor_by, at, by = frame[FLOOR], frame[FLOOR_BY], frame[AT], frame[AT_BY]
    chosen, rest = -1, frame[LIMIT]
    for k in range(frame[START], frame[START] + frame[COUNT]):
        j, r = items[k], rests[k]
        if r >= rest or r < at or r < floor or (r == floor and j < floor_by):
            continue
        if r == at and (j <= by or (size[j] == size[by] and lo[j] == lo[by] and hi[j] == hi[by])):
            continue
        chosen, rest = j, r
    return chosen, rest


@njit(cache=True)  # type: ignore[untyped-decorator]
def _without(problem: _Problem, room: _Room, frame: Ints, chosen: int, end: int) -> int:
    """Write to ``part`` what a choice leaves, with where it can rest now; returns how many."""
    _, lo, hi = problem
    items, rests, part = room[1], room[2], room[5]
    left = 0
    for k in range(frame[START], frame[START] + frame[COUNT]):
        j, r = items[k], rests[k]
        if j == chosen:
            continue
        part[0, left] = j
        part[1, left] = end if r < end and lo[j] < hi[chosen] and lo[chosen] < hi[j] else r
        left += 1
    return left


@njit(cache=True)  # type: ignore[untyped-decorator]
def _open(frames: Ints, f: int, nodes: Ints, node: int, top: int, node_top: int) -> None:
    """Make frame ``f`` the choice over what a node lists; nothing may lie lower than what its creator chose."""
    frame, creator = frames[f], nodes[node, N_CREATOR]
    frame[START], frame[COUNT] = nodes[node, N_START], nodes[node, N_COUNT]
    frame[CREATOR], frame[REST], frame[LIMIT] = creator, nodes[node, N_REST], nodes[node, N_LIMIT]
    frame[TOP], frame[NODE_TOP], frame[AT], frame[AT_BY] = top, node_top, -1, -1
    frame[FLOOR], frame[FLOOR_BY] = -1, -1
    if creator >= 0:
        frame[FLOOR], frame[FLOOR_BY] = frames[creator, AT], frames[creator, AT_BY]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _split(
    problem: _Problem,
    capacity: int,
    left: int,
    floor: int,
    floor_by: int,
    creator: int,
    rest: int,
    top: int,
    node_top: int,
    room: _Room,
) -> tuple[int, int, int, int]:
    """What ``part`` lists, checked against the capacity and taken apart into sides, the tightest in front of ``rest``.

    Returns:
        The node to go on with (or _DONE, _BLOCKED, _FULL), the new ends of the pool and of the nodes, and the effort.
    """
    size, lo, hi = problem
    offsets, items, rests, nodes, scratch, part = room
    if left == 0:
        return rest, top, node_top, 0
    if top + left > items.size:
        return _FULL, top, node_top, 0
    low, coming, crossing, side_of = scratch[0], scratch[1], scratch[2], scratch[3]
    most, slack, counts, limits = scratch[4], scratch[5], scratch[6], scratch[7]
    first, last = lo[part[0, 0]], hi[part[0, 0]]
    for k in range(1, left):
        first, last = min(first, lo[part[0, k]]), max(last, hi[part[0, k]])
    for s in range(first, last + 1):
        low[s], coming[s], crossing[s] = _FAR, 0, 0
    looks = 2 * left + last - first
    for k in range(left):
        j, r = part[0, k], part[1, k]
        if r < floor or (r == floor and j < floor_by):
            r = floor + 1  # it cannot rest yet, so that it will lie higher
        coming[lo[j]] += size[j]
        coming[hi[j]] -= size[j]
        crossing[lo[j]] += 1  # of the borders behind sections lo to hi - 2
        crossing[hi[j] - 1] -= 1
        looks += (hi[j] - lo[j]) >> 2  # compared several at once
        for s in range(lo[j], hi[j]):
            low[s] = min(low[s], r)
    sides, still, across = 0, 0, 0
    most[0], slack[0] = 0, _FAR
    for s in range(first, last):
        still += coming[s]
        across += crossing[s]
        if still > 0:
            spare = capacity - low[s] - still
            if spare < 0:
                return _BLOCKED, top, node_top, looks
            most[sides], slack[sides] = max(most[sides], still), min(slack[sides], spare)
        side_of[s] = sides
        if across == 0:
            sides += 1
            most[sides], slack[sides] = 0, _FAR
    for side in range(sides):
        counts[side], limits[side] = 0, capacity - most[side] + 1
    for k in range(left):
        j = part[0, k]
        side = side_of[lo[j]]
        counts[side] += 1
        limits[side] = min(limits[side], part[1, k] + size[j])
    # Where each side begins in the pool; ``most`` is free to say whether something can be chosen there.
    begin = low
    at = top
    for side in range(sides):
        begin[side], most[side] = at, 0
        at += counts[side]
    for k in range(left):
        j, r = part[0, k], part[1, k]
        side = side_of[lo[j]]
        items[begin[side]], rests[begin[side]] = j, r
        begin[side] += 1
        if r < limits[side] and (r > floor or (r == floor and j > floor_by)):
            most[side] = 1
    for side in range(sides):
        if counts[side] > 0 and most[side] == 0:
            return _BLOCKED, top, node_top, looks
    head = rest
    for side in range(sides):
        if counts[side] == 0:
            continue
        start = begin[side] - counts[side]
        if counts[side] == 1:
            offsets[items[start]] = rests[start]
            continue
        node = nodes[node_top]
        node[N_START], node[N_COUNT], node[N_CREATOR] = start, counts[side], creator
        node[N_LIMIT], node[N_SLACK] = limits[side], slack[side]
        before, after = -1, head
        while after != rest and nodes[after, N_SLACK] <= slack[side]:
            before, after = after, nodes[after, N_REST]
        node[N_REST] = after
        if before < 0:
            head = node_top
        else:
            nodes[before, N_REST] = node_top
        node_top += 1
    return head, at, node_top, looks
