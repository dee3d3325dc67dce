"""Whole training steps beside PyTorch and tinygrad: the works of ``benchmarks/works.py``, same weights, same batches.

    python benchmarks/step.py [--works A,B,…] [--device SEL] [--peers eager,compile,cudagraphs,tinygrad] [--json OUT]

Every contender is a process of its own (its threads, allocator and memory are its own), and they step in turn, another
one first in each round. Ours runs a plan for the device at hand, from a calibration made now for ``--calibration``
seconds, this user's stored one, or ``--device-model FILE`` (which is added to when ``--calibration`` is given too).
PyTorch runs on its GPU where our device is a GPU, else on the CPU; both upload their batch at every step. The first
three losses must be PyTorch's (eager) to 1e-4, or the run is marked WRONG and the exit code is 1.

A turn is ``--burst`` steps waited for once: 1 on a CPU; 10 on a GPU, where the host may run ahead, with one step before
them that is not counted. Printed are medians of a step, quartiles, and ours over each peer (quartiles of the ratios of
one round in brackets); peak memory (CPU: growth of resident memory over the imports; GPU: our arena, PyTorch's
allocator's peak); launches, the time until a step is enqueued, and the sum of the kernels of one step.

``--graphs DIR`` and ``--plans DIR`` keep NAME.graph and NAME.json and take them from there when they are of the work;
on a machine that cannot capture, carry them; ``--plan-only`` makes them by a device model alone, without its device.
``--together`` starts the contenders of all works side by side before the first is measured, where memory and cores
allow it. ``--smoke`` runs one tiny work untimed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.contenders.wire import Child, ContenderError, run_once
from benchmarks.works import WORKS, Work
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder, check_target, write_atomic

TOLERANCE = 1e-4
CHECKED = 3
WARM = 3
"""Steps after those checked, before anything is timed: allocators and recorded graphs have settled."""
PEERS = ("eager", "compile", "cudagraphs", "tinygrad", "tinygrad-plain")
START_S, COMPILE_S, STEP_S = 900.0, 2400.0, 900.0


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


class Contest:
    """One work: its contenders' processes and what they answered."""

    def __init__(self, work: Work, args: argparse.Namespace, folder: Path) -> None:
        self.work, self.args, self.folder = work, args, folder
        self.graph = (args.graphs or folder) / f"{work.name}.graph"
        self.plan = (args.plans or folder) / f"{work.name}.json"
        self.spec: dict[str, Any] = {
            "work": work.name,
            "device": args.device,
            "graph": str(self.graph),
            "plan": str(self.plan),
            "weights": str(folder / "weights.npz"),
            "device_model": args.device_model,
            "calibration_s": args.calibration,
            "reuse_plan": args.plans is not None,
            "strategy": args.strategy,
            "time_limit_s": args.time_limit,
            "plan_only": args.plan_only,
        }
        self.children: dict[str, Child] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.about: dict[str, Any] = {}

    def prepare(self) -> None:
        """Weights, graph and plan.

        Raises:
            ContenderError: there is no plan.
        """
        work = self.work
        say(f"{work.name}: {work.text}, {work.size}: preparing")
        limit_s = START_S + 10 * self.args.calibration
        made = run_once("benchmarks.contenders.prepare", [json.dumps(self.spec)], limit_s)
        plan = made["plan"]
        say(f"  {work.name}: plan {plan['strategy']} {plan['status']}, predicted {plan['predicted_s'] * 1e3:.2f} ms")
        on_cuda = bool(made["cuda"]) and self.args.gpu
        self.spec["torch_device"] = "cuda" if on_cuda else "cpu"
        self.about = {"work": work.name, "text": work.text, "size": work.size, **made, **self.about}
        self.about["torch_device"] = self.spec["torch_device"]

    def start(self) -> None:
        """Every contender, up to its first losses."""
        on_cuda = self.spec["torch_device"] == "cuda"
        self._start(["ours", *(p for p in self.args.peers if p != "cudagraphs" or on_cuda)])

    def measure(self) -> dict[str, Any]:
        """In turn; what was found as plain containers."""
        load = [round(os.getloadavg()[0], 2)]
        self._measure()
        self.close()
        self._compare()
        load.append(round(os.getloadavg()[0], 2))
        return {**self.about, "burst": self.args.burst, "load_average": load, "contenders": self.rows}

    def close(self) -> None:
        """End the contenders."""
        for child in self.children.values():
            child.close()

    def _start(self, names: list[str]) -> None:
        """Start and check; on a GPU all at once, since compiling keeps the host's cores busy and not the device."""
        together = self.spec["torch_device"] == "cuda"
        for group in [names] if together else [[name] for name in names]:
            for name in group:
                self.rows[name] = {}
                self._guarded(name, lambda name=name: self.children.update({name: self._child(name)}))
            for name in group:
                self._guarded(name, lambda name=name: self._ready(name))
            for name in group:
                self._guarded(name, lambda name=name: self.children[name].send("losses", count=CHECKED))
            for name in group:
                self._guarded(name, lambda name=name: self._checked(name))

    def _guarded(self, name: str, action: Any) -> None:
        """A contender that fails is left out, and said to be."""
        if "error" in self.rows[name]:
            return
        try:
            action()
        except (ContenderError, OSError) as error:
            say(f"  {name}: {error}")
            self.rows[name]["error"] = str(error)
            child = self.children.pop(name, None)
            if child is not None:
                child.close()

    def _child(self, name: str) -> Child:
        log = self.folder / f"{name}.log"
        if name == "ours":
            return Child("benchmarks.contenders.ours", self.spec, log)
        if name.startswith("tinygrad"):
            python = self.args.tinygrad_python or sys.executable
            spec = {**self.spec, "driver": self.args.driver, "hints": name == "tinygrad"}
            return Child("benchmarks.contenders.tinygrad_peer", spec, log, python, {"DEV": "CL"})
        return Child("benchmarks.contenders.torch_peer", {**self.spec, "mode": name}, log)

    def _ready(self, name: str) -> None:
        self.rows[name]["built_s"] = self.children[name].answer(START_S)["built_s"]

    def _checked(self, name: str) -> None:
        child = self.children[name]
        begin = time.perf_counter()
        self.rows[name]["losses"] = child.answer(COMPILE_S)["losses"]
        self.rows[name]["first_steps_s"] = time.perf_counter() - begin
        say(f"  {name}: losses {', '.join(f'{x:.6f}' for x in self.rows[name]['losses'])}")

    def _measure(self) -> None:
        """Rounds of turns, then what each reports of itself."""
        args = self.args
        for name in list(self.children):
            self._guarded(name, lambda name=name: self._warm(name))
            self.rows[name]["seconds"] = []
        began = time.perf_counter()
        for number in range(args.rounds):
            names = list(self.children)
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                self._guarded(name, lambda name=name: self._turn(name))
            if number >= 2 and time.perf_counter() - began > args.budget:
                break
        for name in list(self.children):
            self._guarded(
                name, lambda name=name: self.rows[name].update(self.children[name].ask("report", STEP_S)["report"])
            )

    def _warm(self, name: str) -> None:
        self.children[name].ask("burst", STEP_S, count=WARM)
        self.children[name].ask("steady", STEP_S)

    def _turn(self, name: str) -> None:
        burst = self.args.burst
        time.sleep(self.args.pause)  # threads of the one before stop spinning
        if burst > 1:
            self.children[name].ask("burst", STEP_S, count=1)
        self.rows[name]["seconds"].append(self.children[name].ask("burst", STEP_S, count=burst)["seconds"] / burst)

    def _compare(self) -> None:
        """Losses beside the reference's, medians, ratios."""
        reference = next((self.rows[n] for n in ("eager", "compile") if self.rows.get(n, {}).get("losses")), None)
        ours = self.rows["ours"]
        for name, row in self.rows.items():
            if reference is not None and row.get("losses"):
                errors = [abs(a - b) / abs(b) for a, b in zip(row["losses"], reference["losses"], strict=True)]
                row["loss_error"] = max(errors)
                row["correct"] = all(error <= TOLERANCE for error in errors)  # False where a loss is NaN
            times = row.get("seconds") or []
            if not times:
                continue
            row["median_s"], row["least_s"] = statistics.median(times), min(times)
            row["quartiles_s"] = _quartiles(times)
            if name != "ours" and ours.get("seconds"):
                row["ours_over_it"] = statistics.median(ours["seconds"]) / row["median_s"]
                paired = [a / b for a, b in zip(ours["seconds"], times, strict=False)]
                row["paired_quartiles"] = _quartiles(paired)


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def table(found: dict[str, Any]) -> str:
    """A work's contenders as text."""
    if "error" in found:
        return f"{found['work']}  {found['error']}"
    load = " → ".join(f"{x:.1f}" for x in found["load_average"])
    lines = [f"{found['work']}  {found['text']}, {found['size']}; load average {load}"]
    lines.append(
        f"  {'':15}{'ms':>10}{'quartiles':>19}{'ours/it':>9}{'paired':>13}{'peak MB':>9}{'launches':>9}{'host ms':>9}"
        f"{'kernels ms':>11}{'loss error':>11}"
    )
    for name, row in found["contenders"].items():
        if "error" in row:
            lines.append(f"  {name:15} {row['error'][:150]}")
            continue
        low, high = row["quartiles_s"]
        paired = row.get("paired_quartiles")
        lines.append(
            f"  {name:15}{row['median_s'] * 1e3:10.2f}"
            f"{f'{low * 1e3:.2f}–{high * 1e3:.2f}':>19}"
            + _number(row.get("ours_over_it"), 9, ".3f")
            + (f"{f'{paired[0]:.2f}–{paired[1]:.2f}':>13}" if paired else f"{'':13}")
            + _number(row.get("peak_bytes"), 9, ".0f", 1e-6)
            + _number(row.get("launches"), 9, "d")
            + _number(row.get("host_s"), 9, ".2f", 1e3)
            + _number(row.get("kernels_s"), 11, ".2f", 1e3)
            + _number(row.get("loss_error"), 11, ".1e")
            + ("" if row.get("correct", True) else "  WRONG")
        )
    return "\n".join(lines)


