"""A device's rates, launch time and caches by microbenchmarks alone, as a device model without kernels."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from costmodel.cacheprobe import probe_caches
from costmodel.caches import caches_of, chase_facts
from costmodel.device import DeviceModel, Fact
from costmodel.features import FEATURES
from costmodel.microbench import probes

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["chase_seconds", "measured_facts"]

SHARE_CHASE = 0.08
"""Share of the budget for finding caches by pointer chase."""
CHASE_S = {"cpu": 9.0, "gpu": 7.0}
THOROUGH_CHASE_S = 60.0
LEAST_CHASE_S = {"cpu": 7.0, "gpu": 3.0}
"""With less time than this for it, nothing is chased: a CPU's caches are known anyway, a GPU's driver knows little."""


def chase_seconds(runtime: Runtime, budget_s: float, thorough: bool = False) -> float:
    """What of a calibration's budget goes to finding caches; 0 where it is too little to find any."""
    most = THOROUGH_CHASE_S if thorough else CHASE_S[runtime.limits.kind]
    share = min(budget_s * SHARE_CHASE * (2 if thorough else 1), most)
    return share if share >= LEAST_CHASE_S[runtime.limits.kind] else 0.0


def measured_facts(
    runtime: Runtime, chase_s: float = 0.0, thorough: bool = False, tick: Callable[[], None] = lambda: None
) -> DeviceModel:
    """A model of what microbenchmarks tell in a few seconds, bandwidths and peak rates; no kernel is measured.

    Args:
        runtime: the device.
        chase_s: seconds for finding caches by pointer chase; 0: caches are what system and driver say.
        thorough: chase in finer steps.
        tick: called after each round of the chase.

    Raises:
        DeviceError: the device refuses a microbenchmark.
    """
    device, found = runtime.info, probes(runtime)
    caches = probe_caches(runtime, chase_s, thorough=thorough, tick=tick) if chase_s else None

    def rate(name: str) -> Fact:
        return Fact(float(f"{found[name].per_s:.6g}"), f"measured: {found[name].what}", "high")

    widest = max((n for n in found if n.startswith("fma_")), key=lambda n: found[n].per_s)
    launch, host = (
        Fact(float(f"{1 / found[name].per_s:.6g}"), f"measured: {found[name].what}", "medium")
        for name in ("launch", "host_launch")
    )
    return DeviceModel(
        name=device.name,
        driver=device.driver,
        platform=f"{device.platform} {device.platform_version}",
        limits=runtime.limits,
        origin="calibrated",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        caches=caches_of(runtime, caches),
        facts=(chase_facts(caches) if caches else {})
        | {
            "flops_per_s": rate(widest),
            "memory_bytes_per_s": rate("copy_memory"),
            "cache_bytes_per_s": rate("copy_cache"),
            "launch_s": launch,
            "host_launch_s": host,
        },
        probes=found | dict(caches.probes if caches else {}),
        features=FEATURES,
    )
