"""Microbenchmarks of memory do what they say: what they leave behind is what numpy makes of the same data."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel import memory_probes
from costmodel.memory_probes import memory_runs
from costmodel.probe_runs import Run, time_runs
from kernels.runtime import Runtime, devices
from layoutopt.probing import cache_lines, probe_facts, probe_rows

SOURCE_BYTES, TARGET_BYTES = 1 << 20, 48 << 20


@pytest.fixture
def runtime(device_index) -> Runtime:
    return Runtime(devices()[device_index])


@pytest.fixture
def launched(runtime) -> dict[str, tuple[Run, np.ndarray]]:
    """Each run once over a target of zeros, and what it left there."""
    source, target = runtime.allocate(SOURCE_BYTES), runtime.allocate(TARGET_BYTES)
    runtime.upload(source, values())
    out = {}
    for run in memory_runs(runtime, source, target):
        runtime.fill(target, 0)
        runtime.enqueue([run.call])
        out[run.name] = run, runtime.download(target, np.empty(TARGET_BYTES // 4, dtype=np.float32))
    return out


def values() -> np.ndarray:
    """Small integers, whose sums are exact."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 8, SOURCE_BYTES // 4).astype(np.float32)


def test_names_and_units(launched, runtime):
    assert {name: run.unit for name, (run, _) in launched.items() if name != "texture_read"} == {
        "local_read": "bytes",
        "atomic_same": "atomics",
        "atomic_apart": "atomics",
        "read_rows_row_major": "bytes",
        "read_columns_row_major": "bytes",
        "read_rows_tiled": "bytes",
        "read_columns_tiled": "bytes",
    }
    assert ("texture_read" in launched) == (runtime.info.image_max_buffer_texels > 0)


def test_every_atomic_is_counted(launched, runtime):
    each = memory_probes.ATOMICS_EACH[runtime.limits.kind]
    run, left = launched["atomic_same"]
    counts = left.view(np.int32)
    assert counts[0] == run.work == each * run.call[1][0]
    assert not counts[1:].any()
    run, left = launched["atomic_apart"]
    counts = left.view(np.int32)[: run.call[1][0] * 16].reshape(-1, 16)
    assert (counts[:, 0] == each).all()
    assert not counts[:, 1:].any()


def test_walks_read_every_value_once(launched):
    side = int((SOURCE_BYTES // 4) ** 0.5)
    matrix = values()[: side * side].reshape(side, side)
    tiles = values()[: side * side].reshape(side // 4, side // 4, 4, 4).transpose(0, 2, 1, 3).reshape(side, side)
    for layout, content in (("row_major", matrix), ("tiled", tiles)):
        for way, lines in (("rows", content), ("columns", content.T)):
            run, left = launched[f"read_{way}_{layout}"]
            items = run.call[1][0]
            parts = items // side
            want = lines.reshape(side, parts, side // parts).sum(axis=2).T.reshape(-1)
            np.testing.assert_array_equal(left[:items], want)
            assert run.work == 4 * side * side


def test_textures_are_read_whole(launched):
    if "texture_read" not in launched:
        pytest.skip("the device has no images over buffers")
    run, left = launched["texture_read"]
    items = run.call[1][0]
    texels = values().reshape(-1, 4)[: int(run.work) // 16]
    want = texels.reshape(-1, items, 4).sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(left[: items * 4].reshape(items, 4), want, rtol=1e-5)


def test_local_memory_is_read_in_full(launched):
    run, left = launched["local_read"]
    items, local = run.call[1][0], run.call[2][0]
    tile = values().reshape(-1, 4)[: memory_probes.TILE_TEXELS].astype(np.float64)
    steps = np.arange(4 * memory_probes.LOCAL_STEPS)
    for me in {0, local - 1}:
        want = tile[(me + steps * local) % memory_probes.TILE_TEXELS].sum(axis=0)
        np.testing.assert_allclose(left[: items * 4].reshape(items, 4)[me], want, rtol=1e-3)


def test_probes_are_told_to_people_and_machines(runtime):
    from dataclasses import replace

    from costmodel.cacheprobe import probe_caches
    from costmodel.caches import chase_facts
    from costmodel.facts import measured_facts

    model = measured_facts(runtime)
    assert cache_lines(model) == [cache_lines(model)[0]], "nothing was chased: nothing is told of it"
    assert "chase" not in cache_lines(model)[0]
    findings = probe_caches(runtime, 0.1, largest_bytes=64 << 10)
    model = replace(model, probes=model.probes | findings.probes, facts=model.facts | chase_facts(findings))
    rows = probe_rows(model)
    assert len(rows) == len(model.probes)
    assert rows[-1][0].startswith("chase_"), "the many come last"
    assert all(told.endswith("ns a load") for name, told, _, _ in rows if name.startswith("chase_"))
    facts = probe_facts(model)
    assert facts["probes"].keys() == model.probes.keys()
    for name, probe in model.probes.items():
        assert facts["probes"][name]["ns_per_unit"] * probe.per_s == pytest.approx(1e9)


def test_rounds_are_kept_in_order_and_compiling_is_not(runtime):
    source, target = runtime.allocate(SOURCE_BYTES), runtime.allocate(TARGET_BYTES)
    runtime.fill(source, 0)
    runs = [run for run in memory_runs(runtime, source, target) if run.name.startswith("atomic")]
    probes = time_runs(runtime, runs, 3)
    assert {name: len(probe.rounds_ns) for name, probe in probes.items()} == {"atomic_same": 3, "atomic_apart": 3}
