"""The cache against other people's: pycachesim on random traces, cachegrind on a loop in C. Counts are equal or wrong.

pycachesim differs from us in two ways, which the configurations here leave out. It does not count a store that hits,
nor call its line used: so a store is given to it as a load and a store, or the level is FIFO. It counts what is written
back to a level as accesses of it, and does not call a line used by that: so the second level is FIFO where there are
stores, and its misses are compared with those that we count apart. A number given alone is read into half of a word
whose other half is left as it was; lists are read whole. cachegrind knows no dirty lines: a store is a load.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cache import BUFFERS, IMAGES, Hierarchy, Level, run_lines, run_ranges
from tests.cache_oracle import drive

pytestmark = pytest.mark.peer

LINE = 64


def theirs_of(levels: tuple[Level, ...]):
    """The same caches in pycachesim, nearest first, and what runs them."""
    cachesim = pytest.importorskip("cachesim", reason="pycachesim is not installed (it needs a C compiler)")
    made, beyond = [], None
    for level in reversed(levels):
        beyond = cachesim.Cache(
            level.name,
            level.sets,
            level.ways,
            level.line_bytes,
            level.replacement.upper(),
            write_back=level.write_back,
            write_allocate=level.write_allocate,
            load_from=beyond,
            store_to=beyond,
        )
        made.insert(0, beyond)
    memory = cachesim.MainMemory()
    memory.load_to(made[-1])
    memory.store_from(made[-1])
    return made, cachesim.CacheSimulator(made[0], memory)


def level_of(number: int, sets: int, ways: int, replacement: str = "lru", line: int = LINE, **more) -> Level:
    return Level(f"L{number}", sets * ways * line, line, ways, replacement=replacement, **more)


WAYS = st.sampled_from([1, 2, 3, 4, 8, 12, 16])
SETS = st.sampled_from([1, 2, 3, 4, 8])
SEEDS = st.integers(0, 10**6)


def random_addresses(seed: int, count: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Addresses among few enough lines to meet again, and which are stores."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, LINE * draw.integers(8, 300), count), draw.random(count) < draw.random()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SETS, WAYS, st.sampled_from(["lru", "fifo"])), min_size=1, max_size=3), SEEDS)
def test_loads_hit_and_miss_as_in_pycachesim(shape, seed):
    levels = tuple(level_of(i, *one, line=LINE << i // 2) for i, one in enumerate(shape))
    addresses, _ = random_addresses(seed)
    counts = np.zeros(2 * len(levels) + 2, dtype=np.int64)
    run_lines(Hierarchy(levels).state(), 0, addresses, False, counts)
    caches, theirs = theirs_of(levels)
    theirs.load(addresses.tolist())
    assert counts[:-2].tolist() == [n for cache in caches for n in (cache.HIT_count, cache.MISS_count)]
    assert counts[-2] == theirs.main_memory.LOAD_count * levels[-1].line_bytes


@settings(deadline=None, max_examples=60)
@given(SETS, WAYS, SETS, WAYS, st.sampled_from(["lru", "fifo"]), SEEDS)
def test_stores_miss_and_are_written_back_as_in_pycachesim(sets, ways, sets_2, ways_2, replacement, seed):
    levels = level_of(1, sets, ways, replacement), level_of(2, sets_2, ways_2, "fifo")
    hierarchy = Hierarchy(levels)
    addresses, stores = random_addresses(seed)
    counts = np.zeros(hierarchy.counters, dtype=np.int64)
    run_lines(hierarchy.state(), 0, addresses, stores, counts)
    (first, second), theirs = theirs_of(levels)
    for address, store in zip(addresses.tolist(), stores.tolist(), strict=True):
        theirs.load([address])
        if store:
            theirs.store([address])
    returned, absent = counts[12:14].tolist()
    assert counts[:2].tolist() == [first.HIT_count, first.MISS_count]
    assert counts[2:4].tolist() == [second.HIT_count, second.MISS_count - absent]
    assert returned == first.EVICT_count
    assert counts[5] == second.EVICT_byte


@settings(deadline=None, max_examples=60)
@given(SETS, WAYS, SETS, WAYS, SEEDS)
def test_stores_go_through_as_in_pycachesim(sets, ways, sets_2, ways_2, seed):
    """A first level that neither keeps nor takes in stores, before one that does."""
    levels = (
        level_of(1, sets, ways, "fifo", write_back=False, write_allocate=False),
        level_of(2, sets_2, ways_2, "fifo"),
    )
    addresses, stores = random_addresses(seed)
    zeros = np.zeros_like(addresses)
    trace = np.stack((zeros, addresses, stores, zeros + BUFFERS, stores), axis=1).astype(np.int64)
    counts = np.zeros((2, 6), dtype=np.int64)  # of loads, of stores
    state = Hierarchy(levels).state()
    drive(state.lines, state.geometry, trace, counts)
    (first, second), theirs = theirs_of(levels)
    for address, store in zip(addresses.tolist(), stores.tolist(), strict=True):
        (theirs.store if store else theirs.load)([address])
    loads, both = counts[0], counts.sum(0)
    assert loads[:2].tolist() == [first.HIT_count, first.MISS_count]
    assert both[2] + both[3] == first.MISS_count + second.STORE_count
    assert both[3] == second.MISS_count
    assert both[5] == second.EVICT_byte


@settings(deadline=None, max_examples=40)
@given(SETS, WAYS, SETS, WAYS, SEEDS)
def test_ranges_hit_and_miss_as_in_pycachesim(sets, ways, sets_2, ways_2, seed):
    levels = level_of(1, sets, ways), level_of(2, sets_2, ways_2)
    addresses, _ = random_addresses(seed, 60)
    lengths = np.random.default_rng(seed).integers(1, 20 * LINE, 60)
    counts = np.zeros(6, dtype=np.int64)
    run_ranges(Hierarchy(levels).state(), 0, addresses, lengths, False, counts)
    caches, theirs = theirs_of(levels)
    for start, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        theirs.load([start], length=length)
    assert counts[:4].tolist() == [n for cache in caches for n in (cache.HIT_count, cache.MISS_count)]


LOOP = r"""
static int matrix[96 * 272] __attribute__((aligned(4096)));

