"""Small training graphs built by hand, and random values to run any graph with."""

from __future__ import annotations

from typing import Any

import numpy as np

from layoutopt.graph import Expr, Op, Operand, Phase, Role, Tensor, TrainingGraph
from layoutopt.view import View

__all__ = ["Sketch", "attention_step", "linear_step", "random_values", "result_values"]


class Sketch:
    """A graph in the making; every method adds ops and returns tensor names.

    Tensors are written as a name, or as ``(name, step, step, …)`` where they are to be seen through a view.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.constants: dict[str, Any] = {}
        self.phase: Phase = "forward"

    def tensor(
        self, name: str, shape: tuple[int, ...], role: Role, dtype: str = "float32", value: Any = None, init: str = ""
    ) -> str:
        self.tensors[name] = Tensor(name, shape, dtype, role, init)
        if role == "constant":
            self.constants[name] = value
        return name

    def operand(self, what: Any) -> Operand:
        return Operand(what) if isinstance(what, str) else Operand(what[0], View().then(*what[1:]))

    def shape(self, what: Any) -> tuple[int, ...]:
        operand = self.operand(what)
        return operand.view.shape(self.tensors[operand.tensor].shape)

    def op(self, kind: str, inputs: list[Any], outputs: dict[str, tuple[int, ...]], **attrs: Any) -> list[str]:
        """Any op whose outputs are new float tensors seen as they are stored."""
        role: Role = "activation" if self.phase == "forward" else "gradient"
        for name, shape in outputs.items():
            self.tensor(name, shape, role)
        name = f"op{len(self.ops)}.{kind}"
        operands = tuple(self.operand(i) for i in inputs)
        self.ops.append(Op(name, kind, operands, tuple(Operand(o) for o in outputs), attrs, self.phase))
        return list(outputs)

    def view(self, what: Any, name: str) -> str:
        """A view op."""
        (out,) = self.op("view", [what], {name: self.shape(what)})
        self.tensors[name] = Tensor(name, self.shape(what), self.tensors[self.operand(what).tensor].dtype)
        return out

    def pointwise(self, name: str, code: list[tuple[Any, ...]], *inputs: Any, dtype: str = "float32") -> str:
        """The last instruction's value."""
        expr = Expr(tuple(code), (("t", len(code) - 1),))
        self.op("pointwise", list(inputs), {name: self.shape(inputs[0])}, expr=expr)
        self.tensors[name] = Tensor(name, self.shape(inputs[0]), dtype, self.tensors[name].role)
        return name

    def add(self, name: str, a: Any, b: Any) -> str:
        return self.pointwise(name, [("add", ("x", 0), ("x", 1))], a, b)

    def sgd(self, parameter: str, gradient: Any, lr: float = 0.1) -> str:
        """``parameter -= lr * gradient`` in place."""
        new = f"{parameter}.new"
        self.tensors[new] = Tensor(new, self.tensors[parameter].shape, role="output", of=parameter)
        expr = Expr((("mul", ("x", 1), ("c", lr)), ("sub", ("x", 0), ("t", 0))), (("t", 1),))
        inputs = (Operand(parameter), self.operand(gradient))
        self.ops.append(
            Op(f"{parameter}.update", "pointwise", inputs, (Operand(new),), {"expr": expr}, "update", "", ((0, 0),))
        )
        return new

    def graph(self, name: str, *outputs: str) -> TrainingGraph:
        return TrainingGraph(name, self.tensors, self.ops, outputs, self.constants)


def reshape(*shape: int) -> tuple[str, tuple[int, ...]]:
    return ("reshape", shape)


def permute(*order: int) -> tuple[str, tuple[int, ...]]:
    return ("permute", order)


def expand(*shape: int) -> tuple[str, tuple[int, ...]]:
    return ("expand", shape)


GELU = [
    ("mul", ("x", 0), ("c", 0.7071067811865476)),
    ("erf", ("t", 0)),
    ("add", ("t", 1), ("c", 1.0)),
    ("mul", ("x", 0), ("c", 0.5)),
    ("mul", ("t", 3), ("t", 2)),
]
GELU_GRAD = [
    *GELU[:3],
    ("mul", ("t", 2), ("c", 0.5)),
    ("mul", ("x", 0), ("x", 0)),
    ("mul", ("t", 4), ("c", -0.5)),
    ("exp", ("t", 5)),
    ("mul", ("t", 6), ("c", 0.3989422804014327)),
    ("mul", ("x", 0), ("t", 7)),
    ("add", ("t", 3), ("t", 8)),
    ("mul", ("x", 1), ("t", 9)),
]


