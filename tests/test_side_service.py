"""A live server: what devices get, what is refused, and that nobody's mistakes are another's."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

import grpc

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.client import Remote, Settings
from layoutopt.side.service import Limits, Service
from layoutopt.side.trainings import Limits as TrainingLimits
from layoutopt.side.weights import unpack
from layoutopt.side.wire import RefusedError
from layoutopt.side.workers import Workers
from tests.link import Link
from tests.side import (
    QUICK,
    SMALL,
    Caller,
    FakeBackbone,
    Server,
    alone,
    device,
    same_weights,
    server,
    small_task,
    waited,
)

BACKBONE = FakeBackbone(SMALL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return alone(tmp_path_factory.mktemp("alone") / "t")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with server(tmp_path / "state", Limits(stall_s=5.0, open_s=2.0, keepalive_s=2.0)) as found:
        yield found


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4])
def test_a_side_network_comes_back_as_if_there_were_no_wire(running: Server, expected: bytes, window: int) -> None:
    backbone, done = FakeBackbone(SMALL), []
    settings = replace(QUICK, window=window)
    report = device(
        running.address, backbone=backbone, settings=settings, progress=lambda step, of: done.append((step, of))
    )
    same_weights(report.weights, expected)
    assert sorted(report.losses) == list(range(SMALL.steps))
    assert done[-1] == (24, 24)
    assert report.connections == 1
    assert 0 < report.utilisation < 1
    # One epoch is computed and sent; the others come from the server's store.
    assert sorted(i for run in backbone.ran for i in run) == list(range(32))
    assert (report.computed, report.supplied) == (32, 0)


@pytest.mark.parametrize("changes", [{"mode": "private"}, {"tokens": "all", "pooling": "mean", "format": "int4"}])
def test_other_tasks_cross_as_well(running: Server, tmp_path: Path, changes: dict[str, Any]) -> None:
    task = small_task(steps=10, **changes)
    same_weights(device(running.address, task).weights, alone(tmp_path / "alone", task))


def test_a_device_trains_within_a_running_event_loop(running: Server, expected: bytes) -> None:
    """As in a notebook, whose cells run in one."""

    async def cell() -> bytes:
        return device(running.address).weights

    same_weights(asyncio.run(cell()), expected)


def test_a_head_is_where_the_network_starts(running: Server) -> None:
    head = {"classifier.bias": np.array([3.0, -1.0, 2.0], np.float32)}
    with Caller(running.address) as caller:
        pb = wire.messages()
        opening = pb.Open(version=1, task=wire.encode_task(SMALL), head=wire.encode_tensors(head))
        caller.send(open=opening)
        assert caller.receive().next_step == 0
        caller.send(fetch=pb.Fetch())
        values = unpack(caller.receive().data).values
    np.testing.assert_array_equal(values["classifier.bias"], head["classifier.bias"])


def test_what_is_sent_after_asking_for_the_network_is_not_waited_for(running: Server) -> None:
    with Caller(running.address) as caller:
        caller.open()
        caller.step(BACKBONE.batch(0, (0, 1)))
        caller.send(fetch={})
        caller.step(BACKBONE.batch(1, (2, 3)))
        assert caller.receive().step == 0
        assert caller.receive().step == 1  # steps that the network contains
        assert caller.receive().step == 1  # acknowledged


def test_without_the_cache_every_epoch_is_sent(running: Server, expected: bytes) -> None:
    backbone = FakeBackbone(SMALL)
    report = device(running.address, backbone=backbone, settings=replace(QUICK, cache=False))
    same_weights(report.weights, expected)
    assert report.computed == 3 * 32


def test_what_the_store_lost_is_sent_again(tmp_path: Path, expected: bytes) -> None:
    """A store of five samples, both in memory and on disk: nearly every order needs the device."""
    few = TrainingLimits(store_memory_bytes=5 * SMALL.sample_bytes, store_disk_bytes=8 * SMALL.sample_bytes)
    with server(tmp_path / "state", limits=few) as found:
        report = device(found.address)
    same_weights(report.weights, expected)
    # Of an order's four samples only those that are not there are asked for.
    assert 0 < report.supplied < 64


class Held(Workers):
    """Workers whose steps are not told to be applied until a test says so."""

    held: list[tuple[Future[float], Future[float]]]

    def submit(self, device_id: str, step: int) -> Future[float]:
        told: Future[float] = Future()
        self.held.append((super().submit(device_id, step), told))
        return told

    def tell(self) -> None:
        held, self.held = self.held, []  # telling one brings the next
        for applied, told in held:
            told.set_result(applied.result(20))


@pytest.mark.parametrize("window", [1, 3])
def test_a_device_computes_ahead_by_its_window(tmp_path: Path, window: int) -> None:
    """No clock: while no step is acknowledged, exactly the window's steps are computed, then one for each that is."""
    workers = Held(tmp_path / "state", engine="here")
    workers.held = []
    backbone = FakeBackbone(SMALL)
    task = small_task(steps=6)
    with Server(workers) as found:
        settings = replace(QUICK, window=window)
        thread = threading.Thread(target=device, args=(found.address, task, backbone), kwargs={"settings": settings})
        thread.start()
        for done in range(0, task.steps, window):
            expected = min(done + window, task.steps)
            assert waited(lambda count=expected - done: len(workers.held) >= count)
            assert (len(workers.held), len(backbone.ran)) == (expected - done, expected)
            workers.tell()
        thread.join(20)
        assert not thread.is_alive()


