"""The journal of a calibration: torn, damaged, foreign, too large; and real calibrations that are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_costmodel_calibrate import small_graph

from costmodel import device, journal
from costmodel.journal import MOST_DEATHS, Entry, Journal, journal_file
from costmodel.rounds import Round
from layoutopt.errors import LayoutOptError
from layoutopt.graphfile import save

QUESTION = {"device": ["p", "d"], "seed": 0}
FACTS = device.load("generic-cpu")


def entry(i: int) -> Entry:
    return Entry(f"outer.n(mr={i})", f"contraction [1,{i},3]", (1.0, float(i)))


def written(path: Path, rounds: int = 3) -> None:
    """A journal with facts, two kernels, and rounds over both."""
    own = Journal(path, QUESTION)
    own.facts(FACTS, 1.5)
    own.trying(["a", "b"])
    own.kernel("a", entry(1))
    own.kernel("b", entry(2))
    own.trying([])
    for i in range(rounds):
        own.round(Round(2.0 + i, {"a": 100 + i, "b": 200 + i}, {"compute": 50 + i}, session=0))
    own.refused("kernel c: no")
    own.close()


def kept_in(path: Path, question: dict[str, object] = QUESTION) -> journal.Kept:
    own = Journal(path, question)
    own.close()
    return own.kept


def test_what_is_written_is_read(tmp_path: Path):
    path = journal_file(tmp_path / "new", QUESTION)
    written(path)
    kept = kept_in(path)
    assert kept.facts is not None
    assert kept.facts.hash == FACTS.hash
    assert kept.entries == {"a": entry(1), "b": entry(2)}
    assert kept.rounds == [
        Round(2.0 + i, {"a": 100 + i, "b": 200 + i}, {"compute": 50 + i}, session=0) for i in range(3)
    ]
    assert kept.refused == ["kernel c: no"]
    assert (kept.spent_s, kept.sessions, kept.deadly) == (4.0, 2, frozenset())


def test_every_torn_end_is_cut_off_and_written_over(tmp_path: Path):
    """Cut anywhere, what whole lines say is there, and a new round follows them."""
    path = tmp_path / "j.jsonl"
    written(path)
    content = path.read_bytes()
    begin = content.index(b'{"anchors"')
    for length in [*range(begin, len(content), 7), 0, 1, 20]:
        path.write_bytes(content[:length])
        whole_ = content[:length].count(b"\n")
        own = Journal(path, QUESTION)
        before = len(own.kept.rounds)
        assert before == min(max(whole_ - 7, 0), 3)
        own.kernel("a", entry(1))
        own.round(Round(9.0, {"a": 7}, {}, session=1))
        own.close()
        again = kept_in(path)
        assert len(again.rounds) == before + 1
        assert again.rounds[-1].times_ns == {"a": 7}


@pytest.mark.parametrize(
    "damage", [b"\x00" * 512, b"{}\n", b'{"round":[[99,1]],"anchors":{},"session":0}\n', b"\xff\n"]
)
def test_a_damaged_line_ends_what_is_taken_up(damage: bytes, tmp_path: Path):
    path = tmp_path / "j.jsonl"
    written(path)
    with path.open("ab") as file:
        file.write(damage + b'{"refused":"after it"}\n')
    assert kept_in(path).refused == ["kernel c: no"]


def test_another_question_or_a_fresh_start_takes_up_nothing(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    written(path)
    assert kept_in(path, {**QUESTION, "seed": 1}).rounds == []
    written(path)
    own = Journal(path, QUESTION, fresh=True)
    assert (own.kept.rounds, own.kept.spent_s) == ([], 0.0)
    own.close()
    assert kept_in(path).rounds == []
    assert journal_file(tmp_path, QUESTION) != journal_file(tmp_path, {**QUESTION, "seed": 1})


def test_a_file_that_is_no_journal_is_replaced(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"something else\n" * 9)
    written(path)
    assert len(kept_in(path).rounds) == 3


def test_one_process_writes_at_a_time(tmp_path: Path):
    pytest.importorskip("fcntl")
    path = tmp_path / "j.jsonl"
    own = Journal(path, QUESTION)
    with pytest.raises(LayoutOptError, match="another process is at the same calibration"):
        Journal(path, QUESTION)
    own.remove()
    assert not path.exists()
    Journal(path, QUESTION).remove()


def test_a_kernel_that_no_process_survives_is_left_out(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    for attempt in range(MOST_DEATHS + 1):
        own = Journal(path, QUESTION)
        assert own.kept.deadly == (frozenset("xy") if attempt >= MOST_DEATHS else frozenset())
        own.trying(["x", "y"])
        own._file.close()  # the process dies here
    own = Journal(path, QUESTION)
    own.trying(["z"])
    own.close()  # Ctrl-C is no death
    own = Journal(path, QUESTION)
    assert own.kept.deaths["z"] == 0
    own.close()


def test_it_grows_no_further_than_allowed_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = tmp_path / "old.jsonl"
    old.write_text("{}\n")
    os.utime(old, (1.0, 1.0))
    path = tmp_path / "j.jsonl"
    monkeypatch.setattr(journal, "MOST_BYTES", 2000)
    written(path, rounds=500)
    assert not old.exists()
    assert path.stat().st_size < 2000 + 1000 + len(device.dumps(FACTS))
    assert kept_in(path).entries.keys() <= {"a", "b"}, "what is there is whole"


# ---- real interruptions --------------------------------------------------------------------------------------------


class Command:
    """``layoutopt calibrate`` in a process of its own, with folders of its own."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder, self.model = folder, folder / "model.toml"
        save(small_graph(), folder / "small.graph")
        self.line = [sys.executable, "-m", "layoutopt", "calibrate", "--graph", str(folder / "small.graph")]
        self.line += ["--device", str(index), "--budget", "8", "-o", str(self.model)]
        self.env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}

    def journals(self) -> list[Path]:
        return sorted((self.folder / "cache" / "layoutopt" / "calibrations").glob("*"))

    def rounds(self) -> int:
        return sum(path.read_bytes().count(b'"round":') for path in self.journals())

    def until(self, there: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
        """Started, and sent a signal once something is there; exit code and what it said."""
        with subprocess.Popen(
            self.line, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            while not there() and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
            return process.returncode, said

    def whole(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.line, *more], env=self.env, capture_output=True, text=True, timeout=240, check=False
        )


def test_interrupted_calibrations_lose_nothing_and_go_on(device_index: int, tmp_path: Path):
    """Ctrl-C before anything is measured, then a crash, SIGTERM and Ctrl-C in the middle, then to the end."""
    command = Command(tmp_path, device_index)
    code, said = command.until(lambda: bool(command.journals()), signal.SIGINT)
    assert code == 130
    assert said == "layoutopt: interrupted; no device model was written, and there is no measurement to keep\n"

    seen = 0
    for number, expected in [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)]:
        code, said = command.until(lambda: command.rounds() >= seen + 2, number)  # noqa: B023 - called at once
        assert code == expected
        assert not command.model.exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "small.graph"], "nothing half-written"
        (path,) = command.journals()
        assert command.rounds() >= seen + 2, "rounds of before are still there"
        seen = command.rounds()
        if expected == 130:
            # PoCL's compiler, interrupted itself, may say so in a line of its own.
            first, last = (line for line in said.splitlines() if line != "1 error generated.")
            assert first.startswith("layoutopt: going on with an interrupted calibration: ")
            assert last.startswith("layoutopt: interrupted; no device model was written, but the ")
            assert last.endswith("the same command goes on from there")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    measured = [line["kernel"] for line in lines if "kernel" in line]
    timed = {measured[number] for line in lines if "round" in line for number, _ in line["round"]}
    assert timed

    done = command.whole()
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"layoutopt: going on with an interrupted calibration: {len(timed)} kernels were")
    assert "kernels known tightly: " in done.stdout
    assert "drift of the device's speed: " in done.stdout
    model = device.load(command.model)
    assert timed <= set(model.measurements)
    first = [dict(map(tuple, line["round"])) for line in lines if "round" in line]
    for number, key in enumerate(measured):
        before = [own[number] for own in first if number in own]
        assert list(model.measurements[key].rounds_ns[: len(before)]) == before if key in timed else True
    assert command.journals() == [], "nothing is left to take up"


def test_fresh_leaves_out_what_was_measured(device_index: int, tmp_path: Path):
    command = Command(tmp_path, device_index)
    code, _ = command.until(lambda: command.rounds() >= 2, signal.SIGKILL)
    assert code == -9
    done = command.whole("--fresh")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert command.journals() == []
