"""``layoutopt doctor``: what goes wrong on this machine, and how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.show import Progress, emit, out

if TYPE_CHECKING:
    from layoutopt.doctor.finding import Finding

__all__ = ["doctor"]


def doctor(
    context: typer.Context,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Index or part of its name; all of them."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One kernel a device, not all families; no speeds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Look for what goes wrong on this machine: drivers, devices, folders, packages; exit code 1 on a problem."""
    from layoutopt import config
    from layoutopt.cli import app
    from layoutopt.doctor.examine import examine
    from layoutopt.doctor.finding import usable

    given = context.find_root().params.get("config")
    with Progress("examining", quiet=json) as bar:
        findings = examine(device, quick=quick, configuration=lambda: config.in_force(app, given), progress=bar.stage)
    good = usable(findings)
    if json:
        emit({"usable": good, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    if not good:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    for finding in findings:
        where = "" if finding.device is None else f"device {finding.device}, "
        out(f"{finding.status:<8} {where}{finding.check}: {finding.seen}")
        if finding.mend and finding.status != "ok":
            out(f"{'':<8} mend: {finding.mend}")
    bad, odd = (sum(f.status == status for f in findings) for status in ("problem", "warning"))
    out(f"{bad or 'no'} problem{'s' * (bad != 1)}, {odd or 'no'} warning{'s' * (odd != 1)} in {len(findings)} checks")
