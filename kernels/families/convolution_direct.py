"""Convolutions from their definition: launches of ``cl/convolution_direct.cl``.

A work item holds ``block`` neighbouring results: pixels of a row (``direct.w``, any layouts) or channels
(``direct.c``). On a GPU a block is one result and a work group is ``items`` of them.
"""

from __future__ import annotations

from functools import lru_cache

from kernels.families.common import decode_c, index_c, ndrange
from kernels.families.convolution_form import Axis, Window, correlations
from kernels.nest import Access, Bound, Index, Loop, Nest, Phase, Term, var, within
from kernels.spec import KernelVariant, Launch, OpSpec

__all__ = ["direct_launches"]

Defines = dict[str, str | int | float]


@lru_cache(maxsize=1 << 12)
def direct_launches(variant: KernelVariant, spec: OpSpec) -> tuple[Launch, ...] | None:
    """The launches, or None where a block of channels would not lie in one group."""
    window = Window.of(dict(spec.attrs))
    if spec.kind == "conv_grad_weight":
        launch = _weight(variant, spec, window)
        return None if launch is None else (launch,)
    (_, _, h, w), kernel = spec.shapes[2], spec.shapes[1][2:]
    parts = correlations(spec.kind, window, (h, w), kernel)  # type: ignore[arg-type]
    launches = [_correlate(variant, spec, window.groups, axes) for axes in parts]
    return None if launches[0] is None else tuple(x for x in launches if x is not None)


