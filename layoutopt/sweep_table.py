"""A sweep's rows as one table file: CSV or Parquet, by the file's extension."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.sweep import COLUMNS, Row

__all__ = ["check_table", "write_table"]


def check_table(path: Path) -> None:
    """See that a table of this kind can be written, before the work that fills it.

    Raises:
        LayoutOptError: neither .csv nor .parquet, or what writes Parquet is missing.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise LayoutOptError(f"{path}: expected a file name that ends in .csv or .parquet")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 - whether it is there
        except ImportError as error:
            raise LayoutOptError(
                f"{path} needs pyarrow: pip install 'layoutopt[parquet]', or write a .csv file"
            ) from error


def write_table(path: Path, rows: Sequence[Row], times: bool = False) -> None:
    """Write the rows as they are ordered.

    Args:
        path: ends in .csv or .parquet.
        rows: by column name; what one lacks is empty.
        times: whether seconds of solving are a column too; they differ from run to run.
    """
    columns = COLUMNS | ({"solve_s": float} if times else {})
    write_atomic(path, _csv(columns, rows) if path.suffix == ".csv" else _parquet(columns, rows))


def _csv(columns: dict[str, type], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(columns: dict[str, type], rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    table = pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows], schema=schema)
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()
