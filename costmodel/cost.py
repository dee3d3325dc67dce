"""What a prediction is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kernels.spec import DeviceLimits, Kernel

__all__ = ["Cost", "Costs"]


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one kernel, itemised; ``measured`` where the total was looked up rather than predicted."""

    total_ns: float
    compute_ns: float = 0.0
    memory_ns: float = 0.0
    launch_ns: float = 0.0
    measured: bool = False


class Costs(Protocol):
    """Anything that prices kernels on a device."""

    limits: DeviceLimits
    name: str
    hash: str

    def predict(self, kernel: Kernel, together: int = 1) -> Cost:
        """The cost of one kernel (all its launches); of ``together`` equal ones that run at once, one's part."""
        ...
