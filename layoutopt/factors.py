"""Sparse tables of costs over a few variables: what ``treewidth`` eliminates and ``sweeps`` moves costs between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Factor"]


@dataclass(frozen=True)
class Factor:
    """A sparse table.

    Attributes:
        scope: variables, distinct.
        rows: values, one row per allowed tuple, shape [rows, scope].
        costs: of each row, zero or more.
    """

    scope: tuple[int, ...]
    rows: NDArray[np.int64]
    costs: NDArray[np.int64]