def _lanes(variant: KernelVariant, extent: int) -> tuple[list[Loop], Index, int, int]:
    """Grid loops over blocks, the first lane of an item, lanes of an item and items of a group."""
    block, items = variant.param("block"), variant.param("items")
    loops = [Loop("lb", -(-extent // (block * items)), "group")]
    first = var("lb", block * items)
    if items > 1:
        loops.append(Loop("lt", items, "item"))
        first += var("lt", block)
    return loops, first, block, items


def _correlate(variant: KernelVariant, spec: OpSpec, groups: int, axes: tuple[Axis, Axis]) -> Launch | None:
    ah, aw = axes
    n_images, out_channels = spec.shapes[2][:2]
    along_w = variant.name == "direct.w"
    lanes = aw.out if along_w else out_channels
    lane_loops, first, block, items = _lanes(variant, lanes)
    lane = first + var("l")
    per_group, channels = out_channels // groups, spec.shapes[0][1] // groups
    if along_w:
        out, column = var("o"), lane
        group, own = var("o", 1, per_group), var("o", 1, 1, per_group)
        grid = [Loop("n", n_images, "group"), Loop("o", out_channels, "group"), Loop("i", ah.out, "group"), *lane_loops]
    else:
        split = _channel(lane, block * items, groups, per_group)
        if split is None:
            return None
        out, column, (group, own) = lane, var("j"), split
        grid = [Loop("n", n_images, "group"), Loop("i", ah.out, "group"), Loop("j", aw.out, "group"), *lane_loops]
    in_channel = _scaled(group, channels) + var("c")
    image_h, image_w = _image(var("i"), var("t"), ah), _image(column, var("u"), aw)
    tap_h, tap_w = _affine(ah.first, ("t", ah.skip)), _affine(aw.first, ("u", aw.skip))
    x = (var("n"), in_channel, image_h, image_w)
    if spec.kind == "conv":
        w = (out, var("c"), tap_h, tap_w)
    else:
        w = (in_channel, own, tap_h, tap_w)
    y = (var("n"), out, _affine(ah.begin, ("i", ah.every)), Index(aw.begin) + _scaled(column, aw.every))
    loops = (Loop("c", channels), Loop("t", ah.taps), Loop("u", aw.taps), Loop("l", block))
    height, width = spec.shapes[0][2:]
    exists = (Bound(lane, lanes),)
    if along_w:  # weights are read where the tap meets the image for any of the block's pixels
        last = _image(Index(lanes - 1), var("u"), aw)
        met = (*within(image_h, height), *_met(first, block, lanes, width, aw), Bound(-last, 1))
    else:
        met = (*within(image_h, height), *within(image_w, width), *exists)
    taps = (Access(1, w, depth=3 if along_w else 4, when=met), Access(0, x, when=exists))
    phases = [Phase(loops, taps, 2)] if ah.taps and aw.taps else []
    phases.append(Phase((Loop("l", block),), (Access(2, y, write=True, when=exists),)))
    defines: Defines = {
        "OP_correlate": 1,
        "ALONG_W": int(along_w),
        "CHANNELS": channels,
        "TAPS_H": ah.taps,
        "TAPS_W": aw.taps,
        "STEP": aw.step,
        "TAP": aw.tap,
        "AT": aw.at,
        "X_H": index_c(image_h),
        "X_W": index_c(image_w),
        "X_ELEM": _elem("X", x),
        "W_ELEM": _elem("W", w),
        "Y_ELEM": _elem("Y", y),
    }
    names = (("X", 0), ("W", 1), ("Y", 2))
    return _launch("correlate", names, grid, phases, (block, lanes, first), defines)


def _met(first: Index, block: int, lanes: int, width: int, axis: Axis) -> tuple[Bound, ...]:
    """Whether a tap meets the image for a pixel of a block; the image is not narrower than a step."""
    begin = _image(first, var("u"), axis)
    return Bound(first, lanes), Bound(begin, width), Bound(-(begin + (block - 1) * axis.step), 1)


def _weight(variant: KernelVariant, spec: OpSpec, window: Window) -> Launch | None:
    (_, _, oh, ow), (outs, channels, kh, kw) = spec.shapes[0], spec.shapes[2]
    ((ah, aw),) = correlations(spec.kind, window, (oh, ow), (kh, kw))
    per_group = outs // window.groups
    rows = variant.name == "direct.w"
    over_outs = not rows and channels == 1
    lanes = outs if over_outs else channels
    if rows and variant.param("block") != 1:
        return None
    lane_loops, first, block, items = _lanes(variant, lanes)
    lane = first if rows else first + var("l")
    if over_outs:
        split = _channel(lane, block * items, window.groups, per_group)
        if split is None:
            return None
        out, channel, group = lane, Index(), split[0]
    else:
        out, channel, group = var("o"), lane, var("o", 1, per_group)
    grid = [] if over_outs else [Loop("o", outs, "group")]
    grid += [Loop("r", kh, "group"), Loop("s", kw, "group"), *lane_loops]
    image_h, image_w = _image(var("p"), var("r"), ah), _image(var("q"), var("s"), aw)
    dy = (var("n"), out, var("p"), var("q"))
    x = (var("n"), _scaled(group, channels) + channel, image_h, image_w)
    dw = (out, channel, var("r"), var("s"))
    pixels = (Loop("n", spec.shapes[0][0]), Loop("p", oh), Loop("q", ow))
    lane_loop = () if rows else (Loop("l", block),)
    dy_depth = 4 if over_outs else 3
    exists = (Bound(lane, lanes),)
    met = (*within(image_h, spec.shapes[1][2]), *within(image_w, spec.shapes[1][3]))
    phases = [
        Phase(
            (*pixels, *lane_loop),
            (
                Access(0, dy, depth=dy_depth, when=(*met, *(exists if rows or over_outs else ()))),
                Access(1, x, when=exists),
            ),
            2,
        ),
        Phase(lane_loop, (Access(2, dw, write=True, when=exists),)),
    ]
    entry = "weight_rows" if rows else "weight_channels"
    defines: Defines = {
        f"OP_{entry}": 1,
        "STEP": aw.step,
        "TAP": aw.tap,
        "AT": aw.at,
        "X_H": index_c(image_h),
        "X_W": index_c(image_w),
        "DY_ELEM": _elem("DY", dy),
        "X_ELEM": _elem("X", x),
        "DW_ELEM": _elem("DW", dw),
        "DY_ONCE": int(not over_outs),
    }
    return _launch(entry, (("DY", 0), ("X", 1), ("DW", 2)), grid, phases, (block, lanes, first), defines)


def _launch(
    entry: str,
    names: tuple[tuple[str, int], ...],
    grid: list[Loop],
    phases: list[Phase],
    lanes: tuple[int, int, Index],
    defines: Defines,
) -> Launch:
    size, local = ndrange(grid)
    block, extent, first = lanes
    shared: Defines = {
        "DECODE": decode_c(grid),
        "ITEMS": local[0],
        "B": block,
        "LANES": extent,
        "L_FIRST": index_c(first),
    }
    constants = tuple({**shared, **defines}.items())
    nest = Nest(tuple(grid), tuple(phases))
    return Launch("convolution_direct.cl", entry, names, nest, size, local, constants)


def _channel(lane: Index, run: int, groups: int, per_group: int) -> tuple[Index, Index] | None:
    """A lane's group and its channel within, for lanes in runs of ``run``; None where a run crosses groups."""
    if groups == 1:
        return Index(), lane
    if per_group == 1:
        return lane, Index()
    if per_group % run:
        return None
    runs = per_group // run
    rest = tuple(t for t in lane.terms if t.loop != "lb")
    return var("lb", 1, runs), Index(lane.const, (Term("lb", run, 1, runs), *rest))


def _image(place: Index, tap: Index, axis: Axis) -> Index:
    return Index(axis.at) + _scaled(place, axis.step) + _scaled(tap, axis.tap)


def _affine(const: int, *terms: tuple[str, int]) -> Index:
    return Index(const, tuple(Term(name, coef) for name, coef in terms if coef))


def _scaled(place: Index, by: int) -> Index:
    terms = tuple(Term(t.loop, t.coef * by, t.div, t.mod) for t in place.terms if t.coef * by)
    return Index(place.const * by, terms)


def _elem(name: str, place: tuple[Index, ...]) -> str:
    return f"{name}_AT({','.join(index_c(x) for x in place)})"
