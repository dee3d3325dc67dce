"""The cache simulator beside cachegrind: what kernels miss as PoCL executes them on a CPU.

    python benchmarks/cache_cpu.py [--device NAME] [--only TEXT] [--json FILE] [--smoke]

Valgrind runs PoCL itself, one thread, and its cachegrind simulates a first and a last level of data cache for every
instruction that is executed. Each kernel is named for its case, so that cachegrind's counts are the kernel's alone,
without the driver and Python around it; the caches are swept before each launch. The simulator walks the same kernel at
the same addresses through caches of the same sizes, from empty ones. Both are LRU, and cachegrind knows no dirty lines:
a store is a load there, and so it is here.

What is compared is misses, not hit rates: the compiled code also loads and stores what it has no registers for, which
hits, and moves a vector in the pieces that valgrind's processor has. A piece that crosses a line is at most one miss
there. Kernels are those that the shipped model of PoCL finds fastest for their layouts. ``--smoke`` runs and simulates
two and compares nothing, as is done where valgrind is missing. Processors' own counters are not read: virtual machines
seldom have them (the record says whether this one does).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache_counters import spearman, stores_apart
from benchmarks.count import Memory
from benchmarks.counted import ROW, T4, T16, T816, TURNED, Counted, ids, places
from benchmarks.recording import Record
from benchmarks.zoo_plans import markdown
from costmodel.device import load
from costmodel.model import CostModel
from kernels.source import program_source
from kernels.spec import Kernel
from kernels.variants import kernels_for
from layoutopt.errors import LayoutOptError
from simulator.cache import Hierarchy, Level
from simulator.trace import compile_launch, walk
from simulator.walker import WRITE as STORES

MODEL = "pocl-cpu-3.1"
LINE = 64
GEOMETRIES = (((32 << 10, 8), (256 << 10, 8)), ((48 << 10, 12), (1 << 20, 16)))
"""Bytes and ways of the first and the last level."""
OPS: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    *((op, (256, 256, 256), (ROW, T4, T16)) for op in ("Y", "dX", "dW")),
    *((op, (700, 500), (ROW, TURNED, T4, T816)) for op in ("softmax", "layer_norm", "bias_grad", "relayout")),
    ("adamw", (700, 500), (ROW, T816)),
    *((op, (100, 4000), (ROW, T4)) for op in ("cross_entropy", "cross_entropy_grad")),
    *((op, (500, 384, 1000), (ROW, T4, T816)) for op in ("gather", "scatter_add")),
    ("attention", (12, 128, 128, 32), ("tokens", ROW, T4)),
)
SMOKE = (("softmax", (40, 100), (ROW, T4)),)
APART = 0.05
"""Layouts whose misses differ by less, as a share of the larger, have no order to be found."""
ONE_THREAD = dict.fromkeys(("POCL_MAX_PTHREAD_COUNT", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
PROCESSOR = "haswell"
"""What valgrind's processor can do, in LLVM's words: PoCL from 3.1 on builds for it outside valgrind too."""
COUNTERS = Path("/sys/bus/event_source/devices/cpu")
"""Where Linux lists a processor's own counters, if it can read any."""


@dataclass(frozen=True)
class Misses:
    """Of all launches of a kernel, by loads and by stores.

    Attributes:
        first: loads and stores that miss the first level.
        last: that miss the last.
    """

    first: tuple[int, int]
    last: tuple[int, int]


def cases(only: str, smoke: bool) -> Iterator[Counted]:
    """Each op and layout with the variant that the model finds fastest."""
    model = load(MODEL)
    costs = CostModel(model)
    for op, size, layouts in SMOKE if smoke else OPS:
        for layout in layouts:
            spec, stored = Counted(op, size, layout, "").spec_and_layouts()
            found = kernels_for(spec, stored, model.limits)
            best = min(found, key=lambda kernel: costs.predict(kernel).total_ns)
            case = Counted(op, size, layout, best.variant.label)
            if only in case.label:
                yield case


