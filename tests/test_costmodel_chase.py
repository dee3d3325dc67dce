"""Caches found by pointer chase: what curves of known caches tell, and that chains go where they should.

No test here judges a time that was measured: how fast a device is, is no fact that a busy machine keeps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel import device
from costmodel.cacheprobe import SET_COUNTS, SET_STRIDES, CacheFindings, findings_of, probe_caches, sizes_between
from costmodel.caches import caches_of, chase_facts, cpu_caches, describe_caches
from costmodel.chase import COLD_ROUNDS, Chain, Chains, clashing, curve_of, cycle, follow, pairs, run_walks, spaced
from costmodel.device import CacheLevel, Probe
from costmodel.knees import Curve, find_fetch, find_levels, find_line, find_ways, isotonic

KIB, MIB = 1 << 10, 1 << 20
SIZES = sizes_between(4 * KIB, 128 * MIB)


def staircase(levels, memory_ns, sizes=SIZES, noise=0.0, soft=False, seed=0) -> Curve:
    """Latency of caches (size, nanoseconds). ``soft``: each keeps its size's share of what does not fit."""
    rng = np.random.default_rng(seed)
    out = []
    for size in sizes:
        left, total = 1.0, 0.0
        for cache, ns in levels:
            hits = min(cache / size, 1.0) if soft or size <= cache else 0.0
            hit = max(min(hits, 1.0) - (1.0 - left), 0.0)
            total, left = total + hit * ns, left - hit
        out.append((total + left * memory_ns) * (1 + noise * rng.standard_normal()))
    return Curve(tuple(sizes), tuple(out), tuple(noise * v for v in out))


def found_sizes(curve: Curve) -> list[int]:
    return [level.size_bytes for level in find_levels(curve)]


# ---- curves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_three_levels_are_found_through_noise(noise, seed):
    curve = staircase([(48 * KIB, 1.2), (MIB, 3.7), (32 * MIB, 12.0)], 90.0, noise=noise, seed=seed)
    levels = find_levels(curve)
    assert [level.size_bytes for level in levels] == [48 * KIB, MIB, 32 * MIB, 0]
    assert [level.above_bytes for level in levels] == [56 * KIB, 1280 * KIB, 40 * MIB, 0]
    for level, ns in zip(levels, (1.2, 3.7, 12.0, 90.0), strict=True):
        assert level.latency_ns == pytest.approx(ns, rel=0.08)
    assert {level.confidence for level in levels[:3]} == {"high"}


def test_two_levels_and_none():
    assert found_sizes(staircase([(128 * KIB, 30.0), (4 * MIB, 200.0)], 500.0)) == [128 * KIB, 4 * MIB, 0]
    flat = find_levels(staircase([], 80.0, noise=0.03))
    assert [(level.size_bytes, level.confidence) for level in flat] == [(0, "medium")], "no knee: no cache is claimed"
    assert find_levels(Curve((), ())) == ()


def test_a_knee_beyond_the_curve_is_not_claimed():
    curve = staircase([(48 * KIB, 1.2), (1 << 40, 4.0)], 100.0)
    levels = find_levels(curve)
    assert [level.size_bytes for level in levels] == [48 * KIB, 0]
    assert levels[-1].latency_ns == pytest.approx(4.0), "what lies beyond the first is one plateau"


def test_a_level_without_a_plateau_is_part_of_a_rise():
    # The middle cache holds a quarter more than the first: no size runs at its latency for long enough to tell.
    curve = staircase([(64 * KIB, 2.0), (80 * KIB, 7.0)], 40.0)
    assert found_sizes(curve) == [64 * KIB, 0]


def test_soft_knees_are_found_with_less_confidence():
    levels = find_levels(staircase([(256 * KIB, 30.0), (32 * MIB, 200.0)], 600.0, soft=True))
    assert levels[0].size_bytes == pytest.approx(256 * KIB, rel=0.3)
    assert levels[0].confidence in ("medium", "low")
    assert all(level.size_bytes <= 40 * MIB for level in levels)


