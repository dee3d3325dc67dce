"""Whether plans are chosen rightly: random plans in their predicted and their measured order, the solver's among them.

    python benchmarks/decisions.py [--model M] [--device SEL] [-n N] [--budget S] [--calibration S]
                                   [--device-model FILE] [--seed N] [--json OUT] [--smoke]

``-n`` random feasible plans (``benchmarks/drawing.py``: from nearly the solver's to bad) are built and run like any
other, a batch at a time, in turn with the solver's plan. What is kept of a plan is its quiet steps (the mean of the
quickest quarter) over the solver's of the same rounds, which the device's drift does not move. All must compute the
same loss. Then the ``--finalists`` fastest of them run against the solver's once more: the best of many noisy
measurements looks better than it is. What does not fit into ``--budget`` seconds is left out, and said to be.

Printed are Kendall's tau of the predicted steps (``layoutopt/stepcost.py``) and of the solver's objective with the
measured ratios, over all pairs and among the faster half; the tau of two halves of the measured rounds with each other,
about what a perfect prediction would reach; how far predicted ratios to the solver's plan are off; the solver's rank;
and the solver's plan over the best random one.

The model is a zoo model as in ``benchmarks/reduced.py``. A calibration is made now, unless ``--device-model`` is given.
``--smoke`` runs three plans of a tiny model untimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.drawing import draw, solved
from benchmarks.recording import Record
from benchmarks.reduced import reduced_graph
from benchmarks.step_prediction import model_for, quiet
from layoutopt.checkpoint import initial_values
from layoutopt.compare import measure_interleaved
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.stepcost import planned_s, predict_step

TOLERANCE = 1e-4
"""Of losses, relative."""
SHARE_FINAL = 0.15
"""Share of the budget for the finalists."""
SHARE_STEPS = 0.5
"""Share of the budget that steps may take, building left out: there are fewer rounds where they would take more."""
BEST = "solver"


@dataclass
class Ran:
    """A plan and what was measured of it.

    Attributes:
        name: unique.
        kind: how it was drawn.
        predicted_s: of the step.
        objective_s: the solver's sum.
        seconds: of its steps.
        reference_s: of the solver's plan's steps in the same rounds, two in each.
    """

    name: str
    kind: str
    predicted_s: float
    objective_s: float
    seconds: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Over the solver's plan, each by its quiet steps."""
        return quiet(self.seconds) / quiet(self.reference_s)

    def half(self, k: int) -> float:
        """The same by every other round."""
        return quiet(self.seconds[k::2]) / quiet(self.reference_s)


# ---- what is concluded ----------------------------------------------------------------------------------------------


def tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b; None where there is nothing to order."""
    found = float(kendalltau(a, b).statistic) if len(a) > 1 else float("nan")
    return round(found, 4) if np.isfinite(found) else None


def judged(ran: Sequence[Ran], solver_s: float) -> dict[str, Any]:
    """Taus, errors, and the solver's rank (1: none was measured faster) among plans that were measured.

    Args:
        ran: the random plans.
        solver_s: the predicted step of the solver's plan.
    """
    measured = [r.ratio for r in ran]
    errors = [abs(r.predicted_s / solver_s / r.ratio - 1) for r in ran]
    half = sorted(ran, key=lambda r: r.ratio)[: (len(ran) + 1) // 2]
    halves = [[r.half(k) for r in ran] for k in (0, 1)]
    return {
        "plans": len(ran),
        "tau": tau([r.predicted_s for r in ran], measured),
        "tau_best_half": tau([r.predicted_s for r in half], [r.ratio for r in half]),
        "tau_of_objective": tau([r.objective_s for r in ran], measured),
        "tau_of_objective_best_half": tau([r.objective_s for r in half], [r.ratio for r in half]),
        "tau_of_repeated_measurement": tau(*halves),
        "ratio_median_error": median(errors),
        "ratio_within_10": sum(e <= 0.1 for e in errors) / len(errors),
        "solver_rank": 1 + sum(x < 1 for x in measured),
        "fastest_ratio": min(measured),
        "slowest_ratio": max(measured),
    }


# ---- measuring ------------------------------------------------------------------------------------------------------


def check_losses(losses: dict[str, float]) -> None:
    """Refuse plans that do not compute the same.

    Raises:
        LayoutOptError: a loss is another, or no number.
    """
    reference = losses[BEST]
    wrong = {n: x for n, x in losses.items() if not abs(x - reference) <= TOLERANCE * abs(reference)}
    if wrong:
        raise LayoutOptError(f"WRONG: the solver's plan computes the loss {reference}, others {wrong}")


def run_batches(
    args: argparse.Namespace, graph: TrainingGraph, runtime: Any, plans: dict[str, Plan], ran: dict[str, Ran]
) -> None:
    """Every plan beside the solver's, as many as there is time for."""
    values = initial_values(graph, 0)
    end = time.monotonic() + args.budget * (1 - SHARE_FINAL)
    names = [n for n in plans if n != BEST]
    spent_s: list[float] = []
    steps_s = SHARE_STEPS * args.budget / max(-(-len(names) // args.batch), 1)
    for begin in range(0, len(names), args.batch):
        if spent_s and time.monotonic() + median(spent_s) > end:
            break
        started = time.monotonic()
        own = names[begin : begin + args.batch]
        # The solver's twice in each round: what everything is divided by should be known best.
        together = {BEST: plans[BEST], **{n: plans[n] for n in own[::2]}, "again": plans[BEST]}
        together |= {n: plans[n] for n in own[1::2]}
        found = measure_interleaved(graph, together, runtime, values, rounds=args.rounds, budget_s=steps_s)
        check_losses({n: loss for n, (_, loss) in found.items()})
        for n in own:
            ran[n].seconds, ran[n].reference_s = found[n][0], [*found[BEST][0], *found["again"][0]]
        spent_s.append(time.monotonic() - started)
        print(f"{begin + len(own)} of {len(names)} plans, {spent_s[-1]:.1f} s", file=sys.stderr, flush=True)


def finals(
    args: argparse.Namespace, graph: TrainingGraph, runtime: Any, plans: dict[str, Plan], ran: Sequence[Ran]
) -> dict[str, Any]:
    """The fastest random plans and the solver's, measured anew and for longer."""
    fastest = [r.name for r in sorted(ran, key=lambda r: r.ratio)[: args.finalists]]
    together = {n: plans[n] for n in (BEST, *fastest)}
    budget_s = args.budget * SHARE_FINAL
    found = measure_interleaved(
        graph, together, runtime, initial_values(graph, 0), rounds=args.final_rounds, budget_s=budget_s
    )
    times = {n: found[n][0] for n in together}
    over = {n: quiet(times[BEST]) / quiet(times[n]) for n in fastest}
    best = max(fastest, key=lambda n: over[n])  # against which the solver's does worst
    paired = [a / b for a, b in zip(times[BEST], times[best], strict=True)]
    return {
        "solver_s": quiet(times[BEST]),
        "rounds": len(times[BEST]),
        "best_random": best,
        "solver_over_best": over[best],
        "paired_quartiles": [float(q) for q in np.quantile(paired, [0.25, 0.5, 0.75])],
        "solver_over": over,
    }


def decide(args: argparse.Namespace) -> dict[str, Any]:
    """The whole study of one model on one device."""
    from costmodel.model import CostModel
    from kernels.runtime import Runtime, pick
    from layoutopt.assembly import assemble

    graph, runtime = reduced_graph(args.model), Runtime(pick(args.device))
    model = model_for(runtime, graph, args.calibration, given=args.device_model, smoke=args.smoke)
    costs = CostModel(model)
    tables, best = solved(graph, costs)
    draws = draw(tables.graph, tables.problem, best, args.n, args.seed)
    plans = {BEST: assemble(tables, costs, best, BEST)}
    plans |= {f"{d.kind} #{i}": assemble(tables, costs, d.assignment, d.kind) for i, d in enumerate(draws)}
    drawn = dict(zip(list(plans)[1:], draws, strict=True))
    ran = {
        n: Ran(n, drawn[n].kind if n in drawn else BEST, predict_step(p, graph, model).step_s, planned_s(p))
        for n, p in plans.items()
    }
    print(f"{graph.name} on {runtime.info.label}: {len(draws)} plans", file=sys.stderr, flush=True)
    run_batches(args, graph, runtime, plans, ran)
    measured = [r for r in ran.values() if r.seconds]
    last = finals(args, graph, runtime, plans, measured)
    return {
        "model": args.model,
        "device": runtime.info.label,
        "driver": runtime.info.driver,
        "status": best.status,
        "kernels_measured": len(model.measurements),
        "wanted": args.n,
        "drawn": len(draws),
        **judged(measured, ran[BEST].predicted_s),
        "predicted_solver_s": ran[BEST].predicted_s,
        **last,
        "rows": [{**vars(r), "ratio": r.ratio} for r in measured],
    }


def show(found: dict[str, Any]) -> None:
    """For people."""
    low, middle, high = found["paired_quartiles"]
    print(f"{found['model']} on {found['device']}: {found['plans']} of {found['wanted']} random plans measured")
    print(f"  steps from {found['fastest_ratio']:.3f} to {found['slowest_ratio']:.3f} of the solver's plan")
    print(f"  tau of predicted steps {found['tau']}, among the faster half {found['tau_best_half']}")
    print(f"  tau of the objective {found['tau_of_objective']}, half {found['tau_of_objective_best_half']}")
    print(f"  tau of the measurement with itself {found['tau_of_repeated_measurement']}")
    print(
        f"  predicted ratios to the solver's plan: median error {found['ratio_median_error']:.1%}, "
        f"{found['ratio_within_10']:.0%} within 10%"
    )
    print(f"  the solver's plan is number {found['solver_rank']}; measured again over the best random plan:")
    print(f"  {found['solver_over_best']:.3f} (by round {middle:.3f}, {low:.3f} to {high:.3f}), {found['best_random']}")
    print(
        f"  its step: predicted {found['predicted_solver_s'] * 1e3:.3f} ms, measured {found['solver_s'] * 1e3:.3f} ms"
    )


def main() -> int:
    """Draw, run, print; write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-digits")
    parser.add_argument("--device")
    parser.add_argument("-n", type=int, default=200, help="random plans")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of building and measuring plans")
    parser.add_argument("--calibration", type=float, default=100.0, help="seconds")
    parser.add_argument("--device-model", help="a calibration of the device, rather than one made now")
    parser.add_argument("--rounds", type=int, default=32, help="steps of each plan, at most")
    parser.add_argument("--batch", type=int, default=8, help="plans in memory at a time")
    parser.add_argument("--finalists", type=int, default=5)
    parser.add_argument("--final-rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.n, args.rounds, args.final_rounds, args.finalists = "bert-tiny/1@2x5", 3, 3, 3, 2
    try:
        record = Record(args.json, "decisions", seed=args.seed, rounds=args.rounds)
        found = decide(args)
        show(found) if not args.smoke else print(f"{found['model']}: {found['plans']} plans agree on the loss")
        record.write(found)
    except (LayoutOptError, OSError) as error:
        print(f"decisions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
