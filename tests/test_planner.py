"""Planning hand-built steps on a device that does not exist: every strategy valid, the exact one no dearer than any,
and every kind of wrong plan refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from costmodel.cost import Cost
from kernels.spec import DeviceLimits, Kernel, op_spec
from kernels.variants import kernels_for
from layoutopt import plan as plans
from layoutopt import planner, strategies
from layoutopt.candidates import Rules, candidates
from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutOptError
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from layoutopt.plan import LayoutDoc, Plan
from layoutopt.planner import STRATEGIES, plan, plan_all, tabulate, validate
from layoutopt.pricing import Pricer, Tables, build_problem, price_ns
from layoutopt.problem import Assignment, Problem
from layoutopt.rewrite_neighbours import alike_runs
from layoutopt.view import View
from tests import graphs
from tests.fake_costs import FakeCosts

COSTS = FakeCosts()
RULES = Rules((16,), ((4, 4), (16, 16)), cap=6)


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return run_passes(graphs.linear_step(4, 8, 48, 64))[0]


@pytest.fixture(scope="module")
def tables(graph: TrainingGraph) -> Tables:
    return tabulate(graph, COSTS, candidates(graph, RULES))


def test_prices_do_not_depend_on_what_was_priced_before(graph: TrainingGraph, tables: Tables) -> None:
    pricer, priced = Pricer(COSTS), []
    other = run_passes(graphs.linear_step(4, 8, 48, 32))[0]
    for one in (other, graph, other):
        shared = tabulate(one, COSTS, candidates(one, RULES), pricer=pricer)
        assert (shared.problem == tables.problem) == (one is graph)
        priced.append(pricer.kernels)
    assert priced[2] == priced[1] < priced[0] + tables.kernels, "what both graphs contain is priced once"


@pytest.fixture(scope="module")
def by_strategy(graph: TrainingGraph, tables: Tables) -> dict[str, Plan]:
    return {name: plan(graph, COSTS, name, tables=tables) for name in (*STRATEGIES, "random:1", "random:2")}


@pytest.fixture(scope="module")
def mixed(by_strategy: dict[str, Plan]) -> Plan:
    """A valid plan with at least one relayout."""
    found = [p for p in by_strategy.values() if p.relayouts]
    assert found
    return found[-1]


def test_the_exact_plan_is_optimal_and_no_dearer_than_any(by_strategy: dict[str, Plan]) -> None:
    exact = by_strategy["ilp"].solver
    assert (exact.status, exact.gap, exact.bound_ns) == ("OPTIMAL", 0.0, exact.objective_ns)
    assert all(p.solver.objective_ns >= exact.objective_ns for p in by_strategy.values())


class TilesOnly(FakeCosts):
    """A device on which a contraction is ten times dearer unless all its operands are in R-Tile(4, 4)."""

    def predict(self, kernel: Kernel, together: int = 1) -> Cost:
        cost = super().predict(kernel, together)
        if kernel.spec.kind != "contraction" or all(x == Layout.r_tile(x.shape, 4, 4) for x in kernel.layouts):
            return cost
        return replace(cost, total_ns=10 * cost.total_ns)


def test_layouts_follow_the_prices(graph: TrainingGraph) -> None:
    costs = TilesOnly()
    tables = tabulate(graph, costs, candidates(graph, RULES))
    made = {name: plan(graph, costs, name, tables=tables) for name in ("ilp", "rowmajor")}
    # The four-wide logits are too small to have tiles, so two of the five contractions stay dear.
    assert made["ilp"].solver.objective_ns < 0.7 * made["rowmajor"].solver.objective_ns
    every = [d.layout() for docs in made["ilp"].layouts.values() for d in docs]
    assert sum(x == Layout.r_tile(x.shape, 4, 4) != Layout.row_major(x.shape) for x in every if x.rank == 2) >= 4


def test_strategies_are_what_they_are_called(by_strategy: dict[str, Plan]) -> None:
    plain = by_strategy["rowmajor"]
    assert not plain.relayouts
    assert all(len(docs) == 1 for docs in plain.layouts.values())
    assert all(d[0].layout() == Layout.row_major(d[0].shape) for d in plain.layouts.values())
    tiled = [d[0].layout() for d in by_strategy["rtile"].layouts.values()]
    assert sum(x in (Layout.r_tile(x.shape, 4, 4), Layout.r_tile(x.shape, 16, 16)) for x in tiled if x.rank > 1) >= 4
    assert by_strategy["random:1"].layouts != by_strategy["random:2"].layouts


def test_a_plan_survives_its_file(graph: TrainingGraph, by_strategy: dict[str, Plan]) -> None:
    for made in by_strategy.values():
        read = plans.decode(plans.encode(made))
        assert read == made
        validate(read, graph, COSTS)
        validate(read, graph)
        validate(read, graph, None, COSTS.limits)


def test_convolutions_guide_the_activation_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations count by the convolutions that read them; inputs, weights and gradients do not guide."""
    x, w, attrs = (1, 8, 4, 4), (8, 8, 3, 3), {"padding": (1, 1)}
    roles = {"x": "input", "v": "parameter", "w": "parameter", "dv": "gradient", "dw": "gradient"}
    shapes = dict.fromkeys(("v", "w", "dv", "dw"), w)
    chain = TrainingGraph(
        "convolutions",
        {n: Tensor(n, shapes.get(n, x), role=roles.get(n, "activation")) for n in ("x", "y", "z", *shapes)},  # type: ignore[arg-type]
        [
            Op("y", "conv", (Operand("x"), Operand("v")), (Operand("y"),), attrs),
            Op("z", "conv", (Operand("y"), Operand("w")), (Operand("z"),), attrs),
            Op("dw", "conv_grad_weight", (Operand("z"), Operand("y")), (Operand("dw"),), attrs),
            Op("dv", "conv_grad_weight", (Operand("y"), Operand("x")), (Operand("dv"),), attrs),
        ],
        ("z",),
    )
    priced = tabulate(chain, COSTS, candidates(chain, RULES))
    guides = []
    choose = strategies.activation

    def spy(problem: Problem, guide: Sequence[int]) -> Assignment:
        guides.append(dict(zip(priced.names, guide, strict=True)))
        return choose(problem, guide)

    monkeypatch.setattr(strategies, "activation", spy)
    plan(chain, COSTS, "activation", tables=priced)
    assert guides == [{"x": 0, "y": 3, "z": 1, "v": 0, "w": 0, "dv": 0, "dw": 0}]


