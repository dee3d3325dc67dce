"""Walking a simplified domain: which of its digits become work groups, work items and sequential loops.

The domain of a point-by-point kernel is walked in the storage order of its lead operand: each mode of the lead is a
*digit*, largest stride outermost. The innermost digit is walked in vectors where its stride is 1. On a CPU the digits
are cut so that a work group is one item that walks about ``chunk`` elements; on a GPU every item does one vector and
neighbouring items neighbouring vectors. C text and nest come from the same indices, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kernels.families.common import decode_c, index_c, largest_divisor, ndrange
from kernels.nest import Access, Index, Loop, Nest, Phase, Term
from kernels.spec import Launch, Text
from layoutopt.layout import Layout

__all__ = ["Walk", "fat_walk", "thin_walk", "walk_launch"]

_THIN_ITEMS = 128


@dataclass(frozen=True)
class _Digit:
    axis: int
    weight: int
    extent: int
    stride: int
    outermost: bool


@dataclass(eq=False)
class Walk:
    """A walk over a domain: loops, and the coordinate of each axis at the start of the innermost vector loop.

    Complete when ``fat_walk`` or ``thin_walk`` hands it out, and never changed afterwards: equal questions get the same
    walk, which can be a key itself.

    Attributes:
        shape: the domain.
        width: vector width along ``axis``.
        axis: the vector's axis.
        span: coordinates of ``axis`` that one run of the vector loop covers.
        grid: group and item loops.
        seq: sequential loops outside the vector loop.
        coords: start coordinate per axis.
        overhang: axes whose coordinate may pass the shape.
        memo: coordinates and nests that kernels over this walk have asked for.
    """

    shape: tuple[int, ...]
    width: int
    axis: int
    span: int
    grid: list[Loop] = field(default_factory=list)
    seq: list[Loop] = field(default_factory=list)
    coords: list[Index] = field(default_factory=list)
    overhang: set[int] = field(default_factory=set)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def _add(self, axis: int, name: str, coef: int) -> None:
        self.coords[axis] = self.coords[axis] + Index(0, (Term(name, coef),))

    # ---- the nest ---------------------------------------------------------------------------------------------

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Sequential loops of the nest, the vector loop last (absent where it runs once)."""
        vectors = self.span // self.width
        return (*self.seq, *([Loop("v", vectors)] if vectors > 1 else []))

    def accesses(self, operand: int, write: bool, shift: Sequence[int] | None = None) -> list[Access]:
        """What one operand is accessed at: the vectors, and one by one what is left over at the axis' end.

        Where a span may pass the shape, the nest has no separate remainder: its last vector is clipped at the shape,
        which are the elements that the kernel then does one by one.

        Args:
            operand: position in the kernel.
            write: store or load.
            shift: constant added per axis (a part's place in a concatenation).
        """
        key = "at", tuple(shift or ())
        if key not in self.memo:
            self.memo[key] = self._places(shift or [0] * len(self.shape))
        vector, singles = self.memo[key]
        out = [Access(operand, vector, self.width, self.axis, write)]
        return out + [Access(operand, place, 1, 0, write, len(self.seq)) for place in singles]

    def _places(self, shift: Sequence[int]) -> tuple[tuple[Index, ...], list[tuple[Index, ...]]]:
        moved = [c + s for c, s in zip(self.coords, shift, strict=True)]
        vector = list(moved)
        if self.span // self.width > 1:
            vector[self.axis] = vector[self.axis] + Index(0, (Term("v", self.width),))
        singles = []
        n, tail = self.shape[self.axis], self.shape[self.axis] % self.width
        if tail and self.axis not in self.overhang:
            for t in range(tail):
                single = list(moved)
                single[self.axis] = single[self.axis] + (n - tail + t)
                singles.append(tuple(single))
        return tuple(vector), singles

    def nest(self, accesses: Sequence[Access], flops: int = 0) -> Nest:
        """The walk around ``accesses`` of one vector step; ``flops`` is the arithmetic of one element."""
        return Nest(tuple(self.grid), (Phase(self.loops, tuple(accesses), flops * self.width),))

    def whole(self, reads: tuple[int, ...], writes: tuple[int, ...], flops: int) -> Nest:
        """The nest that reads and writes whole operands; programs that touch the same ones share it."""
        key = reads, writes, flops
        if key not in self.memo:
            accesses = [a for i in reads for a in self.accesses(i, False)]
            self.memo[key] = self.nest([*accesses, *(a for i in writes for a in self.accesses(i, True))], flops)
        nest: Nest = self.memo[key]
        return nest

    # ---- the code ---------------------------------------------------------------------------------------------

    def code(self, vector: Callable[[list[str]], str], scalar: Callable[[list[str]], str]) -> str:
        """C statements of the whole walk.

        Args:
            vector: statement for a vector at given C coordinates.
            scalar: statement for one element.
        """
        n = self.shape[self.axis]
        coords = [index_c(c) for c in self.coords]
        start = coords[self.axis]
        coords[self.axis] = "c"
        span = f"c+{self.span}"
        end = f"{span} < {n} ? {span} : {n}" if self.axis in self.overhang else f"c+{min(self.span, n)}"
        inner = f"int c = {start}; const int end = {end}; "
        inner += f"for (; c + {self.width} <= end; c += {self.width}) {{ {vector(coords)} }} "
        if self.width > 1 and (n % self.width or self.span % self.width):
            inner += f"for (; c < end; ++c) {{ {scalar(coords)} }} "
        guards = [f"{coords[a]} < {self.shape[a]}" for a in sorted(self.overhang) if a != self.axis]
        if guards:
            inner = f"if ({' && '.join(guards)}) {{ {inner}}} "
        for loop in reversed(self.seq):
            inner = f"for (int {loop.name} = 0; {loop.name} < {loop.extent}; ++{loop.name}) {{ {inner}}} "
        return f"{decode_c(self.grid)} {inner}"


