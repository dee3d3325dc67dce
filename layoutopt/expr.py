"""Pointwise expressions: evaluating an :class:`~layoutopt.graph.Expr` with numpy and building new ones from old.

Types follow the graph's rule and are settled here: comparisons and logic give bool; ``float`` and the functions of
real numbers (exp, log, sqrt, rsqrt, recip, tanh, erf, sin, cos) and ``div`` always give float; neg, abs, add, sub,
mul, max, min and pow give int when every argument is an int, else float; ``where`` gives the type of its two values
(float beats int beats bool). ``rand(seed, stream, index)`` of three ints gives a float, see :func:`random_uniform`;
``round16(x, seed)`` of a float and an int a float, see :func:`round16`. A constant is a bool, an int or a float as
Python writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.graph import Expr

__all__ = [
    "ARITY",
    "Builder",
    "Kind",
    "Ref",
    "evaluate_expr",
    "is_cheap",
    "kind_of",
    "random_uniform",
    "renumber_inputs",
    "result_kind",
    "round16",
    "tidy",
    "used_inputs",
]

Kind = Literal["float", "int", "bool"]

Ref = tuple[str, Any]
"""``("x", i)``, ``("t", j)`` or ``("c", value)``."""

_UNARY_REAL = ["exp", "log", "sqrt", "rsqrt", "recip", "tanh", "erf", "sin", "cos"]
_UNARY = ["neg", "abs", "not", "float", "int", "bool"]
_ARITHMETIC = ["add", "sub", "mul", "max", "min", "pow"]
_COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]
_COMMUTATIVE = {"add", "mul", "max", "min", "eq", "ne", "and", "or"}
ARITY: dict[str, int] = {
    **dict.fromkeys(_UNARY_REAL + _UNARY, 1),
    **dict.fromkeys([*_ARITHMETIC, "div", "and", "or", *_COMPARE], 2),
    "where": 3,
    "rand": 3,
    "round16": 2,
}
"""Number of arguments per operation."""


def _erf(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return np.asarray(erf(x))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Scrambles 32 bits one to one: the finalizer that Wellons found by search ("lowbias32", bias 0.17)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> 16))


def random_uniform(seed: np.ndarray, stream: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Random numbers that depend on their arguments alone, in [0, 1) by steps of 2⁻²⁴ (exact in float32).

    With ``k = mix(seed + 0x9E3779B9 * stream)``, 32-bit arithmetic throughout: ``mix(mix(index + k) + mix(k ^ seed))``,
    its upper 24 bits. ``kernels/cl/math.cl`` calculates the same bits, so that a dropout mask can be calculated again
    wherever it is needed, on any device.

    Args:
        seed: changes with every step.
        stream: one number per random tensor of the step.
        index: one number per element.

    Returns:
        float64.
    """
    s, t, i = (np.asarray(np.asarray(x).astype(np.int64) & 0xFFFFFFFF, np.uint32) for x in (seed, stream, index))
    with np.errstate(over="ignore"):
        key = _mixed(s + t * np.uint32(0x9E3779B9))
        bits = _mixed(_mixed(i + key) + _mixed(key ^ s))
    return (bits >> np.uint32(8)).astype(np.float64) * 2.0**-24


