"""``layoutopt profile``: where a step's time goes, launch by launch, beside what the device could do.

Each launch is timed by device events on a profiling queue and set against a roofline: the slower of its arithmetic at
the device's peak rate and its compulsory bytes (every cache line that it touches, once; both ways where it updates in
place) at the bandwidth of copies from memory. A kernel whose operands still lie in a cache can be above 100%. The whole
step is timed apart, by the host's clock on the queue that training uses: what it takes beyond the sum of the kernels is
launches and the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.example import example_inputs
from layoutopt.stepcost import predict_step
from layoutopt.workload import op_flops

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.bind import BoundStep
    from kernels.execute import Executor
    from kernels.runtime import Runtime
    from kernels.spec import Kernel, Launch

__all__ = [
    "Group",
    "LaunchProfile",
    "Profile",
    "as_json",
    "grouped",
    "prepared",
    "print_profile",
    "profile",
    "roofline_model",
]


@dataclass(frozen=True)
class LaunchProfile:
    """One launch of a step.

    Attributes:
        step: position of its op or relayout in the plan.
        label: the op's name, or ``relayout:STORAGE#POSITION``.
        kind: of the op; "relayout" for conversions.
        phase: forward, loss, backward or update.
        kernel: the variant, with the entry where the kernel has several launches.
        spec: kind and shapes.
        layouts: per operand, as the op sees it.
        start_s: begin in the round that is shown, from the step's first launch.
        end_s: end in that round.
        time_s: median over the rounds.
        flops: useful arithmetic: what the kernel's nest does, and no more than the op needs.
        bytes: what must be moved.
        roofline_s: the least that the device's rates allow.
        bound: "arithmetic" or "memory", whichever roof is the lower.
    """

    step: int
    label: str
    kind: str
    phase: str
    kernel: str
    spec: str
    layouts: tuple[str, ...]
    start_s: float
    end_s: float
    time_s: float
    flops: float
    bytes: float
    roofline_s: float
    bound: str

    @property
    def share_of_roofline(self) -> float:
        """1 where the launch takes the least time possible."""
        return self.roofline_s / self.time_s if self.time_s else 0.0


@dataclass(frozen=True)
class Group:
    """Launches that have something in common."""

    name: str
    launches: int
    time_s: float
    flops: float
    bytes: float
    roofline_s: float

    @property
    def share_of_roofline(self) -> float:
        """Of all its launches together."""
        return self.roofline_s / self.time_s if self.time_s else 0.0


@dataclass(frozen=True)
class Profile:
    """A step that was measured.

    Attributes:
        graph: its name.
        device: label of the device.
        strategy: that planned it.
        flops_per_s: the device's peak rate.
        memory_bytes_per_s: bandwidth of copies from memory.
        launches: in order.
        steps_s: whole steps, by the host's clock.
        host_s: median time until a step is enqueued.
        arena_bytes: device memory.
        alive_bytes: of the arena, by position in the plan, what holds values that are still needed.
        predicted_s: of a whole step, from the costs that the plan states (``layoutopt/stepcost.py``).
    """

    graph: str
    device: str
    strategy: str
    flops_per_s: float
    memory_bytes_per_s: float
    launches: tuple[LaunchProfile, ...]
    steps_s: tuple[float, ...]
    host_s: float
    arena_bytes: int
    alive_bytes: tuple[int, ...]
    predicted_s: float

    @property
    def step_s(self) -> float:
        """Median of a whole step."""
        return median(self.steps_s)

    @property
    def kernels_s(self) -> float:
        """Sum of the launches."""
        return sum(launch.time_s for launch in self.launches)

    @property
    def gap_s(self) -> float:
        """What a step takes beyond its kernels; negative where launches overlap or events cost more than they show."""
        return self.step_s - self.kernels_s


def profile(
    executor: Executor,
    inputs: Mapping[str, np.ndarray],
    model: DeviceModel,
    *,
    rounds: int = 7,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure a step: ``rounds`` times whole, ``rounds`` times launch by launch, in turn.

    Args:
        executor: of the step; its parameters are updated.
        inputs: of every step.
        model: whose rates the roofline is made of, and what a launch takes.
        rounds: at least 1; one more goes before them and is not counted.
        progress: called with (rounds done, rounds).

    Raises:
        DeviceError: the model states no peak rate, bandwidth or time of a launch.
    """
    peak, bandwidth = model.number("flops_per_s"), model.number("memory_bytes_per_s")
    whole, enqueued, events = [], [], []
    for number in range(rounds + 1):
        executor.finish()
        begin = time.perf_counter()
        executor.step(inputs)
        returned = time.perf_counter()
        executor.finish()
        end = time.perf_counter()
        times = executor.launch_times(inputs)
        if number:  # the first makes caches and clocks ready
            whole.append(end - begin)
            enqueued.append(returned - begin)
            events.append(times)
        if progress:
            progress(number, rounds)
    shown = _middle_round(events)
    first_ns = min((start for launched in shown for start, _ in launched), default=0)
    launches: list[LaunchProfile] = []
    for position, step in enumerate(executor.steps):
        for number, (launch, counted) in enumerate(zip(step.kernel.launches, _counted(executor, step), strict=True)):
            start, end_ns = shown[position][number]
            lasted = median(float(e[position][number][1] - e[position][number][0]) for e in events) * 1e-9
            by_arithmetic, by_memory = counted[0] / peak, counted[1] / bandwidth
            launches.append(
                replace(
                    _described(position, step, launch),
                    start_s=(start - first_ns) * 1e-9,
                    end_s=(end_ns - first_ns) * 1e-9,
                    time_s=lasted,
                    flops=counted[0],
                    bytes=counted[1],
                    roofline_s=max(by_arithmetic, by_memory),
                    bound="arithmetic" if by_arithmetic > by_memory else "memory",
                )
            )
    plan = executor.plan
    return Profile(
        executor.graph.name,
        executor.runtime.info.label,
        plan.solver.strategy,
        peak,
        bandwidth,
        tuple(launches),
        tuple(whole),
        median(enqueued),
        plan.arena_bytes,
        _alive(executor),
        predict_step(plan, executor.graph, replace(model, limits=executor.limits)).step_s,
    )


