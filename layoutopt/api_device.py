"""Which device, and which model of it, a verb works with: names, files or objects, as users have them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.graph import TrainingGraph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime

__all__ = ["Device", "GivenModel", "Memory", "announce", "in_words", "model_of", "opened"]

if TYPE_CHECKING:
    Device = str | int | Runtime | None
    """An OpenCL device: its index, a part of its name, a ``Runtime`` that is open; None chooses."""
    GivenModel = str | os.PathLike[str] | DeviceModel | None
    """A device model: the name of one that ships, a file, the object; None means the device's own."""
    Memory = str | int | None
    """A budget: ``512MiB``, or bytes."""

_LOG = logging.getLogger("layoutopt")


def announce(line: str) -> None:
    """One sentence about what is going on, for whoever listens to the logger "layoutopt"."""
    _LOG.info("%s", line)


def in_words(memory: Memory) -> str | None:
    """A budget as the command line takes it."""
    return f"{memory}B" if isinstance(memory, int) else memory


def opened(device: Device) -> Runtime:
    """The device that is meant.

    Raises:
        DeviceError: there is none, or none of that name.
    """
    from kernels.runtime import Runtime, pick

    return device if isinstance(device, Runtime) else Runtime(pick(None if device is None else str(device)))


def model_of(
    given: GivenModel,
    device: Device,
    graphs: Sequence[TrainingGraph],
    *,
    storage: str = "fp32",
    calibration_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> DeviceModel:
    """The device model that is given, else the device's, calibrated for the graphs if need be.

    Args:
        given: see ``GivenModel``.
        device: whose model is wanted where none is given.
        graphs: that will be planned.
        storage: how their numbers lie in memory.
        calibration_s: seconds for a calibration made now; 0 makes none, and plans with generic constants where there is
            none yet (to try things out: such plans run, but choose by nothing that was measured here).
        progress: of a calibration.

    Raises:
        DeviceError: no model is given and there is no device.
        LayoutOptError: fewer than no seconds.
    """
    from costmodel import device as devices
    from layoutopt.models import calibrated_path, device_model, uncalibrated

    if calibration_s < 0:
        raise LayoutOptError(f"calibration_s is {calibration_s}: expected seconds, or 0 for no calibration")
    if isinstance(given, devices.DeviceModel):
        return given
    if given is not None:
        return devices.load(given)
    try:
        runtime = opened(device)
    except DeviceError as error:
        raise DeviceError(f"{error}; without a device give device_model=") from error
    if calibration_s == 0:
        path = calibrated_path(runtime.info)
        if path.is_file():
            announce(f"device model {path}")
            return devices.load(str(path))
        _LOG.warning("%s is not calibrated: planning with generic constants", runtime.info.name)
        return uncalibrated(runtime)
    return device_model(
        None, runtime, graphs, budget_s=calibration_s, announce=announce, progress=progress, storage=storage
    )
