"""Embedding look-ups and their gradient.

``gather`` copies rows of a table. ``scatter_add`` zeroes the gradient and then adds rows into it, deterministically and
without atomics, in one of two ways: ``columns``, where a work item owns some columns and walks all rows in order; and
``owner``, where the first row with an id owns that table row and adds the later rows with the same id (each work item
then looks through all ids, which are few next to the data). Ids must lie within the table: the host checks them.
"""

from __future__ import annotations

from kernels.families.common import any_image
from kernels.families.concat import fill_launch
from kernels.families.pointwise import chunk_elems
from kernels.nest import Access, Data, Index, Loop, Nest, Phase, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout

__all__ = ["INDEXING", "Indexing"]

_GROUP_ITEMS = 128


class Indexing:
    """See the module docstring."""

    name = "indexing"
    kinds: tuple[str, ...] = ("gather", "scatter_add")

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Widths, and for scatter_add both ways of owning."""
        rows, d = spec.shapes[1][0], spec.shapes[0][1]
        gpu = limits.kind == "gpu"
        widths = (4, 1) if gpu else [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
        out = []
        for v in widths:
            lanes = 1
            while gpu and lanes < min(-(-d // v), _GROUP_ITEMS):
                lanes *= 2
            at_once = _GROUP_ITEMS // lanes if gpu else 1
            each = 1 if gpu else max(min(rows // (limits.compute_units * 4), 16), 1)
            params = (("lanes", lanes), ("rl", at_once), ("rows", each), ("v", v))
            if spec.kind == "gather":
                out.append(KernelVariant(self.name, "gather", params))
                continue
            chunk = chunk_elems(spec.shapes[2][0] * d, limits)
            out.append(KernelVariant(self.name, "owner", (("chunk", 0 if gpu else chunk), *params)))
            vectors = 1 if gpu else -(-d // (v * limits.compute_units * 4))
            columns = (("block", v * vectors), ("chunk", 0 if gpu else chunk), ("lanes", 32 if gpu else 1), ("v", v))
            out.append(KernelVariant(self.name, "columns", columns))
        return out

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where no matrix is contiguous along the row."""
        width, d = variant.param("v"), spec.shapes[0][1]
        matrices = (layouts[0], layouts[2])
        if any_image(layouts) or d < width:
            return None
        if width > 1 and not any(x.vectorizes(1, width) for x in matrices):
            return None
        if spec.kind == "gather":
            return Kernel(spec, variant, layouts, (self._gather(variant, spec),))
        chunk = variant.param("chunk")
        fill = KernelVariant(self.name, "fat" if chunk else "thin", (("chunk", chunk), ("v", 16 if chunk else 4)))
        zero = fill_launch(fill, layouts[2], "GRAD", 2, spec.dtypes[2])
        add = self._owner(variant, spec) if variant.name == "owner" else self._columns(variant, spec)
        return Kernel(spec, variant, layouts, (zero, add))

    def _grid(self, variant: KernelVariant, n: int) -> tuple[tuple[Loop, ...], list[Index], int]:
        """Grid, the row of each of the item's turns, and the number of groups."""
        lanes, at_once, each = (variant.param(p) for p in ("lanes", "rl", "rows"))
        groups = -(-n // (each * at_once))
        grid = (Loop("g", groups, "group"), Loop("r", at_once, "item"), Loop("t", lanes, "item"))
        rows = [Index(q * at_once, (Term("g", each * at_once), Term("r"))) for q in range(each)]
        return grid, rows, groups

    def _row(self, variant: KernelVariant, d: int, read: int, source: Index | Data, write: int, target: Index | Data):
        """Phases that copy a row: vectors, then what is left over."""
        width, lanes = variant.param("v"), variant.param("lanes")
        vectors, tail = d // width, d % width if width > 1 else 0
        steps = -(-vectors // lanes)
        column = Index(0, (Term("t", width), Term("j", width * lanes)))
        copy = (Access(read, (source, column), width, 1), Access(write, (target, column), width, 1, True))
        yield Phase((Loop("j", steps),), copy)
        if tail and lanes == 1:  # with several lanes the last vector is clipped at the row's end
            rest = Index(d - tail, (Term("j"),))
            yield Phase((Loop("j", tail),), (Access(read, (source, rest)), Access(write, (target, rest), write=True)))

    def _launch(self, entry: str, names: tuple[str, ...], nest: Nest, items: int, **defines: int) -> Launch:
        operands = tuple((name, i) for i, name in enumerate(names))
        constants = (*defines.items(), (f"OP_{entry}", 1))
        return Launch("indexing.cl", entry, operands, nest, (nest.groups * items,), (items,), constants)

    def _sizes(self, variant: KernelVariant, n: int, d: int) -> dict[str, int]:
        names = {"lanes": "LANES", "rl": "RL", "rows": "ROWS", "v": "W"}
        return {c: variant.param(p) for p, c in names.items()} | {"N": n, "D": d}

    def _gather(self, variant: KernelVariant, spec: OpSpec) -> Launch:
        (n,), d = spec.shapes[1], spec.shapes[0][1]
        grid, rows, _ = self._grid(variant, n)
        phases = []
        for row in rows:
            phases.append(Phase((), (Access(1, (row,)),)))
            phases += self._row(variant, d, 0, Data(1, (row,)), 2, row)
        items = variant.param("rl") * variant.param("lanes")
        sizes = self._sizes(variant, n, d)
        return self._launch("gather", ("TABLE", "IDS", "Y"), Nest(grid, tuple(phases)), items, **sizes)

    def _owner(self, variant: KernelVariant, spec: OpSpec) -> Launch:
        (n,), d = spec.shapes[1], spec.shapes[0][1]
        grid, rows, _ = self._grid(variant, n)
        phases = []
        for row in rows:
            # As if no id came twice: whose rows are added to whose depends on the data. The sum so far is read at a
            # row that does not exist: the load is declared, and does not happen.
            phases.append(Phase((Loop("p", n),), (Access(1, (Index(0, (Term("p"),)),)),), 1))
            phases.append(Phase((), (Access(2, (Index(spec.shapes[2][0]), Index()), variant.param("v"), 1),)))
            phases += self._row(variant, d, 0, row, 2, Data(1, (row,)))
        items = variant.param("rl") * variant.param("lanes")
        sizes = self._sizes(variant, n, d) | {"PADDING": int(spec.attr("padding_idx", -1))}
        return self._launch("owner", ("DY", "IDS", "GRAD"), Nest(grid, tuple(phases)), items, **sizes)

    def _columns(self, variant: KernelVariant, spec: OpSpec) -> Launch:
        (n,), d = spec.shapes[1], spec.shapes[0][1]
        width, block, lanes = (variant.param(p) for p in ("v", "block", "lanes"))
        groups = -(-d // (block * lanes))
        row, ids = Index(0, (Term("i"),)), Data(1, (Index(0, (Term("i"),)),))
        column = Index(0, (Term("g", block * lanes), Term("t", block), Term("j", width)))
        accesses = (
            Access(1, (row,), depth=1),
            Access(2, (ids, column), width, 1),
            Access(0, (row, column), width, 1),
            Access(2, (ids, column), width, 1, True),
        )
        loops = (Loop("i", n), Loop("j", -(-block // width)))
        nest = Nest((Loop("g", groups, "group"), Loop("t", lanes, "item")), (Phase(loops, accesses, width),))
        sizes = {"W": width, "BLOCK": block, "LANES": lanes, "N": n, "D": d}
        padding = int(spec.attr("padding_idx", -1))
        return self._launch("columns", ("DY", "IDS", "GRAD"), nest, lanes, **sizes, PADDING=padding, RL=1)


INDEXING = Indexing()
