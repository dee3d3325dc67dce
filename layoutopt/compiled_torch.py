"""What ``compile`` needs of torch: examples as tensors, the loss of a module, its state dict, its optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from layoutopt.capture import Batch, capture
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import AdamW, Optimizer, Sgd, optimizer_from

__all__ = [
    "Names",
    "as_example",
    "capture_step",
    "initial_of",
    "optimizer_of",
    "optimizer_state",
    "read_optimizer_state",
    "read_safetensors",
    "save_tensors",
    "state_dict_of",
    "values_from",
    "write_to",
]


# ---- capturing ------------------------------------------------------------------------------------------------------


def as_example(batch: Any) -> Batch:
    """A batch as tensors: a mapping by name, else a tuple in the module's order.

    Raises:
        GraphError: an entry that is no array.
    """
    if isinstance(batch, Mapping):
        return {str(name): _tensor(str(name), value) for name, value in batch.items()}
    entries = batch if isinstance(batch, tuple | list) else (batch,)
    return tuple(_tensor(f"input_{i}", value) for i, value in enumerate(entries))


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        tensor = torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise GraphError(f"entry {name!r} of the example batch is a {kind}: give tensors or arrays") from error
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def capture_step(
    module: nn.Module,
    example: Batch,
    *,
    loss: Any = None,
    optimizer: Optimizer | None,
    dropout: bool = False,
    batch_axes: Mapping[str, int] | None = None,
    name: str = "",
    keep_outputs: bool = True,
) -> TrainingGraph:
    """A module's step, whose loss comes from ``loss`` or from what the module returns: see :func:`_result`."""

    def result(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        found, beside = _result(model, batch, loss)
        return found, beside if keep_outputs else {}

    return capture(
        module,
        example,
        loss=result,
        optimizer=optimizer,
        dropout=dropout,
        batch_axes=batch_axes,
        name=name,
    )


def _result(model: nn.Module, batch: Any, loss: Callable[..., Any] | None) -> tuple[torch.Tensor, Any]:
    """The loss, and what is kept beside it.

    A module gives an object with ``.loss`` (Hugging Face; its ``.logits`` are kept, or whatever ends in "logits"), a
    dict with "loss", a scalar, or a tuple that begins with one. A loss function gives a scalar, or (scalar, outputs).
    """
    out = loss(model, batch) if loss else model(**batch) if isinstance(batch, Mapping) else model(*batch)
    beside: Any = {}
    if isinstance(out, torch.Tensor):
        found = out
    elif isinstance(out, tuple) and not hasattr(out, "_asdict") and out:
        found, rest = out[0], out[1:]
        whole = rest[0] if len(rest) == 1 else rest
        beside = whole if loss else {f"output_{i}": t for i, t in enumerate(rest) if isinstance(t, torch.Tensor)}
    else:
        entries = dict(out) if isinstance(out, Mapping) else out._asdict() if hasattr(out, "_asdict") else vars(out)
        found = entries.get("loss")
        beside = {k: v for k, v in entries.items() if k.endswith("logits") and isinstance(v, torch.Tensor)}
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        got = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else "none"
        entries = ", ".join(batch) if isinstance(batch, Mapping) else f"{len(batch)} tensors"
        where = "the loss function" if loss else type(model).__name__
        raise GraphError(
            f"{where} gave no scalar loss for the batch ({entries}; loss: {got}): add labels, or pass "
            "loss=lambda module, batch: ..."
        )
    return found, beside


# ---- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """A module's parameters under all their names.

    Attributes:
        first: the first name of a parameter by each of its names: tied ones have several.
        buffers: names of what else is in the state dict.
    """

    first: dict[str, str]
    buffers: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """Of a module."""
        by_id = {id(p): name for name, p in module.named_parameters()}
        first = {name: by_id[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        return cls(first, tuple(name for name in module.state_dict() if name not in first))


def initial_of(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters' values; those on the meta device or fake have none.

    Raises:
        GraphError: a value that is not finite.
    """
    values = {}
    for name, p in module.named_parameters():
        if p.is_meta or isinstance(p, FakeTensor):
            continue
        bad = int((~torch.isfinite(p.detach())).sum())
        if bad:
            raise GraphError(f"parameter {name!r} holds {bad} NaN or infinite values: load other weights first")
        values[name] = p.detach().cpu().numpy()
    return values


def state_dict_of(module: nn.Module, read: Callable[[str], np.ndarray]) -> dict[str, torch.Tensor]:
    """The module's state dict with values from elsewhere; tied names share one tensor.

    Args:
        module: whose names and buffers.
        read: the value of a parameter by its first name.
    """
    names = Names.of(module)
    made: dict[str, torch.Tensor] = {}
    state = module.state_dict()
    for name, value in state.items():
        first = names.first.get(name)
        if first is None:
            state[name] = value.detach().clone()
            continue
        if first not in made:
            made[first] = torch.from_numpy(np.array(read(first), np.float32))
        state[name] = made[first]
    return state


def values_from(module: nn.Module, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters by first name from a state dict: checked whole before anything is written.

    Raises:
        GraphError: a key is missing or unknown, a value has another shape, is not finite, or differs from its twin or
            from the buffer that was captured.
    """
    names = Names.of(module)
    held = module.state_dict()
    unknown = [name for name in state if name not in held]
    if unknown:
        raise GraphError(
            f"the state dict holds {unknown[0]!r} ({len(unknown)} such), which {type(module).__name__} does not have"
        )
    given = {names.first[name] for name in state if name in names.first}
    missing = [n for n in held if n not in state and names.first.get(n) not in given]
    if missing:
        raise GraphError(
            f"the state dict lacks {missing[0]!r} ({len(missing)} such), which {type(module).__name__} needs"
        )
    values: dict[str, np.ndarray] = {}
    for name, value in state.items():
        tensor = torch.as_tensor(value).detach().cpu()
        if tensor.shape != held[name].shape:
            raise GraphError(f"{name!r} has the shape {list(tensor.shape)}, expected {list(held[name].shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise GraphError(f"{name!r} of the state dict holds NaN or infinite values: use another")
        if name not in names.first:
            if not torch.equal(tensor.to(held[name].dtype), held[name].cpu()):
                raise GraphError(f"buffer {name!r} differs from the one that was captured: compile the module anew")
            continue
        first, array = names.first[name], tensor.float().numpy()
        if first in values and not np.array_equal(values[first], array):
            raise GraphError(f"{name!r} and {first!r} are one tied parameter, but the state dict holds two values")
        values[first] = array
    return values


def write_to(module: nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Set a module's parameters, by their first names."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in values:
                p.copy_(torch.from_numpy(np.array(values[name], np.float32)))


def save_tensors(state: Mapping[str, torch.Tensor], names: Names) -> dict[str, np.ndarray]:
    """What a safetensors file holds of a state dict: tied parameters under their first name alone."""
    return {n: t.cpu().numpy() for n, t in state.items() if names.first.get(n, n) == n}


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Every tensor of a file, or of the files in a folder that ``save_pretrained`` wrote.

    Raises:
        GraphError: no such file, or it is damaged.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise GraphError("reading weights needs safetensors: pip install 'layoutopt[examples]'") from error
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(Path(path)):
        if not file.is_file():
            raise GraphError(f"no weights at {file}: expected a safetensors file, or a folder with model.safetensors")
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise GraphError(f"{file} is not a safetensors file, or is damaged ({error})") from error
    return tensors


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors" if path.is_dir() else path]
    try:
        return [
            path / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        ]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise GraphError(f"{index} is damaged ({error}): expected the index of a model in several files") from error


# ---- optimizers -----------------------------------------------------------------------------------------------------

_KEPT = {AdamW: ("exp_avg", "exp_avg_sq"), Sgd: ("momentum",)}
_THEIRS = {"momentum": "momentum_buffer"}


def optimizer_of(given: Any, module: nn.Module) -> Optimizer:
    """Ours from a name, a mapping, ours, or a ``torch.optim.AdamW`` or ``SGD`` over the module's parameters.

    Of a torch optimizer the groups may differ in whether they decay, as those of Hugging Face's Trainer do.

    Raises:
        GraphError: another optimizer, or a setting that ours has not.
    """
    if not isinstance(given, torch.optim.Optimizer):
        found = optimizer_from(given)
        if found is None:
            raise GraphError("compile needs an optimizer: adamw, sgd, AdamW(...), Sgd(...) or a torch.optim optimizer")
        return found
    kind, groups = type(given), given.param_groups
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise GraphError(f"torch.optim.{kind.__name__} has no counterpart here: use AdamW or SGD")
    same = ("lr", "betas", "eps", "momentum")
    for key in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(group.get(key) for group in groups):
            raise GraphError(f"{kind.__name__}({key}=…) has no counterpart here: leave it out")
    if any(group.get(key) != groups[0].get(key) for group in groups for key in same):
        raise GraphError("parameter groups differ in more than their weight decay: one learning rate for all is known")
    decays = {float(group["weight_decay"]) for group in groups} - {0.0}
    if len(decays) > 1:
        raise GraphError(f"parameter groups have {len(decays)} weight decays: one beside 0 is known")
    names = {id(p): name for name, p in module.named_parameters()}
    listed = [p for group in groups for p in group["params"]]
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    if {id(p) for p in listed} != trained:
        raise GraphError("the optimizer is not over this module's trainable parameters: freeze what it leaves out")
    spared = {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
    decay, first = max(decays, default=0.0), groups[0]
    if kind is torch.optim.AdamW:
        (beta1, beta2), eps = first["betas"], float(first["eps"])
        return AdamW(float(first["lr"]), beta1, beta2, eps, decay, spared.__contains__)
    return Sgd(float(first["lr"]), float(first["momentum"]), decay, spared.__contains__)


def _theirs(optimizer: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer that does the same, to learn its groups and the order of its parameters."""
    spares = optimizer.no_decay or (lambda _: False)
    named = list(module.named_parameters())
    groups = [
        {"params": [p for n, p in named if spares(n) == spared], "weight_decay": 0.0 if spared else decay}
        for spared, decay in ((False, optimizer.weight_decay), (True, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(optimizer, AdamW):
        return torch.optim.AdamW(groups, optimizer.lr, (optimizer.beta1, optimizer.beta2), optimizer.eps)
    return torch.optim.SGD(groups, optimizer.lr, optimizer.momentum)


def _places(optimizer: Optimizer, module: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
    theirs = _theirs(optimizer, module)
    names = {id(p): name for name, p in module.named_parameters()}
    return theirs, [names[id(p)] for group in theirs.param_groups for p in group["params"]]


def _state_names(optimizer: Optimizer) -> tuple[str, ...]:
    return () if isinstance(optimizer, Sgd) and not optimizer.momentum else _KEPT[type(optimizer)]


def optimizer_state(
    optimizer: Optimizer, module: nn.Module, states: Mapping[str, np.ndarray], steps: int
) -> dict[str, Any]:
    """A ``state_dict`` that ``torch.optim.AdamW`` or ``SGD`` over the same groups loads.

    Args:
        optimizer: ours.
        module: whose parameters, in whose order.
        states: optimizer state by graph name (``weight.exp_avg``).
        steps: taken so far.
    """
    theirs, names = _places(optimizer, module)
    found = theirs.state_dict()
    for i, name in enumerate(names):
        kept = {key: states[f"{name}.{key}"] for key in _state_names(optimizer) if f"{name}.{key}" in states}
        if not kept:
            continue
        entry: dict[str, Any] = {_THEIRS.get(k, k): torch.from_numpy(np.array(v)) for k, v in kept.items()}
        found["state"][i] = entry | ({"step": torch.tensor(float(steps))} if isinstance(optimizer, AdamW) else {})
    return found


def read_optimizer_state(
    optimizer: Optimizer, module: nn.Module, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], int | None]:
    """The other way: states by graph name, and the steps taken where the optimizer counts them.

    Args:
        optimizer: ours.
        module: whose parameters, in whose order.
        given: as :func:`optimizer_state` or torch give it.
        shapes: of the states of the graph, by name.

    Raises:
        GraphError: it is of other parameters or another optimizer, or holds values that are not finite.
    """
    _, names = _places(optimizer, module)
    entries = given.get("state")
    if not isinstance(entries, Mapping):
        raise GraphError("this is no optimizer state dict: it has no 'state'")
    values: dict[str, np.ndarray] = {}
    steps: set[int] = set()
    for i, name in enumerate(names):
        for key in _state_names(optimizer):
            if f"{name}.{key}" not in shapes:
                continue
            entry = entries.get(i) or {}
            if entry.get(_THEIRS.get(key, key)) is None:
                raise GraphError(f"the optimizer state dict has no {_THEIRS.get(key, key)!r} of parameter {name!r}")
            value = torch.as_tensor(entry[_THEIRS.get(key, key)]).detach().cpu().float().numpy()
            if value.shape != shapes[f"{name}.{key}"] or not np.isfinite(value).all():
                raise GraphError(
                    f"{key!r} of parameter {name!r} in the optimizer state dict is unfit: of another model?"
                )
            values[f"{name}.{key}"] = value
            steps |= {int(entry["step"])} if "step" in entry else set()
    if len(steps) > 1:
        raise GraphError(f"the optimizer state dict counts {len(steps)} different numbers of steps: one is known here")
    return values, steps.pop() if steps else None
