"""The three tiers (host, device, peer), the OpenCL devices found, and the shared data.

A test that names the fixture ``device_index`` runs once per OpenCL device and belongs to the device tier. The tier
fails, rather than skips, where there is no device: a run that measured nothing must not look like one that passed.
"""

from __future__ import annotations

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Each worker, and what it starts, gets its share of the cores; read when numpy and torch are first imported.
    share = max((os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), 1)
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", str(share))

import pytest
from hypothesis import HealthCheck, settings

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
settings.register_profile(
    "layoutopt",
    deadline=None,  # the machine may be busy
    derandomize=True,  # the same examples everywhere: a failure is seen again
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("layoutopt"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "layoutopt"))


def _device_ids() -> list[str]:
    """``platform version | device`` of every OpenCL device, by device index."""
    from kernels.runtime import devices

    return [f"{d.platform} {_release(d.platform_version)} | {d.name}" for d in devices()]


def _release(version: str) -> str:
    """``3.1+debian`` of ``OpenCL 3.0 PoCL 3.1+debian Linux, …``; the whole text of other platforms."""
    words = version.split()
    return words[words.index("PoCL") + 1] if "PoCL" in words[:-1] else version


def pytest_report_header() -> list[str]:
    return [f"OpenCL device {i}: {name}" for i, name in enumerate(_device_ids())] or ["OpenCL devices: none"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_index" in metafunc.fixturenames:
        ids = [f"{i}: {name}" for i, name in enumerate(_device_ids())] or ["no device"]
        metafunc.parametrize("device_index", range(len(ids)), ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _wants_device(item):
            item.add_marker(pytest.mark.device)
        if not any(item.get_closest_marker(tier) for tier in ("device", "peer")):
            item.add_marker(pytest.mark.host)


def _wants_device(item: pytest.Item) -> bool:
    """Whether a test names ``device_index`` or is parametrised over the runtime's devices by a fixture of its own."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return "device_index" in params or any(type(value).__name__ == "DeviceInfo" for value in params.values())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("device") and not _device_ids():
        from kernels.runtime import no_device_reason

        pytest.fail(f"no OpenCL device: {no_device_reason()}", pytrace=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets that lies beside the checkout."""
    if not SHARED_DATA.is_dir():
        reason = f"needs the data sets in {SHARED_DATA}"
        if os.environ.get("LAYOUTOPT_REQUIRE_SHARED") == "1":
            pytest.fail(f"{reason}, and LAYOUTOPT_REQUIRE_SHARED=1 says that they are here", pytrace=False)
        pytest.skip(reason)
    return SHARED_DATA
