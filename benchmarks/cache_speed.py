"""Line accesses a second through two levels of cache, beside pycachesim's forms of the same trace.

    python benchmarks/cache_speed.py [--accesses N] [--rounds N] [--json FILE] [--smoke]

The caches are 32 KiB of 8 ways and 1 MiB of 16, LRU, write-back; lines of 64 bytes. Each trace is run from empty
caches, by us, who are given arrays, and in turn by pycachesim's forms: a call an access, its iterator over an array
and over a list, made before, whose numbers it reads faster. What is counted must agree. An access is a line touched:
of an address one, of a range as many as it has lines. Millions a second of CPU time, medians over rounds; *over* is
against the fastest of its forms.

The second table has the same traces through other caches, which pycachesim does not know or we do not run the fast way.
Without pycachesim (``pip install pycachesim``) only ours is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.recording import Record
from benchmarks.zoo_plans import markdown
from layoutopt.errors import LayoutOptError
from simulator.cache import Hierarchy, Level, run_ranges

LINE = 64
L1 = Level("L1", 32 << 10, LINE, 8)
L2 = Level("L2", 1 << 20, LINE, 16, shared=True)
OTHERS = {
    "three levels, LRU": (L1, L2, Level("L3", 32 << 20, LINE, 16, shared=True)),
    "FIFO": (replace(L1, replacement="fifo"), replace(L2, replacement="fifo")),
    "tree-PLRU": (replace(L1, replacement="plru"), replace(L2, replacement="plru")),
    "random": (replace(L1, replacement="random"), replace(L2, replacement="random")),
    "inclusive L2": (L1, replace(L2, inclusion="inclusive")),
    "exclusive L2": (L1, replace(L2, inclusion="exclusive")),
    "as a GPU's: sectors, write-through L1, hashed L2": (
        replace(L1, line_bytes=128, sector_bytes=32, write_back=False, fetch_on_write=False),
        replace(L2, line_bytes=128, sector_bytes=32, fetch_on_write=False, hashed=True),
    ),
}
CALLS = 1 / 20  # share of a trace that is given to pycachesim in its slow forms


@dataclass(frozen=True)
class Trace:
    """Addresses or ranges, all of one length."""

    name: str
    starts: np.ndarray
    length: int = 1
    write: bool = False

    @property
    def accesses(self) -> int:
        """Lines touched."""
        return int(((self.starts + self.length - 1) // LINE - self.starts // LINE + 1).sum())

    def part(self, share: float) -> Trace:
        """Its beginning."""
        return replace(self, starts=self.starts[: max(int(self.starts.size * share), 1)])


def matrix_product(size: int, tile: int) -> np.ndarray:
    """Element addresses of C += A·B, tile by tile, all three row-major floats: A[i,k], B[k,j], C[i,j] in turn."""
    i, j, k = np.meshgrid(*(np.arange(tile),) * 3, indexing="ij")
    corners = np.stack(np.meshgrid(*(np.arange(0, size, tile),) * 3, indexing="ij"), -1).reshape(-1, 3)
    parts = []
    for row, column, inner in corners:
        a, b, c = (i + row, k + inner), (k + inner, j + column), (i + row, j + column)
        parts.append(
            np.stack([(x * size + y) * 4 + n * size * size * 4 for n, (x, y) in enumerate((a, b, c))], -1).reshape(-1)
        )
    return np.concatenate(parts)


def traces(accesses: int) -> list[Trace]:
    """Of about so many accesses each."""
    draw = np.random.default_rng(0)
    product = matrix_product(256, 32)
    lines = np.arange(accesses) * LINE

    def again(size: int) -> np.ndarray:
        return np.zeros(max(accesses * LINE // size, 1), dtype=np.int64)

    return [
        Trace("floats in turn", np.arange(accesses) * 4),
        Trace("matrix product in tiles", np.resize(product, accesses)),
        Trace("at random in 16 KiB", draw.integers(0, 16 << 10, accesses)),
        Trace("at random in 512 KiB", draw.integers(0, 512 << 10, accesses)),
        Trace("at random in 16 MiB", draw.integers(0, 16 << 20, accesses)),
        Trace("rows of 256 bytes, at random", draw.integers(0, 1 << 14, accesses // 4) * 256, 256),
        Trace("16 KiB again and again", again(16 << 10), 16 << 10),
        Trace("512 KiB again and again", again(512 << 10), 512 << 10),
        Trace("one long range", lines[:1], accesses * LINE),
        Trace("one long range, stored", lines[:1], accesses * LINE, write=True),
    ]


def seconds(action: Callable[[], object]) -> float:
    """CPU time of one run."""
    began = time.process_time()
    action()
    return time.process_time() - began


class Ours:
    """A run from empty caches; counters as ``line_access`` has them."""

    def __init__(self, levels: tuple[Level, ...], trace: Trace) -> None:
        self.hierarchy, self.trace = Hierarchy(levels), trace
        self.counts = np.zeros(2 * len(levels) + 2, dtype=np.int64)

    def ready(self) -> Callable[[], object]:
        """What is timed; the arrays are made before."""
        state, trace = self.hierarchy.state(), self.trace
        self.counts[:] = 0
        return partial(run_ranges, state, 0, trace.starts, trace.length, trace.write, self.counts)

    @property
    def found(self) -> list[int]:
        """Hits and misses of both levels."""
        return self.counts[:4].tolist()


class Theirs:
    """The same of pycachesim, in one of its forms."""

    def __init__(self, form: str, trace: Trace) -> None:
        self.form, self.trace = form, trace
        self.starts = trace.starts if form == "array" else trace.starts.tolist()
        self.caches: list[Any] = []

    def ready(self) -> Callable[[], object]:
        """What is timed; caches and lists are made before."""
        import cachesim

        second = cachesim.Cache(L2.name, L2.sets, L2.ways, LINE, "LRU")
        first = cachesim.Cache(L1.name, L1.sets, L1.ways, LINE, "LRU", store_to=second, load_from=second)
        memory = cachesim.MainMemory()
        memory.load_to(second)
        memory.store_from(second)
        self.caches = [first, second]
        run = cachesim.CacheSimulator(first, memory)
        ask = run.store if self.trace.write else run.load
        if self.form == "call":
            return partial(self._call, ask)
        return partial(ask, self.starts, length=self.trace.length)

    def _call(self, ask: Callable[..., object]) -> None:
        for start in self.starts:
            ask(start, length=self.trace.length)

    @property
    def found(self) -> list[int]:
        """Hits and misses of both levels."""
        return [n for cache in self.caches for n in (cache.HIT_count, cache.MISS_count)]


def measure(trace: Trace, rounds: int, peers: bool) -> dict[str, Any]:
    """One row: millions a second by form, each round all forms in turn.

    Raises:
        LayoutOptError: pycachesim counts other hits or misses.
    """
    runs: dict[str, Any] = {"ours": Ours((L1, L2), trace)}
    if peers:
        runs["list"] = Theirs("list", trace)
        few = trace.part(CALLS) if trace.length == 1 else trace
        runs |= {form: Theirs(form, few) for form in ("array", "call")}
    runs["ours"].ready()()  # compiled
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run.ready()))
    if peers and not trace.write:
        # pycachesim does not count stores that hit, nor call their lines used.
        found, theirs = runs["ours"].found, runs["list"].found
        if found != theirs:
            raise LayoutOptError(f"WRONG: {trace.name}: {found} hits and misses here, {theirs} in pycachesim")
    rate = {name: runs[name].trace.accesses / median(t) / 1e6 for name, t in times.items()}
    best = max((r for name, r in rate.items() if name != "ours"), default=0.0)
    return {
        "trace": trace.name,
        "accesses": trace.accesses,
        "hits_misses": runs["ours"].found,
        "per_us": rate,
        "over": rate["ours"] / best if best else None,
        "seconds": times,
    }


def measure_others(every: Sequence[Trace], rounds: int) -> list[dict[str, Any]]:
    """Millions a second through the other caches, by trace."""
    rows = []
    for name, levels in OTHERS.items():
        rates = {}
        for trace in every:
            run = Ours(levels, trace)
            run.ready()()
            units = int(run.counts[:2].sum())
            rates[trace.name] = units / median(seconds(run.ready()) for _ in range(rounds)) / 1e6
        rows.append({"caches": name, "per_us": rates})
    return rows


def tables(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """For people."""
    forms = ("list", "array", "call")
    head = ["trace", "L1 hits", "ours, M/s", *(f"pycachesim, {f}" for f in forms), "over"]
    body = []
    for row in rows:
        hits, misses = row["hits_misses"][:2]
        rates = [f"{row['per_us'][f]:.1f}" if f in row["per_us"] else "" for f in forms]
        over = f"{row['over']:.1f}" if row["over"] else ""
        body.append([row["trace"], f"{hits / (hits + misses):.0%}", f"{row['per_us']['ours']:.0f}", *rates, over])
    names = list(others[0]["per_us"])
    more = [[row["caches"], *(f"{row['per_us'][n]:.0f}" for n in names)] for row in others]
    return markdown([head, *body]) + "\n" + markdown([["caches, M/s", *names], *more])


def has_pycachesim() -> bool:
    """Whether it is installed."""
    try:
        import cachesim  # noqa: F401
    except ImportError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accesses", type=int, default=2_000_000, help="of a trace")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.smoke:
        args.accesses, args.rounds = 20_000, 1
    record = Record(args.json, "cache-speed", accesses=args.accesses, rounds=args.rounds)
    every, peers = traces(args.accesses), has_pycachesim()
    if not peers:
        print("pycachesim is not installed: only ours is measured")
    rows = [measure(trace, args.rounds, peers) for trace in every]
    others = measure_others([t for t in every if t.name in ("floats in turn", "at random in 512 KiB")], args.rounds)
    print(tables(rows, others))
    record.write({"rows": rows, "others": others})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LayoutOptError as error:
        sys.exit(f"cache_speed: {error}")
