"""What both ways of calculating attention share: the op taken apart, its programs as C, and how operands are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernels.expr_c import expr_flops, expr_function, used_inputs
from kernels.families.common import math_c
from kernels.memory_c import CTYPES
from kernels.spec import OpSpec
from layoutopt.expr import Builder, is_cheap, kind_of
from layoutopt.graph import Expr
from layoutopt.layout import Layout

__all__ = ["Form", "Reader", "programs_c", "reader"]

_GRAD = "attention_grad"
_CHEAP = 6
"""Instructions of a mask that is worth evaluating twice."""


@dataclass(frozen=True)
class Form:
    """Sizes, operand positions and programs of an attention op.

    Attributes:
        b, m, n, d, e: heads, rows, keys, features of queries and of values.
        extras: positions of the programs' further operands.
        outputs: position of the first output.
    """

    spec: OpSpec
    b: int
    m: int
    n: int
    d: int
    e: int
    extras: tuple[int, ...]
    outputs: int

    @staticmethod
    @lru_cache(maxsize=1 << 12)
    def of(spec: OpSpec) -> Form:
        """From the op's spec."""
        (b, m, d), (_, n, _), (_, _, e) = spec.shapes[:3]
        first = 7 if spec.kind == _GRAD else 3
        return Form(spec, b, m, n, d, e, tuple(range(first, spec.inputs)), spec.inputs)

    @property
    def alpha(self) -> float:
        """Factor of the scores."""
        return float(self.spec.attr("alpha", 1.0))

    @property
    def beta(self) -> float:
        """Factor of the output's gradient."""
        return float(self.spec.attr("beta", 1.0))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the programs' inputs: a score (or its gradient), the further operands, the score itself."""
        return ("float32", *(self.spec.dtypes[p] for p in self.extras), "float32")

    def programs(self) -> dict[str, Expr]:
        """SCORE always; DROP, GRAD and MASK (the score where q·k is 0) where there are such."""
        out = {"SCORE": self.spec.attr("score")}
        for key in ("drop", "grad"):
            if self.spec.attr(key) is not None:
                out[key.upper()] = self.spec.attr(key)
        mask = _at_zero(self.spec.attr("score"), self.dtypes)
        if mask is not None:
            out["MASK"] = mask
        return out

    def read(self, names: Iterable[str]) -> tuple[int, ...]:
        """Positions of the further operands that some programs read."""
        programs = self.programs()
        last = 1 + len(self.extras)
        used = {i for name in names if name in programs for i in used_inputs(programs[name]) if 0 < i < last}
        return tuple(self.extras[i - 1] for i in sorted(used))

    def flops_each(self, names: Iterable[str]) -> int:
        """Arithmetic of a score in its programs and an exponential."""
        programs = self.programs()
        return 20 + sum(expr_flops(programs[name]) for name in names if name in programs and name != "MASK")


@lru_cache(maxsize=256)
def _at_zero(score: Expr, dtypes: tuple[str, ...]) -> Expr | None:
    """The program at a score of 0, if that says anything and costs little: what masks do then shows."""
    builder = Builder([kind_of(dtype) for dtype in dtypes])
    refs = [("c", 0.0), *(("x", i) for i in range(1, len(dtypes)))]
    (result,) = builder.inline(score, refs)[:1]
    expr = builder.finish([result])
    return expr if used_inputs(expr) and is_cheap(expr, _CHEAP) else None


def programs_c(form: Form, names: Sequence[str], width: int) -> str:
    """C of the programs, and of ``exp_s`` and ``exp_v``.

    A program is a function over vectors along the keys and macros that load its operands at [b, row, key] and call it:
    ``SCORE_V(out, in, b, row, key)``, and ``SCORE_P`` where the vector passes the last key, whose operands then stand
    for those of keys that do not exist. ``GRAD_…`` takes the score behind ``in``. ``LANES`` counts from 0.
    """
    programs = form.programs()
    text = [math_c(width)]
    vector = str(width) if width > 1 else ""
    lanes = ",".join(map(str, range(width)))
    text.append(f"#define LANES ((int{vector})({lanes}))")
    for name in names:
        if name not in programs:
            continue
        function = name.lower() + "_program"
        text.append(expr_function(function, programs[name], form.dtypes, ("float32",), width))
        for suffix in "VP" if width > 1 else "V":
            args = [_argument(form, i, suffix, width) for i in used_inputs(programs[name])]
            more = "raw," if name == "GRAD" else ""
            call = ", ".join([*args, "&(out)"])
            text.append(f"#define {name}_{suffix}(out,in,{more}b,row,key) {function}({call})")
    return "\n".join(text)


def _argument(form: Form, i: int, suffix: str, width: int) -> str:
    if i == 0 or i > len(form.extras):
        return "raw" if i else "in"
    if width == 1:
        return f"E{i - 1}_AT(b,row,key)"
    if suffix == "V":
        return f"E{i - 1}_LOAD{width}(b,row,key)"
    ctype = CTYPES[form.spec.dtypes[form.extras[i - 1]]]
    each = ",".join(f"E{i - 1}_AT(b,row,min((key)+{lane},{form.n - 1}))" for lane in range(width))
    return f"(({ctype}{width})({each}))"


@dataclass(frozen=True)
class Reader:
    """How a matrix [b, row, feature] is read or written: vectors of ``width`` along ``axis`` (1: rows, 2: features)."""

    width: int
    axis: int


@lru_cache(maxsize=1 << 14)
def reader(layout: Layout, widest: int, rows: int) -> Reader:
    """The widest vectors that are contiguous and fit the extent, along the features if there is a choice.

    Args:
        layout: of a matrix [b, row, feature].
        widest: lanes at most, a power of two.
        rows: blocks of rows begin at multiples of this, and so must vectors of rows.
    """
    width = widest
    while width > 1:
        for axis in (2, 1):
            fits = layout.shape[axis] >= width and (axis == 2 or rows % width == 0)
            if fits and layout.vectorizes(axis, width):
                return Reader(width, axis)
        width //= 2
    strides = {axis: modes[-1].stride if (modes := layout.axis_modes(axis)) else 0 for axis in (1, 2)}
    return Reader(1, 1 if 0 < strides[1] < strides[2] else 2)
