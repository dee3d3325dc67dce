"""Reuse distances against closed forms, against a list in plain Python, and against simulated caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import device as device_models
from costmodel.device import CacheLevel
from layoutopt.models import shipped
from simulator.cache import Hierarchy, Level, run_lines
from simulator.reuse import Distances, Histogram, bounds
from simulator.reuse_step import coalesced, reuse_distances
from simulator.simulate import simulate
from simulator.trace import Stream
from tests.plans import naive_plan, r_tile

LINE = 64


def histogram(lines: list[int] | np.ndarray, pieces: int = 1) -> Histogram:
    found = Distances(LINE)
    for piece in np.array_split(np.array(lines, dtype=np.int64), pieces):
        found.feed(piece, np.zeros(piece.size, dtype=np.int64))
    return found.histogram()


def slow(lines: list[int]) -> tuple[int, dict[int, int]]:
    """First touches and accesses by distance, with a list as the stack."""
    stack: list[int] = []
    first, found = 0, {}
    for line in lines:
        if line in stack:
            distance = len(stack) - 1 - stack.index(line)
            found[distance] = found.get(distance, 0) + 1
            stack.remove(line)
        else:
            first += 1
        stack.append(line)
    return first, found


def bucketed(by_distance: dict[int, int]) -> tuple[float, ...]:
    counts = [0.0] * 20
    for distance, count in by_distance.items():
        counts[distance.bit_length()] += count
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


class TestClosedForms:
    def test_a_stream_is_first_touches_alone(self) -> None:
        assert histogram(np.arange(1000)) == Histogram(LINE, 1000, ())

    def test_a_line_again_and_again_has_distance_zero(self) -> None:
        assert histogram([7] * 50) == Histogram(LINE, 1, (49,))

    def test_rounds_over_n_lines_have_distance_n_less_one(self) -> None:
        found = histogram(np.tile(np.arange(100), 5))
        assert found == Histogram(LINE, 100, (0, 0, 0, 0, 0, 0, 0, 400))
        assert bounds(7) == (64, 128)
        assert found.misses(64) == 500
        assert found.misses(128) == 100

    def test_there_and_back(self) -> None:
        """0 … n-1 and back: line n-1-d comes back at distance d."""
        found = histogram([*range(64), *reversed(range(64))])
        assert found == Histogram(LINE, 64, (1, 1, 2, 4, 8, 16, 32))

    def test_more_lines_than_the_first_tables_hold(self) -> None:
        rounds = np.tile(np.arange(30_000) * 977, 3)
        found = histogram(rounds, pieces=7)
        assert found.first_touches == 30_000
        assert found.counts == (*[0.0] * 15, 60_000.0)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=300), st.integers(1, 5))
def test_random_streams_match_a_list(lines: list[int], pieces: int) -> None:
    found = histogram(lines, pieces)
    first, by_distance = slow(lines)
    assert (found.first_touches, found.counts) == (first, bucketed(by_distance))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 16, 64, 256]), st.sampled_from([20, 300, 5000]))
def test_misses_are_those_of_a_fully_associative_cache(seed: int, ways: int, among: int) -> None:
    trace = np.random.default_rng(seed).zipf(1.3, 4000) % among
    counts = np.zeros(4, dtype=np.int64)
    state = Hierarchy((Level("L1", ways * LINE, LINE, ways),)).state()
    run_lines(state, 0, trace * LINE, np.zeros(trace.size, dtype=np.bool_), counts)
    assert histogram(trace, 3).misses(ways) == counts[1]


def test_rows_share_one_stack_and_weigh() -> None:
    found = Distances(LINE)
    found.feed(np.array([1, 2, 1, 2]), np.array([0, 1, 0, 1]))
    found.feed(np.array([3, 1]), np.array([2, 0]), weight=5.0)
    names = found.histograms({"a": 0, "b": 1, "c": 2, "none": 3})
    assert names["a"] == Histogram(LINE, 1, (0, 1, 5))
    assert names["b"] == Histogram(LINE, 1, (0, 1))
    assert names["c"] == Histogram(LINE, 5, ())
    assert names["none"] == Histogram(LINE, 0, ())
    assert found.histogram().accesses == sum(h.accesses for h in names.values())


def test_misses_between_powers_of_two_are_interpolated() -> None:
    found = Histogram(LINE, 10, (5, 0, 0, 8))  # eight in [4, 8)
    assert [found.misses(n) for n in (0, 1, 4, 6, 8)] == pytest.approx([23, 18, 18, 14, 10])


class TestStep:
    @pytest.mark.parametrize("device", ["generic-cpu", "immortalis-g925"])
    def test_a_whole_step_against_a_cache_that_is_fully_associative(self, device: str) -> None:
        """Walked by the simulator and written down access by access: the same lines, the same misses."""
        lines = 256
        cache = CacheLevel("L1", lines * LINE, LINE, lines, shared=True)
        model = replace(device_models.load(device), caches=(cache,))
        graph = shipped("vit-digits")
        plan = naive_plan(graph, model.limits, r_tile)
        found = reuse_distances(graph, plan, model, max_accesses=float("inf"))
        report = simulate(graph, plan, model, max_accesses=float("inf"), repeats=0)
        assert found.walked == 1.0
        assert found.total.accesses == report.total.lines
        assert found.total.misses(lines) == report.total.misses[0]
        for name, counts in report.by_tensor.items():
            assert found.by_tensor[name].misses(lines) == counts.misses[0], name

    def test_long_launches_are_cut_and_count_for_the_rest(self) -> None:
        model, graph = device_models.load("immortalis-g925"), shipped("vit-digits")
        plan = naive_plan(graph, model.limits)
        cut = reuse_distances(graph, plan, model, max_accesses=20_000)
        whole = reuse_distances(graph, plan, model, max_accesses=float("inf"))
        assert 0 < cut.walked < 0.7
        assert cut.total.accesses == pytest.approx(whole.total.accesses, rel=0.05)

    def test_lanes_of_a_request_touch_a_line_once_in_order_of_address(self) -> None:
        def of(*records: tuple[int, int, int, int]) -> list[tuple[int, int]]:
            operand, offset, width, request = (np.array(x) for x in zip(*records, strict=True))
            none = np.zeros_like(operand)
            stream = Stream(none, none, operand, offset, width, none == 1, request)
            lines, operands = coalesced(stream, np.array([0, 1 << 20]), np.array([4, 2]), LINE)
            return list(zip((lines - operands * (1 << 14)).tolist(), operands.tolist(), strict=True))

        lanes = [(0, 8 * lane, 1, 5) for lane in (3, 0, 1, 2)]
        assert of(*lanes) == [(0, 0), (1, 0)]
        assert of(*lanes, *[(0, 0, 1, 6)] * 4) == [(0, 0), (1, 0), (0, 0)]
        assert of((1, 30, 4, 0)) == [(0, 1), (1, 1)]  # halves over the end of a line
