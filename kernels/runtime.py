"""The OpenCL runtime: programs, buffers, queues on a device. The rest of the product never sees pyopencl.

pyopencl is imported on first use, so that planning and simulating work where no OpenCL is installed. Programs are
cached in memory by (source, options) and on disk by the driver (PoCL, NVIDIA, …), or by pyopencl where it has none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.builders import LEAST_SOURCES, Builders, worker_count
from kernels.devices import DeviceInfo
from kernels.discovery import cache_dir, devices, first_line, no_device_reason, pick
from kernels.merge import mergeable, merged, section_suffix
from kernels.spec import DeviceLimits, Kernel, Launch
from layoutopt.errors import DeviceError
from layoutopt.graph import DTYPES
from layoutopt.layout import LANES

__all__ = ["BUILD_OPTIONS", "DeviceInfo", "Runtime", "devices", "no_device_reason", "pick"]

BUILD_OPTIONS = "-cl-std=CL1.2 -cl-mad-enable"
"""Multiply-adds may fuse; NaN, infinities and division keep their IEEE meaning (no fast-math)."""

_SECTIONS = 64
"""Sources in one program of ``prepare``: few enough that a change of one does not build everything again."""

_NVIDIA = "nvidia"
"""Maker of drivers that compile one program at a time in a process, and whose launches look through a buffer's regions
(seen on 580.159)."""

DUMP_ENV = "LAYOUTOPT_DUMP"
_LOG = logging.getLogger("layoutopt.kernels")


class Runtime:
    """A device ready to run: one context, one in-order queue, a cache of programs.

    Args:
        device: what ``pick`` returned; ``pick()`` by default.
        profiling: make the main queue record event times (``profiling_queue`` is there in any case).
        dump: directory to write every specialised source to; the environment's LAYOUTOPT_DUMP by default.

    Raises:
        DeviceError: the driver refuses a context.
    """

    def __init__(
        self, device: DeviceInfo | None = None, *, profiling: bool = False, dump: str | os.PathLike[str] | None = None
    ) -> None:
        self.info = device if device is not None else pick()
        import pyopencl as cl

        self._cl = cl
        try:
            self.context = cl.Context([self.info.handle])
            self.queue = self._queue(profiling)
        except cl.Error as error:
            raise DeviceError(f"device {self.info.label} refuses a context: {first_line(error)}") from error
        self._profiling: Any = self.queue if profiling else None
        directory = dump if dump is not None else os.environ.get(DUMP_ENV)
        self.dump = Path(directory) if directory else None
        self._programs: dict[str, tuple[Any, str]] = {}
        self.allocated_bytes = 0
        """Of all device buffers that were made here; what is given back is not taken off."""
        workers = worker_count(self.limits) if _NVIDIA in self.info.vendor.casefold() else 0
        self._builders = Builders(self.info.index, workers) if workers > 1 else None

    def _queue(self, profiling: bool) -> Any:
        flag = self._cl.command_queue_properties.PROFILING_ENABLE
        return self._cl.CommandQueue(self.context, properties=flag if profiling else 0)

    @property
    def limits(self) -> DeviceLimits:
        """The device's limits."""
        return self.info.limits

    @property
    def launches_by_place(self) -> bool:
        """Whether every launch gets the arena and a table of places in it, none a region per operand.

        It saves the host time where launches slow down with the number of a buffer's regions (``kernels/regions.py``).
        """
        return _NVIDIA in self.info.vendor.casefold()

    @property
    def profiling_queue(self) -> Any:
        """A queue whose events carry times."""
        if self._profiling is None:
            self._profiling = self._queue(True)
        return self._profiling

    # ---- programs ---------------------------------------------------------------------------------------------------

    def prepare(self, sources: Iterable[tuple[str, str]]) -> None:
        """Build many programs at once: several times faster than one by one where the compiler starts slowly.

        Args:
            sources: (complete OpenCL C, label) as ``kernel`` will ask for them.

        Raises:
            DeviceError: one does not build; the label says which.
        """
        new = {key: pair for pair in sources if (key := _key(pair[0])) not in self._programs}
        if not new:
            return
        begin_s, count = time.perf_counter(), len(new)
        for key, (source, label) in new.items():
            self._dump_source(label, key, source)
        if self._builders is not None and len(new) >= LEAST_SOURCES:
            self._load({key: source for key, (source, _) in new.items()}, self._builders)
            new = {key: pair for key, pair in new.items() if key not in self._programs}
        sections = sorted(key for key, (source, _) in new.items() if mergeable(source))
        for begin in range(0, len(sections), _SECTIONS):
            chunk = sections[begin : begin + _SECTIONS]
            try:
                program = self._compile(merged([new[key][0] for key in chunk]), quiet=True)
            except self._cl.Error:
                _LOG.debug("%d programs do not build together: one by one", len(chunk))
                continue  # and the one that is wrong is named
            self._programs |= {key: (program, section_suffix(i)) for i, key in enumerate(chunk)}
        for source, label in new.values():
            self._build(source, label)
        _LOG.info("%d programs built for %s in %.1f s", count, self.info.short, time.perf_counter() - begin_s)

    def binary(self, source: str) -> bytes:
        """The driver's binary of a program, to be loaded by another process on this device.

        Raises:
            DeviceError: it does not build, or the driver keeps its binaries to itself.
        """
        program, _ = self._build(source, "program")
        binaries = program.get_info(self._cl.program_info.BINARIES)
        if not binaries or not binaries[0]:
            raise DeviceError(f"device {self.info.label} gives out no binaries of its programs")
        return bytes(binaries[0])

    def _load(self, sources: Mapping[str, str], builders: Builders) -> None:
        """Have programs compiled by worker processes; those that were not are built here later."""
        for key, binary in zip(sources, builders.build(list(sources.values())), strict=True):
            if binary is None:
                continue
            try:
                program = self._cl.Program(self.context, [self.info.handle], [binary]).build(BUILD_OPTIONS)
            except self._cl.Error:
                continue
            self._programs[key] = program, ""

    def kernel(self, source: str, entry: str, label: str) -> Any:
        """A new kernel object, so that its arguments can be set once and for all. Equal sources are built once.

        Args:
            source: complete OpenCL C.
            entry: the kernel function.
            label: the kernel variant, for errors and the dump's file name.

        Raises:
            DeviceError: the program does not build (carries the compiler's log) or has no such entry.
        """
        program, suffix = self._build(source, label)
        try:
            return self._cl.Kernel(program, entry + suffix)
        except self._cl.Error as error:
            if suffix:  # a name that ``merged`` could not see
                self._build(source, label, alone=True)
                return self.kernel(source, entry, label)
            raise DeviceError(f"kernel {label} has no entry {entry!r}: {first_line(error)}") from error

    def forget(self) -> None:
        """Drop the programs built so far; kernels made of them stay as they are."""
        self._programs.clear()

    def _build(self, source: str, label: str, alone: bool = False) -> tuple[Any, str]:
        key = _key(source)
        if alone or key not in self._programs:
            self._dump_source(label, key, source)
            try:
                self._programs[key] = self._compile(source), ""
            except self._cl.Error as error:
                raise DeviceError(
                    f"kernel {label} does not build on {self.info.label}: {_complaint(error)} "
                    f"(set {DUMP_ENV}=DIR to keep its source)",
                    str(error),
                ) from error
        return self._programs[key]

    def _compile(self, source: str, quiet: bool = False) -> Any:
        options = BUILD_OPTIONS + " -w" * quiet
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._cl.CompilerWarning)
            return self._cl.Program(self.context, source).build(options, cache_dir=str(cache_dir()))

    def _dump_source(self, label: str, key: str, source: str) -> None:
        if self.dump is None:
            return
        try:
            self.dump.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9=,.-]+", "_", label)[:120].strip("_")
            (self.dump / f"{name}-{key[:12]}.cl").write_text(source)
        except OSError as error:
            raise DeviceError(f"cannot dump kernel sources to {self.dump}: {error.strerror}") from error

    # ---- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> Any:
        """A buffer of uninitialised device memory.

        Raises:
            DeviceError: the device has not that much.
        """
        try:
            buffer = self._cl.Buffer(self.context, self._cl.mem_flags.READ_WRITE, max(size_bytes, 1))
            self.allocated_bytes += buffer.size
            return buffer
        except (self._cl.Error, MemoryError) as error:
            raise DeviceError(
                f"device {self.info.label} refuses a buffer of {size_bytes} bytes "
                f"(largest single buffer {self.limits.max_alloc_bytes}): {first_line(error)}"
            ) from error

    def constant(self, values: np.ndarray) -> Any:
        """A small read-only buffer holding ``values``."""
        flags = self._cl.mem_flags.READ_ONLY | self._cl.mem_flags.COPY_HOST_PTR
        buffer = self._cl.Buffer(self.context, flags, hostbuf=np.ascontiguousarray(values))
        self.allocated_bytes += buffer.size
        return buffer

    def region(self, buffer: Any, offset_bytes: int, size_bytes: int) -> Any:
        """A sub-buffer; the offset is a multiple of the device's base alignment."""
        return buffer.get_sub_region(offset_bytes, max(size_bytes, 1))

    def fill(self, buffer: Any, byte: int) -> None:
        """Set every byte of a buffer."""
        self._cl.enqueue_fill_buffer(self.queue, buffer, np.uint8(byte), 0, buffer.size)

    def repeat(self, buffer: Any, pattern: np.ndarray) -> None:
        """Fill a buffer with a pattern over and over; the device copies what it has been given once.

        Args:
            buffer: of any size; the last repetition may be cut off.
            pattern: contiguous bytes.
        """
        done = min(pattern.nbytes, buffer.size)
        self.upload(buffer, pattern.view(np.uint8).reshape(-1)[:done])
        while done < buffer.size:
            count = min(done, buffer.size - done)
            self._cl.enqueue_copy(self.queue, buffer, buffer, src_offset=0, dst_offset=done, byte_count=count)
            done += count

    def copy(self, target: Any, source: Any) -> None:
        """Copy a buffer to another of at least its size."""
        self._cl.enqueue_copy(self.queue, target, source, byte_count=source.size)

    def upload(self, buffer: Any, storage: np.ndarray, *, wait: bool = True, offset_bytes: int = 0) -> Any:
        """Copy a contiguous array to a buffer.

        Args:
            buffer: at least as large.
            storage: what to copy; with ``wait`` false it must not change until the returned event has completed.
            wait: return only when the copy is made.
            offset_bytes: where in the buffer it goes.
        """
        return self._cl.enqueue_copy(self.queue, buffer, storage, is_blocking=wait, dst_offset=offset_bytes)

    def pinned(self, size_bytes: int) -> np.ndarray:
        """[size_bytes] of host memory from which the device copies at its best speed, without the driver's own copy.

        Raises:
            DeviceError: the driver has none.
        """
        flags, access = self._cl.mem_flags, self._cl.map_flags
        try:
            buffer = self._cl.Buffer(self.context, flags.READ_WRITE | flags.ALLOC_HOST_PTR, max(size_bytes, 1))
            array, _ = self._cl.enqueue_map_buffer(
                self.queue, buffer, access.WRITE, 0, (max(size_bytes, 1),), np.uint8, is_blocking=True
            )
        except self._cl.Error as error:
            raise DeviceError(f"device {self.info.label} has no {size_bytes} bytes of pinned memory") from error
        return array[:size_bytes]

    def download(self, buffer: Any, storage: np.ndarray, offset_bytes: int = 0) -> np.ndarray:
        """Copy a buffer, from an offset on, into a contiguous array, after everything enqueued before."""
        self._cl.enqueue_copy(self.queue, storage, buffer, is_blocking=True, src_offset=offset_bytes)
        return storage

    def arguments(self, kernel: Kernel, launch: Launch, buffers: Sequence[Any]) -> list[Any]:
        """What a launch's kernel is called with; to be kept as long as it is (a driver's kernel does not).

        Args:
            kernel: for its operands' layouts.
            launch: one of its launches.
            buffers: per operand, then per scratch buffer.

        Raises:
            DeviceError: an operand is read through an image, and the device has none of its size.
        """
        out: list[Any] = []
        for _, position in launch.operands:
            buffer = buffers[position]
            if position in launch.images:
                texels = kernel.buffer_layout(position).size_elems // LANES
                out += self.image(buffer, texels, kernel.operand_dtype(position))
            else:
                out.append(buffer)
        return out

    def image(self, buffer: Any, texels: int, dtype: str = "float32") -> tuple[Any, np.int32]:
        """An image of four values a texel over a buffer's memory, and the element of it at which the buffer begins.

        Over a region of a buffer where the driver can do that; PoCL cannot, and gets one over the whole buffer.

        Args:
            buffer: or a region of one.
            texels: of the image.
            dtype: of the values, float32 or float16; kernels read float32.

        Raises:
            DeviceError: the device refuses.
        """
        item_bytes = DTYPES[dtype]
        try:
            return self._image(buffer, texels, item_bytes), np.int32(0)
        except self._cl.Error as error:
            whole = buffer.get_info(self._cl.mem_info.ASSOCIATED_MEMOBJECT)
            if whole is None:
                raise self._no_image(texels, error) from error
            begin = buffer.offset
        texels = whole.size // (item_bytes * LANES)
        try:
            return self._image(whole, texels, item_bytes), np.int32(begin // item_bytes)
        except self._cl.Error as error:
            raise self._no_image(texels, error) from error

    def _image(self, buffer: Any, texels: int, item_bytes: int) -> Any:
        cl = self._cl
        channel = cl.channel_type.HALF_FLOAT if item_bytes == 2 else cl.channel_type.FLOAT
        texel = cl.ImageFormat(cl.channel_order.RGBA, channel)
        return cl.create_image(self.context, cl.mem_flags.READ_ONLY, texel, shape=(texels,), buffer=buffer)

    def _no_image(self, texels: int, error: Exception) -> DeviceError:
        return DeviceError(
            f"device {self.info.label} refuses an image of {texels} texels over a buffer (at most "
            f"{self.info.image_max_buffer_texels}): {first_line(error)}; plan for this device"
        )

    # ---- launches ---------------------------------------------------------------------------------------------------

    def enqueue(self, calls: Iterable[tuple[Any, tuple[int, ...], tuple[int, ...]]]) -> None:
        """Launch kernels one after the other on the main queue, without waiting.

        Args:
            calls: (kernel with its arguments set, global size, local size).
        """
        launch, queue = self._cl.enqueue_nd_range_kernel, self.queue
        kernel = None
        try:
            for kernel, global_size, local_size in calls:
                launch(queue, kernel, global_size, local_size)
        except self._cl.Error as error:
            name = kernel.function_name if kernel is not None else "?"
            raise DeviceError(f"device {self.info.label} refuses to launch {name}: {first_line(error)}") from error

    def launch_timed(self, kernel: Any, global_size: tuple[int, ...], local_size: tuple[int, ...]) -> Any:
        """Launch on the profiling queue; the event's ``profile.start`` and ``profile.end`` are nanoseconds."""
        return self._cl.enqueue_nd_range_kernel(self.profiling_queue, kernel, global_size, local_size)

    def flush(self) -> None:
        """Make the driver start on what is enqueued."""
        self.queue.flush()

    def finish(self) -> None:
        """Wait for everything enqueued."""
        self.queue.finish()


def _key(source: str) -> str:
    """What a program is cached under; device, driver and options are the runtime's own."""
    return hashlib.sha256(source.encode()).hexdigest()


def _complaint(error: Exception) -> str:
    """The first line of a compiler's log that is an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower() and "clBuildProgram" not in line), lines[0])
