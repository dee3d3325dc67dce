"""How a public name goes: with a warning that says since when, until when, and what to use instead.

The policy is in ``docs/library.md``. Whole functions and classes carry ``typing_extensions.deprecated``, which editors
and type checkers know; here is what that cannot do: names of the package that moved, and arguments that were renamed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["MOVED", "Deprecation", "renamed_arguments"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Deprecation:
    """One old name.

    Attributes:
        old: as users wrote it.
        new: what to write instead; for a name of the package ``module:name``.
        since: version that warns first.
        until: version that it is gone in, at least two minor versions later.
    """

    old: str
    new: str
    since: str
    until: str

    def __str__(self) -> str:
        new = self.new.replace(":", ".")
        return f"{self.old} is deprecated since layoutopt {self.since} and goes in {self.until}: use {new}"

    def warn(self, stacklevel: int = 3) -> None:
        """Tell whoever called the function that calls this, or further up."""
        warnings.warn(str(self), DeprecationWarning, stacklevel=stacklevel)


MOVED: dict[str, Deprecation] = {}
"""Old names of the package ``layoutopt``; they still work, with a warning."""


def renamed_arguments(since: str, until: str, **renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that still takes arguments by their old names.

    Args:
        since: as of :class:`Deprecation`.
        until: as of :class:`Deprecation`.
        renamed: new names by old ones.

    Raises:
        TypeError: when called with an argument under both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in renamed.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{function.__name__}() got both {old!r} and {new!r}, its name now")
                    Deprecation(f"{function.__name__}({old}=)", f"{new}=", since, until).warn()
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
