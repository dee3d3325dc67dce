"""Equal pointwise programs over many ranges as one launch: the same bits as one by one, in an order that is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kernels.batch import Linear, Program, Row, linear, merge, schedule
from kernels.bind import BoundStep
from kernels.execute import Executor
from kernels.families.pointwise import POINTWISE
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.variants import kernels_for
from layoutopt.checkpoint import initial_values
from layoutopt.compare import example_inputs
from layoutopt.expr import evaluate_expr
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from layoutopt.models import shipped
from layoutopt.plan import ArenaSlot
from tests.kernel_cases import GPU_LIMITS
from tests.plans import any_of, first, mixed, naive_plan, r_tile, row_major

CPU = DeviceLimits(kind="cpu", simd_width=16)
SGD = Expr((("mul", ("c", 0.9), ("x", 2)), ("add", ("t", 0), ("x", 1)), ("mul", ("x", 3), ("t", 1)),
            ("sub", ("x", 0), ("t", 2))), (("t", 3), ("t", 1)))  # fmt: skip
ADD = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
GELU = Expr((("erf", ("x", 0)), ("mul", ("t", 0), ("x", 0))), (("t", 1),))
SELECT = Expr((("where", ("x", 0), ("x", 1), ("c", -1.5)), ("not", ("x", 0))), (("t", 0), ("t", 1)))


def add_spec(shape: tuple[int, ...], expr: Expr = ADD, dtypes: tuple[str, ...] = ("float32",) * 3) -> OpSpec:
    return OpSpec("pointwise", (shape,) * len(dtypes), dtypes, len(dtypes) - len(expr.results), (("expr", expr),))


def kernels(spec: OpSpec, layouts: Sequence[Layout], limits: DeviceLimits) -> list[Kernel]:
    return kernels_for(spec, tuple(layouts), limits)


# ---- host: which kernels are linear ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
def test_operands_that_lie_alike_are_linear(limits: DeviceLimits) -> None:
    for layout in (
        Layout.row_major((6, 20)),
        Layout.row_major((6, 20), (1, 0)),
        Layout.r_tile((8, 20), 4, 4),
        Layout.r_tile((7, 18), 4, 4),  # padded: storage itself is walked
    ):
        forms = {linear(k) for k in kernels(add_spec(layout.shape), [layout] * 3, limits)}
        found = [f for f in forms if f is not None]
        assert found
        assert {f.elems for f in found} == {layout.size_elems}
        assert all(f.program.ways == ("each",) * 3 for f in found)


def test_scalars_rows_and_places_are_told_apart() -> None:
    matrix, shape = Layout.row_major((6, 20)), (6, 20)
    scalar = Layout.row_major(()).reshape((1, 1))
    assert scalar is not None
    row = Layout.row_major((20,)).reshape((1, 20))
    column = Layout.row_major((6,)).reshape((6, 1))
    assert row is not None
    assert column is not None
    later = Layout.row_major((10, 20)).slice(0, 4, 10)
    ways = {}
    for name, second in {
        "one": scalar.expand(shape),
        "cycle": row.expand(shape),
        "column": column.expand(shape),
        "later": later,
    }.items():
        forms = [linear(k) for k in kernels(add_spec(shape), [matrix, second, matrix], GPU_LIMITS)]
        ways[name] = {(f.program.ways[1], f.period, f.bases) for f in forms if f is not None}
    assert ways["one"] == {("one", 1, (0, 0, 0))}
    assert ways["cycle"] == {("cycle", 20, (0, 0, 0))}
    assert ways["column"] == set()
    assert ways["later"] == {("each", 1, (0, 80, 0))}


def test_what_walks_otherwise_is_not_linear() -> None:
    a, b = Layout.row_major((8, 20)), Layout.row_major((8, 20), (1, 0))
    assert {linear(k) for k in kernels(add_spec((8, 20)), [a, b, a], GPU_LIMITS)} == {None}
    # Vectors of 4 end at every row's end where a row has 18 elements; elements one by one do not.
    row = Layout.row_major((18,)).reshape((1, 18))
    assert row is not None
    matrix = Layout.row_major((5, 18))
    found = kernels(add_spec((5, 18)), [matrix, row.expand((5, 18)), matrix], GPU_LIMITS)
    forms = {k.variant.param("v"): linear(k) for k in found}
    assert forms[4] is None
    assert isinstance(forms[1], Linear)


# ---- host: order ----------------------------------------------------------------------------------------------------


def steps_of(*places: tuple[int, int, int], other: frozenset[int] = frozenset()) -> tuple[list[BoundStep], dict]:
    """Additions of 16 floats at (a, b, result), in units of 64 bytes; those in ``other`` are not linear."""
    flat = Layout.row_major((16,))
    square, turned = Layout.row_major((4, 4)), Layout.row_major((4, 4), (1, 0))
    plain = kernels(add_spec((16,)), [flat] * 3, GPU_LIMITS)[0]
    odd = kernels(add_spec((4, 4)), [square, turned, square], GPU_LIMITS)[0]
    slots, steps = {}, []
    for i, place in enumerate(places):
        names = tuple(f"s{i}.{k}" for k in range(3))
        slots |= {n: ArenaSlot(n, 64 * at, 64, 0, 99) for n, at in zip(names, place, strict=True)}
        steps.append(BoundStep(f"step {i}", "forward", odd if i in other else plain, names, names, None))
    return steps, slots


def ordered(steps: list[BoundStep], slots: dict, delay: bool) -> list[tuple[int, ...]]:
    return schedule([(i,) for i in range(len(steps))], steps, slots, delay=delay)


@pytest.mark.parametrize("delay", [False, True])
def test_independent_neighbours_go_together(delay: bool) -> None:
    assert ordered(*steps_of((0, 1, 2), (0, 3, 4), (5, 1, 6)), delay) == [(0, 1, 2)]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(
    "places",
    [((0, 1, 2), (2, 3, 4)), ((0, 1, 2), (3, 4, 0)), ((0, 1, 2), (3, 4, 2))],
    ids=["reads what was written", "overwrites what was read", "overwrites what was written"],
)
def test_steps_that_meet_in_memory_stay_in_order(places: tuple, delay: bool) -> None:
    assert ordered(*steps_of(*places), delay) == [(0,), (1,)]


def test_a_step_between_is_overtaken_only_where_that_may_be() -> None:
    apart = steps_of((0, 1, 2), (3, 4, 5), (6, 7, 8), other=frozenset({1}))
    assert ordered(*apart, delay=False) == [(0,), (1,), (2,)]
    assert ordered(*apart, delay=True) == [(1,), (0, 2)]
    reader = steps_of((0, 1, 2), (2, 4, 5), (6, 7, 8), other=frozenset({1}))
    assert ordered(*reader, delay=True) == [(0,), (1,), (2,)]
    feeds_the_next = steps_of((0, 1, 2), (3, 4, 5), (5, 7, 8), other=frozenset({1}))
    assert ordered(*feeds_the_next, delay=True) == [(1,), (0, 2)]
    needs_the_first = steps_of((0, 1, 2), (3, 4, 5), (6, 7, 4), (9, 9, 0), other=frozenset({1}))
    assert ordered(*needs_the_first, delay=True) == [(1,), (0, 2), (3,)]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_leaves_the_memory_that_the_plans_order_leaves(seed: int) -> None:
    """Random steps over few places, simulated: whatever goes together reads before any of it writes."""
    rng = np.random.default_rng(seed)
    count = 30
    places = [tuple(int(x) for x in rng.integers(0, 14, 3)) for _ in range(count)]
    other = frozenset(int(i) for i in rng.integers(0, count, 8))
    steps, slots = steps_of(*places, other=other)

    def left(order: list[tuple[int, ...]]) -> np.ndarray:
        memory = np.arange(14.0)
        for group in order:
            sums = [(places[i][2], memory[places[i][0]] * 0.5 + memory[places[i][1]] * 0.3 + i) for i in group]
            for place, value in reversed(sums):
                memory[place] = value
        return memory

    expected = left([(i,) for i in range(count)])
    for delay in (False, True):
        order = ordered(steps, slots, delay)
        assert sorted(i for group in order for i in group) == list(range(count))
        np.testing.assert_array_equal(left(order), expected)


# ---- device ---------------------------------------------------------------------------------------------------------


def run_rows(
    runtime: Runtime, program: Program, rows: list[Row], arena: np.ndarray, limits: DeviceLimits
) -> np.ndarray:
    """The arena after a merged launch, [bytes]."""
    merged = merge(program, rows, limits, "test")
    buffer = runtime.allocate(arena.nbytes)
    runtime.upload(buffer, arena)
    kernel = runtime.kernel(merged.source, "batch", merged.label)
    tables = runtime.constant(merged.rows), runtime.constant(merged.groups)
    kernel.set_args(buffer, *tables)
    runtime.enqueue([(kernel, merged.global_size, merged.local_size)])
    return runtime.download(buffer, np.empty_like(arena))


SIZES = (1, 3, 4, 37, 511, 512, 2048, 2049, 5003, 40000)


@pytest.mark.parametrize("limits", [CPU, replace(GPU_LIMITS, compute_units=1), GPU_LIMITS], ids=["cpu", "small", "gpu"])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("shift", [0, 4], ids=["aligned", "unaligned"])
def test_every_size_in_place_with_a_scalar(device_index: int, limits: DeviceLimits, width: int, shift: int) -> None:
    """Momentum SGD over odd sizes: all is as the program says, and nothing else in the arena changes."""
    rng = np.random.default_rng(width)
    arena = rng.standard_normal(400000).astype(np.float32)
    expected, rows, at = arena.astype(np.float64), [], 64
    program = Program(SGD, ("float32",) * 6, 4, ("each", "each", "each", "one", "each", "each"), width)
    rate = 7
    for n in SIZES:
        p, g, m = (at + k * (n + 67) // 64 * 64 for k in range(3))
        rows.append(Row(n, 1, tuple(4 * x + shift for x in (p, g, m, rate, p, m))))
        s = shift // 4
        old = [expected[x + s : x + s + n].copy() for x in (p, g, m)]
        new = evaluate_expr(SGD, [*old, np.broadcast_to(expected[rate + s], (n,))])
        expected[p + s : p + s + n], expected[m + s : m + s + n] = new
        at += 3 * (n + 130) // 64 * 64 + 64
    got = run_rows(Runtime(devices()[device_index]), program, rows, arena.view(np.uint8), limits).view(np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    untouched = expected == arena.astype(np.float64)
    assert untouched.sum() > 1000
    np.testing.assert_array_equal(got[untouched], arena[untouched])


@pytest.mark.parametrize("width", [1, 4, 16])
def test_rows_again_and_again_and_bools(device_index: int, width: int) -> None:
    rng = np.random.default_rng(0)
    runtime = Runtime(devices()[device_index])
    arena = rng.standard_normal(30000).astype(np.float32)
    expected, rows = arena.astype(np.float64), []
    for k, (m, d) in enumerate([(5, 48), (1, 16), (33, 64)]):
        x, b, y = 5000 * k, 15000 + 500 * k, 20000 + 3000 * k
        rows.append(Row(m * d, d, (4 * x, 4 * b, 4 * y)))
        expected[y : y + m * d] = (expected[x : x + m * d].reshape(m, d) + expected[b : b + d]).ravel()
    program = Program(ADD, ("float32",) * 3, 2, ("each", "cycle", "each"), width)
    for limits in (CPU, GPU_LIMITS):
        got = run_rows(runtime, program, rows, arena.view(np.uint8), limits).view(np.float32)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    mask = (rng.random(1003) < 0.5).astype(np.uint8)
    mixed_bytes = np.zeros(16384, np.uint8)
    mixed_bytes[:1003] = mask
    mixed_bytes[2048 : 2048 + 4012] = arena[:1003].view(np.uint8)
    chosen = Program(SELECT, ("bool", "float32", "float32", "bool"), 2, ("each",) * 4, width)
    got = run_rows(runtime, chosen, [Row(1003, 1, (0, 2048, 8192, 13312))], mixed_bytes, GPU_LIMITS)
    np.testing.assert_array_equal(
        got[8192 : 8192 + 4012].view(np.float32), np.where(mask, arena[:1003], np.float32(-1.5))
    )
    np.testing.assert_array_equal(got[13312 : 13312 + 1003], 1 - mask)


def test_functions_of_our_own_are_there(device_index: int) -> None:
    x = np.linspace(-3, 3, 1024).astype(np.float32)
    program = Program(GELU, ("float32",) * 2, 1, ("each", "each"), 4)
    arena = np.concatenate([x, np.zeros(1024, np.float32)]).view(np.uint8)
    got = run_rows(Runtime(devices()[device_index]), program, [Row(1001, 1, (0, 4096))], arena, GPU_LIMITS)
    (expected,) = evaluate_expr(GELU, [x.astype(np.float64)])
    np.testing.assert_allclose(got.view(np.float32)[1024:2025], expected[:1001], rtol=1e-5, atol=1e-6)
    assert not got.view(np.float32)[2025:].any()


def test_long_ranges_count_in_64_bits() -> None:
    program = Program(ADD, ("float32",) * 3, 2, ("each",) * 3, 4)
    far = 1 << 36
    short = merge(program, [Row(1 << 20, 1, (0, far, 2 * far))], GPU_LIMITS, "short")
    assert "#define NUMBER uint\n" in short.source
    assert [int(x) for x in short.rows[0]] == [1 << 20, 1, 0, far, 2 * far]
    long = merge(program, [Row((1 << 31) + 8, 1, (0, far, 2 * far)), Row(3, 1, (0, 64, 128))], GPU_LIMITS, "long")
    assert "#define NUMBER ulong\n" in long.source
    chunk = int(long.source.split("#define CHUNK ")[1].split()[0])
    assert len(long.groups) == -(-((1 << 31) + 8) // chunk) + 1


# ---- whole steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "choose", "kernel"),
    [("gpu", row_major, first), ("cpu", r_tile, first), ("gpu", mixed(2), any_of(1))],
    ids=["gpu rows", "cpu tiles", "gpu mixed"],
)
def test_steps_that_share_launches_change_no_bit(device_index: int, kind: str, choose, kernel) -> None:
    runtime, graph = Runtime(devices()[device_index]), shipped("vit-digits")
    own = runtime.limits
    as_gpu = replace(GPU_LIMITS, base_align_bytes=own.base_align_bytes, max_alloc_bytes=own.max_alloc_bytes)
    limits = own if kind == "cpu" else replace(as_gpu, global_mem_bytes=own.global_mem_bytes)
    plan = naive_plan(graph, limits, choose, kernel, reuse=True)
    values, inputs = initial_values(graph, 0), example_inputs(graph)
    left, launches = [], []
    for share in (True, False):
        run = Executor(runtime, graph, plan, values, limits=limits, share=share, poison=True)
        run.forward(inputs)
        forward = {name: run.read(name) for name in graph.outputs}
        assert all(np.array_equal(run.read(name), value) for name, value in values.items())
        run.step(inputs)
        run.step(inputs)
        left.append({f"forward {n}": v for n, v in forward.items()} | run.values() | {"loss": np.array(run.loss())})
        launches.append(run.launches)
        if share:
            updates = [op.name for op in graph.ops if op.phase == "update"]
            sharing = [run.shared[name] for name in updates if name in run.shared]
            assert choose is not row_major or sum(sharing) / len(sharing) > len(updates) / 3
        run.close()
    assert launches[0] < launches[1] - (40 if choose is row_major else 5)
    for name, value in left[1].items():
        np.testing.assert_array_equal(left[0][name], value, err_msg=name)


def test_a_shared_launch_is_divided_by_bytes(device_index: int) -> None:
    runtime, graph = Runtime(devices()[device_index]), shipped("vit-digits")
    run = Executor(runtime, graph, naive_plan(graph, runtime.limits), initial_values(graph, 0))
    inputs = example_inputs(graph)
    times = run.launch_times(inputs)
    assert [len(t) for t in times] == [len(step.kernel.launches) for step in run.steps]
    at = {step.label: i for i, step in enumerate(run.steps)}
    updates = [at[op.name] for op in graph.ops if op.phase == "update" and run.shared.get(op.name, 1) > 20]
    spans = sorted(times[i][0] for i in updates)
    assert all(a[1] == b[0] for a, b in pairwise(spans)), "one after the other, without gaps"
    lasted = {i: times[i][0][1] - times[i][0][0] for i in updates}
    elems = {i: run.steps[i].kernel.buffer_layout(0).size_elems for i in updates}
    large, small = max(updates, key=elems.__getitem__), min(updates, key=elems.__getitem__)
    assert lasted[large] >= lasted[small]
    total = spans[-1][1] - spans[0][0]
    part = elems[large] / sum(elems.values())
    assert lasted[large] == pytest.approx(total * part, abs=2)
    profiled = run.profile(inputs)
    assert [label for label, _ in profiled] == [step.label for step in run.steps]


def test_pointwise_variants_are_all_considered() -> None:
    """A walk that ``linear`` does not know would silently never share a launch."""
    spec = add_spec((64, 64))
    for limits in (CPU, GPU_LIMITS):
        names = {v.name for v in POINTWISE.variants(spec, limits)}
        assert names <= {"thin", "fat", "linear_thin", "linear_fat"}
