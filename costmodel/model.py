"""Prediction: what a kernel costs on a device, itemised.

A kernel that was measured costs its median. Another costs the fitted constants times its features, and, in families
where that was found to help, times what measured kernels like it deviated by. On a device that was never calibrated it
costs a roofline from the device's facts: the slower of arithmetic and memory. Launches are added to each: events do not
see the time between kernels. Each but the roofline has a 90% interval, which is asked for by itself: planning prices a
hundred thousand kernels and shows few.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import exp

from costmodel.constants import finest, levels, samples_of
from costmodel.cost import Cost
from costmodel.deviation import Predictor
from costmodel.device import DeviceModel, Measurement
from costmodel.features import COMPUTE, FEATURES, LAUNCH, Machine, kept_features
from costmodel.shared import shared_cost
from costmodel.uncertainty import median_interval
from kernels.spec import DeviceLimits, Kernel, OpSpec
from layoutopt.graph import PRODUCTS

__all__ = ["CostModel", "kernel_kind", "layouts_text", "spec_text"]


@lru_cache(maxsize=1 << 12)
def spec_text(spec: OpSpec) -> str:
    """An op spec for people and files: ``contraction [1,128,384] [1,384,384] -> [1,128,384]``.

    A pointwise op that computes nothing is called a relayout; another, and a contraction's epilogue, says what it
    computes.
    """
    shapes = ["[" + ",".join(map(str, shape)) + "]" for shape in spec.shapes]
    kind = kernel_kind(spec)
    program = spec.attr("epilogue" if kind in PRODUCTS else "expr")
    if program is not None and kind != "relayout":
        kind += " " + ",".join(op for op, *_ in program.code)
    return f"{kind} {' '.join(shapes[: spec.inputs])} -> {' '.join(shapes[spec.inputs :])}"


def layouts_text(kernel: Kernel) -> str:
    """The layouts of a kernel's operands, for people and files."""
    return " ".join(layout.describe() for layout in kernel.layouts)


def kernel_kind(spec: OpSpec) -> str:
    """The op's kind for the fit: relayouts are their own."""
    return "relayout" if spec.kind == "pointwise" and not spec.expr.code else spec.kind


_ROOFLINE = tuple(FEATURES.index(name) for name in ("flops", "request_lines", "memory_bytes"))


CAUTION = 1.0
"""Who picks the least of several uncertain prices mostly picks one that is too low. So a kernel that was not measured
costs what is most likely and a standard deviation more: it has to promise more than what is known before it is chosen.
On a CPU, from calibrations of 60 s, plans of two-layer models ran 6 and 14% faster for it."""
NORMAL_90 = 1.645
"""Standard deviations within which nine in ten lie."""


