"""Memory over a step, and what is alive where it is fullest.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.graph import TrainingGraph
from layoutopt.memory import Buffer, fullest_steps
from layoutopt.plan import Plan, step_names
from layoutopt.report import charts
from layoutopt.report.shapes import Chart, Section, Table, in_words, mib, percent, ranked
from layoutopt.report.steps import blocks_of_ops, blocks_of_storages

__all__ = ["Held", "fullest_of_runs", "held_buffers", "memory_section", "peak_of"]

ROLES = (
    *("parameter", "state", "constant", "input", "activation", "gradient", "output"),
    *("copy in another layout", "workspace"),
)
_PLACES = 500
"""Of a chart: more would make the file large and show no more."""
_PLURALS = {
    "parameter": "parameters",
    "state": "optimizer state",
    "constant": "constants",
    "input": "inputs",
    "activation": "activations",
    "gradient": "gradients",
    "output": "outputs",
    "copy in another layout": "copies",
    "workspace": "workspaces",
}


@dataclass(frozen=True)
class Held:
    """A buffer of the arena.

    Attributes:
        buffer: its bytes and when it is alive.
        storage: what it holds; "" for a workspace.
        role: one of ``ROLES``.
        block: where the storage is first touched.
    """

    buffer: Buffer
    storage: str
    role: str
    block: str


def held_buffers(plan: Plan, planned: TrainingGraph) -> list[Held]:
    """Every buffer of the arena.

    Args:
        plan: of the graph.
        planned: with the plan's rewrites.
    """
    blocks = blocks_of_storages(planned, blocks_of_ops(planned))
    out = []
    for slot in plan.arena:
        storage, _, position = slot.name.rpartition("#")
        known = planned.storages.get(storage)
        if known is None or slot.name.startswith("scratch:"):
            role, storage = "workspace", ""
        else:
            role = known.role if position == "0" else "copy in another layout"
        buffer = Buffer(slot.name, slot.size_bytes, slot.first, slot.last)
        out.append(Held(buffer, storage, role, blocks.get(storage, "no operation")))
    return out


def peak_of(held: Sequence[Held]) -> tuple[int, int]:
    """The step at which most is alive, and the bytes that are."""
    step = fullest_steps([h.buffer for h in held], 1)[0][0]
    return step, sum(h.buffer.size_bytes for h in held if h.buffer.first <= step <= h.buffer.last)


def memory_section(plan: Plan, planned: TrainingGraph, top: int) -> Section:
    """The section.

    Args:
        plan: of the graph.
        planned: with the plan's rewrites.
        top: tensors that are named.
    """
    held = held_buffers(plan, planned)
    step, peak = peak_of(held)
    names = step_names(plan.steps, plan.ops, plan.relayouts)
    alive = [h for h in held if h.buffer.first <= step <= h.buffer.last]
    by_role = _grouped(alive, "role")
    by_block = _grouped(alive, "block")
    most = ranked(by_role, lambda role: by_role[role][1], 3)
    phases = {op.name: op.phase for op in planned.ops}
    kind, number = plan.steps[step]
    phase = phases[plan.ops[number].op if kind == "op" else plan.relayouts[number].before]
    parts = in_words([f"{mib(by_role[role][1])} MiB of {_PLURALS[role]}" for role in most])
    said = (
        f"Most is alive at step {step + 1} of {len(plan.steps)}, {names[step]} ({phase}): {mib(peak)} MiB in "
        f"{len(alive)} buffers, among them {parts}. The arena takes {mib(plan.arena_bytes)} MiB, "
        f"{percent(plan.arena_bytes - peak, peak)}% more than what is alive there, which no arena can do without."
    )
    series = _series(held, len(plan.steps))
    places = fullest_of_runs(np.sum(list(series.values()), axis=0), _PLACES)
    seen = f"Areas by role over {len(plan.steps)} steps; the line marks the peak, {mib(peak)} MiB at step {step + 1}."
    if len(places) < len(plan.steps):
        seen += f" Of every {-(-len(plan.steps) // _PLACES)} steps the fullest is drawn."
    table = Table(
        f"Alive at the peak, by role (step {step + 1})",
        ("role", "buffers", "MiB", "% of peak"),
        tuple(
            (_PLURALS[role], str(by_role[role][0]), mib(by_role[role][1]), percent(by_role[role][1], peak))
            for role in ranked(by_role, lambda role: by_role[role][1], len(by_role))
        ),
    )
    blocks = Table(
        "Alive at the peak, by the block that first touches it",
        ("block", "buffers", "MiB", "% of peak"),
        tuple(
            (name, str(by_block[name][0]), mib(by_block[name][1]), percent(by_block[name][1], peak))
            for name in ranked(by_block, lambda name: by_block[name][1], len(by_block))
        ),
    )
    drawn = {name: [values[i] for i in places] for name, values in series.items()}
    at = [i + 1 for i in places]
    chart = charts.area("memory", "Memory over the step", seen, at, drawn, step + 1, "MiB alive")
    return Section(
        "memory",
        "Memory over the step",
        (said,),
        (Chart("Memory over the step", seen, chart, table),),
        (_tensors(alive, names, top),),
        (blocks,),
    )


def _grouped(held: Sequence[Held], key: str) -> dict[str, tuple[int, int]]:
    """Number and bytes by an attribute."""
    out: dict[str, tuple[int, int]] = {}
    for one in held:
        count, size = out.get(getattr(one, key), (0, 0))
        out[getattr(one, key)] = count + 1, size + one.buffer.size_bytes
    return out


def _series(held: Sequence[Held], steps: int) -> dict[str, list[float]]:
    """MiB alive at every step by role, roles that hold nothing left out."""
    changes = {role: np.zeros(steps + 1) for role in ROLES}
    for one in held:
        changes[one.role][one.buffer.first] += one.buffer.size_bytes / 2**20
        changes[one.role][one.buffer.last + 1] -= one.buffer.size_bytes / 2**20
    return {_PLURALS[role]: list(c[:-1].cumsum()) for role, c in changes.items() if c.any()}


def fullest_of_runs(total: np.ndarray, most: int) -> list[int]:
    """Positions to draw: all, or of every run of equal length the one with the largest total.

    Args:
        total: by position.
        most: positions.
    """
    length = max(-(-len(total) // most), 1)
    return [at + int(np.argmax(total[at : at + length])) for at in range(0, len(total), length)]


def _tensors(alive: Sequence[Held], names: Mapping[int, str], top: int) -> Table:
    rows = []
    for one in ranked(alive, lambda h: h.buffer.size_bytes, top):
        buffer = one.buffer
        life = names[buffer.first], names[buffer.last]
        rows.append((one.storage or buffer.name, mib(buffer.size_bytes), one.role, one.block, *life))
    head = ("tensor", "MiB", "role", "block", "alive from", "to")
    return Table(f"The {min(top, len(alive))} largest of what is alive at the peak", head, tuple(rows))
