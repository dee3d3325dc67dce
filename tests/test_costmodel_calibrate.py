"""Calibration on the devices that are here, and the parts of it that need none."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest

from costmodel import device
from costmodel.caches import cpu_caches
from costmodel.calibrate import calibrate, describe_held_out
from costmodel.device import FamilyFit
from costmodel.features import FEATURES, Machine
from costmodel.microbench import designed_pairs
from costmodel.model import CostModel, spec_text
from costmodel.pool import Pool, graph_pairs, pool_of
from costmodel.runner import Bench, id_limit
from kernels.bind import relayout_spec
from kernels.spec import DeviceLimits, OpSpec, op_spec
from kernels.variants import kernels_for
from layoutopt.errors import DeviceError
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.layout import Layout

LIMITS = DeviceLimits()
MACHINE = Machine.of(LIMITS, ())
F = "float32"


def small_graph(blocks: int = 3) -> TrainingGraph:
    """x → x·W + x, in blocks with the same shapes."""
    tensors = {"x0": Tensor("x0", (1, 48, 32), role="input")}
    ops = []
    for i in range(blocks):
        weight, y, z = Tensor(f"w{i}", (1, 32, 32), role="parameter"), Tensor(f"y{i}", (1, 48, 32)), f"x{i + 1}"
        tensors |= {weight.name: weight, y.name: y, z: Tensor(z, (1, 48, 32))}
        operands = (Operand(f"x{i}"), Operand(weight.name))
        ops.append(Op(f"mm{i}", "contraction", operands, (Operand(y.name),), {"alpha": 1.0}))
        add = Expr((("add", ("x", 0), ("x", 1)),), (("t", 0),))
        ops.append(Op(f"add{i}", "pointwise", (Operand(y.name), Operand(f"x{i}")), (Operand(z),), {"expr": add}))
    return TrainingGraph("small", tensors, ops, (f"x{blocks}",))


# ---- what is measured ----------------------------------------------------------------------------------------------


def test_designed_sample_repeats_and_covers_what_there_is():
    pairs = designed_pairs(LIMITS, 3, specs=60)
    assert pairs == designed_pairs(LIMITS, 3, specs=60)
    assert pairs != designed_pairs(LIMITS, 4, specs=60)
    assert {"contraction", "pointwise"} <= {spec.kind for spec, _ in pairs}
    assert any(layout != Layout.row_major(layout.shape) for _, layouts in pairs for layout in layouts)
    assert len(set(pairs)) == len(pairs) == 60
    for spec, layouts in pairs:
        assert tuple(layout.shape for layout in layouts) == spec.shapes


def test_graph_pairs_are_its_ops_over_the_planners_candidates():
    graph = small_graph()
    found = list(graph_pairs([graph], LIMITS, 0))
    specs = {op_spec(graph, op) for op in graph.ops}
    weights = {spec: weight for (spec, _), weight in found}
    assert specs <= set(weights)
    assert all(weights[spec] == 3 for spec in specs), "three blocks share their kernels"
    relayouts = {spec for spec in weights if spec not in specs}
    assert relayout_spec((1, 48, 32), F) in relayouts
    first = {}
    for (spec, layouts), _ in found:
        first.setdefault(spec, layouts)
    for spec in specs:
        assert all(layout == Layout.row_major(layout.shape) for layout in first[spec])
    contraction = [layouts for (spec, layouts), _ in found if spec.kind == "contraction"]
    assert len(set(contraction)) == len(contraction) > 10


def test_an_in_place_pair_has_one_layout():
    tensors = {
        "p": Tensor("p", (64, 64), role="parameter"),
        "g": Tensor("g", (64, 64), role="input"),
        "x": Tensor("x", (64, 64), role="input"),
        "y": Tensor("y", (64, 64)),
        "q": Tensor("q", (64, 64)),
    }
    sub = Expr((("sub", ("x", 0), ("x", 1)),), (("t", 0),))
    view = Operand("p").view
    matmul = Op(
        "mm",
        "contraction",
        *(
            (
                (Operand("x", view.then(("reshape", (1, 64, 64)))), Operand("p", view.then(("reshape", (1, 64, 64))))),
                (Operand("y", view.then(("reshape", (1, 64, 64)))),),
            )
        ),
    )
    update = Op(
        "sgd", "pointwise", (Operand("p"), Operand("g")), (Operand("q"),), {"expr": sub}, "update", "", ((0, 0),)
    )
    graph = TrainingGraph("inplace", tensors, (matmul, update), ("y",))
    mine = [layouts for (spec, layouts), _ in graph_pairs([graph], LIMITS, 0) if spec.inplace]
    assert len(mine) > 2
    assert all(layouts[0] == layouts[2] for layouts in mine)


def test_choice_prefers_what_the_fit_predicts_best_and_never_repeats():
    pool = pool_of([small_graph()], LIMITS, MACHINE, 0, lambda: False, lambda kernel: True)
    costs = CostModel(device.load("generic-cpu"))
    seen: list[str] = []
    for _ in range(4):
        batch = pool.choose({}, costs, 12)
        assert len({(c.kernel.spec, c.kernel.variant, c.kernel.layouts) for c in batch}) == len(batch) == 12
        seen += [c.kernel.key for c in batch]
    assert len(set(seen)) == len(seen) == 48
    # Under constants by which one variant name is a hundred times cheaper, the next batch is mostly of that name.
    cheap = FamilyFit({"launches": 10.0}, 9, 0.0)
    dear = FamilyFit({"launches": 1000.0}, 9, 0.0)
    constants = {"all": dear, "contraction.outer.n": cheap, "pointwise": FamilyFit({"launches": 1.0}, 9, 0.0)}
    batch = pool.choose(constants, costs, 10)
    contractions = [c.kernel.variant.name for c in batch[:8] if c.kernel.spec.kind == "contraction"]
    assert contractions
    assert set(contractions) == {"outer.n"}


def test_pool_stops_when_told():
    calls = iter([False, False, True])
    small = pool_of([small_graph()], LIMITS, MACHINE, 0, lambda: next(calls), lambda kernel: True)
    whole = pool_of([small_graph()], LIMITS, MACHINE, 0, lambda: False, lambda kernel: True)
    assert 0 < len(small) < len(whole)


def test_a_longer_calibration_lists_more_to_choose_from():
    def listed(pairs: int) -> Pool:
        return pool_of([], LIMITS, MACHINE, 0, lambda: False, lambda kernel: True, pairs)

    few, more = listed(12), listed(40)
    assert {c.kernel.key for c in few._all} < {c.kernel.key for c in more._all}


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (OpSpec("gather", ((50, 8), (5,), (5, 8)), (F, "int32", F), 2), 50),
        (OpSpec("scatter_add", ((5, 8), (5,), (70, 8)), (F, "int32", F), 2), 70),
        (OpSpec("cross_entropy", ((5, 9), (5,), (), (5,), ()), (F, "int32", F, F, F), 2), 9),
        (OpSpec("cross_entropy_grad", ((), (5, 9), (5,), (5,), (), (5, 9)), (F, F, "int32", F, F, F), 5), 9),
        (OpSpec("nll_loss", ((5, 11), (5,), (), ()), (F, "int32", F, F), 2), 11),
        (OpSpec("nll_loss_grad", ((), (5,), (), (5, 11)), (F, "int32", F, F), 3), 11),
    ],
)
def test_ids_stay_inside_what_they_index(spec, limit):
    assert id_limit(spec) == limit


def test_cpu_caches_are_read_as_linux_lists_them(tmp_path):
    rows = [("1", "Data", "48K", "12", "0"), ("1", "Instruction", "32K", "8", "0"), ("2", "Unified", "2M", "16", "0-1")]
    for i, row in enumerate(rows):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        names = ("level", "type", "size", "ways_of_associativity", "shared_cpu_list")
        for name, value in zip((*names, "coherency_line_size"), (*row, "64"), strict=True):
            (folder / name).write_text(value + "\n")
    (tmp_path / "index7").mkdir()  # a level that a container hides
    found = cpu_caches(tmp_path)
    assert [(c.name, c.size_bytes, c.ways, c.line_bytes) for c in found] == [
        ("L1", 49152, 12, 64),
        ("L2", 2 << 20, 16, 64),
    ]
    assert cpu_caches(tmp_path / "nothing") == ()


# ---- on devices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(device_index):
    from kernels.runtime import Runtime, devices

    return Runtime(devices()[device_index])


def test_calibration_measures_predicts_and_reports(runtime, tmp_path):
    told = []
    begin = time.monotonic()
    made = calibrate(runtime, budget_s=12, graphs=(small_graph(),), progress=lambda what, share: told.append(share))
    seconds = time.monotonic() - begin
    assert seconds < 60, "a busy machine compiles slowly, but the budget stops new kernels"
    assert told == sorted(told)
    assert made.origin == "calibrated"
    assert made.features == FEATURES
    assert made.limits == runtime.limits
    assert len(made.measurements) >= 4
    for m in made.measurements.values():
        assert len(m.rounds_ns) >= 5
        slack = 1 + made.number("speed_drift")  # a correction may leave the range of what was measured
        assert min(m.rounds_ns) / slack <= m.time_ns <= max(m.rounds_ns) * slack
        assert len(m.features) == len(FEATURES)
    for fact in ("flops_per_s", "memory_bytes_per_s", "launch_s"):
        assert made.number(fact) > 0
        assert made.facts[fact].source.startswith("measured")
    assert len(made.probes["copy_memory"].rounds_ns) >= 5
    assert {name.split("_")[1] for name in made.probes if name.startswith("anchor_")} == {"compute", "memory"}
    assert 0 <= made.number("kernels_tight") <= len(made.measurements)
    report = made.held_out
    held = sum(m.held_out for m in made.measurements.values())
    assert (report is None) == (held == 0)
    if report is not None:
        assert (report.kernels, report.fitted_on) == (held, len(made.measurements) - held)
    assert describe_held_out(report).startswith("held-out error")
    device.save(made, tmp_path / "d.toml")
    again = device.load(tmp_path / "d.toml")
    assert again.hash == made.hash

    costs = CostModel(again)
    looked_up = 0
    graph = small_graph()
    for (spec, layouts), _ in graph_pairs([graph], runtime.limits, 0):
        for kernel in kernels_for(spec, layouts, runtime.limits):
            cost = costs.predict(kernel)
            assert cost.total_ns > 0
            assert np.isfinite(cost.total_ns)
            if cost.measured:
                looked_up += 1
                launches = len(kernel.launches) * made.number("launch_s") * 1e9
                assert cost.total_ns == pytest.approx(again.measurements[kernel.key].time_ns + launches)
    assert looked_up == len(made.measurements), "every measurement is found by the kernel's key"


def test_bench_runs_kernels_over_real_data_that_survives(runtime):
    bench = Bench(runtime, arena_bytes=4 << 20)
    prepared = {}
    for spec, layouts in [
        (relayout_spec((60, 36), F), (Layout.row_major((60, 36)), Layout.r_tile((60, 36), 4, 4))),
        (OpSpec("contraction", ((1, 13, 20), (1, 20, 17), (1, 13, 17)), (F,) * 3, 2, (("alpha", 1.0),)), None),
    ]:
        layouts = layouts or tuple(Layout.row_major(shape) for shape in spec.shapes)
        kernel = kernels_for(spec, layouts, runtime.limits)[0]
        prepared[spec_text(spec)] = bench.prepare(kernel)
    times = [bench.round(prepared, backwards=n % 2 == 1) for n in range(3)]
    assert all(t.keys() == prepared.keys() for t in times)
    assert all(median(t[key] for t in times) > 0 for key in prepared)
    data = runtime.download(bench._read.buffer, np.empty(bench._read.size_bytes // 4, dtype=np.float32))
    assert data.min() >= 0.5
    assert data.max() <= 1.5, "inputs are never written, never zero"


def test_a_kernel_too_large_to_measure_is_refused_in_words(runtime):
    bench = Bench(runtime, arena_bytes=1 << 20)
    shape = (1024, 1024)
    kernel = kernels_for(relayout_spec(shape, F), (Layout.row_major(shape),) * 2, runtime.limits)[0]
    assert not bench.fits(kernel)
    with pytest.raises(DeviceError, match="needs more than the 1048576 bytes set aside for measuring"):
        bench.prepare(kernel)


def test_no_time_at_all_is_said(runtime):
    with pytest.raises(DeviceError, match=r"no kernel could be measured on .* in 1e-06 s: allow more time"):
        calibrate(runtime, budget_s=1e-6, graphs=(small_graph(),))
