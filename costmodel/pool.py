"""What a calibration chooses from: kernels that a planner might use, and which of them to measure next."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np

from costmodel.device import FamilyFit
from costmodel.features import FEATURES, Machine, features
from costmodel.fit import levels, predicted_ns
from costmodel.microbench import designed_pairs
from costmodel.model import CostModel, kernel_kind
from costmodel.rounds import LEAST_ROUNDS
from kernels.bind import relayout_spec
from kernels.spec import DeviceLimits, Kernel, OpSpec, op_spec
from kernels.variants import families, kernels_for
from layoutopt.candidates import candidates, leading, rules_for, seen_through
from layoutopt.graph import Op, TrainingGraph
from layoutopt.layout import Layout
from layoutopt.view import View

__all__ = ["LEAST_PAIRS", "PAIRS_PER_S", "PREPARE_S", "Candidate", "Pool", "graph_pairs", "pool_of"]

PAIRS_PER_SPEC = 64
LEAST_PAIRS, PAIRS_PER_S = 160, 1.6
"""Without a graph, so many (op, layouts) pairs are listed, and so many for each second of the budget: on two cores of
a CPU a pair's kernels took 0.7 s to measure."""
NEAR_BEST = 0.4
"""A kernel this much slower than the best of its op (as a share) counts 1/e of it."""

EXPLORE = 0.2
"""Share of a batch drawn at random, so that the model is not blind beyond what it already likes."""

PREPARE_S = 0.25
"""Seconds to prepare a kernel, until some were prepared."""
RUNS = 1 + LEAST_ROUNDS
"""How often a kernel that is measured runs at least: once when it is prepared, and in its rounds."""

Pair = tuple[OpSpec, tuple[Layout, ...]]


@dataclass(frozen=True)
class Candidate:
    """A kernel, its features, and how often a step would run its op."""

    kernel: Kernel
    features: tuple[float, ...]
    weight: float


class Pool:
    """Kernels to choose from; ``choose`` hands each out once, unless it is given back.

    Args:
        candidates: all of them.
        seed: of the random share.
    """

    def __init__(self, candidates: Sequence[Candidate], seed: int) -> None:
        self._all = list(candidates)
        self._rng = random.Random(seed)
        self._left = np.ones(len(self._all), dtype=bool)
        self._levels = [levels(c.kernel.variant.label, kernel_kind(c.kernel.spec)) for c in self._all]
        self._weight = np.array([c.weight for c in self._all])
        self._op = _numbered([c.kernel.spec for c in self._all])
        self._variant = _numbered([own[0] for own in self._levels])
        self._op_taken = np.zeros(len(self._all))  # by number; there are no more ops or variants than kernels
        self._variant_taken = np.zeros(len(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def choose(self, constants: Mapping[str, FamilyFit], costs: CostModel, count: int) -> list[Candidate]:
        """The next kernels to measure.

        One after the other the kernel with the most at stake for each second that measuring it takes. At stake is the
        time its op takes in a step, times how near it is to the op's best kernel, over how much of its op and of its
        variant was measured already. A share is random, by those seconds alone.

        Args:
            constants: the fit so far; without any, a roofline guesses and nearness does not count.
            costs: gives the roofline.
            count: at most this many.
        """
        guess = self._guess(constants, costs)
        seconds = PREPARE_S + RUNS * guess / 1e9
        stake = self._weight * guess / seconds
        if constants:
            best = np.full(len(self._all), np.inf)
            np.minimum.at(best, self._op, guess)
            stake *= np.exp(-(guess / best[self._op] - 1) / NEAR_BEST)
        picked: list[int] = []
        for _ in range(min(round(count * (1 - EXPLORE)), int(self._left.sum()))):
            known = (1 + self._op_taken[self._op]) * np.sqrt(1 + self._variant_taken[self._variant])
            picked.append(self._take(int(np.argmax(np.where(self._left, stake / known, -1.0)))))
        rest = np.flatnonzero(self._left).tolist()
        drawn = sorted(rest, key=lambda i: self._rng.random() ** seconds[i], reverse=True)  # without replacement
        picked += [self._take(i) for i in drawn[: count - len(picked)]]
        return [self._all[i] for i in picked]

    def give_back(self, untried: Sequence[Candidate]) -> None:
        """Kernels that were handed out and not measured may be chosen again."""
        keys = {c.kernel.key for c in untried}
        for i in np.flatnonzero(~self._left).tolist():
            if self._all[i].kernel.key in keys:
                self._left[i] = True
                self._op_taken[self._op[i]] -= 1
                self._variant_taken[self._variant[i]] -= 1

    def take(self, keys: Set[str]) -> list[Candidate]:
        """Those kernels of some keys that were not handed out yet; they are now."""
        places = [i for i, c in enumerate(self._all) if self._left[i] and c.kernel.key in keys]
        return [self._all[self._take(i)] for i in places]

    def _take(self, i: int) -> int:
        self._left[i] = False
        self._op_taken[self._op[i]] += 1
        self._variant_taken[self._variant[i]] += 1
        return i

    def _guess(self, constants: Mapping[str, FamilyFit], costs: CostModel) -> np.ndarray:
        if not constants:
            return np.array([costs.roofline_ns(c.features) for c in self._all])
        return np.array(
            [
                sum(predicted_ns(constants, own, c.features, FEATURES).values())
                for own, c in zip(self._levels, self._all, strict=True)
            ]
        )


def _numbered(values: Sequence[Hashable]) -> np.ndarray:
    """Equal values get equal numbers, from 0 on."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def pool_of(
    graphs: Sequence[TrainingGraph],
    limits: DeviceLimits,
    machine: Machine,
    seed: int,
    stop: Callable[[], bool],
    fits: Callable[[Kernel], bool],
    pairs: int = LEAST_PAIRS,
) -> Pool:
    """List kernels until ``stop``; with graphs those of their ops, else a designed sample of so many ``pairs``."""
    if graphs:
        weighted = graph_pairs(graphs, limits, seed)
    else:
        weighted = ((pair, 1.0) for pair in designed_pairs(limits, seed, pairs))
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
    """Tuples of the layouts that an op may see; an in-place pair and one storage read twice have one layout.

    At random, what only follows an op's leading operands (``layoutopt.candidates.leading``) lies as its output does.
    """
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
    first = place[len(op.inputs)]
    free = {place[k] for k in leading(op)}
    for _ in range(PAIRS_PER_SPEC):
        picks = [rng.choice(options) for options in seen]
        yield operands(
            [
                pick if i in free else picks[first] if picks[first] in options else options[0]
                for i, (pick, options) in enumerate(zip(picks, seen, strict=True))
            ]
        )
