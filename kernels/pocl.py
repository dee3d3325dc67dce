"""A remedy for PoCL drivers whose LLVM does not know the processor.

The driver from the Python registry (PoCL 3.0, LLVM 14) asks LLVM for the processor's name. On processors newer than
that LLVM (AMD Zen 5) the answer is "generic", which its own compiler then refuses: "unknown target CPU 'generic'", and
no program builds. On AMD Zen 4 the answer is "znver3", a processor without the 512-bit vectors that Zen 4 has and PoCL
uses: compiling a matrix product then takes more and more memory and ends in a crash (seen on an EPYC with AVX-512).
PoCL 3.0 has no option or environment variable for the name, so it is replaced in the driver's device structure by the
name of a processor with the same vectors: the very one that the driver's library of built-in functions is compiled
for, because functions compiled for another are called instead of inlined (``vload16`` in an inner loop cost two thirds
of a kernel's speed). Nothing is touched unless the driver is PoCL, the name is "generic" (or "znver3" where there is
AVX-512), and it is found exactly once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

__all__ = ["host_cpu_level", "name_generic_cpu"]

_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_STRUCT_BYTES = 1024
_names: dict[int, ctypes.Array[ctypes.c_char]] = {}  # keeps the new names alive, by device address


def host_cpu_level() -> str:
    """A processor that compilers know and this one includes: skylake-avx512, haswell or x86-64."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    flags = next((set(line.split(":", 1)[1].split()) for line in info.splitlines() if line.startswith("flags")), set())
    if not flags >= _V3:
        return "x86-64"
    return "skylake-avx512" if flags >= _V4 else "haswell"


def name_generic_cpu(device_address: int, platform_version: str) -> str:
    """Give PoCL's compiler a processor name it accepts; call it once per device, before the first build.

    Args:
        device_address: the ``cl_device_id`` (pyopencl: ``device.int_ptr``).
        platform_version: ``CL_PLATFORM_VERSION``.

    Returns:
        The name that is now in force where it was replaced, else "".
    """
    if device_address in _names:
        return _names[device_address].value.decode()
    if "PoCL" not in platform_version or platform.system() != "Linux" or platform.machine() != "x86_64":
        return ""
    level = host_cpu_level()
    wrong = (b"generic", b"znver3") if level == "skylake-avx512" else (b"generic",)
    try:
        hits = [hit for text in wrong for hit in _pointers_to(text, device_address)]
    except OSError:  # no access to our own memory map: the build will then say what is wrong
        return ""
    if len(hits) != 1:
        return ""
    name = ctypes.create_string_buffer(level.encode())
    _names[device_address] = name
    ctypes.c_uint64.from_address(hits[0]).value = ctypes.addressof(name)
    return name.value.decode()


def _pointers_to(text: bytes, address: int) -> list[int]:
    """Addresses of the pointers in the structure at ``address`` that point to the C string ``text``."""
    hits = []
    memory = os.open("/proc/self/mem", os.O_RDONLY)  # reading through the kernel survives pointers to nowhere
    try:
        raw = os.pread(memory, _STRUCT_BYTES, address)
        for offset in range(0, len(raw) - 7, 8):
            (pointer,) = struct.unpack_from("<Q", raw, offset)
            try:
                target = os.pread(memory, len(text) + 1, pointer) if 4096 <= pointer < 1 << 47 else b""
            except OSError:
                continue
            if target == text + b"\0":
                hits.append(address + offset)
    finally:
        os.close(memory)
    return hits
