"""Strategies side by side on one graph and device: predicted, simulated and measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.stepcost import predict_step

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime

__all__ = ["Row", "compare", "gap_to_exact", "measure_interleaved"]


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        strategy: name.
        status: what the solver proved ("HEURISTIC" for a strategy).
        gap: predicted kernels and relayouts over those of the exact plan, less one, with copies that are not run; None
            where there is no exact plan beside it.
        predicted_s: step time by the cost model (see ``layoutopt/stepcost.py``).
        measured_s: median of the measured step times; None where nothing was measured.
        spread_s: half the distance between the quartiles.
        rounds: measured steps.
        relayouts: conversions in a step.
        relayout_bytes: bytes that they read and write.
        arena_bytes: device memory.
        misses: simulated misses by cache level; empty where nothing was simulated.
        memory_bytes: simulated traffic to memory.
        walked: share of the simulated accesses that were walked.
        loss: of the measured step on made-up inputs: the same for all strategies up to rounding. Of a forward pass, the
            mean of the first output.
        not_run: copies that the runtime whose layouts these are makes, and that no kernel here does: they are in
            ``gap`` and ``not_run_s``, not in ``predicted_s`` or what was measured.
        not_run_s: their predicted time.
    """

    strategy: str
    status: str
    gap: float | None
    predicted_s: float
    measured_s: float | None
    spread_s: float | None
    rounds: int
    relayouts: int
    relayout_bytes: int
    arena_bytes: int
    misses: Mapping[str, float]
    memory_bytes: float | None
    walked: float | None
    loss: float | None
    not_run: int = 0
    not_run_s: float = 0.0


def measure_interleaved(
    graph: TrainingGraph,
    plans: Mapping[str, Plan],
    runtime: Runtime,
    values: Mapping[str, np.ndarray],
    *,
    rounds: int,
    budget_s: float,
    progress: Callable[[int, int], None] | None = None,
    burst: int = 1,
) -> dict[str, tuple[list[float], float]]:
    """Host seconds of whole steps, ``burst`` of each plan in turn, and the loss of each plan's first step.

    Of a forward pass, what stands for the loss is the mean of the first output. The host waits for the device once a
    turn. Stops after ``rounds`` rounds or when ``budget_s`` is used up (at least three rounds).
    """
    from kernels.execute import Executor

    inputs = example_inputs(graph)
    executors, losses = {}, {}
    for name, plan in plans.items():
        executors[name] = Executor(runtime, graph, plan, dict(values))
        executors[name].step(inputs)
        losses[name] = float(np.mean(executors[name].read(graph.outputs[0])))
    times: dict[str, list[float]] = {name: [] for name in plans}
    names = list(plans)
    started = time.perf_counter()
    for number in range(rounds):
        # Another strategy goes first each round, so that none always follows the same neighbour.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            for _ in range(burst):
                executors[name].step(inputs)
            executors[name].read(graph.outputs[0])
            times[name].append((time.perf_counter() - begin) / burst)
        if progress:
            progress(number + 1, rounds)
        if number >= 2 and time.perf_counter() - started > budget_s:
            break
    for executor in executors.values():
        executor.close()
    return {name: (times[name], losses[name]) for name in plans}


def compare(
    graph: TrainingGraph,
    plans: Mapping[str, Plan],
    model: DeviceModel,
    *,
    runtime: Runtime | None = None,
    values: Mapping[str, np.ndarray] | None = None,
    simulate_caches: bool = True,
    rounds: int = 15,
    budget_s: float = 60.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """A row per plan.

    Args:
        graph: the step.
        plans: by strategy name.
        model: of the device: caches, and what a launch and the host take.
        runtime: device to measure on; None measures nothing.
        values: parameters and state to measure with (NaN-free); made up from the graph's initialisers by default.
        simulate_caches: run the cache simulator.
        rounds: measured steps of each plan, interleaved.
        budget_s: seconds that measuring may take.
        progress: called with (what, done, of).
    """
    from layoutopt.checkpoint import initial_values

    measured: dict[str, tuple[list[float], float]] = {}
    if runtime is not None:
        start = values if values is not None else initial_values(graph, 0)
        tell = (lambda done, of: progress("measuring", done, of)) if progress else None
        measured = measure_interleaved(graph, plans, runtime, start, rounds=rounds, budget_s=budget_s, progress=tell)
    rows = []
    for number, (name, plan) in enumerate(plans.items()):
        report = None
        if simulate_caches:
            from simulator.simulate import simulate

            report = simulate(graph, plan, model)
        if progress:
            progress("simulating", number + 1, len(plans))
        times, loss = measured.get(name, ([], None))
        rows.append(
            Row(
                name,
                plan.solver.status,
                gap_to_exact(plan, plans),
                predict_step(plan, graph, model).step_s,
                statistics.median(times) if times else None,
                _half_quartiles(times),
                len(times),
                len(plan.relayouts),
                sum(r.bytes_moved for r in plan.relayouts),
                plan.arena_bytes,
                dict(zip(report.levels, report.total.misses, strict=True)) if report else {},
                report.total.memory_read_bytes + report.total.memory_written_bytes if report else None,
                report.walked if report else None,
                loss,
                plan.solver.not_run_copies,
                plan.solver.not_run_ns * 1e-9,
            )
        )
    return rows


def gap_to_exact(plan: Plan, plans: Mapping[str, Plan]) -> float | None:
    """What a plan's kernels, relayouts and copies that are not run take over the exact plan's, less one.

    Args:
        plan: one of ``plans``.
        plans: by strategy name; None is returned where "ilp" is not among them.
    """
    if "ilp" not in plans:
        return None
    return (plan.solver.objective_ns + plan.solver.not_run_ns) / plans["ilp"].solver.objective_ns - 1


def _half_quartiles(times: Sequence[float]) -> float | None:
    if len(times) < 2:
        return None
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2
