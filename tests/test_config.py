"""Defaults from TOML files: which counts, what is refused, and what `layoutopt config` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from layoutopt import config, graphfile
from layoutopt.cli import app, main
from layoutopt.errors import LayoutOptError
from layoutopt.passes import run_passes
from tests.graphs import linear_step


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without files, and a user without any."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in ("LAYOUTOPT_CONFIG", "LAYOUTOPT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def user(text: str) -> Path:
    import platformdirs

    file = platformdirs.user_config_path("layoutopt") / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def values(given: Path | None = None) -> dict[str, object]:
    return {f"{' '.join(s.command)}.{s.key}": s.value for s in config.in_force(app, given)}


def refusal(text: str) -> str:
    Path("layoutopt.toml").write_text(text)
    with pytest.raises(LayoutOptError) as caught:
        config.in_force(app)
    return str(caught.value)


# ---- which file counts ----------------------------------------------------------------------------------------------


def test_no_file_sets_nothing() -> None:
    assert values() == {}


def test_the_working_folder_counts_more_than_the_user() -> None:
    user("[plan]\nmemory = '1GiB'\nstrategy = 'greedy'\n")
    Path("layoutopt.toml").write_text("[plan]\nmemory = '2GiB'\n")
    assert values() == {"plan.memory": "2GiB", "plan.strategy": "greedy"}


def test_a_project_file_serves_where_there_is_no_own() -> None:
    Path("pyproject.toml").write_text("[tool.layoutopt.plan]\nmemory = '3GiB'\n[tool.other]\nx = 1\n")
    assert values() == {"plan.memory": "3GiB"}
    Path("layoutopt.toml").write_text("[plan]\nstrategy = 'greedy'\n")
    assert values() == {"plan.strategy": "greedy"}


@pytest.mark.parametrize("text", ["[project]\nname = 'x'\n", "not TOML"])
def test_other_peoples_projects_do_no_harm(text: str) -> None:
    Path("pyproject.toml").write_text(text)
    assert values() == {}


def test_a_file_that_is_given_replaces_the_working_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("layoutopt.toml").write_text("[plan]\nmemory = '1GiB'\n")
    Path("a.toml").write_text("[plan]\nmemory = '2GiB'\n")
    Path("b.toml").write_text("[plan]\nmemory = '3GiB'\n")
    monkeypatch.setenv("LAYOUTOPT_CONFIG", "a.toml")
    assert values() == {"plan.memory": "2GiB"}
    assert values(Path("b.toml")) == {"plan.memory": "3GiB"}


def test_tables_count_more_than_what_stands_above_them() -> None:
    Path("layoutopt.toml").write_text(
        "strategy = 'greedy'\nverbose = 1\n[plan]\nstrategy = 'ilp'\n[side.serve]\nworkers = 3\n"
    )
    found = values()
    assert found["plan.strategy"] == "ilp"
    assert found["train.strategy"] == found["side device.strategy"] == "greedy"
    assert found["side serve.workers"] == 3
    assert found[".verbose"] == 1
    assert "capture.verbose" not in found  # another option of that name


def test_the_environments_device_counts_more_than_a_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("layoutopt.toml").write_text("device = 'one'\n[side.keys]\ndevice = ['phone', 'tablet']\n")
    assert values()["plan.device"] == "one"
    assert values()["side keys.device"] == ["phone", "tablet"]  # names of new devices, set by its own table alone
    monkeypatch.setenv("LAYOUTOPT_DEVICE", "two")
    assert values() == {"side keys.device": ["phone", "tablet"]}


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[plan]\nmemroy = '1GiB'\n", "table [plan]: layoutopt plan has no option 'memroy'; did you mean memory?"),
        ("[plam]\nmemory = '1GiB'\n", "table [plam]: there is no such command"),
        ("[side.serf]\nworkers = 1\n", "table [side]: layoutopt side has no option 'serf'; did you mean serve?"),
        ("nonsense = 1\n", "above the tables: no command has an option 'nonsense'"),
        ("[plan]\nmemory = 512\n", "table [plan]: memory is 512, expected text in quotes"),
        ("[plan]\ntime-limit = '3'\n", "table [plan]: time-limit is '3', expected a number"),
        ("[train]\nbatch = 2.5\n", "table [train]: batch is 2.5, expected a whole number"),
        ("[train]\nbatch = true\n", "table [train]: batch is True, expected a whole number"),
        ("[train]\nbatch = 0\n", "table [train]: batch is 0, expected at least 1"),
        ("[train]\nheld-out = 0.95\n", "table [train]: held-out is 0.95, expected at most 0.9"),
        ("[compare]\nmeasure = 'no'\n", "table [compare]: measure is 'no', expected true or false"),
        ("[calibrate]\ngraph = 'vit-digits'\n", "table [calibrate]: graph is 'vit-digits', expected a list"),
        ("[plan]\nmemory = 1979-05-27\n", "table [plan]: memory is datetime.date"),
        ("[plan\n", "layoutopt.toml is no TOML"),
        ("help = true\n", "no command has an option 'help'"),
    ],
)
def test_what_is_wrong_is_one_sentence(capsys, text: str, says: str) -> None:
    message = refusal(text)
    assert message.startswith("layoutopt.toml")
    assert says in message
    assert main(["config"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("layoutopt: error: layoutopt.toml")
    assert printed.err.count("\n") == 1


def test_a_file_that_is_not_there(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--config", "absent.toml", "config"]) == 2
    assert "absent.toml, which --config names" in capsys.readouterr().err
    monkeypatch.setenv("LAYOUTOPT_CONFIG", "gone.toml")
    assert main(["config"]) == 2
    assert "gone.toml, which LAYOUTOPT_CONFIG names" in capsys.readouterr().err


def test_a_project_whose_table_is_none(capsys) -> None:
    Path("pyproject.toml").write_text("[tool]\nlayoutopt = 3\n")
    assert main(["config"]) == 2
    assert "expected a table [tool.layoutopt]" in capsys.readouterr().err


# ---- what it does ---------------------------------------------------------------------------------------------------


def test_every_option_of_every_command_can_be_set() -> None:
    """The types of all are known, and click takes what they are set to."""
    commands = dict(config._commands(app))
    assert {("plan",), ("side", "device"), ()} <= set(commands)
    assert commands["compare",]["measure"].kind is bool
    for options in commands.values():
        for name, option in options.items():
            assert option.kind in config._WORDS, name


def test_a_command_takes_its_defaults_and_the_command_line_counts_most(capsys) -> None:
    graphfile.save(run_passes(linear_step())[0], "net.graph")
    Path("layoutopt.toml").write_text(
        "device-model = 'generic-cpu'\n[plan]\nstrategy = 'rowmajor'\noutput = 'p.json'\njson = true\n"
    )
    assert main(["plan", "net.graph"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["strategy"], answer["file"]) == ("rowmajor", "p.json")
    assert Path("p.json").is_file()
    assert main(["plan", "net.graph", "--strategy", "greedy"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "greedy"
    Path("layoutopt.toml").write_text("[plan]\nstrategy = 'no such strategy'\n")
    assert main(["plan", "net.graph", "--device-model", "generic-cpu", "-o", "p.json"]) == 2
    assert "no such strategy" in capsys.readouterr().err


def test_a_required_option_may_come_from_a_file() -> None:
    Path("layoutopt.toml").write_text("[advise]\ndevice-model = 'adreno-740'\nlink = '20Mbps'\n")
    command = typer.main.get_command(app)
    found = config.default_map(config.in_force(app))
    context = command.commands["advise"].make_context("advise", ["x"], default_map=found["advise"])  # type: ignore[attr-defined]
    assert context.params["link"] == "20Mbps"


def test_config_says_what_is_in_force_and_from_where(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out == "files: none\n"
    file = user("[plan]\nmemory = '1GiB'\n")
    Path("layoutopt.toml").write_text("[train]\nlr = 1\n")
    monkeypatch.setenv("LAYOUTOPT_DEVICE", "PoCL 3.1")
    assert main(["config", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["files"] == [str(file), "layoutopt.toml"]
    assert answer["environment"] == {"LAYOUTOPT_DEVICE": "PoCL 3.1"}
    assert answer["settings"] == [
        {"command": "plan", "key": "memory", "value": "1GiB", "file": str(file)},
        {"command": "train", "key": "lr", "value": 1, "file": "layoutopt.toml"},
    ]
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert "environment: LAYOUTOPT_DEVICE=PoCL 3.1" in text
    assert ["layoutopt", "plan", "--memory", "1GiB", str(file)] in [line.split() for line in text.splitlines()]
