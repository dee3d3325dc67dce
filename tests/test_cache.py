"""The cache against counts that a person can work out: every policy on a trace short enough, or regular enough."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.device import CacheLevel, DeviceModel, Fact, list_builtin, load
from layoutopt.errors import LayoutOptError
from simulator.cache import IMAGES, Hierarchy, Level, run_lines, run_ranges
from simulator.simulate import hierarchy_of

LINE = 64


def level(sets: int, ways: int, **more) -> Level:
    line = more.pop("line_bytes", LINE)
    return Level(more.pop("name", "L1"), sets * ways * line, line, ways, **more)


class Run:
    """A hierarchy in use, its counters by name."""

    def __init__(self, *levels: Level, **more) -> None:
        self.hierarchy = Hierarchy(levels, **more)
        self.state = self.hierarchy.state()
        self.counts = np.zeros(self.hierarchy.counters, dtype=np.int64)

    def touch(self, lines, write=False, core=0, unit=LINE, **more) -> Run:
        """Access the first byte of these lines (or units of another size)."""
        addresses = np.array(list(lines), dtype=np.int64) * unit
        run_lines(self.state, core, addresses, write, self.counts, **more)
        return self

    def hits(self, number: int = 0) -> int:
        return int(self.counts[2 * number])

    def misses(self, number: int = 0) -> int:
        return int(self.counts[2 * number + 1])

    @property
    def after(self) -> np.ndarray:
        return self.counts[2 * len(self.hierarchy.levels) :]

    @property
    def read(self) -> int:
        return int(self.after[0])

    @property
    def written(self) -> int:
        return int(self.after[1])

    @property
    def rows(self) -> tuple[int, int]:
        """Open and not."""
        return int(self.after[2]), int(self.after[3])

    def line_misses(self, number: int = 0) -> int:
        return int(self.after[4 + 3 * number])

    def returned(self, number: int) -> tuple[int, int]:
        """Sectors written back to a level, and how many of them found no line."""
        return int(self.after[5 + 3 * number]), int(self.after[6 + 3 * number])


def hit_list(run: Run, lines, write=False) -> str:
    """A letter per access: h or m."""
    out = ""
    for line in lines:
        before = run.hits()
        run.touch([line], write)
        out += "h" if run.hits() > before else "m"
    return out


class TestPatterns:
    def test_a_stream_of_floats_misses_once_a_line(self):
        run = Run(level(64, 8), level(1024, 16, name="L2"))
        run.touch(range(16 * 10_000), unit=4)
        assert (run.hits(), run.misses()) == (15 * 10_000, 10_000)
        assert (run.hits(1), run.misses(1), run.read, run.written) == (0, 10_000, 10_000 * LINE, 0)

    @pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 64])
    def test_a_stride_reaches_the_sets_that_it_divides(self, stride):
        """A stride of s lines meets 64 / gcd(s, 64) of 64 sets; one line a set more than its 8 ways never hits."""
        reached = 64 // np.gcd(stride, 64)
        fits, thrashes = 8 * reached, 8 * reached + reached
        run = Run(level(64, 8)).touch([i * stride for i in range(fits)] * 5)
        assert (run.hits(), run.misses()) == (4 * fits, fits)
        run = Run(level(64, 8)).touch([i * stride for i in range(thrashes)] * 5)
        assert (run.hits(), run.misses()) == (0, 5 * thrashes)

    def test_tiles_cut_the_misses_of_a_transposed_read(self):
        """256 × 256 floats by columns, then by tiles of 16 columns: a line holds 16 floats of a row."""
        rows, columns = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
        address = (rows * 256 + columns) * 4
        by_column = address.T.reshape(-1)
        tile = level(4, 8), np.concatenate([address[:, c : c + 16].reshape(-1) for c in range(0, 256, 16)])
        assert Run(level(4, 8)).touch(by_column, unit=1).misses() == 256 * 256
        assert Run(tile[0]).touch(tile[1], unit=1).misses() == 256 * 16

    @pytest.mark.parametrize("ways", [1, 4, 8, 12, 16, 31])
    def test_one_line_too_many_in_turn_never_hits_under_lru(self, ways):
        run = Run(level(1, ways)).touch(list(range(ways + 1)) * 20)
        assert (run.hits(), run.misses()) == (0, 20 * (ways + 1))
        run = Run(level(1, ways)).touch(list(range(ways)) * 20)
        assert (run.hits(), run.misses()) == (19 * ways, ways)

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, 10**6), st.sampled_from([1, 3, 8]))
    def test_more_ways_never_miss_more_under_lru(self, seed, sets):
        trace = np.random.default_rng(seed).integers(0, 40 * sets, 500)
        misses = [Run(level(sets, ways)).touch(trace).misses() for ways in range(1, 20)]
        assert misses == sorted(misses, reverse=True)

    def test_sets_need_not_be_a_power_of_two(self):
        run = Run(level(3, 1)).touch([0, 3, 0, 1, 2, 4, 1])
        assert (run.hits(), run.misses()) == (0, 7)
        run = Run(level(3, 2)).touch([0, 3, 0, 1, 2, 4, 1])
        assert (run.hits(), run.misses()) == (2, 5)


class TestReplacement:
    def test_lru_by_hand(self):
        assert hit_list(Run(level(1, 3)), [1, 2, 3, 1, 4, 2, 1, 3]) == "mmmhmmhm"

    def test_fifo_by_hand(self):
        """Line 1 goes first though it was just used."""
        assert hit_list(Run(level(1, 3, replacement="fifo")), [1, 2, 3, 1, 4, 1, 3, 2]) == "mmmhmmhm"

    def test_fifo_has_beladys_anomaly(self):
        trace = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]
        three, four = (Run(level(1, ways, replacement="fifo")).touch(trace).misses() for ways in (3, 4))
        assert (three, four) == (9, 10)

    def test_a_tree_by_hand(self):
        """
        Four ways. After 0 1 2 3 in ways 0 to 3 the tree points left, then to way 0. Using 0 points it right, to way 2:
        4 replaces 2. It then points left to way 1: 5 replaces 1; then right to way 3: 6 replaces 3.
        """
        run = Run(level(1, 4, replacement="plru"))
        assert hit_list(run, [0, 1, 2, 3, 0, 4, 5, 6]) == "mmmmhmmm"
        assert hit_list(run, [0, 4, 5, 6]) == "hhhh"

    def test_a_tree_is_not_lru(self):
        """After 0 1 2 3 0, LRU gives up 1; the tree points away from 0's half, and there away from 3: to 2."""
        trace = [0, 1, 2, 3, 0, 4]
        assert hit_list(Run(level(1, 4, replacement="plru")).touch(trace), [1, 2]) == "hm"
        assert hit_list(Run(level(1, 4)).touch(trace), [2, 1]) == "hm"

    def test_two_ways_of_a_tree_are_lru(self):
        trace = np.random.default_rng(5).integers(0, 12, 1000)
        lru, tree = Run(level(2, 2)), Run(level(2, 2, replacement="plru"))
        assert hit_list(lru, trace) == hit_list(tree, trace)

    def test_random_is_the_same_each_time_and_another_with_another_seed(self):
        trace = np.random.default_rng(5).integers(0, 64, 2000)
        runs = [Run(level(2, 8, replacement="random"), seed=seed) for seed in (1, 1, 2)]
        first, again, other = (hit_list(run, trace) for run in runs)
        assert first == again
        assert first != other

    def test_random_keeps_some_of_what_thrashes_lru(self):
        """One line too many in turn: each miss replaces one of 8 in the way of the rest, so that most hit."""
        run = Run(level(1, 8, replacement="random")).touch(list(range(9)) * 1000)
        assert run.hits() > 9000 / 2


