"""The errors a user can meet: one base, four leaves.

A message names the object, what was got, what was expected and the way out; the command line prints it as
one sentence and exits with code 2.
"""

from __future__ import annotations


class LayoutOptError(Exception):
    """Base of every error that layoutopt raises on bad input."""


class LayoutError(LayoutOptError):
    """A layout that cannot exist: a mode over no axis, extents that do not cover the shape, storage too small."""


class GraphError(LayoutOptError):
    """A training graph that is malformed, unreadable or holds an operation that is not known."""


class InfeasibleError(LayoutOptError):
    """No assignment satisfies the constraints; ``conflict`` says which of them clash."""

    def __init__(self, message: str, conflict: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.conflict = conflict


class DeviceError(LayoutOptError):
    """An OpenCL device that is missing, too small, or refused a kernel; ``build_log`` holds the compiler's words."""

    def __init__(self, message: str, build_log: str = "") -> None:
        super().__init__(message)
        self.build_log = build_log
