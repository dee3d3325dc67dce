"""Products with quantised weights beside the fastest float32 product of the same shape, on one device.

    python benchmarks/quantized.py [--device NAME] [--formats int8,nf4:64] [--shapes NAMES] [--budget SECONDS]
                                   [--json FILE] [--smoke]

``Y[m,n] = X[m,k] · W[n,k]ᵀ``: float32 kernels of every family that serves the product, over row-major and R-Tile
activations and weights stored either way; kernels with quantised weights over the same activations. Each is run once,
checked on a sample of Y against float64, and the ``--keep`` fastest of float32 and of every format run in turn, round
after round, 10 launches back to back. A format's time is that of its fastest kernel by the median, its ratio that over
float32's. ``--smoke`` runs a tiny shape once and judges nothing but its result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contenders.gemm_peers import BURST
from benchmarks.recording import Record
from kernels.runtime import Runtime, pick
from kernels.source import program_source
from kernels.spec import Kernel, OpSpec
from kernels.testing import BoundKernel, pack
from kernels.variants import kernels_for
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.layout import Layout
from layoutopt.quantize import Format, dequantise, quantise

SHAPES = {
    "minilm": (1024, 384, 1536),
    "minilm-down": (1024, 1536, 384),
    "gpt2": (512, 768, 3072),
    "bert-large": (1024, 1024, 4096),
    "opt-1.3b": (2048, 2048, 8192),
    "one-token": (16, 2048, 8192),
}
"""(m, k, n)."""
SMOKE = {"tiny": (13, 72, 20)}
ACTIVATIONS = {
    "row-major": Layout.row_major,
    "R-Tile 8x4": lambda shape: Layout.r_tile(shape, 8, 4, "row"),
    "R-Tile 4x16": lambda shape: Layout.r_tile(shape, 4, 16, "row"),
}
TOLERANCE = 2e-5


class Candidate(NamedTuple):
    """``layout``: of the activations; ``inputs``: logical values by operand."""

    layout: str
    kernel: Kernel
    inputs: tuple[np.ndarray, ...]


class Bench:
    """A shape on a device.

    Args:
        runtime: whose queue records times.
        shape: (m, k, n).
        seed: of X and W, normally distributed.
    """

    def __init__(self, runtime: Runtime, shape: tuple[int, int, int], seed: int = 0) -> None:
        self.runtime, self.shape = runtime, shape
        m, k, n = shape
        rng = np.random.default_rng(seed)
        self.x, self.w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
        self.places = np.stack([rng.integers(0, m, 64), rng.integers(0, n, 64)], axis=1)

    def candidates(self, fmt: str) -> Iterator[Candidate]:
        """Kernels of ``fmt`` ("float32" or a format), layout by layout."""
        m, k, n = self.shape
        for name, make in ACTIVATIONS.items():
            if fmt == "float32":
                spec = OpSpec("contraction", ((1, m, k), (1, k, n), (1, m, n)), ("float32",) * 3, 2)
                turned = Layout.row_major((1, n, k)).permute((0, 2, 1))
                stored = [make((1, k, n)), turned]  # a weight has whatever layout serves it best
                inputs: tuple[np.ndarray, ...] = (self.x[None], self.w.T[None])
                layouts: list[tuple[Layout, ...]] = [(make((1, m, k)), x, make((1, m, n))) for x in stored]
            else:
                words, scales = quantise(self.w, Format.parse(fmt))
                shapes = ((m, k), words.shape, scales.shape, (m, n))
                types = ("float32", "int32", "float32", "float32")
                spec = OpSpec("quantized_contraction", shapes, types, 3, (("format", fmt),))
                rows = (Layout.row_major(words.shape), Layout.row_major(scales.shape))
                inputs = (self.x, words, scales)
                layouts = [(make((m, k)), *rows, make((m, n)))]
            for operands in layouts:
                for kernel in kernels_for(spec, operands, self.runtime.limits):
                    if kernel.variant.name != "any":
                        yield Candidate(name, kernel, inputs)

    def bind(self, candidate: Candidate) -> BoundKernel:
        """The kernel with its buffers filled and its result poisoned."""
        kernel, buffers = candidate.kernel, []
        for position, layout in enumerate(kernel.layouts):
            if position < len(candidate.inputs):
                host = pack(layout, candidate.inputs[position], kernel.spec.dtypes[position])
            else:
                host = np.full(layout.size_elems, np.nan, np.float32)
            buffers.append(self.runtime.allocate(host.nbytes))
            self.runtime.upload(buffers[-1], host)
        buffers += [self.runtime.allocate(scratch.layout.size_elems * 4) for scratch in kernel.scratch]
        return BoundKernel(self.runtime, kernel, buffers)

    def check(self, bound: BoundKernel, fmt: str) -> None:
        """A sample of the result against float64.

        Raises:
            SystemExit: it is wrong.
        """
        position = bound.kernel.spec.inputs
        layout = bound.kernel.layouts[position]
        got = self.runtime.download(bound.buffers[position], np.empty(layout.size_elems, np.float32))
        values = got[layout.linear_offsets()].reshape(self.shape[0], self.shape[2])
        rows = np.unique(self.places[:, 1])
        w = self.w[rows].astype(np.float64)
        if fmt != "float32":
            w = dequantise(*quantise(self.w[rows], Format.parse(fmt)), self.shape[1], Format.parse(fmt)).astype(float)
        for i, j in self.places:
            left, right = self.x[i].astype(np.float64), w[np.searchsorted(rows, j)]
            if not abs(float(values[i, j]) - float(left @ right)) <= TOLERANCE * float(np.abs(left) @ np.abs(right)):
                raise SystemExit(f"quantized: {bound.kernel.variant.label} in {fmt} is wrong at {i, j}")


def fastest(bench: Bench, fmt: str, keep: int, until: float) -> tuple[list[dict[str, Any]], int]:
    """The ``keep`` kernels that were fastest when run twice, and how many there was no time for."""
    listed = list(bench.candidates(fmt))
    bench.runtime.prepare(
        (program_source(c.kernel, launch), c.kernel.variant.label) for c in listed for launch in c.kernel.launches
    )
    rows: list[dict[str, Any]] = []
    for candidate in listed:
        if rows and time.monotonic() > until:
            break
        try:
            bound = bench.bind(candidate)
        except DeviceError as error:
            print(f"quantized: {error}", file=sys.stderr)
            continue
        bound.run()
        bench.check(bound, fmt)
        row = {"format": fmt, "layout": candidate.layout, "kernel": candidate.kernel.variant.label}
        rows.append({**row, "once_s": bound.run(), "bound": bound, "seconds": []})
        rows = sorted(rows, key=lambda r: r["once_s"])[:keep]  # the others' buffers go
    return rows, len(listed)


def measure(bench: Bench, formats: list[str], args: argparse.Namespace, share_s: float) -> dict[str, Any]:
    """Raw seconds of every format's best kernels, interleaved."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    tried = {}
    for number, fmt in enumerate(formats, 1):
        found, tried[fmt] = fastest(bench, fmt, args.keep, began + 0.7 * share_s * number / len(formats))
        rows += found
    for number in range(args.rounds):
        for row in rows:
            row["seconds"].append(row["bound"].burst(1 if args.smoke else BURST))
        if number >= 2 and time.monotonic() - began > share_s:
            break
    for row in rows:
        del row["bound"]
    return {"shape": list(bench.shape), "kernels": tried, "rows": rows}


