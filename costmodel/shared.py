"""What a launch takes that does the work of several kernels (see ``kernels/group.py`` and ``kernels/batch.py``).

Each kernel's own time is a part that any launch takes, and work that its groups spread over compute units. Together
they take the first part once, and their work is spread by all their groups: kernels too small to fill a device cost no
more together than one of them, large ones as much as one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from costmodel.cost import Cost
from costmodel.features import FEATURES, LAUNCH, kept_features
from kernels.batch import linear
from kernels.spec import Kernel

if TYPE_CHECKING:
    from costmodel.model import CostModel

__all__ = ["merged_ns", "shared_cost", "stacked_ns"]


def shared_cost(costs: CostModel, kernel: Kernel, alone: Cost, count: int) -> Cost:
    """The part of one among ``count`` equal kernels that run at once.

    Args:
        costs: of the device.
        kernel: of each of them.
        alone: what one costs by itself.
        count: how many they are. Kernels that read images share no launch.
    """
    if any(launch.images for launch in kernel.launches):
        return alone
    gap_ns = costs.model.number("launch_s") * 1e9 * len(kernel.launches)
    own_ns = max(alone.total_ns - gap_ns, 0.0)
    if linear(kernel) is None:
        all_ns = stacked_ns(costs, kernel, own_ns, count)
    else:
        all_ns = merged_ns(costs, [kernel] * count, [own_ns] * count, count * kernel.launches[0].nest.groups)
    total_ns = (all_ns + gap_ns) / count
    part = total_ns / alone.total_ns
    return Cost(total_ns, alone.compute_ns * part, alone.memory_ns * part, alone.launch_ns * part, alone.measured)


def stacked_ns(costs: CostModel, kernel: Kernel, alone_ns: float, count: int) -> float:
    """Nanoseconds of ``count`` instances of a kernel stacked into one grid, the gap to the next launch left out.

    Args:
        costs: of the device.
        kernel: launched so.
        alone_ns: what one instance takes.
        count: instances.
    """
    start = _start_ns(costs, kernel, alone_ns)
    units = costs.machine.compute_units
    groups = [launch.nest.groups for launch in kernel.launches]
    grown = mean(count * busy_units(n, units) / busy_units(n * count, units) for n in groups)
    return start + (alone_ns - start) * grown


def merged_ns(costs: CostModel, kernels: Sequence[Kernel], alone_ns: Sequence[float], groups: int) -> float:
    """Nanoseconds of linear kernels merged into one launch of so many groups, the gap to the next launch left out.

    Args:
        costs: of the device.
        kernels: each of one launch.
        alone_ns: what each takes by itself.
        groups: of the launch.
    """
    units = costs.machine.compute_units
    known: dict[tuple[int, float], float] = {}  # mostly one kernel again and again
    for kernel, ns in zip(kernels, alone_ns, strict=True):
        if (id(kernel), ns) not in known:
            known[id(kernel), ns] = _start_ns(costs, kernel, ns)
    starts = [known[id(kernel), ns] for kernel, ns in zip(kernels, alone_ns, strict=True)]
    work = sum(
        (ns - start) * busy_units(kernel.launches[0].nest.groups, units)
        for kernel, ns, start in zip(kernels, alone_ns, starts, strict=True)
    )
    return max(starts) + work / busy_units(groups, units)


def busy_units(groups: int, units: int) -> float:
    """Compute units that so many equal groups keep busy on average."""
    return groups / -(-groups // units)


def _start_ns(costs: CostModel, kernel: Kernel, alone_ns: float) -> float:
    """The part of a kernel's time that a launch takes whatever it does: the fit's share of it in its own prediction."""
    constants = costs.model.constants.get(costs.fitted_by(kernel))
    cost = costs.predict(kernel)
    gap_ns = costs.model.number("launch_s") * 1e9 * len(kernel.launches)
    if constants is None or cost.total_ns <= gap_ns:
        return 0.0
    counts = dict(zip(FEATURES, kept_features(kernel, costs.machine), strict=True))
    parts = {name: constants.ns_per.get(name, 0.0) * counts[name] for name in LAUNCH}
    of_launch = parts["launches"] / (sum(parts.values()) or 1.0)
    return alone_ns * of_launch * min((cost.launch_ns - gap_ns) / (cost.total_ns - gap_ns), 1.0)
