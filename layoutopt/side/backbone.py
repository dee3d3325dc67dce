"""The device's part of side-tuning: a frozen backbone, run forward only, that gives a task's activations ("taps").

A backbone is a zoo model up to its last block: no loss, no gradient, no optimizer. After every block that was chosen
its activations are stored in few bits (:mod:`layoutopt.quantize`); these words and scales are all that leaves the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.join import as_soon
from layoutopt.quantize import Format, dequantise
from layoutopt.side.graphs import facts_of, quantised, sent_tensors, tap_tensor
from layoutopt.side.task import Tap

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.execute import Executor
    from kernels.runtime import Runtime
    from layoutopt.graph import TrainingGraph
    from layoutopt.plan import Plan
    from layoutopt.side.pretrained import Pretrained

__all__ = ["Backbone", "Footprint", "Planning", "Tap", "Wanted", "capture_wanted", "sending"]


@dataclass(frozen=True)
class Wanted:
    """What a backbone is to be.

    Attributes:
        model: a zoo model, such as minilm, gpt2, opt-125m or vit-digits.
        checkpoint: directory or safetensors file of its weights; None: the pretrained package of minilm, and weights
            drawn from ``seed`` for other models.
        batch: samples a run.
        seq: tokens a sample; 0 for the model's usual number. Images have none to be set.
        format: how taps are stored.
        tokens: "pivot": only the token that the loss uses (the first of BERT and ViT, the last real one of causal
            models); "all": every token; "first" or "last" where that is to be said.
        taps: modules whose results are tapped, in order, the last being the backbone's final result; all blocks if ().
        storage: how weights lie in the device's memory.
        seed: of weights that no checkpoint gives.
    """

    model: str
    checkpoint: Path | None = None
    batch: int = 16
    seq: int = 64
    format: Format = field(default_factory=lambda: Format("int8", 64))
    tokens: str = "pivot"
    taps: tuple[str, ...] = ()
    storage: str = "fp32"
    seed: int = 0


@dataclass(frozen=True)
class Footprint:
    """Device memory of a backbone, in bytes.

    Attributes:
        weights_bytes: parameters, as they are stored.
        arena_bytes: the plan's arena: weights, inputs, taps, and what is alive in between.
        peak_bytes: of all buffers on the device that the backbone has: the arena, where inputs arrive, and tables of
            launches. Runs make none.
    """

    weights_bytes: int
    arena_bytes: int
    peak_bytes: int

    @property
    def activations_bytes(self) -> int:
        """Of the arena, what is not weights."""
        return self.arena_bytes - self.weights_bytes


def capture_wanted(wanted: Wanted) -> TrainingGraph:
    """The forward pass of a backbone up to its taps in float32, passes run: what a task is bound to by its hash.

    Raises:
        LayoutOptError: torch is missing; an unknown model, tap or kind of tokens.
    """
    try:
        from layoutopt.side.taps import capture_taps
    except ImportError as error:
        raise LayoutOptError(f"capturing needs {error.name}: pip install 'layoutopt[torch]'") from error
    from layoutopt.passes import run_passes

    captured = capture_taps(wanted.model, batch=wanted.batch, seq=wanted.seq, taps=wanted.taps, tokens=wanted.tokens)
    graph = run_passes(captured)[0]
    return as_soon(graph, graph.outputs[-1])


def sending(graph: TrainingGraph, fmt: Format) -> TrainingGraph:
    """The graph that a device runs: its taps stored in few bits, passes run again.

    Args:
        graph: as of :func:`capture_wanted`.
        fmt: of the taps.
    """
    from layoutopt.passes import run_passes

    return run_passes(quantised(graph, facts_of(graph)["taps"], fmt))[0]


@dataclass(frozen=True)
class Planning:
    """How a graph is planned for the device at hand.

    Attributes:
        model: of the device; its own, calibrated now if need be, where it is None.
        strategy: of the planner.
        memory: the most a plan may take, in words.
        time_limit_s: of the solver.
        calibration_s: of a calibration made now.
        announce: told in one sentence what is used.
        progress: told how far it is.
    """

    model: DeviceModel | None = None
    strategy: str = "ilp"
    memory: str | None = None
    time_limit_s: float = 60.0
    calibration_s: float = 60.0
    announce: Callable[[str], None] = lambda _: None
    progress: Callable[[str, float], None] | None = None

    def plan(self, graph: TrainingGraph, runtime: Runtime, storage: str) -> Plan:
        """The plan of a graph.

        Args:
            graph: passes run.
            runtime: the device.
            storage: how its weights lie in memory.

        Raises:
            LayoutOptError: as ``facade.solve_plan``; the model is another device's.
        """
        from layoutopt.facade import check_request, solve_plan
        from layoutopt.models import check_device, device_model

        check_request([self.strategy], self.memory, graph, storage)
        model = self.model
        if model is None:
            model = device_model(
                None,
                runtime,
                [graph],
                budget_s=self.calibration_s,
                announce=self.announce,
                progress=self.progress,
                storage=storage,
            )
        check_device(model.name, f"device model {model.name}", runtime)
        return solve_plan(
            graph,
            model,
            strategy=self.strategy,
            memory=self.memory,
            time_limit_s=self.time_limit_s,
            progress=self.progress,
            storage=storage,
        )


class Backbone:
    """A planned backbone on a device; made by :meth:`open`.

    Args:
        wanted: what it is.
        graph: as of :func:`capture_wanted`.
        weights: of it.
        runtime: the device.
        plan: of ``sending(graph, wanted.format)``.

    Attributes:
        wanted: what was asked for.
        graph: the forward pass up to its taps; a task is bound to its hash.
        taps: names of the tapped modules, in order.
        width: numbers of a row of a tap.
        pivot: which token a classifier reads: "first", or the "last" that is not padding.
        head: initial weights of the model's own head, float32 by name: "pooler.weight" [width, width] and
            "pooler.bias" where it has a pooler, "classifier.weight" [classes, width] and "classifier.bias" where it was
            fine-tuned. The server's head starts from them.
        classes: labels of that classifier, in order; empty where none is named.
        plan: that runs.
    """

    def __init__(self, wanted: Wanted, graph: TrainingGraph, weights: Pretrained, runtime: Runtime, plan: Plan) -> None:
        from kernels.execute import Executor

        facts = facts_of(graph)
        self.wanted, self.graph, self.plan = wanted, graph, plan
        self.taps: tuple[str, ...] = tuple(facts["taps"])
        self.width: int = facts["width"]
        self.pivot: str = facts["pivot"]
        self.head, self.classes = weights.head, weights.classes
        self._tokenizer = weights.tokenizer
        self._rows: int = facts["rows"] // wanted.batch
        runs = sending(graph, wanted.format)
        self._executor: Executor = Executor(runtime, runs, plan, weights.values)

    @classmethod
    def open(cls, wanted: Wanted, runtime: Runtime, planning: Planning | None = None) -> Backbone:
        """Capture, plan and load a backbone.

        Args:
            wanted: what it is to be.
            runtime: the device.
            planning: how.

        Raises:
            LayoutOptError: an unknown model, tap or storage, or weights that are missing, damaged or another model's.
        """
        from layoutopt.side.pretrained import load_pretrained

        graph = capture_wanted(wanted)
        facts = facts_of(graph)
        weights = load_pretrained(graph, facts, wanted.checkpoint, wanted.seed)
        runs = sending(graph, wanted.format)
        return cls(wanted, graph, weights, runtime, (planning or Planning()).plan(runs, runtime, wanted.storage))

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of one sample, by input."""
        return {t.name: t.shape[1:] for t in self.graph.by_role("input")}

    @property
    def tokenizer(self) -> Path | None:
        """The checkpoint's tokenizer file, if it has one."""
        return self._tokenizer

    @property
    def rows_per_sample(self) -> int:
        """Rows of a tap: 1 with pivot tokens, else the model's tokens a sample."""
        return self._rows

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Texts as the graph's inputs, int32 [n, seq] by name.

        Raises:
            LayoutOptError: the model takes no text, or the checkpoint has no tokenizer.
        """
        from layoutopt.side.samples import encoded

        return encoded(texts, self._tokenizer, self.inputs, self.wanted.model)

    def run(self, inputs: Mapping[str, np.ndarray]) -> tuple[Tap, ...]:
        """The taps of up to ``wanted.batch`` samples.

        Args:
            inputs: an array [n, …] per input of the graph.

        Returns:
            Words and scales per tap, n * :attr:`rows_per_sample` rows, sample by sample.

        Raises:
            GraphError: an input is missing, of a wrong shape or type, or holds an id out of range; or a tap's numbers
                are not finite.
        """
        self.enqueue(inputs)
        return self.collect(_samples(inputs, self.wanted.batch))

    def enqueue(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Begin :meth:`run` and return; :meth:`collect` waits for it."""
        samples, batch = _samples(inputs, self.wanted.batch), self.wanted.batch
        rows = np.resize(np.arange(samples), batch)
        filled = {name: np.asarray(x) if samples == batch else np.asarray(x)[rows] for name, x in inputs.items()}
        self._executor.forward(filled)

    def collect(self, samples: int) -> tuple[Tap, ...]:
        """The taps of the first ``samples`` samples that were enqueued last.

        Raises:
            GraphError: a tap's numbers are not finite.
        """
        rows = samples * self._rows
        return tuple(self._tap(name, rows) for name in self.taps)

    def _tap(self, name: str, rows: int) -> Tap:
        fmt = self.wanted.format
        if fmt.kind == "float32":
            x = self._executor.read(tap_tensor(name))[:rows]
            words, scales = np.ascontiguousarray(x).view(np.int32), np.zeros((rows, 0), np.float32)
            good = np.isfinite(x).all()
        else:
            words, scales = (self._executor.read(tensor)[:rows] for tensor in sent_tensors(name))
            good = np.isfinite(scales).all()
        if not good:
            raise GraphError(f"tap {name} of {self.wanted.model} holds NaN or infinity: check the data and checkpoint")
        return words, scales

    def numbers(self, tap: Tap) -> np.ndarray:
        """What a tap stands for, float32 [rows, width]."""
        return dequantise(*tap, self.width, self.wanted.format)

    def features(self, taps: Sequence[Tap], inputs: Mapping[str, np.ndarray], pooling: str = "") -> np.ndarray:
        """The final result as a classifier reads it, float32 [n, width], in the numbers that the server sees.

        Args:
            taps: from :meth:`run`.
            inputs: that it was given.
            pooling: the "first" token, the "last" real one or the "mean" of all real ones (see ``Task.pooling``); by
                default what the model's own classifier reads. Pivot tokens are pooled already.
        """
        final = self.numbers(taps[-1])
        if self._rows == 1:
            return final
        real = self.mask(inputs) != 0
        tokens = final.reshape(*real.shape, self.width)
        pooling = pooling or self.pivot
        if pooling == "mean":
            return np.asarray((tokens * real[:, :, None]).sum(1) / real.sum(1, keepdims=True), np.float32)
        last = np.where(real, np.arange(self._rows), 0).max(1)
        return np.asarray(tokens[np.arange(len(tokens)), last if pooling == "last" else 0])

    def mask(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """uint8 [n, tokens], 1 where a token is real: of images everywhere."""
        if "attention_mask" in inputs:
            return (np.asarray(inputs["attention_mask"]) != 0).astype(np.uint8)
        return np.ones((_samples(inputs, self.wanted.batch), self._rows), np.uint8)

    def footprint(self) -> Footprint:
        """Device memory."""
        graph = self._executor.graph
        held = [t for t in graph.by_role("parameter") if graph.storage_of[t.name] == t.name]
        return Footprint(
            sum(t.size_elems * t.item_bytes for t in held), self.plan.arena_bytes, self._executor.memory_bytes
        )

    def close(self) -> None:
        """Give the device's memory back."""
        self._executor.close()


def _samples(inputs: Mapping[str, np.ndarray], most: int) -> int:
    """How many samples there are.

    Raises:
        GraphError: none, several numbers, or more than fit.
    """
    counts = {name: np.shape(x)[0] if np.ndim(x) else 0 for name, x in inputs.items()}
    found = set(counts.values())
    if len(found) != 1:
        raise GraphError(f"the inputs of a backbone have one number of samples: got {counts or 'nothing'}")
    (samples,) = found
    if not 1 <= samples <= most:
        raise GraphError(f"a backbone planned for {most} samples was given {samples}: give 1 to {most}")
    return samples
