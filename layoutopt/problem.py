"""The layout assignment problem as integer tables: what ``solve.py`` and ``strategies.py`` see of the world.

Facility location: a storage may be *materialised* in several candidate layouts; its producer writes one of them (the
primary), relayouts make the others from the primary, once each, whatever the number of consumers. Every op picks one
*choice*: a kernel variant together with the candidate layout it uses for each operand. Costs are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layoutopt.layout import Layout

__all__ = ["Assignment", "Choice", "OpNode", "Problem", "StorageNode"]


@dataclass(frozen=True)
class StorageNode:
    """A storage with its candidate layouts (over the storage's own shape).

    Attributes:
        name: the storage's name in the graph.
        candidates: layouts it may be materialised in; the first is row-major.
        sizes_bytes: allocation of each candidate.
        persistent: lives across steps (parameters, optimizer state, constants): it ends the step in its primary layout.
        primary: candidate index that the primary must be, or -1 where the solver is free (inputs and outputs are
            row-major, since the host reads and writes them).
    """

    name: str
    candidates: tuple[Layout, ...]
    sizes_bytes: tuple[int, ...]
    persistent: bool
    primary: int = -1


@dataclass(frozen=True)
class Choice:
    """A kernel variant over given candidates: ``layouts[i]`` indexes the candidates of operand i's storage."""

    layouts: tuple[int, ...]
    cost_ns: int
    variant: str


@dataclass(frozen=True)
class OpNode:
    """An op: the storage index of each operand (inputs first) and its choices.

    Attributes:
        name: the op's name in the graph.
        operands: storage index per operand, inputs first. What an op writes is its storage's primary.
        inputs: number of inputs.
        choices: what the op may pick.
        pinned: input positions that must read the primary, because an earlier op wrote this value in place and a copy
            made before that would be stale.
    """

    name: str
    operands: tuple[int, ...]
    inputs: int
    choices: tuple[Choice, ...]
    pinned: tuple[int, ...] = ()

    @property
    def primary_operands(self) -> tuple[int, ...]:
        """Positions whose layout must be the primary: outputs and pinned inputs."""
        return (*self.pinned, *range(self.inputs, len(self.operands)))


@dataclass(frozen=True)
class Problem:
    """A whole instance; ops in execution order.

    Attributes:
        relayout_ns: cost of making candidate ``b`` from candidate ``a`` of storage ``s``, by ``(s, a, b)``. A pair that
            is absent cannot be converted.
    """

    storages: tuple[StorageNode, ...]
    ops: tuple[OpNode, ...]
    relayout_ns: Mapping[tuple[int, int, int], int]

    def conversion_ns(self, storage: int, a: int, b: int) -> int | None:
        """Cost of having candidate ``b`` when the primary is ``a``: 0 for the same, None where it cannot be made."""
        return 0 if a == b else self.relayout_ns.get((storage, a, b))


@dataclass(frozen=True)
class Assignment:
    """A solution: what ``solve`` and the strategies return and ``check`` verifies.

    Attributes:
        primary: candidate index per storage.
        copies: further materialised candidates per storage, each made from the primary by one relayout.
        choice: choice index per op.
        cost_ns: the objective: choices plus relayouts.
        status: "OPTIMAL", "FEASIBLE" (time limit) or "HEURISTIC" (a strategy that proves nothing).
        bound_ns: proven lower bound on the optimum (0 for heuristics).
        seconds: wall time.
        method: what found it.
    """

    primary: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    choice: tuple[int, ...]
    cost_ns: int
    status: str
    bound_ns: int
    seconds: float
    method: str
