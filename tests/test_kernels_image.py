"""Contractions that read through images: against float64 on every device that has them, and where they are not offered.

Planning offers them for GPUs only. Here they are enumerated for a GPU that is not here and run on every device found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.device import dumps, load, loads
from costmodel.model import CostModel
from costmodel.runner import Bench
from kernels import reference
from kernels.bind import bind
from kernels.discovery import _has_texture_cache
from kernels.execute import Executor
from kernels.families.contraction import CONTRACTION
from kernels.families.contraction_image import image_variants, in_texels
from kernels.group import alike_steps
from kernels.runtime import Runtime, devices
from kernels.source import program_source
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from kernels.testing import BoundKernel, check_kernels
from kernels.variants import kernels_for
from layoutopt import planner
from layoutopt.errors import DeviceError
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout, Mode
from layoutopt.passes import run_passes
from layoutopt.plan import ArenaSlot
from simulator.simulate import simulate
from tests.graphs import linear_step, random_values
from tests.plans import naive_plan, r_tile, row_major
from tests.test_kernels_epilogue import BY_M, PROGRAMS, case
from tests.test_kernels_epilogue import arrays as epilogue_arrays

PHONE = DeviceLimits(
    kind="gpu",
    compute_units=8,
    simd_width=64,
    image_support=True,
    image_max_width=16384,
    image_max_height=16384,
    image_max_buffer_texels=1 << 27,
)
ROWS: Callable = Layout.row_major
NAMES = {"outer.n.image", "outer.m.image", "dot.image", "staged.image"}


def columns(shape: tuple[int, ...]) -> Layout:
    return Layout.row_major(shape, (0, 2, 1))


def tiles(tr: int, tc: int, **more: str) -> Callable:
    return lambda shape: Layout.r_tile(shape, tr, tc, **more)


def turned(make: Callable) -> Callable:
    """Stored with the last two axes swapped, as a weight is that its gradient or its input's gradient reads."""
    return lambda shape: make((shape[0], shape[2], shape[1])).permute((0, 2, 1))


def spec_of(shape: tuple[int, int, int, int], alpha: float = 1.0) -> OpSpec:
    b, m, k, n = shape
    return OpSpec("contraction", ((b, m, k), (b, k, n), (b, m, n)), ("float32",) * 3, 2, (("alpha", alpha),))


def image_kernels(spec: OpSpec, layouts: Iterable[Layout], limits: DeviceLimits = PHONE) -> list[Kernel]:
    """The kernels that read an operand through an image."""
    return [k for k in kernels_for(spec, tuple(layouts), limits) if k.launches[0].images]


def few(kernels: list[Kernel]) -> list[Kernel]:
    """One of each name and choice of images: compiling all of them everywhere is what these tests would wait for."""
    return list({(k.variant.name, k.launches[0].images, len(k.launches)): k for k in kernels}.values())


def check(device_index: int, kernels: list[Kernel]) -> None:
    """Kernels of one spec and layouts against the float64 interpreter."""
    info = devices()[device_index]
    if not info.image_max_buffer_texels:
        pytest.skip(f"{info.label} has no images over buffers")
    spec, layouts = kernels[0].spec, kernels[0].layouts
    inputs = epilogue_arrays(spec, layouts)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    expected = reference.evaluate(spec.kind, dict(spec.attrs), exact, spec.shapes[spec.inputs :])
    check_kernels(info.handle, kernels, inputs, expected, rtol=2e-6 * max(4, spec.shapes[0][2] ** 0.5))


# ---- right on every device ------------------------------------------------------------------------------------------

