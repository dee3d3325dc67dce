"""Logs: what is shown at which verbosity, what is kept in a file, and that results stay clean."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutopt import graphfile, logs, show
from layoutopt.cli import main
from layoutopt.passes import run_passes
from layoutopt.show import Progress, say
from tests.graphs import linear_step

PLAN = ("plan", "net.graph", "--device-model", "generic-cpu", "--strategy", "greedy", "-o", "p.json")
LOG = logging.getLogger("layoutopt.some.module")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    graphfile.save(run_passes(linear_step())[0], "net.graph")
    yield
    logs.close()


def shown(capsys, verbosity: int = 0, **how: object) -> list[str]:
    """Which of four levels come through."""
    logs.configure(verbosity, **how)  # type: ignore[arg-type]
    for level in ("debug", "info", "warning", "error"):
        getattr(LOG, level)("a line of %s", level)
    return [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]


def test_verbosity(capsys) -> None:
    assert shown(capsys) == ["warning", "error"]
    assert shown(capsys, 1) == ["info", "warning", "error"]
    assert shown(capsys, 2) == ["debug", "info", "warning", "error"]
    assert shown(capsys, quiet=True) == ["error"]
    logs.show_progress()
    LOG.info("not when quiet")
    assert capsys.readouterr().err == ""
    logs.configure()
    logs.show_progress()
    LOG.info("now")
    assert capsys.readouterr().err.endswith(" INFO now\n")


def test_nothing_stays_configured() -> None:
    before = list(logs.ROOT.handlers)
    assert main(["-v", "--log-file", "x.log", *PLAN]) == 0
    assert logs.ROOT.handlers == before
    assert not show.is_quiet()


def test_results_are_the_same_whatever_is_logged(capsys) -> None:
    answers = []
    for words in ((), ("-vv",), ("-q",), ("--log-file", "x.log")):
        assert main([*words, *PLAN, "--json"]) == 0
        printed = capsys.readouterr()
        answer = json.loads(printed.out)
        answers.append({key: value for key, value in answer.items() if key != "solve_s"})
        assert ("INFO planning" in printed.err) == (words == ("-vv",))
        assert words == ("-vv",) or not printed.err
    assert all(answer == answers[0] for answer in answers)


def test_a_file_keeps_what_goes_on_and_what_is_said(capsys) -> None:
    assert main(["--log-file", "x.log", *PLAN]) == 0
    assert main(["--log-file", "x.log", "plan", "absent.graph", "-o", "q.json"]) == 2
    text = Path("x.log").read_text(encoding="utf-8")
    assert "INFO layoutopt.show: planning: solving (greedy)" in text
    assert "ERROR layoutopt.said: error: no training graph at absent.graph" in text
    assert capsys.readouterr().err.count("layoutopt: error: no training graph") == 1


def test_quiet_leaves_out_what_is_said_but_not_errors(capsys) -> None:
    logs.configure(quiet=True)
    say("layoutopt: going on")
    assert capsys.readouterr().err == ""
    assert main(["-q", "plan", "absent.graph"]) == 2
    assert "absent.graph" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no/such/folder/x.log", "."])
def test_a_file_that_cannot_be_written(capsys, name: str) -> None:
    assert main(["--log-file", name, *PLAN]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not Path("p.json").exists()


def test_options_may_come_from_the_configuration(capsys) -> None:
    Path("layoutopt.toml").write_text("verbose = 1\nlog-file = 'kept.log'\n")
    assert main([*PLAN]) == 0
    assert "INFO planning" in capsys.readouterr().err
    assert Path("kept.log").is_file()
    Path("layoutopt.toml").write_text("quiet = true\n")
    assert main(["-v", *PLAN]) == 0  # the command line counts more
    assert "INFO planning" in capsys.readouterr().err


def test_stages_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "layoutopt")
    with Progress("working") as bar:
        for i in range(5):
            bar.fraction(f"part {i} of 5", i / 5)
        bar.stage("the end", 1, 1)
    with Progress("dreaming", endless=True):
        pass
    assert caplog.messages == ["working: part 0 of 5", "working: the end", "dreaming"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_bars_and_lines_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    show.console.cache_clear()
    logs.configure(1)
    with Progress("working", endless=True) as bar:
        bar.stage("the middle", 1, 2)
    logs.close()
    show.console.cache_clear()
    text = terminal.getvalue()
    assert "INFO" in text
    assert "the middle" in text
    assert "\x1b[" in text
