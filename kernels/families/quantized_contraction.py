"""Contraction with quantised weights: a[m,k] · Wᵀ, where rows of words and scales stand for W[n,k].

Weights stay packed in global memory and are unpacked inside the kernel: a block of ``kb`` steps of k and of the columns
that a work group makes becomes a tile of floats, once, in private memory on a CPU (one fat item, which multiplies it
with ``t`` register tiles of rows) or in local memory on a GPU (``gr``×``gc`` thin items). From there it is the outer
product of ``contraction.py``, with any layout of the activations and any epilogue. Words are loaded in vectors along n
where their layout has them, else one by one: each is four or eight weights, so that hardly matters. On a GPU both
operands may also go through local memory (``quantized_staged.py``).

Axes of the kernel are (r, k), (c, word), (c, group) and (r, c), those of X and Z behind a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

from kernels.families.codes import code_defines, levels_c, select_c
from kernels.families.common import any_image
from kernels.families.contraction_code import compose_store, load_x
from kernels.families.contraction_epilogue import Finish, epilogue_of, plain_finish
from kernels.families.contraction_nest import Tiling, tile_ends
from kernels.families.quantized_staged import build_quantized_staged, quantized_staged_variants
from kernels.nest import NEVER, Access, Bound, Index, Loop, Nest, Phase, Term, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec
from layoutopt.layout import LANES, Layout
from layoutopt.quantize import LEVELS, Format

__all__ = ["QUANTIZED_CONTRACTION", "QuantizedContraction"]

_TILES = {
    16: ((8, 2), (8, 3), (12, 2), (8, 1), (2, 2), (2, 1)),
    8: ((6, 2), (4, 3), (4, 2), (2, 2), (2, 1)),
    4: ((8, 2), (4, 2), (8, 1), (2, 1)),
}
_GPU_TILES, _GPU_FEW = ((4, 1), (8, 1), (8, 2)), ((1, 1), (4, 1))
_FEW_ROWS = 16
"""Rows up to which a GPU's groups are wide and flat."""
_LEVELS_BYTES = 64
_STEPS, _GPU_STEPS = 128, 64
"""Steps of k that are unpacked at once: on a CPU the tile of two vectors across takes 16 KiB of the nearest cache."""
_MOST_ROWS = 256
"""Rows of a fat item: what unpacking costs is shared among them, and their sums lie in private memory."""
_GROUPS_PER_UNIT = 4
_TAIL = 8
"""Steps of k are blocked in multiples of this: what every format's words and groups divide or are divided by."""


