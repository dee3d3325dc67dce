"""The rewrite "recompute": what the forward pass makes element by element is made again in the backward pass.

An activation function's result is kept for the gradient of the weights behind it, and its argument for its own
derivative: two tensors of one size (a feed-forward layer's widest). The derivative's op reads the argument anyway and
has the function's parts at hand, so it may write the result again, for hardly more than the bytes of that; then only
the argument lives through the step. What read the result before that op moves behind it.

Nothing is made again that would keep anything else alive: every activation that the program reads must be read by the
derivative's op already. Results are the same bit by bit where a device computes both programs alike.
"""

from __future__ import annotations

from dataclasses import replace

from layoutopt.expr import Builder, Ref, kind_of, renumber_inputs, used_inputs
from layoutopt.graph import Op, Operand, TrainingGraph, rename_reads
from layoutopt.pass_views import compose, overwrites, same_view, seen
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.view import View

__all__ = ["recomputed", "with_recomputation"]

_MOST_OPERANDS = 12
_FREE = ("parameter", "constant", "input")
"""Roles of tensors that live through the step whatever is done."""


def recomputed(graph: TrainingGraph) -> TrainingGraph:
    """The graph with pointwise results made again in the backward pass; ``graph`` where that makes no step smaller.

    Args:
        graph: views folded.
    """
    changed = with_recomputation(graph)
    return changed if peak_bytes(changed) < peak_bytes(graph) else graph


def with_recomputation(graph: TrainingGraph) -> TrainingGraph:
    """The graph with every pointwise result made again that may be; ``graph`` where there is none.

    Args:
        graph: views folded.
    """
    for maker in graph.ops:
        if maker.phase == "forward" and maker.kind == "pointwise" and not maker.inplace:
            graph = _again(graph, maker) or graph
    return graph


def _again(graph: TrainingGraph, maker: Op) -> TrainingGraph | None:
    """The graph with what an op made made again, or None where it is not kept for the backward pass or must be."""
    position = {op.name: i for i, op in graph.walk()}
    made = {o.tensor for o in maker.outputs}
    late = [op for name in made for op in graph.consumers[name] if op.phase == "backward"]
    if not late or made & set(graph.outputs) or made & overwrites(graph).keys():
        return None
    kept = {o.tensor for o in maker.inputs if graph.tensors[o.tensor].role not in _FREE}
    hosts = [op for name in kept for op in graph.consumers[name] if op.phase == "backward" and op.kind == "pointwise"]
    for host in sorted(dict.fromkeys(op.name for op in hosts), key=position.__getitem__):
        op = graph.ops[position[host]]
        if op.inplace or not kept <= {o.tensor for o in op.inputs}:
            continue
        changed = _hosted(graph, maker, op)
        if changed is not None:
            return changed
    return None


def _hosted(graph: TrainingGraph, maker: Op, host: Op) -> TrainingGraph | None:
    """The graph with the maker's program in another op, and its late readers behind that; None where that cannot be."""
    change = _change(graph, maker, host)
    if change is None:
        return None
    position = {op.name: i for i, op in graph.walk()}
    made = {o.tensor: o for o in maker.outputs}
    readers = {
        op.name: op for name in made for op in graph.consumers[name] if op.phase == "backward" and op.name != host.name
    }
    early = [op for op in readers.values() if position[op.name] < position[host.name]]
    gone = overwrites(graph)
    for op in early:
        followers = [f for o in op.outputs for f in graph.consumers[o.tensor]]
        blocked = any(position[f.name] <= position[host.name] for f in followers)
        stale = any(gone.get(o.tensor, len(position)) <= position[host.name] for o in op.inputs)
        if op.inplace or blocked or stale:
            return None
    again = {name: f"{name}.again" for name in made if any(_reads(op, name) for op in readers.values())}
    if any(name in graph.tensors for name in again.values()):
        return None
    new = _joined(graph, maker, host, change, again)
    if new is None:
        return None
    tensors = {**graph.tensors, **{again[n]: replace(graph.tensors[n], name=again[n]) for n in again}}
    behind = [rename_reads(op, again) for op in sorted(early, key=lambda op: position[op.name])]
    ops: list[Op] = []
    for op in graph.ops:
        if op.name == host.name:
            ops += [new, *behind]
        elif op.name in readers:
            ops += [] if op in early else [rename_reads(op, again)]
        else:
            ops.append(op)
    return graph.with_ops(ops, tensors=tensors)