def linear_step(batch: int = 3, seq: int = 5, width: int = 6, hidden: int = 7, classes: int = 4) -> TrainingGraph:
    """x → layer norm → linear, bias, gelu → linear, cross-entropy, backward and SGD, with views as torch makes them."""
    s, n = Sketch(), batch * seq
    s.tensor("x", (batch, seq, width), "input")
    s.tensor("labels", (batch, seq), "input", "int32")
    for name, shape in {
        "gamma": (width,),
        "beta": (width,),
        "w1": (hidden, width),
        "b1": (hidden,),
        "w2": (classes, hidden),
    }.items():
        s.tensor(name, shape, "parameter")
    s.tensor("one", (), "constant", value=1.0)
    rows = s.view(("x", reshape(n, width)), "x.rows")
    s.op("layer_norm", [rows, "gamma", "beta"], {"ln": (n, width), "ln.mean": (n,), "ln.rstd": (n,)}, eps=1e-5)
    ln = s.view(("ln", reshape(batch, seq, width)), "ln.tokens")
    w1t = s.view(("w1", permute(1, 0)), "w1.t")
    flat = s.view((ln, reshape(n, width)), "ln.flat")
    s.op("contraction", [(flat, reshape(1, n, width)), (w1t, reshape(1, width, hidden))], {"h.mm": (1, n, hidden)})
    tokens = s.view(("h.mm", reshape(batch, seq, hidden)), "h.tokens")
    bias = s.view(("b1", expand(batch, seq, hidden)), "b1.wide")
    h = s.add("h", tokens, bias)
    act = s.pointwise("act", GELU, h)
    s.op(
        "contraction",
        [(act, reshape(1, n, hidden)), ("w2", permute(1, 0), reshape(1, hidden, classes))],
        {"logits3": (1, n, classes)},
    )
    logits = s.view(("logits3", reshape(n, classes)), "logits")
    target = s.view(("labels", reshape(n)), "labels.flat")
    s.phase = "loss"
    s.op("log_softmax", [logits], {"logp": (n, classes)})
    s.op("nll_loss", ["logp", target], {"loss": (), "weight": ()}, ignore_index=-100)
    s.phase = "backward"
    s.op("nll_loss_grad", ["one", target, "weight"], {"dlogp": (n, classes)}, ignore_index=-100)
    s.op("log_softmax_grad", ["dlogp", "logp"], {"dlogits": (n, classes)})
    s.op(
        "contraction",
        [("dlogits", reshape(1, n, classes)), ("w2", reshape(1, classes, hidden))],
        {"dact": (1, n, hidden)},
    )
    s.op(
        "contraction",
        [("dlogits", permute(1, 0), reshape(1, classes, n)), (act, reshape(1, n, hidden))],
        {"dw2": (1, classes, hidden)},
    )
    dact = s.view(("dact", reshape(batch, seq, hidden)), "dact.tokens")
    dh = s.pointwise("dh", GELU_GRAD, h, dact)
    s.op("reduce", [(dh, reshape(n, hidden), permute(1, 0))], {"db1": (hidden,)}, fn="sum")
    s.op(
        "contraction",
        [(dh, reshape(n, hidden), permute(1, 0), reshape(1, hidden, n)), (flat, reshape(1, n, width))],
        {"dw1": (1, hidden, width)},
    )
    s.op("contraction", [(dh, reshape(1, n, hidden)), ("w1", reshape(1, hidden, width))], {"dln": (1, n, width)})
    dln = ("dln", reshape(n, width))
    s.op("layer_norm_affine", [dln, rows, "ln.mean", "ln.rstd"], {"dgamma": (width,), "dbeta": (width,)})
    s.op("layer_norm_grad", [dln, rows, "ln.mean", "ln.rstd", "gamma"], {"dx": (n, width)})
    for name, gradient in {
        "gamma": "dgamma",
        "beta": "dbeta",
        "w1": ("dw1", reshape(hidden, width)),
        "b1": "db1",
        "w2": ("dw2", reshape(classes, hidden)),
    }.items():
        s.sgd(name, gradient)
    return s.graph("linear step", "loss", "logits")


