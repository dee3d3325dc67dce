"""`layoutopt doctor`: every finding from a fault made for it, and a good run on the devices that are here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.devices import DeviceInfo
from kernels.selftest_cases import CASES, cases
from kernels.spec import DeviceLimits
from kernels.variants import families, kernels_for
from layoutopt.cli import main
from layoutopt.doctor import child, device, drivers, install, trial
from layoutopt.doctor.child import HOME, ask, ending
from layoutopt.doctor.finding import Finding, usable
from layoutopt.errors import LayoutOptError

START = f"""
import os, sys, time
sys.path.insert(0, {str(HOME)!r})
from kernels import selftest, selftest_cases, testing
"""
RUN = "\nsys.exit(selftest.main())\n"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of a user who has just installed layoutopt."""
    monkeypatch.chdir(tmp_path)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "LAYOUTOPT_DEVICE", "LAYOUTOPT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def info(**values: object) -> DeviceInfo:
    """A device that is not here."""
    limits = DeviceLimits(kind="gpu", max_work_group_size=1024, local_mem_bytes=64 << 10, simd_width=32)
    known = {
        **{"index": 0, "platform": "P", "platform_version": "OpenCL 3.0", "vendor": "V", "name": "N", "version": "3.0"},
        **{"driver": "1.0", "clc_version": "1.2", "denormals": True, "inf_nan": True, "fma": True},
        **{"image_max_array": 0, "image_max_buffer_texels": 0, "timer_resolution_ns": 1, "limits": limits},
    }
    return DeviceInfo(**{**known, **values})  # type: ignore[arg-type]


def limited(**values: object) -> DeviceInfo:
    return info(limits=replace(info().limits, **values))  # type: ignore[arg-type]


def bad(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.status != "ok"]


# ---- the installation -----------------------------------------------------------------------------------------------


def test_a_package_of_our_names_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError\n")
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(HOME)!r}]
from layoutopt.cli import main
sys.exit(main(["doctor", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    (wrong,) = (f for f in answer["findings"] if f["status"] == "problem")
    assert wrong["check"] == "names"
    assert f"finds {tmp_path / 'kernels'}" in wrong["seen"]
    assert not answer["usable"]


def distribution(folder: Path, name: str, version: str, lines: str = "") -> None:
    where = folder / f"{name}-{version}.dist-info"
    where.mkdir(parents=True)
    (where / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")


def test_packages_that_are_missing_or_of_a_wrong_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = """Requires-Dist: absent-one>=1
Requires-Dist: old-one>=2
Requires-Dist: old-one[more]; extra == "more"
Requires-Dist: new-one<3; extra == "torch"
Requires-Dist: never-here; extra == "dev"
Provides-Extra: more
Provides-Extra: torch
Provides-Extra: dev
"""
    distribution(tmp_path, "ours", "1.0", lines)
    distribution(tmp_path, "old_one", "1.5", "Requires-Dist: inner-one; extra == 'more'\nProvides-Extra: more\n")
    distribution(tmp_path, "new_one", "3.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    base, more, torch = install.check_packages("ours")
    assert (base.status, base.seen) == ("problem", "absent-one is missing; old-one is 1.5, wanted >=2")
    assert (more.status, more.facts["missing"]) == ("ok", ["inner-one"])
    assert "'ours[more]'" in more.mend
    assert torch.status == "warning"
    assert "new-one is 3.1, wanted <3" in torch.seen
    assert "CONTRIBUTING" in torch.mend
    (absent,) = install.check_packages("no-such-distribution")
    assert absent.status == "warning"


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not bad(install.check_folders())
    assert not (tmp_path / "data").exists()  # looking makes nothing
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "deeper"))
    cache, data = install.check_folders()
    assert (cache.status, data.status) == ("warning", "problem")
    assert "XDG_DATA_HOME" in data.mend


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: type("U", (), {"free": 5 << 20}))
    assert [f.status for f in install.check_folders()] == ["warning"] * 2
    assert "5 MiB left" in install.check_folders()[0].seen


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_available_bytes", lambda: 0)
    monkeypatch.setattr(
        install.os, "sysconf", {"SC_AVPHYS_PAGES": 100, "SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}.get
    )
    assert install.check_memory().status == "warning"
    monkeypatch.setattr(install, "_available_bytes", lambda: 8 << 30)
    assert install.check_memory().status == "ok"


def test_a_wrong_configuration_is_found_by_the_doctor(capsys, tmp_path: Path) -> None:
    (tmp_path / "layoutopt.toml").write_text("[plan]\nmemroy = '1GiB'\n")

    def load() -> None:
        raise LayoutOptError("wrong")

    assert install.check_configuration(load).status == "problem"
    assert main(["plan", "vit-digits"]) == 2
    assert main(["doctor", "--quick", "--json"]) == 1
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert "memroy" in found["configuration"]["seen"]


# ---- drivers --------------------------------------------------------------------------------------------------------


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))  # an empty folder
    shipped = drivers.driver_files()
    assert all(file.parent.name == ".libs" for file in shipped)
    (found,) = drivers.check_drivers([])
    assert found.status == "problem"
    assert str(tmp_path) in found.seen
    assert "pip install" in found.mend


def test_a_folder_of_drivers_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "absent"))
    found = drivers.check_drivers()
    assert found[0].status == "problem"
    assert "OCL_ICD_VENDORS names" in found[0].seen
    start, told = drivers.check_start()
    assert start.status == "problem"
    assert "no OpenCL device" in start.seen
    assert not told.of("device")


