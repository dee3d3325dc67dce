"""A server or a device in a process of its own, to be killed: ``python -m tests.side_process device …``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests.side import QUICK, FakeBackbone, small_task

__all__ = ["DeviceProcess", "ServerProcess"]

ROOT = Path(__file__).resolve().parents[1]


class Killable:
    """A process whose lines are read as they come."""

    def __init__(self, *words: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )
        self.errors: list[str] = []
        self._drain = threading.Thread(target=self._read_errors, args=(self.process.stderr,), daemon=True)
        self._drain.start()

    def _read_errors(self, stream: IO[str]) -> None:
        self.errors.extend(stream)

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def kill(self) -> None:
        """At once, as a loss of power would."""
        self.process.kill()
        self.close()

    def close(self) -> int:
        """Wait for its end."""
        code = self.process.wait(60)
        self.out.close()
        self._drain.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


class ServerProcess(Killable):
    """``layoutopt side serve``.

    Args:
        state: its folder.
        options: further words of the command line.
    """

    def __init__(self, state: Path, *options: str) -> None:
        words = ["-m", "layoutopt", "side", "serve", "--state", str(state), "--listen", "127.0.0.1:0", "--json"]
        super().__init__(*words, *options)
        text = ""
        while not text.endswith("}\n"):
            line = self.out.readline()
            assert line, "".join(self.errors)
            text += line
        self.port: int = json.loads(text)["port"]


class DeviceProcess(Killable):
    """A device with a backbone in numpy.

    Args:
        address: of the server.
        result: file for the side network.
        settings: of the device: see ``_device``.
    """

    def __init__(self, address: str, result: Path, **settings: Any) -> None:
        self.done = 0
        super().__init__("-m", "tests.side_process", json.dumps({"address": address, "result": str(result)} | settings))

    def follow(self, until: Callable[[int], bool]) -> bool:
        """Read how many steps are done until that is enough; False where it ends before."""
        for line in self.out:
            self.done = int(line)
            if until(self.done):
                return True
        return False


def _device(
    address: str, result: str, name: str = "phone", samples: int = 32, wait_s: float = 0.0, **task: Any
) -> None:
    from layoutopt.files import write_atomic
    from tests.side import device

    made = small_task(**task)
    report = device(
        address,
        made,
        FakeBackbone(made, samples, wait_s=wait_s),
        name=name,
        settings=QUICK,
        progress=lambda done, of: print(done, flush=True),
    )
    write_atomic(result, report.weights)


if __name__ == "__main__":
    _device(**json.loads(sys.argv[1]))