def attention_step(batch: int = 3, seq: int = 13, heads: int = 4, size: int = 5) -> TrainingGraph:
    """Masked self-attention of given q, k, v projections with a squared loss: heads split and merged by views."""
    s, width, n, bh = Sketch(), heads * size, batch * seq, batch * heads
    s.tensor("x", (batch, seq, width), "input")
    s.tensor("mask", (batch, seq), "input", "bool")
    for name in "qkv":
        s.tensor(f"w{name}", (width, width), "parameter")
    s.tensor("scale", (), "constant", value=size**-0.5)
    s.tensor("low", (), "constant", value=-1e4)
    s.tensor("zero", (), "constant", value=0.0)
    x = s.view(("x", reshape(n, width)), "x.rows")
    wide = s.view(("mask", reshape(batch, 1, 1, seq), expand(batch, 1, seq, seq)), "mask.wide")
    everywhere = (expand(batch, 1, seq, seq),)
    bias = s.pointwise(
        "bias", [("where", ("x", 0), ("x", 1), ("x", 2))], wide, ("zero", *everywhere), ("low", *everywhere)
    )
    split = {}
    for name in "qkv":
        weight = (f"w{name}", permute(1, 0), reshape(1, width, width))
        s.op("contraction", [(x, reshape(1, n, width)), weight], {f"{name}.mm": (1, n, width)})
        part = s.view((f"{name}.mm", reshape(batch, seq, heads, size)), f"{name}.split")
        swapped = s.view((part, permute(0, 2, 1, 3)), f"{name}.heads")
        split[name] = s.view((swapped, reshape(bh, seq, size)), f"{name}.bh")
    s.op("contraction", [split["q"], (split["k"], permute(0, 2, 1))], {"qk": (bh, seq, seq)})
    scores = s.view(("qk", reshape(batch, heads, seq, seq)), "qk.4d")
    scaled = s.pointwise("scaled", [("mul", ("x", 0), ("x", 1))], scores, ("scale", expand(batch, heads, seq, seq)))
    masked = s.add("masked", scaled, (bias, expand(batch, heads, seq, seq)))
    s.op("softmax", [(masked, reshape(bh * seq, seq))], {"p": (bh * seq, seq)})
    p = ("p", reshape(bh, seq, seq))
    s.op("contraction", [p, split["v"]], {"ctx": (bh, seq, size)})
    ctx = s.view(("ctx", reshape(batch, heads, seq, size)), "ctx.4d")
    swapped = s.view((ctx, permute(0, 2, 1, 3)), "ctx.swapped")
    merged = s.view((swapped, reshape(batch, seq, width)), "ctx.merged")
    out = s.add("out", merged, "x")
    square = s.pointwise("square", [("mul", ("x", 0), ("x", 0))], out)
    s.op("reduce", [(square, reshape(1, n * width))], {"loss1": (1,)}, fn="mean")
    loss = s.view(("loss1", reshape()), "loss")
    s.phase = "backward"
    dout = s.pointwise("dout", [("mul", ("x", 0), ("c", 2.0 / (n * width)))], out)
    dctx = (dout, reshape(batch, seq, heads, size), permute(0, 2, 1, 3), reshape(bh, seq, size))
    s.op("contraction", [dctx, (split["v"], permute(0, 2, 1))], {"dp": (bh, seq, seq)})
    s.op("contraction", [("p", reshape(bh, seq, seq), permute(0, 2, 1)), dctx], {"dv": (bh, seq, size)})
    s.op("softmax_grad", [("dp", reshape(bh * seq, seq)), "p"], {"dmasked": (bh * seq, seq)})
    ds = s.pointwise("ds", [("mul", ("x", 0), ("x", 1))], "dmasked", ("scale", expand(bh * seq, seq)))
    ds3 = s.view((ds, reshape(bh, seq, seq)), "ds.3d")
    s.op("contraction", [ds3, split["k"]], {"dq": (bh, seq, size)})
    s.op("contraction", [(ds3, permute(0, 2, 1)), split["q"]], {"dk": (bh, seq, size)})
    for name in "qkv":
        four = s.view((f"d{name}", reshape(batch, heads, seq, size)), f"d{name}.4d")
        rows = s.view((four, permute(0, 2, 1, 3), reshape(n, width)), f"d{name}.rows")
        s.op(
            "contraction",
            [(rows, permute(1, 0), reshape(1, width, n)), (x, reshape(1, n, width))],
            {f"dw{name}": (1, width, width)},
        )
    for name in "qkv":
        s.sgd(f"w{name}", (f"dw{name}", reshape(width, width)))
    return s.graph("attention step", loss, "out")


def random_values(graph: TrainingGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """A value for every input, parameter and state: indices within the tables they address, floats of moderate size."""
    rng = np.random.default_rng(seed)
    bounds = _index_bounds(graph)
    out = {}
    for tensor in graph.by_role("input", "parameter", "state"):
        if tensor.dtype == "int32":
            out[tensor.name] = rng.integers(0, bounds.get(tensor.name, 2), tensor.shape).astype(np.int32)
        elif tensor.dtype == "bool":
            out[tensor.name] = rng.random(tensor.shape) < 0.7
        else:
            # State is often a running mean of squares, or a count: it must not be negative.
            value = rng.normal(size=tensor.shape)
            out[tensor.name] = np.abs(value) + 1 if tensor.role == "state" or not tensor.shape else value
    return out


def _index_bounds(graph: TrainingGraph) -> dict[str, int]:
    """How large the entries of an integer input may be, from the ops that index with it (through views)."""
    bounds: dict[str, int] = {}
    origin = {name: name for name in graph.tensors}
    for op in graph.ops:
        if op.kind == "view":
            origin[op.outputs[0].tensor] = origin[op.inputs[0].tensor]
        shapes = [graph.operand_shape(o) for o in op.operands]
        indexed = {
            "gather": (1, lambda s: s[0][0]),
            "scatter_add": (1, lambda s: s[2][0]),
            "nll_loss": (1, lambda s: s[0][1]),
            "cross_entropy": (1, lambda s: s[0][1]),
        }.get(op.kind)
        if indexed is not None:
            name = origin[op.inputs[indexed[0]].tensor]
            bounds[name] = min(bounds.get(name, 1 << 30), indexed[1](shapes))
    return bounds


def result_values(graph: TrainingGraph, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a step leaves behind: the graph's outputs, and the new content of what is updated in place."""
    updated = {op.outputs[out].tensor for op in graph.ops for out, _ in op.inplace}
    return {name: values[name] for name in (*graph.outputs, *sorted(updated))}
