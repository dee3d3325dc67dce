"""The seconds that a calibration may take, and where they are."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["BUDGET_S", "THOROUGH", "Budget", "budget_seconds"]

BUDGET_S = {"cpu": 180.0, "gpu": 60.0}
"""By the device's kind."""

THOROUGH = 3
"""How many times that a thorough calibration takes."""


def budget_seconds(kind: str, thorough: bool = False) -> float:
    """What a calibration takes where nobody says how long it may."""
    return BUDGET_S[kind] * (THOROUGH if thorough else 1)


class Budget:
    """Counts from when it is made.

    Args:
        total_s: seconds there are, those of earlier sessions included.
        clock: seconds that only grow.

    Attributes:
        begin_s: when it began, on that clock.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s, self.clock = total_s, clock
        self.begin_s = clock()

    def resume(self, before_s: float, least_s: float) -> None:
        """An earlier session has used ``before_s``; what is left is at least ``least_s``."""
        self.begin_s -= before_s
        self.total_s = max(self.total_s, self.spent_s + least_s)

    @property
    def spent_s(self) -> float:
        """Seconds so far, those of earlier sessions included."""
        return self.clock() - self.begin_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative after it."""
        return self.total_s - self.spent_s

    @property
    def share(self) -> float:
        """What of the budget is spent, at most 1."""
        return min(self.spent_s / self.total_s, 1.0)
