"""Devices as values: what a driver reports about one, and which one a person means."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kernels.spec import DeviceLimits
from layoutopt.errors import DeviceError

__all__ = ["DeviceInfo", "choose"]


@dataclass(frozen=True)
class DeviceInfo:
    """An OpenCL device as the driver reports it.

    Attributes:
        index: position in ``devices()``.
        platform: platform name.
        platform_version: platform version (for PoCL it names the release and its LLVM).
        vendor: platform vendor.
        name: device name.
        version: device's OpenCL version.
        driver: driver version.
        clc_version: version of OpenCL C.
        limits: what kernels and plans have to fit.
        denormals: float32 keeps denormals.
        inf_nan: float32 knows infinities and NaN.
        fma: fused multiply-add is fast enough that the driver declares it.
        image_max_array: layers of an image array.
        image_max_buffer_texels: length of an image over a buffer, whether or not ``limits`` want kernels to use it.
        timer_resolution_ns: of profiling events.
        note: what was done so that this driver works at all; empty as a rule.
        handle: the driver's object.
    """

    index: int
    platform: str
    platform_version: str
    vendor: str
    name: str
    version: str
    driver: str
    clc_version: str
    limits: DeviceLimits
    denormals: bool
    inf_nan: bool
    fma: bool
    image_max_array: int
    image_max_buffer_texels: int
    timer_resolution_ns: int
    note: str = ""
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """What ``pick`` matches a selector against: ``platform version | device name``."""
        return f"{self.platform} {self.platform_version} | {self.name}"

    @property
    def short(self) -> str:
        """Short name for tables and test ids: device name and driver version."""
        return f"{self.name}/{self.driver}"

    @property
    def model_hash_fields(self) -> dict[str, str | int]:
        """What measured times depend on: a device model made under other values does not apply."""
        return {
            "platform": self.platform,
            "platform_version": self.platform_version,
            "name": self.name,
            "driver": self.driver,
            "kind": self.limits.kind,
            "compute_units": self.limits.compute_units,
        }


def choose(found: list[DeviceInfo], selector: str = "") -> DeviceInfo:
    """One of several devices.

    Args:
        found: at least one.
        selector: an index, or a part of a label in any case; "" is the first GPU, else the newest PoCL, else the first.

    Raises:
        DeviceError: none matches, or several do.
    """
    if not selector:
        return _default(found)
    listed = "; ".join(f"{d.index}: {d.label}" for d in found)
    if selector.isdecimal():
        if int(selector) >= len(found):
            raise DeviceError(f"there is no OpenCL device {selector}; choose one of {listed}")
        return found[int(selector)]
    matches = [d for d in found if selector.casefold() in d.label.casefold()]
    exact = [d for d in matches if selector.casefold() in (d.label.casefold(), d.name.casefold())]
    matches = exact if len(exact) == 1 else matches
    if not matches:
        raise DeviceError(f"no OpenCL device matches {selector!r}; choose one of {listed}")
    if len(matches) > 1:
        several = "; ".join(f"{d.index}: {d.label}" for d in matches)
        raise DeviceError(f"device {selector!r} is ambiguous: it matches {several}; give more of the name or the index")
    return matches[0]


def _default(found: list[DeviceInfo]) -> DeviceInfo:
    gpus = [d for d in found if d.limits.kind == "gpu"]
    return gpus[0] if gpus else max(found, key=lambda d: (_pocl_release(d.platform_version), -d.index))


def _pocl_release(platform_version: str) -> tuple[int, int, int]:
    """(major, minor, final) of a PoCL, zeros of anything else; a release candidate comes before its release."""
    match = re.search(r"pocl (\d+)\.(\d+)(-rc|-pre)?", platform_version, re.IGNORECASE)
    return (int(match[1]), int(match[2]), 0 if match[3] else 1) if match else (0, 0, 0)
