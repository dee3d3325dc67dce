"""Cross-entropy over many classes and few rows: rows are cut into parts, so that every compute unit has some.

A part of a row is a row of its own, by a view of the logits: ``rows.cl`` does all parts as it does rows, what the cut
leaves over as one part more, and a small launch of ``losses.cl`` puts each row together (the gradient: at its target).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.families.common import math_c
from kernels.families.rows import ANY_CLASS, RowOp, row_launches
from kernels.nest import Access, Bound, Data, Index, Loop, Nest, Phase, Term, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, Scratch
from layoutopt.layout import Layout

__all__ = ["parts_wanted", "split_entropy", "split_gradient"]

_MIN_PART = 512
_ALIGN = 64
_ITEMS = 64

_PART = RowOp(
    ("X", "", "", "", "", "", "TOP", "MASS"),
    (("X",), ("X",)),
    (("X",), ()),
    (1, 12),
    (("X",), ()),
    row_out=("TOP", "MASS"),
)
_GRADIENT = RowOp(
    ("DLOSS", "X", "TARGET", "LSE", "WEIGHT", "DX"),
    (("X", "DX="),),
    (("X", "DX="),),
    (12,),
    row_in=("TARGET", "LSE", "DLOSS", "WEIGHT"),
    counted=("X",),
)


def parts_wanted(rows: int, classes: int, limits: DeviceLimits) -> int:
    """Parts of a row, or 1 where whole rows keep the device busy or are short."""
    wanted = -(-limits.compute_units * (8 if limits.kind == "gpu" else 4) // rows)
    return max(1, min(wanted, classes // _MIN_PART))


@dataclass(frozen=True)
class _Cut:
    """``whole`` parts of ``size`` classes and perhaps a shorter one."""

    rows: int
    classes: int
    size: int

    @staticmethod
    def of(rows: int, classes: int, parts: int) -> _Cut:
        size = -(-classes // parts)
        return _Cut(rows, classes, min(-(-size // _ALIGN) * _ALIGN, classes))

    @property
    def whole(self) -> int:
        return self.classes // self.size

    @property
    def parts(self) -> int:
        return -(-self.classes // self.size)

    def matrix(self, layout: Layout) -> tuple[Layout | None, Layout | None]:
        """[rows, classes] as [rows·whole, size] and the rest."""
        done = self.whole * self.size
        head = layout.slice(1, 0, done)
        rest = layout.slice(1, done, self.classes) if done < self.classes else None
        return head and head.reshape((self.rows * self.whole, self.size)), rest

    def vector(self, layout: Layout) -> tuple[Layout | None, Layout | None]:
        """[rows] as [rows·whole], each value as often as its row has parts, and as it is."""
        wide = layout.reshape((self.rows, 1))
        spread = wide and wide.expand((self.rows, self.whole)).reshape((self.rows * self.whole,))
        return spread, layout

    def partial(self, layout: Layout) -> tuple[Layout | None, Layout | None]:
        """[rows, parts] as [rows·whole] and the last column."""
        head = layout.slice(1, 0, self.whole)
        rest = layout.slice(1, self.whole, self.parts) if self.whole < self.parts else None
        return head and head.reshape((self.rows * self.whole,)), rest and rest.reshape((self.rows,))


def split_entropy(kernel: Kernel, parts: int, ignore: int) -> Kernel | None:
    """The kernel with the launches that find each row's log-sum-exp and loss; its scratch holds each row's loss."""
    rows, classes = kernel.spec.shapes[0]
    cut = _Cut.of(rows, classes, parts)
    table = Scratch("float32", Layout.row_major((rows, cut.parts)))
    kernel = replace(kernel, scratch=(*kernel.scratch, table, table))
    seen = {0: cut.matrix(kernel.layouts[0]), 6: cut.partial(table.layout), 7: cut.partial(table.layout)}
    launches = _by_parts(kernel, "lse_part", _PART, cut, seen, ())
    if launches is None:
        return None
    row, part = _row(kernel), var("p")
    at = (row, part)
    phases = (
        Phase((Loop("p", cut.parts),), (Access(6, at),), 1),
        Phase((Loop("p", cut.parts),), (Access(7, at), Access(6, at)), 12),
        Phase(
            (),
            (
                Access(1, (row,)),
                Access(0, (row, Data(1, (row,), ignore))),
                *(Access(p, (row,), write=True) for p in (3, 5)),
            ),
        ),
    )
    names = (("X", 0), ("TARGET", 1), ("LSE", 3), ("EACH", 5), ("TOP", 6), ("MASS", 7))
    defines: dict[str, str | int | float] = {"OP_join": 1, "PARTS": cut.parts, "IGNORE": ignore}
    return replace(kernel, launches=(*launches, _by_rows(kernel, "join_parts", names, phases, defines)))


def split_gradient(kernel: Kernel, parts: int, ignore: int) -> Kernel | None:
    """The kernel of cross_entropy_grad by parts, targets last."""
    rows, classes = kernel.spec.shapes[1]
    cut = _Cut.of(rows, classes, parts)
    seen = {p: cut.matrix(kernel.layouts[p]) for p in (1, 5)} | {p: cut.vector(kernel.layouts[p]) for p in (2, 3)}
    defines = (("IGNORE", ignore), ("PART", 1))
    launches = _by_parts(kernel, "cross_entropy_grad", _GRADIENT, cut, seen, defines)
    if launches is None:
        return None
    row = _row(kernel)
    target = Data(2, (row,), ignore)
    counted = Bound(row, rows), Bound(target, ANY_CLASS)
    reads = (Access(2, (row,)), Access(0, (), when=counted), Access(4, (), when=counted), Access(5, (row, target)))
    phases = (Phase((), (*reads, Access(5, (row, target), write=True)), 2),)
    names = (("DLOSS", 0), ("TARGET", 2), ("WEIGHT", 4), ("DX", 5))
    last = _by_rows(kernel, "at_targets", names, phases, {"OP_target": 1, "IGNORE": ignore})
    return replace(kernel, launches=(*launches, last))


def _by_parts(
    kernel: Kernel,
    entry: str,
    op: RowOp,
    cut: _Cut,
    seen: dict[int, tuple[Layout | None, Layout | None]],
    defines: tuple[tuple[str, str | int | float], ...],
) -> tuple[Launch, ...] | None:
    """Launches over the whole parts and over the rest, which index what ``seen`` says by views."""
    out: list[Launch] = []
    for side in (0, 1) if cut.whole < cut.parts else (0,):
        views = {p: pair[side] for p, pair in seen.items()}
        if any(view is None for view in views.values()):
            return None
        width = cut.size if side == 0 else cut.classes - cut.whole * cut.size
        part = replace(_under(kernel, views), variant=_narrow(kernel.variant, width))
        launches = row_launches(part, entry, op, defines)
        if launches is None:
            return None
        out += [replace(x, views=tuple((p, v) for p, v in views.items() if v is not None)) for x in launches]
    return tuple(out)


def _under(kernel: Kernel, views: dict[int, Layout | None]) -> Kernel:
    """The kernel with its operands and workspaces as the views see them."""
    n = len(kernel.layouts)
    seen = tuple(views.get(p) or layout for p, layout in enumerate(kernel.layouts))
    scratch = tuple(replace(s, layout=views.get(n + i) or s.layout) for i, s in enumerate(kernel.scratch))
    return replace(kernel, views=seen, scratch=scratch)


def _narrow(variant: KernelVariant, width: int) -> KernelVariant:
    """Without vectors where a part is shorter than one."""
    params = dict(variant.params)
    return replace(variant, params=tuple({**params, "v": 1}.items())) if width < params["v"] else variant


def _items(kernel: Kernel) -> int:
    return _ITEMS if kernel.variant.name == "group" else 1


def _row(kernel: Kernel) -> Index:
    return Index(0, (Term("g", _items(kernel)), Term("t")))


def _by_rows(
    kernel: Kernel,
    entry: str,
    names: tuple[tuple[str, int], ...],
    phases: tuple[Phase, ...],
    defines: dict[str, str | int | float],
) -> Launch:
    """One work item a row."""
    (rows,), items = kernel.spec.shapes[3], _items(kernel)
    groups = -(-rows // items)
    nest = Nest((Loop("g", groups, "group"), Loop("t", items, "item")), phases)
    constants = tuple({**defines, "N": rows, "L": items}.items())
    return Launch("losses.cl", entry, names, nest, (groups * items,), (items,), constants, math_c(1))
