"""A step's report: its sums, its samples and their error, what skipped work groups leave, plans side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import device as device_models
from costmodel.device import DeviceModel
from kernels.nest import Loop, Nest, Phase, at, index
from kernels.spec import Kernel, Launch
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from simulator.counts import Counts, Estimate
from simulator.report import print_report, ratios, sources
from simulator.sampling import (
    Sampling,
    chosen_members,
    extrapolated,
    guessed_member,
    planned_stretches,
    spread_classes,
)
from simulator.simulate import CacheReport, simulate
from simulator.warming import box_lines, latest, touched
from tests.graphs import linear_step
from tests.plans import naive_plan, r_tile
from tests.test_simulator import kernel_of

LINE = 64


@pytest.fixture(scope="module")
def model() -> DeviceModel:
    """A phone's caches, small ones, so that small graphs miss."""
    return small("immortalis-g925")


def small(device: str, by: int = 16) -> DeviceModel:
    """A device with caches of a part of their size, and no images."""
    found = device_models.load(device)
    caches = tuple(replace(c, size_bytes=c.size_bytes // by) for c in found.caches)
    return replace(found, caches=caches, limits=replace(found.limits, image_support=False))


@pytest.fixture(scope="module")
def digits() -> TrainingGraph:
    return shipped("vit-digits")


@pytest.fixture(scope="module")
def plan(digits: TrainingGraph, model: DeviceModel) -> Plan:
    return naive_plan(digits, model.limits)


@pytest.fixture(scope="module")
def full(digits: TrainingGraph, plan: Plan, model: DeviceModel) -> CacheReport:
    return simulate(digits, plan, model, max_accesses=float("inf"), repeats=0)


def values(report: CacheReport) -> tuple[float, ...]:
    """Misses of each level, bytes read and written."""
    return (*report.total.misses, report.total.memory_read_bytes, report.total.memory_written_bytes)


class TestReport:
    def test_every_grouping_adds_up(self, model: DeviceModel) -> None:
        graph = run_passes(linear_step())[0]
        report = simulate(graph, naive_plan(graph, model.limits, r_tile, relayouts_share=1.0), model)
        assert report.walked == 1.0
        assert {one.kind for one in report.operands} >= {"contraction", "relayout"}
        groups = report.by_step, report.by_tensor, report.by_phase, dict(enumerate(report.operands))
        for group in groups:
            counts = [getattr(c, "counts", c) for c in group.values()]
            assert sum(c.lines for c in counts) == report.total.lines
            for level in range(len(report.levels)):
                assert sum(c.misses[level] for c in counts) == report.total.misses[level]
        assert not any(report.total.misses_95)
        assert list(report.by_phase) == [p for p in ("forward", "loss", "backward", "update") if p in report.by_phase]

    def test_what_is_behind_the_misses(self, full: CacheReport, capsys: pytest.CaptureFixture[str]) -> None:
        """Rows of memory, lines and sectors, write-backs: counted per op and tensor, and adding up."""
        total = full.total
        assert all(lines <= misses for lines, misses in zip(total.line_misses, total.misses, strict=True))
        assert total.write_backs[0] == 0.0, "nothing is nearer than the first level"
        assert total.write_backs[-1] > 0
        line = LINE
        # Each access to memory is one line: fetched, or written back.
        assert total.row_hits + total.row_misses == total.memory_bytes / line
        assert total.row_hits > 0
        for group in (full.by_step, full.by_tensor, full.by_phase):
            assert sum(c.row_hits for c in group.values()) == total.row_hits
            assert sum(c.write_backs[-1] for c in group.values()) == total.write_backs[-1]
        print_report(full, 3)
        printed = capsys.readouterr().out
        assert "L2 write-backs" in printed
        assert "open row %" in printed

    def test_sources_are_merged_over_repeated_blocks_and_ranked(self, digits, plan, model) -> None:
        report = simulate(digits, plan, model)
        found = sources(report)
        misses = [one.misses[-1] for one in found]
        assert misses == sorted(misses, reverse=True)
        assert sum(misses) == pytest.approx(report.total.misses[-1])
        assert sum(one.share for one in found) == pytest.approx(1.0)
        assert max(one.times for one in found) >= 3

    def test_ratios_are_over_the_first(self, digits, plan, model) -> None:
        first = simulate(digits, plan, model)
        assert set(ratios(first, first).values()) == {1.0}
        tiled = simulate(digits, naive_plan(digits, model.limits, r_tile), model)
        found = ratios(tiled, first)
        assert found["L2 misses"] == pytest.approx(tiled.total.misses[-1] / first.total.misses[-1])


class TestStretches:
    @settings(deadline=None, max_examples=200)
    @given(st.integers(1, 5000), st.floats(0.5, 5000), st.integers(1, 132), st.integers(0, 9))
    def test_they_stand_for_every_group_once(self, groups, budget, unit, seed) -> None:
        found = planned_stretches(groups, budget, unit, np.random.default_rng(seed))
        assert sum((s.last - s.first) * s.scale for s in found) == pytest.approx(groups)
        at_group = 0
        for s in found:
            assert at_group <= s.run_up <= s.first < s.last <= groups
            at_group = s.last
        walked = sum(s.last - s.run_up for s in found)
        assert len(found) == 1 or walked < groups

    def test_equal_groups_are_extrapolated_without_error(self) -> None:
        head, one = np.full((2, 4), 3.0), np.full((2, 4), 5.0)
        found = extrapolated(head, [one] * 4, [10.0] * 4, 0.1)
        np.testing.assert_allclose(found.counts, 3 + 4 * 10 * 5)
        assert not found.variance.value.any()
        assert not found.total_variance.half_95.any()

    def test_nine_in_ten_intervals_hold_the_truth(self) -> None:
        """Groups of random cost: the intervals are as wide as they should be, neither useless nor too narrow."""
        rng = np.random.default_rng(11)
        inside = widths = 0.0
        for seed in range(300):
            cost = rng.gamma(2.0, 50.0, 1000)
            head, *stretches = planned_stretches(1000, 200, 1, np.random.default_rng(seed))

            def of(s, cost=cost):
                return cost[s.first : s.last].sum().reshape(1, 1)

            found = extrapolated(of(head), [of(s) for s in stretches], [s.scale for s in stretches], 0.2)
            half = found.total_variance.half_95[0]
            inside += abs(found.counts[0, 0] - cost.sum()) <= half
            widths += half / cost.sum()
        assert 0.9 <= inside / 300 <= 0.99
        assert widths / 300 < 0.25


class TestEqualSteps:
    def test_of_a_repeated_block_whole_copies_are_simulated(self) -> None:
        keys = [*("in",), *("a", "b", "c") * 12, *("out",)]
        chosen = chosen_members(keys, 3, 5)
        assert chosen[0]
        assert chosen[-1]
        blocks = [tuple(chosen[1 + 3 * i : 4 + 3 * i]) for i in range(12)]
        assert set(blocks) == {(True,) * 3, (False,) * 3}
        assert blocks.count((True,) * 3) == 3
        assert all(chosen_members(keys, 0, 5))

    def test_a_class_that_is_all_simulated_has_no_error_of_its_own(self) -> None:
        parts = [Estimate.exact(np.full((2, 3), v)) for v in (1, 5)]
        assert not spread_classes([(parts, 2)], 3).value.any()
        np.testing.assert_allclose(guessed_member(parts).counts, 3.0)
        # Totals of 2 and 10 over two operands: variance 32; n (n - m) / m of it, of one degree of freedom.
        variance = spread_classes([(parts, 10)], 3)
        np.testing.assert_allclose(variance.value, 10 * 8 / 2 * 32)
        np.testing.assert_allclose(variance.half_95, 12.706 * variance.value**0.5)

    def test_copies_of_a_block_are_compared_as_wholes_where_that_is_wider(self) -> None:
        one, other = ([Estimate.exact(np.full((1, 3), v)) for v in values] for values in ((1, 5, 3), (5, 1, 3)))
        alone = spread_classes([(one, 9)], 3)
        # Classes that vary alike: copies that differ by twice as much.
        np.testing.assert_allclose(spread_classes([(one, 9), (one, 9)], 3).value, 4 * alone.value)
        # What one step of a copy has more another has less: as if they were drawn apart.
        apart = spread_classes([(one, 9), (other, 9)], 3)
        np.testing.assert_allclose(apart.value, 2 * alone.value)
        np.testing.assert_allclose(apart.half_95, 2.776 * apart.value**0.5)  # four degrees of freedom

    def test_too_few_to_tell_the_error_are_refused(self) -> None:
        with pytest.raises(LayoutOptError, match="at least 2 steps"):
            Sampling(repeats=1)


class TestSampledStep:
    """The full step against its sample: a small model, so that both take a second."""

    def test_repeated_steps(self, digits, plan, model, full) -> None:
        found = simulate(digits, plan, model, max_accesses=float("inf"))
        assert found.steps_walked < len(found.by_step)
        assert found.walked < 1.0
        for own, true in zip(found.total.misses, full.total.misses, strict=True):
            assert own == pytest.approx(true, rel=0.03)
        assert found.total.accesses == pytest.approx(full.total.accesses)

    def test_work_groups(self, digits, plan, model, full) -> None:
        found = simulate(digits, plan, model, max_accesses=20_000, repeats=0)
        assert found.steps_walked == len(found.by_step)
        assert found.walked < 0.8
        assert all(half > 0 for half in found.total.misses_95)
        for own, true in zip(found.total.misses, full.total.misses, strict=True):
            assert own == pytest.approx(true, rel=0.05)

    def test_nine_in_ten_stated_intervals_hold_the_full_count(self, digits: TrainingGraph) -> None:
        held: list[bool] = []
        for name, make in (("immortalis-g925", None), ("immortalis-g925", r_tile), ("adreno-740", r_tile)):
            device = small(name, 1)
            made = naive_plan(digits, device.limits, make) if make else naive_plan(digits, device.limits)
            full = values(simulate(digits, made, device, max_accesses=float("inf"), repeats=0))
            for seed in range(3):
                for most in (200_000, float("inf")):
                    own = simulate(digits, made, device, max_accesses=most, seed=seed)
                    halves = (*own.total.misses_95, own.total.memory_read_95, own.total.memory_written_95)
                    held += [abs(v - t) <= half for v, t, half in zip(values(own), full, halves, strict=True)]
        assert np.mean(held) >= 0.9

    def test_written_bytes_are_those_of_all_that_was_stored(self, digits: TrainingGraph, model: DeviceModel) -> None:
        """What steps write that are skipped was stored by others: no less of it for that."""
        device = small("immortalis-g925", 4)  # the cache holds what several steps store
        made = naive_plan(digits, device.limits)
        full = simulate(digits, made, device, max_accesses=float("inf"), repeats=0).total.memory_written_bytes
        found = [
            simulate(digits, made, device, max_accesses=float("inf"), seed=seed).total.memory_written_bytes
            for seed in range(3)
        ]
        assert found == pytest.approx([full] * 3, rel=0.02)

    def test_the_seed_is_all_that_a_sample_depends_on(self, digits, plan, model) -> None:
        one, two, other = (simulate(digits, plan, model, max_accesses=20_000, seed=s) for s in (1, 1, 2))
        assert one == two
        assert one.total != other.total

    def test_a_tensor_row_says_its_own_error(self, digits, plan, model) -> None:
        found = simulate(digits, plan, model, max_accesses=20_000)
        widest = max(found.by_tensor.values(), key=lambda c: c.misses_95[-1])
        assert 0 < widest.misses_95[-1] < found.total.misses[-1]


class TestWarming:
    grid = (Loop("m", 4, "group"), Loop("n", 6, "group"), Loop("l", 2, "item"))

    def kernel(self) -> tuple[Kernel, Launch]:
        """A product's groups: 8 x 8 tiles of C, a row of A and a column of B each."""
        accesses = (
            at(0, index(m=8, i=1), index(k=1), width=1, axis=1),
            at(1, index(k=1), index(n=8, j=1)),
            at(2, index(m=8, i=1), index(n=8, j=1), write=True, depth=2),
        )
        nest = Nest(self.grid, (Phase((Loop("i", 8), Loop("j", 8), Loop("k", 5)), accesses),))
        layouts = (Layout.row_major((32, 5)), Layout.r_tile((5, 48), 4, 4), Layout.row_major((32, 48)))
        return kernel_of(layouts, nest)

    def elements(self, kernel: Kernel, first: int, last: int) -> dict[int, set[int]]:
        """Lines that groups touch, by brute force."""
        out: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        offsets = [layout.offsets().reshape(layout.shape) for layout in kernel.layouts]
        for group in range(first, last):
            m, n = divmod(group, 6)
            out[0] |= set((offsets[0][8 * m : 8 * m + 8] * 4 // LINE).ravel())
            out[1] |= set((offsets[1][:, 8 * n : 8 * n + 8] * 4 // LINE).ravel())
            out[2] |= set((offsets[2][8 * m : 8 * m + 8, 8 * n : 8 * n + 8] * 4 // LINE).ravel())
        return out

    @pytest.mark.parametrize(("first", "last"), [(0, 24), (0, 1), (7, 8), (4, 9), (2, 20), (6, 12), (3, 24), (5, 7)])
    def test_boxes_hold_the_lines_that_groups_touch(self, first: int, last: int) -> None:
        kernel, launch = self.kernel()
        found: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        for box in touched(kernel, launch, first, last, LINE):
            found[box.operand] |= set(box_lines(box, 10**6) // LINE)
            assert box.write == (box.operand == 2)
        assert found == self.elements(kernel, first, last)

    def test_the_latest_fill_the_cache_and_no_more(self) -> None:
        kernel, launch = self.kernel()
        few, many = (latest(kernel, launch, 0, 24, lines, LINE) for lines in (1, 10**6))
        last_tile = {box.operand: set(box_lines(box, 10**6) // LINE) for box in few}
        assert last_tile == self.elements(kernel, 23, 24)
        assert sum(box.lines for box in many) > sum(box.lines for box in few)

    def test_a_box_is_cut_to_its_latest_lines(self) -> None:
        kernel, launch = self.kernel()
        (box,) = [box for box in touched(kernel, launch, 0, 24, LINE) if box.operand == 2]
        whole, part = box_lines(box, 10**6), box_lines(box, 24)
        assert part.size <= 24 < whole.size
        assert set(part) <= set(whole)
        assert part.max() == whole.max()


def test_counts_of_nothing_sampled_are_certain() -> None:
    counts = Counts.of(np.arange(17))
    assert counts.misses_95 == (0.0, 0.0)
    assert (counts.hits, counts.misses, counts.memory_bytes) == ((3.0, 5.0), (4.0, 6.0), 15.0)
    assert (counts.row_hits, counts.row_misses) == (9.0, 10.0)
    assert (counts.line_misses, counts.write_backs) == ((11.0, 14.0), (12.0, 15.0))
