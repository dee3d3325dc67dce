"""Training steps of the zoo's models on OpenCL devices beside torch in float64: the worst relative errors.

    python benchmarks/parity.py [--device SEL ...] [--models M ...] [--plans P ...] [--json OUT] [--smoke]

Every model at reduced depth and odd sizes, by each plan, on each device (all found by default): losses of two steps,
gradients of every trained parameter, and what two updates made of it; ``tests/zoo_parity.py`` says how. A model whose
library is missing is named and left out. Exits 1 where an error is above the tolerance. ``--smoke`` runs one model by
one plan on the default device.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # what is measured is shared with the tests

from kernels.runtime import Runtime, devices, pick
from layoutopt.errors import GraphError
from tests.zoo_parity import CASES, MORE, PLANS, TOLERANCE, case, measure, torch_float32_error


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run(label: str, plans: list[str], runtimes: list[Runtime]) -> tuple[list[dict[str, Any]], str]:
    """The rows of one model, or the reason why there are none."""
    try:
        case(label)
    except GraphError as error:
        return [], str(error)
    own = torch_float32_error(label)
    rows = []
    for which in plans:
        for runtime in runtimes:
            started = time.perf_counter()
            measured = measure(runtime, label, which)
            worst, where = measured.worst()
            rows.append(
                {
                    "model": label,
                    "stands_for": {**CASES, **MORE}[label],
                    "plan": which,
                    "device": runtime.info.label,
                    "worst": worst,
                    "worst_of": where,
                    "losses": measured.losses,
                    "worst_gradient": max(measured.gradients.values()),
                    "worst_update": max(measured.updates.values()),
                    "torch_float32_worst_gradient": own,
                    "gradients": len(measured.gradients),
                    "ops": measured.ops,
                    "launches": measured.launches,
                    "relayouts": measured.relayouts,
                    "run_s": time.perf_counter() - started,
                }
            )
            print(
                f"{label:18}{which:11}{runtime.info.index:>3}{worst:10.1e}{own:10.1e}{measured.launches:>10}"
                f"{measured.relayouts:>6}  {where}",
                flush=True,
            )
    return rows, ""


def main() -> None:
    """Run and print; write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", help="index or a part of the name; every device by default")
    parser.add_argument("--models", nargs="+", default=[*CASES, *MORE], choices=[*CASES, *MORE], metavar="MODEL")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.device, args.models, args.plans = args.device or [None], ["gpt2-odd"], ["row-major"]
    infos = [pick(name) for name in args.device] if args.device else devices() or [pick()]
    runtimes = [Runtime(info) for info in infos]
    for info in infos:
        print(f"device {info.index}: {info.label}")
    print(f"{'model':18}{'plan':11}{'on':>3}{'worst':>10}{'torch32':>10}{'launches':>10}{'moves':>6}  worst of")
    rows, left_out = [], {}
    for label in args.models:
        made, reason = run(label, args.plans, runtimes)
        rows += made
        if reason:
            left_out[label] = reason
            print(f"{label:18}left out: {reason}")
    if not rows:
        raise SystemExit("no model could be made")
    record = {
        "what": "‖got − expected‖ / ‖expected‖ against torch in float64; torch_float32 is torch's own",
        "tolerance": TOLERANCE,
        "devices": [{"label": i.label, "driver": i.driver, "version": i.version} for i in infos],
        "versions": {
            name: installed(name) for name in ("layoutopt", "torch", "transformers", "diffusers", "peft", "numpy")
        }
        | {"python": platform.python_version()},
        "left_out": left_out,
        "rows": rows,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    beyond = [row for row in rows if not row["worst"] <= TOLERANCE]
    print(f"{len(rows)} runs, worst {max(row['worst'] for row in rows):.1e}, {len(beyond)} beyond {TOLERANCE:.0e}")
    if beyond:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
