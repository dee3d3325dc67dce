"""Whole steps, predicted over measured: zoo models, each by the plans of several strategies.

    python benchmarks/step_prediction.py [MODEL …] [--device SEL] [--calibration S] [--device-model FILE]
                                         [--strategies ilp,greedy,…] [--json OUT] [--smoke]

Models are written as in ``benchmarks/reduced.py`` (its list by default). For each the device is calibrated for its
graph, plans are made, and their steps run in turn, another one first in each round: the host's clock, from the call to
the loss read back, the mean of the quickest quarter (a calibration, too, goes by its quiet rounds). Beside the
prediction (``layoutopt/stepcost.py``) stand its parts and what they were: the kernels' events within the step, and what
the step takes beyond them.

A calibration is a promise about the device as it was. Kernels that it measured are therefore timed again, in the same
way, in every round of steps: ``speed`` is their mean time now over then, and ``steady`` the prediction times that over
the mean step, for a device whose clock has moved. Neither makes up for other work on the machine, which slows what lies
between kernels most. With ``--device-model`` nothing is calibrated. ``--smoke`` runs a tiny model untimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.recording import Record
from benchmarks.reduced import DEFAULT, reduced_graph
from layoutopt.checkpoint import initial_values
from layoutopt.errors import LayoutOptError
from layoutopt.example import example_inputs
from layoutopt.facade import solve_all
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.stepcost import measured_share, planned_s, predict_step

STRATEGIES = "ilp,greedy,rowmajor,ideal"
AGAIN = 24
"""Kernels that are timed again to see how fast the device is, at most; together they take no more than a step."""
EVENTS = 3
"""Launches are timed one by one in every third round."""
TOLERANCE = 0.1


# ---- what is concluded ----------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and greatest error, and the share within 10%, of the ratios as they are and at the calibration's speed."""
    out: dict[str, Any] = {"steps": len(rows)}
    for key in ("ratio", "steady_ratio"):
        errors = [abs(row[key] - 1) for row in rows]
        out[key] = {
            "median_error": median(errors),
            "greatest_error": max(errors),
            "within_10": sum(e <= TOLERANCE for e in errors) / len(errors),
        }
    return out


