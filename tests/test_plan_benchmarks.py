"""What the benchmarks of whole plans conclude, and what they draw: the parts that need no device."""

from __future__ import annotations

import pytest

from benchmarks.decisions import BEST, Ran, check_losses, judged, tau
from benchmarks.drawing import classes, draw, solved
from benchmarks.reduced import DEFAULT, Spec, parse
from benchmarks.refined import outcome, row_of
from benchmarks.step_prediction import groups_of, quiet, summary
from layoutopt.check import check
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.passes import run_passes
from layoutopt.refining import Refined, Round
from layoutopt.strategies import rowmajor
from tests.fake_costs import FakeCosts
from tests.graphs import linear_step


def step() -> TrainingGraph:
    return run_passes(linear_step(4, 16, 32, 64, 16))[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", Spec("gpt2")),
        ("gpt2/2", Spec("gpt2", 2)),
        ("vit-tiny@3", Spec("vit-tiny", 0, 3)),
        ("llama-3.2-1b/1@2x32", Spec("llama-3.2-1b", 1, 2, 32)),
    ],
)
def test_models_are_written_by_name_depth_and_sizes(text: str, expected: Spec) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "gpt2/", "gpt2@", "gpt2/2/3", "gpt2/0", "gpt2@0x3", "gpt2@1x"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(GraphError, match="no model"):
        parse(text)


def test_the_list_of_models_can_be_read() -> None:
    assert len({parse(text) for text in DEFAULT}) == len(DEFAULT)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_draws_are_feasible_different_and_spread() -> None:
    tables, best = solved(step(), FakeCosts())
    draws = draw(tables.graph, tables.problem, best, 25, seed=3)
    assert len(draws) > 10
    made = [d.assignment for d in draws]
    assert len({(a.primary, a.copies, a.choice) for a in [best, *made]}) == len(made) + 1
    for assignment in made:
        assert check(tables.problem, assignment) == assignment.cost_ns >= best.cost_ns
    assert len({d.kind for d in draws}) > 3
    costs = [a.cost_ns for a in made]
    assert max(costs) > 1.1 * min(costs)
    again = draw(tables.graph, tables.problem, best, 25, seed=3)
    assert [d.assignment.choice for d in again] == [a.choice for a in made]
    other = draw(tables.graph, tables.problem, best, 25, seed=4)
    assert [d.assignment.choice for d in other] != [a.choice for a in made]


def test_no_more_is_drawn_than_there_is() -> None:
    tables, best = solved(step(), FakeCosts())
    problem = tables.problem
    fixed = type(problem)(
        tuple(type(n)(n.name, n.candidates[:1], n.sizes_bytes[:1], n.persistent, 0) for n in problem.storages),
        tuple(
            type(op)(op.name, op.operands, op.inputs, tuple(c for c in op.choices if not any(c.layouts)), op.pinned)
            for op in problem.ops
        ),
        {},
    )
    assert draw(tables.graph, fixed, rowmajor(fixed), 5) == []
    assert best.status == "OPTIMAL"


def test_classes_hold_every_storage_once_and_like_with_like() -> None:
    tables, _ = solved(step(), FakeCosts())
    found = classes(tables.graph, tables.problem)
    assert sorted(s for own in found for s in own) == list(range(len(tables.names)))
    for own in found:
        assert len({tables.problem.storages[s].candidates for s in own}) == 1


# ---- judging --------------------------------------------------------------------------------------------------------


def ran(name: str, predicted: float, *seconds: float, objective: float = 1.0) -> Ran:
    return Ran(name, "by class", predicted, objective, list(seconds), [2.0, 2.0])


def test_quiet_steps_are_the_quickest_quarter() -> None:
    assert quiet([5.0]) == 5.0
    assert quiet([9.0, 1.0, 3.0, 8.0, 7.0, 2.0, 9.0, 9.0]) == 1.5


def test_orders_are_compared() -> None:
    plans = [ran("a", 1.0, 3.0, 3.0), ran("b", 2.0, 4.0, 4.0), ran("c", 4.0, 5.0, 5.0), ran("d", 3.0, 6.0, 6.0)]
    found = judged(plans, 0.8)
    assert found["tau"] == pytest.approx(2 / 3, abs=1e-4)  # one of six pairs is the wrong way round
    assert found["tau_best_half"] == 1.0
    assert found["tau_of_objective"] is None
    assert found["tau_of_repeated_measurement"] == 1.0
    assert found["ratio_median_error"] == pytest.approx(0.25)  # 1.25, 2.5, 5, 3.75 for 1.5, 2, 2.5, 3
    assert found["ratio_within_10"] == 0.0
    assert (found["solver_rank"], found["fastest_ratio"], found["slowest_ratio"]) == (1, 1.5, 3.0)
    assert judged([*plans, ran("e", 5.0, 1.0, 1.0)], 0.8)["solver_rank"] == 2


def test_a_measurement_that_does_not_repeat_says_so() -> None:
    plans = [ran("a", 1.0, 3.0, 6.0), ran("b", 2.0, 4.0, 5.0), ran("c", 3.0, 5.0, 4.0)]
    assert judged(plans, 1.0)["tau_of_repeated_measurement"] == -1.0


def test_tau_of_too_little_is_none() -> None:
    assert tau([1.0], [2.0]) is None
    assert tau([], []) is None
    assert tau([1.0, 1.0], [2.0, 3.0]) is None


@pytest.mark.parametrize("loss", [1.001, float("nan"), float("inf"), -1.0])
def test_another_loss_is_wrong(loss: float) -> None:
    check_losses({BEST: 1.0, "a": 1.00005})
    with pytest.raises(LayoutOptError, match="WRONG"):
        check_losses({BEST: 1.0, "a": loss})


def test_errors_are_summed_up_both_ways() -> None:
    rows = [
        {"ratio": 1.3, "steady_ratio": 1.05},
        {"ratio": 0.95, "steady_ratio": 0.8},
        {"ratio": 1.0, "steady_ratio": 1},
    ]
    found = summary(rows)
    assert found["steps"] == 3
    assert found["ratio"]["median_error"] == pytest.approx(0.05)
    assert found["ratio"]["greatest_error"] == pytest.approx(0.3)
    assert found["ratio"]["within_10"] == pytest.approx(2 / 3)
    assert found["steady_ratio"]["greatest_error"] == pytest.approx(0.2)


def test_plans_share_memory_as_it_lasts() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1}
    assert list(groups_of(sizes, 8)) == [["a", "b"], ["c"], ["d"]]
    assert list(groups_of(sizes, 100)) == [["a", "b", "c", "d"]]
    assert list(groups_of({}, 8)) == []


def test_how_often_the_first_plan_was_the_best() -> None:
    kept, dropped = Round(3, 0.1, 0.09, 0.1, 0.9, True), Round(2, 0.1, 0.11, 0.1, 1.1, False)
    runs = [(dropped,), (kept, dropped), (kept, kept), ()]
    rows = [
        row_of("m", seed, Refined(None, None, rounds, not rounds))  # type: ignore[arg-type]
        for seed, rounds in enumerate(runs)
    ]
    assert [row["first_was_best"] for row in rows] == [True, False, False, True]
    assert [row["gain"] for row in rows] == pytest.approx([1.0, 0.9, 0.81, 1.0])
    text = outcome(rows)
    assert "best in 2 of 4 runs" in text
    assert "came to rest in 1" in text
    assert "0.810" in text
