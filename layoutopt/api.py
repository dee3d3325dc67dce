"""The verbs: ``capture``, ``calibrate``, ``plan``, ``simulate``, ``compare``, ``train``.

They take what users have (names, paths, modules, objects) and hand it to what the command line calls, too. Their names
and arguments are stable, see ``docs/library.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from layoutopt.api_device import announce, in_words, model_of, opened
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.show import Progress

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from costmodel.device import DeviceModel
    from layoutopt.api_device import Device, GivenModel, Memory
    from layoutopt.compare import Row
    from layoutopt.compiled import Compiled
    from layoutopt.finetune import Result
    from layoutopt.optimizers import Optimizer
    from layoutopt.trainer_types import TrainOutput
    from simulator.simulate import CacheReport

    PathLike = str | os.PathLike[str]
    Graph = TrainingGraph | PathLike
    """A graph, its file, or the name of one that ships (``minilm``)."""

__all__ = ["calibrate", "capture", "compare", "graph_of", "plan", "simulate", "train"]


def graph_of(given: Graph) -> TrainingGraph:
    """A graph as users name it.

    Raises:
        GraphError: no such file or name.
    """
    from layoutopt.models import find_graph

    return given if isinstance(given, TrainingGraph) else find_graph(os.fspath(given))


def capture(
    model: PathLike | nn.Module,
    example: Any = None,
    *,
    loss: Any = None,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str | Mapping[str, Any] | Optimizer | None = "adamw",
    labels: int | None = None,
    mode: str = "full",
    dropout: bool = False,
    micro_batches: int = 1,
    batch_axes: Mapping[str, int] | None = None,
    name: str = "",
    keep_outputs: bool = True,
    output: PathLike | None = None,
) -> TrainingGraph:
    """The training step of a model as a graph: forward, loss, backward, update.

    Args:
        model: the name of a zoo model (``layoutopt capture --list``), ``package.module:factory``, an ``.onnx`` file, or
            a ``torch.nn.Module``.
        example: for a module: a batch as it takes it, a dict of tensors or a tuple of them.
        loss: for a module that returns no loss: ``(module, batch) -> loss`` or ``-> (loss, outputs)``.
        batch: samples; for a name.
        seq: tokens a sample; for a name.
        optimizer: "adamw", "sgd", "none", or an ``AdamW`` or ``Sgd`` with its settings.
        labels: classes; for a name.
        mode: what is trained: full, lora, head, bias; or forward: nothing. Of a module, full or forward.
        dropout: leave dropout as the model has it.
        micro_batches: equal parts of the batch, whose gradients are added up.
        batch_axes: for a module: the axis that holds the samples, by input, where it is not the first.
        name: of a module's graph; its class by default.
        keep_outputs: for a module: keep what it gives beside the loss, to be read after a step.
        output: file to write the graph to.

    Returns:
        The graph, after the passes.

    Raises:
        LayoutOptError: torch is missing, a name is unknown, or an operation is not known.
    """
    from layoutopt.facade import capture_model, passed
    from layoutopt.files import check_target
    from layoutopt.graphfile import save

    if output is not None:
        check_target(output)
    if isinstance(model, str | os.PathLike):
        if example is not None or loss is not None or batch_axes is not None or name:
            raise GraphError(
                f"{model} brings its own batch and loss: example, loss, batch_axes and name are a module's"
            )
        if not (optimizer is None or isinstance(optimizer, str)):
            raise GraphError("a model given by name takes an optimizer by name: adamw, sgd or none")
        graph, _ = capture_model(
            os.fspath(model),
            batch=batch,
            seq=seq,
            optimizer=optimizer or "none",
            labels=labels,
            mode=mode,
            dropout=dropout,
            micro_batches=micro_batches,
        )
    else:
        if (batch, seq, labels) != (None, None, None):
            raise GraphError("a module's sizes are its example's: leave batch, seq and labels out")
        captured = _capture_module(model, example, loss, optimizer, mode, dropout, batch_axes, name, keep_outputs)
        graph, _ = passed(captured, micro_batches)
    if output is not None:
        save(graph, output)
    return graph


def _capture_module(
    module: Any,
    example: Any,
    loss: Any,
    optimizer: str | Mapping[str, Any] | Optimizer | None,
    mode: str,
    dropout: bool,
    batch_axes: Mapping[str, int] | None,
    name: str,
    keep_outputs: bool,
) -> TrainingGraph:
    if not hasattr(module, "named_parameters"):
        kind = type(module).__name__
        raise GraphError(f"cannot capture a {kind}: give a zoo name, package.module:factory or a torch.nn.Module")
    if example is None:
        raise GraphError(f"capturing {type(module).__name__} needs an example batch: capture(module, example)")
    from layoutopt.capture import capture_forward
    from layoutopt.compiled_torch import as_example, capture_step
    from layoutopt.optimizers import optimizer_from

    if mode == "forward":
        return capture_forward(module, as_example(example), name=name, batch_axes=batch_axes)
    if mode != "full":
        raise GraphError(f"mode {mode!r} of a module: freeze its parameters (requires_grad_(False)); full or forward")
    return capture_step(
        module,
        as_example(example),
        loss=loss,
        optimizer=optimizer_from(optimizer),
        dropout=dropout,
        batch_axes=batch_axes,
        name=name,
        keep_outputs=keep_outputs,
    )


def calibrate(
    graphs: Graph | Sequence[Graph] = (),
    *,
    device: Device = None,
    storage: str = "fp32",
    budget_s: float | None = None,
    thorough: bool = False,
    fresh: bool = False,
    output: PathLike | None = None,
) -> DeviceModel:
    """Measure a device, and keep its model.

    Args:
        graphs: whose kernels are measured.
        device: an index, a part of its name, or an open ``Runtime``.
        storage: how the graphs' numbers will lie in memory.
        budget_s: seconds; 180 on a CPU, 60 on a GPU by default, thrice that if thorough.
        thorough: more rounds, caches in finer steps.
        fresh: leave out what an interrupted calibration has measured.
        output: file to write; this user's data folder by default, where ``plan`` and others find it.

    Raises:
        LayoutOptError: no device, no such graph, or a file that cannot be written.
    """
    from layoutopt.files import check_target
    from layoutopt.models import calibrated_path
    from layoutopt.rewrites import check_storage
    from layoutopt.tuning import calibrate_to

    if output is not None:
        check_target(output)
    check_storage(storage)
    listed = [graphs] if isinstance(graphs, str | os.PathLike | TrainingGraph) else graphs
    loaded = [graph_of(graph) for graph in listed]
    runtime = opened(device)
    with Progress("calibrating") as bar:
        return calibrate_to(
            Path(output) if output is not None else calibrated_path(runtime.info),
            runtime,
            loaded,
            budget_s=budget_s,
            progress=bar.fraction,
            storage=storage,
            thorough=thorough,
            fresh=fresh,
            announce=announce,
        )


def plan(
    graph: Graph,
    *,
    device: Device = None,
    device_model: GivenModel = None,
    strategy: str = "ilp",
    memory: Memory = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
    time_limit_s: float = 60.0,
    costs: str = "model",
    calibration_s: float = 60.0,
    output: PathLike | None = None,
) -> Plan:
    """Every layout, kernel and conversion of a step, chosen at once and validated.

    Args:
        graph: a graph, its file, or the name of one that ships.
        device: to plan for: an index, a part of its name, or an open ``Runtime``.
        device_model: to plan for, instead: the name of one that ships, a file, or the object. No device is needed then.
        strategy: "ilp" (exact), "greedy", "rowmajor", …
        memory: device memory that the step may use: ``"512MiB"``, or bytes.
        storage: how large tensors lie in memory: fp32, fp16; int8 or nf4 for weights that are only read.
        micro_batches: equal parts of the batch, one after the other; by default as memory asks for.
        time_limit_s: for the exact solver.
        costs: "model", or "simulated": a roofline over simulated cache traffic.
        calibration_s: seconds to measure the device for, where it has no calibration for this graph; 0 measures
            nothing.
        output: file to write the plan to.

    Raises:
        InfeasibleError: nothing fits the budget.
        LayoutOptError: a bad name, size or file; no device and no device model.
    """
    from layoutopt.facade import check_request, solve_plan
    from layoutopt.files import check_target
    from layoutopt.plan import save

    if output is not None:
        check_target(output)
    loaded = graph_of(graph)
    check_request([strategy], in_words(memory), loaded, storage, micro_batches)
    model = model_of(device_model, device, [loaded], storage=storage, calibration_s=calibration_s)
    with Progress("planning") as bar:
        solved = solve_plan(
            loaded,
            model,
            strategy=strategy,
            memory=in_words(memory),
            time_limit_s=time_limit_s,
            progress=bar.fraction,
            storage=storage,
            micro_batches=micro_batches,
            costs=costs,
        )
    if output is not None:
        save(solved, output)
    return solved


def simulate(
    target: Plan | Graph,
    graph: Graph | None = None,
    *,
    device: Device = None,
    device_model: GivenModel = None,
    strategy: str = "ilp",
    memory: Memory = None,
    storage: str = "fp32",
    time_limit_s: float = 60.0,
    calibration_s: float = 60.0,
    max_accesses: float = 2_000_000,
    repeats: int = 3,
    seed: int = 0,
) -> CacheReport:
    """What a step does to the caches of a device: hits, misses and bytes by op, operand, tensor and phase.

    Args:
        target: a plan or its ``.json`` file; or a graph, its file or name, which is planned first.
        graph: the plan's; by default it is looked for beside the file and among those that ship.
        device: as of :func:`plan`.
        device_model: as of :func:`plan`; whose caches are simulated.
        strategy: of a graph's plan.
        memory: of a graph's plan.
        storage: of a graph's plan.
        time_limit_s: for the exact solver.
        calibration_s: as of :func:`plan`.
        max_accesses: of a launch, before its work groups are sampled.
        repeats: of equal steps so many are simulated; 0: all.
        seed: of the sample.

    Raises:
        LayoutOptError: the plan is for another graph or device, or a bad name or file.
    """
    from layoutopt.facade import check_request, solve_plan
    from layoutopt.models import check_serves
    from simulator.simulate import simulate as run_simulation

    planned, loaded = _planned(target, graph)
    if planned is None:
        check_request([strategy], in_words(memory), loaded, storage)
    model = model_of(device_model, device, [loaded], storage=storage, calibration_s=calibration_s)
    if planned is None:
        planned = solve_plan(
            loaded, model, strategy=strategy, memory=in_words(memory), time_limit_s=time_limit_s, storage=storage
        )
    else:
        check_serves(planned, f"the plan of {planned.graph_name}", loaded, model)
    with Progress("simulating") as bar:
        return run_simulation(
            loaded, planned, model, max_accesses=max_accesses, repeats=repeats, seed=seed, progress=bar.count
        )


def _planned(target: Plan | Graph, graph: Graph | None) -> tuple[Plan | None, TrainingGraph]:
    """A plan with its graph, or a graph that is to be planned."""
    from layoutopt.models import graph_of_plan
    from layoutopt.plan import load

    if isinstance(target, Plan):
        return target, graph_of_plan(target, Path("plan.json"), None) if graph is None else graph_of(graph)
    if isinstance(target, str | os.PathLike) and os.fspath(target).endswith(".json"):
        found = load(target)
        return found, graph_of_plan(found, Path(target), None) if graph is None else graph_of(graph)
    if graph is not None:
        raise LayoutOptError("simulate takes a plan with its graph, or one graph to plan: leave the second out")
    return None, graph_of(target)


def compare(
    graph: Graph,
    strategies: Sequence[str] = (),
    *,
    device: Device = None,
    device_model: GivenModel = None,
    memory: Memory = None,
    storage: str = "fp32",
    time_limit_s: float = 60.0,
    calibration_s: float = 60.0,
    measure: bool = True,
    caches: bool = True,
    rounds: int = 15,
    values: Mapping[str, np.ndarray] | None = None,
) -> list[Row]:
    """Strategies side by side: predicted, simulated, measured.

    Args:
        graph: a graph, its file, or the name of one that ships.
        strategies: by name; all by default.
        device: as of :func:`plan`; where steps are measured.
        device_model: as of :func:`plan`.
        memory: as of :func:`plan`.
        storage: as of :func:`plan`.
        time_limit_s: for the exact solver.
        calibration_s: as of :func:`plan`.
        measure: run each plan on the device.
        caches: run the cache simulator.
        rounds: measured steps of each plan, in turn.
        values: parameters and state to measure with; made up by default.

    Returns:
        A row per strategy.

    Raises:
        LayoutOptError: a bad name, size or file; a device model of another device than the one that measures.
    """
    from layoutopt import models
    from layoutopt.compare import compare as run_comparison
    from layoutopt.facade import check_request, solve_all

    if isinstance(strategies, str):
        raise LayoutOptError(f"strategies is the text {strategies!r}: give a list of names")
    loaded = graph_of(graph)
    check_request(strategies, in_words(memory), loaded, storage)
    runtime = opened(device) if measure else None
    model = model_of(
        device_model, runtime if measure else device, [loaded], storage=storage, calibration_s=calibration_s
    )
    if runtime is not None:
        models.check_device(model.name, f"device model {model.name}", runtime)
    with Progress("planning") as bar:
        plans = solve_all(
            loaded,
            model,
            strategies,
            memory=in_words(memory),
            time_limit_s=time_limit_s,
            progress=bar.fraction,
            storage=storage,
        )
    with Progress("comparing") as bar:
        return run_comparison(
            loaded,
            plans,
            model,
            runtime=runtime,
            values=values,
            simulate_caches=caches,
            rounds=rounds,
            progress=bar.stage,
        )


@overload
def train(model: PathLike, data: PathLike, *, device: Device = None, **settings: Any) -> Result: ...


@overload
def train(model: nn.Module | Compiled, data: Any, *, device: Device = None, **settings: Any) -> TrainOutput: ...


def train(model: Any, data: Any, *, device: Device = None, **settings: Any) -> Any:
    """Plan and fine-tune on the device.

    Args:
        model: "minilm", a graph file or the name of one that ships, as ``layoutopt train`` takes them; or a
            ``torch.nn.Module``, or what ``compile`` made of one.
        data: for a name: a file of ``label<TAB>text`` lines, an ``.npz`` of graph inputs, or "digits". For a module:
            samples, see :class:`layoutopt.Trainer`.
        device: to run on.
        settings: for a name, those of ``layoutopt.finetune.Settings`` (epochs, batch, lr, out_dir, …); for a module,
            those of :class:`layoutopt.TrainingArguments`.

    Returns:
        For a name a ``layoutopt.finetune.Result``; for a module what ``Trainer.train`` returns.

    Raises:
        LayoutOptError: a bad setting, file or number; nothing half-written stays behind.
    """
    from dataclasses import fields

    from layoutopt.finetune import Settings, finetune
    from layoutopt.trainer import Trainer
    from layoutopt.trainer_types import TrainingArguments

    named = isinstance(model, str | os.PathLike)
    known = [f.name for f in fields(Settings if named else TrainingArguments) if f.name not in ("model", "data")]
    for key in settings:
        if key not in known:
            raise LayoutOptError(f"train has no setting {key!r} here: expected one of {', '.join(known)}")
    if not named:
        options = {} if device is None else {"device": device}
        with Trainer(model, TrainingArguments(**settings), train_dataset=data, compile_options=options) as trainer:
            return trainer.train()
    for key in ("out_dir", "resume", "checkpoint", "plan"):
        if settings.get(key) is not None:
            settings[key] = Path(settings[key])
    wanted = Settings(os.fspath(model), os.fspath(data), **{**settings, "memory": in_words(settings.get("memory"))})
    with Progress("training") as bar:
        return finetune(wanted, opened(device), announce=announce, progress=bar)
