"""Operations over the rows of matrices: softmax, layer norm, their gradients, and the losses' row parts.

Each is a few passes over a row; ``cl/rows.cl`` writes it once for three orientations: ``item`` (one work item a row,
vector along the row; any layout, by scalars if need be), ``cols`` (one work item for ``v`` neighbouring rows) and, on
GPUs, ``group`` (a row over ``items`` work items, ``rows`` rows a group, kept in registers and reduced through local
memory).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.families.common import any_image, math_c
from kernels.nest import Access, Bound, Clamp, Data, Index, Loop, Nest, Phase, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout

__all__ = ["ANY_CLASS", "ROWS", "RowOp", "Rows", "row_launches", "row_variants"]

_GROUP_ITEMS, _LONG_ITEMS, _MOST_VECTORS = 128, 256, 8
"""Items of a group of short rows; of one long row at most; vectors of a row that an item keeps in registers at most."""
_KEPT_BYTES = 1 << 17
"""Private memory that a fat work item may take for its rows."""
_ITEM, _COLS, _GROUP = 0, 1, 2
ANY_CLASS = 1 << 30
"""More classes than there are: a target that is none is not below it (see ``kernels.nest.Bound``)."""


@dataclass(frozen=True)
class RowOp:
    """What a row operation touches.

    Attributes:
        names: C name of each kernel argument, in the op's operand order; "" for an operand that this launch omits.
        passes: names per pass over the row, a trailing ``=`` for a store.
        kept: the same where the row is kept in private memory: nothing is read twice or written for a later pass.
        flops: arithmetic of one element in each pass.
        once: the same over a group that keeps nothing, where the body finds peak and sum in one pass.
        row_in: vectors [M] and scalars read once a row, before the passes.
        row_out: vectors [M] written once a row, after them.
        at_target: names accessed at ``[row, TARGET[row]]`` at the end, ``=`` for a store; scalars where there is one.
        counted: names of ``passes`` that are accessed only in rows that have a target.
    """

    names: tuple[str, ...]
    passes: tuple[tuple[str, ...], ...]
    kept: tuple[tuple[str, ...], ...]
    flops: tuple[int, ...]
    once: tuple[tuple[str, ...], ...] = ()
    row_in: tuple[str, ...] = ()
    row_out: tuple[str, ...] = ()
    at_target: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()


OPS = {
    "softmax": RowOp(("X", "Y"), (("X",), ("X", "Y="), ("Y", "Y=")), (("X",), (), ("Y=",)), (1, 12, 1)),
    "softmax_grad": RowOp(("DY", "Y", "DX"), (("DY", "Y"), ("Y", "DY", "DX=")), (("DY", "Y"), ("DX=",)), (2, 2)),
    "log_softmax": RowOp(
        ("X", "Y"), (("X",), ("X",), ("X", "Y=")), (("X",), (), ("Y=",)), (1, 12, 1), (("X",), (), ("X", "Y="))
    ),
    "log_softmax_grad": RowOp(("DY", "Y", "DX"), (("DY",), ("DY", "Y", "DX=")), (("DY",), ("Y", "DX=")), (1, 12)),
    "layer_norm": RowOp(
        ("X", "G", "B", "Y", "MEAN", "RSTD"),
        (("X",), ("X",), ("X", "G", "B", "Y=")),
        (("X",), (), ("G", "B", "Y=")),
        (1, 3, 4),
        row_out=("MEAN", "RSTD"),
    ),
    "layer_norm_grad": RowOp(
        ("DY", "X", "MEAN", "RSTD", "G", "DX"),
        (("DY", "G", "X"), ("DY", "G", "X", "DX=")),
        (("DY", "G", "X"), ("DX=",)),
        (6, 7),
        row_in=("MEAN", "RSTD"),
    ),
}
_ALONG_K = frozenset({"G", "B"})


class Rows:
    """See the module docstring."""

    name = "rows"
    kinds: tuple[str, ...] = tuple(OPS)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Orientations and widths for the device's kind."""
        rows, k = spec.shapes[0]
        return row_variants(self.name, rows, k, limits)

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where nobody is contiguous along the variant's vector."""
        defines = (("EPS", float(spec.attr("eps"))),) if spec.kind == "layer_norm" else ()
        kernel = Kernel(spec, variant, layouts, ())
        launches = row_launches(kernel, spec.kind, OPS[spec.kind], defines)
        return None if launches is None else Kernel(spec, variant, layouts, launches)


