"""``train --refine``: the running plan's kernels are measured where they run, and the plan is made anew with that.

Calibration times a kernel by itself. In a step it finds other data in the caches and other kernels before it, so that a
plan which is optimal for the calibrated costs need not be the fastest. Each round here times the running plan's kernels
within its steps, files those times in the device model, fits the model's constants again and solves again. A plan that
differs then runs beside the one so far, one step of each in turn, and takes its place only where it is faster; either
way its kernels' times within its steps are known in the next round.

Part of the face: it joins ``kernels`` and ``costmodel`` to planning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.compare import measure_interleaved
from layoutopt.example import example_inputs
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.stepcost import predict_step

if TYPE_CHECKING:
    from costmodel.device import DeviceModel, Measurement
    from kernels.bind import BoundStep
    from kernels.execute import Executor
    from kernels.runtime import Runtime

__all__ = ["Refined", "Round", "refine", "with_measurements", "within_step"]

STEPS = 7
"""Steps whose launches are timed, after one that is not."""
FASTER = 0.99
"""A new plan must take less than this share of the old one's time, by the median of paired rounds."""
BESIDE = 15
"""Rounds that two plans run in turn."""
BESIDE_S = 30.0


@dataclass(frozen=True)
class Round:
    """One plan made with what was measured.

    Attributes:
        changed: choices of kernels, layouts and relayouts that are not those of the plan before.
        predicted_s: of the new plan, by the model it was made with.
        measured_s: median of the new plan's steps.
        before_s: median of the steps of the plan so far, in the same rounds.
        ratio: median over rounds of new over old.
        kept: whether the new plan took the old one's place.
    """

    changed: int
    predicted_s: float
    measured_s: float
    before_s: float
    ratio: float
    kept: bool


@dataclass(frozen=True)
class Refined:
    """What came out.

    Attributes:
        plan: the fastest that was measured.
        model: the device model with what was measured within steps.
        rounds: in order, one for every plan that was run beside the one so far.
        settled: whether solving with all that was measured gives the plan that runs.
    """

    plan: Plan
    model: DeviceModel
    rounds: tuple[Round, ...]
    settled: bool

    @property
    def first_was_best(self) -> bool:
        """Whether the plan made from calibration alone was never beaten."""
        return not any(r.kept for r in self.rounds)


def refine(
    runtime: Runtime,
    graph: TrainingGraph,
    plan: Plan,
    model: DeviceModel,
    solve: Callable[[DeviceModel], Plan],
    *,
    values: Mapping[str, np.ndarray] | None = None,
    rounds: int = 3,
    announce: Callable[[str], None] = lambda _: None,
) -> Refined:
    """Measure, solve again, keep what is faster.

    Args:
        runtime: the device.
        graph: as captured.
        plan: of the graph, for this device.
        model: that it was made with.
        solve: makes a plan of the graph with a device model.
        values: parameters and state to measure with; made up by the graph's own rules when left out. They are copied.
        rounds: at most so many new plans.
        announce: told of each round, in a line.

    Raises:
        GraphError, DeviceError: as ``Executor`` and ``solve``.
    """
    from layoutopt.checkpoint import initial_values

    start = dict(values) if values is not None else initial_values(graph, 0)
    model = with_measurements(model, _measured(runtime, graph, plan, model, start))
    done: list[Round] = []
    dropped: list[Plan] = []
    for number in range(rounds):
        candidate = solve(model)
        changed = _changed(plan, candidate)
        if not changed:
            announce(f"round {number + 1}: the plan that runs is optimal for what was measured within steps")
            return Refined(plan, model, tuple(done), True)
        if any(not _changed(candidate, old) for old in dropped):
            announce(f"round {number + 1}: what would be optimal was measured before, and is not faster")
            break
        made = _beside(runtime, graph, plan, candidate, model, start, changed)
        done.append(made)
        verdict = "kept" if made.kept else "not faster, dropped"
        announce(
            f"round {number + 1}: {changed} choices changed, predicted {made.predicted_s * 1e3:.2f} ms, measured "
            f"{made.measured_s * 1e3:.2f} beside {made.before_s * 1e3:.2f} ms ({made.ratio:.3f}): {verdict}"
        )
        model = with_measurements(model, _measured(runtime, graph, candidate, model, start))
        if made.kept:
            plan = candidate
        else:
            dropped.append(candidate)
    return Refined(plan, model, tuple(done), False)


