"""Tracing a torch module: its forward pass, or a whole training step, as one ATen graph on fake tensors.

``torch.export`` (non-strict) records the forward pass (and the loss); running that recording under ``make_fx`` gives
the ATen graph; of a training step it runs under autograd, which adds the backward pass. Every node keeps the module it
came from.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layoutopt.capture_open import OPENED
from layoutopt.capture_translate import Joint
from layoutopt.errors import GraphError

__all__ = ["Batch", "Example", "LossFn", "OutputsFn", "trace_forward", "trace_step"]

Batch = Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]
LossFn = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]
OutputsFn = Callable[[nn.Module, Any], Any]
Named = list[tuple[str, Any]]

_KEPT = {
    *("native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward", "embedding_dense_backward"),
    *("gelu_backward", "tanh_backward", "sigmoid_backward", "silu", "silu_backward", "threshold_backward", "square"),
    *("select_backward", "slice_backward", "select_scatter", "baddbmm", "native_dropout"),
}
"""ATen ops that the graph's kinds express whole, so that torch need not take them apart."""


@dataclass(frozen=True)
class Example:
    """A batch to trace with: a name and a tensor per entry; ``named`` says whether the module is given a dict."""

    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    named: bool

    @classmethod
    def of(cls, batch: Batch) -> Example:
        """Of what a user gives.

        Raises:
            GraphError: an entry that is no tensor.
        """
        named = isinstance(batch, Mapping)
        entries = dict(batch) if isinstance(batch, Mapping) else {f"input_{i}": t for i, t in enumerate(batch)}
        for key, tensor in entries.items():
            if not isinstance(tensor, torch.Tensor):
                raise GraphError(f"batch entry {key!r} is a {type(tensor).__name__}, expected a tensor")
        return cls(tuple(entries), tuple(entries.values()), named)


def trace_step(module: nn.Module, example: Example, loss: LossFn | None, dropout: bool) -> Joint:
    """The joint ATen graph of a training step: its results are the loss, then what the loss function gives beside it.

    Args:
        module: in training mode meanwhile.
        example: batch.
        loss: as of ``capture``.
        dropout: leave it as the module has it; else it is off.

    Raises:
        GraphError: torch cannot trace it, or the loss depends on nothing that is trained.
    """
    step = _Traced(module, example, partial(_of_step, loss=loss))
    return _trace(module, step, example, training=True, dropout=dropout)


def trace_forward(module: nn.Module, example: Example, outputs: OutputsFn | None) -> Joint:
    """The ATen graph of a forward pass, as of ``capture_forward``; the module is in evaluation mode meanwhile.

    Raises:
        GraphError: torch cannot trace it.
    """
    step = _Traced(module, example, partial(_of_forward, outputs=outputs))
    return _trace(module, step, example, training=False, dropout=False)


class _Traced(nn.Module):
    """The module as a function of tensors that gives tensors, whose names it reports."""

    def __init__(self, model: nn.Module, example: Example, results: Callable[[nn.Module, Any], Named]) -> None:
        super().__init__()
        self.model, self._results = model, results
        self._keys, self._named = example.keys, example.named
        # Not a list: torch.export puts lists and dicts among a module's attributes back as they were.
        self.report = Joint()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = dict(zip(self._keys, tensors, strict=True)) if self._named else tensors
        found = self._results(self.model, batch)
        self.report.outputs = [name for name, _ in found]
        return tuple(result for _, result in found)


