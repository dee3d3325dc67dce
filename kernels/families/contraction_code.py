"""Generated C of the contraction kernels: vectors that are loaded and stored in contiguous pieces."""

from __future__ import annotations

from functools import lru_cache

from kernels.memory_c import load_c, store_c
from layoutopt.layout import Layout

__all__ = [
    "Operand",
    "axis_offset",
    "compose_load",
    "compose_store",
    "group_sums",
    "lane_sums",
    "load_x",
    "piece_width",
    "y_edge",
    "y_pieces",
]

Operand = tuple[Layout, str]
"""Layout and dtype."""


@lru_cache(maxsize=1 << 13)
def piece_width(layout: Layout, axis: int, v: int) -> int:
    """Widest power of two up to ``v`` whose vectors along ``axis`` are contiguous."""
    width = v
    while width > 1 and not layout.vectorizes(axis, width):
        width //= 2
    return width


@lru_cache(maxsize=1 << 13)
def axis_offset(layout: Layout, axis: int, i: int) -> int:
    """Elements from coordinate 0 to ``i`` along an axis of a buffer."""
    offset, modes = 0, layout.axis_modes(axis)
    for position, mode in reversed(list(enumerate(modes))):
        offset += (i % mode.extent if position else i) * mode.stride
        i //= mode.extent
    return offset


def _load(layout: Layout, dtype: str, axis: int, width: int, pointer: str, image: bool = False) -> str:
    if image:  # see kernels/source.py: what adds to a pointer adds to the place in an image
        return f"texel({pointer})"
    return load_c(dtype, width, pointer, layout.alignment(axis) % width == 0)


