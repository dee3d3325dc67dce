"""Copies for convolutions: an image with its border of zeros, or weights flipped and in panels, into a workspace."""

from __future__ import annotations

from dataclasses import replace

from kernels.families.common import decode_c, index_c, ndrange
from kernels.nest import Access, Index, Loop, Nest, Phase, Term
from kernels.spec import Launch
from layoutopt.layout import Layout

__all__ = ["Source", "fill", "pack"]

Source = tuple[Index, ...]
"""Per axis of the source its coordinate, over loops named d0…d4: the destination's coordinates."""

_ROW_ELEMS = 1024
_ROWS = 16
_THIN_ITEMS = 64


def pack(source: int, s: Layout, at: Source, target: int, d: Layout, limits_kind: str) -> Launch:
    """``d[d0..d4] = s[at]``, zero where that lies outside.

    Args:
        source: operand position.
        s: its layout.
        at: where each element comes from.
        target: operand position.
        d: the layout of five axes that this launch indexes it by.
        limits_kind: "cpu" or "gpu".
    """
    return _launch(source, s, at, target, d, limits_kind)


def fill(target: int, d: Layout, limits_kind: str) -> Launch:
    """Zeros over a layout of five axes."""
    return _launch(-1, None, (), target, d, limits_kind)


def _launch(source: int, s: Layout | None, at: Source, target: int, d: Layout, kind: str) -> Launch:
    inner = _contiguous(d)
    outer = _outer(s, at, d, inner)
    thin = kind == "gpu"
    run = d.run(inner) if len(d.axis_modes(inner)) > 1 else d.shape[inner]
    row = min(run if run > 1 else d.shape[inner], d.shape[inner], _THIN_ITEMS if thin else _ROW_ELEMS)
    if not thin and s is not None and outer != inner and _source_contiguous(s, at) == outer:
        row = min(row, 4 * _ROWS)  # a transposition: a block of lines of both sides stays in cache
    rows = 1 if thin else min(_ROWS, d.shape[outer])
    grid = [Loop(f"d{a}", d.shape[a], "group") for a in range(5) if a not in (inner, outer)]
    grid += [Loop("fb", -(-d.shape[outer] // rows), "group"), Loop("eb", -(-d.shape[inner] // row), "group")]
    if thin:
        grid.append(Loop("et", row, "item"))
    first = {outer: Index(0, (Term("fb", rows),)), inner: Index(0, (Term("eb", row),))}
    if thin:
        first[inner] += Index(0, (Term("et"),))
    loops = (Loop("f", rows), Loop("e", 1 if thin else row))
    place = {outer: first[outer] + Index(0, (Term("f"),)), inner: first[inner] + Index(0, (Term("e"),))}
    coords = tuple(place.get(a, Index(0, (Term(f"d{a}"),))) for a in range(5))
    accesses = [Access(target, coords, write=True)]
    if s is not None:
        accesses.insert(0, Access(source, tuple(_substitute(x, coords) for x in at)))
    low, high, inside = _bounds(s, at, inner, d.shape[inner])
    group, items = ndrange(grid)
    defines: dict[str, str | int | float] = {
        "ITEMS": items[0],
        "DECODE": decode_c(grid),
        "F": f"d{outer}",
        "F_FIRST": index_c(first[outer]),
        "F_BLOCK": rows,
        "F_EXTENT": d.shape[outer],
        "E": f"d{inner}",
        "E_FIRST": index_c(first[inner]),
        "E_BLOCK": 1 if thin else row,
        "E_EXTENT": d.shape[inner],
        "E_LOW": low,
        "E_HIGH": high,
        "ROW_INSIDE": inside,
        "VALUE": "0.0f" if s is None else f"S_AT({','.join(index_c(x) for x in at)})",
    }
    if s is None:
        defines["FILL"] = 1
    operands = (("S", source), ("D", target)) if s is not None else (("D", target),)
    views = ((target, d),) if s is None else ((source, s), (target, d))
    nest = Nest(tuple(grid), (Phase(loops, tuple(accesses)),))
    return Launch(
        "convolution_pack.cl", "convolution_pack", operands, nest, group, items, tuple(defines.items()), views=views
    )


def _contiguous(d: Layout) -> int:
    runs = [d.run(a) if d.shape[a] > 1 else 0 for a in range(5)]
    return max(range(5), key=lambda a: (runs[a], d.shape[a]))


def _source_contiguous(s: Layout, at: Source) -> int:
    """The destination's axis along which the source is contiguous, or -1."""
    for axis, place in enumerate(at):
        if s.shape[axis] > 1 and s.run(axis) > 1:
            return next((int(t.loop[1:]) for t in place.terms if abs(t.coef) == 1), -1)
    return -1


def _outer(s: Layout | None, at: Source, d: Layout, inner: int) -> int:
    found = -1 if s is None else _source_contiguous(s, at)
    if found in (-1, inner):
        found = max((a for a in range(5) if a != inner), key=lambda a: d.shape[a])
    return found


def _substitute(place: Index, coords: tuple[Index, ...]) -> Index:
    out = Index(place.const)
    for term in place.terms:
        inner = coords[int(term.loop[1:])]
        out += Index(inner.const * term.coef, tuple(replace(t, coef=t.coef * term.coef) for t in inner.terms))
    return out


def _bounds(s: Layout | None, at: Source, inner: int, extent: int) -> tuple[int, int, str]:
    """Values of the inner axis for which the source exists, and the condition on the others."""
    if s is None:
        return extent, extent, "0"
    low, high, tests = 0, extent, []
    for place, n in zip(at, s.shape, strict=True):
        names = {t.loop for t in place.terms}
        if names == {f"d{inner}"} and len(place.terms) == 1:
            values = [place.const + place.terms[0].coef * e for e in (0, extent - 1)]
            if min(values) < 0 or max(values) >= n:
                inside = [e for e in range(extent) if 0 <= place.const + place.terms[0].coef * e < n]
                low, high = max(low, inside[0] if inside else extent), min(high, inside[-1] + 1 if inside else extent)
        elif len(names) == 1 or place.const:
            tests.append(f"({index_c(place)})>=0&&({index_c(place)})<{n}")
    return low, max(low, high), "&&".join(tests) or "1"


