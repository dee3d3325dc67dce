"""Reuse distances of a whole step: its kernels' line accesses, work group by work group, through one stack.

The stream is that of a single core that runs all work groups in dispatch order; lanes of a wave that touch a line in
one instruction touch it once. Of a launch of too many accesses the first work groups are walked and count for the rest:
distances within them are exact, reuse between far work groups is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numba import njit

from costmodel.device import DeviceModel
from kernels.bind import bind
from layoutopt.graph import DTYPES, TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph
from simulator.device_caches import hierarchy_of
from simulator.reuse import Distances, Histogram
from simulator.simulate import arena_addresses, made_up_ids
from simulator.trace import Stream, Walk, compile_launch, stream

__all__ = ["StepReuse", "coalesced", "reuse_distances"]

_PIECE = 1_000_000
"""Accesses that are written down at a time."""


@dataclass(frozen=True)
class StepReuse:
    """Reuse distances of a step.

    Attributes:
        total: of all accesses.
        by_tensor: by storage.
        walked: share of the accesses that were walked.
    """

    total: Histogram
    by_tensor: Mapping[str, Histogram]
    walked: float


def reuse_distances(
    graph: TrainingGraph,
    plan: Plan,
    model: DeviceModel,
    *,
    max_accesses: float = 2_000_000,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> StepReuse:
    """Of the lines of the device's nearest cache.

    Args:
        graph: the plan's graph.
        plan: what runs.
        model: whose line and wave width.
        max_accesses: of a launch, beyond which only its first work groups are walked.
        seed: of the made-up values of integer inputs that steer gathers.
        progress: called with (steps done, steps).
    """
    graph = planned_graph(plan, graph)
    steps = bind(graph, plan, model.limits)
    line_bytes = hierarchy_of(model).levels[0].line_bytes
    wave = model.limits.simd_width if model.limits.kind == "gpu" else 1
    found = Distances(line_bytes)
    rows: dict[str, int] = {}
    walked = executed = 0.0
    for number, step in enumerate(steps):
        addresses = arena_addresses(plan, step)
        own = np.array([rows.setdefault(name or "(workspace)", len(rows)) for name in step.storages], dtype=np.int64)
        items = np.array([DTYPES[step.kernel.operand_dtype(i)] for i in range(len(step.storages))], dtype=np.int64)
        steer = made_up_ids(graph, step, seed)
        for launch in step.kernel.launches:
            compiled = compile_launch(step.kernel, launch, steer)
            per_group = max(compiled.executions / max(compiled.groups, 1), 1)
            last = compiled.groups
            if compiled.executions > max_accesses:
                last = min(max(int(max_accesses / per_group), 1), last)
            for lines, operands in _pieces(compiled, last, per_group, wave, addresses, items, line_bytes):
                found.feed(lines, own[operands], compiled.groups / last)
            executed += compiled.executions
            walked += compiled.executions * last / max(compiled.groups, 1)
        if progress:
            progress(number + 1, len(steps))
    return StepReuse(found.histogram(), found.histograms(rows), walked / executed if executed else 1.0)


def _pieces(
    launch: Walk,
    last: int,
    per_group: float,
    wave: int,
    addresses: np.ndarray,
    items: np.ndarray,
    line_bytes: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lines and operands of a launch's first groups, so many groups at a time that it fits into memory."""
    at_once = max(int(_PIECE / per_group), 1)
    for first in range(0, last, at_once):
        records = stream(launch, first, min(first + at_once, last), wave)
        yield coalesced(records, addresses, items, line_bytes)


def coalesced(
    records: Stream, addresses: np.ndarray, items: np.ndarray, line_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The lines that the requests of waves touch, each once, in order of address, and the operands that they are of.

    Args:
        records: accesses of work items as the walker makes them.
        addresses: byte address of each operand.
        items: bytes of an element of each operand.
        line_bytes: of a line, a power of two.
    """
    begin = addresses[records.operand] + records.offset_elems * items[records.operand]
    end = begin + records.width * items[records.operand] - 1
    shift = line_bytes.bit_length() - 1
    first, last = begin >> shift, end >> shift
    lines = np.zeros(int((last - first + 1).sum()), dtype=np.int64)
    operands = np.zeros(lines.size, dtype=np.int64)
    count = _coalesce(records.request, records.operand, first, last, lines, operands)
    return lines[:count], operands[:count]


@njit(cache=True)
def _coalesce(
    request: np.ndarray,
    operand: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    lines: np.ndarray,
    operands: np.ndarray,
) -> int:
    count = begin = 0  # lines so far, and where the request's own begin
    for i in range(request.size):
        if i > 0 and request[i] != request[i - 1]:
            begin = count
        for line in range(first[i], last[i] + 1):
            at = count
            while at > begin and lines[at - 1] > line:
                at -= 1
            if at > begin and lines[at - 1] == line:
                continue
            for k in range(count, at, -1):
                lines[k] = lines[k - 1]
            lines[at], operands[count] = line, operand[i]
            count += 1
    return count