def test_orders_go_on_when_the_device_has_left(running: Server, tmp_path: Path) -> None:
    task = small_task(steps=60)
    samples = [(0, 1, 2, 3), (4, 5, 6, 7)]
    with Caller(running.address) as caller:
        caller.open(task)
        for step, ids in enumerate(samples):
            caller.step(BACKBONE.batch(step, ids))
        caller.order(2, *(samples[step % 2] for step in range(2, 50)))
        assert caller.receive().step == 0
    workers = running.service._workers
    assert waited(lambda: workers.status("phone").applied == 50)
    with Caller(running.address) as caller:
        assert caller.open(task).next_step == 50


# ---- refusals -------------------------------------------------------------------------------------------------------


def oversized(caller: Caller) -> None:
    caller.send(b"\x12" + b"\0" * (1 << 21))


def replayed(caller: Caller) -> None:
    caller.step(BACKBONE.batch(0, (0, 1, 2, 3)))


def second_open(caller: Caller) -> None:
    caller.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL)))


def foreign_batch(caller: Caller) -> None:
    other = small_task(width=16)
    caller.step(FakeBackbone(other).batch(1, (0, 1)))


def unasked(caller: Caller) -> None:
    rows = wire.encode_rows(BACKBONE.batch(1, (0, 1, 2, 3)))
    caller.send(supply=wire.messages().Supply(step=1, rows=rows))


WRONG: list[tuple[Callable[[Caller], None], str]] = [
    (lambda caller: caller.send(b"\xff\xff\xff\xff"), "no message of this protocol"),
    (lambda caller: caller.send(b""), "says nothing"),
    (oversized, "a message of 2097153 bytes, where at most 1048576 are expected"),
    (replayed, "step 0 comes again: the training goes on at step 1"),
    (lambda caller: caller.step(BACKBONE.batch(3, (0,))), "step 3 comes too early: the training goes on at step 1"),
    (lambda caller: caller.order(0, (0, 1)), "step 0 comes again"),
    (lambda caller: caller.order(1, *[(0, 1)] * 2000), "2000 orders"),
    (lambda caller: caller.order(1, ()), "expected 1 to 4 samples"),
    (second_open, "a message 'open' where steps are expected"),
    (foreign_batch, "the words of tap one has 32 bytes, expected 64"),
    (unasked, "which nobody asked for"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_wrong_messages_end_their_call_and_nothing_else(
    running: Server, caplog: pytest.LogCaptureFixture, wrong: Callable[[Caller], None], says: str
) -> None:
    caplog.set_level(logging.WARNING, "layoutopt.side")
    with Caller(running.address, "bad") as bad, Caller(running.address, "good") as good:
        assert bad.open().next_step == 0
        assert good.open().next_step == 0
        bad.step(BACKBONE.batch(0, (0, 1, 2, 3)))
        assert bad.receive().step == 0
        wrong(bad)
        refused = bad.refused()
        assert says in refused.reason
        assert refused.code == wire.messages().Refused.BAD
        good.step(BACKBONE.batch(0, (0, 1, 2, 3)))
        assert good.receive().step == 0
    assert any(says in record.message and "bad at" in record.message for record in caplog.records)
    with Caller(running.address, "bad") as bad:
        assert bad.open().next_step == 1  # the training is as it was


def test_a_window_is_kept_to(tmp_path: Path) -> None:
    workers = Held(tmp_path / "state", engine="here")
    workers.held = []
    with Server(workers, limits=Limits(window_steps=3)) as found, Caller(found.address) as caller:
        opened = caller.open()
        assert (opened.window_steps, opened.window_bytes) == (3, 3 * wire.batch_limit(SMALL))
        for step in range(4):
            caller.step(BACKBONE.batch(step, (step,)))
        assert "step 3 exceeds the window: 3 steps" in caller.refused().reason


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"fetch": {}}, "a call begins with 'fetch'"),
        ({"open": {"version": 2}}, "the device speaks version 2 of the protocol, this server version 1"),
        ({"open": {"version": 1}}, "a task's"),
    ],
)
def test_wrong_openings_are_refused(running: Server, message: dict[str, Any], says: str) -> None:
    with Caller(running.address) as caller:
        caller.send(**message)
        assert says in caller.refused().reason


