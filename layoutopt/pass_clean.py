"""Passes that make the graph smaller without changing its shape: constants, common subexpressions, dead code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from layoutopt.expr import Builder, evaluate_expr, kind_of, renumber_inputs, used_inputs
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.pass_views import Notes, compose, overwrites, rebase, seen

__all__ = ["LARGEST_CONSTANT_ELEMS", "drop_dead", "fold_constants", "share_common", "tidy_pointwise"]

LARGEST_CONSTANT_ELEMS = 4096
"""Constants of more elements than this are calculated on the device (a uniform one of any size is one number)."""

_NUMPY: dict[str, Any] = {"float32": np.float64, "int32": np.int64, "bool": np.bool_}


def drop_dead(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Remove ops that neither reach an output nor update anything in place, and results that pointwise ops compute
    for nobody.
    """
    live = set(graph.outputs)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if not op.inplace and not any(o.tensor in live for o in op.outputs):
            continue
        if op.kind == "pointwise" and not op.inplace and not all(o.tensor in live for o in op.outputs):
            op = _with_results(graph, op, [i for i, o in enumerate(op.outputs) if o.tensor in live])
        live |= {o.tensor for o in op.inputs}
        kept.append(op)
    return graph if len(kept) == len(graph.ops) and kept[::-1] == list(graph.ops) else graph.with_ops(kept[::-1])


def _with_results(graph: TrainingGraph, op: Op, positions: list[int]) -> Op:
    expr: Expr = op.attrs["expr"]
    fewer = Expr(expr.code, tuple(expr.results[i] for i in positions))
    return _tidied(graph, replace(op, attrs={"expr": fewer}, outputs=tuple(op.outputs[i] for i in positions)), {})


# ---- pointwise programs -------------------------------------------------------------------------------------------


