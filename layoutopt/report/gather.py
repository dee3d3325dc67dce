"""Gathering what a report shows: other strategies' plans, simulations, measurements; then its sections.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from layoutopt.compare import Row, compare
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.report.agreement import Measured, agreement_section, measured_of, unmeasured_section
from layoutopt.report.beside import strategies_section
from layoutopt.report.layouts import layouts_section
from layoutopt.report.memory import held_buffers, memory_section, peak_of
from layoutopt.report.misses import misses_section, no_misses_section
from layoutopt.report.proof import Left, proof_section, tried
from layoutopt.report.shapes import Section, Table, mib, ms
from layoutopt.report.steps import SOURCES, Step, steps_of
from layoutopt.report.times import times_section
from layoutopt.rewrites import STORAGES, planned_graph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime
    from simulator.simulate import CacheReport

__all__ = ["Facts", "as_json", "gathered", "others", "sections", "storage_of_plan", "summary"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Facts:
    """All that a report shows.

    Attributes:
        plan: that is explained.
        graph: as captured.
        planned: with the plan's rewrites.
        model: of the device.
        steps: of the plan.
        rows: strategies, the plan's own first.
        caches: a simulated step of the plan; None where nothing was simulated.
        why_no_caches: nothing was.
        left: of the solver's reductions; None where they were not done again.
        why_not_left: they were not.
        measured: a profile of the plan; None where there is none.
        device: that the strategies were measured on; "" where they were not.
    """

    plan: Plan
    graph: TrainingGraph
    planned: TrainingGraph
    model: DeviceModel
    steps: tuple[Step, ...]
    rows: tuple[Row, ...]
    caches: CacheReport | None
    why_no_caches: str
    left: tuple[Left, ...] | None
    why_not_left: str
    measured: Measured | None
    device: str


def storage_of_plan(plan: Plan) -> str:
    """How a plan's numbers lie in memory: what ``--storage`` was."""
    return next((name for name, own in STORAGES.items() if own and set(own) <= set(plan.rewrites)), "fp32")


def micro_batches_of_plan(plan: Plan) -> int | None:
    """Into how many micro-batches a plan cuts its samples; None for one."""
    return next((int(name.partition(":")[2]) for name in plan.rewrites if name.startswith("micro:")), None)


def others(
    plan: Plan,
    graph: TrainingGraph,
    model: DeviceModel,
    strategies: Sequence[str],
    memory: str | None,
    time_limit_s: float,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Plan]:
    """The plan under its strategy's name, and one for each other strategy.

    Args:
        plan: that is explained.
        graph: as captured.
        model: to plan with.
        strategies: to be shown beside it.
        memory: budget of the others, in words.
        time_limit_s: of the exact solver.
        progress: told what is going on.
    """
    from layoutopt.facade import solve_all

    wanted = [name for name in strategies if name != plan.solver.strategy]
    found = {plan.solver.strategy: plan}
    if wanted:
        found |= solve_all(
            graph,
            model,
            wanted,
            memory=memory,
            time_limit_s=time_limit_s,
            progress=progress,
            storage=storage_of_plan(plan),
            micro_batches=micro_batches_of_plan(plan),
        )
    return found


def gathered(
    plans: Mapping[str, Plan],
    graph: TrainingGraph,
    model: DeviceModel,
    *,
    runtime: Runtime | None = None,
    measured: Measured | None = None,
    simulate_caches: bool = True,
    rounds: int = 15,
    progress: Progress | None = None,
) -> Facts:
    """The facts of a report.

    Args:
        plans: by strategy, the one to be explained first.
        graph: as captured.
        model: of the device.
        runtime: the device, to measure all plans and profile the first; None measures nothing.
        measured: a profile of the first that is at hand.
        simulate_caches: of every plan.
        rounds: measured steps of each plan.
        progress: told (what, done, of).

    Raises:
        LayoutOptError: a plan that is not of this graph, a profile that is not of this plan.
    """
    tell = progress or (lambda what, done, of: None)
    plan = next(iter(plans.values()))
    rows = compare(graph, plans, model, runtime=runtime, simulate_caches=False, rounds=rounds, progress=progress)
    caches, reason = None, "it was switched off"
    if simulate_caches:
        from simulator.simulate import simulate

        done = []
        try:
            for number, (row, own) in enumerate(zip(rows, plans.values(), strict=True)):
                tell("simulating", number, len(rows))
                report = simulate(graph, own, model)
                caches = caches or report
                moved = report.total.memory_read_bytes + report.total.memory_written_bytes
                misses = dict(zip(report.levels, report.total.misses, strict=True))
                done.append(replace(row, misses=misses, memory_bytes=moved, walked=report.walked))
            rows = done
        except DeviceError as error:
            caches, reason = None, str(error)
    if runtime is not None:
        tell("profiling", 0, 1)
        measured = _profile(plan, graph, model, runtime)
    planned = planned_graph(plan, graph)
    tell("what the solver proved", 0, 1)
    left, why_not = tried(planned, plan, model)
    return Facts(
        plan,
        graph,
        planned,
        model,
        tuple(steps_of(plan, graph, model)),
        tuple(rows),
        caches,
        reason,
        tuple(left) if left else None,
        why_not,
        measured,
        runtime.info.label if runtime is not None else "",
    )