# ---- cachegrind -----------------------------------------------------------------------------------------------------


def name_of(case: int) -> str:
    """What every function of a case's kernels is called, with the number of the launch behind it."""
    return f"layoutopt_case{case}_"


def launched(rows: Sequence[dict[str, Any]], device: str | None, sweep: int) -> list[int]:
    """Run cases once each, their kernels named for them; returns the byte address of each allocation.

    Args:
        rows: fields of ``Counted``.
        device: where; None: the one that is used by default.
        sweep: bytes that are read before each launch, so that nothing else is in the caches.
    """
    import pyopencl as cl

    from kernels.instrument import WHERE
    from kernels.runtime import Runtime, pick

    runtime, memory, limits = Runtime(pick(device)), Memory(), load(MODEL).limits
    dust, addresses = np.ones(sweep, np.uint8), []
    where = runtime.kernel(WHERE, "where", "where")
    for number, row in enumerate(rows):
        kernel = Counted(**{**row, "size": tuple(row["size"])}).kernel(limits)
        at, size = places(kernel)
        arena = runtime.allocate(size)
        where.set_args(arena)
        cl.enqueue_nd_range_kernel(runtime.queue, where, (1,), (1,))
        addresses.append(int(runtime.download(arena, np.zeros(1, np.uint64))[0]))
        runtime.upload(arena, memory.bytes_of(kernel))
        buffers = [runtime.region(arena, begin, size - begin) if begin else arena for begin in at]
        for i, launch in enumerate(kernel.launches):
            named = f"{name_of(number)}{i}"
            source = renamed(program_source(kernel, launch), launch.entry, named)
            call = runtime.kernel(source, named, kernel.variant.label)
            call.set_args(*runtime.arguments(kernel, launch, buffers))
            if i == 0:
                assert dust.sum(dtype=np.int64) == sweep
            cl.enqueue_nd_range_kernel(runtime.queue, call, launch.global_size, launch.local_size).wait()
    return addresses


def renamed(source: str, entry: str, name: str) -> str:
    """A kernel's source with its entry named so, and functions that it calls, which need not be inlined, after it."""
    called = dict.fromkeys(re.findall(r"^[\w ]*\b(\w+)\([^;{)]*\)\s*\{", source, re.MULTILINE))
    names = {entry: name} | {own: f"{name}_{own}" for own in called if own != entry}
    return "".join(f"#define {own} {other}\n" for own, other in names.items()) + source


def cachegrind(
    chosen: Sequence[Counted], geometry: tuple[tuple[int, int], ...], device: str | None, folder: Path
) -> tuple[list[int], list[Misses]]:
    """Addresses and misses of cases, counted by cachegrind.

    Args:
        chosen: the cases.
        geometry: bytes and ways of both levels.
        device: OpenCL's name of the CPU.
        folder: for files, and for programs that are built for valgrind's processor.

    Raises:
        LayoutOptError: valgrind does not run.
    """
    first, last = (f"{size},{ways},{LINE}" for size, ways in geometry)
    counted = folder / "counts"
    tool = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--D1={first}", f"--LL={last}"]
    addresses = run(chosen, device, folder, 4 * geometry[-1][0], [*tool, f"--cachegrind-out-file={counted}"])
    return addresses, counted_misses(counted.read_text(), len(chosen))


