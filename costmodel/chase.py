"""Pointer chase: one work item follows a chain of dependent loads, so that each takes the latency of where its line is.

Chains are random cycles: no prefetcher can guess them. Within a window of a few pages, so that page tables stay out of
the picture. Before a walk its whole work group reads the working set in the order in which the chain goes through it;
a launch without a walk says how long that takes and is subtracted. Walks of all sizes run in turn, round after round.

Chains of several sizes share a buffer: each has a word of every line to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.device import Probe
from costmodel.knees import Curve
from layoutopt.errors import DeviceError

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["Chain", "Chains", "Walk", "clashing", "curve_of", "cycle", "follow", "pairs", "run_walks", "spaced"]

LINE_BYTES = 64
"""Distance of neighbours in a chain of a dense working set; larger lines are visited more than once."""
UNROLLED = 8
WINDOW_BYTES = {"cpu": 64 << 10, "gpu": 4 << 20}
"""Span within which a chain jumps about before it moves on: pages of that many bytes are in a page table's cache."""
STEPS = {"cpu": (1 << 16, 1 << 18), "gpu": (1 << 13, 1 << 14)}
"""Fewest and most loads of a walk; a whole round of the chain where that lies in between."""
READ_BY_ALL_BYTES = 1 << 20
"""A GPU's working sets from here on are read by all compute units before a walk: they are far beyond any one's own
cache, and one work group would take longer to read them than to walk."""
COLD_ROUNDS = 8
"""Times that a walk goes round a chain that nothing reads beforehand."""
LEAST_WALK_NS = 60_000
"""A walk is made longer until it takes this long: launches differ by a microsecond or two."""
MOST_PLACES = 1 << 18
"""Of a chain; one through more memory visits some of its lines, at random. All of it is read before a walk."""

_SOURCE = """
#define STEP(n) p = LOAD(p);
__kernel void chase(SOURCE_ARG, __global uint *out, const uint first, const uint steps, const uint units) {
    uint sum = 0;
    for (uint i = first % TOUCH + get_local_id(0) * TOUCH; i < units; i += get_local_size(0) * TOUCH) sum += LOAD(i);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        uint p = first;
        for (uint i = 0; i < steps; i += 8) {
            STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
        }
        out[0] = p;
    }
    if (sum == 0xffffffffu) out[1] = sum; // never, which no compiler knows: the reads above stay
}
__kernel void warm(SOURCE_ARG, __global uint *out, const uint first, const uint units) {
    uint sum = 0;
    for (uint i = first % TOUCH + get_global_id(0) * TOUCH; i < units; i += get_global_size(0) * TOUCH) sum += LOAD(i);
    if (sum == 0xffffffffu) out[1] = sum;
}
"""
_BUFFER = """
#define SOURCE_ARG __global const uint *source
#define LOAD(i) source[i]
#define TOUCH 8
"""
_IMAGE = """
#define SOURCE_ARG __read_only image1d_buffer_t source
#define LOAD(i) (uint)read_imagef(source, (int)(i)).x
#define TOUCH 2
"""


@dataclass(frozen=True)
class Chain:
    """A cycle of loads.

    Attributes:
        units: [n] places in the order of visits, in words of a buffer or texels of an image.
        span_bytes: memory that it goes through.
        size: what curves show it against: its span, a stride, a distance, a number of lines.
        warm: read the whole span before a walk.
        once: visit no place twice in a walk.
    """

    units: np.ndarray
    span_bytes: int
    size: int
    warm: bool = True
    once: bool = False


@dataclass(frozen=True)
class Walk:
    """A chain on the device: where it begins and how far a walk goes."""

    name: str
    chain: Chain
    source: Any
    first: int
    steps: int


def cycle(count: int, window: int, rng: np.random.Generator) -> np.ndarray:
    """[count] a random order of 0 … count - 1 that leaves a window of ``window`` neighbours only when all were seen."""
    windows = [rng.permutation(np.arange(at, min(at + window, count))) for at in range(0, count, window)]
    return np.concatenate(windows)