def _beside(
    runtime: Runtime,
    graph: TrainingGraph,
    plan: Plan,
    candidate: Plan,
    model: DeviceModel,
    start: dict[str, np.ndarray],
    changed: int,
) -> Round:
    plans = {"before": plan, "new": candidate}
    found = measure_interleaved(graph, plans, runtime, start, rounds=BESIDE, budget_s=BESIDE_S)
    (before, _), (new, _) = found["before"], found["new"]
    ratio = median(a / b for a, b in zip(new, before, strict=True))
    predicted_s = predict_step(candidate, graph, model).step_s
    return Round(changed, predicted_s, median(new), median(before), ratio, ratio < FASTER)


def _changed(plan: Plan, candidate: Plan) -> int:
    """Choices of the candidate (kernels, layouts, relayouts) that the plan does not make, or the other way round."""
    own, new = _choices(plan), _choices(candidate)
    return max(len(new - own), len(own - new))


def _choices(plan: Plan) -> set[tuple[object, ...]]:
    ops = {("op", op.op, op.variant, op.layouts) for op in plan.ops}
    moves = {("relayout", r.storage, r.target, r.before, r.variant) for r in plan.relayouts}
    stored = {("layout", name, repr(layouts)) for name, layouts in plan.layouts.items()}
    return ops | moves | stored


def _measured(
    runtime: Runtime, graph: TrainingGraph, plan: Plan, model: DeviceModel, start: dict[str, np.ndarray]
) -> dict[str, Measurement]:
    from kernels.execute import Executor

    executor = Executor(runtime, graph, plan, start)
    found = within_step(executor, model)
    executor.close()
    return found


def within_step(executor: Executor, model: DeviceModel, steps: int = STEPS) -> dict[str, Measurement]:
    """What a plan's kernels take within its steps, by kernel key; steps that share a launch are left out.

    Args:
        executor: of the plan; its parameters are updated ``steps + 1`` times with made-up inputs.
        model: of the device, for features.
        steps: timed ones.
    """
    from costmodel.device import Measurement
    from costmodel.features import features
    from costmodel.model import CostModel, layouts_text, spec_text

    inputs, shared = example_inputs(executor.graph), executor.shared
    executor.launch_times(inputs)
    taken: dict[str, list[int]] = defaultdict(list)
    bound: dict[str, BoundStep] = {}
    for _ in range(steps):
        times: dict[str, list[int]] = defaultdict(list)
        for step, launched in zip(executor.steps, executor.launch_times(inputs), strict=True):
            if step.label not in shared:
                bound[step.kernel.key] = step
                times[step.kernel.key].append(sum(end - begin for begin, end in launched))
        for key, own in times.items():  # a kernel that a step runs often has its median in each step
            taken[key].append(int(median(own)))
    machine = CostModel(model).machine
    return {
        key: Measurement(
            variant=bound[key].kernel.variant.label,
            spec=spec_text(bound[key].kernel.spec),
            rounds_ns=tuple(own),
            features=tuple(float(f"{v:.8g}") for v in features(bound[key].kernel, machine)),
            ns=int(median(own)),
            layouts=layouts_text(bound[key].kernel),
        )
        for key, own in taken.items()
    }


def with_measurements(model: DeviceModel, found: Mapping[str, Measurement]) -> DeviceModel:
    """The model with measurements added or replaced, and its constants fitted again.

    Args:
        model: calibrated.
        found: by kernel key. Those that the model held out of its judged fit stay held out.
    """
    from costmodel.features import FEATURES
    from costmodel.fit import fit, samples_of

    known = dict(model.measurements)
    for key, measurement in found.items():
        known[key] = replace(measurement, held_out=key in known and known[key].held_out)
    return replace(model, measurements=known, constants=fit(samples_of(known.values()), FEATURES))
