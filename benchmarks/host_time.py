"""What a step costs the host: one launch by who enqueues it and what it is bound to, then a whole step part by part.

    python benchmarks/host_time.py [--device SEL] [--graph NAME] [--launches N] [--rounds N] [--json FILE] [--smoke]

Launches are enqueued on an idle queue and do next to nothing, so that the host is what is measured; the device is
waited for between the rounds. Compared are one kernel object again and again and one for each launch, as in a step;
arguments that are regions of one arena and whole buffers; the plain queue and one that records times.

Of a step: checking the inputs, sending them, and all of it, with and without shared launches (``kernels/launches.py``).
Microseconds, medians over rounds; the CPU time of the calling thread beside them, since a CPU device competes with its
host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels.execute import Executor
from kernels.runtime import Runtime, pick
from layoutopt.compare import example_inputs
from layoutopt.errors import LayoutOptError
from layoutopt.facade import solve_plan
from layoutopt.files import check_target, write_atomic
from layoutopt.models import shipped, uncalibrated

ARGUMENTS = 6
_NAMES = [f"a{i}" for i in range(ARGUMENTS)]
TINY = (
    f"__kernel void tiny({', '.join(f'__global int *{n}' for n in _NAMES)}) "
    f"{{ if (get_global_id(0) == 1000000) {' '.join(f'{n}[0] = 1;' for n in _NAMES)} }}"
)


def seconds(action: Callable[[], object], finish: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median wall and CPU seconds of ``action``; the first round is not counted."""
    wall, own = [], []
    for number in range(rounds + 1):
        finish()
        begin, cpu = time.perf_counter(), time.thread_time()
        action()
        if number:
            wall.append(time.perf_counter() - begin)
            own.append(time.thread_time() - cpu)
    finish()
    return median(wall), median(own)


def launch_rows(runtime: Runtime, count: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of one launch."""
    align = runtime.limits.base_align_bytes
    arena = runtime.allocate(align * ARGUMENTS)
    regions = [runtime.region(arena, align * i, align) for i in range(ARGUMENTS)]
    buffers = [runtime.allocate(align) for _ in range(ARGUMENTS)]

    def kernels(arguments: Sequence[Any], distinct: bool) -> list[Any]:
        made = [runtime.kernel(TINY, "tiny", "tiny") for _ in range(count if distinct else 1)]
        for kernel in made:
            kernel.set_args(*arguments)
        return made if distinct else made * count

    def timed_launches(calls: Sequence[Any]) -> None:
        for call in calls:
            runtime.launch_timed(*call)

    def finish() -> None:
        runtime.finish()
        runtime.profiling_queue.finish()

    cases: list[tuple[str, Sequence[Any], bool]] = [
        ("one kernel, buffers", buffers, False),
        ("a kernel each, buffers", buffers, True),
        ("a kernel each, regions", regions, True),
        ("a kernel each, the arena", [arena] * ARGUMENTS, True),
    ]
    rows = []
    for what, arguments, distinct in cases:
        calls = [(kernel, (1,), (1,)) for kernel in kernels(arguments, distinct)]
        ways = {"plain queue": partial(runtime.enqueue, calls), "timed queue": partial(timed_launches, calls)}
        for way, action in ways.items():
            wall, own = seconds(action, finish, rounds)
            rows.append({"what": f"launch: {what}", "how": way, "us": wall / count * 1e6, "cpu_us": own / count * 1e6})
    return rows


def step_rows(runtime: Runtime, name: str, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a step's parts."""
    graph = shipped(name)
    plan = solve_plan(graph, uncalibrated(runtime), strategy="rowmajor")
    inputs = example_inputs(graph)
    rows = []
    for share in (True, False):
        run = Executor(runtime, graph, plan, share=share)
        how = f"{run.launches} launches" + (", shared" if share else "")
        arrays = run._feed.check(inputs, None)
        parts: dict[str, Callable[[], object]] = {
            "check": partial(run._feed.check, inputs),
            "send": partial(run._inputs.send, arrays),
            "step": partial(run.step, inputs),
        }
        for part, action in parts.items():
            wall, own = seconds(action, run.finish, rounds)
            rows.append({"what": f"{name}: {part}", "how": how, "us": wall * 1e6, "cpu_us": own * 1e6})
        run.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--graph", default="minilm", help="one that ships")
    parser.add_argument("--launches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.json:
        check_target(args.json)
    if args.smoke:
        args.graph, args.launches, args.rounds = "vit-digits", 5, 1
    runtime = Runtime(pick(args.device))
    rows = launch_rows(runtime, args.launches, args.rounds) + step_rows(runtime, args.graph, args.rounds)
    table = Table("what", "how", "us", "CPU us", title=runtime.info.label)
    for row in rows:
        table.add_row(row["what"], row["how"], f"{row['us']:.2f}", f"{row['cpu_us']:.2f}")
    Console(width=140).print(table)
    if args.json:
        document = {"device": runtime.info.label, "driver": runtime.info.driver, "rows": rows}
        write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"host_time: {error}")
