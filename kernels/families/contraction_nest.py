"""How the contraction kernels cut their output into work items, and the nests that say what each item touches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kernels.families.contraction_epilogue import Finish
from kernels.nest import Access, Bound, Clamp, Index, Loop, Nest, Phase, Term, at, var

__all__ = ["Tiling", "any_nest", "dot_nest", "outer_nest", "tile_ends"]


@dataclass(frozen=True)
class Tiling:
    """Register tiles of ``mr``×``nr``, ``t``×``s`` of them a work item, ``gr``×``gc`` items a work group.

    With one item a group (a CPU) rows vary fastest, so that consecutive groups share a panel of Y; else columns do, so
    that neighbouring lanes touch neighbouring memory.
    """

    shape: tuple[int, ...]
    mr: int
    nr: int
    t: int
    s: int
    gr: int
    gc: int

    @property
    def groups(self) -> tuple[int, int]:
        """Work groups (down, across)."""
        _, rows, cols = self.shape
        return -(-rows // (self.mr * self.t * self.gr)), -(-cols // (self.nr * self.s * self.gc))

    @property
    def fat(self) -> bool:
        """Whether a group is one item."""
        return self.gr * self.gc == 1

    @property
    def global_size(self) -> tuple[int, ...]:
        """The NDRange, fastest dimension first."""
        rows, cols = self.groups[0] * self.gr, self.groups[1] * self.gc
        return (rows, cols, self.shape[0]) if self.fat else (cols, rows, self.shape[0])

    @property
    def local_size(self) -> tuple[int, ...]:
        """The work group."""
        return (1, 1, 1) if self.fat else (self.gc, self.gr, 1)

    def defines(self) -> dict[str, str | int | float]:
        """Constants that the bodies need."""
        return {
            "MR": self.mr,
            "RT": self.t,
            "CT": self.s,
            "RN": self.shape[1],
            "CN": self.shape[2],
            "R_DIM": 0 if self.fat else 1,
            "C_DIM": 1 if self.fat else 0,
            "XI": "X_IDX",
            "YI": "Y_IDX",
            "ZI": "Z_IDX",
        }

    def grid(self) -> tuple[Loop, ...]:
        """The grid's loops, in dispatch order."""
        down, across = self.groups
        batch, rows, cols = Loop("b", self.shape[0], "group"), Loop("r", down, "group"), Loop("c", across, "group")
        if self.fat:
            return batch, cols, rows
        return batch, rows, cols, Loop("ri", self.gr, "item"), Loop("ci", self.gc, "item")

    def walk(self) -> tuple[Loop, ...]:
        """The item's loops over its register tiles."""
        loops = (Loop("s", self.s), Loop("t", self.t))
        return tuple(loop for loop in loops if loop.extent > 1)

    def rows(self, step: int = 1) -> list[Index]:
        """Rows of the current register tile, each ``step``-th of them."""
        first = self._position("r", "ri", self.gr, "t", self.t, self.mr)
        return [first + i for i in range(0, self.mr, step)]

    def cols(self, step: int = 1) -> list[Index]:
        """Columns of the current register tile, each ``step``-th of them."""
        first = self._position("c", "ci", self.gc, "s", self.s, self.nr)
        return [first + i for i in range(0, self.nr, step)]

    @property
    def lives(self) -> tuple[Bound, Bound]:
        """Whether the current register tile has any elements."""
        return Bound(self.rows()[0], self.shape[1]), Bound(self.cols()[0], self.shape[2])

    @property
    def interior(self) -> tuple[Bound, Bound]:
        """Whether it lies inside the output with all its elements."""
        (row, rows), (column, columns) = self.lives
        return Bound(row, rows - self.mr + 1), Bound(column, columns - self.nr + 1)

    @property
    def row_clamp(self) -> tuple[Clamp]:
        """Of X: at the border the last row stands for those that do not exist."""
        return (Clamp(1, self.shape[1] - 1),)

    @staticmethod
    def _position(group: str, item: str, items: int, tile: str, tiles: int, size: int) -> Index:
        terms = [Term(group, items * tiles * size)]
        if items > 1:
            terms.append(Term(item, tiles * size))
        if tiles > 1:
            terms.append(Term(tile, size))
        return Index(0, tuple(terms))


_B = var("b")


def tile_ends(tiling: Tiling, finish: Finish, depth: int, whole: tuple[Bound, ...]) -> tuple[Access, ...]:
    """The accesses with which a register tile is finished: value by value unless ``whole``."""
    rows, widths = tiling.rows(), {width for _, width, _ in finish.accesses}
    places = {width: [(_B, r, c) for r in rows for c in tiling.cols(width)] for width in widths}
    return tuple(
        Access(operand, place, width, 2, write, depth, vector_when=whole)
        for operand, width, write in finish.accesses
        for place in places[width]
    )


