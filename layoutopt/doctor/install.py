"""Checks of the installation: Python, our packages and others of their names, needs, folders, configuration."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from layoutopt import clash
from layoutopt.doctor.finding import Finding, ok, problem, warning
from layoutopt.errors import LayoutOptError

__all__ = ["check_configuration", "check_folders", "check_memory", "check_names", "check_packages", "check_python"]

_PURPOSE = {
    "torch": "capture models",
    "onnx": "read ONNX files",
    "ray": "sweep on a Ray cluster",
    "parquet": "write Parquet tables",
    "report": "write reports",
    "tensorboard": "log for TensorBoard",
    "side": "train side networks",
    "examples": "fine-tune the pretrained text model",
    "demo": "run the demo",
    "notebook": "run the notebooks",
    "pocl": "have an OpenCL driver for the CPU",
}
_DEVELOPERS = ("all", "dev", "docs")
_LEAST_FREE_BYTES = 1 << 30
_MIB = 1 << 20


def check_python() -> Finding:
    """The interpreter and our version."""
    from layoutopt import __version__

    version = ".".join(map(str, sys.version_info[:3]))
    return ok("python", f"Python {version}, layoutopt {__version__}", python=version, layoutopt=__version__)


def check_names() -> Finding:
    """No other package hides kernels, costmodel or simulator."""
    try:
        clash.check()
    except LayoutOptError as error:
        return problem("names", str(error), "use an environment without the other package, or remove it from this one")
    return ok("names", f"{', '.join(clash.PACKAGES)} are layoutopt's own")


def check_configuration(load: Callable[[], object]) -> Finding:
    """The configuration files can be read.

    Args:
        load: reads them; raises what is wrong.
    """
    try:
        load()
    except LayoutOptError as error:
        return problem("configuration", str(error), "mend the file; `layoutopt config` shows what is in force")
    return ok("configuration", "no key or value in the configuration files is wrong")


def check_packages(distribution: str = "layoutopt") -> list[Finding]:
    """What we need is there in the versions that we need; which extras are."""
    try:
        extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        seen = f"{distribution} runs without being installed: what it needs cannot be looked up"
        return [warning("packages", seen, "pip install --editable '.[pocl]' in its folder")]
    missing, wrong, found = _state(distribution, "")
    if missing or wrong:
        seen = "; ".join([*(f"{name} is missing" for name in missing), *wrong])
        out = [problem("packages", seen, f"pip install --upgrade {distribution}")]
    else:
        out = [ok("packages", f"all {len(found)} that layoutopt needs are here", versions=found)]
    return out + [_extra(distribution, extra) for extra in extras if extra not in _DEVELOPERS]


def _extra(distribution: str, extra: str) -> Finding:
    missing, wrong, found = _state(distribution, extra)
    name, purpose = f"extra {extra}", _PURPOSE.get(extra, "more")
    install = f"pip install '{distribution}[{extra}]'"
    if extra == "torch":
        install += " (torch itself first, as CONTRIBUTING.md says)"
    if wrong:
        return warning(name, f"to {purpose}: {'; '.join(wrong)}", install, versions=found, missing=missing)
    if missing:
        seen = f"not complete, needed to {purpose} only: {', '.join(missing)} not installed"
        return ok(name, seen, install, versions=found, missing=missing)
    return ok(name, ", ".join(f"{package} {version}" for package, version in found.items()), versions=found)


def _state(distribution: str, extra: str) -> tuple[list[str], list[str], dict[str, str]]:
    """What of an extra ("" for none) is missing, is of a wrong version (a sentence each), and is found."""
    missing: list[str] = []
    wrong: list[str] = []
    found: dict[str, str] = {}
    for name, accepts, wanted in _needs(distribution, extra):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found[name] = version
        if not accepts(version):
            wrong.append(f"{name} is {version}, wanted {wanted}")
    return missing, wrong, found


def _needs(distribution: str, extra: str) -> Iterator[tuple[str, Callable[[str], bool], str]]:
    """(name, whether a version will do, the range in words) of what an extra asks for, extras of others included."""
    from packaging.requirements import Requirement

    try:
        requires = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return  # itself missing, which its own line says
    for text in requires:
        need = Requirement(text)
        marker = need.marker
        if extra and (marker is None or marker.evaluate({"extra": ""})):
            continue  # needed in any case
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        if need.name != distribution:
            yield need.name, lambda v, s=need.specifier: s.contains(v, prereleases=True), str(need.specifier)  # type: ignore[misc]
        for inner in sorted(need.extras):
            yield from _needs(need.name, inner)


def check_folders() -> list[Finding]:
    """The folders of caches and device models can be written, and have room."""
    from platformdirs import user_cache_path, user_data_path

    return [
        _folder(
            "cache folder", user_cache_path("layoutopt"), "compiled kernels are kept in a temporary folder instead"
        ),
        _folder("data folder", user_data_path("layoutopt"), "no calibration can be kept"),
    ]


def _folder(check: str, folder: Path, consequence: str) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    variable = "XDG_CACHE_HOME" if check.startswith("cache") else "XDG_DATA_HOME"
    mend = f"make it writable, or set {variable} to a folder that is"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        status = warning if check.startswith("cache") else problem
        return status(check, f"{folder} cannot be written ({error.strerror}): {consequence}", mend, folder=str(folder))
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        seen = f"{folder} has {free // _MIB} MiB left: compiled kernels and calibrations may not fit"
        return warning(check, seen, f"free some space, or set {variable}", folder=str(folder), free_bytes=free)
    return ok(check, f"{folder}, {free // _MIB} MiB free", folder=str(folder), free_bytes=free)


def check_memory() -> Finding:
    """What is left of this machine's memory."""
    try:
        free, whole = (os.sysconf(key) * os.sysconf("SC_PAGE_SIZE") for key in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return ok("memory", "this system does not say how much there is")
    free = max(free, _available_bytes())
    facts: dict[str, Any] = {"free_bytes": free, "total_bytes": whole}
    seen = f"{free // _MIB} of {whole // _MIB} MiB are free"
    if free < _LEAST_FREE_BYTES:
        mend = "close other programs; plan with --memory below what is free"
        return warning("memory", f"only {seen}: large models may not be planned or trained", mend, **facts)
    return ok("memory", seen, **facts)


def _available_bytes() -> int:
    """What Linux could give, with what it would take back from its caches."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
