"""Pointwise programs, fused or not: activations, residuals, masks, optimizer updates, and relayouts.

A relayout is the identity program between two layouts of one shape. Variants differ in whose storage order the domain
is walked in (``lead`` 0: the first output, so that stores are contiguous; 1: the largest input that lies otherwise, so
that loads are), in vector width, and in who walks it: ``fat`` items of about ``chunk`` elements for CPUs, ``thin``
items of one vector for GPUs. ``tile`` transposes square tiles in registers between two layouts that are contiguous
along different axes. ``linear`` walks storage itself, padding included, where all full operands lie alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from kernels.expr_c import expr_flops, expr_function, needs_math, used_inputs
from kernels.families.common import any_image, math_c, simplify
from kernels.families.domain import Walk, fat_walk, thin_walk, walk_launch
from kernels.memory_c import CTYPES
from kernels.nest import Access, Bound, Index, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout, Mode

__all__ = ["POINTWISE", "Pointwise", "chunk_elems", "is_relayout"]

_MIN_CHUNK, _MAX_CHUNK = 1024, 16384
_GROUPS_PER_UNIT = 4


def chunk_elems(total: int, limits: DeviceLimits) -> int:
    """Elements a fat work item should walk: enough groups to share out evenly, none too small to be worth starting."""
    wanted = max(total // (limits.compute_units * _GROUPS_PER_UNIT), 1)
    chunk = 1 << (wanted - 1).bit_length()
    return min(max(chunk, _MIN_CHUNK), _MAX_CHUNK)


class Pointwise:
    """See the module docstring."""

    name = "pointwise"
    kinds: tuple[str, ...] = ("pointwise",)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Widths and leads; ``fat`` on CPUs, ``thin`` on GPUs."""
        chunk = chunk_elems(prod(spec.shapes[spec.inputs]), limits)
        leads = (0, 1) if spec.inputs else (0,)
        if limits.kind == "gpu":
            out = [KernelVariant(self.name, "linear_thin", (("v", v),)) for v in (4, 1)]
            out += [KernelVariant(self.name, "thin", (("lead", lead), ("v", v))) for lead in leads for v in (4, 1)]
            return out + ([KernelVariant(self.name, "tile_thin", (("t", 4),))] if is_relayout(spec) else [])
        widths = [*dict.fromkeys([w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)] + [1])]
        out = [KernelVariant(self.name, "linear_fat", (("chunk", chunk), ("v", widths[0])))]
        for lead in leads:
            out += [KernelVariant(self.name, "fat", (("chunk", chunk), ("lead", lead), ("v", v))) for v in widths]
        if is_relayout(spec):
            tiles = [t for t in (16, 8, 4) if t <= limits.simd_width]
            out += [KernelVariant(self.name, "tile_fat", (("chunk", chunk), ("t", t))) for t in tiles]
        return out

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None where the width does not fit, or where another variant is the same kernel."""
        if any_image(layouts):
            return None
        if variant.name.startswith("linear"):
            lead, views = spec.inputs, _linear_views(layouts, spec.inputs)
        else:
            domain = spec.shapes[spec.inputs]
            expanded = [x if x.shape == domain else x.expand(domain) for x in layouts]
            lead = _lead(spec, expanded, dict(variant.params).get("lead", 0))
            views = simplify(expanded, lead) if lead >= 0 else None
        if views is None:
            return None
        if variant.name.startswith("tile"):
            launch = _tile_launch(variant, spec, views)
            return None if launch is None else Kernel(spec, variant, layouts, (launch,), views=views)
        width = variant.param("v")
        if variant.name.endswith("fat"):
            walk = fat_walk(views[lead], width, variant.param("chunk"))
        else:
            walk = thin_walk(views[lead], width)
        if walk is None:
            return None
        return Kernel(spec, variant, layouts, (pointwise_launch(spec, walk),), views=views)


def is_relayout(spec: OpSpec) -> bool:
    """Whether a pointwise op copies one tensor, unchanged, into another layout."""
    expr = spec.expr
    return not expr.code and expr.results == (("x", 0),) and spec.inputs == 1 and len(set(spec.dtypes)) == 1


def _tile_launch(variant: KernelVariant, spec: OpSpec, views: Sequence[Layout]) -> Launch | None:
    """Square tiles from vectors along the source's contiguous axis to vectors along the target's."""
    source, target = views
    size = variant.param("t")
    along = [next((a for a in range(x.rank) if x.run(a) > 1), -1) for x in views]
    p, q = along
    if p < 0 or q < 0 or p == q or min(source.shape[p], source.shape[q]) < size:
        return None

    def fits(t: int) -> bool:
        return source.vectorizes(p, t) and target.vectorizes(q, t)

    if not fits(size) or (size < 16 and fits(2 * size) and min(source.shape[p], source.shape[q]) >= 2 * size):
        return None
    return _tiles(variant, spec, source.shape, p, q)


@lru_cache(maxsize=1 << 12)
def _tiles(variant: KernelVariant, spec: OpSpec, shape: tuple[int, ...], p: int, q: int) -> Launch:
    size, along = variant.param("t"), (p, q)
    blocks = tuple(-(-n // size) if a in along else n for a, n in enumerate(shape))
    order = Layout.row_major(blocks)
    if variant.name == "tile_fat":
        walk = fat_walk(order, 1, max(variant.param("chunk") // size**2, 1))
    else:
        walk = thin_walk(order, 1)
    assert walk is not None  # width 1 always walks
    start = [
        Index(0, tuple(Term(x.loop, x.coef * size, x.div, x.mod) for x in c.terms)) if a in along else c
        for a, c in enumerate(i for i in walk.accesses(0, False)[0].index if isinstance(i, Index))
    ]

    whole = tuple(Bound(start[a], shape[a] - size + 1) for a in along)

    def rows(operand: int, vector: int, other: int, write: bool) -> list[Access]:
        out = []
        for t in range(size):
            index = [c + t if a == other else c for a, c in enumerate(start)]
            out.append(Access(operand, tuple(index), size, vector, write, vector_when=whole))
        return out

    def step(width: int, coords: list[str]) -> str:
        at = [f"({c})*{size}" if a in along else c for a, c in enumerate(coords)]
        return _tile_step(spec, shape, at, p, q, size)

    nest = walk.nest([*rows(0, p, q, False), *rows(1, q, p, True)])
    return walk_launch(walk, [("X0", 0), ("Y0", 1)], nest, step)


def _tile_step(spec: OpSpec, shape: Sequence[int], at: list[str], p: int, q: int, size: int) -> str:
    """C for one tile: whole tiles in registers by perfect shuffles, those that pass an edge element by element."""
    ctype = f"{CTYPES[spec.dtypes[0]]}{size}"
    names = [f"at{a}" for a in range(len(at))]

    def call(macro: str, axis: int, t: int | str, first: str = "") -> str:
        return f"{macro}({first}{','.join(f'{n}+{t}' if a == axis else n for a, n in enumerate(names))})"

    lines = [f"const int {n} = {c};" for n, c in zip(names, at, strict=True)]
    lines.append(f"if (at{p} + {size} <= {shape[p]} && at{q} + {size} <= {shape[q]}) {{")
    rows = [f"a{t}" for t in range(size)]
    lines += [f"const {ctype} {row} = {call(f'X0_LOAD{size}', q, t)};" for t, row in enumerate(rows)]
    stage = 0
    while 1 << stage < size:
        after = [f"s{stage}_{t}" for t in range(size)]
        for t in range(size // 2):
            # Interleaving row t with row t + size/2 moves one bit of the row's number into the column's.
            a, b, low, high = rows[t], rows[t + size // 2], after[2 * t], after[2 * t + 1]
            lines.append(f"{ctype} {low}, {high}; {low}.even = {a}.lo; {low}.odd = {b}.lo;")
            lines.append(f"{high}.even = {a}.hi; {high}.odd = {b}.hi;")
        rows, stage = after, stage + 1
    lines += [call(f"Y0_STORE{size}", p, t, f"{row},") + ";" for t, row in enumerate(rows)]
    inner = ",".join({p: f"at{p}+u", q: f"at{q}+t"}.get(a, n) for a, n in enumerate(names))
    lines.append(f"}} else for (int t = 0; t < {size} && at{q} + t < {shape[q]}; ++t)")
    lines.append(f"for (int u = 0; u < {size} && at{p} + u < {shape[p]}; ++u) Y0_STORE1(X0_AT({inner}),{inner});")
    return " ".join(lines)


def _linear_views(layouts: Sequence[Layout], output: int) -> tuple[Layout, ...] | None:
    """Storage as one axis, padding included; only where there is padding (without, the domain is one axis anyway)."""
    out = layouts[output]
    if not out.is_compact() or out.padded_shape == out.shape:
        return None
    flat = Layout.row_major((out.size_elems,))
    views = []
    for layout in layouts:
        if layout == out:
            views.append(flat)
        elif all(m.stride == 0 for m in layout.modes):
            modes = [Mode(0, out.size_elems, 0)]
            views.append(Layout.build((out.size_elems,), modes, layout.size, layout.base))
        else:
            return None
    return tuple(views)


def _lead(spec: OpSpec, expanded: Sequence[Layout], which: int) -> int:
    """Position of the operand whose order is walked, -1 where there is no such (other) operand."""
    if which == 0:
        return spec.inputs
    order = _order(expanded[spec.inputs])
    for position in used_inputs(spec.expr):
        layout = expanded[position]
        if all(m.stride for m in layout.modes) and _order(layout) != order:
            return position
    return -1


@lru_cache(maxsize=1 << 14)
def _order(layout: Layout) -> list[tuple[int, int]]:
    """The digits of a layout by falling stride: equal lists walk the domain alike."""
    return [(m.axis, m.extent) for m in sorted(layout.modes, key=lambda m: -m.stride)]


@lru_cache(maxsize=1 << 14)
def pointwise_launch(spec: OpSpec, walk: Walk) -> Launch:
    """The launch that runs a spec's program over a walk; operand i is called ``X{i}`` or ``Y{i}``."""
    expr = spec.expr
    used = used_inputs(expr)
    outputs = range(spec.inputs, len(spec.shapes))
    operands = [(f"X{i}", i) for i in used] + [(f"Y{i - spec.inputs}", i) for i in outputs]
    names = [name for name, _ in operands]

    def functions() -> str:
        in_types, out_types = spec.dtypes[: spec.inputs], spec.dtypes[spec.inputs :]
        widths = sorted({walk.width, 1}, reverse=True)
        text = "\n".join(expr_function(f"expr_{w}", expr, in_types, out_types, w) for w in widths)
        return f"{math_c(walk.width)}\n{text}" if needs_math(expr) else text

    def step(width: int, coords: list[str]) -> str:
        return _step(width, coords, names, spec)

    return walk_launch(walk, operands, walk.whole(used, tuple(outputs), expr_flops(expr)), step, functions)


def _step(width: int, coords: list[str], names: Sequence[str], spec: OpSpec) -> str:
    """Load, compute, store at coordinates: all loads come first, so that in-place programs read old values."""
    suffix = "" if width == 1 else str(width)
    at = ",".join(coords)
    args, after, before = [], [], []
    for name in names:
        position = int(name[1:])
        if name[0] == "X":
            args.append(f"{name}_LOAD{width}({at})" if width > 1 else f"{name}_AT({at})")
            continue
        before.append(f"{CTYPES[spec.dtypes[spec.inputs + position]]}{suffix} r{position};")
        args.append(f"&r{position}")
        after.append(f"{name}_STORE{width}(r{position},{at});")
    return f"{' '.join(before)} expr_{width}({', '.join(args)}); {' '.join(after)}"


POINTWISE = Pointwise()