class TestStores:
    def test_write_back_writes_a_line_once_however_often_it_was_stored_to(self):
        run = Run(level(1, 2)).touch([0] * 100, write=True)
        assert (run.hits(), run.misses(), run.read, run.written) == (99, 1, LINE, 0)
        run.touch([1, 2])
        assert run.written == LINE

    def test_write_through_writes_every_store(self):
        through = level(1, 2, write_back=False)
        run = Run(through).touch([0] * 100, write=True)
        assert (run.hits(), run.misses(), run.read, run.written) == (99, 1, LINE, 100 * LINE)
        assert run.touch([1, 2]).written == 100 * LINE

    def test_without_allocation_stores_never_come_in(self):
        run = Run(level(1, 2, write_back=False, write_allocate=False)).touch([0] * 10, write=True)
        assert (run.hits(), run.misses(), run.read, run.written) == (0, 10, 0, 10 * LINE)
        run.touch([0]).touch([0] * 10, write=True)
        assert (run.hits(), run.misses(), run.written) == (10, 11, 20 * LINE)

    def test_what_is_overwritten_need_not_be_fetched(self):
        run = Run(level(4, 2, fetch_on_write=False)).touch(range(100), write=True)
        assert (run.misses(), run.read, run.written) == (100, 0, (100 - 8) * LINE)

    def test_a_gpu_like_pair_writes_through_the_first_and_back_from_the_second(self):
        first = level(4, 4, write_back=False, write_allocate=False)
        run = Run(first, level(4, 16, name="L2", fetch_on_write=False)).touch(list(range(64)) * 3, write=True)
        assert (run.misses(), run.misses(1), run.hits(1)) == (3 * 64, 64, 2 * 64)
        assert (run.read, run.written) == (0, 0)
        assert run.touch(range(64, 128)).written == 64 * LINE

    def test_a_dirty_line_comes_back_to_the_next_level_without_being_an_access_of_it(self):
        run = Run(level(1, 1), level(1, 4, name="L2")).touch([0], write=True).touch([1])
        assert run.returned(1) == (1, 0)
        assert (run.hits(1), run.misses(1)) == (0, 2)

    def test_one_that_the_next_level_has_lost_is_taken_in_without_a_fetch(self):
        run = Run(level(1, 1), level(1, 1, name="L2")).touch([0], write=True).touch([1])
        assert run.returned(1) == (1, 1)
        assert run.read == 2 * LINE


