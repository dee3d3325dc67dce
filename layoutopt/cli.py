"""The command line: ``layoutopt devices | capture | calibrate | plan | sweep | simulate | profile | compare | …``.

Every command takes ``--json`` for machines and prints tables and progress for people (progress on standard error). Bad
input is one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt import __version__, cli_side, complete, interrupts, logs
from layoutopt.cli_advise import advise
from layoutopt.cli_config import config as config_command
from layoutopt.cli_device import model_for, open_runtime
from layoutopt.cli_doctor import doctor
from layoutopt.cli_export import export
from layoutopt.cli_report import report
from layoutopt.cli_simulate import simulate
from layoutopt.cli_sweep import sweep
from layoutopt.display_parts import bytes_text
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target
from layoutopt.show import Progress, emit, fail, forget_said, last_said, out, say, table

if TYPE_CHECKING:
    from layoutopt.graph import TrainingGraph

app = typer.Typer(
    name="layoutopt",
    help="Choose the memory layout of every tensor of a training step at once, prove the choice, run it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Device = Annotated[
    str | None, typer.Option("--device", help="Index or part of 'platform version | name' (see `layoutopt devices`).")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--device-model", help="Device model: a file or a built-in name.", autocompletion=complete.device_models
    ),
]
Memory = Annotated[str | None, typer.Option("--memory", help="Device memory the step may use: 512MiB, 2GiB, …")]
Strategy = Annotated[
    str,
    typer.Option("--strategy", help="ilp (exact), greedy, ideal, rowmajor, …", autocompletion=complete.strategies),
]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        help="How large tensors lie in memory: fp32, fp16; int8 or nf4: weights only read.",
        autocompletion=complete.storages,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", min=1, help="Equal parts of the batch, one after the other; as memory asks for."),
]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # Read when numpy is first imported. A fit's matrices are small: two threads made it ten times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    forget_said()
    try:
        app(args=list(argv) if argv is not None else None)
    except LayoutOptError as error:
        fail(f"layoutopt: error: {_sentence(error)}")
        return 2
    except OSError as error:  # a full disk, a folder without permission
        where = f"{error.filename}: " if error.filename else ""
        fail(f"layoutopt: error: {where}{error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        fail("layoutopt: interrupted")
        return 130
    except SystemExit as stop:  # how typer ends, usage errors with code 2 among them
        if stop.code == 130 and "interrupted" not in last_said():  # Ctrl-C, about which typer says nothing
            fail("layoutopt: interrupted")
        return stop.code if isinstance(stop.code, int) else 1
    finally:
        logs.close()
    return 0


def _sentence(error: Exception) -> str:
    """The message on one line, a list in it included."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join([first, "; ".join(rest)]) if first.endswith(":") else "; ".join([first, *rest])


