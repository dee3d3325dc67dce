"""Convolutions and their gradients: the correlations they are made of, every variant on every device, and the nests."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.convolve import Window as Reference
from kernels.execute import Executor
from kernels.families.convolution import CONVOLUTION
from kernels.families.convolution_form import Axis, Window, correlations, window_layout
from kernels.reference import evaluate
from kernels.runtime import Runtime, devices
from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.testing import check_kernels, limits_of
from kernels.variants import kernels_for
from layoutopt import baselines
from layoutopt.graph import Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.planner import plan
from tests.fake_costs import FakeCosts
from tests.kernel_cases import GPU_LIMITS, touched
from tests.plans import any_of, mixed, naive_plan

KINDS = CONVOLUTION.kinds
CPU = DeviceLimits(kind="cpu", simd_width=16)
Pair = tuple[int, int]


class Conv(NamedTuple):
    """x[n,c,h,w] meets w[o,c/groups,kh,kw]."""

    n: int
    c: int
    o: int
    image: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def spec(self, kind: str) -> OpSpec:
        oh, ow = Reference(self.stride, self.padding, self.dilation, self.groups).extents(self.image, self.kernel)
        x, w = (self.n, self.c, *self.image), (self.o, self.c // self.groups, *self.kernel)
        y = (self.n, self.o, oh, ow)
        shapes = {"conv": (x, w, y), "conv_grad_input": (y, w, x), "conv_grad_weight": (y, x, w)}[kind]
        attrs = {k: getattr(self, k) for k in ("stride", "padding", "dilation", "groups")}
        return OpSpec(kind, shapes, ("float32",) * 3, 2, tuple(sorted(attrs.items())))


LAYOUTS = {
    "nchw": Layout.row_major,
    "nhwc": lambda shape: Layout.row_major(shape, (0, 2, 3, 1)),
    "hwio": lambda shape: Layout.row_major(shape, (2, 3, 1, 0)),
    "nchw4c": baselines.tvm_nchw4c,
    "nc4hw4": baselines.mnn_buffer,
    "oihw4o": baselines.tvm_oihw4o,
    "tiled pixels": lambda shape: Layout.tiled(shape, {2: 2, 3: 4}),
}


def inputs_of(spec: OpSpec) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(sum(s) for s in spec.shapes))
    return [rng.standard_normal(s).astype(np.float32) for s in spec.shapes[:2]]


def check(device_index: int, kernels: list[Kernel]) -> None:
    """Every kernel (of one op) against the float64 reference; outputs, padding and workspaces start as NaN."""
    spec = kernels[0].spec
    inputs = inputs_of(spec)
    exact = [x.astype(np.float64) for x in inputs]
    expected = evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[2:])
    check_kernels(devices()[device_index].handle, kernels, inputs, expected, rtol=2e-5)


def one_of_each(spec: OpSpec, layouts: tuple[Layout, ...], limits: DeviceLimits) -> list[Kernel]:
    """The first variant of each name that accepts the layouts; register tiles are the contraction family's."""
    first: dict[tuple[str, int], Kernel] = {}
    for kernel in kernels_for(spec, layouts, limits):
        first.setdefault((kernel.variant.name, dict(kernel.variant.params).get("pack", 0)), kernel)
    return list(first.values())


def uniform(spec: OpSpec, *names: str) -> tuple[Layout, ...]:
    """Operands in the named layouts, the last one for all that follow."""
    return tuple(LAYOUTS[names[min(i, len(names) - 1)]](shape) for i, shape in enumerate(spec.shapes))


# ---- host: the form -------------------------------------------------------------------------------------------------


def _fits(conv: Conv) -> bool:
    pairs = zip(conv.image, conv.padding, conv.dilation, conv.kernel, strict=True)
    return all(i + 2 * p > d * (k - 1) for i, p, d, k in pairs)


convs = st.builds(
    Conv,
    n=st.integers(1, 2),
    c=st.just(2),
    o=st.just(4),
    image=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    groups=st.just(1),
).filter(_fits)