def row_variants(family: str, rows: int, k: int, limits: DeviceLimits, cols: bool = True) -> list[KernelVariant]:
    """Variants of a row operation over [rows, k]."""
    if limits.kind == "gpu":
        out = []
        for v in (4, 2, 1) if k % 4 == 2 else (4, 1):
            for each in (4, 2):
                items = 8
                while items < min(-(-k // (v * each)), _LONG_ITEMS, limits.max_work_group_size):
                    items *= 2
                at_once = max(_GROUP_ITEMS // items, 1)
                out.append(KernelVariant(family, "group", (("items", items), ("rows", at_once), ("v", v))))
        out = list(dict.fromkeys(out))
        return out + ([KernelVariant(family, "cols", (("items", 64), ("v", 1)))] if cols else [])
    widths = [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
    # A work item takes several short rows, so that starting it costs little beside them.
    per_item = 1
    while per_item < 8 and per_item * k < 512 and rows // (2 * per_item) >= 4 * limits.compute_units:
        per_item *= 2
    out = [KernelVariant(family, "item", (("rows", per_item), ("v", v))) for v in widths]
    return out + ([KernelVariant(family, "cols", (("items", 1), ("v", v))) for v in widths if v > 1] if cols else [])


def row_launches(
    kernel: Kernel, entry: str, op: RowOp, defines: tuple[tuple[str, str | int | float], ...] = ()
) -> tuple[Launch, ...] | None:
    """The launches of a row operation in the variant's orientation, None where its vector fits no operand.

    Args:
        kernel: the specialisation so far: spec, variant, layouts and scratch are read.
        entry: kernel function in ``rows.cl``.
        op: what it touches.
        defines: the operation's constants.
    """
    layouts = [kernel.operand_layout(i) for i, name in enumerate(op.names) if name]
    matrices = [x for x, name in zip(layouts, filter(None, op.names), strict=True) if _is_matrix(name, x.rank)]
    m, k = matrices[0].shape

    def contiguous(axis: int, width: int) -> bool:
        """Whether some matrix has vectors of ``width``, or of 4 to make them of, along the axis."""
        return any(x.vectorizes(axis, min(width, 4)) for x in matrices)

    if any_image(kernel.layouts) or k < 1:
        return None
    width = kernel.variant.param("v")
    if kernel.variant.name == "cols":
        # One lane a row pays where neighbouring rows are neighbours in memory, as for vectors.
        if not contiguous(0, max(width, 2)) or m < width:
            return None
    elif width > 1 and (k < width or not contiguous(1, width)):
        return None
    return _launches(kernel.variant, entry, op, defines, tuple(x.shape for x in layouts))


@lru_cache(maxsize=1 << 12)
def _launches(
    variant: KernelVariant, entry: str, op: RowOp, defines: tuple[tuple[str, str | int | float], ...], shapes: _Shapes
) -> tuple[Launch, ...]:
    """Launches are the same over all layouts that a variant accepts."""
    builder = _Builder(entry, op, defines, shapes)
    width = variant.param("v")
    if variant.name == "cols":
        whole = builder.m // width * width
        out = [builder.cols(width, variant.param("items"), 0, whole)]
        return tuple(out if whole == builder.m else [*out, builder.cols(1, 1, whole, builder.m)])
    if variant.name == "item":
        return (builder.item(width, variant.param("rows")),)
    return (builder.group(width, variant.param("items"), variant.param("rows")),)


_Shapes = tuple[tuple[int, ...], ...]


def _is_matrix(name: str, rank: int) -> bool:
    return name not in _ALONG_K and rank == 2


class _Builder:
    """Builds the launches of one row operation: defines for the body, the same accesses for the nest.

    Args:
        entry: kernel function.
        op: what it touches.
        defines: the operation's constants.
        shapes: of the operands that have names.
    """

    def __init__(
        self, entry: str, op: RowOp, defines: tuple[tuple[str, str | int | float], ...], shapes: _Shapes
    ) -> None:
        self.entry, self.op, self.defines = entry, op, defines
        self.nowhere = int(dict(defines).get("IGNORE", -1))
        self.position = {name: i for i, name in enumerate(op.names) if name}
        self.rank = {name: len(shape) for name, shape in zip(self.position, shapes, strict=True)}
        names = zip(self.position, shapes, strict=True)
        self.m, self.k = next(shape for name, shape in names if _is_matrix(name, len(shape)))

    def _keeps(self, rows_at_once: int) -> bool:
        """Whether a fat work item keeps its rows in private memory between passes (two buffers at most)."""
        return len(self.op.passes) > 1 and 8 * self.k * rows_at_once <= _KEPT_BYTES

    def _passes(self, keeps: bool) -> Iterator[tuple[tuple[str, ...], int]]:
        return zip(self.op.kept if keeps else self.op.passes, self.op.flops, strict=True)

    def _launch(self, grid: list[Loop], phases: list[Phase], local: int, groups: int, **sizes: int) -> Launch:
        operands = tuple(self.position.items())
        constants = (("M", self.m), ("K", self.k), *sizes.items(), (f"OP_{self.entry}", 1), *self.defines)
        nest = Nest(tuple(grid), tuple(phases))
        math = math_c(sizes["W"])
        return Launch("rows.cl", self.entry, operands, nest, (groups * local,), (local,), constants, math)

    def _access(self, name: str, row: Index, column: Index, width: int, axis: int) -> Access:
        """One operand of a pass: a matrix at [row, column], or a vector along k at [column]."""
        position = self.position[name.rstrip("=")]
        if name in _ALONG_K:
            return Access(position, (column,), width if axis == 1 else 1, 0, when=(Bound(row, self.m),))
        when = (Bound(self._target(row), ANY_CLASS),) if name in self.op.counted else ()
        return Access(position, (row, column), width, axis, name.endswith("="), when=when)

    def _target(self, row: Index) -> Data:
        return Data(self.position["TARGET"], (row,), self.nowhere)

    def _row_phase(
        self, names: tuple[str, ...], row: Index, width: int, write: bool, when: tuple[Bound, ...], beyond: bool
    ) -> Iterator[Phase]:
        """Values of the row; ``beyond``: items beyond the last row read that one's."""
        live = (*when, *([] if beyond else [Bound(row, self.m)]))
        accesses = []
        for name in names:
            position = self.position[name]
            if self.rank[name] == 0:
                accesses.append(Access(position, (), write=write, when=live))
            else:
                clamps = (Clamp(0, self.m - 1),) if beyond else ()
                accesses.append(Access(position, (row,), width, 0, write, clamps=clamps, when=when))
        if accesses:
            yield Phase((), tuple(accesses))

    def _row(
        self, row: Index, lanes: int, passes: Iterator[Phase], leader: tuple[Bound, ...] = (), beyond: bool = False
    ) -> Iterator[Phase]:
        """A row's passes and what is read and written once; ``leader``: by which of its items alone."""
        yield from self._row_phase(self.op.row_in, row, lanes, False, (), beyond)
        yield from passes
        if self.op.at_target:
            target = self._target(row)
            scalars = [*leader, Bound(row, self.m), Bound(target, ANY_CLASS)]
            accesses = [
                Access(self.position[n.rstrip("=")], (row, target), write=n.endswith("="), when=leader)
                if self.rank[n.rstrip("=")]
                else Access(self.position[n], (), when=tuple(scalars))
                for n in self.op.at_target
            ]
            yield Phase((), tuple(accesses))
        yield from self._row_phase(self.op.row_out, row, lanes, True, leader, False)

    def item(self, width: int, rows: int) -> Launch:
        """One work item for ``rows`` rows, vectors along k."""
        groups = -(-self.m // rows)
        keeps = self._keeps(1)
        phases: list[Phase] = []
        vectors, tail = (self.k // width, self.k % width) if width > 1 else (self.k, 0)

        def passes(row: Index) -> Iterator[Phase]:
            for names, flops in self._passes(keeps):
                column = Index(0, (Term("j", width),))
                body = tuple(self._access(n, row, column, width, 1) for n in names)
                yield Phase((Loop("j", vectors),), body, flops * width)
                if tail:
                    rest = Index(self.k - tail, (Term("j"),))
                    yield Phase((Loop("j", tail),), tuple(self._access(n, row, rest, 1, 1) for n in names), flops)

        for q in range(rows):
            row = Index(q, (Term("g", rows),))
            phases += self._row(row, 1, passes(row))
        grid = [Loop("g", groups, "group")]
        sizes = {"ORIENT": _ITEM, "W": width, "ROWS": rows, "ITEMS": 1, "KEEP": int(keeps)}
        return self._launch(grid, phases, 1, groups, **sizes)

    def cols(self, width: int, items: int, first: int, last: int) -> Launch:
        """One work item for ``width`` neighbouring rows, from row ``first`` to ``last``."""
        groups = -(-(last - first) // (width * items))
        row = Index(first, (Term("g", width * items), Term("t", width)))
        column = Index(0, (Term("j"),))
        keeps = items == 1 and self._keeps(width)
        passes = (
            Phase((Loop("j", self.k),), tuple(self._access(n, row, column, width, 0) for n in names), flops * width)
            for names, flops in self._passes(keeps)
        )
        grid = [Loop("g", groups, "group"), Loop("t", items, "item")]
        phases = list(self._row(row, width, passes))
        sizes = {"ORIENT": _COLS, "W": width, "FIRST": first, "LAST": last, "ITEMS": items, "KEEP": int(keeps)}
        return self._launch(grid, phases, items, groups, **sizes)

    def group(self, width: int, lanes: int, rows: int) -> Launch:
        """``rows`` rows a work group, ``lanes`` work items a row (a power of two)."""
        groups = -(-self.m // rows)
        row = Index(0, (Term("g", rows), Term("r")))
        column = Index(0, (Term("t", width), Term("j", width * lanes)))
        steps, tail = -(-self.k // (width * lanes)), self.k % width
        keeps = len(self.op.passes) > 1 and steps <= _MOST_VECTORS
        shown = self.op.kept if keeps else self.op.once or self.op.passes
        # Vectors lie within the row; of what they leave over each of a few items does one value.
        within = Bound(column, self.k - width + 1)
        item, rest = Index(0, (Term("t"),)), Index(self.k - tail, (Term("t"),))

        def one(name: str, place: Index, size: int, bound: Bound) -> Access:
            access = self._access(name, row, place, size, 1)
            return replace(access, when=(*access.when, bound), depth=-1 if place is column else 0)

        passes = (
            Phase(
                (Loop("j", steps),),
                tuple(
                    one(n, column, width, within) if width > 1 else self._access(n, row, column, 1, 1) for n in names
                ),
                flops * width,
                tuple(one(n, rest, 1, Bound(item, tail)) for n in names) if tail else (),
            )
            for names, flops in zip(shown, self.op.flops, strict=True)
        )
        grid = [Loop("g", groups, "group"), Loop("r", rows, "item"), Loop("t", lanes, "item")]
        phases = list(self._row(row, 1, passes, (Bound(item, 1),), beyond=True))
        sizes = {"ORIENT": _GROUP, "W": width, "ROWS": rows, "L": lanes, "KEEP": int(keeps), "NV": steps}
        return self._launch(grid, phases, rows * lanes, groups, **sizes)


ROWS = Rows()
