"""A device that does not exist: prices kernels by a roofline over what their nests declare, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.cost import Cost
from kernels.spec import DeviceLimits, Kernel


@dataclass(frozen=True)
class FakeCosts:
    """Arithmetic at 50 flops a nanosecond, a quarter of a nanosecond per contiguous vector or single element.

    An access that is not contiguous along its vector's axis pays for every lane; a launch costs 2 µs. Implements
    ``costmodel.cost.Costs``.
    """

    limits: DeviceLimits = field(default_factory=DeviceLimits)
    name: str = "fake"
    hash: str = "fa4e" * 16

    def predict(self, kernel: Kernel, together: int = 1) -> Cost:
        """The cost of all launches."""
        compute = memory = 0.0
        for launch in kernel.launches:
            nest = launch.nest
            compute += nest.flops / 50
            for phase in nest.phases:
                for access in phase.accesses:
                    layout = kernel.launch_layout(launch, access.operand)
                    whole = access.width == 1 or layout.vectorizes(access.axis, access.width)
                    memory += nest.executions(phase, access) * (1 if whole else access.width) / 4
        launches = 2000.0 * len(kernel.launches)
        return Cost(max(compute, memory) + launches, compute, memory, launches)