def test_attention_is_planned() -> None:
    attention = run_passes(graphs.attention_step(2, 16, 2, 16))[0]
    made = plan(attention, COSTS, time_limit_s=20, tables=tabulate(attention, COSTS, candidates(attention, RULES)))
    assert made.solver.bound_ns <= made.solver.objective_ns
    assert len(made.ops) == len(attention.ops)


def test_choices_are_the_cheapest_kernels(graph: TrainingGraph, tables: Tables) -> None:
    seen = 0
    for op, node in zip(graph.ops, tables.problem.ops, strict=True):
        spec = op_spec(graph, op)
        plain = next(c for c in node.choices if not any(c.layouts))
        layouts = tuple(o.view.layout(Layout.row_major(graph.tensors[o.tensor].shape)) for o in op.operands)
        prices = {k.variant.label: price_ns(COSTS.predict(k)) for k in kernels_for(spec, layouts, COSTS.limits)}
        assert plain.cost_ns == min(prices.values()) == prices[plain.variant]
        seen += len(prices) > 1
    assert seen > 3


def test_choices_that_were_left_out_for_speed_cost_little(graph: TrainingGraph, tables: Tables) -> None:
    """Favoured variants against all variants, on every choice of the contractions."""
    ratios = []
    for op, node in zip(graph.ops, tables.problem.ops, strict=True):
        if op.kind != "contraction":
            continue
        spec = op_spec(graph, op)
        for choice in node.choices:
            pairs = zip(node.operands, choice.layouts, strict=True)
            stored = [tables.problem.storages[s].candidates[c] for s, c in pairs]
            seen = tuple(o.view.layout(x) for o, x in zip(op.operands, stored, strict=True))
            best = min(price_ns(COSTS.predict(k)) for k in kernels_for(spec, seen, COSTS.limits))
            ratios.append(choice.cost_ns / best)
    assert min(ratios) >= 1
    assert sorted(ratios)[len(ratios) // 2] == 1
    assert sorted(ratios)[len(ratios) * 9 // 10] < 1.1


def test_limits_keep_row_major_within_reach(graph: TrainingGraph) -> None:
    tight = build_problem(graph, COSTS, candidates(graph, RULES), limit=3)
    assert all(len(op.choices) <= 3 for op in tight.problem.ops)
    assert all(any(not any(c.layouts) for c in op.choices) for op in tight.problem.ops)
    validate(plan(graph, COSTS, tables=tight), graph, COSTS)


def test_progress_rises_to_one(graph: TrainingGraph) -> None:
    told: list[float] = []
    plan_all(graph, COSTS, ["rowmajor"], progress=lambda _, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_unknown_strategy_lists_the_known() -> None:
    with pytest.raises(LayoutOptError, match=r"unknown strategy 'best'.*ilp.*rowmajor"):
        plan(graphs.linear_step(), COSTS, "best")


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_budget_names_need_and_peak(graph: TrainingGraph, tables: Tables, by_strategy: dict[str, Plan]) -> None:
    need = by_strategy["rowmajor"].arena_bytes
    assert plan(graph, COSTS, "rowmajor", need, tables=tables).arena_bytes == need
    with pytest.raises(InfeasibleError, match=rf"needs {need} bytes.*budget is {need - 1}") as caught:
        plan(graph, COSTS, "rowmajor", need - 1, tables=tables)
    assert {op.name for op in graph.ops} & set(caught.value.conflict)


def test_device_with_too_little_memory(graph: TrainingGraph, tables: Tables) -> None:
    small = replace(COSTS, limits=replace(COSTS.limits, max_alloc_bytes=4096))
    with pytest.raises(DeviceError, match="allows 4096"):
        plan(graph, small, "rowmajor", tables=tables)


def test_memory_is_reused_and_kept_tensors_are_not(graph: TrainingGraph, tables: Tables) -> None:
    made = plan(graph, COSTS, "rowmajor", tables=tables)
    assert made.arena_bytes < sum(slot.size_bytes for slot in made.arena)
    last = len(made.steps) - 1
    early = next(slot for slot in made.arena if slot.last < last)
    name = early.name.partition("#")[0]
    kept = plan(graph, COSTS, "rowmajor", tables=tables, keep=[name])
    assert next(slot for slot in kept.arena if slot.name == early.name).last == last


# ---- graphs that need care ------------------------------------------------------------------------------------------

DOUBLE = {"expr": Expr((("mul", ("x", 0), ("c", 2.0)),), (("t", 0),))}


def update_graph(late: str) -> TrainingGraph:
    """w is doubled in place, after which ``late`` (the new value or the old one) is read."""
    shape = (32, 32)
    tensors = [Tensor("w", shape, role="parameter"), Tensor("w.new", shape), Tensor("y", shape), Tensor("z", shape)]
    ops = [
        Op("before", "pointwise", (Operand("w"),), (Operand("z"),), DOUBLE),
        Op("update", "pointwise", (Operand("w"),), (Operand("w.new"),), DOUBLE, "update", "", ((0, 0),)),
        Op("after", "pointwise", (Operand(late),), (Operand("y"),), DOUBLE),
    ]
    return TrainingGraph("update", {t.name: t for t in tensors}, ops, ("y", "z"))


def layouts_for(graph: TrainingGraph) -> dict[str, tuple[Layout, ...]]:
    return {n: (Layout.row_major(s.shape), Layout.r_tile(s.shape, 4, 4)) for n, s in graph.storages.items()}


def test_a_value_updated_in_place_is_read_from_its_primary() -> None:
    graph = update_graph("w.new")
    tables = tabulate(graph, COSTS, layouts_for(graph))
    assert [op.pinned for op in tables.problem.ops] == [(), (), (0,)]
    for name in (*STRATEGIES, "random:3", "random:4"):
        made = plan(graph, COSTS, name, tables=tables)
        assert made.ops[2].layouts[0] == 0


def test_reading_what_was_overwritten_is_an_error() -> None:
    with pytest.raises(GraphError, match=r"after reads 'w' after 'w\.new' has overwritten it"):
        plan(update_graph("w"), COSTS)


def test_an_op_without_kernels_is_named() -> None:
    torn = View().then(("permute", (1, 0)), ("reshape", (3, 8)))
    tensors = [Tensor("x", (6, 4), role="input"), Tensor("y", (3, 8))]
    op = Op("look", "pointwise", (Operand("x", torn),), (Operand("y"),), DOUBLE, source="model.block")
    graph = TrainingGraph("torn", {t.name: t for t in tensors}, [op], ("y",))
    with pytest.raises(InfeasibleError, match=r"op look .*model\.block.*'x' can be seen as permute\[1,0\]") as caught:
        plan(graph, COSTS)
    assert caught.value.conflict == ("look", "x", "y")


# ---- plans that are wrong -------------------------------------------------------------------------------------------


def test_a_plan_for_another_graph_names_both(mixed: Plan, graph: TrainingGraph) -> None:
    other = run_passes(graphs.linear_step(4, 8, 48, 80))[0]
    with pytest.raises(GraphError, match=f"{graph.hash[:12]}.*{other.hash[:12]}"):
        validate(mixed, other, COSTS)


def test_a_plan_for_another_device_names_both(mixed: Plan, graph: TrainingGraph) -> None:
    with pytest.raises(DeviceError, match=r"'fake'.*'phone' \(00"):
        validate(mixed, graph, FakeCosts(name="phone", hash="00" * 32))


def test_other_prices_are_noticed(mixed: Plan, graph: TrainingGraph) -> None:
    class Dearer(FakeCosts):
        def predict(self, kernel: Kernel, together: int = 1) -> Cost:
            cost = super().predict(kernel, together)
            return replace(cost, total_ns=cost.total_ns + 1)

    with pytest.raises(LayoutOptError, match="predicts"):
        validate(mixed, graph, Dearer())


def test_alignment_of_the_device_is_noticed(mixed: Plan, graph: TrainingGraph) -> None:
    with pytest.raises(DeviceError, match="multiples of 65536"):
        validate(mixed, graph, None, DeviceLimits(base_align_bytes=65536))


def change(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def first_copy_read(plan: Plan) -> int:
    return next(i for i, op in enumerate(plan.ops) if any(op.layouts))


def with_op(plan: Plan, i: int, **fields: Any) -> Plan:
    return change(plan, ops=(*plan.ops[:i], msgspec.structs.replace(plan.ops[i], **fields), *plan.ops[i + 1 :]))


def with_slot(plan: Plan, i: int, **fields: Any) -> Plan:
    return change(plan, arena=(*plan.arena[:i], msgspec.structs.replace(plan.arena[i], **fields), *plan.arena[i + 1 :]))


def without_relayouts(plan: Plan) -> Plan:
    steps = tuple(step for step in plan.steps if step[0] == "op")
    spent = sum(r.cost.total_ns for r in plan.relayouts)
    solver = msgspec.structs.replace(plan.solver, objective_ns=plan.solver.objective_ns - spent)
    return change(plan, steps=steps, relayouts=(), solver=solver)


def transposed(plan: Plan) -> Plan:
    name, docs = next((n, d) for n, d in plan.layouts.items() if len(d[0].shape) == 2 and min(d[0].shape) > 1)
    wrong = Layout.row_major(docs[0].shape[::-1])
    return change(plan, layouts={**plan.layouts, name: (LayoutDoc.of(wrong), *docs[1:])})


def folded(plan: Plan) -> Plan:
    name, docs = next((n, d) for n, d in plan.layouts.items() if len(d[0].shape) == 2 and min(d[0].shape) > 1)
    doc = msgspec.structs.replace(docs[0], modes=tuple((a, n, 1, d) for a, n, _, d in docs[0].modes))
    return change(plan, layouts={**plan.layouts, name: (doc, *docs[1:])})


def overlapping(plan: Plan) -> Plan:
    a, b = (
        0,
        next(
            i for i, s in enumerate(plan.arena) if i and s.first <= plan.arena[0].last and plan.arena[0].first <= s.last
        ),
    )
    return with_slot(plan, b, offset_bytes=plan.arena[a].offset_bytes)


def late_relayout(plan: Plan) -> Plan:
    at = next(i for i, step in enumerate(plan.steps) if step[0] == "relayout")
    steps = (*plan.steps[:at], *plan.steps[at + 1 :], plan.steps[at])
    return change(plan, steps=steps)


def swapped_ops(plan: Plan) -> Plan:
    ops = [i for i, step in enumerate(plan.steps) if step[0] == "op"][:2]
    steps = list(plan.steps)
    steps[ops[0]], steps[ops[1]] = steps[ops[1]], steps[ops[0]]
    return change(plan, steps=tuple(steps))


WRONG: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "ops missing": (lambda p: change(p, ops=p.ops[1:]), "not the graph's"),
    "layout missing": (lambda p: change(p, layouts=dict(list(p.layouts.items())[1:])), "no layout for"),
    "foreign layout": (
        lambda p: change(p, layouts={**p.layouts, "?": next(iter(p.layouts.values()))}),
        "does not have",
    ),
    "other shape": (transposed, "laid out as"),
    "not injective": (folded, "two elements in one place"),
    "no relayout": (without_relayouts, "which holds None"),
    "late relayout": (late_relayout, "comes before|which holds None|relayout"),
    "order": (swapped_ops, "once, in order"),
    "operand missing": (lambda p: with_op(p, 0, layouts=p.ops[0].layouts[1:]), "layouts for"),
    "no such position": (lambda p: with_op(p, 0, layouts=(9, *p.ops[0].layouts[1:])), "not laid out"),
    "no such kernel": (lambda p: with_op(p, 0, variant="nothing.at.all()"), "no kernel here matches"),
    "step unknown": (lambda p: change(p, steps=(*p.steps[:-1], ("sleep", 0))), "once, in order"),
    "relayout before another op": (
        lambda p: change(p, relayouts=tuple(msgspec.structs.replace(r, before="?") for r in p.relayouts)),
        "comes before",
    ),
    "slot missing": (lambda p: change(p, arena=p.arena[1:]), "the arena has no"),
    "slot too small": (lambda p: with_slot(p, 0, size_bytes=1), "the arena has no"),
    "slot outside": (lambda p: change(p, arena_bytes=p.arena[-1].offset_bytes), "leaves the arena"),
    "slots overlap": (overlapping, "share bytes"),
    "two slots of one name": (lambda p: change(p, arena=(*p.arena, p.arena[0])), "same name"),
    "objective": (
        lambda p: change(p, solver=msgspec.structs.replace(p.solver, objective_ns=p.solver.objective_ns + 1)),
        "steps sum to",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_plan_is_refused(kind: str, mixed: Plan, graph: TrainingGraph) -> None:
    spoil, words = WRONG[kind]
    validate(mixed, graph, COSTS)
    with pytest.raises(LayoutOptError, match=words):
        validate(spoil(mixed), graph, COSTS)


def test_every_lifetime_matters(mixed: Plan, graph: TrainingGraph) -> None:
    """Any slot that ends a step early or begins a step late is noticed; within a run of equal ops it may not matter."""
    runs = [{graph.ops[i].name for i in run} for run in alike_runs(graph) if len(run) > 1]
    loose = {
        step
        for step, (kind, index) in enumerate(mixed.steps)
        if kind == "op" and any(mixed.ops[index].op in run for run in runs)
    }
    noticed = 0
    for i, slot in enumerate(mixed.arena):
        if slot.last > slot.first:
            for edge, fields in ((slot.last, {"last": slot.last - 1}), (slot.first, {"first": slot.first + 1})):
                if edge not in loose:
                    noticed += 1
                    with pytest.raises(LayoutOptError):
                        validate(with_slot(mixed, i, **fields), graph)
    assert noticed > len(mixed.arena) // 2


def test_equal_ops_do_not_share_memory(mixed: Plan, graph: TrainingGraph) -> None:
    """Whatever one op of a run touches is alive while the others run."""
    step_of = {mixed.ops[index].op: step for step, (kind, index) in enumerate(mixed.steps) if kind == "op"}
    slots = {slot.name: slot for slot in mixed.arena}
    runs = [run for run in alike_runs(graph) if len(run) > 1]
    assert runs
    for run in runs:
        steps = [step_of[graph.ops[o].name] for o in run]
        assert steps == list(range(steps[0], steps[0] + len(run))), "no relayout in between"
        for o in run:
            op, planned = graph.ops[o], mixed.ops[o]
            for operand, position in zip(op.operands, planned.layouts, strict=True):
                slot = slots[f"{graph.storage_of[operand.tensor]}#{position}"]
                assert slot.first <= steps[0]
                assert slot.last >= steps[-1]


def test_beside_a_faster_graph_that_does_not_fit_nothing_is_proven(
    by_strategy: dict[str, Plan], tables: Tables
) -> None:
    """The plan that fits is proven among the layouts of its own graph only."""
    own = by_strategy["ilp"]
    assert own.solver.status == "OPTIMAL"
    slower = planner.assign(tables, "ilp")
    faster = replace(slower, bound_ns=slower.bound_ns // 2)
    _, told = planner._beside((tables, own), [(tables, faster), (tables, slower)])
    assert (told.solver.status, told.solver.bound_ns) == ("FEASIBLE", faster.bound_ns)
    assert told.solver.gap == pytest.approx(0.5, abs=1e-6)
    assert planner._beside((tables, own), [(tables, slower)])[1] == own
    assert planner._beside((tables, own), [])[1] == own