def test_single_outliers_are_no_knees():
    clean = staircase([(48 * KIB, 1.2), (MIB, 3.7)], 90.0)
    dirty = list(clean.latency_ns)
    for at in (0, 3, 9, 20, 40):
        dirty[at] *= 30
    assert found_sizes(replace(clean, latency_ns=tuple(dirty))) == [48 * KIB, MIB, 0]


@pytest.mark.parametrize("seed", range(5))
def test_pure_noise_claims_nothing_with_confidence(seed):
    noise = np.random.default_rng(seed).uniform(50, 150, len(SIZES))
    for level in find_levels(Curve(tuple(SIZES), tuple(noise), tuple(noise / 2))):
        assert level.size_bytes == 0 or level.confidence != "high"


def test_isotonic_is_the_closest_rising_sequence():
    assert isotonic([1, 2, 3]) == [1, 2, 3]
    assert isotonic([1, 3, 2, 5, 4, 3]) == [1, 2.5, 2.5, 4, 4, 4]
    assert isotonic([3, 2, 1]) == [2, 2, 2]
    assert isotonic([]) == []


# ---- lines, fetches, ways ------------------------------------------------------------------------------------------


def first_level(size: int, above: int, ns: float):
    (level, *_) = find_levels(staircase([(size, ns)], 4 * ns))
    assert (level.size_bytes, level.above_bytes) == (size, above)
    return level


@pytest.mark.parametrize("line", [32, 64, 128, 256])
@pytest.mark.parametrize(("size", "above"), [(48 * KIB, 56 * KIB), (128 * KIB, 160 * KIB)])
def test_line_from_the_reach_at_an_odd_stride(line, size, above):
    level = first_level(size, above, 2.0)
    sizes = sizes_between(size, 8 * size)
    # Every line that is visited takes a place: the span over which as many lines are visited as there are places.
    reach = size * max(192 / line, 1.0)
    curve = Curve(tuple(sizes), tuple(2.0 if s <= reach else 8.0 for s in sizes))
    found = find_line(curve, 192, level, 8.0)
    assert (found.value, found.status) == (line, "found")


def test_line_that_nothing_explains_is_not_separable():
    level = first_level(48 * KIB, 56 * KIB, 2.0)
    sizes = sizes_between(48 * KIB, 384 * KIB)
    for reach in (2.1 * 48 * KIB, 1 << 40):
        curve = Curve(tuple(sizes), tuple(2.0 if s <= reach else 8.0 for s in sizes))
        found = find_line(curve, 192, level, 8.0)
        assert (found.value, found.status) == (0, "not separable"), "64-byte lines reach 3 times, 128 bytes 1.5 times"


@pytest.mark.parametrize("fetch", [32, 64, 128])
def test_fetch_of_sectors_and_of_whole_lines(fetch):
    distances = (8, 16, 32, 64, 128, 256)
    curve = Curve(distances, tuple(17.0 if d < fetch else 30.0 for d in distances))
    found = find_fetch(curve)
    assert (found.value, found.status) == (fetch, "found"), "32 of a line of 128: a GPU's sectors"


NO_STEP = [
    (20.0, 20.5, 20.4, 21.0, 20.6),
    (10.0, 12.0, 14.5, 17.0, 20.0),
    (300.0, 150.0, 310.0, 160.0, 300.0),
    (100.0, 30.0, 60.0, 140.0, 150.0),
    (0.001, 0.001, 0.001, 7.0, 7.1),
    (172.0, 170.0, 171.0, 172.0, 269.0),
    (100.0, 200.0, 201.0, 202.0, 200.0),
]


@pytest.mark.parametrize("times", NO_STEP)
def test_fetch_without_a_step_is_not_separable(times):
    assert find_fetch(Curve((16, 32, 64, 128, 256), times)).status == "not separable"
    assert find_fetch(Curve((), ())).status == "not separable"


