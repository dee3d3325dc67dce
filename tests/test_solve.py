"""The exact solver against exhaustive search, its bounds, its judge and what it says when there is no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layoutopt.chains import merge_chains
from layoutopt.check import check
from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.reduce import consistent, reduce
from layoutopt.solve import solve
from tests.problems import candidates, exhaustive, random_problem


def small(seed: int) -> Problem:
    dense = seed % 4 == 0
    return random_problem(seed, ops=2 if dense else 3, width=3, dense=dense, hostile=seed % 4 >= 2)


@pytest.mark.parametrize("seed", range(200))
def test_exact_equals_exhaustive(seed: int) -> None:
    problem = small(seed)
    expected = exhaustive(problem)
    if expected is None:
        with pytest.raises(InfeasibleError) as caught:
            solve(problem)
        assert caught.value.conflict
        return
    found = solve(problem)
    assert (found.status, found.cost_ns, found.bound_ns) == ("OPTIMAL", expected, expected)
    assert check(problem, found) == expected
    assert solve(problem, starts=[]).cost_ns == expected


def test_random_problems_include_infeasible_and_relaid_out_ones() -> None:
    problems = [small(s) for s in range(60)]
    answers = [exhaustive(p) for p in problems]
    assert answers.count(None) >= 5
    assert sum(any(solve(p).copies) for p, a in zip(problems, answers, strict=True) if a is not None) >= 15


@pytest.mark.parametrize("seed", range(30))
def test_reduction_keeps_an_optimum(seed: int) -> None:
    problem = random_problem(seed, ops=2, width=3, dense=True)
    domain = reduce(problem)
    rest = replace(
        problem,
        ops=tuple(
            replace(op, choices=tuple(op.choices[c] for c in left))
            for op, left in zip(problem.ops, domain.choices, strict=True)
        ),
    )
    assert sum(map(len, domain.choices)) < sum(len(op.choices) for op in problem.ops)
    assert exhaustive(rest) == exhaustive(problem)


def touched(problem: Problem) -> set[int]:
    return {s for op in problem.ops for s in op.operands}


@pytest.mark.parametrize("seed", range(40))
def test_merging_keeps_the_optimum_and_finds_its_way_back(seed: int) -> None:
    problem = random_problem(seed, ops=3, width=3, hostile=seed % 2 == 1)
    expected = exhaustive(problem)
    try:
        merged = merge_chains(problem, consistent(problem))
    except InfeasibleError:
        assert expected is None
        return
    assert (None if merged is None else exhaustive(merged.problem)) == expected
    if merged is not None and expected is not None:
        assert touched(merged.problem) < touched(problem)
        small = solve(merged.problem)
        primary, choice = merged.expand(small.primary, small.choice)
        used = [
            (s, layout)
            for op, c in zip(problem.ops, choice, strict=True)
            for s, layout in zip(op.operands, op.choices[c].layouts, strict=True)
        ]
        copies = [{layout for t, layout in used if t == s} - {p} for s, p in enumerate(primary)]
        whole = tuple(tuple(sorted(made)) for made in copies)
        assert check(problem, Assignment(primary, whole, choice, expected, "FEASIBLE", 0, 0.0, "")) == expected


def test_the_best_start_is_never_lost() -> None:
    problem = random_problem(11, ops=40, width=5)
    best = solve(problem)
    again = solve(problem, time_limit_s=1e-3, starts=[best])
    assert again.cost_ns == best.cost_ns


def test_same_problem_same_answer() -> None:
    problem = random_problem(5, ops=30, width=6)
    first, second = solve(problem), solve(problem)
    assert (first.primary, first.copies, first.choice) == (second.primary, second.copies, second.choice)


def test_large_problem_is_closed() -> None:
    found = solve(random_problem(7, ops=120, width=6), time_limit_s=30)
    assert found.status == "OPTIMAL"
    assert found.bound_ns == found.cost_ns


def test_time_limit_gives_a_start_with_a_bound_below_it() -> None:
    problem = random_problem(3, ops=60, width=6, dense=True)
    found = solve(problem, time_limit_s=1e-3)
    assert found.status == "FEASIBLE"
    assert 0 < found.bound_ns < found.cost_ns
    assert solve(problem).cost_ns >= found.bound_ns


def two_ops_apart() -> Problem:
    """One op writes candidate 0 only, another reads candidate 1 only, and no relayout exists."""
    layouts = candidates(2)
    storages = tuple(StorageNode(n, layouts, (1, 1), False) for n in ("a", "b", "c"))
    ops = (
        OpNode("make", (0, 1), 1, (Choice((0, 0), 1, "v"),)),
        OpNode("other", (0, 2), 1, (Choice((0, 0), 1, "v"),)),
        OpNode("use", (1, 2), 2, (Choice((1, 0), 1, "v"),)),
    )
    return Problem(storages, ops, {})


def test_infeasible_names_the_ops_and_storages() -> None:
    with pytest.raises(InfeasibleError, match="use") as caught:
        solve(two_ops_apart())
    assert {"use", "b"} <= set(caught.value.conflict)


def test_infeasible_that_propagation_cannot_see() -> None:
    layouts = candidates(2)
    storages = tuple(StorageNode(n, layouts, (1, 1), False) for n in "abc")

    def unequal(name: str, a: int, b: int) -> OpNode:
        return OpNode(name, (a, b), 0, (Choice((0, 1), 1, "v"), Choice((1, 0), 1, "v")))

    # Three storages, two layouts each, pairwise different: an odd cycle.
    apart = Problem(storages, (unequal("ab", 0, 1), unequal("bc", 1, 2), unequal("ca", 2, 0)), {})
    consistent(apart)
    with pytest.raises(InfeasibleError) as caught:
        solve(apart)
    assert set(caught.value.conflict) == {"ab", "bc", "ca", "a", "b", "c"}


BREAKS = {
    "cost": lambda a: replace(a, cost_ns=a.cost_ns + 1),
    "choice": lambda a: replace(a, choice=(99, *a.choice[1:])),
    "short": lambda a: replace(a, choice=a.choice[1:]),
    "fixed": lambda a: replace(a, primary=(1, *a.primary[1:])),
    "candidate": lambda a: replace(a, copies=((9,), *a.copies[1:])),
    "twice": lambda a: replace(a, copies=((a.primary[0],), *a.copies[1:])),
    "missing copy": lambda a: replace(a, copies=tuple(() for _ in a.copies)),
    "written elsewhere": lambda a: replace(a, primary=(a.primary[0], *(1 - p for p in a.primary[1:]))),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_check_refuses(kind: str) -> None:
    problem, good = with_a_copy()
    check(problem, good)
    with pytest.raises(InfeasibleError):
        check(problem, BREAKS[kind](good))


def with_a_copy() -> tuple[Problem, Assignment]:
    layouts = candidates(2)
    storages = (StorageNode("in", layouts, (1, 1), False, 0), StorageNode("out", layouts, (1, 1), False))
    ops = (OpNode("op", (0, 1), 1, (Choice((0, 0), 100, "slow"), Choice((1, 1), 10, "fast"))),)
    problem = Problem(storages, ops, {(0, 0, 1): 5, (0, 1, 0): 5})
    good = solve(problem)
    assert (good.cost_ns, good.copies) == (15, ((1,), ()))
    return problem, good


def test_check_refuses_a_stale_copy() -> None:
    layouts = candidates(2)
    storages = (StorageNode("w", layouts, (1, 1), True), StorageNode("y", layouts, (1, 1), False))
    update = OpNode("update", (0, 0), 1, (Choice((0, 0), 1, "v"),))
    after = OpNode("after", (0, 1), 1, (Choice((1, 0), 1, "v"), Choice((0, 0), 50, "v")), pinned=(0,))
    problem = Problem(storages, (update, after), {(0, 0, 1): 1})
    assert solve(problem).cost_ns == 51
    with pytest.raises(InfeasibleError, match="stale"):
        check(problem, Assignment((0, 0), ((1,), ()), (0, 0), 3, "HEURISTIC", 0, 0.0, "by hand"))
