"""Optimizer state that is stored in another form: what ``Executor`` does where state comes and goes.

Halves hold eleven bits over nine decades, and Adam's state needs others than those around 1. So a graph with float16
state (``layoutopt/rewrite_half.py``) keeps a mean of gradients times a number (``scaled``), and a mean of squares as
its root times that (``root``); its update decodes, calculates in float32 and encodes. Whoever reads or writes state
sees it decoded, so that a checkpoint says nothing about how it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from layoutopt.graph import TrainingGraph

__all__ = ["META", "Code", "code_of", "decode", "encode"]

META = "codes"
"""Where a graph's ``meta`` keeps (form, factor) by tensor name."""

_LARGEST = 65504.0


class Code(NamedTuple):
    """``form`` "scaled" (x * factor) or "root" (sqrt(x) * factor)."""

    form: str
    factor: float


def code_of(graph: TrainingGraph, name: str) -> Code | None:
    """How a tensor is stored, None where that is as it is."""
    codes: Mapping[str, Any] = graph.meta.get(META, {})
    return Code(*codes[name]) if name in codes else None


def encode(code: Code, values: np.ndarray) -> np.ndarray:
    """What is stored: float16, ending at the largest."""
    wide = values.astype(np.float64)
    stored = (np.sqrt(wide) if code.form == "root" else wide) * code.factor
    return np.clip(stored, -_LARGEST, _LARGEST).astype(np.float16)


def decode(code: Code, stored: np.ndarray) -> np.ndarray:
    """The values, float32."""
    values = stored.astype(np.float64) / code.factor
    return (values**2 if code.form == "root" else values).astype(np.float32)
