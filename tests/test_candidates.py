"""Candidates: row-major first, only layouts of the storage, padding bounded, panels as the kernels want."""

from __future__ import annotations

from math import prod

import pytest

from layoutopt.candidates import (
    Rules,
    candidates,
    filter_proposals,
    fixed_storages,
    image_proposals,
    proposals,
    rules_for,
)
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from layoutopt.view import View
from tests import graphs

RULES = {"cpu": rules_for("cpu", 16), "gpu": rules_for("gpu", 32)}
LOOSE = Rules((4,), ((4, 4), (2, 4)), small_elems=1, cap=9)


def linear_step(*sizes: int) -> TrainingGraph:
    return run_passes(graphs.linear_step(*sizes))[0]


@pytest.fixture(params=["linear", "attention"], scope="module")
def graph(request: pytest.FixtureRequest) -> TrainingGraph:
    return (
        linear_step(24, 8, 48, 64) if request.param == "linear" else run_passes(graphs.attention_step(4, 32, 4, 16))[0]
    )


@pytest.mark.parametrize("kind", RULES)
def test_every_storage_has_row_major_first_and_no_doubles(graph: TrainingGraph, kind: str) -> None:
    found = candidates(graph, RULES[kind])
    assert set(found) == set(graph.storages)
    for name, layouts in found.items():
        storage = graph.storages[name]
        assert layouts[0] == Layout.row_major(storage.shape)
        assert len(set(layouts)) == len(layouts) <= RULES[kind].cap
        assert all(x.shape == storage.shape and x.is_injective() for x in layouts)
        if storage.dtype != "float32" or len(storage.shape) < 2 or prod(storage.shape) < RULES[kind].small_elems:
            assert len(layouts) == 1


@pytest.mark.parametrize("kind", RULES)
def test_what_contractions_touch_has_a_choice(graph: TrainingGraph, kind: str) -> None:
    found = candidates(graph, RULES[kind])
    touched = {graph.storage_of[o.tensor] for op in graph.ops if op.kind == "contraction" for o in op.operands}
    large = [name for name in touched if prod(graph.storages[name].shape) >= RULES[kind].small_elems]
    assert large
    assert all(len(found[name]) > 2 for name in large)


def test_padding_is_bounded() -> None:
    graph = linear_step(33, 1, 65, 129)
    for layouts in candidates(graph, Rules((16,), ((16, 16),), small_elems=1)).values():
        assert all(x.size_elems <= 1.5 * prod(x.shape) for x in layouts if prod(x.shape) >= 16)


def test_panels_are_contiguous_columns_and_rows() -> None:
    columns, rows = proposals((32, 48), Rules((16,), ()))[:2]
    assert columns == Layout.of((32, 48), [(1, 3), (0, 32), (1, 16)])
    assert rows == Layout.of((32, 48), [(0, 2), (1, 48), (0, 16)])


def test_batches_stay_outside() -> None:
    for layout in proposals((5, 32, 48), RULES["cpu"]):
        outermost = layout.axis_modes(0)[0]
        assert (outermost.extent, outermost.stride * 5) == (5, layout.size_elems)


def test_vectors_have_no_proposals() -> None:
    assert proposals((7,), LOOSE) == proposals((7, 1), LOOSE) == proposals((), LOOSE) == ()


@pytest.mark.parametrize("kind", RULES)
def test_convolutions_offer_channels_last_and_blocks(kind: str) -> None:
    """For images seen as they are or through a view, for weights, and for both gradients."""
    x, w, y = (2, 32, 6, 8), (48, 32, 3, 3), (2, 48, 6, 8)
    attrs = {"padding": (1, 1)}
    image = View().then(("reshape", x))
    graph = TrainingGraph(
        "conv",
        {
            "x": Tensor("x", (2, 32, 48)),
            "start": Tensor("start", (2, 32, 48), role="input"),
            "w": Tensor("w", w, role="parameter"),
            "y": Tensor("y", y),
            "dx": Tensor("dx", x),
            "dw": Tensor("dw", w, role="gradient"),
        },
        [
            Op("x", "pointwise", (Operand("start"),), (Operand("x"),), {"expr": Expr((), (("x", 0),))}),
            Op("y", "conv", (Operand("x", image), Operand("w")), (Operand("y"),), attrs),
            Op("dx", "conv_grad_input", (Operand("y"), Operand("w")), (Operand("dx"),), attrs),
            Op("dw", "conv_grad_weight", (Operand("y"), Operand("x", image)), (Operand("dw"),), attrs),
        ],
        (),
    )
    found = candidates(graph, RULES[kind])
    for name, shape in (("y", y), ("dx", x)):
        assert set(found[name]) == {Layout.row_major(shape), *image_proposals(shape, RULES[kind])}
        assert found[name][1] == Layout.row_major(shape, (0, 2, 3, 1))
        assert any(layout.run(1) == RULES[kind].panels[0] for layout in found[name])
    for name in ("w", "dw"):
        assert set(found[name]) == {Layout.row_major(w), *filter_proposals(w, RULES[kind])}
        assert {Layout.row_major(w, (2, 3, 1, 0)), Layout.row_major(w, (0, 2, 3, 1))} <= set(found[name])
    channels_last = Layout.row_major((2, 32, 48), (0, 2, 1))
    assert channels_last in found["x"]


def test_what_the_host_touches_is_fixed() -> None:
    graph = linear_step()
    fixed = fixed_storages(graph)
    assert {t.name for t in graph.by_role("input", "constant")} <= fixed
    assert {graph.storage_of[out] for out in graph.outputs} <= fixed
    assert not {graph.storage_of[t.name] for t in graph.by_role("parameter", "state")} & fixed


def test_optimizer_state_follows_its_parameter() -> None:
    shape = (64, 48)
    roles = {
        "x": "input",
        "w": "parameter",
        "m": "state",
        "g": "gradient",
        "w.new": "activation",
        "m.new": "activation",
    }
    add = Expr((("add", ("x", 1), ("x", 2)), ("sub", ("x", 0), ("t", 0))), (("t", 1), ("t", 0)))
    one = View().then(("reshape", (1, *shape)))
    square = View().then(("reshape", (1, 64, 64)))
    graph = TrainingGraph(
        "update",
        {n: Tensor(n, (64, 64) if n == "x" else shape, role=role) for n, role in roles.items()},  # type: ignore[arg-type]
        [
            Op("g", "contraction", (Operand("x", square), Operand("w", one)), (Operand("g", one),)),
            Op(
                "update",
                "pointwise",
                (Operand("w"), Operand("g"), Operand("m")),
                (Operand("w.new"), Operand("m.new")),
                {"expr": add},
                "update",
                inplace=((0, 0), (1, 2)),
            ),
        ],
        (),
    )
    found = candidates(graph, RULES["cpu"])
    assert len(found["m"]) > 3
    assert set(found["m"]) == set(found["w"]) == set(found["g"])