@given(convs, st.sampled_from(["conv", "conv_grad_input"]))
def test_correlations_are_the_convolution(conv: Conv, kind: str) -> None:
    """Evaluated as the module says, by plain loops over outputs and taps."""
    spec = conv.spec(kind)
    image, weights = (x.astype(np.float64) for x in inputs_of(spec))
    if kind == "conv_grad_input":
        weights = weights.swapaxes(0, 1)
    out = np.full(spec.shapes[2], np.nan)
    for h, w in correlations(kind, Window.of(dict(spec.attrs)), spec.shapes[2][2:], conv.kernel):
        for i, j in product(range(h.out), range(w.out)):
            total = np.zeros(out.shape[:2])
            for t, u in product(range(h.taps), range(w.taps)):
                row, column = i * h.step + t * h.tap + h.at, j * w.step + u * w.tap + w.at
                if 0 <= row < image.shape[2] and 0 <= column < image.shape[3]:
                    total += image[:, :, row, column] @ weights[:, :, h.first + t * h.skip, w.first + u * w.skip].T
            assert np.isnan(out[:, :, h.begin + i * h.every, w.begin + j * w.every]).all()
            out[:, :, h.begin + i * h.every, w.begin + j * w.every] = total
    expected = evaluate(kind, dict(spec.attrs), [x.astype(np.float64) for x in inputs_of(spec)], spec.shapes[2:])
    np.testing.assert_allclose(out, expected[0], atol=1e-12)


def test_a_window_is_a_view_of_the_image() -> None:
    layout = Layout.row_major((1, 2, 3, 9, 10), (1, 3, 4, 0, 2))
    h, w = Axis(3, 2, 2, 3, 1), Axis(4, 3, 1, 2, 0)
    seen = window_layout(layout, (h, w))
    assert seen is not None
    offsets, image = seen.linear_offsets(), layout.linear_offsets()
    for i, t, j, u in product(range(3), range(2), range(4), range(3)):
        assert (offsets[..., i, t, j, u] == image[..., 2 * i + 3 * t + 1, j + 2 * u]).all()
    assert window_layout(layout, (h, Axis(4, 3, 1, 2, -1))) is None  # leaves the image
    assert window_layout(layout, (h, Axis(4, 3, 2, 2, 0))) is None
    assert window_layout(Layout.tiled((1, 1, 4, 8, 8), {3: 2, 4: 2}), (h, h)) is None  # no constant stride


# ---- host: what is enumerated ---------------------------------------------------------------------------------------

