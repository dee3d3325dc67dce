"""From the joint ATen graph of a step to the ops of a TrainingGraph: the walk over its nodes.

Nodes are torch.fx nodes, used by what they are (``op``, ``target``, ``args``, ``meta``): this file needs no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutopt import aten, capture_index, capture_rows  # noqa: F401  (the last two register their rules)
from layoutopt.capture_build import Context, GraphBuilder
from layoutopt.errors import GraphError
from layoutopt.graph import Phase

__all__ = ["Joint", "graph_dtype", "translate_joint"]

_DTYPES = {"float32": "float32", "int64": "int32", "int32": "int32", "int16": "int32", "uint8": "int32", "bool": "bool"}


@dataclass
class Joint:
    """A traced step.

    Attributes:
        graph: fx graph that returns the loss, the outputs, then one gradient (or None) per name in ``trainable``.
        inputs: batch entry by position among the graph's placeholders.
        parameters: parameter name by position; a tied parameter stands at several.
        constants: known tensor by position (buffers).
        outputs: names of what the step gives beside the loss.
        trainable: parameters that gradients were asked for.
        shapes: of the parameters, by name.
        dropouts: modules whose dropout was set to 0 while tracing.
    """

    graph: Any = None
    inputs: dict[int, str] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dropouts: list[str] = field(default_factory=list)


def translate_joint(
    b: GraphBuilder, joint: Joint, inits: Mapping[str, str], fold: Callable[[Any, dict[Any, Any]], bool]
) -> dict[str, str | None]:
    """Write a traced step into ``b``.

    Args:
        b: an empty builder.
        joint: the step.
        inits: ``Tensor.init`` of every parameter.
        fold: calculates a node into the dict of known tensors if all it depends on is there, and says whether it did.

    Returns:
        The gradient's tensor by parameter; None where the loss does not depend on it.

    Raises:
        GraphError: an op that is not known.
    """
    nodes = list(joint.graph.nodes)
    results = list(nodes[-1].args[0])
    split = 1 + len(joint.outputs)
    phases = _phases(results[:split])
    env: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    for i, node in enumerate(n for n in nodes if n.op == "placeholder"):
        if i in joint.inputs:
            name, like = joint.inputs[i], node.meta["val"]
            env[node] = b.tensor(name, like.shape, graph_dtype(like, f"batch entry {name!r}"), "input")
        elif i in joint.parameters:
            name = joint.parameters[i]
            if name not in b.tensors:
                b.tensor(name, joint.shapes[name], "float32", "parameter", init=inits[name])
            env[node] = b.whole(name)
        else:
            known[node] = joint.constants[i]
    needed = _ancestors([r for r in results if r is not None])
    for node in nodes:
        if node.op == "get_attr" and node in needed:
            known[node] = getattr(joint.graph.owning_module, str(node.target))
        elif node.op == "call_function" and node in needed:
            source = (node.meta.get("custom") or {}).get("source", "")
            b.context = Context(node.name, phases.get(node, "backward"), source)
            if not fold(node, known):
                env[node] = _call(b, node, env, known)
    for name, result in zip(["loss", *joint.outputs], results[:split], strict=True):
        b.context = Context(name, phases[result], name)
        b.name(_value(result, env, known), name, "output")
    gradients: dict[str, str | None] = {}
    for parameter, result in zip(joint.trainable, results[split:], strict=True):
        b.context = Context(f"grad:{parameter}", "backward", parameter.rpartition(".")[0])
        gradients[parameter] = None if result is None else f"grad:{parameter}"
        if result is not None:
            b.name(_value(result, env, known), f"grad:{parameter}", "gradient", parameter)
    b.finish()
    return gradients


def graph_dtype(tensor: Any, what: str) -> str:
    """The graph's name of a torch tensor's type.

    Raises:
        GraphError: a type that no kernel has.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise GraphError(f"{what} is {name}: only float32, integers and bool are supported, convert it first")
    return _DTYPES[name]


def _call(b: GraphBuilder, node: Any, env: dict[Any, Any], known: dict[Any, Any]) -> Any:
    if node.target is operator.getitem:
        return env[node.args[0]][node.args[1]]
    target, val = str(node.target), node.meta["val"]
    args = [_mapped(a, env, known) for a in node.args]
    kwargs = {k: _mapped(a, env, known) for k, a in node.kwargs.items()}
    what = f"a result of {target} in {b.context.source}"
    many = isinstance(val, (tuple, list))
    outs = [None if v is None else aten.Out(tuple(v.shape), graph_dtype(v, what)) for v in (val if many else [val])]
    return aten.translate(b, target, outs if many else outs[0], args, kwargs)


def _mapped(arg: Any, env: Mapping[Any, Any], known: Mapping[Any, Any]) -> Any:
    if isinstance(arg, (tuple, list)):
        return [_mapped(a, env, known) for a in arg]
    return _value(arg, env, known) if hasattr(arg, "all_input_nodes") else arg


def _value(node: Any, env: Mapping[Any, Any], known: Mapping[Any, Any]) -> Any:
    return aten.constant(known[node].numpy()) if node in known else env[node]


def _phases(results: Sequence[Any]) -> dict[Any, Phase]:
    """Forward is what the outputs need, loss what the loss needs beside it; all else is backward."""
    phases: dict[Any, Phase] = dict.fromkeys(_ancestors(results[:1]), "loss")
    phases.update(dict.fromkeys(_ancestors(results[1:]), "forward"))
    return phases if results[1:] else dict.fromkeys(phases, "forward")


def _ancestors(nodes: Sequence[Any]) -> set[Any]:
    seen: set[Any] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen
