"""Calibration: measure a device for a minute or two and return its model.

With graphs, the time goes to what planning those graphs will ask: kernels are measured in batches, the model is fitted
again after each, and the next batch holds the kernels that matter most under it: those predicted among the best of
their op, weighted by how often the op occurs and how long it takes. A random fifth of all kernels is held out: neither
the choice of batches nor the fit that is judged sees them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from costmodel.cacheprobe import probe_caches
from costmodel.caches import caches_of, chase_facts
from costmodel.device import DeviceModel, Fact, FamilyFit, HeldOut, Measurement
from costmodel.features import FEATURES, features
from costmodel.fit import fit, judge, samples_of
from costmodel.microbench import probes
from costmodel.model import CostModel, spec_text
from costmodel.pool import Candidate, pool_of
from costmodel.rounds import settled_ns
from costmodel.runner import ARENA_BYTES, Bench, Prepared
from kernels.spec import Kernel
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.rewrites import calibration_name

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["BUDGET_S", "calibrate", "chase_seconds", "describe_held_out", "measured_facts"]

BUDGET_S = 100.0
HELD_OUT_SHARE = 0.2
BATCH = 40
TOGETHER = 10
"""Kernels compiled as one program: the compiler starts once, and time is looked at in between."""
SMALLEST_ARENA_BYTES = 4 << 20
BATCH_ROUNDS = 2
"""Rounds over a batch once it is prepared; rounds over all kernels so far follow in between and at the end."""
MOST_ROUNDS = 15
LEAST_ROUNDS = 5
SHARE_AGAIN = 0.15
"""Share of the time spent that rounds over all kernels so far may take."""
SHARE_POOL = 0.12
"""Share of the budget that listing the kernels to choose from may take."""
SHARE_LAST = 0.1
"""Share kept for the rounds over everything at the end."""

SHARE_REFINE = 0.4
"""Share of the budget kept for measuring what the planner would pick, where a planner is given."""

SHARE_CHASE = 0.08
"""Share of the budget for finding caches by pointer chase."""
CHASE_S = {"cpu": 9.0, "gpu": 7.0}
THOROUGH_CHASE_S = 60.0
LEAST_CHASE_S = {"cpu": 7.0, "gpu": 3.0}
"""With less time than this for it, nothing is chased: a CPU's caches are known anyway, a GPU's driver knows little."""

Progress = Callable[[str, float], None]
Chooser = Callable[[DeviceModel], Sequence[Kernel]]


def calibrate(
    runtime: Runtime,
    budget_s: float = BUDGET_S,
    graphs: Sequence[TrainingGraph] = (),
    progress: Progress | None = None,
    seed: int = 0,
    chooser: Chooser | None = None,
    base: DeviceModel | None = None,
    thorough: bool = False,
) -> DeviceModel:
    """Measure the device.

    Args:
        runtime: the device.
        budget_s: wall time to spend, compiling included.
        graphs: measure for planning these, as captured or rewritten; without any, a designed sample of every kernel
            family.
        progress: called with what is being done and the share of the budget used.
        seed: of data, sample and held-out share.
        chooser: names the kernels that plans under a model would run. What of them is not measured yet is measured, the
            model fitted anew and the chooser asked again, until it names nothing new or the time is used: a kernel is
            then chosen for what it takes, not for what was hoped of it.
        base: an earlier model of the same device whose microbenchmarks and measurements are kept and added to.
        thorough: chase caches for longer and in finer steps, and time every kernel in more rounds.

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

    if base is not None and (base.name, base.driver) != (runtime.info.name, runtime.info.driver):
        raise DeviceError(
            f"the model to add to is of {base.name!r} (driver {base.driver}), the device is {runtime.info.name!r} "
            f"(driver {runtime.info.driver}): calibrate without it"
        )
    tell("microbenchmarks")
    # Features of another version mean other things: its kernels are measured anew.
    known = dict(base.measurements) if base is not None and base.features == FEATURES else {}
    if base is None:
        chase_s = chase_seconds(runtime, budget_s, thorough)
        base = measured_facts(runtime, chase_s, thorough, lambda: tell("finding caches"))
    model = base
    model = replace(
        model,
        features=FEATURES,
        measurements={},
        graphs=tuple(dict.fromkeys([*model.graphs, *(calibration_name(g) for g in graphs)])),
    )
    tell("listing kernels")
    bench = Bench(runtime, arena_bytes=_arena_bytes(graphs), seed=seed)
    costs = CostModel(model)
    before = spent()  # what microbenchmarks took is no reason to choose from fewer kernels
    pool = pool_of(graphs, runtime.limits, costs.machine, seed, lambda: spent() > before + SHARE_POOL, bench.fits)
    session = _Session(bench, seed, known)
    constants: dict[str, FamilyFit] = fit(samples_of(known.values(), held_out=False), FEATURES) if known else {}
    again_s = 0.0
    end = 1 - SHARE_LAST - (SHARE_REFINE if chooser else 0.0)
    while spent() < end:
        batch = pool.choose(constants, costs, BATCH)
        if not batch:
            break
        tell(f"{len(session.candidates)} of {len(pool)} kernels measured")
        session.measure([c for c in batch if not session.knows(c.kernel.key)], lambda: spent() >= end)
        if again_s < SHARE_AGAIN * (time.monotonic() - begin):
            started = time.monotonic()
            session.round()
            again_s += time.monotonic() - started
        constants = fit(samples_of(session.records().values(), held_out=False), FEATURES, finest="name")
    if not session.candidates and not known:
        refused = f" ({len(session.refused)} refused, the first: {session.refused[0]})" if session.refused else ""
        raise DeviceError(
            f"no kernel could be measured on {runtime.info.label} in {budget_s:g} s{refused}: allow more time"
        )
    asking = 0.0  # share of the budget that the last question took: planning again must not outlast it
    while chooser and spent() + asking < 1 - SHARE_LAST:
        tell(f"{len(session.candidates)} kernels measured, planning with them")
        asked = spent()
        wanted = chooser(_finish(model, session.records(), session.refused, time.monotonic() - begin))
        asking = spent() - asked
        fresh = {k.key: k for k in wanted if not session.knows(k.key) and bench.fits(k)}
        if not fresh:
            break
        tell(f"measuring {len(fresh)} kernels that plans would run")
        batch = [Candidate(k, features(k, costs.machine), 1.0) for k in fresh.values()]
        session.measure(batch, lambda: spent() >= 1 - SHARE_LAST)
    tell(f"{len(session.candidates)} kernels measured, again over all of them")
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS * (2 if thorough else 1) and spent() > 1:
            break
        session.round()
    out = _finish(model, session.records(), session.refused, time.monotonic() - begin)
    session.close()
    return out


