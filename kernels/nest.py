"""Loop nests: the one description of what a kernel touches.

``source.py`` emits a kernel's operand macros from it, ``costmodel/features.py`` counts it, ``simulator/trace.py`` walks
it. A kernel body that used an access the nest does not declare would not compile, for lack of the macro.

A :class:`Nest` is a grid of work items and, inside each, a list of phases executed one after the other. The grid is
written as loops, outermost first: those of kind "group" enumerate work groups in dispatch order, those of kind "item"
the work items of a group (the last varies fastest: neighbouring lanes). A phase is a nest of sequential loops around
accesses in program order. An index is quasi-affine in the loop variables (terms ``coef * (loop // div % mod)``), or the
value of an integer operand (a gather). An access whose coordinate lies outside the operand's shape does not happen: the
kernel guards it; a vector that ends outside is done value by value, as far as the shape goes. What else a kernel does
at borders an access says by ``clamps``, ``when``, ``vector_when`` and ``past``, and a phase by ``border``. The
simulator follows them; the cost model counts as if they were not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

__all__ = [
    "NEVER",
    "Access",
    "Bound",
    "Clamp",
    "Data",
    "Index",
    "Loop",
    "Nest",
    "Phase",
    "Term",
    "at",
    "index",
    "var",
    "within",
]


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

    def __neg__(self) -> Index:
        return Index(-self.const, tuple(t._replace(coef=-t.coef) for t in self.terms))


class Via(Protocol):
    """A table made of integers that steer a kernel; hashable. -1 in it is nowhere.

    Where the table is indexed by a loop alone, the loop is as long as the table is wide.
    """

    @property
    def places(self) -> int:
        """The integers are below this."""
        ...

    def table(self, integers: np.ndarray) -> np.ndarray:
        """From the integers in order, -1 for nowhere."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """A coordinate read from integer operand ``operand`` at ``index``: gather and scatter.

    ``nowhere`` is a value that stands for no place: what is accessed there does not happen. With ``via`` the coordinate
    is not the integer itself but comes from a table made of all of them, which ``index`` then points into.
    """

    operand: int
    index: tuple[Index, ...]
    nowhere: int = -1
    via: Via | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """``extent`` iterations of variable ``name``."""

    name: str
    extent: int
    kind: Literal["group", "item", "seq"] = "seq"


class Bound(NamedTuple):
    """``value < below``; an integer that is read must be a place too (not negative, nor the one that is nowhere)."""

    value: Index | Data
    below: int


def within(value: Index, extent: int) -> tuple[Bound, Bound]:
    """``0 <= value < extent``."""
    return Bound(value, extent), Bound(-value, 1)


NEVER = (Bound(Index(), 0),)
"""``when`` of an access that is there for the cost model alone, where what really happens is in ``Phase.border``."""


class Clamp(NamedTuple):
    """The coordinate of ``axis`` is ``min(index, most) + plus``: an item at the border reads again what exists."""

    axis: int
    most: int
    plus: int = 0


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
        clamps: coordinates that stay within a limit; of a vector along its axis the first value, or each where it is
            done value by value.
        when: all must hold, or the access does not happen.
        vector_when: all must hold, or a vector is done value by value.
        past: what lies outside the shape is accessed too, in the layout's padding.
    """

    operand: int
    index: tuple[Index | Data, ...]
    width: int = 1
    axis: int = 0
    write: bool = False
    depth: int = -1  # -1: all loops
    clamps: tuple[Clamp, ...] = ()
    when: tuple[Bound, ...] = ()
    vector_when: tuple[Bound, ...] = ()
    past: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Sequential loops (outermost first) around accesses; ``flops`` per innermost iteration of one work item.

    Accesses of one depth are in program order; accesses of lesser depth come before the inner loops when they are
    loads and after them when they are stores. ``border``: accesses that few work items make, where the sizes do not
    divide; they come after the others of their depth, and the cost model leaves them out.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    flops: int = 0
    border: tuple[Access, ...] = ()


@dataclass(frozen=True, slots=True)
class Nest:
    """A whole launch: the grid's loops and each work item's phases.

    Attributes:
        grid: loops over work groups and items.
        phases: in order.
        shared: outermost loops that all phases have in common, in each of whose iterations the phases run one after the
            other; the cost model sees each phase run them for itself.
        memo: what is worked out from the nest and worth keeping with it: its counts on a machine.
    """

    grid: tuple[Loop, ...]
    phases: tuple[Phase, ...]
    shared: int = 0
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


def at(operand: int, *coords: Index | Data | int, **options: Any) -> Access:
    """An access; integer coordinates are constants."""
    fixed = tuple(Index(c) if isinstance(c, int) else c for c in coords)
    return Access(operand, fixed, **options)
