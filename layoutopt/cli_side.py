"""``layoutopt side …``: fine-tuning that a server helps with. Each command's work is in ``layoutopt/side/``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from layoutopt import complete, interrupts, logs
from layoutopt.cli_device import open_runtime
from layoutopt.cli_evaluate import capture, evaluate
from layoutopt.cli_options import Calibration, DeviceModel, Json, Memory, Strategy, TimeLimit
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder
from layoutopt.show import Progress, emit, out, say, table

__all__ = ["app"]

app = typer.Typer(
    name="side",
    help="Side-tuning: a device runs a frozen backbone forward only, a server trains a side network.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of all keys; new devices are added to it.")],
    device: Annotated[list[str] | None, typer.Option("--device", help="Name of a new device; repeatable.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server; repeatable. This machine's alone."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long certificates hold.")] = 825,
    json: Json = False,
) -> None:
    """Make certificates and tokens: DIR/server goes to the server, DIR/devices/NAME to the device."""
    from layoutopt.side.keys import make_keys

    made = make_keys(folder, device or [], host or [], days)
    if json:
        emit(made)
        return
    if made.authority:
        out(f"{folder / 'ca.key'}: the new authority's key; it makes certificates, and belongs on neither side")
    if made.server:
        out(f"{folder / 'server'}: for the server, `layoutopt side serve --keys`")
    for name in made.devices:
        out(f"{folder / 'devices' / name}: for the device {name}, `layoutopt side device --keys`")
    if not made.devices:
        out("no new device: give --device NAME for each")


@app.command()
def serve(
    state: Annotated[Path, typer.Option("--state", help="Folder of all trainings; they go on from what is there.")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:7311",
    keys: Annotated[Path | None, typer.Option("--keys", help="DIR/server of `layoutopt side keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, beyond this machine too.")] = False,
    engine: Annotated[
        str, typer.Option("--engine", help="Where side networks are trained: processes or ray.")
    ] = "processes",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Trainings at work at once.")] = 2,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Cluster; else started here.")] = None,
    cuda: Annotated[bool, typer.Option("--cuda", help="Train on a GPU.")] = False,
    memory: Annotated[str, typer.Option("--memory", help="For all trainings together.")] = "4GiB",
    store_memory: Annotated[
        str, typer.Option("--store-memory", help="For a device's activations in memory.")
    ] = "16MiB",
    store_disk: Annotated[str, typer.Option("--store-disk", help="For a device's activations on disk.")] = "1GiB",
    window: Annotated[int, typer.Option("--window", min=1, max=8, help="Steps that a device may have under way.")] = 4,
    window_memory: Annotated[str, typer.Option("--window-memory", help="For these, a device.")] = "64MiB",
    devices: Annotated[int, typer.Option("--devices", min=1, help="Connected at once.")] = 256,
    json: Json = False,
) -> None:
    """Train side networks for devices until interrupted (Ctrl-C, SIGTERM)."""
    from layoutopt.facade import memory_bytes
    from layoutopt.side.service import Limits
    from layoutopt.side.serving import Setup, serve
    from layoutopt.side.workers import Limits as WorkerLimits

    if engine not in ("processes", "ray"):
        raise LayoutOptError(f"unknown engine {engine!r}: choose processes or ray")
    check_folder(state)
    _quiet_grpc()
    logs.show_progress()
    sizes = [memory_bytes(text) or 0 for text in (memory, store_memory, store_disk, window_memory)]
    setup = Setup(
        state,
        listen,
        keys,
        insecure,
        engine,  # type: ignore[arg-type]
        workers,
        cuda,
        ray_address,
        Limits(devices=devices, window_steps=window, window_bytes=sizes[3], held_bytes=max(1 << 30, sizes[3])),
        WorkerLimits(memory_bytes=sizes[0], store_memory_bytes=sizes[1], store_disk_bytes=sizes[2]),
    )
    host = listen.rpartition(":")[0]

    def ready(port: int) -> None:
        if json:
            emit({"host": host, "port": port, "tls": keys is not None and not insecure})
        else:
            out(f"serving on {host}:{port}{'' if keys and not insecure else ', in plaintext'}; Ctrl-C ends it")
        sys.stdout.flush()

    serve(setup, ready)
    say("layoutopt: the server has stopped; every acknowledged step is in its folder")


@app.command()
def device(
    model: Annotated[
        str, typer.Argument(help="A zoo model: minilm, gpt2, opt-125m, vit-digits, …", autocompletion=complete.models)
    ],
    data: Annotated[str, typer.Option("--data", help="label<TAB>text file, .npz of inputs and labels, or 'digits'.")],
    server: Annotated[str, typer.Option("--server", help="HOST:PORT of `layoutopt side serve`.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the side network; give the same to go on.")],
    keys: Annotated[Path | None, typer.Option("--keys", help="DIR/devices/NAME of `layoutopt side keys`.")] = None,
    name: Annotated[str, typer.Option("--name", help="This device's, where there are no keys.")] = "device",
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, beyond this machine too.")] = False,
    mode: Annotated[
        str,
        typer.Option(
            "--mode", help="What is sent as target: labels, or (private) prediction differences; both tell labels."
        ),
    ] = "labels",
    label_epsilon: Annotated[
        float | None,
        typer.Option("--label-epsilon", help="Train on labels flipped at random: differentially private at this."),
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="pivot: the token that the loss uses; or all.")] = "pivot",
    tap_format: Annotated[str, typer.Option("--tap-format", help="int4:64, int8:64, fp4:32, …")] = "int4:64",
    taps: Annotated[
        str, typer.Option("--taps", help="Comma-separated modules; or late: half of the blocks. All by default.")
    ] = "",
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 16,
    seq: Annotated[int, typer.Option("--seq", min=2, help="Tokens a sample.")] = 64,
    lr: Annotated[float, typer.Option("--lr", min=0.0)] = 1e-3,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of an adapter.")] = 16,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or sgd.")] = "adamw",
    schedule: Annotated[
        str, typer.Option("--schedule", help="Of the learning rate: linear, cosine, constant.")
    ] = "linear",
    warmup: Annotated[float, typer.Option("--warmup", min=0.0, max=1.0, help="Share of the steps.")] = 0.1,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0)] = 0.01,
    held_out: Annotated[float, typer.Option("--held-out", min=0.0, max=0.9, help="Share kept for evaluation.")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of split, order and fresh weights.")] = 0,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Plan for fewer steps.")] = None,
    window: Annotated[int, typer.Option("--window", min=1, help="Steps under way; 1 waits for the server.")] = 4,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Later epochs from the server's store.")] = True,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Weights of the backbone.")] = None,
    storage: Annotated[
        str,
        typer.Option("--storage", help="How these lie in memory: fp32, int8 or nf4.", autocompletion=complete.storages),
    ] = "fp32",
    device_: Annotated[
        str | None, typer.Option("--device", help="Index or part of a name (see `layoutopt devices`).")
    ] = None,
    device_model: DeviceModel = None,
    strategy: Strategy = "ilp",
    memory: Memory = None,
    time_limit: TimeLimit = 60.0,
    calibration: Calibration = 60.0,
    give_up: Annotated[
        float, typer.Option("--give-up", min=0.0, help="Seconds without progress, then the command ends.")
    ] = 600.0,
    anew: Annotated[
        bool, typer.Option("--anew", help="Forget the training that the server has of this device.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a frozen backbone over your samples and have a server train a side network; resumable."""
    from layoutopt.quantize import Format
    from layoutopt.side.backbone import Planning, Wanted
    from layoutopt.side.client import Remote, Settings
    from layoutopt.side.device import Job, run_job
    from layoutopt.side.keys import DeviceKeys

    for option, value, allowed in (
        ("--mode", mode, ("labels", "private")),
        ("--tokens", tokens, ("pivot", "all")),
        ("--optimizer", optimizer, ("adamw", "sgd")),
        ("--schedule", schedule, ("linear", "cosine", "constant")),
        ("--storage", storage, ("fp32", "int8", "nf4")),
    ):
        if value not in allowed:
            raise LayoutOptError(f"{option} {value!r}: choose {' or '.join(allowed)}")
    check_folder(out_dir)
    _quiet_grpc()
    held = DeviceKeys.load(keys) if keys is not None else None
    remote = Remote(server, name if held is None else held.name, held, insecure, not insecure)
    named = tuple(word.strip() for word in taps.split(",") if word.strip())
    wanted = Wanted(model, checkpoint, batch, seq, Format.parse(tap_format), tokens, named, storage, seed)
    job = Job(
        wanted,
        data,
        out_dir,
        mode,
        epochs,
        lr,
        rank,
        optimizer,
        schedule,
        warmup,
        weight_decay,
        held_out,
        seed,
        max_steps,
        label_epsilon,
    )
    settings = Settings(window=window, give_up_s=give_up, cache=cache, anew=anew)
    runtime = open_runtime(device_)
    with interrupts.graceful(_tell), Progress("planning", quiet=json) as bar:
        planning = Planning(_model(device_model), strategy, memory, time_limit, calibration, _tell, bar.fraction)
        outcome = run_job(
            job,
            remote,
            runtime,
            planning,
            settings,
            announce=_tell,
            progress=lambda done, of: bar.stage("training", done, of),
        )
    _report(outcome, json)


