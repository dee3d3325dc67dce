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


def _functions(source: str) -> list[str] | None:
    """Names of the functions defined, or None where the source cannot be a section."""
    outside, headers = _file_scope(source)
    names = [_function_name(header) for header in headers]
    macros = set(_DEFINE.findall(source))
    if _DECLARATION.search(outside) or any(name is None or name in macros for name in names):
        return None
    return sorted({name for name in names if name})


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
