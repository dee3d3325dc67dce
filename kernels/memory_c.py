"""C text that moves values between registers and memory: float16 is stored as ``half``, calculated with as ``float``.

OpenCL C lets no kernel touch a ``half`` but by ``vload_half`` and ``vstore_half``, which every device has; arithmetic
on halves is an extension. So a value of a float16 operand is a float wherever it is not in memory, rounded to the
nearest half (ties to even) when it is stored.

PoCL's ``vload_half16`` takes any address for one of a whole vector, and faults where it is not. So vectors of halves
are moved as integers, which may lie anywhere, and converted in private memory, that is in registers.
"""

from __future__ import annotations

import re

__all__ = ["CTYPES", "MEMORY_CTYPES", "half_helpers", "load_c", "store_c"]

CTYPES = {"float32": "float", "float16": "float", "int32": "int", "bool": "uchar"}
"""Type of a value in a register, by dtype."""

MEMORY_CTYPES = CTYPES | {"float16": "half"}
"""Type of a value in global memory, by dtype."""

_HELPER = re.compile(r"\bhalf_(load|store)(\d+)(a?)\b")


def load_c(dtype: str, width: int, pointer: str, aligned: bool) -> str:
    """An expression: ``width`` neighbours in global memory as a vector, or one as a scalar.

    Args:
        dtype: of the operand.
        width: 1, 2, 4, 8 or 16.
        pointer: C text.
        aligned: whether the address is a multiple of the whole vector in memory.
    """
    if dtype == "float16":
        return f"vload_half(0,{pointer})" if width == 1 else f"half_load{width}{'a' if aligned else ''}({pointer})"
    if width == 1:
        return f"(*({pointer}))"
    return f"(*(__global const {CTYPES[dtype]}{width}*)({pointer}))" if aligned else f"vload{width}(0,{pointer})"


def store_c(dtype: str, width: int, value: str, pointer: str, aligned: bool) -> str:
    """The expression that stores a vector (or scalar) to ``width`` neighbours in global memory; see ``load_c``."""
    if dtype == "float16":
        if width == 1:
            return f"vstore_half_rte({value},0,{pointer})"
        return f"half_store{width}{'a' if aligned else ''}({value},{pointer})"
    if width == 1:
        return f"(*({pointer})={value})"
    if aligned:
        return f"(*(__global {CTYPES[dtype]}{width}*)({pointer})={value})"
    return f"vstore{width}({value},0,{pointer})"


def half_helpers(text: str) -> str:
    """Definitions of the functions that ``load_c`` and ``store_c`` call somewhere in ``text``."""
    return "\n".join(_helper(*found) for found in sorted(set(_HELPER.findall(text))))


def _helper(verb: str, width: str, aligned: str) -> str:
    name, bits = f"half_{verb}{width}{aligned}", f"ushort{width}"
    if verb == "load":
        read = f"*(__global const {bits} *)p" if aligned else f"vload{width}(0, (__global const ushort *)p)"
        convert = f"const {bits} u = {read}; return vload_half{width}(0, (const half *)&u);"
        return f"static float{width} {name}(__global const half *p) {{ {convert} }}"
    write = f"*(__global {bits} *)p = u;" if aligned else f"vstore{width}(u, 0, (__global ushort *)p);"
    convert = f"{bits} u; vstore_half{width}_rte(v, 0, (half *)&u); {write}"
    return f"static void {name}(const float{width} v, __global half *p) {{ {convert} }}"
