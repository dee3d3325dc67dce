"""Calibration: measure a device for a minute or three and return its model.

With graphs, the time goes to what planning those graphs will ask: kernels are measured in batches, the model is fitted
again after each, and the next batch holds the kernels that matter most under it: those predicted among the best of
their op, weighted by how often the op occurs and how long it takes. Then whoever plans is asked which kernels plans
would run, until nothing new is named. What time is left goes to rounds over the kernels whose medians are not known
tightly enough. A random fifth of all kernels is held out: neither the choice of batches nor the fit that is judged sees
them.

The budget is wall time, everything included: nothing is begun that, by what the like of it took so far, would not end
in time (``costmodel/session.py``). With a journal, an interrupted calibration goes on where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.budget import Budget, budget_seconds
from costmodel.constants import fit_constants
from costmodel.device import DeviceModel, Fact, FamilyFit, HeldOut
from costmodel.drift import anchor_kernels
from costmodel.facts import chase_seconds, measured_facts
from costmodel.features import FEATURES, features
from costmodel.fit import fit, judge, samples_of
from costmodel.journal import Journal, Kept
from costmodel.model import CostModel
from costmodel.pool import LEAST_PAIRS, PAIRS_PER_S, Candidate, Pool, pool_of
from costmodel.runner import ARENA_BYTES, Bench
from costmodel.session import HELD_OUT_SHARE, TOLERANCE, Session, is_held_out
from kernels.spec import Kernel
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.rewrite_updates import peak_bytes
from layoutopt.rewrites import calibration_name

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = [
    "HELD_OUT_SHARE",
    "Calibration",
    "arena_bytes",
    "calibrate",
    "describe_held_out",
    "describe_timing",
    "is_held_out",
    "question",
]

_LOG = logging.getLogger("layoutopt.costmodel")

BATCH = 40
SMALLEST_ARENA_BYTES = 4 << 20
LARGEST_ARENA_BYTES = 8 << 30
"""However large an op's operands are. A device whose memory is small sets a lower limit (``Bench``)."""
SHARE_AGAIN = 0.06
"""Share of the time spent that rounds over what is not tight yet may take while kernels are still being added."""
SHARE_POOL = 0.12
"""Share of the budget that listing the kernels to choose from may take."""
SHARE_LAST = 0.08
"""Share kept for the rounds at the end."""
SHARE_SPARE = 0.05
"""With more than this share left when all is tight, more kernels are measured."""
SHARE_REFINE = 0.4
"""Share of the budget kept for measuring what the planner would pick, where a planner is given."""
SHARE_SLOW = 0.01
"""Share of the budget from which on a kernel is run no more often than it takes to know its time roughly."""
SHARE_RESUMED = 0.25
"""Share that a calibration which is taken up again has at least: preparing its kernels takes time too."""
FINISH_S = 0.005
"""Seconds a kernel that the fit and its judge take at the end, until that was tried."""
TRIED = 60
"""It is tried with so many kernels, with twice as many, and so on, where that takes a small share of the time left."""
SHARE_TRY = 0.1
FINISH_GROWS = 1.5
"""What it takes grows with this power of the number of kernels: more of them get corrections that are tried too."""
FINISH_MARGIN = 1.2
JUDGED = 2.0
"""With its judge a fit takes so many times what it takes alone."""
SHARE_WHOLE_FIT = 0.1
"""A question to the planner is asked with the whole fit where that takes at most this share of the time left."""

Progress = Callable[[str, float], None]
Chooser = Callable[[DeviceModel, float], Sequence[Kernel]]


