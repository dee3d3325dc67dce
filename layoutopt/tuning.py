"""Calibration for a graph: the kernels that plans would run are measured, then planned again, until nothing is new.

A cost table with one hopeful prediction in it sends the solver there. So the solver's own choice decides what to
measure next; what it finally picks has been measured, and what it did not pick was measured or predicted to be slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.rewrites import alternatives

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime
    from kernels.spec import Kernel

__all__ = ["calibrate_for"]

STRATEGIES = ("ilp", "greedy", "ideal", "rowmajor")
SOLVE_S = 10.0
"""Seconds that the exact solver gets within calibration; its best answer so far is as good a question."""

LEAST_ASKING_S = 30.0
"""Below this budget the planner is not asked: planning alone would take longer than what is left."""


def calibrate_for(
    runtime: Runtime,
    graphs: Sequence[TrainingGraph],
    *,
    budget_s: float,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    base: DeviceModel | None = None,
    storage: str = "fp32",
    thorough: bool = False,
) -> DeviceModel:
    """A device model whose measurements cover what plans of ``graphs`` run.

    Args:
        runtime: the device.
        graphs: to plan; none calibrates for graphs in general.
        budget_s: wall time. Planning in between is not cut short, so a busy machine may take longer.
        seed: of data, sample and held-out share.
        progress: told what is done and the share of the budget used.
        base: an earlier model of the device to add to.
        storage: how the graphs' numbers lie in memory.
        thorough: more rounds, and caches in finer steps.

    Raises:
        DeviceError: the device refuses the microbenchmarks.
    """
    from costmodel.calibrate import calibrate

    planned = tuple(a for g in graphs for a in alternatives(g, storage=storage))
    ask = bool(planned) and budget_s >= LEAST_ASKING_S
    chooser = (lambda model: _chosen(planned, model)) if ask else None
    return calibrate(runtime, budget_s, planned, progress, seed, chooser, base, thorough)


def _chosen(graphs: Sequence[TrainingGraph], model: DeviceModel) -> list[Kernel]:
    """Every kernel of every strategy's plan of graphs as they are to be planned."""
    from costmodel.model import CostModel
    from kernels.bind import bind
    from layoutopt import planner
    from layoutopt.pricing import Pricer

    out: dict[str, Kernel] = {}
    costs = CostModel(model)
    pricer = Pricer(costs)
    for graph in graphs:
        tables = planner.tabulate(graph, costs, pricer=pricer)
        for strategy in STRATEGIES:
            try:
                plan = planner.plan(graph, costs, strategy, None, SOLVE_S, tables=tables)
            except LayoutOptError:  # a strategy that meets a dead end asks for no kernels; planning will say so
                continue
            out |= {step.kernel.key: step.kernel for step in bind(graph, plan, model.limits)}
    return list(out.values())