ORIENTATIONS = {"Y": (False, False), "dX": (False, True), "dW": (True, False)}
"""Which of a and b are stored turned: Y = X·W, dX = dY·Wᵀ, dW = Xᵀ·dY."""
STORED = {
    "row-major": (ROWS, ((2, 20, 24, 36), (1, 132, 52, 68))),
    "R-Tile 4x4": (tiles(4, 4), ((1, 13, 20, 23), (2, 36, 28, 44))),
    "R-Tile 8x4": (tiles(8, 4, inner="col", outer="col"), ((1, 35, 40, 29), (2, 12, 16, 20))),
    "R-Tile 4x16": (tiles(4, 16), ((1, 35, 48, 29), (1, 20, 36, 44))),
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("stored", STORED)
def test_orientations(device_index: int, stored: str, orientation: str) -> None:
    """Forward, gradient of the input and gradient of the weight, on sizes that the stored layout lets images read."""
    make, shapes = STORED[stored]
    makes = [turned(make) if turn else make for turn in ORIENTATIONS[orientation]]
    names: set[str] = set()
    for shape in shapes:
        spec = spec_of(shape, alpha=0.5)
        layouts = [make_(s) for make_, s in zip((*makes, make), spec.shapes, strict=True)]
        kernels = image_kernels(spec, layouts)
        names |= {k.variant.name for k in kernels}
        check(device_index, few(kernels))
    assert len(names) >= 2, "a direct and the staged variant at least"


def test_odd_sums(device_index: int) -> None:
    """What is summed is no multiple of four: the operand whose vectors run along it stays a buffer."""
    for shape, a, b in (((2, 13, 19, 24), ROWS, ROWS), ((1, 7, 1, 8), ROWS, ROWS), ((1, 24, 17, 13), columns, columns)):
        spec = spec_of(shape)
        kernels = image_kernels(spec, (a(spec.shapes[0]), b(spec.shapes[1]), ROWS(spec.shapes[2])))
        assert len({k.launches[0].images for k in kernels}) == 1
        check(device_index, few(kernels))


def test_every_enumerated_variant(device_index: int) -> None:
    """A size whose borders are partial tiles in every direction, in layouts that give each variant both its images."""
    spec = spec_of((1, 164, 252, 92))
    ran: dict[str, Kernel] = {}
    for a, b in ((ROWS, ROWS), (columns, columns), (ROWS, columns), (tiles(4, 4), tiles(4, 4))):
        for kernel in image_kernels(spec, (a(spec.shapes[0]), b(spec.shapes[1]), ROWS(spec.shapes[2]))):
            if len(kernel.launches[0].images) == 2 and kernel.variant.label not in ran:
                ran[kernel.variant.label] = kernel
    assert set(ran) == {v.label for v in CONTRACTION.variants(spec, PHONE) if v.name in NAMES}
    for layouts in {kernel.layouts for kernel in ran.values()}:
        check(device_index, [kernel for kernel in ran.values() if kernel.layouts == layouts])


@pytest.mark.parametrize("name", PROGRAMS)
def test_epilogues(device_index: int, name: str) -> None:
    """Extra operands stay buffers, in whatever layout; sums that are added up by a second launch too."""
    for a, b, shape in ((ROWS, ROWS, (2, 12, 64, 20)), (tiles(4, 4), tiles(4, 4), (1, 13, 20, 23))):
        spec, layouts = case(name, shape, a, b)
        kernels = image_kernels(spec, layouts)
        assert {k.variant.name for k in kernels} >= {"staged.image"}
        check(device_index, few(kernels))


def test_vectors_wider_than_a_texel(device_index: int) -> None:
    """As a CPU's register tiles would be: pieces of four joined to vectors of 8 and 16."""
    spec = spec_of((1, 20, 48, 52))
    own = {"t": 2, "s": 2, "gr": 1, "gc": 1, "image": 27}
    for name, sizes, b in (
        ("outer.n.image", {"mr": 4, "nv": 1, "v": 16, "x": 4}, ROWS),
        ("outer.n.image", {"mr": 3, "nv": 2, "v": 8, "x": 1}, tiles(4, 4)),
        ("dot.image", {"mr": 3, "nr": 4, "v": 16}, columns),
        ("dot.image", {"mr": 2, "nr": 3, "v": 8}, turned(tiles(4, 4))),
    ):
        layouts = (ROWS(spec.shapes[0]), b(spec.shapes[1]), ROWS(spec.shapes[2]))
        kernel = CONTRACTION.build(KernelVariant("contraction", name, (*(sizes | own).items(),)), spec, layouts)
        assert kernel is not None
        assert kernel.launches[0].images == ((1,) if sizes.get("x") == 1 else (0, 1))
        check(device_index, [kernel])


def test_one_operand_through_an_image(device_index: int) -> None:
    """The other where it lies: in odd columns, broadcast, or begun where no texel begins."""
    b, m, k, n = 2, 11, 20, 24
    head = Layout.row_major((b, m, 4 + k)).slice(2, 2, 2 + k)
    shared = Layout.row_major((b, m, 1)).expand((b, m, k))
    assert head is not None
    assert shared is not None
    spec = spec_of((b, m, k, n))
    for a in (Layout.row_major((b, m, k), (1, 2, 0)), head, shared):
        kernels = image_kernels(spec, (a, ROWS((b, k, n)), ROWS((b, m, n))))
        assert {k.launches[0].images for k in kernels} == {(1,)}
        check(device_index, few(kernels))


def test_heads_of_a_larger_matrix(device_index: int) -> None:
    """Queries and keys as they lie in one matrix of three: images begin inside its storage, their padding holds NaN."""
    batch, heads, seq, dim = 2, 3, 7, 8
    stored = Layout.row_major((batch * seq, 3 * heads * dim))

    def part(number: int) -> Layout:
        own = stored.slice(1, number * heads * dim, (number + 1) * heads * dim)
        four = own.reshape((batch, seq, heads, dim)) if own else None
        merged = four.permute((0, 2, 1, 3)).reshape((batch * heads, seq, dim)) if four else None
        assert merged is not None
        return merged

    spec = spec_of((batch * heads, seq, dim, seq), alpha=0.25)
    kernels = image_kernels(spec, (part(0), part(1).permute((0, 2, 1)), ROWS(spec.shapes[2])))
    assert {"dot.image", "staged.image"} <= {k.variant.name for k in kernels}
    assert all(k.launches[0].images == (0, 1) for k in kernels if k.variant.name == "dot.image")
    check(device_index, kernels)


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float32", "float16")], ids="-".join)
def test_halves(device_index: int, dtypes: tuple[str, str]) -> None:
    """Operands stored as float16 are read as float32, by the texture unit."""
    runtime = Runtime(devices()[device_index], profiling=True)
    if not runtime.info.image_max_buffer_texels:
        pytest.skip(f"{runtime.info.label} has no images over buffers")
    b, m, k, n = 2, 13, 20, 28
    spec = replace(spec_of((b, m, k, n)), dtypes=(*dtypes, "float32"))
    layouts = (ROWS((b, m, k)), tiles(4, 4)((b, k, n)), ROWS((b, m, n)))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype(d) for s, d in zip(spec.shapes[:2], dtypes, strict=True)]
    buffers = []
    for layout, value in zip(layouts, values, strict=False):
        storage = np.full(layout.size_elems, np.nan, value.dtype)
        storage[layout.linear_offsets()] = value
        buffers.append(runtime.allocate(storage.nbytes))
        runtime.upload(buffers[-1], storage)
    out = np.empty(layouts[2].size_elems, np.float32)
    buffers.append(runtime.allocate(out.nbytes))
    expected = values[0].astype(np.float64) @ values[1].astype(np.float64)
    kernels = [x for x in few(image_kernels(spec, layouts)) if len(x.launches) == 1 and x.launches[0].images == (0, 1)]
    assert kernels
    for kernel in kernels:
        runtime.fill(buffers[2], 0xFF)
        BoundKernel(runtime, kernel, buffers).run()
        got = runtime.download(buffers[2], out)[layouts[2].linear_offsets()]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=kernel.variant.label)


