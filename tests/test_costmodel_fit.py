"""The fit on made-up times with a known answer, and predictions that must hold whatever was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_costmodel_features import copy_nest, kernel

from costmodel import device
from costmodel.calibrate import HELD_OUT_SHARE, describe_held_out, is_held_out
from costmodel.device import DeviceModel, Fact, HeldOut, Measurement
from costmodel.features import FEATURES
from costmodel.fit import Sample, fit, judge, levels, predicted_ns, samples_of
from costmodel.model import CostModel, spec_text
from kernels.spec import KernelVariant
from layoutopt.errors import DeviceError
from layoutopt.layout import Layout

NAMES = ("launches", "flops", "bytes")
KINDS = (("layer_norm", 0.1), ("softmax", 1.0))


def made_up(label: str, ns_per: tuple[float, ...], count: int, seed: int, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        x = (1.0, 10 ** rng.uniform(3, 7), 10 ** rng.uniform(3, 7))
        y = float(np.dot(x, ns_per) * np.exp(noise * rng.standard_normal()))
        out.append(Sample(label, "", x, y))
    return out


def test_long_kernels_alone_do_not_say_that_launches_are_long():
    rng = np.random.default_rng(5)
    samples = [Sample("f.n", "", (1.0, flops, 1e3), 0.5 * flops) for flops in 10 ** rng.uniform(8.5, 10, 12)]
    got = fit(samples, NAMES)
    assert sum(predicted_ns(got, ("f.n", "f"), (1.0, 1e3, 1e3), NAMES).values()) < 1e6, "the least sample took 1e8 ns"


def test_fit_recovers_what_the_times_were_made_of():
    truth = (3000.0, 0.02, 0.3)
    got = fit(made_up("f.n(v=4)", truth, 60, 1), NAMES)
    for level in ("all", "f", "f.n", "f.n(v=4)"):
        found = [got[level].ns_per.get(n, 0.0) for n in NAMES]
        assert found == pytest.approx(truth, rel=0.02), level
        assert got[level].samples == 60
        assert got[level].median_error < 0.01


def test_fit_is_not_carried_away_by_outliers():
    truth = (3000.0, 0.02, 0.3)
    samples = made_up("f.n", truth, 80, 2, noise=0.05)
    spoilt = [replace(s, ns=s.ns * 20) if i % 12 == 0 else s for i, s in enumerate(samples)]
    got = fit(spoilt, NAMES)["all"].ns_per
    assert [got[n] for n in NAMES[1:]] == pytest.approx(truth[1:], rel=0.2)


def test_coefficients_are_never_negative():
    rng = np.random.default_rng(3)
    samples = [Sample(f"f.n{i % 3}", "", tuple(rng.uniform(0, 9, 3)), float(rng.uniform(1, 9))) for i in range(60)]
    for found in fit(samples, NAMES).values():
        assert all(value > 0 for value in found.ns_per.values())


def test_no_prediction_is_zero():
    """A kernel that has none of what the fit found to cost anything still costs a launch."""
    samples = [Sample("f.n", "", (1.0, 0.0, x), 10.0 * x) for x in (10.0, 20.0, 40.0, 80.0, 160.0)]
    got = fit(samples, NAMES)
    assert sum(predicted_ns(got, levels("f.n"), (1.0, 0.0, 0.0), NAMES).values()) >= 50.0


def test_what_a_variant_was_not_seen_to_do_costs_what_the_family_says():
    """A variant measured only on kernels without bytes is still charged for bytes."""
    family = made_up("f.a(v=1)", (1000.0, 0.05, 0.2), 60, 10)
    dry = [Sample("f.b(v=1)", "", (1.0, x, 0.0), 1000.0 + 0.05 * x) for x in (1e4, 1e5, 3e5, 1e6, 3e6)]
    got = fit(family + dry, NAMES)
    assert "f.b(v=1)" in got
    guess = sum(predicted_ns(got, levels("f.b(v=1)"), (1.0, 1e4, 1e6), NAMES).values())
    assert guess == pytest.approx(1000 + 500 + 2e5, rel=0.1)


def test_kinds_of_one_kernel_have_their_own_fit():
    quick, slow = ([replace(s, kind=kind) for s in made_up("rows.item(v=4)", (9e2, k, k), 20, 9)] for kind, k in KINDS)
    got = fit(quick + slow, NAMES)
    x = (1.0, 1e6, 1e6)
    for kind, k in KINDS:
        own = levels("rows.item(v=4)", kind)
        assert own[:2] == (f"rows.item:{kind}(v=4)", f"rows.item:{kind}")
        assert sum(predicted_ns(got, own, x, NAMES).values()) == pytest.approx(np.dot(x, (9e2, k, k)), rel=0.1)
    # A kind that was never measured is priced by the kernel's other kinds, in between.
    other = sum(predicted_ns(got, levels("rows.item(v=4)", "reduce"), x, NAMES).values())
    assert 2e5 < other < 2e6


def test_few_samples_lean_on_the_family():
    family = made_up("f.a(v=1)", (1000.0, 0.05, 0.2), 60, 4)
    lone = made_up("f.b(v=1)", (1000.0, 0.05, 0.2), 2, 5)
    got = fit(family + lone, NAMES)
    assert "f.b" not in got
    guess = sum(predicted_ns(got, levels("f.b(v=1)"), lone[0].features, NAMES).values())
    assert guess == pytest.approx(lone[0].ns, rel=0.1)
    # Four samples of a variant twice as slow correct the family's prediction.
    slow = made_up("f.c(v=1)", (2000.0, 0.10, 0.4), 8, 6)
    got = fit(family + slow[:4], NAMES)
    errors = [abs(sum(predicted_ns(got, levels("f.c(v=1)"), s.features, NAMES).values()) / s.ns - 1) for s in slow[4:]]
    assert np.median(errors) < 0.25


def test_fit_is_deterministic_whatever_the_order():
    samples = made_up("f.n", (3000.0, 0.02, 0.3), 40, 7, noise=0.2) + made_up("g.n", (1.0, 0.2, 0.1), 40, 8, noise=0.2)
    assert fit(samples, NAMES) == fit(samples[::-1], NAMES)


def test_no_samples_no_constants():
    assert fit([], NAMES) == {}
    assert predicted_ns({}, levels("f.n"), (1.0, 1.0, 1.0), NAMES) == {}


def test_parameters_that_follow_from_the_shape_do_not_split_the_fit():
    assert levels("contraction.outer.n(mr=8,nv=2,v=16,t=3,s=9)") == (
        "contraction.outer.n(mr=8,nv=2,v=16)",
        "contraction.outer.n",
        "contraction",
    )
    assert levels("iota.plain()") == ("iota.plain()", "iota.plain", "iota")


# ---- the held-out report -------------------------------------------------------------------------------------------


def measurements(count: int, seed: int = 0) -> dict[str, Measurement]:
    samples = made_up("f.n(v=4)", (3000.0, 0.02, 0.3), count, seed, noise=0.1)
    return {
        f"{i:04x}": Measurement(s.label, f"spec {i % 7}", (int(s.ns),) * 3, s.features, is_held_out(f"{i:04x}", 0))
        for i, s in enumerate(samples)
    }


def test_held_out_kernels_do_not_touch_the_fit():
    """Times of held-out kernels may be anything: the constants that are judged stay the same, the report does not."""
    honest = measurements(200)
    wild = {k: replace(m, rounds_ns=(1,)) if m.held_out else m for k, m in honest.items()}
    assert sum(m.held_out for m in honest.values()) >= 20
    assert fit(samples_of(honest.values(), held_out=False), NAMES) == fit(
        samples_of(wild.values(), held_out=False), NAMES
    )
    before, after = judge(honest, NAMES), judge(wild, NAMES)
    assert before is not None
    assert after is not None
    assert before.median_error < 0.15
    assert after.median_error > 10
    assert before.fitted_on + before.kernels == 200


def test_report_is_what_a_person_would_compute():
    """Ten exact kernels to fit, four held out that are off by known factors."""
    exact = {f"a{i}": Measurement("f.n", "s", (100 * (i + 1),), (0.0, float(i + 1), 0.0)) for i in range(10)}
    off = {
        f"b{i}": Measurement("f.n", "t", (int(100 * (i + 1) * factor),), (0.0, float(i + 1), 0.0), True)
        for i, factor in enumerate((1.0, 1.0, 2.0, 4.0))
    }
    got = judge(exact | off, NAMES)
    assert got is not None
    # Predictions 100, 200, 300, 400 of 100, 200, 600, 1600: errors 0, 0, 1/2, 3/4.
    assert got.median_error == pytest.approx(0.25, abs=0.01)
    assert got.p90_error == pytest.approx(0.675, abs=0.01)
    assert got.within_10 == got.within_20 == 0.5
    assert got.tau == got.tau_within_spec == 1.0
    assert (got.kernels, got.fitted_on) == (4, 10)
    line = describe_held_out(got)
    assert "4 kernels (fitted on 10 others)" in line
    assert "within 10%: 50%" in line


def test_no_report_without_held_out_kernels():
    kept = {k: replace(m, held_out=False) for k, m in measurements(20).items()}
    assert judge(kept, NAMES) is None
    assert "none" in describe_held_out(None)


def test_a_fifth_is_held_out_by_key_and_seed_alone():
    keys = [f"{i:024x}" for i in range(4000)]
    share = np.mean([is_held_out(k, 0) for k in keys])
    assert abs(share - HELD_OUT_SHARE) < 0.03
    assert [is_held_out(k, 0) for k in keys] == [is_held_out(k, 0) for k in keys]
    assert [is_held_out(k, 0) for k in keys] != [is_held_out(k, 1) for k in keys]


# ---- prediction ----------------------------------------------------------------------------------------------------


def copy_kernel(m: int, n: int, order: tuple[int, int] = (0, 1)):
    return replace(
        kernel(copy_nest(m, n), Layout.row_major((m, n)), Layout.row_major((m, n), order)),
        variant=KernelVariant("test", "copy", (("v", 16),)),
    )


def calibrated(kernels, ns) -> DeviceModel:
    from costmodel.features import features

    base = device.load("generic-cpu")
    machine = CostModel(base).machine
    records = {
        k.key: Measurement(k.variant.label, spec_text(k.spec), (int(t), int(t) + 2, int(t) + 9), features(k, machine))
        for k, t in zip(kernels, ns, strict=True)
    }
    return replace(base, features=FEATURES, measurements=records, constants=fit(samples_of(records.values()), FEATURES))


SIZES = [(m, n) for m in (16, 64, 100, 256) for n in (64, 128, 1024)]


def test_measured_kernels_are_looked_up_and_itemised():
    kernels = [copy_kernel(m, n) for m, n in SIZES]
    model = CostModel(calibrated(kernels, [5000 + m * n for m, n in SIZES]))
    cost = model.predict(copy_kernel(64, 1024))
    assert cost.measured
    assert cost.total_ns == 5000 + 64 * 1024 + 2 + 20000, "the median, and the launch that no event shows"
    assert cost.compute_ns + cost.memory_ns + cost.launch_ns == pytest.approx(cost.total_ns)
    other = model.predict(copy_kernel(64, 2048))
    assert not other.measured
    assert other.compute_ns + other.memory_ns + other.launch_ns == pytest.approx(other.total_ns)
    assert other.total_ns == pytest.approx(25000 + 64 * 2048, rel=0.1)
    assert model.fitted_by(copy_kernel(1, 64)) == "test.copy:relayout(v=16)", "the empty program is a copy"
    # The same shapes in another layout were not measured.
    assert not model.predict(copy_kernel(64, 1024, (1, 0))).measured


@pytest.mark.parametrize("source", ["adreno-740", "generic-cpu", "calibrated"])
def test_more_bytes_are_never_cheaper(source):
    if source == "calibrated":
        rng = np.random.default_rng(0)
        kernels = [copy_kernel(m, n) for m, n in SIZES]
        made = calibrated(kernels, [(3000 + m * n) * np.exp(0.3 * rng.standard_normal()) for m, n in SIZES])
        model = CostModel(replace(made, measurements={}))
    else:
        model = CostModel(device.load(source))
    totals = [model.predict(copy_kernel(m, 64)).total_ns for m in (8, 16, 32, 64, 128, 1024, 4096, 65536)]
    assert totals == sorted(totals)
    assert totals[-1] > 2 * totals[0]


MEASURED = [name for name in device.list_builtin() if device.load(name).origin == "calibrated"]


@pytest.mark.parametrize("name", MEASURED)
def test_measured_models_that_ship(name):
    """Raw repetitions, a fit that its own file's samples give, an error on kernels it did not see."""
    model = device.load(name)
    assert model.features == FEATURES, "calibrate that device anew: features have changed"
    assert model.held_out is not None
    assert model.held_out.kernels > 80
    assert model.held_out.covered_90 >= 0.85
    assert all(len(m.rounds_ns) > 1 for m in model.measurements.values())
    assert model.constants.keys() == fit(samples_of(model.measurements.values()), FEATURES).keys()
    assert model.probes["copy_memory"].per_s > 1e9
    assert CostModel(model).predict(copy_kernel(1024, 4096)).total_ns > 0


