"""What a step asks of a device, counted from its graph: arithmetic and the bytes its operands hold."""

from __future__ import annotations

from math import prod
from typing import Any

from layoutopt.graph import Op, TrainingGraph

__all__ = ["facts", "op_bytes", "op_flops"]

_PER_ELEMENT = {"softmax": 5, "log_softmax": 5, "cross_entropy": 5, "cross_entropy_grad": 5, "layer_norm": 8}
_PER_ELEMENT |= {"quantize": 4, "dequantize": 1}
_PER_ELEMENT |= {"softmax_grad": 4, "log_softmax_grad": 4, "layer_norm_grad": 10, "layer_norm_affine": 5}


def op_flops(graph: TrainingGraph, op: Op) -> int:
    """Floating-point operations: two per multiplication with addition; one per instruction of a pointwise program (or
    of an epilogue of a contraction) and element; a few per element of an op over rows; none for moving data.
    """
    shapes = [graph.operand_shape(o) for o in op.operands]
    if op.kind == "contraction":
        program = op.attrs.get("epilogue")
        return 2 * prod(shapes[0]) * shapes[1][2] + (prod(shapes[-1]) * len(program.code) if program else 0)
    if op.kind == "quantized_contraction":
        program = op.attrs.get("epilogue")
        return 2 * prod(shapes[0]) * shapes[1][0] + (prod(shapes[-1]) * len(program.code) if program else 0)
    if op.kind in ("conv", "conv_grad_input", "conv_grad_weight"):
        # Each output of the forward convolution meets one window of the weight.
        weight = shapes[{"conv": 1, "conv_grad_input": 1, "conv_grad_weight": 2}[op.kind]]
        result = shapes[2 if op.kind == "conv" else 0]
        return 2 * prod(result) * prod(weight[1:])
    if op.kind in ("attention", "attention_grad"):
        (_, m, d), (b, n, _), (_, _, e) = shapes[:3]
        programs = sum(len(value.code) for key, value in op.attrs.items() if key in ("score", "drop", "grad"))
        products = d + e if op.kind == "attention" else 3 * d + 2 * e
        return b * m * n * (2 * products + _PER_ELEMENT["softmax"] + programs)
    if op.kind == "pointwise":
        return prod(shapes[-1]) * len(op.attrs["expr"].code)
    if op.kind == "quantized_gather":
        return prod(shapes[3])
    if op.kind in ("reduce", "scatter_add"):
        return prod(shapes[0])
    largest = max((prod(s) for s in shapes), default=0)
    return largest * _PER_ELEMENT.get(op.kind, 0)


def op_bytes(graph: TrainingGraph, op: Op) -> int:
    """Bytes that an op reads and writes when each element it sees is moved once."""
    total = 0
    for operand in op.operands:
        tensor = graph.tensors[operand.tensor]
        total += min(prod(graph.operand_shape(operand)), tensor.size_elems) * tensor.item_bytes
    return total


def facts(graph: TrainingGraph) -> dict[str, Any]:
    """Numbers for a list of graphs: parameters (and how many of them are trained), ops, FLOPs and bytes of a step."""
    trained = {o.tensor for op in graph.ops for _, i in op.inplace for o in (op.inputs[i],)}
    parameters = graph.by_role("parameter")
    return {
        "parameters": sum(t.size_elems for t in parameters),
        "trained": sum(t.size_elems for t in parameters if t.name in trained),
        "ops": len(graph.ops),
        "flops": sum(op_flops(graph, op) for op in graph.ops),
        "bytes": sum(op_bytes(graph, op) for op in graph.ops),
    }
