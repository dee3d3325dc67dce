"""Attention as one op forward and one backward, in place of the five to nine ops that a captured step has for it.

What is recognised, from a softmax outwards (``P`` is read by nothing else, nor are the others in between)::

    S = alpha · Q·Kᵀ   T = score(S, masks…)   P = softmax(T)   W = P · dropout   O = W·V
    dW = dO·Vᵀ   dP = dW · dropout   dT = softmax_grad(dP, P)   dS = grad(dT, S, masks…)
    dV = Wᵀ·dO   dQ = alpha · dS·K   dK = alpha · dSᵀ·Q

where dW and dV may both be ``beta`` times that, and ``score`` is any pointwise program (masks, soft-capping), ``grad``
the one that the backward pass has for it. Neither S nor P nor W is kept for the backward pass: it makes them again from
Q, K and two numbers a row. Grouped-query heads are views with stride 0 and stay so. Left as it is: attention whose
probabilities or whose scores' gradients are read by something else too (a trained bias of the scores, as in Swin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layoutopt.candidates import seen_through
from layoutopt.expr import Builder, Ref, kind_of
from layoutopt.expr import used_inputs as inputs_of
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.view import Step

__all__ = ["fuse_attention"]

_TURN = Step("permute", (0, 2, 1))
_SAME = Expr((), (("x", 0),))


def fuse_attention(graph: TrainingGraph) -> TrainingGraph:
    """The graph with every attention that is recognised as one op, and its gradient as another."""
    removed: set[str] = set()
    placed: dict[str, Op] = {}
    tensors = dict(graph.tensors)
    position = {op.name: i for i, op in enumerate(graph.ops)}
    for op in graph.ops:
        found = _Match(graph, position).of(op) if op.kind == "softmax" else None
        if found is None or removed & found.removed:
            continue
        removed |= found.removed
        placed |= found.placed
        tensors |= found.tensors
    if not placed:
        return graph
    ops = []
    for op in graph.ops:
        if op.name in placed:
            ops.append(placed[op.name])
        elif op.name not in removed:
            ops.append(op)
    return graph.with_ops(ops, tensors=tensors)


@dataclass(frozen=True)
class _Found:
    """One attention.

    Attributes:
        removed: names of the ops that it replaces.
        placed: by the name of the op in whose place it stands, the new op.
        tensors: new ones by name.
    """

    removed: frozenset[str]
    placed: Mapping[str, Op]
    tensors: Mapping[str, Tensor]


class _Refused(Exception):
    """The pattern ends here."""


@dataclass(frozen=True)
class _Product:
    """A contraction of scores with something: over the keys ([b,n,f] → [b,m,f]) or over the rows ([b,m,f] → [b,n,f]).

    Attributes:
        op: the contraction.
        over_keys: what it sums over.
        other: its other operand, seen as [b,summed,f].
        out: its output, seen as [b,kept,f].
    """

    op: Op
    over_keys: bool
    other: Operand
    out: Operand

    @property
    def alpha(self) -> float:
        """The contraction's factor."""
        return _alpha(self.op)


