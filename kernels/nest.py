"""Loop nests: the one description of what a kernel touches.

``source.py`` emits a kernel's operand macros from it, ``costmodel/features.py`` counts it, ``simulator/trace.py`` walks
it. A kernel body that used an access the nest does not declare would not compile, for lack of the macro.

A :class:`Nest` is a grid of work items and, inside each, a list of phases executed one after the other. The grid is
written as loops, outermost first: those of kind "group" enumerate work groups in dispatch order, those of kind "item"
the work items of a group (the last varies fastest: neighbouring lanes). A phase is a nest of sequential loops around
accesses in program order. An index is quasi-affine in the loop variables (terms ``coef * (loop // div % mod)``), or the
value of an integer operand (a gather). An access whose coordinate lies outside the operand's shape does not happen: the
kernel guards it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

__all__ = ["Access", "Data", "Index", "Loop", "Nest", "Phase", "Term", "at", "index", "var"]


class Term(NamedTuple):
    """``coef * (loop // div % mod)``; ``mod`` 0 means no remainder is taken."""

    loop: str
    coef: int = 1
    div: int = 1
    mod: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """A quasi-affine coordinate: ``const`` plus terms."""

    const: int = 0
    terms: tuple[Term, ...] = ()

    def __add__(self, other: int | Index) -> Index:
        if isinstance(other, int):
            return Index(self.const + other, self.terms)
        return Index(self.const + other.const, self.terms + other.terms)


@dataclass(frozen=True, slots=True)
class Data:
    """A coordinate read from integer operand ``operand`` at ``index``: gather and scatter."""

    operand: int
    index: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """``extent`` iterations of variable ``name``."""

    name: str
    extent: int
    kind: Literal["group", "item", "seq"] = "seq"


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store instruction of a work item.

    Attributes:
        operand: position in the op's operands (inputs then outputs), then the kernel's scratch buffers.
        index: one coordinate per axis of the operand as the op views it.
        width: elements moved by one execution, neighbours along ``axis`` starting at ``index``.
        axis: the vector's axis; irrelevant for width 1.
        write: store rather than load. An atomic update is a load and a store.
        depth: how many of the phase's loops enclose it (the rest do not repeat it: the value stays in a register).
    """

    operand: int
    index: tuple[Index | Data, ...]
    width: int = 1
    axis: int = 0
    write: bool = False
    depth: int = -1  # -1: all loops


@dataclass(frozen=True, slots=True)
class Phase:
    """Sequential loops (outermost first) around accesses; ``flops`` per innermost iteration of one work item.

    Accesses of one depth are in program order; accesses of lesser depth come before the inner loops when they are
    loads and after them when they are stores.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Nest:
    """A whole launch: the grid's loops and each work item's phases.

    Attributes:
        grid: loops over work groups and items.
        phases: in order.
        memo: what is worked out from the nest and worth keeping with it: its counts on a machine.
    """

    grid: tuple[Loop, ...]
    phases: tuple[Phase, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, hash=False, repr=False)

    @property
    def groups(self) -> int:
        """Number of work groups."""
        return prod(loop.extent for loop in self.grid if loop.kind == "group")

    @property
    def items(self) -> int:
        """Work items in a group."""
        return prod(loop.extent for loop in self.grid if loop.kind == "item")

    @property
    def flops(self) -> int:
        """Arithmetic of the whole launch (guarded iterations counted as if they ran)."""
        per_item = sum(p.flops * prod(loop.extent for loop in p.loops) for p in self.phases)
        return per_item * self.groups * self.items

    def executions(self, phase: Phase, access: Access) -> int:
        """How often an access runs in the launch, guards ignored."""
        depth = len(phase.loops) if access.depth < 0 else access.depth
        return self.groups * self.items * prod(loop.extent for loop in phase.loops[:depth])


def index(const: int = 0, **coefs: int) -> Index:
    """``index(3, m=8, j=1)`` is ``3 + 8*m + j``."""
    return Index(const, tuple(Term(name, coef) for name, coef in coefs.items() if coef))


def var(name: str, coef: int = 1, div: int = 1, mod: int = 0) -> Index:
    """A single term."""
    return Index(0, (Term(name, coef, div, mod),))


def at(operand: int, *coords: Index | Data | int, **options: int | bool) -> Access:
    """An access; integer coordinates are constants."""
    fixed = tuple(Index(c) if isinstance(c, int) else c for c in coords)
    return Access(operand, fixed, **options)  # type: ignore[arg-type]
