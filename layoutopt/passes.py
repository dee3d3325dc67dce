"""From the graph as captured to the graph that is planned: fewer ops, no view ops, canonical shapes.

Each pass is a function graph → graph that keeps every output and every in-place update the same; ``run_passes`` repeats
the list until nothing changes, so running it again changes nothing either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from layoutopt.graph import TrainingGraph
from layoutopt.pass_clean import drop_dead, fold_constants, share_common
from layoutopt.pass_fuse import fuse_pointwise
from layoutopt.pass_loss import fold_factors, fuse_loss
from layoutopt.pass_shapes import canonical_domains, canonical_order, canonical_shapes, sees_stored_axes
from layoutopt.pass_views import Notes, fold_views

__all__ = [
    "PASSES",
    "Pass",
    "PassReport",
    "canonical_domains",
    "canonical_order",
    "canonical_shapes",
    "drop_dead",
    "fold_constants",
    "fold_factors",
    "fold_views",
    "fuse_loss",
    "fuse_pointwise",
    "run_passes",
    "share_common",
]

Pass = Callable[[TrainingGraph, Notes], TrainingGraph]

PASSES: tuple[Pass, ...] = (
    drop_dead,
    fold_constants,
    fold_views,
    share_common,
    fuse_loss,
    fold_factors,
    fuse_pointwise,
    canonical_order,
    canonical_shapes,
    canonical_domains,
    drop_dead,
)
"""In order. Factors go before fusion, which would bury them in longer programs."""

MOST_ROUNDS = 12


@dataclass(frozen=True)
class PassReport:
    """What the passes did.

    Attributes:
        before: ops by kind as captured.
        after: ops by kind as planned.
        folded: a line per view or copy that disappeared.
        kept: a line per copy that had to stay (or had to be made), with the reason.
        operands: how many operands of the result are read or written along the axes in which they are stored, and how
            many there are. The others split or merge axes: a layout may not allow that.
        rounds: how often the list of passes ran.
        seconds: wall time.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    folded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    operands: tuple[int, int] = (0, 0)
    rounds: int = 0
    seconds: float = field(default=0.0, compare=False)

    def lines(self) -> list[str]:
        """For people: a line per kind, then the views that were kept."""
        total = [sum(self.before.values()), sum(self.after.values())]
        out = [f"{total[0]} ops before, {total[1]} after {self.rounds} rounds of passes ({self.seconds:.2f} s)"]
        for kind in sorted({*self.before, *self.after}):
            out.append(f"  {kind:<18} {self.before.get(kind, 0):>6} -> {self.after.get(kind, 0):>6}")
        out.append(f"{self.operands[0]} of {self.operands[1]} operands are seen along their stored axes")
        out.append(f"{len(self.folded)} views folded, {len(self.kept)} copies kept")
        return out + [f"  kept {line}" for line in self.kept]


def run_passes(graph: TrainingGraph) -> tuple[TrainingGraph, PassReport]:
    """Run every pass until the graph no longer changes.

    Returns:
        The new graph and what was done. The result has no op of kind "view", and every operand's view of its row-major
        tensor has a layout.
    """
    started = time.perf_counter()
    notes = Notes()
    before = Counter(op.kind for op in graph.ops)
    rounds = 0
    while rounds < MOST_ROUNDS:
        rounds += 1
        old = graph
        for step in PASSES:
            graph = step(graph, notes)
        if graph.ops == old.ops and graph.tensors == old.tensors:
            break
    operands = [o for op in graph.ops for o in op.operands]
    names = {op.name for op in graph.ops}
    report = PassReport(
        dict(before),
        dict(Counter(op.kind for op in graph.ops)),
        tuple(notes.folded.values()),
        tuple(line for name, line in notes.kept.items() if name in names),
        (sum(sees_stored_axes(o.view, graph.tensors[o.tensor].shape) for o in operands), len(operands)),
        rounds,
        time.perf_counter() - started,
    )
    return graph, report
