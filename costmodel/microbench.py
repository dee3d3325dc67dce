"""Microbenchmarks of a device: launches, copies, strided reads, arithmetic by vector width (more are in
``costmodel/memory_probes.py``); and the sample of kernels that a calibration without a graph measures.

Every benchmark is repeated in rounds over all of them, and every repetition is kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.device import Probe
from costmodel.memory_probes import memory_runs
from costmodel.probe_runs import Run, time_runs
from kernels.spec import DeviceLimits, OpSpec
from kernels.variants import families, kernels_for
from layoutopt.graph import PRODUCTS, Expr
from layoutopt.layout import Layout
from layoutopt.quantize import Format, groups_per_row, words_per_row

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = [
    "designed_pairs",
    "designed_specs",
    "host_probe",
    "launch_probe",
    "layout_choices",
    "probes",
    "round_trip_probe",
]

_SOURCE = """
#define REPEATS {repeats}
#define SIDE_BY_SIDE {side} // items that run together read what lies together
typedef {vector} vec;
__kernel void empty(__global float *y) {{ }}
__kernel void copy(__global const vec *x, __global vec *y, const int each) {{
    const size_t first = (size_t)get_global_id(0) * (SIDE_BY_SIDE ? 1 : each);
    const size_t step = SIDE_BY_SIDE ? get_global_size(0) : 1;
    for (int r = 0; r < REPEATS; ++r)
        for (int i = 0; i < each; ++i) y[first + i * step] = x[first + i * step];
}}
__kernel void strided(__global const float *x, __global float *y, const int each, const int stride, const int count) {{
    __global const float *from = x + (size_t)get_global_id(0) * each;
    float sum = 0.0f;
    for (int column = 0; column < stride; column += 16)
        for (int row = 0; row < count; ++row) sum += from[(size_t)row * stride + column];
    y[get_global_id(0)] = sum;
}}
__kernel void fma_peak(__global const vec *x, __global vec *y, const int each) {{
    const vec m = x[get_global_id(0)], a = x[get_global_id(0) + 1];
    vec s0 = m, s1 = a, s2 = m + a, s3 = m - a, s4 = m * a, s5 = m + m, s6 = a + a, s7 = a - m;
    for (int i = 0; i < each; ++i) {{ // not mad(): one CPU driver calls a slow library function for it
        s0 = s0 * m + a; s1 = s1 * m + a; s2 = s2 * m + a; s3 = s3 * m + a;
        s4 = s4 * m + a; s5 = s5 * m + a; s6 = s6 * m + a; s7 = s7 * m + a;
    }}
    y[get_global_id(0)] = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
}}
"""

IN_CACHE_BYTES = 64 << 10
IN_MEMORY_BYTES = {"cpu": 64 << 20, "gpu": 512 << 20}
"""More than any cache holds."""


def probes(runtime: Runtime, rounds: int = 7) -> dict[str, Probe]:
    """Run the microbenchmarks.

    Args:
        runtime: the device.
        rounds: repetitions of each, interleaved.

    Raises:
        DeviceError: the device refuses a kernel.
    """
    buffers = _buffers(runtime)  # held here: a kernel does not keep its arguments alive
    runs = [*_runs(runtime, *buffers), *memory_runs(runtime, *buffers)]
    out = time_runs(runtime, runs, rounds)
    out["launch"] = launch_probe(runtime, rounds)
    out["host_launch"] = host_probe(runtime, rounds)
    out["round_trip"] = round_trip_probe(runtime, rounds)
    return out


def launch_probe(runtime: Runtime, rounds: int = 7) -> Probe:
    """What a launch adds to a stream of launches on the device, beyond the time that its events show.

    What the host takes to launch is another thing (``host_probe``).
    """
    return (_gaps_of_nothing if runtime.limits.kind == "gpu" else _gaps_of_work)(runtime, rounds)


def _gaps_of_nothing(runtime: Runtime, rounds: int, batch: int = 200) -> Probe:
    """Between empty kernels. The host is given a start: a kernel that takes milliseconds goes before the stream, so
    that the device never waits for the next launch.
    """
    empty, busy = (_kernel(runtime, name) for name in ("empty", "fma_peak"))
    target = runtime.allocate(1 << 20)
    empty.set_args(target)
    busy.set_args(target, target, _int(1 << 20))
    call, start = (empty, (1,), (1,)), (busy, (1,), (1,))
    times = []
    for number in range(rounds + 1):
        first = runtime.launch_timed(*start)
        events = [runtime.launch_timed(*call) for _ in range(batch)]
        events[-1].wait()
        inside = sum(e.profile.end - e.profile.start for e in events)
        if number:  # the first round compiles
            times.append(max(int((events[-1].profile.end - first.profile.end - inside) / batch), 1))
    what = f"between {batch} empty kernels in a stream that the device does not wait for"
    return Probe(what, 1.0, "launches", tuple(times))


def _gaps_of_work(runtime: Runtime, rounds: int, batch: int = 32, kernels: int = 16) -> Probe:
    """Between kernels that copy: on a CPU the driver's own code and data are among what kernels drive out of caches."""
    each, copied_bytes = 8 * runtime.limits.compute_units, 1 << 20
    buffers = runtime.allocate(kernels * copied_bytes), runtime.allocate(kernels * copied_bytes)
    # Held here: a kernel does not keep its arguments alive.
    pairs = [[runtime.region(b, n * copied_bytes, copied_bytes) for b in buffers] for n in range(kernels)]
    calls = [(_kernel(runtime, "copy"), (each,), (1,)) for _ in pairs]
    for (copy, *_), pair in zip(calls, pairs, strict=True):
        copy.set_args(*pair, _int(copied_bytes // 4 // each))
    times = []
    for number in range(rounds + 1):
        events = [runtime.launch_timed(*calls[i % kernels]) for i in range(batch)]
        events[-1].wait()
        gaps = (after.profile.start - before.profile.end for before, after in pairwise(events))
        if number:
            times.append(max(int(median(gaps)), 1))
    what = f"from the end of a kernel that copies 1 MiB to the start of the next, median of {batch} in a stream"
    return Probe(what, 1.0, "launches", tuple(times))


def host_probe(runtime: Runtime, rounds: int = 7, batch: int = 200) -> Probe:
    """What a launch takes the host, on the queue that steps are enqueued on."""
    kernel = _kernel(runtime, "empty")
    target = runtime.allocate(64)
    kernel.set_args(target)
    times = []
    for number in range(rounds + 1):
        begin = time.perf_counter_ns()
        runtime.enqueue([(kernel, (1,), (1,))] * batch)
        spent = time.perf_counter_ns() - begin
        runtime.finish()
        if number:
            times.append(max(int(spent / batch), 1))
    return Probe(f"the host enqueues {batch} empty kernels", 1.0, "launches", tuple(times))


def round_trip_probe(runtime: Runtime, rounds: int = 7, batch: int = 20) -> Probe:
    """What a step takes around its kernels: a few bytes go to the device, a launch follows, and the host waits."""
    kernel = _kernel(runtime, "empty")
    target, sent = runtime.allocate(4096), np.zeros(1024, np.float32)
    kernel.set_args(target)
    runtime.finish()
    times = []
    for number in range(rounds + 1):
        begin = time.perf_counter_ns()
        for _ in range(batch):
            runtime.upload(target, sent, wait=False)
            runtime.enqueue([(kernel, (1,), (1,))])
            runtime.finish()
        if number:
            times.append(max(int((time.perf_counter_ns() - begin) / batch), 1))
    return Probe("4 KiB are sent, an empty kernel follows, the host waits", 1.0, "steps", tuple(times))


def _kernel(runtime: Runtime, entry: str, vector: str = "float", repeats: int = 1) -> Any:
    source = _SOURCE.format(vector=vector, repeats=repeats, side=int(runtime.limits.kind == "gpu"))
    return runtime.kernel(source, entry, f"microbench.{entry}")


def _buffers(runtime: Runtime) -> tuple[Any, Any]:
    limits = runtime.limits
    memory_bytes = min(IN_MEMORY_BYTES[limits.kind], limits.max_alloc_bytes, limits.global_mem_bytes // 8)
    pair = runtime.allocate(memory_bytes), runtime.allocate(memory_bytes)
    for buffer in pair:
        runtime.fill(buffer, 0x3F)  # 0x3f3f3f3f is the float 0.747
    runtime.finish()
    return pair


def _runs(runtime: Runtime, source: Any, target: Any) -> Iterator[Run]:
    limits = runtime.limits
    gpu = limits.kind == "gpu"
    local = 128 if gpu else 1
    memory_bytes = source.size
    workers = limits.compute_units * (32 if gpu else 1)
    items = workers * local

    def call(entry: str, vector: str, repeats: int, *args: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        kernel = _kernel(runtime, entry, vector, repeats)
        kernel.set_args(*(_int(a) if isinstance(a, int) else a for a in args))
        return kernel, (items,), (local,)

    width = 4 if gpu else min(max(limits.simd_width, 4), 16)
    vector = f"float{width}"
    each = memory_bytes // (4 * width) // items
    moved = 2.0 * each * items * 4 * width
    yield Run("copy_memory", "copy of a large buffer", moved, "bytes", call("copy", vector, 1, source, target, each))
    total = IN_CACHE_BYTES * limits.compute_units // 4
    each = max(total // (4 * width) // items, 1)
    moved = 2.0 * each * items * 4 * width * 256
    cached = call("copy", vector, 256, source, target, each)
    yield Run("copy_cache", "repeated copy within a near cache", moved, "bytes", cached)
    rows = 256
    for name, stride in (("read_rows", 16), ("read_stride_1k", 256), ("read_stride_16k", 4096)):
        each = rows * stride
        if each * items * 4 > memory_bytes:
            each = memory_bytes // 4 // items
        count = max(each // stride, 1)
        lines = float(count * max(stride // 16, 1) * items)
        what = f"one value of every line, {stride * 4} bytes from read to read"
        yield Run(name, what, lines * 64, "bytes", call("strided", "float", 1, source, target, each, stride, count))
    for lanes in (1, 4, 8, 16):
        steps = 20000 if gpu else 40000
        flops = 2.0 * 8 * lanes * steps * items
        name = f"float{lanes}" if lanes > 1 else "float"
        fma = call("fma_peak", name, 1, source, target, steps)
        yield Run(f"fma_{lanes}", f"multiply-adds in {name}", flops, "flop", fma)


def _int(value: int) -> Any:
    import numpy as np

    return np.int32(value)


# ---- the designed sample -------------------------------------------------------------------------------------------


def layout_choices(shape: tuple[int, ...], rng: random.Random) -> Layout:
    """A layout that a planner might give a tensor: row-major, transposed, R-Tile, panels."""
    if len(shape) < 2 or min(shape[-2:]) < 4:
        return Layout.row_major(shape)
    lead = tuple(range(len(shape) - 2))
    r, c = len(shape) - 2, len(shape) - 1
    picks: list[Callable[[], Layout]] = [
        lambda: Layout.row_major(shape),
        lambda: Layout.row_major(shape),
        lambda: Layout.row_major(shape, (*lead, c, r)),
        lambda: Layout.r_tile(shape, rng.choice((4, 8, 16)), rng.choice((4, 8, 16))),
        lambda: Layout.tiled(shape, {c: 16}),
        lambda: Layout.tiled(shape, {r: rng.choice((4, 8, 16))}, inner=(r,)),
    ]
    return rng.choice(picks)()


_GELU = Expr(
    (
        ("mul", ("x", 0), ("c", 0.7071067811865476)),
        ("erf", ("t", 0)),
        ("add", ("t", 1), ("c", 1.0)),
        ("mul", ("x", 0), ("t", 2)),
        ("mul", ("t", 3), ("c", 0.5)),
    ),
    (("t", 4),),
)
_ADD = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
_COPY = Expr((), (("x", 0),))


_QUANTISED = ("quantized_contraction", "quantized_gather", "quantize", "dequantize")
_SAMPLED_KINDS = (
    *("contraction", "pointwise") * 3,
    *("reduce", "softmax", "softmax_grad", "log_softmax", "layer_norm", "layer_norm_grad", "layer_norm_affine"),
    *("gather", "scatter_add", "cross_entropy", "cross_entropy_grad", "concat"),
    *("attention", "attention_grad"),
    *_QUANTISED,
)


def designed_specs(rng: random.Random) -> Iterator[OpSpec]:
    """An endless sample of op specs of every kind, small to middling, many sizes not multiples of anything."""
    f = "float32"
    sizes = (8, 13, 32, 60, 64, 96, 128, 197, 256, 384, 512, 768)
    while True:
        kind = rng.choice(_SAMPLED_KINDS)
        b, m, k, n = rng.choice((1, 1, 8, 24)), *(rng.choice(sizes) for _ in range(3))
        if kind == "contraction":
            m, k, n = (m, k, n) if b == 1 else (min(m, 128), min(k, 64), min(n, 128))
            yield OpSpec(kind, ((b, m, k), (b, k, n), (b, m, n)), (f,) * 3, 2, (("alpha", 1.0),))
            continue
        if kind in ("attention", "attention_grad"):
            yield _attention_spec(kind, b, min(m, 256), min(n, 256), rng.choice((16, 20, 32, 64)), rng.random() < 0.5)
            continue
        if kind in _QUANTISED:
            yield _quantised_spec(kind, m, k, n, rng.choice(("int8", "nf4:64")))
            continue
        m *= rng.choice((1, 1, 4))
        if kind == "pointwise":
            expr, inputs = rng.choice(((_GELU, 1), (_ADD, 2), (_COPY, 1)))
            yield OpSpec(kind, ((m, k),) * (inputs + 1), (f,) * (inputs + 1), inputs, (("expr", expr),))
        elif kind == "reduce":
            yield OpSpec(kind, ((m, k), (m,)), (f, f), 1, (("fn", rng.choice(("sum", "mean", "max"))),))
        elif kind in ("softmax", "log_softmax"):
            yield OpSpec(kind, ((m, k),) * 2, (f, f), 1)
        elif kind == "softmax_grad":
            yield OpSpec(kind, ((m, k),) * 3, (f,) * 3, 2)
        elif kind == "layer_norm":
            shapes: tuple[tuple[int, ...], ...] = ((m, k), (k,), (k,), (m, k), (m,), (m,))
            yield OpSpec(kind, shapes, (f,) * 6, 3, (("eps", 1e-5),))
        elif kind == "layer_norm_grad":
            yield OpSpec(kind, ((m, k), (m, k), (m,), (m,), (k,), (m, k)), (f,) * 6, 5)
        elif kind == "layer_norm_affine":
            yield OpSpec(kind, ((m, k), (m, k), (m,), (m,), (k,), (k,)), (f,) * 6, 4)
        elif kind == "gather":
            yield OpSpec(kind, ((8 * k, n), (m,), (m, n)), (f, "int32", f), 2)
        elif kind == "scatter_add":
            yield OpSpec(kind, ((m, n), (m,), (8 * k, n)), (f, "int32", f), 2, (("padding_idx", -1),))
        elif kind == "cross_entropy":
            yield OpSpec(kind, ((m, k), (m,), (), (m,), ()), (f, "int32", f, f, f), 2, (("ignore_index", -100),))
        elif kind == "cross_entropy_grad":
            shapes = ((), (m, k), (m,), (m,), (), (m, k))
            yield OpSpec(kind, shapes, (f, f, "int32", f, f, f), 5, (("ignore_index", -100),))
        else:
            yield OpSpec(kind, ((b, m, k), (b, n, k), (b, m + n, k)), (f,) * 3, 2, (("starts", (0, m)),))


def _quantised_spec(kind: str, m: int, k: int, n: int, fmt: str) -> OpSpec:
    """An op over rows of k numbers in few bits: n rows of weights, or m rows of activations."""
    form, f = Format.parse(fmt), "float32"
    words, groups = words_per_row(form, k), groups_per_row(form, k)
    attrs: tuple[tuple[str, Any], ...] = (("format", fmt),)
    if kind == "quantized_contraction":
        shapes: tuple[tuple[int, ...], ...] = ((m, k), (n, words), (n, groups), (m, n))
        return OpSpec(kind, shapes, (f, "int32", f, f), 3, (("alpha", 1.0), *attrs))
    if kind == "quantized_gather":
        shapes = ((8 * n, words), (8 * n, groups), (m,), (m, k))
        return OpSpec(kind, shapes, ("int32", f, "int32", f), 3, attrs)
    if kind == "quantize":
        return OpSpec(kind, ((m, k), (m, words), (m, groups)), (f, "int32", f), 1, attrs)
    return OpSpec(kind, ((m, words), (m, groups), (m, k)), ("int32", f, f), 2, attrs)


def _attention_spec(kind: str, b: int, m: int, n: int, d: int, masked: bool) -> OpSpec:
    """Attention over heads of ``d`` features, with a mask that is added to the scores or none."""
    queries, keys, rows = (b, m, d), (b, n, d), (b, m)
    saved = (queries, rows, rows, queries) if kind == "attention_grad" else ()
    outputs = (queries, keys, keys) if kind == "attention_grad" else (queries, rows, rows)
    inputs = (queries, keys, keys, *saved, *([(b, m, n)] if masked else []))
    attrs = (("alpha", d**-0.5), ("score", _ADD if masked else _COPY))
    return OpSpec(kind, (*inputs, *outputs), ("float32",) * len(inputs + outputs), len(inputs), attrs)


def designed_pairs(
    limits: DeviceLimits, seed: int, specs: int = 160, most_flops: float = 2e8
) -> list[tuple[OpSpec, tuple[Layout, ...]]]:
    """Distinct (spec, layouts) pairs that some kernel here accepts, every family among them.

    Args:
        limits: the device's.
        seed: equal seeds give equal samples.
        specs: how many pairs.
        most_flops: contractions with more arithmetic are left out.
    """
    rng = random.Random(seed)
    served = {kind for family in families() for kind in family.kinds}
    found: dict[tuple[OpSpec, tuple[Layout, ...]], None] = {}
    source = designed_specs(rng)
    for _ in range(20 * specs):
        if len(found) >= specs:
            break
        spec = next(source)
        if spec.kind not in served:
            continue
        if spec.kind in PRODUCTS and 2.0 * prod(spec.shapes[0][-2:]) * spec.shapes[-1][-1] > most_flops:
            continue
        layouts = tuple(layout_choices(shape, rng) for shape in spec.shapes)
        if spec.kind not in PRODUCTS and rng.random() < 0.5:
            layouts = tuple(Layout.row_major(shape) for shape in spec.shapes)
        if kernels_for(spec, layouts, limits):
            found[spec, layouts] = None
    return list(found)
