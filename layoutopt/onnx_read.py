"""ONNX files as graphs of the forward pass, for planning and simulating inference.

Nodes are written by the same rules as a captured torch step (:mod:`layoutopt.aten`). What depends on constants and
shapes only is calculated while reading, by onnx's own reference evaluator; float initializers become parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# These register the rules that are used here.
from layoutopt import capture_conv, capture_index, capture_random, capture_rows  # noqa: F401
from layoutopt.aten import Out, cast, constant, translate
from layoutopt.capture_build import Const, Context, GraphBuilder, Value
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph

__all__ = ["read_onnx"]

Arg = Value | Const
_TYPES = {"f": "float32", "i": "int32", "u": "int32", "b": "bool"}
_RULES: dict[str, Callable[..., Any]] = {}


def read_onnx(path: str | os.PathLike[str], *, batch: int | None = None, seq: int | None = None) -> TrainingGraph:
    """The forward pass of an ONNX model.

    Args:
        path: the file.
        batch: stands for the first dimension of every input where the file leaves it open.
        seq: stands for every other dimension that the file leaves open.

    Raises:
        GraphError: onnx is not installed, the file is none of its, an input has no known shape, or operations are not
            supported (all of them in one list).
    """
    try:
        import onnx
    except ImportError as error:
        raise GraphError("reading ONNX files needs onnx: pip install 'layoutopt[onnx]'") from error
    file = Path(path)
    if not file.is_file():
        raise GraphError(f"no ONNX file at {file}")
    try:
        model = onnx.load(str(file))
    except Exception as error:  # protobuf's own errors have no common base
        raise GraphError(f"{file} is not an ONNX file ({error})") from error
    reader = _Reader(model, batch, seq)
    return reader.run(file)


class _Reader:
    """One walk over the nodes."""

    def __init__(self, model: Any, batch: int | None, seq: int | None) -> None:
        self.model, self.batch, self.seq = model, batch, seq
        self.b = GraphBuilder()
        self.values: dict[str, Arg] = {}
        self.refused: dict[str, list[str]] = {}
        self.inferred: dict[str, Any] | None = None

    def run(self, file: Path) -> TrainingGraph:
        from onnx import numpy_helper

        graph = self.model.graph
        for initializer in graph.initializer:
            self.values[initializer.name] = self._initial(initializer.name, numpy_helper.to_array(initializer))
        inputs = [i for i in graph.input if i.name not in self.values]
        for value in inputs:
            shape = [self._extent(value.name, axis, d) for axis, d in enumerate(value.type.tensor_type.shape.dim)]
            dtype = self._dtype(value.name, value.type.tensor_type.elem_type)
            self.values[value.name] = self.b.tensor(value.name, shape, dtype, "input")
        for at, node in enumerate(graph.node):
            self._node(at, node)
        if self.refused:
            lines = [f"{reason} ({len(where)} times, first in {where[0]})" for reason, where in self.refused.items()]
            raise GraphError("\n  ".join([f"{len(lines)} operations of {file} are not supported:", *lines]))
        outputs = [o.name for o in graph.output]
        for name in outputs:
            self.b.context = Context(name, "forward", name)
            self.b.name(self.values[name], name, "output")
        self.b.finish()
        self.b.prune(outputs)
        used = {o.tensor for op in self.b.ops for o in op.operands} | {i.name for i in inputs}
        tensors = {n: t for n, t in self.b.tensors.items() if n in used or n in outputs}
        meta = {
            "model": graph.name or file.stem,
            "batch": {i.name: {"shape": list(tensors[i.name].shape), "dtype": tensors[i.name].dtype} for i in inputs},
            "optimizer": None,
            "what": f"inference, from {file.name}",
            "command": f"layoutopt capture {file.name}",
        }
        constants = {n: v for n, v in self.b.constants.items() if n in tensors}
        return TrainingGraph(graph.name or file.stem, tensors, self.b.ops, tuple(outputs), constants, meta)

    # ---- values ---------------------------------------------------------------------------------------------------

    def _initial(self, name: str, array: np.ndarray) -> Arg:
        if array.dtype.kind != "f" or array.size <= 1:
            return constant(array) if array.dtype.kind in _TYPES else constant(array.astype(np.float32))
        spread = float(np.sqrt(np.square(array, dtype=np.float64).mean()))
        same = float(array.flat[0]) if (array == array.flat[0]).all() else None
        init = f"normal:{spread:.3g}" if same is None else {0.0: "zeros", 1.0: "ones"}.get(same, f"constant:{same:.9g}")
        return self.b.tensor(name, array.shape, "float32", "parameter", init=init)

    def _extent(self, name: str, axis: int, dim: Any) -> int:
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        given = self.batch if axis == 0 else self.seq
        if given is None:
            word = "--batch" if axis == 0 else "--seq"
            raise GraphError(
                f"axis {axis} of input {name!r} is open ({dim.dim_param or 'no name'}): give it with {word}"
            )
        return given

    def _dtype(self, name: str, code: int) -> str:
        from onnx import helper

        kind = np.dtype(helper.tensor_dtype_to_np_dtype(code)).kind
        if kind not in _TYPES:
            raise GraphError(f"input {name!r} is of a type that no kernel has: only floats, integers and bool")
        return _TYPES[kind]

    def _node(self, at: int, node: Any) -> None:
        from onnx import helper

        name = node.name or f"{node.op_type}_{at}"
        self.b.context = Context(name.strip("/").replace("/", "."), "forward", name.strip("/").replace("/", "."))
        attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        args = [self.values[i] if i else None for i in node.input]
        known = [a for a in args if a is None or isinstance(a, Const)]
        try:
            if node.op_type == "Shape":
                shape = args[0].shape[attrs.get("start", 0) : attrs.get("end")]  # type: ignore[union-attr]
                results: Sequence[Any] = [constant(np.array(shape, np.int64))]
            elif len(known) == len(args):
                results = self._calculate(node, known)
            elif node.op_type in _RULES:
                found = _RULES[node.op_type](self.b, attrs, *args)
                results = found if isinstance(found, (tuple, list)) else [found]
            else:
                raise GraphError("not known to layoutopt")
        except GraphError as error:
            self.refused.setdefault(f"{node.op_type}: {error}", []).append(name)
            # Go on to find what else is not supported.
            results = [self._stand_in(o) for o in node.output]
        for output, value in zip(node.output, results, strict=False):
            if output:
                self.values[output] = value

    def _calculate(self, node: Any, args: Sequence[Const | None]) -> list[Const]:
        """What is known when the file is read."""
        from onnx import helper
        from onnx.reference import ReferenceEvaluator

        feeds: dict[str, np.ndarray] = {}
        for name, value in zip(node.input, args, strict=True):
            if value is not None:
                wide = value.array.astype(np.int64) if value.dtype == "int32" else value.array
                feeds[name] = np.ascontiguousarray(wide)
        types = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
        ins = [helper.make_tensor_value_info(n, types[n], a.shape) for n, a in feeds.items()]
        outs = [helper.make_empty_tensor_value_info(o) for o in node.output if o]
        small = helper.make_model(
            helper.make_graph([node], "one", ins, outs), opset_imports=list(self.model.opset_import)
        )
        try:
            return [constant(a) for a in ReferenceEvaluator(small).run(None, feeds)]
        except Exception as error:  # the evaluator raises whatever numpy does
            raise GraphError(f"cannot be calculated from constants ({error})") from error

    def _stand_in(self, name: str) -> Value:
        from onnx import shape_inference

        if self.inferred is None:
            graph = shape_inference.infer_shapes(self.model).graph
            self.inferred = {v.name: v for v in [*graph.value_info, *graph.output]}
        info = self.inferred.get(name)
        dims = [d.dim_value or 1 for d in info.type.tensor_type.shape.dim] if info is not None else []
        free = f"unsupported {name}"
        return self.b.tensor(free, dims, "float32")


# ---- rules ----------------------------------------------------------------------------------------------------------


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _call(b: GraphBuilder, name: str, shape: Sequence[int], dtype: str, *args: Any, **kwargs: Any) -> Any:
    return translate(b, f"aten.{name}", Out(tuple(shape), dtype), list(args), kwargs)


def _ints(value: Any) -> list[int]:
    if isinstance(value, Const):
        return [int(v) for v in value.array.reshape(-1)]
    if isinstance(value, Value):
        raise GraphError("a shape that is calculated from data is not supported: export with fixed shapes")
    return [int(v) for v in value]


def _elementwise(name: str, result: str = "") -> Callable[..., Any]:
    def rule(b: GraphBuilder, attrs: Mapping[str, Any], *args: Arg) -> Any:
        shape = np.broadcast_shapes(*(a.shape for a in args))
        return _call(b, name, shape, result or args[0].dtype, *args)

    return rule


for _onnx, _aten in {
    **{"Add": "add.Tensor", "Sub": "sub.Tensor", "Mul": "mul.Tensor", "Div": "div.Tensor", "Pow": "pow.Tensor_Tensor"},
    **{n: f"{n.lower()}.default" for n in ("Neg", "Exp", "Log", "Sqrt", "Tanh", "Erf", "Abs", "Sigmoid", "Relu")},
    **{"Sin": "sin.default", "Cos": "cos.default", "Reciprocal": "reciprocal.default", "Sign": "sign.default"},
    **{"Max": "maximum.default", "Min": "minimum.default"},
}.items():
    _RULES[_onnx] = _elementwise(_aten)
for _onnx, _aten in {
    **{"Equal": "eq.Tensor", "Less": "lt.Tensor", "LessOrEqual": "le.Tensor", "Greater": "gt.Tensor"},
    **{"GreaterOrEqual": "ge.Tensor", "And": "logical_and.default", "Or": "logical_or.default"},
    "Not": "logical_not.default",
}.items():
    _RULES[_onnx] = _elementwise(_aten, "bool")


@_rule("Where")
def _where(b: GraphBuilder, attrs: Mapping[str, Any], condition: Arg, yes: Arg, no: Arg) -> Any:
    shape = np.broadcast_shapes(condition.shape, yes.shape, no.shape)
    return _call(b, "where.self", shape, yes.dtype, condition, yes, no)


@_rule("Gelu")
def _gelu(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg) -> Any:
    return _call(b, "gelu.default", x.shape, "float32", x, approximate=attrs.get("approximate", b"none").decode())


@_rule("Identity", "Dropout")
def _identity(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, *_: Any) -> Arg:
    return x


@_rule("Cast")
def _cast(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg) -> Arg:
    from onnx import helper

    return cast(b, x, _TYPES[np.dtype(helper.tensor_dtype_to_np_dtype(attrs["to"])).kind])


@_rule("MatMul")
def _matmul(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, y: Arg) -> Any:
    """Batched by numpy's rule; a matrix on the right is one product over all rows."""
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise GraphError("a product with a vector is not supported: give it two axes")
    left, right = b.materialise(x), b.materialise(y)
    (m, k), n = x.shape[-2:], y.shape[-1]
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if len(y.shape) == 2:
        rows = int(np.prod(x.shape[:-1]))
        flat = _call(b, "mm.default", (rows, n), "float32", b.reshape(left, (rows, k)), right)
        return b.reshape(flat, (*x.shape[:-1], n))
    count = int(np.prod(lead))
    parts = [b.reshape(b.expand(v, (*lead, *v.shape[-2:])), (count, *s)) for v, s in ((left, (m, k)), (right, (k, n)))]
    return b.reshape(_call(b, "bmm.default", (count, m, n), "float32", *parts), (*lead, m, n))


