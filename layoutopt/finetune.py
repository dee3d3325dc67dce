"""``layoutopt train``: data, model, plan and loop put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import layoutopt.plan as plans
from layoutopt import planner, textclass, textdata
from layoutopt.arraydata import read_arrays
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.facade import capture_model, check_request, solve_plan
from layoutopt.files import check_folder
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import in_words
from layoutopt.models import calibrated_path, check_device, device_model, find_graph
from layoutopt.optimizers import has_dropout
from layoutopt.plan import Plan
from layoutopt.refining import refine
from layoutopt.rewrites import planned_graph
from layoutopt.show import Progress
from layoutopt.stepcost import planned_s, predict_step
from layoutopt.textclass import RunState
from layoutopt.train import Dataset, History, Schedule, batch_size, evaluate, fit

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.execute import Executor
    from kernels.runtime import Runtime

__all__ = ["Result", "Settings", "finetune"]


@dataclass(frozen=True)
class Settings:
    """What ``layoutopt train`` was asked for; see its options."""

    model: str
    data: str
    out_dir: Path | None = None
    resume: Path | None = None
    checkpoint: Path | None = None
    epochs: int = 1
    batch: int = 16
    seq: int = 64
    lr: float = 5e-5
    held_out: float = 0.2
    seed: int = 0
    dropout: bool = False
    max_steps: int | None = None
    strategy: str = "ilp"
    memory: str | None = None
    time_limit_s: float = 60.0
    calibration_s: float = 60.0
    device_model: str | None = None
    plan: Path | None = None
    storage: str = "fp32"
    refine: int = 0
    micro_batches: int | None = None


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        steps: steps taken in this call.
        seconds: host seconds of the training loop.
        samples_per_s: throughput.
        losses: of every step.
        accuracy: on the held-out samples; None where none were held out.
        held_out_samples: how many.
        directory: checkpoint directory, if one was written.
        strategy: of the plan.
        predicted_step_s: by the plan.
    """

    steps: int
    seconds: float
    samples_per_s: float
    losses: tuple[float, ...]
    accuracy: float | None
    held_out_samples: int
    directory: str | None
    strategy: str
    predicted_step_s: float

    @property
    def first_loss(self) -> float:
        """Of the first step."""
        return self.losses[0]

    @property
    def last_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        tail = self.losses[-max(len(self.losses) // 10, 1) :]
        return sum(tail) / len(tail)


def finetune(settings: Settings, runtime: Runtime, *, announce: Callable[[str], None], progress: Progress) -> Result:
    """Plan and train.

    Raises:
        LayoutOptError: any of the settings, files or numbers is bad; nothing half-written stays behind.
    """
    check_request([settings.strategy], settings.memory, storage=settings.storage)
    if settings.refine and settings.plan is not None:
        raise LayoutOptError("--refine makes plans of its own: leave out --plan")
    if settings.micro_batches is not None and settings.plan is not None:
        raise LayoutOptError("a plan says how many micro-batches it runs: leave out --micro-batches, or --plan")
    if settings.out_dir is not None:
        check_folder(settings.out_dir)
    if settings.plan is not None:
        check_device(plans.load(settings.plan).device_name, f"plan {settings.plan}", runtime)
    elif settings.device_model is not None:
        given = device_model(settings.device_model, runtime)
        check_device(given.name, f"device model {settings.device_model}", runtime)
    if settings.model == "minilm":
        return _finetune_text(settings, runtime, announce, progress)
    return _finetune_arrays(settings, runtime, announce, progress)


def _executor(
    settings: Settings,
    graph: TrainingGraph,
    values: dict[str, np.ndarray],
    runtime: Runtime,
    announce: Callable[[str], None],
    progress: Progress,
) -> tuple[Executor, float]:
    """The plan, ready to run, and its predicted seconds a step."""
    from kernels.execute import Executor

    if settings.plan is not None:
        plan = plans.load(settings.plan)
        planner.validate(plan, graph, None, runtime.limits)
        predicted_s = planned_s(plan)
    else:
        model = device_model(
            settings.device_model,
            runtime,
            [graph],
            budget_s=settings.calibration_s,
            announce=announce,
            progress=progress.fraction,
            storage=settings.storage,
        )
        plan = _solved(settings, graph, model, progress)
        if settings.refine:
            plan = _refined(settings, graph, model, plan, values, runtime, announce, progress)
        predicted_s = predict_step(plan, graph, model).step_s
    announce(
        f"plan: {plan.solver.strategy} {plan.solver.status}, {in_words(planned_graph(plan, graph))}, "
        f"{len(plan.relayouts)} relayouts, arena {plan.arena_bytes / 2**20:.1f} MiB, "
        f"predicted step {predicted_s * 1e3:.1f} ms"
    )
    return Executor(runtime, graph, plan, values), predicted_s


def _check_graph(settings: Settings, graph: TrainingGraph) -> None:
    """See that a graph trains, and may be planned as is asked for, before data is looked at and anything measured."""
    if not graph.meta.get("optimizer"):
        raise GraphError(f"graph {graph.name!r} has no optimizer: capture it with --optimizer adamw or sgd")
    if settings.plan is None:
        check_request([settings.strategy], settings.memory, graph, settings.storage, settings.micro_batches)


def _solved(settings: Settings, graph: TrainingGraph, model: DeviceModel, progress: Progress) -> Plan:
    return solve_plan(
        graph,
        model,
        strategy=settings.strategy,
        memory=settings.memory,
        time_limit_s=settings.time_limit_s,
        progress=progress.fraction,
        storage=settings.storage,
        micro_batches=settings.micro_batches,
    )


def _refined(
    settings: Settings,
    graph: TrainingGraph,
    model: DeviceModel,
    plan: Plan,
    values: dict[str, np.ndarray],
    runtime: Runtime,
    announce: Callable[[str], None],
    progress: Progress,
) -> Plan:
    """The fastest plan that measuring within steps leads to; what was measured goes into this user's calibration."""
    from costmodel import device as devices

    found = refine(
        runtime,
        graph,
        plan,
        model,
        lambda refined: _solved(settings, graph, refined, progress),
        values=values,
        rounds=settings.refine,
        announce=announce,
    )
    if settings.device_model is None:
        devices.save(found.model, calibrated_path(runtime.info))
    beaten = "the first plan was the fastest" if found.first_was_best else "a later plan was faster than the first"
    announce(f"refined in {len(found.rounds)} rounds: {beaten}")
    return found.plan


def _run(
    settings: Settings,
    executor: Executor,
    predicted: float,
    training: Dataset,
    held_out: Dataset | None,
    progress: Progress,
    first_step: int = 0,
) -> Result:
    size = batch_size(executor.graph, training.target)
    per_epoch = -(-len(training) // size)
    total = settings.epochs * per_epoch
    if settings.max_steps is not None:
        total = min(total, first_step + settings.max_steps)
    if first_step >= total:
        raise LayoutOptError(f"nothing left to train: the run has taken {first_step} of {total} steps; raise --epochs")
    history = History()
    started = time.perf_counter()

    def report(step: int, loss: float) -> None:
        progress.stage(f"step {step}/{total} loss {loss:.4f}", step, total)

    fit(
        executor,
        training,
        epochs=settings.epochs,
        schedule=Schedule(settings.lr, total),
        seed=settings.seed,
        first_step=first_step,
        last_step=total,
        history=history,
        on_step=report,
    )
    seconds = time.perf_counter() - started
    accuracy = evaluate(executor, held_out)[0] if held_out is not None else None
    return Result(
        len(history.losses),
        seconds,
        sum(min(size, len(training) - (first_step + i) % per_epoch * size) for i in range(len(history.losses)))
        / seconds,
        tuple(history.losses),
        accuracy,
        len(held_out) if held_out is not None else 0,
        None,
        executor.plan.solver.strategy,
        predicted,
    )


def _finetune_text(settings: Settings, runtime: Runtime, announce: Callable[[str], None], progress: Progress) -> Result:
    text = textdata.read_labelled_text(settings.data)
    if text.header:
        announce(f"first line of {settings.data} is a header: {text.header!r}")
    state = textclass.load_state(settings.resume) if settings.resume else None
    if state is not None:
        # What shaped the run so far stays; --epochs may extend it.
        settings = replace(
            settings,
            batch=state.batch,
            seq=state.seq,
            seed=state.seed,
            lr=state.lr,
            held_out=state.held_out,
            dropout=state.dropout,
        )
        source = textclass.source_of(settings.resume)  # type: ignore[arg-type]
    else:
        source = textclass.source_of(settings.checkpoint) if settings.checkpoint else textclass.pretrained("minilm")
    known = state.classes if state else textclass.classes_of(source)
    classes = known or text.classes
    labels = textdata.label_ids(text.labels, classes, settings.data)
    if state is not None and state.data != text.fingerprint:
        raise LayoutOptError(
            f"{settings.data} is not what the run in {settings.resume} was trained on: resume with the same file, or "
            "start from its weights with --checkpoint"
        )
    if len(classes) < 2:
        raise LayoutOptError(f"{settings.data} has only the label {classes[0]!r}: a classifier needs at least two")
    data = Dataset({**textdata.encode(text.texts, source.directory / "tokenizer.json", settings.seq), "labels": labels})
    graph, _ = capture_model(
        "minilm",
        batch=settings.batch,
        seq=settings.seq,
        optimizer="adamw",
        labels=len(classes),
        dropout=settings.dropout,
    )
    _check_graph(settings, graph)
    data = Dataset({name: x for name, x in data.inputs.items() if name in graph.tensors})
    _check_samples(data, graph, settings.data)
    training, held_out = data.split(settings.held_out, settings.seed) if settings.held_out else (data, None)
    values = (
        textclass.load_run(settings.resume, graph)
        if settings.resume
        else textclass.initial(graph, source, settings.seed)
    )
    announce(f"{len(training)} training and {len(held_out or ())} held-out samples, classes {', '.join(classes)}")
    executor, predicted = _executor(settings, graph, values, runtime, announce, progress)
    result = _run(settings, executor, predicted, training, held_out, progress, state.step if state else 0)
    directory = settings.out_dir or settings.resume
    if directory is not None:
        reached = RunState(
            (state.step if state else 0) + result.steps,
            settings.epochs,
            settings.seed,
            tuple(classes),
            settings.batch,
            settings.seq,
            settings.lr,
            settings.held_out,
            text.fingerprint,
            settings.dropout,
        )
        textclass.save_run(directory, graph, executor.values(), source, reached)
        result = replace(result, directory=str(directory))
    return result


def _finetune_arrays(
    settings: Settings, runtime: Runtime, announce: Callable[[str], None], progress: Progress
) -> Result:
    from layoutopt.checkpoint import initial_values, load_safetensors, save_safetensors

    if settings.resume is not None:
        raise LayoutOptError(
            "--resume continues text runs only: give --checkpoint FILE.safetensors to start from weights"
        )
    graph = find_graph(settings.model)
    if settings.dropout and not has_dropout(graph):
        raise GraphError(
            f"graph {graph.name!r} has no dropout to leave on: capture it anew with `layoutopt capture --dropout`"
        )
    _check_graph(settings, graph)
    data = _arrays(settings.data, graph)
    training, held_out = data.split(settings.held_out, settings.seed) if settings.held_out else (data, None)
    given: dict[str, np.ndarray] = {}
    if settings.checkpoint is not None:
        inside = settings.checkpoint / "model.safetensors"  # what --out writes
        given = load_safetensors(graph, inside if settings.checkpoint.is_dir() else settings.checkpoint)
    values = initial_values(graph, settings.seed, given=given) | given
    executor, predicted = _executor(settings, graph, values, runtime, announce, progress)
    result = _run(settings, executor, predicted, training, held_out, progress)
    if settings.out_dir is not None:
        settings.out_dir.mkdir(parents=True, exist_ok=True)
        trained = executor.values()
        parameters = {t.name: trained[t.name] for t in graph.by_role("parameter")}
        save_safetensors(settings.out_dir / "model.safetensors", parameters, {"format": "pt"})
        result = replace(result, directory=str(settings.out_dir))
    return result


def _arrays(data: str, graph: TrainingGraph) -> Dataset:
    """The digits, or an .npz whose arrays are named as the graph's inputs."""
    shapes = {t.name: t.shape[1:] for t in graph.by_role("input") if t.shape}
    dataset = Dataset(read_arrays(data, shapes))
    _check_samples(dataset, graph, data)
    return dataset


def _check_samples(data: Dataset, graph: TrainingGraph, where: str) -> None:
    """See that every batch is one that the graph takes, before anything is measured or planned.

    Raises:
        GraphError: a wrong type, or an id or class out of range.
    """
    from kernels.feed import Feed

    feed = Feed(graph)
    for batch, _ in data.batches(batch_size(graph, data.target)):
        try:
            feed.check(batch, frozenset())
        except GraphError as error:
            raise GraphError(f"{where}: {error}") from error
