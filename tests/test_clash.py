"""Another package named like one of ours is found before it does harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layoutopt import clash

ROOT = Path(clash.__file__).resolve().parent.parent
CHECK = """
import sys
from layoutopt import clash
from layoutopt.errors import LayoutOptError
try:
    clash.check()
except LayoutOptError as error:
    print(error)
assert not {"kernels", "costmodel", "simulator"} & set(sys.modules), "the check imported what it checks"
"""


def _run(*path: Path, code: str = CHECK) -> str:
    # -I: neither the current folder nor the environment decides what is found.
    setup = f"import sys\nsys.path[:0] = {[str(p) for p in path]!r}\n"
    done = subprocess.run([sys.executable, "-I", "-c", setup + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _fake(folder: Path, name: str, distribution: str = "") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    if distribution:
        info = folder / f"{distribution.replace('-', '_')}-9.8.7.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.8.7\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{info.name}/METADATA,,\n")
    return folder


def test_our_own_packages_pass() -> None:
    clash.check()
    assert _run(ROOT) == ""


@pytest.mark.parametrize("name", clash.PACKAGES)
def test_a_package_without_distribution_is_named_by_its_folder(tmp_path: Path, name: str) -> None:
    said = _run(_fake(tmp_path, name), ROOT)
    assert said.startswith(f"`import {name}` finds {tmp_path / name} (no installed distribution)")
    assert "make setup" in said
    assert "\n" not in said


@pytest.mark.parametrize(("name", "distribution"), [("kernels", "kernels"), ("simulator", "some-simulator")])
def test_the_distribution_that_clashes_is_named(tmp_path: Path, name: str, distribution: str) -> None:
    said = _run(_fake(tmp_path, name, distribution), ROOT)
    assert f"distribution '{distribution}' 9.8.7" in said


def test_a_clashing_package_behind_ours_does_no_harm(tmp_path: Path) -> None:
    assert _run(ROOT, _fake(tmp_path, "kernels", "kernels")) == ""


def test_a_single_module_clashes_too(tmp_path: Path) -> None:
    (tmp_path / "simulator.py").write_text("")
    assert "`import simulator` finds" in _run(tmp_path, ROOT)


def test_one_that_is_already_imported_counts(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    late = f"import kernels\nsys.path.remove({str(tmp_path)!r})\n" + CHECK.rsplit("assert", 1)[0]
    assert "`import kernels` finds" in _run(tmp_path, ROOT, code=late)


def test_a_missing_package_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "layoutopt").symlink_to(ROOT / "layoutopt")
    broken = CHECK.replace("clash.check()", "clash.PACKAGES = ('no_such_package_here',)\n    clash.check()")
    assert "no_such_package_here is missing" in _run(tmp_path, ROOT, code=broken)