@_rule("Gemm")
def _gemm(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, y: Arg, c: Arg | None = None) -> Any:
    left, right = b.materialise(x), b.materialise(y)
    left = b.permute(left, (1, 0)) if attrs.get("transA") else left
    right = b.permute(right, (1, 0)) if attrs.get("transB") else right
    shape, alpha = (left.shape[0], right.shape[1]), float(attrs.get("alpha", 1.0))
    if c is None:
        return _call(b, "mm.default", shape, "float32", left, right, alpha)
    return _call(b, "addmm.default", shape, "float32", c, left, right, alpha=alpha, beta=float(attrs.get("beta", 1.0)))


@_rule("Conv")
def _conv(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, w: Arg, bias: Arg | None = None) -> Any:
    d = len(w.shape) - 2
    pads = list(attrs.get("pads", [0] * 2 * d))
    if pads[:d] != pads[d:] or attrs.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise GraphError("uneven or automatic padding is not supported: export with equal pads")
    stride, dilation = (list(attrs.get(k, [1] * d)) for k in ("strides", "dilations"))
    extents = [
        (n + 2 * p - e * (k - 1) - 1) // s + 1
        for n, p, e, k, s in zip(x.shape[2:], pads, dilation, w.shape[2:], stride, strict=False)
    ]
    shape = (x.shape[0], w.shape[0], *extents)
    groups = int(attrs.get("group", 1))
    return _call(b, "convolution.default", shape, "float32", x, w, bias, stride, pads[:d], dilation, False, [], groups)


