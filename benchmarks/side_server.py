"""How fast a server trains side networks: steps of the same batches on the CPU and, where torch finds one, on CUDA.

    python benchmarks/side_server.py [CASE...] [--steps N] [--json OUT] [--smoke]

A case is what one device sends: width, taps, rows a batch and the taps' format (``CASES``). Batches are random numbers,
quantised as a device does; a step dequantises them, runs the side network forward and back, and updates it, through
:class:`layoutopt.side.trainer.Trainer`, whose journal goes to a temporary folder: *accept* is that write with its
fsync, *apply* the step. Median milliseconds, samples a second of *apply*, and how far the weights on CUDA are from
those on the CPU after the same steps (largest difference over the largest weight).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Record
from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format, quantise
from layoutopt.side.task import Batch, Task
from layoutopt.side.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """What a device sends for a step."""

    width: int
    taps: int
    samples: int
    seq: int
    format: str
    rank: int = 16


CASES = {
    "minilm-pivot": Case(384, 6, 16, 0, "int4:64"),
    "minilm-all": Case(384, 6, 16, 64, "int8:64"),
    "bert-base-all": Case(768, 12, 16, 128, "int4:64", 64),
    "opt-1.3b-pivot": Case(2048, 24, 16, 0, "int4:64", 64),
    "opt-1.3b-all": Case(2048, 24, 8, 256, "int4:64", 64),
}
SMOKE = Case(16, 3, 2, 4, "int4:8", 4)


def task_of(name: str, case: Case, steps: int) -> Task:
    """The training of a case."""
    return Task(
        model=name,
        graph="random",
        width=case.width,
        taps=tuple(f"block.{i}" for i in range(case.taps)),
        format=case.format,
        tokens="all" if case.seq else "pivot",
        seq=case.seq,
        batch=case.samples,
        classes=2,
        mode="labels",
        pooling="mean" if case.seq else "first",  # of a single token, the others would not be trained on
        rank=case.rank,
        steps=steps,
    )


def batches_of(task: Task, count: int) -> list[Batch]:
    """Random activations."""
    rng = np.random.default_rng(task.width)
    fmt = Format.parse(task.format)
    rows = task.batch * task.rows_per_sample

    def batch(step: int) -> Batch:
        taps = tuple(quantise(rng.standard_normal((rows, task.width), np.float32), fmt) for _ in task.taps)
        mask = np.ones((task.batch, task.seq), np.uint8) if task.seq else None
        labels = rng.integers(0, task.classes, task.batch).astype(np.int32)
        return Batch(step, tuple(range(task.batch)), taps, mask, labels)

    return [batch(step) for step in range(count)]


def measured(task: Task, batches: Sequence[Batch], device: str, threads: int) -> dict[str, Any]:
    """Seconds of accepting and of applying each batch after the first three, and the weights after all."""
    accept, apply = list[float](), list[float]()
    with TemporaryDirectory() as folder:
        trainer = Trainer.open(Path(folder) / "training", task, device=device, threads=threads)
        for batch in batches:
            accept.append(seconds(lambda batch=batch: trainer.accept(batch)))
            apply.append(seconds(trainer.apply))  # ends with the loss on the host
        weights = trainer.weights()
        trainer.close(keep=False)
    kept = slice(min(3, len(batches) - 1), None)
    return {
        "accept_s": statistics.median(accept[kept]),
        "apply_s": statistics.median(apply[kept]),
        "samples_per_s": task.batch / statistics.median(apply[kept]),
        "weights": weights,
    }


def seconds(work: Callable[[], Any]) -> float:
    """Of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest difference over the largest weight."""
    return max(float(np.abs(a[n] - b[n]).max()) for n in a) / max(float(np.abs(v).max()) for v in a.values())


def row_of(name: str, case: Case, steps: int, devices: Sequence[str], threads: int) -> dict[str, Any]:
    """A case on every device, with the same batches."""
    task = task_of(name, case, steps)
    batches = batches_of(task, steps)
    found = {device: measured(task, batches, device, threads) for device in devices}
    weights = {device: values.pop("weights") for device, values in found.items()}
    row: dict[str, Any] = {"case": name, "parameters": task.parameters, "batch_bytes": batches[0].nbytes, **found}
    if "cuda" in weights:
        row["distance"] = distance(weights["cpu"], weights["cuda"])
    return row


def show(row: dict[str, Any]) -> None:
    """A line a device."""
    for device in ("cpu", "cuda"):
        if device not in row:
            continue
        it = row[device]
        far = f"   weights differ by {row['distance']:.1e}" if device == "cuda" else ""
        print(
            f"{row['case']:<16}{row['parameters'] / 1e6:>8.2f} M {row['batch_bytes'] / 1e3:>10.1f} kB a batch  "
            f"{device:<5}accept {it['accept_s'] * 1e3:>8.2f} ms  apply {it['apply_s'] * 1e3:>8.2f} ms  "
            f"{it['samples_per_s']:>9.0f} samples/s{far}",
            flush=True,
        )


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU's steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    try:
        if asked.steps < 1:
            raise LayoutOptError(f"--steps is at least 1, got {asked.steps}")
        unknown = [name for name in asked.cases if name not in CASES]
        if unknown:
            raise LayoutOptError(f"unknown case {unknown[0]!r}: choose among {', '.join(CASES)}")
        cases = {"smoke": SMOKE} if asked.smoke else {n: CASES[n] for n in asked.cases or CASES}
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        gpu = torch.cuda.get_device_name() if "cuda" in devices else ""
        record = Record(asked.json, "side_server", torch=torch.__version__, gpu=gpu, threads=asked.threads)
        rows = []
        for name, case in cases.items():
            rows.append(row_of(name, case, 3 if asked.smoke else asked.steps, devices, asked.threads))
            show(rows[-1])
            record.write({"rows": rows})
    except LayoutOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
