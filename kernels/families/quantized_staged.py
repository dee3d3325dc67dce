"""Products with quantised weights staged through local memory, for GPUs: ``contraction_staged.py``, where Y is words.

A panel of W is loaded word by word along k, neighbouring items taking neighbouring words of a row, and unpacked on its
way into local memory: once for all rows of the group's block. What else there is (blocks, slices, ranges of k that are
added up by a second launch, epilogues) is as in the float32 product. Groups that share a scale have to be made of whole
panels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from kernels.families.codes import levels_c, unpack_c
from kernels.families.contraction_epilogue import plain_finish
from kernels.families.contraction_staged import (
    ending_of,
    item_lanes,
    panel_accesses,
    panel_loader,
    panels_of,
    shifted,
    staged_nest,
    staged_variants,
    sum_launch,
)
from kernels.nest import Access, Bound, Index, Term
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout
from layoutopt.quantize import LEVELS, Format, words_per_row

__all__ = ["build_quantized_staged", "quantized_staged_variants"]


def quantized_staged_variants(family: str, spec: OpSpec, limits: DeviceLimits) -> Iterator[KernelVariant]:
    """The float32 product's, as far as words and groups divide their panels."""
    (m, k), n = spec.shapes[0], spec.shapes[1][0]
    fmt = Format.parse(spec.attr("format"))
    plain = OpSpec("contraction", ((1, m, k), (1, k, n), (1, m, n)), ("float32",) * 3, 2)
    for variant in staged_variants(plain, limits):
        p = dict(variant.params)
        lanes = item_lanes(p)
        whole = p["bn"] * p["bk"] % (fmt.codes_per_word * lanes[0] * lanes[1]) == 0
        _, steps = panels_of(p, k)
        scaled = fmt.group is None or (fmt.group % p["bk"] == 0 and (p["q"] == 1 or steps * p["bk"] % fmt.group == 0))
        if whole and scaled:
            yield replace(variant, family=family)


def build_quantized_staged(
    variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...], views: tuple[Layout, ...]
) -> Kernel | None:
    """The kernel; None where a range of k would be empty.

    Args:
        variant: one of :func:`quantized_staged_variants`.
        spec: of the op.
        layouts: of its operands.
        views: the same, activations as a batch of one.
    """
    p = dict(variant.params)
    panels, steps = panels_of(p, spec.shapes[0][1])
    if (p["q"] - 1) * steps >= panels:
        return None
    launches, scratch = _launches(variant, spec, views)
    return Kernel(spec, variant, layouts, launches, tuple(Scratch("float32", x) for x in scratch), views=views)


@lru_cache(maxsize=1 << 12)
def _launches(
    variant: KernelVariant, spec: OpSpec, views: tuple[Layout, ...]
) -> tuple[tuple[Launch, ...], tuple[Layout, ...]]:
    p, first = dict(variant.params), spec.inputs
    fmt, (_, rows, cols), k, q = Format.parse(spec.attr("format")), views[first].shape, spec.shapes[0][1], p["q"]
    _, steps = panels_of(p, k)
    x_load = panel_loader(views[0], 1, 2)
    ending, alpha = ending_of(spec, views), float(spec.attr("alpha", 1.0))
    target = len(views) if q > 1 else first
    lanes = item_lanes(p)
    items, groups = lanes[0] * lanes[1], (-(-rows // p["bm"]), -(-cols // p["bn"]))
    loads = _loads(p, fmt, k, steps, (0, *x_load))
    nest = staged_nest(p, (1, *groups), steps, loads, plain_finish(target, 4) if q > 1 else ending.finish)
    defines: dict[str, str | int | float] = {
        **{key.upper(): p[key] for key in ("bm", "bn", "bk", "tm", "tn")},
        "QUANTISED": 1,
        "GROUP": fmt.group or k + p["bk"],
        "Y_ARG": "WORDS_ARG, SCALES_ARG",
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
        "YW": fmt.codes_per_word,
        "Y_ALONG_K": 1,
        "YL": p["bn"] * p["bk"] // (fmt.codes_per_word * items),
        "ZW": ending.width,
        "ALPHA": alpha,
    }
    main = Launch(
        "contraction_staged.cl",
        "contraction_staged",
        (("X", 0), ("WORDS", 1), ("SCALES", 2), ("Z", target), *(ending.roles if q == 1 else ())),
        nest,
        (groups[1] * items, groups[0], q),
        (items, 1, 1),
        (*defines.items(), *(ending.defines if q == 1 else ())),
        "\n".join([_unpack_c(fmt), ending.code if q == 1 else ""]),
    )
    if q == 1:
        return (main,), ()
    total = sum_launch(q, (1, rows, cols), (target, first), alpha, ending)
    return (main, total), (Layout.row_major((q, 1, rows, -(-cols // 4) * 4)),)


@lru_cache(maxsize=16)
def _unpack_c(fmt: Format) -> str:
    """``UNPACK(w)``: the numbers of a word; tables of levels are copied to local memory, one place a bank."""
    if fmt.kind not in LEVELS:
        return f"{unpack_c(fmt.kind)}\n#define UNPACK(w) unpack(w)"
    n = fmt.codes_per_word
    parts = ", ".join(f"levels[w >> {4 * i} & 15]" for i in range(n))
    return "\n".join(
        [
            levels_c(fmt.kind),
            f"static float{n} unpack(__local const float *levels, const int w) {{ return (float{n})({parts}); }}",
            "#define UNPACK(w) unpack(levels, w)",
            "#define LEVELS_START __local float levels[16]; levels[l % 16] = LEVELS[l % 16];"
            " barrier(CLK_LOCAL_MEM_FENCE);",
        ]
    )


def _loads(p: dict[str, int], fmt: Format, k: int, steps: int, x: tuple[int, int, int]) -> tuple[Access, ...]:
    """What an item reads of each panel: X, and per word a word and its scale."""
    lanes, bk = item_lanes(p), p["bk"]
    xs = panel_accesses(x, 1, p["bm"], bk, lanes, "r")
    words = panel_accesses((1, 1, 1), 2, p["bn"], bk // fmt.codes_per_word, lanes, "c")
    if p["q"] > 1:
        xs = [shifted(a, 2, steps * bk) for a in xs]
        words = [shifted(a, 1, steps * bk // fmt.codes_per_word) for a in words]
    group, scale = fmt.group, Index()
    if group is not None:
        ranges = (Term("q", steps * bk // group),) if p["q"] > 1 else ()
        scale = Index(0, (*ranges, Term("k", 1, group // bk)))
    out = list(xs)
    for access in words:
        _, word, column = access.index
        assert isinstance(word, Index)
        out.append(Access(1, (column, word)))
        out.append(Access(2, (column, scale), when=(Bound(word, words_per_row(fmt, k)),)))
    return tuple(out)
