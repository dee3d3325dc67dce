"""Contractions that read their operands through images: the texture caches of phones' GPUs, with nothing copied.

An image lies over the buffer that another kernel has written (``image1d_buffer_t``, core OpenCL 1.2), one texel to four
elements, float32 or float16. So reading through images is a matter of the variant, not of the layout: whatever lies in
aligned vectors of four along the axis that a variant loads can be read so, in row-major matrices as in R-Tiles. Results
are written to buffers. On Adreno buffers pass the first cache by and images do not; where both take one way, nothing is
gained.

A variant ``NAME.image`` is ``NAME`` with one parameter more, ``image``: the device's longest image is at least 2 to
this power texels long. Either operand may be read so, or both; a variant that can do neither is not built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kernels.spec import DeviceLimits, KernelVariant
from layoutopt.layout import LANES, Layout

__all__ = ["image_variants", "in_texels", "plain_name"]

_SUFFIX = ".image"
_KINDS = ("outer.n", "outer.m", "dot", "staged")


def image_variants(variants: Iterable[KernelVariant], limits: DeviceLimits) -> Iterator[KernelVariant]:
    """The variants that read through images, of those that read buffers: on GPUs that have such images."""
    texels = limits.image_max_buffer_texels
    aligned = limits.base_align_bytes % (4 * LANES) == 0  # a tensor begins with a texel
    if limits.kind != "gpu" or not limits.image_support or not texels or not aligned:
        return
    for variant in variants:
        if variant.name in _KINDS:
            params = (*variant.params, ("image", texels.bit_length() - 1))
            yield KernelVariant(variant.family, variant.name + _SUFFIX, params)


def plain_name(variant: KernelVariant) -> str:
    """The name of the variant that does the same with buffers."""
    return variant.name.removesuffix(_SUFFIX)


def in_texels(layout: Layout, axis: int, params: dict[str, int]) -> bool:
    """Whether a variant's vectors of four along an axis are texels, all of whose values are in storage.

    Args:
        layout: of a float32 or float16 operand.
        axis: along which it is loaded, in vectors that begin at multiples of four.
        params: of the variant.
    """
    return (
        "image" in params
        and layout.vectorizes(axis, LANES)
        and layout.alignment(axis) % LANES == 0
        and (layout.shape[axis] % LANES == 0 or len(layout.axis_modes(axis)) > 1)
        and LANES <= layout.size_elems <= LANES << params["image"]
    )
