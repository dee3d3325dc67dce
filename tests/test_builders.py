"""Compiling in worker processes: the same programs, whatever happens to a worker."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from kernels import builders
from kernels.builders import Builders, worker_count
from kernels.runtime import Runtime, devices
from layoutopt.errors import DeviceError

GOOD = [f"__kernel void fill(__global float *x) {{ x[get_global_id(0)] = {i}; }}" for i in range(7)]
BAD = "__kernel void fill( {"


@pytest.fixture(name="runtime", params=range(len(devices())), ids=[d.short for d in devices()])
def _runtime(request: pytest.FixtureRequest) -> Runtime:
    return Runtime(devices()[request.param])


@pytest.fixture(name="workers")
def _workers(runtime: Runtime):
    made = Builders(runtime.info.index, 2)
    yield made
    made.close()


def filled(runtime: Runtime, source: str) -> list[float]:
    """What a kernel writes into four elements."""
    kernel, buffer = runtime.kernel(source, "fill", "test.fill"), runtime.allocate(16)
    kernel.set_args(buffer)
    runtime.enqueue([(kernel, (4,), (1,))])
    return runtime.download(buffer, np.empty(4, np.float32)).tolist()


def test_prepare_loads_what_workers_compiled(runtime: Runtime, workers: Builders, monkeypatch):
    fresh = Runtime(runtime.info)
    fresh._builders = workers
    monkeypatch.setattr(Runtime, "_compile", None)  # nothing is compiled here
    fresh.prepare([(source, "test.fill") for source in GOOD])
    assert [filled(fresh, source) for source in GOOD] == [[float(i)] * 4 for i in range(7)]


def test_what_does_not_build_is_named_by_the_parent(runtime: Runtime, workers: Builders):
    fresh = Runtime(runtime.info)
    fresh._builders = workers
    with pytest.raises(DeviceError, match=r"test\.bad"):
        fresh.prepare([*((source, "test.fill") for source in GOOD), (BAD, "test.bad")])
    assert filled(fresh, GOOD[5]) == [5.0] * 4


def test_binaries_come_in_order_and_none_where_a_source_is_wrong(workers: Builders):
    binaries = workers.build([GOOD[0], BAD, GOOD[1]])
    assert [b is not None and len(b) > 0 for b in binaries] == [True, False, True]
    assert binaries[0] != binaries[2]


def test_a_dead_worker_costs_its_program_at_most(workers: Builders):
    workers.build(GOOD)
    first, second = workers._workers
    first.kill()  # not waited for: its death may show only when it is asked
    assert sum(b is None for b in workers.build(GOOD)) <= 1
    second.kill()
    second.wait()
    assert all(workers.build(GOOD))


def test_no_worker_can_be_started(runtime: Runtime, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(builders.subprocess, "Popen", refuse)
    assert Builders(runtime.info.index, 4).build(GOOD) == [None] * 7


def test_workers_end_when_closed(runtime: Runtime):
    made = Builders(runtime.info.index, 2)
    made.build(GOOD)
    processes = list(made._workers)
    made.close()
    assert len(processes) == 2
    assert all(p.poll() is not None for p in processes)


def test_an_idle_worker_ends(runtime: Runtime, monkeypatch):
    monkeypatch.setattr(builders, "IDLE_S", 0.05)
    reading, writing = os.pipe()  # nobody writes, nobody closes
    answers = io.StringIO()
    with os.fdopen(reading) as requests:
        builders.serve(runtime.info.index, requests, answers)
    os.close(writing)
    assert answers.getvalue() == ""


def test_a_worker_answers_line_by_line(runtime: Runtime):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as lines:
        lines.write(json.dumps({"source": BAD}) + "\n")
    answers = io.StringIO()
    with os.fdopen(reading) as requests:
        builders.serve(runtime.info.index, requests, answers)
    assert "error" in json.loads(answers.getvalue())


def test_workers_by_cores_memory_and_wish(runtime: Runtime, monkeypatch):
    limits = replace(runtime.limits, global_mem_bytes=64 << 30)
    monkeypatch.delenv(builders.WORKERS_ENV, raising=False)
    monkeypatch.setattr(builders.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert worker_count(limits) == builders.MOST_WORKERS
    assert worker_count(replace(limits, global_mem_bytes=8 << 30)) == 2
    monkeypatch.setattr(builders.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert worker_count(limits) == 1
    monkeypatch.setenv(builders.WORKERS_ENV, "5")
    assert worker_count(limits) == 5