class TestSectors:
    SECTORED = level(1, 2, line_bytes=128, sector_bytes=32)

    def test_a_line_comes_in_by_sectors(self):
        run = Run(self.SECTORED).touch(range(4), unit=32)
        assert (run.misses(), run.line_misses(), run.read) == (4, 1, 128)
        assert run.touch(range(4), unit=32).hits() == 4

    def test_a_stream_of_one_sector_a_line_reads_a_quarter(self):
        run = Run(self.SECTORED).touch(range(100), unit=128)
        assert (run.misses(), run.line_misses(), run.read) == (100, 100, 100 * 32)

    def test_only_dirty_sectors_are_written_back(self):
        run = Run(self.SECTORED).touch([0, 2], write=True, unit=32).touch([1], unit=32).touch([1, 2], unit=128)
        assert run.written == 2 * 32

    def test_ranges_touch_sectors(self):
        run = Run(self.SECTORED)
        run_ranges(run.state, 0, np.array([20]), 100, False, run.counts)  # bytes 20 to 119: sectors 0 to 3
        assert (run.misses(), run.line_misses()) == (4, 1)

    def test_a_wider_level_beyond_serves_neighbours(self):
        wide = level(1, 4, name="L2", line_bytes=128, sector_bytes=64)
        run = Run(self.SECTORED, wide).touch(range(4), unit=32)
        assert (run.hits(1), run.misses(1), run.line_misses(1), run.read) == (2, 2, 1, 128)


