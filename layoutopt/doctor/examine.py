"""All checks in order, each after those that it hangs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layoutopt.doctor import device, drivers, install, trial
from layoutopt.doctor.finding import Finding, problem
from layoutopt.errors import DeviceError

if TYPE_CHECKING:
    from kernels.devices import DeviceInfo

__all__ = ["examine"]

Progress = Callable[[str, int, int], None]


def examine(
    selector: str | None,
    *,
    quick: bool = False,
    configuration: Callable[[], object] = lambda: None,
    progress: Progress = lambda what, done, of: None,
) -> list[Finding]:
    """Look for what goes wrong on this machine.

    Args:
        selector: the device to look at; all of them by default.
        quick: leave out what runs kernels, but for a first one.
        configuration: reads the configuration files; raises what is wrong with them.
        progress: told what is looked at, how much is done and how much there is.

    Raises:
        DeviceError: there are devices, and none is the one that is asked for.
    """
    progress("installation", 0, 1)
    out = [install.check_python(), install.check_names(), install.check_configuration(configuration)]
    out += [*install.check_packages(), *install.check_folders(), install.check_memory()]
    if out[1].status == "problem":  # none of what follows would be ours
        return out
    loader = drivers.check_loader()
    out.append(loader)
    if loader.status == "problem":
        return out
    out += drivers.check_drivers()
    start, told = drivers.check_start()
    out.append(start)
    if start.status == "problem":
        return out
    infos = [device.info_of(event) for event in told.of("device")]
    out += _default(infos)
    return out + _devices(infos, _chosen(infos, selector), quick, progress)


def _chosen(infos: Sequence[DeviceInfo], selector: str | None) -> list[DeviceInfo]:
    from kernels.devices import choose

    return list(infos) if selector is None else [choose(list(infos), selector)]


def _default(infos: Sequence[DeviceInfo]) -> list[Finding]:
    """The environment's choice, if there is one, names one device."""
    from kernels.devices import choose
    from kernels.discovery import DEVICE_ENV

    named = os.environ.get(DEVICE_ENV, "")
    try:
        choose(list(infos), named)
    except DeviceError as error:
        return [problem("default device", f"{DEVICE_ENV}={named}: {error}", f"unset {DEVICE_ENV} or mend it")]
    return []


def _devices(
    infos: Sequence[DeviceInfo], chosen: Sequence[DeviceInfo], quick: bool, progress: Progress
) -> list[Finding]:
    from kernels.selftest_cases import CASES

    families = ["iota"] if quick else list(CASES)
    of, done = len(chosen) * (len(families) + 1), 0
    out: list[Finding] = []
    broken: set[int] = set()

    def heard(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, of)

    for info in chosen:
        out += [*device.check_note(info), device.check_buffers(info), *device.check_variants(info)]
        out.append(device.check_calibration(info))
        progress(info.name, done, of)
        tested, profiled_s = trial.try_device(info, families, heard)
        out += [device.check_clock(info, profiled_s), tested]
        if tested.status == "problem":
            broken.add(info.index)
        heard("speed")
    if not quick and len(infos) > 1:
        out += _speeds(infos, broken)
    return out


def _speeds(infos: Sequence[DeviceInfo], broken: set[int]) -> list[Finding]:
    """Drivers of the same hardware beside each other, those that compute wrong left out."""
    from kernels.devices import choose
    from kernels.discovery import DEVICE_ENV

    kinds = [trial.hardware(info) for info in infos]
    some = [i for i, kind in zip(infos, kinds, strict=True) if kinds.count(kind) > 1 and i.index not in broken]
    if len(some) < 2:
        return []
    found = {info.index: trial.speed_of(info) for info in some}
    seconds = {index: value for index, value in found.items() if value is not None}
    try:
        default = choose(list(infos), os.environ.get(DEVICE_ENV, "")).index
    except DeviceError:
        default = choose(list(infos)).index
    return trial.compare_speeds(infos, seconds, default)
