"""What the kernel tests share: layouts to try, and a check of every variant against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from kernels.reference import evaluate
from kernels.spec import DeviceLimits, OpSpec, frozen_attrs
from kernels.testing import check_kernel, device_label, limits_of, opencl_devices
from kernels.variants import family_of
from layoutopt.layout import Layout, Mode

DEVICES = opencl_devices()
each_device = pytest.mark.parametrize("device", DEVICES, ids=[device_label(d) for d in DEVICES])
GPU_LIMITS = DeviceLimits(kind="gpu", simd_width=32)


def padded_rows(shape: tuple[int, int]) -> Layout:
    """Row-major with a row pitch that is larger than the row."""
    pitch = shape[1] + 3
    return Layout.build(shape, [Mode(0, shape[0], pitch), Mode(1, shape[1], 1)], (shape[0] * pitch + 5,), (2,))


def head_view(rows: int, cols: int) -> Layout:
    """[rows, cols] seen in a larger row-major matrix, as one head of several is."""
    view = Layout.row_major((rows, 3 * cols)).slice(1, cols, 2 * cols)
    assert view is not None
    return view


def matrix_layouts(shape: tuple[int, int]) -> list[Layout]:
    """Row-major, transposed, R-Tiles, padded and viewed."""
    return [
        Layout.row_major(shape),
        Layout.row_major(shape, (1, 0)),
        Layout.r_tile(shape, 4, 4),
        Layout.r_tile(shape, 8, 16, inner="col", outer="col"),
        Layout.r_tile(shape, 2, 16),
        padded_rows(shape),
        head_view(*shape),
    ]


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


def check_all(
    device: cl.Device,
    spec: OpSpec,
    layouts: Sequence[Layout],
    inputs: Sequence[np.ndarray],
    only: Iterable[str] | None = None,
    gpu: bool = True,
    rtol: float = 1e-5,
) -> list[str]:
    """Check every variant that accepts the layouts, those for GPUs too; at least one must.

    Args:
        device: where to run.
        spec: the op.
        layouts: one per operand.
        inputs: logical values.
        only: variant names to restrict to.
        gpu: also try what is enumerated for GPUs.
        rtol: see ``check_kernel``.

    Returns:
        The labels that ran.
    """
    exact = [x.astype(np.float32).astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    family = family_of(spec.kind)
    ran = []
    for limits in [limits_of(device), *([GPU_LIMITS] if gpu else [])]:
        accepted = 0
        for variant in family.variants(spec, limits):
            kernel = family.build(variant, spec, tuple(layouts))
            if kernel is None:
                continue
            accepted += 1
            if only is None or variant.name in only:
                check_kernel(device, kernel, list(inputs), expected, rtol)
                ran.append(variant.label)
        assert accepted, f"no variant of {spec.kind} accepts {[x.describe() for x in layouts]} on a {limits.kind}"
    return ran
