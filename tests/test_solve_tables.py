"""The search on tables: sweeps and elimination against enumeration, every switch against the plain integer program."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from layoutopt.check import check
from layoutopt.copies import without_idle_copies
from layoutopt.errors import InfeasibleError
from layoutopt.exact import Tactics, search
from layoutopt.factors import Factor
from layoutopt.grouping import grouped, ranks
from layoutopt.problem import Choice, OpNode, Problem, StorageNode
from layoutopt.reduce import consistent, reduce
from layoutopt.solve import Reductions, solve
from layoutopt.states import SCALE, TooManyStatesError, network
from layoutopt.sweeps import sweep
from layoutopt.treewidth import Limits, OutOfTimeError, condense, eliminate
from tests.problems import block_problem, candidates, exhaustive, random_problem

PLAIN = Reductions.none()
SWITCHES = [f.name for f in fields(Reductions)]


def random_factors(seed: int) -> tuple[list[Factor], list[int]]:
    """A handful of sparse tables over a few variables, each variable known to one at least."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(2, 6))]
    scopes = [tuple(draw.sample(range(len(sizes)), draw.randint(1, min(3, len(sizes))))) for _ in range(6)]
    scopes += [(v,) for v in range(len(sizes))]
    out = []
    for scope in scopes:
        rows = [t for t in itertools.product(*(range(sizes[v]) for v in scope)) if draw.random() < 0.8]
        costs = [draw.choice((0, 0, draw.randint(0, 40))) for _ in rows]
        out.append(Factor(scope, np.array(rows, dtype=np.int64).reshape(-1, len(scope)), np.array(costs, np.int64)))
    return out, sizes


def price(factors: list[Factor], values: tuple[int, ...]) -> int | None:
    """What an assignment costs; None where some table does not allow it."""
    total = 0
    for table in factors:
        wanted = [values[v] for v in table.scope]
        found = [int(c) for row, c in zip(table.rows.tolist(), table.costs, strict=True) if row == wanted]
        if not found:
            return None
        total += found[0]
    return total


def every_price(factors: list[Factor], sizes: list[int]) -> dict[tuple[int, ...], int]:
    priced = {values: price(factors, values) for values in itertools.product(*map(range, sizes))}
    return {values: cost for values, cost in priced.items() if cost is not None}


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("rounds", [0, 3])
def test_elimination_finds_the_least(seed: int, rounds: int) -> None:
    factors, sizes = random_factors(seed)
    prices = every_price(factors, sizes)
    budget = seed % 90
    found = eliminate(factors, sizes, budget, Limits(), rounds)
    assert found.exact
    least = min(prices.values(), default=None)
    if least is None or least > budget:
        assert found.cost is None
    else:
        assert found.cost == least == prices[found.values]


def test_random_tables_have_and_lack_assignments() -> None:
    counts = [len(every_price(*random_factors(seed))) for seed in range(150)]
    assert 5 < counts.count(0) < 100


@pytest.mark.parametrize("seed", range(150))
def test_sweeps_change_no_price_within_the_budget(seed: int) -> None:
    factors, sizes = random_factors(seed)
    prices = every_price(factors, sizes)
    budget = 20 + seed % 70
    affordable = {values: cost for values, cost in prices.items() if cost <= budget}
    swept = sweep(factors, sizes, budget, 4)
    if swept is None:
        assert not affordable
        return
    assert swept.constant <= min(affordable.values(), default=budget)
    for values, cost in affordable.items():
        assert all(values[v] == value for v, value in swept.settled.items())
        assert all(mask[values[v]] for v, mask in swept.alive.items())
        left = price(swept.factors, values)
        assert left is not None
        assert swept.constant + left == cost


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_condensing_keeps_every_best_price_within_the_budget(seed: int, rows: int) -> None:
    factors, sizes = random_factors(seed)
    prices = every_price(factors, sizes)
    budget = 20 + seed % 70
    made = condense(factors, sizes, budget, Limits(rows), 3)
    least = min(prices.values(), default=None)
    if made is None:
        assert least is None or least > budget
        return
    left = sorted({v for table in made.factors for v in table.scope})
    best = None
    for picked in itertools.product(*(range(sizes[v]) for v in left)):
        values = [0] * len(sizes)
        for v, value in zip(left, picked, strict=True):
            values[v] = value
        cost = price(made.factors, tuple(values))
        if cost is not None:
            whole = made.complete(values)
            assert prices[whole] == made.constant + cost
            best = prices[whole] if best is None else min(best, prices[whole])
    if least is not None and least <= budget:
        assert best == least


