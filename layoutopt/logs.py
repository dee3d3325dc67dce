"""Where log lines go: to standard error for people, and to a file.

Everything of ours logs to ``layoutopt`` or below it (``layoutopt.kernels``, ``layoutopt.side``, …), and configures
nothing: only the command line does, here. Warnings are shown; ``-v`` shows what goes on, ``-vv`` more.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from layoutopt import show
from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target

__all__ = ["ROOT", "close", "configure", "show_progress"]

ROOT = logging.getLogger("layoutopt")
_LINE = "%(asctime)s %(levelname)s %(message)s"
_WARNING = "layoutopt: %(message)s"
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Handlers:
    """What was added to the logger, to be taken off again."""

    shown: logging.Handler | None = None
    kept: logging.Handler | None = None


def configure(verbosity: int = 0, *, quiet: bool = False, file: Path | None = None) -> None:
    """Set up the command line's logs.

    Args:
        verbosity: 0 for warnings, 1 for what goes on, 2 for details.
        quiet: only errors, and no progress.
        file: to append every line from INFO on to, and what is said to people.

    Raises:
        LayoutOptError: the file cannot be written.
    """
    close()
    level = logging.ERROR if quiet else _LEVELS[min(verbosity, 2)]
    show.set_quiet(quiet)
    if file is not None:
        check_target(file)
        try:
            _Handlers.kept = logging.FileHandler(file, encoding="utf-8", delay=False)
        except OSError as error:
            raise LayoutOptError(f"cannot write the log {file}: {error.strerror} (choose another file)") from error
        _Handlers.kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _Handlers.kept.setLevel(min(level, logging.INFO))
        ROOT.addHandler(_Handlers.kept)
    _show(level)


def show_progress() -> None:
    """Show INFO lines whatever the verbosity: for commands that run until they are stopped."""
    if not show.is_quiet() and (_Handlers.shown is None or _Handlers.shown.level > logging.INFO):
        _show(logging.INFO)


def _show(level: int) -> None:
    """Lines from a level on to standard error."""
    if _Handlers.shown is not None:
        ROOT.removeHandler(_Handlers.shown)
    handler: logging.Handler
    if sys.stderr.isatty() and level < logging.WARNING:
        from rich.logging import RichHandler

        handler = RichHandler(console=show.console(), show_path=False, markup=False, omit_repeated_times=False)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_LINE if level < logging.WARNING else _WARNING))
    handler.setLevel(level)
    handler.addFilter(lambda record: record.name != show.SAID)  # printed already
    _Handlers.shown = handler
    ROOT.addHandler(handler)
    ROOT.setLevel(min(h.level for h in (_Handlers.shown, _Handlers.kept) if h is not None))


def close() -> None:
    """Take off what was set up, and close the file."""
    for handler in (_Handlers.shown, _Handlers.kept):
        if handler is not None:
            ROOT.removeHandler(handler)
            handler.close()
    _Handlers.shown = _Handlers.kept = None
    ROOT.setLevel(logging.NOTSET)
    show.set_quiet(False)
