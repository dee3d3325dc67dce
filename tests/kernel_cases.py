"""What the kernel tests share: layouts to try, and a check of every variant against the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from kernels.nest import Access, Bound, Data, Index, Loop, Nest, Phase
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.spec import DeviceLimits, Kernel, Launch, OpSpec, frozen_attrs
from kernels.testing import check_kernels, limits_of
from kernels.variants import kernels_for
from layoutopt.layout import Layout, Mode

GPU_LIMITS = DeviceLimits(kind="gpu", simd_width=32)


def padded_rows(shape: tuple[int, ...]) -> Layout:
    """Row-major with a row pitch larger than the row, starting inside its buffer."""
    pitch = shape[1] + 3
    return Layout.build(shape, [Mode(0, shape[0], pitch), Mode(1, shape[1], 1)], (shape[0] * pitch + 5,), (2,))


def head_view(shape: tuple[int, ...]) -> Layout:
    """[rows, cols] seen in a larger row-major matrix, as one head of several is."""
    view = Layout.row_major((shape[0], 3 * shape[1])).slice(1, shape[1], 2 * shape[1])
    assert view is not None
    return view


MATRIX_LAYOUTS = {
    "row-major": Layout.row_major,
    "transposed": lambda shape: Layout.row_major(shape, (1, 0)),
    "r-tile 4x4": lambda shape: Layout.r_tile(shape, 4, 4),
    "r-tile 8x16 by columns": lambda shape: Layout.r_tile(shape, 8, 16, inner="col", outer="col"),
    "column panels": lambda shape: Layout.tiled(shape, {1: 16}, (1, 0)),
    "row panels": lambda shape: Layout.tiled(shape, {0: 16}),
    "pitch": padded_rows,
    "head": head_view,
}


def make_spec(
    kind: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[tuple[int, ...]],
    attrs: Mapping[str, Any] | None = None,
    out_dtypes: Sequence[str] | None = None,
    inplace: tuple[tuple[int, int], ...] = (),
) -> OpSpec:
    """The spec of an op over arrays; outputs are float32 unless said otherwise."""
    names = {"f": "float32", "i": "int32", "b": "bool"}
    return OpSpec(
        kind,
        (*(x.shape for x in inputs), *outputs),
        (*(names[x.dtype.kind] for x in inputs), *(out_dtypes or ["float32"] * len(outputs))),
        len(inputs),
        frozen_attrs(attrs or {}),
        inplace,
    )


def kernels_of(spec: OpSpec, layouts: Sequence[Layout], limits: DeviceLimits) -> list[Kernel]:
    """Every variant that accepts the layouts; at least one must."""
    out = kernels_for(spec, tuple(layouts), limits)
    assert out, f"no variant of {spec.kind} accepts {[x.describe() for x in layouts]} on a {limits.kind}"
    return out


def check_all(
    device_index: int,
    spec: OpSpec,
    layouts: Sequence[Layout],
    inputs: Sequence[np.ndarray],
    rtol: float = 1e-5,
    sizes: Sequence[np.ndarray] | None = None,
) -> set[str]:
    """Check every variant that accepts the layouts, those enumerated for GPUs too; see ``check_kernel``.

    Returns:
        The names of the variants that ran.
    """
    device = devices()[device_index].handle
    exact = [x.astype(np.float32).astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    kernels = {k.key: k for limits in (limits_of(device), GPU_LIMITS) for k in kernels_of(spec, layouts, limits)}
    check_kernels(device, list(kernels.values()), inputs, expected, rtol, sizes)
    return {kernel.variant.name for kernel in kernels.values()}


# ---- what a nest says it touches ------------------------------------------------------------------------------------


def touched(kernel: Kernel, nest: Nest, operand: int, write: bool, data: Mapping[int, np.ndarray]) -> list[int]:
    """Element offsets of an operand that a nest accesses, with repetitions, by plain enumeration."""
    launch = next((x for x in kernel.launches if x.nest is nest), None)
    layout = kernel.operand_layout(operand) if launch is None else kernel.launch_layout(launch, operand)
    offsets = layout.linear_offsets()
    integers = {p for p in range(kernel.spec.inputs) if kernel.spec.dtypes[p] == "int32"}
    data = {p: _seen(kernel, launch, p, values) for p, values in data.items() if p in integers}
    out: list[int] = []
    for phase in nest.phases:
        for access in (*phase.accesses, *phase.border):
            if access.operand == operand and access.write == write:
                out += _access_offsets(nest, phase, access, offsets, data)
    return out


def _seen(kernel: Kernel, launch: Launch | None, position: int, values: np.ndarray) -> np.ndarray:
    """Integers of an operand under the axes by which a launch indexes it."""
    own = kernel.buffer_layout(position)
    storage = np.zeros(own.size_elems, np.int64)
    storage[own.linear_offsets()] = values.reshape(own.shape)
    view = kernel.operand_layout(position) if launch is None else kernel.launch_layout(launch, position)
    return storage[view.linear_offsets()]


def _access_offsets(
    nest: Nest, phase: Phase, access: Access, offsets: np.ndarray, data: Mapping[int, np.ndarray]
) -> list[int]:
    depth = len(phase.loops) if access.depth < 0 else access.depth
    loops = (*nest.grid, *_stretched(phase, data)[:depth])
    out = []
    for values in product(*(range(loop.extent) for loop in loops)):
        env = {loop.name: value for loop, value in zip(loops, values, strict=True)}
        if not all(_holds(bound, env, data) for bound in access.when):
            continue
        place = [_value(coordinate, env, data) for coordinate in access.index]
        for axis, most, plus in access.clamps:
            place[axis] = min(place[axis], most) + plus
        for lane in range(access.width):
            at = tuple(x + lane if a == access.axis else x for a, x in enumerate(place))
            if all(0 <= x < n for x, n in zip(at, offsets.shape, strict=True)):
                out.append(int(offsets[at]))
    return out


def _stretched(phase: Phase, data: Mapping[int, np.ndarray]) -> list[Loop]:
    """The loops of a phase, those along a table made of integers as long as it is."""
    longer = {}
    for access in (*phase.accesses, *phase.border):
        for value in (*access.index, *(bound.value for bound in access.when)):
            if isinstance(value, Data) and value.via is not None:
                names = [place.terms[0].loop for place in value.index if len(place.terms) == 1]
                longer[names[-1]] = _table(value, data).shape[-1]
    return [Loop(loop.name, longer.get(loop.name, loop.extent), loop.kind) for loop in phase.loops]


def _table(value: Data, data: Mapping[int, np.ndarray]) -> np.ndarray:
    array = np.where(data[value.operand] == value.nowhere, -1, data[value.operand])
    return array if value.via is None else value.via.table(array)


def _holds(bound: Bound, env: Mapping[str, int], data: Mapping[int, np.ndarray]) -> bool:
    """Whether a bound holds; one that hangs on integers that are not given does."""
    if isinstance(bound.value, Data):
        return bound.value.operand not in data or 0 <= _value(bound.value, env, data) < bound.below
    return _value(bound.value, env, data) < bound.below


def _value(coordinate: Index | Data, env: Mapping[str, int], data: Mapping[int, np.ndarray]) -> int:
    if isinstance(coordinate, Data):
        array = _table(coordinate, data)
        at = tuple(_value(x, env, data) for x in coordinate.index)
        return int(array[at]) if all(0 <= x < n for x, n in zip(at, array.shape, strict=True)) else -1
    total = coordinate.const
    for term in coordinate.terms:
        value = env[term.loop] // term.div
        total += term.coef * (value % term.mod if term.mod else value)
    return total
