"""Micro-batches chosen by planning: the fewest that fit, beside recomputation, named by the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from kernels.reference import run
from layoutopt.budget import optional_of
from layoutopt.errors import GraphError, InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import micro_batches
from layoutopt.passes import run_passes
from layoutopt.plan import Plan, decode, encode
from layoutopt.planner import assign, plan, plan_all, tabulate, validate
from layoutopt.rewrites import alternatives, before_family, in_order, origin_of, planned_graph, rewritten
from tests.fake_costs import FakeCosts
from tests.graphs import attention_step, linear_step, random_values, result_values

COSTS = FakeCosts()
STRATEGY = "greedy"


@lru_cache(maxsize=1)
def graph() -> TrainingGraph:
    """Eight samples whose attention is most of what a step holds."""
    return run_passes(attention_step(batch=8))[0]


@lru_cache(maxsize=8)
def within(budget_bytes: int | None, count: int | None = None) -> Plan:
    return plan(graph(), COSTS, STRATEGY, budget_bytes, micro_batches=count)


def share(part: float) -> int:
    return int(within(None).arena_bytes * part)


def count_of(made: Plan) -> int:
    return micro_batches(planned_graph(made, graph()))


def test_as_few_as_fit() -> None:
    """Where no recomputation fits; more memory is never slower."""
    with pytest.raises(InfeasibleError):
        within(share(0.7), 1)
    found = [within(share(part)) for part in (1.0, 0.8, 0.5)]
    assert [count_of(made) for made in found][:2] == [1, 2]
    assert count_of(found[2]) > 2
    for part, made in zip((1.0, 0.8, 0.5), found, strict=True):
        assert made.arena_bytes <= share(part)
        validate(made, graph(), COSTS)
    assert [made.solver.objective_ns for made in found] == sorted(made.solver.objective_ns for made in found)


def test_a_plan_names_them_and_computes_the_same_step() -> None:
    made = decode(encode(within(share(0.8))))
    assert made.rewrites[0] == "micro:2"
    assert made.graph_hash == graph().hash
    after = planned_graph(made, graph())
    assert [op.op for op in made.ops] == [op.name for op in after.ops]
    values = random_values(graph(), 1)
    got, expected = (result_values(g, run(g, values)) for g in (after, graph()))
    assert set(expected) & set(got) >= {"loss"}
    for name in set(expected) & set(got):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-8, atol=1e-12)
    updated = [name for name in got if name.startswith("new:") or name in expected]
    assert len(updated) > 3


def test_recomputation_is_kept_where_it_is_faster() -> None:
    """Of what fits the fastest: with a wide vocabulary of gradients, one op again beats adding them up twice."""
    step = run_passes(linear_step(batch=24))[0]
    roomy = plan(step, COSTS, STRATEGY)
    tight = plan(step, COSTS, STRATEGY, int(roomy.arena_bytes * 0.85))
    alone = plan(step, COSTS, STRATEGY, int(roomy.arena_bytes * 0.85), micro_batches=1)
    assert tight.solver.objective_ns <= alone.solver.objective_ns
    assert any(name.startswith("anew:") for name in tight.rewrites)


def test_recomputation_within_micro_batches() -> None:
    least = plan(graph(), COSTS, STRATEGY, micro_batches=2).arena_bytes
    made = within(int(least * 0.9), 2)
    assert made.rewrites[0] == "micro:2"
    assert any(name.startswith("anew:") for name in made.rewrites)
    values = random_values(graph(), 1)
    after = planned_graph(made, graph())
    assert float(run(after, values)["loss"]) == pytest.approx(float(run(graph(), values)["loss"]), rel=1e-10)


def test_the_number_asked_for() -> None:
    made = within(None, 4)
    assert count_of(made) == 4
    assert made.arena_bytes < within(None).arena_bytes
    both = plan_all(graph(), COSTS, ["greedy", "rowmajor"], micro_batches=4)
    assert {count_of(one) for one in both.values()} == {4}
    with pytest.raises(GraphError, match="cannot be cut into 3 equal micro-batches: choose one of 1, 2, 4, 8"):
        within(None, 3)


def test_the_least_budget_is_met() -> None:
    """With what is made anew besides, two micro-batches need less than their fullest op seems to."""
    with pytest.raises(InfeasibleError) as caught:
        within(share(0.05))
    found = re.search(r"least feasible budget found is (\d+) bytes", str(caught.value))
    assert found is not None
    assert int(found[1]) < share(0.6)
    assert within(int(found[1])).arena_bytes == int(found[1])


def test_a_step_that_cannot_be_cut_says_why() -> None:
    one = run_passes(linear_step(batch=1))[0]
    peaked = graph()
    made = peaked.producer[peaked.outputs[0]]
    ops = [replace(op, attrs={"fn": "max"}) if op is made else op for op in peaked.ops]
    with pytest.raises(InfeasibleError, match=r"the loss of graph .* is made by reduce max"):
        plan(peaked.with_ops(ops), COSTS, STRATEGY, share(0.3))
    with pytest.raises(InfeasibleError, match="fits into 100 bytes"):
        plan(one, COSTS, STRATEGY, 100)


def test_what_must_stay_readable() -> None:
    with pytest.raises(GraphError, match="leaves not all of masked to read"):
        plan(graph(), COSTS, STRATEGY, keep=["masked"], micro_batches=2)
    kept = next(name for name, t in graph().tensors.items() if t.role == "parameter")
    assert plan(graph(), COSTS, STRATEGY, keep=[kept], micro_batches=2).rewrites[0] == "micro:2"


def test_names_and_their_order() -> None:
    assert in_order(["anew:3", "epilogue", "micro:4", "recompute"]) == ("micro:4", "recompute", "epilogue", "anew:3")
    assert before_family(["anew:3", "micro:4", "reuse"], "anew") == ("micro:4",)
    assert all(origin_of(g)[1][0] == "micro:2" for g in alternatives(graph(), micro_batches=2))
    assert origin_of(alternatives(graph(), ["epilogue"], micro_batches=2)[0])[1] == ("micro:2", "epilogue")
    tables = tabulate(rewritten(graph(), ["epilogue"]), COSTS)
    assert optional_of([(tables, assign(tables, STRATEGY))]) == []


@pytest.mark.parametrize("name", ["micro:two", "micro:-1", "micro:2.5"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(GraphError, match="names no number of micro-batches"):
        rewritten(graph(), [name])