class TestPieces:
    """A last level whose misses fetch more than the sector that was asked for."""

    NEAR = level(1, 2, line_bytes=128, sector_bytes=32)
    FAR = level(2, 2, name="L2", line_bytes=128, sector_bytes=32, shared=True, fetch_bytes=64, fetch_on_write=False)

    def test_the_neighbour_of_a_sector_read_before_hits(self):
        run = Run(self.NEAR, self.FAR, cores=2)
        run.touch([0, 4], unit=32)
        assert (run.hits(1), run.misses(1), run.read) == (0, 2, 128)
        run.touch([1], unit=32, core=1)
        assert (run.hits(1), run.misses(1), run.read) == (1, 2, 128)

    def test_sectors_of_one_request_miss_together(self):
        run = Run(self.NEAR, self.FAR)
        run.touch([0, 1, 2, 3], unit=32)
        assert (run.hits(1), run.misses(1), run.read) == (0, 4, 128)

    def test_what_is_there_is_not_fetched_again(self):
        run = Run(replace(self.NEAR, write_back=False, write_allocate=False), self.FAR)
        run.touch([1], write=True, unit=32)
        run.touch([0, 1], unit=32)
        assert run.read == 32
        assert run.written == 0

    @pytest.mark.parametrize("bad", [{"fetch_bytes": 48}, {"fetch_bytes": 16}, {"fetch_bytes": 256}])
    def test_what_cannot_be_is_refused(self, bad):
        with pytest.raises(LayoutOptError, match="fetch_bytes"):
            Hierarchy((self.NEAR, replace(self.FAR, **bad)))
        with pytest.raises(LayoutOptError, match="fetch_bytes"):
            Hierarchy((replace(self.FAR, shared=False),))


class TestInclusion:
    def test_an_inclusive_level_takes_its_line_from_the_nearer_one(self):
        run = Run(level(1, 4), level(1, 2, name="L2", inclusion="inclusive")).touch([0, 1, 2])
        assert hit_list(run, [1, 2, 0]) == "hhm"
        run = Run(level(1, 4), level(1, 2, name="L2")).touch([0, 1, 2])
        assert hit_list(run, [1, 2, 0]) == "hhh"

    def test_what_was_dirty_there_is_written(self):
        run = Run(level(1, 4), level(1, 2, name="L2", inclusion="inclusive")).touch([0], write=True).touch([1, 2])
        assert run.written == LINE

    def test_it_takes_it_from_every_core(self):
        run = Run(level(1, 4), level(1, 2, name="L2", shared=True, inclusion="inclusive"), cores=2)
        run.touch([0], core=0).touch([0], core=1).touch([1, 2], core=1)
        assert run.touch([0], core=0).misses() == 5

    def test_an_exclusive_level_adds_to_the_capacity(self):
        """Five lines in turn: four ways and one; without exclusion the second level is too small to help."""
        victim = level(1, 1, name="L2", inclusion="exclusive")
        run = Run(level(1, 4), victim).touch(list(range(5)) * 10)
        assert (run.misses(), run.misses(1), run.hits(1), run.read) == (50, 5, 45, 5 * LINE)
        run = Run(level(1, 4), replace(victim, inclusion="none")).touch(list(range(5)) * 10)
        assert run.hits(1) == 0

    def test_what_is_dirty_moves_back_and_forth_and_is_written_once(self):
        victim = level(1, 1, name="L2", inclusion="exclusive")
        run = Run(level(1, 1), victim).touch([0], write=True).touch([1, 0, 1, 0])
        assert (run.written, run.hits(1)) == (0, 3)
        assert run.touch([2, 3]).written == LINE


class TestMemory:
    def test_a_stream_opens_each_row_once(self):
        run = Run(level(4, 2), row_bytes=1024, banks=8).touch(range(160))
        assert run.rows == (150, 10)

    def test_two_rows_of_one_bank_close_each_other(self):
        """Eight banks of 1 KiB: rows 0 and 8 share one, rows 0 and 1 do not."""
        same, other = ([row * 16 + i for i in range(16) for row in rows] for rows in ((0, 8), (0, 1)))
        assert Run(level(4, 2), row_bytes=1024, banks=8).touch(same).rows == (0, 32)
        assert Run(level(4, 2), row_bytes=1024, banks=8).touch(other).rows == (30, 2)

    def test_what_is_written_back_opens_rows_too(self):
        run = Run(level(1, 1), row_bytes=1024, banks=1).touch([0], write=True).touch([16])
        assert run.rows == (0, 3)  # 0 read, 16 read, 0 written