class QuantizedContraction:
    """The family's singleton; see the module docstring."""

    name = "quantized_contraction"
    kinds: tuple[str, ...] = ("quantized_contraction",)

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Register tiles that fit the shape."""
        (m, k), n = spec.shapes[0], spec.shapes[1][0]
        fmt = Format.parse(spec.attr("format"))
        made = self._fat(m, n, k, fmt, limits) if limits.kind == "cpu" else self._thin(m, n, k, fmt, limits)
        out = list(dict.fromkeys(KernelVariant(self.name, "outer", tuple(params.items())) for params in made))
        return out if limits.kind == "cpu" else [*out, *quantized_staged_variants(self.name, spec, limits)]

    @staticmethod
    def _fat(m: int, n: int, k: int, fmt: Format, limits: DeviceLimits) -> Iterator[dict[str, int]]:
        v = next((w for w in (16, 8) if w <= limits.simd_width), 4)
        while v > 4 and v >= 2 * n:
            v //= 2
        for mr, nv in _TILES[v]:
            if (mr > 2 and mr >= 2 * m) or (nv > 1 and v * nv >= 2 * n) or (mr == 2 and nv == 1 and v * 2 < 2 * n):
                continue
            tiles, across = -(-m // mr), -(-n // (v * nv))
            down = max(1, -(-_GROUPS_PER_UNIT * limits.compute_units // across))
            t = min(-(-tiles // down), max(1, _MOST_ROWS // mr))
            t = -(-tiles // -(-tiles // t))
            yield {"mr": mr, "nv": nv, "v": v, "t": t, "kb": _block(fmt, k, _STEPS), "x": 1, "gr": 1, "gc": 1}

    @staticmethod
    def _thin(m: int, n: int, k: int, fmt: Format, limits: DeviceLimits) -> Iterator[dict[str, int]]:
        few = m <= _FEW_ROWS
        gr, gc = (2, 32) if few else (8, 16)
        while gr > 1 and gr * gc > limits.max_work_group_size:
            gr //= 2
        for mr, nv in _GPU_FEW if few else _GPU_TILES:
            if nv > 1 and gc * nv * LANES >= 2 * n:
                continue
            wanted = _GPU_STEPS * 16 // (gc * nv)
            while wanted > _TAIL and wanted * gc * nv * 4 * LANES + _LEVELS_BYTES > limits.local_mem_bytes:
                wanted //= 2
            kb = _block(fmt, k, wanted)
            yield {"mr": mr, "nv": nv, "v": LANES, "t": 1, "kb": kb, "x": LANES, "gr": gr, "gc": gc}

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """Any layouts are accepted but images."""
        if any_image(layouts):
            return None
        views = tuple(x if i in (1, 2) else _lifted(x) for i, x in enumerate(layouts))
        if variant.name == "staged":
            return build_quantized_staged(variant, spec, layouts, views)
        return Kernel(spec, variant, layouts, (_launch(variant, spec, views),), views=views)


QUANTIZED_CONTRACTION = QuantizedContraction()


def _block(fmt: Format, k: int, wanted: int) -> int:
    """Steps of k unpacked at once: whole groups, or a part that divides one."""
    if fmt.group is None:
        steps = wanted
    elif fmt.group <= wanted:
        steps = wanted // fmt.group * fmt.group
    else:
        steps = max(d for d in range(_TAIL, wanted + 1, _TAIL) if fmt.group % d == 0)
    return min(steps, -(-k // _TAIL) * _TAIL)


@lru_cache(maxsize=1 << 13)
def _lifted(layout: Layout) -> Layout:
    """A matrix as a batch of one."""
    out = layout.reshape((1, *layout.shape))
    assert out is not None
    return out


@lru_cache(maxsize=1 << 13)
def _launch(variant: KernelVariant, spec: OpSpec, views: tuple[Layout, ...]) -> Launch:
    p, first, x = dict(variant.params), spec.inputs, views[0]
    fmt, k, kb = Format.parse(spec.attr("format")), spec.shapes[0][1], variant.param("kb")
    tiling = Tiling(views[first].shape, p["mr"], p["nv"] * p["v"], p["t"], 1, p["gr"], p["gc"])
    kt = _constant_steps(x, kb)
    xv = p["x"] if kt % p["x"] == 0 and x.vectorizes(2, p["x"]) else 1
    epilogue = epilogue_of(spec)
    z = views[first], spec.dtypes[first]
    zu = next(w for w in (p["v"], 8, 4, 2, 1) if w <= p["v"] and z[0].vectorizes(2, w))
    finish = epilogue.finish(views, p["v"]) if epilogue else plain_finish(first, zu)
    # Neighbouring items take neighbouring words, along whichever axis words are neighbours in memory.
    along_k = not tiling.fat and not views[1].vectorizes(0, LANES)
    lanes = (p["gc"], p["gr"]) if along_k else (p["gr"], p["gc"])
    blocks = _Blocks(fmt, k, kb, xv)
    nest = _nest(tiling, blocks, (p["v"], first), along_k, finish)
    defines: dict[str, str | int | float] = {
        **{key: value for key, value in tiling.defines().items() if key not in ("XI", "YI", "ZI", "CT")},
        **code_defines(fmt),
        "NV": p["nv"],
        "V": p["v"],
        "VT": f"float{p['v']}",
        "GR": p["gr"],
        "GC": p["gc"],
        "LW": lanes[0],
        "LC": lanes[1],
        "DOWN_ITEM": "ci" if along_k else "ri",
        "ACROSS_ITEM": "ri" if along_k else "ci",
        "KN": k,
        "KB": kb,
        "KT": kt,
        "KU": kt if kt <= 16 else 4,
        "SK": blocks.shared,
        "SEGMENTS": -(-kb // blocks.shared),
        "GROUP": fmt.group or max(k, kb),
        "XV": xv,
        "XKS": modes[-1].stride if (modes := x.axis_modes(2)) else 0,
        "XSEP": int(_separable(x, p["mr"])),
        "ALPHA": float(spec.attr("alpha", 1.0)),
    }
    text = [_values_c(fmt, p["v"], tiling.fat)]
    if epilogue:
        text.append(epilogue.code(views, p["v"]))
        rolled = epilogue.is_rolled(p["mr"] * p["nv"] * p["v"], p["v"], tiling.fat)
        defines |= epilogue.defines(p["v"], rolled)
    else:
        text.append(compose_store(z, p["v"], zu))
        defines["ZI"] = "Z_IDX"
    if xv > 1:
        text.append(load_x((x, spec.dtypes[0]), 2, xv))
    roles = (("X", 0), ("WORDS", 1), ("SCALES", 2), ("Z", first), *(epilogue.roles() if epilogue else ()))
    return Launch(
        "quantized_contraction.cl",
        "quantized_contraction",
        roles,
        nest,
        tiling.global_size,
        tiling.local_size,
        tuple(defines.items()),
        "\n".join(text),
    )


def _constant_steps(x: Layout, kb: int) -> int:
    """Steps of k inside a block within which X has one stride."""
    modes = x.axis_modes(2)
    return kb if len(modes) < 2 else gcd(modes[-1].extent, kb)


def _separable(x: Layout, rows: int) -> bool:
    """Whether the offsets of a register tile's rows from its first are constants."""
    inner = 1
    for mode in reversed(x.axis_modes(1)[1:]):
        inner *= mode.extent
        if inner % rows and rows % inner:
            return False
    return True