def tidy_pointwise(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Shorten every pointwise program: uniform constants become literals, inputs seen twice become one."""
    constants = [t for t in graph.by_role("constant") if any(c.kind == "pointwise" for c in graph.consumers[t.name])]
    literals = {t.name: v for t in constants if (v := _uniform(graph, t)) is not None}
    ops = [_tidied(graph, op, literals) if op.kind == "pointwise" else op for op in graph.ops]
    return graph if ops == list(graph.ops) else graph.with_ops(ops)


def _tidied(graph: TrainingGraph, op: Op, literals: Mapping[str, bool | int | float]) -> Op:
    """The op with its program shortened, and without the inputs that it then no longer reads.

    Args:
        graph: for dtypes and shapes.
        op: a pointwise op.
        literals: values of the tensors that hold one constant everywhere.
    """
    expr: Expr = op.attrs["expr"]
    inplace = {i for _, i in op.inplace}
    builder = Builder([kind_of(graph.tensors[o.tensor].dtype) for o in op.inputs])
    first: dict[Any, int] = {}
    refs = []
    for i, operand in enumerate(op.inputs):
        tensor = graph.tensors[operand.tensor]
        if operand.tensor in literals and i not in inplace:
            refs.append(("c", literals[operand.tensor]))
        else:
            key = (operand.tensor, seen(operand.view, tensor.shape) or operand.view)
            refs.append(("x", i if i in inplace else first.setdefault(key, i)))
            first.setdefault(key, i)
    short = builder.finish(builder.inline(expr, refs))
    kept = sorted({*used_inputs(short), *inplace})
    number = {old: new for new, old in enumerate(kept)}
    expr = renumber_inputs(short, number)
    if kept == list(range(len(op.inputs))) and expr == op.attrs["expr"]:
        return op
    return replace(
        op,
        inputs=tuple(op.inputs[i] for i in kept),
        attrs={**op.attrs, "expr": expr},
        inplace=tuple((out, number[i]) for out, i in op.inplace),
    )


def _uniform(graph: TrainingGraph, tensor: Tensor) -> bool | int | float | None:
    """The one value of a constant tensor, typed as the tensor is; None if there are several."""
    values = np.asarray(graph.constants[tensor.name])
    if values.size == 0 or (values != values.flat[0]).any():
        return None
    return _python(values.flat[0], tensor.dtype)


def _python(value: Any, dtype: str) -> bool | int | float:
    return {"float32": float, "int32": int, "bool": bool}[dtype](value)


# ---- constants ----------------------------------------------------------------------------------------------------


def fold_constants(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Calculate once and for all what depends on constants only, and tidy the pointwise programs around it."""
    constants = dict(graph.constants)
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        values = (
            None if any(o.tensor in graph.outputs for o in op.outputs) else _constant_results(op, tensors, constants)
        )
        if values is None:
            ops.append(op)
            continue
        for operand, value in zip(op.outputs, values, strict=True):
            tensor = tensors[operand.tensor]
            tensors[tensor.name] = replace(tensor, role="constant", init="", of="")
            constants[tensor.name] = value
    return tidy_pointwise(graph.with_ops(ops, tensors=tensors, constants=constants))


def _constant_results(op: Op, tensors: Mapping[str, Tensor], constants: Mapping[str, Any]) -> list[Any] | None:
    """Values for the outputs (nested lists, or a number where uniform), or None where the op has to stay."""
    if op.inplace or op.kind not in ("view", "pointwise", "iota", "gather"):
        return None
    if any(tensors[o.tensor].role != "constant" for o in op.inputs):
        return None
    arrays = []
    for operand in op.inputs:
        shape = tensors[operand.tensor].shape
        value = np.asarray(constants[operand.tensor])
        arrays.append(operand.view.array(np.broadcast_to(value, shape)))
    shapes = [o.view.shape(tensors[o.tensor].shape) for o in op.outputs]
    uniform = all(np.asarray(constants[o.tensor]).size == 1 for o in op.inputs) and op.kind in ("view", "pointwise")
    if not uniform and max(prod(s) for s in shapes) > LARGEST_CONSTANT_ELEMS:
        return None
    out: list[Any] = []
    for operand, shape, value in zip(op.outputs, shapes, _calculate(op, arrays, shapes, uniform), strict=True):
        tensor = tensors[operand.tensor]
        typed: np.ndarray = np.asarray(value).astype(
            {"float32": np.float64, "int32": np.int64, "bool": np.bool_}[tensor.dtype]
        )
        if typed.dtype.kind == "f" and np.isnan(typed).any():
            return None
        if typed.size and (typed == typed.flat[0]).all():
            out.append(_python(typed.flat[0], tensor.dtype))
        else:
            stored = operand.view.inverse(tensor.shape).array(np.broadcast_to(typed, shape))
            out.append(stored.tolist())
    return out


def _calculate(op: Op, arrays: list[np.ndarray], shapes: Sequence[tuple[int, ...]], uniform: bool) -> list[np.ndarray]:
    if op.kind == "pointwise":
        points = [np.asarray(a.flat[0]) for a in arrays] if uniform else arrays
        return evaluate_expr(op.attrs["expr"], points)
    if op.kind == "iota":
        return [op.attrs.get("start", 0) + op.attrs.get("step", 1) * np.arange(shapes[0][0])]
    if op.kind == "gather":
        return [arrays[0][arrays[1].astype(np.int64)]]
    return [np.asarray(arrays[0].flat[0]) if uniform else arrays[0]]


# ---- common subexpressions ----------------------------------------------------------------------------------------


def share_common(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """Compute equal things once: same kind, attributes and operands, in the same phase.

    Ops of different phases are left alone: keeping a forward value for the backward pass costs memory, and whoever
    wrote the graph may have meant to compute it again.
    """
    overwritten = overwrites(graph)
    known: dict[Any, Op] = {}
    moved: dict[str, tuple[str, Any]] = {}
    shapes = {t.name: t.shape for t in graph.tensors.values()}
    ops: list[Op] = []
    for op in graph.ops:
        (op,) = rebase([op], moved, shapes)
        key = None if op.inplace else _key(graph, op)
        older = known.get(key) if key is not None else None
        if older is None or not _replace_outputs(graph, op, older, moved, overwritten):
            ops.append(op)
            if key is not None:
                known.setdefault(key, op)
    return graph.with_ops(ops) if moved else graph


def _key(graph: TrainingGraph, op: Op) -> Any:
    def place(operand: Operand) -> Any:
        tensor = graph.tensors[operand.tensor]
        return seen(operand.view, tensor.shape) or operand.view

    attrs = tuple(sorted((k, repr(v)) for k, v in op.attrs.items()))
    inputs = tuple((o.tensor, place(o)) for o in op.inputs)
    outputs = tuple((graph.tensors[o.tensor].dtype, graph.operand_shape(o)) for o in op.outputs)
    return op.kind, op.phase, attrs, inputs, outputs


def _replace_outputs(
    graph: TrainingGraph, op: Op, older: Op, moved: dict[str, tuple[str, Any]], overwritten: Mapping[str, int]
) -> bool:
    """Let every reader of ``op``'s results read ``older``'s; False where something forbids it."""
    new: dict[str, tuple[str, Any]] = {}
    for mine, theirs in zip(op.outputs, older.outputs, strict=True):
        t, o = graph.tensors[mine.tensor], graph.tensors[theirs.tensor]
        if t.name in graph.outputs or t.name in overwritten or o.name in overwritten:
            return False
        view = compose(o.shape, theirs.view, mine.view.inverse(t.shape))
        reads = [x.view for c in graph.consumers[t.name] for x in c.inputs if x.tensor == t.name]
        if view is None or any(compose(o.shape, view, read) is None for read in reads):
            return False
        new[t.name] = (o.name, view)
    moved.update(new)
    return True
