"""What a calibration chooses from: kernels that a planner might use, and which of them to measure next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, prod

import numpy as np

from costmodel.device import FamilyFit
from costmodel.features import FEATURES, Machine, features
from costmodel.fit import levels, predicted_ns
from costmodel.microbench import designed_pairs, layout_choices
from costmodel.model import CostModel
from kernels.bind import relayout_spec
from kernels.spec import DeviceLimits, Kernel, OpSpec, op_spec
from kernels.variants import families, kernels_for
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout

__all__ = ["Candidate", "Pool", "graph_pairs", "pool_of"]

PAIRS_PER_SPEC = 24
NEAR_BEST = 0.4
"""A kernel this much slower than the best of its op (as a share) counts 1/e of it."""

EXPLORE = 0.2
"""Share of a batch drawn at random, so that the model is not blind beyond what it already likes."""

Pair = tuple[OpSpec, tuple[Layout, ...]]


@dataclass(frozen=True)
class Candidate:
    """A kernel, its features, and how often a step would run its op."""

    kernel: Kernel
    features: tuple[float, ...]
    weight: float


class Pool:
    """Kernels to choose from; ``choose`` hands each out once.

    Args:
        candidates: all of them.
        seed: of the random share.
    """

    def __init__(self, candidates: Sequence[Candidate], seed: int) -> None:
        self._all = list(candidates)
        self._left = set(range(len(self._all)))
        self._rng = random.Random(seed)
        self._by_op: dict[OpSpec, list[int]] = {}
        self._taken_labels: dict[str, int] = {}
        self._taken_ops: dict[OpSpec, int] = {}
        for i, candidate in enumerate(self._all):
            self._by_op.setdefault(candidate.kernel.spec, []).append(i)

    def __len__(self) -> int:
        return len(self._all)

    def choose(self, constants: Mapping[str, FamilyFit], costs: CostModel, count: int) -> list[Candidate]:
        """The next kernels to measure.

        Args:
            constants: the fit so far; without any, the variety of variants decides.
            costs: prices kernels before the first fit.
            count: at most this many.
        """
        if not self._left:
            return []
        picked: list[int] = []
        for i in sorted(self._left, key=self._scores(constants, costs).__getitem__, reverse=True):
            if len(picked) >= count * (1 - EXPLORE):
                break
            kernel = self._all[i].kernel
            # One kernel per op and variant name in a batch: the next fit knows more.
            clash = (kernel.spec, levels(kernel.variant.label)[0])
            if all(clash != (self._all[j].kernel.spec, levels(self._all[j].kernel.variant.label)[0]) for j in picked):
                picked.append(i)
        rest = sorted(self._left - set(picked))
        picked += self._rng.sample(rest, min(len(rest), count - len(picked)))
        self._left -= set(picked)
        for i in picked:
            kernel = self._all[i].kernel
            label = levels(kernel.variant.label)[0]
            self._taken_labels[label] = self._taken_labels.get(label, 0) + 1
            self._taken_ops[kernel.spec] = self._taken_ops.get(kernel.spec, 0) + 1
        return [self._all[i] for i in picked]

    def _scores(self, constants: Mapping[str, FamilyFit], costs: CostModel) -> list[float]:
        """Expected worth of measuring each: time at stake, near the best of its op, little known so far."""
        guess = np.empty(len(self._all))
        for i, c in enumerate(self._all):
            if constants:
                parts = predicted_ns(constants, c.kernel.variant.label, c.features, FEATURES)
                guess[i] = max(sum(parts.values()), 1.0)
            else:
                guess[i] = costs.roofline_ns(c.features)
        out = [0.0] * len(self._all)
        for spec, members in self._by_op.items():
            best = min(guess[i] for i in members)
            seen_op = 1 + self._taken_ops.get(spec, 0)
            for i in members:
                label = levels(self._all[i].kernel.variant.label)[0]
                seen = 1 + self._taken_labels.get(label, 0)
                near = exp(-(guess[i] / best - 1) / NEAR_BEST) if constants else 1.0
                out[i] = self._all[i].weight * guess[i] * near / (seen_op * seen**0.5)
        return out


def pool_of(
    graphs: Sequence[TrainingGraph],
    limits: DeviceLimits,
    machine: Machine,
    seed: int,
    stop: Callable[[], bool],
    fits: Callable[[Kernel], bool],
) -> Pool:
    """List kernels until ``stop``; with graphs those of their ops, else a designed sample."""
    if graphs:
        weighted = graph_pairs(graphs, limits, seed)
    else:
        weighted = ((pair, 1.0) for pair in designed_pairs(limits, seed))
    found: dict[str, Candidate] = {}
    for (spec, layouts), weight in weighted:
        if found and stop():
            break
        for kernel in kernels_for(spec, layouts, limits):
            if fits(kernel):
                found[kernel.key] = Candidate(kernel, features(kernel, machine), weight)
    return Pool([found[key] for key in sorted(found)], seed)


def graph_pairs(graphs: Sequence[TrainingGraph], limits: DeviceLimits, seed: int) -> Iterator[tuple[Pair, float]]:
    """(spec, layouts) pairs of the graphs' ops and relayouts, with how often a step has the op.

    The heaviest ops come first within each round; every round gives each op one more combination of layouts.
    """
    rng = random.Random(seed)
    served = {kind for family in families() for kind in family.kinds}
    combos: dict[OpSpec, dict[tuple[Layout, ...], None]] = {}
    count: dict[OpSpec, int] = {}
    for graph in graphs:
        choices = {name: _storage_choices(s.shape, rng) for name, s in graph.storages.items()}
        for op in graph.ops:
            spec = op_spec(graph, op)
            if spec.kind not in served:
                continue
            count[spec] = count.get(spec, 0) + 1
            mine = combos.setdefault(spec, {})
            stored = [choices[graph.storage_of[o.tensor]] for o in op.operands]
            for combo in _some(stored, rng):
                views = tuple(o.view.layout(layout) for o, layout in zip(op.operands, combo, strict=True))
                if len(mine) < PAIRS_PER_SPEC and all(view is not None for view in views):
                    mine[views] = None  # type: ignore[index]
        if "pointwise" in served:
            _relayouts(graph, choices, combos, count, rng)
    order = sorted(combos, key=lambda s: -count[s] * max(prod(shape) for shape in s.shapes))
    for number in range(PAIRS_PER_SPEC):
        for spec in order:
            layouts = list(combos[spec])
            if number < len(layouts):
                yield (spec, layouts[number]), float(count[spec])


def _storage_choices(shape: tuple[int, ...], rng: random.Random) -> list[Layout]:
    out = [Layout.row_major(shape)]
    for _ in range(6):
        layout = layout_choices(shape, rng)
        if layout not in out:
            out.append(layout)
    return out


def _some(stored: list[list[Layout]], rng: random.Random) -> Iterator[tuple[Layout, ...]]:
    """All combinations where they are few, else the first of each, then random ones."""
    if prod(len(c) for c in stored) <= 2 * PAIRS_PER_SPEC:
        yield from product(*stored)
        return
    yield tuple(c[0] for c in stored)
    for _ in range(2 * PAIRS_PER_SPEC):
        yield tuple(rng.choice(c) for c in stored)


def _relayouts(
    graph: TrainingGraph,
    choices: dict[str, list[Layout]],
    combos: dict[OpSpec, dict[tuple[Layout, ...], None]],
    count: dict[OpSpec, int],
    rng: random.Random,
) -> None:
    for name, storage in graph.storages.items():
        if len(choices[name]) < 2 or storage.dtype != "float32":
            continue
        spec = relayout_spec(storage.shape, storage.dtype)
        count[spec] = count.get(spec, 0) + 1
        mine = combos.setdefault(spec, {})
        for _ in range(3):
            a, b = rng.sample(choices[name], 2)
            if len(mine) < PAIRS_PER_SPEC:
                mine[a, b] = None
