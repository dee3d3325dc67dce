"""The cache simulator against counts that a person can compute by hand, and against a slow model in plain Python."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.nest import Access, Data, Loop, Nest, Phase, at, index, var
from kernels.spec import Kernel, KernelVariant, Launch, OpSpec
from layoutopt.errors import LayoutOptError
from layoutopt.layout import Layout
from simulator.cache import Hierarchy, Level, run_lines
from simulator.trace import compile_launch, walk

LINE = 64
L1 = Level("L1", 8 * 4 * LINE, LINE, 4)  # 8 sets, 4 ways, 2 KiB
L2 = Level("L2", 16 * 8 * LINE, LINE, 8, shared=True)  # 8 KiB


def kernel_of(layouts: tuple[Layout, ...], nest: Nest, dtypes: tuple[str, ...] | None = None) -> tuple[Kernel, Launch]:
    """A kernel that exists only for its accesses."""
    shapes = tuple(layout.shape for layout in layouts)
    spec = OpSpec("pointwise", shapes, dtypes or ("float32",) * len(layouts), len(layouts))
    launch = Launch("none.cl", "none", (), nest, (1,), (1,))
    return Kernel(spec, KernelVariant("test", "test"), layouts, (launch,)), launch


TEXTURE = Level("texture L1", 2 * 1 * LINE, LINE, 1, serves="image")
BUFFERED = Level("L1", 8 * 4 * LINE, LINE, 4, serves="buffer")


def counters(
    layouts: tuple[Layout, ...],
    nest: Nest,
    hierarchy: Hierarchy,
    *,
    wave: int = 1,
    ids: dict[int, np.ndarray] | None = None,
    dtypes: tuple[str, ...] | None = None,
    images: tuple[int, ...] = (),
) -> np.ndarray:
    """Counters per operand; operands lie a mebibyte apart."""
    kernel, launch = kernel_of(layouts, nest, dtypes)
    launch = replace(launch, images=images)
    walked = compile_launch(kernel, launch, ids or {})
    counts = np.zeros((len(layouts), 3 + 2 * len(hierarchy.levels) + 2), dtype=np.int64)
    addresses = np.arange(len(layouts), dtype=np.int64) << 20
    walk(walked, hierarchy.state(), addresses, counts, 0, walked.groups, hierarchy.cores, wave)
    return counts


def sweep(shape: tuple[int, int], width: int = 1, write: bool = False, column_first: bool = False) -> Nest:
    """Read (or write) a matrix once by rows, or by columns."""
    rows, cols = shape
    loops = (Loop("i", rows), Loop("j", -(-cols // width)))
    access = at(0, index(i=1), index(j=width), width=width, axis=1, write=write)
    if column_first:
        loops = loops[::-1]
    return Nest((Loop("g", 1, "group"),), (Phase(loops, (access,)),))


class TestClosedForms:
    hierarchy = Hierarchy((L1, L2))

    def test_streaming_misses_once_a_line(self):
        counts = counters((Layout.row_major((32, 64)),), sweep((32, 64)), self.hierarchy)[0]
        lines = 32 * 64 * 4 // LINE
        assert list(counts) == [2048, 2048, 8192, 2048 - lines, lines, 0, lines, lines * LINE, 0]

    def test_vector_access_touches_its_line_once(self):
        counts = counters((Layout.row_major((32, 64)),), sweep((32, 64), width=16), self.hierarchy)[0]
        assert list(counts[:5]) == [128, 128, 8192, 0, 128]

    def test_a_column_walk_that_fits_hits_after_the_first_column(self):
        # 16 rows of one line each: 16 lines in an L1 of 32.
        counts = counters((Layout.row_major((16, 16)),), sweep((16, 16), column_first=True), self.hierarchy)[0]
        assert list(counts[3:5]) == [256 - 16, 16]

    def test_a_column_walk_over_a_power_of_two_stride_thrashes_one_set(self):
        # Rows are 8 lines (512 B) apart: all fall into one of 8 sets of 4 ways, so 16 rows never hit.
        counts = counters((Layout.row_major((16, 128)),), sweep((16, 128), column_first=True), self.hierarchy)[0]
        assert list(counts[3:5]) == [0, 16 * 128]

    def test_tiles_make_the_same_column_walk_hit(self):
        # R-Tile(16, 1): a tile column of 16 rows is one line.
        tiled = Layout.r_tile((16, 128), 16, 1)
        counts = counters((tiled,), sweep((16, 128), column_first=True), self.hierarchy)[0]
        assert list(counts[3:5]) == [16 * 128 - 128, 128]

    def test_rtile_serves_both_directions_with_one_miss_a_tile(self):
        tiled = Layout.r_tile((16, 16), 4, 4)  # a 4×4 tile is one line
        for column_first in (False, True):
            counts = counters((tiled,), sweep((16, 16), column_first=column_first), self.hierarchy)[0]
            assert counts[4] == 16

    def test_second_level_holds_what_the_first_cannot(self):
        nest = Nest((Loop("g", 1, "group"),), (Phase((Loop("t", 3), Loop("i", 64)), (at(0, index(i=16)),)),))
        counts = counters((Layout.row_major((1024,)),), nest, self.hierarchy)[0]  # 64 lines: L1 holds 32, L2 128
        assert list(counts[3:]) == [0, 192, 128, 64, 64 * LINE, 0]

    def test_stores_come_back_to_memory_when_evicted(self):
        write = sweep((64, 64), write=True)  # 256 lines through caches of 32 and 128
        counts = counters((Layout.row_major((64, 64)),), write, self.hierarchy)[0]
        # All but what L1 and L2 still hold has been written; L2 holds 128 lines, 32 of them stale copies of L1's.
        assert counts[7] == 256 * LINE
        assert 96 * LINE <= counts[8] <= 128 * LINE

    def test_padding_is_never_touched(self):
        padded = Layout.r_tile((5, 7), 4, 4)
        counts = counters((padded,), sweep((8, 8)), self.hierarchy)[0]
        assert counts[0] == 35

    def test_what_a_vector_leaves_over_is_done_one_by_one(self):
        counts = counters((Layout.row_major((1, 13)),), sweep((1, 13), width=8), self.hierarchy)[0]
        assert list(counts[:3]) == [1 + 5, 1 + 5, 13 * 4]


class TestWalk:
    def test_coalescing_over_a_wave(self):
        grid = (Loop("g", 2, "group"), Loop("l", 32, "item"))
        row = Nest(grid, (Phase((), (at(0, Data(1, (index(g=32, l=1),))), at(0, index(g=32, l=1)))),))
        ids = {1: np.arange(64)[::-1].copy()}
        layouts = (Layout.row_major((64,)), Layout.row_major((64,)))
        counts = counters(layouts, row, Hierarchy((L1,)), wave=32, ids=ids, dtypes=("float32", "int32"))
        assert list(counts[0][:2]) == [128, 8]  # 32 floats are two lines, four waves

    def test_depth_hoists_loads_and_sinks_stores(self):
        accesses = (
            at(0, index(i=1), depth=1),
            at(1, index(i=1), index(k=1)),
            at(2, index(i=1), depth=1, write=True),
        )
        nest = Nest((Loop("g", 1, "group"),), (Phase((Loop("i", 5), Loop("k", 7)), accesses),))
        layouts = (Layout.row_major((5,)), Layout.row_major((5, 7)), Layout.row_major((5,)))
        counts = counters(layouts, nest, Hierarchy((L1,)))
        assert list(counts[:, 0]) == [5, 35, 5]

    def test_quasi_affine_terms(self):
        mixed = var("i", 2, div=4) + var("i", 1, mod=2)
        nest = Nest((Loop("g", 1, "group"),), (Phase((Loop("i", 8),), (Access(0, (mixed,)),)),))
        small = Hierarchy((Level("L1", 4, 4, 1),))
        counts = counters((Layout.row_major((4,)),), nest, small)[0]
        # Coordinates 0 1 0 1 2 3 2 3 through a cache of one value.
        assert list(counts[3:5]) == [0, 8]

    def test_groups_go_to_cores_in_turn(self):
        nest = Nest((Loop("g", 4, "group"),), (Phase((), (at(0, 0),)),))
        counts = counters((Layout.row_major((16,)),), nest, Hierarchy((L1, L2), cores=2))[0]
        assert list(counts[3:7]) == [2, 2, 1, 1]  # each core misses once; the shared level once in all


class TestImages:
    """Two operands read alike, four times over: one through an image, one from a buffer."""

    NEST = Nest(
        (Loop("g", 1, "group"),),
        (
            Phase(
                (Loop("again", 4), Loop("i", 64)),
                (at(0, index(i=4), width=4), at(1, index(i=4), width=4)),
            ),
        ),
    )
    LAYOUTS = (Layout.row_major((256,)),) * 2  # 16 lines each, and 64 vectors of a quarter of a line

    def test_each_has_a_first_level_of_its_own(self):
        hierarchy = Hierarchy((BUFFERED, TEXTURE, L2))
        counts = counters(self.LAYOUTS, self.NEST, hierarchy, images=(0,))
        # The buffer's 16 lines stay in 32; the image's are gone from 2 when they are met again. Both meet the L2 once.
        assert list(counts[0, 3:]) == [0, 0, 4 * 48, 4 * 16, 3 * 16, 16, 16 * LINE, 0]
        assert list(counts[1, 3:]) == [4 * 64 - 16, 16, 0, 0, 0, 16, 16 * LINE, 0]

    def test_buffers_pass_the_texture_cache_by(self):
        """As on Adreno, where they begin at the shared level."""
        counts = counters(self.LAYOUTS, self.NEST, Hierarchy((TEXTURE, L2)), images=(0,))
        assert list(counts[0, 3:7]) == [4 * 48, 4 * 16, 3 * 16, 16]
        assert list(counts[1, 3:7]) == [0, 0, 4 * 64 - 16, 16]

    def test_no_image_no_difference(self):
        plain = counters(self.LAYOUTS, self.NEST, Hierarchy((L1, L2)))
        with_texture = counters(self.LAYOUTS, self.NEST, Hierarchy((BUFFERED, TEXTURE, L2)))
        assert not with_texture[:, 5:7].any()
        np.testing.assert_array_equal(plain, np.delete(with_texture, [5, 6], axis=1))

    def test_dirty_lines_are_not_written_to_a_texture_cache(self):
        one = Level("L1", LINE, LINE, 1, serves="buffer")
        nest = Nest((Loop("g", 1, "group"),), (Phase((Loop("i", 16),), (at(0, index(i=16), write=True),)),))
        counts = counters((Layout.row_major((256,)),), nest, Hierarchy((one, TEXTURE, L2)))[0]
        assert list(counts[3:9]) == [0, 16, 0, 0, 0, 16]


def slow_lru(addresses: list[int], sets: int, ways: int) -> tuple[int, int]:
    """Hits and misses of an LRU cache of 64-byte lines, by ordered dictionaries."""
    cache = [OrderedDict() for _ in range(sets)]
    hits = misses = 0
    for address in addresses:
        line = address // LINE
        ways_in_use = cache[line % sets]
        if line in ways_in_use:
            hits += 1
            ways_in_use.move_to_end(line)
        else:
            misses += 1
            ways_in_use[line] = True
            if len(ways_in_use) > ways:
                ways_in_use.popitem(last=False)
    return hits, misses


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=400),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4, 16]),
)
def test_random_traces_match_a_slow_lru(addresses, sets, ways):
    hierarchy = Hierarchy((Level("L1", sets * ways * LINE, LINE, ways),))
    counts = np.zeros(4, dtype=np.int64)
    trace = np.array(addresses, dtype=np.int64)
    run_lines(hierarchy.state(), 0, trace, np.zeros(trace.size, dtype=np.bool_), counts)
    assert (counts[0], counts[1]) == slow_lru(addresses, sets, ways)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6000), min_size=1, max_size=300))
def test_more_ways_never_miss_more(addresses):
    trace = np.array(addresses, dtype=np.int64)
    misses = []
    for ways in (1, 2, 4, 8, 64):
        counts = np.zeros(4, dtype=np.int64)
        state = Hierarchy((Level("L1", 4 * ways * LINE, LINE, ways),)).state()
        run_lines(state, 0, trace, np.zeros(trace.size, dtype=np.bool_), counts)
        misses.append(counts[1])
    assert misses == sorted(misses, reverse=True)


@pytest.mark.parametrize("level", [Level("L1", 100, 48, 1), Level("L1", 32, 64, 4), Level("L1", 8256, 64, 4)])
def test_impossible_levels_are_refused(level):
    with pytest.raises(LayoutOptError, match="L1"):
        Hierarchy((level,))