static void leave(void) {
#if defined(__x86_64__)
  __asm__ volatile("mov $60, %eax\n xor %edi, %edi\n syscall");
#elif defined(__aarch64__)
  __asm__ volatile("mov x8, #93\n mov x0, #0\n svc #0");
#endif
}

void _start(void) {
  volatile int *x = matrix;
  for (int again = 0; again < 3; again++)
    for (int column = 0; column < 90; column++)
      for (int row = 0; row < 90; row++) x[row * 272 + column] += x[column * 272 + row];
  leave();
}
"""
FREESTANDING = ["-O1", "-static", "-nostdlib", "-fno-pie", "-no-pie", "-fno-stack-protector", "-falign-functions=64"]
# bytes, ways and bytes of a line
FIRST, LAST = (4096, 4, 64), (32768, 8, 64)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """A loop without a library, so that nothing else touches memory."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which("valgrind"):
        pytest.skip("needs valgrind and a C compiler")
    folder = tmp_path_factory.mktemp("loop")
    (folder / "loop.c").write_text(LOOP)
    command = [compiler, *FREESTANDING, "-o", str(folder / "loop"), str(folder / "loop.c")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the C compiler makes no static program without a library: {built.stderr[-200:]}")
    return folder / "loop"


def cachegrind_counts(program: Path) -> dict[str, int]:
    """Its counters by its names."""
    sizes = [f"--{name}={','.join(map(str, c))}" for name, c in (("I1", FIRST), ("D1", FIRST), ("LL", LAST))]
    out = program.with_name("counts")
    valgrind(program, "--tool=cachegrind", "--cache-sim=yes", *sizes, f"--cachegrind-out-file={out}")
    lines = dict(line.split(": ", 1) for line in out.read_text().splitlines() if ": " in line)
    return dict(zip(lines["events"].split(), map(int, lines["summary"].split()), strict=True))


def traced(program: Path) -> np.ndarray:
    """The same run's accesses [accesses, 5] as ``drive`` takes them; instructions on the way of images."""
    log = program.with_name("accesses")
    valgrind(program, "--tool=lackey", "--trace-mem=yes", f"--log-file={log}")
    out = []
    for line in log.read_text().splitlines():
        kind = line[:2].strip()
        if kind in ("I", "L", "S", "M") and "," in line:
            address, size = line[3:].split(",")
            first, last = int(address, 16) // LINE, (int(address, 16) + int(size) - 1) // LINE
            assert first == last or kind == "I", "data do not cross lines"
            way = IMAGES if kind == "I" else BUFFERS
            out += [(0, number * LINE, 0, way, int(kind != "I")) for number in range(first, last + 1)]
    return np.array(out, dtype=np.int64)


def valgrind(program: Path, *options: str) -> None:
    ran = subprocess.run(["valgrind", *options, str(program)], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        pytest.skip(f"valgrind does not run here: {ran.stderr[-300:]}")


def test_a_loop_in_c_misses_as_in_cachegrind(program):
    expected = cachegrind_counts(program)
    instructions = Level("I1", FIRST[0], LINE, FIRST[1], serves="image")
    data = Level("D1", FIRST[0], LINE, FIRST[1], serves="buffer")
    hierarchy = Hierarchy((instructions, data, Level("LL", LAST[0], LINE, LAST[1], shared=True)))
    counts = np.zeros((2, 8), dtype=np.int64)
    state = hierarchy.state()
    drive(state.lines, state.geometry, traced(program), counts)
    assert counts[0, 1] == expected["I1mr"]
    assert counts[0, 5] == expected["ILmr"]
    assert counts[1, 2:4].sum() == expected["Dr"] + expected["Dw"]
    assert counts[1, 3] == expected["D1mr"] + expected["D1mw"]
    assert counts[1, 5] == expected["DLmr"] + expected["DLmw"]
    assert 0 < counts[1, 5] < counts[1, 3] < counts[1, 2], "each level both hits and misses"
