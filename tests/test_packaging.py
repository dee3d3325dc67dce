"""The wheel and the sdist: they build, they hold what is needed, and the wheel works in a fresh environment.

What we depend on comes from the environment that runs the tests, by a path file; what only extras need cannot be
imported there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("layoutopt", "kernels", "costmodel", "simulator", "tests", "docs", "notebooks")
EXTRAS_ONLY = (
    "torch",
    "transformers",
    "diffusers",
    "peft",
    "onnx",
    "ray",
    "pyarrow",
    "grpc",
    "cryptography",
    "sklearn",
)
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {(*EXTRAS_ONLY, "matplotlib", "safetensors", "pytest")!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def done(*command: object, cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy of the sources; the wheel from the sdist, as an installer would."""
    pytest.importorskip("build", reason="needs the extra 'dev'")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for file in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "LICENSE", ROOT / "Makefile"):
        shutil.copy(file, source)
    done(sys.executable, "-m", "build", "--no-isolation", "-o", target, ".", cwd=source)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def test_an_index_would_take_them(built: tuple[Path, Path], tmp_path: Path) -> None:
    said = done(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built, cwd=tmp_path)
    assert said.count("PASSED") == 2


def test_they_hold_what_is_needed_and_no_more(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"layoutopt", "kernels", "costmodel", "simulator"}
    data = [*ROOT.glob("kernels/cl/*.cl"), *ROOT.glob("costmodel/devices/*.toml"), *ROOT.glob("layoutopt/data/*.graph")]
    assert len(data) > 30
    assert {str(file.relative_to(ROOT)) for file in data} <= names
    assert {f"{package}/py.typed" for package in PARTS[:1]} <= names
    assert not [name for name in names if "__pycache__" in name]
    with tarfile.open(sdist) as packed_source:
        kept = {name.partition("/")[2] for name in packed_source.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "layoutopt/cli.py", "tests/conftest.py"} <= kept


def test_what_they_say_of_themselves(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as packed:
        (file,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(packed.read(file).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (said["Name"], said["Version"], said["Requires-Python"]) == ("layoutopt", project["version"], ">=3.11")
    classifiers = said.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert set(said.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    needed = [line for line in said.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert len(needed) == len(project["dependencies"])


def test_the_wheel_works_without_extras(built: tuple[Path, Path], tmp_path: Path) -> None:
    from layoutopt import __version__

    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[0], cwd=tmp_path)
    packages = Path(sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})["purelib"])
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (packages / "sitecustomize.py").write_text(BLOCK)
    program = python.parent / "layoutopt"
    own = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    code = "import layoutopt, kernels, costmodel, simulator; print(layoutopt.__file__)"
    assert done(python, "-c", code, cwd=tmp_path).startswith(str(packages))
    refused = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "No module named 'torch'" in refused.stderr
    assert done(program, "--version", cwd=tmp_path) == f"layoutopt {__version__}\n"
    assert "--device-model" in done(program, "plan", "--help", cwd=tmp_path)
    words = ("plan", "vit-digits", "--device-model", "adreno-740", "--strategy", "greedy", "-o", "p.json", "--json")
    answer = json.loads(done(program, *words, cwd=tmp_path, **own))
    assert answer["status"] == "HEURISTIC"
    assert json.loads((tmp_path / "p.json").read_text())["graph_name"] == "vit-digits"
    absent = subprocess.run([program, "capture", "minilm"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert absent.returncode == 2
    assert "pip install 'layoutopt[torch]'" in absent.stderr