def calibrate(
    runtime: Runtime,
    budget_s: float | None = None,
    graphs: Sequence[TrainingGraph] = (),
    progress: Progress | None = None,
    seed: int = 0,
    chooser: Chooser | None = None,
    base: DeviceModel | None = None,
    thorough: bool = False,
    journal: Journal | None = None,
) -> DeviceModel:
    """Measure the device.

    Args:
        runtime: the device.
        budget_s: wall time to spend, compiling and planning included; by the device's kind when left out.
        graphs: measure for planning these, as captured or rewritten; without any, a designed sample of every kernel
            family.
        progress: called with what is being done and the share of the budget used.
        seed: of data, sample and held-out share.
        chooser: names the kernels that plans under a model would run, within some seconds, most wanted first. What of
            them is not measured yet is measured, the model fitted anew and the chooser asked again, until it names
            nothing new or the time is used: a kernel is then chosen for what it takes, not for what was hoped of it.
        base: an earlier model of the same device whose microbenchmarks and measurements are kept and added to.
        thorough: chase caches for longer and in finer steps, and time every kernel until it is known more tightly.
        journal: of the same ``question``; what it holds is taken up, what is measured is added to it.

    Returns:
        A model with raw repetitions, fitted constants and the held-out error. Nothing is written but the journal.

    Raises:
        DeviceError: the device refuses a microbenchmark, or no kernel could be measured.
    """
    budget = Budget(budget_s or budget_seconds(runtime.limits.kind, thorough))
    kept = journal.kept if journal else Kept()
    if kept.spent_s:
        budget.resume(kept.spent_s, SHARE_RESUMED * budget.total_s)

    def tell(what: str) -> None:
        _LOG.debug("calibrating %s: %s, %.0f%% of the time", runtime.info.short, what, 100 * budget.share)
        if progress is not None:
            progress(what, budget.share)

    if base is not None and (base.name, base.driver) != (runtime.info.name, runtime.info.driver):
        raise DeviceError(
            f"the model to add to is of {base.name!r} (driver {base.driver}), the device is {runtime.info.name!r} "
            f"(driver {runtime.info.driver}): calibrate without it"
        )
    # Features of another version mean other things: its kernels are measured anew.
    known = dict(base.measurements) if base is not None and base.features == FEATURES else {}
    tell("microbenchmarks")
    model = base or kept.facts
    if model is None:
        chase_s = chase_seconds(runtime, budget.total_s, thorough)
        model = measured_facts(runtime, chase_s, thorough, lambda: tell("finding caches"))
        if journal:
            journal.facts(model, budget.spent_s)
    names = dict.fromkeys([*model.graphs, *(calibration_name(g) for g in graphs)])
    model = replace(model, features=FEATURES, measurements={}, constants={}, graphs=tuple(names))
    tell("listing kernels")
    costs = CostModel(model)
    bench = Bench(runtime, arena_bytes=arena_bytes(graphs), seed=seed)
    session = Session(
        bench,
        runtime.limits.kind,
        seed,
        TOLERANCE[thorough],
        known=known,
        kept=kept,
        journal=journal,
        clock=budget.clock,
        begin_s=budget.begin_s,
        slow_s=SHARE_SLOW * budget.total_s,
    )
    try:
        session.anchor(anchor_kernels(runtime.limits, bench.fits))
        before = budget.share  # what microbenchmarks took is no reason to choose from fewer kernels
        pool = pool_of(
            graphs,
            runtime.limits,
            costs.machine,
            seed,
            lambda: budget.share > before + SHARE_POOL,
            bench.fits,
            max(LEAST_PAIRS, round(PAIRS_PER_S * budget.total_s)),
        )
        work = Calibration(session, model, costs, budget, tell)
        work.sample(pool, SHARE_REFINE if chooser else 0.0)
        if not session.entries and not known:
            first = f" ({len(session.refused)} refused, the first: {session.refused[0]})" if session.refused else ""
            raise DeviceError(
                f"no kernel could be measured on {runtime.info.label} in {budget.total_s:g} s{first}: allow more time"
            )
        if chooser:
            work.ask(chooser, bench.fits)
        work.tighten()
        work.use_up(pool)
        _LOG.info("%s: %d kernels measured, %d refused", runtime.info.short, len(session.entries), len(session.refused))
        for reason in session.refused:
            _LOG.debug("refused: %s", reason)
        return work.model()
    finally:
        session.close()


