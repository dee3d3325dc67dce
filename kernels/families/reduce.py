"""Reductions of one axis of a matrix: sums, means, maxima, and the affine gradients of layer norm.

On CPUs ``across`` (vectors along the axis that stays, ``nv`` of them a work item) and ``along`` (vectors along the axis
that goes). On GPUs ``block`` (``lanes`` vectors along the axis that stays, ``rows`` of the other at once: whole lines
are read, and many at a time) and ``group`` (``rows`` results, each over ``items`` work items along the axis that goes).
Any of them may cut the reduced axis into ``split`` chunks, which a second launch joins; everything is joined in a fixed
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.families.common import any_image
from kernels.nest import Access, Bound, Index, Loop, Nest, Phase, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["REDUCE", "Reduce"]

_GROUP_ITEMS = 128
_BLOCK_ITEMS = 256
_FINAL_ITEMS = 64
_LINE_BYTES = 128
_WAVE_ITEMS = 32
_MIN_CHUNK = 16
_ROWS_EACH = 4
"""Rows that an item of ``block`` should add up at least, or its launch is not worth more items."""
_FINAL_BLOCK = 64


@dataclass(frozen=True)
class _Op:
    """Argument names; which axis of the matrices stays; matrices and vectors over the reduced axis."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kept_axis: int
    matrices: tuple[str, ...]
    along_red: tuple[str, ...] = ()
    flops: int = 1


_OPS = {
    "reduce": _Op("reduce", ("X",), ("Y",), 0, ("X",)),
    "layer_norm_affine": _Op(
        "affine", ("DY", "X", "MEAN", "RSTD"), ("DG", "DB"), 1, ("DY", "X"), ("MEAN", "RSTD"), flops=5
    ),
}
_ELEM = {"float32": "float", "float16": "float", "int32": "int"}


class Reduce:
    """See the module docstring."""

    name = "reduce"
    kinds: tuple[str, ...] = tuple(_OPS)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Orientations and widths, each whole and, where that leaves compute units idle, split."""
        op = _OPS[spec.kind]
        kept, red = _extents(op, spec.shapes[0])
        if limits.kind == "gpu":
            return list(dict.fromkeys(self._gpu_variants(kept, red, limits)))
        widths = [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
        shapes = [("across", {"items": 1, "nv": nv, "v": v}) for v in widths if v > 1 for nv in (4, 1)]
        shapes += [("along", {"rows": 4 if kept >= 64 else 1, "v": v}) for v in widths]
        out = []
        for name, params in shapes:
            each = params["v"] * params["nv"] if name == "across" else params["rows"]
            split = _split(limits.compute_units * 4, -(-kept // each), red // _MIN_CHUNK)
            out += [self._variant(name, **params, split=s) for s in dict.fromkeys((1, split))]
        return out

    def _variant(self, name: str, **params: int) -> KernelVariant:
        return KernelVariant(self.name, name, tuple(sorted(params.items())))

    def _gpu_variants(self, kept: int, red: int, limits: DeviceLimits) -> Iterator[KernelVariant]:
        for v in (4, 1):
            vectors = -(-kept // v)
            # A line of memory across and many rows at once: few groups, one launch. A wave across: many groups.
            for most, items, cut in (
                (_LINE_BYTES // (4 * v), 2 * _BLOCK_ITEMS, False),
                (_WAVE_ITEMS, _BLOCK_ITEMS, True),
            ):
                lanes = _power(min(most, vectors))
                rows = _power(min(min(items, limits.max_work_group_size) // lanes, max(red // _ROWS_EACH, 1)), up=False)
                split = _split(limits.compute_units * 4, -(-vectors // lanes), red // (rows * _ROWS_EACH))
                yield self._variant("block", lanes=lanes, rows=rows, split=split if cut else 1, v=v)
        for v in (4, 1):
            items = max(_power(min(-(-red // (2 * v)), _GROUP_ITEMS)), 8)
            rows = _GROUP_ITEMS // items
            split = _split(limits.compute_units * 8, -(-kept // rows), red // (items * v * _ROWS_EACH))
            for s in dict.fromkeys((1, split)):
                yield self._variant("group", items=items, rows=rows, split=s, v=v)

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where no matrix has vectors, or at least quarters of 16, along the axis, or the dtype has no kernel."""
        op = _OPS[spec.kind]
        names = dict(zip((*op.inputs, *op.outputs), range(len(layouts)), strict=True))
        kept, red = _extents(op, spec.shapes[0])
        width = variant.param("v")
        by_kept = variant.name in ("across", "block")
        axis = op.kept_axis if by_kept else 1 - op.kept_axis
        room = kept if by_kept else red
        contiguous = any(layouts[names[m]].vectorizes(axis, min(max(width, 2), 4)) for m in op.matrices)
        scalar_fallback = width == 1 and variant.name in ("along", "group")
        if any_image(layouts) or spec.dtypes[0] not in _ELEM or room < width or not (contiguous or scalar_fallback):
            return None
        launches, scratch = _launches(variant, spec)
        return Kernel(spec, variant, layouts, launches, scratch)