app.command()(evaluate)
app.command()(capture)


def _quiet_grpc() -> None:
    """What its core writes to standard error is said by us, in a sentence. It looks at this when it is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _tell(line: str) -> None:
    say(f"layoutopt: {line}")


def _model(given: str | None) -> Any:
    from costmodel.device import load

    return None if given is None else load(given)


def _report(outcome: Any, json: bool) -> None:
    report = outcome.report
    losses = [report.losses[step] for step in sorted(report.losses)]
    facts = {
        "steps": report.steps,
        "first_step": report.first_step,
        "samples": outcome.samples,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "connections": report.connections,
        "computed_samples": report.computed,
        "supplied_samples": report.supplied,
        "sent_bytes": report.sent_bytes,
        "received_bytes": report.received_bytes,
        "compute_s": report.compute_s,
        "wall_s": report.wall_s,
        "utilisation": report.utilisation,
        "prepare_s": outcome.prepare_s,
        "weights_bytes": outcome.weights_bytes,
        "peak_bytes": outcome.peak_bytes,
        "network": str(outcome.network),
    }
    if json:
        emit(facts | {"task": outcome.task})
        return
    table(["", ""], [[key.replace("_", " "), _cell(value)] for key, value in facts.items()])
    out(f"wrote {outcome.network}: the side network after {report.steps} steps")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
