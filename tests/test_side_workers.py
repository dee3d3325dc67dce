"""Workers: trainings of many devices, none of which can harm another's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from layoutopt.errors import LayoutOptError  # noqa: E402
from layoutopt.side import trainer as trainer_module  # noqa: E402
from layoutopt.side.hosts import HostDiedError, Process  # noqa: E402
from layoutopt.side.task import Batch, Task  # noqa: E402
from layoutopt.side.trainings import Applied, Status  # noqa: E402
from layoutopt.side.weights import unpack  # noqa: E402
from layoutopt.side.workers import BusyError, Limits, MissingSamples, Workers  # noqa: E402
from tests.side_cases import TASK, batch_of, same, task_of  # noqa: E402

pytestmark = pytest.mark.peer
ROOT = Path(__file__).resolve().parent.parent
SMALL = Limits(checkpoint_steps=4, store_memory_bytes=10_000, store_disk_bytes=100_000)
EPOCHS = task_of(steps=9)
EPOCH = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
ORDERS = [EPOCH[0], EPOCH[1], EPOCH[2], (9, 0, 5, 2), (1, 8, 11, 4), (10, 3, 7, 6), (2, 4, 6, 8), (1, 3), (0, 5, 7, 9)]


def _expected(folder: Path, task: Task = TASK, seed: int = 0, orders: list[tuple[int, ...]] | None = None) -> dict:
    """Weights of a training that nothing disturbed, whose device sent everything."""
    trainer = trainer_module.Trainer.open(folder, task)
    for step in range(task.steps):
        trainer.accept(batch_of(task, step, orders[step] if orders else None, seed))
        trainer.apply()
    trainer.close()
    return trainer.weights()


def _weights(workers: Workers, device: str) -> dict[str, np.ndarray]:
    return unpack(workers.weights(device)).values


def _train(workers: Workers, device: str, task: Task = TASK, seed: int = 0, last: int | None = None) -> list[float]:
    """From where it is to a step, four steps ahead."""
    begin = workers.status(device).next_step
    futures = []
    for step in range(begin, task.steps if last is None else last):
        if len(futures) >= 4:
            futures[-4].result()
        workers.accept(device, batch_of(task, step, seed=seed))
        futures.append(workers.submit(device, step))
    return [future.result() for future in futures]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """Makes workers in this process."""
    made: list[Workers] = []

    def make(folder: str = "state", **options: Any) -> Workers:
        made.append(Workers(tmp_path / folder, **{"engine": "here", "limits": SMALL, **options}))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def test_trainings_of_many_devices_are_as_if_alone(here, tmp_path: Path) -> None:
    workers = here()
    for seed in range(3):
        status = workers.open(f"phone-{seed}", TASK)
        assert (status.next_step, status.applied, status.loss) == (0, 0, None)
    threads = [threading.Thread(target=_train, args=(workers, f"phone-{seed}", TASK, seed)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert same(_weights(workers, f"phone-{seed}"), _expected(tmp_path / f"alone-{seed}", seed=seed))
        assert workers.status(f"phone-{seed}").applied == TASK.steps


def test_a_training_goes_on_after_release_close_and_in_other_hands(here, tmp_path: Path) -> None:
    workers = here()
    workers.open("phone", TASK, {"classifier.bias": np.ones(3, np.float32)})
    first = _train(workers, "phone", last=5)
    workers.release("phone")
    with pytest.raises(LayoutOptError, match="no open training: open it first"):
        workers.status("phone")
    assert workers.open("phone", TASK).next_step == 5
    assert workers.open("phone", TASK).next_step == 5  # of another connection
    assert workers.submit("phone", 4).result() == first[4]
    workers.accept("phone", batch_of(TASK, 5))
    workers.close()
    with pytest.raises(LayoutOptError, match="closed"):
        workers.open("phone", TASK)
    workers = here()
    status = workers.open("phone", TASK)
    assert (status.next_step, status.applied) == (6, 6)
    _train(workers, "phone")
    trainer = trainer_module.Trainer.open(tmp_path / "alone", TASK, head={"classifier.bias": np.ones(3, np.float32)})
    for step in range(TASK.steps):
        trainer.accept(batch_of(TASK, step))
        trainer.apply()
    trainer.close()
    assert same(_weights(workers, "phone"), trainer.weights())


def test_later_epochs_come_from_the_store_bit_by_bit(here, tmp_path: Path) -> None:
    workers = here()
    workers.open("phone", EPOCHS)
    for step, samples in enumerate(ORDERS):
        stored = Batch(step, samples)
        workers.accept("phone", stored if step >= 3 else batch_of(EPOCHS, step, samples))
        if step % 4 == 3:
            workers.release("phone")
            workers.open("phone", EPOCHS)
    assert np.isfinite(workers.submit("phone", EPOCHS.steps - 1).result())
    assert workers.missing("phone", range(14)) == (12, 13)
    assert workers.status("phone").stored == 12
    assert same(_weights(workers, "phone"), _expected(tmp_path / "sent", EPOCHS, orders=ORDERS))


def test_what_the_store_had_no_room_for_is_sent_again(here, tmp_path: Path) -> None:
    room = replace(SMALL, store_memory_bytes=4 * EPOCHS.sample_bytes, store_disk_bytes=5 * (EPOCHS.sample_bytes + 40))
    workers = here(limits=room)
    workers.open("phone", EPOCHS)
    sent = []
    for step, samples in enumerate(ORDERS):
        lacked = workers.missing("phone", samples)
        if lacked:
            with pytest.raises(MissingSamples) as caught:
                workers.accept("phone", Batch(step, samples))
            assert caught.value.samples == lacked
            workers.accept("phone", Batch(step, samples), batch_of(EPOCHS, step, lacked))
        else:
            workers.accept("phone", Batch(step, samples))
        workers.submit("phone", step).result()
        sent.append(len(lacked))
    assert sent[:3] == [4, 4, 4]
    assert 0 < sum(sent[3:]) < sum(map(len, ORDERS[3:]))
    assert workers.status("phone").stored <= 9
    assert same(_weights(workers, "phone"), _expected(tmp_path / "sent", EPOCHS, orders=ORDERS))


def test_nothing_is_accepted_that_is_refused(here) -> None:
    workers = here()
    workers.open("phone", TASK)
    good = batch_of(TASK, 0)
    for batch, said in [
        (replace(good, targets=None), "targets are NoneType"),
        (replace(good, step=1), "send step 0"),
        (Batch(0, (1, 2)), "2 samples are not in the server's store"),
    ]:
        with pytest.raises(LayoutOptError, match=said):
            workers.accept("phone", batch)
    assert workers.status("phone") == Status(0, 0)
    for step in (0, -1):
        with pytest.raises(LayoutOptError, match=f"step {step} of phone does not wait"):
            workers.submit("phone", step)
    for device in ("", "../other", ".hidden", "a" * 65, "é", "a\n"):
        with pytest.raises(LayoutOptError, match="a device's id is 1 to 64"):
            workers.open(device, TASK)
    with pytest.raises(LayoutOptError, match="another rank: begin anew"):
        workers.open("phone", task_of(rank=3))
    workers.release("phone")
    with pytest.raises(LayoutOptError, match="another rank is in"):
        workers.open("phone", task_of(rank=3))
    with pytest.raises(LayoutOptError, match="open it first"):
        workers.accept("phone", good)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_training_begins_anew(here, is_open: bool) -> None:
    workers = here()
    workers.open("phone", TASK)
    _train(workers, "phone", last=6)
    if not is_open:
        workers.release("phone")
    other = task_of(rank=3)
    assert workers.open("phone", other, anew=True) == Status(0, 0)
    assert workers.missing("phone", (0, 1)) == (0, 1)
    assert len(_train(workers, "phone", other)) == 12


def test_a_training_that_fails_leaves_the_others(here, tmp_path: Path) -> None:
    workers = here(count=1)
    wild = task_of(lr=100.0, optimizer="sgd", format="float32", warmup=0, steps=100)
    workers.open("wild", wild)
    workers.open("calm", TASK)
    failed = []
    for step in range(TASK.steps):
        workers.accept("calm", batch_of(TASK, step))
        if not failed:
            batch = batch_of(wild, step)
            taps = tuple(((w.view(np.float32) * np.float32(1e12)).view(np.int32), s) for w, s in batch.taps)
            workers.accept("wild", replace(batch, taps=taps))
            future = workers.submit("wild", step)
            failed += [str(future.exception())] if future.exception() else []
        assert np.isfinite(workers.submit("calm", step).result())
    assert "not finite" in failed[0]
    assert "not finite" in workers.status("wild").failure
    assert np.isfinite(_weights(workers, "wild")["mix"]).all()
    assert same(_weights(workers, "calm"), _expected(tmp_path / "alone"))
    assert workers.open("wild", wild).failure == failed[0]
    assert workers.open("wild", wild, anew=True).failure == ""


def test_an_error_of_whatever_kind_unloads_one_training_whose_files_are_whole(
    here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = here(count=1)
    workers.open("odd", TASK)
    workers.open("calm", TASK)
    right = trainer_module.loss_of

    def wrong(task: Task, results: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
        if "odd" in armed:
            armed.remove("odd")
            raise MemoryError("no memory")
        return right(task, results, targets)

    armed: list[str] = []
    monkeypatch.setattr(trainer_module, "loss_of", wrong)
    _train(workers, "odd", last=3)
    armed.append("odd")
    workers.accept("odd", batch_of(TASK, 3))
    future = workers.submit("odd", 3)
    with pytest.raises(LayoutOptError, match=r"failed at step 3 \(MemoryError: no memory\): open it again"):
        future.result()
    with pytest.raises(LayoutOptError, match="failed at step 3"):
        workers.accept("odd", batch_of(TASK, 4))
    _train(workers, "calm")
    assert workers.open("odd", TASK).applied == 4
    _train(workers, "odd")
    for device in ("odd", "calm"):
        assert same(_weights(workers, device), _expected(tmp_path / f"alone-{device}"))


def test_trainings_are_placed_by_the_memory_they_need(here) -> None:
    need = TASK.training_bytes + SMALL.store_memory_bytes
    workers = here(count=2, limits=replace(SMALL, memory_bytes=2 * (2 * need + 10)))
    for device in "abcd":
        workers.open(device, TASK)
    with pytest.raises(BusyError, match=r"no worker has \d+ bytes to spare for the training of e"):
        workers.open("e", TASK)
    workers.release("b")
    with pytest.raises(LayoutOptError, match=r"of e needs \d+ bytes, and a worker has \d+: take a smaller task"):
        workers.open("e", task_of(width=200, pooler=True))
    assert workers.open("e", TASK).applied == 0
    _train(workers, "e")


def test_who_waits_for_a_loss_cannot_cancel_it(here) -> None:
    workers = here()
    workers.open("phone", TASK)
    workers.accept("phone", batch_of(TASK, 0))
    assert not workers.submit("phone", 0).cancel()
    assert len(_train(workers, "phone")) == 11


def test_what_is_heard_late_of_an_earlier_training_is_not_taken_for_the_new_ones(here) -> None:
    workers = here()
    workers.open("phone", TASK)
    workers.open("phone", TASK, anew=True)
    workers._applied(Applied("phone", 5, 0.5, number=0))
    workers._applied(Applied("phone", 5, None, "failed", number=0))
    with pytest.raises(LayoutOptError, match="step 5 of phone does not wait"):
        workers.submit("phone", 5)
    assert len(_train(workers, "phone")) == 12


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for options, said in [({"engine": "threads"}, "got the engine 'threads'"), ({"count": 0}, "at least one worker")]:
        with pytest.raises(LayoutOptError, match=said):
            Workers(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(LayoutOptError, match="is a file"):
        Workers(tmp_path / "file")


# ---- workers that die -----------------------------------------------------------------------------------------------


class Mortal:
    """Stands for a worker; which of its calls kill it is in a list."""

    def __init__(self, inner: Any, deadly: list[tuple[str, str, str]]) -> None:
        self._inner, self._deadly, self._dead = inner, deadly, False

    def call(self, method: str, *arguments: Any) -> Any:
        """Dies before, or after, a method whose first argument is a certain device."""
        for when in ("before", "after"):
            if (when, method, str(arguments[:1])) in self._deadly:
                self._deadly.remove((when, method, str(arguments[:1])))
                if when == "after":
                    self._inner.call(method, *arguments)
                self._die()
        if self._dead:
            raise HostDiedError
        return self._inner.call(method, *arguments)

    def _die(self) -> None:
        # As a killed process does: without checkpoints, and its locks are free.
        self._dead = True
        trainings = self._inner._trainings
        for training in trainings._open.values():
            training.trainer.close(keep=False)
        raise HostDiedError

    def close(self) -> None:
        if not self._dead:
            self._inner.close()


@pytest.fixture
def mortal(here, monkeypatch: pytest.MonkeyPatch) -> tuple[Workers, list[tuple[str, str, str]]]:
    workers = here(count=1)
    deadly: list[tuple[str, str, str]] = []
    start = workers._start
    monkeypatch.setattr(workers, "_start", lambda slot: Mortal(start(slot), deadly))
    return workers, deadly


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_at_which_the_worker_dies_is_accepted_once(mortal, tmp_path: Path, when: str) -> None:
    workers, deadly = mortal
    for device in ("a", "b"):
        workers.open(device, TASK)
        _train(workers, device, last=4)
    deadly.append((when, "accept", "('a',)"))
    workers.accept("a", batch_of(TASK, 4))
    assert not deadly
    assert np.isfinite(workers.submit("a", 4).result())
    assert workers.status("a").next_step == 5
    for device in ("a", "b"):
        _train(workers, device)
        assert same(_weights(workers, device), _expected(tmp_path / f"alone-{device}"))


def test_the_training_at_which_a_worker_dies_again_is_left_out(mortal, tmp_path: Path) -> None:
    workers, deadly = mortal
    for device in ("a", "b", "c"):
        workers.open(device, TASK)
        _train(workers, device, last=5)
    deadly += [("before", "weights", "('a',)"), ("before", "open", "('b',)")]
    assert same(_weights(workers, "a"), _weights(workers, "c"))
    for call in (lambda: workers.accept("b", batch_of(TASK, 5)), lambda: workers.weights("b")):
        with pytest.raises(LayoutOptError, match="died when the training's steps were applied again"):
            call()
    assert "died when" in workers.status("b").failure
    for device in ("a", "c"):
        _train(workers, device)
    assert workers.open("b", TASK).next_step == 5  # and may try again
    _train(workers, "b")
    for device in ("a", "b", "c"):
        assert same(_weights(workers, device), _expected(tmp_path / f"alone-{device}"))


def test_a_call_at_which_workers_die_ends(mortal) -> None:
    workers, deadly = mortal
    deadly += 3 * [("before", "open", "('a',)")]
    with pytest.raises(LayoutOptError, match="died 3 times at open"):
        workers.open("a", TASK)
    with pytest.raises(LayoutOptError, match="open it first"):
        workers.status("a")
    assert workers.open("a", TASK).applied == 0


def test_a_process_that_is_killed_is_replaced_and_nobody_notices(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "state", count=2, limits=SMALL)
    try:
        for device in ("a", "b", "c"):
            workers.open(device, TASK)
        assert [len(slot.trainings) for slot in workers._slots] == [2, 1]
        victim = workers._slots[0].host
        assert isinstance(victim, Process)
        for device in ("a", "b", "c"):
            _train(workers, device, last=4)
        for step in (4, 5):
            workers.accept("a", batch_of(TASK, step))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        # Nobody calls: those who wait for a loss get it all the same.
        assert all(np.isfinite(workers.submit("a", step).result(timeout=100)) for step in (4, 5))
        with pytest.raises(MissingSamples):
            workers.accept("c", Batch(4, (99,)))
        for device in ("a", "b", "c"):
            _train(workers, device)
            assert same(_weights(workers, device), _expected(tmp_path / f"alone-{device}"))
        assert workers._slots[0].host is not victim
    finally:
        workers.close()
    assert all(slot.host is None for slot in workers._slots)


SERVER = """
import sys
from layoutopt.side.workers import Workers
from tests.side_cases import TASK, batch_of