def _number(value: float | None, width: int, form: str, scale: float = 1) -> str:
    if value is None:
        return " " * width
    return f"{format(value if scale == 1 else value * scale, form):>{width}}"


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "pyopencl", "numpy", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def entered(names: list[str], args: argparse.Namespace, stack: ExitStack) -> list[Contest]:
    """Contests whose contenders have started; those of several works side by side, but plans are made one by one."""
    contests = []
    for name in names:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="step-")))
        contests.append(Contest(WORKS[name], args, folder))
        stack.callback(contests[-1].close)
    planned = args.plans is not None and all(contest.plan.is_file() for contest in contests)
    with ThreadPoolExecutor(len(contests)) as pool:
        if planned:
            list(pool.map(lambda contest: guarded(contest, contest.prepare), contests))
        else:
            for contest in contests:
                guarded(contest, contest.prepare)
        list(pool.map(lambda contest: guarded(contest, contest.start), contests))
    return contests


def guarded(contest: Contest, action: Callable[[], None]) -> None:
    """A work that fails is left out, and said to be."""
    if "error" in contest.about:
        return
    try:
        action()
    except ContenderError as error:
        contest.about = {"work": contest.work.name, "error": str(error)}


def outcome(contest: Contest) -> dict[str, Any]:
    """What was measured, or the error."""
    return contest.about if "error" in contest.about else contest.measure()


