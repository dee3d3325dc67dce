"""Corrections and intervals on made-up times whose law and noise are known."""

from __future__ import annotations

from dataclasses import replace
from math import comb, exp, log

import numpy as np
import pytest
from test_costmodel_fit import NAMES, SIZES, calibrated, copy_kernel, made_up, measurements

from costmodel import device
from costmodel.calibrate import describe_held_out
from costmodel.constants import Sample, fit_constants, levels, samples_of
from costmodel.deviation import FAR, NUGGET, Deviations, Predictor
from costmodel.device import FamilyFit, Measurement
from costmodel.fit import fit, judge, judge_on, predictions
from costmodel.model import CostModel
from costmodel.uncertainty import median_interval, with_uncertainty

TRUTH = (3000.0, 0.02, 0.3)


def measured(samples: list[Sample]) -> list[Measurement]:
    return [Measurement(s.label, s.kind or "k [1]", (round(s.ns),) * 5, s.features) for s in samples]


def bent(count: int, seed: int, noise: float = 0.02) -> list[Sample]:
    """Times that bend with the flops as no constant per unit can say: up to 1.6 times more in the middle."""
    out = []
    rng = np.random.default_rng(seed)
    for s in made_up("f.n(v=4)", TRUTH, count, seed):
        bend = 1 + 0.6 * np.exp(-((np.log10(s.features[1]) - 5) ** 2))
        out.append(replace(s, ns=float(s.ns * bend * np.exp(noise * rng.standard_normal()))))
    return out


# ---- intervals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_intervals_cover_nine_in_ten_and_are_as_wide_as_the_noise(noise):
    train, test = (measured(made_up("f.n(v=4)", TRUTH, n, seed, noise)) for n, seed in ((300, 1), (1000, 2)))
    found = judge_on(train, test, NAMES)
    assert 0.87 <= found.covered_90 <= 0.94
    # Nine in ten of a normal law are within 1.645 standard deviations.
    assert log(1 + found.half_width_90) == pytest.approx(1.645 * noise, rel=0.25)


def test_levels_with_enough_kernels_have_intervals_of_their_own():
    steady, wild = made_up("f.a(v=1)", TRUTH, 60, 1, 0.02), made_up("f.b(v=1)", TRUTH, 60, 2, 0.3)
    rare = made_up("f.c(v=1)", TRUTH, 6, 3, 0.02)
    samples = steady + wild + rare
    found = fit(samples, NAMES)
    assert found["f.a(v=1)"].spread_90 < found["f"].spread_90 < found["f.b(v=1)"].spread_90
    assert found["f.c(v=1)"].spread_90 == found["f.c"].spread_90 == found["f"].spread_90
    predictor = Predictor(found, samples, NAMES)
    x = samples[0].features
    assert predictor.log_error_90(levels("f.a(v=1)"), x) < predictor.log_error_90(levels("f.b(v=1)"), x)
    # A family that was never measured is as uncertain as all of them together, far from everything.
    assert predictor.log_error_90(levels("g.x(v=1)"), x) == pytest.approx(found["all"].spread_90 * FAR)


def test_intervals_are_wider_where_nothing_like_it_was_measured():
    samples = made_up("f.n(v=4)", TRUTH, 100, 4, 0.1)
    predictor = Predictor(fit(samples, NAMES), samples, NAMES)
    near, far = samples[50].features, (1.0, 1e12, 1.0)
    assert predictor.log_error_90(levels("f.n(v=4)"), far) > 1.5 * predictor.log_error_90(levels("f.n(v=4)"), near)


def test_held_out_kernels_do_not_touch_the_intervals():
    honest = measurements(200)
    wild = {k: replace(m, rounds_ns=(1, 10**9)) if m.held_out else m for k, m in honest.items()}
    train = [[m for m in ms.values() if not m.held_out] for ms in (honest, wild)]
    test = [m for m in honest.values() if m.held_out]
    first, second = (predictions(some, test, NAMES) for some in train)
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()
    before, after = judge(honest, NAMES), judge(wild, NAMES)
    assert before is not None
    assert after is not None
    assert before.covered_90 > 0.8
    assert after.covered_90 == 0, "no interval reaches a time that has nothing to do with its kernel"
    assert f"{before.covered_90:.0%} within their 90% interval" in describe_held_out(before)


def test_too_few_kernels_say_nothing_of_errors():
    samples = made_up("f.n(v=4)", TRUTH, 10, 5)
    constants = fit_constants(samples, NAMES)
    assert with_uncertainty(constants, samples, NAMES) == constants
    predictor = Predictor(constants, samples, NAMES)
    assert predictor.log_error_90(levels("f.n(v=4)"), samples[0].features) == 0
    assert judge_on(measured(samples), measured(samples), NAMES).covered_90 == 0


