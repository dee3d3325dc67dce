"""The least time of recomputation: against brute force on random steps; how close the greedy search comes."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import chain, combinations

import pytest

from layoutopt.graph import Expr, Op, Operand, Phase, Tensor, TrainingGraph
from layoutopt.recompute_exact import least_extra
from layoutopt.recompute_search import Choices, frontier
from layoutopt.recompute_step import Step
from layoutopt.rewrites import rewritten
from tests.test_rewrite_anew import costs_of, eager_peak
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


@lru_cache(maxsize=2)
def choices_of(name: str) -> Choices:
    graph = graphs(name)
    return Choices(graph, costs_of(graph))


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_the_greedy_search_is_near_and_the_best_choice_becomes_part_of_its_frontier(seed: int) -> None:
    """On steps of some twelve ops, over all budgets together; one by one it may be far off."""
    graph, costs = random_step(seed)
    choices = Choices(graph, costs)
    by_peak: dict[int, int] = {}
    for peak, extra in all_choices(choices.step, False):
        by_peak[peak] = min(extra, by_peak.get(peak, extra))
    greedy, least = 0, 0
    known = choices.frontier()
    for budget in by_peak:
        best = min(extra for peak, extra in by_peak.items() if peak <= budget)
        near = min((c.extra_ns for c in known if c.peak_bytes <= budget), default=best)
        assert near >= best
        greedy, least = greedy + near, least + best
        found = choices.within(budget)
        assert found is not None
        assert found.peak_bytes <= budget
        assert found.extra_ns == best
        assert min(c.extra_ns for c in choices.frontier() if c.peak_bytes <= budget) == best
    assert greedy <= 1.6 * least


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_whole_model(share: float) -> None:
    """Proven, no worse than the greedy choice, and the rewritten graph needs what the program says."""
    choices = choices_of("vit-digits")
    known = frontier(graphs("vit-digits"), costs_of(graphs("vit-digits")))
    budget = int(known[0].peak_bytes * share)
    found = choices.within(budget)
    assert found is not None
    greedy = min(c.extra_ns for c in known if c.peak_bytes <= budget)
    assert found.extra_ns <= greedy <= 1.3 * found.extra_ns
    assert eager_peak(rewritten(graphs("vit-digits"), [found.name])) <= budget
    loose = least_extra(choices.step, budget, between=True)
    assert loose.proven
    assert loose.bound_ns is not None
    assert loose.bound_ns <= found.extra_ns


def test_what_no_choice_can_do() -> None:
    choices = choices_of("vit-digits")
    held = sum(t.size_elems * t.item_bytes for t in graphs("vit-digits").by_role("parameter", "state"))
    assert choices.within(held) is None
    assert least_extra(choices.step, held).bound_ns is None
    whole = choices.frontier()[0].peak_bytes
    assert choices.within(whole) == choices.frontier()[0]


def test_few_nodes_give_an_honest_bound() -> None:
    """Stopped after the first moment, the program still says what nothing can undercut."""
    choices = choices_of("vit-digits")
    budget = int(choices.frontier()[0].peak_bytes * 0.6)
    whole, stopped = least_extra(choices.step, budget), least_extra(choices.step, budget, rounds=1)
    assert whole.extra_ns is not None
    assert stopped.bound_ns is not None
    assert stopped.bound_ns <= whole.extra_ns
    assert stopped.extra_ns is None or stopped.extra_ns >= whole.extra_ns