def quiet(seconds: Sequence[float]) -> float:
    """Of a step: the mean of the quickest quarter, which other work on the machine disturbed least."""
    ordered = sorted(seconds)
    return fmean(ordered[: max(len(ordered) // 4, 1)])


def groups_of(sizes_bytes: dict[str, int], most_bytes: int) -> Iterator[list[str]]:
    """Names whose sizes fit into memory together, in order; one that does not fit is by itself."""
    own: list[str] = []
    for name, size in sizes_bytes.items():
        if own and sum(sizes_bytes[n] for n in own) + size > most_bytes:
            yield own
            own = []
        own.append(name)
    if own:
        yield own


# ---- measuring ------------------------------------------------------------------------------------------------------


class Speed:
    """How fast the device is now: kernels that a calibration measured, timed again as it timed them.

    Args:
        runtime: the device.
        graph: that it was calibrated for.
        plans: whose kernels are taken, those first that take most of a step.
        model: the calibration.
    """

    def __init__(self, runtime: Any, graph: TrainingGraph, plans: dict[str, Plan], model: Any) -> None:
        from costmodel.calibrate import arena_bytes
        from costmodel.runner import Bench
        from kernels.bind import bind
        from layoutopt.rewrites import alternatives

        taken: dict[str, tuple[float, Any]] = {}
        for plan in plans.values():
            for step in bind(graph, plan, runtime.limits):
                key = step.kernel.key
                if key in model.measurements:
                    before = taken.get(key, (0.0, None))[0]
                    taken[key] = before + model.measurements[key].time_ns, step.kernel
        ranked = [key for key, _ in sorted(taken.items(), key=lambda item: -item[1][0])]
        self._then = model.measurements
        self._bench = Bench(runtime, arena_bytes=arena_bytes(alternatives(graph)))
        chosen: dict[str, Any] = {}
        left_ns = min((planned_s(plan) for plan in plans.values()), default=0.0) * 1e9
        for key in ranked:
            if len(chosen) < AGAIN and self._then[key].time_ns <= left_ns and self._bench.fits(taken[key][1]):
                left_ns -= self._then[key].time_ns
                chosen[key] = taken[key][1]
        self._bench.build(list(chosen.values()))
        self._prepared = {key: self._bench.prepare(kernel) for key, kernel in chosen.items()}
        self._rounds: list[dict[str, int]] = []

    def round(self) -> None:
        """Time them once."""
        self._rounds.append(self._bench.round(self._prepared, backwards=len(self._rounds) % 2 == 1))

    def ratio(self) -> float:
        """Time now over time then, of all of them together; 1 where there are none."""
        now_ns = sum(fmean(times[key] for times in self._rounds) for key in self._prepared)
        then_ns = sum(self._then[key].time_ns for key in self._prepared)
        return now_ns / then_ns if then_ns else 1.0

    def close(self) -> None:
        """Let go of the device's memory."""
        self._prepared.clear()
        self._bench.close()


def run_steps(
    runtime: Any, graph: TrainingGraph, plans: dict[str, Plan], speed: Speed, rounds: int, budget_s: float
) -> dict[str, dict[str, Any]]:
    """Steps of the plans in turn: seconds, seconds of their kernels by events, launches."""
    from kernels.execute import Executor

    inputs, values = example_inputs(graph), initial_values(graph, 0)
    executors = {name: Executor(runtime, graph, plan, dict(values)) for name, plan in plans.items()}
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "kernels_s": [], "launches": e.launches} for name, e in executors.items()
    }
    names, began = list(plans), time.monotonic()
    for number in range(-1, rounds):
        turn = max(number, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            executor = executors[name]
            begin = time.perf_counter()
            executor.step(inputs)
            executor.loss()
            if number >= 0:  # the first makes caches ready
                found[name]["seconds"].append(time.perf_counter() - begin)
            if number >= 0 and number % EVENTS == 0:
                launched = executor.launch_times(inputs)
                found[name]["kernels_s"].append(1e-9 * sum(end - start for own in launched for start, end in own))
        speed.round()
        if number >= 2 and time.monotonic() - began > budget_s:
            break
    for executor in executors.values():
        executor.close()
    return found


def model_for(
    runtime: Any,
    graph: TrainingGraph,
    calibration_s: float,
    *,
    given: str | None = None,
    smoke: bool = False,
    seed: int = 0,
) -> Any:
    """A model of the device: ``given`` by name or file, else calibrated now; facts alone where nothing is timed."""
    from costmodel.device import load
    from layoutopt.models import uncalibrated
    from layoutopt.tuning import calibrate_for

    if smoke:
        return uncalibrated(runtime)
    return load(given) if given else calibrate_for(runtime, [graph], budget_s=calibration_s, seed=seed)


def study(args: argparse.Namespace, runtime: Any, name: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    graph = reduced_graph(name)
    model = model_for(runtime, graph, args.calibration, given=args.device_model, smoke=args.smoke)
    plans = solve_all(graph, model, args.strategies.split(","), time_limit_s=30.0)
    speed = Speed(runtime, graph, plans, model)
    found: dict[str, dict[str, Any]] = {}
    sizes = {strategy: plan.arena_bytes for strategy, plan in plans.items()}
    for own in groups_of(sizes, int(args.memory * 2**30)):
        share_s = args.budget / len(plans) * len(own)
        found |= run_steps(runtime, graph, {n: plans[n] for n in own}, speed, args.rounds, share_s)
    now = speed.ratio()
    speed.close()
    rows = []
    for strategy, plan in plans.items():
        cost, measured = predict_step(plan, graph, model), found[strategy]
        seconds, kernels_s = quiet(measured["seconds"]), fmean(measured["kernels_s"])
        rows.append(
            {
                "model": name,
                "strategy": strategy,
                "predicted_s": cost.step_s,
                "predicted": {k: getattr(cost, k) for k in ("kernels_s", "gaps_s", "host_s", "stolen_s", "wait_s")},
                "objective_s": planned_s(plan),
                "priced_by_measurement": measured_share(plan),
                "quiet_s": seconds,
                "median_s": median(measured["seconds"]),
                "mean_s": fmean(measured["seconds"]),
                "quartiles_s": [float(q) for q in np.quantile(measured["seconds"], [0.25, 0.75])],
                "rounds": len(measured["seconds"]),
                "kernels_s": kernels_s,
                "launches": measured["launches"],
                "ratio": cost.step_s / seconds,
                "speed": now,
                "steady_ratio": cost.step_s * now / fmean(measured["seconds"]),
                "kernels_ratio": cost.kernels_s * now / kernels_s,
                "arena_bytes": plan.arena_bytes,
            }
        )
    return rows


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    beyond, predicted = row["mean_s"] - row["kernels_s"], row["predicted"]
    print(
        f"{row['model']:22}{row['strategy']:10}{row['predicted_s'] * 1e3:11.2f}{row['quiet_s'] * 1e3:11.2f}"
        f"{row['ratio']:8.3f}{row['speed']:8.3f}{row['steady_ratio']:8.3f}{row['kernels_ratio']:9.3f}"
        f"{beyond / row['launches'] * 1e6:9.2f}"
        f"{(row['predicted_s'] - predicted['kernels_s']) / row['launches'] * 1e6:9.2f}"
        f"{row['launches']:7}{row['priced_by_measurement']:7.0%}",
        flush=True,
    )


HEAD = (
    f"{'model':22}{'strategy':10}{'predicted':>11}{'measured':>11}{'ratio':>8}{'speed':>8}{'steady':>8}{'kernels':>9}"
    f"{'us each':>9}{'pred.':>9}{'launch':>7}{'known':>7}\n"
    "steps in ms; kernels: their predicted over measured sum, at the speed of now; us each: what a step takes beyond\n"
    "its kernels by launch, measured and predicted; known: share of the objective that is measured kernels"
)


def main() -> int:
    """Calibrate, plan, run, print; write the record."""
    from kernels.runtime import Runtime, pick

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(DEFAULT))
    parser.add_argument("--device")
    parser.add_argument("--device-model", help="a calibration of the device, rather than one made now for each model")
    parser.add_argument("--calibration", type=float, default=100.0, help="seconds, for each model")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of steps, for each model")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB of plans at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.strategies, args.rounds = ["bert-tiny/1@2x5"], "greedy,rowmajor", 3
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    try:
        record = Record(args.json, "step_prediction", calibration_s=args.calibration)
        runtime = Runtime(pick(args.device))
    except LayoutOptError as error:
        print(f"step_prediction: {error}", file=sys.stderr)
        return 2
    if not args.smoke:
        print(f"{runtime.info.label}\n{HEAD}", flush=True)
    for name in args.models:
        try:
            rows += study(args, runtime, name)
        except LayoutOptError as error:
            failed[name] = str(error)
            print(f"{name:22}{error}", flush=True)
            continue
        record.write({"summary": summary(rows), "failed": failed, "rows": rows}, runtime)
        for row in rows[-len(args.strategies.split(",")) :] if not args.smoke else []:
            show(row)
    if not rows:
        return 2
    if args.smoke:
        print(f"{args.models[0]}: {len(rows)} plans ran and are predicted")
        return 0
    found = summary(rows)
    for key, what in (("ratio", "as calibrated"), ("steady_ratio", "at the speed of now")):
        own = found[key]
        print(
            f"{what}: median error {own['median_error']:.1%}, greatest {own['greatest_error']:.1%}, "
            f"{own['within_10']:.0%} of {found['steps']} steps within 10%"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
