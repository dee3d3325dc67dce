"""matplotlib's SVG as a part of a page: the page's colours and font, names of its own, a title and a description.

matplotlib writes a document for itself: identifiers that repeat from figure to figure, a style sheet, fixed colours.
Here it becomes an element that can stand beside others, and whose colours are the page's variables, so that it follows
a light or a dark theme. An SVG in an ``img`` would need none of this, but could neither use the page's variables nor be
read by those who do not see it.

Part of the face.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from xml.etree import ElementTree

__all__ = ["INK", "PALETTE", "RULE", "embedded"]

INK, RULE = "#20242a", "#c9ced6"
"""Of text and axes, and of what guides the eye; those of the light theme stand for both."""
PALETTE = ("#1f6fb4", "#c2571a", "#2c8a57", "#8a5cc2", "#b03a5b", "#7a6a1e", "#3d7f8c", "#6b7280", "#9a4fa0")
"""Of series."""
_VARIABLES: Mapping[str, str] = {INK: "ink", RULE: "rule"} | {c: f"series-{i}" for i, c in enumerate(PALETTE)}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)


def embedded(figure: Any, key: str, title: str, description: str) -> str:
    """A matplotlib figure as an ``svg`` element.

    Args:
        figure: drawn with :data:`INK`, :data:`RULE` and :data:`PALETTE`.
        key: before every identifier: unique in the page.
        title: its name.
        description: what one sees.
    """
    from matplotlib import rc_context

    data = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(data.getvalue())  # drops comments and the document type
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _renamed(name, value, key))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-desc", "class": "chart"}
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        head = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{key}-{tag}"})
        head.text = text
        root.insert(position, head)
    return ElementTree.tostring(root, encoding="unicode")


def _renamed(name: str, value: str, key: str) -> str:
    """An attribute's value with identifiers of this drawing's own and the page's colours."""
    if name == "id":
        return f"{key}-{value}"
    if name in ("href", f"{{{_XLINK}}}href"):
        return re.sub(r"^#", f"#{key}-", value)
    value = re.sub(r"url\(#", f"url(#{key}-", value)
    if name in ("style", "fill", "stroke"):
        value = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--{_VARIABLES[m[0]]})" if m[0] in _VARIABLES else m[0], value)
    return value
