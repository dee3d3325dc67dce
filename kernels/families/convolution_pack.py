"""Copies for convolutions: an image with its border of zeros, or weights flipped and in panels, into a workspace."""

from __future__ import annotations

from functools import lru_cache

from kernels.families.common import decode_c, index_c, ndrange
from kernels.nest import Access, Index, Loop, Nest, Phase, Term
from kernels.spec import Launch
from layoutopt.layout import Layout

__all__ = ["Source", "fill", "pack"]

Source = tuple[Index, ...]
"""Per axis of the source its coordinate, over loops named d0…d4: the destination's coordinates."""

_ROW_ELEMS = 1024
_BLOCK = 16
_THIN_ITEMS = 64


@lru_cache(maxsize=1 << 13)
def pack(source: int, s: Layout, at: Source, target: int, d: Layout, device: str) -> Launch:
    """``d[d0..d4] = s[at]``, zero where that lies outside.

    Args:
        source: operand position.
        s: its layout.
        at: where each element comes from.
        target: operand position.
        d: the layout of five axes that this launch indexes it by.
        device: "cpu" or "gpu".
    """
    inner = _inner(d)
    strides = [_source_stride(s, at, a) for a in range(5)]
    along = min((a for a in range(5) if d.shape[a] >= _BLOCK // 2), key=lambda a: strides[a], default=inner)
    staged = device == "cpu" and along != inner and strides[along] == 1
    outer = along if staged else _next(d, inner)
    cut = _Cut(d, inner, outer, device, 4 * _BLOCK if staged else _ROW_ELEMS, strides)
    coords = cut.coords
    read = Access(source, tuple(_substitute(x, coords) for x in at))
    write = Access(target, coords, write=True)
    f, e = cut.loops
    phases = (Phase((e, f), (read,)), Phase((f, e), (write,))) if staged else (Phase((f, e), (read, write)),)
    low, high, inside = _bounds(s, at, outer if staged else inner, d)
    value = f"S_AT({','.join(index_c(x) for x in at)})"
    step = _source_step(s, at, outer if staged else inner)
    constants: dict[str, str | int] = {
        "STAGED": int(staged),
        "LOW": low,
        "HIGH": high,
        "INSIDE": inside,
        "VALUE": value,
        "S_STEP": step,
    }
    return cut.launch((("S", source), ("D", target)), phases, constants, ((source, s), (target, d)))


@lru_cache(maxsize=1 << 12)
def fill(target: int, d: Layout, device: str) -> Launch:
    """Zeros over a layout of five axes."""
    inner = _inner(d)
    cut = _Cut(d, inner, _next(d, inner), device, _ROW_ELEMS, [0] * 5)
    f, e = cut.loops
    phases = (Phase((f, e), (Access(target, cut.coords, write=True),)),)
    constants: dict[str, str | int] = {"FILL": 1, "STAGED": 0, "LOW": 0, "HIGH": 0, "INSIDE": "0", "S_STEP": 0}
    return cut.launch((("D", target),), phases, constants, ((target, d),))


class _Cut:
    """How the destination is cut into work items: blocks of two axes, on a GPU single elements along the inner one."""

    def __init__(self, d: Layout, inner: int, outer: int, device: str, row: int, strides: list[int]) -> None:
        self.d, self.inner, self.outer = d, inner, outer
        thin = device == "gpu"
        tile = d.run(inner) if len(d.axis_modes(inner)) > 1 else 1
        row = min(tile if tile > 1 else row, d.shape[inner], _THIN_ITEMS if thin else row)
        rows = 1 if thin else min(_BLOCK, d.shape[outer])
        self.rows, self.row = rows, 1 if thin else row
        loops = [(strides[a], Loop(f"d{a}", d.shape[a], "group")) for a in range(5) if a not in (inner, outer)]
        loops.append((strides[outer] * rows, Loop("fb", -(-d.shape[outer] // rows), "group")))
        loops.append((strides[inner] * row, Loop("eb", -(-d.shape[inner] // row), "group")))
        # Items that read neighbouring memory follow each other.
        self.grid = [loop for _, loop in sorted(loops, key=lambda pair: -pair[0])]
        first_e = [Term("eb", row)]
        if thin:
            self.grid.append(Loop("et", row, "item"))
            first_e.append(Term("et"))
        self.first = {outer: Index(0, (Term("fb", rows),)), inner: Index(0, tuple(first_e))}
        self.loops = Loop("f", self.rows), Loop("e", self.row)
        place = {outer: self.first[outer] + Index(0, (Term("f"),)), inner: self.first[inner] + Index(0, (Term("e"),))}
        self.coords = tuple(place.get(a, Index(0, (Term(f"d{a}"),))) for a in range(5))

    def launch(
        self,
        operands: tuple[tuple[str, int], ...],
        phases: tuple[Phase, ...],
        constants: dict[str, str | int],
        views: tuple[tuple[int, Layout], ...],
    ) -> Launch:
        size, items = ndrange(self.grid)
        defines: dict[str, str | int | float] = {"ITEMS": items[0], "DECODE": decode_c(self.grid)}
        for name, axis, block in (("F", self.outer, self.rows), ("E", self.inner, self.row)):
            defines[name] = f"d{axis}"
            defines[f"{name}_FIRST"] = index_c(self.first[axis])
            defines[f"{name}_BLOCK"], defines[f"{name}_EXTENT"] = block, self.d.shape[axis]
        defines["D_STEP"] = _step(self.d, self.inner, self.row)
        pairs = (*defines.items(), *constants.items())
        nest = Nest(tuple(self.grid), phases)
        return Launch("convolution_pack.cl", "convolution_pack", operands, nest, size, items, pairs, views=views)


def _inner(d: Layout) -> int:
    """The axis along which the destination is contiguous, else the longest."""
    return max(range(5), key=lambda a: (d.run(a) if d.shape[a] > 1 else 0, d.shape[a]))


def _next(d: Layout, inner: int) -> int:
    """The axis along which the destination's rows follow each other closest."""

    def stride(axis: int) -> int:
        modes = d.axis_modes(axis)
        return modes[-1].stride if modes else d.size_elems

    return min((a for a in range(5) if a != inner), key=stride)


def _step(layout: Layout, axis: int, block: int) -> int:
    """The stride of an axis inside blocks of it that begin at multiples of their length; 0 where it is not constant."""
    modes = layout.axis_modes(axis)
    if len(modes) > 1 and modes[-1].extent % block:
        return 0
    return modes[-1].stride if modes else 1


def _source_step(s: Layout, at: Source, axis: int) -> int:
    """Elements between the source's neighbours along a destination's axis; 0 where that is not constant."""
    for source_axis, place in enumerate(at):
        for term in place.terms:
            if term.loop == f"d{axis}":
                modes = s.axis_modes(source_axis)
                return term.coef * modes[-1].stride if len(modes) == 1 else 0
    return 0


def _source_stride(s: Layout, at: Source, axis: int) -> int:
    """Elements between neighbours along a destination's axis in the source's innermost tiles."""
    for source_axis, place in enumerate(at):
        for term in place.terms:
            modes = s.axis_modes(source_axis)
            if term.loop == f"d{axis}" and modes:
                return abs(term.coef) * modes[-1].stride
    return s.size_elems


def _substitute(place: Index, coords: tuple[Index, ...]) -> Index:
    out = Index(place.const)
    for term in place.terms:
        inner = coords[int(term.loop[1:])]
        out += Index(inner.const * term.coef, tuple(t._replace(coef=t.coef * term.coef) for t in inner.terms))
    return out


def _bounds(s: Layout, at: Source, axis: int, d: Layout) -> tuple[int, int, str]:
    """Values of one axis for which the source exists, and the condition on the others."""
    low, high, tests = 0, d.shape[axis], []
    for place, n in zip(at, s.shape, strict=True):
        reach = [place.const, place.const + sum(t.coef * (d.shape[int(t.loop[1:])] - 1) for t in place.terms)]
        if min(reach) >= 0 and max(reach) < n:
            continue  # flips and borders concern one coordinate each: their ends are the extremes
        if [t.loop for t in place.terms] == [f"d{axis}"]:
            coef = place.terms[0].coef
            inside = [x for x in range(d.shape[axis]) if 0 <= place.const + coef * x < n]
            low, high = (max(low, inside[0]), min(high, inside[-1] + 1)) if inside else (0, 0)
        else:
            text = index_c(place)
            tests.append(f"{text}>=0&&{text}<{n}")
    return low, max(low, high), "&&".join(tests) or "1"
