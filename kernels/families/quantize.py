"""Numbers in few bits: quantising rows, what they stand for again, and embedding look-ups in quantised tables.

A *unit* is a group of a row: the numbers that share a scale. On a CPU a fat work item does all units of some rows; on
a GPU ``lanes`` items share a unit, and a work group has units of several neighbouring rows. A word is CODES numbers,
which are read or written as a vector where their layout allows it. See ``cl/quantize.cl``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kernels.families.codes import code_defines, pack_c, unpack_c
from kernels.families.common import any_image, decode_c, ndrange
from kernels.nest import Access, Bound, Data, Index, Loop, Nest, Phase, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout
from layoutopt.quantize import Format, groups_per_row, words_per_row

__all__ = ["QUANTIZE", "Quantize"]

_GROUP_ITEMS, _MOST_LANES = 128, 32
_FAT_ELEMS = 4096
"""Numbers that a fat work item should have at least."""

_NAMES = {
    "quantize": ("X", "WORDS", "SCALES"),
    "dequantize": ("WORDS", "SCALES", "Y"),
    "quantized_gather": ("WORDS", "SCALES", "IDS", "Y"),
}


class Quantize:
    """See the module docstring."""

    name = "quantize"
    kinds: tuple[str, ...] = tuple(_NAMES)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """One for the device's kind; on GPUs with fewer lanes too."""
        fmt, rows, cols = _form(spec)
        group_words = _group_words(fmt, cols)
        if limits.kind == "cpu":
            each = max(1, min(-(-_FAT_ELEMS // cols), rows // (4 * limits.compute_units)))
            return [_variant(1, 1, each)]
        lanes = 1
        while 2 * lanes <= min(group_words, _MOST_LANES):
            lanes *= 2
        items = min(_GROUP_ITEMS, limits.max_work_group_size)
        return [_variant(x, items // x, 1) for x in dict.fromkeys((lanes, max(lanes // 4, 1)))]

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """Any layouts are accepted but images."""
        return None if any_image(layouts) else Kernel(spec, variant, layouts, (_launch(variant, spec),))


QUANTIZE = Quantize()


def _variant(lanes: int, units: int, rows: int) -> KernelVariant:
    name = "lanes" if units > 1 or lanes > 1 else "fat"
    return KernelVariant("quantize", name, (("lanes", lanes), ("rows", rows), ("units", units)))


def _form(spec: OpSpec) -> tuple[Format, int, int]:
    """Format; rows and numbers in a row of what is quantised or made."""
    rows, cols = spec.shapes[0] if spec.kind == "quantize" else spec.shapes[-1]
    return Format.parse(spec.attr("format")), rows, cols


def _group_words(fmt: Format, cols: int) -> int:
    return words_per_row(fmt, min(fmt.group or cols, cols))


@dataclass(frozen=True)
class _Places:
    """What an item touches at its current row and word."""

    rows: Index
    group: Index
    word: Index
    column: Index
    own: tuple[Bound, ...]


@lru_cache(maxsize=1 << 12)
def _launch(variant: KernelVariant, spec: OpSpec) -> Launch:
    fmt, rows, cols = _form(spec)
    lanes, units, each = (variant.param(key) for key in ("lanes", "units", "rows"))
    words, count = _group_words(fmt, cols), groups_per_row(fmt, cols)
    within = count if units * lanes == 1 else 1  # groups of a row that an item goes through
    grid = (
        Loop("r", -(-rows // (units * each)), "group"),
        Loop("first", count // within, "group"),
        Loop("u", units, "item"),
        Loop("t", lanes, "item"),
    )
    codes = fmt.codes_per_word
    place = _Places(
        Index(0, (Term("r", each * units), Term("q", units), Term("u"))),
        Index(0, (Term("first", within), Term("n"))),
        Index(0, (Term("first", within * words), Term("n", words), Term("w", lanes), Term("t"))),
        Index(
            0, tuple(Term(x, codes * c) for x, c in (("first", within * words), ("n", words), ("w", lanes), ("t", 1)))
        ),
        (Bound(Index(0, (Term("w", lanes), Term("t"))), words),) if words % lanes else (),
    )
    loops = (Loop("q", each), Loop("n", within), Loop("w", -(-words // lanes)))
    defines: dict[str, str | int | float] = {
        **code_defines(fmt),
        "M": rows,
        "K": cols,
        "UNITS": units,
        "LANES": lanes,
        "ROWS": each,
        "GROUPS": within,
        "GROUP_WORDS": words,
        "DECODE": decode_c(grid),
        f"OP_{spec.kind}": 1,
    }
    nest = Nest(grid, _quantize_phases(loops, place, codes) if spec.kind == "quantize" else _phases(spec, loops, place))
    text = (pack_c if spec.kind == "quantize" else unpack_c)(fmt.kind)
    operands = tuple((name, i) for i, name in enumerate(_NAMES[spec.kind]))
    return Launch("quantize.cl", spec.kind, operands, nest, *ndrange(grid), tuple(defines.items()), text)


def _quantize_phases(loops: tuple[Loop, ...], place: _Places, codes: int) -> tuple[Phase, ...]:
    numbers = Access(0, (place.rows, place.column), codes, 1, when=place.own)
    leader = (Bound(Index(0, (Term("t"),)), 1),)
    stores = (
        Access(1, (place.rows, place.word), write=True, when=place.own),
        Access(2, (place.rows, place.group), write=True, depth=2, when=leader),
    )
    return Phase(loops, (numbers,), 3 * codes), Phase(loops, (numbers, *stores), 4 * codes)


def _phases(spec: OpSpec, loops: tuple[Loop, ...], place: _Places) -> tuple[Phase, ...]:
    codes = Format.parse(spec.attr("format")).codes_per_word
    gathers = spec.kind == "quantized_gather"
    row: Index | Data = Data(2, (place.rows,)) if gathers else place.rows
    ids = (Access(2, (place.rows,), depth=2),) if gathers else ()
    return (
        Phase(
            loops,
            (
                *ids,
                Access(1, (row, place.group), depth=2),
                Access(0, (row, place.word), when=place.own),
                Access(spec.inputs, (place.rows, place.column), codes, 1, True, when=place.own),
            ),
            2 * codes,
        ),
    )
