"""Words of memory by address, one at a time and eight at a time: what numba has no word for, put to LLVM itself.

A set is searched and shifted at each access of a cache; written as loops, the one branches at every way and the other
moves one entry at a time. LLVM makes the vectors into what a processor has. And an array handed from one compiled
function to the next costs more than looking a line up: bounds, strides and a count of references go along. So what is
behind ``simulator.cache`` hands on addresses; who calls it holds the arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["LANES", "compiled", "count_within", "load", "match_lanes", "push_lanes", "store"]


def _sources() -> str:
    """A hash of this package's code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


_SOURCES = _sources()


def compiled(function: F) -> F:
    """Compile a function with numba, once for all runs, and with no look whether a divisor is zero.

    numba keeps what it compiled for as long as a function's own file stays as it is. It puts functions of other files
    into it, though, and code that has an older layout of the tables in it writes where nothing should be written. So
    what is kept is kept under a name that says what all files were like.
    """
    function.__qualname__ += f"_{_SOURCES}"
    return njit(cache=True, error_model="numpy")(function)


LANES = 8
F = TypeVar("F", bound=Callable[..., Any])
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LANES)
_INDEX = ir.IntType(32)
_INDICES = ir.VectorType(_INDEX, LANES)


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INDICES, [0] * LANES))


def _place(builder: ir.IRBuilder, address: ir.Value, first: ir.Value, kind: ir.Type) -> ir.Value:
    """Where the word ``first`` from an address on is, as the address of a word or of a vector."""
    words = builder.inttoptr(address, _WORD.as_pointer())
    return builder.bitcast(builder.gep(words, [first]), kind.as_pointer())


def _load(builder: ir.IRBuilder, place: ir.Value) -> ir.Value:
    loaded = builder.load(place)
    loaded.align = 8
    return loaded


def _first_set(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """The first lane that holds, or their number."""
    byte = builder.bitcast(lanes, ir.IntType(LANES))
    stopped = builder.or_(builder.zext(byte, _WORD), ir.Constant(_WORD, 1 << LANES))
    return builder.cttz(stopped, ir.Constant(ir.IntType(1), 1))


@intrinsic
def load(typing_context, address, index):  # noqa: ANN001, ANN201 - numba's protocol
    """``load(address, index)``: the int64 that is ``index`` words from a byte address on."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _load(builder, _place(builder, args[0], args[1], _WORD))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store(typing_context, address, index, value):  # noqa: ANN001, ANN201 - numba's protocol
    """``store(address, index, value)``: put an int64 there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address, index, value = args
        builder.store(value, _place(builder, address, index, _WORD)).align = 8
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def count_within(typing_context, address, first, more, shift, line):  # noqa: ANN001, ANN201 - numba's protocol
    """``count_within(address, first, more, shift, line)``: how many of eight ranges in turn lie within one line.

    The words from ``first`` on are their first bytes, their last bytes are ``more`` further. Returns 0 to 8: those
    before the first that reaches another line.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address, first, more, shift, line = args
        starts = _load(builder, _place(builder, address, first, _VECTOR))
        ends = builder.add(starts, _splat(builder, more))
        shift, line = _splat(builder, shift), _splat(builder, line)
        outside = [builder.icmp_unsigned("!=", builder.lshr(x, shift), line) for x in (starts, ends)]
        return _first_set(builder, builder.or_(*outside))

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def match_lanes(typing_context, address, first, key, ignore):  # noqa: ANN001, ANN201 - numba's protocol
    """``match_lanes(address, first, key, ignore)``: which of the eight words from ``first`` on is ``key``.

    They are compared after their bits ``ignore`` were set. Returns 0 to 7, the first that matches, or 8.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address, first, key, ignore = args
        entries = _load(builder, _place(builder, address, first, _VECTOR))
        same = builder.icmp_unsigned("==", builder.or_(entries, _splat(builder, ignore)), _splat(builder, key))
        return _first_set(builder, same)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def push_lanes(typing_context, address, first, last, head):  # noqa: ANN001, ANN201 - numba's protocol
    """``push_lanes(address, first, last, head)``: move words 0 to ``last`` - 1 from ``first`` on up by one.

    ``head`` takes the first place; the word at ``last`` (0 to 7) is lost, those beyond it stay.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address, first, last, head = args
        place = _place(builder, address, first, _VECTOR)
        entries = _load(builder, place)
        moved = ir.Constant(_INDICES, [LANES, *range(LANES - 1)])
        shifted = builder.shuffle_vector(entries, _splat(builder, head), moved)
        lane = ir.Constant(_VECTOR, list(range(LANES)))
        moves = builder.icmp_unsigned("<=", lane, _splat(builder, last))
        builder.store(builder.select(moves, shifted, entries), place).align = 8
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen
