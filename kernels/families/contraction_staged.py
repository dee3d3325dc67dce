"""Contraction staged through local memory, for GPUs: global loads in a layout's own order, compute in one order.

A work group makes ``bm``×``bn`` of Z from panels of ``bk`` steps of k (see ``cl/contraction_staged.cl``). Each operand
is loaded in vectors of 4 along the axis along which its layout is contiguous, by single elements where there is none,
and laid down k-major; so one variant serves every layout, and layouts differ only in how many lines a panel touches.

Where the output alone would not keep a device busy, k is split: ``q`` groups add up a range each and a second launch
adds their sums, in a fixed order. An epilogue (see ``contraction_epilogue.py``) runs where the sums are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kernels.families.contraction_epilogue import Finish, epilogue_of, plain_finish
from kernels.families.contraction_image import in_texels
from kernels.nest import Access, Index, Loop, Nest, Phase, Term, at, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = [
    "BLOCKS",
    "build_staged",
    "ending_of",
    "item_lanes",
    "panel_accesses",
    "panel_loader",
    "panels_of",
    "shifted",
    "split_ranges",
    "staged_nest",
    "staged_variants",
    "sum_launch",
]

# (bm, bn, bk, tm, tn, slices): the group's block and the item's. Items: slices × bm/tm × bn/tn, lanes in 4 × 8.
BLOCKS = (
    (128, 128, 8, 8, 8, 1),
    (64, 128, 16, 8, 8, 1),
    (128, 64, 16, 8, 8, 1),
    (64, 64, 16, 8, 4, 1),
    (64, 64, 32, 8, 8, 2),
    (32, 64, 32, 4, 4, 2),
    (32, 32, 32, 4, 4, 1),
)
"""Those that won for some shape on a large GPU."""

_ITEMS_PER_UNIT = 364
"""Work items that keep a compute unit busy: k is split until there are as many."""

_LEAST_STEPS = 2
"""Panels that a range of k must have."""

_SUM_GROUP = (32, 4)


def staged_variants(spec: OpSpec, limits: DeviceLimits) -> Iterator[KernelVariant]:
    """Blocks that fit the shape and the device; k in one piece, or split so that every compute unit has work."""
    batch, m, k = spec.shapes[0]
    n = spec.shapes[1][2]
    for bm, bn, bk, tm, tn, slices in BLOCKS:
        items = slices * (bm // tm) * (bn // tn)
        local_bytes = 2 * bk * (bm + bn + 8) * 4
        if items > limits.max_work_group_size or local_bytes > limits.local_mem_bytes:
            continue
        small = min(m, n), max(m, n)
        if (bm > 32 and small[0] <= bm // 2) or (bn > 32 and small[1] <= bn // 2):
            continue
        groups = batch * -(-m // bm) * -(-n // bn)
        splits = {1, split_ranges(groups * items, -(-k // bk), limits.compute_units)}
        for q in sorted(splits):
            params = {"bm": bm, "bn": bn, "bk": bk, "tm": tm, "tn": tn, "slices": slices, "q": q}
            yield KernelVariant("contraction", "staged", tuple(params.items()))


def split_ranges(items: int, panels: int, units: int) -> int:
    """The least power of two of ranges that keeps the device busy, as far as k goes; less where some would be empty."""
    q = 1
    while items * q < _ITEMS_PER_UNIT * units and panels // (2 * q) >= _LEAST_STEPS:
        q *= 2
    return -(-panels // -(-panels // q))


def build_staged(variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
    """The kernel: any buffer layouts are accepted; None where a range of k would be empty, or images cannot be read."""
    first = spec.inputs
    mirrored = not layouts[first].vectorizes(2, 4) and layouts[first].vectorizes(1, 4)
    views = tuple(layout.permute((0, 2, 1)) for layout in layouts) if mirrored else layouts
    x, y = (1, 0) if mirrored else (0, 1)
    p = dict(variant.params)
    batch, rows, cols = views[first].shape
    k, q = views[x].shape[2], p["q"]
    panels, steps = panels_of(p, k)
    if (q - 1) * steps >= panels:
        return None
    x_load, y_load = panel_loader(views[x], 1, 2), panel_loader(views[y], 2, 1)
    loads = (x, x_load), (y, y_load)
    images = tuple(at_ for at_, (width, axis) in loads if width == 4 and in_texels(views[at_], axis, p))
    if "image" in p and not images:
        return None
    ending, alpha = ending_of(spec, views), float(spec.attr("alpha", 1.0))
    target = len(layouts) if q > 1 else first
    partial = Layout.row_major((q, batch, rows, -(-cols // 4) * 4))
    items = p["slices"] * (p["bm"] // p["tm"]) * (p["bn"] // p["tn"])
    groups = -(-rows // p["bm"]), -(-cols // p["bn"])
    nest = _staged_nest(
        tuple((key, value) for key, value in variant.params if key != "image"),
        (batch, *groups),
        steps,
        (x, *x_load),
        (y, *y_load),
        plain_finish(target, 4) if q > 1 else ending.finish,
    )
    defines: dict[str, str | int | float] = {
        **{key.upper(): p[key] for key in ("bm", "bn", "bk", "tm", "tn")},
        "ITEMS": items,
        "SLICES": p["slices"],
        "SPLIT": q,
        "KS": steps * p["bk"],
        "RN": rows,
        "CN": cols,
        "KN": k,
        "XW": x_load[0],
        "X_ALONG_K": int(x_load[1] == 2),
        "XL": p["bm"] * p["bk"] // (x_load[0] * items),
        "YW": y_load[0],
        "Y_ALONG_K": int(y_load[1] == 1),
        "YL": p["bn"] * p["bk"] // (y_load[0] * items),
        "ZW": ending.width,
        "ALPHA": alpha,
    }
    main = Launch(
        "contraction_staged.cl",
        "contraction_staged",
        (("X", x), ("Y", y), ("Z", target), *(ending.roles if q == 1 else ())),
        nest,
        (groups[1] * items, groups[0], batch * q),
        (items, 1, 1),
        (*defines.items(), *(ending.defines if q == 1 else ())),
        ending.code if q == 1 else "",
        images=images,
    )
    seen = views if mirrored else ()
    if q == 1:
        return Kernel(spec, variant, layouts, (main,), views=seen)
    total = sum_launch(q, (batch, rows, cols), (target, first), alpha, ending)
    return Kernel(spec, variant, layouts, (main, total), (Scratch("float32", partial),), views=seen)


def panel_loader(layout: Layout, outer: int, along: int) -> tuple[int, int]:
    """(vector width, axis along which lanes load) of a panel whose axes are ``outer`` and k = ``along``."""
    for axis in (outer, along):
        if layout.shape[axis] % 4 == 0 and layout.vectorizes(axis, 4):
            return 4, axis
    strides = {axis: modes[-1].stride if (modes := layout.axis_modes(axis)) else 0 for axis in (outer, along)}
    return 1, along if 0 < strides[along] < strides[outer] else outer


_B, _L, _S = "b", "l", "slice"


def panel_accesses(
    load: tuple[int, int, int], outer: int, block: int, bk: int, lanes: tuple[int, int], group: str
) -> list[Access]:
    """An item's loads of one panel; ``load``: (operand, width, axis), ``lanes``: items of a slice, slices."""
    operand, width, axis = load
    items = lanes[0] * lanes[1]
    per = (bk if axis != outer else block) // width  # vectors along the lanes' axis; it divides the items or they it
    out = []
    for i in range(block * bk // (width * items)):
        turn = i * items
        along = Index(turn % per * width, (Term(_L, width, 1, min(per, items)),))
        across = Index(turn // per, (Term(_L, 1, per),) if per < items else ())
        if lanes[1] > 1:  # vectors of a line divide the items of a slice: the second slice goes on where the first ends
            across += var(_S, lanes[0] // per)
        position, step = (across, along) if axis != outer else (along, across)
        position, step = position + var(group, block), step + var("k", bk)
        coords = (position, step) if outer == 1 else (step, position)
        out.append(at(operand, var(_B), *coords, width=width, axis=axis))
    return out


@lru_cache(maxsize=4096)
def _staged_nest(
    params: tuple[tuple[str, int], ...],
    grid: tuple[int, int, int],
    steps: int,
    x: tuple[int, int, int],
    y: tuple[int, int, int],
    finish: Finish,
) -> Nest:
    p = dict(params)
    lanes = item_lanes(p)
    loads = panel_accesses(x, 1, p["bm"], p["bk"], lanes, "r") + panel_accesses(y, 2, p["bn"], p["bk"], lanes, "c")
    if p["q"] > 1:
        loads = [shifted(a, 2 if a.operand == x[0] else 1, steps * p["bk"]) for a in loads]
    return staged_nest(p, grid, steps, tuple(loads), finish)


def item_lanes(p: Mapping[str, int]) -> tuple[int, int]:
    """Items of a slice, slices."""
    return p["bm"] // p["tm"] * (p["bn"] // p["tn"]), p["slices"]


def staged_nest(
    p: Mapping[str, int], grid: tuple[int, int, int], steps: int, loads: tuple[Access, ...], finish: Finish
) -> Nest:
    """The nest of a launch: what an item loads of each panel, and how it ends."""
    bm, bn, bk, tm, tn, slices, q = (p[key] for key in ("bm", "bn", "bk", "tm", "tn", "slices", "q"))
    lanes, across = item_lanes(p), bn // tn // 8
    row = Index(0, (Term("r", bm), Term(_L, 4, 8, 4), Term(_L, 16, 32 * across)))
    col = Index(0, (Term("c", bn), Term(_L, 4, 1, 8), Term(_L, 32, 32, across)))
    if slices > 1:
        row += var(_S, bm * grid[1])  # beyond the last row: only the first slice ends with sums
    lead = (var("q"), var(_B)) if q > 1 else (var(_B),)
    ends = tuple(
        at(
            operand,
            *lead,
            row + (i // 4 * (bm // tm * 4) + i % 4),
            col + (j // 4 * (bn // tn * 4) + j % 4),
            width=width,
            axis=len(lead) + 1,
            write=write,
            depth=0,
        )
        for operand, width, write in finish.accesses
        for i in range(tm)
        for j in range(0, tn, width)
    )
    sums = Phase((Loop("k", steps),), (*loads, *(() if finish.own else ends)), 2 * tm * tn * bk // slices)
    phases = (sums, Phase((), ends, finish.flops * tm * tn)) if finish.own else (sums,)
    groups = (Loop(name, n, "group") for name, n in zip((_B, "q", "r", "c"), (grid[0], q, *grid[1:]), strict=True))
    items = (Loop(_S, slices, "item"), Loop(_L, lanes[0], "item")) if slices > 1 else (Loop(_L, lanes[0], "item"),)
    return Nest((*groups, *items), phases)


def shifted(access: Access, k_axis: int, per_range: int) -> Access:
    """The access of range q of k."""
    coords = list(access.index)
    coords[k_axis] = coords[k_axis] + Index(0, (Term("q", per_range),))  # type: ignore[operator]
    return at(access.operand, *coords, width=access.width, axis=access.axis)


@dataclass(frozen=True)
class Ending:
    """What the launch that has the whole sums does with them: for its nest, its operands, its code."""

    finish: Finish
    roles: tuple[tuple[str, int], ...]
    defines: tuple[tuple[str, str | int | float], ...]
    code: str
    width: int


def ending_of(spec: OpSpec, views: tuple[Layout, ...]) -> Ending:
    """An op's ending: its epilogue, or a store in the widest vectors that its result's layout has.

    Args:
        spec: of a contraction, whatever its weights are.
        views: of its operands, those of the result over (b, r, c).
    """
    first, epilogue = spec.inputs, epilogue_of(spec)
    if epilogue is not None:
        defines = tuple(epilogue.defines(4, rolled=False).items())
        return Ending(epilogue.finish(views, 4), epilogue.roles(), defines, epilogue.code(views, 4), 4)
    result = views[first]
    width = 4 if result.vectorizes(2, 4) and result.shape[2] % 4 == 0 else 1
    return Ending(plain_finish(first, width), (), (), "", width)


def panels_of(params: Mapping[str, int], k: int) -> tuple[int, int]:
    """Panels along k, and how many of them each of the ranges has."""
    panels = -(-k // params["bk"])
    return panels, -(-panels // params["q"])


@lru_cache(maxsize=1024)
def sum_launch(
    q: int,
    shape: tuple[int, int, int],
    positions: tuple[int, int],
    alpha: float,
    ending: Ending,
) -> Launch:
    """The launch that adds up ``q`` ranges of k; ``positions`` of the parts and of the first output."""
    (batch, rows, cols), (partial, first) = shape, positions
    across, down = _SUM_GROUP
    vectors = -(-cols // 4)
    groups = -(-rows // down), -(-vectors // across)
    row = Index(0, (Term("r", down), Term("ri")))
    col = Index(0, (Term("c", 4 * across), Term("ci", 4)))
    loads = [at(partial, i, var(_B), row, col, width=4, axis=3) for i in range(q)]
    ends = [
        at(operand, var(_B), row, col + j, width=width, axis=2, write=write)
        for operand, width, write in ending.finish.accesses
        for j in range(0, 4, width)
    ]
    grid = (
        Loop(_B, batch, "group"),
        Loop("r", groups[0], "group"),
        Loop("c", groups[1], "group"),
        Loop("ri", down, "item"),
        Loop("ci", across, "item"),
    )
    return Launch(
        "contraction_sum.cl",
        "contraction_sum",
        (("P", partial), ("Z", first), *ending.roles),
        Nest(grid, (Phase((), (*loads, *ends), 4 * (q + ending.finish.flops)),)),
        (groups[1] * across, groups[0] * down, batch),
        (across, down, 1),
        (("RN", rows), ("CN", cols), ("SPLIT", q), ("ZW", ending.width), ("ALPHA", alpha), *ending.defines),
        ending.code,
    )
