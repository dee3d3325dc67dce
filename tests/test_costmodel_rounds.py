"""What repetitions come to: intervals of medians, busy rounds, and drift of the device's speed, all simulated."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from costmodel.drift import WINDOW, anchor_kernels, drift_of
from costmodel.rounds import LEAST_ROUNDS, Round, Settled, settle, slowness
from kernels.spec import DeviceLimits

ANCHORS = {"compute_a": 50_000, "compute_b": 300_000, "memory_a": 80_000, "memory_b": 250_000}


def rounds_of(*times: dict[str, int]) -> list[Round]:
    return [Round(float(i), own) for i, own in enumerate(times)]


def simulated(
    levels: np.ndarray, kernels: int = 60, per_round: int = 20, seed: int = 0, noise: float = 0.01, spared: float = 0.0
) -> tuple[list[Round], dict[str, float]]:
    """Rounds over changing kernels on a device that is ``levels`` times slower than commonly; and the true times.

    A share ``spared`` of the kernels does not slow down with the device.
    """
    rng = np.random.default_rng(seed)
    truth = {f"k{i}": float(ns) for i, ns in enumerate(rng.uniform(3e4, 9e5, kernels))}
    immune = set(list(truth)[: round(spared * kernels)])
    out = []
    for i, level in enumerate(levels):
        keys = [f"k{k % kernels}" for k in range(i * per_round, (i + 1) * per_round)]

        def timed(ns: float, factor: float) -> int:
            return round(ns * factor * np.exp(rng.normal(0, noise)))

        times = {key: timed(truth[key], 1.0 if key in immune else level) for key in keys}
        out.append(Round(float(i), times, {n: timed(ns, level) for n, ns in ANCHORS.items()}))
    return out, truth


def errors(rounds: list[Round], truth: dict[str, float]) -> np.ndarray:
    return np.array([s.ns / truth[key] - 1 for key, s in settle(rounds).items()])


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_the_interval_of_a_median_is_that_of_order_statistics():
    # By hand: of 5 repetitions P(all on one side of the median) = 2/32; of 8, P(at most one below, or above) = 18/256;
    # of 7 that is 16/128, too much, and the extremes it is.
    five = settle(rounds_of(*({"a": ns} for ns in (103, 101, 102, 105, 104))))["a"]
    assert (five.ns, five.low_ns, five.high_ns, five.repetitions) == (103, 101, 105, 5)
    seven = settle(rounds_of(*({"a": 100 + i} for i in range(7))))["a"]
    assert (seven.ns, seven.low_ns, seven.high_ns) == (103, 100, 106)
    eight = settle(rounds_of(*({"a": 100 + i} for i in range(8))))["a"]
    assert (eight.ns, eight.low_ns, eight.high_ns) == (104, 101, 106)
    four = settle(rounds_of(*({"a": 100} for _ in range(4))))["a"]
    assert four == Settled(100, 0.0, inf, 4)
    assert not four.tight(0.5), "four repetitions say nothing of the confidence asked for, however alike"


def test_tight_is_by_share_or_by_what_a_launch_jumps_by():
    assert Settled(100_000, 97_500, 102_900, 9).tight(0.03)
    assert not Settled(100_000, 96_900, 100_100, 9).tight(0.03)
    assert Settled(2_000, 1_900, 2_140, 9).tight(0.03), "140 ns: no clock of a device says more"
    assert not Settled(2_000, 1_840, 2_000, 9).tight(0.03)


def test_intervals_cover_the_median_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        # Skewed, as times are: never faster than possible, sometimes much slower.
        values = 100_000 * (1 + 0.02 * rng.lognormal(0.0, 1.0, 12))
        own = settle(rounds_of(*({"a": round(v)} for v in values)), [1.0] * 12)["a"]
        covered += own.low_ns <= 102_000 <= own.high_ns
    assert 0.88 <= covered / 400 <= 0.99


def test_one_outlier_moves_neither_the_median_nor_a_long_runs_interval():
    calm = [{"a": 100_000 + 300 * (i % 5), "b": 50_000} for i in range(12)]
    struck = [own | ({"a": 900_000} if i == 4 else {}) for i, own in enumerate(calm)]
    before, after = settle(rounds_of(*calm))["a"], settle(rounds_of(*struck))["a"]
    assert abs(after.ns - before.ns) <= 300
    assert after.tight(0.03)
    assert after.repetitions == 12


# ---- busy rounds ---------------------------------------------------------------------------------------------------


def test_busy_rounds_hardly_count_where_there_are_quiet_ones():
    quiet, busy = {"a": 100_000, "b": 50_000}, {"a": 210_000, "b": 95_000}
    rounds = rounds_of(quiet, busy, {"a": 102_000, "b": 51_000}, busy, busy, {"a": 104_000, "c": 77_000})
    assert [x > 1.2 for x in slowness(rounds)] == [False, True, False, True, True, False]
    assert {key: s.ns for key, s in settle(rounds).items()} == {"a": 102_000, "b": 51_000, "c": 77_000}
    assert settle(rounds)["a"].high_ns == inf, "three quiet repetitions make no interval, whatever the busy ones say"
    assert settle(rounds)["a"].repetitions == 6


def test_a_kernel_that_only_ran_in_busy_rounds_keeps_their_median():
    rounds = rounds_of(
        *[{"a": 100_000, "b": 50_000}] * 2, *[{"a": 200_000, "b": 100_000, "c": 30_000 + i} for i in range(3)]
    )
    assert {key: s.ns for key, s in settle(rounds).items()} == {"a": 100_000, "b": 50_000, "c": 30_001}
    assert settle([]) == {}


def test_anchors_say_that_kernels_known_from_busy_rounds_alone_were_slow():
    rounds = [Round(0.0, {"a": 100_000}, {"anchor": 50_000}), Round(1.0, {"b": 300_000}, {"anchor": 150_000})]
    assert slowness(rounds) == [1.0, 3.0]
    assert slowness([Round(r.at_s, r.times_ns) for r in rounds]) == [1.0, 1.0]


def test_a_burst_of_other_work_is_weighed_down_and_is_no_drift():
    levels = np.ones(60)
    levels[20:24] = 2.5
    levels[41] = 3.0
    rounds, truth = simulated(levels)
    assert drift_of(rounds).corrected == 0.0
    assert np.abs(errors(rounds, truth)).max() < 0.03


# ---- drift ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_falls_is_taken_out_and_told():
    """The first half of the kernels is timed early, the other late: uncorrected, they are 12% apart."""
    levels = np.concatenate([np.full(20, 1.0), np.linspace(1.0, 1.12, 20), np.full(20, 1.12), np.full(20, 1.0)])
    early, truth = simulated(levels, kernels=40, per_round=20)
    drift = drift_of(early)
    assert 0.09 < drift.span < 0.14
    assert 0.25 < drift.corrected < 0.6
    assert all(ratio > 1.08 for ratio in drift.by_anchor.values())
    # A kernel that ran in the slow part alone is corrected for it.
    late = [
        Round(r.at_s, r.times_ns | ({"late": round(200_000 * level)} if 45 <= i < 55 else {}), r.anchors_ns)
        for i, (r, level) in enumerate(zip(early, levels, strict=True))
    ]
    assert settle(late, [1.0] * len(late))["late"].ns == 224_000
    assert settle(late)["late"].ns == pytest.approx(200_000, rel=0.015)
    assert np.abs(errors(early, truth)).max() < 0.03
    assert "taken out of" in drift.describe()
    assert "compute_a" in drift.describe()


def test_steady_noise_is_not_called_drift():
    for seed in range(5):
        rounds, _ = simulated(np.ones(80), seed=seed, noise=0.05)
        drift = drift_of(rounds)
        assert drift.corrected <= 0.1, "a running median of noise stands out of it now and then"
        assert drift.span < 0.1


def test_other_work_that_slows_some_kernels_only_is_not_taken_out():
    """A busy spell longer than the window: anchors moved alike, but half of the kernels did not follow."""
    levels = np.ones(80)
    levels[30 : 30 + 2 * WINDOW] = 1.6
    followed, truth = simulated(levels)
    assert drift_of(followed).span == pytest.approx(0.6, abs=0.1)
    assert np.abs(errors(followed, truth)).max() < 0.03
    spared, truth = simulated(levels, spared=0.5)
    assert drift_of(spared).corrected == 0.0
    assert np.abs(errors(spared, truth)).max() < 0.05


def test_between_sessions_the_level_may_jump():
    fast, truth = simulated(np.full(30, 1.0), seed=2)
    slow, _ = simulated(np.full(12, 1.15), seed=2)
    joined = fast + [Round(r.at_s + 30, r.times_ns, r.anchors_ns, session=1) for r in slow]
    drift = drift_of(joined)
    assert all(level == pytest.approx(1.15, abs=0.02) for level in drift.levels[30:]), "not smoothed over the gap"
    assert all(level == 1.0 for level in drift.levels[:30])
    assert np.abs(errors(joined, truth)).max() < 0.03


def test_without_anchors_nothing_is_corrected():
    rounds = rounds_of({"a": 100}, {"a": 140}, {"a": 160})
    assert drift_of(rounds).levels == (1.0, 1.0, 1.0)
    assert drift_of([]).levels == ()
    assert "none" in drift_of(rounds).describe()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_anchors_are_of_both_kinds_and_fit_small_arenas(kind: str):
    limits = DeviceLimits(kind=kind)
    large = anchor_kernels(limits, lambda kernel: True)
    assert [name.partition("_")[0] for name in large] == ["compute", "compute", "memory", "memory"]
    small = anchor_kernels(limits, lambda k: sum(k.buffer_bytes(p) for p in range(3)) <= 4 << 20)
    assert {name.partition("_")[0] for name in small} == {"compute", "memory"}
    assert anchor_kernels(limits, lambda kernel: False) == {}
    assert LEAST_ROUNDS == 5
