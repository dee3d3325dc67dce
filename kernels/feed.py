"""What goes into a step: inputs checked and converted.

The device trusts its ids and labels; they are checked here, on the host: a wrong one is a sentence, not a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import Tensor, TrainingGraph
from layoutopt.view import View

__all__ = ["Feed", "cast"]

_TARGET_KINDS = {"nll_loss": (1, 0), "nll_loss_grad": (1, 3), "cross_entropy": (1, 0), "cross_entropy_grad": (2, 1)}
"""Op kind to the positions of (targets, operand whose second axis counts the classes)."""


def cast(tensor: Tensor, value: Any) -> np.ndarray:
    """``value`` as the tensor's dtype.

    Integers may come in any width that holds their values; a bool may come as integers 0 and 1; a float scalar may come
    as a Python number.

    Raises:
        GraphError: another shape, a dtype that does not convert, a value outside int32.
    """
    array = np.asarray(value)
    if array.shape != tensor.shape:
        raise GraphError(f"{tensor.role} {tensor.name!r} has shape {array.shape}; the graph expects {tensor.shape}")
    kind = array.dtype.kind
    if tensor.dtype == "float32" and (kind == "f" or (kind in "iu" and array.ndim == 0)):
        return array.astype(np.float32, copy=False)
    if tensor.dtype == "float16" and kind == "f":
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float16)
        if np.isinf(rounded).any() and not np.isinf(array).any():
            raise GraphError(
                f"{tensor.role} {tensor.name!r} holds {np.abs(array).max():g}: float16 ends at 65504; "
                "plan with --storage fp32"
            )
        return rounded
    if tensor.dtype == "int32" and kind in "iu":
        limits = np.iinfo(np.int32)
        wider = array.dtype.itemsize > 4 or array.dtype == np.uint32
        if wider and array.size and (array.min() < limits.min or array.max() > limits.max):
            raise GraphError(f"{tensor.role} {tensor.name!r} holds integers beyond 32 bits ({array.max()})")
        return array.astype(np.int32, copy=False)
    if tensor.dtype == "bool":
        if kind == "b":
            return array
        if kind in "iu" and (not array.size or (array.min() >= 0 and array.max() <= 1)):
            return array.astype(np.bool_)
    raise GraphError(
        f"{tensor.role} {tensor.name!r} has dtype {array.dtype}; the graph expects {tensor.dtype}: convert it first"
    )


@dataclass(frozen=True)
class _Bound:
    """Values of an input, seen through ``view``, lie in 0..below-1 or equal ``ignore``."""

    view: View
    below: int
    ignore: int | None
    what: str


class Feed:
    """Checks the inputs of a graph.

    Args:
        graph: whose inputs.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.tensors = {t.name: t for t in graph.by_role("input")}
        self._bounds: dict[str, list[_Bound]] = {name: [] for name in self.tensors}
        for op in graph.ops:
            shapes = [graph.operand_shape(o) for o in op.operands]
            if op.kind == "gather":
                self._bound(op.inputs[1], shapes[0][0], None, f"rows of {op.inputs[0].tensor!r}")
            elif op.kind == "quantized_gather":
                self._bound(op.inputs[2], shapes[0][0], None, f"rows of {op.inputs[0].tensor!r}")
            elif op.kind == "scatter_add":
                self._bound(op.inputs[1], shapes[2][0], None, f"rows of {op.outputs[0].tensor!r}")
            elif op.kind in _TARGET_KINDS:
                position, logits = _TARGET_KINDS[op.kind]
                ignore = int(op.attrs["ignore_index"]) if "ignore_index" in op.attrs else None
                self._bound(op.inputs[position], shapes[logits][1], ignore, f"classes of {op.name}")

    def _bound(self, operand: Any, below: int, ignore: int | None, what: str) -> None:
        if operand.tensor in self._bounds:
            known = self._bounds[operand.tensor]
            if not any((b.view, b.below, b.ignore) == (operand.view, below, ignore) for b in known):
                known.append(_Bound(operand.view, below, ignore, what))

    def check(self, inputs: Mapping[str, Any], required: frozenset[str] | None = None) -> dict[str, np.ndarray]:
        """Inputs in the graph's dtypes.

        Args:
            inputs: an array per input.
            required: which must be there; all by default.

        Raises:
            GraphError: one is missing, unknown, of a wrong shape or dtype, or holds an id out of range.
        """
        for name in inputs:
            if name not in self.tensors:
                raise GraphError(f"the graph has no input {name!r}; its inputs are {', '.join(self.tensors)}")
        for name in self.tensors if required is None else required:
            if name not in inputs:
                raise GraphError(f"input {name!r} {list(self.tensors[name].shape)} is missing: every step needs it")
        out = {}
        for name, value in inputs.items():
            array = out[name] = cast(self.tensors[name], value)
            bounds = self._bounds[name]
            # Nearly always all is well, which the extremes tell.
            if bounds and array.size and not 0 <= array.min() <= array.max() < min(b.below for b in bounds):
                for bound in bounds:
                    self._check_bound(name, bound, array)
        return out

    @staticmethod
    def _check_bound(name: str, bound: _Bound, array: np.ndarray) -> None:
        seen = bound.view.array(array)
        bad = (seen < 0) | (seen >= bound.below)
        if bound.ignore is not None:
            bad &= seen != bound.ignore
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            beside = f" (or {bound.ignore}, which is ignored)" if bound.ignore is not None else ""
            raise GraphError(
                f"input {name!r} holds {int(seen[place])} at {list(place)}: "
                f"the {bound.what} are 0..{bound.below - 1}{beside}"
            )
