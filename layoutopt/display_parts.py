"""What rich displays are made of: tables and numbers, as elements of :mod:`xml.etree`, which escapes every name.

Notebooks show a table as their theme has it, so that nothing here sets a colour or a font; GitHub leaves tables as they
are too, and takes styles, scripts and pictures out of HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as ET

__all__ = ["bytes_text", "count_text", "element", "html", "table", "text_of", "time_text"]

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, however they are escaped."""


def text_of(value: object) -> str:
    """A value as text that a document may hold."""
    return _NOT_XML.sub("\ufffd", str(value))


def element(tag: str, text: object = "", children: Iterable[ET.Element] = (), **attributes: object) -> ET.Element:
    """An element; ``_`` in an attribute's name stands for ``-``."""
    made = ET.Element(tag, {name.replace("_", "-"): text_of(value) for name, value in attributes.items()})
    made.text = text_of(text) or None
    made.extend(children)
    return made


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> ET.Element:
    """A table; the first column is text, the others are numbers where they look like it.

    Args:
        caption: above it.
        head: of the columns; empty for none.
        rows: cells by column.
    """
    made = element("table", children=[element("caption", children=[element("b", caption)])])
    if head:
        made.append(element("thead", children=[element("tr", children=[element("th", name) for name in head])]))
    body = element("tbody")
    for row in rows:
        cells = [element("td", cell, align="left" if i == 0 or not head else "right") for i, cell in enumerate(row)]
        body.append(element("tr", children=cells))
    made.append(body)
    return made


def html(*parts: ET.Element) -> str:
    """Parts one below the other, as HTML that is well-formed XML too."""
    return ET.tostring(element("div", children=parts), encoding="unicode", short_empty_elements=False)


def bytes_text(size: float) -> str:
    """Bytes in the unit that suits them: ``1.5 MiB``."""
    return _in_units(size, 1024, ("B", "KiB", "MiB", "GiB"))


def time_text(ns: float) -> str:
    """Nanoseconds in the unit that suits them: ``1.5 ms``."""
    return _in_units(ns, 1000, ("ns", "µs", "ms", "s"))


def _in_units(value: float, step: int, units: tuple[str, ...]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if value < step:
            return f"{value:.4g} {unit}"
        value /= step
    return f"{value:.4g} {largest}"


def count_text(number: float) -> str:
    """A count, with commas."""
    return f"{number:,.0f}"
