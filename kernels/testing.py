"""Checking kernels on real devices: pack, poison, run, compare, time.

Used by the tests and the benchmarks. Everything a kernel must not depend on is poisoned: padding and outputs hold NaN
(integers: a wild value), and every buffer ends in a guard that must come back untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
import pyopencl as cl

from kernels.instrument import HEAD_BYTES, IMAGE, RECORD_BYTES, WHERE, WRITE, instrumented_source
from kernels.runtime import DeviceInfo, Runtime, devices
from kernels.source import program_source
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.errors import DeviceError
from layoutopt.graph import DTYPES
from layoutopt.layout import LANES, Layout

__all__ = [
    "Accesses",
    "BoundKernel",
    "PreparedKernel",
    "RecordedKernel",
    "check_kernel",
    "check_kernels",
    "device_label",
    "limits_of",
    "opencl_devices",
    "time_kernel",
]

_NUMPY = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "bool": np.uint8}
_WILD = {
    "float32": np.float32(np.nan),
    "float16": np.float16(np.nan),
    "int32": np.int32(0x7F7F7F7F),
    "bool": np.uint8(0xA5),
}
_HALF_STEP, _HALF_LEAST = 2.0**-11, 2.0**-24
"""A float16 lies within this share of a number, or this from it, if that is larger."""
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
def _runtime(device: cl.Device) -> Runtime:
    return Runtime(_info(device), profiling=True)


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


class BoundKernel:
    """A kernel built for a device and bound to buffers: run it as often as needed.

    Args:
        runtime: where to run; its queue records event times.
        kernel: what to run.
        buffers: per operand, then per scratch buffer.

    Raises:
        DeviceError: the program does not build; carries the build log.
    """

    def __init__(self, runtime: Runtime, kernel: Kernel, buffers: Sequence[cl.Buffer]) -> None:
        self.runtime, self.kernel, self.buffers = runtime, kernel, list(buffers)
        self.queue = runtime.queue
        self._arguments: list[list[Any]] = []
        self.calls = [self._build(i) for i in range(len(kernel.launches))]

    def _build(self, position: int) -> cl.Kernel:
        launch = self.kernel.launches[position]
        call = self.runtime.kernel(program_source(self.kernel, launch), launch.entry, self.kernel.variant.label)
        arguments = self.runtime.arguments(self.kernel, launch, self.buffers)
        call.set_args(*arguments)
        self._arguments.append(arguments)
        return call

    def run(self) -> float:
        """Run all launches once; seconds of device time between their start and end events."""
        seconds = 0.0
        for launch, call in zip(self.kernel.launches, self.calls, strict=True):
            event = cl.enqueue_nd_range_kernel(self.queue, call, launch.global_size, launch.local_size)
            event.wait()
            seconds += (event.profile.end - event.profile.start) * 1e-9
        return seconds

    def burst(self, count: int) -> float:
        """Seconds of one run among ``count`` back to back: from the first start to the last end on the device.

        They are held back by an event until all are enqueued, so that the host's pace does not show.
        """
        gate = cl.UserEvent(self.runtime.context)
        events: list[cl.Event] = []
        for _ in range(count):
            for launch, call in zip(self.kernel.launches, self.calls, strict=True):
                events.append(
                    cl.enqueue_nd_range_kernel(
                        self.queue,
                        call,
                        launch.global_size,
                        launch.local_size,
                        wait_for=None if events else [gate],
                    )
                )
        self.queue.flush()
        gate.set_status(cl.command_execution_status.COMPLETE)
        self.queue.finish()
        return (events[-1].profile.end - events[0].profile.start) * 1e-9 / count


class PreparedKernel(BoundKernel):
    """A kernel built for a device with its buffers filled: run it as often as needed.

    Args:
        device: where to run.
        kernel: what to run.
        inputs: logical input arrays, in operand order.

    Raises:
        DeviceError: the program does not build; carries the build log.
    """

    def __init__(self, device: cl.Device, kernel: Kernel, inputs: Sequence[np.ndarray]) -> None:
        runtime, spec = _runtime(device), kernel.spec
        outputs = len(spec.shapes) - spec.inputs
        reuse = {spec.inputs + out: inp for out, inp in spec.inplace}
        self.storage: list[np.ndarray] = []
        buffers: list[cl.Buffer] = []
        for position in range(len(spec.shapes) + len(kernel.scratch)):
            if position in reuse:
                self.storage.append(self.storage[reuse[position]])
                buffers.append(buffers[reuse[position]])
                continue
            layout, dtype = kernel.buffer_layout(position), kernel.operand_dtype(position)
            if position < spec.inputs:
                values = pack(layout, inputs[position], dtype)
            else:
                values = np.full(layout.size_elems + _GUARD_ELEMS, _WILD[dtype], dtype=_NUMPY[dtype])
            self.storage.append(values)
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
            buffers.append(cl.Buffer(runtime.context, flags, hostbuf=values))
        self.output_positions = range(spec.inputs, spec.inputs + outputs)
        super().__init__(runtime, kernel, buffers)

    def read(self, position: int) -> np.ndarray:
        """The storage of an operand as it now is, guard included."""
        out = np.empty_like(self.storage[position])
        cl.enqueue_copy(self.queue, out, self.buffers[position])
        return out

    def outputs(self) -> list[np.ndarray]:
        """The logical values of every output."""
        return [self.read(p)[self.kernel.buffer_layout(p).linear_offsets()] for p in self.output_positions]


def check_kernel(
    device: cl.Device,
    kernel: Kernel,
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    rtol: float = 1e-5,
    sizes: Sequence[np.ndarray] | None = None,
) -> None:
    """:func:`check_kernels` of one."""
    check_kernels(device, [kernel], inputs, expected, rtol, sizes)


def check_kernels(
    device: cl.Device,
    kernels: Sequence[Kernel],
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    rtol: float = 1e-5,
    sizes: Sequence[np.ndarray] | None = None,
) -> None:
    """Build kernels of one op together, run each over poisoned buffers and compare with a float64 reference.

    Args:
        device: where to run.
        kernels: what to run.
        inputs: logical inputs in operand order.
        expected: logical outputs in operand order; floats are compared within ``rtol`` of the larger of the element,
            the output's largest magnitude and ``sizes``, other dtypes exactly.
        rtol: relative tolerance.
        sizes: what the terms that each output is the sum of amount to, in operand order. Rounding errs by a share of
            the terms, not of what is left where they cancel.

    Raises:
        AssertionError: a value is wrong, an input changed, or memory outside an operand was written.
        DeviceError: a program does not build; carries the build log.
    """
    runtime = _runtime(device)
    runtime.prepare((program_source(k, launch), k.variant.label) for k in kernels for launch in k.launches)
    try:
        for kernel in kernels:
            _check(PreparedKernel(device, kernel, inputs), expected, rtol, sizes)
    finally:
        runtime.forget()  # thousands of them would fill the memory


def _check(
    prepared: PreparedKernel, expected: Sequence[np.ndarray], rtol: float, sizes: Sequence[np.ndarray] | None
) -> None:
    prepared.run()
    kernel = prepared.kernel
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
            got, output = after[layout.linear_offsets()], position - spec.inputs
            size = 0.0 if sizes is None else np.reshape(sizes[output], layout.shape)
            _compare(what, got, np.reshape(expected[output], layout.shape), rtol, size)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def _compare(what: str, got: np.ndarray, expected: np.ndarray, rtol: float, size: np.ndarray | float = 0.0) -> None:
    if got.dtype.kind != "f":
        wrong = got != expected
    else:
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        bound = rtol * np.maximum(np.maximum(np.abs(expected), size), scale)
        if got.dtype == np.float16:
            bound = bound + np.maximum(_HALF_STEP * np.abs(expected), _HALF_LEAST)
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


def time_kernel(device: cl.Device, kernel: Kernel, inputs: Sequence[np.ndarray], repeats: int = 7) -> float:
    """Median device seconds of ``repeats`` runs after a warm-up."""
    prepared = PreparedKernel(device, kernel, inputs)
    prepared.run()
    return median(prepared.run() for _ in range(repeats))


@dataclass(frozen=True)
class Accesses:
    """What a launch read and wrote, one entry per access; those of one work item are in program order.

    Attributes:
        group: work group, in dispatch order.
        item: work item within it, the fastest dimension first.
        operand: position; of operands that share a buffer, the first.
        offset_elems: first element in the operand's storage.
        width: elements.
        write: store rather than load.
        image: through an image.
    """

    group: np.ndarray
    item: np.ndarray
    operand: np.ndarray
    offset_elems: np.ndarray
    width: np.ndarray
    write: np.ndarray
    image: np.ndarray


class RecordedKernel(PreparedKernel):
    """A kernel whose instrumented launches (see ``kernels/instrument.py``) ran once: its results and its accesses.

    Args:
        device: where to run.
        kernel: what to run.
        inputs: logical input arrays, in operand order.
        region_bits: log2 of the bytes that hold the log and all operands.

    Attributes:
        accesses: of each launch.

    Raises:
        DeviceError: a program does not build, or the region is too small.
    """

    def __init__(self, device: cl.Device, kernel: Kernel, inputs: Sequence[np.ndarray], region_bits: int = 24) -> None:
        self.bits, self.most = region_bits, (1 << region_bits) // (2 * RECORD_BYTES)
        super().__init__(device, kernel, inputs)
        self.accesses = [self._launched(i) for i in range(len(kernel.launches))]

    def _build(self, position: int) -> cl.Kernel:
        if position == 0:
            self._into_one_region()
        launch = self.kernel.launches[position]
        source = instrumented_source(self.kernel, launch, self.bits, self.most)
        call = self.runtime.kernel(source, launch.entry, self.kernel.variant.label)
        arguments: list[Any] = []
        for _, operand in launch.operands:
            buffer = self.buffers[operand]
            if operand not in launch.images:
                arguments.append(buffer)
                continue
            dtype = self.kernel.operand_dtype(operand)
            image, first = self.runtime.image(buffer, self.kernel.buffer_layout(operand).size_elems // LANES, dtype)
            arguments += [image, self._region if first else buffer, first]
        call.set_args(*arguments)
        self._arguments.append(arguments)
        return call

    def _into_one_region(self) -> None:
        """Move the operands behind a log, into memory that begins at a multiple of its size."""
        size = 1 << self.bits
        whole = cl.Buffer(self.runtime.context, cl.mem_flags.READ_WRITE, 2 * size)
        where = self.runtime.kernel(WHERE, "where", "where")
        where.set_args(whole)
        cl.enqueue_nd_range_kernel(self.queue, where, (1,), (1,))
        address = np.zeros(1, np.uint64)
        cl.enqueue_copy(self.queue, address, whole)
        self._region = whole
        self._begin = -int(address[0]) % size
        align = max(self.runtime.limits.base_align_bytes, 128)
        free = HEAD_BYTES + self.most * RECORD_BYTES
        self._places: list[int] = []
        moved: dict[int, tuple[int, cl.Buffer]] = {}
        for position, old in enumerate(self.buffers):
            if old.int_ptr not in moved:
                free = -(-free // align) * align
                if free + old.size > size:
                    raise DeviceError(f"a region of {size} bytes cannot hold the operands and a log of {self.most}")
                new = whole.get_sub_region(self._begin + free, old.size)
                cl.enqueue_copy(self.queue, new, old)
                moved[old.int_ptr] = free, new
                free += old.size
            place, self.buffers[position] = moved[old.int_ptr]
            self._places.append(place)

    def _launched(self, position: int) -> Accesses:
        launch, call = self.kernel.launches[position], self.calls[position]
        cl.enqueue_copy(self.queue, self._region, np.zeros(1, np.uint32), dst_offset=self._begin)
        cl.enqueue_nd_range_kernel(self.queue, call, launch.global_size, launch.local_size)
        count = np.zeros(1, np.uint32)
        cl.enqueue_copy(self.queue, count, self._region, src_offset=self._begin)
        if count[0] > self.most:
            raise DeviceError(f"{launch.entry} made {count[0]} accesses, and the log has room for {self.most}")
        log = np.zeros((int(count[0]), 4), np.uint32)
        if log.size:
            cl.enqueue_copy(self.queue, log, self._region, src_offset=self._begin + HEAD_BYTES)
        return self._decoded(launch, log.astype(np.int64))

    def _decoded(self, launch: Launch, log: np.ndarray) -> Accesses:
        first = {place: position for position, place in reversed(list(enumerate(self._places)))}
        places = np.array(sorted(first))
        index = np.searchsorted(places, log[:, 2], side="right") - 1
        operand = np.array([first[place] for place in places])[index]
        item_bytes = np.array([DTYPES[self.kernel.operand_dtype(p)] for p in range(len(self.buffers))])[operand]
        offset, size = log[:, 2] - places[index], log[:, 3] & (IMAGE - 1)
        write, image = log[:, 3] & WRITE != 0, log[:, 3] & IMAGE != 0
        return Accesses(log[:, 0], log[:, 1], operand, offset // item_bytes, size // item_bytes, write, image)