def round16(x: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """Each number as one of the two float16 numbers beside it, at random, with ``x`` for a mean.

    Steps that are small beside a float16's spacing would all be lost in rounding to the nearest; this way they add up.
    The random bits are a hash of the seed and of the number itself (as float32), so that no place needs to be known.
    What lies beyond the largest float16 becomes that, NaN stays NaN.

    Args:
        x: numbers.
        seed: changes with every step.

    Returns:
        float32.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    own = np.asarray(np.asarray(seed).astype(np.int64) & 0xFFFFFFFF, np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        noise = _mixed(bits ^ _mixed(own)) >> np.uint32(19)
        normal = ((bits + noise) & np.uint32(0xFFFFE000)).view(np.float32)
        size = np.abs(np.asarray(x, np.float32))
        steps = np.floor(np.where(size < 2.0**-14, size, 0) * 2.0**24 + noise * 2.0**-13)
        tiny = np.copysign(steps * 2.0**-24, np.asarray(x, np.float32)).astype(np.float32)
        found = np.where(size < 2.0**-14, tiny, normal)
    return np.asarray(np.clip(found, np.float32(-65504), np.float32(65504)), np.float32)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "recip": lambda x: 1 / x,
    "tanh": np.tanh,
    "erf": _erf,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "where": np.where,
}


def evaluate_expr(expr: Expr, inputs: Sequence[np.ndarray], dtype: Any = np.float64) -> list[np.ndarray]:
    """The results of a pointwise program, one array per result (constants alone give 0-d arrays).

    Args:
        expr: the program.
        inputs: one array per input, of equal or broadcastable shapes: bool, int or float.
        dtype: the float type to calculate in.

    Raises:
        GraphError: an unknown operation, or a reference to an input or instruction that does not exist.
    """
    values: list[np.ndarray] = []
    given = [_typed(np.asarray(x), dtype) for x in inputs]

    def fetch(ref: Ref) -> np.ndarray:
        kind, key = ref
        if kind == "c":
            return _typed(np.asarray(key), dtype)
        source = given if kind == "x" else values
        if not 0 <= key < len(source):
            raise GraphError(
                f"expression reference {tuple(ref)} is out of range: {len(source)} such values exist there"
            )
        return source[key]

    with np.errstate(all="ignore"):
        for name, *refs in expr.code:
            if ARITY.get(name) != len(refs):
                known = ", ".join(sorted(ARITY))
                raise GraphError(
                    f"expression instruction {name!r} with {len(refs)} arguments; known operations: {known}"
                )
            values.append(_apply(name, [fetch(r) for r in refs], dtype))
    return [fetch(ref) for ref in expr.results]


def _typed(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in the working type, integers wide enough not to overflow."""
    if x.dtype.kind == "f":
        return x.astype(dtype, copy=False)
    return x if x.dtype.kind == "b" else x.astype(np.int64, copy=False)


def _apply(name: str, args: list[np.ndarray], dtype: Any) -> np.ndarray:
    if name == "float":
        return args[0].astype(dtype)
    if name == "int":
        return np.trunc(args[0]).astype(np.int64)
    if name == "bool":
        return args[0] != 0
    if name == "round16":
        return round16(*args).astype(dtype)
    if name == "rand":
        return np.asarray(random_uniform(*args).astype(dtype))
    if name in _UNARY_REAL or name == "div":
        args = [a.astype(dtype, copy=False) for a in args]
    elif name in _ARITHMETIC or name in ("neg", "abs"):
        if any(a.dtype.kind != "i" for a in args):
            args = [a.astype(dtype, copy=False) for a in args]
        elif name == "pow" and np.any(args[1] < 0):
            raise GraphError("expression pow of an integer has a negative exponent: convert the base to float first")
    elif name == "where":
        chosen = args[1:]
        if any(a.dtype.kind == "f" for a in chosen):
            chosen = [a.astype(dtype, copy=False) for a in chosen]
        args = [args[0] != 0, *chosen]
    return np.asarray(_FUNCTIONS[name](*args))


# ---- kinds of values ----------------------------------------------------------------------------------------------


def kind_of(dtype: str) -> Kind:
    """The kind of value that a tensor dtype holds."""
    return {"float32": "float", "float16": "float", "int32": "int", "bool": "bool"}[dtype]  # type: ignore[return-value]


def _constant_kind(value: Any) -> Kind:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def result_kind(name: str, kinds: Sequence[Kind]) -> Kind:
    """What an operation gives for arguments of the given kinds."""
    if name in _COMPARE or name in ("not", "and", "or", "bool"):
        return "bool"
    if name == "int":
        return "int"
    if name == "where":
        return "float" if "float" in kinds[1:] else "int" if "int" in kinds[1:] else "bool"
    if name in _ARITHMETIC or name in ("neg", "abs"):
        return "int" if all(k == "int" for k in kinds) else "float"
    return "float"


def is_cheap(expr: Expr, most: int) -> bool:
    """Whether a program is at most ``most`` instructions and none of them is a transcendental function."""
    costly = {*_UNARY_REAL, "pow"}
    return len(expr.code) <= most and not any(i[0] in costly for i in expr.code)


# ---- building -----------------------------------------------------------------------------------------------------


class Builder:
    """Collects instructions; equal ones are shared, constants folded and steps that change nothing dropped.

    Args:
        kinds: the kind of each input; append to it as inputs are added.
    """

    def __init__(self, kinds: Sequence[Kind] = ()) -> None:
        self.kinds: list[Kind] = list(kinds)
        self._code: list[tuple[Any, ...]] = []
        self._code_kinds: list[Kind] = []
        self._known: dict[Any, int] = {}

    def kind(self, ref: Ref) -> Kind:
        """The kind of a reference's value."""
        if ref[0] == "c":
            return _constant_kind(ref[1])
        return self.kinds[ref[1]] if ref[0] == "x" else self._code_kinds[ref[1]]

    def cast(self, ref: Ref, kind: Kind) -> Ref:
        """The value converted as storing it in a tensor of that kind would."""
        return ref if self.kind(ref) == kind else self.emit(kind, ref)

    def emit(self, name: str, *refs: Ref) -> Ref:
        """Add an instruction; the reference returned may be an older one or a constant."""
        if ARITY.get(name) != len(refs):
            raise GraphError(f"expression operation {name!r} with {len(refs)} arguments is not known")
        shorter = self._shorten(name, refs)
        if shorter is not None:
            return shorter
        key = (name, *map(_ref_key, refs))
        if name in _COMMUTATIVE:
            key = (name, *sorted(key[1:], key=repr))
        if key not in self._known:
            self._known[key] = len(self._code)
            self._code.append((name, *refs))
            self._code_kinds.append(result_kind(name, [self.kind(r) for r in refs]))
        return ("t", self._known[key])

    def inline(self, expr: Expr, inputs: Sequence[Ref]) -> list[Ref]:
        """Add a whole program whose inputs are the given references.

        Returns:
            A reference per result.
        """
        made: list[Ref] = []

        def translate(ref: Ref) -> Ref:
            kind, key = ref
            return ("c", key) if kind == "c" else inputs[key] if kind == "x" else made[key]

        for name, *refs in expr.code:
            made.append(self.emit(name, *map(translate, refs)))
        return [translate(r) for r in expr.results]

    def finish(self, results: Sequence[Ref]) -> Expr:
        """The program without instructions that nothing uses."""
        live: set[int] = set()
        stack = [r[1] for r in results if r[0] == "t"]
        while stack:
            j = stack.pop()
            if j not in live:
                live.add(j)
                stack += [r[1] for r in self._code[j][1:] if r[0] == "t"]
        number = {old: new for new, old in enumerate(sorted(live))}

        def renumber(ref: Ref) -> Ref:
            return ("t", number[ref[1]]) if ref[0] == "t" else (ref[0], ref[1])

        code = tuple((self._code[j][0], *map(renumber, self._code[j][1:])) for j in sorted(live))
        return Expr(code, tuple(map(renumber, results)))

    def _shorten(self, name: str, refs: tuple[Ref, ...]) -> Ref | None:
        """An equal value that needs no new instruction (or a cheaper one), or None."""
        kinds = [self.kind(r) for r in refs]
        if all(r[0] == "c" for r in refs):
            return _fold(name, refs)
        if name in ("float", "int", "bool") and kinds[0] == name:
            return refs[0]
        gives = result_kind(name, kinds)
        if name in ("neg", "not"):
            inner = self._code[refs[0][1]] if refs[0][0] == "t" else ("",)
            if inner[0] == name and self.kind(inner[1]) == gives:
                return inner[1]
        if name == "where" and refs[0][0] == "c":
            return self.cast(refs[1] if refs[0][1] else refs[2], gives)
        if name == "where" and _ref_key(refs[1]) == _ref_key(refs[2]):
            return refs[1]
        if len(refs) == 2:
            return self._shorten_pair(name, refs[0], refs[1], gives)
        return None

    def _shorten_pair(self, name: str, a: Ref, b: Ref, gives: Kind) -> Ref | None:
        if name in ("add", "mul", "and", "or") and a[0] == "c":
            a, b = b, a
        if name == "sub" and a[0] == "c" and a[1] == 0 and self.kind(b) == gives:
            return self.emit("neg", b)
        if b[0] != "c":
            return None
        value = b[1]
        if name in ("and", "or"):
            settles = bool(value) == (name == "or")
            return ("c", bool(value)) if settles else self.cast(a, "bool")
        neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}
        if name in neutral and value == neutral[name]:
            return self.cast(a, gives)
        if name == "mul" and value == -1 and self.kind(a) == gives:
            return self.emit("neg", a)
        if name == "pow" and value in (2, 3):
            base = self.cast(a, gives)
            square = self.emit("mul", base, base)
            return square if value == 2 else self.emit("mul", square, base)
        if name == "pow" and value in (0.5, -0.5, -1) and gives == "float":
            return self.emit({0.5: "sqrt", -0.5: "rsqrt", -1: "recip"}[value], a)
        return None


