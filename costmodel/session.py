"""Kernels measured so far: prepared in chunks, timed in rounds, settled, and each line of it journaled as it comes.

A kernel's repetitions end when its median is known tightly enough, so that rounds are over those that need them. Before
anything is begun its seconds are estimated by what the like of it took so far, so that a session ends when its time
does: a chunk of kernels is as large as there is time for, and so is a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Protocol

from costmodel.device import Measurement, Probe
from costmodel.drift import Drift, drift_of
from costmodel.journal import Entry, Journal, Kept
from costmodel.model import layouts_text, spec_text
from costmodel.pool import PREPARE_S, Candidate
from costmodel.rounds import CONFIDENCE, LEAST_ROUNDS, Round, Settled, settle
from costmodel.runner import Prepared
from kernels.spec import Kernel
from layoutopt.errors import DeviceError

__all__ = ["HELD_OUT_SHARE", "TOLERANCE", "Session", "is_held_out"]

HELD_OUT_SHARE = 0.2
TOLERANCE = {False: 0.03, True: 0.015}
"""How far a median's interval may reach from it, as a share, where a kernel needs no more rounds; thorough: True."""

CHUNK_S = 3.0
"""Kernels are compiled together for about so long: the compiler starts once, several may run; then they are timed."""
LEAST_TOGETHER, MOST_TOGETHER = 10, 120
MOST_ROUNDS = 40
"""A kernel that is not tight after so many repetitions will not be."""
MOST_AT_ONCE = 4
"""Rounds between two looks at which kernels need more."""
SEGMENT = {"cpu": 40, "gpu": 256}
"""Kernels of a round that is judged as one: a burst of other work is over before the next."""

MARGIN = 1.25
"""What is begun may take so many times what the like of it took."""
PATIENCE, LEAST_PATIENCE_S = 0.1, 6.0
"""Share of the time left, and seconds at least, that a batch may take before the rest of it is chosen anew, knowing
what these took. Choosing takes time, too."""


class TimesKernels(Protocol):
    """What a session asks of ``costmodel.runner.Bench``."""

    def build(self, kernels: Sequence[Kernel]) -> None: ...

    def prepare(self, kernel: Kernel) -> Prepared: ...

    def round(
        self, prepared: Mapping[str, Prepared], backwards: bool = False, refill: bool = True
    ) -> dict[str, int]: ...

    def fits(self, kernel: Kernel) -> bool: ...

    def close(self) -> None: ...


def is_held_out(key: str, seed: int) -> bool:
    """Whether the kernel of this key is held out: by its key and the seed alone, before anything is known of it."""
    return random.Random(f"{seed} {key}").random() < HELD_OUT_SHARE