@pytest.mark.parametrize("count", range(1, 40))
def test_order_statistics_hold_the_median_and_no_tighter_pair_does(count):
    low, high = median_interval(range(count, 0, -1))
    assert low - 1 == count - high, "as many are left out at either end"

    def covered(skip: int) -> float:
        return 1 - 2 * sum(comb(count, k) for k in range(skip + 1)) / 2**count

    skip = low - 1
    assert covered(skip) >= 0.9 or skip == 0
    assert covered(skip + 1) < 0.9


def test_median_interval_covers_a_known_median():
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([int(x) for x in 1000 * np.exp(0.1 * rng.standard_normal(9))])
        hits += low <= 1000 <= high
    assert 0.89 <= hits / 2000 <= 0.99


# ---- corrections ---------------------------------------------------------------------------------------------------


def test_what_no_constant_can_say_is_corrected():
    train, test = bent(300, 1), bent(300, 2)
    found = fit(train, NAMES)
    assert found["f"].corrected
    plain = Predictor({k: replace(one, corrected=False) for k, one in found.items()}, train, NAMES)
    corrected = Predictor(found, train, NAMES)
    own = levels("f.n(v=4)")
    errors = [
        np.median([abs(sum(p.items(own, s.features).values()) / s.ns - 1) for s in test]) for p in (plain, corrected)
    ]
    assert errors[1] < 0.05 < errors[0]
    for s in test[:20]:
        assert all(ns >= 0 for ns in corrected.items(own, s.features).values())


def test_what_constants_say_is_left_alone():
    for noise in (0.0, 0.1):
        found = fit(made_up("f.n(v=4)", TRUTH, 200, 3, noise), NAMES)
        assert not any(one.corrected for one in found.values())


def test_a_correction_ends_far_from_what_was_measured():
    train = bent(200, 4)
    predictor = Predictor(fit(train, NAMES), train, NAMES)
    plain = Predictor({k: replace(one, corrected=False) for k, one in predictor.constants.items()}, train, NAMES)
    for far in ((1.0, 1e14, 1.0), (1e6, 1e5, 1e5)):
        got, base = (sum(p.items(levels("f.n(v=4)"), far).values()) for p in (predictor, plain))
        assert got == pytest.approx(base, rel=0.02)


def test_deviations_follow_their_samples_and_know_how_near_they_are():
    rng = np.random.default_rng(7)
    values = 10 ** rng.uniform(2, 6, (80, 3))
    ratios = 0.4 * np.sin(np.log10(values[:, 0]))
    found = Deviations(values, ratios, np.zeros(80))
    assert found.means(values) == pytest.approx(ratios, abs=0.05)
    factors = [found.factor(tuple(row)) for row in values[:9].tolist()]
    assert factors == pytest.approx(np.exp(found.means(values[:9])), abs=1e-5)
    assert factors == [found.factor(tuple(row)) for row in values[:9].tolist()]
    assert (found.scales(values) < 0.6 * FAR).all()
    assert (found.scales(values) >= NUGGET).all()
    elsewhere = np.full((1, 3), 1e15)
    assert found.scales(elsewhere) == pytest.approx(FAR, rel=0.01)
    assert found.means(elsewhere) == pytest.approx(0, abs=0.01)


def test_one_wild_sample_does_not_bend_its_neighbours():
    values = 10 ** np.random.default_rng(8).uniform(2, 6, (60, 2))
    ratios = np.zeros(60)
    ratios[30] = 3.0
    found = Deviations(values, ratios, np.zeros(60)).means(values)
    assert np.abs(np.delete(found, 30)).max() < 0.05


def test_a_large_family_is_taken_apart_by_variant(monkeypatch):
    monkeypatch.setattr("costmodel.deviation.MOST", 50)
    samples = [replace(s, label=f"f.n(v={i % 3})") for i, s in enumerate(bent(120, 12))]
    samples += [replace(s, label="f.few(v=1)") for s in bent(5, 13)]
    predictor = Predictor(fit_constants(samples, NAMES), samples, NAMES)
    parts = [predictor.deviations(levels(f"f.n(v={v})")) for v in range(3)]
    assert None not in parts
    assert len({id(part) for part in parts}) == 3
    whole = predictor.deviations(levels("f.few(v=1)"))
    assert whole is not None
    assert id(whole) not in {id(part) for part in parts}, "too few of its own: the family's, thinned out"


