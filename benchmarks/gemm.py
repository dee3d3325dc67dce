"""Contraction kernels beside the device's best matrix product, per shape, layout and variant.

    python benchmarks/gemm.py [--squares] [--images] [--device NAME] [--budget SECONDS] [--json FILE] [--smoke]

Peers: on a GPU cuBLAS through torch (TF32 off), on a CPU MKL through torch (numpy where torch is missing) and CLBlast
on the same OpenCL device where its library is found. Without options the shapes are those of a small transformer's
step; ``--squares`` takes Y = X·W, dX = G·Wᵀ and dW = Xᵀ·G of 512³ to 4096³ (``--sizes``), W stored alike in all three.

Every variant that accepts a case's layouts runs in turn with the peers, round after round, so that what disturbs the
machine disturbs all of them. With ``--budget`` the seconds are shared among the cases: kernels are built and run once,
those that the device model promises most of first (``--device-model``, else generic facts), layout by layout, until
half of a case's share is used; the ``--keep`` best of each layout then run in rounds for the other half. What was never
built is counted in the table's title.

With ``--images`` only kernels that read operands through images run, each beside the same kernel reading buffers, and
a table says what that changes. They are those of a GPU, on whatever device.

Times are of one launch by its events, and the mean over 10 launches back to back, enqueued behind a gate, from the
first start to the last end. cuBLAS is timed by CUDA events around a CUDA graph of 10 calls, a CPU's peers by the host
around 10 calls; single calls of theirs hold what the host takes to start them, on a CPU to wake its threads too. So the
ratios are of the times back to back. A sample of every result is checked against float64.
``--smoke`` runs a few tiny cases once and judges nothing but that.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders.gemm_peers import BURST, Operands, peers_of
from costmodel.device import load
from costmodel.model import CostModel
from kernels.runtime import DeviceInfo, Runtime, pick
from kernels.source import program_source
from kernels.spec import Kernel, OpSpec
from kernels.testing import BoundKernel
from kernels.variants import kernels_for
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.layout import Layout
from layoutopt.models import uncalibrated

Shape = tuple[int, int, int, int]  # batch, m, k, n
Make = Callable[[tuple[int, ...]], Layout]


class Case(NamedTuple):
    """``turned``: which of a and b are stored with their last two axes swapped (weights in a backward pass)."""

    name: str
    shape: Shape
    turned: str = ""

    @property
    def flops(self) -> int:
        b, m, k, n = self.shape
        return 2 * b * m * k * n


CASES = (
    Case("forward ffn1", (1, 1024, 384, 1536)),
    Case("forward ffn2", (1, 1024, 1536, 384)),
    Case("forward proj", (1, 1024, 384, 384)),
    Case("dX ffn1", (1, 1024, 1536, 384), "b"),
    Case("dX proj", (1, 1024, 384, 384), "b"),
    Case("dW ffn1", (1, 384, 1024, 1536), "a"),
    Case("dW proj", (1, 384, 1024, 384), "a"),
    Case("scores", (96, 128, 32, 128), "b"),
    Case("context", (96, 128, 128, 32)),
    Case("dK", (96, 128, 128, 32), "a"),
    Case("classifier", (1, 16, 384, 2), "b"),
    Case("digits proj", (1, 1088, 64, 64), "b"),
    Case("digits scores", (256, 17, 16, 17), "b"),
    Case("digits context", (256, 17, 17, 16)),
)
SMOKE = (Case("tiny", (2, 13, 20, 18)), Case("tiny dX", (1, 9, 16, 12), "b"), Case("tiny dW", (1, 9, 16, 12), "a"))
KINDS = {"Y": "", "dX": "b", "dW": "a"}
SIZES = (512, 1024, 2048, 4096)


def tiles(tr: int, tc: int, inner: str = "row") -> Make:
    return lambda shape: Layout.r_tile(shape, tr, tc, inner)


LAYOUTS: dict[str, Make] = {
    "row-major": Layout.row_major,
    "R-Tile 4x4": tiles(4, 4),
    "R-Tile 8x4 col": tiles(8, 4, "col"),
    "R-Tile 4x16": tiles(4, 16),
    "R-Tile 16x16": tiles(16, 16),
    "R-Tile 32x4": tiles(32, 4),
}


def layouts_of(case: Case, make: Make) -> tuple[Layout, ...]:
    """Viewed layouts: a turned operand is stored as [batch, last, middle] and seen transposed."""
    b, m, k, n = case.shape

    def operand(name: str, rows: int, cols: int) -> Layout:
        if name in case.turned:
            return make((b, cols, rows)).permute((0, 2, 1))
        return make((b, rows, cols))

    return operand("a", m, k), operand("b", k, n), operand("c", m, n)


class Bench:
    """The device, and random data: one long stretch of numbers that every operand of every layout is a piece of."""

    def __init__(self, info: DeviceInfo, device_model: str | None, longest: int) -> None:
        self.info, self.runtime, self.limits = info, Runtime(info, profiling=True), info.limits
        self.costs = CostModel(load(device_model) if device_model else uncalibrated(self.runtime))
        self.data = np.random.default_rng(0).standard_normal(longest, np.float32)
        self.buffers = [self.runtime.allocate(self.data.nbytes) for _ in range(2)]
        for buffer in self.buffers:
            self.runtime.upload(buffer, self.data)

    def bind(self, kernel: Kernel, result: Any) -> BoundKernel:
        """``kernel`` on the device."""
        scratch = [self.runtime.allocate(s.layout.size_elems * 4) for s in kernel.scratch]
        return BoundKernel(self.runtime, kernel, [*self.buffers, result, *scratch])

    def check(self, kernel: Kernel, result: Any) -> None:
        """A sample of the result against float64.

        Raises:
            SystemExit: it is wrong.
        """
        left, right, out = kernel.layouts
        got = self.runtime.download(result, np.empty(out.size_elems, np.float32))
        rng = np.random.default_rng(1)
        places = [tuple(int(rng.integers(0, n)) for n in out.shape) for _ in range(24)]
        offsets = [_offsets(layout) for layout in kernel.layouts]
        for b, i, j in places:
            x = self.data[offsets[0][b, i]].astype(np.float64)
            y = self.data[offsets[1][b, :, j]].astype(np.float64)
            value, size = float(x @ y), float(np.abs(x) @ np.abs(y))
            if not abs(float(got[offsets[2][b, i, j]]) - value) <= 1e-5 * size:
                raise SystemExit(
                    f"{kernel.variant.label} on {left.describe()} {right.describe()} is wrong at {b, i, j}"
                )


@cache
def _offsets(layout: Layout) -> np.ndarray:
    return layout.linear_offsets().reshape(layout.shape)


def candidates(bench: Bench, case: Case, chosen: dict[str, Make], images: bool) -> list[tuple[str, Kernel]]:
    """Kernels of every layout in turn, the most promising of each first; with ``images`` only those with a twin."""
    b, m, k, n = case.shape
    spec = OpSpec("contraction", ((b, m, k), (b, k, n), (b, m, n)), ("float32",) * 3, 2)
    ranked = []
    for label, make in chosen.items():
        found = kernels_for(spec, layouts_of(case, make), bench.limits)
        if images:
            twins = {buffer_label(x.variant.label) for x in found if x.launches[0].images}
            found = [x for x in found if buffer_label(x.variant.label) in twins]
        found = [x for x in found if x.variant.name != "any" or b * m * k * n <= 1 << 22]
        ranked.append([(label, x) for x in sorted(found, key=lambda x: bench.costs.predict(x).total_ns)])
    return [part[i] for i in range(max(map(len, ranked), default=0)) for part in ranked if i < len(part)]


def buffer_label(label: str) -> str:
    """The label of the kernel that does the same with buffers."""
    return re.sub(r",image=\d+", "", label.replace(".image", ""))


def measure(
    bench: Bench, case: Case, args: argparse.Namespace, chosen: dict[str, Make], share_s: float
) -> dict[str, Any]:
    """Raw seconds of kernels and peers, interleaved; see the module for what ``share_s`` (infinite: all) leaves out."""
    began = time.perf_counter()
    _offsets.cache_clear()
    listed = candidates(bench, case, chosen, args.images)
    if share_s == float("inf"):
        bench.runtime.prepare((program_source(k, launch), k.variant.label) for _, k in listed for launch in k.launches)
    results: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for label, kernel in listed:
        if rows and time.perf_counter() - began > share_s / 2:
            break
        layout = kernel.layouts[2]
        if label not in results:
            results[label] = bench.runtime.allocate(layout.size_elems * 4)
        bench.runtime.fill(results[label], 0xFF)
        try:
            bound = bench.bind(kernel, results[label])
        except DeviceError as error:
            print(f"gemm: {error}", file=sys.stderr)
            continue
        bound.run()
        bench.check(kernel, results[label])
        rows.append({"layout": label, "kernel": kernel.variant.label, "once_s": bound.run(), "bound": bound})
    unseen = len(listed) - len(rows)
    if share_s != float("inf"):
        rows = _best(rows, args.keep)
    operands = Operands(bench.data, case.shape, case.turned, bench.runtime, bench.buffers)
    runs: list[dict[str, Any]] = [{**row, "seconds": [], "burst_s": []} for row in rows]
    peers: list[dict[str, Any]] = []
    for peer in peers_of(operands, bench.info.limits.kind == "gpu", args.clblast):
        peer.call()
        peers.append({"layout": "row-major", "kernel": peer.name, "seconds": [], "burst_s": [], "bound": peer})
    for number in range(args.rounds):
        for row in runs + peers:
            bound = row["bound"]
            row["seconds"].append(bound.run())
            row["burst_s"].append(bound.burst(BURST))
        if number >= 2 and time.perf_counter() - began > share_s:
            break
    for row in runs + peers:
        del row["bound"]
    about = {"case": case.name, "shape": list(case.shape), "turned": case.turned, "flops": case.flops, "unseen": unseen}
    return {**about, "rows": runs, "peers": peers}


def _best(rows: list[dict[str, Any]], keep: int) -> list[dict[str, Any]]:
    """The ``keep`` fastest of each layout."""
    kept = []
    for label in dict.fromkeys(row["layout"] for row in rows):
        kept += sorted((row for row in rows if row["layout"] == label), key=lambda r: r["once_s"])[:keep]
    return kept


def judged(row: dict[str, Any]) -> float:
    """The seconds that ratios are made of."""
    return median(row["burst_s"])


def table(found: dict[str, Any]) -> Table:
    """Best first; ratio to the fastest peer."""
    flops = found["flops"]
    base = min(judged(row) for row in found["peers"])
    title = f"{found['case']} {found['shape']}" + (f", {found['unseen']} kernels not tried" if found["unseen"] else "")
    out = Table("layout", "kernel", "GFLOP/s", "quartiles", f"of {BURST}", "over peer", title=title)
    for row in sorted(found["rows"] + found["peers"], key=lambda r: judged(r)):
        seconds = row["seconds"]
        low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (seconds[0],) * 3
        out.add_row(
            row["layout"],
            row["kernel"].removeprefix("contraction."),
            f"{flops / median(seconds) / 1e9:,.1f}",
            f"{flops / high / 1e9:,.1f}–{flops / low / 1e9:,.1f}",
            f"{flops / median(row['burst_s']) / 1e9:,.1f}",
            f"{base / judged(row):.2f}",
        )
    return out


def summary(found: list[dict[str, Any]]) -> Table:
    """Per case, the best of each layout over the best peer; for squares also what one layout gives for all three."""
    labels = list(dict.fromkeys(row["layout"] for one in found for row in one["rows"]))
    out = Table("case", "peer GFLOP/s", *labels, title="best kernel of each layout over the fastest peer")
    for one in found:
        peer = min(one["peers"], key=lambda r: judged(r))
        base = judged(peer)
        cells = []
        for label in labels:
            times = [judged(row) for row in one["rows"] if row["layout"] == label]
            cells.append(f"{base / min(times):.2f}" if times else "-")
        out.add_row(f"{one['case']} {one['shape']}", f"{one['flops'] / base / 1e9:,.0f} {peer['kernel']}", *cells)
    return out


def image_table(found: list[dict[str, Any]]) -> Table:
    """Per case and layout: pairs of kernels, how much faster those with images are, and the best of either side."""
    title = "reading through images: time of the same kernel with buffers over its time"
    out = Table("case", "layout", "pairs", "least", "median", "most", "best of either", title=title)
    for one in found:
        for layout in dict.fromkeys(row["layout"] for row in one["rows"]):
            times = {row["kernel"]: judged(row) for row in one["rows"] if row["layout"] == layout}
            pairs = [(times[plain], t) for k, t in times.items() if (plain := buffer_label(k)) != k and plain in times]
            if pairs:
                ratios = [buffer / image for buffer, image in pairs]
                best = min(buffer for buffer, _ in pairs) / min(image for _, image in pairs)
                shown = (min(ratios), median(ratios), max(ratios), best)
                out.add_row(f"{one['case']} {one['shape']}", layout, str(len(pairs)), *(f"{x:.2f}" for x in shown))
    return out


def record(info: DeviceInfo, found: list[dict[str, Any]], note: str) -> dict[str, Any]:
    """What was measured, on what."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch", "pyopencl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"benchmark": "gemm", "device": info.model_hash_fields, "note": note, "versions": versions, "cases": found}


