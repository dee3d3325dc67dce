"""The interpreter: gradients against finite differences in float64, closed forms, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import evaluate, run
from layoutopt.errors import GraphError
from layoutopt.expr import ARITY, evaluate_expr
from layoutopt.graph import KINDS, Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.view import Step, View
from tests.numeric import numeric_gradient

RNG = np.random.default_rng(5)
M, K = 7, 5


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_softmax_gradients(kind: str) -> None:
    x, dy = RNG.normal(size=(M, K)) * 3, RNG.normal(size=(M, K))
    (y,) = evaluate(kind, {}, [x], [(M, K)])
    total = (y if kind == "softmax" else np.exp(y)).sum(axis=1)
    close(total, np.ones(M))
    (dx,) = evaluate(f"{kind}_grad", {}, [dy, y], [(M, K)])
    close(dx, numeric_gradient(lambda v: float((evaluate(kind, {}, [v], [(M, K)])[0] * dy).sum()), x))


def test_softmax_is_stable_for_large_values() -> None:
    (y,) = evaluate("softmax", {}, [np.array([[1e4, 1e4, -1e4]])], [(1, 3)])
    close(y, np.array([[0.5, 0.5, 0.0]]))
    loss, lse, _ = evaluate("cross_entropy", {}, [np.array([[1e4, 0.0]]), np.array([0])], [(), (1,), ()])
    close(np.array([loss, lse[0]]), np.array([0.0, 1e4]))


def test_layer_norm_gradients() -> None:
    x, gamma, beta, dy = (RNG.normal(size=s) for s in [(M, K), (K,), (K,), (M, K)])
    shapes = [(M, K), (M,), (M,)]

    def loss(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> float:
        return float((evaluate("layer_norm", {"eps": 1e-3}, [x, gamma, beta], shapes)[0] * dy).sum())

    y, mean, rstd = evaluate("layer_norm", {"eps": 1e-3}, [x, gamma, beta], shapes)
    close(mean, x.mean(axis=1))
    close(rstd, (x.var(axis=1) + 1e-3) ** -0.5)
    close(y, (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-3) * gamma + beta)
    (dx,) = evaluate("layer_norm_grad", {}, [dy, x, mean, rstd, gamma], [(M, K)])
    dgamma, dbeta = evaluate("layer_norm_affine", {}, [dy, x, mean, rstd], [(K,), (K,)])
    close(dx, numeric_gradient(lambda v: loss(v, gamma, beta), x))
    close(dgamma, numeric_gradient(lambda v: loss(x, v, beta), gamma))
    close(dbeta, numeric_gradient(lambda v: loss(x, gamma, v), beta))


def test_gather_and_scatter_add() -> None:
    table, dy = RNG.normal(size=(6, 3)), RNG.normal(size=(M, 3))
    ids = np.array([5, 0, 2, 2, 2, 1, 5], np.int32)
    close(evaluate("gather", {}, [table, ids], [(M, 3)])[0], table[ids])
    (grad,) = evaluate("scatter_add", {"padding_idx": -1}, [dy, ids], [(6, 3)])
    close(grad, numeric_gradient(lambda t: float((evaluate("gather", {}, [t, ids], [(M, 3)])[0] * dy).sum()), table))
    (padded,) = evaluate("scatter_add", {"padding_idx": 2}, [dy, ids], [(6, 3)])
    close(padded[2], np.zeros(3))
    close(np.delete(padded, 2, 0), np.delete(grad, 2, 0))


TARGET = np.array([1, -100, 4, 0, -100, 1, 3], np.int32)


def test_nll_loss_gradient_ignores() -> None:
    logp = RNG.normal(size=(M, K))
    loss, weight = evaluate("nll_loss", {"ignore_index": -100}, [logp, TARGET], [(), ()])
    kept = TARGET >= 0
    close(loss, -logp[kept, TARGET[kept]].mean())
    assert weight == kept.sum()
    (grad,) = evaluate("nll_loss_grad", {"ignore_index": -100}, [np.array(1.7), TARGET, weight], [(M, K)])
    close(grad, numeric_gradient(lambda v: 1.7 * float(evaluate("nll_loss", {}, [v, TARGET], [(), ()])[0]), logp))


def test_cross_entropy_gradient_and_its_two_step_form() -> None:
    logits, dloss = RNG.normal(size=(M, K)) * 2, np.array(0.6)
    loss, lse, weight = evaluate("cross_entropy", {}, [logits, TARGET], [(), (M,), ()])
    (logp,) = evaluate("log_softmax", {}, [logits], [(M, K)])
    close(loss, evaluate("nll_loss", {}, [logp, TARGET], [(), ()])[0])
    close(lse, np.log(np.exp(logits).sum(axis=1)))
    (grad,) = evaluate("cross_entropy_grad", {}, [dloss, logits, TARGET, lse, weight], [(M, K)])
    value = lambda v: float(dloss * evaluate("cross_entropy", {}, [v, TARGET], [(), (M,), ()])[0])  # noqa: E731
    close(grad, numeric_gradient(value, logits))
    (dlogp,) = evaluate("nll_loss_grad", {}, [dloss, TARGET, weight], [(M, K)])
    close(grad, evaluate("log_softmax_grad", {}, [dlogp, logp], [(M, K)])[0])


def test_nothing_counted_gives_nan_loss_and_zero_gradient() -> None:
    ignored = np.full(M, -100, np.int32)
    loss, lse, weight = evaluate("cross_entropy", {}, [np.ones((M, K)), ignored], [(), (M,), ()])
    assert np.isnan(loss)
    assert weight == 0
    (grad,) = evaluate("cross_entropy_grad", {}, [np.array(1.0), np.ones((M, K)), ignored, lse, weight], [(M, K)])
    assert not grad.any()
    assert not evaluate("nll_loss_grad", {}, [np.array(1.0), ignored, weight], [(M, K)])[0].any()


def test_contraction_and_its_gradients() -> None:
    a, b, dc = RNG.normal(size=(2, 3, 5)), RNG.normal(size=(2, 5, 7)), RNG.normal(size=(2, 3, 7))
    f = lambda a, b: evaluate("contraction", {"alpha": 0.3}, [a, b], [(2, 3, 7)])[0]  # noqa: E731
    close(f(a, b), 0.3 * np.einsum("bmk,bkn->bmn", a, b))
    da = evaluate("contraction", {"alpha": 0.3}, [dc, b.transpose(0, 2, 1)], [(2, 3, 5)])[0]
    close(da, numeric_gradient(lambda v: float((f(v, b) * dc).sum()), a))


@pytest.mark.parametrize("fn", ["sum", "mean", "max"])
def test_reduce(fn: str) -> None:
    x = RNG.normal(size=(M, K))
    close(evaluate("reduce", {"fn": fn}, [x], [(M,)])[0], getattr(np, fn)(x, axis=1))


def test_concat_fills_gaps_with_zero_and_iota_counts() -> None:
    a, b = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 1, 4))
    (y,) = evaluate("concat", {"starts": (1, 5)}, [a, b], [(2, 7, 4)])
    close(y[:, 1:4], a)
    close(y[:, 5:6], b)
    assert not y[:, [0, 4, 6]].any()
    assert evaluate("iota", {"start": 3, "step": 2}, [], [(4,)])[0].tolist() == [3, 5, 7, 9]


def test_every_kind_has_a_rule() -> None:
    for kind in KINDS:
        with pytest.raises(GraphError) as caught:
            evaluate(kind, {"starts": (), "fn": "none", "expr": Expr((), ())}, [np.zeros((1,) * 9)] * 9, [(1, 2)])
        assert "unknown kind" not in str(caught.value)


def test_expression_operations() -> None:
    x, n, flag = np.array([0.5, 2.0, 3.25]), np.array([3, -2, 0]), np.array([True, False, True])
    values = {"x": x, "n": n, "b": flag}
    cases = {
        ("rsqrt", "x"): x**-0.5,
        ("recip", "x"): 1 / x,
        ("tanh", "x"): np.tanh(x),
        ("div", "n", "x"): n / x,
        ("add", "n", "n"): n + n,
        ("add", "b", "b"): np.array([2.0, 0.0, 2.0]),
        ("not", "b"): ~flag,
        ("bool", "n"): np.array([True, True, False]),
        ("int", "x"): np.array([0, 2, 3]),
        ("where", "b", "x", "n"): np.where(flag, x, n),
        ("ge", "x", "n"): x >= n,
        ("max", "x", "n"): np.maximum(x, n),
    }
    for (name, *args), expected in cases.items():
        code = ((name, *(("x", i) for i in range(len(args)))),)
        (got,) = evaluate_expr(Expr(code, (("t", 0),)), [values[a] for a in args])
        np.testing.assert_allclose(got, expected, rtol=1e-15)
        assert got.dtype.kind == expected.dtype.kind
        assert ARITY[name] == len(args)
    (erf,) = evaluate_expr(Expr((("erf", ("c", 0.5)),), (("t", 0),)), [])
    close(erf, np.array(0.5204998778130465))


def test_float32_stays_float32() -> None:
    code = (("mul", ("x", 0), ("c", 0.1)), ("where", ("c", True), ("t", 0), ("c", 1)))
    expr = Expr(code, (("t", 1),))
    x = np.ones((2, 3), np.float32)
    assert evaluate("pointwise", {"expr": expr}, [x], [(2, 3)], np.float32)[0].dtype == np.float32
    a = np.ones((1, 2, 3))
    assert (
        evaluate("contraction", {"alpha": 0.5}, [a, a.transpose(0, 2, 1)], [(1, 2, 2)], np.float32)[0].dtype
        == np.float32
    )


def tiny() -> TrainingGraph:
    """``y`` is stored 2×6 but written by a contraction as 1×3×4 seen through a view: the interpreter must undo it."""
    split = View((Step("reshape", (4, 3)), Step("permute", (1, 0)), Step("reshape", (1, 3, 4))))
    tensors = [
        Tensor("a", (3, 5), role="input"),
        Tensor("w", (4, 5), role="parameter"),
        Tensor("half", (), role="constant"),
        Tensor("y", (2, 6)),
        Tensor("w2", (4, 5), role="output"),
    ]
    a = Operand("a", View((Step("reshape", (1, 3, 5)),)))
    w = Operand("w", View((Step("permute", (1, 0)), Step("reshape", (1, 5, 4)))))
    half = Operand("half", View((Step("expand", (4, 5)),)))
    expr = Expr((("mul", ("x", 0), ("x", 1)),), (("t", 0),))
    ops = [
        Op("mm", "contraction", (a, w), (Operand("y", split),)),
        Op("step", "pointwise", (Operand("w"), half), (Operand("w2"),), {"expr": expr}, "update", inplace=((0, 0),)),
    ]
    return TrainingGraph("tiny", {t.name: t for t in tensors}, ops, ("y",), {"half": 0.5})


def test_run_applies_views_on_both_sides() -> None:
    a, w = RNG.normal(size=(3, 5)), RNG.normal(size=(4, 5))
    values = run(tiny(), {"a": a, "w": w})
    close(values["y"].reshape(4, 3).T, a @ w.T)
    close(values["w2"], w / 2)
    close(values["w"], w)


def test_run_names_what_is_wrong() -> None:
    a, w = np.zeros((3, 5)), np.zeros((4, 5))
    with pytest.raises(GraphError, match="no value for input 'a'"):
        run(tiny(), {"w": w})
    with pytest.raises(GraphError, match=r"'w' has shape \(5, 4\), expected \(4, 5\)"):
        run(tiny(), {"a": a, "w": w.T})


@pytest.mark.parametrize(
    ("kind", "attrs", "inputs", "shapes", "message"),
    [
        ("contraction", {}, [np.zeros((1, 2, 3)), np.zeros((1, 4, 2))], [(1, 2, 2)], "k has lengths"),
        ("contraction", {}, [np.zeros((2, 3)), np.zeros((3, 2))], [(2, 2)], r"expected a\[b,m,k\]"),
        ("gather", {}, [np.zeros((2, 3)), np.array([0, 2])], [(2, 3)], r"expected within 0\.\.1"),
        ("cross_entropy", {}, [np.zeros((2, 3)), np.array([0, 3])], [(), (2,), ()], "targets reach"),
        ("pointwise", {"expr": Expr((), (("x", 0),))}, [np.zeros((2, 1))], [(2, 3)], "must be equal"),
        ("pointwise", {"expr": Expr((), (("x", 3),))}, [np.zeros(2)], [(2,)], "out of range"),
        ("pointwise", {"expr": Expr((("tan", ("x", 0)),), (("t", 0),))}, [np.zeros(2)], [(2,)], "known operations"),
        ("concat", {"starts": (5,)}, [np.zeros((1, 3, 1))], [(1, 7, 1)], "does not fit"),
        ("softmax", {}, [np.zeros((2, 3))], [(3, 2)], r"shape \(2, 3\), expected \(3, 2\)"),
    ],
)
def test_evaluate_refuses(kind: str, attrs: dict, inputs: list, shapes: list, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        evaluate(kind, attrs, inputs, shapes)