def record(args: argparse.Namespace, info: Any, found: list[dict[str, Any]]) -> None:
    """Write the JSON so far."""
    about = {"benchmark": "step", "device": info.model_hash_fields, "cpus": os.cpu_count(), "note": args.note}
    write_atomic(args.json, json.dumps({**about, "versions": versions(), "works": found}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """Of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="A,B,C,D", help=", ".join(f"{w.name}: {w.text}" for w in WORKS.values()))
    parser.add_argument("--peers", default="eager,compile,cudagraphs", help="; cudagraphs only with CUDA")
    parser.add_argument("--device", help="index or part of 'platform version | name'")
    parser.add_argument("--device-model", help="file; with --calibration it is added to, or made")
    parser.add_argument("--calibration", type=float, metavar="SECONDS", help="60 unless a device model is given")
    parser.add_argument("--strategy", default="ilp")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the exact solver")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of measuring a work, at least 3 rounds")
    parser.add_argument("--burst", type=int, help="steps a turn")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between turns")
    parser.add_argument("--graphs", type=Path, metavar="DIR")
    parser.add_argument("--plans", type=Path, metavar="DIR")
    parser.add_argument("--together", action="store_true", help="all works' contenders start side by side")
    parser.add_argument("--plan-only", action="store_true", help="make graphs and plans by --device-model; no device")
    parser.add_argument("--tinygrad-python", help="interpreter of an environment that has tinygrad")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--note", default="", help="for the record: what else the machine did, say")
    parser.add_argument("--smoke", action="store_true", help="tiny and untimed")
    args = parser.parse_args()
    if args.smoke:
        args.works, args.peers, args.rounds, args.strategy, args.calibration = "tiny", "eager", 1, "greedy", 0.0
    args.works = [w for w in args.works.split(",") if w]
    args.peers = [p for p in args.peers.split(",") if p]
    for what, given, known in (("work", args.works, WORKS), ("peer", args.peers, PEERS)):
        for name in given:
            if name not in known:
                parser.error(f"unknown {what} {name!r}: choose among {', '.join(known)}")
    if args.rounds < 1 or (args.burst is not None and args.burst < 1):
        parser.error("--rounds and --burst count from 1")
    if args.plan_only and (args.calibration or not (args.device_model and args.graphs and args.plans)):
        parser.error("--plan-only needs --device-model, --graphs and --plans, and measures nothing")
    if args.calibration is None:
        args.calibration = 0.0 if args.device_model else 60.0
    return args


def plan_only(args: argparse.Namespace) -> int:
    """Graphs and plans by a device model."""
    for name in args.works:
        with tempfile.TemporaryDirectory(prefix="step-") as folder:
            contest = Contest(WORKS[name], args, Path(folder))
            args.gpu = False
            guarded(contest, contest.prepare)
        if "error" in contest.about:
            print(f"{name}  {contest.about['error']}")
            return 1
        print(f"{name}  {contest.plan}")
    return 0


def main() -> int:
    """Run every work, print, record."""
    args = arguments()
    from kernels.runtime import pick

    try:
        info = None if args.plan_only else pick(args.device)
        if args.json:
            check_target(args.json)
        for folder in (args.graphs, args.plans):
            if folder is not None:
                check_folder(folder)
                folder.mkdir(parents=True, exist_ok=True)
    except LayoutOptError as error:
        print(f"step: {error}", file=sys.stderr)
        return 2
    if info is None:
        return plan_only(args)
    args.gpu, args.driver = info.limits.kind == "gpu", info.driver
    args.burst = args.burst or (10 if args.gpu and not args.smoke else 1)
    print(f"device: {info.short}", flush=True)
    found: list[dict[str, Any]] = []
    for group in [args.works] if args.together else [[name] for name in args.works]:
        with ExitStack() as stack:
            for contest in entered(group, args, stack):
                found.append(outcome(contest))
                if not args.smoke:
                    print(table(found[-1]), flush=True)
                if args.json:
                    record(args, info, found)
    right = [w for w in found if "error" not in w and w["contenders"]["ours"].get("correct")]
    print(f"{len(right)} of {len(found)} works: losses equal to PyTorch's")
    return 0 if len(right) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
