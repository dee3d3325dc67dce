"""``layoutopt sweep``: a matrix of plans as one table."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from layoutopt import __version__, complete
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder, check_target, write_atomic
from layoutopt.rewrites import check_storage
from layoutopt.show import Progress, emit, out, say, table
from layoutopt.sweep import Cell, Engine, Row, Sources, Task, matrix, refusal
from layoutopt.sweep_journal import SweepJournal, journal_path, key_of
from layoutopt.sweep_table import check_table, write_table

__all__ = ["sweep"]


def sweep(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Graph files, shipped graphs, zoo names or module:factory.", autocompletion=complete.graphs
        ),
    ],
    device_models: Annotated[str, typer.Option("--device-models", help="Comma-separated files or built-in names.")],
    budgets: Annotated[
        str, typer.Option("--budgets", help="Memory: 512MiB,2GiB,…; none is the device's own.")
    ] = "none",
    batches: Annotated[str, typer.Option("--batches", help="Samples: 1,8,…; the graph's own by default.")] = "",
    strategies: Annotated[str, typer.Option("--strategies", help="Comma-separated.")] = "ilp",
    storage: Annotated[
        str, typer.Option("--storage", help="fp32, fp16, int8 or nf4.", autocompletion=complete.storages)
    ] = "fp32",
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver, a plan.")] = 60.0,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Plans at once; all cores by default.")
    ] = None,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Cluster; else started here.")] = None,
    plans: Annotated[Path | None, typer.Option("--plans", help="Folder for the plan files.")] = None,
    times: Annotated[bool, typer.Option("--times", help="A column of solving times, which differ by run.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Leave out what an interrupted sweep has done.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Table: .csv or .parquet.")] = Path("sweep.csv"),
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Plan every combination of models, device models, budgets and batches; resumable, one table."""
    check_target(output)
    check_table(output)
    check_storage(storage)
    if engine not in ("local", "ray"):
        raise LayoutOptError(f"unknown engine {engine!r}: choose local or ray")
    if plans is not None:
        check_folder(plans)
    cells = matrix(
        models,
        _words(device_models, "--device-models"),
        [None if word == "none" else word for word in _words(budgets, "--budgets")],
        [_count(word) for word in _words(batches, "--batches")] if batches else [None],
        _words(strategies, "--strategies"),
    )
    settings = {"version": __version__, "storage": storage, "time_limit_s": time_limit}
    journal = SweepJournal(journal_path(output), settings, fresh)
    try:
        with Progress("sweep", quiet=json) as bar:
            keys = _run(cells, journal, _engine(engine, workers, ray_address), storage, time_limit, plans, bar)
    except KeyboardInterrupt:
        say(
            f"layoutopt: interrupted; {len(journal.rows)} rows are kept in {journal.path}: "
            "the same command goes on from there"
        )
        raise typer.Exit(130) from None
    finally:
        journal.close()
    rows = [journal.rows[key] for key in keys]
    write_table(output, rows, times)
    journal.remove()
    _report(rows, output, json)


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise LayoutOptError(f"{option} is empty: expected names separated by commas")
    return words


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise LayoutOptError(f"batch {word!r} in --batches: expected a whole number of at least 1")
    return int(word)


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    from layoutopt.sweep_engines import local, on_ray

    if name == "ray":
        return lambda tasks: on_ray(tasks, workers, address)
    return lambda tasks: local(tasks, workers or os.cpu_count() or 1)


def _run(
    cells: list[Cell],
    journal: SweepJournal,
    engine: Engine,
    storage: str,
    time_limit_s: float,
    plans: Path | None,
    bar: Progress,
) -> list[str]:
    """Make the rows that the journal lacks; returns every cell's key."""
    keys, tasks, numbers = [], [], []
    sources = Sources()
    for number, cell in enumerate(cells):
        bar.stage(f"reading {cell.model}", number, len(cells))
        graph = device = None
        try:
            graph, device = sources.graph(cell.model, cell.batch), sources.device(cell.device_model)
        except LayoutOptError as error:
            keys.append(key_of(cell, graph, device))
            journal.rows[keys[-1]] = refusal(cell, "ERROR", str(error))  # told anew every time: it may be mended
            continue
        keys.append(key_of(cell, graph, device))
        kept = journal.rows.get(keys[-1])
        lacks_file = (
            plans is not None and kept is not None and "plan_sha256" in kept and not _file(plans, cell).exists()
        )
        if kept is None or kept["status"] in ("ERROR", "DIED") or lacks_file:
            tasks.append(Task(cell, graph, device, storage, time_limit_s, plans is not None))
            numbers.append(number)
    done = len(cells) - len(tasks)
    _say_resumed(cells, keys, numbers, journal)
    bar.stage("planning", done, len(cells))
    if not tasks:
        return keys
    if plans is not None:
        plans.mkdir(parents=True, exist_ok=True)
    for position, row, data in engine(tasks):
        cell = tasks[position].cell
        if plans is not None and data is not None:
            write_atomic(_file(plans, cell), data)
        journal.add(keys[numbers[position]], row)
        done += 1
        bar.stage(f"{cell.model} on {cell.device_model}", done, len(cells))
    return keys


def _say_resumed(cells: list[Cell], keys: list[str], numbers: list[int], journal: SweepJournal) -> None:
    todo = set(numbers)
    kept = [n for n in range(len(cells)) if n not in todo and journal.rows[keys[n]]["status"] != "ERROR"]
    if kept:
        say(f"layoutopt: {len(kept)} of {len(cells)} rows are kept from {journal.path}")


def _file(folder: Path, cell: Cell) -> Path:
    """A plan's file: its cell in words."""
    batch = f"batch{cell.batch}" if cell.batch else ""
    # Files in two folders may have one name.
    own = hashlib.sha256(repr(cell).encode()).hexdigest()[:8]
    parts = (Path(cell.model).name, Path(cell.device_model).name, batch, cell.memory or "", cell.strategy, own)
    return folder / (re.sub(r"[^A-Za-z0-9.+-]+", "-", "_".join(p for p in parts if p)) + ".json")


def _report(rows: list[Row], output: Path, json: bool) -> None:
    counts = Counter(row["status"] for row in rows)
    if counts["FEASIBLE"]:
        say(
            f"layoutopt: {counts['FEASIBLE']} of {len(rows)} rows ended at the time limit: how far they got depends on "
            "the machine (raise --time-limit)"
        )
    if json:
        emit({"file": str(output), "rows": len(rows), "status": dict(sorted(counts.items()))})
        return
    table(["status", "rows"], [[name, str(count)] for name, count in sorted(counts.items())])
    out(f"wrote {output} ({len(rows)} rows)")
