"""The simulator beside cachegrind on PoCL's kernels: what is read of cachegrind, and what the record holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cache_cpu import GEOMETRIES, MODEL, Misses, cases, counted_misses, errors, name_of, simulated
from benchmarks.counted import Counted
from costmodel.device import load
from layoutopt.errors import LayoutOptError

RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "cache-cpu.json"

COUNTS = """\
desc: D1 cache: 32768 B, 64 B, 8-way associative
events: Ir I1mr ILmr Dr D1mr DLmr Dw D1mw DLmw
fl=???
fn=_pocl_kernel_layoutopt_case0_0_workgroup
0 100 0 0 50 7 3 40 5 2
fn=clEnqueueNDRangeKernel
0 9 9 9 9 9 9 9 9 9
fn=_pocl_kernel_layoutopt_case0_1_workgroup
0 100 0 0 50 10 30 40 20 40
12 1 0 0 0 1 0 0 0 0
fn=_pocl_kernel_layoutopt_case11_0_workgroup
0 1 0 0 1 1 1 1 1 1
summary: 1 1 1 1 1 1 1 1 1
"""


def test_counts_are_those_of_a_cases_own_launches():
    assert counted_misses(COUNTS, 1) == [Misses((18, 25), (33, 42))]
    with pytest.raises(LayoutOptError, match=name_of(1)):
        counted_misses(COUNTS, 2)


def test_a_matrix_that_is_streamed_misses_each_line_once():
    """Row-major softmax over rows that fit the first level: every line is missed once, read, and once, written."""
    case = next(cases("softmax 700x500 row-major", False))
    found = simulated(case.kernel(load(MODEL).limits), 1 << 20, GEOMETRIES[0])
    lines = 700 * 500 * 4 // 64
    assert found == Misses((lines, lines), (lines, lines))


def test_the_record_is_what_is_simulated_here():
    """Small kernels of the record anew, at the addresses that they had."""
    document = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = document["rows"]
    assert len({(row["op"], row["layout"]) for row in rows}) >= 4
    limits = load(MODEL).limits
    few = [row for row in rows if row["op"] in ("softmax", "relayout")]
    assert len(few) >= 4
    for row in few:
        case = Counted(row["op"], tuple(row["size"]), row["layout"], row["variant"])
        geometry = tuple(tuple(level) for level in row["geometry"])
        own = simulated(case.kernel(limits), row["address"], geometry)
        assert [list(own.first), list(own.last)] == [row["simulated"]["first"], row["simulated"]["last"]]


def test_errors_of_the_record_are_those_of_its_rows():
    document = json.loads(RECORD.read_text(encoding="utf-8"))
    found = errors(document["rows"])
    for level in ("first", "last"):
        assert found[level] == pytest.approx(document["errors"][level])
    assert found["last"]["median"] < 0.05
