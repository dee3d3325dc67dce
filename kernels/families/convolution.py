"""Convolution and its two gradients, mostly as matrix products over windows that are never copied out.

``outer.n``, ``outer.m`` and ``dot`` are the contraction family's kernels, run on views: rows m are pixels (n, i, j),
columns n are output channels, k counts taps and input channels; for the weights' gradient m is output channels, n
counts taps and input channels, and k is pixels. So vectors lie along output channels, along pixels, or along input
channels (along pixels, for the weights' gradient). An image whose windows leave it is first copied into a workspace
with a border of zeros, in the order that the variant's vectors want. ``pack=1`` also copies the other operand
(weights, or the output's gradient) into panels; weights that are read backwards always are. Batches are groups.

``direct.w`` and ``direct.c`` compute from the definition, over any layouts: for depthwise convolutions, and whatever
the others do not accept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd

from kernels.families.common import any_image
from kernels.families.contraction import CONTRACTION
from kernels.families.convolution_direct import direct_launches
from kernels.families.convolution_form import (
    Axis,
    Window,
    correlations,
    grouped,
    matrix,
    reach,
    window_layout,
)
from kernels.families.convolution_pack import Source, fill, pack
from kernels.nest import Access, Index, Nest, Term, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["CONVOLUTION", "Convolution"]

_PRODUCTS = {"outer.n": 2, "outer.m": 2, "dot": 2}
"""Register tiles of each orientation that are enumerated, of those that the contraction family has for the shape."""
_THIN_ITEMS = 64


class Convolution:
    """The family's singleton; see the module docstring."""

    name = "convolution"
    kinds: tuple[str, ...] = ("conv", "conv_grad_input", "conv_grad_weight")

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Matrix products, each with and without panels, and the direct kernels."""
        out = []
        product_spec = _product_spec(spec)
        groups, m, k = product_spec.shapes[0]
        n = product_spec.shapes[1][2]
        if groups == 1 or (m * n * k >= 4096 and min(m, n, k) >= 4):
            seen = dict.fromkeys(_PRODUCTS, 0)
            for made in CONTRACTION.variants(product_spec, limits):
                if seen.get(made.name, 99) < _PRODUCTS.get(made.name, 0):
                    seen[made.name] += 1
                    for packed in (0, 1):
                        out.append(KernelVariant(self.name, made.name, (*made.params, ("pack", packed))))
        return out + [_direct(name, spec, limits) for name in ("direct.w", "direct.c")]

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """The kernel, or None where the vectors' axis is not contiguous enough, a view tears a tile, or in an image."""
        if any_image(layouts) or any(dtype != "float32" for dtype in spec.dtypes):
            return None
        if variant.name.startswith("direct"):
            launches = direct_launches(variant, spec)
            return None if launches is None else Kernel(spec, variant, layouts, launches)
        builder = _Product(variant, spec, layouts)
        built = builder.weight() if spec.kind == "conv_grad_weight" else builder.correlate()
        return Kernel(spec, variant, layouts, tuple(builder.launches), tuple(builder.scratch)) if built else None


def _direct(name: str, spec: OpSpec, limits: DeviceLimits) -> KernelVariant:
    """Blocks of neighbouring results: pixels of a row (taps have no neighbours), or channels."""
    gradient = spec.kind == "conv_grad_weight"
    if limits.kind != "gpu":
        block = max(limits.simd_width, 4) if name == "direct.c" else 1 if gradient else 2 * limits.simd_width
        return KernelVariant("convolution", name, (("block", block), ("items", 1)))
    items, groups = _THIN_ITEMS, Window.of(dict(spec.attrs)).groups
    channels = spec.shapes[2][0 if gradient else 1] // groups
    if name == "direct.c" and groups > 1 and channels > 1:
        items = gcd(items, channels)  # a work group's channels lie in one group of the convolution
    return KernelVariant("convolution", name, (("block", 1), ("items", items)))


