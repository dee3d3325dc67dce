"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "Status", "ok", "problem", "usable", "warning"]

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at.
        status: "ok"; "warning": works, and less well than it could; "problem": something will fail.
        seen: in one sentence.
        mend: what to do about it; empty where there is nothing.
        device: index of the device that it is about.
        facts: numbers and names for machines.
    """

    check: str
    status: Status
    seen: str
    mend: str = ""
    device: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def ok(check: str, seen: str, mend: str = "", device: int | None = None, **facts: Any) -> Finding:
    """All is well, or what is not there need not be."""
    return Finding(check, "ok", seen, mend, device, facts)


def warning(check: str, seen: str, mend: str, device: int | None = None, **facts: Any) -> Finding:
    """It works, and less well than it could."""
    return Finding(check, "warning", seen, mend, device, facts)


def problem(check: str, seen: str, mend: str, device: int | None = None, **facts: Any) -> Finding:
    """Something will fail."""
    return Finding(check, "problem", seen, mend, device, facts)


def usable(findings: Iterable[Finding]) -> bool:
    """Whether no problem was found."""
    return all(finding.status != "problem" for finding in findings)