def test_a_call_that_says_nothing_is_ended(running: Server) -> None:
    with Caller(running.address) as caller:
        assert "without a message for 2 s" in caller.refused().reason


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65])
def test_names_that_are_no_folders_are_refused(running: Server, tmp_path: Path, name: str) -> None:
    with Caller(running.address, name) as caller:
        assert "is no device name" in caller.refused().reason
    assert not list((tmp_path / "state").glob("*/checkpoint*"))


def test_another_task_is_refused(running: Server) -> None:
    device(running.address, small_task(steps=2))
    with pytest.raises(RefusedError, match=r"the server refuses: .*another"):
        device(running.address, small_task(steps=3))


def test_a_training_is_begun_anew_when_the_device_says_so(running: Server, tmp_path: Path) -> None:
    """Once: what comes after the connection is lost goes on."""
    device(running.address, small_task(steps=2))
    task = small_task(steps=30, lr=3e-3)
    with Link(running.port) as link:
        cuts = [10]

        def cut(done: int, of: int) -> None:
            if cuts and done >= cuts[0]:
                cuts.pop()
                link.cut()

        report = device(link.address, task, settings=replace(QUICK, anew=True), progress=cut)
    assert (report.connections, report.first_step) == (2, 0)
    same_weights(report.weights, alone(tmp_path / "alone", task))


def test_a_task_whose_batches_are_too_large_is_refused(tmp_path: Path) -> None:
    with server(tmp_path / "state", Limits(window_bytes=400)) as found, Caller(found.address) as caller:
        caller.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL)))
        assert "this server takes 400" in caller.refused().reason


def test_compressed_messages_are_not_unfolded(running: Server) -> None:
    with Caller(running.address, compression=grpc.Compression.Gzip) as caller:
        caller.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL), head=[{"name": "x" * 60000}]))
        with pytest.raises(grpc.RpcError):
            caller.receive()
    assert running.service.connected == []


def test_a_newer_connection_takes_over(running: Server) -> None:
    with Caller(running.address) as old, Caller(running.address) as new:
        old.open()
        old.step(BACKBONE.batch(0, (0, 1)))
        old.receive()
        assert new.open().next_step == 1
        refused = old.refused()
        assert refused.code == wire.messages().Refused.SUPERSEDED
        new.step(BACKBONE.batch(1, (0, 1)))
        assert new.receive().step == 1


def test_a_full_server_says_later(tmp_path: Path) -> None:
    with server(tmp_path / "state", Limits(devices=1)) as found, Caller(found.address, "one") as one:
        one.open()
        with Caller(found.address, "two") as two:
            two.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL)))
            refused = two.refused()
        assert refused.code == wire.messages().Refused.LATER
        assert "1 devices are connected" in refused.reason
    held = Limits(held_bytes=5 * wire.batch_limit(SMALL))
    with server(tmp_path / "other", held) as found, Caller(found.address, "one") as one:
        one.open()
        with Caller(found.address, "two") as two:
            two.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL)))
            assert two.refused().code == wire.messages().Refused.LATER


