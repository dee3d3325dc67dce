"""Counted work against closed forms."""

from __future__ import annotations

import pytest

from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.models import shipped, shipped_facts, shipped_names
from layoutopt.view import Step, View
from layoutopt.workload import facts, op_bytes, op_flops


def one(kind: str, shapes: list[tuple[int, ...]], attrs: dict | None = None) -> tuple[TrainingGraph, Op]:
    """A graph of one op; the last shape is the output's."""
    names = [f"t{i}" for i in range(len(shapes))]
    tensors = {n: Tensor(n, s, role="input") for n, s in zip(names[:-1], shapes, strict=False)}
    tensors[names[-1]] = Tensor(names[-1], shapes[-1])
    op = Op("op", kind, tuple(map(Operand, names[:-1])), (Operand(names[-1]),), attrs or {})
    return TrainingGraph("one", tensors, [op], (names[-1],)), op


@pytest.mark.parametrize(
    ("kind", "shapes", "flops"),
    [
        ("contraction", [(2, 3, 5), (2, 5, 7), (2, 3, 7)], 2 * 2 * 3 * 5 * 7),
        ("conv", [(2, 4, 9, 9), (6, 2, 3, 3), (2, 6, 7, 7)], 2 * (2 * 6 * 7 * 7) * (2 * 9)),
        ("conv_grad_input", [(2, 6, 7, 7), (6, 2, 3, 3), (2, 4, 9, 9)], 2 * (2 * 6 * 7 * 7) * (2 * 9)),
        ("conv_grad_weight", [(2, 6, 7, 7), (2, 4, 9, 9), (6, 2, 3, 3)], 2 * (2 * 6 * 7 * 7) * (2 * 9)),
        ("reduce", [(11, 13), (11,)], 143),
        ("concat", [(2, 3, 5), (2, 7, 5)], 0),
    ],
)
def test_flops(kind: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    graph, op = one(kind, shapes)
    assert op_flops(graph, op) == flops


def test_bytes_count_what_is_stored_once() -> None:
    tensors = {"row": Tensor("row", (5,), role="input"), "mask": Tensor("mask", (3, 5), "bool", role="input")}
    tensors["y"] = Tensor("y", (3, 5))
    spread = View((Step("reshape", (1, 5)), Step("expand", (3, 5))))
    expr = Expr((("where", ("x", 1), ("x", 0), ("c", 0.0)), ("exp", ("t", 0))), (("t", 1),))
    op = Op("op", "pointwise", (Operand("row", spread), Operand("mask")), (Operand("y"),), {"expr": expr})
    graph = TrainingGraph("g", tensors, [op], ("y",))
    assert op_bytes(graph, op) == 5 * 4 + 15 + 15 * 4
    assert op_flops(graph, op) == 30


def test_a_language_model_takes_six_per_parameter_and_token() -> None:
    """The rule of Kaplan et al. 2020, 6·N·tokens, plus attention's own products: what the count must come out near."""
    known = shipped_facts()["llama-3.2-1b"]
    rule = 6 * known["parameters"] * 512
    attention = 16 * 3 * 2 * 2 * 512 * 512 * 2048
    assert rule < known["flops"] < 1.03 * (rule + attention)


def test_shipped_facts_are_the_graphs_own() -> None:
    found = shipped_facts()
    assert set(found) == set(shipped_names())
    for name in ("vit-digits", "minilm", "gpt2"):
        assert {k: found[name][k] for k in facts(shipped(name))} == facts(shipped(name))
