"""``layoutopt.Trainer``: the loop around a compiled step, in the manner of Hugging Face's Trainer.

Order, learning rates, dropout and updates hang on the settings and the step alone, so a run that was stopped and
resumed from a checkpoint computes what an undisturbed one does, bit by bit on the same device.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.files import check_folder
from layoutopt.show import Progress
from layoutopt.trainer_data import Collator, Samples, collate
from layoutopt.trainer_files import checkpoints, found, load_state, plan_of, restore, save_checkpoint, save_model, tidy
from layoutopt.trainer_logs import Logs
from layoutopt.trainer_types import (
    EvalPrediction,
    PredictionOutput,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    TrainOutput,
)

if TYPE_CHECKING:
    from torch import nn

    from layoutopt.compiled import Compiled

__all__ = ["Trainer"]

_LOG = logging.getLogger("layoutopt")


class Trainer:
    """Trains, evaluates, logs and keeps checkpoints.

    Args:
        model: what ``layoutopt.compile`` made; or a module, which is compiled for the first batch when it is needed.
        args: settings; the usual ones by default.
        train_dataset: samples as dicts of numbers by input name (arrays, tensors or lists of one shape): a
            ``datasets.Dataset``, a list, any iterable, or arrays by name.
        eval_dataset: the same, to evaluate on.
        data_collator: makes a batch of a list of samples; they are stacked by default.
        callbacks: told what happens, see :class:`layoutopt.TrainerCallback`.
        compute_metrics: gives more numbers of an evaluation, from an ``EvalPrediction``.
        compile_options: of ``layoutopt.compile``, for a module.

    Raises:
        LayoutOptError: a data set or an option that does not serve.
    """

    def __init__(
        self,
        model: Compiled | nn.Module,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Collator | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args or TrainingArguments()
        if not isinstance(self.args, TrainingArguments):
            raise LayoutOptError(f"args is a {type(args).__name__}: give a layoutopt.TrainingArguments")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator, self.compute_metrics = data_collator, compute_metrics
        self.callbacks = list(callbacks)
        self.state, self.control = TrainerState(), TrainerControl()
        self._options = dict(compile_options or {})
        self._saved, self._windowed, self._window_from = -1, 0, 0.0
        self._given = model
        compiled = not hasattr(model, "named_parameters")
        if compiled and not (hasattr(model, "step") and hasattr(model, "batches")):
            raise LayoutOptError(
                f"model is a {type(model).__name__}: give a torch.nn.Module or what compile made of one"
            )
        if compiled and self._options:
            raise LayoutOptError("compile_options are for a module; this model is compiled already")
        self._compiled: Compiled | None = model if compiled else None  # type: ignore[assignment]
        self._owned = not compiled

    # ---- the step ---------------------------------------------------------------------------------------------------

    @property
    def compiled(self) -> Compiled:
        """The step that runs; a module is compiled now, for a batch of the training samples (or the others).

        Raises:
            LayoutOptError: there are no samples to take shapes from, or compiling fails.
        """
        return self._ready({})

    def _ready(self, options: Mapping[str, Any]) -> Compiled:
        if self._compiled is not None:
            return self._compiled
        from layoutopt.compiled import compile

        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if data is None:
            raise LayoutOptError("a module is compiled for the shapes of its samples: give train_dataset")
        size = self.args.per_device_train_batch_size
        rows = next(Samples(data, "training data").batches(size), [])
        if len(rows) < size:
            raise LayoutOptError(f"the data has {len(rows)} samples, less than one batch of {size}")
        example: Any = collate(rows, self._columns(rows[0]), self.data_collator)
        if not isinstance(rows[0], Mapping) and self.data_collator is None:
            example = tuple(example.values())
        self._compiled = compile(self._given, example, **{**self._options, **options})  # type: ignore[arg-type]
        return self._compiled

    def _ready_again(self, checkpoint: Path) -> Compiled:
        """With the plan of a checkpoint, where it serves the device."""
        try:
            return self._ready({"plan": plan_of(checkpoint)})
        except DeviceError as error:
            _LOG.warning("%s has a plan that this device cannot run: %s", checkpoint, error)
            return self._ready({})

    def _columns(self, row: Any) -> list[str] | None:
        """Those that the module takes; None where it takes whatever it is given."""
        if not isinstance(row, Mapping) or self._options.get("loss") is not None:
            return None
        accepted = inspect.signature(self._given.forward).parameters  # type: ignore[union-attr]
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()) and self.data_collator is None:
            return None
        known = {"labels" if key in ("label", "label_ids") and "labels" not in row else key for key in row}
        return [name for name in accepted if name in known]

    def close(self) -> None:
        """Give the device's memory back, where the module was compiled here."""
        if self._owned and self._compiled is not None:
            self._compiled.close()
            self._compiled = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Run to the end.

        Args:
            resume_from_checkpoint: True goes on from the last checkpoint in ``output_dir``; or a checkpoint's folder.

        Returns:
            Steps of the run, mean loss of the steps taken now, seconds and samples a second.

        Raises:
            LayoutOptError: bad samples, a loss that is not finite, a folder with another run's checkpoints, or nothing
                to resume.
        """
        if self.train_dataset is None:
            raise LayoutOptError("nothing to train on: give train_dataset")
        data = Samples(self.train_dataset, "training data")
        resumed = self._resumed(resume_from_checkpoint)
        compiled = self._ready_again(resumed) if resumed else self._ready({})
        per_epoch = data.per_epoch(compiled.batches.size, self.args.dataloader_drop_last)
        total = self.args.max_steps if self.args.max_steps > 0 else (per_epoch or 0) * self.args.num_train_epochs
        self.state = TrainerState(max_steps=total, settings=self._settings(data, compiled, total))
        if resumed:
            self._restore(resumed, compiled, total)
        schedule = self.args.schedule(total or None)
        first, begun, losses, samples = self.state.global_step, time.perf_counter(), 0.0, 0
        self.control = TrainerControl()
        self._windowed, self._window_from = 0, begun
        logs = Logs(self.args.output_dir, self.args.report_to, self.state.log_history, first)
        try:
            with Progress("training", quiet=self.args.disable_tqdm) as bar:
                self._tell("on_train_begin")
                for rows, last in self._rows(data, compiled.batches.size, per_epoch, total):
                    batch = collate(rows, compiled.batches.names, self.data_collator)
                    loss = compiled.step(batch, lr=schedule(self.state.global_step + 1))
                    self._count(compiled, loss, len(rows), per_epoch, last)
                    losses, samples = losses + loss, samples + len(rows)
                    bar.stage(f"step {self.state.global_step} loss {loss:.4f}", self.state.global_step, max(total, 1))
                    self._tell("on_step_end")
                    self._after_step(logs, schedule(self.state.global_step), last)
                    if self.control.should_training_stop:
                        break
                if self.state.global_step == first:
                    raise LayoutOptError(
                        f"nothing left to train: the run has taken {first} of {total or first} steps; raise max_steps "
                        "or num_train_epochs"
                    )
                if self.state.loss_steps:
                    self._log_losses(logs, schedule(self.state.global_step))
                if self.args.output_dir is not None and self._saved != self.state.global_step:
                    self._save()
                self._tell("on_train_end")
        finally:
            logs.close()
        seconds, taken = time.perf_counter() - begun, self.state.global_step - first
        metrics = {"train_runtime": seconds, "train_samples_per_second": samples / seconds}
        return TrainOutput(self.state.global_step, losses / taken, metrics)

    def _resumed(self, asked: bool | str | os.PathLike[str] | None) -> Path | None:
        """The checkpoint to go on from, with the folder made where there is none."""
        folder = self.args.output_dir
        if folder is not None:
            check_folder(folder)
            Path(folder).mkdir(parents=True, exist_ok=True)
            tidy(folder)
        self._saved = -1
        if asked is not None and asked is not False:
            return found(folder, asked)
        if folder is not None and checkpoints(folder):
            raise LayoutOptError(
                f"{folder} holds {checkpoints(folder)[-1].name} of an earlier run: train with "
                "resume_from_checkpoint=True, or choose another output_dir"
            )
        return None

    def _settings(self, data: Samples, compiled: Compiled, total: int) -> dict[str, Any]:
        """What a resumed run must share, for its steps to be those of an undisturbed one."""
        names = ("seed", "shuffle", "learning_rate", "lr_scheduler_type", "warmup_steps", "dataloader_drop_last")
        shared = {name: getattr(self.args, name) for name in names}
        more = {"samples": data.length, "batch": compiled.batches.size, "step": compiled.graph.hash}
        return {**shared, **more, **({"steps": total} if self.args.lr_scheduler_type == "cosine" else {})}

    def _restore(self, checkpoint: Path, compiled: Compiled, total: int) -> None:
        import layoutopt.plan as plans

        state = load_state(checkpoint)
        for name, value in self.state.settings.items():
            if state.settings.get(name) != value:
                raise LayoutOptError(
                    f"{checkpoint} is of a run with {name} {state.settings.get(name)!r}, this one has {value!r}: "
                    "resume with the same data and settings"
                )
        plan = plan_of(checkpoint)
        if plans.encode(plan) != plans.encode(compiled.plan):
            try:
                compiled.use_plan(plan)
            except LayoutOptError as error:
                _LOG.warning("going on with another plan than the checkpoint's, so equal up to rounding: %s", error)
        restore(compiled, checkpoint, state)
        state.max_steps = total
        self.state, self._saved = state, state.global_step
        _LOG.info("resumed %s", checkpoint)

    def _rows(self, data: Samples, size: int, per_epoch: int | None, total: int) -> Iterator[tuple[list[Any], bool]]:
        """Batches of samples from where the run stands, and whether each is the last of its pass."""
        args = self.args
        taken = self.state.global_step
        limit = total or None
        step, epoch = 0, 0
        while limit is None or step < limit:
            if (limit is None or args.max_steps < 1) and epoch >= args.num_train_epochs:
                return
            if per_epoch is not None and step + per_epoch <= taken:
                step, epoch = step + per_epoch, epoch + 1
                continue
            order = np.random.default_rng((args.seed, epoch)) if args.shuffle and data.length is not None else None
            skip = taken - step if per_epoch is not None else 0
            batches = data.batches(size, order=order, drop_last=args.dataloader_drop_last, skip=max(skip, 0))
            step += max(skip, 0)
            at = next(batches, None)
            if at is None:
                raise LayoutOptError(
                    f"the training data gave no batch in pass {epoch + 1}: an iterator is used up after one; give a "
                    "list, or an iterable that begins anew"
                )
            self._pass_begins(step, taken)
            while at is not None and (limit is None or step < limit):
                step, following = step + 1, next(batches, None)
                if step > taken:
                    yield at, following is None
                at = following
            epoch += 1

    def _pass_begins(self, step: int, taken: int) -> None:
        if step >= taken:
            self._tell("on_epoch_begin")

    def _count(self, compiled: Compiled, loss: float, samples: int, per_epoch: int | None, last: bool) -> None:
        state = self.state
        state.global_step += 1
        state.optimizer_steps = compiled.steps
        state.epoch = state.global_step / per_epoch if per_epoch else state.epoch + last
        state.loss_sum, state.loss_steps = state.loss_sum + loss, state.loss_steps + 1
        self._windowed += samples

    def _after_step(self, logs: Logs, rate: float, last_of_pass: bool) -> None:
        """Log, evaluate and save where it is time or a callback asked; a checkpoint comes last, to hold all of it."""
        args, control, step = self.args, self.control, self.state.global_step
        if control.should_log or step % args.logging_steps == 0 or step == self.state.max_steps:
            self._log_losses(logs, rate)
        due = step % args.eval_steps == 0 if args.eval_steps else last_of_pass
        if control.should_evaluate or (due and self.eval_dataset is not None):
            self._log(logs, self.evaluate())
        if last_of_pass:
            self._tell("on_epoch_end")
        wanted = control.should_save or (args.save_steps and step % args.save_steps == 0)
        if wanted and args.output_dir is not None:
            self._save()
        control.should_log = control.should_evaluate = control.should_save = False

    def _log_losses(self, logs: Logs, rate: float) -> None:
        state, now = self.state, time.perf_counter()
        speed = self._windowed / max(now - self._window_from, 1e-9)
        row = {"loss": state.loss_sum / state.loss_steps, "learning_rate": rate, "samples_per_second": speed}
        state.loss_sum, state.loss_steps = 0.0, 0
        self._windowed, self._window_from = 0, now
        self._log(logs, row)

    def _log(self, logs: Logs, numbers: Mapping[str, float]) -> None:
        row = {"step": self.state.global_step, "epoch": round(self.state.epoch, 6), **numbers}
        self.state.log_history.append(row)
        logs.log(row)
        _LOG.info("%s", ", ".join(f"{name} {value:.6g}" for name, value in row.items()))
        self._tell("on_log", logs=row)

    def _save(self) -> None:
        assert self.args.output_dir is not None
        kept = save_checkpoint(self.compiled, self.args.output_dir, self.state, self.args.save_total_limit)
        self._saved = self.state.global_step
        _LOG.info("checkpoint %s", kept)
        self._tell("on_save")

    def _tell(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, model=self._compiled, **more)

    # ---- evaluating -------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Mean loss over samples, and what ``compute_metrics`` gives.

        Args:
            eval_dataset: samples; those of the trainer by default.
            metric_key_prefix: before every name.

        Raises:
            LayoutOptError: there are no samples, or they do not fit the step.
        """
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if data is None:
            raise LayoutOptError("nothing to evaluate on: give eval_dataset")
        metrics = self._predict(data, metric_key_prefix, self.compute_metrics is not None).metrics
        self._tell("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Outputs and targets of samples, with the metrics of :meth:`evaluate`."""
        return self._predict(test_dataset, metric_key_prefix, True)

    def _predict(self, dataset: Any, prefix: str, keep: bool) -> PredictionOutput:
        compiled, begun = self.compiled, time.perf_counter()
        data, batches = Samples(dataset, "evaluation data"), compiled.batches
        outputs: dict[str, list[np.ndarray]] = {}
        targets: list[np.ndarray] = []
        loss, count, left_out = 0.0, 0, 0
        for rows in data.batches(batches.size):
            if len(rows) < batches.size and not batches.target:
                left_out = len(rows)
                continue
            batch = collate(rows, batches.names, self.data_collator)
            result = compiled.evaluate(batch)
            loss, count = loss + result.loss * len(rows), count + len(rows)
            if keep:
                for name, value in result.outputs.items():
                    outputs.setdefault(name, []).append(value)
                targets += [batch["labels"]] if "labels" in batch else []
        if not count:
            raise LayoutOptError(f"the evaluation data holds {left_out} samples, not one batch of {batches.size}")
        if left_out:
            _LOG.warning("the last %d samples were not evaluated: they are no full batch", left_out)
        whole = {name: np.concatenate(values) for name, values in outputs.items()}
        predictions: Any = next(iter(whole.values())) if len(whole) == 1 else whole
        labels = np.concatenate(targets) if targets else None
        metrics = {f"{prefix}_loss": loss / count, f"{prefix}_samples": count}
        if keep and self.compute_metrics is not None:
            own = self.compute_metrics(EvalPrediction(predictions, labels))
            metrics |= {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": float(v) for k, v in own.items()}
        metrics[f"{prefix}_runtime"] = time.perf_counter() - begun
        return PredictionOutput(predictions, labels, metrics)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the weights, and the configuration of a Hugging Face module, as ``from_pretrained`` loads them.

        Raises:
            LayoutOptError: no folder is given here or in the settings, or it cannot be written.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        if folder is None:
            raise LayoutOptError("no folder to save to: give output_dir")
        check_folder(folder)
        save_model(self.compiled, folder)
