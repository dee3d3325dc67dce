"""Every configuration of the cache against the same in plain Python, on random traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layoutopt.errors import LayoutOptError
from simulator.cache import BUFFERS, IMAGES, Hierarchy, Level, run_lines
from simulator.sets import PLAIN
from tests.cache_oracle import Oracle, drive

WAYS = (1, 2, 3, 4, 7, 8, 9, 12, 16, 17)
NAMES = {BUFFERS: "buffer", IMAGES: "image"}


def compiled_counts(hierarchy: Hierarchy, trace: np.ndarray, *, plain: bool = True) -> list[int]:
    state = hierarchy.state()
    if not plain:
        state.geometry[:, PLAIN] = 0
    counts = np.zeros((1, hierarchy.counters), dtype=np.int64)
    drive(state.lines, state.geometry, trace, counts)
    return counts[0].tolist()


def oracle_counts(hierarchy: Hierarchy, trace: np.ndarray) -> list[int]:
    oracle = Oracle(hierarchy)
    for core, address, write, way, _ in trace.tolist():
        oracle.access(core, address, bool(write), NAMES[way])
    return oracle.counters()


def trace_of(seed: int, cores: int, reach: int, length: int = 400) -> np.ndarray:
    """Random accesses, half of them near the one before."""
    draw = np.random.default_rng(seed)
    far = draw.integers(0, reach, length)
    near = np.clip(np.roll(far, 1) + draw.integers(-64, 65, length), 0, reach - 1)
    address = np.where(draw.random(length) < 0.5, far, near)
    way = np.where(draw.random(length) < 0.8, BUFFERS, IMAGES)
    columns = draw.integers(0, cores, length), address, draw.random(length) < draw.random(), way, np.zeros(length)
    return np.stack(columns, axis=1).astype(np.int64)


@st.composite
def usual_level(draw, number: int) -> Level:
    ways, sets = draw(st.sampled_from(WAYS)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    return Level(
        f"L{number}",
        sets * ways * 32,
        32,
        ways,
        shared=number > 1 or draw(st.booleans()),
        serves=draw(st.sampled_from(["all", "all", "buffer", "image"])),
    )


@st.composite
def any_level(draw, number: int, before: Level | None) -> Level:
    line = draw(st.sampled_from([32, 64, 128]))
    sector = draw(st.sampled_from([0, line, line // 2, line // 4]))
    replacement = draw(st.sampled_from(["lru", "fifo", "plru", "random"]))
    inclusion = draw(st.sampled_from(["none", "inclusive", "exclusive"])) if before else "none"
    serves = draw(st.sampled_from(["all", "all", "buffer", "image"]))
    flags = draw(st.sampled_from([True, True, False])), draw(st.booleans()), draw(st.booleans())
    if before:
        line, sector = max(line, before.line_bytes), max(sector or line, before.unit_bytes)
    if inclusion == "exclusive":
        line, sector, serves, flags = before.line_bytes, before.unit_bytes, "all", (True, True, True)
    ways, sets = draw(st.sampled_from(WAYS)), draw(st.sampled_from([1, 2, 3, 4]))
    if replacement == "plru":
        ways = 1 << ways.bit_length() - 1
    return Level(
        f"L{number}",
        sets * ways * line,
        line,
        ways,
        draw(st.booleans()) or bool(before and before.shared),
        serves,
        sector,
        replacement,
        *flags,
        inclusion,
        draw(st.booleans()),
    )


@st.composite
def any_hierarchy(draw) -> Hierarchy:
    levels: list[Level] = []
    for number in range(draw(st.integers(1, 4))):
        levels.append(draw(any_level(number, levels[-1] if levels else None)))
    last = levels[-1]
    if len(levels) > 1 and last.inclusion != "exclusive":
        levels[-1] = replace(last, fetch_bytes=draw(st.sampled_from([0, 0, last.unit_bytes, last.line_bytes])))
    banks = draw(st.sampled_from([0, 1, 3, 4]))
    try:
        return Hierarchy(tuple(levels), draw(st.integers(1, 3)), 512 if banks else 0, banks, draw(st.integers(0, 9)))
    except LayoutOptError:
        assume(False)
        raise


@settings(deadline=None, max_examples=300)
@given(any_hierarchy(), st.integers(0, 10**6), st.sampled_from([1000, 4000, 20000]))
def test_any_hierarchy_counts_as_the_oracle(hierarchy, seed, reach):
    trace = trace_of(seed, hierarchy.cores, reach)
    expected = oracle_counts(hierarchy, trace)
    assert compiled_counts(hierarchy, trace) == expected


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from([1000, 4000, 20000]))
def test_the_fast_case_counts_as_the_general_one_and_the_oracle(data, levels, seed, reach):
    hierarchy = Hierarchy(tuple(data.draw(usual_level(i)) for i in range(levels)), 2, 256, 3)
    assert hierarchy.state().geometry[0, PLAIN]
    trace = trace_of(seed, hierarchy.cores, reach)
    fast = compiled_counts(hierarchy, trace)
    assert fast == compiled_counts(hierarchy, trace, plain=False)
    assert fast == oracle_counts(hierarchy, trace)


def elements_of(seed: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses as arrays are walked, four bytes at a time with jumps now and then, and which are stores."""
    draw = np.random.default_rng(seed)
    steps = np.where(draw.random(600) < 0.05, draw.integers(-reach, reach, 600), 4)
    return np.cumsum(steps) % reach, draw.random(600) < draw.random() * draw.integers(0, 2)


