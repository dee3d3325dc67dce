"""Quantised weights: matrices that are only read lie in memory as packed codes and scales (``--storage int8|nf4``).

A weight is quantised where all that reads it are products with it and look-ups of its rows, and all of them agree which
of its axes is summed over: that one becomes the rows of ``layoutopt/quantize.py``. A linear layer's weight [out, in] is
quantised as it lies; one that is stored [in, out] (GPT-2's Conv1D) transposed; a tied embedding once, for the look-up
and for the logits. Kernels unpack what they multiply by (``quantized_contraction``, ``quantized_gather``). Biases,
norms, convolutions and small matrices stay float32.

The graph that comes out has two parameters for each such weight, ``NAME.words`` and ``NAME.scales``; its ``meta`` says
how to make them of the weight, so that whoever loads a checkpoint goes on giving weights by their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.quantize import WEIGHTS, Format, dequantise, groups_per_row, quantise, words_per_row
from layoutopt.view import IDENTITY, Step, View

__all__ = ["META", "Weight", "quantised_weights", "weights_of"]

META = "weights"
"""Where a graph's ``meta`` keeps what its quantised weights are made of."""

_LEAST_ELEMS = 1024
"""Smaller matrices stay float32: what they would save is nothing beside what is lost."""


@dataclass(frozen=True)
class Weight:
    """How a weight is stored.

    Attributes:
        tensor: as it was, float32.
        format: of its rows.
        cols: numbers in a row.
        transposed: whether rows of codes are its columns.
    """

    tensor: Tensor
    format: Format
    cols: int
    transposed: bool

    @property
    def rows(self) -> int:
        """Rows of codes."""
        return self.tensor.size_elems // self.cols

    @property
    def names(self) -> tuple[str, str]:
        """Of the parameters that hold its words and scales."""
        return f"{self.tensor.name}.words", f"{self.tensor.name}.scales"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The parameters that hold its words and scales."""
        words, scales = self.names
        return (
            Tensor(words, (self.rows, words_per_row(self.format, self.cols)), "int32", "parameter"),
            Tensor(scales, (self.rows, groups_per_row(self.format, self.cols)), "float32", "parameter"),
        )

    def pack(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Words and scales of the weight.

        Raises:
            GraphError: a number of it is not finite.
        """
        flat = values.reshape((self.cols, self.rows)).T if self.transposed else values.reshape((self.rows, self.cols))
        try:
            return quantise(flat, self.format)
        except GraphError as error:
            raise GraphError(f"parameter {self.tensor.name!r}: {error}") from error

    def unpack(self, words: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The weight as kernels see it, in its own shape."""
        flat = dequantise(words, scales, self.cols, self.format)
        return np.ascontiguousarray(flat.T if self.transposed else flat).reshape(self.tensor.shape)

    def plain(self) -> list[Any]:
        """For ``meta``."""
        return [list(self.tensor.shape), self.tensor.init, str(self.format), self.cols, self.transposed]


def weights_of(graph: TrainingGraph) -> dict[str, Weight]:
    """The quantised weights of a graph, by the names that they had."""
    kept: Mapping[str, Any] = graph.meta.get(META, {})
    return {
        name: Weight(Tensor(name, tuple(shape), "float32", "parameter", init), Format.parse(fmt), cols, transposed)
        for name, (shape, init, fmt, cols, transposed) in kept.items()
    }


def quantised_weights(graph: TrainingGraph, storage: str) -> TrainingGraph:
    """The graph with its weights stored in few bits.

    Args:
        graph: views folded; nothing in it changes a parameter.
        storage: "int8" or "nf4".

    Raises:
        GraphError: there is no such storage, or the graph trains.
    """
    if storage not in WEIGHTS:
        raise GraphError(f"unknown storage of weights {storage!r}: choose one of {', '.join(WEIGHTS)}")
    if any(op.phase in ("backward", "update") for op in graph.ops):
        raise GraphError(
            f"graph {graph.name!r} trains its parameters, and weights stored as {storage} are only read: capture the "
            "forward pass alone, or plan with --storage fp32 or fp16"
        )
    weights = {t.name: weight for t in graph.by_role("parameter") if (weight := _weight(graph, t, storage))}
    if not weights:
        return graph
    tensors = {name: t for name, t in graph.tensors.items() if name not in weights}
    tensors |= {t.name: t for weight in weights.values() for t in weight.tensors()}
    ops = [_quantised(graph, op, weights) for op in graph.ops]
    meta = {**graph.meta, META: {name: weight.plain() for name, weight in weights.items()}}
    return TrainingGraph(graph.name, tensors, ops, graph.outputs, graph.constants, meta)


# ---- which weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Where an op finds the rows that it sums over: ``count`` of them from ``first``, of ``cols`` numbers each."""

    cols: int
    transposed: bool
    first: int
    count: int


def _weight(graph: TrainingGraph, tensor: Tensor, storage: str) -> Weight | None:
    """How a parameter is stored, None where it stays as it is."""
    ops = graph.consumers[tensor.name]
    small = tensor.dtype != "float32" or len(tensor.shape) < 2 or tensor.size_elems < _LEAST_ELEMS
    if small or not ops or tensor.name in graph.outputs:
        return None
    found = {_orientation(graph, op, tensor.name) for op in ops}
    if len(found) != 1 or None in found:
        return None
    (cols, transposed), *_ = (x for x in found if x is not None)
    return Weight(tensor, WEIGHTS[storage], cols, transposed)


def _orientation(graph: TrainingGraph, op: Op, name: str) -> tuple[int, bool] | None:
    places = [i for i, operand in enumerate(op.inputs) if operand.tensor == name]
    rows = _rows(graph, op, places[0]) if len(places) == 1 else None
    return (rows.cols, rows.transposed) if rows else None


def _rows(graph: TrainingGraph, op: Op, place: int) -> _Rows | None:
    """The rows of a weight that an op reads as operand ``place``; None where it reads it otherwise."""
    operand = op.inputs[place]
    tensor = graph.tensors[operand.tensor]
    if op.kind == "gather" and place == 0:
        along, across = 1, 0
    elif op.kind == "contraction" and place < 2 and not op.inplace:
        along, across = (2, 1) if place == 0 else (1, 2)
    else:
        return None
    seen = operand.view.layout(Layout.row_major(tensor.shape))
    if seen is None or any(len(seen.axis_modes(axis)) > 1 for axis in range(seen.rank)):
        return None
    steps = [modes[0].stride if (modes := seen.axis_modes(axis)) else 0 for axis in range(seen.rank)]
    cols, count, first = seen.shape[along], seen.shape[across], seen.base[0]
    if seen.rank == 3 and seen.shape[0] > 1 and steps[0]:
        return None  # a matrix for each of a batch
    total = tensor.size_elems // cols
    if total * cols != tensor.size_elems or cols < 2 or count < 2:
        return None
    if (steps[along], steps[across]) == (1, cols) and first % cols == 0:
        return _Rows(cols, False, first // cols, count)
    if (steps[along], steps[across]) == (total, 1) and first + count <= total and op.kind == "contraction":
        return _Rows(cols, True, first, count)
    return None


# ---- the ops that read them -----------------------------------------------------------------------------------------


def _quantised(graph: TrainingGraph, op: Op, weights: Mapping[str, Weight]) -> Op:
    place = next((i for i, operand in enumerate(op.inputs) if operand.tensor in weights), None)
    if place is None:
        return op
    weight = weights[op.inputs[place].tensor]
    rows = _rows(graph, op, place)
    assert rows is not None
    part = IDENTITY
    if rows.count < weight.rows:
        part = View().then(Step("slice", (0, rows.first, rows.first + rows.count, 1)))
    packed = tuple(Operand(name, part) for name in weight.names)
    attrs = {**op.attrs, "format": str(weight.format)}
    if op.kind == "gather":
        return replace(op, kind="quantized_gather", inputs=(*packed, op.inputs[1]), attrs=attrs)
    swapped = place == 0
    others = [_as_matrix(graph, o, swapped) for o in op.inputs[2:]]
    inputs = (_as_matrix(graph, op.inputs[1 - place], swapped), *packed, *others)
    outputs = tuple(_as_matrix(graph, o, swapped) for o in op.outputs)
    return replace(op, kind="quantized_contraction", inputs=inputs, outputs=outputs, attrs=attrs)


def _as_matrix(graph: TrainingGraph, operand: Operand, swapped: bool) -> Operand:
    """An operand [b,m,n] seen as [b*m,n]; ``swapped``: as [b*n,m], where the weight was what is multiplied."""
    steps: list[Step] = []
    b, m, n = graph.operand_shape(operand)
    if swapped:
        steps.append(Step("permute", (0, 2, 1)))
        m, n = n, m
    steps.append(Step("reshape", (b * m, n)))
    return Operand(operand.tensor, operand.view.then(*steps).simplified(graph.tensors[operand.tensor].shape))
