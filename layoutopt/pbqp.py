"""Pairwise problems (PBQP) by reduction, and layouts by them: what TVM's graph tuner does.

A *pairwise problem* has nodes with a few states each, a cost per state, and a matrix of costs per edge between two
nodes. It is solved by taking node after node away:

- R0, a node without edges: it takes its cheapest state. A node with one state counts as one, its row added to its
  neighbours' costs;
- R1, one edge: what its best answer costs is added to each state of the neighbour;
- R2, two edges: what its best answer costs becomes an edge between the two neighbours;
- RN, where every node left has three or more: the node with most edges takes the state that is cheapest with the best
  answer of each neighbour alone. This one is a heuristic.

Chains, trees and series-parallel graphs fall to R0 to R2 and are solved exactly. Source: the reductions are those of
register allocation by partitioned boolean quadratic programming (Scholz and Eckstein, 2002), which TVM's graph tuner
took over for graphs that its dynamic programming along chains does not fit.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from layoutopt.errors import InfeasibleError
from layoutopt.problem import Assignment, OpNode, Problem
from layoutopt.reduce import reduce
from layoutopt.strategies import priced

__all__ = ["Unsolvable", "chaindp", "solve_pairwise"]

Costs = NDArray[np.float64]
"""Whole nanoseconds, or infinite: exact up to 2^53."""


class Unsolvable(Exception):
    """A heuristic step left node ``node`` without a state that its neighbours can live with."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


def solve_pairwise(costs: Sequence[Costs], edges: Mapping[tuple[int, int], Costs]) -> tuple[tuple[int, ...], int]:
    """A state per node, and how many heuristic steps it took: with none it is the optimum.

    Args:
        costs: per node the cost of each state.
        edges: of nodes ``(x, y)``, x other than y, each pair once: [states of x, states of y].

    Raises:
        Unsolvable: no state is left for a node.
    """
    left = _Left(costs, edges)
    left.reduce()
    return left.states(), left.heuristic_steps


class _Left:
    """Nodes and edges that are left, and what was taken away, in order."""

    def __init__(self, costs: Sequence[Costs], edges: Mapping[tuple[int, int], Costs]) -> None:
        self.costs = [own.copy() for own in costs]
        self.near: list[dict[int, Costs]] = [{} for _ in costs]
        for (x, y), matrix in edges.items():
            self._join(x, y, matrix)
        self.taken: list[tuple[int, dict[int, Costs]]] = []
        self.fixed: dict[int, int] = {}
        self.heuristic_steps = 0
        self._few: list[tuple[int, int]] = []
        self._many = [(-len(near), x) for x, near in enumerate(self.near)]
        heapq.heapify(self._many)

    def _join(self, x: int, y: int, matrix: Costs) -> None:
        matrix = self.near[x][y] + matrix if y in self.near[x] else matrix
        self.near[x][y], self.near[y][x] = matrix, matrix.T

    def reduce(self) -> None:
        """Until nothing is left."""
        for x, own in enumerate(self.costs):
            if len(own) == 1:
                self._fix(x, 0)
        for x in range(len(self.costs)):
            self._note(x)
        while self._many:
            while self._few:
                edges, x = heapq.heappop(self._few)
                if x not in self.fixed and edges == len(self.near[x]):
                    self._take(x)
            edges, x = heapq.heappop(self._many)
            if x in self.fixed:
                continue
            if -edges == len(self.near[x]):
                self._guess(x)
            else:
                heapq.heappush(self._many, (-len(self.near[x]), x))

    def _note(self, x: int) -> None:
        if x not in self.fixed and len(self.near[x]) <= 2:
            heapq.heappush(self._few, (len(self.near[x]), x))

    def _apart(self, x: int) -> dict[int, Costs]:
        """Take a node's edges away; they are given back."""
        near, self.near[x] = self.near[x], {}
        for y in near:
            del self.near[y][x]
        return near

    def _fix(self, x: int, state: int) -> None:
        """A node takes a state now; its neighbours pay for it."""
        if not np.isfinite(self.costs[x][state]):
            raise Unsolvable(x)
        self.fixed[x] = state
        for y, matrix in self._apart(x).items():
            self.costs[y] = self.costs[y] + matrix[state]
            self._note(y)

    def _take(self, x: int) -> None:
        """R0, R1, R2: its state is decided when those of its neighbours are."""
        near = self._apart(x)
        self.taken.append((x, near))
        self.fixed[x] = -1
        own = self.costs[x]
        if len(near) == 1:
            ((y, matrix),) = near.items()
            self.costs[y] = self.costs[y] + (own[:, None] + matrix).min(axis=0)
        elif len(near) == 2:
            (y, to_y), (z, to_z) = near.items()
            self._join(y, z, _through(own, to_y, to_z))
        for y in near:
            self._note(y)

    def _guess(self, x: int) -> None:
        """RN."""
        total = self.costs[x].copy()
        for y, matrix in self.near[x].items():
            total += (matrix + self.costs[y]).min(axis=1)
        state = int(total.argmin())
        if not np.isfinite(total[state]):
            raise Unsolvable(x)
        self.heuristic_steps += 1
        self._fix(x, state)

    def states(self) -> tuple[int, ...]:
        """Everybody's state, those taken last first."""
        for x, near in reversed(self.taken):
            total = self.costs[x].copy()
            for y, matrix in near.items():
                total += matrix[:, self.fixed[y]]
            self.fixed[x] = int(total.argmin())
            if not np.isfinite(total[self.fixed[x]]):
                raise Unsolvable(x)
        return tuple(self.fixed[x] for x in range(len(self.costs)))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _through(own: Costs, to_y: Costs, to_z: Costs) -> Costs:
    """Per pair of states of y and z, the best answer of the node between them."""
    out = np.full((to_y.shape[1], to_z.shape[1]), np.inf)
    for x in range(len(own)):
        for y in range(to_y.shape[1]):
            cost = own[x] + to_y[x, y]
            if cost == np.inf:
                continue
            for z in range(to_z.shape[1]):
                out[y, z] = min(out[y, z], cost + to_z[x, z])
    return out