BULK_WAYS = [(8, 16), (12, 16), (4, 16), (3, 5)]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(BULK_WAYS), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from([2000, 20000]))
def test_bulk_counts_as_one_by_one(data, ways, levels, seed, reach):
    """Two, one and three levels, with and without rows, levels that images pass by, all or few counters."""
    shape = [replace(data.draw(usual_level(i)), ways=(*ways, 7)[i]) for i in range(levels)]
    sets = data.draw(st.sampled_from([1, 2, 3, 4]))
    shape = [replace(x, size_bytes=sets * x.ways * (32 << i), line_bytes=32 << i) for i, x in enumerate(shape)]
    banks, wide = data.draw(st.sampled_from([0, 3])), data.draw(st.booleans())
    hierarchy = Hierarchy(tuple(shape), 2, 512 if banks else 0, banks)
    way = data.draw(st.sampled_from([BUFFERS, IMAGES]))
    addresses, stores = elements_of(seed, reach)
    counts = np.zeros(hierarchy.counters if wide else 2 * levels + 2, dtype=np.int64)
    bulk = hierarchy.state()
    run_lines(bulk, 1, addresses, stores, counts, way)
    fill = np.ones_like(addresses)
    trace = np.stack((fill, addresses, stores, fill * way, fill * 0), axis=1).astype(np.int64)
    single, expected = hierarchy.state(), np.zeros((1, counts.size), dtype=np.int64)
    drive(single.lines, single.geometry, trace, expected)
    assert counts.tolist() == expected[0].tolist()
    np.testing.assert_array_equal(bulk.lines, single.lines)


@pytest.mark.parametrize("change", [{"write_back": False}, {"write_allocate": False}, {"fetch_on_write": False}])
def test_loads_of_a_read_only_texture_cache_take_the_fast_way(change):
    texture = replace(Level("texture L1", 512, 32, 4, serves="image"), **change)
    hierarchy = Hierarchy((Level("L1", 512, 32, 4, serves="buffer"), texture, Level("L2", 2048, 64, 4, shared=True)))
    plain = int(hierarchy.state().geometry[0, PLAIN])
    assert plain & BUFFERS
    assert not plain & IMAGES
    trace = trace_of(3, 1, 4000)
    assert compiled_counts(hierarchy, trace) == oracle_counts(hierarchy, trace)