def test_groups_are_neighbours_and_hold_everything_once() -> None:
    scopes = [{v, v + 1} for v in range(12)]
    groups = grouped(scopes, 4)
    assert sorted(i for group in groups for i in group) == list(range(12))
    assert all(group == list(range(group[0], group[-1] + 1)) and len(group) <= 4 for group in groups)


def test_a_path_through_a_chain_goes_from_end_to_end() -> None:
    pair, free = np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=np.int64)
    due = ranks([Factor((v, v + 1), pair, free) for v in range(12)], 14, 3)
    assert len(set(due[:13])) > 2
    # A variable of two groups is due with the later one: along a chain ranks rise or fall, and never both.
    assert due[:13] in (sorted(due[:13]), sorted(due[:13], reverse=True))
    assert due[13] == 0


@pytest.mark.parametrize("tactics", [Tactics(dives=False), Tactics(condensing=False), Tactics(elimination=False)])
def test_an_unfinished_tactic_claims_nothing_false(tactics: Tactics) -> None:
    for seed in range(200):
        problem = random_problem(seed, ops=2 + seed % 3, width=3, hostile=seed % 4 == 0)
        expected = exhaustive(problem)
        try:
            domain = consistent(problem)
        except InfeasibleError:
            continue
        ceiling = 1 << 20
        found = search(network(problem, domain, ceiling), ceiling, Limits(rows=8), tactics)
        if expected is None:
            assert found.cost_ns is None
            continue
        assert found.bound_ns <= expected
        assert found.cost_ns is None or found.cost_ns >= expected
        assert not found.closed or found.cost_ns == expected


def test_sweeps_find_the_cost_of_a_chain() -> None:
    pair = np.array([(a, b) for a in range(3) for b in range(3)], dtype=np.int64)
    draw = np.random.default_rng(4)
    factors = [Factor((v, v + 1), pair, draw.integers(0, 1 << 20, 9)) for v in range(6)]
    least = min(every_price(factors, [3] * 7).values())
    swept = sweep(factors, [3] * 7, 1 << 30, 50)
    assert swept is not None
    # On a tree the bound is the optimum, but for the rounding of shares.
    assert least - 100 < swept.constant <= least


def test_too_few_rows_are_no_proof() -> None:
    pair = np.array([(a, b) for a in range(4) for b in range(4)], dtype=np.int64)
    draw = np.random.default_rng(1)
    factors = [Factor((a, b), pair, draw.integers(0, 50, 16)) for a, b in itertools.combinations(range(5), 2)]
    least = min(every_price(factors, [4] * 5).values())
    few = eliminate(factors, [4] * 5, 500, Limits(rows=3))
    assert not few.exact
    assert few.cost is None or few.cost >= least
    assert eliminate(factors, [4] * 5, 500, Limits()).cost == least


def test_elimination_stops_in_time() -> None:
    factors, sizes = [Factor((0, 1), np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=np.int64))], [2, 2]
    with pytest.raises(OutOfTimeError):
        eliminate(factors, sizes, 1, Limits(deadline=time.perf_counter() - 1))


def answer(problem: Problem, reductions: Reductions, rows: int = 1 << 20) -> int | None:
    try:
        found = solve(problem, reductions=reductions, most_rows=rows)
    except InfeasibleError:
        return None
    assert found.status == "OPTIMAL"
    assert found.bound_ns == found.cost_ns == check(problem, found)
    return found.cost_ns


@pytest.mark.parametrize("batch", range(20))
def test_tables_alone_equal_exhaustive_search(batch: int) -> None:
    for seed in range(1000 + 60 * batch, 1060 + 60 * batch):
        problem = random_problem(seed, ops=2 + seed % 2, width=3, hostile=seed % 3 == 0)
        expected = exhaustive(problem)
        try:
            domain = consistent(problem)
        except InfeasibleError:
            assert expected is None
            continue
        ceiling = 1 << 20
        found = search(network(problem, domain, ceiling), ceiling, Limits())
        assert found.closed
        assert found.cost_ns == expected


@pytest.mark.parametrize("batch", range(10))
def test_reductions_keep_the_optimum_of_random_problems(batch: int) -> None:
    for seed in range(30 * batch, 30 * batch + 30):
        problem = random_problem(seed, ops=4 + seed % 5, width=4, dense=seed % 7 == 0, hostile=seed % 3 == 0)
        assert answer(problem, Reductions()) == answer(problem, PLAIN)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("on", [True, False])
def test_each_switch_keeps_the_optimum(switch: str, on: bool) -> None:
    reductions = replace(PLAIN if on else Reductions(), **{switch: on})
    for seed in range(12):
        problem = block_problem(seed, 2, 3)
        assert answer(problem, reductions) == answer(problem, PLAIN)


