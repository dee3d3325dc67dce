"""The page: sections through a template that escapes everything but the drawings.

Part of the face.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from layoutopt.errors import LayoutOptError
from layoutopt.report.shapes import Section, cleaned

__all__ = ["check_page", "page"]


def check_page() -> None:
    """See that a page can be made, before the work that it shows.

    Raises:
        LayoutOptError: jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise LayoutOptError("a report needs jinja2: pip install 'layoutopt[report]'") from error


def page(title: str, sections: Sequence[Section]) -> str:
    """The HTML document.

    Args:
        title: of the page.
        sections: in order.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("layoutopt.report", ""),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cleaned": cleaned, "drawing": Markup}
    style = (files("layoutopt.report") / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(title=title, sections=sections, style=Markup(style)) + "\n"
