"""Two graphs of a forward pass as one: the second runs on what the first gives, as soon as it gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from layoutopt.errors import GraphError
from layoutopt.graph import Tensor, TrainingGraph, rename_operand
from layoutopt.microbatch import AXES

__all__ = ["as_soon", "join"]


def join(
    first: TrainingGraph,
    second: TrainingGraph,
    wires: Mapping[str, str],
    *,
    name: str = "",
    prefix: str = "",
    outputs: Sequence[str] = (),
) -> TrainingGraph:
    """One graph that runs ``first`` and then ``second``.

    Args:
        first: any graph.
        second: any graph.
        wires: an input of ``second`` to the tensor of ``first`` that it is: an output, an input, any other.
        name: of the result; both names by default.
        prefix: put before the names of everything else in ``second``, where both graphs use the same names.
        outputs: of the result, by the names that tensors have in it; those of ``second`` by default.

    Returns:
        A graph whose parameters, constants and remaining inputs are those of both. Views are folded where they were in
        both; run the passes again to share and fuse across the seam.

    Raises:
        GraphError: a wire joins what does not exist or does not fit, or a name is in both graphs.
    """
    names = {t: wires.get(t, f"{prefix}{t}") for t in second.tensors}
    _check_wires(first, second, wires)
    moved = {names[t.name]: _renamed(t, names) for t in second.tensors.values() if t.name not in wires}
    ops = {op.name for op in first.ops} & {f"{prefix}{op.name}" for op in second.ops}
    twice = sorted(moved.keys() & first.tensors.keys()) + sorted(ops)
    if twice:
        raise GraphError(
            f"graphs {first.name!r} and {second.name!r} both have {twice[0]!r} ({len(twice)} such): join with a prefix"
        )
    kept = tuple(outputs) or tuple(names[t] for t in second.outputs)
    # What was only there to be read is no output any more: its memory may be used again.
    inner = {t for t in first.outputs if t not in kept and first.tensors[t].role == "output"}
    mine = {t.name: replace(t, role="activation") if t.name in inner else t for t in first.tensors.values()}
    moved_ops = [
        replace(
            op,
            name=f"{prefix}{op.name}",
            inputs=tuple(rename_operand(o, names) for o in op.inputs),
            outputs=tuple(rename_operand(o, names) for o in op.outputs),
        )
        for op in second.ops
    ]
    return TrainingGraph(
        name or f"{first.name}+{second.name}",
        mine | moved,
        (*first.ops, *moved_ops),
        kept,
        first.constants | {names[t]: value for t, value in second.constants.items()},
        _meta(first, second, names, moved),
    )


def as_soon(graph: TrainingGraph, trunk: str) -> TrainingGraph:
    """The graph in another order: what a tensor does not need runs as soon as what it reads is there.

    So that of a large result, of which a few rows or few bits are kept, the rest dies at once.

    Args:
        graph: of a forward pass.
        trunk: the tensor; ops that it needs keep their order.
    """
    needed = _needed(graph, trunk)
    place: dict[str, int] = {}
    places: list[int] = []
    for i, op in enumerate(graph.ops):
        own = i if op.name in needed else max((place[o.tensor] for o in op.inputs if o.tensor in place), default=-1)
        places.append(own)
        place |= {o.tensor: own for o in op.outputs}
    # An op of the trunk comes before what was waiting for it; among these, order stays.
    order = sorted(range(len(graph.ops)), key=lambda i: (places[i], graph.ops[i].name not in needed, i))
    return graph if order == list(range(len(order))) else graph.with_ops([graph.ops[i] for i in order])


def _needed(graph: TrainingGraph, tensor: str) -> set[str]:
    """Names of the ops that a tensor needs."""
    found: set[str] = set()
    pending = [tensor]
    while pending:
        op = graph.producer.get(pending.pop())
        if op is not None and op.name not in found:
            found.add(op.name)
            pending += [o.tensor for o in op.inputs]
    return found


def _check_wires(first: TrainingGraph, second: TrainingGraph, wires: Mapping[str, str]) -> None:
    free = {t.name for t in second.by_role("input")}
    for to, source in wires.items():
        if to not in free:
            raise GraphError(f"graph {second.name!r} has no input {to!r}: its inputs are {', '.join(sorted(free))}")
        if source not in first.tensors:
            raise GraphError(f"graph {first.name!r} has no tensor {source!r} to be {to!r} of {second.name!r}")
        has, wants = first.tensors[source], second.tensors[to]
        if (has.shape, has.dtype) != (wants.shape, wants.dtype):
            raise GraphError(
                f"{source!r} of {first.name!r} is {has.dtype} {list(has.shape)}; as {to!r} graph {second.name!r} "
                f"expects {wants.dtype} {list(wants.shape)}"
            )


def _renamed(tensor: Tensor, names: Mapping[str, str]) -> Tensor:
    return replace(tensor, name=names[tensor.name], of=names.get(tensor.of, tensor.of))


def _meta(
    first: TrainingGraph, second: TrainingGraph, names: Mapping[str, str], moved: Mapping[str, Tensor]
) -> dict[str, object]:
    """What both say of their batches; else the first's."""
    joined = {}
    for key in ("batch", AXES):
        theirs = {names[t]: value for t, value in second.meta.get(key, {}).items() if names.get(t) in moved}
        joined[key] = {**first.meta.get(key, {}), **theirs}
    return {**first.meta, **joined, "joined": [first.name, second.name]}
