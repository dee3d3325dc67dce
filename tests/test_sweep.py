"""Sweeps: the same table whatever happens on the way; what has no plan is a row; bad arguments end nothing half way."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layoutopt import cli_sweep, graphfile, sweep_engines
from layoutopt.cli import main
from layoutopt.errors import LayoutOptError
from layoutopt.passes import run_passes
from layoutopt.sweep import COLUMNS, Cell, Sources, Task, matrix, refusal
from layoutopt.sweep_journal import SweepJournal, journal_path
from layoutopt.sweep_table import write_table
from tests.face import own_folder, refused
from tests.graphs import attention_step, linear_step

ROOT = Path(__file__).resolve().parent.parent
DEVICES = "generic-cpu,adreno-740,mali-g78"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = own_folder(tmp_path, monkeypatch)
    graphfile.save(run_passes(linear_step())[0], folder / "small.graph")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def command(output: str, *more: str) -> list[str]:
    strategies = "ilp,greedy,rowmajor,activation"
    return [
        "sweep", "small.graph", "--device-models", DEVICES, "--budgets", "none,64MiB,1B", "--strategies", strategies,
        "-o", output, *more,
    ]  # fmt: skip


def test_the_matrix_is_every_combination_once_in_one_order() -> None:
    cells = matrix(["b", "a"], ["x"], [None, "2GiB", "512MiB"], [8, 1, 8], ["greedy"])
    assert [(c.model, c.batch, c.memory) for c in cells] == [
        (model, batch, memory) for model in "ab" for batch in (1, 8) for memory in ("512MiB", "2GiB", None)
    ]
    assert matrix(["a", "b"], ["x"], ["512MiB", "2GiB", None], [1, 8], ["greedy"]) == cells


def test_the_table_is_the_same_on_any_number_of_workers(capsys, work: Path) -> None:
    assert main(command("one.csv", "--workers", "1", "--plans", "plans")) == 0
    assert main(command("two.csv", "--workers", "2")) == 0
    assert (work / "one.csv").read_bytes() == (work / "two.csv").read_bytes()
    table = rows(work / "one.csv")
    assert list(table[0]) == list(COLUMNS)
    assert len(table) == 3 * 3 * 4
    assert {row["status"] for row in table if row["memory"] == "1B"} == {"INFEASIBLE"}
    assert {row["status"] for row in table if row["strategy"] == "ilp" and row["memory"] != "1B"} == {"OPTIMAL"}
    assert len(list((work / "plans").glob("*.json"))) == 3 * 2 * 4
    assert not journal_path(work / "one.csv").exists()


def test_a_sweep_killed_half_way_goes_on_from_there(work: Path) -> None:
    assert main(command("whole.csv", "--workers", "1")) == 0
    journal = journal_path(work / "cut.csv")
    line = [sys.executable, "-m", "layoutopt", *command("cut.csv", "--workers", "2")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(line, env=env, stderr=subprocess.PIPE)
    while running.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 6):
        time.sleep(0.02)
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    kept = journal.read_bytes().count(b"\n") - 1
    assert 5 <= kept < 36
    with journal.open("ab") as file:
        file.write(b'{"key":"torn in the mid')
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert f"{kept} of 36 rows are kept" in done.stderr
    assert (work / "cut.csv").read_bytes() == (work / "whole.csv").read_bytes()


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(work: Path) -> None:
    journal = journal_path(work / "cut.csv")
    line = [sys.executable, "-m", "layoutopt", *command("cut.csv", "--workers", "2")]
    running = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    while running.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert journal.read_bytes().count(b"\n") >= 4
    assert not (work / "cut.csv").exists()


def test_what_cannot_be_planned_is_a_row(work: Path) -> None:
    (work / "torn.graph").write_bytes(b"nothing")
    models = ["small.graph", "torn.graph", "nonsense"]
    arguments = ["sweep", *models, "--device-models", "generic-cpu,nowhere", "--workers", "1", "-o", "t.csv"]
    assert main(arguments) == 0
    found = {(row["model"], row["device_model"]): row for row in rows(work / "t.csv")}
    assert len(found) == 6
    assert found.pop(("small.graph", "generic-cpu"))["status"] == "OPTIMAL"
    assert {row["status"] for row in found.values()} == {"ERROR"}
    assert "nowhere" in found["small.graph", "nowhere"]["message"]
    assert "nonsense" in found["nonsense", "generic-cpu"]["message"]


def test_rows_that_ended_at_the_time_limit_are_told(capsys) -> None:
    cell = Cell("m", "d", None, None, "ilp")
    cli_sweep._report([refusal(cell, "FEASIBLE", ""), refusal(cell, "OPTIMAL", "")], Path("t.csv"), True)
    assert "1 of 2 rows ended at the time limit" in capsys.readouterr().err
    cli_sweep._report([refusal(cell, "OPTIMAL", "")], Path("t.csv"), True)
    assert capsys.readouterr().err == ""


def test_a_graph_file_has_its_batch(work: Path) -> None:
    with pytest.raises(LayoutOptError, match="its batch is fixed"):
        Sources().graph("small.graph", 4)


def test_bad_arguments_are_refused_before_anything_runs(capsys, work: Path) -> None:
    base = ["sweep", "small.graph", "--device-models", "generic-cpu"]
    for more, word in (
        (["--budgets", "much"], "much"),
        (["--batches", "0"], "--batches"),
        (["--strategies", "nonsense"], "nonsense"),
        (["--engine", "cloud"], "cloud"),
        (["-o", "table.txt"], ".parquet"),
        (["--storage", "fp8"], "fp8"),
    ):
        assert word in refused(capsys, *base, *more)
    assert sorted(p.name for p in work.iterdir()) == ["small.graph"]


def test_a_journal_of_other_settings_is_refused_and_kept(work: Path) -> None:
    path = work / "t.csv.journal"
    first = SweepJournal(path, {"storage": "fp32"})
    first.add("k", {"status": "OPTIMAL"})
    with pytest.raises(LayoutOptError, match="another sweep is writing"):
        SweepJournal(path, {"storage": "fp32"})
    first.close()
    with pytest.raises(LayoutOptError, match="--fresh"):
        SweepJournal(path, {"storage": "fp16"})
    again = SweepJournal(path, {"storage": "fp32"})
    assert again.rows == {"k": {"status": "OPTIMAL"}}
    again.close()
    fresh = SweepJournal(path, {"storage": "fp16"}, fresh=True)
    assert fresh.rows == {}
    fresh.close()


def test_parquet_holds_what_csv_holds(work: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'parquet'")
    cell = Cell("m", "d", "2GiB", None, "ilp")
    table = [
        refusal(cell, "ERROR", "two\nlines"),
        refusal(cell, "OPTIMAL", "") | {"gap": 0.5, "ops": 3, "solve_s": 1.0},
    ]
    write_table(work / "t.parquet", table)
    write_table(work / "t.csv", table, times=True)
    read = parquet.read_table(work / "t.parquet").to_pylist()
    assert list(read[0]) == list(COLUMNS)
    text = rows(work / "t.csv")
    assert list(text[0]) == [*COLUMNS, "solve_s"]
    for row, line in zip(read, text, strict=True):
        assert {k: "" if v is None else str(v) for k, v in row.items()} == {k: line[k] for k in COLUMNS}


def test_parquet_without_pyarrow_is_refused(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    arguments = ("sweep", "small.graph", "--device-models", "generic-cpu", "-o", "t.parquet")
    assert "layoutopt[parquet]" in refused(capsys, *arguments)


def _deadly(task: Task) -> tuple[dict[str, object], bytes | None]:
    """In a worker's place: dies at one cell."""
    if task.cell.model == "deadly":
        os._exit(9)
    return refusal(task.cell, "OPTIMAL", ""), None


