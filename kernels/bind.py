"""From a plan to kernels: each step of a plan with its specialised kernel and the arena slots of its operands.

The executor enqueues this list and the simulator walks it, so that both mean the same kernels and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kernels.spec import DeviceLimits, Kernel, OpSpec, op_spec
from kernels.variants import family_of
from layoutopt.errors import GraphError
from layoutopt.graph import Expr, Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.plan import Plan
from layoutopt.rewrites import planned_graph

__all__ = ["BoundStep", "bind", "build_labelled", "relayout_spec", "slot_name", "viewed_layouts"]

IDENTITY_EXPR = Expr((), (("x", 0),))


@dataclass(frozen=True)
class BoundStep:
    """One step of a plan.

    Attributes:
        label: the op's name, or ``relayout:STORAGE#TARGET``.
        phase: of the op (a relayout has the phase of the op it serves).
        kernel: specialised.
        slots: arena slot per operand, then per scratch buffer.
        storages: storage per operand ("" for scratch).
        op: the op, or None for a relayout.
    """

    label: str
    phase: str
    kernel: Kernel
    slots: tuple[str, ...]
    storages: tuple[str, ...]
    op: Op | None


def slot_name(storage: str, position: int) -> str:
    """Arena slot of a materialised layout."""
    return f"{storage}#{position}"


def relayout_spec(shape: tuple[int, ...], dtype: str) -> OpSpec:
    """A relayout is an identity pointwise op between two layouts."""
    return OpSpec("pointwise", (shape, shape), (dtype, dtype), 1, (("expr", IDENTITY_EXPR),))


@lru_cache(maxsize=8192)
def build_labelled(label: str, spec: OpSpec, layouts: tuple[Layout, ...], limits: DeviceLimits) -> Kernel | None:
    """The kernel of the variant called ``label``, or None where it no longer exists or refuses the layouts."""
    family = family_of(spec.kind)
    for variant in family.variants(spec, limits):
        if variant.label == label:
            return family.build(variant, spec, layouts)
    return None


def viewed_layouts(graph: TrainingGraph, op: Op, stored: tuple[Layout, ...]) -> tuple[Layout, ...] | None:
    """Operand layouts as the op sees them, or None where a view does not exist."""
    views = tuple(o.view.layout(layout) for o, layout in zip(op.operands, stored, strict=True))
    return None if any(v is None for v in views) else views  # type: ignore[return-value]


def bind(graph: TrainingGraph, plan: Plan, limits: DeviceLimits) -> list[BoundStep]:
    """Specialise every step.

    Raises:
        GraphError: the plan names a layout no view exists for, or a variant that this build does not have.
    """
    graph = planned_graph(plan, graph)
    ops: Mapping[str, Op] = {op.name: op for op in graph.ops}
    layouts = {name: tuple(doc.layout() for doc in docs) for name, docs in plan.layouts.items()}
    steps = []
    kernel: Kernel | None
    slots: tuple[str, ...]
    storages: tuple[str, ...]
    for what, number in plan.steps:
        bound: Op | None = None
        if what == "relayout":
            move = plan.relayouts[number]
            storage = graph.storages[move.storage]
            pair = (layouts[move.storage][0], layouts[move.storage][move.target])
            kernel = build_labelled(move.variant, relayout_spec(storage.shape, storage.dtype), pair, limits)
            label = move.label
            slots = (slot_name(move.storage, 0), slot_name(move.storage, move.target))
            storages = (move.storage, move.storage)
            phase = ops[move.before].phase
        else:
            planned = plan.ops[number]
            bound = op = ops[planned.op]
            storages = tuple(graph.storage_of[o.tensor] for o in op.operands)
            stored = tuple(layouts[s][i] for s, i in zip(storages, planned.layouts, strict=True))
            viewed = viewed_layouts(graph, op, stored)
            if viewed is None:
                raise GraphError(f"plan gives op {op.name} a layout that its view cannot express: solve the plan anew")
            kernel = build_labelled(planned.variant, op_spec(graph, op), viewed, limits)
            label, phase = op.name, op.phase
            slots = tuple(slot_name(s, i) for s, i in zip(storages, planned.layouts, strict=True))
        if kernel is None:
            raise GraphError(
                f"no kernel here matches step {label} of the plan: it was made by another version; solve it anew"
            )
        scratch = tuple(f"scratch:{label}:{i}" for i in range(len(kernel.scratch)))
        steps.append(BoundStep(label, phase, kernel, slots + scratch, storages + ("",) * len(scratch), bound))
    return steps