def _middle_round(events: Sequence[list[list[tuple[int, int]]]]) -> list[list[tuple[int, int]]]:
    """The round whose kernels together take the median time."""
    ranked = sorted(events, key=lambda e: sum(end - start for launched in e for start, end in launched))
    return ranked[len(ranked) // 2]


def _described(position: int, step: BoundStep, launch: Launch) -> LaunchProfile:
    from costmodel.model import kernel_kind, spec_text

    kernel = step.kernel
    several = len(kernel.launches) > 1
    return LaunchProfile(
        position,
        step.label,
        kernel_kind(kernel.spec),
        step.phase,
        kernel.variant.label + (f" {launch.entry}" if several else ""),
        spec_text(kernel.spec),
        tuple(layout.describe() for layout in kernel.layouts),
        *(0.0,) * 6,
        "",
    )


def _counted(executor: Executor, step: BoundStep) -> list[tuple[float, float]]:
    """(arithmetic, bytes) of each launch; the nest's arithmetic beyond what the op needs is padding, and left out."""
    nests = [float(launch.nest.flops) for launch in step.kernel.launches]
    useful = op_flops(executor.graph, step.op) if step.op is not None else 0
    total = sum(nests)
    part = min(useful / total, 1.0) if useful and total else 1.0
    moved = (_moved_bytes(step.kernel, launch) for launch in step.kernel.launches)
    return [(flops * part, count) for flops, count in zip(nests, moved, strict=True)]


def _moved_bytes(kernel: Kernel, launch: Launch) -> float:
    """Lines that a launch touches, each once; what it updates in place is read and written."""
    from costmodel.features import FEATURES
    from costmodel.launches import Machine, launch_counts
    from kernels.spec import DeviceLimits

    bottomless = replace(Machine.of(DeviceLimits(), ()), sizes_bytes=(1 << 60,) * 3)  # misses no line twice
    per_unit, share = launch_counts(kernel, launch, bottomless)
    counts = dict(zip(FEATURES, per_unit, strict=True))
    touched = counts["unique_bytes"] * share
    written = counts["memory_bytes"] * share - touched  # the traffic that misses counts a stored line twice
    return touched + (written if kernel.spec.inplace else 0.0)


def _alive(executor: Executor) -> tuple[int, ...]:
    """Bytes of the arena in use, by position in the plan."""
    changes = np.zeros(len(executor.plan.steps) + 1, np.int64)
    for slot in executor.plan.arena:
        changes[slot.first] += slot.size_bytes
        changes[slot.last + 1] -= slot.size_bytes
    return tuple(int(n) for n in changes.cumsum()[:-1])


def prepared(
    target: str,
    runtime: Callable[[], Runtime],
    device_model: str | None,
    *,
    graph: str | None = None,
    strategy: str = "ilp",
    storage: str = "fp32",
    memory: str | None = None,
    time_limit_s: float = 60.0,
    announce: Callable[[str], None] = lambda _: None,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Executor, dict[str, np.ndarray], DeviceModel]:
    """What :func:`profile` takes, for a plan file, or for a graph that is planned now; inputs are made up.

    Args:
        target: a plan file (``….json``), a graph file or the name of one that ships.
        runtime: gives the device, once the input is known to be good.
        device_model: a file or a built-in name of a model of the device.
        graph: of the plan, where it is not beside it.
        strategy: for a graph.
        storage: how large tensors lie in memory, for a graph.
        memory: budget in words, for a graph.
        time_limit_s: of the exact solver, for a graph.
        announce: told in a sentence what is used.
        progress: of calibrating and planning.

    Raises:
        LayoutOptError: no such plan, graph or model, one that does not serve the device, or no device.
    """
    import layoutopt.plan as plans
    from kernels.execute import Executor
    from layoutopt import models
    from layoutopt.facade import check_request, solve_plan

    if target.endswith(".json"):
        plan = plans.load(target)
        loaded = models.graph_of_plan(plan, Path(target), graph)
        here = runtime()
        models.check_serves(plan, target, loaded, models.uncalibrated(here))
        model = roofline_model(device_model, here, announce=announce)
    else:
        if graph is not None:
            raise LayoutOptError(f"--graph names the graph of a plan, and {target} is no plan (….json): leave it out")
        loaded = models.find_graph(target)
        check_request([strategy], memory, loaded, storage)
        here = runtime()
        if device_model is not None:
            roofline_model(device_model, here)
        model = models.device_model(device_model, here, [loaded], announce=announce, progress=progress, storage=storage)
        plan = solve_plan(
            loaded,
            model,
            strategy=strategy,
            memory=memory,
            time_limit_s=time_limit_s,
            progress=progress,
            storage=storage,
        )
    return Executor(here, loaded, plan), example_inputs(loaded), model


def roofline_model(
    given: str | None, runtime: Runtime, *, announce: Callable[[str], None] = lambda _: None
) -> DeviceModel:
    """A model with the device's rates: the one given, else this user's calibration, else microbenchmarks made now.

    Raises:
        DeviceError: no such model, or it is of another device.
    """
    from costmodel import device as devices
    from costmodel.facts import measured_facts
    from layoutopt.models import calibrated_path, check_device

    if given is not None:
        model = devices.load(given)
        check_device(model.name, f"device model {given}", runtime)
        return model
    path = calibrated_path(runtime.info)
    if path.is_file():
        announce(f"device model {path}")
        return devices.load(path)
    announce(f"{runtime.info.name} has no calibration here: measuring its bandwidth and peak rate")
    return measured_facts(runtime)


# ---- what people and machines see -----------------------------------------------------------------------------------


def grouped(launches: Iterable[LaunchProfile], key: Callable[[LaunchProfile], str]) -> list[Group]:
    """Launches of equal ``key`` together, those that take longest first."""
    parts: dict[str, list[LaunchProfile]] = {}
    for launch in launches:
        parts.setdefault(key(launch), []).append(launch)
    groups = [
        Group(
            name,
            len(part),
            sum(x.time_s for x in part),
            sum(x.flops for x in part),
            sum(x.bytes for x in part),
            sum(x.roofline_s for x in part),
        )
        for name, part in parts.items()
    ]
    return sorted(groups, key=lambda g: -g.time_s)


_BY: dict[str, Callable[[LaunchProfile], str]] = {
    "phase": lambda x: x.phase,
    "kind": lambda x: x.kind,
    "kernel": lambda x: f"{x.kernel}  {x.spec}",
    "op": lambda x: f"{x.label}  {x.kernel}",
}


def as_json(found: Profile) -> dict[str, Any]:
    """Everything, as plain containers."""
    facts = {k: v for k, v in asdict(found).items() if k not in ("launches", "alive_bytes")}
    facts |= {"step_s": found.step_s, "kernels_s": found.kernels_s, "gap_s": found.gap_s}
    facts |= {"peak_alive_bytes": max(found.alive_bytes, default=0)}
    rows = {f"by_{name}": [_with_share(g) for g in grouped(found.launches, key)] for name, key in _BY.items()}
    return {**facts, **rows, "launches": [_with_share(x) for x in found.launches]}


def _with_share(row: Group | LaunchProfile) -> dict[str, Any]:
    return {**asdict(row), "share_of_roofline": row.share_of_roofline}


def print_profile(found: Profile, top: int) -> None:
    """The step, then a table per phase, kind, kernel and op."""
    from layoutopt.show import out, table

    low, _, high = quantiles(found.steps_s, n=4, method="inclusive") if len(found.steps_s) > 1 else (found.step_s,) * 3
    total = grouped(found.launches, lambda _: "step")
    out(f"{found.graph} ({found.strategy}) on {found.device}")
    out(
        f"roofline: {found.flops_per_s / 1e9:,.1f} GFLOP/s, {found.memory_bytes_per_s / 1e9:,.1f} GB/s; "
        f"arena {found.arena_bytes / 2**20:.1f} MiB, alive at most {max(found.alive_bytes, default=0) / 2**20:.1f}"
    )
    out(
        f"whole step {found.step_s * 1e3:.3f} ms ({low * 1e3:.3f}–{high * 1e3:.3f}), kernels "
        f"{found.kernels_s * 1e3:.3f} ms in {len(found.launches)} launches, gap {found.gap_s * 1e3:.3f} ms; "
        f"the host is done after {found.host_s * 1e3:.3f} ms; predicted {found.predicted_s * 1e3:.3f} ms"
    )
    for name, key in _BY.items():
        groups = grouped(found.launches, key)
        left = f" (the {top} longest of {len(groups)})" if len(groups) > top else ""
        head = [f"{name}{left}", "launches", "ms", "% of step", "GFLOP", "GFLOP/s", "MB", "GB/s", "% of roofline"]
        rows = total + groups if name == "phase" else groups[:top]
        table(head, [_cells(g, found.kernels_s) for g in rows])


def _cells(g: Group, all_s: float) -> list[str]:
    per_s = 1 / g.time_s if g.time_s else 0.0
    return [
        g.name,
        str(g.launches),
        f"{g.time_s * 1e3:.3f}",
        f"{100 * g.time_s / all_s if all_s else 0:.1f}",
        f"{g.flops / 1e9:.3f}",
        f"{g.flops * per_s / 1e9:,.1f}",
        f"{g.bytes / 1e6:.2f}",
        f"{g.bytes * per_s / 1e9:,.1f}",
        f"{100 * g.share_of_roofline:.0f}",
    ]
