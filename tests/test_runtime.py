"""The OpenCL runtime on every device found: choosing, building, caching, failing with words."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels import discovery, runtime
from kernels.runtime import Runtime, devices, pick
from layoutopt.errors import DeviceError

ROOT = Path(__file__).resolve().parent.parent
DOUBLE = "__kernel void twice(__global const float* restrict x, __global float* restrict y)" + (
    "{ int i = get_global_id(0); y[i] = 2.0f * x[i]; }"
)


@pytest.fixture(params=devices(), ids=lambda d: d.short)
def rt(request: pytest.FixtureRequest) -> Runtime:
    return Runtime(request.param)


def test_some_device_is_found() -> None:
    assert devices(), runtime.no_device_reason()


def test_device_info_is_complete(rt: Runtime) -> None:
    info = rt.info
    assert info.platform
    assert info.name
    assert info.driver
    assert info.clc_version.startswith("OpenCL C")
    assert info.limits.compute_units >= 1
    assert info.limits.max_alloc_bytes <= info.limits.global_mem_bytes
    assert info.timer_resolution_ns >= 1
    assert info.inf_nan
    assert set(info.model_hash_fields) >= {"platform_version", "name", "driver"}


def test_build_run_and_read_back(rt: Runtime) -> None:
    x = np.arange(33, dtype=np.float32)
    arena = rt.allocate(1 << 16)
    align = rt.limits.base_align_bytes
    source, target = rt.region(arena, 0, x.nbytes), rt.region(arena, 8 * align, x.nbytes)
    rt.upload(source, x)
    kernel = rt.kernel(DOUBLE, "twice", "test.twice()")
    kernel.set_args(source, target)
    rt.enqueue([(kernel, (33,), (1,))] * 3)
    assert np.array_equal(rt.download(target, np.empty_like(x)), 2 * x)
    event = rt.launch_timed(kernel, (33,), (1,))
    event.wait()
    assert event.profile.end >= event.profile.start


def counted_compilations(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    compile_ = rt._compile
    monkeypatch.setattr(rt, "_compile", lambda source, **how: compiled.append(source) or compile_(source, **how))
    return compiled


def test_equal_sources_are_built_once(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = counted_compilations(rt, monkeypatch)
    for _ in range(3):
        rt.kernel(DOUBLE, "twice", "test.twice()")
    assert compiled == [DOUBLE]


def test_many_programs_are_built_as_one(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = counted_compilations(rt, monkeypatch)
    sources = [f"#define FACTOR {i}\n" + DOUBLE.replace("2.0f", "FACTOR") for i in range(5)]
    rt.prepare([(source, f"test.times({i})") for i, source in enumerate(sources)])
    x = np.arange(8, dtype=np.float32)
    source, target = rt.allocate(x.nbytes), rt.allocate(x.nbytes)
    rt.upload(source, x)
    for factor, text in enumerate(sources):
        kernel = rt.kernel(text, "twice", "test.times()")
        kernel.set_args(source, target)
        rt.enqueue([(kernel, (8,), (1,))])
        assert np.array_equal(rt.download(target, np.empty_like(x)), factor * x)
    assert len(compiled) == 1


def test_one_bad_program_among_many_is_named(rt: Runtime) -> None:
    bad = DOUBLE.replace("x[i]", "undeclared_thing")
    with pytest.raises(DeviceError, match=r"kernel test\.bad\(\) does not build") as caught:
        rt.prepare([(DOUBLE, "test.good()"), (bad, "test.bad()")])
    assert "undeclared_thing" in caught.value.build_log


def test_build_failure_names_variant_and_keeps_log(rt: Runtime) -> None:
    with pytest.raises(DeviceError, match=r"contraction\.outer\(mr=8\) does not build") as caught:
        rt.kernel("__kernel void f(__global float* x) { x[0] = undeclared_thing; }", "f", "contraction.outer(mr=8)")
    assert "undeclared_thing" in caught.value.build_log


def test_missing_entry_is_an_error(rt: Runtime) -> None:
    with pytest.raises(DeviceError, match="no entry 'thrice'"):
        rt.kernel(DOUBLE, "thrice", "test.twice()")


def test_entry_that_merging_cannot_see_is_built_alone(rt: Runtime) -> None:
    hidden = "#define KERNEL(NAME) __kernel void NAME(__global float *x)\nKERNEL(hidden) { x[0] = 3; }"
    rt.prepare([(hidden, "test.hidden()"), (DOUBLE, "test.twice()")])
    buffer = rt.allocate(4)
    kernel = rt.kernel(hidden, "hidden", "test.hidden()")
    kernel.set_args(buffer)
    rt.enqueue([(kernel, (1,), (1,))])
    assert rt.download(buffer, np.zeros(1, np.float32)) == [3]


def test_dump_writes_every_source(rt: Runtime, tmp_path: Path) -> None:
    dumping = Runtime(rt.info, dump=tmp_path / "cl")
    dumping.prepare([(DOUBLE, "contraction.outer(mr=8,v=16)")])
    dumping.kernel(DOUBLE, "twice", "contraction.outer(mr=8,v=16)")
    (file,) = (tmp_path / "cl").iterdir()
    assert file.read_text() == DOUBLE
    assert file.name.startswith("contraction.outer_mr=8,v=16")


def test_nan_and_infinity_survive_the_build_options(rt: Runtime) -> None:
    x = np.array([np.nan, np.inf, -np.inf], dtype=np.float32)
    source, target = rt.allocate(x.nbytes), rt.allocate(x.nbytes)
    rt.upload(source, x)
    kernel = rt.kernel(
        "__kernel void f(__global const float* restrict x, __global float* restrict y)"
        "{ int i = get_global_id(0); y[i] = isnan(x[i]) ? 1.0f : (isinf(x[i]) ? 2.0f : 3.0f); }",
        "f",
        "test.classify()",
    )
    kernel.set_args(source, target)
    rt.enqueue([(kernel, (3,), (1,))])
    assert rt.download(target, np.empty_like(x)).tolist() == [1, 2, 2]


def test_pick_by_index_and_substring(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in devices():
        assert pick(str(device.index)) == device
        assert pick(device.label.upper()) == device
        monkeypatch.setenv("LAYOUTOPT_DEVICE", str(device.index))
        assert pick() == device


def test_pick_prefers_gpu_then_newest_pocl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAYOUTOPT_DEVICE", raising=False)
    base = devices()[0]
    made = [
        replace(base, index=0, platform_version="OpenCL 3.0 PoCL 3.0-rc2 Linux"),
        replace(base, index=1, platform_version="OpenCL 3.0 PoCL 3.1+debian Linux"),
        replace(base, index=2, platform_version="OpenCL 3.0 Other CPU driver 17"),
    ]
    made = [replace(d, limits=replace(d.limits, kind="cpu")) for d in made]
    monkeypatch.setattr(discovery, "devices", lambda: made)
    assert pick().index == 1
    made[1] = replace(made[1], platform_version="OpenCL 3.0 PoCL 3.0 Linux")
    assert pick().index == 1
    made.append(replace(made[2], index=3, limits=replace(base.limits, kind="gpu")))
    assert pick().index == 3


def test_pick_says_what_there_is() -> None:
    with pytest.raises(DeviceError, match=r"no OpenCL device matches 'nosuchdevice'; choose one of 0: "):
        pick("nosuchdevice")
    with pytest.raises(DeviceError, match=r"there is no OpenCL device 99; choose one of 0: "):
        pick("99")


def test_ambiguous_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    base = devices()[0]
    monkeypatch.setattr(discovery, "devices", lambda: [base, replace(base, index=1)])
    with pytest.raises(DeviceError, match=r"ambiguous: it matches 0: .*; 1: "):
        pick(base.platform[:6])


def _in_child(code: str, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "POCL_CACHE_DIR")}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def test_no_driver_gives_no_devices_and_a_reason() -> None:
    code = """
import sys
class Fake:
    def find_spec(self, name, path=None, target=None):
        if name == "pyopencl": raise ImportError("blocked")
sys.meta_path.insert(0, Fake())
from kernels.runtime import devices, no_device_reason, pick
from layoutopt.errors import DeviceError
assert devices() == [] and "pip install pyopencl" in no_device_reason()
try: pick()
except DeviceError as error: print(error)
"""
    assert _in_child(code).startswith("no OpenCL device: pyopencl cannot be imported")


@pytest.mark.parametrize("home", [{}, {"HOME": "/proc"}], ids=["no HOME", "HOME not writable"])
def test_works_without_a_home(home: dict[str, str]) -> None:
    code = f"""
from kernels.runtime import Runtime, devices
for d in devices():
    Runtime(d).kernel({DOUBLE!r}, "twice", "t")
print(len(devices()))
"""
    assert int(_in_child(code, **home)) == len(devices())
