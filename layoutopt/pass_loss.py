"""Two rewrites that make one op of several: softmax cross-entropy, and a constant factor inside a product."""

from __future__ import annotations

from dataclasses import replace

from layoutopt.graph import Op, Operand, Tensor, TrainingGraph
from layoutopt.pass_views import Notes, compose, overwrites, same_view

__all__ = ["fold_factors", "fuse_loss"]


def fuse_loss(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """``log_softmax`` then ``nll_loss`` becomes ``cross_entropy``, and so do their gradients.

    The log-probabilities are then never stored: the gradient makes them again from the logits and one number a row.
    """
    tensors = dict(graph.tensors)
    replaced: dict[str, Op] = {}
    for loss in graph.ops:
        if loss.kind != "nll_loss":
            continue
        logp, target = loss.inputs
        soft = graph.producer.get(logp.tensor)
        if soft is None or soft.kind != "log_softmax" or not _same(graph, logp, soft.outputs[0]):
            continue
        (logits,) = soft.inputs
        rows = graph.operand_shape(logits)[0]
        lse = _fresh(tensors, f"{logp.tensor}.lse")
        tensors[lse] = Tensor(lse, (rows,))
        value, weight = loss.outputs
        replaced[loss.name] = replace(
            loss, kind="cross_entropy", inputs=(logits, target), outputs=(value, Operand(lse), weight)
        )
        for grad in graph.consumers[logp.tensor]:
            dlogp = graph.producer.get(grad.inputs[0].tensor) if grad.kind == "log_softmax_grad" else None
            if dlogp is None or dlogp.kind != "nll_loss_grad":
                continue
            dloss, its_target, its_weight = dlogp.inputs
            fits = (
                _same(graph, grad.inputs[0], dlogp.outputs[0])
                and _same(graph, grad.inputs[1], soft.outputs[0])
                and _same(graph, its_target, target)
                and _same(graph, its_weight, weight)
                and dict(dlogp.attrs) == dict(loss.attrs)
            )
            if fits:
                inputs = (dloss, logits, target, Operand(lse), its_weight)
                replaced[grad.name] = replace(grad, kind="cross_entropy_grad", inputs=inputs, attrs=dict(dlogp.attrs))
    if not replaced:
        return graph
    return graph.with_ops([replaced.get(op.name, op) for op in graph.ops], tensors=tensors)


def _same(graph: TrainingGraph, a: Operand, b: Operand) -> bool:
    return a.tensor == b.tensor and same_view(a.view, b.view, graph.tensors[a.tensor].shape)


def _fresh(tensors: dict[str, Tensor], name: str) -> str:
    while name in tensors:
        name += "+"
    return name


def fold_factors(graph: TrainingGraph, notes: Notes | None = None) -> TrainingGraph:
    """``alpha`` of a contraction takes in a multiplication by a constant, before it or after it.

    Before: an operand that is ``x * c``, where only contractions read that product. After: ``x * c`` where nothing else
    reads the contraction's result ``x``.
    """
    for step in (_factors_before, _factors_after):
        graph = step(graph)
    return graph


def _factor(op: Op) -> float | None:
    """The constant of an op that is only ``x * c`` (or ``x / c``, ``-x``) on floats."""
    if op.kind != "pointwise" or op.inplace or len(op.inputs) != 1 or len(op.outputs) != 1:
        return None
    expr = op.attrs["expr"]
    if len(expr.code) != 1 or tuple(expr.results[0]) != ("t", 0):
        return None
    name, *refs = expr.code[0]
    if name == "neg":
        return -1.0
    numbers = [r[1] for r in refs if r[0] == "c" and not isinstance(r[1], bool)]
    if len(refs) != 2 or len(numbers) != 1:
        return None
    if name == "mul":
        return float(numbers[0])
    return 1 / numbers[0] if name == "div" and refs[1][0] == "c" and numbers[0] != 0 else None


def _is_float(graph: TrainingGraph, op: Op) -> bool:
    return all(graph.tensors[o.tensor].dtype == "float32" for o in op.operands)


def _factors_before(graph: TrainingGraph) -> TrainingGraph:
    overwritten = overwrites(graph)
    position = {op.name: at for at, op in graph.walk()}
    new = {op.name: op for op in graph.ops}
    dropped: set[str] = set()
    for op in graph.ops:
        factor = _factor(op)
        if factor is None or not _is_float(graph, op) or op.outputs[0].tensor in graph.outputs:
            continue
        source, written = op.inputs[0], op.outputs[0]
        shape = graph.tensors[written.tensor].shape
        inner = graph.tensors[source.tensor].shape
        readers = graph.consumers[written.tensor]
        if not readers or any(r.kind != "contraction" for r in readers):
            continue
        swaps: dict[str, Op] = {}
        for reader in readers:
            old = new[reader.name]
            inputs, alpha = [], float(old.attrs.get("alpha", 1.0))
            for operand in old.inputs:
                if operand.tensor != written.tensor:
                    inputs.append(operand)
                    continue
                view = compose(inner, source.view, written.view.inverse(shape), operand.view)
                if view is None or overwritten.get(source.tensor, len(position)) <= position[reader.name]:
                    break
                inputs.append(Operand(source.tensor, view))
                alpha *= factor
            else:
                swaps[reader.name] = replace(old, inputs=tuple(inputs), attrs={**old.attrs, "alpha": alpha})
        if len(swaps) == len(readers):
            new |= swaps
            dropped.add(op.name)
    return graph.with_ops([new[o.name] for o in graph.ops if o.name not in dropped]) if dropped else graph


def _factors_after(graph: TrainingGraph) -> TrainingGraph:
    new = {op.name: op for op in graph.ops}
    dropped: set[str] = set()
    for op in graph.ops:
        factor = _factor(op)
        product = graph.producer.get(op.inputs[0].tensor) if factor is not None else None
        if factor is None or product is None or product.kind != "contraction" or not _is_float(graph, op):
            continue
        (source,), (written,) = op.inputs, op.outputs
        lonely = graph.consumers[source.tensor] == [op] and source.tensor not in graph.outputs
        if not lonely or product.phase != op.phase or not source.view.is_bijective:
            continue
        # The contraction writes the scaled tensor itself: seen as the op sees it, then as the product saw its own.
        back = source.view.inverse(graph.tensors[source.tensor].shape)
        view = compose(graph.tensors[written.tensor].shape, written.view, back, product.outputs[0].view)
        if view is None:
            continue
        old = new[product.name]
        attrs = {**old.attrs, "alpha": float(old.attrs.get("alpha", 1.0)) * factor}
        new[product.name] = replace(old, outputs=(Operand(written.tensor, view),), attrs=attrs)
        dropped.add(op.name)
    return graph.with_ops([new[o.name] for o in graph.ops if o.name not in dropped]) if dropped else graph
