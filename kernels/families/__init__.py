"""Kernel families, one module each; ``ALL`` is the registry that ``kernels.variants`` reads."""

from __future__ import annotations

from kernels.families.contraction import CONTRACTION
from kernels.families.pointwise import POINTWISE
from kernels.families.reduce import REDUCE
from kernels.families.rows import ROWS
from kernels.spec import Family

__all__ = ["ALL"]

ALL: tuple[Family, ...] = (CONTRACTION, POINTWISE, ROWS, REDUCE)
