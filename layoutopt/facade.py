"""The verbs behind the command line: capture by name, plan by strategy name and memory in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layoutopt.collector import collector_paused
from layoutopt.errors import InfeasibleError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import in_micro_batches
from layoutopt.passes import PassReport, run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import STORAGES, check_storage, rewritten

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from costmodel.model import CostModel

__all__ = ["COSTS", "capture_model", "check_request", "costs_of", "memory_bytes", "passed", "solve_all", "solve_plan"]

COSTS = ("model", "simulated")
"""Where prices of kernels come from: measurements, fits and rooflines; or a roofline over simulated cache traffic."""

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_bytes(text: str | None) -> int | None:
    """``512MiB`` as bytes.

    Raises:
        LayoutOptError: not a size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise LayoutOptError(
            f"memory {text!r} is not a size: expected a number with B, KiB, MiB or GiB, such as 512MiB"
        )
    return int(float(match[1]) * _UNITS[(match[2] or "b").lower()])


def capture_model(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: str = "adamw",
    labels: int | None = None,
    mode: str = "full",
    dropout: bool = False,
    micro_batches: int = 1,
) -> tuple[TrainingGraph, PassReport]:
    """Capture a zoo model, ``package.module:factory`` or an ``.onnx`` file, and run the passes.

    The graph runs its samples in so many micro-batches (see ``layoutopt/microbatch.py``).

    Raises:
        LayoutOptError: torch is not installed, a name, mode or optimizer is unknown, or the samples cannot be cut so.
    """
    if name.endswith(".onnx"):
        from layoutopt.onnx_read import read_onnx

        if labels is not None or mode != "full" or dropout:
            raise LayoutOptError(
                f"{name} is read as an inference graph: only --batch and --seq may be set, not labels, mode or dropout"
            )
        captured = read_onnx(name, batch=batch, seq=seq)
    else:
        try:
            from layoutopt import zoo
        except ImportError as error:
            raise LayoutOptError(f"capturing needs {error.name}: pip install 'layoutopt[torch]'") from error
        captured = zoo.capture_named(
            name, batch=batch, seq=seq, optimizer=optimizer, num_labels=labels, mode=mode, dropout=dropout
        )
    return passed(captured, micro_batches)


def passed(captured: TrainingGraph, micro_batches: int = 1) -> tuple[TrainingGraph, PassReport]:
    """A graph as captured after the passes, its samples in so many micro-batches, with facts about its step.

    Raises:
        GraphError: the samples cannot be cut so.
    """
    from layoutopt.workload import facts

    graph, report = run_passes(captured)
    graph = in_micro_batches(graph, micro_batches)
    meta = {**graph.meta, "facts": facts(graph)}
    if micro_batches != 1 and meta.get("command"):
        meta["command"] = f"{meta['command']} --micro-batches {micro_batches}"
    return graph.with_ops(graph.ops, meta=meta), report


def check_request(
    strategies: Sequence[str],
    memory: str | None,
    graph: TrainingGraph | None = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
) -> None:
    """Refuse at once what planning would refuse after its work: before a calibration, say.

    Args:
        strategies: by name.
        memory: budget in words.
        graph: what the budget is for; its weights alone may already be too much.
        storage: how its numbers lie in memory.
        micro_batches: that its samples are to be cut into.

    Raises:
        GraphError: the samples cannot be cut so.
        LayoutOptError: an unknown strategy or storage, or no size.
        InfeasibleError: the budget does not hold what stays on the device from step to step.
    """
    from layoutopt import planner

    for name in strategies:
        planner.check_strategy(name)
    check_storage(storage)
    budget = memory_bytes(memory)
    if graph is not None and micro_batches not in (None, 1):
        rewritten(graph, [f"micro:{micro_batches}"])
    if graph is None or budget is None:
        return
    graph = rewritten(graph, STORAGES[storage])
    resident = [t for t in graph.by_role("parameter", "state") if graph.storage_of[t.name] == t.name]
    need = sum(t.size_elems * t.item_bytes for t in resident)
    if need > budget:
        raise InfeasibleError(
            f"the parameters and optimizer state of {graph.name!r} alone take {need} bytes of device memory, "
            f"the budget is {budget}: allow more or use a smaller model"
        )


def costs_of(model: DeviceModel, costs: str = "model") -> CostModel:
    """What prices kernels on a device.

    Args:
        model: of the device.
        costs: one of ``COSTS``.

    Raises:
        LayoutOptError: it is none of them.
        DeviceError: simulated costs of a calibrated device, or of one whose caches nobody stated.
    """
    if costs == "simulated":
        from simulator.costs import SimulatedCosts

        return SimulatedCosts(model)
    if costs != "model":
        raise LayoutOptError(f"unknown costs {costs!r}: choose {' or '.join(COSTS)}")
    from costmodel.model import CostModel

    return CostModel(model)


def solve_plan(
    graph: TrainingGraph,
    model: DeviceModel,
    *,
    strategy: str = "ilp",
    memory: str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
    costs: str = "model",
) -> Plan:
    """One validated plan; ``micro_batches`` as ``planner.plan`` takes them, ``costs`` as ``costs_of`` does."""
    plans = solve_all(
        graph,
        model,
        [strategy],
        memory=memory,
        time_limit_s=time_limit_s,
        progress=progress,
        storage=storage,
        micro_batches=micro_batches,
        costs=costs,
    )
    return plans[strategy]


@collector_paused()
def solve_all(
    graph: TrainingGraph,
    model: DeviceModel,
    strategies: Sequence[str] = (),
    *,
    memory: str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
    costs: str = "model",
) -> dict[str, Plan]:
    """A validated plan per strategy (all of them by default), from one set of cost tables."""
    from layoutopt import planner

    names = list(strategies) or list(planner.STRATEGIES)
    check_request(names, memory, graph, storage, micro_batches)
    return planner.plan_all(
        graph,
        costs_of(model, costs),
        names,
        memory_bytes=memory_bytes(memory),
        time_limit_s=time_limit_s,
        progress=progress,
        storage=storage,
        micro_batches=micro_batches,
    )
