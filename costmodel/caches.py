"""The caches of a device that is here: from the operating system for a CPU, from the driver for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.device import CacheLevel

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["caches_of", "cpu_caches"]

SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
GPU_L1_BYTES = 128 << 10


def caches_of(runtime: Runtime) -> tuple[CacheLevel, ...]:
    """Nearest first; each level says where its numbers come from."""
    if runtime.limits.kind == "cpu":
        found = cpu_caches()
        if found:
            return found
    device = runtime.info.handle
    size, line = (_reported(device, f"global_mem_cache{end}_size") for end in ("", "line"))
    last = CacheLevel(
        "L2",
        size or 1 << 20,
        line or 64,
        16,
        True,
        source="size and line from the driver, ways assumed",
        confidence="medium",
    )
    near = 32 << 10 if runtime.limits.kind == "cpu" else GPU_L1_BYTES
    first = CacheLevel("L1", min(near, last.size_bytes), last.line_bytes, 8, source="no driver reports it: typical")
    return first, last


def cpu_caches(root: Path = SYSFS) -> tuple[CacheLevel, ...]:
    """Data caches as Linux lists them; empty elsewhere."""
    out = []
    for index in sorted(root.glob("index*")):
        try:
            text = {
                name: (index / name).read_text().strip()
                for name in ("level", "type", "size", "ways_of_associativity", "coherency_line_size", "shared_cpu_list")
            }
            level, ways, line = (int(text[k]) for k in ("level", "ways_of_associativity", "coherency_line_size"))
            size = int(text["size"].removesuffix("K").removesuffix("M")) << (20 if text["size"].endswith("M") else 10)
        except (OSError, ValueError):
            continue  # a container may hide some of these files; the levels that can be read remain
        if text["type"] == "Instruction" or size <= 0:
            continue
        # Two hyperthreads of one core share every level; what more processors share is common.
        shared = level >= 3
        out.append(CacheLevel(f"L{level}", size, line, max(ways, 1), shared, source="sysfs", confidence="high"))
    return tuple(sorted(out, key=lambda c: c.size_bytes))


def _reported(device: object, key: str) -> int:
    try:
        return int(getattr(device, key))
    except (AttributeError, RuntimeError):  # pyopencl's errors derive from RuntimeError
        return 0
