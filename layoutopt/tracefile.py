"""A profile as a trace that Perfetto and Chrome read (https://ui.perfetto.dev): the Trace Event Format's JSON.

One track of launches, coloured by phase; more tracks only where launches overlap; one of phases; a counter of the bytes
of the arena that hold something needed. Times are the device's, from the step's first launch.
"""

from __future__ import annotations

import json
import os
from typing import Any

from layoutopt.files import write_atomic
from layoutopt.profiling import LaunchProfile, Profile

__all__ = ["trace_events", "write_trace"]

_PROCESS = 1
_PHASES = 1
"""Thread of the phases; those of the launches follow."""


def trace_events(found: Profile) -> list[dict[str, Any]]:
    """The events: names first, then by time."""
    lanes = _lanes(found.launches)
    names = {_PHASES: "phases"} | {
        _PHASES + 1 + lane: "launches" if not lane else f"launches that overlap {lane}" for lane in sorted(set(lanes))
    }
    head = [_meta("process_name", 0, f"{found.graph} ({found.strategy}) on {found.device}")]
    for thread, name in names.items():
        head += [
            _meta("thread_name", thread, name),
            {**_meta("thread_sort_index", thread, ""), "args": {"sort_index": thread}},
        ]
    events = [_launch(x, _PHASES + 1 + lane) for x, lane in zip(found.launches, lanes, strict=True)]
    events += _phases(found.launches)
    events += _counter(found)
    return head + sorted(events, key=lambda e: e["ts"])


def write_trace(found: Profile, path: str | os.PathLike[str]) -> None:
    """Write the trace; nothing half-written stays behind.

    Raises:
        LayoutOptError: the directory does not exist or cannot be written.
    """
    about = {
        "step_s": found.step_s,
        "kernels_s": found.kernels_s,
        "gap_s": found.gap_s,
        "flops_per_s": found.flops_per_s,
        "memory_bytes_per_s": found.memory_bytes_per_s,
    }
    body = {"displayTimeUnit": "ms", "traceEvents": trace_events(found), "otherData": about}
    write_atomic(path, json.dumps(body) + "\n")


def _meta(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "ts": 0, "name": name, "args": {"name": value}}


def _launch(x: LaunchProfile, thread: int) -> dict[str, Any]:
    args = {
        "op": x.label,
        "kind": x.kind,
        "variant": x.kernel,
        "shapes": x.spec,
        "layouts": list(x.layouts),
        "flops": x.flops,
        "bytes": x.bytes,
        "bound": x.bound,
        "roofline_us": x.roofline_s * 1e6,
        "median_us": x.time_s * 1e6,
        "percent_of_roofline": 100 * x.share_of_roofline,
    }
    return _slice(x.label, x.phase, thread, x.start_s, x.end_s, args)


def _slice(name: str, phase: str, thread: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "ts": start_s * 1e6,
        "dur": max(end_s - start_s, 0.0) * 1e6,
        "name": name,
        "cat": phase,
        "args": args,
    }


def _lanes(launches: tuple[LaunchProfile, ...]) -> list[int]:
    """A lane per launch: the first in which nothing is still running."""
    ends: list[float] = []
    lanes = []
    for x in launches:
        lane = next((i for i, end in enumerate(ends) if end <= x.start_s), len(ends))
        ends[lane:] = [x.end_s, *ends[lane + 1 :]]
        lanes.append(lane)
    return lanes


def _phases(launches: tuple[LaunchProfile, ...]) -> list[dict[str, Any]]:
    """A slice from the first to the last launch of each run of one phase."""
    runs: list[list[LaunchProfile]] = []
    for x in launches:
        if runs and runs[-1][-1].phase == x.phase:
            runs[-1].append(x)
        else:
            runs.append([x])
    return [
        _slice(run[0].phase, run[0].phase, _PHASES, run[0].start_s, run[-1].end_s, {"launches": len(run)})
        for run in runs
    ]


def _counter(found: Profile) -> list[dict[str, Any]]:
    """The bytes alive, at the first launch of every step that changes them."""
    events: list[dict[str, Any]] = []
    last: int | None = None
    for x in found.launches:
        alive = found.alive_bytes[x.step]
        if alive != last:
            args = {"bytes": alive}
            events.append(
                {"ph": "C", "pid": _PROCESS, "ts": x.start_s * 1e6, "name": "arena bytes alive", "args": args}
            )
            last = alive
    return events
