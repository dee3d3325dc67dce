"""PBQP by reduction: exact where R0 to R2 are enough, against brute force; and layouts by it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from layoutopt.check import check
from layoutopt.errors import InfeasibleError
from layoutopt.pbqp import Unsolvable, chaindp, solve_pairwise
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.solve import solve
from tests.problems import block_problem, candidates, exhaustive, random_problem

Pairwise = tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]


def value(costs: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray], states: tuple[int, ...]) -> float:
    own = sum(c[x] for c, x in zip(costs, states, strict=True))
    return float(own + sum(m[states[a], states[b]] for (a, b), m in edges.items()))


def least(costs: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray]) -> float:
    return min(value(costs, edges, states) for states in itertools.product(*(range(len(c)) for c in costs)))


def series_parallel(draw: random.Random, splits: int) -> list[tuple[int, int]]:
    """Edges of a series-parallel graph: one edge, each split puts a node on an edge or beside it."""
    edges, nodes = [(0, 1)], 2
    for _ in range(splits):
        a, b = draw.choice(edges)
        if draw.random() < 0.5:
            edges.remove((a, b))
        edges += [(a, nodes), (nodes, b)]
        nodes += 1
    return edges


def random_pairwise(seed: int, edges: list[tuple[int, int]], barred: float = 0.0) -> Pairwise:
    rng = np.random.default_rng(seed)
    nodes = 1 + max(max(pair) for pair in edges)
    sizes = rng.integers(1, 4, nodes)
    costs = [rng.integers(0, 50, n).astype(float) for n in sizes]
    matrices = {}
    for a, b in edges:
        matrix = rng.integers(0, 50, (sizes[a], sizes[b])).astype(float)
        matrix[rng.random(matrix.shape) < barred] = np.inf
        matrices[a, b] = matrix
    return costs, matrices


@pytest.mark.parametrize("seed", range(60))
def test_series_parallel_graphs_are_solved_exactly(seed: int) -> None:
    edges = series_parallel(random.Random(seed), 7)
    for barred in (0.0, 0.2):
        costs, matrices = random_pairwise(seed, edges, barred)
        optimum = least(costs, matrices)
        if optimum == np.inf:
            with pytest.raises(Unsolvable):
                solve_pairwise(costs, matrices)
            continue
        states, guesses = solve_pairwise(costs, matrices)
        assert guesses == 0
        assert value(costs, matrices, states) == optimum


def test_other_graphs_take_heuristic_steps_and_are_never_better_than_the_best() -> None:
    complete = list(itertools.combinations(range(6), 2))
    guessed, exact = 0, 0
    for seed in range(60):
        costs, matrices = random_pairwise(seed, complete)
        states, guesses = solve_pairwise(costs, matrices)
        optimum = least(costs, matrices)
        assert value(costs, matrices, states) >= optimum
        guessed += guesses > 0
        exact += value(costs, matrices, states) == optimum
    assert guessed > 40
    assert exact > 20


def test_nodes_alone_and_nodes_with_one_state() -> None:
    costs = [np.array([3.0, 1.0]), np.array([5.0]), np.array([0.0, 9.0])]
    edges = {(1, 2): np.array([[20.0, 1.0]])}
    assert solve_pairwise(costs, edges) == ((1, 0, 1), 0)
    assert solve_pairwise([], {}) == ((), 0)


# ---- layouts --------------------------------------------------------------------------------------------------------


def chain(seed: int, ops: int = 5, width: int = 3) -> Problem:
    """Ops one after the other, each with a weight of its own, which some read at both positions."""
    draw = random.Random(seed)
    storages = [StorageNode("in", candidates(width), (1,) * width, False, 0)]
    nodes = []
    for i in range(ops):
        weight, out = len(storages), len(storages) + 1
        storages += [StorageNode(f"{n}{i}", candidates(width), (1,) * width, n == "w") for n in "wt"]
        operands = (weight - 1 if i else 0, weight, *([weight] if draw.random() < 0.3 else []), out)
        every = list(itertools.product(range(width), repeat=len(operands)))
        rows = tuple(Choice(t, draw.randint(1, 100), f"v{n}") for n, t in enumerate(draw.sample(every, 12)))
        nodes.append(OpNode(f"op{i}", operands, len(operands) - 1, rows))
    relayouts = {
        (s, a, b): draw.randint(1, 60)
        for s in range(len(storages))
        for a, b in itertools.permutations(range(width), 2)
        if draw.random() < 0.9
    }
    return Problem(tuple(storages), tuple(nodes), relayouts)


@pytest.mark.parametrize("seed", range(60))
def test_chains_are_solved_exactly(seed: int) -> None:
    problem = chain(seed)
    try:
        best = solve(problem).cost_ns
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            chaindp(problem)
        return
    found = chaindp(problem)
    assert found.method == "chaindp"
    assert check(problem, found) == best


def test_short_chains_against_every_assignment() -> None:
    compared = 0
    for seed in range(30):
        problem = chain(seed, ops=2)
        optimum = exhaustive(problem)
        if optimum is not None:
            assert chaindp(problem).cost_ns == optimum
            compared += 1
    assert compared > 20


def fork(seed: int) -> Problem:
    """x → t → (a, b) → y: series-parallel, with relayouts so dear that no two ops would share one."""
    draw = random.Random(seed)
    width = 3
    storages = tuple(
        StorageNode(name, candidates(width), (1,) * width, False, 0 if name in "xy" else -1) for name in "xtaby"
    )

    def rows(operands: int) -> tuple[Choice, ...]:
        every = itertools.product(range(width), repeat=operands)
        return tuple(Choice(t, draw.randint(1, 100), str(n)) for n, t in enumerate(every))

    ops = tuple(
        OpNode(name, operands, len(operands) - 1, rows(len(operands)))
        for name, operands in (("make", (0, 1)), ("left", (1, 2)), ("right", (1, 3)), ("join", (2, 3, 4)))
    )
    prices = {(s, a, b): 500 for s in range(5) for a, b in itertools.permutations(range(width), 2)}
    return Problem(storages, ops, prices)


def test_a_fork_that_joins_is_solved_exactly() -> None:
    for seed in range(40):
        problem = fork(seed)
        found = chaindp(problem)
        assert found.method == "chaindp"
        assert found.cost_ns == exhaustive(problem)


def test_a_copy_that_two_ops_read_is_counted_twice_while_choosing_and_paid_once() -> None:
    """Both readers gain 40 from layout 1, a copy takes 60: worth it once for both, but not for either alone."""
    layouts = candidates(2)
    storages = tuple(StorageNode(name, layouts, (1, 1), False, 0) for name in "xab")
    rows = (Choice((0, 0), 50, "v"), Choice((1, 0), 10, "v"))
    ops = (OpNode("left", (0, 1), 1, rows), OpNode("right", (0, 2), 1, rows))
    shared = Problem(storages, ops, {(0, 0, 1): 60})
    assert solve(shared).cost_ns == 80
    assert chaindp(shared).cost_ns == 100
    cheaper = Problem(storages, ops, {(0, 0, 1): 30})
    assert chaindp(cheaper).cost_ns == 50 == solve(cheaper).cost_ns


def attempt(problem: Problem) -> Assignment | None:
    """None where it says at which op or storage it is stuck."""
    try:
        return chaindp(problem)
    except InfeasibleError as error:
        if not error.conflict:
            raise
        return None


@pytest.mark.parametrize("dense", [False, True])
def test_never_below_the_optimum(dense: bool) -> None:
    exact, served = 0, 0
    for seed in range(150):
        problem = random_problem(seed, ops=6, width=4, dense=dense)
        best = solve(problem).cost_ns
        found = attempt(problem)
        if found is None:
            continue
        served += 1
        exact += found.cost_ns == best
        assert check(problem, found) == found.cost_ns >= best
        assert (found.status, found.bound_ns) == ("HEURISTIC", 0)
    assert served > 100
    assert exact > 50


def test_repeated_blocks_are_served_the_same_every_time() -> None:
    for seed in range(10):
        problem = block_problem(seed, blocks=3, width=3)
        found = chaindp(problem)
        assert check(problem, found) >= solve(problem).cost_ns
        assert chaindp(problem).choice == found.choice


def test_hostile_tables_are_refused_or_served() -> None:
    for seed in range(60):
        problem = random_problem(seed, ops=4, width=3, hostile=True)
        found = attempt(problem)
        if found is not None:
            assert check(problem, found) == found.cost_ns
