"""Timing kernels on the device by events, over real data, as cold as they are in a step.

Operands lie at changing places of large arenas, so that a kernel does not find its own data in a near cache because the
same kernel ran before. What is only read is never written: random numbers between 0.5 and 1.5, never zeros, never small
enough to be denormal. What is written is filled with such numbers again before every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.source import program_source
from kernels.spec import Kernel, OpSpec
from layoutopt.errors import DeviceError

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["Bench", "Prepared", "id_limit"]

ARENA_BYTES = 256 << 20
"""Of an arena where nothing asks for another size. Far beyond any cache, and little enough to be filled every round."""
_STREAM = 256
"""Kernels that the device gets before the host waits for them."""
_IDS = {
    "gather": (0, 0),
    "quantized_gather": (0, 0),
    "nll_loss": (0, 1),
    "cross_entropy": (0, 1),
    "cross_entropy_grad": (1, 1),
}
"""(operand, axis) whose extent bounds the ids of these kinds."""


@dataclass(frozen=True)
class Prepared:
    """A kernel with its arguments set: (driver's kernel, global size, local size) per launch.

    ``buffers``, with the images over them, are held because a driver's kernel does not keep its arguments alive.
    """

    kernel: Kernel
    calls: tuple[tuple[Any, tuple[int, ...], tuple[int, ...]], ...]
    buffers: tuple[Any, ...]


def id_limit(spec: OpSpec) -> int:
    """Ids of an integer operand lie in ``[0, id_limit)``: rows of a gather's table, classes of a loss."""
    if spec.kind in ("scatter_add", "nll_loss_grad"):
        shape, axis = spec.shapes[spec.inputs], 0 if spec.kind == "scatter_add" else 1
        return shape[axis]
    if spec.kind in _IDS:
        operand, axis = _IDS[spec.kind]
        return spec.shapes[operand][axis]
    return 2


def _random_numbers(seed: int) -> np.ndarray:
    """Float32 numbers in [0.5, 1.5); read as float16, both halves of each are numbers in [0.125, 2)."""
    numbers = np.random.default_rng(seed).uniform(0.5, 1.5, 1 << 20).astype("<f4")
    last = numbers.view("<u2")[::2]  # the mantissa's last bits
    last[:] = last & 0x0FFF | 0x3000
    return numbers


def _nanoseconds(prepared: Prepared, events: Sequence[Any]) -> int:
    """From start to end of each launch, together, when all have ended."""
    try:
        for event in events:
            event.wait()
        return sum(event.profile.end - event.profile.start for event in events)
    except RuntimeError as error:
        raise _refused(prepared, error) from error


def _refused(prepared: Prepared, error: RuntimeError) -> DeviceError:
    return DeviceError(f"kernel {prepared.kernel.variant.label} was refused at launch: {error}")


class _Arena:
    """A large buffer from which regions are taken round and round."""

    def __init__(self, runtime: Runtime, size_bytes: int, seed: int) -> None:
        self.size_bytes = size_bytes
        self.align_bytes = max(runtime.limits.base_align_bytes, 4096)
        self.buffer = runtime.allocate(size_bytes)
        self.next_bytes = 0
        self._regions: dict[tuple[int, int], Any] = {}
        runtime.repeat(self.buffer, _random_numbers(seed))

    def take(self, runtime: Runtime, size_bytes: int) -> Any:
        """A region, at the beginning again where the rest is too short."""
        if self.next_bytes + size_bytes > self.size_bytes:
            self.next_bytes = 0
        where = self.next_bytes, size_bytes
        if where not in self._regions:
            self._regions[where] = runtime.region(self.buffer, *where)
        self.next_bytes += -(-size_bytes // self.align_bytes) * self.align_bytes
        return self._regions[where]

    def close(self) -> None:
        """Let go of the regions, the last made first (see ``Executor.close``)."""
        while self._regions:
            self._regions.popitem()


class Bench:
    """Prepares and times kernels on one device.

    Args:
        runtime: the device.
        arena_bytes: size of the arenas; kernels that do not fit are refused.
        seed: of the data.
    """

    def __init__(self, runtime: Runtime, arena_bytes: int = ARENA_BYTES, seed: int = 0) -> None:
        limits = runtime.limits
        size = max(min(arena_bytes, limits.max_alloc_bytes, limits.global_mem_bytes // 8), 1 << 20)
        self.runtime = runtime
        self._read = _Arena(runtime, size, seed)
        self._write = _Arena(runtime, size, seed + 1)
        self._ids: dict[tuple[int, int, str], Any] = {}
        self._seed = seed

    def close(self) -> None:
        """Let go of the device's memory."""
        self._read.close()
        self._write.close()

    def fits(self, kernel: Kernel) -> bool:
        """Whether the kernel's operands fit the arenas side by side."""
        n = len(kernel.spec.shapes) + len(kernel.scratch)
        return sum(kernel.buffer_bytes(p) + self._read.align_bytes for p in range(n)) <= self._read.size_bytes

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels together; one that does not build says so when it is prepared."""
        sources = [(program_source(k, launch), k.variant.label) for k in kernels for launch in k.launches]
        try:
            self.runtime.prepare(sources)
        except DeviceError:
            return

    def prepare(self, kernel: Kernel) -> Prepared:
        """Build, bind and run once (a driver may compile at the first launch).

        Raises:
            DeviceError: the kernel does not fit the arenas or does not build.
        """
        if not self.fits(kernel):
            raise DeviceError(
                f"kernel {kernel.variant.label} needs more than the {self._read.size_bytes} bytes set aside for "
                "measuring: it is predicted instead"
            )
        buffers = self._bind(kernel)
        calls, held = [], list(buffers)
        for launch in kernel.launches:
            call = self.runtime.kernel(program_source(kernel, launch), launch.entry, kernel.variant.label)
            arguments = self.runtime.arguments(kernel, launch, buffers)
            call.set_args(*arguments)
            held += arguments
            calls.append((call, launch.global_size, launch.local_size))
        prepared = Prepared(kernel, tuple(calls), tuple(held))
        self.run(prepared)
        return prepared

    def run(self, prepared: Prepared) -> int:
        """Nanoseconds of all launches between their start and end events.

        Raises:
            DeviceError: the device refuses a launch.
        """
        return _nanoseconds(prepared, self._launched(prepared))

    def round(self, prepared: Mapping[str, Prepared], backwards: bool = False, refill: bool = True) -> dict[str, int]:
        """Time every kernel once, in order or backwards; nanoseconds by key.

        The device gets them one after the other without a pause, as in a step: after a pause a launch shows some
        microseconds more than it takes there, on a GPU and on a CPU, whose sleeping threads have to be woken.

        Args:
            prepared: by key.
            backwards: last first.
            refill: fill what is written with random numbers first; once for parts of a round is enough.

        Raises:
            DeviceError: the device refuses a launch.
        """
        if refill:
            self.runtime.copy(self._write.buffer, self._read.buffer)
        keys = list(prepared)[::-1] if backwards else list(prepared)
        times: dict[str, int] = {}
        for begin in range(0, len(keys), _STREAM):
            stream = keys[begin : begin + _STREAM]
            launched = [self._launched(prepared[key]) for key in stream]
            times |= {key: _nanoseconds(prepared[key], events) for key, events in zip(stream, launched, strict=True)}
        return times

    def _launched(self, prepared: Prepared) -> list[Any]:
        try:
            return [self.runtime.launch_timed(*call) for call in prepared.calls]
        except RuntimeError as error:  # pyopencl's errors derive from it
            raise _refused(prepared, error) from error

    # ---- operands -------------------------------------------------------------------------------------------------

    def _bind(self, kernel: Kernel) -> list[Any]:
        spec = kernel.spec
        output_of = {inp: out for out, inp in spec.inplace}
        alias = {spec.inputs + out: inp for out, inp in spec.inplace}
        buffers: list[Any] = []
        for position in range(len(spec.shapes) + len(kernel.scratch)):
            size_bytes = max(kernel.buffer_bytes(position), 4)
            if position in alias:
                buffers.append(buffers[alias[position]])
            elif position >= spec.inputs or position in output_of:
                buffers.append(self._write.take(self.runtime, size_bytes))
            elif spec.dtypes[position] in ("float32", "float16"):
                buffers.append(self._read.take(self.runtime, size_bytes))
            else:
                buffers.append(self._integers(spec.dtypes[position], id_limit(spec), size_bytes))
        return buffers

    def _integers(self, dtype: str, limit: int, size_bytes: int) -> Any:
        key = (limit if dtype == "int32" else 2, 1 << (size_bytes - 1).bit_length(), dtype)
        if key not in self._ids:
            rng = np.random.default_rng([self._seed, *key[:2]])
            kind, item = (np.int32, 4) if dtype == "int32" else (np.uint8, 1)
            values = rng.integers(0, max(key[0], 1), max(key[1] // item, 1)).astype(kind)
            self._ids[key] = self.runtime.allocate(max(key[1], values.nbytes))
            self.runtime.upload(self._ids[key], values)
        return self._ids[key]