def best(found: dict[str, Any], fmt: str) -> dict[str, Any]:
    """The row of a format whose median is least."""
    return min((r for r in found["rows"] if r["format"] == fmt), key=lambda r: median(r["seconds"]))


def table(cases: dict[str, dict[str, Any]], formats: list[str]) -> Table:
    """Times and ratios; GFLOP/s of float32."""
    columns = [f"{fmt} {what}" for fmt in formats[1:] for what in ("ms", "over float32")]
    out = Table("shape", "m k n", "float32 ms", "GFLOP/s", *columns, "kernels")
    for name, found in cases.items():
        m, k, n = found["shape"]
        times = {fmt: median(best(found, fmt)["seconds"]) for fmt in formats}
        own = times["float32"]
        cells = [f"{cell}" for fmt in formats[1:] for cell in (f"{times[fmt] * 1e3:.3f}", f"{times[fmt] / own:.2f}")]
        kernels = "\n".join(f"{best(found, fmt)['layout']} {best(found, fmt)['kernel']}" for fmt in formats)
        out.add_row(name, f"{m} {k} {n}", f"{own * 1e3:.3f}", f"{2 * m * k * n / own / 1e9:,.0f}", *cells, kernels)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="part of the device's name; the default device otherwise")
    parser.add_argument("--formats", default="int8,nf4:64", help="of the weights, comma-separated")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keep", type=int, default=3, help="kernels of a format that run in rounds")
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="in all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    try:
        formats = ["float32", *(str(Format.parse(text)) for text in args.formats.split(","))]
        shapes = SMOKE if args.smoke else {name: SHAPES[name] for name in args.shapes.split(",")}
    except KeyError as error:
        parser.error(f"--shapes: {error.args[0]!r} is none of {', '.join(SHAPES)}")
    except LayoutOptError as error:
        parser.error(f"--formats: {error}")
    if args.smoke:
        args.rounds = 1
    began = time.monotonic()
    try:
        record = Record(args.json, "quantized", formats=formats, burst=BURST)
        runtime = Runtime(pick(args.device), profiling=True)
        cases: dict[str, dict[str, Any]] = {}
        for number, (name, shape) in enumerate(shapes.items()):
            left = args.budget - (time.monotonic() - began)
            cases[name] = measure(Bench(runtime, shape), formats, args, max(left, 0.0) / (len(shapes) - number))
            record.write({"cases": cases}, runtime)
    except LayoutOptError as error:
        print(f"quantized: {error}", file=sys.stderr)
        return 2
    if not args.smoke:
        Console(width=None if sys.stdout.isatty() else 160).print(table(cases, formats))
    print(f"{sum(sum(case['kernels'].values()) for case in cases.values())} kernels over {len(cases)} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
