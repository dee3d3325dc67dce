"""Strategies: feasible, priced by the judge, never below the optimum, and each true to its name."""

from __future__ import annotations

import pytest

from layoutopt.check import check
from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.solve import solve
from layoutopt.strategies import STRATEGIES, activation, prefer, random
from tests.problems import candidates, random_problem


def every(problem: Problem) -> list[Assignment]:
    guide = [3 if node.name.startswith("t") else 0 for node in problem.storages]
    out = []
    for run in (*STRATEGIES.values(), lambda p: activation(p, guide), lambda p: random(p, 4)):
        try:
            out.append(run(problem))
        except InfeasibleError as error:
            # A dead end is allowed, and must say where.
            if not error.conflict:
                raise
    return out


@pytest.mark.parametrize("seed", range(40))
def test_none_is_below_the_optimum(seed: int) -> None:
    problem = random_problem(seed, ops=8, width=4, dense=seed % 2 == 0)
    best = solve(problem)
    found = every(problem)
    assert found
    for assignment in found:
        assert check(problem, assignment) >= best.cost_ns
        assert (assignment.status, assignment.bound_ns) == ("HEURISTIC", 0)


def test_dense_tables_have_no_dead_ends() -> None:
    for seed in range(20):
        assert len(every(random_problem(seed, ops=8, width=4, dense=True))) == len(STRATEGIES) + 2


def test_rowmajor_makes_no_relayouts_and_nothing_else() -> None:
    for seed in range(20):
        found = STRATEGIES["rowmajor"](random_problem(seed, ops=8, width=4))
        assert set(found.primary) == {0}
        assert not any(found.copies)


def test_ideal_takes_every_ops_cheapest_choice_where_layouts_are_free() -> None:
    problem = chain()
    found = STRATEGIES["ideal"](problem)
    assert [problem.ops[o].choices[c].cost_ns for o, c in enumerate(found.choice)] == [1, 1]
    assert found.cost_ns == 2 + 50


def test_greedy_pays_a_relayout_only_where_it_helps() -> None:
    found = STRATEGIES["greedy"](chain())
    assert (found.cost_ns, any(found.copies)) == (1 + 30, False)


def test_activation_lets_the_weight_follow() -> None:
    problem = chain()
    found = activation(problem, [0, 5, 0])
    assert found.primary[1] == 0
    assert found.cost_ns == 31


def test_prefer_takes_what_it_is_asked_for() -> None:
    problem = random_problem(2, ops=6, width=3, dense=True)
    found = prefer(problem, [1] * len(problem.storages))
    assert all(p == 1 for p, node in zip(found.primary, problem.storages, strict=True) if node.primary < 0)


def test_random_is_reproducible_and_mixed() -> None:
    problem = random_problem(2, ops=20, width=4, dense=True)
    assert random(problem, 1).primary == random(problem, 1).primary
    assert random(problem, 1).primary != random(problem, 2).primary


def test_dead_end_names_the_op() -> None:
    layouts = candidates(2)
    storages = tuple(StorageNode(n, layouts, (1, 1), False) for n in "abc")
    ops = tuple(
        OpNode(name, pair, 0, (Choice((0, 1), 1, "v"), Choice((1, 0), 1, "v")))
        for name, pair in (("ab", (0, 1)), ("bc", (1, 2)), ("ca", (2, 0)))
    )
    with pytest.raises(InfeasibleError, match=r"ca.*ilp"):
        STRATEGIES["greedy"](Problem(storages, ops, {}))


def chain() -> Problem:
    """in → t → out: the first op writes t best in candidate 0, the second reads it best in candidate 1."""
    layouts = candidates(2)
    storages = (
        StorageNode("in", layouts, (1, 1), False, 0),
        StorageNode("t", layouts, (1, 1), False),
        StorageNode("out", layouts, (1, 1), False, 0),
    )
    ops = (
        OpNode("first", (0, 1), 1, (Choice((0, 0), 1, "v"), Choice((0, 1), 40, "v"))),
        OpNode("second", (1, 2), 1, (Choice((0, 0), 30, "v"), Choice((1, 0), 1, "v"))),
    )
    return Problem(storages, ops, {(1, 0, 1): 50, (1, 1, 0): 50})
