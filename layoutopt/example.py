"""Made-up inputs of a graph's shape: valid ids and targets, random floats; for measuring, never for training."""

from __future__ import annotations

import numpy as np

from layoutopt.graph import TrainingGraph

__all__ = ["example_inputs"]


def example_inputs(graph: TrainingGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """One batch for every input of ``graph``.

    Integer inputs that a gather or a loss reads stay within the table or the classes; other integers are ones (a mask
    that hides nothing); floats are standard normal; scalars are small and positive (a learning rate, a correction).
    """
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for tensor in graph.by_role("input"):
        value: np.ndarray
        if tensor.dtype == "float32":
            shape = tensor.shape
            value = rng.standard_normal(shape, np.float32) if shape else np.asarray(1e-3, np.float32)
        elif tensor.dtype == "bool":
            value = np.ones(tensor.shape, dtype=bool)
        else:
            limit = _limit(graph, tensor.name)
            chosen = rng.integers(0, limit, tensor.shape) if limit else np.ones(tensor.shape)
            value = np.asarray(chosen, np.int32)
        out[tensor.name] = value
    return out


def _limit(graph: TrainingGraph, name: str) -> int:
    """Rows of the smallest table, or classes, that an integer input selects from; 0 where it selects nothing."""
    limits = []
    for op in graph.consumers[name]:
        shapes = [graph.operand_shape(o) for o in op.inputs]
        if op.kind in ("gather", "quantized_gather") and op.inputs[-1].tensor == name:
            limits.append(shapes[0][0])
        elif op.kind in ("nll_loss", "cross_entropy") and op.inputs[1].tensor == name:
            limits.append(shapes[0][1])
    return min(limits, default=0)