class TestSetsAndWays:
    def test_hashing_spreads_what_a_power_of_two_stride_piles_up(self):
        stride = [64 * i for i in range(64)]  # one set of 64, without hashing
        assert Run(level(64, 2)).touch(stride * 3).hits() == 0
        assert Run(level(64, 2, hashed=True)).touch(stride * 3).hits() == 2 * 64

    def test_hashed_sets_by_hand(self):
        """Four sets: line 0b0110 goes to 10 ^ 01 = 3, with 0b0011, and 0b1001; 0b0111 to 11 ^ 01 = 2."""
        run = Run(level(4, 1, hashed=True))
        assert hit_list(run, [0b0110, 0b0111, 0b0110, 0b0011, 0b0110, 0b1001, 0b0111]) == "mmhmmmh"

    def test_images_and_buffers_go_their_own_ways(self):
        run = Run(level(1, 1, serves="image"), level(1, 4, name="L2"))
        run.touch([0, 0]).touch([0, 0], way=IMAGES)
        assert (run.hits(), run.misses(), run.hits(1), run.misses(1)) == (1, 1, 2, 1)

    def test_each_core_has_private_levels_of_its_own(self):
        run = Run(level(1, 2), level(1, 4, name="L2", shared=True), cores=2)
        run.touch([0], core=0).touch([0], core=1)
        assert (run.misses(), run.hits(1), run.misses(1)) == (2, 1, 1)


