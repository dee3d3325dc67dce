"""``layoutopt side …``: fine-tuning that a server helps with. Each command's work is in ``layoutopt/side/``."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(
    name="side",
    help="Side-tuning: a device runs a frozen backbone forward only, a server trains a side network.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
