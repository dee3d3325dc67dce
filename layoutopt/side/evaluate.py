"""A fine-tuned model on the device: backbone, taps as the server saw them, and side network as one OpenCL graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.join import as_soon, join
from layoutopt.passes import run_passes
from layoutopt.side.backbone import Planning, Wanted, capture_wanted
from layoutopt.side.device_head import DeviceHead
from layoutopt.side.graphs import as_received, facts_of, received_tensor, tap_tensor
from layoutopt.side.pretrained import Pretrained, load_pretrained
from layoutopt.side.samples import encoded
from layoutopt.side.weights import SideWeights, read_safetensors, unpack
from layoutopt.train import Dataset

if TYPE_CHECKING:
    from kernels.execute import Executor
    from kernels.runtime import Runtime
    from layoutopt.graph import TrainingGraph
    from layoutopt.side.task import Task

__all__ = ["Result", "Tuned", "load_device_head", "load_network", "save_device_head", "tuned_graph"]

PREFIX = "side:"
"""Before the names of whatever belongs to the side network in a joined graph."""


@dataclass(frozen=True)
class Result:
    """What evaluation found.

    Attributes:
        accuracy: share of right answers.
        samples: how many.
        logits: float32[samples, classes].
    """

    accuracy: float
    samples: int
    logits: np.ndarray


def load_network(file: Path) -> SideWeights:
    """The side network in a file that the server gave.

    Raises:
        LayoutOptError: missing, damaged, or none.
    """
    return unpack(_content(file, "side network"))


def load_device_head(file: Path) -> DeviceHead:
    """The device's own head (mode "private") in a file that the device wrote.

    Raises:
        LayoutOptError: missing, damaged, or none.
    """
    return DeviceHead.of(read_safetensors(_content(file, "device head"), f"device head {file}")[1])


def save_device_head(file: Path, head: DeviceHead) -> None:
    """Write the device's own head, where only the device can read it."""
    from layoutopt.checkpoint import save_safetensors

    save_safetensors(file, head.parts())


def _content(file: Path, what: str) -> bytes:
    if not file.is_file():
        raise LayoutOptError(f"no {what} at {file}: expected a safetensors file")
    return file.read_bytes()


def tuned_graph(
    backbone: TrainingGraph, network: SideWeights, samples: int, head: DeviceHead | None = None
) -> tuple[TrainingGraph, dict[str, np.ndarray]]:
    """Backbone and side network as one graph, passes run, and the side network's parameters by name in it.

    Args:
        backbone: captured with the task's taps; with "pivot" tokens, or all where the head sees their mean.
        network: of the task.
        samples: of a run.
        head: of a private task.

    Raises:
        LayoutOptError: torch is missing, or the two do not fit.
    """
    try:
        from layoutopt.side.side_graph import LOGITS, MASK, capture_side, tap_input
    except ImportError as error:
        raise LayoutOptError(f"evaluating needs {error.name}: pip install 'layoutopt[torch]'") from error

    task = network.task
    side, values = capture_side(task, network.values, samples, head)
    received = as_received(backbone, task.taps, task.fmt)
    wires = {tap_input(i): received_tensor(name) for i, name in enumerate(task.taps)}
    if MASK in side.tensors and MASK in backbone.tensors:
        wires[MASK] = MASK
    whole = join(received, side, wires, name=f"{task.model}-tuned", prefix=PREFIX, outputs=(f"{PREFIX}{LOGITS}",))
    whole = as_soon(whole, tap_tensor(task.taps[-1]))
    return run_passes(whole)[0], {f"{PREFIX}{name}": x for name, x in values.items()}


