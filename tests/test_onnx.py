"""ONNX files read and interpreted, against onnx's own reference evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from kernels.reference import run  # noqa: E402
from layoutopt.errors import GraphError, LayoutOptError  # noqa: E402
from layoutopt.facade import capture_model  # noqa: E402
from layoutopt.onnx_read import read_onnx  # noqa: E402

pytestmark = pytest.mark.peer

RNG = np.random.default_rng(8)


def save(
    path: Path, nodes: list[Any], inputs: dict[str, Any], weights: dict[str, np.ndarray], outputs: list[str]
) -> Any:
    """A model; ``inputs`` are arrays or (type, dims)."""
    described = []
    for name, value in inputs.items():
        kind, dims = value if isinstance(value, tuple) else (helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        described.append(helper.make_tensor_value_info(name, kind, dims))
    graph = helper.make_graph(
        nodes,
        "made",
        described,
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, str(path))
    return model


def weights(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes}


def transformer(path: Path) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Embedding, one attention block with a padding mask and shapes calculated in the file, and a classifier."""
    n = helper.make_node
    w = weights(
        ("table", (31, 12)), ("wq", (12, 12)), ("wk", (12, 12)), ("wv", (12, 12)), ("gamma", (12,)), ("beta", (12,)),
        ("w1", (20, 12)), ("b1", (20,)), ("w2", (20, 5)),
    )  # fmt: skip
    fixed = {
        "heads": np.array([3, 4]), "zero": np.array([0]), "low": np.float32(-1e9), "one": np.float32(1.0),
        "scale": np.float32(0.5), "axes12": np.array([1, 2]), "first": np.array([0]), "second": np.array([1]),
        "axis1": np.array([1]), "flat": np.array([0, 0, 12]),
    }  # fmt: skip
    nodes = [
        n("Gather", ["table", "ids"], ["x"]),
        n("Shape", ["ids"], ["sizes"]),
        n("Concat", ["sizes", "heads"], ["split"], axis=0),
        *(
            node
            for q in "qkv"
            for node in (
                n("MatMul", ["x", f"w{q}"], [f"{q}0"]),
                n("Reshape", [f"{q}0", "split"], [f"{q}1"]),
                n("Transpose", [f"{q}1"], [q], perm=[0, 2, 3, 1] if q == "k" else [0, 2, 1, 3]),
            )
        ),
        n("MatMul", ["q", "k"], ["s0"]),
        n("Mul", ["s0", "scale"], ["s1"]),
        n("Unsqueeze", ["mask", "axes12"], ["m0"]),
        n("Cast", ["m0"], ["m1"], to=TensorProto.FLOAT),
        n("Sub", ["one", "m1"], ["m2"]),
        n("Mul", ["m2", "low"], ["m3"]),
        n("Add", ["s1", "m3"], ["s2"]),
        n("Softmax", ["s2"], ["p"], axis=-1),
        n("MatMul", ["p", "v"], ["a0"]),
        n("Transpose", ["a0"], ["a1"], perm=[0, 2, 1, 3]),
        n("Reshape", ["a1", "flat"], ["a2"]),
        n("Add", ["a2", "x"], ["r"]),
        n("LayerNormalization", ["r", "gamma", "beta"], ["y"], axis=-1, epsilon=1e-3),
        n("Slice", ["y", "first", "second", "axis1"], ["c0"]),
        n("Squeeze", ["c0", "axis1"], ["c"]),
        n("Gemm", ["c", "w1", "b1"], ["h0"], transB=1),
        n("Erf", ["h0"], ["h1"]),
        n("MatMul", ["h1", "w2"], ["logits"]),
    ]
    mask = np.ones((3, 7), np.int64)
    mask[1, 4:] = 0
    feeds = {"ids": RNG.integers(0, 31, (3, 7)), "mask": mask}
    model = save(path, nodes, feeds, {**w, **fixed}, ["logits", "y"])
    return model, w, feeds


