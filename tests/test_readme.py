"""What README.md and docs/ say can be done: command lines parse, the Python example runs, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from kernels.runtime import pick
from layoutopt.cli import app, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """Every `layoutopt …` in a shell block, an indented line, a table or between backticks, with its file."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
        lines += re.findall(r"`(layoutopt [^`]*)`", text)
        lines += re.findall(r"^    (layoutopt .*)$", text, re.MULTILINE)
        found += [line for line in lines if line.startswith("layoutopt ")]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    group = get_command(app)
    while words[0].startswith("-") and words[1:]:  # options before the command
        takes_value = words[0] in ("--config", "--log-file")
        assert takes_value or words[0] in ("-v", "-vv", "-q"), f"no option {words[0]}"
        words = words[1 + takes_value :]
    if words == ["--version"]:
        return
    assert words[0] in group.commands, f"no command {words[0]}"
    command = group.commands[words[0]]
    while hasattr(command, "commands") and words[1:]:
        words = words[1:]
        assert words[0] in command.commands, f"no command {words[0]}"
        command = command.commands[words[0]]
    if words[1:] or words[0] in ("devices", "demo", "calibrate"):
        command.make_context(words[0], words[1:])  # raises on an unknown option, a bad value, a missing argument


def test_there_are_command_lines() -> None:
    lines = command_lines()
    assert len(lines) > 12
    commands = ("devices", "capture", "calibrate", "plan", "simulate", "profile", "compare", "train", "demo")
    assert {line.split()[1] for line in lines} >= set(commands)


def test_the_parser_of_command_lines_refuses_what_does_not_exist() -> None:
    for line in ("layoutopt nonsense", "layoutopt plan x --nonsense", "layoutopt train minilm"):
        with pytest.raises(BaseException, match=r"nonsense|[Mm]issing"):
            test_command_lines_parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path in re.findall(r"`((?:layoutopt|kernels|costmodel|simulator|tests|docs|benchmarks)/[\w./*{}-]*)`", text):
        assert list(ROOT.glob(re.sub(r"\{.*?\}", "*", path))), path


@pytest.mark.device  # the one that a user gets
def test_the_tutorials_python_example_runs(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'demo'")
    from costmodel import device as device_models
    from layoutopt.models import calibrated_path, shipped

    (example,) = blocks((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "python")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    info = pick()
    # A stored calibration, so that none is made: the generic CPU's facts under this device's name.
    generic = device_models.load("generic-cpu")
    model = replace(
        generic, name=info.name, driver=info.driver, limits=info.limits, graphs=(shipped("vit-digits").hash,)
    )
    path = calibrated_path(info)
    path.parent.mkdir(parents=True)
    device_models.save(model, path)
    values: dict[str, object] = {}
    exec(compile(example, "tutorial.md", "exec"), values)
    assert values["model"] == model
    losses = values["history"].losses  # type: ignore[attr-defined]
    assert len(losses) == 23
    assert losses[-1] < losses[0]
    assert "relayouts" in capsys.readouterr().out


@pytest.mark.device  # the one that a user gets
def test_the_readmes_python_example_runs(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    (example,) = blocks(README, "python")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8, 3)

        def forward(self, x, labels):
            return torch.nn.functional.cross_entropy(self.body(x), labels)

    model, batch = Model(), {"x": torch.randn(16, 8), "labels": torch.arange(16) % 3}
    start = {name: x.clone() for name, x in model.state_dict().items()}
    example = example.replace('memory="1GiB"', 'memory="1GiB", calibration_s=0')  # nothing is measured
    exec(compile(example, "README.md", "exec"), {"model": model, "batch": batch, "batches": [batch] * 3})
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert all(not torch.equal(x, start[name]) for name, x in model.state_dict().items())


def test_devices_as_in_the_readme(capsys) -> None:
    assert main(["devices"]) == 0
    shipped = "adreno-640, adreno-730, adreno-740, adreno-830, generic-cpu, immortalis-g925, mali-g715, mali-g78"
    assert f"device models that ship: {shipped}" in capsys.readouterr().out