def test_an_icd_file_whose_library_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone.icd").write_text("/no/such/lib.so\n")
    (tmp_path / "empty.icd").write_text("\n")
    (tmp_path / "text.icd").write_text("text.so\n")
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv("OPENCL_VENDOR_PATH", str(tmp_path))
    found = {f.check: f for f in drivers.check_drivers() if "shipped" not in f.check}
    for name, says in (("gone", "/no/such/lib.so, which does not load"), ("empty", "no library"), ("text", "text.so")):
        assert found[f"driver {name}.icd"].status == "warning"
        assert says in found[f"driver {name}.icd"].seen
    assert "cannot open shared object" in found["driver gone.icd"].seen


def test_no_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drivers.check_loader().status == "ok"
    monkeypatch.setenv("PYTHONPATH", "broken")
    Path("broken/pyopencl").mkdir(parents=True)
    Path("broken/pyopencl/__init__.py").write_text("raise ImportError('libOpenCL.so.1: cannot open')\n")
    broken = drivers.check_loader()
    assert broken.status == "problem"
    assert "libOpenCL.so.1: cannot open" in broken.seen
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda name: None)
    assert drivers.check_loader().seen.startswith("pyopencl is not installed")


def test_a_driver_that_crashes_at_its_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, evil = tmp_path / "good.icd", tmp_path / "evil.icd"
    code = """
import json, os, sys
print(json.dumps({"event": "begin", "what": "loading the drivers"}), flush=True)
if "good" not in os.environ.get("OCL_ICD_VENDORS", ""):
    print("the driver gives up", file=sys.stderr, flush=True)
    os.abort()
print(json.dumps({"event": "devices", "count": 1, "reason": ""}))
"""
    monkeypatch.setattr(child, "_START", code.replace("{", "{{").replace("}", "}}"))
    found, _ = drivers.check_start([good, evil])
    assert found.status == "problem"
    assert "was ended by SIGABRT while loading the drivers" in found.seen
    assert "the driver gives up" in found.seen
    assert found.facts["culprits"] == [str(evil)]


# ---- what a device reports ------------------------------------------------------------------------------------------


def test_small_buffers_say_what_they_prevent() -> None:
    large = device.check_buffers(limited(max_alloc_bytes=64 << 30, global_mem_bytes=64 << 30))
    small = device.check_buffers(limited(max_alloc_bytes=128 << 20))
    assert (large.status, large.facts["too_large"]) == ("ok", [])
    assert small.status == "warning"
    assert "minilm" in small.facts["too_large"]  # 22.7 million parameters of 12 bytes
    assert "vit-digits" not in small.facts["too_large"]


