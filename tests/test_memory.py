"""The arena: no two live buffers share a byte, offsets aligned, close to the bound, budgets enforced by name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutopt.errors import InfeasibleError
from layoutopt.memory import Buffer, Placed, enforce_budget, find_overlap, live_bytes, pack


@st.composite
def some_buffers(draw: st.DrawFn) -> list[Buffer]:
    spans = draw(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 12), st.integers(0, 12)), max_size=14))
    return [Buffer(f"b{i}", size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(spans)]


@settings(max_examples=200, deadline=None)
@given(some_buffers(), st.sampled_from([1, 16, 128]))
def test_live_buffers_never_share_a_byte(buffers: list[Buffer], align: int) -> None:
    arena = pack(buffers, align)
    assert {p.buffer for p in arena.placed} == set(buffers)
    owner: dict[tuple[int, int], str] = {}
    for p in arena.placed:
        assert p.offset_bytes % align == 0
        assert p.end_bytes <= arena.size_bytes
        for step in range(p.buffer.first, p.buffer.last + 1):
            for byte in range(p.offset_bytes, p.end_bytes):
                assert owner.setdefault((step, byte), p.buffer.name) == p.buffer.name
    assert arena.bound_bytes <= arena.size_bytes
    assert find_overlap(arena.placed) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_find_overlap_sees_every_overlap(spans: list[tuple[int, int, int, int]]) -> None:
    placed = [Placed(Buffer(f"b{i}", n, min(a, b), max(a, b)), at) for i, (at, n, a, b) in enumerate(spans)]
    used: set[tuple[int, int]] = set()
    clash = False
    for p in placed:
        cells = {(s, b) for s in range(p.buffer.first, p.buffer.last + 1) for b in range(p.offset_bytes, p.end_bytes)}
        clash |= bool(used & cells)
        used |= cells
    assert (find_overlap(placed) is not None) == clash


def test_live_bytes_by_hand() -> None:
    buffers = [Buffer("a", 10, 0, 1), Buffer("b", 20, 1, 2), Buffer("c", 5, 2, 2)]
    assert live_bytes(buffers, 4) == [10, 30, 25, 0]
    assert live_bytes(buffers, 4, align=16) == [16, 48, 48, 0]


def test_a_chain_needs_two_buffers() -> None:
    chain = [Buffer(f"t{i}", 100, i, i + 1) for i in range(50)]
    arena = pack(chain, 1)
    assert arena.size_bytes == arena.bound_bytes == 200


def test_training_shape_is_close_to_its_bound() -> None:
    draw = random.Random(1)
    layers = 60
    saved = [Buffer(f"act{i}", draw.randint(1, 50) * 1000, i, 2 * layers - i) for i in range(layers)]
    short = [Buffer(f"tmp{i}", draw.randint(1, 90) * 1000, i, i + 1) for i in range(2 * layers)]
    arena = pack([*saved, *short], 128)
    assert arena.size_bytes <= 1.1 * arena.bound_bytes


def test_no_buffers() -> None:
    assert pack([], 128).size_bytes == 0


def test_budget_names_the_peak() -> None:
    arena = pack([Buffer("x#0", 1000, 0, 2), Buffer("y#0", 3000, 1, 1)], 128)
    enforce_budget(arena, None, {})
    enforce_budget(arena, arena.size_bytes, {})
    with pytest.raises(InfeasibleError, match=r"4096 bytes.*budget is 4095.*peaks at matmul") as caught:
        enforce_budget(arena, 4095, {0: "load", 1: "matmul", 2: "store"})
    assert {"matmul", "y#0", "x#0"} <= set(caught.value.conflict)
