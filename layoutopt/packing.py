"""Buffers of known lifetimes in as little memory as possible: exact where the search comes to its end.

The problem is *dynamic storage allocation*: a rectangle per buffer, as long as its lifetime, as high as its size, may
move up and down only. It is NP-hard. In turn:

1. *Sections*. Of all steps only those matter at which a largest set of buffers is alive, none of which holds another.
2. *Parts* (exact). What is alive at every section lies below everything else. Where nothing is alive on both sides of a
   border between sections, the sides are parts of their own. Both again, until neither applies.
3. *Orders*. Buffers of a part are placed one by one, each in the tightest gap, or the lowest, among those it meets: by
   size, lifetime, area, by how full the fullest of their sections is and how far from them. What does not fit is placed
   first in a next round. Most parts reach the bytes alive at the fullest section this way, below which nothing can be
   packed.
4. *Search* (``packsearch``). First at the bound, then at capacities between it and the best packing known, halving
   the difference: a proof that there is none raises the bound.

Effort is counted, so that equal input gives equal offsets on every machine, unless a time limit ends the search first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from layoutopt.packsearch import FAILED, FOUND, STOPPED, search

__all__ = ["Packing", "pack_spans"]

Ints = NDArray[np.int64]

EFFORT = 100_000_000
"""What the searches may spend where no time is given: about a second."""

_USUAL_RATE = 1e8
"""Effort a second, until a search has said."""

_ROUNDS = 8
"""How often an order is mended before the search."""

_AGAIN = 400_000_000
"""Pairs of buffers that mending all orders may look at: less than a second."""

_FIRST_TRY = 1 << 19
"""Effort of the first search of each order; it grows fourfold when all orders have had theirs."""


@dataclass(frozen=True)
class Packing:
    """Offsets by buffer, their end, and the least end that any packing can have as far as is proven."""

    offsets: tuple[int, ...]
    size: int
    bound: int


@dataclass(frozen=True)
class _Part:
    """Buffers that can be packed apart from all others, in sections of their own, above ``base``."""

    members: Ints
    base: int
    size: Ints
    steps: Ints
    lo: Ints
    hi: Ints

    @property
    def live(self) -> Ints:
        """Units alive by section."""
        return _live(self.size, self.lo, self.hi)


def _live(size: Ints, lo: Ints, hi: Ints) -> Ints:
    change = np.zeros(int(hi.max()) + 1, np.int64)
    np.add.at(change, lo, size)
    np.subtract.at(change, hi, size)
    return np.cumsum(change)[:-1]


class _Purse:
    """What the searches may still spend: a fixed effort, or seconds at the rate of those before."""

    def __init__(self, time_limit_s: float | None) -> None:
        self._deadline = None if time_limit_s is None else time.perf_counter() + time_limit_s
        self._rate = _USUAL_RATE
        self._spent = 0

    def left(self) -> int:
        """Effort that is left."""
        if self._deadline is None:
            return EFFORT - self._spent
        return int((self._deadline - time.perf_counter()) * self._rate)

    def pay(self, spent: int, seconds: float) -> None:
        """Take what a search has spent, and learn how fast searches are."""
        self._spent += spent
        if spent >= _FIRST_TRY // 2:
            self._rate = spent / max(seconds, 1e-3)


def pack_spans(
    sizes: Sequence[int],
    spans: Sequence[tuple[int, int]],
    *,
    enough: int | None = None,
    time_limit_s: float | None = None,
) -> Packing:
    """Offsets for buffers that are alive during half-open spans.

    Args:
        sizes: units of memory by buffer, at least one each.
        spans: the first step of each and the step after its last.
        enough: no packing smaller than this is looked for, and all time is given to one of this size.
        time_limit_s: for the searches; by default they end after a fixed effort, about a second, so that the result
            does not depend on the machine.
    """
    if not sizes:
        return Packing((), 0, 0)
    unit = math.gcd(*sizes)
    size = np.asarray(sizes, np.int64) // unit
    lower, upper = (np.asarray(ends, np.int64) for ends in zip(*spans, strict=True))
    purse = _Purse(time_limit_s)
    offsets = np.zeros(len(sizes), np.int64)
    parts = list(_parts(size, lower, upper, offsets))
    live = int(_live(size, *_sections(lower, upper)).max())
    target, bound = max(live, (enough or 0) // unit), live
    # The fullest parts first: where one of them needs more, the others may have as much.
    for part in sorted(parts, key=lambda part: (-part.base - int(part.live.max()), part.members[0])):
        found, end, least = _pack_part(part, target - part.base, purse, 0.5 if enough is None else 1.0)
        offsets[part.members] = part.base + found
        target, bound = max(target, part.base + end), max(bound, part.base + least)
    size_units = int((offsets + size).max())
    return Packing(tuple(int(at) * unit for at in offsets), size_units * unit, min(bound, size_units) * unit)


# ---- parts ----------------------------------------------------------------------------------------------------------


def _sections(lower: Ints, upper: Ints) -> tuple[Ints, Ints]:
    """Lifetimes in sections: a section ends where a buffer does after another has begun."""
    n = len(lower)
    steps, begins = np.concatenate([upper, lower]), np.repeat([0, 1], n)
    order = np.lexsort((begins, steps))
    ordered = begins[order]
    ends = np.zeros(2 * n, np.int64)
    ends[1:] = (ordered[1:] == 0) & (ordered[:-1] == 1)
    section = np.empty(2 * n, np.int64)
    section[order] = np.cumsum(ends)
    return section[n:], section[:n]


def _parts(size: Ints, lower: Ints, upper: Ints, offsets: Ints) -> Iterator[_Part]:
    """Parts that cannot be taken apart further; ``offsets`` of what lies below one are written."""
    waiting = [(np.arange(len(size)), 0)]
    while waiting:
        members, base = waiting.pop()
        lo, hi = _sections(lower[members], upper[members])
        whole = (lo == 0) & (hi == hi.max())
        if whole.any():
            below = members[whole]
            offsets[below] = base + np.cumsum(size[below]) - size[below]
            base += int(size[below].sum())
            if whole.all():
                continue
            waiting.append((members[~whole], base))
            continue
        across = np.zeros(int(hi.max()) + 1, np.int64)  # by border, the one before its section
        np.add.at(across, lo + 1, 1)
        np.subtract.at(across, hi, 1)
        sides = np.cumsum(np.cumsum(across)[:-1] == 0)
        side = sides[lo]
        if side[0] == side.min() == side.max():
            yield _Part(members, base, size[members], upper[members] - lower[members], lo, hi)
            continue
        order = np.argsort(side, kind="stable")
        cuts = np.flatnonzero(np.diff(side[order])) + 1
        waiting += [(group, base) for group in np.split(members[order], cuts)]


# ---- a part ---------------------------------------------------------------------------------------------------------


def _pack_part(part: _Part, target: int, purse: _Purse, share: float) -> tuple[Ints, int, int]:
    """Offsets, their end, and the least end that is possible.

    Args:
        part: to pack.
        target: no end below it is looked for.
        purse: pays for searches.
        share: of what is left in it, for the search at the least end that may be possible.
    """
    bound = int(part.live.max())
    best, end = _by_orders(part, target)
    low = max(bound, target)
    capacity = low
    while end > low and purse.left() > 0:
        state, found = _search_orders(part, capacity, purse, purse.left() * (1 - share))
        if state == FOUND:
            best, end = found, int((found + part.size).max())
        else:
            low = capacity + 1
            bound = low if state == FAILED else bound
        capacity, share = (low + end - 1) // 2, 0.25
    return best, end, min(bound, end)


def _keys(part: _Part) -> dict[str, Ints]:
    """What buffers are ordered by, the largest first."""
    live, lo, hi = part.live, part.lo, part.hi
    alive = [live[a:b] for a, b in zip(lo, hi, strict=True)]
    peak = int(live.argmax())
    return {
        "size": part.size,
        "width": hi - lo,
        "steps": part.steps,
        "area": part.size * (hi - lo),
        "fullest": np.array([own.max() for own in alive], np.int64),
        "emptiest": -np.array([own.min() for own in alive], np.int64),
        "early": -lo,
        "near": -np.maximum(0, np.maximum(lo - peak, peak - hi + 1)),  # to the fullest section
    }


def _by_orders(part: _Part, target: int) -> tuple[Ints, int]:
    """The best of placing one by one, and its end.

    Each order is tried as it is. Then, the most promising first, whatever ended above the target is moved to the front
    of its order and all is placed again, a few times over.
    """
    keys = _keys(part)
    keys |= {"late": part.lo, "far": -keys["near"]}
    sorts = (
        ("size",),
        ("width", "size"),
        ("area",),
        ("near", "late", "width"),
        ("fullest", "size"),
        ("fullest", "area"),
        ("fullest", "width", "size"),
        ("fullest", "far"),
        ("size", "width"),
    )
    best, end = np.zeros(0, np.int64), 1 << 62
    tried: list[tuple[int, int, bool, Ints, Ints]] = []
    for tightest in (True, False):
        for names in sorts:
            order = np.lexsort((part.lo, *(-keys[name] for name in reversed(names))))
            offsets = _place(part.size, part.lo, part.hi, order, tightest)
            reached = int((offsets + part.size).max())
            if reached < end:
                best, end = offsets, reached
            if end <= target:
                return best, end
            tried.append((reached, len(tried), tightest, order, offsets))
    left = _AGAIN // len(part.size) ** 2
    for _, _, tightest, order, offsets in sorted(tried, key=lambda t: t[:2]):
        for _ in range(min(_ROUNDS, left)):
            above = (offsets + part.size)[order] > target
            order = np.concatenate([order[above], order[~above]])
            offsets = _place(part.size, part.lo, part.hi, order, tightest)
            left -= 1
            reached = int((offsets + part.size).max())
            if reached < end:
                best, end = offsets, reached
            if end <= target:
                return best, end
    return best, end


@njit(cache=True)  # type: ignore[untyped-decorator]
def _place(size: Ints, lo: Ints, hi: Ints, order: Ints, tightest: bool) -> Ints:
    """Offsets of buffers placed one by one: each in the tightest, or the lowest, gap among those it meets."""
    n = order.size
    offsets, placed = np.zeros(size.size, np.int64), np.empty(n, np.int64)  # placed: by offset
    for count in range(n):
        j = order[count]
        free, found, best = 0, -1, 0
        for k in range(count):
            other = placed[k]
            if lo[other] >= hi[j] or lo[j] >= hi[other]:
                continue
            gap = offsets[other] - free
            if gap >= size[j] and (found < 0 or gap < best):
                found, best = free, gap
                if not tightest:
                    break
            free = max(free, offsets[other] + size[other])
        offsets[j] = found if found >= 0 else free
        k = count
        while k > 0 and offsets[placed[k - 1]] > offsets[j]:
            placed[k] = placed[k - 1]
            k -= 1
        placed[k] = j
    return offsets


def _ranks(part: _Part) -> list[Ints]:
    """Orders in which the search tries buffers that rest equally low; equal buffers are neighbours in all of them.

    The time that a search takes is spread over many magnitudes, so that many orders tried for a short time do better
    than one for long: each of these packs some hard instance that most others do not.
    """
    keys = _keys(part)
    keys["small"] = -part.size
    sorts = (
        ("fullest", "area", "width"),
        ("early", "width"),
        ("near", "emptiest"),
        ("fullest", "steps"),
        ("early", "small"),
        ("width", "area", "fullest"),
        ("area", "fullest"),
        ("fullest", "width", "area"),
        ("near", "area"),
        ("size", "width"),
    )
    return [np.lexsort((part.size, part.hi, part.lo, *(-keys[name] for name in reversed(names)))) for names in sorts]


def _search_orders(part: _Part, capacity: int, purse: _Purse, keep: float) -> tuple[int, Ints]:
    """Search with every order in turn, ever longer, until one comes to its end or ``keep`` is left in the purse."""
    ranks, each = _ranks(part), _FIRST_TRY
    while True:
        for rank in ranks:
            allowed = min(each, int(purse.left() - keep))
            if allowed <= 0:
                return STOPPED, np.zeros(0, np.int64)
            began = time.perf_counter()
            state, found, spent = search(part.size[rank], part.lo[rank], part.hi[rank], capacity, allowed)
            purse.pay(spent, time.perf_counter() - began)
            if state != STOPPED:
                offsets = np.empty_like(found)
                offsets[rank] = found
                return state, offsets
        each *= 4
