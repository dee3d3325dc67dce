"""What a contraction does with its finished sums: store them, or run its ``epilogue`` on them and store its results.

The sums of a register tile are finished in vectors along c (axis 2 of the operands as the kernel views them). Every
extra operand is loaded, and every output stored, in the pieces of such a vector that are contiguous in its layout: the
whole vector, shorter ones where tiles are narrower, one value splat where the axis is broadcast, single values else.
Tiles at the border do it value by value. Where rows of a register tile are shorter than the device's vectors, several
of them make one vector, on which the program runs.

The bodies call ``FINISH(v,b,r,c)`` with the sums of some rows, one after the other, and ``FINISH1(v,b,r,c)`` with one
sum; both are generated here. So is ``AHEAD(b,r,c)``: on a CPU, what the epilogue reads of a register tile would be
waited for at its end; asked for while the products are summed, it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from kernels.expr_c import expr_flops, expr_function, needs_math, used_inputs
from kernels.families.common import math_c
from kernels.families.contraction_code import axis_offset, piece_width
from kernels.memory_c import CTYPES
from kernels.spec import Kernel, OpSpec
from layoutopt.graph import DTYPES, PRODUCTS, Expr
from layoutopt.layout import Layout

__all__ = ["Epilogue", "Finish", "epilogue_of", "epilogue_width", "plain_finish"]

_UNROLLED_FLOPS = 64
"""Vector operations of an epilogue beyond which a CPU's register tile is finished in a loop: unrolled they would be
most of the program."""

_LINE_BYTES = 64  # of a cache; requests for more of them than there are do no harm


@dataclass(frozen=True)
class Finish:
    """How the nests see the end of a register tile.

    Attributes:
        accesses: (operand, width, whether it is stored), in program order.
        flops: arithmetic per element.
        own: whether it is a phase of its own: loads and arithmetic come after the sums.
    """

    accesses: tuple[tuple[int, int, bool], ...]
    flops: int = 0
    own: bool = False


def plain_finish(output: int, width: int) -> Finish:
    """Nothing but storing the sums."""
    return Finish(((output, width, True),))


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of an op, independent of layouts.

    Attributes:
        program: input 0 is the sum.
        extras: operand position of each further input of the program, read or not.
        outputs: operand positions.
        dtypes: of all operands.
    """

    program: Expr
    extras: tuple[int, ...]
    outputs: tuple[int, ...]
    dtypes: tuple[str, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.program, self.extras, self.outputs, self.dtypes))

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The extra operands that the program reads."""
        return tuple(self.extras[i - 1] for i in used_inputs(self.program) if i)

    @cached_property
    def flops(self) -> int:
        """Arithmetic per element."""
        return expr_flops(self.program)

    def roles(self) -> tuple[tuple[str, int], ...]:
        """C names of the operands besides X, Y and Z (the first output)."""
        return (*((f"E{p}", p) for p in self.read), *((f"Z{p}", p) for p in self.outputs[1:]))

    def is_rolled(self, elements: int, vector: int, fat: bool) -> bool:
        """Whether a register tile is finished in a loop that stays a loop (see ``_UNROLLED_FLOPS``)."""
        return fat and self.flops * elements > _UNROLLED_FLOPS * vector

    def finish(self, views: tuple[Layout, ...], width: int) -> Finish:
        """For the nest: ``width`` sums at a time."""
        loads = tuple((p, _piece(views[p], width), False) for p in self.read)
        stores = tuple((p, _piece(views[p], width, store=True), True) for p in self.outputs)
        return Finish(loads + stores, self.flops, own=True)

    def defines(self, width: int, rolled: bool) -> dict[str, str | int | float]:
        """Constants of the body: sums finished at a time, and whether in a loop."""
        return {"EPILOGUE": width, "ROLLED": int(rolled)}

    def code(self, views: tuple[Layout, ...], width: int, rows: int = 1) -> str:
        """The program as functions, and ``FINISH`` (over ``rows`` rows of ``width`` sums) and ``FINISH1``."""
        return _code(self, tuple(views[p] for p in (*self.read, *self.outputs)), width, rows)

    def ahead(self, views: tuple[Layout, ...], columns: int) -> str:
        """``AHEAD(b,r,c)`` for ``columns`` of a row; empty where nothing is read that is as large as the result."""
        names = {p: name for name, p in self.roles()}
        asked = "".join(
            f"ASK({names[p]}+{names[p]}_IDX(b,r,(c)+{column}));"
            for p in self.read
            for column in _lines(views[p], columns, DTYPES[self.dtypes[p]])
        )
        return f"#define AHEAD(b,r,c) do{{{asked}}}while(0)" if asked else ""


@lru_cache(maxsize=1 << 12)
def epilogue_of(spec: OpSpec) -> Epilogue | None:
    """The epilogue of a contraction, None where it has none."""
    program = spec.attr("epilogue")
    if program is None:
        return None
    return Epilogue(
        program,
        tuple(range(PRODUCTS[spec.kind], spec.inputs)),
        tuple(range(spec.inputs, len(spec.shapes))),
        spec.dtypes,
    )


def epilogue_width(kernel: Kernel) -> int:
    """How many sums a contraction with an epilogue finishes at a time."""
    return int(dict(kernel.launches[-1].defines)["EPILOGUE"])


@lru_cache(maxsize=1 << 14)
def _code(epilogue: Epilogue, layouts: tuple[Layout, ...], width: int, rows: int) -> str:
    """See ``Epilogue.code``; layouts of the operands read and of the outputs."""
    names = {position: name for name, position in (("Z", epilogue.outputs[0]), *epilogue.roles())}
    read, positions = len(epilogue.read), (*epilogue.read, *epilogue.outputs)
    operands = [(names[p], epilogue.dtypes[p], x) for p, x in zip(positions, layouts, strict=True)]
    text = [_program(epilogue, width * rows)]
    for w, down in sorted({(width, rows), (1, 1)}, reverse=True):
        lanes = w * down
        suffix = "" if lanes == 1 else str(lanes)
        args = ["v_"] if 0 in used_inputs(epilogue.program) else []
        args += [_value(*operand, w, down) for operand in operands[:read]]
        made = stores = ""
        for i, (name, dtype, layout) in enumerate(operands[read:]):
            made += f"{CTYPES[dtype]}{suffix} y{i}_;"
            args.append(f"&y{i}_")
            stores += _store(name, layout, w, down, f"y{i}_")
        body = f"const float{suffix} v_=(v);{made}epilogue_{lanes}({','.join(args)});{stores}"
        text.append(f"#define FINISH{'1' if lanes == 1 else ''}(v,b,r,c) do{{{body}}}while(0)")
    if width * rows == 1:
        text.append("#define FINISH(v,b,r,c) FINISH1(v,b,r,c)")
    text.append("#define MORE_ARGS " + "".join(f",{name}_ARG" for name, _ in epilogue.roles()))
    text.append("#define MORE " + "".join(f",{name}" for name, _ in epilogue.roles()))
    return "\n".join(text)


@lru_cache(maxsize=1 << 12)
def _program(epilogue: Epilogue, width: int) -> str:
    inputs = ("float32", *(epilogue.dtypes[p] for p in epilogue.extras))
    outputs = tuple(epilogue.dtypes[p] for p in epilogue.outputs)
    widths = sorted({width, 1}, reverse=True)
    functions = [expr_function(f"epilogue_{w}", epilogue.program, inputs, outputs, w) for w in widths]
    return "\n".join([*([math_c(width)] if needs_math(epilogue.program) else []), *functions])


def _is_splat(layout: Layout) -> bool:
    return all(mode.stride == 0 for mode in layout.axis_modes(2))


def _piece(layout: Layout, width: int, store: bool = False) -> int:
    """Width of the accesses that a vector along c is made of: all of it at once also where one value is splat."""
    return width if _is_splat(layout) and not store else piece_width(layout, 2, width)


@lru_cache(maxsize=1 << 12)
def _lines(layout: Layout, columns: int, item_bytes: int) -> tuple[int, ...]:
    """The columns with which the cache lines of a tile's row begin; none where a row or a column is broadcast."""
    if any(all(mode.stride == 0 for mode in layout.axis_modes(axis)) for axis in (1, 2)):
        return ()
    found: dict[int, int] = {}
    for column in range(min(columns, layout.shape[2])):
        found.setdefault(axis_offset(layout, 2, column) * item_bytes // _LINE_BYTES, column)
    return tuple(found.values())


def _value(name: str, dtype: str, layout: Layout, width: int, rows: int) -> str:
    piece = _piece(layout, width)
    macro = f"{name}_AT" if piece == 1 else f"{name}_LOAD{piece}"
    parts = [f"{macro}({_place(row, i)})" for row in range(rows) for i in range(0, width, piece)]
    return parts[0] if len(parts) == 1 else f"({CTYPES[dtype]}{width * rows})({','.join(parts)})"


def _store(name: str, layout: Layout, width: int, rows: int, value: str) -> str:
    piece = _piece(layout, width, store=True)
    out = []
    for row in range(rows):
        for i in range(0, width, piece):
            first = row * width + i
            lanes = "" if piece == width * rows else ".s" + "".join(f"{k:x}" for k in range(first, first + piece))
            place = _place(row, i)
            out.append(f"{name}_STORE{piece}({value}{lanes},{place});")
    return "".join(out)


def _place(row: int, column: int) -> str:
    return f"b,{f'(r)+{row}' if row else 'r'},{f'(c)+{column}' if column else 'c'}"
