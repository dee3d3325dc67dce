"""Equal pointwise programs on different ranges of the arena as one launch: a whole optimizer in a handful.

All buffers of a plan lie in one arena. A pointwise kernel whose operands share one layout walks storage linearly, so
that all it needs to know is where its operands begin and how many elements they have: steps that run the same program
(whatever their shapes) become rows of a table, and one launch does them all. Which of a plan's steps may go together,
and in which order everything then runs, ``schedule`` decides from the bytes that each step reads and writes.

Every element is computed by the same function, in vectors of the same width, as in the step's own launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from kernels.bind import BoundStep
from kernels.expr_c import expr_function, needs_math, used_inputs
from kernels.families.common import math_c
from kernels.families.pointwise import chunk_elems
from kernels.memory_c import CTYPES, MEMORY_CTYPES, half_helpers, load_c, store_c
from kernels.spec import DeviceLimits, Kernel
from layoutopt.graph import DTYPES, Expr
from layoutopt.layout import Layout
from layoutopt.plan import ArenaSlot

__all__ = ["Linear", "Merged", "Program", "Row", "linear", "merge", "merge_steps", "moved_bytes", "schedule"]

_GPU_ITEMS, _GPU_VECTORS = 128, 4
_GROUPS_PER_UNIT = 8
_WALKS = frozenset(("thin", "fat", "linear_thin", "linear_fat"))
_FOUR_GIB_ELEMS = 1 << 31
"""Up to here element numbers, and what is added to them, fit in 32 bits."""


@dataclass(frozen=True)
class Program:
    """What the steps of a launch have in common.

    Attributes:
        expr: the program.
        dtypes: per operand, inputs then outputs.
        inputs: how many of them are inputs.
        ways: per operand how it runs along the elements: "each" (one after the other), "one" (the same value for all),
            "cycle" (a row, again and again), or "" where the program does not read it.
        width: of the vectors.
    """

    expr: Expr
    dtypes: tuple[str, ...]
    inputs: int
    ways: tuple[str, ...]
    width: int

    @property
    def used(self) -> tuple[int, ...]:
        """Positions of the operands that the program touches."""
        return tuple(i for i, way in enumerate(self.ways) if way)


@dataclass(frozen=True)
class Linear:
    """A kernel as a row of a table.

    Attributes:
        program: what it runs.
        elems: over how many elements.
        period: elements after which its "cycle" operands begin again.
        bases: per operand, where in its buffer it begins (elements).
    """

    program: Program
    elems: int
    period: int
    bases: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A range of the arena: elements, period, and the byte at which each used operand begins."""

    elems: int
    period: int
    places_bytes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Merged:
    """One launch over several ranges; its arguments are the arena and the two tables.

    Attributes:
        label: for errors and dumps.
        source: complete OpenCL C; the kernel is called ``batch``.
        global_size: NDRange.
        local_size: work group.
        rows: [ranges, 2 + used operands] of uint64: elements, period, places in bytes.
        groups: [work groups, 2] of uint32: range, chunk of it.
    """

    label: str
    source: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    rows: np.ndarray
    groups: np.ndarray


# ---- which kernels are linear ---------------------------------------------------------------------------------------


def linear(kernel: Kernel) -> Linear | None:
    """The kernel as a row of a table, or None where it is something else than a linear walk."""
    if "linear" not in kernel.memo:
        kernel.memo["linear"] = _linear(kernel)
    found: Linear | None = kernel.memo["linear"]
    return found


def _linear(kernel: Kernel) -> Linear | None:
    spec = kernel.spec
    if spec.kind != "pointwise" or len(kernel.launches) != 1 or kernel.variant.name not in _WALKS:
        return None
    width = kernel.variant.param("v")
    used = {*used_inputs(spec.expr), *range(spec.inputs, len(spec.shapes))}
    shape = kernel.views[0].shape if kernel.views else ()
    if not shape or any(view.shape != shape for view in kernel.views):
        return None
    ways = tuple(_way(view) if i in used else "" for i, view in enumerate(kernel.views))
    if any(ways[i] is None for i in used) or any(ways[i] != "each" for i in range(spec.inputs, len(ways))):
        return None
    period = shape[-1] if "cycle" in ways else 1
    if period % width and len(shape) > 1:
        return None  # its vectors end at every row's end
    bases = tuple(view.base[0] for view in kernel.views)
    program = Program(spec.expr, spec.dtypes, spec.inputs, tuple(w or "" for w in ways), width)
    return Linear(program, prod(shape), period, bases)


