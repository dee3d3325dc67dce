"""Memory-bound kernels beside the device's own copy: bandwidth per operation, shape, layout and variant.

    python benchmarks/memory_bound.py [--device SEL] [--ops layer_norm,softmax,…] [--shapes 8192x4096,…]
                                      [--layouts row-major,…] [--rounds N] [--json FILE] [--all] [--smoke]

Bytes are those of the operands, each read or written once (what is updated in place, both). The copy is the fastest of
the relayout kernels between two row-major buffers of ``--copy-mib``, timed in every round of every case in turn with
the case's kernels, so that what disturbs the machine disturbs both; the ratio is the median over rounds of one over the
other. Small shapes fit in a cache and may beat it; what bounds them is the launch, whose microseconds are shown.

Times are of all launches of a kernel, back to back behind a gate, on a GPU the mean of 10; from the first start to the
last end by events. On a CPU each is timed alone. Results of a case's variants are compared with each other (and, with
``--smoke``, with the float64 interpreter); one that differs is WRONG and the exit code is 1. Beside single updates, the
updates of a small model's 102 parameters run as one launch (``kernels/batch.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels import reference
from kernels.batch import Row, linear, merge
from kernels.pack import STORAGE_DTYPES, pack, unpack
from kernels.runtime import Runtime, pick
from kernels.source import program_source
from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.testing import BoundKernel
from kernels.variants import kernels_for
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.graph import Expr
from layoutopt.layout import Layout

Shape = tuple[int, ...]
BURST = 10
TOLERANCE = 2e-3

X, T, C = (lambda i: ("x", i)), (lambda i: ("t", i)), (lambda v: ("c", v))
GELU = Expr(
    (("mul", C(0.70710678), X(0)), ("erf", T(0)), ("add", C(1.0), T(1)), ("mul", C(0.5), X(0)), ("mul", T(2), T(3))),
    (T(4),),
)
GELU_GRAD = Expr(
    (
        *(("mul", C(0.70710678), X(1)), ("erf", T(0)), ("add", C(1.0), T(1)), ("mul", C(0.5), T(2))),
        *(("mul", X(1), X(1)), ("mul", C(-0.5), T(4)), ("exp", T(5)), ("mul", C(0.3989423), T(6))),
        *(("mul", X(1), T(7)), ("add", T(3), T(8)), ("mul", X(0), T(9))),
    ),
    (T(10),),
)
ADD = Expr((("add", X(0), X(1)),), (T(0),))
SGD = Expr((("mul", X(2), X(1)), ("sub", X(0), T(0))), (T(1),))
ADAMW = Expr(
    (
        *(("mul", C(0.9), X(2)), ("mul", C(0.1), X(1)), ("add", T(0), T(1))),
        *(("mul", C(0.999), X(3)), ("mul", X(1), X(1)), ("mul", C(0.001), T(4)), ("add", T(3), T(5))),
        *(("sqrt", T(6)), ("div", T(7), X(6)), ("add", T(8), C(1e-8)), ("div", T(2), T(9)), ("div", X(4), X(5))),
        *(("mul", T(11), T(10)), ("mul", X(4), C(0.01)), ("sub", C(1.0), T(13)), ("mul", X(0), T(14))),
        ("sub", T(15), T(12)),
    ),
    (T(16), T(2), T(6)),
)

LAYOUTS: dict[str, Callable[[Shape], Layout]] = {
    "row-major": Layout.row_major,
    "by columns": lambda shape: Layout.row_major(shape, tuple(reversed(range(len(shape))))),
    "R-Tile 4x4": lambda shape: Layout.r_tile(shape, 4, 4) if len(shape) == 2 else Layout.row_major(shape),
    "R-Tile 8x16": lambda shape: Layout.r_tile(shape, 8, 16) if len(shape) == 2 else Layout.row_major(shape),
}


# ---- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operation at a size.

    Attributes:
        op: its name in the table.
        spec: what kernels are made for.
        scalars: operands of no axes, seen as large as the others.
        turned: operands that the op sees transposed.
    """

    op: str
    spec: OpSpec
    scalars: frozenset[int] = frozenset()
    turned: frozenset[int] = frozenset()

    @property
    def shape(self) -> str:
        """The largest operand's."""
        return "x".join(map(str, max(self.spec.shapes, key=prod)))

    @property
    def bytes_moved(self) -> int:
        """Each operand once; what is updated in place counts as input and as output."""
        pairs = enumerate(zip(self.spec.shapes, self.spec.dtypes, strict=True))
        return sum(prod(s) * STORAGE_DTYPES[d].itemsize for i, (s, d) in pairs if i not in self.scalars)

    def layouts(self, make: Callable[[Shape], Layout]) -> tuple[Layout, ...]:
        """One per operand."""
        spread = Layout.row_major(()).reshape((1,) * len(self.spec.shapes[0]))
        assert spread is not None
        out = []
        for i, shape in enumerate(self.spec.shapes):
            if i in self.scalars:
                out.append(spread.expand(shape))
            elif i in self.turned:
                out.append(make((shape[1], shape[0])).permute((1, 0)))
            else:
                out.append(make(shape) if len(shape) == 2 else Layout.row_major(shape))
        return tuple(out)


