"""Contraction kernels beside torch.matmul (numpy where torch is missing), per shape, layout and variant.

    python benchmarks/gemm.py [--device NAME] [--cases TEXT] [--rounds N] [--json FILE] [--smoke]

Every variant that accepts a case's layouts is run in turn with the peer, round after round, so that what disturbs the
machine disturbs all of them. Kernel times are device events; the peer is timed by the host around a call on row-major
(or transposed) float32 tensors. Medians with the spread between the quartiles. ``--smoke`` runs a few tiny cases once
and judges nothing but that they run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kernels.runtime import DeviceInfo, pick
from kernels.spec import OpSpec
from kernels.testing import PreparedKernel
from kernels.variants import kernels_for
from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.layout import Layout

Shape = tuple[int, int, int, int]  # batch, m, k, n
Make = Callable[[tuple[int, ...]], Layout]


class Case(NamedTuple):
    """``turned``: which of a and b are stored with their last two axes swapped (weights in a backward pass)."""

    name: str
    shape: Shape
    turned: str = ""


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
SMOKE = (Case("tiny", (2, 13, 20, 18)), Case("tiny dX", (1, 9, 16, 12), "b"))


def tiles(tr: int, tc: int, inner: str = "row") -> Make:
    return lambda shape: Layout.r_tile(shape, tr, tc, inner)


LAYOUTS: dict[str, Make] = {
    "row-major": Layout.row_major,
    "R-Tile 4x4": tiles(4, 4),
    "R-Tile 8x4 col": tiles(8, 4, "col"),
    "R-Tile 4x16": tiles(4, 16),
    "R-Tile 16x16": tiles(16, 16),
}


def layouts_of(case: Case, make: Make) -> tuple[Layout, ...]:
    """Viewed layouts: a turned operand is stored as [batch, last, middle] and seen transposed."""
    b, m, k, n = case.shape

    def operand(name: str, rows: int, cols: int) -> Layout:
        if name in case.turned:
            return make((b, cols, rows)).permute((0, 2, 1))
        return make((b, rows, cols))

    return operand("a", m, k), operand("b", k, n), operand("c", m, n)


def peer(case: Case, a: np.ndarray, b: np.ndarray) -> tuple[str, Callable[[], Any]]:
    """The peer's name and a call of it on operands stored as the case says."""
    stored = [x.swapaxes(1, 2).copy() if name in case.turned else x for name, x in (("a", a), ("b", b))]
    try:
        import torch
    except ImportError:
        x, y = (s.swapaxes(1, 2) if name in case.turned else s for name, s in zip("ab", stored, strict=True))
        return "numpy", lambda: np.matmul(x, y)
    left, right = (torch.from_numpy(s) for s in stored)
    left, right = (t.mT if name in case.turned else t for name, t in (("a", left), ("b", right)))
    return "torch", lambda: torch.matmul(left, right)


def measure(case: Case, info: DeviceInfo, rounds: int, chosen: dict[str, Make]) -> list[dict[str, Any]]:
    """Raw seconds of every kernel and of the peer, interleaved."""
    b, m, k, n = case.shape
    spec = OpSpec("contraction", ((b, m, k), (b, k, n), (b, m, n)), ("float32",) * 3, 2)
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((b, m, k), dtype="f4"), rng.standard_normal((b, k, n), dtype="f4")
    rows: list[dict[str, Any]] = []
    runs: list[Callable[[], float]] = []
    for label, make in chosen.items():
        for kernel in kernels_for(spec, layouts_of(case, make), info.limits):
            if kernel.variant.name == "any" and b * m * k * n > 1 << 22:
                continue
            prepared = PreparedKernel(info.handle, kernel, [left, right])
            prepared.run()
            rows.append({"layout": label, "kernel": kernel.variant.label, "seconds": []})
            runs.append(prepared.run)
    name, call = peer(case, left, right)
    call()

    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    rows.append({"layout": "row-major", "kernel": name, "seconds": []})
    runs.append(timed)
    for _ in range(rounds):
        for row, run in zip(rows, runs, strict=True):
            row["seconds"].append(run())
    flops = 2 * b * m * k * n
    for row in rows:
        row |= {"case": case.name, "shape": list(case.shape), "turned": case.turned, "flops": flops}
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Best first; ratio to the peer of the same case."""
    case, flops = rows[0], rows[0]["flops"]
    base = median(rows[-1]["seconds"])
    out = Table("layout", "kernel", "GFLOP/s", "quartiles", "over peer", title=f"{case['case']} {case['shape']}")
    for row in sorted(rows, key=lambda r: median(r["seconds"])):
        seconds = row["seconds"]
        low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
        middle = median(seconds)
        out.add_row(
            row["layout"],
            row["kernel"].removeprefix("contraction."),
            f"{flops / middle / 1e9:.1f}",
            f"{flops / high / 1e9:.1f}–{flops / low / 1e9:.1f}",
            f"{base / middle:.2f}",
        )
    return out


def record(info: DeviceInfo, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, on what."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch", "pyopencl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"benchmark": "gemm", "device": info.model_hash_fields, "versions": versions, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", help="part of the device's name; the default device otherwise")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--layouts", default="", help="only layouts whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    cases = SMOKE if args.smoke else tuple(c for c in CASES if args.cases in c.name)
    chosen = {name: make for name, make in LAYOUTS.items() if args.layouts in name}
    if args.smoke:
        chosen = dict(list(chosen.items())[:2])
    if not cases or not chosen or args.rounds < 1:
        print("gemm: no case or no layout has that name, or --rounds is below 1", file=sys.stderr)
        return 2
    try:
        info = pick(args.device)
        rows: list[dict[str, Any]] = []
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(f"device: {info.short}")
        for case in track(cases, "measuring", console=Console(stderr=True), transient=True):
            measured = measure(case, info, 1 if args.smoke else args.rounds, chosen)
            rows += measured
            if not args.smoke:
                console.print(table(measured))
        if args.json:
            write_atomic(args.json, json.dumps(record(info, rows), indent=1) + "\n")
    except LayoutOptError as error:
        print(f"gemm: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows)} measurements over {len(cases)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
