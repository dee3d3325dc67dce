"""Hostile bytes against a live server, while an honest device trains as if nothing were."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

from hypothesis import HealthCheck, given, settings

from layoutopt.side.client import Report
from layoutopt.side.service import Limits
from layoutopt.side.trainings import Limits as TrainingLimits
from tests.side import FakeBackbone, Server, alone, device, same_weights, server, small_task
from tests.side_fuzz import Attack, attacks, raw_attacks, run_attack, run_raw

TASK = small_task(steps=200)
LONG = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@dataclass
class Target:
    server: Server
    state: Path
    ends: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with an honest device at work from the first attack to the last."""
    state = tmp_path_factory.mktemp("state")
    small = TrainingLimits(memory_bytes=64 << 20, store_memory_bytes=1 << 20, store_disk_bytes=1 << 20)
    reports: list[Report] = []
    with server(state, Limits(open_s=2.0, stall_s=10.0), limits=small) as found:
        honest = FakeBackbone(TASK, samples=800, wait_s=0.01)
        thread = threading.Thread(target=lambda: reports.append(device(found.address, TASK, honest, name="honest")))
        thread.start()
        yield Target(found, state)
        thread.join(60)
    assert [report.connections for report in reports] == [1]  # undisturbed
    expected = alone(tmp_path_factory.mktemp("alone") / "t", TASK, FakeBackbone(TASK, samples=800))
    same_weights(reports[0].weights, expected)


@LONG
@given(attacks())
def test_calls_of_any_kind(target: Target, attack: Attack) -> None:
    target.ends[run_attack(target.server.address, attack)] += 1


@LONG
@given(raw_attacks())
def test_bytes_of_any_kind(target: Target, data: bytes) -> None:
    run_raw(target.server.port, data)


def test_afterwards_the_server_works_and_said_what_it_refused(target: Target) -> None:
    device(target.server.address, small_task(steps=3), name="afterwards")
    assert target.server.service.refusals.counts["bad"] > 20
    assert target.ends["FAILED_PRECONDITION"] > 20
    assert {p.name for p in target.state.iterdir()} <= {"honest", "afterwards", "fuzz-0", "fuzz-1", "fuzz-2"}