def _called(model: nn.Module, batch: Any) -> Any:
    """What the module itself gives for the batch."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _of_step(model: nn.Module, batch: Any, loss: LossFn | None) -> Named:
    """The loss, and what is given beside it."""
    if loss is not None:
        value, result = loss(model, batch)
    else:
        out = _called(model, batch)
        value, result = getattr(out, "loss", None), {"logits": getattr(out, "logits", None)}
        if value is None or result["logits"] is None:
            raise GraphError(
                f"{type(model).__name__} returned no loss and logits for the batch entries {', '.join(batch)}: "
                "add labels, or pass loss="
            )
    if value.numel() != 1:
        raise GraphError(f"the loss has shape {tuple(value.shape)}, expected a scalar")
    return [("loss", value.reshape(())), *((name, r.detach()) for name, r in _named(result))]


def _of_forward(model: nn.Module, batch: Any, outputs: OutputsFn | None) -> Named:
    """What is wanted of the module."""
    if outputs is not None:
        found = _named(outputs(model, batch))
    else:
        out = _called(model, batch)
        logits = getattr(out, "logits", None)
        found = _named(out if logits is None else {"logits": logits})
    wrong = [(name, r) for name, r in found if not isinstance(r, torch.Tensor)]
    if wrong or not found:
        got = f"{wrong[0][0]!r} as a {type(wrong[0][1]).__name__}" if wrong else "nothing"
        raise GraphError(f"{type(model).__name__} gave {got}, expected tensors: choose them with outputs=")
    return found


def _named(result: Any) -> Named:
    if isinstance(result, torch.Tensor):
        return [("output", result)]
    if isinstance(result, Mapping):
        return list(result.items())
    if isinstance(result, (tuple, list)):
        return [(f"output_{i}", r) for i, r in enumerate(result)]
    return [("output", result)]  # refused by whoever asked


def _trace(module: nn.Module, step: _Traced, example: Example, *, training: bool, dropout: bool) -> Joint:
    found = Joint(shapes={n: tuple(p.shape) for n, p in module.named_parameters()}, forward=not training)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _prepared(module, mode, training), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own deprecated pieces
        with mode:
            inputs = tuple(torch.empty(t.shape, dtype=t.dtype) for t in example.tensors)
        names = {id(p): n for n, p in module.named_parameters()}
        by_path = {f"model.{n}": names[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
        with _told(module):
            exported = torch.export.export(step, inputs, strict=False)
            if _writes(exported.graph):
                exported = exported.run_decompositions({})
    found.outputs = step.report.outputs
    flat, first = _bind(found, exported, example.keys, by_path, mode)
    recording = exported.graph_module
    _annotate(recording.graph, type(module).__name__)
    found.dropouts = [] if dropout else _without_dropout(recording.graph, training)
    if training:
        found.trainable = [n for n in dict.fromkeys(found.parameters.values()) if n not in frozen]
        for name in found.trainable:
            flat[first[name]].requires_grad_()

    def joint(*values: torch.Tensor) -> tuple[Any, ...]:
        # A tied parameter is one leaf, whatever number of names it is read under.
        full = [values[first[found.parameters[i]]] if i in found.parameters else v for i, v in enumerate(values)]
        if not training:
            with fx_traceback.preserve_node_meta(), torch.no_grad():
                return tuple(_Sourced(recording).run(*full))
        with fx_traceback.preserve_node_meta():
            value, *outs = _Sourced(recording).run(*full)
            if not value.requires_grad:
                raise GraphError(f"the loss of {type(module).__name__} does not depend on any trainable parameter")
            wanted = [values[first[n]] for n in found.trainable]
            grads = torch.autograd.grad(value, wanted, allow_unused=True)
        return (value, *outs, *grads)

    table = {k: v for k, v in core_aten_decompositions().items() if str(k).split(".")[1] not in _KEPT}
    with warnings.catch_warnings(), _told(module):
        warnings.simplefilter("ignore")
        found.graph = make_fx(joint, decomposition_table=table)(*flat).graph
    return found


@contextmanager
def _told(module: nn.Module) -> Iterator[None]:
    """Torch's refusals in one sentence, with torch's own words as the cause; what else it has to say is dropped."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    except (RuntimeError, ValueError, TypeError, UserError) as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "data-dependent" in words:
            words += " (a branch hangs on a tensor's value, as when whole layers are dropped at random: switch it off)"
        raise GraphError(f"torch cannot trace the step of {type(module).__name__} on this batch: {words}") from error
    finally:
        logging.disable(before)


