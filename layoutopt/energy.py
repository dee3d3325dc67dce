"""Energy of a step, as modelled: joules where a device model states what its device draws, ratios elsewhere.

No device model that ships states what a device draws, so that joules are not known for them. What can be said is how
ways to run a step compare in arithmetic and moved bytes, by the constants of one source for all: Horowitz, Computing's
energy problem (ISSCC 2014), 45 nm: 3.7 pJ for a float32 multiplication, 0.9 pJ for an addition, 1.3 nJ for 64 bits from
DRAM. Phones are made otherwise, so only ratios mean anything. Every operand is counted as moved from and to memory once
an op: what caches keep between ops would lower all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph
from layoutopt.workload import op_bytes, op_flops

if TYPE_CHECKING:
    from costmodel.device import DeviceModel

__all__ = ["BUSY_W", "FLOP_J", "LINK_J_PER_BYTE", "MEMORY_J_PER_BYTE", "SOURCE", "Energy", "energy"]

FLOP_J = (3.7e-12 + 0.9e-12) / 2
"""Of one float32 operation, where half are multiplications and half additions."""
MEMORY_J_PER_BYTE = 1.3e-9 / 8
SOURCE = "Horowitz, ISSCC 2014, 45 nm: 2.3 pJ a float32 operation, 1.3 nJ for 8 bytes from memory"
BUSY_W, LINK_J_PER_BYTE = "busy_power_w", "link_j_per_byte"
"""Facts of a device model: watts while kernels run; joules for a byte that is sent."""


@dataclass(frozen=True)
class Energy:
    """Of one step on the device.

    Attributes:
        device_j: by the power that the device model states; None: it states none.
        link_j: of what is sent, by what the device model states; None: it states none. 0 where nothing is sent.
        modelled_j: arithmetic and memory by ``SOURCE``, whatever the device; for ratios only.
    """

    device_j: float | None
    link_j: float | None
    modelled_j: float


def energy(plan: Plan, graph: TrainingGraph, model: DeviceModel, device_s: float, sent_bytes: float) -> Energy:
    """What a step of a plan draws.

    Args:
        plan: of the graph.
        graph: as captured.
        model: of the device.
        device_s: what the step takes there.
        sent_bytes: over the link.

    Raises:
        DeviceError: what the model states of power is no number.
    """
    planned = planned_graph(plan, graph)
    moved = sum(op_bytes(planned, op) for op in planned.ops) + sum(r.bytes_moved for r in plan.relayouts)
    flops = sum(op_flops(planned, op) for op in planned.ops)
    busy_w, link_j = _stated(model, BUSY_W), _stated(model, LINK_J_PER_BYTE)
    sent_j = 0.0 if not sent_bytes else None if link_j is None else link_j * sent_bytes
    return Energy(None if busy_w is None else busy_w * device_s, sent_j, flops * FLOP_J + moved * MEMORY_J_PER_BYTE)


def _stated(model: DeviceModel, fact: str) -> float | None:
    return model.number(fact) if fact in model.facts else None
