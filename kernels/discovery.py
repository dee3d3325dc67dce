"""Which OpenCL devices there are, what each can do, and where compiled programs may be kept.

pyopencl is imported on first use, so that planning and simulating work where no OpenCL is installed.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from kernels.devices import DeviceInfo, choose
from kernels.pocl import name_generic_cpu
from kernels.spec import DeviceLimits
from layoutopt.errors import DeviceError

__all__ = ["cache_dir", "devices", "first_line", "no_device_reason", "pick"]

_TEXTURE_CACHE_VENDORS = frozenset(("qualcomm", "arm"))
"""Makers of GPUs in which images pass a cache that buffers do not. Elsewhere both take one way, or nobody has shown
that images are faster: kernels that read through them would be more to plan and to measure."""

DEVICE_ENV = "LAYOUTOPT_DEVICE"


@lru_cache(maxsize=1)
def _discover() -> tuple[tuple[DeviceInfo, ...], str]:
    try:
        _prepare_environment()
        import pyopencl as cl
    except ImportError as error:
        return (), f"pyopencl cannot be imported ({error}); install it with `pip install pyopencl`"
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return (), (
            f"the OpenCL loader found no driver ({first_line(error)}); install the one of your GPU, "
            "or a CPU driver with `pip install pocl-binary-distribution`"
        )
    found: list[DeviceInfo] = []
    problems: list[str] = []
    for platform in platforms:
        try:
            handles = platform.get_devices()
        except cl.Error as error:
            problems.append(f"{platform.name}: {first_line(error)}")
            continue
        if not handles:
            problems.append(f"{platform.name} {platform.version} lists no device")
        found += [_describe(cl, platform, handle, len(found) + i) for i, handle in enumerate(handles)]
    reason = "" if found else "; ".join(problems) or "the OpenCL loader lists no platform"
    return tuple(found), reason


def devices() -> list[DeviceInfo]:
    """Every OpenCL device of every driver; empty where there is none (``no_device_reason`` says why)."""
    return list(_discover()[0])


def no_device_reason() -> str:
    """Why ``devices()`` is empty, with the way out; empty where it is not."""
    return _discover()[1]


def pick(selector: str | None = None) -> DeviceInfo:
    """One device.

    Args:
        selector: an index, or a part of "platform version | device name" in any case. By default the environment's
            LAYOUTOPT_DEVICE, else the first GPU, else the newest PoCL, else the first device.

    Raises:
        DeviceError: there is no device, none matches, or several do.
    """
    found = devices()
    if not found:
        raise DeviceError(f"no OpenCL device: {no_device_reason()}")
    return choose(found, selector if selector is not None else os.environ.get(DEVICE_ENV, ""))


def _describe(cl: Any, platform: Any, device: Any, index: int) -> DeviceInfo:
    cpu = bool(device.type & cl.device_type.CPU)
    flags = device.single_fp_config
    bits = cl.device_fp_config
    named = name_generic_cpu(device.int_ptr, platform.version)
    images = bool(device.image_support)
    image_texels = _optional(device, "image_max_buffer_size") if images else 0
    return DeviceInfo(
        index=index,
        platform=platform.name.strip(),
        platform_version=" ".join(platform.version.split()),
        vendor=platform.vendor.strip(),
        name=device.name.strip(),
        version=device.version.strip(),
        driver=device.driver_version.strip(),
        clc_version=device.opencl_c_version.strip(),
        limits=DeviceLimits(
            kind="cpu" if cpu else "gpu",
            compute_units=device.max_compute_units,
            max_work_group_size=device.max_work_group_size,
            local_mem_bytes=device.local_mem_size,
            global_mem_bytes=device.global_mem_size,
            max_alloc_bytes=device.max_mem_alloc_size,
            base_align_bytes=max(device.mem_base_addr_align // 8, 1),
            simd_width=max(device.native_vector_width_float, 1) if cpu else 32,
            image_support=images,
            image_max_width=device.image2d_max_width if images else 0,
            image_max_height=device.image2d_max_height if images else 0,
            image_max_buffer_texels=image_texels if _has_texture_cache(platform, device) else 0,
        ),
        denormals=bool(flags & bits.DENORM),
        inf_nan=bool(flags & bits.INF_NAN),
        fma=bool(flags & bits.FMA),
        image_max_array=_optional(device, "image_max_array_size"),
        image_max_buffer_texels=image_texels,
        timer_resolution_ns=device.profiling_timer_resolution,
        note=f"PoCL's LLVM does not know this processor; it compiles for {named}" if named else "",
        handle=device,
    )


def _has_texture_cache(platform: Any, device: Any) -> bool:
    words = f"{platform.vendor} {device.vendor}".casefold().replace("(", " ").split()
    return not _TEXTURE_CACHE_VENDORS.isdisjoint(words)


def _optional(device: Any, key: str) -> int:
    """A limit that drivers before OpenCL 1.2 do not report."""
    try:
        return int(getattr(device, key))
    except (AttributeError, RuntimeError):  # pyopencl's errors derive from RuntimeError
        return 0


def first_line(error: Exception) -> str:
    """What an error says, on one line; its name where it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# ---- caches on disk -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def cache_dir() -> Path:
    """Where compiled programs may be kept: the user's cache, or the temporary directory where that is not writable."""
    preferred = user_cache_path("layoutopt") / "opencl"
    fallback = Path(tempfile.gettempdir()) / f"layoutopt-opencl-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    for path in (preferred, fallback):
        if _writable(path):
            return path
    return Path(tempfile.mkdtemp(prefix="layoutopt-opencl-"))


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _prepare_environment() -> None:
    """Where the user's cache cannot be written, pyopencl's import fails and PoCL lists no device: keep both away.

    Called before pyopencl is first imported; what the user set is left alone.
    """
    if not _writable(user_cache_path("layoutopt")):
        os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
        os.environ.setdefault("POCL_CACHE_DIR", str(cache_dir()))
