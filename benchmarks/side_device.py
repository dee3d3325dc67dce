"""The processes of ``benchmarks/side_systems.py``.

The device's loads a graph, a plan and data, runs steps, and says what they took. It imports neither torch nor a solver,
so that what it needs is what a device would need. The server's trains side networks until its input ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["child", "one_thread", "serve"]


def one_thread() -> None:
    """Keep OpenCL on a CPU to one thread in this process, before it is loaded: the device has one compute unit."""
    os.environ.update(POCL_MAX_PTHREAD_COUNT="1", POCL_CPU_MAX_CU_COUNT="1", OMP_NUM_THREADS="1")


def as_one_core(core: int | None) -> None:
    """Keep this process on one core."""
    if core is None:
        return
    one_thread()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def _status(key: str) -> int:
    """A line of the kernel's file on this process, in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)


class Memory:
    """What this process needs, from here on."""

    def __init__(self) -> None:
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        except (OSError, AttributeError):
            pass
        self._before = _status("VmRSS")

    def facts(self) -> dict[str, int]:
        """The most so far, whole and above what there was in the beginning."""
        peak = _status("VmHWM") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"process_peak_bytes": peak, "process_added_bytes": peak - self._before}


@dataclass
class Clock:
    """Seconds of what is measured, by the wall and of the processor."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.process_time() - self._cpu

    def facts(self) -> dict[str, float]:
        """A step's seconds."""
        steps = max(self.steps, 1)
        return {"steps": self.steps, "step_s": self.wall_s / steps, "step_cpu_s": self.cpu_s / steps}


def child(spec_file: Path) -> dict[str, Any]:
    """Do what a file asks for.

    Args:
        spec_file: JSON, as ``benchmarks/side_systems.py`` writes it.
    """
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    as_one_core(spec["core"])
    kinds = {
        "steps": local_steps,
        "train": local_training,
        "forward": side_steps,
        "side": side_training,
    }
    return kinds[spec["kind"]](spec)


# ---- everything on the device ---------------------------------------------------------------------------------------


def start_values(graph: Any, model: str, seed: int) -> dict[str, np.ndarray]:
    """Parameters and state: MiniLM's pretrained ones wherever the graph has them, fresh ones elsewhere."""
    from layoutopt import textclass
    from layoutopt.checkpoint import initial_values

    known: dict[str, np.ndarray] = {}
    if model == "minilm":
        from safetensors.numpy import load_file

        loaded = load_file(textclass.pretrained("minilm").directory / "model.safetensors")
        # Adapters lie in a layer of their own above the pretrained one.
        names = {t.name: t.name.replace(".base_layer", "").removeprefix("bert.") for t in graph.by_role("parameter")}
        known = {name: loaded[own] for name, own in names.items() if own in loaded}
    return initial_values(graph, seed, given=known) | known


def opened(spec: dict[str, Any]) -> tuple[Any, Memory]:
    """An executor of the spec's graph and plan, and this process' memory since just before it was made."""
    from kernels.execute import Executor
    from kernels.runtime import Runtime, pick
    from layoutopt import plan as plans
    from layoutopt.graphfile import load

    graph, plan = load(spec["graph"]), plans.load(spec["plan"])
    runtime = Runtime(pick(spec["device"]))
    memory = Memory()
    return Executor(runtime, graph, plan, start_values(graph, spec["model"], spec["seed"])), memory


def local_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """A few steps on made-up data; the first is not timed."""
    from layoutopt.example import example_inputs
    from layoutopt.optimizers import step_values

    executor, memory = opened(spec)
    inputs, clock = example_inputs(executor.graph), Clock()
    for step in range(1, spec["steps"] + 2):
        with clock if step > 1 else Clock():
            executor.step({**inputs, **step_values(executor.graph, step, 1e-5, 0)})
            executor.read(executor.graph.outputs[0])
    clock.steps = spec["steps"]
    return {**clock.facts(), **memory.facts(), **planned(executor), "sample_bytes": 0}


def planned(executor: Any) -> dict[str, int]:
    """Device memory, as planned and as the runtime counts it."""
    return {"arena_bytes": executor.plan.arena_bytes, "runtime_bytes": executor.memory_bytes}


