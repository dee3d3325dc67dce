"""Shell completion: asked as bash, zsh and fish ask, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layoutopt import complete
from layoutopt.models import shipped_names

ROOT = Path(complete.__file__).resolve().parent.parent
PROGRAM = "import sys; sys.argv[0] = 'layoutopt'; from layoutopt.cli import run; run()"
HEAVY = ("pyopencl", "torch", "numba", "scipy", "ortools", "matplotlib", "networkx")


def asked(shell: str, line: str, code: str = PROGRAM, cwd: Path = ROOT) -> str:
    """What the program answers to a shell for a line that ends where the cursor is."""
    words = line.split(" ")
    how = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = {**os.environ, **how, "_LAYOUTOPT_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def offered(line: str, cwd: Path = ROOT) -> list[str]:
    return asked("bash", line, cwd=cwd).split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("layoutopt pro", ["profile"]),
        ("layoutopt side se", ["serve"]),
        ("layoutopt plan vit-digits --device-model adreno-7", ["adreno-730", "adreno-740"]),
        ("layoutopt plan vit-digits --strategy ma", ["majority"]),
        ("layoutopt train vit-digits --storage fp", ["fp32", "fp16"]),
        ("layoutopt capture minilm --mode lo", ["lora"]),
        ("layoutopt plan vit-d", ["vit-digits"]),
        ("layoutopt doctor --qu", ["--quick"]),
    ],
)
def test_bash_is_offered_names(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_files_are_offered_beside_names(tmp_path: Path) -> None:
    for name in ("vit-own.graph", "vit-notes.txt", "vit-model.toml"):
        (tmp_path / name).write_text("")
    (tmp_path / "vit-folder").mkdir()
    (tmp_path / "vit-folder" / "inner.graph").write_text("")
    assert offered("layoutopt plan vit-", tmp_path) == [
        *[name for name in shipped_names() if name.startswith("vit-")],
        *("vit-folder/", "vit-own.graph"),
    ]
    assert offered("layoutopt plan vit-folder/", tmp_path) == ["vit-folder/inner.graph"]
    assert offered("layoutopt plan x --device-model vit-", tmp_path) == ["vit-folder/", "vit-model.toml"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    assert "adreno-740" in asked(shell, "layoutopt plan vit-digits --device-model adreno-7")
    assert "adreno-640" not in asked(shell, "layoutopt plan vit-digits --device-model adreno-7")


def test_an_answer_imports_little() -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print(*(m for m in {HEAVY!r} if m in sys.modules), file=sys.stdout))
{PROGRAM}
"""
    assert asked("bash", "layoutopt plan vit-digits --strategy ma", code).split() == ["majority"]


def test_the_script_for_bash_completes(tmp_path: Path) -> None:
    """The script that --show-completion prints, sourced by a real bash, with the program as the command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    program = tmp_path / "layoutopt"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    script = subprocess.run(
        [str(program)],
        env={**environment, "_LAYOUTOPT_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "complete -o default -F" in script
    (tmp_path / "completion.sh").write_text(script)
    ask = """
source completion.sh
COMP_WORDS=(layoutopt plan vit-digits --device-model mali-g7)
COMP_CWORD=4
_layoutopt_completion layoutopt
echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        [bash, "--norc", "-c", ask], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["mali-g715", "mali-g78"], done.stderr


# ---- the names are the true ones ------------------------------------------------------------------------------------


def test_names_are_those_that_commands_take() -> None:
    from costmodel.device import list_builtin
    from layoutopt.planner import STRATEGIES
    from layoutopt.rewrites import STORAGES

    assert complete.strategies("") == list(STRATEGIES)
    assert complete.storages("") == list(STORAGES)
    assert set(list_builtin()) <= set(complete.device_models(""))
    assert set(shipped_names()) <= set(complete.graphs(""))


def test_models_and_modes_are_the_zoos() -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from layoutopt.modes import MODES
    from layoutopt.zoo_models import ZOO

    assert complete.modes("") == list(MODES)
    names = {name for name in complete.models("") if not name.endswith(("/", ".onnx"))}
    assert set(shipped_names()) == names <= set(ZOO)