def _split(wanted: int, groups: int, most: int) -> int:
    """Chunks of the reduced axis, so that there are ``wanted`` groups; at most ``most``."""
    return max(min(-(-wanted // groups), most), 1)


def _power(n: int, up: bool = True) -> int:
    """The power of two at or next to ``n``."""
    return 1 << ((n - 1).bit_length() if up else n.bit_length() - 1)


def _extents(op: _Op, shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[op.kept_axis], shape[1 - op.kept_axis]


@lru_cache(maxsize=1 << 12)
def _launches(variant: KernelVariant, spec: OpSpec) -> tuple[tuple[Launch, ...], tuple[Scratch, ...]]:
    """Launches and workspaces, the same over all layouts that a variant accepts."""
    return _Builder(variant, spec, _OPS[spec.kind]).launches()


class _Builder:
    def __init__(self, variant: KernelVariant, spec: OpSpec, op: _Op) -> None:
        self.variant, self.spec, self.op = variant, spec, op
        self.kept, self.red = _extents(op, spec.shapes[0])
        self.split = variant.param("split")
        self.chunk = -(-self.red // self.split)
        if self.split > 1:
            # Vectors along the reduced axis start at multiples of their width in every chunk, rows at once at theirs.
            unit = variant.param("rows" if variant.name == "block" else "v")
            self.chunk = -(-self.chunk // unit) * unit
            self.split = -(-self.red // self.chunk)
        self.names = {name: i for i, name in enumerate((*op.inputs, *op.outputs))}
        self.partials: tuple[str, ...] = ("P", "Q")[: len(op.outputs)] if self.split > 1 else ()
        for i, name in enumerate(self.partials):
            self.names[name] = len(spec.shapes) + i

    def launches(self) -> tuple[tuple[Launch, ...], tuple[Scratch, ...]]:
        """The main launch and one to join the chunks; what they pass on to each other."""
        dtype = "int32" if self.spec.dtypes[0] == "int32" else "float32"
        scratch = tuple(Scratch(dtype, Layout.row_major((self.split, self.kept))) for _ in self.partials)
        launches = [getattr(self, f"_{self.variant.name}")()]
        if self.partials:
            launches.append(self._final())
        return tuple(launches), scratch

    def _constants(self) -> dict[str, str | int | float]:
        fn = self.spec.attr("fn", "sum")
        elem = _ELEM[self.spec.dtypes[0]]
        scale: str | float = 1.0 / self.red if fn == "mean" else ("1" if elem == "int" else 1.0)
        start = "0" if fn != "max" else ("INT_MIN" if elem == "int" else "-INFINITY")
        out: dict[str, str | int | float] = {
            "ELEM": elem,
            "START": start,
            "SCALE": scale,
            "KEPT": self.kept,
            "RED": self.red,
            "SPLIT": self.split,
            "CHUNK": self.chunk,
            f"OP_{self.op.op}": 1,
        }
        if fn == "max":
            out["MAXIMUM"] = 1
        return out

    def _launch(self, name: str, grid: list[Loop], phases: list[Phase], items: int, **sizes: int) -> Launch:
        nest = Nest(tuple(grid), tuple(phases))
        operands = [n for n in self.names if n not in self.op.outputs] if self.split > 1 else list(self.names)
        pairs = tuple((n, self.names[n]) for n in operands)
        defines = {**self._constants(), **sizes, f"ENTRY_{name}": 1, "W": self.variant.param("v")}
        size = ((nest.groups * items,), (items,))
        return Launch("reduce.cl", f"reduce_{name}", pairs, nest, *size, tuple(defines.items()))

    def _matrix(self, name: str, kept: Index, red: Index, width: int, along_kept: bool) -> Access:
        index = (kept, red) if self.op.kept_axis == 0 else (red, kept)
        axis = self.op.kept_axis if along_kept else 1 - self.op.kept_axis
        return Access(self.names[name], index, width, axis)

    def _results(self, kept: Index, width: int) -> list[Access]:
        if self.split > 1:
            s = Index(0, (Term("s"),))
            return [Access(self.names[p], (s, kept), width, 1, True) for p in self.partials]
        return [Access(self.names[y], (kept,), width, 0, True) for y in self.op.outputs]

    def _across(self) -> Launch:
        width, nv, items = (self.variant.param(p) for p in ("v", "nv", "items"))
        block = width * nv
        groups = -(-self.kept // (block * items))
        red = Index(0, (Term("s", self.chunk), Term("r")))
        begin = Index(0, (Term("g", block * items), Term("t", block)))
        # The item that passes the end does vectors, then values, one after the other.
        rest = self.kept % block
        loads, border = self._along_red(red, begin, block, rest // width + rest % width)
        for n in range(nv):
            loads += [self._matrix(m, begin + n * width, red, width, True) for m in self.op.matrices]
        stores = [a for n in range(nv) for a in self._results(begin + n * width, width)]
        grid = [Loop("s", self.split, "group"), Loop("g", groups, "group"), Loop("t", items, "item")]
        body = Phase((Loop("r", self.chunk),), tuple(loads), self.op.flops * block, border)
        phases = [body, Phase((), tuple(stores))]
        return self._launch("across", grid, phases, items, ITEMS=items, NV=nv, GROUPS=groups)

    def _along_red(self, red: Index, begin: Index, block: int, times: int) -> tuple[list[Access], tuple[Access, ...]]:
        """Loads of the vectors over the reduced axis: by items that do a whole block, and how often by the one that
        does what is left.
        """
        whole = (Bound(begin, self.kept - block + 1),)
        left = Bound(begin, self.kept), Bound(-begin, block - self.kept)
        loads = [Access(self.names[n], (red,), when=whole) for n in self.op.along_red]
        return loads, tuple(Access(self.names[n], (red,), when=left) for n in self.op.along_red) * times

    def _along(self) -> Launch:
        width, rows = self.variant.param("v"), self.variant.param("rows")
        groups = -(-self.kept // rows)
        vectors, tail = self.chunk // width, self.red % width if width > 1 else 0
        phases = []
        for q in range(rows):
            kept = Index(q, (Term("g", rows),))
            red = Index(0, (Term("s", self.chunk), Term("r", width)))
            phases.append(Phase((Loop("r", vectors),), self._step(kept, red, width), self.op.flops * width))
            if tail and self.split == 1:
                rest = Index(self.red - tail, (Term("r"),))
                phases.append(Phase((Loop("r", tail),), self._step(kept, rest, 1), self.op.flops))
            phases.append(Phase((), tuple(self._results(kept, 1))))
        grid = [Loop("s", self.split, "group"), Loop("g", groups, "group")]
        return self._launch("along", grid, phases, 1, ROWS=rows, GROUPS=groups)

    def _step(self, kept: Index, red: Index, width: int, when: tuple[Bound, ...] = ()) -> tuple[Access, ...]:
        live = *when, Bound(kept, self.kept)
        vectors = [Access(self.names[n], (red,), width, when=live) for n in self.op.along_red]
        if when:
            matrices = (replace(self._matrix(m, kept, red, width, False), when=when) for m in self.op.matrices)
            return (*matrices, *vectors)
        return (*(self._matrix(m, kept, red, width, False) for m in self.op.matrices), *vectors)

    def _block(self) -> Launch:
        width, lanes, rows = (self.variant.param(p) for p in ("v", "lanes", "rows"))
        groups = -(-self.kept // (width * lanes))
        red = Index(0, (Term("s", self.chunk), Term("y"), Term("r", rows)))
        kept = Index(0, (Term("g", width * lanes), Term("t", width)))
        loads, border = self._along_red(red, kept, width, self.kept % width)
        loads += [self._matrix(m, kept, red, width, True) for m in self.op.matrices]
        # One row of items has the results: those of the others are beyond the last.
        stores = self._results(kept + Index(0, (Term("y", groups * lanes * width),)), width)
        grid = [
            *(Loop("s", self.split, "group"), Loop("g", groups, "group")),
            *(Loop("y", rows, "item"), Loop("t", lanes, "item")),
        ]
        body = Phase((Loop("r", -(-self.chunk // rows)),), tuple(loads), self.op.flops * width, border)
        phases = [body, Phase((), tuple(stores))]
        return self._launch("block", grid, phases, rows * lanes, LANES=lanes, ROWS=rows, GROUPS=groups)

    def _group(self) -> Launch:
        width, items, rows = (self.variant.param(p) for p in ("v", "items", "rows"))
        groups = -(-self.kept // rows)
        kept = Index(0, (Term("g", rows), Term("y")))
        red = Index(0, (Term("s", self.chunk), Term("t", width), Term("r", width * items)))
        steps = -(-self.chunk // (width * items))
        grid = [
            *(Loop("s", self.split, "group"), Loop("g", groups, "group")),
            *(Loop("y", rows, "item"), Loop("t", items, "item")),
        ]
        whole = (Bound(red, self.red - width + 1),) if width > 1 else ()
        loads, border = self._step(kept, red, width, whole), self._left(kept, width)
        phases = [
            Phase((Loop("r", steps),), loads, self.op.flops * width, border),
            Phase((), tuple(self._results(kept + Index(0, (Term("t", groups * rows),)), 1))),
        ]
        return self._launch("group", grid, phases, rows * items, L=items, ROWS=rows, GROUPS=groups)

    def _left(self, kept: Index, width: int) -> tuple[Access, ...]:
        """What vectors leave over at the end of the reduced axis: one value for each of a few items."""
        tail = self.red % width
        if not tail:
            return ()
        chunks = (Bound(Index(0, (Term("s", -1),)), 2 - self.split),) if self.split > 1 else ()
        steps = self._step(
            kept, Index(self.red - tail, (Term("t"),)), 1, (*chunks, Bound(Index(0, (Term("t"),)), tail))
        )
        return tuple(replace(a, depth=0) for a in steps)

    def _final(self) -> Launch:
        items, block = (_FINAL_ITEMS, 1) if self.variant.name in ("block", "group") else (1, _FINAL_BLOCK)
        groups = -(-self.kept // (items * block))
        kept = Index(0, (Term("g", items * block), Term("t", block), Term("q")))
        accesses = (
            *(Access(self.names[p], (Index(0, (Term("s"),)), kept)) for p in self.partials),
            *(Access(self.names[y], (kept,), write=True, depth=1) for y in self.op.outputs),
        )
        grid = (Loop("g", groups, "group"), Loop("t", items, "item"))
        nest = Nest(grid, (Phase((Loop("q", block), Loop("s", self.split)), accesses, len(self.partials)),))
        defines = {**self._constants(), "W": 1, "ITEMS": items, "BLOCK": block, "ENTRY_final": 1}
        operands = tuple((name, self.names[name]) for name in (*self.partials, *self.op.outputs))
        size = ((groups * items,), (items,))
        return Launch("reduce.cl", "reduce_final", operands, nest, *size, tuple(defines.items()))


REDUCE = Reduce()