if __name__ == "__main__":
    workers = Workers(sys.argv[1], count=1)
    workers.open("phone", TASK)
    for step in range(7):
        workers.accept("phone", batch_of(TASK, step))
    print(workers._slots[0].host.pid, flush=True)
    sys.stdin.read()
"""


def test_a_server_that_was_killed_takes_its_workers_along_and_nothing_is_lost(here, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), str(tmp_path / "state")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        server.kill()
    workers = here()
    assert workers.open("phone", TASK).next_step == 7  # waits until the worker has let go of the files
    _train(workers, "phone")
    assert same(_weights(workers, "phone"), _expected(tmp_path / "alone"))
    for _ in range(600):
        if not _is_alive(worker):
            break
        time.sleep(0.1)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # Nobody may have waited for it.
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_what_a_process_cannot_do_is_a_sentence(tmp_path: Path) -> None:
    process = Process(tmp_path, SMALL, "cpu", lambda _: None, lambda _: None)
    assert process.call("ping") == 0
    with pytest.raises(LayoutOptError, match="a worker failed at nonsense"):
        process.call("nonsense")
    process.close()
    with pytest.raises(HostDiedError):
        process.call("ping")


def test_on_ray_it_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    workers = Workers(tmp_path / "state", engine="ray", count=1, limits=replace(SMALL, memory_bytes=300 << 20))
    try:
        workers.open("a", TASK)
        _train(workers, "a", last=5)
        actor = workers._slots[0].host
        workers._ray.kill(actor._actor, no_restart=True)
        assert len(_train(workers, "a")) == 7
        assert workers._slots[0].host is not actor
        assert same(_weights(workers, "a"), _expected(tmp_path / "alone"))
        with pytest.raises(LayoutOptError, match="targets are NoneType"):
            workers.accept("a", replace(batch_of(TASK, 0), targets=None))
        workers.release("a")
        assert workers.open("a", TASK).applied == TASK.steps
    finally:
        workers.close()
