"""Trainings: exactly once, whatever happens in between, and bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from layoutopt.errors import LayoutOptError  # noqa: E402
from layoutopt.side.journal import Journal  # noqa: E402
from layoutopt.side.optimizer import Optimizer  # noqa: E402
from layoutopt.side.task import WINDOW_STEPS, Batch, Task  # noqa: E402
from layoutopt.side.trainer import Trainer, learning_rate  # noqa: E402
from layoutopt.side.weights import initial_weights, unpack  # noqa: E402
from tests.side_cases import TASK, batch_of, same, task_of  # noqa: E402

pytestmark = pytest.mark.peer
ROOT = Path(__file__).resolve().parent.parent
OPENED: list[Trainer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def _open(path: Path, task: Task = TASK, **options: Any) -> Trainer:
    OPENED.append(Trainer.open(path, task, **options))
    return OPENED[-1]


def _run(trainer: Trainer, last: int | None = None) -> dict[str, np.ndarray]:
    """Train to a step, and close."""
    while trainer.next_step < (trainer.task.steps if last is None else last):
        trainer.accept(batch_of(trainer.task, trainer.next_step))
        trainer.apply()
    weights = trainer.weights()
    trainer.close()
    return weights


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What :mod:`tests.side_crashes` found."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    command = [sys.executable, "-m", "tests.side_crashes", str(tmp_path_factory.mktemp("crashes"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("what", "least"), [("points", 50), ("moments", 5), ("full", 20)])
def test_weights_are_the_same_whatever_happens(crashes: dict[str, dict[str, Any]], what: str, least: int) -> None:
    assert crashes[what]["wrong"] == []
    assert crashes[what]["tried"] >= least


VARIANTS = [
    TASK,
    task_of(optimizer="sgd", schedule="cosine", tokens="all", pooling="mean", format="fp4"),
    task_of(mode="private", schedule="constant", pooler=True, format="float32", warmup=0),
]


@pytest.mark.parametrize("task", VARIANTS, ids=lambda t: f"{t.optimizer} {t.mode}")
def test_a_training_that_goes_on_is_one_that_was_not_interrupted(tmp_path: Path, task: Task) -> None:
    undisturbed = _run(_open(tmp_path / "a", task))
    assert not same(undisturbed, initial_weights(task))
    for last in (1, 4, 5, 12):  # closed (a checkpoint), or left (the journal)
        trainer = _open(tmp_path / "b", task, checkpoint_steps=3)
        weights = _run(trainer, last)
        assert trainer.applied == last
    assert same(weights, undisturbed)
    trainer = _open(tmp_path / "c", task, checkpoint_steps=100)
    for step in range(WINDOW_STEPS):
        trainer.accept(batch_of(task, step))
    trainer.apply()
    trainer.close(keep=False)
    trainer = _open(tmp_path / "c", task)
    assert (trainer.applied, trainer.next_step, trainer.waiting) == (WINDOW_STEPS, WINDOW_STEPS, 0)
    assert len(trainer.losses) == WINDOW_STEPS
    assert same(_run(trainer), undisturbed)


def test_the_process_own_number_of_threads_makes_no_difference(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    undisturbed = _run(_open(tmp_path / "a"))
    try:
        torch.set_num_threads(3)
        assert same(_run(_open(tmp_path / "b")), undisturbed)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_it_learns(tmp_path: Path) -> None:
    task = task_of(steps=150, lr=0.02, schedule="cosine")
    trainer = _open(tmp_path, task)
    losses = []
    for step in range(task.steps):
        trainer.accept(replace(batch_of(task, step % 10), step=step))
        losses.append(trainer.apply())
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) / 3
    assert trainer.loss == losses[-1]
    assert list(trainer.losses) == list(range(150 - 64, 150))
    weights = unpack(trainer.export())
    assert (weights.steps, weights.task) == (150, task)
    assert same(weights.values, trainer.weights())


def test_the_head_is_the_devices_at_the_start_and_only_then(tmp_path: Path) -> None:
    head = {"classifier.weight": np.ones((3, 20), np.float32)}
    trainer = _open(tmp_path, head=head)
    assert trainer.weights()["classifier.weight"].min() == 1
    trainer.close()
    assert _open(tmp_path).weights()["classifier.weight"].min() == 1
    with pytest.raises(LayoutOptError, match="the head has 'mix'"):
        _open(tmp_path / "other", head={"mix": np.ones(1, np.float32)})


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_optimizers_are_torchs_bit_by_bit(kind: str) -> None:
    task = task_of(optimizer=kind, weight_decay=0.1)
    rng = np.random.default_rng(0)
    start = {"matrix": rng.standard_normal((5, 3), np.float32), "bias": rng.standard_normal(4, np.float32)}
    ours = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in start.items()}
    theirs = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in start.items()}
    optimizer = Optimizer(task, ours)
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["bias"]], "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups) if kind == "adamw" else torch.optim.SGD(groups, lr=1, momentum=0.9)
    for step in range(6):
        for name, value in ours.items():
            value.grad = torch.tensor(rng.standard_normal(value.shape, np.float32))
            theirs[name].grad = value.grad.clone()
        for group in peer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step(step, 0.1 / (step + 1))
        peer.step()
        if step == 3:  # as a checkpoint does
            optimizer = Optimizer(task, ours, optimizer.state())
        assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_are_those_of_transformers(schedule: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    task = task_of(schedule=schedule, warmup=4, steps=20, lr=0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=task.lr)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    peer = transformers.get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        peer.step()
    # After the warm-up; theirs begins at 0, ours a step further.
    ours = [learning_rate(task, step) for step in range(20)]
    np.testing.assert_allclose(ours[4:], expected[4:], rtol=1e-12)
    np.testing.assert_allclose(ours[:4], [*expected[1:4], 0.5], rtol=1e-12)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_steps_are_taken_once_and_in_order(tmp_path: Path) -> None:
    trainer = _open(tmp_path)
    with pytest.raises(LayoutOptError, match="no accepted step waits"):
        trainer.apply()
    trainer.accept(batch_of(TASK, 0))
    for step in (0, 2):
        with pytest.raises(LayoutOptError, match=f"step {step} is not the next one: send step 1"):
            trainer.accept(batch_of(TASK, step))
    with pytest.raises(LayoutOptError, match="taken from the store before"):
        trainer.accept(Batch(1, (1, 2)))
    with pytest.raises(LayoutOptError, match="expected 1 to 4 samples"):
        trainer.accept(replace(batch_of(TASK, 1), samples=()))
    for step in range(1, WINDOW_STEPS):
        trainer.accept(batch_of(TASK, step))
    with pytest.raises(LayoutOptError, match=f"while {WINDOW_STEPS} steps wait"):
        trainer.accept(batch_of(TASK, WINDOW_STEPS))
    trainer.apply()
    trainer.accept(batch_of(TASK, WINDOW_STEPS))
    trainer.close()
    for call in (trainer.apply, trainer.checkpoint, lambda: trainer.accept(batch_of(TASK, 9))):
        with pytest.raises(LayoutOptError, match="was closed"):
            call()


def test_another_task_is_refused_and_one_process_at_a_time_trains(tmp_path: Path) -> None:
    trainer = _open(tmp_path)
    with pytest.raises(LayoutOptError, match="open in another process"):
        _open(tmp_path)
    trainer.close()
    with pytest.raises(LayoutOptError, match="a training with another lr is in"):
        _open(tmp_path, task_of(lr=0.1))
    with pytest.raises(LayoutOptError, match="cpu or cuda, got 'tpu'"):
        _open(tmp_path, device="tpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(LayoutOptError, match="cannot write the training"):
        _open(tmp_path / "file")


def test_a_loss_that_is_not_finite_ends_the_training_for_good(tmp_path: Path) -> None:
    task = task_of(lr=100.0, optimizer="sgd", format="float32", warmup=0, steps=100)
    trainer = _open(tmp_path, task, checkpoint_steps=2)

    def huge(step: int) -> Batch:
        batch = batch_of(task, step)
        taps = tuple(((w.view(np.float32) * np.float32(1e12)).view(np.int32), s) for w, s in batch.taps)
        return replace(batch, taps=taps)

    weights = {}

    def train() -> None:
        for step in range(task.steps):
            trainer.accept(huge(step))
            weights.update(trainer.weights())
            trainer.apply()

    with pytest.raises(LayoutOptError, match=r"not finite at step \d+: begin anew with a lower lr") as caught:
        train()
    assert same(trainer.weights(), weights)
    with pytest.raises(LayoutOptError, match="not finite"):
        trainer.accept(huge(trainer.next_step))
    trainer.close()
    trainer = _open(tmp_path, task)
    assert trainer.failure == str(caught.value)
    assert same(trainer.weights(), weights)
    with pytest.raises(LayoutOptError, match="not finite"):
        trainer.apply()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_journal_is_bounded(tmp_path: Path) -> None:
    task = task_of(steps=60)
    trainer = _open(tmp_path, task, checkpoint_steps=1000, journal_bytes=4 * task.batch_bytes)
    most = 0
    for step in range(task.steps):
        trainer.accept(batch_of(task, step))
        most = max(most, sum(p.stat().st_size for p in tmp_path.glob("journal.*")))
        if step % 3 == 2:
            while trainer.waiting:
                trainer.apply()
    assert most == pytest.approx(8 * task.batch_bytes, rel=0.5)
    assert len(list(tmp_path.glob("journal.*"))) <= 2
    assert trainer.journal_bytes == sum(p.stat().st_size for p in tmp_path.glob("journal.*"))


def test_where_no_checkpoint_can_be_written_accepting_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(steps=1000)
    trainer = _open(tmp_path, task, checkpoint_steps=5, journal_bytes=10 * task.batch_bytes)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("layoutopt.side.trainer.write_atomic", full)
    with pytest.raises(LayoutOptError, match="since no checkpoint can be written: wait"):
        _run(trainer)
    assert "No space left" in caplog.text
    reached = trainer.next_step
    monkeypatch.undo()
    trainer.checkpoint()
    assert trainer.journal_bytes == 0
    trainer.accept(batch_of(task, reached))


def test_a_journal_that_the_disk_damaged_goes_on_from_where_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = _run(_open(tmp_path / "a"))
    trainer = _open(tmp_path / "b", checkpoint_steps=100)
    for step in range(8):
        trainer.accept(batch_of(TASK, step))
    trainer.close()
    path = tmp_path / "b" / "journal.0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 30] ^= 4
    path.write_bytes(data)
    trainer = _open(tmp_path / "b")
    assert "journal.0 was damaged" in caplog.text
    assert trainer.next_step == 4
    assert same(_run(trainer), undisturbed)


def test_segments_after_a_damaged_one_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, TASK)
    for step in range(6):
        journal.append(batch_of(TASK, step))
        journal.cut(0)
    journal.close()
    path = tmp_path / "journal.2"
    path.write_bytes(path.read_bytes()[:-1])
    journal = Journal(tmp_path, TASK, 1)
    assert journal.next_step == 2
    assert [b.step for b in journal.read(1)] == [1]
    assert "batches from step 2 on are asked for again" in caplog.text
    journal.append(batch_of(TASK, 2))
    journal.close()
    journal = Journal(tmp_path, TASK, 0)
    assert [b.step for b in journal.read(0)] == [0, 1, 2]
    journal.close()


def test_a_journal_that_cannot_take_its_record_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, TASK)

    def failed(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failed)
    with pytest.raises(LayoutOptError, match=r"step 0 was not accepted.*Input/output error"):
        journal.append(batch_of(TASK, 0))
    monkeypatch.undo()
    with pytest.raises(LayoutOptError, match="closed, since its disk failed"):
        journal.append(batch_of(TASK, 0))
    journal.close()


@pytest.mark.parametrize("how", ["bit", "short", "other", "gone"])
def test_a_checkpoint_that_is_damaged_is_a_sentence(tmp_path: Path, how: str) -> None:
    _run(_open(tmp_path), 3)
    path = tmp_path / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    if how == "gone":
        path.unlink()
    else:
        other = _open(tmp_path / "x").export()
        path.write_bytes({"bit": bytes(data), "short": bytes(data[:-5]), "other": other}[how])
    said = {"bit": "is damaged", "short": "is damaged", "other": "is no checkpoint", "gone": "a journal but no"}[how]
    with pytest.raises(LayoutOptError, match=said):
        _open(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_training_is_its_owners_alone(tmp_path: Path) -> None:
    _open(tmp_path / "state" / "phone")
    assert (tmp_path / "state" / "phone").stat().st_mode & 0o777 == 0o700


def test_half_a_checkpoint_is_cleared_away(tmp_path: Path) -> None:
    _run(_open(tmp_path), 3)
    (tmp_path / ".checkpoint.safetensors.abc").write_bytes(b"half")
    assert _open(tmp_path).applied == 3
    assert not list(tmp_path.glob(".checkpoint*"))


# ---- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("task", VARIANTS, ids=lambda t: f"{t.optimizer} {t.mode}")
def test_a_gpu_trains_as_the_cpu_does_and_goes_on(tmp_path: Path, task: Task) -> None:
    expected = _run(_open(tmp_path / "cpu", task))
    whole = _run(_open(tmp_path / "a", task, device="cuda"))
    for last in (3, 12):
        parts = _run(_open(tmp_path / "b", task, device="cuda"), last)
    assert same(whole, parts)
    for name, value in expected.items():
        np.testing.assert_allclose(whole[name], value, rtol=2e-2, atol=2e-3, err_msg=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_a_gpu_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match="torch finds no CUDA GPU"):
        _open(tmp_path, device="cuda")
