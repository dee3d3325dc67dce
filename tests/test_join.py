"""Two graphs joined: what the whole computes, which names it has, and what does not fit together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from kernels.reference import run
from layoutopt.capture_build import Context, GraphBuilder
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.join import as_soon, join
from layoutopt.microbatch import AXES
from layoutopt.passes import run_passes

RNG = np.random.default_rng(3)


def linear(name: str, rows: int, k: int, n: int, out: str) -> TrainingGraph:
    """``out = x @ w * 0.5 + y``, and ``x @ w`` as "raw"."""
    from layoutopt.capture_build import Prog

    b = GraphBuilder(context=Context("mm"))
    x, w = b.tensor("x", (rows, k), "float32", "input"), b.tensor("w", (k, n), "float32", "parameter", init="ones")
    y = b.tensor("y", (n,), "float32", "input")
    raw = b.contract(
        b.operand(x, ("reshape", (1, rows, k))), b.operand(w, ("reshape", (1, k, n))), (rows, n), (1, rows, n)
    )
    p = Prog()
    total = p("add", p("mul", ("x", 0), ("c", 0.5)), ("x", 1))
    b.context = Context("add")
    b.name(b.pointwise(p, total, [raw, y], (rows, n), "float32"), out, "output")
    b.name(raw, "raw", "output")
    b.finish()
    meta = {"batch": {"x": {"shape": [rows, k], "dtype": "float32"}}, AXES: {"x": 0}}
    return TrainingGraph(name, b.tensors, b.ops, (out, "raw"), b.constants, meta)


def values(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=shape) for name, shape in shapes}


def expected(v: Mapping[str, np.ndarray]) -> np.ndarray:
    first = v["x"] @ v["w"] * 0.5 + v["y"]
    return first @ v["side.w"] * 0.5 + v["side.y"]


def test_the_second_runs_on_what_the_first_gives() -> None:
    first, second = linear("one", 3, 4, 5, "out"), linear("two", 3, 5, 2, "out")
    whole = join(first, second, {"x": "out"}, prefix="side.", outputs=["side.out"])
    given = values(("x", (3, 4)), ("w", (4, 5)), ("y", (5,)), ("side.w", (5, 2)), ("side.y", (2,)))
    for graph in (whole, run_passes(whole)[0]):
        assert graph.outputs == ("side.out",)
        assert {t.name for t in graph.by_role("input")} == {"x", "y", "side.y"}
        assert {t.name for t in graph.by_role("parameter")} == {"w", "side.w"}
        np.testing.assert_allclose(run(graph, given)["side.out"], expected(given), rtol=1e-6)
    assert whole.name == "one+two"
    assert whole.meta["joined"] == ["one", "two"]
    assert set(whole.meta["batch"]) == {"x"}
    # Nobody reads them from outside: they may die.
    assert whole.tensors["out"].role == "activation"


def test_outputs_of_both_may_be_kept_and_inputs_shared() -> None:
    first, second = linear("one", 3, 4, 5, "out"), linear("two", 3, 4, 5, "other")
    whole = join(first, second, {"x": "x", "y": "y"}, prefix="b.", outputs=["b.other", "out"])
    given = values(("x", (3, 4)), ("w", (4, 5)), ("y", (5,))) | {"b.w": RNG.normal(size=(4, 5))}
    got = run(whole, given)
    np.testing.assert_allclose(got["out"], given["x"] @ given["w"] * 0.5 + given["y"], rtol=1e-6)
    np.testing.assert_allclose(got["b.other"], given["x"] @ given["b.w"] * 0.5 + given["y"], rtol=1e-6)
    assert whole.tensors["out"].role == "output"
    assert {t.name for t in whole.by_role("input")} == {"x", "y"}


def test_outputs_of_the_second_are_kept_by_default() -> None:
    whole = join(linear("one", 3, 4, 5, "out"), linear("two", 3, 5, 2, "out"), {"x": "out"}, prefix="b:", name="both")
    assert (whole.name, whole.outputs) == ("both", ("b:out", "b:raw"))


@pytest.mark.parametrize(
    ("wires", "prefix", "words"),
    [
        ({"z": "out"}, "b.", "has no input 'z': its inputs are x, y"),
        ({"w": "out"}, "b.", "has no input 'w'"),
        ({"x": "none"}, "b.", "has no tensor 'none' to be 'x'"),
        ({"x": "w"}, "b.", r"'w' of 'one' is float32 \[4, 5\]; as 'x' graph 'two' expects float32 \[3, 5\]"),
        ({"x": "out"}, "", r"both have .* join with a prefix"),
    ],
)
def test_what_does_not_fit_is_refused(wires: dict[str, str], prefix: str, words: str) -> None:
    with pytest.raises(GraphError, match=words) as caught:
        join(linear("one", 3, 4, 5, "out"), linear("two", 3, 5, 2, "out"), wires, prefix=prefix)
    assert "\n" not in str(caught.value)


def chain(length: int) -> TrainingGraph:
    """``s_i = x_i @ w`` down a chain, a row of each kept at the end, and something that the chain does not need."""
    b = GraphBuilder()
    x = b.tensor("x", (6, 6), "float32", "input")
    kept = []
    for i in range(length):
        b.context = Context(f"mm{i}")
        w = b.tensor(f"w{i}", (6, 6), "float32", "parameter", init="ones")
        three = [("reshape", (1, 6, 6))]
        x = b.contract(b.operand(x, *three), b.operand(w, *three), (6, 6), (1, 6, 6))
        kept.append(x)
    for i, value in enumerate(kept):
        b.context = Context(f"keep{i}")
        b.name(b.reduce("sum", value, [0]), f"kept{i}", "output")
    b.finish()
    return TrainingGraph("chain", b.tensors, b.ops, tuple(f"kept{i}" for i in range(length)))


def test_what_the_trunk_does_not_need_runs_as_soon_as_it_can() -> None:
    from layoutopt.rewrite_updates import peak_bytes

    graph = chain(5)
    soon = as_soon(graph, "kept4")
    assert [op.kind for op in soon.ops] == ["contraction", "reduce"] * 5
    assert sorted(op.name for op in soon.ops) == sorted(op.name for op in graph.ops)
    assert soon.outputs == graph.outputs
    given = values(("x", (6, 6)), *((f"w{i}", (6, 6)) for i in range(5)))
    a, b = run(graph, given), run(soon, given)
    for name in graph.outputs:
        np.testing.assert_array_equal(a[name], b[name])
    assert peak_bytes(soon) < peak_bytes(graph)
    assert as_soon(soon, "kept4") is soon