def _join(v: int, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(float{v})({','.join(parts)})"


@lru_cache(maxsize=1 << 13)
def compose_load(
    name: str,
    operand: Operand,
    vectors: int,
    v: int,
    u: int,
    constant: bool,
    axis: int = 2,
    repeat: int = 1,
    image: bool = False,
) -> str:
    """The macro that loads vectors from pieces of ``u``.

    ``LOAD_Y(o)`` fills ``y[j]`` from offset ``o`` and the offsets ``yo``: ``constant`` says that those of all pieces
    differ from the first one's by constants. Any other name gives an expression over a pointer, ``repeat`` times over.
    With ``image`` pieces of 4 are texels.
    """
    layout, dtype = operand
    per, p = v // u, "p" if image else "(p)"
    if name != "LOAD_Y":
        parts = [_load(layout, dtype, axis, u, f"{p}+{axis_offset(layout, axis, i * u)}", image) for i in range(per)]
        return f"#define {name}(p) {_join(v * repeat, parts * repeat)}"
    vectors_text = []
    for j in range(vectors):
        starts = [
            f"Y+yo[0]+(o)+{axis_offset(layout, axis, i * u)}" if constant else f"Y+yo[{i}]+(o)"
            for i in range(j * per, (j + 1) * per)
        ]
        vectors_text.append(f"y[{j}]={_join(v, [_load(layout, dtype, axis, u, start, image) for start in starts])};")
    return f"#define {name}(o) {''.join(vectors_text)}"


@lru_cache(maxsize=1 << 13)
def y_pieces(y: Layout, v: int) -> int:
    """Width of the pieces that Y's vectors along its axis 2 are read in.

    On an axis of one mode, the piece at the border is moved back so that it ends there: it has to fit the extent.
    """
    width = piece_width(y, 2, v)
    while len(y.axis_modes(2)) < 2 and width > y.shape[2]:
        width //= 2
    return width


@lru_cache(maxsize=1 << 13)
def y_edge(operand: Operand, vectors: int, v: int, u: int, image: bool = False) -> str:
    """``LOAD_Y_EDGE(o)``: as LOAD_Y, but the pieces lie wherever ``yo`` says, aligned or not."""
    y, dtype = operand
    aligned = y.alignment(2) % u == 0 and (len(y.axis_modes(2)) > 1 or y.shape[2] % u == 0)
    per, text = v // u, []
    for j in range(vectors):
        starts = [f"Y+yo[{i}]+(o)" for i in range(j * per, (j + 1) * per)]
        parts = [_load(y, dtype, 2, u, start, True) if image else load_c(dtype, u, start, aligned) for start in starts]
        text.append(f"y[{j}]={_join(v, parts)};")
    return f"#define LOAD_Y_EDGE(o) {''.join(text)}"


@lru_cache(maxsize=1 << 13)
def load_x(operand: Operand, axis: int, width: int, image: bool = False) -> str:
    """``LOAD_X(x,i,o)``: vector load ``i`` of ``MR`` that fill ``x[r][step]`` for ``width`` steps from offset ``o``.

    Along k (axis 2) a load is one row's steps; along the rows (axis 1) it is ``width`` rows of one step, which at the
    border are read one by one; an image's texels, which do not cross it, are read whole.
    """
    x, dtype = operand
    if axis == 2:
        lanes = "".join(f"(x)[i][{lane}]=x_.s{lane:x};" for lane in range(width))
        load = _load(x, dtype, 2, width, "X+XOFF(i)+(o)", image)
        return f"#define LOAD_X(x,i,o) do{{const float{width} x_={load};{lanes}}}while(0)"
    row, step, at = f"(i)/{width}*{width}", f"(i)%{width}", f"(o)+(i)%{width}*XKS"
    load = _load(x, dtype, 1, width, f"X+XOFF({row})+{at}", image)
    lanes = "".join(f"(x)[{row}+{lane}][{step}]=x_.s{lane:x};" for lane in range(width))
    if image:
        return f"#define LOAD_X(x,i,o) do{{const float{width} x_={load};{lanes}}}while(0)"
    single = "".join(f"(x)[{row}+{lane}][{step}]=X_READ(XOFF({row}+{lane})+{at});" for lane in range(width))
    return f"#define LOAD_X(x,i,o) do{{if(edge){{{single}}}else{{const float{width} x_={load};{lanes}}}}}while(0)"


@lru_cache(maxsize=1 << 13)
def compose_store(operand: Operand, v: int, u: int) -> str:
    """``STORE_Z(v,b,r,c)``: a vector along c, stored in pieces of ``u``."""
    z, dtype = operand
    parts = []
    for start in range(0, v, u):
        lanes = "v_" if u == v else "v_.s" + "".join(f"{lane:x}" for lane in range(start, start + u))
        parts.append(f"{store_c(dtype, u, lanes, f'Z+ZI(b,r,(c)+{start})', z.alignment(2) % u == 0)};")
    return f"#define STORE_Z(v,b,r,c) do{{const float{v} v_=(v);{''.join(parts)}}}while(0)"


def lane_sums(v: int) -> list[str]:
    """``SUM1`` adds up one vector, ``SUM4`` four at once: pairs are interleaved, so that no addition is idle."""
    one = {
        16: "const float8 h=a.lo+a.hi; const float4 q=h.lo+h.hi;",
        8: "const float4 q=a.lo+a.hi;",
        4: "const float4 q=a;",
    }[v]
    four = {
        16: "const float16 p=(float16)(a.lo,b.lo)+(float16)(a.hi,b.hi), q=(float16)(c.lo,d.lo)+(float16)(c.hi,d.hi);"
        "const float16 s=(float16)(p.s0123,p.s89ab,q.s0123,q.s89ab)+(float16)(p.s4567,p.scdef,q.s4567,q.scdef);",
        8: "const float8 p=(float8)(a.lo,b.lo)+(float8)(a.hi,b.hi), q=(float8)(c.lo,d.lo)+(float8)(c.hi,d.hi);"
        "const float16 s=(float16)(p,q);",
        4: "const float16 s=(float16)(a,b,c,d);",
    }[v]
    return [
        f"inline float SUM1(const float{v} a){{{one} const float2 r=q.lo+q.hi; return r.x+r.y;}}",
        f"inline float4 SUM4(const float{v} a,const float{v} b,const float{v} c,const float{v} d)"
        f"{{{four} const float8 h=s.even+s.odd; return h.even+h.odd;}}",
    ]


def group_sums(v: int, columns: int) -> list[str]:
    """``SUMQ``: a vector that holds ``columns`` groups of lanes, each group added up."""
    body, name, width = "", "a", v
    while width > columns:
        width //= 2
        body += f"const float{width} s{width}={name}.even+{name}.odd; "
        name = f"s{width}"
    return [
        f"inline float{columns} SUMQ(const float{v} a){{{body}return {name};}}",
        f"#define VSTORE(z,p) vstore{columns}(z,0,p)",
    ]