def spec(
    kind: str, inputs: Sequence[Shape | tuple[Shape, str]], outputs: Sequence[Shape], inplace: Any = (), **attrs: Any
) -> OpSpec:
    """A shape alone is of floats."""
    typed = [x if x and isinstance(x[0], tuple) else (x, "float32") for x in inputs]
    shapes = (*(s for s, _ in typed), *outputs)
    dtypes = (*(d for _, d in typed), *("float32",) * len(outputs))
    return OpSpec(kind, shapes, dtypes, len(inputs), tuple(sorted(attrs.items())), inplace)  # type: ignore[arg-type]


def row_cases(m: int, k: int) -> Iterator[Case]:
    """Everything that is done to a matrix of activations."""
    x, row, column = (m, k), (k,), (m,)
    yield Case("layer_norm", spec("layer_norm", [x, row, row], [x, column, column], eps=1e-5))
    yield Case("layer_norm_grad", spec("layer_norm_grad", [x, x, column, column, row], [x]))
    yield Case("layer_norm_affine", spec("layer_norm_affine", [x, x, column, column], [row, row]))
    yield Case("softmax", spec("softmax", [x], [x]))
    yield Case("softmax_grad", spec("softmax_grad", [x, x], [x]))
    yield Case("gelu", spec("pointwise", [x], [x], expr=GELU))
    yield Case("gelu_grad", spec("pointwise", [x, x], [x], expr=GELU_GRAD))
    yield Case("residual", spec("pointwise", [x, x], [x], expr=ADD))
    yield Case("sgd", spec("pointwise", [x, x, x], [x], ((0, 0),), expr=SGD), frozenset({2}))
    adamw = spec("pointwise", [x] * 7, [x] * 3, ((0, 0), (1, 2), (2, 3)), expr=ADAMW)
    yield Case("adamw", adamw, frozenset({4, 5, 6}))


def bias_case(m: int, k: int) -> Case:
    """The gradient of a bias: the sum over rows of a matrix, which the op sees transposed."""
    return Case("bias_grad", spec("reduce", [(k, m)], [(k,)], fn="sum"), turned=frozenset({0}))


def class_cases(n: int, classes: int) -> Iterator[Case]:
    """Losses over classes."""
    x, ids, rows = (n, classes), ((n,), "int32"), (n,)
    yield Case("cross_entropy", spec("cross_entropy", [x, ids], [(), rows, ()], ignore_index=-100))
    yield Case("cross_entropy_grad", spec("cross_entropy_grad", [(), x, ids, rows, ()], [x], ignore_index=-100))


def table_case(n: int, targets: int, d: int) -> Case:
    """The gradient of an embedding."""
    return Case("scatter_add", spec("scatter_add", [(n, d), ((n,), "int32")], [(targets, d)], padding_idx=-1))


