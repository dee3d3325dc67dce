"""Whatever fails, every batch is applied exactly once: weights are equal, bit by bit, to those of a quiet training."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

from layoutopt.errors import LayoutOptError
from layoutopt.side.service import Limits
from layoutopt.side.weights import unpack
from tests.link import Link
from tests.side import QUICK, Caller, FakeBackbone, alone, device, same_weights, server, small_task, waited
from tests.side_process import DeviceProcess, ServerProcess

TASK = small_task(steps=60)
LIMITS = Limits(keepalive_s=0.5, stall_s=2.0, open_s=2.0)
IMPATIENT = replace(QUICK, stall_s=1.5, keepalive_s=0.5)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return alone(tmp_path_factory.mktemp("alone") / "t", TASK, FakeBackbone(TASK, samples=80))


def at_steps(steps: list[int], what: Callable[[], None]) -> Callable[[int, int], None]:
    """A device's progress: do something when it gets to each of these steps, from another thread."""
    left = sorted(steps)

    def progress(done: int, of: int) -> None:
        if left and done >= left[0]:
            del left[0]
            threading.Thread(target=what).start()

    return progress


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_are_cut(tmp_path: Path, expected: bytes, seed: int) -> None:
    steps = random.Random(seed).sample(range(TASK.steps), 5)
    with server(tmp_path, LIMITS) as found, Link(found.port) as link:
        backbone = FakeBackbone(TASK, samples=80)
        report = device(link.address, TASK, backbone, settings=QUICK, progress=at_steps(steps, link.cut))
        assert report.connections > 1
    same_weights(report.weights, expected)


def test_a_connection_that_is_half_open(tmp_path: Path, expected: bytes) -> None:
    """Neither end is told; both find out, and the device's new connection takes over from the dead one."""
    with server(tmp_path, LIMITS) as found, Link(found.port) as link:
        backbone = FakeBackbone(TASK, samples=80)
        report = device(link.address, TASK, backbone, settings=IMPATIENT, progress=at_steps([7], link.half_open))
        assert report.connections > 1
        same_weights(report.weights, expected)


def test_a_link_that_stalls_for_a_while(tmp_path: Path, expected: bytes) -> None:
    with server(tmp_path, LIMITS) as found, Link(found.port) as link:

        def stall() -> None:
            link.stall()
            threading.Timer(0.3, link.resume).start()

        backbone = FakeBackbone(TASK, samples=80)
        report = device(link.address, TASK, backbone, settings=QUICK, progress=at_steps([3, 25, 50], stall))
    same_weights(report.weights, expected)


def test_a_slow_and_distant_link(tmp_path: Path, expected: bytes) -> None:
    with server(tmp_path, LIMITS) as found, Link(found.port, rate_bit_per_s=1e6, latency_s=0.02) as link:
        report = device(link.address, TASK, FakeBackbone(TASK, samples=80), settings=QUICK)
        assert link.up_bytes > report.sent_bytes
    same_weights(report.weights, expected)


def test_the_server_forgets_a_device_that_is_silently_gone(tmp_path: Path) -> None:
    with server(tmp_path, LIMITS) as found, Link(found.port) as link, Caller(link.address) as caller:
        caller.open(TASK)
        assert found.service.connected == ["phone"]
        link.half_open()
        assert waited(lambda: found.service.connected == [])


def test_a_device_that_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    """It asks for side networks and reads none: what waits for it is bounded, and others go on."""
    large = small_task(width=2048, rank=256)
    limits = replace(LIMITS, stall_s=1.0)
    # Else gRPC finds that the link is fast, and has room for the whole network before anyone reads it.
    little = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    with server(tmp_path, limits) as found, Caller(found.address, "slow", options=little) as slow:
        slow.open(large)
        slow.send(fetch={})
        assert slow.receive().total > 8 << 20
        assert waited(lambda: found.service.connected == [])
        assert found.service.refusals.counts["later"] == 1
        device(found.address, small_task(steps=3))


def test_a_recorded_training_sent_again_changes_nothing(tmp_path: Path, expected: bytes) -> None:
    """Every byte of a connection, from its preface on, as whoever listened to plaintext could send it."""
    with server(tmp_path, LIMITS) as found, Link(found.port, record=True) as link:
        half = replace(QUICK, give_up_s=0.0)

        def stop(done: int, of: int) -> None:
            if done == 30:
                link.refuse()
                link.cut()

        with pytest.raises(LayoutOptError, match="nothing got on"):
            device(link.address, TASK, FakeBackbone(TASK, samples=80), settings=half, progress=stop)
        before = found.service.refusals.counts["bad"]
        with socket.create_connection(("127.0.0.1", found.port)) as again:
            again.sendall(bytes(link.up))
            assert waited(lambda: found.service.refusals.counts["bad"] > before)
        report = device(found.address, TASK, FakeBackbone(TASK, samples=80))
        assert report.first_step >= 30
    same_weights(report.weights, expected)


# ---- killed processes -----------------------------------------------------------------------------------------------


def test_the_device_is_killed(tmp_path: Path, expected: bytes) -> None:
    rng = random.Random(1)
    with server(tmp_path / "state", LIMITS) as found:
        result = tmp_path / "network"
        for step in sorted(rng.sample(range(1, TASK.steps - 5), 3)):
            process = DeviceProcess(found.address, result, steps=TASK.steps, samples=80, wait_s=0.005)
            assert process.follow(lambda done, least=step: done >= least)
            process.kill()
        last = DeviceProcess(found.address, result, steps=TASK.steps, samples=80)
        assert not last.follow(lambda done: False)
        assert last.close() == 0, last.errors
    same_weights(result.read_bytes(), expected)


@pytest.mark.parametrize(("options", "kills"), [((), 2), (("--engine", "ray", "--workers", "1"), 1)], ids=["", "ray"])
def test_the_server_is_killed(tmp_path: Path, expected: bytes, options: tuple[str, ...], kills: int) -> None:
    """With its workers at work, processes or Ray's actors; another begins where the disk ends."""
    if "ray" in options:
        pytest.importorskip("ray", reason="needs the extra 'ray'")
    process = ServerProcess(tmp_path / "state", *options)
    servers = [process]
    killed = threading.Lock()
    with Link(process.port) as link:

        def replace_server() -> None:
            with killed:
                servers[-1].kill()
                link.refuse()
                servers.append(ServerProcess(tmp_path / "state", *options))
                link.target = servers[-1].port
                link.refuse(False)

        backbone = FakeBackbone(TASK, samples=80, wait_s=0.005)
        steps = random.Random(3).sample(range(1, TASK.steps - 5), kills)
        patient = replace(QUICK, give_up_s=120.0)  # a cluster takes a while to begin
        report = device(link.address, TASK, backbone, settings=patient, progress=at_steps(steps, replace_server))
        with killed:
            assert len(servers) == 1 + kills
            servers[-1].process.terminate()
            assert servers[-1].close() == 0, servers[-1].errors
    same_weights(report.weights, expected)
    assert unpack(report.weights).steps == TASK.steps
