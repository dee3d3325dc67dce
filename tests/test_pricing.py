"""What pricing remembers and shares: what may be told apart is, and the tables are the same whoever prices."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from costmodel.device import load
from costmodel.model import CostModel
from kernels.spec import OpSpec, op_spec
from layoutopt import planner, pricing_apart, pricing_rows
from layoutopt.asked import Asked, Moves, Slots
from layoutopt.blocks import spec_ids
from layoutopt.candidates import Rules, candidates
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from layoutopt.planner import plan, tabulate
from layoutopt.pricer import Pricer
from layoutopt.pricing import Tables
from layoutopt.problem import Choice
from layoutopt.sweep import plan_bytes
from tests.fake_costs import FakeCosts
from tests.graphs import Sketch, linear_step, reshape

COSTS = FakeCosts()
RULES = Rules((16,), ((4, 4), (16, 16)), cap=6)
SIZE = 32


def products(pairs: list[tuple[str, str]], outputs: tuple[str, ...]) -> TrainingGraph:
    """Products of square matrices, each behind a different reduction, so that no two of them are neighbours."""
    s = Sketch()
    for name in sorted({name for pair in pairs for name in pair}):
        s.tensor(name, (SIZE, SIZE), "parameter")
    for i, (a, b) in enumerate(pairs):
        batched = [(a, reshape(1, SIZE, SIZE)), (b, reshape(1, SIZE, SIZE))]
        s.op("contraction", batched, {f"y{i}": (1, SIZE, SIZE)})
        s.op("reduce", [(f"y{i}", reshape(SIZE, SIZE))], {f"r{i}": (SIZE,)}, fn=("sum", "max", "mean")[i % 3])
    return run_passes(s.graph("products", *(f"r{i}" for i in range(len(pairs))), *outputs))[0]


def priced(graph: TrainingGraph, pricer: Pricer | None = None) -> Tables:
    return tabulate(graph, COSTS, candidates(graph, RULES), pricer=pricer)


def choices(tables: Tables, kind: str) -> list[tuple[Choice, ...]]:
    found = zip(tables.graph.ops, tables.problem.ops, strict=True)
    return [node.choices for op, node in found if op.kind == kind]


# ---- what is remembered ----------------------------------------------------------------------------------------------


def test_equal_ops_share_an_answer_only_where_their_storages_may_lie_alike() -> None:
    tables = priced(products([("a", "b"), ("c", "d"), ("e", "f")], ("y2",)))
    free, alike, fixed = choices(tables, "contraction")
    assert free is alike
    assert fixed != free
    assert {choice.layouts[2] for choice in fixed} == {0}, "what the host reads is row-major"
    assert len({choice.layouts[2] for choice in free}) > 1


def test_equal_ops_share_an_answer_only_where_they_are_tied_alike() -> None:
    free, square = choices(priced(products([("a", "b"), ("c", "c")], ())), "contraction")
    assert any(choice.layouts[0] != choice.layouts[1] for choice in free)
    assert all(choice.layouts[0] == choice.layouts[1] for choice in square)


def test_every_op_has_the_choices_that_it_would_have_alone() -> None:
    graph = products([("a", "b"), ("c", "c"), ("e", "f"), ("f", "e")], ("y2",))
    tables = priced(graph)
    for op, node in zip(graph.ops, tables.problem.ops, strict=True):
        slots = Slots.of(graph, op, node.operands, tables.problem.storages)
        lead = tuple(range(len(slots.members)))
        limit = 216 if op.kind == "contraction" else 96
        assert Asked(op_spec(graph, op), 1, slots, lead, limit).answer(Pricer(COSTS))[0] == node.choices


def test_kernels_that_share_a_launch_are_remembered_apart_from_those_that_do_not() -> None:
    pricer = Pricer(CostModel(load("nvidia-h200")))
    graph = products([("a", "b")], ())
    tables = tabulate(graph, pricer.costs, candidates(graph, RULES))
    slots = Slots.of(graph, graph.ops[0], tables.problem.ops[0].operands, tables.problem.storages)
    alone, shared = (
        Asked(op_spec(graph, graph.ops[0]), count, slots, (0, 1, 2), 216).answer(pricer)[0] for count in (1, 4)
    )
    assert min(c.cost_ns for c in shared) < min(c.cost_ns for c in alone)


def test_relayouts_are_remembered_by_all_that_they_depend_on() -> None:
    shape = (64, 48)
    layouts = Layout.row_major(shape), Layout.r_tile(shape, 4, 4), Layout.row_major(shape, (1, 0))
    free = Moves(shape, "float32", layouts, -1)
    pricer = Pricer(COSTS)
    every = free.answer(pricer)
    assert set(every) == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert Moves(shape, "float32", layouts, -1).answer(pricer) is every
    assert set(replace(free, primary=1).answer(pricer)) == {(1, 0), (1, 2)}
    turned = replace(free, candidates=(*layouts[1:], layouts[0])).answer(pricer)
    assert {((a + 1) % 3, (b + 1) % 3): ns for (a, b), ns in turned.items()} == every
    assert turned != every
    assert replace(free, dtype="int32").answer(pricer) is not every


def test_a_graph_is_not_asked_twice_what_its_ops_are() -> None:
    graph = products([("a", "b")], ())
    assert spec_ids(graph) is spec_ids(graph)
    assert spec_ids(graph.with_ops(graph.ops[:1], outputs=("y0",))).size == 1
    with pytest.raises(ValueError, match="read-only"):
        spec_ids(graph)[0] = 7


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Three processes for however little there is to price; those that were started."""
    begun: list[subprocess.Popen[bytes]] = []
    start = pricing_apart._start

    def watched() -> subprocess.Popen[bytes]:
        begun.append(start())
        return begun[-1]

    monkeypatch.setattr(pricing_apart, "WORTH_TUPLES", 1)
    monkeypatch.setattr(pricing_apart, "BEGIN_TUPLES", 0)
    monkeypatch.setattr(pricing_apart, "_cores", lambda: 3)
    monkeypatch.setattr(pricing_apart, "_start", watched)
    return begun