class _Match:
    """Recognises one attention; every check that fails raises :class:`_Refused`."""

    def __init__(self, graph: TrainingGraph, position: Mapping[str, int]) -> None:
        self.graph, self._position = graph, position
        self.ops: dict[str, Op] = {}
        self.extras: dict[tuple[str, Layout], Operand] = {}
        self.shape: tuple[int, int, int] = (0, 0, 0)

    def of(self, softmax: Op) -> _Found | None:
        """The attention around a softmax, None where there is none."""
        try:
            return self._fused(softmax)
        except _Refused:
            return None

    # ---- layouts say which elements are which -----------------------------------------------------------------------

    def _seen(self, operand: Operand) -> Layout:
        """Where a row-major tensor's elements are in what the op sees: equal layouts see the same elements."""
        layout = seen_through(operand.view, Layout.row_major(self.graph.tensors[operand.tensor].shape))
        if layout is None:
            raise _Refused
        return layout

    def _as_scores(self, operand: Operand) -> Layout:
        """The same over [b, m, n]."""
        layout = self._seen(operand).reshape(self.shape) if self._size(operand) == self._scores else None
        if layout is None:
            raise _Refused
        return layout

    def _size(self, operand: Operand) -> int:
        size = 1
        for n in self.graph.operand_shape(operand):
            size *= n
        return size

    @property
    def _scores(self) -> int:
        b, m, n = self.shape
        return b * m * n

    def _same(self, a: Operand, b: Operand) -> bool:
        return a.tensor == b.tensor and self._seen(a) == self._seen(b)

    # ---- neighbours -------------------------------------------------------------------------------------------------

    def _producer(self, tensor: str, *kinds: str) -> Op:
        op = self.graph.producer.get(tensor)
        if op is None or op.kind not in kinds:
            raise _Refused
        return op

    def _readers(self, tensor: str) -> dict[str, list[Op]]:
        out: dict[str, list[Op]] = {}
        for op in self.graph.consumers[tensor]:
            out.setdefault(op.kind, []).append(op)
        return out

    def _take(self, op: Op) -> Op:
        self.ops[op.name] = op
        return op

    @staticmethod
    def _output(op: Op, tensor: str) -> Operand:
        return next(o for o in op.outputs if o.tensor == tensor)

    @staticmethod
    def _input(op: Op, tensor: str) -> Operand:
        found = [o for o in op.inputs if o.tensor == tensor]
        if len(found) != 1:
            raise _Refused
        return found[0]

    def _product(self, op: Op, scores: str, layout: Layout) -> _Product:
        """A contraction that reads a tensor of scores which lies in ``layout`` over [b, m, n]."""
        mine = self._input(op, scores)
        first = op.inputs[0] is mine
        other, out, seen = op.inputs[first], op.outputs[0], self._seen(mine)
        if not first:  # f is an axis of the left operand: the product is turned
            other, out = _turned(other), _turned(out)
            seen = seen.permute((0, 2, 1))
        if seen == layout:
            return _Product(op, True, other, out)
        if seen == layout.permute((0, 2, 1)):
            return _Product(op, False, other, out)
        raise _Refused

    def _factors(self, op: Op, tensor: str, layout: Layout) -> tuple[Operand, Operand]:
        """(left [b,m,f], right [b,n,f]) of the contraction whose product is a tensor of scores in ``layout``."""
        a, b = op.inputs
        made = self._seen(self._output(op, tensor))
        if made == layout:
            return a, _turned(b)
        if made == layout.permute((0, 2, 1)):
            return _turned(b), a
        raise _Refused

    def _extra(self, operand: Operand) -> Ref:
        """The input number of an outside operand of a program, seen as [b, m, n]."""
        layout = self._as_scores(operand)
        view = operand.view.then(("reshape", self.shape)).simplified(self.graph.tensors[operand.tensor].shape)
        key = operand.tensor, layout
        self.extras.setdefault(key, Operand(operand.tensor, view))
        return "x", 1 + list(self.extras).index(key)

    # ---- the whole --------------------------------------------------------------------------------------------------

    def _fused(self, softmax: Op) -> _Found:
        self._take(softmax)
        scores, program = self._score_side(softmax)
        p = softmax.outputs[0]
        layout = self._as_scores(p)
        weights, drop = p.tensor, None
        if "pointwise" in self._readers(p.tensor):
            drop = self._single(p.tensor, "pointwise", layout)
            weights = drop.outputs[0].tensor
            drop_program = self._program(drop, p.tensor)
            layout = self._as_scores(drop.outputs[0])
        products = [self._product(op, weights, layout) for op in self._readers(weights).get("contraction", [])]
        forward = [x for x in products if x.over_keys]
        if len(forward) != 1 or len(products) > 2 or forward[0].alpha != 1.0:
            raise _Refused
        value = forward[0]
        self._take(value.op)
        q, k = self._factors(scores, scores.outputs[0].tensor, self._raw)
        attrs: dict[str, Any] = {"alpha": _alpha(scores), "score": self._built(program)}
        if drop is not None:
            attrs["drop"] = self._linear(self._built(drop_program))
        fused = _Parts(q, k, value.other, value.out, tuple(self.extras.values()))
        peak, mass = f"{value.out.tensor}.peak", f"{value.out.tensor}.mass"
        tensors = {name: Tensor(name, self.shape[:2]) for name in (peak, mass)}
        op = Op(
            value.op.name,
            "attention",
            (q, k, value.other, *fused.extras),
            (value.out, Operand(peak), Operand(mass)),
            attrs,
            value.op.phase,
            value.op.source,
        )
        placed = {value.op.name: op}
        backward = self._readers(p.tensor).get("softmax_grad", [])
        if backward:
            if len(backward) != 1:
                raise _Refused
            rest = [x for x in products if not x.over_keys]
            name, gradient, more = self._gradient(backward[0], p, drop, attrs, program, fused, rest, (peak, mass))
            placed[name] = gradient
            tensors |= more
        self._check_closed({o.tensor for op in placed.values() for o in op.outputs})
        if any(name in self.graph.tensors for name in tensors):
            raise _Refused
        return _Found(frozenset(self.ops), placed, tensors)

    def _score_side(self, softmax: Op) -> tuple[Op, _Program]:
        """The contraction that makes the scores, and what is done to them before the softmax."""
        t = softmax.inputs[0]
        above = self._take(self._producer(t.tensor, "contraction", "pointwise"))
        if above.kind == "contraction":
            self.shape = self.graph.operand_shape(above.outputs[0])  # type: ignore[assignment]
            self._raw = self._as_scores(t)
            return above, _Program(t.tensor, None, _SAME, {t.tensor: ("x", 0)}, 0)
        for operand in above.inputs:
            scores = self.graph.producer.get(operand.tensor)
            if scores is None or scores.kind != "contraction" or scores.phase != above.phase:
                continue
            self.shape = self.graph.operand_shape(scores.outputs[0])  # type: ignore[assignment]
            result = [o.tensor for o in above.outputs].index(t.tensor)
            if self._as_scores(t) != self._as_scores(above.outputs[result]):
                raise _Refused
            self._raw = self._as_scores(operand)
            self._take(scores)
            return scores, self._program(above, operand.tensor, result)
        raise _Refused

    def _single(self, tensor: str, kind: str, layout: Layout) -> Op:
        """The one op of a kind that reads a tensor of scores, element by element as it lies."""
        readers = self._readers(tensor)[kind]
        if len(readers) != 1 or self._as_scores(self._input(readers[0], tensor)) != layout:
            raise _Refused
        return self._take(readers[0])

    def _program(self, op: Op, main: str, result: int = 0) -> _Program:
        """A pointwise op over scores, its outside operands numbered."""
        if self.graph.operand_shape(op.outputs[result]) != self.graph.operand_shape(self._input(op, main)):
            raise _Refused
        refs = {o.tensor: ("x", 0) if o.tensor == main else self._extra(o) for o in op.inputs}
        if len(refs) != len(op.inputs):
            raise _Refused
        return _Program(main, op, op.attrs["expr"], refs, result)

    def _kinds(self, last: Sequence[Any] = ()) -> list[Any]:
        dtypes = [self.graph.tensors[name].dtype for name, _ in self.extras]
        return ["float", *map(kind_of, dtypes), *last]

    def _built(self, program: _Program) -> Expr:
        builder = Builder(self._kinds())
        return builder.finish([program.results(builder)[program.result]])

    @staticmethod
    def _linear(expr: Expr) -> Expr:
        """The program if all it does to its input is to multiply it by something else."""
        (last,) = expr.results
        if last[0] != "t":
            raise _Refused
        name, *factors = expr.code[last[1]]
        rest = [f for f in factors if tuple(f) != ("x", 0)]
        before = Expr(tuple(i for j, i in enumerate(expr.code) if j != last[1]), tuple(rest))
        if name != "mul" or len(rest) != 1 or last[1] != len(expr.code) - 1 or 0 in inputs_of(before):
            raise _Refused
        return expr

    def _gradient(
        self,
        softmax_grad: Op,
        p: Operand,
        drop: Op | None,
        attrs: Mapping[str, Any],
        program: _Program,
        fused: _Parts,
        products: Sequence[_Product],
        rows: tuple[str, str],
    ) -> tuple[str, Op, dict[str, Tensor]]:
        """(op in whose place it stands, the gradient op, new tensors)."""
        self._take(softmax_grad)
        dp, also_p = softmax_grad.inputs
        if also_p.tensor != p.tensor or self._as_scores(also_p) != self._as_scores(p):
            raise _Refused
        dw, layout = dp.tensor, self._as_scores(dp)
        if drop is not None:
            again = self._take(self._producer(dp.tensor, "pointwise"))
            if self._as_scores(again.outputs[0]) != layout:
                raise _Refused
            main = [o for o in again.inputs if self._is_made_by_contraction(o)]
            if len(main) != 1 or self._built(self._program(again, main[0].tensor)) != attrs["drop"]:
                raise _Refused
            dw, layout = main[0].tensor, self._as_scores(main[0])
        product = self._take(self._producer(dw, "contraction"))
        do, v = self._factors(product, dw, layout)
        if not self._same(v, fused.v):
            raise _Refused
        if any(not self._same(x.other, do) or x.alpha != _alpha(product) for x in products):
            raise _Refused
        gradients = {"v": products[0].out} if products else {}
        for x in products:
            self._take(x.op)

        ds, layout = softmax_grad.outputs[0].tensor, self._as_scores(softmax_grad.outputs[0])
        own: dict[str, Any] = {**attrs, "beta": _alpha(product)}
        if "pointwise" in self._readers(ds):
            chain = self._single(ds, "pointwise", layout)
            own["grad"] = self._gradient_program(chain, ds, program)
            ds, layout = chain.outputs[0].tensor, self._as_scores(chain.outputs[0])
        for reader in self._readers(ds).get("contraction", []):
            x = self._product(reader, ds, layout)
            which, other = ("q", fused.k) if x.over_keys else ("k", fused.q)
            if which in gradients or not self._same(x.other, other) or x.alpha != attrs["alpha"]:
                raise _Refused
            gradients[which] = x.out
            self._take(reader)

        first = min((op for op in self.ops.values() if op.phase == "backward"), key=lambda op: self._position[op.name])
        outputs, tensors = [], {}
        for which, like in (("q", fused.q), ("k", fused.k), ("v", fused.v)):
            if which not in gradients:  # nobody wants it
                name = f"{first.name}.d{which}"
                tensors[name] = Tensor(name, self.graph.operand_shape(like))
                gradients[which] = Operand(name)
            outputs.append(gradients[which])
        extras = tuple(self.extras.values())
        inputs = (fused.q, fused.k, fused.v, fused.o, Operand(rows[0]), Operand(rows[1]), do, *extras)
        for operand in inputs:  # what it reads is there when the first of its ops ran
            producer = self.graph.producer.get(operand.tensor)
            if producer is not None and self._position[producer.name] >= self._position[first.name]:
                raise _Refused
        op = Op(first.name, "attention_grad", inputs, tuple(outputs), own, first.phase, first.source)
        return first.name, op, tensors

    def _is_made_by_contraction(self, operand: Operand) -> bool:
        op = self.graph.producer.get(operand.tensor)
        return op is not None and op.kind == "contraction"

    def _gradient_program(self, op: Op, ds: str, program: _Program) -> Expr:
        """DS from dT, the outside operands, and S itself, of which the forward program's results are made again."""
        made = {} if program.op is None else {o.tensor: i for i, o in enumerate(program.op.outputs)}
        inside = {ds, program.main, *made}
        refs: dict[str, Ref] = {}
        for operand in op.inputs:
            if operand.tensor not in inside:
                refs[operand.tensor] = self._extra(operand)
                continue
            made_as = self._output(self.graph.producer[operand.tensor], operand.tensor)
            if self._as_scores(operand) != self._as_scores(made_as):
                raise _Refused
        raw: Ref = ("x", 1 + len(self.extras))
        builder = Builder(self._kinds(["float"]))
        results = replace(program, refs={**program.refs, program.main: raw}).results(builder)
        refs |= {ds: ("x", 0), program.main: raw} | {name: results[i] for name, i in made.items()}
        return builder.finish([builder.inline(op.attrs["expr"], [refs[o.tensor] for o in op.inputs])[0]])

    # ---- what must hold of the whole --------------------------------------------------------------------------------

    def _check_closed(self, outputs: set[str]) -> None:
        """Nothing else reads what is no longer made."""
        for op in self.ops.values():
            for tensor in (o.tensor for o in op.outputs if o.tensor not in outputs):
                readers = self.graph.consumers[tensor]
                if tensor in self.graph.outputs or any(reader.name not in self.ops for reader in readers):
                    raise _Refused


@dataclass(frozen=True)
class _Parts:
    """Operands of the forward op."""

    q: Operand
    k: Operand
    v: Operand
    o: Operand
    extras: tuple[Operand, ...]


@dataclass(frozen=True)
class _Program:
    """A pointwise op over scores.

    Attributes:
        main: the tensor of scores that it reads.
        op: the op; None where nothing is done to the scores.
        expr: its program.
        refs: what its inputs are called in the fused op, by tensor.
        result: which of its results goes on.
    """

    main: str
    op: Op | None
    expr: Expr
    refs: Mapping[str, Ref]
    result: int

    def results(self, builder: Builder) -> list[Ref]:
        """References to all results."""
        return builder.inline(self.expr, list(self._inputs()))

    def _inputs(self) -> Iterator[Ref]:
        names = [self.main] if self.op is None else [o.tensor for o in self.op.inputs]
        return (self.refs[name] for name in names)


def _alpha(op: Op) -> float:
    return float(op.attrs.get("alpha", 1.0))


def _turned(operand: Operand) -> Operand:
    """The operand with its last two axes swapped."""
    return replace(operand, view=operand.view.then(_TURN))