class CostModel:
    """Prices kernels by a device model; implements ``costmodel.cost.Costs``. Never changes the model.

    Args:
        model: calibrated, or made of facts.
        caution: standard deviations that a prediction is raised by (see ``CAUTION``); 0 predicts what is most likely.

    Raises:
        DeviceError: the model lacks ``flops_per_s``, ``memory_bytes_per_s`` or ``launch_s``.
    """

    def __init__(self, model: DeviceModel, caution: float = CAUTION) -> None:
        self.model = model
        self.caution = caution
        self._raised: dict[str, float] = {}
        self.limits: DeviceLimits = model.limits
        self.name = model.name
        self.hash = model.hash
        self.machine = Machine.of(model.limits, model.caches)
        self._image_machine = Machine.of(model.limits, model.caches, "image")
        self._launch_ns = model.number("launch_s") * 1e9
        self._measured = {(m.variant, m.spec) for m in model.measurements.values()}
        units = self.machine.compute_units  # features are per compute unit, rates of the whole device
        self._ns_per_flop = units * 1e9 / model.number("flops_per_s")
        self._ns_per_memory_byte = units * 1e9 / model.number("memory_bytes_per_s")
        near = "cache_bytes_per_s" if "cache_bytes_per_s" in model.facts else "memory_bytes_per_s"
        self._ns_per_near_byte = units * 1e9 / model.number(near)
        images = "texture_bytes_per_s" if "texture_bytes_per_s" in model.facts else near
        self._ns_per_image_byte = units * 1e9 / model.number(images)

    def predict(self, kernel: Kernel, together: int = 1) -> Cost:
        """The cost of one kernel (all its launches).

        Args:
            kernel: over its layouts.
            together: equal kernels that run at once, which share their launches (``costmodel/shared.py``): the cost
                is one's part.
        """
        cost = self._alone(kernel)
        return cost if together == 1 else shared_cost(self, kernel, cost, together)

    def _alone(self, kernel: Kernel) -> Cost:
        launched = self._launch_ns * len(kernel.launches)
        compute, memory, launch = self._items(kernel)
        found = self._measurement(kernel)
        if found is not None:
            scale = found.time_ns / max(compute + memory + launch, 1e-9)
            return Cost(found.time_ns + launched, compute * scale, memory * scale, launch * scale + launched, True)
        if not self.model.constants:
            return Cost(max(compute, memory) + launch + launched, compute, memory, launch + launched)
        raised = self._raise(self._known_levels(kernel))
        compute, memory, launch = compute * raised, memory * raised, launch * raised + launched
        return Cost(compute + memory + launch, compute, memory, launch)

    def _raise(self, own: Sequence[str]) -> float:
        """What predictions of a level are multiplied by."""
        known = self._raised.get(own[0])
        if known is None:
            key = finest(self.model.constants, own)
            error_90 = self.model.constants[key].error_90 if key else 0.0
            known = self._raised[own[0]] = exp(self.caution * error_90 / NORMAL_90)
        return known

    def interval(self, kernel: Kernel) -> tuple[float, float] | None:
        """Nanoseconds, launches included, between which the kernel's cost lies nine times out of ten.

        Of a kernel that was measured: where the median of its repetitions lies. Of another: around the prediction, as
        wide as predictions of left-out kernels of its level needed, wider the less like it there is among those
        measured (``costmodel/uncertainty.py``). None where neither is known: a roofline, a model older than intervals.
        """
        launched = self._launch_ns * len(kernel.launches)
        found = self._measurement(kernel)
        if found is not None:
            low, high = median_interval(found.rounds_ns)
            return min(low, found.time_ns) + launched, max(high, found.time_ns) + launched
        factor = exp(self._predictor.log_error_90(self._known_levels(kernel), self._features(kernel)))
        if factor == 1.0:
            return None
        own = sum(self._items(kernel))
        return own / factor + launched, own * factor + launched

    @cached_property
    def _predictor(self) -> Predictor:
        current = self.model.features == FEATURES
        return Predictor(
            self.model.constants, samples_of(self.model.measurements.values()) if current else (), FEATURES
        )

    def _measurement(self, kernel: Kernel) -> Measurement | None:
        # Hashing a kernel costs more than predicting it: look only where its variant was measured on its shapes.
        if self._measured and (kernel.variant.label, spec_text(kernel.spec)) in self._measured:
            return self.model.measurements.get(kernel.key)
        return None

    def fitted_by(self, kernel: Kernel) -> str:
        """Which constants price a kernel: a label, a variant name, a family, "all" or "roofline"."""
        return finest(self.model.constants, self._known_levels(kernel)) or "roofline"

    def _known_levels(self, kernel: Kernel) -> tuple[str, ...]:
        """The kernel's levels, or those of what stands for a family that was never measured here."""
        own = _levels(kernel)
        like = _LIKE.get(own[-2])
        return like if like and not any(level in self.model.constants for level in own) else own

    def roofline_ns(self, values: Sequence[float]) -> float:
        """Nanoseconds, launches left out, that the device's facts alone give for these features."""
        return max(self._roofline(values))

    def _roofline(self, values: Sequence[float], images: bool = False) -> tuple[float, float]:
        flops, request_lines, memory_bytes = (values[i] for i in _ROOFLINE)
        ns_per_byte = self._ns_per_image_byte if images else self._ns_per_near_byte
        near = request_lines * self.machine.line_bytes * ns_per_byte
        return flops * self._ns_per_flop, max(memory_bytes * self._ns_per_memory_byte, near)

    def _items(self, kernel: Kernel) -> tuple[float, float, float]:
        values = self._features(kernel)
        if self.model.constants:
            parts = self._predictor.items(self._known_levels(kernel), values)
            compute = sum(parts.get(n, 0.0) for n in COMPUTE)
            launch = sum(parts.get(n, 0.0) for n in LAUNCH)
            return compute, sum(parts.values()) - compute - launch, launch
        return (*self._roofline(values, _reads_images(kernel)), 0.0)

    def _features(self, kernel: Kernel) -> tuple[float, ...]:
        return kept_features(kernel, self._image_machine if _reads_images(kernel) else self.machine)


def _reads_images(kernel: Kernel) -> bool:
    """Whether a product reads both its operands through images; one that reads only one so is priced as if none."""
    return len(kernel.launches[0].images) > 1


_LIKE = {
    "quantized_contraction.outer": ("contraction.outer.n", "contraction"),
    "quantized_contraction.staged": ("contraction.staged", "contraction"),
}
"""Variants that a device model may be older than, with the levels that price them until they are measured."""


def _levels(kernel: Kernel) -> tuple[str, ...]:
    return levels(kernel.variant.label, kernel_kind(kernel.spec))
