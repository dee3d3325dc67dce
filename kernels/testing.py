"""Checking kernels on real devices: pack, poison, run, compare, time.

Used by the tests and the benchmarks. Everything a kernel must not depend on is poisoned: padding and outputs hold NaN
(integers: a wild value), and every buffer ends in a guard that must come back untouched.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from statistics import median

import numpy as np
import pyopencl as cl

from kernels.runtime import BUILD_OPTIONS, DeviceInfo, devices
from kernels.source import program_source
from kernels.spec import DeviceLimits, Kernel
from layoutopt.errors import DeviceError
from layoutopt.layout import Layout

__all__ = ["PreparedKernel", "check_kernel", "device_label", "limits_of", "opencl_devices", "time_kernel"]

_NUMPY = {"float32": np.float32, "int32": np.int32, "bool": np.uint8}
_WILD = {"float32": np.float32(np.nan), "int32": np.int32(0x7F7F7F7F), "bool": np.uint8(0xA5)}
_GUARD_ELEMS = 64


def opencl_devices() -> list[cl.Device]:
    """Every OpenCL device found, over all platforms."""
    return [info.handle for info in devices()]


def _info(device: cl.Device) -> DeviceInfo:
    return next(info for info in devices() if info.handle == device)


def device_label(device: cl.Device) -> str:
    """A short unique name for test ids and tables: device name and driver version."""
    return _info(device).short


def limits_of(device: cl.Device) -> DeviceLimits:
    """The limits by which variants are enumerated."""
    return _info(device).limits


@lru_cache(maxsize=16)
def _context(device: cl.Device) -> cl.Context:
    return cl.Context([device])


@lru_cache(maxsize=16)
def _queue(context: cl.Context) -> cl.CommandQueue:
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)


def pack(layout: Layout, array: np.ndarray, dtype: str) -> np.ndarray:
    """The storage of ``array`` in ``layout``: wild values in the padding and in the guard behind it.

    Args:
        layout: a buffer layout of the array's shape.
        array: logical values; a broadcast axis must really be constant.
        dtype: the device's dtype.
    """
    storage = np.full(layout.size_elems + _GUARD_ELEMS, _WILD[dtype], dtype=_NUMPY[dtype])
    storage[layout.linear_offsets()] = np.asarray(array).reshape(layout.shape)
    return storage


class PreparedKernel:
    """A kernel built for a device with its buffers filled: run it as often as needed.

    Args:
        device: an OpenCL device or a context (its first device is used).
        kernel: what to run.
        inputs: logical input arrays, in operand order.

    Raises:
        DeviceError: the program does not build; carries the build log and the source.
    """

    def __init__(self, device: cl.Device | cl.Context, kernel: Kernel, inputs: list[np.ndarray]) -> None:
        self.kernel = kernel
        self.context = device if isinstance(device, cl.Context) else _context(device)
        self.queue = _queue(self.context)
        spec = kernel.spec
        outputs = len(spec.shapes) - spec.inputs
        reuse = {spec.inputs + out: inp for out, inp in spec.inplace}
        self.storage: list[np.ndarray] = []
        self.buffers: list[cl.Buffer] = []
        for position in range(len(spec.shapes) + len(kernel.scratch)):
            if position in reuse:
                self.storage.append(self.storage[reuse[position]])
                self.buffers.append(self.buffers[reuse[position]])
                continue
            layout, dtype = kernel.buffer_layout(position), kernel.operand_dtype(position)
            if position < spec.inputs:
                values = pack(layout, inputs[position], dtype)
            else:
                values = np.full(layout.size_elems + _GUARD_ELEMS, _WILD[dtype], dtype=_NUMPY[dtype])
            self.storage.append(values)
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
            self.buffers.append(cl.Buffer(self.context, flags, hostbuf=values))
        self.output_positions = range(spec.inputs, spec.inputs + outputs)
        self.calls = [self._build(i) for i in range(len(kernel.launches))]

    def _build(self, position: int) -> cl.Kernel:
        launch = self.kernel.launches[position]
        source = program_source(self.kernel, launch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)
                program = cl.Program(self.context, source).build(BUILD_OPTIONS, cache_dir=False)
            call = cl.Kernel(program, launch.entry)
        except cl.Error as error:
            what = f"{self.kernel.variant.label} (launch {position}, {launch.body}) does not build"
            raise DeviceError(f"{what}: {error}", f"{error}\n{source}") from error
        call.set_args(*(self.buffers[p] for _, p in launch.operands))
        return call

    def run(self) -> float:
        """Run all launches once; seconds of device time between their start and end events."""
        seconds = 0.0
        for launch, call in zip(self.kernel.launches, self.calls, strict=True):
            event = cl.enqueue_nd_range_kernel(self.queue, call, launch.global_size, launch.local_size)
            event.wait()
            seconds += (event.profile.end - event.profile.start) * 1e-9
        return seconds

    def read(self, position: int) -> np.ndarray:
        """The storage of an operand as it now is, guard included."""
        out = np.empty_like(self.storage[position])
        cl.enqueue_copy(self.queue, out, self.buffers[position])
        return out

    def outputs(self) -> list[np.ndarray]:
        """The logical values of every output."""
        return [self.read(p)[self.kernel.buffer_layout(p).linear_offsets()] for p in self.output_positions]


def check_kernel(
    context_or_device: cl.Context | cl.Device,
    kernel: Kernel,
    inputs: list[np.ndarray],
    expected: list[np.ndarray],
    rtol: float = 1e-5,
) -> None:
    """Run a kernel over poisoned buffers and compare with a float64 reference.

    Args:
        context_or_device: where to run.
        kernel: what to run.
        inputs: logical inputs in operand order.
        expected: logical outputs in operand order; floats are compared within ``rtol`` of the larger of the element
            and the output's largest magnitude, other dtypes exactly.
        rtol: relative tolerance.

    Raises:
        AssertionError: a value is wrong, an input changed, or memory outside an operand was written.
    """
    prepared = PreparedKernel(context_or_device, kernel, inputs)
    prepared.run()
    spec, label = kernel.spec, kernel.variant.label
    in_place = {inp for _, inp in spec.inplace}
    for position in range(len(spec.shapes) + len(kernel.scratch)):
        after, before = prepared.read(position), prepared.storage[position]
        layout = kernel.buffer_layout(position)
        what = f"{label}: operand {position} {layout.describe()}"
        if position < spec.inputs and position not in in_place:
            assert _same(after, before), f"{what}: an input was written"
            continue
        outside = np.ones(after.size, dtype=bool)
        outside[layout.linear_offsets(padded=True)] = False
        assert _same(after[outside], before[outside]), f"{what}: memory outside the operand was written"
        if position in prepared.output_positions:
            got = after[layout.linear_offsets()]
            _compare(what, got, np.asarray(expected[position - spec.inputs]).reshape(layout.shape), rtol)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def _compare(what: str, got: np.ndarray, expected: np.ndarray, rtol: float) -> None:
    if got.dtype != np.float32:
        wrong = got != expected
    else:
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        bound = rtol * np.maximum(np.abs(expected), scale)
        with np.errstate(invalid="ignore"):
            close = np.abs(got.astype(np.float64) - expected) <= bound
        both = (np.isnan(got) & np.isnan(expected)) | (np.isinf(expected) & (got == expected))
        wrong = ~(close | both)
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} values differ, first at {first}: "
        f"got {got[first]!r}, expected {expected[first]!r}"
    )


def time_kernel(
    context_or_device: cl.Context | cl.Device, kernel: Kernel, inputs: list[np.ndarray], repeats: int = 7
) -> float:
    """Median device seconds of ``repeats`` runs after a warm-up."""
    prepared = PreparedKernel(context_or_device, kernel, inputs)
    prepared.run()
    return median(prepared.run() for _ in range(repeats))