@lru_cache(maxsize=4096)
def outer_nest(
    tiling: Tiling,
    positions: tuple[int, int],
    k: int,
    x_vector: tuple[int, int, int],
    y_vector: tuple[int, int],
    finish: Finish,
    texels: bool,
) -> Nest:
    """Per step of k: a row of Y in pieces and ``mr`` values of X.

    Args:
        tiling: the cut.
        positions: operands that play X and Y.
        k: extent.
        x_vector: (steps done with vector loads of X, width of those loads, their axis); width 1: all steps are alike.
        y_vector: width of Y's loads; the last column at which one may begin.
        finish: what is done with the sums.
        texels: whether X is read through an image: its vectors are then whole at the border too.
    """
    (x, y), (main, xv, x_axis), (yu, y_last) = positions, x_vector, y_vector
    walk, flops = tiling.walk(), 2 * tiling.mr * tiling.nr
    lives, clamp, y_clamp = tiling.lives, tiling.row_clamp, (Clamp(2, y_last),)
    whole = tiling.interior if x_axis == 1 and not texels else ()
    phases = []
    if xv == 1:
        main = 0
    for start, steps, width in ((0, main // xv, xv), (main, k - main, 1)):
        if not steps:
            continue
        down, along = (width, 1) if x_axis == 1 else (1, width)
        at_k = var("k", width) + start
        ks = [at_k + i for i in range(width)]
        xs = [
            Access(x, (_B, r, i), width, x_axis, clamps=clamp, when=lives, vector_when=whole)
            for r in tiling.rows(down)
            for i in ks[::along]
        ]
        ys = [Access(y, (_B, i, c), yu, 2, clamps=y_clamp, when=lives, past=True) for i in ks for c in tiling.cols(yu)]
        phases.append(Phase((*walk, Loop("k", steps)), tuple(xs + ys if width > 1 else ys + xs), flops * width))
    return _finished(tiling, phases, finish, tiling.interior)


@lru_cache(maxsize=4096)
def dot_nest(
    tiling: Tiling, positions: tuple[int, int], k: int, v: int, pieces: tuple[int, int], columns: int, finish: Finish
) -> Nest:
    """Per vector of k: ``nr`` vectors of Y and ``mr`` of X in ``pieces`` (widths of X and Y); then the rest of k.

    ``columns`` of Y are read at once: at the border the last of them stand for those that do not exist.
    """
    (x, y), (xu, yu) = positions, pieces
    lives, clamp, last = tiling.lives, tiling.row_clamp, (tiling.shape[2] - 1) // columns * columns
    groups = [(c, i) for c in tiling.cols(columns) for i in range(columns)]
    walk, main = tiling.walk(), k // v * v
    phases = []
    for start, steps, step, xw, yw in ((0, k // v, v, xu, yu), (main, k - main, 1, 1, 1)):
        if not steps:
            continue
        at_k = var("k", step) + start
        ks = [at_k + i for i in range(step)]
        ys = [
            Access(y, (_B, i, c + j), yw, 1, clamps=(Clamp(2, last + j),), when=lives, past=True)
            for c, j in groups
            for i in ks[::yw]
        ]
        xs = [Access(x, (_B, r, i), xw, 2, clamps=clamp, when=lives) for r in tiling.rows() for i in ks[::xw]]
        # What is left of k is added row by row, and each reads Y anew.
        again = tuple(ys) * (tiling.mr - 1) if start else ()
        loops = (*walk, Loop("k", steps))
        phases.append(Phase(loops, tuple(ys + xs), 2 * tiling.mr * tiling.nr * step, again))
    by_columns = not finish.own and finish.accesses[0][1] > 1
    return _finished(tiling, phases, finish, tiling.interior[1:] if by_columns else tiling.interior)


@lru_cache(maxsize=4096)
def any_nest(tiling: Tiling, positions: tuple[int, int], k: int, finish: Finish) -> Nest:
    """Scalars throughout."""
    x, y = positions
    lives, clamp = tiling.lives, (Clamp(2, tiling.shape[2] - 1),)
    ys = tuple(at(y, _B, var("k"), c, clamps=clamp, when=lives) for c in tiling.cols())
    xs = tuple(at(x, _B, r, var("k"), clamps=tiling.row_clamp, when=lives) for r in tiling.rows())
    phase = Phase((Loop("k", k),), ys + xs, 2 * tiling.mr * tiling.nr)
    return _finished(tiling, [phase], finish, tiling.interior)


def _finished(tiling: Tiling, phases: list[Phase], finish: Finish, whole: tuple[Bound, ...]) -> Nest:
    """The nest of the sums' phases and of what follows them, in vectors where the tile is ``whole``."""
    walk = tiling.walk()
    ends = tile_ends(tiling, finish, len(walk), whole)
    if finish.own:
        phases.append(Phase(walk, ends, finish.flops * tiling.mr * tiling.nr))
    else:
        last = phases[-1]
        phases[-1] = Phase(last.loops, last.accesses + ends, last.flops, last.border)
    return Nest(tiling.grid(), tuple(phases), len(walk))