def run(chosen: Sequence[Counted], device: str | None, folder: Path, sweep: int, tool: Sequence[str] = ()) -> list[int]:
    """``launched`` in a process of its own.

    Args:
        chosen: the cases.
        device: OpenCL's name of the CPU.
        folder: for files, and for programs that are built for valgrind's processor.
        sweep: see ``launched``.
        tool: what the process runs under.

    Raises:
        LayoutOptError: it ends with an error.
    """
    asked, answer = folder / "cases.json", folder / "addresses.json"
    asked.write_text(json.dumps([asdict(case) for case in chosen]))
    answer.unlink(missing_ok=True)
    own = [sys.executable, __file__, "--launch", str(asked), "--to", str(answer), "--sweep", str(sweep)]
    own += ["--device", device] if device else []
    (folder / "pocl").mkdir(exist_ok=True)
    path = os.pathsep.join(p for p in (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")) if p)
    environment = {"POCL_LLVM_CPU_NAME": PROCESSOR, **os.environ, **ONE_THREAD, "PYTHONPATH": path}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "POCL_CACHE_DIR": str(folder / "pocl")}
    done = subprocess.run([*tool, *own], capture_output=True, text=True, check=False, env=environment)
    if done.returncode or not answer.exists():
        name = tool[0] if tool else "the process that launches kernels"
        raise LayoutOptError(f"{name} ended with {done.returncode}: {done.stderr[-600:]}")
    found: list[int] = json.loads(answer.read_text())
    return found


def counted_misses(text: str, count: int) -> list[Misses]:
    """What cachegrind counted in the functions of each case.

    Args:
        text: of its file.
        count: of the cases.

    Raises:
        LayoutOptError: a case has no function there.
    """
    sums: dict[int, np.ndarray] = {}
    events: list[str] = []
    case = -1
    for line in text.splitlines():
        if line.startswith("events:"):
            events = line.split()[1:]
        elif line.startswith("fn="):
            _, found, rest = line.partition("layoutopt_case")
            case = int(rest.split("_")[0]) if found else -1
        elif case >= 0 and line[:1].isdigit():
            sums[case] = sums.get(case, 0) + np.array([int(n) for n in line.split()[1:]])
    for number in range(count):
        if number not in sums:
            raise LayoutOptError(f"cachegrind names no function {name_of(number)}: the driver hides its kernels' names")
    first_loads, first_stores, loads, stores = (events.index(name) for name in ("D1mr", "D1mw", "DLmr", "DLmw"))
    rows = [sums[n].tolist() for n in range(count)]
    return [Misses((row[first_loads], row[first_stores]), (row[loads], row[stores])) for row in rows]


# ---- simulated ------------------------------------------------------------------------------------------------------


def simulated(kernel: Kernel, address: int, geometry: tuple[tuple[int, int], ...]) -> Misses:
    """The same of the simulator, from empty caches.

    Args:
        kernel: what runs.
        address: of its allocation.
        geometry: bytes and ways of both levels.
    """
    (size, ways), (last_size, last_ways) = geometry
    levels = Level("D1", size, LINE, ways), Level("LL", last_size, LINE, last_ways, shared=True)
    state = Hierarchy(levels).state()
    gathers = kernel.spec.kind in ("gather", "scatter_add", "cross_entropy", "cross_entropy_grad")
    steer = {p: ids(kernel, p) for p in range(kernel.spec.inputs) if gathers and kernel.operand_dtype(p) == "int32"}
    total = np.zeros((2, 9), dtype=np.int64)
    for launch in kernel.launches:
        walked = stores_apart(compile_launch(kernel, launch, steer))
        meta = walked.meta.copy()
        meta[:, STORES] = 0  # as cachegrind takes them
        walked = replace(walked, meta=meta)
        operands = walked.bases.size // 2
        counts = np.zeros((2 * operands, 9), dtype=np.int64)
        at = np.tile(np.array(places(kernel)[0][:operands], dtype=np.int64) + address, 2)
        walk(walked, state, at, counts, 0, walked.groups, 1, 1)
        total += counts.reshape(2, operands, 9).sum(1)
    (loads, stores) = total.tolist()
    return Misses((loads[4], stores[4]), (loads[6], stores[6]))


# ---- comparing ------------------------------------------------------------------------------------------------------


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Per level, of misses simulated over counted: mean absolute error, the mean signed one, the largest, and how well
    layouts of one op are put in order.
    """
    out = {}
    for level in ("first", "last"):
        off = np.array([sum(row["simulated"][level]) / max(sum(row["counted"][level]), 1) - 1 for row in rows])
        out[level] = {
            "mean": float(np.abs(off).mean()),
            "median": float(np.median(np.abs(off))),
            "signed": float(off.mean()),
            "most": float(np.abs(off).max()),
            **order(rows, level),
        }
    return out


def order(rows: Sequence[dict[str, Any]], level: str) -> dict[str, float | None]:
    """Spearman's coefficient over layouts of one op, the mean over ops whose layouts differ (None: there are none), and
    how many these are.
    """
    groups: dict[tuple, list[tuple[int, int]]] = {}
    for row in rows:
        pair = sum(row["counted"][level]), sum(row["simulated"][level])
        groups.setdefault((row["op"], *row["size"], *map(tuple, row["geometry"])), []).append(pair)
    found = []
    for own in groups.values():
        counted = [pair[0] for pair in own]
        if len(own) >= 3 and max(counted) - min(counted) >= APART * max(counted) > 0:
            step = APART * max(counted)
            found.append(spearman(*([round(value / step) for value in side] for side in zip(*own, strict=True))))
    return {"spearman": float(np.mean(found)) if found else None, "ranked": len(found)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: counted, then simulated."""
    head = [
        "kernel",
        "caches",
        *(f"{level} level: {what}" for level in ("first", "last") for what in ("loads", "stores")),
    ]
    body = []
    for row in rows:
        sizes = " and ".join(f"{size >> 10} KiB" for size, _ in row["geometry"])
        pairs = zip(
            (*row["counted"]["first"], *row["counted"]["last"]),
            (*row["simulated"]["first"], *row["simulated"]["last"]),
            strict=True,
        )
        label = f"{row['op']} {'x'.join(map(str, row['size']))} {row['layout']} {row['variant']}"
        body.append([label, sizes, *(f"{counted} {ours}" for counted, ours in pairs)])
    return markdown([head, *body])


def study(chosen: Sequence[Counted], device: str | None, record: Record) -> list[dict[str, Any]]:
    """Rows of every case in every pair of caches, counted and simulated."""
    limits = load(MODEL).limits
    kernels = [case.kernel(limits) for case in chosen]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        run(chosen, device, Path(name), 1)  # builds the programs, which takes long under valgrind
        for geometry in GEOMETRIES:
            addresses, counted = cachegrind(chosen, geometry, device, Path(name))
            for case, kernel, address, misses in zip(chosen, kernels, addresses, counted, strict=True):
                own = simulated(kernel, address, geometry)
                row = {**asdict(case), "geometry": geometry, "address": address}
                rows.append({**row, "counted": asdict(misses), "simulated": asdict(own)})
            record.write({"errors": errors(rows), "rows": rows})
    return rows


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="OpenCL's name of the CPU, or part of it")
    parser.add_argument("--only", default="", help="part of a kernel's label")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sweep", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        args.to.write_text(json.dumps(launched(json.loads(args.launch.read_text()), args.device, args.sweep)))
        return 0
    chosen = list(cases(args.only, args.smoke))
    record = Record(args.json, "cache_cpu", device=args.device, hardware_counters=COUNTERS.exists())
    if args.smoke or not shutil.which("valgrind"):
        limits = load(MODEL).limits
        with tempfile.TemporaryDirectory() as name:
            addresses = run(chosen, args.device, Path(name), 1)
        found = [simulated(c.kernel(limits), at, GEOMETRIES[0]) for c, at in zip(chosen, addresses, strict=True)]
        print(f"cache_cpu: {len(found)} kernels ran without valgrind, were simulated and compared with nothing")
        return 0
    began = time.monotonic()
    rows = study(chosen, args.device, record)
    print(table(rows))
    for level, own in errors(rows).items():
        print(
            f"misses of the {level} level, simulated over counted: mean absolute error {own['mean']:.2%}, median "
            f"{own['median']:.2%}, signed {own['signed']:+.2%}, largest {own['most']:.1%}; Spearman over layouts of "
            f"{own['ranked']} kernels: {own['spearman']}"
        )
    print(f"{len(rows)} kernels x layouts x caches in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"cache_cpu: {error}")
