"""Contraction: a[b,m,k] · b[b,k,n] → c[b,m,n], in the orientations that serve every layout without a transpose.

Internally a kernel computes Z[b,r,c] = alpha · Σ_k X[b,r,k] · Y[b,k,c]:

- ``outer.n``: X = a, Y = b, vectors along c = n; one step of k is an outer product of mr scalars and nv vectors;
- ``outer.m``: X = bᵀ, Y = aᵀ, Z = cᵀ, vectors along c = m: the mirror image, for operands contiguous along m;
- ``dot``: vectors along k of both operands, summed across lanes at the end; c is the axis along which the output is
  contiguous;
- ``tile.n``, ``tile.m``: as dot, where Y lies in R-Tiles with k inside and so narrow (4 or 8) that a vector holds
  several columns of a tile: one load takes them all, X's few steps of k are repeated for each;
- ``staged``: panels of both go through local memory (GPUs; see ``contraction_staged.py``);
- ``outer.n.image`` and the like: operands are read through images (GPUs; see ``contraction_image.py``);
- ``any``: scalars, each by its own index expression, for whatever the others do not accept.

All of them finish their sums with the op's ``epilogue``, where it has one (see ``contraction_epilogue.py``).

The roles' axes are the kernel's ``views``, so nests and macros speak of (b, r, k), (b, k, c) and (b, r, c).

A vector is read in *pieces* that are contiguous: where R-Tiles are narrower than the vector, several loads make one
vector. Inside a tile of ``KT`` steps along k both operands have constant strides, so that mixed-radix index arithmetic
stays outside the inner loop. On a CPU a work group is one fat item that walks ``t``×``s`` register tiles (rows first,
so that a panel of Y stays in cache); on a GPU it is ``gr``×``gc`` thin ones.
"""

from __future__ import annotations

from math import gcd

from kernels.families.common import largest_divisor
from kernels.families.contraction_code import (
    Operand,
    compose_load,
    compose_store,
    group_sums,
    lane_sums,
    load_x,
    piece_width,
    y_edge,
    y_pieces,
)
from kernels.families.contraction_epilogue import Epilogue, epilogue_of, plain_finish
from kernels.families.contraction_image import image_variants, in_texels, plain_name
from kernels.families.contraction_nest import Tiling, any_nest, dot_nest, outer_nest
from kernels.families.contraction_staged import build_staged, staged_variants
from kernels.memory_c import load_c
from kernels.nest import Nest
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import LANES, Layout

__all__ = ["CONTRACTION", "Contraction"]

_L2_BYTES = 512 << 10  # what a work item's operands may take of a core's cache

# Register tiles by lanes of a vector: (mr, nv) of outer, (mr, nr) of dot, (mr, nr / columns) of tile. They keep 12 of
# 16 registers (8 lanes) or 16 to 24 of 32; which is best depends on shape and layouts, for the device model to say.
_OUTER = {
    16: ((8, 2), (12, 2), (8, 3), (8, 1)),
    8: ((6, 2), (4, 3), (4, 2), (8, 1)),
    4: ((8, 2), (6, 3), (4, 2), (8, 1)),
}
_DOT = {16: ((4, 4), (6, 4), (8, 2)), 8: ((3, 4), (2, 4), (4, 2)), 4: ((4, 4), (3, 4), (8, 2))}
_TILE = {16: ((6, 2), (4, 3)), 8: ((6, 2), (4, 2))}
_HALF_STEPS = {3: 4}
"""Halves of X that a CPU converts at once, by vectors of Y (else 8): one by one takes as long as multiplying."""
_GPU_OUTER, _GPU_DOT = ((4, 1), (8, 2)), ((4, 4), (2, 2))
_GPU_GROUP = {"gr": 8, "gc": 16}


def separable(layout: Layout, axis: int, step: int) -> bool:
    """Whether ``offset(step·t + i) = offset(step·t) + offset(i)`` along an axis for every t and 0 <= i < step."""
    inner = 1
    for mode in reversed(layout.axis_modes(axis)[1:]):
        inner *= mode.extent
        if inner % step and step % inner:
            return False
    return True