def _profile(plan: Plan, graph: TrainingGraph, model: DeviceModel, runtime: Runtime) -> Measured:
    from kernels.execute import Executor
    from layoutopt.example import example_inputs
    from layoutopt.profiling import profile

    executor = Executor(runtime, graph, plan)
    found = profile(executor, example_inputs(graph), model)
    executor.close()
    return measured_of(found)


def sections(facts: Facts, top: int) -> list[Section]:
    """The report's sections, the summary apart.

    Args:
        facts: gathered.
        top: rows of tables that stand open.
    """
    plan, planned, model = facts.plan, facts.planned, facts.model
    line = model.caches[0].line_bytes if model.caches else 64
    misses = misses_section(facts.caches, top) if facts.caches else no_misses_section(facts.why_no_caches)
    compared = agreement_section(facts.steps, facts.measured, top) if facts.measured else unmeasured_section()
    return [
        strategies_section(facts.rows, plan.solver.strategy, facts.device),
        times_section(facts.steps, top),
        misses,
        memory_section(plan, planned, top),
        layouts_section(plan, planned, model.limits.simd_width, line, top),
        proof_section(plan, list(facts.left) if facts.left else None, facts.why_not_left),
        compared,
    ]


def summary(facts: Facts, command: str, date: str) -> Section:
    """The first section: what this is about.

    Args:
        facts: gathered.
        command: that made the report.
        date: of the report.
    """
    from layoutopt import __version__

    plan, model = facts.plan, facts.model
    own = facts.rows[0]
    measured = own.measured_s if own.measured_s is not None else facts.measured.step_s if facts.measured else None
    where = facts.device or (facts.measured.device if facts.measured else "")
    kind = "calibrated on the device" if model.origin == "calibrated" else "made from public facts, never measured"
    bound = "" if plan.device_hash == model.hash else "; the plan was made with another model, whose costs it states"
    step, peak = peak_of(held_buffers(plan, facts.planned))
    pairs = [
        ("graph", f"{plan.graph_name}, {len(plan.ops)} operations, {len(plan.layouts)} storages"),
        ("captured by", str(facts.graph.meta.get("command") or "not stated")),
        ("device model", f"{model.name}, {kind}{bound}"),
        ("device model of", model.date or "not dated"),
        ("strategy", f"{plan.solver.strategy}, {plan.solver.status}"),
        (
            "a step",
            f"{ms(own.predicted_s)} ms predicted; " + (f"{ms(measured)} ms measured" if measured else "not measured"),
        ),
        ("measured on", where or "nothing was measured"),
        ("relayouts", f"{own.relayouts}, {mib(own.relayout_bytes)} MiB moved"),
        ("arena", f"{mib(own.arena_bytes)} MiB; {mib(peak)} MiB alive at step {step + 1} of {len(plan.steps)}"),
        ("made by", command),
        ("date", f"{date}, layoutopt {__version__}"),
    ]
    return Section("summary", "Summary", (), (), (Table("What this report is about", ("", "value"), tuple(pairs)),))


def as_json(facts: Facts) -> dict[str, Any]:
    """The facts as plain containers, for ``--json``."""
    step, peak = peak_of(held_buffers(facts.plan, facts.planned))
    sources = {name: sum(s.cost_ns for s in facts.steps if s.source == name) * 1e-9 for name in SOURCES}
    solver = facts.plan.solver
    return {
        "graph": facts.plan.graph_name,
        "device": facts.model.name,
        "modelled": facts.model.origin != "calibrated",
        "strategies": facts.rows,
        "cost_s_by_source": sources,
        "peak": {"step": step, "bytes": peak, "arena_bytes": facts.plan.arena_bytes},
        "relayouts": len(facts.plan.relayouts),
        "proof": {"status": solver.status, "gap": solver.gap, "bound_ns": solver.bound_ns}
        | {"reductions": [asdict(one) for one in facts.left] if facts.left else None},
        "measured_step_s": facts.measured.step_s if facts.measured else None,
    }