# ---- in a plan ------------------------------------------------------------------------------------------------------


def prefer_images(offered: Iterable[Kernel]) -> Kernel | None:
    """The first that reads through images, else the first."""
    listed = list(offered)
    return next((k for k in listed if k.launches[0].images), listed[0] if listed else None)


def step() -> TrainingGraph:
    return run_passes(linear_step(3, 4, 8, 12))[0]


@pytest.mark.parametrize("reuse", [False, True], ids=["apart", "memory reused"])
@pytest.mark.parametrize("pick_layout", [row_major, r_tile], ids=["row-major", "r-tile"])
def test_a_plan_runs(device_index: int, pick_layout: Callable, reuse: bool) -> None:
    """Steps whose products read through images the buffers that other kernels have written, or the host."""
    runtime, graph = Runtime(devices()[device_index]), step()
    if not runtime.info.image_max_buffer_texels:
        pytest.skip(f"{runtime.info.label} has no images over buffers")
    limits = replace(PHONE, base_align_bytes=runtime.limits.base_align_bytes)
    plan = naive_plan(graph, limits, pick_layout, prefer_images, reuse=reuse)
    values = random_values(graph)
    names = [t.name for t in graph.by_role("parameter", "state")]
    run = Executor(runtime, graph, plan, {n: values[n] for n in names}, limits=limits, poison=True)
    reading = [s for s in run.steps if any(launch.images for launch in s.kernel.launches)]
    assert len(reading) >= 3
    assert not {s.label for s in reading} & set(run.shared)
    inputs = {t.name: values[t.name] for t in graph.by_role("input")}
    new = {op.inputs[inp].tensor: op.outputs[out].tensor for op in graph.ops for out, inp in op.inplace}
    known = {name: values[name] for name in names}
    for _ in range(2):
        run.step(inputs)
        expected = reference.run(graph, known | inputs)
        known = {name: expected[new[name]] for name in names}
        assert run.loss() == pytest.approx(float(expected[graph.outputs[0]]), rel=1e-5)
    for name in names:
        np.testing.assert_allclose(run.read(name), known[name], rtol=1e-4, atol=1e-5, err_msg=name)
    run.close()
    run.close()


