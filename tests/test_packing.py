"""Packing: exact on small instances, proofs that CP-SAT shares, parts, effort and time limits, real instances."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from benchmarks.packing import made_up, read_instance
from layoutopt import packing
from layoutopt.errors import LayoutOptError
from layoutopt.memory import Buffer, find_overlap, fullest_bytes, pack
from layoutopt.packing import Packing, pack_spans
from layoutopt.packsearch import FAILED, FOUND, STOPPED, search

MINIMALLOC = Path(__file__).resolve().parents[2] / "shared" / "data" / "minimalloc"
PLENTY = 1 << 60

Spans = list[tuple[int, int]]


def live(sizes: list[int], spans: Spans) -> int:
    return max(sum(n for n, (a, b) in zip(sizes, spans, strict=True) if a <= t < b) for t, _ in spans)


def check_apart(sizes: list[int], spans: Spans, found: Packing | tuple[int, ...]) -> None:
    offsets = found.offsets if isinstance(found, Packing) else found
    for i, (a, b) in enumerate(spans):
        assert offsets[i] >= 0
        for j in range(i):
            c, d = spans[j]
            meet = a < d and c < b
            assert not meet or offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]


def fits(sizes: list[int], spans: Spans, capacity: int) -> bool:
    """By trying every offset of every buffer."""
    offsets: list[int] = []

    def go() -> bool:
        i = len(offsets)
        if i == len(sizes):
            return True
        (a, b), size = spans[i], sizes[i]
        rivals = [(at, at + sizes[j]) for j, at in enumerate(offsets) if spans[j][0] < b and a < spans[j][1]]
        for at in range(capacity - size + 1):
            if all(at + size <= low or high <= at for low, high in rivals):
                offsets.append(at)
                if go():
                    return True
                offsets.pop()
        return False

    return go()


def cpsat_fits(sizes: list[int], spans: Spans, capacity: int) -> bool:
    model = cp_model.CpModel()
    times = [model.new_fixed_size_interval_var(a, b - a, "") for a, b in spans]
    places = [model.new_fixed_size_interval_var(model.new_int_var(0, capacity - size, ""), size, "") for size in sizes]
    model.add_no_overlap_2d(times, places)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return status != cp_model.INFEASIBLE


def run(sizes: list[int], spans: Spans, capacity: int, effort: int = PLENTY) -> tuple[int, tuple[int, ...]]:
    lower, upper = (np.array(ends, np.int64) for ends in zip(*spans, strict=True))
    state, offsets, _ = search(np.array(sizes, np.int64), *packing._sections(lower, upper), capacity, effort)
    return state, tuple(int(at) for at in offsets)


@st.composite
def few(draw: st.DrawFn) -> tuple[list[int], Spans]:
    rows = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=7))
    return [n for n, _, _ in rows], [(a, a + length) for _, a, length in rows]


@settings(max_examples=300, deadline=None)
@given(few(), st.integers(-1, 2))
def test_the_search_decides_as_trying_everything_does(instance: tuple[list[int], Spans], above: int) -> None:
    sizes, spans = instance
    capacity = live(sizes, spans) + above
    state, offsets = run(sizes, spans, capacity)
    assert state == (FOUND if fits(sizes, spans, capacity) else FAILED)
    if state == FOUND:
        check_apart(sizes, spans, offsets)
        assert max(at + n for at, n in zip(offsets, sizes, strict=True)) <= capacity


@settings(max_examples=200, deadline=None)
@given(few())
def test_small_instances_are_packed_into_the_least_there_is(instance: tuple[list[int], Spans]) -> None:
    sizes, spans = instance
    least = next(c for c in range(live(sizes, spans), sum(sizes) + 1) if fits(sizes, spans, c))
    found = pack_spans(sizes, spans)
    check_apart(sizes, spans, found)
    assert (found.size, found.bound) == (least, least)


def drawn(seed: int, count: int, steps: int, largest: int) -> tuple[list[int], Spans]:
    rng = random.Random(seed)
    starts = [rng.randrange(steps) for _ in range(count)]
    return [rng.randint(1, largest) for _ in starts], [(a, rng.randint(a + 1, min(a + 7, steps))) for a in starts]


def full(seed: int, steps: int, capacity: int) -> tuple[list[int], Spans]:
    """At every step the capacity is alive to the last unit; often no packing is that tight."""
    rng = random.Random(seed)
    alive = [(0, 2)] * (capacity // 2)
    done = []
    for now in range(1, steps):
        rng.shuffle(alive)
        room = 0
        for first, size in [alive.pop() for _ in range(min(2, len(alive)))]:
            done.append((size, (first, now)))
            room += size
        while room:
            size = rng.randint(1, room)
            alive.append((now, size))
            room -= size
    done += [(size, (first, steps)) for first, size in alive]
    return [size for size, _ in done], [span for _, span in done]


def test_capacities_that_cannot_do_are_refused_as_cpsat_refuses_them() -> None:
    seen = {True: 0, False: 0}
    for seed in range(60):
        sizes, spans = full(seed, 12, 12)
        capacity = live(sizes, spans)
        assert capacity == 12
        possible = cpsat_fits(sizes, spans, capacity)
        state, offsets = run(sizes, spans, capacity)
        assert state == (FOUND if possible else FAILED), seed
        if state == FOUND:
            check_apart(sizes, spans, offsets)
        seen[possible] += 1
    assert min(seen.values()) > 3


def test_the_bound_is_raised_where_the_live_bytes_cannot_be_reached() -> None:
    raised = 0
    for seed in range(60):
        sizes, spans = full(seed, 12, 12)
        found = pack_spans(sizes, spans)
        check_apart(sizes, spans, found)
        assert found.size == found.bound
        if found.size > 12:
            assert not cpsat_fits(sizes, spans, found.size - 1)
            raised += 1
    assert raised > 1


@pytest.mark.parametrize("seed", range(3))
def test_what_was_cut_from_a_square_fills_it_again(seed: int) -> None:
    buffers = made_up(seed, 30, 20, 600)
    arena = pack(buffers, 1)
    assert find_overlap(arena.placed) is None
    assert arena.size_bytes == arena.bound_bytes == 600
    assert arena.proven


def test_parts_are_what_no_buffer_joins() -> None:
    sizes = [5, 7, 2, 3, 4, 1]
    spans = [(0, 9), (0, 9), (0, 3), (2, 4), (4, 6), (5, 9)]
    lower, upper = (np.array(ends, np.int64) for ends in zip(*spans, strict=True))
    offsets = np.zeros(6, np.int64)
    parts = list(packing._parts(np.array(sizes, np.int64), lower, upper, offsets))
    # The first two are alive throughout; the rest falls apart at step 4, each side into one largest set.
    assert parts == []
    check_apart(sizes, spans, tuple(int(at) for at in offsets))
    assert max(at + n for at, n in zip(offsets, sizes, strict=True)) == live(sizes, spans) == 17

    chain = [(2 * i, 2 * i + 3) for i in range(4)] + [(10 + 2 * i, 13 + 2 * i) for i in range(4)]
    lower, upper = (np.array(ends, np.int64) for ends in zip(*chain, strict=True))
    parts = list(packing._parts(np.ones(8, np.int64), lower, upper, np.zeros(8, np.int64)))
    assert sorted(sorted(part.members.tolist()) for part in parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_independent_problems_are_solved_apart() -> None:
    """Side by side, eight squares are no harder than one: none is searched again for another's sake."""
    sizes, spans = [], []
    for i in range(8):
        for b in made_up(i, 25, 20, 600):
            sizes.append(b.size_bytes)
            spans.append((b.first + 20 * i, b.last + 1 + 20 * i))
    found = pack_spans(sizes, spans)
    check_apart(sizes, spans, found)
    assert found.size == found.bound == 600


