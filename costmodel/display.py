"""A device model as tables for notebooks: what ``DeviceModel._repr_html_`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.display_parts import bytes_text, html, table, time_text

if TYPE_CHECKING:
    from costmodel.device import DeviceModel, Fact

__all__ = ["device_html"]


def device_html(model: DeviceModel) -> str:
    """Where the model comes from, how far its predictions are off, its caches and its facts with their sources."""
    about = [("origin", f"{model.origin} {model.date}".strip()), ("driver", model.driver), ("platform", model.platform)]
    if model.measurements:
        about.append(("kernels measured", f"{len(model.measurements)} in {model.budget_s:.0f} s"))
    held = model.held_out
    if held is not None:
        about.append(
            (
                f"error on {held.kernels} kernels held out",
                f"median {held.median_error:.0%}, 90th percentile {held.p90_error:.0%}, Kendall tau {held.tau:.2f}",
            )
        )
    if model.unknown:
        about.append(("not known", ", ".join(model.unknown)))
    caches = [
        (
            cache.name,
            bytes_text(cache.size_bytes),
            f"{cache.line_bytes} B",
            cache.ways,
            "one for all" if cache.shared else "one a unit",
            cache.confidence,
        )
        for cache in model.caches
    ]
    facts = [(name, _value(name, fact), fact.confidence, fact.source) for name, fact in model.facts.items()]
    return html(
        table(f"Device model of {model.name}", (), about),
        table("Caches", ("cache", "size", "line", "ways", "instances", "confidence"), caches),
        table("Facts", ("fact", "value", "confidence", "source"), facts),
    )


def _value(name: str, fact: Fact) -> str:
    if isinstance(fact.value, str):
        return fact.value
    if name.endswith("bytes_per_s"):
        return f"{fact.value / 1e9:.4g} GB/s"
    if name.endswith("flops_per_s"):
        return f"{fact.value / 1e9:.4g} GFLOP/s"
    return time_text(fact.value * 1e9) if name.endswith("_s") and "_per_" not in name else f"{fact.value:.6g}"
