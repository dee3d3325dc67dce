"""What a :class:`layoutopt.Trainer` is told and what it tells: settings, state, callbacks, results.

Names are those of Hugging Face's Trainer where the thing is the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.train import Schedule

__all__ = [
    "EvalPrediction",
    "PredictionOutput",
    "TrainOutput",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
]

SCHEDULES = ("constant", "constant_with_warmup", "cosine")
REPORTS = ("csv", "tensorboard")


@dataclass(frozen=True)
class TrainingArguments:
    """Settings of a run.

    Attributes:
        output_dir: where checkpoints and logs go; None keeps nothing.
        num_train_epochs: passes over the samples.
        max_steps: steps in all; below 1 as many as the passes take.
        per_device_train_batch_size: samples a step, where a module is given; a compiled one has its own.
        learning_rate: the highest.
        lr_scheduler_type: "constant" or "cosine" (to zero), after the warm-up.
        warmup_steps: over which the rate rises linearly.
        seed: of the order of samples.
        shuffle: another order in each pass; else as they come. Iterables come as they come.
        logging_steps: steps from one log to the next.
        eval_steps: steps from one evaluation to the next; None evaluates after each pass.
        save_steps: steps from one checkpoint to the next; None writes one at the end.
        save_total_limit: how many checkpoints are kept, the last ones.
        dataloader_drop_last: leave out a last batch that is not full.
        report_to: "csv" (``log.csv``), "tensorboard"; in ``output_dir``.
        disable_tqdm: no progress bar, not even on a terminal.
    """

    output_dir: str | os.PathLike[str] | None = None
    num_train_epochs: int = 1
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    seed: int = 0
    shuffle: bool = True
    logging_steps: int = 10
    eval_steps: int | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    dataloader_drop_last: bool = False
    report_to: Sequence[str] = ("csv",)
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for name in ("num_train_epochs", "per_device_train_batch_size", "logging_steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("eval_steps", "save_steps", "save_total_limit"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("seed", self.seed, 0)
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise LayoutOptError(f"learning_rate is {self.learning_rate}: expected a number of at least 0")
        if self.lr_scheduler_type not in SCHEDULES:
            raise LayoutOptError(
                f"lr_scheduler_type {self.lr_scheduler_type!r}: expected one of {', '.join(SCHEDULES)}"
            )
        if isinstance(self.report_to, str):
            object.__setattr__(self, "report_to", () if self.report_to == "none" else (self.report_to,))
        for name in self.report_to:
            if name not in REPORTS:
                raise LayoutOptError(f"report_to {name!r}: expected {' or '.join(REPORTS)}, or none of them")

    def schedule(self, total: int | None) -> Schedule:
        """The learning rate by step, of a run of ``total`` steps.

        Raises:
            LayoutOptError: it depends on a number of steps that nobody knows.
        """
        cosine = self.lr_scheduler_type == "cosine"
        if cosine and total is None:
            raise LayoutOptError("a cosine schedule over an iterable of unknown length needs max_steps")
        return Schedule(self.learning_rate, total or 0, self.warmup_steps, cosine)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutOptError(f"{name} is {value!r}: expected a whole number of at least {least}")


class TrainerState(msgspec.Struct):
    """Where a run stands; written with every checkpoint.

    Attributes:
        global_step: steps of the run.
        epoch: passes over the samples, begun ones in part.
        max_steps: of the run; 0 where nobody knows.
        optimizer_steps: that the optimizer counts.
        loss_sum: of the steps since the last log.
        loss_steps: how many these are.
        settings: that a resumed run must share.
        log_history: what was logged, as dicts.
    """

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    optimizer_steps: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    log_history: list[dict[str, float]] = msgspec.field(default_factory=list)


@dataclass
class TrainerControl:
    """What a callback may ask for; read after each step.

    Attributes:
        should_training_stop: end the run after this step, with a checkpoint.
        should_log: log after this step.
        should_evaluate: evaluate after this step.
        should_save: write a checkpoint after this step.
    """

    should_training_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class TrainerCallback:
    """Called as the run goes along, each time with (args, state, control, **more); override what is wanted.

    ``more`` holds ``logs`` for ``on_log``, ``metrics`` for ``on_evaluate``, and always ``model``, the compiled step.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Before the first step."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Before each pass."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After each step."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After each log."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After each evaluation."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After each checkpoint."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After each pass."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After the last step."""


class TrainOutput(NamedTuple):
    """What a run came to: its steps, the mean loss of the steps taken in this call, and what else was counted."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """What metrics are calculated from: outputs (one array, or several by name) and targets (None without)."""

    predictions: Any
    label_ids: np.ndarray | None


class PredictionOutput(NamedTuple):
    """Outputs, targets and metrics of a data set."""

    predictions: Any
    label_ids: np.ndarray | None
    metrics: dict[str, float]