def local_training(spec: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune on the device until the target is reached, or for so many epochs."""
    from layoutopt.optimizers import step_values
    from layoutopt.train import evaluate

    executor, memory = opened(spec)
    training, held_out = read_data(spec)
    warm_up(executor, spec, next(all_batches(training, spec)))
    clock, looks = Clock(), []
    for batch in all_batches(training, spec):
        with clock:
            executor.step({**batch, **step_values(executor.graph, clock.steps + 1, spec["lr"], spec["seed"])})
            executor.read(executor.graph.outputs[0])
        clock.steps += 1
        if clock.steps % spec["look"] == 0:
            looks.append([clock.steps, clock.wall_s, evaluate(executor, held_out)[0]])
            if looks[-1][2] >= spec["target"]:
                break
    return {**clock.facts(), **memory.facts(), **planned(executor), "looks": looks, "sent_bytes": 0}


def warm_up(executor: Any, spec: dict[str, Any], batch: dict[str, np.ndarray]) -> None:
    """Take a step, so that OpenCL has nothing left to build, and set everything back."""
    from layoutopt.optimizers import step_values

    executor.step({**batch, **step_values(executor.graph, 1, spec["lr"], spec["seed"])})
    executor.finish()
    for name, value in start_values(executor.graph, spec["model"], spec["seed"]).items():
        executor.write(name, value)


def read_data(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Training and held-out samples."""
    from layoutopt.train import Dataset

    with np.load(spec["data"]) as archive:
        arrays = dict(archive)
    parts = [
        Dataset({k.partition(":")[2]: x for k, x in arrays.items() if k.startswith(part)})
        for part in ("training:", "held_out:")
    ]
    return parts[0], parts[1]


def all_batches(training: Any, spec: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """Every epoch's batches, in the order of ``layoutopt train``."""
    for epoch in range(spec["epochs"]):
        order = np.random.default_rng((spec["seed"], epoch)).permutation(len(training))
        yield from (batch for batch, _ in training.batches(spec["batch"], order))


# ---- with a server --------------------------------------------------------------------------------------------------


class Taps:
    """A backbone over samples: what a device computes, and what of it says how well a side network does.

    Args:
        backbone: on this device.
        data: samples with labels.
    """

    def __init__(self, backbone: Any, data: Any) -> None:
        self.backbone, self.data = backbone, data
        self.pivots: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    @property
    def samples(self) -> int:
        """How many."""
        return len(self.data)

    def run(self, samples: np.ndarray) -> Any:
        """What crosses of some samples."""
        from layoutopt.side.sampling import Arrays

        part = self.data.take(samples).inputs
        inputs = {name: x for name, x in part.items() if name in self.backbone.inputs}
        taps = self.backbone.run(inputs)
        rows = np.arange(len(samples)) * self.backbone.rows_per_sample  # the head reads the first token
        for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
            self.pivots[sample] = [(words[row], scales[row]) for words, scales in taps]
        mask = self.backbone.mask(inputs) if self.backbone.wanted.tokens == "all" else None
        return Arrays(taps, mask, np.asarray(part["labels"], np.int32))

    def kept(self) -> dict[str, np.ndarray]:
        """Of every sample the rows that a head reads: words and scales by tap, and labels."""
        found = [self.pivots[i] for i in range(self.samples)]
        arrays = {"labels": self.data.inputs["labels"]}
        for tap in range(len(self.backbone.taps)):
            arrays[f"words:{tap}"] = np.stack([rows[tap][0] for rows in found])
            arrays[f"scales:{tap}"] = np.stack([rows[tap][1] for rows in found])
        return arrays


def backbone_of(spec: dict[str, Any]) -> tuple[Any, Memory]:
    """A backbone of the spec's graph and plan, and this process' memory since just before it was made."""
    from kernels.runtime import Runtime, pick
    from layoutopt import plan as plans
    from layoutopt.graphfile import load
    from layoutopt.quantize import Format
    from layoutopt.side.backbone import Backbone, Wanted
    from layoutopt.side.graphs import facts_of
    from layoutopt.side.pretrained import load_pretrained

    graph, plan = load(spec["graph"]), plans.load(spec["plan"])
    wanted = Wanted(
        spec["model"],
        batch=spec["batch"],
        seq=spec["seq"],
        format=Format.parse(spec["taps"]),
        tokens=spec["tokens"],
        storage=spec["weights"],
    )
    runtime = Runtime(pick(spec["device"]))
    memory = Memory()
    weights = load_pretrained(graph, facts_of(graph), None, spec["seed"])
    return Backbone(wanted, graph, weights, runtime, plan), memory


def footprint(backbone: Any) -> dict[str, int]:
    """Device memory, as planned and as the runtime counts it."""
    found = backbone.footprint()
    return {
        "arena_bytes": found.arena_bytes,
        "runtime_bytes": found.peak_bytes,
        "weights_bytes": found.weights_bytes,
    }


def side_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """A few forward passes on made-up data, taps read back; the first is not timed."""
    from layoutopt.example import example_inputs

    backbone, memory = backbone_of(spec)
    inputs = {name: x for name, x in example_inputs(backbone.graph).items() if name in backbone.inputs}
    clock = Clock()
    for step in range(spec["steps"] + 1):
        with clock if step else Clock():
            taps = backbone.run(inputs)
    clock.steps = spec["steps"]
    sent = sum(words.nbytes + scales.nbytes for words, scales in taps) / spec["batch"]
    return {**clock.facts(), **memory.facts(), **footprint(backbone), "sample_bytes": sent}


def side_training(spec: dict[str, Any]) -> dict[str, Any]:
    """Train a side network with a server: when each step was acknowledged, and what it took here."""
    from layoutopt.side.client import Remote, Settings, train
    from layoutopt.side.task import Task

    backbone, memory = backbone_of(spec)
    training, held_out = read_data(spec)
    source, looked_at = Taps(backbone, training), Taps(backbone, held_out)
    task = Task.decode(json.dumps({**spec["task"], "graph": backbone.graph.hash, "taps": backbone.taps}))
    # A first training by another name, so that neither the server nor OpenCL has anything left to load.
    train(replace(task, steps=1), Taps(backbone, training), Remote(spec["warm"], "warm"), secret=b"benchmark")
    head = {name: x for name, x in backbone.head.items() if name.startswith("pooler.")}
    times: dict[int, float] = {}
    began, cpu = time.perf_counter(), time.process_time()

    def note(step: int, _: int) -> None:
        times[step] = time.perf_counter() - began

    report = train(
        task,
        source,
        Remote(spec["server"], "device"),
        Settings(window=spec["window"], cache=spec["cache"]),
        secret=b"benchmark",
        head=head,
        progress=note,
    )
    cpu_s = time.process_time() - cpu
    facts = {**memory.facts(), **footprint(backbone)}
    if spec["kept"]:
        for start in range(0, looked_at.samples, spec["batch"]):
            looked_at.run(np.arange(start, min(start + spec["batch"], looked_at.samples)))
        parts = {"training": source.kept(), "held_out": looked_at.kept(), "head": head}
        np.savez(spec["kept"], **{f"{part}:{k}": x for part, found in parts.items() for k, x in found.items()})
        Path(spec["kept"]).with_suffix(".safetensors").write_bytes(report.weights)
        Path(spec["kept"]).with_suffix(".task").write_bytes(task.encode())
    return {
        **facts,
        "times": sorted(times.items()),
        "steps": report.steps,
        "computed": report.computed,
        "sent_bytes": report.sent_bytes,
        "received_bytes": report.received_bytes,
        "compute_s": report.compute_s,
        "wall_s": report.wall_s,
        "cpu_s": cpu_s,
        "utilisation": report.utilisation,
        "connections": report.connections,
    }


def serve(folder: Path, core: int | None) -> None:
    """Train for whoever comes: print the port, and end when standard input does.

    Args:
        folder: of trainings.
        core: to stay on.
    """
    import asyncio

    from layoutopt.side.service import Service
    from layoutopt.side.workers import Workers

    as_one_core(core)

    async def run() -> None:
        service = Service(Workers(folder, count=1))
        print(await service.start("127.0.0.1:0"), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await service.stop(1.0)

    asyncio.run(run())
