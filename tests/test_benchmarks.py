"""Every benchmark runs at a tiny size, untimed: a study that no longer starts is found before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text())


def test_there_are_benchmarks():
    assert {"gemm.py", "minilm.py", "step.py", "strategies.py"} <= set(SCRIPTS)


@pytest.mark.device
@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script, tmp_path):
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    home["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # of built kernels
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), "--smoke"],
        capture_output=True,
        text=True,
        timeout=1200,  # of a machine that does much else besides
        cwd=tmp_path,
        env={**os.environ, **home},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
