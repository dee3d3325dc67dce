"""Kernel families, one module each; ``ALL`` is the registry that ``kernels.variants`` reads."""

from __future__ import annotations

from kernels.families.attention import ATTENTION
from kernels.families.concat import CONCAT, IOTA
from kernels.families.contraction import CONTRACTION
from kernels.families.convolution import CONVOLUTION
from kernels.families.indexing import INDEXING
from kernels.families.losses import LOSSES
from kernels.families.pointwise import POINTWISE
from kernels.families.quantize import QUANTIZE
from kernels.families.quantized_contraction import QUANTIZED_CONTRACTION
from kernels.families.reduce import REDUCE
from kernels.families.rows import ROWS
from kernels.spec import Family

__all__ = ["ALL"]

ALL: tuple[Family, ...] = (
    *(CONTRACTION, CONVOLUTION, POINTWISE, ROWS, REDUCE, INDEXING, LOSSES, ATTENTION, CONCAT, IOTA),
    *(QUANTIZE, QUANTIZED_CONTRACTION),
)
