"""A hundred devices train with one server, and every now and then some are killed and restarted: is anything lost?

    python benchmarks/side_load.py --minutes 10 --out benchmarks/records/side-load.json

The server is ``layoutopt side serve`` in a process of its own. Devices are processes too, five in each; their backbones
are random numbers, so that what is measured is the server. Every device trains from its first step to its last, then
begins a new training, until the time is up; half of them send every epoch, half leave later ones to the server's store.
Every minute a fifth of the devices is killed at random moments, and their trainings are taken up. At the end every
finished training's side network must equal, bit by bit, that of the same batches applied in order without server and
wire: nothing was lost, nothing applied twice. The memory of the server and its workers is written down every few
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.recording import Record
from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.side.client import Remote, Settings, train
from layoutopt.side.task import Task
from tests.side import SECRET, FakeBackbone, alone, same_weights, small_task
from tests.side_process import Killable, ServerProcess

SAMPLES, BATCH = 128, 8
PER_PROCESS = 5
SETTINGS = Settings(stall_s=120.0, keepalive_s=20.0, retry_s=0.2, retry_most_s=5.0, give_up_s=900.0)


def task_of(width: int, epochs: int, seed: int) -> Task:
    """The task of a device's training."""
    steps = SAMPLES // BATCH * epochs
    return small_task(width=width, format="int8:64", batch=BATCH, rank=8, taps=tuple("abcdefg"), steps=steps, seed=seed)


def backbone_of(task: Task, wait_s: float) -> FakeBackbone:
    return FakeBackbone(task, SAMPLES, seed=task.seed, wait_s=wait_s)


# ---- devices --------------------------------------------------------------------------------------------------------


def devices(
    address: str, folder: str, numbers: list[int], width: int, epochs: int, wait_s: float, until: float
) -> None:
    """Some devices, each training after training until the time is up; what is done is a file."""

    def one(number: int) -> None:
        turn = 0
        while time.time() < until:
            name = f"device-{number}-{turn}"
            result = Path(folder) / name
            if not result.exists():
                task = task_of(width, epochs, 1000 * number + turn)
                settings = replace(SETTINGS, cache=bool(number % 2))
                report = train(task, backbone_of(task, wait_s), Remote(address, name), settings, secret=SECRET)
                write_atomic(result, report.weights)
                line = {"name": name, "connections": report.connections, "sent_bytes": report.sent_bytes}
                os.write(1, json.dumps(line).encode() + b"\n")  # at once: other threads write too
            turn += 1

    with ThreadPoolExecutor(len(numbers)) as pool:
        for future in [pool.submit(one, number) for number in numbers]:
            future.result()


class Group:
    """Some devices in a process, which is killed now and then."""

    def __init__(self, words: dict[str, object]) -> None:
        self._words = words
        self.kills = 0
        self.lines: list[dict[str, object]] = []
        self._start()

    def _start(self) -> None:
        self.process = Killable(str(Path(__file__).resolve()), "--devices-json", json.dumps(self._words))
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: Killable) -> None:
        for line in process.out:
            if line.endswith("}\n"):  # not torn by a kill
                self.lines.append(json.loads(line))

    def kill(self) -> None:
        self.process.process.kill()
        self._end()
        self.kills += 1
        self._start()

    def _end(self) -> int:
        code = self.process.process.wait()
        self._reader.join()
        self.process.close()
        return code

    def finish(self) -> None:
        if self._end():
            raise LayoutOptError(f"devices failed: {''.join(self.process.errors)[-2000:]}")


# ---- the server's memory --------------------------------------------------------------------------------------------


