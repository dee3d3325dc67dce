"""C text that moves values between registers and memory: float16 is stored as ``half``, calculated with as ``float``.

OpenCL C lets no kernel touch a ``half`` but by ``vload_half`` and ``vstore_half``, which every device has; arithmetic
on halves is an extension. So a value of a float16 operand is a float wherever it is not in memory, rounded to the
nearest half (ties to even) when it is stored.
"""

from __future__ import annotations

__all__ = ["CTYPES", "MEMORY_CTYPES", "load_c", "store_c"]

CTYPES = {"float32": "float", "float16": "float", "int32": "int", "bool": "uchar"}
"""Type of a value in a register, by dtype."""

MEMORY_CTYPES = CTYPES | {"float16": "half"}
"""Type of a value in global memory, by dtype."""


def load_c(dtype: str, width: int, pointer: str, aligned: bool) -> str:
    """An expression: ``width`` neighbours in global memory as a vector, or one as a scalar.

    Args:
        dtype: of the operand.
        width: 1, 2, 4, 8 or 16.
        pointer: C text.
        aligned: whether the address is a multiple of the whole vector in memory.
    """
    suffix = "" if width == 1 else str(width)
    if dtype == "float16":
        return f"vload{'a' if aligned and width > 1 else ''}_half{suffix}(0,{pointer})"
    if width == 1:
        return f"(*({pointer}))"
    return f"(*(__global const {CTYPES[dtype]}{width}*)({pointer}))" if aligned else f"vload{width}(0,{pointer})"


def store_c(dtype: str, width: int, value: str, pointer: str, aligned: bool) -> str:
    """The expression that stores a vector (or scalar) to ``width`` neighbours in global memory; see ``load_c``."""
    suffix = "" if width == 1 else str(width)
    if dtype == "float16":
        return f"vstore{'a' if aligned and width > 1 else ''}_half{suffix}_rte({value},0,{pointer})"
    if width == 1:
        return f"(*({pointer})={value})"
    if aligned:
        return f"(*(__global {CTYPES[dtype]}{width}*)({pointer})={value})"
    return f"vstore{width}({value},0,{pointer})"
