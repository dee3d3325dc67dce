"""``layoutopt config``: which defaults the configuration files set, and where."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from layoutopt.show import emit, out, table

__all__ = ["config"]

_ENVIRONMENT = ("LAYOUTOPT_CONFIG", "LAYOUTOPT_DEVICE", "LAYOUTOPT_DUMP")


def config(
    context: typer.Context, json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False
) -> None:
    """Show the defaults that configuration files set, and where (docs/configuration.md says what may stand in them)."""
    from layoutopt.cli import app
    from layoutopt.config import files, in_force

    given = context.find_root().params.get("config")
    read = [str(file) for file, _ in files(given)]
    found = in_force(app, given)
    variables = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if json:
        rows = [{"command": " ".join(s.command), "key": s.key, "value": s.value, "file": str(s.file)} for s in found]
        emit({"files": read, "settings": rows, "environment": variables})
        return
    out(f"files: {', '.join(read) or 'none'}")
    for name, value in variables.items():
        out(f"environment: {name}={value}")
    if found:
        lines = [[f"layoutopt {' '.join(s.command)}".strip(), f"--{s.key}", str(s.value), str(s.file)] for s in found]
        table(["command", "option", "default", "from"], lines)
