"""The registry: which kernels serve an op kind, and which of them accept given layouts."""

from __future__ import annotations

from functools import lru_cache

from kernels.spec import DeviceLimits, Family, Kernel, OpSpec
from layoutopt.errors import GraphError
from layoutopt.layout import Layout

__all__ = ["families", "family_of", "kernels_for"]


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every kernel family."""
    from kernels.families import ALL

    return ALL


def family_of(kind: str) -> Family:
    """The family that serves an op kind.

    Raises:
        GraphError: none does.
    """
    for family in families():
        if kind in family.kinds:
            return family
    raise GraphError(f"no kernel family serves op kind {kind!r}")


def kernels_for(spec: OpSpec, layouts: tuple[Layout, ...], limits: DeviceLimits) -> list[Kernel]:
    """Every kernel that computes ``spec`` over operands in ``layouts`` (views applied)."""
    family = family_of(spec.kind)
    built = (family.build(variant, spec, layouts) for variant in family.variants(spec, limits))
    return [kernel for kernel in built if kernel is not None]
