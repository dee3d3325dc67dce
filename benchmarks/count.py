"""Hardware counters of single kernels, read with Nsight Compute on a machine with an NVIDIA GPU.

    python benchmarks/count.py FILE [--held-out] [--only TEXT] [--smoke]

Where ``ncu`` or cupy is missing, ``--smoke`` only writes the kernels' sources and says so.

NVIDIA's tools see CUDA launches alone. So each kernel of ``benchmarks/counted.py`` is built by NVIDIA's OpenCL compiler
as always, whose binary is PTX, and that PTX is launched through the CUDA driver (cupy) on the same grid over the same
bytes. Before anything is counted, both ways run once and every byte of their memory must agree.

Nsight Compute runs a launch several times, for some counters each time, and empties the caches before each
(``--cache-control all``): counters are of a cold start. Clocks are left alone. FILE is a JSON record with a row a
kernel: what it is (``Counted``), its key, how it was launched, the OpenCL launch's time, and counters per launch.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.counted import CASES, HELD_OUT, SMOKE, Counted, ids, places
from costmodel.device import load
from kernels.source import program_source
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.files import check_target, write_atomic

MODEL = "nvidia-h200"
CHUNK = 48
_L1 = [
    f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}{found}.sum"
    for what in ("sectors", "set_accesses", "requests")
    for op in ("ld", "st")
    for found in (("", "_lookup_hit", "_lookup_miss") if what == "sectors" else ("",))
]
_L2 = [
    f"lts__t_{what}{unit}{found}.sum"
    for what in ("sectors",)
    for unit in ("", "_srcunit_tex", "_srcunit_ltcfabric")
    for found in ("", "_lookup_hit", "_lookup_miss")
] + [
    f"lts__t_sectors_srcunit_tex_op_{op}{found}.sum"
    for op in ("read", "write")
    for found in ("", "_lookup_hit", "_lookup_miss")
]
_OTHER = [
    *("l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct", "lts__t_requests_srcunit_tex.sum"),
    *("lts__t_tag_requests_hit.sum", "lts__t_tag_requests_miss.sum"),
    *("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum"),
    *("l1tex__m_xbar2l1tex_read_sectors.sum", "l1tex__m_l1tex2xbar_write_sectors.sum"),
    *("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"),
    *("smsp__sass_inst_executed_op_global_ld.sum", "smsp__sass_inst_executed_op_global_st.sum"),
    *("sm__warps_active.avg.per_cycle_active", "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum"),
    *("lts__d_sectors_fill_device.sum", "lts__t_sectors_op_read_lookup_miss.sum"),
]
_LAUNCH = [
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_static",
    "launch__shared_mem_config_size",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "launch__occupancy_limit_blocks",
    "launch__grid_size",
    "launch__block_size",
]


class Memory:
    """What a kernel runs on: one allocation's bytes. Floats lie between 0.1 and 1.1; outputs begin as NaN."""

    def __init__(self) -> None:
        self._pool = np.random.default_rng(0).random(34 << 20, np.float32) + np.float32(0.1)

    def bytes_of(self, kernel: Kernel) -> np.ndarray:
        """The allocation's bytes before the launch."""
        at, size = places(kernel)
        out = np.full(size, 0xFF, np.uint8)
        for position in range(kernel.spec.inputs):
            layout = kernel.buffer_layout(position)
            if kernel.operand_dtype(position) == "int32":
                values = np.zeros(layout.size_elems, np.int32)
                values[layout.linear_offsets()] = ids(kernel, position)
            else:
                values = self._pool[: layout.size_elems]
            out[at[position] : at[position] + values.nbytes] = values.view(np.uint8)
        return out


