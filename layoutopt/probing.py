"""Microbenchmarks on their own: a device's rates, latencies and caches as a table, and the model that states them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from kernels.runtime import Runtime

__all__ = ["cache_lines", "probe_facts", "probe_only", "probe_rows"]


def probe_only(runtime: Runtime, *, thorough: bool = False, tick: Callable[[], None] = lambda: None) -> DeviceModel:
    """A model of what microbenchmarks tell; no kernel is measured.

    Args:
        runtime: the device.
        thorough: longer and in finer steps.
        tick: called now and then.

    Raises:
        DeviceError: the device refuses a microbenchmark.
    """
    from costmodel.facts import chase_seconds, measured_facts

    return measured_facts(runtime, chase_seconds(runtime, float("inf"), thorough), thorough, tick)


def probe_rows(model: DeviceModel) -> list[tuple[str, str, str, str]]:
    """(name, median, quartiles, what) of each probe: nanoseconds a load of a chase, else a rate."""
    rows = []
    for name, probe in sorted(model.probes.items(), key=lambda item: _order(item[0])):
        low, middle, high = _quartiles(probe.rounds_ns)
        if probe.unit == "loads":
            told = f"{middle / probe.work:.3g} ns a load"
        elif probe.unit == "launches":
            told = f"{middle / probe.work / 1e3:.3g} us"
        else:
            told = f"{probe.work / max(middle, 1):.4g} G{probe.unit}/s"
        rows.append((name, told, f"{low / max(middle, 1):.2f}-{high / max(middle, 1):.2f}", probe.what))
    return rows


def cache_lines(model: DeviceModel) -> list[str]:
    """The line that sums the caches up, then everything that the chase found or did not."""
    from costmodel.caches import describe_caches

    told = [
        f"  {key}: {fact.value if isinstance(fact.value, str) else _short(key, fact.value)} "
        f"({fact.confidence}; {fact.source})"
        for key, fact in model.facts.items()
        if key.startswith("chase_")
    ]
    return [describe_caches(model), *told]


def probe_facts(model: DeviceModel) -> dict[str, Any]:
    """All of it for machines."""
    return {
        "device": model.name,
        "driver": model.driver,
        "caches": model.caches,
        "facts": model.facts,
        "probes": {
            name: {
                "what": p.what,
                "unit": p.unit,
                "per_s": p.per_s,
                "ns_per_unit": 1e9 / p.per_s,
                "rounds_ns": p.rounds_ns,
            }
            for name, p in model.probes.items()
        },
    }


def _order(name: str) -> tuple[int, str, int]:
    head, _, size = name.rpartition("_")
    chase = name.startswith("chase_")
    return (int(chase), head if chase else "", int(size) if chase and size.isdigit() else 0)


def _short(key: str, value: float) -> str:
    return f"{value * 1e9:.4g} ns" if key.endswith("_s") else f"{value:.10g}"


def _quartiles(values: tuple[int, ...]) -> tuple[float, float, float]:
    import numpy as np

    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)
