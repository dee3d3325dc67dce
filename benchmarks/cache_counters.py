"""The cache simulator beside hardware counters: hit rates, memory traffic, sectors and tag look-ups of single kernels.

    python benchmarks/cache_counters.py [--record FILE] [--only TEXT] [--most REQUESTS] [--json FILE] [--smoke]
    python benchmarks/cache_counters.py --again FILE

The record (``benchmarks/count.py`` makes one on a machine with an NVIDIA GPU) holds counters of kernels that started
with empty caches. Each is built anew, which needs no GPU, and walked through the caches of the shipped device model
from empty caches too; kernels of more requests than ``--most`` are left out, and said to be.

Per kernel: *L1*, hits of loads; *L2*, what part of the sectors that the L1s miss no look-up in the L2 misses; bytes
from and to memory. Between L1 and L2 the GPU makes one read of what several multiprocessors ask for at a time, which
is not simulated: the *L2 look-ups* alone, hits over reads that arrive, are the last column. Sectors and tag look-ups
are compared over all. Errors are shown apart for the kernels from whose counters the device model's caches were
written down, and for those that were counted afterwards, of other sizes and variants: *held out*. Ranks are compared
over layouts of the same kernel (Spearman), where layouts differ by more than two readings of the same counters do;
``--again`` compares a second reading with the record's instead of the simulator.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.counted import HELD_OUT, Counted, ids
from benchmarks.gemm import KINDS
from benchmarks.recording import Record
from costmodel.device import DeviceModel, load
from kernels.spec import Kernel, Launch
from layoutopt.errors import LayoutOptError
from simulator.simulate import hierarchy_of, schedule_of
from simulator.trace import Walk, compile_launch, walk
from simulator.walker import OPERAND, WRITE

RECORD = Path(__file__).parent / "records" / "cache-counters-h200.json"
LINE_BYTES, SECTOR_BYTES = 128, 32
BASE_BYTES = 2 << 20
MOST = 3_000_000
LEAST_APART = {"l1": 2.0, "l2": 5.0, "l2_lookups": 5.0}
"""Layouts whose measured figures lie closer (points) have no order to be found. In the L2, two readings of one kernel
differ by up to 2.7 points in nine of ten cases."""
LEAST_SHARE = 0.02
"""The same of bytes and counts."""


@dataclass(frozen=True)
class Counters:
    """Of all launches of a kernel: sectors of 32 bytes, unless bytes.

    Attributes:
        requests: loads of waves.
        tags: lines that they look up.
        sectors: that they ask the L1s for.
        l1_hits: of these.
        l2_reads: sectors that loads ask the L2 for.
        l2_hits: of these.
        stores: sectors stored.
        read_bytes: from memory.
        written_bytes: to memory.
    """

    requests: float
    tags: float
    sectors: float
    l1_hits: float
    l2_reads: float
    l2_hits: float
    stores: float
    read_bytes: float
    written_bytes: float

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    @property
    def l1(self) -> float:
        """Hits of loads in per cent."""
        return 100 * self.l1_hits / max(self.sectors, 1)

    @property
    def l2(self) -> float:
        """Of the sectors that the L1s miss, those that no look-up in the L2 misses, in per cent."""
        return 100 * (1 - (self.l2_reads - self.l2_hits) / max(self.sectors - self.l1_hits, 1))

    @property
    def l2_lookups(self) -> float:
        """Of the reads that arrive at the L2, those that hit, in per cent."""
        return 100 * self.l2_hits / max(self.l2_reads, 1)

    @property
    def memory_bytes(self) -> float:
        """Both ways."""
        return self.read_bytes + self.written_bytes


def measured(metrics: Sequence[str], row: dict[str, Any]) -> Counters:
    """A kernel's counters from the record."""
    total = Counters(*[0.0] * 9)
    loads, reads = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld", "lts__t_sectors_srcunit_tex_op_read"
    for launch in row["launches"]:
        c = dict(zip(metrics, launch["counters"], strict=True))
        total += Counters(
            c["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"],
            c["l1tex__t_set_accesses_pipe_lsu_mem_global_op_ld.sum"],
            c[f"{loads}.sum"],
            c[f"{loads}_lookup_hit.sum"],
            c[f"{reads}.sum"],
            min(c[f"{reads}_lookup_hit.sum"], c[f"{reads}.sum"]),
            c["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"],
            c["dram__bytes_read.sum"],
            c["dram__bytes_write.sum"],
        )
    return total