def test_equal_kernels_are_not_stacked() -> None:
    """An image is no place in the arena that a table could give."""
    graph = step()
    plan = naive_plan(graph, PHONE, row_major, prefer_images)
    steps = [s for s in bind(graph, plan, PHONE) if any(launch.images for launch in s.kernel.launches)]
    twice = [replace(s, slots=tuple(f"{slot}'{copy}" for slot in s.slots)) for s in steps[:1] for copy in (1, 2)]
    slots = {name: ArenaSlot(name, i << 20, 1 << 20, 0, 1) for i, name in enumerate(twice[0].slots + twice[1].slots)}
    assert [len(run) for run in alike_steps(twice, slots)] == [1, 1]


def test_measuring(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    if not runtime.info.image_max_buffer_texels:
        pytest.skip(f"{runtime.info.label} has no images over buffers")
    bench = Bench(runtime, arena_bytes=4 << 20)
    spec = spec_of((1, 20, 24, 36))
    kernels = image_kernels(spec, map(ROWS, spec.shapes))[:2]
    prepared = {k.variant.label: bench.prepare(k) for k in kernels}
    assert set(bench.round(prepared)) == set(prepared)
    bench.close()


def test_an_image_that_is_too_long_is_refused(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    buffer = runtime.allocate(1024)
    with pytest.raises(DeviceError, match="refuses an image of 65 texels over a buffer"):
        runtime.image(buffer, 65)


# ---- what they are taken to cost ------------------------------------------------------------------------------------


def plain_label(label: str) -> str:
    """Of the kernel that does the same with buffers."""
    return re.sub(r",image=\d+", "", label.replace(".image", ""))


def test_a_phone_is_planned_with_images() -> None:
    """By the facts of an Adreno: buffers pass its first cache by, and textures are read many times as fast."""
    phone = load("adreno-740")
    blind = replace(phone, limits=replace(phone.limits, image_max_buffer_texels=0))
    costs = CostModel(phone)
    spec = spec_of((1, 512, 384, 512))
    layouts = tuple(map(ROWS, spec.shapes))
    priced = {k.variant.label: costs.predict(k).memory_ns for k in kernels_for(spec, layouts, phone.limits)}
    both = {k.variant.label for k in image_kernels(spec, layouts, phone.limits) if len(k.launches[0].images) == 2}
    one = {k.variant.label for k in image_kernels(spec, layouts, phone.limits)} - both
    assert both
    assert all(priced[label] < priced[plain_label(label)] for label in both)
    assert all(priced[label] == priced[plain_label(label)] for label in one)
    graph = step()
    made = planner.plan(graph, costs, "rowmajor")
    assert any(".image(" in planned.variant for planned in made.ops)
    report = simulate(graph, made, phone)
    assert report.levels == ("texture L1", "L2")
    assert report.total.hits[0] + report.total.misses[0] > 0
    assert simulate(graph, planner.plan(graph, CostModel(blind), "rowmajor"), blind).levels == ("L2",)


def test_devices_without_a_texture_cache_price_images_like_buffers() -> None:
    model = load("generic-cpu")
    gpu = replace(model, limits=replace(PHONE, compute_units=model.limits.compute_units))
    costs = CostModel(gpu)
    spec = spec_of((1, 128, 64, 128))
    priced = {k.variant.label: costs.predict(k) for k in kernels_for(spec, tuple(map(ROWS, spec.shapes)), gpu.limits)}
    images = [label for label in priced if ".image" in label]
    assert images
    assert all(priced[label] == priced[plain_label(label)] for label in images)


def test_models_without_the_entry_keep_their_hash() -> None:
    """Plans made before devices were asked for images over buffers still apply."""
    model = load("generic-cpu")
    assert not model.limits.image_max_buffer_texels
    text = dumps(model)
    older = "\n".join(line for line in text.splitlines() if "image_max_buffer_texels" not in line)
    assert older != text
    assert loads(older).hash == model.hash
    assert replace(model, limits=replace(model.limits, image_max_buffer_texels=65536)).hash != model.hash


# ---- where they are offered, and accepted ---------------------------------------------------------------------------


def test_only_gpus_with_images_over_buffers_are_offered_them() -> None:
    spec = spec_of((1, 512, 512, 512))
    plain = CONTRACTION.variants(spec, replace(PHONE, image_max_buffer_texels=0))
    assert {v.name for v in CONTRACTION.variants(spec, PHONE)} - {v.name for v in plain} == NAMES
    without = (
        replace(PHONE, kind="cpu"),
        replace(PHONE, image_support=False),
        replace(PHONE, image_max_buffer_texels=0),
        replace(PHONE, base_align_bytes=8),
    )
    for limits in without:
        assert not {v.name for v in CONTRACTION.variants(spec, limits)} & NAMES
        assert not list(image_variants(plain, limits))


@pytest.mark.parametrize(
    ("platform", "device", "offered"),
    [
        ("QUALCOMM", "QUALCOMM", True),
        ("ARM", "ARM", True),
        ("Mesa/X.org", "Qualcomm", True),
        ("NVIDIA Corporation", "NVIDIA Corporation", False),
        ("Intel(R) Corporation", "Intel(R) Corporation", False),
        ("The pocl project", "GenuineIntel", False),
    ],
)
def test_planning_is_offered_them_where_images_have_a_cache(platform: str, device: str, offered: bool) -> None:
    assert _has_texture_cache(SimpleNamespace(vendor=platform), SimpleNamespace(vendor=device)) == offered


def test_devices_here_say_how_long_their_images_are(device_index: int) -> None:
    info = devices()[device_index]
    assert info.limits.image_max_buffer_texels in (0, info.image_max_buffer_texels)
    assert not info.limits.image_support or info.image_max_buffer_texels >= 65536, "the least that OpenCL 1.2 allows"


def test_labels_name_the_longest_image() -> None:
    """The limit is the variant's, so that a plan for long images is not run where they are short."""
    spec = spec_of((1, 512, 512, 512))
    small = replace(PHONE, image_max_buffer_texels=65536)
    layouts = tuple(map(ROWS, spec.shapes))
    assert image_kernels(spec, layouts, small), "65,536 texels hold 512 x 512 values"
    for shape in ((1, 512, 1024, 512), (1, 1024, 512, 512)):
        larger = spec_of(shape)
        read = {k.launches[0].images for k in image_kernels(larger, map(ROWS, larger.shapes), small)}
        assert all(prodsize(larger.shapes[p]) <= 4 << 16 for images in read for p in images)
    labels = [{v.label for v in CONTRACTION.variants(spec, x) if v.name in NAMES} for x in (PHONE, small)]
    assert not labels[0] & labels[1]


def prodsize(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def test_vectors_of_four_must_be_texels() -> None:
    p = {"image": 27}
    shape = (1, 12, 20)
    assert in_texels(ROWS(shape), 2, p)
    assert not in_texels(ROWS(shape), 1, p), "not contiguous"
    assert not in_texels(ROWS((1, 12, 21)), 2, p), "rows begin within a texel"
    assert in_texels(tiles(4, 4)((1, 13, 21)), 2, p), "whole tiles are stored"
    assert not in_texels(tiles(3, 3)((1, 12, 21)), 2, p)
    pitch = Layout.build((1, 12, 18), [Mode(0, 1, 240), Mode(1, 12, 20), Mode(2, 18, 1)], (238,), (0,))
    assert not in_texels(pitch, 2, p), "the last texel would end outside"
    begun = Layout.build(shape, [Mode(0, 1, 240), Mode(1, 12, 20), Mode(2, 20, 1)], (244,), (2,))
    assert not in_texels(begun, 2, p)
    assert not in_texels(ROWS((1, 1, 1)).expand(shape), 2, p)
    assert not in_texels(ROWS(shape), 2, {"image": 5}), "60 texels"
    assert in_texels(ROWS(shape), 2, {"image": 6})
    assert not in_texels(ROWS(shape), 2, {}), "a variant that reads buffers"


def test_images_are_read_by_vectors_and_never_written() -> None:
    """In the nests, which the cost model and the simulator count, and in the text that is compiled."""
    spec = spec_of((2, 36, 40, 28))
    seen = set()
    for a, b in product((ROWS, columns, tiles(4, 4)), repeat=2):
        for kernel in image_kernels(spec, (a(spec.shapes[0]), b(spec.shapes[1]), ROWS(spec.shapes[2]))):
            launch = kernel.launches[0]
            seen.add(kernel.variant.name)
            names = {position: name for name, position in launch.operands}
            source = program_source(kernel, launch)
            for phase in launch.nest.phases:
                for access in phase.accesses:
                    if access.operand in launch.images:
                        assert access.width == 4
                        assert not access.write
                        assert in_texels(kernel.operand_layout(access.operand), access.axis, {"image": 27})
            for position in launch.images:
                assert f"image1d_buffer_t {names[position]}_image" in source
                assert f"define {names[position]}_AT" not in source
    assert seen == NAMES


def test_other_dtypes_keep_their_buffers() -> None:
    spec = replace(spec_of((1, 8, 8, 8)), dtypes=("int32", "float32", "float32"))
    layouts = tuple(map(ROWS, spec.shapes))
    for variant in CONTRACTION.variants(spec, PHONE):
        if variant.name in NAMES:
            assert CONTRACTION.build(variant, spec, layouts) is None


def test_extra_operands_are_never_images() -> None:
    spec, layouts = case("residual", (1, 12, 16, 20), extras={0: BY_M})
    for kernel in image_kernels(spec, layouts):
        assert all(set(launch.images) <= {0, 1} for launch in kernel.launches)