def test_the_devices_that_were_measured_ship():
    assert {"nvidia-h200", "pocl-cpu-3.0", "pocl-cpu-3.1"} <= set(MEASURED)


@pytest.mark.parametrize("name", sorted(set(device.list_builtin()) - set(MEASURED)))
def test_roofline_without_a_calibration(name):
    facts = device.load(name)
    model = CostModel(facts)
    cost = model.predict(copy_kernel(1024, 4096))
    floor_ns = 3 * 1024 * 4096 * 4 / facts.number("memory_bytes_per_s") * 1e9
    # One work group: a single compute unit's share of the bandwidth.
    assert cost.total_ns >= floor_ns
    assert not cost.measured
    assert model.fitted_by(copy_kernel(8, 64)) == "roofline"
    assert model.hash == facts.hash
    contiguous, scattered = (model.predict(copy_kernel(1024, 1024, order)).total_ns for order in ((0, 1), (1, 0)))
    assert contiguous <= scattered


def test_predictions_repeat_and_leave_the_model_alone():
    model = calibrated([copy_kernel(m, n) for m, n in SIZES], [5000 + m * n for m, n in SIZES])
    before = model.hash
    first = [CostModel(model).predict(copy_kernel(m, 96)) for m in (1, 7, 70)]
    assert first == [CostModel(model).predict(copy_kernel(m, 96)) for m in (1, 7, 70)]
    assert device.loads(device.dumps(model)).hash == before


