"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from layoutopt.errors import LayoutOptError

__all__ = ["write_atomic"]


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write ``data`` beside ``path`` and rename it into place.

    Raises:
        LayoutOptError: the directory does not exist or cannot be written.
    """
    target = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise LayoutOptError(f"cannot write {target}: {error.strerror} (choose a directory that exists)") from error
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(payload)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
