"""Ops that write over what they read last: the same results, less memory, and never what somebody still needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels import reference
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import planner, rewrites
from layoutopt.graph import Op, TrainingGraph
from layoutopt.rewrite_reuse import write_over
from layoutopt.rewrite_updates import fullest, peak_bytes
from tests.fake_costs import FakeCosts
from tests.graphs import Sketch, random_values, reshape
from tests.test_rewrite_updates import overwriting

N, K = 7, 29


def tied_step() -> TrainingGraph:
    """A weight that is used twice: its gradient has two parts, which are added up before the update."""
    s = Sketch()
    s.tensor("x", (N, K), "input")
    s.tensor("w", (K, K), "parameter")
    for name in ("first", "second"):
        s.op("contraction", [("x", reshape(1, N, K)), ("w", reshape(1, K, K))], {f"{name}.y": (1, N, K)}, alpha=0.5)
    s.phase = "loss"
    s.op("reduce", [("first.y", reshape(1, N * K))], {"total": (1,)}, fn="mean")
    s.pointwise("loss", [("mul", ("x", 0), ("c", 1.0))], ("total", reshape()))
    s.phase = "backward"
    for name in ("first", "second"):
        turned = ("x", ("permute", (1, 0)), reshape(1, K, N))
        s.op("contraction", [turned, f"{name}.y"], {f"{name}.dw": (1, K, K)})
    s.add("dw", ("first.dw", reshape(K, K)), ("second.dw", reshape(K, K)))
    s.sgd("w", "dw")
    graph = s.graph("tied", "loss")
    tensors = {n: replace(t, shape=(K, K)) if n.endswith(".dw") else t for n, t in graph.tensors.items()}
    ops = [_plain(op) for op in graph.ops]
    return graph.with_ops(ops, tensors=tensors)


def _plain(op: Op) -> Op:
    """Gradients stored as the sum sees them: contractions write them through a view."""
    from layoutopt.graph import Operand
    from layoutopt.view import View

    def put(o: Operand) -> Operand:
        if not o.tensor.endswith(".dw"):
            return o
        return Operand(o.tensor, View().then(reshape(1, K, K)) if op.kind == "contraction" else View())

    return replace(op, inputs=tuple(map(put, op.inputs)), outputs=tuple(map(put, op.outputs)))


def test_a_sum_takes_the_place_of_a_part() -> None:
    graph = tied_step()
    assert graph.ops[fullest(graph)[0]].kind == "pointwise"
    changed = write_over(graph)
    op = next(op for op in changed.ops if op.outputs[0].tensor == "dw")
    assert op.inplace == ((0, 0),)
    assert peak_bytes(changed) < peak_bytes(graph)
    values = random_values(graph)
    before, after = overwriting(graph, values), overwriting(changed, values)
    for name in ("loss", "w.new"):
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("why", ["read later", "an output", "written twice"])
def test_what_is_needed_is_not_written_over(why: str) -> None:
    graph = tied_step()
    if why == "an output":
        graph = graph.with_ops(graph.ops, outputs=(*graph.outputs, "first.dw", "second.dw"))
    elif why == "read later":
        total = next(op for op in graph.ops if op.outputs[0].tensor == "dw")
        again = replace(total, name="again", outputs=(replace(total.outputs[0], tensor="dw2"),))
        tensors = {**graph.tensors, "dw2": replace(graph.tensors["dw"], name="dw2")}
        at = graph.ops.index(total)
        ops = [*graph.ops[: at + 1], again, *graph.ops[at + 1 :]]
        graph = graph.with_ops(ops, tensors=tensors, outputs=(*graph.outputs, "dw2"))
    else:
        total = next(op for op in graph.ops if op.outputs[0].tensor == "dw")
        twice = replace(total, inputs=(total.inputs[0], total.inputs[0]))
        graph = graph.with_ops([twice if op is total else op for op in graph.ops])
    changed = write_over(graph)
    assert not [op for op in changed.ops if op.inplace and op.phase != "update" and op.outputs[0].tensor == "dw"]


def test_a_step_on_the_device(device_index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "ALWAYS", ("reuse",))
    monkeypatch.setattr(rewrites, "OPTIONAL", ())
    runtime = Runtime(devices()[device_index])
    graph = tied_step()
    values = random_values(graph)
    plan = planner.plan(graph, FakeCosts(runtime.limits))
    assert plan.rewrites == ("reuse",)
    run = Executor(runtime, graph, plan, {"w": values["w"]}, poison=True)
    run.step({"x": values["x"]})
    expected = reference.run(graph, values)
    np.testing.assert_allclose(run.read("w"), expected["w.new"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "softmax_grad"])
@pytest.mark.parametrize(("rows", "classes"), [(7, 3), (33, 20), (5, 1000)])
def test_rows_in_place(device_index: int, kind: str, rows: int, classes: int) -> None:
    from tests.kernel_cases import check_all, make_spec
    from tests.test_kernels_rows import laid_out

    rng = np.random.default_rng(classes)
    inputs = [rng.standard_normal((rows, classes)).astype(np.float32) for _ in range(1 + (kind == "softmax_grad"))]
    spec = make_spec(kind, inputs, [(rows, classes)], inplace=((0, 0),))
    for name in ("row-major", "r-tile 4x4", "transposed"):
        layouts = laid_out(spec, name)
        check_all(device_index, spec, [*layouts[:-1], layouts[0]], inputs)
