"""The store: bounded in memory and on disk, sound after any end, and as good as the device for later epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutopt.errors import LayoutOptError
from layoutopt.side.records import encode_batch
from layoutopt.side.store import MissingSamples, Store
from layoutopt.side.task import Batch, Task
from tests.side_cases import TASK, batch_of, task_of

ONE = TASK.sample_bytes
SLOT = ONE + 40


OPENED: list[Store] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def _store(path: Path, memory: int = 100, disk: int = 100, device: str = "phone", task: Task = TASK) -> Store:
    """With room for some samples in memory, and on disk."""
    OPENED.append(
        Store(
            path / "activations",
            device,
            task,
            memory_bytes=memory * task.sample_bytes,
            disk_bytes=disk * (task.sample_bytes + 40),
        )
    )
    return OPENED[-1]


def _fill(store: Store, *samples: int) -> bytes:
    return encode_batch(store.fill(Batch(0, samples)))


def _is_whole(store: Store, *samples: int) -> bool:
    return _fill(store, *samples) == encode_batch(batch_of(TASK, 0, samples))


@pytest.mark.parametrize(("memory", "disk"), [(100, 0), (0, 100), (100, 100), (2, 100)])
@pytest.mark.parametrize("task", [TASK, task_of(tokens="all", mode="private", format="fp4")], ids=["pivot", "all"])
def test_what_was_put_comes_back(tmp_path: Path, memory: int, disk: int, task: Task) -> None:
    store = _store(tmp_path, memory, disk, task=task)
    for step in range(3):
        store.put(batch_of(task, step))
    assert store.missing(range(14)) == (12, 13)
    assert len(store) == 12
    wanted = (11, 0, 5, 0)
    batch = store.fill(Batch(7, wanted))
    batch.check(task)
    assert encode_batch(batch) == encode_batch(batch_of(task, 7, wanted))


def test_what_was_not_used_for_longest_goes_and_is_reported(tmp_path: Path) -> None:
    store = _store(tmp_path, memory=2, disk=5)
    store.put(batch_of(TASK, 0, (0, 1, 2, 3)))
    _fill(store, 0)
    store.put(batch_of(TASK, 1, (4, 5, 6)))
    assert store.missing(range(7)) == (1, 2)
    with pytest.raises(MissingSamples, match="2 samples are not in the server's store") as caught:
        store.fill(Batch(2, (0, 1, 2, 3)))
    assert caught.value.samples == (1, 2)
    assert _is_whole(store, 0, 3, 4, 5)
    assert store.memory_bytes <= 2 * ONE
    assert store.disk_bytes == 5 * SLOT == (tmp_path / "activations").stat().st_size


def test_memory_alone_is_bounded_too(tmp_path: Path) -> None:
    store = _store(tmp_path, memory=3, disk=0)
    for step in range(5):
        store.put(batch_of(TASK, step))
    assert store.missing(range(20)) == tuple(range(17))
    assert not (tmp_path / "activations").exists()


def test_nothing_is_kept_where_there_is_no_room(tmp_path: Path) -> None:
    store = _store(tmp_path, memory=0, disk=0)
    store.put(batch_of(TASK, 0))
    assert store.missing((0, 1)) == (0, 1)


def test_the_latest_comes_back(tmp_path: Path) -> None:
    store = _store(tmp_path, memory=0)
    store.put(batch_of(TASK, 0, seed=9))
    store.put(batch_of(TASK, 0))
    assert _is_whole(store, 0, 1, 2, 3)


def test_it_is_found_again_with_the_latest_of_each_sample(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.put(batch_of(TASK, 0, seed=9))
    store.put(batch_of(TASK, 1))
    store.put(batch_of(TASK, 0))
    store.close()
    store = _store(tmp_path, disk=7)  # and with a lower bound than before
    assert store.missing(range(8)) == (7,)
    assert _is_whole(store, 6, 3, 0, 4)
    store.put(batch_of(TASK, 0, (7, 8)))
    assert len(store) <= 9
    assert store.disk_bytes == 7 * SLOT


def test_a_sample_that_was_damaged_is_missing_and_can_be_put_again(tmp_path: Path, caplog) -> None:
    _store(tmp_path).put(batch_of(TASK, 0))
    path = tmp_path / "activations"
    data = bytearray(path.read_bytes())
    for at in (SLOT + 60, 2 * SLOT + 9, 3 * SLOT):  # content, id, magic
        data[at] ^= 1
    path.write_bytes(data[:-1])
    store = _store(tmp_path)
    with pytest.raises(MissingSamples):
        store.fill(Batch(0, (0, 1, 2, 3)))
    assert store.missing(range(4)) == (1, 2, 3)
    assert "sample 1 was damaged" in caplog.text
    store.put(batch_of(TASK, 0))
    assert _is_whole(store, 0, 1, 2, 3)
    assert store.disk_bytes <= 5 * SLOT


@pytest.mark.parametrize("other", [{"device": "tablet"}, {"task": task_of(lr=0.5)}])
def test_nobody_reads_what_is_anothers(tmp_path: Path, other: dict[str, object]) -> None:
    _store(tmp_path).put(batch_of(TASK, 0))
    store = _store(tmp_path, **other)
    with pytest.raises(MissingSamples):
        store.fill(Batch(0, (0, 1)))
    assert store.missing((0, 1)) == (0, 1)


def test_a_disk_that_is_full_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    store = _store(tmp_path, memory=2)

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    store.put(batch_of(TASK, 0))
    monkeypatch.setattr(store, "_pwrite", full)
    store.put(batch_of(TASK, 1))
    assert "stays in memory only: No space left" in caplog.text
    assert store.missing(range(8)) == (4, 5)
    monkeypatch.undo()
    store.put(batch_of(TASK, 1))
    assert _is_whole(store, 4, 5, 6, 7)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "activations").mkdir()
    with pytest.raises(LayoutOptError, match="cannot open the store"):
        _store(tmp_path)


def test_missing_samples_survive_the_way_between_processes() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(MissingSamples([3, 4])))
    assert again.samples == (3, 4)
    assert str(again) == str(MissingSamples([3, 4]))