@pytest.fixture(scope="module")
def step() -> TrainingGraph:
    return run_passes(linear_step(4, 8, 48, 64))[0]


@pytest.mark.parametrize("device", ["generic-cpu", "nvidia-h200"])
def test_tables_and_plans_are_the_same_however_many_processes_price(
    device: str, step: TrainingGraph, helpers: list[subprocess.Popen[bytes]]
) -> None:
    costs = CostModel(load(device))
    with pricing_apart.in_one_process():
        alone = tabulate(step, costs)
        kernels = alone.kernels
        expected = [plan_bytes(plan(step, costs, name, tables=alone)) for name in ("ilp", "tflite")]
    assert not helpers
    shared = tabulate(step, costs)
    assert len(helpers) == 2
    assert (shared.problem, shared.kernels) == (alone.problem, kernels)
    assert [plan_bytes(plan(step, costs, name, tables=shared)) for name in ("ilp", "tflite")] == expected
    for own, other in zip(alone.books, shared.books, strict=True):
        assert own.noted() == other.noted()
    assert all(helper.poll() == 0 for helper in helpers)


def test_a_form_priced_after_helpers_worked_is_priced_as_after_one_process(
    step: TrainingGraph, helpers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostModel(load("generic-cpu"))
    first = run_passes(linear_step(4, 8, 48, 32))[0]
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(pricing_apart, "_cores", partial(int, cores))
        pricer = Pricer(costs)
        found.append([tabulate(graph, costs, pricer=pricer).problem for graph in (first, step)])
    assert found[0] == found[1]
    assert helpers


def test_a_helper_that_fails_is_announced_and_its_part_priced_here(
    step: TrainingGraph,
    helpers: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = shutil.which("false")
    assert broken
    costs = CostModel(load("generic-cpu"))
    with pricing_apart.in_one_process():
        expected = tabulate(step, costs)
    monkeypatch.setattr(sys, "executable", broken)
    found = tabulate(step, costs)
    assert (found.problem, found.kernels) == (expected.problem, expected.kernels)
    assert len(helpers) == len([r for r in caplog.records if "a helper that prices kernels failed" in r.message]) == 2


def test_where_no_process_can_be_started_one_prices_all(
    step: TrainingGraph,
    helpers: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    costs = CostModel(load("generic-cpu"))
    with pricing_apart.in_one_process():
        expected = tabulate(step, costs)
    monkeypatch.setattr(pricing_apart, "_start", refuse)
    assert tabulate(step, costs).problem == expected.problem
    assert "no helper that prices kernels can be started" in caplog.text


def test_no_helper_outlives_a_pricing_that_is_broken_off(
    step: TrainingGraph, helpers: list[subprocess.Popen[bytes]]
) -> None:
    def enough(what: str, share: float) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        tabulate(step, CostModel(load("generic-cpu")), progress=enough)
    assert helpers
    assert all(helper.poll() is not None for helper in helpers)


def test_small_graphs_are_priced_by_one_process(step: TrainingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing_apart, "_cores", lambda: 64)
    monkeypatch.setattr(pricing_apart, "_start", lambda: pytest.fail("a helper was started"))
    tabulate(step, CostModel(load("generic-cpu")))


# ---- rows of a sweep -------------------------------------------------------------------------------------------------


def test_a_branch_leaves_what_it_came_from_as_it_was(step: TrainingGraph) -> None:
    pricer = Pricer(COSTS)
    tables = tabulate(step, COSTS, candidates(step, RULES), pricer=pricer)
    before = pricer.kernels, [book.noted() for book in tables.books]
    branch = pricer.branch()
    assert branch.kernels == 0
    assert tabulate(step, COSTS, candidates(step, RULES), pricer=branch).problem == tables.problem
    assert branch.kernels == 0, "it knows what the other one knew"
    tabulate(run_passes(linear_step(2, 8, 48, 64))[0], COSTS, pricer=branch)
    assert branch.kernels > 0
    for book in tables.books:
        branch.together(book.pricer.count).book(book.spec).narrow([])
    assert (pricer.kernels, [book.noted() for book in tables.books]) == before


def test_rows_that_share_prices_have_the_plans_that_they_would_have_alone(
    step: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pricing_rows, "_kept", type(pricing_rows._kept)())
    costs = [CostModel(load(name)) for name in ("generic-cpu", "adreno-740")]
    least = planner.plan(step, costs[0], "greedy").arena_bytes
    rows = [(c, name, m) for c in costs for name in ("tflite", "ilp", "greedy") for m in (None, least, least * 3 // 4)]

    def bytes_of(cost: CostModel, name: str, memory: int | None) -> bytes | str:
        try:
            return plan_bytes(planner.plan(step, cost, name, memory))
        except planner.InfeasibleError as error:
            return str(error)

    alone = [bytes_of(*row) for row in rows]
    asked: list[OpSpec] = []
    price = Pricer.price

    def counted(pricer: Pricer, spec: OpSpec, *more: object) -> object:
        asked.append(spec)
        return price(pricer, spec, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Pricer, "price", counted)
    with pricing_rows.prices_kept():
        first = bytes_of(*rows[1])
        priced_first = len(asked)
        again = [bytes_of(*row) for row in rows[::-1]][::-1]
    assert first == alone[1]
    assert again == alone
    assert priced_first > 0
    asked.clear()
    with pricing_rows.prices_kept():
        bytes_of(costs[0], "greedy", None)
    assert len(asked) < priced_first / 20, "but for the relayouts that it makes, nothing is priced again"