def _arena_bytes(graphs: Sequence[TrainingGraph]) -> int:
    """Size of each of the two arenas that kernels are timed over, so that together they are as large as a step.

    A step that fits in a cache finds its operands there; the same kernels over far more memory would be judged by
    misses that the step does not have.
    """
    if not graphs:
        return ARENA_BYTES
    step_bytes = max(sum(t.size_elems * t.item_bytes for t in graph.tensors.values()) for graph in graphs)
    largest_op = max(
        sum(graph.tensors[o.tensor].size_elems * 4 for o in op.operands) for graph in graphs for op in graph.ops
    )
    # Padded layouts and workspaces take more than the tensors: half as much again for the largest op.
    return min(max(step_bytes // 2, largest_op * 3 // 2, SMALLEST_ARENA_BYTES), ARENA_BYTES)


class _Session:
    """What has been measured so far.

    Args:
        bench: times kernels.
        seed: decides what is held out.
        known: measurements of an earlier session, kept unless measured again.
    """

    def __init__(self, bench: Bench, seed: int, known: Mapping[str, Measurement] | None = None) -> None:
        self._known = dict(known or {})
        self.candidates: dict[str, Candidate] = {}
        self.refused: list[str] = []
        self._bench, self._seed = bench, seed
        self._prepared: dict[str, Prepared] = {}
        self._rounds: list[dict[str, int]] = []

    def measure(self, batch: Sequence[Candidate], stop: Callable[[], bool]) -> None:
        """Prepare a batch, as much of it as there is time for, and time it."""
        ready: dict[str, Prepared] = {}
        for begin in range(0, len(batch), TOGETHER):
            chunk = batch[begin : begin + TOGETHER]
            self._bench.build([candidate.kernel for candidate in chunk])
            for candidate in chunk:
                key = candidate.kernel.key
                try:
                    ready[key] = self._bench.prepare(candidate.kernel)
                    self.candidates[key] = candidate
                except DeviceError as error:
                    self.refused.append(str(error))
            if stop():
                break
        self._prepared |= ready
        self._rounds += [self._bench.round(ready, backwards=n % 2 == 1) for n in range(BATCH_ROUNDS) if ready]

    def close(self) -> None:
        """Let go of kernels and their regions before the arenas they lie in: some drivers crash the other way round."""
        while self._prepared:
            self._prepared.popitem()
        self._bench.close()

    def knows(self, key: str) -> bool:
        """Whether a kernel was measured, now or in the earlier session."""
        return key in self.candidates or key in self._known

    def round(self) -> None:
        """Time every kernel of this session once more."""
        if not self._prepared:
            return
        self._rounds.append(self._bench.round(self._prepared, backwards=len(self._rounds) % 2 == 1))

    def records(self) -> dict[str, Measurement]:
        """All measurements, by key."""
        settled = settled_ns(self._rounds)
        return self._known | {
            key: Measurement(
                variant=candidate.kernel.variant.label,
                spec=spec_text(candidate.kernel.spec),
                rounds_ns=tuple(times[key] for times in self._rounds if key in times),
                features=tuple(float(f"{v:.8g}") for v in candidate.features),
                held_out=is_held_out(key, self._seed),
                ns=settled[key],
            )
            for key, candidate in sorted(self.candidates.items())
        }


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


def is_held_out(key: str, seed: int) -> bool:
    """Whether the kernel of this key is held out: by its key and the seed alone, before anything is known of it."""
    return random.Random(f"{seed} {key}").random() < HELD_OUT_SHARE


def chase_seconds(runtime: Runtime, budget_s: float, thorough: bool = False) -> float:
    """What of a calibration's budget goes to finding caches; 0 where it is too little to find any."""
    most = THOROUGH_CHASE_S if thorough else CHASE_S[runtime.limits.kind]
    share = min(budget_s * SHARE_CHASE * (2 if thorough else 1), most)
    return share if share >= LEAST_CHASE_S[runtime.limits.kind] else 0.0


def measured_facts(
    runtime: Runtime, chase_s: float = 0.0, thorough: bool = False, tick: Callable[[], None] = lambda: None
) -> DeviceModel:
    """A model of what microbenchmarks tell in a few seconds, bandwidths and peak rates; no kernel is measured.

    Args:
        runtime: the device.
        chase_s: seconds for finding caches by pointer chase; 0: caches are what system and driver say.
        thorough: chase in finer steps.
        tick: called after each round of the chase.

    Raises:
        DeviceError: the device refuses a microbenchmark.
    """
    device, found = runtime.info, probes(runtime)
    caches = probe_caches(runtime, chase_s, thorough=thorough, tick=tick) if chase_s else None

    def rate(name: str) -> Fact:
        return Fact(float(f"{found[name].per_s:.6g}"), f"measured: {found[name].what}", "high")

    widest = max((n for n in found if n.startswith("fma_")), key=lambda n: found[n].per_s)
    launch, host = (
        Fact(float(f"{1 / found[name].per_s:.6g}"), f"measured: {found[name].what}", "medium")
        for name in ("launch", "host_launch")
    )
    return DeviceModel(
        name=device.name,
        driver=device.driver,
        platform=f"{device.platform} {device.platform_version}",
        limits=runtime.limits,
        origin="calibrated",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        caches=caches_of(runtime, caches),
        facts=(chase_facts(caches) if caches else {})
        | {
            "flops_per_s": rate(widest),
            "memory_bytes_per_s": rate("copy_memory"),
            "cache_bytes_per_s": rate("copy_cache"),
            "launch_s": launch,
            "host_launch_s": host,
        },
        probes=found | dict(caches.probes if caches else {}),
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