def requests(metrics: Sequence[str], row: dict[str, Any]) -> float:
    """Loads and stores of waves."""
    names = [f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum" for op in ("ld", "st")]
    return sum(launch["counters"][metrics.index(name)] for launch in row["launches"] for name in names)


def simulated(kernel: Kernel, offsets: Sequence[int], model: DeviceModel) -> Counters:
    """The same of the simulator, each launch from empty caches.

    Args:
        kernel: what runs.
        offsets: bytes, of operands and scratch buffers in their allocation.
        model: whose caches.
    """
    gathers = kernel.spec.kind in ("gather", "scatter_add", "cross_entropy", "cross_entropy_grad")
    steer = {p: ids(kernel, p) for p in range(kernel.spec.inputs) if gathers and kernel.operand_dtype(p) == "int32"}
    return sum((_launched(kernel, x, steer, offsets, model) for x in kernel.launches), Counters(*[0.0] * 9))


def _launched(
    kernel: Kernel, launch: Launch, steer: dict[int, np.ndarray], offsets: Sequence[int], model: DeviceModel
) -> Counters:
    hierarchy = hierarchy_of(model)
    walked = stores_apart(compile_launch(kernel, launch, steer))
    operands = walked.bases.size // 2
    counts = np.zeros((2 * operands, 3 + hierarchy.counters), dtype=np.int64)
    asked = np.zeros((2 * operands, 3), dtype=np.int64)
    addresses = np.tile(np.array(offsets[:operands], dtype=np.int64) + BASE_BYTES, 2)
    schedule = schedule_of(model, launch.nest.items)
    groups, wave, sizes = (0, walked.groups), model.limits.simd_width, (LINE_BYTES, SECTOR_BYTES)
    walk(walked, hierarchy.state(), addresses, counts, *groups, hierarchy.cores, wave, schedule, asked, sizes)
    loads, total = counts[:operands].sum(0), counts.sum(0)
    memory = 3 + 2 * len(hierarchy.levels)
    return Counters(
        float(asked[:operands, 0].sum()),
        float(asked[:operands, 1].sum()),
        float(loads[1]),
        float(loads[3]),
        float(loads[5] + loads[6]),
        float(loads[5]),
        float(counts[operands:, 1].sum()),
        float(total[memory]),
        float(total[memory + 1]),
    )


def stores_apart(walked: Walk) -> Walk:
    """The same, its stores counted under operands of their own, behind those that are there."""
    meta = walked.meta.copy()
    meta[:, OPERAND] += meta[:, WRITE] * walked.bases.size
    return replace(walked, meta=meta, bases=np.tile(walked.bases, 2), blocks=np.tile(walked.blocks, (2, 1)))


# ---- comparing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A kernel, what was measured of it and what was simulated."""

    case: Counted
    measured: Counters
    simulated: Counters

    @property
    def held_out(self) -> bool:
        """Counted after the device model's caches had been written down."""
        return self.case in _HELD_OUT

    def off(self, name: str) -> float:
        """Simulated less measured: points of a rate; share of bytes and counts."""
        a, b = getattr(self.simulated, name), getattr(self.measured, name)
        return a - b if name.startswith("l") else a / max(b, 1.0) - 1


_HELD_OUT = frozenset(HELD_OUT)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, of equals the mean."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; 1 where all of both are equal, 0 where only one side's are."""
    left, right = ranks(a), ranks(b)
    if not left.std() or not right.std():
        return float(not left.std() and not right.std())
    return float(np.corrcoef(left, right)[0, 1])


def rank_table(pairs: Iterable[Pair], name: str) -> dict[str, float]:
    """Spearman's coefficient per kernel of at least three layouts that differ in this."""
    groups: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.case.group, []).append(pair)
    out = {}
    for own in groups.values():
        found = [getattr(p.measured, name) for p in own]
        # What differs by less than can be told is equal.
        step = LEAST_APART[name] if name in LEAST_APART else max(found) * LEAST_SHARE
        if len(own) >= 3 and max(found) - min(found) >= step > 0:
            rounded = [[round(getattr(side, name) / step) for side in (p.measured, p.simulated)] for p in own]
            out[own[0].case.label.replace(own[0].case.layout + " ", "")] = spearman(*zip(*rounded, strict=True))
    return out


