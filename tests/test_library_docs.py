"""Every Python block of docs/library.md runs, in order, as a reader would run them; what it says is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from tests.face import own_folder
from tests.test_readme import blocks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "library.md"
BLOCKS = blocks(PAGE.read_text(encoding="utf-8"), "python")


@pytest.mark.peer
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With generic constants where a reader would wait for a calibration."""
    pytest.importorskip("tensorboardX", reason="needs the extra 'tensorboard'")
    from layoutopt.models import uncalibrated

    work = own_folder(tmp_path, monkeypatch)
    monkeypatch.setattr("layoutopt.tuning.calibrate_to", lambda path, runtime, graphs, **_: uncalibrated(runtime))
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 3
    for number, block in enumerate(BLOCKS):
        exec(builtin_compile(block, f"{PAGE.name}, block {number + 1}"), names)
    printed = capsys.readouterr().out
    assert "HEURISTIC" in printed
    assert "rowmajor" in printed
    assert "eval_loss" in printed
    assert names["last"] < names["first"] / 2
    assert names["result"].global_step == 4
    assert {path.name for path in (work / "run").iterdir()} == {"checkpoint-3", "checkpoint-4", "log.csv", "runs"}
    assert (work / "bert.json").is_file()


def builtin_compile(source: str, where: str) -> Any:
    return compile(source, where, "exec")


def test_the_page_names_every_verb_and_what_it_says_of_names_is_so() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for verb in ("capture", "calibrate", "plan", "simulate", "compare", "train", "compile", "Trainer"):
        assert verb in layoutopt.__all__
        assert f"`{verb}" in text or f"layoutopt.{verb}(" in text
    for method in re.findall(r"`Compiled\.(\w+)", text):
        assert hasattr(layoutopt.Compiled, method)
    from layoutopt.deprecation import MOVED

    assert ("nothing, as of 0.1" in text) == (not MOVED)
