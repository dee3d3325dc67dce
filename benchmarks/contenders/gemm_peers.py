"""Matrix products of others, for ``benchmarks/gemm.py``: cuBLAS and MKL through torch, numpy, CLBlast."""

from __future__ import annotations

import ctypes
import ctypes.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kernels.runtime import Runtime

__all__ = ["BURST", "Operands", "Peer", "peers_of"]

BURST = 10
"""Calls back to back."""


@dataclass(frozen=True)
class Operands:
    """Where a and b lie, row-major: the beginning of ``data``, also in ``buffers`` on the OpenCL device.

    Attributes:
        data: random numbers.
        shape: batch, m, k, n.
        turned: which of a and b are stored with their last two axes swapped.
        runtime: the device.
        buffers: of a and b.
    """

    data: np.ndarray
    shape: tuple[int, int, int, int]
    turned: str
    runtime: Runtime
    buffers: list[Any]

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """The two arrays as they are stored."""
        b, m, k, n = self.shape
        shapes = {"a": (b, m, k), "b": (b, k, n)}
        out = []
        for name, (batch, rows, cols) in shapes.items():
            shape = (batch, cols, rows) if name in self.turned else (batch, rows, cols)
            out.append(self.data[: batch * rows * cols].reshape(shape))
        return out[0], out[1]


class Peer(Protocol):
    """Something that multiplies."""

    name: str

    def call(self) -> None:
        """Once, unmeasured."""
        ...

    def run(self) -> float:
        """Seconds of one call."""
        ...

    def burst(self, count: int) -> float:
        """Seconds of one call among ``count``."""
        ...


class HostPeer:
    """Timed by the host's clock; ``wait`` returns when all calls are done."""

    def __init__(self, name: str, call: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> None:
        self.name, self._call, self._wait = name, call, wait

    def call(self) -> None:
        """Once."""
        self._call()
        self._wait()

    def run(self) -> float:
        """By itself."""
        return self.burst(1)

    def burst(self, count: int) -> float:
        """One after the other."""
        begin = time.perf_counter()
        for _ in range(count):
            self._call()
        self._wait()
        return (time.perf_counter() - begin) / count


class CudaPeer:
    """cuBLAS through torch: CUDA events around the replay of a CUDA graph of ``BURST`` calls, and around one call."""

    def __init__(self, left: Any, right: Any) -> None:
        import torch

        self.name, self._torch = "cuBLAS", torch
        torch.backends.cuda.matmul.allow_tf32 = False
        self._left, self._right = left.cuda(), right.cuda()
        self._out = torch.matmul(self._left, self._right)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._multiply()  # cuBLAS makes its workspace
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(BURST):
                self._multiply()
        torch.cuda.synchronize()

    def _multiply(self) -> None:
        self._torch.matmul(self._left, self._right, out=self._out)

    def _timed(self, action: Callable[[], None]) -> float:
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def call(self) -> None:
        """Once."""
        self._multiply()
        self._torch.cuda.synchronize()

    def run(self) -> float:
        """By itself; what the host takes to launch it is in it."""
        return self._timed(self._multiply)

    def burst(self, count: int) -> float:
        """One replay, whatever ``count``."""
        return self._timed(self._graph.replay) / BURST


class ClblastPeer:
    """CLBlast's SGEMM on the same OpenCL queue, row-major."""

    def __init__(self, library: ctypes.CDLL, operands: Operands) -> None:
        self.name, self._library, self._operands = "CLBlast", library, operands
        b, m, _, n = operands.shape
        self._out = operands.runtime.allocate(b * m * n * 4)
        self._queue = ctypes.c_void_p(operands.runtime.queue.int_ptr)

    def _enqueue(self) -> None:
        size, real, pointer = ctypes.c_size_t, ctypes.c_float, ctypes.c_void_p
        o = self._operands
        b, m, k, n = o.shape
        row_major, no, yes = 101, 111, 112
        a_turned, b_turned = "a" in o.turned, "b" in o.turned
        a, bb, c = (pointer(x.int_ptr) for x in (*o.buffers, self._out))
        turned = yes if a_turned else no, yes if b_turned else no
        common = (row_major, *turned, size(m), size(n), size(k), real(1.0))
        lda, ldb = size(m if a_turned else k), size(k if b_turned else n)
        if b == 1:
            code = self._library.CLBlastSgemm(
                *common, a, size(0), lda, bb, size(0), ldb, real(0.0), c, size(0), size(n),
                ctypes.byref(self._queue), None,
            )  # fmt: skip
        else:
            code = self._library.CLBlastSgemmStridedBatched(
                *common, a, size(0), lda, size(m * k), bb, size(0), ldb, size(k * n), real(0.0), c, size(0), size(n),
                size(m * n), size(b), ctypes.byref(self._queue), None,
            )  # fmt: skip
        if code:
            raise RuntimeError(f"CLBlast refuses {o.shape}: code {code}")

    def call(self) -> None:
        """Once, and see that it is right."""
        self._enqueue()
        o = self._operands
        b, m, _, n = o.shape
        got = o.runtime.download(self._out, np.empty((b, m, n), np.float32))
        left, right = o.stored()
        x = (left.swapaxes(1, 2) if "a" in o.turned else left)[-1, m // 2].astype(np.float64)
        y = (right.swapaxes(1, 2) if "b" in o.turned else right)[-1, :, n // 2].astype(np.float64)
        if not abs(float(got[-1, m // 2, n // 2]) - float(x @ y)) <= 1e-4 * float(np.abs(x) @ np.abs(y)):
            raise RuntimeError(f"CLBlast's product of {o.shape} is wrong")

    def run(self) -> float:
        """By itself."""
        return self.burst(1)

    def burst(self, count: int) -> float:
        """One after the other, by the host's clock."""
        self._operands.runtime.finish()
        begin = time.perf_counter()
        for _ in range(count):
            self._enqueue()
        self._operands.runtime.finish()
        return (time.perf_counter() - begin) / count


def peers_of(operands: Operands, gpu: bool, clblast: str) -> Iterator[Peer]:
    """Those that are here; at least one.

    Args:
        operands: to multiply.
        gpu: whether the OpenCL device is one.
        clblast: name or path of CLBlast's library; it is left out where there is none.
    """
    stored = operands.stored()
    seen = [x.swapaxes(1, 2) if name in operands.turned else x for name, x in zip("ab", stored, strict=True)]
    try:
        import torch
    except ImportError:
        yield HostPeer("numpy", lambda: np.matmul(*seen))
    else:
        left, right = (torch.from_numpy(x) for x in stored)
        left, right = (t.mT if name in operands.turned else t for name, t in (("a", left), ("b", right)))
        if gpu and torch.cuda.is_available():
            yield CudaPeer(left, right)
        else:
            out = torch.empty(left.shape[0], left.shape[1], right.shape[2])
            yield HostPeer("torch", lambda: torch.matmul(left, right, out=out))
    library = _library(clblast)
    if library is not None:
        yield ClblastPeer(library, operands)


def _library(name: str) -> ctypes.CDLL | None:
    path = name if "/" in name else ctypes.util.find_library(name)
    return ctypes.CDLL(path) if path else None
