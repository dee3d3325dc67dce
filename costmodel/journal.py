"""What a calibration has measured, written down as it comes: an interrupted one goes on from there.

A file of lines, each a JSON object: the question (device, driver, graphs, …) first, then the microbenchmarks' model,
kernels, and rounds as they end. Lines are only ever appended, and a reader stops at the first that is torn or damaged,
which is where writing goes on; so neither a crash nor a power cut loses more than the last round. The file goes when
the model is written, and is given up where it grows beyond what any calibration needs.

Kernels are also named before the driver first sees them. Those at which the process died twice are not tried again: one
that a driver cannot survive would else end every calibration.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from costmodel.device import DeviceModel, dumps, loads
from costmodel.rounds import Round
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.files import lock

__all__ = ["Entry", "Journal", "Kept", "journal_file"]

FORMAT = 1
MOST_BYTES = 64 << 20
"""A journal beyond this is written no further; the calibration goes on."""

STALE_S = 14 * 86_400.0
"""An interrupted calibration that nobody took up for so long is removed by the next one."""

MOST_DEATHS = 2
"""A kernel at which the process died so often is left out."""

SYNC_S = 1.0
"""Lines reach the disk, not only the system, at least this often."""


@dataclass(frozen=True)
class Entry:
    """A measured kernel, as a model files it: variant label, what it computes, features, its operands' layouts."""

    variant: str
    spec: str
    features: tuple[float, ...]
    layouts: str = ""


@dataclass
class Kept:
    """What a journal holds.

    Attributes:
        facts: the model of the microbenchmarks; None where they had not ended.
        entries: kernels by key, in the order they came.
        rounds: in order.
        refused: messages of kernels that the device refused.
        spent_s: how long the calibration had run at the last line.
        sessions: how often it was begun.
        trying: kernels that the driver was seeing for the first time at the last line.
        deaths: how often the process died at a kernel, without a word.
    """

    facts: DeviceModel | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    sessions: int = 0
    trying: set[str] = field(default_factory=set)
    deaths: Counter[str] = field(default_factory=Counter)

    @property
    def timed(self) -> frozenset[str]:
        """Kernels that a round timed."""
        return frozenset(key for own in self.rounds for key in own.times_ns)

    @property
    def deadly(self) -> frozenset[str]:
        """Kernels not to be tried again."""
        return frozenset(key for key, count in self.deaths.items() if count >= MOST_DEATHS)


def journal_file(folder: Path, question: Mapping[str, Any]) -> Path:
    """Where the journal of a question is: equal questions have one file."""
    return folder / f"{hashlib.sha256(_line(question)).hexdigest()[:20]}.jsonl"


class Journal:
    """An open journal. One process at a time writes it.

    Args:
        path: the file; its folder is made.
        question: what a calibration must share to go on from this one.
        fresh: whether to leave out what is there.
        clock: seconds, for how often the disk is waited for.

    Raises:
        LayoutOptError: it cannot be written, or another calibration is writing it.
    """

    def __init__(
        self,
        path: Path,
        question: Mapping[str, Any],
        fresh: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._clock = path, clock
        self._file = _opened(path)
        self._synced = clock()
        _remove_stale(path)
        head = {"layoutopt calibration": FORMAT, "question": dict(question)}
        self.kept, good = (Kept(), 0) if fresh else _read(path, head)
        self._numbers = {key: i for i, key in enumerate(self.kept.entries)}
        self._timed = set(self.kept.timed)
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._append(head)
        session = {"session": self.kept.sessions, "spent_s": self.kept.spent_s}
        self._append(session)
        _take(self.kept, session)

    def facts(self, model: DeviceModel, spent_s: float) -> None:
        """The microbenchmarks have ended."""
        self._append({"facts": dumps(model), "spent_s": spent_s})

    @property
    def measured(self) -> int:
        """How many kernels it holds times of."""
        return len(self._timed)

    def trying(self, keys: Sequence[str]) -> None:
        """The driver is about to see these for the first time."""
        self._append({"trying": list(keys)})

    def kernel(self, key: str, entry: Entry) -> None:
        """A kernel that was tried will be timed."""
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            said = {"variant": entry.variant, "spec": entry.spec, "features": entry.features, "layouts": entry.layouts}
            self._append({"kernel": key} | said)

    def refused(self, message: str) -> None:
        """The device refused a kernel that was tried."""
        self._append({"refused": message})

    def round(self, done: Round) -> None:
        """A round has ended; its kernels were told before."""
        self._timed.update(done.times_ns)
        times = [[self._numbers[key], ns] for key, ns in done.times_ns.items()]
        self._append(
            {"round": times, "anchors": dict(done.anchors_ns), "session": done.session, "spent_s": round(done.at_s, 3)}
        )

    def close(self) -> None:
        """Everything is on the disk afterwards, and that the process did not die."""
        if not self._file.closed:
            self._append({"trying": []})
            self._sync()
            self._file.close()

    def remove(self) -> None:
        """The model is written: nothing is to be taken up again."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file.tell() > MOST_BYTES:
            return
        self._file.write(_line(line) + b"\n")
        self._file.flush()
        if self._clock() - self._synced >= SYNC_S:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = self._clock()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def _opened(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - the journal's own life decides
    except OSError as error:
        raise LayoutOptError(f"cannot write the journal {path}: {error.strerror}") from error
    if not lock(file.fileno()):
        file.close()
        raise LayoutOptError(f"another process is at the same calibration and writes its journal {path}")
    return file


def _remove_stale(path: Path) -> None:
    now = time.time()
    for other in path.parent.glob("*.jsonl"):
        try:
            if other != path and now - other.stat().st_mtime > STALE_S:
                other.unlink()
        except OSError:  # another process was quicker, or it is not ours to remove
            continue


def _read(path: Path, head: Mapping[str, Any]) -> tuple[Kept, int]:
    """What a journal holds and how many of its bytes are good; nothing where it answers another question."""
    kept, good = Kept(), 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                content: dict[str, Any] = json.loads(line if line.endswith(b"\n") else b"")
                if number == 0 and content != json.loads(_line(head)):
                    break
                if number:
                    _take(kept, content)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, DeviceError):
                break  # torn by a crash: what came before it is whole
            good += len(line)
    return kept, good


def _take(kept: Kept, line: dict[str, Any]) -> None:
    spent_s = float(line.get("spent_s", kept.spent_s))
    if "round" in line:
        keys = list(kept.entries)
        times = {keys[int(number)]: int(ns) for number, ns in line["round"]}
        anchors = {str(name): int(ns) for name, ns in line["anchors"].items()}
        kept.rounds.append(Round(spent_s, times, anchors, int(line["session"])))
    elif "kernel" in line:
        kept.entries[str(line["kernel"])] = Entry(
            str(line["variant"]),
            str(line["spec"]),
            tuple(float(v) for v in line["features"]),
            str(line.get("layouts", "")),
        )
    elif "facts" in line:
        kept.facts = loads(line["facts"], "the journal's model")
    elif "refused" in line:
        kept.refused.append(str(line["refused"]))
    elif "trying" in line:
        kept.trying = {str(key) for key in line["trying"]}
    else:  # a session begins: the one before ended in the middle of what it was trying
        kept.deaths.update(kept.trying)
        kept.trying = set()
        kept.sessions = int(line["session"]) + 1
    kept.spent_s = spent_s
