"""From the joint ATen graph of a step to the ops of a TrainingGraph: the walk over its nodes.

Nodes are torch.fx nodes, used by what they are (``op``, ``target``, ``args``, ``meta``): this file needs no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutopt import aten, capture_conv, capture_index, capture_random, capture_rows  # noqa: F401  (they register)
from layoutopt.capture_build import Const, Context, GraphBuilder, Value
from layoutopt.errors import GraphError
from layoutopt.graph import Phase

__all__ = ["Joint", "graph_dtype", "translate_joint"]

_MOST_PLACES = 3
_DTYPES = {"float32": "float32", "int64": "int32", "int32": "int32", "int16": "int32", "uint8": "int32", "bool": "bool"}


@dataclass
class Joint:
    """A traced step, or a traced forward pass.

    Attributes:
        graph: fx graph that returns the outputs, then one gradient (or None) per name in ``trainable``.
        inputs: batch entry by position among the graph's placeholders.
        parameters: parameter name by position; a tied parameter stands at several.
        constants: known tensor by position (buffers).
        outputs: names of what it gives; of a step the first is the loss.
        trainable: parameters that gradients were asked for.
        shapes: of the parameters, by name.
        dropouts: modules whose dropout was set to 0 while tracing.
        forward: it is a forward pass alone.
    """

    graph: Any = None
    inputs: dict[int, str] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dropouts: list[str] = field(default_factory=list)
    forward: bool = False


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
    split = len(joint.outputs)
    phases: dict[Any, Phase] = (
        dict.fromkeys(_ancestors(results), "forward") if joint.forward else _phases(results[:split])
    )
    env: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    walk = _Walk(b, env, known, phases)
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
            b.context = walk.context(node)
            if not fold(node, known):
                env[node] = walk.call(node)
    walk.check()
    for name, result in zip(joint.outputs, results[:split], strict=True):
        b.context = Context(name, phases[result], name)
        b.name(walk.value(result), name, "output")
    gradients: dict[str, str | None] = {}
    for parameter, result in zip(joint.trainable, results[split:], strict=True):
        b.context = Context(f"grad:{parameter}", "backward", parameter.rpartition(".")[0])
        gradients[parameter] = None if result is None else f"grad:{parameter}"
        if result is not None:
            b.name(walk.value(result), f"grad:{parameter}", "gradient", parameter)
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


class _Walk:
    """What is known of each node on the way: its value in the graph, or its number."""

    def __init__(
        self, b: GraphBuilder, env: dict[Any, Any], known: dict[Any, Any], phases: Mapping[Any, Phase]
    ) -> None:
        self.b, self.env, self.known, self.phases = b, env, known, phases
        self.made: dict[Any, Value] = {}
        self.refused: dict[tuple[str, str], list[tuple[str, Context]]] = {}

    def context(self, node: Any) -> Context:
        """Where a node came from."""
        source = (node.meta.get("custom") or {}).get("source", "")
        return Context(node.name, self.phases.get(node, "backward"), source)

    def call(self, node: Any) -> Any:
        """The value of a call; where it is not supported that is noted, and a stand-in given."""
        if node.target is operator.getitem:
            return self.env[node.args[0]][node.args[1]]
        try:
            return self.translated(node)
        except GraphError as error:
            shapes = aten.describe_args([self.mapped(a) for a in node.args])
            self.refused.setdefault((str(node.target), str(error)), []).append((shapes, self.b.context))
            val = node.meta["val"]
            return (
                [self._stand_in(node, v) for v in val] if isinstance(val, (tuple, list)) else self._stand_in(node, val)
            )

    def translated(self, node: Any) -> Any:
        """The ops of a call."""
        target, val = str(node.target), node.meta["val"]
        args = [self.mapped(a) for a in node.args]
        kwargs = {k: self.mapped(a) for k, a in node.kwargs.items()}
        many = isinstance(val, (tuple, list))
        outs = [
            None if v is None else aten.Out(tuple(v.shape), graph_dtype(v, "the result"))
            for v in (val if many else [val])
        ]
        return aten.translate(self.b, target, outs if many else outs[0], args, kwargs)

    def mapped(self, arg: Any) -> Any:
        """An argument with its nodes replaced by their values."""
        if isinstance(arg, (tuple, list)):
            return [self.mapped(a) for a in arg]
        return self.value(arg) if hasattr(arg, "all_input_nodes") else arg

    def value(self, node: Any) -> Value | Const:
        """The value of a node; what is known is a constant that can also be calculated."""
        if node not in self.known:
            return self.env[node]
        found = aten.constant(self.known[node].numpy())
        calculated = node.op == "call_function" and node.target is not operator.getitem
        return Const(found.array, lambda: self._make(node, found)) if calculated else found

    def _make(self, node: Any, found: Const) -> Value:
        """Ops that calculate what is known, so that the graph's file need not hold it; the constant where none can."""
        if node not in self.made:
            before, self.b.context = self.b.context, self.context(node)
            try:
                self.made[node] = self.b.materialise(self.translated(node))
            except GraphError:
                self.made[node] = self.b.materialise(found)
            self.b.context = before
        return self.made[node]

    def _stand_in(self, node: Any, val: Any) -> Value | None:
        if val is None:
            return None
        dtype = _DTYPES.get(str(val.dtype).removeprefix("torch."), "float32")
        name = f"unsupported {node.name}"
        while name in self.b.tensors:
            name += "+"
        return self.b.tensor(name, tuple(val.shape), dtype)

    def check(self) -> None:
        """Refuse the step, if any of it was.

        Raises:
            GraphError: with all that is not supported, how often it occurs and where.
        """
        lines = []
        # The gradient of what is refused is no news.
        told = {c.source for uses in self.refused.values() for _, c in uses if c.phase != "backward"}
        for (target, reason), all_uses in self.refused.items():
            uses = [(s, c) for s, c in all_uses if c.phase != "backward" or c.source not in told]
            if not uses:
                continue
            places = list(dict.fromkeys(c.source or "the model" for _, c in uses))
            where = ", ".join(places[:_MOST_PLACES]) + (
                f" and {len(places) - _MOST_PLACES} more" if places[_MOST_PLACES:] else ""
            )
            times = f" ({len(uses)} times)" if len(uses) > 1 else ""
            lines.append(f"{target} on {uses[0][0]} in {where}{times}: {reason}")
        if len(lines) == 1:
            raise GraphError(lines[0])
        if lines:
            raise GraphError("\n  ".join([f"{len(lines)} operations of this step are not supported:", *lines]))


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