@pytest.mark.parametrize("seed", range(12))
def test_repeated_blocks_with_skips(seed: int) -> None:
    problem = block_problem(seed, 2 + seed % 3, 3 + seed % 2)
    assert answer(problem, Reductions()) == answer(problem, PLAIN)


@pytest.mark.parametrize("seed", range(8))
def test_highs_takes_over_where_tables_are_too_wide(seed: int) -> None:
    problem = block_problem(seed, 3, 3)
    assert answer(problem, Reductions(), rows=2) == answer(problem, Reductions())


def test_optima_need_copies_that_blocks_share() -> None:
    shared = [solve(block_problem(seed, 4, 4)).copies for seed in range(12)]
    assert any(copies[0] for copies in shared)
    assert sum(any(copies) for copies in shared) > 6


def test_tables_close_a_deep_model_on_their_own() -> None:
    problem = block_problem(3, 60, 5)
    found = solve(problem, time_limit_s=60)
    assert found.status == "OPTIMAL"
    assert "highs" not in found.method


def test_same_problem_same_answer_on_tables() -> None:
    problem = block_problem(5, 6, 4)
    first, second = solve(problem), solve(problem)
    assert (first.primary, first.copies, first.choice) == (second.primary, second.copies, second.choice)


def test_states_are_counted_before_they_are_made() -> None:
    problem = block_problem(0, 6, 6)
    with pytest.raises(TooManyStatesError, match="states"):
        network(problem, consistent(problem), 1 << 20, most_states=20)


def test_bound_of_an_unfinished_search_holds() -> None:
    problem = block_problem(2, 6, 5)
    best = solve(problem).cost_ns
    net = network(problem, consistent(problem), 1 << 20)
    unfinished = search(net, best + 50, Limits(), Tactics(condensing=False, dives=False, elimination=False))
    assert net.base // SCALE < unfinished.bound_ns <= best
    assert not unfinished.closed


def test_costs_beyond_the_tables_go_to_highs() -> None:
    problem = random_problem(4, ops=3, width=3)
    dear = replace(
        problem,
        ops=tuple(
            replace(op, choices=tuple(replace(c, cost_ns=c.cost_ns << 42) for c in op.choices)) for op in problem.ops
        ),
        relayout_ns={key: price << 42 for key, price in problem.relayout_ns.items()},
    )
    found = solve(dear)
    assert found.method.startswith("highs")
    assert found.cost_ns == solve(problem).cost_ns << 42


def test_a_copy_that_saves_less_than_it_costs_is_dropped_and_one_that_may_pay_is_kept() -> None:
    layouts = candidates(2)
    sizes = tuple(4 * x.size_elems for x in layouts)
    storages = (
        StorageNode("x", layouts, sizes, False, 0),
        StorageNode("y", layouts, sizes, False),
        StorageNode("z", layouts, sizes, False),
    )

    def reader(out: int, saving_ns: int) -> OpNode:
        rows = itertools.product((0, 1), repeat=2)
        return OpNode(f"op{out}", (0, out), 1, tuple(Choice(t, 100 - saving_ns * t[0], "v") for t in rows))

    ops = (reader(1, 20), reader(2, 25))
    for relayout_ns, kept in ((44, True), (45, True), (46, False)):
        problem = Problem(storages, ops, {(0, 0, 1): relayout_ns, (1, 0, 1): 1, (1, 1, 0): 1})
        lean, domain = without_idle_copies(problem, consistent(problem))
        # Nobody reads y, so that no copy of it is ever worth a nanosecond.
        assert set(lean.relayout_ns) == ({(0, 0, 1)} if kept else set())
        assert all(
            op.choices[c].layouts[0] == 0 or kept for op, left in zip(ops, domain.choices, strict=True) for c in left
        )
        assert exhaustive(lean) == exhaustive(problem)


@pytest.mark.parametrize("batch", range(10))
def test_problems_without_idle_copies_have_the_same_optimum(batch: int) -> None:
    dropped = 0
    for seed in range(2000 + 20 * batch, 2020 + 20 * batch):
        problem = random_problem(seed, ops=2 + seed % 2, width=3, dense=seed % 4 == 0, hostile=seed % 5 == 0)
        expected = exhaustive(problem)
        try:
            lean, domain = without_idle_copies(problem, reduce(problem))
        except InfeasibleError:
            assert expected is None
            continue
        left = tuple(
            replace(op, choices=tuple(op.choices[c] for c in kept))
            for op, kept in zip(lean.ops, domain.choices, strict=True)
        )
        assert exhaustive(replace(lean, ops=left)) == expected
        dropped += len(problem.relayout_ns) - len(lean.relayout_ns)
    assert dropped > 0
