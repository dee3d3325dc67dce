"""Attention as one op beside the ops that it replaces, forward and backward, and beside torch where it runs there too.

    python benchmarks/attention.py [--device SEL] [--shapes 96x128x128x32,24x256x256x64c,…] [--rounds N] [--json FILE]
                                   [--no-torch] [--smoke]

A shape is heads x rows x keys x features; a trailing c adds a causal mask to the scores. Queries, keys and values lie
as a step has them: tokens by rows, the heads side by side. The unfused chain is the best kernel found for each
of its ops (contraction, masking, softmax, contraction; backward four contractions and the softmax's gradient), bound to
one set of buffers and run back to back; the fused op is each of its kernels. All of a shape are timed in turn, round by
round, from the first start to the last end by events (on a GPU in bursts of 10, the mean); shown are medians, their
quartiles, and the ratio unfused / fused. torch's scaled_dot_product_attention is timed on the host, so on CPUs alone.
Results of the fused kernels are compared with the chain's; one that differs is WRONG and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pyopencl as cl
from rich.console import Console
from rich.table import Table

from kernels.pack import pack, unpack
from kernels.runtime import Runtime, pick
from kernels.spec import Kernel, OpSpec
from kernels.testing import BoundKernel
from kernels.variants import kernels_for
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.graph import Expr
from layoutopt.layout import Layout

SHAPES = "96x128x128x32,128x128x128x64,24x197x197x64,24x256x256x64c,32x512x512x64c"
SMOKE = "2x19x21x12c"
BURST = 10
TOLERANCE = 2e-4
SAME = Expr((), (("x", 0),))
ADD = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
FLOAT = "float32"


@dataclass(frozen=True)
class Shape:
    """Heads, rows, keys, features, and whether a causal mask is added."""

    b: int
    m: int
    n: int
    d: int
    causal: bool

    @staticmethod
    def of(text: str) -> Shape:
        """``24x256x256x64c``."""
        try:
            b, m, n, d = map(int, text.removesuffix("c").split("x"))
        except ValueError:
            raise SystemExit(f"--shapes: {text!r} is not HEADSxROWSxKEYSxFEATURES[c], as 24x256x256x64c") from None
        return Shape(b, m, n, d, text.endswith("c"))

    def __str__(self) -> str:
        return f"{self.b}x{self.m}x{self.n}x{self.d}{'c' if self.causal else ''}"


def heads(b: int, rows: int, features: int) -> Layout:
    """[b, rows, features] of tokens by rows."""
    return Layout.row_major((rows, b, features)).permute((1, 0, 2))


class Buffers:
    """Named tensors on the device, each in one layout."""

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        b, m, n, d = shape.b, shape.m, shape.n, shape.d
        rng = np.random.default_rng(0)
        mask = np.where(np.arange(n) <= np.arange(m)[:, None] + n - m, 0, np.finfo(np.float32).min)
        self.runtime = runtime
        self.layouts = {name: heads(b, m, d) for name in ("q", "o", "do", "dq", "o1", "dq1")}
        self.layouts |= {name: heads(b, n, d) for name in ("k", "v", "dk", "dv", "dk1", "dv1")}
        self.layouts |= {name: Layout.row_major((b, m, n)) for name in ("s", "p", "dp", "ds")}
        self.layouts |= {"mask": Layout.row_major((m, n)).expand((b, m, n))}
        self.layouts |= {name: Layout.row_major((b, m)) for name in ("peak", "mass")}
        self.buffers = {name: runtime.allocate(4 * x.size_elems) for name, x in self.layouts.items()}
        for name in ("q", "k", "v", "do"):
            self.put(name, rng.standard_normal(self.layouts[name].shape))
        self.put("mask", np.broadcast_to(mask, (b, m, n)))

    def put(self, name: str, array: np.ndarray) -> None:
        """Upload."""
        self.runtime.upload(self.buffers[name], pack(self.layouts[name], array.astype(np.float32), FLOAT), wait=True)

    def get(self, name: str) -> np.ndarray:
        """Download."""
        layout = self.layouts[name]
        storage = np.empty(layout.size_elems, np.float32)
        self.runtime.download(self.buffers[name], storage)
        return unpack(layout, storage, FLOAT)

    def bound(self, kernel: Kernel, names: Sequence[str]) -> BoundKernel:
        """A kernel on tensors by operand, with workspace of its own."""
        scratch = [self.runtime.allocate(4 * s.layout.size_elems) for s in kernel.scratch]
        return BoundKernel(self.runtime, kernel, [*(self.buffers[name] for name in names), *scratch])


class Chain:
    """Kernels that run one after the other."""

    def __init__(self, label: str, parts: Sequence[BoundKernel]) -> None:
        self.label, self.parts = label, parts

    def burst(self, count: int) -> float:
        """Seconds of one run, among ``count`` back to back, held back until all are enqueued."""
        queue = self.parts[0].queue
        gate = cl.UserEvent(self.parts[0].runtime.context)
        events: list[Any] = []
        for _ in range(count):
            for part in self.parts:
                for launch, call in zip(part.kernel.launches, part.calls, strict=True):
                    wait = None if events else [gate]
                    size = launch.global_size, launch.local_size
                    events.append(cl.enqueue_nd_range_kernel(queue, call, *size, wait_for=wait))
        queue.flush()
        gate.set_status(cl.command_execution_status.COMPLETE)
        queue.finish()
        return float(events[-1].profile.end - events[0].profile.start) * 1e-9 / count


# ---- what is compared ---------------------------------------------------------------------------------------------


def best(buffers: Buffers, spec: OpSpec, names: Sequence[str], layouts: Sequence[Layout]) -> BoundKernel:
    """The fastest kernel of an op on these tensors, by the least of three runs."""
    found = [buffers.bound(k, names) for k in kernels_for(spec, tuple(layouts), buffers.runtime.limits)]
    timed = []
    for kernel in found:
        kernel.run()
        timed.append((min(kernel.run() for _ in range(3)), kernel.kernel.variant.label, kernel))
    return min(timed, key=lambda one: one[:2])[2]


def contraction(buffers: Buffers, a: str, b: str, c: str, turns: str, alpha: float = 1.0) -> BoundKernel:
    """``c = alpha * a·b`` with operands turned where ``turns`` says t."""
    names = (a, b, c)
    views = [
        buffers.layouts[x].permute((0, 2, 1)) if t == "t" else buffers.layouts[x]
        for x, t in zip(names, turns, strict=True)
    ]
    spec = OpSpec("contraction", tuple(x.shape for x in views), (FLOAT,) * 3, 2, (("alpha", alpha),))
    return best(buffers, spec, names, views)


def rows(buffers: Buffers, kind: str, names: Sequence[str]) -> BoundKernel:
    """An op over the rows of scores."""
    views = [
        x for name in names if (x := buffers.layouts[name].reshape(_flat(buffers.layouts[name].shape))) is not None
    ]
    spec = OpSpec(kind, tuple(x.shape for x in views), (FLOAT,) * len(names), len(names) - 1)
    return best(buffers, spec, names, views)


def _flat(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0] * shape[1], shape[2]


def unfused(buffers: Buffers, shape: Shape) -> dict[str, Chain]:
    """The ops of a captured step."""
    scale = shape.d**-0.5
    scores, forward = "s", [contraction(buffers, "q", "k", "s", "-t-", scale)]
    if shape.causal:
        scores = "dp"
        full = buffers.layouts["s"]
        spec = OpSpec("pointwise", (full.shape,) * 3, (FLOAT,) * 3, 2, (("expr", ADD),))
        forward.append(best(buffers, spec, ("s", "mask", scores), (full, buffers.layouts["mask"], full)))
    forward.append(rows(buffers, "softmax", (scores, "p")))
    forward.append(contraction(buffers, "p", "v", "o", "---"))
    backward = [
        contraction(buffers, "p", "do", "dv", "t--"),
        contraction(buffers, "do", "v", "dp", "-t-"),
        rows(buffers, "softmax_grad", ("dp", "p", "ds")),
        contraction(buffers, "ds", "q", "dk", "t--", scale),
        contraction(buffers, "ds", "k", "dq", "---", scale),
    ]
    return {"forward": Chain("unfused", forward), "backward": Chain("unfused", backward)}


def fused(buffers: Buffers, shape: Shape) -> dict[str, list[Chain]]:
    """Every kernel of the fused ops."""
    more = ["mask"] if shape.causal else []
    attrs = (("alpha", shape.d**-0.5), ("score", ADD if shape.causal else SAME))
    forward = ("q", "k", "v", *more, "o1", "peak", "mass")
    backward = ("q", "k", "v", "o1", "peak", "mass", "do", *more, "dq1", "dk1", "dv1")
    out = {}
    for part, kind, names in (("forward", "attention", forward), ("backward", "attention_grad", backward)):
        layouts = tuple(buffers.layouts[name] for name in names)
        inputs = len(names) - 3
        spec = OpSpec(kind, tuple(x.shape for x in layouts), (FLOAT,) * len(names), inputs, attrs)
        kernels = kernels_for(spec, layouts, buffers.runtime.limits)
        out[part] = [Chain(k.variant.label, [buffers.bound(k, names)]) for k in kernels]
    return out


def torch_peer(shape: Shape) -> dict[str, Callable[[], float]]:
    """Fused attention of torch, on the host: seconds of a forward pass, and of a backward pass."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    q = torch.randn(1, shape.b, shape.m, shape.d, requires_grad=True)
    k, v = (torch.randn(1, shape.b, shape.n, shape.d, requires_grad=True) for _ in range(2))
    do = torch.randn(1, shape.b, shape.m, shape.d)
    mask = None
    if shape.causal:
        keep = torch.arange(shape.n) <= torch.arange(shape.m)[:, None] + shape.n - shape.m
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)

    def timed(run: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.perf_counter()
        out = run()
        return time.perf_counter() - begin, out

    def forward() -> float:
        return timed(lambda: attend(q, k, v, attn_mask=mask))[0]

    def backward() -> float:
        out = attend(q, k, v, attn_mask=mask)
        return timed(lambda: torch.autograd.grad(out, (q, k, v), do))[0]

    return {"forward": forward, "backward": backward}


# ---- measuring ----------------------------------------------------------------------------------------------------


def measure(runtime: Runtime, shape: Shape, rounds: int, peer: bool) -> list[dict[str, Any]]:
    """Both parts of a shape: medians and quartiles of everything, and what is wrong."""
    buffers = Buffers(runtime, shape)
    chains, ours = unfused(buffers, shape), fused(buffers, shape)
    torch = torch_peer(shape) if peer else {}
    count = BURST if runtime.limits.kind == "gpu" else 1
    results: list[dict[str, Any]] = []
    for part, outputs in (("forward", ("o",)), ("backward", ("dq", "dk", "dv"))):
        runs: dict[str, Callable[[], float]] = {"unfused": lambda part=part: chains[part].burst(count)}  # type: ignore[misc]
        runs |= {c.label: (lambda c=c: c.burst(count)) for c in ours[part]}  # type: ignore[misc]
        runs |= {"torch": torch[part]} if peer else {}
        wrong = []
        runs["unfused"]()
        expected = {name: buffers.get(name) for name in outputs}
        for chain in ours[part]:
            chain.burst(1)
            for name, value in expected.items():
                if not np.abs(buffers.get(f"{name}1") - value).max() <= TOLERANCE * np.abs(value).max():
                    wrong.append(f"{chain.label}: {name}")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(run())
        flops = 2.0 * shape.b * shape.m * shape.n * shape.d * (2 if part == "forward" else 4)
        results.append({"shape": str(shape), "part": part, "flops": flops, "seconds": times, "wrong": wrong})
    return results


def spread(times: Sequence[float]) -> str:
    """Median, and quartiles, in microseconds."""
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return f"{median(times) * 1e6:.0f} [{low * 1e6:.0f}, {high * 1e6:.0f}]"


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """A table: the best of the fused kernels beside the chain and torch."""
    table = Table(title="Attention, µs: median [quartiles]")
    for head in ("shape", "part", "unfused", "fused", "ratio", "GFLOP/s", "torch", "kernel"):
        table.add_column(head, justify="left" if head in ("shape", "part", "kernel") else "right")
    for one in results:
        times = one["seconds"]
        name = min((n for n in times if n not in ("unfused", "torch")), key=lambda n: median(times[n]))
        ratio = median(a / b for a, b in zip(times["unfused"], times[name], strict=True))
        rate = one["flops"] / median(times[name]) / 1e9
        other = spread(times["torch"]) if "torch" in times else "-"
        cells = spread(times["unfused"]), spread(times[name]), f"{ratio:.2f}", f"{rate:.0f}", other
        table.add_row(one["shape"], one["part"], *cells, name + (" WRONG" if one["wrong"] else ""))
    console.print(table)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", help="index or part of the device's name")
    parser.add_argument("--shapes", help=f"default {SHAPES}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    parser.add_argument("--smoke", action="store_true", help="one small shape, two rounds")
    args = parser.parse_args()
    if args.json:
        check_target(args.json)
    runtime = Runtime(pick(args.device), profiling=True)
    console = Console(width=200)
    console.print(f"{runtime.info.name}, {runtime.info.driver}")
    peer = runtime.limits.kind == "cpu" and not args.no_torch
    results = []
    for text in (args.shapes or (SMOKE if args.smoke else SHAPES)).split(","):
        results += measure(runtime, Shape.of(text), 2 if args.smoke else args.rounds, peer)
    show(results, console)
    if args.json:
        about = {"device": runtime.info.name, "driver": runtime.info.driver, "tolerance": TOLERANCE}
        write_atomic(args.json, json.dumps({**about, "results": results}, indent=1).encode())
    wrong = [f"{one['shape']} {one['part']} {name}" for one in results for name in one["wrong"]]
    for name in wrong:
        console.print(f"WRONG: {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"error: {error}")