def cases(args: argparse.Namespace, gpu: bool) -> list[Case]:
    """What is asked for."""
    if args.smoke:
        found = [*row_cases(9, 20), bias_case(33, 20), *class_cases(5, 70), table_case(40, 7, 20)]
    else:
        default = "8192x4096,8192x1024,1024x384" if gpu else "2048x1024,1024x384"
        shapes = [tuple(int(n) for n in s.split("x")) for s in (args.shapes or default).split(",")]
        found = [c for m, k in shapes for c in (*row_cases(m, k), bias_case(m, k))]
        found += [Case("softmax", spec("softmax", [(12288, 128)], [(12288, 128)]))]
        found += [Case("softmax_grad", spec("softmax_grad", [(12288, 128)] * 2, [(12288, 128)]))]
        for classes in (30522, 128256) if gpu else (30522,):
            found += class_cases(1024 if gpu else 64, classes)
        found += [table_case(1024, 30522, 384), table_case(1024, 2, 384), table_case(4096, 512, 1024)]
    wanted = set(args.ops.split(",")) if args.ops else {c.op for c in found}
    unknown = wanted - {c.op for c in found}
    if unknown:
        raise SystemExit(
            f"memory_bound: no operation {sorted(unknown)[0]!r}; there are {sorted({c.op for c in found})}"
        )
    return [c for c in found if c.op in wanted]


# ---- running --------------------------------------------------------------------------------------------------------