def run() -> None:
    """Console-script entry."""
    code = main()
    if interrupts.abandoned():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML of defaults, instead of the working folder's.")
    ] = None,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Show what goes on; twice: in detail.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only results and errors.")] = False,
    log_file: Annotated[Path | None, typer.Option("--log-file", help="Append what goes on to this file.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out(f"layoutopt {__version__}")
        raise typer.Exit
    doctor_asked = context.invoked_subcommand == "doctor"  # finds what is wrong with these, too
    from layoutopt.clash import check
    from layoutopt.config import default_map, in_force

    if not doctor_asked:
        check()
    try:
        context.default_map = default_map(in_force(app, config))
    except LayoutOptError:
        if not doctor_asked:
            raise
    own = context.default_map or {}
    logs.configure(
        verbose or own.get("verbose", 0),
        quiet=quiet or (own.get("quiet", False) and not verbose),
        file=log_file or (Path(own["log_file"]) if "log_file" in own else None),
    )


@app.command()
def devices(json: Json = False) -> None:
    """What OpenCL sees here, with limits and which calibration applies; and the device models that ship."""
    from costmodel.device import list_builtin
    from kernels import runtime
    from layoutopt.models import calibrated_path

    found = runtime.devices()
    rows: list[dict[str, Any]] = []
    for d in found:
        path = calibrated_path(d)
        rows.append(
            {
                "index": d.index,
                "label": d.label,
                "driver": d.driver,
                "version": d.version,
                "kind": d.limits.kind,
                "compute_units": d.limits.compute_units,
                "global_mem_bytes": d.limits.global_mem_bytes,
                "max_alloc_bytes": d.limits.max_alloc_bytes,
                "local_mem_bytes": d.limits.local_mem_bytes,
                "max_work_group_size": d.limits.max_work_group_size,
                "images": d.limits.image_support,
                "note": d.note,
                "calibration": str(path) if path.is_file() else None,
            }
        )
    reason = runtime.no_device_reason()
    if json:
        emit({"devices": rows, "reason": reason, "builtin_models": list_builtin()})
        return
    if not rows:
        out(f"no OpenCL device: {reason}")
    for row in rows:
        out(f"{row['index']}: {row['label']}")
        out(f"   {row['kind']}, {row['compute_units']} compute units, driver {row['driver']}, {row['version']}")
        out(
            f"   memory {bytes_text(row['global_mem_bytes'])} (one buffer {bytes_text(row['max_alloc_bytes'])}), "
            f"local {bytes_text(row['local_mem_bytes'])}, work group {row['max_work_group_size']}, "
            f"images {'yes' if row['images'] else 'no'}"
        )
        if row["note"]:
            out(f"   note: {row['note']}")
        out(f"   calibration: {row['calibration'] or 'none (run `layoutopt calibrate`)'}")
    out(f"device models that ship: {', '.join(list_builtin())}")


@app.command()
def capture(
    model: Annotated[
        str | None,
        typer.Argument(help="A zoo name, package.module:factory or FILE.onnx.", autocompletion=complete.models),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Graph file to write.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1)] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Tokens a sample (text models).")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, sgd or none.")] = "adamw",
    labels: Annotated[int | None, typer.Option("--labels", min=1, help="Number of classes.")] = None,
    mode: Annotated[
        str,
        typer.Option("--mode", help="Train full, lora, head, bias; forward: nothing.", autocompletion=complete.modes),
    ] = "full",
    dropout: Annotated[bool, typer.Option("--dropout", help="Leave dropout as the model has it; else off.")] = False,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", min=1, help="Equal parts of the batch, whose gradients are added up.")
    ] = 1,
    list_: Annotated[bool, typer.Option("--list", help="The models that ship, and what a step takes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every view and what became of it.")] = False,
    json: Json = False,
) -> None:
    """Capture a model's training step to a graph file: forward, loss, backward, update."""
    from layoutopt.blocks import describe_blocks
    from layoutopt.facade import capture_model

    if list_ or model is None:
        if not list_:
            raise LayoutOptError("capture needs a model: a zoo name (see `layoutopt capture --list`) or module:factory")
        _list_models(json)
        return
    target = output or Path(f"{model.replace(':', '-').replace('.', '-')}.graph")
    check_target(target)
    with Progress(f"capturing {model}", quiet=json, endless=True):
        graph, report = capture_model(
            model,
            batch=batch,
            seq=seq,
            optimizer=optimizer,
            labels=labels,
            mode=mode,
            dropout=dropout,
            micro_batches=micro_batches,
        )
    from layoutopt.graphfile import save

    save(graph, target)
    if json:
        emit({"file": str(target), **_graph_facts(graph), "passes": report.lines()})
        return
    for line in report.lines():
        if verbose or not line.startswith(" "):
            out(line)
    facts = _graph_facts(graph)
    out(f"{facts['ops']} ops, {facts['tensors']} tensors, {facts['parameters']:,} parameters")
    out(f"repeated blocks: {describe_blocks(graph)}")
    out(f"wrote {target} ({target.stat().st_size / 1024:.0f} KiB)")