def test_limits_that_leave_kernels_out() -> None:
    (fine,) = device.check_variants(info())
    assert fine.status == "ok"
    (local,) = device.check_variants(limited(local_mem_bytes=1 << 10))
    assert local.status == "warning"
    assert "1024 bytes of local memory leave out" in local.seen
    groups = device.check_variants(limited(max_work_group_size=32))
    assert any("32 work items a group leave out" in found.seen for found in groups)


@pytest.mark.parametrize(
    ("tick", "took", "status"), [(1, 1e-5, "ok"), (1, None, "problem"), (1, 0.0, "problem"), (10**6, 1e-3, "warning")]
)
def test_clocks(tick: int, took: float | None, status: str) -> None:
    assert device.check_clock(info(timer_resolution_ns=tick), took).status == status


def test_notes() -> None:
    assert device.check_note(info()) == []
    assert device.check_note(info(note="renamed"))[0].seen == "renamed"


def test_calibrations(tmp_path: Path) -> None:
    from costmodel import device as models
    from layoutopt.models import calibrated_path

    here = info()
    none = device.check_calibration(here)
    assert (none.status, none.mend) == ("warning", "layoutopt calibrate --device 0")
    model = replace(models.load("generic-cpu"), name=here.name, driver=here.driver, limits=here.limits)
    path = calibrated_path(here)
    path.parent.mkdir(parents=True)
    models.save(model, path)
    assert device.check_calibration(here).status == "ok"
    stale = device.check_calibration(info(driver="2.0"))
    assert stale.status == "warning"
    assert stale.seen.startswith("calibrated under driver 1.0, and now it is 2.0")
    grown = device.check_calibration(limited(compute_units=96))
    assert "made with 2 compute units, now 96" in grown.seen
    path.write_text("nonsense")
    assert f"remove {path}" in device.check_calibration(here).mend


# ---- what a device does ---------------------------------------------------------------------------------------------


def test_every_kind_of_op_is_in_the_self_test() -> None:
    assert set(CASES) == {family.name for family in families()}
    for family in families():
        made = cases(family.name)
        assert {case.spec.kind for case in made} == set(family.kinds)
        for case in made:
            for limits in (DeviceLimits(simd_width=16), info().limits):
                assert kernels_for(case.spec, case.layouts, limits), case.spec


def patched(code: str):
    """The self-test in a child in which something is made wrong first."""

    def ask_child(*words: object, **options: object) -> child.Told:
        return ask([sys.executable, "-c", START + code + RUN, *map(str, words)], **options)  # type: ignore[arg-type]

    return ask_child


def here(index: int) -> DeviceInfo:
    from kernels.runtime import devices

    return devices()[index]


def test_a_kernel_that_computes_wrong(device_index: int) -> None:
    code = """
right = selftest_cases.evaluate
def wrong(kind, *rest):
    return [y + (kind == "iota") for y in right(kind, *rest)]
selftest_cases.evaluate = wrong
"""
    found, _ = trial.try_device(here(device_index), ["iota", "concat"], ask=patched(code))
    assert found.status == "problem"
    assert "kernels are wrong: iota." in found.seen
    assert "values differ" in found.seen
    assert all(sentence.startswith("iota.") for sentence in found.facts["wrong"])
    assert "another device" in found.mend


def test_a_kernel_that_does_not_build(device_index: int) -> None:
    code = """
right = testing.program_source
testing.program_source = lambda kernel, launch: right(kernel, launch) + "\\n#error broken\\n"
"""
    code += "selftest._profiled_s = lambda info: 1e-5\n"
    found, seconds = trial.try_device(here(device_index), ["iota"], ask=patched(code))
    assert found.status == "problem"
    assert "does not build" in found.seen
    assert seconds == 1e-5