SHAPES = {
    "3x3": Conv(2, 16, 24, (9, 12), (3, 3), padding=(1, 1)),
    "strided": Conv(1, 8, 16, (11, 9), (3, 3), (2, 2), (1, 1)),
    "1x1": Conv(2, 20, 8, (4, 8), (1, 1)),
    "patches": Conv(1, 3, 8, (12, 12), (4, 2), (4, 2)),
    "depthwise": Conv(1, 10, 10, (7, 6), (3, 3), padding=(1, 1), groups=10),
    "one dimension": Conv(2, 8, 12, (1, 15), (1, 3), (1, 2), (0, 1)),
}


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("conv", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_layouts_have_a_kernel(kind: str, conv: Conv, limits: DeviceLimits) -> None:
    spec = conv.spec(kind)
    labels = [v.label for v in CONVOLUTION.variants(spec, limits)]
    assert len(set(labels)) == len(labels) <= 14
    for images, weights in [*((name, "nchw") for name in LAYOUTS), *zip(LAYOUTS, [*LAYOUTS][::-1], strict=True)]:
        kernels = kernels_for(spec, uniform(spec, images, weights, images), limits)
        assert "direct.w" in {kernel.variant.name for kernel in kernels}
        for launch in (x for kernel in kernels for x in kernel.launches):
            assert all(g % i == 0 for g, i in zip(launch.global_size, launch.local_size, strict=True))
            assert np.prod(launch.local_size) <= limits.max_work_group_size


def test_each_layout_has_its_product() -> None:
    """Channels innermost, pixels innermost and dots each serve the layouts that are made for them, without panels."""
    conv = Conv(1, 64, 64, (16, 16), (3, 3), padding=(1, 1))
    for kind, images, weights, name in (
        ("conv", "nhwc", "hwio", "outer.n"),
        ("conv", "nchw", "nchw", "outer.m"),
        ("conv", "nhwc", "nhwc", "dot"),
        ("conv_grad_input", "nhwc", "nhwc", "outer.n"),
        ("conv_grad_input", "nchw", "nchw", "outer.m"),
    ):
        spec = conv.spec(kind)
        kernels = kernels_for(spec, uniform(spec, images, weights, images), CPU)
        assert any(k.variant.name == name and not k.variant.param("pack") for k in kernels if "pack" in k.variant.label)
    spec = conv.spec("conv_grad_weight")
    names = {k.variant.name for k in kernels_for(spec, uniform(spec, "nhwc", "nhwc", "hwio"), CPU)}
    assert {"outer.n", "outer.m"} <= names


def test_images_without_border_are_not_copied() -> None:
    spec = Conv(1, 32, 32, (8, 8), (1, 1)).spec("conv")
    kernels = kernels_for(spec, uniform(spec, "nhwc"), CPU)
    plain = [k for k in kernels if dict(k.variant.params).get("pack") == 0]
    assert plain
    assert all(len(k.launches) == 1 and not k.scratch for k in plain)


def test_image_objects_are_declined() -> None:
    spec = Conv(1, 8, 8, (5, 5), (3, 3)).spec("conv")
    layouts = (baselines.mnn_image(spec.shapes[0]), *uniform(spec, "nchw")[1:])
    assert not any(CONVOLUTION.build(v, spec, layouts) for v in CONVOLUTION.variants(spec, CPU))


# ---- right on every device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_enumerated_variant(device_index: int, kind: str) -> None:
    """As enumerated for this device and for a GPU, borders everywhere."""
    conv = Conv(1, 16, 48, (5, 16), (3, 3), padding=(1, 1))
    spec = conv.spec(kind)
    orders = [("nchw",), ("nhwc", "nhwc", "nhwc"), ("nhwc", "hwio", "nhwc"), ("nchw4c",)]
    for limits in (limits_of(devices()[device_index].handle), GPU_LIMITS):
        found: dict[str, Kernel] = {}
        for names in orders:
            for kernel in kernels_for(spec, uniform(spec, *names), limits):
                found.setdefault(kernel.variant.label, kernel)
        assert set(found) == {v.label for v in CONVOLUTION.variants(spec, limits)}
        check(device_index, list(found.values()))


CASES = {
    "prime": Conv(2, 5, 7, (9, 11), (3, 3), (1, 1), (1, 1)),
    "no padding": Conv(1, 8, 8, (6, 9), (2, 3)),
    "wide padding": Conv(1, 4, 6, (4, 5), (3, 3), (1, 1), (3, 2)),
    "stride 2": Conv(1, 8, 8, (9, 12), (3, 3), (2, 2), (1, 1)),
    "stride 3": Conv(1, 5, 4, (11, 13), (3, 2), (3, 3), (0, 1)),
    "stride above kernel": Conv(1, 4, 8, (7, 8), (1, 1), (2, 3)),
    "dilated": Conv(1, 6, 8, (9, 8), (3, 3), (1, 1), (2, 1), (2, 2)),
    "strided and dilated": Conv(1, 4, 4, (11, 9), (3, 3), (2, 3), (2, 2), (2, 2)),
    "groups": Conv(1, 16, 24, (6, 8), (3, 3), (2, 1), (1, 1), (1, 1), 2),
    "depthwise": Conv(2, 19, 19, (7, 8), (3, 3), (1, 1), (1, 1), (1, 1), 19),
    "depthwise, two outputs": Conv(1, 5, 10, (7, 8), (3, 3), (2, 2), (1, 1), (1, 1), 5),
    "stem": Conv(1, 3, 8, (15, 17), (7, 7), (2, 2), (3, 3)),
    "patches": Conv(2, 3, 13, (8, 9), (4, 3), (4, 3)),
    "sound": Conv(2, 8, 12, (1, 15), (1, 3), (1, 2), (0, 1)),
    "point": Conv(3, 7, 9, (1, 1), (1, 1)),
    "cut off": Conv(1, 4, 4, (8, 8), (3, 3), (3, 3)),  # the last rows and columns meet no window
}
TURNS = (("nchw",), ("nhwc", "nchw", "nchw4c"), ("nc4hw4", "oihw4o", "nhwc"))


@pytest.mark.parametrize(("name", "turn"), [(name, i % 3) for i, name in enumerate(CASES)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cases(device_index: int, kind: str, name: str, turn: int) -> None:
    """One kernel of each orientation; layouts change from case to case."""
    spec = CASES[name].spec(kind)
    limits = limits_of(devices()[device_index].handle)
    check(device_index, one_of_each(spec, uniform(spec, *TURNS[turn]), limits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("nchw", "oihw4o", "nhwc"), ("nc4hw4",), ("hwio", "nhwc", "tiled pixels")], ids=str)
def test_layouts(device_index: int, names: tuple[str, ...], kind: str) -> None:
    spec = Conv(2, 6, 10, (5, 8), (3, 3), (1, 1), (1, 1)).spec(kind)
    for limits in (limits_of(devices()[device_index].handle), GPU_LIMITS):
        check(device_index, one_of_each(spec, uniform(spec, *names), limits))


# ---- a step of several ----------------------------------------------------------------------------------------------


def step_graph() -> TrainingGraph:
    """Two convolutions and all gradients of half the squared output, strided and grouped; no loss is computed."""
    wide, deep = (
        Conv(2, 3, 8, (9, 10), (3, 3), (2, 1), (1, 1)),
        Conv(2, 8, 12, (5, 10), (1, 3), (1, 2), (0, 1), groups=2),
    )
    tensors = {
        "x": Tensor("x", (2, 3, 9, 10), role="input"),
        "w1": Tensor("w1", (8, 3, 3, 3), role="parameter"),
        "w2": Tensor("w2", (12, 4, 1, 3), role="parameter"),
        "h": Tensor("h", (2, 8, 5, 10)),
        "y": Tensor("y", (2, 12, 5, 5), role="output"),
        "dw2": Tensor("dw2", (12, 4, 1, 3), role="gradient", of="w2"),
        "dh": Tensor("dh", (2, 8, 5, 10)),
        "dw1": Tensor("dw1", (8, 3, 3, 3), role="gradient", of="w1"),
    }

    def op(kind: str, conv: Conv, *names: str) -> Op:
        operands = tuple(Operand(name) for name in names)
        return Op(names[2], kind, operands[:2], operands[2:], dict(conv.spec(kind).attrs))

    ops = [
        op("conv", wide, "x", "w1", "h"),
        op("conv", deep, "h", "w2", "y"),
        op("conv_grad_weight", deep, "y", "h", "dw2"),
        op("conv_grad_input", deep, "y", "w2", "dh"),
        op("conv_grad_weight", wide, "dh", "x", "dw1"),
    ]
    return TrainingGraph("convolutions", tensors, ops, ("y", "dw1", "dw2"))


@pytest.mark.parametrize("planned", ["solver", "mixed"])
def test_a_planned_step_agrees_with_the_interpreter(device_index: int, planned: str) -> None:
    """Through the planner, one program of all kernels and the arena; the other plan is made at random."""
    graph, runtime = step_graph(), Runtime(devices()[device_index])
    rng = np.random.default_rng(0)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in graph.by_role("input", "parameter")}
    if planned == "solver":
        made = plan(graph, FakeCosts(runtime.limits))
    else:
        made = naive_plan(graph, runtime.limits, mixed(2), any_of(1), keep=list(graph.outputs))
    weights = {name: values[name] for name in ("w1", "w2")}
    run = Executor(runtime, graph, made, weights, poison=True)
    run.step({"x": values["x"]})
    expected = reference.run(graph, values)
    for name in graph.outputs:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(run.read(name), expected[name], atol=2e-5 * scale)


# ---- nests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [CPU, GPU_LIMITS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["3x3", "strided", "depthwise", "one dimension"])
@pytest.mark.parametrize("kind", KINDS)
def test_nests_write_all_once_and_read_what_is_needed(kind: str, name: str, limits: DeviceLimits) -> None:
    conv = {
        "3x3": Conv(1, 3, 4, (3, 4), (2, 3), padding=(1, 1)),
        "strided": Conv(1, 2, 4, (5, 5), (3, 3), (2, 2), (1, 1)),
    }
    spec = conv.get(name, SHAPES[name]._replace(n=1, image=(1, 7) if name == "one dimension" else (4, 5))).spec(kind)
    for names in (("nchw",), ("nhwc", "nchw", "nhwc")):
        layouts = uniform(spec, *names)
        for kernel in one_of_each(spec, layouts, limits):
            wrote: Counter[int] = Counter()
            read: dict[int, set[int]] = {}
            written: dict[int, set[int]] = {}
            for launch in kernel.launches:
                for position in {p for _, p in launch.operands}:
                    read.setdefault(position, set()).update(touched(kernel, launch.nest, position, False, {}))
                    stores = touched(kernel, launch.nest, position, True, {})
                    written.setdefault(position, set()).update(stores)
                    if position == 2:
                        wrote.update(stores)
            label = kernel.variant.label
            assert wrote == Counter(layouts[2].offsets().ravel().tolist()), label
            for position in (0, 1):
                assert read[position] == _needed(spec, position, layouts[position]), (label, position)
                assert not written[position]
            for position in range(3, 3 + len(kernel.scratch)):
                assert read[position] <= written[position], label


def _needed(spec: OpSpec, position: int, layout: Layout) -> set[int]:
    """Elements of an input that the result depends on: where its gradient, for positive data, is not zero."""
    ones = [np.ones(s) for s in spec.shapes]
    kinds = {
        ("conv", 0): ("conv_grad_input", 2, 1),
        ("conv", 1): ("conv_grad_weight", 2, 0),
        ("conv_grad_input", 0): ("conv", 2, 1),
        ("conv_grad_input", 1): ("conv_grad_weight", 0, 2),
        ("conv_grad_weight", 0): ("conv", 1, 2),
        ("conv_grad_weight", 1): ("conv_grad_input", 0, 2),
    }
    kind, first, second = kinds[spec.kind, position]
    (gradient,) = evaluate(kind, dict(spec.attrs), [ones[first], ones[second]], [spec.shapes[position]])
    return set(layout.offsets()[gradient != 0].tolist())


def test_nest_counts_the_arithmetic() -> None:
    """Without borders of register tiles, the declared arithmetic is the convolution's own."""
    spec = Conv(1, 16, 32, (6, 16), (3, 3), padding=(1, 1)).spec("conv")
    kernels = kernels_for(spec, uniform(spec, "nhwc", "hwio", "nhwc"), CPU)
    assert {k.launches[-1].nest.flops for k in kernels if "mr=8" in k.variant.label} == {2 * 16 * 32 * 96 * 9}


@settings(max_examples=6)
@given(conv=convs, kind=st.sampled_from(KINDS), names=st.lists(st.sampled_from([*LAYOUTS]), min_size=3, max_size=3))
def test_random_convolutions(device_index: int, conv: Conv, kind: str, names: list[str]) -> None:
    spec = conv.spec(kind)
    check(device_index, one_of_each(spec, uniform(spec, *names), CPU))
