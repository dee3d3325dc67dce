"""Counts against brute force and against numbers that a person can work out."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import device
from costmodel.features import FEATURES, Machine, features, transcendentals
from costmodel.spread import bundles, spread
from kernels.nest import Access, Data, Index, Loop, Nest, Phase, Term, at, index, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.graph import Expr
from layoutopt.layout import Layout

LINE = 64
CPU = Machine((32 << 10, 1 << 20, 8 << 20), LINE, 4096, 8, compute_units=1, wave_items=1)


def kernel(nest: Nest, *layouts: Layout, spec: OpSpec | None = None) -> Kernel:
    shapes = tuple(layout.shape for layout in layouts)
    spec = spec or OpSpec("pointwise", shapes, ("float32",) * len(shapes), len(shapes) - 1, (("expr", Expr((), ())),))
    launch = Launch("x.cl", "x", tuple((f"X{i}", i) for i in range(len(layouts))), nest, (1,), (1,))
    return Kernel(spec, KernelVariant("test", "hand"), layouts, (launch,))


def counts(k: Kernel, machine: Machine = CPU) -> dict[str, float]:
    return dict(zip(FEATURES, features(k, machine), strict=True))


# ---- distinct lines ------------------------------------------------------------------------------------------------


def brute_lines(layout: Layout, access: Access, loops: tuple[tuple[str, int], ...], outside: dict[str, int]) -> int:
    """Distinct lines by enumerating every execution of ``access`` under ``loops``."""
    offsets = layout.linear_offsets()
    lines = set()
    for values in product(*(range(n) for _, n in loops)):
        at_loop = outside | dict(zip((name for name, _ in loops), values, strict=True))
        place = [c.const + sum(t.coef * (at_loop[t.loop] // t.div) for t in c.terms) for c in access.index]
        for lane in range(access.width):
            here = list(place)
            here[access.axis] += lane
            if all(0 <= x < n for x, n in zip(here, layout.shape, strict=True)):
                lines.add(int(offsets[tuple(here)]) * 4 // LINE)
    return len(lines)


def spread_of(layout: Layout, access: Access, loops: tuple[tuple[str, int], ...]):
    (bundle,) = bundles([access])
    return spread(layout, bundle.coords, bundle.offsets, (access.axis, access.width), 4, LINE, loops)


LAYOUTS = {
    "rows": lambda s: Layout.row_major(s),
    "columns": lambda s: Layout.row_major(s, (1, 0)),
    "tile 4x4": lambda s: Layout.r_tile(s, 4, 4),
    "tile 16x16": lambda s: Layout.r_tile(s, 16, 16),
    "tile 4x16": lambda s: Layout.r_tile(s, 4, 16),
    "column panels": lambda s: Layout.tiled(s, {1: 16}, (1, 0)),
    "row panels": lambda s: Layout.tiled(s, {0: 16}, (0, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("walk", ["ij", "ji"])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_lines_of_a_matrix_walk(name, walk, width):
    """Every suffix of the loops of a walk over a matrix, vectors along rows, aligned tiles: exact."""
    shape = (32, 64)
    layout = LAYOUTS[name](shape)
    access = at(0, var("i"), index(j=width), width=width, axis=1)
    extents = {"i": 32, "j": 64 // width}
    loops = tuple((v, extents[v]) for v in walk)
    got = spread_of(layout, access, loops).lines
    for k in range(3):
        expected = brute_lines(layout, access, loops[k:], dict.fromkeys(("i", "j"), 0))
        assert got[k] == expected, f"{name}, loops {loops[k:]}: {got[k]} lines, {expected} by enumeration"


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_lines_of_blocked_walks_are_near_brute_force(name, bi, bj, si, sj, swap):
    """Two loops an axis (blocks and steps within them), any order: within a factor of two of enumeration."""
    shape = (bi * si, bj * sj)
    layout = LAYOUTS[name](shape)
    access = at(0, index(bi=si, i=1), index(bj=sj, j=1))
    loops = (("bi", bi), ("bj", bj), ("i", si), ("j", sj))
    loops = loops if not swap else loops[::-1]
    got = spread_of(layout, access, loops).lines
    outside = dict.fromkeys(("bi", "bj", "i", "j"), 0)
    for k in range(5):
        expected = brute_lines(layout, access, loops[k:], outside)
        assert expected / 2 <= got[k] <= expected * 2, (layout.describe(), loops[k:], got[k], expected)


def test_strides_of_loops():
    layout = Layout.row_major((32, 64))
    access = at(0, var("i"), index(j=16), width=16, axis=1)
    assert spread_of(layout, access, (("b", 3), ("i", 32), ("j", 4))).strides == (0, 256, 64)


def test_accesses_that_differ_in_constants_are_one_bundle():
    tile = [at(0, index(r, i=8), var("k")) for r in range(8)] + [
        at(1, var("k"), index(16 * c, j=32), width=16, axis=1) for c in range(2)
    ]
    found = bundles(tile)
    assert [(b.access.operand, b.count, b.offsets) for b in found] == [(0, 8, ((0, 1, 8),)), (1, 2, ((1, 16, 2),))]
    layout = Layout.row_major((64, 64))
    first = found[0]
    assert spread(layout, first.coords, first.offsets, (0, 1), 4, LINE, (("k", 16),)).lines == (8, 8)


def test_a_gather_touches_a_row_of_lines_per_id():
    table = Layout.row_major((1000, 64))
    access = at(0, Data(1, (var("n"),)), index(j=16), width=16, axis=1)
    assert spread_of(table, access, (("n", 10), ("j", 4))).lines == (40, 4, 1)
    # More ids than rows touch every row once.
    assert spread_of(table, access, (("n", 5000), ("j", 4))).lines[0] == 4000


def test_a_broadcast_operand_is_one_place():
    bias = Layout.row_major((64,)).expand((32, 64))
    assert spread_of(bias, at(0, var("i"), var("j")), (("i", 32), ("j", 64))).lines == (4, 4, 1)


# ---- traffic -------------------------------------------------------------------------------------------------------


def copy_nest(m: int, n: int, width: int = 16) -> Nest:
    loops = (Loop("i", m), Loop("j", n // width))
    accesses = (
        at(0, var("i"), index(j=width), width=width, axis=1),
        at(1, var("i"), index(j=width), width=width, axis=1, write=True),
    )
    return Nest((Loop("g", 1, "group"),), (Phase(loops, accesses, flops=width),))


def test_streaming_misses_each_line_once():
    c = counts(kernel(copy_nest(1024, 4096), Layout.row_major((1024, 4096)), Layout.row_major((1024, 4096))))
    size = 1024 * 4096 * 4
    for level in ("near_bytes", "middle_bytes", "memory_bytes"):
        assert c[level] == size + 2 * size, "one read, and a store's fetch and write-back"
    assert c["unique_bytes"] == 2 * size
    assert c["vector_loads"] == c["vector_stores"] == size / 64
    assert c["scalar_loads"] == c["scalar_stores"] == c["strided"] == c["conflicts"] == 0
    assert c["flops"] == 1024 * 4096
    assert c["flop_slots"] == 1024 * 4096 / 16


@pytest.mark.parametrize("order", ["alone first", "in place first"])
def test_counts_do_not_depend_on_what_the_nest_was_counted_for_before(order):
    """A nest keeps what it was asked: other layouts, dtypes and operands that share a storage are other questions."""
    rows, columns = Layout.row_major((256, 4096)), Layout.row_major((256, 4096), (1, 0))
    alone = kernel(copy_nest(256, 4096), rows, columns).spec
    specs = [alone, replace(alone, inplace=((0, 0),)), replace(alone, dtypes=("bool", "bool"))]
    pairs = [(rows, columns), (rows, rows), (columns, rows)]
    questions = [(spec, layouts) for spec in specs for layouts in pairs]
    nest = copy_nest(256, 4096)
    for spec, layouts in questions if order == "alone first" else reversed(questions):
        fresh = counts(kernel(copy_nest(256, 4096), *layouts, spec=spec))
        assert counts(kernel(nest, *layouts, spec=spec)) == fresh
    assert len({tuple(counts(kernel(nest, *x, spec=spec)).values()) for spec, x in questions}) == len(questions)


def test_a_column_walk_fetches_a_line_per_value_where_the_column_overflows_the_cache():
    column = Nest((Loop("g", 1, "group"),), (Phase((Loop("j", 64), Loop("i", 2048)), (at(0, var("i"), var("j")),)),))
    c = counts(kernel(column, Layout.row_major((2048, 64)), Layout.row_major((1, 1))))
    # 2048 lines of a column are 128 KiB: too much for the near cache (32 KiB), not for the middle one (1 MiB).
    assert c["near_bytes"] == 2048 * 64 * 64
    assert c["middle_bytes"] == c["memory_bytes"] == 2048 * 64 * 4
    assert c["strided"] == 0, "the outer loop is unit stride: only two loops are looked at"
    c = counts(kernel(column, Layout.row_major((2048, 64), (1, 0)), Layout.row_major((1, 1))))
    assert c["near_bytes"] == 2048 * 64 * 4


def test_strided_streams_and_conflicts_are_counted():
    first = Nest((Loop("g", 1, "group"),), (Phase((Loop("i", 512),), (at(0, var("i"), Index()),)),))
    wide = counts(kernel(first, Layout.row_major((512, 1024)), Layout.row_major((1, 1))))
    assert wide["strided"] == wide["conflicts"] == 512, "4096 bytes from read to read: one set of eight ways"
    odd = counts(kernel(first, Layout.row_major((512, 1040)), Layout.row_major((1, 1))))
    assert (odd["strided"], odd["conflicts"]) == (512, 0)


def test_lanes_that_fall_into_one_set_conflict():
    """Sixteen rows 4 KiB apart share a set of eight ways; 4160 bytes apart they do not."""
    phase = Phase((Loop("j", 8),), (at(0, Index(), var("j"), width=16, axis=0, write=True),))
    nest = Nest((Loop("g", 1, "group"),), (phase,))
    for columns, conflicts in ((1024, 8), (1040, 0)):
        c = counts(kernel(nest, Layout.row_major((16, columns)), Layout.row_major((1, 1))))
        assert c["conflicts"] == conflicts
        assert c["scalar_stores"] == 8 * 16


@pytest.mark.parametrize(
    ("layout", "shifts", "divisions"),
    [
        (Layout.row_major((48, 60)), 0, 0),
        (Layout.r_tile((48, 64), 4, 16), 4, 0),  # i>>2, i&3, j>>4, j&15
        (Layout.r_tile((48, 60), 4, 15), 2, 2),  # j/15, j%15
        (Layout.row_major((3, 17, 64)).permute((0, 2, 1)).reshape((3 * 64, 17)), 2, 0),  # i>>6, i&63
    ],
)
def test_index_arithmetic_of_a_layout(layout, shifts, divisions):
    walk = Nest((Loop("g", 1, "group"),), (Phase((Loop("i", 5), Loop("j", 2)), (at(0, var("i"), var("j")),)),))
    c = counts(kernel(walk, layout, Layout.row_major((1, 1))))
    assert (c["index_shifts"], c["index_divisions"]) == (10 * shifts, 10 * divisions)
    expression = layout.c_expr("i", "j")
    assert expression.count(">>") + expression.count("&") == shifts
    assert expression.count("/") + expression.count("%") == divisions


def test_matrix_reread_by_every_group_is_kept_by_the_cache_that_holds_it():
    b = Layout.row_major((256, 256))  # 256 KiB
    loops = (Loop("k", 256), Loop("j", 16))
    nest = Nest((Loop("g", 10, "group"),), (Phase(loops, (at(0, var("k"), index(j=16), width=16, axis=1),)),))
    c = counts(kernel(nest, b, Layout.row_major((1, 1))))
    assert c["near_bytes"] == 10 * 256 * 1024
    assert c["middle_bytes"] == c["memory_bytes"] == 256 * 1024


def test_phases_share_what_fits():
    row = at(0, var("i"), index(j=16), width=16, axis=1)
    for n, passes in ((1024, 1), (65536, 2)):
        phase = Phase((Loop("j", n // 16),), (row,))
        nest = Nest((Loop("i", 8, "group"),), (phase, phase))
        c = counts(kernel(nest, Layout.row_major((8, n)), Layout.row_major((1, 1))))
        assert c["near_bytes"] == passes * 8 * n * 4, f"rows of {n * 4} bytes are fetched {passes} times"


def test_depth_keeps_a_value_in_its_register():
    phase = Phase((Loop("i", 8), Loop("j", 100)), (at(0, var("i"), Index(), depth=1),))
    c = counts(kernel(Nest((Loop("g", 1, "group"),), (phase,)), Layout.row_major((8, 1)), Layout.row_major((1, 1))))
    assert c["scalar_loads"] == 8
    assert c["trips"] == 800


def test_in_place_operands_are_one():
    both = kernel(copy_nest(64, 64), *[Layout.row_major((64, 64))] * 2)
    apart = counts(both)["unique_bytes"]
    spec = replace(both.spec, inplace=((0, 0),))
    assert counts(replace(both, spec=spec))["unique_bytes"] == apart / 2


def test_vectors_over_a_layout_that_scatters_them_are_scalars():
    columns = Layout.row_major((64, 64), (1, 0))
    c = counts(kernel(copy_nest(64, 64), columns, Layout.row_major((64, 64))))
    assert (c["vector_loads"], c["scalar_loads"], c["vector_stores"]) == (0, 64 * 64, 256)
    assert c["request_lines"] == 16 * 256 + 256


# ---- devices -------------------------------------------------------------------------------------------------------


def test_work_groups_share_the_compute_units():
    def trips(groups: int, units: int) -> float:
        nest = Nest((Loop("g", groups, "group"),), (Phase((Loop("i", 10),), (at(0, var("i")),)),))
        return counts(kernel(nest, Layout.row_major((10,)), Layout.row_major((1,))), replace(CPU, compute_units=units))[
            "trips"
        ]

    assert trips(1, 4) == 10, "one group keeps one unit busy"
    assert trips(4, 4) == 10
    assert trips(5, 4) == 20, "the fifth waits"


def test_a_wave_over_neighbours_requests_few_lines_and_over_a_stride_many():
    gpu = replace(CPU, wave_items=32)
    for order, lines in (((0, 1), 2), ((1, 0), 32)):
        nest = Nest(
            (Loop("g", 16, "group"), Loop("x", 64, "item")), (Phase((Loop("k", 8),), (at(0, var("k"), var("x")),)),)
        )
        c = counts(kernel(nest, Layout.row_major((64, 64), order), Layout.row_major((1, 1))), gpu)
        requests = 16 * 64 * 8 / 32
        assert c["request_lines"] == requests * lines


def test_machine_of_a_phone_leaves_the_image_cache_to_images():
    phone = device.load("adreno-740")
    machine = Machine.of(phone.limits, phone.caches)
    assert machine.sizes_bytes == (1 << 20,) * 3
    assert machine.wave_items == 128
    assert Machine.of(DeviceLimits(), ()).line_bytes == 64, "a model without caches still counts lines"


def test_transcendentals_follow_the_expression():
    expr = Expr((("exp", ("x", 0)), ("add", ("t", 0), ("c", 1.0)), ("log", ("t", 1))), (("t", 2),))
    spec = OpSpec("pointwise", ((6, 7), (6, 7)), ("float32",) * 2, 1, (("expr", expr),))
    k = kernel(copy_nest(1, 16), Layout.row_major((6, 7)), Layout.row_major((6, 7)), spec=spec)
    assert transcendentals(k) == 2 * 42
    softmax = OpSpec("softmax", ((6, 7), (6, 7)), ("float32",) * 2, 1)
    assert transcendentals(replace(k, spec=softmax)) == 42


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)))
def test_more_rows_never_cost_less(m, more, source, target):
    """Every count but the conflicts grows with the matrix."""
    small, large = (
        counts(kernel(copy_nest(rows, 64), LAYOUTS[source]((rows, 64)), LAYOUTS[target]((rows, 64))))
        for rows in (m, m + more)
    )
    # The order of column walks changes with the row count: compare what must grow.
    for name in ("trips", "flops", "vector_loads", "scalar_loads", "unique_bytes"):
        assert small[name] <= large[name], name


def test_counts_are_finite_and_not_negative_on_odd_shapes():
    for shape in ((1, 1), (3, 5), (13, 60), (17, 31)):
        for make in LAYOUTS.values():
            loops = (Loop("i", shape[0]), Loop("j", shape[1]))
            accesses = (at(0, var("i"), var("j")), at(1, var("i"), var("j"), write=True))
            nest = Nest((Loop("g", 2, "group"),), (Phase(loops, accesses, 1),))
            values = np.array(features(kernel(nest, make(shape), make(shape)), CPU))
            assert np.isfinite(values).all()
            assert (values >= 0).all()
            assert dict(zip(FEATURES, values, strict=True))["unique_bytes"] >= 2 * prod(shape) * 4


def test_terms_with_division_count_their_values():
    access = Access(0, (Index(0, (Term("t", 1, 8),)), Index(0, (Term("t", 1, 1, 8),))))
    assert spread_of(Layout.row_major((4, 64)), access, (("t", 32),)).lines == (4, 1)
