"""Hostile bytes against a live server, while an honest device trains as if nothing were."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

from hypothesis import HealthCheck, given, settings

from layoutopt.side.client import Report
from layoutopt.side.service import Limits
from layoutopt.side.trainings import Limits as TrainingLimits
from tests.side import FakeBackbone, alone, device, same_weights, server, small_task
from tests.side_fuzz import Attack, attacks, raw_attacks, run_attack, run_raw

TASK = small_task(steps=200)
LONG = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def test_calls_and_bytes_of_any_kind_harm_nobody(tmp_path: Path) -> None:
    small = TrainingLimits(memory_bytes=64 << 20, store_memory_bytes=1 << 20, store_disk_bytes=1 << 20)
    reports: list[Report] = []
    ends: Counter[str] = Counter()
    with server(tmp_path / "state", Limits(open_s=2.0, stall_s=10.0), limits=small) as found:
        honest = FakeBackbone(TASK, samples=800, wait_s=0.01)
        thread = threading.Thread(target=lambda: reports.append(device(found.address, TASK, honest, name="honest")))
        thread.start()

        @LONG
        @given(attacks())
        def call(attack: Attack) -> None:
            ends[run_attack(found.address, attack)] += 1

        @LONG
        @given(raw_attacks())
        def send(data: bytes) -> None:
            run_raw(found.port, data)

        call()
        send()
        thread.join(60)
        device(found.address, small_task(steps=3), name="afterwards")
        refused = found.service.refusals.counts["bad"]
    assert refused >= ends["FAILED_PRECONDITION"] > 20
    assert {p.name for p in (tmp_path / "state").iterdir()} <= {"honest", "afterwards", "fuzz-0", "fuzz-1", "fuzz-2"}
    assert [report.connections for report in reports] == [1]  # undisturbed
    expected = alone(tmp_path / "alone", TASK, FakeBackbone(TASK, samples=800))
    same_weights(reports[0].weights, expected)
