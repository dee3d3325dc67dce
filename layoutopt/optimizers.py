"""Optimizer updates as ops of the graph: SGD with momentum and AdamW, by torch's rules.

Each parameter gets one pointwise op of phase "update" that writes the parameter and its state in place. What changes
from step to step (the learning rate, Adam's bias corrections) are scalar inputs of the graph, so that one captured step
serves a whole training run; :func:`hyper_values` calculates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import sqrt
from typing import Any
from zlib import crc32

import numpy as np

from layoutopt.capture_build import GraphBuilder, Prog
from layoutopt.capture_random import NO_DROPOUT, SEED
from layoutopt.errors import GraphError
from layoutopt.graph import Expr, Op, Operand, TrainingGraph
from layoutopt.view import View

__all__ = [
    "AdamW",
    "Optimizer",
    "Sgd",
    "append_updates",
    "evaluation_values",
    "has_dropout",
    "hyper_values",
    "optimizer_from",
    "optimizer_meta",
    "step_values",
]

NoDecay = Callable[[str], bool]


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, as ``torch.optim.SGD`` (dampening 0, no Nesterov).

    Attributes:
        lr: learning rate where a step gives none.
        momentum: 0 keeps no state.
        weight_decay: added to the gradient, times the parameter.
        no_decay: parameters (by name) that do not decay.
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    no_decay: NoDecay | None = None


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as ``torch.optim.AdamW``.

    Attributes:
        lr: learning rate where a step gives none.
        beta1: decay of the mean gradient.
        beta2: decay of the mean squared gradient.
        eps: added to the denominator.
        weight_decay: shrinks the parameter by ``lr * weight_decay`` each step.
        no_decay: parameters (by name) that do not decay.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: NoDecay | None = None


Optimizer = Sgd | AdamW
_NAMES: dict[str, type[Sgd] | type[AdamW]] = {"sgd": Sgd, "adamw": AdamW}


def optimizer_from(description: str | Mapping[str, Any] | Optimizer | None) -> Optimizer | None:
    """An optimizer from its name, from a graph's ``meta["optimizer"]``, or itself; None (or "none") stays None.

    Raises:
        GraphError: no such optimizer or setting.
    """
    if description is None or description == "none" or isinstance(description, (Sgd, AdamW)):
        return None if description == "none" else description  # type: ignore[return-value]
    settings: dict[str, Any] = {"name": description} if isinstance(description, str) else dict(description)
    name = str(settings.pop("name", ""))
    if name not in _NAMES:
        raise GraphError(f"unknown optimizer {name!r}: expected one of {', '.join(_NAMES)}, or none")
    unknown = set(settings) - {f.name for f in fields(_NAMES[name])}
    if unknown:
        raise GraphError(f"optimizer {name} has no setting {', '.join(sorted(unknown))}")
    return _NAMES[name](**settings)


def optimizer_meta(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """What ``meta["optimizer"]`` of a graph holds: name and numbers."""
    if optimizer is None:
        return None
    name = "sgd" if isinstance(optimizer, Sgd) else "adamw"
    numbers = {f.name: getattr(optimizer, f.name) for f in fields(optimizer) if f.name != "no_decay"}
    return {"name": name, **numbers}


def hyper_values(
    optimizer: Optimizer | Mapping[str, Any] | None, step: int, lr: float | None = None
) -> dict[str, np.ndarray]:
    """The graph's scalar inputs at one step.

    Args:
        optimizer: an optimizer, or a graph's ``meta["optimizer"]``; None gives no values.
        step: counted from 1.
        lr: learning rate; the optimizer's own by default.

    Returns:
        float32 arrays of shape () by input name.

    Raises:
        GraphError: a step before the first.
    """
    optimizer = optimizer_from(optimizer)
    if optimizer is None:
        return {}
    if step < 1:
        raise GraphError(f"optimizer step {step}: steps count from 1")
    values = {"lr": optimizer.lr if lr is None else lr}
    if isinstance(optimizer, AdamW):
        values["bias_correction1"] = 1 - optimizer.beta1**step
        values["bias_correction2_sqrt"] = sqrt(1 - optimizer.beta2**step)
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def step_values(graph: TrainingGraph, step: int, lr: float | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """All scalar inputs of one step: those of :func:`hyper_values`, and the seed of its dropout where it has any.

    Args:
        graph: whose ``meta["optimizer"]`` says how.
        step: counted from 1; each has random numbers of its own.
        lr: learning rate; the optimizer's own by default.
        seed: of the run.
    """
    values = hyper_values(graph.meta.get("optimizer"), step, lr)
    if has_dropout(graph):
        mixed = crc32(f"{seed}:{step}".encode())
        signed = mixed - (mixed >> 31 << 32)
        values[SEED] = np.asarray(0 if signed == NO_DROPOUT else signed, np.int32)
    return values


def evaluation_values(graph: TrainingGraph) -> dict[str, np.ndarray]:
    """Scalar inputs for a forward pass that updates nothing and drops nothing."""
    values = hyper_values(graph.meta.get("optimizer"), 1)
    if has_dropout(graph):
        values[SEED] = np.asarray(NO_DROPOUT, np.int32)
    return values


def has_dropout(graph: TrainingGraph) -> bool:
    """Whether a step draws random numbers, and so takes a seed."""
    tensor = graph.tensors.get(SEED)
    return tensor is not None and (tensor.role, tensor.shape, tensor.dtype) == ("input", (), "int32")


def append_updates(b: GraphBuilder, optimizer: Optimizer, gradients: Mapping[str, str]) -> None:
    """Write the update of every parameter.

    Args:
        b: the graph being built.
        optimizer: what to write.
        gradients: gradient tensor by parameter name, of the parameter's shape.
    """
    names = list(hyper_values(optimizer, 1))
    for name in names:
        b.tensor(name, (), "float32", "input")
    states = _states(optimizer)
    for parameter, gradient in gradients.items():
        shape = b.tensors[parameter].shape
        kept = [f"{parameter}.{state}" for state in states]
        for name in kept:
            b.tensor(name, shape, "float32", "state", init="zeros", of=parameter)
        written = [parameter, *kept]
        outputs = []
        for name in written:
            b.tensor(f"new:{name}", shape, "float32", of=parameter)
            outputs.append(Operand(f"new:{name}"))
        spread = View().then(("reshape", (1,) * len(shape)), ("expand", shape)).simplified(())
        inputs = [Operand(parameter), Operand(gradient), *map(Operand, kept), *(Operand(n, spread) for n in names)]
        decays = optimizer.weight_decay if not (optimizer.no_decay and optimizer.no_decay(parameter)) else 0.0
        expr = _adamw(optimizer, decays) if isinstance(optimizer, AdamW) else _sgd(optimizer, decays)
        aliases = ((0, 0), *((1 + i, 2 + i) for i in range(len(kept))))
        b.ops.append(
            Op(
                f"update:{parameter}",
                "pointwise",
                tuple(inputs),
                tuple(outputs),
                {"expr": expr},
                "update",
                parameter.rpartition(".")[0],
                aliases,
            )
        )


def _states(optimizer: Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, AdamW):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if optimizer.momentum else ()


def _sgd(o: Sgd, decay: float) -> Expr:
    """``buffer = momentum*buffer + g + decay*p``; ``p -= lr*buffer`` (a buffer of zeros is torch's first step)."""
    p, param, grad = Prog(), ("x", 0), ("x", 1)
    direction = p("add", grad, p("mul", ("c", float(decay)), param)) if decay else grad
    if not o.momentum:
        new = p("sub", param, p("mul", ("x", 2), direction))
        return Expr(tuple(p.code), (new,))
    buffer = p("add", p("mul", ("c", float(o.momentum)), ("x", 2)), direction)
    new = p("sub", param, p("mul", ("x", 3), buffer))
    return Expr(tuple(p.code), (new, buffer))


def _adamw(o: AdamW, decay: float) -> Expr:
    """Adam's means ``m = b1*m + (1-b1)*g`` and ``v = b2*v + (1-b2)*g²``, then, with the bias corrections c1 and c2,
    ``p = p*(1 - lr*decay) - lr/c1 * m / (sqrt(v)/c2 + eps)``.
    """
    p, param, grad, lr = Prog(), ("x", 0), ("x", 1), ("x", 4)
    m = p("add", p("mul", ("c", o.beta1), ("x", 2)), p("mul", ("c", 1 - o.beta1), grad))
    v = p("add", p("mul", ("c", o.beta2), ("x", 3)), p("mul", ("c", 1 - o.beta2), p("mul", grad, grad)))
    denominator = p("add", p("div", p("sqrt", v), ("x", 6)), ("c", o.eps))
    shrunk = p("mul", param, p("sub", ("c", 1.0), p("mul", lr, ("c", float(decay))))) if decay else param
    new = p("sub", shrunk, p("mul", p("div", lr, ("x", 5)), p("div", m, denominator)))
    return Expr(tuple(p.code), (new, m, v))