def in_order(pairs: Iterable[Pair], name: str) -> tuple[float, int]:
    """Of pairs of layouts of one kernel whose measured figures are apart, how many are simulated in the same order.

    Returns:
        The share (equals count half), and the number of pairs.
    """
    groups: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.case.group, []).append(pair)
    right, count = 0.0, 0
    for own in groups.values():
        for a, b in combinations(own, 2):
            (x, y), (u, v) = (
                (getattr(p, name), getattr(q, name)) for p, q in ((a.measured, b.measured), (a.simulated, b.simulated))
            )
            if abs(x - y) >= LEAST_APART.get(name, max(x, y) * LEAST_SHARE) > 0:
                count += 1
                right += 0.5 if u == v else float((u > v) == (x > y))
    return right / max(count, 1), count


def kinds(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Matrix products and the rest: in the L2, two readings of a product differ by as much as its layouts do."""
    out: dict[str, list[Pair]] = {"products": [], "others": []}
    for pair in pairs:
        out["products" if pair.case.op in KINDS else "others"].append(pair)
    return out


def reachable(between_readings: float) -> float:
    """The correlation with one reading that a simulator without error would have, where two readings correlate so:
    noise weakens a correlation by the square root of each side's reliability (Spearman 1904).
    """
    return max(between_readings, 0.0) ** 0.5


FIGURES = ("l1", "l2", "l2_lookups", "read_bytes", "memory_bytes", "sectors", "tags", "requests", "stores")


def errors(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """Per figure: mean and 90th percentile of the absolute error, and the mean of the signed one."""
    out = {}
    for name in FIGURES:
        off = np.array([p.off(name) for p in pairs])
        if off.size:
            size = np.abs(off)
            out[name] = {"mean": size.mean(), "p90": np.quantile(size, 0.9), "signed": off.mean(), "most": size.max()}
    return {name: {k: round(float(v), 4) for k, v in row.items()} for name, row in out.items()}


def pair_table(pairs: Sequence[Pair]) -> Table:
    """A row a kernel, measured then simulated."""
    out = Table("kernel", "set", "L1 %", "L2 %", "read MiB", "written MiB", "sectors", "L2 look-ups %")
    for p in pairs:
        m, s = p.measured, p.simulated
        out.add_row(
            p.case.label,
            "held out" if p.held_out else "fitted",
            f"{m.l1:.1f} {s.l1:.1f}",
            f"{m.l2:.1f} {s.l2:.1f}",
            f"{m.read_bytes / 2**20:.1f} {s.read_bytes / 2**20:.1f}",
            f"{m.written_bytes / 2**20:.1f} {s.written_bytes / 2**20:.1f}",
            f"{s.sectors / max(m.sectors, 1):.3f}",
            f"{m.l2_lookups:.1f} {s.l2_lookups:.1f}",
        )
    return out


def error_table(title: str, pairs: Sequence[Pair]) -> Table:
    """Mean absolute errors."""
    out = Table("figure", "mean error", "90%", "signed", "worst", title=f"{title}: {len(pairs)} kernels")
    for name, row in errors(pairs).items():
        scale, unit = (1.0, " points") if name.startswith("l") else (100.0, "%")
        cells = (f"{scale * row[key]:.2f}{unit}" for key in ("mean", "p90", "signed", "most"))
        out.add_row(name, *cells)
    return out


def print_ranks(console: Console, title: str, pairs: Sequence[Pair], name: str, readings: bool) -> None:
    """How well layouts of one kernel are put in order; of two readings also what that lets a simulator reach."""
    table, (share, count) = rank_table(pairs, name), in_order(pairs, name)
    if not table:
        return
    mean, low = float(np.mean(list(table.values()))), sum(value < 0.9 for value in table.values())
    limit = f"; without error a simulator would reach about {reachable(mean):.2f}" if readings else ""
    console.print(
        f"{title}: Spearman over layouts of {len(table)} kernels: mean {mean:.2f}, {low} below 0.9; "
        f"{share:.1%} of {count} pairs of layouts in order{limit}"
    )


def numbers(counters: Counters) -> list[int]:
    """In the order of the attributes."""
    return [round(value) for value in asdict(counters).values()]


def compared(path: Path, only: str, most: float) -> tuple[list[Pair], int]:
    """Pairs, and how many kernels were left out for their size."""
    document = json.loads(path.read_text(encoding="utf-8"))
    model, metrics = load(document["device"]), document["metrics"]
    pairs, left_out = [], 0
    for row in document["kernels"]:
        case = Counted(row["op"], tuple(row["size"]), row["layout"], row["variant"])
        if only not in case.label:
            continue
        if requests(metrics, row) > most:
            left_out += 1
            continue
        kernel = case.kernel(model.limits)
        if kernel.key != row["key"]:
            raise LayoutOptError(f"kernel {case.label} of {path} is not the one built here: count anew")
        pairs.append(Pair(case, measured(metrics, row), simulated(kernel, row["offsets_bytes"], model)))
    return pairs, left_out


def repeated(path: Path, again: Path) -> list[Pair]:
    """Two readings of the same kernels, the second in the simulator's place."""
    first, second = (json.loads(p.read_text(encoding="utf-8")) for p in (path, again))
    known = {row["key"]: row for row in first["kernels"]}
    pairs = []
    for row in second["kernels"]:
        case = Counted(row["op"], tuple(row["size"]), row["layout"], row["variant"])
        both = measured(first["metrics"], known[row["key"]]), measured(second["metrics"], row)
        pairs.append(Pair(case, *both))
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--only", default="", help="part of a kernel's label")
    parser.add_argument("--most", type=float, default=MOST, help="requests of a kernel that is simulated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, help="a second reading of kernels in the record")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.only, args.most = "1000x384 R-Tile 4x4", 2e4
    record = Record(args.json, "cache_counters", counted=args.record.name, most_requests=args.most)
    began = time.process_time()
    if args.again:
        pairs, left_out = repeated(args.record, args.again), 0
    else:
        pairs, left_out = compared(args.record, args.only, args.most)
    console = Console(width=220)
    console.print(pair_table(pairs))
    halves = {"fitted": [p for p in pairs if not p.held_out], "held out": [p for p in pairs if p.held_out]}
    for title, own in halves.items():
        console.print(error_table(title, own))
    orders = {name: rank_table(pairs, name) for name in ("l1", "l2", "memory_bytes", "tags")}
    for name in orders:
        for kind, own in {"all": pairs, **kinds(pairs)}.items():
            print_ranks(console, f"{name}, {kind}", own, name, bool(args.again))
    if left_out:
        console.print(f"{left_out} kernels of more than {args.most:g} requests were left out")
    rows = [
        {
            "kernel": p.case.label,
            "held_out": p.held_out,
            "measured": numbers(p.measured),
            "simulated": numbers(p.simulated),
        }
        for p in pairs
    ]
    found = {
        "errors": {k: errors(v) for k, v in halves.items()},
        "spearman": orders,
        "left_out": left_out,
        "counters": list(Counters.__annotations__),
    }
    record.write({**found, "cpu_s": time.process_time() - began, "kernels": rows})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"cache_counters: {error}")
