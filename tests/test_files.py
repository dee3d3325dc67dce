"""A file is the old one or the new one, never half of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic


def test_writes_text_and_bytes_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    write_atomic(target, "eins")
    write_atomic(target, b"zwei")
    assert target.read_bytes() == b"zwei"
    assert list(tmp_path.iterdir()) == [target]


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomic(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "graph"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_to_survive_a_loss_of_power_is_synced_before_and_after_its_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        seen.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*names: str) -> None:
        seen.append("replace")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomic(tmp_path / "a", "x", sync=True)
    write_atomic(tmp_path / "a", "y")
    assert seen == ["file", "replace", "folder", "replace"]


def test_a_missing_folder_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match=r"cannot write .*nowhere.*choose a directory that exists"):
        write_atomic(tmp_path / "nowhere" / "plan.json", "x")
