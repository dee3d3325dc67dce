"""A side network's weights without torch: their names and shapes, how they start, and the file that holds them.

With taps A_0 … A_L and a rank r::

    S_i = (1 - sigmoid(gate_i)) * A_i + sigmoid(gate_i) * h_(i-1)        i = 1 … L; S_0 = A_0
    h_i = S_i + gelu(S_i @ down_i) @ up_i                                i = 0 … L; gelu with erf
    out = (1 - mix) * A_L + mix * h_L
    x   = out's pooled token; with a pooler: tanh(x @ pooler.weight.T + pooler.bias)
    result = x @ classifier.weight.T + classifier.bias

``up_i`` and ``mix`` start at 0: at step 0 the head sees what the backbone gives. In the first step only ``mix`` and the
head have a gradient; from then on all have. In mode "private" the classifier starts at 0 too, and so does the result:
a correction of probabilities that the device adds to its backbone's own.

The file is safetensors, with these names, float32, and in its metadata the task (JSON) and the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.needs import need
from layoutopt.side.task import Task

__all__ = ["SideWeights", "check_weights", "initial_weights", "pack", "unpack", "weight_shapes"]

FORMAT = "side network 1"
_LARGEST = 1e15
_FRESH_STD = 0.02  # of heads, as BERT's own


@dataclass(frozen=True, eq=False)
class SideWeights:
    """A side network as it is handed out.

    Attributes:
        task: that it was trained for.
        steps: that it was trained.
        values: float32 arrays by name.
    """

    task: Task
    steps: int
    values: dict[str, np.ndarray]


def weight_shapes(task: Task) -> dict[str, tuple[int, ...]]:
    """Shapes of a task's weights by name, in the order in which they are applied."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(len(task.taps)):
        if i:
            shapes[f"adapters.{i}.gate"] = (1,)
        shapes[f"adapters.{i}.down"] = (task.width, task.rank)
        shapes[f"adapters.{i}.up"] = (task.rank, task.width)
    shapes["mix"] = (1,)
    if task.pooler:
        shapes["pooler.weight"] = (task.width, task.width)
        shapes["pooler.bias"] = (task.width,)
    shapes["classifier.weight"] = (task.classes, task.width)
    shapes["classifier.bias"] = (task.classes,)
    return shapes


def initial_weights(task: Task, head: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Weights at step 0; a tensor's random numbers depend on the seed and its name alone.

    Args:
        task: what they are for.
        head: float32 values of "pooler.…" and "classifier.…", all or some.

    Raises:
        LayoutOptError: ``head`` has a name, shape, type or number that does not fit.
    """
    head = head or {}
    shapes = weight_shapes(task)
    check_weights(task, head, "the head", tuple(n for n in shapes if n.startswith(("pooler.", "classifier."))))
    if task.mode == "private" and any(name.startswith("classifier.") for name in head):
        raise LayoutOptError("the classifier of a private task starts at 0: leave it out of the head")
    return {n: np.array(head[n]) if n in head else _initial(task, n, shape) for n, shape in shapes.items()}


def _initial(task: Task, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith(".gate"):
        return np.full(shape, math.log(task.gate / (1 - task.gate)), np.float32)
    if name.endswith(".down"):
        std = task.width**-0.5
    elif name == "pooler.weight" or (name == "classifier.weight" and task.mode == "labels"):
        std = _FRESH_STD
    else:
        return np.zeros(shape, np.float32)
    rng = np.random.default_rng([task.seed, crc32(name.encode())])
    return rng.standard_normal(shape, np.float32) * np.float32(std)


def check_weights(task: Task, values: Mapping[str, Any], what: str, names: tuple[str, ...]) -> None:
    """See that weights fit a task.

    Args:
        task: whose they should be.
        values: by name.
        what: they are, in an error.
        names: that are allowed.

    Raises:
        LayoutOptError: a name, shape or type that does not fit, or a number that is not finite.
    """
    shapes = weight_shapes(task)
    for name, value in values.items():
        if name not in names:
            raise LayoutOptError(f"{what} has {str(name)[:100]!r}: expected only {', '.join(names)}")
        if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != shapes[name]:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise LayoutOptError(f"{what}: {name} is {got}, expected float32{list(shapes[name])}")
        if not (np.abs(value) <= _LARGEST).all():
            raise LayoutOptError(f"{what}: {name} has numbers that are not finite, or above {_LARGEST:g}")


def pack(weights: SideWeights) -> bytes:
    """A safetensors file.

    Raises:
        LayoutOptError: safetensors is not installed.
    """
    need("safetensors", "a side network's file")
    from safetensors.numpy import save

    metadata = {"layoutopt": FORMAT, "task": weights.task.encode().decode(), "steps": str(weights.steps)}
    return save({n: np.ascontiguousarray(v) for n, v in weights.values.items()}, metadata)


def unpack(data: bytes) -> SideWeights:
    """A side network from its file's content.

    Raises:
        LayoutOptError: it is none, is damaged, or safetensors is not installed.
    """
    metadata, values = read_safetensors(data, "this side network")
    if metadata.get("layoutopt") != FORMAT or not metadata.get("steps", "").isdecimal():
        raise LayoutOptError(f"this is no side network: expected safetensors with {FORMAT!r} in the metadata")
    task = Task.decode(metadata.get("task", ""))
    names = tuple(weight_shapes(task))
    check_weights(task, values, "this side network", names)
    missing = [name for name in names if name not in values]
    if missing:
        raise LayoutOptError(f"this side network lacks {missing[0]} ({len(missing)} such): fetch it again")
    return SideWeights(task, int(metadata["steps"]), {name: values[name] for name in names})


def read_safetensors(data: bytes, what: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors file's content.

    Raises:
        LayoutOptError: it is damaged, or safetensors is not installed.
    """
    import json

    safetensors = need("safetensors", "a side network's file")
    from safetensors.numpy import load

    try:
        values = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise LayoutOptError(f"{what} is no safetensors file, or is damaged ({error})") from error
    return metadata, values
