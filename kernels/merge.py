"""Many kernel sources as one program: a compiler that parses its built-in header once is several times faster.

PoCL spends most of a small program's build on its own headers (about 70 ms, whatever the kernel), so that a hundred
kernels built one by one cost seconds. Each source here becomes a section of one text: its functions get a suffix of
their own by ``#define``, and every macro that it defines is undefined behind it. A source that declares types or
constants at file scope is left alone, since their names would need the same care.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["mergeable", "merged", "section_suffix"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_DECLARATION = re.compile(r"\b(?:typedef|struct|union|enum|__constant|constant)\b")
_WORD_BEFORE = re.compile(r"(\w+)\s*$")
_MACRO_WITH_BODY = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([^)]*)\)((?:[^\n\\]|\\.)*)", re.MULTILINE | re.DOTALL)
_PASTED = re.compile(r"(\w+)\s*##\s*(\w+)")


def section_suffix(position: int) -> str:
    """What the functions of section ``position`` end in."""
    return f"__{position}"


def _file_scope(source: str) -> tuple[str, list[str]]:
    """Text outside all functions, and the header of every function body, preprocessor lines and comments removed."""
    code = _DIRECTIVE.sub("", _COMMENT.sub(" ", source))
    outside: list[str] = []
    headers: list[str] = []
    depth, start = 0, 0
    for at, char in enumerate(code):
        if char == "{":
            if depth == 0:
                headers.append(code[start:at])
            depth += 1
        elif char == "}":
            depth -= 1
            start = at + 1
        elif depth == 0:
            if char == ";":
                start = at + 1
            outside.append(char)
    return "".join(outside), headers


def _function_name(header: str) -> str | None:
    """The name in ``static float f(int x)``; None where the header is no function's."""
    text = header.rstrip()
    if not text.endswith(")"):
        return None
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            match = _WORD_BEFORE.search(text[:at])
            return match[1] if match else None
    return None


def _arguments(text: str) -> list[str]:
    """The arguments of a macro call, from the text behind its opening parenthesis."""
    out, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if depth == 0 and char in ",)":
            out.append(text[start:at].strip())
            start = at + 1
            if char == ")":
                break
        depth += {"(": 1, ")": -1}.get(char, 0)
    return out


def _pasted_names(source: str, outside: str) -> set[str]:
    """Names that macros called at file scope paste together: ``MATH(float, _s)`` may define ``exp##S``."""
    names = set()
    for macro, parameters, body in _MACRO_WITH_BODY.findall(source):
        if "##" not in body or "{" not in body:
            continue
        formal = [p.strip() for p in parameters.split(",")]
        for call in re.finditer(rf"\b{macro}\s*\(", outside):
            actual = dict(zip(formal, _arguments(outside[call.end() :]), strict=False))
            pairs = _PASTED.findall(body)
            names |= {actual.get(a, a) + actual.get(b, b) for a, b in pairs}
    return {name for name in names if name.isidentifier()}


def _functions(source: str) -> list[str] | None:
    """Names of the functions defined, or None where the source cannot be a section.

    A name that is a function under one condition and a macro under another is fine: the source's own ``#define`` then
    replaces the one in front of the section (compilers warn).
    """
    outside, headers = _file_scope(source)
    macros = set(_DEFINE.findall(source))
    names = set()
    for header in headers:
        name = _function_name(header)
        if name is None or (name in macros and "__kernel" in header):
            return None
        names.add(name)
    return None if _DECLARATION.search(outside) else sorted(names | _pasted_names(source, outside))


def mergeable(source: str) -> bool:
    """Whether ``merged`` can take this source."""
    return bool(_functions(source))


def merged(sources: Sequence[str]) -> str:
    """One program of ``mergeable`` sources: function ``f`` of source ``i`` is called ``f + section_suffix(i)``."""
    parts = []
    for position, source in enumerate(sources):
        names = _functions(source) or []
        renamed = [f"#define {name} {name}{section_suffix(position)}" for name in names]
        forgotten = [f"#undef {name}" for name in dict.fromkeys([*names, *_DEFINE.findall(source)])]
        parts.append("\n".join([*renamed, source, *forgotten, ""]))
    return "\n".join(parts)