def _reads(op: Op, tensor: str) -> bool:
    return any(o.tensor == tensor for o in op.inputs)


def _change(graph: TrainingGraph, maker: Op, host: Op) -> View | None:
    """From the maker's domain to the host's: what both read must be seen alike, element by element."""
    domain = graph.operand_shape(maker.outputs[0])
    found: View | None = None
    for operand in maker.inputs:
        shape = graph.tensors[operand.tensor].shape
        if graph.tensors[operand.tensor].role in _FREE or not operand.view.is_bijective:
            continue
        for other in host.inputs:
            if other.tensor != operand.tensor:
                continue
            change = operand.view.inverse(shape).then(*other.view.steps).simplified(domain)
            if found is not None and not same_view(change, found, domain):
                return None
            found = change
    return found if found is not None and found.is_bijective else None


def _joined(graph: TrainingGraph, maker: Op, host: Op, change: View, again: dict[str, str]) -> Op | None:
    """The host with the maker's program before its own, and what is wanted of the maker's results as outputs."""
    operands = list(host.inputs)
    builder = Builder([kind_of(graph.tensors[o.tensor].dtype) for o in operands])
    known = {_key(graph, o): i for i, o in enumerate(operands)}
    args: list[Ref] = []
    for operand in maker.inputs:
        view = compose(graph.tensors[operand.tensor].shape, operand.view, change)
        if view is None:
            return None
        moved = Operand(operand.tensor, view)
        key = _key(graph, moved)
        if key not in known:
            known[key] = len(operands)
            operands.append(moved)
            builder.kinds.append(kind_of(graph.tensors[operand.tensor].dtype))
        args.append(("x", known[key]))
    values = builder.inline(maker.attrs["expr"], args)
    results: dict[object, Ref] = {}
    outputs: list[Operand] = []
    wanted: list[Ref] = []
    for operand, ref in zip(maker.outputs, values, strict=True):
        tensor = graph.tensors[operand.tensor]
        view = compose(tensor.shape, operand.view, change)
        if view is None or not view.is_bijective:
            return None
        stored = builder.cast(ref, kind_of(tensor.dtype))
        results[_key(graph, Operand(operand.tensor, view))] = stored
        if operand.tensor in again:
            outputs.append(Operand(again[operand.tensor], view))
            wanted.append(stored)
    made = {o.tensor for o in maker.outputs}
    refs: list[Ref] = []
    for i, operand in enumerate(host.inputs):
        if operand.tensor not in made:
            refs.append(("x", i))
        elif (key := _key(graph, operand)) in results:
            refs.append(results[key])
        else:
            return None  # seen otherwise than it is made
    own = builder.inline(host.attrs["expr"], refs)
    pairs = zip(host.outputs, own, strict=True)
    ends = [builder.cast(ref, kind_of(graph.tensors[o.tensor].dtype)) for o, ref in pairs]
    expr = builder.finish([*ends, *wanted])
    used = used_inputs(expr)
    if len(used) + len(host.outputs) + len(outputs) > _MOST_OPERANDS:
        return None
    program = renumber_inputs(expr, {old: new for new, old in enumerate(used)})
    return replace(
        host,
        inputs=tuple(operands[i] for i in used),
        outputs=(*host.outputs, *outputs),
        attrs={**host.attrs, "expr": program},
    )


def _key(graph: TrainingGraph, operand: Operand) -> tuple[str, object]:
    return operand.tensor, seen(operand.view, graph.tensors[operand.tensor].shape)
