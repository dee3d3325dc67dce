"""Checks of a device by what it does: kernels of every family against float64, and its speed beside other drivers'."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layoutopt.doctor.child import SILENCE_S, Event, Told, ask_selftest
from layoutopt.doctor.finding import Finding, ok, problem, warning

if TYPE_CHECKING:
    from kernels.devices import DeviceInfo

__all__ = ["compare_speeds", "hardware", "speed_of", "try_device"]

_SLOWER = 1.25
"""A driver that takes so many times as long as another on the same hardware is not the one to use. Differences below
are what a busy machine shows between two runs of the same."""
_SHOWN = 3

Hear = Callable[[str], None]
Ask = Callable[..., Told]


def try_device(
    info: DeviceInfo, families: Sequence[str], hear: Hear = lambda _: None, ask: Ask = ask_selftest
) -> tuple[Finding, float | None]:
    """Run the self-test of a device, family by family; after a crash it goes on with the next family.

    Args:
        info: the device.
        families: of kernels.
        hear: told of every family that is done.
        ask: starts the process that does it.

    Returns:
        What was found, and what events said a kernel took in seconds.
    """
    begin = time.perf_counter()
    left, kernels, wrong, crashes = list(families), 0, [], []
    profiled: float | None = None
    while left:
        told = ask("check", info.index, *left, silence_s=SILENCE_S, hear=lambda event: _heard(event, hear))
        done = {str(event["name"]) for event in told.of("family")}
        kernels += sum(event["kernels"] for event in told.of("family"))
        wrong += [sentence for event in told.of("family") for sentence in event["wrong"]]
        for event in told.of("profiling"):
            profiled = event["seconds"]
        errors = [str(event["message"]) for event in told.of("error")]
        at = next((family for family in left if family not in done), None)
        if not told.ended and not errors and at is None:
            break
        what = errors[0] if errors else f"the process {told.ended or 'ended early'} at {told.doing}"
        crashes.append(what)
        started = any(event["what"].split(":")[0] == at for event in told.of("begin"))
        if at is None or not started or told.ended.startswith("said nothing"):
            break  # it does not start, or a second family would take as long to hang
        left = left[left.index(at) + 1 :]
    seconds = time.perf_counter() - begin
    return _verdict(info, len(families), kernels, wrong, crashes, seconds), profiled


def _heard(event: Event, hear: Hear) -> None:
    if event["event"] == "family":
        hear(str(event["name"]))


def _verdict(
    info: DeviceInfo, families: int, kernels: int, wrong: Sequence[str], crashes: Sequence[str], seconds: float
) -> Finding:
    facts: dict[str, Any] = {"kernels": kernels, "wrong": list(wrong), "crashes": list(crashes), "seconds": seconds}
    mend = (
        f"do not train with this driver: update it, or choose another device (--device, LAYOUTOPT_DEVICE); "
        f"report driver {info.driver} with this line"
    )
    if crashes:
        return problem("self-test", "; ".join(crashes), mend, info.index, **facts)
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        seen = f"{len(wrong)} of {kernels} kernels are wrong: {'; '.join(wrong[:_SHOWN])}{more}"
        return problem("self-test", seen, mend, info.index, **facts)
    seen = f"{kernels} kernels of {families} families agree with float64 ({seconds:.0f} s)"
    return ok("self-test", seen, device=info.index, **facts)


def speed_of(info: DeviceInfo, ask: Ask = ask_selftest) -> float | None:
    """Seconds of a short matrix product on a device; None where it does not get there."""
    found = ask("speed", info.index).of("speed")
    return float(found[0]["seconds"]) if found else None


def hardware(info: DeviceInfo) -> str:
    """What several drivers may serve: the machine's processor, or a GPU by its name."""
    return "cpu" if info.limits.kind == "cpu" else info.name


def compare_speeds(infos: Sequence[DeviceInfo], seconds: Mapping[int, float], default: int) -> list[Finding]:
    """Which of several drivers of the same hardware is slow.

    Args:
        infos: devices.
        seconds: of the same work, by device.
        default: the device that is used when none is named.
    """
    groups: dict[str, list[DeviceInfo]] = {}
    for info in infos:
        if info.index in seconds:
            groups.setdefault(hardware(info), []).append(info)
    out = []
    for group in groups.values():
        if len(group) < 2:
            continue
        best = min(group, key=lambda info: seconds[info.index])
        slow = [info for info in group if seconds[info.index] > _SLOWER * seconds[best.index]]
        times = ", ".join(f"{seconds[i.index] * 1e3:.3g} ms on device {i.index}" for i in group)
        facts = {str(info.index): seconds[info.index] for info in group}
        if not slow:
            seen = f"{len(group)} drivers of the same hardware are equally fast: a matrix product took {times}"
            out.append(ok("speed", seen, seconds=facts))
        for info in slow:
            ratio = seconds[info.index] / seconds[best.index]
            seen = (
                f"device {info.index} ({info.driver}) took {ratio:.2f} times as long as device {best.index} "
                f"({best.driver}) on the same hardware: a matrix product took {times}"
            )
            if info.index == default:
                mend = (
                    f"use the other: --device {best.index}, or LAYOUTOPT_DEVICE={best.index}; this one is the default"
                )
                out.append(warning("speed", seen, mend, info.index, seconds=facts, ratio=ratio))
            else:
                out.append(ok("speed", f"{seen}; it is not the default", device=info.index, seconds=facts, ratio=ratio))
    return out