@lru_cache(maxsize=64)
def _values_c(fmt: Format, v: int, fat: bool) -> str:
    """``VALUE(w,i)``: code ``i`` of a vector of words as a vector of numbers; how its table, if any, is passed on.

    A CPU chooses among the sixteen by the bits of vectors of codes; a GPU looks them up in local memory.
    """
    bits = 32 // fmt.codes_per_word
    none = "#define LEVELS_ARG\n#define LEVELS_PASSED\n#define LEVELS_START"
    if fmt.kind not in LEVELS:
        shifted = f"(w) << {32 - bits} - {bits} * (i) >> {32 - bits}"
        return f"#define VALUE(w,i) convert_float{v}({shifted})\n{none}"
    if fat:
        return f"{select_c(fmt.kind, v)}\n#define VALUE(w,i) chosen((w) >> {bits} * (i))\n{none}"
    looked_up = ",".join(f"levels[c_.s{lane:x}]" for lane in range(v))
    return "\n".join(
        [
            levels_c(fmt.kind),
            f"static float{v} looked_up(__local const float *levels, const int{v} c_)"
            f" {{ return (float{v})({looked_up}); }}",
            f"#define VALUE(w,i) looked_up(levels, (w) >> {bits} * (i) & 15)",
            "#define LEVELS_ARG , __local const float *levels",
            "#define LEVELS_PASSED , levels",
            "#define LEVELS_START __local float levels[16]; const int own = (ri * GC + ci) % 16;"
            " levels[own] = LEVELS[own];",
        ]
    )


class _Blocks:
    """How k is cut: ``kb`` steps are unpacked at once, ``shared`` of them share a scale; X is read ``xv`` at a time."""

    def __init__(self, fmt: Format, k: int, kb: int, xv: int) -> None:
        self.fmt, self.k, self.kb, self.xv = fmt, k, kb, xv
        self.shared = min(fmt.group or kb, kb)

    def scale(self) -> Index:
        """Which scale of a row a segment has."""
        group = self.fmt.group
        if group is None:
            return Index()
        if group <= self.kb:
            return Index(0, (Term("block", self.kb // group), Term("s")))
        return var("block", 1, group // self.kb)


def _nest(tiling: Tiling, blocks: _Blocks, stored: tuple[int, int], along_k: bool, finish: Finish) -> Nest:
    """``stored``: width of the vectors of columns; the first output."""
    v, output = stored
    codes, kb, k = blocks.fmt.codes_per_word, blocks.kb, blocks.k
    words = blocks.shared // codes
    down, across = ("ci", "ri") if along_k else ("ri", "ci")
    lw, lc = (tiling.gc, tiling.gr) if along_k else (tiling.gr, tiling.gc)
    columns = tiling.gc * tiling.nr // v
    fat = tiling.fat
    column = Index(0, (Term("c", columns * v), *(() if fat else (Term(across, v),)), Term("n", lc * v)))
    in_segment = Index(0, (*(() if fat else (Term(down),)), Term("i", lw)))
    word = in_segment + Index(0, (Term("block", kb // codes), Term("s", words)))
    own = (Bound(in_segment, words),) if words % lw else ()
    loops = (
        Loop("block", -(-k // kb)),
        Loop("n", columns // lc),
        Loop("s", -(-kb // blocks.shared)),
        Loop("i", -(-words // lw)),
    )
    unpacked = Phase(
        loops,
        (
            Access(2, (column, blocks.scale()), v, 0, depth=3),
            Access(1, (column, word), v, 0, when=own),
        ),
        4 * codes * v,
    )
    walk, phases = tiling.walk(), [unpacked]
    rows, lives = tiling.rows(), tiling.lives if fat else ()
    for start, times, steps, width in ((0, k // kb, kb, blocks.xv), (k // kb * kb, 1, k % kb, 1)):
        if times * steps == 0:
            continue
        step = Index(start, (Term("block", kb), Term("k", width)))
        xs = tuple(Access(0, (var("b"), r, step), width, 2, clamps=tiling.row_clamp, when=lives) for r in rows)
        # What is read of the tile lies in no operand; the cost model counts it as loads of the first row of the output.
        near = tuple(Access(output, (Index(), Index(), c), v, 2, when=NEVER) for c in tiling.cols(v)) * width
        near = near if fat else ()
        inner = (Loop("block", times), *walk, Loop("k", steps // width))
        phases.append(Phase(inner, xs + near, 2 * tiling.mr * tiling.nr * width))
    ends = tile_ends(tiling, finish, len(walk), tiling.interior)
    phases.append(Phase(walk, ends, finish.flops * tiling.mr * tiling.nr))
    return Nest(tiling.grid(), tuple(phases))