def cases_of(args: argparse.Namespace) -> tuple[Case, ...]:
    """Those asked for."""
    if args.smoke:
        return SMOKE
    if args.squares:
        sizes = [int(s) for s in args.sizes.split(",")] if args.sizes else SIZES
        listed = tuple(Case(f"{kind} {s}³", (1, s, s, s), turned) for s in sizes for kind, turned in KINDS.items())
    else:
        listed = CASES
    return tuple(c for c in listed if args.cases in c.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="part of the device's name; the default device otherwise")
    parser.add_argument("--device-model", help="whose predictions say what to try first")
    parser.add_argument("--squares", action="store_true")
    parser.add_argument("--sizes", default="", help="of --squares, comma-separated")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--layouts", default="", help="only layouts whose name contains one of these, comma-separated")
    parser.add_argument("--images", action="store_true", help="kernels that read through images beside their twins")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="in all; without, everything runs every round")
    parser.add_argument("--keep", type=int, default=3, help="kernels of a layout that a budget keeps for the rounds")
    parser.add_argument("--clblast", default="clblast", metavar="LIB", help="name or path of CLBlast's library")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--note", default="", help="for the record: what else the machine did, say")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    try:
        cases = cases_of(args)
    except ValueError:
        parser.error(f"--sizes {args.sizes!r}: expected whole numbers, such as 512,1024")
    wanted = args.layouts.split(",")
    chosen = {name: make for name, make in LAYOUTS.items() if any(part in name for part in wanted)}
    if args.smoke:
        chosen, args.rounds = dict(list(chosen.items())[:2]), 1
    if not cases or not chosen or args.rounds < 1 or args.keep < 1:
        print("gemm: no case or no layout has that name, or --rounds or --keep is below 1", file=sys.stderr)
        return 2
    began = time.perf_counter()
    try:
        info = pick(args.device)
        if args.images and not info.image_max_buffer_texels:
            raise DeviceError(f"device {info.label} has no images over buffers: leave --images out")
        if args.json:
            check_target(args.json)
        longest = max(layout.size_elems for c in cases for make in chosen.values() for layout in layouts_of(c, make))
        bench = Bench(info, args.device_model, longest)
        if args.images:
            bench.limits = replace(info.limits, kind="gpu", image_max_buffer_texels=info.image_max_buffer_texels)
        found: list[dict[str, Any]] = []
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(f"device: {info.short}")
        for number, case in enumerate(track(cases, "measuring", console=Console(stderr=True), transient=True)):
            left = args.budget - (time.perf_counter() - began) if args.budget else float("inf")
            found.append(measure(bench, case, args, chosen, max(left, 0.0) / (len(cases) - number)))
            if not args.smoke:
                console.print(table(found[-1]))
            if args.json:
                write_atomic(args.json, json.dumps(record(info, found, args.note), indent=1) + "\n")
        if not args.smoke:
            console.print(summary(found))
            if args.images:
                console.print(image_table(found))
    except LayoutOptError as error:
        print(f"gemm: {error}", file=sys.stderr)
        return 2
    print(f"{sum(len(one['rows']) for one in found)} kernels over {len(cases)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