def test_a_server_without_memory_to_spare_says_later(tmp_path: Path) -> None:
    few = TrainingLimits(memory_bytes=3 * SMALL.training_bytes, store_memory_bytes=0)
    with server(tmp_path / "state", limits=few, count=1) as found:
        with Caller(found.address, "one") as one, Caller(found.address, "two") as two:
            one.open()
            two.open()
            with Caller(found.address, "three") as three, Caller(found.address, "four") as four:
                three.open()
                four.send(open=wire.messages().Open(version=1, task=wire.encode_task(SMALL)))
                assert four.refused().code == wire.messages().Refused.LATER
        # Devices that are gone make room, and go on where they were.
        for name in ("four", "five", "one"):
            with Caller(found.address, name) as caller:
                assert caller.open().next_step == 0
        with Caller(found.address, "large") as large:
            large.send(open=wire.messages().Open(version=1, task=wire.encode_task(small_task(rank=64, width=512))))
            refused = large.refused()
        assert refused.code == wire.messages().Refused.BAD
        assert "give the server more memory" in refused.reason


def test_a_device_gives_up_when_nothing_gets_on(running: Server) -> None:
    settings = replace(QUICK, give_up_s=0.3)
    with pytest.raises(LayoutOptError, match=r"nothing got on for 0.3 s .*goes on at step 0 of 24"):
        device("127.0.0.1:9", settings=settings)


def test_trainings_of_devices_that_are_gone_are_released(tmp_path: Path) -> None:
    with server(tmp_path / "state", Limits(idle_s=0.2)) as found:
        with Caller(found.address) as caller:
            caller.open()
            caller.step(BACKBONE.batch(0, (0, 1)))
            caller.receive()
        assert waited(lambda: not found.service._places)
        with Caller(found.address) as caller:
            assert caller.open().next_step == 1


def test_a_training_whose_device_comes_with_another_task_is_released_too(tmp_path: Path) -> None:
    with server(tmp_path / "state", Limits(idle_s=0.2)) as found:
        with Caller(found.address) as caller:
            caller.open()
        with Caller(found.address) as caller:
            caller.send(open=wire.messages().Open(version=1, task=wire.encode_task(small_task(seed=9))))
            assert "another seed" in caller.refused().reason
        assert waited(lambda: not found.service._places)
        with pytest.raises(LayoutOptError, match="no open training"):
            found.service._workers.status("phone")


def test_a_server_that_stops_says_so_and_goes_on_later(tmp_path: Path) -> None:
    with server(tmp_path / "state") as found:
        caller = Caller(found.address)
        caller.open()
        caller.step(BACKBONE.batch(0, (0, 1)))
        caller.receive()
    refused = caller.refused()
    caller.close()
    assert (refused.reason, refused.code) == ("the server stops", wire.messages().Refused.LATER)
    with server(tmp_path / "state") as found, Caller(found.address) as again:
        assert again.open().next_step == 1


def test_plaintext_stays_on_this_machine(tmp_path: Path) -> None:
    workers = Workers(tmp_path, engine="here")
    with pytest.raises(LayoutOptError, match=r"without keys nothing leaves this machine, got 0.0.0.0:0.*--insecure"):
        Server(workers, address="0.0.0.0:0")
    with pytest.raises(LayoutOptError, match=r"without keys nothing leaves this machine, got example.org:1"):
        Remote("example.org:1", "phone")
    assert Remote("example.org:1", "phone", insecure=True).insecure
    with pytest.raises(LayoutOptError, match="is no address"):
        Remote("example.org", "phone")
    workers.close()


def test_an_address_that_is_taken(tmp_path: Path, running: Server) -> None:
    workers = Workers(tmp_path / "other", engine="here")
    service = Service(workers)

    async def start() -> None:
        try:
            await service.start(running.address)
        finally:
            await service.stop(0)

    with pytest.raises(LayoutOptError, match="cannot listen on"):
        asyncio.run(start())


def test_settings_are_checked() -> None:
    with pytest.raises(LayoutOptError, match="at least 1 step"):
        Settings(window=0)