def _bind(
    found: Joint, exported: Any, keys: Sequence[str], by_path: Mapping[str, str], mode: FakeTensorMode
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Fake arguments of the exported graph, and where each parameter first stands among them."""
    flat: list[torch.Tensor] = []
    first: dict[str, int] = {}
    left = iter(keys)
    nodes = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for i, (spec, node) in enumerate(zip(exported.graph_signature.input_specs, nodes, strict=True)):
        like = node.meta["val"]
        with mode:
            flat.append(torch.empty(like.shape, dtype=like.dtype))
        if spec.kind.name == "PARAMETER":
            found.parameters[i] = by_path[spec.target]
            first.setdefault(found.parameters[i], i)
        elif spec.kind.name == "USER_INPUT":
            found.inputs[i] = next(left)
        else:
            held = exported.state_dict.get(spec.target)
            held = exported.constants.get(spec.target) if held is None else held
            held = getattr(held, "constant", None) if isinstance(held, FakeTensor) else held
            if held is None or held.is_meta:
                raise GraphError(
                    f"buffer {spec.target.removeprefix('model.')} has no value: build the module with real buffers "
                    "(parameters may be fake)"
                )
            found.constants[i] = held.detach()
    return flat, first


class _Sourced(torch.fx.Interpreter):
    """Runs a recording; backward ops made by autograd learn the module whose forward op they belong to."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self._seen: set[Any] = set()
        self.extra_traceback = False  # torch would write the node behind our sentences

    def run_node(self, n: torch.fx.Node) -> Any:
        source = n.meta.get("custom", {}).get("source", "")
        try:
            result = super().run_node(n)
        except GraphError as error:
            raise GraphError(f"{n.meta.get('opened', n.target)} in {source}: {error}") from error
        many = result if isinstance(result, (tuple, list)) else [result]
        stack = [r.grad_fn for r in many if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        while stack:
            fn = stack.pop()
            if fn not in self._seen:
                self._seen.add(fn)
                fn.register_prehook(lambda *_: fx_traceback.current_meta.update(custom={"source": source}))
                stack += [f for f, _ in fn.next_functions if f is not None]
        return result


def _annotate(graph: torch.fx.Graph, top: str) -> None:
    """Write each node's module path where tracing carries it along, and open some operations up."""
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""
        node.meta["custom"] = {"source": path or top}
        if str(node.target) in OPENED:
            node.meta["opened"] = str(node.target)
            node.target = OPENED[str(node.target)]
        elif str(node.target) == "aten.view.default":
            # The products above leave other strides than torch's fused attention, under which this was a view.
            node.target = torch.ops.aten.reshape.default


def _writes(graph: torch.fx.Graph) -> bool:
    """Whether some op writes over its input: then the recording has to be made anew without."""
    calls = (n.target for n in graph.nodes if n.op == "call_function")
    return any(t._schema.is_mutable for t in calls if isinstance(t, torch._ops.OpOverload))


_RATES = {  # where each op that drops takes its probability
    "aten.dropout.default": (1, "p"),
    "aten.dropout_.default": (1, "p"),
    "aten.feature_dropout.default": (1, "p"),
    "aten.alpha_dropout.default": (1, "p"),
    "aten.feature_alpha_dropout.default": (1, "p"),
    "aten.native_dropout.default": (1, "p"),
    "aten.scaled_dot_product_attention.default": (4, "dropout_p"),
}


def _without_dropout(graph: torch.fx.Graph, training: bool) -> list[str]:
    """Set every dropout's probability to 0; gives the module paths of those that had another (none is on else)."""
    stopped = []
    for node in graph.nodes:
        at, key = _RATES.get(node.meta.get("opened", ""), (0, ""))
        rate = node.kwargs.get(key, node.args[at] if 0 < at < len(node.args) else 0.0)
        if rate:
            node.args = tuple(0.0 if i == at else a for i, a in enumerate(node.args))
            node.kwargs = {k: 0.0 if k == key else a for k, a in node.kwargs.items()}
            stopped.append(node.meta["custom"]["source"])
    return list(dict.fromkeys(stopped)) if training else []


@contextmanager
def _prepared(module: nn.Module, mode: FakeTensorMode, training: bool) -> Iterator[None]:
    """The module in training or evaluation mode with fake parameters."""
    modes = {m: m.training for m in module.modules()}
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    fakes: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter.dtype != torch.float32:
                raise GraphError(
                    f"parameter {path}.{key} is {parameter.dtype}: only float32 models are captured, use .float()"
                )
            held.append((owner, key, parameter))
            if id(parameter) not in fakes:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    try:
        module.train(training)
        for owner, key, parameter in held:
            owner._parameters[key] = fakes[id(parameter)]
        yield
    finally:
        for owner, key, parameter in held:
            owner._parameters[key] = parameter
        for m, training in modes.items():
            m.training = training