def test_a_driver_that_aborts_is_named_and_the_rest_goes_on(device_index: int) -> None:
    code = """
right = selftest.cases
selftest.cases = lambda family: os.abort() if family == "iota" else right(family)
"""
    heard: list[str] = []
    found, _ = trial.try_device(here(device_index), ["iota", "concat"], heard.append, ask=patched(code))
    assert found.status == "problem"
    assert "was ended by SIGABRT at iota" in found.seen
    assert heard == ["concat"]
    assert found.facts["kernels"] > 0


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SILENCE_S", 2.0)
    code = """
import json, time
print(json.dumps({"event": "begin", "what": "iota"}), flush=True)
time.sleep(300)
"""

    def ask_child(*words: object, **options: object) -> child.Told:
        return ask([sys.executable, "-c", code], **options)  # type: ignore[arg-type]

    found, seconds = trial.try_device(info(), ["iota", "concat"], ask=ask_child)
    assert found.status == "problem"
    assert found.seen == "the process said nothing for 2 s at iota"
    assert seconds is None


def test_a_child_that_does_not_start() -> None:
    told = ask([sys.executable, "-c", "import sys; print('noise'); sys.exit('no such thing')"])
    assert (told.events, told.ended, told.errors) == ((), "ended with exit code 1", "no such thing")
    assert ending(-11) == "was ended by SIGSEGV"


@pytest.mark.parametrize("default", [0, 1])
def test_the_slower_of_two_drivers(default: int) -> None:
    old, new = limited(kind="cpu"), replace(limited(kind="cpu"), index=1, driver="2.0", name="other name")
    (found,) = trial.compare_speeds([old, new], {0: 0.02, 1: 0.01}, default)
    assert "device 0 (1.0) took 2.00 times as long as device 1 (2.0)" in found.seen
    assert found.status == ("warning" if default == 0 else "ok")
    assert default == 1 or "LAYOUTOPT_DEVICE=1" in found.mend
    (equal,) = trial.compare_speeds([old, new], {0: 0.0101, 1: 0.01}, default)
    assert (equal.status, equal.device) == ("ok", None)
    gpu = replace(info(), index=2, name="GPU")
    assert trial.compare_speeds([old, gpu], {0: 0.02, 2: 0.01}, 0) == []  # not the same hardware


# ---- all of it ------------------------------------------------------------------------------------------------------


def test_the_devices_here_are_well(device_index: int, capsys) -> None:
    assert main(["doctor", "--quick", "--json", "--device", str(device_index)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usable"]
    found = {f["check"]: f for f in answer["findings"] if f["device"] == device_index}
    assert {"buffers", "limits", "clock", "self-test", "calibration"} <= set(found)
    assert found["self-test"]["status"] == found["clock"]["status"] == "ok"
    assert found["self-test"]["facts"]["kernels"] > 0


def test_families_and_speed_on_the_devices_here(device_index: int) -> None:
    tested, seconds = trial.try_device(here(device_index), ["indexing", "quantize"])
    assert tested.status == "ok", tested.seen
    assert seconds is not None
    assert 0 < seconds < 10
    took = trial.speed_of(here(device_index))
    assert took is not None
    assert 0 < took < 10


@pytest.mark.device
def test_for_people(capsys) -> None:
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       python: Python 3.")
    assert "no problems" in lines[-1]
    assert any(line.strip() == "mend: layoutopt calibrate --device 0" for line in lines)
    assert main(["doctor", "--quick", "--device", "no such device"]) == 2
    assert "no OpenCL device matches" in capsys.readouterr().err


@pytest.mark.device
def test_a_default_device_that_is_not_there(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUTOPT_DEVICE", "no such device")
    assert main(["doctor", "--quick", "--device", "0", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (wrong,) = (f for f in findings if f["status"] == "problem")
    assert "LAYOUTOPT_DEVICE=no such device" in wrong["seen"]
    assert not usable([Finding("x", "problem", "y")])
