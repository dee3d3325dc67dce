"""Checks of a device by what it reports: limits and what they prevent, clocks, calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from layoutopt.doctor.finding import Finding, ok, problem, warning
from layoutopt.errors import LayoutOptError

if TYPE_CHECKING:
    from kernels.devices import DeviceInfo
    from kernels.spec import DeviceLimits

__all__ = ["check_buffers", "check_calibration", "check_clock", "check_note", "check_variants", "info_of"]

_COARSE_NS = 10_000
"""A tick of a clock beyond which most kernels of a small model take less than one."""
_MIB = 1 << 20
_SMALL_BUFFER_BYTES = 256 * _MIB
_STATE_BYTES = 12
"""What AdamW keeps of a parameter: itself and two moments, in float32."""
_GENEROUS = {"local_mem_bytes": 64 << 10, "max_work_group_size": 1024}
_IN_WORDS = {"local_mem_bytes": "bytes of local memory", "max_work_group_size": "work items a group"}


def info_of(event: Mapping[str, Any]) -> DeviceInfo:
    """The device that a child told of."""
    from kernels.devices import DeviceInfo
    from kernels.spec import DeviceLimits

    names = {f.name for f in fields(DeviceInfo)} - {"handle", "limits"}
    return DeviceInfo(**{name: event[name] for name in names}, limits=DeviceLimits(**event["limits"]))


def check_note(info: DeviceInfo) -> list[Finding]:
    """What had to be done so that a driver works at all."""
    if not info.note:
        return []
    return [warning("driver", info.note, "use a newer driver, such as the system's package of PoCL", info.index)]


def check_buffers(info: DeviceInfo) -> Finding:
    """How large one buffer may be, and which of the models that ship it can hold: the step's memory is one buffer."""
    from layoutopt.models import shipped_facts

    most, whole = info.limits.max_alloc_bytes, info.limits.global_mem_bytes
    need = {name: facts.get("parameters", 0) * _STATE_BYTES for name, facts in shipped_facts().items()}
    large = sorted((name for name, size in need.items() if size > min(most, whole)), key=need.__getitem__)
    sizes: dict[str, Any] = {"max_alloc_bytes": most, "global_mem_bytes": whole, "too_large": large}
    seen = f"one buffer may take {most // _MIB} of {whole // _MIB} MiB, and a step's memory is one buffer"
    if large:
        seen += f"; too small for the weights and AdamW's states of {', '.join(large)}"
    if most < _SMALL_BUFFER_BYTES:
        mend = "plan small models or with --mode lora, head or bias; some drivers have an option for larger buffers"
        return warning("buffers", seen, mend, info.index, **sizes)
    return ok("buffers", seen, device=info.index, **sizes)


def check_variants(info: DeviceInfo) -> list[Finding]:
    """Which kernels local memory and work groups are too small for."""
    out = []
    full = _offered(replace(info.limits, **{k: max(getattr(info.limits, k), v) for k, v in _GENEROUS.items()}))
    for key, words in _IN_WORDS.items():
        if getattr(info.limits, key) >= _GENEROUS[key]:
            continue
        others = {k: max(getattr(info.limits, k), v) for k, v in _GENEROUS.items() if k != key}
        lost = sorted(full - _offered(replace(info.limits, **others)))
        if lost:
            names = sorted({label.split("(")[0] for label in lost})
            seen = f"{getattr(info.limits, key)} {words} leave out {len(lost)} kernels of {', '.join(names)}"
            mend = "nothing to mend: plans use the others, which may be slower"
            out.append(warning("limits", seen, mend, info.index, lost=lost))
    if not out:
        seen = f"local memory {info.limits.local_mem_bytes} bytes, work group {info.limits.max_work_group_size}"
        out.append(ok("limits", f"{seen}: no kernel is left out", device=info.index))
    return out


def _offered(limits: DeviceLimits) -> set[str]:
    """Labels of the variants that a device with such limits is offered for the self-test's problems."""
    from kernels.selftest_cases import CASES, cases
    from kernels.variants import kernels_for

    found = (kernels_for(c.spec, c.layouts, limits) for family in CASES for c in cases(family))
    return {kernel.variant.label for kernels in found for kernel in kernels}


def check_clock(info: DeviceInfo, profiled_s: float | None) -> Finding:
    """Events carry times, fine enough to calibrate by.

    Args:
        info: the device.
        profiled_s: what events said a kernel took; None where they could not be asked.
    """
    facts: dict[str, Any] = {"timer_ns": info.timer_resolution_ns, "profiled_s": profiled_s}
    if profiled_s is None or profiled_s <= 0:
        said = "events carry no times" if profiled_s is None else f"a kernel took {profiled_s:g} s by its events"
        mend = "plan with --device-model, a model that ships or a file: this driver cannot be calibrated"
        return problem("clock", f"{said}: calibration measures by them", mend, info.index, **facts)
    if info.timer_resolution_ns > _COARSE_NS:
        seen = f"events tick every {info.timer_resolution_ns / 1e3:.0f} µs: many kernels take less"
        return warning("clock", seen, "give `layoutopt calibrate` a longer --budget", info.index, **facts)
    return ok("clock", f"events carry times, in steps of {info.timer_resolution_ns} ns", device=info.index, **facts)


def check_calibration(info: DeviceInfo) -> Finding:
    """Whether the device has been calibrated here, under this driver."""
    from costmodel import device as models
    from layoutopt.models import calibrated_path

    path = calibrated_path(info)
    mend = f"layoutopt calibrate --device {info.index}"
    facts = {"file": str(path)}
    if path.is_file():
        try:
            model = models.load(str(path))
        except LayoutOptError as error:
            return warning("calibration", str(error), f"remove {path}, then {mend}", info.index, **facts)
        if model.limits.compute_units != info.limits.compute_units:
            seen = f"{path} was made with {model.limits.compute_units} compute units, now {info.limits.compute_units}"
            return warning("calibration", seen, mend, info.index, **facts)
        return ok("calibration", f"{path}, of {model.date[:10] or 'an unknown day'}", device=info.index, **facts)
    stale = []
    for other in sorted(path.parent.glob("*.toml")):
        try:
            model = models.load(str(other))
        except LayoutOptError:
            continue  # another device's, which says so in its own check
        if model.name == info.name:
            stale.append(model.driver)
    if stale:
        seen = f"calibrated under driver {', '.join(stale)}, and now it is {info.driver}: that does not apply"
        return warning("calibration", seen, mend, info.index, stale=stale, **facts)
    seen = "none: the first plan for this device measures for a minute, and less than `layoutopt calibrate` would"
    return warning("calibration", seen, mend, info.index, **facts)
