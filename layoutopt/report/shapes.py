"""What a report is made of: sections of paragraphs, charts and tables. Values are text by then.

Part of the face.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Chart", "Section", "Table", "cleaned", "in_words", "mib", "millions", "ms", "percent", "ranked"]

T = TypeVar("T")
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?|-")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""What no XML or HTML document may hold."""


@dataclass(frozen=True)
class Table:
    """A table with a header row and a header column.

    Attributes:
        caption: what it shows, with units.
        head: names of the columns.
        rows: cells as text, as many as there are columns.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numbers(self) -> tuple[bool, ...]:
        """By column, whether it holds numbers alone."""
        return tuple(
            bool(self.rows) and all(_NUMBER.fullmatch(row[i]) for row in self.rows) for i in range(len(self.head))
        )


@dataclass(frozen=True)
class Chart:
    """A drawing, what it says in words, and the numbers behind it.

    Attributes:
        title: what is drawn.
        description: what one sees in it, for those who do not see it.
        svg: the drawing.
        table: its numbers; None where they stand in a table of the section.
    """

    title: str
    description: str
    svg: str
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        key: name of the anchor.
        title: heading.
        paragraphs: said before charts and tables.
        charts: in order.
        tables: shown open.
        folded: tables that open on demand.
        drawings: small charts, side by side where there is room.
    """

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()
    drawings: tuple[Chart, ...] = ()


def cleaned(text: str) -> str:
    """A name as a document can hold it: characters that none may hold are replaced by ``�``."""
    return _UNPRINTABLE.sub("\ufffd", text)


def ranked(items: Iterable[T], size: Callable[[T], float], most: int) -> list[T]:
    """The ``most`` largest, the largest first."""
    return sorted(items, key=lambda item: -size(item))[:most]


def ms(seconds: float) -> str:
    """Milliseconds, with the digits that a step needs."""
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def mib(count: float) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:,.2f}"


def millions(count: float) -> str:
    """A count in millions."""
    return f"{count / 1e6:,.3f}"


def percent(part: float, whole: float) -> str:
    """A share; "-" of nothing."""
    return f"{100 * part / whole:.1f}" if whole else "-"


def in_words(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
