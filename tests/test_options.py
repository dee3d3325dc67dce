"""What is planned where memory is short: choices within a budget, and a bound that no plan undercuts."""

from __future__ import annotations

from functools import lru_cache

import pytest

from layoutopt.check import check
from layoutopt.graph import TrainingGraph
from layoutopt.options import Option, Tried, bound_within, faster, options, tighter, within
from layoutopt.pareto import pareto
from layoutopt.passes import run_passes
from layoutopt.planner import assign, tabulate
from layoutopt.rewrites import alternatives, rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import attention_step, linear_step
from tests.test_rewrite_recompute import graphs

COSTS = FakeCosts()


@lru_cache(maxsize=2)
def small(name: str) -> TrainingGraph:
    return run_passes(linear_step(5, 18, 35, 66, 17) if name == "linear" else attention_step(4, 24, 2, 8))[0]


@lru_cache(maxsize=2)
def solved(name: str) -> tuple[Tried, ...]:
    tables = [tabulate(candidate, COSTS) for candidate in alternatives(small(name))]
    return tuple((own, assign(own, "ilp")) for own in tables)


@lru_cache(maxsize=1)
def ranked() -> tuple[Option, ...]:
    """Of vit-digits, its layouts chosen greedily."""
    graph = graphs("vit-digits")
    tables = tabulate(alternatives(graph)[0], COSTS)
    return tuple(options(graph, [(tables, assign(tables, "greedy"))]))


@pytest.mark.parametrize("name", ["linear", "attention"])
def test_no_plan_undercuts_the_bound(name: str) -> None:
    """Every choice of recomputation, its layouts proven: within its own bytes the bound is no more than it takes."""
    graph = small(name)
    found = options(graph, solved(name), 40)
    assert len({option.recomputation.name for option in found}) > 1
    for option in found:
        tables = tabulate(rewritten(graph, option.names), COSTS)
        best = assign(tables, "ilp")
        check(tables.problem, best)
        bound = bound_within(graph, found, option.recomputation.peak_bytes)
        assert bound is not None
        assert 0 < bound <= best.cost_ns


@pytest.mark.parametrize("name", ["linear", "attention"])
def test_points_say_what_nothing_within_their_bytes_undercuts(name: str) -> None:
    points = pareto(small(name), COSTS, "ilp")
    for point in points:
        assert 0 < point.bound_ns <= point.objective_ns
        assert all(point.bound_ns <= q.objective_ns for q in points if q.arena_bytes <= point.arena_bytes)


def test_with_less_memory_the_bound_rises_until_nothing_fits() -> None:
    graph = graphs("vit-digits")
    whole = ranked()[0].recomputation.peak_bytes
    bounds = [bound_within(graph, ranked(), int(whole * share)) for share in (1.0, 0.7, 0.5)]
    assert all(bound is not None for bound in bounds)
    assert bounds == sorted(bounds, key=lambda b: b or 0)
    assert bounds[0] != bounds[-1]
    held = sum(t.size_elems * t.item_bytes for t in graph.by_role("parameter", "state"))
    assert bound_within(graph, ranked(), held) is None


def test_the_least_time_within_a_budget_is_among_the_options() -> None:
    budget = int(ranked()[0].recomputation.peak_bytes * 0.6)
    (best,) = within(ranked(), budget)
    assert best.recomputation.peak_bytes <= budget == best.aim_bytes
    fitting = [o.expected_ns for o in ranked() if o.recomputation.peak_bytes <= budget]
    assert best.expected_ns <= min(fitting)
    less = tighter(best, budget // 20, budget)
    assert less is not None
    assert less.recomputation.peak_bytes <= budget - budget // 20
    assert less.expected_ns >= best.expected_ns
    assert tighter(best, budget // 5, budget) is None  # too far away
    assert tighter(ranked()[0], 1, budget) is None  # not made for a budget


def test_an_option_that_takes_less_within_the_same_bytes() -> None:
    greedy = ranked()[len(ranked()) // 2]
    found = faster(greedy)
    assert found.recomputation.peak_bytes <= greedy.recomputation.peak_bytes
    assert found.expected_ns <= greedy.expected_ns
    assert faster(ranked()[0]) == ranked()[0]
