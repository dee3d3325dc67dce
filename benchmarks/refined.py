"""How often the plan made from calibration alone is already the best: ``refine`` over models and seeds.

    python benchmarks/refined.py [MODEL …] [--device SEL] [--seeds N] [--calibration S] [--rounds N] [--json OUT]
                                 [--smoke]

For every model (written as in ``benchmarks/reduced.py``) and seed (of the calibration: its sample, data and held-out
share) the device is calibrated, the graph planned, and the plan refined as ``train --refine`` does
(``layoutopt/refining.py``): kernels are timed within the step, the model is fitted again, the graph planned again, and
a plan that differs runs beside the one so far. Printed are the rounds, whether solving came to rest, and in how many
runs no refined plan was kept. ``--smoke`` refines a tiny model once, from made-up costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.recording import Record
from benchmarks.reduced import reduced_graph
from benchmarks.step_prediction import model_for
from layoutopt.errors import LayoutOptError
from layoutopt.facade import solve_plan
from layoutopt.refining import Refined, refine

MODELS = ("vit-digits", "minilm/2@4x64", "gpt2/1@1x32", "vit-tiny/1@1")


def row_of(model: str, seed: int, found: Refined) -> dict[str, Any]:
    """One run as plain containers."""
    return {
        "model": model,
        "seed": seed,
        "first_was_best": found.first_was_best,
        "settled": found.settled,
        "gain": prod(r.ratio for r in found.rounds if r.kept),
        "rounds": [asdict(r) for r in found.rounds],
    }


def outcome(rows: Sequence[dict[str, Any]]) -> str:
    """The sentence that answers the question."""
    best = sum(row["first_was_best"] for row in rows)
    settled = sum(row["settled"] for row in rows)
    least = min((row["gain"] for row in rows), default=1.0)
    return (
        f"the first plan was the best in {best} of {len(rows)} runs; solving came to rest in {settled}; "
        f"the most that refining gained is a step of {least:.3f} of the first plan's"
    )


def run(args: argparse.Namespace, runtime: Any, name: str, seed: int) -> dict[str, Any]:
    """Calibrate, plan, refine."""
    graph = reduced_graph(name)
    model = model_for(runtime, graph, args.calibration, smoke=args.smoke, seed=seed)
    plan = solve_plan(graph, model, time_limit_s=30.0)
    found = refine(
        runtime,
        graph,
        plan,
        model,
        lambda known: solve_plan(graph, known, time_limit_s=30.0),
        rounds=args.rounds,
        announce=lambda line: print(f"  {name}, seed {seed}: {line}", file=sys.stderr, flush=True),
    )
    return row_of(name, seed, found)


def main() -> int:
    """Run, print; write the record."""
    from kernels.runtime import Runtime, pick

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calibration", type=float, default=60.0, help="seconds, for each run")
    parser.add_argument("--rounds", type=int, default=3, help="new plans, at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.seeds, args.rounds = ["bert-tiny/1@2x5"], 1, 1
    rows: list[dict[str, Any]] = []
    try:
        record = Record(args.json, "refined", calibration_s=args.calibration)
        runtime = Runtime(pick(args.device))
        for name in args.models:
            for seed in range(args.seeds):
                rows.append(run(args, runtime, name, seed))
                record.write({"outcome": outcome(rows), "rows": rows}, runtime)
                if not args.smoke:
                    ratios = ", ".join(f"{r['ratio']:.3f}{' kept' if r['kept'] else ''}" for r in rows[-1]["rounds"])
                    print(f"{name:22}{seed:4}  new over old: {ratios or 'no other plan'}", flush=True)
        print(f"{runtime.info.label}: {outcome(rows)}" if not args.smoke else "one model is refined")
    except (LayoutOptError, OSError) as error:
        print(f"refined: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
