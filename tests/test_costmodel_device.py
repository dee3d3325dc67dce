"""Device models as files: what is kept, what is refused, what ships."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest

from costmodel import device
from costmodel.device import CacheLevel, DeviceModel, Fact, FamilyFit, HeldOut, Measurement, Probe
from kernels.spec import DeviceLimits
from layoutopt.errors import DeviceError, LayoutOptError


def model(**changes) -> DeviceModel:
    whole = DeviceModel(
        name='a "device"',
        driver="1.2",
        platform="made up",
        limits=DeviceLimits("gpu", 6, 256, 1024, 2048, 1024, 64, 32, True, 16, 32),
        origin="calibrated",
        date="2026-11-29T12:00:00+00:00",
        caches=(CacheLevel("L1", 1024, 64, 4, latency_s=1e-9, source="tests", confidence="high"),),
        facts={"flops_per_s": Fact(1e12, "tests", "high"), "denormals": Fact("none", "tests", "low")},
        unknown=("what it weighs",),
        probes={"copy": Probe("a copy", 100.0, "bytes", (3, 1, 2))},
        features=("launches", "flops"),
        measurements={"ab12": Measurement("f.n(v=4)", 'reduce [2,"x"] -> [2]', (5, 4, 900), (1.0, 2.5e8), True)},
        constants={"f.n": FamilyFit({"flops": 0.25}, 7, 0.11), "all": FamilyFit({}, 1, 0.5)},
        held_out=HeldOut(9, 0.1, 0.3, 0.5, 0.8, 0.9, 0.7, 40, "2026-11-29"),
        budget_s=12.5,
    )
    return replace(whole, **changes)


def test_file_keeps_everything(tmp_path):
    before = model()
    device.save(before, tmp_path / "d.toml")
    after = device.load(tmp_path / "d.toml")
    assert after == before
    assert after.hash == before.hash
    assert after.measurements["ab12"].rounds_ns == (5, 4, 900), "raw repetitions keep their order and outliers"


def test_hash_follows_content():
    assert model().hash == model().hash
    measured = model().measurements["ab12"]
    other = replace(measured, rounds_ns=(5, 4, 901))
    assert model(measurements={"ab12": other}).hash != model().hash
    assert model(date="2026-11-30").hash != model().hash
    # A whole number written as such is the same number.
    assert model(facts={"x": Fact(5, "", "")}).hash == model(facts={"x": Fact(5.0, "", "")}).hash


def test_a_thousand_measurements_stay_small_and_quick(tmp_path):
    names = tuple(f"feature_{i}" for i in range(20))
    values = tuple(1234.5678 * (i + 1) for i in range(20))
    many = {
        f"{i:024x}": Measurement("contraction.outer(mr=8,nv=2,v=16)", "contraction", (i,) * 7, values)
        for i in range(1000)
    }
    device.save(model(features=names, measurements=many), tmp_path / "d.toml")
    assert (tmp_path / "d.toml").stat().st_size < 2_000_000
    begin = time.perf_counter()
    assert len(device.load(tmp_path / "d.toml").measurements) == 1000
    assert time.perf_counter() - begin < 5, "about 0.1 s on a quiet machine"


def test_a_file_older_than_cache_policies_keeps_its_hash():
    new = ("fetch_on_write", "replacement", "inclusion", "hashed")
    text = device.dumps(model())
    older = "\n".join(line for line in text.splitlines() if not line.startswith(new))
    assert older != text
    assert device.loads(older).hash == model().hash
    for change in ({"fetch_on_write": False}, {"replacement": "plru"}, {"inclusion": "inclusive"}, {"hashed": True}):
        assert model(caches=(replace(model().caches[0], **change),)).hash != model().hash


MEASURED = {"nvidia-h200", "pocl-cpu-3.0", "pocl-cpu-3.1"}


@pytest.mark.parametrize("name", device.list_builtin())
def test_shipped_models_state_their_sources(name):
    shipped = device.load(name)
    if name in MEASURED:
        assert shipped.origin == "calibrated"
        assert len(shipped.measurements) > 500
    else:
        assert shipped.origin == "modelled"
        assert not shipped.measurements
        assert shipped.unknown, "what is not known is said"
        assert shipped.name == name
    for key in ("flops_per_s", "memory_bytes_per_s", "launch_s"):
        assert shipped.number(key) > 0
    for fact in shipped.facts.values():
        assert fact.source
        assert fact.confidence in ("high", "medium", "low", "assumed")
    for cache in shipped.caches:
        assert cache.source
        assert cache.confidence in ("high", "medium", "low", "assumed")
        assert cache.size_bytes % (cache.line_bytes * cache.ways) == 0, "whole sets"
    assert shipped.caches[-1].serves == "all", "the last cache serves buffers and images"
    for key in set(shipped.facts) & {f.name for f in fields(shipped.limits)}:
        assert shipped.number(key) == getattr(shipped.limits, key), "limits are what the facts say"


def test_models_of_the_phones_that_papers_use_ship():
    adreno = {f"adreno-{n}" for n in (640, 730, 740, 830)}
    modelled = adreno | {"mali-g78", "mali-g715", "immortalis-g925", "generic-cpu"}
    assert modelled == set(device.list_builtin()) - MEASURED
    rates = [device.load(f"adreno-{n}").number("memory_bytes_per_s") for n in (640, 730, 740, 830)]
    assert rates == sorted(rates), "each generation reads faster"


@pytest.mark.parametrize("name", device.list_builtin())
def test_shipped_models_plan_the_digits(name):
    from layoutopt import planner
    from layoutopt.facade import solve_plan
    from layoutopt.models import find_graph
    from layoutopt.rewrites import planned_graph

    shipped, graph = device.load(name), find_graph("vit-digits")
    plan = solve_plan(graph, shipped, strategy="greedy")
    planner.validate(plan, planned_graph(plan, graph), None, shipped.limits)
    assert plan.device_name == shipped.name
    assert plan.solver.objective_ns > 0


def test_shipped_phone_is_the_one_of_the_facts():
    phone = device.load("adreno-740")
    assert phone.limits.kind == "gpu"
    assert phone.limits.image_max_width == phone.number("image_max_side") == 16384
    assert phone.limits.max_alloc_bytes == phone.number("max_alloc_bytes") == 884e6
    assert phone.limits.compute_units == phone.number("compute_units") == 6
    assert phone.limits.local_mem_bytes == phone.number("local_mem_bytes") == 32768
    assert phone.facts["ieee_fma"].value == "none"


def test_missing_model_says_what_there_is():
    with pytest.raises(DeviceError, match=r"no device model 'nowhere\.toml'.*adreno-740.*generic-cpu"):
        device.load("nowhere.toml")


BODY = device.dumps(model())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = ", "damaged"),
        (BODY.replace("format = 1", "format = 99"), "format 99.*reads 1"),
        ("name = 'x'", "format None"),
        (BODY.replace('origin = "calibrated"', "origin = 3"), r"Expected `str`, got `int`.*origin"),
        (BODY.replace("[limits]", "[limit]"), "not a device model.*limits"),
        (BODY.replace("compute_units = 6", "computer_units = 6"), r"unknown entry limits\.computer_units"),
        (BODY.replace("size_bytes = 1024", "size_bytes = 1024\nfoo = 1"), r"unknown entry caches\.foo"),
        (BODY.replace("[1.0, 250000000.0]", "[1.0]"), "measurement ab12 has 3 repetitions and 1 features"),
        (BODY.replace("[5, 4, 900]", "[]"), "measurement ab12 has 0 repetitions"),
    ],
)
def test_bad_files_are_named_and_explained(tmp_path, text, words):
    assert text != BODY
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=words) as caught:
        device.load(path)
    assert str(path) in str(caught.value)


def test_binary_rubbish_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe\x00rubbish")
    with pytest.raises(DeviceError, match="cannot be read"):
        device.load(path)


def test_a_number_that_is_not_stated_is_asked_for():
    with pytest.raises(DeviceError, match=r"states no number 'launch_s' \(facts stated: denormals, flops_per_s\)"):
        model().number("launch_s")
    with pytest.raises(DeviceError, match="states no number 'denormals'"):
        model().number("denormals")


def test_unwritable_place_leaves_nothing(tmp_path):
    with pytest.raises(LayoutOptError, match="cannot write"):
        device.save(model(), tmp_path / "no" / "such" / "folder.toml")
    assert not list(tmp_path.iterdir())
