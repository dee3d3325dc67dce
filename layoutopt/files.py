"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from layoutopt.errors import LayoutOptError

__all__ = ["check_folder", "check_target", "lock", "sync_folder", "write_atomic"]


def check_target(path: str | os.PathLike[str]) -> None:
    """See that a file can be written at ``path``, before the work that makes its content.

    Raises:
        LayoutOptError: its directory does not exist, or ``path`` is a directory.
    """
    target = Path(path)
    if target.is_dir():
        raise LayoutOptError(f"cannot write {target}: it is a directory (give a file name in it)")
    if not target.parent.is_dir():
        raise LayoutOptError(f"cannot write {target}: {target.parent} is no directory (choose a directory that exists)")
    if not os.access(target.parent, os.W_OK):
        raise LayoutOptError(f"cannot write {target}: no permission to write in {target.parent} (choose another)")


def check_folder(path: str | os.PathLike[str]) -> None:
    """See that ``path`` is a directory or that one can be made there, before the work that fills it.

    Raises:
        LayoutOptError: a file is in the way, or there is no permission.
    """
    folder = Path(path).absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        raise LayoutOptError(f"cannot make the directory {path}: {existing} is a file (choose another name)")
    if not os.access(existing, os.W_OK):
        raise LayoutOptError(f"cannot write to {path}: no permission to write in {existing} (choose another)")


def write_atomic(path: str | os.PathLike[str], data: bytes | str, *, sync: bool = False) -> None:
    """Write ``data`` beside ``path`` and rename it into place.

    Args:
        path: the file.
        data: its content.
        sync: whether to come back only when it would survive a loss of power.

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
            if sync:
                handle.flush()
                os.fsync(handle.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
        if sync:
            sync_folder(target.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """See that names made or removed in a directory would survive a loss of power, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # systems that open no directories
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def lock(descriptor: int) -> bool:
    """Take an open file for this process alone, until it is closed; False where another process has it.

    Systems without such locks trust that nobody has.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
