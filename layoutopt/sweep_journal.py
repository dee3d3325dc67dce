"""A sweep's rows, written down as they end: an interrupted sweep goes on from there.

A file of lines beside the table, each a JSON object: the sweep's settings first, then a row each. Lines are only ever
appended and are on the disk before the next row is waited for. A reader stops at the first line that is torn, which is
where writing goes on. The file goes when the table is written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.files import lock
from layoutopt.sweep import Cell, Row

__all__ = ["SweepJournal", "journal_path", "key_of"]

FORMAT = 1


def journal_path(table: Path) -> Path:
    """Where the journal of a table is."""
    return table.with_name(f"{table.name}.journal")


def key_of(cell: Cell, graph: bytes | None, device: str | None) -> str:
    """What a row must share to be taken for a cell's: names, and what was read by them."""
    digest = hashlib.sha256()
    for part in (repr(cell).encode(), graph or b"", (device or "").encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


class SweepJournal:
    """An open journal; one process at a time writes it.

    Args:
        path: the file.
        settings: what rows depend on beside their cells.
        fresh: whether to leave out what is there.

    Raises:
        LayoutOptError: it cannot be written, another sweep writes it, or it is of a sweep with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = path
        try:
            self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by close() and remove()
        except OSError as error:
            raise LayoutOptError(f"cannot write the journal {path}: {error.strerror}") from error
        self.rows: dict[str, Row] = {}
        try:
            if not lock(self._file.fileno()):
                raise LayoutOptError(f"another sweep is writing this table and its journal {path}: choose another -o")
            good = 0 if fresh else self._read({"layoutopt sweep": FORMAT, "settings": dict(settings)})
        except LayoutOptError:
            self._file.close()
            raise
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._append({"layoutopt sweep": FORMAT, "settings": dict(settings)})

    def _read(self, head: Mapping[str, Any]) -> int:
        good = 0
        for number, line in enumerate(self._file):
            try:
                content = json.loads(line if line.endswith(b"\n") else b"")
                if number:
                    self.rows[content["key"]] = dict(content["row"])
            except (ValueError, TypeError, KeyError):
                break  # torn by a crash: what came before it is whole
            if not number and content != json.loads(json.dumps(head)):
                raise LayoutOptError(
                    f"{self.path} is of a sweep with other settings ({content.get('settings')}): give --fresh to "
                    "begin anew, or another -o"
                )
            good += len(line)
        return good

    def add(self, key: str, row: Row) -> None:
        """A row has ended."""
        self.rows[key] = row
        self._append({"key": key, "row": row})

    def close(self) -> None:
        """Keep it."""
        self._file.close()

    def remove(self) -> None:
        """The table is written: nothing is to be taken up again."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
