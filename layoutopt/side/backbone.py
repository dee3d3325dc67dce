"""The device's part of side-tuning: a frozen backbone, run forward only, that gives a task's activations ("taps").

A backbone is a zoo model up to its last block: no loss, no gradient, no optimizer. After every block that was chosen its
activations are stored in few bits (:mod:`layoutopt.quantize`); these words and scales are all that leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.quantize import Format

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime
    from layoutopt.graph import TrainingGraph

__all__ = ["Backbone", "Footprint", "Tap", "Wanted"]

Tap = tuple[np.ndarray, np.ndarray]
"""words int32[rows, words_per_row] and scales float32[rows, groups_per_row] of a tap."""


@dataclass(frozen=True)
class Wanted:
    """What a backbone is to be.

    Attributes:
        model: a zoo model, such as minilm, gpt2, opt-350m or vit-digits.
        checkpoint: directory or safetensors file of its weights; None: the pretrained package of minilm, and weights
            drawn from ``seed`` for other models.
        batch: samples a run.
        seq: tokens a sample; 0 for images.
        format: how taps are stored.
        tokens: "pivot": only the token that the loss uses (the first of BERT and ViT, the last real one of causal
            models); "all": every token.
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
        arena_bytes: the plan's whole arena; the weights lie in it.
        peak_bytes: what the runtime had allocated at most while the backbone was open.
    """

    weights_bytes: int
    arena_bytes: int
    peak_bytes: int

    @property
    def activations_bytes(self) -> int:
        """Of the arena, what is not weights."""
        return self.arena_bytes - self.weights_bytes


class Backbone:
    """A planned backbone on a device; made by :meth:`open`.

    Attributes:
        wanted: what was asked for.
        graph: the forward pass as captured, whose outputs are the taps; a task is bound to its hash.
        taps: names of the tapped modules, in order.
        width: numbers of a row of a tap.
        head: initial weights of the pretrained model's own head, float32 by name ("pooler.weight" [width, width] and
            "pooler.bias" where it has a pooler); the server's head starts from them.
    """

    wanted: Wanted
    graph: TrainingGraph
    taps: tuple[str, ...]
    width: int
    head: dict[str, np.ndarray]

    @classmethod
    def open(
        cls,
        wanted: Wanted,
        runtime: Runtime,
        *,
        model: DeviceModel | None = None,
        time_limit_s: float = 60.0,
        announce: Callable[[str], None] = lambda _: None,
        progress: Callable[[str, float], None] | None = None,
    ) -> Backbone:
        """Capture, plan and load a backbone.

        Args:
            wanted: what it is to be.
            runtime: the device.
            model: to plan with; the device's own (calibrated now if need be) by default.
            time_limit_s: of the solver.
            announce: told in one sentence what is used.
            progress: told how far planning is.

        Raises:
            LayoutOptError: an unknown model, tap or storage, or weights that are missing, damaged or another model's.
        """
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Texts as the graph's inputs, int32 [n, seq] by name."""
        raise NotImplementedError

    def run(self, inputs: Mapping[str, np.ndarray]) -> tuple[Tap, ...]:
        """The taps of up to ``wanted.batch`` samples.

        Args:
            inputs: an array [n, …] per input of the graph.

        Returns:
            Words and scales per tap. With "pivot" tokens there are n rows, else n * tokens, sample by sample.

        Raises:
            GraphError: an input is missing, of a wrong shape or type, or holds an id out of range.
        """
        raise NotImplementedError

    def footprint(self) -> Footprint:
        """Device memory, so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the device's memory back."""
        raise NotImplementedError
