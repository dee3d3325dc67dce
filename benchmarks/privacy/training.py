"""The server's side of it: the side network, trained on what a device sent, and what it then says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from layoutopt.side.network import SideNetwork, loss_of
from layoutopt.side.task import Task
from layoutopt.side.weights import initial_weights

__all__ = ["trained"]

_BATCH = 32


def trained(
    states: np.ndarray, targets: np.ndarray, classes: int, steps: int, seed: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Train a side network on pivots.

    Args:
        states: float32 [taps, n, width], as they arrived.
        targets: int [n] for cross-entropy, float32 [n, c] for squared error.
        classes: numbers that targets [n] may have.
        steps: of 32 samples.
        seed: of weights and order.

    Returns:
        A function from states [taps, m, width] to the network's outputs [m, c].
    """
    labels = targets.ndim == 1
    task = Task(
        model="pivots",
        graph="none",
        width=states.shape[2],
        taps=tuple(f"tap {i}" for i in range(len(states))),
        format="float32",
        tokens="pivot",
        seq=0,
        batch=min(_BATCH, states.shape[1]),
        classes=classes if labels else targets.shape[1],
        mode="labels" if labels else "private",
        steps=steps,
        seed=seed,
    )
    network = SideNetwork(task, initial_weights(task))
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": task.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    taken = targets.astype(np.int32 if labels else np.float32)
    order = _orders(states.shape[1], task.batch, np.random.default_rng((seed, 1)))
    for _ in range(steps):
        pick = next(order)
        optimizer.zero_grad()
        loss_of(task, network([torch.from_numpy(tap[pick]) for tap in states]), taken[pick]).backward()
        optimizer.step()
        schedule.step()

    def outputs(these: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network([torch.from_numpy(np.ascontiguousarray(tap)) for tap in these]).numpy()

    return outputs


def _orders(n: int, batch: int, draw: np.random.Generator):
    while True:
        order = draw.permutation(n)
        yield from (order[begin : begin + batch] for begin in range(0, n - batch + 1, batch))
