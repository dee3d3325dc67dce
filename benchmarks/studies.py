"""The loop of studies that make a row of each model on each device: shown and kept one by one."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.recording import Record
from benchmarks.reduced import reduced_graph
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph

__all__ = ["ended", "study_all", "study_parser"]

Row = dict[str, Any]


def study_parser(doc: str | None, smoke: str, time_limit_s: float, strategy: str = "") -> ArgumentParser:
    """What such studies are asked on the command line.

    Args:
        doc: of the benchmark.
        smoke: what ``--smoke`` does.
        time_limit_s: of a search, unless said otherwise.
        strategy: likewise; "" where the benchmark compares several.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="as benchmarks/reduced.py takes them; repeatable")
    parser.add_argument("--device-model", action="append", help="repeatable")
    if strategy:
        parser.add_argument("--strategy", default=strategy)
    parser.add_argument("--time-limit", type=float, default=time_limit_s)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def study_all(
    models: Iterable[str],
    devices: Iterable[str],
    study: Callable[[TrainingGraph, str], Row],
    show: Callable[[Row], None],
    record: Record,
) -> list[Row]:
    """A row for each model on each device.

    Args:
        models: as ``benchmarks/reduced.py`` takes them.
        devices: names or files of device models.
        study: makes the row of a graph on a device.
        show: prints it.
        record: keeps all rows so far.
    """
    devices = list(devices)
    rows: list[Row] = []
    for name in models:
        graph = reduced_graph(name)
        for device in devices:
            rows.append({"model": graph.name, "device": device, **study(graph, device)})
            show(rows[-1])
            record.write({"rows": rows})
    return rows


def ended(name: str, main: Callable[[], int]) -> int:
    """The exit status of a benchmark: 2 and a sentence where it is asked for what cannot be."""
    try:
        return main()
    except LayoutOptError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