def test_a_transformer_equals_onnx(tmp_path: Path) -> None:
    model, w, feeds = transformer(tmp_path / "t.onnx")
    graph, _ = capture_model(str(tmp_path / "t.onnx"))
    assert {t.name for t in graph.by_role("parameter")} == set(w)
    assert {op.phase for op in graph.ops} == {"forward"}
    assert not any(op.kind in ("view", "iota") for op in graph.ops)
    got = run(graph, {**w, **feeds})
    for name, expected in zip(["logits", "y"], ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"labels": 3}, {"mode": "lora"}, {"dropout": True}], ids=str)
def test_what_belongs_to_training_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    transformer(tmp_path / "t.onnx")
    with pytest.raises(LayoutOptError, match="is read as an inference graph: only --batch and --seq may be set"):
        capture_model(str(tmp_path / "t.onnx"), **options)


def test_a_convolutional_net_equals_onnx(tmp_path: Path) -> None:
    n = helper.make_node
    w = weights(("k1", (6, 3, 3, 3)), ("b1", (6,)), ("k2", (6, 1, 3, 2)), ("fc", (6, 4)))
    fixed = {"pads": np.array([0, 0, 1, 0, 0, 0, 0, 2]), "fill": np.float32(0.25), "axes": np.array([2, 3])}
    nodes = [
        n("Pad", ["x", "pads", "fill"], ["p"]),
        n("Conv", ["p", "k1", "b1"], ["c1"], strides=[2, 1], pads=[1, 1, 1, 1]),
        n("Relu", ["c1"], ["r"]),
        n("Conv", ["r", "k2"], ["c2"], group=6, dilations=[1, 2], pads=[1, 0, 1, 0]),
        n("Split", ["c2"], ["left", "right"], axis=1, num_outputs=2),
        n("Concat", ["right", "left"], ["swapped"], axis=1),
        n("ReduceMean", ["swapped", "axes"], ["m"], keepdims=0),
        n("MatMul", ["m", "fc"], ["y0"]),
        n("Max", ["y0", "fill"], ["y1"]),
        n("LogSoftmax", ["y1"], ["y"], axis=1),
    ]
    feeds = {"x": RNG.normal(size=(2, 3, 9, 8)).astype(np.float32)}
    model = save(tmp_path / "c.onnx", nodes, feeds, {**w, **fixed}, ["y"])
    graph, _ = capture_model(str(tmp_path / "c.onnx"))
    assert sum(op.kind == "conv" for op in graph.ops) == 2
    got = run(graph, {**w, **feeds})
    np.testing.assert_allclose(got["y"], ReferenceEvaluator(model).run(None, feeds)[0], rtol=1e-5, atol=1e-6)


def test_open_dimensions_are_given(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    save(tmp_path / "o.onnx", nodes, {"x": (TensorProto.FLOAT, ["n", "s", 5])}, weights(("w", (5, 2))), ["y"])
    with pytest.raises(GraphError, match=r"axis 0 of input 'x' is open .*--batch"):
        read_onnx(tmp_path / "o.onnx")
    assert read_onnx(tmp_path / "o.onnx", batch=3, seq=7).tensors["y"].shape == (3, 7, 2)


def test_refusals(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Hardmax", ["x"], ["a"], name="first"),
        helper.make_node("Add", ["a", "x"], ["b"]),
        helper.make_node("Hardmax", ["b"], ["c"]),
        helper.make_node("Celu", ["c"], ["y"]),
    ]
    save(tmp_path / "r.onnx", nodes, {"x": np.zeros((2, 3), np.float32)}, {}, ["y"])
    with pytest.raises(GraphError) as caught:
        read_onnx(tmp_path / "r.onnx")
    assert "2 operations" in str(caught.value)
    assert "Hardmax: not known to layoutopt (2 times, first in first)" in str(caught.value)
    with pytest.raises(GraphError, match="no ONNX file"):
        read_onnx(tmp_path / "absent.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(GraphError, match="is not an ONNX file"):
        read_onnx(tmp_path / "bad.onnx")
