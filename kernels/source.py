"""Specialisation: the header of ``#define``s that turns a kernel body into a program for given layouts.

For every operand that a launch names, the header defines (here for operand A of rank 2):

- ``A_ARG``: the parameter declaration, to be used in the kernel's signature;
- ``A_IDX(i,j)``: the element offset, from ``Layout.c_expr``;
- ``A_AT(i,j)``: the element's value, ``A_READ(o)``: that at element offset o;
- ``A_STORE1(v,i,j)``: stores a value;
- ``A_LOADw(i,j)`` / ``A_STOREw(v,i,j)`` for each vector width w > 1 that the nest declares: one vector access where the
  layout is contiguous along the access' axis, a few shorter ones where its tiles are shorter, a splat where that axis
  is broadcast, else w scalar accesses. The coordinate along the vector's axis is a multiple of w and the whole vector
  lies inside the shape: the body sees to both;
- ``A_N0``, ``A_N1``: the logical extents.

An operand that is read through an image (``Launch.images``) is two parameters: the image, and the element of it at
which the operand begins. ``A`` stands for both, so that ``f(A, i)`` passes them on and ``texel(A + offset)`` reads the
four values at an element offset, as a body would otherwise read from the pointer ``A + offset``. There is no ``A_AT``:
a body that read single values would not compile.

Bodies are OpenCL C 1.2, written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kernels.memory_c import CTYPES, MEMORY_CTYPES, half_helpers, load_c, store_c
from kernels.nest import Access
from kernels.spec import Kernel, Launch
from layoutopt.layout import Layout

__all__ = ["COORDS", "piece_of", "program_source"]

COORDS = ("i0", "i1", "i2", "i3", "i4", "i5")
_CL = Path(__file__).parent / "cl"
_PARTS = (8, 4, 2)
"""Widths that a vector access may be made of where it is not contiguous as a whole, best first."""


def program_source(kernel: Kernel, launch: Launch) -> str:
    """The complete OpenCL C source of one launch."""
    parts = [f"// {kernel.variant.label}"]
    written = _written(launch)
    aliased = {p for out, inp in kernel.spec.inplace for p in (inp, kernel.spec.inputs + out)}
    for name, position in launch.operands:
        widths = sorted({(a.width, a.axis, a.write) for a in _accesses(launch, position) if a.width > 1})
        dtype = kernel.operand_dtype(position)
        layout = kernel.launch_layout(launch, position)
        if position in launch.images:
            parts += _image_macros(name, layout, tuple(widths))
            continue
        qualifier = "" if position in written else "const "
        restrict = "" if position in aliased else "restrict "
        parts.append(f"#define {name}_ARG __global {qualifier}{MEMORY_CTYPES[dtype]} *{restrict}{name}")
        parts += _macros(name, dtype, layout, tuple(widths), position in written)
    if launch.images:
        parts.append(_TEXEL)
    parts += [f"#define {key} {_literal(value)}" for key, value in launch.defines]
    text = "\n".join([*parts, str(launch.preamble), _body(launch.body)])
    helpers = half_helpers(text)
    return f"{helpers}\n{text}" if helpers else text


_TEXEL = """inline float4 texel(__read_only image1d_buffer_t image, const int at) {
    return read_imagef(image, at >> 2);
}"""


def _accesses(launch: Launch, position: int) -> Iterator[Access]:
    return (a for phase in launch.nest.phases for a in phase.accesses if a.operand == position)


def _written(launch: Launch) -> set[int]:
    return {a.operand for phase in launch.nest.phases for a in phase.accesses if a.write}


def _literal(value: str | int | float) -> str:
    if isinstance(value, float):
        text = repr(value)
        if text in ("inf", "-inf"):
            return text.replace("inf", "INFINITY")
        return (text if any(c in text for c in ".en") else text + ".0") + "f"
    return str(value)


@lru_cache(maxsize=4096)
def _macros(
    name: str, dtype: str, layout: Layout, widths: tuple[tuple[int, int, bool], ...], written: bool
) -> list[str]:
    coords = COORDS[: layout.rank]
    args = ",".join(coords)
    call = f"({args})" if coords else "()"
    out = [f"#define {name}_IDX{call} {layout.c_expr(*(f'({c})' for c in coords))}"]
    out.append(f"#define {name}_READ(o) {load_c(dtype, 1, f'{name}+(o)', False)}")
    out.append(f"#define {name}_AT{call} {load_c(dtype, 1, f'{name}+{name}_IDX{call}', False)}")
    if written:
        to = f"{name}+{name}_IDX{call}"
        out.append(f"#define {name}_STORE1({','.join(('v', *coords))}) {store_c(dtype, 1, '(v)', to, False)}")
    out += [f"#define {name}_N{axis} {n}" for axis, n in enumerate(layout.shape)]
    for width, axis, write in widths:
        part, splat = piece_of(layout, axis, width, write)
        aligned = layout.alignment(axis) % part == 0
        at = _places(coords, axis, range(0, width, part))
        if write:
            out.append(f"#define {name}_STORE{width}(v,{args}) {_store(name, dtype, width, part, aligned, at)}")
        elif splat:
            out.append(f"#define {name}_LOAD{width}{call} (({CTYPES[dtype]}{width})({name}_AT{call}))")
        else:
            loads = [_load(name, dtype, part, aligned, place) for place in at]
            whole = loads[0] if part == width else f"(({CTYPES[dtype]}{width})({','.join(loads)}))"
            out.append(f"#define {name}_LOAD{width}{call} {whole}")
    return out


@lru_cache(maxsize=1 << 14)
def piece_of(layout: Layout, axis: int, width: int, write: bool) -> tuple[int, bool]:
    """How ``A_LOADw`` and ``A_STOREw`` move a vector along an axis: in pieces of how many, or one value for all."""
    part = next((w for w in (width, *_PARTS) if w <= width and layout.vectorizes(axis, w)), 1)
    return part, not write and part == 1 and all(m.stride == 0 for m in layout.axis_modes(axis))


def _places(coords: tuple[str, ...], axis: int, lanes: range) -> list[str]:
    """The coordinates some lanes on along an axis."""
    return [",".join(f"({c})+{lane}" if a == axis and lane else c for a, c in enumerate(coords)) for lane in lanes]


@lru_cache(maxsize=4096)
def _image_macros(name: str, layout: Layout, widths: tuple[tuple[int, int, bool], ...]) -> list[str]:
    """Of an operand whose vectors of four are texels."""
    coords = COORDS[: layout.rank]
    args = ",".join(coords)
    out = [
        f"#define {name}_ARG __read_only image1d_buffer_t {name}_image, const int {name}_first",
        f"#define {name} {name}_image, {name}_first",
        f"#define {name}_IDX({args}) {layout.c_expr(*(f'({c})' for c in coords))}",
    ]
    out += [f"#define {name}_N{axis} {n}" for axis, n in enumerate(layout.shape)]
    for width, axis, _ in widths:
        loads = [f"texel({name}+{name}_IDX({at}))" for at in _places(coords, axis, range(0, width, 4))]
        whole = loads[0] if width == 4 else f"((float{width})({','.join(loads)}))"
        out.append(f"#define {name}_LOAD{width}({args}) {whole}")
    return out


def _load(name: str, dtype: str, width: int, aligned: bool, at: str) -> str:
    return load_c(dtype, width, f"{name}+{name}_IDX({at})", aligned)


def _store(name: str, dtype: str, width: int, part: int, aligned: bool, at: list[str]) -> str:
    def one(value: str, place: str) -> str:
        return store_c(dtype, part, value, f"{name}+{name}_IDX({place})", aligned)

    if part == width:
        return one("(v)", at[0])
    pieces = ["v_.s" + "".join(f"{k:x}" for k in range(first, first + part)) for first in range(0, width, part)]
    assigns = "".join(one(piece, place) + ";" for piece, place in zip(pieces, at, strict=True))
    return f"do{{{CTYPES[dtype]}{width} v_=(v);{assigns}}}while(0)"


@lru_cache(maxsize=64)
def _body(name: str) -> str:
    return (_CL / name).read_text()
