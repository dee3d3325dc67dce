"""The caches of a device that is here: from the operating system for a CPU, from a pointer chase or the driver for the
rest; and what the chase found, as facts and as a line for people.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cacheprobe import CacheFindings, findings_of
from costmodel.device import CacheLevel, DeviceModel, Fact
from costmodel.knees import NOT_SEPARABLE, Finding, FoundLevel

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["caches_of", "chase_facts", "cpu_caches", "describe_caches", "size_text"]

SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
GPU_L1_BYTES = 128 << 10


def caches_of(runtime: Runtime, findings: CacheFindings | None = None) -> tuple[CacheLevel, ...]:
    """Nearest first; each level says where its numbers come from.

    A CPU's are the operating system's, with the latencies that a pointer chase found. A GPU's are those found by
    pointer chase where it found any: drivers report one cache, and some of them a wrong size.

    Args:
        runtime: the device.
        findings: of a pointer chase on it.
    """
    if runtime.limits.kind == "cpu":
        found = cpu_caches()
        if found:
            return _beside(found, findings) if findings is not None else found
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
    if findings is not None and findings.sure:
        return _chased(findings, last, own_images=runtime.limits.image_max_buffer_texels > 0)
    near = 32 << 10 if runtime.limits.kind == "cpu" else GPU_L1_BYTES
    first = CacheLevel("L1", min(near, last.size_bytes), last.line_bytes, 8, source="no driver reports it: typical")
    return first, last


def _beside(caches: tuple[CacheLevel, ...], findings: CacheFindings) -> tuple[CacheLevel, ...]:
    """What the system says, with the latency of the chased level that is meant."""
    out = []
    for cache in caches:
        near = _nearest(cache, findings)
        if near is None:
            out.append(replace(cache, source=f"{cache.source}; not separable by pointer chase"))
            continue
        beside = f"{cache.source}; pointer chase: {_between(near)}"
        out.append(replace(cache, source=beside, latency_s=float(f"{near.latency_ns * 1e-9:.4g}")))
    return tuple(out)


def _nearest(cache: CacheLevel, findings: CacheFindings) -> FoundLevel | None:
    """The chased level of nearest size; one that is off by a factor of 8 is another."""

    def apart(found: FoundLevel) -> float:
        return abs(log2(found.size_bytes / cache.size_bytes))

    near = min(findings.caches, key=apart, default=None)
    return near if near is not None and apart(near) < 3 else None


def _chased(findings: CacheFindings, driver: CacheLevel, *, own_images: bool) -> tuple[CacheLevel, ...]:
    """Levels as chased; line and ways as found, else the driver's line and assumed ways."""
    # Latency does not tell whose a cache is. The first is each compute unit's own, unless it has the size of the one
    # that the driver reports: there, buffers pass by the nearest.
    skipped = int(0.5 <= findings.sure[0].size_bytes / driver.size_bytes <= 2)
    out = [
        replace(_level(f"L{i + 1 + skipped}", found, findings, driver.line_bytes, i), shared=i + skipped > 0)
        for i, found in enumerate(findings.sure)
    ]
    if len(out) == 1 and not skipped:  # nobody knows what lies behind it
        out.append(replace(driver, size_bytes=max(driver.size_bytes, 4 * out[0].size_bytes)))
    if own_images and len(findings.texture) > 1 and findings.texture[0].confidence != "low":
        # The first cache on the way of images; further ones are shared with buffers.
        texture = _level("texture L1", findings.texture[0], None, driver.line_bytes, 0)
        out.insert(0, replace(texture, serves="image", write_back=False, write_allocate=False))
        if not out[1].shared:
            out[1] = replace(out[1], serves="buffer")
    return tuple(out)


def _level(name: str, found: FoundLevel, findings: CacheFindings | None, driver_line: int, index: int) -> CacheLevel:
    line, ways, sector, told = driver_line, 8 if index == 0 else 16, 0, ["line from the driver", "ways assumed"]
    if findings is not None and index == 0:
        if findings.line.found:
            line, told[0] = int(findings.line.value), f"line: {findings.line.why}"
        if findings.fetch.found and findings.fetch.value < line:
            sector = int(findings.fetch.value)
        if findings.ways.found:
            ways, told[1] = int(findings.ways.value), f"ways: {findings.ways.why}"
    return CacheLevel(
        name,
        found.size_bytes // (line * ways) * line * ways or found.size_bytes,
        line,
        ways,
        sector_bytes=sector,
        latency_s=float(f"{found.latency_ns * 1e-9:.4g}"),
        source=f"measured: pointer chase, {_between(found)}; {'; '.join(told)}",
        confidence=found.confidence,
    )


def _between(found: FoundLevel) -> str:
    return f"{size_text(found.size_bytes)} fit and {size_text(found.above_bytes)} do not"


def size_text(size_bytes: float) -> str:
    """48 KiB, 1.25 MiB."""
    return f"{size_bytes / 2**20:.4g} MiB" if size_bytes >= 1 << 20 else f"{size_bytes / 2**10:.4g} KiB"


def chase_facts(findings: CacheFindings) -> dict[str, Fact]:
    """What the chase found, and what it did not, as facts of a device model."""
    out = {}
    for prefix, levels in (("chase", findings.levels), ("chase_texture", findings.texture)):
        for i, level in enumerate(levels):
            name = f"{prefix}_l{i + 1}" if level.size_bytes else f"{prefix}_memory"
            latency = float(f"{level.latency_ns * 1e-9:.4g}")
            out[f"{name}_latency_s"] = Fact(latency, "measured: pointer chase", level.confidence)
            if level.size_bytes:
                source = f"measured: pointer chase, {_between(level)}"
                out[f"{name}_bytes"] = Fact(float(level.size_bytes), source, level.confidence)
        if len(levels) == 1:
            out[f"{prefix}_l1_bytes"] = Fact(NOT_SEPARABLE, "pointer chase: one plateau, no knee", "low")
    for key, finding in (
        ("chase_l1_line_bytes", findings.line),
        ("chase_l1_fetch_bytes", findings.fetch),
        ("chase_memory_fetch_bytes", findings.memory_fetch),
        ("chase_l1_ways", findings.ways),
    ):
        source = f"pointer chase: {finding.why}"
        out[key] = Fact(float(finding.value), source, "high") if finding.found else Fact(NOT_SEPARABLE, source, "low")
    return out


def describe_caches(model: DeviceModel) -> str:
    """One line for people: the caches of a model, with what a chase found beside what others say."""
    findings = findings_of(model.probes)
    parts = []
    for cache in model.caches:
        near = _nearest(cache, findings) if cache.serves != "image" else None
        whence = "sysfs" if cache.source.startswith("sysfs") else cache.confidence
        chased = f"chase {size_text(near.size_bytes)} to {size_text(near.above_bytes)}" if near else "chase: nothing"
        beside = f"{whence}; {chased}, {near.latency_ns:.3g} ns" if near else f"{whence}; {chased}"
        beside = beside if findings.levels else whence
        parts.append(f"{cache.name} {size_text(cache.size_bytes)} ({beside}) {cache.line_bytes} B lines")
    if findings.levels:
        parts.append(f"chased L1 lines {_found(findings.line)}, ways {_found(findings.ways)}")
        parts.append(f"memory {findings.levels[-1].latency_ns:.3g} ns")
    return f"caches: {'; '.join(parts) or 'none stated'}"


def _found(finding: Finding) -> str:
    return f"{finding.value:g}" if finding.found else finding.status


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
