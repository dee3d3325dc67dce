"""Where a run's numbers go: a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic

__all__ = ["CsvLog", "Logs", "TensorBoardLog"]

_FIRST = ("step", "epoch")


class CsvLog:
    """``log.csv``: a row a log, a column a number. A line is on disk when it is logged; a number that was not there
    before makes the file anew with another column.
    """

    def __init__(self, file: Path, history: Sequence[Mapping[str, float]]) -> None:
        self._file, self._rows, self._columns = file, [dict(row) for row in history], list(_FIRST)
        self._rewrite()

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row."""
        self._rows.append(dict(row))
        if any(name not in self._columns for name in row):
            self._rewrite()
            return
        with self._file.open("a", newline="", encoding="utf-8") as handle:
            csv.DictWriter(handle, self._columns).writerow(row)

    def _rewrite(self) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in self._rows for name in row)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomic(self._file, text.getvalue())

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardLog:
    """Event files for TensorBoard, in ``runs``."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise LayoutOptError(
                "report_to='tensorboard' needs tensorboardX: pip install 'layoutopt[tensorboard]'"
            ) from error
        # What a stopped run logged after the checkpoint that is resumed is hidden.
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def log(self, row: Mapping[str, float]) -> None:
        """Write a row's numbers: those of an evaluation under "eval/", others under "train/"."""
        for name, value in row.items():
            if name != "step":
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                self._writer.add_scalar(tag, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class Logs:
    """All that a run reports to.

    Args:
        folder: of the run; None reports nowhere.
        names: "csv", "tensorboard".
        history: rows logged before the checkpoint that is resumed.
        first_step: of that checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        names: Sequence[str],
        history: Sequence[Mapping[str, float]],
        first_step: int,
    ) -> None:
        self._logs: list[CsvLog | TensorBoardLog] = []
        if folder is None:
            return
        if "tensorboard" in names:
            self._logs.append(TensorBoardLog(Path(folder) / "runs", first_step))
        if "csv" in names:
            self._logs.append(CsvLog(Path(folder) / "log.csv", history))

    def log(self, row: Mapping[str, float]) -> None:
        """Report a row."""
        for log in self._logs:
            log.log(row)

    def close(self) -> None:
        """Finish all files."""
        for log in self._logs:
            log.close()
