"""What each way of fine-tuning takes: a device and a server as two processes, the link between them shaped.

    python benchmarks/side_systems.py DATA [--parts prepare,footprint,…] [--links 20Mbps,100Mbps]
                                      [--device SEL] [--device-model D] [--target A] [--json OUT] [--smoke]

Device and server have a core each (``--cores``), so that they do not slow each other down as two processes of one
machine would. Everything between them goes through the proxy of ``tests/link.py``, which lets so many bits a second
pass and counts them. Plans are made beforehand, in this process: a device's process loads graph, plan and weights, so
that its peak memory is that of the step and not of torch or a solver.

*footprint*: for each model and way a device's process takes a few steps; the plan's arena, the runtime's buffers, what
the process needed at most, and above what it had before it loaded the model; processor seconds and seconds a step.
*large*: the same of GPT-2.

*accuracy*: fine-tuning until ``--target`` of the held-out samples are right, looked at every ``--look`` steps; looking
is in no time; the summary says when each of ``LEVELS`` was first seen. A side network is looked at afterwards: training
is exact, so that the same steps again give the networks that there were at each step. Bytes are those that went through
the proxy.

*window*: side-tuning with 1 and with ``WINDOW`` batches on their way: how much of the time the device computes.

Every row is kept as it is made: the same command goes on from there. With ``--folder`` graphs and plans are kept, too:
``--parts prepare`` makes them, and builds their kernels, before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.minilm import smoke_file
from benchmarks.recording import Record, Rows
from benchmarks.side_accuracy import BATCH, RANK, RATES, SEQ, Work, side_results
from benchmarks.side_device import child, one_thread, serve
from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format

WINDOW = 4
WINDOW_STEPS = 64
SIDES = (
    *(("fp32", "float32", "all"), ("fp32", "int8:64", "all"), ("fp32", "int4:64", "pivot")),
    *(("int8", "int8:64", "all"), ("int8", "int4:64", "pivot"), ("nf4", "int4:64", "pivot")),
)
"""Weights, taps and tokens of side-tuning."""
TRAINED = (("fp32", "int4:64", "pivot"), ("fp32", "int8:64", "all"))
FOOTPRINTS = {"minilm": (BATCH, SEQ), "gpt2": (4, 128)}
"""Samples and tokens of a step. GPT-2 has random weights: what a step takes does not depend on them."""
LATENCY_S = 0.01
"""One way."""
LOCAL = ("full", "lora", "head")
LEVELS = (0.95, 0.96, 0.97, 0.98, 0.99)
"""Of held-out samples that are right."""


@dataclass(frozen=True)
class Way:
    """A way of fine-tuning, and of side-tuning its formats."""

    name: str
    weights: str = "fp32"
    taps: str = ""
    tokens: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """For a row."""
        return {"way": self.name, "weights": self.weights, "taps": self.taps, "tokens": self.tokens}


class Bench:
    """What all parts share: the device to plan for, and a folder of graphs, plans and data.

    Args:
        args: of the command line.
        data: label<TAB>text lines.
        folder: to write in.
    """

    def __init__(self, args: argparse.Namespace, data: Path, folder: Path) -> None:
        from kernels.runtime import Runtime, pick

        self.args, self.data, self.folder = args, data, folder
        if args.cores:
            one_thread()
        self.runtime = Runtime(pick(args.device))

    @cached_property
    def work(self) -> Work:
        """The texts."""
        return Work(self.data)

    @cached_property
    def model(self) -> Any:
        """What plans are made with: as given, else one that ships for this device, else none that was calibrated."""
        return replace(self._known(), limits=self.runtime.limits)  # of so many compute units as it has here

    def _known(self) -> Any:
        from costmodel import device as devices
        from layoutopt.models import uncalibrated

        if self.args.device_model:
            return devices.load(self.args.device_model)
        shipped = (devices.load(name) for name in devices.list_builtin())
        own = self.runtime.info
        near = (m for m in shipped if m.name == own.name and m.driver == own.driver)
        return next(near, None) or uncalibrated(self.runtime)

    def planned(self, model: str, way: Way, batch: int, seq: int) -> tuple[Path, Path]:
        """Files of a graph and its plan."""
        from layoutopt import plan as plans
        from layoutopt.facade import solve_plan
        from layoutopt.graphfile import save
        from layoutopt.side.backbone import sending

        words = [model, *way.facts.values(), str(batch), str(seq)]
        name = "-".join(word.replace(":", "") for word in words if word)
        files = self.folder / f"{name}.graph", self.folder / f"{name}.json"
        if not all(file.is_file() for file in files):
            graph = self._graph(model, way, batch, seq)
            # A backbone is kept as captured: what stores its taps comes on top, when it is loaded, too.
            runs = sending(graph, Format.parse(way.taps)) if way.taps else graph
            strategy = "greedy" if self.args.smoke or model != "minilm" else "ilp"
            made = solve_plan(runs, self.model, strategy=strategy, time_limit_s=10.0, storage=way.weights)
            save(graph, files[0])
            plans.save(made, files[1])
        return files

    def _graph(self, model: str, way: Way, batch: int, seq: int) -> Any:
        from layoutopt.facade import capture_model
        from layoutopt.side.backbone import Wanted, capture_wanted

        if way.name == "side":
            return capture_wanted(Wanted(model, batch=batch, seq=seq, format=Format.parse(way.taps), tokens=way.tokens))
        labels = self.work.classes if model == "minilm" else None
        return capture_model(model, batch=batch, seq=seq, labels=labels, mode=way.name)[0]

    @cached_property
    def split(self) -> tuple[Any, Any]:
        """Training and held-out samples, at most as many as asked for."""
        training, held_out = self.work.split(0)
        most = self.args.samples
        return training.take(np.arange(min(most, len(training)))), held_out.take(np.arange(min(most, len(held_out))))

    @cached_property
    def data_file(self) -> Path:
        """The split, as the device's process reads it."""
        file = self.folder / "data.npz"
        parts = zip(("training", "held_out"), self.split, strict=True)
        np.savez(file, **{f"{part}:{k}": x for part, data in parts for k, x in data.inputs.items() if k != "sample"})
        return file

    def spec(self, model: str, way: Way, batch: int, seq: int) -> dict[str, Any]:
        """What a device's process is told of a way."""
        graph, plan = self.planned(model, way, batch, seq)
        return {"graph": graph, "plan": plan, "model": model, "batch": batch, "seq": seq, **way.facts}

    def steps(self, model: str, way: Way, batch: int, seq: int, count: int) -> dict[str, Any]:
        """Have a device's process take so many steps, after one that is not timed."""
        spec = self.spec(model, way, batch, seq)
        return self.run("forward" if way.taps else "steps", steps=count, **spec)

    def training_spec(self, lr: float, epochs: int) -> dict[str, Any]:
        """What it is told of training on the device."""
        args = self.args
        return {"data": self.data_file, "lr": lr, "epochs": epochs, "look": args.look, "target": args.target}

    def task(self, way: Way, steps: int) -> dict[str, Any]:
        """A task but for the graph's hash and the names of taps."""
        return {
            "model": "minilm",
            "width": 384,
            "format": way.taps,
            "tokens": way.tokens,
            "seq": SEQ,
            "batch": BATCH,
            "classes": self.work.classes,
            "mode": "labels",
            "pooler": True,
            "rank": RANK,
            "lr": self.args.side_rate,
            "schedule": self.args.side_schedule,
            "steps": steps,
        }

    def side(self, way: Way, task: dict[str, Any], where: dict[str, str], *, window: int, kept: Path | str) -> Any:
        """Have a device's process train a side network."""
        spec = self.spec("minilm", way, BATCH, SEQ)
        return self.run("side", **spec, **where, data=self.data_file, task=task, window=window, cache=True, kept=kept)

    def run(self, kind: str, **spec: Any) -> dict[str, Any]:
        """Have a device's process do something."""
        file = self.folder / "spec.json"
        device_core = self.args.cores[0] if self.args.cores else None
        spec |= {"kind": kind, "device": self.args.device, "core": device_core, "seed": 0}
        file.write_text(json.dumps(spec, default=str), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LayoutOptError(f"the device's process failed: {done.stderr.strip().splitlines()[-1:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@contextmanager
def served(bench: Bench, link: str) -> Iterator[tuple[dict[str, str], Callable[[], int]]]:
    """A server in a process of its own behind a link.

    Args:
        bench: whose core for servers it takes.
        link: bits a second, in words.

    Returns:
        Where a device connects to, behind the link and, to warm up, past it; and what counts the bytes that it sent.
    """
    from layoutopt.advise import link_bits_per_s
    from tests.link import Link

    core = bench.args.cores[1] if bench.args.cores else -1
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, __file__, "--serve", state, "--core", str(core)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port.isdecimal():
                raise LayoutOptError("the server's process did not start: run with --parts footprint to leave it out")
            with Link(int(port), rate_bit_per_s=link_bits_per_s(link), latency_s=LATENCY_S) as proxy:
                yield {"server": proxy.address, "warm": f"127.0.0.1:{port}"}, lambda: proxy.up_bytes
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ---- footprint ------------------------------------------------------------------------------------------------------


def measured(smoke: bool) -> Iterator[tuple[str, Way, int, int]]:
    """Model, way, samples and tokens of every footprint."""
    ways = [*(Way(name) for name in LOCAL), *(Way("side", *formats) for formats in SIDES)]
    chosen = {"minilm": [ways[2], ways[5]]} if smoke else {"minilm": ways, "gpt2": [*ways[:2], *ways[5:7], ways[8]]}
    for model, own in chosen.items():
        batch, seq = FOOTPRINTS[model]
        yield from ((model, way, batch, seq) for way in own)


def footprints(bench: Bench, rows: Rows, models: tuple[str, ...] = ("minilm",)) -> None:
    """A few steps of every way, on made-up data."""
    for model, way, batch, seq in measured(bench.args.smoke):
        if model not in models:
            continue
        key = {"part": "footprint", "model": model, **way.facts}
        if rows.find(**key) is None:
            found = bench.steps(model, way, batch, seq, bench.args.steps)
            say(rows.add({**key, "batch": batch, "seq": seq, **found}))


def large_footprints(bench: Bench, rows: Rows) -> None:
    """The same of GPT-2."""
    footprints(bench, rows, ("gpt2",))


def prepare(bench: Bench, _: Rows) -> None:
    """Make every plan and build its kernels, so that nothing of it is left to do when it is measured."""
    for model, way, batch, seq in measured(bench.args.smoke):
        bench.steps(model, way, batch, seq, 0)
        print(f"planned {model}, {words(way.facts)}", flush=True)


# ---- accuracy -------------------------------------------------------------------------------------------------------


def trainings(bench: Bench, rows: Rows) -> None:
    """Fine-tune on the device, and with a server over each link, until the target is reached."""
    for name in LOCAL[:2]:
        key = {"part": "accuracy", **Way(name).facts, "link": ""}
        if rows.find(**key) is None:
            spec = bench.spec("minilm", Way(name), BATCH, SEQ) | bench.training_spec(RATES[name], bench.args.epochs)
            say(rows.add({**key, **reached(bench.run("train", **spec), bench.args.target)}))
    for link in bench.args.links:
        for formats in TRAINED:
            key = {"part": "accuracy", **Way("side", *formats).facts, "link": link}
            key |= {"lr": bench.args.side_rate, "schedule": bench.args.side_schedule}
            if rows.find(**key) is None:
                say(rows.add({**key, **side_training(bench, Way("side", *formats), link)}))


def side_training(bench: Bench, way: Way, link: str) -> dict[str, Any]:
    """Side-tuning over a link, and after which step it was how good."""
    kept = bench.folder / "kept.npz"
    task = bench.task(way, bench.args.side_epochs * -(-len(bench.split[0]) // BATCH))
    with served(bench, link) as (where, counted):
        found = bench.side(way, task, where, window=WINDOW, kept=kept)
        found["link_bytes"] = counted()
    times = dict(found.pop("times"))
    looks, difference = replayed(kept, bench.args.look)
    found["looks"] = [[step, times[step], right] for step, right in looks if step in times]
    samples = len(bench.split[0])
    found |= {"replay_difference": difference, "link_bytes_per_sample": found["link_bytes"] / samples}
    return reached(found, bench.args.target)


def replayed(kept: Path, look: int) -> tuple[list[tuple[int, float]], float]:
    """Train again on the rows that a head reads, which gives the same side network, and look at it now and then.

    Returns:
        Steps taken and the share of held-out samples that were right; the largest difference between a weight and the
        one that the server had in the end.
    """
    from layoutopt.side.sampling import Sampling
    from layoutopt.side.task import Batch, Task
    from layoutopt.side.trainer import Trainer
    from layoutopt.side.weights import unpack

    served_weights = unpack(kept.with_suffix(".safetensors").read_bytes())
    # Rows of pivot tokens alone: side networks work row by row, and the head reads no others.
    task = replace(Task.decode(kept.with_suffix(".task").read_bytes()), tokens="pivot")
    with np.load(kept) as archive:
        arrays = dict(archive)
    training, held_out = (kept_taps(arrays, part, len(task.taps)) for part in ("training", "held_out"))
    labels, truth = arrays["training:labels"], arrays["held_out:labels"]
    head = {name.partition(":")[2]: x for name, x in arrays.items() if name.startswith("head:")}
    order = Sampling(len(labels), task.batch, task.seed, b"benchmark")
    looks = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer.open(Path(folder), task, head=head)
        for step in range(task.steps):
            rows = order.indices(step)
            taps = tuple((words[rows], scales[rows]) for words, scales in training)
            trainer.accept(Batch(step, tuple(rows.tolist()), taps, None, labels[rows]))
            trainer.apply()
            if (step + 1) % look == 0 or step + 1 == task.steps:
                right = side_results(trainer.weights(), task, held_out).argmax(1) == truth
                looks.append((step + 1, float(right.mean())))
        weights = trainer.weights()
        trainer.close()
    return looks, max(float(np.abs(weights[name] - x).max()) for name, x in served_weights.values.items())


def kept_taps(arrays: dict[str, np.ndarray], part: str, taps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Words and scales by tap of what a device's process kept."""
    return [(arrays[f"{part}:words:{i}"], arrays[f"{part}:scales:{i}"]) for i in range(taps)]


def reached(found: dict[str, Any], target: float) -> dict[str, Any]:
    """A row with the time and the steps until the target; None where it was not reached."""
    first = next((look for look in found["looks"] if look[2] >= target), None)
    return {**found, "target_s": first[1] if first else None, "target_steps": first[0] if first else None}


# ---- window ---------------------------------------------------------------------------------------------------------


def windows(bench: Bench, rows: Rows) -> None:
    """The first steps' activations with one batch on its way, and with several."""
    steps = min(WINDOW_STEPS, -(-len(bench.split[0]) // BATCH))
    for link in bench.args.links:
        for formats in TRAINED:
            for window in (1, WINDOW):
                way = Way("side", *formats)
                key = {"part": "window", **way.facts, "link": link, "window": window}
                if rows.find(**key) is not None:
                    continue
                with served(bench, link) as (where, counted):
                    found = bench.side(way, bench.task(way, steps), where, window=window, kept="")
                    found["link_bytes"] = counted()
                found.pop("times")
                say(rows.add({**key, **found}))


# ---- what comes out -------------------------------------------------------------------------------------------------


def say(row: dict[str, Any]) -> None:
    """A row as it is made."""
    shown = {k: v for k, v in row.items() if k != "looks" and v not in ("", None)}
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()), flush=True)


def summary(rows: Rows) -> None:
    """Ratios beside what the papers report."""
    for model in FOOTPRINTS:
        whole = rows.find(part="footprint", model=model, way="full")
        for row in rows.rows if whole else ():
            if row["part"] == "footprint" and row["model"] == model and row["way"] != "full":
                _compare_footprint(whole, row)
    full = rows.find(part="accuracy", way="full")
    for row in rows.rows if full else ():
        if row["part"] == "accuracy" and row["way"] == "side":
            _compare_training(full, row)
    _compare_traffic(rows)
    for row in rows.rows:
        if row["part"] == "window":
            print(f"{words(row)}, window {row['window']}: the device computes {row['utilisation']:.0%} of the time")


def words(row: dict[str, Any]) -> str:
    """A row's way."""
    link = f", {row['link']}" if row.get("link") else ""
    return f"{row['way']} {row['weights']} {row['taps']} {row['tokens']}".rstrip() + link


def _compare_footprint(whole: dict[str, Any], row: dict[str, Any]) -> None:
    names = ("arena_bytes", "runtime_bytes", "process_added_bytes", "process_peak_bytes", "step_cpu_s")
    ratios = ", ".join(f"{name.rpartition('_')[0]} {whole[name] / max(row[name], 1e-9):.2f}" for name in names)
    print(f"{row['model']}, full over {words(row)}: {ratios} (MobiLLM: up to 4 times less memory)")


def first_at(row: dict[str, Any], level: float) -> float | None:
    """Seconds until so many held-out samples were first seen to be right."""
    return next((seconds for _, seconds, right in row.get("looks", ()) if right >= level), None)


def _compare_training(full: dict[str, Any], row: dict[str, Any]) -> None:
    for level in LEVELS:
        whole, own = first_at(full, level), first_at(row, level)
        if own is None or whole is None:
            if own is not whole:
                print(f"{words(row)}: {level:.0%} is reached by {'full alone' if own is None else 'it alone'}")
            continue
        print(f"{words(row)}: {level:.0%} after {own:.1f} s, full {whole / own:.2f} times as long (MobiLLM: 2.3 times)")


def _compare_traffic(rows: Rows) -> None:
    """Pivot tokens sent once, over all tokens sent in every epoch."""
    found = {row["tokens"]: row for row in rows.rows if row["part"] == "accuracy" and row["way"] == "side"}
    if {"pivot", "all"} <= found.keys():
        epochs = found["all"]["steps"] * BATCH / max(found["all"]["computed"], 1)
        saved = 1 - found["pivot"]["link_bytes"] / (found["all"]["link_bytes"] * epochs)
        print(
            f"pivot tokens sent once: {saved:.2%} less than all tokens in each of {epochs:.0f} epochs (PAE: over 90%)"
        )


def main() -> int:
    """Measure what is not in the record yet, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="label<TAB>text lines")
    parser.add_argument("--parts", default="footprint,accuracy,window,large", help="prepare: plans and kernels alone")
    parser.add_argument("--folder", type=Path, help="of graphs and plans, to be used again")
    parser.add_argument("--links", default="20Mbps,100Mbps")
    parser.add_argument("--device", help="index or part of its name")
    parser.add_argument("--device-model", help="file or built-in name")
    parser.add_argument("--cores", default="0,1", help="of device and server; 'any' leaves them to the system")
    parser.add_argument("--target", type=float, default=0.98)
    parser.add_argument("--look", type=int, default=35, help="steps between two looks at the held-out samples")
    parser.add_argument("--epochs", type=int, default=2, help="at most, on the device")
    parser.add_argument("--side-epochs", type=int, default=10, help="of side-tuning")
    parser.add_argument("--side-rate", type=float, default=3e-3, help="learning rate of --parts accuracy and window")
    parser.add_argument("--side-schedule", default="linear", help="of it: constant, linear or cosine")
    parser.add_argument("--samples", type=int, default=1 << 30, help="of each part of the split, at most")
    parser.add_argument("--steps", type=int, default=5, help="of a footprint")
    parser.add_argument("--json", type=Path, help="rows that are in it already are not made again")
    parser.add_argument("--smoke", action="store_true", help="a few made-up lines")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child)))
        return 0
    if args.serve is not None:
        serve(args.serve, None if args.core < 0 else args.core)
        return 0
    if args.smoke:
        args.links, args.side_epochs, args.epochs, args.look, args.steps = "100Mbps", 2, 1, 1, 1
    elif args.data is None:
        parser.error("give a file of label<TAB>text lines")
    args.links, args.parts = args.links.split(","), args.parts.split(",")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    args.cores = None if args.cores == "any" or available < 2 else [int(core) for core in args.cores.split(",")]
    try:
        if args.folder is not None:
            args.folder.mkdir(parents=True, exist_ok=True)
            return measure(args, args.folder)
        with tempfile.TemporaryDirectory() as folder:
            return measure(args, Path(folder))
    except LayoutOptError as error:
        print(f"side_systems: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Every part that is asked for."""
    bench = Bench(args, smoke_file(folder) if args.smoke else args.data, folder)
    names = ("target", "look", "epochs", "side_epochs", "samples", "steps", "cores")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"data": bench.work.fingerprint, "batch": BATCH, "seq": SEQ, "latency_s": LATENCY_S}
    settings |= {"device": bench.runtime.info.label, "device_model": bench.model.name, "rank": RANK, "rates": RATES}
    rows = Rows(args.json, Record(args.json, "side_systems"), settings)
    parts = {"prepare": prepare, "footprint": footprints, "large": large_footprints}
    parts |= {"window": windows, "accuracy": trainings}
    unknown = [part for part in args.parts if part not in parts]
    if unknown:
        raise LayoutOptError(f"unknown part {unknown[0]!r}: choose among {', '.join(parts)}")
    for part in args.parts:
        parts[part](bench, rows)
    summary(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