def _digits(lead: Layout, exact: int) -> list[_Digit]:
    out = []
    for axis, n in enumerate(lead.shape):
        modes = lead.axis_modes(axis)
        weight = 1
        for position, mode in reversed(list(enumerate(modes))):
            extent = -(-n // weight) if position == 0 else mode.extent
            out.append(_Digit(axis, weight, extent, mode.stride, position == 0 and axis != exact))
            weight *= mode.extent
        if not modes:
            out.append(_Digit(axis, 1, n, 0, axis != exact))
    return sorted(out, key=lambda d: -d.stride)


def _start(lead: Layout, width: int, exact: int) -> tuple[Walk, list[_Digit]] | None:
    digits = _digits(lead, exact)
    # The innermost loop counts coordinates one by one: it takes an axis' innermost digit, even where another digit of
    # that axis lies denser in storage (columns cut at places where some operand's padding forbids to cut the domain).
    position = max(i for i, digit in enumerate(digits) if digit.weight == 1)
    if width > 1 and position + 1 != len(digits):
        return None
    digits.append(digits.pop(position))
    inner = digits[-1]
    if width > 1 and (inner.stride != 1 or inner.extent < width or (not inner.outermost and inner.extent % width)):
        return None
    walk = Walk(lead.shape, width, inner.axis, inner.extent, coords=[Index()] * lead.rank)
    return walk, digits


def _share_out(walk: Walk, lead: Layout, digit: _Digit, name: str, steps: int, block: int, weight: int) -> int:
    """Cut a digit's steps of ``weight`` into work groups of ``block``; how many they are."""
    blocks = -(-steps // block)
    tiled = not digit.outermost or digit.weight > 1
    passes = blocks * block * weight > lead.shape[digit.axis]
    if passes or (tiled and lead.padded(digit.axis) != lead.shape[digit.axis]):
        walk.overhang.add(digit.axis)
    if blocks > 1:
        walk.grid.insert(0, Loop(name, blocks, "group"))
        walk._add(digit.axis, name, weight * block)
    return blocks


@lru_cache(maxsize=1 << 14)
def fat_walk(lead: Layout, width: int, chunk: int, exact: int = -1) -> Walk | None:
    """One item a group, each walking about ``chunk`` elements in the lead's storage order.

    ``exact`` is an axis without padding that no loop may overshoot: where an operand is accessed at a shift along it,
    what lies past the domain's end is not past the operand's.

    Returns:
        None where the lead has no run of ``width`` elements.
    """
    started = _start(lead, width, exact)
    if started is None:
        return None
    walk, digits = started
    done = 1
    for position, digit in reversed(list(enumerate(digits))):
        vectors = position == len(digits) - 1
        multiple = width if vectors else 1
        wanted = max(chunk // done, multiple)
        if digit.extent <= wanted:
            block = digit.extent
        elif digit.outermost:
            blocks = -(-digit.extent // wanted)
            block = -(-digit.extent // blocks)
            block = -(-block // multiple) * multiple
        else:
            block = largest_divisor(digit.extent, wanted, multiple)
        blocks = _share_out(walk, lead, digit, f"g{position}", digit.extent, block, digit.weight)
        if vectors:
            walk.span = block
        elif block > 1:
            walk.seq.insert(0, Loop(f"s{position}", block))
            walk._add(digit.axis, f"s{position}", digit.weight)
        done = chunk if blocks > 1 else done * block
    walk.grid = walk.grid or [Loop("g", 1, "group")]
    return walk


@lru_cache(maxsize=1 << 14)
def thin_walk(lead: Layout, width: int, exact: int = -1) -> Walk | None:
    """One vector an item, neighbouring items along the lead's storage order; ``exact`` as in ``fat_walk``.

    Returns:
        None where the lead has no run of ``width`` elements.
    """
    started = _start(lead, width, exact)
    if started is None:
        return None
    walk, digits = started
    items = 1
    local: list[Loop] = []
    for position, digit in reversed(list(enumerate(digits))):
        vectors = position == len(digits) - 1
        weight = digit.weight * (width if vectors else 1)
        steps = -(-digit.extent // width) if vectors else digit.extent
        block = min(steps, max(_THIN_ITEMS // items, 1))
        if not digit.outermost:
            block = largest_divisor(steps, block)
        _share_out(walk, lead, digit, f"g{position}", steps, block, weight)
        if block > 1:
            local.insert(0, Loop(f"i{position}", block, "item"))
            walk._add(digit.axis, f"i{position}", weight)
        items *= block
    walk.span = width
    walk.grid = [*(walk.grid or [Loop("g", 1, "group")]), *(local or [Loop("i", 1, "item")])]
    return walk


def walk_launch(
    walk: Walk,
    operands: Sequence[tuple[str, int]],
    nest: Nest,
    step: Callable[[int, list[str]], str],
    functions: Callable[[], str] = str,
) -> Launch:
    """The launch that does one statement at every point of a walk.

    Args:
        walk: loops and coordinates.
        operands: (C name, position) in argument order.
        nest: the walk's, around the accesses of one statement.
        step: C statement for a width at C coordinates.
        functions: the text of C functions that the statement calls.
    """
    global_size, local_size = ndrange(walk.grid)
    params = ", ".join(f"{name}_ARG" for name, _ in operands)

    def text() -> str:
        code = walk.code(lambda at: step(walk.width, at), lambda at: step(1, at))
        return f"{functions()}\n#define PARAMS {params}\n#define WALK {code}"

    defines = (("LOCAL", local_size[0]),)
    return Launch("pointwise.cl", "pointwise", tuple(operands), nest, global_size, local_size, defines, Text(text))
