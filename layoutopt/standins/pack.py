"""Of msgspec's MessagePack what graph files need: nil, booleans, 64-bit integers, doubles, text, bytes, arrays, maps.

The same bytes as msgspec writes (each number and length in the fewest bytes), as a graph's hash is taken over them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

__all__ = ["decode", "encode"]

_UNSIGNED = ((0xCC, ">B", 1 << 8), (0xCD, ">H", 1 << 16), (0xCE, ">I", 1 << 32), (0xCF, ">Q", 1 << 64))
_SIGNED = ((0xD0, ">b", 1 << 7), (0xD1, ">h", 1 << 15), (0xD2, ">i", 1 << 31), (0xD3, ">q", 1 << 63))
_LENGTHS = {"str": (0xD9, 0xDA, 0xDB), "bin": (0xC4, 0xC5, 0xC6), "array": (0, 0xDC, 0xDD), "map": (0, 0xDE, 0xDF)}
_SHORT = {"str": (0xA0, 32), "bin": (0, 0), "array": (0x90, 16), "map": (0x80, 16)}
_WIDTHS = (">B", ">H", ">I")


def encode(value: Any) -> bytes:
    """MessagePack of plain values; tuples are arrays."""
    out = bytearray()
    _write(out, value)
    return bytes(out)


def decode(data: bytes) -> Any:
    """The value in ``data``.

    Raises:
        ValueError: it is no MessagePack of the kinds above, or there is more of it.
    """
    value, end = _read(memoryview(data), 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the value")
    return value


def _write(out: bytearray, value: Any) -> None:
    if value is None or isinstance(value, bool):
        out.append({None: 0xC0, False: 0xC2, True: 0xC3}[value])
    elif isinstance(value, int):
        _write_integer(out, value)
    elif isinstance(value, float):
        out += b"\xcb" + struct.pack(">d", value)
    elif isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        _write_length(out, "str" if isinstance(value, str) else "bin", len(raw))
        out += raw
    elif isinstance(value, Mapping):
        _write_length(out, "map", len(value))
        for key, item in value.items():
            _write(out, key)
            _write(out, item)
    elif isinstance(value, list | tuple):
        _write_length(out, "array", len(value))
        for item in value:
            _write(out, item)
    else:
        raise TypeError(f"no MessagePack of {type(value).__name__}")


def _write_integer(out: bytearray, value: int) -> None:
    if -32 <= value < 128:
        out.append(value & 0xFF)
        return
    for code, form, limit in _UNSIGNED if value >= 0 else _SIGNED:
        if -limit <= value < limit:
            out += bytes([code]) + struct.pack(form, value)
            return
    raise OverflowError(f"{value} does not fit into 64 bits")


def _write_length(out: bytearray, kind: str, length: int) -> None:
    base, below = _SHORT[kind]
    if length < below:
        out.append(base | length)
        return
    for code, form in zip(_LENGTHS[kind], _WIDTHS, strict=True):
        if code and length < 1 << (8 * struct.calcsize(form)):
            out += bytes([code]) + struct.pack(form, length)
            return
    raise OverflowError(f"a length of {length}")


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    if at >= len(data):
        raise ValueError("the data end early")
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 0x100), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    for known, form, _ in (*_UNSIGNED, *_SIGNED, (0xCA, ">f", 0), (0xCB, ">d", 0)):
        if code == known:
            return _number(data, at, form)
    for kind, (base, below) in _SHORT.items():
        if below and base <= code < base + below:
            return _items(data, at, kind, code - base)
        if code in _LENGTHS[kind]:
            length, at = _number(data, at, _WIDTHS[_LENGTHS[kind].index(code)])
            return _items(data, at, kind, length)
    raise ValueError(f"byte 0x{code:02x} begins nothing that is known")


def _number(data: memoryview, at: int, form: str) -> tuple[Any, int]:
    end = at + struct.calcsize(form)
    if end > len(data):
        raise ValueError("the data end early")
    return struct.unpack(form, data[at:end])[0], end


def _items(data: memoryview, at: int, kind: str, length: int) -> tuple[Any, int]:
    if kind in ("str", "bin"):
        if at + length > len(data):
            raise ValueError("the data end early")
        raw = bytes(data[at : at + length])
        return (raw.decode() if kind == "str" else raw), at + length
    items = []
    for _ in range(length * (2 if kind == "map" else 1)):
        item, at = _read(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at
