"""The head of a benchmark's record: on what, when and how long it ran, and what else the machine did meanwhile."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic

__all__ = ["Record", "Rows"]


class Record:
    """A JSON file that is written whole whenever there is more to keep, so that a stop costs one row.

    Args:
        path: of the file; None keeps nothing.
        benchmark: its name.
        about: what else the head says, such as a seed.

    Raises:
        LayoutOptError: the file cannot be written there; said before anything is measured.
    """

    def __init__(self, path: Path | None, benchmark: str, **about: Any) -> None:
        if path:
            check_target(path)
        self._path = path
        self._began = time.monotonic()
        self._load = os.getloadavg()[0]
        self._about = {"benchmark": benchmark, **about}

    def write(self, found: dict[str, Any], runtime: Any | None = None) -> None:
        """Write the head and ``found``; the load average is the one at the start and the one now."""
        if self._path is None:
            return
        head = dict(self._about)
        if runtime is not None:
            head |= {"device": runtime.info.label, "driver": runtime.info.driver}
        head |= {"load_average": [self._load, os.getloadavg()[0]], "cores": os.cpu_count()}
        head |= {"python": platform.python_version(), "seconds": time.monotonic() - self._began}
        write_atomic(self._path, json.dumps({**head, **found}, indent=1) + "\n")


class Rows:
    """Rows of a record, of which those that are there already are not made again.

    Args:
        path: of the record; None keeps nothing.
        record: writes it.
        settings: that every row was made with; rows of other settings are refused.

    Raises:
        LayoutOptError: the file is no such record, or one of other settings.
    """

    def __init__(self, path: Path | None, record: Record, settings: dict[str, Any]) -> None:
        self._record = record
        self._settings = settings
        self.rows: list[dict[str, Any]] = []
        if path is None or not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.rows, known = found["rows"], found["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise LayoutOptError(f"{path} is no record with rows ({error}): give another name") from error
        if known != settings:
            raise LayoutOptError(f"{path} was made with {known}, not with {settings}: give another name")

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row with these entries, if there is one."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, at once."""
        self.rows.append(row)
        self._record.write({"settings": self._settings, "rows": self.rows})
        return row
