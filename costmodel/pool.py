"""What a calibration chooses from: kernels that a planner might use, and which of them to measure next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import exp, prod

import numpy as np

from costmodel.device import FamilyFit
from costmodel.features import FEATURES, Machine, features
from costmodel.fit import levels, predicted_ns
from costmodel.microbench import designed_pairs
from costmodel.model import CostModel, kernel_kind
from kernels.bind import relayout_spec
from kernels.spec import DeviceLimits, Kernel, OpSpec, op_spec
from kernels.variants import families, kernels_for
from layoutopt.candidates import candidates, rules_for, seen_through
from layoutopt.graph import Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.view import View

__all__ = ["Candidate", "Pool", "graph_pairs", "pool_of"]

PAIRS_PER_SPEC = 64
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
        self._levels = [levels(c.kernel.variant.label, kernel_kind(c.kernel.spec)) for c in self._all]
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
        taken: set[tuple[OpSpec, str]] = set()
        for i in sorted(self._left, key=self._scores(constants, costs).__getitem__, reverse=True):
            if len(picked) >= count * (1 - EXPLORE):
                break
            # One kernel per op and variant in a batch: the next fit knows more.
            what = (self._all[i].kernel.spec, self._levels[i][0])
            if what not in taken:
                taken.add(what)
                picked.append(i)
        rest = sorted(self._left - set(picked))
        picked += self._rng.sample(rest, min(len(rest), count - len(picked)))
        self._left -= set(picked)
        for i in picked:
            spec, label = self._all[i].kernel.spec, self._levels[i][0]
            self._taken_labels[label] = self._taken_labels.get(label, 0) + 1
            self._taken_ops[spec] = self._taken_ops.get(spec, 0) + 1
        return [self._all[i] for i in picked]

    def _scores(self, constants: Mapping[str, FamilyFit], costs: CostModel) -> list[float]:
        """Expected worth of measuring each: time at stake, near the best of its op, little known so far."""
        guess = np.empty(len(self._all))
        for i, c in enumerate(self._all):
            if constants:
                parts = predicted_ns(constants, self._levels[i], c.features, FEATURES)
                guess[i] = max(sum(parts.values()), 1.0)
            else:
                guess[i] = costs.roofline_ns(c.features)
        out = [0.0] * len(self._all)
        for spec, members in self._by_op.items():
            best = min(guess[i] for i in members)
            seen_op = 1 + self._taken_ops.get(spec, 0)
            for i in members:
                seen = 1 + self._taken_labels.get(self._levels[i][0], 0)
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
    """(spec, layouts) pairs that a planner prices for the graphs, with how often a step has the op.

    In rounds: every op gets one more tuple of layouts in each, the heaviest ops first. Row-major comes first, then
    tuples that are uniform, then those that differ from row-major in one operand, then random ones.
    """
    rng = random.Random(seed)
    served = {kind for family in families() for kind in family.kinds}
    tuples: dict[OpSpec, dict[tuple[Layout, ...], None]] = {}
    count: dict[OpSpec, int] = {}
    for graph in graphs:
        choices = candidates(graph, rules_for(limits.kind, limits.simd_width))
        for op in graph.ops:
            spec = op_spec(graph, op)
            if spec.kind not in served:
                continue
            count[spec] = count.get(spec, 0) + 1
            mine = tuples.setdefault(spec, {})
            if len(mine) < PAIRS_PER_SPEC:
                for views in _op_tuples(graph, op, choices, rng):
                    mine[views] = None
        if "pointwise" in served:
            for name, storage in graph.storages.items():
                spec = relayout_spec(storage.shape, storage.dtype)
                pairs = list(permutations(choices[name], 2))
                if pairs:
                    count[spec] = count.get(spec, 0) + 1
                    tuples.setdefault(spec, {}).update(dict.fromkeys(rng.sample(pairs, len(pairs))))
    order = sorted(tuples, key=lambda s: -count[s] * max(prod(shape) for shape in s.shapes))
    for number in range(PAIRS_PER_SPEC):
        for spec in order:
            layouts = list(tuples[spec])
            if number < len(layouts):
                yield (spec, layouts[number]), float(count[spec])


def _op_tuples(
    graph: TrainingGraph, op: Op, choices: Mapping[str, tuple[Layout, ...]], rng: random.Random
) -> Iterator[tuple[Layout, ...]]:
    """Tuples of the layouts that an op may see; an in-place pair and one storage read twice have one layout."""
    slots: dict[tuple[str, View], list[int]] = {}
    updated = {len(op.inputs) + out: inp for out, inp in op.inplace}
    for k in range(len(op.operands)):
        operand = op.operands[updated.get(k, k)]
        slots.setdefault((graph.storage_of[operand.tensor], operand.view), []).append(k)
    seen: list[list[Layout]] = []
    for storage, view in slots:
        seen.append([x for layout in choices[storage] if (x := seen_through(view, layout)) is not None])
    if not all(seen):
        return
    place = {k: i for i, members in enumerate(slots.values()) for k in members}

    def operands(picks: Sequence[Layout]) -> tuple[Layout, ...]:
        return tuple(picks[place[k]] for k in range(len(op.operands)))

    plain = [options[0] for options in seen]
    yield operands(plain)
    for layout in dict.fromkeys(x for options in seen for x in options):
        yield operands([layout if layout in options else options[0] for options in seen])
    for i, options in enumerate(seen):
        for layout in options[1:]:
            yield operands([*plain[:i], layout, *plain[i + 1 :]])
    for _ in range(PAIRS_PER_SPEC):
        yield operands([rng.choice(options) for options in seen])