def inner_tile(x: Layout, y: Layout) -> int:
    """Steps of k inside which both operands (k is axis 2 of x, 1 of y) have one constant stride."""
    extents = [modes[-1].extent for modes in (x.axis_modes(2), y.axis_modes(1)) if len(modes) > 1]
    return min(gcd(*extents), x.shape[2]) if extents else x.shape[2]


class Contraction:
    """The family's singleton; see the module docstring."""

    name = "contraction"
    kinds: tuple[str, ...] = ("contraction",)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Register tiles that fit the shape; the blocks of tiles per work item follow from shape and device."""
        batch, m, k = spec.shapes[0]
        n = spec.shapes[1][2]
        cpu = limits.kind == "cpu"
        group = {"gr": 1, "gc": 1} if cpu else _GPU_GROUP
        widest = next((w for w in (16, 8) if w <= limits.simd_width), 4) if cpu else 4
        out: list[KernelVariant] = []

        def add(name: str, rows: int, cols: int, params: dict[str, int], nr: int, **more: int) -> None:
            if params["mr"] > 4 and params["mr"] >= 2 * rows:
                return  # half a register tile or more would be border
            t, s = _blocks(batch, rows, cols, k, params["mr"], nr, limits)
            out.append(KernelVariant(self.name, name, tuple({**params, "t": t, "s": s, **more, **group}.items())))

        for name, rows, cols in (("outer.n", m, n), ("outer.m", n, m)):
            v = widest
            while v > 4 and v >= 2 * cols:
                v //= 2
            for mr, nv in _OUTER[v] if cpu else _GPU_OUTER:
                if nv == 1 or v * nv < 2 * cols:
                    half = spec.dtypes[0 if name == "outer.n" else 1] == "float16"
                    x = 4 if not cpu else 1 if not half else _HALF_STEPS.get(nv, 8)
                    add(name, rows, cols, {"mr": mr, "nv": nv, "v": v}, v * nv, x=x)
        for v in sorted({widest, 4}, reverse=True):
            for mr, nr in (_DOT[v] if cpu else _GPU_DOT)[: 3 if v == widest else 1]:
                if v <= k:
                    add("dot", m, n, {"mr": mr, "nr": nr, "v": v}, nr)
        for name, rows, cols in (("tile.n", m, n), ("tile.m", n, m)):
            for mr, vectors in _TILE.get(widest, ()):
                nr = vectors * widest // 4
                add(name, rows, cols, {"mr": mr, "nr": nr, "v": widest}, nr)
        if not cpu:
            out += staged_variants(spec, limits)
        out += list(image_variants(out, limits))
        out.append(KernelVariant(self.name, "any", tuple({"mr": 4, "nr": 4, **group}.items())))
        return out

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """The kernel, or None where the vectors' axis is not contiguous enough or an operand is an image."""
        if any(layout.is_image for layout in layouts):
            return None
        name = plain_name(variant)
        if name != variant.name and not set(spec.dtypes[:2]) <= {"float32", "float16"}:
            return None  # no texels of integers are read
        if name == "staged":
            return build_staged(variant, spec, layouts)
        first = spec.inputs  # the output that says along which axis vectors are stored
        mirrored = name in ("outer.m", "tile.m") or (name == "dot" and _along_m(layouts[first]))
        views = tuple(layout.permute((0, 2, 1)) for layout in layouts) if mirrored else layouts
        x, y = (1, 0) if mirrored else (0, 1)
        epilogue = epilogue_of(spec)
        roles = (("X", x), ("Y", y), ("Z", first), *(epilogue.roles() if epilogue else ()))
        make = {"outer.n": _outer, "outer.m": _outer, "tile.n": _tile, "tile.m": _tile, "dot": _dot, "any": _any}[name]
        operands = tuple(zip(views, spec.dtypes, strict=True))
        made = make(dict(variant.params), operands, (x, y, first), epilogue)
        if made is None:
            return None
        body, tiling, nest, defines, preamble, images = made
        constants = {**defines, **tiling.defines(), "ALPHA": float(spec.attr("alpha", 1.0))}
        launch = Launch(
            f"{body}.cl",
            body,
            roles,
            nest,
            tiling.global_size,
            tiling.local_size,
            tuple(constants.items()),
            preamble,
            images=images,
        )
        return Kernel(spec, variant, layouts, (launch,), views=views if mirrored else ())