def _product_spec(spec: OpSpec) -> OpSpec:
    """The contraction that the largest part of the op is."""
    window, (out_n, out_c, *extents) = Window.of(dict(spec.attrs)), spec.shapes[2]
    g = window.groups
    if spec.kind == "conv_grad_weight":
        n, o, oh, ow = spec.shapes[0]
        return _contraction(g, o // g, n * oh * ow, out_c * extents[0] * extents[1])
    parts = correlations(spec.kind, window, tuple(extents), spec.shapes[1][2:])  # type: ignore[arg-type]
    h, w = max(parts, key=lambda p: p[0].taps * p[1].taps)
    channels = spec.shapes[0][1] // g
    return _contraction(g, out_n * h.out * w.out, max(h.taps * w.taps, 1) * channels, out_c // g)


def _contraction(g: int, m: int, k: int, n: int) -> OpSpec:
    return OpSpec("contraction", ((g, m, k), (g, k, n), (g, m, n)), ("float32",) * 3, 2)


class _Product:
    """Collects the launches and workspaces of one kernel; its methods answer False where the variant does not fit."""

    def __init__(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> None:
        self.variant, self.spec, self.layouts = variant, spec, layouts
        params = dict(variant.params)
        self.packs = bool(params.pop("pack"))
        self.inner = KernelVariant("contraction", variant.name, tuple(params.items()))
        self.device = "cpu" if params["gr"] * params["gc"] == 1 else "gpu"
        self.window = Window.of(dict(spec.attrs))
        self.launches: list[Launch] = []
        self.scratch: list[Scratch] = []

    def correlate(self) -> bool:
        """Kinds conv and conv_grad_input: image, weights, output."""
        spec, g, forward = self.spec, self.window.groups, self.spec.kind == "conv"
        out = spec.shapes[2]
        parts = correlations(spec.kind, self.window, out[2:], spec.shapes[1][2:])  # type: ignore[arg-type]
        live = [p for p in parts if p[0].taps and p[1].taps]
        whole, weights = grouped(self.layouts[2], 1, g), grouped(self.layouts[1], 0, g)
        if whole is None or weights is None:
            return False
        if not forward:
            weights = weights.permute((0, 2, 1, 3, 4))
        image, place, shifts = self._image(0, live, along_pixels=self.variant.name == "outer.m")
        if image is None:
            return False
        for axes in parts:
            z5 = _every(whole, axes)
            if z5 is None:
                return False
            if axes not in live:
                self.launches.append(fill(2, z5, self.device))
                continue
            moved = tuple(replace(a, at=a.at - s) for a, s in zip(axes, shifts, strict=True))
            x = matrix(window_layout(image, moved), (0,), (1, 3, 5), (4, 6, 2))  # type: ignore[arg-type]
            seen, at = window_layout(weights, axes, weights=True), 1
            if self.packs or seen is None:
                seen, at = self._weights(axes, weights.shape, forward)
            y = matrix(seen, (0,), (3, 4, 2), (1,))
            z = matrix(z5, (0,), (1, 3, 4), (2,))
            if not self._multiply((x, y, z), (place, at, 2)):
                return False
        return True

    def weight(self) -> bool:
        """Kind conv_grad_weight: output's gradient [g, o, pixels] times windows [g, pixels, taps·channels]."""
        g, (_, _, oh, ow) = self.window.groups, self.spec.shapes[0]
        (axes,) = correlations(self.spec.kind, self.window, (oh, ow), self.spec.shapes[2][2:])  # type: ignore[arg-type]
        dy, dw = grouped(self.layouts[0], 1, g), grouped(self.layouts[2], 0, g)
        image, place, shifts = self._image(1, [axes], along_pixels=self.variant.name == "dot")
        if dy is None or dw is None or image is None:
            return False
        at = 0
        if self.packs:
            dy, at = self._panels(dy)
        moved = tuple(replace(a, at=a.at - s) for a, s in zip(axes, shifts, strict=True))
        a = matrix(dy, (0,), (2,), (1, 3, 4))
        b = matrix(window_layout(image, moved), (0,), (1, 3, 5), (4, 6, 2))  # type: ignore[arg-type]
        c = matrix(dw, (0,), (1,), (3, 4, 2))
        return self._multiply((a, b, c), (at, place, 2))

    # ---- operands ---------------------------------------------------------------------------------------------------

    def _image(
        self, position: int, live: list[tuple[Axis, Axis]], along_pixels: bool
    ) -> tuple[Layout | None, int, tuple[int, int]]:
        """The image as [g, n, c, h, w], where it is or in a workspace with its border; its position; its first h, w."""
        n, channels, *extents = self.spec.shapes[position]
        g = self.window.groups
        spans = [reach([p[i] for p in live], extents[i]) for i in (0, 1)]
        if all(low >= 0 and high <= extent for (low, high), extent in zip(spans, extents, strict=True)):
            return grouped(self.layouts[position], 1, g), position, (0, 0)
        (low_h, high_h), (low_w, high_w) = spans
        shape = (g, n, channels // g, high_h - low_h, high_w - low_w)
        # A row's channels lie together: the products walk taps and channels, and stay on few pages.
        order = (1, 3, 0, 2, 4) if along_pixels else (1, 3, 4, 0, 2)
        layout = Layout.row_major(shape, order)
        channel = Index(0, (Term("d0", channels // g), Term("d2")))
        at = (var("d1"), channel, var("d3") + low_h, var("d4") + low_w)
        return layout, self._pack(position, at, layout), (low_h, low_w)

    def _weights(self, axes: tuple[Axis, Axis], shape: tuple[int, ...], forward: bool) -> tuple[Layout, int]:
        """The taps of a correlation in panels, as [g, o, c, t, u]."""
        h, w = axes
        g, o, c = shape[:3]
        panels = Layout.of(
            (g, o, c, h.taps, w.taps), [(0, None), (1, None), (3, None), (4, None), (2, None), *self._panel(1)]
        )
        out, within = ("d1", "d2") if forward else ("d2", "d1")
        outs = o if forward else c
        taps = [Index(a.first, (Term(d, a.skip),)) for a, d in ((h, "d3"), (w, "d4"))]
        at = (Index(0, (Term("d0", outs), Term(out))), var(within), *taps)
        return panels, self._pack(1, at, panels)

    def _panels(self, dy: Layout) -> tuple[Layout, int]:
        """The output's gradient in panels of channels, as [g, n, o, h, w]."""
        digits: list[tuple[int, int | None]] = [(0, None), (2, None), (1, None), (3, None), (4, None), *self._panel(2)]
        panels = Layout.of(dy.shape, digits)
        at = (var("d1"), Index(0, (Term("d0", dy.shape[2]), Term("d2"))), var("d3"), var("d4"))
        return panels, self._pack(0, at, panels)

    def _panel(self, axis: int) -> list[tuple[int, int | None]]:
        """The innermost digit of a panel: what a register tile takes of the channels."""
        p = dict(self.inner.params)
        if self.variant.name == "dot":
            return []
        columns = (self.variant.name == "outer.n") != (self.spec.kind == "conv_grad_weight")
        return [(axis, p["nv"] * p["v"] if columns else p["mr"])]

    def _pack(self, source: int, at: Source, layout: Layout) -> int:
        position = len(self.layouts) + len(self.scratch)
        self.scratch.append(Scratch("float32", layout))
        self.launches.append(pack(source, self.layouts[source], at, position, layout, self.device))
        return position

    # ---- the product ------------------------------------------------------------------------------------------------

    def _multiply(self, views: tuple[Layout | None, ...], positions: tuple[int, int, int]) -> bool:
        a, b, c = views
        if a is None or b is None or c is None:
            return False
        launch = _product_launch(self.inner, (a, b, c), positions)
        if launch is None:
            return False
        self.launches.append(launch)
        return True


def _every(whole: Layout, axes: tuple[Axis, Axis]) -> Layout | None:
    """The outputs [g, n, o, i, j] that a correlation writes."""
    out: Layout | None = whole
    for axis, a in zip((3, 4), axes, strict=True):
        out = out and out.slice(axis, a.begin, a.begin + (a.out - 1) * a.every + 1, a.every)
    return out


@lru_cache(maxsize=1 << 13)
def _product_launch(
    inner: KernelVariant, views: tuple[Layout, Layout, Layout], positions: tuple[int, int, int]
) -> Launch | None:
    """The contraction's launch over views of operands that stand at other positions."""
    (g, m, k), n = views[0].shape, views[1].shape[2]
    kernel = CONTRACTION.build(inner, _contraction(g, m, k, n), views)
    if kernel is None:
        return None
    (launch,) = kernel.launches
    operands = tuple((name, positions[p]) for name, p in launch.operands)
    seen = tuple((positions[p], kernel.operand_layout(p)) for p in range(3))
    return replace(launch, operands=operands, nest=_moved(launch.nest, positions), views=seen)


def _moved(nest: Nest, positions: tuple[int, int, int]) -> Nest:
    """The nest with operands 0, 1, 2 at other positions; one for all launches that share the nest."""
    if positions == (0, 1, 2):
        return nest
    key = "moved", positions
    if key not in nest.memo:

        def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
            return tuple(replace(a, operand=positions[a.operand]) for a in accesses)

        phases = tuple(replace(p, accesses=moved(p.accesses), border=moved(p.border)) for p in nest.phases)
        nest.memo[key] = Nest(nest.grid, phases, nest.shared)
    made: Nest = nest.memo[key]
    return made


CONVOLUTION = Convolution()
