"""Simulated costs: a device that nobody measured, its roofline corrected by the traffic that its caches let through.

On such a device ``CostModel`` predicts a roofline: the slower of arithmetic and memory. It works the traffic out in
closed form, from whole caches and whole loops. The cache simulator counts it: sets and ways, lanes that share a line,
tiles that push each other out. So of the kernels that an op has for given layouts, the one that the roofline finds
fastest is simulated, by itself in empty caches, and by what its memory time changes, that of all of them is multiplied:
the choice between layouts is the simulator's, that between kernels over the same layouts the roofline's. Planning
prices tens of thousands of kernels, over some thousands of layouts: of a long launch the first work groups are walked,
and the latter half of them stands for the rest. Ops that take less than a launch are left as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from costmodel.device import DeviceModel
from costmodel.features import FEATURES
from costmodel.model import CAUTION, CostModel
from costmodel.shared import busy_units
from kernels.spec import Kernel, KernelVariant, Launch, OpSpec
from kernels.variants import family_of
from layoutopt.errors import DeviceError
from layoutopt.layout import Layout
from simulator.device_caches import Caches, texel_block_of
from simulator.simulate import steered
from simulator.trace import compile_launch

__all__ = ["SimulatedCosts"]

MAX_ACCESSES = 400_000
"""Of a launch that are walked."""
SMALL = 0.25
"""Of a launch's time: kernels that take less decide little and are not simulated."""
_APART = 4096
_LINES, _BYTES = (FEATURES.index(name) for name in ("request_lines", "memory_bytes"))


class SimulatedCosts(CostModel):
    """Prices kernels by the roofline of a device's facts over simulated traffic; implements ``costmodel.cost.Costs``.

    Args:
        model: made of facts: on a calibrated device, measurements say more than a simulator can.
        caution: as ``CostModel`` takes it.
        max_accesses: of a launch, beyond which only its first work groups are walked.

    Raises:
        DeviceError: the model is calibrated, or lists no caches.
    """

    def __init__(self, model: DeviceModel, caution: float = CAUTION, max_accesses: float = MAX_ACCESSES) -> None:
        super().__init__(model, caution)
        if model.constants or model.measurements:
            raise DeviceError(
                f"device model {model.name} is calibrated: kernels were measured on it, which says more than simulated "
                "costs; use --costs model"
            )
        self.hash = hashlib.sha256(f"{model.hash} simulated {max_accesses:g}".encode()).hexdigest()
        self._max_accesses = max_accesses
        self._caches = {images: Caches(model, images) for images in (False, True)}
        self._variants: dict[OpSpec, list[KernelVariant]] = {}
        self._factors: dict[tuple[OpSpec, tuple[Layout, ...]], float] = {}

    @property
    def simulated(self) -> int:
        """Kernels that were simulated so far."""
        return sum(factor != 1.0 for factor in self._factors.values())

    def _items(self, kernel: Kernel) -> tuple[float, float, float]:
        compute, memory, launch = super()._items(kernel)
        key = kernel.spec, kernel.layouts
        if key not in self._factors:
            self._factors[key] = self._factor(kernel)
        return compute, memory * self._factors[key], launch

    def _factor(self, kernel: Kernel) -> float:
        """What the memory time of kernels over these layouts is multiplied by."""
        fastest, rooflines = kernel, super()._items(kernel)
        for variant in self._of(kernel.spec):
            other = family_of(kernel.spec.kind).build(variant, kernel.spec, kernel.layouts)
            if other is not None and other.variant != kernel.variant:
                own = super()._items(other)
                # Of equals the first by label, whichever was asked for.
                if (max(own[:2]), other.variant.label) < (max(rooflines[:2]), fastest.variant.label):
                    fastest, rooflines = other, own
        if max(rooflines[:2]) < SMALL * self._launch_ns * len(fastest.launches) or not rooflines[1]:
            return 1.0
        lines, moved = self.traffic(fastest)
        values = list(self._features(fastest))
        values[_LINES], values[_BYTES] = lines / self.machine.line_bytes, moved
        return self._roofline(values, len(fastest.launches[0].images) > 1)[1] / rooflines[1]

    def _of(self, spec: OpSpec) -> list[KernelVariant]:
        if spec not in self._variants:
            self._variants[spec] = family_of(spec.kind).variants(spec, self.limits)
        return self._variants[spec]

    def traffic(self, kernel: Kernel) -> tuple[float, float]:
        """Bytes of line accesses, and bytes to and from memory, per compute unit that the kernel keeps busy.

        What is stored is written back in the end, though the caches may still hold it.
        """
        caches = self._caches[any(launch.images for launch in kernel.launches)]
        caches.clear()
        ids = {
            position: np.random.default_rng(position).integers(0, end, kernel.operand_layout(position).shape)
            for position, end in steered(kernel).items()
        }
        near = far = 0.0
        for launch in kernel.launches:
            found = self._begun(caches, kernel, launch, ids)
            lines, read, written = found[1], found[caches.columns.read], found[caches.columns.written]
            stored = sum(kernel.buffer_bytes(position) for position in _stored(launch))
            busy = busy_units(launch.nest.groups, self.machine.compute_units)
            near += lines * self._unit_bytes(caches, launch) / busy
            far += (read + max(written, stored)) / busy
        return near, far

    def _begun(self, caches: Caches, kernel: Kernel, launch: Launch, ids: Mapping[int, np.ndarray]) -> np.ndarray:
        """Counters of a launch from its first work groups [columns]."""
        compiled = compile_launch(kernel, launch, ids, texel_block_of(self.model))
        addresses, groups = _apart(kernel), compiled.groups
        share = self._max_accesses / max(compiled.executions, 1)
        half = max(int(groups * share / 2), 1)
        if 2 * half >= groups:
            return caches.walked(compiled, addresses, 0, groups).sum(0).astype(float)
        first = caches.walked(compiled, addresses, 0, half).sum(0)
        return first + caches.walked(compiled, addresses, half, 2 * half).sum(0) * ((groups - half) / half)

    @staticmethod
    def _unit_bytes(caches: Caches, launch: Launch) -> int:
        """What one line access of most of a launch's operands moves."""
        ways = ("all", "image" if launch.images else "buffer")
        return next(level.unit_bytes for level in caches.hierarchy.levels if level.serves in ways)


def _apart(kernel: Kernel) -> np.ndarray:
    """A byte address for each operand and workspace, none over another, outputs that overwrite an input with it."""
    alias = {kernel.spec.inputs + out: inp for out, inp in kernel.spec.inplace}
    out: list[int] = []
    free = _APART
    for position in range(len(kernel.layouts) + len(kernel.scratch)):
        if position in alias:
            out.append(out[alias[position]])
            continue
        out.append(free)
        free += -(-kernel.buffer_bytes(position) // _APART) * _APART
    return np.array(out, dtype=np.int64)


def _stored(launch: Launch) -> set[int]:
    return {access.operand for phase in launch.nest.phases for access in phase.accesses if access.write}