@lru_cache(maxsize=1 << 12)
def _way(view: Layout) -> str | None:
    """How an operand runs along the elements of its domain, counted row by row."""
    if view.is_image or view.rank > 2 or view.padded_shape != view.shape:
        return None
    if all(m.stride == 0 for m in view.modes) and prod(view.shape) > 1:
        return "one"
    if view.modes == Layout.row_major(view.shape).modes:
        return "each"
    rows = [m for m in view.modes if m.axis == 0]
    columns = tuple((m.extent, m.stride) for m in view.modes if m.axis == 1)
    repeats = all(m.stride == 0 for m in rows) and columns == ((view.shape[-1], 1),)
    return "cycle" if view.rank == 2 and repeats else None


# ---- order ----------------------------------------------------------------------------------------------------------


class _Touched:
    """The bytes that some steps read and write."""

    def __init__(self) -> None:
        self.reads = np.empty((0, 2), np.int64)
        self.writes = np.empty((0, 2), np.int64)

    def add(self, reads: np.ndarray, writes: np.ndarray) -> None:
        """Ranges [n, 2] of bytes, ends excluded."""
        self.reads, self.writes = np.concatenate([self.reads, reads]), np.concatenate([self.writes, writes])

    def meets(self, reads: np.ndarray, writes: np.ndarray) -> bool:
        """Whether what touches these ranges must stay on its side of us."""
        return _overlap(self.writes, writes) or _overlap(self.writes, reads) or _overlap(self.reads, writes)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a[:, None, 0] < b[None, :, 1]) & (b[None, :, 0] < a[:, None, 1])).any())


def schedule(
    units: Iterable[Sequence[int]], steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot], *, delay: bool
) -> list[tuple[int, ...]]:
    """What to launch, in order.

    A linear step waits for others with its program until a step comes that must not overtake it.

    Args:
        units: positions of the steps, in the plan's order; several where they already share their launches.
        steps: of the plan.
        slots: of the arena.
        delay: let a step wait while others overtake it; otherwise only neighbouring linear steps go together.

    Returns:
        Tuples of positions: each unit that stays as it is, and the linear steps that go together.
    """
    out: list[tuple[int, ...]] = []
    waiting: dict[Program, tuple[list[int], _Touched]] = {}

    def release(programs: Iterable[Program]) -> None:
        for program in list(programs):
            out.append(tuple(waiting.pop(program)[0]))

    for unit in units:
        form = linear(steps[unit[0]].kernel)
        for members in [tuple(unit)] if form is None else [(i,) for i in unit]:
            reads, writes = _ranges([steps[i] for i in members], slots)
            if form is None and not delay:
                release(waiting)
            release([p for p, (_, touched) in waiting.items() if touched.meets(reads, writes)])
            if form is None:
                out.append(members)
                continue
            group, touched = waiting.setdefault(form.program, ([], _Touched()))
            group += members
            touched.add(reads, writes)
    release(waiting)
    return out


