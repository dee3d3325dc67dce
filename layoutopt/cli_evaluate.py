"""``layoutopt side capture`` and ``side evaluate``: the graph that a device runs, and how well its model does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layoutopt import complete
from layoutopt.cli_device import open_runtime
from layoutopt.cli_options import Calibration, DeviceModel, Json, Memory, Strategy, TimeLimit
from layoutopt.errors import LayoutOptError
from layoutopt.show import Progress, emit, out, say

__all__ = ["capture", "evaluate"]


def capture(
    model: Annotated[
        str, typer.Argument(help="A zoo model: minilm, gpt2, opt-125m, vit-digits, …", autocompletion=complete.models)
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Graph file to write.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 16,
    seq: Annotated[int, typer.Option("--seq", min=2, help="Tokens a sample (text models).")] = 64,
    tokens: Annotated[str, typer.Option("--tokens", help="pivot: the token that the loss uses; or all.")] = "pivot",
    tap_format: Annotated[str, typer.Option("--tap-format", help="int4:64, int8:64, fp4:32, float32, …")] = "int4:64",
    taps: Annotated[str, typer.Option("--taps", help="Comma-separated modules, or late; all by default.")] = "",
    json: Json = False,
) -> None:
    """Capture the graph that a device runs in side-tuning: for `layoutopt plan`, `compare` and `simulate`."""
    from layoutopt.files import check_target
    from layoutopt.graphfile import save
    from layoutopt.quantize import Format
    from layoutopt.side.backbone import Wanted, capture_wanted, sending

    target = output or Path(f"{model}-taps.graph")
    check_target(target)
    fmt = Format.parse(tap_format)
    named = tuple(word.strip() for word in taps.split(",") if word.strip())
    graph = sending(capture_wanted(Wanted(model, None, batch, seq, fmt, tokens, named)), fmt)
    save(graph, target)
    facts = {
        "file": str(target),
        "taps": graph.meta["side"]["taps"],
        "width": graph.meta["side"]["width"],
        "ops": len(graph.ops),
        "parameters": sum(t.size_elems for t in graph.by_role("parameter")),
    }
    if json:
        emit(facts)
        return
    out(f"{facts['ops']} ops, {facts['parameters']:,} parameters, taps {', '.join(facts['taps'])}")
    out(f"wrote {target} ({target.stat().st_size / 1024:.0f} KiB)")


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `layoutopt side device --out` wrote.")],
    data: Annotated[str, typer.Option("--data", help="label<TAB>text file, .npz of inputs and labels, or 'digits'.")],
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Weights of the backbone.")] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", min=0.0, max=0.9, help="Share that training left out; 0: use all samples.")
    ] = 0.2,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the split; that of training.")] = None,
    seq: Annotated[int, typer.Option("--seq", min=2, help="Tokens a sample, if the network does not say.")] = 64,
    storage: Annotated[
        str,
        typer.Option(
            "--storage", help="Of the backbone's weights: fp32, int8 or nf4.", autocompletion=complete.storages
        ),
    ] = "fp32",
    device: Annotated[str | None, typer.Option("--device", help="Index or part of its name.")] = None,
    device_model: DeviceModel = None,
    strategy: Strategy = "ilp",
    memory: Memory = None,
    time_limit: TimeLimit = 60.0,
    calibration: Calibration = 60.0,
    json: Json = False,
) -> None:
    """Run backbone and side network as one graph on the device: accuracy on the samples that were held out."""
    from costmodel import device as devices
    from layoutopt.side.backbone import Planning
    from layoutopt.side.device import HEAD_FILE, NETWORK_FILE
    from layoutopt.side.evaluate import Tuned, load_device_head, load_network
    from layoutopt.side.samples import read_samples

    network = load_network(folder / NETWORK_FILE)
    task = network.task
    head = load_device_head(folder / HEAD_FILE) if task.mode == "private" else None
    runtime = open_runtime(device)
    with Progress("planning", quiet=json) as bar:
        model = devices.load(device_model) if device_model is not None else None
        planning = Planning(model, strategy, memory, time_limit, calibration, say, bar.fraction)
        tuned = Tuned.open(
            network,
            runtime,
            checkpoint=checkpoint,
            seed=task.seed if seed is None else seed,
            seq=seq,
            head=head,
            storage=storage,
            planning=planning,
        )
    try:
        samples = read_samples(tuned, data, tuned.classes)
        if len(samples.classes) != task.classes:
            raise LayoutOptError(
                f"{data} has {len(samples.classes)} classes, the side network {task.classes}: give the data of its task"
            )
        training, left_out = samples.split(held_out, task.seed if seed is None else seed)
        result = tuned.evaluate(training if left_out is None else left_out)
    finally:
        tuned.close()
    facts = {
        "model": task.model,
        "steps": network.steps,
        "accuracy": result.accuracy,
        "samples": result.samples,
        "held_out": left_out is not None,
        "memory_bytes": tuned.memory_bytes,
        "strategy": strategy,
    }
    if json:
        emit(facts)
        return
    where = "held-out samples" if left_out is not None else "samples"
    out(f"accuracy {result.accuracy:.4f} on {result.samples} {where} after {network.steps} steps")
    out(f"device memory {tuned.memory_bytes / 2**20:.1f} MiB")