class Cuda:
    """Launches PTX."""

    def __init__(self) -> None:
        import cupy

        self._cuda, self._runtime = cupy.cuda, cupy.cuda.runtime
        self._runtime.free(0)

    def allocation(self, data: np.ndarray) -> int:
        """Device memory with these bytes."""
        address = self._runtime.malloc(data.nbytes)
        self._runtime.memcpy(address, data.ctypes.data, data.nbytes, self._runtime.memcpyHostToDevice)
        return int(address)

    def read(self, address: int, size: int) -> np.ndarray:
        """Its bytes."""
        out = np.empty(size, np.uint8)
        self._runtime.deviceSynchronize()
        self._runtime.memcpy(out.ctypes.data, address, size, self._runtime.memcpyDeviceToHost)
        return out

    def free(self, address: int) -> None:
        """Give back."""
        self._runtime.free(address)

    def function(self, ptx: bytes, entry: str) -> tuple[Any, Any]:
        """A kernel, and the module that must outlive it."""
        module = self._cuda.function.Module()
        module.load(ptx.rstrip(b"\0"))
        return module.get_function(entry), module

    def launch(self, function: Any, launch: Launch, operands: Sequence[int]) -> None:
        """On the grid that OpenCL launches it on."""
        local = (*launch.local_size, 1, 1)[:3]
        grid = tuple(g // x for g, x in zip((*launch.global_size, 1, 1)[:3], local, strict=True))
        function(grid, local, tuple(np.uint64(operands[position]) for _, position in launch.operands))

    def counted(self, on: bool) -> None:
        """Only launches in between are counted."""
        self._runtime.deviceSynchronize()
        (self._runtime.profilerStart if on else self._runtime.profilerStop)()


def _without_environment(ptx: bytes) -> bytes:
    """OpenCL's driver sets registers of offsets into the grid, which CUDA leaves undefined: they are nought."""
    return re.sub(rb"%envreg[0-5]\b", b"0", ptx)


def ptx_name(case: int, launch: int) -> str:
    """File of a launch's PTX."""
    return f"{case}-{launch}.ptx"


def prepare(folder: Path, chosen: Sequence[Counted], limits: DeviceLimits) -> list[dict[str, Any]]:
    """Build and run by OpenCL, run the same PTX by CUDA, compare.

    Returns:
        Rows without counters, and whether both results are the same.
    """
    from kernels.runtime import Runtime, pick
    from kernels.testing import BoundKernel

    runtime, cuda, memory = Runtime(pick(None), profiling=True), Cuda(), Memory()
    kernels = [case.kernel(limits) for case in chosen]
    runtime.prepare((program_source(k, x), k.variant.label) for k in kernels for x in k.launches)
    rows = []
    for number, (case, kernel) in enumerate(zip(chosen, kernels, strict=True)):
        data = memory.bytes_of(kernel)
        at, size = places(kernel)
        arena = runtime.allocate(size)
        runtime.upload(arena, data)
        buffers = [runtime.region(arena, begin, size - begin) if begin else arena for begin in at]
        bound = BoundKernel(runtime, kernel, buffers)
        bound.run()
        expected = runtime.download(arena, np.empty(size, np.uint8))
        seconds = min(bound.run() for _ in range(3))
        address = cuda.allocation(data)
        for i, launch in enumerate(kernel.launches):
            ptx = runtime.binary(program_source(kernel, launch))
            entry = bound.calls[i].function_name  # several programs may have been compiled as one
            ptx = _without_environment(ptx)
            (folder / ptx_name(number, i)).write_bytes(f"{entry}\n".encode() + ptx)
            function, _module = cuda.function(ptx, entry)
            cuda.launch(function, launch, [address + begin for begin in at])
        same = np.array_equal(cuda.read(address, size), expected)
        cuda.free(address)
        arena.release()
        if not same:
            print(f"count: {case.label} gives another result through CUDA", file=sys.stderr)
        launches = [{"global_size": list(x.global_size), "local_size": list(x.local_size)} for x in kernel.launches]
        row = {**asdict(case), "key": kernel.key, "offsets_bytes": list(at), "bytes": size, "opencl_s": seconds}
        rows.append({**row, "same": same, "launches": launches})
    return rows


def launch_all(folder: Path, chosen: Sequence[Counted], limits: DeviceLimits, first: int, last: int) -> None:
    """Launch what ``prepare`` left, each once, for the profiler."""
    cuda, memory = Cuda(), Memory()
    for number in range(first, min(last, len(chosen))):
        kernel = chosen[number].kernel(limits)
        at, _ = places(kernel)
        address = cuda.allocation(memory.bytes_of(kernel))
        for i, launch in enumerate(kernel.launches):
            entry, ptx = (folder / ptx_name(number, i)).read_bytes().split(b"\n", 1)
            function, _module = cuda.function(ptx, entry.decode())
            cuda.counted(True)
            cuda.launch(function, launch, [address + begin for begin in at])
            cuda.counted(False)
        cuda.free(address)


def known_metrics() -> list[str]:
    """Those of ours that this profiler has for this chip; the others are named."""
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    wanted = list(dict.fromkeys([*_L1, *_L2, *_OTHER]))
    missing = [m for m in wanted if m.split(".")[0] not in names]
    if missing:
        print(f"count: unknown to this ncu: {' '.join(missing)}", file=sys.stderr)
    return [m for m in wanted if m not in missing] + _LAUNCH


def counters(log: Path, metrics: Sequence[str]) -> Iterator[dict[str, float]]:
    """Per launch in order, by metric."""
    text = [line for line in log.read_text().splitlines() if line.startswith('"')]
    rows = csv.DictReader(text)
    for row in rows:
        if not row["ID"]:
            continue  # units
        out = {}
        for name, value in row.items():
            if name in metrics and value:
                out[name] = float(value.replace(",", ""))
        yield out


def profile(folder: Path, metrics: Sequence[str], options: Sequence[str], first: int) -> list[dict[str, float]]:
    """Counters of a chunk's launches."""
    log = folder / f"{first}.csv"
    tool = ["ncu", "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off", "--csv"]
    tool += ["--page", "raw", "--print-units", "base", "--log-file", str(log), "--metrics", ",".join(metrics)]
    own = [sys.executable, __file__, "-", "--launch", str(folder), "--first", str(first), *options]
    done = subprocess.run([*tool, *own], capture_output=True, text=True, check=False)
    found = list(counters(log, metrics)) if log.exists() else []
    if done.returncode or not found:
        print(f"count: ncu: {done.stdout[-800:]} {done.stderr[-800:]}", file=sys.stderr)
        print(log.read_text()[-1500:] if log.exists() else "no log", file=sys.stderr)
    return found


def text_of(head: dict[str, Any], metrics: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """The record as JSON: a line a kernel, its counters in the order of ``metrics``; null where there is none."""
    lines = []
    for row in rows:
        launches = [
            {**x, "counters": [x["counters"].get(m) for m in metrics]} for x in row["launches"] if "counters" in x
        ]
        lines.append(json.dumps({**row, "launches": launches}))
    body = ",\n".join(lines)
    text = json.dumps({**head, "metrics": list(metrics)}, indent=1).removesuffix("\n}")
    return f'{text},\n "kernels": [\n{body}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="part of a kernel's label")
    parser.add_argument("--held-out", action="store_true", help="the kernels that the device model was not fitted to")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    limits = load(MODEL).limits
    listed = SMOKE if args.smoke else HELD_OUT if args.held_out else CASES
    chosen = [c for c in listed if args.only in c.label]
    if args.launch:
        launch_all(args.launch, chosen, limits, args.first, args.first + CHUNK)
        return 0
    if args.smoke and not (shutil.which("ncu") and find_spec("cupy")):
        sources = [program_source(k, x) for k in (c.kernel(limits) for c in chosen) for x in k.launches]
        print(f"count: no ncu with cupy here; {len(sources)} launches were written as OpenCL C and not run")
        return 0
    if args.file is None:
        parser.error("FILE is missing: where the record goes")
    check_target(args.file)
    options = ["--smoke"] * args.smoke + ["--held-out"] * args.held_out + ["--only", args.only]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = prepare(folder, chosen, limits)
        metrics = known_metrics()
        head = {"benchmark": "count", "device": MODEL, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        for first in range(0, len(rows), CHUNK):
            found = iter(profile(folder, metrics, options, first))
            for row in rows[first : first + CHUNK]:
                for launch in row["launches"]:
                    launch["counters"] = next(found, {})
            write_atomic(args.file, text_of(head, metrics, rows))
            print(f"counted {min(first + CHUNK, len(rows))} of {len(rows)}", file=sys.stderr)
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
