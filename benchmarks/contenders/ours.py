"""layoutopt as a contender: a captured graph and a plan, run by ``kernels.execute.Executor``. Imports no torch."""

from __future__ import annotations

import statistics
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.wire import forget_peak, resident_bytes, serve
from benchmarks.works import LR, WORKS, batches
from kernels.execute import Executor
from kernels.runtime import Runtime, pick
from layoutopt import graphfile
from layoutopt import plan as plans
from layoutopt.optimizers import step_values


class Ours:
    """See the module."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._runtime = Runtime(pick(spec["device"]))
        graph, plan = graphfile.load(spec["graph"]), plans.load(Path(spec["plan"]))
        self._before = resident_bytes()
        with np.load(spec["weights"]) as stored:
            start = {name: stored[name] for name in stored.files}
        self.executor = Executor(self._runtime, graph, plan, start)
        del start
        self._graph, self._arena_bytes, self._number = graph, plan.arena_bytes, 0
        names = {t.name for t in graph.by_role("input")}
        given = [{k: v for k, v in batch.items() if k in names} for batch in batches(WORKS[spec["work"]])]
        self._given = cycle(given)
        self._input_bytes = sum(v.nbytes for v in given[0].values())

    def _step(self) -> None:
        self._number += 1
        self.executor.step(next(self._given) | step_values(self._graph, self._number, LR))

    def losses(self, count: int) -> list[float]:
        """Step by step."""
        found = []
        for _ in range(count):
            self._step()
            found.append(self.executor.loss())
        return found

    def burst(self, count: int) -> float:
        """Inputs are checked and uploaded at each step."""
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        self.executor.finish()
        return time.perf_counter() - begin

    def steady(self) -> None:
        """Peaks count from here."""
        self._forgot = forget_peak()

    def report(self) -> dict[str, Any]:
        """Memory first: profiling takes some of its own."""
        peak = resident_bytes(peak=True) - self._before
        enqueue = []
        for _ in range(7):
            self.executor.finish()
            begin = time.perf_counter()
            self._step()
            enqueue.append(time.perf_counter() - begin)
        self.executor.finish()
        kernels = self.executor.profile(next(self._given) | step_values(self._graph, self._number + 1, LR))
        gpu = self._runtime.limits.kind == "gpu"
        return {
            "peak_bytes": self._arena_bytes if gpu else peak,
            "peak_means": "arena" if gpu else "growth of resident memory over the imports",
            "arena_bytes": self._arena_bytes,
            "host_growth_bytes": peak,
            "launches": self.executor.launches,
            "host_s": statistics.median(enqueue),
            "kernels_s": sum(ns for _, ns in kernels) * 1e-9,
        }


if __name__ == "__main__":
    serve(Ours)