def spaced(span_bytes: int, stride_bytes: int, rng: np.random.Generator, kind: str, *, texels: bool = False) -> Chain:
    """A chain through ``span_bytes`` of memory with a load every ``stride_bytes``, or fewer in a large one."""
    unit = 16 if texels else 4
    count = max(span_bytes // stride_bytes, 1)
    every = -(-count // MOST_PLACES)
    places = np.arange(count // every) * every + rng.integers(0, every, count // every)
    order = cycle(len(places), max(WINDOW_BYTES[kind] // (stride_bytes * every), 1), rng)
    return Chain(places[order] * (stride_bytes // unit), span_bytes, span_bytes)


def pairs(
    span_bytes: int,
    block_bytes: int,
    distance_bytes: int,
    rng: np.random.Generator,
    kind: str,
    *,
    share: tuple[int, int] = (0, 1),
    once: bool = False,
) -> Chain:
    """A chain of pairs: a load somewhere in a block, one ``distance_bytes`` from it up or down, then the next block.

    Args:
        span_bytes: memory that is read before a walk.
        block_bytes: a power of two, larger than the distance.
        distance_bytes: a power of two: two places that far apart are in one aligned line of more than that.
        rng: of the order.
        kind: of device: how far the chain may jump.
        share: (first, step) of the blocks that are visited.
        once: visit no place twice in a walk.
    """
    blocks = np.arange(share[0], span_bytes // block_bytes, share[1])
    blocks = blocks[cycle(len(blocks), max(WINDOW_BYTES[kind] // (block_bytes * share[1]), 1), rng)]
    offsets = rng.integers(0, block_bytes // 16, len(blocks)) * 4
    here = blocks * (block_bytes // 4) + offsets
    there = blocks * (block_bytes // 4) + (offsets ^ (distance_bytes // 4))
    return Chain(np.stack([here, there], axis=1).reshape(-1), span_bytes, distance_bytes, once=once)


def clashing(count: int, stride_bytes: int, rng: np.random.Generator) -> Chain:
    """A chain of ``count`` loads that far apart: all in one set of a cache if a way's size divides the stride."""
    units = rng.permutation(count) * (stride_bytes // 4)
    return Chain(units, count * stride_bytes, count, warm=False)


class Chains:
    """Chains on a device, ready to be walked.

    Args:
        runtime: the device.
        image: walk through an image over the buffer rather than through the buffer.
    """

    def __init__(self, runtime: Runtime, *, image: bool = False) -> None:
        self._runtime, self._image = runtime, image
        self._buffers: list[Any] = []
        self._out = runtime.allocate(8)
        kind = runtime.limits.kind
        self._local = 1 if kind == "cpu" else min(256, runtime.limits.max_work_group_size)
        self._least, self._most = STEPS[kind]

    @cached_property
    def _kernel(self) -> Any:
        return self._entry("chase")

    @cached_property
    def _warm(self) -> Any:
        return self._entry("warm")

    def _entry(self, name: str) -> Any:
        how = _IMAGE if self._image else _BUFFER
        return self._runtime.kernel(how + _SOURCE, name, f"{name}.{'image' if self._image else 'buffer'}")

    @property
    def slots(self) -> int:
        """Chains at a stride of ``LINE_BYTES`` that share a buffer."""
        return LINE_BYTES // (16 if self._image else 4)

    def add(self, name: str, chains: Sequence[Chain], *, apart: bool = False) -> list[Walk]:
        """Put chains on the device; those of one call share buffers.

        Args:
            name: of the walks, followed by each chain's size.
            chains: at a stride of ``LINE_BYTES``, or with ``apart`` such that no two visit one place.
            apart: leave each chain where it is.

        Raises:
            DeviceError: the device has no room for them.
        """
        out: list[Walk] = []
        group = len(chains) if apart else self.slots
        for begin in range(0, len(chains), group):
            part = list(chains[begin : begin + group])
            moved = part if apart else [_moved(chain, slot) for slot, chain in enumerate(part)]
            source = self._source(moved)
            out += [Walk(f"{name}_{c.size}", c, source, int(c.units[0]), self._steps(c)) for c in moved]
        return out

    def _steps(self, chain: Chain) -> int:
        count = len(chain.units)
        if not (chain.warm or chain.once):  # the first round is what reads it
            return max(count * COLD_ROUNDS, self._least) // UNROLLED * UNROLLED
        return max(min(count if chain.once else max(count, self._least), self._most) // UNROLLED, 1) * UNROLLED

    def _source(self, chains: Sequence[Chain]) -> Any:
        unit_words = 4 if self._image else 1
        words = max(max(c.span_bytes // 4, (int(c.units.max()) + 1) * unit_words) for c in chains)
        words += -words % 16
        content = np.zeros(words, dtype=np.float32 if self._image else np.uint32)
        for chain in chains:
            content[chain.units * unit_words] = np.roll(chain.units, -1)
        buffer = self._runtime.allocate(content.nbytes)
        self._buffers.append(buffer)  # held here: neither an image nor a kernel keeps it alive
        self._runtime.upload(buffer, content)
        return self._runtime.image(buffer, words // 4)[0] if self._image else buffer

    def launch(self, walk: Walk, steps: int) -> int:
        """Walk, and return what that took in nanoseconds; with no steps, what the launch takes without the walk.

        Raises:
            DeviceError: the device refuses.
        """
        units = walk.chain.span_bytes // (16 if self._image else 4) if walk.chain.warm else 0
        try:
            if self._runtime.limits.kind == "gpu" and walk.chain.span_bytes >= READ_BY_ALL_BYTES and units:
                if steps:
                    self._warm.set_args(walk.source, self._out, np.uint32(walk.first), np.uint32(units))
                    items = self._runtime.limits.compute_units * 4 * self._local
                    self._runtime.launch_timed(self._warm, (items,), (self._local,))
                units = 0
            self._kernel.set_args(walk.source, self._out, np.uint32(walk.first), np.uint32(steps), np.uint32(units))
            event = self._runtime.launch_timed(self._kernel, (self._local,), (self._local,))
            event.wait()
        except RuntimeError as error:  # pyopencl's errors derive from it
            raise DeviceError(f"pointer chase {walk.name} was refused: {error}") from error
        return int(event.profile.end - event.profile.start)

    def arrived(self) -> int:
        """Where the last walk ended."""
        return int(self._runtime.download(self._out, np.zeros(2, dtype=np.uint32))[0])


def _moved(chain: Chain, slot: int) -> Chain:
    return replace(chain, units=chain.units + slot)


def follow(chain: Chain, steps: int) -> int:
    """Where a walk of so many loads ends."""
    return int(chain.units[steps % len(chain.units)])


def run_walks(
    runs: Sequence[tuple[Chains, Walk]], rounds: int, end: float, tick: Callable[[], None] = lambda: None
) -> dict[str, Probe]:
    """Time every walk in turn, round after round.

    Args:
        runs: walks with the chains they are of.
        rounds: at most; at least three, or as many as are over by ``end``.
        end: ``time.monotonic()`` after which no further round begins.
        tick: called after each round.

    Returns:
        By the walks' names: time of the loads alone, by round.

    Raises:
        DeviceError: the device refuses a walk, or one does not end where its chain says.
    """
    warm: dict[str, list[int]] = {walk.name: [] for _, walk in runs}
    whole: dict[str, list[int]] = {walk.name: [] for _, walk in runs}
    for chains, walk in (*runs[:1], *runs[-1:]):  # compiles
        chains.launch(walk, UNROLLED)
        chains.launch(walk, 0)
    runs = [(chains, _long_enough(chains, walk)) for chains, walk in runs]
    for number in range(rounds):
        for chains, walk in runs if number % 2 == 0 else reversed(runs):
            warm[walk.name].append(chains.launch(walk, 0))
            whole[walk.name].append(chains.launch(walk, walk.steps))
            if number == 0:
                _check(chains, walk)
        tick()
        if number >= 2 and time.monotonic() > end:
            break
    out = {}
    for _, walk in runs:
        before = int(np.median(warm[walk.name]))
        times = tuple(max(t - before, 1) for t in whole[walk.name])
        what = f"dependent loads, {len(walk.chain.units)} places in {walk.chain.span_bytes} bytes"
        out[walk.name] = Probe(what, float(walk.steps), "loads", times)
    return out


def _long_enough(chains: Chains, walk: Walk) -> Walk:
    spent = chains.launch(walk, walk.steps) - chains.launch(walk, 0)
    if walk.chain.once or spent >= LEAST_WALK_NS:
        return walk
    return replace(walk, steps=walk.steps * min(LEAST_WALK_NS // max(spent, 1) + 1, 32))


def _check(chains: Chains, walk: Walk) -> None:
    want, got = follow(walk.chain, walk.steps), chains.arrived()
    if got != want:
        raise DeviceError(
            f"pointer chase {walk.name} ended at {got}, expected {want}: the device reads other values than were "
            "written, so no latency can be told; calibrate with another driver"
        )


def curve_of(probes: dict[str, Probe], prefix: str) -> Curve:
    """The curve of the probes named ``prefix_SIZE``."""
    points = sorted((int(n[len(prefix) + 1 :]), p) for n, p in probes.items() if _is_point(n, prefix))
    samples = [np.asarray(p.rounds_ns, dtype=np.float64) / p.work for _, p in points]
    return Curve(
        tuple(size for size, _ in points),
        tuple(float(np.median(s)) for s in samples),
        tuple(float(np.subtract(*np.percentile(s, [75, 25]))) for s in samples),
    )


def _is_point(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}_") and name[len(prefix) + 1 :].isdigit()