def _rows(name: str) -> Callable[..., Any]:
    def rule(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg) -> Any:
        return _call(b, name, x.shape, "float32", x, int(attrs.get("axis", -1)))

    return rule


_RULES |= {"Softmax": _rows("_softmax.default"), "LogSoftmax": _rows("_log_softmax.default")}


@_rule("LayerNormalization")
def _layer_norm(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, scale: Arg, bias: Arg | None = None) -> Any:
    axis = int(attrs.get("axis", -1)) % len(x.shape)
    outs = [Out(x.shape, "float32"), *[Out((*x.shape[:axis], *(1 for _ in x.shape[axis:])), "float32")] * 2]
    args = [x, list(x.shape[axis:]), scale, bias, float(attrs.get("epsilon", 1e-5))]
    return translate(b, "aten.native_layer_norm.default", outs, args, {})[0]


def _reduction(name: str) -> Callable[..., Any]:
    def rule(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, axes: Arg | None = None) -> Any:
        rank = len(x.shape)
        given = _ints(axes) if axes is not None else list(attrs.get("axes", range(rank)))
        gone, keep = {a % rank for a in given}, bool(attrs.get("keepdims", 1))
        shape = [1 if a in gone else n for a, n in enumerate(x.shape) if keep or a not in gone]
        return _call(b, name, shape, x.dtype, x, sorted(gone), keep)

    return rule


