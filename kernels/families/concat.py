"""Concatenation along the middle axis, with zeros in the gaps; and iota.

One launch per part and per gap: each is a walk over that part of the output, in its storage order.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from kernels.families.common import any_image
from kernels.families.domain import Walk, fat_walk, thin_walk, walk_launch
from kernels.families.pointwise import chunk_elems
from kernels.memory_c import CTYPES
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout

__all__ = ["CONCAT", "IOTA", "Concat", "Iota", "fill_launch", "walk_variants", "widest_walk"]


def walk_variants(family: str, total: int, limits: DeviceLimits) -> list[KernelVariant]:
    """``fat`` or ``thin`` walks over ``total`` elements in the widths that the device's kind suggests."""
    if limits.kind == "gpu":
        return [KernelVariant(family, "thin", (("v", v),)) for v in (4, 1)]
    widths = [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
    return [KernelVariant(family, "fat", (("chunk", chunk_elems(total, limits)), ("v", v))) for v in widths]


def widest_walk(variant: KernelVariant, lead: Layout, exact: int = -1, start: int = 0) -> Walk:
    """A walk over a layout in the variant's width, or in the widest smaller one that the layout has runs for.

    Args:
        variant: ``fat`` or ``thin``, with its width.
        lead: the domain, in storage order.
        exact: see ``fat_walk``.
        start: where the domain begins along the axis ``exact``: a multiple of the width of vectors along it.
    """
    width = variant.param("v")
    while True:
        if variant.name == "fat":
            walk = fat_walk(lead, width, variant.param("chunk"), exact)
        else:
            walk = thin_walk(lead, width, exact)
        if walk is not None and (walk.axis != exact or start % width == 0):
            return walk
        width //= 2


@lru_cache(maxsize=1 << 12)
def fill_launch(
    variant: KernelVariant, lead: Layout, name: str, position: int, dtype: str, start: int | None = None
) -> Launch:
    """Zeros over the domain of ``lead`` in operand ``position``: all of it, or from ``start`` on its second axis."""
    walk = widest_walk(variant, lead) if start is None else widest_walk(variant, lead, 1, start)
    shift = [(start or 0) if axis == 1 else 0 for axis in range(lead.rank)]

    def step(width: int, coords: list[str]) -> str:
        at = ",".join(f"{c}+{s}" if s else c for c, s in zip(coords, shift, strict=True))
        if width == 1:
            return f"{name}_STORE1(({CTYPES[dtype]})0,{at});"
        return f"{name}_STORE{width}(({CTYPES[dtype]}{width})(0),{at});"

    return walk_launch(walk, [(name, position)], walk.nest(walk.accesses(position, True, shift)), step)


class Concat:
    """See the module docstring."""

    name = "concat"
    kinds: tuple[str, ...] = ("concat",)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Walks in several widths."""
        return walk_variants(self.name, prod(spec.shapes[-1]), limits)

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where no part has runs of the variant's width."""
        if any_image(layouts):
            return None
        output, width = spec.inputs, variant.param("v")
        launches, widths = [], []
        covered = 0
        parts = sorted(zip(spec.attr("starts"), range(spec.inputs), strict=True))
        for start, position in [*parts, (spec.shapes[output][1], -1)]:
            if start > covered:
                lead = self._lead(layouts[output], covered, start)
                launches.append(fill_launch(variant, lead, "Y", output, spec.dtypes[output], covered))
            if position < 0:
                break
            covered = start + spec.shapes[position][1]
            lead = self._lead(layouts[output], start, covered)
            launch, used = _copy(variant, lead, position, output, start)
            launches.append(launch)
            widths.append(used)
        if width > 1 and width not in widths:
            return None
        return Kernel(spec, variant, layouts, tuple(launches))

    def _lead(self, output: Layout, start: int, stop: int) -> Layout:
        """Where a part of the output lies; row-major stands in where the cut falls inside a tile."""
        outer, _, inner = output.shape
        part = output.slice(1, start, stop)
        if part is None or part.padded(1) != part.shape[1]:
            return Layout.row_major((outer, stop - start, inner))
        return part


@lru_cache(maxsize=1 << 12)
def _copy(variant: KernelVariant, lead: Layout, position: int, output: int, start: int) -> tuple[Launch, int]:
    """Operand ``position`` into the output from ``start`` on, walked as that part of the output lies; its width."""
    walk = widest_walk(variant, lead, 1, start)

    def step(width: int, coords: list[str]) -> str:
        source = ",".join(coords)
        target = f"{coords[0]},{coords[1]}+{start},{coords[2]}"
        if width == 1:
            return f"Y_STORE1(X_AT({source}),{target});"
        return f"Y_STORE{width}(X_LOAD{width}({source}),{target});"

    nest = walk.nest([*walk.accesses(position, False), *walk.accesses(output, True, [0, start, 0])])
    return walk_launch(walk, [("X", position), ("Y", output)], nest, step), walk.width


class Iota:
    """``y[i] = start + step * i``."""

    name = "iota"
    kinds: tuple[str, ...] = ("iota",)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """One, by scalars: it is short and runs once a step."""
        return [v for v in walk_variants(self.name, prod(spec.shapes[0]), limits) if v.param("v") == 1]

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None for images."""
        if any_image(layouts):
            return None
        walk = widest_walk(variant, layouts[0])
        first, stride = spec.attr("start", 0), spec.attr("step", 1)
        literal = str if spec.dtypes[0] == "int32" else (lambda x: f"{float(x)!r}f")

        def step(width: int, coords: list[str]) -> str:
            return f"Y_STORE1({literal(first)} + {literal(stride)} * {coords[0]},{coords[0]});"

        launch = walk_launch(walk, [("Y", 0)], walk.nest(walk.accesses(0, True), 2), step)
        return Kernel(spec, variant, layouts, (launch,))


CONCAT = Concat()
IOTA = Iota()
