"""Which kernels hardware counters were read of, each built anew from an op, a size, a layout and a variant's label.

A :class:`Counted` is small enough to be a row of a record, and says everything that its kernel depends on: the same
:class:`~kernels.spec.Kernel` is built on the device that counts and, without one, where it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks import memory_bound
from benchmarks.gemm import KINDS, Case, layouts_of
from kernels.bind import relayout_spec
from kernels.pack import STORAGE_DTYPES
from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.variants import family_of
from layoutopt.errors import LayoutOptError
from layoutopt.graph import Expr
from layoutopt.layout import Layout

__all__ = ["CASES", "HELD_OUT", "SMOKE", "Counted", "ids", "places"]

Shape = tuple[int, ...]
ALIGN_BYTES = 512


def _tiles(rows: int, columns: int) -> Callable[[Shape], Layout]:
    return lambda shape: Layout.r_tile(shape, rows, columns) if len(shape) > 1 else Layout.row_major(shape)


def _by_columns(shape: Shape) -> Layout:
    rank = len(shape)
    order = (*range(rank - 2), rank - 1, rank - 2) if rank > 1 else tuple(range(rank))
    return Layout.row_major(shape, order)


LAYOUTS: dict[str, Callable[[Shape], Layout]] = {
    "row-major": Layout.row_major,
    "by columns": _by_columns,
    "R-Tile 4x4": _tiles(4, 4),
    "R-Tile 8x8": _tiles(8, 8),
    "R-Tile 8x16": _tiles(8, 16),
    "R-Tile 16x16": _tiles(16, 16),
    "R-Tile 32x4": _tiles(32, 4),
    "tokens": Layout.row_major,
}
"""Of every operand that has two axes or more. ``tokens`` is attention's: heads side by side in each token's row."""


@dataclass(frozen=True)
class Counted:
    """One kernel.

    Attributes:
        op: Y, dX or dW of a matrix product, ``relayout``, ``gather``, ``attention``, ``attention_grad``, or one of
            ``memory_bound``'s.
        size: m, k, n of a product; rows and columns; heads, rows, keys and features of attention.
        layout: a key of ``LAYOUTS``; of a relayout the one it makes, of row-major data.
        variant: label of the kernel's variant.
    """

    op: str
    size: Shape
    layout: str
    variant: str

    @property
    def group(self) -> tuple[str, Shape, str]:
        """What differs from others by its layout alone; ways to the same result count as one kernel but in products."""
        return self.op, self.size, self.variant if self.op in KINDS else ""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.op} {'x'.join(map(str, self.size))} {self.layout} {self.variant}"

    def spec_and_layouts(self) -> tuple[OpSpec, tuple[Layout, ...]]:
        """What is computed, over operands stored how."""
        make = LAYOUTS[self.layout]
        if self.op in KINDS:
            m, k, n = self.size
            shapes = (1, m, k), (1, k, n), (1, m, n)
            spec = OpSpec("contraction", shapes, ("float32",) * 3, 2)
            return spec, layouts_of(Case(self.op, (1, m, k, n), KINDS[self.op]), make)
        if self.op == "relayout":
            return relayout_spec(self.size, "float32"), (Layout.row_major(self.size), make(self.size))
        if self.op == "gather":
            n, d, rows = self.size
            spec = OpSpec("gather", ((rows, d), (n,), (n, d)), ("float32", "int32", "float32"), 2)
            return spec, tuple(make(shape) for shape in spec.shapes)
        if self.op in ("attention", "attention_grad"):
            return self._attention()
        case = next(c for c in self._memory_bound() if c.op == self.op)
        return case.spec, case.layouts(make)

    def _memory_bound(self) -> Iterator[memory_bound.Case]:
        rows, columns = self.size[:2]
        yield from memory_bound.row_cases(rows, columns)
        yield memory_bound.bias_case(rows, columns)
        yield from memory_bound.class_cases(rows, columns)
        if len(self.size) == 3:
            yield memory_bound.table_case(rows, self.size[2], columns)

    def _attention(self) -> tuple[OpSpec, tuple[Layout, ...]]:
        b, m, n, d = self.size
        query, key, row = (b, m, d), (b, n, d), (b, m)
        shapes = (query, key, key, query, row, row)
        inputs = 3
        if self.op == "attention_grad":
            shapes, inputs = (*shapes, query, query, key, key), 7
        attrs = (("alpha", d**-0.5), ("score", Expr((), (("x", 0),))))

        def stored(shape: Shape) -> Layout:
            if len(shape) < 3 or self.layout != "tokens":
                return LAYOUTS[self.layout](shape)
            return Layout.row_major((shape[1], shape[0], shape[2])).permute((1, 0, 2))

        spec = OpSpec(self.op, shapes, ("float32",) * len(shapes), inputs, attrs)
        return spec, tuple(stored(shape) for shape in shapes)

    def kernel(self, limits: DeviceLimits) -> Kernel:
        """The kernel, specialised.

        Args:
            limits: of the device that counted.

        Raises:
            LayoutOptError: no such variant exists, or it takes no such layouts.
        """
        spec, layouts = self.spec_and_layouts()
        family = family_of(spec.kind)
        for variant in family.variants(spec, limits):
            if variant.label == self.variant:
                kernel = family.build(variant, spec, layouts)
                if kernel is not None:
                    return kernel
        raise LayoutOptError(f"no kernel {self.label}: the record is of another version, count anew")


def ids(kernel: Kernel, position: int) -> np.ndarray:
    """Values of an integer operand: uniform over the rows or classes that it chooses from."""
    spec = kernel.spec
    last = {"gather": 0, "scatter_add": 2, "cross_entropy": 0, "cross_entropy_grad": 1}[spec.kind]
    axis = 1 if spec.kind.startswith("cross") else 0
    return np.random.default_rng(position).integers(0, spec.shapes[last][axis], spec.shapes[position]).astype(np.int32)


def places(kernel: Kernel) -> tuple[tuple[int, ...], int]:
    """Byte offsets of operands and scratch buffers in one allocation, one behind the other, and its size."""
    alias = {kernel.spec.inputs + out: inp for out, inp in kernel.spec.inplace}
    at, end = [], 0
    for position in range(len(kernel.layouts) + len(kernel.scratch)):
        if position in alias:
            at.append(at[alias[position]])
            continue
        at.append(end)
        size = kernel.buffer_layout(position).size_elems * STORAGE_DTYPES[kernel.operand_dtype(position)].itemsize
        end += -(-max(size, 1) // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(at), end


# ---- which ----------------------------------------------------------------------------------------------------------

ROW, TURNED, T4, T8, T16, T32 = "row-major", "by columns", "R-Tile 4x4", "R-Tile 8x8", "R-Tile 16x16", "R-Tile 32x4"
T816 = "R-Tile 8x16"
_WIDE = "contraction.outer.n(mr=8,nv=2,v=4,t=1,s=1,x=4,gr=8,gc=16)"
_SLIM = "contraction.outer.n(mr=4,nv=1,v=4,t=1,s=1,x=4,gr=8,gc=16)"
_WIDE_M = "contraction.outer.m(mr=8,nv=2,v=4,t=1,s=1,x=4,gr=8,gc=16)"
_SLIM_M = "contraction.outer.m(mr=4,nv=1,v=4,t=1,s=1,x=4,gr=8,gc=16)"
_DOT = "contraction.dot(mr=4,nr=4,v=4,t=1,s=1,gr=8,gc=16)"
_ANY = "contraction.any(mr=4,nr=4,gr=8,gc=16)"
_BIG = "contraction.staged(bm=128,bn=128,bk=8,tm=8,tn=8,slices=1,q=1)"
_SPLIT = "contraction.staged(bm=128,bn=128,bk=8,tm=8,tn=8,slices=1,q=4)"
_MIDDLE = "contraction.staged(bm=64,bn=64,bk=16,tm=8,tn=4,slices=1,q=2)"
_SMALL = "contraction.staged(bm=32,bn=32,bk=32,tm=4,tn=4,slices=1,q=1)"

_PRODUCTS: tuple[tuple[str, tuple[int, ...], str, tuple[str, ...]], ...] = (
    ("Y", (512, 1024, 2048), _WIDE, (ROW, T4, T8, T16, T32)),
    ("Y", (4096,), _WIDE, (ROW, T4, T32)),
    ("Y", (1024, 2048), _SLIM, (ROW, T4, T8, T32)),
    ("dX", (512, 1024, 2048), _DOT, (ROW, T4, T8, T32)),
    ("dW", (1024, 2048), _WIDE_M, (ROW, T4, T8, T32)),
    ("dW", (1024, 2048), _SLIM, (ROW, T4, T8, T32)),
    ("dW", (512,), _SLIM_M, (ROW, T4, T8, T32)),
    ("Y", (1024,), _WIDE_M, (TURNED,)),
    ("dW", (1024,), _DOT, (TURNED,)),
    ("Y", (512, 1024), _ANY, (ROW, TURNED, T4, T32)),
    ("dX", (512,), _ANY, (ROW, TURNED, T4, T32)),
    ("Y", (1024, 2048, 4096), _BIG, (ROW, TURNED, T4, T32)),
    ("dX", (2048, 4096), _BIG, (ROW, TURNED, T4, T32)),
    ("dW", (2048, 4096), _BIG, (ROW, TURNED, T4, T32)),
    ("dX", (1024,), _SPLIT, (ROW, TURNED, T4, T32)),
    ("Y", (1024,), _MIDDLE, (ROW, TURNED, T4, T8, T32)),
    ("Y", (512,), _SMALL, (ROW, TURNED, T4, T8, T32)),
    ("dX", (512,), _SMALL, (ROW, TURNED, T4, T8, T32)),
)
_THIN = "pointwise.thin(lead=0,v=4)"
_ALL = (ROW, TURNED, T4, T816, T32)
_TILED = (ROW, T4, T816, T32)
_ATTENTION = "attention", "attention_grad"
_ROWS = "layer_norm", "layer_norm_grad", "softmax", "softmax_grad"
_OTHERS: tuple[tuple[tuple[str, ...], Shape, str, tuple[str, ...]], ...] = (
    (
        ("layer_norm", "layer_norm_grad", "softmax", "softmax_grad"),
        (8192, 1024),
        "rows.group(items=64,rows=2,v=4)",
        _TILED,
    ),
    (
        ("layer_norm", "layer_norm_grad", "softmax", "softmax_grad"),
        (8192, 1024),
        "rows.group(items=256,rows=1,v=1)",
        (TURNED,),
    ),
    (("layer_norm", "softmax"), (8192, 1024), "rows.cols(items=64,v=1)", (TURNED,)),
    (
        ("layer_norm", "layer_norm_grad", "softmax", "softmax_grad"),
        (1000, 384),
        "rows.group(items=128,rows=1,v=1)",
        _ALL,
    ),
    (("layer_norm", "softmax_grad"), (8192, 4096), "rows.group(items=256,rows=1,v=4)", (ROW, T4, T32)),
    (("layer_norm_affine", "bias_grad"), (8192, 1024), "reduce.group(items=128,rows=1,split=1,v=1)", _ALL),
    (("bias_grad",), (8192, 1024), "reduce.block(lanes=8,rows=64,split=1,v=4)", _TILED),
    (("layer_norm_affine", "bias_grad"), (1000, 384), "reduce.group(items=128,rows=1,split=1,v=1)", _ALL),
    (("gelu", "gelu_grad", "residual", "adamw"), (8192, 1024), _THIN, (ROW, T32)),
    (("gelu", "residual"), (8192, 4096), _THIN, (ROW,)),
    (("gelu",), (1000, 384), "pointwise.thin(lead=0,v=1)", _ALL),
    (("relayout",), (4096, 4096), _THIN, (ROW, TURNED, T4, T816, T32)),
    (("relayout",), (1000, 384), _THIN, (ROW, TURNED, T4, T816, T32)),
    (("cross_entropy_grad",), (1024, 30522), "losses.group(items=256,rows=1,v=4)", _TILED),
    (("cross_entropy_grad",), (256, 5000), "losses.group(items=256,rows=1,v=1)", _ALL),
    (("cross_entropy",), (256, 5000), "losses.group(mean_items=128,items=256,rows=1,v=1)", _ALL),
    (("scatter_add",), (1024, 384, 30522), "indexing.rows(block=32,lanes=32,rl=4,v=4)", _TILED),
    (("gather",), (4096, 768, 30522), "indexing.gather(lanes=32,rl=4,rows=1,v=1)", _ALL),
    (
        ("attention", "attention_grad"),
        (96, 128, 128, 32),
        "attention.tile(bo=32,bx=64,to=4,tx=4,chunk=0)",
        ("tokens", ROW, T4, T32),
    ),
    (("attention",), (24, 197, 197, 64), "attention.tile(bo=64,bx=32,to=8,tx=4,chunk=0)", ("tokens", ROW, T4)),
    (("attention_grad",), (24, 197, 197, 64), "attention.tile(bo=32,bx=32,to=4,tx=4,chunk=0)", ("tokens", ROW, T4)),
)
_LATER: tuple[tuple[tuple[str, ...], Shape, str, tuple[str, ...]], ...] = (
    (("Y",), (768, 768, 768), _WIDE, (ROW, T4, T16, T32)),
    (("Y",), (1024, 384, 1536), _SLIM, (ROW, T4, T16, T32)),
    (("dX",), (768, 768, 768), _DOT, (ROW, T4, T16, T32)),
    (("dW",), (1000, 600, 800), _SLIM_M, (ROW, T4, T16, T32)),
    (("Y",), (1024, 384, 1536), _BIG, (ROW, TURNED, T4, T32)),
    (("dX",), (768, 768, 768), _SMALL, (ROW, TURNED, T16, T32)),
    (("dW",), (1000, 600, 800), "contraction.staged(bm=64,bn=64,bk=16,tm=8,tn=4,slices=1,q=1)", (ROW, TURNED, T4, T32)),
    (("layer_norm", "layer_norm_affine"), (4096, 768), "", _TILED),
    (("softmax", "layer_norm_grad"), (2000, 1500), "rows.group(items=256,rows=1,v=1)", _ALL),
    (("softmax_grad",), (12288, 128), "rows.group(items=32,rows=4,v=1)", _ALL),
    (("bias_grad",), (6000, 500), "reduce.block(lanes=32,rows=16,split=1,v=1)", _TILED),
    (("gelu_grad", "adamw"), (3000, 1000), "pointwise.thin(lead=0,v=1)", (ROW, T16)),
    (("relayout",), (3000, 2000), "pointwise.thin(lead=0,v=1)", (ROW, TURNED, T4, T16, T32)),
    (("cross_entropy",), (512, 20000), "losses.group(mean_items=128,items=256,rows=1,v=4)", _TILED),
    (("cross_entropy_grad",), (512, 20000), "losses.group(items=256,rows=1,v=4)", _TILED),
    (("gather",), (2048, 1024, 8000), "indexing.gather(lanes=32,rl=4,rows=1,v=4)", _TILED),
    (("scatter_add",), (2048, 512, 5000), "indexing.rows(block=8,lanes=32,rl=4,v=4)", _TILED),
    (("attention",), (32, 256, 256, 64), "attention.tile(bo=64,bx=32,to=4,tx=4,chunk=0)", ("tokens", ROW, T4)),
    (("attention_grad",), (48, 200, 200, 32), "attention.tile(bo=64,bx=32,to=4,tx=4,chunk=0)", ("tokens", ROW, T4)),
)
_LATER_VARIANTS = {
    "layer_norm": "rows.group(items=128,rows=1,v=4)",
    "layer_norm_affine": "reduce.block(lanes=8,rows=64,split=1,v=4)",
}

CASES: tuple[Counted, ...] = (
    *(Counted(op, (n, n, n), x, label) for op, sizes, label, those in _PRODUCTS for n, x in product(sizes, those)),
    *(Counted(op, size, x, label) for ops, size, label, those in _OTHERS for op, x in product(ops, those)),
)
HELD_OUT: tuple[Counted, ...] = tuple(
    Counted(op, size, x, label or _LATER_VARIANTS[op])
    for ops, size, label, those in _LATER
    for op, x in product(ops, those)
)
"""Counted when the device model's caches had been written down from ``CASES``: to judge it by."""
SMOKE = (
    Counted("Y", (64, 64, 64), ROW, _SLIM),
    Counted("softmax", (1000, 384), T4, "rows.group(items=128,rows=1,v=1)"),
    Counted("gather", (40, 32, 30), ROW, "indexing.gather(lanes=32,rl=4,rows=1,v=1)"),
)
