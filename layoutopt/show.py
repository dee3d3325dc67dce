"""What people and machines see: tables and JSON on standard output, sentences and progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

__all__ = ["Progress", "emit", "out", "say", "table"]


def out(line: str) -> None:
    """A line of result."""
    print(line, file=sys.stdout)


def say(line: str) -> None:
    """A line about what is going on."""
    print(line, file=sys.stderr)


def emit(value: Any) -> None:
    """JSON of dataclasses, structs, numbers and containers."""
    import msgspec

    text = msgspec.json.encode(value, enc_hook=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    print(msgspec.json.format(text, indent=2).decode(), file=sys.stdout)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; the first column is text, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(show_header=any(head), box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        drawn.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    # Names of tensors and layouts hold brackets: they are text, not markup.
    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        wide = [max(len(row[i]) for row in (head, *rows)) + 2 for i in range(len(head))]
        console.width = max(console.width, sum(wide))
    console.print(drawn)


class Progress:
    """A progress bar on standard error where that is a terminal; silent otherwise and when ``quiet``."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._quiet = quiet or not sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def fraction(self, what: str, done: float) -> None:
        """``done`` of 1."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}", completed=done, total=1.0)

    def count(self, done: int, of: int) -> None:
        """``done`` of ``of``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of)

    def stage(self, what: str, done: int, of: int) -> None:
        """A named stage, ``done`` of ``of``."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}", completed=done, total=of)