class Bench:
    """The device, and the copy that everything is compared with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.runtime = Runtime(pick(args.device), profiling=True)
        self.gpu = self.runtime.limits.kind == "gpu"
        elems = (args.copy_mib << 20) // 8
        self.copy_bytes = 8 * elems
        flat = Layout.row_major((elems,))
        move = OpSpec("pointwise", ((elems,),) * 2, ("float32",) * 2, 1, (("expr", Expr((), (("x", 0),))),))
        buffers = [self.runtime.allocate(4 * elems) for _ in range(2)]
        self.runtime.fill(buffers[0], 0)
        copies = [BoundKernel(self.runtime, k, buffers) for k in kernels_for(move, (flat, flat), self.runtime.limits)]
        self.copy = min(copies, key=lambda c: min(self.seconds(c) for _ in range(4)))

    def seconds(self, bound: BoundKernel) -> float:
        """One run."""
        return bound.burst(BURST) if self.gpu else bound.run()


def values(case: Case) -> list[np.ndarray]:
    """Inputs that make sense: probabilities that add up to one, ids within their table."""
    rng = np.random.default_rng(0)
    out = []
    for i, (shape, dtype) in enumerate(zip(case.spec.shapes[: case.spec.inputs], case.spec.dtypes, strict=False)):
        if dtype == "int32":
            last = case.spec.shapes[2 if case.op == "scatter_add" else i - 1]
            out.append(rng.integers(0, last[0 if case.op == "scatter_add" else 1], shape).astype(np.int32))
            continue
        value = rng.standard_normal(shape, np.float32)
        if case.op == "softmax_grad" and i == 1:
            value = np.exp(value) / np.exp(value).sum(1, keepdims=True)
        if not shape or i in case.scalars or case.op == "adamw":
            value = np.abs(value.ravel()[0] if i in case.scalars else value) + 1
        out.append(np.broadcast_to(np.asarray(value, np.float32), shape))
    return out


def run_case(bench: Bench, case: Case, label: str, limits: DeviceLimits, args: argparse.Namespace) -> list[dict]:
    """Rows of the table: every variant that accepts the layout, in turn with the copy."""
    layouts = case.layouts(LAYOUTS[label])
    found = kernels_for(case.spec, layouts, limits)
    bench.runtime.prepare((program_source(k, x), k.variant.label) for k in found for x in k.launches)
    inputs, dtypes = values(case), case.spec.dtypes
    storage = [pack(x, v, d) for x, v, d in zip(layouts, inputs, dtypes, strict=False)]
    expected = None
    if args.smoke:
        exact = [v.astype(np.float64) if v.dtype.kind == "f" else v for v in inputs]
        expected = reference.evaluate(case.spec.kind, dict(case.spec.attrs), exact, case.spec.shapes[len(inputs) :])
    alias = dict(case.spec.inplace)
    buffers = [bench.runtime.allocate(s.nbytes) for s in storage]
    results = range(len(case.spec.shapes) - len(inputs))
    buffers += [
        buffers[alias[i]] if i in alias else bench.runtime.allocate(4 * layouts[len(inputs) + i].size_elems)
        for i in results
    ]
    rows = []
    for kernel in found:
        for buffer, stored in zip(buffers, storage, strict=False):
            bench.runtime.upload(buffer, stored)
        for i in results:
            if i not in alias:
                bench.runtime.fill(buffers[len(inputs) + i], 0xFF)
        scratch = [bench.runtime.allocate(4 * s.layout.size_elems) for s in kernel.scratch]
        bound = BoundKernel(bench.runtime, kernel, [*buffers, *scratch])
        bound.run()
        got = [read(bench, layouts[len(inputs) + i], buffers[len(inputs) + i]) for i in results]
        expected = got if expected is None else expected
        wrong = not all(close(a, b) for a, b in zip(got, expected, strict=True))
        rows.append({"kernel": kernel, "bound": bound, "wrong": wrong, "seconds": [], "copy_s": []})
    timed(bench, rows, args.rounds)
    return [row_of(case, label, bench, row) for row in rows]


def timed(bench: Bench, rows: list[dict[str, Any]], rounds: int) -> None:
    """Every kernel and the copy in turn."""
    for _ in range(rounds):
        copied = bench.seconds(bench.copy)
        for row in rows:
            row["seconds"].append(bench.seconds(row["bound"]))
            row["copy_s"].append(copied)


def row_of(case: Case, label: str, bench: Bench, row: dict[str, Any]) -> dict[str, Any]:
    """What the table and the file show of a kernel."""
    kernel: Kernel = row["kernel"]
    return {
        "op": case.op,
        "shape": case.shape,
        "layout": label,
        "kernel": kernel.variant.label,
        "launches": len(kernel.launches),
        **figures(bench, case.bytes_moved, row),
    }


def figures(bench: Bench, moved: int, row: dict[str, Any]) -> dict[str, Any]:
    """Medians; raw times for the file."""
    ratios = [moved / s / (bench.copy_bytes / c) for s, c in zip(row["seconds"], row["copy_s"], strict=True)]
    return {
        "us": median(row["seconds"]) * 1e6,
        "gb_per_s": moved / median(row["seconds"]) / 1e9,
        "ratio": median(ratios),
        "wrong": row["wrong"],
        "seconds": row["seconds"],
        "copy_s": row["copy_s"],
    }


def read(bench: Bench, layout: Layout, buffer: Any) -> np.ndarray:
    """The logical values of a result."""
    return unpack(layout, bench.runtime.download(buffer, np.empty(layout.size_elems, np.float32)), "float32")


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    """Within what another order of addition may change."""
    scale = float(np.abs(expected).max(initial=1e-30))
    return bool(np.all(np.abs(got - expected) <= TOLERANCE * scale))


class MergedUpdate:
    """The updates of many parameters as one launch."""

    def __init__(self, bench: Bench, case: Case, sizes: Sequence[int], limits: DeviceLimits) -> None:
        layouts = case.layouts(Layout.row_major)
        forms = [f for k in kernels_for(case.spec, layouts, limits) if (f := linear(k)) is not None]
        form = forms[0]
        self.runtime = bench.runtime
        each = [i for i, way in enumerate(form.program.ways) if way == "each" and i < case.spec.inputs]
        starts = np.cumsum([0, *(-(-n // 32) * 32 for n in sizes)])
        stride = int(starts[-1])
        alias = {case.spec.inputs + out: inp for out, inp in case.spec.inplace}
        lane = {p: 128 + 4 * stride * each.index(alias.get(p, p)) for p in form.program.used if alias.get(p, p) in each}
        rows = [
            Row(n, 1, tuple(lane[p] + 4 * int(at) if p in lane else 4 * p for p in form.program.used))
            for n, at in zip(sizes, starts, strict=False)
        ]
        merged = merge(form.program, rows, limits, f"{case.op} of {len(rows)} tensors")
        self.arena = self.runtime.allocate(128 + 4 * stride * len(each))
        data = np.abs(np.random.default_rng(0).standard_normal(32 + stride * len(each), np.float32)) + 1
        self.runtime.upload(self.arena, data)
        call = self.runtime.kernel(merged.source, "batch", merged.label)
        self.tables = self.runtime.constant(merged.rows), self.runtime.constant(merged.groups)
        call.set_args(self.arena, *self.tables)
        self.call = call, merged.global_size, merged.local_size
        self.moved = 4 * sum(sizes) * sum(way == "each" for way in form.program.ways)

    def run(self) -> float:
        """Seconds of one run."""
        event = self.runtime.launch_timed(*self.call)
        event.wait()
        return (event.profile.end - event.profile.start) * 1e-9

    def burst(self, count: int) -> float:
        """Mean seconds of some runs one after the other."""
        events = [self.runtime.launch_timed(*self.call) for _ in range(count)]
        events[-1].wait()
        return (events[-1].profile.end - events[0].profile.start) * 1e-9 / count


def merged_rows(bench: Bench, limits: DeviceLimits, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A small model's 102 parameters (BERT, 6 layers of 384), by SGD and by AdamW, each in one launch."""
    layer = [384 * 384, 384] * 4 + [384] * 4 + [384 * 1536, 1536, 1536 * 384, 384]
    sizes = [30522 * 384, 512 * 384, 2 * 384, 384, 384, *layer * 6, 384 * 384]
    sizes = [7, 64, 130, 1] if args.smoke else sizes
    found = []
    for case in row_cases(1024, 384):
        if case.op not in ("sgd", "adamw") or (args.ops and case.op not in args.ops.split(",")):
            continue
        update = MergedUpdate(bench, case, sizes, limits)
        row: dict[str, Any] = {"bound": update, "wrong": False, "seconds": [], "copy_s": []}
        update.run()
        timed(bench, [row], args.rounds)
        what = {"op": case.op, "shape": f"{len(sizes)} tensors", "layout": "row-major", "kernel": "one launch"}
        found.append({**what, "launches": 1, **figures(bench, update.moved, row)})
    return found


