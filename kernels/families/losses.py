"""Losses over classes and their gradients.

The rows are done by ``cl/rows.cl`` (log-sum-exp and each row's loss into scratch; the gradients whole), the mean over
rows by one work group of ``cl/losses.cl``. Few rows of many classes may be cut into parts (``losses_split``). Targets
must be classes or ``ignore_index``: the host checks them.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.families.common import any_image
from kernels.families.losses_split import parts_wanted, split_entropy, split_gradient
from kernels.families.rows import ANY_CLASS, RowOp, row_launches, row_variants
from kernels.nest import Access, Bound, Data, Index, Loop, Nest, Phase, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["LOSSES", "Losses"]

_MEAN_ITEMS = 128
_OPS = {
    "cross_entropy": RowOp(
        ("X", "TARGET", "", "LSE", "", "EACH"),
        (("X",), ("X",)),
        (("X",), ()),
        (1, 12),
        (("X",), ()),
        row_in=("TARGET",),
        row_out=("LSE", "EACH"),
        at_target=("X",),
    ),
    "cross_entropy_grad": RowOp(
        ("DLOSS", "X", "TARGET", "LSE", "WEIGHT", "DX"),
        (("X", "DX="),),
        (("X", "DX="),),
        (12,),
        row_in=("TARGET", "LSE", "DLOSS", "WEIGHT"),
        at_target=("DX", "DX="),
        counted=("X",),
    ),
    "nll_loss_grad": RowOp(
        ("DLOSS", "TARGET", "WEIGHT", "DX"),
        (("DX=",),),
        (("DX=",),),
        (0,),
        row_in=("TARGET",),
        at_target=("DLOSS", "WEIGHT", "DX="),
    ),
}


class Losses:
    """See the module docstring."""

    name = "losses"
    kinds: tuple[str, ...] = ("nll_loss", *_OPS)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Row variants along the classes; for nll_loss the items of its one work group."""
        mean_items = _MEAN_ITEMS if limits.kind == "gpu" else 1
        if spec.kind == "nll_loss":
            return [KernelVariant(self.name, "mean", (("mean_items", mean_items),))]
        rows, classes = next(s for s in spec.shapes if len(s) == 2)
        out = row_variants(self.name, rows, classes, limits, cols=False)
        if spec.kind == "nll_loss_grad":
            return out
        parts = parts_wanted(rows, classes, limits)
        if parts > 1:
            out += [replace(v, params=(*v.params, ("split", parts))) for v in out]
        if spec.kind != "cross_entropy":
            return out
        return [replace(v, params=(("mean_items", mean_items), *v.params)) for v in out]

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where the classes are not contiguous for the variant's vector."""
        if any_image(layouts):
            return None
        if spec.kind == "nll_loss":
            operands = (("LOGP", 0), ("TARGET", 1), ("LOSS", 2), ("WEIGHT", 3))
            return Kernel(spec, variant, layouts, (_mean_launch(variant, spec, operands),))
        kernel = Kernel(spec, variant, layouts, ())
        if spec.kind == "cross_entropy":
            kernel = replace(kernel, scratch=(Scratch("float32", Layout.row_major((spec.shapes[0][0],))),))
        ignore, parts = int(spec.attr("ignore_index", -100)), dict(variant.params).get("split", 1)
        if parts > 1:
            made = (split_entropy if spec.kind == "cross_entropy" else split_gradient)(kernel, parts, ignore)
        else:
            launches = row_launches(kernel, spec.kind, _OPS[spec.kind], (("IGNORE", ignore),))
            made = None if launches is None else replace(kernel, launches=launches)
        if made is None or spec.kind != "cross_entropy":
            return made
        operands = (("EACH", 5), ("TARGET", 1), ("LOSS", 2), ("WEIGHT", 4))
        return replace(made, launches=(*made.launches, _mean_launch(variant, spec, operands)))


def _mean_launch(variant: KernelVariant, spec: OpSpec, operands: tuple[tuple[str, int], ...]) -> Launch:
    items = variant.param("mean_items")
    (n,) = spec.shapes[1]
    (what, source), (_, target), (_, loss), (_, weight) = operands
    row, first = Index(0, (Term("t"), Term("i", items))), (Bound(Index(0, (Term("t"),)), 1),)
    place = Data(target, (row,), int(spec.attr("ignore_index", -100)))
    each: tuple[Index | Data, ...] = (row, place) if what == "LOGP" else (row,)
    phases = (
        Phase(
            (Loop("i", -(-n // items)),),
            (Access(target, (row,)), Access(source, each, when=(Bound(place, ANY_CLASS),))),
            2,
        ),
        Phase((), (Access(loss, (), write=True, when=first), Access(weight, (), write=True, when=first))),
    )
    nest = Nest((Loop("g", 1, "group"), Loop("t", items, "item")), phases)
    defines: tuple[tuple[str, int], ...] = (("N", n), ("L", items), ("IGNORE", int(spec.attr("ignore_index", -100))))
    if what == "LOGP":
        defines = (*defines, ("OP_nll", 1))
    return Launch("losses.cl", "mean_loss", operands, nest, (items,), (items,), defines)


LOSSES = Losses()
