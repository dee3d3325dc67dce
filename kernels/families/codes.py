"""Generated C that packs and unpacks numbers in few bits (``layoutopt/quantize.py``) in kernels.

``unpack(w)`` gives the ``CODES`` numbers of a word, without their scale, as a vector; ``pack(x)`` the word of as many
ratios of number and scale; both for one format. Tables of sixteen levels are looked up by index: ``LEVEL(code)``.
"""

from __future__ import annotations

from functools import lru_cache

from layoutopt.quantize import LEVELS, Format, midpoints

__all__ = ["code_defines", "levels_c", "pack_c", "select_c", "unpack_c"]

_ROUND = "12582912.0f"
"""1.5 * 2^23: added to a small number, it leaves the nearest integer (ties to even) in the lowest bits."""


def code_defines(fmt: Format) -> dict[str, str | int | float]:
    """Constants of the bodies: numbers in a word, bits of each."""
    return {"CODES": fmt.codes_per_word, "BITS": 32 // fmt.codes_per_word, "PEAK": fmt.peak}


@lru_cache(maxsize=16)
def levels_c(kind: str) -> str:
    """The table of a kind that has one, in constant memory."""
    values = ", ".join(f"{x!r}f" for x in LEVELS[kind])
    return f"__constant float LEVELS[16] = {{{values}}};\n#define LEVEL(code) LEVELS[code]"


@lru_cache(maxsize=16)
def select_c(kind: str, width: int) -> str:
    """``static floatN chosen(intN c)``: the levels of the lowest four bits of codes, chosen bit by bit."""
    values = [f"(float{width})({x!r}f)" for x in LEVELS[kind]]
    lines = []
    for bit in range(4):
        made = []
        for i in range(0, len(values), 2):
            name = f"v{bit}_{i // 2}"
            lines.append(f"const float{width} {name} = (c << {31 - bit}) < 0 ? {values[i + 1]} : {values[i]};")
            made.append(name)
        values = made
    return f"static float{width} chosen(const int{width} c) {{ {' '.join(lines)} return {values[0]}; }}"


@lru_cache(maxsize=16)
def unpack_c(kind: str) -> str:
    """``static floatN unpack(int w)``."""
    fmt = Format(kind)
    n, bits = fmt.codes_per_word, 32 // fmt.codes_per_word
    if kind in LEVELS:
        parts = ", ".join(f"LEVEL(w >> {bits * i} & 15)" for i in range(n))
        return f"{levels_c(kind)}\nstatic float{n} unpack(const int w) {{ return (float{n})({parts}); }}"
    up = ", ".join(str(32 - bits - bits * i) for i in range(n))
    body = f"return convert_float{n}((int{n})(w) << (int{n})({up}) >> {32 - bits});"
    return f"static float{n} unpack(const int w) {{ {body} }}"


@lru_cache(maxsize=16)
def pack_c(kind: str) -> str:
    """``static int pack(floatN x, int count)``: the codes of the first ``count`` ratios, zeros behind them."""
    fmt = Format(kind)
    n, bits = fmt.codes_per_word, 32 // fmt.codes_per_word
    lines = []
    if kind in LEVELS:
        size = "x" if kind == "nf4" else "fabs(x)"
        lines.append(f"const float{n} size = {size};")
        above = " + ".join(f"(size > {float(limit)!r}f)" for limit in midpoints(fmt))
        lines.append(f"int{n} code = -({above});")  # a comparison of vectors is -1 where it holds
        if kind == "fp4":
            lines.append("code |= (x < 0.0f) & (code > 0) & 8;")
    else:
        lines.append(f"int{n} code = as_int{n}(x + {_ROUND}) & {(1 << bits) - 1};")
    order = ", ".join(map(str, range(n)))
    shifts = ", ".join(str(bits * i) for i in range(n))
    lines.append(f"code = (code & ((int{n})({order}) < count)) << (int{n})({shifts});")
    half = n // 2
    lines.append(f"int{half} part = code.lo | code.hi;")
    while half > 2:
        half //= 2
        lines.append(f"int{half} part{half} = part{'' if half * 4 == n else half * 2}.lo | ")
        lines[-1] += f"part{'' if half * 4 == n else half * 2}.hi;"
    last = "part" if n == 4 else "part2"
    lines.append(f"return {last}.x | {last}.y;")
    return f"static int pack(const float{n} x, const int count) {{ {' '.join(lines)} }}"
