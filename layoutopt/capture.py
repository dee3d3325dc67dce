"""Capturing a training step, or the forward pass alone, of a torch module as a TrainingGraph.

:mod:`layoutopt.capture_trace` gives one ATen graph in which every node knows the module it came from; what is known at
capture is calculated here; the rest is translated by ``layoutopt.aten``. No weight is computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from layoutopt.capture_build import GraphBuilder
from layoutopt.capture_trace import Batch, Example, LossFn, OutputsFn, trace_forward, trace_step
from layoutopt.capture_translate import graph_dtype, translate_joint
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import AXES, leading_axes
from layoutopt.optimizers import Optimizer, append_updates, optimizer_meta

__all__ = ["Batch", "LossFn", "OutputsFn", "capture", "capture_forward"]

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
    example = Example.of(batch)
    inits = _initial_rules(module)
    joint = trace_step(module, example, loss, dropout)
    b = GraphBuilder()
    found = translate_joint(b, joint, inits, _fold)
    gradients = {p: g for p, g in found.items() if g is not None}
    if optimizer is not None:
        append_updates(b, optimizer, gradients)
    kept = (*joint.outputs, *(gradients.values() if keep_grads or optimizer is None else ()))
    b.prune(kept)
    info = {
        **_batch_meta(module, example, batch_axes),
        "optimizer": optimizer_meta(optimizer),
        "dropout_set_to_zero": joint.dropouts,
        "without_gradient": [p for p, g in found.items() if g is None],
        **(meta or {}),
    }
    return TrainingGraph(name or type(module).__name__, b.tensors, b.ops, kept, b.constants, info)


def capture_forward(
    module: nn.Module,
    batch: Batch,
    *,
    outputs: OutputsFn | None = None,
    name: str = "",
    batch_axes: Mapping[str, int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> TrainingGraph:
    """The forward pass of ``module`` as a graph: no loss, no gradients, no dropout, the module as in evaluation.

    Args:
        module: as of :func:`capture`.
        batch: example inputs by name, or a tuple. Labels may be among them.
        outputs: ``(module, batch) -> tensors``, one tensor, a tuple or a dict by name; by default the module is called
            with the batch, and gives ``.logits`` or tensors.
        name: the graph's name; the module's class by default.
        batch_axes: as of :func:`capture`.
        meta: more entries for ``graph.meta``.

    Returns:
        A graph whose ops are all of phase "forward" and whose outputs are the tensors, in order. Parameters and inputs
        that none of them depends on are left out.

    Raises:
        GraphError: as :func:`capture`; or what is given is no tensor.
    """
    example = Example.of(batch)
    inits = _initial_rules(module)
    joint = trace_forward(module, example, outputs)
    b = GraphBuilder()
    translate_joint(b, joint, inits, _fold)
    b.prune(joint.outputs)
    used = {o.tensor for op in b.ops for o in op.operands} | set(joint.outputs)
    tensors = {n: t for n, t in b.tensors.items() if n in used}
    info = {**_batch_meta(module, example, batch_axes), "optimizer": None, "forward_only": True, **(meta or {})}
    for key in ("batch", AXES):
        info[key] = {name: value for name, value in info[key].items() if name in used}
    return TrainingGraph(name or type(module).__name__, tensors, b.ops, tuple(joint.outputs), b.constants, info)


def _batch_meta(module: nn.Module, example: Example, batch_axes: Mapping[str, int] | None) -> dict[str, Any]:
    entries = dict(zip(example.keys, example.tensors, strict=True))
    shapes = {key: tuple(t.shape) for key, t in entries.items()}
    return {
        "model": type(module).__name__,
        "batch": {k: {"shape": list(t.shape), "dtype": graph_dtype(t, k)} for k, t in entries.items()},
        AXES: dict(leading_axes(shapes) if batch_axes is None else batch_axes),
        "versions": {"torch": str(torch.__version__)},
    }


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