def test_a_model_without_the_facts_of_a_roofline_is_refused():
    bare = replace(device.load("generic-cpu"), facts={"launch_s": Fact(1e-6, "tests", "high")})
    with pytest.raises(DeviceError, match="states no number 'flops_per_s'"):
        CostModel(bare)


def test_the_report_survives_the_file(tmp_path):
    report = judge(measurements(100), NAMES)
    assert isinstance(report, HeldOut)
    kept = replace(calibrated([copy_kernel(8, 64)] * 1, [9]), held_out=report)
    device.save(kept, tmp_path / "m.toml")
    assert device.load(tmp_path / "m.toml").held_out == report


def test_what_was_not_measured_has_to_promise_more():
    kernels = [copy_kernel(m, n) for m, n in SIZES]
    model = calibrated(kernels, [5000 + m * n for m, n in SIZES])
    constants = {key: replace(one, error_90=0.329 if key == "all" else 0.1645) for key, one in model.constants.items()}
    model = replace(model, constants=constants)
    plain, careful, twice = (CostModel(model, caution=c) for c in (0.0, 1.0, 2.0))
    other = copy_kernel(70, 96)
    inside = [m.predict(other).total_ns - 20000 for m in (plain, careful, twice)]  # the launch is known
    ratio = inside[1] / inside[0]
    assert careful.fitted_by(other) != "all"
    assert ratio == pytest.approx(np.exp(0.1), rel=1e-3)  # a standard deviation of its own level
    assert inside[2] / inside[0] == pytest.approx(ratio**2, rel=1e-3)
    cost = careful.predict(other)
    assert cost.total_ns == pytest.approx(cost.compute_ns + cost.memory_ns + cost.launch_ns)
    assert careful.predict(kernels[0]) == plain.predict(kernels[0])
    assert careful.predict(kernels[0]).measured
    assert CostModel(model).predict(other) == careful.predict(other)
    assert careful.interval(other) == plain.interval(other)
