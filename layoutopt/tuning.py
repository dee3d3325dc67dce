"""Calibration for a graph: the kernels that plans would run are measured, then planned again, until nothing is new.

A cost table with one hopeful prediction in it sends the solver there. So the solver's own choice decides what to
measure next, and with it the choice's close rivals; what it finally picks has been measured, and what it did not pick
was measured or predicted to be slower.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.rewrites import alternatives

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from costmodel.journal import Journal, Kept
    from costmodel.model import CostModel
    from kernels.bind import BoundStep
    from kernels.runtime import Runtime
    from kernels.spec import Kernel
    from layoutopt.pricing import Pricer

__all__ = ["Planner", "calibrate_for", "calibrate_to"]

QUICK = ("greedy", "ideal", "rowmajor")
EXACT = "ilp"
SOLVE_S = 10.0
"""Seconds that the exact solver gets within calibration; its best answer so far is as good a question."""

LEAST_ASKING_S = 30.0
"""Below this budget the planner is not asked: planning alone would take longer than what is left."""

SHARE_ASKING = 0.6
"""Share of the time left that one question may take: what it names has to be measured."""

CLOSE = 1.25
"""A kernel predicted to take at most so many times what the chosen one takes is its rival."""
MOST_RIVALS = 4
"""Of one op over one tuple of layouts."""
MOST_CONTESTED = 48
"""Kernels whose rivals are looked for: those that take most of the steps' time."""
MOST_NAMED = 160
"""Kernels that one question names."""


def calibrate_for(
    runtime: Runtime,
    graphs: Sequence[TrainingGraph],
    *,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    base: DeviceModel | None = None,
    storage: str = "fp32",
    thorough: bool = False,
    journal: Journal | None = None,
) -> DeviceModel:
    """A device model whose measurements cover what plans of ``graphs`` run.

    Args:
        runtime: the device.
        graphs: to plan; none calibrates for graphs in general.
        budget_s: wall time, planning in between included; by the device's kind when left out.
        seed: of data, sample and held-out share.
        progress: told what is done and the share of the budget used.
        base: an earlier model of the device to add to.
        storage: how the graphs' numbers lie in memory.
        thorough: more rounds, and caches in finer steps.
        journal: takes down what is measured; what it holds is taken up (see ``calibrate_to``).

    Raises:
        DeviceError: the device refuses the microbenchmarks.
    """
    from costmodel.budget import budget_seconds
    from costmodel.calibrate import calibrate

    planned = _planned(graphs, storage)
    seconds = budget_s or budget_seconds(runtime.limits.kind, thorough)
    chooser = Planner(planned) if planned and seconds >= LEAST_ASKING_S else None
    return calibrate(runtime, seconds, planned, progress, seed, chooser, base, thorough, journal)


