"""Embedding look-ups and their gradient.

``gather`` copies rows of a table. ``scatter_add`` adds rows into the table's gradient by id, in a fixed order and
without atomic additions. On CPUs a work item owns some of the gradient: ``block``, rows of it, or ``columns``, columns
of all of it, zeroed before; it walks all ids in order. On GPUs ``rows`` gives each work group some rows of the
gradient, written once each, and ``parts`` is for few targets with many rows each, which are cut into parts that are
added up apart and joined in order. Ids must lie within the table: the host checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kernels.families.common import any_image
from kernels.families.concat import fill_launch
from kernels.families.pointwise import chunk_elems
from kernels.nest import NEVER, Access, Bound, Data, Index, Loop, Nest, Phase, Term, Via
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["INDEXING", "Indexing"]

_GROUP_ITEMS = 128
_WINDOW = 1024
"""Ids that ``rows`` looks through at a time: 32 words of 32 bits, and one that says which of them are not zero."""
_MOST_BLOCK = 32
_MOST_TARGETS = 64
_MOST_LANES, _LINE_BYTES = 32, 128
_PARTS_BYTES = 16384
"""Local memory that sums of parts may take."""


class Indexing:
    """See the module docstring."""

    name = "indexing"
    kinds: tuple[str, ...] = ("gather", "scatter_add")

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Widths, and for scatter_add the ways of owning that suit the device's kind."""
        n, d = spec.shapes[1][0], spec.shapes[0][1]
        gpu = limits.kind == "gpu"
        widths = (4, 1) if gpu else [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
        out: list[KernelVariant] = []
        for v in widths:
            if spec.kind == "gather":
                lanes = _lanes(d, v) if gpu else 1
                each = 1 if gpu else max(min(n // (limits.compute_units * 4), 16), 1)
                at_once = _GROUP_ITEMS // lanes if gpu else 1
                out.append(self._variant("gather", lanes=lanes, rl=at_once, rows=each, v=v))
            elif gpu:
                out += self._gpu_scatters(n, d, spec.shapes[2][0], v, limits)
            else:
                out += self._cpu_scatters(d, spec.shapes[2][0], v, limits)
        return out

    def _variant(self, name: str, **params: int) -> KernelVariant:
        return KernelVariant(self.name, name, tuple(sorted(params.items())))

    def _cpu_scatters(self, d: int, targets: int, v: int, limits: DeviceLimits) -> Iterator[KernelVariant]:
        items = limits.compute_units * 4
        yield self._variant("block", rows=-(-targets // items), v=v)
        chunk = chunk_elems(targets * d, limits)
        yield self._variant("columns", block=v * -(-d // (v * items)), chunk=chunk, v=v)

    def _gpu_scatters(self, n: int, d: int, targets: int, v: int, limits: DeviceLimits) -> Iterator[KernelVariant]:
        lanes = _lanes(d, v)
        at_once = _GROUP_ITEMS // lanes
        block = at_once
        while 2 * block <= _MOST_BLOCK and targets // (2 * block) >= limits.compute_units * 4:
            block *= 2
        yield self._variant("rows", block=block, lanes=lanes, rl=at_once, v=v)
        if targets > _MOST_TARGETS or n < 4 * targets:
            return
        room = min(_PARTS_BYTES, limits.local_mem_bytes) // (4 * v * targets)
        vectors = -(-d // v)
        # A line across for one launch of few groups, or more of it and rows cut into parts.
        for most, split in ((max(_LINE_BYTES // (4 * v), 1), False), (_MOST_LANES, True)):
            lanes, at_once = 1, 1
            while lanes < min(most, vectors) and 2 * lanes <= room:
                lanes *= 2
            items = min(256 if split else 512, limits.max_work_group_size)
            while 2 * lanes * at_once <= min(items, room) and 8 * at_once <= n:
                at_once *= 2
            wanted = -(-limits.compute_units * 2 // -(-vectors // lanes))
            parts = min(wanted, n // (4 * at_once)) if split else 1
            if parts > 1 or not split:
                yield self._variant("parts", lanes=lanes, rl=at_once, split=parts, v=v)

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where no matrix is contiguous along the row."""
        width, d = variant.param("v"), spec.shapes[0][1]
        if any_image(layouts) or d < width:
            return None
        if spec.kind == "scatter_add" and spec.dtypes[2] == "float16":
            return None  # sums are kept in the gradient itself
        if width > 1 and not any(x.vectorizes(1, width) for x in (layouts[0], layouts[2])):
            return None
        builder = _Builder(variant, spec)
        if variant.name == "parts":
            return Kernel(spec, variant, layouts, *builder.parts())
        launches = [getattr(builder, variant.name)()]
        if variant.name == "columns":
            fill = KernelVariant(self.name, "fat", (("chunk", variant.param("chunk")), ("v", 16)))
            launches.insert(0, fill_launch(fill, layouts[2], "GRAD", 2, spec.dtypes[2]))
        return Kernel(spec, variant, layouts, tuple(launches))


def _lanes(d: int, width: int) -> int:
    """Work items across a row: a power of two, a wave at most."""
    lanes = 1
    while lanes < min(-(-d // width), _MOST_LANES):
        lanes *= 2
    return lanes


@dataclass(frozen=True)
class _Hits:
    """[targets, most]: the rows that belong to each target, in order.

    Attributes:
        places: targets.
        window: ids that are looked through at a time.
        at_once: rows of a window that are read at a time; the first of them stands for those that are missing.
    """

    places: int
    window: int
    at_once: int = 1

    def table(self, integers: np.ndarray) -> np.ndarray:
        """See ``Via``."""
        rows: list[list[int]] = [[] for _ in range(self.places)]
        for first in range(0, len(integers), self.window):
            found: dict[int, list[int]] = {}
            for row, target in enumerate(integers[first : first + self.window], first):
                if target >= 0:
                    found.setdefault(int(target), []).append(row)
            for target, own in found.items():
                missing = -len(own) % self.at_once
                rows[target] += own + [own[-1 - (len(own) - 1) % self.at_once]] * missing
        return _ragged(rows)


@dataclass(frozen=True)
class _Again:
    """[targets, most]: 0 for each window but the first in which a target has rows."""

    places: int
    window: int

    def table(self, integers: np.ndarray) -> np.ndarray:
        """See ``Via``."""
        later = integers[self.window :]
        rows: list[list[int]] = [[] for _ in range(self.places)]
        for first in range(0, len(later), self.window):
            for target in np.unique(later[first : first + self.window]):
                if target >= 0:
                    rows[target].append(0)
        return _ragged(rows)


def _ragged(rows: list[list[int]]) -> np.ndarray:
    """Lists as a table, -1 behind their ends."""
    table = np.full((len(rows), max(max(map(len, rows), default=0), 1)), -1, dtype=np.int64)
    for own, line in zip(rows, table, strict=True):
        line[: len(own)] = own
    return table


class _Builder:
    """Launches of one variant for one spec, the same over all layouts."""

    def __init__(self, variant: KernelVariant, spec: OpSpec) -> None:
        self.variant, self.spec = variant, spec
        (self.n,), self.d = spec.shapes[1], spec.shapes[0][1]
        self.width = variant.param("v")
        self.targets = spec.shapes[2][0]
        self.padding = int(spec.attr("padding_idx", -1))

    def _launch(self, entry: str, names: tuple[tuple[str, int], ...], nest: Nest, **defines: int) -> Launch:
        constants = {"W": self.width, "N": self.n, "D": self.d, "TARGETS": self.targets, "PADDING": self.padding}
        constants |= {**defines, f"OP_{entry.removesuffix('_parts')}": 1}
        size = (nest.groups * nest.items,), (nest.items,)
        return Launch("indexing.cl", entry, names, nest, *size, tuple(constants.items()))

    def _grad_launch(self, entry: str, nest: Nest, **defines: int) -> Launch:
        return self._launch(entry, (("DY", 0), ("IDS", 1), ("GRAD", 2)), nest, **defines)

    # ---- gather -----------------------------------------------------------------------------------------------------

    def gather(self) -> Launch:
        """Copies of rows."""
        lanes, at_once, each = (self.variant.param(p) for p in ("lanes", "rl", "rows"))
        groups = -(-self.n // (each * at_once))
        phases: list[Phase] = []
        for q in range(each):
            row = Index(q * at_once, (Term("g", each * at_once), Term("r")))
            phases.append(Phase((), (Access(1, (row,)),)))
            phases += self._row(lanes, Data(1, (row,)), row)
        grid = (Loop("g", groups, "group"), Loop("r", at_once, "item"), Loop("t", lanes, "item"))
        names = (("TABLE", 0), ("IDS", 1), ("Y", 2))
        return self._launch("gather", names, Nest(grid, tuple(phases)), LANES=lanes, ROWS_AT_ONCE=at_once, ROWS=each)

    def _row(self, lanes: int, source: Index | Data, target: Index | Data) -> Iterator[Phase]:
        """Phases that copy a row: vectors, and one by one what is left over (across lanes: a last vector, clipped)."""
        width, tail = self.width, self.d % self.width if lanes == 1 else 0
        vectors = -(-(self.d - tail) // width)
        column = Index(0, (Term("t", width), Term("j", width * lanes)))
        within = (Bound(column, self.d - width + 1),) if lanes > 1 else ()
        copy = (
            Access(0, (source, column), width, 1, when=within),
            Access(2, (target, column), width, 1, True, when=within),
        )
        yield Phase((Loop("j", -(-vectors // lanes)),), copy, 0, self._left(lanes, source, target))
        if tail:
            rest = Index(self.d - tail, (Term("j"),))
            yield Phase((Loop("j", tail),), (Access(0, (source, rest)), Access(2, (target, rest), write=True)))

    def _left(self, lanes: int, source: Index | Data, target: Index | Data) -> tuple[Access, ...]:
        """What vectors leave over of a row, value by value across the lanes."""
        tail, out = self.d % self.width if lanes > 1 else 0, []
        for first in range(0, tail, lanes):
            column = Index(self.d - tail + first, (Term("t"),))
            out += [Access(0, (source, column), depth=0), Access(2, (target, column), write=True, depth=0)]
        return tuple(out)

    # ---- scatter_add ------------------------------------------------------------------------------------------------
    # What is added to what depends on the ids: for the cost model the nests have the n rows spread evenly over the
    # targets, in order; what really happens with given ids is in ``border``, by tables of rows that belong together.

    @property
    def _each(self) -> int:
        return -(-self.n // self.targets)

    def _added(self, target: Index, column: Index) -> Access:
        """Row ``h`` of those that belong to a target."""
        terms = tuple(Term(x.loop, x.coef * self._each, x.div, x.mod) for x in target.terms)
        return Access(0, (Index(target.const * self._each, (*terms, Term("h"))), column), self.width, 1)

    def _hits(self, row: Index, via: Via) -> Data:
        return Data(1, (row, Index(0, (Term("h"),))), self.padding, via)

    @property
    def _per_target(self) -> Loop:
        return Loop("h", self._each)

    def block(self) -> Launch:
        """An item owns rows of the gradient."""
        width, rows = self.width, self.variant.param("rows")
        row, column = Index(0, (Term("g", rows), Term("q"))), Index(0, (Term("j", width),))
        loops = (Loop("q", rows), Loop("j", -(-self.d // width)))
        grad = [Access(2, (row, column), width, 1, write=write) for write in (True, False, True)]
        added = tuple(replace(a, when=NEVER) for a in (grad[1], self._added(row, column), grad[2]))
        hits = self._hits(row, _Hits(self.targets, self.n))
        exists = (Bound(hits, self.n),)
        real = (replace(grad[1], when=exists), Access(0, (hits, column), width, 1), replace(grad[2], when=exists))
        phases = (
            Phase(loops, (grad[0],)),
            Phase((Loop("i", self.n),), (Access(1, (Index(0, (Term("i"),)),)),), 1),
            Phase((*loops[:1], self._per_target, *loops[1:]), added, width, real),
        )
        groups = -(-self.targets // rows)
        return self._grad_launch("block", Nest((Loop("g", groups, "group"),), phases), BLOCK=rows)

    def columns(self) -> Launch:
        """An item owns columns of the gradient."""
        width, block = self.width, self.variant.param("block")
        row, ids = Index(0, (Term("i"),)), Data(1, (Index(0, (Term("i"),)),), self.padding)
        column = Index(0, (Term("g", block), Term("j", width)))
        accesses = (
            Access(1, (row,), depth=1),
            Access(2, (ids, column), width, 1),
            Access(0, (row, column), width, 1, when=(Bound(ids, self.targets),)),
            Access(2, (ids, column), width, 1, True),
        )
        loops = (Loop("i", self.n), Loop("j", -(-block // width)))
        nest = Nest((Loop("g", -(-self.d // block), "group"),), (Phase(loops, accesses, width),))
        return self._grad_launch("columns", nest, BLOCK=block)

    def rows(self) -> Launch:
        """A work group owns rows of the gradient."""
        width, block, lanes, at_once = (self.variant.param(p) for p in ("v", "block", "lanes", "rl"))
        items = lanes * at_once
        seen = Index(0, (Term("w", _WINDOW), Term("p", items), Term("r", lanes), Term("t")))
        row = Index(0, (Term("g", block), Term("q", at_once), Term("r")))
        column = Index(0, (Term("t", width), Term("j", width * lanes)))
        windows, vectors = -(-self.n // _WINDOW), -(-self.d // width)
        own = (Bound(Index(0, (Term("q", at_once), Term("r"))), block),)  # lanes of rows may be more than rows
        phases: tuple[Phase, ...] = (
            Phase((Loop("w", windows), Loop("p", -(-_WINDOW // items))), (Access(1, (seen,)),), 1),
            Phase(
                (Loop("q", -(-block // at_once)), Loop("j", -(-vectors // lanes)), self._per_target),
                (
                    replace(self._added(row, column), when=NEVER),
                    Access(2, (row, column), width, 1, True, depth=2, when=own),
                ),
                width,
                (Access(0, (self._hits(row, _Hits(self.targets, _WINDOW, 4)), column), width, 1, when=own),),
            ),
        )
        if windows > 1:  # what was found in one is added to in the next
            again = tuple(Access(2, (row, column), width, 1, write=write) for write in (False, True))
            repeats = Loop("h", min(windows - 1, self._each))
            later = (*own, Bound(self._hits(row, _Again(self.targets, _WINDOW)), 1))
            stand_ins, real = ([replace(a, when=when) for a in again] for when in (NEVER, later))
            phases = (*phases, Phase((*phases[1].loops[:2], repeats), tuple(stand_ins), 0, tuple(real)))
        groups = -(-self.targets // block)
        grid = (Loop("g", groups, "group"), Loop("r", at_once, "item"), Loop("t", lanes, "item"))
        return self._grad_launch("rows", Nest(grid, phases), BLOCK=block, LANES=lanes, ROWS_AT_ONCE=at_once)

    def parts(self) -> tuple[tuple[Launch, ...], tuple[Scratch, ...]]:
        """Row lanes with sums of their own, and, of several parts, the launch that joins them."""
        width, lanes, at_once, split = (self.variant.param(p) for p in ("v", "lanes", "rl", "split"))
        chunk = -(-self.n // (split * at_once)) * at_once
        split = -(-self.n // chunk)
        stretches = -(-self.d // (lanes * width))
        row = Index(0, (Term("s", chunk), Term("r"), Term("i", at_once)))
        column = Index(0, (Term("c", lanes * width), Term("t", width)))
        target = Index(0, (Term("r"), Term("k", at_once)))
        place = (target, column) if split == 1 else (Index(0, (Term("s"),)), target, column)
        some = Bound(column, self.d)
        read = (Access(1, (row,), when=(some,)), Access(0, (row, column), width, 1, when=NEVER))
        store = Access(2 if split == 1 else 3, place, width, len(place) - 1, True)
        phases = (
            Phase((Loop("i", chunk // at_once),), read, width, self._part_rows(row, column, chunk, at_once)),
            Phase((Loop("k", -(-self.targets // at_once)),), (store,), width * at_once),
        )
        grid = (
            *(Loop("s", split, "group"), Loop("c", stretches, "group")),
            *(Loop("r", at_once, "item"), Loop("t", lanes, "item")),
        )
        sizes = {"LANES": lanes, "ROWS_AT_ONCE": at_once, "SPLIT": split, "CHUNK": chunk, "STRETCHES": stretches}
        names = (("DY", 0), ("IDS", 1), ("GRAD", 2) if split == 1 else ("PART", 3))
        first = self._launch("parts", names, Nest(grid, phases), **sizes)
        if split == 1:
            return (first,), ()
        scratch = Scratch("float32", Layout.row_major((split, self.targets, self.d)))
        return (first, self._join(split)), (scratch,)

    def _part_rows(self, row: Index, column: Index, chunk: int, at_once: int) -> tuple[Access, ...]:
        """Rows of a part are read four at a time whatever their ids; those that are left only where they have a target.

        So are all rows by items whose vector passes the row's end.
        """
        fourth = Index(3, (Term("i", 4, 4),))
        steps, last = chunk // at_once, Index(3 * at_once, (Term("s", chunk), Term("r"), Term("i", 4 * at_once, 4)))
        whole, partial = Bound(column, self.d - self.width + 1), Bound(-column, self.width - self.d)
        counted = Bound(Data(1, (row,), self.padding), self.targets)
        in_chunk, exist = Bound(fourth, steps), Bound(last, self.n)
        beyond_chunk, beyond = Bound(-fourth, 1 - steps), Bound(-last, 1 - self.n)
        cases = [
            (whole, in_chunk, exist),
            (whole, beyond_chunk, counted),
            (whole, in_chunk, beyond, counted),
            (partial, counted),
        ]
        return tuple(Access(0, (row, column), self.width, 1, when=when) for when in cases)

    def _join(self, split: int) -> Launch:
        width, lanes = self.width, _lanes(self.d, self.width)
        stretches = -(-self.d // (lanes * width))
        target, column = Index(0, (Term("g"),)), Index(0, (Term("c", lanes * width), Term("t", width)))
        accesses = (
            Access(3, (Index(0, (Term("s"),)), target, column), width, 2),
            Access(2, (target, column), width, 1, True, depth=0),
        )
        grid = (Loop("g", self.targets, "group"), Loop("c", stretches, "group"), Loop("t", lanes, "item"))
        nest = Nest(grid, (Phase((Loop("s", split),), accesses, width),))
        names = (("PART", 3), ("GRAD", 2))
        return self._launch("join_parts", names, nest, LANES=lanes, SPLIT=split, STRETCHES=stretches)


INDEXING = Indexing()
