"""The steps of a plan as a report sees them: what each costs and where that number comes from, and its block.

Blocks are the layers of the model, by phase, where ops say what module they come from: ``backward, encoder.layer.5``.
Rewrites make layers unlike, so that repetition alone does not find them. Where no op says so, blocks are repeated runs
of ops (``layoutopt/blocks.py``), by phase and number: ``forward A, 2 of 6``.

Part of the face.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutopt.blocks import find_blocks
from layoutopt.graph import TrainingGraph
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph

if TYPE_CHECKING:
    from costmodel.device import DeviceModel

__all__ = ["SOURCES", "Step", "blocks_of_ops", "blocks_of_storages", "steps_of", "summed"]

_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
"""A module's path up to its first number."""
SOURCES = ("measured", "fitted", "modelled")
"""Where a cost comes from: the kernel was timed; constants fitted to others that were; a roofline of public facts."""


@dataclass(frozen=True)
class Step:
    """A step of a plan.

    Attributes:
        label: the op's name, or ``relayout:STORAGE#POSITION``.
        kind: of the op; "relayout" for conversions.
        phase: forward, loss, backward or update.
        block: repeated block, or the phase's rest.
        variant: of the kernel.
        spec: kind and shapes.
        cost_ns: as the plan states it.
        source: one of :data:`SOURCES`.
        likely_ns: of the kernel alone, without the gap of its launches, as it is most likely: a plan's costs hold what
            caution added to those that were not measured.
        kernel: equal for steps that run the same kernel.
    """

    label: str
    kind: str
    phase: str
    block: str
    variant: str
    spec: str
    cost_ns: int
    source: str
    likely_ns: float
    kernel: int


def steps_of(plan: Plan, graph: TrainingGraph, model: DeviceModel) -> list[Step]:
    """The steps in the order they run.

    Args:
        plan: for the model's device.
        graph: as captured.
        model: that tells fitted from modelled costs.

    Raises:
        GraphError: the plan is not of this graph.
    """
    from costmodel.model import CostModel, kernel_kind, spec_text
    from kernels.bind import bind

    planned = planned_graph(plan, graph)
    blocks = blocks_of_ops(planned)
    costs = CostModel(model, caution=0.0)
    gap_ns = model.number("launch_s") * 1e9
    known: dict[int, tuple[str, float, int]] = {}
    out = []
    for bound, (kind, number) in zip(bind(planned, plan, model.limits), plan.steps, strict=True):
        stated = plan.ops[number].cost if kind == "op" else plan.relayouts[number].cost
        before = plan.ops[number].op if kind == "op" else plan.relayouts[number].before
        key = id(bound.kernel)  # bind() gives repeated blocks one kernel object
        if key not in known:
            fitted = "modelled" if costs.fitted_by(bound.kernel) == "roofline" else "fitted"
            likely = max(costs.predict(bound.kernel).total_ns - gap_ns * len(bound.kernel.launches), 0.0)
            known[key] = fitted, likely, len(known)
        fitted, likely, name = known[key]
        out.append(
            Step(
                bound.label,
                "relayout" if bound.op is None else bound.op.kind,
                bound.phase,
                blocks[before],
                bound.kernel.variant.label,
                spec_text(bound.kernel.spec) if bound.op else kernel_kind(bound.kernel.spec),
                stated.total_ns,
                "measured" if stated.measured else fitted,
                likely,
                name,
            )
        )
    return out


def blocks_of_ops(graph: TrainingGraph) -> dict[str, str]:
    """The block of every op, by name, in the order of the ops."""
    names = {op.name: f"{op.phase}, rest" for op in graph.ops}
    letters: dict[str, int] = {}
    for block in find_blocks(graph):
        if block.length < 2:
            continue  # the same op over and over, as the optimizer's updates are
        phase = graph.ops[block.start].phase
        letter = _letter(letters.setdefault(phase, 0))
        letters[phase] += 1
        for at in range(block.start, block.stop):
            turn = (at - block.start) // block.length + 1
            names[graph.ops[at].name] = f"{phase} {letter}, {turn} of {block.repeats}"
    layers = {op.name: found[0] for op in graph.ops if (found := _LAYER.match(op.source))}
    if layers:
        names = {op.name: f"{op.phase}, {layers.get(op.name, 'rest')}" for op in graph.ops}
    return names


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"A{number}"


def blocks_of_storages(graph: TrainingGraph, blocks: dict[str, str]) -> dict[str, str]:
    """The block in which a storage is first written, or first read where no op writes it before."""
    out: dict[str, str] = {}
    for op in graph.ops:
        for operand in op.operands:
            out.setdefault(graph.storage_of[operand.tensor], blocks[op.name])
    return out


def summed(steps: Sequence[Step], key: str) -> dict[str, dict[str, int]]:
    """Nanoseconds by an attribute and by source, in the order of first appearance."""
    out: dict[str, dict[str, int]] = {}
    for step in steps:
        own = out.setdefault(getattr(step, key), dict.fromkeys(SOURCES, 0))
        own[step.source] += step.cost_ns
    return out