@settings(max_examples=100, deadline=None)
@given(few(), st.sampled_from([1, 16, 100]))
def test_alignment(instance: tuple[list[int], Spans], align: int) -> None:
    sizes, spans = instance
    buffers = [Buffer(f"b{i}", n, a, b - 1) for i, (n, (a, b)) in enumerate(zip(sizes, spans, strict=True))]
    arena = pack(buffers, align)
    assert all(p.offset_bytes % align == 0 for p in arena.placed)
    assert find_overlap(arena.placed) is None
    assert arena.bound_bytes == fullest_bytes(buffers, align) <= arena.size_bytes
    assert arena.proven


def test_equal_input_gives_equal_offsets_in_any_order() -> None:
    buffers = made_up(3, 30, 20, 600)
    once = pack(buffers, 4)
    random.Random(1).shuffle(buffers)
    assert pack(buffers, 4) == once


def test_a_search_without_effort_stops() -> None:
    sizes, spans = drawn(5, 60, 40, 99)
    assert run(sizes, spans, live(sizes, spans), 100)[0] == STOPPED


@pytest.mark.parametrize("limit_s", [0.0, 0.05])
def test_a_time_limit_leaves_the_best_known(limit_s: float) -> None:
    sizes, spans = drawn(5, 150, 60, 99_999)
    found = pack_spans(sizes, spans, time_limit_s=limit_s)
    check_apart(sizes, spans, found)
    assert live(sizes, spans) <= found.bound <= found.size <= 1.2 * live(sizes, spans)


def test_enough_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, spans = drawn(5, 150, 60, 99_999)
    first = pack_spans(sizes, spans, time_limit_s=0.0)
    monkeypatch.setattr(packing, "search", None)  # called, it would raise
    assert pack_spans(sizes, spans, enough=first.size) == Packing(first.offsets, first.size, first.bound)


def test_nothing_is_packed_into_nothing() -> None:
    assert pack_spans([], []) == Packing((), 0, 0)


def test_an_instance_is_read_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "X.64.csv"
    path.write_text("id,lower,upper,size\na,0,3,32\nb,2,5,32\n")
    assert read_instance(path) == ([Buffer("a", 32, 0, 2), Buffer("b", 32, 2, 4)], 64)
    path.write_text("id,lower,size\na,0,32\n")
    with pytest.raises(LayoutOptError, match="no packing instance"):
        read_instance(path)


@pytest.mark.parametrize("name", ["A", "E"])
def test_hard_instances_are_packed_into_their_capacity(name: str) -> None:
    path = MINIMALLOC / f"{name}.1048576.csv"
    if not path.is_file():
        pytest.skip(f"MiniMalloc's instances are not at {MINIMALLOC}")
    buffers, capacity = read_instance(path)
    arena = pack(buffers, 1, enough_bytes=capacity)
    assert find_overlap(arena.placed) is None
    assert {p.buffer for p in arena.placed} == set(buffers)
    assert max(p.end_bytes for p in arena.placed) == arena.size_bytes <= capacity
