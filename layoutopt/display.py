"""Plans and graphs as tables for notebooks: what ``_repr_html_`` of the core's types returns."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from layoutopt.display_layout import kind_of
from layoutopt.display_parts import bytes_text, count_text, html, table, time_text

if TYPE_CHECKING:
    from layoutopt.graph import TrainingGraph
    from layoutopt.plan import Plan

__all__ = ["MOST", "graph_html", "plan_html"]

MOST = 6
"""Rows of a table that lists the largest of something."""


def plan_html(plan: Plan) -> str:
    """What the solver proved, what the step is predicted to take and to need, the layouts it has, its dearest steps.

    Times are the solver's own: the sum over kernels, each alone (``layoutopt.stepcost`` predicts whole steps).
    """
    report = plan.solver
    moved = sum(r.bytes_moved for r in plan.relayouts)
    moving_ns = sum(r.cost.total_ns for r in plan.relayouts)
    costs = [*(o.cost for o in plan.ops), *(r.cost for r in plan.relayouts)]
    measured = sum(c.total_ns for c in costs if c.measured) / max(sum(c.total_ns for c in costs), 1)
    facts = [
        ("device", plan.device_name),
        ("status", f"{report.status}, by {report.method} in {report.seconds:.3g} s"),
        ("gap", f"{report.gap:.2%} (bound {time_text(report.bound_ns)})" if report.bound_ns else "not known"),
        ("predicted kernels", f"{time_text(report.objective_ns)}, {measured:.0%} of it measured"),
        ("relayouts", f"{len(plan.relayouts)}, {bytes_text(moved)} moved, {time_text(moving_ns)}"),
        ("arena", bytes_text(plan.arena_bytes)),
        ("problem", f"{report.storages} tensors, {report.candidates} layouts, {count_text(report.choices)} choices"),
    ]
    if report.not_run_copies:
        facts.append(("copies not run", f"{report.not_run_copies}, {time_text(report.not_run_ns)}"))
    if plan.rewrites:
        facts.append(("rewrites", ", ".join(plan.rewrites)))
    return html(
        table(f"Plan of {plan.graph_name} ({report.strategy})", (), facts), _layouts_table(plan), _steps_table(plan)
    )


def _layouts_table(plan: Plan) -> ET.Element:
    """Layouts by kind, of what ops write and of the copies that relayouts make."""
    primary = Counter(kind_of(docs[0].layout()) for docs in plan.layouts.values())
    copies = Counter(kind_of(doc.layout()) for docs in plan.layouts.values() for doc in docs[1:])
    kinds = [kind for kind, _ in (primary + copies).most_common()]
    rows = [(kind, primary[kind], copies[kind]) for kind in kinds[:MOST]]
    if len(kinds) > MOST:
        rest = kinds[MOST:]
        rows.append((f"{len(rest)} more", sum(primary[k] for k in rest), sum(copies[k] for k in rest)))
    return table("Layouts", ("layout", "tensors", "copies"), rows)


def _steps_table(plan: Plan) -> ET.Element:
    whole = max(plan.solver.objective_ns, 1)
    steps = [(o.op, o.variant, o.cost) for o in plan.ops] + [(r.label, r.variant, r.cost) for r in plan.relayouts]
    ranked = sorted(steps, key=lambda step: -step[2].total_ns)[:MOST]
    rows = [
        (name, variant, time_text(cost.total_ns), f"{cost.total_ns / whole:.1%}", "yes" if cost.measured else "no")
        for name, variant, cost in ranked
    ]
    return table(f"Dearest of {len(steps)} steps", ("step", "kernel", "predicted", "of all", "measured"), rows)


def graph_html(graph: TrainingGraph) -> str:
    """Ops by kind and phase, tensors by role, and the largest tensors."""
    phases = list(dict.fromkeys(op.phase for op in graph.ops))
    counted = Counter((op.kind, op.phase) for op in graph.ops)
    kinds = Counter(op.kind for op in graph.ops).most_common()
    by_phase = Counter(op.phase for op in graph.ops)
    ops = [(kind, *(counted[kind, phase] or "" for phase in phases), number) for kind, number in kinds]
    ops.append(("all", *(by_phase[phase] for phase in phases), len(graph.ops)))
    # What shares memory is counted once.
    owned = [graph.tensors[storage.name] for storage in graph.storages.values()]
    size = {t.name: t.size_elems * t.item_bytes for t in owned}
    roles = Counter(t.role for t in owned)
    held = {role: sum(size[t.name] for t in owned if t.role == role) for role in roles}
    largest = sorted(owned, key=lambda t: -size[t.name])[:MOST]
    return html(
        table(f"{graph.name}: {len(graph.ops)} ops", ("kind", *phases, "all"), ops),
        table(
            f"{len(owned)} tensors that have memory of their own",
            ("role", "number", "size"),
            [(role, number, bytes_text(held[role])) for role, number in roles.most_common()],
        ),
        table(
            "Largest tensors",
            ("tensor", "role", "shape", "dtype", "size"),
            [(t.name, t.role, "×".join(map(str, t.shape)) or "1", t.dtype, bytes_text(size[t.name])) for t in largest],
        ),
    )
