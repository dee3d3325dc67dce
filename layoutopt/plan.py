"""The Plan: every layout, kernel variant, relayout and arena offset of one training step, as a JSON file.

A plan is bound to one graph and one device model by their hashes. ``validate`` recomputes feasibility and the predicted
cost from scratch and is called before a plan leaves the solver and whenever one is loaded: ``plancheck.check_plan`` is
its half that needs no kernels, ``planner.validate`` the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from layoutopt.errors import LayoutError, LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.layout import Layout, Mode

__all__ = [
    "ArenaSlot",
    "ItemCost",
    "LayoutDoc",
    "Plan",
    "PlannedOp",
    "PlannedRelayout",
    "SolverReport",
    "decode",
    "encode",
    "gap_of",
    "load",
    "save",
    "step_names",
    "with_report",
]

PLAN_VERSION = 2


class LayoutDoc(msgspec.Struct, frozen=True):
    """A layout in a file: modes as ``[axis, extent, stride, dim]``."""

    shape: tuple[int, ...]
    modes: tuple[tuple[int, int, int, int], ...]
    size: tuple[int, ...]
    base: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> LayoutDoc:
        """From the value."""
        modes = tuple((m.axis, m.extent, m.stride, m.dim) for m in layout.modes)
        return LayoutDoc(layout.shape, modes, layout.size, layout.base)

    def layout(self) -> Layout:
        """To the value; LayoutError where the file holds nonsense."""
        return Layout.build(self.shape, [Mode(*m) for m in self.modes], self.size, self.base)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.layout()._repr_mimebundle_()


class ItemCost(msgspec.Struct, frozen=True):
    """Predicted nanoseconds of one op or relayout, itemised; ``measured`` says that the total was looked up."""

    total_ns: int
    compute_ns: int = 0
    memory_ns: int = 0
    launch_ns: int = 0
    measured: bool = False


class PlannedOp(msgspec.Struct, frozen=True):
    """An op's kernel variant label and, per operand, the position in ``Plan.layouts[storage]`` that it uses."""

    op: str
    variant: str
    layouts: tuple[int, ...]
    cost: ItemCost


class PlannedRelayout(msgspec.Struct, frozen=True):
    """A conversion of ``storage`` from its primary layout to ``Plan.layouts[storage][target]``.

    It runs just before op ``before``; ``bytes_moved`` counts logical elements, read and written.
    """

    storage: str
    target: int
    before: str
    variant: str
    cost: ItemCost
    bytes_moved: int

    @property
    def label(self) -> str:
        """What it is called where ops are called by their names."""
        return f"relayout:{self.storage}#{self.target}"


class ArenaSlot(msgspec.Struct, frozen=True):
    """A buffer in the arena: a materialised layout of a storage (``name#position``) or a kernel's workspace.

    ``first`` and ``last`` are positions in the plan's step list (relayouts and ops, in order), both included.
    """

    name: str
    offset_bytes: int
    size_bytes: int
    first: int
    last: int


class SolverReport(msgspec.Struct, frozen=True):
    """How the assignment was found and what is proven about it.

    ``not_run_*``: of the layouts of another runtime, the copies that it makes and no kernel here does (see
    ``layoutopt/policies.py``): their number, predicted time and bytes read and written. ``objective_ns`` is without.
    """

    strategy: str
    method: str
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    seconds: float
    storages: int
    candidates: int
    choices: int
    not_run_copies: int = 0
    not_run_ns: int = 0
    not_run_bytes: int = 0


class Plan(msgspec.Struct, frozen=True):
    """See the module docstring.

    ``layouts[storage][0]`` is the primary; ``ops`` are in execution order; ``steps`` interleaves indices: ``("op", i)``
    and ``("relayout", j)``. ``ops`` are those of the graph after ``rewrites`` (see :mod:`layoutopt.rewrites`).
    """

    version: int
    graph_name: str
    graph_hash: str
    device_name: str
    device_hash: str
    layouts: dict[str, tuple[LayoutDoc, ...]]
    ops: tuple[PlannedOp, ...]
    relayouts: tuple[PlannedRelayout, ...]
    steps: tuple[tuple[str, int], ...]
    arena_bytes: int
    arena: tuple[ArenaSlot, ...]
    solver: SolverReport
    rewrites: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        from layoutopt.display import plan_html

        return plan_html(self)


def step_names(
    steps: Sequence[tuple[str, int]], ops: Sequence[PlannedOp], relayouts: Sequence[PlannedRelayout]
) -> dict[int, str]:
    """What each step of a plan, or of one in the making, is called in messages."""
    return {i: relayouts[n].label if kind == "relayout" else ops[n].op for i, (kind, n) in enumerate(steps)}


def gap_of(objective_ns: int, bound_ns: int) -> float:
    """How far an objective may be from the optimum, as a share of it; 1 where no bound is known."""
    return (objective_ns - bound_ns) / objective_ns if bound_ns and objective_ns else 1.0


def with_report(plan: Plan, **changes: object) -> Plan:
    """The plan with something else in its solver's report."""
    return msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, **changes))


class _Header(msgspec.Struct):
    version: int


def encode(plan: Plan) -> bytes:
    """The file's bytes; equal plans give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode(data: bytes, where: str = "plan") -> Plan:
    """The plan in ``data``; ``where`` names it in errors.

    Raises:
        LayoutOptError: not a plan, damaged, or of another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Header).version
        if version == PLAN_VERSION:
            plan = msgspec.json.decode(data, type=Plan)
            for doc in (doc for docs in plan.layouts.values() for doc in docs):
                doc.layout()
            return plan
    except (msgspec.DecodeError, UnicodeDecodeError, LayoutError) as error:
        raise LayoutOptError(f"{where} is no plan or is damaged ({error}): write one with `layoutopt plan`") from error
    raise LayoutOptError(f"{where} has plan format {version}; this layoutopt reads {PLAN_VERSION}: plan the graph anew")


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan; nothing half-written stays behind.

    Raises:
        LayoutOptError: the directory does not exist or cannot be written.
    """
    write_atomic(path, encode(plan))


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file (``planner.validate`` says whether it serves a graph and a device).

    Raises:
        LayoutOptError: the file is missing, damaged or of another version.
    """
    file = Path(path)
    if not file.is_file():
        raise LayoutOptError(f"no plan at {file}: write one with `layoutopt plan GRAPH -o {file}`")
    return decode(file.read_bytes(), str(file))
