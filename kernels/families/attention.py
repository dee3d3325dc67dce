"""Attention and its gradient in one kernel each, without the scores ever being stored (online softmax)."""

from __future__ import annotations

from kernels.families.attention_fat import build_fat, fat_variants
from kernels.families.attention_tile import build_tile, tile_variants
from kernels.families.common import any_image
from kernels.spec import DeviceLimits, Kernel, KernelVariant, OpSpec
from layoutopt.layout import Layout

__all__ = ["ATTENTION", "Attention"]


class Attention:
    """The family's singleton."""

    name = "attention"
    kinds: tuple[str, ...] = ("attention", "attention_grad")

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Fat work items for CPUs, tiles of work groups for GPUs."""
        return tile_variants(spec, limits) if limits.kind == "gpu" else fat_variants(spec, limits)

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """None for images."""
        if any_image(layouts):
            return None
        return build_tile(variant, spec, layouts) if variant.name == "tile" else build_fat(variant, spec, layouts)


ATTENTION = Attention()