class Tuned:
    """A fine-tuned model on a device; made by :meth:`open`.

    Attributes:
        graph: the joined graph.
        task: of its side network.
        classes: labels that the checkpoint names, in order; empty where it names none.
    """

    def __init__(self, graph: TrainingGraph, task: Task, executor: Executor, pretrained: Pretrained) -> None:
        self.graph, self.task, self.classes = graph, task, pretrained.classes
        self._batch, self._executor, self._tokenizer = task.batch, executor, pretrained.tokenizer

    @classmethod
    def open(
        cls,
        network: SideWeights,
        runtime: Runtime,
        *,
        checkpoint: Path | None = None,
        seed: int = 0,
        seq: int = 64,
        head: DeviceHead | None = None,
        storage: str = "fp32",
        planning: Planning | None = None,
    ) -> Tuned:
        """Capture, join, plan and load.

        Args:
            network: from the server.
            runtime: the device.
            checkpoint: of the backbone, as of :class:`layoutopt.side.backbone.Wanted`.
            seed: of the backbone's weights where no checkpoint gives them.
            seq: tokens a sample, as in training.
            head: that the device kept; needed for a private task.
            storage: how weights lie in the device's memory.
            planning: how it is planned.

        Raises:
            LayoutOptError: the backbone is not the one that the network was trained beside; or as ``Backbone.open``.
        """
        task = network.task
        if task.mode == "private" and head is None:
            raise LayoutOptError("a private task's network only corrects the device's own head: give that head too")
        wanted = Wanted(
            task.model,
            checkpoint,
            batch=task.batch,
            seq=task.seq or seq,
            format=task.fmt,
            tokens=task.tokens,
            taps=task.taps,
            storage=storage,
            seed=seed,
        )
        trained_beside = capture_wanted(wanted)
        check_backbone(trained_beside, network)
        backbone, pretrained = _backbone(wanted, trained_beside, network)
        graph, values = tuned_graph(backbone, network, wanted.batch, head if task.mode == "private" else None)
        plan = (planning or Planning()).plan(graph, runtime, storage)
        from kernels.execute import Executor

        executor = Executor(runtime, graph, plan, pretrained.values | values)
        return cls(graph, task, executor, pretrained)

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of one sample, by input of the backbone."""
        return {t.name: t.shape[1:] for t in self.graph.by_role("input") if not t.name.startswith(PREFIX)}

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Texts as inputs, int32 [n, seq] by name.

        Raises:
            LayoutOptError: the model takes no text, or the checkpoint has no tokenizer.
        """
        return encoded(texts, self._tokenizer, self.inputs, self.task.model)

    def logits(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """What the model says, float32[n, classes] (of a private task: probabilities and their correction).

        Args:
            inputs: an array [n, …] per input of the backbone, up to a batch.
        """
        n = len(next(iter(inputs.values())))
        rows = np.resize(np.arange(n), self._batch)
        filled = {name: np.asarray(x)[rows] for name, x in inputs.items()}
        missing = [t for t in self.graph.by_role("input") if t.name not in filled and t.name.startswith(PREFIX)]
        filled |= {t.name: np.ones(t.shape, np.int32) for t in missing}  # images have no padding to be masked
        self._executor.forward(filled)
        return np.array(self._executor.read(self.graph.outputs[0]))[:n]

    def evaluate(self, data: Dataset) -> Result:
        """Accuracy over labelled samples."""
        labels = data.inputs[data.target]
        inputs = {name: x for name, x in data.inputs.items() if name != data.target}
        parts = [
            self.logits({name: x[i : i + self._batch] for name, x in inputs.items()})
            for i in range(0, len(labels), self._batch)
        ]
        logits = np.concatenate(parts)
        return Result(float((logits.argmax(1) == labels).mean()), len(labels), logits)

    @property
    def memory_bytes(self) -> int:
        """Of the device's buffers."""
        return self._executor.memory_bytes

    def close(self) -> None:
        """Give the device's memory back."""
        self._executor.close()


def check_backbone(graph: TrainingGraph, network: SideWeights) -> None:
    """See that a side network was trained beside this backbone.

    Raises:
        LayoutOptError: another model, another number of tokens or samples, or another version's capture.
    """
    task = network.task
    if facts_of(graph)["width"] != task.width:
        raise LayoutOptError(
            f"the side network reads taps of {task.width} numbers, those of {graph.name!r} have "
            f"{facts_of(graph)['width']}: give the model it was trained beside"
        )
    if graph.hash != task.graph:
        raise LayoutOptError(
            f"the side network was trained beside backbone {task.graph[:12]}, this one of {task.model} is "
            f"{graph.hash[:12]}: give the same --seq, and the layoutopt and torch that it was captured with"
        )


def _backbone(wanted: Wanted, captured: TrainingGraph, network: SideWeights) -> tuple[TrainingGraph, Pretrained]:
    """The backbone to evaluate with: only the tokens that the head reads, where it does not read all."""
    task = network.task
    if task.tokens == "all" and task.pooling != "mean":
        captured = capture_wanted(replace(wanted, tokens=task.pooling))
    return captured, load_pretrained(captured, facts_of(captured), wanted.checkpoint, wanted.seed)
