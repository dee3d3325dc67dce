"""The rewrite "anew:OPS": results of forward ops are made anew in the backward pass, instead of being kept until then.

``OPS`` are positions of forward ops in the graph that the rewrite is given: ``anew:3-9,14`` names ops 3 to 9 and 14.
Nobody keeps their results for the backward pass. The first op of the backward pass that reads one finds a copy of the
op that makes it just before itself, and before that copies of those ops of ``OPS`` that it reads from in turn, in the
forward pass' order. From there on the new result is read. So each op runs at most twice, and what is made anew lives
from just before its first reader to its last. Which ops are worth it is chosen elsewhere
(``layoutopt/recompute_search.py``): a plan's rewrites name them, and applying them decides nothing.

The copies are the same ops on the same values: random numbers are drawn by a hash of the step's seed and the element,
and are the same again. An op is left as it is where that would not hold, or would save nothing: it writes in place, its
results are overwritten in place or are outputs of the graph, or what it reads is gone where it would run again (weights
that were updated).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from layoutopt.errors import LayoutOptError
from layoutopt.graph import Op, TrainingGraph, rename_reads
from layoutopt.pass_views import overwrites

__all__ = ["LATE", "SUFFIX", "made_anew", "may_run_again", "name_of", "positions_of", "run_again"]

SUFFIX = ".anew"
"""What is added to the names of ops that run again, and of what they write."""

LATE = ("backward", "update")
"""Phases whose readers do without what the forward pass has left."""


def made_anew(graph: TrainingGraph, which: str) -> TrainingGraph:
    """The graph with results made anew in the backward pass.

    Args:
        graph: views folded.
        which: positions of forward ops, such as ``3-9,14``.

    Returns:
        ``graph`` itself where nobody would read what is made anew.

    Raises:
        LayoutOptError: these are no positions of forward ops of the graph.
    """
    positions = positions_of(which)
    free = set(may_run_again(graph))
    strange = [p for p in positions if p not in free]
    if strange:
        raise LayoutOptError(
            f"rewrite 'anew:{which}': op {strange[0]} of graph {graph.name!r} ({len(graph.ops)} ops) is no forward op "
            "that may run again; plan the graph anew"
        )
    before = run_again(graph, set(positions))
    if not before:
        return graph
    names = {o.tensor: o.tensor + SUFFIX for again in before.values() for p in again for o in graph.ops[p].outputs}
    tensors = {**graph.tensors, **{new: replace(graph.tensors[old], name=new) for old, new in names.items()}}
    made: dict[str, str] = {}
    ops: list[Op] = []
    for at, op in graph.walk():
        for p in before.get(at, ()):
            made |= {o.tensor: names[o.tensor] for o in graph.ops[p].outputs}
            ops.append(_again(graph.ops[p], made))
        ops.append(rename_reads(op, made) if op.phase in LATE else op)
    return graph.with_ops(ops, tensors=tensors)


def _again(op: Op, names: dict[str, str]) -> Op:
    outputs = tuple(replace(o, tensor=names[o.tensor]) for o in op.outputs)
    return replace(rename_reads(op, names), name=op.name + SUFFIX, outputs=outputs, phase="backward")


def may_run_again(graph: TrainingGraph) -> list[int]:
    """Positions of forward ops whose results may be made anew, as far as that hangs on the op alone."""
    gone = overwrites(graph)
    kept = set(graph.outputs)
    return [
        at
        for at, op in graph.walk()
        if op.phase == "forward"
        and not op.inplace
        and not any(o.tensor in gone or o.tensor in kept or o.tensor + SUFFIX in graph.tensors for o in op.outputs)
    ]


def run_again(graph: TrainingGraph, dropped: Collection[int]) -> dict[int, list[int]]:
    """Which forward ops run again before which op of the backward pass, by position.

    Args:
        graph: views folded.
        dropped: positions of the ops whose results are not kept, of ``may_run_again``.

    Returns:
        By position of the reader, in order; without ops whose results nobody reads late, and without those that read
        what is gone by then.
    """
    maker = {o.tensor: at for at, op in graph.walk() for o in op.outputs}
    gone = overwrites(graph)
    left = set(dropped)
    while True:
        before, stuck = _demanded(graph, left, maker, gone)
        if not stuck:
            return before
        left -= stuck


def _demanded(
    graph: TrainingGraph, dropped: set[int], maker: dict[str, int], gone: dict[str, int]
) -> tuple[dict[int, list[int]], set[int]]:
    """The same, and those ops that read something which was overwritten before they would run again."""
    before: dict[int, list[int]] = {}
    stuck: set[int] = set()
    done: set[int] = set()
    for at, op in graph.walk():
        if op.phase not in LATE:
            continue
        wanted: set[int] = set()
        pending = [op]
        while pending:
            for operand in pending.pop().inputs:
                p = maker.get(operand.tensor)
                if p in dropped and p not in done and p not in wanted:
                    assert p is not None
                    wanted.add(p)
                    pending.append(graph.ops[p])
        if wanted:
            before[at] = sorted(wanted)
            done |= wanted
            stuck |= {p for p in wanted if any(gone.get(o.tensor, at) < at for o in graph.ops[p].inputs)}
    return before, stuck


# ---- how a choice is written ----------------------------------------------------------------------------------------


def name_of(positions: Iterable[int]) -> str:
    """Positions as a rewrite's name: ``anew:3-9,14``."""
    runs = [
        [p for _, p in run] for _, run in groupby(enumerate(sorted(set(positions))), lambda pair: pair[1] - pair[0])
    ]
    return "anew:" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def positions_of(which: str) -> Sequence[int]:
    """The positions in ``3-9,14``, ascending.

    Raises:
        LayoutOptError: it is not written so.
    """
    found: list[int] = []
    for part in which.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last or (found and first <= found[-1]) or last - first > 1_000_000:
            raise LayoutOptError(
                f"rewrite 'anew:{which}' names no ops: expected ascending positions such as anew:3-9,14; plan the "
                "graph anew"
            )
        found += range(first, last + 1)
    return found