def memory_bytes(root: int) -> int:
    """Resident memory of a process and all processes below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            parents[int(entry.name)] = int(fields[1])
    family, found = {root}, True
    while found:
        new = {pid for pid, parent in parents.items() if parent in family} - family
        family, found = family | new, bool(new)
    return sum(_resident_bytes(pid) for pid in family)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---- the study ------------------------------------------------------------------------------------------------------


def study(arguments: argparse.Namespace) -> dict[str, object]:
    """Run it; returns the record's content."""
    rng = random.Random(arguments.seed)
    seconds = arguments.minutes * 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "results").mkdir()
        server = ServerProcess(folder / "state", "--devices", "1000", "--workers", "2")
        words = {
            "address": f"127.0.0.1:{server.port}",
            "folder": str(folder / "results"),
            "width": arguments.width,
            "epochs": arguments.epochs,
        }
        words |= {"wait_s": arguments.wait_s, "until": time.time() + seconds}
        numbers = list(range(arguments.devices))
        parts = [numbers[i : i + PER_PROCESS] for i in range(0, len(numbers), PER_PROCESS)]
        groups: list[Group] = []
        try:
            groups += [Group({**words, "numbers": part}) for part in parts]
            memory = disturb(server.process, groups, seconds, arguments.killed, rng)
            for group in groups:
                group.finish()
            memory.append((seconds, memory_bytes(server.process.pid)))
        finally:
            for group in groups:
                group.process.process.kill()
            server.process.terminate()
            code = server.close()
        results = sorted((folder / "results").iterdir())
        wrong = check(results, arguments, folder)
        lines = [line for group in groups for line in group.lines]
    return {
        "devices": arguments.devices,
        "minutes": arguments.minutes,
        "width": arguments.width,
        "steps_per_training": task_of(arguments.width, arguments.epochs, 0).steps,
        "trainings_finished": len(results),
        "trainings_wrong": wrong,
        "device_processes_killed": sum(group.kills for group in groups),
        "devices_killed": sum(group.kills * len(part) for group, part in zip(groups, parts, strict=True)),
        "connections": sum(int(str(line["connections"])) for line in lines),
        "sent_bytes": sum(int(str(line["sent_bytes"])) for line in lines),
        "server_exit_code": code,
        "server_errors": [line.strip() for line in server.errors if "ERROR" in line or "Traceback" in line][:20],
        "memory_bytes_by_s": [[round(s), b] for s, b in memory],
    }


def disturb(
    server: subprocess.Popen[str], groups: list[Group], seconds: float, killed: float, rng: random.Random
) -> list[tuple[float, int]]:
    """Kill some of the processes, again and again; returns the server's memory over time."""
    began = time.time()
    # As many kills in all as make the asked-for share of all devices, each minute anew.
    count = max(round(killed * len(groups) * max(seconds / 60, 1)), 1)
    moments = sorted(
        rng.uniform(0.2, 0.9) * seconds if seconds < 60 else rng.uniform(5, seconds - 5) for _ in range(count)
    )
    every = max(seconds / 60, 1.0)
    memory: list[tuple[float, int]] = []
    while time.time() - began < seconds:
        now = time.time() - began
        if server.poll() is not None:
            raise LayoutOptError(f"the server ended by itself with exit code {server.returncode}")
        while moments and moments[0] <= now:
            moments.pop(0)
            rng.choice(groups).kill()
        if not memory or now - memory[-1][0] >= every:
            memory.append((now, memory_bytes(server.pid)))
            print(f"{now:6.0f} s  server and workers {memory[-1][1] / 2**20:7.1f} MiB", flush=True)
        time.sleep(0.1)
    return memory


def check(results: list[Path], arguments: argparse.Namespace, folder: Path) -> int:
    """How many of the finished trainings (all, or a random part of them) differ from the same without a server."""
    chosen = random.Random(1).sample(results, min(len(results), arguments.checked))
    wrong = 0
    for path in chosen:
        _, number, turn = path.name.split("-")
        task = task_of(arguments.width, arguments.epochs, 1000 * int(number) + int(turn))
        try:
            same_weights(path.read_bytes(), alone(folder / "alone" / path.name, task, backbone_of(task, 0.0)))
        except AssertionError:
            wrong += 1
            print(f"{path.name}: another side network than without a server", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--killed", type=float, default=0.2, help="share of the devices killed, a minute")
    parser.add_argument("--width", type=int, default=384, help="numbers of a tap")
    parser.add_argument("--epochs", type=int, default=5, help="of a training")
    parser.add_argument("--wait-s", type=float, default=1.0, help="seconds of a device's backbone, a batch")
    parser.add_argument("--checked", type=int, default=1_000_000, help="finished trainings to compare at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON record")
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    parser.add_argument("--devices-json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.devices_json:
        devices(**json.loads(arguments.devices_json))
        return
    if arguments.smoke:
        arguments.minutes, arguments.devices, arguments.width, arguments.epochs, arguments.wait_s = 0.1, 10, 64, 2, 0.01
    record = Record(arguments.out, "side_load", seed=arguments.seed)
    found = study(arguments)
    record.write(found)
    memory = [b for _, b in found["memory_bytes_by_s"]]  # type: ignore[attr-defined]
    print(
        f"{found['trainings_finished']} trainings of {arguments.devices} devices, {found['devices_killed']} times a "
        f"device was killed, {found['trainings_wrong']} trainings wrong; "
        f"server's memory up to {max(memory) / 2**20:.0f} MiB"
    )
    if found["trainings_wrong"] or found["server_exit_code"] or not found["trainings_finished"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