class Calibration:
    """The phases of a calibration once there are kernels to choose from.

    Args:
        session: measures.
        model: of the device, without kernels.
        costs: of that model.
        budget: of time.
        tell: told what is being done.
    """

    def __init__(
        self,
        session: Session,
        model: DeviceModel,
        costs: CostModel,
        budget: Budget,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._session, self._model, self._costs, self._budget, self._tell = session, model, costs, budget, tell
        self._again_s = 0.0
        self._tried, self._tried_s = 0, 0.0
        self._constants: dict[str, FamilyFit] = {}

    def left_s(self) -> float:
        """Seconds left to measure in: the fit and its judge at the end take some."""
        return self._budget.left_s - self._finish_s

    @property
    def _finish_s(self) -> float:
        """Seconds that the fit and its judge will take, by what they took when they were tried."""
        count = len(self._session.known())
        if not self._tried:
            return FINISH_S * count
        return FINISH_MARGIN * self._tried_s * (count / self._tried) ** FINISH_GROWS

    def sample(self, pool: Pool, later: float = 0.0, last: float = SHARE_LAST) -> None:
        """Measure kernels of the pool, those with most at stake first, leaving some of the budget.

        Args:
            pool: to choose from.
            later: share of the budget for other phases.
            last: share for rounds over what is not tight then.

        Kernels of an interrupted session that are not known tightly come first: they are prepared again.
        """
        kept_s = last * self._budget.total_s

        def left_s() -> float:
            return self.left_s() - later * self._budget.total_s

        if self._session.records():
            self._fit()
        batch = [c for c in pool.take(self._session.known()) if self._session.wants(c.kernel.key)]
        batch = batch or pool.choose(self._constants, self._costs, BATCH)
        while batch:
            self._tell(f"{len(self._session.entries)} of {len(pool)} kernels measured")
            tried = self._session.measure(batch, left_s, kept_s)
            pool.give_back(batch[tried:])
            if not tried:
                break
            self._once_more(left_s)
            self._fit()
            batch = pool.choose(self._constants, self._costs, BATCH)

    def ask(self, chooser: Chooser, fits: Callable[[Kernel], bool]) -> None:
        """Measure what the chooser names, until it names nothing new or there is no time."""
        asking_s = 0.0  # what the last question took: planning again must not outlast the budget
        while (left := self.left_s() - self._kept_s - asking_s) > 0:
            self._tell(f"{len(self._session.entries)} kernels measured, planning with them")
            begin = self._budget.spent_s
            wanted = chooser(self._so_far(), left)
            asking_s = self._budget.spent_s - begin
            fresh = {k.key: k for k in wanted if self._session.wants(k.key) and fits(k)}
            if not fresh:
                break
            self._tell(f"measuring {len(fresh)} kernels that plans would run, or nearly")
            batch = [Candidate(k, features(k, self._costs.machine), 1.0) for k in fresh.values()]
            if not self._session.measure(batch, self.left_s, self._kept_s):
                break
            self._once_more(self.left_s)

    def tighten(self) -> None:
        """Rounds over kernels that are not tight, until all are or the time is used."""
        while self._session.again(self.left_s()):
            self._tell(f"{self._session.tight()} of {len(self._session.entries)} kernels known tightly")

    def use_up(self, pool: Pool) -> None:
        """Where everything is tight before its time, more kernels of the pool."""
        while self.left_s() > SHARE_SPARE * self._budget.total_s:
            count = len(self._session.entries)
            self.sample(pool, SHARE_SPARE, 0.0)
            self.tighten()
            if len(self._session.entries) == count:
                break

    def model(self) -> DeviceModel:
        """The model with all that was measured, fitted and judged."""
        records, refused, drift = self._session.records(), self._session.refused, self._session.drift()
        facts = {k: v for k, v in self._model.facts.items() if k != "kernels_refused"}
        if refused:
            facts["kernels_refused"] = Fact(float(len(refused)), f"the first: {refused[0][:300]}", "high")
        facts["kernels_tight"] = Fact(float(self._session.tight()), self._session.describe_tight(), "high")
        facts["speed_drift"] = Fact(float(f"{drift.span:.4g}"), f"measured by anchors: {drift.describe()}", "medium")
        return replace(
            self._model,
            facts=facts,
            probes={**self._model.probes, **self._session.anchors()},
            measurements=records,
            constants=fit(samples_of(records.values()), FEATURES),
            held_out=judge(records, FEATURES),
            budget_s=round(self._budget.spent_s, 1),
        )

    @property
    def _kept_s(self) -> float:
        return SHARE_LAST * self._budget.total_s

    def _so_far(self) -> DeviceModel:
        """The model as it is, for a question: nobody asks it for its error."""
        records = self._session.records()
        samples = samples_of(records.values())
        if self._finish_s <= SHARE_WHOLE_FIT * self.left_s():
            begin = self._budget.spent_s
            constants = fit(samples, FEATURES)
            self._tried, self._tried_s = len(records), JUDGED * (self._budget.spent_s - begin)
        else:
            constants = fit_constants(samples, FEATURES)
        return replace(self._model, measurements=records, constants=constants)

    def _fit(self) -> None:
        records = self._session.records()
        self._constants = fit(samples_of(records.values(), held_out=False), FEATURES, finest="name")
        if len(records) >= max(TRIED, 2 * self._tried) and self._finish_s <= SHARE_TRY * self.left_s():
            if not self._tried:
                self.model()  # the first time more is loaded than numbers
            begin = self._budget.spent_s
            self.model()
            self._tried, self._tried_s = len(records), self._budget.spent_s - begin

    def _once_more(self, left_s: Callable[[], float]) -> None:
        """A round over what is not tight, while such rounds took but their share of the time: hours differ."""
        if self._again_s < SHARE_AGAIN * self._budget.spent_s:
            begin = self._budget.spent_s
            self._session.again(left_s())
            self._again_s += self._budget.spent_s - begin


def question(
    runtime: Runtime,
    graphs: Sequence[TrainingGraph],
    seed: int = 0,
    base: DeviceModel | None = None,
    thorough: bool = False,
) -> dict[str, object]:
    """What two calibrations must have in common for one to go on from the other's measurements.

    Args: as of ``calibrate``.
    """
    info = runtime.info
    return {
        "device": [info.platform, info.platform_version, info.name, info.driver],
        "features": list(FEATURES),
        "graphs": [g.hash for g in graphs],
        "arena_bytes": arena_bytes(graphs),
        "base": base.hash if base else "",
        "seed": seed,
        "thorough": thorough,
    }


def arena_bytes(graphs: Sequence[TrainingGraph]) -> int:
    """Size of each of the two arenas that kernels are timed over, so that they find in caches what a step would leave.

    A step touches again what it has just made, and on the way back what it made on the way there: taken together, two
    thirds of what is alive lie between two touches of a byte. Over more memory kernels would be judged by misses that
    the step does not have.

    Args:
        graphs: as they are planned; none: as much as arenas may take.
    """
    if not graphs:
        return ARENA_BYTES
    alive_bytes = max(peak_bytes(graph) for graph in graphs)
    largest_op = max(
        sum(graph.tensors[o.tensor].size_elems * graph.tensors[o.tensor].item_bytes for o in op.operands)
        for graph in graphs
        for op in graph.ops
    )
    # Padded layouts and workspaces take more than the tensors: half as much again for the largest op.
    usual = min(max(alive_bytes // 3, SMALLEST_ARENA_BYTES), ARENA_BYTES)
    return max(usual, min(largest_op * 3 // 2, LARGEST_ARENA_BYTES))


def describe_held_out(report: HeldOut | None) -> str:
    """One line for people."""
    if report is None:
        return "held-out error: none (too few kernels were measured to hold any out)"
    known = report.covered_90 > 0
    width = f"; {report.covered_90:.0%} within their 90% interval (the median one: +{report.half_width_90:.0%})"
    return (
        f"held-out error on {report.kernels} kernels (fitted on {report.fitted_on} others): median "
        f"{report.median_error:.0%}, 90th percentile {report.p90_error:.0%}, within 10%: {report.within_10:.0%}, "
        f"within 20%: {report.within_20:.0%}, Kendall tau {report.tau:.2f}, among kernels of one operation "
        f"{report.tau_within_spec:.2f}{width if known else ''}"
    )


def describe_timing(model: DeviceModel) -> list[str]:
    """How well a calibration's times are known, and what the device's speed did meanwhile; a line each."""
    tight, drift = model.facts.get("kernels_tight"), model.facts.get("speed_drift")
    lines = [f"kernels known tightly: {tight.value:.0f} {tight.source}"] if tight else []
    return lines + ([f"drift of the device's speed: {drift.source.partition(': ')[2]}"] if drift else [])
