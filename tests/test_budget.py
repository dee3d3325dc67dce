"""Plans for little memory of the whole batch: they fit, are the fastest that were found, and say what is missing.

Micro-batches: ``tests/test_micro_plans.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest

from layoutopt import planner, rewrites
from layoutopt.budget import alike, fullest, lean, options
from layoutopt.check import check
from layoutopt.errors import DeviceError, InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.passes import run_passes
from layoutopt.plan import Plan, decode, encode
from layoutopt.planner import assign, plan, tabulate, validate
from layoutopt.rewrites import alternatives, origin_of, planned_graph, rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import linear_step

COSTS = FakeCosts()
STRATEGY = "greedy"
"""Mixed layouts, without a search."""


@lru_cache(maxsize=1)
def graph() -> TrainingGraph:
    return shipped("vit-digits")


@lru_cache(maxsize=1)
def roomy() -> Plan:
    return plan(graph(), COSTS, STRATEGY)


@lru_cache(maxsize=8)
def within(budget_bytes: int) -> Plan:
    return plan(graph(), COSTS, STRATEGY, budget_bytes, micro_batches=1)


@lru_cache(maxsize=1)
def least() -> int:
    with pytest.raises(InfeasibleError) as caught:
        within(roomy().arena_bytes // 8)
    message = str(caught.value)
    found = re.search(r"least feasible budget found is (\d+) bytes", message)
    assert found, message
    ops = {op.name.removesuffix(".anew") for op in graph().ops}
    assert any(name.removesuffix(".anew") in ops for name in caught.value.conflict), message
    assert caught.value.conflict[0] in message
    return int(found[1])


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_plans_fit_and_take_longer_the_less_memory_there_is(share: float) -> None:
    made = within(int(roomy().arena_bytes * share))
    assert made.arena_bytes <= roomy().arena_bytes * share
    assert any(name.startswith("anew:") for name in made.rewrites)
    validate(made, graph(), COSTS)
    more = within(int(roomy().arena_bytes * 0.9))
    assert roomy().solver.objective_ns <= more.solver.objective_ns <= made.solver.objective_ns


def test_a_budget_that_is_met_changes_nothing() -> None:
    same = within(roomy().arena_bytes)
    assert (same.rewrites, same.layouts, same.ops, same.arena) == (
        roomy().rewrites,
        roomy().layouts,
        roomy().ops,
        roomy().arena,
    )


def test_the_least_budget_is_feasible_and_little_less_is_not() -> None:
    assert within(least()).arena_bytes <= least()
    assert least() < 0.6 * roomy().arena_bytes
    with pytest.raises(InfeasibleError, match=r"found is \d+ bytes.*peaks at.*largest buffers"):
        within(int(least() * 0.98))


def test_a_device_with_little_memory_gets_such_a_plan_too() -> None:
    most = int(roomy().arena_bytes * 0.7)
    small = replace(COSTS, limits=replace(COSTS.limits, max_alloc_bytes=most))
    assert plan(graph(), small, STRATEGY, micro_batches=1).arena_bytes <= most
    tiny = replace(COSTS, limits=replace(COSTS.limits, max_alloc_bytes=1 << 20))
    with pytest.raises(DeviceError, match=r"bytes"):
        plan(graph(), tiny, STRATEGY, micro_batches=1)


def test_plan_files_say_what_is_made_anew() -> None:
    made = within(int(roomy().arena_bytes * 0.5))
    read = decode(encode(made))
    assert read.rewrites == made.rewrites
    steps = planned_graph(read, graph())
    assert [op.op for op in read.ops] == [op.name for op in steps.ops]
    assert origin_of(steps) == (graph().hash, made.rewrites)


def test_given_rewrites_are_kept_whatever_the_budget() -> None:
    with pytest.raises(InfeasibleError, match="the budget is"):
        plan(graph(), COSTS, STRATEGY, roomy().arena_bytes // 2, rewrites=["epilogue"])


def test_lean_tables_neither_pad_nor_copy() -> None:
    step = run_passes(linear_step(5, 18, 35, 66, 17))[0]
    tables = tabulate(step, COSTS)
    slim = lean(tables)
    padded = [s for s, node in enumerate(tables.problem.storages) if max(node.sizes_bytes) > node.sizes_bytes[0]]
    assert padded
    found = assign(slim, "ilp")
    check(slim.problem, found)
    assert not any(found.copies)
    for node, candidate in zip(tables.problem.storages, found.primary, strict=True):
        assert node.sizes_bytes[candidate] <= node.sizes_bytes[0]
    assert found.cost_ns >= assign(tables, "ilp").cost_ns


def test_what_is_made_anew_lies_as_its_original_does() -> None:
    base = tabulate(alternatives(graph())[0], COSTS)
    assignment = assign(base, STRATEGY)
    option = options(graph(), [(base, assignment)])[-1]
    assert option.recomputation.name in option.names
    tables = tabulate(rewritten(graph(), option.names), COSTS)
    found = alike(tables, (base, assignment), False)
    check(tables.problem, found)
    same = [
        tables.problem.storages[s].candidates[found.primary[s]]
        == base.problem.storages[base.index[name.removesuffix(".anew")]].candidates[
            assignment.primary[base.index[name.removesuffix(".anew")]]
        ]
        for s, name in enumerate(tables.names)
        if name.endswith(".anew")
    ]
    assert sum(same) > 0.8 * len(same)
    # And costs about what it was expected to.
    assert found.cost_ns == pytest.approx(option.expected_ns, rel=0.05)


def test_the_exact_solver_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a step of one attention: the plan that is kept was solved, and its gap is to what was proven."""
    monkeypatch.setattr(rewrites, "OPTIONAL", ("attention",))
    step = graph()
    exact: list[str] = []
    real = planner.assign

    def counted(tables, strategy, limit=60.0):  # type: ignore[no-untyped-def]
        exact.append(strategy)
        return real(tables, "greedy" if strategy == "ilp" else strategy, limit)

    monkeypatch.setattr(planner, "assign", counted)
    made = plan(step, COSTS, "ilp", int(roomy().arena_bytes * 0.7), micro_batches=1)
    assert made.arena_bytes <= roomy().arena_bytes * 0.7
    report = made.solver
    assert 0 < report.bound_ns <= report.objective_ns
    # Proven only where nothing that was considered, recomputation included, can take less.
    assert (report.status == "OPTIMAL") == (report.bound_ns == report.objective_ns)
    assert report.gap == pytest.approx(1 - report.bound_ns / report.objective_ns)
    assert report.gap < 0.2
    # One solution a rewritten graph, and two at most of the one that is kept.
    assert exact.count("ilp") <= len(alternatives(step)) + 2
    validate(made, step, COSTS)


def test_where_a_plan_is_fullest() -> None:
    peaks, largest = fullest(roomy())
    assert len(peaks) == len(largest) == 3
    assert set(peaks) <= {op.op for op in roomy().ops} | {f"relayout:{r.storage}#{r.target}" for r in roomy().relayouts}
