"""What people and machines see: tables and JSON on standard output, sentences and progress on standard error."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "SAID",
    "Progress",
    "console",
    "emit",
    "fail",
    "forget_said",
    "is_quiet",
    "last_said",
    "out",
    "say",
    "set_quiet",
    "table",
]

SAID = "layoutopt.said"
"""Logger of what is printed for people: it goes to the log's file only."""
_LOG = logging.getLogger(__name__)
logging.getLogger(SAID).addHandler(logging.NullHandler())  # or Python would print it a second time


class _State:
    quiet = False
    last = ""


def set_quiet(quiet: bool) -> None:
    """Whether to leave out sentences about what is going on, and progress."""
    _State.quiet = quiet


def is_quiet() -> bool:
    """Whether these are left out."""
    return _State.quiet


@lru_cache(maxsize=1)
def console() -> Console:
    """Standard error, shared by progress bars and logs so that neither writes over the other."""
    from rich.console import Console

    return Console(stderr=True)


def out(line: str) -> None:
    """A line of result."""
    print(line, file=sys.stdout)


def say(line: str) -> None:
    """A line about what is going on."""
    logging.getLogger(SAID).info("%s", line.removeprefix("layoutopt: "))
    if not _State.quiet:
        _State.last = line
        print(line, file=sys.stderr)


def fail(line: str) -> None:
    """A line about why it ends."""
    logging.getLogger(SAID).error("%s", line.removeprefix("layoutopt: "))
    _State.last = line
    print(line, file=sys.stderr)


def last_said() -> str:
    """The last sentence of the command that runs."""
    return _State.last


def forget_said() -> None:
    """Another command begins."""
    _State.last = ""


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
    """A progress bar on standard error where that is a terminal; silent otherwise and when ``quiet``.

    Args:
        what: is going on.
        quiet: show nothing.
        endless: nobody knows how much there is to do.
    """

    def __init__(self, what: str, *, quiet: bool = False, endless: bool = False) -> None:
        self._what = what
        self._quiet = quiet or _State.quiet or not sys.stderr.isatty()
        self._total = None if endless else 1.0
        self._logged = ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._total is None:  # no stage will say it
            _LOG.info("%s", self._what)
        if not self._quiet:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=console(),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _log(self, what: str) -> None:
        """A line for every new stage; numbers in it make no new one."""
        stage = re.sub(r"[0-9.]+", "#", what)
        if stage != self._logged:
            self._logged = stage
            _LOG.info("%s: %s", self._what, what)

    def fraction(self, what: str, done: float) -> None:
        """``done`` of 1."""
        self._log(what)
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}", completed=done, total=1.0)

    def count(self, done: int, of: int) -> None:
        """``done`` of ``of``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of)

    def stage(self, what: str, done: int, of: int) -> None:
        """A named stage, ``done`` of ``of``."""
        self._log(what)
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}", completed=done, total=of)
