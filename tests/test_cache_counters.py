"""The simulator beside an H200's hardware counters, on kernels small enough to be walked whole."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.cache_counters import (
    RECORD,
    Counters,
    Pair,
    compared,
    errors,
    in_order,
    kinds,
    measured,
    rank_table,
    ranks,
    reachable,
    spearman,
)
from benchmarks.counted import CASES, HELD_OUT, Counted
from costmodel.device import load

DOCUMENT = json.loads(RECORD.read_text(encoding="utf-8"))


def case_of(row) -> Counted:
    return Counted(row["op"], tuple(row["size"]), row["layout"], row["variant"])


@pytest.fixture(scope="module")
def pairs():
    found, left_out = compared(RECORD, "1000x384", 2.5e4)
    assert left_out > 0
    assert len(found) >= 15
    return found


def test_the_record_is_of_the_kernels_that_are_built_here():
    limits = load(DOCUMENT["device"]).limits
    rows = DOCUMENT["kernels"]
    assert len(rows) >= 40
    assert {case_of(row) for row in rows} == {*CASES, *HELD_OUT}
    for row in rows:
        kernel = case_of(row).kernel(limits)
        assert kernel.key == row["key"]
        assert [list(x.global_size) for x in kernel.launches] == [x["global_size"] for x in row["launches"]]


def test_enough_kernels_were_held_out():
    assert len(HELD_OUT) >= 40
    assert not set(HELD_OUT) & set(CASES)


def test_requests_sectors_and_tags_are_those_that_were_counted(pairs):
    for pair in pairs:
        for name in ("sectors", "stores"):
            assert abs(pair.off(name)) <= 0.002, (pair.case.label, name)
    assert sum(abs(pair.off("tags")) <= 0.002 for pair in pairs) >= 0.8 * len(pairs)


def test_errors_are_no_larger_than_they_were(pairs):
    off = errors(pairs)
    assert off["l1"]["mean"] <= 0.5
    assert off["l2"]["mean"] <= 3.0
    assert off["read_bytes"]["mean"] <= 0.01


def test_pairs_of_layouts_in_order():
    def pair(layout, measured_hits, simulated_hits):
        sides = (Counters(10, 20, 100, hits, 0, 0, 0, 0, 0) for hits in (measured_hits, simulated_hits))
        return Pair(Counted("gelu", (8, 8), layout, "x"), *sides)

    # The first two are too close to have an order; of the others one pair is simulated the wrong way, one is equal.
    pairs = [pair("row-major", 50, 70), pair("R-Tile 4x4", 50.5, 20), pair("R-Tile 8x8", 60, 20)]
    assert in_order(pairs, "l1") == (0.25, 2)
    assert rank_table(pairs, "l1") == {"gelu 8x8 x": pytest.approx(-0.5)}


def test_products_are_ranked_apart_from_the_rest():
    own = kinds(Pair(case, Counters(*[1] * 9), Counters(*[1] * 9)) for case in HELD_OUT)
    assert {pair.case.op for pair in own["products"]} == {"Y", "dX", "dW"}
    assert len(own["products"]) + len(own["others"]) == len(HELD_OUT)


def test_noise_limits_what_a_simulator_can_reach():
    """Two readings of the same truth, and a simulator that knows the truth."""
    draw = np.random.default_rng(0)
    truth = draw.standard_normal(20_000)
    one, other = (truth + draw.standard_normal(truth.size) for _ in range(2))
    assert reachable(spearman(one, other)) == pytest.approx(spearman(truth, one), abs=0.03)
    assert reachable(-0.2) == 0


def test_rates_of_counters():
    counters = Counters(10, 20, 100, 60, 30, 24, 0, 64, 32)
    assert counters.l1 == 60
    assert counters.l2_lookups == pytest.approx(80)
    assert counters.l2 == pytest.approx(100 * (1 - 6 / 40))  # ten reads were joined on the way
    assert counters.memory_bytes == 96
    assert (counters + counters).l1 == 60


def test_measured_adds_up_launches():
    row = next(row for row in DOCUMENT["kernels"] if len(row["launches"]) == 2)
    both = measured(DOCUMENT["metrics"], row)
    parts = [measured(DOCUMENT["metrics"], {**row, "launches": [launch]}) for launch in row["launches"]]
    assert both == parts[0] + parts[1]


def test_ranks_and_their_correlation():
    assert np.array_equal(ranks([3, 1, 2, 2]), [4, 1, 2.5, 2.5])
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0
    assert spearman([7, 7], [5, 5]) == 1
