"""The three tiers (host, device, peer), the OpenCL devices found, and the shared data.

A test that names the fixture ``device_index`` runs once per OpenCL device and belongs to the device tier. The tier
fails, rather than skips, where there is no device: a run that measured nothing must not look like one that passed.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NO_DEVICE = "no OpenCL device found: `pip install 'pyopencl[pocl]'` brings one for the CPU (make setup does)"

settings.register_profile(
    "layoutopt",
    deadline=None,  # the machine may be busy
    derandomize=True,  # the same examples everywhere: a failure is seen again
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("layoutopt"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "layoutopt"))


@lru_cache(maxsize=1)
def opencl_devices() -> tuple[str, ...]:
    """``platform version | device`` of every OpenCL device, in the order of the runtime's device indices."""
    try:
        import pyopencl as cl

        found = [(platform, device) for platform in cl.get_platforms() for device in platform.get_devices()]
    except (ImportError, cl.Error):  # no package, no loader or no driver: no device
        return ()
    return tuple(f"{p.name} {_release(p.version)} | {d.name}" for p, d in found)


def _release(version: str) -> str:
    """``3.1+debian`` of ``OpenCL 3.0 PoCL 3.1+debian  Linux, …``; the whole text of other platforms."""
    words = version.split()
    return words[words.index("PoCL") + 1] if "PoCL" in words[:-1] else version


def pytest_report_header() -> list[str]:
    names = opencl_devices()
    return [f"OpenCL device {i}: {name}" for i, name in enumerate(names)] or ["OpenCL devices: none"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_index" in metafunc.fixturenames:
        names = opencl_devices()
        ids = [f"{i}: {name}" for i, name in enumerate(names)] or ["no device"]
        metafunc.parametrize("device_index", range(len(ids)), ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device_index" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.device)
        if not any(item.get_closest_marker(tier) for tier in ("device", "peer")):
            item.add_marker(pytest.mark.host)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("device") and not opencl_devices():
        pytest.fail(NO_DEVICE, pytrace=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets that lies beside the checkout."""
    if not SHARED_DATA.is_dir():
        reason = f"needs the data sets in {SHARED_DATA}"
        if os.environ.get("LAYOUTOPT_REQUIRE_SHARED") == "1":
            pytest.fail(f"{reason}, and LAYOUTOPT_REQUIRE_SHARED=1 says that they are here", pytrace=False)
        pytest.skip(reason)
    return SHARED_DATA
