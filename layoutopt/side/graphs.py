"""Graph surgery for side-tuning: taps stored in few bits, and what a server calculates with of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layoutopt.errors import GraphError
from layoutopt.graph import Op, Operand, Role, Tensor, TrainingGraph
from layoutopt.quantize import Format, groups_per_row, words_per_row

__all__ = ["as_received", "facts_of", "quantised", "received_tensor", "sent_tensors", "tap_tensor"]


def tap_tensor(name: str) -> str:
    """What a graph calls the tapped result of a module."""
    return f"tap:{name}"


def sent_tensors(name: str) -> tuple[str, str]:
    """What a graph calls words and scales of a tap."""
    return f"words:{name}", f"scales:{name}"


def received_tensor(name: str) -> str:
    """What a graph calls a tap as its words and scales say it."""
    return f"received:{name}"


def facts_of(graph: TrainingGraph) -> dict[str, Any]:
    """What a captured backbone says of its taps (``capture_taps``).

    Raises:
        GraphError: it is none.
    """
    facts = graph.meta.get("side")
    if not isinstance(facts, dict):
        raise GraphError(f"graph {graph.name!r} is no backbone with taps: capture one with `layoutopt side capture`")
    return facts


def quantised(graph: TrainingGraph, names: Sequence[str], fmt: Format) -> TrainingGraph:
    """The graph that gives words and scales of its taps; itself for float32.

    Args:
        graph: a captured backbone.
        names: of the taps, in order.
        fmt: how they are stored.

    Returns:
        A graph whose outputs are words int32[rows, w] and scales float32[rows, g] of each tap in turn. Each tap is
        stored as soon as it is made, so that its numbers can die.
    """
    if fmt.kind == "float32":
        return graph
    return _with_ops_behind(graph, names, fmt, send=True, receive=False)


def as_received(graph: TrainingGraph, names: Sequence[str], fmt: Format) -> TrainingGraph:
    """The graph that gives its taps as their words and scales say them: what a side network is trained on.

    Args:
        graph: a captured backbone.
        names: of the taps, in order.
        fmt: how they are stored on the way.

    Returns:
        A graph whose outputs are :func:`received_tensor` float32[rows, width] of each tap.
    """
    if fmt.kind == "float32":
        tensors = dict(graph.tensors)
        copies = [_copied(graph, name, tensors) for name in names]
        outputs = tuple(received_tensor(n) for n in names)
        return graph.with_ops([*graph.ops, *copies], tensors=_inner(tensors, names), outputs=outputs)
    return _with_ops_behind(graph, names, fmt, send=False, receive=True)


def _copied(graph: TrainingGraph, name: str, tensors: dict[str, Tensor]) -> Op:
    tap = graph.tensors[tap_tensor(name)]
    tensors[received_tensor(name)] = replace(tap, name=received_tensor(name), role="output")
    return Op(f"receive:{name}", "view", (Operand(tap.name),), (Operand(received_tensor(name)),), {}, "forward", name)


def _inner(tensors: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Taps are read within the graph only."""
    taps = {tap_tensor(name) for name in names}
    return {n: replace(t, role="activation") if n in taps else t for n, t in tensors.items()}


def _with_ops_behind(
    graph: TrainingGraph, names: Sequence[str], fmt: Format, *, send: bool, receive: bool
) -> TrainingGraph:
    tensors = dict(graph.tensors)
    behind: dict[str, list[Op]] = {}
    outputs: list[str] = []
    for name in names:
        tap = graph.tensors[tap_tensor(name)]
        rows, cols = tap.shape
        words, scales = sent_tensors(name)
        role: Role = "output" if send else "activation"
        tensors[words] = Tensor(words, (rows, words_per_row(fmt, cols)), "int32", role)
        tensors[scales] = Tensor(scales, (rows, groups_per_row(fmt, cols)), "float32", role)
        pair, attrs = (Operand(words), Operand(scales)), {"format": str(fmt)}
        ops = [Op(f"quantize:{name}", "quantize", (Operand(tap.name),), pair, attrs, "forward", name)]
        if receive:
            back = received_tensor(name)
            tensors[back] = Tensor(back, tap.shape, "float32", "output")
            ops.append(Op(f"receive:{name}", "dequantize", pair, (Operand(back),), attrs, "forward", name))
        outputs += [words, scales] if send else [received_tensor(name)]
        behind.setdefault(graph.producer[tap.name].name, []).extend(ops)
    placed = [placed for op in graph.ops for placed in (op, *behind.get(op.name, ()))]
    return graph.with_ops(placed, tensors=_inner(tensors, names), outputs=tuple(outputs))
