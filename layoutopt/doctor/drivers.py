"""Checks of the OpenCL loader and its drivers: what is installed, what of it loads, which one crashes.

The loader in pyopencl's wheels (ocl-icd) reads ``*.icd`` files, each of which names a driver's library, in the folder
that OCL_ICD_VENDORS or OPENCL_VENDOR_PATH names, else in /etc/OpenCL/vendors; and in pyopencl's own ``.libs``, where
drivers from the Python registry put themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from layoutopt.doctor.child import Told, ask_selftest, ending
from layoutopt.doctor.finding import Finding, ok, problem, warning

__all__ = ["check_drivers", "check_loader", "check_start", "driver_files"]

_VARIABLES = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")
_SYSTEM = Path("/etc/OpenCL/vendors")
_LOAD_S = 60.0
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_INSTALL = "install your GPU's driver, or one for the CPU with `pip install 'layoutopt[pocl]'`"


def check_loader() -> Finding:
    """The package pyopencl can be imported, by another process: a broken loader may crash."""
    if importlib.util.find_spec("pyopencl") is None:
        return problem("opencl loader", "pyopencl is not installed: no device can be used", "pip install pyopencl")
    code = "import pyopencl; print(pyopencl.VERSION_TEXT)"
    said, wrong = _python("-c", code)
    if wrong:
        mend = "pip install --force-reinstall pyopencl; outside its wheels, install the system's libOpenCL (ocl-icd)"
        return problem("opencl loader", f"pyopencl cannot be imported: {wrong}", mend)
    return ok("opencl loader", f"pyopencl {said}", version=said)


def driver_files() -> list[Path]:
    """The ICD files that the loader reads, in its order."""
    set_by = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    folders = [Path(set_by) if set_by else _SYSTEM]
    spec = importlib.util.find_spec("pyopencl")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / ".libs")
    out: list[Path] = []
    for folder in folders:
        out += [folder] if folder.is_file() else sorted(folder.glob("*.icd"))
    return out


def check_drivers(files: Sequence[Path] | None = None) -> list[Finding]:
    """Every ICD file names a library that loads.

    Args:
        files: those to look at; those that the loader reads by default.
    """
    out = []
    for name in _VARIABLES:
        folder = os.environ.get(name, "")
        if folder and not Path(folder).exists():
            mend = f"unset {name}, or set it to a folder of .icd files such as {_SYSTEM}"
            out.append(
                problem("drivers", f"{name} names {folder}, which is not there: the loader finds no driver", mend)
            )
    files = driver_files() if files is None else files
    if not files:
        return [*out, problem("drivers", f"no driver is installed: no .icd file in {_where()}", _INSTALL)]
    return out + [_driver(file) for file in files]


def _where() -> str:
    named = [os.environ[name] for name in _VARIABLES if os.environ.get(name)]
    return f"{named[0] if named else _SYSTEM} or beside pyopencl"


def _driver(file: Path) -> Finding:
    check = f"driver {file.name}"
    try:
        library = file.read_text(encoding="utf-8").strip().splitlines()[0].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return warning(check, f"{file} names no library", f"remove {file}, or install its driver again", file=str(file))
    beside = file.parent / library
    target = str(beside) if beside.is_file() else library
    _, wrong = _python("-c", _LOAD, target)
    if wrong:
        seen = f"{file} names {library}, which does not load: {wrong}"
        return warning(check, seen, f"install that driver again, or remove {file}", file=str(file), library=library)
    return ok(check, f"{library} ({file})", file=str(file), library=library)


def check_start(files: Sequence[Path] | None = None) -> tuple[Finding, Told]:
    """The drivers start and list devices; what they told.

    Args:
        files: the ICD files, to find out which driver crashes.
    """
    told = ask_selftest("list", silence_s=_LOAD_S)
    if told.ended or not told.of("devices"):
        guilty = _guilty(driver_files() if files is None else files) if told.ended else []
        who = f" ({', '.join(map(str, guilty))} does so alone)" if guilty else ""
        seen = f"looking for devices {told.ended or 'told nothing'} while {told.doing}{who}{_last(told)}"
        mend = "update that driver, or leave it out: set OCL_ICD_VENDORS to a folder with the .icd files of the others"
        return problem("devices", seen, mend, culprits=[str(file) for file in guilty]), told
    end = told.of("devices")[0]
    if not end["count"]:
        return problem("devices", f"no OpenCL device: {end['reason']}", _INSTALL), told
    labels = [line["label"] for line in told.of("device")]
    return ok("devices", "; ".join(f"{i}: {label}" for i, label in enumerate(labels)), count=len(labels)), told


def _guilty(files: Sequence[Path]) -> list[Path]:
    """The ICD files whose driver crashes when it is the only one."""
    return [
        file
        for file in files
        if ask_selftest("list", silence_s=_LOAD_S, environment={"OCL_ICD_VENDORS": str(file)}).ended
    ]


def _last(told: Told) -> str:
    """The last line of what a driver wrote, in brackets."""
    return f" ({told.errors.splitlines()[-1].strip()})" if told.errors else ""


def _python(*arguments: str) -> tuple[str, str]:
    """Run Python apart: what it printed, and what went wrong in one sentence."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=_LOAD_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return "", f"nothing happens for {_LOAD_S:.0f} s"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "", lines[-1] if done.returncode > 0 and lines else f"the process {ending(done.returncode)}"
