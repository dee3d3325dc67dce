"""Options that several commands of side-tuning share."""

from __future__ import annotations

from typing import Annotated

import typer

from layoutopt import complete

__all__ = ["Calibration", "DeviceModel", "Json", "Memory", "Strategy", "TimeLimit"]

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
DeviceModel = Annotated[
    str | None,
    typer.Option("--device-model", help="A file or a built-in name.", autocompletion=complete.device_models),
]
Strategy = Annotated[str, typer.Option("--strategy", help="Of the planner.", autocompletion=complete.strategies)]
Memory = Annotated[str | None, typer.Option("--memory", help="Device memory: 512MiB, 2GiB, …")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver.")]
Calibration = Annotated[float, typer.Option("--calibration", min=5.0, help="Seconds if none exists yet.")]
