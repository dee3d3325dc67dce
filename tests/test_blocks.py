"""Repeated blocks: found where they are, not found where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from layoutopt.blocks import Block, describe_blocks, find_blocks, spec_ids
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.models import shipped

EXPRS = {
    letter: Expr(((name, ("x", 0)),), (("t", 0),))
    for letter, name in zip("abcdef", ["exp", "log", "tanh", "erf", "abs", "neg"], strict=True)
}


def chain(word: str) -> TrainingGraph:
    """An op per letter, each reading the one before; equal letters are alike."""
    tensors = {"t0": Tensor("t0", (4, 3), role="input")}
    ops = []
    for i, letter in enumerate(word):
        tensors[f"t{i + 1}"] = Tensor(f"t{i + 1}", (4, 3))
        ops.append(Op(f"op{i}", "pointwise", (Operand(f"t{i}"),), (Operand(f"t{i + 1}"),), {"expr": EXPRS[letter]}))
    return TrainingGraph("chain", tensors, ops, (f"t{len(word)}",))


@pytest.mark.parametrize(
    ("word", "blocks"),
    [
        ("fabcabcabce", [Block(1, 3, 3)]),
        ("abcdef", []),
        ("aab", []),
        ("aaaaab", [Block(0, 1, 5)]),
        ("abababcdcdcdcde", [Block(0, 2, 3), Block(6, 2, 4)]),
        ("abcabcab", [Block(0, 3, 2)]),
        ("aabaabaab", [Block(0, 3, 3)]),
    ],
)
def test_repetitions(word: str, blocks: list[Block]) -> None:
    assert list(find_blocks(chain(word))) == blocks


def test_every_repetition_is_one_and_none_overlap() -> None:
    word = "".join(np.random.default_rng(3).choice(list("ab"), 200))
    graph = chain(word)
    end = 0
    for b in find_blocks(graph):
        assert b.start >= end
        end = b.stop
        first = word[b.start : b.start + b.length]
        assert word[b.start : b.stop] == first * b.repeats
        assert b.repeats >= 2


def test_shapes_and_phases_count() -> None:
    graph = chain("abab")
    assert len(set(spec_ids(graph).tolist())) == 2
    tensors = {**graph.tensors, "t2": Tensor("t2", (3, 4))}
    ops = [*graph.ops]
    assert len(set(spec_ids(TrainingGraph("c", tensors, ops, ("t4",))).tolist())) == 4


@pytest.mark.parametrize(("name", "layers"), [("bert-large", 24), ("llama-3.2-1b", 16)])
def test_layers_of_a_transformer(name: str, layers: int) -> None:
    graph = shipped(name)
    blocks = find_blocks(graph)
    largest = {
        p: max((b for b in blocks if graph.ops[b.start].phase == p), key=lambda b: b.stop - b.start)
        for p in ("forward", "backward", "update")
    }
    assert all(layers - 1 <= b.repeats <= layers for b in largest.values())
    assert sum(b.stop - b.start for b in blocks) > 0.9 * len(graph.ops)
    assert f"backward {largest['backward'].repeats} x {largest['backward'].length} ops" in describe_blocks(graph)