def sets_of(size, ways, counts=range(1, 34)):
    """Latency against lines at strides of 4, 8, 16 KiB in a cache of that many ways."""
    way = size // ways
    out = {}
    for stride in (4 * KIB, 8 * KIB, 16 * KIB):
        places = ways * max(way // stride, 1)
        out[stride] = Curve(tuple(counts), tuple(2.0 if n <= places else 8.0 for n in counts))
    return out


@pytest.mark.parametrize(("size", "above", "ways"), [(48 * KIB, 56 * KIB, 12), (32 * KIB, 40 * KIB, 8)])
def test_ways_where_strides_agree(size, above, ways):
    found = find_ways(sets_of(size, ways), first_level(size, above, 2.0), 8.0)
    assert (found.value, found.status) == (ways, "found")


def test_ways_that_strides_do_not_agree_on_are_not_separable():
    level = first_level(48 * KIB, 56 * KIB, 2.0)
    assert find_ways({}, level, 8.0).status == "not separable"
    hashed = sets_of(48 * KIB, 12)
    hashed[8 * KIB], hashed[16 * KIB] = (
        Curve(tuple(range(1, 34)), tuple(2.0 if n <= fit else 8.0 for n in range(1, 34))) for fit in (17, 9)
    )
    assert find_ways(hashed, level, 8.0).status == "not separable"
    everything_fits = {s: replace(c, latency_ns=(2.0,) * 33) for s, c in sets_of(48 * KIB, 12).items()}
    assert find_ways(everything_fits, level, 8.0).status == "not separable"
    other_size = {
        s: replace(c, latency_ns=tuple(2.0 if n <= 5 else 8.0 for n in range(1, 34))) for s, c in hashed.items()
    }
    assert find_ways(other_size, level, 8.0).status == "not separable", "five ways of a power of two are not 48 KiB"


# ---- the probes' own chains through a cache that is known --------------------------------------------------------


class Cache:
    """One level, least recently used of each set goes; a line holds the sectors that missed. Hits 2 ns, misses 8."""

    def __init__(self, size: int, line: int, ways: int, sector: int) -> None:
        self.line, self.ways, self.sector, self.count = line, ways, sector, size // (line * ways)
        self.sets: list[dict[int, set[int]]] = [{} for _ in range(self.count)]

    def read(self, address: int) -> float:
        tag, sector = address // self.line, address // self.sector
        held = self.sets[tag % self.count]
        sectors = held.pop(tag, set())
        hit = sector in sectors
        held[tag] = sectors | {sector}
        if len(held) > self.ways:
            del held[next(iter(held))]
        return 2.0 if hit else 8.0


def walked(shape, chains) -> Curve:
    """The curve of chains, each through a cache of its own, as a device walks them."""
    latencies = []
    for chain in chains:
        cache, addresses = Cache(*shape), (chain.units * 4).tolist()
        for address in range(0, chain.span_bytes, 32) if chain.warm else ():
            cache.read(address)
        rounds = 1 if chain.once else 2 if chain.warm else COLD_ROUNDS
        latencies.append(sum(cache.read(a) for _ in range(rounds) for a in addresses) / rounds / len(addresses))
    return Curve(tuple(chain.size for chain in chains), tuple(latencies))


@pytest.mark.parametrize(
    "shape",
    [
        (16 * KIB, 64, 4, 64),
        (48 * KIB, 64, 12, 64),
        (32 * KIB, 128, 8, 32),
        (24 * KIB, 128, 6, 64),
        (32 * KIB, 64, 8, 32),
    ],
    ids=lambda shape: "{}B-line{}-ways{}-sector{}".format(*shape),
)
def test_a_simulated_cache_is_found_by_the_probes_own_chains(shape):
    size, line, ways, sector = shape
    rng = np.random.default_rng(6)
    levels = find_levels(walked(shape, [spaced(s, 64, rng, "cpu") for s in sizes_between(4 * KIB, 8 * size)]))
    assert [level.size_bytes for level in levels] == [size, 0]
    first = levels[0]
    assert (first.latency_ns, levels[1].latency_ns) == (pytest.approx(2, rel=0.05), pytest.approx(8, rel=0.05))
    spans = sizes_between(size, 8 * size)
    odd = [replace(spaced(s, 192, rng, "cpu"), warm=False) for s in spans]
    assert find_line(walked(shape, odd), 192, first, 8.0).value == line
    near = [pairs(16 * size, 512, d, rng, "cpu") for d in (8, 16, 32, 64, 128, 256)]
    assert find_fetch(walked(shape, near)).value == sector
    clashes = {s: walked(shape, [clashing(n, s, rng) for n in SET_COUNTS]) for s in SET_STRIDES["cpu"]}
    assert find_ways(clashes, first, 8.0).value == ways


# ---- chains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "window"), [(1, 1), (7, 3), (64, 64), (1000, 128), (97, 1000)])
def test_cycle_visits_all_once_and_keeps_to_its_window(count, window):
    order = cycle(count, window, np.random.default_rng(1))
    assert sorted(order) == list(range(count))
    for at in range(0, count, window):
        assert sorted(order[at : at + window]) == list(range(at, min(at + window, count)))


def test_a_chain_through_much_memory_visits_some_lines_of_all_of_it():
    chain = spaced(512 * MIB, 64, np.random.default_rng(5), "gpu")
    assert len(chain.units) == len(set(chain.units.tolist())) == 1 << 18
    lines = np.sort(chain.units) * 4 // 64
    assert (lines // 32 == np.arange(1 << 18)).all(), "one of each 32 neighbours"
    assert (chain.units * 4 % 64 == 0).all()


def test_pairs_lie_a_distance_apart_and_never_meet():
    rng = np.random.default_rng(2)
    seen = set()
    for i, distance in enumerate((16, 32, 64, 128, 256, 512)):
        chain = pairs(256 * KIB, 1024, distance, rng, "cpu", share=(i, 6), once=True)
        places = chain.units.reshape(-1, 2) * 4
        assert (np.abs(places[:, 0] - places[:, 1]) == distance).all()
        assert (places[:, 0] // 1024 == places[:, 1] // 1024).all()
        assert seen.isdisjoint(chain.units)
        seen |= set(chain.units.tolist())


def test_sizes_rise_by_quarters_and_halves():
    assert sizes_between(4, 16) == [4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert sizes_between(4, 20, coarse_above=8) == [4, 5, 6, 7, 8, 12, 16, 20]


# ---- what a device model keeps ------------------------------------------------------------------------------------


def made_probes(levels, memory_ns) -> dict[str, Probe]:
    curve = staircase(levels, memory_ns)
    return {
        f"chase_buffer_{size}": Probe("made up", 1000.0, "loads", (round(ns * 1000),) * 3)
        for size, ns in zip(curve.sizes_bytes, curve.latency_ns, strict=True)
    }


def test_findings_come_back_from_a_file(tmp_path):
    probes = made_probes([(256 * KIB, 33.0), (48 * MIB, 210.0)], 560.0)
    findings = findings_of(probes)
    assert [level.size_bytes for level in findings.caches] == [256 * KIB, 48 * MIB]
    model = replace(device.load("generic-cpu"), probes=probes, facts=chase_facts(findings))
    device.save(model, tmp_path / "d.toml")
    again = device.load(tmp_path / "d.toml")
    assert again == model
    assert findings_of(again.probes) == findings
    assert again.number("chase_l1_bytes") == 256 * KIB
    assert again.number("chase_memory_latency_s") == pytest.approx(560e-9)
    assert again.facts["chase_l1_ways"].value == "not separable"
    assert describe_caches(again).startswith("caches: L1 32 KiB (assumed; chase: nothing) 64 B lines; L2 1 MiB (assum")
    assert "L3 32 MiB (assumed; chase 48 MiB to 56 MiB, 210 ns) 64 B lines" in describe_caches(again)
    assert "memory 560 ns" in describe_caches(again)


class Fake:
    """What ``caches_of`` asks of a runtime."""

    def __init__(self, kind: str, texels: int = 0, **reported: int) -> None:
        self.limits = replace(device.load("generic-cpu").limits, kind=kind, image_max_buffer_texels=texels)
        self.info = type("Info", (), {"handle": type("Handle", (), reported)()})()


def test_a_gpus_caches_are_those_chased():
    findings = findings_of(made_probes([(256 * KIB, 33.0), (48 * MIB, 210.0)], 560.0))
    fake = Fake("gpu", global_mem_cache_size=4_325_376, global_mem_cacheline_size=128)
    first, last = caches_of(fake, findings)
    assert (first.size_bytes, first.line_bytes, first.shared) == (256 * KIB, 128, False)
    assert (last.size_bytes, last.line_bytes, last.shared) == (48 * MIB, 128, True)
    for level, ns in ((first, 33.0), (last, 210.0)):
        assert level.latency_s == pytest.approx(ns * 1e-9)
        assert level.source.startswith("measured: pointer chase")
        assert level.confidence == "high"
    assert caches_of(fake)[1].size_bytes == 4_325_376, "without a chase the driver's word"
    nothing = CacheFindings(find_levels(staircase([], 80.0)))
    assert caches_of(fake, nothing) == caches_of(fake), "a chase that finds nothing changes nothing"


def test_what_is_near_the_noise_is_told_but_not_taken():
    curve = staircase([(256 * KIB, 33.0), (48 * MIB, 210.0)], 560.0)
    findings = CacheFindings(find_levels(replace(curve, spread_ns=tuple(200.0 for _ in curve.latency_ns))))
    assert [level.confidence for level in findings.caches] == ["low", "low"]
    assert chase_facts(findings)["chase_l1_bytes"].confidence == "low"
    fake = Fake("gpu", global_mem_cache_size=4 * MIB, global_mem_cacheline_size=128)
    assert caches_of(fake, findings) == caches_of(fake)


def test_one_level_alone_has_the_drivers_behind_it():
    findings = findings_of(made_probes([(64 * KIB, 33.0)], 210.0))
    first, last = caches_of(Fake("gpu", global_mem_cache_size=MIB, global_mem_cacheline_size=64), findings)
    assert (first.size_bytes, last.size_bytes, last.shared) == (64 * KIB, MIB, True)
    assert last.source.startswith("size and line from the driver")


def test_a_first_cache_of_the_drivers_size_is_the_shared_one():
    findings = findings_of(made_probes([(128 * KIB, 80.0), (2 * MIB, 150.0)], 300.0))
    findings = replace(findings, texture=find_levels(staircase([(KIB, 60.0)], 120.0, sizes_between(256, MIB))))
    fake = Fake("gpu", texels=65536, global_mem_cache_size=128 * KIB, global_mem_cacheline_size=64)
    assert [(c.name, c.size_bytes, c.shared, c.serves) for c in caches_of(fake, findings)] == [
        ("texture L1", KIB, False, "image"),
        ("L2", 128 * KIB, True, "all"),
        ("L3", 2 * MIB, True, "all"),
    ]


def test_images_have_a_cache_of_their_own_where_drivers_say_so():
    findings = findings_of(made_probes([(16 * KIB, 33.0), (MIB, 210.0)], 560.0))
    findings = replace(findings, texture=find_levels(staircase([(32 * KIB, 40.0), (MIB, 220.0)], 560.0)))
    caches = caches_of(Fake("gpu", texels=65536, global_mem_cacheline_size=64), findings)
    assert [(c.name, c.serves, c.size_bytes) for c in caches] == [
        ("texture L1", "image", 32 * KIB),
        ("L1", "buffer", 16 * KIB),
        ("L2", "all", MIB),
    ]


def test_a_cpus_caches_stay_the_systems_with_the_chase_beside(monkeypatch):
    system = (
        CacheLevel("L1", 48 * KIB, 64, 12, source="sysfs"),
        CacheLevel("L3", 32 * MIB, shared=True, source="sysfs"),
    )
    monkeypatch.setattr("costmodel.caches.cpu_caches", lambda: system)
    findings = findings_of(made_probes([(48 * KIB, 1.3), (MIB, 4.0)], 90.0))
    first, last = caches_of(Fake("cpu"), findings)
    assert (first.size_bytes, first.ways) == (48 * KIB, 12)
    assert first.latency_s == pytest.approx(1.3e-9)
    assert first.source == "sysfs; pointer chase: 48 KiB fit and 56 KiB do not"
    assert (last.size_bytes, last.latency_s) == (32 * MIB, 0.0)
    assert last.source == "sysfs; not separable by pointer chase"


# ---- on devices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(device_index):
    from kernels.runtime import Runtime, devices

    return Runtime(devices()[device_index])


@pytest.mark.parametrize("image", [False, True], ids=["buffer", "image"])
def test_the_device_goes_where_the_chain_says(runtime, image):
    if image and not runtime.info.image_max_buffer_texels:
        pytest.skip("the device has no images over buffers")
    rng = np.random.default_rng(3)
    chains = Chains(runtime, image=image)
    made = [
        spaced(s, 64, rng, runtime.limits.kind, texels=image) for s in (16 * KIB, 10 * KIB, 8 * KIB, 4 * KIB, 2 * KIB)
    ]
    walks = chains.add("chase", made)
    assert [walk.chain.span_bytes for walk in walks] == [chain.span_bytes for chain in made]
    for walk, chain in zip(walks, made, strict=True):
        count = len(chain.units)
        assert sorted((walk.chain.units - walk.chain.units.min()).tolist()) == sorted(chain.units.tolist())
        ends = set()
        for steps in range(8, count + 8, 8):
            chains.launch(walk, steps)
            ends.add(chains.arrived())
            assert chains.arrived() == follow(walk.chain, steps)
        assert len(ends) == len(range(8, count + 8, 8)), "no place comes up before the round is complete"
    full = walks[0]
    assert len(full.chain.units) % 8 == 0
    chains.launch(full, len(full.chain.units))
    assert chains.arrived() == full.first, "a whole round comes back to where it began: every line was visited once"


def test_a_device_that_reads_something_else_is_refused(runtime):
    chains = Chains(runtime)
    (walk,) = chains.add("chase", [clashing(24, 4096, np.random.default_rng(4))])
    wrong = replace(walk, chain=Chain(np.roll(walk.chain.units, 1) + 1, walk.chain.span_bytes, 24, warm=False))
    from layoutopt.errors import DeviceError

    with pytest.raises(DeviceError, match=r"pointer chase chase_24 ended at \d+, expected \d+: the device reads other"):
        run_walks([(chains, wrong)], 3, 0.0)


def test_a_small_chase_records_what_a_model_keeps(runtime):
    ticks = []
    findings = probe_caches(runtime, 0.1, largest_bytes=256 * KIB, tick=lambda: ticks.append(1))
    assert len(ticks) >= 3
    curve = curve_of(dict(findings.probes), "chase_buffer")
    assert curve.sizes_bytes[-1] == 256 * KIB
    assert list(curve.sizes_bytes) == sorted(set(curve.sizes_bytes))
    for probe in findings.probes.values():
        assert probe.unit == "loads"
        assert len(probe.rounds_ns) >= 3
        assert probe.work % 8 == 0
    assert findings_of(findings.probes) == findings
    for fact in chase_facts(findings).values():
        assert fact.source
        assert fact.value == "not separable" or fact.value > 0
    caches = caches_of(runtime, findings)
    if runtime.limits.kind == "cpu" and cpu_caches():
        assert [c.size_bytes for c in caches] == [c.size_bytes for c in cpu_caches()]
