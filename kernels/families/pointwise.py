"""Pointwise programs, fused or not: activations, residuals, masks, optimizer updates, and relayouts.

A relayout is the identity program between two layouts of one shape. Variants differ in whose storage order the domain
is walked in (``lead`` 0: the first output, so that stores are contiguous; 1: the largest input that lies otherwise, so
that loads are), in vector width, and in who walks it: ``fat`` items of about ``chunk`` elements for CPUs, ``thin``
items of one vector for GPUs. ``tile`` transposes square tiles in registers between two layouts that are contiguous
along different axes. ``linear`` walks storage itself, padding included, where all full operands lie alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from kernels.expr_c import expr_flops, expr_function, used_inputs
from kernels.families.common import any_image, simplify
from kernels.families.domain import Walk, fat_walk, thin_walk, walk_launch
from kernels.spec import CTYPES, DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import Layout, Mode

__all__ = ["POINTWISE", "Pointwise", "chunk_elems"]

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
            return out + [
                KernelVariant(self.name, "thin", (("lead", lead), ("v", v))) for lead in leads for v in (4, 1)
            ]
        widths = [w for w in (limits.simd_width, 4) if w in (2, 4, 8, 16)]
        widths = [*dict.fromkeys(widths), 1]
        out = [KernelVariant(self.name, "linear_fat", (("chunk", chunk), ("v", widths[0])))]
        for lead in leads:
            out += [KernelVariant(self.name, "fat", (("chunk", chunk), ("lead", lead), ("v", v))) for v in widths]
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
            lead = _lead(spec, expanded, variant.param("lead"))
            views = simplify(expanded, lead) if lead >= 0 else None
        if views is None:
            return None
        width = variant.param("v")
        if variant.name.endswith("fat"):
            walk = fat_walk(views[lead], width, variant.param("chunk"))
        else:
            walk = thin_walk(views[lead], width)
        if walk is None:
            return None
        return Kernel(spec, variant, layouts, (pointwise_launch(spec, walk),), views=views)


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


def _order(layout: Layout) -> list[tuple[int, int]]:
    """The digits of a layout by falling stride: equal lists walk the domain alike."""
    return [(m.axis, m.extent) for m in sorted(layout.modes, key=lambda m: -m.stride)]


def pointwise_launch(spec: OpSpec, walk: Walk) -> Launch:
    """The launch that runs a spec's program over a walk; operand i is called ``X{i}`` or ``Y{i}``."""
    expr = spec.expr
    used = used_inputs(expr)
    outputs = range(spec.inputs, len(spec.shapes))
    operands = [(f"X{i}", i) for i in used] + [(f"Y{i - spec.inputs}", i) for i in outputs]
    accesses = [a for i in used for a in walk.accesses(i, False)]
    accesses += [a for i in outputs for a in walk.accesses(i, True)]
    in_types, out_types = spec.dtypes[: spec.inputs], spec.dtypes[spec.inputs :]
    widths = sorted({walk.width, 1}, reverse=True)
    functions = "\n".join(expr_function(f"expr_{w}", expr, in_types, out_types, w) for w in widths)
    names = [name for name, _ in operands]

    def step(width: int, coords: list[str]) -> str:
        return _step(width, coords, names, spec)

    return walk_launch(walk, operands, accesses, expr_flops(expr), step, functions)


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
        store = f"{name}_STORE{width}(r{position},{at})" if width > 1 else f"{name}_AT({at}) = r{position}"
        after.append(f"{store};")
    return f"{' '.join(before)} expr_{width}({', '.join(args)}); {' '.join(after)}"


POINTWISE = Pointwise()
