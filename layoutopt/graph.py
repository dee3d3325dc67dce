"""TrainingGraph: one training step (forward, loss, backward, update) as tensors and operations.

The graph is bipartite: an :class:`Op` reads and writes :class:`Tensor` objects through :class:`Operand` views.
``TrainingGraph.dag`` is the networkx graph of it, for notebooks. ``ops`` are listed in an order that can be executed.

Operation kinds (the interpreter ``kernels/reference.py`` is their living definition). "Rows" and "cols" are the shapes
seen through the operand's view:

====================  ====================================================  =======================================
kind                  inputs → outputs                                       attrs
====================  ====================================================  =======================================
view                  x → x seen through the input operand's view            (only before ``passes.fold_views``)
contraction           a[b,m,k], b[b,k,n], e_i[b,m,n]… → c_j[b,m,n]…          ``alpha`` (float, default 1);
                                                                             ``epilogue``: an Expr, see below
pointwise             x_0[d…], x_1[d…], … → y_0[d…], …                       ``expr``: an Expr, see below
reduce                x[m,k] → y[m]                                          ``fn``: sum, mean, max
softmax               x[m,k] → y[m,k]
softmax_grad          dy[m,k], y[m,k] → dx[m,k]
log_softmax           x[m,k] → y[m,k]
log_softmax_grad      dy[m,k], y[m,k] → dx[m,k]
layer_norm            x[m,k], gamma[k], beta[k] → y[m,k], mean[m], rstd[m]    ``eps``
layer_norm_grad       dy[m,k], x[m,k], mean[m], rstd[m], gamma[k] → dx[m,k]
layer_norm_affine     dy[m,k], x[m,k], mean[m], rstd[m] → dgamma[k], dbeta[k]
gather                table[v,d], ids[n] → y[n,d]
scatter_add           dy[n,d], ids[n] → table_grad[v,d]                      ``padding_idx`` (row left zero, or -1)
nll_loss              logp[n,c], target[n] → loss[], weight[]                ``ignore_index``
nll_loss_grad         dloss[], target[n], weight[] → dlogp[n,c]              ``ignore_index``
cross_entropy         logits[n,c], target[n] → loss[], lse[n], weight[]      ``ignore_index``
cross_entropy_grad    dloss[], logits[n,c], target[n], lse[n], weight[] → dlogits[n,c]   ``ignore_index``
attention             q[b,m,d], k[b,n,d], v[b,n,e], x_i[b,m,n]… →           ``alpha``; ``score``, ``drop``: Exprs, see
                      o[b,m,e], peak[b,m], mass[b,m]                         below
attention_grad        q, k, v, o, peak, mass, do[b,m,e], x_i[b,m,n]… →       as attention; ``grad``: an Expr;
                      dq[b,m,d], dk[b,n,d], dv[b,n,e]                        ``beta`` (float): do counts so often
concat                x_i[o,n_i,i] → y[o,n,i]                                ``starts``: where each part begins on the
                                                                             middle axis; what no part covers is 0
iota                  → y[n]                                                 ``start``, ``step``
conv                  x[n,c,h,w], w[o,c/groups,kh,kw] → y[n,o,oh,ow]         ``stride``, ``padding``, ``dilation``
                                                                             (pairs, h before w), ``groups``
conv_grad_input       dy[n,o,oh,ow], w[o,c/groups,kh,kw] → dx[n,c,h,w]       as conv
conv_grad_weight      dy[n,o,oh,ow], x[n,c,h,w] → dw[o,c/groups,kh,kw]       as conv
quantize              x[m,k] → words[m,w], scales[m,g]                       ``format``, see below
dequantize            words[m,w], scales[m,g] → x[m,k]                       ``format``
quantized_gather      words[v,w], scales[v,g], ids[n] → y[n,d]               ``format``
quantized_contraction a[m,k], words[n,w], scales[n,g], e_i[m,n]… →           ``format``; ``alpha``, ``epilogue`` as
                      c_j[m,n]…                                              contraction
====================  ====================================================  =======================================

A convolution is a cross-correlation, as in torch: ``y[n,o,i,j] = Σ x[n,c,i*sh + a*dh - ph,j*sw + b*dw - pw] *
w[o,c,a,b]``, where what lies outside ``x`` is 0. Its bias is a pointwise addition of its own; one axis only is h = 1.

Attention, with ``s = alpha * q·kᵀ`` and ``t = score(s, x…)``: ``p = softmax(t)`` along the keys, ``o = drop(p, x…)·v``.
``peak`` is each row's largest t and ``mass`` the sum of ``exp(t - peak)``; one number instead (the log of the sum)
could not hold a wholly masked row, where t is the most negative float. ``drop`` multiplies its input 0 by a number; it
is absent where there is no dropout. The gradient makes s, t and p again; ``grad(dt, x…, s)`` is ds, absent where it is
dt itself.

``weight`` of the losses is the number of targets that are not ignored (float). An op whose ``inplace`` maps output i
to input j writes output i into input j's storage: the optimizer's updates are pointwise ops of phase "update" whose
outputs alias the parameter and its state.

A contraction without ``epilogue`` has no e_i and one output, ``alpha * a·b``. With one, input 0 of the program is that
sum, its further inputs are the e_i (a bias is seen through an expand view), and its results are the outputs: rewrites
(``layoutopt/rewrite_epilogue.py``) make such ops of a contraction and the pointwise work on its result.

Quantised numbers are rows of packed codes (int32) and scales, as ``layoutopt/quantize.py`` defines them; ``format`` is
such a format as text (``int8``, ``nf4:64``). ``quantized_contraction`` multiplies by rows of weights: c = alpha * a·Wᵀ,
where W[n,k] is what words and scales stand for. ``quantize`` gives a group that holds a number that is not finite a
scale that is none.

An *Expr* is a straight-line program: a tuple of instructions, each ``(op, args…)`` where an argument is a reference
``["x", i]`` (input i), ``["t", j]`` (instruction j) or ``["c", value]``; ``results`` lists one reference per output.
Ops: neg exp log sqrt rsqrt recip tanh erf sin cos abs not float int bool; add sub mul div max min pow eq ne lt le gt
ge and or; where(cond, a, b); rand(seed, stream, index) of ints, a uniform number in [0, 1); round16(x, seed), one of
the float16 numbers beside x, at random. Comparisons and logic give bool, everything else float unless its inputs are
all int.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from layoutopt.errors import GraphError
from layoutopt.view import IDENTITY, View

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["DTYPES", "Expr", "Op", "Operand", "Phase", "Role", "Storage", "Tensor", "TrainingGraph"]

Role = Literal["input", "parameter", "state", "constant", "activation", "gradient", "output"]
Phase = Literal["forward", "loss", "backward", "update"]
DTYPES = {"float32": 4, "float16": 2, "int32": 4, "bool": 1}
"""Bytes of an element on a device. float16 is how numbers lie in memory: kernels calculate with float32."""
KINDS = frozenset(
    {
        *("view", "contraction", "pointwise", "reduce", "concat", "iota", "gather", "scatter_add"),
        *("softmax", "softmax_grad", "log_softmax", "log_softmax_grad"),
        *("layer_norm", "layer_norm_grad", "layer_norm_affine"),
        *("nll_loss", "nll_loss_grad", "cross_entropy", "cross_entropy_grad"),
        *("conv", "conv_grad_input", "conv_grad_weight"),
        *("attention", "attention_grad"),
        *("quantize", "dequantize", "quantized_gather", "quantized_contraction"),
    }
)
PRODUCTS = {"contraction": 2, "quantized_contraction": 3}
"""Kinds that sum over k and may have an epilogue, with the position of its first extra operand."""


@dataclass(frozen=True)
class Tensor:
    """A value of the step.

    Attributes:
        name: unique in the graph; parameters carry their module path (``bert.encoder.layer.0…weight``).
        shape: logical extents; ``()`` for a scalar.
        dtype: "float32", "float16" (by the rewrite "half" alone), "int32" or "bool" (one byte on a device).
        role: what it is for. "state" is optimizer state; "constant" carries its value in ``TrainingGraph.constants``.
        init: how a parameter or state starts without a checkpoint: "zeros", "ones" or "normal:STD".
        of: for a gradient or state, the parameter it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Role = "activation"
    init: str = ""
    of: str = ""

    @property
    def size_elems(self) -> int:
        """Number of logical elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element on a device."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Operand:
    """A tensor seen through a view."""

    tensor: str
    view: View = IDENTITY


@dataclass(frozen=True)
class Expr:
    """A pointwise program: ``code`` instructions ``(op, ref, …)`` and one result reference per output."""

    code: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: unique in the graph.
        kind: see the module docstring.
        inputs: operands read, in the kind's order.
        outputs: operands written.
        attrs: the kind's constants.
        phase: forward, loss, backward or update.
        source: where in the model it came from, for error messages and reports.
        inplace: pairs (output index, input index) that share storage.
    """

    name: str
    kind: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = "forward"
    source: str = ""
    inplace: tuple[tuple[int, int], ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs then outputs: the order in which layouts, accesses and kernel arguments are listed everywhere."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class Storage:
    """Tensors that share memory: one layout decision. ``tensors[0]`` gives the shape that the layout is over."""

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    role: Role


class TrainingGraph:
    """An immutable training step.

    Args:
        name: for people.
        tensors: every tensor by name.
        ops: in executable order.
        outputs: names of tensors to keep: the loss first, then what a user reads back (logits).
        constants: values of tensors with role "constant" (nested lists or numbers).
        meta: model, batch, optimizer, versions: free-form, JSON-like.

    Raises:
        GraphError: a name is missing or doubled, an op reads what is written later, or a kind is unknown.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        ops: tuple[Op, ...] | list[Op],
        outputs: tuple[str, ...],
        constants: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.tensors = dict(tensors)
        self.ops = tuple(ops)
        self.outputs = tuple(outputs)
        self.constants = dict(constants or {})
        self.meta = dict(meta or {})
        self._check()

    def _check(self) -> None:
        ready = {t.name for t in self.tensors.values() if t.role in ("input", "parameter", "state", "constant")}
        seen: set[str] = set()
        for op in self.ops:
            if op.kind not in KINDS:
                raise GraphError(f"op {op.name}: unknown kind {op.kind!r}; known kinds: {', '.join(sorted(KINDS))}")
            if op.name in seen:
                raise GraphError(f"op name {op.name!r} appears twice")
            seen.add(op.name)
            for operand in op.inputs:
                if operand.tensor not in self.tensors:
                    raise GraphError(f"op {op.name} reads unknown tensor {operand.tensor!r}")
                if operand.tensor not in ready:
                    raise GraphError(f"op {op.name} reads {operand.tensor!r} before any op writes it")
            for operand in op.outputs:
                if operand.tensor not in self.tensors:
                    raise GraphError(f"op {op.name} writes unknown tensor {operand.tensor!r}")
                if operand.tensor in ready:
                    raise GraphError(f"op {op.name} writes {operand.tensor!r}, which already has a value")
            ready |= {operand.tensor for operand in op.outputs}
        for out in self.outputs:
            if out not in ready:
                raise GraphError(f"graph output {out!r} is never written")

    # ---- looking around -----------------------------------------------------------------------------------------

    def operand_shape(self, operand: Operand) -> tuple[int, ...]:
        """The shape an op sees."""
        return operand.view.shape(self.tensors[operand.tensor].shape)

    def by_role(self, *roles: Role) -> list[Tensor]:
        """Tensors of the given roles in insertion order."""
        return [t for t in self.tensors.values() if t.role in roles]

    @cached_property
    def producer(self) -> dict[str, Op]:
        """The op that writes each tensor."""
        return {operand.tensor: op for op in self.ops for operand in op.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[Op]]:
        """The ops that read each tensor."""
        out: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for tensor in dict.fromkeys(operand.tensor for operand in op.inputs):
                out[tensor].append(op)
        return out

    @cached_property
    def dag(self) -> nx.DiGraph:
        """Bipartite networkx graph: nodes ``op:NAME`` and ``tensor:NAME`` with the dataclass under ``data``."""
        import networkx as nx  # only notebooks ask: nobody else waits for it

        dag = nx.DiGraph(name=self.name)
        for tensor in self.tensors.values():
            dag.add_node(f"tensor:{tensor.name}", data=tensor, bipartite="tensor", role=tensor.role)
        for op in self.ops:
            dag.add_node(f"op:{op.name}", data=op, bipartite="op", kind=op.kind, phase=op.phase)
            for operand in op.inputs:
                dag.add_edge(f"tensor:{operand.tensor}", f"op:{op.name}")
            for operand in op.outputs:
                dag.add_edge(f"op:{op.name}", f"tensor:{operand.tensor}")
        return dag

    @cached_property
    def storages(self) -> dict[str, Storage]:
        """Storages by name: tensors joined by in-place ops share one (named after the tensor that begins it)."""
        root = {name: name for name in self.tensors}
        for op in self.ops:
            for out, inp in op.inplace:
                root[op.outputs[out].tensor] = root[op.inputs[inp].tensor]
        groups: dict[str, list[str]] = {}
        for name in self.tensors:
            groups.setdefault(root[name], []).append(name)
        return {
            first: Storage(first, (first, *(n for n in names if n != first)), t.shape, t.dtype, t.role)
            for first, names in groups.items()
            for t in (self.tensors[first],)
        }

    @cached_property
    def storage_of(self) -> dict[str, str]:
        """The storage name of each tensor."""
        return {tensor: s.name for s in self.storages.values() for tensor in s.tensors}

    def walk(self) -> Iterator[tuple[int, Op]]:
        """Ops with their position in execution order."""
        return iter(enumerate(self.ops))

    def with_ops(self, ops: list[Op] | tuple[Op, ...], **changes: Any) -> TrainingGraph:
        """A copy with other ops; tensors no op touches are dropped unless they are inputs, parameters or state."""
        tensors = dict(changes.pop("tensors", self.tensors))
        used = {operand.tensor for op in ops for operand in op.operands} | set(changes.get("outputs", self.outputs))
        kept = {n: t for n, t in tensors.items() if n in used or t.role in ("input", "parameter", "state")}
        constants = {n: v for n, v in changes.pop("constants", self.constants).items() if n in kept}
        return TrainingGraph(
            changes.pop("name", self.name),
            kept,
            ops,
            changes.pop("outputs", self.outputs),
            constants,
            changes.pop("meta", self.meta),
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical file form without ``name`` and ``meta``: what a plan is bound to."""
        from layoutopt.graphfile import encode_body

        return hashlib.sha256(encode_body(self)).hexdigest()

    def __repr__(self) -> str:
        return f"TrainingGraph({self.name!r}, {len(self.ops)} ops, {len(self.tensors)} tensors)"

    def _repr_html_(self) -> str:
        from layoutopt.display import graph_html

        return graph_html(self)


def rename_operand(operand: Operand, names: Mapping[str, str]) -> Operand:
    """The operand with its tensor renamed where ``names`` says so."""
    return replace(operand, tensor=names.get(operand.tensor, operand.tensor))


def rename_reads(op: Op, names: Mapping[str, str]) -> Op:
    """The op reading other tensors where ``names`` says so."""
    return replace(op, inputs=tuple(rename_operand(o, names) for o in op.inputs))