@app.command()
def calibrate(
    graph: Annotated[list[str] | None, typer.Option("--graph", help="Graph to calibrate for; repeatable.")] = None,
    device: Device = None,
    storage: Storage = "fp32",
    budget: Annotated[
        float | None, typer.Option("--budget", min=5.0, help="Seconds; 180 on a CPU, 60 on a GPU, thrice if thorough.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="More rounds, caches in finer steps.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Leave out what an interrupted calibration has measured.")
    ] = False,
    probes_only: Annotated[
        bool, typer.Option("--probes-only", help="Microbenchmarks and caches alone; written where -o says, if it does.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write a zip file that calibrates a phone (see README.txt in it).")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File; your data folder by default.")] = None,
    json: Json = False,
) -> None:
    """Run microbenchmarks on a device and write its device model, with the error on kernels held out from the fit."""
    from costmodel.caches import describe_caches
    from costmodel.calibrate import describe_held_out, describe_timing
    from layoutopt.models import calibrated_path, find_graph
    from layoutopt.rewrites import check_storage
    from layoutopt.tuning import calibrate_to

    if export is not None:
        _export(export, [find_graph(g) for g in graph or ()], json)
        return
    if output is not None:
        check_target(output)
    check_storage(storage)
    if probes_only:
        _probes(device, thorough, output, json)
        return
    graphs = tuple(find_graph(g) for g in graph or ())
    runtime = open_runtime(device)
    with Progress("calibrating", quiet=json) as bar:
        path = output or calibrated_path(runtime.info)
        model = calibrate_to(
            path,
            runtime,
            graphs,
            budget_s=budget,
            progress=bar.fraction,
            storage=storage,
            thorough=thorough,
            fresh=fresh,
            announce=lambda line: say(f"layoutopt: {line}"),
        )
    report = model.held_out
    if json:
        emit(
            {
                "file": str(path),
                "device": model.name,
                "measured": len(model.measurements),
                "seconds": model.budget_s,
                "kernels_tight": model.facts["kernels_tight"],
                "speed_drift": model.facts["speed_drift"],
                "held_out": report,
            }
        )
        return
    out(f"{model.name}: {len(model.measurements)} kernels measured in {model.budget_s:.0f} s")
    for line in describe_timing(model):
        out(line)
    out(describe_caches(model))
    out(describe_held_out(report))
    out(f"wrote {path}")


def _export(target: Path, graphs: Sequence[TrainingGraph], json: bool) -> None:
    from layoutopt.phone import FOLDER, export_bundle

    names = export_bundle(target, graphs)
    if json:
        emit({"file": str(target), "files": len(names)})
        return
    out(f"wrote {target} ({len(names)} files, {target.stat().st_size / 1024:.0f} KiB)")
    out(f"on the phone: unzip it, read {FOLDER}/README.txt, run `python3 run.py`; bring back the file that it writes")


def _probes(device: str | None, thorough: bool, output: Path | None, json: bool) -> None:
    from costmodel import device as device_models
    from layoutopt.probing import cache_lines, probe_facts, probe_only, probe_rows

    runtime = open_runtime(device)
    with Progress("probing", quiet=json, endless=True):
        model = probe_only(runtime, thorough=thorough)
    if output is not None:
        device_models.save(model, output)
    if json:
        emit({"file": str(output) if output else None, **probe_facts(model)})
        return
    table(["probe", "median", "quartiles", "what"], probe_rows(model))
    for line in cache_lines(model):
        out(line)
    if output is not None:
        out(f"wrote {output}")


@app.command()
def plan(
    graph: Annotated[
        str, typer.Argument(help="Graph file, or the name of one that ships.", autocompletion=complete.graphs)
    ],
    device_model: Model = None,
    device: Device = None,
    strategy: Strategy = "ilp",
    storage: Storage = "fp32",
    memory: Memory = None,
    micro_batches: MicroBatches = None,
    time_limit: TimeLimit = 60.0,
    costs: Annotated[
        str, typer.Option("--costs", help="model, or simulated: a roofline over simulated cache traffic, for phones.")
    ] = "model",
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan file to write.")] = Path("plan.json"),
    pareto: Annotated[bool, typer.Option("--pareto", help="Time against memory instead of one plan.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="With --pareto: .svg or .png to write.")] = None,
    json: Json = False,
) -> None:
    """Choose all layouts of a graph at once and write the plan, validated."""
    import layoutopt.plan as plans
    from layoutopt.facade import check_request, solve_plan
    from layoutopt.models import find_graph

    if pareto and memory is not None:
        raise LayoutOptError("--pareto shows all of memory against time: leave --memory out")
    if pareto and micro_batches is not None:
        raise LayoutOptError("--pareto shows the whole batch: capture with --micro-batches, or leave one of them out")
    if pareto and costs != "model":
        raise LayoutOptError("--pareto prices by the cost model: leave --costs out")
    if picture is not None and not pareto:
        raise LayoutOptError("--picture draws time against memory: give --pareto too")
    check_target(output)
    loaded = find_graph(graph)
    check_request([strategy], memory, loaded, storage, micro_batches)
    model = model_for(device_model, device, loaded, json, storage=storage)
    if pareto:
        from layoutopt.cli_pareto import show_pareto

        show_pareto(loaded, model, strategy, storage, time_limit, picture, json)
        return
    with interrupts.graceful(lambda line: say(f"layoutopt: {line}")), Progress("planning", quiet=json) as bar:
        solved = solve_plan(
            loaded,
            model,
            strategy=strategy,
            memory=memory,
            time_limit_s=time_limit,
            progress=bar.fraction,
            storage=storage,
            micro_batches=micro_batches,
            costs=costs,
        )
    plans.save(solved, output)
    facts = _plan_facts(solved, loaded, model)
    if micro_batches is None and any(name.startswith("micro:") for name in solved.rewrites):
        say(f"layoutopt: memory is short: the step runs {facts['samples']}, with the same result")
    if json:
        emit({"file": str(output), **facts})
        return
    table(["", ""], [[k.replace("_", " "), _cell(k, v)] for k, v in facts.items()])
    out(f"wrote {output}")


app.command()(simulate)
app.command()(doctor)
app.command("config")(config_command)
app.command()(report)
app.command()(export)


@app.command()
def profile(
    target: Annotated[
        str,
        typer.Argument(metavar="PLAN|GRAPH", help="Plan file, or a graph to plan now.", autocompletion=complete.graphs),
    ],
    device: Device = None,
    device_model: Model = None,
    graph: Annotated[str | None, typer.Option("--graph", help="The plan's graph, if not beside it.")] = None,
    strategy: Strategy = "ilp",
    storage: Storage = "fp32",
    memory: Memory = None,
    time_limit: TimeLimit = 60.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured steps, whole and launch by launch.")] = 7,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 15,
    trace: Annotated[Path | None, typer.Option("--trace", help="Perfetto trace (JSON) to write.")] = None,
    json: Json = False,
) -> None:
    """Run a step on the device: time, bytes, FLOPs and share of the roofline of every kernel; what launches cost."""
    from layoutopt.profiling import as_json, prepared, print_profile, profile
    from layoutopt.tracefile import write_trace

    if trace is not None:
        check_target(trace)
    with Progress("profiling", quiet=json) as bar:
        executor, inputs, model = prepared(
            target,
            lambda: open_runtime(device),
            device_model,
            graph=graph,
            strategy=strategy,
            storage=storage,
            memory=memory,
            time_limit_s=time_limit,
            announce=say,
            progress=bar.fraction,
        )
        found = profile(executor, inputs, model, rounds=rounds, progress=bar.count)
    executor.close()
    if trace is not None:
        write_trace(found, trace)
    if json:
        emit({"trace": str(trace) if trace else None, **as_json(found)})
        return
    print_profile(found, top)
    if trace is not None:
        out(f"wrote {trace}: open it at https://ui.perfetto.dev")


@app.command()
def compare(
    graph: Annotated[
        str, typer.Argument(help="Graph file, or the name of one that ships.", autocompletion=complete.graphs)
    ],
    device_model: Model = None,
    device: Device = None,
    strategies: Annotated[str, typer.Option("--strategies", help="Comma-separated; all by default.")] = "",
    storage: Storage = "fp32",
    memory: Memory = None,
    time_limit: TimeLimit = 60.0,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Run each plan on the device.")] = True,
    caches: Annotated[bool, typer.Option("--simulate/--no-simulate", help="Run the cache simulator.")] = True,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Measured steps of each plan, interleaved.")] = 15,
    json: Json = False,
) -> None:
    """Every strategy side by side: predicted, simulated, measured."""
    from layoutopt.compare import compare as run_compare
    from layoutopt.facade import check_request, solve_all
    from layoutopt.models import check_device, find_graph

    loaded = find_graph(graph)
    names = [s.strip() for s in strategies.split(",") if s.strip()]
    check_request(names, memory, loaded, storage)
    runtime = open_runtime(device) if measure else None
    model = model_for(device_model, device, loaded, json, runtime, storage)
    if runtime is not None:
        check_device(model.name, f"device model {device_model}", runtime)
    with Progress("planning", quiet=json) as bar:
        plans = solve_all(
            loaded, model, names, memory=memory, time_limit_s=time_limit, progress=bar.fraction, storage=storage
        )
    with Progress("comparing", quiet=json) as bar:
        rows = run_compare(
            loaded, plans, model, runtime=runtime, simulate_caches=caches, rounds=rounds, progress=bar.stage
        )
    if json:
        emit({"graph": loaded.name, "device": model.name, "rows": rows})
        return
    print_rows(rows)


def print_rows(rows: Sequence[object]) -> None:
    """The comparison as a table."""
    from layoutopt.compare import Row

    data = [row for row in rows if isinstance(row, Row)]
    levels = list(data[0].misses) if data else []
    head = ["strategy", "status", "over ilp", "predicted ms", "measured ms", "±", "relayouts", "moved MiB", "arena MiB"]
    head += [f"{name} misses M" for name in levels] + (["memory MiB"] if levels else [])
    body = []
    for row in data:
        cells = [
            row.strategy,
            row.status,
            f"{row.gap:+.1%}" if row.gap is not None else "-",
            f"{row.predicted_s * 1e3:.2f}",
            f"{row.measured_s * 1e3:.2f}" if row.measured_s is not None else "-",
            f"{row.spread_s * 1e3:.2f}" if row.spread_s is not None else "-",
            str(row.relayouts),
            f"{row.relayout_bytes / 2**20:.2f}",
            f"{row.arena_bytes / 2**20:.2f}",
        ]
        cells += [f"{row.misses[name] / 1e6:.3f}" for name in levels]
        cells += [f"{(row.memory_bytes or 0) / 2**20:.1f}"] if levels else []
        body.append(cells)
    table(head, body)
    for row in data:
        if row.not_run:
            out(
                f'{row.strategy}: {row.not_run} more copies, predicted {row.not_run_s * 1e3:.2f} ms, are in "over ilp" '
                "but not in the plan: no kernel here makes them"
            )
    walked = [row.walked for row in data if row.walked is not None]
    if walked:
        out(f"simulated misses: {min(walked):.0%} of the accesses walked, the rest extrapolated by work groups")


app.command()(sweep)


app.command()(advise)
app.add_typer(cli_side.app)


@app.command()
def train(
    model: Annotated[
        str,
        typer.Argument(
            help="minilm, or a graph file / shipped graph with an .npz or the digits.", autocompletion=complete.graphs
        ),
    ],
    data: Annotated[str, typer.Option("--data", help="label<TAB>text file, .npz of graph inputs, or 'digits'.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Checkpoint directory to write.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue the run in this directory.")] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Start from this directory.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 1,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 16,
    seq: Annotated[int, typer.Option("--seq", min=2)] = 64,
    lr: Annotated[float, typer.Option("--lr", min=0.0)] = 5e-5,
    held_out: Annotated[float, typer.Option("--held-out", min=0.0, max=0.9, help="Share kept for evaluation.")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of split, order, fresh weights and dropout.")] = 0,
    dropout: Annotated[bool, typer.Option("--dropout", help="Leave the model's dropout on.")] = False,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Stop early; the state is saved.")] = None,
    device: Device = None,
    device_model: Model = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Run this plan instead of making one.")] = None,
    strategy: Strategy = "ilp",
    storage: Storage = "fp32",
    memory: Memory = None,
    time_limit: TimeLimit = 60.0,
    calibration: Annotated[float, typer.Option("--calibration", min=5.0, help="Seconds if none exists yet.")] = 60.0,
    refine: Annotated[
        int, typer.Option("--refine", min=0, help="Measure the plan as it runs and plan again, at most so many times.")
    ] = 0,
    micro_batches: MicroBatches = None,
    json: Json = False,
) -> None:
    """Plan and fine-tune on the device: loss, accuracy, throughput, a checkpoint."""
    from layoutopt.finetune import Settings, finetune

    settings = Settings(
        model,
        data,
        out_dir,
        resume,
        checkpoint,
        epochs,
        batch,
        seq,
        lr,
        held_out,
        seed,
        dropout,
        max_steps,
        strategy,
        memory,
        time_limit,
        calibration,
        device_model,
        plan_file,
        storage,
        refine,
        micro_batches,
    )
    runtime = open_runtime(device)
    with Progress("training", quiet=json) as bar:
        result = finetune(settings, runtime, announce=say, progress=bar)
    if json:
        emit(result)
        return
    out(
        f"{result.steps} steps in {result.seconds:.1f} s ({result.samples_per_s:.1f} samples/s), "
        f"loss {result.first_loss:.4f} → {result.last_loss:.4f}"
    )
    if result.accuracy is not None:
        out(f"held-out accuracy {result.accuracy:.2%} over {result.held_out_samples} samples")
    if result.directory:
        out(f"checkpoint in {result.directory}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the figures.")] = Path("demo"),
    device: Device = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 40,
    calibration: Annotated[float, typer.Option("--calibration", min=5.0, help="Seconds.")] = 45.0,
    json: Json = False,
) -> None:
    """A vision transformer learns handwritten digits on the OpenCL device: calibrate, plan, train, compare."""
    from layoutopt.demo import run_demo

    with Progress("demo", quiet=json) as bar:
        summary, rows = run_demo(
            open_runtime(device), output, epochs=epochs, calibration_s=calibration, say=say, bar=bar
        )
    if json:
        emit(summary)
        return
    print_rows(rows)
    out(f"held-out accuracy {summary['accuracy']:.2%} after {summary['seconds']:.0f} s; figures in {output}/")


def _list_models(json: bool) -> None:
    from layoutopt.models import shipped_facts

    found = shipped_facts()
    if json:
        emit(found)
        return
    rows = []
    for name, known in sorted(found.items(), key=lambda item: -item[1].get("parameters", 0)):
        sizes = [w for w in known["command"].split(" --") if w.startswith(("batch", "seq"))]
        rows.append(
            [
                name,
                known["what"],
                ", ".join(sizes),
                f"{known['parameters'] / 1e6:,.1f}",
                str(known["ops"]),
                f"{known['flops'] / 1e9:,.1f}",
                f"{known['bytes'] / 2**30:,.1f}",
            ]
        )
    table(["model", "what", "step", "M parameters", "ops", "GFLOP", "GiB moved"], rows)
    out("a step is forward, loss, backward and AdamW; for others: layoutopt capture MODEL --batch --seq --mode …")


# ---- helpers ------------------------------------------------------------------------------------------------------


def _graph_facts(graph: TrainingGraph) -> dict[str, int | str]:
    parameters = sum(t.size_elems for t in graph.by_role("parameter"))
    return {
        "name": graph.name,
        "hash": graph.hash,
        "ops": len(graph.ops),
        "tensors": len(graph.tensors),
        "parameters": parameters,
    }


def _plan_facts(plan, graph: TrainingGraph, model) -> dict[str, object]:  # noqa: ANN001
    from layoutopt.intervals import plan_intervals
    from layoutopt.memory import Buffer, fullest_bytes
    from layoutopt.microbatch import in_words, micro_batches
    from layoutopt.rewrites import planned_graph
    from layoutopt.stepcost import predict_step

    held = [Buffer(slot.name, slot.size_bytes, slot.first, slot.last) for slot in plan.arena]
    measured = sum(o.cost.measured for o in plan.ops)
    sure = plan_intervals(plan, graph, model)
    planned = planned_graph(plan, graph)
    ends = {"kernels_low_s": sum(s.low_ns for s in sure), "kernels_high_s": sum(s.high_ns for s in sure)}
    return {
        "graph": plan.graph_name,
        "device": plan.device_name,
        "strategy": plan.solver.strategy,
        "status": plan.solver.status,
        "gap": plan.solver.gap,
        "solve_s": plan.solver.seconds,
        "micro_batches": micro_batches(planned),
        "samples": in_words(planned),
        "ops": len(plan.ops),
        "costs_measured": measured,
        "costs_predicted": len(plan.ops) - measured,
        "relayouts": len(plan.relayouts),
        "relayout_bytes": sum(r.bytes_moved for r in plan.relayouts),
        "arena_bytes": plan.arena_bytes,
        "arena_over_live": plan.arena_bytes / max(fullest_bytes(held, model.limits.base_align_bytes), 1),
        "predicted_step_s": predict_step(plan, graph, model).step_s,
    } | {key: ns * 1e-9 for key, ns in ends.items() if any(s.known for s in sure)}


def _cell(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run()