CONTRACTION = Contraction()

_Made = tuple[str, Tiling, Nest, dict[str, str | int | float], str, tuple[int, ...]]
"""Body, tiling, nest, constants, generated code, operands read through images."""


def _blocks(batch: int, rows: int, cols: int, k: int, mr: int, nr: int, limits: DeviceLimits) -> tuple[int, int]:
    """Register tiles (down, across) of a CPU work item: few enough work groups to be cheap, enough to share out."""
    if limits.kind != "cpu":
        return 1, 1
    tiles_r, tiles_c = -(-rows // mr), -(-cols // nr)
    wanted = max(1, batch * tiles_r * tiles_c // (8 * limits.compute_units))
    across_max = max(1, _L2_BYTES // 2 // (4 * k * nr))
    t = min(tiles_r, wanted, max(1, _L2_BYTES // 2 // (4 * k * mr)))
    s = min(tiles_c, max(1, wanted // t), across_max)
    return _even(tiles_r, t), _even(tiles_c, s)


def _even(tiles: int, at_most: int) -> int:
    """Tiles per item so that items are alike: a divisor if one is near, else the least that needs as many items."""
    divisor = largest_divisor(tiles, at_most)
    return divisor if 2 * divisor > at_most else -(-tiles // -(-tiles // at_most))


def _along_m(c: Layout) -> bool:
    return not c.vectorizes(2, 4) and c.vectorizes(1, 4)


def _outer(
    p: dict[str, int], operands: tuple[Operand, ...], positions: tuple[int, int, int], epilogue: Epilogue | None
) -> _Made | None:
    roles = [operands[position] for position in positions]
    x, y, z = (layout for layout, _ in roles)
    views = tuple(layout for layout, _ in operands)
    mr, nv, v = p["mr"], p["nv"], p["v"]
    yu, n = y_pieces(y, v), y.shape[2]
    if yu < min(v, 4, 1 << (n.bit_length() - 1)):
        return None
    y_image = v >= LANES and in_texels(y, 2, p)
    yu = LANES if y_image else yu
    kt, k = inner_tile(x, y), x.shape[2]
    xv = p["x"] if kt % p["x"] == 0 or kt == k else 1
    x_axis = next((axis for axis in (1, 2) if x.vectorizes(axis, xv) and (axis == 2 or mr % xv == 0)), 0)
    xv = xv if x_axis else 1
    x_image = xv == LANES and kt % xv == 0 == k % kt and in_texels(x, x_axis, p)
    images = _images(p, positions, x_image, y_image)
    if images is None:
        return None
    zu = piece_width(z, 2, v)
    zu = zu if zu >= 4 else 1
    tiling = Tiling(z.shape, mr, nv * v, p["t"], p["s"], p["gr"], p["gc"])
    ahead = epilogue.ahead(views, nv * v) if epilogue and tiling.fat else ""
    if ahead and kt == k:
        kt = max(k // mr // 4 * 4, min(k, 4))
    main = k // kt * kt if kt < k else k // xv * xv
    finish = epilogue.finish(views, v) if epilogue else plain_finish(positions[2], zu)
    y_last = n - yu if len(y.axis_modes(2)) < 2 else (n - 1) // yu * yu
    nest = outer_nest(tiling, positions[:2], k, (main, xv, x_axis), (yu, y_last), finish, x_image)
    columns = separable(y, 2, nv * v)
    defines: dict[str, str | int | float] = {
        "NV": nv,
        "V": v,
        "VT": _vector(v),
        "YP": nv * v // yu,
        "YU": yu,
        "YLAST": y_last,
        "ZU": zu,
        "XV": xv,
        "XSEP": int(separable(x, 1, mr)),
        **_k_loop(x, y, kt, 1, 4 if kt >= 4 else 1),
    }
    preamble = [
        compose_load("LOAD_Y", roles[1], nv, v, yu, columns, image=y_image),
        y_edge(roles[1], nv, v, yu, y_image),
        f"#define VSTORE(z,p) {f'vstore{v}(z,0,p)' if v > 1 else '(p)[0]=(z)'}",
    ]
    if epilogue:
        preamble += [f"#define VLOAD(p) {f'vload{v}(0,p)' if v > 1 else '(p)[0]'}", epilogue.code(views, v), ahead]
        defines |= epilogue.defines(v, epilogue.is_rolled(mr * nv * v, v, tiling.fat))
    elif zu > 1:
        preamble.append(compose_store(roles[2], v, zu))
    if xv > 1:
        preamble.append(load_x(roles[0], x_axis, xv, x_image))
    return "contraction_outer", tiling, nest, defines, "\n".join(preamble), images


def _images(p: dict[str, int], positions: tuple[int, int, int], x_image: bool, y_image: bool) -> tuple[int, ...] | None:
    """The operands read through images, None where a variant that is to read so has none."""
    images = tuple(position for position, read in zip(positions, (x_image, y_image), strict=False) if read)
    return images if images or "image" not in p else None


def _dot(
    p: dict[str, int], operands: tuple[Operand, ...], positions: tuple[int, int, int], epilogue: Epilogue | None
) -> _Made | None:
    v = p["v"]
    xu, yu = piece_width(operands[positions[0]][0], 2, v), piece_width(operands[positions[1]][0], 1, v)
    return None if min(xu, yu) < 4 else _along_k(p, operands, positions, epilogue, v, (xu, yu))


def _tile(
    p: dict[str, int], operands: tuple[Operand, ...], positions: tuple[int, int, int], epilogue: Epilogue | None
) -> _Made | None:
    x, y, _ = (operands[position][0] for position in positions)
    steps, inner = y.run(1), y.axis_modes(2)
    if not 4 <= steps < p["v"] or p["v"] % steps or not inner or inner[-1].stride != steps:
        return None
    columns, xu = p["v"] // steps, piece_width(x, 2, steps)
    if inner[-1].extent % columns or p["nr"] % columns or xu < 4:
        return None
    return _along_k(p, operands, positions, epilogue, steps, (xu, steps))


def _along_k(
    p: dict[str, int],
    operands: tuple[Operand, ...],
    positions: tuple[int, int, int],
    epilogue: Epilogue | None,
    steps: int,
    pieces: tuple[int, int],
) -> _Made | None:
    """Vectors of ``steps`` along k (times columns, where that is less than a vector), read in ``pieces`` of X and Y."""
    roles = [operands[position] for position in positions]
    x, y, z = (layout for layout, _ in roles)
    views = tuple(layout for layout, _ in operands)
    (xu, yu), mr, nr, v = pieces, p["mr"], p["nr"], p["v"]
    k, kt, columns = x.shape[2], inner_tile(x, y), v // steps
    if k < steps:
        return None
    x_image, y_image = (k % steps == 0 and columns == 1 and in_texels(*seen, p) for seen in ((x, 2), (y, 1)))
    images = _images(p, positions, x_image, y_image)
    if images is None:
        return None
    xu, yu = LANES if x_image else xu, LANES if y_image else yu
    if kt == k:
        kt = k // steps * steps
    elif kt % steps:
        kt = steps
        if not (separable(x, 2, steps) and separable(y, 1, steps)):
            return None
    zu, zg = (4 if nr % 4 == 0 and z.vectorizes(2, 4) else 1), 1
    if epilogue:
        zu = min(nr & -nr, v)
        zg = min(mr & -mr, v // zu)
    tiling = Tiling(z.shape, mr, nr, p["t"], p["s"], p["gr"], p["gc"])
    finish = epilogue.finish(views, zu) if epilogue else plain_finish(positions[2], zu)
    nest = dot_nest(tiling, positions[:2], k, steps, (xu, yu), columns, finish)
    defines: dict[str, str | int | float] = {
        "NR": nr,
        "Q": columns,
        "KV": steps,
        "V": v,
        "VT": _vector(v),
        "ZU": zu,
        "ZG": zg,
        "XSEP": int(columns == 1 and separable(x, 1, mr)),
        "YSEP": int(separable(y, 2, nr)),
        **_k_loop(x, y, kt, steps, 2 if kt >= 2 * steps else 1),
    }
    preamble = [
        compose_load("XLOAD", roles[0], 1, steps, xu, True, axis=2, repeat=columns, image=x_image),
        compose_load("YLOAD", roles[1], 1, v, yu, True, axis=1, image=y_image)
        if columns == 1
        else f"#define YLOAD(p) {load_c(roles[1][1], v, 'p', False)}",
        *(lane_sums(v) if columns == 1 else group_sums(v, columns)),
    ]
    if epilogue:
        rolled = epilogue.is_rolled(mr * nr, zu * zg, tiling.fat)
        preamble += [_sums(zg, zu, rolled), epilogue.code(views, zu, zg)]
        defines |= epilogue.defines(zu * zg, rolled)
    elif zu > 1:
        preamble.append(compose_store(roles[2], 4, 4))
    return "contraction_dot", tiling, nest, defines, "\n".join(preamble), images


def _sums(rows: int, columns: int, rolled: bool) -> str:
    """``SUMS(r,c)``: sums of some rows as one vector; by name, so that they stay in registers, but not in a loop."""
    starts = [f"((r)+{row})*NR+(c)" for row in range(rows)]
    if rolled and columns > 1:
        parts = [f"vload{columns}(0,out+{start})" for start in starts]
    else:
        parts = [f"out[{start}+{column}]" for start in starts for column in range(columns)]
    joined = parts[0] if len(parts) == 1 else f"(float{rows * columns})({','.join(parts)})"
    return f"#define SUMS(r,c) {joined}"


def _any(
    p: dict[str, int], operands: tuple[Operand, ...], positions: tuple[int, int, int], epilogue: Epilogue | None
) -> _Made:
    views = tuple(layout for layout, _ in operands)
    x, z = views[positions[0]], views[positions[2]]
    tiling = Tiling(z.shape, p["mr"], p["nr"], 1, 1, p["gr"], p["gc"])
    finish = epilogue.finish(views, 1) if epilogue else plain_finish(positions[2], 1)
    nest = any_nest(tiling, positions[:2], x.shape[2], finish)
    defines: dict[str, str | int | float] = {"NR": p["nr"], "KN": x.shape[2]}
    if epilogue is None:
        return "contraction_any", tiling, nest, defines, "", ()
    return "contraction_any", tiling, nest, defines | epilogue.defines(1, rolled=True), epilogue.code(views, 1), ()


def _vector(v: int) -> str:
    return f"float{v}" if v > 1 else "float"


def _k_loop(x: Layout, y: Layout, kt: int, step: int, unroll: int) -> dict[str, str | int | float]:
    """Tiles along k, and the stride of ``step`` within a tile (one mode, or else the tile is a single step)."""
    k = x.shape[2]
    strides = [modes[-1].stride if modes else 0 for modes in (x.axis_modes(2), y.axis_modes(1))]
    return {
        "KN": k,
        "KT": kt,
        "KMAIN": k // kt * kt,
        "KU": kt // step if kt // step <= 4 * unroll else unroll,
        "XKS": strides[0] * step,
        "YKS": strides[1] * step,
    }