def _ref_key(ref: Ref) -> tuple[str, ...]:
    """Constants compare by type and digits: 1, 1.0 and True are different values here."""
    return (ref[0], type(ref[1]).__name__, repr(ref[1]))


def _fold(name: str, refs: Sequence[Ref]) -> Ref | None:
    value = evaluate_expr(Expr(((name, *refs),), (("t", 0),)), [])[0].item()
    return None if value != value else ("c", value)


def tidy(expr: Expr, kinds: Sequence[Kind]) -> Expr:
    """The same program, shortened: constants folded, equal instructions shared, unused ones dropped.

    Args:
        expr: the program.
        kinds: the kind of each of its inputs.
    """
    builder = Builder(kinds)
    return builder.finish(builder.inline(expr, [("x", i) for i in range(len(kinds))]))


def used_inputs(expr: Expr) -> list[int]:
    """Positions of the inputs that a program reads, ascending."""
    refs = [r for i in expr.code for r in i[1:]] + list(expr.results)
    return sorted({r[1] for r in refs if r[0] == "x"})


def renumber_inputs(expr: Expr, number: dict[int, int]) -> Expr:
    """The program with input ``i`` called ``number[i]``."""

    def translate(ref: Ref) -> Ref:
        return ("x", number[ref[1]]) if ref[0] == "x" else (ref[0], ref[1])

    code = tuple((i[0], *map(translate, i[1:])) for i in expr.code)
    return Expr(code, tuple(map(translate, expr.results)))
