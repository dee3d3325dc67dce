"""Batches for a compiled step: as arrays by name, and short ones filled up where the loss can leave samples out.

A step's shapes are fixed. A mean cross-entropy leaves out targets that equal its ``ignore_index``: a batch with fewer
samples is filled with repeated ones whose targets are that, and counts as the smaller batch does. Where the loss is
another, or samples depend on one another, a short batch is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import batch_axes, leading_axes
from layoutopt.samples import spread

__all__ = ["Batches", "as_arrays"]

_LOSSES = ("cross_entropy", "nll_loss")
_CARRY = ("view", "concat", "pointwise")
"""Kinds between an input of targets and the loss that only move them: shifted by one, say."""


def as_arrays(batch: Any) -> dict[str, np.ndarray]:
    """A batch as numpy arrays by name: a mapping, or entries in order, of arrays, tensors or nested lists.

    Raises:
        GraphError: an entry that is no array.
    """
    if isinstance(batch, Mapping):
        return {str(name): _array(str(name), value) for name, value in batch.items()}
    entries = batch if isinstance(batch, tuple | list) else (batch,)
    return {f"input_{i}": _array(f"input_{i}", value) for i, value in enumerate(entries)}


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        array = np.asarray(None)
        if "inhomogeneous" in str(error):
            raise GraphError(f"batch entry {name!r} is ragged: pad its samples to one length") from error
    if array.dtype.kind not in "fiub":
        raise GraphError(f"batch entry {name!r} is a {type(value).__name__}, which is no array of numbers")
    return array


class Batches:
    """What batches of a graph look like.

    Args:
        graph: as captured, after the passes.

    Attributes:
        size: samples in a step; 1 where no input holds several.
        target: the input whose samples the loss leaves out where they are ``ignore``; empty where there is none.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._shapes = {t.name: t.shape for t in graph.by_role("input")}
        self._asked: dict[str, tuple[int, ...]] = {
            name: tuple(entry["shape"]) for name, entry in graph.meta.get("batch", {}).items()
        }
        self._axes = _axes(graph, self._asked)
        self.size = max((self._asked[name][axis] for name, axis in self._axes.items()), default=1)
        self.target, self.ignore = _target(graph, self._axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Entries of a batch."""
        return tuple(self._asked)

    def samples(self, arrays: Mapping[str, np.ndarray]) -> int:
        """How many samples a batch holds.

        Raises:
            GraphError: its entries disagree.
        """
        counts = {n: arrays[n].shape[axis] for n, axis in self._axes.items() if n in arrays and arrays[n].ndim > axis}
        if len(set(counts.values())) > 1:
            raise GraphError(f"entries of the batch hold different numbers of samples: {counts}")
        return next(iter(counts.values()), self.size)

    def ready(self, batch: Any) -> tuple[dict[str, np.ndarray], int]:
        """A batch of the step's shapes and without what it does not read, and the samples in it that count.

        Raises:
            GraphError: an entry is missing, unknown, of another shape, or not finite; a short batch that cannot be
                filled.
        """
        arrays = as_arrays(batch)
        for name in arrays:
            if name not in self._asked:
                raise GraphError(f"the step has no input {name!r}: it was compiled for {', '.join(self._asked)}")
        for name in self._asked:
            if name not in arrays:
                raise GraphError(f"the batch lacks {name!r} {list(self._asked[name])}, which every step needs")
        real = self.samples(arrays)
        if 0 < real < self.size:
            arrays = self._filled(arrays, real)
        for name, array in arrays.items():
            if array.shape != self._asked[name]:
                raise GraphError(
                    f"batch entry {name!r} has the shape {list(array.shape)}; the step was compiled for "
                    f"{list(self._asked[name])}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                bad = int(array.size - np.isfinite(array).sum())
                raise GraphError(f"batch entry {name!r} holds {bad} NaN or infinite values: clean the data")
        return {name: array for name, array in arrays.items() if name in self._shapes}, real

    def _filled(self, arrays: Mapping[str, np.ndarray], real: int) -> dict[str, np.ndarray]:
        if not self.target:
            raise GraphError(
                f"the batch has {real} samples and the step takes {self.size}; its loss is no mean cross-entropy that "
                "leaves samples out: give full batches"
            )
        rows = np.resize(np.arange(real), self.size)
        out = {n: a.take(rows, self._axes[n]) if n in self._axes else a for n, a in arrays.items()}
        # Whatever width the targets come in (bytes, say), what is ignored must fit.
        targets = np.moveaxis(out[self.target].astype(np.int64), self._axes[self.target], 0)
        targets[real:] = self.ignore
        return out | {self.target: np.moveaxis(targets, 0, self._axes[self.target])}


def _axes(graph: TrainingGraph, asked: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The axis of the samples by batch entry, entries that the step does not read among them."""
    known = batch_axes(graph)
    guessed = leading_axes(asked)
    return {name: known.get(name, guessed.get(name, 0)) for name in asked if name in known or name in guessed}


def _target(graph: TrainingGraph, axes: Mapping[str, int]) -> tuple[str, int]:
    """The input of targets that the loss leaves out, and their value; an empty name where there is none."""
    op = graph.producer.get(graph.outputs[0])
    if op is None or op.kind not in _LOSSES or op.outputs[0].tensor != graph.outputs[0]:
        return "", 0
    used = {name: axis for name, axis in axes.items() if name in graph.tensors}
    try:
        spread(graph, used, frozenset({op.name}))
    except GraphError:  # a sample's result hangs on its neighbours, or nothing is known of them
        return "", 0
    found: set[str] = set()
    pending = [op.inputs[1].tensor]
    while pending:
        name = pending.pop()
        made_by = graph.producer.get(name)
        if graph.tensors[name].role == "input":
            found.add(name)
        elif made_by is not None:
            if made_by.kind not in _CARRY or (made_by.kind == "pointwise" and len(made_by.inputs) > 1):
                return "", 0
            pending += [operand.tensor for operand in made_by.inputs]
    (target,) = found if len(found) == 1 else ("",)
    return (target, int(op.attrs["ignore_index"])) if target in used else ("", 0)