def calibrate_to(
    path: Path,
    runtime: Runtime,
    graphs: Sequence[TrainingGraph],
    *,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    base: DeviceModel | None = None,
    storage: str = "fp32",
    thorough: bool = False,
    fresh: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> DeviceModel:
    """``calibrate_for``, written to a file, and resumable: interrupted, the same call goes on where it was.

    SIGTERM interrupts it as Ctrl-C does.

    Args:
        path: the device model to write, when it is whole.
        runtime: this and what follows as of ``calibrate_for``.
        graphs: to plan.
        budget_s: wall time, that of an interrupted calibration included.
        seed: of data, sample and held-out share.
        progress: told what is done.
        base: an earlier model to add to.
        storage: how numbers lie in memory.
        thorough: more of everything.
        fresh: leave out what an interrupted calibration has measured.
        announce: told in a sentence of what is taken up, and of what is kept when it is interrupted.

    Raises:
        KeyboardInterrupt: it was interrupted.
        DeviceError: as of ``calibrate_for``.
    """
    from platformdirs import user_cache_path

    from costmodel import device
    from costmodel.calibrate import question
    from costmodel.journal import Journal, journal_file

    asked = question(runtime, _planned(graphs, storage), seed, base, thorough)
    folder = user_cache_path("layoutopt") / "calibrations"
    journal = None
    try:
        with _terminated_as_interrupted():
            try:
                journal = Journal(journal_file(folder, asked), asked, fresh)
            except LayoutOptError as error:
                announce(f"{error}; without it, nothing is kept of this calibration if it is interrupted")
            if journal and journal.measured:
                announce(_taken_up(journal.kept))
            model = calibrate_for(
                runtime,
                graphs,
                budget_s=budget_s,
                seed=seed,
                progress=progress,
                base=base,
                storage=storage,
                thorough=thorough,
                journal=journal,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            device.save(model, path)
    except KeyboardInterrupt:
        announce(_interrupted(journal.measured if journal else 0))
        raise
    finally:
        if journal:
            journal.close()
    if journal:
        journal.remove()
    return model


def _planned(graphs: Sequence[TrainingGraph], storage: str) -> tuple[TrainingGraph, ...]:
    return tuple(a for g in graphs for a in alternatives(g, storage=storage))


def _taken_up(kept: Kept) -> str:
    return (
        f"going on with an interrupted calibration: {len(kept.timed)} kernels were measured in {kept.spent_s:.0f} s "
        "(`layoutopt calibrate --fresh` begins anew)"
    )


def _interrupted(measured: int) -> str:
    if not measured:
        return "interrupted; no device model was written, and there is no measurement to keep"
    return (
        f"interrupted; no device model was written, but the {measured} kernels measured so far are kept: the same "
        "command goes on from there"
    )


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _OutOfTime(Exception):
    """Pricing a graph takes longer than there is."""


class Planner:
    """Names kernels that plans of some graphs would run, and their close rivals.

    Args:
        graphs: as they are to be planned.
        clock: seconds.
        strategies: whose plans they are, in the order in which they are asked.
    """

    def __init__(
        self,
        graphs: Sequence[TrainingGraph],
        clock: Callable[[], float] = time.monotonic,
        strategies: Sequence[str] = (*QUICK, EXACT),
    ) -> None:
        self._graphs, self._clock, self._strategies = list(graphs), clock, tuple(strategies)
        self._open: dict[int, None] = dict.fromkeys(range(len(self._graphs)))  # answers that were not all measured
        self._took_s: dict[int, float] = {}

    def __call__(self, model: DeviceModel, left_s: float) -> list[Kernel]:
        """Kernels to measure, those with the most of a step's time at stake first; the chosen ones before rivals.

        A graph is planned by the quick strategies first. One whose plans ran measured kernels alone is planned again
        only when all others do.

        Args:
            model: to plan with.
            left_s: seconds there are to answer and to measure.
        """
        from costmodel.model import CostModel
        from layoutopt.pricing import Pricer

        end = self._clock() + SHARE_ASKING * left_s
        costs = CostModel(model, caution=0.0)  # what promises much is what to measure
        pricer = Pricer(costs)
        chosen: dict[str, tuple[float, Kernel]] = {}
        rivals: dict[str, tuple[float, Kernel]] = {}
        settled = [i for i in range(len(self._graphs)) if i not in self._open]
        for i in [*self._open, *settled]:
            if i in settled and chosen:
                break
            begin = self._clock()
            if begin + self._took_s.get(i, 0.0) > end:
                continue
            steps = self._steps(self._graphs[i], costs, pricer, end)
            self._took_s[i] = self._clock() - begin
            new = _stakes(steps, costs)
            chosen |= new
            rivals |= _rivals(steps, costs)
            if steps and not new:
                self._open.pop(i, None)
            else:
                self._open[i] = None
        others = [stake for key, stake in rivals.items() if key not in chosen]
        return [k for group in (chosen.values(), others) for _, k in sorted(group, key=_first)][:MOST_NAMED]

    def _steps(self, graph: TrainingGraph, costs: CostModel, pricer: Pricer, end: float) -> list[BoundStep]:
        """What plans of a graph run, by as many strategies as there is time for."""
        from kernels.bind import bind
        from layoutopt import planner

        def watch(what: str, share: float) -> None:
            if self._clock() > end:
                raise _OutOfTime

        out: list[BoundStep] = []
        try:
            tables = planner.tabulate(graph, costs, progress=watch, pricer=pricer)
            for strategy in self._strategies:
                seconds = min(SOLVE_S, end - self._clock())
                if seconds <= 0:
                    break
                try:
                    plan = planner.plan(graph, costs, strategy, None, seconds, tables=tables)
                except LayoutOptError:  # a strategy that meets a dead end asks for no kernels; planning will say so
                    continue
                out += bind(graph, plan, costs.limits)
        except _OutOfTime:
            pass
        return out


def _first(stake: tuple[float, Kernel]) -> tuple[float, str]:
    return -stake[0], stake[1].key


def _stakes(steps: Sequence[BoundStep], costs: CostModel) -> dict[str, tuple[float, Kernel]]:
    """Kernels of steps that were not measured, with the time that all their steps take."""
    out: dict[str, tuple[float, Kernel]] = {}
    for step in steps:
        cost = costs.predict(step.kernel)
        if not cost.measured:
            key = step.kernel.key
            out[key] = out.get(key, (0.0, step.kernel))[0] + cost.total_ns, step.kernel
    return out


def _rivals(steps: Sequence[BoundStep], costs: CostModel) -> dict[str, tuple[float, Kernel]]:
    """Unmeasured kernels for what steps do that are predicted to take about as long as those chosen.

    At stake is the steps' time, the less the slower the rival is predicted to be.
    """
    from kernels.variants import kernels_for

    taken: dict[str, tuple[float, Kernel]] = {}
    for step in steps:
        key = step.kernel.key
        taken[key] = taken.get(key, (0.0, step.kernel))[0] + costs.predict(step.kernel).total_ns, step.kernel
    out: dict[str, tuple[float, Kernel]] = {}
    for total_ns, kernel in sorted(taken.values(), key=_first)[:MOST_CONTESTED]:
        own_ns = costs.predict(kernel).total_ns
        others = [(costs.predict(k), k) for k in kernels_for(kernel.spec, kernel.layouts, costs.limits)]
        close = [(c.total_ns / own_ns, k) for c, k in others if not c.measured and c.total_ns <= CLOSE * own_ns]
        for ratio, rival in sorted(close, key=lambda pair: (pair[0], pair[1].key))[:MOST_RIVALS]:
            out[rival.key] = max(
                out.get(rival.key, (0.0, rival)), (total_ns / max(ratio, 1.0), rival), key=lambda s: s[0]
            )
    return out
