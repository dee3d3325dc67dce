"""Calibration: measure a device for a minute or two and return its model.

With graphs, the time goes to what planning those graphs will ask: kernels are measured in batches, the model is fitted
again after each, and the next batch holds the kernels that matter most under it: those predicted among the best of
their op, weighted by how often the op occurs and how long it takes. A random fifth of all kernels is held out: neither
the choice of batches nor the fit that is judged sees them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from costmodel.caches import caches_of
from costmodel.device import DeviceModel, Fact, FamilyFit, HeldOut, Measurement, Probe
from costmodel.features import FEATURES
from costmodel.fit import fit, judge, samples_of
from costmodel.microbench import probes
from costmodel.model import CostModel, spec_text
from costmodel.pool import Candidate, pool_of
from costmodel.runner import Bench, Prepared
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["BUDGET_S", "calibrate", "describe_held_out"]

BUDGET_S = 100.0
HELD_OUT_SHARE = 0.2
BATCH = 40
FIRST_ROUNDS = 3
LAST_ROUNDS = 3
SHARE_POOL = 0.12
"""Share of the budget that listing the kernels to choose from may take."""
SHARE_LAST = 0.12
"""Share kept for the rounds over everything at the end."""

Progress = Callable[[str, float], None]


def calibrate(
    runtime: Runtime,
    budget_s: float = BUDGET_S,
    graphs: Sequence[TrainingGraph] = (),
    progress: Progress | None = None,
    seed: int = 0,
) -> DeviceModel:
    """Measure the device.

    Args:
        runtime: the device.
        budget_s: wall time to spend, compiling included.
        graphs: measure for planning these; without any, a designed sample of every kernel family.
        progress: called with what is being done and the share of the budget used.
        seed: of data, sample and held-out share.

    Returns:
        A model with raw repetitions, fitted constants and the held-out error. Nothing is written.

    Raises:
        DeviceError: the device refuses a microbenchmark, or no kernel could be measured.
    """
    begin = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - begin) / budget_s

    def tell(what: str) -> None:
        if progress is not None:
            progress(what, min(spent(), 1.0))

    tell("microbenchmarks")
    model = _facts(runtime, probes(runtime))
    tell("listing kernels")
    bench = Bench(runtime, seed=seed)
    costs = CostModel(model)
    pool = pool_of(graphs, runtime.limits, costs.machine, seed, lambda: spent() > SHARE_POOL, bench.fits)
    measured: dict[str, tuple[Candidate, Prepared, list[int]]] = {}
    refused: list[str] = []
    constants: dict[str, FamilyFit] = {}
    while spent() < 1 - SHARE_LAST:
        batch = pool.choose(constants, costs, BATCH)
        if not batch:
            break
        tell(f"{len(measured)} of {len(pool)} kernels measured")
        ready: list[tuple[Candidate, Prepared]] = []
        for candidate in batch:
            try:
                ready.append((candidate, bench.prepare(candidate.kernel)))
            except DeviceError as error:
                refused.append(str(error))
            if spent() >= 1 - SHARE_LAST:
                break
        times = bench.rounds([p for _, p in ready], FIRST_ROUNDS)
        for (candidate, prepared), values in zip(ready, times, strict=True):
            measured[candidate.kernel.key] = (candidate, prepared, values)
        records = _records(measured, seed)
        constants = fit(samples_of(records.values(), held_out=False), FEATURES, finest="name")
    if not measured:
        raise DeviceError(
            f"no kernel could be measured on {runtime.info.label} in {budget_s:g} s"
            + (f" ({len(refused)} refused, the first: {refused[0]})" if refused else ": allow more time")
        )
    tell(f"{len(measured)} kernels measured, once more over all of them")
    everything = list(measured.values())
    again = bench.rounds([p for _, p, _ in everything], LAST_ROUNDS, lambda: spent() > 1)
    for (_, _, values), more in zip(everything, again, strict=True):
        values.extend(more)
    return _finish(model, _records(measured, seed), refused, time.monotonic() - begin)


def describe_held_out(report: HeldOut | None) -> str:
    """One line for people."""
    if report is None:
        return "held-out error: none (too few kernels were measured to hold any out)"
    return (
        f"held-out error on {report.kernels} kernels (fitted on {report.fitted_on} others): median "
        f"{report.median_error:.0%}, 90th percentile {report.p90_error:.0%}, within 10%: {report.within_10:.0%}, "
        f"within 20%: {report.within_20:.0%}, Kendall tau {report.tau:.2f}, among kernels of one operation "
        f"{report.tau_within_spec:.2f}"
    )


def _records(measured: dict[str, tuple[Candidate, Prepared, list[int]]], seed: int) -> dict[str, Measurement]:
    return {
        key: Measurement(
            variant=candidate.kernel.variant.label,
            spec=spec_text(candidate.kernel.spec),
            rounds_ns=tuple(values),
            features=tuple(float(f"{v:.8g}") for v in candidate.features),
            held_out=is_held_out(key, seed),
        )
        for key, (candidate, _, values) in sorted(measured.items())
    }


def is_held_out(key: str, seed: int) -> bool:
    """Whether the kernel of this key is held out: by its key and the seed alone, before anything is known of it."""
    return random.Random(f"{seed} {key}").random() < HELD_OUT_SHARE


def _facts(runtime: Runtime, found: dict[str, Probe]) -> DeviceModel:
    device = runtime.info

    def rate(name: str) -> Fact:
        return Fact(float(f"{found[name].per_s:.6g}"), f"measured: {found[name].what}", "high")

    widest = max((n for n in found if n.startswith("fma_")), key=lambda n: found[n].per_s)
    launch = Fact(float(f"{1 / found['launch'].per_s:.6g}"), f"measured: {found['launch'].what}", "medium")
    return DeviceModel(
        name=device.name,
        driver=device.driver,
        platform=f"{device.platform} {device.platform_version}",
        limits=runtime.limits,
        origin="calibrated",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        caches=caches_of(runtime),
        facts={
            "flops_per_s": rate(widest),
            "memory_bytes_per_s": rate("copy_memory"),
            "cache_bytes_per_s": rate("copy_cache"),
            "launch_s": launch,
        },
        probes=found,
        features=FEATURES,
    )


def _finish(model: DeviceModel, records: dict[str, Measurement], refused: list[str], seconds: float) -> DeviceModel:
    facts = dict(model.facts)
    if refused:
        facts["kernels_refused"] = Fact(float(len(refused)), f"the first: {refused[0][:300]}", "high")
    return replace(
        model,
        facts=facts,
        measurements=records,
        constants=fit(samples_of(records.values()), FEATURES),
        held_out=judge(records, FEATURES),
        budget_s=round(seconds, 1),
    )
