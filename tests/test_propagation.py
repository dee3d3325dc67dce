"""BFS propagation and the majority vote: feasible, never below the optimum, and with known answers by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layoutopt.check import check
from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, Choice, OpNode, Problem, StorageNode
from layoutopt.propagation import SEARCH_OPS, bfs, majority
from layoutopt.solve import solve
from tests.problems import block_problem, candidates, random_problem

LAYOUTS = candidates(3)


def attempt(strategy: Callable[[Problem], Assignment], problem: Problem) -> Assignment | None:
    """None where it says at which op or storage it is stuck."""
    try:
        return strategy(problem)
    except InfeasibleError as error:
        if not error.conflict:
            raise
        return None


@pytest.mark.parametrize("dense", [False, True])
def test_neither_is_below_the_optimum(dense: bool) -> None:
    served = 0
    for seed in range(150):
        problem = random_problem(seed, ops=6, width=4, dense=dense)
        best = solve(problem).cost_ns
        for strategy in (bfs, majority):
            found = attempt(strategy, problem)
            if found is None:
                assert not dense, "where every tuple is a choice there is no dead end"
                continue
            served += 1
            assert check(problem, found) == found.cost_ns >= best
            assert (found.status, found.bound_ns, found.method) == ("HEURISTIC", 0, strategy.__name__)
            assert strategy(problem).primary == found.primary
    assert served > 250


@pytest.mark.parametrize("strategy", [bfs, majority])
def test_repeated_blocks_are_served(strategy) -> None:
    for seed in range(10):
        problem = block_problem(seed, blocks=3, width=3)
        assert check(problem, strategy(problem)) >= solve(problem).cost_ns


def storage(name: str, primary: int = -1, count: int = 3) -> StorageNode:
    return StorageNode(name, LAYOUTS[:count], (1,) * count, False, primary)


def op(name: str, operands: tuple[int, ...], **costs: int) -> OpNode:
    """Choices written as ``_012=5``: layouts 0, 1 and 2 at 5 ns. The last operand is written."""
    rows = tuple(Choice(tuple(map(int, word.strip("_"))), ns, word) for word, ns in costs.items())
    return OpNode(name, operands, len(operands) - 1, rows)


def problem(storages: list[StorageNode], ops: list[OpNode], price: int) -> Problem:
    relayouts = {
        (s, a, b): price
        for s, node in enumerate(storages)
        for a in range(len(node.candidates))
        for b in range(len(node.candidates))
        if a != b
    }
    return Problem(tuple(storages), tuple(ops), relayouts)


def needs_layout_two(price: int) -> Problem:
    """x (row-major) → a → b → c. The first op takes and writes anything; the two after it work in layout 2 alone.

    Writing layout 0 is one transition (before the second op), writing layout 2 none but for the input's. The last op
    accepts anything.
    """
    anything = {f"_0{b}": 10 for b in range(3)}
    two = {"_22": 10, "_00": 50, "_11": 50}
    free = {f"_{a}{b}": 10 for a in range(3) for b in range(3)}
    return problem(
        [storage("x", 0), storage("a"), storage("b"), storage("c"), storage("d", 0)],
        [
            op("first", (0, 1), **anything),
            op("second", (1, 2), **two),
            op("third", (2, 3), **two),
            op("last", (3, 4), **free),
        ],
        price,
    )


@pytest.mark.parametrize("price", [1, 1000])
def test_bfs_finds_the_layout_without_transitions(price: int) -> None:
    found = bfs(needs_layout_two(price))
    assert found.primary == (0, 2, 2, 2, 0)
    assert not any(found.copies)
    assert found.cost_ns == 40


def test_bfs_looks_at_no_price_of_a_relayout() -> None:
    """An op that accepts layout 1 alone converts the row-major input, though its row-major kernel would be cheaper."""
    problem_ = problem([storage("x", 0), storage("y", 0)], [op("one", (0, 1), _10=10, _00=20)], 1000)
    found = bfs(problem_)
    assert found.copies == ((1,), ())
    assert found.cost_ns == 1010
    assert solve(problem_).cost_ns == 20


def test_bfs_prefers_fewer_transitions_of_two_kinds_of_readers() -> None:
    """One reader wants layout 1, two want layout 2, the writer writes any: layout 2 has fewest transitions."""
    storages = [storage("x", 0), storage("t"), *(storage(n, 0) for n in "abc")]
    ops = [
        op("make", (0, 1), _00=10, _01=10, _02=10),
        op("one", (1, 2), _10=10, _20=100),
        op("two", (1, 3), _20=10, _10=100),
        op("three", (1, 4), _20=10, _10=100),
    ]
    found = bfs(problem(storages, ops, 5))
    assert found.primary[1] == 2
    assert found.copies[1] == (1,)
    assert found.cost_ns == 45


def long_chain(ops: int, free: int = 1) -> Problem:
    """A chain of ops that keep whatever layout they get (``free`` a choice); the last accepts layout 1 alone."""
    storages = [storage(f"t{i}", count=2) for i in range(ops + 1)]
    nodes = [op(f"op{i}", (i, i + 1), _00=free, _11=free) for i in range(ops - 1)]
    nodes.append(op("end", (ops - 1, ops), _11=10, _00=100))
    return problem(storages, nodes, 1)


def test_bfs_sees_no_further_than_its_bound() -> None:
    """The search from the first value meets the wish at the end only if that is among the first 64 ops."""
    assert set(bfs(long_chain(SEARCH_OPS)).primary) == {1}
    assert set(bfs(long_chain(SEARCH_OPS + 1)).primary) == {0}


def voting(readers: dict[str, int]) -> Problem:
    """A value that its writer writes in any of three layouts, with readers that want one each."""
    storages = [storage("x", 0), storage("t"), *(storage(name, 0) for name in readers)]
    ops = [op("make", (0, 1), _00=10, _01=10, _02=10)]
    for k, (name, wanted) in enumerate(readers.items()):
        ops.append(op(name, (1, 2 + k), **{f"_{layout}0": 10 if layout == wanted else 90 for layout in range(3)}))
    return problem(storages, ops, 7)


def test_majority_counts_votes() -> None:
    found = majority(voting({"a": 1, "b": 2, "c": 2}))
    assert found.primary[1] == 2
    assert found.copies[1] == (1,)
    assert found.cost_ns == 47
    assert majority(voting({"a": 1, "b": 1, "c": 2})).primary[1] == 1


def test_one_vote_an_op_however_dear_the_op() -> None:
    """Two cheap ops outvote one on which everything depends: that is what a vote does."""
    storages = [storage("x", 0), storage("t"), *(storage(n, 0) for n in "abc")]
    ops = [
        op("make", (0, 1), _00=10, _01=10, _02=10),
        op("cheap", (1, 2), _10=1, _20=2),
        op("cheap too", (1, 3), _10=1, _20=2),
        op("dear", (1, 4), _20=1000, _10=9000),
    ]
    assert majority(problem(storages, ops, 100)).primary[1] == 1


def test_where_nobody_votes_a_value_follows_its_neighbours() -> None:
    """b is written by an op that takes anything; its input has layout 2, hence so has b. Ties go to the first."""
    free = {f"_{a}{b}": 10 for a in range(3) for b in range(3)}
    storages = [storage("x", 2), storage("b"), storage("y", 2)]
    ops = [op("one", (0, 1), **free), op("two", (1, 2), **free)]
    assert majority(problem(storages, ops, 5)).primary == (2, 2, 2)
    storages = [storage("x", 2), storage("b"), storage("y", 1)]
    assert majority(problem(storages, ops, 5)).primary[1] == 1