def test_a_worker_that_dies_takes_no_other_row_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_engines, "solve", _deadly)
    tasks = [
        Task(Cell(name, "d", None, None, "ilp"), b"", "", "fp32", 1.0, False) for name in ("a", "deadly", "b", "c")
    ]
    done = {position: row["status"] for position, row, _ in sweep_engines.local(tasks, 2)}
    assert done == {0: "OPTIMAL", 1: "DIED", 2: "OPTIMAL", 3: "OPTIMAL"}


@pytest.fixture
def cluster() -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")


@pytest.mark.usefixtures("cluster")
def test_ray_gives_the_same_table(work: Path) -> None:
    line = [sys.executable, "-m", "layoutopt"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for more in (("local.csv", "--workers", "2"), ("ray.csv", "--workers", "2", "--engine", "ray")):
        subprocess.run([*line, *command(*more)], env=env, check=True, capture_output=True, timeout=300)
    assert (work / "local.csv").read_bytes() == (work / "ray.csv").read_bytes()


def test_ray_that_is_missing_is_a_sentence(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ("sweep", "small.graph", "--device-models", "generic-cpu", "--engine", "ray", "-o", "t.csv")
    assert "layoutopt[ray]" in refused(capsys, *arguments)


def test_every_plan_is_the_same_on_one_worker_and_on_two(work: Path) -> None:
    """Two models, two device models, and budgets that ask for recomputation or micro-batches: byte for byte."""
    graphfile.save(run_passes(linear_step(5, 18, 35, 66, 17))[0], work / "linear.graph")
    graphfile.save(run_passes(attention_step(4, 24, 2, 8))[0], work / "attention.graph")
    for workers in ("1", "2"):
        words = [
            "sweep", "linear.graph", "attention.graph", "--device-models", "generic-cpu,mali-g78",
            "--budgets", "115000B,70000B",
            "-o", f"{workers}.csv", "--workers", workers, "--plans", f"plans{workers}",
        ]  # fmt: skip
        assert main(words) == 0
    assert (work / "1.csv").read_bytes() == (work / "2.csv").read_bytes()
    files = sorted(path.name for path in (work / "plans1").glob("*.json"))
    assert files == sorted(path.name for path in (work / "plans2").glob("*.json"))
    assert len(files) == 8
    for name in files:
        assert (work / "plans1" / name).read_bytes() == (work / "plans2" / name).read_bytes(), name
    planned = rows(work / "1.csv")
    assert {"anew", "micro"} <= {name.partition(":")[0] for row in planned for name in row["rewrites"].split()}
    for row in planned:
        # A plan is called proven only where its bound is met, recomputation and micro-batches included.
        assert (row["status"] == "OPTIMAL") == (row["bound_ns"] == row["objective_ns"])