def chaindp(problem: Problem) -> Assignment:
    """Layouts by dynamic programming along chains, with PBQP reductions where the graph is no chain.

    Every storage is a node whose states are its primaries, every op a node whose states are its choices: that is how
    costs over tuples of operands become costs of pairs. The edge between an op and a storage that it touches costs the
    relayouts that the choice needs from the primary; it is infinite where the choice must have another primary, or
    where no relayout makes what it reads. Choices that others dominate are left out beforehand, which is exact.

    Where R0 to R2 are enough this is the optimum, but for one thing: an edge knows of one op only, so a copy that two
    ops read is paid twice while choosing. In the answer it is made, and paid, once.

    Returns:
        An assignment; ``method`` says how many steps were heuristic.

    Raises:
        InfeasibleError: no assignment, or a heuristic step led to a dead end.
    """
    started = time.perf_counter()
    domain = reduce(problem)
    storages = len(problem.storages)
    converted = [_conversions(problem, s) for s in range(storages)]
    costs = [np.zeros(len(left)) for left in domain.primaries]
    edges: dict[tuple[int, int], Costs] = {}
    for o, (op, left) in enumerate(zip(problem.ops, domain.choices, strict=True)):
        costs.append(np.array([op.choices[c].cost_ns for c in left], dtype=np.float64))
        layouts = np.array([op.choices[c].layouts for c in left], dtype=np.int64).reshape(len(left), -1)
        for s in dict.fromkeys(op.operands):
            edges[storages + o, s] = _edge(op, s, layouts, domain.primaries[s], converted[s])
    try:
        states, guesses = solve_pairwise(costs, edges)
    except Unsolvable as stuck:
        raise _dead_end(problem, stuck.node) from stuck
    primary = tuple(left[x] for left, x in zip(domain.primaries, states[:storages], strict=True))
    choice = tuple(left[x] for left, x in zip(domain.choices, states[storages:], strict=True))
    method = f"chaindp, {guesses} heuristic steps" if guesses else "chaindp"
    return priced(problem, primary, choice, method, "HEURISTIC", time.perf_counter() - started)


def _conversions(problem: Problem, s: int) -> Costs:
    """[primary, candidate]: the relayout between them; infinite where there is none."""
    count = len(problem.storages[s].candidates)
    rows = [[problem.conversion_ns(s, a, b) for b in range(count)] for a in range(count)]
    return np.array([[np.inf if ns is None else ns for ns in row] for row in rows], dtype=np.float64)


def _edge(op: OpNode, s: int, layouts: NDArray[np.int64], primaries: Sequence[int], converted: Costs) -> Costs:
    """[choices, primaries of s]: what having s as the choice wants it costs."""
    own = [k for k, operand in enumerate(op.operands) if operand == s]
    tied = set(op.primary_operands)
    out = np.zeros((len(layouts), len(primaries)))
    paid: list[int] = []
    for k in own:
        wanted = layouts[:, k]
        if k in tied:
            out[wanted[:, None] != np.array(primaries)[None, :]] = np.inf
            continue
        price = converted[np.array(primaries)][:, wanted].T
        # An op that reads one copy at several positions needs it once.
        again = np.zeros(len(layouts), dtype=bool)
        for other in paid:
            again |= layouts[:, other] == wanted
        out += np.where(again[:, None], 0.0, price)
        paid.append(k)
    return out


def _dead_end(problem: Problem, node: int) -> InfeasibleError:
    storages = len(problem.storages)
    name = problem.storages[node].name if node < storages else problem.ops[node - storages].name
    return InfeasibleError(
        f"a heuristic step of chaindp left {name} nothing that agrees with its neighbours; use the exact strategy",
        (name,),
    )
