"""Equal neighbours decided alike: ties in the solver's tables, and what they do to plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from test_stepcost import fitted

from kernels.bind import bind
from layoutopt import planner
from layoutopt.alike import projected, tied, untied
from layoutopt.assembly import as_run_ns, assemble
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from layoutopt.plan import Plan
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment, Problem
from layoutopt.rewrite_neighbours import alike_counts, sharing
from layoutopt.rewrites import alternatives
from layoutopt.solve import heuristics, solve
from layoutopt.stepcost import planned_s, predict_step
from tests.problems import random_problem


def groups_of(problem: Problem, seed: int) -> list[tuple[int, ...]]:
    """Some ops with as many operands, as if they were alike."""
    draw = random.Random(seed)
    ops = list(range(len(problem.ops)))
    draw.shuffle(ops)
    pairs = itertools.combinations(ops, 2)
    fit = [p for p in pairs if len(problem.ops[p[0]].operands) == len(problem.ops[p[1]].operands)]
    return [tuple(sorted(p)) for p in fit[:2]]


def alike(problem: Problem, groups: list[tuple[int, ...]], primary: tuple[int, ...]) -> bool:
    """Whether operands of a group's ops lie in equal layouts, where the host fixes neither."""
    for a, b in groups:
        for s, t in zip(problem.ops[a].operands, problem.ops[b].operands, strict=True):
            one, other = problem.storages[s], problem.storages[t]
            same = one.candidates[primary[s]] == other.candidates[primary[t]]
            if one.primary < 0 and other.primary < 0 and not same:
                return False
    return True


def least_alike(problem: Problem, groups: list[tuple[int, ...]]) -> int | None:
    """By exhaustion over primaries: the least cost of an assignment that decides the groups' ops alike."""
    free = [range(len(n.candidates)) if n.primary < 0 else [n.primary] for n in problem.storages]
    costs = []
    for primary in itertools.product(*free):
        if alike(problem, groups, primary):
            held = tuple(replace(n, primary=p) for n, p in zip(problem.storages, primary, strict=True))
            moves = {key: ns for key, ns in problem.relayout_ns.items() if primary[key[0]] == key[1]}
            try:
                costs.append(solve(Problem(held, problem.ops, moves)).cost_ns)
            except planner.InfeasibleError:
                continue
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_among_assignments_that_decide_alike(seed: int) -> None:
    problem = random_problem(seed, ops=2, width=3, dense=seed % 2 == 0)
    groups = groups_of(problem, seed)
    # A fixed storage ends a tie, and what is tied through it is not: such groups the planner does not make.
    free = [g for g in groups if all(problem.storages[s].primary < 0 for o in g for s in problem.ops[o].operands)]
    ties = tied(problem, free)
    expected = least_alike(problem, free)
    if expected is None:
        with pytest.raises(planner.InfeasibleError):
            solve(ties)
        return
    found = solve(ties)
    assert (found.status, found.cost_ns) == ("OPTIMAL", expected)
    own = untied(problem, found)
    assert planner.check(problem, own) == expected
    assert alike(problem, free, own.primary)
    for start in heuristics(problem):
        near = projected(ties, start)
        if near is not None:
            assert near.cost_ns >= expected
            assert alike(problem, free, untied(problem, near).primary)


def test_without_equals_nothing_is_tied() -> None:
    problem = random_problem(3, ops=3)
    assert tied(problem, [(o,) for o in range(len(problem.ops))]) is problem


def test_on_a_cpu_nothing_is_to_share() -> None:
    graph = alternatives(shipped("vit-digits"))[-1]
    assert set(alike_counts(graph, 0)) == {1}
    assert max(alike_counts(graph, 1000)) > 2
    assert set(alike_counts(graph, 1)) > {1}, "on one compute unit large ops are not to share, small ones are"
    assert alike_counts(graph, 1) != alike_counts(graph, 1000)
    assert sorted(o for group in sharing(graph, 1000) for o in group) == list(range(len(graph.ops)))


COSTS = fitted(1000, kind="gpu", launches=4000.0, trips=1.0)
"""Of a device that one op does not fill."""


@pytest.fixture(scope="module")
def tables() -> Tables:
    return planner.tabulate(alternatives(shipped("vit-digits"))[-1], COSTS)


def groups_in_one_kernel(plan: Plan, graph: TrainingGraph) -> float:
    """The share of groups whose ops all run the same kernel."""
    pairs = zip(bind(graph, plan, COSTS.limits), plan.steps, strict=True)
    keys = [step.kernel.key for step, (kind, _) in pairs if kind == "op"]
    groups = [group for group in sharing(graph, 1000) if len(group) > 1]
    return sum(len({keys[o] for o in group}) == 1 for group in groups) / len(groups)


def test_a_plan_for_a_gpu_runs_equal_neighbours_in_one_kernel(tables: Tables) -> None:
    """Nearly all of them: one op may still read a copy that another has no use for."""
    exact = planner.plan(tables.graph, COSTS, "ilp", None, 8.0, tables=tables)
    apart = assemble(tables, COSTS, solve(tables.problem, 8.0), "ilp")
    assert groups_in_one_kernel(exact, tables.graph) >= 0.9 > groups_in_one_kernel(apart, tables.graph)
    assert exact.solver.objective_ns == round(planned_s(exact) * 1e9)
    steps = [predict_step(plan, tables.graph, COSTS.model) for plan in (exact, apart)]
    assert steps[0].launches < steps[1].launches
    assert steps[0].step_s < steps[1].step_s


def test_what_is_not_alike_pays_for_its_own_launch(tables: Tables) -> None:
    """A strategy that knows no ties is priced as it runs."""
    found = planner.assign(tables, "random:1")
    plan = assemble(tables, COSTS, found, "random:1")
    planner.validate(plan, tables.graph, COSTS)
    assert plan.solver.objective_ns > found.cost_ns, "tables take for granted that all share"
    alone = sum(COSTS.predict(s.kernel).total_ns for s in bind(tables.graph, plan, COSTS.limits))
    assert plan.solver.objective_ns < alone, "some are alike by chance"


def test_where_no_assignment_decides_alike_they_are_decided_as_they_come(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(problem: Problem, groups: Iterable[Sequence[int]]) -> Problem:
        ties = tied(problem, groups)
        return replace(ties, ops=(*ties.ops[:-1], replace(ties.ops[-1], choices=())))

    monkeypatch.setattr(planner, "tied", nothing)
    found = planner.assign(tables, "ilp", 2.0)
    assert found.cost_ns <= min(start.cost_ns for start in heuristics(tables.problem))


def test_where_alike_costs_more_than_it_saves_a_start_is_kept(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends at once with a poor answer does not hide what strategies know."""
    starts = list(planner._starts(tables))
    units = COSTS.limits.idle_units
    poor = max(starts, key=lambda a: as_run_ns(tables, a, units))
    ties = tied(tables.problem, sharing(tables.graph, units))

    def ended(problem: Problem, time_limit_s: float, known: object) -> Assignment:
        return replace(poor, choice=poor.choice + (0,) * (len(ties.ops) - len(tables.problem.ops)), status="FEASIBLE")

    monkeypatch.setattr(planner, "solve", ended)
    found = planner._exact(tables, 1.0)
    assert as_run_ns(tables, found, units) == min(as_run_ns(tables, a, units) for a in starts)
    assert found.status == "FEASIBLE"
    assert found.bound_ns < found.cost_ns
    plan = assemble(tables, COSTS, found, "ilp")
    assert plan.solver.objective_ns == as_run_ns(tables, found, units)
