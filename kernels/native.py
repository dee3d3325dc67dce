"""Enqueueing a list of kernels by calling the driver's loader directly.

pyopencl hands out an event for every launch, which the driver has to make and to free again. A training step waits for
none of them. The loader that pyopencl is linked to is asked for the same function, without an event; where it cannot be
found (a platform whose dynamic linker does not look through a library's dependencies), pyopencl does the job.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["launcher", "recorded"]

Arguments = tuple[Any, ...]


def launcher(extension: str) -> Callable[..., int] | None:
    """``clEnqueueNDRangeKernel`` of the loader that an extension module is linked to, or None.

    Args:
        extension: path of the module's shared library.
    """
    try:
        function = ctypes.CDLL(extension).clEnqueueNDRangeKernel
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    return function


def recorded(queue: int, calls: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[Arguments]:
    """The arguments of each enqueue, made once.

    Args:
        queue: its handle.
        calls: (handle of a kernel with its arguments set, global size, local size).
    """
    target, none, no_events = ctypes.c_void_p(queue), ctypes.c_void_p(None), ctypes.c_uint(0)
    out = []
    for kernel, global_size, local_size in calls:
        sizes = [(ctypes.c_size_t * len(size))(*size) for size in (global_size, local_size)]
        rank = ctypes.c_uint(len(global_size))
        out.append((target, ctypes.c_void_p(kernel), rank, none, *sizes, no_events, none, none))
    return out