class Session:
    """What has been measured so far.

    Args:
        bench: times kernels.
        kind: of the device, "cpu" or "gpu".
        seed: decides what is held out.
        tolerance: see ``TOLERANCE``.
        known: measurements of an earlier model, kept unless measured again.
        kept: of an interrupted session; its rounds count as this one's.
        journal: told of everything.
        clock: seconds; ``at_s`` of rounds are counted from ``begin_s`` on it.
        begin_s: see there.
        slow_s: a kernel that takes longer is not repeated: its time would be that of a hundred others.
    """

    def __init__(
        self,
        bench: TimesKernels,
        kind: str,
        seed: int,
        tolerance: float = TOLERANCE[False],
        *,
        known: Mapping[str, Measurement] | None = None,
        kept: Kept | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        begin_s: float | None = None,
        slow_s: float = inf,
    ) -> None:
        kept = kept or Kept()
        self.entries: dict[str, Entry] = dict(kept.entries)
        self.refused: list[str] = list(kept.refused)
        self._unwanted = set(kept.deadly)
        self._rounds: list[Round] = list(kept.rounds)
        self._number = max(kept.sessions - 1, 0)
        self._known = dict(known or {})
        self._bench, self._kind, self._seed, self._tolerance = bench, kind, seed, tolerance
        self._journal, self._clock = journal, clock
        self._begin_s = clock() if begin_s is None else begin_s
        self._slow_ns = 1e9 * slow_s
        self._prepared: dict[str, Prepared] = {}
        self._anchors: dict[str, Prepared] = {}
        self._each_s, self._round_s = PREPARE_S, 0.0
        self._backwards = False
        self._settled: tuple[int, dict[str, Settled]] = (-1, {})

    # ---- preparing ------------------------------------------------------------------------------------------------

    def anchor(self, kernels: Mapping[str, Kernel]) -> None:
        """Prepare the kernels that every round times; those that the device refuses are left out."""
        self._bench.build(list(kernels.values()))
        for name, kernel in kernels.items():
            try:
                self._anchors[name] = self._bench.prepare(kernel)
            except DeviceError:
                continue

    def measure(self, batch: Sequence[Candidate], left_s: Callable[[], float], kept_s: float = 0.0) -> int:
        """Prepare a batch, as much of it as there is time and patience for, and time it; returns how many were tried.

        Args:
            batch: most wanted first.
            left_s: seconds that there are.
            kept_s: of these to be left, or more where rounds over all the kernels will take more.
        """
        ready: dict[str, Prepared] = {}
        waiting = list(batch)
        began, patience_s = self._clock(), max(PATIENCE * left_s(), LEAST_PATIENCE_S)
        while waiting and (not ready or self._clock() - began < patience_s):
            spare_s = left_s() - max(kept_s, self.missing_s(len(ready) + LEAST_TOGETHER))
            together = min(max(int(CHUNK_S / self._each_s), LEAST_TOGETHER), MOST_TOGETHER)
            count = min(together, int(spare_s / (MARGIN * self._each_s)))
            if count < 1:
                break
            chunk, waiting = waiting[:count], waiting[count:]
            begin = self._clock()
            new = self._prepare(chunk)
            self._each_s += 0.5 * ((self._clock() - begin) / len(chunk) - self._each_s)
            self._prepared |= new
            ready |= new
            # At once: what is not timed yet is lost with an interruption. The first time tells what a round takes.
            self._round(list(new), refill=not self._round_s)
        self._round([key for key in ready if not self._slow(key)])
        return len(batch) - len(waiting)

    def _prepare(self, chunk: Sequence[Candidate]) -> dict[str, Prepared]:
        ready = {}
        if self._journal:
            self._journal.trying([c.kernel.key for c in chunk])
        self._bench.build([c.kernel for c in chunk])
        for candidate in chunk:
            kernel = candidate.kernel
            try:
                ready[kernel.key] = self._bench.prepare(kernel)
            except DeviceError as error:
                self._refuse(kernel.key, str(error))
                continue
            counts = tuple(float(f"{v:.8g}") for v in candidate.features)
            entry = Entry(kernel.variant.label, spec_text(kernel.spec), counts, layouts_text(kernel))
            self.entries[kernel.key] = entry
            if self._journal:
                self._journal.kernel(kernel.key, entry)
        if self._journal:
            self._journal.trying(())
        return ready

    def _refuse(self, key: str, message: str) -> None:
        self.refused.append(message)
        self._unwanted.add(key)
        if self._journal:
            self._journal.refused(message)

    def close(self) -> None:
        """Let go of kernels and their regions before the arenas they lie in: some drivers crash the other way round."""
        for held in (self._prepared, self._anchors):
            while held:
                held.popitem()
        self._bench.close()

    # ---- timing ---------------------------------------------------------------------------------------------------

    def again(self, left_s: float) -> bool:
        """More rounds over the kernels that need them, as many as there is time for; whether there was any.

        Those with the fewest repetitions come first. Judging which need more takes no longer than timing them: quick
        rounds are repeated before it is asked again.
        """
        begin = self._clock()
        chosen = self._next(left_s)
        judged = self._clock()
        for number in range(MOST_AT_ONCE if chosen else 0):
            taken = self._clock() - judged
            if number and taken > min(judged - begin, (left_s - (judged - begin)) * number / (number + 1) / MARGIN):
                break
            self._round(chosen, refill=not number)
        return bool(chosen)

    def _next(self, left_s: float) -> list[str]:
        """Kernels of the next round, in the order they were prepared."""
        counts = {key: s.repetitions for key, s in self.settled().items()}
        chosen: set[str] = set()
        seconds = self._round_s
        for key in sorted(self.loose(), key=lambda k: counts.get(k, 0)):
            seconds += self._kernel_s(key)
            if MARGIN * seconds > left_s:
                break
            chosen.add(key)
        return [key for key in self._prepared if key in chosen]

    def _round(self, keys: Sequence[str], refill: bool = True) -> None:
        """Time kernels once, in segments with anchors in each; every second round runs backwards.

        What is written is filled with random numbers first, or was lately: that may take longer than the kernels, and
        those that update their operands may do so a few times over.
        """
        order = list(keys)[::-1] if self._backwards else list(keys)
        self._backwards = not self._backwards
        size = SEGMENT[self._kind]
        for first in range(0, len(order), size):
            segment = {key: self._prepared[key] for key in order[first : first + size]}
            begin = self._clock()
            times = self._bench.round(self._anchors | segment, refill=refill and not first)
            end = self._clock()
            done = Round(
                round(end - self._begin_s, 3),
                {key: ns for key, ns in times.items() if key in segment},
                {name: ns for name, ns in times.items() if name not in segment},
                self._number,
            )
            self._rounds.append(done)
            if self._journal:
                self._journal.round(done)
            if refill and not first:  # the first segment's overhead is that of a round
                self._round_s = max(end - begin - sum(times.values()) / 1e9, self._round_s / 2)

    def _kernel_s(self, key: str) -> float:
        return self.settled()[key].ns / 1e9 if key in self.settled() else 1e-3

    # ---- what is known --------------------------------------------------------------------------------------------

    def knows(self, key: str) -> bool:
        """Whether a kernel was measured, now or in an earlier session or model."""
        return key in self.entries or key in self._known

    def wants(self, key: str) -> bool:
        """Whether a kernel is to be prepared: it is new, or known too loosely from before an interruption.

        A kernel that the driver refused or did not survive is not wanted.
        """
        return (
            key not in self._unwanted and key not in self._prepared and (not self.knows(key) or key in self.unsettled())
        )

    def known(self) -> set[str]:
        """Keys of everything that was measured, now or before."""
        return self.entries.keys() | self._known.keys()

    def settled(self) -> dict[str, Settled]:
        """What the repetitions so far come to."""
        if self._settled[0] != len(self._rounds):
            self._settled = len(self._rounds), settle(self._rounds)
        return self._settled[1]

    def _slow(self, key: str) -> bool:
        settled = self.settled()
        return key in settled and settled[key].ns > self._slow_ns

    def loose(self) -> list[str]:
        """Prepared kernels that need more rounds."""
        settled = self.settled()
        return [
            key
            for key in self._prepared
            if key not in settled
            or (
                settled[key].repetitions < MOST_ROUNDS
                and not settled[key].tight(self._tolerance)
                and not self._slow(key)
            )
        ]

    def unsettled(self) -> set[str]:
        """Kernels, prepared here or not, whose repetitions are too few or too far apart."""
        settled = self.settled()
        return {key for key in self.entries if key not in settled or not settled[key].tight(self._tolerance)}

    def tight(self) -> int:
        """How many kernels need no more rounds."""
        return len(self.entries) - len(self.unsettled())

    def describe_tight(self) -> str:
        """What ``tight`` is out of, in words."""
        return (
            f"of {len(self.entries)} kernels: median within {self._tolerance:.2g} of itself ({CONFIDENCE:.0%} interval "
            "from order statistics)"
        )

    def missing_s(self, extra: int = 0) -> float:
        """Seconds of the rounds that are missing until every kernel, and some more, has its least repetitions."""
        settled = self.settled()
        lacking = {key: LEAST_ROUNDS - settled[key].repetitions for key in self._prepared if key in settled}
        lacking = {key: count for key, count in lacking.items() if count > 0 and not self._slow(key)}
        typical_s = sum(min(s.ns, self._slow_ns) for s in settled.values()) / 1e9 / max(len(settled), 1)
        rounds = LEAST_ROUNDS if extra else max(lacking.values(), default=0)
        seconds = sum(count * self._kernel_s(key) for key, count in lacking.items())
        return MARGIN * (seconds + extra * LEAST_ROUNDS * typical_s + rounds * self._round_s)

    def drift(self) -> Drift:
        """How the device's speed moved."""
        return drift_of(self._rounds)

    def anchors(self) -> dict[str, Probe]:
        """The anchors' raw times, by the name that they have in a model."""
        names = sorted({name for r in self._rounds for name in r.anchors_ns})
        return {
            f"anchor_{n}": Probe(
                "the same kernel in every round",
                1.0,
                "runs",
                tuple(r.anchors_ns[n] for r in self._rounds if n in r.anchors_ns),
            )
            for n in names
        }

    def records(self) -> dict[str, Measurement]:
        """All measurements, by key; a kernel of which no round ended is none."""
        settled = self.settled()
        times: dict[str, list[int]] = {}
        for done in self._rounds:
            for key, ns in done.times_ns.items():
                times.setdefault(key, []).append(ns)
        return self._known | {
            key: Measurement(
                variant=entry.variant,
                spec=entry.spec,
                rounds_ns=tuple(times[key]),
                features=entry.features,
                held_out=is_held_out(key, self._seed),
                ns=settled[key].ns,
                layouts=entry.layouts,
            )
            for key, entry in sorted(self.entries.items())
            if key in times
        }