class TestBulk:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(0, 10**6), st.booleans())
    def test_ranges_are_their_lines_in_turn(self, seed, sectored):
        draw = np.random.default_rng(seed)
        first = level(4, 4, sector_bytes=32 if sectored else 0)
        starts, lengths = draw.integers(0, 8000, 50), draw.integers(1, 500, 50)
        stores = draw.random(50) < 0.4
        whole, apart = Run(first, level(8, 8, name="L2")), Run(first, level(8, 8, name="L2"))
        run_ranges(whole.state, 0, starts, lengths, stores, whole.counts)
        unit = first.unit_bytes
        for start, length, store in zip(starts.tolist(), lengths.tolist(), stores.tolist(), strict=True):
            apart.touch(range(start // unit, (start + length - 1) // unit + 1), store, unit=unit)
        assert whole.counts.tolist() == apart.counts.tolist()
        np.testing.assert_array_equal(whole.state.lines, apart.state.lines)

    def test_few_counters_are_the_first_of_all(self):
        trace, stores = np.arange(0, 50_000, 24), np.arange(0, 50_000, 24) % 5 == 0
        run = Run(level(8, 4), level(8, 8, name="L2"), row_bytes=1024, banks=4)
        few = np.zeros(6, dtype=np.int64)
        run_lines(run.hierarchy.state(), 0, trace, stores, few)
        run_lines(run.state, 0, trace, stores, run.counts)
        assert few.tolist() == run.counts[:6].tolist()
        assert few[5] > 0

    def test_memory_does_not_grow(self):
        hierarchy = Hierarchy((level(64, 8), level(1024, 16, name="L2", shared=True)), cores=4)
        assert hierarchy.state().lines.size == 4 * 64 * 8 + 1024 * 16 + 8

    @pytest.mark.parametrize(
        ("starts", "lengths", "writes"),
        [([-1], 1, False), ([0], 0, False), ([0, 64], [1, 1, 1], False), ([0, 64], 1, [True, False, True])],
    )
    def test_ranges_that_cannot_be_are_refused(self, starts, lengths, writes):
        run = Run(level(1, 1))
        with pytest.raises(LayoutOptError, match="address ranges"):
            run_ranges(run.state, 0, np.array(starts), np.array(lengths), np.array(writes), run.counts)

    @pytest.mark.parametrize("counts", [np.zeros(3, np.int64), np.zeros(4), np.zeros(8, np.int64)[::2]])
    def test_counters_that_cannot_be_written_are_refused(self, counts):
        with pytest.raises(LayoutOptError, match="counters"):
            run_lines(Hierarchy((FIRST,)).state(), 0, np.array([0]), False, counts)

    @pytest.mark.parametrize("core", [-1, 2])
    def test_cores_that_are_not_there_are_refused(self, core):
        with pytest.raises(LayoutOptError, match="cores 0 to 1"):
            run_lines(Hierarchy((FIRST,), cores=2).state(), core, np.array([0]), False, np.zeros(4, np.int64))


FIRST = level(1, 4)


@pytest.mark.parametrize(
    ("levels", "match"),
    [
        ((level(1, 4, sector_bytes=48),), "sector"),
        ((level(1, 4, sector_bytes=128),), "sector"),
        ((level(1, 4, sector_bytes=4),), "sector"),
        ((level(1, 4, replacement="mru"),), "mru"),
        ((level(1, 4, inclusion="strict"),), "strict"),
        ((level(1, 4, serves="stores"),), "stores"),
        ((level(1, 12, replacement="plru"),), "ways"),
        ((level(1, 4, inclusion="exclusive"),), "exclusive"),
        ((FIRST, level(1, 4, line_bytes=128, inclusion="exclusive")), "exclusive"),
        ((replace(FIRST, write_back=False), level(1, 4, inclusion="exclusive")), "exclusive"),
        ((replace(FIRST, fetch_on_write=False), level(1, 4, inclusion="inclusive")), "fetch_on_write"),
        ((FIRST, level(1, 4, inclusion="inclusive", write_allocate=False)), "write_allocate"),
        ((FIRST, level(1, 4, line_bytes=32)), "shorter"),
        ((FIRST, level(1, 4, sector_bytes=32)), "shorter"),
    ],
)
def test_levels_that_cannot_be_are_refused(levels, match):
    with pytest.raises(LayoutOptError, match=match):
        Hierarchy(levels)


@pytest.mark.parametrize(("row_bytes", "banks"), [(1024, 0), (0, 4), (32, 4), (1024, -1)])
def test_memory_that_cannot_be_is_refused(row_bytes, banks):
    with pytest.raises(LayoutOptError, match="banks"):
        Hierarchy((FIRST,), row_bytes=row_bytes, banks=banks)


class TestDeviceModels:
    """What a device model says of its caches is what is simulated."""

    CACHES = (
        CacheLevel("L1", 4096, 128, 4, sector_bytes=32, write_back=False, fetch_on_write=False, replacement="fifo"),
        CacheLevel("L2", 65536, 128, 16, True, hashed=True, replacement="plru", inclusion="inclusive"),
    )

    def model(self, **changes) -> DeviceModel:
        facts = {"memory_row_bytes": Fact(2048, "tests", "high"), "memory_banks": Fact(64, "tests", "high")}
        limits = replace(load("nvidia-h200").limits, compute_units=3)
        return replace(DeviceModel("d", "", "", limits, caches=self.CACHES, facts=facts), **changes)

    def test_every_entry_is_taken_over(self):
        first = Level("L1", 4096, 128, 4, False, "all", 32, "fifo", False, True, False)
        second = Level("L2", 65536, 128, 16, True, "all", 0, "plru", inclusion="inclusive", hashed=True)
        caches = (self.CACHES[0], replace(self.CACHES[1], inclusion="none"))
        expected = Hierarchy((first, replace(second, inclusion="none")), 3, 2048, 64)
        assert hierarchy_of(self.model(caches=caches)) == expected
        caches = (replace(self.CACHES[0], fetch_on_write=True), self.CACHES[1])
        expected = Hierarchy((replace(first, fetch_on_write=True), second), 3, 2048, 64)
        assert hierarchy_of(self.model(caches=caches)) == expected

    def test_levels_that_do_not_go_together_are_refused(self):
        with pytest.raises(LayoutOptError, match="fetch_on_write"):
            hierarchy_of(self.model())

    @pytest.mark.parametrize("name", list_builtin())
    def test_shipped_models_have_caches_that_can_be(self, name):
        state = hierarchy_of(load(name), images=True).state()
        assert state.lines.nbytes < 16 << 20