_RULES |= {"ReduceMean": _reduction("mean.dim"), "ReduceSum": _reduction("sum.dim_IntList")}
_RULES["ReduceMax"] = _reduction("amax.default")


@_rule("Reshape")
def _reshape(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, shape: Arg) -> Value:
    wanted = [x.shape[i] if n == 0 and not attrs.get("allowzero") else n for i, n in enumerate(_ints(shape))]
    rest = int(np.prod([n for n in wanted if n != -1]))
    return b.reshape(b.materialise(x), [int(np.prod(x.shape)) // rest if n == -1 else n for n in wanted])


@_rule("Transpose")
def _transpose(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg) -> Value:
    return b.permute(b.materialise(x), list(attrs.get("perm", range(len(x.shape))[::-1])))


@_rule("Unsqueeze")
def _unsqueeze(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, axes: Arg | None = None) -> Value:
    given = _ints(attrs["axes"] if axes is None else axes)
    rank = len(x.shape) + len(given)
    new, left = {a % rank for a in given}, iter(x.shape)
    return b.reshape(b.materialise(x), [1 if a in new else next(left) for a in range(rank)])


@_rule("Squeeze")
def _squeeze(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, axes: Arg | None = None) -> Value:
    every = [a for a, n in enumerate(x.shape) if n == 1]
    given = every if axes is None and "axes" not in attrs else _ints(attrs.get("axes", axes))
    gone = {a % len(x.shape) for a in given}
    return b.reshape(b.materialise(x), [n for a, n in enumerate(x.shape) if a not in gone])


@_rule("Flatten")
def _flatten(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg) -> Value:
    lead = int(np.prod(x.shape[: int(attrs.get("axis", 1))]))
    return b.reshape(b.materialise(x), (lead, int(np.prod(x.shape)) // lead))


@_rule("Expand")
def _expand(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, shape: Arg) -> Value:
    return b.expand(b.materialise(x), np.broadcast_shapes(x.shape, tuple(_ints(shape))))


@_rule("Slice")
def _slice(
    b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, starts: Arg, ends: Arg, axes: Any = None, steps: Any = None
) -> Value:
    found = b.materialise(x)
    first, last = _ints(starts), _ints(ends)
    axes, steps = _ints(axes or range(len(first))), _ints(steps or [1] * len(first))
    for axis, start, stop, step in zip(axes, first, last, steps, strict=True):
        if step < 1:
            raise GraphError("a slice that runs backwards is not supported")
        begin, end, _ = slice(start, stop).indices(found.shape[axis])
        found = b.slice(found, axis % len(found.shape), begin, end, step)
    return found


@_rule("Split")
def _split(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, sizes: Arg | None = None) -> list[Value]:
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    if sizes is None and "num_outputs" not in attrs and "split" not in attrs:
        raise GraphError("a split without sizes is not supported: export with an opset of 18 or later")
    if sizes is not None or "split" in attrs:
        parts = _ints(attrs.get("split", sizes))
    else:
        part = -(-x.shape[axis] // int(attrs["num_outputs"]))
        parts = [min(part, x.shape[axis] - at) for at in range(0, x.shape[axis], part)]
    ends = np.cumsum(parts).tolist()
    return [b.slice(b.materialise(x), axis, end - n, end) for n, end in zip(parts, ends, strict=True)]


@_rule("Concat")
def _concat(b: GraphBuilder, attrs: Mapping[str, Any], *parts: Arg) -> Any:
    axis = int(attrs["axis"]) % len(parts[0].shape)
    shape = list(parts[0].shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    return _call(b, "cat.default", shape, parts[0].dtype, list(parts), axis)


@_rule("Gather")
def _gather(b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, index: Arg) -> Any:
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    if axis == 0 and len(x.shape) == 2:
        return _call(b, "embedding.default", shape, x.dtype, x, index)
    if not index.shape:
        chosen = int(index.array) if isinstance(index, Const) else None
        if chosen is not None:
            return _call(b, "select.int", shape, x.dtype, x, axis, chosen)
    return _call(b, "index.Tensor", shape, x.dtype, x, [*[None] * axis, index])


@_rule("Pad")
def _pad(
    b: GraphBuilder, attrs: Mapping[str, Any], x: Arg, pads: Arg, value: Arg | None = None, axes: Any = None
) -> Any:
    rank = len(x.shape)
    if attrs.get("mode", b"constant") != b"constant":
        raise GraphError(f"padding by {attrs['mode'].decode()} is not supported: only with a constant")
    given, at = _ints(pads), _ints(axes) if axes is not None else list(range(rank))
    before, after = dict.fromkeys(range(rank), 0), dict.fromkeys(range(rank), 0)
    for i, axis in enumerate(at):
        before[axis % rank], after[axis % rank] = given[i], given[i + len(at)]
    backwards = [n for axis in reversed(range(rank)) for n in (before[axis], after[axis])]
    shape = [n + before[a] + after[a] for a, n in enumerate(x.shape)]
    fill = float(value.array) if isinstance(value, Const) and value.array.size else 0.0
    return _call(b, "constant_pad_nd.default", shape, x.dtype, x, backwards, fill)
