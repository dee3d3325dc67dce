"""Samples as arrays by name: an .npz file, or the handwritten digits."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from layoutopt.errors import LayoutOptError

__all__ = ["read_arrays"]


def read_arrays(data: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays that a graph takes.

    Args:
        data: "digits", or an .npz whose arrays are named as the graph's inputs.
        shapes: of one sample, by input.

    Returns:
        An array [n, …] per input.

    Raises:
        LayoutOptError: no such file, a missing array, another shape, or numbers that are not finite.
    """
    arrays = _digits() if data == "digits" else _npz(Path(data))
    missing = [name for name in shapes if name not in arrays]
    if missing:
        raise LayoutOptError(f"{data} lacks {', '.join(missing)}: it has {', '.join(arrays) or 'nothing'}")
    for name, shape in shapes.items():
        array = arrays[name]
        if not array.ndim or array.shape[1:] != shape:
            raise LayoutOptError(f"{data}: {name} has the shape {array.shape}, the graph takes samples of {shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise LayoutOptError(f"{data}: {name} holds NaN or infinity")
    return {name: arrays[name] for name in shapes}


def _digits() -> dict[str, np.ndarray]:
    from layoutopt import digits

    return digits.load().inputs


def _npz(file: Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise LayoutOptError(f"no data file at {file}: expected an .npz of graph inputs, or 'digits'")
    try:
        with file.open("rb") as handle:
            archive = np.load(handle, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array, not several by name")
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LayoutOptError(f"{file} is not an .npz of arrays ({error})") from error
