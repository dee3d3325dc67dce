"""What runs at once, what a request touches, and how texels lie: by hand, on nests made for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.device import load
from kernels.nest import Access, Loop, Nest, Phase, at, index, var
from layoutopt.errors import LayoutOptError
from layoutopt.layout import Layout
from simulator.cache import Hierarchy, Level
from simulator.simulate import texel_block_of
from simulator.trace import Schedule, Stream, TexelBlock, Walk, compile_launch, stream, walk
from tests.stream_cases import FAMILIES, SIDES, kernels_of_case
from tests.test_simulator import kernel_of

ONE_GROUP = Loop("g", 1, "group")
LINES = Hierarchy((Level("L1", 64 << 10, 128, 8),))


def compiled(layouts: tuple[Layout, ...], nest: Nest, block: TexelBlock | None = None) -> Walk:
    return compile_launch(*kernel_of(layouts, nest), {}, block)


def turns(log: Stream) -> list[int]:
    """The work groups in the order in which they make accesses, each stretch once."""
    changes = np.flatnonzero(np.diff(log.group, prepend=-1))
    return log.group[changes].tolist()


class TestSchedule:
    """Four groups of one item that read three values each."""

    NEST = Nest((Loop("g", 4, "group"),), (Phase((Loop("i", 3),), (at(0, index(g=3, i=1)),)),))
    WALK = compiled((Layout.row_major((12,)),), NEST)

    def test_one_after_the_other(self) -> None:
        assert turns(stream(self.WALK)) == [0, 1, 2, 3]
        assert turns(stream(self.WALK, cores=2)) == [0, 1, 2, 3]

    def test_resident_groups_take_turns(self) -> None:
        log = stream(self.WALK, schedule=Schedule(resident=2, turn=1))
        assert turns(log) == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
        assert log.offset_elems.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]

    def test_longer_turns(self) -> None:
        log = stream(self.WALK, schedule=Schedule(resident=2, turn=2))
        assert log.offset_elems.tolist()[:6] == [0, 1, 3, 4, 2, 5]

    def test_the_next_group_begins_where_one_ends(self) -> None:
        """Three at once: the fourth takes the place of the first that is through."""
        log = stream(self.WALK, schedule=Schedule(resident=3, turn=1))
        assert turns(log)[:9] == [0, 1, 2] * 3
        assert turns(log)[9:] == [3]

    def test_cores_have_groups_of_their_own(self) -> None:
        """Two cores of one group each: neither finds in its cache what the other has read."""
        nest = Nest((Loop("g", 4, "group"),), (Phase((), (at(0, 0),)),))
        walked = compiled((Layout.row_major((4,)),), nest)
        counts = np.zeros((1, 9), np.int64)
        caches = Hierarchy((Level("L1", 1024, 64, 4), Level("L2", 1024, 64, 4, shared=True)), cores=2)
        walk(walked, caches.state(), np.zeros(1, np.int64), counts, 0, 4, 2, 1, Schedule(resident=1, turn=1))
        assert counts[0, 3:7].tolist() == [2, 2, 1, 1]

    def test_waves_wait_for_each_other_at_the_end_of_a_phase(self) -> None:
        grid = (Loop("g", 2, "group"), Loop("l", 4, "item"))
        place = index(g=4, l=1)
        phases = (Phase((Loop("i", 2),), (at(0, place),)), Phase((), (at(0, place, write=True),)))
        walked = compiled((Layout.row_major((8,)),), Nest(grid, phases))
        for schedule in (Schedule(), Schedule(turn=1), Schedule(2, 1), Schedule(2, 3)):
            log = stream(walked, wave=2, schedule=schedule)
            for group in (0, 1):
                writes = log.write[log.group == group]
                assert writes.tolist() == [False] * 8 + [True] * 4

    def test_waves_of_a_group_take_turns(self) -> None:
        grid = (ONE_GROUP, Loop("l", 4, "item"))
        walked = compiled((Layout.row_major((8,)),), Nest(grid, (Phase((Loop("i", 2),), (at(0, index(i=4, l=1)),)),)))
        assert stream(walked, wave=2).offset_elems.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
        assert stream(walked, wave=2, schedule=Schedule(turn=1)).offset_elems.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]

    def test_shared_loops_run_the_phases_in_turn(self) -> None:
        phases = tuple(Phase((Loop("t", 3),), (at(o, index(t=1)),)) for o in (0, 1))
        layouts = (Layout.row_major((3,)),) * 2
        apart, together = (compiled(layouts, Nest((ONE_GROUP,), phases, shared)) for shared in (0, 1))
        assert stream(apart).operand.tolist() == [0, 0, 0, 1, 1, 1]
        assert stream(together).operand.tolist() == [0, 1, 0, 1, 0, 1]

    def test_impossible_ones_are_refused(self) -> None:
        with pytest.raises(LayoutOptError, match="resident"):
            Schedule(resident=-1)
        with pytest.raises(LayoutOptError, match="texel"):
            TexelBlock(0, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_schedule_makes_the_same_accesses(family: str) -> None:
    """In other orders, but in the same within each work item."""
    case = next(c for c in FAMILIES[family]() if kernels_of_case(c, SIDES["gpu"]))
    ids = {p: x for p, x in enumerate(case.inputs) if x.dtype.kind == "i"}
    for kernel in kernels_of_case(case, SIDES["gpu"]):
        for launch in kernel.launches:
            walked = compile_launch(kernel, launch, ids)
            logs = [
                stream(walked, wave=wave, cores=cores, schedule=schedule)
                for wave, cores, schedule in (
                    (1, 1, Schedule()),
                    (32, 2, Schedule(turn=1)),
                    (32, 2, Schedule(2, 1)),
                    (8, 3, Schedule(3, 5)),
                )
            ]
            rows = [np.stack([x.group, x.item, x.operand, x.offset_elems, x.width, x.write], axis=1) for x in logs]
            first, *others = (r[np.lexsort((r[:, 1], r[:, 0]))] for r in rows)
            for other in others:
                np.testing.assert_array_equal(first[np.lexsort(first.T)], other[np.lexsort(other.T)])


class TestRequests:
    """A wave of 32 items that load four floats each."""

    GRID = (ONE_GROUP, Loop("l", 32, "item"))

    def requests(self, access: Access, layout: Layout) -> list[int]:
        walked = compiled((layout,), Nest(self.GRID, (Phase((), (access,)),)))
        counts, requests = np.zeros((1, 7), np.int64), np.zeros((1, 3), np.int64)
        walk(walked, LINES.state(), np.zeros(1, np.int64), counts, 0, 1, 1, 32, requests=requests)
        assert counts[0, 0] == 32
        return requests[0].tolist()

    def test_along_a_row(self) -> None:
        access = at(0, 0, index(l=4), width=4, axis=1)
        assert self.requests(access, Layout.row_major((32, 128))) == [1, 4, 16]

    def test_down_a_column_each_item_has_a_line_of_its_own(self) -> None:
        """As many sectors as before would be asked for by half of the items: it is the look-ups that differ."""
        access = at(0, index(l=1), 0, width=4, axis=1)
        assert self.requests(access, Layout.row_major((32, 128))) == [1, 32, 32]

    def test_tiles_put_a_column_into_few_lines(self) -> None:
        """Two rows of four floats are a sector, eight of them a line."""
        access = at(0, index(l=1), 0, width=4, axis=1)
        assert self.requests(access, Layout.r_tile((32, 128), 32, 4)) == [1, 4, 16]

    def test_a_vector_in_pieces_is_as_many_requests(self) -> None:
        access = at(0, 0, index(l=4), width=4, axis=1)
        walked = compiled((Layout.r_tile((4, 128), 4, 2),), Nest(self.GRID, (Phase((), (access,)),)))
        counts, requests = np.zeros((1, 7), np.int64), np.zeros((1, 3), np.int64)
        walk(walked, LINES.state(), np.zeros(1, np.int64), counts, 0, 1, 1, 32, requests=requests)
        assert requests[0, 0] == 2
        assert counts[0, 0] == 64

    def test_caches_see_the_same_with_and_without(self) -> None:
        access = at(0, index(l=1), 0, width=4, axis=1)
        walked = compiled(
            (Layout.row_major((32, 64)),), Nest(self.GRID, (Phase((), (access, replace(access, write=True))),))
        )
        found = []
        for requests in (None, np.zeros((1, 3), np.int64)):
            counts = np.zeros((1, 7), np.int64)
            walk(walked, LINES.state(), np.zeros(1, np.int64), counts, 0, 1, 1, 32, requests=requests)
            found.append(counts)
        np.testing.assert_array_equal(*found)


class TestTexels:
    """An image of 8 × 8 texels of 16 bytes: two rows of texels, or two blocks of 4 × 4, are a line of 256 bytes."""

    CACHE = Hierarchy((Level("texture L1", 4096, 256, 4),))

    def lines(self, phase: Phase, block: TexelBlock | None) -> int:
        image = Layout.image((8, 32), [(0, None)], [(1, None)], 1)
        assert image.size == (8, 8, 4)
        walked = compiled((image,), Nest((ONE_GROUP,), (phase,)), block)
        counts = np.zeros((1, 7), np.int64)
        walk(walked, self.CACHE.state(), np.zeros(1, np.int64), counts, 0, 1, 1, 1)
        return int(counts[0, 4])

    COLUMN = Phase((Loop("i", 4),), (at(0, index(i=1), 0, width=4, axis=1),))
    ROW = Phase((Loop("i", 8),), (at(0, 0, index(i=4), width=4, axis=1),))

    def test_row_by_row(self) -> None:
        assert self.lines(self.COLUMN, None) == 2
        assert self.lines(self.ROW, None) == 1

    def test_by_blocks(self) -> None:
        assert self.lines(self.COLUMN, TexelBlock(4, 4)) == 1
        assert self.lines(self.ROW, TexelBlock(4, 4)) == 2

    def test_every_texel_has_a_place_of_its_own(self) -> None:
        every = Phase((Loop("i", 8), Loop("j", 8)), (at(0, index(i=1), index(j=4), width=4, axis=1),))
        for block in (None, TexelBlock(4, 4), TexelBlock(2, 4), TexelBlock(8, 1)):
            assert self.lines(every, block) == 4


@pytest.mark.parametrize(("name", "block"), [("adreno-740", 4), ("mali-g78", 2), ("nvidia-h200", 1)])
def test_device_models_say_how_texels_lie(name: str, block: int) -> None:
    assert texel_block_of(load(name)) == TexelBlock(block, block)


def test_a_coordinate_of_several_kinds_of_loops() -> None:
    """Group, item and sequential parts, with quotients and remainders, add up."""
    grid = (Loop("g", 3, "group"), Loop("l", 4, "item"))
    place = var("g", 16) + var("l", 4, div=2) + var("l", 1, mod=2) + var("i", 2, mod=2)
    walked = compiled((Layout.row_major((48,)),), Nest(grid, (Phase((Loop("i", 2),), (at(0, place),)),)))
    log = stream(walked, wave=4)
    expected = [16 * g + 4 * (lane // 2) + lane % 2 + 2 * i for g in range(3) for i in range(2) for lane in range(4)]
    assert log.offset_elems.tolist() == expected
