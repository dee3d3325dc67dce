"""Hostile bytes against a live server for minutes: nothing crashes, and an honest device trains as if nothing were.

    python benchmarks/side_fuzz.py --minutes 10 --out benchmarks/records/side-fuzz.json

The server is ``layoutopt side serve`` in a process of its own. Hypothesis makes calls (noise, honest messages with
bytes changed, messages whose fields hold anything) and bytes for the port itself (noise, HTTP/2 frames of any kind). An
honest device trains all the while, training after training; every side network it is given must equal, bit by bit, that
of the same batches without server. The server must be there at the end, with bounded memory and no exception in its
log.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.recording import Record
from benchmarks.side_load import memory_bytes
from layoutopt.errors import LayoutOptError
from tests.side import FakeBackbone, alone, device, same_weights, small_task
from tests.side_fuzz import Attack, attacks, raw_attacks, run_attack, run_raw
from tests.side_process import ServerProcess

ROUND = 500
"""Attacks of a seed, of each of both kinds."""
STEPS = 100


@dataclass
class Honest:
    """A device that trains again and again until it is told to stop."""

    address: str
    folder: Path
    trainings: int = 0
    reconnections: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            task = small_task(steps=STEPS, seed=self.trainings)
            name = f"honest-{self.trainings}"
            try:
                report = device(self.address, task, FakeBackbone(task, 200, wait_s=0.01), name=name)
                same_weights(report.weights, alone(self.folder / name, task, FakeBackbone(task, 200)))
            except (AssertionError, LayoutOptError) as error:
                self.failures.append(f"{name}: {error}")
            else:
                self.reconnections += report.connections - 1
            self.trainings += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def study(seconds: float, first_seed: int, round_: int) -> dict[str, Any]:
    """Attack for so long; returns the record's content."""
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = ServerProcess(folder / "state", "--memory", "512MiB", "--store-memory", "1MiB")
        honest = Honest(f"127.0.0.1:{server.port}", folder / "alone")
        began, number, raw, memory = time.monotonic(), 0, 0, [memory_bytes(server.process.pid)]
        try:
            while time.monotonic() - began < seconds and server.process.poll() is None:
                ends.update(calls(server, first_seed + number, round_))
                raw += bytes_(server, first_seed + number, round_)
                number += 1
                memory.append(memory_bytes(server.process.pid))
                now = time.monotonic() - began
                print(f"{now:6.0f} s  {ends.total()} calls, {raw} raw, {memory[-1] / 2**20:.1f} MiB", flush=True)
        finally:
            honest.stop()
            ended = server.process.poll()
            server.process.terminate()
            code = server.close()
    return {
        "seconds": seconds,
        "calls": ends.total(),
        "raw": raw,
        "ends": dict(sorted(ends.items())),
        "honest_trainings": honest.trainings,
        "honest_reconnections": honest.reconnections,
        "honest_failures": honest.failures,
        "server_ended_by_itself": ended is not None,
        "server_exit_code": code,
        "server_errors": [line.strip() for line in server.errors if "ERROR" in line or "Traceback" in line][:20],
        "refusals_logged": sum("refused" in line for line in server.errors),
        "memory_bytes": memory,
    }


def calls(server: ServerProcess, number: int, count: int) -> Counter[str]:
    """Calls of one seed; how they ended."""
    ends: Counter[str] = Counter()

    @seed(number)
    @_settings(count)
    @given(attacks())
    def attack(found: Attack) -> None:
        ends[run_attack(f"127.0.0.1:{server.port}", found)] += 1

    attack()
    return ends


def bytes_(server: ServerProcess, number: int, count: int) -> int:
    """Raw bytes of one seed; how many."""
    made = 0

    @seed(number)
    @_settings(count)
    @given(raw_attacks())
    def attack(found: bytes) -> None:
        nonlocal made
        run_raw(server.port, found)
        made += 1

    attack()
    return made


def _settings(count: int) -> settings:
    few = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=few
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON record")
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it says on standard error what it refuses to send
    record = Record(arguments.out, "side_fuzz", seed=arguments.seed)
    minutes, round_ = (0.05, 30) if arguments.smoke else (arguments.minutes, ROUND)
    found = study(minutes * 60, arguments.seed, round_)
    record.write(found)
    print(
        f"{found['calls']} calls and {found['raw']} raw connections: {found['ends']}; "
        f"{found['honest_trainings']} honest trainings beside them, {len(found['honest_failures'])} of them wrong"
    )
    bad = found["server_ended_by_itself"] or found["server_exit_code"] or found["server_errors"]
    if bad or found["honest_failures"]:
        raise SystemExit(f"failed: {found['server_errors'] or found['honest_failures'] or found['server_exit_code']}")


if __name__ == "__main__":
    main()
