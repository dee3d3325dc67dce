"""The optimizers of side networks: torch's own rules, on state that is saved by name.

The rules are called as functions. ``torch.optim``'s classes would do the same, and import torch's compiler for it: 70
MB and a second of processor time in every worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from layoutopt.side.task import Task

__all__ = ["PREFIX", "Optimizer"]

PREFIX = "optimizer."
"""Begins the names of the state in a checkpoint: ``optimizer.KIND.PARAMETER``."""

_KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}
_MOMENTUM = 0.9
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


class Optimizer:
    """AdamW, or SGD with momentum 0.9; matrices decay, gates, the mix and biases do not.

    Args:
        task: whose optimizer and weight decay to use.
        parameters: by name.
        values: of a checkpoint; without, the state starts at 0.
    """

    def __init__(
        self,
        task: Task,
        parameters: Mapping[str, torch.nn.Parameter],
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._task, self._parameters = task, dict(parameters)
        self._state = {
            name: {
                kind: torch.zeros_like(value)
                if values is None
                else torch.tensor(np.array(values[f"{PREFIX}{kind}.{name}"]), device=value.device)
                for kind in _KINDS[task.optimizer]
            }
            for name, value in self._parameters.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """The state by name, on the CPU in memory that the next step changes."""
        return {
            f"{PREFIX}{kind}.{name}": value.cpu().numpy()
            for name, kinds in self._state.items()
            for kind, value in kinds.items()
        }

    @torch.no_grad()
    def step(self, step: int, lr: float) -> None:
        """Apply the parameters' gradients.

        Args:
            step: how many were applied before.
            lr: learning rate.
        """
        matrices = [name for name, value in self._parameters.items() if value.ndim > 1]
        others = [name for name in self._parameters if name not in matrices]
        for names, decay in ((matrices, self._task.weight_decay), (others, 0.0)):
            self._apply(names, step, lr, decay)

    def _apply(self, names: list[str], step: int, lr: float, decay: float) -> None:
        values: list[torch.Tensor] = [self._parameters[n] for n in names]
        gradients = [g for g in (self._parameters[n].grad for n in names) if g is not None]
        assert len(gradients) == len(values), "every parameter has a gradient"
        # Tensor by tensor (foreach=False): in one order on every device.
        if self._task.optimizer == "sgd":
            buffers: list[torch.Tensor | None] = [self._state[n]["momentum"] for n in names]
            sgd(
                values,
                gradients,
                buffers,
                foreach=False,
                weight_decay=decay,
                momentum=_MOMENTUM,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        adamw(
            values,
            gradients,
            [self._state[n]["exp_avg"] for n in names],
            [self._state[n]["exp_avg_sq"] for n in names],
            [],
            [torch.tensor(float(step)) for _ in names],
            foreach=False,
            amsgrad=False,
            beta1=_BETA1,
            beta2=_BETA2,
            lr=lr,
            weight_decay=decay,
            eps=_EPS,
            maximize=False,
        )
