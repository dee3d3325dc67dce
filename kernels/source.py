"""Specialisation: the header of ``#define``s that turns a kernel body into a program for given layouts.

For every operand that a launch names, the header defines (here for operand A of rank 2):

- ``A_ARG``: the parameter declaration, to be used in the kernel's signature;
- ``A_IDX(i,j)``: the element offset, from ``Layout.c_expr``;
- ``A_AT(i,j)``: the element as an lvalue;
- ``A_LOADw(i,j)`` / ``A_STOREw(v,i,j)`` for each vector width w > 1 that the nest declares: one aligned vector access where
  the layout is contiguous along the access' axis, a splat where that axis is broadcast, else w scalar accesses. The
  coordinate along the vector's axis is a multiple of w and the whole vector lies inside the shape: the body sees to both;
- ``A_N0``, ``A_N1``: the logical extents.

Bodies are OpenCL C 1.2, written once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from kernels.spec import CTYPES, Kernel, Launch
from layoutopt.layout import Layout

__all__ = ["COORDS", "program_source"]

COORDS = ("i0", "i1", "i2", "i3", "i4", "i5")
_CL = Path(__file__).parent / "cl"


def program_source(kernel: Kernel, launch: Launch) -> str:
    """The complete OpenCL C source of one launch."""
    parts = [f"// {kernel.variant.label}"]
    written = {o for o in _written(launch)}
    aliased = {p for out, inp in kernel.spec.inplace for p in (inp, kernel.spec.inputs + out)}
    for name, position in launch.operands:
        widths = sorted({(a.width, a.axis, a.write) for a in _accesses(launch, position) if a.width > 1})
        dtype = CTYPES[kernel.operand_dtype(position)]
        layout = kernel.operand_layout(position)
        qualifier = "" if position in written else "const "
        restrict = "" if position in aliased else "restrict "
        parts.append(f"#define {name}_ARG __global {qualifier}{dtype} *{restrict}{name}")
        parts += _macros(name, dtype, layout, tuple(widths))
    parts += [f"#define {key} {_literal(value)}" for key, value in launch.defines]
    return "\n".join([*parts, launch.preamble, _body(launch.body)])


def _accesses(launch: Launch, position: int):  # noqa: ANN202 - generator of Access
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
def _macros(name: str, dtype: str, layout: Layout, widths: tuple[tuple[int, int, bool], ...]) -> list[str]:
    coords = COORDS[: layout.rank]
    args = ",".join(coords)
    call = f"({args})" if coords else "()"
    out = [f"#define {name}_IDX{call} {layout.c_expr(*(f'({c})' for c in coords))}"]
    out.append(f"#define {name}_AT{call} {name}[{name}_IDX{call}]")
    out += [f"#define {name}_N{axis} {n}" for axis, n in enumerate(layout.shape)]
    for width, axis, write in widths:
        lanes = [
            f"{name}_AT({','.join(f'({c})+{lane}' if a == axis else c for a, c in enumerate(coords))})"
            for lane in range(width)
        ]
        vector = f"{dtype}{width}"
        stride_zero = all(m.stride == 0 for m in layout.axis_modes(axis))
        contiguous = layout.vectorizes(axis, width)
        aligned = contiguous and layout.alignment(axis) % width == 0
        pointer = f"{name}+{name}_IDX{call}"
        if not write:
            if stride_zero and not contiguous:
                load = f"(({vector})({name}_AT{call}))"
            elif aligned:
                load = f"(*(__global const {vector}*)({pointer}))"
            elif contiguous:
                load = f"vload{width}(0,{pointer})"
            else:
                load = f"(({vector})({','.join(lanes)}))"
            out.append(f"#define {name}_LOAD{width}{call} {load}")
        else:
            store_args = f"(v,{args})"
            if aligned:
                store = f"(*(__global {vector}*)({pointer})=(v))"
            elif contiguous:
                store = f"vstore{width}((v),0,{pointer})"
            else:
                assigns = "".join(f"{lane_at}=v_.s{lane:x};" for lane, lane_at in enumerate(lanes))
                store = f"do{{{vector} v_=(v);{assigns}}}while(0)"
            out.append(f"#define {name}_STORE{width}{store_args} {store}")
    return out


@lru_cache(maxsize=64)
def _body(name: str) -> str:
    return (_CL / name).read_text()