def _ranges(steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the arena that steps read and write: their slots, whole."""
    sides: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for step in steps:
        for position, name in enumerate(step.slots):
            slot = slots[name]
            place = slot.offset_bytes, slot.offset_bytes + slot.size_bytes
            sides[position >= step.kernel.spec.inputs].append(place)
    reads, writes = (np.array(side, np.int64).reshape(-1, 2) for side in sides)
    return reads, writes


# ---- one launch -----------------------------------------------------------------------------------------------------


def merge_steps(
    members: Sequence[int], steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot], limits: DeviceLimits
) -> Merged:
    """The launch of linear steps with one program.

    Args:
        members: their positions.
        steps: of the plan.
        slots: of the arena.
        limits: of the device.
    """
    rows = []
    forms = [form for i in members if (form := linear(steps[i].kernel)) is not None]
    program = forms[0].program
    assert len(forms) == len(members), "only linear steps go together"
    for i, form in zip(members, forms, strict=True):
        assert form.program == program, "only steps with one program go together"
        places = [
            slots[steps[i].slots[p]].offset_bytes + form.bases[p] * DTYPES[program.dtypes[p]] for p in program.used
        ]
        rows.append(Row(form.elems, form.period, tuple(places)))
    return merge(program, rows, limits, f"{len(rows)} x {steps[members[0]].kernel.variant.label}")


def moved_bytes(step: BoundStep) -> int:
    """Bytes that a linear step reads and writes."""
    form = linear(step.kernel)
    assert form is not None
    each = [DTYPES[d] for d, way in zip(form.program.dtypes, form.program.ways, strict=True) if way == "each"]
    return form.elems * sum(each)


def merge(program: Program, rows: Sequence[Row], limits: DeviceLimits, label: str) -> Merged:
    """One launch that runs a program over ranges of the arena.

    Args:
        program: what to run.
        rows: where.
        limits: of the device.
        label: for errors and dumps.
    """
    width = program.width
    total = sum(row.elems for row in rows)
    items, chunk = 1, -(-chunk_elems(total, limits) // width) * width
    if limits.kind == "gpu":
        items = min(_GPU_ITEMS, limits.max_work_group_size)
        vectors = total // (items * width * max(limits.compute_units, 1) * _GROUPS_PER_UNIT)
        chunk = items * width * min(max(vectors, 1), _GPU_VECTORS)
    table = np.array([(row.elems, row.period, *row.places_bytes) for row in rows], np.uint64)
    groups = [(r, c) for r, row in enumerate(rows) for c in range(-(-row.elems // chunk))]
    aligned = [
        all(row.places_bytes[k] % (width * DTYPES[program.dtypes[p]]) == 0 for row in rows)
        for k, p in enumerate(program.used)
    ]
    long = max(row.elems for row in rows) > _FOUR_GIB_ELEMS
    source = _source(program, tuple(aligned), items, chunk, long)
    size = (len(groups) * items,)
    return Merged(label, source, size, (items,), table, np.array(groups, np.uint32))


@lru_cache(maxsize=64)
def _skeleton() -> str:
    return (Path(__file__).parent / "cl" / "batch.cl").read_text(encoding="utf-8")


def _source(program: Program, aligned: tuple[bool, ...], items: int, chunk: int, long: bool) -> str:
    width, inputs = program.width, program.inputs
    in_types, out_types = program.dtypes[:inputs], program.dtypes[inputs:]
    functions = [
        expr_function(f"expr_{w}", program.expr, in_types, out_types, w) for w in sorted({width, 1}, reverse=True)
    ]
    if needs_math(program.expr):
        functions.insert(0, math_c(width))
    defines = {
        "LOCAL": items,
        "W": width,
        "CHUNK": chunk,
        "FIELDS": 2 + len(program.used),
        "NUMBER": "ulong" if long else "uint",
        "POINTERS": _pointers(program),
        "VECTOR": _step(program, aligned, width),
        "SCALAR": _step(program, aligned, 1),
    }
    lines = [f"#define {name} {value}" for name, value in defines.items()]
    text = "\n".join([*functions, *lines, _skeleton()])
    helpers = half_helpers(text)
    return f"{helpers}\n{text}" if helpers else text


def _pointers(program: Program) -> str:
    lines = []
    for k, position in enumerate(program.used):
        dtype, name = program.dtypes[position], _name(program, position)
        qualifier = "const " if position < program.inputs else ""
        pointer = f"__global {qualifier}{MEMORY_CTYPES[dtype]} *"
        lines.append(f"{pointer}{name} = ({pointer})(arena + row[{2 + k}]);")
        if program.ways[position] == "one":
            lines.append(f"const {CTYPES[dtype]} {name}_one = {load_c(dtype, 1, name, False)};")
    return " ".join(lines)


def _name(program: Program, position: int) -> str:
    return f"X{position}" if position < program.inputs else f"Y{position - program.inputs}"


def _step(program: Program, aligned: Sequence[bool], width: int) -> str:
    """Load, compute, store at ``i``: all loads come first, so that in-place programs read old values."""
    suffix = "" if width == 1 else str(width)
    args, before, after = [], [], []
    for position, fits in zip(program.used, aligned, strict=True):
        dtype, name = program.dtypes[position], _name(program, position)
        ctype = CTYPES[dtype] + suffix
        at = f"{name} + i % period" if program.ways[position] == "cycle" else f"{name} + i"
        if position >= program.inputs:
            result = name.replace("Y", "r")
            before.append(f"{ctype} {result};")
            args.append(f"&{result}")
            after.append(f"{store_c(dtype, width, result, at, fits)};")
        elif program.ways[position] == "one":
            args.append(f"({ctype})({name}_one)")
        else:
            args.append(load_c(dtype, width, at, fits))
    return f"{' '.join(before)} expr_{width}({', '.join(args)}); {' '.join(after)}"
