"""Capturing a training step of a torch module as a TrainingGraph.

``torch.export`` (non-strict) records the forward pass and the loss; running that recording under autograd and
``make_fx`` on fake tensors gives one ATen graph with the backward pass, in which every node knows the module it came
from; what is known at capture is calculated; the rest is translated by ``layoutopt.aten``. No weight is computed with.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layoutopt.capture_build import GraphBuilder
from layoutopt.capture_open import OPENED
from layoutopt.capture_translate import Joint, graph_dtype, translate_joint
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import AXES, leading_axes
from layoutopt.optimizers import Optimizer, append_updates, optimizer_meta

__all__ = ["capture"]

Batch = Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]
LossFn = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]

_KEPT = {
    *("native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward", "embedding_dense_backward"),
    *("gelu_backward", "tanh_backward", "sigmoid_backward", "silu", "silu_backward", "threshold_backward", "square"),
    *("select_backward", "slice_backward", "select_scatter", "baddbmm", "native_dropout"),
}
"""ATen ops that the graph's kinds express whole, so that torch need not take them apart."""

_FILLS = ("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_full", "new_zeros", "new_ones")
_MAX_FOLDED_ELEMS = 1 << 24


def capture(
    module: nn.Module,
    batch: Batch,
    *,
    loss: LossFn | None = None,
    optimizer: Optimizer | None = None,
    name: str = "",
    dropout: bool = False,
    keep_grads: bool = False,
    batch_axes: Mapping[str, int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> TrainingGraph:
    """One training step of ``module`` as a graph.

    Args:
        module: any module in float32; its parameters may be real, on the meta device or fake (then their initial values
            come from rules, see ``Tensor.init``). Its buffers must be real. It is left as it was found.
        batch: example inputs by name, or a tuple; only shapes and types matter. Integers become int32.
        loss: ``(module, batch) -> (scalar loss, outputs)`` with outputs a tensor, a tuple or a dict; by default the
            module is called with the batch by name and gives ``.loss`` and ``.logits`` (Hugging Face).
        optimizer: the update to append; None captures forward, loss and backward.
        name: the graph's name; the module's class by default.
        dropout: leave dropout as the module has it (the graph then has the int32 input "seed", to be changed from step
            to step); else it is off, and ``meta["dropout_set_to_zero"]`` lists where it would have been.
        keep_grads: list the gradients among the graph's outputs, so that no pass removes them.
        batch_axes: the axis that holds the samples, by input; inputs that hold none are left out. By default it is the
            first axis of all inputs whose first extent is the most common one.
        meta: more entries for ``graph.meta``.

    Returns:
        A graph whose outputs are the loss ("loss") and what the loss function returned beside it ("logits").

    Raises:
        GraphError: an operation or a use of one that layoutopt does not know, with its shapes and module path.
    """
    if loss is None and not isinstance(batch, Mapping):
        raise GraphError("a batch given as a tuple needs a loss function: capture(module, batch, loss=...)")
    keys = list(batch) if isinstance(batch, Mapping) else [f"input_{i}" for i in range(len(batch))]
    tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    for key, tensor in zip(keys, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(f"batch entry {key!r} is a {type(tensor).__name__}, expected a tensor")
    inits = _initial_rules(module)
    joint = _trace(module, keys, tensors, loss, isinstance(batch, Mapping), dropout)
    b = GraphBuilder()
    found = translate_joint(b, joint, inits, _fold)
    gradients = {p: g for p, g in found.items() if g is not None}
    if optimizer is not None:
        append_updates(b, optimizer, gradients)
    kept = ("loss", *joint.outputs, *(gradients.values() if keep_grads or optimizer is None else ()))
    b.prune(kept)
    shapes = {key: tuple(t.shape) for key, t in zip(keys, tensors, strict=True)}
    info = {
        "model": type(module).__name__,
        "batch": {k: {"shape": list(t.shape), "dtype": graph_dtype(t, k)} for k, t in zip(keys, tensors, strict=True)},
        AXES: dict(leading_axes(shapes) if batch_axes is None else batch_axes),
        "optimizer": optimizer_meta(optimizer),
        "dropout_set_to_zero": joint.dropouts,
        "without_gradient": [p for p, g in found.items() if g is None],
        "versions": {"torch": str(torch.__version__)},
        **(meta or {}),
    }
    return TrainingGraph(name or type(module).__name__, b.tensors, b.ops, kept, b.constants, info)


# ---- tracing --------------------------------------------------------------------------------------------------------


class _Step(nn.Module):
    """The module and its loss as one function of tensors."""

    def __init__(self, model: nn.Module, keys: list[str], loss: LossFn | None, named: bool) -> None:
        super().__init__()
        self.model, self._keys, self._loss, self._named = model, keys, loss, named
        # Not a list: torch.export puts lists and dicts among a module's attributes back as they were.
        self.report = Joint()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch: Any = dict(zip(self._keys, tensors, strict=True)) if self._named else tensors
        if self._loss is not None:
            value, result = self._loss(self.model, batch)
        else:
            out = self.model(**batch)
            value, result = getattr(out, "loss", None), {"logits": getattr(out, "logits", None)}
            if value is None or result["logits"] is None:
                raise GraphError(
                    f"{type(self.model).__name__} returned no loss and logits for the batch entries "
                    f"{', '.join(self._keys)}: add labels, or pass loss="
                )
        if isinstance(result, torch.Tensor):
            result = {"output": result}
        elif not isinstance(result, Mapping):
            result = {f"output_{i}": r for i, r in enumerate(result)}
        if value.numel() != 1:
            raise GraphError(f"the loss has shape {tuple(value.shape)}, expected a scalar")
        self.report.outputs = list(result)
        return (value.reshape(()), *(r.detach() for r in result.values()))


def _trace(
    module: nn.Module, keys: list[str], tensors: list[torch.Tensor], loss: LossFn | None, named: bool, dropout: bool
) -> Joint:
    """The joint ATen graph of a step."""
    found = Joint(shapes={n: tuple(p.shape) for n, p in module.named_parameters()})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = _Step(module, keys, loss, named)
    with _prepared(module, mode), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own deprecated pieces
        with mode:
            example = tuple(torch.empty(t.shape, dtype=t.dtype) for t in tensors)
        names = {id(p): n for n, p in module.named_parameters()}
        by_path = {f"model.{n}": names[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
        with _told(module):
            exported = torch.export.export(step, example, strict=False)
            if _writes(exported.graph):
                exported = exported.run_decompositions({})
    found.outputs = step.report.outputs
    flat, first = _bind(found, exported, keys, by_path, mode)
    found.trainable = [n for n in dict.fromkeys(found.parameters.values()) if n not in frozen]
    for name in found.trainable:
        flat[first[name]].requires_grad_()
    recording = exported.graph_module
    _annotate(recording.graph, type(module).__name__)
    found.dropouts = [] if dropout else _without_dropout(recording.graph)

    def joint(*values: torch.Tensor) -> tuple[Any, ...]:
        # A tied parameter is one leaf, whatever number of names it is read under.
        full = [values[first[found.parameters[i]]] if i in found.parameters else v for i, v in enumerate(values)]
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
    found: Joint, exported: Any, keys: list[str], by_path: Mapping[str, str], mode: FakeTensorMode
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


def _without_dropout(graph: torch.fx.Graph) -> list[str]:
    """Set every dropout's probability to 0; gives the module paths of those that had another."""
    stopped = []
    for node in graph.nodes:
        at, key = _RATES.get(node.meta.get("opened", ""), (0, ""))
        rate = node.kwargs.get(key, node.args[at] if 0 < at < len(node.args) else 0.0)
        if rate:
            node.args = tuple(0.0 if i == at else a for i, a in enumerate(node.args))
            node.kwargs = {k: 0.0 if k == key else a for k, a in node.kwargs.items()}
            stopped.append(node.meta["custom"]["source"])
    return list(dict.fromkeys(stopped))


@contextmanager
def _prepared(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """The module in training mode with fake parameters."""
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
        module.train()
        for owner, key, parameter in held:
            owner._parameters[key] = fakes[id(parameter)]
        yield
    finally:
        for owner, key, parameter in held:
            owner._parameters[key] = parameter
        for m, training in modes.items():
            m.training = training


# ---- constants ------------------------------------------------------------------------------------------------------


def _fold(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """Calculate the node now if nothing it depends on changes from step to step."""
    target = str(node.target).split(".")
    val = node.meta.get("val")
    if target[-2:-1] and target[-2] in _FILLS and isinstance(val, torch.Tensor):
        kind = target[-2]
        fill = 0 if "zeros" in kind else 1 if "ones" in kind else node.args[-1]
        if isinstance(fill, (bool, int, float)):
            known[node] = torch.full((), fill, dtype=val.dtype).expand(val.shape)
            return True
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if random or any(n not in known for n in node.all_input_nodes):
        return False
    sizes = [v.numel() for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]
    if max(sizes, default=0) > _MAX_FOLDED_ELEMS:
        return False
    args = torch.fx.node.map_arg(node.args, known.__getitem__)
    kwargs = torch.fx.node.map_arg(dict(node.kwargs), known.__getitem__)
    known[node] = cast(Any, node.target)(*args, **kwargs)
    return True


# ---- initial values -------------------------------------------------------------------------------------------------


def _initial_rules(module: nn.Module) -> dict[str, str]:
    """How each parameter starts (``Tensor.init``): measured where it is real, else by the owner's usual rule."""
    spread = getattr(getattr(module, "config", None), "initializer_range", None)
    rules: dict[str, str] = {}
    for path, owner in module.named_modules():
        for key, p in owner.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            # The second factor of a low-rank adapter starts at 0, so that training starts from the model as it was.
            second = ".lora_B." in name and (p.is_meta or isinstance(p, FakeTensor))
            rules[name] = "zeros" if second else _rule(owner, key, p, spread)
    return rules


def _rule(owner: nn.Module, key: str, p: torch.Tensor, spread: float | None) -> str:
    if not (p.is_meta or isinstance(p, FakeTensor)):
        low, high = p.min().item(), p.max().item()
        if low == high:
            return {0.0: "zeros", 1.0: "ones"}.get(low, f"constant:{low:.9g}")
        return f"normal:{p.detach().square().mean().sqrt().item():.3g}"
    if key.endswith("bias"):
        return "zeros"
    if "Norm" in type(owner).__name__:
        return "ones"
    if spread is None:
        # torch's own: Linear and convolutions are uniform within 1/sqrt(fan_in), embeddings are normal.
        spread = 1.0 if isinstance(owner, nn.Embedding) or p.dim() < 2 else (3 * p[0].numel()) ** -0.5
    return f"normal:{spread:.3g}"
