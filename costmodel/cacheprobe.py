"""Caches of a device that is here, found by pointer chase: sizes and latencies, then lines and ways of the nearest.

The second half is made for what the first half found: line and ways are looked for around the size of the first level,
what a miss brings between the first and second level and in memory. What a curve does not show is said to be not
separable; a driver's or the operating system's word then stands (``costmodel/caches.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from costmodel.chase import LINE_BYTES, Chains, Walk, clashing, curve_of, pairs, run_walks, spaced
from costmodel.device import Probe
from costmodel.knees import (
    NOT_SEPARABLE,
    Finding,
    FoundLevel,
    find_fetch,
    find_levels,
    find_line,
    find_ways,
)

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["CacheFindings", "findings_of", "probe_caches", "sizes_between"]

ROUNDS = 9
THOROUGH_ROUNDS = 25
SMALLEST_BYTES = {"cpu": 4 << 10, "gpu": 2 << 10}
LARGEST_BYTES = {"cpu": 128 << 20, "gpu": 512 << 20}
"""A GPU's last cache may keep a share of what does not fit: only far beyond it the latency is memory's."""
THOROUGH_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30}
COARSE_ABOVE_BYTES = 8 << 20
"""Beyond this, two sizes a doubling are enough unless there is time for four."""
SMALLEST_TEXTURE_BYTES, LARGEST_TEXTURE_BYTES = 256, 16 << 20
SHARE_SIZES = 0.65
"""Share of the time for sizes; the rest is for lines and ways."""
ODD_STRIDE_BYTES = 192
NEAR_DISTANCES = (8, 16, 32, 64, 128, 256)
NEAR_BLOCK_BYTES = 512
FAR_DISTANCES = (8, 16, 32, 64, 128, 256, 512)
SET_STRIDES = {"cpu": (4 << 10, 8 << 10, 16 << 10), "gpu": (8 << 10, 16 << 10, 32 << 10, 64 << 10)}
SET_COUNTS = (*range(1, 21), 24, 25, 32, 33)

_NONE = Finding(0, NOT_SEPARABLE, "no first cache was found")


@dataclass(frozen=True)
class CacheFindings:
    """What the chase tells of a device's caches.

    Attributes:
        levels: through buffers, nearest first; the last is memory. One alone: no cache was found.
        texture: through images, likewise; empty where there are none or nobody looked.
        line: bytes that a tag of the first cache covers.
        fetch: bytes that a miss of the first cache brings.
        memory_fetch: bytes that a miss of the last cache brings.
        ways: of the first cache.
        probes: every walk of every curve.
    """

    levels: tuple[FoundLevel, ...]
    texture: tuple[FoundLevel, ...] = ()
    line: Finding = _NONE
    fetch: Finding = _NONE
    memory_fetch: Finding = _NONE
    ways: Finding = _NONE
    probes: Mapping[str, Probe] = field(default_factory=dict)

    @property
    def caches(self) -> tuple[FoundLevel, ...]:
        """Levels before memory."""
        return self.levels[:-1]

    @property
    def sure(self) -> tuple[FoundLevel, ...]:
        """Those that are more than noise; none where the first is not."""
        sure = tuple(level for level in self.caches if level.confidence != "low")
        return sure if sure and sure[0] is self.caches[0] else ()


def sizes_between(smallest: int, largest: int, *, coarse_above: int | None = None) -> list[int]:
    """Sizes from one to the other, four a doubling: 4, 5, 6, 7, 8, 10, …; two a doubling beyond ``coarse_above``."""
    out, octave = [], smallest
    while octave < largest:
        steps = (4, 6) if coarse_above is not None and octave >= coarse_above else (4, 5, 6, 7)
        out += [octave * step // 4 for step in steps if octave * step // 4 < largest]
        octave *= 2
    return [*out, largest]


def probe_caches(
    runtime: Runtime,
    seconds: float,
    *,
    thorough: bool = False,
    largest_bytes: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> CacheFindings:
    """Chase, and say what was found.

    Args:
        runtime: the device.
        seconds: wall time that rounds stop after; there are three of each in any case.
        thorough: finer steps over a larger range, more rounds.
        largest_bytes: of the working sets; 0: more than any cache that is common.
        tick: called after each round.

    Raises:
        DeviceError: the device refuses.
    """
    begin = time.monotonic()
    kind = runtime.limits.kind
    rng = np.random.default_rng(0)
    rounds = THOROUGH_ROUNDS if thorough else ROUNDS
    largest = largest_bytes or (THOROUGH_BYTES if thorough else LARGEST_BYTES)[kind]
    room = min(runtime.limits.max_alloc_bytes, runtime.limits.global_mem_bytes // 32)
    while largest > room:
        largest //= 2
    coarse = None if thorough else COARSE_ABOVE_BYTES
    sizes = sizes_between(SMALLEST_BYTES[kind], largest, coarse_above=coarse)
    buffer = Chains(runtime)
    # Largest first: those that share a buffer are near each other in size.
    walks = buffer.add("chase_buffer", [spaced(s, LINE_BYTES, rng, kind) for s in reversed(sizes)])
    runs = [(buffer, walk) for walk in reversed(walks)]
    if kind == "gpu" and runtime.info.image_max_buffer_texels:
        image = Chains(runtime, image=True)
        most = min(LARGEST_TEXTURE_BYTES, largest, runtime.info.image_max_buffer_texels * 16)
        chains = [
            spaced(s, LINE_BYTES, rng, kind, texels=True) for s in reversed(sizes_between(SMALLEST_TEXTURE_BYTES, most))
        ]
        runs += [(image, walk) for walk in reversed(image.add("chase_image", chains))]
    probes = run_walks(runs, rounds, begin + SHARE_SIZES * seconds, tick)
    levels = find_levels(curve_of(probes, "chase_buffer"))
    if len(levels) > 1:
        detail = _detail_walks(buffer, levels, largest, kind, rng)
        probes |= run_walks([(buffer, walk) for walk in detail], rounds, begin + seconds, tick)
    return findings_of(probes)


def _detail_walks(
    buffer: Chains, levels: tuple[FoundLevel, ...], largest: int, kind: str, rng: np.random.Generator
) -> list[Walk]:
    """Walks for line, fetch and ways of the first level; what the levels leave no room for is left out."""
    near = levels[0].size_bytes
    spans = sizes_between(near, min(8 * near, largest))
    # Not read beforehand: reading all that lies there would leave other lines in the cache than those that are visited.
    odd = [replace(spaced(s, ODD_STRIDE_BYTES, rng, kind), warm=False) for s in spans]
    out = buffer.add(f"chase_stride{ODD_STRIDE_BYTES}", odd)
    for stride in SET_STRIDES[kind]:
        counts = [n for n in SET_COUNTS if n * stride <= largest]
        out += buffer.add(f"chase_set{stride}", [clashing(n, stride, rng) for n in counts])
    beyond = levels[1].size_bytes or largest
    span = min(16 * near, beyond * 3 // 4)
    if span * LINE_BYTES // NEAR_BLOCK_BYTES >= near * 5 // 4:  # else pairs within one line would all fit
        for distance in NEAR_DISTANCES:
            out += buffer.add("chase_near", [pairs(span, NEAR_BLOCK_BYTES, distance, rng, kind)], apart=True)
    share = len(FAR_DISTANCES)
    far = [
        pairs(largest, 1024, distance, rng, kind, share=(i, share), once=True)
        for i, distance in enumerate(FAR_DISTANCES)
    ]
    return out + buffer.add("chase_far", far, apart=True)


def findings_of(probes: Mapping[str, Probe]) -> CacheFindings:
    """The findings again from probes that a device model keeps."""
    chased = {name: probe for name, probe in probes.items() if name.startswith("chase_")}
    levels = find_levels(curve_of(chased, "chase_buffer"))
    texture = find_levels(curve_of(chased, "chase_image"))
    if len(levels) < 2:
        return CacheFindings(levels, texture, probes=chased)
    first, beyond_ns = levels[0], levels[1].latency_ns
    strides = sorted({int(n.removeprefix("chase_set").split("_")[0]) for n in chased if n.startswith("chase_set")})
    return CacheFindings(
        levels,
        texture,
        line=find_line(curve_of(chased, f"chase_stride{ODD_STRIDE_BYTES}"), ODD_STRIDE_BYTES, first, beyond_ns),
        fetch=find_fetch(curve_of(chased, "chase_near")),
        memory_fetch=find_fetch(curve_of(chased, "chase_far")),
        ways=find_ways({s: curve_of(chased, f"chase_set{s}") for s in strides}, first, beyond_ns),
        probes=chased,
    )
