"""Microbenchmarks of memory beyond copies: local memory, atomics, walks over tiled and row-major matrices, textures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.probe_runs import Run

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["memory_runs"]

_SOURCE = """
__kernel void local_read(__global const float4 *x, __global float4 *y, const int steps) {
    __local float4 tile[TILE];
    const int me = get_local_id(0), items = get_local_size(0);
    for (int i = me; i < TILE; i += items) tile[i] = x[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float4 s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    for (int i = 0; i < steps; ++i) {
        const int at = me + i * 4 * items;
        s0 += tile[at & (TILE - 1)]; s1 += tile[(at + items) & (TILE - 1)];
        s2 += tile[(at + 2 * items) & (TILE - 1)]; s3 += tile[(at + 3 * items) & (TILE - 1)];
    }
    y[get_global_id(0)] = s0 + s1 + s2 + s3;
}
__kernel void atomics(__global int *y, const int each, const int apart) {
    __global int *mine = y + (size_t)get_global_id(0) * apart;
    for (int i = 0; i < each; ++i) atomic_add(mine, 1);
}
#define AT(r, c) (TILED ? (((r) >> 2) * (side >> 2) + ((c) >> 2)) * 16 + ((r) & 3) * 4 + ((c) & 3) : (r) * side + (c))
__kernel void along_rows(__global const float *x, __global float *y, const int side, const int each) {
    const int r = get_global_id(0) % side, begin = get_global_id(0) / side * each;
    float sum = 0.0f;
    for (int c = begin; c < begin + each; ++c) sum += x[AT(r, c)];
    y[get_global_id(0)] = sum;
}
__kernel void along_columns(__global const float *x, __global float *y, const int side, const int each) {
    const int c = get_global_id(0) % side, begin = get_global_id(0) / side * each;
    float sum = 0.0f;
    for (int r = begin; r < begin + each; ++r) sum += x[AT(r, c)];
    y[get_global_id(0)] = sum;
}
"""
_TEXTURE = """
__kernel void texture_read(__read_only image1d_buffer_t x, __global float4 *y, const int each) {
    float4 sum = 0.0f;
    for (int i = 0; i < each; ++i) sum += read_imagef(x, (int)(get_global_id(0) + i * get_global_size(0)));
    y[get_global_id(0)] = sum;
}
"""
TILE_TEXELS = 512
"""float4 values of the tile in local memory: 8 KiB."""
LOCAL_STEPS = 4096
SIDE = {"cpu": 1024, "gpu": 4096}
"""Of the square matrix that is walked: more than a core's own caches hold, on a GPU more than any."""
ATOMICS_EACH = {"cpu": 4096, "gpu": 64}
MOST_TEXELS = {"cpu": 1 << 18, "gpu": 1 << 22}


def memory_runs(runtime: Runtime, source: Any, target: Any) -> Iterator[Run]:
    """The runs, for ``time_runs``.

    Args:
        runtime: the device.
        source: a large buffer of finite floats.
        target: another.
    """
    limits = runtime.limits
    gpu = limits.kind == "gpu"
    local = min(128, limits.max_work_group_size) if gpu else 1
    items = limits.compute_units * (16 if gpu else 1) * local

    def kernel(entry: str, tiled: bool = False) -> Any:
        head = f"#define TILE {TILE_TEXELS}\n#define TILED {int(tiled)}\n"
        return runtime.kernel(head + _SOURCE, entry, f"microbench.{entry}")

    staged = kernel("local_read")
    staged.set_args(source, target, np.int32(LOCAL_STEPS))
    moved = 4.0 * LOCAL_STEPS * items * 16
    yield Run("local_read", "reads of float4 from local memory", moved, "bytes", (staged, (items,), (local,)))

    each = ATOMICS_EACH[limits.kind]
    for name, apart, where in (
        ("atomic_same", 0, "one address"),
        ("atomic_apart", 16, "an address and line of each item's own"),
    ):
        added = kernel("atomics")
        added.set_args(target, np.int32(each), np.int32(apart))
        what = f"atomic_add of integers in global memory, {where}"
        yield Run(name, what, float(each * items), "atomics", (added, (items,), (local,)))

    side = SIDE[limits.kind]
    while side * side * 4 > source.size:
        side //= 2
    parts = 16 if gpu else 1
    for tiled, layout in ((False, "row-major"), (True, "R-Tile 4x4")):
        for way in ("rows", "columns"):
            walk = kernel(f"along_{way}", tiled)
            walk.set_args(source, target, np.int32(side), np.int32(side // parts))
            name = f"read_{way}_{'tiled' if tiled else 'row_major'}"
            what = f"each item along {way} of a {layout} matrix of {side} x {side}"
            yield Run(name, what, 4.0 * side * side, "bytes", (walk, (side * parts,), (local,)))

    texels = min(runtime.info.image_max_buffer_texels, MOST_TEXELS[limits.kind], source.size // 16)
    if texels >= items:
        read = runtime.kernel(_TEXTURE, "texture_read", "microbench.texture_read")
        image, _ = runtime.image(source, texels)
        read.set_args(image, target, np.int32(texels // items))
        moved = 16.0 * (texels // items) * items
        what = "texels of an image over a buffer, side by side"
        yield Run("texture_read", what, moved, "bytes", (read, (items,), (local,)), image)
