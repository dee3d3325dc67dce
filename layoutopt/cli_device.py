"""Which device, and which model of it, a command works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.errors import DeviceError
from layoutopt.show import Progress, say

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime
    from layoutopt.graph import TrainingGraph

__all__ = ["model_for", "open_runtime"]


def open_runtime(selector: str | None) -> Runtime:
    """The device that ``--device`` names."""
    from kernels.runtime import Runtime, pick

    return Runtime(pick(selector))


def model_for(
    given: str | None,
    selector: str | None,
    graph: TrainingGraph,
    quiet: bool,
    runtime: Runtime | None = None,
    storage: str = "fp32",
) -> DeviceModel:
    """The device model that ``--device-model`` names, else that of the device, calibrated for the graph if need be.

    Args:
        given: a file or the name of a built-in model.
        selector: of the device.
        graph: that will be planned.
        quiet: without a progress bar.
        runtime: the device, where it is open already.
        storage: how the graph's numbers lie in memory.

    Raises:
        DeviceError: no model is given and there is no device.
    """
    from layoutopt.models import device_model

    if given is None and runtime is None:
        try:
            runtime = open_runtime(selector)
        except DeviceError as error:
            raise DeviceError(f"{error}; without a device give --device-model") from error
    with Progress("calibrating", quiet=quiet) as bar:
        return device_model(given, runtime, [graph], announce=say, progress=bar.fraction, storage=storage)