def test_noisy_repetitions_count_less():
    """Two kernels disagree; the one whose repetitions agree is believed."""
    steady, shaky = (100,) * 9, (50, 60, 70, 80, 200, 300, 500, 700, 900)
    quiet, loud = samples_of([Measurement("f.n", "k", rounds, (1.0, 2.0)) for rounds in (steady, shaky)])
    assert quiet.noise == 0
    assert loud.noise > 0.3
    values = np.array([[1.0, 2.0], [1.0, 2.0]])
    found = Deviations(values, np.array([0.0, 0.5]), np.array([quiet.noise, loud.noise]))
    assert found.factor((1.0, 2.0)) < 1.1


def test_a_trace_of_a_feature_gets_no_runaway_coefficient():
    """A variant with next to no bytes, whose noise a huge price per byte would explain, is asked about many bytes."""
    family = made_up("f.a(v=1)", TRUTH, 80, 9, 0.05)
    rng = np.random.default_rng(10)
    traces = [
        Sample("f.b(v=1)", "", (1.0, x, float(i % 3)), 3000 + 0.02 * x * (1 + 0.2 * (i % 3)))
        for i, x in enumerate(10 ** rng.uniform(5, 7, 20))
    ]
    got = fit_constants(family + traces, NAMES)
    assert "f.b(v=1)" in got
    guess = sum(Predictor(got, (), NAMES).items(levels("f.b(v=1)"), (1.0, 1e6, 1e6)).values())
    assert guess == pytest.approx(np.dot(TRUTH, (1.0, 1e6, 1e6)), rel=0.5)


# ---- device models -------------------------------------------------------------------------------------------------


def noisy_model(noise: float = 0.1) -> device.DeviceModel:
    rng = np.random.default_rng(11)
    kernels = [copy_kernel(m, n, order) for m, n in SIZES for order in ((0, 1), (1, 0))]
    times = [(5000 + k.layouts[0].size_elems) * np.exp(noise * rng.standard_normal()) for k in kernels]
    return calibrated(kernels, times)


def test_a_prediction_lies_within_its_interval():
    model = CostModel(noisy_model())
    for kernel in (copy_kernel(64, 1024), copy_kernel(48, 320)):
        cost, interval = model.predict(kernel), model.interval(kernel)
        assert interval is not None
        assert interval[0] <= cost.total_ns <= interval[1]
    looked_up, predicted = (model.interval(copy_kernel(*size)) for size in ((64, 1024), (48, 320)))
    assert looked_up is not None
    assert predicted is not None
    assert looked_up[1] / looked_up[0] < 1.01 < predicted[1] / predicted[0]


def test_a_roofline_has_no_interval_nor_has_a_model_older_than_intervals():
    assert CostModel(device.load("generic-cpu")).interval(copy_kernel(48, 320)) is None
    model = noisy_model()
    old = replace(
        model, constants={k: FamilyFit(c.ns_per, c.samples, c.median_error) for k, c in model.constants.items()}
    )
    assert CostModel(old).interval(copy_kernel(48, 320)) is None


def test_corrections_and_intervals_survive_the_file():
    model = noisy_model()
    some = {k: replace(c, corrected=True) for k, c in model.constants.items()}
    kept = replace(model, constants=some, held_out=judge(measurements(100), NAMES))
    again = device.loads(device.dumps(kept))
    assert again == kept
    assert again.hash == kept.hash
    kernel = copy_kernel(48, 320)
    assert CostModel(again).interval(kernel) == CostModel(kept).interval(kernel)
    assert CostModel(again).predict(kernel) == CostModel(kept).predict(kernel)
    cost = CostModel(kept).predict(kernel)
    assert cost.compute_ns + cost.memory_ns + cost.launch_ns == pytest.approx(cost.total_ns)


def test_a_file_older_than_intervals_keeps_its_hash():
    model = noisy_model()
    old = replace(
        model, constants={k: FamilyFit(c.ns_per, c.samples, c.median_error) for k, c in model.constants.items()}
    )
    text = device.dumps(old)
    bare = "\n".join(line for line in text.splitlines() if not line.startswith(("spread_90", "corrected")))
    assert bare != text
    assert device.loads(bare) == old
    assert device.loads(bare).hash == old.hash != model.hash


def test_features_of_another_version_correct_nothing():
    model = noisy_model()
    stale = replace(model, features=model.features[::-1])
    assert CostModel(stale).interval(copy_kernel(48, 320)) is not None
    predictor = CostModel(stale)._predictor
    assert predictor.deviations("test") is None
    assert exp(predictor.log_error_90(levels("test.copy(v=16)"), (1.0,) * len(model.features))) > 1
