"""Pointwise expressions as OpenCL C: an :class:`~layoutopt.graph.Expr` becomes one function per vector width.

Types follow ``layoutopt/expr.py``. Inside a function a bool is what OpenCL's comparisons give: 1 in a scalar, -1 (all
bits) in a vector lane; ``& 1`` makes either of them a number. Maxima and minima propagate NaN as numpy and torch do,
which ``fmax`` does not.
"""

from __future__ import annotations

from functools import lru_cache
from math import isinf, isnan
from typing import Any

from layoutopt.errors import GraphError
from layoutopt.expr import ARITY
from layoutopt.graph import Expr

__all__ = ["expr_flops", "expr_function", "needs_math", "used_inputs"]

_FLOPS = {"exp": 10, "log": 10, "tanh": 20, "erf": 20, "pow": 30, "div": 4, "recip": 4, "sqrt": 4, "rsqrt": 4}
_FLOPS |= {"sin": 20, "cos": 20, "rand": 20, "round16": 20}
_REAL = {"exp", "log", "sqrt", "tanh", "erf", "rsqrt", "sin", "cos"}
_OWN = {"exp", "tanh", "erf", "rand", "round16"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TYPE_OF = {"float32": "f", "float16": "f", "int32": "i", "bool": "b"}
_FLOAT_MAX = 3.4028235677973366e38  # half a unit above the largest float32: from here on literals are infinite
_CHAIN_MAX = 8  # powers up to this are multiplied out

Value = tuple[str, str]
"""Type ("f", "i", "b") and C expression."""


@lru_cache(maxsize=1 << 12)
def used_inputs(expr: Expr) -> tuple[int, ...]:
    """Positions of the inputs that a program reads, ascending."""
    refs = [r for _, *args in expr.code for r in args] + list(expr.results)
    return tuple(sorted({key for kind, key in refs if kind == "x"}))


def needs_math(expr: Expr) -> bool:
    """Whether the function calls what ``cl/math.cl`` defines."""
    return any(name in _OWN for name, *_ in expr.code)


def expr_flops(expr: Expr) -> int:
    """Arithmetic of one element: 1 for a simple operation, more for what hardware does in many steps."""
    return sum(_FLOPS.get(name, 1) for name, *_ in expr.code)


def expr_function(name: str, expr: Expr, inputs: tuple[str, ...], outputs: tuple[str, ...], width: int) -> str:
    """The C function ``static void NAME(x0, x1, …, *y0, *y1, …)`` over vectors of ``width``.

    Args:
        name: the function's name.
        expr: the program.
        inputs: dtype per input; only those that the program reads become parameters.
        outputs: dtype per output.
        width: vector width, 1 for scalars. Bools are passed as uchar vectors, as they are stored.

    exp, tanh, erf, rand and round16 are those of ``cl/math.cl``, which must stand before the function if
    ``needs_math`` says so.

    Raises:
        GraphError: an operation that is not known.
    """
    return _Writer(name, expr, inputs, outputs, "" if width == 1 else str(width)).text()


class _Writer:
    def __init__(self, name: str, expr: Expr, inputs: tuple[str, ...], outputs: tuple[str, ...], suffix: str) -> None:
        self.name, self.expr, self.inputs, self.outputs, self.suffix = name, expr, inputs, outputs, suffix
        self.values: list[Value] = []
        self.lines: list[str] = []
        self.helpers: dict[str, str] = {}

    def text(self) -> str:
        types = {"f": "float", "i": "int", "b": "uchar"}
        params = [f"{types[_TYPE_OF[self.inputs[i]]]}{self.suffix} x{i}" for i in used_inputs(self.expr)]
        params += [f"{types[_TYPE_OF[d]]}{self.suffix} *y{i}" for i, d in enumerate(self.outputs)]
        for j, (op, *refs) in enumerate(self.expr.code):
            if ARITY.get(op) != len(refs):
                raise GraphError(f"expression instruction {op!r} with {len(refs)} arguments is not known")
            kind, value = self._apply(op, [self._fetch(r) for r in refs], refs)
            ctype = "float" if kind == "f" else "int"
            self.lines.append(f"{ctype}{self.suffix} t{j} = {value};")
            self.values.append((kind, f"t{j}"))
        for i, (ref, dtype) in enumerate(zip(self.expr.results, self.outputs, strict=True)):
            kind = _TYPE_OF[dtype]
            value = self._to(kind, self._fetch(ref))
            if kind == "b":
                value = f"convert_uchar{self.suffix}({value} & 1)"
            self.lines.append(f"*y{i} = {value};")
        body = "\n    ".join(self.lines)
        helpers = "".join(text + "\n" for text in self.helpers.values())
        return f"{helpers}static void {self.name}({', '.join(params)})\n{{\n    {body}\n}}"

    def _fetch(self, ref: tuple[str, Any]) -> Value:
        kind, key = ref
        if kind == "t":
            return self.values[key]
        if kind == "x":
            dtype = self.inputs[key]
            if dtype == "bool":
                # Any non-zero byte is true, as in numpy.
                return "b", f"(convert_int{self.suffix}(x{key}) != 0)"
            return _TYPE_OF[dtype], f"x{key}"
        if isinstance(key, bool):
            return "b", f"({self._vector('int')}0 {'==' if key else '!='} {self._vector('int')}0)"
        if isinstance(key, int):
            return "i", f"({self._vector('int')}({key}))"
        return "f", f"({self._vector('float')}({_float(key)}))"

    def _vector(self, ctype: str) -> str:
        return f"({ctype}{self.suffix})"

    def _to(self, kind: str, value: Value) -> str:
        have, text = value
        if have == kind:
            return text
        if kind == "b":
            return f"({text} != {self._vector('float' if have == 'f' else 'int')}0)"
        number = f"({text} & 1)" if have == "b" else text
        if kind == "i":
            return number if have == "b" else f"convert_int{self.suffix}_rtz({number})"
        return f"convert_float{self.suffix}({number})"

    def _select(self, cond: str, yes: str, no: str) -> str:
        # Element by element on vectors too; ``select`` would be a function call on PoCL 3.0.
        return f"({cond} ? {yes} : {no})"

    def _apply(self, op: str, args: list[Value], refs: list[tuple[str, Any]]) -> Value:
        if op in ("float", "int", "bool"):
            kind = op[0]
            return kind, self._to(kind, args[0])
        if op in _REAL:
            name = op + ("_v" if self.suffix else "_s") if op in _OWN else op
            return "f", f"{name}({self._to('f', args[0])})"
        if op == "rand":
            whole = ", ".join(self._to("i", a) for a in args)
            return "f", f"rand_{'v' if self.suffix else 's'}({whole})"
        if op == "round16":
            return "f", f"round16_{'v' if self.suffix else 's'}({self._to('f', args[0])}, {self._to('i', args[1])})"
        if op == "recip":
            return "f", f"({self._vector('float')}1.0f / {self._to('f', args[0])})"
        if op == "not":
            return "b", f"({self._to('b', args[0])} == {self._vector('int')}0)"
        if op in ("and", "or"):
            a, b = (self._to("b", x) for x in args)
            return "b", f"({a} {'&' if op == 'and' else '|'} {b})"
        if op == "where":
            kind = next(k for k in "fib" if k in (args[1][0], args[2][0]))
            return kind, self._select(self._to("b", args[0]), *(self._to(kind, x) for x in args[1:]))
        if op in _COMPARE:
            kind = "f" if any(k == "f" for k, _ in args) else "i"
            a, b = (self._to(kind, x) for x in args)
            return "b", f"({a} {_COMPARE[op]} {b})"
        kind = "i" if op != "div" and all(k == "i" for k, _ in args) else "f"
        texts = [self._to(kind, x) for x in args]
        if op == "pow":
            return kind, self._power(kind, texts[0], texts[1], refs[1][1] if refs[1][0] == "c" else None)
        return kind, self._arithmetic(op, kind, texts)

    def _arithmetic(self, op: str, kind: str, texts: list[str]) -> str:
        if op in _INFIX:
            return f"({texts[0]} {_INFIX[op]} {texts[1]})"
        if op == "neg":
            return f"(-{texts[0]})"
        if op == "abs":
            bits = f"as_float{self.suffix}(as_int{self.suffix}({texts[0]}) & 0x7fffffff)"
            return bits if kind == "f" else self._select(f"({texts[0]} < 0)", f"(-{texts[0]})", texts[0])
        a, b = texts
        return self._select(f"(({a} {'>=' if op == 'max' else '<='} {b}) | ({a} != {a}))", a, b)

    def _power(self, kind: str, base: str, exponent: str, constant: float | None) -> str:
        if constant in range(1, _CHAIN_MAX + 1):
            # The base is a name or a short cast: repeating it costs nothing.
            return "(" + "*".join([base] * int(constant or 1)) + ")"
        if kind == "f":
            return f"sqrt({base})" if constant == 0.5 else f"pow({base}, {exponent})"
        self.helpers["ipow"] = _IPOW.format(w=self.suffix, pick=self._select("((e & 1) != 0)", "r * b", "r"))
        return f"ipow{self.suffix}({base}, {exponent})"


_IPOW = """static int{w} ipow{w}(int{w} b, int{w} e)
{{
    int{w} r = (int{w})1;
    for (int bit = 0; bit < 31; ++bit) {{ r = {pick}; b *= b; e >>= 1; }}
    return r;
}}"""


def _float(value: float) -> str:
    if isnan(value):
        return "NAN"
    if isinf(value) or abs(value) >= _FLOAT_MAX:
        return "INFINITY" if value > 0 else "-INFINITY"
    text = repr(float(value))
    return f"{text}f"
