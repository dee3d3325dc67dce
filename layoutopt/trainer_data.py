"""Batches for a Trainer: from a data set, a list, columns or any iterable of samples.

The order of samples depends on the seed and the pass alone, so that a resumed run sees what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from layoutopt.compiled_batch import as_arrays
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.train import Dataset

__all__ = ["Collator", "Samples", "collate"]

Collator = Callable[[list[Any]], Mapping[str, Any]]
_LABELS = ("label", "label_ids")
"""What data sets call the targets that models call "labels"."""


class _Columns(Sequence[dict[str, Any]]):
    """Arrays of one length by name, as samples."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise LayoutOptError(f"the columns of a data set must have one length; got {lengths}")
        self._columns = columns
        (self._length,) = set(lengths.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: values[index] for name, values in self._columns.items()}


class Samples:
    """Samples in batches.

    Args:
        data: a sequence of samples (``datasets.Dataset``, a torch data set, a list), an iterable of them, or arrays by
            name. A sample is a dict, or a tuple in the module's order.
        what: it is called in messages.

    Attributes:
        length: of a sequence; None for other iterables.
    """

    def __init__(self, data: Any, what: str) -> None:
        if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
            raise LayoutOptError(f"the {what} is a DataLoader: give its data set, batches are made here")
        if isinstance(data, Dataset):
            data = data.inputs
        if isinstance(data, Mapping):
            data = _Columns(data)
        indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if not indexed and not isinstance(data, Iterable):
            raise LayoutOptError(f"the {what} is a {type(data).__name__}: give samples, as dicts by input name")
        self._data, self.what = data, what
        self.length: int | None = len(data) if indexed else None
        if self.length == 0:
            raise LayoutOptError(f"the {what} holds no samples")

    def batches(
        self, size: int, *, order: np.random.Generator | None = None, drop_last: bool = False, skip: int = 0
    ) -> Iterator[list[Any]]:
        """Lists of up to ``size`` samples.

        Args:
            size: of a batch.
            order: shuffles a sequence; as it comes without.
            drop_last: leave out a last batch that is not full.
            skip: batches to leave out at the beginning.
        """
        rows: Iterator[Any]
        if self.length is None:
            rows = islice(iter(self._data), skip * size, None)
        else:
            chosen = np.arange(self.length) if order is None else order.permutation(self.length)
            rows = (self._data[int(i)] for i in chosen[skip * size :])
        while batch := list(islice(rows, size)):
            if len(batch) < size and drop_last:
                return
            yield batch

    def per_epoch(self, size: int, drop_last: bool) -> int | None:
        """Batches in a pass; None where nobody knows.

        Raises:
            LayoutOptError: there would be none.
        """
        if self.length is None:
            return None
        count = self.length // size if drop_last else -(-self.length // size)
        if not count:
            raise LayoutOptError(f"the {self.what} has {self.length} samples, not one batch of {size}")
        return count


def collate(rows: list[Any], names: Collection[str] | None, own: Collator | None = None) -> dict[str, np.ndarray]:
    """Samples as a batch of arrays by name.

    Args:
        rows: samples.
        names: entries of the batch; other columns are left out. None keeps all that are numbers.
        own: makes the batch instead, of the samples without other columns.

    Raises:
        GraphError: a column is missing, or its values have several shapes.
    """
    if not isinstance(rows[0], Mapping):
        entries = rows[0] if isinstance(rows[0], tuple | list) else (rows[0],)
        columns = [f"input_{i}" for i in range(len(entries))]
        rows = [dict(zip(columns, row if isinstance(row, tuple | list) else (row,), strict=True)) for row in rows]
    if own is not None:
        wanted = None if names is None else {*names, *_LABELS}
        kept = [
            {k: v for k, v in row.items() if (wanted is None and _is_number(v)) or k in (wanted or ())} for row in rows
        ]
        made = as_arrays(own(kept))
        return made if names is None else {name: made[name] for name in names if name in made}
    first = rows[0]
    if names is None:
        names = [
            "labels" if key in _LABELS and "labels" not in first else key for key in first if _is_number(first[key])
        ]
    return {name: _column(rows, name) for name in names}


def _column(rows: list[Mapping[str, Any]], name: str) -> np.ndarray:
    key = name
    if name not in rows[0] and name == "labels":
        key = next((other for other in _LABELS if other in rows[0]), name)
    values = []
    for row in rows:
        if key not in row:
            raise GraphError(
                f"a sample lacks {name!r}, which the step needs: it has {', '.join(map(str, row)) or 'none'}"
            )
        (array,) = as_arrays({name: row[key]}).values()
        values.append(array)
    shapes = {array.shape for array in values}
    if len(shapes) > 1:
        raise GraphError(
            f"samples of {name!r} have several shapes, {' and '.join(map(str, sorted(shapes)[:2]))}: pad them to one "
            "length (padding='max_length' of a tokenizer), or pass a data_collator"
        )
    return np.stack(values)


def _is_number(value: Any) -> bool:
    try:
        as_arrays({"": value})
    except GraphError:
        return False
    return True