def shown(rows: list[dict[str, Any]], everything: bool) -> list[dict[str, Any]]:
    """The fastest of each case and layout, or all."""
    if everything:
        return rows
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["op"], row["shape"], row["layout"]
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return [row for row in rows if row["wrong"] or row in best.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--ops", default="")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--layouts", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copy-mib", type=int, default=0, help="moved by the copy; 1024 on a GPU, 256 on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--all", action="store_true", help="every variant, not only the fastest of each layout")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.json:
        check_target(args.json)
    if args.smoke:
        args.rounds, args.copy_mib = 1, args.copy_mib or 1
    args.copy_mib = args.copy_mib or (1024 if pick(args.device).limits.kind == "gpu" else 256)
    bench = Bench(args)
    chosen = args.layouts.split(",") if args.layouts else list(LAYOUTS)
    unknown = set(chosen) - set(LAYOUTS)
    if unknown:
        raise SystemExit(f"memory_bound: no layout {sorted(unknown)[0]!r}; there are {', '.join(LAYOUTS)}")
    own = bench.runtime.limits
    kinds = [own, replace(own, kind="gpu", simd_width=32)] if args.smoke and not bench.gpu else [own]
    rows: list[dict[str, Any]] = []
    for limits in kinds:
        for case in cases(args, bench.gpu):
            for label in chosen:
                rows += run_case(bench, case, label, limits, args)
            print(f"{case.op} {case.shape}", file=sys.stderr)
        rows += merged_rows(bench, limits, args)
    copies = [bench.copy_bytes / s / 1e9 for row in rows for s in row["copy_s"]]
    title = f"{bench.runtime.info.label}: copy {median(copies):.1f} GB/s ({bench.copy.kernel.variant.label})"
    table = Table(*("op", "shape", "layout", "kernel", "launches", "us", "GB/s", "of the copy"), title=title)
    for row in shown(rows, args.all):
        ratio = "WRONG" if row["wrong"] else f"{row['ratio']:.2f}"
        numbers = (str(row["launches"]), f"{row['us']:.1f}", f"{row['gb_per_s']:.1f}", ratio)
        table.add_row(row["op"], row["shape"], row["layout"], row["kernel"], *numbers)
    Console(width=160).print(table)
    if args.json:
        document = {"device": bench.runtime.info.label, "copy_gb_per_s": median(copies), "rows": rows}
        write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"memory_bound: {error}")
