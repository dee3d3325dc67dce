"""The least time of recomputation: against brute force on random steps; how close the greedy search comes."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import chain, combinations

import pytest

from layoutopt.graph import Expr, Op, Operand, Phase, Tensor, TrainingGraph
from layoutopt.recompute_exact import least_extra
from layoutopt.recompute_search import frontier
from layoutopt.recompute_step import Step
from tests.test_rewrite_anew import costs_of
from tests.test_rewrite_recompute import graphs

SEEDS = range(60)
COPY = Expr((), (("x", 0),))


def random_step(seed: int, most: int = 9) -> tuple[TrainingGraph, dict[str, int]]:
    """Forward ops on results before them, a loss, then for each of them an op that reads some of these; and prices.

    Nobody executes it: shapes are sizes alone.
    """
    lot = random.Random(seed)
    tensors: dict[str, Tensor] = {}
    ops: list[Op] = []

    def op(name: str, phase: Phase, reads: list[str], outputs: int = 1) -> None:
        made = [f"{name}.{i}" for i in range(outputs)]
        for tensor in made:
            tensors[tensor] = Tensor(tensor, (lot.randint(1, 9),), role="activation")
        results = tuple(Operand(tensor) for tensor in made)
        ops.append(Op(name, "pointwise", tuple(map(Operand, dict.fromkeys(reads))), results, {"expr": COPY}, phase))

    for name, role in (("x", "input"), ("w", "parameter")):
        tensors[name] = Tensor(name, (lot.randint(1, 9),), role=role)
    known = ["x", "w"]
    count = lot.randint(3, most)
    for i in range(count):
        reads = [known[-1], *lot.sample(known, lot.randint(0, min(2, len(known))))]
        op(f"f{i}", "forward", reads, lot.choice([1, 1, 1, 2]))
        known += [o.tensor for o in ops[-1].outputs]
    op("loss", "loss", [known[-1]])
    after = "loss.0"
    for i in reversed(range(count)):
        reads = [after, *lot.sample(known, lot.randint(0, min(3, len(known))))]
        op(f"b{i}", "backward", reads)
        after = f"b{i}.0"
    graph = TrainingGraph(f"random step {seed}", tensors, ops, ("loss.0", after))
    return graph, {o.name: lot.randint(1, 20) for o in ops}


def all_choices(step: Step, between: bool) -> list[tuple[int, int]]:
    """Peak and extra time of every set of dropped results."""
    free = step.droppable
    out = []
    for dropped in chain.from_iterable(combinations(free, n) for n in range(len(free) + 1)):
        walk = step.walk(dropped, between)
        out.append((walk.peak_bytes, sum(step.cost_ns[p] for p in walk.ran)))
    return out


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_is_that_of_all_choices(seed: int, between: bool) -> None:
    graph, costs = random_step(seed)
    step = Step(graph, costs, {})
    choices = all_choices(step, between)
    peaks = sorted({peak for peak, _ in choices})
    for budget in {peaks[0] - 1, peaks[0], peaks[len(peaks) // 2], peaks[-1]}:
        fitting = [extra for peak, extra in choices if peak <= budget]
        found = least_extra(step, budget, between=between, rounds=200)
        assert found.proven, (seed, budget)
        if not fitting:
            assert (found.bound_ns, found.dropped) == (None, None)
            continue
        assert found.bound_ns == found.extra_ns == min(fitting), (seed, budget)
        assert found.dropped is not None
        assert step.walk(found.dropped, between).peak_bytes <= budget
