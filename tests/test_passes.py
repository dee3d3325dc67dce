"""Passes: the interpreter gives the same results before and after each, on hand-built, random and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Sketch, attention_step, expand, linear_step, permute, random_values, reshape, result_values
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import run
from layoutopt.expr import Builder, evaluate_expr, tidy
from layoutopt.graph import Expr, TrainingGraph
from layoutopt.pass_views import Notes, normal, seen
from layoutopt.passes import (
    PASSES,
    canonical_domains,
    canonical_shapes,
    drop_dead,
    fold_constants,
    fold_views,
    fuse_loss,
    fuse_pointwise,
    run_passes,
    share_common,
)
from layoutopt.view import View

HAND_BUILT = {"linear": linear_step, "attention": attention_step}


def kinds(graph: TrainingGraph) -> list[str]:
    return [op.kind for op in graph.ops]


def check(before: TrainingGraph, after: TrainingGraph, seed: int = 1) -> None:
    """Same results, nothing read after it was overwritten, every view readable."""
    values = random_values(before, seed)
    expected = result_values(before, run(before, values))
    got = result_values(after, run(after, values))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max(initial=1.0) if value.dtype.kind == "f" else 1
        np.testing.assert_allclose(got[name] / scale, value / scale, rtol=0, atol=1e-12, err_msg=name)
    gone: set[str] = set()
    for op in after.ops:
        assert not gone & {o.tensor for o in op.inputs}, f"{op.name} reads what was overwritten"
        gone |= {op.inputs[i].tensor for _, i in op.inplace}


def check_all(graph: TrainingGraph) -> TrainingGraph:
    """Each pass on its own, then all; idempotent; no view op left."""
    step = graph
    for change in PASSES:
        step = change(step, Notes())
        check(graph, step)
    after, report = run_passes(graph)
    check(graph, after)
    again, _ = run_passes(after)
    assert again.hash == after.hash
    assert run_passes(graph)[0].hash == after.hash
    assert "view" not in kinds(after)
    assert all(seen(o.view, after.tensors[o.tensor].shape) is not None for op in after.ops for o in op.operands)
    assert sum(report.after.values()) == len(after.ops)
    return after


@pytest.mark.parametrize("name", sorted(HAND_BUILT))
def test_hand_built_graphs(name: str) -> None:
    check_all(HAND_BUILT[name]())


def test_linear_step_becomes_what_a_person_would_write() -> None:
    after, report = run_passes(linear_step(3, 5, 6, 7))
    update = kinds(after).count("pointwise") - 2
    assert update == 5, "one update per parameter"
    assert "log_softmax" not in kinds(after)
    assert "nll_loss_grad" not in kinds(after)
    assert after.tensors["act"].shape == after.tensors["dh"].shape == (15, 7)
    gelu = after.producer["act"]
    # The bias is added again in the backward pass instead of being kept.
    assert [o.tensor for o in gelu.inputs] == ["h.mm", "b1"]
    assert {o.tensor for o in after.producer["dh"].inputs} == {"h.mm", "b1", "dact"}
    assert [bool(o.view) for o in gelu.operands] == [False, True, False]
    assert report.kept == ()
    assert len(report.folded) == 9
    assert any("pointwise" in line for line in report.lines())


def test_attention_is_stored_by_tokens_and_its_scale_is_folded() -> None:
    after, report = run_passes(attention_step(3, 13, 4, 5))
    for name in ("q.mm", "dq", "dv"):
        assert after.tensors[name].shape == (39, 20), name
    assert after.tensors["p"].shape == (12, 13, 13)
    assert after.producer["scaled"].attrs["alpha"] == 5**-0.5
    assert after.producer["dq"].attrs["alpha"] == 5**-0.5
    assert "scale" not in after.tensors
    assert report.operands[0] <= report.operands[1]


# ---- single passes --------------------------------------------------------------------------------------------------


def test_view_of_an_input_that_is_an_output_stays_a_copy() -> None:
    s = Sketch()
    s.tensor("x", (4, 6), "input")
    out = s.view(("x", permute(1, 0)), "out")
    graph = s.graph("copy", out)
    after, report = run_passes(graph)
    check(graph, after)
    assert kinds(after) == ["pointwise"]
    assert "output of the graph" in report.kept[0]
    assert report.folded == ()


def test_output_that_is_a_view_is_computed_in_place_of_its_source() -> None:
    s = Sketch()
    s.tensor("x", (4, 6), "input")
    y = s.add("y", "x", "x")
    out = s.view((y, reshape(2, 2, 6), permute(1, 0, 2)), "out")
    twice = s.add("twice", y, y)
    graph = s.graph("adopt", out, twice)
    after = fold_views(graph)
    check(graph, after)
    assert kinds(after) == ["pointwise", "pointwise"]
    assert "y" not in after.tensors


def test_view_without_a_layout_is_copied_once() -> None:
    s = Sketch()
    s.tensor("x", (4, 6), "input")
    t = s.view(("x", permute(1, 0)), "t")
    odd = s.view((t, reshape(8, 3)), "odd")
    a = s.op("softmax", [odd], {"a": (8, 3)})[0]
    b = s.op("softmax", [(odd, permute(1, 0))], {"b": (3, 8)})[0]
    graph = s.graph("odd", a, b)
    after, report = run_passes(graph)
    check_all(graph)
    assert kinds(after) == ["pointwise", "softmax", "softmax"]
    assert "no layout" in report.kept[0]


def test_operand_view_without_a_layout_gets_a_copy() -> None:
    s = Sketch()
    s.tensor("x", (4, 6), "input")
    a = s.op("softmax", [("x", permute(1, 0), reshape(8, 3))], {"a": (8, 3)})[0]
    graph = s.graph("odd operand", a)
    check_all(graph)
    assert kinds(run_passes(graph)[0]) == ["pointwise", "softmax"]


def test_view_of_a_parameter_read_after_its_update_keeps_the_old_value() -> None:
    s = Sketch()
    s.tensor("w", (4, 6), "parameter")
    s.tensor("g", (4, 6), "input")
    old = s.view(("w", permute(1, 0)), "old")
    s.sgd("w", "g")
    late = s.op("softmax", [old], {"late": (6, 4)})[0]
    graph = s.graph("late", late)
    after, report = run_passes(graph)
    check(graph, after)
    assert kinds(after) == ["pointwise", "pointwise", "softmax"]
    assert "overwritten" in report.kept[0]


def test_fusion_does_not_read_a_parameter_after_its_update() -> None:
    s = Sketch()
    s.tensor("w", (4, 6), "parameter")
    s.tensor("g", (4, 6), "input")
    old = s.add("old", "w", "w")
    s.sgd("w", "g")
    late = s.add("late", old, "g")
    s.ops[-1] = s.ops[-1].__class__(**{**s.ops[-1].__dict__, "phase": "forward"})
    graph = s.graph("late", late)
    check_all(graph)


def test_constants_are_calculated_and_inlined() -> None:
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    s.tensor("one", (), "constant", value=1.0)
    s.tensor("row", (5,), "constant", value=[0.0, 1.0, 2.0, 3.0, 4.0])
    half = s.pointwise("half", [("mul", ("x", 0), ("c", 0.5))], "row")
    ones = s.add("ones", ("one", expand(3, 5)), ("one", expand(3, 5)))
    y = s.add("y", "x", ones)
    z = s.pointwise("z", [("mul", ("x", 0), ("x", 1)), ("add", ("t", 0), ("x", 2))], y, ("half", expand(3, 5)), y)
    graph = s.graph("constants", z)
    after = check_all(graph)
    assert kinds(after) == ["pointwise"]
    assert after.constants == {"half": [0.0, 0.5, 1.0, 1.5, 2.0]}
    assert ("add", ("x", 0), ("c", 2.0)) in after.ops[0].attrs["expr"].code
    assert kinds(fold_constants(graph)) == ["pointwise", "pointwise"]
    assert half == "half"


def test_large_iota_is_not_a_constant_but_a_small_one_is() -> None:
    for n, expected in ((7, []), (5000, ["iota"])):
        s = Sketch()
        s.op("iota", [], {"i": (n,)}, start=0, step=2)
        s.op("softmax", [("i", reshape(1, n))], {"y": (1, n)})
        assert kinds(fold_constants(s.graph("iota", "y")))[:-1] == expected


def test_dead_code_goes_and_unused_results_too() -> None:
    graph = linear_step()
    after = drop_dead(graph)
    assert "dx" not in after.tensors
    assert "w1.new" in after.tensors
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    s.tensor("y", (3, 5), "input")
    expr = Expr((("add", ("x", 0), ("x", 0)), ("exp", ("x", 1))), (("t", 0), ("t", 1)))
    s.op("pointwise", ["x", "y"], {"a": (3, 5), "b": (3, 5)}, expr=expr)
    (op,) = drop_dead(s.graph("two", "b")).ops
    assert ([o.tensor for o in op.inputs], op.attrs["expr"]) == (["y"], Expr((("exp", ("x", 0)),), (("t", 0),)))


def test_common_subexpressions_within_a_phase_only() -> None:
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    a = s.pointwise("a", [("exp", ("x", 0))], "x")
    b = s.pointwise("b", [("exp", ("x", 0))], ("x", reshape(15), reshape(3, 5)))
    s.phase = "backward"
    c = s.pointwise("c", [("exp", ("x", 0))], "x")
    out = s.op("concat", [(n, reshape(1, 3, 5)) for n in (a, b, c)], {"out": (1, 9, 5)}, starts=(0, 3, 6))[0]
    graph = s.graph("common", out)
    after = share_common(graph)
    check(graph, after)
    assert kinds(after) == ["pointwise", "pointwise", "concat"]


def test_loss_is_not_fused_when_the_classes_are_seen_otherwise() -> None:
    s = Sketch()
    s.tensor("x", (6, 4), "input")
    s.tensor("t", (8,), "input", "int32")
    s.op("log_softmax", ["x"], {"logp": (6, 4)})
    s.op("nll_loss", [("logp", reshape(8, 3)), "t"], {"loss": (), "weight": ()}, ignore_index=-100)
    graph = s.graph("odd loss", "loss")
    assert kinds(fuse_loss(graph)) == ["log_softmax", "nll_loss"]


def test_intermediate_needed_elsewhere_becomes_a_second_result() -> None:
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    s.tensor("y", (3, 5), "input")
    t = s.add("t", "x", "y")
    e = s.pointwise("e", [("exp", ("x", 0))], t)
    p = s.op("softmax", [t], {"p": (3, 5)})[0]
    graph = s.graph("join", e, p)
    after = fuse_pointwise(graph)
    check(graph, after)
    assert kinds(after) == ["pointwise", "softmax"]
    assert {o.tensor for o in after.ops[0].outputs} == {"t", "e"}


def test_join_makes_no_cycle() -> None:
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    t = s.add("t", "x", "x")
    p = s.op("softmax", [t], {"p": (3, 5)})[0]
    e = s.add("e", t, p)
    graph = s.graph("cycle", e)
    after = check_all(graph)
    assert kinds(after) == ["pointwise", "softmax", "pointwise"]


def test_fusion_converts_as_storing_did() -> None:
    s = Sketch()
    s.tensor("x", (3, 5), "input")
    whole = s.pointwise("whole", [("mul", ("x", 0), ("c", 3.0))], "x", dtype="int32")
    flag = s.pointwise("flag", [("sub", ("x", 0), ("c", 1))], whole, dtype="bool")
    y = s.pointwise("y", [("where", ("x", 0), ("x", 1), ("c", 0.5))], flag, whole)
    graph = s.graph("casts", y)
    after = check_all(graph)
    assert kinds(after) == ["pointwise"]


def test_domains_follow_the_largest_operand() -> None:
    s = Sketch()
    s.tensor("x", (6, 20), "input")
    s.tensor("b", (5,), "input")
    y = s.add("y", ("x", reshape(2, 3, 4, 5)), ("b", expand(2, 3, 4, 5)))
    graph = s.graph("domain", y)
    after = canonical_domains(graph)
    check(graph, after)
    s2 = Sketch()
    s2.tensor("x", (6, 20), "input")
    s2.tensor("b", (20,), "input")
    h = s2.add("h", ("x", reshape(2, 3, 20)), ("b", expand(2, 3, 20)))
    out = s2.op("softmax", [(h, reshape(6, 20))], {"out": (6, 20)})[0]
    graph = s2.graph("domain", out)
    after = canonical_domains(canonical_shapes(graph))
    check(graph, after)
    assert after.tensors["h"].shape == (6, 20)
    assert [o.view.describe() for o in after.producer["h"].operands] == ["whole", "expand[6,20]", "whole"]


# ---- views and expressions ------------------------------------------------------------------------------------------

SHAPES = [(2, 3, 5), (6, 5), (30,), (5, 6), (3, 1, 10), (2, 15), (1, 30), (5, 2, 3), (10, 3)]


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...], most: int = 4) -> View:
    view = View()
    for _ in range(draw(st.integers(0, most))):
        now = view.shape(shape)
        total = int(np.prod(now))
        kind = draw(st.sampled_from(["reshape", "permute", "expand", "slice"]))
        if kind == "reshape":
            cut = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
            low = draw(st.sampled_from([d for d in range(1, cut + 1) if cut % d == 0]))
            view = view.then(reshape(total // cut, low, cut // low))
        elif kind == "permute":
            view = view.then(permute(*draw(st.permutations(range(len(now))))))
        elif kind == "expand" and total <= 60:
            view = view.then(expand(*(draw(st.sampled_from([1, 2])) if n == 1 else n for n in now)))
        elif kind == "slice" and total > 1:
            axis = draw(st.sampled_from([i for i, n in enumerate(now) if n > 1]))
            start = draw(st.integers(0, now[axis] - 1))
            stop = draw(st.integers(start + 1, now[axis]))
            view = view.then(("slice", (axis, start, stop, draw(st.integers(1, 2)))))
    return view


@given(st.data())
def test_normal_views_show_the_same_and_are_stable(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    view = data.draw(steps(shape, 6))
    x = np.arange(np.prod(shape)).reshape(shape)
    short = normal(view, shape)
    np.testing.assert_array_equal(short.array(x), view.array(x))
    assert len(short.steps) <= len(view.steps)
    assert normal(short, shape) == short


UNARY = ["neg", "abs", "float", "int", "bool", "not", "tanh", "exp"]
BINARY = ["add", "sub", "mul", "max", "min", "eq", "lt", "and", "or", "div", "pow"]


@st.composite
def programs(draw: st.DrawFn, inputs: int) -> Expr:
    code: list[tuple[Any, ...]] = []
    constants = st.sampled_from([0, 1, 2, -1, 0.0, 1.0, 2.0, 0.5, -1.0, True, False])

    def ref() -> tuple[str, Any]:
        options = [st.tuples(st.just("c"), constants)]
        if inputs:
            options.append(st.tuples(st.just("x"), st.integers(0, inputs - 1)))
        if code:
            options.append(st.tuples(st.just("t"), st.integers(0, len(code) - 1)))
        return draw(st.one_of(options))

    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from([*UNARY, *BINARY, "where"]))
        arity = 1 if name in UNARY else 3 if name == "where" else 2
        refs = [ref() for _ in range(arity)]
        if name == "pow":
            refs = [refs[0], ("c", draw(st.sampled_from([2, 3, 1, 2.0, 3.0])))]
        code.append((name, *refs))
    return Expr(tuple(code), (ref(), ref()))


@given(programs(3))
def test_tidy_programs_give_the_same(expr: Expr) -> None:
    rng = np.random.default_rng(3)
    inputs = [rng.normal(size=9), rng.integers(-3, 4, size=9), rng.random(9) < 0.5]
    short = tidy(expr, ["float", "int", "bool"])
    assert len(short.code) <= len(expr.code) + sum(i[0] == "pow" for i in expr.code) * 2
    builder = Builder(["float", "int", "bool"])
    refs = builder.inline(expr, [("x", 0), ("x", 1), ("x", 2)])
    for got, expected, ref in zip(evaluate_expr(short, inputs), evaluate_expr(expr, inputs), refs, strict=True):
        assert got.dtype.kind == expected.dtype.kind
        assert {"float": "f", "int": "i", "bool": "b"}[builder.kind(ref)] == expected.dtype.kind
        np.testing.assert_allclose(np.broadcast_to(got, (9,)), np.broadcast_to(expected, (9,)), rtol=1e-13, atol=1e-13)
    assert tidy(short, ["float", "int", "bool"]) == short


# ---- random graphs --------------------------------------------------------------------------------------------------


@st.composite
def random_graphs(draw: st.DrawFn) -> TrainingGraph:
    """Views, pointwise ops of several dtypes, row ops and in-place updates in random order."""
    s = Sketch()
    s.tensor("x0", draw(st.sampled_from(SHAPES)), "input")
    s.tensor("x1", draw(st.sampled_from(SHAPES)), "parameter")
    s.tensor("c0", (), "constant", value=draw(st.sampled_from([1.0, 0.5])))
    s.tensor("c1", (5,), "constant", value=[0.0, 1.0, 2.0, 3.0, 4.0])
    names = ["x0", "x1", "c1"]
    for at in range(draw(st.integers(1, 9))):
        if at == 5:
            s.phase = "backward"
        source = draw(st.sampled_from(names))
        anything = ["view", "unary", "binary", "binary", "wide"]
        numbers = ["rows", "product"] if s.tensors[source].dtype == "float32" else []
        what = draw(st.sampled_from(anything + numbers))
        view = draw(steps(s.tensors[source].shape, 2))
        seen_as = (source, *view.steps)
        shape, name = s.shape(seen_as), f"n{at}"
        if what == "view":
            s.view(seen_as, name)
        elif what == "unary":
            code = draw(st.sampled_from([[("tanh", ("x", 0))], [("mul", ("x", 0), ("c", 0.5))], [("neg", ("x", 0))]]))
            s.pointwise(name, code, seen_as)
        elif what == "binary":
            same = [n for n in names if s.tensors[n].size_elems == int(np.prod(shape))]
            other = (draw(st.sampled_from(same)), reshape(*shape)) if same else ("c0", expand(*shape))
            code = draw(st.sampled_from(["add", "mul", "lt", "max"]))
            s.pointwise(name, [(code, ("x", 0), ("x", 1))], seen_as, other, dtype="bool" if code == "lt" else "float32")
        elif what == "wide":
            s.add(name, (source, *view.steps, reshape(1, *shape), expand(2, *shape)), ("c0", expand(2, *shape)))
        elif what == "rows" and shape:
            rows = (int(np.prod(shape[:-1])), shape[-1])
            s.op("softmax", [(*seen_as, reshape(*rows))], {name: rows})
        else:
            flat = (1, int(np.prod(shape)), 1)
            a, b = (*seen_as, reshape(*flat)), ("c0", reshape(1, 1, 1))
            s.op("contraction", [a, b], {name: flat}, alpha=0.5)
        if name in s.tensors and s.tensors[name].size_elems <= 200:
            names.append(name)
    made = [n for n in names if n.startswith("n")]
    if not made:
        made = [s.add("n", "x0", "x0")]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    same = [n for n in made if s.tensors[n].size_elems == s.tensors["x1"].size_elems]
    if same:
        s.phase = "update"
        s.sgd("x1", (draw(st.sampled_from(same)), reshape(*s.tensors["x1"].shape)))
    return s.graph("random", *outputs)


@given(random_graphs())
def test_random_graphs(graph: TrainingGraph) -> None:
    check_all(graph)


# ---- captured models ------------------------------------------------------------------------------------------------


def bert() -> tuple[Any, dict[str, Any]]:
    import torch

    from tests import small_models

    batch = {
        "input_ids": torch.zeros((3, 13), dtype=torch.long),
        "attention_mask": torch.ones((3, 13), dtype=torch.long),
        "labels": torch.zeros(3, dtype=torch.long),
    }
    return small_models.bert(), batch


def vit() -> tuple[Any, dict[str, Any]]:
    import torch

    from tests import small_models

    batch = {"pixel_values": torch.zeros(3, 1, 8, 8), "labels": torch.zeros(3, dtype=torch.long)}
    return small_models.vit(), batch


@pytest.mark.peer
@pytest.mark.parametrize("model", [bert, vit])
@pytest.mark.parametrize("trained", [False, True])
def test_captured_models(model: Callable[[], tuple[Any, dict[str, Any]]], trained: bool) -> None:
    from layoutopt.capture import capture
    from layoutopt.optimizers import AdamW

    module, batch = model()
    graph = capture(module, batch, optimizer=AdamW() if trained else None)
    after = check_all(graph)
    width = {t.shape for t in after.by_role("activation") if t.size_elems % 60 == 0 and "native_layer_norm" in t.name}
    assert all(len(shape) == 2 for shape in width), width
    assert kinds(after).count("pointwise") < kinds(graph).count("pointwise")
